"""Consumers that do not read: what they are sent takes memory, which has a limit.

Memory is that of the broker's process. Compiled loops, which the broker loads once it has read so
much, are left out: they take as much memory as these tests measure.
"""

import asyncio
import threading
import time
from contextlib import asynccontextmanager, contextmanager

import grpc
import pytest

from ister import wire
from ister.base.limits import MIB
from ister.client import AsyncClient
from ister.wire import danube, ister_api
from tests.servers.broker import BrokerProcess
from tests.support.danube import run
from tests.support.scale import IS_NIGHTLY, nightly

TOPIC = "/default/large"
NEWCOMER_SECONDS = 30.0
"""Within which somebody has all messages who comes behind streams that nobody reads."""
EXCESS = 1.5
"""How much memory there may be above that of the idle broker, as a multiple of the budget."""
CHANNELS = 8
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
# The budget in MiB, the size of a message, streams that do not read, streams that read.
SIZES = [(64, 8 * MIB, 20, 12), nightly(64, 9_900_000, 200, 150)]


class Danubes:
    """Consumers by danube.ConsumerService."""

    @staticmethod
    async def subscribe(channel, name):
        call = channel.unary_unary(
            "/danube.ConsumerService/Subscribe",
            request_serializer=danube.ConsumerRequest.SerializeToString,
            response_deserializer=danube.ConsumerResponse.FromString,
        )
        request = danube.ConsumerRequest(topic_name=TOPIC, consumer_name=name, subscription=name)
        return (await call(request)).consumer_id

    @staticmethod
    async def open(channel, name, consumer):
        return channel.unary_stream(
            "/danube.ConsumerService/ReceiveMessages",
            request_serializer=danube.ReceiveRequest.SerializeToString,
            response_deserializer=danube.StreamMessage.FromString,
        )(danube.ReceiveRequest(consumer_id=consumer))

    @staticmethod
    def offsets(answer):
        return [answer.msg_id.topic_offset]


class Isters:
    """Consumers by ister.Delivery."""

    @staticmethod
    async def subscribe(channel, name):
        (await Isters.open(channel, name, None)).cancel()

    @staticmethod
    async def open(channel, name, consumer):
        call = wire.services.Delivery.Consume.open(channel, metadata=())
        opening = ister_api.OpenConsumer(
            topic=TOPIC, subscription=name, consumer=name, start="latest"
        )
        await call.write(ister_api.ConsumeRequest(open=opening))
        assert (await call.read()).WhichOneof("step") == "opened"
        return call

    @staticmethod
    def offsets(answer):
        return [one.offset for one in answer.deliveries.messages]


@contextmanager
def growth(broker):
    """Yields a function that says by how much the broker's memory has grown, at the most."""
    before, highest, is_over = broker.rss_bytes(), [0], threading.Event()

    def watch():
        while not is_over.wait(0.02):
            highest[0] = max(highest[0], broker.rss_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield lambda: highest[0] - before
    finally:
        is_over.set()
        watching.join()


class Clients:
    """Subscriptions of one topic of large messages, and their streams."""

    def __init__(self, broker, door, producer, channels, size):
        self.broker, self._door, self._size = broker, door, size
        self._producer, self._channels = producer, channels
        self._consumers = {}
        self.published = 0

    def _channel(self, name):
        return self._channels[hash(name) % CHANNELS]

    async def subscribe(self, names):
        for name in names:
            self._consumers[name] = await self._door.subscribe(self._channel(name), name)

    async def publish(self, count):
        for _ in range(count):
            await self._producer.send(bytes(self._size))
        await self._producer.flush()
        self.published += count

    async def open(self, name):
        """A stream that nobody reads."""
        return await self._door.open(self._channel(name), name, self._consumers[name])

    async def read_all(self, name):
        """Receives everything, by one stream after the other, as Danube's clients do."""
        found = set()
        while len(found) < self.published:
            call = await self.open(name)
            try:
                while len(found) < self.published:
                    answer = await call.read()
                    if answer is grpc.aio.EOF:
                        break
                    found.update(self._door.offsets(answer))
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.CANCELLED, error
            finally:
                call.cancel()
        assert found == set(range(self.published))


@asynccontextmanager
async def clients_of(broker, door, size):
    channels = [grpc.aio.insecure_channel(broker.address, options=OPTIONS) for _ in range(CHANNELS)]
    try:
        async with (
            AsyncClient(broker.address) as client,
            client.producer(TOPIC, create=True) as producer,
        ):
            yield Clients(broker, door, producer, channels, size)
    finally:
        for channel in channels:
            await channel.close()


@pytest.fixture
def serve(tmp_path):
    @contextmanager
    def start(budget):
        with BrokerProcess(
            tmp_path,
            settings={"dispatch": {"memory_budget_mb": budget}},
            environment={"NUMBA_DISABLE_JIT": "1"},
        ) as broker:
            yield broker

    return start


@pytest.mark.parametrize("door", [Danubes, Isters])
@pytest.mark.parametrize(("budget", "size", "stalled", "reading"), SIZES)
def test_streams_that_nobody_reads_stay_within_the_budget_and_others_go_on(
    serve, door, budget, size, stalled, reading
):
    """Goal: what is being written counts, and a client that does not read holds up no other.

    Method: a consumer has read something; then streams are opened that nobody reads, and more is
    published. By night, a consumer that comes behind them is served within seconds as well.
    """
    names = [f"stalled-{number}" for number in range(stalled)]

    async def scenario(broker):
        async with clients_of(broker, door, size) as clients:
            await clients.subscribe([*names, "reader", "late"])
            await clients.publish(3)
            reader, found = await clients.open("reader"), []
            while len(found) < 3:
                found += door.offsets(await reader.read())
            with growth(broker) as grown:
                calls = [await clients.open(name) for name in names]
                await clients.publish(2)
                while len(found) < 5:
                    found += door.offsets(await reader.read())
                assert found == [0, 1, 2, 3, 4]
                if IS_NIGHTLY:
                    begun = time.monotonic()
                    await clients.read_all("late")
                    took = time.monotonic() - begun
                    print(f"a newcomer has all after {took:.1f} s")
                    assert took <= NEWCOMER_SECONDS
                print(f"{grown() / MIB:.0f} MiB above idle, budget {budget} MiB")
                assert grown() <= EXCESS * budget * MIB
            for call in [reader, *calls]:
                call.cancel()

    with serve(budget) as broker:
        run(scenario(broker), within=540)


@pytest.mark.parametrize("door", [Danubes, Isters])
@pytest.mark.parametrize(("budget", "size", "stalled", "reading"), SIZES)
def test_many_streams_that_are_read_stay_within_the_budget(
    serve, door, budget, size, stalled, reading
):
    names = [f"reader-{number}" for number in range(reading)]

    async def scenario(broker):
        async with clients_of(broker, door, size) as clients:
            await clients.subscribe(names)
            await clients.publish(2)
            with growth(broker) as grown:
                await asyncio.gather(*map(clients.read_all, names))
                print(f"{grown() / MIB:.0f} MiB above idle, budget {budget} MiB")
                assert grown() <= EXCESS * budget * MIB

    with serve(budget) as broker:
        run(scenario(broker), within=540)
