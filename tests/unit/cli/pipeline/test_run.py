"""`ister pipeline run`: its arguments, and what a dry run says, without Spark."""

import argparse
import json
import threading

import pytest

from ister.cli.pipeline import run
from ister.errors import InvalidRequestError
from tests.support.machine import eventually


def options_of(*arguments):
    parser = argparse.ArgumentParser()
    run.register(parser.add_subparsers())
    return parser.parse_args(["run", *arguments])


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "ister.yml"
    file.write_text(
        json.dumps(
            {
                "storage": {"wal": {"dir": str(tmp_path / "wal")}},
                "pipeline": {
                    "compact": {"every_minutes": None},
                    "conf": {"spark.ui.retainedJobs": "7"},
                },
            }
        )
    )
    return str(file)


def test_dry_run_says_what_would_be_done_and_how_often(config, capsys):
    options = options_of("--config", config, "--dry-run", "--json")
    assert options.run(options) == 0
    fields = json.loads(capsys.readouterr().out)
    assert {name: job["every_seconds"] for name, job in fields["jobs"].items()} == {
        "tier": 10,
        "resort": 300,
        "compact": None,
        "export": None,
        "gc": 3600,
        "scrub": 86400,
    }
    options = options_of("--config", config, "--dry-run")
    assert options.run(options) == 0
    lines = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    assert ["tier", "every 10 s"] in lines
    assert ["export", "never"] in lines


def test_settings_of_spark_for_days_give_way_to_those_of_the_user(config, monkeypatch):
    seen = []
    monkeypatch.setattr(run, "run_job", lambda options, *_, **__: seen.extend(options.conf) or 0)
    monkeypatch.setattr(run.logs, "configure", lambda **settings: None)
    options = options_of("--config", config, "--conf", "spark.ui.retainedStages=3")
    assert options.run(options) == 0
    assert not [item for item in seen if item.startswith("spark.ui.retainedJobs")]
    assert seen[-1] == "spark.ui.retainedStages=3"
    assert "spark.cleaner.periodicGC.interval=10min" in seen


def test_time_that_makes_no_sense(config):
    options = options_of("--config", config, "--max-seconds", "0")
    with pytest.raises(InvalidRequestError):
        options.run(options)


def test_pipeline_of_a_process_that_is_gone_stops(monkeypatch):
    monkeypatch.setattr(run, "_PARENT_SECONDS", 0.01)
    parents = iter([5, 5])
    monkeypatch.setattr(run.os, "getppid", lambda: next(parents, 1))
    stop = threading.Event()
    with run._orphan_watch(5, stop):
        eventually(stop.is_set)
    stop = threading.Event()
    with run._orphan_watch(None, stop):
        assert not stop.wait(0.05)
