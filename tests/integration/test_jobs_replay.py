"""Replays on Spark: through functions and SQL, by ranges, and exactly once whatever ends them."""

import json
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ister.spark.jobs.replay_job import replay
from tests.integration.spark_topics import PUBLISHED_MS, SparkPlace

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


# -- once ---------------------------------------------------------------------------------------


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
