"""The job `export`: topics become tables, each offset once.

Owns: the settings, and rounds of an export that runs until it is stopped. Does not own: a round
(`export_round`) and its commits (`export_commit`), tables (`ister.spark.tables`), what a task does
(`export_task`).

A round commits once to each table, whatever the number of topics, and not at all if there is
nothing new. Only a large backlog takes more commits, each of about a gigabyte per slot.

Exactly once rests on two mechanisms. Only one export of a topic into a table runs at a time: it
holds a leased key. And the table's own commit records the ranges of offsets and refuses those it
has: an export that was paused for longer than its lease, and wakes up in the middle of a commit,
adds nothing twice. The next run adds what is missing from a table.

A range counts as exported when it was read to its end: offsets that compaction removed, and
messages that became dead letters, are not exported again. Dead letters are committed before the
rows of the same ranges, under the schema that refused them: a run after a crash in between does not
write them again, unless the schema has changed.

A topic that was deleted and created again starts at offset 0 again, so a table with rows of the old
topic refuses it, unless `accept_remade` is set. So does a table with rows whose offsets a new owner
assigned again after a disk was lost, which can only happen to rows exported from the tail.

Files are removed only if they certainly are not in the table: no commit was tried, or the table
refused it. Otherwise they stay: the table may have them, and the next run finds out.

What a crash leaves: files that no commit names, which each table format collects in its own way,
and leased keys, which expire.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Self

from ister.base.positions import to_milliseconds
from ister.config import ExportConfig, TableFormat
from ister.errors import FencedError, InvalidRequestError, IsterError
from ister.spark.jobs.export_round import ExportRound
from ister.spark.jobs.job import Job, JobConfig, TopicNames, open_job, parse_topics
from ister.spark.jobs.job_report import JobProgress, JobReport
from ister.spark.jobs.tasks import SparkOrRunner

_log = logging.getLogger("ister.spark.jobs.export")

_INTERVAL_SECONDS: Final = 60.0
_FILE_MB_MAX: Final = 4096
_ZSTD_LEVEL_MAX: Final = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """What is exported, and where to; see `export`."""

    to: str
    format: TableFormat = TableFormat.PARQUET
    schema: str | os.PathLike[str] | Mapping[str, object] | None = None
    catalog: Mapping[str, str] | None = field(default=None, repr=False)
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)
    start: int | datetime | None = None
    end: int | datetime | None = None
    dead_letters: str | None = None
    include_tail: bool = False
    file_mb: int = 128
    zstd_level: int = 3
    accept_remade: bool = False

    def __post_init__(self) -> None:
        for name, value, most in (
            ("file_mb", self.file_mb, _FILE_MB_MAX),
            ("zstd_level", self.zstd_level, _ZSTD_LEVEL_MAX),
        ):
            if not 1 <= value <= most:
                raise InvalidRequestError(f"invalid {name} {value}", hint=f"1 to {most}")
        for name, where in (("start", self.start), ("end", self.end)):
            if isinstance(where, datetime):
                to_milliseconds(where)
            elif where is not None and (isinstance(where, bool) or where < 0):
                raise InvalidRequestError(f"{name} {where!r} is not an offset")

    @classmethod
    def from_config(cls, config: ExportConfig) -> Self:
        """Returns the settings of `pipeline.export`."""
        if config.to is None:
            raise InvalidRequestError("pipeline.export.to is not set")
        return cls(
            to=config.to,
            format=config.format,
            schema=config.schema,
            catalog=dict(config.catalog) or None,
        )


def export(
    spark: SparkOrRunner,
    config: JobConfig = None,
    *,
    broker: str | None = None,
    topics: TopicNames = None,
    to: str,
    format: str | TableFormat = TableFormat.PARQUET,
    schema: str | os.PathLike[str] | Mapping[str, object] | None = None,
    catalog: Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
    start: int | datetime | None = None,
    end: int | datetime | None = None,
    dead_letters: str | None = None,
    include_tail: bool = False,
    file_mb: int = 128,
    zstd_level: int = 3,
    accept_remade: bool = False,
    available_now: bool = True,
    interval: float | None = None,
    stop: threading.Event | None = None,
    dry_run: bool = False,
    progress: JobProgress | None = None,
) -> JobReport:
    """Exports topics into tables, each offset once, also across runs.

    Args:
        spark: A session, classic or Connect; None for a dry run, which runs in this process.
        config: Where the log is; see `open_job`.
        broker: Flight addresses of brokers; see `open_job`.
        topics: Names and patterns; all topics by default.
        to: A directory or an address (Parquet, Delta), a table's name or `<warehouse>/<table>`
            (Iceberg). `{namespace}` and `{topic}` stand for each topic's; without them, all topics
            go into one table.
        format: `parquet`, `iceberg` or `delta`.
        schema: A JSON Schema, or the path of one: its properties become columns instead of
            `payload`, and messages that do not fit become dead letters. `registry` stands for the
            newest version of each topic's own schema in the schema registry.
        catalog: Properties of an Iceberg catalog; by default one in SQLite, in the warehouse.
        storage_options: Options for a table in a bucket, as in `storage.cloud.options`; by default
            the log's own, if its bucket is of the same kind.
        start: The first offset, or the time, to start at; the earliest by default.
        end: The offset, or the time, to stop before.
        dead_letters: The table of messages that do not fit; `<table>_dead_letters` by default.
        include_tail: Also export what is durable and not in the bucket yet.
        file_mb: Approximate maximum size of files.
        zstd_level: Compression level of files.
        accept_remade: Accept a topic that was deleted and created again into the same table.
        available_now: Export the current messages and stop; if False, repeat until `stop` is set.
        interval: Seconds between two rounds of a repeated export; 60 by default.
        stop: Stops a repeated export.
        dry_run: Plan only.
        progress: Receives the job's progress.

    Raises:
        InvalidRequestError: An argument is invalid.
        NotFoundError: A topic, or the schema's file, does not exist.
        UnavailableError: A store does not respond.
    """
    settings = ExportSettings(
        to=to,
        format=_parse_format(format),
        schema=schema,
        catalog=catalog,
        storage_options=storage_options,
        start=start,
        end=end,
        dead_letters=dead_letters,
        include_tail=include_tail,
        file_mb=file_mb,
        zstd_level=zstd_level,
        accept_remade=accept_remade,
    )

    def begin() -> AbstractContextManager[Job]:
        return open_job("export", spark, config, broker=broker, dry_run=dry_run, progress=progress)

    if available_now or dry_run:
        with begin() as job:
            export_topics(job, settings, topics=topics)
            return job.report
    pause = _INTERVAL_SECONDS if interval is None else interval
    ending = stop if stop is not None else threading.Event()
    return _repeat(begin, settings, topics, pause, ending)


def _repeat(
    begin: Callable[[], AbstractContextManager[Job]],
    settings: ExportSettings,
    topics: TopicNames,
    pause: float,
    ending: threading.Event,
) -> JobReport:
    """Runs round after round; a store that does not respond for a while does not end it."""
    report: JobReport | None = None
    while True:
        try:
            with begin() as job:
                if report is not None:
                    job.report.started_at = report.started_at
                    job.report.topics.update(report.topics)
                    job.report.more.update(report.more)
                report = job.report
                while True:
                    # What failed is tried again, and reported again if it fails again.
                    report.errors.clear()
                    _run_round(job, settings, topics)
                    if ending.wait(pause):
                        return report
        except IsterError as error:
            if report is None or not (error.retriable or isinstance(error, FencedError)):
                raise
            # Open the job again: its lease has expired, or its store does not respond.
            _log.warning("export restarts", extra={"error": str(error)})
            report.errors.clear()
            report.fail(error)
            if ending.wait(pause):
                return report


def _run_round(job: Job, settings: ExportSettings, topics: TopicNames) -> None:
    """Runs a round of a repeated export."""
    try:
        job.check()
        export_topics(job, settings, topics=topics)
    except IsterError as error:
        if not error.retriable:
            raise
        _log.warning("export round failed", extra={"error": str(error)})
        job.report.fail(error)


def _parse_format(name: str | TableFormat) -> TableFormat:
    try:
        return TableFormat(name)
    except ValueError as error:
        raise InvalidRequestError(
            f"unknown table format {name!r}", hint="parquet, iceberg or delta"
        ) from error


def export_topics(job: Job, settings: ExportSettings, *, topics: TopicNames = None) -> None:
    """Runs one round of an export within a job; the result is in the job's report."""
    ExportRound(job, settings).run(job.topics(parse_topics(topics)))
