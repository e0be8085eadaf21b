"""What several things at once, or one after the other, once got wrong."""

from __future__ import annotations

import errno
import threading

import pytest

from ister.base.limits import ENVELOPE_SIZE_BYTES_MAX, FRAME_BODY_BYTES_MAX, MESSAGE_SIZE_BYTES_MAX
from ister.base.model import AckLevel, Codec, TopicState
from ister.errors import CapacityError, ClosedError, DiskError
from ister.format.message import BodyEncoder
from ister.wal.directory import WalDirectory
from ister.wal.waiters import ThreadWaiter
from ister.wal.writer import SyncFailedError
from tests.support.clock import ManualClock
from tests.support.machine import NAME, ROOT, Calls, Gate, NoThreads, Task, eventually, payloads

PATH = f"{ROOT}{NAME}"


def _saved(machine):
    return WalDirectory(machine.fs, PATH).load_state()


def _broken(*kinds, number=errno.EIO):
    return lambda seen, path: (
        OSError(number, "broken") if seen in kinds and path.endswith(".log") else None
    )


def _fail(kind, number=errno.EIO):
    return Calls(fail=_broken(kind, number=number))


def _run(topic):
    topic.wal.committer.run()
    topic.wal.committer.run_upkeep()


def test_checkpoint_is_saved_although_a_producer_commits_all_the_time(machine):
    """A producer that appends and waits in a loop holds the commit lock almost always."""
    clock = ManualClock()
    topic = machine.topic(clock=clock, scheduler=NoThreads())
    topic.wait(topic.append(b"a"))
    clock.advance(5)
    with topic.wal.committer.commit_lock:
        _run(topic)
    assert _saved(machine).synced == 1


def test_failed_sync_stays_noted_when_a_checkpoint_was_due(machine):
    clock = ManualClock()
    topic = machine.topic(clock=clock, scheduler=NoThreads())
    topic.wait(topic.append(b"a"))
    topic.append(b"b")
    clock.advance(60)
    _run(topic)
    clock.advance(60)
    machine.fs.before = _fail("sync")
    _run(topic)
    assert topic.state is TopicState.FAILED
    machine.fs.before = Calls()
    clock.advance(60)
    _run(topic)
    topic.wal.save_checkpoint()
    assert _saved(machine).is_poisoned


def test_failed_sync_is_noted_after_a_failed_write_too(machine):
    """Goal: the ordinary way in which a disk dies is not taken for less than it is.

    Method: a sync that nobody waits for is under way; a write fails meanwhile, and its waiter is
    told at once; then the sync fails.
    """
    topic = machine.topic(scheduler=NoThreads())
    wal = topic.wal
    topic.wait(topic.append(b"a"))
    topic.wait(topic.append(b"b"), "written")
    wal.committer._lazy_sync = (wal.written, wal.writer.position, wal.writer.seq)
    machine.fs.before = gate = Gate("sync", fail=_broken("write", "sync"))
    upkeep = Task(wal.committer.run_upkeep)
    gate.wait_reached()
    with pytest.raises(DiskError):
        topic.wait(topic.append(b"c"), "written")
    assert topic.state is TopicState.FAILED
    assert not wal.has_failed_sync
    gate.open()
    upkeep.result()
    assert wal.has_failed_sync
    assert isinstance(wal.failure, SyncFailedError)
    assert _saved(machine).is_poisoned
    assert not wal.committer.has_open_file


def test_waiter_that_enlists_as_the_watermark_moves_is_told(machine):
    """`written` is set without the lock: a waiter added right after the look has to see it."""
    topic = machine.topic(scheduler=NoThreads())
    offset = topic.append(b"a")
    waiter = ThreadWaiter(offset)
    waiters = topic.wal.levels.waiters[AckLevel.WRITTEN]
    real_add = type(waiters).add

    class Racing(type(waiters)):
        __slots__ = ()

        def add(self, waiter):
            topic.wal.levels.written = offset + 1
            real_add(self, waiter)

    topic.wal.levels.waiters[AckLevel.WRITTEN] = Racing()
    assert topic.wal.enlist(waiter, AckLevel.WRITTEN) is False
    assert waiter.is_done
    topic.wal.levels.written = offset


def test_error_that_nobody_was_told_of_is_raised_by_close(machine):
    log = machine.open()
    topic = log.topic(NAME, create=True, ack="memory")
    topic.wait(topic.append(b"stored"), "synced")
    machine.fs.before = _fail("write")
    topic.append(b"lost")
    eventually(lambda: topic.state is TopicState.FAILED)
    with pytest.raises(DiskError):
        log.close()
    log.close()


def test_error_that_a_waiter_was_told_of_is_not_raised_again_by_close(machine):
    log = machine.open()
    topic = log.topic(NAME, create=True)
    machine.fs.before = _fail("sync")
    with pytest.raises(DiskError):
        topic.wait(topic.append(b"lost"))
    log.close()


def test_full_disk_does_not_keep_written_messages_from_becoming_durable(machine):
    topic = machine.topic(scheduler=NoThreads())
    first = topic.append(b"a")
    topic.wait(first, "written")
    machine.fs.write_limit_bytes = 0
    topic.append(b"b")
    topic.wait(first, "synced")
    with pytest.raises(CapacityError):
        topic.wait(first + 1, "synced")
    assert topic.watermarks.synced == 1


def test_trim_that_could_not_be_recorded_can_be_repeated(machine):
    topic = machine.topic(rotate_max_bytes=4096)
    for _ in range(40):
        topic.wait(topic.append(bytes(500)))
    files = topic.wal.files
    machine.fs.before = Calls(
        fail=lambda kind, path: OSError(errno.ENOSPC, "full") if "ckpt" in path else None
    )
    with pytest.raises(CapacityError):
        topic.wal.trim(30)
    assert topic.wal.files == files
    machine.fs.before = Calls()
    assert topic.wal.trim(30) > 0
    assert topic.earliest > 0


@pytest.mark.parametrize("state", [TopicState.CLOSED, TopicState.FAILED])
def test_log_that_has_ended_is_not_trimmed(machine, state):
    topic = machine.topic(rotate_max_bytes=4096)
    for _ in range(40):
        topic.wait(topic.append(bytes(500)))
    if state is TopicState.FAILED:
        machine.fs.before = _fail("sync")
        with pytest.raises(DiskError):
            topic.wait(topic.append(b"x"))
        machine.fs.before = Calls()
    else:
        topic.close()
    names = machine.fs.list_directory(PATH)
    with pytest.raises(ClosedError):
        topic.wal.trim(30)
    assert machine.fs.list_directory(PATH) == names


def test_log_is_not_given_back_while_a_topic_is_being_recovered(machine):
    """A recovery under way still writes; `close` waits for its end."""
    topic = machine.topic()
    topic.wait(topic.append(b"a"))
    machine.kill()
    path = f"{PATH}/wal.log"
    machine.overwrite(path, len(machine.read(path)), b"torn")
    log = machine.open()
    machine.fs.before = gate = Gate("truncate")
    opening = Task(log.topic, NAME)
    gate.wait_reached()
    closing = Task(log.close)
    closing.join(0.2)
    assert closing.is_running
    gate.open()
    opening.join(60)
    closing.result()
    assert payloads(machine.reopened().read()) == [b"a"]


def test_two_threads_may_close_a_topic_at_once(machine):
    topic = machine.topic()
    topic.append(b"a")
    barrier = threading.Barrier(2)

    def close():
        barrier.wait()
        topic.close()

    tasks = [Task(close) for _ in range(2)]
    for task in tasks:
        task.result()
    assert topic.state is TopicState.CLOSED


def test_largest_message_there_can_be_is_within_the_limit_of_a_frame():
    """Names are bounded, so what surrounds payload and envelope is too."""
    name = f"/{'n' * 120}/{'t' * 120}"
    for codec in Codec:
        encoder = BodyEncoder(codec)
        around = len(encoder.body(encoder.head(0, 0, name, ""), 2**63, b"", 2**63, b""))
        assert around + MESSAGE_SIZE_BYTES_MAX + ENVELOPE_SIZE_BYTES_MAX <= FRAME_BODY_BYTES_MAX


def test_checkpoint_names_no_file_whose_first_frame_is_not_durable(machine):
    """After a crash such a file may begin elsewhere, and the name would be held against it."""
    topic = machine.topic(ack="written", rotate_max_bytes=4096, scheduler=NoThreads())
    while len(topic.wal.files) < 2 or topic.wal.files[-1].first_offset < topic.wal.synced:
        topic.wait(topic.append(bytes(900)), "written")
    topic.wal._checkpointer.update(topic.wal.synced)
    topic.wal.save_checkpoint()
    assert _saved(machine).checkpoint.active_file_first_offset is None
    topic.wait(topic.append(b"x"), "synced")
    topic.wal.save_checkpoint()
    assert _saved(machine).checkpoint.active_file_first_offset is not None
