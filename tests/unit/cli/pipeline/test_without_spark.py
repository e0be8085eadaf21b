"""Commands that start no Spark: dry runs, and jobs that find nothing to do; and `run --once`."""

import json

import pytest

from ister.cli.main import main
from tests.integration.spark_topics import SparkPlace, without_spark
from tests.support.cases import case
from tests.support.spark_here import SparkHere

TOPIC = "/default/orders"
JOBS = {
    "tier": (),
    "compact": (),
    "compact latest": ("--format", "parquet", "--keep", "latest-per-key", "--min-objects", "2"),
    "gc": (),
    "scrub": (),
    "export": ("--to", "lake"),
    "replay": (TOPIC, "/default/copy"),
    "run": (),
    "run once": ("--once", "tier,resort,compact,gc,scrub"),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A topic of which some is in the bucket, and no Spark at all."""
    place = SparkPlace(tmp_path / "data")
    place.fill(TOPIC, 60, uploaded=40)

    def no_session(*arguments, **more):
        raise AssertionError("Spark is started")

    monkeypatch.setattr("ister.spark.jobs.session.open_session", no_session)
    monkeypatch.chdir(tmp_path)
    with without_spark():
        yield place


def run(capsys, *words):
    """The exit code of a command, and its JSON."""
    code = main(["pipeline", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_dry_runs_start_no_spark(place, capsys):
    """Goal: `--dry-run` of every job plans in this process, and changes nothing."""
    before = sorted(path for path in place.root.rglob("*") if path.is_file())
    for name, arguments in JOBS.items():
        with case(name):
            job = name.split()[0]
            code, report = run(capsys, job, *arguments, "--config", place.config, "--dry-run")
            assert code == 0
            assert report["ok"]
            assert report["job"] == job
            assert report["dry_run"]
            if name != "run":
                assert report["topics"]
    assert sorted(path for path in place.root.rglob("*") if path.is_file()) == before


def test_dry_run_of_a_replay_shows_a_sample(place, capsys):
    words = ("replay", TOPIC, "/default/copy", "--sample", "3", "--config", place.config)
    code, report = run(capsys, *words, "--dry-run")
    assert code == 0
    assert len(report["sample"]) == 3


def test_job_with_nothing_to_do_starts_no_spark(place, capsys):
    with place.open() as log:
        log.topic(TOPIC).upload()
    for words in (("tier",), ("compact",), ("run", "--once", "tier,compact")):
        with case(words[0]):
            code, report = run(capsys, *words, "--config", place.config)
            assert (code, report["errors"]) == (0, [])


# -- several jobs in one session ----------------------------------------------------------------


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.setattr("ister.spark.jobs.tasks.SparkRunner", lambda open_spark: SparkHere())
    return place


def test_jobs_run_once_in_their_order(here, capsys):
    code, report = run(capsys, "run", "--once", "tier,compact,gc", "--config", here.config)
    assert code == 0
    assert list(report["jobs"]) == ["tier", "compact", "gc"]
    [topic] = report["topics"]
    assert topic["topic"] == TOPIC
    assert topic["tier"]["messages"] == 20
    assert report["jobs"]["tier"]["topics"][0]["messages"] == 20
    assert main(["pipeline", "run", "--once", "tier,gc", "--config", here.config]) == 0
    shown = capsys.readouterr().out
    assert shown.index("tier: 1 topics") < shown.index("gc: 1 topics")


def test_failed_job_does_not_stop_the_others(here, capsys, monkeypatch):
    def fail(job, topics, report, only_due):
        raise RuntimeError("no wave")

    monkeypatch.setattr("ister.spark.jobs.service._tier", fail)
    code, report = run(capsys, "run", "--once", "tier,gc", "--config", here.config)
    assert code == 1
    [error] = report["errors"]
    assert error["job"] == "tier"
    assert "no wave" in error["message"]
    assert report["jobs"]["gc"]["ok"]


@pytest.mark.parametrize(
    ("jobs", "text"),
    [
        ("export", "pipeline.export.to is not set"),
        ("tier,shuffle", "no job 'shuffle'"),
        ("gc,gc", "name each job once"),
        (",", "name each job once"),
    ],
)
def test_jobs_that_cannot_run_are_refused_before_any_starts(place, capsys, jobs, text):
    code = main(["pipeline", "run", "--once", jobs, "--config", place.config])
    printed = capsys.readouterr()
    assert code != 0
    assert text in printed.err
    assert printed.out == ""
