"""Calls that an exception from a signal handler may end at any point.

Python runs signal handlers in the main thread, between two bytecodes. One that raises (Ctrl-C,
`signal.alarm` as a timeout) ends whatever the main thread is doing there. Two rules keep a log
whole all the same:

- The main thread changes neither files nor metadata. What it waits for is committed by the
  scheduler's threads, and `shielded` runs the rest, such as opening, rotating, uploading and
  closing, in a thread of its own.
- What the main thread does change, under a log's lock, has one commit point. A call that ends with
  an exception releases the lock, and then repairs what lies around that point. The lock is an
  `RLock`, because releasing that one tells whether this thread had it; a plain one cannot tell an
  acquire that was interrupted from one that was interrupted a moment later.

A handler may raise again at once. The release comes first, with no bytecode before it at which
CPython runs handlers. `AppendBuffer.is_changing` stays set until the repair is done: should it be
interrupted too, whoever takes the lock next does it (`Wal.mend`).
"""

from __future__ import annotations

import _thread
import contextvars
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from ister import forks, threads

__all__ = ["is_held", "is_main_thread", "make_shielded", "shielded"]

_T = TypeVar("_T")

# Held while `make_shielded` makes or unmakes something.
_making = threading.Lock()
# Unmakes what an interrupted caller never got.
_left: Final[list[Callable[[], None]]] = []
forks.call_in_child(lambda: forks.reset_locks(_making))
forks.call_in_child(_left.clear)


def is_held(lock: threading.RLock) -> bool:
    """Whether this thread holds the lock."""
    # As `threading.Condition` finds out.
    return bool(lock._is_owned())  # type: ignore[attr-defined]  # noqa: SLF001


def is_main_thread() -> bool:
    """Whether this is the thread that runs signal handlers."""
    return threading.get_ident() == threading.main_thread().ident


def shielded(work: Callable[[], _T], name: str) -> _T:
    """Runs `work` in a thread of its own and waits for its end.

    An exception from a signal handler ends the wait, not the work. `work` has to be one that can
    be called again, and then waits for what is still under way.

    Args:
        work: What to do.
        name: The thread's name.

    Returns:
        What `work` returned.

    Raises:
        BaseException: What `work` raised.
    """
    results: list[_T] = []
    errors: list[BaseException] = []
    ended = threading.Lock()
    ended.acquire()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            errors.append(error)
        finally:
            ended.release()

    try:
        # With the caller's context, which has its span.
        _thread.start_new_thread(_start, (contextvars.copy_context().run, run, name))
    except RuntimeError:  # the interpreter is ending, and starts no thread
        run()
    ended.acquire()
    if errors:
        raise errors[0]
    return results[0]


def make_shielded(make: Callable[[], _T], unmake: Callable[[_T], None], name: str) -> _T:
    """Makes something in a thread of its own, and waits for it.

    What a caller never gets, because an exception from a signal handler ended its wait, is unmade
    in another thread; the next call waits for that.

    Args:
        make: Makes it.
        unmake: Ends it, and raises nothing.
        name: The thread's name.

    Returns:
        What `make` returned.

    Raises:
        BaseException: What `make` raised.
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
            except BaseException as error:  # noqa: BLE001 - whoever waits gets it
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
        # First: should a second one come right behind it, the next call unmakes it.
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
    """Starts a thread; in one of its own, as starting one must not be interrupted either."""
    # Not a daemon: a program that ends meanwhile waits for it.
    threads.start(name, run, work, daemon=False)
