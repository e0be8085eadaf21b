"""A job under way: where it works, which topics, its lease, and its report.

    open_job ─► lease, kept by a thread ─► the job ─► report, saved ─► lease given back

Owns: connections for writing metadata, the job's fence and its renewal, the report. Does not own:
the Spark session, what the job does.

Every change that a job makes to a topic goes through `Job.act`, and so requires the fence: a job
that was stopped for longer than its lease changes nothing any more, however late it wakes.

What a crash leaves: a key that ends with its lease, and objects without descriptors, which are
collected later.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ister import failpoints, threads
from ister.clock import Clock, SystemClock
from ister.config import Config, MetadataConfig, load_config
from ister.errors import (
    ConflictError,
    FencedError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
)
from ister.limits import KIB
from ister.metadata.base import MetadataStore
from ister.metrics import Metrics
from ister.model import TopicName
from ister.spark.jobs.progress import NoProgress, Progress
from ister.spark.jobs.report import JobReport, error_as_fields, unexpected_as_fields
from ister.spark.place import Place, find_place, place_of
from ister.tier.catalog import Catalog, list_topics
from ister.tier.fence import Fence, read_holder
from ister.tier.names import TopicKeys
from ister.tier.outside import act_outside
from ister.tier.ownership import OwnedTopic
from ister.tier.pipeline import PipelineKeys
from ister.topic.history import History, HistoryTopic
from ister.topic.tiers import open_metadata
from ister.tracing import span

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Job", "choose_topics", "find_job_place", "open_job", "parse_topics"]

_log = logging.getLogger("ister.spark.jobs")

_RENEWALS_PER_LEASE: Final = 3
# Jobs that may go on for days: what they do now and then is a span, not they.
_LASTING: Final = ("run", "tier")
_REPORTED_TOPICS_MAX: Final = 200
_REPORTED_ERRORS_MAX: Final = 100
_REPORTED_ITEMS_MAX: Final = 50
_REPORT_BYTES_MAX: Final = 256 * KIB


class Job:
    """See the module header. Made by `open_job`. Thread-safe, but for the Spark session."""

    def __init__(
        self,
        name: str,
        spark: SparkSession,
        place: Place,
        store: MetadataStore,
        fence: Fence,
        *,
        dry_run: bool,
        progress: Progress,
        clock: Clock,
    ) -> None:
        self.name = name
        self.spark = spark
        self.place = place
        self.store = store
        self.fence = fence
        self.dry_run = dry_run
        self.progress = progress
        self.clock = clock
        self.metrics = Metrics()
        self.keys = PipelineKeys(place.config.storage.metadata.root_prefix)
        self.report = JobReport(name, started_at=clock.now_ns() // 1_000_000_000, dry_run=dry_run)

    @property
    def history(self) -> History:
        """The log's bucket, and its metadata to be read."""
        return self.place.history()

    def topics(self, wanted: Sequence[str]) -> list[str]:
        """The topics of these names and patterns; see `choose_topics`."""
        root = self.place.config.storage.metadata.root_prefix
        return choose_topics(wanted, list_topics(self.store, root))

    def catalog(self, topic: str) -> Catalog:
        """What the metadata store knows about a topic."""
        keys = TopicKeys(self.place.config.storage.metadata.root_prefix, TopicName.parse(topic))
        return Catalog(self.store, keys, clock=self.clock, metrics=self.metrics)

    def act(self, topic: str) -> OwnedTopic:
        """The right to change a topic; as `ister.tier.outside.act_outside`."""
        return act_outside(self.catalog(topic), self.fence, clock=self.clock, metrics=self.metrics)

    def topic(self, name: str) -> HistoryTopic:
        """A topic, to be read from the bucket."""
        return self.history.topic(name)

    def check(self) -> None:
        """Makes sure that the job still may do what it does.

        Raises:
            FencedError: Its lease has ended.
        """
        if not self.fence.is_valid:
            self.fence.check()


@contextmanager
def open_job(
    name: str,
    spark: SparkSession,
    config: str | Mapping[str, Any] | Config | Place | None,
    *,
    broker: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    exclusive: str | None = None,
    clock: Clock | None = None,
) -> Iterator[Job]:
    """Begins a job, and ends it: its report is complete then, and saved.

    An exception that ends the job is in its report, and goes on.

    Args:
        name: The job's.
        spark: A classic session.
        config: Where the log is: a config file, a data directory, settings; None with `broker`.
        broker: The address of a broker's Flight, for what is not in the bucket yet and not here.
        dry_run: Plan only.
        progress: Who is told how far it has come.
        exclusive: A key that only one job may have at a time; one of its own by default.
        clock: Where time comes from.

    Raises:
        ConflictError: Somebody has the exclusive key.
        ConfigError: The settings do not make sense, or only one process could use them.
        UnavailableError: A store does not answer.
    """
    if specification := os.environ.get("ISTER_FAILPOINTS"):
        failpoints.arm_from_environment(specification)
    clock = clock if clock is not None else SystemClock()
    place = find_job_place(config, broker)
    metadata = place.config.storage.metadata
    store = open_metadata(metadata, clock)
    try:
        fence = _take(store, metadata, name, exclusive, clock)
        job = Job(
            name,
            spark,
            place,
            store,
            fence,
            dry_run=dry_run,
            progress=progress if progress is not None else NoProgress(),
            clock=clock,
        )
        began = clock.monotonic()
        stop = threading.Event()
        keeper = threads.start(
            "ister-job-lease",
            _keep,
            fence,
            metadata.lease_ttl_seconds / _RENEWALS_PER_LEASE,
            stop,
        )
        try:
            failpoints.reach("pipeline.after_lease")
            with nullcontext() if name in _LASTING else span(f"pipeline {name}"):
                yield job
            failpoints.reach("pipeline.before_report")
        except BaseException as error:
            _note_end(job.report, error)
            raise
        finally:
            job.report.seconds = clock.monotonic() - began
            stop.set()
            keeper.join()
            if not dry_run:
                _save_report(job)
            fence.release()
    finally:
        store.close()


def find_job_place(
    config: str | Mapping[str, Any] | Config | Place | None, broker: str | None
) -> Place:
    """The place that a job's arguments name; see `open_job`."""
    if isinstance(config, Place):
        return config if broker is None else replace(config, broker=broker)
    if isinstance(config, Config):
        return place_of(config, broker)
    if config is None and broker is None:
        raise InvalidRequestError(
            "a job has to know where the log is", hint="give config, broker, or both"
        )
    if isinstance(config, Mapping):
        return place_of(load_config(config), broker)
    return find_place(config, broker)


def _take(
    store: MetadataStore, config: MetadataConfig, name: str, exclusive: str | None, clock: Clock
) -> Fence:
    holder_id, ttl = secrets.token_hex(8), config.lease_ttl_seconds
    keys = PipelineKeys(config.root_prefix)
    key = exclusive if exclusive is not None else keys.job(holder_id)
    about = {"job": name, "host": socket.gethostname(), "process": os.getpid()}
    try:
        return Fence.take(store, key, id=holder_id, about=about, ttl_seconds=ttl, clock=clock)
    except ConflictError as error:
        holder = read_holder(store, key)
        raise ConflictError(
            "another pipeline is at it"
            + (
                f": {holder.about.get('job')} on {holder.about.get('host')}, process "
                f"{holder.about.get('process')}"
                if holder is not None
                else ""
            ),
            path=key,
            hint="wait until it is done; after a crash its lease ends by itself, "
            f"within {ttl:g} seconds",
        ) from error


def _keep(fence: Fence, every: float, stop: threading.Event) -> None:
    while not stop.wait(every):
        try:
            fence.renew()
        except FencedError:
            return  # the job finds out at its next commit
        except IsterError as error:
            _log.warning("a job's lease was not renewed", extra={"error": str(error)})
        except Exception as error:  # noqa: BLE001 - the next renewal may succeed
            threads.record("ister-job-lease", error)


def _note_end(report: JobReport, error: BaseException) -> None:
    """Takes note of what has ended a job, unless the job has done so."""
    fields = error_as_fields(error) if isinstance(error, IsterError) else None
    if fields is None or fields not in report.errors:
        report.fail(fields or unexpected_as_fields(error))


def _save_report(job: Job) -> None:
    """For `ister pipeline status` and the dashboard: the last report of each job, in short."""
    try:
        job.store.put(job.keys.report(job.name), _in_short(job.report))
    except IsterError as error:
        _log.warning("a report was not saved", extra={"job": job.name, "error": str(error)})


def _in_short(report: JobReport) -> bytes:
    """A report that fits into the metadata store: long lists are cut, and where need be topics."""
    fields = report.as_json()
    fields["topics_total"] = len(fields["topics"])
    fields["errors"] = fields["errors"][:_REPORTED_ERRORS_MAX]
    topics, shown = fields["topics"][:_REPORTED_TOPICS_MAX], _REPORTED_ITEMS_MAX
    while True:
        fields["topics"] = [
            {k: v[:shown] if isinstance(v, list) else v for k, v in topic.items()}
            for topic in topics
        ]
        data = json.dumps(fields).encode()
        if len(data) <= _REPORT_BYTES_MAX or not topics:
            return data
        topics, shown = topics[: len(topics) // 2], shown // 2


def parse_topics(text: str | Sequence[str] | None) -> list[str]:
    """Names and patterns from a comma list, or a sequence; all topics if there is nothing."""
    if text is None:
        return ["*"]
    parts = text.split(",") if isinstance(text, str) else list(text)
    return [part.strip() for part in parts if part.strip()] or ["*"]


def choose_topics(wanted: Sequence[str], existing: Sequence[str]) -> list[str]:
    """The topics that names and patterns mean, sorted.

    `*` stands for any characters, `?` for one: `/default/*`, `*orders*`. A name without a pattern
    has to exist.

    Raises:
        NotFoundError: A name does not.
    """
    chosen: set[str] = set()
    for item in wanted:
        if any(mark in item for mark in "*?["):
            chosen.update(name for name in existing if fnmatch.fnmatchcase(name, item))
        elif item in existing:
            chosen.add(item)
        else:
            raise NotFoundError(
                f"there is no topic {item}",
                topic=item,
                hint=f"known: {', '.join(existing[:10])}" if existing else "there is none at all",
            )
    return sorted(chosen)
