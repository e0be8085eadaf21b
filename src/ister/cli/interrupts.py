"""SIGINT and SIGTERM for commands that go on until somebody stops them.

The first one is noted, and whoever waits is woken: nothing is broken off in the middle. The second
one ends the command as Python does by itself.

Invariant: whoever waits for `fd` is woken by a signal whichever thread the system gives it to, and
also by one that comes just before the main thread begins to wait: the byte is written by the signal
handler that Python has in C, not by `_note`, which runs once the main thread is awake.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Final, Self

__all__ = ["Interrupts"]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Whether the command is to stop. A context manager, for the main thread."""

    def __init__(self) -> None:
        self.is_set = False
        self._is_breaking = False
        self._before: dict[int, Any] = {}
        self._read_end = self._write_end = self._woken_before = -1

    def __enter__(self) -> Self:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        # Elsewhere signals cannot be had, and are for the main thread to see to.
        if threading.current_thread() is threading.main_thread():
            self._woken_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            signal.set_wakeup_fd(self._woken_before)
        os.close(self._read_end)
        os.close(self._write_end)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_set or self._is_breaking:
            raise KeyboardInterrupt
        self.stop()

    def stop(self) -> None:
        """Has the command stop; may be called by any thread."""
        self.is_set = True
        with suppress(BlockingIOError):  # it says so already
            os.write(self._write_end, b"!")

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """While nothing is lost by it, the first signal ends the command as the second one does.

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
        """Waits for so long, or until the command is to stop; whether it is."""
        if not self.is_set and seconds > 0:
            select.select([self._read_end], [], [], seconds)
        return self.is_set

    @property
    def fd(self) -> int:
        """A file that can be read from once the command is to stop; for those who wait for more."""
        return self._read_end

    def reading(self, fd: int) -> Callable[[int], bytes]:
        """Reads from a file that may have nothing to give for long; nothing once it is to stop."""

        def read(size: int) -> bytes:
            if not self.is_set:
                select.select([fd, self._read_end], [], [])
            return b"" if self.is_set else os.read(fd, size)

        return read
