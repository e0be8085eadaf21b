"""Reads, writes and measures a file in one call."""

from __future__ import annotations

from ister.fs.base import FileSystem


def read_file(fs: FileSystem, path: str, bytes_max: int) -> bytes:
    """The first `bytes_max` bytes of a file, or all of it if it is shorter.

    Raises:
        NotFoundError: The file does not exist.
    """
    file = fs.open_read(path)
    try:
        return file.read_at(0, bytes_max)
    finally:
        file.close()


def file_size(fs: FileSystem, path: str) -> int:
    """The size of a file in bytes.

    Raises:
        NotFoundError: The file does not exist.
    """
    file = fs.open_read(path)
    try:
        return file.size()
    finally:
        file.close()


def write_file(fs: FileSystem, path: str, data: bytes, *, is_synced: bool = True) -> None:
    """Writes a new file, synced by default; its name is durable only after `sync_directory`."""
    file = fs.create(path)
    try:
        file.write_at(0, [data])
        if is_synced:
            file.sync()
    finally:
        file.close()


def replace_file(fs: FileSystem, path: str, data: bytes) -> None:
    """Replaces a file atomically and durably; a crash leaves the old or the new content."""
    write_file(fs, f"{path}.tmp", data)
    fs.rename(f"{path}.tmp", path)
    fs.sync_directory(path.rpartition("/")[0])
