"""What Ister asks of a file system, and what each operation promises.

Paths are strings with `/`. Every error of the operating system is raised as one of:

- `NotFoundError`: the path does not exist;
- `CapacityError`: no room (ENOSPC, EDQUOT, EFBIG) or no handles or memory (EMFILE, ENFILE, ENOMEM);
  the same call may succeed later;
- `DiskError`: anything else; carries `errno`.

Nothing is durable before a sync. Specifically, after a power cut:

- bytes written since the last successful `sync` of a file may be there, may be missing, may be
  torn at any sector, may read as zeros, in any combination and whatever their order;
- an entry made, renamed or removed since the last `sync_directory` of its directory may be in
  either state, each for itself and whatever their order. A rename is one change: what it names is
  found under the old name or under the new one;
- after a `sync` that raised, the bytes it covered may read back correctly and still be lost: they
  are never to be trusted, and the same sync is never to be repeated.

Implementations are thread-safe across files; one `File` is used by one thread at a time, except
that `sync` may run beside `write_at`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ister.format.crc import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUsage:
    """Size and free space of the disk of a path."""

    device: int
    """The device id; equal for all paths of one disk."""
    total_bytes: int
    free_bytes: int
    """Space available to this process."""


class File(Protocol):
    """An open file."""

    path: str

    def read_at(self, position: int, size: int) -> bytes:
        """Reads `size` bytes from `position`; fewer only at the end of the file."""
        ...

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        """Writes all of `buffers`, one after the other, from `position` on.

        When it raises, any prefix may have been written. Writing the same bytes at the same
        position again is safe.
        """
        ...

    def size(self) -> int:
        """The file's size in bytes."""
        ...

    def truncate(self, size: int) -> None:
        """Cuts the file to `size` bytes. Durable only after `sync`."""
        ...

    def allocate(self, size: int) -> None:
        """Allocates disk space for the first `size` bytes; new bytes read as zeros.

        Raises:
            CapacityError: The disk has not enough space.
        """
        ...

    def sync(self) -> None:
        """Returns once every byte written and the size are on stable storage. Never retried."""
        ...

    def close(self) -> None:
        """Releases the handle, without a sync. May be called twice."""
        ...


class FileLock(Protocol):
    """The exclusive right to a directory, held until `release` or the end of the process."""

    def release(self) -> None:
        """Gives the right back. May be called twice."""
        ...


class FileSystem(Protocol):
    """Where files live."""

    def open(self, path: str) -> File:
        """Opens an existing file for reading and writing.

        Raises:
            NotFoundError: There is none.
        """
        ...

    def open_read(self, path: str) -> File:
        """Opens an existing file for reading.

        Raises:
            NotFoundError: There is none.
        """
        ...

    def create(self, path: str) -> File:
        """Makes an empty file; one of that name that exists already is emptied.

        The entry is durable only after `sync_directory` of its directory.
        """
        ...

    def exists(self, path: str) -> bool:
        """Whether there is a file or directory of that name."""
        ...

    def list_directory(self, path: str) -> list[str]:
        """The names in a directory, sorted.

        Raises:
            NotFoundError: There is no such directory.
        """
        ...

    def make_directories(self, path: str, *, within: str | None = None) -> None:
        """Makes a directory and its parents where missing; all their names are durable on return.

        Those that exist already are synced too, as far as this process may: one that was killed
        may have made them a moment ago.

        Args:
            path: The directory.
            within: A parent directory that exists and is known to be durable; directories above
                it are not synced.
        """
        ...

    def rename(self, old: str, new: str) -> None:
        """Gives a file or directory a new name in the same directory. Atomic.

        A file replaces the one that had the name; a directory takes a free one.
        """
        ...

    def modified_ms(self, path: str) -> int | None:
        """When a file was last written to, in milliseconds since the Unix epoch; None if unknown.

        Raises:
            NotFoundError: There is none.
        """
        ...

    def identity(self, path: str) -> str:
        """Identifies a file among all files, including copies of it; empty if unknown.

        Stays the same at most until the machine reboots; it may change sooner.

        Raises:
            NotFoundError: The file does not exist.
        """
        ...

    def holder(self) -> str:
        """This process in readable form, for messages on other machines: its id and host."""
        ...

    def remove_directory(self, path: str) -> None:
        """Removes an empty directory.

        Raises:
            NotFoundError: There is none.
        """
        ...

    def remove(self, path: str) -> None:
        """Removes a file. Open handles keep reading it.

        Raises:
            NotFoundError: There is none.
        """
        ...

    def sync_directory(self, path: str) -> None:
        """Returns once the entries of a directory are on stable storage."""
        ...

    def disk_usage(self, path: str) -> DiskUsage | None:
        """Measures the disk of `path`, or of its nearest existing parent; None if unlimited."""
        ...

    def lock(self, path: str) -> FileLock:
        """Takes the lock file at `path`, which is made where missing.

        Raises:
            DirectoryLockedError: Someone else holds it; the message names them.
        """
        ...
