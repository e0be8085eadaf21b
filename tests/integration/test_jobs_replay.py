"""Replays on Spark: through functions and SQL, by ranges, and exactly once whatever ends them."""

import json
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from benchmarks.flight_publisher import publishing
from ister.client.flight import FlightClient
from ister.errors import InvalidRequestError, NotFoundError, OffsetOutOfRangeError
from ister.spark.jobs.replay_job import replay
from ister.wire.contract import RangeTicket
from tests.integration.spark_topics import PUBLISHED_MS, SparkPlace
from tests.servers.broker import BrokerProcess
from tests.servers.flight import FlightTopics
from tests.support import replay_functions

A, B = "/default/a", "/default/b"
CHUNK_BYTES = 4_000


@pytest.fixture
def place(tmp_path):
    return SparkPlace(tmp_path, metadata={"lease_ttl_seconds": 4})


def numbers(payloads):
    return [int(payload.split(b".")[0]) for payload in payloads]


def done(report):
    assert report.ok, report.errors
    [fields] = report.as_json()["topics"]
    return fields


# -- functions ----------------------------------------------------------------------------------


@pytest.mark.nightly
def test_messages_pass_through_a_function_in_their_order(spark, place):
    place.fill(A, 300, uploaded=200)
    report = replay(
        spark,
        place.config,
        source=A,
        target=B,
        transform="tests.support.replay_functions:only_even",
        chunk_bytes=CHUNK_BYTES,
    )
    fields = done(report)
    assert fields["messages_read"] == 300
    assert fields["messages"] == 150
    assert fields["chunks"] > 3
    assert numbers(place.payloads(B)) == list(range(0, 300, 2))
    assert place.staged_files() == []


def test_all_fields_of_a_message_are_kept_and_changed(spark, place, tmp_path):
    place.fill(A, 20, uploaded=10)
    file = tmp_path / "shop.py"
    file.write_text(
        "def change(message):\n"
        "    if message.offset == 3:\n"
        "        return None\n"
        "    if message.offset == 4:\n"
        "        return [b'one', {'payload': 'two', 'routing_key': 'k'}]\n"
        "    return message.replace(attributes={**message.attributes, 'x': 'y'})\n"
    )
    report = replay(spark, place.config, source=A, target=B, transform=f"{file}:change", mark=True)
    assert done(report)["messages"] == 20
    with place.open() as log:
        found = list(log.topic(B).read())
    assert [message.attributes["ister-source-offset"] for message in found] == [
        str(offset) for offset in [0, 1, 2, 4, 4, *range(5, 20)]
    ]
    first, one, two = found[0], found[3], found[4]
    assert first.attributes["x"] == "y"
    assert first.attributes["n"] == "0"
    assert first.producer_name == "p"
    assert first.publish_time == datetime.fromtimestamp(PUBLISHED_MS / 1000, UTC)
    assert (one.payload, one.routing_key, one.attributes["n"]) == (b"one", None, "4")
    assert (two.payload, two.routing_key) == (b"two", "k")


def test_function_of_a_program_is_called_with_batches(spark, place):
    place.fill(A, 50, uploaded=50)

    def upper(batch: pa.RecordBatch):
        payload = pc.cast(pc.utf8_upper(pc.cast(batch["payload"], pa.string())), pa.binary())
        yield pa.record_batch({"payload": payload}).slice(0, 1)
        yield pa.record_batch({"payload": payload}).slice(1)

    report = replay(spark, place.config, source=A, target=B, transform=upper, name="upper")
    assert done(report)["messages"] == 50
    assert numbers(place.payloads(B)) == list(range(50))


@pytest.mark.nightly
def test_copy_through_a_server_that_has_the_log_open(spark, place):
    with place.open() as log, FlightTopics(log) as server:
        topic = log.topic(A, create=True)
        for number in range(100):
            topic.append(b"%d." % number)
        topic.flush()
        report = replay(
            spark, place.elsewhere, broker=server.address, source=A, target=B, chunk_bytes=2_000
        )
        assert done(report)["messages"] == 100
        assert numbers(message.payload for message in log.topic(B).read()) == list(range(100))
        assert server.calls["append_staged"] == done(report)["chunks"]


@pytest.mark.nightly
def test_broker_that_has_the_log_open_is_found_by_itself(spark, tmp_path):
    rows = pa.record_batch({"payload": pa.array([b"%d." % n for n in range(50)], pa.binary())})
    with BrokerProcess(tmp_path) as broker, FlightClient(broker.flight) as client:
        with publishing(client, A, rows.schema, create=True) as stream:
            stream.write(rows)
            stream.flush()
        report = replay(spark, str(tmp_path / "ister.yml"), source=A, target=B, start=10)
        assert done(report)["messages"] == 40
        status = client.watermarks([B])[B]
        ticket = RangeTicket(topic=B, incarnation=status.incarnation, start=0, end=status.synced)
        found = [row for batch in client.read(ticket) for row in batch["payload"].to_pylist()]
        assert numbers(found) == list(range(10, 50))


# -- ranges -------------------------------------------------------------------------------------


def moment(number):
    """When a message was published."""
    return datetime.fromtimestamp(PUBLISHED_MS / 1000 + number, UTC)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (moment(30), moment(35), range(30, 35)),
        ("latest", None, range(0)),
    ],
)
def test_ranges_by_offset_and_by_time(spark, place, start, end, expected):
    place.fill(A, 100, uploaded=60)
    report = replay(spark, place.config, source=A, target=B, start=start, end=end)
    assert report.ok, report.errors
    assert numbers(place.payloads(B) if len(expected) else []) == list(expected)
    assert (B in place.topics()) == bool(len(expected))


def test_range_that_is_not_there(spark, place):
    place.fill(A, 10)
    report = replay(spark, place.config, source=A, target=B, end=11)
    assert [error["code"] for error in report.errors] == [OffsetOutOfRangeError.code]
    report = replay(spark, place.config, source=A, target=B, create=False)
    assert [error["code"] for error in report.errors] == [NotFoundError.code]
    assert place.topics() == [A]


# -- SQL ----------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_query_sees_the_whole_range_and_keeps_the_order(spark, place):
    place.fill(A, 200, uploaded=120)
    query = "SELECT *, upper(text) AS payload FROM (SELECT * EXCEPT (payload) FROM messages)"
    query += " WHERE offset % 3 = 0"
    arguments = {"source": A, "target": B, "sql": query, "chunk_bytes": CHUNK_BYTES}
    assert done(replay(spark, place.config, **arguments))["chunks"] == 1
    assert numbers(place.payloads(B)) == list(range(0, 200, 3))
    with place.open() as log:
        assert next(iter(log.topic(B).read())).attributes == {"n": "0"}
    assert place.staged_files() == []
    assert replay(spark, place.config, **arguments).more["state"] == "already done"
    count = "SELECT CAST(count(*) AS string) AS payload FROM messages"
    done(replay(spark, place.config, source=A, target="/default/c", sql=count))
    assert place.payloads("/default/c") == [b"200"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("SELECT payload FROM nothing", "cannot be used"),
        ("SELEC payload", "cannot be used"),
        ("SELECT text AS value FROM messages", "value"),
    ],
)
def test_query_that_makes_no_sense(spark, place, query, text):
    place.fill(A, 5)
    report = replay(spark, place.config, source=A, target=B, sql=query)
    [error] = report.errors
    assert error["code"] == InvalidRequestError.code
    assert text in error["message"]
    assert place.topics() == [A]


# -- errors of a function -----------------------------------------------------------------------


@pytest.mark.nightly
def test_function_that_fails_is_named_with_its_message_and_goes_on_once_it_is_mended(
    spark, place, tmp_path
):
    place.fill(A, 200, uploaded=150)
    file = tmp_path / "shop.py"
    file.write_text("def f(message):\n    return str(1 // (message.offset - 120)) + '.'\n")
    arguments = {"source": A, "target": B, "transform": f"{file}:f", "chunk_bytes": CHUNK_BYTES}
    report = replay(spark, place.config, **arguments)
    [error] = report.errors
    assert error["offset"] == 120
    assert error["topic"] == A
    assert "ZeroDivisionError" in error["message"]
    assert error["path"] == f"{file}:2"
    before = place.payloads(B)
    assert 0 < len(before) <= 120
    assert place.staged_files() == []
    file.write_text("def f(message):\n    return str(message.offset) + '.'\n")
    report = replay(spark, place.config, **arguments)
    assert report.more["state"] == "continued"
    assert done(report)["messages"] == 200 - len(before)
    after = place.payloads(B)
    assert after[: len(before)] == before
    assert numbers(after[len(before) :]) == list(range(len(before), 200))


# -- once ---------------------------------------------------------------------------------------


def test_the_same_replay_again_does_nothing(spark, place):
    place.fill(A, 60, uploaded=60)
    arguments = {"source": A, "target": B, "transform": replay_functions.only_even}
    done(replay(spark, place.config, **arguments))
    place.fill(A, 90, uploaded=0)
    again = replay(spark, place.config, **arguments, chunk_bytes=500)
    assert again.ok
    assert again.more["state"] == "already done"
    assert again.more["newer_messages"] == 90
    assert len(place.payloads(B)) == 30
    other = replay(spark, place.config, **arguments, name="another")
    assert done(other)["messages"] == 75
    assert len(place.payloads(B)) == 105


def test_target_that_was_deleted_gets_everything_again(spark, place):
    place.fill(A, 40, uploaded=40)
    for _ in range(2):
        assert done(replay(spark, place.config, source=A, target=B))["messages"] == 40
        with place.open() as log:
            log.delete(B)


# -- a dry run ----------------------------------------------------------------------------------


def test_dry_run_shows_a_sample_and_changes_nothing(spark, place):
    place.fill(A, 100, uploaded=70)
    before = json.dumps(sorted(place.topics()))
    arguments = {"source": A, "target": B, "dry_run": True, "sample": 3}
    report = replay(
        spark,
        place.config,
        transform="tests.support.replay_functions:only_even",
        start=10,
        **arguments,
    )
    fields = done(report)
    assert (fields["start_offset"], fields["next_offset"]) == (10, 100)
    assert fields["bytes"] > 0
    texts = [message["payload"].split(".")[0] for message in report.more["sample"]]
    assert texts == ["10", "12", "14"]
    report = replay(spark, place.config, sql="SELECT text AS payload FROM messages", **arguments)
    assert [message["payload"].split(".")[0] for message in report.more["sample"]] == [
        "0",
        "1",
        "2",
    ]
    assert json.dumps(sorted(place.topics())) == before
    assert place.staged_files() == []
