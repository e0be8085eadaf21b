"""`tier` with a real local Spark: what it leaves is what the log's own uploads would."""

import json
import random
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import ister
from ister.base.model import Codec
from ister.bucket.pipeline import PipelineKeys
from ister.errors import ConflictError, CorruptDataError, InvalidRequestError
from ister.format.checkpoint import decode_uploader_checkpoint
from ister.spark.jobs import tier
from ister.spark.jobs.job import open_job
from tests.integration import tier_child
from tests.integration.spark_topics import (
    SparkPlace,
    fill,
    fill_randomly,
    rows_of,
    without_spark,
)
from tests.servers.flight import FlightTopics
from tests.support.builders import flip_byte
from tests.support.machine import Task, eventually
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


def checkpoint_in(place, name):
    """`uploader.ckpt` without the second at which it was written."""
    data = Path(f"{place.root}/wal{name}/uploader.ckpt").read_bytes()
    return replace(decode_uploader_checkpoint(data), updated_at=0)


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
        assert checkpoint_in(one, name) == checkpoint_in(two, name)


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
def test_the_same_objects_descriptors_and_checkpoints(spark, place, rng):
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
        waiter = Task(topic.wait, 399, "tiered", timeout=60)
        report = tier(spark, other.config)
        assert report.ok, report.errors
        assert topic.bucket.uploads.follow() == 400
        waiter.result()
        expected = rows_of(topic)
    assert len(expected) == 400
    assert_same(place, other, A)


def test_what_was_synced_a_moment_ago_is_uploaded(spark, place):
    with place.open() as log:
        topic = log.topic(A, create=True)
        fill(topic, 50)
        report = tier(spark, place.config)
        assert by_topic(report)[A]["end"] == 50


@pytest.mark.nightly
@pytest.mark.parametrize("finalize", ["direct", "copy"])
def test_large_backlog_of_one_topic(spark, tmp_path, finalize):
    uploader = {"max_object_bytes": 8192, "max_object_seconds": 86_400, "finalize": finalize}
    place = SparkPlace(tmp_path / "here", uploader=uploader)
    place.fill(A, 3000, size=200)
    other = copy_of(place, uploader=uploader)
    upload_all(place, A)
    reopen(other, A)
    report = tier(spark, other.config, topics=A)
    assert report.ok, report.errors
    assert by_topic(report)[A]["objects"] > 80
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


# -- another machine ------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("codec", [Codec.BINCODE1, Codec.BINCODE2])
def test_the_same_through_a_broker(spark, place, rng, codec):
    with place.open() as log:
        topic = log.topic(A, create=True, codec=codec)
        fill_randomly(topic, rng, 400, has_odd_times=False)
        topic.append(b"z" * 5_000_000)  # larger than a chunk
        topic.flush()
    other = copy_of(place)
    upload_all(place, A)
    with other.open() as log, FlightTopics(log) as server:
        topic = log.topic(A)
        plan = tier(spark, other.elsewhere, broker=server.address, dry_run=True)
        report = tier(spark, other.elsewhere, broker=server.address)
        assert report.ok, report.errors
        assert server.calls["plan_upload"] >= 2
        topic.bucket.uploads.follow()
    assert_same(place, other, A)
    fields = by_topic(report)[A]
    assert fields == by_topic(plan)[A]
    assert fields["end"] == 401


def test_files_elsewhere_and_no_broker(spark, place):
    place.fill(A, 50)
    place.fill(B, 50)
    with place.open() as log:
        log.topic(A)
        log.seal(B)
        report = tier(spark, place.elsewhere)
    # The process that has A is not a broker; B needs none.
    (error,) = report.errors
    assert (error["topic"], report.ok) == (A, False)
    assert "another machine" in error["message"]
    assert by_topic(report)[B]["skipped"] == "everything is in the bucket"
    (error,) = tier(spark, place.elsewhere).errors
    assert error["topic"] == A
    assert "is not running" in error["message"]


def test_topic_that_the_broker_does_not_have(spark, place, tmp_path):
    place.fill(A, 50)
    with SparkPlace(tmp_path / "stranger").open() as log, FlightTopics(log) as server:
        log.topic(B, create=True)
        with place.open() as own:
            own.topic(A)
            report = tier(spark, place.elsewhere, broker=server.address)
            (error,) = report.errors
            assert (error["topic"], error["code"]) == (A, "NOT_FOUND")
            log.topic(A, create=True)
            report = tier(spark, place.elsewhere, broker=server.address)
    (error,) = report.errors
    assert "another topic of this name" in error["message"]


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


def test_one_pipeline_at_a_time(spark, place):
    place.fill(A, 20)
    with open_job("run", spark, place.config, exclusive=lambda keys: keys.lease):
        with pytest.raises(ConflictError, match="run on"):
            tier(spark, place.config)
        assert by_topic(tier(spark, place.config, dry_run=True))[A]["messages"] == 20
    assert by_topic(tier(spark, place.config))[A]["messages"] == 20


@pytest.mark.parametrize("wrong", [{"interval": 0}, {"interval": 1, "dry_run": True}])
def test_arguments_that_make_no_sense(spark, place, wrong):
    with pytest.raises(InvalidRequestError):
        tier(spark, place.config, **wrong)


# -- beside a log that works ----------------------------------------------------------------------


class Child:
    """See `tier_child`."""

    def __init__(self, config, count, *names):
        self._process = subprocess.Popen(
            [sys.executable, tier_child.__file__, config, str(count), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout.readline() == "ready\n"

    def go(self):
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def result(self):
        return json.loads(self._process.stdout.readline())

    def end(self):
        self._process.communicate("\n", timeout=60)
        return self._process.returncode


@contextmanager
def a_child(config, count, *names):
    child = Child(config, count, *names)
    try:
        yield child
    finally:
        if child._process.poll() is None:
            child._process.kill()
            child._process.communicate()


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


def with_engine(place, engine):
    return SparkPlace(
        place.root,
        uploader={"engine": engine, "interval_seconds": 1},
        metadata={"lease_ttl_seconds": LEASE_SECONDS},
    ).config


def is_held(place):
    with ister.open_bucket(place.config) as history:
        return history.metadata.get(PipelineKeys("/danube").lease) is not None


def check_tiered_once(place, name, count):
    found = [(d.start, d.end) for d in descriptors(place, name)]
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == count
    assert len(place.payloads(name)) == count


@pytest.mark.nightly
def test_log_with_engine_auto_leaves_its_uploads_to_the_job(spark, place):
    config = with_engine(place, "auto")
    reopen(place)
    with going_on(spark, config, interval=0.5) as reports:
        eventually(lambda: is_held(place))
        with a_child(config, 40, A, B) as child:
            child.go()
            assert child.result() == {"next": [200, 200], "made": 0}
            assert child.end() == 0
    assert reports[0].ok, reports[0].errors
    assert {fields["messages"] for fields in by_topic(reports[0]).values()} == {200}
    for name in (A, B):
        check_tiered_once(place, name, 200)


def test_both_engines_at_once(spark, place):
    config = with_engine(place, "embedded")
    place.fill(A, 0)
    with going_on(spark, config, interval=0.1) as reports, a_child(config, 60, A) as child:
        child.go()
        made = child.result()["made"]
        assert child.end() == 0
    assert reports[0].ok, reports[0].errors
    by_job = by_topic(reports[0])[A]["objects"]
    # An object that both have made in the same second is the same: nobody could say whose it is.
    assert made + by_job >= len(descriptors(place, A))
    print(f"objects: {made} of the log's own, {by_job} of the job's")
    check_tiered_once(place, A, 300)
