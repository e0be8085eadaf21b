"""Checks that an object is what its descriptor says.

A store may return other bytes than it was given and report success. So an uploaded object is read
back before the last other copy of its messages is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from ister.base.extras import missing_extra
from ister.base.limits import FRAME_BODY_BYTES_MAX
from ister.base.model import Codec
from ister.errors import CorruptDataError
from ister.format.crc import crc32
from ister.format.descriptor import FORMAT_PARQUET, ObjectDescriptor, format_checksum
from ister.format.frame import (
    FRAME_HEADER_SIZE,
    Corrupt,
    Frame,
    FrameBatch,
    NeedMore,
    decode_frame,
    scan_frames,
)
from ister.format.message import recognise
from ister.objectstore.base import ObjectStore

if TYPE_CHECKING:
    from types import ModuleType

    from ister.format.archive import ArchiveReader


def walk_frames(
    store: ObjectStore, key: str, start: int, end: int, *, chunk_bytes: int
) -> Iterator[FrameBatch]:
    """Reads an object from its beginning and yields its frames, each checked.

    Raises:
        NotFoundError: There is no such object.
        CorruptDataError: It does not hold exactly the frames `start` up to, not including, `end`.
        UnavailableError: The store does not answer.
    """
    codec: Codec | None = None
    at, position, size = start, 0, chunk_bytes
    while at < end:
        chunk = store.read(key, position, size)
        scan = scan_frames(chunk, expected_offset=at, end_offset=end)
        if not scan.starts:
            if isinstance(scan.stop, NeedMore) and scan.stop.size_bytes > len(chunk) == size:
                size = min(scan.stop.size_bytes, FRAME_HEADER_SIZE + FRAME_BODY_BYTES_MAX)
                continue
            reason = scan.stop.reason if isinstance(scan.stop, Corrupt) else "it ends too early"
            raise CorruptDataError(
                f"damaged object: {reason}", path=key, position=position, offset=at
            )
        if codec is None:
            frame = decode_frame(chunk, scan.starts[0])
            found = recognise(frame.body, offset=at) if isinstance(frame, Frame) else None
            codec = found or Codec.BINCODE2
        batch = FrameBatch(chunk, scan.starts, scan.end, at, codec)
        yield batch
        at = batch.next_offset
        position += scan.end
        size = chunk_bytes
    info = store.stat(key)
    if info.size != position:
        raise CorruptDataError(f"the object has {info.size} bytes, its frames {position}", path=key)


def verify_size(store: ObjectStore, key: str, size_bytes: int) -> str | None:
    """Makes sure that an object of this size exists; returns its etag.

    Raises:
        NotFoundError: There is none.
        CorruptDataError: It has another size.
        UnavailableError: The store does not answer.
    """
    info = store.stat(key)
    if info.size != size_bytes:
        raise CorruptDataError(
            f"the object has {info.size} bytes and should have {size_bytes}", path=key
        )
    return info.etag


def verify_content(
    store: ObjectStore, key: str, descriptor: ObjectDescriptor, *, chunk_bytes: int
) -> None:
    """Reads an object whole and compares its checksum.

    An object without a checksum on record (another program wrote it, or it was found damaged when
    metadata was rebuilt) is checked frame by frame, or row by row.

    Raises:
        NotFoundError: There is none.
        CorruptDataError: It is another one.
        UnavailableError: The store does not answer.
    """
    if descriptor.checksum is None:
        if descriptor.format == FORMAT_PARQUET:
            archive = open_archive(partial(store.read, key), descriptor, path=key, topic="")
            for number in range(len(archive.row_groups)):
                archive.restore(number)
        else:
            start, end = descriptor.start, descriptor.end
            for _ in walk_frames(store, key, start, end, chunk_bytes=chunk_bytes):
                pass
        verify_size(store, key, descriptor.size_bytes)
        return
    crc, position = 0, 0
    while position < descriptor.size_bytes:
        chunk = store.read(key, position, min(chunk_bytes, descriptor.size_bytes - position))
        if not chunk:
            break
        crc = crc32(chunk, crc)
        position += len(chunk)
    verify_size(store, key, descriptor.size_bytes)
    if position != descriptor.size_bytes:
        raise CorruptDataError(f"the object ends at byte {position}", path=key, position=position)
    if descriptor.checksum != format_checksum(crc):
        raise CorruptDataError(
            f"the object's checksum is {format_checksum(crc)}, not {descriptor.checksum}",
            path=key,
            offset=descriptor.start,
        )


def load_archives() -> ModuleType:
    """The module `ister.format.archive`.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        from ister.format import archive  # noqa: PLC0415 - needs pyarrow, an extra
    except ImportError as error:
        raise missing_extra("an object in Parquet", "arrow", error) from error
    return archive


def open_archive(
    read: Callable[[int, int], bytes], described: ObjectDescriptor, *, path: str, topic: str
) -> ArchiveReader:
    """Reads the footer of an archive.

    Args:
        read: (position, size) → bytes of the object.
        described: What it should be. One without a checksum was found damaged when metadata was
            rebuilt: only its range is known.
        path: For errors.
        topic: The topic's name.

    Raises:
        CorruptDataError: It is not one, or another one.
        UnsupportedVersionError: A newer Ister wrote it.
        ConfigError: pyarrow is not installed.
    """
    archive: ArchiveReader = load_archives().ArchiveReader(
        read, described.size_bytes, path=path, topic=topic
    )
    found: tuple[object, ...] = (archive.start, archive.end)
    wanted: tuple[object, ...] = (described.start, described.end)
    if described.checksum is not None:
        found += (archive.codec, archive.kept, archive.rows)
        wanted += (described.codec, described.kept, described.messages)
    if found != wanted:
        raise CorruptDataError(
            f"damaged object: it says {found} about itself, not {wanted}",
            topic=topic,
            path=path,
            offset=described.start,
        )
    return archive
