"""`ister pipeline scrub`: arguments, tables, JSON, exit codes."""

import argparse
import json

import pytest

from ister.cli.pipeline import scrub
from tests.integration.spark_topics import SparkPlace, fill, without_spark
from tests.support.scrub_faults import TOPIC, Patient
from tests.support.spark_here import SparkHere


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A topic of three objects, and a Spark that runs tasks here."""
    place = SparkPlace(tmp_path / "data")
    with place.open() as log:
        topic = log.topic(TOPIC, create=True)
        for number in range(3):
            fill(topic, 10, first=number * 10)
            topic.upload()

    monkeypatch.setattr("ister.spark.jobs.tasks.SparkRunner", lambda open_spark: SparkHere())
    with without_spark():
        yield place


def run(*words):
    """The exit code of a command."""
    parser = argparse.ArgumentParser(prog="ister pipeline")
    jobs = parser.add_subparsers(required=True)
    scrub.register(jobs)
    options = parser.parse_args(words)
    return options.run(options)


def test_a_sound_topic(place, capsys):
    assert run("scrub", "--config", place.config) == 0
    shown = capsys.readouterr()
    assert TOPIC in shown.out
    assert "scrub: 1 topics, done" in shown.out
    assert shown.err == ""


def test_a_fault_is_shown_and_repaired(place, capsys):
    patient = Patient(place.config, place.root / "objects")
    gone = patient.descriptors()[1]
    patient.lose(gone)
    assert run("scrub", "--config", place.config) == 1
    shown = capsys.readouterr()
    assert gone.object_id in shown.out
    assert "repairable" in shown.out
    assert "10..19" in shown.out
    assert "--repair" in shown.err
    assert run("scrub", "--config", place.config, "--repair", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    (finding,) = report["topics"][0]["findings"]
    assert (finding["kind"], finding["repaired"]) == ("missing", True)
    assert run("scrub", "--config", place.config) == 0


def test_a_topic_that_does_not_exist(place, capsys):
    with pytest.raises(Exception, match="/default/none"):
        run("scrub", "--config", place.config, "--topics", "/default/none", "--json")
    assert json.loads(capsys.readouterr().out)["ok"] is False
