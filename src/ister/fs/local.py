"""The real file system, through plain system calls.

Owns: mapping OSError to Ister's errors, once; loops over short writes. Does not own: what is
written where, or when it is synced.

`sync` is fdatasync: it persists the data and the size. Opening never follows a symbolic link in
the last part of a path, so a link planted in a topic's directory is refused, not written through.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Sequence
from contextlib import suppress

from ister.base import forks
from ister.errors import CapacityError, ClosedError, DirectoryLockedError, DiskError, NotFoundError
from ister.format.crc import Buffer
from ister.fs.base import DiskUsage, File, FileLock

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
FILE_MODE = 0o640
# The kernel takes at most so many buffers in one call (IOV_MAX).
_BUFFERS_MAX = 1024
DIRECTORY_MODE = 0o750


class _mapped:  # noqa: N801
    """Translates `OSError` into Ister's errors.

    A class and not a generator, which would cost as much as the system call itself.
    """

    __slots__ = ("_action", "_path")

    def __init__(self, action: str, path: str) -> None:
        self._action = action
        self._path = path

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise map_os_error(error, self._action, self._path) from error


def map_os_error(
    error: OSError, action: str, path: str
) -> CapacityError | DiskError | NotFoundError:
    """Turns an error of the operating system into one of ours; see `ister.fs.base`."""
    text = f"{action} failed: {error.strerror}"
    if error.errno in _FULL:
        return CapacityError(text, path=path, hint="free disk space; writing then resumes")
    if error.errno in _EXHAUSTED:
        return CapacityError(text, path=path, hint="raise the process's limits")
    if error.errno == errno.ENOENT:
        return NotFoundError(text, path=path)
    found = DiskError(text, errno=error.errno, path=path)
    if error.errno in (errno.EACCES, errno.EPERM):
        found.hint = "check the owner and the mode of the file and of its directory"
    return found


def boot_id() -> str:
    """The kernel's id of the current boot.

    Raises:
        DiskError, NotFoundError: It cannot be read.
    """
    path = "/proc/sys/kernel/random/boot_id"
    with _mapped("read", path), open(path, encoding="ascii") as file:
        return file.read().strip()


class _LocalFile:
    def __init__(self, path: str, flags: int) -> None:
        self.path = path
        with _mapped("open", path):
            self._fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        forks.register(self)

    def _after_fork(self, _error: ClosedError) -> None:
        """Closes the child's descriptor; an idle child would keep a removed file's blocks."""
        self.__del__()
        self._fd = -1

    def read_at(self, position: int, size: int) -> bytes:
        with _mapped("read", self.path):
            data = os.pread(self._fd, size, position)
            if len(data) == size or not data:
                return data
            parts = [data]
            missing = size - len(data)
            while missing:
                data = os.pread(self._fd, missing, position + size - missing)
                if not data:
                    break
                parts.append(data)
                missing -= len(data)
            return b"".join(parts)

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        with _mapped("write", self.path):
            for start in range(0, len(buffers), _BUFFERS_MAX):
                group = buffers[start : start + _BUFFERS_MAX]
                size = sum(map(len, group))
                written = os.pwritev(self._fd, group, position)
                if written < size:
                    # Rare: a signal, a disk that is almost full, a limit.
                    rest = memoryview(b"".join(group))
                    while written < size:
                        written += os.pwrite(self._fd, rest[written:], position + written)
                position += size

    def size(self) -> int:
        with _mapped("stat", self.path):
            return os.fstat(self._fd).st_size

    def truncate(self, size: int) -> None:
        with _mapped("truncate", self.path):
            os.ftruncate(self._fd, size)

    def allocate(self, size: int) -> None:
        with _mapped("allocate", self.path):
            os.posix_fallocate(self._fd, 0, size)

    def sync(self) -> None:
        with _mapped("sync", self.path):
            if self._fd < 0:  # os.fdatasync has an error of its own for that
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with _mapped("close", self.path):
                os.close(fd)

    def __del__(self) -> None:
        # A reader that was dropped half way gives its handle back without a word.
        if getattr(self, "_fd", -1) >= 0:
            with suppress(OSError):
                os.close(self._fd)


class _LocalLock:
    """flock on a file that names its holder.

    The kernel releases it when the process ends, however that happens. The lock belongs to the open
    file description, which a forked child shares: it is released when both have closed it, or when
    either of them unlocks it. So a child closes its descriptor immediately and never unlocks.
    (POSIX locks are worse: closing any descriptor of the file releases them.)
    """

    def __init__(self, path: str) -> None:
        with _mapped("open", path):
            self._fd = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE
            )
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 64, 0).decode(errors="replace").strip()
            os.close(self._fd)
            self._fd = -1
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise map_os_error(error, "lock", path) from error
            raise DirectoryLockedError(
                f"the directory is in use by process {holder or 'unknown'}",
                path=path,
                hint="close the log there, or open another directory",
            ) from error
        # Who holds it is a courtesy to others; a full disk is no reason not to open a log.
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        forks.register(self)

    def _after_fork(self, _error: ClosedError) -> None:
        """Closes the child's descriptor without unlocking the parent's directory."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def release(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            # A child forked by C code may share the lock; closing alone would leave it locked.
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


class LocalFileSystem:
    """The machine's own file system."""

    def open(self, path: str) -> File:
        return _LocalFile(path, os.O_RDWR)

    def open_read(self, path: str) -> File:
        return _LocalFile(path, os.O_RDONLY)

    def create(self, path: str) -> File:
        return _LocalFile(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def list_directory(self, path: str) -> list[str]:
        with _mapped("list", path):
            return sorted(os.listdir(path))

    def make_directories(self, path: str, *, within: str | None = None) -> None:
        missing: list[str] = []
        current = os.path.abspath(path)
        while not os.path.isdir(current):
            missing.append(current)
            current = os.path.dirname(current)
        for directory in reversed(missing):
            with _mapped("make directory", directory), suppress(FileExistsError):
                os.mkdir(directory, DIRECTORY_MODE)
            if not os.path.isdir(directory):
                raise map_os_error(
                    NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)),
                    "make directory",
                    directory,
                )
            self.sync_directory(os.path.dirname(directory))
        above = "/" if within is None else os.path.abspath(within)
        while current not in (above, "/"):
            current = os.path.dirname(current)
            try:
                self.sync_directory(current)
            except DiskError as error:
                # Not ours to open, so not made by us either.
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL):
                    raise

    def rename(self, old: str, new: str) -> None:
        with _mapped("rename", old):
            os.rename(old, new)

    def remove(self, path: str) -> None:
        with _mapped("remove", path):
            os.unlink(path)

    def modified_ms(self, path: str) -> int | None:
        with _mapped("stat", path):
            return os.stat(path).st_mtime_ns // 1_000_000

    def identity(self, path: str) -> str:
        with _mapped("stat", path):
            found = os.stat(path, follow_symlinks=False)
        try:
            boot = boot_id()
        except (DiskError, NotFoundError):
            return ""
        # With the change time, because the inode number of a removed file is reused.
        return f"{boot} {found.st_dev} {found.st_ino} {found.st_ctime_ns}"

    def holder(self) -> str:
        return f"process {os.getpid()} on {socket.gethostname()}"

    def remove_directory(self, path: str) -> None:
        with _mapped("remove directory", path):
            os.rmdir(path)

    def sync_directory(self, path: str) -> None:
        with _mapped("sync directory", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def disk_usage(self, path: str) -> DiskUsage | None:
        path = os.path.abspath(path)
        while not os.path.lexists(path) and path != "/":
            path = os.path.dirname(path)
        with _mapped("measure", path):
            found = os.statvfs(path)
            return DiskUsage(
                device=os.stat(path).st_dev,
                total_bytes=found.f_blocks * found.f_frsize,
                free_bytes=found.f_bavail * found.f_frsize,
            )

    def lock(self, path: str) -> FileLock:
        return _LocalLock(path)
