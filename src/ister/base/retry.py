"""Retries: the backoff of the whole project, and the loops that use it.

    backoff_seconds     how long to wait after a number of consecutive failures
    RetryPolicy         blocking calls with a bounded number of attempts (object stores)
    retry_unavailable   blocking calls repeated for a length of time (Spark drivers)
    AsyncRetry          consecutive failures of one client, producer or consumer

Does not own: which calls are safe to repeat; the caller decides that by using this module. The
redelivery delay of a negative acknowledgement is a setting: see `subscription.policy`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from ister.base.clock import Clock, SystemClock
from ister.errors import FencedError, IsterError, UnavailableError

_log = logging.getLogger("ister.retry")

_RNG: Final = random.Random()  # noqa: S311 - spreads load, not a secret
# More doublings than this would overflow a float before `most` bounds them.
_DOUBLINGS_MAX: Final = 64
_DRIVER_SECONDS: Final = 120.0
_DRIVER_PAUSES: Final = (0.2, 5.0)
_CLIENT_PAUSES: Final = (0.05, 2.0)
_WARN_SECONDS: Final = 30.0
# Do not warn about a broker's restart. Eight attempts that fail immediately take about 5 s.
_CLIENT_WARN_SECONDS: Final = 5.0
_CLIENT_WARN_FAILURES: Final = 8

_Result = TypeVar("_Result")


def backoff_seconds(
    failures: int, *, first: float, most: float, rng: random.Random = _RNG
) -> float:
    """The pause after `failures` consecutive failures, counted from 1.

    It doubles from `first` up to `most`; its upper half is random, so that many clients that met
    the same outage do not all return at the same moment.
    """
    longest = min(first * 2.0 ** min(max(failures - 1, 0), _DOUBLINGS_MAX), most)
    return longest * rng.uniform(0.5, 1.0)


def can_retry(error: IsterError) -> bool:
    """Whether a client's call may succeed later, perhaps at another broker."""
    # A fenced broker has lost the topic: another one owns it, or is about to.
    return error.retriable or isinstance(error, FencedError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how long a blocking call is repeated. As thread-safe as its parts.

    Only retriable `UnavailableError`s are repeated: a definite answer (exists, not found, denied,
    no room) does not change.
    """

    clock: Clock = field(default_factory=SystemClock)
    sleep: Callable[[float], object]
    """Waits for a number of seconds; a true result stops the retries."""
    rng: random.Random = _RNG
    retries: int = 4
    """Attempts after the first one."""
    first_pause_seconds: float = 0.1
    pause_seconds_max: float = 5.0
    deadline_seconds: float = 60.0
    """No attempt starts later than this after the call; each attempt has its own timeout."""

    def call(self, attempt: Callable[[float], _Result]) -> _Result:
        """Calls `attempt` with its deadline (monotonic) until it succeeds.

        Raises:
            UnavailableError: From the last attempt, when no more are allowed.
        """
        deadline = self.clock.monotonic() + self.deadline_seconds
        for failures in range(1, self.retries + 1):
            try:
                return attempt(deadline)
            except UnavailableError as error:
                if not error.retriable:
                    raise
                pause = self.pause_seconds(failures)
                if self.clock.monotonic() + pause >= deadline or self.sleep(pause):
                    raise
        return attempt(deadline)

    def pause_seconds(self, failures: int) -> float:
        """The pause after `failures` consecutive failures, counted from 1."""
        return backoff_seconds(
            failures, first=self.first_pause_seconds, most=self.pause_seconds_max, rng=self.rng
        )


def retry_unavailable(call: Callable[[], _Result], *, seconds: float = _DRIVER_SECONDS) -> _Result:
    """Repeats `call` while a store or a broker is unavailable, for up to `seconds`.

    For code whose exceptions end a whole Spark query: a broker's restart takes seconds.

    Raises:
        UnavailableError: From the last attempt, when the time is over.
    """
    pause = threading.Event()
    deadline = SystemClock.monotonic() + seconds
    failures, warned_at = 0, 0.0
    while True:
        try:
            return call()
        except UnavailableError as error:
            failures += 1
            first, most = _DRIVER_PAUSES
            length = backoff_seconds(failures, first=first, most=most)
            if SystemClock.monotonic() + length >= deadline:
                raise
            # One warning for each half minute of an outage: pauses are short, and queries many.
            is_due = failures == 1 or SystemClock.monotonic() >= warned_at + _WARN_SECONDS
            warned_at = SystemClock.monotonic() if is_due else warned_at
            _log.log(
                logging.WARNING if is_due else logging.DEBUG,
                "retrying",
                extra={"error": str(error), "pause_seconds": round(length, 2)},
            )
            pause.wait(length)


class AsyncRetry:
    """Counts consecutive failures, pauses after each, and gives up after a timeout."""

    def __init__(self, timeout: float | None) -> None:
        """Starts without failures.

        Args:
            timeout: How long failures may follow each other, in seconds; None for no limit.
        """
        self._timeout = timeout
        self._failed_at: float | None = None
        self._has_warned = False
        self.failures = 0

    def start(self) -> None:
        """Counts the timeout from now on, not from the first failure."""
        self._failed_at = asyncio.get_running_loop().time()

    def seconds_left(self) -> float:
        """How much of the timeout is left."""
        if self._timeout is None or self._failed_at is None:
            return math.inf if self._timeout is None else self._timeout
        return self._failed_at + self._timeout - asyncio.get_running_loop().time()

    def reset(self) -> None:
        """Forgets the failures, after a success."""
        self._failed_at = None
        self._has_warned = False
        self.failures = 0

    async def pause(self, error: IsterError) -> None:
        """Waits after a failure.

        Raises:
            IsterError: The failure itself, if a retry cannot help or the time is over.
        """
        now = asyncio.get_running_loop().time()
        self.failures += 1
        if self._failed_at is None:
            self._failed_at = now
        left = self.seconds_left()
        if not can_retry(error) or left <= 0:
            raise error
        is_long = now - self._failed_at >= _CLIENT_WARN_SECONDS
        if not self._has_warned and (is_long or self.failures >= _CLIENT_WARN_FAILURES):
            self._has_warned = True
            _log.warning("the broker does not respond; retrying: %s", error)
        first, most = _CLIENT_PAUSES
        pause = backoff_seconds(self.failures, first=first, most=most)
        await asyncio.sleep(min(pause, left))
