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
