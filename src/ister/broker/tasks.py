"""Work that is carried to its end although its caller has given up.

A client that cancels a call, or whose deadline passes, cancels the task that serves it, wherever it
waits; a thread that the task waits for goes on all the same. Work that changes a store and what is
in memory must not be left in the middle like that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

__all__ = ["finish", "to_the_end"]

_log = logging.getLogger("ister.broker.tasks")

# The loop itself keeps weak references alone.
_running: Final[set[asyncio.Task[Any]]] = set()

Answer = TypeVar("Answer")


async def to_the_end(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Awaits work that goes on if this is cancelled; what it raises then is logged."""
    task = asyncio.ensure_future(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_note)
        raise


async def finish(timeout: float) -> None:
    """Waits for all such work of this loop, but not longer than that."""
    loop = asyncio.get_running_loop()
    if running := [task for task in _running if task.get_loop() is loop]:
        await asyncio.wait(running, timeout=timeout)


def _note(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("a call that its client gave up has failed", extra={"error": str(error)})
