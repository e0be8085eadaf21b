"""Whether an object is what its descriptor says, byte for byte.

A store may hand out other bytes than it was given and call it a success, so nothing that was only
uploaded is taken for a copy: before the last other copy goes, this is asked.
"""

from __future__ import annotations

from collections.abc import Iterator

from ister.errors import CorruptDataError
from ister.format.crc import crc32
from ister.format.descriptor import ObjectDescriptor, format_checksum
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
from ister.limits import FRAME_BODY_BYTES_MAX
from ister.model import Codec
from ister.objectstore.base import ObjectStore

__all__ = ["verify_content", "verify_size", "walk_frames"]


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
    metadata was rebuilt) is checked frame by frame.

    Raises:
        NotFoundError: There is none.
        CorruptDataError: It is another one.
        UnavailableError: The store does not answer.
    """
    if descriptor.checksum is None:
        for _ in walk_frames(store, key, descriptor.start, descriptor.end, chunk_bytes=chunk_bytes):
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
