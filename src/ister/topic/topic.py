"""A topic: what programs append to and read from.

Owns: the hot path of `append`, start positions, what its callers may do. Does not own: durability
(`ister.wal`), the ring of recent messages (`cache`), reading (`reader`), the bucket (`tier`).

`append` does, under one short lock: take the next offset, build the body, queue the frame, put the
body into the cache. Nothing there waits for a disk. What an acknowledgement means is asked with
`wait`, and readers see a message only when it has reached the topic's ack level.

An exception from a signal handler may end any call at any point (`ister.wal.interrupts`). Under the
lock, an append changes first the cache and then, in one step, the log. So appending is atomic, also
for all messages of one `append_many` or `append_arrow`.
"""

from __future__ import annotations

import importlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Self

from ister import forks
from ister.clock import Clock
from ister.errors import (
    CapacityError,
    ClosedError,
    CorruptDataError,
    DiskError,
    InvalidRequestError,
    IsterError,
    MessageTooLargeError,
    NotFoundError,
    OffsetOutOfRangeError,
    WaitTimeoutError,
)
from ister.extras import missing_extra
from ister.format.frame import FRAME_HEADER_SIZE
from ister.format.message import BodyEncoder, encode_message
from ister.limits import (
    APPEND_CHUNK_BYTES,
    ENVELOPE_SIZE_BYTES_MAX,
    SUFFIX_CACHE_ENTRIES_MAX,
)
from ister.metrics import Metrics
from ister.model import AckLevel, Codec, Start, StreamMessage, TopicState, Watermarks
from ister.topic.aio import AsyncTopic
from ister.topic.arguments import as_bytes, as_milliseconds, as_offset
from ister.topic.cache import Cache
from ister.topic.message import Message
from ister.topic.reader import Reader, check_start
from ister.topic.retention import ActiveFloor, no_floor
from ister.topic.tier import Tiered, TopicTier
from ister.wal.log import Wal
from ister.wal.reader import WalReader
from ister.wal.recovery import Damage

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Topic"]

_log = logging.getLogger("ister.topic.topic")

# One append in so many is timed for the latency histogram.
_SAMPLE_MASK = 0xFF


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
        tier: TopicTier | None = None,
    ) -> None:
        self.name = wal.settings.topic
        self.wal = wal
        self.cache = cache
        self.tier = tier
        """The bucket's side of the topic; None in a log without one."""
        self._size_max = max_message_size
        self._chunk_bytes = stream_chunk_size
        self._clock = clock
        self._now_ns = clock.now_ns
        self._metrics = metrics
        self._lock = wal.lock
        self._opened_at = wal.next
        # The hot path's own references: each saves a look-up per append.
        self._buffer = wal.buffer
        self._acquire = wal.lock.acquire
        self._release = wal.lock.release
        wal.on_mend = cache.mend
        self._remember = cache.append
        self._encoder = BodyEncoder(topic_name=self.name, codec=wal.settings.codec)
        self._encode = self._encoder.encode
        self._suffixes: dict[str, bytes] = {}
        # What a frame has besides payload and suffix, at the most.
        self._envelope_bytes = FRAME_HEADER_SIZE + len(self._encode(0, b"", 0, b"")) + 32
        self._readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self._readers_lock = threading.Lock()
        self.active_floor: ActiveFloor = no_floor
        """Returns the first offset that retention keeps for subscriptions; set by the broker."""
        self.opened_at = clock.boottime()
        """In `Clock.boottime` seconds."""
        self.batching = threading.Lock()
        """Held by whoever appends a staged batch: one at a time."""
        forks.register(self)

    def _after_fork(self, error: ClosedError) -> None:
        """Makes a forked child's copy unusable; see `ister.forks`."""
        forks.reset_locks(self._readers_lock, self.batching)
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
    def state(self) -> TopicState:
        """Whether the topic takes appends, and why not."""
        return self.wal.state

    @property
    def damage(self) -> tuple[Damage, ...]:
        """What was found damaged when the topic was opened; empty for a healthy one."""
        return self.wal.damage

    @property
    def watermarks(self) -> Watermarks:
        """How far the topic has come, all of one moment."""
        wal = self.wal
        with self._lock:
            trimmed = wal.trimmed
            # Without a bucket nothing is trimmed. With one only what is tiered is; where a hole
            # lies between the two tiers (the topic is quarantined then), the lower one counts.
            tiered = trimmed if wal.tiered is None else wal.tiered
            return Watermarks(
                trimmed=min(trimmed, tiered),
                tiered=tiered,
                synced=wal.synced,
                written=wal.written,
                next=wal.next,
            )

    @property
    def appended(self) -> int:
        """Messages appended since the topic was opened here."""
        return self.wal.next - self._opened_at

    @property
    def earliest(self) -> int:
        """The first offset that can be read, in whichever tier."""
        if self.tier is not None:
            return self.tier.earliest
        return self.wal.trimmed if self.wal.directory is not None else self.cache.start

    @property
    def readers(self) -> list[Reader]:
        """The readers that are open."""
        with self._readers_lock:
            return [reader for reader in self._readers if not reader.is_closed]

    def now_seconds(self) -> int:
        """The time in seconds since the Unix epoch, by the log's clock."""
        return self._now_ns() // 1_000_000_000

    # -- appending --------------------------------------------------------------------------

    def append(
        self,
        payload: bytes | bytearray | memoryview,
        *,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        producer_name: str = "",
        publish_time: datetime | int | None = None,
        schema_id: int | None = None,
        schema_version: int | None = None,
    ) -> int:
        """Accepts a message and returns its offset, in microseconds.

        What it survives from then on is the level `memory`; `wait` for more.

        Args:
            payload: The message itself.
            attributes: Text by text, kept with the message.
            routing_key: What key-shared subscriptions go by.
            producer_name: Who says so.
            publish_time: A point in time, or milliseconds since the Unix epoch; now by default.
            schema_id: The schema of the payload.
            schema_version: The version of that schema.

        Raises:
            InvalidRequestError: A field is not of its kind.
            MessageTooLargeError: The message is over a limit.
            CapacityError: The buffer or the disk is full.
            ClosedError: The topic is closed, or its writer stopped.
            CorruptDataError: The topic is quarantined.
        """
        buffer = self._buffer
        started = self._now_ns()
        if type(payload) is not bytes:
            payload = as_bytes(payload)
        size = len(payload)
        if size > self._size_max:
            raise self._too_large(size)
        if attributes is None and routing_key is None and schema_id is None:
            try:
                suffix = self._suffixes.get(producer_name) if schema_version is None else None
            except TypeError:  # not even hashable; `_suffix` says what it should be
                suffix = None
        else:
            suffix = None
        if suffix is None:
            suffix = self._suffix(producer_name, attributes, routing_key, schema_id, schema_version)
        time_ms = started // 1_000_000 if publish_time is None else as_milliseconds(publish_time)
        if buffer.is_changing:
            self.wal.check_outside()
        try:
            self._acquire()  # `with` costs twice as much
            if buffer.is_changing:
                self.wal.mend()
            if buffer.is_refusing or buffer.appended_bytes + size > buffer.admit_limit:
                self.wal.admit(size)
            buffer.is_changing = True
            offset = buffer.next
            body = self._encode(offset, payload, time_ms, suffix)
            self._remember(offset, body)
            buffer.push(offset, body, time_ms)
            buffer.is_changing = False
            self._release()
        except BaseException:
            # First, before any bytecode at which a second signal could be handled.
            try:  # noqa: SIM105
                self._release()
            except RuntimeError:
                pass  # this thread does not hold it
            self.wal.settle()
            raise
        if not offset & _SAMPLE_MASK:
            elapsed_us = (self._now_ns() - started) / 1000
            self._metrics.observe("wal.append_enq_latency_us", max(0.0, elapsed_us))
        return offset

    def append_many(
        self,
        payloads: Iterable[bytes | bytearray | memoryview],
        *,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        producer_name: str = "",
        publish_time: datetime | int | None = None,
        schema_id: int | None = None,
        schema_version: int | None = None,
    ) -> range:
        """Accepts messages that follow each other without another one in between.

        All of them are checked before the first one is accepted. The arguments are `append`'s and
        apply to each message.

        Returns:
            The offsets.

        Raises:
            As `append`, and then nothing was accepted.
        """
        messages = [p if type(p) is bytes else as_bytes(p) for p in payloads]
        total = 0
        for message in messages:
            if len(message) > self._size_max:
                raise self._too_large(len(message))
            total += len(message)
        suffix = self._suffix(producer_name, attributes, routing_key, schema_id, schema_version)
        time_ms = (
            self._now_ns() // 1_000_000 if publish_time is None else as_milliseconds(publish_time)
        )
        total += len(messages) * (len(suffix) + self._envelope_bytes)

        def put(first: int) -> int:
            encode, remember = self._encode, self._remember
            bodies = [
                encode(offset, message, time_ms, suffix)
                for offset, message in enumerate(messages, first)
            ]
            for offset, body in enumerate(bodies, first):
                remember(offset, body)
            self._buffer.push_many(bodies, time_ms)
            return len(bodies)

        return self._accept(total, put)

    def _accept(self, size_bytes: int, put: Callable[[int], int]) -> range:
        """Calls `put` with the next offset, with the lock held.

        Args:
            size_bytes: The size of the frames.
            put: Appends messages from an offset on; returns their number.
        """
        buffer = self._buffer
        if buffer.is_changing:
            self.wal.check_outside()
        try:
            self._acquire()
            self.wal.mend()
            self.wal.admit(size_bytes)
            buffer.is_changing = True
            first = buffer.next
            count = put(first)
            buffer.is_changing = False
            self._release()
        except BaseException:
            try:  # noqa: SIM105 - as in `append`
                self._release()
            except RuntimeError:
                pass
            self.wal.settle()
            raise
        return range(first, first + count)

    def append_arrow(
        self, batch: pa.RecordBatch, *, producer_id: int = 0, first_request_id: int = 0
    ) -> range:
        """Accepts the rows of a record batch, one message each, without another one in between.

        Columns are those of `read_arrow`: `payload` is required, `topic` and `offset` are passed
        over, and what is missing or null is as `append` would have it. All rows are checked before
        the first one is accepted. Meant for many rows: they are encoded at once, and no object is
        made per row.

        Args:
            batch: The rows.
            producer_id: What each message carries under this name.
            first_request_id: Likewise, for the first row; one more for each row after it.

        Returns:
            The offsets.

        Raises:
            InvalidRequestError: A column or a value is not of its kind.
            As `append`, and then nothing was accepted.
        """
        columnar = _columnar()
        if not isinstance(batch, columnar.RecordBatch):
            raise InvalidRequestError(
                f"rows are a pyarrow.RecordBatch, not {type(batch).__name__}",
                hint="for batch in table.to_batches(): topic.append_arrow(batch)",
            )
        size = self._size_of_rows(batch)

        def put(first: int) -> int:
            encoded = columnar.encode_frames(
                batch,
                topic=self.name,
                codec=self.codec,
                first_offset=first,
                now_ms=self._now_ns() // 1_000_000,
                payload_bytes_max=self._size_max,
                producer_id=producer_id,
                first_request_id=first_request_id,
                segment_bytes=APPEND_CHUNK_BYTES,
            )
            for frames in encoded:
                self.cache.append_frames(frames.data, frames.first_offset, frames.count)
            self._buffer.push_frames([(f.data, f.count, f.publish_time_max) for f in encoded])
            return sum(frames.count for frames in encoded)

        return self._accept(size, put)

    def has_room(self, batch: pa.RecordBatch) -> bool:
        """Whether `append_arrow` would not wait for room in the buffer now."""
        return self._buffer.has_room(self._size_of_rows(batch))

    def _size_of_rows(self, batch: pa.RecordBatch) -> int:
        size: int = batch.nbytes + batch.num_rows * self._envelope_bytes
        return size

    def append_record(self, message: StreamMessage) -> int:
        """Accepts a whole record, as one that came over a wire; its offset is stamped into it.

        Raises:
            As `append`.
        """
        size = len(message.payload)
        if size > self._size_max:
            raise self._too_large(size)
        # Checked before an offset is taken: what cannot be encoded must not leave a hole.
        envelope = len(encode_message(message, self.codec)) - size
        if envelope > ENVELOPE_SIZE_BYTES_MAX:
            raise self._envelope_too_large(envelope)

        def put(offset: int) -> int:
            stamped = replace(message, msg_id=replace(message.msg_id, topic_offset=offset))
            body = encode_message(stamped, self.codec)
            self._remember(offset, body)
            self._buffer.push(offset, body, message.publish_time)
            return 1

        return self._accept(size + envelope, put).start

    def _suffix(
        self,
        producer_name: str,
        attributes: Mapping[str, str] | None,
        routing_key: str | None,
        schema_id: int | None,
        schema_version: int | None,
    ) -> bytes:
        """The encoded fields behind the payload; kept for messages that have a producer alone."""
        is_plain = (
            attributes is None
            and routing_key is None
            and schema_id is None
            and schema_version is None
        )
        if is_plain and isinstance(producer_name, str):
            found = self._suffixes.get(producer_name)
            if found is not None:
                return found
        suffix = self._encoder.suffix(
            producer_name=producer_name,
            attributes=attributes,
            routing_key=routing_key,
            schema_id=schema_id,
            schema_version=schema_version,
        )
        if len(suffix) > ENVELOPE_SIZE_BYTES_MAX:
            raise self._envelope_too_large(len(suffix))
        if is_plain:
            if len(self._suffixes) >= SUFFIX_CACHE_ENTRIES_MAX:
                self._suffixes = {}
            self._suffixes[producer_name] = suffix
        return suffix

    def _envelope_too_large(self, size: int) -> MessageTooLargeError:
        return MessageTooLargeError(
            f"names, keys and attributes of {size} bytes",
            topic=self.name,
            hint=f"at most {ENVELOPE_SIZE_BYTES_MAX}; large data belongs into the payload",
        )

    def _too_large(self, size: int) -> MessageTooLargeError:
        return MessageTooLargeError(
            f"a message of {size} bytes",
            topic=self.name,
            hint=f"at most {self._size_max}; storage.max_message_size sets the limit",
        )

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
        self.wal.check_process()
        level = self.resolve_level(level)
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise InvalidRequestError(f"an offset is a whole number, not {offset!r}")
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
        try:
            self.wal.wait(offset, level, timeout)
        except WaitTimeoutError as error:
            if level is AckLevel.TIERED and self.tier is not None and self.tier.last_error:
                error.hint = f"the last upload failed: {self.tier.last_error.message}"
            raise
        if self.tier is not None:
            self.tier.check_owner()

    def resolve_level(self, level: AckLevel | str | None) -> AckLevel:
        """The level meant, if this log can reach it.

        Raises:
            InvalidRequestError: It cannot, or there is no such level.
        """
        try:
            level = AckLevel(level) if level is not None else self.ack
        except ValueError as error:
            raise InvalidRequestError(
                f"there is no ack level {level!r}", hint=f"one of: {', '.join(AckLevel)}"
            ) from error
        if level is AckLevel.TIERED and self.tier is None:
            raise InvalidRequestError("this log has no object store, so nothing becomes tiered")
        if level is not AckLevel.MEMORY and self.wal.directory is None:
            raise InvalidRequestError(f"this log is in memory, so nothing becomes {level}")
        if level is AckLevel.TIERED and self.tier is not None and self.tier.owned.is_fenced:
            self.tier.check_owner()
        return level

    def flush(self, timeout: float | None = None) -> int:
        """Makes everything appended so far durable.

        Returns:
            The `synced` watermark.

        Raises:
            As `wait`.
        """
        self.wal.check_process()
        self._sync_all(timeout)
        if self.tier is not None:
            self.tier.check_owner()
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

    def upload(self) -> Tiered:
        """One upload cycle now: everything appended so far is in the bucket when it returns.

        Returns:
            What this cycle has moved; an empty range if everything was there already.

        Raises:
            InvalidRequestError: This log has no object store.
            FencedError: Another owner has the topic.
            UnavailableError: A store does not answer; the next cycle goes on from there.
            As `wait`.
        """
        if self.tier is None:
            raise InvalidRequestError(
                "this log has no object store", hint="open it with storage.mode 'wal_cloud'"
            )
        self.wal.check_process()
        self._sync_all()
        return self.wal.run_shielded(self.tier.upload)

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
        self.wal.check_process()
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
            open_history=self.tier.history if self.tier is not None else None,
        )
        with self._readers_lock:
            self._readers.add(reader)
        is_hot = self.tier is None or offset >= self.wal.trimmed
        self._metrics.count("reader.opened_hot_total" if is_hot else "reader.opened_history_total")
        _log.debug(
            "reader opened",
            extra={
                "topic": self.name,
                "offset": offset,
                "end": end,
                "tier": "local" if is_hot else "bucket",
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

        pandas, Polars and DuckDB take the result as it is. Nothing is made per message, so this is
        the way to read many.

        Args:
            start: As for `reader`.
            end: The offset before which to stop; everything appended before this call by default.
            columns: Which of `topic`, `offset`, `publish_time`, `producer_name`, `payload`,
                `attributes`, `routing_key`, `schema_id` and `schema_version`, in this order; all
                of them by default. What is not asked for is not built.
            timeout: How long to wait for what was appended before this call to become visible.

        Raises:
            ConfigError: pyarrow is not installed.
            InvalidRequestError: There is no such column.
            As `read`.
        """
        columnar = _columnar()
        decoders = columnar.Decoders(self.name, columns)
        reader = self._bounded_reader(start, end, timeout)
        return columnar.as_arrow_reader(reader, decoders)

    def _bounded_reader(self, start: Start, end: int | None, timeout: float | None) -> Reader:
        """A reader up to `end`, or of what was appended before this call, once it is visible."""
        reader = self.reader(start, end=end)
        upto = self.wal.next if end is None else min(end, self.wal.next)
        if upto > self.wal.visible:
            try:
                self.wal.wait(upto - 1, self.wal.visible_level, timeout)
            except (CapacityError, ClosedError, DiskError):
                # They cannot become visible for now. What is visible can still be read.
                upto = max(self.wal.visible, reader.next_offset)
        reader.limit(upto)
        return reader

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
        self.wal.check_process()
        if start == "earliest":
            return self.earliest
        if start == "latest":
            return self.wal.next
        if isinstance(start, datetime):
            end = self._searchable_end()
            found = self.find_time(as_milliseconds(start), self.earliest, end, on_read=on_read)
            return end if found is None else found
        offset = as_offset("start", start)
        check_start(self.wal, self.earliest, offset)
        return offset

    def _searchable_end(self) -> int:
        """Up to where messages can be searched by time, once those appended so far are there."""
        wal = self.wal
        if wal.directory is None:
            return wal.next
        last = wal.next - 1
        with suppress(CapacityError):  # on a full disk, what is there already has to do
            if last >= 0:
                wal.wait(
                    last,
                    AckLevel.SYNCED if wal.visible_level is AckLevel.SYNCED else AckLevel.WRITTEN,
                )
        return min(last + 1, wal.visible, wal.written)

    def find_time(
        self,
        publish_time_ms: int,
        start: int,
        end: int,
        *,
        on_read: Callable[[int], None] | None = None,
    ) -> int | None:
        """The first offset in a range whose message was published at or after the time.

        Indexes tell which objects, files and blocks cannot have it. Much has to be read only if a
        message before `start` has a later publish time than those from there on.

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
        wal = self.wal
        wal.check_process()
        if wal.directory is None:
            with self._lock:
                recent = self.cache.read(self.cache.start, wal.next, bytes_max=1 << 62)
            among = (m for m in recent if start <= m.offset < end)
            return next((m.offset for m in among if m.publish_time_ms >= publish_time_ms), None)
        searched = start
        while True:
            trimmed = min(wal.trimmed, end)
            found = self._find_time_in_history(publish_time_ms, searched, trimmed, on_read)
            if found is not None:
                return found
            searched = max(searched, trimmed)
            found = self._find_time_in_files(publish_time_ms, searched, end, on_read)
            # Files that were trimmed meanwhile have to be looked through in the bucket.
            if min(wal.trimmed, end) <= searched:
                return found

    def _find_time_in_history(
        self, time_ms: int, start: int, end: int, on_read: Callable[[int], None] | None
    ) -> int | None:
        if self.tier is None or start >= end:
            return None
        history = self.tier.history()
        try:
            return history.find_time(time_ms, start=start, end=end, on_read=on_read)
        finally:
            history.close()

    def _find_time_in_files(
        self, time_ms: int, start: int, end: int, on_read: Callable[[int], None] | None
    ) -> int | None:
        files = WalReader(
            self.wal, chunk_bytes=self._chunk_bytes, metrics=self._metrics, clock=self._clock
        )
        try:
            return files.find_time(time_ms, self.codec, start=start, end=end, on_read=on_read)
        except (CorruptDataError, NotFoundError):
            tiered = min(end, self.wal.tiered or 0)
            if self.tier is None or tiered <= max(start, self.wal.trimmed):
                raise
            # The other tier has a copy of the files' beginning.
            found = self._find_time_in_history(
                time_ms, max(start, self.wal.trimmed), tiered, on_read
            )
            if found is not None:
                return found
            return files.find_time(time_ms, self.codec, start=tiered, end=end, on_read=on_read)
        finally:
            files.close()

    @cached_property
    def aio(self) -> AsyncTopic:
        """The same topic for asyncio programs."""
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
        """Closes a topic that has stopped; whoever waited for its messages has been told."""
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


def _columnar() -> ModuleType:
    """The module that knows Arrow, which is an extra."""
    try:
        return importlib.import_module("ister.topic.columns")
    except ImportError as error:
        raise missing_extra("Arrow", "arrow", error) from error


def _iterate(reader: Reader, timeout: float | None) -> Iterator[Message]:
    with reader:
        while batch := reader.next_batch(timeout=timeout):
            yield from batch
