"""A query of Spark's Kafka source, ported: what changes, and how far it is behind.

The query that is ported counts the clicks on each page:

    clicks = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", "kafka:9092")
        .option("subscribe", "clicks")
        .option("startingOffsets", '{"clicks": {"0": 10, "1": -2}}')
        .option("maxOffsetsPerTrigger", 30)
        .option("includeHeaders", "true")
        .load()
    )

Three lines are different here: the format, the place of the data, and the topic's name, which has a
namespace. The other options are the same. A `select` gives the columns Kafka's names.

    python examples/spark_from_kafka.py [DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from tempfile import TemporaryDirectory

from pyspark.sql import DataFrame, SparkSession

import ister
from ister.spark import offsets_behind

TOPIC = "/default/clicks"
PAGES = ("/", "/cart", "/help")

# Spark starts its workers with `python3`, which is this Python only in an activated environment.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def publish(directory: str) -> None:
    """Fifty clicks in each of two partitions."""
    with ister.open(directory) as log:
        for partition in range(2):
            topic = log.topic(f"{TOPIC}-part-{partition}", create=True)
            for number in range(50):
                topic.append(
                    PAGES[number % 3].encode(),
                    routing_key=f"user-{number % 7}",
                    attributes={"browser": "firefox" if number % 2 else "chrome"},
                )


def read(spark: SparkSession, directory: str) -> DataFrame:
    """The stream, with the columns of the Kafka source."""
    messages = (
        spark.readStream.format("ister")
        .option("config", directory)
        .option("subscribe", TOPIC)
        .option("startingOffsets", json.dumps({TOPIC: {"0": 10, "1": -2}}))
        .option("maxOffsetsPerTrigger", 30)
        .option("includeHeaders", "true")
        .load()
    )
    return messages.selectExpr(
        "CAST(routing_key AS BINARY) AS key",
        "payload AS value",
        "topic",
        "offset",
        "publish_time AS timestamp",
        "headers",
    )


def run(clicks: DataFrame, checkpoint: str) -> None:
    """Counts what is there, in micro-batches, and prints how many messages each leaves."""
    by_page: Counter[str] = Counter()
    by_browser: Counter[str] = Counter()

    def count(rows: DataFrame, _: int) -> None:
        # From here on everything is as it was with Kafka.
        found = rows.selectExpr(
            "CAST(value AS STRING) AS page", "CAST(headers[0].value AS STRING) AS browser"
        ).collect()
        by_page.update(row.page for row in found)
        by_browser.update(row.browser for row in found)

    query = (
        clicks.writeStream.foreachBatch(count)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    for progress in query.recentProgress:
        # Kafka has maxOffsetsBehindLatest and so on in `metrics`; Spark asks Python for none.
        (behind,) = offsets_behind(progress)
        print(f"{progress['numInputRows']} clicks, {behind.total} behind, at most {behind.max}")
    print("by page:", dict(sorted(by_page.items())))
    print("by browser:", dict(sorted(by_browser.items())))


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="A query of Spark's Kafka source, ported.")
    parser.add_argument("directory", nargs="?", help="for all data; a temporary one by default")
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        directory = arguments.directory or temporary
        publish(f"{directory}/data")
        spark = (
            SparkSession.builder.master("local[*]")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .getOrCreate()
        )
        run(read(spark, f"{directory}/data"), f"{directory}/checkpoint")
        spark.stop()


if __name__ == "__main__":
    main()
