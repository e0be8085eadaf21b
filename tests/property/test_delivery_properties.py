"""Properties of deliveries: any sequence of events, judged against a plain model.

A failure prints the shortest sequence and `@reproduce_failure`; put that above the test to replay.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ister.subscription.floor import AckFloor
from ister.subscription.keys import KeyFilter
from ister.subscription.policy import Backoff, FailurePolicy, PoisonPolicy, SubscriptionKind
from tests.support.delivery import Rig
from tests.support.scale import scaled

MACHINE = settings(
    max_examples=scaled(40, 1000),
    stateful_step_count=scaled(50, 80),
    deadline=None,
    print_blob=True,
)
EXAMPLES = settings(max_examples=200, deadline=None, print_blob=True)

CONSUMERS = st.integers(1, 4)
FILTERS = st.sampled_from(((), (), ("a*",), ("?b", "c"), ("*",), ("nobody",)))
KEYS = st.sampled_from(("a", "ab", "b", "bb", "c", ""))
POISONS = st.sampled_from([str(poison) for poison in PoisonPolicy])
SPANS = st.sampled_from((0.0, 0.1, 0.5, 1.0, 3.0, 10.0))


class DeliveryMachine(RuleBasedStateMachine):
    kind = SubscriptionKind.EXCLUSIVE

    @initialize(
        window=st.integers(1, 5),
        redeliveries=st.integers(0, 2),
        base=st.sampled_from((0, 300)),
        poison=POISONS,
        cursor=st.sampled_from((0, 7)),
    )
    def begin(self, window, redeliveries, base, poison, cursor):
        policy = FailurePolicy(
            max_redelivery_count=redeliveries,
            ack_timeout_ms=2000,
            base_redelivery_delay_ms=base,
            max_redelivery_delay_ms=1500,
            poison=PoisonPolicy(poison),
            dead_letter_topic="/default/dead",
        )
        self.rig = Rig(self.kind, window=window, policy=policy, cursor=cursor)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=6))
    def publish(self, keys):
        self.rig.publish(*keys)

    @rule(consumer=CONSUMERS, filters=FILTERS, room=st.integers(0, 6), reports=st.booleans())
    def attach(self, consumer, filters, room, reports):
        if self.rig.attach(consumer, *filters, reports=reports):
            self.rig.set_room(consumer, room)

    @rule(consumer=CONSUMERS)
    def detach(self, consumer):
        self.rig.detach(consumer)

    @rule(consumer=CONSUMERS)
    def forget(self, consumer):
        self.rig.forget(consumer)

    @rule(consumer=CONSUMERS, room=st.integers(0, 6))
    def set_room(self, consumer, room):
        self.rig.set_room(consumer, room)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=6), limit=st.integers(1, 8))
    def flow(self, keys, limit):
        self.rig.publish(*keys)
        self.rig.offer(limit)
        self.rig.take()

    @rule(limit=st.integers(1, 8))
    def offer(self, limit):
        self.rig.offer(limit)
        self.rig.take()

    @rule(data=st.data())
    @precondition(lambda self: self.rig.in_flight())
    def ack(self, data):
        self.rig.ack(data.draw(st.sampled_from(self.rig.in_flight()), "in flight"))

    @rule(offset=st.integers(0, 30), consumer=st.none() | CONSUMERS)
    def ack_anything(self, offset, consumer):
        self.rig.ack(offset, consumer)

    @rule(offset=st.integers(0, 30), consumer=CONSUMERS)
    def receive_anything(self, offset, consumer):
        self.rig.received(consumer, offset)

    @rule(data=st.data())
    @precondition(lambda self: self.rig.in_flight())
    def receive(self, data):
        offset = data.draw(st.sampled_from(self.rig.in_flight()), "in flight")
        self.rig.received(self.rig.holder[offset], offset)

    @rule(data=st.data(), delay=st.sampled_from((None, 0, 700, 10**9)))
    @precondition(lambda self: self.rig.in_flight())
    def nack(self, data, delay):
        self.rig.nack(data.draw(st.sampled_from(self.rig.in_flight()), "in flight"), delay)

    @rule(offset=st.integers(0, 30), consumer=st.none() | CONSUMERS)
    def nack_anything(self, offset, consumer):
        self.rig.nack(offset, consumer=consumer)

    @rule(seconds=SPANS)
    def pass_time(self, seconds):
        self.rig.pass_time(seconds)

    @rule()
    def take(self):
        self.rig.take()

    @rule(data=st.data())
    @precondition(lambda self: self.rig.handed())
    def resolve(self, data):
        self.rig.resolve(data.draw(st.sampled_from(self.rig.handed()), "handed"))

    @rule(data=st.data())
    @precondition(lambda self: self.rig.handed())
    def unresolved(self, data):
        self.rig.unresolved(data.draw(st.sampled_from(self.rig.handed()), "handed"))

    @rule(offset=st.integers(0, 30))
    def resolve_anything(self, offset):
        self.rig.resolve(offset)

    @rule(poison=POISONS, redeliveries=st.integers(0, 3))
    def set_policy(self, poison, redeliveries):
        self.rig.set_policy(poison=poison, max_redelivery_count=redeliveries)

    @rule(window=st.integers(1, 5))
    def set_window(self, window):
        self.rig.set_window(window)

    @rule(offset=st.integers(0, 30))
    def seek(self, offset):
        self.rig.seek(min(offset, len(self.rig.log)))
        self.rig.flush()

    @rule()
    def flush(self):
        self.rig.flush()

    @rule()
    def restart(self):
        self.rig.restart()

    @invariant()
    def state_is_valid(self):
        if hasattr(self, "rig"):
            self.rig.delivery.validate_state()

    def teardown(self):
        if hasattr(self, "rig"):
            self.rig.finish()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", list(SubscriptionKind))
def test_any_events_leave_nothing_lost_and_the_rules_kept(kind):
    """Goal: whatever happens in whatever order, every message is dealt with once all is well."""
    machine = type(f"Machine{kind.title()}", (DeliveryMachine,), {"kind": kind})
    run_state_machine_as_test(machine, settings=MACHINE)


@EXAMPLES
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(0, 10))
def test_floor_is_the_set_of_what_was_acknowledged(offsets, start):
    floor, acked = AckFloor(start), set(range(start))
    for offset in offsets:
        assert floor.ack(offset) == (offset not in acked)
        acked.add(offset)
        floor.validate()
        assert [floor.is_acked(n) for n in range(50)] == [n in acked for n in range(50)]
        assert floor.floor == next(n for n in range(60) if n not in acked)
        assert floor.count_below(20) == len([n for n in acked if floor.floor <= n < 20])
    twin = AckFloor.from_json(floor.to_json())
    assert (twin.floor, list(twin.ranges())) == (floor.floor, list(floor.ranges()))


@EXAMPLES
@given(st.lists(st.integers(0, 40), max_size=40), st.integers(0, 45), st.integers(0, 45))
def test_floor_that_moved_on_or_was_clipped_keeps_what_holds(offsets, cursor, end):
    floor = AckFloor(0)
    for offset in offsets:
        floor.ack(offset)
    moved = AckFloor.from_json(floor.to_json(), floor=cursor)
    moved.validate()
    keeps = cursor >= floor.floor
    for n in range(50):
        assert moved.is_acked(n) == (n < cursor or (keeps and floor.is_acked(n)))
    end = max(end, floor.floor)
    floor.clip(end)
    floor.validate()
    assert not any(floor.is_acked(n) for n in range(end, 50))
    assert all(floor.is_acked(n) for n in offsets if n < end)


def matches_slowly(pattern, key):
    """Globs by their definition."""
    if not pattern:
        return not key
    if pattern[0] == "*":
        return any(matches_slowly(pattern[1:], key[n:]) for n in range(len(key) + 1))
    return bool(key) and pattern[0] in ("?", key[0]) and matches_slowly(pattern[1:], key[1:])


@EXAMPLES
@given(st.text("ab*?", max_size=7), st.text("abc?*", max_size=8))
def test_globs_match_as_defined(pattern, key):
    assert KeyFilter([pattern]).matches(key) == matches_slowly(pattern, key)


@EXAMPLES
@given(
    st.integers(1, 10**9),
    st.none() | st.integers(-5, 2**64),
    st.integers(0, 10_000),
    st.integers(0, 100_000),
    st.sampled_from(list(Backoff)),
)
def test_pauses_stay_within_the_policy(attempt, requested, base, more, backoff):
    policy = FailurePolicy(
        base_redelivery_delay_ms=base, max_redelivery_delay_ms=base + more, backoff=backoff
    )
    delay = policy.delay_ms(attempt, requested)
    assert base <= delay <= base + more
    assert requested is None or delay >= min(requested, base + more)
    assert policy.delay_ms(attempt + 1, requested) >= delay
    assert FailurePolicy.from_json(policy.to_json()) == policy
