"""Data sources that `benchmarks spark` compares and watches; needs pyspark.

    NullSource     prebuilt rows, handed over in batches of given sizes: what Spark itself costs
    WatchedSource  `format("ister")`, which besides notes in a file what a task needed

Owns: the rows that all sides of the benchmark read and write. Does not own: what is made of the
figures. Spark pickles these classes by name, so they live in a module that no process runs as its
main one.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition, WriterCommitMessage
from pyspark.sql.types import StructType

from benchmarks.measurement import PeakMemory, stopwatch
from ister import kernels
from ister.base.model import COLUMNS
from ister.format.arrow.schema import arrow_schema
from ister.spark.batch import BatchReader
from ister.spark.compat import arrow_schema_of
from ister.spark.options import ReadOptions, WriteOptions
from ister.spark.rows import row_schema
from ister.spark.sink import BatchWriter, StagedRows
from ister.spark.source import IsterDataSource
from ister.spark.workers import spare_collector

PRODUCER: Final = "orders-service-7f9c"
_FIRST_TIME_US: Final = 1_700_000_000_000_000
_REPORT: Final = "report"


@lru_cache(maxsize=4)
def make_rows(
    count: int, message_bytes: int, *, topic: str, is_rich: bool = False
) -> pa.RecordBatch:
    """Rows with every column of a message, with random payloads, all of them different.

    Args:
        count: How many.
        message_bytes: The size of a payload.
        topic: The topic's name.
        is_rich: Whether they have a routing key and two attributes each, too.
    """
    numbers = np.arange(count, dtype=np.int64)
    bounds = (np.arange(count + 1, dtype=np.int64) * message_bytes).astype(np.int32)
    payloads = pa.Array.from_buffers(
        pa.binary(),
        count,
        [None, pa.py_buffer(bounds), pa.py_buffer(os.urandom(count * message_bytes))],
    )
    schema = arrow_schema()
    pairs = 2 if is_rich else 0
    attributes = pa.MapArray.from_arrays(
        pa.array(np.arange(count + 1, dtype=np.int32) * pairs),
        pa.array(["region", "trace"] * (count * pairs // 2), pa.string()),
        pa.array(["eu-west-1", "4bf92f3577b34da6"] * (count * pairs // 2), pa.string()),
    )
    values: dict[str, pa.Array] = {
        "topic": pa.repeat(pa.scalar(topic, pa.string()), count),
        "offset": pa.array(numbers),
        "publish_time": pa.array(_FIRST_TIME_US + numbers * 1000).cast(
            schema.field("publish_time").type
        ),
        "producer_name": pa.repeat(pa.scalar(PRODUCER, pa.string()), count),
        "payload": payloads,
        "attributes": attributes,
        "routing_key": pa.array([f"customer-{n % 997}" for n in range(count)], pa.string())
        if is_rich
        else pa.nulls(count, pa.string()),
    }
    arrays = [
        values[field.name] if field.name in values else pa.nulls(count, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


# -- nothing but Spark ----------------------------------------------------------------------


class NullSource(DataSource):
    """Rows that are there already.

    Options: `plan`, JSON with the rows of each batch of each partition; `message_bytes`; `topic`;
    `columns`, a comma list, all of them by default.
    """

    @classmethod
    def name(cls) -> str:
        """What follows `format`."""
        return "ister_bench_null"

    def schema(self) -> StructType:
        """The columns asked for."""
        columns = self.options.get("columns")
        return row_schema(columns.split(",") if columns else COLUMNS)

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        return _NullReader(
            json.loads(self.options["plan"]),
            int(self.options["message_bytes"]),
            self.options["topic"],
            schema,
        )


class _NullReader(DataSourceReader):
    def __init__(
        self, plan: Sequence[Sequence[int]], message_bytes: int, topic: str, schema: StructType
    ) -> None:
        self._plan = plan
        self._largest = max(max(sizes) for sizes in plan)
        self._message_bytes = message_bytes
        self._topic = topic
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(len(self._plan))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Made once per process, which tasks share: later ones find it.
        rows = make_rows(self._largest, self._message_bytes, topic=self._topic)
        rows = pa.RecordBatch.from_arrays(
            [rows.column(name) for name in self._schema.names], schema=arrow_schema_of(self._schema)
        )
        for count in self._plan[partition.value]:
            yield rows.slice(0, count)
        # As Ister's tasks do: otherwise a full collection after each task counts as Spark's cost.
        spare_collector()


# -- Ister, watched -------------------------------------------------------------------------


class WatchedSource(IsterDataSource):
    """`format("ister")`, with one option more: `report`, a directory for what tasks note."""

    def __init__(self, options: dict[str, str]) -> None:
        # Everybody else refuses an option that is not Ister's.
        super().__init__({name: text for name, text in options.items() if name.lower() != _REPORT})
        self._report = options[_REPORT]

    @classmethod
    def name(cls) -> str:
        """What follows `format`."""
        return "ister_bench_watched"

    def reader(self, schema: StructType) -> BatchReader:
        """For `spark.read`."""
        options = ReadOptions.parse(self.options, is_streaming=False)
        return _WatchedReader(options, schema, report=self._report)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """For `df.write`."""
        options = WriteOptions.parse(self.options, is_streaming=False)
        return _WatchedWriter(options, schema, overwrite=overwrite, report=self._report)


class _WatchedReader(BatchReader):
    """Notes how far the process has grown when a task has read everything."""

    def __init__(self, options: ReadOptions, schema: StructType, *, report: str) -> None:
        super().__init__(options, schema)
        self._report = report

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        memory = _memory_of_process()
        count = 0
        for batch in super().read(partition):
            count += batch.num_rows
            yield batch
        _note(self._report, "read", rows=count, growth_mib=memory.growth_mib)


@lru_cache(maxsize=1)
def _memory_of_process() -> PeakMemory:
    """Counts from the first task of a process on, with libraries loaded: later ones find it."""
    kernels.load()
    import opendal  # noqa: F401, PLC0415 - an optional library; loaded before memory is counted

    return PeakMemory()


class _WatchedWriter(BatchWriter):
    """Notes how long the tasks and the commit took."""

    def __init__(
        self, options: WriteOptions, schema: StructType, *, overwrite: bool, report: str
    ) -> None:
        super().__init__(options, schema, overwrite=overwrite)
        self._report = report

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        elapsed, cpu = stopwatch(), time.process_time()
        waiting = _Waiting(iterator)
        message = super().write(iter(waiting))
        _note(
            self._report,
            "write",
            seconds=elapsed(),
            waiting_seconds=waiting.seconds,
            cpu_seconds=time.process_time() - cpu,
            files=len({file.key for _, file in message.files})
            if isinstance(message, StagedRows)
            else 0,
        )
        return message

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        elapsed, cpu = stopwatch(), time.process_time()
        super().commit(messages)
        _note(self._report, "commit", seconds=elapsed(), cpu_seconds=time.process_time() - cpu)


class _Waiting:
    """An iterator, and for how long it was waited for."""

    def __init__(self, items: Iterator[pa.RecordBatch]) -> None:
        self._items = items
        self.seconds = 0.0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while True:
            elapsed = stopwatch()
            item = next(self._items, None)
            self.seconds += elapsed()
            if item is None:
                return
            yield item


# -- notes ----------------------------------------------------------------------------------


def _note(report: str, what: str, **figures: float) -> None:
    path = os.path.join(report, f"{what}-{secrets.token_hex(8)}.json")
    with open(path, "w", encoding="ascii") as file:
        json.dump(figures, file)


def read_notes(report: str, what: str) -> list[dict[str, Any]]:
    """What tasks have noted under a name; the notes are gone afterwards."""
    found: list[dict[str, Any]] = []
    for name in _named(os.listdir(report), what):
        path = os.path.join(report, name)
        with open(path, encoding="ascii") as file:
            found.append(json.load(file))
        os.unlink(path)
    return found


def _named(names: Iterable[str], what: str) -> list[str]:
    return [name for name in names if name.startswith(f"{what}-")]
