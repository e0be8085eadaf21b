"""A message as its reader gets it.

The body stays encoded until a field is looked at: a reader that only counts, filters by offset or
forwards pays nothing for decoding, and messages shared by many readers are decoded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from ister.format.message import decode_message
from ister.model import Codec, StreamMessage

__all__ = ["Message"]


class Message:
    """One message, read-only. Equal to another if all its fields are."""

    __slots__ = ("_body", "_codec", "_decoded", "offset")

    def __init__(self, offset: int, body: bytes, codec: Codec) -> None:
        self.offset = offset
        """Its number in the topic."""
        self._body: bytes | None = body
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
        body = self._body
        if body is None:
            # Another thread has decoded it meanwhile; it sets the one before it drops the other.
            return self.record
        decoded = decode_message(body, self._codec)
        self._decoded = decoded
        self._body = None
        return decoded

    @property
    def payload(self) -> bytes:
        """What was appended."""
        return self.record.payload

    @property
    def publish_time(self) -> datetime:
        """When the producer published it, in UTC."""
        return datetime.fromtimestamp(self.record.publish_time / 1000, tz=UTC)

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
        return self.record.attributes

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
