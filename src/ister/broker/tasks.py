"""Runs work to its end, also if its caller gives up.

A client that cancels a call, or whose deadline passes, cancels the task that serves it, wherever it
waits; a thread that the task waits for keeps running. Work that changes a store and what is
in memory must not be left in the middle like that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Final, TypeVar

_log = logging.getLogger("ister.broker.topics.tasks")

# The loop itself keeps weak references alone.
_running: Final[set[asyncio.Task[object]]] = set()

Answer = TypeVar("Answer")


async def run_to_completion(work: Coroutine[object, None, Answer]) -> Answer:
    """Awaits work that continues if this call is cancelled; its errors are logged then."""
    task = asyncio.ensure_future(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_log_failure)
        raise


async def finish(timeout: float) -> None:
    """Waits for all such work of this loop, but not longer than that."""
    loop = asyncio.get_running_loop()
    if running := [task for task in _running if task.get_loop() is loop]:
        await asyncio.wait(running, timeout=timeout)


def _log_failure(task: asyncio.Task[Answer]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("a call that its client gave up has failed", extra={"error": str(error)})
