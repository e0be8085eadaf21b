"""From topic to topic: each order with its customer, exactly once.

A stream of orders is joined with the newest record of each customer, which are a topic as well, and
written to a third topic. Then the example does to the query's checkpoint what a driver that dies
leaves behind: the last micro-batch is written, and Spark does not know it. Spark writes it again,
and the topic has it once nevertheless.

    python examples/spark_enrich.py [DIRECTORY]

With the same directory again, there are new orders, and the query goes on with them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know it by

import ister
from ister.spark import from_json_payload, to_json_payload

ORDERS, CUSTOMERS, ENRICHED = "/default/orders", "/default/customers", "/default/enriched"

# Spark starts its workers with `python3`, which is this Python only in an activated environment.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def publish(data: str) -> None:
    """Customers, of which one has moved, and a hundred orders after those that are there."""
    with ister.open(data) as log:
        customers = log.topic(CUSTOMERS, create=True)
        for name, city in [("ann", "Ulm"), ("bob", "Linz"), ("eve", "Novi Sad"), ("bob", "Ruse")]:
            customers.append(json.dumps({"customer": name, "city": city}).encode())
        orders = log.topic(ORDERS, create=True)
        first = orders.watermarks.next
        for number in range(first, first + 100):
            order = {"order": number, "customer": ("ann", "bob", "eve")[number % 3]}
            orders.append(json.dumps(order).encode(), routing_key=order["customer"])


def enrich(spark: SparkSession, data: str) -> DataFrame:
    """The stream of orders, each with the city of its customer, as messages."""
    # Spark fixes what this table is when the query starts; customers that come later are seen when
    # it is started anew.
    customers = from_json_payload(
        spark.read.format("ister").options(config=data, topic=CUSTOMERS).load(),
        "customer STRING, city STRING",
    )
    newest = customers.groupBy("customer").agg(F.max_by("city", "offset").alias("city"))
    orders = from_json_payload(
        spark.readStream.format("ister")
        .options(config=data, topic=ORDERS, startingOffsets="earliest", maxMessagesPerTrigger=40)
        .load()
        .select("offset", "routing_key", "payload"),
        "order BIGINT, customer STRING",
    )
    # What is not a message's own becomes the payload; `routing_key` stays what it is.
    return to_json_payload(orders.join(newest, "customer", "left"), "order", "customer", "city")


def run(spark: SparkSession, data: str, checkpoint: Path) -> None:
    """Writes everything that is there, in micro-batches, each once."""
    query = (
        enrich(spark, data)
        .writeStream.format("ister")
        .option("config", data)
        .option("topic", ENRICHED)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    batches = [progress["batchId"] for progress in query.recentProgress]
    print(f"Spark has written the micro-batches {batches}")


def forget_last_commit(checkpoint: Path) -> None:
    """What a driver leaves that dies after the sink's commit and before its own."""
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
    print(f"forgotten: that {last.name} was written")


def show(data: str) -> None:
    """Counts what the topic has, and prints the first messages."""
    with ister.open(data) as log:
        orders = [json.loads(message.payload) for message in log.topic(ENRICHED).read()]
    different = {order["order"] for order in orders}
    print(f"{len(orders)} messages of {len(different)} orders, such as")
    for order in sorted(orders, key=lambda order: order["order"])[:3]:
        print(f"    {order}")


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="From topic to topic, exactly once.")
    parser.add_argument("directory", nargs="?", help="for all data; a temporary one by default")
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        directory = arguments.directory or temporary
        data, checkpoint = f"{directory}/data", Path(directory, "checkpoint")
        publish(data)
        spark = (
            SparkSession.builder.master("local[*]")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.shuffle.partitions", "2")
            .getOrCreate()
        )
        run(spark, data, checkpoint)
        show(data)
        forget_last_commit(checkpoint)
        run(spark, data, checkpoint)
        show(data)
        spark.stop()


if __name__ == "__main__":
    main()
