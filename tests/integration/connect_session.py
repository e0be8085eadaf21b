"""Reads, writes and streams through Spark Connect: `python connect_session.py <config> <dir>`.

Prints what it found as one line of JSON. A process of its own, with a Connect server of its own.
"""

import json
import sys
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from ister.spark import offsets_behind, register_views
from ister.spark.compat import HAS_LIMITS

TOPIC = "/default/a"


def main(config: str, directory: str) -> None:
    Path(directory).mkdir()
    builder = SparkSession.builder.remote("local[2]")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": f"{directory}/warehouse",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        print(json.dumps(_use(spark, config, directory)))
    finally:
        spark.stop()


def _use(spark: SparkSession, config: str, directory: str) -> dict[str, object]:
    found: dict[str, object] = {}
    frame = spark.read.format("ister").options(config=config, topic=TOPIC).load()
    found["offsets"] = [row.offset for row in frame.collect()]
    union = frame.filter("offset < 5").union(frame.filter("offset >= 35"))
    found["union"] = sorted(row.offset for row in union.collect())
    spark.sql(f"CREATE TEMPORARY VIEW v USING ister OPTIONS (topic '{TOPIC}', config '{config}')")
    found["view"] = spark.sql("SELECT count(*) AS n FROM v").first().n
    register_views(spark, config, pattern="/default/a")
    found["fresh view"] = spark.sql("SELECT count(*) AS n FROM ister.default_a").first().n
    try:
        spark.read.format("ister").options(config=config, topik=TOPIC).load().count()
    except PySparkException as error:
        found["error"] = str(error)
    write = {"config": config, "topic": "/default/copied"}
    frame.select("payload").write.format("ister").mode("append").options(**write).save()
    source = spark.readStream.format("ister").options(
        config=config, topic=TOPIC, startingOffsets="earliest", maxMessagesPerTrigger="15"
    )
    writing = (
        source.load()
        .select("payload")
        .writeStream.format("ister")
        .options(config=config, topic="/default/streamed")
        .option("checkpointLocation", f"{directory}/checkpoint")
        .trigger(availableNow=True)
    )
    for _ in range(1 if HAS_LIMITS else 3):  # before 4.2 a run is one batch
        query = writing.start()
        query.awaitTermination(120)
        if query.isActive or query.exception() is not None:
            raise RuntimeError(f"the stream has not ended well: {query.exception()}")
    found["batches"] = len(query.recentProgress)
    found["behind"] = [offsets_behind(report)[0].total for report in query.recentProgress]
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
