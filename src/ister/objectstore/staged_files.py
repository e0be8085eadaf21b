"""How a file becomes an object on the `fs` backend: whole, exclusively, and for good.

An object is written under a random name below `<root>/.tmp`, synced, and then given its own name:
by a rename, which replaces, or by a link, which refuses when the name is taken, among all
processes alike. The directory is synced behind it. That moment is the commit point: before it
there is no object, after it the whole one.

A crash leaves files below `.tmp`, which are invisible; `remove_stale` takes those away that nobody
has written to for long. A power cut between the rename and the sync of the directory leaves the
old object, or none, or the new one, always whole: its bytes were synced before it had a name.

Does not own: writing the bytes of an object that is streamed (opendal does), or which errors are
repeated.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ister.base.limits import KIB
from ister.errors import (
    AlreadyExistsError,
    DiskError,
    IsterError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.format.crc import Buffer
from ister.fs.base import FileSystem
from ister.fs.local import DIRECTORY_MODE, map_os_error
from ister.fs.whole_files import write_file
from ister.objectstore.base import ObjectInfo
from ister.objectstore.keys import STAGING_FOLDER

_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_MAPPED_BYTES_MIN: Final = 256 * KIB
"""Copying less than this takes no longer than mapping it."""
_MADV_POPULATE_READ: Final = 22
"""Linux's number; Python 3.11 has no name for it."""
_NOT_A_FILE: Final = frozenset({errno.EISDIR, errno.ENOTDIR, errno.EPERM})


class StagedFiles:
    """Names below a directory. Thread-safe."""

    def __init__(self, root: str, fs: FileSystem) -> None:
        self._root = root
        self._fs = fs
        self._lock = threading.Lock()
        self._durable: set[str] = set()
        """Directories whose own names this process has synced."""
        self._make(f"{root}/{STAGING_FOLDER}")

    def stage(self) -> str:
        """Creates an empty file with a unique key below `.tmp`; returns the key.

        Created here to set its mode: opendal leaves that to the umask.
        """
        return self._stage(lambda path: self._fs.create(path).close())

    def stage_whole(self, data: bytes) -> str:
        """Like `stage`, but writes all bytes of the object and syncs them."""
        return self._stage(lambda path: write_file(self._fs, path, data))

    def _stage(self, create: Callable[[str], None]) -> str:
        staged = f"{STAGING_FOLDER}/{secrets.token_hex(16)}"
        path = f"{self._root}/{staged}"
        try:
            try:
                create(path)
            except NotFoundError:
                # The directory was removed after this process had created it.
                with self._lock:
                    self._durable.clear()
                self._make(os.path.dirname(path))
                create(path)
        except BaseException:
            self.discard(staged)
            raise
        return staged

    def sync(self, staged: str) -> None:
        """Has what was written of a staged file so far on the disk."""
        file = self._fs.open_read(f"{self._root}/{staged}")
        try:
            file.sync()
        finally:
            file.close()

    def sync_early(self, staged: str) -> None:
        """As `sync`; a file that does not exist yet has nothing to sync."""
        try:
            self.sync(staged)
        except NotFoundError:
            return

    def remove_folder(self, folder: str) -> None:
        """Removes a folder that is empty, and the one above it if that is too; raises nothing."""
        with suppress(IsterError):
            self._fs.remove_directory(f"{self._root}/{folder}")
            self._fs.remove_directory(f"{self._root}/{folder.rpartition('/')[0]}")

    def publish(
        self, staged: str, key: str, *, is_exclusive: bool = False, is_synced: bool = False
    ) -> None:
        """Gives a staged file its name; it is durable when this returns.

        Args:
            staged: The file, as `stage` returned it.
            key: The object's key.
            is_exclusive: Whether an existing object of that name is an error.
            is_synced: Whether the file is synced already: `stage_whole` has done it.

        Raises:
            AlreadyExistsError: `is_exclusive` is set, and there is an object of that name.
            UnsupportedOperationError: `is_exclusive` is set, and there are no links here.
            UnavailableError: The staged file is gone.
        """
        source, target = f"{self._root}/{staged}", f"{self._root}/{key}"
        directory = os.path.dirname(target)
        try:
            if not is_synced:
                # opendal syncs a file when it closes it, without promising to.
                self.sync(staged)
            try:
                self._make(directory)
                self._name(source, target, is_exclusive=is_exclusive)
            except NotFoundError:
                # The directory was removed after this process had created it.
                with self._lock:
                    self._durable.clear()
                self._make(directory)
                self._name(source, target, is_exclusive=is_exclusive)
        except NotFoundError as error:
            raise UnavailableError(
                "the file of an object that is being written is gone",
                path=source,
                hint="something removed files that are in use; write the object again",
            ) from error
        except AlreadyExistsError:
            # Whoever made it may have died before it was durable, and the caller now relies on it.
            self._fs.sync_directory(directory)
            raise
        self._fs.sync_directory(directory)
        if is_exclusive:
            self.discard(staged)

    def discard(self, staged: str) -> None:
        """Removes a staged file, if it can; what stays is found by `remove_stale`."""
        with suppress(IsterError):
            self._fs.remove(f"{self._root}/{staged}")

    def delete(self, key: str) -> None:
        """Removes an object; one that does not exist is fine."""
        path = f"{self._root}/{key}"
        try:
            self._fs.remove(path)
            self._fs.sync_directory(os.path.dirname(path))
        except NotFoundError:
            return
        except DiskError as error:
            # A directory of that name, or a file where a directory would be, is no object.
            if error.errno not in _NOT_A_FILE or os.path.isfile(path):
                raise

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """The objects below a prefix, in no order. Those that go away meanwhile may be missing."""
        pending = [f"{self._root}/{prefix}".rstrip("/")]
        while pending:
            directory = pending.pop()
            try:
                with os.scandir(directory) as entries:
                    found = list(entries)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise map_os_error(error, "list", directory) from error
            for entry in found:
                path = f"{directory}/{entry.name}"
                if path == f"{self._root}/{STAGING_FOLDER}":
                    continue
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(info.st_mode):
                    pending.append(path)
                elif stat.S_ISREG(info.st_mode):
                    yield ObjectInfo(
                        key=path[len(self._root) + 1 :],
                        size=info.st_size,
                        modified_at=info.st_mtime,
                    )

    def remove_stale(self, *, before: float) -> int:
        """Removes staged files last written to before that moment; how many they were."""
        directory = f"{self._root}/{STAGING_FOLDER}"
        count = 0
        for name in self._fs.list_directory(directory):
            path = f"{directory}/{name}"
            try:
                if os.stat(path, follow_symlinks=False).st_mtime < before:
                    self._fs.remove(path)
                    count += 1
            except (FileNotFoundError, NotFoundError):
                continue
            except OSError as error:
                raise map_os_error(error, "stat", path) from error
        return count

    def _name(self, source: str, target: str, *, is_exclusive: bool) -> None:
        if not is_exclusive:
            self._fs.rename(source, target)
            return
        try:
            os.link(source, target, follow_symlinks=False)
        except FileExistsError as error:
            raise AlreadyExistsError("put failed: the object exists", path=target) from error
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise UnsupportedOperationError(
                    "put failed: this file system has no links", path=target
                ) from error
            raise map_os_error(error, "link", target) from error

    def _make(self, directory: str) -> None:
        """Makes a directory whose name is durable, and so are those above it."""
        levels: list[str] = []
        with self._lock:
            while directory not in self._durable and directory.startswith(f"{self._root}/"):
                levels.append(directory)
                directory = os.path.dirname(directory)
            is_durable = directory in self._durable
        if not levels and is_durable:
            return
        if not is_durable:
            self._fs.make_directories(directory)
        for level in reversed(levels):
            # Also where it exists: whoever made it may have died before its name was durable.
            try:
                with suppress(FileExistsError):
                    os.mkdir(level, DIRECTORY_MODE)
            except OSError as error:
                raise map_os_error(error, "make directory", level) from error
            if not os.path.isdir(level):
                raise DiskError("make directory failed", errno=errno.ENOTDIR, path=level)
            self._fs.sync_directory(os.path.dirname(level))
        with self._lock:
            self._durable.update([directory, *levels])

    def stat(self, key: str) -> ObjectInfo:
        """The size and time of an object.

        Raises:
            NotFoundError: There is no such object.
        """
        path = f"{self._root}/{key}"
        try:
            info = os.stat(path)
        except OSError as error:
            raise _map_object_error(error, "stat", path) from error
        if not stat.S_ISREG(info.st_mode):
            raise NotFoundError("stat failed: a folder is not an object", path=path)
        return ObjectInfo(key=key, size=info.st_size, modified_at=info.st_mtime)

    def read(self, key: str, start: int, size: int) -> bytes:
        """Bytes of an object; fewer than `size` only at its end.

        Raises:
            NotFoundError: There is no such object.
        """
        with self._open(key) as fd:
            return _read(fd, start, size)

    def view(self, key: str, start: int, size: int) -> Buffer:
        """Like `read`, but maps a large range into memory instead of copying it.

        All pages are read before this returns, so that a disk error is raised here. Objects never
        change, and the mapping stays valid if the file is removed. SIGBUS ends this process if
        another program truncates the file, or if memory is so short that a page has to be read
        again and the disk fails then.

        Raises:
            NotFoundError: There is no such object.
        """
        with self._open(key) as fd:
            size = min(size, max(os.fstat(fd).st_size - start, 0))
            if size >= _MAPPED_BYTES_MIN and sys.platform == "linux":
                skipped = start % mmap.ALLOCATIONGRANULARITY
                # Not every file system can map files; kernels before 5.14 cannot read them in.
                # ValueError: the file was truncated, and is smaller than the map.
                with suppress(OSError, ValueError):
                    mapped = mmap.mmap(
                        fd, skipped + size, access=mmap.ACCESS_READ, offset=start - skipped
                    )
                    mapped.madvise(_MADV_POPULATE_READ)
                    return memoryview(mapped)[skipped:]
            return _read(fd, start, size)

    @contextmanager
    def _open(self, key: str) -> Iterator[int]:
        """Opens an object's file; the descriptor is closed afterwards."""
        path = f"{self._root}/{key}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _map_object_error(error, "read", path) from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise NotFoundError("read failed: a folder is not an object", path=path)
            yield fd
        except OSError as error:
            raise map_os_error(error, "read", path) from error
        finally:
            os.close(fd)


def _read(fd: int, start: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size and (part := os.pread(fd, size, start)):
        parts.append(part)
        start, size = start + len(part), size - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _map_object_error(error: OSError, action: str, path: str) -> IsterError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotFoundError(f"{action} failed: not found", path=path)
    if isinstance(error, PermissionError):
        return PermissionDeniedError(f"{action} failed: {error.strerror}", path=path)
    return map_os_error(error, action, path)
