"""Whether an object is what its descriptor says, byte for byte.

A store may hand out other bytes than it was given and call it a success, so nothing that was only
uploaded is taken for a copy: before the last other copy goes, this is asked. `verify_content` asks
for the checksum alone; `verify_object` looks at every frame or row, and tells all that is wrong.

Memory: a chunk and the largest frame, or a row group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

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
from ister.format.message import decode_message, decode_publish_times, recognise
from ister.limits import FRAME_BODY_BYTES_MAX
from ister.model import Codec
from ister.objectstore.base import ObjectStore
from ister.tier.archives import open_archive

__all__ = ["Finding", "verify_content", "verify_object", "verify_size", "walk_frames"]

# How many offsets behind a damaged frame are looked for one by one.
_SEARCHED_MAX = 64


class Finding(NamedTuple):
    """Something about an object that is not as its descriptor says."""

    reason: str
    offset: int | None = None
    position: int | None = None


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
    if descriptor.checksum is None and descriptor.format == FORMAT_PARQUET:
        for finding in verify_object(store, key, descriptor, chunk_bytes=chunk_bytes):
            raise CorruptDataError(
                finding.reason, path=key, offset=finding.offset, position=finding.position
            )
        return
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


def verify_object(
    store: ObjectStore, key: str, descriptor: ObjectDescriptor, *, chunk_bytes: int, topic: str = ""
) -> Iterator[Finding]:
    """Reads an object whole and looks at every frame or row of it.

    Checksums, offsets, bodies, counts, publish times, index entries, and the checksum of the whole.
    What a descriptor does not say is not looked at. Behind damage it goes on where it can.

    Args:
        store: The bucket.
        key: Of the object.
        descriptor: What it should be.
        chunk_bytes: How much to read at once.
        topic: The topic's name; what an archive says about it is not looked at without.

    Yields:
        What is wrong, in the order of the object; nothing if it is sound.

    Raises:
        NotFoundError: There is none.
        UnavailableError: The store does not answer.
        ConfigError: It is in Parquet and pyarrow is not installed.
    """
    if descriptor.format == FORMAT_PARQUET:
        check: _FrameCheck | _ArchiveCheck = _ArchiveCheck(store, key, descriptor, topic)
    else:
        check = _FrameCheck(store, key, descriptor, chunk_bytes)
    is_sound = True
    for finding in check.run():
        is_sound = False
        yield finding
    size = store.stat(key).size
    if size != descriptor.size_bytes:
        yield Finding(f"the object has {size} bytes and should have {descriptor.size_bytes}")
    elif descriptor.checksum is not None and check.crc is not None:
        found = format_checksum(check.crc)
        if found != descriptor.checksum:
            yield Finding(f"the object's checksum is {found}, not {descriptor.checksum}")
    if is_sound:
        yield from check.compare()


def _compare_times(
    descriptor: ObjectDescriptor, lowest: int | None, highest: int | None
) -> Iterator[Finding]:
    said = (descriptor.publish_time_min, descriptor.publish_time_max)
    if None not in said and said != (lowest, highest):
        yield Finding(
            f"published from {lowest} to {highest}, the descriptor says {said[0]} to {said[1]}"
        )


class _FrameCheck:
    """The check of an object of frames."""

    def __init__(
        self, store: ObjectStore, key: str, descriptor: ObjectDescriptor, chunk_bytes: int
    ) -> None:
        self._store = store
        self._key = key
        self._descriptor = descriptor
        self._chunk_bytes = chunk_bytes
        self.crc: int | None = 0
        """Of the bytes so far; None if not all of them were read."""
        self._codec = descriptor.codec
        self._index = dict(descriptor.offset_index)
        self._data = b""
        self._position = 0
        """Where `_data` begins."""
        self._count = 0
        self._time_min: int | None = None
        self._time_max: int | None = None
        self._has_times = True
        self._indexed: set[int] = set()

    def run(self) -> Iterator[Finding]:
        descriptor = self._descriptor
        at = descriptor.start
        while at < descriptor.end:
            scan = scan_frames(self._data, expected_offset=at, end_offset=descriptor.end)
            if scan.starts:
                yield from self._look_at(scan.starts, scan.end, at)
                at += len(scan.starts)
            self._drop(scan.end)
            if at >= descriptor.end:
                break
            if isinstance(scan.stop, NeedMore):
                if self._read_more():
                    continue
                yield Finding("the object ends before its frames do", at, self._position)
                return
            yield Finding(f"{scan.stop.reason} ({scan.stop.detail})", at, self._position)
            found = self._find_behind(at)
            if found is None:
                return
            at = found
        if self._data or self._read_more():
            yield Finding("there are bytes behind the last frame", at, self._position)

    def compare(self) -> Iterator[Finding]:
        descriptor = self._descriptor
        if descriptor.messages and self._count != descriptor.messages:
            yield Finding(f"{self._count} messages, the descriptor says {descriptor.messages}")
        if self._has_times:
            yield from _compare_times(descriptor, self._time_min, self._time_max)
        for offset in self._index.keys() - self._indexed:
            yield Finding("an index entry of no frame", offset, self._index[offset])

    def _look_at(self, starts: list[int], end: int, first: int) -> Iterator[Finding]:
        if self._codec is None:
            frame = decode_frame(self._data, starts[0])
            found = recognise(frame.body, offset=first) if isinstance(frame, Frame) else None
            self._codec = found or Codec.BINCODE2
        for number, reason in _bad_bodies(self._data, starts, end, self._codec):
            yield Finding(reason, first + number, self._position + starts[number])
        entries = self._descriptor.offset_index
        at = bisect_right(entries, first - 1, key=lambda entry: entry[0])
        for offset, position in entries[at:]:
            if offset >= first + len(starts):
                break
            self._indexed.add(offset)
            found_at = self._position + starts[offset - first]
            if position != found_at:
                yield Finding(f"the index says that it is at {position}", offset, found_at)
        times = decode_publish_times(self._data, starts, end, self._codec)
        self._has_times = self._has_times and times is not None
        for low, high in [(min(times), max(times))] if times else []:
            self._time_min = low if self._time_min is None else min(low, self._time_min)
            self._time_max = high if self._time_max is None else max(high, self._time_max)
        self._count += len(starts)

    def _read_more(self) -> bool:
        at = self._position + len(self._data)
        size = min(self._chunk_bytes, self._descriptor.size_bytes - at)
        chunk = self._store.read(self._key, at, size) if size > 0 else b""
        if self.crc is not None:
            self.crc = crc32(chunk, self.crc)
        self._data += chunk
        return bool(chunk)

    def _drop(self, count: int) -> None:
        self._data = self._data[count:]
        self._position += count

    def _find_behind(self, bad: int) -> int | None:
        """Moves to a whole frame behind a damaged one; returns its offset, None if there is none.

        Frames near the damage are looked for by the bytes of their offsets; beyond those, the index
        knows where to go on.
        """
        if len(self._data) < self._chunk_bytes:
            self._read_more()
        for offset in range(bad + 1, min(bad + 1 + _SEARCHED_MAX, self._descriptor.end)):
            at = self._data.find(offset.to_bytes(8, "little"), 1)
            while at >= 0:
                if isinstance(decode_frame(self._data, at, expected_offset=offset), Frame):
                    self._drop(at)
                    return offset
                at = self._data.find(offset.to_bytes(8, "little"), at + 1)
        entries = self._descriptor.offset_index
        for offset, position in entries[bisect_right(entries, bad, key=lambda entry: entry[0]) :]:
            if position <= self._position:
                continue
            while self._position + len(self._data) < position:
                self._drop(len(self._data))
                if not self._read_more():
                    return None
            self._drop(position - self._position)
            header = self._data[:8] if len(self._data) >= 8 or self._read_more() else b""
            if header == offset.to_bytes(8, "little"):
                return offset
        return None


def _bad_bodies(
    data: bytes, starts: list[int], end: int, codec: Codec
) -> Iterator[tuple[int, str]]:
    """Which of some whole frames have a body that is no message, by their numbers, and why."""
    try:
        from ister.format.columnar import ColumnarDecoder  # noqa: PLC0415 - needs pyarrow
    except ImportError:
        decoder = None
    else:
        decoder = ColumnarDecoder("", codec, ())
    number = 0
    while number < len(starts):
        if decoder is not None:
            first = int.from_bytes(data[starts[number] : starts[number] + 8], "little")
            view = memoryview(data)[:end]
            try:
                decoder.decode(view, starts[number], expected_offset=first)
            except CorruptDataError as error:
                number += (error.offset or first) - first
                yield number, error.message
            else:
                return
        else:
            stop = starts[number + 1] if number + 1 < len(starts) else end
            try:
                decode_message(data[starts[number] + FRAME_HEADER_SIZE : stop], codec)
            except CorruptDataError as error:
                yield number, error.message
        number += 1


class _ArchiveCheck:
    """The check of an object in Parquet."""

    def __init__(
        self, store: ObjectStore, key: str, descriptor: ObjectDescriptor, topic: str
    ) -> None:
        self._store = store
        self._key = key
        self._descriptor = descriptor
        self._topic = topic
        self.crc: int | None = None
        """Of all bytes; None if not all of them were read."""
        self._compared: list[Finding] = []

    def run(self) -> Iterator[Finding]:
        descriptor = self._descriptor
        try:
            archive = open_archive(
                lambda position, size: self._store.read(self._key, position, size),
                descriptor,
                path=self._key,
                topic=self._topic,
            )
        except CorruptDataError as error:
            yield Finding(error.message, descriptor.start, error.position)
            return
        position = archive.row_groups[0].position if archive.row_groups else 0
        crc = crc32(self._store.read(self._key, 0, position)) if position else 0
        for number, group in enumerate(archive.row_groups):
            fetched = archive.fetch(number)
            crc = crc32(fetched.pieces[0], crc)
            position = group.end_position
            try:
                archive.restore(number, fetched)
            except CorruptDataError as error:
                yield Finding(error.message, error.offset, error.position)
        rest = max(0, descriptor.size_bytes - position)
        self.crc = crc32(self._store.read(self._key, position, rest), crc)
        # What a writer would say about it, as far as the descriptor says so, too.
        expected = archive.describe(self.crc).describe(
            descriptor.object_id, epoch=0, incarnation="", created_at=0, etag=None
        )
        self._compared += _compare_times(
            descriptor, expected.publish_time_min, expected.publish_time_max
        )
        positions = {group.first_offset: group.position for group in archive.row_groups}
        for offset, at in descriptor.offset_index:
            if positions.get(offset) != at:
                self._compared.append(Finding("an index entry of no row group", offset, at))

    def compare(self) -> Iterator[Finding]:
        yield from self._compared
