"""A replay through SQL: the query sees the source's range as the view `messages`.

    range of the source ─► view `messages` ─► the query ─► rows ─► staged files, by partition

Owns: the view, and the staging of the query's rows. Does not own: the plan, the commit.

The view has the connector's columns, and `text`, the payload as text. The query returns at least
`payload`; its columns `topic`, `offset` and `text` are ignored.

The range is one chunk, so a query may aggregate, join, sort or limit it. Rows come in the order of
Spark's partitions: those of filters, projections and `explode` in the order of the messages.

Both ends are functions over partitions, on classic and Connect sessions: store settings appear
neither in options nor in plans.

What a crash leaves: staged files of attempts that failed, which are removed when they are old.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, functions

from ister.errors import InvalidRequestError
from ister.format.manifest import StagedFile, decode_manifest, encode_manifest
from ister.spark.batch import plan_partitions, read_rows
from ister.spark.jobs.tasks import TaskRunner, first_line, map_tasks
from ister.spark.jobs.transforms import Transform
from ister.spark.offset_resolver import Head, OffsetResolver
from ister.spark.read_task import ReadTask
from ister.spark.row_staging import StagedRowFile
from ister.spark.rows import check_write_schema, row_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_VIEW: Final = "messages"
_TEXT: Final = "text"


class SqlReplay:
    """A query over a range of a topic. Used by one thread at a time, on the driver."""

    def __init__(
        self,
        runner: TaskRunner,
        query: str,
        task: ReadTask,
        resolver: OffsetResolver,
        rows: Transform,
    ) -> None:
        """Opens a session for the query.

        Raises:
            InvalidRequestError: The session has a table or view `messages`, and Spark cannot open
                another session.
        """
        self._runner = runner
        self._query = query
        self._rows = rows
        self._resolver = resolver
        self._task = task
        self._session = _open_session(runner.session())

    def check(self, head: Head, start: int, end: int) -> None:
        """Checks the query."""
        schema = self._result(head, start, end).schema
        check_write_schema(schema, needs_topic=False)
        if self._rows.is_marked and "offset" not in schema.names:
            raise InvalidRequestError(
                "the query yields no offset to mark messages with",
                hint="SELECT offset, … FROM messages, or do without the mark",
            )

    def sample(self, head: Head, start: int, end: int, count: int) -> pa.Table:
        """Returns the first rows of the query."""
        with self._failures(head.topic, start, end, "ister replay: sample"):
            return self._result(head, start, end).limit(count).toArrow()

    def stage(
        self, head: Head, start: int, end: int, *, writer: str, batch: int
    ) -> list[StagedFile]:
        """Stages the rows of the query for a range."""
        work = partial(_stage, self._task, self._rows, writer, batch)
        with self._failures(head.topic, start, end, f"ister replay: {start} up to {end}"):
            result = self._result(head, start, end)
            staged = result.mapInArrow(work, "partition int, files binary").collect()
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
        parts = plan_partitions([self._resolver.range_of(head, start, end)], [head])
        read = partial(read_rows, self._task, schema=schema)
        messages = map_tasks(self._session, read, parts, schema).withColumn(
            _TEXT, functions.col("payload").cast("string")
        )
        messages.createOrReplaceTempView(_VIEW)
        try:
            result = self._session.sql(self._query)
            # Forces Spark's late checks of the query.
            _ = result.schema
        except PySparkException as error:
            raise InvalidRequestError(
                f"the query cannot be used: {first_line(error)}",
                hint="SELECT … AS payload FROM messages",
            ) from error
        return result.drop(_TEXT) if _TEXT in result.columns else result

    @contextmanager
    def _failures(self, topic: str, start: int, end: int, name: str) -> Iterator[None]:
        """Names the range if Spark fails on the query."""
        try:
            with self._runner.described(name):
                yield
        except InvalidRequestError:
            raise
        except Exception as error:
            raise InvalidRequestError(
                f"the query failed for messages {start} up to {end}: {first_line(error)}",
                topic=topic,
                offset=start,
                hint="fix the query and run the replay again: nothing of this range is in the "
                "target",
            ) from error


def _open_session(spark: SparkSession) -> SparkSession:
    """Returns a session in which `messages` is free: a new one, if Spark can open one."""
    if hasattr(spark, "newSession"):
        return spark.newSession()
    # Connect before Spark 4.3
    if spark.catalog.tableExists(_VIEW):
        raise InvalidRequestError(
            f"the Spark session has a table or view {_VIEW}, a name that a replay needs",
            hint=f"drop it: spark.catalog.dropTempView({_VIEW!r})",
        )
    return spark


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
