"""The judges of deliveries can fail: made-up stories that are wrong in one way.

Each story begins with messages 0, 1 and 2, which are published, delivered and acknowledged, so
that what is found is what its steps put in. `delivery_history` judges a broker that dies, by all
that its clients saw; `endurance_judge` judges what the programs of a long run wrote down.
"""

import json

import pytest

from tests.support import delivery_history
from tests.support.cases import each
from tests.support.delivery_history import (
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    SHARED,
    DeliveryHistory,
    Entry,
    Stream,
)
from tests.support.endurance_judge import DISTURBED_NS, SETTLED_NS, Judge, Records
from tests.support.oracle import payload_of

KINDS = (EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED)
ORDERED = (EXCLUSIVE, FAILOVER)
TOPIC = "/default/t"
FLUSH = 10.0


def play(story, steps: str):
    """Calls a method of the story for each step: `publish 3; deliver 3`."""
    for step in filter(None, map(str.strip, steps.split(";"))):
        name, *words = step.split()
        getattr(story, name)(*words)
    return story


class History:
    """A history in which every event takes a second, and the log that goes with it.

    Messages have the key `k` unless a letter follows their number: `3a`.
    """

    def __init__(self, kind: str) -> None:
        self.now = 0.0
        self.history = DeliveryHistory(
            flush_seconds=FLUSH, ack_timeout_seconds=1000, clock=self.tick
        )
        self.log: list[Entry] = []
        self.history.launched()
        self.history.producer("p", TOPIC, is_sequenced=False)
        self.history.subscription("s", TOPIC, kind)
        self.streams: dict[str, Stream] = {}
        self.attempts: dict[str, delivery_history.Attempt] = {}
        self.nacks: dict[str, delivery_history.Nack] = {}
        self.open("c")

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def kinds(self) -> dict[str, int]:
        return self.history.check({TOPIC: self.log}).kinds()

    # -- steps ------------------------------------------------------------------------------

    def later(self) -> None:
        """Past the flush interval."""
        self.now += FLUSH

    def numbered(self) -> None:
        """The producer numbers its messages."""
        self.history.producer("p", TOPIC, is_sequenced=True)

    def publish(self, *numbers: str) -> None:
        """Messages that are sent, logged and answered."""
        for number in numbers:
            self.send(number)
            self.append(number)
            self.answer(number)

    def send(self, number: str) -> None:
        self.history.send("p", f"p.{number[0]}", number[1:] or "k")
        self.retry(number)

    def retry(self, number: str) -> None:
        self.attempts[number] = self.history.attempt(f"p.{number[0]}")

    def append(self, number: str) -> None:
        """Another copy in the log."""
        self.log.append(Entry(len(self.log), payload_of(f"p.{number[0]}"), number[1:] or "k"))

    def answer(self, number: str) -> None:
        self.history.answered(self.attempts[number])

    def fail(self, number: str) -> None:
        self.history.failed(self.attempts[number])

    def open(self, consumer: str, subscription: str = "s") -> None:
        """A stream; what is delivered from now on comes by it."""
        self.stream = self.streams[consumer] = self.history.opening(subscription, consumer)

    def close(self, consumer: str) -> None:
        self.history.closed(self.streams[consumer])

    def deliver(self, *offsets: str) -> None:
        """What the log has there comes."""
        for offset in offsets:
            entry = self.log[int(offset)]
            self.history.delivered(self.stream, entry.offset, entry.payload, entry.key)

    def deliver_as(self, offset: str, other: str) -> None:
        """Another message comes at an offset."""
        self.history.delivered(self.stream, int(offset), self.log[int(other)].payload, "k")

    def ack(self, *offsets: str) -> None:
        for offset in offsets:
            self.history.acked(self.history.ack("s", int(offset)))

    def try_ack(self, offset: str) -> None:
        """It is never confirmed."""
        self.history.ack("s", int(offset))

    def nack(self, offset: str) -> None:
        self.nacks[offset] = self.history.nack("s", int(offset))

    def nacked(self, offset: str) -> None:
        self.history.nacked(self.nacks[offset])

    def kill(self) -> None:
        self.history.killed(self.tick())
        self.history.launched()

    def stop(self) -> None:
        """An end in order, and the next broker."""
        self.history.stopped(self.tick())
        self.history.launched()

    def subscribe(self, name: str) -> None:
        self.history.subscription(name, TOPIC, SHARED)

    def lose(self) -> None:
        """The last message of the log."""
        self.log.pop()

    def add_foreign(self) -> None:
        """A message that nobody sent."""
        self.log.append(Entry(len(self.log), payload_of("q.0"), "k"))

    def change_key(self, offset: str) -> None:
        self.log[int(offset)] = self.log[int(offset)]._replace(key="other")

    def move(self, offset: str, to: str) -> None:
        self.log[int(offset)] = self.log[int(offset)]._replace(offset=int(to))

    def swap(self, one: str, other: str) -> None:
        """Two messages have each other's offsets in the log."""
        a, b = int(one), int(other)
        self.log[a], self.log[b] = (
            self.log[b]._replace(offset=a),
            self.log[a]._replace(offset=b),
        )


def a_history(kind: str = EXCLUSIVE) -> History:
    return play(History(kind), "; ".join(f"publish {n}; deliver {n}; ack {n}" for n in range(3)))


LOST_ANSWER = "send 3; append 3; kill; fail 3; append 3; retry 3; answer 3; open c; deliver 3 4"
HISTORIES = {
    # Of which kinds, what happens, what is found.
    "nothing is wrong": (KINDS, "", {}),
    # The log.
    "acknowledged, and gone": (EXCLUSIVE, "lose", {"lost": 1, "disagree": 1}),
    "a lost answer: it may be gone": (EXCLUSIVE, "send 3; kill", {}),
    "nobody sent it": (EXCLUSIVE, "add_foreign; deliver 3", {"foreign": 2}),
    "another key": (EXCLUSIVE, "change_key 1", {"lost": 1, "foreign": 1, "disagree": 1}),
    "a hole": (EXCLUSIVE, "move 2 3", {"hole": 1, "disagree": 1, "undelivered": 1}),
    "another order than acknowledged": (
        EXCLUSIVE,
        "publish 3 4; swap 3 4; deliver 3 4",
        {"reorder": 1},
    ),
    "a lost answer: it may be in twice": (EXCLUSIVE, LOST_ANSWER, {}),
    "but not where messages are numbered": (EXCLUSIVE, f"numbered; {LOST_ANSWER}", {"doubled": 1}),
    "nor where no kill took the answer": (
        EXCLUSIVE,
        "send 3; append 3; fail 3; append 3; retry 3; answer 3; deliver 3 4",
        {"doubled": 1},
    ),
    # What comes.
    "never delivered": (EXCLUSIVE, "publish 3", {"undelivered": 1}),
    "sent before a subscription": (EXCLUSIVE, "subscribe late; publish 3", {"undelivered": 2}),
    "sent after it": (
        EXCLUSIVE,
        "subscribe late; publish 3; open l late; deliver 3",
        {"undelivered": 1},
    ),
    "another message than the log has": (
        EXCLUSIVE,
        "publish 3 4; deliver_as 3 4; deliver 4",
        {"disagree": 1},
    ),
    # Order.
    "in another order": (ORDERED, "publish 3 4; deliver 4 3", {"skipped": 1, "reorder": 1}),
    "a shared one has none": (SHARED, "publish 3 4; deliver 4 3", {}),
    "passed over after a kill": (
        EXCLUSIVE,
        "publish 3 4; deliver 3; kill; open c; deliver 4",
        {"skipped": 1},
    ),
    "failed: may come later": (EXCLUSIVE, "publish 3 4; deliver 3; nack 3; deliver 4 3", {}),
    "another key need not wait": (
        KEY_SHARED,
        "publish 3a 4b; deliver 3; open d; deliver 4; ack 3 4",
        {},
    ),
    "the same key waits": (
        KEY_SHARED,
        "publish 3a 4a; deliver 3; open d; deliver 4; ack 3 4",
        {"reorder": 1},
    ),
    "a key in another order after a kill": (
        KEY_SHARED,
        "publish 3a; deliver 3; ack 3; publish 4a; deliver 4; ack 4; kill; open c; deliver 4 3",
        {"reorder": 1},
    ),
    "two are active": (FAILOVER, "publish 3; open d; deliver 3", {"two_active": 1}),
    "the next takes over": (FAILOVER, "publish 3; deliver 3; open d; close c; deliver 3", {}),
    # Duplicates.
    "not acknowledged before a kill": (
        EXCLUSIVE,
        "publish 3; deliver 3; kill; open c; deliver 3",
        {},
    ),
    "a kill may take the last acks": (EXCLUSIVE, "kill; open c; deliver 2", {}),
    "an older ack holds": (EXCLUSIVE, "later; kill; open c; deliver 2", {"repeated": 1}),
    "an ack that was repeated holds": (
        EXCLUSIVE,
        "kill; open c; deliver 2; ack 2; later; kill; open c; deliver 2",
        {"repeated": 1},
    ),
    "an end in order takes no ack": (EXCLUSIVE, "stop; open c; deliver 2", {"repeated": 1}),
    "an ack without an answer may be lost": (
        EXCLUSIVE,
        "publish 3; deliver 3; try_ack 3; stop; open c; deliver 3",
        {},
    ),
    "under way when its ack came": (
        # One that a dead broker sent is acknowledged when the next one has sent it again.
        SHARED,
        "publish 3; deliver 3; kill; open d; ack 3; deliver 3",
        {},
    ),
    "sent after its ack, as it follows a later one": (
        SHARED,
        "publish 3; deliver 3; kill; open d; ack 3; publish 4; deliver 4 3; later",
        {"repeated": 1},
    ),
    "twice by one stream": (EXCLUSIVE, "publish 3; deliver 3 3", {"uncaused": 1}),
    "to two consumers": (SHARED, "publish 3; deliver 3; open d; deliver 3", {"uncaused": 1}),
    "a nack is a cause": (SHARED, "publish 3; deliver 3; nack 3; open d; deliver 3", {}),
    "a nack that the next broker gets": (
        # The first was sent before the nack came, and looked at after it was answered.
        EXCLUSIVE,
        "publish 3; deliver 3; nack 3; stop; open c; nacked 3; deliver 3 3",
        {},
    ),
    "it causes one delivery": (
        EXCLUSIVE,
        "publish 3; deliver 3; nack 3; stop; open c; nacked 3; deliver 3 3 3",
        {"uncaused": 1},
    ),
    "a nack that the broker before has answered": (
        EXCLUSIVE,
        "publish 3; deliver 3; nack 3; nacked 3; stop; open c; deliver 3 3",
        {"uncaused": 1},
    ),
}


@each("name", HISTORIES)
def test_history_of_a_broker_that_dies(name):
    kinds, steps, found = HISTORIES[name]
    for kind in (kinds,) if isinstance(kinds, str) else kinds:
        assert play(a_history(kind), steps).kinds() == found, (kind, name)


def test_figures_of_a_history():
    story = a_history()
    verdict = story.history.check({TOPIC: story.log})
    assert verdict.is_clean, verdict
    assert (verdict.sent, verdict.acked, verdict.delivered, verdict.confirmed) == (3, 3, 3, 3)
    play(story, "kill; open c; deliver 2")
    verdict = story.history.check({TOPIC: story.log})
    assert (verdict.duplicates, verdict.forgotten) == (1, 1)
    with pytest.raises(ValueError, match="sent before"):
        story.send("2")


# -- the records of a long run ------------------------------------------------------------------


class Story:
    """Records of one topic `t`, one producer `p` and one subscription `s`, a nanosecond apart.

    Messages have the key `k` unless a letter follows their number: `3a`.
    """

    def __init__(self, kind: str = EXCLUSIVE) -> None:
        self.now = 0
        self.records: list[tuple[object, ...]] = []
        self.keys: dict[int, str] = {}
        self.add("producer", "t", "p", True)
        self.add("subscribed", "t", "s", kind)
        self.add("join", "t", "s", "c")
        # What may excuse a step backwards is long over.
        self.now += DISTURBED_NS

    def add(self, kind: str, *what: object) -> int:
        self.now += 1
        self.records.append((kind, self.now, *what))
        return self.now

    def judged(self) -> Judge:
        judge = Judge()
        judge.feed(self.records)
        return judge

    def kinds(self) -> dict[str, int]:
        return self.judged().check().kinds()

    # -- steps ------------------------------------------------------------------------------

    def publish(self, *numbers: str) -> None:
        """Messages that are acknowledged, at offsets that are their numbers."""
        for number in numbers:
            self.send(number)
            self.answer(number, number[0])

    def send(self, number: str) -> None:
        self.keys[int(number[0])] = number[1:] or "k"
        self.add("send", "t", "p", int(number[0]), number[1:] or "k")

    def answer(self, number: str, offset: str | None = None) -> None:
        self.add("sent", "t", "p", int(number[0]), None if offset is None else int(offset))

    def take(self, *offsets: str, to: str = "c") -> None:
        """Messages are received, and not acknowledged."""
        for offset in map(int, offsets):
            self.add("got", "t", "s", to, offset, f"p.{offset}", self.keys[offset])

    def get(self, *offsets: str, to: str = "c") -> None:
        """They are received, and acknowledged."""
        for offset in offsets:
            self.take(offset, to=to)
            self.add("ack", "t", "s", int(offset))

    def get_other(self, *offsets: str) -> None:
        """The same to another consumer."""
        self.get(*offsets, to="d")

    def get_as(self, offset: str, message_id: str, key: str = "k") -> None:
        """Something else is received at an offset; `-` is nobody's."""
        self.add("got", "t", "s", "c", int(offset), message_id if message_id != "-" else None, key)

    def nack(self, offset: str) -> None:
        self.add("nack", "t", "s", int(offset))

    def seek(self, offset: str) -> None:
        self.add("sought", "t", "s", int(offset), self.add("seek", "t", "s", int(offset)))

    def disturb(self) -> None:
        self.add("disturb", "kills")

    def leave(self) -> None:
        self.add("leave", "t", "s", "c")

    def settle(self) -> None:
        """Acknowledgements that were tried have arrived."""
        self.now += SETTLED_NS

    def late(self) -> None:
        """Another subscription, which has yet to get what comes."""
        self.add("subscribed", "t", "late", SHARED)

    def uncounted(self) -> None:
        """The producer does not number its messages."""
        self.add("producer", "t", "p", False)

    def forget(self, offset: str) -> None:
        """The records of what came end there."""
        self.records = [r for r in self.records if r[0] != "got" or r[5] < int(offset)]

    def log(self, *messages: str) -> None:
        """What the bucket has from offset 0 on; `-` is nobody's, `.` is a hole."""
        for offset, number in enumerate(messages):
            if number != ".":
                message_id = None if number == "-" else f"p.{number}"
                self.add("logged", "t", offset, message_id, "k")
        self.add("log_end", "t", len(messages))


def a_story(kind: str = EXCLUSIVE) -> Story:
    return play(Story(kind), "; ".join(f"publish {number}; get {number}" for number in range(3)))


STORIES = {
    "nothing is wrong": (KINDS, "", {}),
    "acknowledged, and never came": (KINDS, "send 3; answer 3; publish 4; get 4", {"lost": 1}),
    "records that end early": (KINDS, "forget 1", {"lost": 2}),
    "not acknowledged, or before it was there: need not come": (KINDS, "send 3; late", {}),
    "in another order": (ORDERED, "publish 3 4; get 4 3", {"order": 1, "backwards": 1}),
    "a kill does not excuse a first receipt": (
        ORDERED,
        "publish 3 4; disturb; get_other 4; get 3",
        {"order": 1},
    ),
    "a shared one has no order": (SHARED, "publish 3 4; get 4 3", {}),
    "another key need not wait": (KEY_SHARED, "publish 3a 4b; take 3; get_other 4", {}),
    "the same key waits": (KEY_SHARED, "publish 3a 4a; take 3; get_other 4", {"order": 1}),
    "a key in another order": (KEY_SHARED, "publish 3a 4a; get_other 4; get 3", {"order": 1}),
    "again, without a cause": ((*ORDERED, KEY_SHARED), "get 1", {"backwards": 1}),
    "a kill explains one step": ((*ORDERED, KEY_SHARED), "disturb; get 0 1 2", {}),
    "and no second": ((*ORDERED, KEY_SHARED), "disturb; get 0 1 2; get 1", {"backwards": 1}),
    "a nack explains it": (FAILOVER, "nack 1; get 1", {}),
    "but not within a key": (KEY_SHARED, "nack 1; get 1", {"backwards": 1}),
    "a seek brings everything again": (KINDS, "leave; settle; seek 1; get_other 1 2", {}),
    "and it does not": (KINDS, "leave; settle; seek 1", {"not_again": 2}),
    "unless an ack may arrive after it": (KINDS, "settle; seek 1; leave", {}),
    "twice in the topic": (SHARED, "get_as 3 p.2", {"doubled": 1}),
    "where nobody counts": (SHARED, "uncounted; get_as 3 p.2", {}),
    "published in another order": (
        SHARED,
        "send 3; answer 3 4; send 4; answer 4 3; get_as 4 p.3; get_as 3 p.4",
        {"published": 1},
    ),
    "nobody sent it": (SHARED, "get_as 3 -; get_as 4 q.1", {"foreign": 2}),
    "another key than was sent": (SHARED, "get_as 2 p.2 other", {"disagree": 1}),
    # What the bucket has in the end.
    "the bucket has all": (EXCLUSIVE, "log 0 1 2", {}),
    "it lacks the last": (EXCLUSIVE, "log 0 1", {"missing": 1}),
    "it has a hole": (EXCLUSIVE, "log 0 . 2", {"missing": 1, "hole": 1}),
    "it has another message": (
        EXCLUSIVE,
        "send 3; log 0 3 2",
        {"disagree": 1, "missing": 1, "published": 1},
    ),
    "two changed places": (
        EXCLUSIVE,
        "log 0 2 1",
        {"disagree": 2, "doubled": 2},
    ),
    "one is damaged": (EXCLUSIVE, "log 0 1 2 -", {"foreign": 1, "hole": 1}),
}


@each("name", STORIES)
def test_records_of_a_long_run(name):
    kinds, steps, found = STORIES[name]
    for kind in (kinds,) if isinstance(kinds, str) else kinds:
        assert play(a_story(kind), steps).kinds() == found, (kind, name)


def test_records_are_read_as_they_grow_and_in_any_order(tmp_path):
    lines = [json.dumps(record) + "\n" for record in a_story(FAILOVER).records]
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
    assert judge.check().figures["received_failover"] == 3


def test_topic_is_served_again_by_what_was_sent_after_the_fault():
    story = play(a_story(), "send 3")
    fault = story.add("disturb", "kill")
    # Under way when the broker died: the answer says nothing about what came after.
    story.answer("3", "3")
    assert story.judged().served_at("t", fault) is None
    began = story.now
    story.now += 1000
    story.publish("4")
    judge = story.judged()
    assert judge.served_at("t", fault) == story.now
    assert judge.longest_pause("t", fault, story.now) == story.now - began
