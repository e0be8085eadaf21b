"""Seeded lives of subscriptions: consumers come, fail, stall and vanish, and brokers restart.

Each world drives a `Delivery` beside its model (`delivery_rig`), through many restarts from what
was last saved, and in the end lets everything settle: then every message has been dealt with.
"""

from __future__ import annotations

import random

import pytest

from ister.subscription.entries import Send
from ister.subscription.keys import hash_key
from ister.subscription.policy import FailurePolicy, PoisonPolicy, SubscriptionKind
from tests.support.delivery import Rig
from tests.support.scale import first_seed, scaled

WORLDS = scaled(10, 2000)
STEPS = 250
KEYS = [f"{area}-{n}" for area in ("eu", "us", "asia") for n in range(4)]
FILTERS = [(), (), (), ("eu-*",), ("us-?", "asia-1"), ("*-2",), ("nothing",)]


class World:
    """One subscription, and what chance does to it."""

    def __init__(self, seed: int, kind: SubscriptionKind) -> None:
        self.random = random.Random(f"{seed} {kind}")
        choice = self.random.choice
        policy = FailurePolicy(
            max_redelivery_count=choice((0, 1, 3)),
            ack_timeout_ms=choice((1000, 5000)),
            base_redelivery_delay_ms=choice((0, 200, 1000)),
            max_redelivery_delay_ms=3000,
            poison=choice(list(PoisonPolicy)),
            dead_letter_topic="/default/dead",
        )
        self.rig = Rig(kind, window=choice((1, 2, 5, 20)), policy=policy, cursor=choice((0, 50)))
        self.consumers = range(1, choice((2, 4, 6)))
        self.restarts = choice((0, 1, 4))
        self.errors = choice((0, 0.1, 0.5))

    def run(self) -> None:
        kinds = {
            self.flow: 30,
            self.answer: 40,
            self.pass_time: 10,
            self.come: 8,
            self.go: 4,
            self.settle: 6,
            self.make_room: 8,
            self.stray: 3,
            self.change: 4,
            self.flush: 3,
            self.restart: self.restarts,
        }
        events, weights = list(kinds), list(kinds.values())
        for event in self.random.choices(events, weights, k=STEPS):
            event()
            if self.random.random() < 0.8:
                self.rig.take()
            self.rig.delivery.validate_state()
        self.rig.finish()

    def flow(self) -> None:
        self.rig.publish(*self.random.choices(KEYS, k=self.random.randint(0, 10)))
        self.rig.offer(self.random.randint(1, 30))

    def answer(self) -> None:
        flight = self.rig.in_flight()
        for offset in self.random.sample(flight, min(len(flight), self.random.randint(1, 5))):
            if self.random.random() < 0.3:
                self.rig.received(self.rig.holder[offset], offset)
            elif self.random.random() < self.errors:
                self.rig.nack(offset, self.random.choice((None, 0, 500, 10**6)))
            else:
                self.rig.ack(offset)

    def pass_time(self) -> None:
        self.rig.pass_time(self.random.choice((0, 0.1, 0.3, 1.0, 4.0)))

    def come(self) -> None:
        consumer = self.random.choice(self.consumers)
        reports = self.random.random() < 0.5
        is_attached = self.rig.attach(consumer, *self.random.choice(FILTERS), reports=reports)
        if is_attached and self.random.random() < 0.8:
            self.rig.set_room(consumer, self.random.choice((0, 1, 8)))

    def go(self) -> None:
        leave = self.rig.forget if self.random.random() < 0.3 else self.rig.detach
        leave(self.random.choice(self.consumers))

    def settle(self) -> None:
        for offset in self.rig.handed():
            done = self.rig.resolve if self.random.random() < 0.7 else self.rig.unresolved
            done(offset)

    def make_room(self) -> None:
        for consumer in self.consumers:
            self.rig.set_room(consumer, self.random.choice((0, 1, 3, 20)))

    def stray(self) -> None:
        offset = self.random.randint(0, len(self.rig.log) + 3)
        self.random.choice((self.rig.ack, self.rig.nack, self.rig.resolve))(offset)

    def change(self) -> None:
        chance = self.random.random()
        if chance < 0.4:
            poison = self.random.choice(list(PoisonPolicy))
            self.rig.set_policy(poison=poison, max_redelivery_count=self.random.randint(0, 3))
        elif chance < 0.7:
            self.rig.set_window(self.random.choice((1, 2, 5, 20)))
        else:
            self.rig.seek(self.random.randint(0, len(self.rig.log)))
            self.rig.flush()

    def flush(self) -> None:
        self.rig.flush()

    def restart(self) -> None:
        if self.random.random() < 0.3:
            self.rig.flush()
        self.rig.restart()


@pytest.mark.sim
@pytest.mark.parametrize("kind", list(SubscriptionKind))
def test_restarts_and_churn_lose_nothing_and_break_no_rule(kind: SubscriptionKind) -> None:
    """Goal: at least once, in order where order is promised, across any restart.

    Replay one world: ISTER_SIM_SEED=<seed> pytest tests/sim/test_delivery_sim.py
    """
    first = first_seed()
    lives = sends = 0
    for seed in range(first, first + WORLDS):
        world = World(seed, kind)
        try:
            world.run()
        except BaseException:
            print(f"replay: ISTER_SIM_SEED={seed}, kind {kind}")
            raise
        lives += world.rig.lives
        sends += world.rig.sends
    print(f"{kind}: {lives} lives in {WORLDS} worlds from seed {first}, {sends} sends")
    assert lives > WORLDS
    assert sends > 20 * WORLDS


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(2))
def test_churn_of_key_shared_keeps_the_order_of_each_key(seed: int) -> None:
    """Fifty keys, five consumers that come and go: first deliveries and completions in order."""
    chance = random.Random(seed)
    keys = [f"key-{n}" for n in range(50)]
    rig = Rig(SubscriptionKind.KEY_SHARED, window=10)
    first_sent: dict[str, list[int]] = {key: [] for key in keys}
    completed: dict[str, list[int]] = {key: [] for key in keys}
    held: list[tuple[int, int]] = []
    total = 1000

    def use(instructions: list) -> None:
        for send in instructions:
            assert isinstance(send, Send)
            key = rig.log[send.offset]
            if send.offset not in first_sent[key]:
                first_sent[key].append(send.offset)
            held.append((send.consumer, send.offset))

    while rig.delivery.cursor < total:
        if len(rig.log) < total:
            rig.publish(*chance.choices(keys, k=20))
        consumer = chance.randint(1, 5)
        if chance.random() < 0.1 and len(rig.order) > 1:
            rig.detach(consumer)
            held = [(owner, offset) for owner, offset in held if owner != consumer]
        elif consumer not in rig.order:
            rig.attach(consumer)
        for consumer in rig.order:
            rig.set_room(consumer, 10)
        rig.offer(100)
        use(rig.take())
        chance.shuffle(held)
        for _ in range(min(len(held), 25)):
            _, offset = held.pop()
            rig.ack(offset)
            completed[rig.log[offset]].append(offset)
        use(rig.take())
    for key in keys:
        wanted = [offset for offset, other in enumerate(rig.log) if other == key]
        assert first_sent[key] == completed[key] == wanted


def test_keys_spread_over_consumers() -> None:
    assert len({hash_key(key) for key in KEYS}) == len(KEYS)
