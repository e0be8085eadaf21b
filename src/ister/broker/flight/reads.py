"""What clients read: ranges of messages or frames, watermarks, where a time is, plans of uploads.

A range is answered only if all of it is stored, visible, and synced: no client holds
what its topic does not. Plans and frames are for objects that are committed in an owner's name, so
that they are answered by this owner alone, and only for as long as it surely is the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import pyarrow as pa

from ister import kernels
from ister.base.limits import LOAD_SECONDS, MANY_ROWS, MIB
from ister.errors import ConflictError, OffsetOutOfRangeError, UnavailableError
from ister.format.arrow.schema import arrow_schema
from ister.format.offset_ranges import overlaps
from ister.topic.topic import Topic
from ister.topic.upload_plan import plan_topic
from ister.topic.upload_plan import read_frames as read_stored
from ister.wire.contract import (
    FRAMES_COLUMN,
    HOLES,
    FramesTicket,
    PlanUpload,
    RangeTicket,
    TopicStatus,
    UploadPlanned,
)
from ister.wire.errors import encode_error

_FRAMES_BYTES: Final = 4 * MIB


def status_of(topic: Topic) -> TopicStatus:
    """Returns the watermarks and settings of a topic."""
    marks = topic.watermarks
    return TopicStatus(
        topic=topic.name,
        incarnation=_incarnation(topic),
        earliest=topic.earliest,
        trimmed=marks.trimmed,
        tiered=marks.tiered,
        synced=marks.synced,
        written=marks.written,
        next=marks.next,
        codec=topic.codec,
        ack=topic.ack,
    )


def check_incarnation(topic: Topic, incarnation: str) -> None:
    """Refuses a topic that was deleted and created again."""
    if incarnation != _incarnation(topic):
        raise ConflictError(
            "the topic was deleted and created again",
            topic=topic.name,
            hint="request its watermarks again",
        )


def check_owner(topic: Topic, asked: PlanUpload | FramesTicket) -> None:
    """Refuses what is asked of another owner, or while this one may have been replaced.

    Raises:
        ConflictError: It is asked of another owner.
        FencedError: Another owner has the topic.
        UnavailableError: Another owner may have it.
    """
    bucket = topic.bucket
    epoch = bucket.owned.epoch if bucket is not None else 0
    if asked.epoch != epoch:
        raise ConflictError(
            f"this broker's files belong to owner epoch {epoch}, not {asked.epoch}",
            topic=topic.name,
            hint="send the request to the topic's owner, or read the topic's record again",
        )
    if bucket is not None:
        bucket.check_owner()


def check_range(topic: Topic, start: int, end: int) -> None:
    """Refuses a range that is not wholly stored, visible and synced."""
    earliest, readable = topic.earliest, min(topic.visible, topic.synced)
    if not earliest <= start <= end <= readable:
        raise OffsetOutOfRangeError(
            f"offsets {start} to {end} are not all available",
            earliest=earliest,
            next=readable,
            topic=topic.name,
            offset=start if start < earliest else end,
        )


def range_schema(topic: Topic, asked: RangeTicket) -> pa.Schema:
    """What an answer looks like; says whether messages were left out on purpose, or given up."""
    schema = arrow_schema(asked.columns)
    bucket, has_holes = topic.bucket, overlaps(topic.wal.gaps, asked.start, asked.end)
    if bucket is not None and asked.start < min(asked.end, bucket.owned.tiered):
        described = bucket.owned.catalog.descriptors(asked.start, asked.end)
        has_holes = has_holes or any(one.kept for one, _ in described)
    return schema.with_metadata({HOLES: b"1"}) if has_holes else schema


def read_range(
    topic: Topic, asked: RangeTicket, still_allowed: Callable[[], None], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The messages of a range, which was checked; `still_allowed` raises to end it.

    Raises:
        UnavailableError: Messages were left out of the range after its schema had been sent.
    """
    if asked.start == asked.end:
        return
    if asked.end - asked.start >= MANY_ROWS:
        kernels.load_cached(LOAD_SECONDS)
    if schema.metadata:
        # A client reads what the schema says with the first batch, and there may be no other one.
        yield pa.RecordBatch.from_pylist([], schema)
    columns = tuple(schema.names)
    hides_offsets = "offset" not in columns
    if hides_offsets:
        columns = (*columns, "offset")
    at = asked.start
    for batch in topic.read_arrow(asked.start, end=asked.end, columns=columns):
        still_allowed()
        if not batch.num_rows:
            continue
        offsets = batch["offset"]
        # Within a batch there are no holes.
        if offsets[0].as_py() != at and not schema.metadata:
            break
        at = offsets[-1].as_py() + 1
        yield batch.drop_columns(["offset"]) if hides_offsets else batch
    if at < asked.end and not schema.metadata:
        # An object took another one's place after the schema had been sent.
        raise UnavailableError(
            "messages were left out meanwhile; retry from this offset",
            topic=topic.name,
            offset=at,
        )


def plan_upload(topic: Topic, asked: PlanUpload) -> UploadPlanned:
    """Which objects an upload of a topic would make now."""
    check_owner(topic, asked)
    if topic.bucket is not None:
        topic.bucket.uploads.begin_term()
    plan = plan_topic(
        topic,
        asked.start,
        bytes_max=asked.bytes_max,
        span_ms_max=asked.span_ms_max,
        objects_max=asked.objects_max,
    )
    return UploadPlanned(
        start=plan.start,
        synced=plan.synced,
        codec=plan.codec,
        objects=tuple((item.end, item.size_bytes) for item in plan.objects),
        error=None if plan.error is None else encode_error(plan.error),
    )


def frames_schema(topic: Topic) -> pa.Schema:
    """What an answer with frames looks like."""
    return pa.schema([pa.field(FRAMES_COLUMN, pa.binary(), nullable=False)]).with_metadata(
        {"codec": str(topic.codec)}
    )


def read_frames(
    topic: Topic, asked: FramesTicket, still_allowed: Callable[[], None]
) -> Iterator[pa.RecordBatch]:
    """The frames of a range, some whole ones a row; `still_allowed` raises to end it."""
    check_owner(topic, asked)
    schema = frames_schema(topic)
    for frames in read_stored(topic, asked.start, asked.end, chunk_bytes=_FRAMES_BYTES):
        still_allowed()
        check_owner(topic, asked)
        first = frames.starts[0]
        data = pa.py_buffer(frames.chunk)[first : frames.end]
        offsets = pa.array([0, data.size], pa.int32()).buffers()[1]
        rows = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, data])
        yield pa.RecordBatch.from_arrays([rows], schema=schema)


def _incarnation(topic: Topic) -> str:
    return topic.bucket.owned.record.incarnation if topic.bucket is not None else ""
