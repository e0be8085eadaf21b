"""Faults that were found in Danube's broker, each as a test that it does not exist here.

Faults are numbered by where they lie: 2.2 subscriptions that begin at the end, 2.8 the dispatcher
and what surrounds it, 3.2 what its Python client needs of a broker. Faults of the storage are in
`test_danube_faults`. What the client needs across restarts is in `test_danube_reconnect`, too.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter

import pytest

pytest.importorskip("danube")

import grpc

from ister.broker.policies import Policies
from ister.broker.publish.producers import Producers
from ister.errors import CapacityError
from ister.wire import danube, danube_admin, ister_api
from tests.servers.broker import BrokerProcess
from tests.support.danube import (
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    SHARED,
    connect,
    eventually,
    numbered,
    offsets,
    refused,
    run,
    texts,
)

KIB = 1024
MIB = 1024 * KIB
MESSAGE_SIZE_MAX = 2 * MIB


@pytest.fixture(scope="module")
def broker(tmp_path_factory, engine):
    settings = {"storage": {"max_message_size": MESSAGE_SIZE_MAX}}
    with BrokerProcess(
        tmp_path_factory.mktemp("broker"), settings=settings, engine=engine
    ) as broker:
        yield broker


async def subscribe(session, topic, name="raw", *, subscription="sub", kind=EXCLUSIVE):
    """A consumer's id, without the client around it."""
    answer = await session.raw_consumers.Subscribe(
        danube.ConsumerRequest(
            request_id=1,
            topic_name=topic,
            consumer_name=name,
            subscription=subscription,
            subscription_type=int(kind),
        )
    )
    return answer.consumer_id


def receive(session, consumer_id):
    return session.raw_consumers.ReceiveMessages(
        danube.ReceiveRequest(request_id=2, consumer_id=consumer_id)
    )


# -- 2.2: subscriptions that begin at the end -----------------------------------------------------


async def test_a_new_subscription_that_falls_behind_by_more_than_256_misses_nothing(session, topic):
    """Fault 2.2: a new one reads from a channel of 256 messages, and goes on behind the hole."""

    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await session.set_window(topic, 10)
    await asyncio.gather(*(producer.send(text.encode()) for text in numbered(600)))
    messages = await inbox.take(600)
    assert offsets(messages) == list(range(600))
    await session.wait_for_cursor(topic, 600)


# -- 2.8: rates -----------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["live", "backlog"])
async def test_a_dispatch_rate_delays_and_drops_nothing(session, topic, when):
    """Fault 2.8: a message that the rate limiter denies is read, dropped, and the cursor stuck."""

    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await session.set_policies(topic, max_subscription_dispatch_rate=50)
    if when == "backlog":
        await inbox.close()
    began = time.monotonic()
    for payload in numbered(100):
        await producer.send(payload.encode())
    if when == "backlog":
        inbox, began = await session.consumer(topic), time.monotonic()
    assert texts(await inbox.take(100)) == numbered(100)
    # 100 at 50 a second; a small burst in the beginning is fine.
    assert time.monotonic() - began >= 1.0
    await session.wait_for_cursor(topic, 100)


async def test_a_publish_rate_delays_and_refuses_nothing(session, topic):
    """Fault 2.8: a topic's publish rate is only written about in the log."""

    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await session.set_policies(topic, max_publish_rate=50)
    began = time.monotonic()
    await asyncio.gather(*(producer.send(text.encode()) for text in numbered(100)))
    assert time.monotonic() - began >= 1.0
    assert Counter(texts(await inbox.take(100))) == Counter(numbered(100))


# -- 2.8: failover and exclusive ------------------------------------------------------------------


async def test_a_standby_is_promoted_when_the_active_consumer_leaves(session, topic):
    """Fault 2.8: the active consumer of a failover subscription is set once and for ever."""

    producer = await session.producer(topic)
    first = await session.consumer(topic, "first", kind=FAILOVER)
    second = await session.consumer(topic, "second", kind=FAILOVER)
    third = await session.consumer(topic, "third", kind=FAILOVER)
    for payload in numbered(4):
        await producer.send(payload.encode())
    assert texts(await first.take(2)) == numbered(2)
    await first.take(2, ack=False)
    await second.expect_silence(0.3)
    await first.close()
    # What the first one had and did not finish comes first.
    assert texts(await second.take(2)) == numbered(2, start=2)
    await producer.send(b"for the second")
    assert texts(await second.take(1)) == ["for the second"]
    await second.close()
    await producer.send(b"for the third")
    assert texts(await third.take(1)) == ["for the third"]
    assert (await session.describe(topic)).active == "third"


async def test_an_exclusive_subscription_is_free_when_its_consumer_has_gone(session, broker, topic):
    """Fault 2.8: a dead consumer keeps it; another name is refused until an admin steps in."""

    producer = await session.producer(topic)
    async with connect(broker) as dying:
        old = await dying.consumer(topic, "old")
        await producer.send(b"one")
        await old.one()

    async def subscribed():
        try:
            return await session.consumer(topic, "new")
        except grpc.aio.AioRpcError as error:
            assert error.code() == grpc.StatusCode.PERMISSION_DENIED
            return None

    new = await eventually(subscribed)
    assert texts(await new.take(1)) == ["one"]


# -- 2.8: one that blocks all ---------------------------------------------------------------------


async def test_a_new_subscription_on_a_full_topic_answers_without_a_publish(session, topic):
    """Fault 2.8: its dispatcher waits for the next message, and acks, joins and flushes with it."""

    await session.send(topic, numbered(20))
    first = await session.consumer(topic, "first", kind=SHARED)
    await asyncio.sleep(0.3)
    async with asyncio.timeout(60):
        second = await session.consumer(topic, "second", kind=SHARED)
        await session.set_failure_policy(topic, retries=2)
        await session.set_window(topic, 5)
        described = await session.describe(topic)
        assert sorted(described.consumers) == ["first", "second"]
        assert (described.cursor, described.lag) == (20, 0)
        # An acknowledgement of what lies before the subscription is answered, too.
        with pytest.raises(grpc.aio.AioRpcError, match="has delivered no such message"):
            await session.raw_consumers.Ack(
                danube.AckRequest(
                    request_id=1,
                    msg_id=danube.MsgID(topic_name=topic, topic_offset=3),
                    subscription_name="sub",
                )
            )
        await second.close()
    await session.send(topic, ["next"], name="another")
    assert texts(await first.take(1)) == ["next"]


async def test_a_consumer_that_reads_nothing_holds_no_other_up(session, broker, topic):
    """Fault 2.8: once a slow consumer's channel is full, the whole subscription waits for it."""
    payload = random.Random(1).randbytes(64 * KIB)

    async with connect(broker, own_connection=True) as other:
        producer = await session.producer(topic)
        quick = await session.consumer(topic, "quick", kind=SHARED)
        await session.set_window(topic, 20)
        stalled = receive(other, await subscribe(other, topic, "stalled", kind=SHARED))
        await eventually(lambda: has_consumers(session, topic, 2))
        for number in range(200):
            await producer.send(payload, {"number": str(number)})
        # All but what the stalled one may hold, which is no more than its window.
        got = await quick.take(180)
        assert len(set(offsets(got))) == 180
        stalled.cancel()
        # What it held comes to who works.
        rest = await quick.take(20)
        assert sorted(offsets(got + rest)) == list(range(200))


async def has_consumers(session, topic, count):
    return len((await session.describe(topic)).consumers) == count


@pytest.mark.nightly
async def test_a_subscription_whose_consumer_reads_nothing_holds_no_other_subscription_up(
    session, broker, topic
):
    """Fault 2.8, between subscriptions: the memory of the broker stays bounded, too."""
    payload = random.Random(2).randbytes(256 * KIB)

    async with connect(broker, own_connection=True) as other:
        producer = await session.producer(topic)
        stalled = receive(other, await subscribe(other, topic, "stalled", subscription="slow"))
        quick = await session.consumer(topic, "quick", subscription="quick")
        before = broker.rss_bytes()
        got = []
        for number in range(300):
            await producer.send(payload, {"number": str(number)})
            got += await quick.take(1)
        assert offsets(got) == list(range(300))
        # 75 MiB went by; what is kept of them is caches with bounds of their own.
        assert broker.rss_bytes() - before < 64 * MIB
        stalled.cancel()


# -- 2.8: key-shared ------------------------------------------------------------------------------


@pytest.mark.nightly
async def test_what_a_lost_key_shared_consumer_had_is_not_taken_for_done(session, topic):
    """Fault 2.8: after 3 s without its stream, what it had not acknowledged counts as such."""

    producer = await session.producer(topic)
    a = await session.consumer(topic, "a", kind=KEY_SHARED, filters=["a-*"])
    b = await session.consumer(topic, "b", kind=KEY_SHARED, filters=["b-*"])
    for number in range(3):
        await producer.send_with_key(f"a{number}".encode(), None, f"a-{number}")
    assert len(await a.take(3, ack=False)) == 3
    await a.close()
    await asyncio.sleep(3.5)
    await producer.send_with_key(b"b0", None, "b-0")
    assert texts(await b.take(1)) == ["b0"]
    assert (await session.describe(topic)).cursor == 0
    again = await session.consumer(topic, "a", kind=KEY_SHARED, filters=["a-*"])
    assert sorted(texts(await again.take(3))) == ["a0", "a1", "a2"]
    await session.wait_for_cursor(topic, 4)


async def test_what_a_lost_key_shared_consumer_had_goes_to_the_others(session, topic):
    """Fault 2.8: the same, where somebody else takes its keys."""

    producer = await session.producer(topic)
    a = await session.consumer(topic, "a", kind=KEY_SHARED)
    for number in range(5):
        await producer.send_with_key(str(number).encode(), None, f"key-{number}")
    assert len(await a.take(5, ack=False)) == 5
    b = await session.consumer(topic, "b", kind=KEY_SHARED)
    await b.expect_silence(0.3)
    await a.close()
    assert sorted(texts(await b.take(5))) == ["0", "1", "2", "3", "4"]
    await session.wait_for_cursor(topic, 5)


async def test_a_key_shared_consumer_that_comes_back_gets_what_it_had(session, topic):
    """Fault 2.8: nothing in flight is sent again when it reconnects."""

    producer = await session.producer(topic)
    inbox = await session.consumer(topic, kind=KEY_SHARED)
    for number in range(4):
        await producer.send_with_key(str(number).encode(), None, f"key-{number}")
    await inbox.take(4, ack=False)
    await inbox.close()
    again = await session.consumer(topic, kind=KEY_SHARED)
    assert sorted(texts(await again.take(4))) == ["0", "1", "2", "3"]
    await session.wait_for_cursor(topic, 4)


# -- 2.8: acknowledgements and settings -----------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED, KEY_SHARED], ids=lambda kind: kind.name)
async def test_an_ack_after_the_ack_timeout_counts(session, topic, kind):
    """Fault 2.8: it is ignored while the message waits for its retry, which then comes."""

    producer = await session.producer(topic)
    inbox = await session.consumer(topic, kind=kind)
    await session.set_failure_policy(topic, ack_timeout_ms=300, delay_ms=1200)
    await producer.send(b"slow")
    message = await inbox.one()

    async def waits_for_its_retry():
        return (await session.describe(topic)).waiting == 1

    await eventually(waits_for_its_retry)
    await inbox.ack(message)
    await session.wait_for_cursor(topic, 1)
    await inbox.expect_silence(1.6)


async def test_an_ack_after_a_nack_counts(session, topic):
    """Fault 2.8, the other way into the same state."""

    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await session.set_failure_policy(topic, delay_ms=800)
    await producer.send(b"after all")
    message = await inbox.one()
    await inbox.nack(message)
    await inbox.ack(message)
    await session.wait_for_cursor(topic, 1)
    await inbox.expect_silence(1.2)


async def test_a_window_takes_effect_at_once(session, topic):
    """Fault 2.8: a dispatch config is stored, and no dispatcher ever reads it."""
    await session.create_topic(topic)
    inbox = await session.consumer(topic)
    for window, more in ((3, 3), (5, 2)):
        await session.set_window(topic, window)
        if window == 3:
            await session.send(topic, numbered(20))
        await inbox.take(more, ack=False)
        await inbox.expect_silence()


async def test_a_failure_policy_takes_effect_at_once_and_no_subscribe_undoes_it(broker, topic):
    """Fault 2.8: a running dispatcher keeps the old one, and a Subscribe writes that back."""
    request = danube_admin.GetSubscriptionFailurePolicyRequest(topic=topic, subscription="sub")

    async with connect(broker) as session:
        producer = await session.producer(topic)
        first = await session.consumer(topic, "first", kind=SHARED)
        await session.set_failure_policy(topic, retries=0, delay_ms=10, poison="Drop")
        await session.consumer(topic, "second", kind=SHARED)
        await session.consumer(topic, "first", kind=SHARED)
        answer = await session.topics.GetSubscriptionFailurePolicy(request)
        assert answer.failure_policy.max_redelivery_count == 0
        assert answer.failure_policy.poison_policy == 2
        del first
    async with connect(broker) as session:
        producer = await session.producer(topic)
        inbox = await session.consumer(topic, "third", kind=SHARED)
        await producer.send(b"bad")
        await inbox.nack(await inbox.one())
        await session.wait_for_cursor(topic, 1)
        # And while it runs: from now on it is kept.
        await session.set_failure_policy(topic, retries=5, delay_ms=10, poison="Block")
        await producer.send(b"bad again")
        await inbox.nack(await inbox.one())
        assert texts(await inbox.take(1)) == ["bad again"]


# -- 2.8: what is counted and listed --------------------------------------------------------------


def test_producers_that_are_gone_do_not_count():
    """Fault 2.8: producers are never removed, so a topic's limit counts the dead."""
    producers = Producers("/default/orders")
    policies = Policies(max_producers_per_topic=2)

    def register(name, now):
        return producers.register(name, is_exclusive=False, policies=policies, now=now)

    first = register("first", 0.0)
    register("second", 0.0)
    with pytest.raises(CapacityError):
        register("third", 30.0)
    # The first one still says something now and then, the second has not for an hour.
    for minute in range(60):
        assert producers.find(first.id, minute * 60.0 + 59.0) is first
    register("third", 3600.0)
    with pytest.raises(CapacityError):
        register("fourth", 3600.0)


def test_consumers_that_are_gone_do_not_count(broker, topic):
    """Fault 2.8: the same with consumers of reliable topics."""

    async def scenario():
        async with connect(broker) as session:
            await session.create_topic(topic)
            await session.set_policies(topic, max_consumers_per_topic=1)
            for number in range(5):
                inbox = await eventually(lambda n=number: joined(session, topic, f"reader-{n}"))
                await inbox.close()

    async def joined(session, topic, name):
        try:
            return await session.consumer(topic, name, subscription=name)
        except grpc.aio.AioRpcError:
            return None

    run(scenario())


async def test_a_subscription_is_listed_once(session, topic):
    """Fault 2.8: its name comes once for each record that is kept of it."""

    await session.producer(topic)
    for name in ["a", "b"]:
        for consumer in range(3):
            await session.consumer(topic, f"c{consumer}", subscription=name, kind=SHARED)
        await session.set_failure_policy(topic, subscription=name)
        await session.set_window(topic, 10, subscription=name)
    assert sorted(await session.subscriptions(topic)) == ["a", "b"]
    described = await session.topics.DescribeTopic(danube_admin.DescribeTopicRequest(name=topic))
    assert sorted(described.subscriptions) == ["a", "b"]


async def test_a_topic_is_not_found_by_a_part_of_its_name(session, topic):
    """Fault 2.8: the owner is looked up by substring: a topic is found by a prefix of its name."""

    await session.create_topic(f"{topic}-2")
    lookup = session.discovery.TopicLookup(danube.TopicLookupRequest(request_id=1, topic=topic))
    assert await refused(lookup) == grpc.StatusCode.NOT_FOUND
    assert await session.partitions(topic) == []
    assert await refused(subscribe(session, topic)) == grpc.StatusCode.NOT_FOUND
    deleted = session.topics.DeleteTopic(danube_admin.TopicRequest(name=topic))
    assert await refused(deleted) == grpc.StatusCode.NOT_FOUND


async def test_partitions_of_a_topic_are_its_own_alone(session, topic):
    """Fault 2.8: they are listed by prefix, so `orders` has `orders-dlq` among its own."""
    others = ["-dlq", "-part", "-part-", "-part-x", "-part-0-dlq", "-part-00", "2-part-0", "s"]

    for other in others:
        await session.create_topic(f"{topic}{other}")
    assert await session.partitions(topic) == []
    await session.producer(topic, partitions=2)
    assert await session.partitions(topic) == [f"{topic}-part-0", f"{topic}-part-1"]


async def test_a_topic_can_be_made_beside_others_that_begin_like_it(session, topic):
    """Fault 2.8: `orders` cannot be made once there is any `orders…`."""

    await session.create_topic(f"{topic}-dlq")
    await session.create_topic(f"{topic}s")
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await producer.send(b"one")
    assert texts(await inbox.take(1)) == ["one"]
    assert await session.partitions(topic) == [topic]


async def test_a_namespace_has_the_size_limit_of_the_broker(session):
    """Fault 2.8: one that an admin made has none."""
    topic = "/made-by-hand/orders"

    made = await session.namespaces.CreateNamespace(
        danube_admin.NamespaceRequest(name="made-by-hand")
    )
    assert made.success
    producer = await session.producer(topic)
    code = await refused(producer.send(b"x" * (MESSAGE_SIZE_MAX + 1)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    await producer.send(b"x" * 1000)


# -- 2.8: requests that lack something ------------------------------------------------------------


async def test_requests_without_a_message_id_are_refused(session, topic):
    """Fault 2.8: the handler panics."""

    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    calls = [
        session.raw_producers.SendMessage(danube.StreamMessage(payload=b"x")),
        session.raw_consumers.Ack(danube.AckRequest(subscription_name="sub")),
        session.raw_consumers.Nack(danube.NackRequest(subscription_name="sub")),
        session.raw_consumers.Ack(danube.AckRequest()),
    ]
    for call in calls:
        assert await refused(call) == grpc.StatusCode.INVALID_ARGUMENT
    await producer.send(b"one")
    assert texts(await inbox.take(1)) == ["one"]


async def test_empty_requests_are_answered_with_a_clear_status(session, broker):
    """Fault 2.8, for all calls that a client makes: none ends in an error of the broker's own."""

    calls = [
        session.raw_producers.CreateProducer(danube.ProducerRequest()),
        session.raw_producers.SendMessage(danube.StreamMessage()),
        session.raw_consumers.Subscribe(danube.ConsumerRequest()),
        session.raw_consumers.Ack(danube.AckRequest(msg_id=danube.MsgID())),
        session.raw_consumers.Nack(danube.NackRequest(msg_id=danube.MsgID())),
        session.discovery.TopicLookup(danube.TopicLookupRequest()),
        session.topics.CreateTopic(danube_admin.NewTopicRequest()),
        session.topics.DeleteTopic(danube_admin.TopicRequest()),
        session.topics.Unsubscribe(danube_admin.SubscriptionRequest()),
        session.topics.SetSubscriptionFailurePolicy(
            danube_admin.SetSubscriptionFailurePolicyRequest()
        ),
        session.topics.SetSubscriptionDispatchConfig(
            danube_admin.SetSubscriptionDispatchConfigRequest()
        ),
        session.namespaces.CreateNamespace(danube_admin.NamespaceRequest()),
        session.admin.Seek(ister_api.SeekRequest()),
    ]
    codes = {await refused(call) for call in calls}
    assert codes <= {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        # Of a send that names no producer: the client looks up and registers again.
        grpc.StatusCode.UNAVAILABLE,
    }


@pytest.mark.parametrize(
    "name",
    ["", "a/b", "a b", "ключ", "x" * 121, "new\nline"],
    ids=["empty", "slash", "space", "letters", "long", "line"],
)
async def test_a_bad_subscription_name_is_refused(session, topic, name):
    """Fault 2.8: names go into keys of the metadata store as they are."""

    await session.create_topic(topic)
    code = await refused(subscribe(session, topic, subscription=name))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert await session.subscriptions(topic) == []


# -- 3.2: what the client needs -------------------------------------------------------------------


async def test_a_send_with_an_unknown_producer_id_goes_through(session, topic):
    """Fault 3.2: NOT_FOUND reaches the program at once; the client heals UNAVAILABLE alone."""

    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    producer._producers[0].producer_id = 123_456
    await asyncio.wait_for(producer.send(b"one"), 60)
    assert texts(await inbox.take(1)) == ["one"]


async def test_a_send_from_nobody_is_answered_with_the_code_that_heals(session, topic):
    """Fault 3.2: the same, of a message that does not say who sends it."""

    await session.create_topic(topic)
    code = await refused(
        session.raw_producers.SendMessage(
            danube.StreamMessage(
                msg_id=danube.MsgID(topic_name=topic, producer_id=42), payload=b"x"
            )
        )
    )
    assert code == grpc.StatusCode.UNAVAILABLE


async def test_acknowledgements_go_by_offset_and_not_by_request(session, topic):
    """Fault 3.2: request ids begin anew with every producer, so two messages share one."""

    left = await session.producer(topic, "left")
    right = await session.producer(topic, "right")
    inbox = await session.consumer(topic)
    for number in range(5):
        await left.send(f"left {number}".encode())
        await right.send(f"right {number}".encode())
    messages = await inbox.take(10, ack=False)
    ids = Counter(message.request_id for message in messages)
    assert set(ids.values()) == {2}
    await inbox.ack(*(m for m in messages if m.producer_name == "left"))
    await inbox.close()
    again = await session.consumer(topic)
    assert texts(await again.take(5)) == [f"right {number}" for number in range(5)]
    await session.wait_for_cursor(topic, 10)


async def test_an_ack_from_another_consumer_of_the_subscription_counts(session, topic):
    """Fault 3.2: the client acknowledges by topic and subscription; which consumer is not said."""

    producer = await session.producer(topic)
    first = await session.consumer(topic, "first", kind=SHARED)
    await producer.send(b"one")
    message = await first.one()
    second = await session.consumer(topic, "second", kind=SHARED)
    await second.ack(message)
    await session.wait_for_cursor(topic, 1)
    await first.close()
    await second.expect_silence()


async def test_an_ack_for_a_topic_or_subscription_that_is_not_there_is_no_error_of_the_broker(
    session, topic
):
    """Fault 3.2: INTERNAL for what a late client says about a topic that was deleted."""

    await session.create_topic(topic)
    for name, subscription in [(topic, "nobody"), (f"{topic}-gone", "sub")]:
        call = session.raw_consumers.Ack(
            danube.AckRequest(
                request_id=1,
                msg_id=danube.MsgID(topic_name=name, topic_offset=0),
                subscription_name=subscription,
            )
        )
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call
            continue
        assert (await call.code()) == grpc.StatusCode.NOT_FOUND


async def test_an_ack_beyond_the_end_is_refused(session, topic):
    """Fault 3.2: an offset that was never given out must not move a cursor past later messages."""

    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await producer.send(b"one")
    message = await inbox.one(ack=True)
    message.msg_id.topic_offset = 1
    with contextlib.suppress(grpc.aio.AioRpcError):
        await inbox.ack(message)
    await producer.send(b"two")
    assert texts(await inbox.take(1)) == ["two"]


@pytest.mark.nightly
async def test_a_flood_of_streams_for_unknown_ids_is_harmless(session, broker, topic):
    """Fault 3.2: a client that lost its id asks without a pause; others must not feel it."""

    async with connect(broker, own_connection=True) as flood:
        producer = await session.producer(topic)
        inbox = await session.consumer(topic)
        asked = 0

        async def ask():
            nonlocal asked
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    asked += 1
                    await receive(flood, 4711).read()

        tasks = [asyncio.create_task(ask()) for _ in range(20)]
        await asyncio.sleep(0.5)
        for payload in numbered(50):
            await producer.send(payload.encode())
        assert texts(await inbox.take(50)) == numbered(50)
        await asyncio.sleep(2.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Twenty clients of a broken kind, some seconds: not thousands of calls.
        assert asked < 400
