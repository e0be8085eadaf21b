"""Makes one object out of a range of frames: complete, checked, and not yet part of anything.

    frames ─► stream ─► complete ─► check ─► descriptor

Owns: the writing of an object under its final name. Does not own: where frames come from
(`FrameSource`), which range it is, whether the object ever becomes part of its topic. Used by a
topic's owner and by the tasks of a Spark job alike: for the same frames they make the same bytes,
under the same name, and the same descriptor.

Frames are checked one by one on their way. Memory: a chunk of frames, its copy for the store, and
the store's parts in flight; whatever the size of the object is.

What a crash leaves: an object, or parts of one, that no descriptor names.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from ister.base import failpoints
from ister.base.clock import Clock
from ister.base.limits import MIB, OBJECT_INDEX_ENTRIES_MAX
from ister.base.metrics import Metrics
from ister.base.model import Codec, Layout, TopicName
from ister.bucket.check import verify_content, verify_size
from ister.bucket.egress import EgressLimit
from ister.bucket.names import format_object_id, format_pending_id, object_key
from ister.errors import (
    ClosedError,
    CorruptDataError,
    IsterError,
    NotFoundError,
    UnavailableError,
    UnsupportedOperationError,
    check,
)
from ister.format.crc import Buffer, crc32
from ister.format.descriptor import ObjectDescriptor, format_checksum
from ister.format.frame import FrameBatch
from ister.format.message import decode_publish_times
from ister.objectstore.base import ObjectStore, ObjectWriter

_log = logging.getLogger("ister.bucket.object_maker")


class FrameSource(Protocol):
    """Where an upload's frames come from. Used by one thread at a time."""

    def plan(self, start: int, end: int, *, bytes_max: int, span_ms_max: int) -> int:
        """Where a range from `start` on has to end to stay within the limits of an object."""
        ...

    def fetch(self, start: int, end: int, *, bytes_max: int) -> FrameBatch:
        """Checked frames from `start` on, at least one, none at or after `end`."""
        ...

    def arrived_ms(self, start: int, end: int) -> int | None:
        """The latest possible arrival time of a range's newest message; None if unknown."""
        ...

    def close(self) -> None:
        """Closes files. May be called twice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadSettings:
    """Settings of an uploader."""

    copies: bool
    """Write under a pending name and copy, for stores that list unfinished objects."""
    chunk_bytes: int
    concurrent_parts: int
    index_every_messages: int
    object_bytes_max: int
    object_span_ms_max: int
    layout: Layout = Layout.OBJECTS

    @property
    def read_bytes(self) -> int:
        """How much is read from the source at once: with its copy it takes up one part."""
        return max(self.chunk_bytes // 2, 64 * 1024)


class ObjectMaker:
    """Makes the objects of one topic. Used by one thread at a time."""

    def __init__(
        self,
        topic: TopicName,
        store: ObjectStore,
        *,
        settings: UploadSettings,
        clock: Clock,
        metrics: Metrics,
        pending_tag: str | None = None,
        on_memory: Callable[[int], None] = lambda change: None,
        on_parts: Callable[[int], None] = lambda change: None,
        is_stopping: Callable[[], bool] = lambda: False,
        egress: EgressLimit | None = None,
    ) -> None:
        """Creates a maker for one topic.

        `pending_tag`: eight hexadecimal digits, where others may write objects with the same first
        offset at the same time: their pending names have to differ.
        `on_parts`: called with each change of the number of parts in flight, an upper bound.
        `egress`: limits the upload rate; None for no limit.
        """
        self._topic = topic
        self._store = store
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._pending_tag = pending_tag
        self._on_memory = on_memory
        self._on_parts = on_parts
        self._is_stopping = is_stopping
        self._egress = egress
        self.chunks = 0
        """In how many pieces the newest object was handed to the store."""

    def make(
        self,
        source: FrameSource,
        start: int,
        end: int,
        *,
        epoch: int,
        incarnation: str,
        tag: str | None = None,
        arrived_ms: int | None = None,
    ) -> ObjectDescriptor:
        """Streams a range into an object.

        `tag`: eight random hexadecimal digits, for one that must not meet another in its name.
        `arrived_ms`: when the newest message arrived; None to ask the source.

        Raises:
            CorruptDataError: A frame is damaged, or the object is not what was written.
            ClosedError: The topic or job is stopping.
        """
        object_id = format_object_id(start, end, epoch, tag=tag, layout=self._settings.layout)
        key = object_key(self._topic, object_id)
        if self._settings.copies:
            pending_id = format_pending_id(start, epoch, tag=self._pending_tag)
            pending = object_key(self._topic, pending_id)
            summary = self._stream(source, pending, start, end)
            self._copy(pending, key, summary)
        else:
            summary = self._stream(source, key, start, end)
        etag = verify_size(self._store, key, summary.size_bytes)
        failpoints.reach("tier.after_complete")
        described = summary.describe(
            object_id,
            epoch=epoch,
            incarnation=incarnation,
            created_at=self._clock.now_ns() // 1_000_000_000,
            etag=etag,
        )
        if arrived_ms is None:
            arrived_ms = source.arrived_ms(start, end)
        return replace(described, arrival_time_max=arrived_ms)

    def _stream(self, source: FrameSource, key: str, start: int, end: int) -> ObjectSummary:
        settings = self._settings
        summary = ObjectSummary(start, index_every_messages=settings.index_every_messages)
        held = settings.chunk_bytes * (settings.concurrent_parts + 2)
        writer = self._store.open_writer(
            key, chunk_bytes=settings.chunk_bytes, concurrent_parts=settings.concurrent_parts
        )
        self._on_memory(held)
        parts = self.chunks = 0
        try:
            while summary.end < end:
                self._check_stopping()
                batch = source.fetch(summary.end, end, bytes_max=settings.read_bytes)
                data = summary.add(batch)
                self._wait_for_egress(len(data))
                writer.write(data)
                # A store does not report which parts it has stored; this is the upper bound.
                begun = min(
                    -(-summary.size_bytes // settings.chunk_bytes), settings.concurrent_parts
                )
                self._on_parts(begun - parts)
                parts = begun
                self.chunks += 1
                self._metrics.observe("uploader.stream_chunk_bytes", len(data))
                failpoints.reach("tier.after_part")
            failpoints.reach("tier.before_complete")
            self._complete(writer, key, summary)
        finally:
            # After a close that succeeded this does nothing.
            writer.abort()
            self._on_memory(-held)
            self._on_parts(-parts)
        return summary

    def _check_stopping(self) -> None:
        if self._is_stopping():
            raise ClosedError("the topic is being closed", topic=str(self._topic))

    def _wait_for_egress(self, size_bytes: int) -> None:
        if self._egress is not None and not self._egress.take(size_bytes, self._is_stopping):
            self._check_stopping()

    def _complete(self, writer: ObjectWriter, key: str, summary: ObjectSummary) -> None:
        wanted = summary.describe("unknown", epoch=0, incarnation="", created_at=0, etag=None)
        complete_object(writer, self._store, key, wanted, chunk_bytes=self._settings.read_bytes)

    # -- finalize: copy ---------------------------------------------------------------------

    def _copy(self, pending: str, key: str, summary: ObjectSummary) -> None:
        verify_size(self._store, pending, summary.size_bytes)
        try:
            self._store.copy(pending, key)
        except UnsupportedOperationError:
            self._copy_by_hand(pending, key, summary)
        failpoints.reach("tier.after_copy")
        try:
            self._store.delete(pending)
        except IsterError as error:
            # Garbage collection finds it; the object itself is in place.
            _log.warning("pending object not removed", extra={"error": str(error)})
        failpoints.reach("tier.after_delete_pending")

    def _copy_by_hand(self, pending: str, key: str, summary: ObjectSummary) -> None:
        settings = self._settings
        writer = self._store.open_writer(
            key, chunk_bytes=settings.chunk_bytes, concurrent_parts=settings.concurrent_parts
        )
        try:
            position = 0
            while position < summary.size_bytes:
                chunk = self._store.read(pending, position, settings.read_bytes)
                if not chunk:
                    raise CorruptDataError("the pending object is too short", path=pending)
                self._wait_for_egress(len(chunk))
                writer.write(chunk)
                position += len(chunk)
            self._complete(writer, key, summary)
        finally:
            writer.abort()


def complete_object(
    writer: ObjectWriter,
    store: ObjectStore,
    key: str,
    wanted: ObjectDescriptor,
    *,
    chunk_bytes: int,
) -> None:
    """Completes an object; if the answer is lost, checks whether the object exists."""
    try:
        writer.close()
    except UnavailableError:
        try:
            verify_content(store, key, wanted, chunk_bytes=chunk_bytes)
        except (NotFoundError, CorruptDataError):
            pass
        else:
            return
        raise


_INDEX_BYTES: Final = MIB


class ObjectSummary:
    """The sum of the frames of one object, in their order."""

    def __init__(self, start: int, *, index_every_messages: int) -> None:
        self.start = start
        self.end = start
        self.size_bytes = 0
        self.crc = 0
        self.codec: Codec | None = None
        self._every_messages = index_every_messages
        self._every_bytes = _INDEX_BYTES
        self._index: list[tuple[int, int]] = []
        self._times_before: list[int] = []
        self._time_min: int | None = None
        self._time_max = 0
        self._has_times = True

    def add(self, batch: FrameBatch) -> Buffer:
        """Adds the next frames; returns their bytes, which follow in the object."""
        check(batch.first_offset == self.end, "frames of an object follow each other")
        check(self.codec in (None, batch.codec), "an object has one codec")
        self.codec = batch.codec
        first = batch.starts[0]
        data: Buffer = batch.chunk
        if first or batch.end < len(data):
            data = memoryview(data)[first : batch.end]
        self.crc = crc32(data, self.crc)
        times = (
            decode_publish_times(batch.chunk, batch.starts, batch.end, batch.codec)
            if self._has_times
            else None
        )
        self._has_times = times is not None
        self._add_entries(batch, first, times or [])
        if times:
            low, high = min(times), max(times)
            self._time_max = max(self._time_max, high)
            self._time_min = low if self._time_min is None else min(self._time_min, low)
        self.size_bytes += len(data)
        self.end = batch.next_offset
        return data

    def _add_entries(self, batch: FrameBatch, first: int, times: list[int]) -> None:
        """Adds every so many frames of a batch to the index."""
        base = self.size_bytes - first
        count = len(batch.starts)
        at, time_max, seen = 0, self._time_max, 0
        while True:
            if self._index:
                offset, position = self._index[-1]
                at = min(
                    max(offset + self._every_messages - self.end, 0),
                    bisect_left(batch.starts, position + self._every_bytes - base),
                )
            if at >= count:
                return
            if times:
                time_max = max([time_max, *times[seen:at]])
                seen = at
            self._index.append((self.end + at, base + batch.starts[at]))
            self._times_before.append(time_max)
            if len(self._index) > OBJECT_INDEX_ENTRIES_MAX:
                del self._index[1::2]
                del self._times_before[1::2]
                self._every_messages *= 2
                self._every_bytes *= 2

    def describe(
        self, object_id: str, *, epoch: int, incarnation: str, created_at: int, etag: str | None
    ) -> ObjectDescriptor:
        """The descriptor of an object with exactly these frames."""
        return ObjectDescriptor(
            object_id=object_id,
            start=self.start,
            end=self.end,
            size_bytes=self.size_bytes,
            etag=etag,
            created_at=created_at,
            offset_index=tuple(self._index),
            codec=self.codec,
            epoch=epoch,
            incarnation=incarnation,
            messages=self.end - self.start,
            publish_time_min=self._time_min if self._has_times else None,
            publish_time_max=self._time_max if self._has_times else None,
            publish_time_index=tuple(self._times_before) if self._has_times else (),
            checksum=format_checksum(self.crc),
        )
