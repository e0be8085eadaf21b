"""Writes rows to topics: tasks stage them, the driver commits them as batches, each once.

    task: rows of some topics ─► StagedRowFile ─► bucket ─┐
    task: rows of some topics ─► StagedRowFile ─► bucket ─┴─► driver: Committer ─► their owners

Owns: the staged file of a task, the choice of the appender, how many topics are committed at once.
Does not own: how a batch is appended once (`ister.topic.batches`), what rows are.

If there are brokers, in the metadata store or named by options, each topic's broker appends its
rows; if a topic moves meanwhile, its new broker does. Without brokers, and for a topic
whose newest files are on this machine while nobody has it open, the driver opens the log, which
takes the lock of its directory for the duration of the commit (and waits for it, because another
commit, or a killed driver, may hold it).

Several topics are committed at once, and several at each broker, so that a broker that does not
respond delays its own topics only. After the first error no other topic is begun.

What a crash leaves: staged files. A commit that was begun is finished by the next one for the same
batch, from the files of the first; unused files are removed when they are a day old. The files of a
commit are removed when all of its topics have their rows.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Self, TypeVar

import pyarrow as pa

from ister.base.clock import SystemClock
from ister.base.limits import MIB
from ister.base.model import AckLevel, Codec
from ister.base.partitions import parse_partition
from ister.base.retry import retry_unavailable
from ister.bucket.names import shared_staging_prefix
from ister.bucket.shared_staging import StagingMark
from ister.client.flight import FlightClient
from ister.config import Config, Engine
from ister.errors import (
    ConflictError,
    DirectoryLockedError,
    InvalidRequestError,
    IsterError,
    MessageTooLargeError,
    NotFoundError,
    UnavailableError,
)
from ister.format.arrow.encode import check_rows
from ister.format.manifest import StagedFile
from ister.format.staged_file import StagedSegment, encode_footer
from ister.format.staged_rows import DIGEST_MODULUS, digest_rows, encode_block, join_batches
from ister.objectstore.base import ObjectStore, ObjectWriter
from ister.spark.location import LogLocation
from ister.spark.owners import ask, ask_any, group_by_owner, has_brokers
from ister.topic.batches import AppendedBatch, StagedBatch
from ister.topic.bucket_link import TopicBucket
from ister.topic.log import Log
from ister.topic.topic import Topic
from ister.wire.contract import TopicStatus

_log = logging.getLogger("ister.spark.row_staging")

_CHUNK_BYTES: Final = 4 * MIB
_CONCURRENT_PARTS: Final = 2
# What a task holds in memory before it writes a segment for each topic.
_WAITING_BYTES: Final = 32 * MIB
# A block costs a few hundred bytes and a call.
_BLOCK_BYTES_MIN: Final = 1 * MIB
# Topics that are appended to at once, by each broker and by this process. Most of the time of a
# small batch is waiting for disks.
_TOPICS_AT_ONCE: Final = 8
_THREADS_MAX: Final = 64
# A topic is uploaded while it is appended to, from this size on: objects of a good size.
_UPLOAD_BYTES: Final = 32 * MIB
_LOCK_PAUSE_SECONDS: Final = 0.1
_SWEEP_EVERY: Final = 64

_Result = TypeVar("_Result")


def find_partitions(place: LogLocation, topic: str | None) -> dict[str, list[str]]:
    """Returns the partitions of a topic, or of all topics if it is None, by topic, in order.

    Called on the driver.
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


def _list_topics(place: LogLocation) -> list[str]:
    return ask_any(place, lambda client: client.topics())


# -- in tasks -------------------------------------------------------------------------------


class StagedRowFile:
    """One task's file, with segments of many topics; a context manager. Used by one thread.

    Rows wait in memory, up to a bound, so that a segment has many of them. On exit the file is
    complete, or removed if there was an exception. Without rows there is no file.
    """

    def __init__(self, store: ObjectStore, writer: str, batch: int) -> None:
        self._store = store
        self._key = f"{shared_staging_prefix(writer, batch)}{secrets.token_hex(12)}.rows"
        self._writer: ObjectWriter | None = None
        self._position = 0
        self._waiting: dict[str, list[tuple[pa.RecordBatch, int]]] = {}
        self._waiting_bytes = 0
        self._segments: list[StagedSegment] = []
        self._digests: list[int] = []
        self._mark = StagingMark(store, writer, batch)

    @property
    def files(self) -> list[tuple[str, StagedFile]]:
        """Pairs of topic and segment, in the order of a topic's rows; complete after the exit."""
        return [
            (
                segment.topic,
                StagedFile(
                    key=self._key,
                    rows=segment.rows,
                    size_bytes=segment.length,
                    position=segment.position,
                    digest=digest,
                ),
            )
            for segment, digest in zip(self._segments, self._digests, strict=True)
        ]

    def add(self, topic: str, rows: pa.RecordBatch, size_bytes: int | None = None) -> None:
        """Adds rows of the staged schema.

        `size_bytes` is an estimate of their size. Pass it for a slice: to compute it, Arrow takes
        longer than everything else that is done with a few rows.
        """
        if not rows.num_rows:
            return
        size = rows.nbytes if size_bytes is None else size_bytes
        self._waiting.setdefault(topic, []).append((rows, size))
        self._waiting_bytes += size
        if self._waiting_bytes >= _WAITING_BYTES:
            self._flush()

    def __enter__(self) -> Self:
        self._mark.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
                self._close()
        except BaseException:
            self._abort()
            raise
        finally:
            self._mark.end()
        if kind is not None:
            self._abort()

    def _flush(self) -> None:
        """Writes the waiting rows, a segment for each topic."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        for topic, batches in waiting.items():
            start, rows, digest = self._position, 0, 0
            for block in join_batches(batches, bytes_min=_BLOCK_BYTES_MIN):
                header, body = encode_block(block, topic)
                self._write(header)
                self._write(memoryview(body))
                rows += block.num_rows
                digest += digest_rows(block)
            last = self._segments[-1] if self._segments else None
            if last is not None and last.topic == topic:
                self._segments.pop()
                start, rows = last.position, last.rows + rows
                digest += self._digests.pop()
            self._digests.append(digest % DIGEST_MODULUS)
            self._segments.append(StagedSegment(topic, start, self._position - start, rows))

    def _write(self, data: bytes | memoryview) -> None:
        if self._writer is None:
            self._writer = self._store.open_writer(
                self._key, chunk_bytes=_CHUNK_BYTES, concurrent_parts=_CONCURRENT_PARTS
            )
        self._writer.write(data)
        self._position += len(data)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.write(encode_footer(self._segments, self._position))
            self._writer.close()

    def _abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()
            # It may have been completed before the error.
            remove_staged(self._store, [self._key])


def check_staged(topic: str, rows: pa.RecordBatch, *, payload_bytes_max: int) -> None:
    """Checks in a task that rows can become messages.

    In the commit it would be too late: other rows of the batch might be in the topic already.
    """
    # The topic's own codec may lack fields; that is checked before the first append.
    check_rows(rows, topic=topic, codec=Codec.BINCODE2, payload_bytes_max=payload_bytes_max)


def check_parts(
    parts: Sequence[tuple[str, pa.RecordBatch]], rows: pa.RecordBatch, *, payload_bytes_max: int
) -> None:
    """Checks the rows of several topics, like `check_staged`, but in one pass if all are valid.

    Args:
        parts: Topics and their rows.
        rows: All of these rows, in any order.
        payload_bytes_max: The size limit of a payload.
    """
    if not parts:
        return
    try:
        # The longest name leaves the least room for everything else.
        longest = max((topic for topic, _ in parts), key=lambda topic: len(topic.encode()))
        check_staged(longest, rows, payload_bytes_max=payload_bytes_max)
    except (InvalidRequestError, MessageTooLargeError):
        for topic, part in parts:
            check_staged(topic, part, payload_bytes_max=payload_bytes_max)


def remove_staged(store: ObjectStore, keys: Iterable[str]) -> None:
    """Removes files that no commit needs; leftovers are removed later."""
    for key in dict.fromkeys(keys):
        try:
            store.delete(key)
        except IsterError as error:
            _log.info("staged file not removed", extra={"path": key, "error": str(error)})


# -- on the driver --------------------------------------------------------------------------


# How many calls fit in the time of a commit, even if none is answered.
_CALLS_MIN: Final = 3
# A broker that has just started has no compiled loops, and may take minutes for a large batch.
_GROWING_TIMES_MAX: Final = 10
_LOOK_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Committer:
    """Appends staged batches, topic by topic, each once."""

    place: LogLocation
    creates: bool
    """Whether missing topics are created, with `ack` and `codec`."""
    ack: AckLevel | None = None
    codec: Codec | None = None
    timeout_seconds: float
    """How long to wait for the log's lock, or for a topic's broker: calls are repeated, each with
    a third of that time, so that one that is lost with its broker does not use it up. It begins
    anew, up to ten times, if the topic has grown meanwhile: its broker is slow, not away."""
    fails_on_other: bool = False
    """Whether a batch fails that is in its topic with other rows; else a warning says so."""

    def commit(
        self, staged: Mapping[str, StagedBatch], *, is_repeatable: bool = True
    ) -> dict[str, AppendedBatch]:
        """Appends batches that are not in their topics yet; all rows are durable on return.

        A reader of two topics may see one before the other. Nothing is remembered of batches that
        are not repeatable, once all of them are in.

        Raises:
            NotFoundError: A topic is missing and must not be created; nothing was appended.
            ConflictError: A batch is in with other rows, if `fails_on_other`.
            DirectoryLockedError: Another process that is not a broker has the log open.
            UnavailableError: A topic's broker or a store does not respond; try again.
            As `Log.append_staged`.
        """
        if not staged:
            return {}
        first = next(iter(staged.values()))
        mark = StagingMark(self.place.history().objects, first.writer, first.batch)
        mark.start()
        try:
            appended = self._commit(staged, is_repeatable=is_repeatable)
        finally:
            mark.end()
        self._remove_files(staged)
        self._check_same(staged, appended)
        return appended

    def _commit(
        self, staged: Mapping[str, StagedBatch], *, is_repeatable: bool
    ) -> dict[str, AppendedBatch]:
        here = retry_unavailable(lambda: self._topics_here(staged), seconds=self.timeout_seconds)
        by_brokers = {topic: batch for topic, batch in staged.items() if topic not in here}
        appended = self._commit_by_brokers(by_brokers) if by_brokers else {}
        if here:
            # This process appends, and gets every answer; a broker's may be lost.
            appended |= self._commit_here(
                {topic: replace(staged[topic], is_repeatable=is_repeatable) for topic in here}
            )
        receipts = {
            topic: replace(batch, files=(), is_repeatable=False)
            for topic, batch in by_brokers.items()
            if batch.files and not is_repeatable
        }
        if receipts:
            try:
                self._commit_by_brokers(receipts)
            except IsterError as error:
                _log.info("finished batches not forgotten yet", extra={"error": str(error)})
        return appended

    def _check_same(
        self, staged: Mapping[str, StagedBatch], appended: Mapping[str, AppendedBatch]
    ) -> None:
        for topic, batch in staged.items():
            if not appended[topic].is_other:
                continue
            said = (
                f"batch {batch.batch} of the writer {batch.writer!r} is in the topic, and came "
                f"again with other payloads or keys: {batch.rows} rows were not appended"
            )
            if self.fails_on_other:
                raise ConflictError(
                    said,
                    topic=topic,
                    offset=appended[topic].start,
                    hint="see 'Checkpoints: copy, restore, reset' in docs/SPARK.md; "
                    "replayedBatch=warn goes on",
                )
            _log.warning("%s", said, extra={"topic": topic})

    def _remove_files(self, staged: Mapping[str, StagedBatch]) -> None:
        remove_staged(
            self.place.history().objects,
            (file.key for batch in staged.values() for file in batch.files),
        )

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
        groups = retry_unavailable(lambda: group_by_owner(self.place, staged), seconds=seconds)

        def append(topic: str, check: Callable[[], None]) -> AppendedBatch:
            begin: int | None = None

            def attempt() -> AppendedBatch:
                nonlocal begin
                check()
                try:
                    # A broker that has the topic now finishes a batch that another one has begun.
                    return self._append(topic, staged[topic])
                except UnavailableError:
                    begin = self._find_end(topic) if begin is None else begin
                    raise

            for _ in range(_GROWING_TIMES_MAX - 1):
                try:
                    return retry_unavailable(attempt, seconds=seconds)
                except UnavailableError:
                    end = self._find_end(topic)
                    if begin is None or end is None or end <= begin:
                        raise
                    begin = end
            return retry_unavailable(attempt, seconds=seconds)

        return _commit_at_once(groups, append)

    def _append(self, topic: str, batch: StagedBatch) -> AppendedBatch:
        return ask(
            self.place,
            topic,
            lambda client: client.append_staged(
                topic,
                batch,
                create=self.creates and bool(batch.files),
                ack=self.ack,
                codec=self.codec,
                timeout_seconds=self.timeout_seconds / _CALLS_MIN,
            ),
        )

    def _find_end(self, topic: str) -> int | None:
        """The offset after the topic's newest message; None if no broker says so."""

        def read(client: FlightClient) -> TopicStatus:
            return client.watermarks([topic], timeout_seconds=_LOOK_SECONDS)[topic]

        try:
            return ask(self.place, topic, read).next
        except IsterError:
            return None

    def _commit_here(self, staged: Mapping[str, StagedBatch]) -> dict[str, AppendedBatch]:
        threads = self.place.config.storage.uploader.threads
        # The pool ends first: an upload that runs when the log is closed would fail.
        with self._open_log() as log, ThreadPoolExecutor(threads, "ister-upload") as pool:
            existing = set(log.topics())
            self._check_topics(staged, existing)

            def append(topic: str, _: Callable[[], None]) -> AppendedBatch:
                is_new = topic not in existing
                opened = (
                    log.topic(topic, create=True, ack=self.ack, codec=self.codec)
                    if is_new
                    else log.topic(topic)
                )
                uploads = None
                if opened.bucket is not None and self._uploads:
                    uploads = _EarlyUpload(opened.bucket, pool)
                rows = log.append_staged(topic, staged[topic], uploads)
                if uploads is not None:
                    uploads.wait_for_end()
                # A new topic has no leftovers.
                is_swept = not is_new and staged[topic].batch % _SWEEP_EVERY == 0
                self._tidy(opened, is_swept=is_swept)
                # Now, and not with the log: topics are closed in parallel, and few are open.
                opened.close()
                return rows

            appended = _commit_at_once([staged], append)
            is_sweep = any(batch.batch % _SWEEP_EVERY == 0 for batch in staged.values())
            if is_sweep and log.stores is not None:
                log.stores.collect_shared_staging()
        return appended

    def _check_topics(self, staged: Mapping[str, StagedBatch], existing: Collection[str]) -> None:
        """Checks for missing topics before the first one is written."""
        missing = [topic for topic in staged if topic not in existing]
        if missing and not self.creates:
            # No topic was begun with these files, so that no later commit needs them.
            self._remove_files(staged)
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

    def _tidy(self, topic: Topic, *, is_swept: bool) -> None:
        """Uploads and removes leftovers, as a server would in the background."""
        bucket = topic.bucket
        if bucket is None:
            return
        try:
            if self._uploads and bucket.uploads.is_due_by_age(SystemClock.now_ns() / 1e9):
                bucket.uploads.upload()
                bucket.retention.trim()
            if is_swept:
                bucket.retention.collect_orphans()
        except IsterError as error:
            _log.warning(
                "maintenance after the commit failed",
                extra={"topic": topic.name, "error": str(error)},
            )

    @property
    def _uploads(self) -> bool:
        """Whether a commit in this process uploads."""
        return self.place.config.storage.uploader.engine in (Engine.AUTO, Engine.EMBEDDED)


class _EarlyUpload:
    """Uploads a topic while its rows are appended. A `Gate` that admits all of them.

    The commit of many rows takes less time if both happen at once, and producers are never held
    because too much waits for its upload. Used by the thread that appends.
    """

    is_needed = False

    def __init__(self, bucket: TopicBucket, pool: ThreadPoolExecutor) -> None:
        self._tier = bucket
        self._pool = pool
        self._running: Future[None] | None = None
        self._has_failed = False

    def check(self, rows: pa.RecordBatch) -> None:
        """Admits all rows."""

    def wait(self, count: int) -> None:
        """Starts an upload if there is enough to upload; does not wait for it."""
        if self._has_failed or not self._is_due():
            return
        if self._running is None or self._running.done():
            self._running = self._pool.submit(self._upload)

    def wait_for_end(self) -> None:
        """Waits for the upload that runs, if one does."""
        if self._running is not None:
            self._running.result()

    def _is_due(self) -> bool:
        return self._tier.uploads.lag_bytes >= _UPLOAD_BYTES

    def _upload(self) -> None:
        try:
            while self._is_due():
                self._tier.uploads.upload(is_paced=False)
        except IsterError as error:
            # The rows are in the log; `Committer._tidy` tries once more.
            self._has_failed = True
            _log.info("early upload failed", extra={"error": str(error)})


def _commit_at_once(
    groups: Iterable[Collection[str]], work: Callable[[str, Callable[[], None]], _Result]
) -> dict[str, _Result]:
    """Calls `work` for all topics, for up to `_TOPICS_AT_ONCE` of each group at once.

    `work` gets a topic, and a function that raises if another topic has failed: to be called
    before each attempt of work that is retried.

    Raises:
        Exception: The first that was raised. Topics that were begun by then are finished.
    """
    done: dict[str, _Result] = {}
    errors: list[BaseException] = []

    def check() -> None:
        if errors:
            raise errors[0]

    def take(waiting: deque[str]) -> None:
        while waiting and not errors:
            with suppress(IndexError):  # another thread took the last one
                topic = waiting.popleft()
                try:
                    done[topic] = work(topic, check)
                except BaseException as error:  # noqa: BLE001 - raised by the calling thread
                    if isinstance(error, IsterError) and error.topic is None:
                        error.topic = topic
                    errors.append(error)

    queues = [deque(group) for group in groups]
    lanes = [queue for queue in queues for _ in range(min(len(queue), _TOPICS_AT_ONCE))]
    if len(lanes) == 1:
        take(lanes[0])
    else:
        with ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="ister-commit") as pool:
            try:
                list(pool.map(take, lanes))
            except BaseException as error:
                errors.append(error)  # ends the threads
                raise
    check()
    return done


def _without_uploads(config: Config) -> Config:
    """Returns the settings of a log that is open briefly.

    Its threads would upload each commit as an object of its own; `_tidy` uploads when it is due.
    """
    uploader = replace(config.storage.uploader, engine=Engine.NONE)
    return replace(config, storage=replace(config.storage, uploader=uploader))
