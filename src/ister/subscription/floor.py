"""Which offsets have been acknowledged: all below the floor, and ranges above it.

Invariants: the ranges are half open, sorted, apart from each other, and the first begins above the
floor. So the floor is the first offset that is not acknowledged, and only moves forward.

A consumer that acknowledges every second offset makes a range with each: `ack` refuses to make
more than it is allowed to. What is written to the store is cut off: `SAVED_RANGES_MAX` ranges by
their offsets, and `SAVED_MORE_MAX` after them by their distances, which are short. What is left
out is delivered again after a restart.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from typing import Final, Self

import msgspec

from ister.base.structs import known
from ister.errors import CapacityError, CorruptDataError, InvariantError, check

RANGES_MAX: Final = 10_000
"""Ranges above the floor that acknowledgements of messages not held here may make."""

SAVED_RANGES_MAX: Final = 4_096
"""Ranges in a stored cursor: some 100 KiB."""

SAVED_MORE_MAX: Final = 32_768
"""Ranges after those: about as much again where messages of few consumers alternate."""

_STORED_RANGES_MAX: Final = SAVED_RANGES_MAX + SAVED_MORE_MAX


class _StoredRanges(msgspec.Struct):
    floor: int
    acked: list[tuple[int, int]]
    more: list[int] = []


class AckFloor:
    """The floor, and what is acknowledged above it."""

    __slots__ = ("_ends", "_starts", "floor")

    def __init__(self, floor: int = 0) -> None:
        check(floor >= 0, f"a floor of {floor}")
        self.floor = floor
        """The first offset that is not acknowledged."""
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def end(self) -> int:
        """The first offset after all that are acknowledged."""
        return self._ends[-1] if self._ends else self.floor

    def ranges(self) -> Iterator[tuple[int, int]]:
        """The ranges above the floor, ascending."""
        return zip(self._starts, self._ends, strict=True)

    def reset(self, floor: int) -> None:
        """Restarts from another floor."""
        self.floor = floor
        self._starts.clear()
        self._ends.clear()

    def ack(self, offset: int, ranges_max: int | None = RANGES_MAX) -> bool:
        """Acknowledges an offset; whether it was not before.

        No more than `ranges_max` ranges are made; None where the caller has a bound of its own.

        Raises:
            CapacityError: It would make another range, and there are as many as there may be.
        """
        starts, ends = self._starts, self._ends
        if offset == self.floor:
            self.floor = offset + 1
            if starts and starts[0] == offset + 1:
                self.floor = ends[0]
                del starts[0], ends[0]
            return True
        if offset < self.floor:
            return False
        at = bisect_right(starts, offset)
        # The range before: around the offset, or up to it.
        if at and offset <= ends[at - 1]:
            if offset < ends[at - 1]:
                return False
            if at < len(starts) and starts[at] == offset + 1:
                ends[at - 1] = ends[at]
                del starts[at], ends[at]
            else:
                ends[at - 1] = offset + 1
            return True
        if at < len(starts) and starts[at] == offset + 1:
            starts[at] = offset
            return True
        if ranges_max is not None and len(starts) >= ranges_max:
            raise CapacityError(
                f"{len(starts)} ranges are acknowledged above offset {self.floor}",
                offset=offset,
                hint="acknowledge the messages before it first",
            )
        starts.insert(at, offset)
        ends.insert(at, offset + 1)
        return True

    def ack_range(self, start: int, end: int) -> None:
        """Acknowledges all offsets from `start` up to, not including, `end`."""
        start = max(start, self.floor)
        if start >= end:
            return
        starts, ends = self._starts, self._ends
        # All that it touches becomes one range.
        first, last = bisect_left(ends, start), bisect_right(starts, end)
        if first < last:
            start, end = min(start, starts[first]), max(end, ends[last - 1])
        starts[first:last], ends[first:last] = [start], [end]
        if start == self.floor:
            self.floor = end
            del starts[0], ends[0]

    def is_acked(self, offset: int) -> bool:
        """Whether an offset has been acknowledged."""
        if offset < self.floor:
            return True
        at = bisect_right(self._starts, offset)
        return at > 0 and offset < self._ends[at - 1]

    def first_acked(self, offset: int) -> int | None:
        """The first acknowledged range that ends after `offset`, by its start; None without one."""
        at = bisect_right(self._ends, offset)
        return self._starts[at] if at < len(self._starts) else None

    def count_below(self, end: int) -> int:
        """How many offsets from the floor up to, not including, `end` are acknowledged."""
        return sum(min(stop, end) - start for start, stop in self.ranges() if start < end)

    def clip(self, end: int) -> None:
        """Forgets what is acknowledged at or after `end`, which is not below the floor."""
        check(end >= self.floor, f"clipped at {end}, below the floor {self.floor}")
        while self._starts and self._starts[-1] >= end:
            self._starts.pop()
            self._ends.pop()
        if self._ends and self._ends[-1] > end:
            self._ends[-1] = end

    @property
    def saved_end(self) -> int:
        """The end of the last range that `to_json` stores."""
        ends = self._ends
        return ends[min(len(ends), _STORED_RANGES_MAX) - 1] if ends else self.floor

    def to_json(self) -> dict[str, object]:
        """Returns the floor and the lowest ranges, as they are stored.

        `more` are ranges after `acked`, each by the distance from the end of the one before and its
        length.
        """
        ranges = list(self.ranges())[:_STORED_RANGES_MAX]
        acked = ranges[:SAVED_RANGES_MAX]
        made: dict[str, object] = {"floor": self.floor, "acked": [list(one) for one in acked]}
        if len(ranges) > len(acked):
            more: list[int] = []
            before = acked[-1][1]
            for start, end in ranges[len(acked) :]:
                more += (start - before, end - start)
                before = end
            made["more"] = more
        made["end"] = self.saved_end
        return made

    @classmethod
    def from_json(cls, fields: Mapping[str, object], *, floor: int | None = None) -> Self:
        """Reads what `to_json` made.

        `floor`: the cursor now. If it has moved on, what is below it is forgotten. If it was put
        back, everything is: the offsets may be those of other messages by now.

        Raises:
            CorruptDataError: The fields are not such ranges.
        """
        try:
            stored = msgspec.convert(fields, known(_StoredRanges), strict=False)
            ranges = stored.acked
            at = ranges[-1][1] if ranges else stored.floor
            for gap, length in zip(stored.more[::2], stored.more[1::2], strict=True):
                ranges.append((at + gap, at + gap + length))
                at += gap + length
        except ValueError as error:
            raise CorruptDataError(f"not acknowledged ranges: {error}") from error
        made = cls(stored.floor if floor is None else floor)
        if made.floor < stored.floor:
            return made
        before = stored.floor
        for start, end in ranges:
            if not before < start < end:
                raise CorruptDataError(f"acknowledged ranges out of order at {start}")
            before = end
            if end > made.floor:
                if start <= made.floor:
                    made.floor = end
                else:
                    made._starts.append(start)
                    made._ends.append(end)
        return made

    def validate(self) -> None:
        """Raises InvariantError if an invariant does not hold."""
        if len(self._starts) != len(self._ends):
            raise InvariantError("ranges without an end")
        before = self.floor
        for start, end in self.ranges():
            check(before < start < end, f"range {start} to {end} after {before}")
            before = end
