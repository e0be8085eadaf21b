"""When a repeated job is due, and how a failure changes that.

Owns: one job's times, by the monotonic clock. Does not own: threads, the job.

A job that was cut off is retried early, and later after every further failure: after half a minute,
a minute, two, up to its interval. A job that ran to its end, and found something wrong, keeps its
interval: a retry would find the same.
"""

from __future__ import annotations

import random
from typing import Final

from ister.base.clock import Clock
from ister.base.retry import backoff_seconds

_RETRY_SECONDS: Final = 30.0
# A job that became due while no pipeline ran does not start at once.
_OVERDUE_SECONDS: Final = 5.0


class Schedule:
    """The times of one job. Used under its owner's lock, or by one thread."""

    def __init__(
        self,
        every_seconds: float,
        *,
        clock: Clock,
        rng: random.Random,
        last_started_at: int | None = None,
    ) -> None:
        """Continues the schedule of an earlier process.

        `rng` is the randomness of pauses after failures; `last_started_at` is in seconds since the
        Unix epoch.
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
            # A clock that was set back must not delay it for ever.
            wait = min(max(every_seconds - passed, min(every_seconds, _OVERDUE_SECONDS)), wait)
        self._next = clock.monotonic() + wait

    @property
    def is_due(self) -> bool:
        """Whether the job is due."""
        return self._clock.monotonic() >= self._next

    @property
    def wait_seconds(self) -> float:
        """Time until the job is due."""
        return max(self._next - self._clock.monotonic(), 0.0)

    def begin(self) -> None:
        """Records that the job starts now."""
        self._began = self._clock.monotonic()
        self.last_started_at = self._clock.now_ns() // 1_000_000_000
        self.runs += 1

    def end(self, error: str | None, *, is_cut_off: bool = False) -> None:
        """Records that the job has ended.

        A job that `is_cut_off` did not run to its end, and is retried early.
        """
        now = self._clock.monotonic()
        self.last_seconds = now - self._began
        self.last_ok, self.last_error = error is None, error
        if not is_cut_off:
            self._failures = 0
            # Counted from its start: a long job is not delayed.
            self._next = max(self._began + self._every, now)
        else:
            self._failures += 1
            self._next = now + backoff_seconds(
                self._failures, first=_RETRY_SECONDS, most=self._every, rng=self._rng
            )

    def put_off(self) -> None:
        """Records that the job was stopped from outside: it stays due."""
        self.last_seconds = self._clock.monotonic() - self._began

    def as_json(self) -> dict[str, object]:
        """Returns the fields for the pipeline's status."""
        return {
            "every_seconds": self._every,
            "next_at": round(self._clock.now_ns() / 1e9 + self.wait_seconds),
            "runs": self.runs,
            "last_started_at": self.last_started_at,
            "last_seconds": None if self.last_seconds is None else round(self.last_seconds, 3),
            "last_ok": self.last_ok,
            "last_error": self.last_error,
        }
