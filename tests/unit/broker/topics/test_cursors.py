"""Cursors of a broker's subscriptions: put back, kept, confirmed only if they are written."""

import asyncio
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from ister.errors import UnavailableError
from ister.subscription.policy import SubscriptionKind
from ister.wire import ister_api
from tests.support.broker import a_broker, a_record, some_topics
from tests.support.broker_calls import (
    MOMENT,
    NAME,
    PARSED,
    SHARED,
    Client,
    Held,
    a_slow_reader,
    away,
    kept,
    read,
)
from tests.support.cases import each
from tests.support.memory_metadata import MemoryMetadata


@asynccontextmanager
async def with_a_cursor(tmp_path, mode, *, cursor, saved):
    """Topics and a store that say more than the log has: ten messages, or none in memory."""
    metadata = None if mode == "wal_cloud" else MemoryMetadata()
    # At this level, and at lower ones, messages that were delivered may be lost in a crash.
    settings = None if mode == "memory" else {"storage": {"ack": "written"}}
    async with some_topics(tmp_path, settings, mode=mode, metadata=metadata) as topics:
        topic = await topics.get_or_create(NAME, is_reliable=True)
        await topic.subscribe("s", SubscriptionKind.SHARED, "c", ())
        for number in range(10):
            await topic.publish(a_record(b"%d" % number))
        topics.store.save_cursor(
            PARSED,
            "s",
            cursor=cursor,
            saved=saved,
            incarnation=topic.incarnation,
            owned=topic.owned,
            force=True,
        )
        # Nothing of its own is written at the end.
        await topic.close(None, flush=False)
    async with some_topics(tmp_path, mode=mode, metadata=metadata) as topics:
        yield topics
    if metadata is not None:
        metadata.close()


BEYOND = [(15, {}), (9, {"floor": 9, "acked": [[12, 15]], "failed": [], "end": 15})]


@each(("cursor", "saved"), BEYOND)
@each("mode", ["memory", "local_only", "wal_cloud"])
async def test_what_is_beyond_the_log_is_put_back_before_the_topic_is_served(
    tmp_path, mode, cursor, saved
):
    async with with_a_cursor(tmp_path, mode, cursor=cursor, saved=saved) as topics:
        topic = await topics.get_or_create(NAME, is_reliable=True)
        end = topic.topic.wal.next
        assert end == (0 if mode == "memory" else 10)
        # At once: a crash from here on leaves what the store has.
        at, acked = kept(topics)
        assert at <= end
        assert acked <= set(range(end)), "messages that there are not are acknowledged"
        outbox = topic.subscription("s").attach(1, ())
        for number in range(end, 20):
            assert await topic.publish(a_record(b"new")) == number
        got = set()
        async with asyncio.timeout(60):
            while not got >= set(range(end, 20)):
                got.update(offset for offset, _ in await outbox.take(20))


@each(("cursor", "saved"), BEYOND)
@each("mode", ["local_only", "wal_cloud"])
async def test_a_topic_is_not_served_while_its_cursors_cannot_be_put_back(
    tmp_path, monkeypatch, mode, cursor, saved
):
    async with with_a_cursor(tmp_path, mode, cursor=cursor, saved=saved) as topics:
        metadata = topics.records._metadata
        real = metadata.transact

        def transact(compares, operations):
            if any("/subscriptions/" in operation.key for operation in operations):
                away()
            return real(compares, operations)

        with monkeypatch.context() as patch:
            patch.setattr(metadata, "transact", transact)
            with pytest.raises(UnavailableError):
                await topics.get(NAME)
            assert topics.find_open(NAME) is None
        assert (await topics.get(NAME)).topic.wal.next == 10
        at, acked = kept(topics)
        assert at <= 10
        assert acked <= set(range(10))


async def test_acknowledgements_are_kept_although_an_earlier_write_was_slow(tmp_path):
    settings = {"dispatch": {"progress_min_offset_delta": 1}}
    async with a_broker(tmp_path, settings, mode="memory") as (broker, services, _):
        client, store = Client(services), broker.topics.store
        send = await client.producer()
        consumer = await client.subscribe(kind=SHARED)
        for _ in range(20):
            await send()
        await read(client.receive(consumer), 20)
        store.save_cursor = held = Held(store.save_cursor)
        await client.ack(0)
        await held.is_reached()
        await client.ack(*range(5, 15))
        ending = asyncio.create_task(broker.topics.close())
        await asyncio.wait({ending}, timeout=MOMENT)
        held.go_on()
        await ending
        await held.is_done()
        assert kept(broker.topics) == (1, {0, *range(5, 15)})


async def test_acknowledgements_after_the_last_cursor_are_not_confirmed(tmp_path):
    async with (
        a_broker(tmp_path) as (broker, services, listening),
        a_slow_reader(listening) as slow,
    ):
        client = Client(services)
        send = await client.producer()
        stream = await client.consume(slow)
        for _ in range(30):
            await send(b"x" * 200_000)
        batch = await stream.read()
        given = [message.offset for message in batch.deliveries.messages]
        assert given
        # The stream waits for its reader, and the topic ends meanwhile.
        ending = asyncio.create_task(broker.topics.unload(NAME))
        await asyncio.wait({ending}, timeout=2)
        await stream.write(ister_api.ConsumeRequest(acks=ister_api.Acks(offsets=given)))
        await Client(slow).settle()
        confirmed = []
        with suppress(grpc.aio.AioRpcError):
            async with asyncio.timeout(60):
                while (answer := await stream.read()) is not grpc.aio.EOF:
                    if answer.WhichOneof("step") == "acked":
                        confirmed += answer.acked.offsets
        await ending
        again = await broker.topics.get(NAME)
        floor = again.subscription("s").delivery
        lost = [one for one in confirmed if one >= floor.cursor]
        assert not lost, "confirmed, and forgotten"


async def test_what_is_refused_is_not_confirmed(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (_, services, _):
        client = Client(services)
        send = await client.producer()
        stream = await client.consume()
        await send()
        await read(stream, 1)
        for asked in ([10**6], [10**6, 0]):
            await stream.write(ister_api.ConsumeRequest(acks=ister_api.Acks(offsets=asked)))
        confirmed = []
        with suppress(grpc.aio.AioRpcError):  # it may as well be told so
            while 0 not in confirmed:
                [answer] = await read(stream, 1)
                confirmed += answer.acked.offsets
        assert set(confirmed) <= {0}
