"""Sends that come again: what a topic knows of them, and what it makes of its log."""

import random
import sys
import threading
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ister.base.model import MessageId, StreamMessage
from ister.errors import CapacityError, ConflictError, InvalidRequestError, MessageTooLargeError
from ister.topic import dedup as module
from ister.topic.batches import _identity_of
from ister.topic.dedup import (
    EPOCH_MAX,
    EPOCH_STEP_MAX,
    SEQUENCE_MAX,
    Appended,
    SequencedTopic,
    SequencedTopics,
    Sequences,
    Verdict,
    is_sequenced,
    sequenced_producer_id,
)
from tests.support.builders import a_message
from tests.support.cases import each
from tests.support.machine import NAME, Machine
from tests.support.stores import Site

NEW = Verdict(0, 0, 0)


def a_batch(rows, **columns):
    return pa.record_batch({"payload": pa.array(rows, pa.binary()), **columns})


def numbered(start, count):
    return a_batch([b"%d" % number for number in range(start, start + count)])


def stored(topic):
    return [message.payload for message in topic.read()]


# -- the table --------------------------------------------------------------------------------


def test_repeated_send_is_answered_with_its_first_offset():
    table = Sequences()
    table.record("p", 0, 5, 100, 10)
    assert table.judge("p", 0, 5, 10) == Verdict(10, 100, 110)
    assert table.judge("p", 0, 7, 2) == Verdict(2, 102, 104)
    assert table.judge("p", 0, 14) == Verdict(1, 114 - 5, 110)
    assert table.judge("p", 0, 15) == NEW
    assert table.judge("other", 0, 5, 10) == NEW


def test_message_left_out_is_refused_and_changes_nothing():
    table = Sequences()
    table.record("p", 0, 5, 100)
    with pytest.raises(ConflictError) as caught:
        table.judge("p", 0, 7)
    assert "6" in caught.value.hint
    assert table.judge("p", 0, 6) == NEW
    assert table.judge("p", 0, 5) == Verdict(1, 100, 101)


def test_older_epoch_is_refused_and_a_newer_one_begins_anew():
    table = Sequences()
    table.record("p", 3, 5, 100, 10)
    with pytest.raises(ConflictError, match="replaced"):
        table.judge("p", 2, 15)
    assert table.judge("p", 4, 5, 10) == NEW
    table.record("p", 4, 5, 200, 10)
    assert table.judge("p", 4, 5, 10) == Verdict(10, 200, 210)
    with pytest.raises(ConflictError, match="replaced"):
        table.judge("p", 3, 5, 10)
    table.record("p", 3, 0, 50, 10)  # in the log behind its successor's: it was let go before
    assert table.last("p") == (4, 14)


def test_what_came_too_long_ago_is_refused():
    table = Sequences(runs_max=2)
    for number in range(4):
        table.record("p", 0, number, number * 10)
    for number in (0, 1):
        with pytest.raises(ConflictError, match="long ago"):
            table.judge("p", 0, number)
    assert table.judge("p", 0, 2, 2) == Verdict(2, 20, 31)
    fresh = Sequences()
    fresh.record("p", 0, 10, 0)
    with pytest.raises(ConflictError, match="long ago"):
        fresh.judge("p", 0, 9, 2)


@each(("sequence", "count"), [(-1, 1), (0, 0), (0, -1), (SEQUENCE_MAX, 1), (5, SEQUENCE_MAX)])
def test_what_is_no_sequence_is_refused(sequence, count):
    with pytest.raises(InvalidRequestError):
        Sequences().judge("p", 0, sequence, count)


def test_table_is_bounded():
    table = Sequences(producers_max=10, runs_max=100)
    for number in range(3000):
        table.record(f"p{number % 30}", 0, number // 30, number * 2)
        assert table.producers <= 10
        assert table.runs <= 100
    assert table.last("p29") == (0, 99)
    assert table.last("p0") is None  # silent for longest


@given(st.integers(0, 2**32), st.data())
@settings(max_examples=60, deadline=None)
def test_table_agrees_with_a_log_that_is_looked_through(seed, data):
    """Goal: whatever is sent, the table says what a search of all that was appended says."""
    chance = random.Random(seed)
    table, log, offset = Sequences(), {}, 0  # (producer, epoch) -> {sequence: offset}
    epochs = {}
    for _ in range(data.draw(st.integers(1, 60))):
        producer = chance.choice("abc")
        epoch = max(0, epochs.get(producer, 0) + chance.choice([0, 0, 0, 0, 1, -1]))
        mine = log.get((producer, epoch), {})
        sequence = max(0, max(mine, default=chance.randrange(5)) + chance.choice([1, 1, 0, -2, 2]))
        count = chance.randrange(1, 5)
        newest = epochs.get(producer, -1)
        try:
            verdict = table.judge(producer, epoch, sequence, count)
        except ConflictError:
            is_gap = bool(mine) and sequence > max(mine) + 1
            is_lost = bool(mine) and sequence < min(mine)
            assert epoch < newest or is_gap or is_lost
            continue
        assert epoch >= newest
        have = [n for n in range(sequence, sequence + count) if n in mine]
        assert verdict.known == len(have)
        if have:
            assert (verdict.start, verdict.end) == (mine[have[0]], mine[have[-1]] + 1)
        if verdict.known < count:
            first = sequence + verdict.known
            new = {n: offset + n - first for n in range(first, sequence + count)}
            table.record(producer, epoch, first, offset, len(new))
            log.setdefault((producer, epoch), {}).update(new)
            epochs[producer] = epoch
            offset += len(new) + chance.choice([0, 0, 3])


# -- identities -------------------------------------------------------------------------------


def test_identity_carries_the_epoch_and_fits_the_name_alone():
    for epoch in (0, 1, EPOCH_MAX):
        identity = sequenced_producer_id("p", epoch)
        assert is_sequenced(identity)
        assert 0 < identity < 1 << 63
        assert module.epoch_in(identity, "p") == epoch
        assert module.epoch_in(identity, "q") is None
    assert not is_sequenced(0)
    assert not is_sequenced(12345)
    assert not is_sequenced((1 << 64) - 1)


def test_staged_batches_are_not_taken_for_producers():
    """Goal: 64 random bits of a batch, on rows of any name, are a producer's next to never."""
    taken = sum(
        module.epoch_in(_identity_of(_Record(batch), "query"), "p") is not None
        for batch in range(20_000)
    )
    assert taken == 0


class _Record:
    incarnation, manifest = "i", "m"

    def __init__(self, batch):
        self.batch = batch


@pytest.mark.parametrize(
    ("producer", "epoch"),
    [
        ("", 0),
        ("x" * 513, 0),
        ("\ud800", 0),
        ("a\r\nb", 0),
        ("a\u202eb", 0),
        ("a\x1b[2Jb", 0),
        (None, 0),
        ("p", -1),
        ("p", EPOCH_MAX + 1),
        ("p", "1"),
    ],
)
def test_what_names_no_producer_is_refused(machine, producer, epoch):
    topic = SequencedTopic(machine.topic())
    with pytest.raises(InvalidRequestError):
        topic.append_record(StreamMessage(), producer=producer, epoch=epoch, sequence=0)
    assert topic.topic.watermarks.next == 0


# -- topics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("above", [EPOCH_STEP_MAX + 1, EPOCH_MAX])
def test_epoch_far_above_the_time_is_refused_and_retires_nobody(machine, monkeypatch, above):
    """One message must not leave a producer without a higher epoch."""
    topic = machine.open().topic(NAME, create=True)
    sequenced = SequencedTopic(topic)
    now = topic.appender.now_seconds()
    monkeypatch.setattr(topic.appender, "now_seconds", lambda: now)
    sequenced.append_record(a_message(payload=b"1"), producer="p", epoch=now, sequence=1)
    forged = min(now + above, EPOCH_MAX)
    for append in (sequenced.append_record, sequenced.try_append_record):
        with pytest.raises(InvalidRequestError, match="too high"):
            append(a_message(payload=b"2"), producer="p", epoch=forged, sequence=1)
        with pytest.raises(InvalidRequestError, match="too high"):
            append(a_message(payload=b"2"), producer="never seen", epoch=forged, sequence=1)
    with pytest.raises(InvalidRequestError, match="too high"):
        sequenced.append_arrow(a_batch([b"2"]), producer="p", epoch=forged, sequence=1)
    assert (
        sequenced.append_record(a_message(payload=b"2"), producer="p", epoch=now, sequence=2) == 1
    )


def test_epoch_may_rise_by_a_step_above_the_last_one_or_the_time(machine):
    topic = machine.open().topic(NAME, create=True)
    sequenced = SequencedTopic(topic)
    now = topic.appender.now_seconds()
    for number, epoch in enumerate((0, 7, now, now + EPOCH_STEP_MAX, now + 2 * EPOCH_STEP_MAX)):
        offset = sequenced.append_record(
            a_message(payload=b"x"), producer="p", epoch=epoch, sequence=1
        )
        assert offset == number
    with pytest.raises(ConflictError, match="replaced"):
        sequenced.append_record(a_message(payload=b"x"), producer="p", epoch=now, sequence=2)


def test_record_is_appended_once(machine):
    topic = SequencedTopic(machine.topic())
    sent = StreamMessage(
        payload=b"a", producer_name="x", request_id=9, attributes={"k": "v"}, publish_time=5
    )
    assert topic.append_record(sent, producer="p", sequence=7) == 0
    assert topic.append_record(sent, producer="p", sequence=8) == 1
    assert topic.append_record(sent, producer="p", sequence=7) == 0
    (first, second) = [message.record for message in topic.topic.read()]
    assert first == replace(
        sent,
        producer_name="p",
        request_id=7,
        msg_id=MessageId(producer_id=sequenced_producer_id("p", 0), topic_offset=0),
    )
    assert (second.request_id, second.msg_id.topic_offset) == (8, 1)


def test_append_that_must_not_wait_appends_the_same_or_nothing(machine, monkeypatch):
    plain = machine.topic()
    topic = SequencedTopic(plain)
    send = {"producer": "p", "epoch": 2, "sequence": 0}
    assert topic.try_append_arrow(numbered(0, 3), **send) is None, "the log is not read yet"
    topic.prepare()
    with topic._lock:
        assert topic.try_append_arrow(numbered(0, 3), **send) is None, "somebody else appends"
    plain.wal.gate.hold("lag", lambda: CapacityError("too much"), waits=False)
    assert topic.try_append_arrow(numbered(0, 3), **send) is None, "nothing is taken now"
    plain.wal.gate.unhold("lag")
    with monkeypatch.context() as patch:
        patch.setattr(type(plain.appender), "has_room", lambda *_: False)
        assert topic.try_append_arrow(numbered(0, 3), **send) is None, "the buffer is full"
    assert stored(plain) == []
    assert topic.try_append_arrow(numbered(0, 3), **send) == Appended(0, 3, 0)
    assert topic.try_append_arrow(numbered(0, 5), **send) == Appended(0, 5, 3)
    assert topic.try_append_arrow(numbered(0, 5), **send) == Appended(0, 5, 5)
    with pytest.raises(ConflictError):
        topic.try_append_arrow(numbered(9, 1), producer="p", epoch=2, sequence=9)
    with pytest.raises(InvalidRequestError):
        topic.try_append_arrow(numbered(5, 1), producer="p", epoch=EPOCH_MAX, sequence=5)
    assert stored(plain) == [b"%d" % number for number in range(5)]


def test_batch_is_appended_once_and_carries_who_sent_it(machine):
    topic = SequencedTopic(machine.topic())
    assert topic.append_arrow(numbered(0, 5), producer="p", epoch=2, sequence=0) == (0, 5, 0)
    topic.topic.append(b"other")
    assert topic.append_arrow(numbered(5, 5), producer="p", epoch=2, sequence=5) == (6, 11, 0)
    assert topic.append_arrow(numbered(0, 10), producer="p", epoch=2, sequence=0) == (0, 11, 10)
    rows = topic.topic.read_arrow(columns=("producer_name", "producer_id", "request_id")).read_all()
    identity = sequenced_producer_id("p", 2)
    assert rows.column("producer_id").to_pylist() == [identity] * 5 + [0] + [identity] * 5
    assert rows.column("request_id").to_pylist() == [*range(5), 0, *range(5, 10)]
    assert rows.column("producer_name").to_pylist() == ["p"] * 5 + [""] + ["p"] * 5
    assert topic.last("p") == (2, 9)


def test_records_and_batches_share_a_producers_sequences(machine):
    topic = SequencedTopic(machine.topic())
    topic.append_arrow(numbered(0, 3), producer="p", sequence=0)
    assert topic.append_record(StreamMessage(payload=b"2"), producer="p", sequence=2) == 2
    assert topic.append_record(StreamMessage(payload=b"3"), producer="p", sequence=3) == 3
    assert topic.append_arrow(numbered(3, 2), producer="p", sequence=3) == (3, 5, 1)


def test_refused_send_leaves_the_sequence_free(machine):
    topic = SequencedTopic(machine.topic(storage={"max_message_size": 100}))
    with pytest.raises(MessageTooLargeError):
        topic.append_arrow(a_batch([b"x", b"x" * 101]), producer="p", sequence=0)
    with pytest.raises(MessageTooLargeError):
        topic.append_record(StreamMessage(payload=b"x" * 101), producer="p", sequence=0)
    with pytest.raises(InvalidRequestError):
        topic.append_arrow(pa.record_batch({"value": [1]}), producer="p", sequence=0)
    with pytest.raises(InvalidRequestError):
        topic.append_arrow(numbered(0, 0), producer="p", sequence=0)
    assert topic.append_arrow(numbered(0, 2), producer="p", sequence=0) == (0, 2, 0)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]
)
def test_column_of_names_may_say_the_same_and_nothing_else(machine, kind):
    topic = SequencedTopic(machine.topic())
    names = pa.array(["p", None], pa.string()).cast(kind)
    topic.append_arrow(a_batch([b"a", b"b"], producer_name=names), producer="p", sequence=0)
    with pytest.raises(InvalidRequestError, match="producer_name"):
        topic.append_arrow(a_batch([b"c", b"d"], producer_name=names), producer="q", sequence=0)
    assert [message.producer_name for message in topic.topic.read()] == ["p", "p"]


def test_column_of_names_of_another_type_is_refused(machine):
    topic = SequencedTopic(machine.topic())
    rows = a_batch([b"a"], producer_name=pa.array([[1]]))
    with pytest.raises(InvalidRequestError, match="producer_name"):
        topic.append_arrow(rows, producer="p", sequence=0)


def test_topics_have_one_each_until_they_are_opened_again(machine):
    log, all_of_them = machine.open(), SequencedTopics()
    topic = log.topic(NAME, create=True)
    found = all_of_them.get(topic)
    assert all_of_them.get(topic) is found
    assert all_of_them.get(log.topic("/default/other", create=True)) is not found
    log.close()
    again = machine.open().topic(NAME)
    assert all_of_them.get(again).topic is again
    assert list(all_of_them._topics) == [NAME]
    all_of_them.forget(NAME)
    assert not all_of_them._topics


def test_many_threads_that_all_retry_append_each_row_once(machine):
    topic = SequencedTopic(machine.topic())
    answers = [[] for _ in range(4)]
    failures = []

    def publish(into, producer):
        try:
            for number in range(0, 200, 4):
                into.append(
                    topic.append_arrow(numbered(number, 4), producer=producer, sequence=number)[:2]
                )
        except BaseException as error:
            failures.append(error)

    # Two of each: the second is the retry of the first, at about the same time.
    threads = [
        threading.Thread(target=publish, args=(into, producer))
        for into, producer in zip(answers, "aabb", strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    for producer in "ab":
        mine = [m.payload for m in topic.topic.read() if m.producer_name == producer]
        assert mine == [b"%d" % number for number in range(200)]


# -- the log tells ----------------------------------------------------------------------------


@pytest.fixture(params=["with Arrow", "without"])
def _reading(request, monkeypatch):
    if request.param == "without":
        monkeypatch.setitem(sys.modules, "pyarrow.compute", None)


@pytest.mark.usefixtures("_reading")
def test_table_is_made_from_the_log():
    with Machine() as machine:
        plain = machine.topic()
        topic = SequencedTopic(plain)
        for number in range(5):
            message = StreamMessage(payload=b"%d" % number)
            topic.append_record(message, producer="p", epoch=1, sequence=10 + number)
            plain.append(b"of nobody", producer_name="p")
            topic.append_record(message, producer="q", sequence=number)
        # Looks like one of q's, in a later epoch, and is not: the name does not fit the check.
        odd = MessageId(producer_id=sequenced_producer_id("p", 9))
        plain.appender.append_record(StreamMessage(msg_id=odd, producer_name="q", request_id=99))
        plain.flush()
        expected = [
            topic.append_record(StreamMessage(), producer="p", epoch=1, sequence=n)
            for n in range(10, 15)
        ]
        machine.kill()
        again = SequencedTopic(machine.reopened())
        assert not again.is_ready
        again.prepare()
        assert again.is_ready
        found = [
            again.append_record(StreamMessage(), producer="p", epoch=1, sequence=n)
            for n in range(10, 15)
        ]
        assert found == expected
        assert again.last("q") == (0, 4)
        assert again.last("p") == (1, 14)
        with pytest.raises(ConflictError, match="left out"):
            again.append_record(StreamMessage(), producer="p", epoch=1, sequence=16)
        with pytest.raises(ConflictError, match="replaced"):
            again.append_record(StreamMessage(), producer="p", epoch=0, sequence=15)
        assert again.topic.watermarks.next == 16


@pytest.mark.usefixtures("_reading")
def test_table_of_a_tiered_topic_knows_messages_that_are_not_uploaded():
    with Site() as site:
        log = site.open()
        topic = SequencedTopic(log.topic("/default/t", create=True, ack="tiered"))
        for number in range(3):
            topic.append_record(StreamMessage(), producer="p", sequence=number)
            topic.topic.flush()
        topic.topic.upload()
        topic.append_record(StreamMessage(), producer="p", sequence=3)
        topic.topic.flush()
        site.kill(log)
        again = SequencedTopic(site.open().topic("/default/t"))
        assert (again.topic.visible, again.topic.next_offset) == (3, 4)
        assert again.append_record(StreamMessage(), producer="p", sequence=3) == 3
        assert again.topic.next_offset == 4


@each(("seconds", "read"), [(0, 200), (5, 64), (1, 64)])
def test_new_owner_looks_through_the_newest_objects_alone(seconds, read):
    """A topic whose producer waits for each message has an object for each: one request each.

    Method: 200 objects, made at once, or some seconds apart; another node opens the topic.
    """
    with Site() as site:
        log = site.open("a")
        topic = SequencedTopic(log.topic("/default/t", create=True))
        for number in range(200):
            topic.append_record(StreamMessage(), producer="p", sequence=number)
            topic.topic.upload()
            site.clock.advance(seconds)
            log.stores.membership.renew()
        log.seal("/default/t")
        again = SequencedTopic(site.open("b").topic("/default/t"))
        fetched = set()
        site.objects.before = lambda kind, key: fetched.add(key) if key.endswith("dnb1") else None
        # Sent again, because the answer was lost with the owner.
        assert again.append_record(StreamMessage(), producer="p", sequence=199) == 199
        assert len(fetched) == read
        assert again.append_record(StreamMessage(), producer="p", sequence=200) == 200


@pytest.mark.usefixtures("_reading")
def test_log_without_such_producers_gives_an_empty_table(machine):
    plain = machine.topic()
    plain.append_many([b"x"] * 5)
    topic = SequencedTopic(plain)
    assert topic.last("p") is None
    assert topic.append_record(StreamMessage(), producer="p", sequence=9) == 5


@each("seed", range(20))
def test_batch_of_which_a_power_cut_left_a_part_is_completed(seed):
    """Goal: a retry after a crash leaves every row in the topic once, in order."""
    with Machine() as machine:
        topic = SequencedTopic(machine.topic(fsync_interval_ms=3_600_000))
        topic.append_arrow(numbered(0, 50), producer="p", sequence=0)
        topic.topic.wait(49)
        topic.append_arrow(numbered(50, 400), producer="p", sequence=50)
        topic.topic.wait(449, "written")
        machine.cut_power(seed)
        again = SequencedTopic(machine.reopened())
        have = again.topic.watermarks.next
        assert 50 <= have <= 450
        answer = again.append_arrow(numbered(50, 400), producer="p", sequence=50)
        assert answer == (50, 450, have - 50)
        again.topic.flush()
        assert stored(again.topic) == [b"%d" % number for number in range(450)]


def test_only_the_newest_messages_are_looked_through(machine):
    plain = machine.topic()
    topic = SequencedTopic(plain)
    topic.append_record(StreamMessage(), producer="old", sequence=5)
    topic.append_record(StreamMessage(), producer="new", sequence=5)
    plain.append_many([b"x"] * 9)
    again = SequencedTopic(plain, scan_messages=10)
    # What comes before the first look is not part of it, so it takes nothing off the ten.
    plain.append_many([b"x"] * 100)
    assert again.last("old") is None
    assert again.last("new") == (0, 5)


def test_more_of_the_log_is_read_for_a_retry_from_far_behind(machine):
    """Goal: a producer with much unanswered at a crash is not refused its own messages."""
    plain = machine.topic()
    topic = SequencedTopic(plain)
    topic.append_arrow(numbered(0, 100), producer="p", sequence=0)
    again = SequencedTopic(plain, scan_messages=10)
    assert again.last("p") == (0, 99)
    again.append_arrow(numbered(100, 5), producer="p", sequence=100)
    assert again.append_arrow(numbered(20, 90), producer="p", sequence=20) == (20, 110, 85)
    short = SequencedTopic(plain, scan_messages=2)
    with pytest.raises(ConflictError, match="long ago"):
        short.append_arrow(numbered(20, 5), producer="p", sequence=20)
    assert plain.watermarks.next == 110


def test_producer_goes_on_after_a_crash_took_back_what_was_acknowledged():
    """Goal: where the level allows such a loss, the producer is not stuck behind it."""
    with Machine() as machine:
        topic = SequencedTopic(machine.topic(ack="memory", fsync_interval_ms=3_600_000))
        for number in range(3):
            topic.append_record(StreamMessage(), producer="p", sequence=number)
        topic.topic.flush()
        for number in range(3, 6):
            topic.append_record(StreamMessage(), producer="p", sequence=number)
        machine.cut_power()
        again = SequencedTopic(machine.reopened())
        last = again.last("p")[1]
        assert last < 5
        offset = again.append_record(StreamMessage(), producer="p", sequence=6)
        assert again.append_record(StreamMessage(), producer="p", sequence=6) == offset
        with pytest.raises(ConflictError, match="left out"):
            again.append_record(StreamMessage(), producer="p", sequence=8)
