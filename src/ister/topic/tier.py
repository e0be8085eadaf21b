"""One topic's second tier: its uploads, its history, its retention, and who owns it.

Owns: the order of things between the local log and the bucket, and how far behind uploads are.
Does not own: threads (`background`), the local files (`ister.wal`), the bucket's rules
(`ister.tier`).

Invariants:

- only synced messages are uploaded, and `tiered` moves over a gapless prefix;
- a local file goes only after the bucket's copy of all its offsets was found in the catalog and
  checked, byte for byte unless configured otherwise; a copy that is lost or damaged is uploaded
  again first;
- a process that is not surely the owner acknowledges nothing.

One upload runs at a time. Retention runs beside it, except where it changes objects.

Uploads may be a pipeline's, which commits in this owner's name: `follow` finds out how far it has
come. Both may try at once, and one of them commits: the other one goes on from there.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Final

from ister.config import Verify
from ister.errors import (
    CapacityError,
    ClosedError,
    ConflictError,
    CorruptDataError,
    DataGapError,
    FencedError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
)
from ister.format.checkpoint import UploaderCheckpoint
from ister.format.descriptor import ObjectDescriptor
from ister.tier.names import object_key
from ister.tier.orphans import collect_orphans
from ister.tier.ownership import OwnedTopic
from ister.tier.pipeline import PipelineKeys
from ister.tier.reader import HistoryReader
from ister.tier.retention import expire, plan_expiry
from ister.tier.staging import sweep_staging
from ister.tier.verify import verify_content, verify_size
from ister.topic.retention import ActiveFloor, list_files, no_floor, plan_trim
from ister.topic.tiers import Tiers
from ister.wal.log import Wal
from ister.wal.reader import WalReader

__all__ = ["RepairedObjects", "Tiered", "TopicTier"]

_log = logging.getLogger("ister.topic.tier")

_RETRY_SECONDS_MIN: Final = 0.5
_RETRY_SECONDS_MAX: Final = 60.0
# While low disk space stops appends.
_RETRY_SECONDS_PRESSED: Final = 5.0
# A job commits what its tasks have made within minutes.
_JOB_GRACE_SECONDS: Final = 3600
# How often it is looked how far a pipeline has come.
_FOLLOW_SECONDS: Final = 1.0
# A pipeline may be slow to start, and slow once.
_PATIENCE_SECONDS: Final = 60.0
# Number of objects that are checked when a topic is opened.
_RECENT_OBJECTS: Final = 4
# A hold on producers ends when the lag is clearly below its limit, not just under it.
_RELIEF: Final = 0.9
_WALKS_MAX: Final = 5
"""How often objects are listed anew because some were merged meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiered:
    """What an upload cycle has moved: the offsets `start` up to, not including, `end`."""

    start: int
    end: int
    objects: tuple[ObjectDescriptor, ...] = ()

    @property
    def size_bytes(self) -> int:
        """The size of the objects."""
        return sum(described.size_bytes for described in self.objects)


@dataclass(slots=True)
class RepairedObjects:
    """What a repair of a topic's objects has done."""

    objects: list[str] = field(default_factory=list)
    """Uploaded again, or for the first time."""
    errors: list[IsterError] = field(default_factory=list)
    bad: list[tuple[int, int]] = field(default_factory=list)
    """Offsets that the bucket does not have."""


class TopicTier:
    """See the module header. Thread-safe."""

    def __init__(self, *, wal: Wal, owned: OwnedTopic, tiers: Tiers, backlog_bytes: int) -> None:
        """Takes over a topic that was claimed and whose log was recovered.

        Args:
            wal: The topic's log.
            owned: The claim.
            tiers: The stores.
            backlog_bytes: About how much of the local files is not tiered yet.
        """
        self._wal = wal
        self.owned = owned
        self._tiers = tiers
        self._clock = tiers.clock
        self._metrics = tiers.metrics
        self._stopping = threading.Event()
        self._uploader = tiers.uploader(owned, self._stopping.is_set)
        self._uploading = threading.Lock()
        self._trimming = threading.Lock()
        self._lag_base = backlog_bytes
        self._lag_mark = 0
        self._cycle_at = -float("inf")
        self._retry_at = -float("inf")
        self._failed_at = -float("inf")
        self._follow_at = -float("inf")
        self._behind_since: float | None = None
        self._failures = 0
        self.last_error: IsterError | None = None
        """Why the last cycle failed; None after one that did not."""
        self.is_wanted = False
        """Whether somebody waits for `tiered`."""
        self.is_submitted = False
        """Whether a cycle is on its way to a thread; kept by `background`."""
        self.is_retaining = False
        """Whether retention is; likewise."""
        self._is_held = False
        self._pressing = threading.Lock()
        self.on_wanted: Callable[[], None] = lambda: None
        """Called when an upload should not wait for its time."""
        self.active_floor: ActiveFloor = no_floor
        """Returns the lowest cursor of the active subscriptions; see `Topic`."""
        self.is_listed = False
        """Whether `background` checks it a few times a second; set by `background`."""
        self.on_backlog: Callable[[], None] = lambda: None
        """Called when messages were synced while the topic is not listed."""
        self.on_fenced: Callable[[], None] = lambda: None
        """Called, in any thread, when another node turns out to own the topic."""
        owned.on_fenced = self._on_fenced
        owned.on_regained = self._on_regained
        wal.on_tier_wanted = self._on_wanted
        wal.on_synced = self._on_synced
        wal.note_tiered(min(owned.tiered, wal.synced))

    # -- what it is -------------------------------------------------------------------------

    @property
    def earliest(self) -> int:
        """The first offset that any tier holds."""
        first = self.owned.first
        trimmed = self._wal.trimmed
        return trimmed if first is None else min(first.start, trimmed)

    @property
    def lag_bytes(self) -> int:
        """About how many synced bytes are not in the bucket yet."""
        if self._wal.synced <= (self._wal.tiered or 0):
            return 0
        return max(0, self._lag_base + self._wal.synced_bytes_total - self._lag_mark)

    @property
    def failures(self) -> int:
        """Upload cycles that failed since the last good one."""
        return self._failures

    def check_owner(self) -> None:
        """Makes sure that this process may acknowledge something now.

        Raises:
            FencedError: Another owner has the topic.
            UnavailableError: The lease may have ended; the metadata store has not answered.
        """
        # In this order: a renewal in between finds out about being replaced before it makes the
        # lease look valid again.
        is_leased = self.owned.is_leased
        if self.owned.is_fenced:
            raise self._fenced_error()
        if not is_leased:
            raise self.lapsed_error()

    def lapsed_error(self) -> UnavailableError:
        """What a waiter gets while it is not sure that this process owns the topic."""
        return self._lapsed("whether the message counts is unknown until the store answers")

    def refused_error(self) -> FencedError | UnavailableError:
        """The error of appends without a valid lease; `FencedError` if the topic was lost."""
        if self.owned.is_fenced:
            return self._fenced_error()
        return self._lapsed("nothing was accepted; it goes on when the store answers")

    def _lapsed(self, hint: str) -> UnavailableError:
        return UnavailableError(
            "the metadata store has not answered in time, so the topic may have another owner",
            topic=self.owned.topic,
            hint=hint,
        )

    def _fenced_error(self) -> FencedError:
        return FencedError("another owner has the topic", topic=self.owned.topic)

    def _on_fenced(self, error: FencedError) -> None:
        self._wal.hold("fenced", self._fenced_error, waits=False)
        self._wal.end_tiering(error)
        self.on_fenced()

    def _on_regained(self) -> None:
        self._wal.unhold("lease")

    def _on_wanted(self) -> None:
        self.is_wanted = True
        self.on_wanted()

    def _on_synced(self) -> None:
        if not self.is_listed:
            self.on_backlog()

    def history(self) -> HistoryReader:
        """A reader of the topic's objects."""
        return self._tiers.reader(self.owned.catalog)

    # -- the end ----------------------------------------------------------------------------

    def stop(self) -> None:
        """Has an upload under way end soon; none begins after this."""
        self._stopping.set()

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Stops, and keeps everything that changes objects out while the topic is deleted."""
        self.stop()
        with self._trimming, self._uploading:
            yield

    # -- uploads ----------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether everything is uploaded and no producer waits: nothing is due."""
        wal = self._wal
        return wal.next == (wal.tiered or 0) and not self._is_held

    def is_due(self, now: float) -> bool:
        """Whether a cycle should begin: by time, by size, or because somebody waits."""
        if self._wal.synced <= (self._wal.tiered or 0):
            return False
        is_pressed = self._tiers.is_disk_low()
        retry_at = self._retry_at
        if is_pressed:
            retry_at = min(retry_at, self._failed_at + _RETRY_SECONDS_PRESSED)
        if self.owned.is_fenced or self._stopping.is_set() or now < retry_at:
            return False
        settings = self._tiers.storage.uploader
        return (
            self.is_wanted
            or is_pressed
            or now - self._cycle_at >= settings.interval_seconds
            or self.lag_bytes >= settings.max_batch_bytes
        )

    def is_due_by_age(self, now_seconds: float) -> bool:
        """Whether a cycle is due by size, or by the age of the newest object.

        For a process that opens the log again and again for a moment: its own clock is new each
        time.
        """
        settings, last = self._tiers.storage.uploader, self.owned.last
        if self._wal.synced <= (self._wal.tiered or 0):
            return False
        made_at = last.created_at if last is not None else self.owned.record.created_at
        return (
            self.lag_bytes >= settings.max_batch_bytes
            or now_seconds - made_at >= settings.interval_seconds
        )

    def upload(self, *, is_crowded: Callable[[], bool] = lambda: False) -> Tiered:
        """One cycle: everything that is synced by now goes into the bucket.

        Args:
            is_crowded: Called after each object; if other topics wait for a thread, the cycle
                ends, and the next one continues.

        Raises:
            FencedError: Another owner has the topic.
            DataGapError: The bucket ends before the local files begin.
            CorruptDataError: A local frame is damaged; what lies before it was uploaded.
            UnavailableError: A store does not answer; the next cycle goes on where this one ended.
            PermissionDeniedError: A store refuses.
        """
        with self._uploading:
            if self._stopping.is_set():
                raise ClosedError("the topic is closed", topic=self.owned.topic)
            began = self._clock.monotonic()
            self._cycle_at = began
            was_wanted, self.is_wanted = self.is_wanted, False
            try:
                tiered = self._upload(is_crowded)
            except BaseException as error:
                # Whoever waits still does.
                self.is_wanted = self.is_wanted or was_wanted
                if isinstance(error, IsterError) and not self._stopping.is_set():
                    self._note_failure(error)
                raise
            finally:
                self._metrics.observe(
                    "uploader.cycle_duration_seconds", self._clock.monotonic() - began
                )
            self._failures = 0
            self._retry_at = -float("inf")
            self.last_error = None
            # A pipeline that has left this topic behind gets another chance.
            self._behind_since = None
            return tiered

    def _upload(self, is_crowded: Callable[[], bool]) -> Tiered:
        wal = self._wal
        mark, synced = wal.synced_bytes_total, wal.synced
        # A commit that had been given up on may have happened after all, or a pipeline's.
        self.owned.refresh()
        self._note_followed()
        wal.note_tiered(min(self.owned.tiered, synced))
        first = start = self._next_start()
        objects: list[ObjectDescriptor] = []
        source = self._source()
        try:
            while (described := self._upload_next(source, start, synced)) is not None:
                start = described.end
                objects.append(described)
                self._note_object(described, source.place)
                if start < synced and is_crowded():
                    self.is_wanted = True
                    return Tiered(start=first, end=start, objects=tuple(objects))
        finally:
            source.close()
            self.apply_pressure()
        self._lag_base, self._lag_mark = 0, mark
        self.apply_pressure()
        return Tiered(start=first, end=start, objects=tuple(objects))

    def _upload_next(self, source: WalReader, start: int, synced: int) -> ObjectDescriptor | None:
        """The next object; where a pipeline was faster, the one after those that it has made."""
        while True:
            try:
                return self._uploader.upload(source, start, synced)
            except ConflictError:
                if self.owned.tiered <= start:
                    raise
                self._note_followed()
                start = self.owned.tiered

    # -- uploads of a pipeline --------------------------------------------------------------

    def is_follow_due(self, now: float) -> bool:
        """Whether it is time to look how far a pipeline has come."""
        if self._stopping.is_set() or self.owned.is_fenced:
            return False
        if self._wal.synced <= (self._wal.tiered or 0):
            self._behind_since = None
            return False
        return now >= self._follow_at

    def is_left_behind(self, now: float) -> bool:
        """Whether a pipeline that should upload this topic has not done so for far too long."""
        settings, ttl = self._tiers.storage.uploader, self._tiers.storage.metadata.lease_ttl_seconds
        since = self._behind_since
        patience = max(_PATIENCE_SECONDS, 4 * ttl, 6 * settings.interval_seconds)
        return since is not None and now - since > patience

    def follow(self) -> int:
        """Takes note of what was committed in this owner's name; `tiered` as of now.

        Raises:
            FencedError: Another owner has the topic.
            UnavailableError: The metadata store does not answer.
        """
        now = self._clock.monotonic()
        self._follow_at = now + _FOLLOW_SECONDS
        if self._behind_since is None:
            self._behind_since = now
        if not self._uploading.acquire(blocking=False):
            return self._wal.tiered or 0  # an upload of this owner's own finds out by itself
        try:
            self.owned.refresh()
            self._note_followed()
        finally:
            self._uploading.release()
        return self._wal.tiered or 0

    def _note_followed(self) -> None:
        """Takes note of objects that this owner has not committed itself, if there are any."""
        known = self._wal.tiered or 0
        last = self.owned.last
        if last is None or last.end <= known:
            return
        # First: where this fails, nothing was noted, and the next look comes by here again.
        size_bytes = sum(
            described.size_bytes
            for described, _ in self.owned.catalog.descriptors(known, last.end)
            if described.start >= known
        )
        self._behind_since = None
        self.last_error = None
        self._lag_base -= size_bytes
        self._wal.note_tiered(min(last.end, self._wal.synced))
        if self._wal.tiered == self._wal.synced:
            self._lag_base, self._lag_mark = 0, self._wal.synced_bytes_total
            self.is_wanted = False
        self.apply_pressure()
        source = self._source()
        try:
            self._save_checkpoint(last, source.place_of(last.end))
        except IsterError as error:
            _log.debug("no checkpoint", extra={"topic": self.owned.topic, "error": str(error)})
        finally:
            source.close()

    def _next_start(self) -> int:
        start = self.owned.tiered if self.owned.last is not None else self._wal.trimmed
        if start < self._wal.trimmed:
            raise DataGapError(
                "the bucket ends before the local files begin",
                start=start,
                end=self._wal.trimmed,
                topic=self.owned.topic,
            )
        return start

    def _note_object(self, described: ObjectDescriptor, place: tuple[int, int]) -> None:
        self._wal.note_tiered(described.end)
        self._lag_base -= described.size_bytes
        self.apply_pressure()
        self._save_checkpoint(described, place)

    def _save_checkpoint(self, described: ObjectDescriptor, place: tuple[int, int]) -> None:
        directory = self._wal.directory
        if directory is None:
            return
        checkpoint = UploaderCheckpoint(
            last_committed_offset=described.end - 1,
            last_read_file_seq=place[0],
            last_read_byte_position=place[1],
            last_object_id=described.object_id,
            updated_at=self._clock.now_ns() // 1_000_000_000,
        )
        try:
            directory.save_uploader(checkpoint)
        except IsterError as error:
            # The catalog is the truth; this is for those who look at the directory alone.
            _log.warning(
                "uploader checkpoint not saved",
                extra={"topic": self.owned.topic, "error": str(error)},
            )

    def _note_failure(self, error: IsterError) -> None:
        self.last_error = error
        self._failures += 1
        pause = min(_RETRY_SECONDS_MAX, _RETRY_SECONDS_MIN * 2 ** min(self._failures, 10))
        # Topics that failed together must not come back together.
        pause *= random.uniform(0.5, 1.0)  # noqa: S311
        self._failed_at = self._clock.monotonic()
        self._retry_at = self._failed_at + pause
        self._metrics.count("uploader.errors_total")
        _log.warning(
            "upload failed",
            extra={"topic": self.owned.topic, "error": str(error), "retry_seconds": pause},
        )

    def _source(self) -> WalReader:
        return WalReader(
            self._wal,
            chunk_bytes=self._tiers.storage.uploader.stream_chunk_size // 2,
            metrics=self._metrics,
            clock=self._clock,
        )

    def apply_pressure(self) -> None:
        """Keeps producers back while too much waits for its upload, and lets them go after."""
        limit = self._tiers.storage.uploader.max_lag_bytes
        with self._pressing:
            lag = self.lag_bytes
            if lag > limit and not self._is_held:
                self._is_held = True
                self._wal.hold("lag", self._lag_error, waits=True)
                self._on_wanted()
            elif lag <= limit * _RELIEF and self._is_held:
                self._is_held = False
                self._wal.unhold("lag")

    def _lag_error(self) -> CapacityError:
        reason = f": {self.last_error.message}" if self.last_error is not None else ""
        return CapacityError(
            f"{self.lag_bytes} bytes wait for their upload{reason}",
            topic=self.owned.topic,
            hint="it goes on when the bucket has caught up; "
            "storage.uploader.max_lag_bytes sets the limit",
        )

    # -- retention --------------------------------------------------------------------------

    def trim(self) -> int:
        """Removes the local files that retention does not keep, once the bucket surely has them.

        File by file: a file that passed its check is removed even if a later one fails.

        Returns:
            How many.

        Raises:
            IsterError: A check or a removal failed; later files were not removed.
        """
        wal, retention = self._wal, self._tiers.storage.wal.retention
        with self._trimming:
            if self._stopping.is_set():
                return 0
            step = self._tiers.node_clock.check()
            floor = self._subscription_floor(include_inactive=step is not None)
            before = plan_trim(
                list_files(wal),
                # The catalog's end may be known before the log's own mark says so, for a moment or,
                # where an answer was lost, until the next upload. Readers go by the mark.
                safe_before=min(self.owned.tiered, wal.tiered or 0, floor),
                now_ms=self._clock.now_ns() // 1_000_000,
                time_minutes=retention.time_minutes if step is None else None,
                size_mb=retention.size_mb,
                correct_ms=self._tiers.node_clock.correct_ms,
            )
            if before is None or before <= wal.trimmed:
                return 0
            return self._trim(before)

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
        """Removes local files whose upload is verified, whatever retention says; how many.

        For a disk that is low: such files are only a cache. Removes one after the other until
        `is_enough` returns True.

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
            while not self._stopping.is_set():
                safe_before = min(self.owned.tiered, wal.tiered or 0)
                before = wal.next_trim(safe_before)
                if before is None:
                    return count
                if floor == -1:
                    floor = self._subscription_floor(
                        include_inactive=self._tiers.node_clock.check() is not None
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

    def _subscription_floor(self, *, include_inactive: bool) -> int:
        """The lowest offset that an active subscription has not read.

        Args:
            include_inactive: Consider all subscriptions, because an untrusted clock cannot tell
                which ones are active.
        """
        retention, correct_ms = self._tiers.storage.wal.retention, self._tiers.node_clock.correct_ms
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

    def assure_local(self) -> None:
        """Makes sure that the bucket holds, whole, everything that is in local files.

        Raises:
            IsterError: It does not, and could not be made to.
        """
        with self._trimming:
            self.check_owner()
            self._assure(self._wal.trimmed, self._wal.next)

    def _assure(self, start: int, end: int, assured: set[tuple[str, int]] | None = None) -> None:
        """Makes sure that the bucket holds a range, whole and readable, and repairs what is not.

        Args:
            start: The first offset.
            end: The offset after the last one.
            assured: Objects that were already checked; extended by those checked now.

        Raises:
            DataGapError: The catalog has a hole there.
            IsterError: An object is bad and could not be uploaded again.
        """
        content = self._tiers.storage.wal.retention.verify is Verify.CONTENT
        assured = set() if assured is None else assured
        # Objects may be merged while they are read: what has taken their place is looked at, too.
        while self._assure_new(start, end, assured, content=content):
            pass

    def _assure_new(
        self, start: int, end: int, assured: set[tuple[str, int]], *, content: bool
    ) -> bool:
        """Walks over a range and checks what is not in `assured`; whether there was such."""
        has_new = False
        # What has expired in the bucket is not owed any more. But an expiry that was interrupted is
        # on record before its objects are out of the catalog, and those are still read.
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
        """Checks an object, and uploads it again where it is bad; whether it was."""
        key = object_key(self.owned.catalog.keys.topic, described.object_id)
        chunk_bytes = self._tiers.storage.cloud_reader.fetch_chunk_size
        try:
            if content:
                verify_content(self._tiers.objects, key, described, chunk_bytes=chunk_bytes)
            else:
                verify_size(self._tiers.objects, key, described.size_bytes)
        except (NotFoundError, CorruptDataError) as error:
            if described.start < self._wal.trimmed or described.kept:
                # Local files may have what compaction has left out, and it would come back.
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
            The names of those that were not, and were uploaded again.

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
            content: Read them; else only look whether they are there, with their size.
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
        """Reads the local files whole; what is wrong with them, or None."""
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
        """Removes the objects that bucket retention does not keep; how many."""
        retention = self._tiers.storage.cloud.retention
        if retention.time_minutes is None and retention.size_mb is None:
            return 0
        with self._trimming:
            if self._stopping.is_set():
                return 0
            step = self._tiers.node_clock.check()
            self.owned.check()
            found = self._all_known()
            if found is None:
                _log.warning("retention waits: objects overlap", extra={"topic": self.owned.topic})
                return 0
            planned = plan_expiry(
                found,
                now_ms=self._clock.now_ns() // 1_000_000,
                time_minutes=retention.time_minutes if step is None else None,
                size_mb=retention.size_mb,
                correct_ms=self._tiers.node_clock.correct_ms,
            )
            return expire(self.owned, self._tiers.objects, planned, metrics=self._metrics)

    def _all_known(self) -> list[ObjectDescriptor] | None:
        """The topic's objects, ascending; None if they are merged faster than they are read."""
        for _ in range(_WALKS_MAX):
            known = self.owned.tiered
            found = [
                # Without their indexes: a topic may have very many objects. And without what was
                # committed although the answer was lost: the newest one that is known stays.
                replace(described, offset_index=(), publish_time_index=())
                for described, _ in self.owned.catalog.descriptors()
                if described.end <= known
            ]
            # Objects that are merged under the walk may come as they were, and merged: their bytes
            # would count twice.
            if all(before.end <= after.start for before, after in pairwise(found)):
                return found
        return None

    def collect_orphans(self) -> list[str]:
        """Removes objects that belong to nothing, after their grace period; their names.

        Staged rows that no batch needs are such, too.
        """
        with self._uploading:
            if self._stopping.is_set() or self._tiers.node_clock.check() is not None:
                return []
            objects = self._tiers.objects
            storage = self._tiers.storage
            grace_seconds = storage.cloud.orphan_grace_minutes * 60
            keys = PipelineKeys(storage.metadata.root_prefix)
            has_jobs = partial(keys.has_jobs, self._tiers.metadata)
            if has_jobs():
                # Its objects are not named by anything until it commits them.
                grace_seconds = max(grace_seconds, _JOB_GRACE_SECONDS)
            return [
                *collect_orphans(
                    self.owned,
                    objects,
                    grace_seconds=grace_seconds,
                    clock=self._clock,
                    metrics=self._metrics,
                    has_jobs=has_jobs,
                    correct_ms=self._tiers.node_clock.correct_ms,
                ),
                *sweep_staging(self.owned, objects, grace_seconds=grace_seconds, clock=self._clock),
            ]
