"""Bugs planted on purpose, each of which the simulation has to catch: proof that it can fail.

Each entry breaks one rule of the log in the way real systems have broken it, and names the suite
that has to notice: `crashes` (seeded crash points) or `faults` (failing operations).
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator

import pytest

import ister.rescue.giving_up
import ister.topic.opening
import ister.wal.directory
import ister.wal.log
import ister.wal.reader
import ister.wal.recovery
import ister.wal.writer
from ister.base.model import TopicState
from ister.errors import IsterError
from ister.format.frame import scan_frames
from ister.format.frame_walk import FrameWalk
from ister.format.gaps import Gaps, encode_gaps
from ister.fs.whole_files import write_file
from ister.wal.checkpointer import Checkpointer
from ister.wal.commit import Committer
from ister.wal.directory import WalDirectory
from ister.wal.levels import Levels
from ister.wal.log import Wal
from ister.wal.recovery import Recovered, _Recovery
from ister.wal.writer import WalWriter
from tests.sim.known_seeds import Plant, catch, plants_of
from tests.sim.test_failing_operations import run_with_fault
from tests.sim.world import BrokenPromiseError, find_break, read_all, run_seed
from tests.support.machine import NAME, ROOT, Machine, numbered
from tests.support.memory_fs import FaultPlan, MemoryFileSystem, SimulatedCrash
from tests.support.scale import scaled

SEEDS_MAX = 400
PATH = f"{ROOT}{NAME}"


def ack_before_sync(patch: pytest.MonkeyPatch) -> None:
    def sync(self: WalWriter, position: int) -> None:
        self.synced_position = position

    patch.setattr(WalWriter, "sync", sync)


def no_directory_sync_for_new_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WalDirectory, "sync_names", lambda self: None)


def no_sync_of_new_directories(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WalDirectory, "make", lambda self: _make_unsynced(self.fs, self.path))


def _make_unsynced(fs: MemoryFileSystem, path: str) -> None:
    if not fs.exists(path):
        real = fs.sync_directory
        fs.sync_directory = lambda _: None
        fs.make_directories(path)
        fs.sync_directory = real


def retry_after_failed_sync(patch: pytest.MonkeyPatch) -> None:
    def sync(self: WalWriter, position: int) -> None:
        try:
            self._open_active().sync()
        except IsterError:
            self._open_active().sync()
        self.synced_position = position

    patch.setattr(WalWriter, "sync", sync)


def trust_the_tail_after_a_failed_sync(patch: pytest.MonkeyPatch) -> None:
    real = ister.topic.opening.recover
    patch.setattr(ister.topic.opening, "recover", lambda directory, untrusted_from: real(directory))
    patch.setattr(Checkpointer, "record_poison", lambda self: None)
    patch.setattr(ister.wal.recovery, "_save_poisoned", lambda directory, state: None)


def no_carry_over_chunks(patch: pytest.MonkeyPatch) -> None:
    """A frame that a chunk cuts in two is dropped, and parsing goes on behind it."""

    def scan_file(file, *, position, expected_offset, visit=None):
        walk = FrameWalk(file, position=position, expected_offset=expected_offset)
        while chunk := file.read_at(walk.end, 4096):
            scan = scan_frames(chunk, expected_offset=walk.next_offset)
            walk.frames += len(scan.starts)
            walk.next_offset = scan.next_offset
            if visit is not None and scan.starts:
                visit(chunk, walk.end, scan)
            walk.end += len(chunk)
        walk.size = file.size()
        return walk

    patch.setattr(ister.wal.recovery, "scan_file", scan_file)


def offsets_reused_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    """The next offset comes from the checkpoint instead of from the files."""
    real = _Recovery.run

    def run(self: _Recovery) -> Recovered:
        recovered = real(self)
        if recovered.state is not None:
            recovered.next_offset = recovered.state.synced
            recovered.end_position = recovered.state.synced_position
        return recovered

    patch.setattr(_Recovery, "run", run)


def offsets_begin_at_zero_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    real = _Recovery.run

    def run(self: _Recovery) -> Recovered:
        recovered = real(self)
        recovered.next_offset = 0
        return recovered

    patch.setattr(_Recovery, "run", run)


def recovery_does_not_sync_what_it_found(patch: pytest.MonkeyPatch) -> None:
    """After a kill the tail is in the page cache alone, and is taken as durable."""
    patch.setattr(_Recovery, "_sync_or_poison", lambda self, file, durable: None)


def torn_tail_is_not_cut(patch: pytest.MonkeyPatch) -> None:
    """New frames go behind the torn one."""
    real = _Recovery._scan_last

    def scan_last(self: _Recovery, files, durable) -> Recovered:
        recovered = real(self, files, durable)
        recovered.end_position += recovered.cut_bytes
        return recovered

    patch.setattr(_Recovery, "_scan_last", scan_last)


def rotation_before_the_old_file_is_synced(patch: pytest.MonkeyPatch) -> None:
    real = Committer._sync

    def rotate_without(self: Committer, writer: WalWriter) -> None:
        if writer.rotation_is_due():
            writer.synced_position = writer.position
            self.levels.synced = self.levels.written
            return
        real(self, writer)

    patch.setattr(Committer, "_sync", rotate_without)


def readers_see_what_is_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Levels, "visible", property(lambda self: self.written))


def waiters_are_told_when_written(patch: pytest.MonkeyPatch) -> None:
    """`synced` is answered after write(2)."""
    real = Committer._write_buffer

    def write_buffer(self: Committer, writer: WalWriter) -> None:
        real(self, writer)
        self.levels.synced = self.levels.written

    patch.setattr(Committer, "_write_buffer", write_buffer)


def trim_takes_the_last_proof_of_the_next_offset(patch: pytest.MonkeyPatch) -> None:
    """The oldest files go although their successor has no synced frame yet."""

    def trim(self: Wal, before: int) -> int:
        writer = self.writer
        files = writer.files
        if len(files) < 2:
            return 0
        for file in files[:-1]:
            self.directory.remove_log(file.seq)
        writer.files = files[-1:]
        return len(files) - 1

    patch.setattr(Wal, "trim", trim)


def damage_is_cut_like_a_torn_tail(patch: pytest.MonkeyPatch) -> None:
    """Recovery believes the files alone and ignores how far the log was durable.

    Shown with a lost name: without the watermark an empty directory looks like a new topic.
    """
    patch.setattr(WalDirectory, "load_state", lambda self: None)
    no_directory_sync_for_new_files(patch)


def a_write_error_is_only_logged(patch: pytest.MonkeyPatch) -> None:
    """The frames of a failed write are dropped and the next ones follow."""
    real = WalWriter.write

    def write(self: WalWriter, chunks) -> None:
        try:
            real(self, chunks)
        except IsterError:
            return

    patch.setattr(WalWriter, "write", write)


def a_partial_write_is_followed_by_the_whole_again(patch: pytest.MonkeyPatch) -> None:
    """After a full disk the batch is appended behind its own first half."""
    real = WalWriter.write

    def write(self: WalWriter, chunks) -> None:
        try:
            real(self, chunks)
        except IsterError:
            self.position = self._open_active().size()
            raise

    patch.setattr(WalWriter, "write", write)


def gaps_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The record of what was given up may be lost, and the log continues behind it."""

    def save_gaps(self: WalDirectory, gaps: Gaps) -> None:
        path = f"{self.path}/wal.gaps"
        write_file(self.fs, path, encode_gaps(gaps), is_synced=False)

    patch.setattr(WalDirectory, "save_gaps", save_gaps)


def given_up_offsets_are_used_again(patch: pytest.MonkeyPatch) -> None:
    real = ister.rescue.giving_up.give_up
    patch.setattr(
        ister.rescue.giving_up,
        "give_up",
        lambda directory, judged, _: real(directory, judged, judged.whole[-1][1]),
    )


BY_GIVING_UP: list[Plant] = [gaps_are_not_synced, given_up_offsets_are_used_again]
BY_FAULTS: list[Plant] = [
    retry_after_failed_sync,
    trust_the_tail_after_a_failed_sync,
    a_write_error_is_only_logged,
    a_partial_write_is_followed_by_the_whole_again,
]
BY_CRASHES = plants_of(__name__, but=[*BY_GIVING_UP, *BY_FAULTS])


@pytest.mark.sim
@pytest.mark.parametrize("plant", BY_CRASHES, ids=lambda plant: plant.__name__)
def test_crashes_catch(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    catch("wal", plant, monkeypatch, run_seed, SEEDS_MAX)


def give_up_and_crash(seed: int) -> None:
    """Damages a log, gives up what it lost through crashes, and checks what is left of it."""
    rng = random.Random(seed)
    count = rng.randrange(10, 40)
    with Machine() as machine:
        topic = machine.topic(rotate_max_bytes=4096)
        for payload in numbered(count, size=500):
            topic.wait(topic.append(payload), "synced")
        machine.shut_down()
        machine._logs.clear()
        logs = [n for n in machine.fs.list_directory(PATH) if n.endswith(".log")]
        path = f"{PATH}/{rng.choice(logs)}"
        machine.truncate(path, rng.choice(machine.frame_starts(path)) + rng.randrange(1, 500))
        while True:
            log = machine.open(rotate_max_bytes=4096)
            log.topic(NAME)
            left = iter(range(rng.randrange(1, 200)))

            def crash(kind: str, path: str, left: Iterator[int] = left) -> None:
                if next(left, None) is None:
                    raise SimulatedCrash

            machine.fs.before = crash
            try:
                log.give_up(NAME)
                machine.fs.before = lambda kind, path: None
                offset = log.topic(NAME).append(b"next")
                log.topic(NAME).wait(offset, "synced")
                break
            except SimulatedCrash:
                machine.fs.before = lambda kind, path: None
                machine.cut_power(rng.randrange(1000))
        machine.cut_power(rng.randrange(1000))
        topic = machine.reopened(rotate_max_bytes=4096)
        if topic.state is not TopicState.OPEN or offset < count:
            raise BrokenPromiseError(f"{topic.state} at {offset}, behind {count} messages")
        try:
            found = read_all(topic)
        except IsterError as error:
            raise BrokenPromiseError(str(error)) from error
        sent = dict(enumerate(numbered(count, size=500))) | {offset: b"next"}
        if found.get(offset) != b"next" or not found.items() <= sent.items():
            raise BrokenPromiseError(f"the messages {sorted(found)} are not those that were sent")


def test_giving_up_survives_crashes() -> None:
    for seed in range(scaled(20, 500)):
        try:
            give_up_and_crash(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.sim
@pytest.mark.parametrize("plant", BY_GIVING_UP, ids=lambda plant: plant.__name__)
def test_crashes_of_giving_up_catch(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    catch("gaps", plant, monkeypatch, give_up_and_crash, SEEDS_MAX)


@pytest.mark.sim
@pytest.mark.parametrize("plant", BY_FAULTS, ids=lambda plant: plant.__name__)
def test_failing_operations_catch(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    def sweep(seed: int) -> None:
        for kind in ("sync", "write"):
            for at in range(1, 12):
                for number in (errno.EIO, errno.ENOSPC):
                    run_with_fault(seed, FaultPlan(at=at, errno=number, kinds=frozenset({kind})))

    seed = find_break(range(40), sweep)
    print(f"{plant.__name__}: caught by seed {seed}")
    assert seed is not None
