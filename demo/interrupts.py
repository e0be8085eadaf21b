"""Runs asynchronous work that a signal ends in order.

`asyncio.run` sees to SIGINT alone, and only while its loop runs. A handler that raises at whatever
point the program has come to leaves loops half made and coroutines unawaited. Here a signal is
noted while there is no loop, and cancels the work while there is one.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_until_signal(work: Callable[[], Coroutine[None, None, None]]) -> None:
    """As `asyncio.run(work())`.

    Raises:
        KeyboardInterrupt: One of `SIGNALS` has come; the work was cancelled, and has ended.
    """
    if threading.current_thread() is not threading.main_thread():
        asyncio.run(work())  # signals are the main thread's
        return
    is_stopped = False

    def note(_number: int, _frame: object) -> None:
        nonlocal is_stopped
        is_stopped = True

    async def guarded() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def end() -> None:
            nonlocal is_stopped
            is_stopped = True
            if task is not None:
                task.cancel()

        for number in SIGNALS:
            loop.add_signal_handler(number, end)
        try:
            if not is_stopped:
                await work()
        except asyncio.CancelledError:
            if not is_stopped:
                raise
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, note)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        asyncio.run(guarded())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if is_stopped:
        raise KeyboardInterrupt
