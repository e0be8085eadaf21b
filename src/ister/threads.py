"""Background threads and tasks: an exception that nobody expected is never silent.

It is logged with its traceback, counted by the thread's name, and kept for `/health`. A loop goes
on (`guard`); a thread that ends by one is recorded as ended (`start`).

    with threads.guard("ister-lease"):   # inside of the loop, around what may be tried again
        self._renew()

Owns: how threads are started, and what went wrong in them, for the whole process. Does not own:
what becomes of those who relied on the work: whoever cannot go on without it has to refuse service.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from ister import forks
from ister.clock import SystemClock

__all__ = [
    "ThreadFailure",
    "failures",
    "forget",
    "guard",
    "record",
    "run",
    "run_to_end",
    "start",
    "watch_task",
]

_log = logging.getLogger("ister.threads")

_NAMES_MAX: Final = 64
_monotonic = SystemClock.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadFailure:
    """The unexpected exceptions of one thread."""

    thread: str
    count: int
    error: str
    """The last one, with its type."""
    at: float
    """When it was, in the machine's monotonic seconds."""
    has_ended: bool
    """Whether the thread ended by it."""

    @property
    def age_seconds(self) -> float:
        """How long ago the last one was."""
        return max(0.0, _monotonic() - self.at)


_lock = threading.Lock()
_failures: dict[str, ThreadFailure] = {}
forks.in_child(lambda: forks.renew(_lock))


def failures() -> list[ThreadFailure]:
    """What went wrong in this process so far, by thread."""
    with _lock:
        return list(_failures.values())


def forget() -> None:
    """Forgets all failures; for tests."""
    with _lock:
        _failures.clear()


def record(
    thread: str, error: BaseException, *, has_ended: bool = False, topic: str | None = None
) -> None:
    """Logs and counts an unexpected exception of a thread.

    Args:
        thread: The thread's name, or what it does where many share a pool.
        error: The exception.
        has_ended: Whether the thread ends by it.
        topic: The topic that it was about.
    """
    with _lock:
        # Names are few; were they not, the newest failures are those of interest.
        if thread not in _failures and len(_failures) >= _NAMES_MAX:
            del _failures[next(iter(_failures))]
        known = _failures.get(thread)
        found = ThreadFailure(
            thread=thread,
            count=1,
            error=f"{type(error).__name__}: {error}",
            at=_monotonic(),
            has_ended=has_ended,
        )
        if known is not None:
            found = replace(found, count=known.count + 1, has_ended=has_ended or known.has_ended)
        _failures[thread] = found
    what = "background thread ended" if has_ended else "background thread failed and goes on"
    _log.error(what, extra={"worker": thread, "error": str(error), "topic": topic}, exc_info=error)


@contextmanager
def guard(thread: str, *, topic: str | None = None) -> Iterator[None]:
    """Records an unexpected exception and goes on behind the block."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - this is the place for it
        record(thread, error, topic=topic)


def run(thread: str, work: Callable[..., object], *arguments: object) -> None:
    """Runs something under `guard`; for executors, whose futures nobody asks."""
    with guard(thread):
        work(*arguments)


def run_to_end(thread: str, work: Callable[..., object], *arguments: object) -> None:
    """Runs all that a thread does; an exception that escapes is recorded as its end."""
    try:
        work(*arguments)
    except Exception as error:  # noqa: BLE001 - there is nobody above
        record(thread, error, has_ended=True)


def start(
    name: str, work: Callable[..., object], *arguments: object, daemon: bool = True
) -> threading.Thread:
    """Starts a thread that does `work`, by `run_to_end`.

    Args:
        name: The thread's name.
        work: What it does.
        arguments: Of `work`.
        daemon: Whether the program ends without waiting for it.
    """
    thread = threading.Thread(
        target=run_to_end, args=(name, work, *arguments), name=name, daemon=daemon
    )
    thread.start()
    return thread


def watch_task(name: str, task: asyncio.Task[Any]) -> None:
    """Has an exception recorded that ends an asyncio task which nobody awaits."""

    def look(done: asyncio.Task[Any]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            record(name, error, has_ended=True)

    task.add_done_callback(look)
