"""A file system in memory that loses, tears, reorders and fails, as real ones may.

Built for tests of crash safety: it keeps, beside what a process sees (the page cache), what a
disk would still have, and `crash()` produces one of the states that a power cut may leave. Every
operation first asks `before` (a hook), which may raise: that is how an operation is made to fail,
once or for good, or how a crash is placed between any two operations.

The model, as `ister.fs.base` describes it:

- data written since a file's last sync is a list of pending changes; a crash applies any subset
  of them in any order, tears each at sector boundaries, and may grow the file with zeros instead
  of its data;
- names made, removed or changed in a directory since its last sync are pending too; a crash keeps
  any subset. A rename is one such change: whatever it names is found under the old name or under
  the new one, never under both, and never nowhere;
- a sync that fails marks the pending changes as clean without having stored them: they read back
  from the cache, and neither a later sync nor luck brings them to the disk.

Not modelled: bit rot (tests flip bits themselves) and hard links.
"""

from __future__ import annotations

import copy
import errno
import itertools
import random
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ister.errors import DirectoryLockedError, DiskError, IsterError, NotFoundError
from ister.format.crc import Buffer
from ister.fs.base import DiskUsage, File, FileLock
from ister.fs.local import map_os_error

SECTOR_BYTES: Final = 512


class SimulatedCrash(BaseException):
    """The machine stopped. Not an Exception, so that no handler takes it for an error."""


@dataclass
class _Change:
    """A write (`data` at `position`) or, without data, a truncation to `position`."""

    position: int
    data: bytes | None


@dataclass
class _Inode:
    cache: bytearray = field(default_factory=bytearray)
    """What a process reads."""
    disk: bytearray = field(default_factory=bytearray)
    """What has been synced."""
    pending: list[_Change] = field(default_factory=list)
    """What may or may not survive."""
    modified_ms: int | None = None
    number: int = field(default_factory=itertools.count(1).__next__)


@dataclass
class _Naming:
    """What was given a name, first or another one; without `node`, the end of that name."""

    name: str
    node: _Inode | _Directory | None


@dataclass
class _Directory:
    entries: dict[str, _Inode | _Directory] = field(default_factory=dict)
    """What a process sees."""
    durable: dict[str, _Inode | _Directory] = field(default_factory=dict)
    """What has been synced."""
    pending: list[_Naming] = field(default_factory=list)
    """What may or may not survive."""

    def change(self, naming: _Naming) -> None:
        self.pending.append(naming)
        _apply_naming(self.entries, naming)


@dataclass
class FaultPlan:
    """Fails the operation number `at` (from 1), and with `is_sticky` every later one of its kind.

    `kinds` limits which operations are counted and failed; empty means all of them.
    """

    at: int
    errno: int = errno.EIO
    is_sticky: bool = False
    kinds: frozenset[str] = frozenset()
    seen: int = 0
    fired: int = 0

    def __call__(self, kind: str, path: str) -> None:
        """Raises the planned error when its time has come."""
        if self.kinds and kind not in self.kinds:
            return
        self.seen += 1
        if self.seen == self.at or (self.is_sticky and self.seen > self.at):
            self.fired += 1
            raise OSError(self.errno, f"injected into {kind}")


def _no_fault(kind: str, path: str) -> None:
    """Lets every operation pass."""


class MemoryFileSystem:
    """Files in memory; see the module header. Thread-safe."""

    def __init__(self) -> None:
        self._root = _Directory()
        self._lock = threading.RLock()
        self._held_locks: set[str] = set()
        self._boot = secrets.token_hex(8)
        self.before: Callable[[str, str], None] = _no_fault
        """Called with (kind, path) before each operation; may raise OSError or SimulatedCrash."""
        self.write_limit_bytes: int | None = None
        """A quota on the total size of all files, which `disk_usage` does not show."""
        self.capacity_bytes: int | None = None
        """The size of the disk, which `disk_usage` returns."""
        self.others_bytes: Callable[[], int] = lambda: 0
        """Returns the space used by others: metadata, files of other programs."""
        self.open_files = 0
        """Handles that are open now."""
        self.now_ms: Callable[[], int | None] = lambda: None
        """What files are stamped with when they are written to."""

    # -- the seam ---------------------------------------------------------------------------

    def open(self, path: str) -> File:
        return self._open("open", path)

    def open_read(self, path: str) -> File:
        return self._open("open_read", path)

    def create(self, path: str) -> File:
        with self._lock:
            self._enter("create", path)
            directory, name = self._parent(path)
            inode = directory.entries.get(name)
            if isinstance(inode, _Directory):
                raise DiskError("create failed: is a directory", errno=errno.EISDIR, path=path)
            if inode is None:
                inode = _Inode()
                directory.change(_Naming(name, inode))
            elif inode.cache:
                inode.cache.clear()
                inode.pending.append(_Change(0, None))
            return _MemoryFile(self, path, inode, is_writable=True)

    def exists(self, path: str) -> bool:
        with self._lock:
            return self._find(path) is not None

    def list_directory(self, path: str) -> list[str]:
        with self._lock:
            self._enter("list_directory", path)
            return sorted(self._directory(path).entries)

    def make_directories(self, path: str, *, within: str | None = None) -> None:
        with self._lock:
            directory = self._root
            walked = ""
            depth = len(_parts(within)) if within is not None else 0
            for at, part in enumerate(_parts(path)):
                found = directory.entries.get(part)
                if found is None:
                    self._enter("make_directory", f"{walked}/{part}")
                    found = _Directory()
                    directory.change(_Naming(part, found))
                if not isinstance(found, _Directory):
                    raise DiskError("make directory failed", errno=errno.ENOTDIR, path=path)
                if at >= depth:
                    self.sync_directory(walked or "/")
                directory = found
                walked = f"{walked}/{part}"

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            self._enter("rename", old)
            source, old_name = self._parent(old)
            target, new_name = self._parent(new)
            if old_name not in source.entries:
                raise NotFoundError("rename failed: no such file", path=old)
            taken = target.entries.get(new_name)
            if isinstance(taken, _Directory) and taken.entries:
                raise DiskError("rename failed: not empty", errno=errno.ENOTEMPTY, path=new)
            node = source.entries[old_name]
            if target is not source:
                # Two changes, of which a crash may keep one: nobody asks for more than a new name
                # in the same directory.
                source.change(_Naming(old_name, None))
            target.change(_Naming(new_name, node))

    def modified_ms(self, path: str) -> int | None:
        with self._lock:
            self._enter("stat", path)
            inode = self._find(path)
            if inode is None:
                raise NotFoundError("stat failed: no such file", path=path)
            return inode.modified_ms if isinstance(inode, _Inode) else None

    def identity(self, path: str) -> str:
        with self._lock:
            self._enter("stat", path)
            inode = self._find(path)
            if not isinstance(inode, _Inode):
                raise NotFoundError("stat failed: no such file", path=path)
            return f"{self._boot} {inode.number}"

    def holder(self) -> str:
        return f"a process on machine {self._boot}"

    def remove_directory(self, path: str) -> None:
        with self._lock:
            self._enter("remove_directory", path)
            directory, name = self._parent(path)
            found = directory.entries.get(name)
            if found is None:
                raise NotFoundError("remove failed: no such directory", path=path)
            if not isinstance(found, _Directory):
                raise DiskError("remove failed: not a directory", errno=errno.ENOTDIR, path=path)
            if found.entries:
                raise DiskError("remove failed: not empty", errno=errno.ENOTEMPTY, path=path)
            directory.change(_Naming(name, None))

    def remove(self, path: str) -> None:
        with self._lock:
            self._enter("remove", path)
            directory, name = self._parent(path)
            if isinstance(directory.entries.get(name), _Directory):
                raise DiskError("remove failed: is a directory", errno=errno.EISDIR, path=path)
            if name not in directory.entries:
                raise NotFoundError("remove failed: no such file", path=path)
            directory.change(_Naming(name, None))

    def sync_directory(self, path: str) -> None:
        with self._lock:
            self._enter("sync_directory", path)
            directory = self._directory(path)
            directory.durable = dict(directory.entries)
            directory.pending.clear()

    def disk_usage(self, path: str) -> DiskUsage | None:
        with self._lock:
            if self.capacity_bytes is None:
                return None
            return DiskUsage(
                device=0, total_bytes=self.capacity_bytes, free_bytes=self.room_for(1 << 62)
            )

    def lock(self, path: str) -> FileLock:
        with self._lock:
            self._enter("lock", path)
            if path in self._held_locks:
                raise DirectoryLockedError("the directory is in use by this process", path=path)
            directory, name = self._parent(path)
            if name not in directory.entries:
                directory.change(_Naming(name, _Inode()))
            self._held_locks.add(path)
            return _MemoryLock(self, path)

    # -- crashes ----------------------------------------------------------------------------

    def crash(self, rng: random.Random) -> None:
        """Becomes one of the states in which a power cut may leave the disk."""
        with self._lock:
            self.before = _no_fault
            self._held_locks.clear()
            self.open_files = 0
            self._boot = secrets.token_hex(8)
            self._crash_directory(self._root, rng)

    def copied(self) -> MemoryFileSystem:
        """Creates another machine with a copy of this one's files, including unsynced writes."""
        with self._lock:
            other = MemoryFileSystem()
            other.now_ms = self.now_ms
            other._root = copy.deepcopy(self._root)
            return other

    def kill(self) -> None:
        """The process ends and the machine stays up: the page cache survives whole."""
        with self._lock:
            self.before = _no_fault
            self._held_locks.clear()
            self.open_files = 0

    def _crash_directory(self, directory: _Directory, rng: random.Random) -> None:
        entries = dict(directory.durable)
        for naming in directory.pending:
            if rng.random() < 0.5:
                _apply_naming(entries, naming)
        directory.entries = entries
        directory.durable = dict(entries)
        directory.pending.clear()
        for node in entries.values():
            if isinstance(node, _Directory):
                self._crash_directory(node, rng)
            else:
                _crash_inode(node, rng)

    # -- inside -----------------------------------------------------------------------------

    def _enter(self, kind: str, path: str) -> None:
        try:
            self.before(kind, path)
        except OSError as error:
            raise map_os_error(error, kind, path) from error

    def _open(self, kind: str, path: str) -> File:
        with self._lock:
            self._enter(kind, path)
            node = self._find(path)
            if isinstance(node, _Directory):
                raise DiskError(f"{kind} failed: is a directory", errno=errno.EISDIR, path=path)
            if node is None:
                raise NotFoundError(f"{kind} failed: no such file", path=path)
            return _MemoryFile(self, path, node, is_writable=kind == "open")

    def _find(self, path: str) -> _Inode | _Directory | None:
        node: _Inode | _Directory | None = self._root
        for part in _parts(path):
            if not isinstance(node, _Directory):
                return None
            node = node.entries.get(part)
        return node

    def _directory(self, path: str) -> _Directory:
        node = self._find(path)
        if not isinstance(node, _Directory):
            raise NotFoundError("no such directory", path=path)
        return node

    def _parent(self, path: str) -> tuple[_Directory, str]:
        head, _, name = path.rstrip("/").rpartition("/")
        return self._directory(head or "/"), name

    def _used_bytes(self, directory: _Directory) -> int:
        return sum(
            self._used_bytes(node) if isinstance(node, _Directory) else len(node.cache)
            for node in directory.entries.values()
        )

    def room_for(self, growth: int) -> int:
        """How much of a growth by `growth` bytes still fits."""
        with self._lock:
            room = growth
            if self.write_limit_bytes is not None:
                room = min(room, self.write_limit_bytes - self._used_bytes(self._root))
            if self.capacity_bytes is not None:
                used = self._used_bytes(self._root) + self.others_bytes()
                room = min(room, self.capacity_bytes - used)
            return max(0, room)


class _MemoryFile:
    def __init__(
        self, owner: MemoryFileSystem, path: str, inode: _Inode, *, is_writable: bool
    ) -> None:
        self.path = path
        self._is_writable = is_writable
        self._owner = owner
        self._inode = inode
        self._is_open = True
        owner.open_files += 1

    def read_at(self, position: int, size: int) -> bytes:
        with self._owner._lock:
            self._enter("read")
            return bytes(self._inode.cache[position : position + size])

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        with self._owner._lock:
            data = b"".join(buffers)
            self._check_use("write")
            cut: BaseException | None = None
            try:
                self._enter("write")
            except (IsterError, SimulatedCrash) as error:
                # A failed or interrupted write may have stored any prefix.
                cut = error
                data = data[: len(data) // 2]
            growth = max(0, position + len(data) - len(self._inode.cache))
            room = self._owner.room_for(growth)
            is_full = room < growth
            if is_full:
                data = data[: len(data) - growth + room]
            self._store(position, data)
            if cut is not None:
                raise cut
            if is_full:
                full = OSError(errno.ENOSPC, "No space left on device")
                raise map_os_error(full, "write", self.path) from full

    def _store(self, position: int, data: bytes) -> None:
        cache = self._inode.cache
        if position > len(cache):
            cache.extend(bytes(position - len(cache)))
        cache[position : position + len(data)] = data
        self._inode.modified_ms = self._owner.now_ms()
        if data:
            self._inode.pending.append(_Change(position, data))

    def size(self) -> int:
        with self._owner._lock:
            self._enter("size")
            return len(self._inode.cache)

    def truncate(self, size: int) -> None:
        with self._owner._lock:
            self._enter("truncate")
            del self._inode.cache[size:]
            self._inode.pending.append(_Change(size, None))

    def allocate(self, size: int) -> None:
        with self._owner._lock:
            self._enter("allocate")
            growth = max(0, size - len(self._inode.cache))
            if self._owner.room_for(growth) < growth:
                full = OSError(errno.ENOSPC, "No space left on device")
                raise map_os_error(full, "allocate", self.path) from full
            self._store(len(self._inode.cache), bytes(growth))

    def sync(self) -> None:
        inode = self._inode
        try:
            # Without the lock: a hook that blocks delays this file alone.
            self._enter("sync")
        except IsterError:
            with self._owner._lock:
                # The kernel marks the pages clean: a later sync succeeds and stores nothing.
                inode.pending.clear()
            raise
        with self._owner._lock:
            for change in inode.pending:
                _apply(inode.disk, change)
            inode.pending.clear()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._owner.open_files -= 1

    def _enter(self, kind: str) -> None:
        self._check_use(kind)
        self._owner._enter(kind, self.path)

    def _check_use(self, kind: str) -> None:
        if not self._is_open:
            raise DiskError(f"{kind} failed: closed file", errno=errno.EBADF, path=self.path)
        if kind in ("write", "truncate") and not self._is_writable:
            raise DiskError(f"{kind} failed: opened to read", errno=errno.EBADF, path=self.path)


class _MemoryLock:
    def __init__(self, owner: MemoryFileSystem, path: str) -> None:
        self._owner = owner
        self._path = path

    def release(self) -> None:
        self._owner._held_locks.discard(self._path)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _apply_naming(entries: dict[str, _Inode | _Directory], naming: _Naming) -> None:
    if naming.node is None:
        entries.pop(naming.name, None)
        return
    # There are no hard links: with a new name the old one ends.
    for name in [name for name, node in entries.items() if node is naming.node]:
        del entries[name]
    entries[naming.name] = naming.node


def _apply(disk: bytearray, change: _Change) -> None:
    if change.data is None:
        del disk[change.position :]
        return
    if change.position > len(disk):
        disk.extend(bytes(change.position - len(disk)))
    disk[change.position : change.position + len(change.data)] = change.data


def _crash_inode(inode: _Inode, rng: random.Random) -> None:
    """Applies some of the pending changes, in some order, each possibly torn or zeroed."""
    if inode.pending:
        survivors = [change for change in inode.pending if rng.random() < 0.6]
        if rng.random() < 0.3:
            rng.shuffle(survivors)
        for change in survivors:
            _apply(inode.disk, _damaged(change, rng))
    inode.cache = bytearray(inode.disk)
    inode.pending.clear()


def _damaged(change: _Change, rng: random.Random) -> _Change:
    data = change.data
    if data is None:
        return change
    fate = rng.random()
    if fate < 0.5:
        return change
    if fate < 0.65:  # the size grew, the data did not arrive
        return _Change(change.position, bytes(len(data)))
    if fate < 0.85:  # torn at a sector boundary, or anywhere
        cut = rng.randrange(len(data) + 1)
        if rng.random() < 0.5:
            cut -= (change.position + cut) % SECTOR_BYTES
        return _Change(change.position, data[: max(cut, 0)])
    torn = bytearray(data)  # some sectors arrived, others read as zeros
    for start in range(0, len(torn), SECTOR_BYTES):
        if rng.random() < 0.4:
            end = min(start + SECTOR_BYTES, len(torn))
            torn[start:end] = bytes(end - start)
    return _Change(change.position, bytes(torn))
