"""What the pipeline is made of: a topic, two tables that follow it, and a topic that they feed.

    /default/orders ─► orders ─┬─► revenue          a row for each shop
                               └─► /default/large   orders of 30 and more, as messages

Spark calls these functions to find out what depends on what, and keeps the checkpoints. They
describe and do not look: Spark refuses to tell them a row or a schema.
"""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know it by

spark = SparkSession.active()
DATA = spark.conf.get("spark.ister.data")  # set in the pipeline's spec


@dp.table
def orders() -> DataFrame:
    """Every order, as a table that each run appends to."""
    messages = (
        spark.readStream.format("ister")
        .option("config", DATA)
        .option("topic", "/default/orders")
        .option("startingOffsets", "earliest")
        .load()
    )
    order = F.from_json(F.col("payload").cast("string"), "shop STRING, amount DECIMAL(10, 2)")
    return messages.select("offset", "publish_time", order.alias("order")).select(
        "offset", "publish_time", "order.*"
    )


@dp.materialized_view
def revenue() -> DataFrame:
    """What each shop has sold."""
    by_shop = spark.read.table("orders").groupBy("shop")
    return by_shop.agg(F.count("*").alias("orders"), F.sum("amount").alias("revenue"))


dp.create_sink("large", format="ister", options={"config": DATA, "topic": "/default/large"})


@dp.append_flow(target="large")
def large_orders() -> DataFrame:
    """Orders of 30 and more, each once."""
    large = spark.readStream.table("orders").where("amount >= 30")
    return large.select(F.to_json(F.struct("offset", "shop", "amount")).alias("payload"))
