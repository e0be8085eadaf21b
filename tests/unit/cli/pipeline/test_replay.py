"""`ister pipeline replay`: its arguments, and what is printed, without Spark."""

import argparse
from datetime import UTC, datetime

import pytest

from ister.cli.pipeline import replay
from ister.cli.pipeline.common import JobLocation
from ister.errors import InvalidRequestError
from ister.spark.jobs import replay_job
from ister.spark.jobs.job_report import JobReport


@pytest.fixture
def call(monkeypatch):
    """Runs the command; returns what the job was called with, its report being the one given."""

    def run(*arguments, more=None):
        found = {}

        def fake_job(spark, config, **settings):
            found.update(settings)
            return JobReport("replay", more=more or {})

        def fake_run(options, job, work, *, columns, **more):
            work("spark", JobLocation(None, "b:1"), None)
            return 0

        monkeypatch.setattr(replay_job, "replay", fake_job)
        monkeypatch.setattr(replay, "run_job", fake_run)
        parser = argparse.ArgumentParser()
        replay.register(parser.add_subparsers())
        options = parser.parse_args(["replay", "/default/a", "/default/b", *arguments])
        assert options.run(options) == 0
        return found

    return run


def test_defaults(call):
    found = call()
    assert found["broker"] == "b:1"
    assert (found["source"], found["target"]) == ("/default/a", "/default/b")
    for name in ("transform", "sql", "per_message", "start", "end", "name"):
        assert found[name] is None
    assert found["create"] is True
    assert found["mark"] is found["dry_run"] is False


def test_all_of_them(call):
    found = call(
        *("--transform", "shop.py:f", "--per-message", "--from", "2026-01-31T00:00:00Z"),
        *("--until", "12", "--name", "n", "--no-create", "--mark", "--dry-run", "--sample", "3"),
    )
    assert found["transform"] == "shop.py:f"
    assert found["per_message"] is True
    assert found["start"] == datetime(2026, 1, 31, tzinfo=UTC)
    assert found["end"] == 12
    assert (found["name"], found["sample"]) == ("n", 3)
    assert found["create"] is False
    assert found["mark"] is found["dry_run"] is True
    assert call("--transform", "m:f", "--per-batch")["per_message"] is False


def test_what_does_not_go_together(call, capsys):
    with pytest.raises(SystemExit):
        call("--sql", "SELECT 1", "--transform", "m:f")
    with pytest.raises(SystemExit):
        call("--per-batch", "--per-message")
    with pytest.raises(InvalidRequestError):
        call("--sql", "SELECT 1", "--per-batch")
    with pytest.raises(SystemExit):
        call("--from", "yesterday")
    assert "invalid position 'yesterday'" in capsys.readouterr().err


def test_sample_and_state_are_shown(call, capsys):
    message = {
        "publish_time": "2026-01-31T00:00:00+00:00",
        "producer_name": "p",
        "payload": "line\n" + "x" * 100,
        "payload_base64": "",
        "attributes": {"a": "b"},
        "routing_key": None,
    }
    binary = {**message, "payload": None, "payload_base64": "//8="}
    call(more={"sample": [message, binary]})
    shown = capsys.readouterr().out
    assert "line\\nxxx" in shown
    assert "…" in shown
    assert "base64://8=" in shown
    assert "a=b" in shown
    call(more={"sample": []})
    assert "no message came through" in capsys.readouterr().out
    call(more={"state": "already done", "hint": "--from 7"})
    assert capsys.readouterr().out == "already done: 0 messages were replayed\n--from 7\n"
    call("--json", more={"state": "already done"})
    assert capsys.readouterr().out == ""
