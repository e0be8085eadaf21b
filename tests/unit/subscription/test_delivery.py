"""Deliveries: what the model beside them does not say (`tests/support/delivery.py`, driven by
`sim/test_delivery_sim`), and examples of some rules.
"""

import json

import pytest

from ister.errors import InvalidRequestError, InvariantError
from ister.subscription import delivery as delivery_module
from ister.subscription.consumer_set import SILENCE_EXTENSIONS_MAX
from ister.subscription.delivery import KEYED_MESSAGES_MIN, Delivery
from ister.subscription.entries import AckResult, DeadLetter, Drop, Send
from ister.subscription.floor import RANGES_MAX
from ister.subscription.policy import FailurePolicy, PoisonPolicy, SubscriptionKind
from ister.subscription.redelivery import REASON_CHARACTERS_MAX
from tests.support.cases import each

EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = SubscriptionKind
ALL_KINDS = each("kind", list(SubscriptionKind))
END = 1_000_000
DEAD = "/default/dead"


class Subscription:
    """A delivery with a clock, for tests that read like stories."""

    def __init__(self, kind, *consumers, window=10, cursor=0, saved=None, end=None, **policy):
        self.now = 0.0
        self.machine = Delivery(
            kind=kind,
            policy=FailurePolicy(**policy),
            window=window,
            cursor=cursor,
            saved=saved,
            end=end,
        )
        for consumer in consumers:
            self.attach(consumer)

    def attach(self, consumer, *filters, room=1000, reports=False):
        self.machine.attach(consumer, filters=filters, reports=reports, now=self.now)
        self.machine.set_room(consumer, room)

    def detach(self, consumer):
        self.machine.detach(consumer, now=self.now)

    def forget(self, consumer):
        self.machine.forget(consumer, now=self.now)

    def offer(self, *keys):
        """Messages with these keys, or so many without."""
        if keys and isinstance(keys[0], int):
            keys = ("",) * keys[0]
        start = self.machine.next_offset
        self.machine.offer([(start + n, key) for n, key in enumerate(keys)], now=self.now)

    def take(self):
        self.machine.validate_state()
        taken = self.machine.take(self.now)
        self.machine.validate_state()
        return taken

    def sent(self):
        """(consumer, offset) of what is sent now."""
        taken = self.take()
        assert all(isinstance(item, Send) for item in taken)
        return [(send.consumer, send.offset) for send in taken]

    def offsets(self):
        return [offset for _, offset in self.sent()]

    def ack(self, *offsets, end=END):
        results = [self.machine.ack(offset, end=end, now=self.now) for offset in offsets]
        self.machine.validate_state()
        return results[0] if len(results) == 1 else results

    def nack(self, offset, delay_ms=None, reason=None, consumer=None):
        return self.machine.nack(
            offset, consumer=consumer, delay_ms=delay_ms, reason=reason, now=self.now
        )

    def received(self, consumer, offset):
        self.machine.received(consumer, offset, now=self.now)
        self.machine.validate_state()

    def wait(self, seconds):
        self.now += seconds
        self.machine.tick(self.now)

    @property
    def cursor(self):
        return self.machine.cursor

    @property
    def stats(self):
        return self.machine.stats()


def sending(kind, messages, **options):
    """One that has just sent consumer 1 messages with these keys, or so many without."""
    subscription = Subscription(kind, 1, **options)
    subscription.offer(*([messages] if isinstance(messages, int) else messages))
    subscription.take()
    return subscription


# -- the ordinary case --------------------------------------------------------------------------


@ALL_KINDS
def test_messages_are_sent_once_and_the_cursor_follows_the_acknowledgements(kind):
    subscription = Subscription(kind, 1, cursor=40)
    subscription.offer("a", "b", "c")
    assert subscription.take() == [Send(1, 40, 1), Send(1, 41, 1), Send(1, 42, 1)]
    assert subscription.take() == []
    assert subscription.ack(40, 41) == [AckResult.ACCEPTED] * 2
    assert subscription.cursor == 42
    assert subscription.machine.next_offset == 43
    assert subscription.stats.in_flight == 1


@ALL_KINDS
def test_nothing_is_wanted_or_sent_without_consumers(kind):
    subscription = Subscription(kind)
    assert subscription.machine.wanted() == 0
    assert subscription.machine.active is None
    subscription.offer("a", "a")
    assert subscription.take() == []
    subscription.attach(1)
    assert subscription.machine.wanted() > 0
    subscription.detach(1)
    assert subscription.machine.wanted() == 0


def test_bounds_of_what_is_read_ahead():
    assert Subscription(EXCLUSIVE, 1, window=10).machine.wanted() == 20
    assert Subscription(FAILOVER, 1, 2, 3, window=10).machine.wanted() == 20
    assert Subscription(SHARED, 1, 2, 3, window=10).machine.wanted() == 40
    assert Subscription(KEY_SHARED, 1, window=10).machine.wanted() == KEYED_MESSAGES_MIN
    assert Subscription(KEY_SHARED, 1, 2, window=1000).machine.wanted() == 12_000
    subscription = Subscription(EXCLUSIVE, 1, window=10)
    subscription.offer(15)
    assert subscription.machine.wanted() == 5
    subscription.take()
    subscription.ack(3)
    assert subscription.machine.wanted() == 6
    subscription.offer(50)
    assert subscription.machine.wanted() == 0


def test_messages_with_a_hole_are_refused_and_repeated_ones_passed_over():
    subscription = Subscription(EXCLUSIVE, 1, cursor=5)
    machine = subscription.machine
    with pytest.raises(InvariantError):
        machine.offer([(5, ""), (7, "")], now=0.0)
    assert machine.next_offset == 6
    machine.offer([(4, ""), (5, ""), (6, "")], now=0.0)
    assert subscription.offsets() == [5, 6]


def test_window_and_place_that_make_no_sense_are_refused():
    machine = Subscription(EXCLUSIVE).machine
    for call in (
        lambda: Subscription(EXCLUSIVE, window=0),
        lambda: machine.set_window(0),
        lambda: machine.seek(-1, now=0.0),
    ):
        with pytest.raises(InvalidRequestError):
            call()


# -- acknowledgements ---------------------------------------------------------------------------


def test_acknowledgements_ahead_are_bounded():
    subscription = Subscription(EXCLUSIVE, 1)
    machine = subscription.machine
    for n in range(RANGES_MAX):
        assert machine.ack(2 * n + 1, end=END, now=0.0) is AckResult.ACCEPTED
    assert machine.ack(2 * RANGES_MAX + 1, end=END, now=0.0) is AckResult.REFUSED
    # What was sent is always taken.
    subscription.offer(1)
    assert subscription.offsets() == [0]
    assert subscription.ack(0) is AckResult.ACCEPTED
    assert subscription.cursor == 2


def test_traces_of_acknowledged_messages_do_not_pile_up():
    """One message that nobody answers, and very many others that are answered ahead of time."""
    for kind in SubscriptionKind:
        subscription = Subscription(kind, 1, window=2)
        machine = subscription.machine
        subscription.offer("stuck")
        machine.take()
        for _ in range(300):
            start = machine.next_offset
            machine.offer([(start + n, "stuck" if n % 2 else "b") for n in range(20)], now=0.0)
            machine.take()
            for n in range(20):
                machine.ack(start + n, end=END, now=0.0)
        machine.take()
        machine.validate_state()
        queue = machine._queue
        if kind is KEY_SHARED:
            left = [*queue._queues["stuck"].runs, *queue._attached[1].ready]
        else:
            left = [*queue._fresh, *queue._redeliveries]
        assert len(machine._entries) == 1
        assert len(left) < 1000
        assert len(machine._timers.waits) < 1000


# -- failures -----------------------------------------------------------------------------------


def test_timeouts_and_nacks_count_alike_and_disconnects_do_not():
    subscription = Subscription(
        EXCLUSIVE, 1, max_redelivery_count=1, poison=PoisonPolicy.DROP, ack_timeout_ms=1000
    )
    subscription.offer(1)
    for _ in range(10):
        assert subscription.take() == [Send(1, 0, 1)]
        subscription.detach(1)
        subscription.attach(1)
    subscription.take()
    subscription.wait(1.0)
    subscription.wait(1.0)
    assert subscription.take() == [Send(1, 0, 2)]
    subscription.wait(1.0)
    assert subscription.take() == [Drop(0, 2, "no answer in 1000 ms")]


@ALL_KINDS
def test_another_policy_judges_what_is_blocked(kind):
    subscription = sending(kind, "a", max_redelivery_count=0)
    subscription.nack(0, reason="broken")
    assert subscription.take() == []
    policy = FailurePolicy(
        max_redelivery_count=0, poison=PoisonPolicy.DEAD_LETTER, dead_letter_topic=DEAD
    )
    subscription.machine.set_policy(policy, 0.0)
    assert subscription.take() == [DeadLetter(0, 1, "broken")]


# -- slow consumers ------------------------------------------------------------------------------

REPORTING = each("reports", [False, True])


@ALL_KINDS
@REPORTING
@each("seconds", [0.15, 0.2, 1.0, 29.0])
def test_a_program_that_takes_one_message_after_the_other_is_given_time(kind, reports, seconds):
    """Goal: by default, whatever a client reads ahead, each message is handled once."""
    subscription = Subscription(kind, window=1000)
    subscription.attach(1, reports=reports)
    subscription.offer(*[f"key {n}" for n in range(1000)])
    read_ahead = subscription.offsets()
    assert len(read_ahead) == 1000
    for number, offset in enumerate(read_ahead):
        if reports:
            subscription.machine.received(1, offset, now=subscription.now)
        subscription.wait(seconds)
        assert subscription.machine.timeouts == 0, f"after {number} messages"
        assert subscription.machine.ack(offset, end=END, now=subscription.now) is AckResult.ACCEPTED
        assert subscription.machine.take(subscription.now) == []
    assert subscription.cursor == 1000


@ALL_KINDS
@REPORTING
def test_a_message_that_took_too_long_once_fails_alone(kind, reports):
    """Its answer comes when it has been sent again: that says nothing about those in between."""
    subscription = Subscription(kind, window=1000)
    subscription.attach(1, reports=reports, room=10_000)
    subscription.offer(*[f"key {n}" for n in range(500)])
    read_ahead = subscription.offsets()
    for seconds, offset in zip([35.0, *[1.0] * 499], read_ahead, strict=True):
        if reports:
            subscription.machine.received(1, offset, now=subscription.now)
        for _ in range(int(seconds)):
            subscription.wait(1.0)
            subscription.machine.take(subscription.now)
        ack = subscription.machine.ack(offset, end=END, now=subscription.now, attempt=1)
        assert ack is AckResult.ACCEPTED
    assert subscription.machine.timeouts == 1
    assert subscription.cursor == 500


@ALL_KINDS
def test_a_program_that_answers_elsewhere_is_not_silent_for_some_time(kind):
    """Partitions: their messages are taken in turn."""
    subscription = Subscription(kind, ack_timeout_ms=5000)
    subscription.machine.attach(1, active_elsewhere_at=lambda: subscription.now - 1.0, now=0.0)
    subscription.machine.set_room(1, 10)
    subscription.offer("a")
    subscription.take()
    # It answers elsewhere, up to a second before each look: four more seconds.
    for _ in range(SILENCE_EXTENSIONS_MAX):
        subscription.wait(5.0)
    subscription.machine.validate_state()
    assert subscription.machine.timeouts == 0
    subscription.wait(5.0)
    assert subscription.machine.timeouts == 1


# -- consumers ----------------------------------------------------------------------------------


def test_shared_takes_turns():
    subscription = Subscription(SHARED, 1, 2, 3, window=100)
    subscription.offer(36)
    consumers = [consumer for consumer, _ in subscription.sent()]
    assert consumers == [1, 2, 3] * 12
    subscription.offer(1)
    assert subscription.sent() == [(1, 36)]
    subscription.offer(1)
    assert subscription.sent() == [(2, 37)]


def test_shared_consumers_that_join_get_their_share():
    subscription = Subscription(SHARED, 1, 2, window=100)
    subscription.offer(4)
    subscription.take()
    subscription.attach(3)
    subscription.offer(9)
    consumers = [consumer for consumer, _ in subscription.sent()]
    assert {consumer: consumers.count(consumer) for consumer in (1, 2, 3)} == {1: 3, 2: 3, 3: 3}


# -- keys ---------------------------------------------------------------------------------------


def test_filters_that_are_none_change_nothing():
    subscription = Subscription(KEY_SHARED)
    with pytest.raises(InvalidRequestError):
        subscription.attach(1, "x" * 1000)
    assert subscription.stats.known_consumers == 0


# -- progress -----------------------------------------------------------------------------------


def restarted(subscription, *consumers, **changes):
    """The next process, with what the store has."""
    saved = json.loads(json.dumps(subscription.machine.saved()))
    settings = {
        "window": subscription.machine.window,
        "cursor": subscription.cursor,
        "saved": saved,
        **changes,
    }
    next_one = Subscription(subscription.machine.kind, *consumers, **settings)
    next_one.machine.set_policy(subscription.machine.policy, 0.0)
    return next_one


def test_failures_that_are_not_read_again_yet_are_still_saved():
    subscription = sending(EXCLUSIVE, 2)
    subscription.nack(1, reason="why")
    again = restarted(subscription)
    assert again.machine.saved() == subscription.machine.saved()
    assert again.machine.saved()["failed"] == [[1, 1, "why"]]
    again.ack(1)
    assert again.machine.saved()["failed"] == []


def test_cursor_that_was_put_back_takes_nothing_from_what_was_saved():
    """The offsets may be given out again: a message must not be taken for an older one."""
    subscription = sending(EXCLUSIVE, 5, cursor=10)
    subscription.ack(12)
    subscription.nack(13)
    again = restarted(subscription, 1, cursor=8)
    again.offer(6)
    assert again.take() == [Send(1, offset, 1) for offset in range(8, 14)]


def test_saved_state_beyond_the_end_of_the_log_is_left_aside():
    subscription = sending(EXCLUSIVE, 8)
    subscription.ack(2, 3, 4, 5, 6)
    subscription.nack(7)
    again = restarted(subscription, 1, end=5)
    again.offer(8)
    assert again.take() == [Send(1, offset, 1) for offset in (0, 1, 5, 6, 7)]
    elsewhere = restarted(subscription, 1, cursor=6, end=5)
    assert elsewhere.cursor == 6


@each(
    "saved",
    [
        *({}, {"floor": 0}, {"floor": None, "acked": []}),
        {"floor": 0, "acked": "x", "failed": []},
        *({"floor": 0, "acked": [], "failed": bad} for bad in ([[1]], 7)),
        {"floor": 0, "acked": [[3, 1]], "failed": []},
    ],
)
def test_damaged_state_is_left_aside(saved):
    subscription = Subscription(EXCLUSIVE, 1, saved=saved)
    subscription.offer(3)
    assert subscription.offsets() == [0, 1, 2]


def test_saved_state_is_bounded():
    subscription = Subscription(SHARED, 1, window=20_000)
    subscription.offer(20_000)
    subscription.machine.take()
    for offset in range(0, 20_000, 2):
        subscription.machine.nack(offset, delay_ms=None, reason="\U0001f4a5" * 300, now=0.0)
        subscription.machine.ack(offset + 1, end=END, now=0.0)
    saved = subscription.machine.saved()
    assert len(json.dumps(saved)) < 500_000
    assert saved["failed"][0][2] == "\U0001f4a5" * REASON_CHARACTERS_MAX
    assert saved["failed"][-1][1:] == [1, None]
    assert saved["end"] == 20_000


def test_version_changes_with_what_is_to_be_saved():
    subscription = Subscription(EXCLUSIVE, 1)
    machine = subscription.machine
    versions = [machine.version]
    subscription.offer(3)
    subscription.take()
    assert machine.version == versions[0]
    for event in (
        lambda: subscription.ack(2),
        lambda: subscription.nack(1),
        lambda: subscription.ack(0),
        lambda: subscription.ack(9),
        lambda: machine.seek(0, now=0.0),
    ):
        event()
        assert machine.version not in versions
        versions.append(machine.version)
    subscription.ack(99, end=50)
    assert machine.version == versions[-1]


def test_message_that_was_handed_out_before_a_seek_is_not_resolved_after_it():
    subscription = sending(EXCLUSIVE, 1, max_redelivery_count=0, poison=PoisonPolicy.DROP)
    subscription.nack(0)
    subscription.take()
    subscription.machine.seek(0, now=0.0)
    subscription.offer(1)
    subscription.machine.resolve(0, now=0.0)
    assert subscription.take() == [Send(1, 0, 1)]


# -- faults of Danube's dispatcher, and what holds here instead -----------------------------------


def test_danube_fault_failover_promotes_a_standby():
    subscription = Subscription(FAILOVER, 1, 2, 3, window=2)
    subscription.offer(4)
    assert subscription.sent() == [(1, 0), (1, 1)]
    subscription.attach(1)
    assert (subscription.machine.active, subscription.sent()) == (1, [(1, 0), (1, 1)])
    subscription.detach(1)
    assert subscription.machine.active == 2
    assert subscription.sent() == [(2, 0), (2, 1)]
    subscription.ack(0)
    assert subscription.sent() == [(2, 2)]
    subscription.forget(2)
    assert subscription.sent() == [(3, 1), (3, 2)]


@each("kind", [SHARED, KEY_SHARED])
def test_danube_fault_slow_consumer_stops_nobody_else(kind):
    subscription = Subscription(kind, 1, 2, window=5)
    subscription.machine.set_room(1, 0)
    done = 0
    for n in range(200):
        subscription.offer(*[f"key-{n}-{m}" for m in range(min(3, subscription.machine.wanted()))])
        for consumer, offset in subscription.sent():
            assert consumer == 2
            subscription.ack(offset)
            done += 1
    assert done > (500 if kind is SHARED else 200)


@each("poison", [PoisonPolicy.DROP, PoisonPolicy.DEAD_LETTER])
def test_danube_fault_poison_takes_no_other_message_of_its_key_along(poison):
    subscription = sending(
        KEY_SHARED, "aaa", max_redelivery_count=0, poison=poison, dead_letter_topic=DEAD
    )
    subscription.nack(0)
    (handed,) = subscription.take()
    assert handed.offset == 0
    subscription.machine.resolve(0, now=0.0)
    for offset in (1, 2):
        assert subscription.offsets() == [offset]
        subscription.ack(offset)
    assert subscription.cursor == 3


def test_danube_fault_block_of_key_shared_stops_that_key_alone():
    subscription = sending(KEY_SHARED, "abab", max_redelivery_count=0)
    subscription.nack(0)
    subscription.ack(1)
    assert subscription.offsets() == [3]
    assert subscription.stats.blocked == 0
    assert subscription.machine.wanted() > 0
    subscription.ack(3)
    subscription.offer("a", "c")
    assert subscription.offsets() == [5]
    subscription.ack(0)
    assert subscription.offsets() == [2]


@ALL_KINDS
def test_danube_fault_acknowledgement_after_the_timeout_counts(kind):
    subscription = sending(kind, "a", ack_timeout_ms=1000)
    subscription.wait(1.0)
    assert subscription.stats.waiting_retry == 1
    assert subscription.ack(0) is AckResult.ACCEPTED
    subscription.wait(100)
    assert subscription.take() == []
    assert subscription.cursor == 1
    assert subscription.machine.deadline() is None


# -- the checks themselves ----------------------------------------------------------------------


@ALL_KINDS
@each(
    "damage",
    [
        lambda machine: machine._entries.pop(0),
        lambda machine: setattr(machine._entries[1], "failures", 3),
        lambda machine: machine._floor.ack(0),
        lambda machine: setattr(machine._attached[1], "is_attached", False),
        lambda machine: machine._attached[1].flight.clear(),
        lambda machine: machine._consumers.known[1].unreceived.clear(),
        lambda machine: machine._timers._silences.clear(),
        lambda machine: (machine.received(1, 1, now=0.0), machine._timers.waits.clear()),
        lambda machine: machine._queue.reset(),
        lambda machine: machine._redelivery.blocked.add(1),
    ],
)
def test_broken_invariant_is_noticed(kind, damage):
    subscription = sending(kind, "abc", window=2)
    subscription.machine.validate_state()
    damage(subscription.machine)
    with pytest.raises(InvariantError):
        subscription.machine.validate_state()


# -- keys that wait for a consumer --------------------------------------------------------------


def serve(machine, consumer, received, stop=None):
    """A consumer takes and acknowledges until it has nothing; what others are sent stays theirs."""
    is_busy = True
    while is_busy:
        is_busy = False
        for send in machine.take():
            received.append(send)
            if send.consumer == consumer and send.offset != stop:
                is_busy = True
                machine.ack(send.offset, end=END, now=0.0)
                machine.set_room(consumer, 100)


def read_on(machine, keys, upto):
    """Offers what is wanted, as far as it is."""
    while machine.next_offset < upto and (count := machine.wanted()):
        first = machine.next_offset
        machine.offer(
            [(n, keys[n % len(keys)]) for n in range(first, min(upto, first + count))], now=0.0
        )
        yield


@pytest.mark.nightly
@each("how", ["does not acknowledge", "has no room", "is away"])
def test_keys_of_others_go_on_while_a_consumer_is_slow(how):
    """100,000 messages go past one that stands still; then it gets all of its own, in order."""
    subscription = Subscription(KEY_SHARED, window=10)
    machine = subscription.machine
    machine.attach(1, filters=["slow-*"], now=0.0)
    machine.attach(2, filters=["fast-*"], now=0.0)
    machine.set_room(2, 100)
    if how == "does not acknowledge":
        machine.set_room(1, 100)
    if how == "is away":
        machine.detach(1, now=0.0)
    keys = ["slow-1", "fast-1", "fast-2", "slow-2", "slow-2", "fast-3"]
    received = []
    for _ in read_on(machine, keys, 100_000):
        serve(machine, 2, received)
    assert machine.next_offset == 100_000, "the others wait"
    fast = [send.offset for send in received if send.consumer == 2]
    assert sorted(fast) == [n for n in range(100_000) if keys[n % 6].startswith("fast")]
    assert machine.cursor == 0
    # What waits is compact, and so is what a successor is told.
    assert len(machine._entries) <= 2
    assert len(json.dumps(machine.saved())) < 1_000_000
    machine.validate_state()
    machine.attach(1, filters=["slow-*"], now=0.0)
    machine.set_room(1, 100)
    received.clear()
    serve_all = [send for send in received if send.consumer == 1]
    while machine.cursor < 100_000:
        for send in machine.take():
            serve_all.append(send)
            machine.ack(send.offset, end=END, now=0.0)
        machine.set_room(1, 100)
    for key in ("slow-1", "slow-2"):
        own = [send.offset for send in serve_all if keys[send.offset % 6] == key]
        assert own == [n for n in range(100_000) if keys[n % 6] == key]
    machine.validate_state()


def test_keys_go_on_beside_one_that_is_blocked():
    subscription = Subscription(KEY_SHARED, 1, max_redelivery_count=0, window=10)
    machine = subscription.machine
    machine.attach(2, filters=["other"], now=0.0)
    machine.attach(1, filters=["bad"], now=0.0)
    for consumer in (1, 2):
        machine.set_room(consumer, 100)
    subscription.offer("bad")
    machine.take()
    subscription.nack(0)
    received = []
    for _ in read_on(machine, ["bad", "bad", "bad", "other"], 20_000):
        serve(machine, 2, received)
    assert machine.next_offset == 20_000
    assert len(received) == 5000
    assert subscription.stats.blocked == 0
    machine.validate_state()


@each("keys, name, bound", [(1, "KEYED_MESSAGES_MAX", 5000), (100_000, "KEYS_MAX", 10_000)])
def test_what_waits_for_slow_keys_has_a_bound(monkeypatch, keys, name, bound):
    monkeypatch.setattr(delivery_module, "KEYED_MESSAGES_MAX", 10**9)
    monkeypatch.setattr(delivery_module, name, bound)
    subscription = Subscription(KEY_SHARED, window=10)
    machine = subscription.machine
    machine.attach(1, filters=["slow-*"], now=0.0)
    machine.attach(2, filters=["fast"], now=0.0)
    machine.set_room(2, 100)
    for _ in read_on(machine, [f"slow-{n}" for n in range(keys)], 100_000):
        machine.take()
    assert bound <= machine.next_offset < bound + 1000


def test_nothing_is_read_ahead_for_consumers_that_are_busy():
    """Everybody has something to do: the usual bound holds, however slow they are."""
    subscription = Subscription(KEY_SHARED, window=10)
    machine = subscription.machine
    for consumer in (1, 2, 3):
        machine.attach(consumer, now=0.0)
        machine.set_room(consumer, 100)
    for _ in read_on(machine, [f"key-{n}" for n in range(30)], 100_000):
        machine.take()
    assert machine.next_offset == KEYED_MESSAGES_MIN
    assert machine.wanted() == 0


def test_failures_from_before_a_restart_count_for_keys_that_waited():
    subscription = sending(KEY_SHARED, "aab", max_redelivery_count=1, window=10)
    subscription.nack(0)
    subscription.ack(2)
    twin = Subscription(
        KEY_SHARED, saved=subscription.machine.saved(), max_redelivery_count=1, window=10
    )
    twin.offer("a", "a", "b")
    assert twin.machine.saved()["failed"] == subscription.machine.saved()["failed"]
    twin.machine.validate_state()
    twin.attach(1)
    assert twin.take() == [Send(1, 0, 2)]


def test_other_keys_of_a_consumer_go_on_beside_one_that_it_does_not_answer():
    subscription = Subscription(KEY_SHARED, 1, window=10, ack_timeout_ms=10**9)
    machine = subscription.machine
    machine.set_room(1, 100)
    received = []
    keys = ["stuck", "stuck", "other"]
    for _ in read_on(machine, keys, 20_000):
        serve(machine, 1, received, stop=0)
    assert machine.next_offset < 2000
    machine.tick(60.0)
    for _ in read_on(machine, keys, 20_000):
        serve(machine, 1, received, stop=0)
    assert machine.next_offset == 20_000
    assert len(received) == 1 + 20_000 // 3
    machine.validate_state()
