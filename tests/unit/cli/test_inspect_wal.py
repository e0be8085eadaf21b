"""`ister inspect wal` on healthy, torn, damaged, incomplete and empty logs."""

import os
import shutil
import struct
from itertools import pairwise

import pytest

import ister
from ister.cli.main import main
from ister.format.frame import encode_frame
from tests.support.builders import with_bit_flipped
from tests.support.cases import each
from tests.support.commands import TOPIC, check_fields, run_json

COUNT = 30
FILE_FIELDS = {"name", "first_offset", "next_offset", "frames", "bytes", "damage"}
DAMAGE_FIELDS = {"position", "offset", "reason"}


def config(data, **wal):
    return {"storage": {"wal": {"dir": str(data / "wal"), **wal}}}


def write(data, payloads, *, topic=TOPIC, **wal):
    with ister.open(config(data, **wal)) as log:
        opened = log.topic(topic, create=True)
        for payload in payloads:
            opened.append(payload, producer_name="shop")
            opened.flush()
    return data / "wal" / topic.strip("/")


@pytest.fixture
def directory(tmp_path):
    """A closed topic of one file."""
    return write(tmp_path, [b"%03d" % number * 50 for number in range(COUNT)])


@pytest.fixture
def rotated(tmp_path):
    """A closed topic of several files."""
    return write(tmp_path, [b"%03d" % at * 500 for at in range(COUNT)], rotate_max_bytes=4096)


def inspect(path, capsys, *options):
    """The exit code and the JSON that was printed."""
    code, printed = run_json(capsys, "inspect", "wal", path, *options)
    for file in printed["files"]:
        assert file.keys() >= FILE_FIELDS
        for bad in file["damage"]:
            assert bad.keys() >= DAMAGE_FIELDS
    return code, printed


def frame_positions(path):
    """Where each frame begins, and where the last one ends."""
    data = path.read_bytes()
    positions = [0]
    while positions[-1] < len(data) and len(positions) <= COUNT:
        _, length, _ = struct.unpack_from("<QII", data, positions[-1])
        positions.append(positions[-1] + 16 + length)
    return positions


def change(path, position, new):
    with path.open("r+b") as file:
        file.seek(position)
        file.write(new)


def flip(path, position):
    path.write_bytes(with_bit_flipped(path.read_bytes(), 8 * position + 4))


def damage(printed):
    """What is damaged in the files, without reasons."""
    fields = ("kind", "position", "end_position", "offset", "end_offset")
    return [
        tuple(bad[name] for name in fields) for file in printed["files"] for bad in file["damage"]
    ]


def test_healthy_file_is_whole(directory, capsys):
    code, printed = inspect(directory / "wal.log", capsys)
    assert code == 0
    (file,) = printed["files"]
    check_fields(file, name="wal.log", first_offset=0, next_offset=COUNT, frames=COUNT, damage=[])
    check_fields(file, topic=TOPIC, codec="bincode2")
    assert file["bytes"] == (directory / "wal.log").stat().st_size
    assert 0 < file["publish_time_min"] <= file["publish_time_max"]


def test_directory_of_any_level_lists_every_file(rotated, tmp_path, capsys):
    write(tmp_path, [b"x"], topic="/default/other")
    code, of_topic = inspect(rotated, capsys)
    assert code == 0
    files = of_topic["files"]
    assert [file["name"] for file in files[:2]] == ["wal.log", "wal.1.log"]
    assert len(files) > 3
    for before, after in pairwise(files):
        assert before["next_offset"] == after["first_offset"]
    assert files[-1]["next_offset"] == COUNT
    for path in (tmp_path, tmp_path / "wal", tmp_path / "wal" / "default"):
        code, printed = inspect(path, capsys)
        assert code == 0
        assert [topic["topic"] for topic in printed["topics"]] == [TOPIC, "/default/other"]
        assert len(printed["files"]) == len(files) + 1


def test_one_rotated_file_is_judged_by_its_neighbours(rotated, capsys):
    code, printed = inspect(rotated / "wal.1.log", capsys)
    assert code == 0
    assert [file["name"] for file in printed["files"]] == ["wal.1.log"]
    last = frame_positions(rotated / "wal.1.log")[-2]
    os.truncate(rotated / "wal.1.log", last)
    code, printed = inspect(rotated / "wal.1.log", capsys)
    assert code == 1
    (bad,) = printed["files"][0]["damage"]
    assert (bad["kind"], bad["position"]) == ("damage", last)


def test_open_log_can_be_looked_at(tmp_path, capsys):
    with ister.open(config(tmp_path)) as log:
        topic = log.topic(TOPIC, create=True)
        topic.append_many([b"a", b"b"])
        topic.flush()
        code, printed = inspect(tmp_path, capsys)
    assert code == 0
    assert printed["files"][0]["frames"] == 2


def test_empty_topic_empty_log_and_empty_file_have_no_frames(tmp_path, capsys):
    with ister.open(config(tmp_path)) as log:
        code, printed = inspect(tmp_path, capsys)
        assert (code, printed["files"], printed["topics"]) == (0, [], [])
        log.topic(TOPIC, create=True)
    code, printed = inspect(tmp_path, capsys)
    assert (code, printed["files"], printed["topics"][0]["synced"]) == (0, [], 0)
    lone = tmp_path / "lone" / "wal.log"
    lone.parent.mkdir()
    lone.touch()
    code, printed = inspect(lone, capsys)
    (file,) = printed["files"]
    assert (code, file["frames"], file["bytes"], file["damage"]) == (0, 0, 0, [])


@each("tail", [b"\0" * 5000, b"\7", encode_frame(COUNT, b"x" * 100)[:-1], b"garbage" * 100])
def test_bad_bytes_above_the_watermark_are_a_torn_tail(directory, capsys, tail):
    path = directory / "wal.log"
    end = frame_positions(path)[COUNT]
    path.write_bytes(path.read_bytes()[:end] + tail)
    code, printed = inspect(directory, capsys)
    (file,) = printed["files"]
    ((kind, *place, offset, _),) = damage(printed)
    assert (kind, place, offset) == ("torn", [end, end + len(tail)], COUNT)
    assert (code, file["frames"], file["next_offset"]) == (0, COUNT, COUNT)


def test_whole_frame_behind_a_torn_one_does_not_count(directory, capsys):
    path = directory / "wal.log"
    end = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\0" * 64 + encode_frame(COUNT + 1, b"x" * 100))
    code, printed = inspect(directory, capsys)
    (bad,) = printed["files"][0]["damage"]
    assert (code, bad["kind"]) == (0, "torn")
    assert f"position {end + 64}" in bad["reason"]
    assert printed["files"][0]["next_offset"] == COUNT


def test_every_damage_of_a_file_is_listed(directory, capsys):
    """Three kinds of damage in one file, each with the range up to the next whole frame."""
    path = directory / "wal.log"
    at = frame_positions(path)
    flip(path, at[3] + 40)  # a body
    change(path, at[10], b"\xff" * 16)  # a header, and with it the way to the next frame
    change(path, at[20], b"\0" * (at[22] - at[20]))  # two frames
    code, printed = inspect(directory, capsys)
    (file,) = printed["files"]
    assert (code, file["frames"], file["next_offset"]) == (1, COUNT - 4, COUNT)
    assert damage(printed) == [
        ("damage", at[3], at[4], 3, 4),
        ("damage", at[10], at[11], 10, 11),
        ("damage", at[20], at[22], 20, 22),
    ]
    assert "crc mismatch" in file["damage"][0]["reason"]


def test_log_that_ends_below_its_watermark_is_damaged(directory, capsys):
    path = directory / "wal.log"
    at = frame_positions(path)
    os.truncate(path, at[7])
    code, printed = inspect(directory, capsys)
    assert code == 1
    (bad,) = printed["files"][0]["damage"]
    assert (bad["position"], bad["offset"], bad["end_offset"]) == (at[7], 7, COUNT)
    assert str(COUNT) in bad["reason"]


def test_without_a_checkpoint_the_end_is_torn_and_the_middle_damaged(directory, capsys):
    (directory / "wal.ckpt").unlink()
    path = directory / "wal.log"
    at = frame_positions(path)
    os.truncate(path, at[-1] - 1)
    code, printed = inspect(directory, capsys)
    assert (code, [kind for kind, *_ in damage(printed)]) == (0, ["torn"])
    assert printed["topics"][0]["checkpoint"] == "missing"
    flip(path, at[5] + 20)
    code, printed = inspect(directory, capsys)
    assert (code, [kind for kind, *_ in damage(printed)]) == (1, ["damage", "torn"])


def test_damaged_checkpoint_is_named(directory, capsys):
    flip(directory / "wal.ckpt", 20)
    code, printed = inspect(directory, capsys)
    assert (code, printed["topics"][0]["checkpoint"]) == (0, "damaged")


@pytest.mark.parametrize("missing", ["wal.log", "wal.2.log", "last"])
def test_missing_file_is_damage(rotated, missing, capsys):
    names = sorted((path.name for path in rotated.glob("wal*.log")), key=lambda n: (len(n), n))
    name = names[-1] if missing == "last" else missing
    (rotated / name).unlink()
    code, printed = inspect(rotated, capsys)
    (entry,) = [file for file in printed["files"] if file["is_missing"]]
    assert (code, entry["name"], entry["damage"][0]["reason"]) == (1, name, "file missing")


def test_damage_in_a_rotated_file_is_never_torn(rotated, capsys):
    path = rotated / "wal.1.log"
    flip(path, frame_positions(path)[-2] + 20)
    code, printed = inspect(rotated, capsys)
    assert (code, [kind for kind, *_ in damage(printed)]) == (1, ["damage"])
    assert printed["files"][1]["damage"]


def test_copy_under_another_name_stands_alone_and_links_are_followed(directory, tmp_path, capsys):
    copy = directory / "kept.bin"
    shutil.copyfile(directory / "wal.log", copy)
    os.truncate(copy, frame_positions(directory / "wal.log")[5])
    code, printed = inspect(copy, capsys)
    assert (code, printed["files"][0]["frames"]) == (0, 5)
    link = tmp_path / "link"
    link.symlink_to(directory)
    code, printed = inspect(link, capsys)
    assert (code, printed["files"][0]["frames"]) == (0, COUNT)


def test_frames_are_listed_up_to_a_limit(directory, tmp_path, capsys):
    code, printed = inspect(directory, capsys, "--frames", "--limit", "3", "--from", "5")
    assert code == 0
    lines = printed["files"][0]["frame_list"]
    at = frame_positions(directory / "wal.log")
    assert [(line["offset"], line["position"], line["size"]) for line in lines] == [
        (number, at[number], at[number + 1] - at[number]) for number in (5, 6, 7)
    ]
    assert all(line["producer"] == "shop" and line["publish_time"] > 0 for line in lines)
    write(tmp_path / "more", [b"%03d" % at * 500 for at in range(COUNT)], rotate_max_bytes=4096)
    _, printed = inspect(tmp_path / "more", capsys, "--frames", "--limit", "10")
    assert sum(len(file["frame_list"]) for file in printed["files"]) == 10


def test_people_get_a_table(directory, capsys):
    assert main(["inspect", "wal", str(directory), "--frames", "--limit", "2"]) == 0
    shown = capsys.readouterr()
    assert TOPIC in shown.out
    assert "wal.log" in shown.out
    assert "whole" in shown.out
    assert "shop" in shown.out
    assert shown.err == ""
    path = directory / "wal.log"
    flip(path, frame_positions(path)[3] + 40)
    assert main(["inspect", "wal", str(directory)]) == 1
    shown = capsys.readouterr()
    assert "DAMAGED" in shown.out
    assert "damage: wal.log position" in shown.out
    assert "damage in 1 of 1 files" in shown.err


def test_nothing_there_is_an_error(tmp_path, capsys):
    for path, words in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "no WAL files"),
        (os.devnull, "neither a file nor a directory"),
    ):
        assert main(["inspect", "wal", str(path), "--json"]) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert words in shown.err
