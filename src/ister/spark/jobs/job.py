"""A running job: where its log is, which topics it works on, its lease, and its report.

    open_job ─► lease, renewed by a thread ─► the job ─► report, saved ─► lease released

Owns: connections for writing metadata, the job's fence, the report. Does not own: the Spark
session, what the job does.

Every change that a job makes to a topic goes through `Job.act`, and so requires the fence: a job
that was paused for longer than its lease changes nothing when it wakes up.

What a crash leaves: a key that expires with its lease, and objects without descriptors, which are
collected later.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Final, TypeAlias

from ister.base import failpoints
from ister.base.clock import Clock, SystemClock
from ister.base.limits import KIB
from ister.base.metrics import Metrics
from ister.base.model import TopicName
from ister.base.tracing import span
from ister.bucket.catalog import Catalog
from ister.bucket.claim import act_outside
from ister.bucket.directory import TopicDirectory
from ister.bucket.fence import Fence
from ister.bucket.identity import BucketIdentity
from ister.bucket.names import TopicKeys
from ister.bucket.ownership import OwnedTopic
from ister.bucket.pipeline import PipelineKeys
from ister.client.flight import parse_brokers
from ister.config import Config, load_config
from ister.errors import InvalidRequestError, InvariantError, IsterError, NotFoundError
from ister.metadata.base import MetadataStore
from ister.spark.jobs.job_report import (
    JobProgress,
    JobReport,
    NoProgress,
    error_as_fields,
    unexpected_as_fields,
)
from ister.spark.jobs.leases import LeaseKeeper
from ister.spark.jobs.tasks import SparkOrRunner, TaskRunner, runner_of
from ister.spark.location import LogLocation, find_place, place_of
from ister.topic.history import BucketLog
from ister.topic.stores import open_metadata, open_objects

_log = logging.getLogger("ister.spark.jobs")

JobConfig: TypeAlias = str | Mapping[str, object] | Config | LogLocation | None
"""Where the log is: a config file, a data directory, or settings; None with a broker."""
TopicNames: TypeAlias = str | Sequence[str] | None
"""Topic names and patterns, as a list or separated by commas; None for all topics."""

# Jobs that may run for days: their steps are traced as spans, not they.
_LASTING: Final = ("run", "tier")
_REPORTED_TOPICS_MAX: Final = 200
_REPORTED_ERRORS_MAX: Final = 100
_REPORTED_ITEMS_MAX: Final = 50
_REPORT_BYTES_MAX: Final = 256 * KIB


class Job:
    """A running job; see the module header. Thread-safe."""

    def __init__(
        self,
        name: str,
        spark: TaskRunner,
        place: LogLocation,
        store: MetadataStore,
        fence: Fence,
        *,
        dry_run: bool,
        progress: JobProgress,
        clock: Clock,
    ) -> None:
        self.name = name
        self.spark = spark
        """Where tasks run."""
        self.place = place
        self.store = store
        self.fence = fence
        self.dry_run = dry_run
        self.progress = progress
        self.clock = clock
        self.metrics = Metrics()
        self.cache: object = None
        """What a job that works in cycles keeps from one to the next."""
        root_prefix = place.config.storage.metadata.root_prefix
        self.keys = PipelineKeys(root_prefix)
        self.directory = TopicDirectory(store, root_prefix)
        """All topics; for the thread that runs the job."""
        self.report = JobReport(name, started_at=clock.now_ns() // 1_000_000_000, dry_run=dry_run)

    @property
    def history(self) -> BucketLog:
        """The log's bucket, and its metadata for reading."""
        return self.place.history()

    @property
    def slots(self) -> int:
        """Number of tasks that run in parallel."""
        return self.spark.slots

    def topics(self, wanted: Sequence[str]) -> list[str]:
        """Returns the existing topics of these names and patterns; see `choose_topics`."""
        return choose_topics(wanted, sorted(self.directory.read()))

    def catalog(self, topic: str) -> Catalog:
        """Returns a topic's records in the metadata store."""
        keys = TopicKeys(self.place.config.storage.metadata.root_prefix, TopicName.parse(topic))
        return Catalog(self.store, keys, clock=self.clock, metrics=self.metrics)

    def act(self, topic: str) -> OwnedTopic:
        """Takes the right to change a topic; see `ister.bucket.claim.act_outside`."""
        return act_outside(self.catalog(topic), self.fence, clock=self.clock, metrics=self.metrics)

    @contextmanager
    def own_failure(self, topic: str, *, may_be_gone: bool = False) -> Iterator[None]:
        """Records a failure of one topic in the report, so that the job continues with others.

        With `may_be_gone`, a topic that was deleted meanwhile is no failure.
        """
        try:
            yield
        except InvariantError:
            raise
        except IsterError as error:
            if may_be_gone and isinstance(error, NotFoundError) and error.topic == topic:
                return
            self.report.of(topic)
            self.report.fail(error, topic)

    def check(self) -> None:
        """Checks that the job still has its lease."""
        if not self.fence.is_valid:
            self.fence.check()


@contextmanager
def open_job(
    name: str,
    spark: SparkOrRunner,
    config: JobConfig,
    *,
    broker: str | None = None,
    dry_run: bool = False,
    progress: JobProgress | None = None,
    exclusive: Callable[[PipelineKeys], str] | None = None,
    clock: Clock | None = None,
) -> Iterator[Job]:
    """Opens a job; at the end its report is complete and saved.

    An exception that ends the job is recorded in its report, and propagates.

    Args:
        name: The job's name.
        spark: A session, classic or Connect; None for a dry run, which then runs in this process.
        config: A config file, a data directory, or settings; None with `broker`.
        broker: Flight addresses of brokers, separated by commas. Needed without `config`, and for
            brokers that are not reached by the addresses in the metadata store.
        dry_run: Plan only; change nothing.
        progress: Receives the job's progress.
        exclusive: The key that only one job may hold at a time; by default a key of its own, and
            for dry runs, which change nothing.
        clock: The clock; the system's by default.

    Raises:
        InvalidRequestError: There is no session, and it is not a dry run.
        ConflictError: Another process holds the exclusive key, or the bucket is not the one of the
            metadata store.
        ConfigError: The settings are invalid, or only one process could use them.
        UnavailableError: A store does not respond.
    """
    if specification := os.environ.get("ISTER_FAILPOINTS"):
        failpoints.arm_from_environment(specification)
    clock = clock if clock is not None else SystemClock()
    runner = runner_of(spark, dry_run=dry_run)
    place = find_job_place(config, broker)
    metadata = place.config.storage.metadata
    store = open_metadata(metadata, clock)
    holder = secrets.token_hex(8)
    keys = PipelineKeys(metadata.root_prefix)
    key = keys.job(holder) if exclusive is None or dry_run else exclusive(keys)
    try:
        with closing(open_objects(place.config.storage, clock)) as objects:
            BucketIdentity(objects, store, root_prefix=metadata.root_prefix).verify()
        with LeaseKeeper(
            store, ttl_seconds=metadata.lease_ttl_seconds, clock=clock, thread="ister-job-lease"
        ) as keeper:
            job = Job(
                name,
                runner,
                place,
                store,
                keeper.take(key, {"job": name}, holder=holder),
                dry_run=dry_run,
                progress=progress if progress is not None else NoProgress(),
                clock=clock,
            )
            began = clock.monotonic()
            try:
                failpoints.reach("pipeline.after_lease")
                with nullcontext() if name in _LASTING else span(f"pipeline {name}"):
                    yield job
                failpoints.reach("pipeline.before_report")
            except BaseException as error:
                _record_end(job.report, error)
                raise
            finally:
                job.report.seconds = clock.monotonic() - began
                if not dry_run:
                    _save_report(job)
    finally:
        store.close()


def find_job_place(config: JobConfig, broker: str | None) -> LogLocation:
    """Returns the place that a job's arguments name; see `open_job`.

    Brokers that the arguments do not name are those of the setting `pipeline.broker`, if any.
    """
    brokers = parse_brokers(broker)
    if config is None and not brokers:
        raise InvalidRequestError(
            "neither config nor broker is given", hint="pass config, broker, or both"
        )
    if isinstance(config, LogLocation):
        place = replace(config, brokers=brokers or config.brokers)
    elif isinstance(config, Config):
        place = place_of(config, brokers)
    elif isinstance(config, Mapping):
        place = place_of(load_config(config), brokers)
    else:
        place = find_place(config, brokers)
    return replace(place, brokers=place.brokers or parse_brokers(place.config.pipeline.broker))


def _record_end(report: JobReport, error: BaseException) -> None:
    """Records what ended a job, unless the job has recorded it."""
    fields = error_as_fields(error) if isinstance(error, IsterError) else None
    if fields is None or fields not in report.errors:
        report.fail(fields or unexpected_as_fields(error))


def _save_report(job: Job) -> None:
    """Saves a short form of the report, for `ister pipeline status` and the dashboard."""
    try:
        job.store.put(job.keys.report(job.name), shorten(job.report))
    except IsterError as error:
        _log.warning("job report not saved", extra={"job": job.name, "error": str(error)})


def shorten(report: JobReport) -> bytes:
    """Encodes a report so that it fits into the metadata store: cuts lists, then topics."""
    fields = report.as_json()
    topics, shown = report.topics_as_json(), _REPORTED_ITEMS_MAX
    fields["topics_total"] = len(topics)
    fields["errors"] = report.errors[:_REPORTED_ERRORS_MAX]
    topics = topics[:_REPORTED_TOPICS_MAX]
    while True:
        fields["topics"] = [
            {k: v[:shown] if isinstance(v, list) else v for k, v in topic.items()}
            for topic in topics
        ]
        data = json.dumps(fields).encode()
        if len(data) <= _REPORT_BYTES_MAX or not topics:
            return data
        topics, shown = topics[: len(topics) // 2], shown // 2


def parse_topics(text: TopicNames) -> list[str]:
    """Splits names and patterns; `*`, which is all topics, if there are none."""
    if text is None:
        return ["*"]
    parts = text.split(",") if isinstance(text, str) else list(text)
    return [part.strip() for part in parts if part.strip()] or ["*"]


def choose_topics(wanted: Sequence[str], existing: Sequence[str]) -> list[str]:
    """Returns the existing topics that match names or patterns, sorted.

    `*` matches any characters, `?` one: `/default/*`, `*orders*`. A plain name has to exist.
    """
    chosen: set[str] = set()
    for item in wanted:
        if any(mark in item for mark in "*?["):
            chosen.update(name for name in existing if fnmatch.fnmatchcase(name, item))
        elif item in existing:
            chosen.add(item)
        else:
            raise NotFoundError(
                f"topic {item} does not exist",
                topic=item,
                hint=f"existing topics: {', '.join(existing[:10])}"
                if existing
                else "the log has no topics",
            )
    return sorted(chosen)
