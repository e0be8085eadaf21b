"""Protects a log against exceptions that signal handlers raise.

Python runs signal handlers in the main thread, between two bytecodes. A handler that raises
(Ctrl-C, `signal.alarm` as a timeout) ends whatever the main thread is doing there. Two rules keep a
log consistent:

- The main thread changes neither files nor metadata. The scheduler's threads commit for it, and
  `shielded` runs the rest, such as opening, rotating, uploading and closing, in a separate thread.
- Changes that the main thread makes under a log's lock have one commit point. A call that an
  exception ends releases the lock, and then repairs the state around the commit point. The lock is
  an `RLock`, because releasing it fails if this thread does not hold it. With a plain lock the call
  could not know whether the interrupted `acquire` had succeeded.

A handler may raise again immediately. So the release comes first, with no bytecode before it at
which CPython runs handlers. `AppendBuffer.is_changing` stays set until the repair is complete: if
the repair is interrupted, the next thread that takes the lock repeats it (`Committer.repair`).

Finalizers (`__del__`) run in any thread, wherever it allocates memory. One that waits for a message
would wait forever in a thread that commits, so such a thread holds a `GuardedLock`, and
`check_wait` refuses to wait. At interpreter exit the threads that commit are gone.
"""

from __future__ import annotations

import _thread
import contextvars
import sys
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from ister.base import forks, threads
from ister.errors import ClosedError, InvalidRequestError

_T = TypeVar("_T")

# Held while `make_shielded` creates or disposes of something.
_making = threading.Lock()
# Dispose of results that interrupted callers did not receive.
_left: Final[list[Callable[[], None]]] = []
forks.call_in_child(lambda: forks.reset_locks(_making))
forks.call_in_child(_left.clear)


class _Held(threading.local):
    count = 0


_held = _Held()
forks.call_in_child(lambda: setattr(_held, "count", 0))


class GuardedLock:
    """A lock whose holder must not wait for messages: see `check_wait`."""

    __slots__ = ("_at_fork_reinit", "_lock", "locked")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.locked = self._lock.locked
        # For `forks.reset_locks`.
        self._at_fork_reinit = self._lock._at_fork_reinit  # type: ignore[attr-defined]  # noqa: SLF001

    def acquire(self, blocking: bool = True) -> bool:
        """Like `threading.Lock.acquire`."""
        is_taken = self._lock.acquire(blocking)
        if is_taken:
            _held.count += 1
        return is_taken

    def release(self) -> None:
        """Like `threading.Lock.release`, in the thread that acquired it."""
        _held.count -= 1
        self._lock.release()

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


def is_held(lock: threading.RLock) -> bool:
    """Whether this thread holds the lock."""
    # `threading.Condition` uses this method as well.
    return bool(lock._is_owned())  # type: ignore[attr-defined]  # noqa: SLF001


def is_main_thread() -> bool:
    """Whether this is the thread that runs signal handlers."""
    return threading.get_ident() == threading.main_thread().ident


def shielded(work: Callable[[], _T], name: str) -> _T:
    """Runs `work` in a separate thread and waits for it.

    An exception from a signal handler ends the wait, not the work. The caller may then call again,
    so `work` has to wait for an earlier call that is still running.

    Returns:
        What `work` returned.

    Raises:
        ClosedError: The interpreter shuts down.
        BaseException: The exception that `work` raised.
    """
    check_wait()
    results: list[_T] = []
    errors: list[BaseException] = []
    ended = threading.Lock()
    ended.acquire()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            errors.append(error)
        finally:
            ended.release()

    try:
        # With the caller's context, which has its span.
        _thread.start_new_thread(_start, (contextvars.copy_context().run, run, name))
    except RuntimeError:  # no thread can be started at interpreter exit
        run()
    ended.acquire()
    if errors:
        raise errors[0]
    return results[0]


def make_shielded(make: Callable[[], _T], unmake: Callable[[_T], None], name: str) -> _T:
    """Creates something in a separate thread and waits for it.

    If an exception from a signal handler ends the wait, the result is disposed of in another
    thread; the next call waits for that.

    `unmake` disposes of it, and raises nothing.

    Returns:
        What `make` returned.

    Raises:
        BaseException: The exception that `make` raised.
    """
    found: list[_T] = []
    errors: list[BaseException] = []
    is_left: list[bool] = []
    ended = threading.Lock()
    ended.acquire()

    def run() -> None:
        with _making:
            _clear_left()
            try:
                if not is_left:
                    found.append(make())
            except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
                errors.append(error)
            finally:
                ended.release()

    def undo() -> None:
        is_left.append(True)
        if found:
            unmake(found[0])

    try:
        _thread.start_new_thread(_start, (contextvars.copy_context().run, run, name))
        ended.acquire()
        if not errors:
            return found[0]
    except BaseException:
        # First: if a second exception follows immediately, the next call disposes of it.
        _left.append(undo)
        _thread.start_new_thread(_start, (contextvars.copy_context().run, _clear, name))
        raise
    raise errors[0]


def _clear() -> None:
    with _making:
        _clear_left()


def _clear_left() -> None:
    while _left:
        _left.pop()()


def _start(run: Callable[[Callable[[], None]], None], work: Callable[[], None], name: str) -> None:
    """Starts the thread, itself in another thread: starting must not be interrupted either."""
    # Not a daemon: the program must not exit before the work is done.
    threads.start(name, run, work, daemon=False)
