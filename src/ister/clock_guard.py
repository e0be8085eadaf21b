"""Whether the wall clock can be trusted to tell how old data is.

    wall clock  ─┐
    boottime    ─┼─► look ─► trusted, or a step: nothing is deleted by age
    last mark   ─┘

Owns: the comparison, and what has to be remembered of it (`ClockMark`). Does not own: files,
alarms, what is deleted.

The wall clock has to advance as boottime does, from a point at which both were trusted, the anchor.
Where it differs by more than `STEP_SECONDS` it was stepped, and stays suspect until

- it is back where boottime expects it: what set it has been undone;
- somebody confirms that it is right now (`confirm`);
- it has run evenly for a day and for as long as the longest limit: whatever was stored before the
  step is older than that by now, and what was stored since is dated by the new clock.

Smaller differences are corrections (NTP) and move the anchor. A suspended machine is no step:
boottime counts that time, too.

Across restarts the anchor is a mark on disk. In the same boot boottime goes on, and the comparison
is exact. After a boot nobody knows how long the machine was off: a clock behind the mark, or more
than `OFF_SECONDS_MAX` ahead of it, is a step. A first start has nothing to compare with.

Times that were recorded under a clock that turned out wrong lie in a known range of wall time.
`correct` replaces them by the time at which that ended: what they date is at least as new.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ister.clock import Clock

__all__ = [
    "OFF_SECONDS_MAX",
    "STEP_SECONDS",
    "ClockGuard",
    "ClockMark",
    "ClockStep",
    "newest_arrivals",
]

STEP_SECONDS: Final = 30.0
"""A larger difference between the wall clock and boottime is a step."""
OFF_SECONDS_MAX: Final = 86_400.0
"""A machine that was off for longer has to have its clock confirmed."""
_EVEN_SECONDS_MIN: Final = 86_400.0
_RANGES_MAX: Final = 32
# A mark is saved more often than this.
_UNSAVED_SECONDS_MAX: Final = 300.0


@dataclass(frozen=True, slots=True)
class _Anchor:
    """A moment on both clocks; boottime counts within one boot."""

    wall: float
    boottime: float
    boot: str


@dataclass(frozen=True, slots=True)
class _Range:
    """Wall times that were recorded under a wrong clock; `until` is when that ended, if it has."""

    start: float
    end: float
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockStep:
    """A step of the wall clock that nothing has explained yet."""

    seconds: float
    """How far the clock is ahead of what is expected; negative if it is behind."""
    since: float
    """When it was noticed, in seconds of the stepped clock."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockMark:
    """What the next process has to know."""

    anchor: _Anchor
    saved_at: float
    """In boottime."""
    ahead: tuple[float, ...] = ()
    """How far the clock has been off since the anchor, each time that it was."""
    wrong: tuple[_Range, ...] = ()

    def encode(self) -> bytes:
        """As JSON."""
        fields = {
            "wall": self.anchor.wall,
            "boottime": self.anchor.boottime,
            "boot": self.anchor.boot,
            "saved_at": self.saved_at,
            "ahead": self.ahead,
            "wrong": [[one.start, one.end, one.until] for one in self.wrong],
        }
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> ClockMark | None:
        """Reads what `encode` made; None if it is something else."""
        try:
            fields: dict[str, Any] = json.loads(data)
            return cls(
                anchor=_Anchor(
                    float(fields["wall"]), float(fields["boottime"]), str(fields["boot"])
                ),
                saved_at=float(fields["saved_at"]),
                ahead=tuple(map(float, fields["ahead"])),
                wrong=tuple(
                    _Range(float(start), float(end), None if until is None else float(until))
                    for start, end, until in fields["wrong"]
                ),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None


class ClockGuard:
    """See the module header. Thread-safe."""

    def __init__(
        self,
        clock: Clock,
        *,
        mark: ClockMark | None = None,
        boot: str = "",
        longest_seconds: float = 0.0,
    ) -> None:
        """Compares the clocks for the first time.

        Args:
            clock: The clocks.
            mark: What the process before this one has left; None for a first start.
            boot: The machine's boot, which boottime belongs to.
            longest_seconds: The longest age that anything is deleted at.
        """
        self._clock = clock
        self._boot = boot
        self._even_seconds = max(_EVEN_SECONDS_MIN, longest_seconds)
        self._lock = threading.Lock()
        self._step: ClockStep | None = None
        self._anchor = self._stepped = now = self._now()
        # How much further ahead the clock may be: the machine may have been off.
        self._off_max = 0.0
        self._ahead: list[float] = []
        self._wrong: list[_Range] = []
        if mark is not None:
            self._take_up(mark, now)
        self.look()

    def _take_up(self, mark: ClockMark, now: _Anchor) -> None:
        self._anchor, self._wrong = mark.anchor, list(mark.wrong)
        if mark.anchor.boot == self._boot and mark.anchor.boottime <= now.boottime:
            self._ahead = list(mark.ahead)
            return
        last = mark.anchor.wall + mark.saved_at - mark.anchor.boottime + _UNSAVED_SECONDS_MAX
        for ahead in mark.ahead:
            self._wrong.append(_Range(mark.anchor.wall + ahead, last + ahead))
        self._anchor = replace(now, wall=mark.anchor.wall)
        self._off_max = OFF_SECONDS_MAX

    def _now(self) -> _Anchor:
        return _Anchor(self._clock.now_ns() / 1e9, self._clock.boottime(), self._boot)

    @property
    def step(self) -> ClockStep | None:
        """The step that was last seen; None while the clock is trusted."""
        return self._step

    def look(self) -> ClockStep | None:
        """Compares the clocks; the step that suspends deletion, or None."""
        with self._lock:
            now = self._now()
            ahead = now.wall - _expected(self._anchor, now)
            if -STEP_SECONDS <= ahead <= STEP_SECONDS + self._off_max:
                self._trust(now)
            elif self._step is None or abs(now.wall - _expected(self._stepped, now)) > STEP_SECONDS:
                self._stepped = now
                self._ahead = [*self._ahead, ahead][-_RANGES_MAX:]
                self._step = ClockStep(seconds=ahead, since=now.wall, reason=self._reason(ahead))
            elif now.boottime - self._stepped.boottime >= self._even_seconds:
                self._trust(now)
            return self._step

    def _reason(self, ahead: float) -> str:
        if not self._off_max:
            return "it was set back" if ahead < 0 else "it was set ahead"
        if ahead < 0:
            return "it is behind the newest time on record"
        return (
            "it is far ahead of the newest time on record: the machine was off for long, or its "
            "clock is wrong"
        )

    def _trust(self, now: _Anchor) -> None:
        """Takes the clock for right as it is now."""
        last = _expected(self._anchor, now)
        for ahead in self._ahead:
            self._wrong.append(_Range(self._anchor.wall + ahead, last + ahead))
        self._wrong = [
            replace(one, until=now.wall) if one.until is None else one for one in self._wrong
        ][-_RANGES_MAX:]
        self._anchor, self._off_max, self._ahead, self._step = now, 0.0, [], None

    def confirm(self) -> ClockStep | None:
        """Takes the clock for right as it is now; the step that this ends, if there was one."""
        with self._lock:
            step, now = self._step, self._now()
            if step is not None:
                # The clock as it is now has dated nothing wrongly; the one before it has, if it was
                # behind, for all that is known since the machine booted.
                self._ahead = [
                    ahead for ahead in self._ahead if abs(ahead - step.seconds) > STEP_SECONDS
                ]
                if step.seconds > 0 and not self._off_max:
                    last = _expected(self._anchor, now)
                    self._wrong.append(_Range(last - now.boottime, last))
            self._trust(now)
            return step

    def correct(self, time_ms: int) -> int:
        """A time on record; if it was recorded under a clock that was behind, when that ended.

        Both in milliseconds since the Unix epoch.
        """
        time = time_ms / 1000
        for one in self._wrong:
            until = one.until if one.until is not None else self._clock.now_ns() / 1e9
            if one.start - STEP_SECONDS <= time <= one.end + STEP_SECONDS and until > time:
                time = until
        return int(time * 1000) if time != time_ms / 1000 else time_ms

    def mark(self) -> ClockMark:
        """What the next process has to know."""
        with self._lock:
            return ClockMark(
                anchor=self._anchor,
                saved_at=self._clock.boottime(),
                ahead=tuple(self._ahead),
                wrong=tuple(self._wrong),
            )


def _expected(anchor: _Anchor, now: _Anchor) -> float:
    """The wall time that boottime leads to."""
    return anchor.wall + now.boottime - anchor.boottime


def newest_arrivals(times: Sequence[int | None], now_ms: int) -> list[int | None]:
    """When things that were stored one after the other arrived, at the latest.

    A time in the future is wrong: what it dates arrived before whatever follows it. A time below
    one before it is, too. None where nothing is known.
    """
    bounded: list[int | None] = []
    later: int | None = None
    for time in reversed(times):
        if time is not None and time <= now_ms + STEP_SECONDS * 1000:
            later = time
        bounded.append(later if time is not None else None)
    bounded.reverse()
    highest = 0
    for at, time in enumerate(bounded):
        if time is not None:
            bounded[at] = highest = max(highest, time)
    return bounded
