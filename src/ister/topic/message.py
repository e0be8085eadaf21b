"""A message as its reader gets it.

The body stays encoded until a field is looked at: a reader that only counts, filters by offset or
forwards pays nothing for decoding, and messages shared by many readers are decoded once. The
payload alone is found without decoding the rest.

A message that came from a file refers to the chunk it was read with until it is decoded: keeping
a few of many messages for long, look at a field of each (`record` decodes all of them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import overload

from ister.base.model import Codec, StreamMessage
from ister.base.positions import EPOCH
from ister.base.serializers import JSON, TEXT, Json, Serializer, decode_payload_by
from ister.errors import InvalidRequestError
from ister.format.frame import FRAME_HEADER_SIZE
from ister.format.message import decode_message, decode_payload


class Message:
    """One message, read-only. Equal to another if all its fields are."""

    __slots__ = ("_buffer", "_codec", "_decoded", "_end", "_start", "offset")

    # Set by `make_message` and `MessageBatch`, not by a constructor: calling one costs as much
    # again as all the rest of making a message.
    offset: int
    """Its number in the topic."""
    _buffer: bytes | None
    _start: int
    _end: int
    _codec: Codec
    _decoded: StreamMessage | None

    @property
    def record(self) -> StreamMessage:
        """All fields as stored, Danube's among them.

        Raises:
            CorruptDataError: The frame is intact, and its body is not a message in the topic's
                codec.
        """
        decoded = self._decoded
        if decoded is not None:
            return decoded
        buffer = self._buffer
        if buffer is None:
            # Another thread has decoded it meanwhile; it sets the one before it drops the other.
            return self.record
        decoded = decode_message(buffer[self._start : self._end], self._codec)
        self._decoded = decoded
        self._buffer = None
        return decoded

    @property
    def payload(self) -> bytes:
        """The payload that was appended."""
        buffer = self._buffer
        if buffer is None:
            return self.record.payload
        return decode_payload(buffer, self._codec, start=self._start, end=self._end)

    def json(self) -> Json:
        """The payload, decoded as JSON.

        Raises:
            InvalidRequestError: It is not JSON; the error has the offset.
        """
        return self._decoded_by(JSON)

    def text(self) -> str:
        """The payload, decoded as UTF-8.

        Raises:
            InvalidRequestError: It is not UTF-8; the error has the offset.
        """
        return str(self._decoded_by(TEXT))

    def _decoded_by(self, serializer: Serializer[Json]) -> Json:
        return decode_payload_by(serializer, self.payload, offset=self.offset)

    @property
    def body(self) -> bytes:
        """The encoded message, whatever it is; its payload alone once it was decoded."""
        buffer = self._buffer
        return self.payload if buffer is None else bytes(buffer[self._start : self._end])

    @property
    def size_bytes(self) -> int:
        """The size of its encoded body."""
        return self._end - self._start

    @property
    def publish_time(self) -> datetime:
        """When the producer published it, in UTC."""
        try:
            return EPOCH + timedelta(milliseconds=self.record.publish_time)
        except OverflowError:  # written by another program; no calendar goes that far
            return datetime.max.replace(tzinfo=UTC)

    @property
    def publish_time_ms(self) -> int:
        """The publish time in milliseconds since the Unix epoch."""
        return self.record.publish_time

    @property
    def producer_name(self) -> str:
        """Producer name."""
        return self.record.producer_name

    @property
    def attributes(self) -> Mapping[str, str]:
        """Its attributes."""
        return MappingProxyType(dict(self.record.attributes))

    @property
    def routing_key(self) -> str | None:
        """Its routing key."""
        return self.record.routing_key

    @property
    def schema_id(self) -> int | None:
        """The schema of its payload."""
        return self.record.schema_id

    @property
    def schema_version(self) -> int | None:
        """The version of that schema."""
        return self.record.schema_version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return self.offset == other.offset and self.record == other.record

    def __hash__(self) -> int:
        return hash(self.offset)

    def __repr__(self) -> str:
        payload = self.payload
        shown = payload if len(payload) <= 32 else payload[:32] + b"..."
        return f"Message(offset={self.offset}, payload={shown!r}, size_bytes={len(payload)})"


def make_message(offset: int, buffer: bytes, start: int, end: int, codec: Codec) -> Message:
    """The message whose body is `buffer[start:end]`."""
    message = Message()
    message.offset = offset
    message._buffer = buffer  # noqa: SLF001 - here and below: where messages are made
    message._start = start  # noqa: SLF001
    message._end = end  # noqa: SLF001
    message._codec = codec  # noqa: SLF001
    message._decoded = None  # noqa: SLF001
    return message


def stored_body(message: Message) -> tuple[bytes, int, int, Codec] | None:
    """A buffer, where in it the message's body begins and ends, and the codec.

    None once the message was decoded.
    """
    buffer = message._buffer  # noqa: SLF001
    if buffer is None:
        return None
    return buffer, message._start, message._end, message._codec  # noqa: SLF001


def without_chunk(message: Message) -> Message:
    """The message without the chunk that it was read with; itself if it refers to none."""
    buffer, size = message._buffer, message.size_bytes  # noqa: SLF001
    if buffer is None or len(buffer) == size:
        return message
    # Another one: this one may be in use by other threads.
    start, codec = message._start, message._codec  # noqa: SLF001
    return make_message(message.offset, buffer[start : start + size], 0, size, codec)


class MessageBatch(Sequence[Message]):
    """Messages that follow each other, made one by one as they are looked at.

    A list of thousands of objects would keep Python's garbage collector busier than the reader:
    each of them is a new one for it to look through. One that is made, used and dropped is not.
    """

    __slots__ = ("_codec", "_ends", "_starts", "buffer", "first_offset")

    def __init__(
        self, buffer: bytes, starts: list[int], ends: list[int], first_offset: int, codec: Codec
    ) -> None:
        self.buffer = buffer
        self.first_offset = first_offset
        self._starts = starts
        self._ends = ends
        self._codec = codec

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Message]:
        buffer, codec, new = self.buffer, self._codec, Message
        offset = self.first_offset
        for start, end in zip(self._starts, self._ends, strict=True):
            # As `make_message`, written out: a call for each costs as much again.
            message = new()
            message.offset = offset
            message._buffer = buffer  # noqa: SLF001
            message._start = start + FRAME_HEADER_SIZE  # noqa: SLF001
            message._end = end  # noqa: SLF001
            message._codec = codec  # noqa: SLF001
            message._decoded = None  # noqa: SLF001
            offset += 1
            yield message

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> MessageBatch: ...

    def __getitem__(self, index: int | slice) -> Message | MessageBatch:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise InvalidRequestError("a part of a batch is in its order, without gaps")
            return MessageBatch(
                self.buffer,
                self._starts[start:stop],
                self._ends[start:stop],
                self.first_offset + start,
                self._codec,
            )
        at = range(len(self))[index]
        return make_message(
            self.first_offset + at,
            self.buffer,
            self._starts[at] + FRAME_HEADER_SIZE,
            self._ends[at],
            self._codec,
        )

    def __repr__(self) -> str:
        return f"<MessageBatch {self.first_offset}..{self.first_offset + len(self)}>"
