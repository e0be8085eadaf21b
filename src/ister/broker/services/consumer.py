"""danube.ConsumerService: subscribe, a stream of messages, acknowledgements one at a time.

Danube's client opens its stream again at once when it ends with an error. So an unknown id is
answered after a pause; and ids stay valid after a restart.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import compress
from typing import Final, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from ister.base.limits import KIB, MIB
from ister.base.model import StreamMessage
from ister.broker.dispatch.consumer_ids import ConsumerIdentity, ConsumerIds
from ister.broker.dispatch.dispatcher import Dispatcher
from ister.broker.dispatch.encoder import DeliveredEncoder, encode, encode_answer
from ister.broker.dispatch.fanout import Fanout
from ister.broker.dispatch.outbox import Outbox, Sent
from ister.broker.operations import checks
from ister.broker.rpc.batch_calls import Appended, BatchCall
from ister.broker.rpc.handlers import ConsumerSlots, Refused
from ister.broker.security.guard import Guard, current_principal, entered
from ister.broker.security.principal import Principal, counted_as
from ister.broker.security.rights import Permission
from ister.broker.topics.served_topic import AnySubscription, ServedTopic
from ister.broker.topics.topics import Topics
from ister.errors import (
    ConflictError,
    FencedError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
)
from ister.subscription.policy import SubscriptionKind
from ister.topic.message import Message
from ister.wire import danube

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
_NOBODY: Final = nullcontext()

_Id = tuple[int, str]
"""A message's offset, and its broker address with the receipt."""


class _Acks(NamedTuple):
    """Acknowledgements of one subscription, and the calls that they came by."""

    ids: list[_Id]
    calls: list[BatchCall]
    answers: list[bytes]

    def answer(self, refusals: Sequence[InvalidRequestError | None]) -> None:
        """Answers or refuses each call."""
        calls, answers = self.calls, self.answers
        if any(refusals):
            for call, refusal in zip(calls, refusals, strict=True):
                if refusal is not None:
                    call.refuse(refusal)
            is_answered = [refusal is None for refusal in refusals]
            calls, answers = (
                list(compress(calls, is_answered)),
                list(compress(answers, is_answered)),
            )
        if calls:
            calls[0].answer_all(calls, answers)


class ConsumerService:
    """Serves consumers."""

    def __init__(self, topics: Topics, guard: Guard, slots: ConsumerSlots) -> None:
        self._topics = topics
        self.guard = guard
        self._slots = slots

    @checks("`consume` on the topic")
    async def Subscribe(
        self, request: danube.ConsumerRequest, context: object
    ) -> danube.ConsumerResponse:
        """Registers a consumer; creates the subscription, but not the topic."""
        caller = current_principal()
        self.guard.check(caller, Permission.CONSUME, topic=request.topic_name)
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
                check=partial(self.guard.check_subscription, caller, topic=topic.name),
            )
        except ConflictError as error:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error
        return danube.ConsumerResponse(
            request_id=request.request_id,
            consumer_id=consumer.id,
            consumer_name=consumer.name,
        )

    @checks("`consume` on the topic")
    async def ReceiveMessages(
        self,
        request: danube.ReceiveRequest,
        context: object,
    ) -> AsyncIterator[list[bytes]]:
        """Streams a consumer's messages; a later stream of the same consumer replaces this one."""
        try:
            caller = current_principal()
            consumer = self._known(request.consumer_id, caller)
            self.guard.check(caller, Permission.CONSUME, topic=consumer.topic)
            topic = await self._topics.get(consumer.topic)
            subscription = topic.arrive(consumer)
            self.guard.check_subscription(caller, subscription, topic=consumer.topic)
            self._slots.check(counted_as(caller))
            stream = _stream(subscription, consumer, self._topics.consumers)
        except IsterError as error:
            # The client retries at once, whatever the error.
            await self._topics.consumers.wait_dismissed(request.consumer_id, _REFUSAL_SECONDS)
            if isinstance(error, NotFoundError | ConflictError | FencedError):
                raise Refused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
            raise
        try:
            with self._slots.taken(counted_as(caller)):
                async for answers in stream:
                    yield answers
                    del answers  # not while it waits for the next ones
        finally:
            await stream.aclose()

    def _known(self, id: int, caller: Principal) -> ConsumerIdentity:
        """Returns the consumer of an id; ids of topics that the caller may not consume are unknown.

        Ids are hashes of names: another answer would reveal which consumers exist.
        """
        self._slots.check(counted_as(caller))
        self.guard.check_anywhere(caller, Permission.CONSUME)
        consumer = self._topics.consumers.find(id)
        may_know = consumer is not None and self.guard.allows(
            caller, Permission.CONSUME, topic=consumer.topic
        )
        if consumer is None or not may_know:
            raise NotFoundError("there is no consumer of that id", hint="subscribe again")
        return consumer

    @checks("`consume` on the topic")
    async def Ack(self, request: danube.AckRequest, context: object) -> danube.AckResponse:
        """Takes an acknowledgement; it may be late or repeated."""
        subscription = await self._addressed(request)
        known = request.msg_id
        (refusal,) = self._take_acks(subscription, [(known.topic_offset, known.broker_addr)])
        if refusal is not None:
            raise refusal
        return danube.AckResponse(request_id=request.request_id)

    def Ack_batch(self, calls: Sequence[BatchCall]) -> Sequence[Appended]:
        """Takes acknowledgements that arrived together, grouped by subscription."""
        parse = danube.AckRequest.FromString
        groups: dict[AnySubscription, _Acks] = {}
        for call in calls:
            try:
                request = parse(call.data)
                with _NOBODY if call.caller is None else entered(call.caller):
                    subscription = self._addressed_at_once(request)
            except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
                call.refuse(_unreadable() if isinstance(error, DecodeError) else error)
                continue
            if subscription is None:
                call.defer()
                continue
            group = groups.get(subscription)
            if group is None:
                group = groups[subscription] = _Acks([], [], [])
            known = request.msg_id
            group.ids.append((known.topic_offset, known.broker_addr))
            group.calls.append(call)
            group.answers.append(encode_answer(request.request_id))
        for subscription, group in groups.items():
            try:
                refusals = self._take_acks(subscription, group.ids)
            except Exception as error:  # noqa: BLE001 - as above
                for call in group.calls:
                    call.refuse(error)
            else:
                group.answer(refusals)
        return ()

    def _take_acks(
        self, subscription: AnySubscription, ids: Sequence[_Id]
    ) -> list[InvalidRequestError | None]:
        """Takes acknowledgements of one subscription; returns an error for each that is refused."""
        if not isinstance(subscription, Dispatcher):
            return [None] * len(ids)  # nothing is kept, and nothing is redelivered
        acked, refusals = subscription.ack_by_ids(ids)
        for consumer in acked:
            self._topics.consumers.record_answer(consumer)
        return refusals

    @checks("`consume` on the topic")
    async def Nack(self, request: danube.NackRequest, context: object) -> danube.NackResponse:
        """Takes a negative acknowledgement; ignored if another consumer has the message by now."""
        subscription = await self._addressed(request)
        if isinstance(subscription, Dispatcher):
            offset = request.msg_id.topic_offset
            found = subscription.receipts.find_delivery(request.msg_id.broker_addr, offset)
            if found is not None:
                consumer, attempt = found
                self._topics.consumers.record_answer(consumer)
                subscription.nack(
                    offset,
                    consumer=consumer,
                    attempt=attempt,
                    delay_ms=request.delay_ms if request.HasField("delay_ms") else None,
                    reason=request.reason if request.HasField("reason") else None,
                )
        return danube.NackResponse(request_id=request.request_id)

    async def _addressed(self, request: danube.AckRequest | danube.NackRequest) -> AnySubscription:
        """Returns the subscription of an acknowledgement; opens its topic if necessary."""
        found = self._addressed_at_once(request)
        if found is None:
            name = request.msg_id.topic_name
            self.guard.check(current_principal(), Permission.CONSUME, topic=name)
            found = self._use(await self._topics.get(name), request.subscription_name)
        return found

    def _addressed_at_once(
        self, request: danube.AckRequest | danube.NackRequest
    ) -> AnySubscription | None:
        """Returns the subscription of an acknowledgement; None if its topic is not open."""
        if not request.HasField("msg_id"):
            raise InvalidRequestError("the request has no msg_id")
        name = request.msg_id.topic_name
        topic = self._topics.find_open(name)
        if topic is None:
            return None
        self.guard.check(current_principal(), Permission.CONSUME, topic=name)
        return self._use(topic, request.subscription_name)

    def _use(self, topic: ServedTopic, name: str) -> AnySubscription:
        """Returns a subscription that the caller may use."""
        found = topic.subscription(name)
        self.guard.check_subscription(current_principal(), found, topic=topic.name)
        return found


def _unreadable() -> InvalidRequestError:
    return InvalidRequestError("the request cannot be decoded as this method's message")


def _stream(
    subscription: AnySubscription, consumer: ConsumerIdentity, consumers: ConsumerIds
) -> AsyncGenerator[list[bytes], None]:
    """Attaches a consumer; its messages as they are written, in Danube's form."""
    if isinstance(subscription, Dispatcher):
        outbox = subscription.attach(
            consumer.id,
            consumer.filters,
            active_elsewhere_at=partial(consumers.last_answer_at, consumer.id),
        )
        return _reliable(subscription, outbox, consumer)
    return _pushed(subscription, subscription.attach(consumer.id, consumer.filters), consumer)


async def _reliable(
    subscription: Dispatcher, outbox: Outbox[Sent], consumer: ConsumerIdentity
) -> AsyncGenerator[list[bytes], None]:
    encode_stored = DeliveredEncoder(consumer, subscription.receipts).encode
    count_out = subscription.counters.count_out
    large: list[int] = []

    def encoded(messages: list[tuple[Message, int]]) -> list[bytes]:
        answers: list[bytes] = []
        for message, attempt in messages:
            stored = encode_stored(message, attempt)
            if stored is not None:
                data, size = stored
                count_out(size)
            else:
                # Its body is damaged, or was replaced by its fields.
                record = subscription.readable(message)
                if record is None:
                    continue
                data = encode(record, message.offset, attempt, consumer, subscription.receipts)
                size = len(record.payload)
            if size > _LARGE_BYTES:
                large.append(message.offset)
            answers.append(data)
        return answers

    try:
        while items := await outbox.take():
            count = len(items)
            while items:
                if answers := encoded(await subscription.next_messages(outbox, items)):
                    yield answers
                del answers  # it has copies, and there may be nothing to send for long
                outbox.memory.written()
            subscription.written(outbox, count)
    finally:
        for offset in () if outbox.memory.is_ended else large:
            # Most clients take no message of over 4 MiB: their stream breaks, and they come again
            # for the same one. That has to end at some time.
            subscription.fail(offset, "the consumer's stream ended with this large message")
        subscription.detach(outbox)


async def _pushed(
    subscription: Fanout, outbox: Outbox[StreamMessage], consumer: ConsumerIdentity
) -> AsyncGenerator[list[bytes], None]:
    try:
        while records := await outbox.take(_WRITTEN_EVERY):
            for record in records:
                await outbox.memory.reserve(size := len(record.payload))
                outbox.memory.begin(size)
                subscription.counters.count_out(size)
                yield [encode(record, record.msg_id.topic_offset, 1, consumer, None)]
                outbox.memory.written()
            outbox.written(len(records))
    finally:
        subscription.detach(outbox)
