"""A topic as a table in Spark SQL.

Publishes a thousand orders as JSON, of which some are in the bucket and some only in local files
when Spark reads them, and asks in SQL what each shop has sold.

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
from ister.spark import from_json_payload

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
    """Makes a view of the topic's messages, another one of the orders in them, and queries both."""
    spark.sql(f"""
        CREATE TEMPORARY VIEW messages
        USING ister OPTIONS (config '{directory}', topic '/default/orders')
    """)
    orders = from_json_payload(
        spark.table("messages"), "order BIGINT, shop STRING, amount DECIMAL(10, 2)", errors="bad"
    )
    orders.createOrReplaceTempView("orders")

    print("What each shop has sold:")
    spark.sql("""
        SELECT shop, count(*) AS orders, sum(amount) AS revenue, max(amount) AS largest
        FROM orders WHERE bad IS NULL
        GROUP BY shop ORDER BY shop
    """).show()

    print("Messages that are no orders:")
    spark.sql("SELECT offset, bad FROM orders WHERE bad IS NOT NULL").show()

    # Spark reads a topic from its beginning to its end unless the view says otherwise. A range that
    # stands here is cut out before anything is fetched; so are columns that are not listed.
    spark.sql(f"""
        CREATE TEMPORARY VIEW recent
        USING ister OPTIONS (
            config '{directory}', topic '/default/orders',
            startingOffsets '{{"/default/orders": 900}}', columns 'offset, publish_time'
        )
    """)
    print("From offset 900 on:")
    spark.sql("SELECT count(*), min(offset), max(offset) FROM recent").show()


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="A topic as a table in Spark SQL.")
    parser.add_argument("directory", nargs="?", help="for the data; a temporary one by default")
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        directory = arguments.directory or temporary
        publish(directory)
        spark = (
            SparkSession.builder.master("local[*]")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .getOrCreate()
        )
        ask(spark, directory)
        spark.stop()


if __name__ == "__main__":
    main()
