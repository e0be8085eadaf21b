"""Fetches a part of an object as chunks of bytes, for those who decode whole chunks at once.

    ObjectPart: object ── position ─┬─ boundary ─┬─ boundary ─┬─ end_position
                                    chunk        chunk        chunk

Owns: where to cut, and what is fetched ahead: the next chunk of the object, or the first ones of
the objects that follow. Does not own: frames, damage, replaced objects:
`ister.bucket.history_reader` knows about those and is asked when something is not as it should be.

Memory: the chunk that is being decoded, and as much again that is fetched ahead.

Cuts fall on index entries where there are such, so that a chunk begins and ends with a frame and
nothing has to be carried over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar

from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import Codec
from ister.format.crc import Buffer
from ister.format.descriptor import FORMAT_FRAMES, FORMAT_PARQUET, ObjectDescriptor
from ister.objectstore.base import ObjectStore
from ister.objectstore.measured import MeasuredReads

OBJECTS_AHEAD_MAX: Final = 8
"""How many objects a reader fetches at once beside the one that it reads."""

_Bytes = TypeVar("_Bytes", bound=Buffer)


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
    def overlapping(
        cls, topic: str, described: ObjectDescriptor, start: int, end: int
    ) -> ObjectPart:
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


class FirstRange(NamedTuple):
    """The bytes of an object that a reader asks for first."""

    key: str
    start: int
    size: int
    is_all: bool
    """Whether the reader needs no others of that object."""
    object_bytes: int
    """Size of the whole object."""

    @classmethod
    def of_part(cls, key: str, part: ObjectPart, chunk_bytes: int) -> FirstRange | None:
        """Returns the first bytes of a part; None if they are not known without reading."""
        if part.format == FORMAT_PARQUET:
            size = part.object_bytes
            return cls(key, 0, size, True, size) if size <= chunk_bytes else None
        if part.codec is None:
            return None
        cut = _cut(part, part.position, chunk_bytes)
        is_all = cut == part.end_position
        return cls(key, part.position, cut - part.position, is_all, part.object_bytes)


class ObjectsAhead(Generic[_Bytes]):
    """Fetches the first bytes of the objects that a reader comes to next.

    Used by one thread; others may ask for `held_bytes` meanwhile. No more than `bytes_max` are
    fetched or kept at a time.
    """

    def __init__(
        self, fetch: Callable[[str, int, int, int], _Bytes], executor: Executor, *, bytes_max: int
    ) -> None:
        self._fetch = fetch
        self._executor = executor
        self._bytes_max = bytes_max
        self._wanted: deque[FirstRange] = deque()
        self._coming: dict[FirstRange, Future[_Bytes]] = {}

    @property
    def held_bytes(self) -> int:
        """What is fetched, or on its way."""
        return sum(one.size for one in tuple(self._coming))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to be fetched."""
        return not self._wanted

    def expect(self, ranges: Iterable[FirstRange]) -> None:
        """Adds what is going to be read, in the order of reading."""
        self._wanted.extend(ranges)

    def top_up(self) -> None:
        """Starts as many fetches as there is room for."""
        held = self.held_bytes
        while self._wanted and len(self._coming) < OBJECTS_AHEAD_MAX:
            following = self._wanted[0]
            held += following.size
            if held > self._bytes_max:
                return
            try:
                future = self._executor.submit(
                    self._fetch,
                    following.key,
                    following.start,
                    following.size,
                    following.object_bytes,
                )
            except RuntimeError:
                return  # the executor is being closed
            self._coming[self._wanted.popleft()] = future
            if not following.is_all:
                return  # its next chunk is fetched before the following object

    def take(self, wanted: FirstRange) -> Future[_Bytes] | None:
        """Returns the fetch of a range that is read now; forgets those that were to come before."""
        if wanted not in self._coming:
            if wanted in self._wanted:
                self._drop_coming()
                while self._wanted.popleft() != wanted:
                    pass
            return None
        while (first := next(iter(self._coming))) != wanted:
            self._coming.pop(first).cancel()
        future = self._coming.pop(first)
        # A failure from a while ago is no answer to who asks now.
        has_failed = future.done() and (future.cancelled() or future.exception() is not None)
        return None if has_failed else future

    def clear(self) -> None:
        """Forgets everything. May be called twice."""
        self._wanted.clear()
        self._drop_coming()

    def _drop_coming(self) -> None:
        for future in self._coming.values():
            future.cancel()
        self._coming.clear()


def await_bytes(coming: Future[_Bytes] | None) -> _Bytes | None:
    """What was fetched ahead; None if there is none, or its executor is being closed."""
    if coming is None:
        return None
    try:
        return coming.result()
    except CancelledError:
        return None


def fetch_chunks(
    store: ObjectStore,
    key: str,
    part: ObjectPart,
    *,
    chunk_bytes: int,
    ahead: Executor | None,
    clock: Clock,
    metrics: Metrics,
    upcoming: ObjectsAhead[Buffer] | None = None,
) -> Generator[Buffer]:
    """The bytes of a part in order; with `ahead`, the next chunk is fetched on it meanwhile.

    During the last chunk, the objects that `upcoming` expects are fetched.

    The chunks are views (`ObjectStore.view`): decode each one once, and copy what is kept.
    """
    fetch = partial(
        MeasuredReads(store, clock=clock, metrics=metrics).view, key, object_bytes=part.object_bytes
    )
    metrics.count("cloud_reader.objects_opened_total")
    position = part.position
    first = FirstRange.of_part(key, part, chunk_bytes)
    coming = upcoming.take(first) if upcoming is not None and first is not None else None
    try:
        while position < part.end_position:
            cut = _cut(part, position, chunk_bytes)
            if upcoming is not None and cut == part.end_position:
                upcoming.top_up()
            chunk = await_bytes(coming)
            coming = None
            if chunk is None:
                chunk = fetch(position, cut - position)
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
