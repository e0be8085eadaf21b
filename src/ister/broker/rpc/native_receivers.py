"""The threads that take calls from the native engine, one of them at a time.

    take a batch of calls ─► handle it, perhaps with a sync of the disk ─► take the next batch

The thread whose turn it is handles its batch before it takes more: what arrives meanwhile becomes
the next batch, without a timer and without waking another thread. A disk can be slow, and other
calls must not wait for it: if a sync lasts longer than `_STUCK_SECONDS`, the turn goes to another
thread. The last free thread is never allowed to sync.

Owns: the threads, and whose turn it is. Does not own: how calls are handled.

Invariant: exactly one thread has the turn, until there are no more calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from ister.base import threads

Event = TypeVar("Event")

_THREADS: Final = 4
_STUCK_SECONDS: Final = 0.05


class Receivers(Generic[Event]):
    """Threads that take calls, and that may block for as long as another one is free.

    `receive` waits for the next calls and returns them, or None when there will be no more;
    `handle` handles them, and must not raise.
    """

    def __init__(
        self, receive: Callable[[], list[Event] | None], handle: Callable[[list[Event]], None]
    ) -> None:
        self._receive = receive
        self._handle = handle
        self._lock = threading.Lock()
        # Counts turns; the thread that began the last one receives.
        self._turn = 0
        self._turns = threading.Semaphore(1)
        self._is_over = False
        self._blocked = 0
        # The thread whose turn it is, and when it began to block; 0 while it does not.
        self._receiver = 0
        self._blocked_at = 0.0
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Starts the threads."""
        self._threads = [
            threads.start(f"ister-receive-{number}", self._run) for number in range(_THREADS)
        ]

    def join(self) -> None:
        """Waits for the threads, after `receive` has returned None."""
        for thread in self._threads:
            thread.join()

    def replace_stuck(self) -> None:
        """Gives the turn to another thread if its holder is stuck; to be called periodically."""
        with self._lock:
            if self._blocked_at and time.monotonic() - self._blocked_at > _STUCK_SECONDS:
                self._turn += 1
                self._blocked_at = 0.0
                self._turns.release()

    # -- called in a thread that has taken calls --------------------------------------------

    def begin(self) -> bool:
        """Asks to block the calling thread; False unless another thread is free."""
        with self._lock:
            if self._blocked >= _THREADS - 1:
                return False
            self._blocked += 1
            if threading.get_ident() == self._receiver:
                self._blocked_at = time.monotonic()
            return True

    def end(self) -> None:
        """Ends the permission that `begin` gave."""
        with self._lock:
            self._blocked -= 1
            if threading.get_ident() == self._receiver:
                self._blocked_at = 0.0

    # -- the threads ------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._turns.acquire()
            if self._is_over:
                self._turns.release()
                return
            with self._lock:
                turn, self._receiver = self._turn, threading.get_ident()
            while turn == self._turn:
                calls = self._receive()
                if calls is None:
                    self._is_over = True
                    self._turns.release()
                    return
                self._handle(calls)
