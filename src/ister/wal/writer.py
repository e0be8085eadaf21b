"""The one writer of a topic's files: where the next frame goes, rotation, sync.

Owns: the active file's handle and position, its index, the list of files, when offsets were
written. Does not own: the append buffer, watermarks, waiters and threads, all of which are
`ister.wal.log`'s. Callers hold that log's commit lock.

Commit points:

- `write` returns: the frames are in the page cache (they survive kill -9);
- `sync` returns: they are durable. It is the only place where data becomes so;
- rotation: the old file is synced, then the new one is made and its name synced, then frames go
  there. A crash in between leaves an empty last file, or one with a torn first frame, which
  recovery fills from its beginning.

Errors: `CapacityError` from `write` changes nothing that matters (the same frames are written
again at the same position later). Any error from `sync` is final for the file: `SyncFailedError`.
A rotation that cannot make its new file leaves the old one in use and is tried again later.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

from ister.base import failpoints
from ister.base.clock import Clock
from ister.base.limits import INDEX_ENTRIES_MAX, STALL_RETRY_SECONDS
from ister.base.metrics import Metrics
from ister.errors import CapacityError, DiskError, IsterError, check
from ister.fs.base import File
from ister.wal.buffer import Chunk
from ister.wal.directory import WalDirectory, format_log_name
from ister.wal.index import SparseIndex
from ister.wal.recovery import Recovered, WalFile
from ister.wal.settings import WalSettings

_log = logging.getLogger("ister.wal.writer")

_MARKS_MAX: Final = 4096
_STRIDE_MS: Final = 1000


class SyncFailedError(DiskError):
    """A sync failed. The file's unsynced bytes are lost or will be; nothing may retry it."""


class WalWriter:
    """See the module header. Not thread-safe."""

    def __init__(
        self,
        directory: WalDirectory,
        recovered: Recovered,
        settings: WalSettings,
        *,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.directory = directory
        self.files: tuple[WalFile, ...] = recovered.files
        """Ascending; the last one is the active file. Replaced whole, so readers may hold one."""
        self.position = recovered.end_position
        """Where in the active file the next frame goes."""
        self.synced_position = recovered.end_position
        self.index = recovered.index
        """The active file's."""
        self.arrivals = Arrivals()
        state = recovered.state
        self.last_rotation_at: int | None = (
            state.checkpoint.last_rotation_at if state is not None else None
        )
        """Seconds since the Unix epoch."""
        self.is_open = False
        """Whether the active file's handle is open."""
        self._seq = recovered.active_seq
        self._time_max = recovered.publish_time_max
        self._rotate_max_bytes = settings.rotate_max_bytes
        self._rotate_max_seconds = settings.rotate_max_seconds
        self._routine_level = settings.routine_level
        self._clock = clock
        self._metrics = metrics
        self._file: File | None = None
        # Of files that are no longer written to.
        self._sizes: dict[int, int] = {}
        self._file_since = clock.monotonic()
        self._rotation_retry_at = 0.0
        # Once a sync has failed, a later one would succeed without having stored anything.
        self._sync_failure: SyncFailedError | None = None

    @property
    def seq(self) -> int:
        """The active file's number."""
        return self._seq

    @property
    def has_failed_sync(self) -> bool:
        """Whether a sync has failed; none is tried after that."""
        return self._sync_failure is not None

    @property
    def unsynced_bytes(self) -> int:
        """How much of the active file has been written and not synced."""
        return self.position - self.synced_position

    @property
    def file_bytes(self) -> int:
        """The size of all files together. Thread-safe."""
        seq, position, known = self._seq, self.position, self._sizes
        sizes = {
            file.seq: known.get(file.seq) or self._size_of(file.seq)
            for file in self.files
            if file.seq != seq
        }
        self._sizes = sizes
        return sum(sizes.values()) + position

    def _size_of(self, seq: int) -> int:
        try:
            return self.directory.log_size(seq)
        except IsterError:
            return 0  # trimmed meanwhile; or the disk cannot tell now

    def write(self, chunks: Sequence[Chunk]) -> None:
        """Appends the frames of `chunks`, which follow each other, with one write.

        Raises:
            CapacityError: No room; nothing has changed, and the same call may be made again.
            DiskError: The write failed in another way.
        """
        file = self._active_file(chunks[0].first_offset)
        check(
            self.files[-1].first_offset <= chunks[0].first_offset,
            "a file holds offsets from its first on",
        )
        failpoints.reach("wal.before_write")
        file.write_at(self.position, [chunk.data() for chunk in chunks])
        failpoints.reach("wal.after_write")
        self.arrivals.record(chunks[0].first_offset, self._clock.now_ns() // 1_000_000)
        for chunk in chunks:
            if self.index.wants(self.position) and len(self.index.entries) < INDEX_ENTRIES_MAX:
                self.index.add(chunk.first_offset, self.position, self._time_max)
            self.position += chunk.size_bytes
            self._time_max = max(self._time_max, chunk.publish_time_max)

    def sync(self, position: int) -> None:
        """Makes the active file durable up to `position`, which has been written.

        May run beside `write`, not beside itself, `rotate` or `close_file`.

        Raises:
            SyncFailedError: It is not, and never will be by this writer.
        """
        if position <= self.synced_position:
            return
        if self._sync_failure is not None:
            raise self._sync_failure
        failpoints.reach("wal.before_sync")
        try:
            self._open_active().sync()
        except IsterError as error:
            self._sync_failure = SyncFailedError(
                error.message, errno=getattr(error, "errno", None), path=error.path
            )
            raise self._sync_failure from error
        self.synced_position = position
        failpoints.reach("wal.after_sync")

    def close_file(self) -> None:
        """Releases the handle; the next write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self.is_open = False

    def save_index(self, *, below: int) -> None:
        """Writes the index entries of frames below the offset `below` that are not saved yet.

        An index is rebuilt where it is missing, so an error costs time later and is only counted.
        """
        self._save_index(self._seq, self.index, below)

    def _save_index(self, seq: int, index: SparseIndex, below: int) -> None:
        count = index.saved_count
        entries = index.entries
        end = len(entries)
        while end > count and entries[end - 1].offset > below:
            end -= 1
        if end in (count, 1):
            return  # the first entry is the start of the file, which needs no index
        try:
            self.directory.save_index(seq, entries[:end], start=count)
        except IsterError as error:
            self._metrics.count("wal.index_save_errors")
            _log.warning("index not saved", extra={"path": error.path, "error": str(error)})
        else:
            index.saved_count = end

    # -- files ------------------------------------------------------------------------------

    def _active_file(self, first_offset: int) -> File:
        """The active file, made now if this is its first frame."""
        is_first = not self.files or self.files[-1].seq != self._seq
        # After a trim of everything, or a rotation, the active file may exist, and is empty.
        if is_first and self._file is None:
            self._file = self._make_file(self._seq)
            self.is_open = True
        if is_first:
            # A file created by `rotate` may have been empty for long: its age starts here.
            self._file_since = self._clock.monotonic()
            self.files = (*self.files, WalFile(self._seq, first_offset))
        return self._open_active()

    def _make_file(self, seq: int) -> File:
        """Makes a file; a failed sync of its name is as final as one of its data."""
        file = self.directory.make_log(seq)
        try:
            self.directory.sync_names()
        except DiskError as error:
            file.close()
            self._sync_failure = SyncFailedError(error.message, errno=error.errno, path=error.path)
            raise self._sync_failure from error
        except BaseException:
            file.close()
            raise
        return file

    def _open_active(self) -> File:
        if self._file is None:
            self._file = self.directory.fs.open(self.directory.log_path(self._seq))
            self.is_open = True
        return self._file

    def rotation_is_due(self) -> bool:
        """Whether the active file is as large or as old as it may become."""
        if self.position == 0 or not self.files:
            return False
        now = self._clock.monotonic()
        if now < self._rotation_retry_at:
            return False
        return (
            self.position >= self._rotate_max_bytes
            or now - self._file_since >= self._rotate_max_seconds
        )

    def rotate(self, next_offset: int) -> bool:
        """Ends the active file before `next_offset` and begins the next one.

        The caller has synced it. That order is what recovery relies on: a file is whole and durable
        before one with a higher number exists.

        Returns False if the new file could not be made: the old one stays in use for now.
        """
        check(self.unsynced_bytes == 0, "a file is synced before its successor is made")
        try:
            file = self._make_file(self._seq + 1)
        except SyncFailedError:
            raise
        except (CapacityError, DiskError) as error:
            self._rotation_retry_at = self._clock.monotonic() + STALL_RETRY_SECONDS
            self._metrics.count("wal.rotate_errors")
            _log.warning(
                "rotation put off; the old file stays in use",
                extra={"path": error.path, "error": str(error)},
            )
            return False
        # The last entry points at the end: it carries the highest publish time of the whole file.
        if self.position > self.index.entries[-1].position:
            self.index.add(next_offset, self.position, self._time_max)
        self._save_index(self._seq, self.index, below=next_offset)
        self.close_file()
        reason = (
            "size"
            if self.position >= self._rotate_max_bytes
            else "time"
            if self._clock.monotonic() - self._file_since >= self._rotate_max_seconds
            else "request"
        )
        self._seq += 1
        self._file = file
        self.is_open = True
        self.index = SparseIndex()
        self.position = 0
        self.synced_position = 0
        self._time_max = 0
        now = self._clock.monotonic()
        self._file_since = now
        self.last_rotation_at = self._clock.now_ns() // 1_000_000_000
        self._metrics.count("wal.writer_rotate_events")
        self._metrics.count(f"wal.rotated_by_{reason}")
        _log.log(
            self._routine_level,
            "rotated",
            extra={
                "path": self.directory.path,
                "file": format_log_name(self._seq),
                "offset": next_offset,
                "reason": reason,
            },
        )
        failpoints.reach("wal.after_rotate")
        return True


class Arrivals:
    """When this process wrote which offsets: a bounded list of marks, about a second apart.

    One thread records while others search. Times before the log was opened are known from the
    modification times of files.
    """

    __slots__ = ("_marks", "_stride_ms")

    def __init__(self) -> None:
        # Each (first offset, time of its first write, time of its last one); replaced whole.
        self._marks: list[tuple[int, int, int]] = []
        self._stride_ms = _STRIDE_MS

    @property
    def start(self) -> int | None:
        """The first offset whose arrival time is known; None if nothing was written."""
        marks = self._marks
        return marks[0][0] if marks else None

    def record(self, first_offset: int, now_ms: int) -> None:
        """Records that the frames from an offset on were written now."""
        marks = self._marks
        if marks and 0 <= now_ms - marks[-1][1] < self._stride_ms:
            marks[-1] = (marks[-1][0], marks[-1][1], now_ms)
            return
        marks.append((first_offset, now_ms, now_ms))
        if len(marks) > _MARKS_MAX:
            self._stride_ms *= 2
            pairs = zip(marks[::2], marks[1::2], strict=False)
            self._marks = [(one[0], one[1], max(one[2], two[2])) for one, two in pairs]
            self._marks += marks[len(marks) // 2 * 2 :]

    def times_of(self, offset: int) -> tuple[int, int] | None:
        """The earliest and latest possible arrival time of an offset, in ms; None if unknown."""
        marks = self._marks
        at = bisect_right(marks, offset, key=_first_offset)
        return marks[at - 1][1:] if at else None

    def end_before(self, time_ms: int, *, start: int, end: int) -> int:
        """Shortens a range of offsets so that nothing in it was written after a time.

        Returns the new end of the range.
        """
        marks = self._marks
        for first_offset, _, last_ms in marks[bisect_left(marks, start + 1, key=_first_offset) :]:
            if first_offset >= end:
                break
            if last_ms > time_ms:
                return first_offset
        return end


def _first_offset(mark: tuple[int, int, int]) -> int:
    return mark[0]
