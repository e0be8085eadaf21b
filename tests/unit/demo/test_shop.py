"""The shop's day comes from its seed alone, and adds up."""

import json
from collections import Counter

import pytest

from demo.shop import CLICKS, ORDERS, PAYMENTS, TOPICS, make_shop, parse_id
from ister.errors import InvalidRequestError


def test_a_seed_gives_the_same_bytes_and_another_one_does_not():
    first, again, other = make_shop(3000, 7), make_shop(3000, 7), make_shop(3000, 8)
    assert [event.payload for event in first.events] == [event.payload for event in again.events]
    assert first.truth == again.truth
    assert [event.payload for event in first.events] != [event.payload for event in other.events]


def test_there_are_as_many_messages_as_asked_for():
    for messages in [1000, 4321]:
        shop = make_shop(messages, 1)
        assert len(shop.events) == messages == shop.truth.total, messages
        for topic in TOPICS:
            events = shop.of(topic)
            assert len(events) == shop.truth.messages[topic] > 0, messages
            assert [event.id for event in events] == list(range(len(events))), messages
            assert [parse_id(event.payload) for event in events] == [
                event.id for event in events
            ], messages
            assert sum(len(event.payload) for event in events) == shop.truth.payload_bytes[topic], (
                messages
            )
        assert shop.truth.messages[CLICKS] > 2 * shop.truth.messages[ORDERS], messages


def test_the_day_is_in_order():
    times = [event.at_ms for event in make_shop(5000, 3).events]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] < 86_400_000


def test_the_truth_is_what_the_messages_say():
    shop = make_shop(8000, 5)
    orders = {body["order"]: body for body in map(_body, shop.of(ORDERS))}
    by_country = Counter(order["country"] for order in orders.values())
    by_hour, revenue = Counter(), Counter()
    for order in orders.values():
        total = sum(item["quantity"] * item["cents"] for item in order["items"])
        assert order["total_cents"] == total
        by_hour[int(order["at"][11:13])] += total
    statuses = Counter()
    for payment in map(_body, shop.of(PAYMENTS)):
        statuses[payment["status"]] += 1
        order = orders[payment["order"]]
        assert payment["at"] >= order["at"]
        assert payment["amount_cents"] == order["total_cents"]
        if payment["status"] == "captured":
            revenue[order["country"]] += payment["amount_cents"]
    assert shop.truth.orders_by_country == by_country
    assert shop.truth.ordered_by_hour == by_hour
    assert shop.truth.revenue_by_country == revenue
    assert shop.truth.ordered_cents == by_hour.total()
    assert statuses["declined"] > 0
    assert revenue.total() < by_hour.total(), "some are never paid"


def test_a_few_customers_and_products_make_much_of_it():
    shop = make_shop(20_000, 2)
    customers = Counter(event.key for event in shop.of(ORDERS))
    top = sum(count for _, count in customers.most_common(len(customers) // 10))
    assert top > 2 * shop.truth.messages[ORDERS] / 10
    assert len(customers) > 100


def test_a_day_that_makes_no_sense_is_refused():
    for messages in [999, 5_000_001]:
        with pytest.raises(InvalidRequestError):
            make_shop(messages, 1)


def test_what_is_not_the_shops_has_no_number():
    for payload in [b"", b"{}", b'{"id":x,', b"hello", b'{"id":7}']:
        with pytest.raises(ValueError):
            parse_id(payload)


def _body(event):
    return json.loads(event.payload)
