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
would wait forever in a thread that commits: see `ister.base.guarded_lock`.
"""

from __future__ import annotations

import _thread
import contextvars
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from ister.base import forks, threads
from ister.base.guarded_lock import check_wait

_T = TypeVar("_T")

# Held while `make_shielded` creates or disposes of something.
_making = threading.Lock()
# Dispose of results that interrupted callers did not receive.
_left: Final[list[Callable[[], None]]] = []
forks.call_in_child(lambda: forks.reset_locks(_making))
forks.call_in_child(_left.clear)


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

    Raises:
        ClosedError: The interpreter shuts down.
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
