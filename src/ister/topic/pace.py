"""Slows uploads down while a producer in the same process is busy.

Uploading takes CPU time, the interpreter lock and memory bandwidth from producers in the same
process. While those append at least half as many bytes as are uploaded, each chunk is followed by a
pause of twice the time that it took. So uploads keep at least a third of their speed. They do not
pause once producers slow down, a caller waits for `tiered`, or `may_pause` returns False because of
a large lag.

Owns: how long to pause. Does not own: what is read (`ister.wal.reader`), how far uploads lag
behind (`tier`). Keeps nothing on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.format.frame import FrameBatch
from ister.wal.log import Wal
from ister.wal.reader import WalReader

_PAUSE_FACTOR: Final = 2.0
# The longest pause, however slow the store is.
_PAUSE_SECONDS_MAX: Final = 1.0


class PacedReader(WalReader):
    """Reads a log for its upload. Used by one thread at a time."""

    def __init__(
        self,
        wal: Wal,
        *,
        chunk_bytes: int,
        metrics: Metrics,
        clock: Clock,
        may_pause: Callable[[], bool],
        sleep: Callable[[float], object],
    ) -> None:
        """Reads a log.

        `may_pause`: returns whether this upload may be slowed down.
        `sleep`: waits for that many seconds, or until the upload has to end.
        """
        super().__init__(wal, chunk_bytes=chunk_bytes, metrics=metrics, clock=clock)
        self._buffer = wal.buffer
        self._now = clock.monotonic
        self._may_pause = may_pause
        self._sleep = sleep
        # When the last chunk was begun, how large it was, and how much had been appended.
        self._begun: tuple[float, int, int] | None = None

    def fetch(
        self,
        start: int,
        end: int,
        *,
        bytes_max: int,
        span: Callable[[int, int], int | None] | None = None,
    ) -> FrameBatch:
        """Returns checked frames from `start` on; first pauses if a producer is busy."""
        if self._begun is not None:
            began, size, appended = self._begun
            is_busy = self._buffer.appended_bytes - appended >= size // 2
            if is_busy and self._may_pause():
                pause = _PAUSE_FACTOR * (self._now() - began)
                self._sleep(min(pause, _PAUSE_SECONDS_MAX))
        began, appended = self._now(), self._buffer.appended_bytes
        batch = super().fetch(start, end, bytes_max=bytes_max, span=span)
        self._begun = (began, batch.end - batch.starts[0], appended)
        return batch
