"""The job `export`: topics become tables, each offset once.

    plan: what is tiered ─ what the table has ─► tasks write files ─► dead letters ─► table's commit

Owns: the plan, who may export a topic into a table, and the order of commits. Does not own: tables
and their commits (`ister.spark.tables`), what a task does (`export_task`).

Exactly once stands on two feet. Only one export of a topic into a table runs at a time: it has a
leased key. And the table's own commit records the ranges of offsets and refuses those that it has:
an export that was paused for longer than its lease, and wakes up in the middle of a commit, adds
nothing twice. What is missing from a table, whyever, is what the next run adds.

A range counts as exported when it was read to its end: offsets that compaction left out on purpose,
and messages that became dead letters, are not looked for again. Dead letters are committed before
the rows of the same ranges, and under the schema that refused them: a run after a crash in between
does not write them again, unless the schema is another one by then.

A topic that was deleted and made again is another topic: its offsets begin anew, so a table that
has rows of the old one refuses it, unless `accept_remade` says that both may be in there. So does a
table with offsets that a new owner gave out again after a disk was lost, which can happen to what
was exported from the tail only.

Files are removed only if they surely will not be in the table: a commit was not tried, or the table
refused it. After anything else they stay: the table may have them, and the next run finds out.

What a crash leaves: files that no commit names, which tables collect in their own ways, and leased
keys, which end.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa

from ister import failpoints, threads
from ister.config import Config, ExportConfig, TableFormat
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    FencedError,
    InvalidRequestError,
    IsterError,
    OffsetOutOfRangeError,
)
from ister.limits import GIB, MIB
from ister.spark.heads import Head, Heads
from ister.spark.jobs.export_task import Exported, ExportItem, Output, export_item
from ister.spark.jobs.job import Job, open_job, parse_topics
from ister.spark.jobs.progress import Progress
from ister.spark.jobs.report import JobReport
from ister.spark.jobs.tasks import run_tasks
from ister.spark.options import ReadOptions
from ister.spark.patience import patiently
from ister.spark.place import Place
from ister.spark.planner import Partition, plan
from ister.spark.reading import TopicIdentity
from ister.spark.tables.base import Addition, Table
from ister.spark.tables.columns import ENVELOPE, ENVELOPE_WITHOUT_PAYLOAD, LETTERS
from ister.spark.tables.json_schema import Member, columns_of, load_schema, with_types
from ister.spark.tables.opening import TablePlace, dead_letters_name, open_table, table_name
from ister.spark.tables.ranges import (
    ANY_INCARNATION,
    Coverage,
    Ranges,
    count,
    intersect,
    normalise,
    subtract,
)
from ister.tier.fence import Fence, read_holder
from ister.topic.arguments import as_milliseconds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["ExportSettings", "export", "export_topics"]

_log = logging.getLogger("ister.spark.jobs.export")

_COMMIT_BYTES: Final = 1 * GIB
"""Of a topic's messages, about: so much is committed before all of the rest is done."""
_TASK_BYTES_MIN: Final = 8 * MIB
"""Less than this is not divided among tasks."""
_RENEWALS_PER_LEASE: Final = 3
_RUN_RENEWAL_SECONDS: Final = 60.0
_INTERVAL_SECONDS: Final = 60.0
_FILE_MB_MAX: Final = 4096
_ZSTD_LEVEL_MAX: Final = 22
_SHOWN_RANGES: Final = 20
_LETTERS_MARK: Final = "@"
"""No topic's incarnation has it: it tells what is recorded of dead letters from that of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """What is exported, and to what."""

    to: str
    format: TableFormat = TableFormat.PARQUET
    schema: str | os.PathLike[str] | Mapping[str, Any] | None = None
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
        if not 1 <= self.file_mb <= _FILE_MB_MAX:
            raise InvalidRequestError(f"file_mb {self.file_mb}", hint=f"1 to {_FILE_MB_MAX}")
        if not 1 <= self.zstd_level <= _ZSTD_LEVEL_MAX:
            raise InvalidRequestError(
                f"zstd_level {self.zstd_level}", hint=f"1 to {_ZSTD_LEVEL_MAX}"
            )
        for name, where in (("start", self.start), ("end", self.end)):
            if isinstance(where, datetime):
                as_milliseconds(where)
            elif where is not None and (isinstance(where, bool) or where < 0):
                raise InvalidRequestError(f"{name} {where!r} is not an offset")

    @classmethod
    def from_config(cls, config: ExportConfig) -> Self:
        """What `pipeline.export` says.

        Raises:
            InvalidRequestError: It does not say where to.
        """
        if config.to is None:
            raise InvalidRequestError("pipeline.export.to is not set")
        return cls(
            to=config.to,
            format=config.format,
            schema=config.schema,
            catalog=dict(config.catalog) or None,
        )


def export(
    spark: SparkSession,
    config: str | Mapping[str, Any] | Config | Place | None = None,
    *,
    broker: str | None = None,
    topics: str | Sequence[str] | None = None,
    to: str,
    format: str | TableFormat = TableFormat.PARQUET,
    schema: str | os.PathLike[str] | Mapping[str, Any] | None = None,
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
    progress: Progress | None = None,
) -> JobReport:
    """Exports topics into tables, each offset once, whatever was exported before.

    Args:
        spark: A classic session.
        config: Where the log is: a config file, a data directory, settings; None with `broker`.
        broker: The address of a broker's Flight, for a tail that is not on this machine.
        topics: Names and patterns; all by default.
        to: A directory or an address (Parquet, Delta), a table's name or `<warehouse>/<table>`
            (Iceberg). `{namespace}` and `{topic}` stand for each topic's; without them, all topics
            go into one table.
        format: `parquet`, `iceberg` or `delta`.
        schema: A JSON Schema, or the path of one: its properties become columns instead of
            `payload`, and messages that do not fit go to the dead letters.
        catalog: Properties of an Iceberg catalog; by default one in SQLite, in the warehouse.
        storage_options: For a table in a bucket, as `storage.cloud.options` has them; by default
            the log's own, if its bucket is of the same kind.
        start: The first offset, or the point in time, to export; the earliest by default.
        end: The offset, or the point in time, before which to stop.
        dead_letters: The table of messages that do not fit; `<table>_dead_letters` by default.
        include_tail: Also what is durable and not in the bucket yet.
        file_mb: About how large files become at most.
        zstd_level: How hard files are compressed.
        accept_remade: Take a topic that was deleted and made again into the same table.
        available_now: Export what is there and stop; with False go on until `stop` is set.
        interval: Seconds between two rounds of an export that goes on; 60 by default.
        stop: Ends an export that goes on.
        dry_run: Plan only.
        progress: Who is told how far it has come.

    Raises:
        InvalidRequestError: An argument makes no sense.
        NotFoundError: A topic, or the schema's file, does not exist.
        UnavailableError: A store does not answer.
    """
    settings = ExportSettings(
        to=to,
        format=_format(format),
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
    return _go_on(begin, settings, topics, pause, ending)


def _go_on(
    begin: Callable[[], AbstractContextManager[Job]],
    settings: ExportSettings,
    topics: str | Sequence[str] | None,
    pause: float,
    ending: threading.Event,
) -> JobReport:
    """Round after round: a store that does not answer for a while does not end it."""
    report: JobReport | None = None
    while True:
        try:
            with begin() as job:
                if report is not None:
                    job.report.started_at = report.started_at
                    job.report.topics.update(report.topics)
                report = job.report
                while True:
                    # What failed is tried again, and told again if it fails again.
                    report.errors.clear()
                    _round(job, settings, topics)
                    if ending.wait(pause):
                        return report
        except IsterError as error:
            if report is None or not (error.retriable or isinstance(error, FencedError)):
                raise
            # The job as a whole begins anew: its lease has ended, or its store is not there.
            _log.warning("the export begins anew", extra={"error": str(error)})
            report.errors.clear()
            report.fail(error)
            if ending.wait(pause):
                return report


def _round(job: Job, settings: ExportSettings, topics: str | Sequence[str] | None) -> None:
    """A round of an export that goes on.

    Raises:
        FencedError: The job's lease has ended: no round could commit anything any more.
        IsterError: What does not become better by waiting.
    """
    try:
        job.check()
        export_topics(job, settings, topics=topics)
    except IsterError as error:
        if not error.retriable:
            raise
        _log.warning("a round failed", extra={"error": str(error)})
        job.report.fail(error)


def _format(name: str | TableFormat) -> TableFormat:
    try:
        return TableFormat(name)
    except ValueError as error:
        raise InvalidRequestError(
            f"there is no table format {name!r}", hint="parquet, iceberg or delta"
        ) from error


def export_topics(
    job: Job, settings: ExportSettings, *, topics: str | Sequence[str] | None = None
) -> None:
    """One round of an export: what is there and not in the tables. Its report is the job's.

    Raises:
        InvalidRequestError: A setting makes no sense.
        NotFoundError: A topic, or the schema's file, does not exist.
        FencedError: The job's lease has ended.
    """
    _Round(job, settings).run(job.topics(parse_topics(topics)))


# -- a round ----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Destination:
    """A table, its dead letters, and how tasks write both."""

    name: str
    table: Table
    letters: Table | None
    output: Output | None = None
    letters_output: Output | None = None
    members: tuple[Member, ...] | None = None
    coverage: Coverage = field(default_factory=Coverage)
    lettered: Coverage = field(default_factory=Coverage)

    @property
    def tables(self) -> list[Table]:
        return [self.table] if self.letters is None else [self.table, self.letters]


@dataclass(slots=True, kw_only=True)
class _TopicExport:
    """A topic on its way into a table."""

    head: Head
    destination: _Destination
    fences: Sequence[Fence] = ()
    missing: Ranges = ()
    partitions: Sequence[Partition] = ()
    items_left: int = 0
    done: list[tuple[ExportItem, Exported]] = field(default_factory=list)
    is_given_up: bool = False

    @property
    def topic(self) -> str:
        return self.head.topic

    @property
    def epoch(self) -> int:
        return self.head.lineage[-1][0] if self.head.lineage else 0

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.partitions)

    @property
    def bytes_done(self) -> int:
        return sum(item.partition.bytes for item, _ in self.done)


class _Round:
    """See `export_topics`."""

    def __init__(self, job: Job, settings: ExportSettings) -> None:
        self._job = job
        self._settings = settings
        self._run = secrets.token_hex(8)
        self._place = TablePlace(
            config=job.place.config,
            format=settings.format,
            catalog=settings.catalog,
            storage_options=settings.storage_options,
        )
        self._members: tuple[Member, ...] | None = None
        self._schema_id = ""
        if settings.schema is not None:
            schema = load_schema(settings.schema)
            self._members = columns_of(schema)
            canonical = json.dumps(schema, sort_keys=True).encode()
            self._schema_id = hashlib.sha256(canonical).hexdigest()[:16]
        self._destinations: dict[str, _Destination] = {}

    def run(self, topics: Sequence[str]) -> None:
        job = self._job
        try:
            with _Guards(job) as guards:
                exports = self._prepare(topics, guards)
                failpoints.reach("pipeline.after_plan")
                if not job.dry_run:
                    self._export(exports)
                    self._end(exports)
        finally:
            for destination in self._destinations.values():
                for table in destination.tables:
                    table.close()

    # -- the plan ---------------------------------------------------------------------------

    def _prepare(self, topics: Sequence[str], guards: _Guards) -> list[_TopicExport]:
        exports: list[_TopicExport] = []
        if not topics:
            return exports
        heads, found = self._look(topics)
        for head in found:
            with self._failing(head.topic):
                destination = self._destination(head.topic)
                fences: list[Fence] = []
                if not self._job.dry_run:
                    names = self._guarded(destination, head.topic)
                    fences = [guards.take(name, head.topic) for name in names]
                # After the keys are taken: nobody else changes it now.
                self._refresh(destination, guards)
                item = _TopicExport(head=head, destination=destination, fences=fences)
                self._plan(heads, item)
                exports.append(item)
        return exports

    def _look(self, topics: Sequence[str]) -> tuple[Heads, list[Head]]:
        """What topics hold; one that cannot be looked at does not keep others from it."""
        place = self._job.place

        def heads_of(names: Sequence[str]) -> Heads:
            options = ReadOptions.parse(
                {
                    "topic": ",".join(names),
                    "config": "given",
                    "includeTail": str(self._settings.include_tail).lower(),
                },
                is_streaming=False,
            )
            return Heads(place, options)

        every = heads_of(topics)
        try:
            found = patiently(lambda: every.look(catches_up=self._settings.include_tail))
            return every, list(found.values())
        except IsterError:
            heads: list[Head] = []
            for name in topics:
                with self._failing(name):
                    heads += heads_of([name]).look().values()
            return every, heads

    def _destination(self, topic: str) -> _Destination:
        """The table of a topic, opened once."""
        settings = self._settings
        name = table_name(settings.to, topic, settings.format)
        known = self._destinations.get(name)
        if known is None:
            clock = self._job.clock
            letters = None
            if self._members is not None:
                given = settings.dead_letters
                other = None if given is None else table_name(given, topic, settings.format)
                where = dead_letters_name(name, other)
                letters = open_table(where, self._place, clock=clock)
            known = _Destination(
                name=name, table=open_table(name, self._place, clock=clock), letters=letters
            )
            self._check_apart(known)
            self._destinations[name] = known
        return known

    def _check_apart(self, new: _Destination) -> None:
        """Makes sure that no table has both rows and dead letters.

        Raises:
            InvalidRequestError: The dead letters of one topic would go among the rows of another.
        """
        every = [*self._destinations.values(), new]
        rows = {item.table.location for item in every}
        letters = {item.letters.location for item in every if item.letters is not None}
        both = rows & letters
        if both:
            raise InvalidRequestError(
                "dead letters need a table of their own: here they would be among the rows of "
                "a topic",
                path=min(both),
                hint="dead_letters (--dead-letters) names another one",
            )

    def _guarded(self, destination: _Destination, topic: str) -> list[str]:
        """What only one export may do at a time."""
        names = []
        for table in destination.tables:
            if not table.has_exclusive_commits():
                names.append(table.location)  # nobody but us sees to it
            elif table is destination.table:
                names.append(f"{table.location}\n{topic}")
        return names

    def _refresh(self, destination: _Destination, guards: _Guards) -> None:
        """Opens a table for this round, and reads what it has."""
        if destination.output is None and not self._job.dry_run:
            wanted = ENVELOPE
            if self._members is not None:
                typed = [(member.column, member.kind.type) for member in self._members]
                wanted = pa.schema([*ENVELOPE_WITHOUT_PAYLOAD, *pa.schema(typed)])
            layout = destination.table.open(wanted)
            if self._members is not None:
                destination.members = with_types(self._members, layout.schema)
            if destination.letters is not None:
                letters = destination.letters.open(LETTERS)
                target = destination.letters.target(self._run)
                destination.letters_output = Output(target=target, layout=letters)
            target = destination.table.target(self._run)
            destination.output = Output(target=target, layout=layout)
            for table in destination.tables:
                guards.keep(partial(table.renew, self._run))
        destination.coverage = patiently(destination.table.coverage)
        if destination.letters is not None:
            destination.lettered = patiently(destination.letters.coverage)
        self._check_kinds(destination)

    def _check_kinds(self, destination: _Destination) -> None:
        """Makes sure that a table of rows has no dead letters, and the other way round.

        Raises:
            ConflictError: An earlier export has used it for the other kind.
        """
        for table, coverage, is_letters in (
            (destination.table, destination.coverage, False),
            (destination.letters, destination.lettered, True),
        ):
            known = {
                _LETTERS_MARK in name
                for incarnations in coverage.topics.values()
                for name in incarnations
                if name != ANY_INCARNATION
            }
            if table is not None and (not is_letters) in known:
                raise ConflictError(
                    "the table has rows, and no dead letters"
                    if is_letters
                    else "the table has dead letters, and no rows",
                    path=table.location,
                    hint="dead_letters (--dead-letters) names another table for them",
                )

    def _plan(self, heads: Heads, item: _TopicExport) -> None:
        """What is to be read: what there is, without what the table has."""
        job, head = self._job, item.head
        coverage = item.destination.coverage
        self._check_same(item)
        start, end = self._bounds(heads, head)
        covered = coverage.of(head.topic, head.incarnation)
        item.missing = subtract(normalise([(start, end)]), covered)
        ranges = [heads.range_of(head, first, last) for first, last in item.missing]
        whole = plan(ranges, split_bytes=self._settings.file_mb * MIB)
        total = sum(part.bytes for part in whole)
        parallel = max(job.spark.sparkContext.defaultParallelism, 1)
        wanted = min(parallel, total // _TASK_BYTES_MIN)
        item.partitions = whole
        if len(whole) < wanted:
            item.partitions = plan(
                ranges, split_bytes=self._settings.file_mb * MIB, min_partitions=wanted
            )
        fields = job.report.of(head.topic)
        fields["table"] = item.destination.table.location
        fields["end"] = end
        if gap := self._gap(head, covered):
            _log.warning("retention was faster", extra={"topic": head.topic, "gap": str(gap)})
            fields["gap"] = [list(one) for one in gap[:_SHOWN_RANGES]]
        if job.dry_run:
            fields["messages"] = count(item.missing)
            fields["bytes"] = item.bytes
            fields["ranges"] = [list(one) for one in item.missing[:_SHOWN_RANGES]]
        else:
            job.report.add(head.topic, messages=0, dead_letters=0, files=0, bytes=0, commits=0)

    def _gap(self, head: Head, covered: Ranges) -> Ranges:
        """What retention took after the table's first rows, and before it was exported."""
        if not covered:
            return ()
        first = covered[0][0]
        if isinstance(self._settings.start, int):
            first = max(first, self._settings.start)
        return subtract(normalise([(first, head.earliest)]), covered)

    def _check_same(self, item: _TopicExport) -> None:
        """Makes sure that the table's rows are of this very topic.

        Raises:
            ConflictError: They are of another one of its name, or of messages that were given up.
        """
        head, coverage = item.head, item.destination.coverage
        others = coverage.other_incarnations(head.topic, head.incarnation)
        if others and not self._settings.accept_remade:
            raise ConflictError(
                "the topic was deleted and made again, and the table has rows of the old one: "
                "offsets would be in it twice",
                topic=head.topic,
                path=item.destination.table.location,
                hint="export into another table, or accept_remade (--accept-remade) takes both",
            )
        epoch = coverage.epoch_of(head.topic, head.incarnation)
        if epoch is None:
            return
        given_up = min((start for newer, start in head.lineage if newer > epoch), default=None)
        covered = coverage.of(head.topic, head.incarnation)
        if given_up is not None and covered and covered[-1][1] > given_up:
            raise ConflictError(
                f"a disk was lost, and the topic's new owner went on from {given_up}: the table "
                "has rows of messages that are gone, under offsets that others have now",
                topic=head.topic,
                offset=given_up,
                path=item.destination.table.location,
                hint="export into another table",
            )

    def _bounds(self, heads: Heads, head: Head) -> tuple[int, int]:
        """From where to where, as far as there is something.

        Raises:
            OffsetOutOfRangeError: It begins beyond the end.
            DataGapError: It begins with messages that are no longer kept.
        """
        settings = self._settings
        start, end = head.earliest, head.end
        if isinstance(settings.start, datetime):
            found = heads.find_time(head, as_milliseconds(settings.start))
            start = end if found is None else found
        elif settings.start is not None:
            # What is no longer kept may be in the table already.
            start = max(settings.start, head.earliest)
            if settings.start > head.end:
                raise OffsetOutOfRangeError(
                    "the export begins beyond the end",
                    topic=head.topic,
                    offset=settings.start,
                    earliest=head.earliest,
                    next=head.end,
                )
        if isinstance(settings.end, datetime):
            found = heads.find_time(head, as_milliseconds(settings.end))
            end = head.end if found is None else found
        elif settings.end is not None:
            end = min(settings.end, head.end)
        return start, max(start, end)

    # -- tasks and commits ------------------------------------------------------------------

    def _export(self, exports: Sequence[_TopicExport]) -> None:
        job = self._job
        by_topic = {item.topic: item for item in exports}
        items: list[ExportItem] = []
        for export in exports:
            own = list(self._items(export))
            export.items_left = len(own)
            items += own
        total = sum(item.partition.bytes for item in items)
        job.progress.begin("exporting", total, "bytes")
        results = run_tasks(
            job.spark,
            items,
            partial(export_item, job.place),
            weigh=lambda item: item.partition.bytes,
            name="ister export",
        )
        try:
            for done in results:
                export = by_topic[done.item.topic]
                export.items_left -= 1
                job.progress.advance(done.item.partition.bytes, done.item.topic)
                if done.error is not None:
                    job.report.fail(done.error, export.topic)
                elif done.result is not None:
                    export.done.append((done.item, done.result))
                if export.items_left == 0 or export.bytes_done >= _COMMIT_BYTES:
                    with self._failing(export.topic):
                        self._commit(export)
        finally:
            job.progress.end()
            for export in exports:
                self._discard(export, export.done)

    def _items(self, export: _TopicExport) -> Iterator[ExportItem]:
        destination, head = export.destination, export.head
        if destination.output is None:
            return
        identities = {head.topic: TopicIdentity(head.incarnation, head.node)}
        lettered = destination.lettered.of(head.topic, self._letters_of(head))
        for partition in export.partitions:
            ranges = normalise((part.start, part.end) for part in partition.slices)
            yield ExportItem(
                topic=head.topic,
                partition=partition,
                identities=identities,
                table=destination.output,
                members=destination.members,
                letters=destination.letters_output,
                lettered=intersect(lettered, ranges),
                file_mb=self._settings.file_mb,
                zstd_level=self._settings.zstd_level,
            )

    def _letters_of(self, head: Head) -> str:
        """What dead letters are recorded under: the topic, and the schema that refused them."""
        return f"{head.incarnation}{_LETTERS_MARK}{self._schema_id}"

    def _commit(self, export: _TopicExport) -> None:
        """Commits what is done of a topic: dead letters, then rows."""
        # From here on only a definite refusal removes files: a table may know them already.
        done, export.done = export.done, []
        if export.is_given_up or not done:
            self._discard(export, done)
            return
        letters, rows = _Attempt(self._check(export)), _Attempt(self._check(export))
        try:
            self._commit_letters(export, done, letters)
            failpoints.reach("pipeline.before_commit")
            self._commit_rows(export, done, rows)
        except IsterError as error:
            if not isinstance(error, CommitUnknownError):
                export.is_given_up = True
            self._discard(
                export, done, rows=rows.is_refused(error), letters=letters.is_refused(error)
            )
            raise
        failpoints.reach("pipeline.after_commit")
        for _, result in done:
            self._job.report.add(
                export.topic,
                messages=result.rows,
                dead_letters=result.dead_letters,
                files=len(result.files),
                bytes=sum(file.bytes for file in result.files),
            )
        self._job.report.add(export.topic, commits=1)

    def _commit_letters(
        self,
        export: _TopicExport,
        done: Sequence[tuple[ExportItem, Exported]],
        attempt: _Attempt,
    ) -> None:
        """Only ranges that have some are recorded: others have nothing to be written twice."""
        letters, head = export.destination.letters, export.head
        written = [(item, result) for item, result in done if result.letters]
        if letters is None or not written:
            return
        ranges = normalise(one for item, _ in written for one in item.ranges)
        lettered = export.destination.lettered.of(head.topic, self._letters_of(head))
        addition = Addition(
            id=secrets.token_hex(8),
            topic=head.topic,
            incarnation=self._letters_of(head),
            epoch=export.epoch,
            ranges=subtract(ranges, lettered),
            files=[file for _, result in written for file in result.letters],
        )
        letters.commit(addition, check=attempt.check)
        attempt.is_committed = True
        failpoints.reach("export.after_dead_letters")

    def _commit_rows(
        self,
        export: _TopicExport,
        done: Sequence[tuple[ExportItem, Exported]],
        attempt: _Attempt,
    ) -> None:
        head = export.head
        addition = Addition(
            id=secrets.token_hex(8),
            topic=head.topic,
            incarnation=head.incarnation,
            epoch=export.epoch,
            ranges=normalise(one for item, _ in done for one in item.ranges),
            files=[file for _, result in done for file in result.files],
        )
        export.destination.table.commit(addition, check=attempt.check)
        attempt.is_committed = True

    def _check(self, export: _TopicExport) -> Callable[[], None]:
        def check() -> None:
            self._job.fence.check(export.topic)
            for fence in export.fences:
                fence.check(export.topic)

        return check

    @staticmethod
    def _discard(
        export: _TopicExport,
        done: Sequence[tuple[ExportItem, Exported]],
        *,
        rows: bool = True,
        letters: bool = True,
    ) -> None:
        """Removes what was written and will not be committed."""
        destination = export.destination
        if rows and destination.output is not None:
            files = [file for _, result in done for file in result.files]
            destination.table.discard(destination.output.target, files)
        if letters and destination.letters is not None and destination.letters_output is not None:
            files = [file for _, result in done for file in result.letters]
            destination.letters.discard(destination.letters_output.target, files)

    def _end(self, exports: Sequence[_TopicExport]) -> None:
        """The round is over: leftovers of earlier ones go."""
        grace = self._job.place.config.storage.cloud.orphan_grace_minutes * 60.0
        for destination in self._destinations.values():
            if destination.output is None:
                continue
            some = next((item for item in exports if item.destination is destination), None)
            for table in destination.tables:
                table.end(self._run)
                if some is None:
                    continue
                try:
                    table.tidy(grace, check=self._check(some))
                except IsterError as error:
                    _log.info("not tidied", extra={"path": table.location, "error": str(error)})

    @contextmanager
    def _failing(self, topic: str) -> Iterator[None]:
        """One topic's failure is told, and others go on."""
        try:
            yield
        except IsterError as error:
            self._job.report.of(topic)
            self._job.report.fail(error, topic)


class _Attempt:
    """Whether a table may have a commit: what `Table.commit` says about `check` and errors."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._was_tried = False
        self.is_committed = False

    def check(self) -> None:
        """Asked by the table right before each attempt."""
        self._check()
        self._was_tried = True

    def is_refused(self, error: IsterError) -> bool:
        """Whether the table surely will never have it."""
        if self.is_committed:
            return False
        return not self._was_tried or isinstance(error, ConflictError)


# -- leases -----------------------------------------------------------------------------------


class _Guards:
    """The leased keys of the exports of one round, and its marks in tables, renewed by a thread."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ttl = job.place.config.storage.metadata.lease_ttl_seconds
        self._lock = threading.Lock()
        self._fences: list[Fence] = []
        self._by_name: dict[str, Fence] = {}
        self._marks: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._keeper = threads.start("ister-export-lease", self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._keeper is not None:
            self._keeper.join()
        for fence in self._fences:
            fence.release()

    def take(self, name: str, topic: str) -> Fence:
        """Takes the key of an export.

        Raises:
            ConflictError: Another one has it.
        """
        known = self._by_name.get(name)
        if known is not None:
            return known
        job = self._job
        key = job.keys.export(hashlib.sha256(name.encode()).hexdigest()[:32])
        about = {"job": "export", "host": socket.gethostname(), "process": os.getpid()}
        try:
            fence = Fence.take(
                job.store,
                key,
                id=secrets.token_hex(8),
                about={**about, "topic": topic},
                ttl_seconds=self._ttl,
                clock=job.clock,
            )
        except ConflictError as error:
            holder = read_holder(job.store, key)
            who = ""
            if holder is not None:
                who = f": on {holder.about.get('host')}, process {holder.about.get('process')}"
            raise ConflictError(
                f"another export of the topic into this table is under way{who}",
                topic=topic,
                path=key,
                hint="wait until it is done; after a crash its lease ends by itself, within "
                f"{self._ttl:g} seconds",
            ) from error
        with self._lock:
            self._fences.append(fence)
        self._by_name[name] = fence
        return fence

    def keep(self, renew: Callable[[], None]) -> None:
        """Has a mark renewed now and then, until the round is over."""
        with self._lock:
            self._marks.append(renew)

    def _keep(self) -> None:
        clock = self._job.clock
        renewed_at = clock.monotonic()
        while not self._stop.wait(self._ttl / _RENEWALS_PER_LEASE):
            with self._lock:
                renewals = [fence.renew for fence in self._fences]
                if clock.monotonic() - renewed_at >= _RUN_RENEWAL_SECONDS:
                    renewed_at = clock.monotonic()
                    renewals += self._marks
            for renew in renewals:
                try:
                    renew()
                except IsterError as error:
                    # If it has ended, the export finds out at its next commit.
                    _log.warning("not renewed", extra={"error": str(error)})
                except Exception as error:  # noqa: BLE001 - the other leases are still renewed
                    threads.record("ister-export-lease", error)
