"""`compact` with a real local Spark: topics read the same before, meanwhile and after."""

import random
import threading

import duckdb
import pytest
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

import ister
from ister.base.clock import SystemClock
from ister.base.model import TopicName
from ister.bucket.names import EXPRESS_PREFIX, object_key
from ister.bucket.ownership import OwnedTopic
from ister.errors import CorruptDataError
from ister.spark.compat import HAS_LIMITS
from ister.spark.jobs import compact
from tests.integration.spark_topics import (
    EXPRESS,
    PUBLISHED_MS,
    SparkPlace,
    fill,
    fill_randomly,
    fill_runs,
    objects_of,
    rows_in,
    rows_of,
    without_spark,
)
from tests.support.builders import flip_byte
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


def path_of(place, described, name=A):
    return place.root / "objects" / object_key(TopicName.parse(name), described.object_id)


def upload_randomly(topic, rng, uploads, *, each=30, **kinds):
    for _ in range(uploads):
        fill_randomly(topic, rng, each, **kinds)
        topic.upload()


# -- express runs -------------------------------------------------------------------------------


@pytest.mark.nightly
def test_stream_goes_on_from_its_checkpoint_across_re_sorting(spark, tmp_path):
    """Goal: a stream sees each message once, although the objects that it has read are gone."""
    with without_spark():
        place = SparkPlace(tmp_path / "data", uploader=EXPRESS)
        with place.open() as log:
            topic = log.topic(A, create=True, ack="tiered")
            for number in range(3):
                fill_runs(topic, 5, 1, 9, first=15 * number)
                topic.bucket.retention.trim()
                writing = (
                    spark.readStream.format("ister")
                    .options(config=place.config, topic=A, startingOffsets="earliest")
                    .option("maxMessagesPerTrigger", "4")
                    .load()
                    .select("offset", F.col("payload"))
                    .writeStream.format("parquet")
                    .option("path", str(tmp_path / "out"))
                    .option("checkpointLocation", str(tmp_path / "checkpoint"))
                    .trigger(availableNow=True)
                )
                for _ in range(1 if HAS_LIMITS else 4):  # before 4.2 a run is one batch
                    query = writing.start()
                    assert query.awaitTermination(120)
                    assert query.exception() is None
                assert compact(spark, place.config, format=("dnb1", "parquet")[number % 2]).ok
                for path in (tmp_path / "data" / "objects" / EXPRESS_PREFIX).rglob("*.dnbx"):
                    path.unlink()
            rows = rows_of(topic)
    found = spark.read.parquet(str(tmp_path / "out")).orderBy("offset").collect()
    assert [(row.offset, bytes(row.payload)) for row in found] == [
        (row.offset, row.payload) for row in rows
    ]


# -- all messages -------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["dnb1", "parquet"])
def test_every_way_of_reading_yields_the_same_as_before(spark, place, kind, request):
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    with place.open() as log:
        topic = log.topic(A, create=True)
        upload_randomly(topic, random.Random(seed), 12)
        rows = rows_of(topic)
        topic.bucket.retention.trim()
        before = len(objects_of(topic))
        # A few groups, and an end that is too short for one.
        report = compact(spark, place.config, format=kind, target_mb=1, min_objects=3)
        assert report.ok, report.errors
        assert len(objects_of(topic)) < before
        assert rows_of(topic) == rows
        assert rows_in(topic.read_arrow().read_all()) == rows
        for start in (0, 1, 59, len(rows) // 2, len(rows) - 1):
            [message] = topic.read(start=start, end=start + 1)
            assert (message.offset, message.payload) == (start, rows[start].payload)
    assert history_rows(place) == rows
    assert spark_rows(spark, place) == rows
    assert spark_rows(spark, place, minPartitions="7") == rows
    again = compact(spark, place.config, format=kind, target_mb=1, min_objects=3)
    assert (again.ok, again.total("merged")) == (True, 0)
    if kind == "parquet":
        files = [str(path_of(place, d)) for d in descriptors(place) if d.format == kind]
        found = duckdb.sql(
            'SELECT "offset", payload, routing_key, producer_name FROM '
            f"read_parquet({files}) ORDER BY 1"
        ).fetchall()
        wanted = [(r.offset, r.payload, r.routing_key, r.producer_name) for r in rows]
        assert found == wanted[: len(found)]
        assert len(found) > len(rows) // 2


@pytest.mark.nightly
def test_stream_goes_on_from_its_checkpoint_across_compactions(spark, place, tmp_path):
    rng = random.Random(5)

    def stream():
        query = (
            spark.readStream.format("ister")
            .options(config=place.config, topic=A, startingOffsets="earliest")
            .load()
            .select("offset", F.col("payload"))
            .writeStream.format("parquet")
            .option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)
        assert query.exception() is None

    for kind in ("dnb1", "parquet"):
        with place.open() as log:
            topic = log.topic(A, create=True)
            upload_randomly(topic, rng, 4, each=20)
            topic.bucket.retention.trim()
        stream()
        old = descriptors(place)
        assert compact(
            spark, place.config, format=kind, min_objects=2, grace_minutes=0, target_mb=1
        ).ok
        for described in old:
            if described not in descriptors(place):
                path_of(place, described).unlink(missing_ok=True)
    with place.open() as log:
        topic = log.topic(A)
        fill(topic, 5)
        rows = rows_of(topic)
    stream()
    found = spark.read.parquet(str(tmp_path / "out")).orderBy("offset").collect()
    assert [(row.offset, bytes(row.payload)) for row in found] == [
        (row.offset, row.payload) for row in rows
    ]


@pytest.mark.nightly
def test_owner_appends_and_uploads_meanwhile(spark, place):
    """Goal: whatever the two do to each other, everything is there once, and nobody fails."""
    stop, failures = threading.Event(), []
    with place.open() as log:
        topic = log.topic(A, create=True)
        fill(topic, 20)
        topic.upload()

        def produce():
            while not stop.is_set():
                try:
                    fill(topic, 5, first=topic.watermarks.next)
                    topic.upload()
                    topic.bucket.retention.trim()
                except ister.IsterError as error:
                    failures.append(error)

        producer = threading.Thread(target=produce)
        producer.start()
        try:
            for kind in ("dnb1", "parquet", "dnb1", "parquet"):
                before = len(objects_of(topic))
                while len(objects_of(topic)) < before + 6:
                    assert not failures, failures
                report = compact(
                    spark, place.config, format=kind, min_objects=2, grace_minutes=1, target_mb=1
                )
                assert report.ok, report.errors
        finally:
            stop.set()
            producer.join()
        assert not failures, failures
        topic.upload()
        rows = rows_of(topic)
        assert [row.offset for row in rows] == list(range(topic.watermarks.next))
        assert rows == spark_rows(spark, place)
    assert history_rows(place) == rows


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


@pytest.mark.nightly
def test_tombstone_never_goes_before_what_it_stands_for(spark, place, monkeypatch):
    """Goal: a value does not come back because a swap of an earlier group was refused."""
    with place.open() as log:
        topic = log.topic(A, create=True)
        for payload in (b"value", b"other", b""):
            for number in range(10):
                topic.append(payload, routing_key=f"{number}", publish_time=PUBLISHED_MS)
            topic.flush()
            topic.upload()
        rows = rows_of(topic)
        topic.bucket.retention.trim()
    original, refused = OwnedTopic.swap, []

    def swap(self, old, new, **arguments):
        if new.start == 10 and not refused:
            refused.append(new)
            return False
        return original(self, old, new, **arguments)

    monkeypatch.setattr(OwnedTopic, "swap", swap)
    settings = {"format": "parquet", "keep": "latest-per-key", "min_objects": 50, "target_mb": 1}
    report = compact(spark, place.config, **settings)
    # The first group lost its values, the second was refused: the third keeps its tombstones.
    assert history_rows(place) == rows[10:]
    assert (report.ok, report.topics[A]["skipped"]) == (True, 2)
    assert compact(spark, place.config, **settings).total("removed_messages") == 20
    assert history_rows(place) == []
    assert [(d.start, d.end, d.messages) for d in descriptors(place)][-1][1:] == (30, 0)


@pytest.mark.nightly
def test_topic_that_cannot_be_searched_is_left_as_it_was(spark, place):
    with place.open() as log:
        for name in (A, B):
            topic = log.topic(name, create=True)
            for _ in range(3):
                fill_keyed(topic, 20)
                topic.upload()
            topic.bucket.retention.trim()
    before = descriptors(place)
    flip_byte(path_of(place, before[1]), 60)
    report = compact(
        spark, place.config, format="parquet", keep="latest-per-key", min_objects=2, target_mb=1
    )
    assert [(e["code"], e["topic"]) for e in report.errors] == [(CorruptDataError.code, A)]
    assert descriptors(place) == before
    assert [row.offset for row in history_rows(place, B)] == list(range(55, 60))
    assert place.staged_files() == []


def fill_keyed(topic, count):
    for number in range(count):
        topic.append(b"x", routing_key=f"{number % 5}")
    topic.flush()
