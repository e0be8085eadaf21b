"""Fetches a part of an object as chunks of bytes, for those who decode whole chunks at once.

    ObjectPart: object ── position ─┬─ boundary ─┬─ boundary ─┬─ end_position
                                    chunk        chunk        chunk

Owns: where to cut, and one chunk fetched ahead. Does not own: frames, damage, replaced objects:
`ister.bucket.history_reader` knows about those and is asked when something is not as it should be.

Cuts fall on index entries where there are such, so that a chunk begins and ends with a frame and
nothing has to be carried over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ister.clock import Clock
from ister.format.crc import Buffer
from ister.format.descriptor import FORMAT_FRAMES, ObjectDescriptor
from ister.metrics import Metrics
from ister.model import Codec
from ister.objectstore.base import ObjectStore
from ister.objectstore.measured import MeasuredReads


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectPart:
    """The offsets `start` (included) to `end` (excluded) of one object, and where its bytes are.

    Positions come from the object's index, and an index is a hint: a reader that finds another
    frame at `position` than `index_offset` has to start at the object's first byte.
    """

    topic: str
    object_id: str
    codec: Codec | None
    """None if another program wrote the object: detected from the first frame."""
    start: int
    end: int
    index_offset: int
    """The offset of the frame at `position`: at or before `start`."""
    position: int
    """Where to start reading; frames before `start` are skipped."""
    end_position: int
    """All wanted frames end at or before this: another frame's position, or the object's size."""
    boundaries: tuple[int, ...] = ()
    """Positions of frames strictly between the two: a fetch that ends there splits no frame."""
    format: str = FORMAT_FRAMES
    """For Parquet the positions only tell how much there is to read; the footer tells where."""
    object_bytes: int = 0
    """Size of the whole object; required for Parquet, to find its footer."""

    @property
    def bytes(self) -> int:
        """Number of bytes to read."""
        return self.end_position - self.position

    @classmethod
    def of(cls, topic: str, described: ObjectDescriptor, start: int, end: int) -> ObjectPart:
        """Returns the part of an object that overlaps a range; it has to overlap."""
        start, end = max(start, described.start), min(end, described.end)
        index_offset, position = described.position_before(start)
        following = [at for offset, at in described.offset_index if offset >= end]
        end_position = following[0] if following else described.size_bytes
        return cls(
            topic=topic,
            object_id=described.object_id,
            codec=described.codec,
            start=start,
            end=end,
            index_offset=index_offset,
            position=position,
            end_position=end_position,
            boundaries=tuple(
                at for _, at in described.offset_index if position < at < end_position
            ),
            format=described.format,
            object_bytes=described.size_bytes,
        )


def fetch_chunks(
    store: ObjectStore,
    key: str,
    part: ObjectPart,
    *,
    chunk_bytes: int,
    ahead: Executor | None,
    clock: Clock,
    metrics: Metrics,
) -> Generator[Buffer]:
    """The bytes of a part in order; with `ahead`, the next chunk is fetched on it meanwhile.

    The chunks are views (`ObjectStore.view`): decode each one once, and copy what is kept.

    Raises:
        NotFoundError: There is no such object (any more).
        UnavailableError: The store does not answer.
    """
    fetch = partial(
        MeasuredReads(store, clock=clock, metrics=metrics).view,
        key,
        object_bytes=part.object_bytes,
    )
    metrics.count("cloud_reader.objects_opened_total")
    coming: Future[Buffer] | None = None
    position = part.position
    try:
        while position < part.end_position:
            cut = _cut(part, position, chunk_bytes)
            chunk = coming.result() if coming is not None else fetch(position, cut - position)
            coming = None
            position = cut
            if ahead is not None and position < part.end_position:
                upto = _cut(part, position, chunk_bytes)
                with suppress(RuntimeError):  # the executor is being closed
                    coming = ahead.submit(fetch, position, upto - position)
            yield chunk
    finally:
        if coming is not None:
            coming.cancel()


def _cut(part: ObjectPart, position: int, chunk_bytes: int) -> int:
    """Where the chunk that begins at `position` ends."""
    limit = min(position + chunk_bytes, part.end_position)
    if limit == part.end_position:
        return limit
    at = bisect_right(part.boundaries, limit)
    boundary = part.boundaries[at - 1] if at else 0
    return boundary if boundary > position else limit
