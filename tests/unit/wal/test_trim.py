"""Removing old files: what goes, what stays, and what a crash or an error on the way leaves."""

import errno
from contextlib import suppress
from datetime import UTC, datetime

import pytest

from ister.base.model import TopicState
from ister.errors import DiskError, OffsetOutOfRangeError
from tests.support.cases import each
from tests.support.crash import CHANGES, Crash
from tests.support.machine import NAME, ROOT, Calls, Machine, NoThreads, numbered, payloads
from tests.support.memory_fs import SimulatedCrash

PATH = f"{ROOT}{NAME}"
ROTATE = {"rotate_max_bytes": 4096}
SENT = numbered(40, size=500)


def _log(machine, **settings):
    topic = machine.topic(**ROTATE, **settings)
    for payload in SENT:
        topic.wait(topic.append(payload))
    assert len(topic.wal.files) >= 4
    return topic


def _logs(machine):
    return [name for name in machine.fs.list_directory(PATH) if name.endswith(".log")]


def test_trim_removes_whole_files_below_the_offset(machine):
    topic = _log(machine)
    files = topic.wal.files
    assert topic.wal.trim(files[1].first_offset - 1) == 0
    assert topic.wal.trim(files[2].first_offset) == 2
    assert topic.wal.files == files[2:]
    first = files[2].first_offset
    marks = topic.watermarks
    assert (marks.trimmed, topic.earliest, marks.next) == (first, first, 40)
    assert payloads(topic.read()) == SENT[first:]
    assert "wal.log" not in _logs(machine)
    assert not machine.fs.exists(f"{PATH}/wal.idx")
    assert topic.wal._metrics.snapshot()["wal.trimmed_files"] == 2


def test_trim_of_everything_keeps_the_active_file(machine):
    topic = _log(machine)
    active = topic.wal.files[-1]
    topic.wal.trim(10**9)
    assert topic.wal.files == (active,)
    assert topic.append(b"next") == 40
    assert payloads(topic.read()) == [*SENT[active.first_offset :], b"next"]


def test_file_stays_until_its_successor_has_a_synced_frame(machine):
    topic = machine.topic(**ROTATE, scheduler=NoThreads())
    for payload in numbered(8, size=500):
        topic.wait(topic.append(payload))
    topic.append(b"in the next file")
    topic.wait(8, "written")
    assert len(topic.wal.files) == 2
    assert topic.wal.trim(10**9) == 0
    topic.flush()
    assert topic.wal.trim(10**9) == 1


def test_start_below_the_trimmed_offset_is_refused_with_the_range(machine):
    topic = _log(machine)
    topic.wal.trim(20)
    first = topic.earliest
    for start in (0, first - 1):
        with pytest.raises(OffsetOutOfRangeError) as refused:
            topic.reader(start)
        assert (refused.value.earliest, refused.value.next) == (first, 40)
    assert payloads(topic.read(first)) == SENT[first:]


@each("is_power_cut", [False, True], ids=["kill", "power cut"])
def test_crash_at_any_point_of_a_trim_leaves_a_log_without_holes(is_power_cut):
    """Goal: the checkpoint first, then file by file: each state in between opens.

    Method: crash at the first operation of a trim, at the second, and so on.
    """
    at = 1
    while _trimmed_with_crash(at, is_power_cut=is_power_cut):
        at += 1
    assert at > 6


def _trimmed_with_crash(at, *, is_power_cut):
    """Crashes a trim at operation number `at`; whether it came so far."""
    with Machine() as machine:
        topic = _log(machine, scheduler=NoThreads())
        files = topic.wal.files
        machine.fs.before = crash = Crash(at, {*CHANGES, "remove"})
        with suppress(SimulatedCrash):
            topic.wal.trim(files[3].first_offset)
        if is_power_cut:
            machine.cut_power(at)
        else:
            machine.kill()
        topic = machine.reopened(**ROTATE)
        assert topic.state is TopicState.OPEN, at
        assert topic.earliest in {file.first_offset for file in files[:4]}
        assert payloads(topic.read()) == SENT[topic.earliest :]
        return bool(crash.step)


def _trim_at_first(machine, topic, kind, suffix, before):
    """Trims the log at the first operation of a kind, as another thread may at any moment."""

    def trim(operation, path):
        if operation == kind and path.endswith(suffix):
            machine.fs.before = Calls()
            topic.wal.trim(before)

    machine.fs.before = trim


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [("open_read", "wal.log"), pytest.param("open_read", "wal.idx"), ("read", "wal.log")],
)
def test_file_trimmed_while_a_reader_opens_it_is_out_of_range_or_read(machine, kind, suffix):
    """Goal: whatever the moment, a reader gets the messages or the range that is left.

    Method: the trim happens inside of the reader's own file operation.
    """
    topic = _log(machine, cache_capacity=1, scheduler=NoThreads())
    reader = topic.reader(1)
    _trim_at_first(machine, topic, kind, suffix, topic.wal.files[2].first_offset)
    try:
        got = payloads(reader.next_batch(timeout=1))
    except OffsetOutOfRangeError as error:
        assert (error.offset, error.earliest) == (1, topic.earliest)
    else:
        assert got == SENT[1 : 1 + len(got)]
    assert topic.earliest > 1


@pytest.mark.parametrize(("kind", "suffix"), [("open_read", "wal.idx"), ("open_read", "wal.log")])
def test_start_by_time_beside_a_trim_finds_what_is_left(machine, kind, suffix):
    topic = _log(machine, cache_capacity=1, scheduler=NoThreads())
    first = topic.wal.files[2].first_offset
    _trim_at_first(machine, topic, kind, suffix, first)
    reader = topic.reader(datetime(2000, 1, 1, tzinfo=UTC))
    assert reader.next_offset in (0, first)


def test_file_that_cannot_be_removed_is_reported_and_hurts_nothing(machine):
    topic = _log(machine)
    third = topic.wal.files[2].first_offset
    machine.fs.before = Calls(
        fail=lambda kind, path: OSError(errno.EACCES, "no") if kind == "remove" else None
    )
    with pytest.raises(DiskError):
        topic.wal.trim(third)
    machine.fs.before = Calls()
    assert payloads(topic.read()) == SENT[topic.earliest :]
    machine.kill()
    topic = machine.reopened(**ROTATE)
    assert topic.state is TopicState.OPEN
    assert payloads(topic.read()) == SENT[topic.earliest :]
