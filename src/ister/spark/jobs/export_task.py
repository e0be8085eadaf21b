"""What a task of an export does: a range of a topic becomes data files of a table.

    partition of the plan ─► rows ─► typed columns ─► files by date
                                     └ does not fit ─► dead letters, files of another table

Owns: the way of rows through a task. Does not own: the plan, commits. Bulk data stays in the Python
worker: nothing but the names of files goes back to the driver.

What a crash leaves: files that no table refers to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from ister.base.limits import MIB
from ister.spark.location import LogLocation
from ister.spark.planner import Partition
from ister.spark.read_task import ReadTask, TopicIdentity
from ister.spark.tables.base import DataFile, Layout
from ister.spark.tables.columns import ENVELOPE, LETTERS
from ister.spark.tables.json_rows import JsonParser
from ister.spark.tables.json_schema import Member
from ister.spark.tables.ranges import Ranges, normalise
from ister.spark.tables.targets import FileTarget
from ister.spark.tables.writing import FileMaker


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOutput:
    """A table, as tasks see it."""

    target: FileTarget
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportItem:
    """What one task does. Pickled."""

    topic: str
    partition: Partition
    identities: Mapping[str, TopicIdentity]
    table: TableOutput
    members: tuple[Member, ...] | None
    """The columns of payloads; None leaves them as they are."""
    letters: TableOutput | None
    lettered: Ranges = ()
    """Offsets whose dead letters are in their table already."""
    file_mb: int
    zstd_level: int

    @property
    def ranges(self) -> Ranges:
        """The offsets that are done once it is."""
        return normalise((part.start, part.end) for part in self.partition.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What a task has done."""

    files: tuple[DataFile, ...]
    letters: tuple[DataFile, ...]
    rows: int
    dead_letters: int
    """Those that were in their table already among them."""


def export_item(place: LogLocation, item: ExportItem) -> Exported:
    """Reads a range and writes its files."""
    task = ReadTask(place=place, columns=tuple(ENVELOPE.names), fail_on_data_loss=True)
    rows = _Rows(item)
    try:
        for batch in task.read(item.partition, dict(item.identities)):
            rows.add(batch)
        return rows.finish()
    except BaseException:
        rows.abort()
        raise


class _Rows:
    """The rows of one task on their way into files."""

    def __init__(self, item: ExportItem) -> None:
        first = item.partition.slices[0].start
        name = f"{item.topic.strip('/').replace('/', '-')}-{first:020d}"
        self._item = item
        self._parser = None if item.members is None else JsonParser(item.members)
        self._good = self._maker(item.table, name)
        self._bad = None if item.letters is None else self._maker(item.letters, name)
        self._rows = self._dead = 0

    def _maker(self, output: TableOutput, name: str) -> FileMaker:
        return FileMaker(
            output.target,
            output.layout,
            name=name,
            file_bytes=self._item.file_mb * MIB,
            zstd_level=self._item.zstd_level,
        )

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._parser is not None:
            batch = self._typed(batch, self._parser)
        self._rows += batch.num_rows
        self._good.write(batch)

    def _typed(self, batch: pa.RecordBatch, parser: JsonParser) -> pa.RecordBatch:
        columns, bad = parser.parse(batch.column("payload"))
        if bad:
            numbers = pa.array([number for number, _ in bad], pa.int64())
            self._add_letters(batch.take(numbers), [reason for _, reason in bad])
            fits = pc.invert(pc.is_in(pa.array(range(batch.num_rows), pa.int64()), numbers))
            batch = batch.filter(fits)
        batch = batch.drop_columns(["payload"])
        return pa.RecordBatch.from_arrays(
            [*batch.columns, *columns],
            schema=pa.schema([*batch.schema, *parser.schema]),
        )

    def _add_letters(self, batch: pa.RecordBatch, reasons: list[str]) -> None:
        self._dead += batch.num_rows
        columns = [batch.column(name) for name in LETTERS.names[:-1]]
        letters = pa.RecordBatch.from_arrays(
            [*columns, pa.array(reasons, pa.string())], schema=LETTERS
        )
        offsets = letters.column("offset")
        for start, end in self._item.lettered:
            outside = pc.or_(pc.less(offsets, start), pc.greater_equal(offsets, end))
            letters = letters.filter(outside)
            offsets = letters.column("offset")
        if self._bad is not None:
            self._bad.write(letters)

    def finish(self) -> Exported:
        return Exported(
            files=tuple(self._good.finish()),
            letters=() if self._bad is None else tuple(self._bad.finish()),
            rows=self._rows,
            dead_letters=self._dead,
        )

    def abort(self) -> None:
        self._good.abort()
        if self._bad is not None:
            self._bad.abort()
