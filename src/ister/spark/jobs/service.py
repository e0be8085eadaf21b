"""`run`: the pipeline as a service, which tiers, compacts, exports and scrubs until it is stopped.

    standby ─► lease ─► tier, every second or so ───────────────────────────┐
       ▲                beside it: compact, export, scrub on their schedules ├─► lease ends, or stop
       │                           and whenever somebody asks for one        │
       │                beside it: status, memory                            │
       └─────────────────────────────────────────────────────────────────────┘

Owns: whose turn it is, when what is done, and the status. Does not own: what jobs do.

Invariants:

- one pipeline at a time has the lease, and only its holder tiers; another one stands by and takes
  over when the lease has lapsed;
- uploads never wait for a slow job, which runs on a thread and under a fence of its own;
- one topic's trouble is its own (`tiering` leaves it alone for a while), and one job's, too;
- whoever has lost the lease commits nothing more, and its slow job does not either.

A request (`ister.tier.pipeline_requests`) is taken by the holder of the lease alone, and its key is
gone once its job begins; what becomes of it is in the status. It needs no schedule.

Nothing here grows with the time that it runs: reports hold the last result, not a history.

What a crash leaves: keys that end with their leases, and what each job leaves.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from ister import threads
from ister.clock import Clock, SystemClock
from ister.config import Config, Engine, PipelineConfig
from ister.errors import (
    ConflictError,
    FencedError,
    InvalidRequestError,
    InvariantError,
    IsterError,
    UnavailableError,
)
from ister.metadata.base import Put
from ister.model import TopicName
from ister.spark.jobs.job import Job, find_job_place, open_job
from ister.spark.jobs.memory import sample_memory
from ister.spark.jobs.report import JobReport
from ister.spark.jobs.schedules import Schedule, backoff_seconds
from ister.spark.place import Place
from ister.tier.pipeline import PipelineKeys
from ister.tier.pipeline_requests import (
    REQUEST_SECONDS_MAX,
    PipelineRequest,
    read_requests,
    take_request,
)
from ister.topic.local_tail import LocalTail

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "Service",
    "SlowJob",
    "measure_lag",
    "requested_job",
    "run",
    "slow_jobs",
    "stop_on_signals",
]

_log = logging.getLogger("ister.spark.jobs.service")

_TICK_SECONDS: Final = 1.0
_STATUS_SECONDS: Final = 3.0
# How soon a stop is noticed while Spark works.
_LOOK_SECONDS: Final = 0.2
_LIST_SECONDS: Final = 5.0
_REQUEST_SECONDS: Final = 1.0
_LAG_SECONDS: Final = 15.0
_LAG_TOPICS_MAX: Final = 500
_REPORT_SECONDS: Final = 10.0
# A cycle that is nearly done when the service is stopped may commit what it has.
_GRACE_SECONDS: Final = 2.0
_CANCEL_SECONDS: Final = 0.5
_FAILURE_SECONDS: Final = 2.0
_FAILURE_SECONDS_MAX: Final = 60.0
_TEXT_MAX: Final = 500
_REPORTED_TOPICS_MAX: Final = 200
_LOOKS_PER_LEASE: Final = 5


class _CycleResult(Protocol):
    """What a tier cycle says about itself."""

    due: int
    objects: int
    messages: int
    bytes: int
    failed: int


TierCycle = Callable[[Job, Sequence[str], JobReport], _CycleResult]
MakeJob = Callable[[str, Sequence[str] | None], "SlowJob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowJob:
    """A job that is done now and then."""

    name: str
    every_seconds: float
    work: Callable[[Job], object]


def run(
    spark: SparkSession,
    config: str | Mapping[str, Any] | Config | Place | None = None,
    *,
    broker: str | None = None,
    stop: threading.Event | None = None,
    max_seconds: float | None = None,
    clock: Clock | None = None,
) -> JobReport:
    """Runs the pipeline until it is stopped.

    Takes the session over: when it is stopped, or loses its lease, Spark jobs of the session that
    are under way are cancelled.

    Args:
        spark: A classic session.
        config: Where the log is, and what `pipeline` says: a config file, a data directory,
            settings; None with `broker`.
        broker: The address of a broker's Flight, for files that are on another machine;
            `pipeline.broker` by default.
        stop: Ends it; so do SIGINT and SIGTERM, where this is called on the main thread.
        max_seconds: Ends it, too.
        clock: Where time comes from.

    Returns:
        What was done in all; errors are those that stand at the end.

    Raises:
        ConfigError: The settings do not make sense, or only one process could use them.
        UnavailableError: Spark has ended.
    """
    place = find_job_place(config, broker)
    pipeline = place.config.pipeline
    if place.broker is None and pipeline.broker is not None:
        place = replace(place, broker=pipeline.broker)
    service = Service(
        spark,
        place,
        tier=_tier_cycle if _tiers(place.config) else None,
        tier_now=_tier_now,
        jobs=slow_jobs(pipeline),
        make_job=lambda name, topics: requested_job(pipeline, name, topics),
        clock=clock if clock is not None else SystemClock(),
    )
    with stop_on_signals(stop) as stopping:
        return service.run(stopping, max_seconds=max_seconds)


def _tiers(config: Config) -> bool:
    """Whether uploads are a pipeline's at all."""
    engine = config.storage.uploader.engine
    if engine in (Engine.AUTO, Engine.SPARK):
        return True
    _log.warning("uploads are not the pipeline's", extra={"uploader.engine": engine.value})
    return False


# -- what is done ---------------------------------------------------------------------------


def _tier_cycle(job: Job, topics: Sequence[str], report: JobReport) -> _CycleResult:
    from ister.spark.jobs.tiering import tier_cycle  # noqa: PLC0415 - jobs load when needed

    return tier_cycle(job, topics, only_due=True, report=report)


def _tier_now(job: Job, topics: Sequence[str], report: JobReport) -> _CycleResult:
    from ister.spark.jobs.tiering import tier_cycle  # noqa: PLC0415 - jobs load when needed

    return tier_cycle(job, topics, report=report)


def slow_jobs(pipeline: PipelineConfig) -> list[SlowJob]:
    """The jobs that the settings ask for, most important one first."""
    found: list[SlowJob] = []
    if pipeline.compact.every_minutes is not None:
        found.append(
            SlowJob(
                name="compact",
                every_seconds=pipeline.compact.every_minutes * 60,
                work=lambda job: _compact(job, pipeline),
            )
        )
    if pipeline.export.to is not None:
        found.append(
            SlowJob(
                name="export",
                every_seconds=pipeline.export.every_minutes * 60,
                work=lambda job: _export(job, pipeline),
            )
        )
    if pipeline.scrub.every_minutes is not None:
        found.append(
            SlowJob(
                name="scrub",
                every_seconds=pipeline.scrub.every_minutes * 60,
                work=lambda job: _scrub(job, pipeline),
            )
        )
    return found


def requested_job(
    pipeline: PipelineConfig, name: str, topics: Sequence[str] | None = None
) -> SlowJob:
    """A job that somebody asked for, by its settings, whether or not it has a schedule.

    Args:
        pipeline: The settings.
        name: Which job.
        topics: For which topics; those of the settings by default.

    Raises:
        InvalidRequestError: There is no such job, or its settings do not say what to do.
    """
    works: dict[str, Callable[[Job], None]] = {
        "compact": lambda job: _compact(job, pipeline, topics),
        "export": lambda job: _export(job, pipeline, topics),
        "scrub": lambda job: _scrub(job, pipeline, topics),
    }
    if name not in works:
        raise InvalidRequestError(f"a pipeline has no job {name!r} to be asked for")
    if name == "export" and pipeline.export.to is None:
        raise InvalidRequestError(
            "pipeline.export.to does not say where exports go",
            hint="set it, or run `ister pipeline export --to ...`",
        )
    return SlowJob(name=name, every_seconds=float("inf"), work=works[name])


def _compact(job: Job, pipeline: PipelineConfig, topics: Sequence[str] | None = None) -> None:
    from ister.spark.jobs.compaction import CompactSettings, compact_topics  # noqa: PLC0415

    wanted = pipeline.compact
    settings = CompactSettings(
        format=wanted.format.value,
        keep=wanted.keep.value,
        target_mb=wanted.target_mb,
        min_objects=wanted.min_objects,
    )
    compact_topics(job, job.topics(topics or wanted.topics), settings)


def _export(job: Job, pipeline: PipelineConfig, topics: Sequence[str] | None = None) -> None:
    from ister.spark.jobs.exporting import ExportSettings, export_topics  # noqa: PLC0415

    wanted = topics or pipeline.export.topics
    export_topics(job, ExportSettings.from_config(pipeline.export), topics=wanted)


def _scrub(job: Job, pipeline: PipelineConfig, topics: Sequence[str] | None = None) -> None:
    from ister.spark.jobs.scrubbing import scrub_topics  # noqa: PLC0415

    wanted = job.topics(topics or pipeline.scrub.topics)
    scrub_topics(job, wanted, repair=pipeline.scrub.repair)


# -- the service ----------------------------------------------------------------------------


class Service:
    """See the module header. `run` is called once."""

    def __init__(
        self,
        spark: SparkSession,
        place: Place,
        *,
        tier: TierCycle | None,
        jobs: Sequence[SlowJob],
        clock: Clock,
        tier_now: TierCycle | None = None,
        make_job: MakeJob | None = None,
        tick_seconds: float = _TICK_SECONDS,
        status_seconds: float = _STATUS_SECONDS,
        request_seconds: float = _REQUEST_SECONDS,
        rng: random.Random | None = None,
    ) -> None:
        """Takes what it is to do.

        Args:
            spark: A classic session.
            place: Where the log is.
            tier: An upload cycle of what is due; None if uploads are not this pipeline's.
            jobs: What is done on a schedule.
            clock: Where time comes from.
            tier_now: An upload cycle of everything; `tier` by default.
            make_job: Makes a job that was asked for; only those of `jobs` by default.
            tick_seconds: From one cycle to the next.
            status_seconds: From one status to the next.
            request_seconds: From one look for requests to the next.
            rng: For pauses.
        """
        self._spark = spark
        self._place = place
        self.tier = tier
        self.tier_now = tier_now if tier_now is not None else tier
        self.make_job = make_job if make_job is not None else self._find_job
        self.request_seconds = request_seconds
        self.jobs = list(jobs)
        self.clock = clock
        self.tick_seconds = tick_seconds
        self.status_seconds = status_seconds
        self.rng = rng if rng is not None else random.Random()  # noqa: S311 - pauses
        self._keys = PipelineKeys(place.config.storage.metadata.root_prefix)
        self.started_at = clock.now_ns() // 1_000_000_000
        self.totals = _Totals()
        self.terms = 0
        self._last_error: dict[str, Any] | None = None
        self._last: dict[str, Any] = {}

    def _find_job(self, name: str, topics: Sequence[str] | None) -> SlowJob:
        found = next((slow for slow in self.jobs if slow.name == name), None)
        if found is None or topics is not None:
            raise InvalidRequestError(f"this pipeline does not do {name!r}")
        return found

    def run(self, stop: threading.Event, *, max_seconds: float | None = None) -> JobReport:
        """Stands by, leads, stands by, until it is stopped."""
        report = JobReport("run", started_at=self.started_at)
        began = self.clock.monotonic()
        ttl = self._place.config.storage.metadata.lease_ttl_seconds
        ends_at = began + max_seconds if max_seconds is not None else None
        is_waiting = False
        failures = 0
        while not stop.is_set() and not self.is_over(ends_at):
            pause = ttl / _LOOKS_PER_LEASE
            try:
                self._lead(stop, ends_at)
                is_waiting, failures = False, 0
                continue
            except FencedError as error:
                _log.warning("the lease was lost", extra={"error": str(error)})
                failures += 1
            except ConflictError as error:
                if not is_waiting:
                    _log.info("standing by", extra={"error": str(error)})
                is_waiting = True
            except UnavailableError as error:
                if self.is_spark_dead():
                    raise
                _log.warning("the pipeline cannot run now", extra={"error": str(error)})
                self._last_error = {"code": error.code, "message": error.message}
                failures += 1
            if failures:
                pause = backoff_seconds(failures, first=pause, most=2 * ttl, rng=self.rng)
            self.wait(stop, pause * self.rng.uniform(0.8, 1.2), ends_at)
        report.seconds = self.clock.monotonic() - began
        report.more.update(self._last or {"state": "standby"})
        if self._last_error is not None and not self.totals.cycles:
            report.fail(self._last_error)
        return report

    def _lead(self, stop: threading.Event, ends_at: float | None) -> None:
        """Has the lease, for as long as it lasts.

        Raises:
            ConflictError: Somebody else has it.
            FencedError: It has ended.
            UnavailableError: The metadata store does not answer.
        """
        with open_job(
            "run", self._spark, self._place, exclusive=self._keys.lease, clock=self.clock
        ) as job:
            self.terms += 1
            self._last_error = None
            _log.info("the pipeline runs", extra={"holder": job.fence.id})
            term = _Term(self, job, stop, ends_at)
            try:
                term.run()
            finally:
                self._last = term.end()
                job.report.more.update(self._last)
                _log.info("the pipeline does not run any more", extra={"holder": job.fence.id})

    def is_over(self, ends_at: float | None) -> bool:
        """Whether its time has passed."""
        return ends_at is not None and self.clock.monotonic() >= ends_at

    def wait(self, stop: threading.Event, seconds: float, ends_at: float | None) -> None:
        """Waits, but not beyond the end."""
        if ends_at is not None:
            seconds = min(seconds, max(ends_at - self.clock.monotonic(), 0.0))
        stop.wait(seconds)

    def is_spark_dead(self) -> bool:
        """Whether there is no Spark any more to do anything with."""
        context = getattr(self._spark, "sparkContext", None)
        if context is None:
            return False
        try:
            return context._jsc is None or bool(context._jsc.sc().isStopped())  # noqa: SLF001
        except Exception:  # noqa: BLE001 - the JVM is gone
            return True

    def cancel_tasks(self) -> None:
        """Ends what Spark is doing; whoever waits for it goes on with an error."""
        context = getattr(self._spark, "sparkContext", None)
        if context is not None:
            try:
                context.cancelAllJobs()
            except Exception:  # noqa: BLE001 - the JVM is gone
                _log.debug("cancel", exc_info=True)


@dataclass(slots=True)
class _Totals:
    """What was tiered since the service started."""

    cycles: int = 0
    objects: int = 0
    messages: int = 0
    bytes: int = 0
    last_cycle_at: int | None = None
    last_cycle_seconds: float | None = None

    def add(self, cycle: _CycleResult, seconds: float, now: int) -> None:
        self.cycles += 1
        self.objects += cycle.objects
        self.messages += cycle.messages
        self.bytes += cycle.bytes
        self.last_cycle_at, self.last_cycle_seconds = now, seconds


class _Term:
    """The time from a lease to its end: three threads."""

    def __init__(
        self, service: Service, job: Job, stop: threading.Event, ends_at: float | None
    ) -> None:
        self._service = service
        self._job = job
        self._stop = stop
        self._ends_at = ends_at
        self._clock = service.clock
        self._rng = service.rng
        self._began = self._clock.monotonic()
        self._over = threading.Event()
        """The lease was lost, or the service is stopped: nobody begins anything."""
        self._is_idle = threading.Event()
        """The tier cycle does not run."""
        self._is_idle.set()
        self._lock = threading.Lock()
        self._slow: Job | None = None
        """The slow job under way."""
        self._slow_name: str | None = None
        self._topics: list[str] = []
        self._report = JobReport("tier", started_at=self._clock.now_ns() // 1_000_000_000)
        self._reported: tuple[int, int] | None = None
        self._report_at = -float("inf")
        self._cycle_error: str | None = None
        self._lag: int | None = None
        self._lag_at = -float("inf")
        self._schedules = {
            slow.name: Schedule(
                slow.every_seconds,
                clock=self._clock,
                rng=self._rng,
                last_started_at=self._last_started(slow.name),
            )
            for slow in service.jobs
        }
        self._threads: list[threading.Thread] = []
        self._requests: dict[str, dict[str, Any]] = {}
        """What has become of the last request for each job."""

    def _last_started(self, name: str) -> int | None:
        """When a job was last begun, by whoever did it."""
        try:
            found = self._job.store.get(self._job.keys.report(name))
            return None if found is None else int(json.loads(found.value)["started_at"])
        except (IsterError, ValueError, TypeError, KeyError):
            return None

    # -- the three threads ------------------------------------------------------------------

    def run(self) -> None:
        """Tiers until the lease is lost, or the service is stopped."""
        self._start("ister-pipeline-status", self._watch)
        self._start("ister-pipeline-jobs", self._run_slow_jobs)
        listed_at = -float("inf")
        failures = 0
        while not self._is_ending():
            self._job.check()
            now = self._clock.monotonic()
            pause = self._service.tick_seconds
            try:
                if now - listed_at >= _LIST_SECONDS:
                    self._topics = self._job.topics(["*"])
                    listed_at = now
                self._run_cycle(self._take_request(("tier",)))
                failures, self._cycle_error = 0, None
            except (FencedError, InvariantError):
                raise
            except Exception as error:
                if self._is_ending():
                    break  # cancelled
                if self._service.is_spark_dead():
                    raise UnavailableError(
                        "Spark has ended", hint="start the pipeline again"
                    ) from error
                failures += 1
                self._cycle_error = _text(error)
                _log.warning("a cycle failed", extra={"error": self._cycle_error})
                pause = backoff_seconds(
                    failures, first=_FAILURE_SECONDS, most=_FAILURE_SECONDS_MAX, rng=self._rng
                )
            self._service.wait(self._stop, pause, self._ends_at)

    def _run_cycle(self, request: PipelineRequest | None) -> None:
        tier, topics = self._service.tier, self._topics
        if request is not None:
            tier = self._service.tier_now
        if tier is None:
            self._service.totals.cycles += 1
            if request is not None:
                self._end_request(request, "this pipeline does not upload")
            return
        self._is_idle.clear()
        error: str | None = None
        try:
            began = self._clock.monotonic()
            if request is not None and request.topics is not None:
                # One that was made a moment ago is among them.
                self._topics = self._job.topics(["*"])
                topics = [topic for topic in request.topics if topic in self._topics]
            cycle = tier(self._job, topics, self._report)
            if cycle.failed:
                error = f"{cycle.failed} topics failed"
        except BaseException as failure:
            error = _text(failure)
            raise
        finally:
            self._is_idle.set()
            if request is not None:
                self._end_request(request, error)
        self._service.totals.add(
            cycle, self._clock.monotonic() - began, self._clock.now_ns() // 1_000_000_000
        )
        known = set(self._topics)
        for gone in self._report.topics.keys() - known:
            del self._report.topics[gone]

    def _run_slow_jobs(self) -> None:
        look_at = -float("inf")
        while not self._over.is_set():
            try:
                if self._clock.monotonic() >= look_at:
                    look_at = self._clock.monotonic() + self._service.request_seconds
                    request = self._take_request(("compact", "export", "scrub"))
                    if request is not None:
                        self._run_requested(request)
                        look_at = -float("inf")  # another one may have waited meanwhile
                        continue
                due = next((s for s in self._service.jobs if self._schedules[s.name].is_due), None)
                if due is None:
                    waits = [schedule.wait_seconds for schedule in self._schedules.values()]
                    pause = min([self._service.request_seconds, *waits])
                    self._over.wait(max(pause, 0.05))
                    continue
                self._run_slow_job(due, self._schedules[due.name])
            except Exception as error:  # noqa: BLE001 - the other jobs keep running
                threads.record("ister-pipeline-jobs", error)
                self._over.wait(_FAILURE_SECONDS)

    def _run_requested(self, request: PipelineRequest) -> None:
        """Does a job that somebody asked for, as if its time had come."""
        try:
            slow = self._service.make_job(request.job, request.topics)
        except IsterError as error:
            _log.warning("a request was refused", extra={"job": request.job, "error": str(error)})
            self._end_request(request, _text(error))
            return
        self._end_request(request, self._run_slow_job(slow, self._schedules.get(slow.name)))

    def _run_slow_job(self, slow: SlowJob, schedule: Schedule | None) -> str | None:
        """Does a job; what it says is wrong, if anything."""
        if schedule is not None:
            schedule.begin()
        error: str | None = None
        is_cut_off = False
        try:
            with open_job(slow.name, self._job.spark, self._job.place, clock=self._clock) as job:
                with self._lock:
                    self._slow, self._slow_name = job, slow.name
                try:
                    # Between the two: whoever ends the term has seen the job, or this sees that.
                    if not self._over.is_set():
                        slow.work(job)
                finally:
                    with self._lock:
                        self._slow = self._slow_name = None
                if job.report.errors:
                    error = str(job.report.errors[0].get("message"))[:_TEXT_MAX]
        except Exception as failure:  # noqa: BLE001 - a job's failure is its own
            error, is_cut_off = _text(failure), True
        if self._over.is_set():
            if schedule is not None:
                schedule.put_off()
            return error or "the pipeline was stopped"
        if error is not None:
            _log.warning("a job failed", extra={"job": slow.name, "error": error})
        if schedule is not None:
            schedule.end(error, is_cut_off=is_cut_off)
        return error

    # -- requests ---------------------------------------------------------------------------

    def _take_request(self, jobs: Sequence[str]) -> PipelineRequest | None:
        """The next request for one of some jobs, which is this pipeline's from now on."""
        store, keys = self._job.store, self._job.keys
        try:
            for request in read_requests(store, keys):
                is_taken = request.job in jobs and take_request(
                    store, keys, request, compares=[self._job.fence.compare]
                )
                if not is_taken:
                    continue
                now = self._clock.now_ns() // 1_000_000_000
                if now - request.requested_at > REQUEST_SECONDS_MAX:
                    _log.warning("a request came too late", extra={"job": request.job})
                    continue
                _log.info("a job was asked for", extra={"job": request.job, "by": request.by})
                with self._lock:
                    self._requests[request.job] = {
                        **request.as_json(),
                        "state": "running",
                        "started_at": now,
                        "ended_at": None,
                        "error": None,
                    }
                # At once: its key is gone, and whoever asked looks for it.
                self._save_status("running")
                return request
        except IsterError as error:
            _log.warning("requests were not looked for", extra={"error": str(error)})
        return None

    def _end_request(self, request: PipelineRequest, error: str | None) -> None:
        with self._lock:
            self._requests[request.job] |= {
                "state": "done" if error is None else "failed",
                "ended_at": self._clock.now_ns() // 1_000_000_000,
                "error": error,
            }

    def _watch(self) -> None:
        """Writes the status, and sees to it that a stop is heeded while Spark works."""
        said_at = self._clock.monotonic()
        while not self._over.wait(min(_LOOK_SECONDS, self._service.status_seconds)):
            if self._is_ending():
                break
            if self._clock.monotonic() - said_at < self._service.status_seconds:
                continue
            said_at = self._clock.monotonic()
            try:
                self._job.fence.check()
            except FencedError:
                break
            except IsterError as error:
                _log.warning("the lease is in doubt", extra={"error": str(error)})
                continue
            with threads.guard("ister-pipeline-status"):
                self._save_status("running")
                self._save_report()
        self._over.set()
        if self._stop.is_set():
            self._save_status("stopping")
            self._is_idle.wait(_GRACE_SECONDS)
        self._fence_slow_job()
        while not self._is_idle.is_set():
            # At once: the broker is to take its uploads back, whatever Spark is doing.
            self._job.fence.release()
            self._service.cancel_tasks()
            self._is_idle.wait(_CANCEL_SECONDS)

    # -- the end ----------------------------------------------------------------------------

    def end(self) -> dict[str, Any]:
        """Ends the threads; what the status says at the end."""
        self._over.set()
        self._fence_slow_job()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_CANCEL_SECONDS)
                if thread.is_alive() and self._is_slow():
                    self._fence_slow_job()
                    self._service.cancel_tasks()
        self._save_report(force=True)
        return self._save_status("stopped")

    def _is_slow(self) -> bool:
        with self._lock:
            return self._slow is not None

    def _fence_slow_job(self) -> None:
        """The slow job under way commits nothing more."""
        with self._lock:
            slow = self._slow
        if slow is not None:
            slow.fence.release()
            self._service.cancel_tasks()

    def _is_ending(self) -> bool:
        return self._stop.is_set() or self._over.is_set() or self._service.is_over(self._ends_at)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        thread = _make_thread(work, name)
        self._threads.append(thread)
        thread.start()

    # -- what is said -----------------------------------------------------------------------

    def _save_status(self, state: str) -> dict[str, Any]:
        status = self.status(state)
        try:
            # Only a holder of the lease says how the pipeline is.
            self._job.store.transact(
                [self._job.fence.compare], [Put(self._job.keys.status, json.dumps(status).encode())]
            )
        except IsterError as error:
            _log.warning("the status was not saved", extra={"error": str(error)})
        return status

    def status(self, state: str) -> dict[str, Any]:
        """How the pipeline is."""
        totals = self._service.totals
        with self._lock:
            slow_name = self._slow_name
            requests = {job: dict(request) for job, request in self._requests.items()}
        failing = sorted({str(error.get("topic")) for error in list(self._report.errors)})
        return {
            "state": state,
            "holder": self._job.fence.id,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started_at": self._service.started_at,
            "updated_at": self._clock.now_ns() // 1_000_000_000,
            "cycles": totals.cycles,
            "terms": self._service.terms,
            "tier": {
                "is_on": self._service.tier is not None,
                "topics": len(self._topics),
                "lag_messages": self._measure_lag(),
                "last_cycle_at": totals.last_cycle_at,
                "last_cycle_seconds": (
                    None
                    if totals.last_cycle_seconds is None
                    else round(totals.last_cycle_seconds, 3)
                ),
                "tiered_objects_total": totals.objects,
                "tiered_messages_total": totals.messages,
                "tiered_bytes_total": totals.bytes,
                "failing_topics": failing[:20],
                "failing_topics_total": len(failing),
                "last_error": self._cycle_error,
            },
            "jobs": {
                name: {**schedule.as_json(), "is_running": name == slow_name}
                for name, schedule in self._schedules.items()
            },
            "requests": requests,
            "memory": sample_memory(),
            "threads": threading.active_count(),
        }

    def _measure_lag(self) -> int | None:
        """How many messages are synced and not tiered, now and then; None if nobody can say."""
        now = self._clock.monotonic()
        if now < self._lag_at:
            return self._lag
        self._lag_at = now + _LAG_SECONDS
        topics = self._topics[:_LAG_TOPICS_MAX]
        try:
            self._lag = measure_lag(self._job.place, topics)
        except Exception as error:  # noqa: BLE001 - a number for people
            _log.debug("lag", extra={"error": _text(error)})
            self._lag = None
        return self._lag

    def _save_report(self, *, force: bool = False) -> None:
        """What was tiered last, for `ister pipeline status`, if anything was."""
        now = self._clock.monotonic()
        mark = (self._service.totals.objects, len(self._report.errors))
        if mark == self._reported or (now < self._report_at and not force):
            return
        self._report_at = now + _REPORT_SECONDS
        report = self._report.as_json()
        report["topics_total"] = len(report["topics"])
        report["topics"] = report["topics"][:_REPORTED_TOPICS_MAX]
        report["seconds"] = round(now - self._began, 3)
        with suppress(IsterError):
            self._job.store.transact(
                [self._job.fence.compare],
                [Put(self._job.keys.report("tier"), json.dumps(report).encode())],
            )
            self._reported = mark


def measure_lag(place: Place, topics: Sequence[str]) -> int:
    """How many messages of topics are synced and not in the bucket yet.

    Raises:
        IsterError: Nobody can say.
    """
    history = place.history()
    total = 0
    elsewhere: list[str] = []
    for name in topics:
        topic = history.topic(name)
        record = topic.record()
        local = LocalTail.find(
            place.config.storage.wal.dir,
            TopicName.parse(name),
            record.node,
            record.incarnation,
            clock=history.clock,
            metrics=history.metrics,
        )
        snapshot = local.snapshot() if local is not None else None
        if snapshot is not None:
            total += max(snapshot.synced - max(topic.tiered, snapshot.trimmed), 0)
        elif local is None:
            elsewhere.append(name)
    client = place.flight()
    if elsewhere and client is not None:
        statuses = client.watermarks(elsewhere).values()
        total += sum(max(status.synced - status.tiered, 0) for status in statuses)
    return total


def _text(error: BaseException) -> str:
    """An error in short: Spark's have a page each."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    name = "" if isinstance(error, IsterError) else f"{type(error).__name__}: "
    return f"{name}{first}"[:_TEXT_MAX]


def _make_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """A thread that lets go of its side of the JVM when it ends, where there is a JVM."""
    from pyspark import InheritableThread, SparkContext  # noqa: PLC0415 - an extra

    if SparkContext._active_spark_context is None:  # noqa: SLF001 - nothing else tells
        return threading.Thread(
            target=threads.run_to_end, args=(name, work), name=name, daemon=True
        )
    thread: threading.Thread = InheritableThread(
        target=threads.run_to_end, args=(name, work), name=name, daemon=True
    )
    return thread


@contextmanager
def stop_on_signals(stop: threading.Event | None) -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a second one does what it did before."""
    stopping = stop if stop is not None else threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def end(number: int, frame: object) -> None:
        signal.signal(number, before[signal.Signals(number)] or signal.SIG_DFL)
        stopping.set()

    for number in before:
        signal.signal(number, end)
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
