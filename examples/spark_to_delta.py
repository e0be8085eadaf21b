"""From a topic to a Delta table with Spark: transformed on the way, each order once.

A stream reads the topic, Spark makes rows of the orders, and each micro-batch is one commit of the
Delta table. The commit carries the number of its micro-batch, so one that Spark repeats after a
crash is not written twice.

    python examples/spark_to_delta.py [DIRECTORY]

A run in the same directory again continues where the last one stopped. The rows of a micro-batch go
through the driver, bounded by `maxMessagesPerTrigger`; with Delta's own jars, `writeStream` writes
from the tasks. To copy topics as they are, `ister pipeline export --format delta` needs no code.

Needs `pip install 'ister[spark]' deltalake`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark.sql import DataFrame, SparkSession

import ister
from ister.spark import from_json_payload, register

TOPIC = "/default/orders"
SHOPS = ("Linz", "Ruse", "Ulm")
QUERY = "orders-to-delta"

# Spark starts its workers with `python3`, which is this Python only in an activated environment.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def publish(directory: str, count: int) -> None:
    """Publishes orders after those that are there; some are uploaded, some are not."""
    with ister.open(directory) as log:
        topic = log.topic(TOPIC, create=True)
        first = topic.watermarks.next
        for number in range(first, first + count):
            order = {"order": number, "shop": SHOPS[number % 3], "amount": number % 39 + 0.25}
            topic.append(json.dumps(order).encode())
            if number == first + count // 2:
                topic.upload()  # would also happen by itself, within ten seconds


def commit(path: str, rows: DataFrame, batch: int) -> bool:
    """Appends a micro-batch to the table, unless it is there already."""
    if DeltaTable.is_deltatable(path):
        last = DeltaTable(path).transaction_version(QUERY)
        if last is not None and last >= batch:
            return False
    number = Transaction(app_id=QUERY, version=batch)
    properties = CommitProperties(app_transactions=[number])
    write_deltalake(path, rows.toArrow(), mode="append", commit_properties=properties)
    return True


def copy(spark: SparkSession, directory: str, table: str) -> None:
    """Copies what is new to the table, and ends."""
    messages = (
        spark.readStream.format("ister")
        .option("config", f"{directory}/data")
        .option("topic", TOPIC)
        .option("startingOffsets", "earliest")  # of a query without a checkpoint
        .option("maxMessagesPerTrigger", 150)
        .load()
    )
    orders = from_json_payload(messages, "order BIGINT, shop STRING, amount DOUBLE")
    rows = orders.selectExpr("offset", "order", "upper(shop) AS shop", "amount")
    query = (
        rows.writeStream.foreachBatch(lambda batch, number: commit(table, batch, number))
        .option("checkpointLocation", f"{directory}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="From a topic to a Delta table with Spark.")
    parser.add_argument("directory", nargs="?", help="for the data; a temporary one by default")
    options = parser.parse_args(arguments)
    # A program that has a session already, such as a notebook, keeps it.
    before = SparkSession.getActiveSession()
    with TemporaryDirectory() as temporary:
        directory = options.directory or temporary
        table = f"{directory}/orders"
        publish(f"{directory}/data", 250)
        spark = before or (
            SparkSession.builder.master("local[*]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .getOrCreate()
        )
        register(spark)
        copy(spark, directory, table)
        found = DeltaTable(table)
        rows = found.to_pyarrow_table(columns=["shop", "amount"]).group_by("shop")
        for row in sorted(
            rows.aggregate([("amount", "count"), ("amount", "sum")]).to_pylist(),
            key=lambda row: row["shop"],
        ):
            print(f"{row['shop']}: {row['amount_count']} orders, {row['amount_sum']:.2f}")
        print(f"commits of the table: {found.version() + 1}")
        last = found.transaction_version(QUERY)
        print(f"written again: {commit(table, spark.range(0), last)}")
        if before is None:
            spark.stop()


if __name__ == "__main__":
    main()
