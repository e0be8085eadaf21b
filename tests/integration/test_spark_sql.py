"""Topics in Spark SQL, typed payloads and the names of the Kafka source, with a real Spark."""

import json

import pytest
from pyspark.errors import ParseException, PySparkException

import ister
from ister.errors import ConflictError
from ister.spark import offsets_behind, register_views
from ister.spark.compat import HAS_LIMITS
from tests.support.streams import A, B, Home


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path)


@pytest.fixture
def database(spark):
    """The name of a database that is removed afterwards."""
    name = "ister_test"
    yield name
    spark.sql(f"DROP DATABASE IF EXISTS {name} CASCADE")


def publish(home, name, *payloads):
    with home.open() as log:
        topic = log.topic(name, create=True)
        topic.append_many(list(payloads))
        topic.flush()
        topic.wal.save_checkpoint()


def test_views_see_new_messages_and_new_topics(spark, home, database):
    """Goal: every query on a view reads what is there, without a call between.

    Views of topics that were deleted go with the next registration; one that the user has made in
    the same database stays.
    """
    home.append(A, 3)
    home.append("/default/p-part-0", 1)
    home.append("/default/p-part-1", 2)
    home.append("/other/x-y", 1)

    def count(view):
        return spark.sql(f"SELECT count(*) AS n FROM {database}.{view}").first().n

    views = register_views(spark, home.config, pattern="/default/.*", database=database)
    assert views == {f"{database}.default_a": A, f"{database}.default_p": "/default/p"}
    assert (count("default_a"), count("default_p")) == (3, 3)
    home.append(A, 2)
    assert count("default_a") == 5, "fresh at every query"
    query = f"SELECT max(x.offset) AS n FROM {database}.default_a x JOIN {database}.default_a y"
    assert spark.sql(query).first().n == 4

    spark.sql(f"CREATE VIEW {database}.mine AS SELECT payload FROM {database}.default_a")
    home.append(B, 1)
    home.delete("/default/p-part-0")
    home.delete("/default/p-part-1")
    views = register_views(
        spark, home.config, database=database, options={"startingOffsets": "earliest"}
    )
    assert set(views.values()) == {A, B, "/other/x-y"}
    listed = {row.tableName for row in spark.sql(f"SHOW TABLES IN {database}").collect()}
    expected = {"default_a", "default_b", "other_x_y", "mine", "messages"}
    assert listed - {"v"} == expected
    assert (count("default_b"), count("other_x_y"), count("mine")) == (1, 1, 5)


def test_views_replace_only_views_of_their_own_log(spark, home, database, tmp_path):
    """Goal: a query never reads another log than the one that its view was registered for."""
    home.append(A, 3)
    with ister.open(tmp_path / "other") as other:
        other.topic(A, create=True).append(b"other")
        other.topic(B, create=True).append(b"other")
    register_views(spark, home.config, database=database)
    with pytest.raises(ConflictError, match=f"{database}.default_a exists, and is of the log"):
        register_views(spark, str(tmp_path / "other"), database=database)
    spark.sql(f"CREATE VIEW {database}.default_B AS SELECT 1 AS mine")
    with pytest.raises(ConflictError, match="default_b exists, and is not one of a topic"):
        register_views(spark, str(tmp_path / "other"), database=database, pattern=B)
    assert spark.sql(f"SELECT count(*) AS n FROM {database}.default_a").first().n == 3
    assert spark.sql(f"SELECT mine FROM {database}.default_b").first().mine == 1


def test_tables_take_options_in_the_query(spark, home, database):
    """Goal: one table reads and writes any topic; one with options explains itself."""
    home.append(A, 3)
    place = f"config = '{home.config}'"
    spark.sql(f"CREATE DATABASE {database}")
    with pytest.raises(PySparkException, match=r"create the table without OPTIONS.*WITH \(config"):
        spark.sql(f"CREATE TABLE {database}.t USING ister OPTIONS (topic '{A}', {place})")
    spark.sql(f"CREATE TABLE {database}.t USING ister")
    spark.sql(f"CREATE TABLE {database}.sink (payload BINARY, routing_key STRING) USING ister")
    with pytest.raises(PySparkException, match="no option is given"):
        spark.sql(f"SELECT * FROM {database}.t").collect()
    spark.sql(
        f"INSERT INTO {database}.sink WITH ({place}, topic = '{B}') "
        f"SELECT payload, 'k' FROM {database}.t WITH ({place}, topic = '{A}') WHERE offset > 0"
    )
    found = home.read(B)
    assert [message.payload for message in found] == [b"/default/a#1", b"/default/a#2"]
    assert {message.routing_key for message in found} == {"k"}


def test_typed_payloads_in_batches_streams_and_tables(spark, home, database, tmp_path):
    publish(home, A, b'{"id": 1, "amount": 2.5}', b"nonsense", b'{"id": 3, "amount": 0.25}')
    options = {
        "config": home.config,
        "subscribe": A,
        "payloadFormat": "json",
        "payloadSchema": "id BIGINT, amount DECIMAL(10, 2)",
        "payloadErrors": "column",
    }
    frame = spark.read.format("ister").options(**options).load()
    kind = frame.schema["payload"].dataType.simpleString()
    assert kind == "struct<id:bigint,amount:decimal(10,2)>"
    rows = frame.select("payload.id", "payload.amount", "payload_error").orderBy("offset").collect()
    assert [(row.id, str(row.amount)) for row in rows] == [(1, "2.50"), (None, "None"), (3, "0.25")]
    assert rows[1].payload_error.startswith("not JSON")
    bad = spark.read.format("ister").options(**options | {"payloadSchema": "id BIGNUM"})
    with pytest.raises(ParseException, match="BIGNUM"):
        bad.load()
    more = "id BIGINT>, offset STRUCT<x INT"
    with pytest.raises(PySparkException, match=r"names each of its columns once|is bigint"):
        spark.read.format("ister").options(**options | {"payloadSchema": more}).load().collect()

    seen = []
    query = (
        spark.readStream.format("ister")
        .options(**options, startingOffsets=json.dumps({A: {"0": 1}}), maxOffsetsPerTrigger=1)
        .load()
        .select("payload.id")
        .writeStream.foreachBatch(lambda batch, _: seen.append(batch.collect()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(120)
    # Before 4.2 Spark runs one micro-batch, and does not report the end of the topic.
    assert [[row.id for row in rows] for rows in seen] == (
        [[None], [3]] if HAS_LIMITS else [[None]]
    )
    behind = [offsets_behind(report)[0].by_topic for report in query.recentProgress[:2]]
    assert behind == [{A: 1}, {A: 0}] or not HAS_LIMITS
    assert query.recentProgress[0]["sources"][0]["metrics"] == {}

    spark.sql(f"CREATE DATABASE {database}")
    spark.sql(f"CREATE TABLE {database}.t (offset BIGINT, payload STRUCT<id: BIGINT>) USING ister")
    spark.sql(
        f"CREATE VIEW {database}.orders AS SELECT offset, payload.id FROM {database}.t "
        f"WITH (config = '{home.config}', topic = '{A}')"
    )
    found = spark.sql(f"SELECT sum(id) AS n FROM {database}.orders")
    assert found.first().n == 4


def test_least_of_a_trigger_is_a_limit_that_spark_takes(spark, home, tmp_path):
    home.append(A, 3)
    query = (
        spark.readStream.format("ister")
        .options(config=home.config, topic=A, startingOffsets="earliest", minOffsetsPerTrigger=10)
        .option("includeHeaders", "true")
        .load()
        .writeStream.format("memory")
        .queryName("least")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        query.processAllAvailable()
        assert spark.table("least").count() == 3, "what is there when it starts"
        assert "headers" in spark.table("least").columns
    finally:
        query.stop()
