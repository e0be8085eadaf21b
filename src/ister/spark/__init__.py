"""Topics as Spark tables and streams: `format("ister")`.

    spark.read / readStream ─► options ─► heads ─► planner ─► tasks: reading ─► Arrow ─► Spark
    df.write / writeStream ──► options ─► tasks: staged rows ─► commit ─► the topic, once

Spark finds the format by itself where `ister` is installed (`pyspark_ister`); `register` does the
same by hand, for sessions whose workers were started before it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ister.extras import missing_extra

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

try:
    from ister.spark.payload import (
        from_avro_payload,
        from_json_payload,
        to_avro_payload,
        to_json_payload,
    )
    from ister.spark.source import IsterDataSource
except ImportError as error:
    raise missing_extra("ister.spark", "spark", error) from error

__all__ = [
    "IsterDataSource",
    "from_avro_payload",
    "from_json_payload",
    "register",
    "to_avro_payload",
    "to_json_payload",
]


def register(spark: SparkSession) -> None:
    """Makes `format("ister")` known to a session."""
    spark.dataSource.register(IsterDataSource)
