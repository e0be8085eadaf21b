"""The only reader of time, and a clock for tests that moves by hand.

`now_ns` is wall time and goes into messages; everything that measures or waits uses `monotonic`,
so a jump of the wall clock changes neither the order of offsets nor rotation. Lease deadlines, and
everything else that continues while the machine is suspended, use `boottime`.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Protocol


class Clock(Protocol):
    """Where wall time and elapsed time come from. Thread-safe."""

    def now_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""
        ...

    def boottime(self) -> float:
        """Seconds on a monotonic clock that also runs while the machine is suspended."""
        ...

    def sleep(self, seconds: float) -> None:
        """Blocks for this many seconds."""
        ...


class SystemClock:
    """The machine's clocks."""

    # The built-in functions themselves: a call through a method of ours costs as much again.
    now_ns = staticmethod(time.time_ns)
    monotonic = staticmethod(time.monotonic)
    boottime = staticmethod(partial(time.clock_gettime, time.CLOCK_BOOTTIME))
    sleep = staticmethod(time.sleep)


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, *, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic = 0.0
        self._suspended = 0.0

    def now_ns(self) -> int:
        """Nanoseconds since the Unix epoch, as set."""
        return self._now_ms * 1_000_000

    def monotonic(self) -> float:
        """Seconds advanced so far."""
        return self._monotonic

    def boottime(self) -> float:
        """Seconds advanced or suspended so far."""
        return self._monotonic + self._suspended

    def advance(self, seconds: float) -> None:
        """Moves all clocks forward."""
        self._monotonic += seconds
        self._now_ms += int(seconds * 1000)

    def sleep(self, seconds: float) -> None:
        """Moves all clocks forward; does not block."""
        self.advance(seconds)

    def suspend(self, seconds: float) -> None:
        """Moves all clocks except `monotonic` forward, as suspending the machine does."""
        self._suspended += seconds
        self._now_ms += int(seconds * 1000)

    def jump_wall(self, milliseconds: int) -> None:
        """Moves wall time alone, as an operator or a time server may."""
        self._now_ms += milliseconds
