"""`run`: the pipeline as a service, which runs its jobs until it is stopped.

    standby ─► lease ─► a term (`pipeline_term`) ─► lease lost, or stop
       ▲                                                 │
       └─────────────────────────────────────────────────┘

`run_once` runs jobs of it one after the other, and ends.

Owns: standby, terms, and which jobs the settings ask for. Does not own: what happens within a term,
what jobs do.

One pipeline at a time holds the lease, and only the holder tiers. Another one stands by and takes
over when the lease has expired.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ister.base import logs
from ister.base.clock import Clock, SystemClock
from ister.base.retry import backoff_seconds
from ister.bucket.pipeline import PipelineKeys
from ister.config import Config, Engine, PipelineConfig
from ister.errors import (
    ConflictError,
    FencedError,
    InvalidRequestError,
    IsterError,
    UnavailableError,
)
from ister.spark.jobs.job import Job, JobConfig, find_job_place, open_job
from ister.spark.jobs.job_report import ErrorFields, JobProgress, JobReport, unexpected_as_fields
from ister.spark.jobs.pipeline_term import (
    PipelineTerm,
    SlowJob,
    TermSettings,
    TierCycle,
    TierTotals,
)
from ister.spark.jobs.stop_signals import stop_on_signals
from ister.spark.jobs.tasks import SparkOrRunner, runner_of
from ister.spark.location import LogLocation

if TYPE_CHECKING:
    from ister.spark.jobs.tier_topics import Cycle

_log = logging.getLogger("ister.spark.jobs.service")

_LOOKS_PER_LEASE: Final = 5
_ONCE_JOBS: Final = ("tier", "resort", "compact", "export", "gc", "scrub")


def run(
    spark: SparkOrRunner,
    config: JobConfig = None,
    *,
    broker: str | None = None,
    stop: threading.Event | None = None,
    max_seconds: float | None = None,
    clock: Clock | None = None,
) -> JobReport:
    """Runs the pipeline until it is stopped.

    It owns the session meanwhile: when it is stopped, or loses its lease, running Spark jobs of the
    session are cancelled.

    Args:
        spark: A session, classic or Connect.
        config: Where the log is; see `open_job`. Its setting `pipeline` says what to run.
        broker: Flight addresses of brokers; see `open_job`.
        stop: Stops it; so do SIGINT and SIGTERM, if this is called on the main thread.
        max_seconds: Stops it after this time.
        clock: The clock; the system's by default.

    Returns:
        What was done in all terms; errors are those that stand at the end.

    Raises:
        ConfigError: The settings are invalid, or only one process could use them.
        UnavailableError: Spark has stopped.
    """
    place = find_job_place(config, broker)
    pipeline = place.config.pipeline
    if not _tiers(place.config):
        engine = place.config.storage.uploader.engine
        _log.warning("the pipeline does not upload", extra={"uploader.engine": engine.value})
    service = Service(
        spark,
        place,
        tier=_tier_due if _tiers(place.config) else None,
        tier_now=_tier_now,
        jobs=[*resort_jobs(place.config), *slow_jobs(pipeline)],
        make_job=lambda name, topics: requested_job(pipeline, name, topics),
        clock=clock if clock is not None else SystemClock(),
    )
    with stop_on_signals(stop) as stopping:
        return service.run(stopping, max_seconds=max_seconds)


def run_once(
    spark: SparkOrRunner,
    config: JobConfig = None,
    *,
    jobs: Sequence[str],
    broker: str | None = None,
    dry_run: bool = False,
    progress: JobProgress | None = None,
) -> JobReport:
    """Runs some of the pipeline's jobs once, one after the other, in one session.

    A job that fails does not stop those after it.

    Args:
        spark: A session, classic or Connect; None for a dry run, which runs in this process.
        config: Where the log is; see `open_job`. Its setting `pipeline` has the jobs' settings.
        jobs: Names, in the order in which they run: tier, resort, compact, export, gc, scrub.
        broker: Flight addresses of brokers; see `open_job`.
        dry_run: Plan only.
        progress: Receives the jobs' progress.

    Returns:
        For each topic what each job did, by the job's name; `parts` has the jobs' own reports.

    Raises:
        InvalidRequestError: A job does not exist, is named twice, or its settings are incomplete.
        ConfigError: The settings are invalid, or only one process could use them.
        UnavailableError: Spark has stopped.
    """
    place = find_job_place(config, broker)
    runner = runner_of(spark, dry_run=dry_run)
    wanted = check_once(place.config, jobs)
    clock = SystemClock()
    report = JobReport("run", started_at=clock.now_ns() // 1_000_000_000, dry_run=dry_run)
    began = clock.monotonic()
    for slow in wanted:
        part = JobReport(slow.name, dry_run=dry_run)
        try:
            with open_job(
                slow.name,
                runner,
                place,
                dry_run=dry_run,
                progress=progress,
                exclusive=None if dry_run or slow.key is None else slow.key(_keys(place)),
            ) as job:
                part = job.report
                slow.work(job)
        except Exception as error:
            if runner.is_stopped:
                raise UnavailableError("Spark has stopped", hint="run it again") from error
            if part.ok:
                part.fail(error if isinstance(error, IsterError) else unexpected_as_fields(error))
        report.parts.append(part)
        for topic, fields in part.topics.items():
            report.of(topic)[slow.name] = {k: v for k, v in fields.items() if k != "topic"}
        for failure in part.errors:
            report.fail({"job": slow.name, **failure})
    report.seconds = clock.monotonic() - began
    return report


def check_once(config: Config, jobs: Sequence[str]) -> list[SlowJob]:
    """Checks the names and settings of jobs for `run_once`, and returns the jobs.

    Raises:
        InvalidRequestError: A job does not exist, is named twice, or its settings are incomplete.
    """
    if not jobs or len(set(jobs)) != len(jobs):
        raise InvalidRequestError(
            f"invalid list of jobs {','.join(jobs)!r}",
            hint=f"name each job once: {', '.join(_ONCE_JOBS)}",
        )
    made: list[SlowJob] = []
    for name in jobs:
        if name == "tier":
            made.append(
                SlowJob(
                    name=name,
                    every_seconds=float("inf"),
                    work=lambda job: _tier_now(job, job.topics(["*"]), job.report),
                    key=lambda keys: keys.lease,
                )
            )
        elif name == "resort":
            made.append(SlowJob(name=name, every_seconds=float("inf"), work=_resort))
        elif name in _WORKS:
            made.append(requested_job(config.pipeline, name))
        else:
            raise InvalidRequestError(
                f"the pipeline has no job {name!r}", hint=f"one of: {', '.join(_ONCE_JOBS)}"
            )
    return made


def _keys(place: LogLocation) -> PipelineKeys:
    return PipelineKeys(place.config.storage.metadata.root_prefix)


def _tiers(config: Config) -> bool:
    """Returns whether the pipeline does the uploads."""
    return config.storage.uploader.engine in (Engine.AUTO, Engine.SPARK)


# -- jobs, each loaded when it is needed ----------------------------------------------------


def _tier_due(job: Job, topics: Sequence[str], report: JobReport) -> Cycle:
    from ister.spark.jobs.tiering import tier_cycle  # noqa: PLC0415

    return tier_cycle(job, topics, only_due=True, report=report)


def _tier_now(job: Job, topics: Sequence[str], report: JobReport) -> Cycle:
    from ister.spark.jobs.tiering import tier_cycle  # noqa: PLC0415

    return tier_cycle(job, topics, report=report)


def _compact(job: Job, pipeline: PipelineConfig, topics: Sequence[str] | None) -> None:
    from ister.spark.jobs.compaction import CompactSettings, compact_topics  # noqa: PLC0415

    wanted = pipeline.compact
    settings = CompactSettings(
        format=wanted.format.value,
        keep=wanted.keep.value,
        target_mb=wanted.target_mb,
        min_objects=wanted.min_objects,
    )
    compact_topics(job, job.topics(topics or wanted.topics), settings)


def _export(job: Job, pipeline: PipelineConfig, topics: Sequence[str] | None) -> None:
    from ister.spark.jobs.export_job import ExportSettings, export_topics  # noqa: PLC0415

    wanted = topics or pipeline.export.topics
    export_topics(job, ExportSettings.from_config(pipeline.export), topics=wanted)


def _gc(job: Job, pipeline: PipelineConfig, topics: Sequence[str] | None) -> None:
    from ister.spark.jobs.gc_job import collect_topics  # noqa: PLC0415

    wanted = topics or pipeline.gc.topics
    collect_topics(job, job.topics(wanted), is_everything="*" in wanted)


def _scrub(job: Job, pipeline: PipelineConfig, topics: Sequence[str] | None) -> None:
    from ister.spark.jobs.scrubbing import scrub_topics  # noqa: PLC0415

    wanted = job.topics(topics or pipeline.scrub.topics)
    scrub_topics(job, wanted, repair=pipeline.scrub.repair)


_WORKS: Final[dict[str, Callable[[Job, PipelineConfig, Sequence[str] | None], None]]] = {
    "compact": _compact,
    "export": _export,
    "gc": _gc,
    "scrub": _scrub,
}


def _resort(job: Job) -> None:
    from ister.spark.jobs.resorting import resort_topics  # noqa: PLC0415

    resort_topics(job)


def resort_jobs(config: Config) -> list[SlowJob]:
    """Returns the job that re-sorts express runs; none if the pipeline does not upload."""
    if not _tiers(config):
        return []
    every_seconds = float(config.storage.uploader.express.resort_seconds)
    return [SlowJob(name="resort", every_seconds=every_seconds, work=_resort)]


def slow_jobs(pipeline: PipelineConfig) -> list[SlowJob]:
    """Returns the jobs that have a schedule in the settings, the most important one first."""
    minutes = {
        "compact": pipeline.compact.every_minutes,
        "export": pipeline.export.every_minutes if pipeline.export.to is not None else None,
        "gc": pipeline.gc.every_minutes,
        "scrub": pipeline.scrub.every_minutes,
    }
    return [
        replace(_job(pipeline, name, None), every_seconds=every * 60)
        for name, every in minutes.items()
        if every is not None
    ]


def requested_job(
    pipeline: PipelineConfig, name: str, topics: Sequence[str] | None = None
) -> SlowJob:
    """Returns a job that was requested, with its settings, whether or not it has a schedule.

    `topics` to work on are by default those of the settings.

    Raises:
        InvalidRequestError: The job does not exist, or its settings are incomplete.
    """
    if name not in _WORKS:
        raise InvalidRequestError(f"the pipeline has no job {name!r}", hint=", ".join(_WORKS))
    if name == "export" and pipeline.export.to is None:
        raise InvalidRequestError(
            "pipeline.export.to is not set",
            hint="set it, or run `ister pipeline export --to ...`",
        )
    return _job(pipeline, name, topics)


def _job(pipeline: PipelineConfig, name: str, topics: Sequence[str] | None) -> SlowJob:
    return SlowJob(
        name=name,
        every_seconds=float("inf"),
        work=lambda job: _WORKS[name](job, pipeline, topics),
        key=(lambda keys: keys.gc) if name == "gc" else None,
    )


# -- the service ----------------------------------------------------------------------------


class Service:
    """Stands by, holds the lease for a term, stands by again. `run` is called once."""

    def __init__(
        self,
        spark: SparkOrRunner,
        place: LogLocation,
        *,
        tier: TierCycle | None,
        jobs: Sequence[SlowJob],
        clock: Clock,
        tier_now: TierCycle | None = None,
        make_job: Callable[[str, Sequence[str] | None], SlowJob] | None = None,
        tick_seconds: float = 1.0,
        status_seconds: float = 3.0,
        request_seconds: float = 1.0,
        rng: random.Random | None = None,
    ) -> None:
        """Takes what the service does.

        Without `tier` the pipeline does not upload. `tier_now` uploads everything, by default as
        `tier`; `make_job` creates a requested job, by default one of `jobs`. `tick_seconds` are
        between upload cycles, `status_seconds` between status records, `request_seconds` between
        looks for requests.
        """
        self._spark = runner_of(spark)
        self._place = place
        self._settings = TermSettings(
            tier=tier,
            tier_now=tier_now if tier_now is not None else tier,
            jobs=tuple(jobs),
            make_job=make_job if make_job is not None else self._find_job,
            tick_seconds=tick_seconds,
            status_seconds=status_seconds,
            request_seconds=request_seconds,
        )
        self._clock = clock
        self._rng = rng if rng is not None else random.Random()  # noqa: S311 - pauses
        self._totals = TierTotals(started_at=clock.now_ns() // 1_000_000_000)
        self._last_error: ErrorFields | None = None
        self._last_status: dict[str, object] = {}

    def _find_job(self, name: str, topics: Sequence[str] | None) -> SlowJob:
        found = next((slow for slow in self._settings.jobs if slow.name == name), None)
        if found is None or topics is not None:
            raise InvalidRequestError(f"this pipeline does not run the job {name!r}")
        return found

    def run(self, stop: threading.Event, *, max_seconds: float | None = None) -> JobReport:
        """Runs until it is stopped; see `run`."""
        report = JobReport("run", started_at=self._totals.started_at)
        began = self._clock.monotonic()
        ttl = self._place.config.storage.metadata.lease_ttl_seconds
        ends_at = began + max_seconds if max_seconds is not None else float("inf")
        is_waiting = False
        failures = 0
        while not stop.is_set() and self._clock.monotonic() < ends_at:
            pause = ttl / _LOOKS_PER_LEASE
            try:
                self._lead(stop, ends_at)
                is_waiting, failures = False, 0
                continue
            except FencedError as error:
                _log.warning("lease lost", extra={"error": str(error)})
                failures += 1
            except ConflictError as error:
                if not is_waiting:
                    _log.info(logs.PIPELINE_STANDBY, extra={"error": str(error)})
                is_waiting = True
            except UnavailableError as error:
                if self._spark.is_stopped:
                    raise
                _log.warning("pipeline cannot run now", extra={"error": str(error)})
                self._last_error = {"code": error.code, "message": error.message}
                failures += 1
            if failures:
                pause = backoff_seconds(failures, first=pause, most=2 * ttl, rng=self._rng)
            left = max(ends_at - self._clock.monotonic(), 0.0)
            stop.wait(min(pause * self._rng.uniform(0.8, 1.2), left))
        report.seconds = self._clock.monotonic() - began
        report.more.update(self._last_status or {"state": "standby"})
        if self._last_error is not None and not self._totals.cycles:
            report.fail(self._last_error)
        return report

    def _lead(self, stop: threading.Event, ends_at: float) -> None:
        """Runs a term, for as long as the lease lasts."""
        with open_job(
            "run", self._spark, self._place, exclusive=_keys(self._place).lease, clock=self._clock
        ) as job:
            self._totals.terms += 1
            self._last_error = None
            _log.info(logs.PIPELINE_STARTED, extra={"holder": job.fence.id})
            term = PipelineTerm(
                job, self._settings, self._totals, stop, ends_at=ends_at, rng=self._rng
            )
            try:
                term.run()
            finally:
                self._last_status = term.end()
                job.report.more.update(self._last_status)
                _log.info("pipeline stopped", extra={"holder": job.fence.id})
