"""A topic's directory: the uploader's checkpoint in it, and where a log without files begins."""

from dataclasses import replace

import pytest

from ister.errors import UnsupportedVersionError
from ister.format.checkpoint import (
    UploaderCheckpoint,
    WalCheckpoint,
    WalState,
    encode_uploader_checkpoint,
)
from ister.wal.directory import UPLOADER_CHECKPOINT_NAME, WalDirectory
from ister.wal.recovery import recover
from tests.support.crash import crashing
from tests.support.machine import NAME, ROOT, Calls, numbered

PATH = f"{ROOT}{NAME}"
CHECKPOINT = UploaderCheckpoint(
    last_committed_offset=41,
    last_read_file_seq=3,
    last_read_byte_position=4096,
    last_object_id="data-0-41.dnb1",
    updated_at=1_703_001_234,
)


@pytest.fixture
def directory(machine):
    machine.fs.make_directories(PATH)
    return WalDirectory(machine.fs, PATH)


# -- the uploader's checkpoint ------------------------------------------------------------------


def test_uploader_checkpoint_comes_back_as_it_was(directory):
    assert directory.load_uploader() is None
    directory.save_uploader(CHECKPOINT)
    assert directory.load_uploader() == CHECKPOINT
    assert directory.fs.list_directory(PATH) == [UPLOADER_CHECKPOINT_NAME]


def test_uploader_checkpoint_costs_no_sync_and_survives_a_kill(machine, directory):
    machine.fs.before = calls = Calls()
    directory.save_uploader(CHECKPOINT)
    assert calls.count("sync") == calls.count("sync_directory") == 0
    machine.kill()
    assert directory.load_uploader() == CHECKPOINT


def test_power_cut_leaves_an_earlier_uploader_checkpoint_a_later_one_or_none(machine, directory):
    """Method: three saves, then the machine ends in many of the states that are possible."""
    ends = (7, 8, 9)
    found = set()
    for seed in range(40):
        for end in ends:
            directory.save_uploader(replace(CHECKPOINT, last_committed_offset=end))
        machine.cut_power(seed)
        kept = directory.load_uploader() if machine.fs.exists(PATH) else None
        found.add(None if kept is None else kept.last_committed_offset)
        machine.fs.make_directories(PATH)
    assert len(found) > 1
    assert found <= {None, *ends}


def test_damaged_uploader_checkpoint_is_as_good_as_none(machine, directory):
    data = encode_uploader_checkpoint(CHECKPOINT)
    path = f"{PATH}/{UPLOADER_CHECKPOINT_NAME}"
    for position in range(0, len(data), 3):
        changed = bytearray(data)
        changed[position] ^= 0x40
        machine.create(path, bytes(changed))
        try:
            assert directory.load_uploader() is None, position
        except UnsupportedVersionError:
            assert position < 8  # the magic or the version
    for size in range(0, len(data), 5):
        machine.create(path, data[:size])
        assert directory.load_uploader() is None, size


@pytest.mark.parametrize("point", ["tier.before_checkpoint_rename", "tier.after_checkpoint"])
def test_kill_while_saving_leaves_the_old_one_or_the_new_one(machine, directory, point):
    directory.save_uploader(CHECKPOINT)
    newer = replace(CHECKPOINT, last_committed_offset=99, last_object_id="data-42-99.dnb1")
    with crashing(point):
        directory.save_uploader(newer)
    machine.kill()
    expected = CHECKPOINT if point == "tier.before_checkpoint_rename" else newer
    assert directory.load_uploader() == expected


# -- where a log begins of which nothing is here ------------------------------------------------


@pytest.mark.parametrize("floor", [0, 1, 5001])
def test_log_without_anything_begins_at_its_floor(directory, floor):
    recovered = recover(directory, floor=floor)
    assert (recovered.next_offset, recovered.files, recovered.damage) == (floor, (), ())


def test_log_with_frames_does_not_care_about_the_floor(machine):
    topic = machine.topic()
    topic.append_many(numbered(10))
    topic.flush()
    directory = topic.wal.directory
    machine.kill()
    recovered = recover(directory, floor=500)
    assert recovered.next_offset == 10
    assert recovered.files[0].first_offset == 0


@pytest.mark.parametrize("content", [b"", b"\x4d\0\0"], ids=["empty", "torn"])
def test_first_file_without_a_frame_begins_at_the_floor(machine, directory, content):
    machine.create(f"{PATH}/wal.log", content)
    recovered = recover(directory, floor=77)
    assert (recovered.next_offset, recovered.damage) == (77, ())


@pytest.mark.parametrize("seq", [0, 3])
def test_checkpoint_of_an_empty_log_says_where_it_begins(machine, directory, seq):
    """Goal: a log that began behind the bucket's history goes on there after a crash."""
    directory.save_state(
        WalState(
            synced=77,
            synced_position=0,
            checkpoint=WalCheckpoint(start_offset=77, last_offset=77, file_seq=seq),
        )
    )
    recovered = recover(directory, floor=5)
    assert (recovered.next_offset, recovered.damage) == (77, ())
    machine.create(directory.log_path(seq), b"")
    recovered = recover(directory, floor=5)
    assert (recovered.next_offset, recovered.damage) == (77, ())


def test_checkpoint_of_a_log_with_messages_whose_files_are_gone_is_damage(directory):
    directory.save_state(
        WalState(
            synced=80,
            synced_position=500,
            checkpoint=WalCheckpoint(start_offset=77, last_offset=79, file_seq=0),
        )
    )
    recovered = recover(directory, floor=5)
    assert recovered.next_offset == 80
    assert recovered.damage
