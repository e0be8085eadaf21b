"""Repeats calls that may succeed later, with pauses that grow and are drawn at random.

Owns: how often, how long between, and when to give up. Does not own: which calls are safe to
repeat; whoever calls `repeat` says with that that this one is.

Only `UnavailableError` is repeated, and of it only what is marked as retriable: a definite answer
(exists, not found, denied, no room) is the same the next time. The last error is raised as it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ister.clock import Clock
from ister.errors import UnavailableError

__all__ = ["Retry"]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How calls are repeated. Thread-safe as far as its parts are."""

    clock: Clock
    sleep: Callable[[float], object]
    """Waits so many seconds; a true result means that there is nobody left to repeat for."""
    rng: random.Random
    retries: int = 4
    """Attempts after the first one."""
    first_pause_seconds: float = 0.1
    pause_seconds_max: float = 5.0
    deadline_seconds: float = 60.0
    """No attempt begins later than this after the call; one that began has its own deadline."""

    def repeat(self, call: Callable[[float], _Result]) -> _Result:
        """Calls until it succeeds; `call` gets the moment (monotonic) at which it is to give up.

        Raises:
            UnavailableError: The last attempt's, when no more are allowed.
        """
        deadline = self.clock.monotonic() + self.deadline_seconds
        for attempt in range(self.retries):
            try:
                return call(deadline)
            except UnavailableError as error:
                if not error.retriable:
                    raise
                pause = self.pause_seconds(attempt)
                if self.clock.monotonic() + pause >= deadline or self.sleep(pause):
                    raise
        return call(deadline)

    def pause_seconds(self, attempt: int) -> float:
        """The pause after an attempt (from 0): doubled each time, its upper half drawn at random.

        Many clients that met the same outage come back spread out, and none of them at once.
        """
        longest = min(self.first_pause_seconds * 2.0**attempt, self.pause_seconds_max)
        return longest * (0.5 + 0.5 * self.rng.random())
