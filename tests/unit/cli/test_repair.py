"""`ister repair`: arguments, what is asked before messages are given up, output and exit codes."""

import shutil
import sys

import pytest

from ister.base.clock import SystemClock
from ister.base.model import TopicName, TopicState
from ister.bucket.names import TopicKeys
from ister.cli import repair as command
from ister.cli.main import main
from ister.config import load_config
from ister.errors import ConflictError, UnavailableError
from ister.format.records import Progress, encode_progress
from ister.rescue.repair import Repaired
from ister.topic.stores import metadata_of, open_metadata
from tests.support.builders import with_bit_flipped
from tests.support.commands import TOPIC, DataDirectory, Terminal
from tests.support.machine import eventually
from tests.support.stores import save_cursor

COUNT = 30
TIERED = 20
ROTATING = {"rotate_max_bytes": 4096, "retention": {"size_mb": 0}}
PAYLOADS = [b"%03d" % number * 100 for number in range(COUNT)]
FIRST = "data-0-9.dnb1"


def write(place, name=TOPIC):
    """Two objects of ten messages each, and ten messages in the local files alone."""
    with place.open() as log:
        topic = log.topic(name, create=True)
        for first in range(0, COUNT, 10):
            for at in (first, first + 5):
                topic.append_many(PAYLOADS[at : at + 5])
                topic.flush()
            if first < TIERED:
                topic.upload()
    return place


def read(place):
    with place.open() as log:
        return [message.payload for message in log.topic(TOPIC).read()]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Made once: a disk takes its time over every sync."""
    return write(DataDirectory(tmp_path_factory.mktemp("written") / "data")).path


@pytest.fixture
def place(tmp_path, written):
    """A copy of the topic in one file."""
    shutil.copytree(written, tmp_path / "data")
    return DataDirectory(tmp_path / "data")


@pytest.fixture
def cold(tmp_path):
    """A topic in several files, without those that are tiered."""
    place = write(DataDirectory(tmp_path / "data", wal=ROTATING))
    with place.open() as log:
        assert log.topic(TOPIC).bucket.retention.trim() > 0
    return place


def flip(path, position):
    path.write_bytes(with_bit_flipped(path.read_bytes(), 8 * position))


def repair(place, capsys, *arguments):
    """The exit code and the JSON that was printed."""
    code, printed = place.run(capsys, "repair", *arguments)
    assert printed.keys() >= {"ok", "job", "topics", "errors"}
    assert (printed["job"], printed["ok"]) == ("repair", code == 0)
    for error in printed["errors"]:
        assert error.keys() >= {"code", "message", "topic", "offset"}
    return code, printed


def repaired(place, capsys, *arguments):
    """The exit code, and what is said of the only topic."""
    code, printed = repair(place, capsys, *arguments)
    (topic,) = printed["topics"]
    return code, topic


def statuses(printed):
    return [(topic["topic"], topic["status"]) for topic in printed["topics"]]


def test_damaged_file_is_replaced_once(place, capsys):
    flip(place.files / "wal.log", 1000)
    whole = {"topic": TOPIC, "objects": [], "gives_up": None}
    rewritten = {"status": "repaired", "local_frames": COUNT - TIERED}
    assert repaired(place, capsys) == (0, whole | rewritten)
    assert (place.files / "wal.log.aside").exists()
    assert read(place) == PAYLOADS
    assert repaired(place, capsys) == (0, whole | {"status": "whole", "local_frames": None})


def test_object_that_no_file_has_any_more_cannot_be_repaired(cold, capsys):
    (cold.objects() / FIRST).unlink()
    code, printed = repair(cold, capsys)
    assert (code, statuses(printed)) == (1, [(TOPIC, "damaged")])
    (error,) = printed["errors"]
    assert (error["code"], error["topic"], error["offset"]) == ("DATA_LOSS", TOPIC, 0)
    assert (error["start_offset"], error["next_offset"]) == (0, 10)
    assert main(["repair", "--config", str(cold.config)]) == 1
    shown = capsys.readouterr()
    assert "damaged" in shown.out
    assert "offsets 0 up to, not including, 10 are in no tier" in shown.err


def test_damaged_object_is_repaired_after_its_metadata_was_recovered(place, capsys):
    flip(place.objects() / FIRST, 1000)
    place.lose_metadata()
    assert main(["recover", "--config", str(place.config)]) == 1
    code, topic = repaired(place, capsys)
    assert (code, topic["status"]) == (0, "repaired")


def test_named_topics_alone_are_repaired_and_an_unknown_one_fails_alone(place, capsys):
    write(place, "/default/other")
    (place.objects() / FIRST).unlink()
    code, printed = repair(place, capsys, "/default/other", "/default/none")
    assert code == 1
    assert statuses(printed) == [("/default/none", "failed"), ("/default/other", "whole")]
    assert [(e["code"], e["topic"]) for e in printed["errors"]] == [("NOT_FOUND", "/default/none")]
    code, printed = repair(place, capsys)
    assert statuses(printed) == [(TOPIC, "repaired"), ("/default/other", "whole")]


def test_log_that_is_open_is_refused_with_what_to_do(place, capsys):
    with place.open():
        code, printed = repair(place, capsys)
    assert (code, printed["topics"]) == (1, [])
    assert printed["errors"][0]["code"] == "ABORTED"
    assert "stop the broker" in printed["errors"][0]["hint"]


@pytest.mark.parametrize("arguments", [[], [TOPIC, "--give-up", "--yes"]])
def test_sealed_topic_is_sealed_again(place, capsys, arguments):
    with place.open() as log:
        assert log.seal(TOPIC) == COUNT
    if arguments:
        (place.objects() / FIRST).unlink()
    assert repair(place, capsys, *arguments)[0] == 0
    with DataDirectory(place.path, node="-b").open() as log:
        assert log.topic(TOPIC).append(b"next") == COUNT


# -- taking over ----------------------------------------------------------------------------------


def test_topics_of_another_node_are_left_alone_unless_named(place, capsys):
    other = DataDirectory(place.path, node="-b")
    code, topic = repaired(other, capsys)
    assert (code, topic["status"]) == (0, "skipped")
    code, printed = repair(other, capsys, TOPIC)
    assert (code, statuses(printed)) == (1, [(TOPIC, "failed")])
    assert printed["errors"][0]["code"] == "ABORTED"
    assert read(place) == PAYLOADS


def test_take_over_in_a_script_needs_yes_and_lists_what_is_given_up(place, capsys):
    """Goal: no script gives messages up by the way; the refusal names their offsets."""
    with place.open() as log:
        save_cursor(log.topic(TOPIC).bucket.owned, "s", 25)
    shutil.rmtree(place.wal)
    other = DataDirectory(place.path, node="-b")
    code, printed = repair(other, capsys, TOPIC, "--take-over")
    assert (code, printed["topics"]) == (1, [])
    (error,) = printed["errors"]
    assert f"{TOPIC} loses " in error["message"]
    assert "--yes" in error["hint"]
    with other.open() as log, pytest.raises(ConflictError):
        log.topic(TOPIC)
    code, topic = repaired(other, capsys, TOPIC, "--take-over", "--yes")
    assert (code, topic["status"]) == (0, "whole")
    assert topic["gives_up"] == {"start": TIERED, "known_end": 25}
    assert read(other) == PAYLOADS[:TIERED]


def test_take_over_that_gives_nothing_up_needs_no_yes(place, capsys):
    code, topic = repaired(place, capsys, TOPIC, "--take-over")
    assert (code, topic["gives_up"]) == (0, None)
    assert read(place) == PAYLOADS


def test_topic_whose_files_are_lost_says_so_and_goes_on_when_told_to(place, capsys):
    shutil.rmtree(place.files)
    code, printed = repair(place, capsys)
    assert (code, statuses(printed)) == (1, [(TOPIC, "failed")])
    assert printed["errors"][0]["offset"] == TIERED
    assert repair(place, capsys, TOPIC, "--take-over")[0] == 1
    assert repaired(place, capsys, TOPIC, "--take-over", "--yes")[1]["status"] == "whole"
    assert read(place) == PAYLOADS[:TIERED]


def test_taking_over_is_asked_for_on_a_terminal(monkeypatch, place):
    """Goal: nobody gives messages up by a slip; the question says which."""
    shutil.rmtree(place.wal)
    other = DataDirectory(place.path, node="-b")
    arguments = ["repair", TOPIC, "--take-over", "--config", str(other.config)]
    for answer, code in (("n\n", 1), ("y\n", 0)):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        monkeypatch.setattr(sys, "stderr", shown := Terminal())
        assert main(arguments) == code
        assert f"{TOPIC} loses all offsets from {TIERED} on" in shown.getvalue()
        assert f"Take {TOPIC} over" in shown.getvalue()


def test_lease_is_kept_while_a_repair_takes_its_time(place, capsys, monkeypatch):
    """Goal: nobody may take a topic away in the middle, even when a renewal fails."""
    place.write(metadata={"lease_ttl_seconds": 2})
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
    assert repair(place, capsys)[0] == 0


# -- usage and output -----------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--take-over"], ["--give-up"], [TOPIC, "--dry-run"]])
def test_arguments_that_make_no_sense_are_refused(place, capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main(["repair", "--config", str(place.config), *arguments])
    assert stop.value.code == 2
    assert "needs" in capsys.readouterr().err


def test_log_without_a_bucket_is_refused(tmp_path, capsys):
    place = DataDirectory(tmp_path / "data", mode="local_only")
    code, printed = repair(place, capsys)
    assert (code, printed["errors"][0]["code"]) == (1, "INVALID_ARGUMENT")
    assert "--give-up" in printed["errors"][0]["hint"]


def test_people_get_a_table(place, tmp_path, capsys):
    (place.objects() / FIRST).unlink()
    for says in (f"uploaded again: {TOPIC} {FIRST}", "whole"):
        assert main(["repair", "--data", str(place.path)]) == 0
        shown = capsys.readouterr()
        assert says in shown.out
    assert shown.err == ""
    (tmp_path / "empty").mkdir()
    assert main(["repair", "--data", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == "no topics\n"


# -- giving up ------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path):
    """A log without a bucket whose files are a backup: the checkpoint was copied last."""
    place = DataDirectory(tmp_path / "data", mode="local_only")
    with place.open() as log:
        topic = log.topic(TOPIC, create=True)
        topic.append_many(PAYLOADS)
        topic.flush()
    path = place.files / "wal.log"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return place


def give_up(place, capsys, *arguments):
    return repaired(place, capsys, TOPIC, "--give-up", *arguments)


def state(place):
    with place.open() as log:
        return log.topic(TOPIC).state


def test_log_without_a_bucket_gives_up_what_its_files_have_lost(local, capsys):
    code, topic = give_up(local, capsys, "--dry-run")
    assert (code, topic["status"]) == (0, "damaged")
    (((start, end),), next_offset) = topic["gives_up"].values()
    assert 0 < start < end == next_offset == COUNT
    code, printed = repair(local, capsys, TOPIC, "--give-up")
    assert (code, printed["topics"]) == (1, [])
    assert f"{TOPIC} loses the offsets " in printed["errors"][0]["message"]
    assert "--yes" in printed["errors"][0]["hint"]
    assert state(local) is TopicState.QUARANTINED, "nothing has changed"
    code, topic = give_up(local, capsys, "--yes")
    assert (code, topic["status"]) == (0, "repaired")
    assert topic["gives_up"] == {"ranges": [[start, end]], "next_offset": COUNT}
    with local.open() as log:
        assert log.topic(TOPIC).append(b"next") == COUNT
    assert read(local) == [*PAYLOADS[:start], b"next"]
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


def test_topic_of_which_the_bucket_has_nothing_left_is_given_up(cold, capsys):
    shutil.rmtree(cold.objects().parent)
    code, topic = give_up(cold, capsys, "--yes")
    assert (code, topic["status"]) == (0, "repaired")
    (((start, end),), next_offset) = topic["gives_up"].values()
    assert (start, next_offset) == (0, COUNT)
    assert read(cold) == PAYLOADS[end:]


@pytest.mark.parametrize("lost", ["objects", "metadata"])
def test_giving_up_older_files_names_what_the_bucket_has_lost_and_not_what_it_has(
    place, capsys, tmp_path, lost
):
    """Goal: what is confirmed is what is given up, and what the older files have is kept."""
    with place.open():
        pass
    copies = {name: tmp_path / name for name in ("files", "metadata.db")}
    shutil.copytree(place.files, copies["files"])
    shutil.copy(place.path / "metadata.db", copies["metadata.db"])
    known = set(place.objects().iterdir())
    with place.open() as log:
        topic = log.topic(TOPIC)
        topic.append_many([b"in the bucket"] * 10)
        topic.upload()
        topic.append_many([b"in files"] * 5)
        topic.flush()
    (made,) = set(place.objects().iterdir()) - known
    shutil.rmtree(place.files)
    shutil.copytree(copies["files"], place.files)
    if lost == "objects":
        made.unlink()
    else:
        shutil.copy(copies["metadata.db"], place.path / "metadata.db")
        assert main(["metadata", "accept", "--yes", "--data", str(place.path)]) == 0
    planned = give_up(place, capsys, "--dry-run")[1]["gives_up"]
    first = COUNT if lost == "objects" else COUNT + 10
    assert planned["ranges"][0][0] == first
    code, topic = give_up(place, capsys, "--yes")
    assert (code, topic["gives_up"]) == (0, planned)
    with place.open() as log:
        topic = log.topic(TOPIC)
        assert topic.watermarks.next == planned["next_offset"]
        assert len(list(topic.read())) == first


def test_older_files_are_given_up(place, capsys, tmp_path):
    shutil.copytree(place.files, tmp_path / "older")
    with place.open() as log:
        log.topic(TOPIC).append(b"lost")
    shutil.rmtree(place.files)
    shutil.copytree(tmp_path / "older", place.files)
    assert give_up(place, capsys, "--dry-run")[1]["gives_up"]["ranges"] == [[COUNT, COUNT + 1]]
    code, topic = give_up(place, capsys, "--yes")
    assert (code, topic["status"]) == (0, "repaired")
    assert read(place) == PAYLOADS
    with place.open() as log:
        assert log.topic(TOPIC).append(b"next") == COUNT + 1
