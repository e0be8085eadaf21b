"""Finds the topics that `tier` has to upload, up to which offset, and reports on them.

    record, files or owner ─► what is durable ─► what the bucket lacks ─► is it due?

Owns: what the driver caches of topics between cycles, so that a topic without anything new costs
one small file; pauses after failures; the report. Does not own: plans and commits (`tier_job`).

The metadata of all topics is read at once (`ister.bucket.directory`). Only topics with something to
upload are examined one by one.

The owner's checkpoint says what is durable, or the owner itself by Flight, found in the metadata
store. It is not contacted if the store shows that the bucket has everything. A topic whose owner
cannot be reached is an error in the report, and does not delay the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from ister.base.limits import CHECKPOINT_INTERVAL_SECONDS, KIB
from ister.base.model import AckLevel
from ister.base.retry import backoff_seconds
from ister.bucket.directory import TopicEntry
from ister.bucket.membership import is_node_running
from ister.errors import (
    ConflictError,
    CorruptDataError,
    IsterError,
    WaitsForDiskError,
)
from ister.format.records import TopicRecord
from ister.spark.jobs.job import Job
from ister.spark.jobs.job_report import ErrorFields, JobReport
from ister.spark.owners import read_watermarks, waits_for_disk
from ister.topic.local_tail import LocalTail

_log = logging.getLogger("ister.spark.jobs.tier_topics")

_RECORD_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.05
# Two checkpoints: one may be on its way with less than is there.
_CATCH_UP_SECONDS: Final = 2 * CHECKPOINT_INTERVAL_SECONDS + 0.5
_RETRY_SECONDS_MIN: Final = 1.0
_RETRY_SECONDS_MAX: Final = 60.0
_ALL_TIERED: Final = "everything is in the bucket"


@dataclass(slots=True)
class CachedTopic:
    """What the driver caches of a topic between two cycles."""

    topic: str
    record: TopicRecord | None = None
    has_owner: bool = False
    is_stale: bool = False
    """Whether the record has to be read, and the files located, again."""
    files: LocalTail | None = None
    """The owner's files, if they are on this machine."""
    is_elsewhere: bool = False
    """Whether the owner has to be asked what is durable."""
    begin: int | None = None
    """Where the next upload starts, as far as is known."""
    made_at: int = 0
    """When the newest object was made, in seconds since the Unix epoch."""
    bytes_each: int = KIB
    """Approximate size of a message of this topic in the bucket."""
    failures: int = 0
    retry_at: float = -float("inf")
    error: ErrorFields | None = None
    """The last failure, as it is in the report."""

    @property
    def can_be_read(self) -> bool:
        """Whether its durable offsets can be read: here, or from its owner."""
        return self.files is not None or self.is_elsewhere


class _Span(NamedTuple):
    """Offsets that are in the owner's files and durable."""

    trimmed: int
    synced: int


@dataclass(slots=True)
class Cycle:
    """What a cycle did, over all topics."""

    due: int = 0
    """Number of topics that had something to upload."""
    objects: int = 0
    messages: int = 0
    bytes: int = 0
    failed: int = 0
    """Number of topics that failed."""


class TierTopics:
    """The topics of one job. Used by one thread at a time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._place = job.place
        self._storage = job.place.config.storage
        self._clock = job.clock
        self._topics: dict[str, CachedTopic] = {}
        self._report = job.report
        self._says_all = True
        self._read_at = -float("inf")
        self._reads = 0
        self._pause = threading.Event()

    # -- due topics -------------------------------------------------------------------------

    def find_due(
        self,
        topics: Sequence[str],
        cycle: Cycle,
        *,
        report: JobReport,
        interval_seconds: float | None,
    ) -> list[tuple[CachedTopic, int]]:
        """Returns the topics that have something to upload, and up to which offset.

        Args:
            topics: Names of topics.
            cycle: Counts failures.
            report: Receives failures, from now on.
            interval_seconds: Minimum age of a topic's newest object; None for all topics that have
                anything, and to report why the others do not.
        """
        self._report, self._says_all = report, interval_seconds is None
        for name in self._topics.keys() - set(topics):
            # Its error would otherwise stay in the report.
            self._forget_error(self._topics.pop(name))
        now = self._clock.monotonic()
        known_topics = [self._topics.setdefault(name, CachedTopic(name)) for name in topics]
        looked_at = [one for one in known_topics if self._says_all or now >= one.retry_at]
        examined = self._find_all(looked_at, now, cycle)
        spans = self._spans(examined, cycle)
        self._read_pointers([one for one in examined if one.topic in spans], spans)
        wanted: list[tuple[CachedTopic, int]] = []
        for known in examined:
            span = spans.get(known.topic)
            if span is None:
                continue
            if known.begin is not None and span.synced <= known.begin:
                self.say(known, known.begin, known.begin, skipped=_ALL_TIERED)
                continue
            try:
                begin = self._read_bucket(known, span)
                if span.synced <= begin:
                    self.say(known, begin, begin, skipped=_ALL_TIERED)
                elif interval_seconds is None or self._is_due(known, span, interval_seconds):
                    wanted.append((known, span.synced))
            except IsterError as error:
                self.fail(known, error, cycle)
        return wanted

    def _find_all(
        self, looked_at: Sequence[CachedTopic], now: float, cycle: Cycle
    ) -> list[CachedTopic]:
        """Reads records and locates files; returns the topics whose durable offsets can be read."""
        directory = self._job.directory
        is_stale = any(known.is_stale for known in looked_at)
        # Listing the topics for this cycle has read the same.
        is_read = directory.reads > self._reads and not is_stale
        is_known = not is_stale and all(known.record is not None for known in looked_at)
        is_recent = is_known and now - self._read_at < _RECORD_SECONDS
        if is_recent and not is_read and not self._says_all:
            return [known for known in looked_at if known.can_be_read]
        entries = directory.entries if is_read else directory.read()
        self._read_at, self._reads = now, directory.reads
        found = [known for known in looked_at if self._find(known, entries, cycle)]
        self._locate_elsewhere([known for known in found if known.files is None], cycle)
        return [known for known in found if known.can_be_read]

    def _find(self, known: CachedTopic, entries: Mapping[str, TopicEntry], cycle: Cycle) -> bool:
        """Locates a topic's files; returns whether the topic exists and has a readable record."""
        entry = entries.get(known.topic)
        known.is_elsewhere = False
        if entry is None:
            known.record, known.files, known.begin = None, None, None
            self.say(known, skipped="the topic was deleted")
            return False
        if entry.record is None:
            self.fail(known, entry.error or CorruptDataError("not a topic record"), cycle)
            return False
        record, before = entry.record, known.record
        if before is None or before.incarnation != record.incarnation:
            known.begin = None
        known.has_owner = entry.owner is not None
        if known.files is None or known.is_stale or before != record:
            known.files = self._place.local_tail(known.topic, record.node, record.incarnation)
        known.record, known.is_stale = record, False
        return True

    def _locate_elsewhere(self, away: Sequence[CachedTopic], cycle: Cycle) -> None:
        """Finds the topics of which another machine may have messages that the bucket lacks."""
        unsure: list[tuple[CachedTopic, TopicRecord]] = []
        for known in away:
            record = known.record
            if record is None or not record.lineage:
                self.say(known, skipped=_ALL_TIERED)
            elif known.has_owner and (record.ack is AckLevel.TIERED or record.acked_end is None):
                known.is_elsewhere = True  # producers may wait for the upload
            else:
                unsure.append((known, record))
        directory = self._job.directory
        seals = directory.seals([known.topic for known, _ in unsure if not known.has_owner])
        pointers = directory.pointers([known.topic for known, _ in unsure])
        running: dict[str, bool] = {}
        for known, record in unsure:
            pointer = pointers.get(known.topic)
            try:
                tiered = pointer.value.end if pointer is not None else 0
                if tiered is None:
                    last = self._job.catalog(known.topic).last()
                    tiered = last.end if last is not None else 0
                if known.topic in seals or record.is_whole(tiered):
                    self.say(known, skipped=_ALL_TIERED)
                    continue
                if not known.has_owner and record.node not in running:
                    root = self._storage.metadata.root_prefix
                    running[record.node] = is_node_running(self._job.store, root, record.node)
                if not known.has_owner and not running[record.node]:
                    raise waits_for_disk(known.topic, record.node, tiered)
                known.is_elsewhere = True
            except IsterError as error:
                self.fail(known, error, cycle)

    def _read_pointers(self, examined: Sequence[CachedTopic], spans: Mapping[str, _Span]) -> None:
        """Reads where uploads start, if that is not known, for all topics at once."""
        unknown = [known for known in examined if self._says_all or known.begin is None]
        pointers = self._job.directory.pointers([known.topic for known in unknown])
        for known in unknown:
            span, pointer = spans[known.topic], pointers.get(known.topic)
            if pointer is not None:
                known.begin = pointer.value.end
            else:
                # Without objects and without messages there is nothing to upload.
                is_empty = span.synced <= span.trimmed
                known.begin = span.trimmed if is_empty else None

    def _read_bucket(self, known: CachedTopic, span: _Span) -> int:
        """Returns where an upload of a topic starts."""
        last = self._job.catalog(known.topic).last()
        if last is not None:
            known.begin, known.made_at = last.end, last.created_at
            known.bytes_each = max(1, last.size_bytes // (last.end - last.start))
        else:
            known.begin = span.trimmed
            known.made_at = known.record.created_at if known.record is not None else 0
        return known.begin

    def _is_due(self, known: CachedTopic, span: _Span, interval_seconds: float) -> bool:
        """Returns whether an upload is due: by time, by size, or because producers wait."""
        if known.record is not None and known.record.ack is AckLevel.TIERED:
            return True
        if self._clock.now_ns() / 1e9 - known.made_at >= interval_seconds:
            return True
        begin = known.begin or 0
        snapshot = known.files.snapshot() if known.files is not None else None
        size = (
            snapshot.measure(begin, span.synced)
            if snapshot is not None
            else (span.synced - begin) * known.bytes_each
        )
        return size >= self._storage.uploader.max_batch_bytes

    # -- durable offsets --------------------------------------------------------------------

    def _spans(self, examined: Sequence[CachedTopic], cycle: Cycle) -> dict[str, _Span]:
        """Returns what is durable of each topic, if that is known."""
        spans: dict[str, _Span] = {}
        late: list[tuple[CachedTopic, tuple[int, int]]] = []
        remote: list[CachedTopic] = []
        for known in examined:
            if known.files is None:
                remote.append(known)
                continue
            try:
                snapshot = known.files.snapshot()
                if snapshot is None:
                    known.files = None  # located again when records are read
                    self.say(known, skipped="its files are empty")
                    continue
                spans[known.topic] = _Span(snapshot.trimmed, snapshot.synced)
                # Without an owner, the checkpoint does not advance any more.
                if self._says_all and known.has_owner:
                    mark = snapshot.end_of_files()
                    if not snapshot.covers(mark):
                        late.append((known, mark))
            except IsterError as error:
                self.fail(known, error, cycle)
        self._catch_up(late, spans)
        if remote:
            spans.update(self._remote_spans(remote, cycle))
        return spans

    def _catch_up(
        self, late: list[tuple[CachedTopic, tuple[int, int]]], spans: dict[str, _Span]
    ) -> None:
        """Waits until the owners' checkpoints show what was just synced, for all at once."""
        deadline = self._clock.monotonic() + _CATCH_UP_SECONDS
        while late:
            waiting, late = late, []
            for known, mark in waiting:
                # If it cannot be read now, the earlier snapshot counts.
                with suppress(IsterError):
                    snapshot = known.files.snapshot() if known.files is not None else None
                    if snapshot is not None:
                        spans[known.topic] = _Span(snapshot.trimmed, snapshot.synced)
                        if not snapshot.covers(mark):
                            late.append((known, mark))
            if not late or self._clock.monotonic() >= deadline:
                return
            self._pause.wait(_POLL_SECONDS)

    def _remote_spans(self, remote: Sequence[CachedTopic], cycle: Cycle) -> dict[str, _Span]:
        spans: dict[str, _Span] = {}
        try:
            statuses, errors = read_watermarks(self._place, [known.topic for known in remote])
        except IsterError as error:
            statuses, errors = {}, dict.fromkeys((known.topic for known in remote), error)
        for known in remote:
            if known.topic in errors:
                self.fail(known, errors[known.topic], cycle)
            status = statuses.get(known.topic)
            if status is None or known.record is None:
                continue
            if status.incarnation == known.record.incarnation:
                spans[known.topic] = _Span(status.trimmed, status.synced)
                continue
            other = ConflictError(
                "the broker has another topic of this name than the metadata store",
                hint="check that the config and the broker's address name the same log",
            )
            self.fail(known, other, cycle)
        return spans

    # -- the report -------------------------------------------------------------------------

    def say(
        self, known: CachedTopic, start: int | None = None, end: int | None = None, *, skipped: str
    ) -> None:
        """Reports why nothing is done with a topic, unless the cycle covers only due topics."""
        self.record_success(known)
        if self._says_all:
            fields = self._report.of(known.topic)
            for name in ("messages", "objects", "bytes"):
                fields.setdefault(name, 0)
            if start is not None and end is not None:
                fields.setdefault("start", start)
                fields["end"] = end
            fields["skipped"] = skipped

    def count(
        self, known: CachedTopic, start: int, end: int, size_bytes: int, cycle: Cycle
    ) -> None:
        """Counts an object that was made, or would be."""
        self._report.add(known.topic, messages=end - start, objects=1, bytes=size_bytes)
        fields = self._report.of(known.topic)
        fields.setdefault("start", start)
        fields["end"] = end
        fields.pop("skipped", None)
        cycle.objects += 1
        cycle.messages += end - start
        cycle.bytes += size_bytes

    def fail(self, known: CachedTopic, error: IsterError | ErrorFields, cycle: Cycle) -> None:
        """Records a failure of a topic, which is retried after a pause."""
        cycle.failed += 1
        known.failures += 1
        # Checking whether a node is back is cheap, and its producers may wait.
        most = _RECORD_SECONDS if isinstance(error, WaitsForDiskError) else _RETRY_SECONDS_MAX
        known.retry_at = self._clock.monotonic() + backoff_seconds(
            known.failures, first=_RETRY_SECONDS_MIN, most=most
        )
        known.is_stale = True
        before = known.error["message"] if known.error is not None else None
        self._forget_error(known)
        self._report.fail(error, known.topic)
        known.error = self._report.errors[-1]
        message = known.error["message"]
        # Once: a broker may be down for hours.
        _log.log(
            logging.DEBUG if message == before else logging.WARNING,
            "topic not uploaded",
            extra={"topic": known.topic, "error": message},
        )

    def record_success(self, known: CachedTopic) -> None:
        """Clears the failures of a topic."""
        known.failures, known.retry_at = 0, -float("inf")
        self._forget_error(known)

    def _forget_error(self, known: CachedTopic) -> None:
        """Removes a topic's error: a report shows what fails now."""
        errors = self._report.errors
        errors[:] = [fields for fields in errors if fields is not known.error]
        known.error = None
