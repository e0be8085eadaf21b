"""What a replay is, by its name; with tasks in this process."""

from contextlib import closing

import pytest

from ister.base import failpoints
from ister.base.clock import SystemClock
from ister.bucket.pipeline import PipelineKeys
from ister.config import load_config
from ister.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OffsetOutOfRangeError,
)
from ister.spark.jobs.replay_job import ReplayRequest, replay
from ister.topic.stores import open_metadata
from tests.integration.spark_topics import SparkPlace, without_spark
from tests.support.cases import case, each
from tests.support.spark_here import SparkHere, killed_at

A, B = "/default/a", "/default/b"


def shout(message):
    """A transform."""
    return message.text.upper()


def whisper(message):
    """Another one."""
    return message.text.lower()


def divide(message):
    """One that fails at a message."""
    return str(1 // (message.offset - 120))


def request(**more):
    """A request, checked."""
    fields = {
        "source": A,
        "target": B,
        "transform": None,
        "sql": None,
        "per_message": None,
        "start": None,
        "end": None,
        "name": None,
        "is_created": True,
        "is_marked": False,
        "sample": 1,
        "chunk_bytes": 1,
    }
    return ReplayRequest(**{**fields, **more})


def test_queries_that_differ_are_different_replays():
    for one, other in [
        ("SELECT 'a  b' AS payload FROM messages", "SELECT 'a b' AS payload FROM messages"),
        (
            "SELECT payload -- x\n, offset FROM messages",
            "SELECT payload -- x , offset\nFROM messages",
        ),
        ("SELECT payload FROM messages", None),
    ]:
        with case(one, other):
            assert request(sql=one).name_for("i") != request(sql=other).name_for("i")
            assert request(sql=one).name_for("i") == request(sql=f" {one}\n").name_for("i")


def test_function_with_a_name_of_its_own_is_known_by_it():
    assert request(transform=shout, name="n").identity.endswith(":shout")
    assert request(transform=lambda message: message, name="n").identity == "named n"
    with pytest.raises(InvalidRequestError, match="no name"):
        request(transform=lambda message: message)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A topic of which a part was replayed, under a name."""
    place = SparkPlace(tmp_path_factory.mktemp("data"))
    place.fill(A, 30, uploaded=30)
    place.fill("/default/c", 30, uploaded=30)
    report = again(place)
    assert report.ok, report.errors
    assert report.more["state"] == "done"
    return place


def again(place, **more):
    """The same replay, or another one of its name."""
    wanted = {"source": A, "target": B, "transform": shout, "name": "x", "end": 10, **more}
    with without_spark():
        return replay(SparkHere(), place.config, **wanted)


@each("change", [{}, {"start": 0}, {"start": "earliest"}])
def test_the_same_replay_is_done_already(place, change):
    report = again(place, **change)
    assert report.ok, report.errors
    assert report.more["state"] == "already done"
    assert "another --name replays them again" in report.more["hint"]
    assert report.total("messages") == 0
    assert len(place.payloads(B)) == 10


@each(
    ("change", "told"),
    [
        ({"start": 10, "end": 30}, "it ends at 10, not 30"),
        ({"end": None}, "not latest"),
        ({"transform": whisper}, "whisper"),
        ({"transform": None}, "'copy'"),
        ({"mark": True}, "marked"),
        ({"source": "/default/c"}, "/default/c"),
    ],
)
def test_another_replay_of_the_same_name_is_refused(place, change, told):
    report = again(place, **change)
    (error,) = report.errors
    assert error["code"] == ConflictError.code
    assert told in error["message"]
    assert "another name" in error["hint"]
    assert len(place.payloads(B)) == 10


@each("point", ["pipeline.before_commit", "batch.after_rows", "pipeline.after_commit"])
def test_replay_that_is_ended_goes_on_with_its_chunks(tmp_path, point):
    """Killed at every step: test_jobs_kill."""
    place = SparkPlace(tmp_path)
    place.fill(A, 200, uploaded=150)
    wanted = {"source": A, "target": B, "transform": shout}
    with without_spark(), killed_at(point, 2):
        replay(SparkHere(), place.config, chunk_bytes=2_000, **wanted)
    with without_spark():
        # Other chunks than those that it began with: they stay what they were.
        report = replay(SparkHere(), place.config, chunk_bytes=700, **wanted)
    assert report.ok, report.errors
    assert report.more["state"] == "continued"
    assert [int(payload.split(b".")[0]) for payload in place.payloads(B)] == list(range(200))


def test_replay_that_cannot_be_says_why(tmp_path):
    place = SparkPlace(tmp_path)
    place.fill(A, 200, uploaded=150)
    for change, code, offset in [
        ({"end": 201}, OffsetOutOfRangeError.code, 201),
        ({"create": False}, NotFoundError.code, None),
        ({"transform": divide}, InvalidRequestError.code, 120),
    ]:
        with case(change), without_spark():
            [error] = replay(SparkHere(), place.config, source=A, target=B, **change).errors
            assert (error["code"], error["offset"]) == (code, offset)
    assert "ZeroDivisionError" in error["message"]
    assert place.staged_files() == []


def test_driver_that_wakes_up_when_another_one_has_finished_adds_nothing(tmp_path):
    place = SparkPlace(tmp_path)
    place.fill(A, 200, uploaded=150)
    wanted = {"source": A, "target": B, "transform": shout, "chunk_bytes": 2_000}

    def sleep():
        failpoints.disarm()
        metadata = load_config(place.config).storage.metadata
        with closing(open_metadata(metadata, SystemClock())) as store:
            [lease] = store.range(PipelineKeys(metadata.root_prefix).job(""))
            store.delete(lease.key)
        report = replay(SparkHere(), place.config, **wanted)
        assert report.ok, report.errors

    failpoints.arm("pipeline.before_commit", sleep)
    try:
        with without_spark():
            replay(SparkHere(), place.config, **wanted)
    finally:
        failpoints.disarm()
    assert [int(payload.split(b".")[0]) for payload in place.payloads(B)] == list(range(200))
