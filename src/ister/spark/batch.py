"""The batch read: offsets resolved once, planned once, read by tasks.

Owns: what `startingOffsets` and the other range options mean for a read that ends. Does not own:
where topics end (`offset_resolver`), partitions (`planner`), reading (`read_task`).

Spark asks for partitions once per DataFrame, so every action on one DataFrame sees the same
messages; a new `load()` sees newer ones. Spark 4.0 asks at every action. Nothing is kept between
two scans: unions, self-joins and repeated actions of one DataFrame read the same range each time.

Filter pushdown is in `pushdown`: Spark gives the filters of one scan of a DataFrame to the next.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from ister.base.limits import MIB
from ister.base.retry import retry_unavailable
from ister.errors import DataGapError, InvalidRequestError, NotFoundError
from ister.spark.compat import arrow_schema_of
from ister.spark.location import find_place
from ister.spark.offset_resolver import Head, OffsetResolver
from ister.spark.option_values import OffsetWord
from ister.spark.options import ReadOptions
from ister.spark.planner import (
    SLOTS_ASSUMED,
    SPLIT_BYTES_DEFAULT,
    Partition,
    TopicRange,
    plan,
)
from ister.spark.read_task import ReadTask, TopicIdentity
from ister.spark.row_shape import RowShape
from ister.spark.rows import check_read_schema
from ister.spark.workers import spare_collector

START_REMEDY: Final = "; failOnDataLoss=false starts at the earliest message"
REACH_REMEDY: Final = "; includeUnreachableTail=false reads the messages before them"

NARROW_HINT: Final = (
    "; filters are applied to what was read: the options startingOffsets, endingOffsets, "
    "startingTimestamp and endingTimestamp narrow a scan"
)

# In the comments of the columns of a read with `includeUnreachableTail=false`, which are JSON: by
# topic, the first offset that could not be read when the DataFrame was created, and its node. A
# comment, as DDL has no other place for metadata, and a schema with a payload in DDL is DDL.
_UNREACHABLE: Final = "ister.unreachable"

_ATTEMPTS: Final = 3
# A scan of so much that no option narrows is worth a warning: it takes minutes.
_LARGE_BYTES: Final = 1024 * MIB

_log = logging.getLogger("ister.spark.batch")


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
) -> list[PlannedPartition]:
    """Plans ranges of topics as the partitions that Spark hands to its tasks.

    A given `split_bytes` is used as it is. The default is reduced for a read that would otherwise
    have fewer partitions than a small cluster has slots.
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
    task: ReadTask, partition: InputPartition, schema: StructType, shape: RowShape | None = None
) -> Iterator[pa.RecordBatch]:
    """Reads a partition as batches of the Arrow schema that Spark expects. Called in a task.

    `shape` derives the columns of the schema, if they are not those of messages.
    """
    if not isinstance(partition, PlannedPartition):
        return  # what Spark makes of an empty list of partitions
    expected = arrow_schema_of(schema)
    is_plain = shape is None or shape.is_plain
    for batch in task.read(partition.partition, partition.identities):
        if not batch.num_rows:
            continue
        if is_plain and batch.schema.equals(expected):
            yield batch
        else:
            columns = batch.columns if shape is None else shape.apply(batch)
            yield pa.RecordBatch.from_arrays(columns, schema=expected)


class TopicReader:
    """What batches and streams share: options, schema, and the reading of a partition."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_read_schema(schema, options)
        self._options = options
        self._schema = schema
        self._shape = RowShape(schema, options.payload_errors)
        self._task = ReadTask(
            place=find_place(options.config, options.brokers),
            columns=self._shape.columns,
            fail_on_data_loss=options.fail_on_data_loss,
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Reads the rows of a partition. Called in a task."""
        return read_rows(self._task, partition, self._schema, self._shape)

    def _resolver(self) -> OffsetResolver:
        return OffsetResolver(self._task.place, self._options)

    def _partitions(
        self, ranges: Sequence[TopicRange], heads: Iterable[Head]
    ) -> list[PlannedPartition]:
        return plan_partitions(
            ranges,
            heads,
            split_bytes=self._options.split_bytes,
            min_partitions=self._options.min_partitions,
        )


def unreachable_comment(options: ReadOptions) -> str:
    """Returns JSON that names the topics whose newest messages cannot be read now."""
    resolver = OffsetResolver(find_place(options.config, options.brokers), options)
    found = retry_unavailable(lambda: resolver.heads(catches_up=True)).values()
    cut = {head.topic: {"node": head.node, "offset": head.end} for head in found if head.is_cut}
    return json.dumps({_UNREACHABLE: cut})


def _said_unreachable(schema: StructType) -> Container[str] | None:
    """Returns the topics that a schema's comments name; None if it has no such comment."""
    try:
        comment = json.loads(schema.fields[0].metadata.get("comment", ""))
    except ValueError:  # a user's schema, with a user's comments
        return None
    topics = comment.get(_UNREACHABLE) if isinstance(comment, dict) else None
    return topics if isinstance(topics, dict) else None


class BatchReader(TopicReader, DataSourceReader):
    """Reads ranges of topics. Created on the driver, pickled to tasks."""

    def partitions(self) -> Sequence[InputPartition]:
        """Plans the read. Called once per DataFrame, on the driver."""
        planned = self._plan_newest()
        self._say(planned)
        spare_collector()
        return planned

    def _say(self, planned: Sequence[PlannedPartition]) -> None:
        """Logs how much is read, and how to read less: Spark's plan cannot show it."""
        if _log.level == logging.NOTSET:
            # Spark's table of the logs of Python workers has what their loggers let through.
            _log.setLevel(logging.INFO)
        slices = [part for item in planned for part in item.partition.slices]
        size = sum(part.bytes for part in slices)
        is_narrow = self._options.has_range
        _log.log(
            logging.WARNING if size >= _LARGE_BYTES and not is_narrow else logging.INFO,
            "scan of %s: %d messages, about %.1f MiB, in %d tasks%s",
            ", ".join(self._options.topics) or self._options.topic_pattern or "partitions",
            sum(part.end - part.start for part in slices),
            size / MIB,
            len(planned),
            "" if is_narrow else NARROW_HINT,
        )

    def _plan_newest(self) -> list[PlannedPartition]:
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

    def _plan(self, resolver: OffsetResolver, found: dict[str, Head]) -> list[PlannedPartition]:
        self._options.check_topics(found)
        ranges = retry_unavailable(lambda: [self._range(resolver, head) for head in found.values()])
        return self._partitions(ranges, found.values())

    def _range(self, resolver: OffsetResolver, head: Head) -> TopicRange:
        options = self._options
        start_ms, end_ms = options.start_time_ms(head.topic), options.end_time_ms(head.topic)
        wanted_end = options.ending_offsets.of(head.topic)
        self._check_reach(resolver, head, wanted_end, end_ms)
        start = resolver.resolve(
            head,
            "startingOffsets",
            options.starting_offsets.of(head.topic),
            time_ms=start_ms,
            must_match=options.time_must_match,
            remedy=START_REMEDY,
        )
        end = resolver.resolve(
            head,
            "endingOffsets",
            wanted_end,
            time_ms=end_ms,
            remedy=START_REMEDY,
        )
        if start > end:
            if start_ms is None and end_ms is None:
                raise InvalidRequestError(
                    f"the range is reversed: it starts at {start} and ends at {end}",
                    topic=head.topic,
                )
            end = start  # times need not rise with offsets: nothing lies between the two
        return resolver.range_of(head, start, end)

    def _check_reach(
        self, resolver: OffsetResolver, head: Head, end: int | OffsetWord, end_ms: int | None
    ) -> None:
        if head.cut_error is None:
            return
        if self._options.include_unreachable_tail:
            wanted: object = end if end_ms is None else resolver.find_time(head, end_ms)
            head.check_reach(wanted, remedy=REACH_REMEDY)
        # Spark passes the schema that `load()` showed, unless the user gave one.
        said = _said_unreachable(self._schema)
        if said is not None and head.topic not in said:
            head.check_reach(remedy="; load() again to read the messages before them")
