"""A day of a small shop: clicks, orders and payments, made from a seed.

Owns: what is published, in which order, and what it adds up to. The same seed and size give the
same bytes. Money is in cents, so that sums are exact in every engine.

What is believable about it: the day has a morning and an evening, a few products and customers make
most of the turnover, most people only look, some payments are declined and tried again.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

from ister.errors import InvalidRequestError

ORDERS: Final = "/default/orders"
PAYMENTS: Final = "/default/payments"
CLICKS: Final = "/default/clicks"
TOPICS: Final = (ORDERS, PAYMENTS, CLICKS)

MESSAGES_MIN: Final = 1000
MESSAGES_MAX: Final = 5_000_000
DAY: Final = "2026-03-20"
HOURS: Final = 24

_DAY_MS: Final = 86_400_000
_ORDERS_SHARE: Final = 0.19
_CUSTOMERS_PER_ORDER: Final = 0.16
_SKEW_CUSTOMERS: Final = 0.6
_SKEW_PRODUCTS: Final = 0.9
_DECLINED: Final = 0.06
_NEVER_PAID: Final = 0.04
_ANONYMOUS: Final = 0.55
# The share of a day's visitors by the hour, in UTC.
_BY_HOUR: Final = (
    9, 6, 4, 3, 3, 5, 10, 19, 30, 38, 44, 49, 52, 47, 44, 46, 52, 61, 73, 84, 88, 71, 43, 21,
)  # fmt: skip
_COUNTRIES: Final = (
    ("DE", 26), ("AT", 13), ("HU", 12), ("RO", 11), ("RS", 9), ("HR", 7), ("SK", 6), ("BG", 6),
    ("UA", 4), ("MD", 2), ("CH", 2), ("SI", 2),
)  # fmt: skip
_METHODS: Final = (("card", 58), ("paypal", 19), ("invoice", 14), ("transfer", 9))
_PAGES: Final = (("product", 62), ("search", 17), ("home", 12), ("basket", 9))
_PRODUCTS: Final = (
    ("walnut board", 4900), ("linen towel", 1890), ("coffee mill", 11900), ("enamel mug", 1290),
    ("river map", 2450), ("wool blanket", 8900), ("paprika, sweet", 690), ("honey, acacia", 1150),
    ("teapot, blue", 5400), ("field notebook", 980), ("rope hammock", 13900), ("plum jam", 620),
    ("fishing knife", 4350), ("straw hat", 2990), ("rain poncho", 3890), ("tin lantern", 2290),
    ("oak stool", 15900), ("copper pot", 9900), ("seed mix", 450), ("bicycle bell", 1750),
    ("canvas bag", 3290), ("beeswax candle", 890), ("felt slippers", 3690), ("poppy oil", 1390),
)  # fmt: skip


@dataclass(slots=True)
class Event:
    """A message before it is published."""

    topic: str
    id: int
    """Its number in its topic, from 0; also the first field of its payload."""
    at_ms: int
    """When it happened, in milliseconds of the day."""
    key: str
    payload: bytes


@dataclass(slots=True)
class Truth:
    """What the messages add up to, counted while they were made."""

    messages: dict[str, int] = field(default_factory=dict)
    payload_bytes: dict[str, int] = field(default_factory=dict)
    orders_by_country: Counter[str] = field(default_factory=Counter)
    revenue_by_country: Counter[str] = field(default_factory=Counter)
    """Cents of captured payments, by the country of their order."""
    ordered_by_hour: Counter[int] = field(default_factory=Counter)
    """Cents of orders, by the hour of the day."""

    @property
    def total(self) -> int:
        """All messages."""
        return sum(self.messages.values())

    @property
    def ordered_cents(self) -> int:
        """What all orders come to."""
        return sum(self.ordered_by_hour.values())


@dataclass(slots=True)
class Shop:
    """A day, in the order in which it happened."""

    seed: int
    events: list[Event]
    truth: Truth

    def of(self, topic: str) -> list[Event]:
        """The messages of one topic, in the order of their ids."""
        return [event for event in self.events if event.topic == topic]


class _Weighted:
    """Draws from a list by weight; quicker than `random.choices` for one at a time."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._sums = list(accumulate(weights))
        self._last = len(weights) - 1

    def draw(self, dice: random.Random) -> int:
        return min(bisect(self._sums, dice.random() * self._sums[-1]), self._last)


def make_shop(messages: int, seed: int) -> Shop:
    """Makes a day with this many messages.

    Args:
        messages: Over all topics.
        seed: Makes another day.

    Raises:
        InvalidRequestError: Too few to tell anything, or more than fit into memory.
    """
    if not MESSAGES_MIN <= messages <= MESSAGES_MAX:
        raise InvalidRequestError(
            f"a shop with {messages} messages", hint=f"{MESSAGES_MIN:,} to {MESSAGES_MAX:,}"
        )
    return _Maker(messages, random.Random(seed)).make(seed)  # noqa: S311 - no secret


class _Maker:
    def __init__(self, messages: int, dice: random.Random) -> None:
        self._messages = messages
        self._dice = dice
        self._hours = _Weighted(_BY_HOUR)
        self._countries = _Weighted([weight for _, weight in _COUNTRIES])
        self._methods = _Weighted([weight for _, weight in _METHODS])
        self._pages = _Weighted([weight for _, weight in _PAGES])
        self._products = _Weighted(
            [1 / math.pow(rank + 1, _SKEW_PRODUCTS) for rank in range(len(_PRODUCTS))]
        )
        orders = int(messages * _ORDERS_SHARE)
        customers = max(20, int(orders * _CUSTOMERS_PER_ORDER))
        self._customers = _Weighted(
            [1 / math.pow(rank + 1, _SKEW_CUSTOMERS) for rank in range(customers)]
        )
        # A customer has one country, so that it may be joined to.
        self._country_of = [_COUNTRIES[self._countries.draw(dice)][0] for _ in range(customers)]
        self._orders = orders
        self._truth = Truth()

    def make(self, seed: int) -> Shop:
        drafts = self._draft_orders()
        drafts += self._draft_clicks(self._messages - len(drafts))
        # By time, and by number where that is the same: one day from one seed.
        drafts.sort(key=lambda draft: draft[:2])
        truth = self._truth
        numbers: Counter[str] = Counter()
        events: list[Event] = []
        for at_ms, _, topic, key, body in drafts:
            number = numbers[topic]
            numbers[topic] += 1
            payload = f'{{"id":{number},"at":"{_stamp(at_ms)}",{body}}}'.encode()
            truth.payload_bytes[topic] = truth.payload_bytes.get(topic, 0) + len(payload)
            events.append(Event(topic=topic, id=number, at_ms=at_ms, key=key, payload=payload))
        truth.messages = {topic: numbers[topic] for topic in TOPICS}
        return Shop(seed=seed, events=events, truth=truth)

    def _draft_orders(self) -> list[tuple[int, int, str, str, str]]:
        """Orders with their payments: when, a number, topic, key, and the fields as JSON."""
        dice, truth = self._dice, self._truth
        drafts: list[tuple[int, int, str, str, str]] = []
        times = sorted(self._draw_time() for _ in range(self._orders))
        for number, at_ms in enumerate(times):
            customer = self._customers.draw(dice)
            country = self._country_of[customer]
            name = f"c-{customer:05d}"
            lines, total = self._draw_basket()
            order = f"o-{number:07d}"
            body = {"order": order, "customer": name, "country": country, "items": lines}
            drafts.append(
                (
                    at_ms,
                    len(drafts),
                    ORDERS,
                    name,
                    f'{json.dumps(body, separators=(",", ":"))[1:-1]},"total_cents":{total}',
                )
            )
            truth.orders_by_country[country] += 1
            truth.ordered_by_hour[at_ms * HOURS // _DAY_MS] += total
            drafts += self._draft_payments(body, total, at_ms, len(drafts))
        return drafts

    def _draft_payments(
        self, order: dict[str, Any], total: int, at_ms: int, number: int
    ) -> list[tuple[int, int, str, str, str]]:
        dice = self._dice
        drafts: list[tuple[int, int, str, str, str]] = []
        if dice.random() < _NEVER_PAID:
            return drafts
        is_declined = dice.random() < _DECLINED
        for status in ("declined", "captured") if is_declined else ("captured",):
            at_ms = min(at_ms + dice.randrange(400, 90_000), _DAY_MS - 1)
            method = _METHODS[self._methods.draw(dice)][0]
            body = (
                f'"order":"{order["order"]}","customer":"{order["customer"]}","method":"{method}",'
                f'"status":"{status}","amount_cents":{total}'
            )
            drafts.append((at_ms, number + len(drafts), PAYMENTS, order["customer"], body))
        self._truth.revenue_by_country[order["country"]] += total
        return drafts

    def _draft_clicks(self, count: int) -> list[tuple[int, int, str, str, str]]:
        dice = self._dice
        first = 1 << 40  # behind the orders of the same millisecond
        drafts: list[tuple[int, int, str, str, str]] = []
        for number in range(count):
            session = f"s-{dice.randrange(1 << 32):08x}"
            page = _PAGES[self._pages.draw(dice)][0]
            who = "null"
            if dice.random() >= _ANONYMOUS:
                who = f'"c-{self._customers.draw(dice):05d}"'
            body = (
                f'"session":"{session}","customer":{who},"page":"{page}",'
                f'"product":"{_PRODUCTS[self._products.draw(dice)][0]}",'
                f'"took_ms":{int(dice.expovariate(1 / 180)) + 12}'
            )
            drafts.append((self._draw_time(), first + number, CLICKS, session, body))
        return drafts

    def _draw_time(self) -> int:
        hour = self._hours.draw(self._dice)
        return int((hour + self._dice.random()) * _DAY_MS / HOURS)

    def _draw_basket(self) -> tuple[list[dict[str, object]], int]:
        dice = self._dice
        lines: list[dict[str, object]] = []
        total = 0
        for _ in range(min(1 + int(dice.expovariate(0.9)), 6)):
            name, cents = _PRODUCTS[self._products.draw(dice)]
            quantity = 1 if dice.random() < 0.8 else dice.randrange(2, 5)
            lines.append({"product": name, "quantity": quantity, "cents": cents})
            total += quantity * cents
        return lines, total


def _stamp(at_ms: int) -> str:
    seconds, ms = divmod(at_ms, 1000)
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    return f"{DAY}T{hour:02d}:{minute:02d}:{second:02d}.{ms:03d}Z"


def parse_id(payload: bytes) -> int:
    """The number of a message, without parsing all of it.

    Raises:
        ValueError: It is not a message of the shop.
    """
    if not payload.startswith(b'{"id":'):
        raise ValueError("not a message of the shop")
    return int(payload[6 : payload.index(b",", 6)])
