"""The batch read: offsets resolved once, planned once, read by tasks.

Owns: what `startingOffsets` and the other range options mean for a read that ends. Does not own:
where topics end (`offset_resolver`), partitions (`planner`), reading (`read_task`).

Spark asks for partitions once per DataFrame, so every action on one DataFrame sees the same
messages; a new `load()` sees newer ones. Nothing is kept between two scans: unions, self-joins and
repeated actions of one DataFrame read the same range each time.

Filter pushdown of Spark 4.3 leaks from one scan of a DataFrame into the next. The default reader
does not offer it; `PushdownReader` does, if the option `pushdown` is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from ister.errors import DataGapError, InvalidRequestError, NotFoundError
from ister.positions import EPOCH
from ister.retry import retry_unavailable
from ister.spark.location import find_place
from ister.spark.offset_resolver import Head, OffsetResolver
from ister.spark.options import ReadOptions
from ister.spark.planner import (
    SLOTS_ASSUMED,
    SPLIT_BYTES_DEFAULT,
    Partition,
    TopicRange,
    plan,
)
from ister.spark.read_task import ReadTask, TopicIdentity
from ister.spark.rows import arrow_schema_of, check_read_schema

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

START_REMEDY: Final = "; failOnDataLoss=false starts at the earliest message"

_ATTEMPTS: Final = 3


class PlannedPartition(InputPartition):
    """A partition, and the identities of its topics. Pickled to a task."""

    def __init__(self, partition: Partition, identities: Mapping[str, TopicIdentity]) -> None:
        super().__init__(partition.number)
        self.partition = partition
        topics = {part.topic for part in partition.slices}
        self.identities = {name: identities[name] for name in topics}


def plan_partitions(
    ranges: Sequence[TopicRange],
    heads: Iterable[Head],
    *,
    split_bytes: int | None = None,
    min_partitions: int | None = None,
) -> list[InputPartition]:
    """Plans ranges of topics as the partitions that Spark hands to its tasks.

    A given `split_bytes` counts as it is. The default is made smaller for a read that would leave
    some of a few slots idle.
    """
    identities = {head.topic: head.identity for head in heads}
    planned = plan(
        ranges,
        split_bytes=SPLIT_BYTES_DEFAULT if split_bytes is None else split_bytes,
        min_partitions=min_partitions,
        slots=SLOTS_ASSUMED if split_bytes is None else None,
    )
    return [PlannedPartition(partition, identities) for partition in planned]


def read_rows(
    task: ReadTask, partition: InputPartition, schema: StructType
) -> Iterator[pa.RecordBatch]:
    """Reads a partition as batches of the Arrow schema that Spark expects. Called in a task."""
    if not isinstance(partition, PlannedPartition):
        return  # what Spark makes of an empty list of partitions
    arrow_schema = arrow_schema_of(schema)
    for batch in task.read(partition.partition, partition.identities):
        if batch.num_rows:
            yield pa.RecordBatch.from_arrays(batch.columns, schema=arrow_schema)


class TopicReader:
    """What batches and streams share: options, schema, and the reading of a partition."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._task = ReadTask(
            place=find_place(options.config, options.brokers),
            columns=check_read_schema(schema, options.columns),
            fail_on_data_loss=options.fail_on_data_loss,
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Reads the rows of a partition. Called in a task."""
        return read_rows(self._task, partition, self._schema)

    def _resolver(self) -> OffsetResolver:
        return OffsetResolver(self._task.place, self._options)

    def _partitions(
        self, ranges: Sequence[TopicRange], heads: Iterable[Head]
    ) -> list[InputPartition]:
        return plan_partitions(
            ranges,
            heads,
            split_bytes=self._options.split_bytes,
            min_partitions=self._options.min_partitions,
        )


class BatchReader(TopicReader, DataSourceReader):
    """Reads ranges of topics. Created on the driver, pickled to tasks."""

    def partitions(self) -> Sequence[InputPartition]:
        """Plans the read. Called once per DataFrame, on the driver."""
        resolver = self._resolver()
        attempts = _ATTEMPTS
        while True:
            attempts -= 1
            found = retry_unavailable(lambda: resolver.heads(catches_up=True))
            try:
                return self._plan(resolver, found)
            except (DataGapError, NotFoundError):
                # Retention or a deletion may have come between the look and the plan.
                if not attempts or retry_unavailable(resolver.heads) == found:
                    raise

    def _plan(self, resolver: OffsetResolver, found: dict[str, Head]) -> list[InputPartition]:
        self._options.starting_offsets.check_known("startingOffsets", found)
        self._options.ending_offsets.check_known("endingOffsets", found)
        ranges = retry_unavailable(lambda: [self._range(resolver, head) for head in found.values()])
        return self._partitions(ranges, found.values())

    def _range(self, resolver: OffsetResolver, head: Head) -> TopicRange:
        options = self._options
        start = resolver.resolve(
            head,
            "startingOffsets",
            options.starting_offsets.of(head.topic),
            time_ms=options.starting_timestamp_ms,
            remedy=START_REMEDY,
        )
        end = resolver.resolve(
            head,
            "endingOffsets",
            options.ending_offsets.of(head.topic),
            time_ms=options.ending_timestamp_ms,
            remedy=START_REMEDY,
        )
        if start > end:
            if options.starting_timestamp_ms is None and options.ending_timestamp_ms is None:
                raise InvalidRequestError(
                    f"the range is reversed: it starts at {start} and ends at {end}",
                    topic=head.topic,
                )
            end = start  # times need not rise with offsets: nothing lies between the two
        return resolver.range_of(head, start, end)


class PushdownReader(BatchReader):
    """A batch reader whose range is narrowed by the filters that Spark pushes down.

    For a DataFrame that is scanned once: with `spark.sql.python.filterPushdown.enabled` Spark 4.3
    gives the filters of one scan to the other scans of the same DataFrame.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._offsets_from = 0
        self._offsets_before: int | None = None
        self._topics: set[str] | None = None
        self._time_from_ms: int | None = None

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Takes what narrows the range. Spark applies every filter again, so none is dropped."""
        for item in filters:
            name = ".".join(getattr(item, "attribute", ()))
            value: object = getattr(item, "value", None)
            if name == "topic" and isinstance(item, EqualTo | In):
                wanted = set(item.value) if isinstance(item, In) else {item.value}
                self._topics = wanted if self._topics is None else self._topics & wanted
            elif name == "offset" and isinstance(value, int):
                self._push_offset(item, value)
            elif (
                name == "publish_time"
                and isinstance(item, GreaterThan | GreaterThanOrEqual)
                and isinstance(value, datetime)
                and value.tzinfo is not None
            ):
                time_ms = (value - EPOCH) // timedelta(milliseconds=1)
                self._time_from_ms = max(time_ms, self._time_from_ms or 0)
        return filters

    def _push_offset(self, item: Filter, value: int) -> None:
        before = self._offsets_before
        if isinstance(item, GreaterThan | GreaterThanOrEqual | EqualTo):
            start = value + 1 if isinstance(item, GreaterThan) else value
            self._offsets_from = max(self._offsets_from, start)
        if isinstance(item, LessThan | LessThanOrEqual | EqualTo):
            end = value if isinstance(item, LessThan) else value + 1
            self._offsets_before = end if before is None else min(before, end)

    def _range(self, resolver: OffsetResolver, head: Head) -> TopicRange:
        whole = super()._range(resolver, head)
        if self._topics is not None and head.topic not in self._topics:
            return replace(whole, end=whole.start, tiered=whole.start, descriptors=())
        start = max(whole.start, self._offsets_from)
        if self._time_from_ms is not None:
            # All messages before the first match are older; Spark drops older ones after it.
            found = resolver.find_time(head, self._time_from_ms)
            start = max(start, whole.end if found is None else found)
        end = whole.end
        if self._offsets_before is not None:
            end = min(end, self._offsets_before)
        start = min(start, whole.end)
        return resolver.range_of(head, start, max(start, end))
