"""Uploads of one topic: when they are due, the upload itself, and how far behind they are.

Only synced messages are uploaded, and `tiered` moves over a gapless prefix. One upload runs at a
time. A process whose lease is not certainly valid acknowledges nothing.

Messages of a topic that shares express objects (`ister.topic.express`) are uploaded with those of
other topics, as soon as they are synced; `upload` still writes an object of this topic alone. If
both happen at once, one of them commits.

A pipeline may upload in this owner's name: `follow` reads what it has committed. If both upload at
once, one of them commits, and the other one continues from there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from ister.base.guarded_lock import endless_error
from ister.base.model import AckLevel
from ister.base.retry import backoff_seconds
from ister.bucket.express import ExpressObject
from ister.bucket.ownership import OwnedTopic
from ister.config import Engine
from ister.errors import (
    CapacityError,
    ClosedError,
    ConflictError,
    CorruptDataError,
    DataGapError,
    DiskError,
    FencedError,
    IsterError,
)
from ister.format.checkpoint import UploaderCheckpoint
from ister.format.descriptor import FORMAT_EXPRESS, ObjectDescriptor
from ister.format.frame import FrameBatch
from ister.topic.idle_mark import IdleMark
from ister.topic.pace import PacedReader
from ister.topic.resorting import RunSorter
from ister.topic.stores import Stores
from ister.wal.log import Wal
from ister.wal.reader import WalReader
from ister.wal.signals import is_held

_log = logging.getLogger("ister.topic.uploads")

_RETRY_SECONDS_MIN: Final = 1.0
_RETRY_SECONDS_MAX: Final = 60.0
# While low disk space stops appends.
_RETRY_SECONDS_PRESSED: Final = 5.0
# How often commits of a pipeline are read.
_FOLLOW_SECONDS: Final = 1.0
# A pipeline may be slow to start, and slow once.
_PATIENCE_SECONDS: Final = 60.0
# A hold on producers ends when the lag is clearly below its limit, not just under it.
_RELIEF: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadResult:
    """What an upload cycle has moved: the offsets `start` up to, not including, `end`."""

    start: int
    end: int
    objects: tuple[ObjectDescriptor, ...] = ()

    def __repr__(self) -> str:
        names = ", ".join(described.object_id for described in self.objects)
        return f"{type(self).__name__}(start={self.start}, end={self.end}, objects=<{names}>)"

    @property
    def size_bytes(self) -> int:
        """The size of the objects."""
        return sum(described.size_bytes for described in self.objects)


def fenced_error(topic: str) -> FencedError:
    """The error of calls to a topic that this process has lost."""
    return FencedError("another owner has the topic", topic=topic)


class ExpressUploads(Protocol):
    """Uploads the messages of several topics together."""

    def enlist(self, uploads: TopicUploads) -> None:
        """Has the next object include the topic; called after every sync, must not block."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """Messages of a topic that were added to an express object."""

    uploads: TopicUploads
    plan: int
    is_all: bool
    """Whether it has all messages that were synced."""


class UploadWatcher(Protocol):
    """What the uploads of a topic tell those that run them; each call must not block."""

    def on_wanted(self) -> None:
        """An upload should not wait for its time."""
        ...

    def on_backlog(self) -> None:
        """Messages were synced while the topic is not listed."""
        ...

    def on_runs(self) -> None:
        """There may be runs to re-sort, and there were none before."""
        ...

    def on_append(self) -> None:
        """An append waits until the mark of the idle topic was removed."""
        ...


class NoWatcher:
    """The `UploadWatcher` of a topic without background threads."""

    def on_wanted(self) -> None:
        """Nobody uploads."""

    def on_backlog(self) -> None:
        """Nobody uploads."""

    def on_runs(self) -> None:
        """Nobody re-sorts."""

    def on_append(self) -> None:
        """Nobody sets marks."""


class TopicUploads:
    """Uploads of one topic. Thread-safe."""

    def __init__(self, *, wal: Wal, owned: OwnedTopic, stores: Stores, backlog_bytes: int) -> None:
        """Takes over a topic that was claimed and whose log was recovered.

        `backlog_bytes`: about how much of the local files is not tiered yet.
        """
        self._wal = wal
        self.owned = owned
        self._stores = stores
        self._clock = stores.clock
        self._metrics = stores.metrics
        self._stopping = threading.Event()
        self.uploader = stores.uploader(owned, self._stopping.is_set)
        """Makes objects; its callers hold `lock`."""
        # Reentrant, so that its holder is known: `check_upload`.
        self.lock = threading.RLock()
        """Held while objects are added or replaced."""
        self._lag_base = backlog_bytes
        self._lag_mark = 0
        self._cycle_at = -float("inf")
        self._retry_at = -float("inf")
        self._failed_at = -float("inf")
        self._follow_at = -float("inf")
        self._behind_since: float | None = None
        self._failures = 0
        self.upload_error: IsterError | None = None
        """Why the last upload failed; None if it succeeded."""
        # Reentrant for the same reason.
        self._beginning = threading.RLock()
        self._has_begun = False
        self.begin_at = -float("inf")
        """When `background` calls `begin_term` again; set by `background`."""
        self.is_wanted = False
        """Whether a caller waits for `tiered`."""
        self.is_submitted = False
        """Whether a cycle waits for a thread or runs; set by `background`."""
        self.watcher: UploadWatcher = NoWatcher()
        """Runs the uploads; set by `background`."""
        self.express: ExpressUploads | None = None
        """Uploads the topic's messages with those of others, if it shares express objects."""
        self.idle_mark = IdleMark(
            wal,
            owned,
            after_seconds=stores.storage.metadata.lease_ttl_seconds,
            on_append=lambda: self.watcher.on_append(),  # noqa: PLW0108 - set later
        )
        """Says in the record that the bucket has everything, while the topic is idle."""
        self._is_held = False
        self._pressing = threading.Lock()
        self.is_listed = False
        """Whether `background` checks it a few times a second; set by `background`."""
        uploader = stores.storage.uploader
        self.is_express = uploader.engine is not Engine.NONE and (
            uploader.express.all_topics or wal.settings.ack is AckLevel.TIERED
        )
        """Whether the topic shares express objects."""
        # Where the next run begins while earlier ones are on their way, and which plan that is:
        # after a failure, those that were planned to follow the failed one do not count.
        self._runs_end = 0
        self._runs_plan = 0
        self._runs_place: tuple[int, int] = (-1, 0)
        self.sorter = RunSorter(
            wal=wal,
            owned=owned,
            stores=stores,
            open_files=self._paced_source,
            on_runs=lambda: self.watcher.on_runs(),  # noqa: PLW0108 - set later
            is_stopping=self._stopping.is_set,
            is_express=self.is_express,
        )
        """Re-sorts the topic's runs in express objects."""
        wal.levels.advance_tiered(min(owned.tiered, wal.synced))

    # -- what it is -------------------------------------------------------------------------

    @property
    def lag_bytes(self) -> int:
        """About how many synced bytes are not in the bucket yet."""
        if self._wal.synced <= (self._wal.tiered or 0):
            return 0
        return max(0, self._lag_base + self._wal.committer.synced_bytes_total - self._lag_mark)

    @property
    def last_error(self) -> IsterError | None:
        """Why the last upload or re-sorting failed; None if both succeeded."""
        return self.upload_error or self.sorter.last_error

    @property
    def failures(self) -> int:
        """Upload cycles that failed since the last good one."""
        return self._failures

    def want_upload(self) -> None:
        """Has an upload begin soon; must not block."""
        if self.is_express:
            self._join_express()
            return
        self.is_wanted = True
        self.watcher.on_wanted()

    def on_synced(self) -> None:
        """Has what was synced uploaded in time; must not block."""
        if self.is_express:
            self._join_express()
        if not self.is_listed:
            self.watcher.on_backlog()

    def _join_express(self) -> None:
        express = self.express  # once: a topic that is closed meanwhile leaves
        if express is not None:
            express.enlist(self)

    # -- the term ---------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether the bucket has the term of this owner; see `begin_term`."""
        return self._has_begun

    def begin_term(self) -> None:
        """Records in the bucket that this process owns the topic, once; before the first upload.

        Without a local checkpoint of the term, because the disk is full or the topic is closed,
        nothing is recorded: the local files would look older than the bucket.

        Raises:
            FencedError: The bucket knows a later owner, or messages that the catalog does not have:
                the topic has to be opened again.
        """
        with self._beginning:
            if self._has_begun:
                return
            try:
                if not self._wal.save_checkpoint(with_term=True):
                    return
            except (CapacityError, DiskError):
                return
            try:
                self._stores.begin_term(self.owned, self._wal.synced)
            except ConflictError as error:
                self.owned.give_up(error)
                raise fenced_error(self.owned.topic) from error
            self._has_begun = True

    # -- the end ----------------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        """Whether no upload begins any more."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Ends a running upload soon; no other one begins."""
        self._stopping.set()

    # -- uploads ----------------------------------------------------------------------------

    def check_upload(self) -> None:
        """Refuses to wait for an upload in the thread that uploads, where a finalizer may run.

        Raises:
            InvalidRequestError: This thread uploads, or records the term for an express object.
        """
        if is_held(self.lock) or is_held(self._beginning):
            raise endless_error()

    @property
    def is_idle(self) -> bool:
        """Whether everything is uploaded and no producer waits: nothing is due."""
        wal = self._wal
        return wal.next == (wal.tiered or 0) and not self._is_held

    def is_due(self, now: float) -> bool:
        """Whether a cycle should begin: by time, by size, or because a caller waits."""
        if self.is_express or self._wal.synced <= (self._wal.tiered or 0):
            return False
        is_pressed = self._stores.is_disk_low()
        retry_at = self._retry_at
        if is_pressed:
            retry_at = min(retry_at, self._failed_at + _RETRY_SECONDS_PRESSED)
        if self.owned.is_fenced or self._stopping.is_set() or now < retry_at:
            return False
        settings = self._stores.storage.uploader
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
        settings, last = self._stores.storage.uploader, self.owned.last
        if self._wal.synced <= (self._wal.tiered or 0):
            return False
        made_at = last.created_at if last is not None else self.owned.record.created_at
        return (
            self.lag_bytes >= settings.max_batch_bytes
            or now_seconds - made_at >= settings.interval_seconds
        )

    def upload(
        self, *, is_crowded: Callable[[], bool] = lambda: False, is_paced: bool = True
    ) -> UploadResult:
        """One cycle: everything that is synced by now goes into the bucket.

        `is_crowded`: called after each object; if other topics wait for a thread, the cycle ends,
        and the next one continues.
        `is_paced`: whether the upload slows down in favour of producers in this process.

        Raises:
            DataGapError: The bucket ends before the local files begin.
            CorruptDataError: A local frame is damaged; what precedes it was uploaded.
            UnavailableError: A store does not answer; the next cycle continues from there.
        """
        self.check_upload()
        with self.lock:
            if self._stopping.is_set():
                raise ClosedError("the topic is closed", topic=self.owned.topic)
            began = self._clock.monotonic()
            self._cycle_at = began
            if self._failures:
                self._metrics.count("upload.retries")
            was_wanted, self.is_wanted = self.is_wanted, False
            try:
                tiered = self._upload(is_crowded, is_paced=is_paced)
            except BaseException as error:
                # The callers still wait.
                self.is_wanted = self.is_wanted or was_wanted
                if isinstance(error, IsterError) and not self._stopping.is_set():
                    self._record_failure(error)
                raise
            finally:
                self._metrics.observe(
                    "uploader.cycle_duration_seconds", self._clock.monotonic() - began
                )
            self._failures = 0
            self._retry_at = -float("inf")
            self.upload_error = None
            # A pipeline that has not uploaded this topic gets another chance.
            self._behind_since = None
            return tiered

    def _upload(self, is_crowded: Callable[[], bool], *, is_paced: bool) -> UploadResult:
        wal = self._wal
        mark, synced = wal.committer.synced_bytes_total, wal.synced
        # A commit that seemed to have failed may have happened, or a pipeline has committed.
        self.owned.refresh()
        self._record_pipeline_uploads()
        wal.levels.advance_tiered(min(self.owned.tiered, synced))
        first = start = self._next_start()
        objects: list[ObjectDescriptor] = []
        source = self._paced_source() if is_paced else self.open_files()
        try:
            self.begin_term()
            while (described := self._upload_next(source, start, synced)) is not None:
                start = described.end
                objects.append(described)
                self._record_object(described, source.place)
                if start < synced and is_crowded():
                    self.is_wanted = True
                    return UploadResult(start=first, end=start, objects=tuple(objects))
        finally:
            source.close()
            self.apply_pressure()
        self._lag_base, self._lag_mark = 0, mark
        self.apply_pressure()
        return UploadResult(start=first, end=start, objects=tuple(objects))

    def _upload_next(self, source: WalReader, start: int, synced: int) -> ObjectDescriptor | None:
        """The next object; if a pipeline was faster, the one after the pipeline's."""
        while True:
            try:
                return self.uploader.upload(source, start, synced)
            except ConflictError:
                if self.owned.tiered <= start:
                    raise
                self._record_pipeline_uploads()
                start = self.owned.tiered

    # -- express objects --------------------------------------------------------------------

    def add_run(self, made: ExpressObject, bytes_max: int) -> PlannedRun | None:
        """Adds synced messages that are not in the bucket, nor on their way, to an express object.

        `bytes_max`: about how many bytes to add at most; at least one message is added.
        Returns what was added, for `take_run` and `take_run_failure`; None if there is nothing.

        Raises:
            DataGapError: The bucket ends before the local files begin.
            CorruptDataError: The next frame is damaged.
            IsterError: The topic's manifest could not be saved.
        """
        if self._stopping.is_set() or self.owned.is_fenced:
            return None
        plan = self._runs_plan
        begin, synced = self._next_start(), self._wal.synced
        start, has_objects = max(begin, self._runs_end), self.owned.last is not None
        if start >= synced:
            # A pipeline or a call of `upload` may have been faster.
            self._advance(min(self.owned.tiered, synced))
            return None
        self._stores.assure_manifest(self.owned)
        self.begin_term()
        source = self.open_files()
        try:
            source.start_at(self._runs_end, self._runs_place)
            frames = _fetch_sound(source, start, synced, bytes_max)
            end = frames[-1].next_offset
            arrived_ms = source.arrived_ms(start, end)
        finally:
            source.close()
        if arrived_ms is not None:
            arrived_ms = self._stores.node_clock.correct_ms(arrived_ms)
        made.add(
            self.owned,
            start,
            frames,
            arrived_ms=arrived_ms,
            is_first=start == begin and not has_objects,
        )
        if self._failures:
            self._metrics.count("upload.retries")
        self._runs_end, self._runs_place = end, source.place
        if plan != self._runs_plan:
            # An earlier run has failed meanwhile, so that this one cannot be committed either.
            self._runs_end = 0
        return PlannedRun(uploads=self, plan=plan, is_all=end >= synced)

    def take_run(self, described: ObjectDescriptor) -> None:
        """Records a run that was committed."""
        self._failures = 0
        self.upload_error = None
        self._lag_base -= described.size_bytes
        self._advance(described.end)
        self.sorter.add_run(described)

    def take_run_conflict(self, plan: int) -> None:
        """Finds out what was committed instead of a run, by another process or thread."""
        self._plan_runs_anew(plan)
        self.owned.refresh()
        self._advance(min(self.owned.tiered, self._wal.synced))
        last = self.owned.last
        if last is not None and last.format == FORMAT_EXPRESS:
            self.sorter.add_run(last)  # it may be this run: the answer to its commit was lost

    def take_run_failure(self, error: IsterError, plan: int) -> None:
        """Records the error of a run; `ister.topic.express` decides when to retry."""
        self._plan_runs_anew(plan)
        self.upload_error = error
        self._failures += 1
        self.apply_pressure()

    def _plan_runs_anew(self, plan: int) -> None:
        if plan == self._runs_plan:
            self._runs_plan += 1
            self._runs_end = 0

    def _advance(self, end: int) -> None:
        self._wal.levels.advance_tiered(end)
        mark = self._wal.committer.synced_bytes_total
        if self._wal.tiered == self._wal.synced:
            self._lag_base, self._lag_mark = 0, mark
            self.is_wanted = False
        self.apply_pressure()

    def resort(self) -> ObjectDescriptor | None:
        """Re-sorts the oldest runs, if they are due; as `RunSorter.resort`."""
        with self.lock:
            return self.sorter.resort()

    # -- uploads of a pipeline --------------------------------------------------------------

    def is_follow_due(self, now: float) -> bool:
        """Whether it is time to read what a pipeline has committed."""
        if self.is_express or self._stopping.is_set() or self.owned.is_fenced:
            return False
        if self._wal.synced <= (self._wal.tiered or 0):
            self._behind_since = None
            return False
        return now >= self._follow_at

    def is_left_behind(self, now: float) -> bool:
        """Whether a pipeline that should upload this topic has not done so for far too long."""
        settings, ttl = (
            self._stores.storage.uploader,
            self._stores.storage.metadata.lease_ttl_seconds,
        )
        since = self._behind_since
        patience = max(_PATIENCE_SECONDS, 4 * ttl, 6 * settings.interval_seconds)
        return since is not None and now - since > patience

    def follow(self) -> int:
        """Reads what was committed in this owner's name; returns the new `tiered`."""
        now = self._clock.monotonic()
        self._follow_at = now + _FOLLOW_SECONDS
        if self._behind_since is None:
            self._behind_since = now
        if not self.lock.acquire(blocking=False):
            return self._wal.tiered or 0  # a running upload reads it by itself
        try:
            self.owned.refresh()
            self._record_pipeline_uploads()
        finally:
            self.lock.release()
        return self._wal.tiered or 0

    def _record_pipeline_uploads(self) -> None:
        """Advances `tiered` over objects that a pipeline has committed, if there are any."""
        known = self._wal.tiered or 0
        last = self.owned.last
        if last is None or last.end <= known:
            return
        # First: if this fails, nothing was changed, and the next call tries again.
        size_bytes = sum(
            described.size_bytes
            for described, _ in self.owned.catalog.descriptors(known, last.end)
            if described.start >= known
        )
        self._behind_since = None
        self.upload_error = None
        self._lag_base -= size_bytes
        self._advance(min(last.end, self._wal.synced))
        source = self.open_files()
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

    def _record_object(self, described: ObjectDescriptor, place: tuple[int, int]) -> None:
        self._wal.levels.advance_tiered(described.end)
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
            # The catalog is the truth; the checkpoint is for readers of the directory alone.
            _log.warning(
                "uploader checkpoint not saved",
                extra={"topic": self.owned.topic, "error": str(error)},
            )

    def _record_failure(self, error: IsterError) -> None:
        self.upload_error = error
        self._failures += 1
        pause = backoff_seconds(self._failures, first=_RETRY_SECONDS_MIN, most=_RETRY_SECONDS_MAX)
        self._failed_at = self._clock.monotonic()
        self._retry_at = self._failed_at + pause
        self._metrics.count("uploader.errors_total")
        _log.warning(
            "upload failed",
            extra={"topic": self.owned.topic, "error": str(error), "retry_seconds": pause},
        )

    def open_files(self) -> WalReader:
        """A reader of the local files."""
        return WalReader(
            self._wal,
            chunk_bytes=self._stores.storage.uploader.stream_chunk_size // 2,
            metrics=self._metrics,
            clock=self._clock,
        )

    def _paced_source(self) -> WalReader:
        """A reader for uploads that no caller waits for."""
        return PacedReader(
            self._wal,
            chunk_bytes=self._stores.storage.uploader.stream_chunk_size // 2,
            metrics=self._metrics,
            clock=self._clock,
            may_pause=self._may_pause,
            sleep=self._stopping.wait,
        )

    def _may_pause(self) -> bool:
        """Whether an upload may pause in favour of producers."""
        return not (
            self._wal.levels.is_tiered_wanted
            or self._is_held
            or self.lag_bytes > self._stores.storage.uploader.max_lag_bytes // 4
            or self._stores.is_disk_low()
        )

    def apply_pressure(self) -> None:
        """Holds producers while the upload backlog is too large, and releases them afterwards."""
        limit = self._stores.storage.uploader.max_lag_bytes
        with self._pressing:
            lag = self.lag_bytes
            if lag > limit and not self._is_held:
                self._is_held = True
                self._wal.gate.hold("lag", self._lag_error, waits=True)
                self.want_upload()
            elif lag <= limit * _RELIEF and self._is_held:
                self._is_held = False
                self._wal.gate.unhold("lag")

    def _lag_error(self) -> CapacityError:
        reason = f": {self.upload_error.message}" if self.upload_error is not None else ""
        return CapacityError(
            f"{self.lag_bytes} bytes wait for their upload{reason}",
            topic=self.owned.topic,
            hint="appends resume when the bucket has caught up; "
            "storage.uploader.max_lag_bytes sets the limit",
        )


def _fetch_sound(source: WalReader, start: int, end: int, bytes_max: int) -> list[FrameBatch]:
    """The next frames of a range, about `bytes_max`; only those before a damaged one.

    Raises:
        CorruptDataError: The first frame is damaged.
    """
    frames: list[FrameBatch] = []
    try:
        while start < end and bytes_max > 0:
            frames.append(source.fetch(start, end, bytes_max=bytes_max))
            start = frames[-1].next_offset
            bytes_max -= frames[-1].end - frames[-1].starts[0]
    except CorruptDataError:
        if not frames:
            raise
    return frames
