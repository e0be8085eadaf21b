"""Waiting for a condition, never for a time: the limit only ends a test that hangs."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

PATIENCE_SECONDS = 180.0


def eventually(
    condition: Callable[[], Any],
    what: object = "",
    *,
    within: float = PATIENCE_SECONDS,
    every: float = 0.01,
) -> Any:
    """Waits until `condition()` is true, and returns its value.

    `what` is what a failure says; if it is callable, it is called when the wait fails.
    """
    deadline = time.monotonic() + within
    while not (found := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(_failure(condition, what, within))
        time.sleep(every)
    return found


async def eventually_async(
    condition: Callable[[], Any | Awaitable[Any]],
    what: object = "",
    *,
    within: float = PATIENCE_SECONDS,
    every: float = 0.01,
) -> Any:
    """Like `eventually`, on an event loop; the condition may be awaitable."""
    deadline = time.monotonic() + within
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        if time.monotonic() >= deadline:
            raise AssertionError(_failure(condition, what, within))
        await asyncio.sleep(every)


def _failure(condition: object, what: object, within: float) -> str:
    return f"not true within {within:g} s: {what() if callable(what) else what or condition}"
