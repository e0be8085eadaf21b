"""An event loop in a thread, for the client of programs that block.

Owns: the loop, its thread, and waiting for it in a way that Ctrl-C can interrupt. Does not own:
what runs on it (`ister.client.aio`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Final, TypeVar

from ister.base import forks, threads
from ister.base.clock import SystemClock
from ister.errors import ClosedError, InvalidRequestError

STEP_SECONDS: Final = 0.5
"""How long the main thread waits at a time: a signal just before a wait does not interrupt it."""
_monotonic = SystemClock.monotonic

_Result = TypeVar("_Result")


class LoopThread:
    """A loop that runs in a thread."""

    def __init__(self) -> None:
        threads.check_exit(needs_pool=True)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_handle)
        self._fork_error: ClosedError | None = None
        self._thread = threads.start("ister-client", self._run)
        forks.register(self)

    def _after_fork(self, error: ClosedError) -> None:
        """Abandons the event loop in a forked child: waking it would wake the parent's."""
        forks.leak(self._loop)
        self._fork_error = error

    def check_process(self) -> None:
        """Refuses calls of a forked child to its parent's client.

        Raises:
            ClosedError: This process is a fork of the one that opened the client.
        """
        if self._fork_error is not None:
            raise self._fork_error.again()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    @property
    def is_current(self) -> bool:
        """Whether the caller is the loop's own thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def post(self, wake: Callable[[], object]) -> None:
        """Calls a function on the loop soon."""
        self._loop.call_soon_threadsafe(wake)

    def run(self, work: Coroutine[object, None, _Result]) -> _Result:
        """Runs a coroutine on the loop and returns its result."""
        if self._fork_error is not None:
            work.close()
            self.check_process()
        if self.is_current or self._loop.is_closed():
            work.close()
            if self.is_current:
                raise self.would_hang()
            raise ClosedError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            wait_in_steps(done.wait)
            return future.result()
        except BaseException:
            # Interrupted: the caller does not wait any more.
            future.cancel()
            raise

    @staticmethod
    def would_hang() -> InvalidRequestError:
        return InvalidRequestError(
            "a callback must not wait for the client: it is called by the client's own thread"
        )

    def close(self) -> None:
        """Ends the thread. May be called twice."""
        if self._fork_error is None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


def wait_in_steps(wait: Callable[[float], bool], timeout: float | None = None) -> bool:
    """Waits for something, and returns whether it happened in time.

    In short waits: a signal that arrives just before the main thread begins to wait does not
    interrupt the wait, and Ctrl-C would have no effect until it is pressed again.
    """
    give_up_at = None if timeout is None else _monotonic() + timeout
    while True:
        left = STEP_SECONDS if give_up_at is None else give_up_at - _monotonic()
        if wait(max(min(left, STEP_SECONDS), 0)):
            return True
        if left <= 0:
            return False


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    # gRPC's pollers of several loops wake each other needlessly and report that as an error.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
