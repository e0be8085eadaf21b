"""A message as a consumer gets it from a broker.

Payloads are decoded on access, so one that cannot be decoded raises where the program can reject
the message, and the consumer continues.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ister.client.core.receiver import Receiver
    from ister.wire import ister_api

from ister.base.positions import EPOCH
from ister.base.serializers import JSON, TEXT, Json, Serializer, decode_payload_by


class ReceivedMessage:
    """One message. Acknowledge it with the consumer that gave it."""

    __slots__ = (
        "attempt",
        "attributes",
        "life",
        "offset",
        "payload",
        "producer_name",
        "publish_time_ms",
        "receiver",
        "routing_key",
        "schema_id",
        "schema_version",
        "token",
        "topic",
    )

    def __init__(self, delivered: ister_api.Delivered, receiver: Receiver, life: int) -> None:
        """Takes over what the broker has sent.

        Args:
            delivered: The protocol's message.
            receiver: Where it came from.
            life: Which of the receiver's streams delivered it.
        """
        self.topic: str = receiver.topic
        """The topic, or the partition of one."""
        self.offset: int = delivered.offset
        self.payload: bytes = delivered.payload
        self.publish_time_ms: int = delivered.publish_time
        self.producer_name: str = delivered.producer_name
        attributes = delivered.attributes
        self.attributes: dict[str, str] = dict(attributes) if attributes else {}
        self.routing_key: str | None = (
            delivered.routing_key if delivered.HasField("routing_key") else None
        )
        self.schema_id: int | None = (
            delivered.schema_id if delivered.HasField("schema_id") else None
        )
        self.schema_version: int | None = (
            delivered.schema_version if delivered.HasField("schema_version") else None
        )
        self.attempt: int = delivered.attempt
        """1 for the first delivery; one more for each that has failed."""
        self.token: int = delivered.token
        """The delivery receipt, which is returned to the broker with the acknowledgement."""
        self.receiver = receiver
        self.life = life

    @property
    def value(self) -> Json:
        """The payload, decoded by the consumer's serializer; the payload itself without one.

        Decoded anew at each call. What the serializer raises is raised here.
        """
        serializer = self.receiver.serializer
        return self.payload if serializer is None else self._decoded(serializer)

    def json(self) -> Json:
        """The payload, decoded as JSON.

        Raises:
            InvalidRequestError: It is not JSON; the error has the topic and the offset.
        """
        return self._decoded(JSON)

    def text(self) -> str:
        """The payload, decoded as UTF-8.

        Raises:
            InvalidRequestError: It is not UTF-8; the error has the topic and the offset.
        """
        return str(self._decoded(TEXT))

    def _decoded(self, serializer: Serializer[Json]) -> Json:
        return decode_payload_by(serializer, self.payload, topic=self.topic, offset=self.offset)

    @property
    def publish_time(self) -> datetime:
        """When the producer published it, in UTC."""
        try:
            return EPOCH + timedelta(milliseconds=self.publish_time_ms)
        except OverflowError:  # written by another program; no calendar goes that far
            return datetime.max.replace(tzinfo=UTC)

    def __repr__(self) -> str:
        return (
            f"<ReceivedMessage {self.topic} offset={self.offset} bytes={len(self.payload)} "
            f"attempt={self.attempt}>"
        )
