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

Both ends are functions over partitions, on classic and Connect sessions: store settings appear
neither in options nor in plans.

What a crash leaves: staged files of attempts that failed, which are removed when they are old.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, functions

from ister.errors import InvalidRequestError
from ister.format.manifest import StagedFile, decode_manifest, encode_manifest
from ister.spark.batch import plan_partitions, read_rows
from ister.spark.jobs.runners import TaskRunner, map_bundles
from ister.spark.jobs.transforms import Transform
from ister.spark.offset_resolver import Head, OffsetResolver
from ister.spark.options import ReadOptions
from ister.spark.read_task import ReadTask
from ister.spark.row_staging import StagedRowFile
from ister.spark.rows import check_write_schema, row_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_VIEW: Final = "messages"
_TEXT: Final = "text"
_OWN_ERROR: Final = re.compile(r"[A-Za-z_.]*(Error|Exception): (?!Job aborted)")

_ANALYSED: Final = re.compile(r"== Analyzed Logical Plan ==\n(.*?)\n\n== ", re.DOTALL)
_NODE: Final = re.compile(r"\s*(?:[:+]- )?([A-Za-z0-9]+)")
# Nodes above the view that process each row by itself.
_ROW_BY_ROW: Final = frozenset({"Project", "Filter", "Generate", "SubqueryAlias", "View"})
_MESSAGES: Final = "MapInArrow"
_SUBQUERY: Final = re.compile(r"(subquery|exists|list)#", re.IGNORECASE)
# Spark's functions with another result each time; a chunk that is run again must give the same.
_RANDOM: Final = re.compile(
    r"\b(rand|randn|random|randstr|uniform|uuid|shuffle|monotonically_increasing_id"
    r"|spark_partition_id|input_file_name|input_file_block_(start|length)|reflect|try_reflect"
    r"|java_method)\s*\(",
    re.IGNORECASE,
)
_FIELDS_SHOWN: Final = "spark.sql.debug.maxToStringFields"


class SqlReplay:
    """A query over ranges of a topic. Used by one thread at a time, on the driver."""

    def __init__(
        self, runner: TaskRunner, query: str, task: ReadTask, options: ReadOptions, rows: Transform
    ) -> None:
        """Opens a session for the query.

        Raises:
            InvalidRequestError: The session has a table or view `messages`, and Spark cannot open
                another session.
        """
        self._runner = runner
        self._query = query
        self._rows = rows
        self._options = options
        self._task = task
        self._session = _open_session(runner.session())

    # -- the query --------------------------------------------------------------------------

    def check(self, head: Head, start: int, end: int) -> bool:
        """Checks the query; returns whether it may be divided into chunks.

        Raises:
            InvalidRequestError: It is not a query, or does not return messages.
        """
        result = self._result(head, start, end)
        schema = result.schema
        check_write_schema(schema, needs_topic=False)
        if self._rows.is_marked and "offset" not in schema.names:
            raise InvalidRequestError(
                "the query yields no offset to mark messages with",
                hint="SELECT offset, … FROM messages, or do without the mark",
            )
        [shown] = self._session.sql(f"EXPLAIN EXTENDED {self._query}").collect()
        return is_row_by_row(str(shown[0])) and not _RANDOM.search(self._query)

    def sample(self, head: Head, start: int, end: int, count: int) -> pa.Table:
        """Returns the first rows of the query."""
        try:
            with self._runner.described("ister replay: sample"):
                return self._result(head, start, end).limit(count).toArrow()
        except InvalidRequestError:
            raise
        except Exception as error:
            raise self._failed(error, start, end) from error

    def stage(
        self, head: Head, start: int, end: int, *, writer: str, batch: int
    ) -> list[StagedFile]:
        """Stages the rows of the query for a range.

        Raises:
            InvalidRequestError: The query failed; names the range.
        """
        result = self._result(head, start, end)
        work = partial(_stage, self._task, self._rows, writer, batch)
        try:
            with self._runner.described(f"ister replay: {start} up to {end}"):
                staged = result.mapInArrow(work, "partition int, files binary").collect()
        except Exception as error:
            raise self._failed(error, start, end) from error
        return [
            file
            for row in sorted(staged, key=lambda row: int(row.partition))
            for file in decode_manifest(bytes(row.files), key="staged files")
        ]

    def close(self) -> None:
        """Drops the view, and closes the session if it was opened here."""
        with suppress(Exception):  # Spark has stopped
            self._session.catalog.dropTempView(_VIEW)
        is_connect = getattr(self._session, "sparkContext", None) is None
        if is_connect and self._session is not self._runner.session():
            # Not `stop`, which also ends a server of this process. A client that stays open calls
            # the server when the interpreter exits, for ten minutes if that has gone.
            with suppress(Exception):
                self._session.client.release_session()
            with suppress(Exception):
                self._session.client.close()

    def _result(self, head: Head, start: int, end: int) -> DataFrame:
        schema = row_schema(self._task.columns)
        found = OffsetResolver(self._task.place, self._options).range_of(head, start, end)
        parts = plan_partitions([found], [head])
        read = partial(read_rows, self._task, schema=schema)
        messages = map_bundles(self._session, read, parts, schema).withColumn(
            _TEXT, functions.col("payload").cast("string")
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


def _open_session(spark: SparkSession) -> SparkSession:
    """Returns a session in which `messages` is free: a new one, if Spark can open one."""
    if hasattr(spark, "newSession"):
        session = spark.newSession()
    else:  # Connect before Spark 4.3
        session = spark
        if session.catalog.tableExists(_VIEW):
            raise InvalidRequestError(
                f"the Spark session has a table or view {_VIEW}, a name that a replay needs",
                hint=f"drop it: spark.catalog.dropTempView({_VIEW!r})",
            )
    # A plan that is shown in part would hide what the query calls.
    session.conf.set(_FIELDS_SHOWN, 100_000)
    return session


def _first_line(error: Exception) -> str:
    """Returns the message of an error, without the JVM's stack."""
    lines = [line.strip().lstrip(": ") for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(("An error occurred", "at "))]
    # The task's own exception tells more than that the task failed.
    own = [line for line in lines if _OWN_ERROR.match(line)]
    return (own or lines or [type(error).__name__])[0][:500]


def is_row_by_row(explained: str) -> bool:
    """Returns whether each row of a query depends on one message only.

    Takes the output of `EXPLAIN EXTENDED`. Returns False for a plan that is not understood.
    """
    found = _ANALYSED.search(explained)
    if found is None or _RANDOM.search(found.group(1)) or _SUBQUERY.search(found.group(1)):
        return False
    # The first line has the columns.
    for line in found.group(1).splitlines()[1:]:
        node = _NODE.match(line)
        if node is None or line.lstrip().startswith(":"):
            return False
        if node.group(1) == _MESSAGES:
            return True
        if node.group(1) not in _ROW_BY_ROW:
            return False
    return False


# -- in a task ------------------------------------------------------------------------------


def _stage(
    task: ReadTask, rows: Transform, writer: str, number: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Stages the rows of a partition; yields the list of files."""
    with StagedRowFile(task.place.history().objects, writer, number) as staging:
        for batch in batches:
            for part in rows.apply(batch) if batch.num_rows else ():
                staging.add(rows.target, part)
    context = TaskContext.get()
    partition = context.partitionId() if context is not None else 0
    files = encode_manifest([file for _, file in staging.files])
    yield pa.record_batch(
        {"partition": pa.array([partition], pa.int32()), "files": pa.array([files], pa.binary())}
    )
