"""Subscriptions of topics without a log: who gets a message, and who misses it."""

from collections import Counter

import pytest

from ister.base.metrics import Metrics
from ister.broker.dispatch.fanout import Fanout
from ister.broker.dispatch.memory_budget import Budget
from ister.broker.dispatch.outbox import OUTBOX_MESSAGES
from ister.errors import ClosedError, ConflictError, UnavailableError
from ister.subscription.policy import SubscriptionKind
from ister.subscription.store import StoredSubscription
from tests.support.broker import a_record, broker_timers, eventually, take
from tests.support.cases import each


def make(kind, metrics=None, budget=None):
    stored = StoredSubscription(name="s", kind=SubscriptionKind(kind), cursor=0, incarnation="")
    budget = budget or Budget(1 << 30)
    return Fanout("/default/t", stored, budget=budget, metrics=metrics or Metrics())


def publish(fanout, *payloads, **fields):
    for payload in payloads:
        fanout.publish(a_record(payload, **fields))


async def payloads(outbox, count):
    return [message.payload for message in await take(outbox, count)]


def waiting(outbox):
    """What is in an outbox and was not taken."""
    return [message.payload for message in outbox._items]


def dropped(metrics):
    return metrics.snapshot()["subscription.non_reliable_dropped_total"]


# -- kinds ------------------------------------------------------------------------------------


async def test_an_exclusive_one_has_one_consumer():
    fanout = make("exclusive")
    first = fanout.attach(1, ())
    with pytest.raises(ConflictError):
        fanout.attach(2, ())
    assert fanout.attached == [1]
    assert fanout.active == 1
    publish(fanout, b"a", b"b")
    assert await payloads(first, 2) == [b"a", b"b"]
    fanout.detach(first)
    second = fanout.attach(2, ())
    publish(fanout, b"c")
    assert await payloads(second, 1) == [b"c"]


async def test_failover_gives_everything_to_the_first_until_it_goes():
    fanout = make("failover")
    first, second = fanout.attach(1, ()), fanout.attach(2, ())
    publish(fanout, b"a", b"b")
    assert waiting(first) == [b"a", b"b"]
    assert waiting(second) == []
    fanout.detach(first)
    assert fanout.active == 2
    publish(fanout, b"c")
    assert waiting(second) == [b"c"]


async def test_shared_goes_round():
    fanout = make("shared")
    outboxes = [fanout.attach(number, ()) for number in (1, 2, 3)]
    publish(fanout, *(b"%d" % n for n in range(9)))
    assert [waiting(one) for one in outboxes] == [
        [b"0", b"3", b"6"],
        [b"1", b"4", b"7"],
        [b"2", b"5", b"8"],
    ]


async def test_shared_passes_over_who_is_full():
    metrics = Metrics()
    fanout = make("shared", metrics)
    slow, quick = fanout.attach(1, ()), fanout.attach(2, ())
    while slow.room:
        slow.push(a_record(b"old"))
    publish(fanout, *(b"%d" % n for n in range(10)))
    assert waiting(quick) == [b"%d" % n for n in range(10)]
    assert dropped(metrics) == 0


async def test_key_shared_keeps_a_key_with_one_consumer():
    fanout = make("key_shared")
    outboxes = [fanout.attach(number, ()) for number in (1, 2, 3)]
    for _ in range(3):
        for key in range(20):
            publish(fanout, b"%d" % key, routing_key=f"k{key}")
    counts = [Counter(waiting(one)) for one in outboxes]
    assert sum(map(len, counts)) == 20  # no key is with two of them
    assert all(set(count.values()) == {3} for count in counts)
    assert all(counts), "twenty keys leave somebody without any"


async def test_key_shared_goes_by_the_producer_where_there_is_no_key():
    fanout = make("key_shared")
    outboxes = [fanout.attach(number, ()) for number in (1, 2, 3)]
    publish(fanout, *(b"%d" % n for n in range(6)), name="p")
    assert sorted(map(len, map(waiting, outboxes))) == [0, 0, 6]


async def test_key_shared_filters():
    fanout = make("key_shared")
    eu, us = fanout.attach(1, ["eu-*"]), fanout.attach(2, ["us-?"])
    publish(fanout, b"a", routing_key="eu-1")
    publish(fanout, b"b", routing_key="us-1")
    publish(fanout, b"c", routing_key="us-10")
    publish(fanout, b"d", routing_key="asia")
    assert waiting(eu) == [b"a"]
    assert waiting(us) == [b"b"]


# -- nothing is kept --------------------------------------------------------------------------


@each("kind", ["exclusive", "failover", "shared", "key_shared"])
async def test_without_consumers_nothing_is_kept(kind):
    metrics = Metrics()
    fanout = make(kind, metrics)
    publish(fanout, b"a")
    outbox = fanout.attach(1, ())
    assert waiting(outbox) == []
    assert fanout.active == 1
    publish(fanout, b"b")
    assert waiting(outbox) == [b"b"]
    # Nobody was there to miss it.
    assert dropped(metrics) == 0


@each("kind", ["exclusive", "failover", "shared", "key_shared"])
async def test_what_a_full_consumer_does_not_take_is_dropped_and_counted(kind):
    metrics = Metrics()
    fanout = make(kind, metrics)
    outbox = fanout.attach(1, ())
    publish(fanout, *(b"%d" % n for n in range(OUTBOX_MESSAGES + 5)))
    assert len(waiting(outbox)) == OUTBOX_MESSAGES
    assert dropped(metrics) == 5
    taken = await outbox.take(10)
    outbox.written(len(taken))
    publish(fanout, b"again")
    assert waiting(outbox)[-1] == b"again"


# -- coming and going -------------------------------------------------------------------------


async def test_a_later_stream_of_the_same_consumer_takes_over():
    fanout = make("exclusive")
    first = fanout.attach(1, ())
    publish(fanout, b"a")
    second = fanout.attach(1, ())
    assert first.is_ended
    assert await first.take() == []
    fanout.detach(first)  # the old stream ends after that, and takes nothing away
    publish(fanout, b"b")
    assert waiting(second) == [b"b"]
    assert fanout.attached == [1]


async def test_a_consumer_that_has_subscribed_is_waited_for():
    """Clients publish as soon as they have subscribed, and open the stream later."""

    fanout = make("shared")
    fanout.expect(1, (), 30.0)
    fanout.expect(1, (), 30.0)
    assert fanout.attached == []
    publish(fanout, b"a")
    outbox = fanout.attach(1, ())
    assert fanout.attached == [1]
    assert waiting(outbox) == [b"a"]
    await fanout.close(None)


async def test_a_consumer_that_does_not_come_is_not_waited_for_any_longer():
    fanout = make("shared")
    fanout.expect(1, (), 0.01)
    await eventually(lambda: fanout.active is None)
    publish(fanout, b"a")
    assert waiting(fanout.attach(1, ())) == []


async def test_an_expected_consumer_does_not_keep_another_one_from_an_exclusive_subscription():
    """The topic keeps its place; once it has given that up, whoever comes has it."""

    fanout = make("exclusive")
    fanout.expect(1, (), 30.0)
    fanout.attach(2, ())
    assert fanout.attached == [2]
    await fanout.close(None)


async def test_the_end():
    fanout = make("shared")
    fanout.expect(2, (), 30.0)
    first = fanout.attach(1, ())
    await fanout.close(UnavailableError("moved"))
    with pytest.raises(UnavailableError, match="moved"):
        await first.take()
    with pytest.raises(ClosedError):
        fanout.attach(3, ())
    fanout.expect(4, (), 30.0)
    fanout.detach(first)
    assert broker_timers() == []


async def test_consumers_that_take_nothing_share_the_budget():
    """Each may have one message, and all together no more than there is."""

    metrics, budget = Metrics(), Budget(1_000_000)
    fanouts = [make("exclusive", metrics, budget) for _ in range(50)]
    outboxes = [fanout.attach(1, ()) for fanout in fanouts]
    for _ in range(100):
        for fanout in fanouts:
            publish(fanout, b"x" * 10_000)
    assert budget.used <= 1_000_000 + 10_000
    assert dropped(metrics) > 4000
    publish(fanouts[7], b"last")
    one = make("exclusive", metrics, budget)
    late = one.attach(1, ())
    publish(one, b"y" * 10_000)
    assert await payloads(late, 1) == [b"y" * 10_000]
    for fanout, outbox in zip(fanouts, outboxes, strict=True):
        fanout.detach(outbox)
    one.detach(late)
    assert budget.used == 0
