"""Checks that an object is what its descriptor says.

A store may return other bytes than it was given and report success. So an uploaded object is read
back before the last other copy of its messages is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from ister.base.extras import missing_extra
from ister.base.model import Codec
from ister.errors import CorruptDataError
from ister.format.crc import crc32
from ister.format.descriptor import FORMAT_PARQUET, ObjectDescriptor, format_checksum
from ister.format.frame import Corrupt, Frame, FrameBatch, Scan, decode_frame
from ister.format.frame_walk import FrameWalk
from ister.format.message import recognise
from ister.objectstore.base import ObjectStore

if TYPE_CHECKING:
    from types import ModuleType

    from ister.format.archive import ArchiveReader


class ObjectFile:
    """An object, or a run of one, that is read like a file."""

    def __init__(self, store: ObjectStore, key: str, size_bytes: int | None = None) -> None:
        self.path = f"{store.location.rstrip('/')}/{key}"
        self._store = store
        self._key = key
        self._size = size_bytes

    def read_at(self, position: int, size: int) -> bytes:
        """Reads `size` bytes from `position`; fewer only at the end."""
        chunk = self._store.read(self._key, position, size)
        if self._size is not None and len(chunk) < min(size, self._size - position):
            # Truncated since its size was read: no wait for the rest would end.
            self._size = position + len(chunk)
        return chunk

    def size(self) -> int:
        """Number of bytes, as far as is known."""
        if self._size is None:
            self._size = self._store.stat(self._key).size
        return self._size


def walk_frames(
    store: ObjectStore, key: str, start: int, end: int, *, chunk_bytes: int
) -> Iterator[FrameBatch]:
    """Reads an object from its beginning and yields its frames, each checked.

    Raises:
        CorruptDataError: It does not hold exactly the frames `start` up to, not including, `end`.
    """
    walk = FrameWalk(
        ObjectFile(store, key), expected_offset=start, end_offset=end, chunk_bytes=chunk_bytes
    )
    yield from read_batches(walk, end, path=key)
    if walk.size != walk.end:
        raise CorruptDataError(f"the object has {walk.size} bytes, its frames {walk.end}", path=key)


def read_batches(
    walk: FrameWalk, end: int, *, path: str, codec: Codec | None = None
) -> Iterator[FrameBatch]:
    """The frames of a walk up to the offset `end`; the codec is that of the first message.

    Raises:
        CorruptDataError: A frame up to there is damaged or missing.
    """
    for chunk, _, scan in walk:
        first = (scan.next_offset or 0) - len(scan.starts)
        codec = codec or recognise_first(chunk, scan, first) or Codec.BINCODE2
        yield FrameBatch(chunk, scan.starts, scan.end, first, codec)
    if walk.next_offset != end:
        stop = walk.stop
        reason = stop.reason if isinstance(stop, Corrupt) else "it ends too early"
        raise CorruptDataError(
            f"damaged object: {reason}", path=path, position=walk.end, offset=walk.next_offset
        )


def recognise_first(chunk: bytes, scan: Scan, offset: int) -> Codec | None:
    """The codec of the first frame of a chunk; None if its body is not a message."""
    frame = decode_frame(chunk, scan.starts[0])
    return recognise(frame.body, offset=offset) if isinstance(frame, Frame) else None


def verify_size(store: ObjectStore, key: str, size_bytes: int) -> str | None:
    """Makes sure that an object of this size exists; returns its etag.

    Raises:
        CorruptDataError: It has another size.
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
        CorruptDataError: It is another one.
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
    """The module `ister.format.archive`."""
    try:
        from ister.format import archive  # noqa: PLC0415 - needs pyarrow, an extra
    except ImportError as error:
        raise missing_extra("an object in Parquet", "arrow", error) from error
    return archive


def open_archive(
    read: Callable[[int, int], bytes], described: ObjectDescriptor, *, path: str, topic: str
) -> ArchiveReader:
    """Reads the footer of an archive.

    `described`: what it should be. One without a checksum was found damaged when metadata was
    rebuilt: only its range is known.

    Raises:
        CorruptDataError: It is not one, or another one.
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
