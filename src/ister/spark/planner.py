"""The planner: (descriptors, watermarks, range) → partitions, and how much a micro-batch takes.

Owns: which bytes of which object a task reads, where objects are cut, what goes together. Does not
own: I/O of any kind; finding out what a topic holds; turning times into offsets; what to do about
lost data.

    topic      ├──────────── tiered ────────────┤────── tail ──────┤
    objects    ├─────A─────┤──B──┤──────C───────┤
    index      ├───┼───┼───┤     ├──┼──┼──┼──┼──┤
    slices     ├─────A─┤─A─┤──B──┤────C──┤───C──┤───────tail───────┤
    partitions ╰───0───╯╰────1───╯╰──2───╯╰─────────────3──────────╯

An object is cut at entries of its index only, which are where frames begin: a task that reads from
the middle of an object finds a frame there, and two tasks do not read the same bytes. An object in
Parquet is cut between row groups. What is not tiered has no index and is cut by offsets.

Partitions are filled one after the other, in the order of the ranges, each with an even share of
the weight that is left: the bytes that a task has to decode (those of Parquet before compression),
and a fixed number of bytes for every slice but the first, because opening an object takes time,
too. One rule says where a partition ends: at the index entry that is nearest to its share.

Spark gives a Python data source neither the number of cores (the planner's process has no session)
nor preferred locations (`PythonInputPartition` has none up to 4.3), so partitions are not placed.

Invariants:
- Every offset of every range is in exactly one slice; slices keep the order of the ranges.
- A partition weighs an eighth more than the target at most, or is one index block, or one message
  of a tail, that cannot be cut.
- There are at most three times as many partitions as the weight of all ranges needs, and one more;
  at least `min_partitions` where the indexes allow it.
- The same input gives the same partitions: a replayed micro-batch is planned as it was before.
- An index is a hint. One that does not ascend, or that leaves its object, is not used at all.
- The limit of a micro-batch reads no more descriptors than it needs to find its end.

A crash loses nothing here: a plan is computed again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self, TypeAlias

from ister.base.limits import KIB, MIB
from ister.bucket.chunks import ObjectPart
from ister.bucket.compaction_plan import weigh
from ister.errors import DataGapError, check
from ister.format.descriptor import FORMAT_FRAMES, FORMAT_PARQUET, ObjectDescriptor

SPLIT_BYTES_DEFAULT: Final = 64 * MIB
"""About what a partition weighs."""
SLOTS_ASSUMED: Final = 8
"""Number of tasks that a cluster is assumed to run at once, if it is not known."""

_OPEN_BYTES: Final = 256 * KIB
"""What opening an object weighs. The first byte of a GET comes after 10 to 20 ms from a bucket, and
after half a millisecond of processor time from a directory; in that time a task decodes 1 to
2 MiB, or 50 KiB. A task costs some 50 ms itself. With this weight it opens at most 256 small
objects, which takes a few seconds at worst and twice its own cost at best."""
_OPENS_MAX: Final = SPLIT_BYTES_DEFAULT // _OPEN_BYTES
"""Where the target is small, opening weighs this part of it: tasks still take small objects."""

_SLOT_BYTES_MIN: Final = 16 * MIB
"""Less than this is not divided among slots: a task of this size runs about as long as starting it
takes."""

_BOUNDARY_BYTES_MIN: Final = 1 * MIB
"""The least distance of a slice's `boundaries`: a request for less is mostly latency."""

_PLAY: Final = 8
"""Partitions may be larger than the target by this part of it: entries seldom lie where a share
ends, and two that are each a little over the target would otherwise become three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailSlice:
    """Offsets that were not tiered when they were planned: `start` up to, not including, `end`."""

    topic: str
    start: int
    end: int
    bytes: int
    """An estimate."""


Slice: TypeAlias = ObjectPart | TailSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """What one task reads, in this order."""

    number: int
    slices: tuple[Slice, ...]
    weight: int
    """The bytes to decode, and what opening the objects costs, in bytes; an estimate."""

    @property
    def bytes(self) -> int:
        """How much is read, with an estimate for the tail."""
        return sum(item.bytes for item in self.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRange:
    """The planner's input for one topic: read `start` up to, not including, `end`."""

    topic: str
    incarnation: str
    start: int
    end: int
    tiered: int
    """The tail is what is wanted from here on."""
    descriptors: Iterable[ObjectDescriptor]
    """Those that overlap the part before `tiered`, ascending; they may overlap each other.
    `limit_bytes` reads only as many as it needs."""
    tail_bytes: int
    """An estimate of the bytes from `max(start, tiered)` to `end`."""

    def __post_init__(self) -> None:
        check(
            0 <= self.start <= self.end and self.tail_bytes >= 0,
            f"not a range of {self.topic}: {self.start} to {self.end}, {self.tail_bytes} bytes",
        )

    @property
    def objects_end(self) -> int:
        """The end of the part that objects hold."""
        return max(self.start, min(self.end, self.tiered))


def plan(
    ranges: Sequence[TopicRange],
    *,
    split_bytes: int = SPLIT_BYTES_DEFAULT,
    min_partitions: int | None = None,
    slots: int | None = None,
) -> list[Partition]:
    """Divides what is to be read into partitions of about the same weight.

    Objects are cut at index entries, tails by offsets; what is small goes together. The target is
    `split_bytes`, or less where that gives too few partitions.

    Args:
        ranges: One for each topic, or several that ascend.
        split_bytes: About what a partition weighs.
        min_partitions: The minimum number of partitions, where the indexes allow it.
        slots: How many tasks run at once: a target below `split_bytes` gives each of them
            something to do, if there is enough.

    Raises:
        DataGapError: Offsets of a range are in none of its objects; names the first such gap.
    """
    pieces = [piece for item in ranges for piece in _pieces(item, _in_order(item.descriptors))]
    target = max(split_bytes, 1)
    opening = min(_OPEN_BYTES, target // _OPENS_MAX)
    if slots is not None:
        total = sum(piece.weight + opening for piece in pieces)
        target = min(target, max(-(-total // max(slots, 1)), _SLOT_BYTES_MIN))
    least = min_partitions or 1
    groups = _fill(pieces, target, opening, least)
    count = least
    while len(groups) < least and any(len(one) > 1 or one[0].is_divisible for one in groups):
        # Heavy blocks that cannot be cut have taken the shares of others.
        count *= 2
        groups = _fill(pieces, target, opening, count)
    return [
        Partition(
            number=number,
            slices=tuple(piece.to_slice() for piece in group),
            weight=_weigh(group, opening),
        )
        for number, group in enumerate(groups)
    ]


def limit_messages(
    starts: Mapping[str, int], ends: Mapping[str, int], max_messages: int
) -> dict[str, int]:
    """How far a micro-batch goes in each topic if it may take so many messages in all.

    Topics get shares in proportion to what they have pending, and each that has something gets at
    least one message where the limit is high enough; else the longest queues do.

    At least one message is always taken.

    Returns:
        The new end of each topic of `ends`, never before its start.
    """
    pending = {topic: ends[topic] - starts[topic] for topic in sorted(ends)}
    new_ends = {topic: starts[topic] for topic in pending}
    pending = {topic: count for topic, count in pending.items() if count > 0}
    limit = max(max_messages, 1)
    if limit < len(pending):
        longest = sorted(pending, key=lambda topic: (-pending[topic], topic))
        taken = dict.fromkeys(longest[:limit], 1)
    else:
        taken = _share_with_all(pending, limit)
    for topic, count in taken.items():
        new_ends[topic] += count
    return new_ends


def limit_bytes(ranges: Sequence[TopicRange], max_bytes: int) -> dict[str, int]:
    """How far a micro-batch goes in each topic if it may read about so many bytes in all.

    Topics get shares in proportion to their pending bytes, which for objects are estimated from
    the first one's messages; what a topic does not need of its share goes to the others. A topic
    goes up to the last index entry within its share, in the tail by the average size of a message,
    and at least one index block (or one message of the tail) far: a limit slows a stream and never
    stops it. So it takes at most `max_bytes` and one block for each topic.

    Reads the descriptors of a range no further than the batch goes, and one object more.

    Returns:
        The new end of each range's topic.

    Raises:
        DataGapError: Offsets of a range are in none of its objects; names the first such gap. Gaps
            after the batch are not detected.
    """
    by_topic: dict[str, list[TopicRange]] = {}
    for item in ranges:
        by_topic.setdefault(item.topic, []).append(item)
    pending = {topic: _Pending(items) for topic, items in by_topic.items()}
    waiting, left = list(pending.values()), max(max_bytes, 0)
    while waiting and left > 0:
        estimates = [topic.estimate() for topic in waiting]
        shares = [left * estimate // max(sum(estimates), 1) for estimate in estimates]
        shares[0] += left - sum(shares)  # what rounding left over
        for topic, share in zip(waiting, shares, strict=True):
            topic.take(share)
        left = sum(topic.unused for topic in waiting if topic.is_done)
        waiting = [topic for topic in waiting if not topic.is_done]
    return {name: topic.end for name, topic in pending.items()}


# -- pieces: slices under way ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Index:
    """Where an object can be cut: entry 0 is its beginning, the last one its end."""

    offsets: tuple[int, ...]
    positions: tuple[int, ...]

    @classmethod
    def of(cls, descriptor: ObjectDescriptor) -> Self:
        offsets, positions = [descriptor.start], [0]
        entries = descriptor.offset_index
        if descriptor.format == FORMAT_PARQUET:
            # The first row group begins behind the file's magic number, and maybe with a hole.
            entries = entries[1:]
        for offset, position in entries:
            if offset == descriptor.start and position == 0 and len(offsets) == 1:
                continue
            if offset <= offsets[-1] or position <= positions[-1]:
                return cls._without(descriptor)
            offsets.append(offset)
            positions.append(position)
        if offsets[-1] >= descriptor.end or positions[-1] >= max(descriptor.size_bytes, 1):
            return cls._without(descriptor)
        return cls((*offsets, descriptor.end), (*positions, descriptor.size_bytes))

    @classmethod
    def _without(cls, descriptor: ObjectDescriptor) -> Self:
        return cls((descriptor.start, descriptor.end), (0, descriptor.size_bytes))


@dataclass(frozen=True, slots=True)
class _ObjectPiece:
    """Some blocks of an object, from the index's entry `first` to its entry `last`."""

    topic: str
    descriptor: ObjectDescriptor
    index: _Index
    first: int
    last: int
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.index.positions[self.last] - self.index.positions[self.first]

    @property
    def weight(self) -> int:
        """Its share of the object's bytes before compression."""
        if self.descriptor.format != FORMAT_PARQUET:
            return self.bytes
        return self.bytes * self._object_weight // max(self.descriptor.size_bytes, 1)

    @property
    def _object_weight(self) -> int:
        return max(weigh(self.descriptor, FORMAT_FRAMES), 1)

    def to_bytes(self, weight: int) -> int:
        """Converts a weight to a number of its bytes."""
        if self.descriptor.format != FORMAT_PARQUET:
            return weight
        return weight * self.descriptor.size_bytes // self._object_weight

    @property
    def is_divisible(self) -> bool:
        return self.last - self.first > 1

    def cut(self, size: int, *, most: int, least: int) -> tuple[_Piece | None, _Piece | None]:
        """Two parts, the first up to the entry nearest to `size` bytes; None for an empty one.

        The first has at most `most` bytes, but `least` blocks.
        """
        positions = self.index.positions
        begin, lowest = positions[self.first], self.first + least
        at = bisect_left(positions, begin + size, lowest, self.last)
        if at > lowest and (
            positions[at] > begin + most
            or begin + size - positions[at - 1] <= positions[at] - begin - size
        ):
            at -= 1
        middle = self.index.offsets[at]
        return (
            replace(self, last=at, end=min(middle, self.end)) if at > self.first else None,
            replace(self, first=at, start=max(middle, self.start)) if at < self.last else None,
        )

    def to_slice(self) -> ObjectPart:
        return ObjectPart(
            topic=self.topic,
            start=self.start,
            end=self.end,
            object_id=self.descriptor.object_id,
            codec=self.descriptor.codec,
            index_offset=self.index.offsets[self.first],
            position=self.index.positions[self.first],
            end_position=self.index.positions[self.last],
            object_bytes=self.descriptor.size_bytes,
            boundaries=tuple(self._boundaries()),
            format=self.descriptor.format,
        )

    def _boundaries(self) -> Iterator[int]:
        positions = self.index.positions
        last = positions[self.last] - _BOUNDARY_BYTES_MIN
        at = self.first
        while True:
            at = bisect_left(positions, positions[at] + _BOUNDARY_BYTES_MIN, at + 1, self.last)
            if at == self.last or positions[at] > last:
                return
            yield positions[at]


@dataclass(frozen=True, slots=True)
class _TailPiece:
    """A part of a tail; its bytes are an estimate, spread evenly over its messages."""

    topic: str
    start: int
    end: int
    bytes: int

    @property
    def weight(self) -> int:
        return self.bytes

    def to_bytes(self, weight: int) -> int:
        """Converts a weight to a number of its bytes."""
        return weight

    @property
    def is_divisible(self) -> bool:
        return self.end - self.start > 1

    def cut(self, size: int, *, most: int, least: int) -> tuple[_Piece | None, _Piece | None]:
        """Two parts, the first of as many messages as take `size` bytes, on average."""
        del most  # messages are small
        count = self.end - self.start
        taken = min(max(count * size // self.bytes, least), count)
        return (
            self._part(0, taken) if taken else None,
            self._part(taken, count) if taken < count else None,
        )

    def _part(self, first: int, last: int) -> _TailPiece:
        """Some of the messages, counted from the first; the sizes of all parts add up."""
        count = self.end - self.start
        size = self.bytes * last // count - self.bytes * first // count
        return replace(self, start=self.start + first, end=self.start + last, bytes=size)

    def to_slice(self) -> TailSlice:
        return TailSlice(topic=self.topic, start=self.start, end=self.end, bytes=self.bytes)


_Piece: TypeAlias = _ObjectPiece | _TailPiece


def _in_order(descriptors: Iterable[ObjectDescriptor]) -> list[ObjectDescriptor]:
    # Of two objects with an offset, the one that starts earlier is taken, then the longer one: that
    # is the one which replaced the other. In this order the first to reach an offset is it.
    return sorted(descriptors, key=lambda found: (found.start, -found.end, found.object_id))


def _pieces(item: TopicRange, descriptors: Iterable[ObjectDescriptor]) -> Iterator[_Piece]:
    """A range as parts of objects, each as large as it gets, and a tail.

    Reads the ascending descriptors no further than the caller reads the parts.
    """
    offset, objects_end = item.start, item.objects_end
    found = iter(descriptors)
    while offset < objects_end and (descriptor := next(found, None)) is not None:
        if descriptor.end <= offset:
            continue
        if descriptor.start > offset:
            raise _gap(item, offset, min(descriptor.start, objects_end))
        index = _Index.of(descriptor)
        end = min(descriptor.end, objects_end)
        yield _ObjectPiece(
            topic=item.topic,
            descriptor=descriptor,
            index=index,
            first=bisect_right(index.offsets, offset) - 1,
            last=bisect_left(index.offsets, end),
            start=offset,
            end=end,
        )
        offset = end
    if offset < objects_end:
        raise _gap(item, offset, objects_end)
    if objects_end < item.end:
        # A message takes at least a byte, also where there is no estimate.
        size = max(item.tail_bytes, item.end - objects_end)
        yield _TailPiece(item.topic, objects_end, item.end, size)


def _gap(item: TopicRange, start: int, end: int) -> DataGapError:
    return DataGapError(
        "no object holds a part of what is to be read", start=start, end=end, topic=item.topic
    )


# -- partitions -----------------------------------------------------------------------------


def _weigh(group: Sequence[_Piece], opening: int) -> int:
    return sum(piece.weight for piece in group) + opening * (len(group) - 1)


def _fill(pieces: Iterable[_Piece], target: int, opening: int, least: int) -> list[list[_Piece]]:
    """Puts pieces into about `least` groups of even weight, or more if the target is less."""
    waiting = deque(pieces)
    left = sum(piece.weight for piece in waiting)
    most = target + target // _PLAY
    groups: list[list[_Piece]] = []
    while waiting:
        opens = opening * len(waiting)
        count = max(least - len(groups), -(-(left + opens) // (target + opening)), 1)
        share = -(-(left + max(opens - opening * count, 0)) // count)
        group: list[_Piece] = []
        weight = 0
        while waiting:
            piece = waiting.popleft()
            before = weight + opening if group else 0
            part, rest = piece.cut(
                piece.to_bytes(share - before),
                most=piece.to_bytes(most - before),
                least=0 if group else 1,
            )
            if part is not None:
                group.append(part)
                weight = before + part.weight
                left -= part.weight
            if rest is not None:
                waiting.appendleft(rest)
                break
        groups.append(group)
    return groups


# -- limits ---------------------------------------------------------------------------------


def _share_with_all(weights: Mapping[str, int], amount: int) -> dict[str, int]:
    """As `_share`, but each gets at least 1; the amount must suffice for that."""
    small: dict[str, int] = {}
    while True:
        others = {name: weight for name, weight in weights.items() if name not in small}
        shares = _share(others, amount - len(small))
        starved = [name for name, share in shares.items() if share == 0]
        if not starved:
            return small | shares
        small |= dict.fromkeys(starved, 1)


def _share(weights: Mapping[str, int], amount: int) -> dict[str, int]:
    """Divides an amount exactly, in proportion to weights; no share exceeds its weight."""
    total = sum(weights.values())
    if amount >= total:
        return dict(weights)
    shares = {name: amount * weight // total for name, weight in weights.items()}
    # What rounding left over goes where it took most; each of these is still below its weight.
    left = amount - sum(shares.values())
    by_loss = sorted(weights, key=lambda name: (-(amount * weights[name] % total), name))
    for name in by_loss[:left]:
        shares[name] += 1
    return shares


class _Pending:
    """The pending messages of a topic, which a micro-batch takes from the start on."""

    def __init__(self, ranges: Sequence[TopicRange]) -> None:
        self._ranges = ranges
        self._pieces = (piece for item in ranges for piece in _pieces(item, item.descriptors))
        self._first = self._piece = next(self._pieces, None)
        self._end = ranges[0].start if self._first is None else self._first.start
        self.unused = 0
        """The part of its share that is not taken yet; counts from the next piece's start."""

    @property
    def is_done(self) -> bool:
        """Whether everything is taken."""
        return self._piece is None

    @property
    def end(self) -> int:
        """How far it goes: at least to the end of the first block."""
        if self._first is None or self._end > self._first.start:
            return self._end
        block, _ = self._first.cut(0, most=0, least=1)
        return self._first.end if block is None else block.end

    def estimate(self) -> int:
        """Estimates the bytes that are left; objects after the next one by their messages."""
        piece = self._piece
        if piece is None:
            return 0
        objects = sum(max(0, one.objects_end - max(one.start, piece.end)) for one in self._ranges)
        tails = sum(one.tail_bytes for one in self._ranges if one.objects_end >= piece.end)
        return piece.bytes + objects * piece.bytes // (piece.end - piece.start) + tails

    def take(self, share: int) -> None:
        """Takes up to `share` more bytes."""
        self.unused += share
        while (piece := self._piece) is not None:
            if piece.bytes > self.unused:
                within, _ = piece.cut(self.unused, most=self.unused, least=0)
                self._end = self._end if within is None else within.end
                return
            self.unused -= piece.bytes
            self._end = piece.end
            self._piece = next(self._pieces, None)
