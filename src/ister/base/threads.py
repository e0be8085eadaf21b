"""Starts background threads and records their unexpected exceptions.

Each exception is logged with its traceback, counted by the thread's name, and kept for `/health`. A
loop continues (`guard`); a thread that an exception ends is recorded as ended (`start`).

    with threads.guard("ister-lease"):   # in the loop, around work that can be retried
        self._renew()

Owns: starting threads, and the failures of this process's threads. Does not own: consequences;
callers that depend on a thread's work have to refuse service when it fails.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from ister.base import forks
from ister.base.clock import SystemClock
from ister.errors import InvalidRequestError

_log = logging.getLogger("ister.threads")

_NAMES_MAX: Final = 64
_monotonic = SystemClock.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadFailure:
    """The unexpected exceptions of one thread."""

    thread: str
    count: int
    error: str
    """The latest exception: type and message."""
    at: float
    """When the latest one was raised, in monotonic seconds."""
    has_ended: bool
    """Whether an exception ended the thread."""

    @property
    def age_seconds(self) -> float:
        """Seconds since the latest exception."""
        return max(0.0, _monotonic() - self.at)


_lock = threading.Lock()
_failures: dict[str, ThreadFailure] = {}
forks.call_in_child(lambda: forks.reset_locks(_lock))


def failures() -> list[ThreadFailure]:
    """The failures of this process so far, one per thread name."""
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
        thread: The thread's name; for a thread of a pool, the name of its task.
        error: The exception.
        has_ended: Whether it ends the thread.
        topic: The topic that was being processed.
    """
    with _lock:
        # There are few names. The limit keeps the newest failures should there be many.
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
    what = "background thread ended" if has_ended else "background thread failed; it continues"
    _log.error(what, extra={"worker": thread, "error": str(error), "topic": topic}, exc_info=error)


@contextmanager
def guard(thread: str, *, topic: str | None = None) -> Iterator[None]:
    """Records an unexpected exception of the block and suppresses it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - this is what the function is for
        record(thread, error, topic=topic)


def run(thread: str, work: Callable[..., object], *arguments: object) -> None:
    """Runs `work` under `guard`; for executors whose futures are not awaited."""
    with guard(thread):
        work(*arguments)


def run_to_end(thread: str, work: Callable[..., object], *arguments: object) -> None:
    """Runs a thread's whole work; records an exception as the thread's end."""
    try:
        work(*arguments)
    except Exception as error:  # noqa: BLE001 - the thread has no caller that could handle it
        record(thread, error, has_ended=True)


def have_pools_ended() -> bool:
    """Whether pools of `concurrent.futures` take no more work, as the program ends."""
    # They refuse work before they wait for their threads, and only then has the main thread ended.
    pools = sys.modules.get("concurrent.futures.thread")
    return not threading.main_thread().is_alive() or getattr(pools, "_shutdown", False)


def exit_error() -> InvalidRequestError:
    """The error for a call that needs threads while the interpreter shuts down."""
    return InvalidRequestError(
        "the interpreter is shutting down, and no thread can be started",
        hint="open it before the program ends, not in an atexit handler",
    )


def check_exit(*, needs_pool: bool = False) -> None:
    """Refuses work that needs threads if none can be started: in an `atexit` handler.

    Args:
        needs_pool: Whether it needs an executor; these end earlier, with the main thread.

    Raises:
        InvalidRequestError: The interpreter shuts down.
    """
    if not have_pools_ended() and not sys.is_finalizing():
        return
    try:
        threading.Thread(target=int).start()
        if needs_pool:
            from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - may fail, too

            with ThreadPoolExecutor(1) as pool:
                pool.submit(int)
    except RuntimeError as error:
        raise exit_error() from error


def start(
    name: str, work: Callable[..., object], *arguments: object, daemon: bool = True
) -> threading.Thread:
    """Starts a thread that runs `work`, and records an exception that ends it.

    Args:
        name: The thread's name.
        work: The function to run.
        arguments: Its arguments.
        daemon: Whether the program may exit without waiting for the thread.
    """
    thread = threading.Thread(
        target=run_to_end, args=(name, work, *arguments), name=name, daemon=daemon
    )
    thread.start()
    return thread


def watch_task(name: str, task: asyncio.Task[object]) -> None:
    """Records the exception that ends an asyncio task which is not awaited."""

    def on_done(done: asyncio.Task[object]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            record(name, error, has_ended=True)

    task.add_done_callback(on_done)
