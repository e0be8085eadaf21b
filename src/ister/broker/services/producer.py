"""danube.ProducerService: a producer is registered, and sends messages one at a time.

Statuses are chosen by what Danube's clients do about them: UNAVAILABLE and RESOURCE_EXHAUSTED are
tried again, and after a few times the topic is looked up again; everything else is shown to the
user. So a topic that moves, a full buffer or a broker that ends is UNAVAILABLE, and a producer that
this broker does not know is taken on by its message.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import grpc

from ister.base.limits import KIB
from ister.base.model import MessageId, StreamMessage
from ister.broker.operations import checks
from ister.broker.publish.batched_sends import SEQUENCE_ATTRIBUTE, BatchedSends
from ister.broker.publish.producers import producer_id
from ister.broker.rpc.handlers import Refused, status_of
from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.broker.topics.served_topic import ServedTopic
from ister.broker.topics.topics import NoNamespaceError, Topics
from ister.errors import (
    ConflictError,
    InvalidRequestError,
    IsterError,
    MessageTooLargeError,
    NotFoundError,
)
from ister.topic.dedup import check_producer_name
from ister.topic.read_only import ReadOnlyTopic
from ister.wire import danube

EPOCH_ATTRIBUTE: Final = "ister-producer-epoch"
_NAME_CHARACTERS_MAX: Final = 256
_NUMBER_MAX: Final = (1 << 63) - 1


class ProducerService:
    """Serves producers."""

    THREAD_SAFE: Final = frozenset({"SendMessage"})
    """Methods whose batch form any thread may call."""

    def __init__(
        self, topics: Topics, schemas: SchemaRegistry, guard: Guard, *, size_max: int
    ) -> None:
        self._topics = topics
        self._size_max = size_max
        self._schemas = schemas
        self.guard = guard
        # Larger requests take the slow path, which checks the exact size.
        sends = BatchedSends(topics, guard, size_max=size_max // 2)
        self.SendMessage_batch = sends.accept
        """Appends messages that arrived together."""

    @checks("`produce` on the topic")
    async def CreateProducer(
        self, request: danube.ProducerRequest, context: object
    ) -> danube.ProducerResponse:
        """Registers a producer; creates the topic if it does not exist."""
        self.guard.check(current_principal(), Permission.PRODUCE, topic=request.topic_name)
        _check_name(request.producer_name)
        is_reliable = request.dispatch_strategy == danube.DispatchStrategy.Reliable
        try:
            topic = await self._topics.get_or_create(
                request.topic_name,
                is_reliable=is_reliable,
                check_growth=lambda base: self.guard.check(
                    current_principal(), Permission.MANAGE_TOPIC, topic=base
                ),
            )
        except NoNamespaceError as error:
            # As Danube does: its clients retry, and the namespace may be created meanwhile.
            raise Refused(grpc.StatusCode.UNAVAILABLE, error.message, hint=error.hint) from error
        if isinstance(topic.topic, ReadOnlyTopic):
            raise topic.topic.refused_error()
        if topic.is_reliable != is_reliable:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"topic {topic.name} is {'' if topic.is_reliable else 'not '}reliable",
                hint="use the topic's dispatch strategy",
            )
        if request.HasField("schema_ref"):
            await self._bind_schema(topic, request.schema_ref)
        await self._topics.admission.claim(topic, request.producer_name, self._principal())
        producer = topic.producers.register(
            request.producer_name,
            is_exclusive=request.producer_access_mode == danube.ProducerAccessMode.Exclusive,
            policies=topic.policies,
            now=asyncio.get_running_loop().time(),
        )
        return danube.ProducerResponse(
            request_id=request.request_id, producer_id=producer.id, producer_name=producer.name
        )

    async def _bind_schema(self, topic: ServedTopic, reference: danube.SchemaReference) -> None:
        wanted = reference.WhichOneof("version_ref")
        try:
            await asyncio.to_thread(
                self._schemas.bind_producer,
                topic.name,
                reference.subject,
                pinned_version=reference.pinned_version if wanted == "pinned_version" else None,
                min_version=reference.min_version if wanted == "min_version" else None,
            )
        except (NotFoundError, ConflictError) as error:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error

    @checks("`produce` on the topic")
    async def SendMessage(
        self, request: danube.StreamMessage, context: object
    ) -> danube.MessageResponse:
        """Appends a message; answered when it has reached the topic's ack level."""
        if not request.HasField("msg_id"):
            raise InvalidRequestError("the message has no msg_id")
        name = request.msg_id.topic_name
        self.guard.check(current_principal(), Permission.PRODUCE, topic=name)
        topic = self._topics.find_open(name) or await self._topics.get(name)
        began = time.monotonic()
        try:
            await self._send(topic, request)
        except IsterError as error:
            topic.counters.count_refused(status_of(error).name)
            raise
        topic.counters.count_sends(1, time.monotonic() - began)
        return danube.MessageResponse(request_id=request.request_id)

    async def _send(self, topic: ServedTopic, request: danube.StreamMessage) -> None:
        msg_id = request.msg_id
        name = msg_id.topic_name
        self._recognise(topic, msg_id.producer_id, request.producer_name)
        schema_id = request.schema_id if request.HasField("schema_id") else None
        schema_version = request.schema_version if request.HasField("schema_version") else None
        payload = request.payload
        if len(payload) > self._size_max // 2 and request.ByteSize() > self._size_max - KIB:
            raise MessageTooLargeError(
                f"a message of {len(payload)} bytes",
                topic=name,
                hint="most gRPC clients could not receive it: broker.limits.max_grpc_message_bytes "
                f"is {self._size_max}. Arrow Flight takes larger ones",
            )
        attributes = dict(request.attributes)
        message = StreamMessage(
            request_id=request.request_id,
            msg_id=MessageId(
                producer_id=msg_id.producer_id, topic_name=name, broker_addr=msg_id.broker_addr
            ),
            payload=payload,
            publish_time=request.publish_time,
            producer_name=request.producer_name,
            subscription_name=request.subscription_name,
            attributes=attributes,
            schema_id=schema_id,
            schema_version=schema_version,
            routing_key=request.routing_key if request.HasField("routing_key") else None,
        )
        principal = self._principal()
        if SEQUENCE_ATTRIBUTE in attributes:
            await topic.publish(
                message,
                sequence=_number(attributes, SEQUENCE_ATTRIBUTE),
                epoch=_number(attributes, EPOCH_ATTRIBUTE) if EPOCH_ATTRIBUTE in attributes else 0,
                principal=principal,
            )
        else:
            await topic.publish(message, principal=principal)

    def _principal(self) -> str:
        """Returns the calling principal; "" with authentication off."""
        return str(current_principal()) if self.guard.is_on else ""

    def _recognise(self, topic: ServedTopic, id: int, name: str) -> None:
        """Takes a producer on that this broker does not know, or no longer."""
        if len(name) > _NAME_CHARACTERS_MAX:
            _check_name(name)  # also of a producer that is known: logs keep what they see of them
        now = asyncio.get_running_loop().time()
        known = topic.producers.find(id, now)
        if known is not None:
            if known.name != name:
                raise InvalidRequestError(
                    "the message has the id of another producer", topic=topic.name
                )
            return
        if id != producer_id(topic.name, name):
            raise Refused(
                grpc.StatusCode.UNAVAILABLE,
                f"topic {topic.name} has no producer of that id",
                hint="create the producer again",
            )
        _check_name(name)
        topic.producers.register(name, is_exclusive=False, policies=topic.policies, now=now)


def _check_name(name: str) -> None:
    if not 0 < len(name) <= _NAME_CHARACTERS_MAX:
        raise InvalidRequestError(f"a producer's name has 1 to {_NAME_CHARACTERS_MAX} characters")
    check_producer_name(name)


def _number(attributes: dict[str, str], name: str) -> int:
    text = attributes[name]
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > _NUMBER_MAX:
        raise InvalidRequestError(f"attribute {name!r} must be an integer from 0 to {_NUMBER_MAX}")
    return int(text)
