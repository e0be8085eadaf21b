"""Danube's scenarios of messages that fail: nack, ack timeout, and what happens in the end.

All with Danube's own client. Policies are set by its admin calls, on the port of everything else.
"""

import asyncio

import pytest

pytest.importorskip("danube")

import grpc
from danube import SchemaType

from ister.wire import danube_admin
from tests.support.danube import (
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    PATIENCE_SECONDS,
    SHARED,
    connect,
    eventually,
    offsets,
    refused,
    texts,
)

KINDS = [EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED]
IN_ORDER = [EXCLUSIVE, SHARED, FAILOVER]


def identity(message):
    return message.msg_id.topic_offset, message.payload


def now():
    return asyncio.get_running_loop().time()


# -- nack -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_a_nacked_message_comes_again(session, topic, kind):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic, kind=kind)
    await session.set_failure_policy(topic, delay_ms=50)
    await producer.send(b"one", {"colour": "blue"})
    first = await inbox.one()
    await inbox.nack(first)
    second = await inbox.one()
    assert identity(second) == identity(first)
    assert dict(second.attributes) == {"colour": "blue"}
    await inbox.ack(second)
    await inbox.expect_silence()
    await session.wait_for_cursor(topic, 1)


async def test_a_nack_asks_for_a_delay(session, topic):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await session.set_failure_policy(topic, delay_ms=1)
    await producer.send(b"one")
    message = await inbox.one()
    began = now()
    await inbox.nack(message, delay_ms=900, reason="not yet")
    assert identity(await inbox.one(ack=True)) == identity(message)
    assert now() - began >= 0.85


async def test_a_delay_is_never_longer_than_the_policy_allows(session, topic):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await session.set_failure_policy(topic, delay_ms=1, max_delay_ms=200)
    await producer.send(b"one")
    await inbox.nack(await inbox.one(), delay_ms=3_600_000)
    await inbox.take(1)


async def test_delays_double_when_the_policy_says_so(session, topic):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await session.set_failure_policy(topic, delay_ms=100, exponential=True)
    await producer.send(b"one")
    waits = []
    for _ in range(4):
        message = await inbox.one()
        began = now()
        await inbox.nack(message)
        await eventually(lambda: not inbox.queue.empty())
        waits.append(now() - began)
    # 100, 200, 400, 800 ms; a busy machine makes them longer, never shorter.
    for wait, least in zip(waits, [0.1, 0.2, 0.4, 0.8], strict=True):
        assert wait >= least * 0.9, waits


async def test_a_message_that_waits_for_its_retry_holds_no_later_one_back(session, topic):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic, kind=SHARED)
    await session.set_failure_policy(topic, delay_ms=1000)
    for number in range(5):
        await producer.send(f"message {number}".encode())
    await inbox.nack(await inbox.one())
    assert texts(await inbox.take(4)) == [f"message {n}" for n in range(1, 5)]
    assert texts(await inbox.take(1)) == ["message 0"]
    await session.wait_for_cursor(topic, 5)


async def test_nacks_of_what_was_never_sent_or_is_done_are_harmless(session, topic):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await session.set_failure_policy(topic, delay_ms=1)
    await producer.send(b"one")
    [message] = await inbox.take(1)
    await inbox.nack(message)
    await inbox.expect_silence()
    message.msg_id.topic_offset = 12345
    await inbox.nack(message)
    await producer.send(b"two")
    assert texts(await inbox.take(1)) == ["two"]
    await session.wait_for_cursor(topic, 2)


# -- ack timeout ----------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_a_message_that_nobody_acknowledges_in_time_comes_again(session, topic, kind):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic, kind=kind)
    await session.set_failure_policy(topic, ack_timeout_ms=300, delay_ms=50)
    await producer.send(b"one")
    first = await inbox.one()
    second = await inbox.one()
    assert identity(second) == identity(first)
    await inbox.ack(second)
    await inbox.expect_silence(0.8)
    await session.wait_for_cursor(topic, 1)


async def test_a_message_that_timed_out_goes_to_a_consumer_that_works(session, topic):
    producer = await session.producer(topic)
    hangs = await session.consumer(topic, "hangs", kind=SHARED)
    works = await session.consumer(topic, "works", kind=SHARED)
    await session.set_failure_policy(topic, ack_timeout_ms=500, delay_ms=50, retries=1000)
    for number in range(10):
        await producer.send(f"message {number}".encode())
    seen = set()
    while len(seen) < 10:
        seen.update(texts(await works.take(1)))
    await session.wait_for_cursor(topic, 10)
    assert not hangs.queue.empty()


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


@pytest.mark.parametrize("kind", IN_ORDER, ids=lambda kind: kind.name)
async def test_block_stops_the_subscription_at_an_exhausted_message(session, topic, kind):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic, kind=kind)
    await session.set_failure_policy(topic, retries=2, delay_ms=20, poison="Block")
    await producer.send(b"bad")
    bad = await fail_until_exhausted(inbox, 2)
    await producer.send(b"good")
    await inbox.expect_silence()
    described = await session.describe(topic)
    assert described.HasField("blocked")
    assert (described.blocked, described.cursor) == (0, 0)
    # An acknowledgement is welcome even now, and goes on with what waits.
    await inbox.ack(bad)
    assert texts(await inbox.take(1)) == ["good"]
    await session.wait_for_cursor(topic, 2)


async def test_a_blocked_subscription_goes_on_when_its_policy_changes(session, topic):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await session.set_failure_policy(topic, retries=0, delay_ms=20, poison="Block")
    await producer.send(b"bad")
    await fail_until_exhausted(inbox, 0)
    await producer.send(b"good")
    await inbox.expect_silence()
    await session.set_failure_policy(topic, retries=0, delay_ms=20, poison="Drop")
    assert texts(await inbox.take(1)) == ["good"]
    await session.wait_for_cursor(topic, 2)


async def test_a_blocked_subscription_can_be_moved_on(session, topic):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await session.set_failure_policy(topic, retries=0, delay_ms=20, poison="Block")
    await producer.send(b"bad")
    await fail_until_exhausted(inbox, 0)
    await producer.send(b"good")
    await session.seek(topic, offset=1)
    assert texts(await inbox.take(1)) == ["good"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_drop_passes_an_exhausted_message_over(session, topic, kind):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic, kind=kind)
    await session.set_failure_policy(topic, retries=2, delay_ms=20, poison="Drop")
    await producer.send(b"bad")
    await fail_until_exhausted(inbox, 2)
    await producer.send(b"good")
    assert texts(await inbox.take(1)) == ["good"]
    await inbox.expect_silence()
    await session.wait_for_cursor(topic, 2)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_dead_letter_moves_an_exhausted_message_with_its_story(session, broker, topic, kind):
    letters_topic = f"{topic}-dlq"

    await session.create_topic(letters_topic)
    letters = await session.consumer(letters_topic, "undertaker")
    producer = await session.producer(topic, "shop")
    inbox = await session.consumer(topic, kind=kind)
    await session.set_failure_policy(
        topic,
        retries=1,
        delay_ms=20,
        poison="DeadLetter",
        dead_letter_topic=letters_topic,
    )
    await producer.send_with_key(b"fine", None, "customer-7")
    await inbox.take(1)
    await producer.send_with_key(b"bad", {"colour": "blue"}, "customer-7")
    bad = await fail_until_exhausted(inbox, 1, reason="no such customer")
    await producer.send_with_key(b"good", None, "customer-7")
    assert texts(await inbox.take(1)) == ["good"]
    await session.wait_for_cursor(topic, 3)
    [letter] = await letters.take(1)
    assert letter.payload == b"bad"
    assert letter.routing_key == "customer-7"
    attributes = dict(letter.attributes)
    assert attributes.pop("colour") == "blue"
    assert attributes.pop("x-dead-letter-signature")
    assert attributes == {
        "x-original-topic": topic,
        "x-original-subscription": "sub",
        "x-original-topic-offset": "1",
        "x-original-producer-id": str(bad.msg_id.producer_id),
        "x-original-broker-addr": bad.msg_id.broker_addr.partition("#")[0],
        "x-dead-letter-hops": "1",
        "x-poison-policy": attributes["x-poison-policy"],
        "x-delivery-attempt": "2",
        "x-failure-reason": "no such customer",
    }
    assert attributes["x-poison-policy"].replace("_", "").lower() == "deadletter"
    await letters.expect_silence()


async def test_a_dead_letter_after_ack_timeouts_says_so(session, topic):
    letters_topic = f"{topic}-dlq"

    await session.create_topic(letters_topic)
    letters = await session.consumer(letters_topic)
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await session.set_failure_policy(
        topic,
        retries=1,
        ack_timeout_ms=300,
        delay_ms=20,
        poison="DeadLetter",
        dead_letter_topic=letters_topic,
    )
    await producer.send(b"slow")
    await inbox.take(2, ack=False)
    [letter] = await letters.take(1)
    assert letter.payload == b"slow"
    assert letter.attributes["x-failure-reason"]


async def test_a_dead_letter_keeps_the_schema_of_the_message(session, topic):
    letters_topic, subject = f"{topic}-dlq", "payments-value"
    definition = b'{"type": "object", "properties": {"amount": {"type": "number"}}}'

    registered = session.client.schema().register_schema(subject)
    await registered.with_type(SchemaType.JSON_SCHEMA).with_schema_data(definition).execute()
    await session.create_topic(letters_topic)
    letters = await session.consumer(letters_topic)
    producer = await session.producer(topic, subject=subject)
    inbox = await session.consumer(topic)
    await session.set_failure_policy(
        topic,
        retries=0,
        delay_ms=20,
        poison="DeadLetter",
        dead_letter_topic=letters_topic,
    )
    await producer.send_with_key(b'{"amount": 1}', None, "k")
    message = await fail_until_exhausted(inbox, 0)
    [letter] = await letters.take(1)
    assert letter.payload == b'{"amount": 1}'
    assert message.HasField("schema_id")
    assert letter.HasField("schema_id")
    assert (letter.schema_id, letter.schema_version) == (
        message.schema_id,
        message.schema_version,
    )


async def test_a_dead_letter_topic_is_made_when_it_is_needed(session, topic):
    letters_topic = f"{topic}-dlq"

    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await session.set_failure_policy(
        topic,
        retries=0,
        delay_ms=20,
        poison="DeadLetter",
        dead_letter_topic=letters_topic,
    )
    await producer.send(b"bad")
    await fail_until_exhausted(inbox, 0)
    await session.wait_for_cursor(topic, 1)
    letters = await session.consumer(letters_topic)
    await session.seek(letters_topic, earliest=True)
    assert texts(await letters.take(1)) == ["bad"]


async def test_a_dead_letter_waits_until_its_topic_can_be_made_and_holds_no_other_up(
    session, topic
):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await session.set_failure_policy(
        topic,
        retries=0,
        delay_ms=20,
        poison="DeadLetter",
        dead_letter_topic="/cemetery/letters",
    )
    await producer.send(b"bad")
    await fail_until_exhausted(inbox, 0)
    await producer.send(b"good")
    assert texts(await inbox.take(1)) == ["good"]
    assert (await session.describe(topic)).cursor == 0
    await session.namespaces.CreateNamespace(danube_admin.NamespaceRequest(name="cemetery"))
    await session.wait_for_cursor(topic, 2)
    letters = await session.consumer("/cemetery/letters")
    await session.seek("/cemetery/letters", earliest=True)
    assert texts(await letters.take(1)) == ["bad"]
    await letters.expect_silence()


async def test_a_dead_letter_comes_with_empty_keys_as_it_was(session, topic):
    """A message without a key and without attributes gets none but the story's."""
    letters_topic = f"{topic}-dlq"

    await session.create_topic(letters_topic)
    letters = await session.consumer(letters_topic)
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await session.set_failure_policy(
        topic,
        retries=0,
        delay_ms=20,
        poison="DeadLetter",
        dead_letter_topic=letters_topic,
    )
    await producer.send(b"")
    await fail_until_exhausted(inbox, 0)
    [letter] = await letters.take(1)
    assert letter.payload == b""
    assert not letter.HasField("routing_key")
    assert not letter.HasField("schema_id")
    assert all(name.startswith("x-") for name in letter.attributes)


async def test_attempts_survive_a_restart(broker, topic):
    """Two failures before it, so one more is enough; else a poison message never ends."""
    letters_topic = f"{topic}-dlq"

    async with connect(broker) as session:
        await session.create_topic(letters_topic)
        await session.consumer(letters_topic)
        producer = await session.producer(topic)
        inbox = await session.consumer(topic)
        await session.set_failure_policy(
            topic,
            retries=2,
            delay_ms=20,
            poison="DeadLetter",
            dead_letter_topic=letters_topic,
        )
        await producer.send(b"bad")
        await inbox.nack(await inbox.one(), reason="first")
        await inbox.nack(await inbox.one(), reason="second")
        await inbox.one()
    await asyncio.to_thread(broker.restart)
    async with connect(broker) as session:
        letters = await session.consumer(letters_topic)
        inbox = await session.consumer(topic)
        await inbox.nack(await inbox.one(), reason="third")
        [letter] = await letters.take(1)
        assert letter.attributes["x-delivery-attempt"] == "3"
        assert letter.attributes["x-failure-reason"] == "third"
        await session.wait_for_cursor(topic, 1)


async def test_disconnects_are_no_failures(session, topic):
    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await session.set_failure_policy(topic, retries=1, delay_ms=20, poison="Drop")
    await producer.send(b"one")
    for _ in range(5):
        await inbox.one()
        await inbox.close()
        inbox = await session.consumer(topic)
    assert texts(await inbox.take(1)) == ["one"]


# -- the policy itself ----------------------------------------------------------------------------


async def test_a_policy_is_told_as_it_was_set_and_survives_a_restart(broker, topic):
    request = danube_admin.GetSubscriptionFailurePolicyRequest(topic=topic, subscription="sub")

    async with connect(broker) as session:
        await session.producer(topic)
        await session.consumer(topic, kind=SHARED)
        default = await session.topics.GetSubscriptionFailurePolicy(request)
        assert default.subscription_type == 1
        if default.HasField("failure_policy"):
            assert default.failure_policy.max_redelivery_count == 5
            assert default.failure_policy.poison_policy == 1
        await session.set_failure_policy(
            topic,
            retries=3,
            ack_timeout_ms=7000,
            delay_ms=70,
            max_delay_ms=700,
            exponential=True,
            poison="DeadLetter",
            dead_letter_topic="/default/letters",
        )
    await asyncio.to_thread(broker.restart)
    async with connect(broker) as session:
        answer = await session.topics.GetSubscriptionFailurePolicy(request)
        assert answer.failure_policy == danube_admin.SubscriptionFailurePolicy(
            max_redelivery_count=3,
            ack_timeout_ms=7000,
            base_redelivery_delay_ms=70,
            max_redelivery_delay_ms=700,
            backoff_strategy=1,
            poison_policy=0,
            dead_letter_topic="/default/letters",
        )


@pytest.mark.parametrize(
    "policy",
    [
        {"poison": "DeadLetter"},
        {"poison": "DeadLetter", "dead_letter_topic": "no topic"},
        {"ack_timeout_ms": 0},
        {"delay_ms": 2000, "max_delay_ms": 1000},
    ],
    ids=["no-dead-letter-topic", "bad-dead-letter-topic", "no-timeout", "delays-contradict"],
)
async def test_a_policy_that_makes_no_sense_is_refused(session, topic, policy):
    await session.producer(topic)
    await session.consumer(topic)
    code = await refused(session.set_failure_policy(topic, **policy))
    assert code == grpc.StatusCode.INVALID_ARGUMENT


async def test_dead_letters_cannot_go_to_the_topic_that_they_come_from(session, topic):
    """They would come back for ever."""

    await session.producer(topic)
    await session.consumer(topic)
    code = await refused(
        session.set_failure_policy(topic, poison="DeadLetter", dead_letter_topic=topic)
    )
    assert code == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_non_reliable_topic_has_no_failure_policy(session, topic):
    await session.producer(topic, reliable=False)
    await session.consumer(topic)
    code = await refused(session.set_failure_policy(topic))
    assert code == grpc.StatusCode.FAILED_PRECONDITION


async def test_order_is_kept_when_everything_is_nacked_once(session, topic):
    """Each message fails once; all are delivered, and the cursor has no hole."""

    producer = await session.producer(topic)
    inbox = await session.consumer(topic)
    await session.set_failure_policy(topic, delay_ms=20)
    for number in range(30):
        await producer.send(str(number).encode())
    failed, done = set(), []
    deadline = now() + PATIENCE_SECONDS
    while len(done) < 30 and now() < deadline:
        message = await inbox.one()
        [offset] = offsets([message])
        if offset in failed:
            done.append(offset)
            await inbox.ack(message)
        else:
            failed.add(offset)
            await inbox.nack(message)
    assert sorted(done) == list(range(30))
    await session.wait_for_cursor(topic, 30)
