"""Records when this process wrote which offsets of a log.

Owns: a bounded list of (offset, time) marks, about a second apart. Does not own: times before this
process opened the log; those are known from the modification times of files.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

_MARKS_MAX: Final = 4096
_STRIDE_MS: Final = 1000


class Arrivals:
    """Arrival times by offset. One thread records while others search."""

    __slots__ = ("_marks", "_stride_ms")

    def __init__(self) -> None:
        # Each (first offset, time of its first write, time of its last one); replaced whole.
        self._marks: list[tuple[int, int, int]] = []
        self._stride_ms = _STRIDE_MS

    @property
    def start(self) -> int | None:
        """The first offset whose arrival time is known; None if nothing was written."""
        marks = self._marks
        return marks[0][0] if marks else None

    def record(self, first_offset: int, now_ms: int) -> None:
        """Records that the frames from an offset on were written now."""
        marks = self._marks
        if marks and 0 <= now_ms - marks[-1][1] < self._stride_ms:
            marks[-1] = (marks[-1][0], marks[-1][1], now_ms)
            return
        marks.append((first_offset, now_ms, now_ms))
        if len(marks) > _MARKS_MAX:
            self._stride_ms *= 2
            pairs = zip(marks[::2], marks[1::2], strict=False)
            self._marks = [(one[0], one[1], max(one[2], two[2])) for one, two in pairs]
            self._marks += marks[len(marks) // 2 * 2 :]

    def of(self, offset: int) -> tuple[int, int] | None:
        """The earliest and latest possible arrival time of an offset, in ms; None if unknown."""
        marks = self._marks
        at = bisect_right(marks, offset, key=_first_offset)
        return marks[at - 1][1:] if at else None

    def end_before(self, time_ms: int, *, start: int, end: int) -> int:
        """Shortens a range of offsets so that nothing in it was written after a time.

        Returns:
            The new end of the range.
        """
        marks = self._marks
        for first_offset, _, last_ms in marks[bisect_left(marks, start + 1, key=_first_offset) :]:
            if first_offset >= end:
                break
            if last_ms > time_ms:
                return first_offset
        return end


def _first_offset(mark: tuple[int, int, int]) -> int:
    return mark[0]
