"""SIGINT and SIGTERM for commands that run until they are stopped.

The first signal sets a flag and wakes the waiting thread, so that nothing is interrupted in the
middle. The second one ends the command as Python does by default.

Invariant: a thread that waits for `fd` is woken whichever thread receives the signal, also if it
arrives just before the main thread begins to wait: the byte is written by Python's signal handler
in C, not by `_on_signal`, which runs once the main thread is awake.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final, Self, TypeAlias

SignalHandler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
"""What `signal.signal` takes and returns."""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Records that the command has to stop. A context manager, for the main thread."""

    def __init__(self) -> None:
        self.is_set = False
        self._is_breaking = False
        self._before: dict[int, SignalHandler] = {}
        self._read_end = self._write_end = self._woken_before = -1

    def __enter__(self) -> Self:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        # Only the main thread can set signal handlers.
        if threading.current_thread() is threading.main_thread():
            self._woken_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            signal.set_wakeup_fd(self._woken_before)
        os.close(self._read_end)
        os.close(self._write_end)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_set or self._is_breaking:
            raise KeyboardInterrupt
        self.stop()

    def stop(self) -> None:
        """Makes the command stop. Thread-safe."""
        self.is_set = True
        with suppress(BlockingIOError):  # the pipe is readable already
            os.write(self._write_end, b"!")

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """Makes the first signal end the command at once, for work that can be interrupted.

        Raises:
            KeyboardInterrupt: There was one before, or there is one now.
        """
        self._is_breaking = True
        try:
            if self.is_set:
                raise KeyboardInterrupt
            yield
        finally:
            self._is_breaking = False

    def wait(self, seconds: float) -> bool:
        """Waits for this long, or until the command has to stop; returns whether it has to."""
        if not self.is_set and seconds > 0:
            select.select([self._read_end], [], [], seconds)
        return self.is_set

    @property
    def fd(self) -> int:
        """A file descriptor that becomes readable when the command has to stop."""
        return self._read_end

    def reading(self, fd: int) -> Callable[[int], bytes]:
        """A function that reads from a file until the command has to stop, then returns nothing."""

        def read(size: int) -> bytes:
            if not self.is_set:
                select.select([fd, self._read_end], [], [])
            return b"" if self.is_set else os.read(fd, size)

        return read
