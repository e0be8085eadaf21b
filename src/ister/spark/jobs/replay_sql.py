"""A replay through SQL: the query sees a range of the source as the view `messages`.

    range of the source ─► view `messages` ─► the query ─► rows ─► staged files, by partition

Owns: the view, whether a query may be divided into chunks, and the staging of its rows. Does not
own: the plan, the commit.

The view has the connector's columns, and `text`, the payload as text. The query returns at least
`payload`; its columns `topic`, `offset` and `text` are ignored.

A query that processes each message by itself (filters, projections, `explode`) runs chunk by chunk,
and messages keep their order. One that processes several at once (aggregates, joins, windows,
limits, sorts, `DISTINCT`, subqueries) sees the whole range as one chunk, and its rows come in the
order of Spark's partitions.

Each replay has its own classes of the two data sources: Spark pickles them with what they refer to,
so store settings appear neither in options nor in plans.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, functions
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from ister.bucket.names import staging_prefix
from ister.errors import InvalidRequestError, InvariantError
from ister.format.manifest import StagedFile, decode_manifest, encode_manifest
from ister.limits import MANIFEST_BYTES_MAX
from ister.model import TopicName
from ister.spark.batch import plan_partitions, read_rows
from ister.spark.jobs.transforms import Transform
from ister.spark.offset_resolver import Head, OffsetResolver
from ister.spark.options import ReadOptions
from ister.spark.read_task import ReadTask
from ister.spark.row_staging import StagedRowFiles, remove_staged
from ister.spark.rows import check_write_schema, row_schema
from ister.spark.sink import StagedRows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_VIEW: Final = "messages"
_TEXT: Final = "text"
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
        # A session of its own: the program's views and sources do not change.
        self._session = spark.newSession()
        token = secrets.token_hex(6)
        self._source, self._sink = f"ister_replay_source_{token}", f"ister_replay_sink_{token}"
        self._options = options
        self._task = task
        self._session.dataSource.register(_make_sink(self._sink, task, rows))
        self._registered: Head | None = None

    # -- the query --------------------------------------------------------------------------

    def check(self, head: Head, start: int, end: int) -> bool:
        """Checks the query; returns whether it may be divided into chunks.

        Raises:
            InvalidRequestError: It is not a query, or does not return messages.
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
        """Returns the first rows of the query."""
        try:
            return self._result(head, start, end).limit(count).toArrow()
        except (PySparkException, Py4JError) as error:
            raise self._failed(error, start, end) from error

    def stage(
        self, head: Head, start: int, end: int, *, writer: str, batch: int
    ) -> list[StagedFile]:
        """Stages the rows of the query for a range.

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
        """Makes Spark find data sources in this session, not in the thread's last one."""
        jvm = self._session._jvm  # noqa: SLF001 - Python has no such call
        if jvm is None:
            raise InvariantError("a classic session has a JVM")
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
            .withColumn(_TEXT, functions.col("payload").cast("string"))
        )
        messages.createOrReplaceTempView(_VIEW)
        try:
            result = self._session.sql(self._query)
            # Forces Spark's late checks of the query.
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
            hint="fix the query; with --name, the replay continues where this run ended",
        )


def _first_line(error: Exception) -> str:
    """Returns the message of an error, without the JVM's stack."""
    lines = [line.strip().lstrip(": ") for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(("An error occurred", "at "))]
    # The task's own exception tells more than that the task failed.
    own = [line for line in lines if _OWN_ERROR.match(line)]
    return (own or lines or [type(error).__name__])[0][:500]


def _is_row_by_row(result: DataFrame) -> bool:
    """Returns whether each row of a query depends on one message only."""
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
            found = OffsetResolver(task.place, read_options).range_of(head, self._start, self._end)
            return plan_partitions([found], [head])

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            return read_rows(task, partition, self._schema)

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
            objects = task.place.history().objects
            with StagedRowFiles(objects, self._writer, self._batch) as staging:
                for batch in iterator:
                    for part in rows.apply(batch) if batch.num_rows else ():
                        staging.add(rows.target, part)
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
