"""A message as its reader gets it.

The body stays encoded until a field is looked at: a reader that only counts, filters by offset or
forwards pays nothing for decoding, and messages shared by many readers are decoded once. The
payload alone is found without decoding the rest.

A message that came from a file refers to the chunk it was read with until it is decoded: keeping
a few of many messages for long, look at a field of each (`record` decodes all of them).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

from ister.format.message import decode_message, decode_payload
from ister.model import Codec, StreamMessage

__all__ = ["Message"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Message:
    """One message, read-only. Equal to another if all its fields are."""

    __slots__ = ("_buffer", "_codec", "_decoded", "_end", "_start", "offset")

    def __init__(self, offset: int, buffer: bytes, start: int, end: int, codec: Codec) -> None:
        """The message `offset`, whose body is `buffer[start:end]`."""
        self.offset = offset
        """Its number in the topic."""
        self._buffer: bytes | None = buffer
        self._start = start
        self._end = end
        self._codec = codec
        self._decoded: StreamMessage | None = None

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
        """What was appended."""
        buffer = self._buffer
        if buffer is None:
            return self.record.payload
        return decode_payload(buffer, self._codec, start=self._start, end=self._end)

    @property
    def size_bytes(self) -> int:
        """The size of its encoded body."""
        return self._end - self._start

    @property
    def publish_time(self) -> datetime:
        """When the producer published it, in UTC."""
        try:
            return _EPOCH + timedelta(milliseconds=self.record.publish_time)
        except OverflowError:  # written by another program; no calendar goes that far
            return datetime.max.replace(tzinfo=UTC)

    @property
    def publish_time_ms(self) -> int:
        """The same in milliseconds since the Unix epoch."""
        return self.record.publish_time

    @property
    def producer_name(self) -> str:
        """Who published it."""
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
