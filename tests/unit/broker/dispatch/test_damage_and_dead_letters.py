"""Damaged, compacted and dead-lettered messages, seen by clients of a whole broker."""

import asyncio
from types import SimpleNamespace

import pytest

from ister.base.model import Layout
from ister.broker.dispatch import dispatcher
from ister.broker.dispatch import prefetch as reading
from ister.broker.flight.reads import range_schema, read_range
from ister.bucket.merge import merge_objects
from ister.subscription.policy import FailurePolicy
from ister.topic.log import Log
from ister.wire import danube_admin
from ister.wire.contract import HOLES, RangeTicket
from tests.support.broker import a_broker, eventually, settings_of
from tests.support.broker_calls import (
    AT_ONCE,
    DEAD,
    NAME,
    PARSED,
    SHARED,
    Client,
    offsets,
    read,
    records_of,
    subscription_of,
)

SKIPPING = {"storage": {"cloud_reader": {"on_damage": "skip"}}}


def damage(directory, *numbers):
    """Turns a bit of some messages' objects over."""
    for number in numbers:
        damaged = 0
        for path in directory.rglob("*.dnb1"):
            content = bytearray(path.read_bytes())
            if (at := content.find(b"m%03d" % number)) >= 0:
                content[at + 10] ^= 0xFF
                path.write_bytes(content)
                damaged += 1
        assert damaged == 1


async def test_damage_that_may_be_skipped_is_passed_over_and_reading_goes_on(tmp_path):
    async with a_broker(tmp_path, SKIPPING) as (broker, services, _):
        client = Client(services)
        send = await client.producer()
        consumer = await client.subscribe(kind=SHARED)
        for number in range(20):
            await send(b"m%03d" % number * 50)
        await services.topics.UnloadTopic(danube_admin.TopicRequest(name=NAME))
        damage(tmp_path, 10)
        topic = (await broker.topics.get(NAME)).topic
        readable = [message.offset for message in topic.read(0)]
        assert 10 not in readable
        assert {0, 19} <= set(readable)
        stream = client.receive(consumer)
        assert await offsets(stream, len(readable)) == readable
        assert subscription_of(broker).counters.passed_over == 20 - len(readable)
        await client.ack(*readable)
        assert subscription_of(broker).delivery.cursor == 20
        assert subscription_of(broker).lag == 0
        # What is new comes too.
        await send(b"new")
        assert await offsets(stream, 1) == [20]


@pytest.mark.parametrize("mode", ["local_only", "wal_cloud"])
@pytest.mark.parametrize("lost", [10, 19], ids=["middle", "last"])
async def test_messages_that_were_given_up_are_passed_over(tmp_path, mode, lost):
    """Goal: subscriptions and Flight pass over what `ister repair --give-up` has given up."""

    async def before():
        async with a_broker(tmp_path, {}, mode=mode) as (_, services, _):
            client = Client(services)
            send = await client.producer()
            await client.subscribe(kind=SHARED)
            for number in range(20):
                await send(b"m%03d" % number * 50)

    async def afterwards():
        async with a_broker(tmp_path, {}, mode=mode) as (broker, services, _):
            client = Client(services)
            send = await client.producer()
            consumer = await client.subscribe(kind=SHARED)
            stream = client.receive(consumer)
            assert await offsets(stream, 19) == [n for n in range(20) if n != lost]
            await client.ack(*(n for n in range(20) if n != lost))
            await eventually(lambda: subscription_of(broker).delivery.cursor == 20)
            assert subscription_of(broker).lag == 0
            await send(b"new")
            assert await offsets(stream, 1) == [20]
            topic = (await broker.topics.get(NAME)).topic
            asked = RangeTicket(topic=NAME, start=0, end=20, incarnation="", columns=("offset",))
            schema = range_schema(topic, asked)
            assert HOLES in schema.metadata
            batches = list(read_range(topic, asked, lambda: None, schema))
            assert sum(batch.num_rows for batch in batches) == 19

    await before()
    (path,) = tmp_path.rglob("wal.log")
    content = bytearray(path.read_bytes())
    content[content.find(b"m%03d" % lost) + 10] ^= 0xFF
    path.write_bytes(content)
    with Log(settings_of(tmp_path, {}, mode=mode), background=False) as log:
        if mode == "wal_cloud":
            assert log.repair(NAME).errors
        assert log.give_up(NAME).ranges == ((lost, lost + 1),)
    await afterwards()


def thin_out(topic, *kept):
    """Does what compaction does that keeps the latest of each key; these are the latest."""
    pa = pytest.importorskip("pyarrow")
    compute = pytest.importorskip("pyarrow.compute")
    owned, objects = topic.bucket.owned, topic.bucket._stores.objects
    old = list(owned.catalog.descriptors())
    new = merge_objects(
        PARSED,
        [described for described, _ in old],
        store=objects,
        settings=SimpleNamespace(
            chunk_bytes=65_536, concurrent_parts=1, index_every_messages=10, layout=Layout.OBJECTS
        ),
        format="parquet",
        epoch=owned.epoch,
        incarnation=owned.record.incarnation,
        tag="00000001",
        created_at=1,
        survives=lambda batch: compute.is_in(batch["offset"], pa.array(kept, pa.int64())),
    )
    assert owned.swap(old, new, until=0)


async def test_messages_that_compaction_took_are_no_loss(tmp_path, caplog):
    """Goal: cursors pass over holes; nobody is told of damage, and nobody waits."""
    policy = FailurePolicy(max_redelivery_count=5, **AT_ONCE)

    async with a_broker(tmp_path, {}) as (broker, services, _):
        client = Client(services)
        send = await client.producer()
        consumer = await client.subscribe(kind=SHARED)
        for number in range(20):
            await send(b"m%03d" % number * 50)
        await services.topics.UnloadTopic(danube_admin.TopicRequest(name=NAME))
        await (await broker.topics.get(NAME)).subscription("s").set_policy(policy)
        topic = (await broker.topics.get(NAME)).topic
        await asyncio.to_thread(thin_out, topic, 3, 4, 11, 19)
        assert [message.offset for message in topic.read(0)] == [3, 4, 11, 19]
        stream = client.receive(consumer)
        assert await offsets(stream, 4) == [3, 4, 11, 19]
        await client.ack(3, 11, 19)
        assert subscription_of(broker).delivery.cursor == 4
        # It is there again, and so is what is new.
        await client.nack(4)
        assert await offsets(stream, 1) == [4]
        await client.ack(4)
        await eventually(lambda: subscription_of(broker).delivery.cursor == 20)
        assert subscription_of(broker).lag == 0
        await send(b"new")
        assert await offsets(stream, 1) == [20]
    assert "left out" not in caplog.text
    assert "damage" not in caplog.text


async def test_damage_of_a_message_that_comes_again_does_not_bring_another_one(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(reading, "_KEPT_BYTES_MAX", 0)
    policy = FailurePolicy(max_redelivery_count=5, **AT_ONCE)

    async with a_broker(tmp_path, SKIPPING) as (broker, services, _):
        client = Client(services)
        send = await client.producer()
        consumer = await client.subscribe(kind=SHARED)
        for number in range(20):
            await send(b"m%03d" % number * 50)
        await services.topics.UnloadTopic(danube_admin.TopicRequest(name=NAME))
        await (await broker.topics.get(NAME)).subscription("s").set_policy(policy)
        stream = client.receive(consumer)
        await read(stream, 20)
        damage(tmp_path, 10, 19)
        readable = {message.offset for message in broker.topics.find_open(NAME).topic.read(0)}
        assert not readable & {10, 19}
        for offset in (10, 19, 5):
            await client.nack(offset)
        [again] = await read(stream, 1)
        assert (again.msg_id.topic_offset, again.payload[:4]) == (5, b"m005")
        await client.ack(*readable)
        # What nobody can read is owed to nobody.
        await eventually(lambda: subscription_of(broker).delivery.cursor == 20)


async def test_a_dead_letter_stays_until_a_topic_that_keeps_nothing_has_a_consumer(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(dispatcher, "_DEAD_LETTER_RETRY_MS", 50)

    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        client, dead = Client(services), Client(services, DEAD)
        send = await client.producer()
        consumer = await client.subscribe()
        await dead.producer(is_reliable=False)
        request = danube_admin.SetSubscriptionFailurePolicyRequest(
            topic=NAME,
            subscription="s",
            failure_policy=danube_admin.SubscriptionFailurePolicy(
                ack_timeout_ms=30_000, poison_policy=0, dead_letter_topic=DEAD
            ),
        )
        await services.topics.SetSubscriptionFailurePolicy(request)
        await send(b"poison")
        await read(client.receive(consumer), 1)
        await client.nack(0)
        subscription = subscription_of(broker)
        await client.settle()
        assert subscription.delivery.cursor == 0
        assert subscription.delivery.holds(0)
        [letter] = await read(dead.receive(await dead.subscribe()), 1)
        assert letter.payload == b"poison"
        await eventually(lambda: subscription.delivery.cursor == 1)


async def test_a_message_is_not_lost_when_the_policy_changes_before_its_dead_letter(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        client = Client(services)
        send = await client.producer()
        consumer = await client.subscribe()
        subscription = subscription_of(broker)
        await subscription.set_policy(
            FailurePolicy(
                max_redelivery_count=0, poison="dead_letter", dead_letter_topic=DEAD, **AT_ONCE
            )
        )
        await send(b"poison")
        await read(client.receive(consumer), 1)
        now = asyncio.get_running_loop().time()
        subscription.nack(0, delay_ms=None, reason="bad")
        # Nobody else runs in between: its dead letter is decided, and not begun.
        subscription.delivery.set_policy(
            FailurePolicy(max_redelivery_count=0, poison="block", **AT_ONCE), now=now
        )
        await eventually(lambda: not subscription._tasks)
        letters = [record.payload for record in records_of(broker, DEAD)]
        stats = subscription.delivery.stats()
        assert letters == [b"poison"] or stats.blocked == 0, stats
