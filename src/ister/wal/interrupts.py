"""Calls that an exception from a signal handler may end at any point.

Python runs signal handlers in the main thread, between two bytecodes. One that raises (Ctrl-C,
`signal.alarm` as a timeout) ends whatever the main thread is doing there. Two rules keep a log
whole all the same:

- The main thread does not change files. What it waits for is committed by the scheduler's threads,
  and `shielded` runs the rest, such as closing, in a thread of its own.
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
import threading
from collections.abc import Callable

from ister import threads

__all__ = ["is_held", "is_main_thread", "shielded"]


def is_held(lock: threading.RLock) -> bool:
    """Whether this thread holds the lock."""
    # As `threading.Condition` finds out.
    return bool(lock._is_owned())  # type: ignore[attr-defined]  # noqa: SLF001


def is_main_thread() -> bool:
    """Whether this is the thread that runs signal handlers."""
    return threading.get_ident() == threading.main_thread().ident


def shielded(work: Callable[[], None], name: str) -> None:
    """Runs `work` in a thread of its own and waits for its end.

    An exception from a signal handler ends the wait, not the work. `work` has to be one that can
    be called again, and then waits for what is still under way.

    Raises:
        BaseException: What `work` raised.
    """
    errors: list[BaseException] = []
    ended = threading.Lock()
    ended.acquire()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            errors.append(error)
        finally:
            ended.release()

    try:
        _thread.start_new_thread(_start, (run, name))
    except RuntimeError:  # the interpreter is ending, and starts no thread
        run()
    ended.acquire()
    if errors:
        raise errors[0]


def _start(run: Callable[[], None], name: str) -> None:
    """Starts a thread; in one of its own, as starting one must not be interrupted either."""
    # Not a daemon: a program that ends meanwhile waits for it.
    threads.start(name, run, daemon=False)
