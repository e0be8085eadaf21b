"""One topic as it is served: limits, publishing, subscriptions, topics without a log."""

import asyncio
from contextlib import asynccontextmanager
from unittest.mock import DEFAULT, Mock

import pytest

from ister.base.clock import SystemClock
from ister.base.model import TopicState
from ister.broker.dispatch import consumer_ids
from ister.broker.topics import served_topic as module
from ister.errors import (
    CapacityError,
    ConflictError,
    InvalidRequestError,
    MessageTooLargeError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from ister.subscription.policy import FailurePolicy, PoisonPolicy, SubscriptionKind
from tests.support.broker import a_record, eventually, some_topics, take
from tests.support.cases import each
from tests.support.memory_metadata import MemoryMetadata

NAME = "/default/t"
POLICY = FailurePolicy(max_redelivery_count=0, poison=PoisonPolicy.DROP)
EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = SubscriptionKind


@asynccontextmanager
async def a_topic(tmp_path, *, is_reliable=True, mode="memory", **policies):
    """A topic that has these policies, and all topics."""
    async with some_topics(tmp_path, mode=mode) as topics:
        topic = await topics.get_or_create(NAME, is_reliable=is_reliable)
        if policies:
            await topics.set_topic_policies(NAME, policies)
        yield topic, topics


def attach(topic, consumer):
    """What a stream does when it is there."""
    return topic.arrive(consumer).attach(consumer.id, consumer.filters)


# -- limits -----------------------------------------------------------------------------------


async def test_an_exclusive_subscription_is_taken_by_a_subscriber_without_a_stream(tmp_path):
    async with a_topic(tmp_path) as (topic, _):
        first = await topic.subscribe("s", EXCLUSIVE, "a", ())
        with pytest.raises(PermissionDeniedError, match="exclusive"):
            await topic.subscribe("s", EXCLUSIVE, "b", ())
        # The same name is the same consumer.
        assert await topic.subscribe("s", EXCLUSIVE, "a", ()) == first
        outbox = attach(topic, first)
        with pytest.raises(PermissionDeniedError):
            await topic.subscribe("s", EXCLUSIVE, "b", ())
        topic.subscription("s").detach(outbox)
        assert (await topic.subscribe("s", EXCLUSIVE, "b", ())).name == "b"


async def test_a_place_that_nobody_comes_for_is_free_again(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_RESERVED_SECONDS", 0.0)
    async with a_topic(tmp_path) as (topic, _):
        await topic.subscribe("s", EXCLUSIVE, "a", ())
        assert (await topic.subscribe("s", EXCLUSIVE, "b", ())).name == "b"


async def test_consumers_of_a_subscription(tmp_path):
    async with a_topic(tmp_path, max_consumers_per_subscription=2) as (topic, _):
        # However many subscribe at once.
        await asyncio.gather(
            *(topic.subscribe("s", SHARED, name, ()) for name in "abcdef"), return_exceptions=True
        )
        first, second = topic.subscription("s").stored.consumers
        outbox = attach(topic, await topic.subscribe("s", SHARED, first, ()))
        with pytest.raises(PermissionDeniedError, match="max_consumers_per_subscription"):
            await topic.subscribe("s", SHARED, "x", ())
        await topic.subscribe("other", SHARED, "x", ())
        await topic.subscribe("s", SHARED, second, ())
        topic.subscription("s").detach(outbox)
        await topic.subscribe("s", SHARED, "x", ())


async def test_consumers_of_a_topic(tmp_path):
    async with a_topic(tmp_path, max_consumers_per_topic=2) as (topic, topics):
        attach(topic, await topic.subscribe("s", SHARED, "a", ()))
        await topic.subscribe("other", SHARED, "a", ())
        with pytest.raises(CapacityError, match="max_consumers_per_topic"):
            await topic.subscribe("s", SHARED, "b", ())
        await topics.set_topic_policies(NAME, {"max_consumers_per_topic": 3})
        await topic.subscribe("s", SHARED, "b", ())


async def test_subscriptions_of_a_topic(tmp_path):
    async with a_topic(tmp_path, max_subscriptions_per_topic=2) as (topic, _):
        for name in ("a", "b"):
            await topic.subscribe(name, SHARED, "c", ())
        with pytest.raises(PermissionDeniedError, match="max_subscriptions_per_topic"):
            await topic.subscribe("c", SHARED, "c", ())
        assert sorted(topic.subscriptions) == ["a", "b"]
        await topic.subscribe("a", SHARED, "d", ())
        await topic.unsubscribe("b")
        await topic.subscribe("c", SHARED, "c", ())


@each("is_reliable", [True, False])
async def test_the_size_of_a_message(tmp_path, is_reliable):
    async with a_topic(tmp_path, is_reliable=is_reliable, max_message_size=10) as (topic, topics):
        assert await topic.publish(a_record(b"x" * 10)) == 0
        with pytest.raises(MessageTooLargeError, match="max_message_size"):
            await topic.publish(a_record(b"x" * 11))
        assert await topic.publish(a_record(b"")) == int(is_reliable)
        values = topics.log.metrics.snapshot()
        assert (values["broker.messages_in_total"], values["broker.bytes_in_total"]) == (2, 10)


@each("is_reliable", [True, False])
async def test_a_publish_rate_delays_and_drops_nothing(tmp_path, is_reliable):
    async with a_topic(tmp_path, is_reliable=is_reliable, max_publish_rate=100) as (topic, _):
        loop = asyncio.get_running_loop()
        start = loop.time()
        sent = await asyncio.gather(*(topic.publish(a_record()) for _ in range(60)))
        assert loop.time() - start > 0.3
        assert topic.next_offset == 60
        assert sorted(sent) == [number * is_reliable for number in range(60)]


# -- publishing -------------------------------------------------------------------------------


async def test_a_full_buffer_is_waited_for_and_then_told(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_FULL_SECONDS", 20.0)

    async with a_topic(tmp_path) as (topic, _):
        appender = topic.topic.appender
        full = CapacityError("full")
        appender.append_record = Mock(
            wraps=appender.append_record, side_effect=[full, full, full, DEFAULT]
        )
        assert await topic.publish(a_record()) == 0
        appender.append_record.side_effect = full
        monkeypatch.setattr(module, "_FULL_SECONDS", 0.1)
        with pytest.raises(CapacityError):
            await asyncio.wait_for(topic.publish(a_record()), 60)


async def test_a_numbered_message_is_appended_once(tmp_path):
    async with a_topic(tmp_path, mode="wal_cloud") as (topic, _):
        for payload, sequence, offset in ((b"a", 1, 0), (b"b", 2, 1), (b"b", 2, 1)):
            assert await topic.publish(a_record(payload), sequence=sequence, epoch=0) == offset
        assert topic.topic.wal.next == 2


# -- subscriptions ----------------------------------------------------------------------------


async def test_a_new_subscription_begins_at_the_end_or_where_it_is_told_to(tmp_path):
    async with a_topic(tmp_path) as (topic, _):
        for _ in range(5):
            await topic.publish(a_record())
        for name, start, cursor in (
            ("latest", "latest", 5),
            ("earliest", "earliest", 0),
            ("third", 3, 3),
        ):
            await topic.subscribe(name, SHARED, "c", (), start)
            assert topic.subscription(name).delivery.cursor == cursor
        # One that is there stays where it is.
        await topic.subscribe("latest", SHARED, "d", (), "earliest")
        assert topic.subscription("latest").delivery.cursor == 5


async def test_a_subscription_and_its_consumer_are_written_down_before_anything_is_said(tmp_path):
    async with a_topic(tmp_path, mode="wal_cloud") as (topic, topics):
        await topic.publish(a_record())
        consumer = await topic.subscribe("s", KEY_SHARED, "c", ("eu-*", "us-?"))
        stored = topics.store.load(topic.parsed, topic.incarnation)["s"]
        assert stored.kind is KEY_SHARED
        assert stored.cursor == 1
        assert stored.consumers["c"].id == consumer.id
        assert stored.consumers["c"].filters == ("eu-*", "us-?")
        # Other filters are the consumer's from now on.
        changed = await topic.subscribe("s", KEY_SHARED, "c", ("asia",))
        assert changed.id == consumer.id
        assert topics.consumers.find(consumer.id).filters == ("asia",)
        stored = topics.store.load(topic.parsed, topic.incarnation)["s"]
        assert stored.consumers["c"].filters == ("asia",)


@each("is_reliable", [True, False])
async def test_a_subscription_stays_of_its_kind(tmp_path, is_reliable):
    async with a_topic(tmp_path, is_reliable=is_reliable) as (topic, _):
        await topic.subscribe("s", SHARED, "c", ())
        for kind in (EXCLUSIVE, FAILOVER, KEY_SHARED):
            with pytest.raises(ConflictError, match="is shared, not"):
                await topic.subscribe("s", kind, "d", ())


@each(
    ("subscription", "consumer", "filters"),
    [
        ("", "c", ()),
        ("a/b", "c", ()),
        ("x" * 121, "c", ()),
        ("s", "", ()),
        ("s", "x" * 257, ()),
        ("s", "a\nb", ()),
        ("s", "c", ("",)),
        ("s", "c", ("x" * 257,)),
        ("s", "c", ("x",) * 65),
    ],
)
async def test_names_and_filters_have_bounds(tmp_path, subscription, consumer, filters):
    async with a_topic(tmp_path) as (topic, _):
        with pytest.raises(InvalidRequestError):
            await topic.subscribe(subscription, KEY_SHARED, consumer, filters)
        assert topic.subscriptions == {}


async def test_the_longest_unseen_consumers_are_forgotten_beyond_a_number(tmp_path, monkeypatch):
    monkeypatch.setattr(consumer_ids, "_REMEMBERED_MAX", 3)

    async with a_topic(tmp_path) as (topic, topics):
        first = await topic.subscribe("s", SHARED, "first", ())
        attach(topic, first)
        others = []
        for n in range(5):
            others.append(await topic.subscribe("s", SHARED, f"c{n}", ()))
            await asyncio.sleep(0.002)
        known = topic.subscription("s").stored.consumers
        # The one with a stream is not forgotten, however old it is.
        assert set(known) == {"first", "c3", "c4"}
        assert topics.consumers.find(first.id) is not None
        assert topics.consumers.find(others[0].id) is None


async def test_unsubscribing_takes_everything_of_it(tmp_path):
    async with a_topic(tmp_path, mode="wal_cloud") as (topic, topics):
        consumer = await topic.subscribe("s", SHARED, "c", ())
        outbox = attach(topic, consumer)
        with pytest.raises(ConflictError, match="1 consumers"):
            await topic.unsubscribe("s")
        topic.subscription("s").detach(outbox)
        await topic.unsubscribe("s")
        assert topics.store.load(topic.parsed, topic.incarnation) == {}
        assert topics.consumers.find(consumer.id) is None
        for call in (lambda: topic.subscription("s"), lambda: topic.arrive(consumer)):
            with pytest.raises(NotFoundError):
                call()
        with pytest.raises(NotFoundError):
            await topic.unsubscribe("s")
        # Of any kind, from now on.
        await topic.subscribe("s", EXCLUSIVE, "c", ())


async def test_only_a_topic_with_a_log_has_cursors(tmp_path):
    async with a_topic(tmp_path, is_reliable=False) as (topic, _):
        await topic.subscribe("s", SHARED, "c", ())
        with pytest.raises(InvalidRequestError):
            topic.reliable_subscription("s")
        with pytest.raises(NotFoundError):
            topic.reliable_subscription("none")


# -- settings of subscriptions to come ----------------------------------------------------------


async def test_settings_of_a_subscription_to_come_are_those_that_it_has(tmp_path):
    async with a_topic(tmp_path, mode="wal_cloud") as (topic, topics):
        with pytest.raises(NotFoundError):
            await topic.settings("s")
        await topic.configure("s", policy=POLICY)
        found = await topic.settings("s")
        default = topics.config.dispatch.max_unacked_messages
        assert (found.policy, found.window, found.kind) == (POLICY, default, None)
        await topic.configure("s", window=3)
        found = await topic.settings("s")
        assert (found.policy, found.window, found.kind) == (POLICY, 3, None)
        assert "s" not in topic.subscriptions
        await topic.subscribe("s", SHARED, "c", ())
        subscription = topic.subscription("s")
        assert (subscription.delivery.policy, subscription.window) == (POLICY, 3)
        found = await topic.settings("s")
        assert (found.policy, found.window, found.kind) == (POLICY, 3, SHARED)
        # They are used once.
        assert topics.store.planned(topic.parsed, "s", topic.incarnation) is None
        await topic.unsubscribe("s")
        await topic.subscribe("s", SHARED, "c", ())
        assert topic.subscription("s").delivery.policy == FailurePolicy()


async def test_settings_and_subscription_at_once_are_not_lost(tmp_path):
    async with a_topic(tmp_path, mode="wal_cloud") as (topic, _):
        await asyncio.gather(
            topic.configure("s", policy=POLICY),
            topic.subscribe("s", SHARED, "c", ()),
            topic.configure("s", window=3),
        )
        subscription = topic.subscription("s")
        assert (subscription.delivery.policy, subscription.window) == (POLICY, 3)


@each("mode", ["wal_cloud", "local_only"])
async def test_settings_of_a_subscription_to_come_survive_a_restart_and_end_with_their_topic(
    tmp_path, mode
):
    metadata = MemoryMetadata(SystemClock()) if mode == "local_only" else None

    async with some_topics(tmp_path, mode=mode, metadata=metadata) as topics:
        topic = await topics.get_or_create(NAME, is_reliable=True)
        await topic.configure("s", policy=POLICY)
        await topic.configure("other", window=7)
    async with some_topics(tmp_path, mode=mode, metadata=metadata) as topics:
        topic = await topics.get(NAME)
        await topic.subscribe("s", SHARED, "c", ())
        assert topic.subscription("s").delivery.policy == POLICY
        assert (await topic.settings("other")).window == 7
        await topics.delete(NAME)
        topic = await topics.get_or_create(NAME, is_reliable=True)
        with pytest.raises(NotFoundError):
            await topic.settings("other")


# -- usable -----------------------------------------------------------------------------------


async def test_whether_a_topic_can_be_used(tmp_path, monkeypatch):
    async with a_topic(tmp_path, mode="wal_cloud") as (topic, _):
        assert topic.is_usable
        kind, real = type(topic.topic), type(topic.topic).state
        for state, is_usable in (
            (TopicState.FAILED, False),
            (TopicState.CLOSED, False),
            (TopicState.STALLED, True),
            (TopicState.QUARANTINED, True),
        ):
            monkeypatch.setattr(kind, "state", property(lambda _, state=state: state))
            assert topic.is_usable == is_usable, state
        monkeypatch.setattr(kind, "state", real)
        owned = topic.owned
        owned._fence = UnavailableError("fenced")
        assert not topic.is_usable
        owned._fence = None
        await topic.close(None)
        assert not topic.is_usable


# -- topics without a log ---------------------------------------------------------------------


async def test_without_a_log_messages_are_pushed_and_nothing_is_kept(tmp_path):
    async with a_topic(tmp_path, is_reliable=False) as (topic, topics):
        assert await topic.publish(a_record(b"nobody")) == 0
        outbox = attach(topic, await topic.subscribe("s", EXCLUSIVE, "c", ()))
        second = attach(topic, await topic.subscribe("s2", EXCLUSIVE, "c", ()))
        # The second message, and all others: without a log there are no offsets.
        assert await topic.publish(a_record(b"a", attributes={"k": "v"})) == 0
        for one in (outbox, second):
            [message] = await take(one, 1)
            assert (message.payload, message.msg_id.topic_offset) == (b"a", 0)
            assert message.attributes == {"k": "v"}
        topic.subscription("s").detach(outbox)
        await topic.publish(a_record(b"missed"))
        again = attach(topic, await topic.subscribe("s", EXCLUSIVE, "c", ()))
        await topic.publish(a_record(b"b"))
        assert [m.payload for m in await take(again, 1)] == [b"b"]
        assert topics.log.topics() == []


async def test_without_a_log_a_subscriber_gets_what_is_published_before_its_stream_is_there(
    tmp_path,
):
    async with a_topic(tmp_path, is_reliable=False) as (topic, _):
        consumer = await topic.subscribe("s", SHARED, "c", ())
        await topic.publish(a_record(b"early"))
        outbox = attach(topic, consumer)
        assert [m.payload for m in await take(outbox, 1)] == [b"early"]


@each("is_reliable", [True, False])
async def test_consumers_are_known_again_after_a_restart(tmp_path, is_reliable):
    async with some_topics(tmp_path) as topics:
        topic = await topics.get_or_create(NAME, is_reliable=is_reliable)
        incarnation = topic.incarnation
        consumer = await topic.subscribe("s", SHARED, "c", ("k",))
    async with some_topics(tmp_path) as topics:
        assert topics.consumers.find(consumer.id) is None
        await topics.open_all()
        assert topics.consumers.find(consumer.id) == consumer
        assert consumer.id == consumer_ids.consumer_id(NAME, incarnation, "s", "c")
        topic = topics.find_open(NAME)
        assert topic.is_reliable == is_reliable
        outbox = attach(topic, consumer)
        await topic.publish(a_record(b"a"))
        assert len(await take(outbox, 1)) == 1


# -- dead letters -----------------------------------------------------------------------------


async def test_a_dead_letter_goes_to_a_topic_that_is_made_for_it(tmp_path):
    settings = {"broker": {"auto_create_topics": False, "limits": {"max_topics": 1}}}
    async with some_topics(tmp_path, settings, mode="memory") as topics:
        topic = await topics.get_or_create(NAME, is_reliable=True, is_implied=False)
        consumer = await topic.subscribe("s", EXCLUSIVE, "c", ())
        dispatch = topic.subscription("s")
        await dispatch.set_policy(
            FailurePolicy(
                max_redelivery_count=0, poison="dead_letter", dead_letter_topic="/default/dead"
            )
        )
        outbox = attach(topic, consumer)
        await topic.publish(a_record(b"bad"))
        await take(outbox, 1)
        dispatch.nack(0, delay_ms=None, reason="no")
        dead = await eventually(lambda: topics.find_open("/default/dead"))
        await eventually(lambda: dispatch.delivery.cursor == 1)
        [letter] = list(dead.topic.read("earliest"))
        assert letter.payload == b"bad"
        assert letter.attributes["x-original-topic"] == NAME
