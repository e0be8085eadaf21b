"""Danube's scenarios of subscriptions, with its own client: one consumer, fan-out, queues, churn.

Those of partitions, keys, redelivery and reconnects are in files of their own.
"""

import asyncio
import contextlib
import random
from collections import Counter
from itertools import chain

import pytest

pytest.importorskip("danube")

import grpc
from danube import DanubeError

from ister.wire import danube, danube_admin
from tests.support.danube import (
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    SHARED,
    collect,
    connect,
    eventually,
    numbered,
    offsets,
    refused,
    texts,
)

# -- one consumer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reliable", [True, False], ids=["reliable", "non-reliable"])
@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED], ids=lambda k: k.name)
async def test_a_message_is_received_and_acknowledged(session, topic, kind, reliable):
    producer = await session.producer(topic, reliable=reliable)
    # As programs do: subscribed is subscribed, whether or not the stream is open yet.
    inbox = await session.consumer(topic, kind=kind, attached=False)
    sent = await producer.send(b"Hello Danube", {"colour": "blue"})
    message = await inbox.one()
    await inbox.ack(message)
    await inbox.expect_silence()
    assert message.payload == b"Hello Danube"
    assert dict(message.attributes) == {"colour": "blue"}
    assert message.producer_name == "producer"
    assert message.request_id == sent
    assert message.msg_id.topic_name == topic
    assert message.publish_time > 0
    if reliable:
        await session.wait_for_cursor(topic, message.msg_id.topic_offset + 1)


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED], ids=lambda k: k.name)
async def test_twenty_blobs_arrive_intact(session, topic, kind):
    blob = random.Random(5).randbytes(300_000)

    producer = await session.producer(topic)
    inbox = await session.consumer(topic, kind=kind)
    for number in range(20):
        await producer.send(blob, {"number": str(number)})
    messages = await inbox.take(20)
    assert all(message.payload == blob for message in messages)
    assert [message.attributes["number"] for message in messages] == [
        str(number) for number in range(20)
    ]
    assert offsets(messages) == list(range(20))


async def test_a_message_near_the_size_that_clients_can_receive_arrives(session, topic):
    # gRPC's own limit in the client is 4 MiB for a message with everything around it.
    payload = random.Random(6).randbytes(4 * 1024 * 1024 - 4096)

    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await producer.send(payload)
    [message] = await inbox.take(1)
    assert message.payload == payload


async def test_a_message_that_no_client_can_receive_stops_nothing(session, topic):
    """Either nobody can send it by gRPC, or it does not hold up those behind it."""

    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    with contextlib.suppress(grpc.aio.AioRpcError):
        await producer.send(b"x" * (5 * 1024 * 1024))
    await producer.send(b"next")
    assert texts(await inbox.take(1)) == ["next"]


async def test_a_new_subscription_begins_behind_what_is_there(session, topic):
    await session.send(topic, numbered(5))
    inbox = await session.consumer(topic)
    await inbox.expect_silence()
    await session.send(topic, ["new"])
    assert texts(await inbox.take(1)) == ["new"]


async def test_what_is_published_while_nobody_is_attached_is_kept(session, topic):
    producer = await session.producer(topic)
    await (await session.consumer(topic)).close()
    for payload in numbered(10):
        await producer.send(payload.encode())
    inbox = await session.consumer(topic)
    assert texts(await inbox.take(10)) == numbered(10)


async def test_a_message_without_payload_and_with_odd_attributes_arrives(session, topic):
    attributes = {"": "empty", "ключ": "значение", "x" * 200: "y" * 2000}

    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await producer.send(b"", attributes)
    [message] = await inbox.take(1)
    assert message.payload == b""
    assert dict(message.attributes) == attributes


# -- fan-out --------------------------------------------------------------------------------------


async def test_every_subscription_gets_every_message(session, topic):
    producer = await session.producer(topic)
    inboxes = [
        await session.consumer(topic, f"reader-{name}", subscription=f"sub-{name}")
        for name in "abc"
    ]
    for payload in numbered(24):
        await producer.send(payload.encode())
    for inbox in inboxes:
        assert texts(await inbox.take(24)) == numbered(24)
        await inbox.expect_silence(0.2)


async def test_a_subscription_that_acknowledges_nothing_holds_no_other_back(session, topic):
    producer = await session.producer(topic)
    idle = await session.consumer(topic, "idle", subscription="idle")
    quick = await session.consumer(topic, "quick", subscription="quick")
    for payload in numbered(200):
        await producer.send(payload.encode())
    assert texts(await quick.take(200)) == numbered(200)
    assert texts([await idle.one()]) == ["message 0"]


async def test_subscriptions_come_and_go_and_each_gets_its_part(session, topic):
    """The third one joins after 15 of 45 messages, the first one leaves after 30."""

    producer = await session.producer(topic)
    first = await session.consumer(topic, "a", subscription="a")
    second = await session.consumer(topic, "b", subscription="b")
    for payload in numbered(15):
        await producer.send(payload.encode())
    third = await session.consumer(topic, "c", subscription="c")
    for payload in numbered(15, start=15):
        await producer.send(payload.encode())
    assert texts(await first.take(30)) == numbered(30)
    await first.close()
    for payload in numbered(15, start=30):
        await producer.send(payload.encode())
    assert texts(await second.take(45)) == numbered(45)
    assert texts(await third.take(30)) == numbered(30, start=15)
    # What it missed is still there for it.
    again = await session.consumer(topic, "a", subscription="a")
    assert texts(await again.take(15)) == numbered(15, start=30)


# -- a queue --------------------------------------------------------------------------------------


async def test_a_queue_is_shared_evenly(session, topic):
    producer = await session.producer(topic)
    inboxes = [await session.consumer(topic, f"c{n}", kind=SHARED) for n in range(3)]
    for payload in numbered(36):
        await producer.send(payload.encode())
    taken = await collect(inboxes, 36)
    counts = [len(part) for part in taken]
    assert Counter(texts(chain(*taken))) == Counter(numbered(36))
    assert all(8 <= count <= 16 for count in counts), counts


async def test_a_queue_whose_consumers_join_and_leave_loses_nothing(session, topic):
    producer = await session.producer(topic)
    first = await session.consumer(topic, "first", kind=SHARED)
    second = await session.consumer(topic, "second", kind=SHARED)
    for payload in numbered(15):
        await producer.send(payload.encode())
    early = await collect([first, second], 15)
    third = await session.consumer(topic, "third", kind=SHARED)
    for payload in numbered(15, start=15):
        await producer.send(payload.encode())
    middle = await collect([first, second, third], 15)
    await first.close()
    for payload in numbered(15, start=30):
        await producer.send(payload.encode())
    late = await collect([second, third], 15)
    everything = list(chain(*early, *middle, *late))
    assert Counter(texts(everything)) == Counter(numbered(45))
    assert all(early)
    assert all(middle)
    assert all(late)


# -- nothing waits for a further publish ----------------------------------------------------------


async def test_a_burst_is_delivered_without_a_further_publish(session, topic):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await asyncio.gather(*(producer.send(text.encode()) for text in numbered(100)))
    messages = await inbox.take(100)
    assert Counter(texts(messages)) == Counter(numbered(100))
    assert offsets(messages) == list(range(100))


async def test_bursts_with_pauses_are_delivered_without_a_further_publish(session, topic):
    """Whoever waits at the end of the log is woken by the next burst, and by the last one."""

    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    for burst in range(3):
        for payload in numbered(10, 10 * burst):
            await producer.send(payload.encode())
        assert texts(await inbox.take(10)) == numbered(10, 10 * burst)
        await inbox.expect_silence()
    await session.wait_for_cursor(topic, 30)


async def test_a_subscription_made_during_a_burst_gets_all_that_follow_it(session, topic):
    """Offsets from where it begins to the end, without a hole, whichever way the race went."""

    producer = await session.producer(topic)

    async def publish():
        for payload in numbered(100):
            await producer.send(payload.encode())

    publishing = asyncio.create_task(publish())
    await asyncio.sleep(0.01)
    inbox = await session.consumer(topic)
    start = (await session.describe(topic)).cursor
    await publishing
    await session.send(topic, ["end"], name="another")
    got = []
    while not got or got[-1].payload != b"end":
        got += await inbox.take(1)
    assert offsets(got)[-1] == 100
    assert offsets(got) == list(range(100 - len(got) + 1, 101))
    # Nothing was acknowledged when the broker was asked, so the cursor was its start.
    assert offsets(got)[0] <= start


async def test_consumers_that_leave_in_the_middle_of_a_burst_stop_nothing(session, topic):
    producer = await session.producer(topic)
    leaver = await session.consumer(topic, "leaver", kind=SHARED)
    stayer = await session.consumer(topic, "stayer", kind=SHARED)
    sends = [asyncio.create_task(producer.send(t.encode())) for t in numbered(100)]
    await leaver.one()
    await leaver.close()
    await asyncio.gather(*sends)
    # What the leaver had and never acknowledged comes to the one who stayed.
    [taken] = await collect([stayer], 100)
    assert set(texts(taken)) == set(numbered(100))


async def test_acknowledgements_in_any_order_and_twice_move_the_cursor_once(session, topic):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    for payload in numbered(10):
        await producer.send(payload.encode())
    messages = await inbox.take(10, ack=False)
    await inbox.ack(*reversed(messages[1:]))
    await inbox.ack(messages[9], messages[1])
    assert (await session.describe(topic)).cursor == 0
    await inbox.ack(messages[0], messages[0])
    await session.wait_for_cursor(topic, 10)
    assert (await session.describe(topic)).lag == 0
    await inbox.expect_silence()


# -- names, lookups, refusals ---------------------------------------------------------------------


async def test_nobody_can_subscribe_to_a_topic_that_is_not_there(session, topic):
    assert await session.partitions(topic) == []
    with pytest.raises(DanubeError):
        await session.consumer(topic)
    code = await refused(
        session.raw_consumers.Subscribe(
            danube.ConsumerRequest(
                request_id=1, topic_name=topic, consumer_name="c", subscription="s"
            )
        )
    )
    assert code == grpc.StatusCode.NOT_FOUND
    lookup = session.discovery.TopicLookup(danube.TopicLookupRequest(request_id=1, topic=topic))
    assert await refused(lookup) == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "name",
    [
        "",
        "orders",
        "/default",
        "/default/",
        "//orders",
        "a/b/c",
        "/default/a/b",
        "/default/a b",
        "/default/..",
        "/default/a\nb",
        "/default/" + "x" * 300,
    ],
    ids=repr,
)
async def test_a_bad_topic_name_is_refused_everywhere(session, name):
    request = danube.TopicLookupRequest(request_id=1, topic=name)
    calls = [
        session.discovery.TopicLookup(request),
        session.discovery.TopicPartitions(request),
        session.raw_producers.CreateProducer(
            danube.ProducerRequest(request_id=1, producer_name="p", topic_name=name)
        ),
        session.raw_consumers.Subscribe(
            danube.ConsumerRequest(
                request_id=1, topic_name=name, consumer_name="c", subscription="s"
            )
        ),
        session.topics.CreateTopic(danube_admin.NewTopicRequest(name=name)),
    ]
    codes = [await refused(call) for call in calls]
    assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * len(calls)


async def test_a_lookup_tells_urls_that_every_client_can_parse(session, broker, topic):
    await session.create_topic(topic)
    answer = await session.discovery.TopicLookup(
        danube.TopicLookupRequest(request_id=7, topic=topic)
    )
    assert answer.request_id == 7
    assert answer.response_type == danube.TopicLookupResponse.LookupType.Value("Connect")
    assert answer.connect_url == f"http://{broker.address}"
    assert answer.broker_url == f"http://{broker.address}"
    assert not answer.proxy
    assert await session.partitions(topic) == [topic]


async def test_a_namespace_that_is_not_there_takes_no_topic_until_it_is_made(session):
    topic = "/billing-eu/invoices"

    with pytest.raises(grpc.aio.AioRpcError):
        await session.raw_producers.CreateProducer(
            danube.ProducerRequest(
                request_id=1, producer_name="p", topic_name=topic, dispatch_strategy=1
            )
        )
    made = await session.namespaces.CreateNamespace(
        danube_admin.NamespaceRequest(name="billing-eu")
    )
    assert made.success
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await producer.send(b"one")
    assert texts(await inbox.take(1)) == ["one"]
    listed = await session.namespaces.GetNamespaceTopics(
        danube_admin.NamespaceRequest(name="billing-eu")
    )
    assert list(listed.topics) == [topic]
    # Only an empty one goes.
    await refused(
        session.namespaces.DeleteNamespace(danube_admin.NamespaceRequest(name="billing-eu"))
    )


async def test_a_topic_keeps_its_dispatch_strategy(session, topic):
    await session.producer(topic, reliable=True)
    code = await refused(session.producer(topic, "another", reliable=False))
    assert code == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_subscription_keeps_its_kind(session, topic):
    await session.producer(topic)
    await session.consumer(topic, "first", kind=SHARED)
    code = await refused(session.consumer(topic, "second", kind=EXCLUSIVE))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert (await session.describe(topic)).kind == "shared"


async def test_an_exclusive_subscription_with_a_live_consumer_takes_no_other(session, topic):
    await session.producer(topic)
    first = await session.consumer(topic, "first")
    code = await refused(session.consumer(topic, "second"))
    assert code == grpc.StatusCode.PERMISSION_DENIED
    await session.send(topic, ["still the first one's"], name="another")
    assert texts(await first.take(1)) == ["still the first one's"]


async def test_an_unsubscribed_subscription_is_gone_and_begins_anew(session, topic):
    await session.producer(topic)
    inbox = await session.consumer(topic)
    request = danube_admin.SubscriptionRequest(topic=topic, subscription="sub")
    # Not while somebody is attached.
    await refused(session.topics.Unsubscribe(request))
    await inbox.close()
    await session.send(topic, numbered(3), name="another")

    async def is_gone():
        try:
            return (await session.topics.Unsubscribe(request)).success
        except grpc.aio.AioRpcError:
            return False

    await eventually(is_gone)
    assert await session.subscriptions(topic) == []
    again = await session.consumer(topic)
    await again.expect_silence()
    await session.send(topic, ["new"], name="another")
    assert texts(await again.take(1)) == ["new"]


async def test_a_deleted_topic_is_gone_with_its_subscriptions(session, topic):
    await session.send(topic, numbered(5))
    inbox = await session.consumer(topic)
    await inbox.close()
    answer = await session.topics.DeleteTopic(danube_admin.TopicRequest(name=topic))
    assert answer.success
    assert await session.partitions(topic) == []
    # The next topic of the name is another one: it begins at 0, without subscriptions.
    await session.send(topic, ["first"], name="another")
    assert await session.subscriptions(topic) == []
    again = await session.consumer(topic)
    await session.send(topic, ["second"], name="another")
    [message] = await again.take(1)
    assert (message.msg_id.topic_offset, message.payload) == (1, b"second")


# -- seek -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        ({"offset": 3}, numbered(7, start=3)),
        ({"earliest": True}, numbered(10)),
        ({"latest": True}, []),
        ({"publish_time_ms": 0}, numbered(10)),
        ({"publish_time_ms": 1 << 45}, []),
    ],
    ids=["offset", "earliest", "latest", "time-before", "time-after"],
)
async def test_an_attached_subscription_is_moved(session, topic, to, expected):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    for payload in numbered(10):
        await producer.send(payload.encode())
    assert texts(await inbox.take(5)) == numbered(5)
    held = await inbox.take(5, ack=False)
    await session.seek(topic, **to)
    await producer.send(b"end")
    assert texts(await inbox.take(len(expected) + 1)) == [*expected, "end"]
    await session.wait_for_cursor(topic, 11)
    # They were sent before the move: harmless now.
    await inbox.ack(*held)
    assert (await session.describe(topic)).cursor == 11


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED], ids=lambda k: k.name)
async def test_a_seek_back_on_an_idle_topic_needs_no_publish(session, topic, kind):
    await session.send(topic, numbered(3))
    inbox = await session.consumer(topic, kind=kind)
    await inbox.expect_silence(0.3)
    await session.seek(topic, earliest=True)
    assert texts(await inbox.take(3)) == numbered(3)
    await session.seek(topic, offset=1)
    assert texts(await inbox.take(2)) == numbered(2, start=1)
    await session.wait_for_cursor(topic, 3)


async def test_a_seek_beyond_the_end_is_refused(session, topic):
    await session.send(topic, numbered(3))
    await session.consumer(topic)
    await refused(session.seek(topic, offset=1000))
    assert (await session.describe(topic)).cursor == 3


# -- non-reliable topics --------------------------------------------------------------------------


async def test_a_full_non_reliable_subscription_does_not_stall_publishing(session, broker, topic):
    """One consumer reads nothing at all; everybody else goes on, and nothing is stored for it."""
    payload = random.Random(7).randbytes(64 * 1024)

    async with connect(broker, own_connection=True) as stalled:
        producer = await session.producer(topic, reliable=False)
        subscribed = await stalled.raw_consumers.Subscribe(
            danube.ConsumerRequest(
                request_id=1, topic_name=topic, consumer_name="stalled", subscription="stalled"
            )
        )
        # A stream that is open, and never read from.
        stream = stalled.raw_consumers.ReceiveMessages(
            danube.ReceiveRequest(request_id=2, consumer_id=subscribed.consumer_id)
        )
        inbox = await session.consumer(topic, "quick", subscription="quick")
        got = []
        for number in range(100):
            await producer.send(payload, {"number": str(number)})
            got += await inbox.take(1)
        assert [m.attributes["number"] for m in got] == [str(n) for n in range(100)]
        stream.cancel()


async def test_a_non_reliable_queue_is_shared(session, topic):
    producer = await session.producer(topic, reliable=False)
    inboxes = [await session.consumer(topic, f"c{n}", kind=SHARED) for n in range(3)]
    collecting = asyncio.create_task(collect(inboxes, 30))
    await asyncio.sleep(0.2)
    for payload in numbered(30):
        await producer.send(payload.encode())
        # What nobody has room for is dropped here: they need not be hurried.
        await asyncio.sleep(0.01)
    taken = await collecting
    assert Counter(texts(chain(*taken))) == Counter(numbered(30))
    assert all(taken)


# -- policies -------------------------------------------------------------------------------------


async def test_no_more_producers_than_the_policy_says(session, topic):
    await session.create_topic(topic)
    await session.set_policies(topic, max_producers_per_topic=2)
    await session.producer(topic, "a")
    await session.producer(topic, "b")
    request = danube.ProducerRequest(
        request_id=1, producer_name="c", topic_name=topic, dispatch_strategy=1
    )
    code = await refused(session.raw_producers.CreateProducer(request))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    # One that is there already is no further one.
    await session.producer(topic, "b")


async def test_no_more_subscriptions_than_the_policy_says(session, topic):
    await session.create_topic(topic)
    await session.set_policies(topic, max_subscriptions_per_topic=2)
    await session.consumer(topic, "a", subscription="a")
    await session.consumer(topic, "b", subscription="b")
    await refused(subscribe_raw(session, topic, "c", subscription="c"))
    assert sorted(await session.subscriptions(topic)) == ["a", "b"]


def subscribe_raw(session, topic, name, *, subscription="sub", kind=SHARED):
    return session.raw_consumers.Subscribe(
        danube.ConsumerRequest(
            request_id=1,
            topic_name=topic,
            consumer_name=name,
            subscription=subscription,
            subscription_type=int(kind),
        )
    )


@pytest.mark.parametrize("where", ["topic", "subscription"])
async def test_no_more_consumers_than_the_policy_says(session, topic, where):
    await session.create_topic(topic)
    await session.set_policies(topic, **{f"max_consumers_per_{where}": 2})
    await session.consumer(topic, "a", kind=SHARED)
    second = await session.consumer(topic, "b", kind=SHARED)
    await refused(subscribe_raw(session, topic, "c"))
    # The same consumer again is no further one, and one that left makes room.
    await subscribe_raw(session, topic, "a")
    await second.close()

    async def has_room():
        try:
            return await subscribe_raw(session, topic, "c")
        except grpc.aio.AioRpcError:
            return None

    assert (await eventually(has_room)).consumer_id


async def test_no_more_consumers_than_the_policy_says_even_before_their_streams(session, topic):
    await session.create_topic(topic)
    await session.set_policies(topic, max_consumers_per_subscription=2)
    await subscribe_raw(session, topic, "a")
    await subscribe_raw(session, topic, "b")
    await refused(subscribe_raw(session, topic, "c"))


async def test_a_message_beyond_the_topics_size_limit_is_refused_and_harms_nothing(session, topic):
    await session.create_topic(topic)
    await session.set_policies(topic, max_message_size=1000)
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    assert await refused(producer.send(b"x" * 1001)) == grpc.StatusCode.INVALID_ARGUMENT
    await producer.send(b"y" * 1000)
    [message] = await inbox.take(1)
    assert (message.payload, message.msg_id.topic_offset) == (b"y" * 1000, 0)
