"""Batch reads and writes of topics with a real local Spark.

What Spark shows is compared with what the core reader yields. Reads whose bytes are counted, or
under which something moves, run in this process, with the same steps as in Spark's workers.
"""

import json
import os
import pickle
import random
import re
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial, reduce
from pathlib import Path

import pytest
import yaml
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from ister.base import failpoints
from ister.base.model import Codec
from ister.errors import (
    CorruptDataError,
    DataGapError,
    InvalidRequestError,
    IsterError,
)
from ister.spark import register
from ister.spark.compat import HAS_LIMITS, HAS_PUSHDOWN, SPARK_VERSION
from tests.integration.spark_topics import (
    PUBLISHED_MS,
    Elsewhere,
    ReadHere,
    Row,
    SparkPlace,
    WriteHere,
    expire_before,
    fill,
    fill_randomly,
    objects_of,
    remove_object,
    rows_in,
    rows_of,
    without_spark,
)
from tests.servers.flight import READ, FlightTopics
from tests.support.builders import flip_byte
from tests.support.machine import Task
from tests.support.writer_child import new_seed, say_replay

A, B = "/default/a", "/default/b"
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"

needs_pushdown = pytest.mark.skipif(
    not HAS_PUSHDOWN, reason=f"Spark {SPARK_VERSION} has no filter pushdown"
)


@pytest.fixture
def place(tmp_path):
    """An empty data directory."""
    return SparkPlace(tmp_path)


@pytest.fixture
def here():
    """Reads in this process."""
    with without_spark():
        yield ReadHere


@pytest.fixture
def write_here():
    """Writes in this process."""
    with without_spark():
        yield WriteHere


def load(spark, config, **options):
    """A DataFrame of `format("ister")`."""
    reader = spark.read.format("ister").option("config", config)
    return reader.options(**options).load()


def save(frame, config, **options):
    """Appends a DataFrame's rows."""
    frame.write.format("ister").mode("append").option("config", config).options(**options).save()


def error_of(action) -> str:
    """What a user reads when an action fails."""
    with pytest.raises(PySparkException) as caught:
        action()
    return str(caught.value)


def conf(spark, stack: ExitStack, name: str, value: str) -> None:
    """Sets a setting of the session for a while."""
    before = spark.conf.get(name, None)
    spark.conf.set(name, value)
    stack.callback(spark.conf.unset, name)
    if before is not None:
        stack.callback(spark.conf.set, name, before)


# -- rows ----------------------------------------------------------------------------------------


def _lay_out(layout: str, log, topic, rng: random.Random) -> list[Row]:
    """Random messages in a topic, where `layout` says; its rows."""
    if layout == "bucket":
        fill_randomly(topic, rng, rng.randrange(40, 120))
        topic.upload()
        rows = rows_of(topic)
        if rng.random() < 0.5:
            log.seal(topic.name)  # no local file is left
        else:
            fill(topic, 60)
            topic.upload()
            topic.bucket.retention.trim()
            rows = rows_of(topic)
            assert topic.watermarks.trimmed > 0
            assert topic.watermarks.tiered == topic.watermarks.next
        return rows
    if layout != "files" and rng.random() < 0.8:
        fill_randomly(topic, rng, rng.randrange(1, 80))
        topic.upload()
        if rng.random() < 0.5:
            topic.bucket.retention.trim()
    fill_randomly(topic, rng, rng.randrange(1, 80))
    return rows_of(topic)


def _by_topic(frame) -> list[Row]:
    """The rows of a DataFrame, topic by topic, each topic's in the order that they came in."""
    return sorted(rows_in(frame.toArrow()), key=lambda row: row.topic)


@pytest.mark.parametrize("layout", ["bucket", "files", "bucket and files", "flight"])
def test_rows_equal_what_the_core_reader_yields(spark, tmp_path, request, layout):
    """Goal: every field of every message, wherever it lies, in order, for random topics."""
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    rng = random.Random(seed)
    place = SparkPlace(
        tmp_path,
        wal={"rotate_max_bytes": rng.choice((4096, 20_000))},
        uploader={
            "index_every_messages": rng.choice((1, 7, 50)),
            "max_object_bytes": rng.choice((4096, 50_000)),
        },
    )
    names = [f"/default/t{number}" for number in range(3)]
    codecs = [Codec.BINCODE1, Codec.BINCODE2, rng.choice(list(Codec))]
    with ExitStack() as stack:
        log = stack.enter_context(place.open())
        expected = []
        for name, codec in zip(names, codecs, strict=True):
            topic = log.topic(name, create=True, codec=codec)
            expected += _lay_out(layout, log, topic, rng)
        options = {"topic": ",".join(names), "splitBytes": "64k"}
        if layout == "flight":
            server = stack.enter_context(FlightTopics(log))
            frame = load(spark, place.elsewhere, broker=server.address, **options)
            assert _by_topic(frame) == expected
            assert server.calls[READ] >= 3
        else:
            log.close()
            assert _by_topic(load(spark, place.config, **options)) == expected


def test_collect_shows_python_values(spark, place):
    """The way that most users look at rows first."""
    with place.open() as log:
        topic = log.topic(A, create=True)
        topic.append("größer".encode(), attributes={"ä": "é"}, routing_key="", schema_id=4)
        topic.append(b"", producer_name="p", schema_version=2, publish_time=PUBLISHED_MS)
        topic.flush()
        expected = rows_of(topic)
    found = load(spark, place.config, topic=A).collect()
    assert [row.asDict() | {"publish_time": None} for row in found] == [
        row._asdict() | {"publish_time": None} for row in expected
    ]
    # Spark shows points in time in the zone of the process, without saying so.
    assert [row.publish_time.astimezone(UTC) for row in found] == [
        row.publish_time for row in expected
    ]


# -- ranges and columns --------------------------------------------------------------------------

RANGED = "/default/ranged"
RANGED_COUNT, RANGED_TIERED = 1000, 800


class Ranged:
    """A topic with 800 messages in the bucket and 200 in files, one a second."""

    def __init__(self, root: Path) -> None:
        self.place = SparkPlace(root)
        self.rows = self.place.fill(RANGED, RANGED_COUNT, uploaded=RANGED_TIERED)
        self.options = {"config": self.place.config, "topic": RANGED}


@pytest.fixture(scope="module")
def ranged(tmp_path_factory):
    return Ranged(tmp_path_factory.mktemp("ranged"))


def _offsets(start: int, end: int) -> dict[str, str]:
    return {
        "startingOffsets": json.dumps({RANGED: start}),
        "endingOffsets": json.dumps({RANGED: end}),
    }


def _times(start: int, end: int) -> dict[str, str]:
    """Options for the messages `start` up to, not including, `end`, by their times."""
    return {
        "startingTimestamp": str(PUBLISHED_MS + start * 1000),
        "endingTimestamp": datetime.fromtimestamp(PUBLISHED_MS / 1000 + end, UTC).isoformat(),
    }


@pytest.mark.parametrize("by", [_offsets, _times])
def test_range_through_spark_is_what_filtering_leaves(spark, ranged, by):
    frame = load(spark, ranged.place.config, topic=RANGED, **by(780, 820))
    filtered = load(spark, ranged.place.config, topic=RANGED).filter(
        "offset >= 780 and offset < 820"
    )
    assert rows_in(frame.toArrow()) == rows_in(filtered.toArrow()) == ranged.rows[780:820]


def test_times_that_do_not_rise_mean_the_first_message_at_or_after_each(here, place):
    """Goal: both ends are found as documented, in the bucket as in files; reversed is empty."""
    times = [5000, 9000, 2000, 8000, 3000, 7000, 9500, 1000]
    with place.open() as log:
        topic = log.topic(A, create=True)
        for number, time_ms in enumerate(times):
            topic.append(b"", publish_time=time_ms)
            if number == 3:
                topic.upload()
        topic.flush()
    for start, end, expected in [
        (0, 5001, [0]),
        (2000, 9100, [0, 1, 2, 3, 4, 5]),
        (9000, 9400, [1, 2, 3, 4, 5]),
        (9100, 9300, []),
        (9000, 9000, []),
        (9400, 99_999, [6, 7]),
        (99_998, 99_999, []),
    ]:
        options = {"startingTimestamp": str(start), "endingTimestamp": str(end)}
        found = here(config=place.config, topic=A, columns="offset", **options).batches()
        assert [n for batch in found for n in batch["offset"].to_pylist()] == expected, start


def test_bytes_fetched_shrink_with_the_range(here, ranged):
    """Goal: a range costs its own bytes and at most an index block at each end."""
    with ranged.place.open() as log:
        objects = objects_of(log.topic(RANGED))
    size = sum(described.size_bytes for described in objects)
    frame_max = size / RANGED_TIERED * 1.1
    block = 10 * frame_max
    assert here(**ranged.options).fetched_bytes() == size
    for start, end in [(0, 10), (400, 401), (5, 300), (700, 800)]:
        for by in (_offsets, _times):
            fetched = here(**ranged.options, **by(start, end)).fetched_bytes()
            assert fetched <= (end - start) * frame_max + 2 * block, (start, end, by)
            assert fetched >= (end - start) * frame_max * 0.8
    # What lies in files alone costs the bucket nothing.
    assert here(**ranged.options, **_offsets(800, 900)).fetched_bytes() == 0


def test_columns_and_users_schema_through_spark(spark, ranged):
    expected = [(row.payload, row.offset) for row in ranged.rows]
    by_option = load(spark, ranged.place.config, topic=RANGED, columns="payload, offset")
    assert by_option.columns == ["payload", "offset"]
    assert [(bytes(row.payload), row.offset) for row in by_option.collect()] == expected
    schema = StructType(
        [StructField("payload", BinaryType(), False), StructField("offset", LongType())]
    )
    reader = spark.read.format("ister").schema(schema).option("topic", RANGED)
    by_schema = reader.load(ranged.place.config)
    assert by_schema.schema == schema
    assert [(bytes(row.payload), row.offset) for row in by_schema.collect()] == expected


# -- one DataFrame, many scans -------------------------------------------------------------------

SHARED_COUNT = 300
LOW, HIGH = "offset < 10", "offset >= 290"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A topic with 300 messages, in both tiers."""
    place = SparkPlace(tmp_path_factory.mktemp("shared"))
    place.fill(A, SHARED_COUNT, uploaded=200)
    return place


def _offsets_in(frame) -> list[int]:
    return sorted(row[0] for row in frame.select("offset").collect())


ENDS = [*range(10), *range(290, 300)]


def _union(spark, frame):
    return _offsets_in(frame.filter(LOW).union(frame.filter(HIGH))), ENDS


def _repeated(spark, frame):
    return [frame.filter(LOW).count(), frame.count(), frame.filter(HIGH).count()], [10, 300, 10]


def _temp_view(spark, frame):
    frame.createOrReplaceTempView("shared_view")
    text = (
        "WITH low AS (SELECT offset FROM shared_view WHERE offset < 10), "
        "high AS (SELECT offset FROM shared_view WHERE offset >= 290) "
        "SELECT offset FROM low UNION ALL SELECT offset FROM high"
    )
    try:
        return _offsets_in(spark.sql(text)), ENDS
    finally:
        spark.catalog.dropTempView("shared_view")


@needs_pushdown
@pytest.mark.nightly
@pytest.mark.parametrize("use", [_union, _repeated, _temp_view])
def test_pushdown_is_wrong_for_a_dataframe_that_is_scanned_twice(spark, shared, use):
    """Goal: shows why `pushdown` is off by default and documented for a single scan."""
    with ExitStack() as stack:
        conf(spark, stack, PUSHDOWN, "true")
        found, expected = use(spark, load(spark, shared.config, topic=A, pushdown="true"))
    assert found != expected, (
        "this Spark does not leak filters between scans of one DataFrame any more: pushdown is "
        "right for every use, so it may become the default, and its documentation is out of date"
    )


@needs_pushdown
@pytest.mark.nightly
def test_pushdown_is_right_for_a_single_scan(spark, shared):
    """Goal: whatever Spark pushes down, the rows are those that the condition means.

    Method: a DataFrame of its own for each condition, all of them in one action.
    """
    cases = {
        "offset >= 250": range(250, 300),
        "offset > 5 and offset <= 9": range(6, 10),
        "offset = 77": [77],
        "offset >= 290 and offset < 20": [],
        "topic = '/default/a' and offset < 5": range(5),
        "topic = '/default/nobody'": [],
        "topic IN ('/default/a', '/default/nobody') AND offset IN (3, 299)": [3, 299],
        "publish_time > timestamp_millis(1700000150500) and offset < 240": range(151, 240),
        "offset < 10 or offset >= 290": ENDS,
        "offset >= 10 and routing_key is null and attributes['n'] like '12%'": [
            12,
            *range(120, 130),
        ],
    }
    with ExitStack() as stack:
        conf(spark, stack, PUSHDOWN, "true")
        frames = [
            load(spark, shared.config, topic=A, pushdown="true")
            .filter(condition)
            .select(F.lit(condition).alias("condition"), "offset")
            for condition in cases
        ]
        found = {condition: [] for condition in cases}
        for row in reduce(DataFrame.union, frames).collect():
            found[row.condition].append(row.offset)
    assert found == {condition: list(expected) for condition, expected in cases.items()}


@needs_pushdown
def test_pushdown_fetches_less_and_drops_no_filter(here, shared):
    from pyspark.sql.datasource import (  # noqa: PLC0415 - since 4.1
        EqualTo,
        GreaterThan,
        GreaterThanOrEqual,
        In,
        LessThan,
    )

    options = {"config": shared.config, "topic": A, "pushdown": "true"}
    whole = here(**options).fetched_bytes()
    minute = datetime.fromtimestamp(PUBLISHED_MS / 1000 + 190, UTC)
    for filters in (
        [GreaterThanOrEqual(("offset",), 100), LessThan(("offset",), 110)],
        [EqualTo(("offset",), 42)],
        [GreaterThan(("publish_time",), minute)],
    ):
        read = here(**options, filters=filters)
        assert read.left == filters
        assert 0 < read.fetched_bytes() < whole * 0.2, filters
    for filters in ([EqualTo(("topic",), B)], [In(("topic",), (B, "/default/c"))]):
        assert here(**options, filters=filters).fetched_bytes() == 0


@pytest.mark.skipif(HAS_PUSHDOWN, reason="this Spark has filter pushdown")
def test_pushdown_that_spark_does_not_have_is_refused_at_load(spark, shared):
    with pytest.raises(PySparkException, match=r"the option pushdown needs Spark 4\.1 or later"):
        load(spark, shared.config, topic=A, pushdown="true")


@needs_pushdown
def test_pushdown_needs_sparks_own_setting_and_spark_says_so(spark, shared):
    text = error_of(lambda: load(spark, shared.config, topic=A, pushdown="true").count())
    assert PUSHDOWN in text


# -- SQL and Connect -----------------------------------------------------------------------------


def test_temporary_view_in_sql(spark, shared):
    spark.sql(
        f"CREATE TEMPORARY VIEW orders USING ister OPTIONS (topic '{A}', config '{shared.config}', "
        f"""endingOffsets '{{"{A}": 20}}')"""
    )
    try:
        text = "SELECT count(*) AS n, min(offset) AS low, max(offset) AS high FROM orders"
        assert tuple(spark.sql(text).first()) == (20, 0, 19)
        text = (
            "SELECT attributes['n'] AS n FROM orders WHERE offset = 7 AND topic = '/default/a' "
            "AND publish_time = timestamp_millis(1700000007000)"
        )
        assert [row.n for row in spark.sql(text).collect()] == ["7"]
    finally:
        spark.catalog.dropTempView("orders")


@pytest.mark.nightly
def test_spark_connect_reads_writes_and_streams(tmp_path):
    """Goal: the same through Spark Connect, which knows no SparkContext.

    Method: a process of its own, because Connect and a classic session do not share one.
    """
    place = SparkPlace(tmp_path / "data")
    place.fill(A, 40, uploaded=25)
    script = Path(__file__).with_name("connect_session.py")
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_TESTING": "1",  # any free port instead of a fixed one
    }
    done = subprocess.run(
        [sys.executable, str(script), place.config, str(tmp_path / "work")],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["offsets"] == list(range(40))
    assert found["union"] == [*range(5), *range(35, 40)]
    assert found["view"] == found["fresh view"] == 40
    assert "did you mean topic?" in found["error"]
    numbers = [b"%d" % number + b"." * 60 for number in range(40)]
    assert place.payloads("/default/copied") == numbers
    assert place.payloads("/default/streamed") == numbers
    if HAS_LIMITS:
        assert found["batches"] >= 3
        assert found["behind"][:3] == [25, 10, 0]
    assert place.staged_files() == []


# -- what is refused -----------------------------------------------------------------------------

TIME = "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"topic": "/default/nobody"}, ["topic /default/nobody does not exist", "/default/a"]),
        (
            {"topic": A, "startingOffsets": f'{{"{A}": 301}}'},
            ["startingOffsets is beyond the end", "offset=301"],
        ),
        (
            {"topicPattern": "/other/.*"},
            ["no topic matches topicPattern", "topics: /default/a"],
        ),
        ({"topicPattern": "/default"}, ["no topic matches topicPattern"]),
        (
            {"topic": A, "endingOffsets": f'{{"{A}": 301}}'},
            ["endingOffsets is beyond the end", "offset=301"],
        ),
    ],
)
def test_reads_of_what_is_not_there_are_refused(here, shared, options, texts):
    with pytest.raises(IsterError) as caught:
        here(config=shared.config, **options)
    found = str(caught.value)
    assert [text for text in texts if text not in found] == [], found


@pytest.mark.nightly
def test_place_that_is_none_is_refused(spark, tmp_path):
    def read(**options):
        return error_of(
            lambda: spark.read.format("ister").options(topic=A, **options).load().count()
        )

    assert "neither config nor broker is given" in read()
    found = read(config="/nowhere/ister.yml")
    assert "the config file cannot be read" in found
    assert "/nowhere/ister.yml" in found
    found = read(config=str(tmp_path / "nothing"))
    assert str(tmp_path / "nothing") in found
    assert not (tmp_path / "nothing").exists()
    for mode, wal in (("local_only", {"dir": str(tmp_path / "wal")}), ("memory", {})):
        path = tmp_path / f"{mode}.yml"
        path.write_text(yaml.safe_dump({"storage": {"mode": mode, "wal": wal}}))
        found = read(config=str(path))
        assert "Spark needs a log with a bucket" in found
        assert mode in found
    path.write_text(
        yaml.safe_dump(
            {"storage": {"wal": {"dir": str(tmp_path / "wal")}, "cloud": {"backend": "memory"}}}
        )
    )
    assert "cannot share a store in memory" in read(config=str(path))


# -- which topics, how many partitions, from where -----------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Topics of several kinds."""
    place = SparkPlace(tmp_path_factory.mktemp("many"))
    for number in range(3):
        place.fill(f"/default/p-part-{number}", 10 + number, uploaded=5 * (number % 2))
    place.fill("/default/p-part-x", 1)
    place.fill("/default/p-parts", 1)
    place.fill("/default/files", 7)
    place.fill("/other/one", 4, uploaded=4)
    with place.open() as log:
        log.topic("/default/empty", create=True)
    return place


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"topic": "/default/files, /other/one"}, {"/default/files": 7, "/other/one": 4}),
        ({"topicPattern": "/(other|default)/(one|files)"}, {"/default/files": 7, "/other/one": 4}),
        (
            {"topic": "/default/p"},
            {"/default/p-part-0": 10, "/default/p-part-1": 11, "/default/p-part-2": 12},
        ),
        (
            {"topic": "/default/p", "startingOffsets": '{"/default/p-part-1": 9}'},
            {"/default/p-part-0": 10, "/default/p-part-1": 2, "/default/p-part-2": 12},
        ),
        ({"topic": "/default/p-part-1"}, {"/default/p-part-1": 11}),
        ({"topic": "/default/empty"}, {}),
        ({"topic": "/default/empty,/default/files"}, {"/default/files": 7}),
        ({"topic": "/default/files", "includeTail": "false"}, {}),
        ({"topic": "/default/p-part-1", "includeTail": "false"}, {"/default/p-part-1": 5}),
        ({"topic": "/default/files", "startingTimestamp": TIME}, {}),
        (
            {"topic": "/other/one", "startingOffsets": '{"/other/one": 4}'},
            {},
        ),
    ],
)
def test_topics_that_options_mean(here, many, options, expected):
    batches = here(config=many.config, columns="topic", **options).batches()
    assert Counter(name for batch in batches for name in batch["topic"].to_pylist()) == expected


@pytest.mark.parametrize(
    "schema", [None, "id BIGINT", '{"type": "object", "properties": {"id": {"type": "integer"}}}']
)
def test_unreachable_tail_is_in_the_comments_of_columns(spark, place, schema):
    place.fill(A, 50, uploaded=40)
    options = {"topic": A, "includeUnreachableTail": "false"}
    if schema is not None:
        options |= {"payloadFormat": "json", "payloadSchema": schema}
    frame = load(spark, place.elsewhere, **options)
    assert [row.offset for row in frame.select("offset").collect()] == list(range(40))
    for field in frame.select("payload", "offset").schema:
        (topics,) = json.loads(field.metadata["comment"]).values()
        assert {topic: one["offset"] for topic, one in topics.items()} == {A: 40}


def test_broker_alone_says_where_everything_is(spark, place):
    """Goal: without a config, the broker's settings lead to the bucket, and it serves the tail."""
    with place.open() as log:
        topic = log.topic(A, create=True)
        fill(topic, 40)
        topic.upload()
        fill(topic, 10, first=40)
        expected = rows_of(topic)
        with FlightTopics(Elsewhere(log, place.elsewhere)) as server:
            frame = spark.read.format("ister").options(broker=server.address, topic=A).load()
            assert rows_in(frame.toArrow()) == expected
            assert server.calls["storage"] >= 1
            assert server.calls[READ] == 1


def test_times_are_found_by_the_broker(here, place):
    with place.open() as log, FlightTopics(log) as server:
        topic = log.topic(A, create=True)
        fill(topic, 20)
        topic.upload()
        fill(topic, 20, first=20)
        expected = rows_of(topic)
        options = {"config": place.elsewhere, "topic": A, "broker": server.address}
        assert here(**options, **_times(10, 35)).rows() == expected[10:35]
        assert here(**options, **_times(30, 35)).rows() == expected[30:35]
        assert server.calls["find_time"] >= 2


# -- what moves under a plan ---------------------------------------------------------------------


@pytest.fixture
def moving(place):
    """A log whose topic has 300 messages in many objects, and 60 behind them; its owner is here."""
    with place.open() as log:
        topic = log.topic(A, create=True)
        fill(topic, 300)
        topic.upload()
        fill(topic, 60, first=300)
        yield place, log, topic


def test_expiry_in_the_middle_of_a_slice_leaves_the_rest(here, place):
    """Goal: of a tail that became several objects, of which the first ones went, the others come.

    Method: the tail is one slice of the plan, whatever it became later.
    """
    with place.open() as log:
        topic = log.topic(A, create=True)
        fill(topic, 360)
        expected = rows_of(topic)
        strict = here(config=place.config, topic=A)
        lenient = here(config=place.config, topic=A, failOnDataLoss="false")
        topic.upload()
        earliest = expire_before(log, topic, 200)
        assert 100 < earliest < 200
        assert topic.watermarks.trimmed >= 200
        assert lenient.rows() == expected[earliest:]
        with pytest.raises(DataGapError) as caught:
            strict.rows()
        assert (caught.value.start, caught.value.end) == (0, earliest)


def test_tail_planned_here_is_read_from_the_broker_by_tasks_without_files(here, moving):
    """The driver is on the owner's machine, and the executors are not."""
    place, log, topic = moving
    expected = rows_of(topic)
    with FlightTopics(log) as server:
        planned = here(config=place.config, topic=A, broker=server.address)
        apart = here(config=place.elsewhere, topic=A, broker=server.address)
        apart.partitions = pickle.loads(pickle.dumps(planned.partitions))
        assert apart.rows() == expected
        assert server.calls[READ] == 1


def test_object_that_was_given_up_is_passed_over(spark, here, place):
    """Goal: Spark reads a topic from its beginning again after `ister repair --give-up`."""
    expected = place.fill(A, 360, uploaded=300)
    with place.open() as log:
        topic = log.topic(A)
        topic.upload()
        topic.wal.trim(360)
        lost = objects_of(topic)[1]
        remove_object(log, topic, lost)
        assert lost.end < topic.watermarks.trimmed
        assert log.give_up(A).ranges == ((lost.start, lost.end),)
    expected = [*expected[: lost.start], *expected[lost.end :]]
    assert here(config=place.config, topic=A).rows() == expected
    assert rows_in(load(spark, place.config, topic=A).toArrow()) == expected


def test_damaged_object_is_read_from_files_or_named(here, place):
    """Goal: a flipped byte is noticed; another tier's copy is taken, or the error says where."""
    expected = place.fill(A, 100, uploaded=80)
    (path,) = (place.root / "objects").rglob("data-0-*.dnb1")
    flip_byte(path, path.stat().st_size // 4)
    assert here(config=place.config, topic=A).rows() == expected
    with place.open() as log:
        topic = log.topic(A)
        topic.upload()
        topic.wal.trim(100)
        assert topic.watermarks.trimmed == 50
    with pytest.raises(CorruptDataError) as caught:
        here(config=place.config, topic=A).rows()
    assert caught.value.topic == A
    assert 0 < caught.value.offset < 50


# -- writes --------------------------------------------------------------------------------------


def _numbers(
    spark, count: int, partitions: int = 1, columns: str = "cast(id AS string) AS payload"
):
    return spark.range(0, count, 1, partitions).selectExpr(*columns.split("; "))


@pytest.mark.parametrize("codec", list(Codec))
def test_all_columns_go_round_from_topic_to_topic(spark, place, request, codec):
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    with place.open() as log:
        topic = log.topic(A, create=True, codec=codec)
        fill_randomly(topic, random.Random(seed), 80, has_odd_times=False)
        expected = rows_of(topic)
    save(load(spark, place.config, topic=A), place.config, topic=B, codec=str(codec))
    with place.open() as log:
        copy = log.topic(B)
        assert copy.codec is codec
        assert rows_of(copy) == [row._replace(topic=B) for row in expected]
    assert place.staged_files() == []


def test_points_in_time_do_not_depend_on_the_sessions_zone(spark, place):
    expected = place.fill(A, 3, uploaded=1)
    with ExitStack() as stack:
        conf(spark, stack, "spark.sql.session.timeZone", "America/New_York")
        frame = load(spark, place.config, topic=A)
        save(frame, place.config, topic=B)
        assert rows_in(frame.toArrow()) == expected
    with place.open() as log:
        assert rows_of(log.topic(B)) == [row._replace(topic=B) for row in expected]


def test_what_is_null_is_as_append_would_have_it(spark, place):
    columns = (
        "'x' AS payload; cast(null AS string) AS producer_name; "
        "cast(null AS map<string,string>) AS attributes; cast(null AS string) AS routing_key; "
        "cast(null AS int) AS schema_id; cast(null AS tinyint) AS schema_version; "
        "cast(null AS timestamp) AS publish_time; cast(null AS string) AS topic"
    )
    before = datetime.now(UTC).replace(microsecond=0)
    save(_numbers(spark, 2, columns=columns), place.config, topic=B)
    save(_numbers(spark, 1, columns=columns), place.config, topic=B, producerName="job")
    save(_numbers(spark, 1), place.config, topic=B, producerName="job")
    mixed = "'x' AS payload; if(id = 0, 'own', null) AS producer_name"
    save(_numbers(spark, 2, columns=mixed), place.config, topic=B, producerName="job")
    with place.open() as log:
        rows = rows_of(log.topic(B))
    assert [row.producer_name for row in rows] == ["", "", "job", "job", "own", "job"]
    for row in rows:
        assert row.publish_time >= before
        assert row.attributes == {}
        assert (row.routing_key, row.schema_id, row.schema_version) == (None, None, None)


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("attributes", {"a": None}, "attribute 'a' that is null"),
        ("publish_time", datetime(1960, 1, 1, tzinfo=UTC), "publish_time"),
        ("schema_version", 5_000_000_000, "the column schema_version"),
    ],
)
def test_row_that_is_no_message_leaves_nothing(write_here, place, column, value, text):
    place.fill(B, 3)
    writing = write_here(("payload", column), config=place.config, topic=B)
    with pytest.raises(InvalidRequestError, match=re.escape(text)):
        writing.run([("x", None)] * 5, [("x", None), ("x", value)])
    assert len(place.payloads(B)) == 3, "rows of a write that failed are in the topic"
    assert place.staged_files() == []


def test_ack_and_codec_are_those_of_new_topics(spark, tmp_path):
    place = SparkPlace(tmp_path, uploader={"engine": "embedded", "interval_seconds": 1})
    options = {"ack": "tiered", "codec": "bincode1"}
    save(_numbers(spark, 3), place.config, topic=B, **options)
    with place.open() as log:
        topic = log.topic(B)
        assert (topic.ack, topic.codec) == ("tiered", "bincode1")
        assert topic.watermarks.tiered == 3
        log.topic(A, create=True, ack="written")
    # A topic that exists stays as it is.
    save(_numbers(spark, 2), place.config, topic=A, **options)
    with place.open() as log:
        assert (log.topic(A).ack, log.topic(A).codec) == ("written", "bincode2")
        assert log.topic(A).watermarks.synced == 2


@pytest.mark.parametrize("is_new", [True, False])
def test_field_that_the_codec_does_not_have_leaves_nothing(write_here, tmp_path, is_new):
    """Goal: refused before anything is appended, whether the topic is made or has the codec."""
    place = SparkPlace(tmp_path, cloud={"orphan_grace_minutes": 0})
    options = {"codec": "bincode1"} if is_new else {}
    if not is_new:
        with place.open() as log:
            log.topic(B, create=True, codec="bincode1")
    writing = write_here(("payload", "routing_key"), config=place.config, topic=B, **options)
    good = [("x", None)] * 5
    with pytest.raises(InvalidRequestError, match="bincode1 has no field routing_key"):
        writing.run(good, [*good, ("x", "k")])
    assert place.payloads(B) == [], "rows of a write that failed are in the topic"
    place.sweep(B)
    assert place.staged_files() == []


@pytest.mark.parametrize("point", ["batch.after_manifest", "batch.after_begin", "batch.after_rows"])
def test_files_of_a_write_that_died_in_its_commit_go_at_last(write_here, tmp_path, point):
    """Goal: nobody asks again for a batch of `df.write`, so nothing keeps its files for ever."""
    place = SparkPlace(tmp_path, cloud={"orphan_grace_minutes": 0})
    writing = write_here(["payload"], config=place.config, topic=B)

    def die() -> None:
        raise RuntimeError("planned failure")

    failpoints.arm(point, die)
    with pytest.raises(RuntimeError, match="planned failure"):
        writing.run([("x",)] * 5, [("x",)] * 5)
    failpoints.disarm()
    assert place.staged_files() != [], "the point was not reached"
    place.sweep(B)
    assert place.staged_files() == []
    # The topic goes on as if nothing had been.
    before = len(place.payloads(B))
    write_here(["payload"], config=place.config, topic=B).run([("x",)] * 3)
    assert len(place.payloads(B)) == before + 3


_COMMIT = """
import sys
import pyarrow as pa
from pyspark.sql.types import StructType
from ister.spark import IsterDataSource
schema = StructType().add("payload", "binary")
options = {"config": sys.argv[1], "topic": sys.argv[2], "ack": "tiered"}
writer = IsterDataSource(options).writer(schema, overwrite=False)
staged = writer.write(iter([pa.record_batch({"payload": pa.array([b"x"], pa.binary())})]))
writer.commit([staged])
"""


def test_commit_to_a_tiered_topic_waits_for_nobody(place):
    """Goal: rows of a topic that acknowledges what is tiered are uploaded by their own commit.

    Method: nobody else uploads in this place. In a process of its own, because a commit that does
    not end could not be ended here.
    """
    command = [sys.executable, "-c", _COMMIT, place.config, B]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        pytest.fail("the commit waits for an upload that nobody makes")
    assert done.returncode == 0, done.stderr
    with place.open() as log:
        assert log.topic(B).watermarks.tiered == 1


def test_broker_appends_for_its_clients(spark, place):
    """Goal: with the log open elsewhere, its owner does it; topics are made there, too."""
    columns = "cast(id AS string) AS payload; if(id < 5, '/default/a', '/default/b') AS topic"
    with place.open() as log, FlightTopics(log) as server:
        fill(log.topic(A, create=True), 2)
        options = {"broker": server.address, "ack": "written"}
        save(_numbers(spark, 10, 2, columns), place.elsewhere, **options)
        assert [message.payload for message in log.topic(B).read()] == [
            b"%d" % number for number in range(5, 10)
        ]
        assert len(list(log.topic(A).read())) == 7
        assert log.topic(B).ack == "written"
        # Two batches, and for each the word that it never comes again.
        assert server.calls["append_staged"] == 4
        found = error_of(
            lambda: save(
                _numbers(spark, 1),
                place.elsewhere,
                topic="/default/new",
                createTopics="false",
                **options,
            )
        )
        assert "topic /default/new does not exist" in found
        # Without a config: the broker knows the bucket.
        writer = _numbers(spark, 3).write.format("ister").mode("append")
        writer.options(broker=server.address, topic=B).save()
        assert len(list(log.topic(B).read())) == 8
    assert place.staged_files() == []


def test_threads_write_at_once(spark, place):
    """Each after `register`: Spark finds a Python format for a write by the thread's session."""

    def write(name: str) -> None:
        register(spark)
        save(
            _numbers(spark, 50).selectExpr(f"concat('{name}', payload) payload"),
            place.config,
            topic=B,
        )

    for task in [Task(partial(write, name)) for name in "xy"]:
        task.result()
    assert Counter(payload[:1] for payload in place.payloads(B)) == {b"x": 50, b"y": 50}
