"""Topics in DuckDB, Polars and pandas, without Spark.

Publishes three thousand orders, of which two thousand are in the bucket, and reads them as Arrow:
once as the topic's owner, who sees all of them, and once as somebody who has only the bucket.

    python examples/arrow_without_spark.py [DIRECTORY]

Needs `pip install 'ister[arrow]' duckdb polars pandas`.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime, timedelta
from tempfile import TemporaryDirectory

import duckdb
import pandas as pd
import polars as pl

import ister

TOPIC = "/default/orders"
SHOPS = ("eu-1", "eu-2", "us-1")
NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)


def publish(topic: ister.Topic, count: int) -> None:
    """Orders after those that are there, one a minute."""
    first = topic.watermarks.next
    for number in range(first, first + count):
        shop = SHOPS[number % 3]
        order = {"order": number, "shop": shop, "amount": number % 39 + 0.25}
        topic.append(
            json.dumps(order).encode(),
            attributes={"currency": "USD" if shop == "us-1" else "EUR"},
            publish_time=NEW_YEAR + timedelta(minutes=number),
        )


def with_duckdb(topic: ister.Topic) -> None:
    """SQL over a topic: DuckDB takes the batches while they are read."""
    messages = duckdb.from_arrow(topic.read_arrow(columns=["payload", "attributes"]))
    by_shop = messages.query(
        "messages",
        """
        WITH orders AS (
            SELECT CAST(decode(payload) AS JSON) AS body, attributes['currency'] AS currency
            FROM messages
        )
        SELECT body->>'shop' AS shop, currency, count(*) AS orders,
               sum(CAST(body->>'amount' AS DECIMAL(10, 2))) AS revenue
        FROM orders GROUP BY ALL ORDER BY shop
        """,
    )
    print("DuckDB, all messages:")
    print(by_shop)


def with_polars(topic: ister.Topic) -> None:
    """A Polars frame of a range of offsets."""
    messages = pl.from_arrow(topic.read_arrow(1000, end=2500, columns=["offset", "payload"]))
    fields = pl.Struct({"shop": pl.String, "amount": pl.Float64})
    orders = messages.select(
        "offset", pl.col("payload").cast(pl.String).str.json_decode(fields).struct.unnest()
    )
    print("Polars, offsets 1000 up to 2500:")
    print(orders.group_by("shop").agg(pl.len().alias("orders"), pl.sum("amount")).sort("shop"))


def with_pandas(directory: str) -> None:
    """A pandas frame of what is in the bucket, from a point in time on.

    Needs nothing of the log's owner, who may be another machine or not run at all.
    """
    noon = NEW_YEAR + timedelta(hours=12)
    with ister.open_bucket(directory) as history:
        topic = history.topic(TOPIC)
        end = topic.tiered
        reader = topic.read_arrow(noon, end=end, columns=["publish_time", "payload"])
        messages = reader.read_pandas()
    print(f"pandas, from noon on, in a bucket with offsets up to {end}:")
    orders = pd.DataFrame(map(json.loads, messages["payload"]))
    day = messages["publish_time"].dt.date.rename("day")
    print(orders.groupby(day)["amount"].agg(["count", "sum"]))


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="Topics in DuckDB, Polars and pandas.")
    parser.add_argument("directory", nargs="?", help="for the data; a temporary one by default")
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        directory = arguments.directory or temporary
        with ister.open(directory) as log:
            topic = log.topic(TOPIC, create=True)
            publish(topic, 2000)
            topic.upload()  # by itself it would happen within ten seconds
            publish(topic, 1000)
            with_duckdb(topic)
            with_polars(topic)
            with_pandas(directory)


if __name__ == "__main__":
    main()
