"""Streams from topics, into topics and from one to the other, with a real local Spark.

What the reader and the sink do by themselves, call by call, is in `tests/unit/spark`; here Spark
makes the calls: its checkpoints, triggers, restarts, state and workers.
"""

import json
import random
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException

import ister
from ister.base.clock import SystemClock
from ister.spark.compat import HAS_LIMITS, SPARK_VERSION
from tests.servers.flight import READ, FlightTopics
from tests.support.machine import payloads
from tests.support.streams import A, B, Home, Row, payload_of, publish, rows_of
from tests.support.tier_checks import memory_directory
from tests.support.writer_child import new_seed, say_replay

QUERY_SECONDS = 180
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
WRAPPER = "spark.sql.streaming.triggerAvailableNowWrapper.enabled"

needs_limits = pytest.mark.skipif(
    not HAS_LIMITS, reason=f"availableNow is one batch in Spark {SPARK_VERSION}"
)


@pytest.fixture
def tmp_path():
    """In memory: nothing here is proved by waiting for a disk."""
    with memory_directory() as directory:
        yield directory


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")


class Seen:
    """The rows of every micro-batch that Spark has handed over, in `foreachBatch`."""

    def __init__(self):
        self.batches = []
        self.fails = False
        """Whether batches end in an error, after their rows were read."""
        self.then = lambda: None
        """Called in each batch, after its rows were read."""

    def __call__(self, frame, number):
        rows = [
            Row(topic, offset, bytes(payload))
            for topic, offset, payload in frame.select("topic", "offset", "payload").collect()
        ]
        self.batches.append((number, rows))
        self.then()
        if self.fails:
            raise RuntimeError("the batch was to fail")

    @property
    def rows(self):
        """Those of all batches together."""
        return [row for _, rows in self.batches for row in rows]

    def take(self):
        """What has come since the last time."""
        taken, self.batches = self.batches, []
        return taken


@pytest.fixture
def seen():
    return Seen()


class Stream:
    """A query over topics with one checkpoint, run time after time."""

    def __init__(self, spark, home, checkpoint, **options):
        self._spark = spark
        config = home.config if home is not None else None
        self._options = {"config": config, "startingOffsets": "earliest", **options}
        self.checkpoint = checkpoint

    def frame(self, **options):
        """What is read: of topic A unless told."""
        given = {**self._options, **options}
        if "topicPattern" not in given:
            given.setdefault("topic", A)
        return self._spark.readStream.format("ister").options(**_given(given)).load()

    def each(self, function, frame=None, **options):
        """A query with a function for each batch."""
        frame = self.frame(**options) if frame is None else frame
        return frame.writeStream.foreachBatch(function)

    def into(self, frame, **options):
        """A query with a topic as its sink."""
        given = {name: self._options.get(name) for name in ("config", "broker")} | options
        return frame.writeStream.format("ister").options(**_given(given))

    def start(self, writing, **trigger):
        """Starts a query; it runs on, unless a trigger is given."""
        return (
            writing.option("checkpointLocation", str(self.checkpoint))
            .trigger(**(trigger or {"processingTime": "0 seconds"}))
            .start()
        )

    def run(self, writing, **trigger):
        """Runs a query with what is available now, or with another trigger that ends.

        Before 4.2 a run is one batch of limited size: the query is run until it makes none.
        """
        query = wait(self.start(writing, **(trigger or {"availableNow": True})))
        before = None
        while not (trigger or HAS_LIMITS) and before != (before := self.numbers("commits")):
            wait(self.start(writing, availableNow=True))
        return query

    def numbers(self, kind):
        """The numbers of the files in `offsets` or `commits`."""
        found = (self.checkpoint / kind).glob("[0-9]*")
        return sorted(int(path.name) for path in found)

    def offset(self, number):
        """The text of a batch's end, as Spark has written it down."""
        return (self.checkpoint / "offsets" / str(number)).read_text().splitlines()[-1]

    def end(self, name=A):
        """Where the last batch that is done ends in a topic; -1 if none is."""
        numbers = self.numbers("commits")
        return json.loads(self.offset(numbers[-1]))["topics"][name]["offset"] if numbers else -1


def _given(options):
    return {name: value for name, value in options.items() if value is not None}


def wait(query):
    """Until a query has ended; raises what it has raised."""
    try:
        assert query.awaitTermination(QUERY_SECONDS), "the query has not ended"
    finally:
        query.stop()
    return query


@contextmanager
def stopping(query):
    """A query that is stopped at the end."""
    try:
        yield query
    finally:
        query.stop()


def eventually(condition, query, what=""):
    """Waits for something while a query runs; an error of the query ends it at once."""
    clock, pause = SystemClock(), threading.Event()
    deadline = clock.monotonic() + QUERY_SECONDS
    while not condition():
        if query.exception() is not None:
            raise query.exception()
        assert clock.monotonic() < deadline, f"never came true: {what or condition}"
        pause.wait(0.02)


@pytest.fixture
def stream(spark, home, tmp_path):
    return partial(Stream, spark, home, tmp_path / "checkpoint")


# -- the first batch, idleness, restarts ----------------------------------------------------------


def test_restart_goes_on_with_the_same_text_and_ignores_start_options(home, stream, seen):
    home.append(A, 4)
    home.append(B, 2)
    query = stream(topic=f"{A},{B}", subscription="spark")
    query.run(query.each(seen))
    text = query.offset(0)
    assert json.dumps(json.loads(text)) == text, "as Spark compares it"
    assert (query.end(A), query.end(B)) == (4, 2)
    query.run(query.each(seen, topic=f"{B},{A}", startingOffsets="latest"))
    assert query.numbers("offsets") == [0], "nothing is new"
    # A batch is told when the next one is made. Before 4.2 a query does not know that it is to end,
    # and moves the cursor when it finds nothing new, as all queries do that run on.
    assert home.cursor("spark") == (0 if HAS_LIMITS else 4)
    home.append(A, 1)
    query.run(query.each(seen, startingOffsets=json.dumps({A: 1_000, B: 0})))
    assert seen.batches[1:] == [(1, rows_of(A, [4]))]
    assert (home.cursor("spark"), home.cursor("spark", B)) == (4 if HAS_LIMITS else 5, 2)


# -- triggers and limits --------------------------------------------------------------------------


@needs_limits
def test_available_now_ends_beside_a_producer_and_honours_limits(home, stream, seen):
    """Every batch sees more messages come than it has."""
    query = stream(maxMessagesPerTrigger="12")
    with home.open() as log:
        topic = log.topic(A, create=True)
        publish(topic, 20)
        topic.upload()
        publish(topic, 10)
        seen.then = lambda: publish(topic, 15)
        first = query.run(query.each(seen))
        assert [len(rows) for _, rows in seen.batches] == [12, 12, 6]
        seen.then = lambda: None
        query.run(query.each(seen, maxMessagesPerTrigger="40"))
        assert [len(rows) for _, rows in seen.batches[3:]] == [40, 5]
    assert seen.rows == rows_of(A, range(75))
    lags = [_lag(progress) for progress in first.recentProgress if progress["numInputRows"]]
    assert lags == [18, 6, 0], "behind what the query was started for"


@pytest.mark.skipif(HAS_LIMITS, reason="this Spark runs several batches")
def test_available_now_is_one_limited_batch_that_restarts_continue(home, stream, seen):
    home.append(A, 20, upload=True)
    home.append(A, 10)
    query = stream(maxMessagesPerTrigger="12")
    for expected in (range(12), range(12, 24), range(24, 30)):
        wait(query.start(query.each(seen), availableNow=True))
        assert seen.take() == [(expected.start // 12, rows_of(A, expected))]
    home.append(A, 40)
    wait(query.start(query.each(seen), availableNow=True))
    seen.fails = True
    with pytest.raises(StreamingQueryException, match="was to fail"):
        wait(query.start(query.each(seen), availableNow=True))
    seen.fails = False
    wait(query.start(query.each(seen, maxMessagesPerTrigger=None), availableNow=True))
    again = rows_of(A, range(42, 54))
    assert seen.batches == [(3, rows_of(A, range(30, 42))), (4, again), (4, again)]


@pytest.mark.skipif(HAS_LIMITS, reason="this Spark asks with a start")
def test_available_now_that_spark_wraps_is_refused_before_it_goes_back(spark, home, stream, seen):
    home.append(A, 4)
    query = stream()
    wait(query.start(query.each(seen), availableNow=True))
    home.append(A, 4)
    spark.conf.set(WRAPPER, "true")
    try:
        with pytest.raises(StreamingQueryException, match=r"triggerAvailableNowWrapper"):
            wait(query.start(query.each(seen), availableNow=True))
    finally:
        spark.conf.unset(WRAPPER)
    assert query.numbers("offsets") == [0]
    wait(query.start(query.each(seen), availableNow=True))
    assert seen.rows == rows_of(A, range(8))


def _lag(progress):
    (source,) = progress["sources"]
    latest, end = (
        json.loads(found) if isinstance(found, str) else found
        for found in (source["latestOffset"], source["endOffset"])
    )
    return latest["topics"][A]["offset"] - end["topics"][A]["offset"]


# -- what moves meanwhile -------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["files", "broker"])
def test_every_message_once_while_its_owner_does_everything(home, stream, seen, request, where):
    """The owner appends, rotates, uploads and trims; the query reads wherever messages are."""
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    rng = random.Random(seed)
    with home.open() as log, FlightTopics(log) as server:
        topics = {name: log.topic(name, create=True) for name in (A, B)}

        def work():
            topic = topics[rng.choice((A, B))]
            for _ in range(rng.randrange(1, 4)):
                publish(topic, rng.randrange(1, 60))
            if rng.random() < 0.4:
                topic.upload()
            if rng.random() < 0.6:
                topic.bucket.retention.trim()

        options = {"topic": f"{A},{B}", "minPartitions": "3"}
        if where == "broker":
            options |= {"config": home.remote_config(), "broker": server.address}
        query = stream(**options)
        for topic in topics.values():
            publish(topic, 50)
        with stopping(query.start(query.each(seen))) as running:
            eventually(lambda: work() or len(seen.batches) >= 5, running)
            publish(topics[A], 5)  # which are in no object
            ends = {name: topic.watermarks.next for name, topic in topics.items()}
            eventually(lambda: all(query.end(name) == ends[name] for name in ends), running)
        assert any(topic.watermarks.trimmed for topic in topics.values())
    assert (server.calls[READ] > 0) == (where == "broker")
    for name, end in ends.items():
        assert [row for row in seen.rows if row.topic == name] == rows_of(name, range(end))


# -- topic to topic -------------------------------------------------------------------------------


@pytest.mark.nightly
def test_tasks_that_fail_leave_neither_rows_nor_files(home, stream, tmp_path):
    """Every attempt of the first run, and the first attempt of the second run."""
    home.append(A, 6)
    query = stream(columns="payload")
    failed = tmp_path / "failed"

    def never(batches):
        yield from batches
        raise RuntimeError("every attempt")

    def once(batches):
        yield from batches
        if not failed.exists():
            failed.touch()
            raise RuntimeError("the first attempt")

    def run(function):
        query.run(query.into(query.frame().mapInArrow(function, "payload binary"), topic=B))

    with pytest.raises(StreamingQueryException, match="every attempt"):
        run(never)
    assert home.staged() == set()
    with home.open() as log:
        assert B not in log.topics()
    run(once)
    assert failed.exists()
    assert payloads(home.read(B)) == [payload_of(A, at) for at in range(6)]
    assert home.staged() == set()


# -- checkpoints of earlier versions --------------------------------------------------------------


def test_golden_checkpoint_goes_on_where_it_stands(spark, tmp_path, seen):
    """Of the first version, by `golden/make_stream_checkpoint.py`, which says what it holds."""
    data = tmp_path / "data"
    shutil.copytree(GOLDEN / "stream_data", data)
    for copy in ("seen", "copied"):
        shutil.copytree(GOLDEN / "stream_checkpoint", tmp_path / copy)
    options = {"config": str(data), "topic": "/default/orders", "maxMessagesPerTrigger": "3"}

    def orders(*numbers):
        return [Row("/default/orders", number, b"order %d" % number) for number in numbers]

    reading = Stream(spark, None, tmp_path / "seen", **options)
    reading.run(reading.each(seen))
    assert seen.batches == [(1, orders(3, 4)), (2, orders(5, 6, 7))]
    copying = Stream(spark, None, tmp_path / "copied", **options, columns="payload")
    copying.run(copying.into(copying.frame(), topic="/default/copies"))
    with ister.open(data) as log:
        copies = payloads(log.topic("/default/copies").read())
    assert copies == [b"order %d" % number for number in range(8)], "batch 1 was in already"
