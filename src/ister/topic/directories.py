"""The directories of a log's topics: their file system, their paths and the names in use.

Owns: a log's root and its lock, the paths below it, a cache of the names there, and how a topic's
directory is removed. The root is locked, so no other process creates directories in it: each
directory is listed once.

Removing a directory: rename it to a name that no topic can have (commit point) · remove its files.
A crash leaves the directory, or one with the other name, which the next `lock` removes.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, Protocol

from ister.base import failpoints
from ister.base.clock import Clock
from ister.base.model import TopicName
from ister.config import StorageConfig, StorageMode
from ister.errors import IsterError, NotFoundError, TopicNameError
from ister.fs.base import FileLock, FileSystem
from ister.fs.local import LocalFileSystem
from ister.fs.memory import MemoryFileSystem
from ister.wal.directory import LOCK_NAME, WalDirectory

_MEMORY_ROOT: Final = "/memory"
_REMOVED_SUFFIX: Final = ".removed"


class _Closable(Protocol):
    def close(self) -> None: ...


# Logs that were dropped without `close`, by root. Their threads run, and they hold their locks.
_abandoned: Final[dict[str, _Closable]] = {}


def open_root(
    storage: StorageConfig, *, fs: FileSystem | None, clock: Clock
) -> tuple[FileSystem, str | None]:
    """The file system and the root of the log with these settings; no root without files.

    With `storage.mode: bucket` files are in memory, so they belong to this process alone, which is
    a node of its own. Otherwise they are on the machine's file system. `fs` replaces either.
    """
    if storage.mode is StorageMode.BUCKET:
        return fs or MemoryFileSystem(clock=clock), _MEMORY_ROOT
    fs = fs or LocalFileSystem()
    if storage.mode is StorageMode.MEMORY or storage.wal.dir is None:
        return fs, None
    # Absolute, so that a program may change its working directory.
    return fs, os.path.abspath(storage.wal.dir)


class TopicDirectories:
    """Paths of topics, and a cache of the names that exist. Thread-safe."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self.root = root
        self._fs = fs
        self._lock = threading.Lock()
        # By directory: each name in it by its casefolded form.
        self._folded: dict[str, dict[str, str]] = {}
        self._durable: set[str] = set()
        self._held: FileLock | None = None

    def lock(self) -> None:
        """Makes the root where missing, locks it, and completes removals that were interrupted.

        Raises:
            DirectoryLockedError: Another process has it open.
        """
        if (dropped := _abandoned.pop(self.root, None)) is not None:
            with suppress(IsterError):
                dropped.close()
        self._fs.make_directories(self.root)
        self._held = self._fs.lock(f"{self.root}/{LOCK_NAME}")
        try:
            for namespace in self._fs.list_directory(self.root):
                with suppress(IsterError):  # a file beside the namespaces, or one to be tried later
                    for topic in self._fs.list_directory(f"{self.root}/{namespace}"):
                        if topic.endswith(_REMOVED_SUFFIX):
                            remove_directory(self._fs, f"{self.root}/{namespace}/{topic}")
        except BaseException:
            self.unlock()
            raise

    def remove(self, name: TopicName) -> None:
        """Removes a topic's directory and what is in it; one that does not exist is fine."""
        path = self.directory_of(name).path
        removed = f"{path}{_REMOVED_SUFFIX}"
        remove_directory(self._fs, removed)
        if self._fs.exists(path):
            self._fs.rename(path, removed)
            self._fs.sync_directory(path.rpartition("/")[0])
            failpoints.reach("delete.after_rename")
            remove_directory(self._fs, removed)

    def abandon(self, log: _Closable) -> None:
        """Keeps a log that was dropped without `close`, until its directory is opened again.

        Its topics may be in use, and continue to work. Called by a finalizer, in any thread.
        """
        if not isinstance(self._fs, LocalFileSystem):
            return  # nothing outlasts it
        _abandoned[self.root] = log
        warnings.warn(
            f"unclosed log {self.root}: close it, or use it in a `with` block",
            ResourceWarning,
            stacklevel=3,
            source=log,
        )

    def unlock(self) -> None:
        """Unlocks the root. May be called twice."""
        if self._held is not None:
            self._held.release()

    def directory_of(self, name: TopicName) -> WalDirectory:
        """A topic's directory, which need not exist."""
        path = f"{self.root}/{name.namespace}/{name.topic}"
        return WalDirectory(self._fs, path, durable=self._durable)

    def add(self, name: TopicName) -> None:
        """Adds a topic's directory, which the caller creates, to the cache."""
        with self._lock:
            for parent, child in self._levels(name):
                self._find(parent, child)
                self._folded[parent][child.casefold()] = child

    def _levels(self, name: TopicName) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.root, name.namespace), (f"{self.root}/{name.namespace}", name.topic)

    def refuse_twin(self, name: TopicName) -> None:
        """Refuses a name that differs from an existing one only in case.

        On a case-insensitive file system the two would be one directory, so copying the log there
        would mix them.

        Raises:
            TopicNameError: The name differs only in case.
        """
        with self._lock:
            for parent, child in self._levels(name):
                existing = self._find(parent, child)
                if existing != child and self._fs.exists(f"{parent}/{existing}"):
                    shown = f"{parent}/{child}".removeprefix(self.root)
                    raise TopicNameError(
                        f"{shown!r} differs from an existing name in case alone",
                        hint=f"the existing one is {existing!r}",
                    )

    def _find(self, parent: str, child: str) -> str:
        """The name in `parent` that equals `child` except for case; `child` if there is none.

        The directory may have been removed since. `_lock` is held.
        """
        names = self._folded.get(parent)
        if names is None:
            try:
                listed = self._fs.list_directory(parent)
            except NotFoundError:
                listed = []
            names = self._folded[parent] = {one.casefold(): one for one in listed}
        return names.get(child.casefold(), child)


def list_directories(fs: FileSystem, root: str) -> Iterator[TopicName]:
    """The topics that have something below `root`, without what was set aside or is being removed.

    Beside the namespaces are files of the log, whose names begin with a dot, and stray ones.
    """
    for namespace in fs.list_directory(root):
        if namespace.startswith("."):
            continue
        with suppress(IsterError):  # a file
            for topic in fs.list_directory(f"{root}/{namespace}"):
                with suppress(TopicNameError):
                    yield TopicName.parse(f"/{namespace}/{topic}")


def remove_directory(fs: FileSystem, path: str) -> None:
    """Removes a directory and the files in it; one that does not exist is fine.

    A crash in the middle leaves some of the files: the caller has recorded before that they are
    not needed, and does this again.
    """
    if not fs.exists(path):
        return
    for name in fs.list_directory(path):
        fs.remove(f"{path}/{name}")
        failpoints.reach("delete.after_remove_file")
    fs.remove_directory(path)
    fs.sync_directory(path.rpartition("/")[0])
