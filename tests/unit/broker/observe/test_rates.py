"""Rates and curves, from looks at topics that change by hand."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from ister.broker.observe import rates as rates_module
from ister.broker.observe.rates import (
    DAY,
    EVERY_SECONDS,
    HOUR,
    POINTS,
    RateHistory,
    parse_window,
)
from ister.broker.policies import Policies
from ister.errors import InvalidRequestError
from tests.support.broker import a_record, some_topics
from tests.support.cases import each
from tests.support.clock import ManualClock


class Made:
    """A topic that says what it is told to."""

    def __init__(self, name):
        self.name = name
        self.next_offset = 0
        self.counters = SimpleNamespace(bytes_in=0, messages_out=0, bytes_out=0, streams=())
        self.producers = ()
        self.subscriptions = {}
        self.topic = None


def watched(*topics):
    clock = ManualClock()
    served = SimpleNamespace(served=list(topics))
    return RateHistory(served, clock=clock), clock


def loop_time():
    return asyncio.get_running_loop().time()


async def look(history, clock, times=1):
    for _ in range(times):
        clock.advance(EVERY_SECONDS)
        await history.sample()


async def test_rates_are_of_the_last_seconds():
    topic = Made("/default/t")
    history, clock = watched(topic)
    await history.sample()
    assert history.points(topic.name) == []
    for _ in range(5):
        topic.next_offset += 20
        topic.counters.bytes_in += 2000
        topic.counters.messages_out += 10
        await look(history, clock)
    rates = history.rates(topic.name).as_json()
    assert rates == {"messages_in": 10.0, "bytes_in": 1000.0, "messages_out": 5.0, "bytes_out": 0.0}
    assert history.all_rates.as_json() == rates
    moment, came, gone, lag = history.points(topic.name)[-1]
    assert (came, gone, lag) == (10.0, 5.0, 0)
    assert moment == clock.now_ns() // 1_000_000
    # Nothing for ten seconds: it stands.
    await look(history, clock, 5)
    assert history.rates(topic.name).messages_in == 0.0


async def test_a_ring_keeps_five_minutes_and_goes_with_its_topic():
    busy, idle = Made("/default/busy"), Made("/default/idle")
    history, clock = watched(busy, idle)
    await history.sample()
    for _ in range(POINTS + 20):
        busy.next_offset += 1
        await look(history, clock)
    points = history.points(busy.name)
    assert len(points) == len(history.all_points()) == POINTS
    assert [one[0] for one in points] == sorted(one[0] for one in points)
    assert points[-1][0] - points[0][0] == round((POINTS - 1) * EVERY_SECONDS * 1000)
    assert history._watched[idle.name].ring is None
    # Five minutes without a message, and it has none either.
    await look(history, clock, POINTS)
    assert history._watched[busy.name].ring is None
    assert history.points(busy.name) == []
    history._topics.served.remove(busy)
    await look(history, clock)
    assert busy.name not in history._watched


async def test_a_topic_that_is_opened_again_begins_anew():
    """Its counters begin at 0, which is no burst of anything."""

    topic = Made("/default/t")
    topic.next_offset = 1000
    history, clock = watched(topic)
    await look(history, clock, 2)
    again = Made("/default/t")
    again.next_offset = 5
    history._topics.served[:] = [again]
    await look(history, clock, 2)
    assert history.all_rates.messages_in == 0.0
    again.next_offset = 15
    await look(history, clock)
    assert history.points(again.name)[-1][1] == 5.0


async def test_totals_of_real_topics(tmp_path):
    async with some_topics(tmp_path) as topics:
        topic = await topics.get_or_create("/default/t", is_reliable=True)
        for _ in range(3):
            await topic.publish(a_record(b"x" * 10))
        history = RateHistory(topics, clock=ManualClock())
        await history.sample()
        totals = history.totals
        assert (totals.topics, totals.messages) == (1, 3)
        assert totals.upload_lag_bytes > 0


async def test_the_last_hour_and_day_are_means_of_intervals():
    busy, idle = Made("/default/busy"), Made("/default/idle")
    history, clock = watched(busy, idle)
    await history.sample()
    for _ in range(60):
        busy.next_offset += 20
        await look(history, clock)
    await look(history, clock, 60)
    for window in (HOUR, DAY):
        points = history.all_points(window)
        assert [one[0] % (window.seconds * 1000) for one in points] == [0] * len(points)
        assert sum(one[1] for one in points) > 0
    hour = history.points(busy.name, HOUR)
    assert [one[1] for one in hour][:5] == [10.0] * 5
    # It was unused afterwards, and the broker was up.
    assert hour[-1][1] == 0.0
    assert [one[0] for one in hour] == [one[0] for one in history.all_points(HOUR)]
    assert history.points(idle.name, HOUR) == []
    assert history.as_json(hour, HOUR)["window"] == "1h"
    await look(history, clock, round(HOUR.seconds * HOUR.points / EVERY_SECONDS))
    assert len(history.all_points(HOUR)) == HOUR.points
    assert not any(one[1] for one in history.all_points(HOUR))
    assert sum(one[1] for one in history.all_points(DAY)) > 0


async def test_a_topic_takes_the_place_of_one_that_was_inactive_for_longest(monkeypatch):
    monkeypatch.setattr(rates_module, "TOPICS_MAX", 2)
    topics = [Made(f"/default/t{number}") for number in range(3)]
    history, clock = watched(*topics)

    async def use(topic):
        topic.next_offset += 1
        await look(history, clock)

    def kept():
        return [one.name for one in topics if history.points(one.name, DAY)]

    await history.sample()
    for topic in topics:
        await use(topic)
    assert kept() == ["/default/t0", "/default/t1"]
    clock.advance(2 * HOUR.seconds)
    await use(topics[0])
    await use(topics[2])
    assert kept() == ["/default/t0", "/default/t2"]


def test_windows_have_names():
    assert parse_window("1h") is HOUR
    with pytest.raises(InvalidRequestError, match="use 5m, 1h, 1d"):
        parse_window("1w")


async def test_each_producer_counts_once(tmp_path):
    """By gRPC, by Flight or both, with several streams, or to several partitions."""

    async with some_topics(tmp_path) as topics:
        names = ("/default/t", "/default/p-part-0", "/default/p-part-1")
        t, p0, p1 = [await topics.get_or_create(name, is_reliable=True) for name in names]
        history, now = RateHistory(topics, clock=ManualClock()), loop_time()

        def total():
            return history.totals_of(topics.served).producers

        with t.counters.publishing("a"):
            # Nobody uses gRPC.
            assert (t.count_producers(now), total()) == (1, 1)
            with t.counters.publishing("a"), t.counters.publishing("b"):
                assert (t.count_producers(now), total()) == (2, 2)
                for name in ("b", "c"):
                    t.producers.register(name, is_exclusive=False, policies=Policies(), now=now)
                assert (t.count_producers(now), total()) == (3, 3)
            with p0.counters.publishing("a"), p1.counters.publishing("a"):
                assert p0.count_producers(now) == p1.count_producers(now) == 1
                assert total() == 4
                await history.sample()
                assert history.totals.producers == 4
        with t.counters.publishing(None), t.counters.publishing(None):
            assert t.count_producers(now) == 4
        assert total() == 2


@each("count", [5000])
async def test_thousands_of_topics_are_cheap(count):
    async def scenario():
        topics = [Made(f"/default/t{number}") for number in range(count)]
        history, clock = watched(*topics)
        await history.sample()
        began = time.perf_counter()
        await look(history, clock, 5)
        return (time.perf_counter() - began) / 5

    # Some 10 ms alone on this machine; a look that read files would take seconds.
    assert await scenario() < 1.0
