"""Danube's scenarios of partitioned topics, with its own client.

A partitioned topic is a thing of the client: so many topics with `-part-0`, `-part-1`, … behind the
name, written to in turn or by key, and a consumer that subscribes to each of them. The broker tells
which there are, and keeps plain and partitioned topics of one name apart.
"""

from collections import Counter
from itertools import chain

import pytest

pytest.importorskip("danube")

import grpc
from danube import UnrecoverableError
from danube.message_router import MessageRouter

from ister.wire import danube, danube_admin
from tests.support.danube import (
    EXCLUSIVE,
    SHARED,
    collect,
    offsets,
    refused,
    texts,
)

PARTITIONS = 3


def parts(topic, count=PARTITIONS):
    return [f"{topic}-part-{number}" for number in range(count)]


def by_partition(messages):
    """What came from which partition, in the order it came."""
    found = {}
    for message in messages:
        found.setdefault(message.msg_id.topic_name, []).append(message)
    return found


@pytest.mark.parametrize("reliable", [True, False], ids=["reliable", "non-reliable"])
@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED], ids=lambda kind: kind.name)
async def test_messages_of_all_partitions_are_received(session, topic, kind, reliable):
    sent = [f"message {number}" for number in range(12)]

    producer = await session.producer(topic, partitions=PARTITIONS, reliable=reliable)
    inbox = await session.consumer(topic, kind=kind)
    messages = []
    for text in sent:
        await producer.send(text.encode())
        if not reliable:
            messages += await inbox.take(1)
    if reliable:
        messages = await inbox.take(12)
    assert Counter(texts(messages)) == Counter(sent)
    found = by_partition(messages)
    assert sorted(found) == parts(topic)
    # In turn, and each partition in the order it was written.
    for number, name in enumerate(parts(topic)):
        assert texts(found[name]) == sent[number::PARTITIONS]
        # Danube's clients get 0 where there is no log.
        assert offsets(found[name]) == ([0, 1, 2, 3] if reliable else [0, 0, 0, 0])
    if reliable:
        for name in parts(topic):
            await session.wait_for_cursor(name, 4)


async def test_a_partitioned_queue_is_shared(session, topic):
    producer = await session.producer(topic, partitions=PARTITIONS)
    inboxes = [await session.consumer(topic, f"c{n}", kind=SHARED) for n in range(3)]
    sent = [f"message {number}" for number in range(60)]
    for text in sent:
        await producer.send(text.encode())
    taken = await collect(inboxes, 60)
    everything = list(chain(*taken))
    assert Counter(texts(everything)) == Counter(sent)
    assert sorted(by_partition(everything)) == parts(topic)
    assert all(12 <= len(part) <= 28 for part in taken), [len(part) for part in taken]


async def test_every_subscription_gets_all_partitions(session, topic):
    producer = await session.producer(topic, partitions=PARTITIONS)
    inboxes = [
        await session.consumer(topic, f"reader-{name}", subscription=f"sub-{name}")
        for name in "abc"
    ]
    sent = [f"message {number}" for number in range(45)]
    for text in sent:
        await producer.send(text.encode())
    for inbox in inboxes:
        messages = await inbox.take(45)
        assert Counter(texts(messages)) == Counter(sent)
        assert {name: len(m) for name, m in by_partition(messages).items()} == dict.fromkeys(
            parts(topic), 15
        )


async def test_a_partition_is_a_topic_that_can_be_subscribed_to(session, topic):
    producer = await session.producer(topic, partitions=PARTITIONS)
    one = parts(topic)[1]
    inbox = await session.consumer(one)
    for number in range(6):
        await producer.send(f"message {number}".encode())
    assert texts(await inbox.take(2)) == ["message 1", "message 4"]
    await inbox.expect_silence()
    assert await session.partitions(one) == [one]


async def test_a_key_stays_in_its_partition(session, topic):
    keys = [f"user-{number}" for number in range(12)]

    producer = await session.producer(topic, partitions=PARTITIONS)
    inbox = await session.consumer(topic)
    for turn in range(3):
        for key in keys:
            await producer.send_with_key(f"{key} {turn}".encode(), None, key)
    messages = await inbox.take(36)
    router = MessageRouter(PARTITIONS)
    for message in messages:
        number = router.key_route(message.routing_key)
        assert message.msg_id.topic_name == f"{topic}-part-{number}"
    for key in keys:
        assert texts(m for m in messages if m.routing_key == key) == [
            f"{key} {turn}" for turn in range(3)
        ]


async def test_partitions_made_by_an_admin_are_used_by_producers_and_consumers(session, topic):
    answer = await session.topics.CreatePartitionedTopic(
        danube_admin.PartitionedTopicRequest(
            base_name=topic, partitions=PARTITIONS, dispatch_strategy=1
        )
    )
    assert answer.success
    assert sorted(await session.partitions(topic)) == parts(topic)
    inbox = await session.consumer(topic)
    producer = await session.producer(topic, partitions=PARTITIONS)
    for number in range(6):
        await producer.send(f"message {number}".encode())
    assert sorted(by_partition(await inbox.take(6))) == parts(topic)


async def test_more_than_ten_partitions_are_all_listed(session, topic):
    await session.topics.CreatePartitionedTopic(
        danube_admin.PartitionedTopicRequest(base_name=topic, partitions=12, dispatch_strategy=1)
    )
    # In the order of their numbers, not of their names.
    assert await session.partitions(topic) == parts(topic, 12)


async def test_a_plain_topic_cannot_become_a_partitioned_one(session, topic):
    await session.producer(topic)
    with pytest.raises(UnrecoverableError):
        await session.producer(topic, partitions=PARTITIONS)
    code = await refused(
        session.topics.CreatePartitionedTopic(
            danube_admin.PartitionedTopicRequest(
                base_name=topic, partitions=PARTITIONS, dispatch_strategy=1
            )
        )
    )
    assert code == grpc.StatusCode.ALREADY_EXISTS
    assert await session.partitions(topic) == [topic]


async def test_a_partitioned_topic_cannot_become_a_plain_one(session, topic):
    await session.producer(topic, partitions=PARTITIONS)
    with pytest.raises(UnrecoverableError):
        await session.producer(topic)
    code = await refused(
        session.topics.CreateTopic(danube_admin.NewTopicRequest(name=topic, dispatch_strategy=1))
    )
    assert code == grpc.StatusCode.ALREADY_EXISTS
    assert await session.partitions(topic) == parts(topic)


async def test_a_partitioned_topic_without_partitions_is_refused(session, topic):
    code = await refused(
        session.topics.CreatePartitionedTopic(
            danube_admin.PartitionedTopicRequest(base_name=topic, partitions=0)
        )
    )
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert await session.partitions(topic) == []


async def test_a_lookup_finds_a_partition_and_no_partitioned_base(session, topic):
    """Producers and consumers look up partitions; a topic of the base's name does not exist."""

    await session.producer(topic, partitions=PARTITIONS)
    one = await session.discovery.TopicLookup(
        danube.TopicLookupRequest(request_id=1, topic=parts(topic)[0])
    )
    assert one.response_type == danube.TopicLookupResponse.LookupType.Value("Connect")
    base = session.discovery.TopicLookup(danube.TopicLookupRequest(request_id=1, topic=topic))
    assert await refused(base) == grpc.StatusCode.NOT_FOUND
