"""When to try again, and when to give up."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from ister.client.statuses import is_worth_a_retry
from ister.errors import IsterError

__all__ = ["Retries"]

_FIRST_SECONDS: Final = 0.05
_MOST_SECONDS: Final = 2.0


class Retries:
    """Pauses that double, with jitter, until something works or the time is over."""

    def __init__(self, timeout: float | None) -> None:
        """Begins.

        Args:
            timeout: How long failures may follow each other, in seconds; None for ever.
        """
        self._timeout = timeout
        self._pause = _FIRST_SECONDS
        self._give_up_at: float | None = None
        self.failures = 0

    def reset(self) -> None:
        """Something has worked."""
        self._pause = _FIRST_SECONDS
        self._give_up_at = None
        self.failures = 0

    async def pause(self, error: IsterError) -> None:
        """Waits a while after a failure.

        Raises:
            IsterError: The failure, if another attempt would not help or comes too late.
        """
        now = asyncio.get_running_loop().time()
        self.failures += 1
        if self._timeout is not None and self._give_up_at is None:
            self._give_up_at = now + self._timeout
        left = None if self._give_up_at is None else self._give_up_at - now
        if not is_worth_a_retry(error) or (left is not None and left <= 0):
            raise error
        # Half of it is chance: those whose broker has gone do not all come back in one moment.
        pause = self._pause * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        self._pause = min(self._pause * 2, _MOST_SECONDS)
        await asyncio.sleep(pause if left is None else min(pause, left))
