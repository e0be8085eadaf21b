"""Settings: one tree, from a mapping, a YAML file or a directory, frozen and checked.

    storage:
      mode: local_only            # local_only | memory
      ack: synced                 # memory | written | synced: the level of topics that name none
      codec: bincode2             # bincode2 | bincode1: of topics made from now on
      max_message_size: 10485760
      wal:
        dir: ./ister-data/wal
        cache_capacity: 1024
        cache_max_bytes: 16777216
        fsync_interval_ms: 5000
        fsync_max_batch_bytes: 10485760
        rotate_max_bytes: 536870912
        rotate_max_seconds: 3600
        stream_chunk_size: 4194304
        buffer_max_bytes: 67108864
        buffer_full: block        # block | refuse
        writer_threads: 4
        max_open_files: 256

`${NAME}` in a value is replaced by the environment variable of that name (`${NAME:-text}` has a
default), and `ISTER_STORAGE__WAL__DIR` overrides `storage.wal.dir`. A key that does not exist is
refused, with the nearest one that does. Settings are data: clocks, file systems and the like are
passed beside them, not in them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

import yaml

from ister.errors import ConfigError
from ister.limits import (
    KIB,
    MESSAGE_SIZE_BYTES_DEFAULT,
    MESSAGE_SIZE_BYTES_MAX,
    MIB,
)
from ister.model import AckLevel, Codec

__all__ = ["BufferFull", "Config", "StorageConfig", "StorageMode", "WalConfig", "load_config"]

ConfigSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | None"

_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_ENVIRONMENT_PREFIX: Final = "ISTER_"
_YAML_SUFFIXES: Final = (".yml", ".yaml")
_WHOLE_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,18}")


class _FromEnvironment(str):
    """A text that came from the environment: what it means is up to the setting it is for."""

    __slots__ = ()


class StorageMode(StrEnum):
    """Where messages go."""

    LOCAL_ONLY = "local_only"
    MEMORY = "memory"


class BufferFull(StrEnum):
    """What an append does when the buffer is full."""

    BLOCK = "block"
    REFUSE = "refuse"


def _setting(default: Any, *, low: int | None = None, high: int | None = None) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class WalConfig:
    """`storage.wal`."""

    dir: str | None = _setting(None)
    """The directory of all topics' logs. Without one, nothing is kept on disk."""
    cache_capacity: int = _setting(1024, low=1, high=1 << 24)
    """Messages kept in memory per topic for readers near the tail."""
    cache_max_bytes: int = _setting(16 * MIB, low=KIB)
    """The same in bytes, whichever is reached first."""
    fsync_interval_ms: int = _setting(5000, low=1, high=3_600_000)
    """How long written bytes may stay unsynced when nobody waits for `synced`."""
    fsync_max_batch_bytes: int = _setting(10 * MIB, low=1)
    """How many written bytes may stay unsynced when nobody waits for `synced`."""
    rotate_max_bytes: int = _setting(512 * MIB, low=4 * KIB)
    """A file of this size is followed by a new one."""
    rotate_max_seconds: int = _setting(3600, low=1)
    """A file of this age is followed by a new one at the next append."""
    stream_chunk_size: int = _setting(4 * MIB, low=64 * KIB, high=64 * MIB)
    """How much a reader reads from a file at once, and so its memory."""
    buffer_max_bytes: int = _setting(64 * MIB, low=64 * KIB)
    """Appended and not yet written bytes per topic."""
    buffer_full: BufferFull = _setting(BufferFull.BLOCK)
    """Whether an append waits for room in the buffer or is refused."""
    writer_threads: int = _setting(4, low=1, high=64)
    """Threads that write and sync for all topics together."""
    max_open_files: int = _setting(256, low=1)
    """Writer handles open at once; the longest idle ones are closed beyond that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """`storage`."""

    mode: StorageMode = _setting(StorageMode.LOCAL_ONLY)
    ack: AckLevel = _setting(AckLevel.SYNCED)
    codec: Codec = _setting(Codec.BINCODE2)
    max_message_size: int = _setting(MESSAGE_SIZE_BYTES_DEFAULT, low=1, high=MESSAGE_SIZE_BYTES_MAX)
    """The largest payload that an append takes."""
    wal: WalConfig = field(default_factory=WalConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole tree."""

    storage: StorageConfig = field(default_factory=StorageConfig)


def load_config(source: ConfigSource, environment: Mapping[str, str] | None = None) -> Config:
    """Settings from wherever they come.

    Args:
        source: A mapping of the tree; the path of a `.yml` file; a directory for data (its logs go
            to `wal` inside of it); or None, which keeps everything in memory.
        environment: Where `${NAME}` and `ISTER_…` are looked up; the process's by default.

    Raises:
        ConfigError: A key is unknown, a value is of the wrong kind or out of bounds, or two of
            them contradict each other. Names the key.
    """
    environment = os.environ if environment is None else environment
    if source is None:
        tree: dict[str, Any] = {"storage": {"mode": "memory"}}
    elif isinstance(source, Mapping):
        tree = _copy(source)
    else:
        path = _path_of(source)
        if path.endswith(_YAML_SUFFIXES):
            tree = _read_yaml(path)
        else:
            tree = {"storage": {"wal": {"dir": os.path.join(path, "wal")}}}
    _apply_environment(tree, environment)
    tree = _expand(tree, environment, "")
    config: Config = _build(Config, tree, "")
    return _check_together(config, tree)


def _path_of(source: object) -> str:
    path = os.fspath(source) if isinstance(source, str | os.PathLike) else source
    if not isinstance(path, str):
        raise ConfigError(
            f"cannot open {source!r}",
            hint="a directory, the path of an ister.yml, a mapping, or nothing",
        )
    return path


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"the config file cannot be read: {error.strerror}", path=path) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file is not valid YAML: {error}", path=path) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError("the config file does not hold a tree of keys", path=path)
    return tree


def _apply_environment(tree: dict[str, Any], environment: Mapping[str, str]) -> None:
    for name, value in sorted(environment.items()):
        if not name.startswith(_ENVIRONMENT_PREFIX) or "__" not in name:
            continue
        *parents, last = name.removeprefix(_ENVIRONMENT_PREFIX).lower().split("__")
        node = tree
        for parent in parents:
            child = node.get(parent)
            if child is None:
                child = node[parent] = {}
            if not isinstance(child, dict):
                raise ConfigError(f"{name} goes below {parent!r}, which is a single value")
            node = child
        node[last] = _FromEnvironment(value)


def _expand(value: Any, environment: Mapping[str, str], key: str) -> Any:
    if isinstance(value, dict):
        return {
            k: _expand(v, environment, f"{key}.{k}" if key else str(k)) for k, v in value.items()
        }
    if not isinstance(value, str):
        return value

    def look_up(match: re.Match[str]) -> str:
        name, default = match.groups()
        found = environment.get(name, default)
        if found is None:
            raise ConfigError(f"{key}: the environment has no variable {name}")
        return found

    if _REFERENCE.search(value) is None:
        return value
    return _FromEnvironment(_REFERENCE.sub(look_up, value))


def _build(kind: Any, tree: Any, prefix: str) -> Any:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{prefix or 'the config'} has to be a tree of keys, not {tree!r}")
    known = {item.name: item for item in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        item = known.get(str(key))
        if item is None:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown key {path!r}", hint=hint)
        default = _default_of(item)
        if is_dataclass(default):
            values[item.name] = _build(type(default), {} if value is None else value, path)
        else:
            values[item.name] = _convert(value, default, item.metadata, path)
    return kind(**values)


def _default_of(item: Any) -> Any:
    factory = item.default_factory
    return item.default if factory is MISSING else factory()


def _convert(value: Any, default: Any, bounds: Mapping[str, int | None], path: str) -> Any:
    if isinstance(default, StrEnum):
        kind = type(default)
        try:
            return kind(value)
        except ValueError as error:
            choices = ", ".join(kind)
            raise ConfigError(f"{path} is {value!r}", hint=f"one of: {choices}") from error
    if isinstance(default, int):
        if isinstance(value, _FromEnvironment) and _WHOLE_NUMBER.fullmatch(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{path} has to be a whole number, not {value!r}")
        low, high = bounds["low"], bounds["high"]
        if (low is not None and value < low) or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ConfigError(f"{path} is {value}", hint=f"it has to be {wanted}")
        return value
    if value is None:
        return None
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(f"{path} has to be a non-empty text, not {value!r}")
    return str(value)


def _check_together(config: Config, tree: Mapping[str, Any]) -> Config:
    storage = config.storage
    named = tree.get("storage") or {}
    is_in_memory = storage.mode is StorageMode.MEMORY or storage.wal.dir is None
    if is_in_memory and named.get("ack") is not None and storage.ack is not AckLevel.MEMORY:
        raise ConfigError(
            f"storage.ack is {storage.ack.value!r}, and this log keeps everything in memory",
            hint="set storage.wal.dir, or use ack 'memory'",
        )
    if storage.ack is AckLevel.TIERED:
        raise ConfigError(
            "storage.ack is 'tiered', and this log has no object store",
            hint="use 'synced', which survives power loss",
        )
    if storage.mode is StorageMode.MEMORY and storage.wal.dir is not None:
        raise ConfigError(
            "storage.mode is 'memory' and storage.wal.dir is set", hint="take one of them out"
        )
    return config
