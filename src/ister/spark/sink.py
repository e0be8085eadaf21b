"""The sink: rows of a batch or of a micro-batch become messages, each once.

    task: rows ─► staged files in the bucket ─┐
    task: rows ─► staged files in the bucket ─┼─► driver: commit ─► the topic's owner appends them
    task: rows ─► staged files in the bucket ─┘

Owns: the staging in tasks and the order of rows (by partition, then as Spark gave them). Does not
own: how a batch comes to count once: `ister.topic.batches`, whose writer is the streaming query and
whose batch is the micro-batch.

Who appends: the broker, if one is given; else the driver opens the log itself, which takes the
lock of its directory for as long as the commit lasts (and waits for it, up to
`commitTimeoutSeconds`, because another query's commit or a driver that was killed may hold it).

A micro-batch with rows for several topics is committed topic by topic, each once; a reader of two
topics may see one before the other.

What a crash leaves: staged files. A commit that was begun is finished by the next one for the same
micro-batch, from the files of the first; files that nobody needs are swept when they are a day old.
So `abort` removes files only if no commit can have begun with them.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from ister.clock import SystemClock
from ister.config import Config, Engine
from ister.errors import (
    DirectoryLockedError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    check,
)
from ister.format.columnar import encode_frames
from ister.format.manifest import StagedFile
from ister.format.staging import encode_block
from ister.limits import MIB
from ister.model import Codec, TopicName
from ister.objectstore.base import ObjectStore, ObjectWriter
from ister.spark.options import WriteOptions
from ister.spark.patience import patiently
from ister.spark.place import Place, find_place
from ister.spark.rows import check_write_schema, to_staged
from ister.tier.names import staging_prefix
from ister.tier.staging import JOB_PREFIX
from ister.topic.batches import StagedBatch
from ister.topic.log import Log

if TYPE_CHECKING:
    from ister.client.flight import FlightClient

__all__ = ["BatchWriter", "StreamWriter"]

_log = logging.getLogger("ister.spark.sink")

_CHUNK_BYTES: Final = 4 * MIB
_CONCURRENT_PARTS: Final = 2
# Topics written by one task at once; beyond that a topic gets a second file.
_OPEN_FILES_MAX: Final = 16
_LOCK_PAUSE_SECONDS: Final = 0.1
_SWEEP_EVERY: Final = 64
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"


@dataclass
class StagedRows(WriterCommitMessage):
    """What a task has staged. Pickled to the driver."""

    partition: int
    query: str | None
    """The streaming query's id, which outlives its restarts; None for a batch."""
    files: list[tuple[str, StagedFile]] = field(default_factory=list)
    """Topic and file, in the order of the rows."""


class _Staging:
    """One task's files, one per topic."""

    def __init__(self, store: ObjectStore, writer: str, batch: int) -> None:
        self._store = store
        self._writer = writer
        self._batch = batch
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._begun: list[_OpenFile] = []
        self.files: list[tuple[str, StagedFile]] = []

    def add(self, topic: str, rows: pa.RecordBatch) -> None:
        file = self._open.get(topic)
        if file is None:
            while len(self._open) >= _OPEN_FILES_MAX:
                self._close(self._open.popitem(last=False))
            file = self._open[topic] = self._begin(topic)
        self._open.move_to_end(topic)
        header, body = encode_block(rows)
        file.writer.write(header)
        file.writer.write(memoryview(body))
        file.rows += rows.num_rows
        file.size_bytes += len(header) + body.size

    def close(self) -> None:
        while self._open:
            self._close(self._open.popitem(last=False))

    def abort(self) -> None:
        for file in self._begun:
            file.writer.abort()
        for _, staged in self.files:
            _delete(self._store, staged.key)

    def _begin(self, topic: str) -> _OpenFile:
        prefix = staging_prefix(TopicName.parse(topic), self._writer, self._batch)
        key = f"{prefix}{secrets.token_hex(12)}.rows"
        writer = self._store.open_writer(
            key, chunk_bytes=_CHUNK_BYTES, concurrent_parts=_CONCURRENT_PARTS
        )
        file = _OpenFile(key=key, writer=writer)
        self._begun.append(file)
        return file

    def _close(self, item: tuple[str, _OpenFile]) -> None:
        topic, file = item
        file.writer.close()
        staged = StagedFile(key=file.key, rows=file.rows, size_bytes=file.size_bytes)
        self.files.append((topic, staged))


@dataclass
class _OpenFile:
    key: str
    writer: ObjectWriter
    rows: int = 0
    size_bytes: int = 0


class _Writer:
    """What batches and streams have in common. Made on the driver, pickled to tasks."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise InvalidRequestError(
                "a topic is appended to, never overwritten", hint='.mode("append")'
            )
        check_write_schema(schema, needs_topic=options.topic is None)
        self._options = options
        self._place: Place = find_place(options.config, options.broker_location)

    # -- in tasks ---------------------------------------------------------------------------

    def _stage(
        self, batches: Iterator[pa.RecordBatch], *, query: str | None, writer: str, batch: int
    ) -> StagedRows:
        context = TaskContext.get()
        staging = _Staging(self._place.history().objects, writer, batch)
        try:
            for rows in batches:
                for topic, part in self._by_topic(rows):
                    staged = to_staged(part, self._options.producer_name)
                    self._check(topic, staged)
                    staging.add(topic, staged)
            staging.close()
        except BaseException:
            staging.abort()
            raise
        partition = context.partitionId() if context is not None else 0
        return StagedRows(partition=partition, query=query, files=staging.files)

    def _check(self, topic: str, rows: pa.RecordBatch) -> None:
        """Refuses rows that cannot become messages here, where only this task fails.

        In the commit it would be too late: other rows of the batch might be in the topic already.
        """
        encode_frames(
            rows,
            topic=topic,
            # The topic's own may lack fields; whoever appends looks, before the first row is in.
            codec=Codec.BINCODE2,
            first_offset=0,
            now_ms=0,
            payload_bytes_max=self._place.config.storage.max_message_size,
        )

    def _by_topic(self, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if not rows.num_rows:
            return
        if self._options.topic is not None:
            yield self._options.topic, rows
            return
        names = rows.column(rows.schema.get_field_index("topic"))
        if names.null_count:
            raise InvalidRequestError(
                "a row has no topic", hint="the option topic sets one for all rows"
            )
        for name in pc.unique(names).to_pylist():
            TopicName.parse(name)
            yield name, rows.filter(pc.equal(names, name))

    # -- on the driver ----------------------------------------------------------------------

    def _commit(
        self, messages: Sequence[WriterCommitMessage | None], *, writer: str, batch: int
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
        if self._place.broker is not None:
            self._commit_by_broker(staged)
        else:
            self._commit_here(staged)

    def _commit_by_broker(self, staged: dict[str, StagedBatch]) -> None:
        client = self._place.flight()
        check(client is not None, "a place with a broker has a client")
        options = self._options
        seconds = options.commit_timeout_seconds
        if not options.create_topics:
            names = patiently(cast("FlightClient", client).topics, seconds=seconds)
            self._check_topics(staged, names)
        for topic, batch in staged.items():
            append = partial(
                cast("FlightClient", client).append_staged,
                topic,
                batch,
                create=options.create_topics,
                ack=options.ack,
                codec=options.codec,
                timeout_seconds=seconds,
            )
            # A broker that restarts meanwhile finishes what it had begun when it is asked again.
            patiently(append, seconds=seconds)

    def _commit_here(self, staged: dict[str, StagedBatch]) -> None:
        options = self._options
        with self._open_log() as log:
            existing = set(log.topics())
            self._check_topics(staged, existing)
            for topic, batch in staged.items():
                if topic not in existing:
                    log.topic(topic, create=True, ack=options.ack, codec=options.codec)
                log.append_staged(topic, batch)
            for topic, batch in staged.items():
                self._tidy(log, topic, is_swept=batch.batch % _SWEEP_EVERY == 0)

    def _check_topics(self, staged: Iterable[str], existing: Collection[str]) -> None:
        """Refuses topics that are missing and may not be made, before the first one is written."""
        missing = [topic for topic in staged if topic not in existing]
        if missing and not self._options.create_topics:
            raise NotFoundError(
                f"there is no topic {missing[0]}",
                topic=missing[0],
                hint="createTopics=true makes it",
            )

    def _open_log(self) -> Log:
        """The log, once nobody else has it open."""
        deadline = SystemClock.monotonic() + self._options.commit_timeout_seconds
        pause = threading.Event()
        while True:
            try:
                return Log(_without_uploads(self._place.config))
            except DirectoryLockedError as error:
                if SystemClock.monotonic() >= deadline:
                    error.hint = (
                        "another process has the log open: close it there, or let it serve the "
                        "log and give the option broker"
                    )
                    raise
            pause.wait(_LOCK_PAUSE_SECONDS)

    def _tidy(self, log: Log, topic: str, *, is_swept: bool) -> None:
        """What a server would do in the background; the rows are safe already."""
        try:
            tier = log.topic(topic).tier
            engine = self._place.config.storage.uploader.engine
            if tier is None:
                return
            if engine in (Engine.AUTO, Engine.EMBEDDED) and tier.is_due_by_age(
                SystemClock.now_ns() / 1e9
            ):
                tier.upload()
                tier.trim()
            if is_swept:
                tier.collect_orphans()
        except IsterError as error:
            _log.warning("not tidied up", extra={"topic": topic, "error": str(error)})

    def _abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if all(message is not None for message in messages):
            # All tasks came through, so a commit was tried: it may have begun with these files.
            return
        store = self._place.history().objects
        for message in _staged(messages):
            for _, file in message.files:
                _delete(store, file.key)


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
        self._commit(messages, writer=self._job, batch=0)

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
            raise InvalidRequestError("Spark does not say which query and batch this task is of")
        return self._stage(iterator, query=query, writer=query, batch=int(batch))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Appends what the tasks have staged, unless this micro-batch is in already."""
        staged = _staged(messages)
        query = next((message.query for message in staged if message.query), None)
        if query is not None:
            self._commit(messages, writer=query, batch=batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Removes what the tasks have staged."""
        self._abort(messages)


def _without_uploads(config: Config) -> Config:
    """The settings for a log that is open for a moment.

    Its threads would upload what each commit leaves, as an object of its own: `_tidy` knows when.
    """
    uploader = replace(config.storage.uploader, engine=Engine.NONE)
    return replace(config, storage=replace(config.storage, uploader=uploader))


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[StagedRows]:
    return [message for message in messages if isinstance(message, StagedRows)]


def _delete(store: ObjectStore, key: str) -> None:
    try:
        store.delete(key)
    except IsterError as error:
        _log.info("staged file left behind", extra={"path": key, "error": str(error)})
