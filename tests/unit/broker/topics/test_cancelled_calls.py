"""Calls whose client has given up, and stores that are away: work is completed, or not begun."""

import asyncio
from contextlib import asynccontextmanager

from ister.wire import danube_admin, ister_api
from tests.support.broker import a_broker, eventually
from tests.support.broker_calls import (
    MOMENT,
    NAME,
    SHARED,
    Client,
    Code,
    Held,
    away,
    kept,
    offsets,
    read,
    records_of,
    status,
    subscription_of,
    until_ok,
)
from tests.support.cases import each


@asynccontextmanager
async def given_up(client, store, method, call):
    """Within the block, work that nobody waits for any more stands still in the store."""
    held = Held(getattr(store, method))
    setattr(store, method, held)
    calling = call()
    await held.is_reached()
    await client.give_up(calling)
    yield
    held.go_on()
    await held.is_done()


def delete(services):
    return services.topics.DeleteTopic(danube_admin.TopicRequest(name=NAME))


async def test_a_deletion_that_nobody_waits_for_harms_no_later_topic(tmp_path):
    async with a_broker(tmp_path) as (broker, services, _):
        client, store = Client(services), broker.topics.store
        send = await client.producer()
        await client.subscribe()
        await send(b"old")

        async def begin_anew():
            await until_ok(client.producer)
            await until_ok(client.subscribe)

        async with given_up(client, store, "delete_all", lambda: delete(services)):
            beginning = asyncio.create_task(begin_anew())
            await asyncio.wait({beginning}, timeout=MOMENT)
        await beginning
        await (await client.producer())(b"new")
    async with a_broker(tmp_path) as (broker, services, _):
        client = Client(services)
        assert [record.payload for record in records_of(broker, NAME)] == [b"new"]
        assert list(broker.topics.find_open(NAME).subscriptions) == ["s"]
        stream = client.receive(await client.subscribe())
        assert [m.payload for m in await read(stream, 1)] == [b"new"]


async def test_a_deletion_that_nobody_waits_for_is_carried_to_its_end(tmp_path):
    async with a_broker(tmp_path) as (broker, services, _):
        client, topics, schemas = Client(services), broker.topics, broker.schemas
        await client.producer()
        consumer = await client.subscribe()
        await asyncio.to_thread(schemas.register, "orders", "string", b"")
        await asyncio.to_thread(schemas.bind_producer, NAME, "orders")
        async with given_up(client, topics.store, "delete_all", lambda: delete(services)):
            pass
        await eventually(lambda: topics.consumers.find(consumer) is None)
        assert await topics.names.all() == set()
        # The next topic of the name begins without a schema.
        await eventually(lambda: schemas.topic_config(NAME) is None)
        assert await status(client.subscribe()) is Code.NOT_FOUND


async def test_a_broker_that_ends_carries_a_deletion_to_its_end_first(tmp_path):
    async with a_broker(tmp_path) as (broker, services, _):
        client = Client(services)
        await client.producer()
        await client.subscribe()
        store = broker.topics.store
        async with given_up(client, store, "delete_all", lambda: delete(services)):
            ending = asyncio.create_task(broker.stop())
            await asyncio.wait({ending}, timeout=MOMENT)
        await ending
    async with a_broker(tmp_path) as (broker, _, _):
        assert await broker.topics.names.all() == set()


async def test_a_deletion_of_partitions_that_nobody_waits_for_takes_all_of_them(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        topics = broker.topics
        await topics.create_partitioned(NAME, 3, is_reliable=True)
        client = Client(services)
        async with given_up(client, topics.store, "delete_all", lambda: delete(services)):
            pass
        await eventually(lambda: not topics.log.topics())
        assert topics.served == []


async def test_an_unload_that_nobody_waits_for_is_carried_to_its_end(tmp_path):
    async with a_broker(tmp_path) as (broker, services, _):
        client, topics = Client(services), broker.topics
        send = await client.producer()
        consumer = await client.subscribe()
        for _ in range(10):
            await send()
        stream = client.receive(consumer)
        await read(stream, 10)
        sealed, real = [], topics.log.seal

        def seal(name, **more):
            sealed.append(name)
            return real(name, **more)

        topics.log.seal = seal
        await client.ack(*range(10))

        def unload():
            return services.topics.UnloadTopic(danube_admin.TopicRequest(name=NAME))

        async with given_up(client, topics.store, "save_cursor", unload):
            # Somebody wants the topic meanwhile.
            sending = asyncio.create_task(until_ok(lambda: send(b"new")))
            await asyncio.wait({sending}, timeout=MOMENT)
        await eventually(lambda: sealed == [NAME])
        await sending
        again = await topics.get(NAME)
        assert again.topic.wal.next == 11
        assert again.subscription("s").delivery.cursor == 10


async def test_a_seek_and_an_unsubscribe_that_nobody_waits_for_are_carried_to_their_end(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        client, store = Client(services), broker.topics.store
        send = await client.producer()
        await client.subscribe()
        for _ in range(10):
            await send()
        seek = ister_api.SeekRequest(topic=NAME, subscription="s", offset=7)
        async with given_up(client, store, "save_cursor", lambda: services.admin.Seek(seek)):
            pass
        await eventually(lambda: subscription_of(broker).delivery.cursor == 7)
        assert kept(broker.topics)[0] == 7
        request = danube_admin.SubscriptionRequest(topic=NAME, subscription="s")
        async with given_up(client, store, "delete", lambda: services.topics.Unsubscribe(request)):
            pass
        topic = broker.topics.find_open(NAME)
        await eventually(lambda: not topic.subscriptions)
        # The name is free again, for whom- and whatever.
        await send(b"before")
        stream = client.receive(await client.subscribe("another", kind=SHARED))
        await send(b"after")
        assert [m.payload for m in await read(stream, 1)] == [b"after"]


async def test_a_subscription_that_could_not_be_removed_works(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        client, store = Client(services), broker.topics.store
        send = await client.producer()
        await client.subscribe()
        await send(b"before")
        real, store.delete = store.delete, away
        request = danube_admin.SubscriptionRequest(topic=NAME, subscription="s")
        assert await status(services.topics.Unsubscribe(request)) is Code.UNAVAILABLE
        store.delete = real
        stream = client.receive(await client.subscribe())
        await send(b"after")
        assert [m.payload for m in await read(stream, 2)] == [b"before", b"after"]
        await client.ack(0, 1)
        assert subscription_of(broker).delivery.cursor == 2
        stream.cancel()
        await eventually(lambda: not subscription_of(broker).attached)
        await services.topics.Unsubscribe(request)
        assert kept(broker.topics) is None


async def test_a_topic_stays_here_while_its_cursors_cannot_be_written(tmp_path):
    async with a_broker(tmp_path) as (broker, services, _):
        client, store = Client(services), broker.topics.store
        send = await client.producer()
        consumer = await client.subscribe()
        for _ in range(10):
            await send()
        await read(client.receive(consumer), 10)
        await client.ack(*range(10))
        real, store.save_cursor = store.save_cursor, away
        request = danube_admin.TopicRequest(name=NAME)
        assert await status(services.topics.UnloadTopic(request)) is Code.UNAVAILABLE
        # It can be used, and has forgotten nothing.
        await send(b"while the store is away")
        assert subscription_of(broker).delivery.cursor == 10
        store.save_cursor = real
        stream = client.receive(consumer)
        assert await offsets(stream, 1) == [10]
        await client.ack(10)
        await services.topics.UnloadTopic(request)
        again = await broker.topics.get(NAME)
        assert again.subscription("s").delivery.cursor == 11


@each("is_reliable", [True, False])
async def test_who_subscribes_to_a_topic_that_is_unloaded_is_subscribed_or_told(
    tmp_path, is_reliable
):
    async with a_broker(tmp_path) as (broker, services, _):
        client, topics = Client(services), broker.topics
        await client.producer(is_reliable=is_reliable)
        topics.store.create = held = Held(topics.store.create)
        subscribing = asyncio.create_task(status(client.subscribe()))
        await held.is_reached()

        async def move():
            await topics.unload(NAME)
            await topics.get(NAME)

        moving = asyncio.create_task(move())
        await asyncio.wait({moving}, timeout=MOMENT)
        held.go_on()
        answer = await subscribing
        await moving
        if answer is Code.OK:
            assert list((await topics.get(NAME)).subscriptions) == ["s"]
        else:
            assert answer is Code.UNAVAILABLE
        # Whoever is told comes again.
        consumer = await until_ok(client.subscribe)
        stream = client.receive(consumer)
        await eventually(lambda: subscription_of(broker).attached)
        await (await client.producer(is_reliable=is_reliable))(b"first")
        assert [m.payload for m in await read(stream, 1)] == [b"first"]
