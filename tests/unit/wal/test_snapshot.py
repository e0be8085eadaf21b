"""A log's files read from outside: what the checkpoint says, never more, and nothing is touched."""

import pytest

from ister.base.clock import SystemClock
from ister.base.metrics import Metrics
from ister.base.model import Codec
from ister.errors import NotFoundError, OffsetOutOfRangeError, UnsupportedVersionError
from ister.format.frame import FRAME_HEADER_SIZE
from ister.format.message import decode_message
from ister.wal.directory import CHECKPOINT_NAME, WalDirectory
from ister.wal.reader import WalReader
from ister.wal.snapshot import load_snapshot
from tests.support.builders import with_valid_crc
from tests.support.clock import ManualClock
from tests.support.machine import NAME, ROOT, NoThreads, fill, numbered

PATH = f"{ROOT}{NAME}"
ROTATE = {"rotate_max_bytes": 4096, "cache_capacity": 1}


def snapshot_of(machine):
    return load_snapshot(WalDirectory(machine.fs, PATH), NAME)


def is_behind(snapshot):
    """Whether the files hold more than the snapshot knows."""
    return not snapshot.covers(snapshot.end_of_files())


def read_frames(snapshot, start=None, end=None):
    """(offset, payload) of what a snapshot has."""
    start = snapshot.trimmed if start is None else start
    end = snapshot.synced if end is None else end
    reader = WalReader(snapshot, chunk_bytes=1 << 16, metrics=Metrics(), clock=SystemClock())
    found = []
    try:
        while start < end:
            batch = reader.fetch(start, end, bytes_max=1 << 16)
            ends = [*batch.starts[1:], batch.end]
            for head, tail in zip(batch.starts, ends, strict=True):
                body = batch.chunk[head + FRAME_HEADER_SIZE : tail]
                message = decode_message(body, batch.codec)
                found.append((message.msg_id.topic_offset, message.payload))
            start = batch.next_offset
    finally:
        reader.close()
    return found


def a_topic(machine, **settings):
    settings = {"clock": ManualClock(), "scheduler": NoThreads(), **settings}
    return machine.topic(**settings)


def a_saved_topic(machine):
    """With a hundred messages in several files, all of them below its checkpoint."""
    topic = a_topic(machine, **ROTATE)
    fill(topic, 100, size=200)
    topic.wal.save_checkpoint()
    return topic


def expected(count, *, first=0, size=200):
    return list(enumerate(numbered(count - first, first=first, size=size), first))


# -- what it says -------------------------------------------------------------------------------


def test_topic_that_does_not_exist_has_none(machine):
    assert snapshot_of(machine) is None


@pytest.mark.parametrize("damage", ["missing", "empty", "garbage", "flipped", "cut"])
def test_checkpoint_that_is_not_whole_is_none(machine, damage):
    topic = a_topic(machine)
    fill(topic, 10, size=200)
    topic.wal.save_checkpoint()
    path = f"{PATH}/{CHECKPOINT_NAME}"
    data = machine.read(path)
    machine.remove(path)
    if damage != "missing":
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        machine.create(
            path,
            {"empty": b"", "garbage": b"x" * 300, "flipped": bytes(flipped), "cut": data[:-1]}[
                damage
            ],
        )
    assert snapshot_of(machine) is None


def test_checkpoint_of_a_newer_ister_is_said_to_be_one(machine):
    topic = a_topic(machine)
    fill(topic, 3, size=200)
    topic.wal.save_checkpoint()
    path = f"{PATH}/{CHECKPOINT_NAME}"
    content = bytearray(machine.read(path)[:-4])
    content[4] += 1  # behind the magic
    machine.overwrite(path, 0, with_valid_crc(bytes(content)))
    with pytest.raises(UnsupportedVersionError):
        snapshot_of(machine)


@pytest.mark.parametrize("codec", list(Codec))
def test_snapshot_of_an_empty_topic_is_empty(machine, codec):
    machine.open(clock=ManualClock(), scheduler=NoThreads()).topic(NAME, create=True, codec=codec)
    snapshot = snapshot_of(machine)
    assert (snapshot.trimmed, snapshot.synced, snapshot.next) == (0, 0, 0)
    assert snapshot.files == ()
    assert snapshot.settings.codec is codec
    assert snapshot.settings.topic == NAME
    assert snapshot.writer is None
    assert not is_behind(snapshot)
    assert snapshot.measure(0, 100) == 0


def test_snapshot_has_everything_that_was_synced_at_its_checkpoint(machine):
    topic = a_saved_topic(machine)
    snapshot = snapshot_of(machine)
    assert (snapshot.trimmed, snapshot.synced) == (0, 100)
    assert len(snapshot.files) > 4
    assert snapshot.files == topic.wal.files
    assert read_frames(snapshot) == expected(100)
    assert read_frames(snapshot, 37, 59) == expected(100)[37:59]


def test_bytes_above_the_checkpoint_may_be_anything(machine):
    """A torn or garbled tail is not looked at, and does not keep the rest from being read."""
    topic = a_topic(machine)
    fill(topic, 10, size=200)
    topic.wal.save_checkpoint()
    position = snapshot_of(machine).synced_position
    for tail in (b"\0" * 5000, b"\xff" * 5000, b"x"):
        machine.overwrite(f"{PATH}/wal.log", position, tail)
        assert read_frames(snapshot_of(machine)) == expected(10)


def test_file_whose_first_frame_is_not_durable_is_not_part_of_it(machine):
    topic = a_topic(machine, **ROTATE)
    fill(topic, 20, size=200)
    topic.wal.save_checkpoint()
    before = snapshot_of(machine)
    while len(topic.wal.files) == len(before.files):
        topic.wait(topic.append(b"x" * 500), "written")
    snapshot = snapshot_of(machine)
    assert snapshot.files[: len(before.files)] == before.files
    assert read_frames(snapshot, 0, 20) == expected(20)
    assert all(file.first_offset < snapshot.synced for file in snapshot.files)


@pytest.mark.parametrize("seed", range(10))
def test_what_a_snapshot_has_survives_a_power_cut(machine, seed):
    """Goal: nothing is ever read from outside that the owner does not have after a crash."""
    topic = a_topic(machine, **ROTATE)
    for _ in range(5):
        fill(topic, 7, size=200)
        topic.wait(topic.append(b"written only"), "written")
        topic.flush()
    topic.wal.save_checkpoint()
    fill(topic, 3, size=200)
    topic.wait(topic.append(b"written only"), "written")
    seen = read_frames(snapshot_of(machine))
    machine.cut_power(seed)
    assert read_frames(snapshot_of(machine)) == seen
    topic = machine.reopened(clock=ManualClock(), scheduler=NoThreads(), **ROTATE)
    found = [(message.offset, message.payload) for message in topic.read()]
    assert found[: len(seen)] == seen


# -- trimmed under the reader -------------------------------------------------------------------


def test_trimmed_files_are_no_longer_part_of_it(machine):
    topic = a_topic(machine, **ROTATE)
    fill(topic, 100, size=200)
    assert topic.wal.trim(60) > 0
    snapshot = snapshot_of(machine)
    assert 0 < snapshot.trimmed <= 60
    assert read_frames(snapshot) == expected(100, first=snapshot.trimmed)
    with pytest.raises(OffsetOutOfRangeError):
        read_frames(snapshot, 0)


def test_file_that_was_trimmed_after_the_snapshot_is_not_found(machine):
    topic = a_saved_topic(machine)
    old = snapshot_of(machine)
    topic.wal.trim(60)
    with pytest.raises(NotFoundError):
        read_frames(old, 0)
    new = snapshot_of(machine)
    assert read_frames(old, new.trimmed) == read_frames(new)


def test_checkpoint_tells_of_a_trim_before_a_file_goes(machine):
    """Goal: a file that is gone is one that the newest snapshot does not name."""
    topic = a_topic(machine, **ROTATE)
    fill(topic, 100, size=200)
    gone = []

    def look(kind, path):
        if kind == "remove" and path.endswith(".log"):
            seqs = {file.seq for file in snapshot_of(machine).files}
            gone.append(path)
            assert not any(path == WalDirectory(machine.fs, PATH).log_path(s) for s in seqs)

    machine.fs.before = look
    topic.wal.trim(60)
    assert len(gone) > 2


# -- hands off ----------------------------------------------------------------------------------


@pytest.mark.parametrize("index", ["kept", "removed", "garbled"])
def test_reading_changes_nothing_in_the_directory(machine, index):
    a_saved_topic(machine)
    for name in machine.fs.list_directory(PATH):
        if name.endswith(".idx") and index == "removed":
            machine.remove(f"{PATH}/{name}")
        elif name.endswith(".idx") and index == "garbled":
            machine.overwrite(f"{PATH}/{name}", 0, b"\xaa" * 10)
    before = machine.content(PATH)
    kinds = set()
    machine.fs.before = lambda kind, path: kinds.add(kind)
    snapshot = snapshot_of(machine)
    assert read_frames(snapshot) == expected(100)
    assert read_frames(snapshot, 55, 60) == expected(100)[55:60]
    reader = WalReader(snapshot, chunk_bytes=1 << 16, metrics=Metrics(), clock=SystemClock())
    assert reader.find_time(1, snapshot.settings.codec, end=100) is not None
    reader.close()
    is_behind(snapshot)
    snapshot.measure(0, 100)
    machine.fs.before = lambda kind, path: None
    assert machine.content(PATH) == before
    assert kinds <= {"open_read", "read", "size", "list_directory"}, kinds


def test_one_file_is_open_at_a_time_and_none_afterwards(machine):
    a_saved_topic(machine)
    before, most = machine.fs.open_files, []
    machine.fs.before = lambda kind, path: most.append(machine.fs.open_files)
    snapshot = snapshot_of(machine)
    read_frames(snapshot)
    assert max(most) <= before + 2, "a file and its index"
    is_behind(snapshot)
    snapshot.measure(0, 100)
    assert machine.fs.open_files == before


# -- how far behind -----------------------------------------------------------------------------


def test_snapshot_is_behind_until_the_checkpoint_is_saved(machine):
    topic = a_topic(machine)
    fill(topic, 10, size=200)
    topic.wal.save_checkpoint()
    old = snapshot_of(machine)
    assert not is_behind(old)
    fill(topic, 1, size=200)
    assert is_behind(old)
    assert is_behind(snapshot_of(machine))
    topic.wal.save_checkpoint()
    new = snapshot_of(machine)
    assert not is_behind(new)
    assert is_behind(old)
    assert new.covers(old.end_of_files())


def test_new_file_without_a_frame_does_not_hide_what_is_synced_before_it(machine):
    """The moment between the making of a file and its first frame, which on a full disk is long."""
    topic = a_topic(machine)
    fill(topic, 10, size=200)
    topic.wal.save_checkpoint()
    fill(topic, 10, size=200)
    machine.create(f"{PATH}/wal.1.log")
    assert is_behind(snapshot_of(machine))
    topic.wal.save_checkpoint()
    assert not is_behind(snapshot_of(machine))


def test_directory_without_files_is_not_behind(machine):
    a_topic(machine)
    snapshot = snapshot_of(machine)
    assert snapshot.end_of_files() == (snapshot.active_seq, 0)
    assert snapshot.covers(snapshot.end_of_files())


# -- sizes --------------------------------------------------------------------------------------


def test_measure_is_about_what_the_frames_take(machine):
    a_saved_topic(machine)
    snapshot = snapshot_of(machine)
    whole = sum(
        len(machine.read(f"{PATH}/{n}"))
        for n in machine.fs.list_directory(PATH)
        if n.endswith(".log")
    )
    assert snapshot.measure(0, 100) == whole
    parts = [snapshot.measure(start, start + 10) for start in range(0, 100, 10)]
    assert abs(sum(parts) - whole) <= 20
    assert all(abs(part - whole / 10) < whole / 50 for part in parts)
    assert snapshot.measure(100, 200) == snapshot.measure(50, 50) == 0
    assert snapshot.measure(0, 1 << 60) == whole


def test_measure_of_a_trimmed_file_is_nothing(machine):
    topic = a_saved_topic(machine)
    old = snapshot_of(machine)
    topic.wal.trim(60)
    new = snapshot_of(machine)
    assert old.measure(0, new.trimmed) == 0
    assert old.measure(0, 100) == new.measure(0, 100)
