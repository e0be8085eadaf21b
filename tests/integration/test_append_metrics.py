"""Whoever publishes, and however: `/metrics` counts and times it."""

import asyncio
import json
import urllib.request

import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.flight_publisher import publishing
from ister.client import Client
from ister.client.flight import FlightClient
from tests.support.broker import a_broker
from tests.support.cases import each
from tests.support.danube import connect, run, topic_for
from tests.support.http_api import ACTION

LATENCY = "danube_wal_append_latency_seconds"
ROWS = pa.record_batch({"payload": pa.array([b"a", b"bc"])})


def read_metrics(address, topic):
    """How many appends were timed, and the messages and bytes that were appended to a topic."""
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        text = answer.read().decode()
    values = {
        (sample.name, sample.labels.get("topic")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert (
        values[f"{LATENCY}_count", None]
        == values["ister_wal_append_enq_latency_seconds_count", None]
    )
    assert values[f"{LATENCY}_sum", None] >= 0
    return (
        values[f"{LATENCY}_count", None],
        values.get(("danube_wal_append_total", topic), 0),
        values.get(("danube_wal_append_bytes_total", topic), 0),
    )


def by_danube(broker, topic):
    async def scenario():
        async with connect(broker) as danube:
            producer = await danube.producer(topic)
            await producer.send(b"a")
            await producer.send(b"bc")

    run(scenario())


def by_client(broker, topic):
    with Client(broker.address) as client, client.producer(topic, create=True) as producer:
        for payload in (b"a", b"bc"):
            producer.send(payload)


def by_flight(broker, topic):
    with (
        FlightClient(broker.flight) as flight,
        publishing(flight, topic, ROWS.schema, create=True) as rows,
    ):
        rows.write(ROWS)


def by_flight_with_attributes(broker, topic):
    batch = ROWS.append_column("routing_key", pa.array(["k", None]))
    with (
        FlightClient(broker.flight) as flight,
        publishing(flight, topic, batch.schema, producer="p", create=True) as rows,
    ):
        rows.write(batch)


def by_http(broker, topic):
    for path, body in (
        ("", {"topic": topic}),
        (f"{topic}/publish", {"payload": "a"}),
        (f"{topic}/publish", {"payload": "bc"}),
    ):
        request = urllib.request.Request(
            f"http://{broker.http}/api/topics{path}",
            data=json.dumps(body).encode(),
            headers={**ACTION, "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200


@each("publish", [by_danube, by_client, by_flight, by_flight_with_attributes, by_http])
def test_what_is_published_through_a_port_is_counted_and_timed(broker, publish, request):
    topic = f"{topic_for(request)}-{publish.__name__}"
    timed, *_ = read_metrics(broker.http, topic)
    publish(broker, topic)
    after, messages, size = read_metrics(broker.http, topic)
    assert messages == 2
    assert size > 3
    assert after > timed


@pytest.mark.nightly
def test_what_sparks_sink_publishes_is_counted_and_timed(broker, spark, request):
    topic = topic_for(request)
    timed, *_ = read_metrics(broker.http, topic)
    rows = spark.range(0, 100, numPartitions=2).selectExpr("cast(id AS string) AS payload")
    writer = rows.write.format("ister").mode("append")
    writer.options(broker=broker.flight, topic=topic).save()
    after, messages, _ = read_metrics(broker.http, topic)
    assert messages == 100
    assert after > timed


@each(
    ("append", "count"),
    [
        (lambda topic: topic.append(b"a"), 1),
        (lambda topic: topic.append_many([b"a", b"bc"]), 2),
        (lambda topic: topic.append_arrow(ROWS), 2),
    ],
    ids=["append", "append_many", "append_arrow"],
)
async def test_what_is_appended_in_the_brokers_process_is_counted_and_timed(
    tmp_path, append, count
):
    async with a_broker(tmp_path) as (broker, _, listening):
        address = f"127.0.0.1:{listening.http}"
        served = await broker.topics.get_or_create("/default/t", is_reliable=True)
        timed, *_ = await asyncio.to_thread(read_metrics, address, served.name)
        await asyncio.to_thread(append, served.topic)
        after, messages, _ = await asyncio.to_thread(read_metrics, address, served.name)
        assert (after - timed, messages) == (1, count)
