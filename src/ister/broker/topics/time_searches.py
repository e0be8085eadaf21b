"""Searches for the first message of a time: few at once, bounded, cancelled with their callers.

Indexes answer most searches after one block. Where producers' clocks differ, a search in the middle
of a topic may have to read much of it, which takes processor time. So searches have a few threads
of their own, and a long search pauses for longer than it works: sends and cursors never wait for
one. The bytes that a search may read are bounded. A search whose caller has disconnected ends at
its next chunk. The searches under way are bounded per caller and in all, those that wait for a
thread included; more are refused.

Owns: threads, bounds and counts of searches. Does not own: searching (`ister.topic`).
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import Final, TypeVar

from ister.base.clock import Clock, SystemClock
from ister.base.limits import MIB
from ister.base.metrics import Metrics
from ister.base.model import Start
from ister.broker.security.guard import current_principal
from ister.broker.security.principal import ANONYMOUS
from ister.errors import CapacityError, InvalidRequestError, UnavailableError
from ister.topic.topic import Topic

_THREADS: Final = 2
_WAITING_MAX: Final = 64
_PER_CALLER_MAX: Final = 8
_BYTES_MAX: Final = 256 * MIB
# A search that has read more than this pauses between chunks. One block of an index is less.
_UNPAUSED_BYTES: Final = 1 * MIB
# Pause for each second of work.
_PAUSE_RATIO: Final = 2.0
_PAUSE_SECONDS_MAX: Final = 0.5
_CLOSE_SECONDS: Final = 3.0
# How often a search that waits for its turn checks whether its caller is still there.
_LOOK_SECONDS: Final = 0.1

Answer = TypeVar("Answer")
OnRead = Callable[[int], None]


class TimeSearches:
    """See the module header. Thread-safe."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        threads: int = _THREADS,
        waiting_max: int = _WAITING_MAX,
        per_caller_max: int = _PER_CALLER_MAX,
        bytes_max: int = _BYTES_MAX,
        clock: Clock | None = None,
    ) -> None:
        """Starts threads when they are needed.

        Args:
            metrics: Where searches and what they read are counted.
            threads: Searches that run at once.
            waiting_max: Searches under way in all, those that wait for a thread included.
            per_caller_max: Of these, searches of one authenticated caller.
            bytes_max: What one search may read.
            clock: Measures the work of a search, for its pauses.
        """
        self._metrics = metrics
        self._clock: Clock = clock or SystemClock()
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="ister-search")
        self._turns = threading.BoundedSemaphore(threads)
        self._waiting_max = waiting_max
        self._per_caller_max = per_caller_max
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._left_all = threading.Condition(self._lock)
        self._under_way: Counter[str] = Counter()
        self._closing = threading.Event()
        metrics.register_gauge("broker.time_searches", lambda: self.count)

    @property
    def count(self) -> int:
        """Searches under way, those that wait for a thread included."""
        with self._lock:
            return self._under_way.total()

    async def run(
        self,
        search: Callable[[OnRead], Answer],
        *,
        caller: str = "",
        is_gone: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Runs a search in a thread; cancelling this ends it.

        `search` calls its argument with the size of each chunk that it reads. `caller` is empty if
        it is not known; `is_gone` says whether it has disconnected, and is called from the thread.

        Raises:
            CapacityError: Too many searches are under way.
            InvalidRequestError: The search has read as much as it may.
            UnavailableError: The broker is ending, or the caller has disconnected.
        """
        left = threading.Event()
        future = self._begin(search, caller, lambda: left.is_set() or is_gone())
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if future.cancelled() and self._closing.is_set():
                raise UnavailableError("the broker is shutting down") from None
            raise
        finally:
            left.set()

    async def start_of(
        self,
        topic: Topic,
        start: Start,
        *,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> int:
        """The offset where a reader of a topic begins; only a point in time is searched for."""
        if not isinstance(start, datetime):
            return await asyncio.to_thread(topic.resolve_start, start)
        principal = current_principal()
        return await self.run(
            lambda on_read: topic.resolve_start(start, on_read=on_read),
            caller="" if principal is ANONYMOUS else str(principal),
            is_gone=is_gone,
        )

    def run_blocking(
        self,
        search: Callable[[OnRead], Answer],
        *,
        caller: str = "",
        is_gone: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Like `run`, but in the calling thread, which waits for its turn."""
        self._enter(caller)
        try:
            return self._in_turn(search, is_gone)
        finally:
            self._left(caller)

    def close(self) -> None:
        """Ends all searches; waits at most a few seconds for one that a store delays."""
        self._closing.set()
        self._executor.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            is_idle = self._left_all.wait_for(
                lambda: not self._under_way.total(), timeout=_CLOSE_SECONDS
            )
        if is_idle:
            self._executor.shutdown()

    # -- one search -------------------------------------------------------------------------

    def _begin(
        self, search: Callable[[OnRead], Answer], caller: str, is_gone: Callable[[], bool]
    ) -> Future[Answer]:
        self._enter(caller)
        try:
            context = contextvars.copy_context()
            future = self._executor.submit(context.run, self._in_turn, search, is_gone)
        except RuntimeError:
            self._left(caller)
            raise UnavailableError("the broker is shutting down") from None
        future.add_done_callback(lambda _: self._left(caller))
        return future

    def _enter(self, caller: str) -> None:
        with self._lock:
            if self._closing.is_set():
                raise UnavailableError("the broker is shutting down")
            is_one_too_many = self._under_way.total() >= self._waiting_max or (
                caller != "" and self._under_way[caller] >= self._per_caller_max
            )
            if is_one_too_many:
                raise CapacityError(
                    "too many searches for a time are under way", hint="retry in a moment"
                )
            self._under_way[caller] += 1
        self._metrics.count("broker.time_searches_total")

    def _in_turn(self, search: Callable[[OnRead], Answer], is_gone: Callable[[], bool]) -> Answer:
        """Runs a search in this thread, with no more than a few others."""
        while not self._turns.acquire(timeout=_LOOK_SECONDS):
            if self._closing.is_set() or is_gone():
                raise UnavailableError("the search was cancelled")
        try:
            return search(self._bounded(is_gone))
        finally:
            self._turns.release()

    def _left(self, caller: str) -> None:
        with self._lock:
            self._under_way[caller] -= 1
            if not self._under_way[caller]:
                del self._under_way[caller]
                self._left_all.notify_all()

    def _bounded(self, is_gone: Callable[[], bool]) -> OnRead:
        total = 0
        since = self._clock.monotonic()

        def on_read(size: int) -> None:
            nonlocal total, since
            total += size
            self._metrics.count("broker.time_search_bytes_total", size)
            if total > _UNPAUSED_BYTES:
                worked = self._clock.monotonic() - since
                self._closing.wait(min(_PAUSE_RATIO * worked, _PAUSE_SECONDS_MAX))
            since = self._clock.monotonic()
            if self._closing.is_set() or is_gone():
                raise UnavailableError("the search was cancelled")
            if total > self._bytes_max:
                raise InvalidRequestError(
                    f"no message of that time was found in {self._bytes_max >> 20} MiB searched",
                    hint="use an offset, or start the search at a later offset",
                )

        return on_read
