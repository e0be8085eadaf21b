"""`gc` with a real local Spark, as a function, as a command, and in the service."""

import json
import os
import subprocess
import sys
import threading

import pytest

import ister
from ister.base.model import TopicName
from ister.bucket.names import objects_prefix
from ister.spark.jobs import compact, gc, run
from tests.integration.spark_topics import SparkPlace, fill, rows_in, without_spark
from tests.support.grace import without_least_grace
from tests.support.waiting import eventually

NAMES = [f"/default/topic-{number}" for number in range(6)]


@pytest.fixture
def place(tmp_path, spark):
    """Topics that nobody has open, each with four objects that one has replaced."""
    with without_spark():
        place = SparkPlace(tmp_path, cloud={"orphan_grace_minutes": 0})
        with place.open() as log:
            for name in NAMES:
                topic = log.topic(name, create=True)
                for number in range(4):
                    fill(topic, 20, first=number * 20)
                    topic.upload()
        with without_least_grace():
            done = compact(spark, place.config, target_mb=1, min_objects=2, grace_minutes=0)
        assert done.ok, done.errors
        yield place


def stored(place, name):
    folder = place.root / "objects" / objects_prefix(TopicName.parse(name))
    return sorted(path.name for path in folder.iterdir())


def named(place, name):
    with ister.open_bucket(place.config) as history:
        return [d.object_id for d, _ in history.topic(name).catalog.descriptors()]


def rows(place, name):
    with ister.open_bucket(place.config) as history:
        return rows_in(history.topic(name).read_arrow().read_all())


def test_garbage_of_many_topics_goes_and_messages_stay(spark, place):
    before = {name: rows(place, name) for name in NAMES}
    told = gc(spark, place.config, dry_run=True)
    assert told.total("orphans") == 24
    assert all(len(stored(place, name)) == 5 for name in NAMES)
    with place.open() as log:
        log.topic(NAMES[0])
        report = gc(spark, place.config)
        assert report.ok, report.errors
        assert (report.total("orphans"), report.more["open_topics"]) == (20, 1)
    assert len(stored(place, NAMES[0])) == 5
    assert gc(spark, place.config).total("orphans") == 4
    assert all(stored(place, name) == named(place, name) for name in NAMES)
    assert {name: rows(place, name) for name in NAMES} == before
    frame = spark.read.format("ister").options(config=place.config, topicPattern="/default/.*")
    assert frame.load().count() == 80 * len(NAMES)


def test_command_prints_its_report_as_json(place):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ister.cli.main", "pipeline", "gc", "--json", "--dry-run"),
            *("--config", place.config, "--topics", NAMES[0], "--master", "local[1]"),
        ],
        capture_output=True,
        env=dict(os.environ),
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    assert (report["ok"], report["job"], report["dry_run"]) == (True, "gc", True)
    assert [topic["orphans"] for topic in report["topics"]] == [4]
    assert len(stored(place, NAMES[0])) == 5


def test_service_runs_it_by_its_schedule(spark, place):
    stop = threading.Event()
    thread = threading.Thread(
        target=run, args=(spark, place.config), kwargs={"stop": stop, "max_seconds": 120}
    )
    for name in NAMES:
        # The pipeline counts as a job that may be making objects: an hour of grace.
        folder = place.root / "objects" / objects_prefix(TopicName.parse(name))
        for path in folder.iterdir():
            os.utime(path, (path.stat().st_atime - 7200, path.stat().st_mtime - 7200))
    thread.start()
    try:
        eventually(
            lambda: all(stored(place, name) == named(place, name) for name in NAMES), within=100
        )
    finally:
        stop.set()
        thread.join()
