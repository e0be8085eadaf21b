"""A log without local files: all of its messages are in the bucket, and nothing is appended.

For a topic whose newest messages are on another node's disk. Its watermarks are one offset, the end
of what the bucket has; readers wait for that to rise. A crash leaves nothing: it holds nothing.
"""

from __future__ import annotations

from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import AckLevel
from ister.wal.log import Wal
from ister.wal.recovery import Recovered
from ister.wal.settings import WalSettings
from ister.wal.state import LogScheduler


class ReadOnlyLog(Wal):
    """A log that ends where the bucket does; see the module header. Thread-safe."""

    def __init__(
        self,
        *,
        end: int,
        settings: WalSettings,
        schedule: LogScheduler,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        super().__init__(
            directory=None,
            recovered=Recovered(next_offset=end),
            settings=settings,
            schedule=schedule,
            clock=clock,
            metrics=metrics,
        )
        self.written = self.synced = self.tiered = end

    @property
    def is_volatile(self) -> bool:
        """Always False: messages are in the bucket."""
        return False

    @property
    def visible(self) -> int:
        """The end of what the bucket has."""
        return self.tiered or 0

    @property
    def visible_level(self) -> AckLevel:
        """Always `tiered`, whatever the topic's level is."""
        return AckLevel.TIERED

    def advance(self, end: int) -> None:
        """Raises all watermarks, because the bucket has more, and wakes readers."""
        with self.lock:
            if end <= self.synced:
                return
            self.buffer.skip_to(end)
            self.written = self.synced = end
        self.advance_tiered(end)
