"""`tier`: uploads what is synced and not in the bucket yet, on Spark.

    driver: look, plan ─► tasks: frames become objects ─► driver: commit, in order

Owns: how backlogs are divided, where tasks get frames from, and that a topic's objects are
committed in order. Does not own: which topics are due (`tier_topics`); the ranges (`upload_plan`),
the making of objects (`object_maker`) and the right to commit (`ownership`), which are those of the
topic's own uploads; the lease (`job`).

For the same local files, the objects, their names and their descriptors are those that the topic's
owner would make. Frames come from the owner's files if they are on this machine, otherwise from the
owner by Flight: each topic's own, so that one job uploads the topics of all brokers.

Invariants:

- only what the owner's checkpoint calls synced is uploaded;
- a topic's descriptors are committed in the order of their offsets; after an object that failed
  nothing is committed;
- the first commit wins, the owner's or the job's, and the other one continues after it. No offset
  is in two descriptors.

A failure of one topic does not stop others. A damaged frame ends its topic's upload there: what
comes before it is in the bucket, and the error says where the frame is.

What a crash leaves: objects, or parts of them, that no descriptor names.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import attrgetter
from typing import Final

from ister.base import failpoints
from ister.base.clock import SystemClock
from ister.base.limits import GIB, MIB
from ister.base.model import TopicName
from ister.base.tracing import span
from ister.bucket.check import verify_size
from ister.bucket.egress import EgressLimit
from ister.bucket.names import object_key
from ister.bucket.object_maker import FrameSource, ObjectMaker
from ister.bucket.ownership import OwnedTopic
from ister.bucket.terms import Term, newest_terms, refuse_older, save_term
from ister.client.frames import BrokerFrames
from ister.errors import (
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    IsterError,
    UnavailableError,
)
from ister.format.descriptor import ObjectDescriptor
from ister.format.records import TopicRecord
from ister.spark.jobs.job import (
    Job,
    JobConfig,
    TopicNames,
    open_job,
    parse_topics,
)
from ister.spark.jobs.job_report import ErrorFields, JobProgress, JobReport, error_as_fields
from ister.spark.jobs.session import stop_on_signals
from ister.spark.jobs.tasks import Done, SparkOrRunner, run_tasks
from ister.spark.jobs.tier_topics import CachedTopic, Cycle, TierTopics
from ister.spark.location import LogLocation
from ister.spark.owners import ask, connect
from ister.spark.workers import compile_for
from ister.topic.stores import upload_settings
from ister.topic.upload_plan import PlannedObject, UploadPlan, plan_objects
from ister.wire.contract import PlanUpload
from ister.wire.errors import decode_error

_log = logging.getLogger("ister.spark.jobs.tiering")

# How much is planned and made before the driver plans again: bounds what waits for its commit.
_ROUND_BYTES: Final = 4 * GIB
_ROUND_BYTES_PER_SLOT: Final = 512 * MIB
_ROUND_OBJECTS: Final = 256
_PLANNED_MAX: Final = 10_000
# Another process may commit first, or the topic get a new owner, repeatedly.
_FRUITLESS_MAX: Final = 4
_LIST_SECONDS: Final = 2.0
_TICK_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _UploadItem:
    """An object to make. Pickled."""

    topic: str
    start: int
    end: int
    size_bytes: int
    """Estimated."""
    record: TopicRecord
    """Names the node whose files have its frames."""
    is_first: bool
    """Whether it is the topic's first one of the round: no later one is committed without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MadeObject:
    """A complete object that is not committed yet. Pickled."""

    descriptor: ObjectDescriptor
    damage: ErrorFields | None = None
    """Why it is shorter than planned."""


@dataclass(slots=True)
class _Work:
    """The upload of one topic in a cycle."""

    known: CachedTopic
    goal: int
    """Everything below this offset is in the bucket at the end of the cycle."""
    fruitless: int = 0
    """Consecutive rounds in which nothing was committed."""
    is_over: bool = False

    @property
    def topic(self) -> str:
        """Its name."""
        return self.known.topic


@dataclass(slots=True)
class _Round:
    """What is made of one topic in a round."""

    work: _Work
    owned: OwnedTopic
    items: list[_UploadItem]
    """In order; cut where one fails."""
    failure: ErrorFields | None = None
    """Why there are no more items."""
    made: dict[int, _MadeObject] = field(default_factory=dict)
    """Objects that wait for their commit, by start offset."""
    committed: int = 0
    is_stale: bool = False
    """Another process changed the topic: the rest is planned again."""


class _Tiering:
    """The cycles of one job. Used by one thread at a time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._place = job.place
        self._storage = job.place.config.storage
        self._settings = upload_settings(self._storage.uploader, self._storage.cloud.layout)
        self._clock = job.clock
        self._topics = TierTopics(job)

    def cycle(
        self, topics: Sequence[str], *, report: JobReport, interval_seconds: float | None
    ) -> Cycle:
        """Runs a cycle; see `tier_cycle`. With an interval, only for what is due."""
        cycle = Cycle()
        wanted = self._topics.find_due(
            topics, cycle, report=report, interval_seconds=interval_seconds
        )
        works = [_Work(known, goal) for known, goal in wanted]
        cycle.due = len(works)
        if self._job.dry_run:
            for work in works:
                self._plan_only(work, cycle)
            failpoints.reach("pipeline.after_plan")
            return cycle
        while works:
            with span("pipeline tier", topics=len(works)):
                self._run_round(works, cycle)
            works = [work for work in works if not work.is_over]
        return cycle

    # -- plans ------------------------------------------------------------------------------

    def _plan(self, work: _Work, start: int | None, objects_max: int) -> UploadPlan:
        """Plans the objects of a topic from `start` up to the cycle's goal."""
        known, settings = work.known, self._settings
        limits = {
            "bytes_max": settings.object_bytes_max,
            "span_ms_max": settings.object_span_ms_max,
            "objects_max": objects_max,
        }
        snapshot = known.files.snapshot() if known.files is not None else None
        if snapshot is not None:
            history = self._place.history()
            return plan_objects(
                snapshot,
                start,
                min(work.goal, snapshot.synced),
                metrics=history.metrics,
                clock=history.clock,
                **limits,
            )
        if known.record is None:
            raise UnavailableError("the topic's files are gone from this machine")
        asked = PlanUpload(
            topic=known.topic,
            incarnation=known.record.incarnation,
            epoch=known.record.epoch,
            start=start,
            **limits,
        )
        planned = ask(self._place, known.topic, lambda client: client.plan_upload(asked))
        starts = (planned.start, *(end for end, _ in planned.objects))
        error = None if planned.error is None else decode_error(planned.error)
        return UploadPlan(
            start=planned.start,
            synced=planned.synced,
            codec=planned.codec,
            objects=tuple(
                PlannedObject(start=begin, end=end, size_bytes=size)
                for begin, (end, size) in zip(starts, planned.objects, strict=False)
            ),
            error=error if isinstance(error, CorruptDataError) else None,
        )

    def _plan_only(self, work: _Work, cycle: Cycle) -> None:
        """Reports what would be uploaded of a topic."""
        known = work.known
        at = known.begin
        try:
            while at is not None and at < work.goal:
                plan = self._plan(work, at, _PLANNED_MAX)
                for planned in plan.objects:
                    self._topics.count(
                        work.known, planned.start, planned.end, planned.size_bytes, cycle
                    )
                if plan.error is not None:
                    raise plan.error
                if not plan.objects:
                    return
                at = plan.end
        except IsterError as error:
            self._topics.fail(work.known, error, cycle)

    def _plan_round(self, work: _Work) -> _Round:
        """Takes the right to commit, and plans a round of a topic."""
        known, owned = work.known, self._job.act(work.topic)
        record, planned_for = owned.record, known.record
        if planned_for is None or (record.incarnation, record.node) != (
            planned_for.incarnation,
            planned_for.node,
        ):
            known.is_stale = True
            raise FencedError("the topic has a new owner, or was created again, meanwhile")
        known.record = record
        start = owned.tiered if owned.last is not None else None
        if start is not None:
            known.begin = start
            if start >= work.goal:
                return _Round(work, owned, [])
        plan = self._plan(work, start, _ROUND_OBJECTS)
        items = [
            _UploadItem(
                topic=work.topic,
                start=planned.start,
                end=planned.end,
                size_bytes=planned.size_bytes,
                record=record,
                is_first=planned is plan.objects[0],
            )
            for planned in plan.objects
        ]
        failure = None if plan.error is None else error_as_fields(plan.error)
        return _Round(work, owned, items, failure)

    # -- a round ----------------------------------------------------------------------------

    def _run_round(self, works: Sequence[_Work], cycle: Cycle) -> None:
        """Makes and commits objects of each topic, as many as fit into a round."""
        job = self._job
        slots = job.slots
        room = max(_ROUND_BYTES, slots * _ROUND_BYTES_PER_SLOT)
        rounds: dict[str, _Round] = {}
        for work in works:
            if room <= 0:
                break  # the others follow in the next round
            try:
                planned = rounds[work.topic] = self._plan_round(work)
            except IsterError as error:
                self._topics.fail(work.known, error, cycle)
                work.is_over = True
            else:
                room -= sum(item.size_bytes for item in planned.items)
        failpoints.reach("pipeline.after_plan")
        items = [item for planned in rounds.values() for item in planned.items]
        job.progress.begin("uploading", sum(item.size_bytes for item in items), "bytes")
        try:
            for done in run_tasks(
                job.spark,
                items,
                partial(_make_object, self._place, task_count=min(slots, len(items))),
                weigh=attrgetter("size_bytes"),
                name="ister tier",
            ):
                self._take(rounds[done.item.topic], done, cycle)
                job.progress.advance(done.item.size_bytes, done.item.topic)
        finally:
            job.progress.end()
        for planned in rounds.values():
            self._conclude(planned, cycle)

    def _take(self, planned: _Round, done: Done[_UploadItem, _MadeObject], cycle: Cycle) -> None:
        """Takes the result of a task, and commits what is next in order."""
        if planned.is_stale:
            return
        if done.result is not None:
            planned.made[done.item.start] = done.result
        elif done.item in planned.items:
            # Objects before it may still come; nothing after it is committed.
            del planned.items[planned.items.index(done.item) :]
            planned.failure = done.error
        while planned.committed < len(planned.items) and not planned.is_stale:
            made = planned.made.pop(planned.items[planned.committed].start, None)
            if made is None:
                return
            self._commit(planned, made, cycle)

    def _commit(self, planned: _Round, made: _MadeObject, cycle: Cycle) -> None:
        """Commits an object."""
        job, work, described = self._job, planned.work, made.descriptor
        job.check()
        try:
            self._check_exists(work.topic, described)
            failpoints.reach("pipeline.before_commit")
            planned.owned.commit(described)
            failpoints.reach("pipeline.after_commit")
        except FencedError as error:
            if error.path == job.fence.key:
                raise
            # Reopened, taken by another node, or deleted: the objects are useless.
            planned.is_stale = True
            work.known.is_stale = True
            self._remove_unless_collected(planned, made)
            return
        except ConflictError:
            # The owner was faster; the next round continues after it.
            planned.is_stale = True
            return
        except IsterError as error:
            del planned.items[planned.committed :]
            planned.failure = error_as_fields(error)
            return
        planned.committed += 1
        work.known.begin, work.known.made_at = described.end, described.created_at
        self._topics.count(work.known, described.start, described.end, described.size_bytes, cycle)
        if made.damage is not None:
            del planned.items[planned.committed :]
            planned.failure = made.damage

    def _check_exists(self, topic: str, described: ObjectDescriptor) -> None:
        """Checks that an object that waited for long was not collected."""
        grace_seconds = self._storage.cloud.orphan_grace_minutes * 60
        if (self._clock.now_ns() / 1e9 - described.created_at) * 2 >= grace_seconds:
            key = object_key(TopicName.parse(topic), described.object_id)
            verify_size(self._place.history().objects, key, described.size_bytes)

    def _remove_unless_collected(self, planned: _Round, made: _MadeObject) -> None:
        """Removes objects of a deleted topic, which has no owner to collect them."""
        with suppress(IsterError):
            name = TopicName.parse(planned.work.topic)
            found = self._job.catalog(str(name)).record()
            if found is not None and found[0].is_open:
                return
            for left in (made, *planned.made.values()):
                self._place.history().objects.delete(object_key(name, left.descriptor.object_id))

    def _conclude(self, planned: _Round, cycle: Cycle) -> None:
        """Decides whether a topic has another round in this cycle."""
        work = planned.work
        work.fruitless = 0 if planned.committed else work.fruitless + 1
        if planned.failure is not None and not planned.is_stale:
            self._topics.fail(work.known, planned.failure, cycle)
            work.is_over = True
        elif work.known.begin is not None and work.known.begin >= work.goal:
            self._topics.record_success(work.known)
            work.is_over = True
        elif work.fruitless >= _FRUITLESS_MAX:
            error = ConflictError(
                "another process keeps changing the topic",
                hint="the next cycle tries again",
            )
            self._topics.fail(work.known, error, cycle)
            work.is_over = True


# -- the job ----------------------------------------------------------------------------------


def tier_cycle(
    job: Job,
    topics: Sequence[str],
    *,
    only_due: bool = False,
    interval_seconds: float | None = None,
    report: JobReport | None = None,
) -> Cycle:
    """Uploads what is synced when the cycle starts.

    What is known of topics is cached from one cycle of a job to the next, so that a cycle without
    anything new costs very little. One thread at a time may call it for a job.

    Args:
        job: Holds the pipeline's lease.
        topics: Names of topics.
        only_due: Only topics that are due: by the age of the newest object, by size, or at once if
            producers wait for the bucket. Topics that failed are retried after a pause, and topics
            without anything new are not reported.
        interval_seconds: The age; `storage.uploader.interval_seconds` by default.
        report: Where the result goes; the job's report by default. A topic's last failure stays in
            it until an upload succeeds.
    """
    if not isinstance(tiering := job.cache, _Tiering):
        tiering = job.cache = _Tiering(job)
    if interval_seconds is None:
        interval_seconds = float(job.place.config.storage.uploader.interval_seconds)
    return tiering.cycle(
        topics,
        report=report if report is not None else job.report,
        interval_seconds=interval_seconds if only_due else None,
    )


def tier(
    spark: SparkOrRunner,
    config: JobConfig = None,
    *,
    broker: str | None = None,
    topics: TopicNames = None,
    dry_run: bool = False,
    progress: JobProgress | None = None,
    interval: float | None = None,
    stop: threading.Event | None = None,
) -> JobReport:
    """Uploads what is synced, once or repeatedly.

    While it runs, brokers with `storage.uploader.engine: auto` do not upload.

    Args:
        spark: A session, classic or Connect; None for a dry run, which runs in this process.
        config: Where the log is; see `open_job`.
        broker: Flight addresses of brokers; see `open_job`.
        topics: Names and patterns; all topics by default.
        dry_run: Plan only.
        progress: Receives the job's progress.
        interval: Repeat until stopped: a topic is uploaded this many seconds after its newest
            object was made, earlier if it has grown much, at once if producers wait for the bucket.
        stop: Stops a repeated upload, after the current cycle; so do SIGINT and SIGTERM, if this
            is called on the main thread.

    Returns:
        For each topic `start`, `end`, `messages`, `objects`, `bytes`, or why it was `skipped`.

    Raises:
        InvalidRequestError: The arguments are invalid.
        NotFoundError: A topic does not exist.
        ConflictError: Another pipeline is running.
        FencedError: The job's lease has expired; what was committed stays.
        UnavailableError: A store does not respond.
    """
    if interval is not None and (not interval > 0 or dry_run):
        raise InvalidRequestError(
            f"invalid interval {interval}" if not dry_run else "a dry run has no interval"
        )
    wanted = parse_topics(topics)
    with open_job(
        "tier",
        spark,
        config,
        broker=broker,
        dry_run=dry_run,
        progress=progress,
        exclusive=lambda keys: keys.lease,
    ) as job:
        if interval is None:
            tier_cycle(job, job.topics(wanted))
        else:
            with stop_on_signals(stop) as stopping:
                _repeat(job, wanted, interval, stopping)
        return job.report


def _repeat(job: Job, wanted: Sequence[str], interval: float, stop: threading.Event) -> None:
    names = job.topics(wanted)
    listed_at = job.clock.monotonic()
    tier_cycle(job, names)
    while not stop.wait(min(interval, _TICK_SECONDS)):
        now = job.clock.monotonic()
        if now - listed_at >= _LIST_SECONDS:
            listed_at = now
            try:
                names = job.topics(wanted)
            except FencedError:
                raise
            except IsterError as error:
                # A topic of a given name may be deleted, or created again.
                _log.warning("topics not listed", extra={"error": str(error)})
        job.check()
        tier_cycle(job, names, only_due=True, interval_seconds=interval)


# -- in a task ------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _egress(bytes_per_second: float) -> EgressLimit:
    """The upload limit of this worker process, which runs one task at a time."""
    return EgressLimit(bytes_per_second, clock=SystemClock())


def _make_object(place: LogLocation, item: _UploadItem, *, task_count: int = 1) -> _MadeObject:
    """Makes one object. May run twice.

    `task_count` tasks run in parallel, and share `uploader.max_bytes_per_second`.
    """
    compile_for(item.size_bytes)
    history, record = place.history(), item.record
    name = TopicName.parse(item.topic)
    if item.is_first:
        terms = newest_terms(history.objects, name)
        refuse_older(name, record, terms, where="the bucket")
        if Term(record.epoch, record.claim) not in terms:
            # An owner that plans an upload has recorded its term; one that was not asked may not.
            local = place.local_tail(item.topic, record.node, record.incarnation)
            if local is not None and local.sync_term(record):
                save_term(history.objects, name, record)
    settings = upload_settings(place.config.storage.uploader, place.config.storage.cloud.layout)
    rate = place.config.storage.uploader.max_bytes_per_second
    maker = ObjectMaker(
        name,
        history.objects,
        settings=settings,
        clock=history.clock,
        metrics=history.metrics,
        pending_tag=secrets.token_hex(4),
        egress=None if rate is None else _egress(rate / task_count),
    )
    make = partial(maker.make, epoch=record.epoch, incarnation=record.incarnation)
    with _frames_of(place, item) as source:
        damage: CorruptDataError | None = None
        try:
            made = make(source, item.start, item.end)
        except CorruptDataError as error:
            if error.offset is None or not item.start < error.offset < item.end:
                raise
            # What comes before the damage is intact, and needs a second copy all the more.
            damage = error
            end = source.plan(
                item.start,
                error.offset,
                bytes_max=settings.object_bytes_max,
                span_ms_max=settings.object_span_ms_max,
            )
            made = make(source, item.start, end)
        return _MadeObject(
            descriptor=made,
            damage=None if damage is None else error_as_fields(damage),
        )


@contextmanager
def _frames_of(place: LogLocation, item: _UploadItem) -> Iterator[FrameSource]:
    """Opens the owner's files, if they are on this machine, or asks the owner for them."""
    source: FrameSource | None = None
    record = item.record
    local = place.local_tail(item.topic, record.node, record.incarnation)
    if local is not None:
        opened = local.source(chunk_bytes=place.config.storage.uploader.stream_chunk_size // 2)
        if opened is not None:
            files, snapshot = opened
            if snapshot.trimmed <= item.start and item.end <= snapshot.synced:
                source = files
            else:
                files.close()
    if source is None:
        client = connect(place, item.topic)
        source = BrokerFrames(client, item.topic, record.incarnation, record.epoch)
    try:
        yield source
    finally:
        source.close()
