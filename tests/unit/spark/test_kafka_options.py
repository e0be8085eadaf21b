"""Options of Spark's Kafka source: what they mean for topics, in batches and in streams."""

import json
import logging
from functools import partial

import pytest

from ister.errors import InvalidRequestError, NotFoundError
from ister.spark import batch, stream
from ister.spark.batch import BatchReader
from ister.spark.options import ReadOptions
from ister.spark.rows import row_schema
from ister.spark.source import IsterDataSource
from tests.support.streams import A, Query, a_reader, offsets_of, payload_of

pytestmark = pytest.mark.usefixtures("quick")

P = "/default/p"
FIRST_MS = 1_700_000_000_000


@pytest.fixture
def query(home):
    return partial(Query, partial(a_reader, home), topic=None)


@pytest.fixture
def now(monkeypatch):
    """The reader's clock, in seconds; it stands still."""
    clock = {"now": 1000.0}
    monkeypatch.setattr(stream.StreamReader, "_now", lambda _: clock["now"])
    return clock


def read(home, **options):
    """The rows of a batch, as (topic, offset), sorted."""
    parsed = ReadOptions.parse(
        {"config": home.config, "columns": "topic,offset", **options}, is_streaming=False
    )
    reader = BatchReader(parsed, row_schema(parsed.columns))
    return sorted(
        row
        for part in reader.partitions()
        for batch in reader.read(part)
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    )


def publish_at_times(home, name, count):
    """Messages one millisecond apart, beginning at `FIRST_MS`."""
    with home.open() as log:
        topic = log.topic(name, create=True)
        for number in range(count):
            topic.append(payload_of(name, number), publish_time=FIRST_MS + number)
        topic.flush()


# -- which topics -------------------------------------------------------------------------------


def test_assigned_partitions_are_read_and_no_others(home, query):
    for number in range(3):
        home.append(f"{P}-part-{number}", 2)
    home.append(A, 1)
    assigned = json.dumps({P: [0, 2], A: [0]})
    expected = [(A, 0)] + [(f"{P}-part-{number}", at) for number in (0, 2) for at in range(2)]
    assert read(home, assign=assigned) == expected
    running = query(assign=assigned, startingOffsets="earliest")
    assert sorted((row.topic, row.offset) for row in running.run()) == expected
    home.append(f"{P}-part-1", 1)
    assert running.run() == []


def test_partition_that_does_not_exist_is_refused(home):
    home.append(A, 1)
    home.append(f"{P}-part-0", 1)
    for assigned in ({A: [1]}, {P: [1]}, {"/default/nothing": [0]}):
        with pytest.raises(NotFoundError, match="has no partition"):
            read(home, assign=json.dumps(assigned))


# -- where to start and end ---------------------------------------------------------------------


def test_offsets_by_partition(home, query):
    for number in range(3):
        home.append(f"{P}-part-{number}", 4)
    starts = json.dumps({P: {"0": 3, "1": -2}})
    running = query(topic=P, startingOffsets=starts)
    assert running.resolve_start() == {f"{P}-part-0": 3, f"{P}-part-1": 0, f"{P}-part-2": 4}
    ends = json.dumps({P: {"0": -1, "1": 1, "2": 0}})
    assert read(home, topic=P, startingOffsets=starts, endingOffsets=ends) == [
        (f"{P}-part-0", 3),
        (f"{P}-part-1", 0),
    ]


def test_times_by_topic_and_partition(home, query):
    publish_at_times(home, f"{P}-part-0", 5)
    publish_at_times(home, f"{P}-part-1", 5)
    publish_at_times(home, A, 5)
    options = {
        "startingOffsetsByTimestamp": json.dumps({P: {"0": FIRST_MS + 3}, A: FIRST_MS + 4}),
        "startingOffsets": json.dumps({P: {"1": 2}}),
    }
    running = query(topic=f"{P},{A}", **options)
    assert running.resolve_start() == {f"{P}-part-0": 3, f"{P}-part-1": 2, A: 4}
    found = read(
        home,
        topic=f"{P},{A}",
        endingOffsetsByTimestamp=json.dumps({P: FIRST_MS + 4, A: FIRST_MS + 100}),
        **options,
    )
    assert found == [(A, 4), (f"{P}-part-0", 3), (f"{P}-part-1", 2), (f"{P}-part-1", 3)]


def test_starting_time_that_no_message_has_reached(home, query):
    publish_at_times(home, A, 5)
    late = {"startingOffsetsByTimestamp": json.dumps({A: FIRST_MS + 5})}
    for start in (lambda: read(home, topic=A, **late), query(topic=A, **late).resolve_start):
        with pytest.raises(InvalidRequestError, match=r"Strategy=latest starts at the end"):
            start()
    late["startingOffsetsByTimestampStrategy"] = "latest"
    assert read(home, topic=A, **late) == []
    assert query(topic=A, **late).resolve_start() == {A: 5}
    assert read(home, topic=A, startingTimestamp=str(FIRST_MS + 5)) == []


# -- how many messages a trigger takes ----------------------------------------------------------


def test_micro_batch_waits_for_enough_messages(home, query, now):
    home.append(A, 1)
    running = query(topic=A, startingOffsets="earliest", minOffsetsPerTrigger="3")
    assert offsets_of(running.run()) == [0], "a query that starts takes what is there"
    home.append(A, 2)
    assert running.run() == []
    home.append(A, 1)
    assert offsets_of(running.run()) == [1, 2, 3]


def test_micro_batch_waits_no_longer_than_the_delay(home, query, now):
    home.append(A, 1)
    running = query(
        topic=A, startingOffsets="earliest", minOffsetsPerTrigger="3", maxTriggerDelay="30s"
    )
    running.run()
    home.append(A, 2)
    now["now"] += 29.9
    assert running.run() == []
    now["now"] += 0.1
    assert offsets_of(running.run()) == [1, 2]
    home.append(A, 1)
    assert running.run() == [], "the delay begins with the last micro-batch"


@pytest.mark.parametrize(("delay", "idle"), [("0s", 0), ("30s", 60)])
def test_message_after_the_delay_is_taken_at_once(home, query, now, delay, idle):
    """The delay does not begin again without messages."""
    home.append(A, 1)
    running = query(
        topic=A, startingOffsets="earliest", minOffsetsPerTrigger="3", maxTriggerDelay=delay
    )
    running.run()
    now["now"] += idle
    assert running.run() == []
    home.append(A, 1)
    assert offsets_of(running.run()) == [1]


def test_least_counts_what_is_there_and_most_what_is_taken(home, query, now):
    home.append(A, 1)
    running = query(
        topic=A, startingOffsets="earliest", minOffsetsPerTrigger="6", maxOffsetsPerTrigger="4"
    )
    assert offsets_of(running.run()) == [0]
    home.append(A, 6)
    assert offsets_of(running.run()) == [1, 2, 3, 4]
    assert running.run() == []


def test_restart_and_available_now_wait_for_nothing(home, query, now):
    home.append(A, 1)
    running = query(topic=A, startingOffsets="earliest", minOffsetsPerTrigger="3")
    running.run()
    home.append(A, 1)
    assert running.run() == []
    running.restart()
    assert offsets_of(running.run()) == [1]
    home.append(A, 1)
    assert [offsets_of(rows) for rows in running.available_now()] == [[2]]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"minOffsetsPerTrigger": "5", "maxTriggerDelay": "-1s"}, "maxTriggerDelay is '-1s'"),
        ({"maxMessagesPerTrigger": "none"}, "maxMessagesPerTrigger is 'none'"),
    ],
)
def test_wrong_value_of_a_stream_is_refused_as_one_of_a_stream(options, reason):
    """`load()` does not know whether it is a stream; the options show it."""
    source = IsterDataSource({"config": "./data", "topic": A, **options})
    with pytest.raises(InvalidRequestError, match=reason):
        source.schema()


# -- what a scan says ---------------------------------------------------------------------------


def scan_of(home, caplog, **options):
    """The level and the text of what the driver logs about a scan."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="ister.spark.batch"):
        read(home, **options)
    (record,) = (one for one in caplog.records if one.name == "ister.spark.batch")
    return record.levelno, record.getMessage()


def test_scan_says_how_much_it_reads_and_which_option_would_narrow_it(home, caplog, monkeypatch):
    """A filter does not: `where offset >= 8` read everything, and nothing said so."""
    home.append(A, 10, upload=True)
    level, text = scan_of(home, caplog, topic=A)
    assert text.startswith(f"scan of {A}: 10 messages, about 0.0 MiB, in 1 tasks; filters are")
    assert "startingOffsets" in text
    assert level == logging.INFO
    monkeypatch.setattr(batch, "_LARGE_BYTES", 1)
    assert scan_of(home, caplog, topic=A)[0] == logging.WARNING
    for option in (
        {"startingOffsets": json.dumps({A: 8})},
        {"endingOffsets": json.dumps({A: {"0": 2}})},
        {"startingTimestamp": "4102444800000"},
        {"endingTimestamp": "1700000000000"},
        {"startingOffsetsByTimestamp": json.dumps({A: 1_700_000_000_000})},
    ):
        level, text = scan_of(home, caplog, topic=A, **option)
        assert level == logging.INFO
        assert "filters" not in text
    assert scan_of(home, caplog, topic=A, startingOffsets=json.dumps({A: 8}))[1].startswith(
        f"scan of {A}: 2 messages"
    )
