"""Waiting for a condition, never for a time: the limit only ends a test that hangs.

Tests may be coroutines (`run_test`).
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Any, TypeVar

PATIENCE_SECONDS = 180.0
TEST_SECONDS = 500.0
"""How long a test that is a coroutine may take, on a machine that is busy with other things."""
TEST_TASK = "test"
"""The name of the tasks that are the test itself."""

T = TypeVar("T")


def run(scenario: Coroutine[Any, Any, T], *, within: float = 120.0) -> T:
    """Runs a scenario on a loop of its own; one that hangs fails, and shows where."""

    async def guarded() -> T:
        asyncio.current_task().set_name(TEST_TASK)  # type: ignore[union-attr]
        task = asyncio.ensure_future(scenario)
        task.set_name(TEST_TASK)
        if not (await asyncio.wait({task}, timeout=within))[0]:
            for other in asyncio.all_tasks():
                with suppress(TypeError):  # a frame of grpcio's has no line
                    other.print_stack()
            task.cancel()
            await asyncio.wait({task}, timeout=PATIENCE_SECONDS)
            raise AssertionError(f"not done after {within} s: see the stacks above")
        return task.result()

    return asyncio.run(guarded())


def run_test(test: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Calls a test; one that is a coroutine gets a loop of its own.

    Arguments that are asynchronous context managers are entered on that loop, and left on it.
    """
    if not inspect.iscoroutinefunction(test):
        test(**arguments)
        return

    async def call() -> None:
        async with AsyncExitStack() as stack:
            entered = {
                name: await stack.enter_async_context(value)
                if isinstance(value, AbstractAsyncContextManager)
                else value
                for name, value in arguments.items()
            }
            await test(**entered)

    # The limit of pytest is longer, and does not show where a coroutine hangs.
    run(call(), within=TEST_SECONDS)


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
