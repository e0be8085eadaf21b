"""The append side of a topic: from a caller's message to a frame in the log's buffer.

Under one short lock, an append takes the next offset and queues the message; frames are encoded
together with those of many others. Nothing here waits for a disk, except for room in the buffer.

An exception from a signal handler may end any call at any point (`ister.wal.signals`). Under the
lock, an append changes the log in one step. So appending is atomic, also for all messages of one
`append_many` or `append_arrow`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias, TypedDict

from ister.base.clock import Clock
from ister.base.extras import missing_extra
from ister.base.limits import APPEND_CHUNK_BYTES, ENVELOPE_SIZE_BYTES_MAX, SUFFIX_CACHE_ENTRIES_MAX
from ister.base.metrics import Metrics
from ister.base.model import Codec, MessageId, StreamMessage
from ister.base.positions import to_milliseconds
from ister.errors import InvalidRequestError, IsterError, MessageTooLargeError
from ister.format.frame import FRAME_HEADER_SIZE
from ister.format.message import BodyEncoder
from ister.format.payloads import FEW_ROWS, Payloads
from ister.topic.arguments import as_bytes, as_number, as_payloads
from ister.topic.cache import Cache
from ister.wal.log import Wal
from ister.wal.waiters import Waiter

if TYPE_CHECKING:
    import pyarrow as pa

    from ister.format.arrow.encode import EncodedFrames

RecordParts: TypeAlias = tuple[bytes, bytes, int, bytes]
"""A record without its offset: encoded head, payload, publish time, encoded tail."""

# Offset, size of the payload and publish time take no more than this.
_NUMBERS_BYTES_MAX = 27
# One append in so many is timed for the latency histogram.
_SAMPLE_MASK = 0xFF


class MessageFields(TypedDict, total=False):
    """The optional arguments of `append`."""

    attributes: Mapping[str, str] | None
    """Key/value strings that readers get with the message."""
    routing_key: str | None
    """Key-shared subscriptions deliver all messages of a key to one consumer."""
    producer_name: str
    publish_time: datetime | int | None
    """A point in time, or milliseconds since the Unix epoch; now by default."""
    schema_id: int | None
    schema_version: int | None


class _FrameSettings(TypedDict):
    """What all frames that are encoded at one time have in common."""

    topic: str
    codec: Codec
    now_ms: int
    payload_bytes_max: int
    segment_bytes: int


class Appender:
    """Accepts messages for one topic. Thread-safe.

    Programs use `Topic.append`; brokers and the sink append whole records here.
    """

    def __init__(
        self, *, wal: Wal, cache: Cache, max_message_size: int, clock: Clock, metrics: Metrics
    ) -> None:
        self.name = wal.settings.topic
        self.wal = wal
        self.cache = cache
        self._size_max = max_message_size
        self._now_ns = clock.now_ns
        self._metrics = metrics
        # The hot path's own references: each saves a look-up per append.
        self._buffer = wal.buffer
        self._acquire = wal.lock.acquire
        self._release = wal.lock.release
        self._is_held: Callable[[], bool] = wal.lock._is_owned  # type: ignore[attr-defined]  # noqa: SLF001
        self.records = BodyEncoder(wal.settings.codec)
        """Encodes the parts of records that `append_records` takes."""
        self._suffixes: dict[str, bytes] = {}
        # What a frame has besides payload and suffix, at the most.
        self._head = self.records.head(0, 0, self.name, "")
        self._envelope_bytes = FRAME_HEADER_SIZE + len(self._head) + _NUMBERS_BYTES_MAX

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
        """See `Topic.append`."""
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
            except (TypeError, ValueError):  # not hashable; `_suffix` says what it should be
                suffix = None
        else:
            suffix = None
        if suffix is None:
            suffix = self._suffix(producer_name, attributes, routing_key, schema_id, schema_version)
        time_ms = started // 1_000_000 if publish_time is None else to_milliseconds(publish_time)
        if self._is_held():
            self.wal.gate.check_reentry()
        try:
            self._acquire()  # `with` costs twice as much
            if buffer.is_changing:
                self.wal.committer.repair()
            if buffer.is_refusing or buffer.appended_bytes + size > buffer.admit_limit:
                self.wal.admit(size)
            buffer.is_changing = True
            offset = buffer.push_message(payload, time_ms, suffix)
            buffer.is_changing = False
            self._release()
        except BaseException:
            # First, before any bytecode at which a second signal could be handled.
            try:  # noqa: SIM105
                self._release()
            except RuntimeError:
                pass  # this thread does not hold it
            self.wal.committer.clean_up_interrupt()
            raise
        if not offset & _SAMPLE_MASK:
            self._observe(started)
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
        """See `Topic.append_many`."""
        messages = as_payloads(payloads)
        total = 0
        for message in messages:
            if len(message) > self._size_max:
                raise self._too_large(len(message))
            total += len(message)
        suffix = self._suffix(producer_name, attributes, routing_key, schema_id, schema_version)
        time_ms = self._now_ns() // 1_000_000
        if publish_time is not None:
            time_ms = to_milliseconds(publish_time)
        total += len(messages) * (len(suffix) + self._envelope_bytes)

        def put(first: int) -> int:
            bodies = self.records.bodies(self._head, first, messages, time_ms, suffix)
            self._buffer.push_many(bodies, time_ms)
            return len(bodies)

        return self._accept(total, put)

    def _accept(self, size_bytes: int, put: Callable[[int], int]) -> range:
        """Calls `put` with the next offset, with the lock held.

        `put`: appends messages from an offset on; returns their number.
        """
        buffer = self._buffer
        started = self._now_ns()
        if self._is_held():
            self.wal.gate.check_reentry()
        try:
            self._acquire()
            self.wal.committer.repair()
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
            self.wal.committer.clean_up_interrupt()
            raise
        self._observe(started)
        return range(first, first + count)

    def _observe(self, started_ns: int) -> None:
        elapsed_us = (self._now_ns() - started_ns) / 1000
        self._metrics.observe("wal.append_enq_latency_us", max(0.0, elapsed_us))

    def append_arrow(
        self,
        batch: pa.RecordBatch,
        *,
        producer_id: int = 0,
        first_request_id: int = 0,
        producer_name: str | None = None,
    ) -> range:
        """See `Topic.append_arrow`."""
        columns = load_columns()
        if not isinstance(batch, columns.RecordBatch):
            raise InvalidRequestError(
                f"rows are a pyarrow.RecordBatch, not {type(batch).__name__}",
                hint="for batch in table.to_batches(): topic.append_arrow(batch)",
            )
        if producer_name is not None and not isinstance(producer_name, str):
            raise InvalidRequestError(
                f"producer_name must be str, not {type(producer_name).__name__}"
            )
        producer_id = as_number("producer_id", producer_id, most=(1 << 64) - 1)
        first_request_id = as_number("first_request_id", first_request_id, most=(1 << 64) - 1)
        encode = partial(
            columns.encode_frames,
            batch,
            producer_id=producer_id,
            first_request_id=first_request_id,
            producer_name=producer_name,
            **self._frame_settings(),
        )
        size = self._size_of_rows(batch) + batch.num_rows * len(producer_name or "")
        return self._accept(size, lambda first: self._put_frames(encode(first_offset=first)))

    def append_payloads(
        self,
        rows: Payloads,
        *,
        producer_name: str = "",
        producer_id: int = 0,
        first_request_id: int = 0,
    ) -> range:
        """Like `append_arrow`, for rows that have only a payload.

        Many rows are encoded before the lock is taken, for the offsets that they get unless
        another append comes first; then they are encoded again.
        """
        if rows.num_rows <= FEW_ROWS:
            encoder, now_ms = self.records, self._now_ns() // 1_000_000
            tail = encoder.tail(
                producer_name, "", {}, schema_id=None, schema_version=None, routing_key=None
            )
            records = [
                (encoder.head(number, producer_id, self.name, ""), payload, now_ms, tail)
                for number, payload in enumerate(rows.payloads(), first_request_id)
            ]
            for record in records:
                self.check_record(record)
            return self.append_records(records)
        encode = partial(
            load_columns().encode_frames,
            rows,
            producer_id=producer_id,
            first_request_id=first_request_id,
            producer_name=producer_name,
            **self._frame_settings(),
        )
        expected = self._buffer.next
        encoded = encode(first_offset=expected)

        def put(first: int) -> int:
            return self._put_frames(encoded if first == expected else encode(first_offset=first))

        return self._accept(sum(len(frames.data) for frames in encoded), put)

    def _frame_settings(self) -> _FrameSettings:
        return {
            "topic": self.name,
            "codec": self.wal.settings.codec,
            "now_ms": self._now_ns() // 1_000_000,
            "payload_bytes_max": self._size_max,
            "segment_bytes": APPEND_CHUNK_BYTES,
        }

    def _put_frames(self, encoded: list[EncodedFrames]) -> int:
        """Appends frames from the next offset on, with the lock held; returns their number."""
        self._buffer.push_frames([(f.data, f.count, f.publish_time_max) for f in encoded])
        return sum(frames.count for frames in encoded)

    def has_room(self, rows: pa.RecordBatch | Payloads) -> bool:
        """Whether the buffer has room for the rows, so that `append_arrow` would not wait."""
        return self._buffer.has_room(self._size_of_rows(rows))

    def _size_of_rows(self, rows: pa.RecordBatch | Payloads) -> int:
        size: int = rows.nbytes + rows.num_rows * self._envelope_bytes
        return size

    def append_record(self, message: StreamMessage) -> int:
        """Accepts a whole record, such as one from a client; its offset is written into it."""
        return self.append_records([self.record_parts(message)]).start

    def record_parts(self, message: StreamMessage) -> RecordParts:
        """A record as `append_records` takes it.

        Raises:
            InvalidRequestError: A field does not fit its type.
            MessageTooLargeError: The record is over a limit.
        """
        for what, value, kind in (
            ("record", message, StreamMessage),
            ("msg_id", getattr(message, "msg_id", None), MessageId),
        ):
            if not isinstance(value, kind):
                raise InvalidRequestError(
                    f"{what} must be a {kind.__name__}, not {type(value).__name__}"
                )
        identity, encoder = message.msg_id, self.records
        parts = (
            encoder.head(
                message.request_id, identity.producer_id, identity.topic_name, identity.broker_addr
            ),
            message.payload if type(message.payload) is bytes else as_bytes(message.payload),
            as_number("publish_time", message.publish_time, most=(1 << 64) - 1),
            encoder.tail(
                message.producer_name,
                message.subscription_name,
                message.attributes,
                schema_id=message.schema_id,
                schema_version=message.schema_version,
                routing_key=message.routing_key,
            ),
        )
        self.check_record(parts)
        return parts

    def check_record(self, parts: RecordParts) -> None:
        """Refuses a record that cannot be stored, before an offset is taken for it.

        Raises:
            InvalidRequestError: The publish time is not an unsigned 64-bit integer.
            MessageTooLargeError: The record is over a limit.
        """
        head, payload, publish_time, tail = parts
        size = len(payload)
        if size > self._size_max:
            raise self._too_large(size)
        if not 0 <= publish_time < 1 << 64:
            raise InvalidRequestError(
                f"the message cannot be encoded: {publish_time} is not an unsigned 64-bit integer",
                topic=self.name,
            )
        if len(head) + len(tail) > ENVELOPE_SIZE_BYTES_MAX - _NUMBERS_BYTES_MAX:
            envelope = len(self.records.body(head, 0, payload, publish_time, tail)) - size
            if envelope > ENVELOPE_SIZE_BYTES_MAX:
                raise self._envelope_too_large(envelope)

    def append_records(self, records: Sequence[RecordParts]) -> range:
        """Accepts records that follow each other, each of which `check_record` has passed.

        `records`: the encoded head, the payload, the publish time and the encoded tail of each,
        made by `records`.
        """
        size = len(records) * (FRAME_HEADER_SIZE + _NUMBERS_BYTES_MAX)
        time_max = 0
        for head, payload, time, tail in records:
            size += len(head) + len(payload) + len(tail)
            time_max = max(time_max, time)

        def put(first: int) -> int:
            encode = self.records.body
            bodies = [
                encode(head, offset, payload, time, tail)
                for offset, (head, payload, time, tail) in enumerate(records, first)
            ]
            self._buffer.push_many(bodies, time_max)
            return len(bodies)

        return self._accept(size, put)

    def notify(self, offset: int, on_done: Callable[[IsterError | None], None]) -> bool:
        """Calls `on_done`, in any thread, once a message has reached the topic's ack level.

        Returns False if it has already; then `on_done` is not called.
        """
        return self.wal.enlist(Waiter(offset, on_done), self.wal.settings.ack)

    def now_seconds(self) -> int:
        """The time in seconds since the Unix epoch, by the log's clock."""
        return self._now_ns() // 1_000_000_000

    def _suffix(
        self,
        producer_name: str,
        attributes: Mapping[str, str] | None,
        routing_key: str | None,
        schema_id: int | None,
        schema_version: int | None,
    ) -> bytes:
        """The encoded fields behind the payload; cached if only the producer's name is set."""
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
        suffix = self.records.tail(
            producer_name,
            "",
            {} if attributes is None else attributes,
            schema_id=schema_id,
            schema_version=schema_version,
            routing_key=routing_key,
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
            f"names, keys and attributes take {size} bytes",
            topic=self.name,
            hint=f"at most {ENVELOPE_SIZE_BYTES_MAX} are allowed; put large data into the payload",
        )

    def _too_large(self, size: int) -> MessageTooLargeError:
        return MessageTooLargeError(
            f"the message has {size} bytes",
            topic=self.name,
            hint=f"at most {self._size_max} are allowed; storage.max_message_size sets the limit",
        )


def load_columns() -> ModuleType:
    """The module `ister.topic.columns`."""
    try:
        return importlib.import_module("ister.topic.columns")
    except ImportError as error:
        raise missing_extra("Arrow", "arrow", error) from error


def load_batches() -> ModuleType:
    """The module that appends staged rows, which needs pyarrow."""
    try:
        return importlib.import_module("ister.topic.batches")
    except ImportError as error:
        raise missing_extra("appending staged rows", "arrow", error) from error
