"""Danube's scenarios with its own client: what comes to whom, keys, partitions, names, requests.

Scenarios that take `either` are run with Ister's client as well. Here is what clients see; how a
broker decides is told in tests/unit/subscription and tests/unit/broker. Faults that were found in
Danube are numbered by where they lie: 2.2 subscriptions that begin at the end, 2.8 the dispatcher
and what surrounds it, 3.2 what its Python client needs of a broker. Failures, restarts and schemas
have files of their own.
"""

import asyncio
import contextlib
import random
from collections import Counter, defaultdict
from itertools import chain

import grpc
import pytest
from danube.message_router import MessageRouter

from ister.wire import danube, danube_admin, ister_api
from tests.support.danube import (
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    SHARED,
    collect,
    eventually,
    numbered,
    offsets,
    refused,
    texts,
)

INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
PARTITIONS = 3
KINDS = [EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
# Ister's client makes topics with a log.
DISPATCHES = [("danube", True), ("danube", False), ("ister", True)]
each_dispatch = pytest.mark.parametrize(("either", "reliable"), DISPATCHES, indirect=["either"])


def parts(topic, count=PARTITIONS):
    """The topics of a partitioned one, or the only one."""
    return [f"{topic}-part-{number}" for number in range(count)] or [topic]


def by_topic(messages):
    """What came from which topic, in the order it came."""
    found = defaultdict(list)
    for message in messages:
        found[message.msg_id.topic_name].append(message)
    return found


async def publish(producer, payloads):
    for payload in payloads:
        await producer.send(payload.encode())


def subscribe(session, topic, name="raw", *, subscription="sub", kind=EXCLUSIVE):
    """The bare call, without the client around it."""
    return session.raw_consumers.Subscribe(
        danube.ConsumerRequest(
            request_id=1,
            topic_name=topic,
            consumer_name=name,
            subscription=subscription,
            subscription_type=int(kind),
        )
    )


def look_up(session, topic):
    return session.discovery.TopicLookup(danube.TopicLookupRequest(request_id=7, topic=topic))


# -- one consumer ---------------------------------------------------------------------------------


@each_dispatch
@each_kind
async def test_a_message_is_received_and_acknowledged(either, topic, kind, reliable):
    producer = await either.producer(topic, reliable=reliable)
    # As programs do: subscribed is subscribed, whether or not the stream is open yet.
    inbox = await either.consumer(topic, kind=kind, attached=False)
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
        await either.wait_for_cursor(topic, message.msg_id.topic_offset + 1)


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED], ids=lambda kind: kind.name)
async def test_messages_of_any_size_arrive_intact(session, topic, kind):
    """One that no client can receive is refused, or holds nobody up."""
    chance = random.Random(5)
    odd = {"": "empty", "ключ": "значение", "x" * 200: "y" * 2000}
    # gRPC's own limit in the client is 4 MiB for a message with everything around it.
    sent = [
        b"",
        *(chance.randbytes(300_000) for _ in range(20)),
        chance.randbytes((4 << 20) - 8192),
    ]
    producer = await session.producer(topic)
    inbox = await session.consumer(topic, kind=kind)
    for payload in sent:
        await producer.send(payload, odd)
    messages = await inbox.take(len(sent))
    assert offsets(messages) == list(range(len(sent)))
    assert [message.payload for message in messages] == sent
    assert all(dict(message.attributes) == odd for message in messages)
    with contextlib.suppress(grpc.aio.AioRpcError):
        await producer.send(b"x" * (5 << 20))
    await producer.send(b"next")
    assert texts(await inbox.take(1)) == ["next"]


@pytest.mark.parametrize(("count", "window"), [(100, None), (600, 10)])
async def test_a_burst_is_delivered_without_a_further_publish(either, topic, count, window):
    """Also fault 2.2: a new subscription reads from a channel of 256 messages, behind a hole."""
    producer = await either.producer(topic)
    inbox = await either.consumer(topic)
    if window is not None:
        await either.set_window(topic, window)
    await asyncio.gather(*(producer.send(text.encode()) for text in numbered(count)))
    messages = await inbox.take(count)
    assert Counter(texts(messages)) == Counter(numbered(count))
    assert offsets(messages) == list(range(count))
    await either.wait_for_cursor(topic, count)


async def test_bursts_with_pauses_are_delivered_without_a_further_publish(either, topic):
    """Whoever waits at the end of the log is woken by the next burst, and by the last one."""
    producer = await either.producer(topic)
    inbox = await either.consumer(topic)
    for burst in range(3):
        await publish(producer, numbered(10, 10 * burst))
        assert texts(await inbox.take(10)) == numbered(10, 10 * burst)
        await inbox.expect_silence()
    await either.wait_for_cursor(topic, 30)


async def test_a_subscription_made_during_a_burst_gets_all_that_follow_it(either, topic):
    """Offsets from where it begins to the end, without a hole, whichever way the race went."""
    producer = await either.producer(topic)
    await publish(producer, numbered(5))
    publishing = asyncio.create_task(publish(producer, numbered(95, start=5)))
    inbox = await either.consumer(topic)
    start = (await either.describe(topic)).cursor
    await publishing
    await either.send(topic, ["end"], name="another")
    got = []
    while not got or got[-1].payload != b"end":
        got += await inbox.take(1)
    assert offsets(got) == list(range(100 - len(got) + 1, 101))
    # Nothing was acknowledged when the broker was asked, so the cursor was its start.
    assert offsets(got)[0] <= start


# -- several consumers ----------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [0, PARTITIONS])
async def test_every_subscription_gets_every_message(either, topic, partitions):
    """Partitions are written to in turn; each comes in the order in which it was written."""
    sent = numbered(24)
    producer = await either.producer(topic, partitions=partitions)
    inboxes = [
        await either.consumer(topic, f"reader-{kind.name}", subscription=kind.name, kind=kind)
        for kind in (EXCLUSIVE, SHARED, FAILOVER)
    ]
    await publish(producer, sent)
    for inbox in inboxes:
        found = by_topic(await inbox.take(24))
        assert sorted(found) == parts(topic, partitions)
        for number, name in enumerate(parts(topic, partitions)):
            assert texts(found[name]) == sent[number :: max(1, partitions)]
            assert offsets(found[name]) == list(range(len(found[name])))
        await inbox.expect_silence(0.2)


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED], ids=lambda kind: kind.name)
async def test_messages_of_non_reliable_partitions_are_received(session, topic, kind):
    producer = await session.producer(topic, partitions=PARTITIONS, reliable=False)
    inbox = await session.consumer(topic, kind=kind)
    messages = []
    for text in numbered(6):
        await producer.send(text.encode())
        messages += await inbox.take(1)
    assert texts(messages) == numbered(6)
    assert [m.msg_id.topic_name for m in messages] == parts(topic) * 2
    # Danube's clients get 0 where there is no log.
    assert offsets(messages) == [0] * 6


async def test_subscriptions_come_and_go_and_each_gets_its_part(either, topic):
    """The third one joins after 15 of 45 messages, the first one leaves after 30.

    A new one begins behind what is there, and who acknowledges nothing holds no other up.
    """
    producer = await either.producer(topic)
    first = await either.consumer(topic, "a", subscription="a")
    second = await either.consumer(topic, "b", subscription="b")
    await publish(producer, numbered(15))
    third = await either.consumer(topic, "c", subscription="c")
    await publish(producer, numbered(15, start=15))
    assert texts(await first.take(30)) == numbered(30)
    await first.close()
    await publish(producer, numbered(15, start=30))
    assert texts(await second.take(45)) == numbered(45)
    assert texts(await third.take(30)) == numbered(30, start=15)
    # What it missed is still there for it.
    again = await either.consumer(topic, "a", subscription="a")
    assert texts(await again.take(15)) == numbered(15, start=30)


@pytest.mark.parametrize("partitions", [0, PARTITIONS])
@each_dispatch
async def test_a_queue_is_shared_evenly(either, topic, partitions, reliable):
    producer = await either.producer(topic, partitions=partitions, reliable=reliable)
    inboxes = [await either.consumer(topic, f"c{n}", kind=SHARED) for n in range(3)]
    collecting = asyncio.create_task(collect(inboxes, 60))
    for payload in numbered(60):
        await producer.send(payload.encode())
        if not reliable:
            # What nobody has room for is dropped here: they need not be hurried.
            await asyncio.sleep(0.01)
    taken = await collecting
    assert Counter(texts(chain(*taken))) == Counter(numbered(60))
    assert sorted(by_topic(chain(*taken))) == parts(topic, partitions)
    counts = [len(part) for part in taken]
    assert all(12 <= count <= 28 for count in counts) or not reliable, counts
    assert all(taken)


async def test_a_queue_whose_consumers_join_and_leave_loses_nothing(either, topic):
    producer = await either.producer(topic)
    first = await either.consumer(topic, "first", kind=SHARED)
    second = await either.consumer(topic, "second", kind=SHARED)
    await publish(producer, numbered(15))
    early = await collect([first, second], 15)
    third = await either.consumer(topic, "third", kind=SHARED)
    await publish(producer, numbered(15, start=15))
    middle = await collect([first, second, third], 15)
    await first.close()
    await publish(producer, numbered(15, start=30))
    late = await collect([second, third], 15)
    assert Counter(texts(chain(*early, *middle, *late))) == Counter(numbered(45))
    assert all([*early, *middle, *late])


async def test_consumers_that_leave_in_the_middle_of_a_burst_stop_nothing(either, topic):
    producer = await either.producer(topic)
    leaver = await either.consumer(topic, "leaver", kind=SHARED)
    stayer = await either.consumer(topic, "stayer", kind=SHARED)
    sends = [asyncio.create_task(producer.send(t.encode())) for t in numbered(100)]
    await leaver.one()
    await leaver.close()
    await asyncio.gather(*sends)
    # What the leaver had and never acknowledged comes to the one who stayed.
    [taken] = await collect([stayer], 100)
    assert set(texts(taken)) == set(numbered(100))


# -- keys -----------------------------------------------------------------------------------------


class Workers:
    """Consumers that acknowledge all that comes to them, and note it."""

    def __init__(self, inboxes, seen=None):
        self.seen = [] if seen is None else seen
        """(consumer, message), as they came."""
        self._tasks = [
            asyncio.create_task(self._work(name, inbox)) for name, inbox in inboxes.items()
        ]

    async def _work(self, name, inbox):
        while True:
            message = await inbox.queue.get()
            self.seen.append((name, message))
            await inbox.ack(message)

    async def until(self, count):
        """All `count` of them, and nothing more."""
        await eventually(lambda: len(self.seen) >= count)
        await asyncio.sleep(0.2)
        await self.stop()
        assert len(self.seen) == count
        return self.seen

    async def stop(self):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def owners(seen):
    """Which consumers each key came to."""
    found = defaultdict(set)
    for name, message in seen:
        found[message.routing_key].add(name)
    return found


def order(seen, key):
    return texts(message for _, message in seen if message.routing_key == key)


async def join(session, topic, *names, filters=()):
    return {
        name: await session.consumer(topic, name, kind=KEY_SHARED, filters=filters)
        for name in names
    }


async def publish_keys(producer, keys, turns):
    for turn in turns:
        for key in keys:
            await producer.send_with_key(f"{key} {turn}".encode(), None, key)


def turns_of(key, count):
    return [f"{key} {turn}" for turn in range(count)]


@pytest.mark.parametrize("partitions", [0, PARTITIONS])
@pytest.mark.parametrize("names", ["a", "abc"])
@each_dispatch
async def test_a_key_comes_to_one_consumer_in_order(either, topic, names, partitions, reliable):
    keys = [f"user-{number}" for number in range(20)]
    producer = await either.producer(topic, partitions=partitions, reliable=reliable)
    workers = Workers(await join(either, topic, *names))
    await publish_keys(producer, keys, range(5))
    seen = await workers.until(100)
    router = MessageRouter(max(1, partitions))
    for key in keys:
        assert len(owners(seen)[key]) == 1
        assert order(seen, key) == turns_of(key, 5)
    # Twenty keys are spread over three: everybody has work.
    assert {name for name, _ in seen} == set(names)
    for _, message in seen:
        number = router.key_route(message.routing_key)
        assert message.msg_id.topic_name == parts(topic, partitions)[number]


async def test_messages_without_a_key_go_by_their_producer(either, topic):
    producers = [await either.producer(topic, f"producer-{n}") for n in range(4)]
    workers = Workers(await join(either, topic, "a", "b"))
    for turn in range(5):
        for number, producer in enumerate(producers):
            await producer.send(f"{number} {turn}".encode())
    seen = await workers.until(20)
    for number in range(4):
        mine = [
            (name, m.payload.decode()) for name, m in seen if m.payload.startswith(b"%d" % number)
        ]
        assert len({name for name, _ in mine}) == 1
        assert [text for _, text in mine] == turns_of(number, 5)


async def test_keys_wait_for_themselves_alone_and_acks_come_in_any_order(either, topic):
    """One message of each key is out at a time; acknowledging the last key first is fine."""
    producer = await either.producer(topic)
    inbox = (await join(either, topic, "only"))["only"]
    await publish_keys(producer, "abc", range(2))
    first = await inbox.take(3, ack=False)
    assert texts(first) == ["a 0", "b 0", "c 0"]
    await inbox.expect_silence()
    for message in reversed(first):
        await inbox.ack(message)
        assert texts(await inbox.take(1)) == [f"{message.routing_key} 1"]
    await either.wait_for_cursor(topic, 6)


@each_dispatch
async def test_a_consumer_that_joins_takes_over_some_keys_and_no_order_is_lost(
    either, topic, reliable
):
    keys = [f"user-{number}" for number in range(20)]
    producer = await either.producer(topic, reliable=reliable)
    first = Workers(await join(either, topic, "a"))
    await publish_keys(producer, keys, range(3))
    second = Workers(await join(either, topic, "b"), first.seen)
    await publish_keys(producer, keys, range(3, 6))
    await eventually(lambda: len(first.seen) >= 120)
    await second.stop()
    seen = await first.until(120)
    for key in keys:
        came = order(seen, key)
        # Without acknowledgements, a key may come to its new consumer before the old one
        # has handled all of it.
        assert (came if reliable else sorted(came)) == turns_of(key, 6)
    assert {name for name, _ in seen} == {"a", "b"}


@pytest.mark.parametrize("partitions", [0, PARTITIONS])
async def test_a_consumer_that_leaves_hands_its_keys_to_the_others(either, topic, partitions):
    """What it had, what waited for it, and what is sent when it has gone, each key in order."""
    keys = [f"user-{number}" for number in range(12)]
    producer = await either.producer(topic, partitions=partitions)
    stays = await join(either, topic, "stays")
    leaves = (await join(either, topic, "leaves"))["leaves"]
    await publish_keys(producer, keys, range(2))
    await leaves.one()
    await leaves.close()
    await publish_keys(producer, keys, [2])
    seen = await Workers(stays).until(36)
    for key in keys:
        assert order(seen, key) == turns_of(key, 3)


@pytest.mark.parametrize("partitions", [0, PARTITIONS])
@each_dispatch
async def test_a_filter_takes_the_keys_that_match(either, topic, partitions, reliable):
    producer = await either.producer(topic, partitions=partitions, reliable=reliable)
    eu = await join(either, topic, "eu", filters=["eu-?"])
    us = await join(either, topic, "us", filters=["us-*", "ca-*"])
    workers = Workers({**eu, **us})
    keys = ["eu-1", "us-1", "eu-é", "ca-1", "us-22"]
    # What nobody takes is passed over.
    await publish_keys(producer, [*keys, "eu-12", "xeu-1", "EU-1"], range(2))
    seen = await workers.until(10)
    assert owners(seen) == {key: {"eu" if key.startswith("eu-") else "us"} for key in keys}
    if reliable and not partitions:
        await either.wait_for_cursor(topic, 16)


@each_dispatch
async def test_a_consumer_without_a_filter_takes_what_the_others_leave(either, topic, reliable):
    producer = await either.producer(topic, reliable=reliable)
    vip = await join(either, topic, "vip", filters=["vip-*"])
    rest = await join(either, topic, "rest")
    workers = Workers({**vip, **rest})
    keys = [f"{kind}-{number}" for number in range(10) for kind in ("vip", "other")]
    await publish_keys(producer, keys, [0])
    found = owners(await workers.until(20))
    assert all(found[f"other-{number}"] == {"rest"} for number in range(10))
    # Both take the VIPs: each key stays with one of them.
    assert all(len(names) == 1 for names in found.values())


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
    await publish(producer, numbered(10))
    assert texts(await inbox.take(5)) == numbered(5)
    held = await inbox.take(5, ack=False)
    await session.seek(topic, **to)
    await producer.send(b"end")
    assert texts(await inbox.take(len(expected) + 1)) == [*expected, "end"]
    await session.wait_for_cursor(topic, 11)
    # They were sent before the move: harmless now.
    await inbox.ack(*held)
    await refused(session.seek(topic, offset=1000))
    assert (await session.describe(topic)).cursor == 11


@each_kind
async def test_a_seek_back_on_an_idle_topic_needs_no_publish(either, topic, kind):
    await either.send(topic, numbered(3))
    inbox = await either.consumer(topic, kind=kind)
    await inbox.expect_silence(0.3)
    await either.seek(topic, earliest=True)
    assert texts(await inbox.take(3)) == numbered(3)
    await either.wait_for_cursor(topic, 3)
    await either.seek(topic, offset=1)
    assert texts(await inbox.take(2)) == numbered(2, start=1)
    await either.wait_for_cursor(topic, 3)


# -- names and lookups ----------------------------------------------------------------------------


async def test_a_lookup_tells_urls_that_every_client_can_parse(session, broker, topic):
    """Of plain topics and of partitions, which are topics; there is none of the base's name."""
    await session.producer(topic, partitions=PARTITIONS)
    plain, one = f"{topic}-plain", parts(topic)[1]
    await session.create_topic(plain)
    for name in (plain, one):
        answer = await look_up(session, name)
        assert answer.request_id == 7
        assert answer.response_type == danube.TopicLookupResponse.LookupType.Value("Connect")
        assert answer.connect_url == answer.broker_url == f"http://{broker.address}"
        assert not answer.proxy
        assert await session.partitions(name) == [name]
    assert await refused(look_up(session, topic)) == MISSING
    inbox = await session.consumer(one)
    await publish(await session.producer(topic, partitions=PARTITIONS), numbered(6))
    assert texts(await inbox.take(2)) == ["message 1", "message 4"]
    await inbox.expect_silence()


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


# -- odd requests ---------------------------------------------------------------------------------


async def test_requests_that_lack_something_are_answered_with_a_clear_status(session, topic):
    """Fault 2.8: handlers panic, or calls end in an error of the broker's own."""
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    for call in (
        session.raw_producers.SendMessage(danube.StreamMessage(payload=b"x")),
        session.raw_consumers.Ack(danube.AckRequest(subscription_name="sub")),
        session.raw_consumers.Nack(danube.NackRequest(subscription_name="sub")),
        session.raw_consumers.Ack(danube.AckRequest()),
    ):
        assert await refused(call) == INVALID
    admin, policies = session.topics, danube_admin
    calls = [
        session.raw_producers.CreateProducer(danube.ProducerRequest()),
        session.raw_producers.SendMessage(danube.StreamMessage()),
        session.raw_consumers.Subscribe(danube.ConsumerRequest()),
        session.raw_consumers.Ack(danube.AckRequest(msg_id=danube.MsgID())),
        session.raw_consumers.Nack(danube.NackRequest(msg_id=danube.MsgID())),
        session.discovery.TopicLookup(danube.TopicLookupRequest()),
        admin.CreateTopic(danube_admin.NewTopicRequest()),
        admin.DeleteTopic(danube_admin.TopicRequest()),
        admin.Unsubscribe(danube_admin.SubscriptionRequest()),
        admin.SetSubscriptionFailurePolicy(policies.SetSubscriptionFailurePolicyRequest()),
        admin.SetSubscriptionDispatchConfig(policies.SetSubscriptionDispatchConfigRequest()),
        session.namespaces.CreateNamespace(danube_admin.NamespaceRequest()),
        session.admin.Seek(ister_api.SeekRequest()),
    ]
    # UNAVAILABLE of a send that names no producer: the client looks up and registers again.
    assert {await refused(call) for call in calls} <= {INVALID, MISSING, UNAVAILABLE}
    await producer.send(b"one")
    assert texts(await inbox.take(1)) == ["one"]


async def test_a_send_with_an_unknown_producer_id_goes_through(session, topic):
    """Fault 3.2: NOT_FOUND reaches the program at once; the client heals UNAVAILABLE alone."""
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    producer._producers[0].producer_id = 123_456
    await asyncio.wait_for(producer.send(b"one"), 60)
    assert texts(await inbox.take(1)) == ["one"]
    nobody = danube.MsgID(topic_name=topic, producer_id=42)
    call = session.raw_producers.SendMessage(danube.StreamMessage(msg_id=nobody, payload=b"x"))
    assert await refused(call) == UNAVAILABLE


async def test_acknowledgements_go_by_offset_and_not_by_request(session, topic):
    """Fault 3.2: request ids begin anew with every producer, so two messages share one."""
    left = await session.producer(topic, "left")
    right = await session.producer(topic, "right")
    inbox = await session.consumer(topic)
    for number in range(5):
        await left.send(f"left {number}".encode())
        await right.send(f"right {number}".encode())
    messages = await inbox.take(10, ack=False)
    assert set(Counter(message.request_id for message in messages).values()) == {2}
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
        request = danube.AckRequest(
            request_id=1,
            msg_id=danube.MsgID(topic_name=name, topic_offset=0),
            subscription_name=subscription,
        )
        assert await refused(session.raw_consumers.Ack(request)) == MISSING
