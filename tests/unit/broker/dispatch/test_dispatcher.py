"""A subscription at work: reading, redelivery, seeks, settings, dead letters, the cursor, the end.

The log is a real one, in memory or on a disk in memory; consumers are outboxes that a test takes
from. What the machine decides has tests of its own; here it is asked for its state after each.
"""

import asyncio
import logging
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from ister.base import failpoints
from ister.broker.dispatch import cursor_writer
from ister.broker.dispatch import dispatcher as module
from ister.broker.dispatch import prefetch as bytes_side
from ister.broker.dispatch.dead_letters import HOPS_MAX
from ister.broker.observe.subscriptions import describe_stored
from ister.errors import (
    ClosedError,
    CorruptDataError,
    MessageTooLargeError,
    UnavailableError,
)
from ister.subscription.policy import PoisonPolicy, SubscriptionKind
from ister.topic.reader import Reader
from tests.support.broker import a_record, broker_tasks, broker_timers, eventually, take
from tests.support.cases import each
from tests.support.dispatch import NAME, QUICK, Place, counted_log, in_memory
from tests.support.dispatch import ack as acknowledge
from tests.support.stores import Site


async def receive(dispatch, outbox, count, *, ack=False):
    """The next messages as a stream gets them: (offset, attempt, payload)."""
    received = []
    while len(received) < count:
        for offset, attempt in await take(outbox, 1):
            message = await asyncio.wait_for(dispatch.next_message(outbox, offset), 60)
            if message is not None:  # it was acknowledged or taken back meanwhile
                received.append((offset, attempt, message.payload.rstrip(b".")))
            dispatch.written(outbox, 1)
            dispatch.delivery.validate_state()
    if ack:
        for offset, _, _ in received:
            acknowledge(dispatch, offset)
    return received


def ack_many(dispatch, offsets, consumer=1):
    """As a consumer that has received them."""
    tokens = [dispatch.receipts.token(consumer, offset) for offset in offsets]
    return dispatch.ack_many(offsets, tokens, consumer)


def offsets(received):
    return [item[0] for item in received]


async def silence(outbox, seconds=0.1):
    """Nothing comes for a while."""
    taking = asyncio.ensure_future(outbox.take(1))
    done, _ = await asyncio.wait({taking}, timeout=seconds)
    if done:
        raise AssertionError(f"came: {taking.result()}")
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)


# -- reading ----------------------------------------------------------------------------------


async def test_without_consumers_nothing_is_read_and_the_lag_grows():
    async with in_memory() as rig:
        dispatch = rig.open()
        rig.fill(10)
        assert dispatch.prefetcher.task is None
        assert dispatch.lag == 10
        assert rig.topic.readers == []


async def test_what_is_held_is_bounded_and_the_rest_is_read_again(monkeypatch):
    monkeypatch.setattr(bytes_side, "_HELD_BYTES_MAX", 20_000)

    async with counted_log() as rig:
        dispatch, outbox = rig.serve(200, size=1000, window=1000)
        await eventually(lambda: not dispatch.prefetcher.wanted.is_set())
        assert 20_000 <= dispatch.prefetcher.held_bytes < 31_000
        assert 12 <= len(dispatch.prefetcher.held) <= 20
        got = []
        while len(got) < 200:
            got += await receive(dispatch, outbox, 10, ack=True)
            assert dispatch.prefetcher.held_bytes < 31_000
        assert got == [(n, 1, b"%d" % n) for n in range(200)]
        assert dispatch.prefetcher.held_bytes == 0


async def test_acks_of_what_was_not_sent_again_do_not_stop_reading(monkeypatch):
    """A client acknowledges what it got before the broker's restart, and reading goes on."""
    monkeypatch.setattr(bytes_side, "_HELD_BYTES_MAX", 20_000)

    async with counted_log() as rig:
        dispatch, outbox = rig.serve(400, size=1000, window=1000)
        await eventually(lambda: not dispatch.prefetcher.wanted.is_set())
        for offset in range(350):
            acknowledge(dispatch, offset)
        assert dispatch.prefetcher.held_bytes < 20_000
        seen = set()
        while 399 not in seen:
            for offset, _, _ in await receive(dispatch, outbox, 1, ack=True):
                seen.add(offset)
        assert seen >= set(range(350, 400))
        assert dispatch.delivery.cursor == 400


async def test_keys_that_nobody_takes_do_not_use_up_the_held_bytes(monkeypatch):
    monkeypatch.setattr(bytes_side, "_HELD_BYTES_MAX", 20_000)

    async with in_memory() as rig:
        rig.fill(100, size=1000, routing_key="other")
        rig.topic.append(b"mine", routing_key="mine")
        dispatch = rig.open("key_shared")
        outbox = dispatch.attach(1, ["mine"])
        assert await receive(dispatch, outbox, 1, ack=True) == [(100, 1, b"mine")]
        assert dispatch.delivery.cursor == 101
        assert dispatch.prefetcher.held_bytes == 0


async def test_a_rate_delays_and_drops_nothing():
    async with in_memory() as rig:
        dispatch, outbox = rig.serve(60, rate=100)
        loop = asyncio.get_running_loop()
        start = loop.time()
        got = await receive(dispatch, outbox, 60, ack=True)
        took = loop.time() - start
        assert offsets(got) == list(range(60))
        assert took > 0.3, "sixty messages at a hundred a second came at once"
        # Another rate is in force at once.
        dispatch.rate.per_second = 0
        rig.fill(200)
        while dispatch.delivery.cursor < 260:
            await receive(dispatch, outbox, 50, ack=True)


# -- seek -------------------------------------------------------------------------------------


async def test_acks_that_come_during_a_seek_do_not_undo_it():
    """The store is slow: what is acknowledged meanwhile counts for nothing."""

    async with in_memory() as rig:
        dispatch, outbox = rig.serve(50, delta=1)
        got = await receive(dispatch, outbox, 50)
        loop = asyncio.get_running_loop()
        reached, go_on = asyncio.Event(), module.asyncio.Event()

        def hold():
            loop.call_soon_threadsafe(reached.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(60)

        rig.store.before_cursor = hold
        seeking = asyncio.create_task(dispatch.seek(5))
        await reached.wait()
        for offset, _, _ in got:
            acknowledge(dispatch, offset)
        assert dispatch.delivery.cursor == 50
        rig.store.before_cursor = lambda: None
        go_on.set()
        await asyncio.wait_for(seeking, 60)
        assert dispatch.delivery.cursor == 5
        assert offsets(await receive(dispatch, outbox, 45, ack=True)) == list(range(5, 50))
        await eventually(lambda: rig.kept == 50)


@each("leaves", [False, True])
async def test_seek_during_a_read_begins_at_its_offset(monkeypatch, leaves):
    """Goal: what a read finds that began before a seek is not taken for what lies behind it.

    Method: the read is held in its thread until the seek is done. Its messages begin later, so that
    those between look like ones that compaction has left out.
    """
    started, go_on = threading.Event(), threading.Event()
    poll = Reader.poll

    def held(self, *arguments):
        found = poll(self, *arguments)
        if not started.is_set():
            started.set()
            go_on.wait(60)
        return found

    monkeypatch.setattr(Reader, "poll", held)

    try:
        async with counted_log() as rig:
            dispatch, outbox = rig.serve(60, cursor=40)
            assert await asyncio.to_thread(started.wait, 20)
            if leaves:
                dispatch.detach(outbox)
            await dispatch.seek(5)
            go_on.set()
            if leaves:
                outbox = dispatch.attach(1, ())
            assert offsets(await receive(dispatch, outbox, 55, ack=True)) == list(range(5, 60))
    finally:
        go_on.set()


async def test_seeks_at_any_moment_lose_nothing_behind_them():
    async with counted_log() as rig:
        dispatch, outbox = rig.serve(500, size=200, window=50, delta=10)
        for target in (400, 0, 499, 250, 250, 3):
            await asyncio.sleep(0.002)
            await dispatch.seek(target)
            dispatch.delivery.validate_state()
        seen = set()
        while dispatch.delivery.cursor < 500:
            for offset, _, payload in await receive(dispatch, outbox, 1, ack=True):
                assert payload == b"%d" % offset
                seen.add(offset)
        assert seen >= set(range(3, 500))


async def test_a_seek_that_cannot_be_written_down_changes_nothing():
    async with in_memory() as rig:
        dispatch, outbox = rig.serve(10)
        await receive(dispatch, outbox, 10, ack=True)
        rig.store.error = UnavailableError("gone")
        with pytest.raises(UnavailableError):
            await dispatch.seek(0)
        assert dispatch.delivery.cursor == 10
        await silence(outbox)
        rig.store.error = None


# -- settings ---------------------------------------------------------------------------------


async def test_another_policy_is_in_force_at_once_and_kept():
    async with in_memory() as rig:
        policy = replace(QUICK, max_redelivery_count=0)
        dispatch, outbox = rig.serve(3, policy=policy)
        await receive(dispatch, outbox, 3)
        dispatch.nack(0, delay_ms=None, reason=None)
        assert dispatch.delivery.stats().blocked == 0
        drop = replace(policy, poison=PoisonPolicy.DROP)
        await dispatch.set_policy(drop)
        assert dispatch.delivery.stats().blocked is None
        assert dispatch.delivery.cursor == 1
        assert rig.counted("dropped_total") == 1
        assert rig.store.load(rig.parsed, "")["s"].policy == drop


# -- failures ---------------------------------------------------------------------------------


def letter_policy(target="/default/dead"):
    return replace(
        QUICK, max_redelivery_count=0, poison=PoisonPolicy.DEAD_LETTER, dead_letter_topic=target
    )


@pytest.mark.parametrize(
    "error", [UnavailableError("elsewhere"), ValueError("unforeseen")], ids=["expected", "not"]
)
async def test_a_dead_letter_that_cannot_be_published_is_tried_again(monkeypatch, caplog, error):
    monkeypatch.setattr(module, "_DEAD_LETTER_RETRY_MS", 30)

    with caplog.at_level(logging.WARNING):
        async with in_memory() as rig:
            rig.fill(2)
            rig.letter_error = error
            dispatch = rig.open(policy=letter_policy())
            outbox = dispatch.attach(1, ())
            await receive(dispatch, outbox, 2)
            dispatch.nack(0, delay_ms=None, reason=None)
            await eventually(lambda: caplog.text.count("dead-letter publish failed") >= 3)
            assert dispatch.delivery.cursor == 0
            assert rig.letters == []
            # Others go on.
            rig.fill(1)
            assert offsets(await receive(dispatch, outbox, 1)) == [2]
            rig.letter_error = None
            await eventually(lambda: dispatch.delivery.cursor == 1)
            assert len(rig.letters) == 1


@each("is_large", [False, True])
async def test_dead_letter_topics_that_lead_back_do_not_loop_for_ever(is_large):
    """Goal: a message stops after some hops, and says where it came from first."""

    async with in_memory() as rig:
        rig.fill(3)
        # What it says of itself is not believed: no broker has written it.
        forged = {"x-dead-letter-hops": str(HOPS_MAX), "x-original-topic": "/other/topic"}
        rig.topic.appender.append_record(
            a_record(b"bad", topic=NAME, attributes={"own": "yes", **forged})
        )
        dispatch = rig.open(policy=letter_policy(NAME))

        async def publish(name, letter):
            if is_large and "own" in letter.attributes:
                raise MessageTooLargeError("no room for its attributes")
            rig.topic.appender.append_record(letter)

        dispatch._publish_dead_letter = publish
        outbox = dispatch.attach(1, ())
        await receive(dispatch, outbox, 3, ack=True)
        for hop in range(HOPS_MAX + 1):
            [(offset, _, payload)] = await receive(dispatch, outbox, 1)
            assert (offset, payload) == (3 + hop, b"bad")
            dispatch.nack(offset, delay_ms=None, reason=f"hop {hop}")
        await eventually(lambda: dispatch.delivery.cursor == rig.topic.wal.next)
        assert rig.topic.wal.next == 3 + 1 + HOPS_MAX
        assert rig.counted("dead_letters_total") == HOPS_MAX
        assert rig.counted("dropped_total") == 1
        *_, last = rig.topic.read(start=0, end=rig.topic.wal.next)
        assert last.attributes["x-original-topic-offset"] == "3"
        assert last.attributes["x-original-topic"] == NAME
        assert last.attributes["x-dead-letter-hops"] == str(HOPS_MAX)
        assert last.attributes["x-failure-reason"] == f"hop {HOPS_MAX - 1}"
        assert ("own" in last.attributes) == (not is_large)
        await silence(outbox)


async def test_a_dead_letter_under_way_does_not_hold_up_the_end(monkeypatch):
    async with in_memory() as rig:
        rig.fill(1)
        dispatch = rig.open(policy=letter_policy())
        publishing = asyncio.Event()

        async def hang(name, message):
            publishing.set()
            await asyncio.sleep(600)

        dispatch._publish_dead_letter = hang
        outbox = dispatch.attach(1, ())
        await receive(dispatch, outbox, 1)
        dispatch.nack(0, delay_ms=None, reason=None)
        await publishing.wait()
        await asyncio.wait_for(dispatch.close(None), 60)
        # It was not resolved, so it comes again with its failures.
        assert rig.kept == 0
        assert rig.store.load(rig.parsed, "")["s"].saved["failed"] == [[0, 1, None]]


# -- retention and damage ---------------------------------------------------------------------


@asynccontextmanager
async def in_a_bucket():
    """A topic of four uploaded parts of 30 messages, of which all but the last may expire."""
    storage = {"cloud": {"retention": {"time_minutes": 1}}, "uploader": {"engine": "none"}}
    with Site() as site:
        log = site.open(
            storage=storage, rotate_max_bytes=4096, retention={"time_minutes": 0}, cache_capacity=1
        )
        rig = Place(log.topic(NAME, create=True))
        for _ in range(4):
            rig.fill(30, size=500)
            rig.topic.upload()
            site.clock.advance(600)
            log.stores.membership.renew()

        def expire():
            assert rig.topic.bucket.retention.trim() > 0
            assert rig.topic.bucket.retention.expire() > 0
            assert rig.topic.earliest == 90
            assert not rig.topic.bucket.owned.is_fenced

        rig.expire = expire
        try:
            yield rig
        finally:
            await rig.close()


async def test_messages_that_retention_took_unread_are_counted_and_the_rest_comes(caplog):
    async with in_a_bucket() as rig:
        dispatch = rig.open()
        assert dispatch.lag == 120
        rig.expire()
        assert dispatch.delivery.cursor == 0
        assert dispatch.lag == 30  # what is gone does not count
        assert describe_stored(dispatch.stored, 90, 120).lag == 30
        outbox = dispatch.attach(1, ())
        got = await receive(dispatch, outbox, 30, ack=True)
        assert got == [(n, 1, b"%d" % n) for n in range(90, 120)]
        assert dispatch.lag == 0
        assert dispatch.delivery.cursor == 120
        assert rig.counted("messages_passed_over_total") == 90
        [record] = [r for r in caplog.records if "had not received" in r.message]
        assert (record.levelname, record.start, record.end) == ("ERROR", 0, 90)
        assert record.subscription == "s"


async def test_messages_that_retention_takes_under_a_consumer_are_passed_over(monkeypatch):
    """Some of them are in flight, some read ahead; what is held of them is let go of."""
    monkeypatch.setattr(bytes_side, "_HELD_BYTES_MAX", 10_000)

    async with in_a_bucket() as rig:
        dispatch = rig.open(window=20)
        outbox = dispatch.attach(1, ())
        assert offsets(await receive(dispatch, outbox, 5)) == list(range(5))
        rig.expire()
        seen = set()
        while 119 not in seen:
            for offset, attempt in await take(outbox, 1):
                await dispatch.next_message(outbox, offset)
                dispatch.written(outbox, 1)
                acknowledge(dispatch, offset)
                seen.add(offset)
                assert attempt == 1
        assert seen >= set(range(90, 120))
        await eventually(lambda: dispatch.delivery.cursor == 120)
        assert (dispatch.prefetcher.held_bytes, dispatch.prefetcher.held) == (0, {})


async def test_a_redelivery_that_retention_took_does_not_hold_up_the_subscription(
    caplog, monkeypatch
):
    monkeypatch.setattr(bytes_side, "_KEPT_BYTES_MAX", 0)

    async with in_a_bucket() as rig:
        dispatch = rig.open(window=100, policy=replace(QUICK, ack_timeout_ms=3_600_000))
        outbox = dispatch.attach(1, ())
        await receive(dispatch, outbox, 100)
        for offset in range(1, 100):
            acknowledge(dispatch, offset)
        rig.expire()
        dispatch.nack(0, delay_ms=None, reason=None)
        [(offset, attempt)] = [s for s in await take(outbox, 21) if s[1] == 2]
        assert (offset, attempt) == (0, 2)
        assert await dispatch.prefetcher.message(0) is None
        assert dispatch.delivery.cursor == 100
        assert "deleted by retention" in caplog.text


async def test_a_damaged_message_is_not_passed_over(monkeypatch, caplog):
    """It comes once the file is repaired; until then the subscription says why it stands still."""
    monkeypatch.setattr(bytes_side, "_DAMAGE_RETRY_SECONDS", 0.05)

    with caplog.at_level(logging.ERROR):
        async with counted_log() as rig:
            rig.fill(30, size=300)
            machine = rig.machine
            [path] = [
                f"/data{NAME}/{name}"
                for name in machine.fs.list_directory(f"/data{NAME}")
                if name.endswith(".log")
            ]
            at = machine.frame_starts(path)[20] + 60
            good = machine.read(path)[at : at + 1]
            machine.overwrite(path, at, bytes([good[0] ^ 1]))
            dispatch = rig.open()
            outbox = dispatch.attach(1, ())
            got = await receive(dispatch, outbox, 20, ack=True)
            assert offsets(got) == list(range(20))
            await eventually(lambda: caplog.text.count("cannot read the topic") >= 2)
            await silence(outbox)
            assert dispatch.delivery.cursor == 20
            machine.overwrite(path, at, good)
            assert offsets(await receive(dispatch, outbox, 10, ack=True)) == list(range(20, 30))


async def test_a_body_that_is_no_message_counts_as_failed():
    async with in_memory() as rig:
        dispatch, outbox = rig.serve(1)
        await take(outbox, 1)

        class Broken:
            offset = 0

            @property
            def record(self):
                raise CorruptDataError("not a message")

        assert dispatch.readable(Broken()) is None
        assert await take(outbox, 1) == [(0, 2)]
        assert dispatch.readable(await dispatch.prefetcher.message(0)).payload == b"0"


# -- the cursor -------------------------------------------------------------------------------


async def test_a_cursor_is_written_when_it_has_moved_far():
    async with in_memory() as rig:
        dispatch, outbox = rig.serve(30, delta=10)
        await receive(dispatch, outbox, 30)
        for offset in range(10):
            assert not dispatch._cursor._tasks
            acknowledge(dispatch, offset)
        await eventually(lambda: rig.store.written == [10])
        assert rig.kept == 10


async def test_a_cursor_is_written_some_time_after_it_moved():
    async with in_memory() as rig:
        dispatch, outbox = rig.serve(3, interval=0.1)
        await receive(dispatch, outbox, 3)
        assert rig.store.written == []
        acknowledge(dispatch, 0)
        await eventually(lambda: rig.store.written == [1])
        # What lies above the cursor is written as well.
        acknowledge(dispatch, 2)
        await eventually(lambda: len(rig.store.written) == 2)
        assert rig.store.load(rig.parsed, "")["s"].saved["acked"] == [[2, 3]]
        assert not dispatch.is_dirty


@each("flush, error, kept", [(True, None, 3), (False, None, 0), (True, UnavailableError(""), 0)])
async def test_a_cursor_is_written_at_the_end_if_it_can_be(flush, error, kept):
    async with in_memory() as rig:
        dispatch, outbox = rig.serve(3)
        await receive(dispatch, outbox, 3, ack=True)
        rig.store.error = error
        for _ in range(2):
            await dispatch.close(None, flush=flush)
        assert rig.kept == kept
        assert len(rig.store.written) == (kept > 0)


async def test_a_cursor_that_could_not_be_written_is_written_later(monkeypatch, caplog):
    monkeypatch.setattr(cursor_writer, "_RETRY_SECONDS", 0.05)

    with caplog.at_level(logging.WARNING):
        async with in_memory() as rig:
            rig.fill(5)
            rig.store.error = UnavailableError("gone")
            dispatch = rig.open(delta=1)
            outbox = dispatch.attach(1, ())
            await receive(dispatch, outbox, 3, ack=True)
            await eventually(lambda: caplog.text.count("cursor not written") >= 3)
            # Consumers notice nothing.
            await receive(dispatch, outbox, 2, ack=True)
            rig.store.error = None
            await eventually(lambda: rig.kept == 5)
            # Not one try per acknowledgement.
            assert caplog.text.count("cursor not written") < 200


async def test_what_is_acknowledged_while_a_cursor_is_written_is_written_next():
    async with in_memory() as rig:
        dispatch, outbox = rig.serve(20, delta=5)
        await receive(dispatch, outbox, 20)
        first = []

        def meanwhile():
            if not first:
                first.append(True)
                # On the loop, between reading the cursor and writing it.
                for offset in range(5, 20):
                    acknowledge(dispatch, offset)

        failpoints.arm("broker.before_cursor", meanwhile)
        for offset in range(5):
            acknowledge(dispatch, offset)
        await eventually(lambda: rig.kept == 20)
        assert rig.store.written[0] == 5


async def test_a_cursor_beyond_the_end_begins_at_the_end():
    """Only a damaged log has one, which takes no messages: see `Topics._open_blocking`."""

    async with in_memory() as rig:
        rig.fill(5)
        rig.store.create(
            rig.parsed, "s", kind=SubscriptionKind.EXCLUSIVE, cursor=100, incarnation="", owned=None
        )
        assert rig.open().delivery.cursor == 5


# -- consumers --------------------------------------------------------------------------------


@each("kind", ["exclusive", "shared", "failover", "key_shared"])
async def test_a_hundred_attaches_leave_nothing_behind(kind, monkeypatch):
    monkeypatch.setattr(bytes_side, "_IDLE_SECONDS", 0.2)

    async with counted_log() as rig:
        rig.fill(50, size=100)
        dispatch = rig.open(kind, policy=replace(QUICK, max_redelivery_count=10**6))
        acked = set()
        for turn in range(100):
            outbox = dispatch.attach(turn, ())
            if turn % 3 == 0:
                await asyncio.sleep(0)
            elif turn % 3 == 1:
                for offset, _, _ in await receive(dispatch, outbox, 1):
                    if turn % 2:
                        acknowledge(dispatch, offset)
                        acked.add(offset)
                    else:
                        dispatch.nack(offset, delay_ms=None, reason=None)
            else:
                reading = asyncio.create_task(dispatch.prefetcher.message(turn % 50))
                await asyncio.sleep(0)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            dispatch.detach(outbox)
            dispatch.delivery.validate_state()
        # The one for redeliveries may stay.
        await eventually(lambda: len(rig.topic.readers) <= 1)
        await eventually(lambda: broker_tasks() == [])
        await eventually(lambda: dispatch.prefetcher.held_bytes == 0)
        assert acked
        last = dispatch.attach(1000, ())
        got = []
        while len(got) < 50 - len(acked):
            got += await receive(dispatch, last, 1, ack=True)
        assert sorted(offsets(got)) == sorted(set(range(50)) - acked)
        assert dispatch.delivery.cursor == 50
        dispatch.detach(last)
        await dispatch.close(None)
        await eventually(lambda: rig.topic.readers == [])


async def test_a_consumer_with_filters_is_waited_for_from_its_last_stream_on():
    async with in_memory() as rig:
        dispatch = rig.open("key_shared", grace=1000.0)
        other = dispatch.attach(2, ["us"])
        for _ in range(3):
            dispatch.detach(dispatch.attach(1, ["eu"]))
            last = asyncio.get_running_loop().time()
            await asyncio.sleep(0.02)
        # Not from the first one on: only the last one's end counts.
        [timer] = [one for one in broker_timers() if one._callback == dispatch._forget]
        assert timer.when() >= last + 999.99
        rig.topic.append(b"kept", routing_key="eu")
        rig.topic.append(b"x", routing_key="us")
        assert offsets(await receive(dispatch, other, 1, ack=True)) == [1]
        assert dispatch.delivery.cursor == 0
        mine = dispatch.attach(1, ["eu"])
        assert await receive(dispatch, mine, 1, ack=True) == [(0, 1, b"kept")]


# -- the end ----------------------------------------------------------------------------------


@each("reason", [None, UnavailableError("moved")])
async def test_the_end_reaches_every_stream(reason):
    async with in_memory() as rig:
        rig.fill(10)
        dispatch = rig.open("shared")
        outboxes = [dispatch.attach(number, ()) for number in (1, 2)]
        await eventually(lambda: all(outbox._items for outbox in outboxes))
        await dispatch.close(reason)
        for outbox in outboxes:
            if reason is None:
                assert await outbox.take() == []
            else:
                with pytest.raises(UnavailableError, match="moved"):
                    await outbox.take()
            dispatch.detach(outbox)
        with pytest.raises(ClosedError):
            dispatch.attach(3, ())
        # Its cursor was written for the last time: what is said now would be forgotten.
        for call in (
            lambda: acknowledge(dispatch, 0),
            lambda: ack_many(dispatch, [0]),
            lambda: dispatch.nack(0, delay_ms=None, reason=None),
        ):
            with pytest.raises(UnavailableError):
                call()
        await eventually(lambda: rig.topic.readers == [])


async def test_a_topic_that_is_closed_under_a_subscription_ends_its_streams():
    async with in_memory() as rig:
        dispatch = rig.open()
        outbox = dispatch.attach(1, ())
        await silence(outbox, 0.02)
        rig.topic.close()
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(outbox.take(), 60)


async def test_an_unforeseen_error_ends_the_streams_and_is_in_the_log(monkeypatch, caplog):
    async with in_memory() as rig:
        rig.fill(1)
        dispatch = rig.open()

        def fail(messages):
            raise RuntimeError("a bug")

        monkeypatch.setattr(dispatch.prefetcher, "_offer", fail)
        outbox = dispatch.attach(1, ())
        with pytest.raises(UnavailableError, match="stopped"):
            await asyncio.wait_for(outbox.take(), 60)
        assert "a bug" in caplog.text


async def test_a_timer_that_is_late_may_be_a_plain_handle(monkeypatch):
    """As uvloop's are for a time that has passed: they do not know theirs."""

    async with in_memory() as rig:
        dispatch = rig.open()
        delivery, loop = dispatch.delivery, asyncio.get_running_loop()
        with monkeypatch.context() as patched:
            patched.setattr(loop, "call_at", lambda when, call: loop.call_soon(call))
            patched.setattr(delivery, "tick", lambda now: None)
            delivery._timers.due_at = loop.time() - 1
            dispatch._pump()
            delivery._timers.due_at -= 1
            dispatch._pump()
        await eventually(lambda: delivery.due_at == float("inf"))
