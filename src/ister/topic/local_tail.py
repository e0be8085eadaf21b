"""A topic's local files, read by a process that does not own the topic.

    wal.ckpt ─► snapshot: files and the durable watermark ─► frames below it

Owns: one open file at a time. Does not own: the directory, its lock, anything in it; nothing is
written here. Used by Spark's drivers and executors on the machine that has the files.

Only files of the node that the topic's record names last are the topic's, and only those of its
incarnation: others may hold other messages under the same offsets.

What can be read ends at the owner's last checkpoint, at most about a second behind what it has
synced. `catch_up` waits for the checkpoint to pass what the files held at a `mark`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from typing import Final

from ister.base.clock import Clock
from ister.base.limits import CHECKPOINT_INTERVAL_SECONDS, KIB
from ister.base.metrics import Metrics
from ister.base.model import TopicName
from ister.errors import (
    CorruptDataError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
)
from ister.format.frame import FrameBatch
from ister.format.records import TopicRecord
from ister.fs.base import FileSystem
from ister.fs.local import LocalFileSystem
from ister.topic.node import read_node_id
from ister.wal.directory import WalDirectory
from ister.wal.reader import WalReader
from ister.wal.snapshot import WalSnapshot, load_snapshot

__all__ = ["LocalTail", "WalSnapshot"]

_log = logging.getLogger("ister.topic.local_tail")

_POLL_SECONDS: Final = 0.05
# Two checkpoints: one may be on its way with less than is there.
_CATCH_UP_SECONDS: Final = 2 * CHECKPOINT_INTERVAL_SECONDS + 0.5


class LocalTail:
    """The durable part of one topic's files. Used by one thread at a time."""

    def __init__(
        self,
        directory: WalDirectory,
        topic: str,
        incarnation: str,
        *,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._directory = directory
        self._topic = topic
        self._incarnation = incarnation
        self._clock = clock
        self._metrics = metrics

    @classmethod
    def find(
        cls,
        wal_dir: str | None,
        name: TopicName,
        node: str,
        incarnation: str,
        *,
        clock: Clock,
        metrics: Metrics,
        fs: FileSystem | None = None,
    ) -> LocalTail | None:
        """The topic's files on this machine; None if they are not here.

        `node`: whose files are the topic's: the last one that its record names.
        `fs`: where files live; the machine's own file system by default.
        """
        if wal_dir is None or not node:
            return None
        fs = fs if fs is not None else LocalFileSystem()
        root = os.path.abspath(wal_dir)
        path = f"{root}/{name.namespace}/{name.topic}"
        try:
            if read_node_id(fs, root) != node or not fs.exists(path):
                return None
            fs.list_directory(path)
        except IsterError as error:
            # Without permission to read them: another process may serve them.
            _log.warning("local files skipped", extra={"path": path, "error": str(error)})
            return None
        return cls(WalDirectory(fs, path), str(name), incarnation, clock=clock, metrics=metrics)

    def snapshot(self) -> WalSnapshot | None:
        """What the owner's checkpoint says now; None before the first one.

        None, too, if these are the files of another topic of the same name.

        Raises:
            UnavailableError: There are files, and no checkpoint that could be read.
        """
        try:
            snapshot = load_snapshot(self._directory, self._topic)
            if snapshot is None and self._directory.log_seqs():
                raise UnavailableError(
                    "the checkpoint of the topic's local files cannot be read, so it is not known "
                    "what in them is durable",
                    topic=self._topic,
                    path=self._directory.checkpoint_path,
                    hint="opening the topic where it is written makes a new one",
                )
        except NotFoundError:
            return None  # deleted, or handed over
        if snapshot is not None and snapshot.incarnation not in ("", self._incarnation):
            return None
        return snapshot

    def mark(self) -> tuple[int, int] | None:
        """How much the files hold now, whether durable or not, for `catch_up`."""
        snapshot = self.snapshot()
        return None if snapshot is None else snapshot.end_of_files()

    def catch_up(
        self, mark: tuple[int, int] | None, *, since: float | None = None
    ) -> WalSnapshot | None:
        """The snapshot once it covers what the files held at `mark`, or when that takes too long.

        For callers that know of synced messages which the checkpoint does not cover yet. After the
        owner was killed, those stay invisible until the topic is opened again. `since` is when the
        waiting began, by the monotonic clock, if it was before this call.
        """
        began = self._clock.monotonic() if since is None else since
        deadline = began + _CATCH_UP_SECONDS
        pause = threading.Event()
        while True:
            snapshot = self.snapshot()
            if snapshot is None or mark is None or snapshot.covers(mark):
                return snapshot
            if self._clock.monotonic() >= deadline:
                _log.warning(
                    "the owner of the topic has written more than it says is durable; that is "
                    "seen when it is, or when the topic is opened again",
                    extra={"topic": self._topic, "synced": snapshot.synced},
                )
                return snapshot
            pause.wait(_POLL_SECONDS)

    def frames(self, start: int, end: int, *, chunk_bytes: int) -> Iterator[FrameBatch]:
        """The frames of a range, in order, as far as the files have them.

        Ends early where the files were trimmed, or end: the caller looks elsewhere from there on.
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
                    if self.snapshot() is None:
                        return  # another topic has taken its name, and perhaps its files' names
                    yield frames
                    start = frames.next_offset
            except CorruptDataError:
                if self.snapshot() is None:
                    return  # the files are another topic's by now
                raise
            except (NotFoundError, OffsetOutOfRangeError):
                # Trimmed after the snapshot was taken: a newer one knows.
                newer = self.snapshot()
                if newer is not None and newer.trimmed <= start:
                    raise
                return
            finally:
                reader.close()

    def source(self, *, chunk_bytes: int) -> tuple[WalReader, WalSnapshot] | None:
        """The files as an upload reads them, and what they hold; None if they are not here.

        To be closed. A file may be trimmed meanwhile, but not one whose messages are not tiered.
        """
        snapshot = self.snapshot()
        return None if snapshot is None else (self._reader(snapshot, chunk_bytes), snapshot)

    def sync_term(self, record: TopicRecord) -> bool:
        """Whether the checkpoint is of the owner that `record` names; durable on return."""
        directory, own = self._directory, (record.incarnation, record.epoch, record.claim)
        try:
            state = directory.load_state()
            if state is None or (state.incarnation, state.epoch, state.claim) != own:
                return False
            file = directory.fs.open_read(directory.checkpoint_path)
            try:
                file.sync()
            finally:
                file.close()
            directory.fs.sync_directory(directory.path)
        except NotFoundError:
            return False  # deleted, or handed over
        return True

    def find_time(self, publish_time_ms: int, start: int, end: int) -> int | None:
        """The first offset in a range whose message was published at or after the time.

        Raises:
            OffsetOutOfRangeError: The beginning of the range was trimmed: the bucket has it.
        """
        snapshot = self.snapshot()
        if snapshot is None:
            return None
        if start < min(end, snapshot.trimmed):
            raise self._trimmed(start, snapshot)
        reader = self._reader(snapshot, 64 * KIB)
        try:
            found = reader.find_time(
                publish_time_ms, snapshot.settings.codec, start=start, end=min(end, snapshot.synced)
            )
            # Unless another topic has taken the name meanwhile.
            return None if self.snapshot() is None else found
        except NotFoundError as error:
            raise self._trimmed(start, snapshot) from error
        finally:
            reader.close()

    def _trimmed(self, start: int, snapshot: WalSnapshot) -> OffsetOutOfRangeError:
        return OffsetOutOfRangeError(
            "the offset is no longer in local files",
            topic=self._topic,
            offset=start,
            earliest=snapshot.trimmed,
            next=snapshot.synced,
        )

    def _reader(self, snapshot: WalSnapshot, chunk_bytes: int) -> WalReader:
        return WalReader(
            snapshot, chunk_bytes=chunk_bytes, metrics=self._metrics, clock=self._clock
        )
