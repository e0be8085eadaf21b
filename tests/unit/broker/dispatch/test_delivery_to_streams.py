"""What consumers of a whole broker get: all that is theirs, and nothing that is not."""

import asyncio
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from ister.base.limits import MIB
from ister.broker.dispatch import prefetch as reading
from ister.subscription.policy import FailurePolicy
from ister.wire import ister_api
from tests.support.broker import a_broker, eventually
from tests.support.broker_calls import (
    AT_ONCE,
    KEY_SHARED,
    NAME,
    Client,
    Code,
    a_slow_reader,
    offsets,
    read,
    subscription_of,
)
from tests.support.cases import each


@each("before", [None, "zz-*"])
async def test_a_consumer_that_has_subscribed_and_has_no_stream_yet_loses_nothing(tmp_path, before):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        client = Client(services)
        send = await client.producer()
        one = await client.subscribe("one", kind=KEY_SHARED, filters=["eu-*"])
        stream = client.receive(one)
        await eventually(lambda: subscription_of(broker).attached)
        if before is not None:
            await client.subscribe("two", kind=KEY_SHARED, filters=[before])
        two = await client.subscribe("two", kind=KEY_SHARED, filters=["us-*"])
        await send(b"for two", key="us-1")
        await send(b"for one", key="eu-1")
        # By now the one before it has been decided about.
        assert [m.payload for m in await read(stream, 1)] == [b"for one"]
        assert subscription_of(broker).delivery.cursor == 0
        assert [m.payload for m in await read(client.receive(two), 1)] == [b"for two"]


@asynccontextmanager
async def danubes(client, consumer):
    """Danube's stream of a consumer; what gives the next offsets."""
    stream = client.receive(consumer)

    async def more():
        return await offsets(stream, 1)

    try:
        yield more
    finally:
        stream.cancel()


@asynccontextmanager
async def isters(client, consumer):
    """The same of Ister's own."""
    stream = await client.consume()

    async def more():
        [answer] = await read(stream, 1)
        return [message.offset for message in answer.deliveries.messages]

    try:
        yield more
    finally:
        stream.cancel()


@each("streaming", [danubes, isters])
async def test_what_was_never_written_to_a_stream_has_not_failed(tmp_path, streaming):
    """A consumer that is paused is not given up message by message, unseen."""
    policy = FailurePolicy(max_redelivery_count=0, ack_timeout_ms=100, poison="drop", **AT_ONCE)
    count = 40

    async with (
        a_broker(tmp_path, mode="memory") as (broker, services, listening),
        a_slow_reader(listening) as slow,
    ):
        client, paused = Client(services), Client(slow)
        send = await client.producer()
        consumer = await client.subscribe()
        subscription = subscription_of(broker)
        await subscription.set_policy(policy)
        await asyncio.gather(*(send(b"x" * 300_000) for _ in range(count)))
        async with streaming(paused, consumer) as more:
            assert (await more())[0] == 0
            await asyncio.sleep(0.6)  # six times as long as a consumer has
        await eventually(lambda: not subscription.attached)
        given_up = subscription.delivery.cursor
        assert given_up < 15, "messages count as failed that nobody has seen"
        seen = set()
        async with streaming(client, consumer) as more:
            while not seen >= set(range(given_up, count)):
                found = await more()
                seen.update(found)
                await client.ack(*found)
        await eventually(lambda: subscription.delivery.cursor == count)


@each("streaming", [danubes, isters])
async def test_after_a_seek_nothing_from_before_it_comes_first(tmp_path, streaming, monkeypatch):
    # Much is on its way at once.
    monkeypatch.setattr(reading, "_AHEAD_BYTES_MIN", 16 * MIB)

    async with (
        a_broker(tmp_path, mode="memory") as (broker, services, listening),
        a_slow_reader(listening) as slow,
    ):
        client = Client(services)
        send = await client.producer()
        consumer = await client.subscribe()
        await asyncio.gather(*(send(b"x" * 150_000) for _ in range(80)))
        subscription = subscription_of(broker)
        async with streaming(Client(slow), consumer) as more:
            first = await more()
            await eventually(lambda: subscription.delivery.stats().in_flight > 30)
            await services.admin.Seek(
                ister_api.SeekRequest(topic=NAME, subscription="s", offset=50)
            )
            got = []
            while len(got) < 20:
                got += await more()
        # What had left the broker before cannot be called back.
        late = [offset for offset in got if offset < 50]
        assert late == list(range(len(first), len(first) + len(late)))
        assert len(late) < 16, f"came before what was sought: {late}"
        assert got[len(late) :] == list(range(50, 50 + len(got) - len(late)))


async def test_acks_and_seeks_of_one_subscription_leave_another_as_it_was(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        client = Client(services)
        send = await client.producer()
        moved = client.receive(await client.subscribe("one", name="moved"))
        left = client.receive(await client.subscribe("two", name="left"))
        for _ in range(3):
            await send()
        assert await offsets(moved, 3) == [0, 1, 2]
        await client.ack(0, 1, 2, name="moved")
        assert subscription_of(broker, "moved").delivery.cursor == 3
        assert subscription_of(broker, "left").delivery.cursor == 0
        assert await offsets(left, 3) == [0, 1, 2]
        await client.ack(0, 1, name="left")
        await services.admin.Seek(
            ister_api.SeekRequest(topic=NAME, subscription="moved", earliest=True)
        )
        assert await offsets(moved, 3) == [0, 1, 2]
        await send()
        # Nothing comes to it twice, and it still owes what it has not acknowledged.
        assert await offsets(left, 1) == [3]
        assert subscription_of(broker, "left").delivery.cursor == 2
        assert subscription_of(broker, "moved").delivery.cursor == 0


async def test_a_stream_that_is_refused_leaves_nobody_attached(tmp_path):
    settings = {"broker": {"limits": {"max_connections": 1}}}
    async with a_broker(tmp_path, settings, mode="memory") as (broker, services, _):
        client, other = Client(services), Client(services, "/default/u")
        await client.producer()
        await other.producer()
        late, quick = await client.subscribe(), await other.subscribe()
        topics, go_on, is_asked = broker.topics, asyncio.Event(), asyncio.Event()
        real = topics.get

        async def slow(name):
            if name == NAME:  # as one that has to be opened first
                is_asked.set()
                await go_on.wait()
            return await real(name)

        topics.get = slow
        stream = client.receive(late)
        with suppress(TimeoutError):
            await asyncio.wait_for(is_asked.wait(), 2)
        taken = other.receive(quick)
        await eventually(lambda: subscription_of(broker, topic="/default/u").attached)
        go_on.set()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await read(stream, 1)
        assert refused.value.code() is Code.RESOURCE_EXHAUSTED
        topics.get = real
        assert subscription_of(broker).attached == []
        taken.cancel()
        await eventually(lambda: not subscription_of(broker, topic="/default/u").attached)
        # And the place is free for the one that was refused.
        again = client.receive(late)
        await eventually(lambda: subscription_of(broker).attached == [late])
        again.cancel()


async def test_nothing_is_held_where_nothing_is_owed(tmp_path):
    settings = {"broker": {"consumer_grace_seconds": 1}}
    async with a_broker(tmp_path, settings, mode="memory") as (broker, services, _):
        client = Client(services)
        send = await client.producer()
        one = await client.subscribe("one", kind=KEY_SHARED, filters=["eu-*"])
        two = await client.subscribe("two", kind=KEY_SHARED, filters=["us-*"])
        stays, goes = client.receive(one), client.receive(two)
        subscription = subscription_of(broker)
        await eventually(lambda: len(subscription.attached) == 2)
        goes.cancel()
        await eventually(lambda: subscription.attached == [one])
        for number in range(5):
            await send(b"x" * 1000, key=f"us-{number}")
        await eventually(lambda: subscription.prefetcher.held_bytes > 5000)
        # Its consumer does not come back: they are passed over.
        await eventually(lambda: subscription.delivery.cursor == 5)
        assert subscription.prefetcher.held_bytes == 0
        assert subscription.prefetcher.held == {}
        stays.cancel()
