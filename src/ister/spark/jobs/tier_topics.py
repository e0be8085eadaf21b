"""Which topics `tier` has to upload, up to where, and what it says about them.

    record, files or broker ─► what is durable ─► what the bucket lacks ─► is it time?

Owns: what the driver remembers of topics from one cycle to the next, so that a look at one without
anything new costs a small file; pauses after failures; the words in the report. Does not own: plans
and commits (`tiering`).

What is durable is what the owner's checkpoint says, or the owner itself by Flight.
"""

from __future__ import annotations

import logging
import random
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ister.client.contract import TopicStatus
from ister.errors import ConflictError, InvariantError, IsterError, UnavailableError
from ister.format.records import TopicRecord
from ister.limits import CHECKPOINT_INTERVAL_SECONDS, KIB
from ister.model import AckLevel
from ister.spark.jobs.job import Job
from ister.spark.jobs.report import JobReport
from ister.spark.jobs.upload_task import find_files
from ister.topic.local_tail import LocalTail

__all__ = ["Cycle", "Known", "TopicBook"]

_log = logging.getLogger("ister.spark.jobs.tier_topics")

_RECORD_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.05
# Two checkpoints: one may be on its way with less than is there.
_CATCH_UP_SECONDS: Final = 2 * CHECKPOINT_INTERVAL_SECONDS + 0.5
_RETRY_SECONDS_MIN: Final = 0.5
_RETRY_SECONDS_MAX: Final = 60.0


@dataclass(slots=True)
class Known:
    """What the driver remembers of a topic between two cycles."""

    topic: str
    record: TopicRecord | None = None
    record_at: float = -float("inf")
    files: LocalTail | None = None
    """The owner's files, if they are on this machine."""
    begin: int | None = None
    """Where the next upload begins, as far as is known."""
    made_at: int = 0
    """When the newest object was made, in seconds since the Unix epoch."""
    bytes_each: int = KIB
    """About how many bytes a message of this topic has in the bucket."""
    failures: int = 0
    retry_at: float = -float("inf")
    error: dict[str, Any] | None = None
    """What the report says about the last failure."""


class _Span(NamedTuple):
    """What of a topic is in its owner's files and durable."""

    trimmed: int
    synced: int


@dataclass(slots=True)
class Cycle:
    """What a cycle has done, over all topics."""

    due: int = 0
    """How many topics had something to upload."""
    objects: int = 0
    messages: int = 0
    bytes: int = 0
    failed: int = 0
    """How many topics failed."""


class TopicBook:
    """What one job knows of topics. Used by one thread at a time."""

    def __init__(self, job: Job) -> None:
        # Not the job itself: that is what this is remembered by.
        self._job_of = weakref.ref(job)
        self._place = job.place
        self._storage = job.place.config.storage
        self._clock = job.clock
        self._topics: dict[str, Known] = {}
        self._report = job.report
        self._says_all = True
        self._pause = threading.Event()

    @property
    def _job(self) -> Job:
        job = self._job_of()
        if job is None:
            raise InvariantError("a cycle belongs to a job under way")
        return job

    # -- which ------------------------------------------------------------------------------

    def look(
        self,
        topics: Sequence[str],
        cycle: Cycle,
        *,
        report: JobReport,
        interval_seconds: float | None,
    ) -> list[tuple[Known, int]]:
        """The topics that have something to upload, and up to where.

        Args:
            topics: Which.
            cycle: Where failures are counted.
            report: Where they are told, from now on.
            interval_seconds: How old the newest object of a topic has to be; None to take all that
                have anything, and to say of the others why they do not.
        """
        self._report, self._says_all = report, interval_seconds is None
        for name in self._topics.keys() - set(topics):
            # Nobody would ever say that it came right.
            self._forget_error(self._topics.pop(name))
        now = self._clock.monotonic()
        looked: list[Known] = []
        for name in topics:
            known = self._topics.setdefault(name, Known(name))
            if (self._says_all or now >= known.retry_at) and self._find(known, cycle):
                looked.append(known)
        spans = self._spans(looked, cycle)
        wanted: list[tuple[Known, int]] = []
        for known in looked:
            span = spans.get(known.topic)
            if span is None or (
                not self._says_all and known.begin is not None and span.synced <= known.begin
            ):
                continue
            try:
                begin = self._read_bucket(known, span)
                if span.synced <= begin:
                    self.say(known, begin, begin, skipped="everything is in the bucket")
                elif interval_seconds is None or self._is_due(known, span, interval_seconds):
                    wanted.append((known, span.synced))
            except IsterError as error:
                self.fail(known, error, cycle)
        return wanted

    def _find(self, known: Known, cycle: Cycle) -> bool:
        """Finds out where a topic's files are; whether there is anybody to ask about it."""
        now = self._clock.monotonic()
        if not self._says_all and now - known.record_at < _RECORD_SECONDS:
            return known.files is not None or self._place.broker is not None
        try:
            catalog = self._job.catalog(known.topic)
            found = catalog.record()
            if found is None or not found[0].is_open:
                self.say(known, skipped="it does not exist any more")
                return False
            record = found[0]
            if known.record is None or known.record.incarnation != record.incarnation:
                known.begin = None
            known.record, known.record_at = record, now
            known.files = find_files(self._place, known.topic, record.node, record.incarnation)
            if known.files is not None or self._place.broker is not None:
                return True
            is_sealed = catalog.sealed() is not None
        except IsterError as error:
            self.fail(known, error, cycle)
            return False
        self.say(
            known,
            skipped="it was handed over: everything is in the bucket"
            if is_sealed
            else "its files are on another machine, and no broker is given",
        )
        return False

    def _read_bucket(self, known: Known, span: _Span) -> int:
        """Where an upload of a topic begins."""
        last = self._job.catalog(known.topic).last()
        if last is not None:
            known.begin, known.made_at = last.end, last.created_at
            known.bytes_each = max(1, last.size_bytes // (last.end - last.start))
        else:
            known.begin = span.trimmed
            known.made_at = known.record.created_at if known.record is not None else 0
        return known.begin

    def _is_due(self, known: Known, span: _Span, interval_seconds: float) -> bool:
        """Whether an upload should not wait: by time, by size, or because producers do."""
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

    # -- how far ----------------------------------------------------------------------------

    def _spans(self, looked: Sequence[Known], cycle: Cycle) -> dict[str, _Span]:
        """What is durable of each topic; those of which nobody knows are left out."""
        spans: dict[str, _Span] = {}
        late: list[tuple[Known, tuple[int, int]]] = []
        remote: list[Known] = []
        for known in looked:
            if known.files is None:
                remote.append(known)
                continue
            try:
                snapshot = known.files.snapshot()
                if snapshot is None:
                    known.record_at = -float("inf")
                    self.say(known, skipped="there is nothing in its files yet")
                    continue
                spans[known.topic] = _Span(snapshot.trimmed, snapshot.synced)
                mark = snapshot.end_of_files() if self._says_all else (0, 0)
                # After its owner's death nobody says any more that the rest is durable.
                if not snapshot.covers(mark) and self._job.catalog(known.topic).owner() is not None:
                    late.append((known, mark))
            except IsterError as error:
                self.fail(known, error, cycle)
        self._catch_up(late, spans)
        if remote:
            spans.update(self._remote_spans(remote, cycle))
        return spans

    def _catch_up(self, late: list[tuple[Known, tuple[int, int]]], spans: dict[str, _Span]) -> None:
        """Gives owners the time to say that what was just synced is: all of them at once."""
        deadline = self._clock.monotonic() + _CATCH_UP_SECONDS
        while late:
            waiting, late = late, []
            for known, mark in waiting:
                # One that cannot be read now could be a moment ago: what it said then counts.
                with suppress(IsterError):
                    snapshot = known.files.snapshot() if known.files is not None else None
                    if snapshot is not None:
                        spans[known.topic] = _Span(snapshot.trimmed, snapshot.synced)
                        if not snapshot.covers(mark):
                            late.append((known, mark))
            if not late or self._clock.monotonic() >= deadline:
                return
            self._pause.wait(_POLL_SECONDS)

    def _remote_spans(self, remote: Sequence[Known], cycle: Cycle) -> dict[str, _Span]:
        client = self._place.flight()
        if client is None:
            return {}
        statuses: dict[str, TopicStatus] = {}
        try:
            statuses = client.watermarks([known.topic for known in remote])
        except IsterError:
            # One that the broker does not have spoils the answer for all: one by one, then.
            for known in remote:
                try:
                    statuses.update(client.watermarks([known.topic]))
                except UnavailableError as error:
                    self.fail(known, error, cycle)
                except IsterError as error:
                    self.say(known, skipped=f"the broker does not have it: {error.message}")
        spans: dict[str, _Span] = {}
        for known in remote:
            status = statuses.get(known.topic)
            if status is None or known.record is None:
                continue
            if status.incarnation == known.record.incarnation:
                spans[known.topic] = _Span(status.trimmed, status.synced)
                continue
            other = ConflictError(
                "the broker has another topic of this name than the metadata store",
                hint="do the config and the broker's address name the same place?",
            )
            self.fail(known, other, cycle)
        return spans

    # -- what is said -----------------------------------------------------------------------

    def say(
        self, known: Known, start: int | None = None, end: int | None = None, *, skipped: str
    ) -> None:
        """That nothing is done with a topic, and why; not in a cycle that looks every second."""
        self.note_success(known)
        if self._says_all:
            fields = self._report.of(known.topic)
            for name in ("messages", "objects", "bytes"):
                fields.setdefault(name, 0)
            if start is not None and end is not None:
                fields.setdefault("start", start)
                fields["end"] = end
            fields["skipped"] = skipped

    def count(self, known: Known, start: int, end: int, size_bytes: int, cycle: Cycle) -> None:
        """An object was made, or would be."""
        self._report.add(known.topic, messages=end - start, objects=1, bytes=size_bytes)
        fields = self._report.of(known.topic)
        fields.setdefault("start", start)
        fields["end"] = end
        fields.pop("skipped", None)
        cycle.objects += 1
        cycle.messages += end - start
        cycle.bytes += size_bytes

    def fail(self, known: Known, error: IsterError | Mapping[str, Any], cycle: Cycle) -> None:
        """A topic's failure: it is left alone for a while."""
        cycle.failed += 1
        known.failures += 1
        pause = min(_RETRY_SECONDS_MAX, _RETRY_SECONDS_MIN * 2 ** min(known.failures, 10))
        # Topics that failed together must not come back together.
        known.retry_at = self._clock.monotonic() + pause * random.uniform(0.5, 1.0)  # noqa: S311
        known.record_at = -float("inf")
        self._forget_error(known)
        self._report.fail(error, known.topic)
        known.error = self._report.errors[-1]
        _log.warning("not tiered", extra={"topic": known.topic, "error": known.error["message"]})

    def note_success(self, known: Known) -> None:
        """There is nothing wrong with a topic any more."""
        known.failures, known.retry_at = 0, -float("inf")
        self._forget_error(known)

    def _forget_error(self, known: Known) -> None:
        """A job that runs for days says what fails now, not what failed once."""
        errors = self._report.errors
        errors[:] = [fields for fields in errors if fields is not known.error]
        known.error = None
