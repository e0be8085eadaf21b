"""A damaged log rewritten: the same frames, nothing thrown away, and a crash at every step."""

import copy
import errno
from contextlib import suppress
from dataclasses import replace
from functools import cache
from operator import methodcaller

import pytest

from ister.base.metrics import Metrics
from ister.base.model import TopicState
from ister.config import load_config
from ister.errors import CapacityError, CorruptDataError, DiskError, OffsetOutOfRangeError
from ister.rescue.local_log import rewrite_log
from ister.topic.log import Log
from ister.wal.directory import WalDirectory
from tests.support.cases import each
from tests.support.crash import Crash
from tests.support.machine import (
    NAME,
    ROOT,
    Machine,
    ManualClock,
    NoThreads,
    fill,
    numbered,
    payloads,
)
from tests.support.memory_fs import FaultPlan, SimulatedCrash

PATH = f"{ROOT}{NAME}"
COUNT = 40
SENT = numbered(COUNT, size=900)
NEW = f"{PATH}/wal.8.log"
SETTINGS = {"rotate_max_bytes": 4096, "cache_capacity": 1}


def opened(machine, *, is_new=False):
    log = machine.open(clock=ManualClock(), scheduler=NoThreads(), **SETTINGS)
    return log, log.topic(NAME, create=is_new)


def name_of(seq):
    return f"wal.{seq}.log" if seq else "wal.log"


def flip(machine, seq, number):
    """Damages the frame `number` of a file for good."""
    path = f"{PATH}/{name_of(seq)}"
    machine.flip(path, machine.frame_starts(path)[number] + 40)


def lose(machine, seq):
    for name in (name_of(seq), name_of(seq).replace(".log", ".idx")):
        machine.remove(f"{PATH}/{name}")


HARM = {
    "whole": lambda machine: None,
    "a frame": lambda machine: flip(machine, 1, 2),
    "a first frame": lambda machine: flip(machine, 1, 0),
    "a file": lambda machine: lose(machine, 1),
    "the first file": lambda machine: lose(machine, 0),
    "the last file": lambda machine: flip(machine, 7, 1),
}
CASES = [
    ("whole", 12),
    ("a frame", 12),
    ("a frame", 10),
    ("a first frame", 12),
    ("a file", 12),
    ("a file", 36),
    ("the first file", 5),
    ("the last file", 38),
    ("the last file", 40),
]


@cache
def a_disk(harm):
    """Of a log in eight files, closed, with damage; and its frames as they were before."""
    with Machine() as machine:
        log, topic = opened(machine, is_new=True)
        fill(topic, COUNT, size=900)
        log.close()
        frames = []
        for seq in range(8):
            path = f"{PATH}/{name_of(seq)}"
            data, starts = machine.read(path), machine.frame_starts(path)
            frames += [data[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
        assert len(frames) == COUNT
        HARM[harm](machine)
    return machine.fs._root, frames


def a_machine(harm):
    root, frames = a_disk(harm)
    machine = Machine()
    machine.fs._root = copy.deepcopy(root)
    return machine, frames


def rewrite(topic, start, *, chunk_bytes=4096):
    return rewrite_log(
        topic.wal, start, chunk_bytes=chunk_bytes, clock=ManualClock(), metrics=Metrics()
    )


def content(machine):
    return machine.content(PATH)


def check_goes_on(machine, start):
    """The log opens in order, has every message from `start` on, and takes the next one."""
    log, topic = opened(machine)
    assert (topic.state, topic.damage) == (TopicState.OPEN, ())
    assert topic.watermarks.next == COUNT
    assert topic.earliest <= start
    assert payloads(topic.read(start)) == SENT[start:]
    assert topic.append(b"next") == COUNT
    topic.flush()
    log.close()
    log, topic = opened(machine)
    assert payloads(topic.read(start)) == [*SENT[start:], b"next"]
    log.close()


# -- what it does -------------------------------------------------------------------------------


@each(("harm", "start"), CASES)
def test_frames_from_the_start_on_are_in_a_new_file_and_the_old_ones_are_set_aside(harm, start):
    machine, frames = a_machine(harm)
    with machine:
        log, topic = opened(machine)
        topic.wal.settings = replace(
            topic.wal.settings, incarnation="of this topic", epoch=7, claim="of its owner"
        )
        before, handles = content(machine), machine.fs.open_files
        assert rewrite(topic, start) == COUNT - start
        assert machine.fs.open_files == handles
        after, state = content(machine), WalDirectory(machine.fs, PATH).load_state()
        log.close()
        old = [name for name in before if name.endswith((".log", ".idx"))]
        assert len(old) >= 13
        assert {f"{name}.aside": before[name] for name in old}.items() <= after.items()
        left = sorted(name for name in after if not name.endswith(".aside"))
        assert left == ["wal.8.log", "wal.ckpt"]
        assert after["wal.8.log"] == b"".join(frames[start:])
        assert (state.synced, state.is_poisoned) == (COUNT, False)
        assert state.synced_position == len(after["wal.8.log"])
        assert (state.ack, state.codec) == (topic.ack, topic.codec)
        assert (state.incarnation, state.epoch, state.claim) == ("of this topic", 7, "of its owner")
        checkpoint = state.checkpoint
        assert (checkpoint.start_offset, checkpoint.last_offset) == (start, COUNT - 1)
        assert (checkpoint.file_seq, checkpoint.active_file_name) == (8, "wal.8.log")
        assert checkpoint.rotated_files == ()
    machine, _ = a_machine(harm)
    with machine:
        log, topic = opened(machine)
        rewrite(topic, start)
        log.close()
        check_goes_on(machine, start)


@each("chunk_bytes", [64, 1000, 4096, 1 << 20])
def test_size_of_a_chunk_changes_nothing(chunk_bytes):
    machine, frames = a_machine("a frame")
    with machine:
        log, topic = opened(machine)
        assert rewrite(topic, 12, chunk_bytes=chunk_bytes) == COUNT - 12
        assert machine.read(NEW) == b"".join(frames[12:])
        log.close()


def test_log_in_memory_has_nothing_to_rewrite():
    config = load_config({"storage": {"mode": "memory"}}, {})
    with Log(config, scheduler=NoThreads()) as log:
        topic = log.topic(NAME, create=True)
        topic.append(b"x")
        assert rewrite(topic, 0) == 0
        assert payloads(topic.read()) == [b"x"]


def test_log_that_was_rewritten_can_be_rewritten_again():
    machine, frames = a_machine("a frame")
    with machine:
        log, topic = opened(machine)
        rewrite(topic, 12)
        log.close()
        flip(machine, 8, 3)
        log, topic = opened(machine)
        assert rewrite(topic, 20) == COUNT - 20
        log.close()
        assert machine.read(f"{PATH}/wal.9.log") == b"".join(frames[20:])
        assert {"wal.8.log.aside", "wal.log.aside"} <= content(machine).keys()
        check_goes_on(machine, 20)


# -- what it refuses ----------------------------------------------------------------------------


@each(
    ("harm", "start", "offset", "error"),
    [
        ("a frame", 5, 7, CorruptDataError),
        ("a frame", 7, 7, CorruptDataError),
        ("a frame", 0, 7, CorruptDataError),
        ("the last file", 12, 36, CorruptDataError),
        ("the last file", 36, 36, CorruptDataError),
        ("a file", 2, None, CorruptDataError),
        ("the first file", 3, None, OffsetOutOfRangeError),
    ],
)
def test_damage_and_loss_at_or_behind_the_start_change_nothing(harm, start, offset, error):
    """Goal: nothing changed means nothing; a half copy may be as large as the log."""
    machine, _ = a_machine(harm)
    with machine:
        log, topic = opened(machine)
        before, names, state = content(machine), machine.fs.list_directory(PATH), topic.state
        with pytest.raises(error) as refused:
            rewrite(topic, start)
        assert offset is None or refused.value.offset == offset
        assert (content(machine), machine.fs.list_directory(PATH)) == (before, names)
        assert topic.state is state
        if offset is not None:
            assert payloads(topic.read(12, end=36)) == SENT[12:36]
        log.close()
        assert content(machine) == before


@each("kind", ["create", "write", "sync", "rename", "sync_directory"])
@each("number", [errno.EIO, errno.ENOSPC])
def test_new_file_that_cannot_be_written_leaves_the_log_as_it_was(kind, number):
    machine, _ = a_machine("the last file")
    with machine:
        log, topic = opened(machine)
        before = content(machine)
        machine.fs.before = FaultPlan(at=1, errno=number, kinds=frozenset({kind}))
        with pytest.raises((CapacityError, DiskError)):
            rewrite(topic, 38)
        machine.fs.before = lambda kind, path: None
        after = content(machine)
        after.pop("wal.8.log", None)  # whose name may not be durable
        assert after == before
        log.close()
        log, topic = opened(machine)
        assert rewrite(topic, 38) == 2
        log.close()
        check_goes_on(machine, 38)


# -- crashes ------------------------------------------------------------------------------------


def crash_and_rewrite_again(harm, start, at, end):
    """Crashes at a step, has the next process rewrite the log, and looks what has become of it.

    Until then, nothing that was whole is out of reach. False if there is no such step.
    """
    machine, frames = a_machine(harm)
    with machine:
        _, topic = opened(machine)
        before = content(machine)
        machine.fs.before = crash = Crash(at)
        with suppress(SimulatedCrash):
            rewrite(topic, start)
        end(machine)
        log, topic = opened(machine)
        try:
            assert payloads(topic.read(start)) == SENT[start:]
            assert topic.watermarks.next == COUNT
            assert rewrite(topic, start) == COUNT - start
            log.close()
            seqs = WalDirectory(machine.fs, PATH).log_seqs()
            assert len(seqs) == 1
            assert machine.read(f"{PATH}/wal.{seqs[0]}.log") == b"".join(frames[start:])
            check_goes_on(machine, start)
        except Exception as error:
            error.add_note(f"after a crash before step {at}: {crash.step}")
            raise
        if end is Machine.kill:
            kept = {data for name, data in content(machine).items() if name.endswith(".aside")}
            assert {data for name, data in before.items() if name.endswith(".log")} <= kept
        return bool(crash.step)


# What the other tier does not have lies in one file, or in several.
@each(
    ("harm", "start"),
    [
        ("a file", 36),
        ("the last file", 38),
        ("the last file", 40),
        ("a frame", 12),
        ("a file", 12),
        ("the first file", 5),
    ],
)
def test_crash_at_any_step_is_followed_by_a_rewriting_that_ends_the_same(harm, start):
    at = 1
    while crash_and_rewrite_again(harm, start, at, Machine.kill):
        for seed in range(4):
            crash_and_rewrite_again(harm, start, at, methodcaller("cut_power", 1000 * at + seed))
        at += 1
    assert at > 5
