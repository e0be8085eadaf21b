"""A topic as a stream in Spark: averages over windows of time.

A sensor publishes a reading a second. The query averages ten seconds at a time, by the time at
which readings were published, and prints a window when it is complete: when a reading has come that
is more than five seconds newer. One reading of the sixty comes far too late and is left out.

    python examples/spark_stream.py [DIRECTORY]             what is there, then it ends
    python examples/spark_stream.py [DIRECTORY] --follow    goes on with live readings until Ctrl-C

With the same directory again, the query goes on where its checkpoint says it was.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from datetime import UTC, datetime, timedelta
from tempfile import TemporaryDirectory

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know it by
from pyspark.sql.streaming import StreamingQuery

import ister

TOPIC = "/default/readings"
MIDNIGHT = datetime(2026, 1, 1, tzinfo=UTC)
READINGS = 60
LATE = 45  # the number of the one that was under way for forty seconds

# Spark starts its workers with `python3`, which is this Python only in an activated environment.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def publish(topic: ister.Topic, count: int) -> None:
    """Readings after those that are there, one for each second."""
    first = topic.watermarks.next
    for number in range(first, first + count):
        reading = {"sensor": "roof", "celsius": 10 + number % 20 / 2}
        second = number - 40 if number == LATE else number
        topic.append(
            json.dumps(reading).encode(), publish_time=MIDNIGHT + timedelta(seconds=second)
        )
    topic.flush()


def start(spark: SparkSession, data: str, checkpoint: str, *, follow: bool) -> StreamingQuery:
    """Starts the query."""
    messages = (
        spark.readStream.format("ister")
        .option("config", data)
        .option("topic", TOPIC)
        .option("startingOffsets", "earliest")  # when there is no checkpoint; else it counts
        .option("maxMessagesPerTrigger", 20)
        .option("columns", "publish_time, payload")
        .option("payloadSchema", "sensor STRING, celsius DOUBLE")  # JSON, as a struct
        .load()
    )
    averages = (
        messages.select("publish_time", "payload.*")
        .withWatermark("publish_time", "5 seconds")
        .groupBy(F.window("publish_time", "10 seconds"), "sensor")
        .agg(F.count("*").alias("readings"), F.avg("celsius").alias("celsius"))
    )
    writer = averages.writeStream.outputMode("append").option("checkpointLocation", checkpoint)
    trigger = {"processingTime": "1 second"} if follow else {"availableNow": True}
    return writer.trigger(**trigger).foreachBatch(print_windows).start()


def print_windows(windows: DataFrame, _: int) -> None:
    """Prints the windows that a micro-batch has completed."""
    # One action, and none that reads twice (as `orderBy` would): each goes back to the topic.
    for row in sorted(windows.collect()):
        begin, end = (f"{time:%H:%M:%S}" for time in row.window)
        average = f"{row.celsius:.2f} °C from {row.readings} readings"
        print(f"{begin} to {end}  {row.sensor}  {average}", flush=True)


def run_live(topic: ister.Topic, query: StreamingQuery) -> None:
    """Publishes while the query runs, two readings a second, until Ctrl-C."""
    is_over = threading.Event()
    # Spark has a handler of its own, which breaks off whatever is under way.
    signal.signal(signal.SIGINT, lambda *_: is_over.set())
    print("live from now on; Ctrl-C ends it", flush=True)
    while query.isActive and not is_over.wait(0.5):
        publish(topic, 1)
    query.stop()


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="A topic as a stream in Spark.")
    parser.add_argument("directory", nargs="?", help="for all data; a temporary one by default")
    parser.add_argument("--follow", action="store_true", help="go on until Ctrl-C")
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        directory = arguments.directory or temporary
        data, checkpoint = f"{directory}/data", f"{directory}/checkpoint"
        spark = (
            SparkSession.builder.master("local[*]")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.shuffle.partitions", "2")
            .getOrCreate()
        )
        with ister.open(data) as log:
            topic = log.topic(TOPIC, create=True)
            publish(topic, READINGS)
            query = start(spark, data, checkpoint, follow=arguments.follow)
            if arguments.follow:
                run_live(topic, query)
            query.awaitTermination()
        dropped = sum(
            operator["numRowsDroppedByWatermark"]
            for progress in query.recentProgress
            for operator in progress["stateOperators"]
        )
        print(f"{dropped} too late")
        spark.stop()


if __name__ == "__main__":
    main()
