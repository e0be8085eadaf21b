"""What the demo's figures depend on: the day of the shop, pauses, latencies around the kill."""

import json
from collections import Counter
from unittest.mock import create_autospec

from demo.serving import BrokerProcess
from demo.shop import ORDERS, PAYMENTS, TOPICS, make_shop, parse_id
from demo.show import Show
from demo.traffic import Kill, Sample, Traffic


def test_a_seed_gives_the_same_messages_as_many_as_asked_for():
    first, again, other = make_shop(3000, 7), make_shop(3000, 7), make_shop(3000, 8)
    payloads = [event.payload for event in first.events]
    assert len(payloads) == first.truth.total == 3000
    assert payloads == [event.payload for event in again.events]
    assert payloads != [event.payload for event in other.events]
    for topic in TOPICS:
        ids = [parse_id(event.payload) for event in first.of(topic)]
        assert ids == list(range(first.truth.messages[topic]))
    times = [event.at_ms for event in first.events]
    assert times == sorted(times)


def test_the_truth_is_what_the_messages_say():
    shop = make_shop(8000, 5)
    orders = {body["order"]: body for body in (json.loads(one.payload) for one in shop.of(ORDERS))}
    by_hour, revenue = Counter(), Counter()
    for order in orders.values():
        total = sum(item["quantity"] * item["cents"] for item in order["items"])
        assert order["total_cents"] == total
        by_hour[int(order["at"][11:13])] += total
    for payment in (json.loads(one.payload) for one in shop.of(PAYMENTS)):
        if payment["status"] == "captured":
            revenue[orders[payment["order"]]["country"]] += payment["amount_cents"]
    by_country = Counter(order["country"] for order in orders.values())
    assert shop.truth.orders_by_country == by_country
    assert shop.truth.ordered_by_hour == by_hour
    assert shop.truth.revenue_by_country == revenue
    assert shop.truth.ordered_cents == by_hour.total() > revenue.total() > 0


def test_messages_that_the_kill_has_touched_are_told_from_the_others(tmp_path):
    broker = BrokerProcess(str(tmp_path), engine="spark")
    traffic = Traffic(broker, make_shop(2000, 1), create_autospec(Show))
    assert sum(map(len, (traffic.bulk, traffic.live, traffic.tail))) == 2000
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
