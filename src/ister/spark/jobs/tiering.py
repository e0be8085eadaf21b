"""`tier`: what is synced and not in the bucket yet becomes objects, on Spark.

    driver: look, plan ─► tasks: frames become objects ─► driver: commit, in order ─► checkpoint

Owns: how backlogs are divided, and that a topic's objects are committed one after the other. Does
not own: which topics are due (`tier_topics`), the ranges (`upload_plan`: those of the topic's own
uploads), how an object is made (`upload_task`, `object_maker`: likewise), who may commit
(`ownership`), the lease (`job`).

For the same local files the objects, their names and their descriptors are those that the topic's
owner would make. Frames come from the owner's files where they are on the machine, and from the
owner by Flight where they are not.

Invariants:

- only what the owner's checkpoint calls synced is uploaded;
- a topic's descriptors are committed in the order of their offsets; behind an object that failed
  nothing is committed;
- whoever commits first wins, the owner or the job: the other one goes on behind it. No offset is
  in two descriptors.

One topic's failure is its own. A damaged frame ends its topic there: what lies before it is in the
bucket, and the error says where it is.

What a crash leaves: objects that no descriptor names, and an `uploader.ckpt` that lags.
"""

from __future__ import annotations

import logging
import signal
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from ister import failpoints
from ister.client.contract import PlanUpload, decode_error
from ister.config import Config
from ister.errors import (
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    InvariantError,
    IsterError,
    UnavailableError,
)
from ister.format.checkpoint import UploaderCheckpoint
from ister.format.descriptor import ObjectDescriptor
from ister.limits import GIB, MIB
from ister.model import TopicName
from ister.spark.jobs.job import Job, find_job_place, open_job, parse_topics
from ister.spark.jobs.progress import Progress
from ister.spark.jobs.report import JobReport, error_as_fields
from ister.spark.jobs.tasks import Done, run_tasks
from ister.spark.jobs.tier_topics import Cycle, Known, TopicBook
from ister.spark.jobs.upload_task import MadeObject, UploadItem, make_object
from ister.spark.place import Place
from ister.tier.names import object_key
from ister.tier.ownership import OwnedTopic
from ister.tier.pipeline import PipelineKeys
from ister.tier.verify import verify_size
from ister.topic.tiers import upload_settings
from ister.topic.upload_plan import PlannedObject, UploadPlan, plan_objects
from ister.tracing import span

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Cycle", "tier", "tier_cycle"]

_log = logging.getLogger("ister.spark.jobs.tiering")

# How much is planned and made before the driver looks again: bounds what waits for its commit.
_ROUND_BYTES: Final = 4 * GIB
_ROUND_BYTES_PER_SLOT: Final = 512 * MIB
_ROUND_OBJECTS: Final = 256
_PLANNED_MAX: Final = 10_000
# Somebody else may be faster, or the topic change hands, again and again.
_FRUITLESS_MAX: Final = 4
_LIST_SECONDS: Final = 2.0
_TICK_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Work:
    """A topic that is uploaded in this cycle."""

    known: Known
    goal: int
    """Everything below this offset is to be in the bucket at the end of the cycle."""
    fruitless: int = 0
    """Rounds, one after the other, in which nothing of it was committed."""
    is_over: bool = False

    @property
    def topic(self) -> str:
        """Its name."""
        return self.known.topic


@dataclass(slots=True)
class _Round:
    """What is made of a topic in one go."""

    work: _Work
    owned: OwnedTopic
    items: list[UploadItem]
    """In their order; cut where one fails."""
    failure: Mapping[str, Any] | None = None
    """Why there is nothing behind them."""
    made: dict[int, MadeObject] = field(default_factory=dict)
    """What waits for its commit, by its start."""
    committed: int = 0
    newest: MadeObject | None = None
    """The last one that was committed."""
    is_stale: bool = False
    """Somebody else has changed the topic: what is left is planned anew."""


class _Tiering:
    """Cycles of one job, and what it knows from one to the next. Used by one thread at a time."""

    def __init__(self, job: Job) -> None:
        # Not the job itself: that is what this is remembered by.
        self._job_of = weakref.ref(job)
        self._place = job.place
        self._storage = job.place.config.storage
        self._settings = upload_settings(self._storage.uploader)
        self._clock = job.clock
        self._book = TopicBook(job)

    @property
    def _job(self) -> Job:
        job = self._job_of()
        if job is None:
            raise InvariantError("a cycle belongs to a job under way")
        return job

    def cycle(
        self, topics: Sequence[str], *, report: JobReport, interval_seconds: float | None
    ) -> Cycle:
        """As `tier_cycle`; only what is due if an interval is given."""
        cycle = Cycle()
        wanted = self._book.look(topics, cycle, report=report, interval_seconds=interval_seconds)
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
        """The objects of a topic from `start` on, up to the cycle's goal."""
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
        client = self._place.flight()
        if client is None or known.record is None:
            raise UnavailableError("the topic's files are not here any more")
        planned = client.plan_upload(
            PlanUpload(
                topic=known.topic,
                incarnation=known.record.incarnation,
                epoch=known.record.epoch,
                start=start,
                **limits,
            )
        )
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
        """Says what would be done with a topic."""
        known = work.known
        at = known.begin
        try:
            while at is not None and at < work.goal:
                plan = self._plan(work, at, _PLANNED_MAX)
                for planned in plan.objects:
                    self._book.count(
                        work.known, planned.start, planned.end, planned.size_bytes, cycle
                    )
                if plan.error is not None:
                    raise plan.error
                if not plan.objects:
                    return
                at = plan.end
        except IsterError as error:
            self._book.fail(work.known, error, cycle)

    def _plan_round(self, work: _Work) -> _Round:
        """Takes the right to commit, and plans what this round makes of a topic."""
        known, owned = work.known, self._job.act(work.topic)
        record, planned_for = owned.record, known.record
        if planned_for is None or (record.incarnation, record.node) != (
            planned_for.incarnation,
            planned_for.node,
        ):
            known.record_at = -float("inf")
            raise FencedError("the topic was taken by another node, or made anew, meanwhile")
        known.record = record
        start = owned.tiered if owned.last is not None else None
        if start is not None:
            known.begin = start
            if start >= work.goal:
                return _Round(work, owned, [])
        plan = self._plan(work, start, _ROUND_OBJECTS)
        items = [
            UploadItem(
                topic=work.topic,
                start=planned.start,
                end=planned.end,
                size_bytes=planned.size_bytes,
                epoch=owned.epoch,
                incarnation=record.incarnation,
                node=record.node,
            )
            for planned in plan.objects
        ]
        failure = None if plan.error is None else error_as_fields(plan.error)
        return _Round(work, owned, items, failure)

    # -- a round ----------------------------------------------------------------------------

    def _run_round(self, works: Sequence[_Work], cycle: Cycle) -> None:
        """Makes and commits objects, as many as a round takes, of each topic in their order."""
        job = self._job
        slots = max(job.spark.sparkContext.defaultParallelism, 1)
        room = max(_ROUND_BYTES, slots * _ROUND_BYTES_PER_SLOT)
        rounds: dict[str, _Round] = {}
        for work in works:
            if room <= 0:
                break  # its turn comes in the next round
            try:
                planned = rounds[work.topic] = self._plan_round(work)
            except IsterError as error:
                self._book.fail(work.known, error, cycle)
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
                partial(make_object, self._place, task_count=min(slots, len(items))),
                weigh=attrgetter("size_bytes"),
                name="ister tier",
            ):
                self._take(rounds[done.item.topic], done, cycle)
                job.progress.advance(done.item.size_bytes, done.item.topic)
        finally:
            job.progress.end()
            for planned in rounds.values():
                self._save_checkpoint(planned)
        for planned in rounds.values():
            self._conclude(planned, cycle)

    def _take(self, planned: _Round, done: Done[UploadItem, MadeObject], cycle: Cycle) -> None:
        """Takes what a task has made, or why it could not, and commits what is next in order."""
        if planned.is_stale:
            return
        if done.result is not None:
            planned.made[done.item.start] = done.result
        elif done.item in planned.items:
            # What lies before it may still come; nothing behind it counts.
            del planned.items[planned.items.index(done.item) :]
            planned.failure = done.error
        while planned.committed < len(planned.items) and not planned.is_stale:
            made = planned.made.pop(planned.items[planned.committed].start, None)
            if made is None:
                return
            self._commit(planned, made, cycle)

    def _commit(self, planned: _Round, made: MadeObject, cycle: Cycle) -> None:
        """Makes an object part of its topic.

        Raises:
            FencedError: The job's lease has ended.
        """
        job, work, described = self._job, planned.work, made.descriptor
        job.check()
        try:
            self._assure(work.topic, described)
            failpoints.reach("pipeline.before_commit")
            planned.owned.commit(described)
            failpoints.reach("pipeline.after_commit")
        except FencedError as error:
            if error.path == job.fence.key:
                raise
            # Opened anew, taken by another node, or deleted: what was made is of no use.
            planned.is_stale = True
            work.known.record_at = -float("inf")
            self._remove_unless_collected(planned, made)
            return
        except ConflictError:
            # The owner was faster; the next round goes on where it has ended.
            planned.is_stale = True
            return
        except IsterError as error:
            del planned.items[planned.committed :]
            planned.failure = error_as_fields(error)
            return
        planned.committed += 1
        planned.newest = made
        work.known.begin, work.known.made_at = described.end, described.created_at
        self._book.count(work.known, described.start, described.end, described.size_bytes, cycle)
        if made.damage is not None:
            del planned.items[planned.committed :]
            planned.failure = made.damage

    def _assure(self, topic: str, described: ObjectDescriptor) -> None:
        """Makes sure that an object that waited for long was not collected as garbage.

        Raises:
            NotFoundError: It was.
        """
        grace_seconds = self._storage.cloud.orphan_grace_minutes * 60
        if (self._clock.now_ns() / 1e9 - described.created_at) * 2 >= grace_seconds:
            key = object_key(TopicName.parse(topic), described.object_id)
            verify_size(self._place.history().objects, key, described.size_bytes)

    def _remove_unless_collected(self, planned: _Round, made: MadeObject) -> None:
        """Removes objects of a topic that was deleted: it has no owner to collect them."""
        with suppress(IsterError):
            name = TopicName.parse(planned.work.topic)
            found = self._job.catalog(str(name)).record()
            if found is not None and found[0].is_open:
                return
            for left in (made, *planned.made.values()):
                self._place.history().objects.delete(object_key(name, left.descriptor.object_id))

    def _conclude(self, planned: _Round, cycle: Cycle) -> None:
        """Whether a topic has another round in this cycle."""
        work = planned.work
        work.fruitless = 0 if planned.committed else work.fruitless + 1
        if planned.failure is not None and not planned.is_stale:
            self._book.fail(work.known, planned.failure, cycle)
            work.is_over = True
        elif work.known.begin is not None and work.known.begin >= work.goal:
            self._book.note_success(work.known)
            work.is_over = True
        elif work.fruitless >= _FRUITLESS_MAX:
            error = ConflictError(
                "somebody else changes the topic, again and again",
                hint="it is looked at again later",
            )
            self._book.fail(work.known, error, cycle)
            work.is_over = True

    def _save_checkpoint(self, planned: _Round) -> None:
        """Says in the topic's directory how far uploads have come, if it has no owner to do so."""
        made, known = planned.newest, planned.work.known
        if made is None or known.files is None:
            return
        described = made.descriptor
        try:
            if self._job.catalog(known.topic).owner() is not None:
                return
            place = made.place or known.files.place_of(described.end)
            if place is None:
                return
            known.files.save_uploader(
                UploaderCheckpoint(
                    last_committed_offset=described.end - 1,
                    last_read_file_seq=place[0],
                    last_read_byte_position=place[1],
                    last_object_id=described.object_id,
                    updated_at=self._clock.now_ns() // 1_000_000_000,
                )
            )
        except IsterError as error:
            # The catalog is the truth; this is for those who look at the directory alone.
            _log.warning(
                "uploader checkpoint not saved", extra={"topic": known.topic, "error": str(error)}
            )


# -- for others -------------------------------------------------------------------------------

_tierings: Final[weakref.WeakKeyDictionary[Job, _Tiering]] = weakref.WeakKeyDictionary()


def tier_cycle(
    job: Job,
    topics: Sequence[str],
    *,
    only_due: bool = False,
    interval_seconds: float | None = None,
    report: JobReport | None = None,
) -> Cycle:
    """Uploads what is synced by now, of each topic up to where it is when the cycle begins.

    What is known of topics is kept from one cycle of a job to the next, so that one that finds
    nothing new costs next to nothing. One thread at a time may call it for a job.

    Args:
        job: Has the pipeline's lease.
        topics: Which.
        only_due: Only those whose time has come: by the age of the newest object, by size, or at
            once for topics whose producers wait for the bucket. Topics that failed are left alone
            for a while, and nothing is said about those without anything new.
        interval_seconds: The age; `storage.uploader.interval_seconds` by default.
        report: Where to say what was done; the job's by default. A topic's last failure stays in
            it until the topic comes right.

    Raises:
        FencedError: The job's lease has ended.
    """
    tiering = _tierings.get(job)
    if tiering is None:
        tiering = _tierings[job] = _Tiering(job)
    if interval_seconds is None:
        interval_seconds = float(job.place.config.storage.uploader.interval_seconds)
    return tiering.cycle(
        topics,
        report=report if report is not None else job.report,
        interval_seconds=interval_seconds if only_due else None,
    )


def tier(
    spark: SparkSession,
    config: str | Mapping[str, Any] | Config | Place | None = None,
    *,
    broker: str | None = None,
    topics: str | Sequence[str] | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    interval: float | None = None,
    stop: threading.Event | None = None,
) -> JobReport:
    """Moves what is synced into the bucket, once or again and again.

    While it runs, brokers with `storage.uploader.engine: auto` leave their uploads to it.

    Args:
        spark: A classic session.
        config: Where the log is: a config file, a data directory, settings; None with `broker`.
        broker: The address of a broker's Flight, for files that are on another machine.
        topics: Names and patterns; all by default.
        dry_run: Only say what would be done.
        progress: Who is told how far it has come.
        interval: Go on until stopped: a topic is uploaded so many seconds after its newest object
            was made, sooner if much has come, at once if its producers wait for the bucket.
        stop: Ends that, after the cycle under way; so do SIGINT and SIGTERM, where this is called
            on the main thread.

    Returns:
        Of each topic `start`, `end`, `messages`, `objects`, `bytes`, or why it was `skipped`.

    Raises:
        InvalidRequestError: The arguments make no sense.
        NotFoundError: There is no such topic.
        ConflictError: Another pipeline is running.
        FencedError: The job's lease has ended; what was committed stays.
        UnavailableError: A store does not answer.
    """
    if interval is not None and (not interval > 0 or dry_run):
        raise InvalidRequestError(
            f"an interval of {interval} seconds" if not dry_run else "a dry run has no interval"
        )
    place = find_job_place(config, broker)
    keys = PipelineKeys(place.config.storage.metadata.root_prefix)
    wanted = parse_topics(topics)
    with open_job(
        "tier",
        spark,
        place,
        dry_run=dry_run,
        progress=progress,
        # Who only looks is in nobody's way.
        exclusive=None if dry_run else keys.lease,
    ) as job:
        if interval is None:
            tier_cycle(job, job.topics(wanted))
        else:
            with _stoppable(stop) as stopping:
                _go_on(job, wanted, interval, stopping)
        return job.report


def _go_on(job: Job, wanted: Sequence[str], interval: float, stop: threading.Event) -> None:
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
                # One that was asked for by its name may be gone for good, or made again.
                _log.warning("topics", extra={"error": str(error)})
        job.check()
        tier_cycle(job, names, only_due=True, interval_seconds=interval)


@contextmanager
def _stoppable(stop: threading.Event | None) -> Iterator[threading.Event]:
    """An event that signals set, where they can be had; a second one ends the process as usual."""
    stop = stop if stop is not None else threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before: dict[int, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }

    def end(number: int, frame: object) -> None:
        signal.signal(number, before[number] or signal.SIG_DFL)
        stop.set()

    for number in before:
        signal.signal(number, end)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
