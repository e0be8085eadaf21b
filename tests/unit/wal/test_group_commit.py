"""Who commits, in which batches, and who is told what."""

import errno
import threading
import time

import pytest

from ister.base.limits import (
    CHECKPOINT_INTERVAL_SECONDS,
    LAZY_WRITE_SECONDS,
    SLOW_SYNC_SECONDS,
    SLOW_SYNC_SHOWN_SECONDS,
)
from ister.base.model import AckLevel, TopicState
from ister.errors import ClosedError, DiskError, WaitTimeoutError
from ister.wal.waiters import Waiter
from tests.support.clock import ManualClock
from tests.support.machine import (
    PATIENCE_SECONDS,
    Calls,
    Gate,
    NoThreads,
    Task,
    eventually,
    payloads,
    waiting,
)

SYNCED = AckLevel.SYNCED


def test_lone_waiter_writes_and_syncs_in_its_own_thread(machine):
    topic = machine.topic(scheduler=NoThreads())
    machine.fs.before = calls = Calls()
    topic.wait(topic.append(b"a"))
    assert calls.threads("write", ".log") == calls.threads("sync", ".log")
    assert calls.threads("sync", ".log") == {threading.get_ident()}
    assert calls.count("sync", ".log") == 1


def test_try_commit_is_refused_while_another_thread_commits(machine):
    """Goal: a caller that must not wait gets its commit, or leaves a function to be called."""
    topic = machine.topic(scheduler=NoThreads())
    wal = topic.wal
    machine.fs.before = gate = Gate("sync")
    first = Task(wal.committer.try_commit, topic.append(b"first"), SYNCED)
    gate.wait_reached()
    offset = topic.append(b"second")
    told: list[object] = []
    waiter = Waiter(offset, told.append)
    assert not wal.committer.try_commit(offset, SYNCED)
    assert wal.enlist(waiter, SYNCED)
    gate.open()
    assert first.result() is True
    assert wal.committer.try_commit(offset, SYNCED)
    assert told == [None]
    assert wal.committer.try_commit(offset, SYNCED)
    assert gate.count("sync", ".log") == 2


def test_alarms_do_not_repeat_while_a_commit_runs(machine):
    class Alarms(NoThreads):
        def submit_at(self, log, when) -> None:
            times.append(when)

    times: list[float] = []
    topic = machine.topic(scheduler=Alarms())
    machine.fs.before = gate = Gate("sync")
    first = Task(topic.wal.committer.try_commit, topic.append(b"first"), SYNCED)
    gate.wait_reached()
    topic.append(b"second")
    fired = 0
    while times and fired < 10:
        when = times.pop(0)
        if when < time.monotonic() + 10 * LAZY_WRITE_SECONDS:
            fired += 1
            topic.wal.committer.on_timer(when)
            topic.wal.committer.run()
    gate.open()
    assert first.result() is True
    assert fired <= 2
    # The end of the commit sets the alarm for what came meanwhile.
    assert any(when < time.monotonic() + 10 * LAZY_WRITE_SECONDS for when in times)


def test_those_who_come_during_a_sync_share_the_next_one(machine):
    topic = machine.topic()
    machine.fs.before = gate = Gate("sync")
    first = Task(lambda: topic.wait(topic.append(b"first")))
    gate.wait_reached()
    others = [Task(lambda: topic.wait(topic.append(b"more"))) for _ in range(8)]
    eventually(lambda: waiting(topic, SYNCED) == 8)
    gate.open()
    for task in (first, *others):
        task.result()
    assert topic.watermarks.synced == 9
    assert gate.count("sync", ".log") == 2


SLOW_THREADS = 3
HELD = ("wal.log", "wal.ckpt.tmp")


@pytest.mark.parametrize("ack", ["synced", "written"])
def test_slow_disks_of_some_topics_do_not_hold_up_the_others(machine, ack):
    """Goal: topics whose syncs hang hold one thread each, and the rest acknowledges at once.

    Method: all syncs of as many topics as there are threads, less one, block: those of messages,
    and those of checkpoints, which are due. Their timers fire again and again meanwhile, as appends
    make them do. Other topics have to be acknowledged, and their checkpoints saved, before
    the first of these syncs ends.
    """
    clock = ManualClock()
    log = machine.open(clock=clock, writer_threads=SLOW_THREADS)
    slow = [
        log.topic(f"/default/slow{number}", create=True, ack=ack)
        for number in range(SLOW_THREADS - 1)
    ]
    fast = log.topic("/default/fast", create=True)
    for topic in (*slow, fast):
        topic.wait(topic.append(b"before"), "synced")
    files = tuple(f"{topic.wal.directory.path}/{name}" for topic in slow for name in HELD)
    machine.fs.before = gate = Gate("sync", files)
    try:
        clock.advance(5)
        tasks = [Task(topic.wait, topic.append(b"slow"), "synced", 1e6) for topic in slow]
        for topic in slow:
            eventually(topic.wal.committer.sync_lock.locked)
        for _ in range(2 * SLOW_THREADS):
            for topic in slow:
                topic.append(b"more")
                clock.advance(1)
                topic.wal.committer.on_timer(topic.wal.committer._timer_at)
            fast.wait(fast.append(b"x"), "synced", PATIENCE_SECONDS)
        before = gate.count("sync", "/fast/wal.ckpt.tmp")
        clock.advance(5)
        fast.wait(fast.append(b"x"), "synced", PATIENCE_SECONDS)
        fast.wal.committer.on_timer(fast.wal.committer._timer_at)
        eventually(lambda: gate.count("sync", "/fast/wal.ckpt.tmp") > before)
        assert all(task.is_running for task in tasks)
    finally:
        gate.open()
    for task in tasks:
        task.result()


def test_more_slow_topics_than_threads_do_not_hold_up_the_others(machine):
    """One sync of each is slow; then all hang, begun by waiters without a thread, as a broker's."""
    clock, told = ManualClock(), []
    log = machine.open(clock=clock, writer_threads=2)
    slow = [log.topic(f"/default/slow{number}", create=True) for number in range(5)]
    fast = log.topic("/default/fast", create=True)
    for topic in slow:
        machine.fs.before = gate = Gate("sync", f"{topic.wal.directory.path}/wal.log")
        waiting_call = Task(topic.wait, topic.append(b"slow"))
        gate.wait_reached()
        clock.advance(SLOW_SYNC_SECONDS)
        gate.open()
        waiting_call.result()
    files = tuple(f"{topic.wal.directory.path}/wal.log" for topic in slow)
    machine.fs.before = gate = Gate("sync", files)
    try:
        for topic in slow:
            topic.wal.enlist(Waiter(topic.append(b"more"), told.append), SYNCED)
        gate.wait_reached()
        offset = fast.append(b"x")
        fast.wal.enlist(Waiter(offset, told.append), SYNCED)
        eventually(lambda: fast.watermarks.synced > offset)
        assert len(told) == 1
    finally:
        gate.open()
    eventually(lambda: len(told) == 1 + len(slow))


def test_producer_that_opens_a_file_does_not_sync_those_of_other_topics(machine):
    """Its own file needs the handle of one that has bytes to sync, and a sync that hangs."""
    log = machine.open(max_open_files=1, writer_threads=2, fsync_interval_ms=5000)
    slow = log.topic("/default/slow", create=True, ack="written")
    fast = log.topic("/default/fast", create=True)
    slow.wait(slow.append(b"a"), "written")
    machine.fs.before = gate = Gate("sync", "/slow/wal.log")
    try:
        Task(fast.wait, fast.append(b"x")).result()
        gate.wait_reached()
        assert slow.watermarks.synced == 0
    finally:
        gate.open()
    eventually(lambda: slow.watermarks.synced == 1)


def test_checkpoint_is_due_an_interval_after_the_end_of_the_last_save(machine):
    """Goal: on a slow disk, threads do not queue for the checkpoint of one topic."""
    clock = ManualClock()
    topic = machine.topic(clock=clock, scheduler=NoThreads())
    topic.wait(topic.append(b"a"))
    saver = topic.wal._checkpointer
    machine.fs.before = gate = Gate("sync", "wal.ckpt.tmp")
    saving = Task(saver.save)
    gate.wait_reached()
    topic.wait(topic.append(b"b"))
    clock.advance(60)
    assert saver.due_at() > clock.monotonic()
    saver.save_quietly()  # returns although the other save does not
    assert saving.is_running
    gate.open()
    saving.result()
    assert saver.due_at() == clock.monotonic() + CHECKPOINT_INTERVAL_SECONDS


def test_slow_disk_is_logged_once_with_topic_path_and_seconds(machine, caplog):
    clock = ManualClock()
    log = machine.open(clock=clock)
    topic, guard = log.topic("/default/orders", create=True), log.room.disk
    machine.fs.before = gate = Gate("sync")
    waiting_call = Task(lambda: topic.wait(topic.append(b"a")))
    gate.wait_reached()
    guard.report_slow_syncs()
    assert topic.wal.committer.slow_sync_seconds == 0
    clock.advance(3)
    for _ in range(3):
        guard.report_slow_syncs()
    assert topic.wal.committer.slow_sync_seconds == 3
    gate.open()
    waiting_call.result()
    clock.advance(SLOW_SYNC_SHOWN_SECONDS - 1)
    guard.report_slow_syncs()
    assert topic.wal.committer.slow_sync_seconds == 3
    [told] = [record for record in caplog.records if record.name == "ister.topic.disk"]
    assert (told.levelname, told.topic, told.seconds) == ("WARNING", topic.name, 3.0)
    assert told.path == topic.wal.directory.path
    clock.advance(1)
    with caplog.at_level("INFO"):
        guard.report_slow_syncs()
        guard.report_slow_syncs()
    assert [record.message for record in caplog.records[-2:]][-1] == "disk is fast again"
    assert topic.wal.committer.slow_sync_seconds == 0


class Yields(ManualClock):
    """Lets others append when a thread gives way, as long as there is something to append."""

    def __init__(self):
        super().__init__()
        self.appends = []
        self.count = 0

    def sleep(self, seconds):
        assert seconds == 0
        self.count += 1
        if self.appends:
            self.appends.pop()()


def test_threads_that_were_woken_together_share_the_next_sync(machine):
    clock = Yields()
    topic = machine.topic(scheduler=NoThreads(), clock=clock)
    machine.fs.before = gate = Gate("sync")
    first = Task(topic.wait, topic.append(b"first"))
    gate.wait_reached()
    told = []
    for _ in range(4):
        topic.wal.enlist(Waiter(topic.append(b"more"), told.append), SYNCED)
    gate.open()
    first.result()
    assert topic.wal.committer.try_commit(4, SYNCED)
    assert told == [None] * 4
    assert clock.count == 0
    clock.appends = [lambda: topic.append(b"woken")] * 2
    topic.wait(topic.append(b"one of them"))
    assert topic.watermarks.synced == topic.watermarks.next == 8
    assert clock.count == 3
    assert gate.count("sync", ".log") == 3
    topic.wait(topic.append(b"alone"))
    assert clock.count == 3


def test_waiter_is_not_told_before_its_sync_has_returned(machine):
    topic = machine.topic()
    machine.fs.before = gate = Gate("sync")
    offset = topic.append(b"a")
    waiter = Task(topic.wait, offset)
    gate.wait_reached()
    assert (topic.watermarks.written, topic.watermarks.synced) == (1, 0)
    Task(topic.wait, offset, "written").result()
    assert waiter.is_running
    gate.open()
    waiter.result()
    assert topic.watermarks.synced == 1


@pytest.mark.parametrize("failing", ["write", "sync"])
def test_failed_commit_reaches_every_waiter_and_stops_the_topic(machine, failing):
    topic = machine.topic()
    machine.fs.before = gate = Gate(
        failing,
        fail=lambda kind, path: (
            OSError(errno.EIO, "broken") if (kind, path[-4:]) == (failing, ".log") else None
        ),
    )
    tasks = [Task(topic.wait, topic.append(b"first"))]
    gate.wait_reached()
    tasks += [Task(lambda: topic.wait(topic.append(b"more"))) for _ in range(4)]
    reader = Task(topic.reader(0).next_batch)
    eventually(lambda: waiting(topic, SYNCED) == 5)
    gate.open()
    errors = [task.error() for task in (*tasks, reader)]
    assert all(isinstance(error, DiskError) and error.topic == topic.name for error in errors)
    assert topic.state is TopicState.FAILED
    assert topic.watermarks.synced == 0
    with pytest.raises(ClosedError, match="writer stopped") as refused:
        topic.append(b"late")
    assert isinstance(refused.value.__cause__, DiskError)
    with pytest.raises(DiskError):
        topic.wait(0)


def test_failed_sync_is_never_tried_again(machine):
    topic = machine.topic()
    offset = topic.append(b"a")
    machine.fs.before = calls = Calls(
        fail=lambda kind, path: (
            OSError(errno.EIO, "broken") if kind == "sync" and path.endswith(".log") else None
        )
    )
    lengths = []
    for _ in range(5):
        with pytest.raises(DiskError) as caught:
            topic.wait(offset)
        lengths.append(len(caught.traceback))
    assert lengths[-1] <= lengths[0] + 2, "the traceback does not grow"
    topic.close()
    assert calls.count("sync", ".log") == 1


@pytest.mark.parametrize(
    ("settings", "level"),
    [
        pytest.param({"fsync_interval_ms": 3_600_000}, "written", id="bytes are written soon"),
        pytest.param({"fsync_interval_ms": 20}, "synced", id="and synced after the interval"),
        pytest.param({"fsync_max_batch_bytes": 1}, "synced", id="or at the batch size"),
    ],
)
def test_bytes_that_nobody_waits_for_are_committed_in_the_background(machine, settings, level):
    topic = machine.topic(**settings)
    topic.append(b"a")
    eventually(lambda: getattr(topic.watermarks, level) == 1)


def test_timed_out_waiter_leaves_the_message_accepted(machine):
    topic = machine.topic()
    machine.fs.before = gate = Gate("sync")
    first = Task(topic.wait, topic.append(b"a"))
    gate.wait_reached()
    offset = topic.append(b"b")
    with pytest.raises(WaitTimeoutError) as late:
        topic.wait(offset, timeout=0.02)
    assert (late.value.offset, late.value.topic) == (offset, topic.name)
    assert isinstance(late.value, TimeoutError)
    for _ in range(200):
        with pytest.raises(WaitTimeoutError):
            topic.wait(offset, timeout=0.0001)
    gate.open()
    first.result()
    topic.wait(offset)
    eventually(lambda: waiting(topic, SYNCED) == 0)
    assert payloads(topic.read()) == [b"a", b"b"]


def test_lone_waiter_on_a_slow_disk_times_out(machine):
    topic = machine.topic()
    machine.fs.before = gate = Gate("sync")
    waiter = Task(topic.wait, topic.append(b"a"), timeout=0.05)
    gate.wait_reached()
    try:
        waiter.join(0.5)
        is_running = waiter.is_running
    finally:
        gate.open()
    assert not is_running
    assert isinstance(waiter.error(), WaitTimeoutError)


def test_close_tells_those_who_wait_beyond_the_end(machine):
    topic = machine.topic()
    reader = Task(topic.reader("latest").next_batch)
    eventually(lambda: waiting(topic, SYNCED) == 1)
    topic.close()
    assert isinstance(reader.error(), ClosedError)
    assert topic.state is TopicState.CLOSED
