"""Files in the memory of this process, for a log that keeps nothing on disk.

Owns: the files and their total size. Does not own: how large that may become
(`ister.topic.memory_guard`).

A crash leaves nothing: `sync` has nothing to do, and what is written or synced here survives as
long as the process does. A removed file's bytes are freed when its last handle is closed; they are
counted until it is removed.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final

from ister.base.clock import Clock, SystemClock
from ister.errors import DirectoryLockedError, DiskError, NotFoundError
from ister.format.crc import Buffer
from ister.fs.base import DiskUsage, File, FileLock


class _Content:
    """The bytes of a file, which several handles share."""

    __slots__ = ("data", "is_removed", "lock", "modified_ms", "number")

    def __init__(self, number: int, modified_ms: int) -> None:
        self.data = bytearray()
        self.number = number
        self.modified_ms = modified_ms
        self.lock = threading.Lock()
        self.is_removed = False


class _Directory:
    """The names in a directory."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: dict[str, _Content | _Directory] = {}


class MemoryFileSystem:
    """A file system in memory. Thread-safe."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._root = _Directory()
        # Guards all names. A file's own lock, which may be taken under this one, guards its bytes.
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._used_bytes = 0
        self._locked: set[str] = set()
        self._id: Final = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self.on_growth: Callable[[int], None] = lambda used_bytes: None
        """Called with `used_bytes` after each write that grows a file, without a lock held here.

        The caller may hold a log's commit lock; must not block.
        """

    @property
    def used_bytes(self) -> int:
        """The size of all files."""
        return self._used_bytes

    # -- the seam ---------------------------------------------------------------------------

    def open(self, path: str) -> File:
        return self._open("open", path, is_writable=True)

    def open_read(self, path: str) -> File:
        return self._open("open", path, is_writable=False)

    def create(self, path: str) -> File:
        with self._lock:
            directory, name = self._parent("create", path)
            content = directory.entries.get(name)
            if isinstance(content, _Directory):
                raise _error("create", errno.EISDIR, path)
            if content is None:
                content = _Content(next(self._numbers), self.now_ms())
                directory.entries[name] = content
        file = _MemoryFile(self, path, content, is_writable=True)
        file.truncate(0)
        return file

    def exists(self, path: str) -> bool:
        with self._lock:
            return self._find(path) is not None

    def list_directory(self, path: str) -> list[str]:
        with self._lock:
            return sorted(self._directory("list", path).entries)

    def make_directories(self, path: str, *, within: str | None = None) -> None:
        with self._lock:
            directory = self._root
            for part in _parts(path):
                found = directory.entries.setdefault(part, _Directory())
                if not isinstance(found, _Directory):
                    raise _error("make directory", errno.ENOTDIR, path)
                directory = found

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            source, old_name = self._parent("rename", old)
            target, new_name = self._parent("rename", new)
            if old_name not in source.entries:
                raise _missing("rename", old)
            taken = target.entries.get(new_name)
            if isinstance(taken, _Directory) and taken.entries:
                raise _error("rename", errno.ENOTEMPTY, new)
            target.entries[new_name] = source.entries.pop(old_name)
            if isinstance(taken, _Content):
                self._remove(taken)

    def modified_ms(self, path: str) -> int | None:
        with self._lock:
            return self._content("stat", path).modified_ms

    def identity(self, path: str) -> str:
        with self._lock:
            return f"{self._id} {self._content('stat', path).number}"

    def holder(self) -> str:
        return f"process {os.getpid()} on {socket.gethostname()}"

    def remove_directory(self, path: str) -> None:
        with self._lock:
            parent, name = self._parent("remove directory", path)
            found = parent.entries.get(name)
            if found is None:
                raise _missing("remove directory", path)
            if not isinstance(found, _Directory):
                raise _error("remove directory", errno.ENOTDIR, path)
            if found.entries:
                raise _error("remove directory", errno.ENOTEMPTY, path)
            del parent.entries[name]

    def remove(self, path: str) -> None:
        with self._lock:
            directory, name = self._parent("remove", path)
            content = directory.entries.get(name)
            if content is None:
                raise _missing("remove", path)
            if isinstance(content, _Directory):
                raise _error("remove", errno.EISDIR, path)
            del directory.entries[name]
            self._remove(content)

    def sync_directory(self, path: str) -> None:
        with self._lock:
            self._directory("sync directory", path)

    def disk_usage(self, path: str) -> DiskUsage | None:
        return None

    def lock(self, path: str) -> FileLock:
        with self._lock:
            if path in self._locked:
                raise DirectoryLockedError(
                    "the directory is in use by this process",
                    path=path,
                    hint="close the log there, or open another directory",
                )
            directory, name = self._parent("lock", path)
            directory.entries.setdefault(name, _Content(next(self._numbers), self.now_ms()))
            self._locked.add(path)
        return _MemoryLock(self._locked, path)

    # -- for the files ----------------------------------------------------------------------

    def now_ms(self) -> int:
        """The time that files are stamped with."""
        return self._clock.now_ns() // 1_000_000

    def count(self, change: int) -> None:
        """Counts bytes that a file has gained or lost."""
        with self._counting:
            self._used_bytes += change

    # -- inside; the lock is held -----------------------------------------------------------

    def _open(self, action: str, path: str, *, is_writable: bool) -> File:
        with self._lock:
            return _MemoryFile(self, path, self._content(action, path), is_writable=is_writable)

    def _remove(self, content: _Content) -> None:
        """Ends the counting of a file that has no name any more."""
        with content.lock:
            content.is_removed = True
            self.count(-len(content.data))

    def _find(self, path: str) -> _Content | _Directory | None:
        found: _Content | _Directory | None = self._root
        for part in _parts(path):
            if not isinstance(found, _Directory):
                return None
            found = found.entries.get(part)
        return found

    def _content(self, action: str, path: str) -> _Content:
        found = self._find(path)
        if found is None:
            raise _missing(action, path)
        if isinstance(found, _Directory):
            raise _error(action, errno.EISDIR, path)
        return found

    def _directory(self, action: str, path: str) -> _Directory:
        found = self._find(path)
        if found is None:
            raise _missing(action, path)
        if not isinstance(found, _Directory):
            raise _error(action, errno.ENOTDIR, path)
        return found

    def _parent(self, action: str, path: str) -> tuple[_Directory, str]:
        *above, name = _parts(path)
        return self._directory(action, "/".join(above)), name


class _MemoryFile:
    def __init__(
        self, fs: MemoryFileSystem, path: str, content: _Content, *, is_writable: bool
    ) -> None:
        self.path = path
        self._fs = fs
        self._content: _Content | None = content
        self._is_writable = is_writable

    def read_at(self, position: int, size: int) -> bytes:
        content = self._use("read")
        with content.lock, memoryview(content.data) as data:
            return bytes(data[position : position + size])

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        content = self._use("write", writes=True)
        with content.lock:
            data = content.data
            before = len(data)
            if position > before:
                data.extend(bytes(position - before))
            for buffer in buffers:
                data[position : position + len(buffer)] = buffer
                position += len(buffer)
            content.modified_ms = self._fs.now_ms()
            growth = self._count(content, len(data) - before)
        if growth:
            self._fs.on_growth(self._fs.used_bytes)

    def size(self) -> int:
        return len(self._use("stat").data)

    def truncate(self, size: int) -> None:
        content = self._use("truncate", writes=True)
        with content.lock:
            before = len(content.data)
            del content.data[size:]
            self._count(content, len(content.data) - before)

    def allocate(self, size: int) -> None:
        self.write_at(max(size, 0), [])

    def sync(self) -> None:
        self._use("sync")

    def close(self) -> None:
        self._content = None

    def _use(self, action: str, *, writes: bool = False) -> _Content:
        content = self._content
        if content is None or (writes and not self._is_writable):
            raise _error(action, errno.EBADF, self.path)
        return content

    def _count(self, content: _Content, change: int) -> int:
        """Counts a change of a file's size, unless it was removed; returns what was counted."""
        if content.is_removed:
            return 0
        self._fs.count(change)
        return change


class _MemoryLock:
    def __init__(self, locked: set[str], path: str) -> None:
        self._locked = locked
        self._path: str | None = path

    def release(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            self._locked.discard(path)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _missing(action: str, path: str) -> NotFoundError:
    return NotFoundError(f"{action} failed: {os.strerror(errno.ENOENT)}", path=path)


def _error(action: str, number: int, path: str) -> DiskError:
    return DiskError(f"{action} failed: {os.strerror(number)}", errno=number, path=path)
