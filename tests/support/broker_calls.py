"""Clients of a whole broker on this loop, and stores that are slow or away at a chosen moment."""

import asyncio
import threading
from contextlib import asynccontextmanager, suppress

import grpc

from ister import wire
from ister.base.model import TopicName
from ister.errors import UnavailableError
from ister.wire import danube, ister_api
from tests.support.broker import Services, eventually

NAME, PARSED = "/default/t", TopicName.parse("/default/t")
DEAD = "/default/dead"
EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = range(4)
Code = grpc.StatusCode
REFUSALS = {
    Code.INVALID_ARGUMENT,
    Code.FAILED_PRECONDITION,
    Code.PERMISSION_DENIED,
    Code.ALREADY_EXISTS,
    Code.UNAVAILABLE,
}
AT_ONCE = {"base_redelivery_delay_ms": 0, "max_redelivery_delay_ms": 0, "backoff": "fixed"}
# Long enough for what goes wrong to go wrong, where nothing tells that it has gone right.
MOMENT = 0.4


class Held:
    """A call that waits in its thread until the test lets it go on.

    Args:
        real: What is called then.
        count: How many calls are held; later ones go straight through.
        is_stale: Call first, then wait: what is returned is old by then.
    """

    def __init__(self, real, *, count=1, is_stale=False):
        self._real = real
        self._left = count
        self._is_stale = is_stale
        self.begun = threading.Event()
        self.done = threading.Event()
        self._go_on = threading.Event()
        self.calls = 0
        self.was_in_time = True

    def __call__(self, *args, **more):
        self.calls += 1
        if self._left <= 0:
            return self._real(*args, **more)
        self._left -= 1
        try:
            answer = self._real(*args, **more) if self._is_stale else None
            self.begun.set()
            # On the loop nobody could ever let it go on.
            self.was_in_time = self._go_on.wait(60)
            return answer if self._is_stale else self._real(*args, **more)
        finally:
            self.done.set()

    async def is_reached(self):
        await eventually(self.begun.is_set)

    def go_on(self):
        self._go_on.set()

    async def is_done(self):
        await eventually(self.done.is_set)


def away(*args, **more):
    raise UnavailableError("the store is away")


class Noting:
    """A stream that notes the ids of what it delivers, for acknowledgements."""

    def __init__(self, stream, ids, consumer=None):
        self._stream = stream
        self._ids = ids
        self._consumer = consumer

    def __getattr__(self, name):
        return getattr(self._stream, name)

    async def read(self):
        found = await self._stream.read()
        if isinstance(found, danube.StreamMessage):
            self._ids[found.msg_id.topic_offset] = found.msg_id.broker_addr
        elif isinstance(found, ister_api.ConsumeResponse):
            for one in found.deliveries.messages:
                self._ids[one.offset] = f"#{self._consumer:x}.{one.token:016x}"
        return found


class Client:
    """What clients of one topic say to a broker."""

    ids = {}  # noqa: RUF012 - of all of them: they acknowledge what others got
    """By offset, the newest."""

    def __init__(self, services, topic=NAME):
        self.services = services
        self.topic = topic

    async def producer(self, name="p", *, is_reliable=True):
        """Registers a producer; what sends its messages."""
        created = await self.services.producers.CreateProducer(
            danube.ProducerRequest(
                request_id=1,
                topic_name=self.topic,
                producer_name=name,
                dispatch_strategy=int(is_reliable),
            )
        )

        def send(payload=b"x", *, key=None, timeout=60, id=created.producer_id, by=name, **attrs):
            return self.services.producers.SendMessage(
                danube.StreamMessage(
                    request_id=1,
                    msg_id=danube.MsgID(producer_id=id, topic_name=self.topic),
                    payload=payload,
                    publish_time=1,
                    producer_name=by,
                    routing_key=key,
                    attributes={name.replace("_", "-"): text for name, text in attrs.items()},
                ),
                timeout=timeout,
            )

        return send

    async def subscribe(self, consumer="c", *, kind=EXCLUSIVE, filters=(), name="s"):
        answer = await self.services.consumers.Subscribe(
            danube.ConsumerRequest(
                request_id=1,
                topic_name=self.topic,
                consumer_name=consumer,
                subscription=name,
                subscription_type=kind,
                key_filters=list(filters),
            )
        )
        return answer.consumer_id

    def receive(self, consumer):
        stream = self.services.consumers.ReceiveMessages(
            danube.ReceiveRequest(request_id=1, consumer_id=consumer)
        )
        return Noting(stream, self.ids)

    def id_of(self, offset):
        return danube.MsgID(
            topic_name=self.topic, topic_offset=offset, broker_addr=self.ids.get(offset, "")
        )

    async def ack(self, *offsets, name="s"):
        for offset in offsets:
            await self.services.consumers.Ack(
                danube.AckRequest(
                    request_id=1,
                    msg_id=self.id_of(offset),
                    subscription_name=name,
                )
            )

    async def nack(self, offset, name="s"):
        await self.services.consumers.Nack(
            danube.NackRequest(
                request_id=1,
                msg_id=self.id_of(offset),
                subscription_name=name,
                reason="bad",
            )
        )

    async def consume(self, services=None, **opening):
        """An open stream of Ister's own."""
        stream = (services or self.services).delivery.Consume()
        opening = {"subscription": "s", "consumer": "c", "kind": "exclusive", **opening}
        await stream.write(
            ister_api.ConsumeRequest(
                open=ister_api.OpenConsumer(topic=self.topic, start="earliest", **opening)
            )
        )
        opened = await stream.read()
        assert opened.WhichOneof("step") == "opened"
        return Noting(stream, self.ids, opened.opened.consumer_id)

    async def settle(self):
        """What was said before on this connection has been heard."""
        for _ in range(3):
            await self.services.admin.Info(ister_api.InfoRequest())
            await asyncio.sleep(0.01)

    async def give_up(self, call):
        call.cancel()
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await call
        await self.settle()


async def read(stream, count, *, within=60):
    """The next messages of a stream."""
    got = []
    async with asyncio.timeout(within):
        while len(got) < count:
            message = await stream.read()
            assert message is not grpc.aio.EOF, f"the stream ended after {len(got)} of {count}"
            got.append(message)
    return got


async def offsets(stream, count):
    return [message.msg_id.topic_offset for message in await read(stream, count)]


async def status(call):
    """What a call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return Code.OK


async def until_ok(make_call):
    """Does what clients do: UNAVAILABLE is tried again."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await make_call()
            except grpc.aio.AioRpcError as error:
                if error.code() is not Code.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.02)


@asynccontextmanager
async def a_slow_reader(listening):
    """Services on a connection that takes little in advance of what is read."""
    services = Services.__new__(Services)
    channel = grpc.aio.insecure_channel(
        f"127.0.0.1:{listening.grpc}",
        options=[("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)],
    )
    services.channel = channel
    services.consumers = wire.stub(channel, "danube.ConsumerService")
    services.delivery = wire.stub(channel, "ister.Delivery")
    services.admin = wire.stub(channel, "ister.Admin")
    try:
        yield services
    finally:
        await channel.close()


def subscription_of(broker, name="s", topic=NAME):
    return broker.topics.find_open(topic).subscription(name)


def kept(topics, name="s", topic=NAME):
    """A subscription as the store has it: its cursor, and all that is acknowledged up to 100."""
    incarnation = topics.find_open(topic).incarnation if topics.find_open(topic) else ""
    stored = topics.store.load(TopicName.parse(topic), incarnation).get(name)
    if stored is None:
        return None
    acked = set(range(stored.cursor))
    for start, end in (stored.saved or {}).get("acked", ()):
        acked.update(range(start, end))
    return stored.cursor, acked


def records_of(broker, topic):
    """All messages of a topic; none if it is not there."""
    served = broker.topics.find_open(topic)
    if served is None or served.topic is None:
        return []
    return [message.record for message in served.topic.read(0, end=served.topic.wal.visible)]
