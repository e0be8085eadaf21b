"""Danube's own client across restarts, outages, hand-overs and reconnects: it heals by itself.

What that takes is told by the client's source: it retries three status codes, opens a stream by the
id that it once got, over and over and without a pause, and looks for a sign to subscribe again only
while its health check lives, which the first outage of some seconds ends for good.
"""

import asyncio
import contextlib
from itertools import chain

import grpc
import pytest

from ister.wire import danube, danube_admin, ister_api
from tests.servers.broker import BrokerProcess
from tests.support.danube import (
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    PATIENCE_SECONDS,
    SHARED,
    collect,
    connect,
    eventually,
    numbered,
    offsets,
    refused,
    texts,
)

FLUSH_SECONDS = 1
KINDS = [EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED]


@pytest.fixture(scope="module")
def broker(tmp_path_factory, engine):
    settings = {"dispatch": {"progress_flush_interval_seconds": FLUSH_SECONDS}}
    with BrokerProcess(
        tmp_path_factory.mktemp("broker"), settings=settings, engine=engine
    ) as broker:
        yield broker


async def send_all(producer, payloads):
    """As a program does that retries what its client gave up on: nothing else may go wrong."""
    for payload in payloads:
        while True:
            try:
                await producer.send(payload.encode())
                break
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE, error
                await asyncio.sleep(0.1)


async def read_everything(session, topic, subscription="audit"):
    """All payloads of a topic, in order."""
    end = (await session.admin.DescribeTopic(ister_api.TopicName(topic=topic))).next
    inbox = await session.consumer(topic, "auditor", subscription=subscription)
    await session.admin.Seek(
        ister_api.SeekRequest(topic=topic, subscription=subscription, earliest=True)
    )
    messages = await inbox.take(end)
    assert offsets(messages) == list(range(end))
    await inbox.close()
    return texts(messages)


def count_calls(inbox):
    """How often the client opens a stream; a list that grows."""
    calls = []
    for part in inbox.consumer._consumers.values():

        async def counted(receive=part.receive):
            calls.append(asyncio.get_running_loop().time())
            return await receive()

        part.receive = counted
    return calls


# -- producers ------------------------------------------------------------------------------------


async def test_a_producer_is_used_again_and_made_twice(session, broker, topic):
    async with connect(broker) as other:
        producer = await session.producer(topic)
        await producer.send(b"first")
        inbox = await session.consumer(topic)
        await producer.send(b"second")
        # A second one of the same name, while the first is alive, is the same one.
        twin = await other.producer(topic)
        assert twin._producers[0].producer_id == producer._producers[0].producer_id
        await twin.send(b"third")
        await producer.send(b"fourth")
        assert texts(await inbox.take(3)) == ["second", "third", "fourth"]


@pytest.mark.parametrize("ending", ["stop", "kill"])
async def test_a_producer_heals_after_a_restart(session, broker, topic, ending):
    producer = await session.producer(topic)
    await producer.send(b"before")
    await asyncio.to_thread(getattr(broker, ending))
    await asyncio.to_thread(broker.start)
    # However long that took: gRPC's pause after failures is longer than the client's patience.
    await asyncio.wait_for(session.channel.channel_ready(), PATIENCE_SECONDS)
    # The very call that the program makes, without any care for what happened.
    await asyncio.wait_for(producer.send(b"after"), 60)
    assert await read_everything(session, topic) == ["before", "after"]


async def test_a_broker_that_pauses_loses_no_call(session, broker, topic):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    broker.pause()
    try:
        sending = asyncio.create_task(producer.send(b"one"))
        assert await asyncio.wait({sending}, timeout=0.5) == (set(), {sending})
    finally:
        broker.resume()
    await sending
    assert texts(await inbox.take(1)) == ["one"]


@pytest.mark.parametrize("ending", ["stop", "kill"])
async def test_everything_is_as_it_was_after_a_restart(broker, topic, ending):
    """What was acknowledged, where subscriptions stand, what was set for them, partitions.

    Also fault 2.2 of Danube: a subscription that has acknowledged nothing begins at the end again.
    """
    partitioned, letters = f"{topic}-p", f"{topic}-dlq"
    policy = {"ack_timeout_ms": 7000, "delay_ms": 20, "max_delay_ms": 700, "exponential": True}
    policy |= {"retries": 2, "poison": "DeadLetter", "dead_letter_topic": letters}

    def settings(session, subscription):
        asked = {"topic": topic, "subscription": subscription}
        return asyncio.gather(
            session.topics.GetSubscriptionFailurePolicy(
                danube_admin.GetSubscriptionFailurePolicyRequest(**asked)
            ),
            session.topics.GetSubscriptionDispatchConfig(
                danube_admin.GetSubscriptionDispatchConfigRequest(**asked)
            ),
        )

    async with connect(broker) as session:
        await session.create_topic(letters)
        await session.send(topic, numbered(3))
        await (await session.consumer(topic, subscription="gone", kind=SHARED)).close()
        for name in ("unacked", "failing"):
            inbox = await session.consumer(topic, name, subscription=name, kind=SHARED)
        for name in ("failing", "yet-to-be-made"):
            await session.set_failure_policy(topic, subscription=name, **policy)
            await session.set_window(topic, 3, subscription=name)
        told = [await settings(session, name) for name in ("failing", "yet-to-be-made")]
        await session.consumer(letters, "undertaker")
        producer = await session.producer(topic, "another")
        await send_all(producer, numbered(5, start=3))
        for reason in ("first", "second"):
            while (failed := await inbox.one()).msg_id.topic_offset != 3:
                pass
            await inbox.nack(failed, reason=reason)
        await session.producer(partitioned, partitions=3)
        parts = await session.consumer(partitioned)
        producer = await session.producer(partitioned, partitions=3)
        await send_all(producer, numbered(9))
        await parts.take(9, ack=False)
    await asyncio.to_thread(getattr(broker, ending))
    await asyncio.to_thread(broker.start)
    async with connect(broker) as session:
        assert await read_everything(session, topic) == numbered(8)
        for name in ("gone", "unacked"):
            inbox = await session.consumer(topic, name, subscription=name, kind=SHARED)
            assert texts(await inbox.take(5)) == numbered(5, start=3)
        assert [await settings(session, n) for n in ("failing", "yet-to-be-made")] == told
        assert told[0][0].failure_policy == danube_admin.SubscriptionFailurePolicy(
            max_redelivery_count=2,
            ack_timeout_ms=7000,
            base_redelivery_delay_ms=20,
            max_redelivery_delay_ms=700,
            backoff_strategy=1,
            poison_policy=0,
            dead_letter_topic=letters,
        )
        assert [one.dispatch_config.max_unacked_messages for _, one in told] == [3, 3]
        inbox = await session.consumer(topic, "late", subscription="yet-to-be-made", kind=SHARED)
        await session.seek(topic, "yet-to-be-made", earliest=True)
        assert texts(await inbox.take(3, ack=False)) == numbered(3)
        await inbox.expect_silence()
        parts = await session.consumer(partitioned)
        messages = await parts.take(9)
        assert sorted(texts(messages)) == sorted(numbered(9))
        for number in range(3):
            await session.wait_for_cursor(f"{partitioned}-part-{number}", 3)
        if ending == "stop":
            # Two failures before it, so one more is enough; else a poison message never ends.
            dead = await session.consumer(letters, "undertaker")
            inbox = await session.consumer(topic, "failing", subscription="failing", kind=SHARED)
            while (failed := await inbox.one()).msg_id.topic_offset != 3:
                pass
            await inbox.nack(failed, reason="third")
            [letter] = await dead.take(1)
            assert letter.attributes["x-delivery-attempt"] == "3"
            assert letter.attributes["x-failure-reason"] == "third"


# -- consumers ------------------------------------------------------------------------------------


async def test_consumers_of_all_kinds_survive_a_restart(session, broker, topic):
    producer = await session.producer(topic)
    inboxes = [
        await session.consumer(topic, kind.name, subscription=kind.name, kind=kind)
        for kind in KINDS
    ]
    ids = [inbox.ids for inbox in inboxes]
    await producer.send(b"before")
    for inbox in inboxes:
        assert texts(await inbox.take(1)) == ["before"]
    await asyncio.to_thread(broker.restart)
    await send_all(producer, ["after"])
    for inbox in inboxes:
        assert texts(await inbox.take(1)) == ["after"]
    assert [inbox.ids for inbox in inboxes] == ids


@pytest.mark.nightly
async def test_consumers_survive_an_outage_that_ends_their_health_checks(session, broker, topic):
    """Nothing will ever make them subscribe again: the ids that they have must be good still."""

    producer = await session.producer(topic)
    inboxes = [
        await session.consumer(topic, kind.name, subscription=kind.name, kind=kind)
        for kind in KINDS
    ]
    await producer.send(b"before")
    for inbox in inboxes:
        assert texts(await inbox.take(1)) == ["before"]
    await asyncio.to_thread(broker.kill)
    checks = [part._health_task for inbox in inboxes for part in inbox.consumer._consumers.values()]
    # One check every five seconds; the first that finds nobody is the last.
    await eventually(lambda: all(check.done() for check in checks), every=0.2)
    await asyncio.to_thread(broker.start)
    calls = [count_calls(inbox) for inbox in inboxes]
    await send_all(producer, ["after"])
    for inbox in inboxes:
        # What was acknowledged shortly before the crash may come again.
        while texts(await inbox.take(1)) != ["after"]:
            pass
    # Once they are back there is one stream each, and not a flood of attempts.
    counts = [len(made) for made in calls]
    await asyncio.sleep(1.0)
    assert [len(made) for made in calls] == counts


@pytest.mark.nightly
async def test_a_consumer_finds_the_next_topic_of_the_name(session, topic):
    """Its topic is deleted and made again at once: its health check tells it to subscribe anew."""

    await session.send(topic, numbered(3))
    inbox = await session.consumer(topic)
    await session.topics.DeleteTopic(danube_admin.TopicRequest(name=topic))
    producer = await session.producer(topic, "another")

    async def came():
        await producer.send(b"new")
        return not inbox.queue.empty()

    await eventually(came, every=0.5)
    assert texts(await inbox.take(1)) == ["new"]


async def test_a_stream_for_an_unknown_id_is_refused_slowly(session, topic):
    """The client would ask again thousands of times a second."""

    await session.producer(topic)
    consumer = await session.subscribe(topic, "lost")
    [part] = consumer._consumers.values()
    part._health_task.cancel()
    part.consumer_id = 123_456_789
    calls, receive = [], part.receive

    async def counted():
        calls.append(asyncio.get_running_loop().time())
        return await receive()

    part.receive = counted
    await consumer.receive()
    await eventually(lambda: len(calls) >= 3)
    assert calls[2] - calls[0] > 0.4, "asked again without a pause"
    request = danube.ReceiveRequest(request_id=1, consumer_id=987_654_321)
    stream = session.raw_consumers.ReceiveMessages(request)
    # Other clients of Danube give up for good when they are told NOT_FOUND.
    code = await asyncio.wait_for(refused(stream.read()), 60)
    assert code == grpc.StatusCode.UNAVAILABLE


async def test_a_consumer_whose_id_is_unknown_subscribes_again_when_its_health_check_lives(
    session, topic
):
    producer = await session.producer(topic)
    consumer = await session.subscribe(topic, "lost")
    [part] = consumer._consumers.values()
    true_id = part.consumer_id
    # As if the broker had lost all it knew: stream and health check ask for a stranger.
    part._health_task.cancel()
    part.consumer_id = 123_456_789
    part._health_task = await session.client.health_check_service.start_health_check(
        part.connect_url, part.broker_addr, part.proxy, 1, 123_456_789, part.stop_event
    )
    queue = await consumer.receive()
    await producer.send(b"one")
    message = await asyncio.wait_for(queue.get(), 60)
    assert (message.payload, part.consumer_id) == (b"one", true_id)


async def test_health_checks_tell_who_is_known(session, topic):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    [consumer_id] = inbox.ids.values()

    async def status(client, id):
        answer = await session.health.HealthCheck(
            danube.HealthCheckRequest(request_id=1, client=client, id=id)
        )
        return danube.HealthCheckResponse.ClientStatus.Name(answer.status)

    assert await status(1, consumer_id) == "OK"
    assert await status(0, producer._producers[0].producer_id) == "OK"
    assert await status(1, 4711) == "CLOSE"
    code = await refused(
        session.health.HealthCheck(danube.HealthCheckRequest(request_id=1, client=7, id=1))
    )
    assert code == grpc.StatusCode.INVALID_ARGUMENT


# -- what was not acknowledged comes again --------------------------------------------------------


async def test_a_consumer_that_comes_back_gets_what_it_had_first(session, topic):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await send_all(producer, numbered(3))
    assert texts(await inbox.take(3, ack=False)) == numbered(3)
    await inbox.close()
    await send_all(producer, numbered(2, start=3))
    inbox = await session.consumer(topic)
    assert texts(await inbox.take(5)) == numbered(5)


async def test_a_message_comes_again_at_every_reconnect(session, topic):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await producer.send(b"again")
    for _ in range(4):
        message = await inbox.one()
        assert (message.payload, message.msg_id.topic_offset) == (b"again", 0)
        await inbox.close()
        inbox = await session.consumer(topic)
    await inbox.take(1)
    await inbox.close()
    await (await session.consumer(topic)).expect_silence()


async def test_what_a_lost_consumer_had_goes_to_another(session, topic):
    producer = await session.producer(topic)
    first = await session.consumer(topic, "first", kind=SHARED)
    await producer.send(b"one")
    message = await first.one()
    second = await session.consumer(topic, "second", kind=SHARED)
    await second.expect_silence()
    await first.close()
    again = await second.one(ack=True)
    assert again.msg_id.topic_offset == message.msg_id.topic_offset


async def test_two_clients_of_one_name_do_not_fight_over_the_stream(session, broker, topic):
    """Each takes over from the other whenever its stream ends, and neither ever pauses."""

    async with connect(broker) as other:
        producer = await session.producer(topic)
        one = await session.consumer(topic, "same")
        calls = [count_calls(one)]
        two = await other.consumer(topic, "same")
        calls.append(count_calls(two))
        began = asyncio.get_running_loop().time()
        seen = set()
        for number in range(20):
            await send_all(producer, numbered(1, number))
            while len(seen) <= number:
                seen.update(texts(chain(*await collect([one, two], 1))))
        await session.wait_for_cursor(topic, 20)
        seconds = asyncio.get_running_loop().time() - began
        assert sum(map(len, calls)) <= 10 + 10 * seconds, "they fight"


# -- unload ---------------------------------------------------------------------------------------


async def test_a_stream_ends_when_its_topic_is_unloaded(session, topic):
    """The client looks for a sign to go elsewhere only when a message comes or its stream ends."""

    await session.producer(topic)
    subscribed = await session.raw_consumers.Subscribe(
        danube.ConsumerRequest(
            request_id=1, topic_name=topic, consumer_name="c", subscription="sub"
        )
    )
    stream = session.raw_consumers.ReceiveMessages(
        danube.ReceiveRequest(request_id=2, consumer_id=subscribed.consumer_id)
    )
    reading = asyncio.ensure_future(stream.read())
    await session.wait_attached(topic, "c")
    assert not reading.done()
    await session.unload(topic)
    with contextlib.suppress(grpc.aio.AioRpcError):
        assert await asyncio.wait_for(reading, 60) is grpc.aio.EOF


async def test_an_unloaded_topic_goes_on_with_the_offsets_that_follow(session, topic):
    """10 sent, 5 acknowledged, unloaded, 8 more: 5 to 17 come, and nothing else."""

    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await send_all(producer, numbered(10))
    await inbox.take(5)
    await inbox.take(5, ack=False)
    await session.unload(topic)
    await send_all(producer, numbered(8, start=10))
    messages = await inbox.take(13)
    assert offsets(messages) == list(range(5, 18))
    assert texts(messages) == numbered(13, start=5)
    await inbox.expect_silence()


async def test_an_unloaded_topic_delivers_the_unacknowledged_message_first(session, topic):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await send_all(producer, numbered(7))
    await inbox.take(3)
    await inbox.one()
    await inbox.close()
    await session.unload(topic)
    await send_all(producer, numbered(8, start=7))
    inbox = await session.consumer(topic)
    assert offsets(await inbox.take(12)) == list(range(3, 15))


async def test_a_consumer_without_health_check_survives_an_unload(session, broker, topic):
    """Nobody but its stream asks for the topic, and nothing makes it subscribe again."""

    async with connect(broker) as other:
        await session.send(topic, ["before"])
        inbox = await session.consumer(topic)
        for part in inbox.consumer._consumers.values():
            part._health_task.cancel()
        calls = count_calls(inbox)
        await session.unload(topic)
        # Nobody else looks the topic up meanwhile; asking for it could open it.
        await eventually(lambda: calls)
        await other.send(topic, ["after"])
        assert texts(await inbox.take(1)) == ["after"]


async def test_producers_and_consumers_go_on_when_their_topic_is_unloaded_again_and_again(
    session, topic
):
    sent = numbered(200)

    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    publishing = asyncio.create_task(send_all(producer, sent))
    seen = []
    for _ in range(4):
        seen += texts(await inbox.take(10))
        await session.unload(topic)
    while len(set(seen)) < len(sent):
        seen += texts(await inbox.take(1))
    await publishing
    # Whatever comes twice comes behind its first time, and that in order.
    assert list(dict.fromkeys(seen)) == sent


# -- the end --------------------------------------------------------------------------------------


async def test_a_broker_ends_in_time_though_a_consumer_reads_nothing(broker, topic):
    """Its stream waits for a window that never opens."""
    payload = bytes(256 * 1024)

    async with connect(broker) as session, connect(broker, own_connection=True) as other:
        producer = await session.producer(topic)
        subscribed = await other.raw_consumers.Subscribe(
            danube.ConsumerRequest(
                request_id=1, topic_name=topic, consumer_name="stalled", subscription="sub"
            )
        )
        stream = other.raw_consumers.ReceiveMessages(
            danube.ReceiveRequest(request_id=2, consumer_id=subscribed.consumer_id)
        )
        await session.wait_attached(topic, "stalled")
        for _ in range(40):
            await producer.send(payload)
        await asyncio.to_thread(broker.stop)
        stream.cancel()
    await asyncio.to_thread(broker.start)
    async with connect(broker) as session:
        inbox = await session.consumer(topic, "reader", attached=False)
        assert offsets(await inbox.take(40)) == list(range(40))
