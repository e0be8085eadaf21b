"""Ranges of offsets as (start, end) pairs.

Lists of ranges that functions take are disjoint and ascending, as `merge_ranges` returns them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """What some ranges, in any order, cover."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlaps(ranges: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    """Whether some ranges have an offset of another one."""
    at = bisect_left(ranges, (end, 0))
    return at > 0 and ranges[at - 1][1] > start


def is_within(ranges: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    """Whether one of some ranges has all offsets of another one."""
    at = bisect_left(ranges, (start + 1,))
    return at > 0 and ranges[at - 1][1] >= end


def missing_from(ranges: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The parts of a range that some ranges do not have."""
    found: list[tuple[int, int]] = []
    for begin, stop in ranges:
        if stop <= start or begin >= end:
            continue
        if begin > start:
            found.append((start, begin))
        start = max(start, stop)
    if start < end:
        found.append((start, end))
    return found
