"""Reads frames back from a topic's objects, a chunk at a time.

Owns: one descriptor, one position in its object, what is fetched ahead: the next chunk, or the
first ones of the objects that follow. Does not own: which offsets may be seen, local files, message
bodies.

Every call looks up the object of the wanted offset unless it is the open one, so objects may be
replaced or expire under a reader. Within an object it begins at the last index entry before the
offset, checks that the frame there is the one that the entry names (an index is a hint), and scans
on from it; each frame's crc and offset are checked. A chunk that does not check out is fetched once
more, because stores and networks have been seen to flip bits on the way; damage that stays raises
`CorruptDataError` with the object's key, the position and the offset, or is left out (`skip`). So
is an object that is lost, as long as the bucket has others: if it has none, it is another bucket.

An object in Parquet is read a row group at a time, whose rows become the frames that they once
were. Where messages were left out of it on purpose the next frame is a later one, or there is none
before the end: that is an answer, not damage.

Memory: one chunk (or one frame where that is larger), and as much again that is fetched ahead while
the caller is busy with the first; of Parquet, the frames of one row group, and the bytes of the
next. Objects are fetched ahead once the reader has gone on from one to the next.
A frame that a chunk cuts in two is read again from its first byte.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from ister.base.clock import Clock
from ister.base.limits import FRAME_BODY_BYTES_MAX, KIB
from ister.base.metrics import Metrics
from ister.base.model import Codec
from ister.bucket.catalog import Catalog
from ister.bucket.check import open_archive
from ister.bucket.chunks import OBJECTS_AHEAD_MAX, FirstRange, ObjectsAhead, await_bytes
from ister.bucket.names import manifest_key, object_key
from ister.errors import CorruptDataError, DataGapError, IsterError, NotFoundError, check
from ister.format.descriptor import FORMAT_PARQUET, KEPT_READABLE, ObjectDescriptor
from ister.format.frame import (
    FRAME_HEADER_SIZE,
    Corrupt,
    Frame,
    FrameBatch,
    NeedMore,
    NothingLeftError,
    Scan,
    decode_frame,
    scan_frames,
)
from ister.format.frame_search import FramePosition, find_frame_behind, search_frame
from ister.format.message import decode_publish_times, first_at_or_after, recognise
from ister.objectstore.base import ObjectStore
from ister.objectstore.measured import MeasuredReads

if TYPE_CHECKING:
    from ister.format.archive import ArchiveReader, Fetched
    from ister.format.arrow.encode import RestoredFrames

_log = logging.getLogger("ister.bucket.history_reader")

_CHUNK_BYTES_MIN = 64 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """Settings of a history reader."""

    chunk_bytes: int
    ranged: bool = True
    """Read parts of objects; else whole ones, and hold one."""
    skips_damage: bool = False
    """Leave damaged messages and lost objects out instead of raising."""


class HistoryReader:
    """One reader of one topic's objects. Used by one thread at a time."""

    def __init__(
        self,
        catalog: Catalog,
        store: ObjectStore,
        *,
        settings: ReaderSettings,
        clock: Clock,
        metrics: Metrics,
        ahead: Executor | None = None,
    ) -> None:
        """A reader; with `ahead`, the next chunk is fetched on it meanwhile."""
        self._catalog = catalog
        self._store = store
        self._reads = MeasuredReads(store, clock=clock, metrics=metrics)
        self._settings = settings
        self._metrics = metrics
        self._ahead = ahead
        self._object: ObjectDescriptor | None = None
        self._codec: Codec | None = None
        self._position = 0
        self._next = -1
        self._whole: bytes | None = None
        self._coming: tuple[int, int, Future[bytes]] | None = None
        self._archive: ArchiveReader | None = None
        self._restored: tuple[int, RestoredFrames] | None = None
        self._coming_group: tuple[int, Future[Fetched]] | None = None
        self._upcoming = (
            ObjectsAhead(self._reads.read, ahead, bytes_max=settings.chunk_bytes)
            if ahead is not None and settings.ranged
            else None
        )
        self._expected_end = -1
        self._goes_on = False
        self.damage_left_out = 0
        """How many offsets were left out because they are damaged or lost."""

    @property
    def held_bytes(self) -> int:
        """What is held between calls: chunks on their way, a row group, or a whole object.

        Another thread may ask while this one reads, and then gets about what it is.
        """
        coming, group, restored = self._coming, self._coming_group, self._restored
        archive, whole = self._archive, self._whole
        held = coming[1] if coming is not None else 0
        if group is not None and archive is not None and group[0] < len(archive.row_groups):
            held += archive.row_groups[group[0]].size_bytes
        if restored is not None:
            held += len(restored[1].data)
        if self._upcoming is not None:
            held += self._upcoming.held_bytes
        return held + (len(whole) if whole is not None else 0)

    def close(self) -> None:
        """Releases buffers. May be called twice."""
        self._drop_coming()
        self._drop_archive()
        self._drop_upcoming()
        self._whole = None
        self._object = None
        self._next = -1

    def fetch(
        self,
        start: int,
        end: int,
        *,
        bytes_max: int,
        span: Callable[[int, int], int | None] | None = None,
    ) -> FrameBatch:
        """Frames from `start` on, at least one, none at or after `end`, about `bytes_max` of them.

        The first frame may be a later one than `start`: where messages were left out of an object
        on purpose or given up, and where damage is, with `skips_damage`.

        `end`: the offset before which to end.
        `bytes_max`: how many bytes to fetch at most, but for one frame.
        `span`: how many bytes the frames of a range take; None if that is not known. Where it is,
        no other frames are fetched.

        Raises:
            DataGapError: No object holds `start`.
            NothingLeftError: Nothing is there before `end`, for one of these two reasons.
            NotFoundError: The object that does is lost.
            CorruptDataError: The frame is damaged.
        """
        check(start < end, "a fetch asks for something")
        while True:
            described = self._seek(start, span)
            limit = min(end, described.end)
            exact = span(start, limit) if span is not None and self._next == start else None
            try:
                return self._fetch(described, start, limit, bytes_max, exact, wanted_end=end)
            except NotFoundError as error:
                # Replaced or expired between looking and reading: look again, once per change.
                self.close()
                found = self._catalog.find(start)
                if found is None or found.object_id == described.object_id:
                    lost = self._lost(described, start)
                    if not (self._settings.skips_damage and self._has_others(described)):
                        raise lost from error
                    self._report_damage(lost, start, limit)
                    start = self._pass(limit, end)
            except _PassedEndError:
                self.close()
                start = self._pass(described.end, end)

    @staticmethod
    def _pass(next_offset: int, end: int) -> int:
        if next_offset >= end:
            raise NothingLeftError(next_offset) from None
        return next_offset

    def find_time(
        self,
        publish_time_ms: int,
        *,
        start: int = 0,
        end: int,
        on_read: Callable[[int], None] | None = None,
    ) -> int | None:
        """The first offset in a range whose message was published at or after the time.

        Whole objects are passed over by their highest publish time, index blocks too.

        `on_read`: called with the size of each chunk that was read; may raise to end the search.
        """
        for described, _ in self._catalog.descriptors(start, end):
            newest = described.publish_time_max
            if newest is not None and newest < publish_time_ms:
                continue
            offset = max(described.position_before_time(publish_time_ms)[0], start)
            limit = min(described.end, end)
            while offset < limit:
                try:
                    batch = self.fetch(offset, limit, bytes_max=self._settings.chunk_bytes)
                except NothingLeftError:
                    break
                except (NotFoundError, DataGapError):
                    first = self._catalog.first()
                    if first is not None and first.start > offset:
                        break  # expired meanwhile: what is left comes after it
                    raise
                if on_read is not None:
                    on_read(len(batch.chunk))
                times = decode_publish_times(batch.chunk, batch.starts, batch.end, batch.codec)
                found = first_at_or_after(times or [], publish_time_ms)
                if found is not None:
                    return batch.first_offset + found
                offset = batch.next_offset
        return None

    # -- where ------------------------------------------------------------------------------

    def _seek(
        self, start: int, span: Callable[[int, int], int | None] | None = None
    ) -> ObjectDescriptor:
        """The descriptor of the object that holds `start`, with the position set for it."""
        described = self._object
        if described is None or not described.start <= start < described.end:
            self._drop_coming()
            self._drop_archive()
            self._whole = None
            described = self._catalog.find(start)
            if described is None or described.end <= start:
                following = self._catalog.following(start)
                raise DataGapError(
                    "no object holds the offset",
                    start=start if described is None else described.end,
                    end=following.start if following is not None else start + 1,
                    topic=str(self._catalog.keys.topic),
                )
            self._goes_on = self._object is not None and self._object.end == start
            self._object = described
            self._codec = described.codec
            self._next = -1
            self._take_upcoming(described)
            self._metrics.count("cloud_reader.objects_opened_total")
            if described.kept == KEPT_READABLE:
                _log.warning(
                    "offsets that were given up are passed over",
                    extra={
                        "topic": str(self._catalog.keys.topic),
                        "offset": described.start,
                        "next": described.end,
                    },
                )
        if self._next != start and described.format != FORMAT_PARQUET:
            self._next, self._position = described.position_before(start)
            if span is not None and (before := span(self._next, start)):
                # Counted without reading them: if another frame is there, the scan finds it.
                self._next, self._position = start, self._position + before
        return described

    def _fetch(
        self,
        described: ObjectDescriptor,
        start: int,
        end: int,
        bytes_max: int,
        exact: int | None = None,
        *,
        wanted_end: int,
    ) -> FrameBatch:
        if described.kept and not described.messages:
            # Without pyarrow, which an archive takes.
            raise NothingLeftError(end) if end < described.end else _PassedEndError
        if described.format == FORMAT_PARQUET:
            return self._fetch_restored(described, start, end, bytes_max, wanted_end)
        size = min(self._settings.chunk_bytes, max(bytes_max, _CHUNK_BYTES_MIN))
        if exact is not None:
            size = min(size, exact)
        is_second_try = False
        while True:
            if exact is None and self._position + size >= described.size_bytes:
                self._look_ahead(described, wanted_end)
            chunk, asked = self._read(described, size)
            scan = scan_frames(chunk, expected_offset=self._next, end_offset=end)
            if scan.starts:
                batch = self._take(chunk, scan, start)
                if batch is None:
                    continue  # only frames before `start` so far
                if self._next < end and exact is None:
                    # What follows `end` may never be read.
                    self._read_ahead(described, size)
                return batch
            if isinstance(scan.stop, NeedMore) and scan.stop.size_bytes > len(chunk) == asked:
                # One frame larger than a chunk.
                size = min(scan.stop.size_bytes, FRAME_HEADER_SIZE + FRAME_BODY_BYTES_MAX)
                continue
            self._drop_coming()
            self._whole = None
            if exact is not None:
                # Counted by sizes that are other frames'.
                exact, size = None, min(self._settings.chunk_bytes, _CHUNK_BYTES_MIN)
            if not is_second_try:
                is_second_try = True
                if self._next != start or self._position:
                    # The index may be wrong; the object's beginning is not.
                    self._next, self._position = described.position_before(start)
                    if not self._agrees(described):
                        self._next, self._position = described.start, 0
                continue
            start = self._pass_damage(described, scan, start)
            if start >= end:
                raise NothingLeftError(start)
            is_second_try = False

    def _take(self, chunk: bytes, scan: Scan, start: int) -> FrameBatch | None:
        """Moves over the frames of `scan` and returns those from `start` on."""
        count = len(scan.starts)
        first = self._next
        self._next = first + count
        self._position += scan.end
        skip = start - first
        if skip >= count:
            return None
        starts = scan.starts[skip:] if skip > 0 else scan.starts
        self._metrics.count("cloud_reader.bytes_used", scan.end - starts[0])
        if self._codec is None:
            self._codec = _recognise(chunk, starts[0])
        return FrameBatch(chunk, starts, scan.end, max(start, first), self._codec)

    def _agrees(self, described: ObjectDescriptor) -> bool:
        """Whether the frame at the position has the next offset."""
        header = self._get(described, self._position, 8)
        return header == self._next.to_bytes(8, "little")

    # -- Parquet ----------------------------------------------------------------------------

    def _fetch_restored(
        self, described: ObjectDescriptor, start: int, end: int, bytes_max: int, wanted_end: int
    ) -> FrameBatch:
        """The next frames that rows of a Parquet object were, up to a hole between them."""
        while True:
            archive = self._open(described, start)
            number = archive.find(start)
            if number == len(archive.row_groups) or archive.row_groups[number].first_offset >= end:
                if end < described.end:
                    raise NothingLeftError(end)
                raise _PassedEndError
            group = archive.row_groups[number]
            if number + 1 == len(archive.row_groups):
                self._look_ahead(described, wanted_end)
            try:
                frames = self._restore(archive, number)
            except CorruptDataError as error:
                self._metrics.count("cloud_reader.errors_total")
                if not self._settings.skips_damage:
                    error.topic = str(self._catalog.keys.topic)
                    raise
                self._report_damage(error, start, group.next_offset)
                start = group.next_offset
                if start >= end:
                    raise NothingLeftError(start) from None
                continue
            at = bisect_left(frames.offsets, start)
            if frames.offsets[at] >= end:
                raise NothingLeftError(end)
            return self._cut_run(frames, at, end, bytes_max, archive.codec)

    def _cut_run(
        self, frames: RestoredFrames, at: int, end: int, bytes_max: int, codec: Codec
    ) -> FrameBatch:
        """Frames from the one at `at` on that follow each other without a hole."""
        starts, offsets = frames.starts, frames.offsets
        first = offsets[at]
        # Offsets ascend, so what is between them only grows.
        upto = bisect_right(range(len(offsets)), first - at, at, key=lambda row: offsets[row] - row)
        upto = min(upto, at + end - first)
        limit = bisect_right(starts, starts[at] + max(bytes_max, _CHUNK_BYTES_MIN), at, upto)
        upto = max(at + 1, limit if limit < upto else upto)
        stop = starts[upto] if upto < len(starts) else len(frames.data)
        return FrameBatch(frames.data, starts[at:upto], stop, first, codec)

    def _open(self, described: ObjectDescriptor, start: int) -> ArchiveReader:
        """The open archive, or that of another object; its footer is read twice at most."""
        if self._archive is None:
            key = object_key(self._catalog.keys.topic, described.object_id)
            topic = str(self._catalog.keys.topic)
            is_second_try = False
            while self._archive is None:
                try:
                    self._archive = open_archive(
                        lambda position, size: self._get(described, position, size),
                        described,
                        path=key,
                        topic=topic,
                    )
                except CorruptDataError as error:
                    self._whole = None
                    if is_second_try:
                        self._metrics.count("cloud_reader.errors_total")
                        error.topic = topic
                        if not self._settings.skips_damage:
                            raise
                        self._report_damage(error, start, described.end)
                        raise _PassedEndError from None
                    is_second_try = True
        return self._archive

    def _restore(self, archive: ArchiveReader, number: int) -> RestoredFrames:
        """The frames of a row group; if its check fails, it is fetched once more."""
        if self._restored is not None and self._restored[0] == number:
            return self._restored[1]
        self._restored = None
        try:
            restored = archive.restore(number, self._fetched(archive, number))
        except CorruptDataError:
            self._whole = None
            restored = archive.restore(number)
        self._restored = (number, restored)
        self._metrics.count("cloud_reader.bytes_used", archive.row_groups[number].size_bytes)
        self._fetch_ahead(archive, number + 1)
        return restored

    def _fetched(self, archive: ArchiveReader, number: int) -> Fetched:
        coming, self._coming_group = self._coming_group, None
        if coming is not None:
            if coming[0] == number:
                try:
                    return coming[1].result()
                except CancelledError:
                    pass  # the log is being closed: this reader ends when it has what it came for
            coming[1].cancel()
        return archive.fetch(number)

    def _fetch_ahead(self, archive: ArchiveReader, number: int) -> None:
        if self._ahead is None or not self._settings.ranged or number >= len(archive.row_groups):
            return
        try:
            self._coming_group = (number, self._ahead.submit(archive.fetch, number))
        except RuntimeError:
            return  # the log is being closed

    def _drop_archive(self) -> None:
        coming, self._coming_group = self._coming_group, None
        if coming is not None:
            coming[1].cancel()
        self._archive = self._restored = None

    # -- bytes ------------------------------------------------------------------------------

    def _read(self, described: ObjectDescriptor, size: int) -> tuple[bytes, int]:
        """The next `size` bytes, or what was fetched ahead; and how many were asked for."""
        coming, self._coming = self._coming, None
        if coming is not None:
            position, coming_size, future = coming
            if position == self._position and (found := await_bytes(future)) is not None:
                return found, coming_size
            future.cancel()
        return self._get(described, self._position, size), size

    def _read_ahead(self, described: ObjectDescriptor, size: int) -> None:
        if self._ahead is None or not self._settings.ranged:
            return
        try:
            future = self._ahead.submit(self._get, described, self._position, size)
        except RuntimeError:
            return  # the log is being closed
        self._coming = (self._position, size, future)

    def _look_ahead(self, described: ObjectDescriptor, end: int) -> None:
        """Starts to fetch the objects that follow, as far as `end`."""
        upcoming = self._upcoming
        if upcoming is None or not self._goes_on or described.end >= end:
            return
        start = max(described.end, self._expected_end)
        if upcoming.is_idle and start < end:
            # A hint: what does not work out is done again when the reader comes to it.
            with suppress(IsterError):
                found = self._catalog.descriptors(start, end, is_partial=True)
                for following, _ in islice(found, OBJECTS_AHEAD_MAX):
                    self._expected_end = following.end
                    if (first := self._first_range(following)) is not None:
                        upcoming.expect([first])
        upcoming.top_up()

    def _first_range(self, described: ObjectDescriptor) -> FirstRange | None:
        chunk_bytes, size_bytes = self._settings.chunk_bytes, described.size_bytes
        is_all = size_bytes <= chunk_bytes
        if not described.messages or (described.format == FORMAT_PARQUET and not is_all):
            return None
        key = object_key(self._catalog.keys.topic, described.object_id)
        return FirstRange(key, 0, min(size_bytes, chunk_bytes), is_all, size_bytes)

    def _take_upcoming(self, described: ObjectDescriptor) -> None:
        """Takes over what was fetched of an object that is opened now."""
        if self._upcoming is None:
            return
        if described.end > self._expected_end:
            self._drop_upcoming()
            return
        first = self._first_range(described)
        future = self._upcoming.take(first) if first is not None else None
        if first is None or future is None:
            return
        if described.format == FORMAT_PARQUET:
            self._whole = await_bytes(future)
        else:
            self._position, self._coming = 0, (0, first.size, future)

    def _drop_upcoming(self) -> None:
        self._expected_end = -1
        if self._upcoming is not None:
            self._upcoming.clear()

    def _drop_coming(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            coming[2].cancel()

    def _get(self, described: ObjectDescriptor, position: int, size: int) -> bytes:
        """Bytes of the object, never past the end that its descriptor gives."""
        key = object_key(self._catalog.keys.topic, described.object_id)
        whole = self._whole  # also read by what fetches ahead
        object_bytes = described.size_bytes
        if whole is None and not self._settings.ranged:
            self._whole = whole = self._fetch_bytes(key, 0, object_bytes, object_bytes)
        if whole is not None:
            return whole[position : position + size]
        return self._fetch_bytes(key, position, min(size, object_bytes - position), object_bytes)

    def _fetch_bytes(self, key: str, position: int, size: int, object_bytes: int) -> bytes:
        if size <= 0:
            return b""
        return self._reads.read(key, position, size, object_bytes=object_bytes)

    # -- damage -----------------------------------------------------------------------------

    def _pass_damage(self, described: ObjectDescriptor, scan: Scan, start: int) -> int:
        """Moves behind a damaged frame, if it is before `start` or damage may be left out.

        Returns the offset to continue with.
        """
        self._metrics.count("cloud_reader.errors_total")
        error = self._damage(described, scan)
        if not (self._settings.skips_damage or self._next < start):
            raise error
        found = self._find_behind(described, start)
        if found is None or found.offset >= described.end:
            if self._settings.skips_damage:
                self._report_damage(error, start, described.end)
                raise _PassedEndError
            raise error
        self._position, self._next = found
        if self._settings.skips_damage and self._next > start:
            self._report_damage(error, start, self._next)
            return self._next
        return start

    def _has_others(self, described: ObjectDescriptor) -> bool:
        """Whether the bucket has the topic's manifest or its newest object."""
        topic, last = self._catalog.keys.topic, self._catalog.last() or described
        for key in (manifest_key(topic), object_key(topic, last.object_id)):
            with suppress(NotFoundError):
                self._store.stat(key)
                return True
        return False

    def _report_damage(self, error: IsterError, start: int, next_offset: int) -> None:
        self.damage_left_out += next_offset - start
        _log.error(
            "damaged messages left out",
            extra={"error": str(error), "offset": start, "next": next_offset},
        )

    def _find_behind(self, described: ObjectDescriptor, start: int) -> FramePosition | None:
        """The next whole frame behind the damage at the position, none before `start`.

        Frames before `start` would be scanned again, and their damage found again.
        """
        read = partial(self._get, described)
        size_bytes, chunk_bytes = described.size_bytes, self._settings.chunk_bytes
        if start > self._next + 1:
            return search_frame(
                read,
                self._position + 1,
                offset_min=start,
                end_offset=described.end,
                size_bytes=size_bytes,
                chunk_bytes=chunk_bytes,
            )
        return find_frame_behind(
            read,
            self._position,
            self._next,
            end_offset=described.end,
            size_bytes=size_bytes,
            chunk_bytes=chunk_bytes,
        )

    def _damage(self, described: ObjectDescriptor, scan: Scan) -> CorruptDataError:
        if isinstance(scan.stop, Corrupt):
            reason = f"{scan.stop.reason} ({scan.stop.detail})"
        else:
            reason = "the object ends before its frames do"
        return CorruptDataError(
            f"damaged object: {reason}",
            topic=str(self._catalog.keys.topic),
            offset=self._next,
            path=object_key(self._catalog.keys.topic, described.object_id),
            position=self._position,
            hint="`ister repair` restores it where the local files still have the range",
        )

    def _lost(self, described: ObjectDescriptor, start: int) -> NotFoundError:
        self._metrics.count("cloud_reader.errors_total")
        return NotFoundError(
            f"the object with the offsets {described.start} up to {described.end} is lost",
            topic=str(self._catalog.keys.topic),
            offset=start,
            path=object_key(self._catalog.keys.topic, described.object_id),
            hint="`ister repair` restores it where the local files still have the range; "
            "`ister repair --give-up` gives it up",
        )


class _PassedEndError(Exception):
    """Nothing is left up to the end of the object."""


def _recognise(chunk: bytes, position: int) -> Codec:
    """The codec of an object without one in its descriptor, by one of its frames."""
    frame = decode_frame(chunk, position)
    found = recognise(frame.body) if isinstance(frame, Frame) else None
    return found or Codec.BINCODE2
