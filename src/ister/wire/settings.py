"""The storage settings of a log that its clients may see.

Without credentials: a client adds its own. Paths are absolute, and for administrators alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ister.base.model import JsonObject
from ister.config import CloudBackend, Config, MetadataBackend
from ister.config.settings import Section, Setting, children
from ister.errors import InvalidRequestError
from ister.wire.contract import dump, parse

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_DEPTH_MAX: Final = 8
_UNDISCLOSED: Final = "undisclosed"
_DIRECTORIES: Final = (CloudBackend.FS, CloudBackend.LOCAL)
# Options that locate and describe the bucket. All others stay on the server: credentials, roles,
# profiles, files that hold them, and options that a later version of a backend may add.
_SHARED_OPTIONS: Final = frozenset(
    {
        "account_name",
        "allow_anonymous",
        "batch_max_operations",
        "checksum_algorithm",
        "default_acl",
        "default_storage_class",
        "delete_max_size",
        "disable_list_objects_v2",
        "disable_stat_with_override",
        "disable_write_with_if_match",
        "enable_request_payer",
        "enable_versioning",
        "enable_virtual_host_style",
        "endpoint",
        "predefined_acl",
        "region",
        "server_side_encryption",
        "skip_signature",
        "virtual_host_style",
    }
)


def has_local_stores(config: Config) -> bool:
    """Whether clients cannot find the bucket or the metadata without a path of the server."""
    storage = config.storage
    return storage.mode.has_bucket and (
        storage.cloud.backend in _DIRECTORIES or storage.metadata.backend is MetadataBackend.SQLITE
    )


def encode_settings(config: Config, *, shows_paths: bool = True) -> bytes:
    """Encodes the storage settings, without credentials; with the server's paths or without.

    Settings that have their default are left out, so that older clients understand the rest.
    """
    storage = _changed(config.storage)
    for section, name in (("wal", "dir"), ("metadata", "path")):
        if name in storage.get(section, {}):
            path = os.path.abspath(storage[section][name])
            # Some value: a mode may need the setting, and nothing is there on the client's machine.
            storage[section][name] = path if shows_paths else _UNDISCLOSED
    cloud = storage.get("cloud", {})
    if "root" in cloud and config.storage.cloud.backend in _DIRECTORIES:
        cloud["root"] = os.path.abspath(cloud["root"]) if shows_paths else _UNDISCLOSED
    if "options" in cloud:
        cloud["options"] = {
            name: value
            for name, value in cloud["options"].items()
            if name in _SHARED_OPTIONS and _is_plain_address(value)
        }
    metadata = storage.get("metadata", {})
    if "endpoints" in metadata:
        # Certificate paths are local to the broker, so clients are not sent them.
        scheme = "https://" if metadata.pop("tls", None) else ""
        metadata["endpoints"] = [
            item if "://" in item else f"{scheme}{item}"
            for item in metadata["endpoints"]
            if _is_plain_address(item)
        ]
    return dump({"settings": {"storage": storage}})


def decode_settings(data: bytes) -> JsonObject:
    """Decodes settings as a tree for `ister.load_config`.

    Credentials come from the client's own environment. A value that refers to that environment is
    refused: it would be sent to whatever address the server has named.

    Raises:
        InvalidRequestError: The bytes are not settings.
        UnsupportedVersionError: A newer Ister sent them.
    """
    tree = parse(data, "settings").get("settings")
    if not isinstance(tree, dict):
        raise InvalidRequestError("invalid settings: not an object")
    _refuse_references(tree)
    return tree


# Any: values have the types of their settings, which `encode_settings` knows by name.
def _changed(settings: DataclassInstance) -> dict[str, Any]:
    """Returns the settings that differ from their defaults, without those marked as secret.

    Options are returned as they are: the caller knows which of them are secret.
    """
    default = type(settings)()
    tree: dict[str, Any] = {}
    for name, declared in children(type(settings)).items():
        value = getattr(settings, name)
        is_secret = isinstance(declared, Setting) and declared.is_secret
        if (is_secret and not isinstance(value, Mapping)) or value == getattr(default, name):
            continue
        if isinstance(declared, Section):
            value = _changed(value)
        elif isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        tree[name] = value
    return tree


def _is_plain_address(value: str) -> bool:
    """Whether an address cannot contain credentials."""
    return not {"@", "?", "#"} & set(value)


def _refuse_references(value: object, depth: int = 0) -> None:
    if depth > _DEPTH_MAX:
        raise InvalidRequestError("invalid settings: nested too deep")
    if isinstance(value, Mapping):
        for name, item in value.items():
            _refuse_references(name, depth + 1)
            _refuse_references(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _refuse_references(item, depth + 1)
    elif isinstance(value, str) and "${" in value:
        raise InvalidRequestError("invalid settings: they refer to the client's environment")
