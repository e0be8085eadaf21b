"""`gc`: removes expired and orphaned objects of topics that no process has open.

    metadata: topics without an owner ─► each: expire, collect, sweep
                                      ─► once for all: parts, express objects

Owns: which topics, and in which order. Does not own: what expires (`ister.bucket.retention`), what
is garbage (`ister.bucket.orphans`, `ister.bucket.express_collection`), whether the clock and the
metadata store are trusted (`ister.base.clock_guard`, `ister.bucket.trust`). Runs on the driver: it
reads metadata and lists, and starts no task.

The owner of a topic does all of this itself. One `gc` runs at a time, by a leased key; collecting
express objects has a second key, which brokers take as well.

Invariants:

- a topic is changed in the name of its last owner, and only while it has the record that was read
  before its owner's key was found absent: a process that opens it in the middle changes the record,
  and `gc` leaves the topic alone;
- an object is removed only if no descriptor names it, its grace period is over, and each of its
  offsets has expired or is in a named object that is in the bucket;
- nothing is deleted by age while the clock is not trusted, which is an error of the job. The clock
  is compared with a mark in the metadata store, which covers every machine that runs `gc`;
- nothing is deleted while the metadata store is distrusted, because it was rolled back.

A topic that could not be examined is reported as an error; the others continue.

What a crash leaves: objects without descriptors, which the next `gc` removes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ister.base import failpoints
from ister.base.clock_guard import ClockGuard, ClockMark
from ister.bucket.express_collection import collect_express
from ister.bucket.orphans import at_least, collect_unowned, sweep_staging
from ister.bucket.ownership import OwnedTopic
from ister.bucket.retention import expire, list_known, plan_expiry
from ister.bucket.shared_staging import collect_shared_staging
from ister.bucket.trust import Trust
from ister.errors import (
    ConflictError,
    FencedError,
    InvariantError,
    IsterError,
    NotFoundError,
    UnavailableError,
)
from ister.fs.local import boot_id
from ister.metadata.base import Put
from ister.spark.jobs.job import (
    Job,
    JobConfig,
    TopicNames,
    open_job,
    parse_topics,
)
from ister.spark.jobs.job_report import JobProgress, JobReport
from ister.spark.jobs.tasks import SparkOrRunner
from ister.topic.node_clock import longest_seconds

_log = logging.getLogger("ister.spark.jobs.collecting")


def gc(
    spark: SparkOrRunner,
    config: JobConfig = None,
    *,
    broker: str | None = None,
    topics: TopicNames = None,
    dry_run: bool = False,
    confirm_clock: bool = False,
    progress: JobProgress | None = None,
) -> JobReport:
    """Removes expired and orphaned objects of topics that no process has open.

    Removes objects beyond bucket retention, objects without a descriptor, staged rows and offsets;
    and, unless `topics` are given, unfinished uploads of processes that have ended, express objects
    and staged files of the sink that no topic needs.

    Args:
        spark: A session, classic or Connect; None for a dry run, which runs in this process.
        config: Where the log is; see `open_job`.
        broker: Flight addresses of brokers, which provide the settings if `config` is None.
        topics: Names and patterns; all topics by default.
        dry_run: Only report what would be removed.
        confirm_clock: Accept this machine's clock as right, although it was not trusted.
        progress: Receives the job's progress.

    Returns:
        For each topic that no process has open the number of its `objects`, and of `expired`,
        `orphans` and `staged` files that were removed. The report's `open_topics` counts topics
        that were left to their owners, `stale_uploads` unfinished uploads, `express_objects` and
        `express_bytes` express objects that were removed, `shared_staged_files` files of the sink.

    Raises:
        NotFoundError: A topic does not exist.
        ConflictError: Another `gc` is running.
        FencedError: The job's lease has expired; what was removed is gone.
        UnavailableError: A store does not respond.
    """
    wanted = parse_topics(topics)
    with open_job(
        "gc",
        spark,
        config,
        broker=broker,
        dry_run=dry_run,
        progress=progress,
        exclusive=lambda keys: keys.gc,
    ) as job:
        collect_topics(
            job, job.topics(wanted), is_everything=topics is None, confirm_clock=confirm_clock
        )
        return job.report


def collect_topics(
    job: Job, topics: Sequence[str], *, is_everything: bool = True, confirm_clock: bool = False
) -> None:
    """Collects garbage within a job; the result is in its report.

    Args:
        job: Holds the key of `gc`, unless it is a dry run.
        topics: Names of topics, as `Job.topics` has just listed them.
        is_everything: Whether to collect what belongs to no single topic, too.
        confirm_clock: Accept the clock as right.
    """
    # Compared with the drivers before this one.
    found = job.store.get(job.keys.clock)
    clock = ClockGuard(
        job.clock,
        mark=None if found is None else ClockMark.decode(found.value),
        boot=boot_id(),
        longest_seconds=longest_seconds(job.place.config.storage),
    )
    if confirm_clock:
        clock.confirm()
    _Collection(job, clock).run(topics, is_everything=is_everything)
    if not job.dry_run:
        job.store.transact([job.fence.compare], [Put(job.keys.clock, clock.mark().encode())])


class _Collection:
    """One run of the job. Used by one thread."""

    def __init__(self, job: Job, clock: ClockGuard) -> None:
        self._job = job
        self._clock = clock
        storage = job.place.config.storage
        self._retention = storage.cloud.retention
        self._objects = job.history.objects
        self._grace_seconds: float = storage.cloud.orphan_grace_minutes * 60
        if job.keys.has_jobs(job.store, besides=job.fence.key):
            # Their objects have no descriptors until they are committed.
            self._grace_seconds = at_least(self._grace_seconds)

    def run(self, topics: Sequence[str], *, is_everything: bool) -> None:
        """Collects in all topics without an owner, and what belongs to no topic."""
        job = self._job
        if not job.dry_run and (reason := self._find_distrust()) is not None:
            job.report.fail(
                ConflictError(
                    f"{reason}; nothing is deleted",
                    hint="`ister metadata check`, then `ister metadata accept`",
                )
            )
            return
        step = self._clock.check()
        if step is not None:
            job.report.fail(
                UnavailableError(
                    f"the clock of this machine is not trusted: {step.reason} "
                    f"({step.seconds:+.0f} s); nothing is deleted by age",
                    hint="correct the clock, or confirm it with `ister pipeline gc "
                    "--confirm-clock`",
                )
            )
        unowned = self._find_unowned(topics)
        failpoints.reach("pipeline.after_plan")
        job.progress.begin("collecting", len(unowned), "topics")
        try:
            for topic in unowned:
                job.check()
                try:
                    self._collect(topic)
                except (FencedError, InvariantError):
                    raise
                except IsterError as error:
                    job.report.of(topic)
                    job.report.fail(error, topic)
                job.progress.advance(1, topic)
        finally:
            job.progress.end()
        if is_everything and self._clock.check() is None:
            job.check()
            self._collect_parts()
            self._collect_express()
            self._collect_shared_staging()

    def _find_distrust(self) -> str | None:
        """Why the metadata store is distrusted, if it is."""
        job, root = self._job, self._job.place.config.storage.metadata.root_prefix
        trust = Trust(self._objects, job.store, root, job.clock)
        trust.check()
        return trust.reason

    def _find_unowned(self, topics: Sequence[str]) -> list[str]:
        """Returns the topics that no process has open; the others are left to their owners."""
        job, entries = self._job, self._job.directory.entries
        unowned: list[str] = []
        for name in topics:
            entry = entries.get(name)
            if entry is None or entry.owner is not None:
                continue
            if entry.error is not None:
                job.report.of(name)
                job.report.fail(entry.error, name)
            else:
                unowned.append(name)
        job.report.more["open_topics"] = sum(
            1 for name in topics if name in entries and entries[name].owner is not None
        )
        return unowned

    # -- collecting -------------------------------------------------------------------------

    def _collect(self, topic: str) -> None:
        """Removes what a topic does not need, unless it has an owner by now."""
        job = self._job
        try:
            owned = job.act(topic)
        except NotFoundError:
            return  # deleted meanwhile
        # After its record was read: whoever claims the topic later changes the record.
        if owned.catalog.owner() is not None:
            job.report.of(topic)["skipped"] = "a process has opened the topic"
            return
        failpoints.reach("pipeline.before_commit")
        try:
            self._expire(topic, owned)
            self._collect_orphans(topic, owned)
        except FencedError:
            job.fence.check()
            job.report.of(topic)["skipped"] = "a process has opened the topic, or deleted it"
            return
        failpoints.reach("pipeline.after_commit")

    def _expire(self, topic: str, owned: OwnedTopic) -> None:
        job, retention = self._job, self._retention
        known = list_known(owned)
        if known is None:
            raise ConflictError(
                "the topic's objects are merged faster than they can be read",
                topic=topic,
                hint="the next `gc` tries again",
            )
        job.report.add(topic, objects=len(known), expired=0, orphans=0, staged=0)
        planned = plan_expiry(
            known,
            now_ms=job.clock.now_ns() // 1_000_000,
            time_minutes=retention.time_minutes if self._clock.check() is None else None,
            size_mb=retention.size_mb,
            correct_ms=self._clock.correct,
        )
        removed = len(planned)
        if not job.dry_run:
            removed = expire(owned, self._objects, planned, metrics=job.metrics)
        job.report.add(topic, expired=removed)

    def _collect_orphans(self, topic: str, owned: OwnedTopic) -> None:
        job = self._job
        if self._clock.check() is not None:
            return
        removed = collect_unowned(
            owned,
            self._objects,
            grace_seconds=self._grace_seconds,
            clock=job.clock,
            metrics=job.metrics,
            correct_ms=self._clock.correct,
            dry_run=job.dry_run,
        )
        job.report.add(topic, orphans=len(removed))
        staged = sweep_staging(
            owned,
            self._objects,
            grace_seconds=self._grace_seconds,
            clock=job.clock,
            dry_run=job.dry_run,
        )
        job.report.add(topic, staged=len(staged))

    # -- what belongs to no single topic ----------------------------------------------------

    def _collect_parts(self) -> None:
        """Removes unfinished uploads of processes that have ended."""
        job = self._job
        if job.dry_run:
            return  # the store cannot list them without removing them
        try:
            removed = self._objects.remove_stale_parts(at_least(self._grace_seconds))
        except IsterError as error:
            job.report.fail(error)
        else:
            job.report.more["stale_uploads"] = removed

    def _collect_express(self) -> None:
        """Removes express objects that no topic needs, unless a broker is doing that."""
        job = self._job
        try:
            found = collect_express(
                self._objects,
                job.store,
                job.place.config.storage.metadata.root_prefix,
                grace_seconds=self._grace_seconds,
                clock=job.clock,
                metrics=job.metrics,
                correct_ms=self._clock.correct,
                dry_run=job.dry_run,
            )
        except (ConflictError, FencedError) as error:
            # Another process collects, or this job's own lease has expired: checked below.
            _log.info("express objects left to another process", extra={"error": str(error)})
            job.fence.check()
            return
        except IsterError as error:
            job.report.fail(error)
            return
        job.report.more["express_objects"] = len(found.removed)
        job.report.more["express_bytes"] = found.removed_bytes
        for damage in found.errors:
            job.report.fail(damage)

    def _collect_shared_staging(self) -> None:
        """Removes staged files with rows of several topics that none of them needs."""
        job = self._job
        try:
            removed = collect_shared_staging(
                self._objects,
                job.store,
                job.place.config.storage.metadata.root_prefix,
                grace_seconds=self._grace_seconds,
                clock=job.clock,
                metrics=job.metrics,
                correct_ms=self._clock.correct,
                dry_run=job.dry_run,
            )
        except IsterError as error:
            job.report.fail(error)
        else:
            job.report.more["shared_staged_files"] = len(removed)
