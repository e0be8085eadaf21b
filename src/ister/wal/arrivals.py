"""When this process has written which offsets of a log.

Owns: marks of offsets and times, about a second apart, a bounded number of them. Does not own: what
was written before this process began; a file's time of change tells that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

__all__ = ["Arrivals"]

_MARKS_MAX: Final = 4096
_STRIDE_MS: Final = 1000


class Arrivals:
    """Marks in ascending order; written by one thread while others search."""

    __slots__ = ("_marks", "_stride_ms")

    def __init__(self) -> None:
        # Each (first offset, time of its first write, time of its last one); replaced whole.
        self._marks: list[tuple[int, int, int]] = []
        self._stride_ms = _STRIDE_MS

    @property
    def start(self) -> int | None:
        """The first offset of which it is known; None if nothing was written."""
        marks = self._marks
        return marks[0][0] if marks else None

    def note(self, first_offset: int, now_ms: int) -> None:
        """Takes note that frames from an offset on were written now."""
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
        """Between which times an offset was written, in milliseconds; None if it is not known."""
        marks = self._marks
        at = bisect_right(marks, offset, key=_first_offset)
        return marks[at - 1][1:] if at else None

    def end_before(self, time_ms: int, *, start: int, end: int) -> int:
        """Where a range from `start` on has to end to have nothing written after a time."""
        marks = self._marks
        for first_offset, _, last_ms in marks[bisect_left(marks, start + 1, key=_first_offset) :]:
            if first_offset >= end:
                break
            if last_ms > time_ms:
                return first_offset
        return end


def _first_offset(mark: tuple[int, int, int]) -> int:
    return mark[0]
