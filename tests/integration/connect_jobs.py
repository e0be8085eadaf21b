"""Jobs through Spark Connect: `python connect_jobs.py <dir> connect|classic all|few`.

Prints what the jobs reported, and what the topics and tables then hold, as one line of JSON. A
process of its own, with a Spark of its own.
"""

import json
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from ister.config import load_config
from ister.spark import jobs
from tests.integration.spark_topics import PUBLISHED_MS, SparkPlace

TOPIC = "/default/a"


def main(directory: str, kind: str, which: str) -> None:
    builder = SparkSession.builder
    builder = builder.remote("local[2]") if kind == "connect" else builder.master("local[2]")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        print(json.dumps(_use(spark, Path(directory), is_all=which == "all")))
    finally:
        spark.stop()


def _use(spark: SparkSession, directory: Path, *, is_all: bool) -> dict[str, object]:
    place = SparkPlace(directory)
    with place.open() as log:
        topic = log.topic(TOPIC, create=True)
        for part in range(6):
            for number in range(20):
                topic.append(
                    b"%d" % (part * 20 + number),
                    routing_key=f"k{number % 5}",
                    publish_time=PUBLISHED_MS,
                )
            topic.flush()
            if part < 4:
                topic.upload()
    found: dict[str, object] = {}

    def took(report: jobs.JobReport, *numbers: str) -> list[object]:
        if not report.ok:
            raise RuntimeError(f"{report.job}: {report.errors}")
        return [report.total(number) for number in numbers]

    config = place.config
    found["tier"] = took(jobs.tier(spark, config), "messages")
    query = "SELECT offset, upper(text) AS payload FROM messages WHERE offset % 2 = 0"
    arguments = {"source": TOPIC, "target": "/default/sql", "sql": query}
    found["sample"] = len(jobs.replay(spark, config, **arguments, dry_run=True).more["sample"])
    found["replay sql"] = took(jobs.replay(spark, config, **arguments), "messages", "chunks")
    lake = str(directory / "lake" / "{topic}")
    found["export"] = took(jobs.export(spark, config, to=lake, topics=TOPIC), "messages")
    if is_all:
        copied = jobs.replay(spark, config, source=TOPIC, target="/default/copy")
        found["replay"] = took(copied, "messages")
        latest = {"format": "parquet", "keep": "latest-per-key", "min_objects": 2}
        compacted = jobs.compact(spark, config, topics=TOPIC, **latest)
        found["compact"] = took(compacted, "merged", "removed_messages")
        found["scrub"] = took(jobs.scrub(spark, config), "objects", "faults")
        found["gc"] = took(jobs.gc(spark, config), "objects", "orphans")
        once = jobs.run_once(spark, config, jobs=["tier", "resort", "compact", "gc"])
        found["once"] = [once.ok, [part.job for part in once.parts]]
        settings = load_config(config)
        served = jobs.run(spark, settings, stop=threading.Event(), max_seconds=1.0)
        found["run"] = [served.ok, served.more["state"]]
    found["topics"] = {
        name: [payload.decode() for payload in place.payloads(name)] for name in place.topics()
    }
    files = sorted((directory / "lake").rglob("*.parquet"))
    found["lake"] = sum(pq.read_metadata(file).num_rows for file in files)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
