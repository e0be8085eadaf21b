"""The stream reader as Spark's driver uses it, without Spark: every promise that Spark leaves open.

`Query` in `stream_rig` makes Spark's calls in Spark's order, with offsets as JSON text and readers
that are pickled. What Spark itself does with it is in `tests/integration/test_spark_stream.py`.
"""

import json
import logging
import pickle
import random
import threading
from dataclasses import replace
from functools import partial

import pytest

from ister.base import retry
from ister.base.clock import SystemClock
from ister.errors import (
    ConflictError,
    DataGapError,
    InvalidRequestError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.metadata.sqlite import SqliteMetadata
from ister.spark import read_task, stream
from ister.spark.compat import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from ister.spark.offset_resolver import OffsetResolver
from ister.spark.offsets import StreamOffset
from tests.servers.flight import READ, FlightTopics
from tests.support.cases import each, making
from tests.support.machine import Task
from tests.support.scale import scaled
from tests.support.streams import (
    A,
    B,
    C,
    Home,
    OlderQuery,
    Query,
    a_reader,
    offsets_of,
    payload_of,
    publish,
    rows_of,
)
from tests.support.writer_child import new_seed, say_replay

pytestmark = pytest.mark.usefixtures("quick")

POLL_SECONDS = stream._POLL_SECONDS
EVERYTHING = ReadAllAvailable()
KILOBYTE = 1000


@pytest.fixture(params=[Query, OlderQuery])
def query(home, request):
    """As each version of Spark runs one."""
    return partial(request.param, partial(a_reader, home))


@pytest.fixture
def older_query(home):
    """As Spark before 4.2 runs one."""
    return partial(OlderQuery, partial(a_reader, home))


@pytest.fixture
def limited_query(home):
    """As Spark 4.2 and later runs one, with limits and `availableNow`."""
    return partial(Query, partial(a_reader, home))


@making("home", "query", "older_query")
def fresh(path):
    """Topics of one case."""
    home = Home(path)
    make = partial(a_reader, home)
    return {
        "home": home,
        "query": partial(Query, make),
        "older_query": partial(OlderQuery, make),
    }


@pytest.fixture
def looks(monkeypatch):
    """How often the driver has asked what topics hold: one entry each."""
    seen = []
    heads = OffsetResolver.heads

    def counted(self, **arguments):
        seen.append(arguments)
        return heads(self, **arguments)

    monkeypatch.setattr(OffsetResolver, "heads", counted)
    return seen


def ends(offset):
    """Topic by topic, how far an offset goes."""
    if isinstance(offset, str):
        offset = json.loads(offset)
    return {topic: found.offset for topic, found in StreamOffset.from_dict(offset).topics.items()}


# -- where a stream begins ----------------------------------------------------------------------


@each(
    ("start", "expected"),
    [("earliest", 0), ("latest", 7), (json.dumps({A: 3}), 3), (json.dumps({A: -2}), 0)],
    fresh=fresh,
)
def test_stream_begins_where_its_option_says(home, query, start, expected):
    home.append(A, 7)
    running = query(startingOffsets=start)
    assert running.run() == rows_of(A, range(expected, 7))
    home.append(A, 2)
    running.run()
    assert offsets_of(running.rows) == list(range(expected, 9))


@each("upload", [False, True], fresh=fresh)
def test_stream_begins_at_a_time(home, query, upload):
    with home.open() as log:
        topic = log.topic(A, create=True)
        for number in range(10):
            topic.append(payload_of(A, number), publish_time=1_700_000_000_000 + number)
        topic.flush()
        if upload:
            topic.upload()
    running = query(startingTimestamp="1700000000006")
    assert running.run() == rows_of(A, range(6, 10))


def test_start_beyond_the_end_is_refused(home):
    home.append(A, 3)
    with pytest.raises(OffsetOutOfRangeError, match="beyond the end"):
        a_reader(home, startingOffsets=json.dumps({A: 4})).initialOffset()


def test_start_that_aged_out_is_refused_unless_loss_is_allowed(home, query):
    home.append(A, 5, upload=True, size=KILOBYTE)
    home.append(A, 5, upload=True)
    home.age_out(5)
    start = json.dumps({A: 2})
    with pytest.raises(DataGapError, match="no longer kept") as gone:
        a_reader(home, startingOffsets=start).initialOffset()
    assert (gone.value.start, gone.value.end) == (2, 5)
    running = query(startingOffsets=start, failOnDataLoss="false")
    assert running.run() == rows_of(A, range(5, 10))


def test_topic_that_does_not_exist_is_refused_with_those_that_do(home):
    home.append(B, 1)
    with pytest.raises(NotFoundError, match="topic /default/a does not exist") as unknown:
        a_reader(home).initialOffset()
    assert B in str(unknown.value)
    with pytest.raises(NotFoundError, match="no topic matches"):
        a_reader(home, topicPattern="/default/x.*").initialOffset()


# -- the first batch ----------------------------------------------------------------------------


@each("fails", ["before", "after"], fresh=fresh)
def test_first_batch_that_fails_under_latest_loses_nothing(home, query, fails):
    home.append(A, 90)
    running = query(startingOffsets="latest")
    assert running.resolve_start() == {A: 90}
    home.append(A, 10)
    running.plan()
    if fails == "after":
        assert running.collect() == rows_of(A, range(90, 100))
    home.append(A, 50, upload=True)
    running.restart()
    # Spark resolves the start anew, which is another one by now.
    assert running.resolve_start() == {A: 150}
    assert running.run() == rows_of(A, range(90, 100)), "the batch as it was planned"
    assert running.run() == rows_of(A, range(100, 150))


def test_no_batch_ends_before_it_starts(home, query):
    """While somebody appends, whatever is asked in whichever order, by however many readers."""
    home.append(A, 5)
    appended = threading.Event()

    def append():
        with home.open() as log:
            for _ in range(40):
                publish(log.topic(A), 3)
        appended.set()

    writing = Task(append)
    seen = 0
    while not appended.is_set() or seen < 20:
        running = query(startingOffsets="latest")
        initial = running.resolve_start()[A]
        running.plan()
        batch = StreamOffset.from_json_text(running.offsets[0])
        assert batch.topics[A].start == initial
        running.restart()
        assert running.resolve_start()[A] >= initial
        # A restarted query passes its own idea of the start; the batch does not care.
        start = running.driver.initialOffset()
        parts = running.driver.partitions(start, json.loads(running.offsets[0]))
        slices = [part for planned in parts for part in planned.partition.slices]
        assert [(part.start, part.end) for part in slices] == list(batch.ranges().values())
        seen += 1
    writing.result()


# -- texts --------------------------------------------------------------------------------------


def test_idle_stream_gives_back_the_text_that_it_was_asked_with(home, query):
    for name in (A, B, C):
        home.append(name, 4)
    running = query(topic=f"{C},{A},{B}", startingOffsets="earliest")
    running.run()
    for _ in range(5):
        assert not running.plan()
    assert len(running.offsets) == 1


def test_idle_stream_makes_no_batch_because_something_moved(home, query):
    for _ in range(5):
        home.append(A, 40)
    running = query(startingOffsets="earliest")
    running.run()
    with home.open() as log:
        topic = log.topic(A)
        topic.upload()
        assert not running.plan()
        assert topic.bucket.retention.trim() > 0
        assert not running.plan()
    home.append(B, 3)
    assert not running.plan(), "of another topic"


# -- how often the stores are asked -------------------------------------------------------------


def test_idle_stream_holds_what_it_asks_the_metadata_store_to_a_few_calls(home, monkeypatch):
    monkeypatch.setattr(stream, "_POLL_SECONDS", POLL_SECONDS)
    home.append(A, 5, upload=True)
    reader = a_reader(home)
    start = reader.initialOffset()
    calls = []
    for name in ("get", "range"):
        whole = getattr(SqliteMetadata, name)
        monkeypatch.setattr(
            SqliteMetadata,
            name,
            lambda self, *a, _whole=whole, **k: calls.append(a) or _whole(self, *a, **k),
        )
    clock = SystemClock()
    deadline = clock.monotonic() + 1.0
    while clock.monotonic() < deadline:
        reader.latestOffset(start, EVERYTHING)
    assert 5 <= len(calls) <= 60, "not a thousand"


def test_stream_with_news_does_not_wait(home, looks, monkeypatch):
    monkeypatch.setattr(stream, "_POLL_SECONDS", 60.0)
    home.append(A, 9)
    reader = a_reader(home, startingOffsets="earliest", maxMessagesPerTrigger="3")
    limit = reader.getDefaultReadLimit()
    waits = []
    monkeypatch.setattr(stream.StreamReader, "_wait_for_next_read", lambda _: waits.append(1))
    offset = reader.initialOffset()
    for expected in (3, 6, 9):
        offset = reader.latestOffset(offset, limit)
        assert ends(offset) == {A: expected}
    assert not waits
    assert len(looks) == 1, "what was seen a moment ago is good enough"


@pytest.fixture
def timed(monkeypatch):
    """A look that takes as long as it is told, in a time that only looks and pauses pass."""

    class Timed:
        now, look_seconds = 1000.0, 0.0

    def wait(reader):
        Timed.now = max(Timed.now, reader._seen_at + reader._pause)

    heads = OffsetResolver.heads

    def slow(self, **arguments):
        Timed.now += Timed.look_seconds
        return heads(self, **arguments)

    monkeypatch.setattr(stream, "_POLL_SECONDS", POLL_SECONDS)
    monkeypatch.setattr(stream.StreamReader, "_now", lambda _: Timed.now)
    monkeypatch.setattr(stream.StreamReader, "_wait_for_next_read", wait)
    monkeypatch.setattr(OffsetResolver, "heads", slow)
    return Timed


def test_stream_that_its_trigger_paces_looks_once_at_every_trigger(home, timed, looks):
    """Its pause was four times as long as its look, whatever the interval."""
    home.append(A, 1)
    reader = a_reader(home)
    timed.look_seconds = 3.0
    start = reader.initialOffset()
    assert reader.latestOffset(start, EVERYTHING) is start
    for trigger in range(5):
        looks.clear()
        timed.now += 7.0  # what is left of an interval of ten seconds
        if trigger == 4:
            home.append(A, 1)
        called = timed.now
        found = reader.latestOffset(start, EVERYTHING)
        assert (len(looks), timed.now - called) == (1, 3.0)
    assert ends(found) == {A: 2}


# -- stores that do not answer ------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    """Pauses between two attempts that a test can afford."""
    monkeypatch.setattr(retry, "_DRIVER_PAUSES", (0.001, 0.001))


class Failing:
    """A method that fails a few times and then does what it always did."""

    def __init__(self, monkeypatch, owner, name, *, times, error=None):
        self.left = times
        self.calls = 0
        error = error or UnavailableError("does not answer")
        whole = getattr(owner, name)

        def call(this, *arguments, **named):
            self.calls += 1
            if self.left > 0:
                self.left -= 1
                raise error
            return whole(this, *arguments, **named)

        monkeypatch.setattr(owner, name, call)


@each(
    ("owner", "method", "times"),
    [
        (owner, method, times)
        for owner, method in [
            (OffsetResolver, "heads"),
            (SqliteMetadata, "get_many"),
            (SqliteMetadata, "range"),
        ]
        for times in (1, 4)
    ],
    fresh=fresh,
)
def test_store_that_does_not_answer_for_a_while_ends_no_query(
    home, query, monkeypatch, impatient, caplog, owner, method, times
):
    home.append(A, 4, upload=True)
    home.append(A, 4)
    running = query(startingOffsets="earliest", maxBytesPerTrigger="1g")
    for step in (running.driver.initialOffset, running.plan, running.collect):
        failing = Failing(monkeypatch, owner, method, times=times)
        with caplog.at_level(logging.DEBUG, logger="ister.retry"):
            step()
        assert failing.left == 0, "the store was not asked"
        monkeypatch.undo()
        monkeypatch.setattr(stream, "_POLL_SECONDS", 0.0)
        monkeypatch.setattr(retry, "_DRIVER_PAUSES", (0.001, 0.001))
    # Once per failure of each of the three steps; `each` clears what earlier cases logged.
    assert sum(record.message == "retrying" for record in caplog.records) >= 3 * times
    assert running.collect() == rows_of(A, range(8))


def test_store_that_never_answers_ends_the_query_at_last(home, monkeypatch):
    home.append(A, 1)
    reader = a_reader(home)
    start = reader.initialOffset()
    monkeypatch.setattr(stream, "retry_unavailable", partial(retry.retry_unavailable, seconds=0.01))
    monkeypatch.setattr(retry, "_DRIVER_PAUSES", (0.004, 0.004))
    failing = Failing(monkeypatch, OffsetResolver, "heads", times=1000)
    with pytest.raises(UnavailableError):
        reader.latestOffset(start, EVERYTHING)
    assert 2 <= failing.calls <= 4


def test_task_reads_on_when_the_bucket_answers_again(home, query, monkeypatch):
    monkeypatch.setattr(read_task, "_PAUSE_SECONDS", 0.001)
    home.append(A, 6, upload=True)
    running = query(config=home.remote_config(), includeTail="false", startingOffsets="earliest")
    running.plan()
    store = type(running.driver._task.place.history().objects)
    failing = Failing(monkeypatch, store, "read", times=4)
    monkeypatch.setattr(store, "view", store.read)
    assert running.collect() == rows_of(A, range(6))
    assert failing.left == 0


def test_broker_that_serves_another_place_is_refused(home, memory):
    (memory / "other").mkdir()
    other = Home(memory / "other")
    home.append(A, 1)
    with other.open() as log, FlightTopics(log) as server:
        publish(log.topic(A, create=True), 1)
        reader = a_reader(home, config=home.remote_config(), broker=server.address)
        with pytest.raises(ConflictError, match="another topic of this name"):
            reader.initialOffset()


def test_tail_on_another_machine_without_a_broker_is_refused(home):
    with home.open() as log:
        publish(log.topic(A, create=True), 1)
        with pytest.raises(InvalidRequestError, match="on another machine") as refused:
            a_reader(home, config=home.remote_config()).initialOffset()
    assert "includeTail=false" in str(refused.value)


def test_topic_ends_with_the_bucket_while_the_node_with_its_tail_is_not_running(
    home, caplog, monkeypatch
):
    monkeypatch.setattr(stream, "retry_unavailable", lambda call: call())
    with home.open() as log:
        topic = log.topic(A, create=True)
        publish(topic, 6)
        topic.upload()
        publish(topic, 3)
        node = log.stores.membership.node
    options = {"config": home.remote_config(), "startingOffsets": "earliest"}
    reader = a_reader(home, **options)
    start = reader.initialOffset()
    end = reader.latestOffset(start, EVERYTHING)
    assert _read(reader, reader.partitions(start, end)) == list(range(6))
    [warning] = [r for r in caplog.records if "is not running" in r.message]
    assert node in warning.getMessage()
    # A stream that has come further waits, and a batch of it that is repeated fails for now.
    ahead = StreamOffset.from_dict(end)
    place = ahead.topics[A]
    ahead = StreamOffset({A: replace(place, offset=9, start=4)}).to_dict()
    assert reader.latestOffset(ahead, EVERYTHING) == ahead
    with pytest.raises(UnavailableError, match=node):
        reader.partitions(start, ahead)


# -- cursors ------------------------------------------------------------------------------------


def test_cursor_follows_one_batch_behind_and_is_never_ahead(home, query):
    home.append(A, 9)
    running = query(startingOffsets="earliest", maxMessagesPerTrigger="3", subscription="spark")
    for reached in (0, 3, 6):
        running.plan()
        assert home.cursor("spark") == reached, "what was done before this batch"
        rows = running.collect()
        assert home.cursor("spark") == reached
        running.finish(rows)
    assert not running.plan()
    assert home.cursor("spark") == 6, "the last one is told with the next"
    running.restart()
    assert not running.plan()
    assert home.cursor("spark") == 9, "or by a query that has nothing to do"
    home.append(A, 1)
    running.run()
    assert home.cursor("spark") == 9


def test_cursor_never_goes_back(home, query):
    home.append(A, 6)
    options = {"startingOffsets": "earliest", "subscription": "spark"}
    query(**options, maxMessagesPerTrigger="4").drain()
    assert home.cursor("spark") == 4
    another = query(**options, maxMessagesPerTrigger="2")
    for _ in range(2):
        another.run()
        assert home.cursor("spark") == 4, "it has come to 0 and 2"


def test_cursor_keeps_files_that_are_not_processed(home, query):
    with home.open() as log:
        topic = log.topic(A, create=True)
        for _ in range(15):
            publish(topic, 20)
        topic.upload()
        assert len(topic.wal.files) > 3
        running = query(
            startingOffsets="earliest", subscription="spark", maxMessagesPerTrigger="100"
        )
        running.run()
        running.run()
        assert home.cursor("spark") == 100
        topic.bucket.retention.trim()
        assert 0 < topic.watermarks.trimmed <= 100, "as far as the cursor, and no further"
        running.drain()
        assert home.cursor("spark") == 200
        topic.bucket.retention.trim()
        assert 100 < topic.watermarks.trimmed <= 200


def test_cursor_that_cannot_be_moved_ends_no_query(home, query, monkeypatch, caplog):
    home.append(A, 9)
    running = query(startingOffsets="earliest", subscription="spark", maxMessagesPerTrigger="3")
    running.run()
    failing = Failing(monkeypatch, SqliteMetadata, "transact", times=1)
    with caplog.at_level(logging.WARNING, logger="ister.spark.stream"):
        running.run()
    assert failing.left == 0
    assert "cursor not moved" in caplog.text
    assert home.cursor("spark") == 0
    running.run()
    assert home.cursor("spark") == 6, "the next commit catches up"


def test_topic_that_was_deleted_gets_no_cursor(home, query):
    home.append(A, 3)
    running = query(startingOffsets="earliest", subscription="spark", failOnDataLoss="false")
    running.run()
    home.delete(A)
    running.driver.commit(json.loads(running.offsets[0]))
    assert not [key for key in home.metadata() if "/subscriptions/" in key]
    home.append(A, 1)
    assert running.run() == rows_of(A, [0])
    assert home.cursor("spark") is None, "what was done is of the topic that was deleted"
    home.append(A, 1)
    running.run()
    assert home.cursor("spark") == 1


# -- restarts -----------------------------------------------------------------------------------


@each(
    "option",
    [
        {"startingOffsets": "latest"},
        {"startingOffsets": "earliest"},
        {"startingOffsets": json.dumps({A: 1})},
        {"startingOffsets": json.dumps({A: 1_000_000})},
        {"startingTimestamp": "32503680000000"},
    ],
    fresh=fresh,
)
def test_restart_goes_on_from_the_checkpoint_whatever_the_start_options_say(home, query, option):
    home.append(A, 5)
    running = query(startingOffsets="earliest")
    running.run()
    home.append(A, 3)
    running.restart(**{"startingOffsets": None, **option})
    assert running.run() == rows_of(A, range(5, 8))


def test_batch_comes_again_the_same_after_limits_have_changed(home, query):
    home.append(A, 20)
    running = query(startingOffsets="earliest", maxMessagesPerTrigger="3")
    running.run()
    running.plan()
    before = running.collect()
    assert before == rows_of(A, range(3, 6))
    for limit in ("1", "100"):
        running.restart(maxMessagesPerTrigger=limit)
        assert running.collect() == before
    running.run()
    assert running.run() == rows_of(A, range(6, 20)), "the new limit counts from here on"


def test_batch_comes_again_the_same_after_its_messages_have_moved(home, query):
    home.append(A, 100)
    running = query(startingOffsets="earliest")
    running.plan()
    before = running.collect()
    with home.open() as log:
        topic = log.topic(A)
        publish(topic, 100)
        assert running.collect() == before, "from the same files, with more behind"
        topic.upload()
        running.restart()
        assert running.collect() == before, "from an object that has more than the batch"
        assert topic.bucket.retention.trim() > 0
        running.restart(splitBytes="64k", minPartitions="4")
        assert running.collect() == before
    assert before == rows_of(A, range(100))


def test_tail_that_was_turned_off_does_not_lose_what_was_planned_with_it(home, query):
    home.append(A, 5, upload=True)
    home.append(A, 5)
    running = query(startingOffsets="earliest")
    running.plan()
    running.restart(includeTail="false")
    with pytest.raises(ConflictError, match="includeTail"):
        running.collect()
    running.restart(includeTail="true")
    assert running.run() == rows_of(A, range(10))


# -- limits -------------------------------------------------------------------------------------


@each(
    ("options", "kind"),
    [
        ({}, ReadAllAvailable),
        ({"maxMessagesPerTrigger": "7"}, ReadMaxRows),
        ({"maxBytesPerTrigger": "7k"}, ReadMaxBytes),
        ({"maxMessagesPerTrigger": "7", "maxBytesPerTrigger": "7k"}, ReadMaxRows),
    ],
    fresh=fresh,
)
def test_default_limit_is_one_that_spark_knows(home, options, kind):
    home.append(A, 1)
    assert type(a_reader(home, **options).getDefaultReadLimit()) is kind


@each(
    ("where", "options", "sizes"),
    [
        ("files", {"maxMessagesPerTrigger": "8"}, (8, 8)),
        # Objects are cut where their index has entries, every five messages here.
        ("bucket", {"maxBytesPerTrigger": "10k"}, (1, 15)),
        ("files", {"maxBytesPerTrigger": "10k"}, (1, 15)),
        ("broker", {"maxBytesPerTrigger": "10k"}, (1, 20)),
        ("files", {"maxMessagesPerTrigger": "4", "maxBytesPerTrigger": "1g"}, (4, 4)),
        ("files", {"maxMessagesPerTrigger": "1000", "maxBytesPerTrigger": "10k"}, (1, 15)),
    ],
    fresh=fresh,
)
def test_batch_is_limited_over_all_topics_and_wherever_they_are(home, query, where, options, sizes):
    counts = {A: 60, B: 4, C: 8}
    with home.open() as log, FlightTopics(log) as server:
        for name, count in counts.items():
            topic = log.topic(name, create=True)
            publish(topic, count, size=KILOBYTE)
            if where == "bucket":
                topic.upload()
        if where == "broker":
            options = options | {"config": home.remote_config(), "broker": server.address}
        running = query(topic=",".join(counts), startingOffsets="earliest", **options)
        batches = running.drain()
    assert all(sizes[0] <= len(rows) <= sizes[1] for rows in batches)
    assert {row.topic for row in batches[0]} == {*counts}, "no topic waits for another one"
    for name, count in counts.items():
        assert [row for row in running.rows if row.topic == name] == rows_of(name, range(count))


def test_trigger_that_takes_everything_has_no_limits(home, limited_query):
    home.append(A, 20)
    running = limited_query(
        startingOffsets="earliest", maxMessagesPerTrigger="3", maxBytesPerTrigger="1"
    )
    assert len(running.run(EVERYTHING)) == 20


# -- Spark before 4.2, which does not say where a batch starts ------------------------------------


@each("is_done", [True, False], fresh=fresh)
def test_older_spark_continues_with_limits_where_the_checkpoint_is(home, older_query, is_done):
    home.append(A, 20)
    running = older_query(startingOffsets="earliest", maxMessagesPerTrigger="3")
    running.run()
    running.run()
    running.plan()
    if is_done:
        running.finish(running.collect())
    running.restart(startingOffsets="latest", maxMessagesPerTrigger="4")
    assert [len(rows) for rows in running.drain()] == [*([] if is_done else [3]), 4, 4, 3]
    assert offsets_of(running.rows) == list(range(20))


def test_older_spark_reads_one_limited_batch_with_available_now(home, older_query, caplog):
    home.append(A, 10)
    running = older_query(startingOffsets="earliest", maxMessagesPerTrigger="4")
    with caplog.at_level(logging.WARNING, "ister.spark.stream"):
        runs, warned = [], []
        for _ in range(4):
            runs.append(running.available_now())
            warned.append("reads one batch only" in caplog.text)
            caplog.clear()
    assert [len(rows) for run in runs for rows in run] == [4, 4, 2]
    assert warned == [True, True, False, False], "as long as there is a rest"
    unlimited = older_query(startingOffsets="earliest")
    assert unlimited.available_now() == [rows_of(A, range(10))]
    assert not caplog.text, "there is no limit to speak of"


def test_end_that_spark_asks_for_before_it_tells_the_position_is_refused(home, query):
    """As it does before 4.2 with spark.sql.streaming.triggerAvailableNowWrapper.enabled."""
    home.append(A, 5)
    running = query(startingOffsets="earliest")
    running.run()
    home.append(A, 5)
    reader, last = a_reader(home, startingOffsets="earliest"), json.loads(running.offsets[-1])
    reader.latestOffset()
    with pytest.raises(UnsupportedOperationError, match=r"triggerAvailableNowWrapper.* 4\.2"):
        reader.partitions(last, last)


@each("position", [3, 5])
def test_batch_that_does_not_begin_at_the_last_end_is_refused(home, position):
    home.append(A, 10)
    reader = a_reader(home, startingOffsets="earliest", maxMessagesPerTrigger="4")
    first = reader.latestOffset()
    second = reader.latestOffset()
    first["topics"][A]["offset"] = position
    with pytest.raises(ConflictError, match=f"begins at 4, and the last one ended at {position}"):
        reader.partitions(first, second)
    lenient = a_reader(home, startingOffsets="earliest", failOnDataLoss="false")
    assert len(lenient.partitions(first, second)) == 1


# -- available now ------------------------------------------------------------------------------


def test_available_now_sees_what_was_synced_a_moment_ago(home, limited_query):
    """The owner's checkpoint lags; a read that happens once waits for it."""
    with home.open() as log:
        topic = log.topic(A, create=True)
        running = limited_query(startingOffsets="earliest")
        for _ in range(3):
            first = topic.watermarks.next
            topic.append_many([payload_of(A, first), payload_of(A, first + 1)])
            topic.flush()
            assert running.available_now() == [rows_of(A, [first, first + 1])]


def test_available_now_that_begins_at_the_end_survives_a_producer(home, limited_query):
    """Spark freezes the end first and asks for the start afterwards."""
    home.append(A, 10)
    running = limited_query(startingOffsets="latest")
    running.driver.prepareForTriggerAvailableNow()
    home.append(A, 5)
    seen = [row for rows in running.drain() for row in rows]
    seen += [row for rows in running.available_now() for row in rows]
    first = seen[0].offset if seen else 15
    assert first in (10, 15)
    assert offsets_of(seen) == list(range(first, 15))


def test_available_now_survives_a_topic_that_is_made_meanwhile(home, limited_query):
    home.append(A, 3)
    running = limited_query(topicPattern="/default/.*", startingOffsets="earliest")
    running.driver.prepareForTriggerAvailableNow()
    home.append(B, 2)
    seen = [row for rows in running.drain() for row in rows]
    seen += [row for rows in running.available_now() for row in rows]
    assert sorted(seen) == rows_of(A, range(3)) + rows_of(B, range(2))


# -- topics that come and go --------------------------------------------------------------------


def test_new_topic_that_matches_is_read_from_its_earliest_message(home, query):
    home.append(A, 3)
    running = query(topicPattern="/default/.*", startingOffsets="latest")
    assert running.run() == []
    home.append(B, 4)
    assert running.run() == rows_of(B, range(4)), "also under latest: nothing of it was ever seen"
    home.append("/other/x", 4)
    assert running.run() == []


LOSSES = {
    "deleted": ("was deleted", ConflictError),
    "made again": ("deleted and made again", ConflictError),
    "aged out": ("5 up to, not including, 10 aged out", DataGapError),
}


def _lose(home, how):
    if how == "deleted":
        home.delete(A)
    elif how == "made again":
        home.delete(A)
        home.append(A, 2)
    else:
        home.append(A, 5, upload=True, size=KILOBYTE)
        home.append(A, 5, upload=True)
        home.age_out(10)


@each("how", LOSSES, fresh=fresh)
def test_loss_ends_the_query_unless_it_is_allowed(home, query, caplog, how):
    home.append(A, 5, upload=True, size=KILOBYTE)
    home.append(B, 5)
    running = query(topic=f"{A},{B}", startingOffsets="earliest")
    running.run()
    _lose(home, how)
    text, kind = LOSSES[how]
    with pytest.raises(kind, match=text) as lost:
        running.plan()
    assert A in str(lost.value)
    assert "failOnDataLoss=false" in str(lost.value)
    running.restart(failOnDataLoss="false")
    with caplog.at_level(logging.WARNING, logger="ister.spark.stream"):
        rows = running.run()
    expected = {"deleted": [], "made again": [0, 1], "aged out": [10, 11, 12, 13, 14]}[how]
    assert rows == rows_of(A, expected)
    assert LOSSES[how][0] in caplog.text
    home.append(B, 1)
    assert running.run() == rows_of(B, [5])
    running.restart()
    assert running.run() == []
    if how == "deleted":
        assert A not in ends(running.offsets[-1])
        home.append(A, 2)
        assert running.run() == rows_of(A, range(2)), "one that comes back is a new one"


@each("how", LOSSES, fresh=fresh)
def test_loss_after_a_batch_was_planned(home, query, how):
    """A restarted query gets a batch from Spark's checkpoint whose messages are gone."""
    home.append(A, 5, upload=True, size=KILOBYTE)
    home.append(B, 5)
    running = query(topic=f"{A},{B}", startingOffsets="earliest")
    running.plan()
    _lose(home, how)
    running.restart()
    with pytest.raises((LOSSES[how][1], NotFoundError)) as lost:
        running.collect()
    assert A in str(lost.value)
    running.restart(failOnDataLoss="false")
    assert running.run() == rows_of(B, range(5))
    rest = {"deleted": [], "made again": [0, 1], "aged out": [10, 11, 12, 13, 14]}[how]
    assert running.run() == rows_of(A, rest)


def test_messages_that_age_out_between_plan_and_read(home):
    home.append(A, 5, upload=True, size=KILOBYTE)
    home.append(A, 5, upload=True)
    for fails in ("true", "false"):
        reader = a_reader(home, startingOffsets="earliest", failOnDataLoss=fails)
        start = reader.initialOffset()
        parts = reader.partitions(start, reader.latestOffset(start, EVERYTHING))
        if fails == "true":
            home.age_out(5)
            with pytest.raises(DataGapError) as lost:
                _read(reader, parts)
            assert (lost.value.start, lost.value.end) == (0, 5)
        else:
            assert _read(reader, parts) == list(range(5, 10))


@each("upload", [False, True], fresh=fresh)
def test_topic_made_again_between_plan_and_read_is_not_taken_for_the_old_one(home, upload):
    home.append(A, 5, upload=upload)
    reader = a_reader(home, startingOffsets="earliest")
    start = reader.initialOffset()
    parts = reader.partitions(start, reader.latestOffset(start, EVERYTHING))
    home.delete(A)
    home.append(A, 9, upload=upload)
    with pytest.raises(ConflictError, match="deleted and made again"):
        _read(reader, parts)


def _read(reader, parts):
    return [
        offset
        for part in parts
        for batch in reader.read(part)
        for offset in batch.column(1).to_pylist()
    ]


# -- lag ----------------------------------------------------------------------------------------


def test_reported_end_minus_the_batch_is_the_lag(home, query):
    home.append(A, 10)
    home.append(B, 4)
    running = query(topic=f"{A},{B}", startingOffsets="earliest", maxMessagesPerTrigger="7")
    assert running.driver.reportLatestOffset() is None, "nobody has looked yet"
    running.run()
    latest = ends(running.driver.reportLatestOffset())
    done = ends(running.offsets[-1])
    assert latest == {A: 10, B: 4}
    assert sum(latest.values()) - sum(done.values()) == 7
    running.run()
    assert ends(running.driver.reportLatestOffset()) == ends(running.offsets[-1])


# -- tasks --------------------------------------------------------------------------------------


def test_reader_and_partitions_pickle_at_any_time(home):
    home.append(A, 5, upload=True)
    home.append(A, 5)
    reader = a_reader(home, startingOffsets="earliest", minPartitions="3")
    start = reader.initialOffset()
    parts = reader.partitions(start, reader.latestOffset(start, EVERYTHING))
    _read(reader, parts)
    again = pickle.loads(pickle.dumps((reader, list(parts))))
    assert _read(*again) == list(range(10))


def test_partition_that_spark_makes_up_is_empty(home):
    home.append(A, 5)
    assert list(a_reader(home).read(object())) == []


# -- all at once --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["files", "broker"])
def test_every_message_once_while_its_owner_does_everything_at_once(home, query, request, where):
    """Appends, rotates, uploads and trims beside a query that has limits and is restarted."""
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    rng = random.Random(seed)
    rounds = scaled(20, 400)
    names = (A, B)
    with home.open() as log, FlightTopics(log) as server:
        topics = [log.topic(name, create=True) for name in names]
        publish(topics[0], 1)
        publish(topics[1], 1)

        def own():
            for _ in range(rounds):
                topic = rng.choice(topics)
                publish(topic, rng.randrange(1, 60))
                if rng.random() < 0.4:
                    topic.upload()
                if rng.random() < 0.5:
                    topic.bucket.retention.trim()

        options = {"topic": ",".join(names), "startingOffsets": "earliest"}
        if where == "broker":
            options |= {"config": home.remote_config(), "broker": server.address}
        running = query(**options)
        owning = Task(own)
        other = random.Random(seed + 1)
        while owning.is_running:
            running.run()
            if other.random() < 0.3:
                limit = str(other.randrange(1, 200))
                running.restart(maxMessagesPerTrigger=limit)
        owning.result()
        publish(topics[0], 5)  # which are in no object
        running.restart(maxMessagesPerTrigger="1000000")
        running.drain()
        trimmed = [topic.watermarks.trimmed for topic in topics]
        expected = {topic.name: topic.watermarks.next for topic in topics}
    assert any(trimmed), "local files have gone meanwhile"
    assert (server.calls[READ] > 0) == (where == "broker")
    for name in names:
        mine = [row for row in running.rows if row.topic == name]
        assert mine == rows_of(name, range(expected[name]))
