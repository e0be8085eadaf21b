"""A disk without room: appends fail clearly, nothing acknowledged is lost, it goes on by itself."""

import errno

import pytest

from ister.base.model import AckLevel, TopicState
from ister.errors import CapacityError, ClosedError, DiskError
from tests.support.machine import Calls, Task, eventually, payloads, waiting

_FULL = {
    "no space": errno.ENOSPC,
    "quota": errno.EDQUOT,
    "file too large": errno.EFBIG,
    "no handles": errno.EMFILE,
}


def _stalled(machine, *, ack="synced"):
    """A topic with one durable message and one that met the full disk."""
    topic = machine.topic(ack=ack)
    topic.wait(topic.append(b"kept"), "synced")
    machine.fs.write_limit_bytes = machine.used_bytes() + 40
    offset = topic.append(b"stuck" * 20)
    for task in [Task(topic.wait, offset, "synced") for _ in range(3)]:
        assert isinstance(task.error(), CapacityError)
    return topic


def test_full_disk_stalls_the_topic_and_refuses_appends(machine):
    topic = _stalled(machine)
    assert topic.state is TopicState.STALLED
    for _ in range(2):
        with pytest.raises(CapacityError, match="cannot be written to") as refused:
            topic.append(b"more")
        assert refused.value.retriable
        assert refused.value.path.endswith("wal.log")
    marks = topic.watermarks
    assert (marks.synced, marks.written, marks.next) == (1, 1, 2)
    assert payloads(topic.read(end=1)) == [b"kept"]


def test_room_that_is_back_resumes_the_topic_by_itself(machine):
    topic = _stalled(machine)
    machine.fs.write_limit_bytes = None
    eventually(lambda: topic.state is TopicState.OPEN)
    topic.wait(1)
    topic.wait(topic.append(b"after"))
    assert topic.wal._metrics.snapshot()["wal.writer_stalls"] == 1
    machine.cut_power(seed=1)
    assert payloads(machine.reopened().read()) == [b"kept", b"stuck" * 20, b"after"]


def test_close_while_stalled_says_that_messages_are_not_stored(machine):
    topic = _stalled(machine)
    with pytest.raises(CapacityError):
        topic.close()
    assert topic.state is TopicState.CLOSED
    with pytest.raises(ClosedError):
        topic.append(b"late")


@pytest.mark.parametrize("number", _FULL.values(), ids=_FULL)
def test_file_that_cannot_be_made_stalls_and_is_made_later(machine, number):
    topic = machine.topic()
    machine.fs.before = Calls(
        fail=lambda kind, path: OSError(number, "full") if (kind == "create") else None
    )
    offset = topic.append(b"a")
    with pytest.raises(CapacityError):
        topic.wait(offset)
    machine.fs.before = Calls()
    eventually(lambda: topic.state is TopicState.OPEN)
    topic.wait(offset)
    assert payloads(topic.read()) == [b"a"]


def test_no_space_at_the_sync_is_as_final_as_any_failed_sync(machine):
    topic = machine.topic()
    machine.fs.before = Calls(
        fail=lambda kind, path: OSError(errno.ENOSPC, "full") if kind == "sync" else None
    )
    offset = topic.append(b"a")
    with pytest.raises(DiskError):
        topic.wait(offset)
    assert topic.state is TopicState.FAILED


def test_reader_at_the_tail_outlives_a_full_disk(machine):
    topic = machine.topic()
    topic.wait(topic.append(b"kept"))
    tail = Task(topic.reader(1).next_batch, timeout=8)
    eventually(lambda: waiting(topic, AckLevel.SYNCED) == 1)
    machine.fs.write_limit_bytes = machine.used_bytes()
    offset = topic.append(b"stuck")
    with pytest.raises(CapacityError):
        topic.wait(offset)
    machine.fs.write_limit_bytes = None
    assert payloads(tail.result()) == [b"stuck"]
