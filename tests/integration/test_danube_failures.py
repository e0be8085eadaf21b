"""Danube's scenarios of messages that fail: nack, ack timeout, and what happens in the end.

With Danube's own client, and with Ister's where a test takes `either`. Policies are set by Danube's
admin calls; its own tests set that of a subscription that does not exist yet, as rows do that are
planned. How failures are judged is told in tests/unit/subscription/test_delivery.py.
"""

import asyncio

import grpc
import pytest

from ister.wire import danube_admin
from tests.support.danube import (
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    SHARED,
    refused,
    texts,
)
from tests.support.scale import nightly

KINDS = [EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED]
WHEN = [*((kind, False) for kind in KINDS), *((k, True) for k in (EXCLUSIVE, SHARED, KEY_SHARED))]


def row_name(row):
    kind, is_planned = row
    return f"{kind.name}-planned" if is_planned else kind.name


def identity(message):
    return message.msg_id.topic_offset, message.payload


def now():
    return asyncio.get_running_loop().time()


async def stored_policy(session, topic, subscription="sub"):
    return await session.topics.GetSubscriptionFailurePolicy(
        danube_admin.GetSubscriptionFailurePolicyRequest(topic=topic, subscription=subscription)
    )


async def window_of(session, topic):
    found = await session.topics.GetSubscriptionDispatchConfig(
        danube_admin.GetSubscriptionDispatchConfigRequest(topic=topic, subscription="sub")
    )
    return found.dispatch_config.max_unacked_messages


async def consumer_with(session, topic, *, kind=EXCLUSIVE, is_planned=False, **policy):
    """A consumer of a subscription with a policy, which is set before or after it is made."""
    await session.create_topic(topic)
    if is_planned:
        await session.set_failure_policy(topic, **policy)
        assert (await stored_policy(session, topic)).subscription_type == 0
        assert await session.subscriptions(topic) == []
    inbox = await session.consumer(topic, kind=kind)
    if not is_planned:
        await session.set_failure_policy(topic, **policy)
    assert (await stored_policy(session, topic)).subscription_type == int(kind)
    return inbox


# -- nack -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", WHEN, ids=row_name)
async def test_a_nacked_message_comes_again(either, topic, row):
    kind, is_planned = row
    inbox = await consumer_with(either, topic, kind=kind, is_planned=is_planned, delay_ms=50)
    producer = await either.producer(topic)
    await producer.send_with_key(b"one", {"colour": "blue"}, "key")
    await producer.send_with_key(b"two", None, "key")
    first = await inbox.one()
    if kind is not KEY_SHARED:
        await inbox.take(1)
    await inbox.nack(first, delay_ms=0 if is_planned else None, reason="retry please")
    second = await inbox.one()
    assert identity(second) == identity(first)
    assert dict(second.attributes) == {"colour": "blue"}
    await inbox.ack(second)
    if kind is KEY_SHARED:
        assert texts(await inbox.take(1)) == ["two"], "what follows with the key has waited"
    await inbox.expect_silence()
    await either.wait_for_cursor(topic, 2)


async def test_a_nack_asks_for_a_delay(either, topic):
    inbox = await consumer_with(either, topic, delay_ms=1)
    await either.send(topic, ["one"])
    message = await inbox.one()
    began = now()
    await inbox.nack(message, delay_ms=900, reason="not yet")
    assert identity(await inbox.one(ack=True)) == identity(message)
    assert now() - began >= 0.85


# -- ack timeout ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [EXCLUSIVE, *map(nightly, KINDS[1:])], ids=lambda kind: kind.name)
async def test_a_message_that_nobody_acknowledges_in_time_comes_again(either, topic, kind):
    policy = {"ack_timeout_ms": 300, "delay_ms": 50}
    inbox = await consumer_with(either, topic, kind=kind, is_planned=True, **policy)
    await either.send(topic, ["one"])
    first = await inbox.one()
    second = await inbox.one()
    assert identity(second) == identity(first)
    await inbox.ack(second)
    await inbox.expect_silence(0.8)
    await either.wait_for_cursor(topic, 1)


# -- in the end -----------------------------------------------------------------------------------


async def fail_until_exhausted(inbox, retries, *, reason=None):
    """Nacks one message until its retries are used up; returns it."""
    first = await inbox.one()
    await inbox.nack(first, reason=reason)
    for _ in range(retries):
        again = await inbox.one()
        assert identity(again) == identity(first)
        await inbox.nack(again, reason=reason)
    return first


@pytest.mark.parametrize("poison", ["Block", "Drop", "DeadLetter"])
@pytest.mark.parametrize("row", WHEN, ids=row_name)
async def test_what_becomes_of_an_exhausted_message(session, topic, row, poison):
    """It is delivered first, and after it two of its key and one of another.

    Dropped or dead, it is passed over, and none of its key goes with it. If it blocks, nothing
    comes but other keys of a key-shared subscription, until it is acknowledged.
    """
    kind, is_planned = row
    is_keyed, retries, letters = kind is KEY_SHARED, 0 if is_planned else 2, None
    policy = {"retries": retries, "delay_ms": 20, "poison": poison}
    if poison == "DeadLetter":
        policy["dead_letter_topic"] = f"{topic}-dlq"
        await session.create_topic(f"{topic}-dlq", reliable=not is_planned)
        letters = await session.consumer(f"{topic}-dlq", "undertaker")
    inbox = await consumer_with(session, topic, kind=kind, is_planned=is_planned, **policy)
    producer = await session.producer(topic, "shop")
    await producer.send_with_key(b"fine", None, "customer-7")
    await inbox.take(1)
    await producer.send_with_key(b"bad", {"colour": "blue"}, "customer-7")
    if is_keyed:  # else it would come while the first one fails
        await producer.send_with_key(b"same key", None, "customer-7")
    bad = await fail_until_exhausted(inbox, retries, reason="no such customer")
    if not is_keyed:
        await producer.send_with_key(b"same key", None, "customer-7")
    await producer.send_with_key(b"same key again", None, "customer-7")
    await producer.send_with_key(b"another key", None, "customer-8")
    if poison == "Block":
        if is_keyed:
            assert texts(await inbox.take(1)) == ["another key"]
        await inbox.expect_silence()
        described = await session.describe(topic)
        assert (described.HasField("blocked"), described.cursor) == (True, 1)
        assert described.blocked == 1
        # An acknowledgement is welcome even now, and goes on with what waits.
        await inbox.ack(bad)
    came = texts(await inbox.take(2 if is_keyed and poison == "Block" else 3))
    if is_keyed:
        came = [text for text in came if text != "another key"]
        assert came == ["same key", "same key again"]
    else:
        assert came == ["same key", "same key again", "another key"]
    await inbox.expect_silence()
    await session.wait_for_cursor(topic, 5)
    if letters is not None:
        [letter] = await letters.take(1)
        assert (letter.payload, letter.routing_key) == (b"bad", "customer-7")
        assert letter.msg_id.topic_name == f"{topic}-dlq"
        attributes = dict(letter.attributes)
        assert attributes.pop("x-dead-letter-signature")
        assert attributes == {
            "colour": "blue",
            "x-original-topic": topic,
            "x-original-subscription": "sub",
            "x-original-topic-offset": "1",
            "x-original-producer-id": str(bad.msg_id.producer_id),
            "x-original-broker-addr": bad.msg_id.broker_addr.partition("#")[0],
            "x-dead-letter-hops": "1",
            "x-poison-policy": "dead_letter",
            "x-delivery-attempt": str(retries + 1),
            "x-failure-reason": "no such customer",
        }
        await letters.expect_silence()


async def test_a_dead_letter_after_ack_timeouts_says_so(session, topic):
    """A message without a key, a schema and attributes gets none but the story's."""
    await session.create_topic(f"{topic}-dlq")
    letters = await session.consumer(f"{topic}-dlq", "undertaker")
    policy = {"poison": "DeadLetter", "dead_letter_topic": f"{topic}-dlq", "delay_ms": 20}
    inbox = await consumer_with(session, topic, retries=1, ack_timeout_ms=300, **policy)
    await session.send(topic, [""])
    await inbox.take(2, ack=False)
    [letter] = await letters.take(1)
    assert letter.payload == b""
    assert letter.attributes["x-failure-reason"]
    assert all(name.startswith("x-") for name in letter.attributes)
    assert not letter.HasField("routing_key")
    assert not letter.HasField("schema_id")


# -- the policy itself ----------------------------------------------------------------------------

INVALID, MISSING, PRECONDITION = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
)
WRONG = {
    "no dead-letter topic": {"poison": "DeadLetter"},
    "bad dead-letter topic": {"poison": "DeadLetter", "dead_letter_topic": "no topic"},
    "its own dead-letter topic": {"poison": "DeadLetter", "dead_letter_topic": ...},
    "no timeout": {"ack_timeout_ms": 0},
    "delays contradict": {"delay_ms": 2000, "max_delay_ms": 1000},
    "bad subscription": {"subscription": "no/name"},
}


async def test_settings_of_a_subscription_are_checked_whether_or_not_it_is_there(session, topic):
    assert await refused(session.set_failure_policy(topic)) is MISSING
    await session.create_topic(topic)
    for is_there in (False, True):
        for name, wrong in WRONG.items():
            policy = {key: topic if value is ... else value for key, value in wrong.items()}
            assert await refused(session.set_failure_policy(topic, **policy)) is INVALID, name
        if not is_there:
            assert await refused(stored_policy(session, topic)) is MISSING
            assert await refused(window_of(session, topic)) is MISSING
            await session.subscribe(topic, kind=SHARED)
    default = await stored_policy(session, topic)
    assert default.subscription_type == 1
    assert default.failure_policy.max_redelivery_count == 5
    assert default.failure_policy.poison_policy == 1
    lossy = f"{topic}-lossy"
    await session.create_topic(lossy, reliable=False)
    for call in (session.set_failure_policy(lossy), stored_policy(session, lossy)):
        assert await refused(call) is PRECONDITION
