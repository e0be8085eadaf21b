"""What uploads and scrubs are compared with: plain copies and reads of the same bytes, by opendal.

Owns: how they are done. Does not own: which bytes, from how many threads or processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ister.config import UploaderConfig
from ister.format.crc import crc32

if TYPE_CHECKING:
    import opendal


def copy_files(
    operator: opendal.Operator,
    target: str,
    name: str,
    paths: Sequence[str],
    settings: UploaderConfig,
) -> int:
    """Streams files into objects and has each on the disk.

    Args:
        operator: Writes below `target`.
        target: A directory.
        name: What the names of objects begin with.
        paths: The files, which become one stream.
        settings: The sizes of chunks and objects, and how many parts are in flight.

    Returns:
        The size of all.
    """
    writer: opendal.file.File | None = None
    total = room = count = 0
    for chunk in _chunks(paths, settings.stream_chunk_size):
        if writer is None:
            writer = operator.open(
                f"{name}-{count}",
                "wb",
                chunk=settings.stream_chunk_size,
                concurrent=settings.concurrent_parts,
            )
            room = settings.max_object_bytes
        writer.write(chunk)
        total += len(chunk)
        room -= len(chunk)
        if room < settings.stream_chunk_size:
            _complete(writer, target, f"{name}-{count}")
            writer, count = None, count + 1
    if writer is not None:
        _complete(writer, target, f"{name}-{count}")
    return total


def read_objects(operator: opendal.Operator, names: Sequence[str], chunk_bytes: int) -> int:
    """Reads objects whole, with crc32, in chunks; the size of all."""
    total = 0
    for name in names:
        file = operator.open(name, "rb")
        crc = 0
        while chunk := file.read(chunk_bytes):
            crc = crc32(chunk, crc)
            total += len(chunk)
    return total


def _complete(writer: opendal.file.File, target: str, name: str) -> None:
    writer.close()
    for path in (f"{target}/{name}", target):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _chunks(paths: Sequence[str], size: int) -> Iterator[bytes]:
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while chunk := os.read(fd, size):
                yield chunk
        finally:
            os.close(fd)
