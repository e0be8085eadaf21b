"""`export --schema registry`: a running broker's registry says which columns a topic has."""

import json

import pytest
from danube import DispatchStrategy
from danube.schema import SchemaType

from ister.spark.jobs import export
from ister.spark.location import _close_all
from tests.servers.broker import BrokerProcess
from tests.support.danube import connect, run
from tests.support.exports import commits_in, read_table, tasks_here, where

ORDERS, USERS, OLD, PLAIN = "/default/orders", "/default/users", "/default/old", "/default/plain"
ORDER = {"type": "object", "properties": {"id": {"type": "integer"}, "price": {"type": "number"}}}
ORDER_2 = {**ORDER, "properties": {**ORDER["properties"], "note": {"type": "string"}}}
USER = {"type": "object", "properties": {"id": {"type": "integer"}, "name": {"type": "string"}}}
AVRO = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    directory = tmp_path_factory.mktemp("broker")
    cloud = {"backend": "fs", "root": str(directory / "objects")}
    with BrokerProcess(directory, settings={"storage": {"cloud": cloud}}) as broker:
        yield broker
    _close_all()


@pytest.fixture(scope="module")
def config(broker):
    """The broker's own settings."""
    return str(broker.directory / "ister.yml")


async def _register(session, subject, definition, kind=SchemaType.JSON_SCHEMA):
    data = json.dumps(definition).encode()
    builder = session.client.schema().register_schema(subject).with_type(kind)
    await builder.with_schema_data(data).execute()


async def _send(session, topic, payloads, subject=None):
    builder = session.client.new_producer().with_topic(topic).with_name(f"p{topic[9:]}")
    builder.with_dispatch_strategy(DispatchStrategy.RELIABLE)
    if subject is not None:
        builder.with_schema_subject(subject)
    producer = builder.build()
    await producer.create()
    for payload in payloads:
        await producer.send(payload)
    await producer.close()


@pytest.fixture(scope="module", autouse=True)
def _filled(broker):
    async def play():
        async with connect(broker) as session:
            await _register(session, "order", ORDER)
            await _register(session, "user", USER)
            await _register(session, "old", AVRO, SchemaType.AVRO)
            orders = [b'{"id":%d,"price":%d.5}' % (n, n) for n in range(5)]
            await _send(session, ORDERS, [*orders, b"?"], "order")
            await _send(session, USERS, [b'{"id":7,"name":"Ada"}'], "user")
            await _send(session, OLD, [b"\x02"], "old")
            await _send(session, PLAIN, [b"x"])

    run(play())


def test_columns_are_those_of_the_registered_schema(spark, config, broker, tmp_path):
    """On Spark; a new version of the schema adds a column."""
    options = {"topics": ORDERS, "to": where(tmp_path, "iceberg"), "format": "iceberg"}
    report = export(spark, config, **options, schema="registry", include_tail=True)
    assert report.ok, report.errors
    assert (report.total("messages"), report.total("dead_letters")) == (5, 1)
    rows = read_table(tmp_path, "iceberg")
    assert "payload" not in rows.column_names
    assert [str(rows.schema.field(name).type) for name in ("id", "price")] == ["int64", "double"]
    assert rows["price"].to_pylist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    letters = read_table(tmp_path, "iceberg", "orders_dead_letters")
    assert letters["payload"].to_pylist() == [b"?"]

    async def grow():
        async with connect(broker) as session:
            await _register(session, "order", ORDER_2)
            await _send(session, ORDERS, [b'{"id":9,"price":1,"note":"new"}'], "order")

    run(grow())
    report = export(spark, config, **options, schema="registry", include_tail=True)
    assert (report.ok, report.total("messages")) == (True, 1)
    assert read_table(tmp_path, "iceberg")["note"].to_pylist() == [None] * 5 + ["new"]


def test_topics_with_different_schemas_share_a_table(config, tmp_path):
    for format in ("parquet", "iceberg", "delta"):  # noqa: A001
        with tasks_here() as session:
            report = export(
                session,
                config,
                topics=[ORDERS, USERS],
                to=where(tmp_path, format),
                format=format,
                schema="registry",
                include_tail=True,
            )
        assert report.ok, report.errors
        assert commits_in(tmp_path, format) == 1
        rows = {
            (row["topic"], row["id"]): (row["price"], row["name"])
            for row in read_table(tmp_path, format).to_pylist()
        }
        assert rows[ORDERS, 3] == (3.5, None)
        assert rows[USERS, 7] == (None, "Ada")


def test_topics_without_a_json_schema_are_told_and_harm_no_other(config, tmp_path):
    to = str(tmp_path / "each" / "{topic}")
    with tasks_here() as session:
        report = export(session, config, to=to, schema="registry", include_tail=True)
    found = {error["topic"]: error for error in report.errors}
    assert {topic: error["code"] for topic, error in found.items()} == {
        OLD: "INVALID_ARGUMENT",
        PLAIN: "NOT_FOUND",
    }
    assert "avro" in found[OLD]["message"]
    assert report.topics[USERS]["messages"] == 1
