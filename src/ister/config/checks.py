"""Settings that contradict each other, and defaults that follow from other settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from ister.base.limits import KIB, NAME_PART_CHARACTERS_MAX
from ister.base.model import AckLevel
from ister.config.storage import CloudBackend, Engine, MetadataBackend, StorageConfig, StorageMode
from ister.config.tree import Config
from ister.config.yaml_tree import Tree
from ister.errors import ConfigError

_BACKENDS_WITH_A_PLACE: Final = (CloudBackend.FS, CloudBackend.LOCAL, CloudBackend.MEMORY)
"""Backends whose objects are beside `wal.dir` unless `root` is set."""
# Shares of `storage.bucket.memory_max_bytes`. Small files are dropped soon after their upload, and
# a topic whose uploads fail must not take the memory of all others.
_FILE_SHARE: Final = 64
_CACHE_SHARE: Final = 1024
_BYTES_MIN: Final = 64 * KIB
_SYNC_MS: Final = 100
_BUFFER_SHARE: Final = 8
_LAG_SHARE: Final = 4
# Of Linux, in bytes; a path's terminating zero counts.
_NAME_BYTES_MAX: Final = 255
_PATH_BYTES_MAX: Final = 4095
_BELOW_BYTES: Final = 2 * NAME_PART_CHARACTERS_MAX + 160
"""Room for the names below a directory: namespace, topic, and the longest name of a file."""
_LIMITS: Final = ("time_minutes", "size_mb")
_FLOORS: Final = ("min_minutes", "min_bytes")
_SQLITE_BYTES_MAX: Final = 504
"""SQLite's limit of 512 bytes for a path includes `-journal`."""


def find_contradictions(
    config: Config, tree: Tree
) -> Iterator[tuple[tuple[str, ...], ConfigError]]:
    """What does not go together, with the keys concerned."""
    storage = config.storage
    named = tree.get("storage")
    named = named if isinstance(named, Mapping) else {}
    is_in_memory = storage.mode is StorageMode.MEMORY or (
        storage.mode is StorageMode.LOCAL_ONLY and storage.wal.dir is None
    )
    keys: tuple[str, ...] = ("storage.ack", "storage.mode", "storage.wal.dir")
    if is_in_memory and named.get("ack") is not None and storage.ack is not AckLevel.MEMORY:
        yield (
            keys,
            ConfigError(
                f"storage.ack is {storage.ack.value!r}, and this log keeps everything in memory",
                hint="set storage.wal.dir, or use ack 'memory'",
            ),
        )
    if storage.mode is StorageMode.MEMORY and storage.wal.dir is not None:
        yield (
            ("storage.wal.dir", "storage.mode"),
            ConfigError(
                "storage.mode is 'memory' and storage.wal.dir is set", hint="remove one of them"
            ),
        )
    yield from _find_unusable_paths(_fill_in_places(config).storage)
    if storage.mode is StorageMode.BUCKET:
        yield from _find_diskless_contradictions(storage, has_ack=named.get("ack") is not None)
    yield from _find_mixed_retention(storage, _retention_in(tree))
    if storage.mode.has_bucket:
        yield from _find_bucket_contradictions(storage)
        return
    if storage.ack is AckLevel.TIERED and not is_in_memory:
        yield (
            ("storage.ack", "storage.mode"),
            ConfigError(
                f"storage.ack is 'tiered', and storage.mode {storage.mode.value!r} "
                "has no object store",
                hint="use 'synced', which survives power loss, or mode 'wal_cloud'",
            ),
        )
    for section in ("uploader", "cloud", "cloud_reader", "metadata"):
        if named.get(section):
            yield (
                (f"storage.{section}", "storage.mode"),
                ConfigError(
                    f"storage.{section} is set, and storage.mode {storage.mode.value!r} "
                    "has no bucket",
                    hint="remove it, or use mode 'wal_cloud'",
                ),
            )


def _retention_in(tree: Tree) -> Tree:
    """`storage.wal.retention` as it was given."""
    named: object = tree
    for key in ("storage", "wal", "retention"):
        named = named.get(key) if isinstance(named, Mapping) else None
    return named if isinstance(named, Mapping) else {}


def _find_mixed_retention(
    storage: StorageConfig, named: Tree
) -> Iterator[tuple[tuple[str, ...], ConfigError]]:
    """Yields floors that are set beside limits, or without a bucket."""
    prefix = "storage.wal.retention"
    floors = [f"{prefix}.{name}" for name in _FLOORS if named.get(name) is not None]
    limits = [f"{prefix}.{name}" for name in _LIMITS if named.get(name) is not None]
    if floors and limits:
        yield (
            (floors[0], limits[0]),
            ConfigError(
                f"{floors[0]} and {limits[0]} are both set: with a limit files are removed by age "
                "or by size, with a floor only if age and size allow it",
                hint="remove one of them",
            ),
        )
    if floors and not storage.mode.has_bucket:
        yield (
            (floors[0], "storage.mode"),
            ConfigError(
                f"{floors[0]} is set, and storage.mode {storage.mode.value!r} has no bucket: with "
                "a floor only uploaded files are removed",
                hint="use time_minutes or size_mb, or mode 'wal_cloud'",
            ),
        )


def _find_unusable_paths(storage: StorageConfig) -> Iterator[tuple[tuple[str, ...], ConfigError]]:
    """Yields paths that the operating system or SQLite would refuse after some files are made."""
    cloud, metadata = storage.cloud, storage.metadata
    has_bucket = storage.mode.has_bucket
    is_local = has_bucket and cloud.backend in (CloudBackend.FS, CloudBackend.LOCAL)
    is_sqlite = has_bucket and metadata.backend is MetadataBackend.SQLITE
    for key, path, most in (
        ("storage.wal.dir", storage.wal.dir, _PATH_BYTES_MAX - _BELOW_BYTES),
        ("storage.cloud.root", cloud.root if is_local else None, _PATH_BYTES_MAX - _BELOW_BYTES),
        ("storage.metadata.path", metadata.path if is_sqlite else None, _SQLITE_BYTES_MAX),
    ):
        if path is None:
            continue
        try:
            names = os.path.abspath(path).encode().split(b"/")
        except UnicodeEncodeError:
            yield (key,), ConfigError(f"{key} is not valid Unicode: {path!r}")
            continue
        length, longest = sum(map(len, names)) + len(names) - 1, max(map(len, names))
        reason = None
        if length > most:
            reason = f"{key} has {length} bytes as an absolute path; at most {most} are possible"
        elif longest > _NAME_BYTES_MAX:
            reason = f"{key} has a name of {longest} bytes; at most {_NAME_BYTES_MAX} are possible"
        if reason is not None:
            # With the directory's, which the others follow from.
            yield (key, "storage.wal.dir"), ConfigError(reason, hint="use a shorter path")


def _find_diskless_contradictions(
    storage: StorageConfig, *, has_ack: bool
) -> Iterator[tuple[tuple[str, ...], ConfigError]]:
    """Yields settings that contradict mode `bucket`, which keeps nothing on disk."""
    cloud, metadata = storage.cloud, storage.metadata
    if has_ack and storage.ack is not AckLevel.TIERED:
        yield (
            ("storage.ack", "storage.mode"),
            ConfigError(
                f"storage.ack is {storage.ack.value!r}, and storage.mode 'bucket' keeps messages "
                "only in the bucket",
                hint="remove storage.ack (mode 'bucket' implies 'tiered'), or use mode 'wal_cloud'",
            ),
        )
    if storage.wal.dir is not None:
        yield (
            ("storage.wal.dir", "storage.mode"),
            ConfigError(
                "storage.mode is 'bucket', which keeps no local files, and storage.wal.dir is set",
                hint="remove storage.wal.dir, or use mode 'wal_cloud'",
            ),
        )
    if cloud.root is None and cloud.backend in (CloudBackend.FS, CloudBackend.LOCAL):
        yield (
            ("storage.cloud.root", "storage.cloud.backend", "storage.mode"),
            ConfigError(
                "storage.cloud.root is not set, and has no default with storage.mode 'bucket' and "
                f"storage.cloud.backend {cloud.backend.value!r}",
                hint="use backend s3, gcs or azblob, or set storage.cloud.root to a directory that "
                "all brokers share",
            ),
        )
    if metadata.backend is MetadataBackend.SQLITE and metadata.path is None:
        yield (
            ("storage.metadata.backend", "storage.metadata.path", "storage.mode"),
            ConfigError(
                "storage.metadata.backend is 'sqlite', which needs a local file, and "
                "storage.mode 'bucket' keeps none",
                hint="use backend 'etcd', or set storage.metadata.path to a file that is kept",
            ),
        )
    if storage.uploader.engine is Engine.SPARK:
        yield (
            ("storage.uploader.engine", "storage.mode"),
            ConfigError(
                "storage.uploader.engine is 'spark', and with storage.mode 'bucket' each broker "
                "uploads its own topics",
                hint="use engine 'auto'",
            ),
        )


def _find_bucket_contradictions(
    storage: StorageConfig,
) -> Iterator[tuple[tuple[str, ...], ConfigError]]:
    cloud, metadata = storage.cloud, storage.metadata
    if storage.wal.dir is None and storage.mode is StorageMode.WAL_CLOUD:
        yield (
            ("storage.wal.dir", "storage.wal", "storage.mode"),
            ConfigError(
                "storage.wal.dir is not set, and mode 'wal_cloud' keeps messages there first",
                hint="set it, or use mode 'bucket' or 'memory'",
            ),
        )
    if cloud.root is None and cloud.backend not in _BACKENDS_WITH_A_PLACE:
        yield (
            ("storage.cloud.root", "storage.cloud.backend"),
            ConfigError(
                f"storage.cloud.root is not set, and backend {cloud.backend.value!r} needs one",
                hint="for example s3://bucket/prefix",
            ),
        )
    if metadata.backend is MetadataBackend.ETCD and not metadata.endpoints:
        yield (
            ("storage.metadata.endpoints", "storage.metadata.backend"),
            ConfigError(
                "storage.metadata.endpoints is empty, and backend 'etcd' needs at least one",
                hint="for example ['127.0.0.1:2379']",
            ),
        )
    if not metadata.root_prefix.startswith("/") or metadata.root_prefix.endswith("/"):
        yield (
            ("storage.metadata.root_prefix",),
            ConfigError(
                f"storage.metadata.root_prefix is {metadata.root_prefix!r}",
                hint="it begins with '/' and does not end with one",
            ),
        )


def complete(config: Config, tree: Tree) -> Config:
    """Fills in the defaults that depend on other settings."""
    config = _drop_default_limits(config, tree)
    if config.storage.mode is StorageMode.WAL_CLOUD:
        return _fill_in_places(config)
    if config.storage.mode is StorageMode.BUCKET:
        return _keep_small(config)
    return config


def _drop_default_limits(config: Config, tree: Tree) -> Config:
    """Without a bucket, or with floors, local files are not removed by limits that nobody set."""
    storage, named = config.storage, _retention_in(tree)
    retention = storage.wal.retention
    if storage.mode.has_bucket and not retention.has_floors:
        return config
    if "time_minutes" not in named:
        retention = replace(retention, time_minutes=None)
    if "size_mb" not in named:
        retention = replace(retention, size_mb=None)
    wal = replace(storage.wal, retention=retention)
    return replace(config, storage=replace(storage, wal=wal))


def _keep_small(config: Config) -> Config:
    """Settings of mode `bucket`: ack level `tiered`, and small files, caches and buffers."""
    storage = config.storage
    memory, wal, uploader = storage.bucket.memory_max_bytes, storage.wal, storage.uploader
    file_bytes = max(_BYTES_MIN, memory // _FILE_SHARE)
    wal = replace(
        wal,
        # A sync costs nothing here, and only what is synced is uploaded.
        fsync_interval_ms=min(wal.fsync_interval_ms, _SYNC_MS),
        fsync_max_batch_bytes=min(wal.fsync_max_batch_bytes, file_bytes),
        rotate_max_bytes=min(wal.rotate_max_bytes, file_bytes),
        # The files are in memory, too: a second copy of the newest messages has to be small.
        cache_max_bytes=min(wal.cache_max_bytes, max(_BYTES_MIN, memory // _CACHE_SHARE)),
        buffer_max_bytes=min(wal.buffer_max_bytes, memory // _BUFFER_SHARE),
    )
    uploader = replace(
        uploader,
        engine=Engine.EMBEDDED if uploader.engine is Engine.AUTO else uploader.engine,
        max_lag_bytes=min(uploader.max_lag_bytes, memory // _LAG_SHARE),
    )
    storage = replace(storage, ack=AckLevel.TIERED, wal=wal, uploader=uploader)
    return replace(config, storage=storage)


def _fill_in_places(config: Config) -> Config:
    """Fills in paths that follow from `wal.dir`."""
    storage = config.storage
    if storage.wal.dir is None:
        return config
    home = os.path.dirname(os.path.abspath(storage.wal.dir))
    cloud, metadata = storage.cloud, storage.metadata
    if cloud.root is None:
        cloud = replace(cloud, root=os.path.join(home, "objects"))
    if metadata.backend is MetadataBackend.SQLITE and metadata.path is None:
        metadata = replace(metadata, path=os.path.join(home, "metadata.db"))
    return replace(config, storage=replace(storage, cloud=cloud, metadata=metadata))
