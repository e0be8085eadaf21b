"""Other names of settings: keys of Danube's design documents that Ister spells differently.

A document's key is replaced by its setting before values are converted, so that files, mappings and
`ISTER_…` variables take both. A key and its setting together are refused, except where the
environment overrides the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ister.config.values import FromEnvironment, Refusal, refuse_unknown
from ister.errors import ConfigError, IsterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """Another name of a setting."""

    key: str
    """The other name; `*` at its end stands for any name, the same as in `setting`."""
    setting: str
    backend: str | None = None
    """The only `storage.cloud.backend` that it is used with; None for every one."""
    prefix: str = ""
    """What comes before its value in the setting's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedAlias:
    """An alias that was given."""

    key: str
    setting: str | None
    """What it became; None if it is not used."""
    reason: str | None = None
    """Why it is not used."""


ALIASES: Final = (
    Alias(key="storage.wal.max_batch_bytes", setting="storage.wal.fsync_max_batch_bytes"),
    Alias(key="storage.wal.max_file_bytes", setting="storage.wal.rotate_max_bytes"),
    Alias(key="storage.wal.max_file_seconds", setting="storage.wal.rotate_max_seconds"),
    Alias(
        key="storage.uploader.rotation.max_object_bytes",
        setting="storage.uploader.max_object_bytes",
    ),
    Alias(
        key="storage.uploader.rotation.max_object_seconds",
        setting="storage.uploader.max_object_seconds",
    ),
    Alias(key="storage.cloud.s3.*", setting="storage.cloud.options.*", backend="s3"),
    Alias(
        key="storage.cloud.gcs.bucket", setting="storage.cloud.root", backend="gcs", prefix="gs://"
    ),
    Alias(key="storage.cloud.gcs.*", setting="storage.cloud.options.*", backend="gcs"),
    # The documents do not say in which section these two are.
    *(
        Alias(key=f"{section}{name}", setting=f"dispatch.{name}")
        for name in ("progress_flush_interval_seconds", "progress_min_offset_delta")
        for section in ("", "storage.")
    ),
)
_BACKEND: Final = "storage.cloud.backend"
_SECTIONS: Final = ("storage.uploader.rotation", "storage.cloud.s3", "storage.cloud.gcs")
"""Sections that only the documents have."""

_Tree = dict[str, object]


def replace_aliases(
    tree: _Tree, expand: Callable[[object], object], refuse: Refusal
) -> list[UsedAlias]:
    """Replaces the aliases in a tree by their settings, and returns those that were there.

    Args:
        tree: Changed in place.
        expand: Replaces references to variables in a value.
        refuse: Takes the errors.
    """
    backend = expand(_find(tree, _BACKEND))
    used: dict[str, UsedAlias] = {}
    for alias in ALIASES:
        for key, value in _take(tree, alias.key):
            name = key.removeprefix(alias.key.removesuffix("*"))
            setting = alias.setting.replace("*", name)
            found = UsedAlias(key=key, setting=setting)
            if "." in name:
                hint = "names of options have no dot"
                refuse(key, ConfigError(f"unknown key {key!r}", hint=hint))
                continue
            if value is None:
                continue
            if alias.backend is not None and backend is None:
                text = f"{key} is set, and {_BACKEND} is not"
                refuse(key, ConfigError(text, hint=f"set it to {alias.backend!r}"))
                continue
            if alias.backend is not None and backend != alias.backend:
                reason = f"{_BACKEND} is not {alias.backend!r}"
                used[key] = UsedAlias(key=key, setting=None, reason=reason)
                continue
            if alias.prefix and isinstance(value, str):
                # Of its own type: it says where the value is from.
                value = type(value)(f"{alias.prefix}{value}")  # noqa: PLW2901
            other = _find(tree, setting)
            if other is None or _overrides(value, other):
                _put(tree, setting, value)
            elif _overrides(other, value):
                reason = f"{setting} is set in the environment"
                found = UsedAlias(key=key, setting=None, reason=reason)
            elif alias.prefix and _is_below(expand(other), expand(value)):
                found = UsedAlias(key=key, setting=None, reason=f"it is in {setting}, too")
            else:
                earlier = [one.key for one in used.values() if one.setting == setting]
                text = f"{key} and {(earlier or [setting])[0]} are both set, and mean the same"
                refuse(key, ConfigError(text, hint="remove one of them"))
                continue
            used[key] = found
    _drop_sections(tree, refuse)
    return list(used.values())


def name_as_given(error: IsterError, given_as: Mapping[str, str]) -> None:
    """Adds to an error the aliases that were written for the settings it names."""
    keys = [
        key
        for setting, key in given_as.items()
        if re.search(rf"{re.escape(setting)}(?!\w)", error.message)
    ]
    if keys:
        error.message += f" (given as {', '.join(keys)})"


def _overrides(value: object, other: object) -> bool:
    return isinstance(value, FromEnvironment) and not isinstance(other, FromEnvironment)


def _is_below(root: object, bucket: object) -> bool:
    scheme, _, path = str(root).partition("://")
    name = str(bucket).partition("://")[2].rstrip("/")
    return scheme in ("gs", "gcs") and f"{path}/".startswith(f"{name}/")


def _find(tree: _Tree, path: str) -> object:
    at: object = tree
    for name in path.split("."):
        at = at.get(name) if isinstance(at, dict) else None
    return at


def _take(tree: _Tree, key: str) -> Iterator[tuple[str, object]]:
    """Removes a key from a tree, or all below a `*`, and yields what was there."""
    path, _, name = key.rpartition(".")
    section = _find(tree, path) if path else tree
    if isinstance(section, dict):
        for one in [name] if name != "*" else list(section):
            if one in section:
                yield f"{path}.{one}" if path else one, section.pop(one)


def _put(tree: _Tree, path: str, value: object) -> None:
    *parents, last = path.split(".")
    at: object = tree
    for name in parents:
        if not isinstance(at, dict):
            return  # A single value where a section belongs: refused when it is built.
        if at.get(name) is None:
            at[name] = {}
        at = at[name]
    if isinstance(at, dict):
        at[last] = value


def _drop_sections(tree: _Tree, refuse: Refusal) -> None:
    """Removes the sections that only the documents have, and refuses what is left in them."""
    for path in _SECTIONS:
        known = [one.key.rpartition(".")[2] for one in ALIASES if one.key.startswith(f"{path}.")]
        for _, section in _take(tree, path):
            if section is not None and not isinstance(section, dict):
                refuse(path, ConfigError(f"{path} must be a tree of keys"))
                continue
            for name in section or ():
                refuse_unknown(path, str(name), known, refuse)
