"""A topic as a table in Spark SQL.

Publishes a thousand orders as JSON, of which some are in the bucket and some only in local files
when Spark reads them, and asks in SQL what each shop has sold: payloads are typed columns, and a
view of the topic sees new messages at every query.

    python examples/spark_sql.py [DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from tempfile import TemporaryDirectory

from pyspark.sql import SparkSession

import ister
from ister.spark import register_views

SHOPS = ("eu-1", "eu-2", "us-1")

# Spark starts its workers with `python3`, which is this Python only in an activated environment.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def publish(directory: str) -> None:
    """A thousand orders, and one message that is none."""
    with ister.open(directory) as log:
        topic = log.topic("/default/orders", create=True)
        for number in range(1000):
            order = {"order": number, "shop": SHOPS[number % 3], "amount": number % 39 + 0.25}
            topic.append(json.dumps(order).encode())
            if number == 599:
                topic.upload()  # by itself it would happen within ten seconds
        topic.append(b"no order at all")


def ask(spark: SparkSession, directory: str) -> None:
    """Queries the orders in the payloads, and a view of the topic."""
    # Typed: the payload is a struct. Messages that are no orders stay, with a reason.
    orders = (
        spark.read.format("ister")
        .option("config", directory)
        .option("topic", "/default/orders")
        .option("columns", "offset, payload")
        .option("payloadFormat", "json")
        .option("payloadSchema", "order BIGINT, shop STRING, amount DECIMAL(10, 2)")
        .option("payloadErrors", "column")
        .load()
    )
    orders.select("offset", "payload.*", "payload_error").createOrReplaceTempView("orders")

    print("What each shop has sold:")
    spark.sql("""
        SELECT shop, count(*) AS orders, sum(amount) AS revenue, max(amount) AS largest
        FROM orders WHERE payload_error IS NULL
        GROUP BY shop ORDER BY shop
    """).show()

    print("Messages that are no orders:")
    spark.sql("""
        SELECT offset, payload_error FROM orders WHERE payload_error IS NOT NULL
    """).show(truncate=False)

    # A view for each topic: `ister.default_orders`, with the columns of a message.
    register_views(spark, directory)

    # Spark reads a topic from its beginning to its end unless options say otherwise. A range that
    # options name is cut out before anything is fetched.
    print("From offset 900 on:")
    spark.sql(f"""
        SELECT count(*), min(offset), max(offset) FROM ister.messages WITH (
            config = '{directory}', topic = '/default/orders',
            startingOffsets = '{{"/default/orders": 900}}'
        )
    """).show()

    # The DataFrame stays at its range; the view is read anew by every query.
    with ister.open(directory) as log:
        log.topic("/default/orders").append(b"one more")
    print("After one more message:")
    spark.sql("""
        SELECT (SELECT count(*) FROM orders) AS dataframe,
               (SELECT count(*) FROM ister.default_orders) AS view
    """).show()


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="A topic as a table in Spark SQL.")
    parser.add_argument("directory", nargs="?", help="for the data; a temporary one by default")
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        directory = arguments.directory or f"{temporary}/data"
        publish(directory)
        spark = (
            SparkSession.builder.master("local[*]")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.warehouse.dir", f"{temporary}/warehouse")  # of Spark's own tables
            .getOrCreate()
        )
        ask(spark, directory)
        spark.stop()


if __name__ == "__main__":
    main()
