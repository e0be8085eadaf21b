"""What traffic notes, judged without a broker."""

import asyncio
from collections import deque
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import create_autospec

from demo.serving import BrokerProcess
from demo.shop import TOPICS, make_shop
from demo.show import Show
from demo.traffic import SUBSCRIPTIONS, Kill, Sample, Traffic


def _traffic(tmp_path):
    broker = BrokerProcess(str(tmp_path), engine="spark")
    return Traffic(broker, make_shop(2000, 1), create_autospec(Show))


def test_the_day_is_cut_into_parts_and_nothing_is_left(tmp_path):
    traffic = _traffic(tmp_path)
    parts = (traffic.bulk, traffic.live, traffic.tail)
    assert sum(map(len, parts)) == 2000
    assert all(parts)
    assert traffic.bulk[-1].at_ms <= traffic.live[0].at_ms <= traffic.tail[0].at_ms
    assert {event.topic for event in traffic.tail} == set(TOPICS)


def test_there_is_a_subscription_of_each_type():
    kinds = sorted(one.kind for one in SUBSCRIPTIONS)
    assert kinds == ["exclusive", "failover", "key_shared", "shared"]


def test_messages_that_the_kill_has_touched_are_told_from_the_others(tmp_path):
    traffic = _traffic(tmp_path)
    traffic.kill = Kill(at=10.0, ready_at=12.0, back_at=13.0)
    traffic.day_seconds = 20.0
    lag = dict.fromkeys(("ledger",), 0)
    traffic.samples = [
        Sample(9.0, 0, 0, lag, 0),
        Sample(13.5, 0, 0, lag, 5000),
        Sample(14.0, 0, 0, {"ledger": 4000}, 0),
        Sample(15.0, 0, 0, lag, 3),
        Sample(16.0, 0, 0, lag, 0),
    ]
    traffic._timed = [
        (1.0, 1.002),  # long before
        (9.0, 13.2),  # on its way when it happened
        (11.0, 13.5),  # sent while the broker was away
        (14.5, 14.9),  # behind the backlog
        (15.5, 15.501),  # after it
    ]
    traffic._sort_latencies()
    assert traffic.kill.caught_up_at == 15.0
    assert [round(value) for value in traffic.steady_ms] == [2, 1]
    assert [round(value) for value in traffic.killed_ms] == [4200, 2500, 400]
    assert traffic.kill.away_seconds == 3.0


def test_clock_of_a_message_starts_when_it_was_due_however_late_it_is_sent(tmp_path):
    """Goal: a client or a broker that stands still is not left out of the latencies.

    Method: the first send takes as long as many messages need; nothing else is waited for.
    """
    traffic = _traffic(tmp_path)

    class Slow:
        is_first = True

        async def send(self, payload, *, routing_key):
            if Slow.is_first:
                Slow.is_first = False
                await asyncio.sleep(0.3)

    async def nothing(*_):
        return None

    lane = SimpleNamespace(producer=Slow(), pending=deque())
    traffic._lanes = {topic: [lane] for topic in TOPICS}
    traffic._switch = traffic._kill = nothing
    asyncio.run(traffic._send_live({}))
    due = [traffic._sent_at[event.topic][event.id] for event in traffic.live]
    steps = {round((after - before) * traffic.pace, 3) for before, after in pairwise(due)}
    assert steps == {1.0}
