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
Parquet is cut between row groups; its bytes are those of the file, so that a task of the same size
has more messages. What is not tiered has no index and is cut by offsets.

Invariants:
- Every offset of every range is in exactly one slice; slices of a topic ascend over the partitions.
- A partition has at most the target's bytes (a part of an object an eighth more), or is one index
  block, or one message of a tail, that cannot be cut.
- The same input gives the same partitions: a replayed micro-batch is planned as it was before.
- An index is a hint. One that does not ascend, or that leaves its object, is not used at all.

A crash loses nothing here: a plan is computed again.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self, TypeAlias

from ister.bucket.chunks import ObjectPart
from ister.errors import DataGapError, check
from ister.format.descriptor import FORMAT_PARQUET, ObjectDescriptor
from ister.limits import KIB, MIB

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
    descriptors: Sequence[ObjectDescriptor]
    """Those that overlap the part before `tiered`, ascending; they may overlap each other."""
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
    ranges: Sequence[TopicRange], *, split_bytes: int, min_partitions: int | None = None
) -> list[Partition]:
    """Divides what is to be read into partitions of about the same size.

    Objects larger than the target are cut at index entries, tails by offsets; small neighbours go
    together. The target is `split_bytes`, or less where that gives too few partitions.

    Args:
        ranges: One for each topic, or several that ascend; their order is that of the slices.
        split_bytes: About how many bytes a partition has.
        min_partitions: At least so many partitions, where the indexes allow it.

    Raises:
        DataGapError: Offsets of a range are in none of its objects; names the first such gap.
    """
    pieces = [piece for item in ranges for piece in _pieces(item)]
    target = max(split_bytes, 1)
    if min_partitions is not None and min_partitions > 1:
        total = sum(piece.bytes for piece in pieces)
        even = max(-(-total // min_partitions), _TARGET_BYTES_MIN)
        target = min(target, even)
    packed = _pack((part for piece in pieces for part in piece.split(target)), target)
    if min_partitions is not None and len(packed) < min_partitions:
        packed = _divide(packed, min_partitions)
    return [
        Partition(number=number, slices=tuple(piece.to_slice() for piece in group))
        for number, group in enumerate(packed)
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

    Topics get shares in proportion to the bytes that they have pending. A topic goes up to the last
    index entry within its share, in the tail by the average size of a message, and at least one
    index block (or one message of the tail) far: a limit slows a stream and never stops it. So it
    takes at most `max_bytes` and one block for each topic.

    Returns:
        The new end of each range's topic.

    Raises:
        DataGapError: Offsets of a range are in none of its objects; names the first such gap.
    """
    pieces: dict[str, list[_Piece]] = {}
    for item in ranges:
        pieces.setdefault(item.topic, []).extend(_pieces(item))
    pending = {topic: sum(piece.bytes for piece in found) for topic, found in pieces.items()}
    total = sum(pending.values())
    new_ends = {item.topic: item.end for item in ranges}
    if total <= max_bytes:
        return new_ends
    for topic, found in pieces.items():
        if found:
            new_ends[topic] = _end_within(found, max(max_bytes, 0) * pending[topic] // total)
    return new_ends


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
    def is_divisible(self) -> bool:
        return self.last - self.first > 1

    def split(self, target: int) -> Iterator[_ObjectPiece]:
        """Parts of about even size near the target or below it; one block is never cut."""
        # Entries seldom lie where even parts would end. Without some play, two parts that are each
        # a little over the target would become three.
        most = target + target // _PLAY
        parts, rest = -(-self.bytes // target), self
        while parts > 1 and rest.is_divisible:
            part, rest = rest.cut(-(-rest.bytes // parts), most=most)
            yield part
            parts = max(-(-rest.bytes // most), min(parts - 1, -(-rest.bytes // target)))
        yield rest

    def cut(self, wanted: int, *, most: int) -> tuple[_ObjectPiece, _ObjectPiece]:
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
    def is_divisible(self) -> bool:
        return self.end - self.start > 1

    def split(self, target: int) -> Iterator[_TailPiece]:
        """Even parts by offsets, of at most `target` bytes where a message is not larger."""
        count = self.end - self.start
        most = max(count * target // self.bytes, 1) if self.bytes else count
        parts = -(-count // most)
        for part in range(parts):
            yield self._part(count * part // parts, count * (part + 1) // parts)

    def cut(self, wanted: int, *, most: int) -> tuple[_TailPiece, _TailPiece]:
        """Two parts, the first of about `wanted` bytes and of at most `most`."""
        count = self.end - self.start
        messages = count * min(wanted, most) // self.bytes if self.bytes else count // 2
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


def _pieces(item: TopicRange) -> Iterator[_Piece]:
    """A range as parts of objects, each as large as it gets, and a tail."""
    offset, objects_end = item.start, item.objects_end
    # Of two objects with an offset, the one that starts earlier is taken, then the longer one: that
    # is the one which replaced the other. In this order the first to reach beyond `offset` is it.
    ordered = sorted(item.descriptors, key=lambda found: (found.start, -found.end, found.object_id))
    for descriptor in ordered:
        if offset >= objects_end:
            break
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


def _pack(pieces: Iterator[_Piece], target: int) -> list[list[_Piece]]:
    """Neighbours together, up to the target."""
    groups: list[list[_Piece]] = []
    size = 0
    for piece in pieces:
        if groups and size + piece.bytes <= target:
            joined = groups[-1][-1].followed_by(piece)
            if joined is None:
                groups[-1].append(piece)
            else:
                groups[-1][-1] = joined
            size += piece.bytes
        else:
            groups.append([piece])
            size = piece.bytes
    return groups


def _divide(groups: list[list[_Piece]], count: int) -> list[list[_Piece]]:
    """Halves the largest groups until there are `count`, or none can be cut."""
    # A key is a group's way down the tree of halves, so sorting puts groups back into their order.
    indivisible: list[tuple[tuple[int, ...], list[_Piece]]] = []
    waiting: list[tuple[int, tuple[int, ...], list[_Piece]]] = [
        (-_bytes_of(group), (number,), group) for number, group in enumerate(groups)
    ]
    heapq.heapify(waiting)
    while waiting and len(waiting) + len(indivisible) < count:
        _, key, group = heapq.heappop(waiting)
        halves = _halve(group)
        if halves is None:
            indivisible.append((key, group))
            continue
        for side, half in enumerate(halves):
            heapq.heappush(waiting, (-_bytes_of(half), (*key, side), half))
    keyed = indivisible + [(key, group) for _, key, group in waiting]
    return [group for _, group in sorted(keyed, key=lambda entry: entry[0])]


def _bytes_of(group: list[_Piece]) -> int:
    return sum(piece.bytes for piece in group)


def _halve(group: list[_Piece]) -> tuple[list[_Piece], list[_Piece]] | None:
    """A group in two about equal ones, cut between pieces or inside of one; None if neither."""
    total = _bytes_of(group)
    # Twice the distance from the middle, to stay with whole numbers; which piece; its two parts.
    best: tuple[int, int, tuple[_Piece, _Piece] | None] | None = None
    before = 0
    for at, piece in enumerate(group):
        if at > 0 and (best is None or abs(2 * before - total) < best[0]):
            best = abs(2 * before - total), at, None
        if piece.is_divisible and before <= total // 2 <= before + piece.bytes:
            parts = piece.cut(total // 2 - before, most=piece.bytes)
            distance = abs(2 * (before + parts[0].bytes) - total)
            if best is None or distance < best[0]:
                best = distance, at, parts
        before += piece.bytes
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


def _end_within(pieces: Sequence[_Piece], share: int) -> int:
    """How far `share` bytes go, and at least to the end of the first block."""
    start = end = pieces[0].start
    for piece in pieces:
        if piece.bytes > share:
            within = piece.end_within(share)
            end = within if within > piece.start else end
            break
        share -= piece.bytes
        end = piece.end
    return end if end > start else pieces[0].end_of_first()
