"""Threads for those who only look: few, and apart from those that serve messages.

A store that does not answer holds a thread for each question. Were they the broker's own, people
who look at a dashboard while something is wrong would keep cursors from being written.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from ister.errors import CapacityError, UnavailableError

__all__ = ["Lookers"]

_log = logging.getLogger("ister.broker.lookers")

_THREADS: Final = 8
_WAITING_MAX: Final = 128
_SECONDS_MAX: Final = 30.0
# An end waits no longer for those who ask a store that does not answer: topics are to be closed.
_CLOSE_SECONDS: Final = 3.0

Answer = TypeVar("Answer")


class Lookers:
    """See the module header. Used on the broker's loop alone."""

    def __init__(
        self,
        *,
        threads: int = _THREADS,
        waiting_max: int = _WAITING_MAX,
        seconds: float = _SECONDS_MAX,
    ) -> None:
        """Has threads made when they are needed.

        Args:
            threads: At most so many.
            waiting_max: How many questions may be under way, those that wait for a thread included.
            seconds: How long an answer may take.
        """
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="ister-look")
        self._waiting_max = waiting_max
        self._seconds = seconds
        self._waiting = 0
        self._is_closed = False
        self._idle = asyncio.Event()

    async def run(self, work: Callable[..., Answer], *arguments: Any, **named: Any) -> Answer:  # noqa: ANN401
        """What `work(*arguments, **named)` answers, in a thread.

        Raises:
            CapacityError: Too many are under way.
            UnavailableError: It has taken too long, and goes on unheard; or the broker is ending.
        """
        if self._is_closed:
            raise UnavailableError("the broker is ending")
        if self._waiting >= self._waiting_max:
            raise CapacityError("too many requests are under way", hint="come again in a moment")
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        call = partial(context.run, work, *arguments, **named)
        self._waiting += 1
        answer = loop.run_in_executor(self._executor, call)
        answer.add_done_callback(self._left)
        try:
            return await asyncio.wait_for(asyncio.shield(answer), self._seconds)
        except asyncio.CancelledError:
            if answer.cancelled() and self._is_closed:
                # Nobody has cancelled whoever asks: it was not begun when the broker ended.
                raise UnavailableError("the broker is ending") from None
            raise
        except TimeoutError:
            raise UnavailableError(
                f"no answer within {self._seconds:g} seconds",
                hint="a store does not answer; /health says which",
            ) from None

    def _left(self, answer: asyncio.Future[Any]) -> None:
        self._waiting -= 1
        if not self._waiting and self._is_closed:
            self._idle.set()
        if not answer.cancelled():
            answer.exception()  # whoever asked may have gone: nobody else looks at it

    async def close(self, *, within: float = _CLOSE_SECONDS) -> None:
        """Ends the threads, once they have finished what they are at.

        Args:
            within: Those that take longer, in seconds, are left to themselves.
        """
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._waiting:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), within)
        if self._waiting:
            _log.warning("a store does not answer those who look", extra={"count": self._waiting})
            return
        await asyncio.to_thread(self._executor.shutdown)
