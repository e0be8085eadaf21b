"""Locks whose holder must not wait for messages, and the check before each wait.

Finalizers (`__del__`) run in any thread, wherever it allocates memory. One that waits for a message
would wait for its own thread if that commits messages, or changes the metadata store, which the
owner's lease depends on. Such a thread holds a `GuardedLock`, and `check_wait` refuses to wait. At
interpreter exit the threads that commit are gone.
"""

from __future__ import annotations

import sys
import threading

from ister.base import forks
from ister.errors import ClosedError, InvalidRequestError


class _Held(threading.local):
    count = 0


_held = _Held()
forks.call_in_child(lambda: setattr(_held, "count", 0))


class GuardedLock:
    """A lock whose holder must not wait for messages: see `check_wait`."""

    __slots__ = ("_holder", "_lock", "locked")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self.locked = self._lock.locked

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return self._holder == threading.get_ident()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Like `threading.Lock.acquire`."""
        is_taken = self._lock.acquire(blocking, timeout)
        if is_taken:
            _held.count += 1
            self._holder = threading.get_ident()
        return is_taken

    def release(self) -> None:
        """Like `threading.Lock.release`, in the thread that acquired it."""
        self._holder = None
        _held.count -= 1
        self._lock.release()

    def _at_fork_reinit(self) -> None:
        """For `forks.reset_locks`."""
        self._holder = None
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]  # noqa: SLF001

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def endless_error() -> InvalidRequestError:
    """The error for a call that would wait for its own thread."""
    return InvalidRequestError(
        "called in a thread that stores messages, by a finalizer (__del__) or a callback: it would "
        "wait for itself",
        hint="append there, and wait in another thread",
    )


def check_wait() -> None:
    """Refuses to wait where that could not end.

    Raises:
        InvalidRequestError: Others wait for this thread, which holds a `GuardedLock`.
        ClosedError: The interpreter shuts down.
    """
    if _held.count > 0:
        raise endless_error()
    if sys.is_finalizing():
        raise ClosedError(
            "the interpreter is shutting down, and the threads that store messages have ended",
            hint="close the log before the program ends",
        )
