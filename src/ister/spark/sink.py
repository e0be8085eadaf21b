"""The sink: writes the rows of a batch or micro-batch as messages, each once.

    task: rows ─► a staged file in the bucket ─┐
    task: rows ─► a staged file in the bucket ─┼─► driver: commit ─► the topics' owners append them
    task: rows ─► a staged file in the bucket ─┘

Owns: which rows go where, and their order (by partition, then as Spark passed them). Does not own:
staged files and their append (`ister.spark.row_staging`); how a batch is appended once
(`ister.topic.batches`, whose writer is the streaming query, or the option `writer`, and whose batch
is the micro-batch).

A micro-batch with rows for several topics is a batch of each of them, and each is committed once;
a reader of two topics may see one before the other. Rows for a partitioned topic are divided among
its partitions by routing key, and rows without one by their payloads: the same rows go to the same
partitions when Spark repeats a micro-batch, so that each partition gets its rows once, too. The
partitions are those that existed when the driver created the tasks' writer.

What a crash leaves: staged files. A commit that was begun is finished by the next one for the same
micro-batch, from the files of the first; unused files are removed when they are a day old. So
`abort` removes files only if no commit can have used them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from ister.base.model import TopicName
from ister.bucket.orphans import JOB_PREFIX
from ister.errors import InvalidRequestError
from ister.format.manifest import StagedFile
from ister.spark.compat import DataSourceStreamArrowWriter
from ister.spark.location import LogLocation, find_place
from ister.spark.options import ReplayedBatch, WriteOptions
from ister.spark.row_staging import (
    Committer,
    StagedRowFile,
    check_parts,
    find_partitions,
    remove_staged,
)
from ister.spark.rows import check_write_schema, to_staged
from ister.spark.workers import keep_buffers, spare_collector
from ister.topic.batches import StagedBatch
from ister.topic.partitioned import split_rows

_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"


@dataclass
class StagedRows(WriterCommitMessage):
    """What a task staged. Pickled to the driver."""

    partition: int
    query: str | None
    """The streaming query's id, which outlives its restarts; None for a batch."""
    files: list[tuple[str, StagedFile]] = field(default_factory=list)
    """Topic and file, in the order of the rows."""


class _Writer:
    """What batches and streams share. Created on the driver, pickled to tasks."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise InvalidRequestError("a topic can only be appended to", hint='.mode("append")')
        check_write_schema(schema, needs_topic=options.topic is None)
        self._options = options
        self._place: LogLocation = find_place(options.config, options.brokers)
        self._partitions = find_partitions(self._place, options.topic)

    # -- in tasks ---------------------------------------------------------------------------

    def _stage(
        self, batches: Iterator[pa.RecordBatch], *, query: str | None, writer: str, batch: int
    ) -> StagedRows:
        keep_buffers()
        context = TaskContext.get()
        payload_bytes_max = self._place.config.storage.max_message_size
        with StagedRowFile(self._place.history().objects, writer, batch) as staging:
            for rows in batches:
                staged = to_staged(rows, self._options.producer_name)
                parts = list(self._by_topic(rows, staged))
                check_parts(parts, staged, payload_bytes_max=payload_bytes_max)
                row_bytes = staged.nbytes / max(staged.num_rows, 1)
                for topic, part in parts:
                    names = self._partitions.get(topic) or [topic]
                    for number, share in split_rows(part, len(names)):
                        size = int(row_bytes * share.num_rows)
                        staging.add(names[number], share, size)
        spare_collector()
        partition = context.partitionId() if context is not None else 0
        return StagedRows(partition=partition, query=query, files=staging.files)

    def _by_topic(
        self, rows: pa.RecordBatch, staged: pa.RecordBatch
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Divides staged rows by the topics that the rows name; keeps their order."""
        if not rows.num_rows:
            return
        if self._options.topic is not None:
            yield self._options.topic, staged
            return
        names = rows.column(rows.schema.get_field_index("topic"))
        if names.null_count:
            raise InvalidRequestError(
                "a row has no topic", hint="the option topic sets one for all rows"
            )
        coded = names.dictionary_encode()
        topics = coded.dictionary.to_pylist()
        for name in topics:
            TopicName.parse(name)
        if len(topics) == 1:
            yield topics[0], staged
            return
        # Sorted once, and the sort is stable: hundreds of topics cost no more than two.
        order = pc.sort_indices(coded.indices)
        counts = pc.value_counts(coded.indices.take(order)).field("counts").to_pylist()
        staged = staged.take(order)
        start = 0
        for name, count in zip(topics, counts, strict=True):
            yield name, staged.slice(start, count)
            start += count

    # -- on the driver ----------------------------------------------------------------------

    def _commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        *,
        writer: str,
        batch: int,
        is_repeatable: bool = True,
    ) -> None:
        by_topic: dict[str, list[StagedFile]] = {}
        for message in sorted(_staged(messages), key=lambda message: message.partition):
            for topic, file in message.files:
                by_topic.setdefault(topic, []).append(file)
        if not by_topic:
            return
        staged = {
            topic: StagedBatch(writer=writer, batch=batch, files=tuple(files))
            for topic, files in sorted(by_topic.items())
        }
        keep_buffers()
        options = self._options
        Committer(
            place=self._place,
            creates=options.create_topics,
            ack=options.ack,
            codec=options.codec,
            timeout_seconds=options.commit_timeout_seconds,
            fails_on_other=options.replayed_batch is ReplayedBatch.ERROR,
        ).commit(staged, is_repeatable=is_repeatable)
        spare_collector()

    def _abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if all(message is not None for message in messages):
            # All tasks succeeded, so a commit was tried: it may use these files.
            return
        store = self._place.history().objects
        for message in _staged(messages):
            remove_staged(store, (file.key for _, file in message.files))


class BatchWriter(_Writer, DataSourceArrowWriter):
    """`df.write`: all rows, or an error and none of them (unless the commit itself is cut off)."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite=overwrite)
        self._job = f"{JOB_PREFIX}{secrets.token_hex(12)}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stages a task's rows."""
        return self._stage(iterator, query=None, writer=self._job, batch=0)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Appends what the tasks have staged."""
        self._commit(messages, writer=self._job, batch=0, is_repeatable=False)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Removes what the tasks have staged."""
        self._abort(messages)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """`df.writeStream`: each micro-batch once, however often Spark commits it."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stages a task's rows."""
        context = TaskContext.get()
        query = context.getLocalProperty(_QUERY_ID) if context is not None else None
        batch = context.getLocalProperty(_BATCH_ID) if context is not None else None
        if query is None or batch is None:
            raise InvalidRequestError("Spark did not pass the query and batch of this task")
        writer = self._options.writer or query
        return self._stage(iterator, query=query, writer=writer, batch=int(batch))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Appends what the tasks staged, unless this micro-batch was appended before."""
        staged = _staged(messages)
        query = next((message.query for message in staged if message.query), None)
        if query is not None:
            self._commit(messages, writer=self._options.writer or query, batch=batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Removes what the tasks have staged."""
        self._abort(messages)


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[StagedRows]:
    return [message for message in messages if isinstance(message, StagedRows)]
