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

Partitions are sized by weight: the bytes that a task has to decode (those of Parquet before
compression), and a fixed number of bytes for every slice but the first, because opening an object
takes time, too. A topic that is heavier than one partition is divided in its order into
partitions of its own. Its last one and all small topics are spread over the other partitions, the
heaviest first, each into the lightest partition.

Spark gives a Python data source neither the number of cores (the planner's process has no session)
nor preferred locations (`PythonInputPartition` has none up to 4.3), so partitions are not placed.

Invariants:
- Every offset of every range is in exactly one slice; slices of a topic ascend over the partitions.
- A partition has at most the target's weight (a part of an object an eighth more), or is one index
  block, or one message of a tail, that cannot be cut.
- There are at most three times as many partitions as the weight of all ranges needs, and one more;
  at least `min_partitions` where the indexes allow it.
- The same input gives the same partitions: a replayed micro-batch is planned as it was before.
- An index is a hint. One that does not ascend, or that leaves its object, is not used at all.
- The limit of a micro-batch reads no more descriptors than it needs to find its end.

A crash loses nothing here: a plan is computed again.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
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

_TARGET_BYTES_MIN: Final = 64 * KIB
"""`minPartitions` alone makes no smaller target: below this, a task's own cost is all there is."""

_BOUNDARY_BYTES_MIN: Final = 1 * MIB
"""The least distance of a slice's `boundaries`: a request for less is mostly latency."""

_PLAY: Final = 8
"""Parts of an object may be larger than the target by this part of it."""


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

    Objects larger than the target are cut at index entries, tails by offsets; what is small goes
    together. The target is `split_bytes`, or less where that gives too few partitions.

    Args:
        ranges: One for each topic, or several that ascend.
        split_bytes: About what a partition weighs.
        min_partitions: The minimum number of partitions, where the indexes allow it.
        slots: How many tasks run at once: a target below `split_bytes` gives each of them
            something to do, if there is enough.

    Raises:
        DataGapError: Offsets of a range are in none of its objects; names the first such gap.
    """
    topics: dict[str, list[_Piece]] = {}
    for item in ranges:
        topics.setdefault(item.topic, []).extend(_pieces(item, _in_order(item.descriptors)))
    scale = _Scale.of(topics.values(), split_bytes, min_partitions=min_partitions, slots=slots)
    groups: list[_Group] = []
    shared: list[_Group] = []
    for pieces in topics.values():
        divided = _divide_topic(pieces, scale)
        groups += divided[:-1]
        shared += divided[-1:]
    least = (min_partitions or 1) - len(groups)
    groups += _spread(shared, scale, least)
    if min_partitions is not None and len(groups) < min_partitions:
        groups = _divide(groups, min_partitions, scale)
    return [
        Partition(
            number=number,
            slices=tuple(piece.to_slice() for piece in group),
            weight=scale.weigh(group),
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

    def _to_bytes(self, weight: int) -> int:
        """Converts a weight to a number of its bytes; at least one."""
        if self.descriptor.format != FORMAT_PARQUET:
            return max(weight, 1)
        return max(weight * self.descriptor.size_bytes // self._object_weight, 1)

    @property
    def is_divisible(self) -> bool:
        return self.last - self.first > 1

    def split(self, weight: int) -> Iterator[_ObjectPiece]:
        """Parts of about even size near the weight or below it; one block is never cut."""
        target = self._to_bytes(weight)
        # Entries seldom lie where even parts would end. Without some play, two parts that are each
        # a little over the target would become three.
        most = target + target // _PLAY
        parts, rest = -(-self.bytes // target), self
        while parts > 1 and rest.is_divisible:
            part, rest = rest._cut(-(-rest.bytes // parts), most=most)
            yield part
            parts = max(-(-rest.bytes // most), min(parts - 1, -(-rest.bytes // target)))
        yield rest

    def cut(self, weight: int) -> tuple[_ObjectPiece, _ObjectPiece]:
        """Two parts, the first of about this weight."""
        return self._cut(self._to_bytes(weight), most=self.bytes)

    def _cut(self, wanted: int, *, most: int) -> tuple[_ObjectPiece, _ObjectPiece]:
        """Two parts, the first of about `wanted` bytes, and of no more than `most` if possible."""
        positions = self.index.positions
        begin = positions[self.first]
        at = bisect_left(positions, begin + wanted, self.first + 1, self.last)
        if at == self.last or (
            at > self.first + 1
            and (
                positions[at] > begin + most
                or begin + wanted - positions[at - 1] <= positions[at] - begin - wanted
            )
        ):
            at -= 1
        middle = self.index.offsets[at]
        return replace(self, last=at, end=middle), replace(self, first=at, start=middle)

    def followed_by(self, other: _Piece) -> _Piece | None:
        """Returns both as one, if `other` continues in the same object where this one ends."""
        if (
            isinstance(other, _ObjectPiece)
            and other.descriptor is self.descriptor
            and other.topic == self.topic
            and other.first == self.last
            and other.start == self.end
        ):
            return replace(self, last=other.last, end=other.end)
        return None

    def end_within(self, share: int) -> int:
        """The offset of the last entry within `share` bytes; `start` if there is none."""
        positions = self.index.positions
        at = bisect_right(positions, positions[self.first] + share, self.first, self.last + 1) - 1
        return min(self.end, self.index.offsets[at]) if at > self.first else self.start

    def end_of_first(self) -> int:
        return min(self.end, self.index.offsets[self.first + 1])

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

    @property
    def is_divisible(self) -> bool:
        return self.end - self.start > 1

    def split(self, weight: int) -> Iterator[_TailPiece]:
        """Even parts by offsets, of at most this weight where a message is not larger."""
        count = self.end - self.start
        most = max(count * weight // self.bytes, 1) if self.bytes else count
        parts = -(-count // most)
        for part in range(parts):
            yield self._part(count * part // parts, count * (part + 1) // parts)

    def cut(self, weight: int) -> tuple[_TailPiece, _TailPiece]:
        """Two parts, the first of about this weight."""
        count = self.end - self.start
        messages = count * weight // self.bytes if self.bytes else count // 2
        messages = min(max(messages, 1), count - 1)
        return self._part(0, messages), self._part(messages, count)

    def _part(self, first: int, last: int) -> _TailPiece:
        """Some of the messages, counted from the first; the sizes of all parts add up."""
        count = self.end - self.start
        size = self.bytes * last // count - self.bytes * first // count
        return replace(self, start=self.start + first, end=self.start + last, bytes=size)

    def followed_by(self, other: _Piece) -> _Piece | None:
        """Returns both as one, if `other` continues in the same tail where this one ends."""
        if isinstance(other, _TailPiece) and other.topic == self.topic and other.start == self.end:
            return replace(self, end=other.end, bytes=self.bytes + other.bytes)
        return None

    def end_within(self, share: int) -> int:
        """The offset up to which messages take `share` bytes, on average."""
        if share >= self.bytes:
            return self.end
        return self.start + (self.end - self.start) * share // self.bytes

    def end_of_first(self) -> int:
        return self.start + 1

    def to_slice(self) -> TailSlice:
        return TailSlice(topic=self.topic, start=self.start, end=self.end, bytes=self.bytes)


_Piece: TypeAlias = _ObjectPiece | _TailPiece
_Group: TypeAlias = list[_Piece]


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
        yield _TailPiece(item.topic, objects_end, item.end, item.tail_bytes)


def _gap(item: TopicRange, start: int, end: int) -> DataGapError:
    return DataGapError(
        "no object holds a part of what is to be read", start=start, end=end, topic=item.topic
    )


# -- partitions -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scale:
    """The weight that partitions may have, and what opening an object adds to it."""

    target: int
    """The most that a partition should weigh."""
    opening: int
    """What a slice weighs besides its bytes, but for the first of a partition."""

    @classmethod
    def of(
        cls,
        topics: Iterable[Sequence[_Piece]],
        split_bytes: int,
        *,
        min_partitions: int | None,
        slots: int | None,
    ) -> Self:
        target = max(split_bytes, 1)
        opening = min(_OPEN_BYTES, target // _OPENS_MAX)
        total = sum(piece.weight + opening for pieces in topics for piece in pieces)
        for count, least in ((slots, _SLOT_BYTES_MIN), (min_partitions, _TARGET_BYTES_MIN)):
            if count is not None and count > 1:
                target = min(target, max(-(-total // count), least))
        return cls(target, opening)

    def weigh(self, group: Sequence[_Piece]) -> int:
        return sum(piece.weight for piece in group) + self.opening * (len(group) - 1)


def _divide_topic(pieces: Sequence[_Piece], scale: _Scale) -> list[_Group]:
    """The pieces of a topic in order, as the fewest groups that the target allows, or about that.

    Groups have about the same weight; one that is heavier than the target is a single part.
    """
    parts = [part for piece in pieces for part in piece.split(scale.target)]
    total = sum(part.weight + scale.opening for part in parts)
    count = -(-total // (scale.target + scale.opening))
    groups: list[_Group] = []
    weight = before = 0
    for part in parts:
        # The first groups end near even shares of the whole; the others, if any, when full.
        is_wanted = 2 * before + part.weight <= 2 * (total * len(groups) // max(count, 1))
        joined = groups[-1][-1].followed_by(part) if groups else None
        opening = scale.opening if joined is None else 0
        if groups and is_wanted and weight + opening + part.weight <= scale.target:
            if joined is None:
                groups[-1].append(part)
            else:
                groups[-1][-1] = joined
            weight += opening + part.weight
        else:
            groups.append([part])
            weight = part.weight
        before += scale.opening + part.weight
    return groups


def _spread(groups: Sequence[_Group], scale: _Scale, least: int) -> list[_Group]:
    """Puts groups together: at least `least` if there are so many, none heavier than the target.

    The heaviest first, each to the lightest: if some are small, all get about the same weight.
    """
    weights = [scale.weigh(group) for group in groups]
    room = scale.target + scale.opening
    fewest = -(-(sum(weights) + scale.opening * len(groups)) // room)
    count = min(max(fewest, least, 1), len(groups))
    members: list[list[int]] = [[] for _ in range(count)]
    lightest = [(0, number) for number in range(count)]
    for at in sorted(range(len(groups)), key=lambda at: (-weights[at], at)):
        weight, number = heapq.heappop(lightest)
        if weight and weight + weights[at] + scale.opening > room:
            heapq.heappush(lightest, (weight, number))
            weight, number = 0, len(members)
            members.append([])
        members[number].append(at)
        # A tail may have no known size, and still fills a partition that has nothing yet.
        heapq.heappush(lightest, (weight + max(weights[at] + scale.opening, 1), number))
    return [
        [piece for at in sorted(together) for piece in groups[at]]
        for together in sorted(map(sorted, members))
    ]


def _divide(groups: list[_Group], count: int, scale: _Scale) -> list[_Group]:
    """Halves the heaviest groups until there are `count`, or none can be cut."""
    # A key is a group's way down the tree of halves, so sorting puts groups back into their order.
    indivisible: list[tuple[tuple[int, ...], _Group]] = []
    waiting: list[tuple[int, tuple[int, ...], _Group]] = [
        (-scale.weigh(group), (number,), group) for number, group in enumerate(groups)
    ]
    heapq.heapify(waiting)
    while waiting and len(waiting) + len(indivisible) < count:
        _, key, group = heapq.heappop(waiting)
        halves = _halve(group, scale)
        if halves is None:
            indivisible.append((key, group))
            continue
        for side, half in enumerate(halves):
            heapq.heappush(waiting, (-scale.weigh(half), (*key, side), half))
    keyed = indivisible + [(key, group) for _, key, group in waiting]
    return [group for _, group in sorted(keyed, key=lambda entry: entry[0])]


def _halve(group: _Group, scale: _Scale) -> tuple[_Group, _Group] | None:
    """A group in two about equal ones, cut between pieces or inside of one; None if neither."""
    total = scale.weigh(group)
    # Twice the distance from the middle, to stay with whole numbers; which piece; its two parts.
    best: tuple[int, int, tuple[_Piece, _Piece] | None] | None = None
    before = 0
    for at, piece in enumerate(group):
        if at > 0 and (best is None or abs(2 * before - total) < best[0]):
            best = abs(2 * before - total), at, None
        if piece.is_divisible and before <= total // 2 <= before + piece.weight:
            parts = piece.cut(total // 2 - before)
            distance = abs(2 * (before + parts[0].weight) - total)
            if best is None or distance < best[0]:
                best = distance, at, parts
        before += piece.weight + scale.opening
    if best is None:
        return None
    _, at, cut = best
    if cut is None:
        return group[:at], group[at:]
    return [*group[:at], cut[0]], [cut[1], *group[at + 1 :]]


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
        return self._first.end_of_first()

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
                within = piece.end_within(self.unused)
                self._end = within if within > piece.start else self._end
                return
            self.unused -= piece.bytes
            self._end = piece.end
            self._piece = next(self._pieces, None)
