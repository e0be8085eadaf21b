"""`ister recover`: the metadata is lost, damaged or incomplete, and the bucket has everything."""

import os
import shutil
import sqlite3

import pytest

from ister.cli.main import main
from ister.errors import IsterError
from ister.rescue import recover as recovery
from ister.topic.express import Express
from tests.support.commands import DataDirectory

ORDERS, OLD, SEALED, EMPTY = "/default/orders", "/default/old", "/shop/sealed", "/shop/empty"
TOPIC_FIELDS = {
    *("topic", "status", "objects", "messages", "bytes"),
    *("start_offset", "next_offset", "left_out", "gaps"),
}


def a_place(path):
    return DataDirectory(path, wal={"rotate_max_bytes": 4096, "retention": {"size_mb": 0}})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The topics, made once: a disk takes its time over every sync."""
    path = tmp_path_factory.mktemp("written") / "data"
    write_topics(a_place(path))
    return path


@pytest.fixture
def place(tmp_path, written):
    """A copy of the topics."""
    shutil.copytree(written, tmp_path / "data")
    return a_place(tmp_path / "data")


def fill(topic, count, *, first=0):
    """Messages that differ, with some syncs in between, so that files are rotated."""
    for number in range(first, first + count):
        topic.append(
            b"%03d" % number * 150, producer_name="shop", attributes={"number": str(number)}
        )
        if number % 10 == 9:
            topic.flush()
    topic.flush()


def write_topics(place):
    """Topics in every state: several owners, trimmed files, a tail, sealed, empty, old codec."""
    with place.open() as log:
        orders = log.topic(ORDERS, create=True, ack="written")
        fill(orders, 20)
        orders.upload()
        fill(log.topic(OLD, create=True, codec="bincode1"), 5)
        log.topic(OLD).upload()
        fill(log.topic(SEALED, create=True), 7)
        log.seal(SEALED)
        log.topic(EMPTY, create=True, ack="tiered")
    with place.open() as log:
        orders = log.topic(ORDERS)
        fill(orders, 20, first=20)
        orders.upload()
        assert orders.bucket.retention.trim() > 0
        fill(orders, 5, first=40)


def read(place, *names):
    """Everything that can be read and is known of each topic."""
    found = {}
    with place.open() as log:
        for name in names or log.topics():
            topic = log.topic(name)
            messages = [
                (m.offset, m.payload, m.publish_time, m.producer_name, m.attributes)
                for m in topic.read()
            ]
            record = topic.bucket.owned.record
            found[name] = {
                "messages": messages,
                "next": topic.watermarks.next,
                "ack": topic.ack,
                "codec": topic.codec,
                "incarnation": record.incarnation,
                "created_at": record.created_at,
            }
    return found


def recover(place, capsys, *arguments):
    """The exit code and the JSON that was printed."""
    code, printed = place.run(capsys, "recover", *arguments)
    assert printed.keys() >= {"ok", "job", "dry_run", "topics", "errors"}
    assert (printed["job"], printed["ok"]) == ("recover", code == 0)
    for topic in printed["topics"]:
        assert topic.keys() >= TOPIC_FIELDS
    for error in printed["errors"]:
        assert error.keys() >= {"code", "message", "topic", "offset"}
    return code, printed


def statuses(printed):
    return {topic["topic"]: topic["status"] for topic in printed["topics"]}


def test_lost_metadata_is_rebuilt_and_every_topic_reads_as_before(place, written, capsys):
    """Goal: nothing is different afterwards; what is not in the bucket yet is still in the WAL."""
    before = read(place)
    assert [len(topic["messages"]) for topic in before.values()] == [5, 45, 0, 7]
    # Opening the topics to read them has changed them; what is recovered is the state before.
    shutil.rmtree(place.path)
    shutil.copytree(written, place.path)
    place = a_place(place.path)
    place.lose_metadata()
    code, printed = recover(place, capsys)
    assert code == 0
    assert printed["metadata"]["state"] == "missing"
    assert [(t["topic"], t["status"], t["next_offset"]) for t in printed["topics"]] == [
        (OLD, "recovered", 5),
        (ORDERS, "recovered", 40),
        (EMPTY, "recovered", 0),
        (SEALED, "recovered", 7),
    ]
    orders = printed["topics"][1]
    assert (orders["objects"], orders["messages"], orders["start_offset"]) == (2, 40, 0)
    assert orders["bytes"] == sum(path.stat().st_size for path in place.objects().iterdir())
    assert (orders["left_out"], orders["gaps"]) == ([], [])
    assert read(place) == before


def test_express_object_of_a_newer_version_keeps_only_its_topics_back(tmp_path, capsys):
    place = a_place(tmp_path / "data")
    with place.open() as log:
        express = Express(log.stores)
        for name in ("/default/a", "/default/b"):
            topic = log.topic(name, create=True, ack="tiered")
            express.add(topic.bucket.uploads)
            topic.wait(topic.append(b"x"), level="synced")
            express.write_next()
    _, newer = sorted(place.path.glob("objects/storage/express/*/*/*.dnbx"))
    data = newer.read_bytes()
    newer.write_bytes(data[:-12] + (2).to_bytes(4, "little") + data[-8:])
    place.lose_metadata()
    code, printed = recover(place, capsys)
    assert code == 1
    assert [(t["topic"], t["status"], t["next_offset"]) for t in printed["topics"]] == [
        ("/default/a", "recovered", 1),
        ("/default/b", "failed", 0),
    ]
    assert [(e["code"], e["topic"]) for e in printed["errors"]] == [("UNIMPLEMENTED", "/default/b")]


def test_named_topics_alone_are_recovered_and_known_ones_stay(place, capsys):
    place.lose_metadata()
    code, printed = recover(place, capsys, ORDERS, "/default/order")
    assert (code, statuses(printed)) == (1, {"/default/order": "failed", ORDERS: "recovered"})
    (error,) = printed["errors"]
    assert (error["code"], error["topic"]) == ("NOT_FOUND", "/default/order")
    assert ORDERS in error["hint"]
    others = dict.fromkeys((OLD, SEALED, EMPTY), "recovered")
    code, printed = recover(place, capsys)
    assert (code, statuses(printed)) == (0, {**others, ORDERS: "known"})
    assert printed["topics"][1]["next_offset"] == 40


def test_dry_run_writes_nothing(place, capsys):
    place.lose_metadata()
    before = place.contents()
    code, printed = recover(place, capsys, "--dry-run")
    assert code == 0
    assert printed["dry_run"] is True
    assert set(statuses(printed).values()) == {"planned"}
    assert printed["topics"][1]["messages"] == 40
    assert place.contents() == before
    (place.path / "metadata.db").write_bytes(b"not a database" * 1000)
    before = place.contents()
    code, printed = recover(place, capsys, "--dry-run")
    assert (code, printed["metadata"]["state"]) == (0, "damaged")
    assert printed["metadata"]["set_aside"] is None
    assert place.contents() == before


@pytest.mark.parametrize("harm", ["foreign", "cut", "page"])
def test_damaged_metadata_is_set_aside(place, capsys, harm):
    path = place.path / "metadata.db"
    data = path.read_bytes()
    place.lose_metadata()
    damaged = {
        "foreign": b"something else " * 1000,
        "cut": data[: len(data) // 2],
        "page": data[:4096] + b"\xff" * (len(data) - 4096),
    }[harm]
    path.write_bytes(damaged)
    (place.path / "metadata.db-wal").write_bytes(b"left behind")
    (place.path / "metadata.db.damaged-1-wal").write_bytes(b"an earlier one")
    code, printed = recover(place, capsys)
    assert code == 0
    aside = place.path / "metadata.db.damaged-2"
    assert printed["metadata"] == {
        "location": str(path),
        "state": "damaged",
        "set_aside": str(aside),
    }
    assert len(aside.read_bytes()) == len(damaged)
    assert set(statuses(printed).values()) == {"recovered"}
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert len(read(place, ORDERS)[ORDERS]["messages"]) == 45


def test_log_that_is_open_is_refused_except_for_a_dry_run(place, capsys):
    with place.open():
        code, printed = recover(place, capsys)
        assert (code, printed["topics"], printed["errors"][0]["code"]) == (1, [], "ABORTED")
        assert str(os.getpid()) in printed["errors"][0]["message"]
        code, printed = recover(place, capsys, "--dry-run")
        assert (code, set(statuses(printed).values())) == (0, {"known"})


def test_missing_object_leaves_a_gap_that_is_named(place, capsys):
    with place.open() as log:
        log.topic(ORDERS).upload()
    (place.objects() / "data-20-39-2.dnb1").unlink()
    place.lose_metadata()
    code, printed = recover(place, capsys, ORDERS)
    assert code == 1
    (topic,) = printed["topics"]
    assert (topic["status"], topic["gaps"], topic["messages"]) == ("recovered", [[20, 40]], 25)
    (error,) = printed["errors"]
    assert (error["code"], error["topic"], error["offset"]) == ("DATA_LOSS", ORDERS, 20)
    assert (error["start_offset"], error["next_offset"]) == (20, 40)


def test_people_get_a_table_and_errors_beside_it(place, capsys):
    place.lose_metadata()
    path = place.objects() / "data-20-39-2.dnb1"
    shutil.copyfile(path, place.objects() / "data-20-39.dnb1")
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["recover", "--config", str(place.config), "--dry-run"]) == 1
    shown = capsys.readouterr()
    assert "the metadata file is missing" in shown.out
    assert "planned" in shown.out
    assert "left out of /default/orders: data-20-39.dnb1" in shown.out
    assert "ister: offsets 20 up to 40: damaged object" in shown.err
    assert "\r" not in shown.err


def test_log_without_anything_to_recover_from_is_refused(tmp_path, capsys):
    for storage, words in [
        ({"mode": "local_only"}, "no bucket"),
        ({"metadata": {"backend": "memory"}}, "nothing to recover into"),
        ({"cloud": {"backend": "memory"}}, "memory of its own process"),
        ({}, "bucket not found"),
        ({"nonsense": 1}, "unknown key"),
    ]:
        place = DataDirectory(tmp_path / "d", **storage)
        code, printed = place.run(capsys, "recover")
        assert code == 1, storage
        assert words in printed["errors"][0]["message"], storage
        assert not (tmp_path / "d" / "objects").exists(), storage


def test_store_that_fails_is_an_error_of_the_topic(place, capsys, monkeypatch):
    place.lose_metadata()

    def refuse(*_, **__):
        raise IsterError("no answer")

    monkeypatch.setattr(recovery, "rebuild_topic", refuse)
    code, printed = recover(place, capsys)
    assert code == 1
    assert set(statuses(printed).values()) == {"failed"}
    assert {error["topic"] for error in printed["errors"]} == {ORDERS, OLD, SEALED, EMPTY}
