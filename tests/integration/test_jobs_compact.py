"""`compact` with a real local Spark: topics read the same before, meanwhile and after."""

import random

import pytest

import ister
from ister.base.clock import SystemClock
from ister.spark.jobs import compact
from tests.integration.spark_topics import (
    SparkPlace,
    rows_in,
    rows_of,
    without_spark,
)
from tests.support.writer_child import new_seed, say_replay

A, B = "/default/a", "/default/b"
KEYS = (None, None, "", "k", "ключ", "鍵 🗝", *(f"key {number}" for number in range(30)))
HOUR_MS = 3_600_000


@pytest.fixture
def place(tmp_path):
    """An empty data directory, of which this process closes what it has opened."""
    with without_spark():
        yield SparkPlace(tmp_path, cloud={"orphan_grace_minutes": 0})


def descriptors(place, name=A):
    with ister.open_bucket(place.config) as history:
        return [described for described, _ in history.topic(name).catalog.descriptors()]


def history_rows(place, name=A):
    """What the bucket has of a topic."""
    with ister.open_bucket(place.config) as history:
        return rows_in(history.topic(name).read_arrow().read_all())


def spark_rows(spark, place, name=A, **options):
    frame = spark.read.format("ister").options(config=place.config, topic=name, **options).load()
    return rows_in(frame.orderBy("offset").toArrow())


# -- the latest of each key ---------------------------------------------------------------------


def append_keyed(topic, rng, count, *, now_ms):
    """Messages with and without keys, some of them tombstones, published within two days."""
    for _ in range(count):
        topic.append(
            b"" if rng.random() < 0.2 else rng.randbytes(rng.randrange(1, 40)),
            routing_key=rng.choice(KEYS),
            publish_time=now_ms - rng.randrange(48 * HOUR_MS),
        )
    topic.flush()


def latest(rows, now_ms, *, hours):
    """What should be left, by a dict."""
    newest = {row.routing_key: row for row in rows if row.routing_key is not None}
    before = now_ms - hours * HOUR_MS
    return [
        row
        for row in rows
        if row.routing_key is None
        or (
            newest[row.routing_key] is row
            and (row.payload or row.publish_time.timestamp() * 1000 >= before)
        )
    ]


@pytest.mark.nightly
def test_only_the_latest_message_of_each_key_is_left(spark, place, request):
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    rng, now_ms = random.Random(seed), SystemClock().now_ns() // 1_000_000
    every = []
    for _ in range(2):
        with place.open() as log:
            topic = log.topic(A, create=True)
            for _ in range(rng.randrange(2, 7)):
                append_keyed(topic, rng, rng.randrange(60, 120), now_ms=now_ms)
                topic.upload()
            every += [row for row in rows_of(topic) if row.offset >= len(every)]
            topic.bucket.retention.trim()
        wanted = latest(every, now_ms, hours=24)
        gone = len(history_rows(place)) - len(wanted)
        settings = {
            "format": "parquet",
            "keep": "latest-per-key",
            "min_objects": rng.choice((1, 3, 50)),
            "target_mb": 1,
        }
        dry = compact(spark, place.config, dry_run=True, **settings)
        report = compact(spark, place.config, **settings)
        assert report.ok, report.errors
        assert dry.total("removed_messages") == report.total("removed_messages") == gone
        assert history_rows(place) == wanted
        found = descriptors(place)
        assert sum(described.messages for described in found) == len(wanted)
        assert (found[0].start, found[-1].end) == (0, len(every))
        assert any(described.kept == "latest-per-key" for described in found)
        again = compact(spark, place.config, **settings)
        assert (again.ok, again.total("merged")) == (True, 0)
        assert place.staged_files() == []
    assert spark_rows(spark, place, failOnDataLoss="true") == wanted
    with place.open() as log:
        topic = log.topic(A)
        trimmed = topic.watermarks.trimmed  # what local files have is all there
        wanted = [row for row in wanted if row.offset < trimmed]
        assert wanted
        assert [row for row in rows_of(topic) if row.offset < trimmed] == wanted
