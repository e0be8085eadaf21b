"""The judge of the endurance run can fail: records that are wrong in one way.

Each story begins with one that is clean, so that what is found is what was put in.
"""

import json

import pytest

from tests.support.endurance_judge import (
    DISTURBED_NS,
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    SETTLED_NS,
    SHARED,
    Judge,
    Records,
)

KINDS = (EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED)


class Story:
    """Records of one topic `t`, one producer `p` and one subscription `s`, a nanosecond apart."""

    def __init__(self, kind: str, *, is_once: bool = True) -> None:
        self.now = 0
        self.records: list[tuple[object, ...]] = []
        self.add("producer", "t", "p", is_once)
        self.add("subscribed", "t", "s", kind)
        self.add("join", "t", "s", "c")
        # What may excuse a step backwards is long over.
        self.now += DISTURBED_NS

    def add(self, kind: str, *what: object) -> int:
        self.now += 1
        self.records.append((kind, self.now, *what))
        return self.now

    def publish(self, number: int, offset: int | None = None, key: str = "k") -> None:
        self.add("send", "t", "p", number, key)
        self.add("sent", "t", "p", number, offset)

    def get(self, *offsets: int, to: str = "c", key: str = "k", ack: bool = True) -> None:
        """Messages whose numbers are their offsets are received, and acknowledged."""
        for offset in offsets:
            self.add("got", "t", "s", to, offset, f"p.{offset}", key)
            if ack:
                self.add("ack", "t", "s", offset)

    def seek(self, offset: int) -> None:
        self.add("sought", "t", "s", offset, self.add("seek", "t", "s", offset))

    def kinds(self) -> dict[str, int]:
        judge = Judge()
        judge.feed(self.records)
        return judge.check().kinds()


def a_story(kind: str = EXCLUSIVE, count: int = 5, *, is_once: bool = True) -> Story:
    """Messages that are published, received and acknowledged one by one."""
    story = Story(kind, is_once=is_once)
    for number in range(count):
        story.publish(number, number)
        story.get(number)
    return story


@pytest.mark.parametrize("kind", KINDS)
def test_records_in_which_nothing_is_wrong_are_clean(kind):
    assert a_story(kind).kinds() == {}


@pytest.mark.parametrize("kind", KINDS)
def test_acknowledged_message_that_never_came_is_lost(kind):
    story = a_story(kind)
    story.publish(5)
    story.publish(6)
    story.get(6)
    assert story.kinds()["lost"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_records_that_end_early_are_incomplete(kind):
    story = a_story(kind)
    story.records = [one for one in story.records if one[0] != "got" or one[5] < 3]
    assert story.kinds()["lost"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_message_that_was_not_acknowledged_or_came_before_need_not_come(kind):
    story = a_story(kind)
    story.add("send", "t", "p", 5, "k")
    story.add("subscribed", "t", "late", kind)
    assert story.kinds() == {}


@pytest.mark.parametrize(
    ("kind", "found"),
    [(EXCLUSIVE, {"order": 1, "backwards": 1}), (FAILOVER, {"order": 1, "backwards": 1})],
)
def test_messages_in_another_order_are_named(kind, found):
    story = a_story(kind)
    for number in (5, 6):
        story.publish(number, number)
    story.get(6, 5)
    assert story.kinds() == found


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER])
def test_kill_does_not_excuse_a_first_receipt_out_of_order(kind):
    story = a_story(kind)
    for number in (5, 6):
        story.publish(number, number)
    story.add("disturb", "kills")
    story.get(6, to="d")
    story.get(5, to="c")
    assert story.kinds() == {"order": 1}


def test_shared_subscription_has_no_order():
    story = a_story(SHARED)
    for number in (5, 6):
        story.publish(number, number)
    story.get(6, 5)
    assert story.kinds() == {}


@pytest.mark.parametrize(("keys", "found"), [("ab", {}), ("aa", {"order": 1})])
def test_key_whose_earlier_message_is_not_acknowledged_waits(keys, found):
    story = a_story(KEY_SHARED)
    for number in (5, 6):
        story.publish(number, number, key=keys[number - 5])
    story.get(5, key=keys[0], ack=False)
    story.get(6, key=keys[1], to="d")
    assert story.kinds() == found


def test_key_in_another_order_is_named():
    story = a_story(KEY_SHARED)
    for number in (5, 6):
        story.publish(number, number, key="a")
    story.get(6, to="d", key="a")
    story.get(5, key="a")
    assert story.kinds() == {"order": 1}


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER, KEY_SHARED])
def test_duplicate_out_of_order_without_a_cause_is_named(kind):
    story = a_story(kind)
    story.get(2)
    assert story.kinds() == {"backwards": 1}


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER, KEY_SHARED])
def test_kill_explains_one_step_backwards_and_no_second(kind):
    story = a_story(kind)
    story.add("disturb", "kills")
    story.get(2, 3, 4)
    assert story.kinds() == {}
    story.get(3)
    assert story.kinds() == {"backwards": 1}


@pytest.mark.parametrize(("kind", "found"), [(FAILOVER, {}), (KEY_SHARED, {"backwards": 1})])
def test_nack_explains_a_message_behind_later_ones_except_within_a_key(kind, found):
    story = a_story(kind)
    story.add("nack", "t", "s", 3)
    story.get(3)
    assert story.kinds() == found


@pytest.mark.parametrize("kind", KINDS)
def test_seek_back_brings_everything_again(kind):
    story = a_story(kind)
    story.add("leave", "t", "s", "c")
    story.now += SETTLED_NS
    story.seek(2)
    assert story.kinds() == {"not_again": 3}
    story.get(2, 3, 4, to="d")
    assert story.kinds() == {}


def test_acknowledgement_that_may_arrive_after_a_seek_excuses_its_message():
    story = a_story()
    story.now += SETTLED_NS
    story.seek(2)
    story.add("leave", "t", "s", "c")
    assert story.kinds() == {}


def test_message_in_a_topic_twice_is_doubled_where_its_producer_counts():
    for is_once, found in ((True, {"doubled": 1}), (False, {})):
        story = a_story(SHARED, is_once=is_once)
        story.add("got", "t", "s", "c", 5, "p.4", "k")
        assert story.kinds() == found


def test_producers_messages_in_another_order_are_named():
    story = a_story(SHARED)
    story.publish(5, 6)
    story.publish(6, 5)
    for offset, number in ((5, 6), (6, 5)):
        story.add("got", "t", "s", "c", offset, f"p.{number}", "k")
    assert story.kinds() == {"published": 1}


def test_other_message_than_was_sent_is_named():
    story = a_story(SHARED)
    story.add("got", "t", "s", "c", 5, None, "k")
    story.add("got", "t", "s", "c", 6, "q.1", "k")
    assert story.kinds() == {"foreign": 2}
    story = a_story(SHARED)
    story.get(4, key="other")
    assert story.kinds() == {"disagree": 1}


def test_records_are_read_as_they_grow_and_in_any_order(tmp_path):
    story = a_story(FAILOVER)
    lines = [json.dumps(record) + "\n" for record in story.records]
    consumer = [line for line in lines if line.startswith(('["got', '["ack'))]
    (tmp_path / "a.jsonl").write_text("".join(consumer)[:-3])
    records, judge = Records(tmp_path), Judge()
    judge.feed(records.news())
    (tmp_path / "b.jsonl").write_text("".join(line for line in lines if line not in consumer))
    judge.feed(records.news())
    assert judge.unfinished() == 0
    (tmp_path / "a.jsonl").write_text("".join(consumer))
    judge.feed(records.news())
    assert judge.check().is_clean, judge.check().shown()
    assert judge.check().figures["received_failover"] == 5


# -- what the bucket has in the end ----------------------------------------------------------


def a_logged_story(count: int = 5) -> Story:
    """A clean story, and the topic as it was read afterwards."""
    story = a_story(count=count)
    for number in range(count):
        story.add("logged", "t", number, f"p.{number}", "k")
    story.add("log_end", "t", count)
    return story


def test_topic_that_has_what_was_acknowledged_is_clean():
    assert a_logged_story().kinds() == {}


def test_acknowledged_message_that_the_topic_does_not_have_is_missing():
    story = a_logged_story()
    story.records = [one for one in story.records if one[0] != "log_end"]
    story.publish(5, 5)
    story.get(5)
    story.add("log_end", "t", 5)
    assert story.kinds() == {"missing": 1}


def test_offset_that_the_topic_does_not_have_is_a_hole():
    story = a_logged_story()
    story.records = [one for one in story.records if one[0] != "logged" or one[3] != 2]
    assert story.kinds() == {"missing": 1, "hole": 1}


def test_another_message_at_an_offset_that_was_delivered_is_found():
    story = a_logged_story()
    story.add("send", "t", "p", 9, "k")
    story.add("logged", "t", 3, "p.9", "k")
    found = story.kinds()
    assert found["disagree"] == 1
    assert found["missing"] == 1, "what was acknowledged at that offset is gone"


def test_messages_that_changed_places_are_found():
    story = a_story(count=3)
    for offset, number in enumerate((0, 2, 1)):
        story.add("logged", "t", offset, f"p.{number}", "k")
    story.add("log_end", "t", 3)
    found = story.kinds()
    assert found["disagree"] == 2
    assert found["doubled"] == 2


def test_damaged_message_in_the_topic_is_foreign():
    story = a_logged_story()
    story.add("logged", "t", 5, None, "k")
    assert story.kinds() == {"foreign": 1}


# -- how long a topic was away -----------------------------------------------------------------


def test_topic_is_served_again_by_what_was_sent_after_the_fault():
    story = a_story(count=1)
    story.add("send", "t", "p", 1, "k")
    fault = story.add("disturb", "kill")
    # Under way when the broker died: the answer says nothing about what came after.
    story.add("sent", "t", "p", 1, 1)
    judge = Judge()
    judge.feed(story.records)
    assert judge.served_at("t", fault) is None
    began = story.now
    story.now += 1000
    story.publish(2, 2)
    judge = Judge()
    judge.feed(story.records)
    assert judge.served_at("t", fault) == story.now
    assert judge.longest_pause("t", fault, story.now) == story.now - began
