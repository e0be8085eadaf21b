"""A topic: what programs append to and read from.

Owns: start positions, durability waits, readers. Does not own: how messages are accepted
(`append`), durable files (`ister.wal`), recent messages (`cache`), reading (`reader`), the bucket
(`bucket_link`), searching by time (`time_search`). Readers see a message once it has reached the
topic's ack level.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar, Unpack

from ister.base import forks
from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import AckLevel, Codec, Start, TopicState, Watermarks
from ister.base.positions import to_milliseconds
from ister.errors import (
    CapacityError,
    ClosedError,
    DiskError,
    FencedError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    WaitTimeoutError,
)
from ister.topic.aio import AsyncTopic
from ister.topic.append import Appender, MessageFields, load_batches, load_columns
from ister.topic.arguments import as_offset, as_timeout, check_ack, parse_ack
from ister.topic.bucket_link import TopicBucket
from ister.topic.cache import Cache
from ister.topic.message import Message
from ister.topic.reader import Reader, check_start
from ister.topic.retention import ActiveFloor, no_floor
from ister.topic.table import TopicTable, render_topics
from ister.topic.time_search import TimeSearch, searchable_end
from ister.topic.uploads import UploadResult
from ister.wal.directory import format_log_name
from ister.wal.log import Wal
from ister.wal.recovery import Damage

if TYPE_CHECKING:
    import pyarrow as pa

    from ister.objectstore.base import ObjectStore

_log = logging.getLogger("ister.topic.topic")

_T = TypeVar("_T")


class LocalFile(NamedTuple):
    """One of a topic's local files: the offsets `first_offset` up to, not including, `end`."""

    name: str
    first_offset: int
    next_offset: int
    bytes: int
    is_active: bool
    """Whether appends go to it."""


class CacheRange(NamedTuple):
    """What the cache of recent messages holds: the offsets `start` up to, not including, `end`."""

    start: int
    end: int
    messages: int
    bytes: int


class Topic:
    """A durable, ordered sequence of messages. Thread-safe. Made by `Log.topic`."""

    def __init__(
        self,
        *,
        wal: Wal,
        cache: Cache,
        max_message_size: int,
        stream_chunk_size: int,
        clock: Clock,
        metrics: Metrics,
        bucket: TopicBucket | None = None,
    ) -> None:
        self.name = wal.settings.topic
        self.wal = wal
        self.cache = cache
        self.appender = Appender(
            wal=wal, cache=cache, max_message_size=max_message_size, clock=clock, metrics=metrics
        )
        """Accepts messages; also whole records, for brokers and the sink."""
        # Called a million times a second: these shadow the methods below, to save a call. A test
        # that replaces one has to do so on the instance.
        self.append = self.appender.append  # type: ignore[method-assign]
        self.append_many = self.appender.append_many  # type: ignore[method-assign]
        self.bucket = bucket
        """The bucket's side of the topic; None in a log without one."""
        self._chunk_bytes = stream_chunk_size
        self._clock = clock
        self._metrics = metrics
        self._lock = wal.lock
        self._opened_at = wal.next
        self._readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        # Reentrant: a finalizer may read while this thread opens a reader.
        self._readers_lock = threading.RLock()
        self.active_floor: ActiveFloor = no_floor
        """Returns the first offset that retention keeps for subscriptions; set by the broker."""
        self.opened_at = clock.boottime()
        """In `Clock.boottime` seconds."""
        # Held while a staged batch is appended: one at a time.
        self._batching = threading.Lock()
        forks.register(self)

    def _after_fork(self, error: ClosedError) -> None:
        """Makes a forked child's copy unusable; see `ister.base.forks`."""
        forks.reset_locks(self._readers_lock, self._batching)
        self.wal.after_fork(error)
        for reader in list(self._readers):
            reader._after_fork()  # noqa: SLF001 - of this package

    # -- what it is -------------------------------------------------------------------------

    @property
    def ack(self) -> AckLevel:
        """What an acknowledged message survives, and when readers see it."""
        return self.wal.settings.ack

    @property
    def codec(self) -> Codec:
        """How message bodies are encoded."""
        return self.wal.settings.codec

    @property
    def is_diskless(self) -> bool:
        """Whether the local files are in memory, so that only what is tiered is durable."""
        return self.bucket is not None and self.bucket.is_diskless

    @property
    def state(self) -> TopicState:
        """Whether the topic accepts appends, and if not, why."""
        return self.wal.state

    @property
    def damage(self) -> tuple[Damage, ...]:
        """What was found damaged when the topic was opened; empty for a healthy one."""
        return self.wal.damage

    @property
    def watermarks(self) -> Watermarks:
        """All watermarks at one moment."""
        wal = self.wal
        with self._lock:
            trimmed = wal.trimmed
            # Without a bucket nothing is trimmed. With one only what is tiered is; where a hole
            # is between the two tiers (the topic is quarantined then), the lower one counts.
            tiered = trimmed if wal.tiered is None else wal.tiered
            return Watermarks(
                trimmed=min(trimmed, tiered),
                tiered=tiered,
                synced=wal.synced,
                written=wal.written,
                next=wal.next,
            )

    @property
    def next_offset(self) -> int:
        """The offset that the next message gets."""
        return self.wal.next

    @property
    def visible(self) -> int:
        """The first offset that readers do not see yet."""
        return self.wal.visible

    @property
    def synced(self) -> int:
        """The first offset that is not durable in local files yet."""
        return self.wal.synced

    @property
    def tiered(self) -> int:
        """The first offset that is not in the bucket yet; 0 without a bucket."""
        return self.wal.tiered or 0

    @property
    def local_start(self) -> int:
        """The first offset in local files."""
        return self.wal.trimmed

    @property
    def appended(self) -> int:
        """Messages appended since the topic was opened here."""
        return self.wal.next - self._opened_at

    @property
    def appended_bytes(self) -> int:
        """The size of the messages appended since the topic was opened here."""
        return self.wal.buffer.appended_bytes

    @property
    def failure(self) -> IsterError | None:
        """Why the topic's writer stopped; None if it did not."""
        return self.wal.failure

    @property
    def cached(self) -> CacheRange:
        """What the cache of recent messages holds now."""
        with self._lock:
            self.wal.fill_cache(self.wal.next)
            cache = self.cache
            return CacheRange(cache.start, cache.end, len(cache), cache.size_bytes)

    def local_files(self) -> list[LocalFile]:
        """The topic's local files, ascending; their sizes are read from the disk."""
        directory, files, end = self.wal.directory, self.wal.files, self.wal.written
        found: list[LocalFile] = []
        if directory is None or not files:
            return found
        for file, following in zip(files, [*files[1:], None], strict=True):
            try:
                size = directory.log_size(file.seq)
            except NotFoundError:
                continue  # trimmed meanwhile, or not written yet
            upto = max(end, file.first_offset) if following is None else following.first_offset
            name = format_log_name(file.seq)
            found.append(LocalFile(name, file.first_offset, upto, size, following is None))
        return found

    @property
    def earliest(self) -> int:
        """The first offset that can be read, in whichever tier."""
        if self.bucket is not None:
            return self.bucket.earliest
        if self.wal.directory is not None:
            return self.wal.trimmed
        with self._lock:
            self.wal.fill_cache(self.wal.next)
            return self.cache.start

    @property
    def readers(self) -> list[Reader]:
        """The readers that are open."""
        with self._readers_lock:
            return [reader for reader in self._readers if not reader.is_closed]

    @property
    def has_stopped(self) -> bool:
        """Whether the topic has to be opened again: it failed, was closed, or has a new owner."""
        return self.state in (TopicState.FAILED, TopicState.CLOSED) or (
            self.bucket is not None and self.bucket.owned.is_fenced
        )

    def _append_alone(self, append: Callable[[], _T]) -> _T:
        """Calls `append`, which appends a staged batch, while no other one is appended."""
        with self._batching:
            return append()

    def _settle_batches(self, objects: ObjectStore) -> None:
        """Writes down where the rows of open batches are; does nothing while one is appended.

        Raises:
            As `ister.topic.batches.settle`.
        """
        if self.bucket is None or not self._batching.acquire(blocking=False):
            return
        try:
            load_batches().settle(self, self.bucket.owned, objects, clock=self._clock)
        finally:
            self._batching.release()

    def _subscription_floor(self, *, include_inactive: bool) -> int:
        """The first offset that retention keeps for subscriptions; asks `active_floor`."""
        return self.active_floor(include_inactive=include_inactive)

    # -- appending --------------------------------------------------------------------------

    def append(
        self, payload: bytes | bytearray | memoryview, **fields: Unpack[MessageFields]
    ) -> int:
        """Accepts a message and returns its offset, in microseconds.

        The message is in memory then; `wait` until it is durable.

        Args:
            payload: The message itself.
            fields: Optional message fields. `attributes` are strings by name. `routing_key`:
                key-shared subscriptions deliver all messages of a key to one consumer.
                `producer_name`. `publish_time` is a point in time, or milliseconds since the Unix
                epoch; now by default. `schema_id` and `schema_version` name its schema.

        Raises:
            InvalidRequestError: A field has the wrong type.
            MessageTooLargeError: The message is over a limit.
            CapacityError: The buffer or the disk is full.
            ClosedError: The topic is closed, or its writer stopped.
            CorruptDataError: The topic is quarantined.
        """
        return self.appender.append(payload, **fields)

    def append_many(
        self, payloads: Iterable[bytes | bytearray | memoryview], **fields: Unpack[MessageFields]
    ) -> range:
        """Accepts messages that follow each other without another one in between.

        All of them are checked before the first one is accepted. The fields are `append`'s and
        apply to each message.

        Returns:
            The offsets.

        Raises:
            As `append`, and then nothing was accepted.
        """
        return self.appender.append_many(payloads, **fields)

    def append_arrow(
        self,
        batch: pa.RecordBatch,
        *,
        producer_id: int = 0,
        first_request_id: int = 0,
        producer_name: str | None = None,
    ) -> range:
        """Accepts the rows of a record batch, one message each, without another one in between.

        Columns are those of `read_arrow`: `payload` is required, `topic` and `offset` are ignored,
        and a missing or null value gets `append`'s default. All rows are checked before the first
        one is accepted. Meant for many rows: they are encoded at once, and no object is made per
        row.

        Args:
            batch: The rows.
            producer_id: The `producer_id` of each message.
            first_request_id: The `request_id` of the first row; each row after it has one more.
            producer_name: Replaces the rows' own producer names; None keeps them.

        Returns:
            The offsets.

        Raises:
            InvalidRequestError: A column or a value has the wrong type.
            As `append`, and then nothing was accepted.
        """
        return self.appender.append_arrow(
            batch,
            producer_id=producer_id,
            first_request_id=first_request_id,
            producer_name=producer_name,
        )

    def publish(
        self,
        payload: bytes | bytearray | memoryview,
        *,
        level: AckLevel | str | None = None,
        timeout: float | None = None,
        **fields: Unpack[MessageFields],
    ) -> int:
        """Appends a message, waits until it has reached a level, and returns its offset.

        For many messages, `append` all of them and `wait` for the last one: they are synced
        together.

        Args:
            payload: The message itself.
            level: See `wait`.
            timeout: See `wait`.
            fields: As `append` takes them.

        Raises:
            As `append` and `wait`. After a `WaitTimeoutError` the message stays in the topic.
        """
        self.resolve_level(level)
        timeout = as_timeout(timeout)
        offset = self.append(payload, **fields)
        self.wait(offset, level, timeout)
        return offset

    # -- durability -------------------------------------------------------------------------

    def wait(
        self, offset: int, level: AckLevel | str | None = None, timeout: float | None = None
    ) -> None:
        """Returns once the message has reached a level, and every message before it too.

        Args:
            offset: As `append` returned it.
            level: `memory`, `written`, `synced` or `tiered`; the topic's own by default.
            timeout: In seconds; None waits without an end.

        Raises:
            OffsetOutOfRangeError: No message has this offset yet.
            InvalidRequestError: The level does not exist, or this log cannot reach it.
            WaitTimeoutError: The time ran out; the message stays accepted.
            CapacityError: The disk is full; the message is kept in memory and written later.
            DiskError: The write or the sync failed; whether the message is stored is unknown.
            FencedError: Another owner has the topic by now; whether it is stored is unknown.
            UnavailableError: It is not sure that this process still owns the topic.
            ClosedError: The topic was closed before.
        """
        self.wal.gate.check_process()
        timeout = as_timeout(timeout)
        level = self.resolve_level(level)
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise InvalidRequestError(f"offset must be a whole number, not {offset!r:.80}")
        if not 0 <= offset < self.wal.next:
            raise OffsetOutOfRangeError(
                "no message has this offset yet",
                topic=self.name,
                offset=offset,
                earliest=self.earliest,
                next=self.wal.next,
            )
        if level is AckLevel.MEMORY:
            return
        if level is AckLevel.TIERED and self.bucket is not None:
            self.bucket.uploads.check_upload()
        try:
            self.wal.wait(offset, level, timeout)
        except WaitTimeoutError as error:
            if (
                level is AckLevel.TIERED
                and self.bucket is not None
                and self.bucket.uploads.upload_error
            ):
                error.hint = f"the last upload failed: {self.bucket.uploads.upload_error.message}"
            raise
        if self.bucket is not None:
            self.bucket.check_owner()

    def resolve_level(self, level: AckLevel | str | None) -> AckLevel:
        """The level meant, if this log can reach it.

        Raises:
            InvalidRequestError: It cannot, or there is no such level.
        """
        level = check_ack(
            self.ack if level is None else parse_ack(level),
            has_bucket=self.bucket is not None,
            has_files=not self.wal.is_volatile,
            is_diskless=self.is_diskless,
        )
        if level is AckLevel.TIERED and self.bucket is not None and self.bucket.owned.is_fenced:
            self.bucket.check_owner()
        return level

    def flush(self, timeout: float | None = None) -> int:
        """Makes everything appended so far durable: synced, or tiered in a log without files.

        Returns:
            The `synced` watermark.

        Raises:
            As `wait`; in a log without files, and without a timeout, as `upload`.
        """
        self.wal.gate.check_process()
        timeout = as_timeout(timeout)
        self._sync_all(timeout)
        last = self.wal.next - 1
        if self.is_diskless and last >= self.tiered:
            if timeout is None:
                self.upload()
            else:
                self.wal.wait(last, AckLevel.TIERED, timeout)
        if self.bucket is not None:
            self.bucket.check_owner()
        return self.wal.synced

    def rotate(self) -> bool:
        """Rotates the active file: the next append goes to a new one.

        Everything appended so far is synced first. Retention only removes rotated files, so this
        makes messages removable before the file reaches its size or age limit. Other threads may
        append meanwhile.

        Returns:
            False if the active file is empty or the log is in memory; then nothing changes.

        Raises:
            CapacityError: The disk is full.
            DiskError: The next file cannot be created, and the active one stays in use; or a sync
                failed, and the topic's writer has stopped.
            ClosedError: The topic is closed.
        """
        return self.wal.run_shielded(self.wal.rotate)

    def _sync_all(self, timeout: float | None = None) -> None:
        last = self.wal.next - 1
        if self.wal.directory is not None and last >= self.wal.synced:
            self.wal.wait(last, AckLevel.SYNCED, timeout)

    def upload(self) -> UploadResult:
        """One upload cycle now: everything appended so far is in the bucket when it returns.

        Returns:
            What this cycle has moved; an empty range if everything was there already.

        Raises:
            InvalidRequestError: This log has no object store.
            FencedError: Another owner has the topic.
            UnavailableError: A store does not answer; the next cycle continues from there.
            As `wait`.
        """
        if self.bucket is None:
            raise InvalidRequestError(
                "this log has no object store", hint="open it with storage.mode 'wal_cloud'"
            )
        self.wal.gate.check_process()
        self._sync_all()
        return self.wal.run_shielded(self.bucket.uploads.upload)

    # -- reading ----------------------------------------------------------------------------

    def reader(self, start: Start = "earliest", *, end: int | None = None) -> Reader:
        """A reader from `start` on, before `end` or without an end.

        Args:
            start: `earliest`; `latest`, which is only what is appended after this call; an
                offset; or a point in time, which is the first message published then or later.
            end: The offset before which to stop.

        Raises:
            OffsetOutOfRangeError: The topic has no such offset; carries the valid range.
            InvalidRequestError: `start` or `end` makes no sense.
            ClosedError: The topic is closed.
        """
        return self._open_reader(start, end, None)

    def _open_reader(self, start: Start, end: int | None, level: AckLevel | None) -> Reader:
        self.wal.gate.check_process()
        if self.state is TopicState.CLOSED:
            raise ClosedError("the topic is closed", topic=self.name)
        offset = self.resolve_start(start)
        if end is not None:
            end = as_offset("end", end)
            if end < offset:
                raise InvalidRequestError(
                    f"end {end} is before start {offset}", topic=self.name, offset=offset
                )
        reader = Reader(
            wal=self.wal,
            cache=self.cache,
            start=offset,
            end=end,
            chunk_bytes=self._chunk_bytes,
            clock=self._clock,
            metrics=self._metrics,
            earliest=lambda: self.earliest,
            open_bucket=self.bucket.history if self.bucket is not None else None,
            level=level,
        )
        with self._readers_lock:
            self._readers.add(reader)
        is_hot = self.bucket is None or offset >= self.wal.trimmed
        self._metrics.count("reader.opened_hot_total" if is_hot else "reader.opened_history_total")
        _log.debug(
            "reader opened",
            extra={
                "topic": self.name,
                "offset": offset,
                "end": end,
                "tier": "local" if is_hot else "bucket",
                "files_count": len(self.wal.files),
                "chunk_size": self._chunk_bytes,
            },
        )
        return reader

    def read(
        self,
        start: Start = "earliest",
        *,
        end: int | None = None,
        follow: bool = False,
        timeout: float | None = None,
    ) -> Iterator[Message]:
        """Iterates over messages in order.

        Args:
            start: As for `reader`.
            end: The offset before which to stop. Without one, and without `follow`, everything
                appended before this call.
            follow: Wait for messages that are appended later.
            timeout: With `follow`, stop when no message came for so many seconds. Without, how
                long to wait for what was appended before this call to become visible.

        Raises:
            As `reader` and `Reader.next_batch`, and WaitTimeoutError.
        """
        timeout = as_timeout(timeout)
        if follow:
            return _iterate(self.reader(start, end=end), timeout)
        return _iterate(self._bounded_reader(start, end, timeout), None)

    def read_arrow(
        self,
        start: Start = "earliest",
        *,
        end: int | None = None,
        columns: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> pa.RecordBatchReader:
        """Messages in order as Arrow record batches, read while they are consumed.

        pandas, Polars and DuckDB accept the result. No object is made per message, so this is the
        way to read many.

        Args:
            start: As for `reader`.
            end: The offset before which to stop; everything appended before this call by default.
            columns: Some of `topic`, `offset`, `publish_time`, `producer_name`, `payload`,
                `attributes`, `routing_key`, `schema_id` and `schema_version`; all by default. By
                name only: `text`, the payload as UTF-8, null where it is not.
            timeout: How long to wait for what was appended before this call to become visible.

        Raises:
            ConfigError: pyarrow is not installed.
            InvalidRequestError: There is no such column.
            As `read`.
        """
        seconds = as_timeout(timeout)
        return self._as_arrow(columns, lambda: self._bounded_reader(start, end, seconds))

    def table(
        self,
        start: Start = "earliest",
        *,
        end: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> TopicTable:
        """A range as a table, for pandas, Polars, DuckDB and notebooks; see `read_arrow`."""
        return TopicTable(self.name, lambda: self.read_arrow(start, end=end, columns=columns))

    def _as_arrow(
        self, columns: Sequence[str] | None, open_reader: Callable[[], Reader]
    ) -> pa.RecordBatchReader:
        return load_columns().as_arrow_reader(self.name, columns, open_reader)

    def _bounded_reader(self, start: Start, end: int | None, timeout: float | None) -> Reader:
        """A reader up to `end`, or of what was appended before this call, once it is visible."""
        return self._bounded(self._open_reader(start, end, None), end, timeout)

    def _bounded(self, reader: Reader, end: int | None, timeout: float | None) -> Reader:
        upto = self.wal.next if end is None else min(end, self.wal.next)
        if upto > reader.visible:
            level = reader.level
            try:
                # Only producers cause uploads; a reader waits for the next one.
                self.wal.wait(upto - 1, level, timeout, is_patient=level is AckLevel.TIERED)
            except (CapacityError, ClosedError, DiskError, FencedError):
                # They cannot become visible for now. What is visible can still be read.
                upto = max(reader.visible, reader.next_offset)
        reader.limit(upto)
        return reader

    def own_reader(self, start: Start, *, end: int | None = None) -> Reader:
        """A reader up to `end`, or of what was appended before this call, whether visible or not.

        For the owner's own bookkeeping: nothing that it returns may be shown to anyone.

        Raises:
            As `read`.
        """
        return self._bounded(self._open_reader(start, end, self.wal.levels.local_level), end, None)

    def scan_arrow(
        self, start: Start, *, end: int | None = None, columns: Sequence[str]
    ) -> pa.RecordBatchReader:
        """Like `read_arrow`, with what `own_reader` reads."""
        return self._as_arrow(columns, lambda: self.own_reader(start, end=end))

    def resolve_start(self, start: Start, *, on_read: Callable[[int], None] | None = None) -> int:
        """The offset that a reader begins with, for a `start` as `reader` takes it.

        Args:
            start: Where to begin.
            on_read: As for `find_time`.

        Raises:
            InvalidRequestError: It is no start.
            OffsetOutOfRangeError: It is an offset that is not there.
            As `read`, for a time that has to be looked for.
        """
        self.wal.gate.check_process()
        if isinstance(start, str) and start in ("earliest", "latest"):
            return self.earliest if start == "earliest" else self.wal.next
        if isinstance(start, datetime):
            end = searchable_end(self.wal)
            found = self.find_time(to_milliseconds(start), self.earliest, end, on_read=on_read)
            return end if found is None else found
        offset = as_offset("start", start)
        check_start(self.wal, self.earliest, offset)
        return offset

    def find_time(
        self,
        publish_time_ms: int,
        start: int,
        end: int,
        *,
        on_read: Callable[[int], None] | None = None,
    ) -> int | None:
        """The first offset in a range whose message was published at or after the time.

        Indexes rule out objects, files and blocks. Much has to be read only if a message before
        `start` has a later publish time than those after it.

        Args:
            publish_time_ms: The time.
            start: The range's first offset.
            end: The first offset after the range.
            on_read: Called with the size of each chunk that was read; may raise to end the search.

        Returns:
            The offset; None if all messages of the range are older.

        Raises:
            As `read`.
        """
        self.wal.gate.check_process()
        search = TimeSearch(
            wal=self.wal,
            cache=self.cache,
            bucket=self.bucket,
            chunk_bytes=self._chunk_bytes,
            clock=self._clock,
            metrics=self._metrics,
            on_read=on_read,
        )
        return search.find(publish_time_ms, start, end)

    @cached_property
    def aio(self) -> AsyncTopic:
        """This topic's interface for asyncio programs."""
        return AsyncTopic(self)

    # -- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Makes everything durable and ends the topic and its readers. May be called twice.

        If an exception from a signal handler ends the call, closing continues in the background;
        the next call waits for it.

        Raises:
            IsterError: The last messages could not be stored; the topic is closed all the same.
            InvalidRequestError: It was called by a signal handler that interrupted an append.
        """
        self.wal.run_shielded(self._close)

    def _close(self) -> None:
        try:
            self.wal.close()
        finally:
            for reader in self.readers:
                reader.close()

    def close_quietly(self) -> None:
        """Closes a topic that has stopped, without raising its error again."""
        with suppress(IsterError):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Topic {self.name} {self.state.value} next={self.wal.next} ack={self.ack}>"

    def _repr_html_(self) -> str:
        return render_topics(f"Topic {self.name}", [self])


def _iterate(reader: Reader, timeout: float | None) -> Iterator[Message]:
    with reader:
        while batch := reader.next_batch(timeout=timeout):
            yield from batch


# For `help(topic.append)`: a topic's own attributes of these names are the appender's methods.
Appender.append.__doc__ = Topic.append.__doc__
Appender.append_many.__doc__ = Topic.append_many.__doc__
