"""Which objects an upload would make, and the frames for them, without making any.

    [start, synced) ─► ranges, each within the limits of an object ─► frames of a range

Owns: nothing; reads local files, by their indexes. Does not own: whether anything is uploaded, and
by whom: a job plans with this on the machine that has the files, or asks the topic's owner to.

The ranges are those that the owner's own cycle would come to (`ister.bucket.upload`): one object
after the other from `start` on, each as long as its limits allow, the last one up to `synced`.
A damaged frame ends the plan: what precedes it is planned, and the error has its position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ister.base.clock import Clock, SystemClock
from ister.base.limits import KIB
from ister.base.metrics import Metrics
from ister.base.model import Codec
from ister.errors import CorruptDataError, DataGapError, NotFoundError, OffsetOutOfRangeError
from ister.format.frame import FrameBatch
from ister.topic.topic import Topic
from ister.wal.reader import ReadableLog, WalReader

# A plan looks at frames around the ends of objects only.
_PLAN_CHUNK_BYTES: Final = 256 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedObject:
    """An object that an upload would make."""

    start: int
    end: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadPlan:
    """What an upload would make of a topic now."""

    start: int
    """Where it begins."""
    synced: int
    """Nothing at or after this offset is uploaded."""
    codec: Codec
    objects: tuple[PlannedObject, ...]
    """One after the other from `start` on; there may be more than were asked for."""
    error: CorruptDataError | None = None
    """Damage right behind the last object: nothing is uploaded from there on."""

    @property
    def end(self) -> int:
        """Where the planned objects end."""
        return self.objects[-1].end if self.objects else self.start


def plan_objects(
    log: ReadableLog,
    start: int | None,
    synced: int,
    *,
    bytes_max: int,
    span_ms_max: int,
    objects_max: int,
    metrics: Metrics,
    clock: Clock,
) -> UploadPlan:
    """Plans an upload from a log's files.

    `start`: where the newest object ends; None if there is none: where the files begin.
    `span_ms_max`: the time between its first message and its last one.
    `objects_max`: how many are planned at most.

    Raises:
        DataGapError: The bucket ends before the files begin.
        NotFoundError: A file that should be there is not.
    """
    topic, codec = log.settings.topic, log.settings.codec
    trimmed = log.trimmed
    if start is None:
        start = trimmed
    if start < trimmed:
        raise DataGapError(
            "the bucket ends before the local files begin", start=start, end=trimmed, topic=topic
        )
    source = WalReader(log, chunk_bytes=_PLAN_CHUNK_BYTES, metrics=metrics, clock=clock)
    objects: list[PlannedObject] = []
    error: CorruptDataError | None = None
    try:
        at = start
        place: tuple[int, int] | None = None
        while at < synced and len(objects) < objects_max:
            try:
                end = source.plan(at, synced, bytes_max=bytes_max, span_ms_max=span_ms_max)
            except CorruptDataError as damage:
                if damage.offset is None or not at < damage.offset < synced:
                    error = damage
                    break
                end = source.plan(at, damage.offset, bytes_max=bytes_max, span_ms_max=span_ms_max)
            size, place = _measure(log, source, at, end, place)
            objects.append(PlannedObject(start=at, end=end, size_bytes=size))
            at = end
    finally:
        source.close()
    return UploadPlan(start=start, synced=synced, codec=codec, objects=tuple(objects), error=error)


def _measure(
    log: ReadableLog, source: WalReader, start: int, end: int, begin: tuple[int, int] | None
) -> tuple[int, tuple[int, int] | None]:
    """How many bytes the frames of a range take, and the place where they end, if it is known."""
    try:
        if begin is None:
            begin = source.place_of(start) if start > log.trimmed else (log.files[0].seq, 0)
        finish = source.place_of(end)
    except CorruptDataError:
        # Making the object will raise the error; until then its size is unknown.
        return 0, None
    if begin[0] == finish[0]:
        return finish[1] - begin[1], finish
    return _sizes(log, begin[0], finish[0]) - begin[1] + finish[1], finish


def _sizes(log: ReadableLog, first_seq: int, end_seq: int) -> int:
    """The size of the files from one number up to, not including, another one."""
    directory, total = log.directory, 0
    if directory is None:
        return 0
    for file in log.files:
        if first_seq <= file.seq < end_seq:
            total += directory.log_size(file.seq)
    return total


def plan_topic(
    topic: Topic, start: int | None, *, bytes_max: int, span_ms_max: int, objects_max: int
) -> UploadPlan:
    """Plans an upload of a topic that this process has open; as `plan_objects`."""
    wal = topic.wal
    return plan_objects(
        wal,
        start,
        wal.synced,
        bytes_max=bytes_max,
        span_ms_max=span_ms_max,
        objects_max=objects_max,
        metrics=Metrics(),
        clock=SystemClock(),
    )


def read_frames(topic: Topic, start: int, end: int, *, chunk_bytes: int) -> Iterator[FrameBatch]:
    """The frames of a range from the local files of a topic that this process has open.

    Each batch is whole frames, checked, of about `chunk_bytes` or one frame.

    Raises:
        OffsetOutOfRangeError: Not all of the range is in local files and synced.
    """
    wal = topic.wal
    if not wal.trimmed <= start <= end <= wal.synced:
        raise _not_here(topic, start)
    source = WalReader(wal, chunk_bytes=chunk_bytes, metrics=Metrics(), clock=SystemClock())
    try:
        while start < end:
            batch = source.fetch(start, end, bytes_max=chunk_bytes)
            yield batch
            start = batch.next_offset
    except NotFoundError as error:
        raise _not_here(topic, start) from error
    finally:
        source.close()


def _not_here(topic: Topic, offset: int) -> OffsetOutOfRangeError:
    return OffsetOutOfRangeError(
        "the frames are not all in local files and synced",
        topic=topic.name,
        offset=offset,
        earliest=topic.wal.trimmed,
        next=topic.wal.synced,
    )
