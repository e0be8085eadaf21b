"""The export on Spark: three formats, read back by DuckDB and by Spark."""

from pathlib import Path

import pytest
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know it by

from ister.spark.jobs import export
from ister.spark.location import _close_all
from tests.integration.spark_topics import SparkPlace
from tests.servers.s3 import SECRET_KEY, moto_server
from tests.support.exports import (
    FORMATS,
    iceberg_catalog,
    offsets_in,
    read_table,
    tasks_here,
    where,
)

TOPIC = "/default/orders"


@pytest.fixture(autouse=True)
def _closed():
    yield
    _close_all()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A data directory with a topic over several days, of which a part is not tiered."""
    place = SparkPlace(tmp_path_factory.mktemp("data"))
    place.fill(TOPIC, 1200, uploaded=1000, step_ms=600_000)
    return place


def _read_by_spark(spark, tmp_path: Path, format: str, name: str = "orders"):
    if format == "iceberg":
        # Spark has no Iceberg of its own here: it reads the files that the table consists of.
        with iceberg_catalog(tmp_path) as catalog:
            tasks = catalog.load_table(f"default.{name}").scan().plan_files()
            return spark.read.parquet(*[task.file.file_path for task in tasks])
    if format == "delta":
        from deltalake import DeltaTable  # noqa: PLC0415

        return spark.read.parquet(*DeltaTable(where(tmp_path, format, name)).file_uris())
    return spark.read.parquet(where(tmp_path, format, name))


@pytest.mark.parametrize("format", FORMATS)
def test_the_table_is_the_topic(spark, place, tmp_path, format):
    to = where(tmp_path, format)
    first = export(spark, place.config, to=to, format=format, start=300, end=700)
    assert first.ok, first.errors
    assert first.total("messages") == 400
    report = export(spark, place.config, to=to, format=format, include_tail=True)
    assert (report.ok, report.total("messages")) == (True, 800)
    again = export(spark, place.config, to=to, format=format, include_tail=True)
    assert (again.total("messages"), again.total("files")) == (0, 0)

    assert offsets_in(tmp_path, format) == list(range(1200))
    by_duckdb = read_table(tmp_path, format)
    by_connector = {
        row.offset: row
        for row in spark.read.format("ister")
        .option("config", place.config)
        .option("topic", TOPIC)
        .load()
        .collect()
    }
    assert by_duckdb.column("payload").to_pylist() == [
        bytes(by_connector[offset].payload) for offset in range(1200)
    ]
    [row] = (
        _read_by_spark(spark, tmp_path, format)
        .agg(
            F.count("*").alias("rows"),
            F.sum("offset").alias("offsets"),
            F.count_distinct(F.to_date("publish_time")).alias("days"),
            F.sum(F.length("payload")).alias("bytes"),
        )
        .collect()
    )
    assert (row.rows, row.offsets) == (1200, sum(range(1200)))
    assert row.days == len({row.publish_time.date() for row in by_connector.values()}) == 10
    assert row.bytes == sum(len(row.payload) for row in by_connector.values())


def test_files_are_in_folders_of_their_dates(spark, place, tmp_path):
    export(spark, place.config, to=where(tmp_path, "parquet"))
    found = spark.read.parquet(where(tmp_path, "parquet"))
    assert "publish_date" in found.columns
    wrong = found.where(F.to_date("publish_time") != F.col("publish_date")).count()
    assert (wrong, found.count()) == (0, 1000)


@pytest.mark.nightly
@pytest.mark.parametrize("format", FORMATS)
def test_a_table_in_a_bucket(tmp_path, format):
    """With the options of the log's own bucket; tasks run here, the store is a real server."""
    with moto_server() as s3, tasks_here() as session:
        cloud = {"backend": "s3", "root": f"s3://{s3.bucket}/log", "options": s3.options()}
        place = SparkPlace(tmp_path / "data", cloud=cloud)
        place.fill(TOPIC, 60, uploaded=50, step_ms=6_000_000)
        to, options = f"s3://{s3.bucket}/lake/{format}", {}
        if format == "iceberg":
            to = "default.orders"
            uri, warehouse = f"sqlite:///{tmp_path}/catalog.db", f"s3://{s3.bucket}/lake"
            options["catalog"] = {"type": "sql", "uri": uri, "warehouse": warehouse}
        counts = []
        for include_tail in (False, True, True):
            report = export(
                session, place.config, to=to, format=format, include_tail=include_tail, **options
            )
            assert report.ok, report.errors
            counts.append(report.total("messages"))
            assert SECRET_KEY not in str(report.as_json())
        assert counts == [50, 10, 0]
