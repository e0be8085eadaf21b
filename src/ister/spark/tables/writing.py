"""Rows become data files: one for each UTC date that occurs, Parquet, compressed with zstd.

    batches ─► by date ─► row groups of about 32 MiB ─► files of about the wanted size

Owns: how rows are divided into files and row groups. Does not own: where files are, what rows are.
Runs in tasks.

Memory: two row groups, whatever the number of dates, and the store's parts in flight of the files
that are open, which are bounded.

What a crash leaves: files that no table refers to.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from contextlib import suppress
from datetime import date, timedelta
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ister.base.limits import MIB
from ister.errors import IsterError
from ister.spark.tables.base import PUBLISH_DATE, DataFile, Layout
from ister.spark.tables.columns import cast_column, dates_of
from ister.spark.tables.targets import FileOutput, FileTarget

_ROW_GROUP_BYTES: Final = 32 * MIB
_HELD_BYTES_MAX: Final = 64 * MIB
_OPEN_FILES_MAX: Final = 16
_BUFFER_BYTES: Final = 1 * MIB
_EPOCH: Final = date(1970, 1, 1)
_LAST_DAY: Final = (date.max - _EPOCH).days

# Ascending or nearly: differences take a few bits each.
_DELTA_COLUMNS: Final = ("offset", "publish_time")
_LARGE_COLUMNS: Final = ("payload",)


class FileMaker:
    """Writes rows as files of one table. Used by one thread at a time."""

    def __init__(
        self, target: FileTarget, layout: Layout, *, name: str, file_bytes: int, zstd_level: int
    ) -> None:
        """Files at `target`, whose names begin with `name`."""
        self._target = target
        self._layout = layout
        self._name = name
        self._file_bytes = file_bytes
        self._zstd_level = zstd_level
        self._plain = pa.schema([item for item in layout.schema if item.name != PUBLISH_DATE])
        self._has_date = len(self._plain) != len(layout.schema)
        leaves = [leaf for item in layout.schema for leaf in _leaves(item.name, item.type)]
        delta = [name for name in _DELTA_COLUMNS if name in layout.schema.names]
        self._encodings = dict.fromkeys(delta, "DELTA_BINARY_PACKED")
        self._dictionary = [x for x in leaves if x not in (*_DELTA_COLUMNS, *_LARGE_COLUMNS)]
        self._measured = [leaf for leaf in leaves if leaf not in _LARGE_COLUMNS]
        self._open: OrderedDict[int | None, _OpenFile] = OrderedDict()
        self._held_bytes = 0
        self.files: list[DataFile] = []
        """Those that are complete."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Takes rows: the layout's columns but the date, among others `offset`, `publish_time`."""
        if not batch.num_rows:
            return
        if not self._layout.by_date and not self._has_date:
            self._add(None, batch)
            return
        days = dates_of(batch.column("publish_time"))
        bounds = pc.min_max(days)
        first, last = bounds["min"].as_py(), bounds["max"].as_py()
        if first == last:
            self._add(min(first, _LAST_DAY), batch)
            return
        for day in pc.unique(days).to_pylist():
            self._add(min(day, _LAST_DAY), batch.filter(pc.equal(days, day)))

    def finish(self) -> list[DataFile]:
        """Completes all files; those that there are."""
        while self._open:
            self._complete(next(iter(self._open)))
        return self.files

    def abort(self) -> None:
        """Gives up: nothing of what was written stays, as far as that can be. Raises nothing."""
        for file in self._open.values():
            file.abort()
        self._open.clear()
        for done in self.files:
            with suppress(IsterError):
                self._target.delete(done.path)
        self.files = []

    def _add(self, day: int | None, batch: pa.RecordBatch) -> None:
        file = self._open.get(day)
        if file is None:
            if len(self._open) >= _OPEN_FILES_MAX:
                self._complete(next(iter(self._open)))
            file = self._open[day] = self._begin(day)
        self._open.move_to_end(day)
        self._held_bytes += file.hold(self._with_types(day, batch), batch)
        if file.held_bytes >= _ROW_GROUP_BYTES:
            self._flush(day, file)
        elif self._held_bytes >= _HELD_BYTES_MAX:
            largest = max(self._open, key=lambda key: self._open[key].held_bytes)
            self._flush(largest, self._open[largest])

    def _with_types(self, day: int | None, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns: list[pa.Array] = []
        for item in self._layout.schema:
            if item.name == PUBLISH_DATE and day is not None:
                value = pa.scalar(day, pa.int32()).cast(pa.date32())
                columns.append(pa.repeat(value, batch.num_rows))
            else:
                columns.append(cast_column(batch.column(item.name), item.type))
        return pa.RecordBatch.from_arrays(columns, schema=self._layout.schema)

    def _begin(self, day: int | None) -> _OpenFile:
        shown = (_EPOCH + timedelta(days=day)).isoformat() if day is not None else None
        when = shown if self._layout.by_date else None
        path = self._target.path(when, f"{self._name}-{secrets.token_hex(6)}.parquet")
        output = self._target.open(path)
        # Many small pieces would else go through Python one by one.
        stream = pa.BufferedOutputStream(pa.PythonFile(output, mode="w"), _BUFFER_BYTES)
        writer = pq.ParquetWriter(
            stream,
            self._layout.schema,
            compression="zstd",
            compression_level=self._zstd_level,
            use_dictionary=self._dictionary,
            column_encoding=self._encodings,
            write_statistics=self._measured,
        )
        return _OpenFile(path, when, output, stream, writer)

    def _flush(self, day: int | None, file: _OpenFile) -> None:
        self._held_bytes -= file.held_bytes
        file.flush()
        if file.written_bytes >= self._file_bytes:
            self._complete(day)

    def _complete(self, day: int | None) -> None:
        file = self._open.pop(day)
        self._held_bytes -= file.held_bytes
        try:
            self.files.append(file.complete())
        except BaseException:
            file.abort()
            raise


class _OpenFile:
    """A file under way, and rows for its next row group."""

    def __init__(
        self,
        path: str,
        when: str | None,
        output: FileOutput,
        stream: pa.NativeFile,
        writer: pq.ParquetWriter,
    ) -> None:
        self._path = path
        self._date = when
        self._output = output
        self._stream = stream
        self._writer = writer
        self._held: list[pa.RecordBatch] = []
        self._rows = 0
        self._offsets: list[int] = []
        self._times: list[int] = []
        self.held_bytes = 0

    @property
    def written_bytes(self) -> int:
        return int(self._stream.tell())

    def hold(self, batch: pa.RecordBatch, envelope: pa.RecordBatch) -> int:
        """Takes rows; how many bytes they have."""
        for name, bounds in (("offset", self._offsets), ("publish_time", self._times)):
            found = pc.min_max(pc.cast(envelope.column(name), pa.int64()))
            values = [*bounds, found["min"].as_py(), found["max"].as_py()]
            bounds[:] = [min(values), max(values)]
        size: int = batch.nbytes
        self._held.append(batch)
        self._rows += batch.num_rows
        self.held_bytes += size
        return size

    def flush(self) -> None:
        if self._held:
            table = pa.Table.from_batches(self._held)
            self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self._held = []
        self.held_bytes = 0

    def complete(self) -> DataFile:
        self.flush()
        self._writer.close()
        self._stream.flush()
        size = self._output.tell()
        self._output.complete()
        return DataFile(
            path=self._path,
            date=self._date,
            rows=self._rows,
            bytes=size,
            first_offset=self._offsets[0],
            last_offset=self._offsets[1],
            first_time_us=self._times[0],
            last_time_us=self._times[1],
        )

    def abort(self) -> None:
        self._output.abort()
        with suppress(Exception):  # it writes a footer that is never read
            self._writer.close()


def _leaves(path: str, kind: pa.DataType) -> list[str]:
    """The names that Parquet has for the plain columns within a column."""
    if pa.types.is_struct(kind):
        return [leaf for item in kind for leaf in _leaves(f"{path}.{item.name}", item.type)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _leaves(f"{path}.list.element", kind.value_type)
    if pa.types.is_map(kind):
        return [
            *_leaves(f"{path}.key_value.key", kind.key_type),
            *_leaves(f"{path}.key_value.value", kind.item_type),
        ]
    return [path]
