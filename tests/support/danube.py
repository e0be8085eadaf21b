"""The real `danube-client` and the broker's admin calls, as tests use them.

    async def scenario():
        async with connect(broker) as danube:
            inbox = await danube.consumer(TOPIC, "reader")
            producer = await danube.producer(TOPIC)
            await producer.send(b"hello")
            [message] = await inbox.take(1)

    run(scenario())

`Danube` is one client with everything that was made through it, closed with it: no task, stream or
channel outlives its block. The client is used as it is; where a test has to count its calls, it
wraps a method of one object. `Inbox` is a consumer with its queue. Waiting is always for something
to happen, with a generous limit; that something does *not* happen is looked at for a moment only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio
from danube import Consumer, DanubeClient, DispatchStrategy, Producer, SubType
from danube.auth_service import AuthService
from danube.connection_manager import ConnectionManager, ConnectionOptions
from danube.health_check import HealthCheckService
from danube.lookup_service import LookupService
from danube.proto.DanubeApi_pb2 import StreamMessage

from ister import wire
from ister.client import AsyncClient
from ister.wire import danube, danube_admin, ister_api
from tests.support.waiting import PATIENCE_SECONDS, run
from tests.support.waiting import eventually_async as eventually

__all__ = [
    "EXCLUSIVE",
    "FAILOVER",
    "KEY_SHARED",
    "PATIENCE_SECONDS",
    "SHARED",
    "Danube",
    "Inbox",
    "IsterSession",
    "collect",
    "connect",
    "eventually",
    "numbered",
    "offsets",
    "refused",
    "run",
    "texts",
    "topic_for",
]

"""How long to wait for what has to happen: two noisy cores, and clients that back off."""
SILENCE_SECONDS = 0.4
"""How long to look at what must not happen."""

EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = (
    SubType.EXCLUSIVE,
    SubType.SHARED,
    SubType.FAILOVER,
    SubType.KEY_SHARED,
)

# The client logs every failed attempt, thousands a second while a broker is down.
logging.getLogger("danube").setLevel(logging.CRITICAL)

T = TypeVar("T")


def topic_for(request: Any) -> str:
    """A topic that no other test uses, from a pytest request."""
    return "/default/" + re.sub(r"[^A-Za-z0-9_-]+", "-", request.node.name).strip("-")


def numbered(count: int, start: int = 0) -> list[str]:
    """Texts to publish."""
    return [f"message {number}" for number in range(start, start + count)]


def texts(messages: Iterable[StreamMessage]) -> list[str]:
    """The payloads."""
    return [message.payload.decode() for message in messages]


def offsets(messages: Iterable[StreamMessage]) -> list[int]:
    """The offsets."""
    return [message.msg_id.topic_offset for message in messages]


async def refused(call: Awaitable[Any]) -> grpc.StatusCode:
    """The status that a call is refused with."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        assert error.details(), "a refusal without a word why"
        return error.code()
    raise AssertionError(f"was not refused: {answer}")


class Inbox:
    """A consumer and what it received and nobody took yet."""

    def __init__(self, consumer: Consumer, queue: asyncio.Queue[StreamMessage]) -> None:
        self.consumer = consumer
        self.queue = queue

    @property
    def ids(self) -> dict[str, int]:
        """The consumer's id by partition."""
        return {name: part.consumer_id for name, part in self.consumer._consumers.items()}

    async def take(
        self, count: int, *, ack: bool = True, within: float = PATIENCE_SECONDS
    ) -> list[StreamMessage]:
        """The next `count` messages, acknowledged unless told otherwise."""
        taken: list[StreamMessage] = []
        try:
            async with asyncio.timeout(within):
                while len(taken) < count:
                    message = await self.queue.get()
                    taken.append(message)
                    if ack:
                        await self.ack(message)
        except TimeoutError:
            came = [(m.msg_id.topic_offset, bytes(m.payload[:24])) for m in taken]
            raise AssertionError(
                f"{len(taken)} of {count} messages came within {within} s: {came}"
            ) from None
        return taken

    async def one(self, *, ack: bool = False, within: float = PATIENCE_SECONDS) -> StreamMessage:
        """The next message, not acknowledged unless told otherwise."""
        return (await self.take(1, ack=ack, within=within))[0]

    async def expect_silence(self, seconds: float = SILENCE_SECONDS) -> None:
        """Nothing comes for a while."""
        try:
            message = await asyncio.wait_for(self.queue.get(), seconds)
        except TimeoutError:
            return
        raise AssertionError(
            f"offset {message.msg_id.topic_offset} came: {bytes(message.payload[:40])!r}"
        )

    async def ack(self, *messages: StreamMessage) -> None:
        """Acknowledges, in the order given."""
        for message in messages:
            await self.consumer.ack(message)

    async def nack(
        self, message: StreamMessage, *, delay_ms: int | None = None, reason: str | None = None
    ) -> None:
        """Says that it could not be processed."""
        await self.consumer.nack(message, delay_ms, reason)

    async def close(self) -> None:
        """Ends the stream; the broker hears nothing else of it."""
        await self.consumer.close()


async def collect(inboxes: Sequence[Inbox], count: int) -> list[list[StreamMessage]]:
    """Acknowledges what comes to any of the inboxes until it is `count` messages; by inbox."""
    taken: list[list[StreamMessage]] = [[] for _ in inboxes]

    async def enough() -> bool:
        for inbox, into in zip(inboxes, taken, strict=True):
            while not inbox.queue.empty():
                message = inbox.queue.get_nowait()
                await inbox.ack(message)
                into.append(message)
        return sum(map(len, taken)) >= count

    await eventually(enough)
    return taken


class Danube:
    """A client of one broker, its producers and consumers, and stubs for everything else."""

    def __init__(self, address: str, *, own_connection: bool) -> None:
        self.address = address
        connections = (
            _OwnConnections(ConnectionOptions())
            if own_connection
            else ConnectionManager(ConnectionOptions())
        )
        auth = AuthService(connections)
        # What `DanubeClientBuilder.build` does, with the connections above.
        self.client = DanubeClient(
            uri=f"http://{address}",
            connection_manager=connections,
            lookup_service=LookupService(connections, auth),
            health_check_service=HealthCheckService(connections, auth),
            auth_service=auth,
        )
        self.channel = grpc.aio.insecure_channel(address)
        self.topics = wire.stub(self.channel, "danube_admin.TopicAdmin")
        self.namespaces = wire.stub(self.channel, "danube_admin.NamespaceAdmin")
        self.brokers = wire.stub(self.channel, "danube_admin.BrokerAdmin")
        self.admin = wire.stub(self.channel, "ister.Admin")
        self.discovery = wire.stub(self.channel, "danube.Discovery")
        self.raw_producers = wire.stub(self.channel, "danube.ProducerService")
        self.raw_consumers = wire.stub(self.channel, "danube.ConsumerService")
        self.health = wire.stub(self.channel, "danube.HealthCheck")
        self._producers: list[Producer] = []
        self._consumers: list[Consumer] = []

    # -- the real client --------------------------------------------------------------------

    async def producer(
        self,
        topic: str,
        name: str = "producer",
        *,
        reliable: bool = True,
        partitions: int = 0,
        subject: str | None = None,
    ) -> Producer:
        """A producer; its topic is made if it is not there."""
        builder = self.client.new_producer().with_topic(topic).with_name(name)
        builder.with_dispatch_strategy(
            DispatchStrategy.RELIABLE if reliable else DispatchStrategy.NON_RELIABLE
        )
        if partitions:
            builder.with_partitions(partitions)
        if subject is not None:
            builder.with_schema_subject(subject)
        producer = builder.build()
        self._producers.append(producer)
        await producer.create()
        return producer

    async def consumer(
        self,
        topic: str,
        name: str = "consumer",
        *,
        subscription: str = "sub",
        kind: SubType = EXCLUSIVE,
        filters: Sequence[str] = (),
        attached: bool = True,
    ) -> Inbox:
        """A consumer that receives from now on.

        The client returns before its stream is open. Tests that count consumers have to wait until
        the broker has it, and they all do unless they say otherwise.
        """
        consumer = await self.subscribe(
            topic, name, subscription=subscription, kind=kind, filters=filters
        )
        inbox = Inbox(consumer, await consumer.receive())
        if attached:
            for partition in inbox.ids:
                await self.wait_attached(partition, name, subscription)
        return inbox

    async def subscribe(
        self,
        topic: str,
        name: str = "consumer",
        *,
        subscription: str = "sub",
        kind: SubType = EXCLUSIVE,
        filters: Sequence[str] = (),
    ) -> Consumer:
        """A consumer that has subscribed and does not receive yet."""
        builder = self.client.new_consumer().with_topic(topic).with_consumer_name(name)
        builder.with_subscription(subscription).with_subscription_type(kind)
        builder.with_key_filters(list(filters))
        consumer = builder.build()
        self._consumers.append(consumer)
        await consumer.subscribe()
        return consumer

    async def send(self, topic: str, payloads: Iterable[str], *, name: str = "producer") -> None:
        """Publishes texts, one after the other."""
        producer = await self.producer(topic, name)
        for payload in payloads:
            await producer.send(payload.encode())

    # -- the broker's own words -------------------------------------------------------------

    async def create_topic(self, topic: str, *, reliable: bool = True) -> None:
        """A topic without a producer."""
        answer = await self.topics.CreateTopic(
            danube_admin.NewTopicRequest(name=topic, dispatch_strategy=int(reliable))
        )
        assert answer.success

    async def unload(self, topic: str) -> None:
        """Hands the topic over, here to the same broker."""
        answer = await self.topics.UnloadTopic(danube_admin.TopicRequest(name=topic))
        assert answer.success

    async def subscriptions(self, topic: str) -> list[str]:
        """Names of subscriptions, as the broker lists them."""
        answer = await self.topics.ListSubscriptions(danube_admin.TopicRequest(name=topic))
        return list(answer.subscriptions)

    async def partitions(self, topic: str) -> list[str]:
        """What `TopicPartitions` says."""
        answer = await self.discovery.TopicPartitions(
            danube.TopicLookupRequest(request_id=1, topic=topic)
        )
        return list(answer.partitions)

    async def set_failure_policy(
        self,
        topic: str,
        *,
        subscription: str = "sub",
        poison: str = "Block",
        retries: int = 5,
        ack_timeout_ms: int = 30_000,
        delay_ms: int = 50,
        max_delay_ms: int = 60_000,
        exponential: bool = False,
        dead_letter_topic: str | None = None,
    ) -> None:
        """A subscription's failure policy, from now on."""
        policy = danube_admin.SubscriptionFailurePolicy(
            max_redelivery_count=retries,
            ack_timeout_ms=ack_timeout_ms,
            base_redelivery_delay_ms=delay_ms,
            max_redelivery_delay_ms=max_delay_ms,
            backoff_strategy=int(exponential),
            poison_policy={"DeadLetter": 0, "Block": 1, "Drop": 2}[poison],
        )
        if dead_letter_topic is not None:
            policy.dead_letter_topic = dead_letter_topic
        answer = await self.topics.SetSubscriptionFailurePolicy(
            danube_admin.SetSubscriptionFailurePolicyRequest(
                topic=topic, subscription=subscription, failure_policy=policy
            )
        )
        assert answer.success

    async def set_window(self, topic: str, messages: int, *, subscription: str = "sub") -> None:
        """How many messages a consumer gets before it has acknowledged some, from now on."""
        answer = await self.topics.SetSubscriptionDispatchConfig(
            danube_admin.SetSubscriptionDispatchConfigRequest(
                topic=topic,
                subscription=subscription,
                dispatch_config=danube_admin.SubscriptionDispatchConfig(
                    max_unacked_messages=messages
                ),
            )
        )
        assert answer.success

    async def set_policies(self, topic: str, **policies: int) -> None:
        """A topic's own bounds, from now on."""
        await self.admin.SetTopicPolicies(
            ister_api.SetPoliciesRequest(name=topic, policies=json.dumps(policies))
        )

    async def seek(self, topic: str, subscription: str = "sub", **to: Any) -> None:
        """Moves a subscription: `offset=`, `publish_time_ms=`, `earliest=True`, `latest=True`."""
        await self.admin.Seek(ister_api.SeekRequest(topic=topic, subscription=subscription, **to))

    async def describe(self, topic: str, subscription: str = "sub") -> Any:
        """What the broker says about a subscription: cursor, lag, in flight, blocked, …"""
        return await self.admin.DescribeSubscription(
            ister_api.SubscriptionName(topic=topic, subscription=subscription)
        )

    async def wait_attached(self, topic: str, name: str, subscription: str = "sub") -> None:
        """Waits until a consumer has its stream."""

        async def is_attached() -> bool:
            return name in (await self.describe(topic, subscription)).consumers

        await eventually(is_attached, every=0.01)

    async def wait_for_cursor(self, topic: str, cursor: int, subscription: str = "sub") -> None:
        """Waits until everything below `cursor` is acknowledged."""

        async def is_there() -> bool:
            return (await self.describe(topic, subscription)).cursor == cursor

        await eventually(is_there)

    async def close(self) -> None:
        """Ends everything that was made here. May be called twice."""
        for producer in self._producers:
            await producer.close()
        tasks = []
        for consumer in self._consumers:
            # Before their tasks are cancelled: gRPC may tell a task another error instead, and
            # then it would go on. Not by the client's own call, which takes its time.
            consumer._shutdown.set()
            for part in consumer._consumers.values():
                part.stop()
            for task in consumer._tasks:
                task.cancel()
                tasks.append(task)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.channel.close()
        # The client has no call for it: its channels live as long as the process.
        connections = self.client.connection_manager._connections
        await asyncio.gather(*(held.channel.close() for held in connections.values()))
        connections.clear()
        self._producers.clear()
        self._consumers.clear()


class IsterSession(Danube):
    """The same programs with Ister's client; operators' calls are made as above."""

    def __init__(self, address: str, *, own_connection: bool) -> None:
        super().__init__(address, own_connection=own_connection)
        self._own = AsyncClient(address)
        self._made: list[_IsterConsumer] = []

    async def producer(
        self,
        topic: str,
        name: str = "producer",
        *,
        reliable: bool = True,
        partitions: int = 0,
        subject: str | None = None,
    ) -> Any:
        """Like that of `Danube`, of topics with a log and without a schema."""
        assert reliable
        assert subject is None
        await self._own.admin.create_topic(topic, partitions=partitions)
        return _IsterProducer(await self._own.producer(topic, name=name))

    async def consumer(
        self,
        topic: str,
        name: str = "consumer",
        *,
        subscription: str = "sub",
        kind: SubType = EXCLUSIVE,
        filters: Sequence[str] = (),
        attached: bool = True,
    ) -> Inbox:
        """Like that of `Danube`: it begins at the end, and has its stream when this returns."""
        consumer = await self._own.consumer(
            topic,
            subscription,
            name=name,
            kind=kind.name.lower(),
            key_filters=filters,
            start="latest",
        )
        made = _IsterConsumer(consumer)
        self._made.append(made)
        return Inbox(made, made.queue)

    async def close(self) -> None:
        """See `Danube.close`."""
        for consumer in self._made:
            await consumer.close()
        await self._own.close()
        await super().close()


class _IsterProducer:
    """A producer of Ister's client with the methods of Danube's."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer

    async def send(self, payload: bytes, attributes: Any = None) -> int:
        return await self.send_with_key(payload, attributes, None)

    async def send_with_key(self, payload: bytes, attributes: Any, key: str | None) -> int:
        return await self._producer.publish(payload, attributes=attributes, routing_key=key)


class _IsterConsumer:
    """A consumer of Ister's client with the methods of Danube's, and its messages."""

    def __init__(self, consumer: Any) -> None:
        self.queue: asyncio.Queue[StreamMessage] = asyncio.Queue()
        self._consumer = consumer
        self._held: dict[tuple[str, int], Any] = {}
        self._task = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        async for message in self._consumer:
            self._held[message.topic, message.offset] = message
            made = StreamMessage(
                request_id=message.offset,
                payload=message.payload,
                publish_time=int(message.publish_time.timestamp() * 1000),
                producer_name=message.producer_name,
                attributes=message.attributes,
                routing_key=message.routing_key,
            )
            made.msg_id.topic_name, made.msg_id.topic_offset = message.topic, message.offset
            self.queue.put_nowait(made)

    def _own(self, message: StreamMessage) -> Any:
        return self._held[message.msg_id.topic_name, message.msg_id.topic_offset]

    async def ack(self, message: StreamMessage) -> None:
        await self._consumer.ack(self._own(message))

    async def nack(self, message: StreamMessage, delay_ms: int | None, reason: str | None) -> None:
        delay = None if delay_ms is None else delay_ms / 1000
        await self._consumer.nack(self._own(message), delay=delay, reason=reason)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._consumer.close()


class _OwnConnections(ConnectionManager):
    """Connections that are not shared with other clients of this process."""

    def _create_channel(self, connect_url: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(
            connect_url.removeprefix("http://"), options=[("grpc.use_local_subchannel_pool", 1)]
        )


@asynccontextmanager
async def connect(
    broker: Any, kind: type[Danube] = Danube, *, own_connection: bool = False
) -> AsyncIterator[Danube]:
    """A client of `broker`, with everything made through it ended behind the block.

    Args:
        broker: Has an `address`, as host:port.
        kind: Whose client: `Danube`, which is Danube's, or `IsterSession`.
        own_connection: Whether the client has a TCP connection of its own. Channels to the same
            address share one otherwise, whichever client they belong to.
    """
    session = kind(broker.address, own_connection=own_connection)
    try:
        # Connections to an address are shared, and so is their pause after a failure: one that was
        # made while the broker was down fails for a while after it is back.
        await asyncio.wait_for(session.channel.channel_ready(), PATIENCE_SECONDS)
        yield session
    finally:
        await session.close()
