"""danube.ConsumerService: subscribe, a stream of messages, acknowledgements one at a time.

Danube's client opens its stream again at once when it ends with an error, without a pause. So an id
that is not known is answered after a while, not at once; and ids are known again after a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any, Final

import grpc

from ister.broker.consumers import Consumer, Consumers
from ister.broker.dispatch import Dispatch, Sent
from ister.broker.fanout import Fanout
from ister.broker.outbox import Outbox
from ister.broker.rpc import Places, Refused
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.principal import Principal, counted_as
from ister.broker.security.rights import Permission
from ister.broker.served import AnySubscription
from ister.broker.topics import Topics
from ister.broker.wire import danube
from ister.errors import (
    ConflictError,
    FencedError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
)
from ister.limits import KIB, MIB
from ister.model import StreamMessage
from ister.subscription.policy import SubscriptionKind
from ister.subscription.receipts import Receipts

__all__ = ["KINDS", "ConsumerService"]

KINDS: Final = (
    SubscriptionKind.EXCLUSIVE,
    SubscriptionKind.SHARED,
    SubscriptionKind.FAILOVER,
    SubscriptionKind.KEY_SHARED,
)
"""Danube's numbers of them."""

# How long the refusal of a stream takes.
_REFUSAL_SECONDS: Final = 1.0
_WRITTEN_EVERY: Final = 32
_LARGE_BYTES: Final = 4 * MIB - 64 * KIB


class ConsumerService:
    """Serves consumers."""

    def __init__(self, topics: Topics, guard: Guard, places: Places) -> None:
        self._topics = topics
        self._guard = guard
        self._places = places

    async def Subscribe(self, request: Any, context: Any) -> Any:  # noqa: N802, ANN401
        """Takes a consumer on; the subscription is made where it is missing, the topic is not."""
        caller = current_principal()
        self._guard.check(caller, Permission.CONSUME, topic=request.topic_name)
        if not 0 <= request.subscription_type < len(KINDS):
            raise InvalidRequestError(f"there is no subscription type {request.subscription_type}")
        topic = await self._topics.get(request.topic_name)
        try:
            consumer = await topic.subscribe(
                request.subscription,
                KINDS[request.subscription_type],
                request.consumer_name,
                tuple(request.key_filters),
                created_by=str(caller),
                check=partial(self._guard.check_subscription, caller, topic=topic.name),
            )
        except ConflictError as error:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error
        return danube.ConsumerResponse(
            request_id=request.request_id,
            consumer_id=consumer.id,
            consumer_name=consumer.name,
        )

    async def ReceiveMessages(self, request: Any, context: Any) -> AsyncIterator[bytes]:  # noqa: N802, ANN401
        """A consumer's messages, until the stream ends; a later stream of it takes over."""
        try:
            caller = current_principal()
            consumer = self._known(request.consumer_id, caller)
            self._guard.check(caller, Permission.CONSUME, topic=consumer.topic)
            topic = await self._topics.get(consumer.topic)
            subscription = topic.arrive(consumer)
            self._guard.check_subscription(caller, subscription, topic=consumer.topic)
            self._places.check(counted_as(caller))
            stream = _stream(subscription, consumer, self._topics.consumers)
        except IsterError as error:
            # The client comes again at once, whatever it is told.
            await asyncio.sleep(_REFUSAL_SECONDS)
            if isinstance(error, NotFoundError | ConflictError | FencedError):
                raise Refused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
            raise
        try:
            with self._places.taken(counted_as(caller)):
                async for data in stream:
                    yield data
        finally:
            await stream.aclose()

    def _known(self, id: int, caller: Principal) -> Consumer:
        """Whose id it is; an id of a topic that the caller may not consume is as good as none.

        Ids follow from names, so that an answer of another kind would tell that there are such.
        """
        self._places.check(counted_as(caller))
        self._guard.check_anywhere(caller, Permission.CONSUME)
        consumer = self._topics.consumers.find(id)
        may_know = consumer is not None and self._guard.allows(
            caller, Permission.CONSUME, topic=consumer.topic
        )
        if consumer is None or not may_know:
            raise NotFoundError("there is no consumer of that id", hint="subscribe again")
        return consumer

    async def Ack(self, request: Any, context: Any) -> Any:  # noqa: N802, ANN401
        """Takes an acknowledgement; one that comes late or twice is fine."""
        subscription = await self._addressed(request)
        if isinstance(subscription, Dispatch):
            known = request.msg_id
            acked = subscription.ack_by_id(known.topic_offset, known.broker_addr)
            self._topics.consumers.hear(acked)
        return danube.AckResponse(request_id=request.request_id)

    async def Nack(self, request: Any, context: Any) -> Any:  # noqa: N802, ANN401
        """Has a message come again; of one that somebody else has by now it does nothing."""
        subscription = await self._addressed(request)
        if isinstance(subscription, Dispatch):
            offset = request.msg_id.topic_offset
            found = subscription.receipts.find_delivery(request.msg_id.broker_addr, offset)
            if found is not None:
                consumer, attempt = found
                self._topics.consumers.hear(consumer)
                subscription.nack(
                    offset,
                    consumer=consumer,
                    attempt=attempt,
                    delay_ms=request.delay_ms if request.HasField("delay_ms") else None,
                    reason=request.reason if request.HasField("reason") else None,
                )
        return danube.NackResponse(request_id=request.request_id)

    async def _addressed(self, request: Any) -> AnySubscription:  # noqa: ANN401
        if not request.HasField("msg_id"):
            raise InvalidRequestError("the request has no msg_id")
        name = request.msg_id.topic_name
        caller = current_principal()
        self._guard.check(caller, Permission.CONSUME, topic=name)
        topic = self._topics.find_open(name) or await self._topics.get(name)
        found = topic.subscription(request.subscription_name)
        self._guard.check_subscription(caller, found, topic=name)
        return found


def _stream(
    subscription: AnySubscription, consumer: Consumer, consumers: Consumers
) -> AsyncGenerator[bytes, None]:
    """Attaches a consumer; its messages as they are written, in Danube's form.

    Raises:
        ConflictError: The subscription is exclusive, and somebody else has it.
        ClosedError: The topic is about to be closed.
    """
    if isinstance(subscription, Dispatch):
        outbox = subscription.attach(
            consumer.id, consumer.filters, elsewhere=partial(consumers.heard_at, consumer.id)
        )
        sent = _reliable(subscription, outbox)
        return _encoded(sent, consumer, subscription.receipts)
    sent = _pushed(subscription, subscription.attach(consumer.id, consumer.filters))
    return _encoded(sent, consumer, None)


async def _encoded(
    sent: AsyncGenerator[tuple[StreamMessage, int, int], None],
    consumer: Consumer,
    receipts: Receipts | None,
) -> AsyncGenerator[bytes, None]:
    try:
        async for record, offset, attempt in sent:
            yield encode(record, offset, attempt, consumer, receipts)
    finally:
        await sent.aclose()


async def _reliable(
    subscription: Dispatch, outbox: Outbox[Sent]
) -> AsyncGenerator[tuple[StreamMessage, int, int], None]:
    large: list[int] = []
    try:
        while items := await outbox.take(_WRITTEN_EVERY):
            for offset, attempt in items:
                message = await subscription.next_message(outbox, offset)
                record = None if message is None else subscription.readable(message)
                if record is not None:
                    if len(record.payload) > _LARGE_BYTES:
                        large.append(offset)
                    yield record, offset, attempt
            subscription.written(outbox, len(items))
    finally:
        for offset in large:
            # Most clients take no message of over 4 MiB: their stream breaks, and they come again
            # for the same one. That has to end at some time.
            subscription.fail(offset, "the consumer's stream ended with this large message")
        subscription.detach(outbox)


async def _pushed(
    subscription: Fanout, outbox: Outbox[StreamMessage]
) -> AsyncGenerator[tuple[StreamMessage, int, int], None]:
    try:
        while records := await outbox.take(_WRITTEN_EVERY):
            for record in records:
                subscription.counters.note_out(len(record.payload))
                yield record, record.msg_id.topic_offset, 1
            outbox.written(len(records))
    finally:
        subscription.detach(outbox)


def encode(
    record: StreamMessage,
    offset: int,
    attempt: int,
    consumer: Consumer,
    receipts: Receipts | None,
) -> bytes:
    """A message as Danube's clients get it.

    The topic is the name that the client subscribed to: it goes by that when it acknowledges. Then
    it sends the id as it came, with the receipt in it; without a log there is none.
    """
    known = record.msg_id
    address = known.broker_addr
    if receipts is not None:
        address = receipts.stamp(address, consumer.id, offset, attempt)
    message = danube.StreamMessage(
        request_id=record.request_id,
        msg_id=danube.MsgID(
            producer_id=known.producer_id,
            topic_name=consumer.topic,
            broker_addr=address,
            topic_offset=offset,
        ),
        payload=record.payload,
        publish_time=record.publish_time,
        producer_name=record.producer_name,
        subscription_name=consumer.subscription,
        schema_id=record.schema_id,
        schema_version=record.schema_version,
        routing_key=record.routing_key,
    )
    if record.attributes:
        message.attributes.update(record.attributes)
    data: bytes = message.SerializeToString()
    return data
