"""Danube's scenarios of key-shared subscriptions, with its own client.

Messages of one key come to one consumer, in order, one at a time. Filters say which keys a consumer
takes. What a failure policy does to one message of a key, the others of the key survive.
"""

import asyncio
from collections import defaultdict

import pytest

pytest.importorskip("danube")

from tests.support.danube import (
    KEY_SHARED,
    eventually,
    texts,
)

both_dispatches = pytest.mark.parametrize(
    "reliable", [True, False], ids=["reliable", "non-reliable"]
)


class Workers:
    """Consumers that acknowledge all that comes to them, and note it."""

    def __init__(self, inboxes):
        self.seen = []
        """(consumer, key, text), as they came."""
        self._tasks = [
            asyncio.create_task(self._work(name, inbox)) for name, inbox in inboxes.items()
        ]

    async def _work(self, name, inbox):
        while True:
            message = await inbox.queue.get()
            self.seen.append((name, message.routing_key, message.payload.decode()))
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
    for name, key, _ in seen:
        found[key].add(name)
    return found


def order(seen, key):
    return [text for _, its_key, text in seen if its_key == key]


async def join(session, topic, *names, filters=()):
    return {
        name: await session.consumer(topic, name, kind=KEY_SHARED, filters=filters)
        for name in names
    }


# -- keys -----------------------------------------------------------------------------------------


@both_dispatches
async def test_a_key_comes_to_one_consumer_in_order(session, topic, reliable):
    keys = [f"user-{number}" for number in range(20)]

    producer = await session.producer(topic, reliable=reliable)
    workers = Workers(await join(session, topic, "a", "b", "c"))
    for turn in range(5):
        for key in keys:
            await producer.send_with_key(f"{key} {turn}".encode(), None, key)
    seen = await workers.until(100)
    for key in keys:
        assert len(owners(seen)[key]) == 1
        assert order(seen, key) == [f"{key} {turn}" for turn in range(5)]
    # Twenty keys are spread over three: everybody has work.
    assert {name for name, _, _ in seen} == {"a", "b", "c"}


@both_dispatches
async def test_a_single_consumer_gets_all_keys(session, topic, reliable):
    producer = await session.producer(topic, reliable=reliable)
    workers = Workers(await join(session, topic, "only"))
    for number in range(30):
        await producer.send_with_key(str(number).encode(), None, f"key-{number % 7}")
    seen = await workers.until(30)
    for key in {f"key-{number}" for number in range(7)}:
        assert order(seen, key) == [str(n) for n in range(30) if f"key-{n % 7}" == key]


async def test_messages_without_a_key_go_by_their_producer(session, topic):
    producers = [await session.producer(topic, f"producer-{n}") for n in range(4)]
    workers = Workers(await join(session, topic, "a", "b"))
    for turn in range(5):
        for number, producer in enumerate(producers):
            await producer.send(f"{number} {turn}".encode())
    seen = await workers.until(20)
    for number in range(4):
        mine = [(name, text) for name, _, text in seen if text.startswith(f"{number} ")]
        assert len({name for name, _ in mine}) == 1
        assert [text for _, text in mine] == [f"{number} {turn}" for turn in range(5)]


async def test_keys_wait_for_themselves_alone_and_acks_come_in_any_order(session, topic):
    """One message of each key is out at a time; acknowledging the last key first is fine."""

    producer = await session.producer(topic)
    inbox = (await join(session, topic, "only"))["only"]
    for turn in range(2):
        for key in "abc":
            await producer.send_with_key(f"{key}{turn}".encode(), None, key)
    first = await inbox.take(3, ack=False)
    assert texts(first) == ["a0", "b0", "c0"]
    await inbox.expect_silence()
    for message in reversed(first):
        await inbox.ack(message)
        follower = await inbox.one()
        assert follower.payload.decode() == f"{message.routing_key}1"
        await inbox.ack(follower)
    await session.wait_for_cursor(topic, 6)


@both_dispatches
async def test_a_consumer_that_joins_takes_over_some_keys_and_no_order_is_lost(
    session, topic, reliable
):
    keys = [f"user-{number}" for number in range(20)]

    producer = await session.producer(topic, reliable=reliable)
    inboxes = await join(session, topic, "a")
    workers = Workers(inboxes)
    late = None
    for turn in range(6):
        if turn == 3:
            late = await join(session, topic, "b")
            second = Workers(late)
            second.seen = workers.seen
        for key in keys:
            await producer.send_with_key(f"{key} {turn}".encode(), None, key)
    await eventually(lambda: len(workers.seen) >= 120)
    await second.stop()
    seen = await workers.until(120)
    for key in keys:
        came = order(seen, key)
        # Without acknowledgements, a key may come to its new consumer before the old one
        # has handled all of it.
        assert (came if reliable else sorted(came)) == [f"{key} {n}" for n in range(6)]
    assert {name for name, _, _ in seen} == {"a", "b"}


@pytest.mark.parametrize("partitions", [0, 3])
async def test_a_consumer_that_leaves_hands_its_keys_to_the_others(session, topic, partitions):
    """What it had, what waited for it, and what is sent when it has gone, each key in order."""
    keys = [f"user-{number}" for number in range(12)]
    producer = await session.producer(topic, partitions=partitions)
    stays = await join(session, topic, "stays")
    leaves = (await join(session, topic, "leaves"))["leaves"]

    async def publish(*turns):
        for turn in turns:
            for key in keys:
                await producer.send_with_key(f"{key} {turn}".encode(), None, key)

    await publish(0, 1)
    await leaves.one()
    await leaves.close()
    await publish(2)
    seen = await Workers(stays).until(36)
    for key in keys:
        assert order(seen, key) == [f"{key} {turn}" for turn in range(3)]


# -- filters --------------------------------------------------------------------------------------


@both_dispatches
async def test_a_filter_takes_the_keys_that_match(session, topic, reliable):
    producer = await session.producer(topic, reliable=reliable)
    eu = await join(session, topic, "eu", filters=["eu-*"])
    us = await join(session, topic, "us", filters=["us-*", "ca-*"])
    workers = Workers({**eu, **us})
    for key in ["eu-1", "us-1", "eu-2", "ca-1", "eu-1", "us-2"]:
        await producer.send_with_key(key.encode(), None, key)
    seen = await workers.until(6)
    for name, key, _ in seen:
        assert name == ("eu" if key.startswith("eu-") else "us")


async def test_a_question_mark_is_one_character_and_filters_are_anchored(session, topic):
    keys = ["eu-1", "eu-12", "xeu-1", "eu-", "EU-1", "eu-é"]

    producer = await session.producer(topic)
    inbox = (await join(session, topic, "one", filters=["eu-?"]))["one"]
    for key in keys:
        await producer.send_with_key(key.encode(), None, key)
    await producer.send_with_key(b"end", None, "eu-9")
    assert texts(await inbox.take(3)) == ["eu-1", "eu-é", "end"]
    # What nobody takes counts as done.
    await session.wait_for_cursor(topic, 7)


@both_dispatches
async def test_a_consumer_without_a_filter_takes_what_the_others_leave(session, topic, reliable):
    producer = await session.producer(topic, reliable=reliable)
    vip = await join(session, topic, "vip", filters=["vip-*"])
    rest = await join(session, topic, "rest")
    workers = Workers({**vip, **rest})
    for number in range(10):
        await producer.send_with_key(b"v", None, f"vip-{number}")
        await producer.send_with_key(b"o", None, f"other-{number}")
    seen = await workers.until(20)
    for name, key, _ in seen:
        if key.startswith("other-"):
            assert name == "rest"
    # Both take the VIPs: each key stays with one of them.
    assert all(len(names) == 1 for names in owners(seen).values())


async def test_keys_that_nobody_takes_are_passed_over(session, topic):
    producer = await session.producer(topic)
    inbox = (await join(session, topic, "orders", filters=["order-*"]))["orders"]
    for number in range(50):
        await producer.send_with_key(b"no", None, f"log-{number}")
    await producer.send_with_key(b"yes", None, "order-1")
    assert texts(await inbox.take(1)) == ["yes"]
    await session.wait_for_cursor(topic, 51)


async def test_messages_for_a_consumer_that_is_away_for_a_moment_wait_for_it(session, topic):
    """Its filter is known: its keys are not passed over, and others' keys go on meanwhile."""

    producer = await session.producer(topic)
    a = (await join(session, topic, "a", filters=["a-*"]))["a"]
    b = (await join(session, topic, "b", filters=["b-*"]))["b"]
    await a.close()
    for number in range(5):
        await producer.send_with_key(f"a{number}".encode(), None, "a-1")
        await producer.send_with_key(f"b{number}".encode(), None, "b-1")
    assert texts(await b.take(5)) == [f"b{n}" for n in range(5)]
    again = (await join(session, topic, "a", filters=["a-*"]))["a"]
    assert texts(await again.take(5)) == [f"a{n}" for n in range(5)]
    await session.wait_for_cursor(topic, 10)


# -- partitions -----------------------------------------------------------------------------------


@both_dispatches
async def test_keys_of_a_partitioned_topic_keep_order_and_consumer(session, topic, reliable):
    keys = [f"user-{number}" for number in range(15)]

    producer = await session.producer(topic, partitions=3, reliable=reliable)
    workers = Workers(await join(session, topic, "a", "b"))
    for turn in range(4):
        for key in keys:
            await producer.send_with_key(f"{key} {turn}".encode(), None, key)
    seen = await workers.until(60)
    for key in keys:
        assert len(owners(seen)[key]) == 1
        assert order(seen, key) == [f"{key} {turn}" for turn in range(4)]
    assert {name for name, _, _ in seen} == {"a", "b"}


async def test_filters_hold_in_every_partition(session, topic):
    producer = await session.producer(topic, partitions=3)
    eu = await join(session, topic, "eu", filters=["eu-*"])
    us = await join(session, topic, "us", filters=["us-*"])
    workers = Workers({**eu, **us})
    for number in range(12):
        await producer.send_with_key(b"x", None, f"eu-{number}")
        await producer.send_with_key(b"x", None, f"us-{number}")
    for name, key, _ in await workers.until(24):
        assert key.startswith(f"{name}-")


async def test_nacked_keys_of_a_partitioned_topic_come_again_in_order(session, topic):
    keys = [f"user-{number}" for number in range(6)]

    producer = await session.producer(topic, partitions=3)
    inbox = (await join(session, topic, "only"))["only"]
    for number in range(3):
        await session.set_failure_policy(f"{topic}-part-{number}", delay_ms=50)
    for turn in range(2):
        for key in keys:
            await producer.send_with_key(f"{key} {turn}".encode(), None, key)
    for message in await inbox.take(6, ack=False):
        await inbox.nack(message)
    seen = defaultdict(list)
    for message in await inbox.take(12):
        seen[message.routing_key].append(message.payload.decode())
    assert seen == {key: [f"{key} 0", f"{key} 1"] for key in keys}
