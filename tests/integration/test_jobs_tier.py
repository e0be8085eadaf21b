"""`tier` with a real local Spark: what it leaves is what the log's own uploads would."""

import random
import shutil
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import ister
from ister.base.model import Codec
from ister.errors import CorruptDataError
from ister.spark.jobs import tier
from tests.integration.spark_topics import (
    SparkPlace,
    fill,
    fill_randomly,
    rows_of,
    without_spark,
)
from tests.support.builders import flip_byte
from tests.support.machine import PATIENCE_SECONDS, Task
from tests.support.writer_child import new_seed, say_replay

A, B, C = "/default/a", "/default/b", "/shop/c"
LEASE_SECONDS = 15


@pytest.fixture(autouse=True)
def _closed():
    with without_spark():
        yield


@pytest.fixture
def place(tmp_path):
    return SparkPlace(tmp_path / "here", metadata={"lease_ttl_seconds": LEASE_SECONDS})


@pytest.fixture
def rng(request):
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    return random.Random(seed)


def copy_of(place, name="there", **storage):
    """The same data in another directory."""
    root = place.root.parent / name
    shutil.copytree(place.root, root)
    return SparkPlace(root, metadata={"lease_ttl_seconds": LEASE_SECONDS}, **storage)


def descriptors(place, name):
    with ister.open_bucket(place.config) as history:
        return [d for d, _ in history.topic(name).catalog.descriptors()]


def objects_in(place):
    """Every object by its key, whole."""
    root = place.root / "objects"
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "/objects/" in str(path.relative_to(root))
    }


def assert_same(one, two, *names):
    assert objects_in(one) == objects_in(two)
    assert objects_in(one)
    for name in names:
        found = [
            [replace(d, created_at=0, arrival_time_max=None) for d in descriptors(place, name)]
            for place in (one, two)
        ]
        assert found[0] == found[1]
        assert found[0]


def upload_all(place, *names):
    """What the log's own engine does."""
    with place.open() as log:
        for name in names:
            log.topic(name).upload()


def reopen(place, *names):
    """Another epoch, and nothing else."""
    with place.open() as log:
        for name in names:
            log.topic(name)


def by_topic(report):
    return {fields["topic"]: fields for fields in report.as_json()["topics"]}


# -- the same as the log's own uploads ------------------------------------------------------------


@pytest.mark.nightly
def test_the_same_objects_and_descriptors(spark, place, rng):
    with place.open() as log:
        one = log.topic(A, create=True)
        fill(one, 300)  # a second apart: objects end by time
        one.upload()
        fill(one, 400, first=300, step_ms=3)  # and by size
        fill_randomly(log.topic(B, create=True, codec=Codec.BINCODE1), rng, 200)
        fill_randomly(log.topic(C, create=True), rng, 200)
    other = copy_of(place)
    upload_all(place, A, B, C)
    reopen(other, A, B, C)
    report = tier(spark, other.config)
    assert report.ok, report.errors
    assert_same(place, other, A, B, C)
    said = by_topic(report)
    assert [said[A]["start"], said[A]["end"], said[A]["messages"]] == [300, 700, 400]
    assert said[C]["objects"] == len(descriptors(other, C))
    assert said[C]["bytes"] == sum(d.size_bytes for d in descriptors(other, C))
    again = by_topic(tier(spark, other.config))
    assert {name: fields["objects"] for name, fields in again.items()} == {A: 0, B: 0, C: 0}
    assert all("bucket" in fields["skipped"] for fields in again.values())


def test_the_same_while_somebody_has_the_log_open(spark, place):
    place.fill(A, 400, uploaded=100)
    other = copy_of(place)
    upload_all(place, A)
    with other.open() as log:
        topic = log.topic(A)
        waiter = Task(topic.wait, 399, "tiered", timeout=PATIENCE_SECONDS)
        report = tier(spark, other.config)
        assert report.ok, report.errors
        assert topic.bucket.uploads.follow() == 400
        waiter.result()
        expected = rows_of(topic)
    assert len(expected) == 400
    assert_same(place, other, A)


def test_damaged_frame_ends_its_topic_and_no_other(spark, place):
    for name in (A, B):
        place.fill(name, 300)
    with place.open() as log:
        for name in (A, B):
            log.topic(name)
    path = Path(f"{place.root}/wal{A}/wal.3.log")
    flip_byte(path, path.stat().st_size // 2)
    other = copy_of(place)
    with place.open() as log:
        with pytest.raises(CorruptDataError) as raised:
            log.topic(A).upload()
        log.topic(B).upload()
    reopen(other, A, B)
    report = tier(spark, other.config)
    assert_same(place, other, A, B)
    assert not report.ok
    (error,) = report.errors
    assert (error["topic"], error["offset"]) == (A, raised.value.offset)
    assert error["code"] == raised.value.code
    assert 0 < by_topic(report)[A]["end"] == raised.value.offset
    assert by_topic(report)[B]["end"] == 300


# -- plans ----------------------------------------------------------------------------------------


def test_dry_run_changes_nothing_and_is_right(spark, place):
    place.fill(A, 300, uploaded=100)
    place.fill(B, 200)

    def state():
        files = {
            path: path.read_bytes()
            for path in sorted((place.root / "wal").rglob("*"))
            if path.is_file()
        }
        with ister.open_bucket(place.config) as history:
            keys = {found.key: found.value for found in history.metadata.range("/")}
        return files, keys, objects_in(place)

    before = state()
    planned = tier(spark, place.config, dry_run=True)
    assert state() == before
    assert planned.dry_run
    done = tier(spark, place.config)
    assert by_topic(planned) == by_topic(done)
    assert objects_in(place) != before[2]


# -- beside a log that works ----------------------------------------------------------------------


@contextmanager
def going_on(spark, config, **arguments):
    """The job in a loop; its report is in the list at the end."""
    stop, reports = threading.Event(), []
    job = Task(tier, spark, config, stop=stop, **arguments)
    try:
        yield reports
    finally:
        stop.set()
        reports.append(job.result())


def check_tiered_once(place, name, count):
    found = [(d.start, d.end) for d in descriptors(place, name)]
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == count
    assert len(place.payloads(name)) == count


def test_both_engines_at_once(spark, place):
    uploads = {"engine": "embedded", "interval_seconds": 1}
    config = SparkPlace(place.root, uploader=uploads).config
    with ister.open(config) as log, going_on(spark, config, interval=0.1) as reports:
        topic = log.topic(A, create=True)
        for number in range(60):
            fill(topic, 5, first=5 * number)
        topic.wait(299, "tiered", timeout=PATIENCE_SECONDS)
        made = log.metrics.snapshot()["uploader.objects_created_total"]
    assert reports[0].ok, reports[0].errors
    by_job = by_topic(reports[0]).get(A, {}).get("objects", 0)
    # An object that both have made in the same second is the same: nobody could say whose it is.
    assert made + by_job >= len(descriptors(place, A))
    print(f"objects: {made} of the log's own, {by_job} of the job's")
    check_tiered_once(place, A, 300)
