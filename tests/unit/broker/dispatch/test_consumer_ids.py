"""Consumers' ids: the same again after a restart, never another one's."""

import asyncio

from ister.base.model import TopicName
from ister.broker.dispatch.consumer_ids import ConsumerIdentity, ConsumerIds, consumer_id
from ister.subscription.policy import SubscriptionKind
from ister.subscription.store import StoredConsumer, StoredSubscription


def stored(name="s", **consumers):
    return StoredSubscription(
        name=name,
        kind=SubscriptionKind.SHARED,
        cursor=0,
        incarnation="",
        consumers={
            who: StoredConsumer(id=number, filters=("eu-*",)) for who, number in consumers.items()
        },
    )


def test_an_id_follows_from_everything_that_it_belongs_to():
    known = consumer_id("/default/t", "i1", "s", "c")
    assert consumer_id("/default/t", "i1", "s", "c") == known
    others = {
        consumer_id("/default/t2", "i1", "s", "c"),
        consumer_id("/default/t", "i2", "s", "c"),
        consumer_id("/default/t", "i1", "s2", "c"),
        consumer_id("/default/t", "i1", "s", "c2"),
        # Where one ends and the next begins is part of it.
        consumer_id("/default/t", "i", "1s", "c"),
        consumer_id("/default/t", "i1", "sc", ""),
    }
    assert len(others | {known}) == 7
    assert all(1 <= number < 1 << 63 for number in others)


def test_written_down_ids_are_known_again():
    consumers = ConsumerIds()
    consumers.load(TopicName.parse("/default/t"), stored(a=11, b=12))
    assert len(consumers) == 2
    assert consumers.find(11) == ConsumerIdentity(11, "/default/t", "s", "a", ("eu-*",))
    assert consumers.find(13) is None
    assert consumers.find(0) is None


def test_forgetting_takes_one_subscription_or_all_of_a_topic():
    def filled():
        consumers = ConsumerIds()
        consumers.load(TopicName.parse("/default/t"), stored("s", a=1))
        consumers.load(TopicName.parse("/default/t"), stored("s2", a=2))
        consumers.load(TopicName.parse("/default/t2"), stored("s", a=3))
        return consumers

    one = filled()
    one.forget_subscription("/default/t", "s")
    assert [one.find(n) is not None for n in (1, 2, 3)] == [False, True, True]
    whole = filled()
    whole.forget_subscription("/default/t")
    assert [whole.find(n) is not None for n in (1, 2, 3)] == [False, False, True]


async def test_the_consumers_of_partitions_are_one_program():
    consumers = ConsumerIds()
    for number, topic in enumerate(("/default/t-part-0", "/default/t-part-1", "/default/t")):
        consumers.add(ConsumerIdentity(number, topic, "s", "c"))
    consumers.add(ConsumerIdentity(7, "/default/t-part-0", "s", "other"))
    consumers.add(ConsumerIdentity(8, "/default/t-part-0", "another", "c"))
    consumers.record_answer(2)
    assert {consumers.last_answer_at(one) for one in (0, 1, 2, 7, 8, 99)} == {float("-inf")}
    consumers.record_answer(0)
    assert consumers.last_answer_at(1) == consumers.last_answer_at(0) > float("-inf")
    assert {consumers.last_answer_at(one) for one in (2, 7, 8, 99)} == {float("-inf")}
    consumers.forget_subscription("/default/t-part-0")
    assert consumers.last_answer_at(1) == float("-inf")
    assert consumers._programs.keys() == {1}


async def test_a_refusal_is_sooner_if_the_client_was_told_to_subscribe_again():
    consumers, loop = ConsumerIds(), asyncio.get_running_loop()
    began = loop.time()
    await consumers.wait_dismissed(7, 0.1)
    assert loop.time() - began >= 0.09
    waiting = [asyncio.create_task(consumers.wait_dismissed(7, 3600)) for _ in range(2)]
    await asyncio.sleep(0)
    consumers.dismiss(8)
    consumers.dismiss(7)
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert not consumers._dismissals
