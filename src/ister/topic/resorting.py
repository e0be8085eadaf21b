"""Re-sorting of one topic: when its express runs become an object of the topic, and retries.

    run committed ─► noted ─► due: by number, size or age ─► one object ─► swap ─► the next group

Owns: which runs wait, when they are due, and the source of their frames: local files as long as
these have them, else the bucket. Does not own: the object and the swap (`ister.bucket.resort`),
threads and the order of topics (`background`).

The oldest runs come first, one group at a time. Waiting runs are known from the commits of this
process and from the catalog, which is read again each time: a pipeline may have re-sorted them.

A run that repeatedly cannot be read is skipped, so that it does not block the others; a repair
replaces it by an object of frames.

What a crash leaves: an object that no descriptor names. The next process finds the runs.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ister.base.retry import backoff_seconds
from ister.bucket.compaction_plan import OBJECTS_MAX
from ister.bucket.express_collection import stays_by_age
from ister.bucket.names import object_key
from ister.bucket.ownership import OwnedTopic
from ister.bucket.resort import RunGroup, find_first_run, plan_resort, resort
from ister.errors import ClosedError, CorruptDataError, IsterError, NotFoundError
from ister.format.crc import crc32
from ister.format.descriptor import FORMAT_EXPRESS, ObjectDescriptor, format_checksum
from ister.format.frame import FrameBatch
from ister.topic.stores import Stores, upload_settings
from ister.wal.log import Wal
from ister.wal.reader import WalReader

_log = logging.getLogger("ister.topic.resorting")

_RETRY_SECONDS_MIN: Final = 1.0
_RETRY_SECONDS_MAX: Final = 60.0
_FAILURES_MAX: Final = 3
"""Failures of a run before it is skipped."""
# A pipeline may take a while to start, and be slow now and then.
_PATIENCE_SECONDS: Final = 60.0


class RunSorter:
    """Re-sorts the express runs of one topic. Thread-safe; `resort` is called by one at a time."""

    def __init__(
        self,
        *,
        wal: Wal,
        owned: OwnedTopic,
        stores: Stores,
        open_files: Callable[[], WalReader],
        on_runs: Callable[[], None],
        is_stopping: Callable[[], bool],
        is_express: bool,
    ) -> None:
        """Takes over a topic.

        `on_runs`: called when there may be runs and there were none before.
        """
        self._wal = wal
        self._owned = owned
        self._stores = stores
        self._open_files = open_files
        self._is_stopping = is_stopping
        self._clock = stores.clock
        self._metrics = stores.metrics
        self._settings = upload_settings(stores.storage.uploader, stores.storage.cloud.layout)
        self._maker = stores.object_maker(owned, is_stopping, pending_tag=secrets.token_hex(4))
        self._lock = threading.Lock()
        # Where the oldest run may be; None if that is not known.
        self._begin: int | None = None
        self._count = 0
        self._size_bytes = 0
        self._noted = 0
        # Keys of runs that cannot be read.
        self._passed_over: set[str] = set()
        self._failures = 0
        self._retry_at = -float("inf")
        self.last_error: IsterError | None = None
        """Why the last attempt failed; None if it succeeded."""
        self.since: float | None = None
        """Monotonic time since which the oldest run waits; None without runs."""
        self._on_runs = on_runs
        last = owned.last
        if is_express or (last is not None and last.format == FORMAT_EXPRESS):
            # Runs of an earlier process, maybe.
            self.since = self._clock.monotonic()

    def add_run(self, run: ObjectDescriptor) -> None:
        """Records a run that was committed."""
        with self._lock:
            self._noted += 1
            self._count += 1
            self._size_bytes += run.size_bytes
            is_first = self.since is None
            if is_first:
                self.since = self._clock.monotonic()
        if is_first:
            self._on_runs()

    def has_runs(self) -> bool:
        """Whether runs wait, as far as is known."""
        return self.since is not None

    def is_due(self, now: float) -> bool:
        """Whether runs should be re-sorted now: by their number, size or age."""
        since = self.since
        if since is None or now < self._retry_at or self._owned.is_fenced or self._is_stopping():
            return False
        return (
            now - since >= self._resort_seconds
            or self._count >= OBJECTS_MAX
            or self._size_bytes >= self._settings.object_bytes_max
        )

    def is_left_behind(self, now: float) -> bool:
        """Whether the pipeline has not re-sorted this topic for far too long."""
        ttl = self._stores.storage.metadata.lease_ttl_seconds
        patience = max(_PATIENCE_SECONDS, 4 * ttl, 3 * self._resort_seconds)
        return self.since is not None and now - self.since > patience

    @property
    def _resort_seconds(self) -> int:
        return self._stores.storage.uploader.express.resort_seconds

    # -- one object -------------------------------------------------------------------------

    def resort(self) -> ObjectDescriptor | None:
        """Re-sorts the oldest group of runs, if one is due; returns the new object.

        Raises:
            CorruptDataError: A run is damaged, and the local files do not have it.
            NotFoundError: A run is lost, and the local files do not have it.
        """
        try:
            made = self._resort()
        except IsterError as error:
            if not self._is_stopping():
                self._record_failure(error)
            raise
        self._failures, self._retry_at, self.last_error = 0, -float("inf"), None
        return made

    def _resort(self) -> ObjectDescriptor | None:
        if self._is_stopping():
            raise ClosedError("the topic is closed", topic=self._owned.topic)
        owned, now, noted = self._owned, self._clock.now_ns() / 1e9, self._noted
        revisions: dict[int, int] = {}
        groups = plan_resort(
            self._walk(revisions),
            self._settings,
            # The clock may have been set back.
            is_due=lambda run: not 0 <= now - run.created_at < self._resort_seconds,
        )
        group = next(groups, None)
        if group is None or not group.is_due:
            self._expect(group, noted)
            return None
        grace_seconds = self._stores.storage.cloud.orphan_grace_minutes * 60
        made = resort(
            owned,
            [(run, revisions[run.start]) for run in group.runs],
            maker=self._maker,
            store=self._stores.objects,
            local=self._local(group.runs),
            chunk_bytes=self._stores.storage.cloud_reader.fetch_chunk_size,
            until=int(now + grace_seconds),
            stays=lambda run: stays_by_age(
                run, now=now, grace_seconds=grace_seconds, wanted_seconds=grace_seconds
            ),
            presence=self._stores.membership.presence(),
        )
        if made is None:
            # A pipeline was faster, or a repair, or retention.
            self._begin = None
            return None
        self._begin = made.end
        self._metrics.count("express.resorted_objects_total")
        self._metrics.count("express.resorted_runs_total", len(group.runs))
        self._metrics.count("express.resorted_bytes_total", made.size_bytes)
        self._expect(next(groups, None), noted)
        return made

    def _walk(self, revisions: dict[int, int]) -> Iterator[ObjectDescriptor]:
        """Yields the objects from the first run on, without runs that are skipped."""
        owned = self._owned
        if self._begin is None:
            owned.refresh()
            begin = find_first_run(owned.catalog, owned.last)
            if begin is None:
                return
            self._begin = begin
        topic = owned.catalog.keys.topic
        for described, revision in owned.catalog.descriptors(self._begin):
            if object_key(topic, described.object_id) not in self._passed_over:
                revisions[described.start] = revision
                yield described

    def _expect(self, group: RunGroup | None, noted: int) -> None:
        """Records which runs wait; `noted` is the count of runs before the catalog was read."""
        with self._lock:
            if group is not None:
                self._count, self._size_bytes = len(group.runs), group.size_bytes
                age = self._clock.now_ns() / 1e9 - group.runs[0].created_at
                # At once, if nothing can join them.
                waited = self._resort_seconds if group.is_due else max(0.0, age)
                self.since = self._clock.monotonic() - waited
                return
            self._count = self._size_bytes = 0
            # A run that was committed meanwhile is found in the next turn.
            self.since = None if self._noted == noted else self._clock.monotonic()

    def _record_failure(self, error: IsterError) -> None:
        self.last_error = error
        self._failures += 1
        pause = backoff_seconds(self._failures, first=_RETRY_SECONDS_MIN, most=_RETRY_SECONDS_MAX)
        self._retry_at = self._clock.monotonic() + pause
        self._metrics.count("express.resort_errors_total")
        _log.warning(
            "re-sorting failed",
            extra={"topic": self._owned.topic, "error": str(error), "retry_seconds": pause},
        )
        if isinstance(error, CorruptDataError | NotFoundError) and self._failures >= _FAILURES_MAX:
            self._passed_over.add(error.path or "")

    # -- frames -----------------------------------------------------------------------------

    def _local(self, runs: Sequence[ObjectDescriptor]) -> Callable[[], Iterator[FrameBatch]] | None:
        if runs[0].start < self._wal.trimmed:
            return None
        return lambda: self._local_frames(runs)

    def _local_frames(self, runs: Sequence[ObjectDescriptor]) -> Iterator[FrameBatch]:
        """The frames of runs, from local files.

        Raises:
            OffsetOutOfRangeError: The files do not have them any more.
            CorruptDataError: A frame is damaged, or a run has other bytes.
        """
        reader = self._open_files()
        try:
            for run in runs:
                yield from _frames_of(reader, run, self._settings.read_bytes)
        finally:
            reader.close()


def _frames_of(reader: WalReader, run: ObjectDescriptor, bytes_max: int) -> Iterator[FrameBatch]:
    crc, at = 0, run.start

    def measure(start: int, end: int) -> int | None:
        # A small run is read as it is, and not with a whole chunk.
        if start == end:
            return 0
        return run.size_bytes if (start, end) == (run.start, run.end) else None

    while at < run.end:
        batch = reader.fetch(at, run.end, bytes_max=bytes_max, span=measure)
        crc = crc32(memoryview(batch.chunk)[batch.starts[0] : batch.end], crc)
        yield batch
        at = batch.next_offset
    if run.checksum != format_checksum(crc):
        raise CorruptDataError(
            f"the run has checksum {format_checksum(crc)} in local files and {run.checksum} in the "
            "bucket",
            path=run.object_id,
            offset=run.start,
        )
