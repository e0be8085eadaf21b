"""Room for a log's files: on its disks (`disk`) and in memory (`memory_guard`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ister.base.metrics import Metrics
from ister.config import StorageConfig
from ister.fs.base import FileSystem
from ister.fs.memory import MemoryFileSystem
from ister.topic.disk import DiskGuard
from ister.topic.memory_guard import MemoryGuard

if TYPE_CHECKING:
    from ister.topic.topic import Topic


class SpaceGuards:
    """Watches the disks and the memory of one log. Thread-safe."""

    def __init__(
        self,
        storage: StorageConfig,
        *,
        fs: FileSystem,
        root: str | None,
        topics: Callable[[], list[Topic]],
        retire: Callable[[Topic], bool],
        metrics: Metrics,
    ) -> None:
        """Takes the arguments of the two guards; `root` is None for a log without files."""
        self.disk: DiskGuard | None = None
        """Watches free disk space; None for a log without files."""
        self.memory: MemoryGuard | None = None
        """Bounds files in memory; None for a log whose files are on a disk."""
        if root is not None:
            self.disk = DiskGuard(storage, fs=fs, root=root, topics=topics, metrics=metrics)
        if isinstance(fs, MemoryFileSystem):
            self.memory = MemoryGuard(
                fs,
                limit_bytes=storage.bucket.memory_max_bytes,
                topics=topics,
                retire=retire,
                metrics=metrics,
            )

    @property
    def _guards(self) -> list[DiskGuard | MemoryGuard]:
        return [guard for guard in (self.disk, self.memory) if guard is not None]

    def is_pressed(self) -> bool:
        """Whether uploads should start now, to make room."""
        return (self.disk is not None and self.disk.is_low()) or (
            self.memory is not None and self.memory.is_pressed()
        )

    def free_reserve(self) -> bool:
        """Frees the reserve of the log's disk; returns whether there was one."""
        return self.disk is not None and self.disk.free_reserve()

    def may_write(self) -> bool:
        """Whether a write that failed on a full disk may be retried."""
        return self.disk is None or self.disk.may_write()

    def add(self, topic: Topic) -> None:
        """Includes a topic that was opened."""
        for guard in self._guards:
            guard.add(topic)

    def start(self) -> None:
        """Starts the threads."""
        for guard in self._guards:
            guard.start()

    def stop(self) -> None:
        """Stops the threads. May be called more than once."""
        for guard in self._guards:
            guard.stop()
