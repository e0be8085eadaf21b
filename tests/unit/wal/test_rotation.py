"""When a file ends, and what a rotation that fails leaves in use."""

import errno
from itertools import pairwise

import pytest

from ister.base.model import TopicState
from ister.errors import ClosedError, DiskError
from tests.support.machine import NAME, ROOT, Calls, ManualClock, Task, numbered, payloads

PATH = f"{ROOT}{NAME}"


def _logs(machine):
    return [name for name in machine.fs.list_directory(PATH) if name.endswith(".log")]


def _append(topic, count, *, size=500):
    first = topic.watermarks.next
    for payload in numbered(count, first=first, size=size):
        topic.wait(topic.append(payload))


def test_file_of_its_size_is_followed_by_another(machine):
    topic = machine.topic(rotate_max_bytes=4096)
    _append(topic, 40)
    files = topic.wal.files
    assert len(files) > 3
    assert _logs(machine) == sorted(
        f"wal.{file.seq}.log" if file.seq else "wal.log" for file in files
    )
    for file, after in pairwise(files):
        path = topic.wal.directory.log_path(file.seq)
        starts = machine.frame_starts(path)
        assert len(starts) == after.first_offset - file.first_offset
        assert starts[-1] < 4096 <= len(machine.read(path))
    assert payloads(topic.read()) == numbered(40, size=500)
    assert topic.wal._metrics.snapshot()["wal.writer_rotate_events"] == len(files) - 1


@pytest.mark.parametrize("jump_ms", [10**9, -(10**9)], ids=["ahead", "back"])
def test_jump_of_the_wall_clock_rotates_nothing(machine, jump_ms):
    clock = ManualClock()
    topic = machine.topic(rotate_max_seconds=60, clock=clock)
    _append(topic, 1)
    clock.jump_wall(jump_ms)
    _append(topic, 2)
    assert len(topic.wal.files) == 1
    assert payloads(topic.read()) == numbered(3, size=500)


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENOSPC, errno.EROFS, errno.EIO], ids=errno.errorcode.get
)
def test_rotation_that_cannot_make_its_file_keeps_the_old_one_in_use(machine, number):
    clock = ManualClock()
    topic = machine.topic(rotate_max_bytes=4096, clock=clock)
    machine.fs.before = Calls(
        fail=lambda kind, path: (
            OSError(number, "no") if kind == "create" and path.endswith("wal.1.log") else None
        )
    )
    _append(topic, 20)
    assert topic.state is TopicState.OPEN
    assert len(topic.wal.files) == 1
    assert topic.wal._metrics.snapshot()["wal.rotate_errors"] == 1
    machine.fs.before = Calls()
    clock.advance(1)
    _append(topic, 2)
    assert [file.first_offset for file in topic.wal.files] == [0, 20]
    machine.cut_power(seed=2)
    assert payloads(machine.reopened().read()) == numbered(22, size=500)


@pytest.mark.parametrize("seed", range(12))
def test_crash_after_a_rotation_whose_name_was_not_synced_is_no_damage(machine, seed):
    """Goal: a file left behind by a failed rotation does not make a torn tail look like damage.

    Method: the directory's sync fails once, so the new file exists and the old one stays in use;
    more frames go there, unsynced, and the power is cut.
    """
    topic = machine.topic(rotate_max_bytes=4096, clock=ManualClock())
    _append(topic, 8)
    failures = [OSError(errno.ENOSPC, "no")]
    machine.fs.before = Calls(
        fail=lambda kind, path: (
            failures.pop()
            if failures and kind == "sync_directory" and machine.fs.exists(f"{PATH}/wal.1.log")
            else None
        )
    )
    _append(topic, 1)
    assert not failures
    promised = topic.watermarks.synced
    if topic.state is TopicState.OPEN:
        for payload in numbered(4, first=9, size=1500):
            topic.wait(topic.append(payload), "written")
    machine.cut_power(seed)
    reopened = machine.reopened()
    assert reopened.state is TopicState.OPEN
    assert payloads(reopened.read())[:promised] == numbered(9, size=500)[:promised]
    assert len(payloads(reopened.read())) >= promised


def test_empty_last_file_is_filled_from_its_beginning(machine):
    topic = machine.topic(rotate_max_bytes=4096)
    _append(topic, 8)
    machine.kill()
    machine.create(f"{PATH}/wal.1.log")
    topic = machine.reopened(rotate_max_bytes=4096)
    assert topic.append(b"next") == 8
    topic.flush()
    assert machine.frame_starts(f"{PATH}/wal.1.log") == [0]
    assert payloads(topic.read(8)) == [b"next"]


def test_failed_sync_of_a_new_name_is_final(machine):
    """A sync that failed is never repeated, not even one of a directory."""
    topic = machine.topic(rotate_max_bytes=4096)
    _append(topic, 8)
    machine.fs.before = calls = Calls(
        fail=lambda kind, path: (
            OSError(errno.EIO, "no")
            if kind == "sync_directory" and machine.fs.exists(f"{PATH}/wal.1.log")
            else None
        )
    )
    with pytest.raises(DiskError):
        _append(topic, 1)
    assert topic.state is TopicState.FAILED
    assert calls.count("sync", "wal.1.log") == 0
    machine.kill()
    assert payloads(machine.reopened().read())[:8] == numbered(8, size=500)


def test_call_ends_a_file_that_has_neither_its_size_nor_its_age(machine):
    topic = machine.topic()
    assert not topic.rotate()
    _append(topic, 3)
    topic.append(b"unsynced")
    assert topic.rotate()
    assert topic.watermarks.synced == 4
    assert _logs(machine) == ["wal.1.log", "wal.log"]
    # An empty file is not ended.
    assert not topic.rotate()
    _append(topic, 1)
    assert [file.first_offset for file in topic.wal.files] == [0, 4]
    assert topic.wal.trim(5) == 1
    assert topic.earliest == 4
    snapshot = topic.wal._metrics.snapshot()
    assert (snapshot["wal.writer_rotate_events"], snapshot["wal.rotated_by_request"]) == (1, 1)


def test_age_of_a_file_begins_with_its_first_message(machine):
    clock = ManualClock()
    topic = machine.topic(rotate_max_seconds=60, clock=clock)
    _append(topic, 1)
    topic.rotate()
    clock.advance(100)
    _append(topic, 1)
    clock.advance(59)
    _append(topic, 1)
    assert [file.first_offset for file in topic.wal.files] == [0, 1]
    clock.advance(1)
    assert len(topic.wal.files) == 2
    _append(topic, 1)
    assert [file.first_offset for file in topic.wal.files] == [0, 1, 3]


def test_appends_beside_calls_that_rotate_lose_nothing(machine):
    """Goal: `rotate` is safe beside producers; every file but the last has a message."""
    topic = machine.topic()

    def produce(name):
        for number in range(100):
            topic.wait(topic.append(b"%d:%d" % (name, number)))

    producers = [Task(produce, name) for name in range(3)]
    count = 0
    while any(producer.is_running for producer in producers):
        count += topic.rotate()
    for producer in producers:
        producer.result()
    count += topic.rotate()
    files = topic.wal.files
    assert len(files) == count
    assert all(a.first_offset < b.first_offset for a, b in pairwise(files))
    machine.cut_power(seed=3)
    found = payloads(machine.reopened().read())
    for name in range(3):
        mine = [item for item in found if item.startswith(b"%d:" % name)]
        assert mine == [b"%d:%d" % (name, n) for n in range(100)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_call_that_cannot_make_the_next_file_says_so_and_changes_nothing(machine, number):
    topic = machine.topic()
    _append(topic, 2)
    machine.fs.before = Calls(
        fail=lambda kind, path: OSError(number, "no") if kind == "create" else None
    )
    with pytest.raises(DiskError, match="stays in use"):
        topic.rotate()
    machine.fs.before = Calls()
    assert topic.state is TopicState.OPEN
    _append(topic, 1)
    assert [file.first_offset for file in topic.wal.files] == [0]
    assert payloads(topic.read()) == numbered(3, size=500)


def test_closed_topic_does_not_rotate(machine):
    topic = machine.topic()
    _append(topic, 1)
    topic.close()
    with pytest.raises(ClosedError):
        topic.rotate()
