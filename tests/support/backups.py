"""Copies of the stores in memory, and putting them back, as administrators do with real ones."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from tests.support.memory_fs import MemoryFileSystem, _Directory
from tests.support.memory_metadata import MemoryMetadata
from tests.support.memory_store import MemoryObjectStore

_LEASE_SECONDS = 6.0


@dataclass(frozen=True)
class MetadataBackup:
    """A metadata store at one moment, as `etcdctl snapshot save` copies it."""

    revision: int
    entries: dict[str, Any]

    @classmethod
    def of(cls, meta: MemoryMetadata) -> MetadataBackup:
        """Copies a store."""
        entries = {key: replace(entry) for key, entry in meta._entries.items()}
        return cls(meta.revision, entries)

    def put_back(self, meta: MemoryMetadata, *, bump: int = 0) -> None:
        """Has a store be as it was: its keys, its revisions, and leases with their whole time.

        Args:
            meta: The store; processes may be using it.
            bump: What `etcdutl --bump-revision` adds to the store's revision, not to the keys'.
        """
        with meta._lock:
            meta.delayed.clear()
            meta._entries = {key: replace(entry) for key, entry in self.entries.items()}
            meta._keys = sorted(meta._entries)
            ids = {entry.lease_id for entry in meta._entries.values()} - {None}
            meta._lease_ends = dict.fromkeys(ids, meta.boottime() + _LEASE_SECONDS)
            meta.revision = self.revision + bump


@dataclass(frozen=True)
class BucketBackup:
    """A bucket at one moment."""

    objects: dict[str, Any]

    @classmethod
    def of(cls, store: MemoryObjectStore) -> BucketBackup:
        """Copies a bucket."""
        return cls(dict(store._objects))

    def put_back(self, store: MemoryObjectStore) -> None:
        """Objects made since are gone, and those deleted or replaced since are back."""
        store._objects = dict(self.objects)


@dataclass(frozen=True)
class DiskBackup:
    """A machine's files at one moment, as a process reads them."""

    root: _Directory

    @classmethod
    def of(cls, fs: MemoryFileSystem) -> DiskBackup:
        """Copies a disk."""
        return cls(_flat_copy(fs._root))

    def names(self, path: str) -> list[str]:
        """What a directory had; empty if there was none."""
        found = find_directory(self.root, path)
        return [] if found is None else sorted(found.entries)

    def put_back(
        self, fs: MemoryFileSystem, path: str | None = None, names: Collection[str] | None = None
    ) -> None:
        """Puts back the whole disk, or a directory, or some of its files.

        Args:
            fs: The disk; no process uses it.
            path: The directory.
            names: What of it; without, what is new there goes.
        """
        if path is None:
            fs._root = _flat_copy(self.root)
            return
        old = find_directory(self.root, path)
        fs.make_directories(path)
        now = find_directory(fs._root, path)
        assert old is not None
        assert now is not None
        kept = {} if names is None else dict(now.entries)
        wanted = old.entries if names is None else {name: old.entries[name] for name in names}
        now.entries = {**kept, **copy.deepcopy(wanted)}
        fs._root = _flat_copy(fs._root)


def find_directory(root: _Directory, path: str) -> _Directory | None:
    """A directory below another one."""
    node: object = root
    for part in path.strip("/").split("/"):
        node = node.entries.get(part) if isinstance(node, _Directory) else None
    return node if isinstance(node, _Directory) else None


def _flat_copy(directory: _Directory) -> _Directory:
    """A copy of a tree as a process reads it, all of it durable."""
    entries: dict[str, Any] = {}
    for name, node in directory.entries.items():
        if isinstance(node, _Directory):
            entries[name] = _flat_copy(node)
        else:
            data = bytearray(node.cache)
            entries[name] = replace(node, cache=data, disk=bytearray(data), pending=[])
    return _Directory(entries=entries, durable=dict(entries))
