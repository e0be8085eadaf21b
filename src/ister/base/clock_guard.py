"""Detects steps of the wall clock, so that retention never trusts a wrong time.

    wall clock  ─┐
    boottime    ─┼─► check ─► trusted, or a step: deletion by age is suspended
    last mark   ─┘

Owns: the comparison, and its state (`ClockMark`). Does not own: files, alarms, deletion.

Starting at an anchor, a moment at which both clocks were trusted, the wall clock has to advance as
fast as boottime. If the two differ by more than `STEP_SECONDS`, the wall clock was stepped. It is
not trusted until one of these happens:

- it agrees with boottime again: the step was undone;
- an operator confirms that it is right (`confirm`);
- it has run without another step for a day and for the longest retention time: everything stored
  before the step is older than that by now, and everything stored since has a time of the new
  clock.

Smaller differences are corrections (NTP) and move the anchor. Suspending the machine is not a step,
because boottime includes that time.

Across restarts the anchor is kept as a mark on disk. Within one boot the comparison is exact. After
a reboot it is unknown how long the machine was off: a clock behind the mark, or more than
`OFF_SECONDS_MAX` ahead of it, counts as a step. The first start has nothing to compare with.

Times that were recorded while the clock was wrong are in known ranges of wall time. `correct`
replaces such a time by the end of that period, or, while it lasts, by the later of the two clocks:
the real time is not later than that, so nothing is deleted too early, also not by another node.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ister.base.clock import Clock

STEP_SECONDS: Final = 30.0
"""A larger difference between the wall clock and boottime is a step."""
OFF_SECONDS_MAX: Final = 86_400.0
"""The clock needs to be confirmed if the machine was off for longer than this."""
_EVEN_SECONDS_MIN: Final = 86_400.0
_RANGES_MAX: Final = 32
# Longer than the interval at which marks are saved.
_UNSAVED_SECONDS_MAX: Final = 300.0


@dataclass(frozen=True, slots=True)
class _Anchor:
    """A moment on both clocks; `boottime` is comparable within one boot only."""

    wall: float
    boottime: float
    boot: str


@dataclass(frozen=True, slots=True)
class _Range:
    """Wall times recorded while the clock was wrong.

    `until` is when that period ended, by the trusted clock; None if it has not.
    """

    start: float
    end: float
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockStep:
    """A step of the wall clock that was neither undone nor confirmed."""

    seconds: float
    """How far the clock is ahead of the expected time; negative if it is behind."""
    since: float
    """When it was detected, in seconds of the stepped clock."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockMark:
    """The state of a `ClockGuard`, which the next process continues from."""

    anchor: _Anchor
    saved_at: float
    """In boottime."""
    ahead: tuple[float, ...] = ()
    """How far the clock was ahead at each step since the anchor."""
    wrong: tuple[_Range, ...] = ()

    def encode(self) -> bytes:
        """Encodes the mark as JSON."""
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
        """Decodes what `encode` returned; None if it is invalid."""
        try:
            fields = json.loads(data)
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
    """Compares the wall clock with boottime and keeps the current step. Thread-safe."""

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
            mark: The mark of the previous process; None for the first start.
            boot: The boot id; boottime is comparable within one boot only.
            longest_seconds: The longest age limit of any retention setting.
        """
        self._clock = clock
        self._boot = boot
        self._even_seconds = max(_EVEN_SECONDS_MIN, longest_seconds)
        self._lock = threading.Lock()
        self._step: ClockStep | None = None
        self._anchor = self._stepped = now = self._now()
        # How far ahead the clock may be in addition: the machine may have been off that long.
        self._off_max = 0.0
        self._ahead: list[float] = []
        self._wrong: list[_Range] = []
        if mark is not None:
            self._restore(mark, now)
        self.check()

    def _restore(self, mark: ClockMark, now: _Anchor) -> None:
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
        """The step found by the last `check`; None while the clock is trusted."""
        return self._step

    def check(self) -> ClockStep | None:
        """Compares the clocks; returns the step that suspends deletion, or None."""
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
            return "it was set back" if ahead < 0 else "it was set forward"
        if ahead < 0:
            return "it is behind the last recorded time"
        return (
            "it is far ahead of the last recorded time: the machine was off for a long time, or "
            "its clock is wrong"
        )

    def _trust(self, now: _Anchor) -> None:
        """Accepts the current time as right: ends the step and moves the anchor here."""
        wrong = self._wrong + self._stepped_ranges(_expected(self._anchor, now))
        self._wrong = [replace(one, until=now.wall) if one.until is None else one for one in wrong][
            -_RANGES_MAX:
        ]
        self._anchor, self._off_max, self._ahead, self._step = now, 0.0, [], None

    def _stepped_ranges(self, last: float) -> list[_Range]:
        """The wall times recorded since the anchor while stepped; `last` is its expected time."""
        return [_Range(self._anchor.wall + ahead, last + ahead) for ahead in self._ahead]

    def confirm(self) -> ClockStep | None:
        """Accepts the current time as right; returns the step that this ends, or None."""
        with self._lock:
            step, now = self._step, self._now()
            if step is not None:
                # Times recorded since the step are right. Times before it are wrong if the clock
                # was behind then, possibly since the machine booted.
                self._ahead = [
                    ahead for ahead in self._ahead if abs(ahead - step.seconds) > STEP_SECONDS
                ]
                if step.seconds > 0 and not self._off_max:
                    last = _expected(self._anchor, now)
                    self._wrong.append(_Range(last - now.boottime, last))
            self._trust(now)
            return step

    def correct(self, time_ms: int) -> int:
        """Corrects a recorded time: one of a clock that was behind becomes the end of that period.

        Both are in milliseconds since the Unix epoch.
        """
        self.check()
        with self._lock:
            now = self._now()
            last = _expected(self._anchor, now)
            # During a step either clock may be the right one: the later time is safe.
            latest = max(now.wall, last)
            wrong = self._wrong + self._stepped_ranges(last)
        # The end of a period may itself be in a range: the clock that ended it was wrong as well.
        times = [time_ms / 1000]
        for one in wrong:
            if any(one.start - STEP_SECONDS <= at <= one.end + STEP_SECONDS for at in times):
                times.append(one.until if one.until is not None else latest)
        time = max(times)
        return int(time * 1000) if time != times[0] else time_ms

    def mark(self) -> ClockMark:
        """Returns the state that the next process continues from."""
        with self._lock:
            return ClockMark(
                anchor=self._anchor,
                saved_at=self._clock.boottime(),
                ahead=tuple(self._ahead),
                wrong=tuple(self._wrong),
            )


def _expected(anchor: _Anchor, now: _Anchor) -> float:
    """The wall time expected now: the anchor's plus the boottime since."""
    return anchor.wall + now.boottime - anchor.boottime


def newest_arrivals(times: Sequence[int | None], now_ms: int) -> list[int | None]:
    """The latest possible arrival time of each item of a sequence, given recorded times.

    Items arrived in this order. A time in the future is wrong; the time of the next item is used
    instead. A time lower than an earlier one is wrong as well; the earlier one is used. None where
    no time is known.
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
