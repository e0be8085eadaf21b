"""The history of a topic that waits for another node's disk: reads, cursors, and how it ends."""

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from ister.base.metrics import Metrics
from ister.base.model import AckLevel, StreamMessage, Watermarks
from ister.broker.dispatch.dead_letters import LetterSigner
from ister.broker.dispatch.dispatcher import Dispatcher
from ister.broker.dispatch.memory_budget import Budget
from ister.broker.policies import Rate
from ister.bucket.claim import act_outside
from ister.bucket.fence import Fence, read_holder
from ister.errors import (
    ClosedError,
    CommitUnknownError,
    ConflictError,
    FencedError,
    InvalidRequestError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
)
from ister.subscription.policy import SubscriptionKind
from ister.subscription.progress import ProgressPlan
from ister.subscription.store import SubscriptionStore
from ister.topic.dedup import SequencedTopic
from ister.topic.read_only import ReadOnlyTopic
from tests.support.broker import run, take
from tests.support.dispatch import ack
from tests.support.machine import Task, eventually, numbered, payloads, waiting
from tests.support.stores import NAME, PREFIX, TTL_SECONDS, a_descriptor

TEXT = str(NAME)
START = datetime.fromtimestamp(1_000_000, UTC)


def lose_owner(site, *, uploaded=10, kept=5, ack="synced"):
    """A node that writes, uploads a part, and dies with the rest on its disk."""
    log = site.open("a")
    topic = log.topic(TEXT, create=True, ack=ack)
    for number, payload in enumerate(numbered(uploaded + kept)):
        topic.append(payload, publish_time=START + timedelta(hours=number))
        topic.flush()
        if number == uploaded - 1:
            topic.upload()
    site.kill(log)
    site.clock.advance(TTL_SECONDS + 1)


def an_orphan(site, **how):
    """The topic, read-only on another node."""
    lose_owner(site, **how)
    return site.open("b").read_only_topic(TEXT)


def test_numbered_send_is_refused_before_its_number_is_judged(site):
    """The messages before it may be on the other disk: it is not one too far."""
    lose_owner(site)
    topic = SequencedTopic(site.open("b").read_only_topic(TEXT))
    batch = pa.record_batch({"payload": pa.array([b"x"], pa.binary())})
    for append, what in (
        (topic.append_record, StreamMessage()),
        (topic.try_append_record, StreamMessage()),
        (topic.append_arrow, batch),
        (topic.try_append_arrow, batch),
    ):
        with pytest.raises(UnavailableError, match="waits for the disk of node"):
            append(what, producer="p", sequence=77)


# -- reading --------------------------------------------------------------------------------


def test_history_is_read_up_to_the_end_of_the_bucket(site):
    topic = an_orphan(site)
    assert isinstance(topic, ReadOnlyTopic)
    assert topic.watermarks == Watermarks(trimmed=10, tiered=10, synced=10, written=10, next=10)
    assert (topic.earliest, topic.visible) == (0, 10)
    assert payloads(topic.read()) == numbered(10)
    assert payloads(topic.read(3, end=7)) == numbered(10)[3:7]
    table = topic.read_arrow(2, columns=("offset", "payload")).read_all()
    assert table["offset"].to_pylist() == list(range(2, 10))
    assert payloads(topic.reader(8).next_batch()) == numbered(10)[8:]
    assert list(topic.reader("latest").next_batch(timeout=0)) == []
    assert topic.flush() == 10


def test_starts_are_found(site):
    topic = an_orphan(site)
    assert topic.resolve_start("earliest") == 0
    assert topic.resolve_start("latest") == 10
    assert topic.resolve_start(4) == 4
    assert topic.resolve_start(START + timedelta(hours=3, minutes=1)) == 4
    assert topic.resolve_start(START + timedelta(days=9)) == 10
    with pytest.raises(OffsetOutOfRangeError):
        topic.resolve_start(11)


def test_appends_are_refused_with_the_node_whose_disk_is_waited_for(site):
    lose_owner(site)
    topic = site.open("b").read_only_topic(TEXT)
    node = site.catalog().record()[0].node
    assert topic.waits_for == node
    for append in (lambda: topic.append(b"x"), lambda: topic.append_many([b"x"])):
        with pytest.raises(UnavailableError, match=f"disk of node {node}.*offset 10") as refused:
            append()
        assert refused.value.retriable
    assert topic.next_offset == 10


def test_nothing_of_it_is_changed(site):
    topic = an_orphan(site)
    before = (site.ranges(), site.bucket_keys(), site.catalog().record())
    with pytest.raises(UnavailableError, match="read-only"):
        topic.upload()
    assert topic.bucket.retention.trim() == 0
    assert topic.bucket.retention.expire() == 0
    assert topic.bucket.retention.collect_orphans() == []
    topic.check()
    assert (site.ranges(), site.bucket_keys(), site.catalog().record()) == before


# -- who may ----------------------------------------------------------------------------------


def test_only_a_topic_that_waits_for_a_disk_is_opened_so(site):
    log = site.open("b")
    with pytest.raises(NotFoundError):
        log.read_only_topic(TEXT)
    log.topic(TEXT, create=True)
    with pytest.raises(ConflictError, match="does not wait for a disk"):
        log.read_only_topic(TEXT)
    with pytest.raises(ConflictError, match="open on node"):
        site.open("c").read_only_topic(TEXT)
    log.seal(TEXT)
    with pytest.raises(ConflictError, match="does not wait for a disk"):
        log.read_only_topic(TEXT)
    with pytest.raises(InvalidRequestError):
        site.open("d", storage={"mode": "local_only"}).read_only_topic(TEXT)


def test_topic_that_is_whole_in_the_bucket_is_opened_for_writing_instead(site):
    lose_owner(site, ack="tiered")
    log = site.open("b")
    with pytest.raises(ConflictError, match="does not wait for a disk"):
        log.read_only_topic(TEXT)
    assert log.topic(TEXT).append(b"x") == 10


def test_one_node_serves_it_at_a_time(site):
    lose_owner(site)
    first, second = site.open("b"), site.open("c")
    topic = first.read_only_topic(TEXT)
    assert first.read_only_topic(TEXT) is topic
    holder = read_holder(site.metadata, site.catalog().keys.reader)
    assert holder.id == first.stores.membership.node
    with pytest.raises(ConflictError, match=f"node {holder.id} holds the key"):
        second.read_only_topic(TEXT)
    topic.close()
    assert read_holder(site.metadata, site.catalog().keys.reader) is None
    assert payloads(second.read_only_topic(TEXT).read()) == numbered(10)


def test_answer_that_was_lost_does_not_lose_the_key(site):
    lose_owner(site)
    log, lost = site.open("b"), []

    def lose(kind, key):
        if kind == "transact" and not lost:
            lost.append(key)
            raise CommitUnknownError("lost")

    site.metadata.after = lose
    topic = log.read_only_topic(TEXT)
    assert lost
    topic.check()


# -- its end --------------------------------------------------------------------------------


def test_node_that_comes_back_with_its_disk_goes_on(site):
    topic = an_orphan(site)
    reading = Task(lambda: topic.reader("latest").next_batch())
    eventually(lambda: waiting(topic, AckLevel.TIERED) == 1)
    topic.check()
    back = site.open("a").topic(TEXT)
    assert payloads(back.read()) == numbered(15)
    assert not topic.has_stopped
    with pytest.raises(FencedError):
        topic.check()
    assert topic.has_stopped
    with pytest.raises(FencedError):
        reading.result()
    back.upload()
    assert payloads(topic.read()) == numbered(10)


def test_lease_that_ended_ends_it_and_it_is_opened_anew(site):
    lose_owner(site)
    log = site.open("b")
    topic = log.read_only_topic(TEXT)
    fenced = []
    topic.bucket.on_fenced = lambda: fenced.append(True)
    site.clock.advance(TTL_SECONDS + 1)
    with pytest.raises(UnavailableError):
        topic.bucket.check_owner()
    log.stores.membership.renew()
    with pytest.raises(FencedError, match="no longer holds the key"):
        topic.check()
    assert fenced == [True]
    again = log.read_only_topic(TEXT)
    assert again is not topic
    again.check()
    with pytest.raises(ClosedError):
        topic.reader()


def test_take_over_on_the_same_node_ends_it(site):
    lose_owner(site)
    log = site.open("b")
    topic = log.read_only_topic(TEXT)
    taken = log.topic(TEXT, take_over=True)
    assert taken.append(b"new") == 10
    with pytest.raises(ClosedError):
        topic.reader()
    assert read_holder(site.metadata, site.catalog().keys.reader) is None


def test_check_shows_what_was_committed_meanwhile(site):
    topic = an_orphan(site)
    reading = Task(lambda: topic.reader("latest").next_batch())
    eventually(lambda: waiting(topic, AckLevel.TIERED) == 1)
    fence = Fence.take(site.metadata, "/job", id="job", about={}, ttl_seconds=60, clock=site.clock)
    acting = act_outside(site.catalog(), fence, clock=site.clock, metrics=Metrics())
    acting.commit(a_descriptor(10, 12))
    topic.check()
    assert topic.watermarks == Watermarks(trimmed=12, tiered=12, synced=12, written=12, next=12)
    # It was woken, and looks for the object that this test has not made.
    with pytest.raises(NotFoundError):
        reading.result()


def test_closed_log_closes_it(site):
    lose_owner(site)
    log = site.open("b")
    topic = log.read_only_topic(TEXT)
    log.close()
    with pytest.raises(ClosedError):
        topic.reader()
    assert site.open("c").read_only_topic(TEXT).visible == 10


def test_lease_of_the_log_does_not_stop_it(site):
    """The background knows nothing of it: no hold, no upload, no check of its own."""
    lose_owner(site)
    log = site.open("b", background=True)
    topic = log.read_only_topic(TEXT)
    log._background._hold_or_let_go()
    assert topic not in log._background._added
    assert set(topic.wal.gate.holds) == {"read-only"}
    assert payloads(topic.read()) == numbered(10)


# -- subscriptions ----------------------------------------------------------------------------


def a_store(site):
    return SubscriptionStore(site.metadata, root_prefix=PREFIX, clock=site.clock)


def subscribe(site, cursor, *, name="s"):
    incarnation = site.catalog().record()[0].incarnation
    return a_store(site).create(
        NAME,
        name,
        kind=SubscriptionKind.EXCLUSIVE,
        cursor=cursor,
        incarnation=incarnation,
        owned=None,
    )


def cursor_of(site, name="s"):
    found = site.catalog().subscriptions()
    return next(item.progress.offset for item in found if item.name == name)


def dispatch(site, topic, stored, fenced):
    async def never(name, message):
        raise AssertionError(name)

    return Dispatcher(
        topic,
        stored,
        store=a_store(site),
        budget=Budget(1 << 30),
        window=100,
        plan=ProgressPlan(3600.0, 10**9),
        rate=Rate(0),
        grace_seconds=3600.0,
        publish_dead_letter=never,
        signer=LetterSigner("secret"),
        on_fenced=lambda: fenced.append(True),
        metrics=Metrics(),
    )


async def deliver(made, outbox, count):
    """Takes messages and acknowledges them; their payloads."""
    found = []
    while len(found) < count:
        items = await take(outbox, 1)
        for message, _ in await made.next_messages(outbox, items):
            made.written(outbox, 1)
            ack(made, message.offset)
            found.append(message.payload)
    return found


def test_subscription_is_served_and_its_cursor_moves(site):
    topic = an_orphan(site)
    stored, fenced = subscribe(site, 4), []

    async def scenario():
        made = dispatch(site, topic, stored, fenced)
        outbox = made.attach(1, ())
        found = await deliver(made, outbox, 6)
        await made.flush()
        assert cursor_of(site) == 10
        await made.close(None, flush=False)
        return found

    assert run(scenario()) == numbered(10)[4:]
    assert not fenced
    # The owner comes back, and goes on behind that.
    back = site.open("a").topic(TEXT)
    assert (cursor_of(site), back.next_offset) == (10, 15)


def test_cursor_that_is_beyond_the_bucket_stays_there(site):
    topic = an_orphan(site)
    stored, fenced = subscribe(site, 13), []

    async def scenario():
        made = dispatch(site, topic, stored, fenced)
        made.attach(1, ())
        await made.flush()
        await made.close(None, flush=False)

    run(scenario())
    assert cursor_of(site) == 13


def test_cursor_is_not_moved_without_the_key(site):
    lose_owner(site)
    log = site.open("b")
    topic = log.read_only_topic(TEXT)
    subscribe(site, 4)
    site.clock.advance(TTL_SECONDS + 1)
    with pytest.raises(FencedError):
        a_store(site).save_cursor(
            NAME,
            "s",
            cursor=8,
            saved=None,
            incarnation=topic.bucket.owned.record.incarnation,
            owned=topic.bucket.owned,
        )
    assert cursor_of(site) == 4
    assert topic.has_stopped
