"""A topic's link to the bucket: local retention, checks, repairs and garbage, on top of uploads.

Owns: the order of things between the local log and the bucket. Does not own: threads
(`background`), the local files (`ister.wal`), the bucket's rules (`ister.bucket`), uploads
(`uploads`).

A local file is removed only after the bucket's copy of all its offsets was found in the catalog and
checked, byte for byte unless configured otherwise; a copy that is lost or damaged is uploaded again
first. Retention runs beside uploads, except where it changes objects. Nothing is removed while the
metadata store is distrusted (`ister.bucket.trust`), except files in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ister.bucket.check import verify_content, verify_size
from ister.bucket.names import object_key
from ister.bucket.orphans import at_least, collect_orphans, sweep_staging
from ister.bucket.pipeline import PipelineKeys
from ister.bucket.retention import expire, keep_findable, list_known, plan_expiry
from ister.bucket.writer_files import find_open_batch
from ister.config import Verify
from ister.errors import (
    ClosedError,
    CorruptDataError,
    DataGapError,
    FencedError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
)
from ister.format.descriptor import ObjectDescriptor
from ister.topic.retention import list_files, plan_trim
from ister.topic.uploads import TopicUploads, UploadResult

__all__ = ["RepairedObjects", "TopicBucket", "UploadResult"]

_log = logging.getLogger("ister.topic.bucket_link")

# Number of objects that are checked when a topic is opened.
_RECENT_OBJECTS: Final = 4


@dataclass(slots=True)
class RepairedObjects:
    """What a repair of a topic's objects has done."""

    objects: list[str] = field(default_factory=list)
    """Uploaded again, or for the first time."""
    errors: list[IsterError] = field(default_factory=list)
    bad: list[tuple[int, int]] = field(default_factory=list)
    """Offsets that the bucket does not have."""


class TopicBucket(TopicUploads):
    """The bucket side of one topic. Thread-safe."""

    def trim(self) -> int:
        """Removes the local files that retention does not keep, once the bucket certainly has them.

        File by file: a file that passed its check is removed even if a later one fails. Retention
        does not apply to files in memory: `drop_tiered` removes them.

        Returns:
            How many.

        Raises:
            IsterError: A check or a removal failed; later files were not removed.
        """
        wal, retention = self._wal, self._stores.storage.wal.retention
        with self._trimming:
            if not self._may_remove or self._stores.is_diskless:
                return 0
            step = self._stores.node_clock.check()
            floor = self._subscription_floor(include_inactive=step is not None)
            before = plan_trim(
                list_files(wal),
                retention,
                # The catalog's end may be known before the log's own mark says so, for a moment or,
                # where an answer was lost, until the next upload. Readers go by the mark.
                safe_before=min(self.owned.tiered, wal.tiered or 0, floor),
                now_ms=self._clock.now_ns() // 1_000_000,
                is_clock_trusted=step is None,
                correct_ms=self._stores.node_clock.correct_ms,
            )
            if before is None or before <= wal.trimmed:
                return 0
            return self._trim(before)

    @property
    def _may_remove(self) -> bool:
        return not (self._stopping.is_set() or self._stores.trust.is_distrusted)

    def _trim(self, before: int) -> int:
        wal, removed = self._wal, 0
        assured: set[tuple[str, int]] = set()
        for end in [file.first_offset for file in wal.files[1:] if file.first_offset <= before]:
            if self._stopping.is_set():
                break
            self.check_owner()
            self._assure(wal.trimmed, end, assured)
            removed += wal.trim(end)
        return removed

    def release(self, *, past_subscriptions: bool, is_enough: Callable[[], bool]) -> int:
        """Removes local files whose upload is verified, even if retention would keep them.

        For a disk that is low: such files are only a cache. Removes one after the other until
        `is_enough` returns True, and returns their number.

        Args:
            past_subscriptions: Remove files that an active subscription has not read, too; it then
                reads them from the bucket.
            is_enough: Called after each file.

        Raises:
            IsterError: The bucket's copy could not be read, or a file not be removed.
        """
        wal, count = self._wal, 0
        with self._trimming:
            assured: set[tuple[str, int]] = set()
            floor: int | None = None if past_subscriptions else -1
            while self._may_remove or (self._stores.is_diskless and not self._stopping.is_set()):
                safe_before = min(self.owned.tiered, wal.tiered or 0)
                before = wal.next_trim(safe_before)
                if before is None:
                    return count
                if floor == -1:
                    floor = self._subscription_floor(
                        include_inactive=self._stores.node_clock.check() is not None
                    )
                if floor is not None and before > floor:
                    return count
                self.check_owner()
                self._assure(wal.trimmed, before, assured)
                removed = wal.trim(before, whole=True)
                count += removed
                if not removed or is_enough():
                    return count
        return count

    def drop_tiered(self, *, is_enough: Callable[[], bool]) -> int:
        """Removes files in memory that are uploaded, one after the other; returns their number.

        The active file is rotated if a part of it is uploaded, so that it can be removed soon.

        Raises:
            IsterError: The topic is closed, or the lease has expired.
        """
        wal = self._wal
        count = self.release(past_subscriptions=True, is_enough=is_enough)
        files = wal.files
        if not is_enough() and files and files[-1].first_offset < (wal.tiered or 0):
            wal.rotate()
        return count

    def _subscription_floor(self, *, include_inactive: bool) -> int:
        """The lowest offset that an active subscription has not read.

        Args:
            include_inactive: Consider all subscriptions, because an untrusted clock cannot tell
                which ones are active.
        """
        retention, correct_ms = (
            self._stores.storage.wal.retention,
            self._stores.node_clock.correct_ms,
        )
        oldest = self._clock.now_ns() // 1_000_000 - (
            retention.active_subscription_grace_seconds * 1000
        )
        stored = [
            found.progress.offset
            for found in self.owned.catalog.subscriptions()
            if (include_inactive or correct_ms(found.progress.timestamp) >= oldest)
            and found.progress.incarnation in ("", self.owned.record.incarnation)
        ]
        return min([self.active_floor(include_inactive=include_inactive), *stored])

    def recent_start(self, start: int, end: int, *, objects: int, seconds: int) -> int:
        """The first offset of the newest objects in a range: `objects` of them, or more if young.

        Args:
            start: The range's first offset; the result is not below it.
            end: The offset after its last one.
            objects: How many objects are wanted at least.
            seconds: An object counts if it is at most this much older than the newest.

        Raises:
            UnavailableError: The metadata store does not answer.
        """
        width = objects
        while True:
            begin = max(start, end - width)
            found = [described for described, _ in self.owned.catalog.descriptors(begin, end)]
            if not found:
                return begin
            oldest = found[-1].created_at - seconds
            young = next(at for at, one in enumerate(found) if one.created_at >= oldest)
            first = min(young, max(0, len(found) - objects))
            if first > 0 or begin == start:
                return max(start, found[first].start)
            width *= 4

    def prepare_seal(self) -> set[tuple[str, int]]:
        """Uploads and checks what `Log.seal` needs while appends continue, to make that shorter.

        Returns:
            The checked objects, for `Log.seal`.

        Raises:
            As `upload`, or that an object is bad and could not be uploaded again.
        """
        assured = set[tuple[str, int]]()
        self.upload()
        self.assure_local(self._wal.tiered or 0, assured)
        return assured

    def assure_local(self, end: int, assured: set[tuple[str, int]] | None = None) -> None:
        """Makes sure that the bucket holds, whole, all messages in local files below `end`.

        Objects in `assured` were checked a moment ago; those checked now are added to it.

        Raises:
            IsterError: It does not, and could not be made to.
        """
        with self._trimming:
            self.check_owner()
            self._assure(self._wal.trimmed, end, assured)

    def _assure(self, start: int, end: int, assured: set[tuple[str, int]] | None = None) -> None:
        """Makes sure that the bucket holds a range, whole and readable, and repairs it if not.

        Args:
            start: The first offset.
            end: The offset after the last one.
            assured: Objects that were already checked; extended by those checked now.

        Raises:
            DataGapError: The catalog has a hole there.
            IsterError: An object is bad and could not be uploaded again.
        """
        if self._stores.is_diskless:
            # A committed descriptor is enough: everything acknowledged is in the bucket, too.
            return
        content = self._stores.storage.wal.retention.verify is Verify.CONTENT
        assured = set() if assured is None else assured
        # Objects may be merged while they are read: what has replaced them is checked, too.
        while self._assure_new(start, end, assured, content=content):
            pass

    def _assure_new(
        self, start: int, end: int, assured: set[tuple[str, int]], *, content: bool
    ) -> bool:
        """Checks the objects of a range that are not in `assured`; whether there are any."""
        has_new = False
        # What has expired in the bucket is not needed any more. But an expiry is recorded before
        # its objects leave the catalog, and if it is interrupted, those are still read.
        floor = self.owned.record.expired_before
        at = start
        for described, revision in self.owned.catalog.descriptors(start, end):
            if described.start > max(at, floor):
                break
            if (described.object_id, revision) not in assured:
                self._assure_object(described, revision, content=content)
                assured.add((described.object_id, revision))
                has_new = True
            at = described.end
        at = max(at, floor)
        if at < end:
            raise DataGapError(
                "no object holds the offset", start=at, end=end, topic=self.owned.topic
            )
        return has_new

    def _assure_object(self, described: ObjectDescriptor, revision: int, *, content: bool) -> bool:
        """Checks an object, and uploads it again if it is bad; returns whether it was."""
        key = object_key(self.owned.catalog.keys.topic, described.object_id)
        chunk_bytes = self._stores.storage.cloud_reader.fetch_chunk_size
        try:
            if content:
                verify_content(self._stores.objects, key, described, chunk_bytes=chunk_bytes)
            else:
                verify_size(self._stores.objects, key, described.size_bytes)
        except (NotFoundError, CorruptDataError) as error:
            if self._stopping.is_set():
                raise ClosedError("the topic is being closed or deleted") from error
            if described.start < self._wal.trimmed or described.kept:
                # Local files may have messages that compaction removed: they would come back.
                raise
            _log.error(
                "an object is lost or damaged; uploading it again from the local files",
                extra={"topic": self.owned.topic, "error": str(error)},
            )
            self._upload_again(described, revision)
            return True
        return False

    def _upload_again(self, described: ObjectDescriptor, revision: int) -> None:
        with self._uploading:
            source = self._source()
            try:
                self._uploader.upload_again(source, described, revision)
            finally:
                source.close()

    def check_recent(self) -> list[str]:
        """Checks that the newest objects exist whose offsets are still in local files.

        Only a few: retention checks every object before it removes a local file.

        Returns:
            The names of the missing ones, which were uploaded again.

        Raises:
            IsterError: A store does not answer, or a local frame is damaged.
        """
        wal, catalog, last = self._wal, self.owned.catalog, self.owned.last
        if last is None:
            return []
        start = last.start
        for _ in range(_RECENT_OBJECTS - 1):
            before = catalog.find(start - 1) if start > wal.trimmed else None
            if before is None:
                break
            start = before.start
        return [
            described.object_id
            for described, revision in catalog.descriptors(start)
            if described.start >= wal.trimmed
            and self._assure_object(described, revision, content=False)
        ]

    def repair_objects(self, *, content: bool = True) -> RepairedObjects:
        """Checks every object, and restores from local files what is lost, damaged or missing.

        Args:
            content: Read them; else only check that they exist, with their size.
        """
        report = RepairedObjects()
        first = self.owned.catalog.first()
        at = first.start if first is not None else 0
        # Before the oldest object, what local files have belongs there too, unless it has expired.
        at = min(at, max(self.owned.record.expired_before, self._wal.trimmed))
        for described, revision in self.owned.catalog.descriptors():
            if described.start > at:
                self._repair(report, at, described.start, partial(self._fill, at, described.start))
            at = described.end
            self._repair(
                report,
                described.start,
                described.end,
                partial(self._restore, described, revision, content),
            )
        return report

    def _repair(
        self, report: RepairedObjects, start: int, end: int, repair: Callable[[], list[str]]
    ) -> None:
        try:
            report.objects += repair()
        except (NotFoundError, CorruptDataError, OffsetOutOfRangeError) as error:
            lost = DataGapError(error.message, start=start, end=end, topic=self.owned.topic)
            lost.path, lost.position = error.path, error.position
            lost.__cause__ = error
            report.errors.append(lost)
            report.bad.append((start, end))

    def _restore(self, described: ObjectDescriptor, revision: int, content: bool) -> list[str]:
        is_restored = self._assure_object(described, revision, content=content)
        return [described.object_id] if is_restored else []

    def _fill(self, start: int, end: int) -> list[str]:
        if start < self._wal.trimmed:
            raise DataGapError(
                "no object holds the offset", start=start, end=end, topic=self.owned.topic
            )
        with self._uploading:
            source = self._source()
            try:
                return [d.object_id for d in self._uploader.fill(source, start, end)]
            finally:
                source.close()

    def find_local_damage(self) -> IsterError | None:
        """Reads the local files; returns the first damage, or None."""
        wal = self._wal
        source = self._source()
        try:
            at = wal.trimmed
            while at < wal.synced:
                at = source.fetch(at, wal.synced, bytes_max=1 << 30).next_offset
        except (CorruptDataError, NotFoundError) as error:
            return error
        except OffsetOutOfRangeError:
            return None  # trimmed meanwhile: what is left has been read, or was written just now
        finally:
            source.close()
        return None

    def expire(self) -> int:
        """Removes the objects that bucket retention does not keep; returns their number."""
        retention = self._stores.storage.cloud.retention
        if retention.time_minutes is None and retention.size_mb is None:
            return 0
        with self._trimming:
            if not self._may_remove:
                return 0
            step = self._stores.node_clock.check()
            self.owned.check()
            found = list_known(self.owned)
            if found is None:
                _log.warning("retention waits: objects overlap", extra={"topic": self.owned.topic})
                return 0
            planned = plan_expiry(
                found,
                now_ms=self._clock.now_ns() // 1_000_000,
                time_minutes=retention.time_minutes if step is None else None,
                size_mb=retention.size_mb,
                correct_ms=self._stores.node_clock.correct_ms,
            )
            if planned:
                self._settle_batches(planned[-1].end)
            return expire(self.owned, self._stores.objects, planned, metrics=self._metrics)

    def _settle_batches(self, end: int) -> None:
        """Has the rows of open batches written down, if those hold up jobs below an offset."""
        waits = find_open_batch(self.owned.catalog, self.owned.record.incarnation)
        if waits is None or waits.counted_from >= end:
            return
        try:
            self.settle_batches()
        except (FencedError, ClosedError):
            raise
        except IsterError as error:
            # Jobs wait, and the next call tries again.
            _log.warning(
                "rows of an open batch not counted",
                extra={"topic": self.owned.topic, "writer": waits.writer, "error": str(error)},
            )

    def collect_orphans(self) -> list[str]:
        """Removes objects without a descriptor, after their grace period; returns their names.

        Staged rows that no batch needs are removed, too, and a missing manifest is saved.
        """
        if self._may_remove:
            # Beside uploads: it may read much of the log.
            self._settle_batches(self.owned.tiered)
        with self._uploading:
            if not self._may_remove or self._stores.node_clock.check() is not None:
                return []
            objects = self._stores.objects
            storage = self._stores.storage
            grace_seconds: float = storage.cloud.orphan_grace_minutes * 60
            keys = PipelineKeys(storage.metadata.root_prefix)
            has_jobs = partial(keys.has_jobs, self._stores.metadata)
            if has_jobs():
                # Its objects have no descriptors until it commits them.
                grace_seconds = at_least(grace_seconds)
            keep_findable(self.owned, objects)
            return [
                *collect_orphans(
                    self.owned,
                    objects,
                    grace_seconds=grace_seconds,
                    clock=self._clock,
                    metrics=self._metrics,
                    has_jobs=has_jobs,
                    correct_ms=self._stores.node_clock.correct_ms,
                ),
                *sweep_staging(self.owned, objects, grace_seconds=grace_seconds, clock=self._clock),
            ]

    def collect_shared_staging(self) -> list[str]:
        """Removes old staged files that topics share; see `Stores.collect_shared_staging`."""
        return self._stores.collect_shared_staging()
