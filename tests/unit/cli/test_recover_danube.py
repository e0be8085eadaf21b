"""`ister recover` of a bucket that Danube wrote: layouts of all ages, whole and damaged."""

import os
from dataclasses import replace

import pytest

from ister.base.model import Layout
from ister.bucket.names import format_object_id
from ister.errors import CorruptDataError, IsterError
from tests.support.cases import each
from tests.support.commands import DataDirectory, run_json
from tests.support.danube_files import (
    BODY_OF_LAYOUT,
    TOPIC,
    DanubeBucket,
    a_danube_message,
    danube_frames,
    messages_of,
)


class Place(DataDirectory):
    """A data directory whose bucket is Danube's."""

    def __init__(self, path, **cloud):
        super().__init__(path, cloud=cloud)
        self.bucket = DanubeBucket(path / "objects")

    def records(self):
        """Every record of the topic, field by field, in order."""
        with self.open() as log:
            return [message.record for message in log.topic(TOPIC).read()]

    def recover(self, capsys, *arguments):
        """The exit code, what is said of the topic, and the errors as (message, file name)."""
        code, printed = self.run(capsys, "recover", *arguments)
        errors = [
            (e["message"], (e.get("path") or "").rpartition("/")[2]) for e in printed["errors"]
        ]
        return code, (printed["topics"] or [None])[0], errors


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.mark.parametrize("layout", BODY_OF_LAYOUT)
def test_bucket_of_every_age_is_adopted_in_place(place, capsys, layout):
    paths = [place.bucket.put(layout, *part) for part in ((0, 40), (40, 41), (41, 100))]
    before = [path.read_bytes() for path in paths]
    code, topic, errors = place.recover(capsys)
    assert (code, errors, topic["left_out"], topic["gaps"]) == (0, [], [], [])
    assert (topic["status"], topic["objects"], topic["messages"]) == ("recovered", 3, 100)
    assert place.records() == messages_of(0, 100, BODY_OF_LAYOUT[layout])
    assert [path.read_bytes() for path in paths] == before
    code, printed = run_json(capsys, "inspect", "object", paths[2])
    assert (code, printed["damage"]) == (0, [])
    assert (printed["start_offset"], printed["next_offset"], printed["frames"]) == (41, 100, 59)
    paths[2].write_bytes(before[2][:-1])
    assert run_json(capsys, "inspect", "object", paths[2])[0] == 1


@each("body", ["0.5", "0.5.1", "0.6", "0.12"])
def test_bodies_of_every_age_are_read_from_a_segment(tmp_path, capsys, body):
    place = Place(tmp_path)
    place.bucket.put("0.9", 0, 30, body=body)
    code, _, errors = place.recover(capsys)
    assert (code, errors) == (0, [])
    assert place.records() == messages_of(0, 30, body)


def test_layouts_of_all_ages_make_up_one_topic(place, capsys):
    place.bucket.put("0.5", 0, 10, body="0.12")
    place.bucket.put("0.6.2", 10, 20, body="0.6")
    place.bucket.put("0.9", 20, 30, body="0.6")
    place.bucket.put("0.9", 30, 40)
    code, topic, errors = place.recover(capsys)
    assert (code, errors, topic["objects"]) == (0, [], 4)
    assert place.records() == [
        *messages_of(0, 10, "0.12"),
        *messages_of(10, 30, "0.6"),
        *messages_of(30, 40, "0.12"),
    ]


@each("name", ["1790000009", "1790000300"])
def test_number_that_may_be_an_offset_or_a_time_is_judged_by_the_frames(tmp_path, capsys, name):
    place, start, count = Place(tmp_path), 1_790_000_000, 10
    wanted = [
        replace(message, msg_id=replace(message.msg_id, topic_offset=start + number))
        for number, message in enumerate(messages_of(0, count, "0.6"))
    ]
    path = place.bucket.put("0.6.2", start, start + count, data=danube_frames(wanted, "0.6"))
    path.rename(path.with_name(f"data-{start}-{name}.dnb1"))
    code, topic, errors = place.recover(capsys)
    assert (code, errors, topic["next_offset"]) == (0, [], start + count)
    assert place.records() == wanted


def test_topic_goes_on_behind_what_danube_wrote(place, capsys):
    place.bucket.put("0.9", 0, 25)
    place.recover(capsys)
    with place.open() as log:
        topic = log.topic(TOPIC)
        assert topic.append(b"new") == 25
        topic.flush()
        topic.upload()
    assert [m.payload for m in place.records()[24:]] == [a_danube_message(24).payload, b"new"]


def test_second_export_of_a_range_is_named_and_the_newest_is_taken(place, capsys):
    old = place.bucket.put("0.9", 0, 10)
    new = place.bucket.put("0.9", 0, 10)
    place.bucket.put("0.9", 10, 20)
    code, topic, errors = place.recover(capsys)
    assert code == 1
    assert topic["left_out"] == [f"segments/{old.name}"]
    assert errors == [(f"object not taken: segments/{new.name} has its messages", old.name)]
    assert place.records() == messages_of(0, 20, "0.12")
    assert old.exists()


@pytest.mark.parametrize("layout", BODY_OF_LAYOUT)
def test_offsets_that_only_an_overlapping_object_has_are_copied(place, capsys, layout):
    first = place.bucket.put(layout, 0, 100)
    second = place.bucket.put(layout, 80, 200)
    place.bucket.put(layout, 200, 210)
    code, topic, errors = place.recover(capsys, "--dry-run")
    assert (code, topic["status"], topic["messages"]) == (0, "planned", 210)
    assert len(topic["copied"]) == 1
    before = sorted(path.name for path in first.parent.iterdir())
    assert len(before) == 3
    code, topic, errors = place.recover(capsys)
    assert (code, errors, topic["gaps"]) == (0, [], [])
    assert topic["copied"][0].startswith("data-100-199-c")
    assert topic["left_out"][0].endswith(second.name)
    assert place.records() == messages_of(0, 210, BODY_OF_LAYOUT[layout])


def test_other_messages_with_the_same_offsets_are_named(place, capsys):
    """Goal: Danube counts from 0 again after some restarts; no message goes without a word."""
    long = place.bucket.put("0.9", 0, 30)
    other = danube_frames([a_danube_message(n, "0.6") for n in range(10)], "0.12")
    short = place.bucket.put("0.9", 0, 10, data=other)
    code, _, errors = place.recover(capsys)
    assert code == 1
    text = f"object not taken: segments/{long.name} has other messages at its offsets"
    assert errors == [(text, short.name)]
    assert place.records() == messages_of(0, 30, "0.12")


@each("layout", ["0.6.2", "0.9"])
@each("cut", [1, 17, 40])
def test_torn_object_is_taken_up_to_its_last_whole_frame(tmp_path, capsys, layout, cut):
    place, body = Place(tmp_path), BODY_OF_LAYOUT[layout]
    place.bucket.put(layout, 0, 10)
    data = danube_frames(messages_of(10, 20, body), body)
    torn = place.bucket.put(layout, 10, 20, data=data[:-cut])
    code, topic, errors = place.recover(capsys)
    assert code == 1
    assert [name for _, name in errors] == [torn.name]
    assert "are not whole frames" in errors[0][0]
    assert topic["next_offset"] == 19
    assert place.records() == messages_of(0, 19, body)
    assert torn.read_bytes() == data[:-cut]


def test_damage_in_the_midst_is_named_and_read_up_to_it(place, capsys):
    data = bytearray(danube_frames(messages_of(0, 20, "0.12")))
    data[len(danube_frames(messages_of(0, 10, "0.12"))) + 30] ^= 1
    path = place.bucket.put("0.9", 0, 20, data=bytes(data))
    code, topic, errors = place.recover(capsys)
    assert (code, topic["next_offset"]) == (1, 20)
    assert errors[0][1] == path.name
    found = []
    with place.open() as log, pytest.raises(CorruptDataError) as caught:
        found += (message.record for message in log.topic(TOPIC).read())
    assert caught.value.offset == 10
    assert found == messages_of(0, 10, "0.12")


@each(
    ("name", "data", "text"),
    [
        ("segments/data-7-1790000000.dnb1", b"not frames at all" * 9, "not an object of messages"),
        ("segments/data-7-1790000000.dnb1", b"", "not an object of messages"),
        ("objects/data-7-1790000000.dnb1", bytes(500), "not an object of messages"),
        ("objects/data-7-pending.dnb1", b"half", "an upload that was never finished"),
        ("objects/backup.dnb1", b"x", "its name is not that of an object"),
        ("old/data-0-9.dnb1", b"x", "its name is not that of an object"),
    ],
)
def test_foreign_file_is_an_error_with_its_name(tmp_path, capsys, name, data, text):
    place = Place(tmp_path)
    place.bucket.put("0.9", 0, 10)
    path = place.bucket.folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    code, topic, errors = place.recover(capsys)
    assert code == 1
    assert [found for _, found in errors] == [path.name]
    assert text in errors[0][0]
    assert name.removeprefix("objects/") in topic["left_out"]
    assert place.records() == messages_of(0, 10, "0.12")


@each("key", ["storage/topics/a b/t/segments/data-0-9.dnb1", "x/storage/topics/d/t/data-0-9.dnb1"])
def test_bucket_with_objects_elsewhere_is_an_error(tmp_path, capsys, key):
    place = Place(tmp_path)
    path = place.bucket.root / key
    path.parent.mkdir(parents=True)
    path.write_bytes(danube_frames(messages_of(0, 10, "0.12")))
    code, topic, errors = place.recover(capsys)
    assert (code, topic) == (1, None)
    assert [name for _, name in errors] == ["data-0-9.dnb1"]


def test_objects_that_were_not_adopted_are_never_collected(place, capsys):
    old = place.bucket.put("0.9", 0, 10)
    new = place.bucket.put("0.9", 0, 10)
    place.recover(capsys)
    for path in (old, new):
        os.utime(path, (0, 0))
    with place.open() as log:
        assert log.topic(TOPIC).bucket.retention.collect_orphans() == []
    assert old.exists()
    assert new.exists()


def test_deleting_an_adopted_topic_removes_its_segments(place, capsys):
    place.bucket.put("0.9", 0, 10)
    place.bucket.put("0.9", 10, 20)
    place.recover(capsys)
    with place.open() as log:
        log.delete(TOPIC)
    left = [path for path in place.bucket.root.rglob("*") if path.is_file()]
    assert [path.name for path in left if path.parent.name != "metadata"] == ["bucket.json"]


def test_topic_of_that_name_is_not_created_over_danubes_objects(place):
    place.bucket.put("0.9", 0, 10)
    with place.open() as log, pytest.raises(IsterError, match="`ister recover`"):
        log.topic(TOPIC, create=True)


# -- the layout `segments` --------------------------------------------------------------------


def fill(place, count):
    with place.open() as log:
        topic = log.topic(TOPIC, create=True)
        for _ in range(count):
            topic.append(b"%d" % topic.watermarks.next)
        topic.flush()
        topic.upload()


def test_segments_of_several_owners_are_read_and_recovered(tmp_path, capsys):
    place = Place(tmp_path, layout="segments")
    for _ in range(3):
        fill(place, 10)
    names = sorted(path.name for path in (place.bucket.folder / "segments").iterdir())
    assert not (place.bucket.folder / "objects").exists()
    assert len(names) == 3
    before = place.records()
    assert [record.payload for record in before] == [b"%d" % n for n in range(30)]
    place.lose_metadata()
    code, topic, errors = place.recover(capsys)
    assert (code, errors, topic["objects"], topic["left_out"]) == (0, [], 3, [])
    assert place.records() == before
    path = place.bucket.folder / "segments" / names[0]
    code, printed = run_json(capsys, "inspect", "object", path)
    assert (code, printed["start_offset"], printed["next_offset"], printed["epoch"]) == (
        0,
        0,
        10,
        1,
    )


def test_owners_never_write_to_the_same_segment(tmp_path):
    """Goal: a fenced owner that still uploads cannot replace its successor's object."""
    ids = {
        format_object_id(0, 10, epoch, tag=tag, layout=Layout.SEGMENTS)
        for epoch in (1, 2, 3)
        for tag in (None, "00000000", "00000001")
    }
    assert len(ids) == 9


def test_fenced_owners_segment_is_left_out(tmp_path, capsys):
    place = Place(tmp_path, layout="segments")
    fill(place, 10)  # epoch 1
    fill(place, 10)  # epoch 2
    late = format_object_id(10, 15, 1, layout=Layout.SEGMENTS)
    source = next((place.bucket.folder / "segments").glob("data-0-*"))
    (place.bucket.folder / late).write_bytes(source.read_bytes()[:100])
    place.lose_metadata()
    code, topic, _ = place.recover(capsys)
    assert (code, topic["left_out"], topic["next_offset"]) == (0, [late], 20)


def test_topic_changes_its_layout_both_ways(tmp_path, capsys):
    for layout in ("objects", "segments", "objects"):
        place = Place(tmp_path, layout=layout)
        fill(place, 10)
    assert [record.payload for record in place.records()] == [b"%d" % n for n in range(30)]
    place.lose_metadata()
    code, topic, errors = place.recover(capsys)
    assert (code, errors, topic["objects"]) == (0, [], 3)
