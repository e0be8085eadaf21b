"""Danube's scenarios of failure policies, in the order of its tools: policy first, then consumers.

Danube's own tests create a topic, set the policy of a subscription that does not exist yet, read it
back, and subscribe. Each test below is one of them; the name of Danube's is in its docstring.
"""

import asyncio

import pytest

pytest.importorskip("danube")

import grpc

from ister.wire import danube_admin
from tests.servers.broker import BrokerProcess
from tests.support.danube import (
    EXCLUSIVE,
    KEY_SHARED,
    SHARED,
    connect,
    eventually,
    offsets,
    refused,
    texts,
)


def policy_of(**changes):
    """A policy as Danube's tests have it: fixed delays of 50 ms."""
    fields = {
        "max_redelivery_count": 0,
        "ack_timeout_ms": 5000,
        "base_redelivery_delay_ms": 50,
        "max_redelivery_delay_ms": 50,
        "backoff_strategy": 0,
        "poison_policy": 1,
    }
    return danube_admin.SubscriptionFailurePolicy(**fields | changes)


DROP, BLOCK, DEAD_LETTER = {"poison_policy": 2}, {"poison_policy": 1}, {"poison_policy": 0}


async def plan(session, topic, *, is_new=True, subscription="sub", **changes):
    """Creates a topic and sets a policy for a subscription to come, and reads it back."""
    if is_new:
        await session.create_topic(topic)
    policy = policy_of(**changes)
    answer = await session.topics.SetSubscriptionFailurePolicy(
        danube_admin.SetSubscriptionFailurePolicyRequest(
            topic=topic, subscription=subscription, failure_policy=policy
        )
    )
    assert answer.success
    stored = await stored_policy(session, topic, subscription)
    assert (stored.failure_policy, stored.subscription_type) == (policy, 0)
    assert await session.subscriptions(topic) == []


async def stored_policy(session, topic, subscription="sub"):
    return await session.topics.GetSubscriptionFailurePolicy(
        danube_admin.GetSubscriptionFailurePolicyRequest(topic=topic, subscription=subscription)
    )


async def window_of(session, topic):
    found = await session.topics.GetSubscriptionDispatchConfig(
        danube_admin.GetSubscriptionDispatchConfigRequest(topic=topic, subscription="sub")
    )
    return found.dispatch_config.max_unacked_messages


def identity(message):
    return message.msg_id.topic_offset, message.payload


# -- redelivery ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED, KEY_SHARED], ids=lambda kind: kind.name)
async def test_nack_redelivers_the_same_message(session, topic, kind):
    """reliable_{exclusive,shared}_nack_redelivers_same_message, and key_shared_reliable_…"""
    await plan(session, topic, max_redelivery_count=2)
    inbox = await session.consumer(topic, kind=kind)
    producer = await session.producer(topic)
    await producer.send_with_key(b"again", None, "key")
    first = await inbox.one()
    await inbox.nack(first, delay_ms=0, reason="retry please")
    second = await inbox.one(ack=True)
    assert identity(second) == identity(first)
    await session.wait_for_cursor(topic, 1)


async def test_ack_timeout_redelivers_the_same_message(session, topic):
    """reliable_exclusive_ack_timeout_redelivers_same_message"""
    await plan(session, topic, max_redelivery_count=2, ack_timeout_ms=200)
    inbox = await session.consumer(topic)
    producer = await session.producer(topic)
    await producer.send(b"slow")
    first = await inbox.one()
    assert identity(await inbox.one(ack=True)) == identity(first)


# -- the end of all attempts -----------------------------------------------------------------------


async def test_block_prevents_progress(session, topic):
    """reliable_retry_exhausted_block_prevents_progress"""
    await plan(session, topic, **BLOCK)
    inbox = await session.consumer(topic)
    producer = await session.producer(topic)
    await producer.send(b"blocked")
    await inbox.nack(await inbox.one(), delay_ms=0, reason="block it")
    await producer.send(b"after")
    await inbox.expect_silence()
    assert (await session.describe(topic)).blocked == 0


async def test_drop_skips_the_message(session, topic):
    """reliable_retry_exhausted_drop_skips_poisoned_message"""
    await plan(session, topic, **DROP)
    inbox = await session.consumer(topic)
    producer = await session.producer(topic)
    await producer.send(b"drop me")
    await inbox.nack(await inbox.one(), delay_ms=0, reason="drop it")
    await producer.send(b"after")
    assert texts(await inbox.take(1)) == ["after"]
    await session.wait_for_cursor(topic, 2)


@pytest.mark.parametrize("is_reliable", [True, False], ids=["reliable", "non-reliable"])
async def test_dead_letter_goes_to_its_topic(session, topic, is_reliable):
    """reliable_retry_exhausted_deadletter_routes_message_to_dlq: its topic is non-reliable"""
    dead = f"{topic}-dlq"
    await session.create_topic(dead, reliable=is_reliable)
    await plan(session, topic, dead_letter_topic=dead, **DEAD_LETTER)
    inbox = await session.consumer(topic)
    letters = await session.consumer(dead, "reader")
    producer = await session.producer(topic)
    await producer.send(b"to the dead letters")
    await inbox.nack(await inbox.one(), delay_ms=0, reason="give up")
    letter = await letters.one(ack=True)
    assert letter.payload == b"to the dead letters"
    assert letter.msg_id.topic_name == dead
    expected = {
        "x-original-topic": topic,
        "x-original-subscription": "sub",
        "x-original-topic-offset": "0",
        "x-poison-policy": "dead_letter",
        "x-delivery-attempt": "1",
        "x-failure-reason": "give up",
    }
    assert expected.items() <= dict(letter.attributes).items()
    await producer.send(b"after")
    assert texts(await inbox.take(1)) == ["after"]


# -- key-shared ------------------------------------------------------------------------------------


async def test_key_shared_drop_frees_the_key(session, topic):
    """key_shared_reliable_drop_poison_skips_exhausted_message"""
    await plan(session, topic, **DROP)
    inbox = await session.consumer(topic, kind=KEY_SHARED)
    producer = await session.producer(topic)
    await producer.send_with_key(b"drop me", None, "order")
    await inbox.nack(await inbox.one(), delay_ms=0, reason="drop it")
    await producer.send_with_key(b"after", None, "order")
    assert texts(await inbox.take(1)) == ["after"]


async def test_key_shared_block_stalls_only_its_key(session, topic):
    """key_shared_reliable_block_poison_stalls_only_affected_key"""
    await plan(session, topic, **BLOCK)
    inbox = await session.consumer(topic, kind=KEY_SHARED)
    producer = await session.producer(topic)
    await producer.send_with_key(b"block me", None, "blocked")
    await inbox.nack(await inbox.one(), delay_ms=0, reason="block it")
    await producer.send_with_key(b"healthy", None, "other")
    assert texts(await inbox.take(1)) == ["healthy"]
    await producer.send_with_key(b"still blocked", None, "blocked")
    await inbox.expect_silence()


async def test_key_shared_dead_letter_frees_the_key(session, topic):
    """key_shared_reliable_deadletter_routes_to_dlq_and_frees_key"""
    dead = f"{topic}-dlq"
    await session.create_topic(dead)
    await plan(session, topic, dead_letter_topic=dead, **DEAD_LETTER)
    inbox = await session.consumer(topic, kind=KEY_SHARED)
    letters = await session.consumer(dead, "reader")
    producer = await session.producer(topic)
    await producer.send_with_key(b"to the dead letters", None, "key")
    await inbox.nack(await inbox.one(), delay_ms=0, reason="give up")
    letter = await letters.one(ack=True)
    assert (letter.payload, letter.msg_id.topic_name) == (b"to the dead letters", dead)
    assert letter.attributes["x-original-topic"] == topic
    assert letter.attributes["x-poison-policy"] == "dead_letter"
    await producer.send_with_key(b"after", None, "key")
    assert texts(await inbox.take(1)) == ["after"]


async def test_key_shared_keys_of_an_evicted_consumer_go_to_the_others(session, topic):
    """key_shared_reliable_inactive_consumer_eviction, which Danube ignores"""
    await session.create_topic(topic)
    a = await session.consumer(topic, "a", kind=KEY_SHARED)
    b = await session.consumer(topic, "b", kind=KEY_SHARED)
    producer = await session.producer(topic)
    keys = [f"key-{number}" for number in range(12)]
    for key in keys:
        await producer.send_with_key(key.encode(), None, key)
    taken = {}
    for inbox in (a, b):
        taken[inbox] = []

    async def all_came():
        for inbox, into in taken.items():
            while not inbox.queue.empty():
                message = inbox.queue.get_nowait()
                await inbox.ack(message)
                into.append(message.payload.decode())
        return sum(map(len, taken.values())) == len(keys)

    await eventually(all_came)
    assert taken[b], "no key was b's"
    await b.close()
    for key in taken[b]:
        await producer.send_with_key(f"{key} again".encode(), None, key)
    again = texts(await a.take(len(taken[b])))
    assert sorted(again) == sorted(f"{key} again" for key in taken[b])


# -- where settings are kept -----------------------------------------------------------------------


async def test_a_window_is_stored_before_its_subscription_exists(session, topic):
    await session.create_topic(topic)
    await session.set_window(topic, 2)
    assert await window_of(session, topic) == 2
    # The policy is the one that it will have.
    default = (await stored_policy(session, topic)).failure_policy
    assert (default.max_redelivery_count, default.poison_policy) == (5, 1)
    inbox = await session.consumer(topic)
    await session.send(topic, [f"message {n}" for n in range(5)])
    first = await inbox.take(2, ack=False)
    await inbox.expect_silence()
    await inbox.ack(*first)
    assert offsets(await inbox.take(3)) == [2, 3, 4]


async def test_settings_of_a_subscription_to_come_are_checked(session, topic):
    topics = session.topics

    def set_policy(topic, subscription="sub", **changes):
        return topics.SetSubscriptionFailurePolicy(
            danube_admin.SetSubscriptionFailurePolicyRequest(
                topic=topic, subscription=subscription, failure_policy=policy_of(**changes)
            )
        )

    assert await refused(set_policy(topic)) is grpc.StatusCode.NOT_FOUND
    await session.create_topic(topic)
    assert await refused(stored_policy(session, topic)) is grpc.StatusCode.NOT_FOUND
    assert await refused(window_of(session, topic)) is grpc.StatusCode.NOT_FOUND
    for wrong in (
        set_policy(topic, "no/name"),
        set_policy(topic, **DEAD_LETTER),
        set_policy(topic, dead_letter_topic=topic, **DEAD_LETTER),
        set_policy(topic, poison_policy=7),
    ):
        assert await refused(wrong) is grpc.StatusCode.INVALID_ARGUMENT
    assert await refused(stored_policy(session, topic)) is grpc.StatusCode.NOT_FOUND
    lossy = f"{topic}-lossy"
    await session.create_topic(lossy, reliable=False)
    for call in (set_policy(lossy), stored_policy(session, lossy)):
        assert await refused(call) is grpc.StatusCode.FAILED_PRECONDITION


async def test_settings_of_a_subscription_to_come_end_with_their_topic(session, topic):
    await plan(session, topic, **DROP)
    answer = await session.topics.DeleteTopic(danube_admin.TopicRequest(name=topic))
    assert answer.success
    await session.create_topic(topic)
    assert await refused(stored_policy(session, topic)) is grpc.StatusCode.NOT_FOUND
    await session.subscribe(topic)
    assert (await stored_policy(session, topic)).failure_policy.poison_policy == 1


async def test_settings_of_a_subscription_to_come_survive_a_kill(tmp_path, topic):
    with BrokerProcess(tmp_path) as broker:
        async with connect(broker) as session:
            await plan(session, topic, **DROP)
            await session.set_window(topic, 3)
        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(broker.start)
        async with connect(broker) as session:
            assert (await stored_policy(session, topic)).failure_policy == policy_of(**DROP)
            inbox = await session.consumer(topic, kind=SHARED)
            producer = await session.producer(topic)
            await producer.send(b"drop me")
            await inbox.nack(await inbox.one(), delay_ms=0)
            await producer.send(b"after")
            assert texts(await inbox.take(1)) == ["after"]
            assert await window_of(session, topic) == 3
            assert (await stored_policy(session, topic)).subscription_type == 1
