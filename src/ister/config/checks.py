"""Settings that contradict each other, and defaults that follow from other settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from ister.config.storage import CloudBackend, MetadataBackend, StorageConfig, StorageMode
from ister.config.tree import Config
from ister.config.yaml_tree import Tree
from ister.errors import ConfigError
from ister.model import AckLevel

_BACKENDS_WITH_A_PLACE: Final = (CloudBackend.FS, CloudBackend.LOCAL, CloudBackend.MEMORY)
"""Backends whose objects are beside `wal.dir` unless `root` is set."""


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
    if storage.mode is StorageMode.WAL_CLOUD:
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


def _find_bucket_contradictions(
    storage: StorageConfig,
) -> Iterator[tuple[tuple[str, ...], ConfigError]]:
    cloud, metadata = storage.cloud, storage.metadata
    if storage.wal.dir is None:
        yield (
            ("storage.wal.dir", "storage.wal", "storage.mode"),
            ConfigError(
                "storage.wal.dir is not set, and mode 'wal_cloud' keeps messages there first",
                hint="set it, or use mode 'memory'",
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
    if config.storage.mode is StorageMode.WAL_CLOUD:
        return _fill_in_places(config)
    return _keep_only_copies(config, tree)


def _keep_only_copies(config: Config, tree: Tree) -> Config:
    """Without a bucket, local files are removed only by limits that were set."""
    named: object = tree
    for key in ("storage", "wal", "retention"):
        named = named.get(key) if isinstance(named, Mapping) else None
    limits = named if isinstance(named, Mapping) else {}
    storage = config.storage
    retention = storage.wal.retention
    if "time_minutes" not in limits:
        retention = replace(retention, time_minutes=None)
    if "size_mb" not in limits:
        retention = replace(retention, size_mb=None)
    wal = replace(storage.wal, retention=retention)
    return replace(config, storage=replace(storage, wal=wal))


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
