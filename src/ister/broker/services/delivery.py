"""ister.Delivery: a consumer on one stream, with messages and acknowledgements in batches.

Serves the same subscriptions as Danube's ConsumerService, without a call per message: about ten
times as fast. Acknowledgements are confirmed, so that a client knows which it need not repeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import Final

import grpc

from ister.base.model import StreamMessage
from ister.base.positions import parse_position
from ister.broker.dispatch.consumer_ids import ConsumerIdentity
from ister.broker.dispatch.dispatcher import Dispatcher
from ister.broker.dispatch.encoder import varint
from ister.broker.dispatch.outbox import Outbox, Sent
from ister.broker.operations import checks
from ister.broker.rpc.handlers import ConsumerSlots, Refused
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.principal import counted_as
from ister.broker.security.rights import Permission
from ister.broker.topics.topics import Topics
from ister.errors import ConflictError, InvalidRequestError
from ister.subscription.policy import SubscriptionKind
from ister.wire import ister_api

# Field numbers and wire types: ConsumeResponse.deliveries, Deliveries.messages, Delivered.payload.
_DELIVERIES, _MESSAGES, _PAYLOAD = b"\x12", b"\x0a", b"\x12"
_BATCH_MESSAGES: Final = 256
_ACKS_MAX: Final = 10_000
# A client whose buffer is full reads nothing, but may acknowledge all messages that it has
# (`max_unacked_messages`). Beyond that, no more is taken from it until it reads.
_CONFIRMATIONS_MAX: Final = 100_000
# Time in which a stream has to be opened.
_OPEN_SECONDS: Final = 10.0


class DeliveryService:
    """Serves Ister's own consumers."""

    def __init__(self, topics: Topics, guard: Guard, slots: ConsumerSlots) -> None:
        self._topics = topics
        self.guard = guard
        self._slots = slots

    @checks("`consume` on the topic")
    async def Consume(
        self, requests: AsyncIterator[ister_api.ConsumeRequest], context: object
    ) -> AsyncGenerator[ister_api.ConsumeResponse | bytes, None]:
        """A consumer, from its first request to the end of the stream."""
        with self._slots.taken(counted_as(current_principal())):
            try:
                async with asyncio.timeout(_OPEN_SECONDS):
                    opening = await anext(requests, None)
            except TimeoutError as error:
                raise InvalidRequestError(
                    f"no request arrived within {_OPEN_SECONDS:.0f} s of opening the stream"
                ) from error
            if opening is None or opening.WhichOneof("step") != "open":
                raise InvalidRequestError("the first request of a stream must be `open`")
            answers = self._serve(opening.open, requests)
            try:
                async for answer in answers:
                    yield answer
                    del answer
            finally:
                await answers.aclose()

    async def _serve(
        self,
        opening: ister_api.OpenConsumer,
        requests: AsyncIterator[ister_api.ConsumeRequest],
    ) -> AsyncGenerator[ister_api.ConsumeResponse | bytes, None]:
        subscription, consumer = await self._open(opening)
        try:
            outbox = subscription.attach(
                consumer.id, consumer.filters, reports=opening.reports_received
            )
        except ConflictError as error:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error
        answers = _Confirmations(on_change=outbox.wake)
        taking = asyncio.create_task(_take_acks(requests, subscription, answers, outbox))
        try:
            yield ister_api.ConsumeResponse(
                opened=ister_api.Opened(
                    consumer_id=consumer.id,
                    cursor=subscription.delivery.cursor,
                    incarnation=subscription.stored.incarnation,
                    kind=subscription.kind.value,
                )
            )
            while True:
                if not answers.is_waiting and not outbox.is_ready:
                    await outbox.wait()
                if answers.is_waiting:
                    yield answers.take()
                if outbox.is_ready:
                    items = await outbox.take(_BATCH_MESSAGES)
                    if not items:
                        while answers.is_waiting:
                            # The client has no more to say, and hears what became of the last.
                            yield answers.take()
                        return
                    count = len(items)
                    while items:
                        if deliveries := await _next_deliveries(subscription, outbox, items):
                            yield deliveries
                        del deliveries  # there may be nothing to send for long
                        outbox.memory.written()
                    subscription.written(outbox, count)
        finally:
            subscription.detach(outbox)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)

    async def _open(self, request: ister_api.OpenConsumer) -> tuple[Dispatcher, ConsumerIdentity]:
        caller = current_principal()
        await self.guard.check_stream(caller, Permission.CONSUME, topic=request.topic)
        try:
            kind = SubscriptionKind(request.kind or SubscriptionKind.EXCLUSIVE)
        except ValueError as error:
            raise InvalidRequestError(
                f"invalid subscription kind {request.kind!r}",
                hint=f"use one of: {', '.join(SubscriptionKind)}",
            ) from error
        topic = await self._topics.get(request.topic)
        if not topic.is_reliable:
            raise InvalidRequestError(
                "the topic is not reliable: it stores no messages", topic=request.topic
            )
        try:
            consumer = await topic.subscribe(
                request.subscription,
                kind,
                request.consumer,
                tuple(request.key_filters),
                parse_position(request.start or "latest"),
                created_by=str(caller),
                check=partial(self.guard.check_subscription, caller, topic=topic.name),
            )
        except ConflictError as error:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error
        topic.arrive(consumer)
        return topic.reliable_subscription(request.subscription), consumer


class _Confirmations:
    """Acknowledgements that the client has not been sent confirmations of yet."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called when there is something to send."""
        self._offsets: list[int] = []
        self._refused: list[int] = []
        self._error: Exception | None = None
        self._on_change = on_change
        self._has_room = asyncio.Event()

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to send."""
        return bool(self._offsets or self._refused) or self._error is not None

    async def add(self, offsets: list[int], refused: list[int]) -> None:
        """Adds accepted and refused acknowledgements; waits while there are too many."""
        while len(self._offsets) + len(self._refused) >= _CONFIRMATIONS_MAX:
            self._has_room.clear()
            await self._has_room.wait()
        self._offsets += offsets
        self._refused += refused
        self._on_change()

    def fail(self, error: Exception) -> None:
        """Sends an error after what is waiting."""
        self._error = error
        self._on_change()

    def take(self) -> ister_api.ConsumeResponse:
        """Returns what to send next."""
        if self._error is not None and not self._offsets and not self._refused:
            raise self._error
        if self._offsets:
            told, self._offsets = self._offsets[:_ACKS_MAX], self._offsets[_ACKS_MAX:]
            answer = ister_api.ConsumeResponse(acked=ister_api.Acks(offsets=told))
        else:
            told, self._refused = self._refused[:_ACKS_MAX], self._refused[_ACKS_MAX:]
            answer = ister_api.ConsumeResponse(refused=ister_api.Acks(offsets=told))
        self._has_room.set()
        return answer


async def _take_acks(
    requests: AsyncIterator[ister_api.ConsumeRequest],
    subscription: Dispatcher,
    answers: _Confirmations,
    outbox: Outbox[Sent],
) -> None:
    """Takes acknowledgements until the client has no more; then the stream ends."""
    try:
        async for request in requests:
            step = request.WhichOneof("step")
            if step == "acks":
                offsets = request.acks.offsets
                if len(offsets) > _ACKS_MAX:
                    raise InvalidRequestError(  # noqa: TRY301 - told by the stream
                        f"at most {_ACKS_MAX} acknowledgements at once"
                    )
                taken = subscription.ack_many(offsets, request.acks.tokens, outbox.consumer)
                refused: list[int] = []
                if len(taken) < len(offsets):
                    refused = list(set(offsets).difference(taken))
                await answers.add(taken, refused)
            elif step == "nack":
                nack = request.nack
                subscription.nack(
                    nack.offset,
                    consumer=outbox.consumer,
                    delay_ms=nack.delay_ms if nack.HasField("delay_ms") else None,
                    reason=nack.reason if nack.HasField("reason") else None,
                )
            elif step == "received":
                subscription.received(outbox.consumer, request.received)
            else:
                raise InvalidRequestError(  # noqa: TRY301 - told by the stream
                    "a stream is opened once; then come acknowledgements"
                )
    except Exception as error:  # noqa: BLE001 - told to the client by the stream
        answers.fail(error)
    else:
        outbox.end()


async def _next_deliveries(
    subscription: Dispatcher, outbox: Outbox[Sent], items: list[Sent]
) -> bytes:
    """The messages that leave next, encoded; some of `items`, which are taken off."""
    parts: list[bytes] = []
    token = subscription.receipts.token
    for message, attempt in await subscription.next_messages(outbox, items):
        record = subscription.readable(message)
        if record is not None:
            receipt = token(outbox.consumer, message.offset, attempt)
            parts += _delivered(message.offset, record, attempt, receipt)
    if not parts:
        return b""
    return b"".join((_DELIVERIES, varint(sum(map(len, parts))), *parts))


def _delivered(offset: int, record: StreamMessage, attempt: int, token: int) -> tuple[bytes, ...]:
    """A message of `Deliveries`. Its payload is copied once, into what is written."""
    fields = ister_api.Delivered(
        offset=offset,
        publish_time=record.publish_time,
        producer_name=record.producer_name,
        attributes=record.attributes,
        routing_key=record.routing_key,
        schema_id=record.schema_id,
        schema_version=record.schema_version,
        attempt=attempt,
        token=token,
    ).SerializeToString()
    payload = record.payload
    head = _PAYLOAD + varint(len(payload))
    return _MESSAGES + varint(len(fields) + len(head) + len(payload)), fields, head, payload
