"""`ister topics list` and `describe` without a broker, and how commands are used."""

import json

import pytest
import yaml

from ister.cli.main import main
from ister.cli.topics import _show_all
from ister.config import load_config
from ister.errors import NotFoundError, UnavailableError
from ister.topic.log import Log
from tests.support.stores import save_cursor

TOPIC = "/default/orders"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("ISTER_BROKER", "ISTER_TOKEN", "ISTER_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data directory with a topic in both tiers, one of two partitions, and an empty one."""
    path = tmp_path_factory.mktemp("written") / "ister-data"
    path.mkdir()
    config = path / "ister.yml"
    config.write_text(
        yaml.safe_dump(
            {"storage": {"wal": {"dir": str(path / "wal"), "retention": {"size_mb": 0}}}}
        )
    )
    with Log(load_config(str(config)), background=False) as log:
        topic = log.topic(TOPIC, create=True, ack="written")
        topic.append_many([b"%03d" % n for n in range(20)])
        topic.flush()
        topic.upload()
        topic.append_many([b"%03d" % n for n in range(10)])
        topic.flush()
        save_cursor(topic.bucket.owned, "billing", 12)
        for number in range(2):
            log.topic(f"/default/parts-part-{number}", create=True)
        log.topic("/other/empty", create=True)
    return config


@pytest.fixture
def run(data, capsys):
    def call(*arguments, config=data):
        place = ["--config", str(config)] if config is not None else []
        code = main(["topics", *arguments, *place])
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


def test_all_topics_are_listed_with_what_matters(run):
    code, out, err = run("list")
    lines = [line.split() for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [line[0] for line in lines] == [
        "TOPIC",
        TOPIC,
        "/default/parts-part-0",
        "/default/parts-part-1",
        "/other/empty",
    ]
    assert lines[1][1:6] == ["written", "30", "20", "10", "1"]
    assert lines[1][-2:] == ["1", "18"]
    _, out, _ = run("list", "--namespace", "other")
    assert [line.split()[0] for line in out.splitlines()] == ["TOPIC", "/other/empty"]


def test_the_json_of_a_list(run):
    code, out, _ = run("list", "--json")
    views = {view["topic"]: view for view in json.loads(out)["topics"]}
    view = views[TOPIC]
    assert (code, view["ack"], view["watermarks"]["next"]) == (0, "written", 30)
    assert [one["next_offset"] for one in view["files"]][-1] == 30
    assert [one["end_offset"] for one in view["objects"]] == [19]
    assert views["/default/parts-part-1"]["parent"] == "/default/parts"
    _, out, _ = run("list", "--json", "--short")
    short = {view["topic"]: view for view in json.loads(out)["topics"]}[TOPIC]
    assert not {"files", "objects", "policies"} & set(short)
    assert (short["objects_total"], short["upload_lag"]["messages"]) == (1, 10)
    assert 0 < short["upload_lag"]["bytes"] < short["files_bytes"]


def test_the_tiers_are_drawn(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    code, out, _ = run("describe", TOPIC)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith(f"{TOPIC}  open, ack written, codec bincode2")
    drawn = {line.split()[0]: line for line in lines[2:14] if line.split()}
    assert max(map(len, drawn.values())) <= 90
    assert len(drawn["bucket"].rstrip()) < len(drawn["files"].rstrip())
    assert drawn["tiered"].endswith(" 20")
    assert drawn["billing"].endswith(" 12")
    assert "1 object, " in out
    assert "10 messages" in out
    _, out, _ = run("describe", TOPIC, "--ascii", "--width", "60")
    assert out.isascii()
    assert max(map(len, out.splitlines()[2:12])) <= 60
    _, out, _ = run("describe", "/other/empty")
    assert "no messages yet" in out


def test_partitions_are_described_together(run):
    code, out, _ = run("describe", "/default/parts", "--json")
    view = json.loads(out)
    names = ["/default/parts-part-0", "/default/parts-part-1"]
    assert (code, view["partitions"], [one["topic"] for one in view["topics"]]) == (0, names, names)
    assert "of 2 partitions" in run("describe", "/default/parts")[1]


def test_a_topic_that_is_not_there(run):
    code, out, err = run("describe", "/default/oders", "--json")
    assert (code, json.loads(out)["errors"][0]["code"]) == (1, "NOT_FOUND")
    assert "did you mean /default/orders" in err


def test_the_data_directory_is_looked_at_where_no_broker_answers(data, run, monkeypatch):
    from ister.cli import connection  # noqa: PLC0415 - its default is replaced

    monkeypatch.setattr(connection, "BROKER_DEFAULT", "127.0.0.1:1")
    monkeypatch.chdir(data.parent.parent)
    code, out, err = run("describe", TOPIC, "--retry-for", "0.2", config=None)
    assert (code, out.startswith(TOPIC)) == (0, True)
    assert err == ("ister: no broker answers at 127.0.0.1:1: reading ./ister-data directly\n")
    # One that was named is asked, and nothing else.
    code, out, err = run("list", "--retry-for", "0.2", "--broker", "127.0.0.1:1", config=None)
    assert (code, out) == (1, "")
    monkeypatch.setenv("ISTER_BROKER", "127.0.0.1:1")
    assert run("list", "--retry-for", "0.2", config=None)[0] == 1
    monkeypatch.delenv("ISTER_BROKER")
    monkeypatch.setenv("ISTER_CONFIG", str(data))
    code, out, err = run("list", config=None)
    assert (code, err, TOPIC in out) == (0, "", True)


def test_a_log_without_topics(tmp_path, capsys):
    (tmp_path / "d").mkdir()
    code = main(["topics", "list", "--data", str(tmp_path / "d")])
    output = capsys.readouterr()
    assert (code, output.out) == (0, "")
    assert "no topics yet" in output.err
    assert main(["topics", "list", "--json", "--data", str(tmp_path / "d")]) == 0
    assert json.loads(capsys.readouterr().out) == {"topics": []}
    assert main(["topics", "list", "--data", str(tmp_path / "none")]) == 1


def test_one_silent_broker_does_not_hide_the_topics_of_others():
    class Half:
        @property
        def admin(self):
            return self

        def show_topic(self, name):
            if name == "/default/gone":
                raise NotFoundError("none")
            if name == "/default/silent":
                raise UnavailableError("no answer")
            return {"topic": name, "files": ["a"]}

    silent = []
    short = [
        {"topic": f"/default/{name}", "errors": [], "ack": "synced"}
        for name in ("well", "gone", "silent")
    ]
    well, known = _show_all(Half(), short, silent)
    assert well == {"topic": "/default/well", "files": ["a"]}
    assert (known["topic"], known["ack"], known["files"]) == ("/default/silent", "synced", [])
    assert [error["message"] for error in known["errors"]] == ["no answer"]
    assert len(silent) == 1
    # Of a partition nothing is known but its name.
    with pytest.raises(UnavailableError):
        _show_all(Half(), [{"topic": "/default/silent"}], silent)
