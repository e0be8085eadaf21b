"""`storage.cloud` in opendal's words: backend, root and options.

Owns: which settings a backend has, their defaults, and which of them are secret. Does not own:
where settings come from, or the operator that is made of them.

Errors name the setting and never repeat its value: people put credentials into addresses.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ister.config import expand_home
from ister.errors import ConfigError
from ister.objectstore.store_errors import error_code, redact

_SECRET_OPTION: Final = re.compile(r"key|secret|token|credential|password", re.IGNORECASE)
_NO_SECRET_OPTIONS: Final = frozenset({"credential_file", "credential_path"})
_OF_ROOT: Final = frozenset({"bucket", "container", "root"})
"""Options of opendal that `storage.cloud.root` gives."""
_SECRET_VARIABLES: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A scheme with its settings, in opendal's words."""

    scheme: str
    location: str
    settings: Mapping[str, str] = field(repr=False)
    root: str = ""
    """The directory, for `fs`."""


def parse_backend(backend: str, root: str, options: Mapping[str, str]) -> Backend:
    """What `storage.cloud` says, in opendal's words.

    Raises:
        ConfigError: The backend is unknown, the root malformed, or an option missing.
    """
    if given := _OF_ROOT & options.keys():
        raise ConfigError(
            f"storage.cloud.options.{min(given)} is not an option",
            hint="put it in storage.cloud.root",
        )
    if backend in ("fs", "local"):
        if not root or "://" in root:
            raise _bad_root("a directory")
        directory = os.path.abspath(root)
        return Backend(
            scheme="fs",
            location=f"fs://{directory}",
            settings={**options, "root": directory},
            root=directory,
        )
    if backend == "memory":
        return Backend(scheme="memory", location="memory://", settings={})
    if backend == "s3":
        bucket, prefix = _split_root(root, ("s3",))
        settings = _s3_settings(bucket, options)
    elif backend == "gcs":
        bucket, prefix = _split_root(root, ("gs", "gcs"))
        settings = {"bucket": bucket, **_renamed(options, {"credential_file": "credential_path"})}
        if "credential_path" in settings:
            settings["credential_path"] = expand_home(settings["credential_path"])
    elif backend == "azblob":
        bucket, prefix = _split_root(root, ("azblob",))
        settings = {"container": bucket, **options}
        if "endpoint" not in settings and "account_name" in settings:
            settings["endpoint"] = f"https://{settings['account_name']}.blob.core.windows.net"
    else:
        raise ConfigError(
            f"storage.cloud.backend {backend!r} is unknown",
            hint="it is one of fs (local), s3, gcs, azblob, memory",
        )
    return Backend(
        scheme=backend,
        location=f"{backend}://{bucket}/{prefix}".rstrip("/"),
        settings={**settings, "root": f"/{prefix}"},
    )


def _s3_settings(bucket: str, options: Mapping[str, str]) -> dict[str, str]:
    settings = _renamed(
        options,
        {
            "access_key": "access_key_id",
            "secret_key": "secret_access_key",
            "virtual_host_style": "enable_virtual_host_style",
        },
    )
    if "endpoint" not in settings and (endpoint := os.environ.get("AWS_ENDPOINT_URL")):
        settings["endpoint"] = endpoint
    has_key, has_secret = "access_key_id" in settings, "secret_access_key" in settings
    if has_key != has_secret:
        names = ("access_key", "access_key_id", "secret_key", "secret_access_key")
        given = next(name for name in names if name in options)
        raise ConfigError(
            f"storage.cloud.options.{given} is set without {names[2 if has_key else 0]}",
            hint="give both, or neither to take them from the environment",
        )
    if has_key:
        # What was given holds; a profile of the machine does not mix in.
        settings.setdefault("disable_config_load", "true")
        settings.setdefault("disable_ec2_metadata", "true")
    if "endpoint" in settings:
        if not {"AWS_REGION", "AWS_DEFAULT_REGION"} & set(os.environ) or has_key:
            settings.setdefault("region", "us-east-1")
    elif "." not in bucket:
        # AWS's own form of address; its certificates do not cover buckets with dots.
        settings.setdefault("enable_virtual_host_style", "true")
    settings["bucket"] = bucket
    return settings


def _renamed(options: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    return {names.get(name, name): value for name, value in options.items()}


def _split_root(root: str, schemes: tuple[str, ...]) -> tuple[str, str]:
    expected = f"{schemes[0]}://bucket/prefix"
    scheme, separator, rest = root.partition("://")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    parts = prefix.split("/") if prefix else []
    if (
        not separator
        or scheme not in schemes
        or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", bucket)
        or any(part in ("", ".", "..") for part in parts)
        or any(character in "?#" or not character.isprintable() for character in prefix)
    ):
        raise _bad_root(expected)
    return bucket, prefix


def _bad_root(expected: str) -> ConfigError:
    # The root itself is not repeated: people put credentials into addresses.
    return ConfigError(f"storage.cloud.root is not of the form {expected}")


def check_option_names(backend: Backend) -> None:
    """Refuses options that opendal would ignore: a typo would go unnoticed.

    Raises:
        ConfigError: There is one.
    """
    if backend.scheme == "memory":
        return
    from opendal import config  # noqa: PLC0415

    kinds: dict[str, type] = {
        "fs": config.FsConfig,
        "s3": config.S3Config,
        "gcs": config.GcsConfig,
        "azblob": config.AzblobConfig,
    }
    known = set(kinds[backend.scheme].__annotations__) - {"scheme", "atomic_write_dir"}
    unknown = sorted(set(backend.settings) - known)
    if unknown:
        names = ", ".join(f"storage.cloud.options.{name}" for name in unknown)
        raise ConfigError(
            f"unknown to backend {backend.scheme!r}: {names}",
            hint=f"known are {', '.join(sorted(known - _OF_ROOT))}",
        )


def hidden_values(options: Mapping[str, str]) -> tuple[str, ...]:
    """The values, given or in the environment, that no text may carry; the longest first."""
    values = {
        value
        for name, value in options.items()
        if _SECRET_OPTION.search(name) and name not in _NO_SECRET_OPTIONS
    }
    values.update(os.environ.get(name, "") for name in _SECRET_VARIABLES)
    # One may contain another.
    return tuple(sorted((value for value in values if value), key=len, reverse=True))


def config_error(error: BaseException, hidden: tuple[str, ...]) -> ConfigError:
    """What opendal has against the settings, without their secrets."""
    text = redact(str(error), hidden).split("=> ", 1)[-1].split("\n", 1)[0]
    code = error_code(error)
    return ConfigError(f"storage.cloud.options: {code + ': ' if code else ''}{text}")
