"""Publishing to a whole broker: rates, numbered messages, producer names."""

import asyncio
import threading
from contextlib import suppress

import pytest

from ister.broker.publish.producers import producer_id
from ister.broker.topics.served_topic import ServedTopic
from ister.topic.dedup import SequencedTopic
from ister.topic.topic import Topic
from ister.wire import danube_admin
from tests.support.broker import a_broker, eventually
from tests.support.broker_calls import (
    MOMENT,
    NAME,
    REFUSALS,
    Client,
    Code,
    Held,
    records_of,
    status,
)
from tests.support.cases import each


async def test_clients_that_give_up_take_nothing_of_a_rate(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        send = await Client(services).producer()
        await broker.topics.set_topic_policies(NAME, {"max_publish_rate": 5})
        ends = await asyncio.gather(*(status(send(timeout=0.5)) for _ in range(60)))
        # Twelve seconds' worth of messages was given up, by them or by the broker.
        assert ends.count(Code.OK) < 20
        assert ends.count(Code.DEADLINE_EXCEEDED) > 10
        assert await status(send(b"later", timeout=60)) is Code.OK
        assert records_of(broker, NAME)[-1].payload == b"later"
        assert len(records_of(broker, NAME)) < 30


async def test_a_large_batch_does_not_keep_others_from_a_topic_with_a_rate(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import flight  # noqa: PLC0415 - an extra

    from ister.wire.contract import PutBatch, PutOpen  # noqa: PLC0415

    def put(port, begun):
        rows = pa.record_batch({"payload": pa.array([b"x"] * 2000, pa.binary())})
        opened = PutOpen(topic=NAME, producer="bulk", epoch=1).to_json()
        with flight.connect(f"grpc://127.0.0.1:{port}") as connection:
            writer, _ = connection.do_put(flight.FlightDescriptor.for_command(opened), rows.schema)
            for number in range(2):
                writer.write_with_metadata(rows, PutBatch(sequence=2000 * number).to_json())
            begun.set()
            with suppress(pa.ArrowException, OSError):
                writer.close()

    begun = threading.Event()
    async with a_broker(tmp_path, mode="memory") as (broker, services, listening):
        send = await Client(services).producer()
        await broker.topics.set_topic_policies(NAME, {"max_publish_rate": 10})
        putting = asyncio.get_running_loop().run_in_executor(None, put, listening.flight, begun)
        await eventually(begun.is_set)
        # It takes minutes at this rate, and others have their turn meanwhile.
        await asyncio.sleep(MOMENT)
        assert await status(send(b"other", timeout=60)) is Code.OK
    await putting


async def test_numbered_messages_that_are_sent_together_are_all_taken(tmp_path, monkeypatch):
    def overtaken(real, *, before):
        """The first call is as slow as lets a second one overtake it, if one can."""
        calls, other = [], threading.Event()

        def call(topic, *args, **more):
            calls.append(topic)
            if len(calls) > 1:
                try:
                    return real(topic, *args, **more)
                finally:
                    other.set()
            if before:
                other.wait(MOMENT)
            answer = real(topic, *args, **more)
            if not before:
                other.wait(MOMENT)
            return answer

        return call

    for name, before in (("prepare", False), ("append_record", True)):
        real = getattr(SequencedTopic, name)
        monkeypatch.setattr(SequencedTopic, name, overtaken(real, before=before))

    arrived = []
    publish = ServedTopic.publish

    def arrive(topic, message, *, sequence, **more):
        arrived.append(sequence)
        return publish(topic, message, sequence=sequence, **more)

    monkeypatch.setattr(ServedTopic, "publish", arrive)

    in_order = 0
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        for topic in (NAME, *(f"/default/t{number}" for number in range(10))):
            arrived.clear()
            send = await Client(services, topic).producer()
            answers = await asyncio.gather(
                *(status(send(b"%d" % n, ister_sequence=str(n))) for n in range(8))
            )
            if arrived != sorted(arrived):
                continue  # gRPC keeps no order between calls that are under way at once
            in_order += 1
            assert answers == [Code.OK] * 8
            payloads = [record.payload for record in records_of(broker, topic)]
            assert payloads == [b"%d" % n for n in range(8)]
    assert in_order >= 8


async def test_a_deep_look_back_for_an_old_sequence_keeps_nobody_else_waiting(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(SequencedTopic.__init__.__kwdefaults__, "scan_messages", 10)
    held = []

    def holding(real):
        def call(*args, **more):
            if held:
                held.pop()()
            return real(*args, **more)

        return call

    async with a_broker(tmp_path) as (broker, services, _):
        client = Client(services)
        send, plain = await client.producer(), await client.producer("plain")
        numbered = await client.producer("numbered")
        for number in range(5):
            await send(b"%d" % number, ister_sequence=str(number))
        for _ in range(20):
            await plain()
        await send(b"5", ister_sequence="5")
        await services.topics.UnloadTopic(danube_admin.TopicRequest(name=NAME))
        await send(b"6", ister_sequence="6")
        assert broker.topics.find_open(NAME).topic.wal.next == 27
        look = Held(lambda: None)
        held.append(look)
        for name in ("own_reader", "scan_arrow"):
            monkeypatch.setattr(Topic, name, holding(getattr(Topic, name)))
        looking = asyncio.ensure_future(status(send(b"1", ister_sequence="1")))
        await look.is_reached()
        assert look.was_in_time, "the loop waited for the log to be looked through"
        # Others publish to the topic, and nobody waits for those who have to.
        others = asyncio.ensure_future(status(numbered(b"0", ister_sequence="0")))
        await plain(b"meanwhile", timeout=60)
        await client.settle()
        look.go_on()
        # It is in: it was found, and is not appended again.
        assert await looking is Code.OK
        assert await others is Code.OK
        assert look.was_in_time
        payloads = [record.payload for record in records_of(broker, NAME)]
        assert payloads.count(b"1") == 1


@each("name", ["a\nb", "a\rb", "a\u202eb", "a\x1b[2Jb", "a\u2066b"])
async def test_producer_name_that_cannot_be_shown_is_refused(tmp_path, name):
    async with a_broker(tmp_path, mode="memory") as (_, services, _):
        assert await status(Client(services).producer(name)) is Code.INVALID_ARGUMENT


async def test_nobody_publishes_under_the_id_or_the_name_of_another_producer(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        client = Client(services)
        shop, _ = await client.producer("shop"), await client.producer("evil")
        await shop(b"1", ister_sequence="0", ister_producer_epoch="7")
        for owner, by in (("evil", "shop"), ("shop", "evil"), ("evil", "")):
            answer = await status(
                shop(
                    b"evil",
                    id=producer_id(NAME, owner),
                    by=by,
                    ister_sequence="0",
                    ister_producer_epoch="4294967295",
                )
            )
            assert answer in REFUSALS
        await shop(b"2", ister_sequence="1", ister_producer_epoch="7")
        assert [record.payload for record in records_of(broker, NAME)] == [b"1", b"2"]
