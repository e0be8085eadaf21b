"""The judge of the broker's deaths can fail: made-up histories that are wrong in one way.

Each story begins with one that is clean, so that what is found is what was put in.
"""

import pytest

from tests.support.delivery_history import (
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    SHARED,
    DeliveryHistory,
    Entry,
    Stream,
)
from tests.support.oracle import payload_of

TOPIC = "/default/t"
FLUSH = 10.0


class Story:
    """A history in which every event takes a second, and the log that goes with it."""

    def __init__(self, kind: str = EXCLUSIVE, *, is_sequenced: bool = False) -> None:
        self.now = 0.0
        self.history = DeliveryHistory(
            flush_seconds=FLUSH, ack_timeout_seconds=1000, clock=self.tick
        )
        self.log: list[Entry] = []
        self.history.launched()
        self.history.producer("p", TOPIC, is_sequenced=is_sequenced)
        self.history.subscription("s", TOPIC, kind)

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def publish(self, number: int, key: str = "k") -> None:
        """A message that is sent, logged and answered."""
        self.history.send("p", f"p.{number}", key)
        attempt = self.history.attempt(f"p.{number}")
        self.append(number, key)
        self.history.answered(attempt)

    def append(self, number: int, key: str = "k") -> None:
        """Another copy in the log."""
        self.log.append(Entry(len(self.log), payload_of(f"p.{number}"), key))

    def stream(self, consumer: str = "c") -> Stream:
        return self.history.opening("s", consumer)

    def deliver(self, stream: Stream, *offsets: int) -> None:
        """What the log has there comes by a stream."""
        for offset in offsets:
            entry = self.log[offset]
            self.history.delivered(stream, offset, entry.payload, entry.key)

    def ack(self, *offsets: int) -> None:
        for offset in offsets:
            self.history.acked(self.history.ack("s", offset))

    def restart(self, *, is_killed: bool = True) -> None:
        (self.history.killed if is_killed else self.history.stopped)(self.tick())
        self.history.launched()

    def kinds(self) -> dict[str, int]:
        return self.history.check({TOPIC: self.log}).kinds()


def a_story(kind: str = EXCLUSIVE, keys: str = "kkk", **options) -> tuple[Story, Stream]:
    """One message per key, all of them delivered by one stream and acknowledged."""
    story = Story(kind, **options)
    stream = story.stream()
    for number, key in enumerate(keys):
        story.publish(number, key)
        story.deliver(stream, number)
        story.ack(number)
    return story, stream


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED])
def test_history_in_which_nothing_is_wrong_is_clean(kind):
    story, _ = a_story(kind)
    verdict = story.history.check({TOPIC: story.log})
    assert verdict.is_clean, verdict
    assert (verdict.sent, verdict.acked, verdict.delivered, verdict.confirmed) == (3, 3, 3, 3)


# -- the log ----------------------------------------------------------------------------------


def test_acknowledged_message_that_is_gone_is_lost():
    story, _ = a_story()
    story.log.pop()
    assert story.kinds() == {"lost": 1, "disagree": 1}


def test_message_whose_answer_was_lost_may_be_gone():
    story, _ = a_story()
    story.history.send("p", "p.3", "k")
    story.history.attempt("p.3")
    story.restart()
    assert story.kinds() == {}


def test_message_that_nobody_sent_is_foreign():
    story, stream = a_story()
    story.log.append(Entry(3, payload_of("q.0"), "k"))
    story.deliver(stream, 3)
    assert story.kinds() == {"foreign": 2}


def test_message_with_another_key_is_foreign():
    story, _ = a_story()
    story.log[1] = story.log[1]._replace(key="other")
    assert story.kinds() == {"lost": 1, "foreign": 1, "disagree": 1}


def test_log_with_a_hole_is_named():
    story, _ = a_story()
    story.log = [*story.log[:2], story.log[2]._replace(offset=3)]
    assert "hole" in story.kinds()


def test_log_in_another_order_than_it_was_acknowledged_is_named():
    story = Story()
    for number in range(2):
        story.publish(number)
    story.log = [Entry(1 - offset, *rest) for offset, *rest in reversed(story.log)]
    stream = story.stream()
    story.deliver(stream, 0, 1)
    assert story.kinds() == {"reorder": 1}


@pytest.mark.parametrize(("is_sequenced", "kinds"), [(False, {}), (True, {"doubled": 1})])
def test_retry_after_a_lost_answer_may_be_in_twice_without_numbers_only(is_sequenced, kinds):
    story, _ = a_story(is_sequenced=is_sequenced)
    story.history.send("p", "p.3", "k")
    attempt = story.history.attempt("p.3")
    story.append(3)
    story.restart()
    story.history.failed(attempt)
    story.append(3)
    story.history.answered(story.history.attempt("p.3"))
    story.deliver(story.stream(), 3, 4)
    assert story.kinds() == kinds


def test_retry_that_no_kill_made_necessary_is_not_in_twice():
    story, stream = a_story()
    story.history.send("p", "p.3", "k")
    attempt = story.history.attempt("p.3")
    story.append(3)
    story.history.failed(attempt)
    story.append(3)
    story.history.answered(story.history.attempt("p.3"))
    story.deliver(stream, 3, 4)
    assert story.kinds() == {"doubled": 1}


# -- what comes -------------------------------------------------------------------------------


def test_message_that_never_came_is_undelivered():
    story, _ = a_story()
    story.publish(3)
    assert story.kinds() == {"undelivered": 1}


def test_message_from_before_a_subscription_need_not_come():
    story, _ = a_story()
    story.history.subscription("late", TOPIC, SHARED)
    story.publish(3)
    assert story.kinds() == {"undelivered": 2}
    story.deliver(story.history.opening("late", "l"), 3)
    assert story.kinds() == {"undelivered": 1}


def test_another_message_at_an_offset_disagrees_with_the_log():
    story, _ = a_story()
    story.publish(3)
    story.publish(4)
    story.history.delivered(story.stream(), 3, story.log[4].payload, "k")
    assert story.kinds()["disagree"] == 1


# -- order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER])
def test_messages_in_another_order_are_named(kind):
    story, stream = a_story(kind)
    story.publish(3)
    story.publish(4)
    story.deliver(stream, 4, 3)
    assert story.kinds() == {"skipped": 1, "reorder": 1}


def test_shared_subscription_has_no_order():
    story, stream = a_story(SHARED)
    story.publish(3)
    story.publish(4)
    story.deliver(stream, 4, 3)
    assert story.kinds() == {}


def test_message_that_is_passed_over_after_a_restart_is_skipped():
    story, stream = a_story()
    story.publish(3)
    story.publish(4)
    story.deliver(stream, 3)  # not acknowledged
    story.restart()
    story.deliver(story.stream(), 4)
    assert story.kinds() == {"skipped": 1}


def test_message_that_failed_may_come_after_later_ones():
    story, stream = a_story()
    story.publish(3)
    story.publish(4)
    story.deliver(stream, 3)
    story.history.nack("s", 3)
    story.deliver(stream, 4, 3)
    assert story.kinds() == {}


@pytest.mark.parametrize(("keys", "kinds"), [("ab", {}), ("aa", {"reorder": 1})])
def test_key_whose_earlier_message_is_not_acknowledged_waits(keys, kinds):
    story, stream = a_story(KEY_SHARED, "xyz")
    story.publish(3, keys[0])
    story.publish(4, keys[1])
    story.deliver(stream, 3)
    story.deliver(story.stream("d"), 4)
    story.ack(3, 4)
    assert story.kinds() == kinds


def test_key_in_another_order_after_a_kill_is_named():
    story, stream = a_story(KEY_SHARED, "xyz")
    for number in (3, 4):
        story.publish(number, "a")
        story.deliver(stream, number)
        story.ack(number)
    story.restart()
    stream = story.stream()
    story.deliver(stream, 4, 3)
    assert story.kinds() == {"reorder": 1}


def test_two_active_consumers_of_a_failover_subscription_are_named():
    story, _ = a_story(FAILOVER)
    story.publish(3)
    other = story.stream("d")
    story.deliver(other, 3)
    assert story.kinds() == {"two_active": 1}


def test_next_consumer_takes_over_when_the_first_has_left():
    story, stream = a_story(FAILOVER)
    story.publish(3)
    story.deliver(stream, 3)
    other = story.stream("d")
    story.history.closed(stream)
    story.deliver(other, 3)
    assert story.kinds() == {}


# -- duplicates -------------------------------------------------------------------------------


def test_unacknowledged_message_comes_again_after_a_kill():
    story, stream = a_story()
    story.publish(3)
    story.deliver(stream, 3)
    story.restart()
    story.deliver(story.stream(), 3)
    verdict = story.history.check({TOPIC: story.log})
    assert verdict.is_clean, verdict
    assert (verdict.duplicates, verdict.forgotten) == (1, 0)


def test_kill_may_take_the_last_acks():
    story, _ = a_story()
    story.restart()
    story.deliver(story.stream(), 2)
    verdict = story.history.check({TOPIC: story.log})
    assert verdict.is_clean, verdict
    assert verdict.forgotten == 1


def test_ack_that_is_older_than_the_flush_interval_holds():
    story, _ = a_story()
    story.now += FLUSH
    story.restart()
    story.deliver(story.stream(), 2)
    assert story.kinds() == {"repeated": 1}


def test_ack_that_was_repeated_after_a_kill_holds_from_then_on():
    story, _ = a_story()
    story.restart()
    story.deliver(story.stream(), 2)
    story.ack(2)
    story.now += FLUSH
    story.restart()
    story.deliver(story.stream(), 2)
    assert story.kinds() == {"repeated": 1}


def test_end_in_order_takes_no_ack():
    story, _ = a_story()
    story.restart(is_killed=False)
    story.deliver(story.stream(), 2)
    assert story.kinds() == {"repeated": 1}


def test_ack_without_an_answer_may_be_lost_in_any_way():
    story, stream = a_story()
    story.publish(3)
    story.deliver(stream, 3)
    story.history.ack("s", 3)
    story.restart(is_killed=False)
    story.deliver(story.stream(), 3)
    assert story.kinds() == {}


def test_message_that_was_under_way_when_its_ack_came_is_no_repetition():
    """One that a dead broker sent is acknowledged when the next one has sent it again."""
    story, stream = a_story(SHARED)
    story.publish(3)
    story.deliver(stream, 3)
    story.restart()
    other = story.stream("d")
    story.ack(3)
    story.deliver(other, 3)
    assert story.kinds() == {}


def test_message_that_follows_a_later_one_was_sent_after_its_ack():
    story, stream = a_story(SHARED)
    story.publish(3)
    story.deliver(stream, 3)
    story.restart()
    other = story.stream("d")
    story.ack(3)
    story.publish(4)
    story.deliver(other, 4, 3)
    story.now += FLUSH
    assert story.kinds() == {"repeated": 1}


def test_message_that_comes_twice_by_one_stream_has_no_cause():
    story, stream = a_story()
    story.publish(3)
    story.deliver(stream, 3, 3)
    assert story.kinds() == {"uncaused": 1}


def test_message_that_two_consumers_get_has_no_cause():
    story, stream = a_story(SHARED)
    story.publish(3)
    story.deliver(stream, 3)
    story.deliver(story.stream("d"), 3)
    assert story.kinds() == {"uncaused": 1}


def test_nack_is_a_cause():
    story, stream = a_story(SHARED)
    story.publish(3)
    story.deliver(stream, 3)
    story.history.nack("s", 3)
    story.deliver(story.stream("d"), 3)
    assert story.kinds() == {}


def test_nack_that_the_next_broker_gets_is_a_cause():
    story, stream = a_story()
    story.publish(3)
    story.deliver(stream, 3)
    nack = story.history.nack("s", 3)
    story.restart(is_killed=False)
    stream = story.stream()
    story.history.nacked(nack)
    # Sent before the nack came, and looked at after it was answered.
    story.deliver(stream, 3)
    story.deliver(stream, 3)
    assert story.kinds() == {}
    story.deliver(stream, 3)
    assert story.kinds() == {"uncaused": 1}


def test_nack_that_the_broker_before_has_answered_is_none():
    story, stream = a_story()
    story.publish(3)
    story.deliver(stream, 3)
    story.history.nacked(story.history.nack("s", 3))
    story.restart(is_killed=False)
    stream = story.stream()
    story.deliver(stream, 3)
    story.deliver(stream, 3)
    assert story.kinds() == {"uncaused": 1}
