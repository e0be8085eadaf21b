"""Messages as a consumer or a reader gets them from a broker.

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


class TopicMessage:
    """A message of a topic."""

    __slots__ = (
        "_serializer",
        "attributes",
        "offset",
        "payload",
        "producer_name",
        "publish_time_ms",
        "routing_key",
        "schema_id",
        "schema_version",
        "topic",
    )

    def __init__(  # noqa: PLR0917 - made for each message
        self,
        topic: str,
        offset: int,
        payload: bytes,
        publish_time_ms: int,
        producer_name: str,
        attributes: dict[str, str],
        routing_key: str | None,
        schema_id: int | None,
        schema_version: int | None,
        *,
        serializer: Serializer[Json] | None,
    ) -> None:
        self.topic = topic
        """The topic, or the partition of one."""
        self.offset = offset
        self.payload = payload
        self.publish_time_ms = publish_time_ms
        self.producer_name = producer_name
        self.attributes = attributes
        self.routing_key = routing_key
        self.schema_id = schema_id
        self.schema_version = schema_version
        self._serializer = serializer

    @property
    def value(self) -> Json:
        """The payload, decoded by the serializer of the consumer or reader; itself without one.

        Decoded anew at each call. What the serializer raises is raised here.
        """
        return self.payload if self._serializer is None else self._decoded(self._serializer)

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
            f"<{type(self).__name__} {self.topic} offset={self.offset} bytes={len(self.payload)}>"
        )


class ReceivedMessage(TopicMessage):
    """A message that a consumer got. Acknowledge it with the consumer that gave it."""

    __slots__ = ("attempt", "life", "receiver", "token")

    def __init__(self, delivered: ister_api.Delivered, receiver: Receiver, life: int) -> None:
        """Takes over what the broker has sent.

        Args:
            delivered: The protocol's message.
            receiver: Where it came from.
            life: Which of the receiver's streams delivered it.
        """
        has, attributes = delivered.HasField, delivered.attributes
        super().__init__(
            receiver.topic,
            delivered.offset,
            delivered.payload,
            delivered.publish_time,
            delivered.producer_name,
            dict(attributes) if attributes else {},
            delivered.routing_key if has("routing_key") else None,
            delivered.schema_id if has("schema_id") else None,
            delivered.schema_version if has("schema_version") else None,
            serializer=receiver.serializer,
        )
        self.attempt: int = delivered.attempt
        """1 for the first delivery; one more for each that has failed."""
        self.token: int = delivered.token
        """The delivery receipt, which is returned to the broker with the acknowledgement."""
        self.receiver = receiver
        self.life = life

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]} attempt={self.attempt}>"
