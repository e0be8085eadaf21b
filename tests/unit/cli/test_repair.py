"""`ister repair`: each tier lost something, or both did, and the other one has it or has not."""

import io
import json
import shutil
import sys

import pytest
import yaml

from ister.base.clock import SystemClock
from ister.base.model import TopicName, TopicState
from ister.bucket.names import TopicKeys
from ister.cli import repair as command
from ister.cli.main import main
from ister.config import load_config
from ister.errors import ConflictError, UnavailableError
from ister.format.records import Progress, encode_progress
from ister.rescue.repair import Repaired
from ister.topic.log import Log
from ister.topic.stores import metadata_of, open_metadata
from tests.support.builders import with_bit_flipped
from tests.support.machine import eventually
from tests.support.stores import save_cursor

TOPIC = "/default/orders"
COUNT = 30
TIERED = 20
ROTATING = {"rotate_max_bytes": 4096, "retention": {"size_mb": 0}}
PAYLOADS = [b"%03d" % number * 100 for number in range(COUNT)]


class Place:
    """A data directory with a config file, and what tests do to it."""

    def __init__(self, path, *, node="", **settings):
        wal = {"dir": str(path / f"wal{node}"), **settings.pop("wal", {})}
        shared = {
            "cloud": {"root": str(path / "objects")},
            "metadata": {"path": str(path / "metadata.db"), "lease_ttl_seconds": 30},
        }
        if settings.get("mode") == "local_only":
            shared = {}
        path.mkdir(exist_ok=True)
        self.path = path
        self.config = path / f"ister{node}.yml"
        self.config.write_text(yaml.safe_dump({"storage": {**shared, **settings, "wal": wal}}))
        self.files = path / f"wal{node}" / "default" / "orders"
        self.objects = path / "objects" / "storage" / "topics" / "default" / "orders" / "objects"

    def open(self):
        return Log(load_config(str(self.config)), background=False)

    def write(self, name=TOPIC):
        """Two objects of ten messages each, and ten messages in the local files alone."""
        with self.open() as log:
            topic = log.topic(name, create=True)
            for first in range(0, COUNT, 10):
                for at in (first, first + 5):
                    topic.append_many(PAYLOADS[at : at + 5])
                    topic.flush()
                if first < TIERED:
                    topic.upload()
        return self

    def read(self, *, take_over=False):
        with self.open() as log:
            return [message.payload for message in log.topic(TOPIC, take_over=take_over).read()]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A topic in one file, made once: a disk takes its time over every sync."""
    return Place(tmp_path_factory.mktemp("written") / "data").write().path


@pytest.fixture(scope="module")
def written_rotated(tmp_path_factory):
    """A topic in several files."""
    return Place(tmp_path_factory.mktemp("rotated") / "data", wal=ROTATING).write().path


@pytest.fixture
def place(tmp_path, written):
    """A copy of the topic in one file."""
    shutil.copytree(written, tmp_path / "data")
    return Place(tmp_path / "data")


@pytest.fixture
def rotated(tmp_path, written_rotated):
    """A copy of the topic in several files, of which those that are tiered may go."""
    shutil.copytree(written_rotated, tmp_path / "data")
    return Place(tmp_path / "data", wal=ROTATING)


def flip(path, position):
    path.write_bytes(with_bit_flipped(path.read_bytes(), 8 * position))


def repair(place, capsys, *arguments):
    """The exit code and the JSON that was printed."""
    code = main(["repair", "--config", str(place.config), "--json", *arguments])
    printed = json.loads(capsys.readouterr().out)
    assert printed.keys() >= {"ok", "job", "topics", "errors"}
    assert printed["job"] == "repair"
    assert printed["ok"] is (code == 0)
    for topic in printed["topics"]:
        assert topic.keys() >= {"topic", "status", "local_frames", "objects"}
    for error in printed["errors"]:
        assert error.keys() >= {"code", "message", "topic", "offset"}
    return code, printed


def only(printed):
    (topic,) = printed["topics"]
    return topic


def test_whole_topic_is_left_as_it_is(place, capsys):
    names = sorted(path.name for path in place.objects.iterdir())
    code, printed = repair(place, capsys)
    assert code == 0
    assert only(printed) == {
        "topic": TOPIC,
        "status": "whole",
        "local_frames": None,
        "objects": [],
        "gives_up": None,
    }
    assert sorted(path.name for path in place.objects.iterdir()) == names
    assert place.read() == PAYLOADS


def test_damaged_file_whose_range_is_in_the_bucket_is_replaced(place, capsys):
    flip(place.files / "wal.log", 1000)
    code, printed = repair(place, capsys)
    assert code == 0
    assert only(printed) == {
        "topic": TOPIC,
        "status": "repaired",
        "local_frames": COUNT - TIERED,
        "objects": [],
        "gives_up": None,
    }
    assert (place.files / "wal.log.aside").exists()
    assert place.read() == PAYLOADS
    with place.open() as log:
        assert log.topic(TOPIC).append(b"next") == COUNT
    code, printed = repair(place, capsys)
    assert (code, only(printed)["status"]) == (0, "whole")


def test_object_that_no_file_has_any_more_cannot_be_repaired(rotated, capsys):
    with rotated.open() as log:
        assert log.topic(TOPIC).bucket.retention.trim() > 0
    (rotated.objects / "data-0-9.dnb1").unlink()
    code, printed = repair(rotated, capsys)
    assert code == 1
    assert (only(printed)["status"], only(printed)["objects"]) == ("damaged", [])
    (error,) = printed["errors"]
    assert (error["code"], error["topic"], error["offset"]) == ("DATA_LOSS", TOPIC, 0)
    assert (error["start_offset"], error["next_offset"]) == (0, 10)
    assert main(["repair", "--config", str(rotated.config)]) == 1
    shown = capsys.readouterr()
    assert "damaged" in shown.out
    assert "offsets 0 up to, not including, 10 are in no tier" in shown.err


def test_damaged_object_is_repaired_after_its_metadata_was_recovered(place, capsys):
    flip(place.objects / "data-0-9.dnb1", 1000)
    for path in place.path.glob("metadata.db*"):
        path.unlink()
    assert main(["recover", "--config", str(place.config)]) == 1
    capsys.readouterr()
    code, printed = repair(place, capsys)
    assert (code, only(printed)["status"]) == (0, "repaired")


def test_quick_repair_looks_at_sizes_alone(place, capsys):
    flip(place.objects / "data-0-9.dnb1", 1000)
    code, printed = repair(place, capsys, "--quick")
    assert (code, only(printed)["status"]) == (0, "whole")
    (place.objects / "data-10-19.dnb1").unlink()
    code, printed = repair(place, capsys, "--quick")
    assert (code, only(printed)["objects"]) == (0, ["data-10-19.dnb1"])
    code, printed = repair(place, capsys)
    assert (code, only(printed)["objects"]) == (0, ["data-0-9.dnb1"])


def test_named_topics_alone_are_repaired(place, capsys):
    place.write("/default/other")
    (place.objects / "data-0-9.dnb1").unlink()
    code, printed = repair(place, capsys, "/default/other")
    assert (code, only(printed)["topic"], only(printed)["status"]) == (0, "/default/other", "whole")
    code, printed = repair(place, capsys)
    assert [(t["topic"], t["status"]) for t in printed["topics"]] == [
        (TOPIC, "repaired"),
        ("/default/other", "whole"),
    ]


def test_unknown_topic_fails_alone(place, capsys):
    code, printed = repair(place, capsys, TOPIC, "/default/none")
    assert code == 1
    assert [(t["topic"], t["status"]) for t in printed["topics"]] == [
        ("/default/none", "failed"),
        (TOPIC, "whole"),
    ]
    assert [(e["code"], e["topic"]) for e in printed["errors"]] == [("NOT_FOUND", "/default/none")]


def test_log_that_is_open_is_refused(place, capsys):
    with place.open():
        code, printed = repair(place, capsys)
    assert (code, printed["topics"]) == (1, [])
    assert printed["errors"][0]["code"] == "ABORTED"
    assert "in use by process" in printed["errors"][0]["message"]


def test_sealed_topic_is_sealed_again(place, capsys):
    with place.open() as log:
        assert log.seal(TOPIC) == COUNT
    code, printed = repair(place, capsys)
    assert (code, only(printed)["status"]) == (0, "whole")
    other = Place(place.path, node="-b")
    with other.open() as log:
        topic = log.topic(TOPIC)
        assert topic.append(b"next") == COUNT


def test_topics_of_another_node_are_left_alone_unless_named(place, capsys):
    other = Place(place.path, node="-b")
    code, printed = repair(other, capsys)
    assert (code, only(printed)["status"]) == (0, "skipped")
    code, printed = repair(other, capsys, TOPIC)
    assert (code, only(printed)["status"]) == (1, "failed")
    assert printed["errors"][0]["code"] == "ABORTED"
    assert place.read() == PAYLOADS


def test_topic_of_a_node_whose_disk_is_lost_is_taken_over(place, capsys):
    with place.open() as log:
        save_cursor(log.topic(TOPIC).bucket.owned, "s", 25)
    shutil.rmtree(place.path / "wal")
    other = Place(place.path, node="-b")
    code, printed = repair(other, capsys, TOPIC, "--take-over", "--yes")
    assert (code, only(printed)["status"]) == (0, "whole")
    assert only(printed)["gives_up"] == {"start": TIERED, "known_end": 25}
    assert other.read() == PAYLOADS[:TIERED]


def test_take_over_in_a_script_needs_yes_and_lists_what_is_given_up(place, capsys):
    """Goal: no script gives messages up by the way; the refusal names their offsets."""
    shutil.rmtree(place.path / "wal")
    other = Place(place.path, node="-b")
    code, printed = repair(other, capsys, TOPIC, "--take-over")
    assert (code, printed["topics"]) == (1, [])
    (error,) = printed["errors"]
    assert f"{TOPIC} loses all offsets from {TIERED} on" in error["message"]
    assert "--yes" in error["hint"]
    with other.open() as log, pytest.raises(ConflictError, match="not handed it over"):
        log.topic(TOPIC)
    assert main(["repair", "--config", str(other.config), TOPIC, "--take-over", "--yes"]) == 0
    assert f"loses all offsets from {TIERED} on" in capsys.readouterr().err
    assert other.read() == PAYLOADS[:TIERED]


def test_take_over_that_gives_nothing_up_needs_no_yes(place, capsys):
    code, printed = repair(place, capsys, TOPIC, "--take-over")
    assert (code, only(printed)["gives_up"]) == (0, None)
    assert place.read() == PAYLOADS


def test_topic_whose_files_are_lost_says_so_and_goes_on_when_told_to(place, capsys):
    shutil.rmtree(place.files)
    code, printed = repair(place, capsys)
    assert (code, only(printed)["status"], printed["errors"][0]["offset"]) == (1, "failed", TIERED)
    assert repair(place, capsys, TOPIC, "--take-over")[0] == 1
    code, printed = repair(place, capsys, TOPIC, "--take-over", "--yes")
    assert (code, only(printed)["status"]) == (0, "whole")
    assert place.read() == PAYLOADS[:TIERED]


def test_take_over_needs_names(place, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["repair", "--config", str(place.config), "--take-over"])
    assert stop.value.code == 2
    assert "needs topic names" in capsys.readouterr().err


def test_lease_is_kept_while_a_repair_takes_its_time(place, capsys, monkeypatch):
    """Goal: nobody may take a topic away in the middle, even when a renewal fails."""
    settings = place.config.read_text()
    place.config.write_text(settings.replace("ttl_seconds: 30", "ttl_seconds: 2"))
    seen = []

    def slow(log, name, **_):
        stores = log.stores
        renew = stores.membership.renew

        def failing_once():
            seen.append(stores.membership.lease.valid_until)
            if len(seen) == 1:
                raise UnavailableError("no answer")
            renew()

        stores.membership.renew = failing_once
        eventually(lambda: len(seen) >= 3)
        assert stores.membership.is_valid
        assert seen[-1] > seen[0]
        return Repaired(topic=str(name))

    monkeypatch.setattr(command, "try_repair", slow)
    code, _ = repair(place, capsys)
    assert code == 0


def test_log_without_a_bucket_is_refused(tmp_path, capsys):
    for mode in ["local_only", "memory"]:
        path = tmp_path / "ister.yml"
        wal = {} if mode == "memory" else {"wal": {"dir": str(tmp_path / "wal")}}
        path.write_text(yaml.safe_dump({"storage": {"mode": mode, **wal}}))
        assert main(["repair", "--config", str(path), "--json"]) == 1, mode
        assert "no bucket" in json.loads(capsys.readouterr().out)["errors"][0]["message"], mode


def test_people_get_a_table(place, capsys):
    (place.objects / "data-0-9.dnb1").unlink()
    assert main(["repair", "--data", str(place.path)]) == 0
    shown = capsys.readouterr()
    assert f"uploaded again: {TOPIC} data-0-9.dnb1" in shown.out
    assert main(["repair", "--data", str(place.path)]) == 0
    shown = capsys.readouterr()
    assert "whole" in shown.out
    assert shown.err == ""


def test_empty_log_has_nothing_to_repair(tmp_path, capsys):
    place = Place(tmp_path / "data")
    assert main(["repair", "--config", str(place.config)]) == 0
    assert capsys.readouterr().out == "no topics\n"


def test_taking_over_is_asked_for_on_a_terminal(monkeypatch, place):
    """Goal: nobody gives messages up by a slip; the question says which."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shutil.rmtree(place.path / "wal")
    other = Place(place.path, node="-b")
    arguments = ["repair", TOPIC, "--take-over", "--config", str(other.config)]
    for answer, code in (("n\n", 1), ("y\n", 0)):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        monkeypatch.setattr(sys, "stderr", shown := Terminal())
        assert main(arguments) == code
        assert f"{TOPIC} loses all offsets from {TIERED} on" in shown.getvalue()
        assert f"Take {TOPIC} over" in shown.getvalue()


# -- giving up ------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path):
    """A log without a bucket whose files are a backup: the checkpoint was copied last."""
    place = Place(tmp_path / "data", mode="local_only")
    with place.open() as log:
        topic = log.topic(TOPIC, create=True)
        topic.append_many(PAYLOADS)
        topic.flush()
    path = place.files / "wal.log"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return place


def give_up(place, capsys, *arguments):
    code, printed = repair(place, capsys, TOPIC, "--give-up", *arguments)
    return code, only(printed)


def test_log_without_a_bucket_gives_up_what_its_files_have_lost(local, capsys):
    with local.open() as log:
        assert log.topic(TOPIC).state is TopicState.QUARANTINED
    code, topic = give_up(local, capsys, "--dry-run")
    assert (code, topic["status"]) == (0, "damaged")
    (((start, end),), next_offset) = topic["gives_up"].values()
    assert 0 < start < end == next_offset == COUNT
    with local.open() as log:
        assert log.topic(TOPIC).state is TopicState.QUARANTINED, "nothing has changed"
    code, topic = give_up(local, capsys, "--yes")
    assert (code, topic["status"]) == (0, "repaired")
    assert topic["gives_up"] == {"ranges": [[start, end]], "next_offset": COUNT}
    assert local.read() == PAYLOADS[:start]
    with local.open() as log:
        assert log.topic(TOPIC).append(b"next") == COUNT
    assert local.read() == [*PAYLOADS[:start], b"next"]
    code, topic = give_up(local, capsys, "--yes")
    assert (code, topic["status"], topic["gives_up"]["ranges"]) == (0, "whole", [])
    assert main(["inspect", "wal", str(local.files)]) == 0
    assert "given up" in capsys.readouterr().out


def test_log_without_a_bucket_continues_behind_the_cursors_of_its_broker(local, capsys):
    settings = metadata_of(load_config(str(local.config)).storage)
    store = open_metadata(settings, SystemClock())
    key = TopicKeys(settings.root_prefix, TopicName.parse(TOPIC)).progress("s")
    store.put(key, encode_progress(Progress(offset=COUNT + 7, timestamp=1, incarnation="")))
    store.close()
    code, topic = give_up(local, capsys, "--yes")
    assert (code, topic["gives_up"]["next_offset"]) == (0, COUNT + 7)


def test_topic_of_which_the_bucket_has_nothing_left_is_given_up(rotated, capsys):
    with rotated.open() as log:
        assert log.topic(TOPIC).bucket.retention.trim() > 0
    shutil.rmtree(rotated.objects.parent)
    code, topic = give_up(rotated, capsys, "--yes")
    assert (code, topic["status"]) == (0, "repaired")
    (((start, end),), next_offset) = topic["gives_up"].values()
    assert (start, next_offset) == (0, COUNT)
    assert rotated.read() == PAYLOADS[end:]


def test_older_files_are_given_up(place, capsys, tmp_path):
    shutil.copytree(place.files, tmp_path / "older")
    with place.open() as log:
        log.topic(TOPIC).append(b"lost")
    shutil.rmtree(place.files)
    shutil.copytree(tmp_path / "older", place.files)
    code, topic = give_up(place, capsys, "--dry-run")
    assert (code, topic["gives_up"]["ranges"]) == (0, [[COUNT, COUNT + 1]])
    code, topic = give_up(place, capsys, "--yes")
    assert (code, topic["status"]) == (0, "repaired")
    assert topic["gives_up"]["ranges"] == [[COUNT, COUNT + 1]]
    assert place.read() == PAYLOADS
    with place.open() as log:
        assert log.topic(TOPIC).append(b"next") == COUNT + 1


def test_sealed_topic_that_gives_up_is_sealed_again(place, capsys):
    with place.open() as log:
        log.seal(TOPIC)
    (place.objects / "data-0-9.dnb1").unlink()
    assert give_up(place, capsys, "--yes")[0] == 0
    with Place(place.path, node="-b").open() as log:
        assert log.topic(TOPIC).append(b"next") == COUNT


def test_giving_up_in_a_script_needs_yes_and_lists_what(local, capsys):
    code, printed = repair(local, capsys, TOPIC, "--give-up")
    assert (code, printed["topics"]) == (1, [])
    (error,) = printed["errors"]
    assert f"{TOPIC} loses the offsets " in error["message"]
    assert "--yes" in error["hint"]
    with local.open() as log:
        assert log.topic(TOPIC).state is TopicState.QUARANTINED


def test_log_that_a_broker_has_open_says_what_to_do(local, capsys):
    with local.open():
        code, printed = repair(local, capsys, TOPIC, "--give-up", "--yes")
    assert code == 1
    assert "stop the broker" in printed["errors"][0]["hint"]


@pytest.mark.parametrize("arguments", [["--give-up"], [TOPIC, "--dry-run"]])
def test_arguments_that_make_no_sense_are_refused(place, capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main(["repair", "--config", str(place.config), *arguments])
    assert stop.value.code == 2
    assert "needs" in capsys.readouterr().err
