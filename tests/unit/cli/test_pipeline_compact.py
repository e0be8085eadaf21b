"""`ister pipeline compact`: what the arguments become, and which ones are refused."""

import argparse
import sys

import pytest

from ister.cli.main import main
from ister.cli.pipeline import compact as command
from ister.spark.jobs import compact_job
from ister.spark.jobs.job_report import JobReport
from tests.support.commands import Terminal


@pytest.fixture
def run(monkeypatch):
    """Runs the command without Spark; (exit code, what the job was given)."""

    def run(*arguments):
        parser = argparse.ArgumentParser()
        parser.add_argument("--json", action="store_true")
        command.register(parser.add_subparsers())
        given = {}

        def job(spark, config, **settings):
            given.update(settings, spark=spark)
            return JobReport("compact")

        class Place:
            config, broker = None, "broker:1"

        def run_job(options, name, work, *, columns, is_short):
            given["job"], given["columns"] = name, [field for field, _ in columns]
            return 0 if work("spark", Place, "bar").ok else 1

        monkeypatch.setattr(compact_job, "compact", job)
        monkeypatch.setattr(command, "run_job", run_job)
        options = parser.parse_args(["compact", *arguments])
        return options.run(options), given

    return run


def test_job_gets_the_defaults(run):
    code, given = run("--data", "d")
    assert code == 0
    assert given.pop("columns")[0] == "topic"
    assert given == {
        "job": "compact",
        "spark": "spark",
        "broker": "broker:1",
        "topics": None,
        "format": "dnb1",
        "keep": "all",
        "target_mb": 128,
        "min_objects": 4,
        "grace_minutes": None,
        "tombstone_hours": 24,
        "zstd_level": 3,
        "dry_run": False,
        "progress": "bar",
    }


def test_job_gets_what_is_asked_for(run):
    _, given = run(
        *("--topics", "/a/*", "--format", "parquet", "--keep", "latest-per-key"),
        *("--target-mb", "64", "--min-objects", "2", "--grace-minutes", "0.5"),
        *("--tombstone-hours", "72", "--zstd-level", "9", "--dry-run"),
    )
    asked = ("topics", "format", "keep", "target_mb", "min_objects", "grace_minutes")
    assert [given[name] for name in asked] == ["/a/*", "parquet", "latest-per-key", 64, 2, 0.5]
    assert [given[name] for name in ("tombstone_hours", "zstd_level", "dry_run")] == [72, 9, True]


def test_wrong_usage_is_refused_before_spark_starts(run, capsys):
    for arguments, says in [
        (["--keep", "latest-per-key"], "--keep latest-per-key needs --format parquet"),
        (["--format", "csv"], "invalid choice"),
        (["--target-mb", "much"], "invalid int"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            run(*arguments)
        assert stopped.value.code == 2, arguments
        assert says in capsys.readouterr().err, arguments


def test_messages_are_removed_only_after_a_question_on_a_terminal(monkeypatch):
    done = []
    monkeypatch.setattr(command, "_run", lambda options: done.append(options.keep) or 0)
    arguments = ["pipeline", "compact", "--format", "parquet", "--keep", "latest-per-key"]
    for answer, code in (("\n", 1), ("yes\n", 0)):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        monkeypatch.setattr(sys, "stderr", shown := Terminal())
        assert main(arguments) == code
        assert "removed for good" in shown.getvalue()
    assert main([*arguments, "--yes"]) == 0
    assert main([*arguments, "--dry-run"]) == 0
    assert main(["pipeline", "compact"]) == 0
    assert len(done) == 4
