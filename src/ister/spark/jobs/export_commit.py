"""Commits what the tasks of an export have written: one commit for each table, with all topics.

    finished tasks of all topics of a table ─► dead letters: one commit ─► rows: one commit

Owns: what goes into a commit, the order of the two, which topics are left out, and when files are
removed. Does not own: the plan (`export_round`), tables and their commits (`ister.spark.tables`).

A topic that the table refuses, because it has some of the offsets or a file is missing, is left out
and reported, and the others are committed without it. Files are removed only if they certainly are
not in the table; see `export_job`.

What a crash leaves: files that no commit names.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ister.base import failpoints
from ister.bucket.fence import Fence
from ister.errors import CommitUnknownError, ConflictError, InvariantError, IsterError
from ister.spark.jobs.export_schema import PayloadSchema
from ister.spark.jobs.export_task import Exported, ExportItem, TableOutput
from ister.spark.jobs.job import Job
from ister.spark.jobs.job_report import error_as_fields
from ister.spark.offset_resolver import Head
from ister.spark.planner import Partition
from ister.spark.tables.base import Addition, DataFile, Table, TopicAddition
from ister.spark.tables.json_schema import Member
from ister.spark.tables.ranges import Coverage, Ranges, normalise, subtract

_LEFT_OUT_MAX: Final = 8
"""If a table refuses more topics of a commit, the cause is not theirs alone: all of them fail."""


@dataclass(slots=True, kw_only=True, eq=False)
class ExportTable:
    """A table of rows, or one of dead letters, in a round."""

    table: Table
    is_letters: bool
    output: TableOutput | None = None
    """How tasks write to it; None until it is open."""
    coverage: Coverage = field(default_factory=Coverage)
    """The offsets that it has."""


@dataclass(slots=True, kw_only=True, eq=False)
class Destination:
    """Where rows go, and those that do not fit."""

    name: str
    rows: ExportTable
    letters: ExportTable | None
    exports: list[TopicExport] = field(default_factory=list)
    is_whole: bool = False
    """Whether every topic was planned."""
    items_left: int = 0
    """Tasks that are not finished."""
    bytes_done: int = 0
    """Bytes of messages whose files are not committed."""
    files_done: int = 0
    """Files that are not committed."""

    @property
    def tables(self) -> list[ExportTable]:
        """The tables, in the order of their commits."""
        return [self.rows] if self.letters is None else [self.letters, self.rows]

    def add(self, export: TopicExport, item: ExportItem, result: Exported) -> None:
        """Adds the result of a finished task."""
        export.done.append((item, result))
        self.bytes_done += item.partition.bytes
        self.files_done += len(result.files)


@dataclass(slots=True, kw_only=True, eq=False)
class TopicExport:
    """The export of one topic into a table."""

    head: Head
    destination: Destination
    schema: PayloadSchema | None
    """None if payloads are exported as they are."""
    fences: Sequence[Fence] = ()
    output: TableOutput | None = None
    """The table, with the columns of this topic."""
    members: tuple[Member, ...] | None = None
    """The columns of payloads, with the table's types."""
    missing: Ranges = ()
    partitions: Sequence[Partition] = ()
    done: list[tuple[ExportItem, Exported]] = field(default_factory=list)
    """Finished tasks whose files are not committed."""
    is_given_up: bool = False

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self.head.topic

    @property
    def bytes(self) -> int:
        """Bytes of messages to export."""
        return sum(part.bytes for part in self.partitions)

    def incarnation_in(self, table: ExportTable) -> str:
        """The key under which a table records the topic; for dead letters, of its schema, too."""
        if not table.is_letters:
            return self.head.incarnation
        return (
            f"{self.head.incarnation}{LETTERS_MARK}{'' if self.schema is None else self.schema.id}"
        )

    def covered_in(self, table: ExportTable) -> Ranges:
        """The offsets of the topic that a table has."""
        return table.coverage.of(self.topic, self.incarnation_in(table))


LETTERS_MARK: Final = "@"
"""Marks the records of dead letters; no topic's incarnation has it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The part of a commit that belongs to one topic."""

    export: TopicExport
    done: Sequence[tuple[ExportItem, Exported]]

    def files(self, table: ExportTable) -> list[DataFile]:
        """The files of the topic for a table."""
        return [file for _, result in self.done for file in _files(result, table)]

    def addition(self, table: ExportTable) -> TopicAddition:
        """What is added to a table; of dead letters, only ranges that have some are recorded."""
        export = self.export
        ranges = normalise(
            one
            for item, result in self.done
            if not table.is_letters or result.letters
            for one in item.ranges
        )
        if table.is_letters:
            ranges = subtract(ranges, export.covered_in(table))
        return TopicAddition(
            topic=export.topic,
            incarnation=export.incarnation_in(table),
            epoch=export.head.lineage[-1][0] if export.head.lineage else 0,
            ranges=ranges,
            files=self.files(table),
        )


def _files(result: Exported, table: ExportTable) -> tuple[DataFile, ...]:
    return result.letters if table.is_letters else result.files


class TableCommitter:
    """Commits the finished tasks of a table; see the module header."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def commit(self, destination: Destination) -> None:
        """Commits the finished tasks of all topics of a table: dead letters, then rows."""
        # From here on only a definite refusal removes files: the table may have them.
        parts = []
        destination.bytes_done = destination.files_done = 0
        for export in destination.exports:
            done, export.done = export.done, []
            part = _Part(export, done)
            if export.is_given_up:
                self._discard(part, destination.tables)
            elif done:
                parts.append(part)
        for table in destination.tables:
            own = [part for part in parts if not table.is_letters or part.files(table)]
            if not own:
                continue
            if not table.is_letters:
                failpoints.reach("pipeline.before_commit")
            committed = self._add(table, own)
            if committed and table.is_letters:
                failpoints.reach("export.after_dead_letters")
            if not table.is_letters:
                failpoints.reach("pipeline.after_commit")
            parts = [part for part in parts if part in committed or part not in own]
        for part in parts:
            self._count(part)
        if parts:
            self._job.report.count(commits=1)

    def discard(self, destination: Destination) -> None:
        """Removes the files of finished tasks that will not be committed."""
        for export in destination.exports:
            self._discard(_Part(export, export.done), destination.tables)
            export.done = []

    def check_of(self, exports: Sequence[TopicExport]) -> Callable[[], None]:
        """Returns a function that checks the leases of the job and of these exports."""

        def check() -> None:
            self._job.fence.check()
            for export in exports:
                for fence in export.fences:
                    fence.check(export.topic)

        return check

    def _add(self, table: ExportTable, parts: Sequence[_Part]) -> list[_Part]:
        """Commits parts at once, without the topics that the table refuses.

        Returns the parts that are in the table; the others are reported.
        """
        left = list(parts)
        left_out = 0
        while left:
            attempt = _Attempt(self.check_of([part.export for part in left]))
            addition = Addition(
                id=secrets.token_hex(8), topics=[part.addition(table) for part in left]
            )
            try:
                table.table.commit(addition, check=attempt.check)
            except InvariantError:
                raise
            except IsterError as error:
                is_refused = attempt.is_refused(error)
                own = [part for part in left if part.export.topic == error.topic]
                if not is_refused or left_out >= _LEFT_OUT_MAX:
                    own = []
                for part in own or left:
                    self._fail(part, error, table, is_refused=is_refused)
                left = [part for part in left if part not in own] if own else []
                left_out += 1
            else:
                break
        return left

    def _fail(
        self, part: _Part, error: IsterError, table: ExportTable, *, is_refused: bool
    ) -> None:
        """Reports that a topic was not committed, and removes files that are in no table."""
        report, topic = self._job.report, part.export.topic
        fields = error_as_fields(error)
        if error.topic not in (None, topic):
            fields = {**fields, "offset": None}  # of the other topic
        report.of(topic)
        report.fail({**fields, "topic": topic})
        if not isinstance(error, CommitUnknownError):
            part.export.is_given_up = True
        tables = [table] if is_refused else []
        if table.is_letters:
            # Its rows were not tried yet; dead letters of refused rows are in their table.
            tables.append(part.export.destination.rows)
        self._discard(part, tables)

    def _count(self, part: _Part) -> None:
        for _, result in part.done:
            self._job.report.add(
                part.export.topic,
                messages=result.rows,
                dead_letters=result.dead_letters,
                files=len(result.files),
                bytes=sum(file.bytes for file in result.files),
            )
        self._job.report.add(part.export.topic, commits=1)

    @staticmethod
    def _discard(part: _Part, tables: Sequence[ExportTable]) -> None:
        """Removes files that will not be committed."""
        for table in tables:
            if table.output is not None:
                table.table.discard(table.output.target, part.files(table))


class _Attempt:
    """Knows whether a table may have a commit that failed, by the rules of `Table.commit`."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._was_tried = False

    def check(self) -> None:
        """Called by the table right before each attempt."""
        self._check()
        self._was_tried = True

    def is_refused(self, error: IsterError) -> bool:
        """Returns whether the commit was definitely rejected."""
        return not self._was_tried or isinstance(error, ConflictError)
