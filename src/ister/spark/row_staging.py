"""Writes rows to topics: tasks stage them, the driver commits them as batches, each once.

    task: rows ─► StagedRowFiles ─► bucket ─┐
    task: rows ─► StagedRowFiles ─► bucket ─┴─► driver: Committer ─► the topic's owner appends them

Owns: staged files of a task, and the choice of the appender. Does not own: how a batch is
appended once (`ister.topic.batches`), what rows are.

Each topic's broker appends, if there are brokers: the metadata store has them, or options name
them. A topic that moves meanwhile is appended to where it is then. Without brokers, and for a topic
whose newest files are on this machine while nobody has it open, the driver opens the log, which
takes the lock of its directory for the duration of the commit (and waits for it, because another
commit, or a killed driver, may hold it).

What a crash leaves: staged files. A commit that was begun is finished by the next one for the same
batch, from the files of the first; unused files are removed when they are a day old.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Self

import pyarrow as pa

from ister.bucket.names import staging_prefix
from ister.clock import SystemClock
from ister.config import Config, Engine
from ister.errors import DirectoryLockedError, IsterError, NotFoundError
from ister.format.arrow.encode import encode_frames
from ister.format.manifest import StagedFile
from ister.format.staged_rows import encode_block
from ister.limits import MIB
from ister.model import AckLevel, Codec, TopicName
from ister.objectstore.base import ObjectStore, ObjectWriter
from ister.partitions import parse_partition
from ister.retry import retry_unavailable
from ister.spark.location import Place
from ister.spark.owners import ask, ask_any, has_brokers
from ister.topic.batches import AppendedBatch, StagedBatch
from ister.topic.log import Log

_log = logging.getLogger("ister.spark.row_staging")

_CHUNK_BYTES: Final = 4 * MIB
_CONCURRENT_PARTS: Final = 2
# Topics written by one task at once; beyond that a topic gets a second file.
_OPEN_FILES_MAX: Final = 16
_LOCK_PAUSE_SECONDS: Final = 0.1
_SWEEP_EVERY: Final = 64


def find_partitions(place: Place, topic: str | None) -> dict[str, list[str]]:
    """Returns the partitions of a topic, or of all topics if it is None, by topic, in order.

    Called on the driver.

    Raises:
        UnavailableError: No broker responds, or the metadata store does not.
    """
    history = place.history()
    try:
        existing = history.topics() if topic is None else history.partitions(topic)
    except NotFoundError:
        # The log does not exist yet, or its metadata is a file on the broker's machine.
        existing = retry_unavailable(lambda: _list_topics(place)) if place.brokers else []
    found: dict[str, list[tuple[int, str]]] = {}
    for name in existing:
        partition = parse_partition(name)
        if partition is not None and topic in (None, partition[0]):
            found.setdefault(partition[0], []).append((partition[1], name))
    # A topic beside its partitions, created by an earlier version, is not partitioned.
    return {
        base: [name for _, name in sorted(parts)]
        for base, parts in found.items()
        if base not in existing
    }


def _list_topics(place: Place) -> list[str]:
    return ask_any(place, lambda client: client.topics())


# -- in tasks -------------------------------------------------------------------------------


class StagedRowFiles:
    """One task's files, one per topic; a context manager. Used by one thread.

    On exit the files are complete; if an exception ends it, none of them is left.
    """

    def __init__(self, store: ObjectStore, writer: str, batch: int) -> None:
        self._store = store
        self._writer = writer
        self._batch = batch
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._begun: list[_OpenFile] = []
        self.files: list[tuple[str, StagedFile]] = []
        """Topic and file of complete files, in the order of the rows."""

    def add(self, topic: str, rows: pa.RecordBatch) -> None:
        """Adds rows of the staged schema to a topic's file."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self._open and kind is None:
                self._close(self._open.popitem(last=False))
        except BaseException:
            self._abort()
            raise
        if kind is not None:
            self._abort()

    def _abort(self) -> None:
        for file in self._begun:
            file.writer.abort()
        remove_staged(self._store, (staged for _, staged in self.files))

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


def check_rows(topic: str, rows: pa.RecordBatch, *, payload_bytes_max: int) -> None:
    """Checks in a task that rows can become messages.

    In the commit it would be too late: other rows of the batch might be in the topic already.

    Raises:
        InvalidRequestError: A value is invalid for a message.
        MessageTooLargeError: A row is too large.
    """
    encode_frames(
        rows,
        topic=topic,
        # The topic's own codec may lack fields; that is checked before the first append.
        codec=Codec.BINCODE2,
        first_offset=0,
        now_ms=0,
        payload_bytes_max=payload_bytes_max,
    )


def remove_staged(store: ObjectStore, files: Iterable[StagedFile]) -> None:
    """Removes files that no commit has used; leftovers are removed later."""
    for file in files:
        try:
            store.delete(file.key)
        except IsterError as error:
            _log.info("staged file not removed", extra={"path": file.key, "error": str(error)})


# -- on the driver --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Committer:
    """Appends staged batches, topic by topic, each once."""

    place: Place
    creates: bool
    """Whether missing topics are created, with `ack` and `codec`."""
    ack: AckLevel | None = None
    codec: Codec | None = None
    timeout_seconds: float
    """How long to wait for the log's lock, or for a topic's broker."""

    def commit(self, staged: Mapping[str, StagedBatch]) -> dict[str, AppendedBatch]:
        """Appends batches that are not in their topics yet; all rows are durable on return.

        A reader of two topics may see one before the other.

        Raises:
            NotFoundError: A topic is missing and must not be created; nothing was appended.
            DirectoryLockedError: Another process that is not a broker has the log open.
            UnavailableError: A topic's broker or a store does not respond; try again.
            As `Log.append_staged`.
        """
        here = retry_unavailable(lambda: self._topics_here(staged), seconds=self.timeout_seconds)
        by_brokers = {topic: batch for topic, batch in staged.items() if topic not in here}
        appended = self._commit_by_brokers(by_brokers) if by_brokers else {}
        if here:
            appended |= self._commit_here({topic: staged[topic] for topic in here})
        return appended

    def _topics_here(self, staged: Iterable[str]) -> list[str]:
        """Returns the topics that no broker appends to."""
        if not has_brokers(self.place):
            return list(staged)
        if self.place.brokers:
            return []
        return [topic for topic in staged if self._has_files(topic)]

    def _has_files(self, topic: str) -> bool:
        """Whether the newest files of a topic that nobody has open are on this machine."""
        try:
            found = self.place.history().topic(topic)
            record = found.record()
        except NotFoundError:
            return False
        return (
            found.catalog.owner() is None
            and found.catalog.sealed() is None
            and self.place.local_tail(topic, record.node, record.incarnation) is not None
        )

    def _commit_by_brokers(self, staged: Mapping[str, StagedBatch]) -> dict[str, AppendedBatch]:
        seconds = self.timeout_seconds
        if not self.creates:
            listed = retry_unavailable(lambda: _list_topics(self.place), seconds=seconds)
            self._check_topics(staged, listed)
        # A broker that has the topic now finishes a batch that was begun at another one.
        return {
            topic: retry_unavailable(partial(self._append, topic, batch), seconds=seconds)
            for topic, batch in staged.items()
        }

    def _append(self, topic: str, batch: StagedBatch) -> AppendedBatch:
        return ask(
            self.place,
            topic,
            lambda client: client.append_staged(
                topic,
                batch,
                create=self.creates,
                ack=self.ack,
                codec=self.codec,
                timeout_seconds=self.timeout_seconds,
            ),
        )

    def _commit_here(self, staged: Mapping[str, StagedBatch]) -> dict[str, AppendedBatch]:
        appended: dict[str, AppendedBatch] = {}
        with self._open_log() as log:
            existing = set(log.topics())
            self._check_topics(staged, existing)
            for topic, batch in staged.items():
                if topic not in existing:
                    log.topic(topic, create=True, ack=self.ack, codec=self.codec)
                appended[topic] = log.append_staged(topic, batch)
            for topic, batch in staged.items():
                self._tidy(log, topic, is_swept=batch.batch % _SWEEP_EVERY == 0)
        return appended

    def _check_topics(self, staged: Iterable[str], existing: Collection[str]) -> None:
        """Checks for missing topics before the first one is written."""
        missing = [topic for topic in staged if topic not in existing]
        if missing and not self.creates:
            raise NotFoundError(
                f"topic {missing[0]} does not exist",
                topic=missing[0],
                hint="createTopics=true creates it",
            )

    def _open_log(self) -> Log:
        """Opens the log; waits until no other process has it open."""
        deadline = SystemClock.monotonic() + self.timeout_seconds
        pause = threading.Event()
        while True:
            try:
                return Log(_without_uploads(self.place.config))
            except DirectoryLockedError as error:
                if SystemClock.monotonic() >= deadline:
                    error.hint = (
                        "another process has the log open: close it there, or let `ister serve` "
                        "serve the log"
                    )
                    raise
            pause.wait(_LOCK_PAUSE_SECONDS)

    def _tidy(self, log: Log, topic: str, *, is_swept: bool) -> None:
        """Uploads and removes leftovers, as a server would in the background."""
        try:
            tier = log.topic(topic).tier
            engine = self.place.config.storage.uploader.engine
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
            _log.warning(
                "maintenance after the commit failed", extra={"topic": topic, "error": str(error)}
            )


def _without_uploads(config: Config) -> Config:
    """Returns the settings of a log that is open briefly.

    Its threads would upload each commit as an object of its own; `_tidy` uploads when it is due.
    """
    uploader = replace(config.storage.uploader, engine=Engine.NONE)
    return replace(config, storage=replace(config.storage, uploader=uploader))
