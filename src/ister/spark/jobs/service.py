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
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ister.base import logs
from ister.base.clock import Clock, SystemClock
from ister.base.retry import backoff_seconds
from ister.bucket.pipeline import REQUESTED_JOBS, PipelineKeys
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
    TierTotals,
)
from ister.spark.jobs.session import stop_on_signals
from ister.spark.jobs.tasks import SparkOrRunner, runner_of
from ister.spark.location import LogLocation

if TYPE_CHECKING:
    from ister.spark.jobs.tier_topics import Cycle

_log = logging.getLogger("ister.spark.jobs.service")

_LOOKS_PER_LEASE: Final = 5


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
    settings = TermSettings(
        tier=_tier if _tiers(place.config) else None,
        jobs=tuple(scheduled_jobs(place.config)),
        make_job=lambda name, topics: requested_job(pipeline, name, topics),
    )
    service = Service(spark, place, settings, clock=clock if clock is not None else SystemClock())
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
                exclusive=slow.key,
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
    """Checks the names and settings of jobs for `run_once`, and returns the jobs."""
    if not jobs or len(set(jobs)) != len(jobs):
        raise InvalidRequestError(
            f"invalid list of jobs {','.join(jobs)!r}",
            hint=f"name each job once: {', '.join(_WORKS)}",
        )
    return [_make_job(config.pipeline, name, _WORKS) for name in jobs]


def scheduled_jobs(config: Config) -> list[SlowJob]:
    """Returns the jobs that have a schedule in the settings, the most important one first."""
    pipeline, express = config.pipeline, config.storage.uploader.express
    seconds = {
        "resort": float(express.resort_seconds) if _tiers(config) else None,
        "compact": _minutes(pipeline.compact.every_minutes),
        "export": _minutes(
            pipeline.export.every_minutes if pipeline.export.to is not None else None
        ),
        "gc": _minutes(pipeline.gc.every_minutes),
        "scrub": _minutes(pipeline.scrub.every_minutes),
    }
    return [
        replace(_make_job(pipeline, name, _WORKS), every_seconds=every)
        for name, every in seconds.items()
        if every is not None
    ]


def requested_job(
    pipeline: PipelineConfig, name: str, topics: Sequence[str] | None = None
) -> SlowJob:
    """Returns a job that was requested, with its settings, whether or not it has a schedule.

    `topics` to work on are by default those of the settings.
    """
    return _make_job(pipeline, name, REQUESTED_JOBS[1:], topics)


def _minutes(every: float | None) -> float | None:
    return None if every is None else every * 60


def _make_job(
    pipeline: PipelineConfig,
    name: str,
    known: Collection[str],
    topics: Sequence[str] | None = None,
) -> SlowJob:
    if name not in known:
        raise InvalidRequestError(f"the pipeline has no job {name!r}", hint=", ".join(known))
    if name == "export" and pipeline.export.to is None:
        raise InvalidRequestError(
            "pipeline.export.to is not set",
            hint="set it, or run `ister pipeline export --to ...`",
        )
    return SlowJob(
        name=name,
        every_seconds=float("inf"),
        work=lambda job: _WORKS[name](job, pipeline, topics),
        key=_KEYS.get(name),
    )


def _tiers(config: Config) -> bool:
    """Returns whether the pipeline does the uploads."""
    return config.storage.uploader.engine in (Engine.AUTO, Engine.SPARK)


# -- jobs, each loaded when it is needed ----------------------------------------------------


def _tier(job: Job, topics: Sequence[str], report: JobReport, only_due: bool) -> Cycle:
    from ister.spark.jobs.tier_job import tier_cycle  # noqa: PLC0415

    return tier_cycle(job, topics, only_due=only_due, report=report)


def _tier_all(job: Job, _: PipelineConfig, topics: Sequence[str] | None) -> None:
    _tier(job, job.topics(topics or ["*"]), job.report, only_due=False)


def _resort(job: Job, _: PipelineConfig, __: Sequence[str] | None) -> None:
    from ister.spark.jobs.compact_job import resort_topics  # noqa: PLC0415

    resort_topics(job)


def _compact(job: Job, pipeline: PipelineConfig, topics: Sequence[str] | None) -> None:
    from ister.spark.jobs.compact_job import CompactSettings, compact_topics  # noqa: PLC0415

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
    "tier": _tier_all,
    "resort": _resort,
    "compact": _compact,
    "export": _export,
    "gc": _gc,
    "scrub": _scrub,
}
_KEYS: Final[dict[str, Callable[[PipelineKeys], str]]] = {
    "tier": lambda keys: keys.lease,
    "gc": lambda keys: keys.gc,
}


# -- the service ----------------------------------------------------------------------------


class Service:
    """Stands by, holds the lease for a term, stands by again. `run` is called once."""

    def __init__(
        self,
        spark: SparkOrRunner,
        place: LogLocation,
        settings: TermSettings,
        *,
        clock: Clock,
        rng: random.Random | None = None,
    ) -> None:
        self._spark = runner_of(spark)
        self._place = place
        self._settings = settings
        self._clock = clock
        self._rng = rng if rng is not None else random.Random()  # noqa: S311 - pauses
        self._totals = TierTotals(started_at=clock.now_ns() // 1_000_000_000)
        self._last_error: ErrorFields | None = None
        self._last_status: dict[str, object] = {}

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
            "run", self._spark, self._place, exclusive=lambda keys: keys.lease, clock=self._clock
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
