"""A replay through SQL: the query sees a range of the source as the view `messages`.

    range of the source ─► view `messages` ─► the query ─► rows ─► staged files, by partition

Owns: the view, where the query may be cut into chunks, and the staging of what it yields. Does not
own: the plan, the commit.

The view has the connector's columns, and `text`, the payload as text. The query yields at least
`payload`; `topic`, `offset` and `text` may be among its columns and do not count.

A query that looks at each message by itself (filters, projections, `explode`) runs chunk by chunk,
and messages keep their order. One that looks at several at once (aggregates, joins, windows,
limits, sorts, `DISTINCT`, subqueries) sees the whole range as one chunk, and its rows come in the
order of Spark's partitions.

The two data sources here are classes of their own in every replay: Spark pickles them with what
they refer to, so settings of stores appear neither in options nor in plans.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from ister.errors import InvalidRequestError
from ister.format.manifest import StagedFile, decode_manifest, encode_manifest
from ister.limits import MANIFEST_BYTES_MAX
from ister.model import TopicName
from ister.spark.batch import PlannedPartition, in_schema
from ister.spark.heads import Head, Heads
from ister.spark.jobs.transforms import Transform
from ister.spark.options import ReadOptions
from ister.spark.planner import plan
from ister.spark.reading import ReadTask, TopicIdentity
from ister.spark.rows import arrow_schema_of, check_write_schema, row_schema
from ister.spark.sink import StagedRows
from ister.spark.staging import StagedFiles, remove_staged
from ister.tier.names import staging_prefix

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["SqlReplay"]

_VIEW: Final = "messages"
_TEXT: Final = "text"
_SPLIT_BYTES: Final = 64 * 1024 * 1024
_OWN_ERROR: Final = re.compile(r"[A-Za-z_.]*(Error|Exception): (?!Job aborted)")
# What looks at each row by itself; the two that end with `Relation` are the view.
_ROW_BY_ROW: Final = frozenset(
    {"Project", "Filter", "Generate", "SubqueryAlias", "View", "RelationV2", "DataSourceV2Relation"}
)


class SqlReplay:
    """A query over ranges of a topic. Used by one thread at a time, on the driver."""

    def __init__(
        self, spark: SparkSession, query: str, task: ReadTask, options: ReadOptions, rows: Transform
    ) -> None:
        self._query = query
        self._place = task.place
        self._topic = rows.target
        self._is_marked = rows.is_marked
        # Views and sources of its own: those of the program stay as they are.
        self._session = spark.newSession()
        token = secrets.token_hex(6)
        self._source, self._sink = f"ister_replay_source_{token}", f"ister_replay_sink_{token}"
        self._options = options
        self._task = task
        self._session.dataSource.register(_make_sink(self._sink, task, rows))
        self._registered: Head | None = None

    # -- the query --------------------------------------------------------------------------

    def check(self, head: Head, start: int, end: int) -> bool:
        """Looks at the query; whether it may be cut into chunks.

        Raises:
            InvalidRequestError: It is not a query, or does not yield messages.
        """
        result = self._result(head, start, end)
        schema = result.schema
        check_write_schema(schema, needs_topic=False)
        if self._is_marked and "offset" not in schema.names:
            raise InvalidRequestError(
                "the query yields no offset to mark messages with",
                hint="SELECT offset, … FROM messages, or do without the mark",
            )
        return _is_row_by_row(result)

    def sample(self, head: Head, start: int, end: int, count: int) -> pa.Table:
        """The first rows that the query yields."""
        try:
            return self._result(head, start, end).limit(count).toArrow()
        except (PySparkException, Py4JError) as error:
            raise self._failed(error, start, end) from error

    def stage(
        self, head: Head, start: int, end: int, *, writer: str, batch: int
    ) -> list[StagedFile]:
        """Stages what the query yields for a range.

        Raises:
            InvalidRequestError: The query failed; names the range.
        """
        result = self._result(head, start, end)
        prefix = staging_prefix(TopicName.parse(self._topic), writer, batch)
        listing = f"{prefix}listing-{secrets.token_hex(8)}.json"
        options = {"writer": writer, "batch": str(batch), "listing": listing}
        try:
            with self._active():
                result.write.format(self._sink).options(**options).mode("append").save()
        except (PySparkException, Py4JError) as error:
            raise self._failed(error, start, end) from error
        objects = self._place.history().objects
        files = decode_manifest(objects.read(listing, 0, MANIFEST_BYTES_MAX), key=listing)
        remove_staged(objects, [StagedFile(key=listing, rows=0, size_bytes=0)])
        return list(files)

    @contextmanager
    def _active(self) -> Iterator[None]:
        """Has Spark look for data sources in this session, not in the thread's last one."""
        jvm: Any = self._session._jvm  # noqa: SLF001 - Python has no such call
        sessions = jvm.SparkSession
        before = sessions.getActiveSession()
        sessions.setActiveSession(self._session._jsparkSession)  # noqa: SLF001
        try:
            yield
        finally:
            if before.isDefined():
                sessions.setActiveSession(before.get())
            else:
                sessions.clearActiveSession()

    def _result(self, head: Head, start: int, end: int) -> DataFrame:
        if self._registered != head:
            made = _make_source(self._source, self._task, self._options, head)
            self._session.dataSource.register(made)
            self._registered = head
        messages = (
            self._session.read.format(self._source)
            .options(start=str(start), end=str(end))
            .load()
            .withColumn(_TEXT, _as_text())
        )
        messages.createOrReplaceTempView(_VIEW)
        try:
            result = self._session.sql(self._query)
            # What Spark finds out about a query late, it says here.
            _ = result.schema
        except PySparkException as error:
            raise InvalidRequestError(
                f"the query cannot be used: {_first_line(error)}",
                hint="SELECT … AS payload FROM messages",
            ) from error
        return result.drop(_TEXT) if _TEXT in result.columns else result

    def _failed(self, error: Exception, start: int, end: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"the query failed for messages {start} up to {end}: {_first_line(error)}",
            topic=next(iter(self._options.topics), None),
            offset=start,
            hint="put it right; with --name, the replay goes on where this run has ended",
        )


def _as_text() -> Any:  # noqa: ANN401 - a column
    from pyspark.sql import functions  # noqa: PLC0415 - large

    return functions.col("payload").cast("string")


def _first_line(error: Exception) -> str:
    """What an error says, without where in the JVM it says so."""
    lines = [line.strip().lstrip(": ") for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(("An error occurred", "at "))]
    # What a task's own exception says is worth more than that the task failed.
    own = [line for line in lines if _OWN_ERROR.match(line)]
    return (own or lines or [type(error).__name__])[0][:500]


def _is_row_by_row(result: DataFrame) -> bool:
    """Whether each row that a query yields depends on one message alone."""
    analysed = result._jdf.queryExecution().analyzed()  # noqa: SLF001 - nothing else tells
    if not analysed.deterministic() or not analysed.subqueriesAll().isEmpty():
        return False
    waiting = [analysed]
    while waiting:
        node = waiting.pop()
        if node.nodeName() not in _ROW_BY_ROW and not node.nodeName().startswith("RelationV2"):
            return False
        children = node.children()
        waiting += [children.apply(at) for at in range(children.size())]
    return True


# -- data sources ---------------------------------------------------------------------------


def _make_source(name: str, task: ReadTask, options: ReadOptions, head: Head) -> type[DataSource]:
    """A data source that reads ranges of one topic; pickled by value, as it is no module's."""
    read_options = options

    class Reader(DataSourceReader):
        def __init__(self, schema: StructType, start: int, end: int) -> None:
            self._schema = schema
            self._start, self._end = start, end

        def partitions(self) -> Sequence[InputPartition]:
            found = Heads(task.place, read_options).range_of(head, self._start, self._end)
            identities = {head.topic: TopicIdentity(head.incarnation, head.node)}
            return [
                PlannedPartition(part, identities)
                for part in plan([found], split_bytes=_SPLIT_BYTES)
            ]

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            if not isinstance(partition, PlannedPartition):
                return iter(())
            rows = task.read(partition.partition, partition.identities)
            return in_schema(rows, arrow_schema_of(self._schema))

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return name

        def schema(self) -> StructType:
            return row_schema(task.columns)

        def reader(self, schema: StructType) -> DataSourceReader:
            return Reader(schema, int(self.options["start"]), int(self.options["end"]))

    return Source


def _make_sink(name: str, task: ReadTask, rows: Transform) -> type[DataSource]:
    """A data source that stages rows and lists the staged files in an object of the bucket."""

    class Writer(DataSourceArrowWriter):
        def __init__(self, options: Mapping[str, str]) -> None:
            self._writer, self._batch = options["writer"], int(options["batch"])
            self._listing = options["listing"]

        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            context = TaskContext.get()
            staging = StagedFiles(task.place.history().objects, self._writer, self._batch)
            try:
                for batch in iterator:
                    for part in rows.apply(batch) if batch.num_rows else ():
                        staging.add(rows.target, part)
                staging.close()
            except BaseException:
                staging.abort()
                raise
            partition = context.partitionId() if context is not None else 0
            return StagedRows(partition=partition, query=None, files=staging.files)

        def commit(self, messages: list[WriterCommitMessage | None]) -> None:
            files = [file for message in _staged(messages) for _, file in message.files]
            task.place.history().objects.put(self._listing, encode_manifest(files))

        def abort(self, messages: list[WriterCommitMessage | None]) -> None:
            objects = task.place.history().objects
            for message in _staged(messages):
                remove_staged(objects, (file for _, file in message.files))

    class Sink(DataSource):
        @classmethod
        def name(cls) -> str:
            return name

        def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
            return Writer(self.options)

    return Sink


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[StagedRows]:
    found = [message for message in messages if isinstance(message, StagedRows)]
    return sorted(found, key=lambda message: message.partition)
