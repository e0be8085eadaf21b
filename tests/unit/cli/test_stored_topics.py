"""`ister topics describe` without a broker: both tiers, in every state that a topic may be in."""

import json
import shutil

import pytest

from ister.base.model import TopicName
from ister.cli.main import main
from tests.support.commands import TOPIC, DataDirectory, run_json
from tests.support.stores import save_cursor

COUNT = 30
TIERED = 20


def a_place(path, **storage):
    wal = {"rotate_max_bytes": 4096, "retention": {"size_mb": 0}}
    return DataDirectory(path, **storage, wal=wal)


def write(place):
    """Two objects, several files, a tail, and a subscription half way."""
    with place.open() as log:
        topic = log.topic(TOPIC, create=True, ack="written")
        for first in range(0, COUNT, 5):
            topic.append_many([b"%03d" % n * 150 for n in range(first, first + 5)])
            topic.flush()
            if log.stores is not None and first in (5, 15):
                topic.upload()
        if log.stores is not None:
            save_cursor(topic.bucket.owned, "billing", 12)
    return place


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write(a_place(tmp_path_factory.mktemp("written") / "data")).path


@pytest.fixture
def place(tmp_path, written):
    shutil.copytree(written, tmp_path / "data")
    return a_place(tmp_path / "data")


def inspect(place, capsys, *, topic=TOPIC):
    """The exit code and the JSON that was printed."""
    return place.run(capsys, "topics", "describe", topic)


def marks(*offsets):
    return dict(zip(("trimmed", "tiered", "synced", "written", "next"), offsets, strict=True))


def test_closed_topic_shows_both_tiers_and_looking_changes_nothing(place, capsys):
    before = place.contents()
    code, printed = inspect(place, capsys)
    assert place.contents() == before
    assert code == 0
    assert (printed["topic"], printed["ack"], printed["codec"]) == (TOPIC, "written", "bincode2")
    assert (printed["epoch"], printed["state"]) == (1, "open")
    assert len(printed["incarnation"]) == 16
    assert (printed["owner"], printed["sealed"], printed["errors"]) == (None, None, [])
    assert printed["watermarks"] == marks(0, TIERED, COUNT, COUNT, COUNT)
    files = printed["files"]
    assert len(files) > 2
    assert [file["first_offset"] for file in files[1:]] == [f["next_offset"] for f in files[:-1]]
    assert (files[0]["first_offset"], files[-1]["next_offset"]) == (0, COUNT)
    for file in files:
        assert file["bytes"] == (place.files / file["name"]).stat().st_size
    assert [(o["object_id"], o["start_offset"], o["end_offset"]) for o in printed["objects"]] == [
        ("data-0-9.dnb1", 0, 9),
        ("data-10-19.dnb1", 10, 19),
    ]
    assert all(len(o["checksum"]) == 14 and "offset_index" not in o for o in printed["objects"])
    (billing,) = printed["subscriptions"]
    assert (billing["name"], billing["type"]) == ("billing", None)
    assert (billing["cursor"], billing["lag"]) == (12, 18)


def test_open_topic_is_seen_as_far_as_it_is_written(place, capsys):
    with place.open() as log:
        topic = log.topic(TOPIC)
        assert topic.bucket.retention.trim() > 0
        topic.append_many([b"more"] * 3)
        topic.flush()
        code, printed = inspect(place, capsys)
        assert code == 0
        node = log.stores.membership.node
        owner = {"node": node, "epoch": 2, "broker_url": None}
        assert (printed["owner"], printed["epoch"]) == (owner, 2)
        seen, actual = printed["watermarks"], topic.watermarks
        assert (seen["trimmed"], seen["tiered"]) == (actual.trimmed, actual.tiered)
        assert (seen["written"], seen["next"]) == (COUNT + 3, COUNT + 3)
        assert COUNT <= seen["synced"] <= actual.synced
        assert printed["files"][0]["first_offset"] == actual.trimmed > 0
        topic.upload()
        code, printed = inspect(place, capsys)
        assert printed["watermarks"]["tiered"] == printed["watermarks"]["synced"] == COUNT + 3


def test_sealed_topic_has_no_files(place, capsys):
    with place.open() as log:
        log.seal(TOPIC)
    code, printed = inspect(place, capsys)
    assert code == 0
    assert printed["sealed"]["next_offset"] == COUNT
    assert (printed["files"], printed["path"], printed["owner"]) == ([], None, None)
    assert printed["watermarks"] == marks(COUNT, COUNT, COUNT, COUNT, COUNT)
    assert main(["topics", "describe", TOPIC, "--config", str(place.config)]) == 0
    assert f"at offset {COUNT}" in capsys.readouterr().out


def test_torn_tail_does_not_count(place, capsys):
    last = sorted(place.files.glob("wal.*.log"))[-1]
    with last.open("ab") as file:
        file.write(b"\x1e" + b"\0" * 40)
    code, printed = inspect(place, capsys)
    assert (code, printed["watermarks"]["next"]) == (0, COUNT)


def test_topic_without_its_checkpoint_is_read_from_its_files(place, capsys):
    (place.files / "wal.ckpt").unlink()
    code, printed = inspect(place, capsys)
    assert code == 0
    seen = printed["watermarks"]
    assert (seen["trimmed"], seen["tiered"], seen["next"]) == (0, TIERED, COUNT)
    assert seen["synced"] == printed["files"][-1]["first_offset"]


def test_files_of_a_node_that_is_not_the_last_owner_do_not_count(place, capsys):
    (place.path / "wal" / ".node").write_text("0123456789abcdef\n")
    code, printed = inspect(place, capsys)
    assert (code, printed["is_local_current"]) == (0, False)
    assert printed["watermarks"] == marks(TIERED, TIERED, TIERED, TIERED, TIERED)
    assert len(printed["files"]) > 2
    assert main(["topics", "describe", TOPIC, "--config", str(place.config)]) == 0
    assert "another node has written the topic since" in capsys.readouterr().out


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_lost_metadata_is_named_and_the_files_are_shown(place, harm, capsys):
    place.lose_metadata()
    if harm == "damaged":
        (place.path / "metadata.db").write_bytes(b"something else " * 1000)
    code, printed = inspect(place, capsys)
    assert code == 1
    assert (printed["ack"], printed["epoch"]) == ("written", None)
    assert (printed["watermarks"]["next"], printed["objects"]) == (COUNT, [])
    assert len(printed["files"]) > 2
    (error,) = printed["errors"]
    assert "ister recover" in error["hint"]
    code, printed = inspect(place, capsys, topic="/shop/other")
    assert (code, printed["errors"][0]["code"]) == (1, "NOT_FOUND")
    assert "ister recover" in printed["errors"][0]["hint"]


def test_descriptor_that_cannot_be_read_is_named(place, capsys):
    with place.open() as log:
        keys = log.stores.keys(TopicName.parse(TOPIC))
        log.stores.metadata.put(keys.descriptor(10), b"{}")
    code, printed = inspect(place, capsys)
    assert (code, printed["ack"]) == (1, "written")
    assert printed["errors"][0]["code"] == "DATA_LOSS"


def test_unknown_topic_hints_at_near_names(place, capsys):
    code, printed = inspect(place, capsys, topic="/default/order")
    assert code == 1
    (error,) = printed["errors"]
    assert (error["code"], error["topic"]) == ("NOT_FOUND", "/default/order")
    assert f"did you mean {TOPIC}?" in error["hint"]
    assert main(["topics", "describe", "/x/y", "--config", str(place.config)]) == 1
    assert f"there are: {TOPIC}" in capsys.readouterr().err


@pytest.mark.parametrize("is_open", [False, True])
def test_log_without_a_bucket_has_files_alone(tmp_path, is_open, capsys):
    place = write(a_place(tmp_path / "data", mode="local_only"))
    log = place.open() if is_open else None
    try:
        code, printed = inspect(place, capsys)
    finally:
        if log is not None:
            log.close()
    assert code == 0
    assert (printed["ack"], printed["codec"], printed["epoch"]) == ("written", "bincode2", None)
    assert printed["watermarks"] == marks(0, 0, COUNT, COUNT, COUNT)
    assert (printed["objects"], printed["subscriptions"], printed["errors"]) == ([], [], [])
    # By its directory alone nobody knows that there is to be no bucket.
    assert main(["topics", "describe", TOPIC, "--data", str(place.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["errors"] == []


def test_log_in_memory_is_refused(tmp_path, capsys):
    config = tmp_path / "ister.yml"
    config.write_text("storage: {mode: memory}")
    assert main(["topics", "describe", TOPIC, "--config", str(config), "--json"]) == 1
    assert "in memory" in json.loads(capsys.readouterr().out)["errors"][0]["message"]


def test_both_checkpoints_of_a_directory_are_shown(place, capsys):
    code, printed = run_json(capsys, "inspect", "checkpoint", place.files)
    assert (code, printed["kind"], printed["synced"]) == (0, "wal", COUNT)
    assert (printed["uploader"]["kind"], printed["uploader"]["damaged"]) == ("uploader", False)
    assert printed["uploader"]["last_committed_offset"] == TIERED - 1
    assert printed["uploader"]["last_object_id"] == "data-10-19.dnb1"
    assert main(["inspect", "checkpoint", str(place.files)]) == 0
    shown = capsys.readouterr().out
    assert "kind: wal\n" in shown
    assert "\nkind: uploader\n" in shown
    (place.files / "uploader.ckpt").unlink()
    code, printed = run_json(capsys, "inspect", "checkpoint", place.files)
    assert (code, printed["uploader"]) == (0, None)
