"""The mark of an idle topic: when it is set, what it holds up, and what it proves after a crash."""

import asyncio

import pytest

from ister.errors import CapacityError, CommitUnknownError, UnavailableError
from tests.support.machine import Task, eventually, numbered
from tests.support.stores import NAME, TTL_SECONDS, calm, silent

TEXT = str(NAME)


def idle(site, disk="a", *, count=5, **settings):
    """A topic of which the bucket has everything, and its log."""
    log = site.open(disk, **settings)
    topic = log.topic(TEXT, create=True)
    topic.append_many(numbered(count))
    topic.flush()
    topic.upload()
    return log, topic


def acked_end(site):
    record, _ = site.catalog().record()
    return record.acked_end


def held(topic):
    """A thread whose append waits for the mark to go."""
    task = Task(topic.append, b"x")
    eventually(lambda: len(topic.wal.gate.waiting) == 1)
    return task


# -- setting and removing ---------------------------------------------------------------------


def test_mark_is_in_the_record_and_holds_appends_until_it_is_removed(site):
    _, topic = idle(site)
    mark = topic.bucket.uploads.idle_mark
    assert mark.set()
    record, _ = site.catalog().record()
    assert (record.acked_end, record.acked_epoch) == (5, 1)
    assert record.is_whole(5)
    assert not mark.set(), "it is there"
    task = held(topic)
    assert topic.next_offset == 5
    mark.clear()
    assert task.result() == 5
    assert acked_end(site) is None
    mark.clear()
    assert topic.append(b"y") == 6


def test_append_wakes_whoever_removes_the_mark(site):
    _, topic = idle(site)
    mark, woken = topic.bucket.uploads.idle_mark, []
    mark._on_append = lambda: woken.append(topic.wal.gate.holds_lock)
    mark.set()
    assert not woken
    task = held(topic)
    assert woken == [True]
    mark.clear()
    task.result()


@pytest.mark.parametrize("policy", ["block", "refuse"])
def test_append_waits_for_it_whatever_the_policy_is(site, policy):
    _, topic = idle(site, buffer_full=policy)
    mark = topic.bucket.uploads.idle_mark
    mark.set()

    async def append():
        with pytest.raises(CapacityError, match="idle"):
            topic.append(b"on the loop")
        task = asyncio.ensure_future(topic.aio.append(b"awaited"))
        await asyncio.sleep(0)
        assert not task.done()
        await asyncio.to_thread(mark.clear)
        return await task

    assert asyncio.run(append()) == 5


def test_topic_with_a_message_that_is_not_uploaded_gets_no_mark(site):
    _, topic = idle(site)
    topic.append(b"x")
    assert not topic.bucket.uploads.idle_mark.set()
    topic.flush()
    assert not topic.bucket.uploads.idle_mark.set()
    assert acked_end(site) is None
    assert topic.append(b"y") == 6


def test_append_that_comes_just_before_the_hold_prevents_the_mark(site, monkeypatch):
    _, topic = idle(site)
    hold = topic.wal.gate.hold

    def late(name, *more, **options):
        topic.append(b"just before")
        hold(name, *more, **options)

    monkeypatch.setattr(topic.wal.gate, "hold", late)
    assert not topic.bucket.uploads.idle_mark.set()
    assert acked_end(site) is None
    assert topic.append(b"y") == 6


def test_mark_is_due_after_a_while_without_an_append(site):
    _, topic = idle(site)
    mark = topic.bucket.uploads.idle_mark
    assert not mark.is_due(0.0), "it is looked at for the first time"
    assert not mark.is_due(TTL_SECONDS - 1)
    assert mark.is_due(TTL_SECONDS)
    topic.append(b"x")
    assert not mark.is_due(2 * TTL_SECONDS), "there is a backlog"
    topic.upload()
    assert mark.is_due(3 * TTL_SECONDS)
    mark.set()
    assert not mark.is_due(5 * TTL_SECONDS)


def test_empty_topic_is_marked_and_a_tiered_one_needs_no_mark(site):
    log = site.open()
    empty = log.topic("/default/empty", create=True).bucket.uploads.idle_mark
    tiered = log.topic("/default/tiered", create=True, ack="tiered").bucket.uploads.idle_mark
    for now in (0.0, TTL_SECONDS):
        is_due = empty.is_due(now), tiered.is_due(now)
    assert is_due == (True, False)
    assert empty.set()


# -- lost answers -------------------------------------------------------------------------------


@pytest.mark.parametrize("happens", [True, False])
def test_mark_whose_answer_was_lost_counts_as_set(site, happens):
    _, topic = idle(site)
    mark, store = topic.bucket.uploads.idle_mark, site.metadata

    def lose(kind, key):
        if kind == "transact":
            raise CommitUnknownError("lost")

    if happens:
        store.after = lose
    else:
        store.before = lose
    with pytest.raises(UnavailableError):
        mark.set()
    store.before = store.after = calm
    assert mark.is_set
    assert acked_end(site) == (5 if happens else None)
    task = held(topic)
    mark.clear()
    assert task.result() == 5
    assert acked_end(site) is None


def test_mark_that_arrives_late_is_refused(site, monkeypatch):
    _, topic = idle(site)
    mark, store, late = topic.bucket.uploads.idle_mark, site.metadata, []

    def delay(compares, operations):
        late.append((compares, operations))
        raise CommitUnknownError("on its way")

    with monkeypatch.context() as patch:
        patch.setattr(store, "transact", delay)
        with pytest.raises(UnavailableError):
            mark.set()
    mark.clear()
    assert topic.append(b"x") == 5
    assert late
    for compares, operations in late:
        assert store.transact(compares, operations) is None
    assert acked_end(site) is None


def test_appends_stay_held_while_the_mark_cannot_be_removed(site):
    _, topic = idle(site)
    mark = topic.bucket.uploads.idle_mark
    mark.set()
    task = held(topic)
    site.metadata.before = silent
    with pytest.raises(UnavailableError):
        mark.clear()
    assert task.is_running
    site.metadata.before = calm
    mark.clear()
    assert task.result() == 5


# -- crashes ------------------------------------------------------------------------------------


def test_retention_keeps_the_mark(site):
    _, topic = idle(site, storage={"cloud": {"retention": {"time_minutes": 1}}})
    topic.append(b"x")
    topic.upload()
    topic.bucket.uploads.idle_mark.set()
    site.clock.advance(10)
    topic.bucket.owned.expire([next(site.catalog().descriptors())[0]])
    assert acked_end(site) == 6
    assert site.catalog().record()[0].expired_before == 5


# -- in the background --------------------------------------------------------------------------


def sweep(site, log):
    """Lets the tender look at all topics."""
    site.clock.advance(TTL_SECONDS / 4)
    log.stores.membership.renew()
    log._background._sweep_at = 0.0
    log._background._due.set()


def marked(site, log):
    def is_marked():
        sweep(site, log)
        return acked_end(site) is not None

    eventually(is_marked)


@pytest.mark.parametrize("how", ["thread", "loop", "broker"])
def test_background_marks_an_idle_topic_and_the_first_append_removes_the_mark(site, how):
    log, topic = idle(site, background=True)
    sweep(site, log)
    assert not log.stores.marks_idle, "these stores are one node's own"
    log.stores.marks_idle = True
    marked(site, log)
    if how == "thread":
        assert topic.append(b"x") == 5
    else:

        async def append():
            while True:
                try:
                    if how == "loop":
                        return await topic.aio.append(b"x")
                    return topic.append(b"x")
                except CapacityError:
                    await asyncio.sleep(0)

        assert asyncio.run(append()) == 5
    assert acked_end(site) is None
    topic.upload()
    marked(site, log)


def test_mark_that_could_not_be_removed_is_tried_again(site):
    log, topic = idle(site, background=True)
    log.stores.marks_idle = True
    marked(site, log)
    failures = []

    def fail(kind, key):
        if kind == "transact" and len(failures) < 3:
            failures.append(key)
            raise UnavailableError("no answer")

    site.metadata.before = fail
    assert topic.append(b"x") == 5
    assert len(failures) == 3
    assert acked_end(site) is None
