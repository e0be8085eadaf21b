"""`ister config`: every problem with its line, settings without secrets, an example that loads."""

import json
import os
import re
import shutil
import sys

import pytest
import yaml

import ister
from ister.cli.config_check import describe_places
from ister.cli.main import main
from ister.config import load_config
from ister.config.reference import settings
from ister.errors import ConflictError
from tests.support.commands import Terminal

SECRET = "hunter2"


BAD = """\
storage:
  ack: tired
  wal:
    dirr: ./x
    cache_capacity: many
  cloud:
    options: {secret_key: "${NOT_THERE}"}
brokr: {}
broker:
  ports: {grpc: 99999}
  auth: {jwt: {secret: [5]}}
"""


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("ISTER_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "ister.yml"
        path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
        return str(path)

    return write


def run(arguments, capsys, *, code=0):
    assert main(["config", *arguments]) == code
    return capsys.readouterr()


def run_json(arguments, capsys, *, code=0):
    return json.loads(run([*arguments, "--json"], capsys, code=code).out)


# -- check ----------------------------------------------------------------------------------


def test_check_finds_every_problem_with_its_line_and_the_nearest_key(file, capsys):
    found = run_json(["check", file(BAD)], capsys, code=1)
    assert found["ok"] is False
    assert {problem["key"]: problem["line"] for problem in found["problems"]} == {
        "storage.cloud.options.secret_key": 7,
        "storage.ack": 2,
        "storage.wal.dirr": 4,
        "storage.wal.cache_capacity": 5,
        "brokr": 8,
        "broker.ports.grpc": 10,
        "broker.auth.jwt.secret": 11,
    }
    near = {problem["key"]: problem["near"] for problem in found["problems"]}
    assert near["storage.wal.dirr"] == "storage.wal.dir"
    assert near["brokr"] == "broker"
    assert near["storage.ack"] is None


def test_check_in_words_is_a_line_for_each_problem(file, capsys):
    path = file(BAD)
    shown = run(["check", path], capsys, code=1)
    lines = shown.out.splitlines()
    assert f"{path}:4: unknown key 'storage.wal.dirr'; did you mean 'storage.wal.dir'?" in lines
    assert len(lines) == 7
    assert shown.err == f"ister: {path}: 7 problems\n"


def test_check_on_a_terminal_says_what_to_do_below(file, capsys, monkeypatch):
    path = file("storage: {wal: {dirr: x}}\n")
    shown = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", shown)
    assert main(["config", "check", path]) == 1
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue()).splitlines()
    assert lines[0] == f"{path}:1: unknown key 'storage.wal.dirr'"
    assert lines[1] == "    did you mean 'storage.wal.dir'?"


def test_check_asks_the_parts_as_well(file, capsys):
    for text, key, message in [
        ("storage: {ack: synced}\nstorage: {wal: {dir: a}}\n", "storage", "is set twice"),
        ("storage: {wal: {dir: a, dir: b}}\n", "storage.wal.dir", "on line 1 and on line 1"),
        ("storage: [", None, "not valid YAML"),
        ("storage: {mode: wal_cloud}\n", "storage.wal.dir", "is not set"),
        (
            "storage: {wal: {dir: a}, cloud: {backend: s3, root: nonsense}}\n",
            "storage.cloud",
            "s3://bucket/prefix",
        ),
        (
            "storage: {wal: {dir: a}}\nbroker: {host: 0.0.0.0}\n",
            "broker.host",
            "every client that reaches it has all rights",
        ),
        (
            "storage: {wal: {dir: a}}\nbroker: {tls: {cert_file: nowhere.pem}}\n",
            "broker.tls",
            "needs both",
        ),
        (
            "storage: {wal: {dir: a}}\nbroker: {auth: {mode: token}}\n",
            "broker.auth",
            "no way to authenticate",
        ),
        (
            "storage: {wal: {dir: a}}\nbroker: {auth: {api_keys_file: k}}\n",
            "broker.auth",
            "broker.auth.mode is 'none'",
        ),
    ]:
        (problem,) = run_json(["check", file(text)], capsys, code=1)["problems"]
        assert problem["key"] == key, text
        assert message in problem["message"], text


def test_check_asks_whether_the_grpc_engine_can_be_used(file, capsys, monkeypatch):
    monkeypatch.setattr("ister.broker.rpc.native_engine.native_refusal", lambda: "not installed")
    path = file("storage: {wal: {dir: a}}\nbroker: {grpc: {engine: native}}\n")
    (problem,) = run_json(["check", path], capsys, code=1)["problems"]
    assert problem["key"] == "broker.grpc.engine"
    assert "cannot be used here: not installed" in problem["message"]
    path = file(
        "storage: {wal: {dir: a}}\n"
        "broker: {grpc: {engine: native}, tls: {cert_file: c.pem, key_file: k.pem}}\n"
    )
    problems = run_json(["check", path], capsys, code=1)["problems"]
    engine = {one["key"]: one["message"] for one in problems}["broker.grpc.engine"]
    assert "cannot serve TLS" in engine


def test_check_finds_problems_of_the_environment(file, capsys, monkeypatch):
    monkeypatch.setenv("ISTER_STORAGE__WALL__DIR", "x")
    monkeypatch.setenv("ISTER_STORAGE__ACK__MORE", "x")
    found = run_json(["check", file("storage: {ack: synced, wal: {dir: a}}\n")], capsys, code=1)
    assert {problem["key"] for problem in found["problems"]} == {"storage.wall", "storage.ack.more"}


def test_check_of_settings_that_can_be_used_says_where_things_will_be(file, capsys, tmp_path):
    path = file({"storage": {"wal": {"dir": str(tmp_path / "data" / "wal")}}})
    found = run_json(["check", path], capsys)
    assert found["ok"] is True
    assert found["problems"] == found["connections"] == []
    places = found["places"]
    assert places["local files"] == f"{tmp_path}/data/wal (does not exist yet)"
    assert places["bucket"] == f"{tmp_path}/data/objects (does not exist yet)"
    assert places["metadata"] == f"{tmp_path}/data/metadata.db (does not exist yet)"
    assert places["HTTP"] == "http://127.0.0.1:9040/"
    assert places["callers"] == "no authentication: anyone who can connect"
    assert "the settings can be used" in run(["check", path], capsys).out
    assert not (tmp_path / "data").exists()


def test_check_takes_the_file_of_the_environment_and_the_usual_directory(file, capsys, monkeypatch):
    assert run_json(["check"], capsys)["source"] == "./ister-data"
    path = file("storage: {wal: {dir: a}}\n")
    monkeypatch.setenv("ISTER_CONFIG", path)
    assert run_json(["check"], capsys)["source"] == path
    assert run_json(["check", "--data", "d.yml"], capsys)["source"] == "d.yml/"
    assert run_json(["check", "--config", path], capsys)["source"] == path


def test_check_refuses_what_is_no_config_file(capsys, tmp_path):
    shown = run(["check", str(tmp_path)], capsys, code=1)
    assert "end with .yml or .yaml" in shown.err
    assert run_json(["check", str(tmp_path)], capsys, code=1)["ok"] is False


def test_places_in_words():
    for storage, expected in [
        ({"mode": "memory"}, {"messages": "in memory only: lost when the process ends"}),
        ({"mode": "local_only", "wal": {"dir": "a"}}, {"messages": "in local files only"}),
        (
            {"wal": {"dir": "a"}, "cloud": {"backend": "s3", "root": "s3://b/p"}},
            {"bucket": "s3://b/p"},
        ),
        (
            {"wal": {"dir": "a"}, "metadata": {"backend": "etcd", "endpoints": ["h:1", "h:2"]}},
            {"metadata": "etcd at h:1, h:2, below /danube"},
        ),
    ]:
        places = describe_places(load_config({"storage": storage}, {}))
        assert expected.items() <= places.items(), storage


# -- check --connect ------------------------------------------------------------------------


def connections(path, capsys, *, code=0):
    found = run_json(["check", path, "--connect"], capsys, code=code)
    assert found["ok"] is (code == 0)
    return {item["name"]: item for item in found["connections"]}


def test_connect_makes_nothing_where_nothing_is(file, capsys, tmp_path):
    path = file({"storage": {"wal": {"dir": str(tmp_path / "data" / "wal")}}})
    found = connections(path, capsys)
    assert set(found) == {"local files", "bucket", "metadata"}
    assert all("will be created on first use" in item["says"] for item in found.values())
    assert not (tmp_path / "data").exists()


def test_connect_tries_stores_that_are_there_and_leaves_them_as_they_were(file, capsys, tmp_path):
    path = file({"storage": {"wal": {"dir": str(tmp_path / "data" / "wal")}}})
    with ister.open(path) as log:
        log.topic("/default/orders", create=True).append(b"x")
    objects = tmp_path / "data" / "objects"
    before = sorted(item for item in objects.rglob("*") if item.is_file())
    found = connections(path, capsys)
    assert "is writable" in found["local files"]["says"]
    assert "answers: can write, read, delete" in found["bucket"]["says"]
    assert "answers, and has keys below /danube" in found["metadata"]["says"]
    assert sorted(item for item in objects.rglob("*") if item.is_file()) == before
    assert "TRIED" in run(["check", path, "--connect"], capsys).out


def test_connect_says_what_does_not_work_and_what_to_do(file, capsys, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metadata.db").write_bytes(b"no database" * 1000)
    (tmp_path / "data" / "objects").write_text("a file")
    path = file({"storage": {"wal": {"dir": str(tmp_path / "data" / "wal")}}})
    found = connections(path, capsys, code=1)
    assert found["local files"]["is_ok"]
    assert not found["bucket"]["is_ok"]
    assert "is not a directory" in found["bucket"]["says"]
    assert not found["metadata"]["is_ok"]
    assert found["metadata"]["hint"]
    shown = run(["check", path, "--connect"], capsys, code=1)
    assert "does not work: bucket, metadata" in shown.err


def test_connect_says_that_there_is_too_little_room(file, capsys, tmp_path):
    """A broker with these settings starts, and refuses every append."""
    storage = {"wal": {"dir": str(tmp_path / "data" / "wal")}, "disk": {"min_free": 10**15}}
    found = connections(file({"storage": storage}), capsys, code=1)
    assert not found["local files"]["is_ok"]
    assert "appends stop below" in found["local files"]["says"]
    assert "storage.disk.min_free" in found["local files"]["hint"]


def test_other_bucket_is_shown_and_accepted_on_purpose(file, capsys, tmp_path):
    def settings_with(bucket, metadata="metadata.db"):
        storage = {
            "wal": {"dir": str(tmp_path / "wal")},
            "cloud": {"backend": "fs", "root": str(tmp_path / bucket)},
            "metadata": {"backend": "sqlite", "path": str(tmp_path / metadata)},
        }
        path = file({"storage": storage})
        return path, storage

    for bucket, metadata in (("one", "metadata.db"), ("two", "other.db")):
        with ister.open({"storage": settings_with(bucket, metadata)[1]}) as log:
            topic = log.topic("/default/orders", create=True)
            topic.append(b"a")
            topic.upload()
        shutil.rmtree(tmp_path / "wal")
    path, _ = settings_with("one")
    shown = run_json(["bucket", path], capsys)
    assert shown["ok"]
    assert shown["id"] == shown["expected"]
    path, storage = settings_with("two")
    found = connections(path, capsys, code=1)["bucket id"]
    assert shown["id"] in found["says"]
    assert "--accept" in found["hint"]
    other = run_json(["bucket", path], capsys, code=1)
    assert other["expected"] == shown["id"] != other["id"]
    assert "pass --yes" in run(["bucket", path, "--accept"], capsys, code=1).err
    with pytest.raises(ConflictError):
        ister.open({"storage": storage})
    accepted = run_json(["bucket", path, "--accept", "--yes"], capsys)
    assert accepted["ok"]
    assert accepted["expected"] == other["id"]
    ister.open({"storage": storage}).close()


# -- show -----------------------------------------------------------------------------------

TREE = {
    "storage": {
        "wal": {"dir": "wal", "cache_capacity": 7, "max_open_files": 256},
        "cloud": {
            "backend": "s3",
            "root": "s3://b/p",
            "options": {
                "endpoint": f"https://me:{SECRET}@host:1",
                "region": "eu",
                "secret_key": SECRET,
                "session_token": SECRET,
            },
        },
        "metadata": {
            "backend": "etcd",
            "endpoints": [f"http://u:{SECRET}@h:1"],
            "username": "u",
            "password": SECRET,
        },
    },
    "broker": {"auth": {"jwt": {"secret": SECRET}}},
    "pipeline": {"conf": {"spark.password": SECRET}, "export": {"catalog": {"uri": SECRET}}},
}


def test_show_has_every_setting_and_where_it_comes_from(file, capsys, monkeypatch):
    monkeypatch.setenv("ISTER_BROKER__PORTS__GRPC", "7")
    monkeypatch.setenv("ISTER_STORAGE__CLOUD__OPTIONS__REGION", "us")
    found = run_json(["show", file(TREE)], capsys)
    shown = {item["key"]: item for item in found["settings"]}
    assert list(shown) == [setting.path for setting in settings()]
    assert shown["storage.wal.cache_capacity"] == {
        "key": "storage.wal.cache_capacity",
        "value": 7,
        "from": "file",
    }
    assert shown["broker.ports.grpc"]["value"] == 7
    assert shown["broker.ports.grpc"]["from"] == "environment"
    assert shown["broker.host"]["from"] == "default"
    assert shown["storage.cloud.options"]["from"] == "environment"


def test_show_never_shows_a_secret(file, capsys):
    path = file(TREE)
    for arguments in (["show", path], ["show", path, "--json"], ["check", path]):
        main(["config", *arguments])
        shown = capsys.readouterr()
        assert SECRET not in shown.out + shown.err
    found = run_json(["show", path], capsys)
    shown = {item["key"]: item["value"] for item in found["settings"]}
    assert shown["storage.metadata.password"] == "***"
    assert shown["broker.auth.jwt.secret"] == "***"
    assert shown["pipeline.conf"] == {"spark.password": "***"}
    assert shown["storage.cloud.options"] == {
        "endpoint": "https://***@host:1",
        "region": "eu",
        "secret_key": "***",
        "session_token": "***",
    }


def test_show_only_changed_leaves_defaults_out(file, capsys):
    path = file({"storage": {"wal": {"dir": "wal", "cache_capacity": 7, "max_open_files": 256}}})
    found = run_json(["show", path, "--only-changed"], capsys)
    keys = [item["key"] for item in found["settings"]]
    assert keys == ["storage.wal.dir", "storage.wal.cache_capacity"]
    out = run(["show", path, "--only-changed"], capsys).out
    assert out.splitlines()[0].split() == ["SETTING", "VALUE", "FROM"]
    assert len(out.splitlines()) == 3


def test_show_of_a_directory_says_so(capsys):
    found = run_json(["show", "--data", "somewhere", "--only-changed"], capsys)
    assert found["settings"] == [
        {"key": "storage.wal.dir", "value": "somewhere/wal", "from": "directory"}
    ]


def test_show_of_settings_that_cannot_be_used_names_the_command_that_helps(file, capsys):
    path = file(BAD)
    shown = run(["show", path], capsys, code=1)
    assert "and 6 more" in shown.err
    assert f"`ister config check {path}` shows all of it" in shown.err
    assert run_json(["show", path], capsys, code=1)["errors"][0]["code"] == "INVALID_ARGUMENT"


# -- example --------------------------------------------------------------------------------


def test_example_is_a_config_file_with_the_defaults(file, capsys):
    text = run(["example"], capsys).out
    path = file(text)
    assert load_config(path, {}) == load_config("./ister-data", {})
    assert run_json(["check", path], capsys)["ok"] is True
    described = run_json(["example"], capsys)["settings"]
    assert [item["key"] for item in described] == [setting.path for setting in settings()]
    changed = run_json(["show", path, "--only-changed"], capsys)["settings"]
    assert [item["key"] for item in changed] == ["storage.wal.dir"]
