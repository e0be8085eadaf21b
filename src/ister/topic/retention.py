"""Removes what a topic need not keep: local files, objects, and what nothing refers to.

Owns: the rules, without I/O (`plan_trim`), and their order for a topic with a bucket (`Retention`).
Does not own: threads (`background`), the files (`ister.wal`), the bucket's rules (`ister.bucket`),
whether the bucket has a range (`bucket_link`), topics without a bucket (`local_trim`).

A local file goes only if all of these hold:

- it is rotated, and every offset in it is tiered, where there is a bucket;
- the bucket's copy of it was found in the catalog and checked, byte for byte unless configured
  otherwise; a copy that is lost or damaged is uploaded again first;
- every subscription that is active has read it;
- a limit allows it: it is older than `time_minutes`, or the topic's files take more than `size_mb`;
- or, if floors are set in place of limits, both do: it is older than `min_minutes`, and the topic's
  files take more than `min_bytes`; a floor that is not set allows every file;
- every file before it goes too.

A file's age is the time since it was last written, which is when its newest message arrived. A file
of unknown age counts as new. Retention runs beside uploads, except where it changes objects.
Nothing is removed while the metadata store is distrusted (`ister.bucket.trust`), except files in
memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final, Protocol

from ister.base.clock_guard import newest_arrivals
from ister.base.limits import MIB
from ister.bucket.orphans import at_least, collect_orphans, sweep_staging
from ister.bucket.pipeline import PipelineKeys
from ister.bucket.retention import expire, keep_findable, list_known, plan_expiry
from ister.bucket.writer_files import find_open_batch
from ister.config import WalRetentionConfig
from ister.errors import ClosedError, FencedError, IsterError, NotFoundError
from ister.topic.stores import Stores
from ister.topic.uploads import TopicUploads
from ister.wal.log import Wal

_log = logging.getLogger("ister.topic.bucket_link")

_MINUTE_MS = 60_000


NO_FLOOR: Final = 1 << 64


class ActiveFloor(Protocol):
    """Returns the lowest offset that a subscription still needs; `NO_FLOOR` without one."""

    def __call__(self, *, include_inactive: bool) -> int:
        """Considers active subscriptions, or all of them."""
        ...


def no_floor(*, include_inactive: bool) -> int:
    """The `ActiveFloor` of a topic without subscriptions."""
    return NO_FLOOR


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionFile:
    """A WAL file as retention sees it."""

    first_offset: int
    size_bytes: int
    modified_ms: int | None


def list_files(wal: Wal) -> list[RetentionFile]:
    """A log's files, in the order of their offsets."""
    directory = wal.directory
    if directory is None:
        return []
    found: list[RetentionFile] = []
    for file in wal.files:
        modified_ms: int | None = 0
        try:
            size = directory.log_size(file.seq)
        except NotFoundError:
            size = 0  # Removed by hand: nothing to keep.
        else:
            modified_ms = directory.fs.modified_ms(directory.log_path(file.seq))
        found.append(
            RetentionFile(first_offset=file.first_offset, size_bytes=size, modified_ms=modified_ms)
        )
    return found


def plan_trim(
    files: Sequence[RetentionFile],
    retention: WalRetentionConfig,
    *,
    safe_before: int,
    now_ms: int,
    is_clock_trusted: bool = True,
    correct_ms: Callable[[int], int] = lambda time_ms: time_ms,
) -> int | None:
    """The offset below which files have to go; None if none has to.

    `files`: ascending; the last one is the active file.
    `safe_before`: everything below this offset may be removed.
    `is_clock_trusted`: whether ages can be told. If not, no file is old.
    `correct_ms`: corrects times that were recorded while the clock was wrong.
    """
    has_floors = retention.has_floors
    minutes = retention.min_minutes if has_floors else retention.time_minutes
    size_mb = retention.size_mb
    most = retention.min_bytes if has_floors else None if size_mb is None else size_mb * MIB
    kept = sum(file.size_bytes for file in files)
    before: int | None = None
    arrived = newest_arrivals(
        [None if (ms := file.modified_ms) is None else correct_ms(ms) for file in files], now_ms
    )
    for (file, following), arrived_ms in zip(pairwise(files), arrived, strict=False):
        if following.first_offset > safe_before:
            break
        is_old = (
            minutes is not None
            and is_clock_trusted
            and arrived_ms is not None
            and now_ms - arrived_ms > minutes * _MINUTE_MS
        )
        is_above = most is not None and kept > most
        if has_floors:
            may_go = (is_old or minutes is None) and (is_above or most is None)
        else:
            may_go = is_old or is_above
        if not may_go:
            break
        before = following.first_offset
        kept -= file.size_bytes
    return before


class Assure(Protocol):
    """Makes sure that the bucket has a range of offsets; see `TopicBucket.assure`."""

    def __call__(self, start: int, end: int, assured: set[tuple[str, int]] | None = None) -> None:
        """Adds the objects that it has checked to `assured`."""
        ...


class Retention:
    """Removes what one topic with a bucket need not keep. Thread-safe."""

    def __init__(
        self,
        *,
        wal: Wal,
        uploads: TopicUploads,
        stores: Stores,
        floor: ActiveFloor,
        settle: Callable[[], None],
        check_owner: Callable[[], None],
        assure: Assure,
    ) -> None:
        """Begins with nothing removed.

        `floor`: returns the lowest cursor of the subscriptions that the broker knows.
        `settle`: writes down where the rows of open batches are, unless one is appended just now.
        `check_owner`: raises unless this process may remove something now.
        """
        self._wal = wal
        self._owned = uploads.owned
        self._uploads = uploads
        self._stores = stores
        self._floor = floor
        self._settle = settle
        self._check_owner = check_owner
        self._assure = assure
        self._clock = stores.clock
        self._metrics = stores.metrics
        self.lock = threading.Lock()
        """Held while local files or objects are removed."""
        self.is_submitted = False
        """Whether retention waits for a thread or runs; set by `background`."""

    def trim(self) -> int:
        """Removes the local files that retention does not keep, once the bucket certainly has them.

        File by file: a file that passed its check is removed even if a later one fails. Retention
        does not apply to files in memory: `drop_tiered` removes them.

        Raises:
            IsterError: A check or a removal failed; later files were not removed.
        """
        wal, retention = self._wal, self._stores.storage.wal.retention
        with self.lock:
            if not self._may_remove or self._stores.is_diskless:
                return 0
            step = self._stores.node_clock.check()
            floor = self._subscription_floor(include_inactive=step is not None)
            before = plan_trim(
                list_files(wal),
                retention,
                # The catalog's end may be known before the log's own mark says so, for a moment or,
                # where an answer was lost, until the next upload. Readers go by the mark.
                safe_before=min(self._owned.tiered, wal.tiered or 0, floor),
                now_ms=self._clock.now_ns() // 1_000_000,
                is_clock_trusted=step is None,
                correct_ms=self._stores.node_clock.correct_ms,
            )
            if before is None or before <= wal.trimmed:
                return 0
            return self._trim(before)

    @property
    def _may_remove(self) -> bool:
        return not (self._uploads.is_stopping or self._stores.trust.is_distrusted)

    def _trim(self, before: int) -> int:
        wal, removed = self._wal, 0
        assured: set[tuple[str, int]] = set()
        for end in [file.first_offset for file in wal.files[1:] if file.first_offset <= before]:
            if self._uploads.is_stopping:
                break
            self._check_owner()
            self._assure(wal.trimmed, end, assured)
            removed += wal.trim(end)
        return removed

    def release(self, *, past_subscriptions: bool, is_enough: Callable[[], bool]) -> int:
        """Removes local files whose upload is verified, even if retention would keep them.

        For a disk that is low: such files are only a cache. Removes one after the other until
        `is_enough` returns True, and returns their number.

        `past_subscriptions`: remove files that an active subscription has not read, too; it then
        reads them from the bucket.

        Raises:
            IsterError: The bucket's copy could not be read, or a file not be removed.
        """
        wal, count = self._wal, 0
        with self.lock:
            assured: set[tuple[str, int]] = set()
            floor: int | None = None if past_subscriptions else -1
            while self._may_remove or (self._stores.is_diskless and not self._uploads.is_stopping):
                safe_before = min(self._owned.tiered, wal.tiered or 0)
                before = wal.next_trim(safe_before)
                if before is None:
                    return count
                if floor == -1:
                    floor = self._subscription_floor(
                        include_inactive=self._stores.node_clock.check() is not None
                    )
                if floor is not None and before > floor:
                    return count
                self._check_owner()
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

        `include_inactive`: consider all subscriptions, because an untrusted clock cannot tell which
        ones are active.
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
            for found in self._owned.catalog.subscriptions()
            if (include_inactive or correct_ms(found.progress.timestamp) >= oldest)
            and found.progress.incarnation in ("", self._owned.record.incarnation)
        ]
        return min([self._floor(include_inactive=include_inactive), *stored])

    def expire(self) -> int:
        """Removes the objects that bucket retention does not keep; returns their number."""
        retention = self._stores.storage.cloud.retention
        if retention.time_minutes is None and retention.size_mb is None:
            return 0
        with self.lock:
            if not self._may_remove:
                return 0
            step = self._stores.node_clock.check()
            self._owned.check()
            found = list_known(self._owned)
            if found is None:
                _log.warning("retention waits: objects overlap", extra={"topic": self._owned.topic})
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
            return expire(self._owned, self._stores.objects, planned, metrics=self._metrics)

    def _settle_batches(self, end: int) -> None:
        """Has the rows of open batches written down, if those hold up jobs below an offset."""
        waits = find_open_batch(self._owned.catalog, self._owned.record.incarnation)
        if waits is None or waits.counted_from >= end:
            return
        try:
            self._settle()
        except (FencedError, ClosedError):
            raise
        except IsterError as error:
            # Jobs wait, and the next call tries again.
            _log.warning(
                "rows of an open batch not counted",
                extra={"topic": self._owned.topic, "writer": waits.writer, "error": str(error)},
            )

    def collect_orphans(self) -> list[str]:
        """Removes objects without a descriptor, after their grace period; returns their names.

        Staged rows that no batch needs are removed, too, and a missing manifest is saved.
        """
        if self._may_remove:
            # Beside uploads: it may read much of the log.
            self._settle_batches(self._owned.tiered)
        with self._uploads.lock:
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
            keep_findable(self._owned, objects)
            return [
                *collect_orphans(
                    self._owned,
                    objects,
                    grace_seconds=grace_seconds,
                    clock=self._clock,
                    metrics=self._metrics,
                    has_jobs=has_jobs,
                    correct_ms=self._stores.node_clock.correct_ms,
                ),
                *sweep_staging(
                    self._owned, objects, grace_seconds=grace_seconds, clock=self._clock
                ),
            ]

    def collect_shared_staging(self) -> list[str]:
        """Removes old staged files that topics share; see `Stores.collect_shared_staging`."""
        return self._stores.collect_shared_staging()
