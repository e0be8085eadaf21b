"""Waiters: calls that wait until a watermark passes an offset.

A waiter is called once, with None when its offset was passed or with the error that ended the
wait; again only if an exception from a signal handler came right after the call. Thread waiters
block on a plain lock, the cheapest thing that Python can wake; all others, such as an event
loop's edge, enlists a plain `Waiter` with a function of its own.

Owns: the order of waiters. Does not own: when a watermark moves. All methods except
`ThreadWaiter.block` are called with the log's lock held; the caller runs callbacks after it has
released the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from ister.base.guarded_lock import check_wait
from ister.errors import IsterError

_COMPACT_MIN = 64


class Waiter:
    """Calls `on_done` once; `offset` is what the watermark has to pass.

    `on_done` runs in the thread that commits, which goes on with others only when it returns: it
    must not block, append, or raise. Setting `is_done` gives up.

    A patient waiter, such as a reader at the tail, waits through a full disk and takes uploads as
    they come; a producer's call does not.
    """

    __slots__ = ("is_done", "is_patient", "offset", "on_done")

    def __init__(
        self, offset: int, on_done: Callable[[IsterError | None], None], *, is_patient: bool = False
    ) -> None:
        self.offset = offset
        self.on_done = on_done
        self.is_patient = is_patient
        self.is_done = False

    def __lt__(self, other: Waiter) -> bool:
        return self.offset < other.offset

    def finish(self, error: IsterError | None) -> None:
        """Tells the waiter, unless it has been told or has given up."""
        if not self.is_done:
            # In this order: an exception from a signal handler in between must not skip the call.
            self.on_done(error)
            self.is_done = True


class ThreadWaiter(Waiter):
    """A thread that blocks until it is notified."""

    __slots__ = ("_blocked", "error")

    def __init__(self, offset: int, *, is_patient: bool = False) -> None:
        super().__init__(offset, self._wake, is_patient=is_patient)
        self.error: IsterError | None = None
        self._blocked = threading.Lock()
        self._blocked.acquire()

    def _wake(self, error: IsterError | None) -> None:
        self.error = error
        try:  # noqa: SIM105 - `suppress` is slower, and this wakes readers at the tail
            self._blocked.release()
        except RuntimeError:
            pass  # already woken

    def block(self, timeout: float | None) -> bool:
        """Waits to be told; False if the time ran out first."""
        check_wait()
        return self._blocked.acquire(timeout=-1 if timeout is None else max(0.0, timeout))


class Waiters:
    """The waiters for one watermark, lowest offset first."""

    __slots__ = ("_compact_at", "_heap")

    def __init__(self) -> None:
        self._heap: list[Waiter] = []
        self._compact_at = _COMPACT_MIN

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, waiter: Waiter) -> None:
        """Enlists a waiter."""
        heappush(self._heap, waiter)
        if len(self._heap) >= self._compact_at:
            # Waiters that gave up are dropped now and then: a reader that waits at a quiet tail
            # again and again, each time with a timeout, must not fill the heap.
            heap = [waiting for waiting in self._heap if not waiting.is_done]
            heapify(heap)
            self._heap = heap
            self._compact_at = 2 * len(self._heap) + _COMPACT_MIN

    def wants(self, next_offset: int) -> bool:
        """Whether someone waits for an offset that has been given out."""
        heap = self._heap
        while heap and heap[0].is_done:
            heappop(heap)
        return bool(heap) and heap[0].offset < next_offset

    def has_impatient(self) -> bool:
        """Whether a waiter that is not patient is waiting."""
        return any(not waiter.is_patient and not waiter.is_done for waiter in self._heap)

    def wake_passed(self, watermark: int, count_max: int) -> bool:
        """Wakes waiters whose offset is below `watermark`, at most `count_max` of them.

        Each is woken before it is removed: an exception from a signal handler may end this call at
        any point.

        Returns whether more waiters remain to be woken.
        """
        heap = self._heap
        while heap and heap[0].offset < watermark:
            if count_max == 0:
                return True
            count_max -= 1
            heap[0].finish(None)
            heappop(heap)
        return False

    def take_passed(self, watermark: int) -> list[Waiter]:
        """Removes and returns those whose offset is below `watermark`."""
        heap = self._heap
        passed: list[Waiter] = []
        while heap and heap[0].offset < watermark:
            passed.append(heappop(heap))
        return passed

    def take_impatient(self, watermark: int) -> list[Waiter]:
        """Removes and returns the waiters below `watermark` that are not patient."""
        passed = self.take_passed(watermark)
        for waiter in passed:
            if waiter.is_patient:
                heappush(self._heap, waiter)
        return [waiter for waiter in passed if not waiter.is_patient]

    def take_all(self) -> list[Waiter]:
        """Removes and returns all waiters."""
        everyone, self._heap = self._heap, []
        return everyone
