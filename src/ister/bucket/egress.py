"""Limits the upload rate of a process with one token bucket.

Owns: when bytes may be sent. Does not own: the bytes, or who sends them.

Bytes are granted in slices, in the order of the requests. So parallel uploads share the rate, and a
small upload waits for slices of the others, not for their whole objects. No lock is held while
waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from ister.base.clock import Clock

_SLICE_SECONDS: Final = 0.25
_LOOK_SECONDS: Final = 0.1
"""How often a waiting upload checks whether it should stop."""


class EgressLimit:
    """A token bucket for bytes. Thread-safe."""

    def __init__(
        self,
        bytes_per_second: float,
        *,
        clock: Clock,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        """A limit on the total rate."""
        self.bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = threading.Event().wait if sleep is None else sleep
        self._lock = threading.Lock()
        # When the rate allows the next byte.
        self._free_at = clock.monotonic()

    def take(self, size_bytes: int, is_stopping: Callable[[], bool] = lambda: False) -> bool:
        """Waits until this many bytes may be sent.

        Returns False if `is_stopping` returned True meanwhile.
        """
        slice_bytes = max(1, int(self.bytes_per_second * _SLICE_SECONDS))
        while size_bytes > 0:
            count = min(size_bytes, slice_bytes)
            size_bytes -= count
            if not self._take_slice(count, is_stopping):
                return False
        return True

    def _take_slice(self, size_bytes: int, is_stopping: Callable[[], bool]) -> bool:
        with self._lock:
            due_at = max(self._free_at, self._clock.monotonic())
            self._free_at = due_at + size_bytes / self.bytes_per_second
        while (remaining := due_at - self._clock.monotonic()) > 0:
            if is_stopping():
                return False
            self._sleep(min(remaining, _LOOK_SECONDS))
        return not is_stopping()
