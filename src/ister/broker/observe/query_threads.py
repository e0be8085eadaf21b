"""Threads for queries of the HTTP API: few, and separate from those that serve messages.

A store that does not answer blocks one thread per query. If these were the broker's own threads, a
dashboard that is watched during an outage would keep cursors from being written.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, ParamSpec, TypeVar

from ister.errors import CapacityError, UnavailableError

_log = logging.getLogger("ister.broker.observe.query_threads")

_THREADS: Final = 8
_WAITING_MAX: Final = 128
_SECONDS_MAX: Final = 30.0
# Shutdown waits no longer for queries that a store does not answer: topics must be closed.
_CLOSE_SECONDS: Final = 3.0

Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")


class QueryThreads:
    """See the module header. Used on the broker's loop alone."""

    def __init__(
        self,
        *,
        threads: int = _THREADS,
        waiting_max: int = _WAITING_MAX,
        seconds: float = _SECONDS_MAX,
    ) -> None:
        """Starts threads when they are needed.

        `waiting_max` questions may be under way, those that wait for a thread included; an answer
        may take `seconds`.
        """
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="ister-look")
        self._waiting_max = waiting_max
        self._seconds = seconds
        self._waiting = 0
        self._is_closed = False
        self._idle = asyncio.Event()

    async def run(
        self,
        work: Callable[Arguments, Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Answer:
        """Returns the result of `work(*arguments, **named)`, run in a thread.

        Raises:
            CapacityError: Too many are under way.
            UnavailableError: It took too long (the thread goes on), or the broker is shutting down.
        """
        if self._is_closed:
            raise UnavailableError("the broker is shutting down")
        if self._waiting >= self._waiting_max:
            raise CapacityError("too many requests are in progress", hint="retry in a moment")
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
                # The caller was not cancelled: the work had not begun when the broker stopped.
                raise UnavailableError("the broker is shutting down") from None
            raise
        except TimeoutError:
            raise UnavailableError(
                f"no answer within {self._seconds:g} seconds",
                hint="a store does not answer; /health says which",
            ) from None

    def _left(self, answer: asyncio.Future[Answer]) -> None:
        self._waiting -= 1
        if not self._waiting and self._is_closed:
            self._idle.set()
        if not answer.cancelled():
            answer.exception()  # the caller may be gone: retrieve the exception

    async def close(self, *, within: float = _CLOSE_SECONDS) -> None:
        """Ends the threads once their current work is done.

        Those that take longer than `within` seconds are left to themselves.
        """
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._waiting:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), within)
        if self._waiting:
            _log.warning("a store does not answer queries", extra={"count": self._waiting})
            return
        await asyncio.to_thread(self._executor.shutdown)
