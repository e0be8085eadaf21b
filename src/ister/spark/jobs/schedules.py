"""When something is due that is done again and again, and what a failure changes about that.

Owns: one job's times, by the monotonic clock. Does not own: threads, the job.

A job that was cut off is tried again sooner than it would be otherwise, and after every further
failure later: half a minute, a minute, two, up to its own time. Pauses are drawn at random from the
upper half of each, so that many that failed together do not come back together. One that came to
its end, and found something wrong, has its usual time: looking again would find the same.
"""

from __future__ import annotations

import random
from typing import Any, Final

from ister.clock import Clock

__all__ = ["Schedule", "backoff_seconds"]

_RETRY_SECONDS: Final = 30.0
_RETRY_DOUBLINGS_MAX: Final = 16
# What was due while nobody was there is not begun in the first moment.
_OVERDUE_SECONDS: Final = 5.0


def backoff_seconds(failures: int, *, first: float, most: float, rng: random.Random) -> float:
    """How long to wait after so many failures, one after the other."""
    pause = first * 2.0 ** min(max(failures - 1, 0), _RETRY_DOUBLINGS_MAX)
    return min(pause, most) * rng.uniform(0.5, 1.0)


class Schedule:
    """See the module header. Used under its owner's lock, or by one thread."""

    def __init__(
        self,
        every_seconds: float,
        *,
        clock: Clock,
        rng: random.Random,
        last_started_at: int | None = None,
    ) -> None:
        """A schedule that goes on where another process left it.

        Args:
            every_seconds: From one start to the next.
            clock: Where time comes from.
            rng: For pauses after failures.
            last_started_at: When it was last begun, in seconds since the Unix epoch.
        """
        self._every = every_seconds
        self._clock = clock
        self._rng = rng
        self._failures = 0
        self.last_started_at = last_started_at
        self.last_seconds: float | None = None
        self.last_ok: bool | None = None
        self.last_error: str | None = None
        self.runs = 0
        self._began = 0.0
        wait = every_seconds
        if last_started_at is None:
            wait = min(every_seconds, _OVERDUE_SECONDS)
        else:
            passed = clock.now_ns() / 1e9 - last_started_at
            # A clock that was set back must not put it off for ever.
            wait = min(max(every_seconds - passed, min(every_seconds, _OVERDUE_SECONDS)), wait)
        self._next = clock.monotonic() + wait

    @property
    def is_due(self) -> bool:
        """Whether its time has come."""
        return self._clock.monotonic() >= self._next

    @property
    def wait_seconds(self) -> float:
        """How long until then."""
        return max(self._next - self._clock.monotonic(), 0.0)

    def begin(self) -> None:
        """It begins now."""
        self._began = self._clock.monotonic()
        self.last_started_at = self._clock.now_ns() // 1_000_000_000
        self.runs += 1

    def end(self, error: str | None, *, is_cut_off: bool = False) -> None:
        """It has ended.

        Args:
            error: What it says is wrong.
            is_cut_off: It did not come to its end, and so is tried again before its time.
        """
        now = self._clock.monotonic()
        self.last_seconds = now - self._began
        self.last_ok, self.last_error = error is None, error
        if not is_cut_off:
            self._failures = 0
            # From its start: a job that takes long is not put off by that.
            self._next = max(self._began + self._every, now)
        else:
            self._failures += 1
            self._next = now + backoff_seconds(
                self._failures, first=_RETRY_SECONDS, most=self._every, rng=self._rng
            )

    def put_off(self) -> None:
        """It did not come to its end through no fault of its own: it is due as it was."""
        self.last_seconds = self._clock.monotonic() - self._began

    def as_json(self) -> dict[str, Any]:
        """For the pipeline's status."""
        return {
            "every_seconds": self._every,
            "next_at": round(self._clock.now_ns() / 1e9 + self.wait_seconds),
            "runs": self.runs,
            "last_started_at": self.last_started_at,
            "last_seconds": None if self.last_seconds is None else round(self.last_seconds, 3),
            "last_ok": self.last_ok,
            "last_error": self.last_error,
        }
