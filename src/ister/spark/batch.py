"""The batch read: ranges resolved once, planned once, read by tasks.

Owns: what `startingOffsets` and its like mean for a read that ends. Does not own: where topics end
(`heads`), partitions (`planner`), the reading itself (`reading`).

Spark asks for partitions once per DataFrame, so every action on one DataFrame sees the same
messages; `load()` anew sees newer ones. Nothing here is remembered between two scans: unions,
self-joins and repeated actions of one DataFrame read the same range each time.

Filter pushdown of Spark 4.3 leaks from one scan of a DataFrame into the next, so the reader that
Spark gets does not offer it; `PushdownReader` does, for who asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

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

from ister.errors import (
    DataGapError,
    InvalidRequestError,
    NotFoundError,
    OffsetOutOfRangeError,
)
from ister.spark.heads import Head, Heads
from ister.spark.options import OffsetsOption, OffsetWord, ReadOptions
from ister.spark.patience import patiently
from ister.spark.place import find_place
from ister.spark.planner import Partition, TopicRange, plan
from ister.spark.reading import ReadTask, TopicIdentity
from ister.spark.rows import arrow_schema_of, check_read_schema

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

__all__ = ["BatchReader", "PlannedPartition", "PushdownReader", "in_schema"]

_log = logging.getLogger("ister.spark.batch")

_ATTEMPTS: Final = 3
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class PlannedPartition(InputPartition):
    """A partition, and which topics its slices are of. Pickled to a task."""

    def __init__(self, partition: Partition, identities: dict[str, TopicIdentity]) -> None:
        super().__init__(partition.number)
        self.partition = partition
        topics = {part.topic for part in partition.slices}
        self.identities = {name: identities[name] for name in topics}


def in_schema(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Batches under the schema that Spark expects, which has the same columns."""
    for batch in batches:
        if batch.num_rows:
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


class BatchReader(DataSourceReader):
    """Reads ranges of topics. Made on the driver, pickled to tasks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._task = ReadTask(
            place=find_place(options.config, options.broker_location),
            columns=check_read_schema(schema, options.columns),
            fail_on_data_loss=options.fail_on_data_loss,
        )

    def partitions(self) -> Sequence[InputPartition]:
        """The plan. Called once per DataFrame, on the driver."""
        heads = Heads(self._task.place, self._options)
        attempts = _ATTEMPTS
        while True:
            attempts -= 1
            found = patiently(lambda: heads.look(catches_up=True))
            try:
                return self._plan(heads, found)
            except (DataGapError, NotFoundError):
                # Retention or a deletion may have come between the look and the plan.
                if not attempts or patiently(heads.look) == found:
                    raise

    def _plan(self, heads: Heads, found: dict[str, Head]) -> list[InputPartition]:
        for which in ("starting", "ending"):
            option: OffsetsOption = getattr(self._options, f"{which}_offsets")
            option.check_known(f"{which}Offsets", found)
        ranges = patiently(lambda: [self._range(heads, head) for head in found.values()])
        planned = plan(
            ranges,
            split_bytes=self._options.split_bytes,
            min_partitions=self._options.min_partitions,
        )
        identities = {
            name: TopicIdentity(head.incarnation, head.node) for name, head in found.items()
        }
        return [PlannedPartition(partition, identities) for partition in planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition. Called in a task."""
        if not isinstance(partition, PlannedPartition):
            return iter(())  # what Spark makes of an empty list of partitions
        rows = self._task.read(partition.partition, partition.identities)
        return in_schema(rows, arrow_schema_of(self._schema))

    # -- ranges -----------------------------------------------------------------------------

    def _range(self, heads: Heads, head: Head) -> TopicRange:
        options = self._options
        start = self._resolve(heads, head, "starting")
        end = self._resolve(heads, head, "ending")
        if start > end:
            if options.starting_timestamp_ms is None and options.ending_timestamp_ms is None:
                raise InvalidRequestError(
                    f"the range is reversed: it begins at {start} and ends at {end}",
                    topic=head.topic,
                )
            end = start  # times need not rise with offsets: nothing lies between the two
        return heads.range_of(head, start, end)

    def _resolve(self, heads: Heads, head: Head, which: str) -> int:
        options = self._options
        is_start = which == "starting"
        time_ms = options.starting_timestamp_ms if is_start else options.ending_timestamp_ms
        if time_ms is not None:
            found = heads.find_time(head, time_ms)
            return head.end if found is None else found
        asked = options.starting_offsets if is_start else options.ending_offsets
        return self._resolve_offset(head, f"{which}Offsets", asked.of(head.topic))

    def _resolve_offset(self, head: Head, option: str, wanted: int | OffsetWord) -> int:
        if wanted == "earliest":
            return head.earliest
        if wanted == "latest":
            return head.end
        if wanted > head.end:
            raise OffsetOutOfRangeError(
                f"{option} is beyond the end",
                topic=head.topic,
                offset=wanted,
                earliest=head.earliest,
                next=head.end,
            )
        if wanted < head.earliest:
            gone = DataGapError(
                f"{option} asks for messages that are no longer kept; failOnDataLoss=false "
                "begins with the first one that is",
                start=wanted,
                end=head.earliest,
                topic=head.topic,
            )
            if self._options.fail_on_data_loss:
                raise gone
            _log.warning("messages left out", extra={"error": str(gone)})
            return head.earliest
        return wanted


class PushdownReader(BatchReader):
    """The same, narrowed by the filters that Spark hands over.

    For a DataFrame that is scanned once: with `spark.sql.python.filterPushdown.enabled` Spark 4.3
    gives the filters of one scan to the others of the same DataFrame.
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
            value: Any = getattr(item, "value", None)
            if name == "topic" and isinstance(item, EqualTo | In):
                wanted = set(value) if isinstance(item, In) else {value}
                self._topics = wanted if self._topics is None else self._topics & wanted
            elif name == "offset":
                self._push_offset(item, value)
            elif (
                name == "publish_time"
                and isinstance(item, GreaterThan | GreaterThanOrEqual)
                and isinstance(value, datetime)
                and value.tzinfo is not None
            ):
                time_ms = (value - _EPOCH) // timedelta(milliseconds=1)
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

    def _range(self, heads: Heads, head: Head) -> TopicRange:
        whole = super()._range(heads, head)
        if self._topics is not None and head.topic not in self._topics:
            return replace(whole, end=whole.start, tiered=whole.start, descriptors=())
        start = max(whole.start, self._offsets_from)
        if self._time_from_ms is not None:
            # Before the first such message all are older; after it some may be, which Spark drops.
            found = heads.find_time(head, self._time_from_ms)
            start = max(start, whole.end if found is None else found)
        end = whole.end
        if self._offsets_before is not None:
            end = min(end, self._offsets_before)
        start = min(start, whole.end)
        return heads.range_of(head, start, max(start, end))
