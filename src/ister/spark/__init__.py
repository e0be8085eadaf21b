"""Topics as Spark tables and streams: `format("ister")`.

    spark.read / readStream ─► options ─► resolver ─► planner ─► tasks: reading ─► Arrow ─► Spark
    df.write / writeStream ──► options ─► tasks: staged rows ─► commit ─► the topic, once

source           the data source: chooses readers and writers
options          parses and checks the options
option_values    parses their values
rows             the schema: columns and their Spark types
row_shape        derived columns: text and JSON payloads, headers
payload_schema   the type of a JSON payload, also from the schema registry
batch, stream    the readers of `spark.read` and `spark.readStream`
pushdown         a batch reader that takes filters
offset_resolver  which topics, and where each begins and ends now
planner          ranges become partitions; does no I/O
read_task        what a read task does
offsets          a stream's offset in its checkpoint, and its lag
views            topics as views in SQL
sink             the writers of `df.write` and `df.writeStream`
row_staging      rows staged in the bucket by write tasks
location         where a log's data is, as sent to workers
owners           finds the broker that has a topic, and calls it
workers          tuning of Python workers
compat           differences between Spark versions
payload, avro    payloads as columns and back
jobs             the pipeline
tables           export targets: Parquet, Iceberg, Delta

Spark finds the format by itself if `ister` is installed (`pyspark_ister`); `register` registers it
explicitly in one session.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final, cast

from ister.base.extras import missing_extra

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ister.spark.offsets import OffsetsBehind, offsets_behind
    from ister.spark.payload import (
        from_avro_payload,
        from_json_payload,
        to_avro_payload,
        to_json_payload,
    )
    from ister.spark.source import IsterDataSource
    from ister.spark.views import register_views

__all__ = [
    "IsterDataSource",
    "OffsetsBehind",
    "from_avro_payload",
    "from_json_payload",
    "offsets_behind",
    "register",
    "register_views",
    "to_avro_payload",
    "to_json_payload",
]

# Each is imported on first use: a dry run of a job needs no PySpark.
_HOMES: Final = {
    "IsterDataSource": "source",
    "OffsetsBehind": "offsets",
    "from_avro_payload": "payload",
    "from_json_payload": "payload",
    "offsets_behind": "offsets",
    "register_views": "views",
    "to_avro_payload": "payload",
    "to_json_payload": "payload",
}


def register(spark: SparkSession) -> None:
    """Registers `format("ister")` in a session, unless Spark has found it by itself.

    Also makes the session this thread's active one. Without Spark Connect, `df.write` and
    `df.writeStream` look a Python format up there, and fail in a thread that has none.

    Raises:
        ConfigError: PySpark is older than 4.0, or missing.
    """
    source = cast("type[IsterDataSource]", _load("IsterDataSource"))
    refused = import_module("pyspark.errors").AnalysisException
    try:
        spark.dataSource.register(source)
    except refused as error:
        # Spark 4.0 refuses a name that it has found by itself; later versions replace it.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
    spark.createDataFrame([], "payload BINARY")  # sets the active session


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _load(name)


def _load(name: str) -> object:
    try:
        import_module(f"{__name__}.compat")  # raises for a Spark that is too old
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ImportError as error:
        raise missing_extra("ister.spark", "spark", error) from error
