"""A full append buffer: bounded memory, by waiting or by refusing."""

import threading

import pytest

from ister.errors import CapacityError, ClosedError
from tests.support.machine import Calls, Gate, NoThreads, Task, eventually, numbered, payloads

BUFFER_BYTES = 64 * 1024
PAYLOAD = b"x" * 1024


def _filled(machine, policy):
    """A topic whose writer hangs in a write, with a full buffer."""
    topic = machine.topic(buffer_max_bytes=BUFFER_BYTES, buffer_full=policy)
    machine.fs.before = gate = Gate("write")
    topic.append(b"first")
    writer = Task(topic.flush)
    gate.wait_reached()
    while topic.wal.buffer.has_room(len(PAYLOAD)):
        topic.append(PAYLOAD)
    return topic, gate, writer


def test_full_buffer_refuses_and_changes_nothing(machine):
    topic, gate, writer = _filled(machine, "refuse")
    before = topic.watermarks
    for refused in (lambda: topic.append(PAYLOAD), lambda: topic.append_many([PAYLOAD])):
        with pytest.raises(CapacityError, match="append buffer is full") as error:
            refused()
        assert error.value.retriable
    assert topic.watermarks == before
    assert topic.wal.buffer.pending_bytes <= BUFFER_BYTES + 2 * len(PAYLOAD)
    gate.open()
    writer.result()
    topic.wait(topic.append(b"after"))
    assert topic.watermarks.synced == before.next + 1


def test_full_buffer_blocks_until_there_is_room(machine):
    topic, gate, writer = _filled(machine, "block")
    next_offset = topic.watermarks.next
    blocked = [Task(topic.append, PAYLOAD) for _ in range(3)]
    eventually(lambda: len(topic.wal.gate.waiting) == 3)
    assert topic.watermarks.next == next_offset
    gate.open()
    writer.result()
    assert sorted(task.result() for task in blocked) == [*range(next_offset, next_offset + 3)]
    assert topic.flush() == next_offset + 3


def test_blocked_appender_is_told_when_the_topic_is_closed(machine):
    topic, gate, writer = _filled(machine, "block")
    blocked = Task(topic.append, PAYLOAD)
    eventually(lambda: len(topic.wal.gate.waiting) == 1)
    closer = Task(topic.close)
    assert isinstance(blocked.error(), ClosedError)
    gate.open()
    closer.result()
    writer.result()


def test_appender_without_a_writer_beside_it_makes_room_itself(machine):
    topic = machine.topic(buffer_max_bytes=BUFFER_BYTES, scheduler=NoThreads())
    machine.fs.before = calls = Calls()
    sent = numbered(300, size=1024)
    for payload in sent:
        topic.append(payload)
        assert topic.wal.buffer.pending_bytes <= BUFFER_BYTES + 2 * len(PAYLOAD)
    assert calls.threads("write", ".log") == {threading.get_ident()}
    topic.flush()
    assert payloads(topic.read()) == sent


@pytest.mark.parametrize("policy", ["block", "refuse"])
def test_batch_larger_than_the_buffer_is_taken_when_it_is_empty(machine, policy):
    topic = machine.topic(buffer_max_bytes=BUFFER_BYTES, buffer_full=policy)
    sent = numbered(4, size=BUFFER_BYTES)
    assert topic.append_many(sent) == range(4)
    topic.flush()
    assert topic.append(b"x" * 2 * BUFFER_BYTES) == 4
    topic.flush()
    assert payloads(topic.read(end=4)) == sent
