"""A topic's local files, read by a process that does not own the topic.

    wal.ckpt ─► snapshot: files and the durable watermark ─► frames below it

Owns: one open file at a time. Does not own: the directory, its lock, anything in it; nothing is
written here. Used by Spark's drivers and executors on the machine that has the files.

Only files of the node that the topic's record names last are the topic's: a directory that another
node has replaced may hold other messages under the same offsets.

What can be read ends at the owner's last checkpoint, at most about a second behind what it has
synced. `catch_up` waits for the checkpoint to pass what the files held at a `mark`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Final

from ister.clock import Clock
from ister.errors import NotFoundError, OffsetOutOfRangeError
from ister.format.frame import FrameBatch
from ister.fs.base import FileSystem
from ister.fs.local import LocalFileSystem
from ister.limits import CHECKPOINT_INTERVAL_SECONDS, KIB
from ister.metrics import Metrics
from ister.model import TopicName
from ister.topic.tiers import NODE_NAME
from ister.wal.directory import WalDirectory
from ister.wal.reader import WalReader
from ister.wal.snapshot import WalSnapshot, load_snapshot

__all__ = ["LocalTail"]

_POLL_SECONDS: Final = 0.05
# Two checkpoints: one may be on its way with less than is there.
_CATCH_UP_SECONDS: Final = 2 * CHECKPOINT_INTERVAL_SECONDS + 0.5


class LocalTail:
    """The durable part of one topic's files. Used by one thread at a time."""

    def __init__(
        self, directory: WalDirectory, topic: str, *, clock: Clock, metrics: Metrics
    ) -> None:
        self._directory = directory
        self._topic = topic
        self._clock = clock
        self._metrics = metrics

    @classmethod
    def find(
        cls,
        wal_dir: str | None,
        name: TopicName,
        node: str,
        *,
        clock: Clock,
        metrics: Metrics,
        fs: FileSystem | None = None,
    ) -> LocalTail | None:
        """The topic's files on this machine; None if they are not here.

        Args:
            wal_dir: The setting `storage.wal.dir`.
            name: The topic.
            node: Whose files are the topic's: the last one that its record names.
            clock: Where time comes from.
            metrics: What was read is counted there.
            fs: Where files live; the machine's own file system by default.
        """
        if wal_dir is None or not node:
            return None
        fs = fs if fs is not None else LocalFileSystem()
        root = os.path.abspath(wal_dir)
        if _read_node(fs, root) != node:
            return None
        path = f"{root}/{name.namespace}/{name.topic}"
        if not fs.exists(path):
            return None
        return cls(WalDirectory(fs, path), str(name), clock=clock, metrics=metrics)

    def snapshot(self) -> WalSnapshot | None:
        """What the owner's checkpoint says now; None before the first one."""
        try:
            return load_snapshot(self._directory, self._topic)
        except NotFoundError:
            return None

    def mark(self) -> tuple[int, int] | None:
        """How much the files hold now, whether durable or not, for `catch_up`."""
        snapshot = self.snapshot()
        return None if snapshot is None else snapshot.end_of_files()

    def catch_up(self, mark: tuple[int, int] | None) -> WalSnapshot | None:
        """The snapshot once it covers what the files held at `mark`, or when that takes too long.

        For those who have just been told that a message is synced. After the owner's death the
        rest stays out of sight until the topic is opened again: only then it is known to stay.
        """
        deadline = self._clock.monotonic() + _CATCH_UP_SECONDS
        pause = threading.Event()
        while True:
            snapshot = self.snapshot()
            if snapshot is None or mark is None or snapshot.covers(mark):
                return snapshot
            if self._clock.monotonic() >= deadline:
                return snapshot
            pause.wait(_POLL_SECONDS)

    def frames(self, start: int, end: int, *, chunk_bytes: int) -> Iterator[FrameBatch]:
        """The frames of a range, in order, as far as the files have them.

        Ends early where the files were trimmed, or end: the caller looks elsewhere from there on.

        Raises:
            CorruptDataError: A frame is damaged.
            DiskError: A file cannot be read.
        """
        while start < end:
            snapshot = self.snapshot()
            if snapshot is None or not snapshot.trimmed <= start < snapshot.synced:
                return
            reader = self._reader(snapshot, chunk_bytes)
            limit = min(end, snapshot.synced)
            try:
                while start < limit:
                    frames = reader.fetch(start, limit, bytes_max=chunk_bytes)
                    yield frames
                    start = frames.next_offset
            except (NotFoundError, OffsetOutOfRangeError):
                # Trimmed after the snapshot was taken: a newer one knows.
                newer = self.snapshot()
                if newer is not None and newer.trimmed <= start:
                    raise
                return
            finally:
                reader.close()

    def find_time(self, publish_time_ms: int, start: int, end: int) -> int | None:
        """The first offset in a range whose message was published at or after the time.

        Raises:
            OffsetOutOfRangeError: The beginning of the range was trimmed: the bucket has it.
        """
        snapshot = self.snapshot()
        if snapshot is None:
            return None
        if start < min(end, snapshot.trimmed):
            raise OffsetOutOfRangeError(
                "the offset is no longer in local files",
                topic=self._topic,
                offset=start,
                earliest=snapshot.trimmed,
                next=snapshot.synced,
            )
        reader = self._reader(snapshot, 64 * KIB)
        try:
            return reader.find_time(
                publish_time_ms,
                snapshot.settings.codec,
                start=start,
                end=min(end, snapshot.synced),
            )
        finally:
            reader.close()

    def _reader(self, snapshot: WalSnapshot, chunk_bytes: int) -> WalReader:
        return WalReader(
            snapshot, chunk_bytes=chunk_bytes, metrics=self._metrics, clock=self._clock
        )


def _read_node(fs: FileSystem, root: str) -> str | None:
    """Which node's files these are; None if there are none."""
    try:
        file = fs.open_read(f"{root}/{NODE_NAME}")
    except NotFoundError:
        return None
    try:
        return file.read_at(0, KIB).decode("ascii", errors="replace").strip()
    finally:
        file.close()
