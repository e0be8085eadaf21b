"""SIGINT and SIGTERM: they stop a job that runs until it is stopped, and wait for a JVM's start."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_on_signals(stop: threading.Event | None) -> Iterator[threading.Event]:
    """Yields an event that the first SIGINT or SIGTERM sets; a second one acts as before.

    Signals are left alone if this is not called on the main thread.
    """
    stopping = stop if stop is not None else threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def end(number: int, frame: object) -> None:
        signal.signal(number, before[signal.Signals(number)] or signal.SIG_DFL)
        stopping.set()

    for number in before:
        signal.signal(number, end)
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Delivers a SIGINT or SIGTERM that comes meanwhile at the end.

    Signals are left alone if this is not called on the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: held.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if held:
            signal.raise_signal(held[0])
