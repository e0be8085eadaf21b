"""Rates and curves, from looks at topics that change by hand."""

import time
from types import SimpleNamespace

from ister.broker.observe.rates import EVERY_SECONDS, POINTS, RateHistory
from ister.clock import ManualClock
from support.broker import a_record, run, some_topics
from support.cases import each


class Made:
    """A topic that says what it is told to."""

    def __init__(self, name):
        self.name = name
        self.next_offset = 0
        self.counters = SimpleNamespace(bytes_in=0, messages_out=0, bytes_out=0)
        self.producers = ()
        self.subscriptions = {}
        self.topic = None


def watched(*topics):
    clock = ManualClock()
    return RateHistory(SimpleNamespace(served=list(topics)), clock=clock), clock


async def look(history, clock, times=1):
    for _ in range(times):
        clock.advance(EVERY_SECONDS)
        await history.sample()


def test_rates_are_of_the_last_seconds():
    async def scenario():
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
        assert rates == {
            "messages_in": 10.0,
            "bytes_in": 1000.0,
            "messages_out": 5.0,
            "bytes_out": 0.0,
        }
        assert history.all_rates.as_json() == rates
        moment, came, gone, lag = history.points(topic.name)[-1]
        assert (came, gone, lag) == (10.0, 5.0, 0)
        assert moment == clock.now_ns() // 1_000_000
        # Nothing for ten seconds: it stands.
        await look(history, clock, 5)
        assert history.rates(topic.name).messages_in == 0.0

    run(scenario())


def test_a_ring_keeps_five_minutes_and_goes_with_its_topic():
    async def scenario():
        busy, idle = Made("/default/busy"), Made("/default/idle")
        history, clock = watched(busy, idle)
        await history.sample()
        for _ in range(POINTS + 20):
            busy.next_offset += 1
            await look(history, clock)
        points = history.points(busy.name)
        assert len(points) == len(history.all_points) == POINTS
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

    run(scenario())


def test_a_topic_that_is_opened_again_begins_anew():
    """Its counters begin at 0, which is no burst of anything."""

    async def scenario():
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

    run(scenario())


def test_totals_of_real_topics(tmp_path):
    async def scenario():
        async with some_topics(tmp_path) as topics:
            topic = await topics.get_or_create("/default/t", is_reliable=True)
            for _ in range(3):
                await topic.publish(a_record(b"x" * 10))
            history = RateHistory(topics, clock=ManualClock())
            await history.sample()
            totals = history.totals
            assert (totals.topics, totals.messages) == (1, 3)
            assert totals.upload_lag_bytes > 0

    run(scenario())


@each("count", [5000])
def test_thousands_of_topics_are_cheap(count):
    async def scenario():
        topics = [Made(f"/default/t{number}") for number in range(count)]
        history, clock = watched(*topics)
        await history.sample()
        began = time.perf_counter()
        await look(history, clock, 5)
        return (time.perf_counter() - began) / 5

    # Some 10 ms alone on this machine; a look that read files would take seconds.
    assert run(scenario()) < 1.0
