"""The process with Spark: `python -m demo.lake_worker DIRECTORY CONFIG`.

Takes one request a line and answers each with lines of JSON; see `lake`. Its standard input is its
life: at its end, the session stops, the JVM ends and so does this.

Owns: the demo's uploads, compaction, queries and tables. Everything here is a call that any program
can make: `ister.spark.jobs`, `spark.read.format("ister")`, pyiceberg.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TextIO

import ister
from demo.lake import READY_NAME
from demo.shop import ORDERS, PAYMENTS
from ister.base.clock import SystemClock
from ister.errors import IsterError
from ister.spark import jobs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TABLE: Final = "orders"
_MESSAGES_PER_BATCH: Final = 10_000
_NICE: Final = 2
_ORDER: Final = (
    "id BIGINT, at TIMESTAMP, order STRING, customer STRING, country STRING, total_cents BIGINT"
)
_PAYMENT: Final = "order STRING, status STRING, method STRING, amount_cents BIGINT"
_SCHEMA: Final = {
    "type": "object",
    "required": ["id", "order", "total_cents"],
    "properties": {
        "id": {"type": "integer"},
        "at": {"type": "string"},
        "order": {"type": "string"},
        "customer": {"type": "string"},
        "country": {"type": "string"},
        "total_cents": {"type": "integer"},
    },
}
REVENUE: Final = """
SELECT o.country, count(DISTINCT o.order) AS orders, sum(p.amount_cents) AS cents
FROM orders o JOIN payments p ON p.order = o.order AND p.status = 'captured'
GROUP BY o.country ORDER BY cents DESC
""".strip()


class _Progress:
    """The progress of a job, as lines."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._what, self._done, self._total = "", 0, 0

    def begin(self, what: str, total: int, unit: str) -> None:
        self._what, self._done, self._total = what, 0, total
        self._tell()

    def advance(self, amount: int, note: str = "") -> None:
        self._done += amount
        self._tell()

    def end(self) -> None:
        """Nothing to say."""

    def _tell(self) -> None:
        line = {"progress": self._what, "done": self._done, "total": self._total}
        print(json.dumps(line), file=self._output, flush=True)


class _Worker:
    """Each public method is something that may be asked for."""

    def __init__(
        self, spark: SparkSession, directory: str, config: str, on_progress: _Progress
    ) -> None:
        self._spark = spark
        self._directory = directory
        self._config = config
        self._progress = on_progress

    def warm_up(self) -> None:
        """Reads a few messages, so that Python workers and Java's classes are there when needed."""
        directory = os.path.join(self._directory, "warm-up")
        with ister.open(directory) as log:
            log.topic(ORDERS, create=True).append_many([b"{}"] * 2)
        orders = self._read(ORDERS, _ORDER, directory)
        orders.join(orders.groupBy("order").count(), "order").agg({"total_cents": "sum"}).collect()

    def tier(self) -> dict[str, Any]:
        """Uploads everything that is synced."""
        return jobs.tier(self._spark, self._config, progress=self._progress).as_json()

    def compact(self) -> dict[str, Any]:
        """Makes large Parquet objects of small ones."""
        return jobs.compact(
            self._spark, self._config, format="parquet", min_objects=2, progress=self._progress
        ).as_json()

    def sql(self) -> dict[str, Any]:
        """Orders joined with their payments, over all tiers."""
        clock = SystemClock()
        began = clock.monotonic()
        self._read(ORDERS, _ORDER).createOrReplaceTempView("orders")
        self._read(PAYMENTS, _PAYMENT).createOrReplaceTempView("payments")
        rows = self._spark.sql(REVENUE).collect()
        return {
            "query": REVENUE,
            "rows": [[row.country, row.orders, row.cents] for row in rows],
            "seconds": clock.monotonic() - began,
        }

    def stream(self) -> dict[str, Any]:
        """What was ordered in each hour, by a stream that reads all there is and stops."""
        from pyspark.sql import functions as F  # noqa: PLC0415, N812 - an extra

        clock = SystemClock()
        began = clock.monotonic()
        messages = (
            self._spark.readStream.format("ister")
            .option("config", self._config)
            .option("topic", ORDERS)
            .option("startingOffsets", "earliest")
            .option("maxMessagesPerTrigger", _MESSAGES_PER_BATCH)
            .option("columns", "payload")
            .load()
        )
        orders = _parsed(messages, _ORDER)
        by_hour = orders.groupBy(F.window("at", "1 hour").alias("w")).agg(
            F.count("*").alias("orders"), F.sum("total_cents").alias("cents")
        )
        query = (
            by_hour.writeStream.format("memory")
            .queryName("by_hour")
            .outputMode("complete")
            .option("checkpointLocation", os.path.join(self._directory, "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        batches = sum(progress.numInputRows > 0 for progress in query.recentProgress)
        rows = self._spark.sql(
            "SELECT hour(w.start) AS hour, orders, cents FROM by_hour ORDER BY w.start"
        ).collect()
        return {
            "rows": [[row.hour, row.orders, row.cents] for row in rows],
            "batches": batches,
            "seconds": clock.monotonic() - began,
        }

    def export(self) -> dict[str, Any]:
        """The orders as an Iceberg table, with typed columns."""
        warehouse = os.path.join(self._directory, "warehouse")
        os.makedirs(warehouse, exist_ok=True)
        return jobs.export(
            self._spark,
            self._config,
            topics=ORDERS,
            to=f"{warehouse}/{_TABLE}",
            format="iceberg",
            schema=_SCHEMA,
            include_tail=True,
            progress=self._progress,
        ).as_json()

    def query_table(self) -> dict[str, Any]:
        """What is in that table, read without Ister and without Spark."""
        from pyiceberg.catalog import load_catalog  # noqa: PLC0415 - an extra

        clock = SystemClock()
        began = clock.monotonic()
        warehouse = os.path.join(self._directory, "warehouse")
        catalog = load_catalog(
            "ister",
            type="sql",
            uri=f"sqlite:///{warehouse}/catalog.db",
            warehouse=f"file://{warehouse}",
        )
        try:
            table = catalog.load_table(f"default.{_TABLE}")
            snapshots = len(list(table.snapshots()))
            data = table.scan(selected_fields=("country", "total_cents")).to_arrow()
        finally:
            catalog.close()
        engine, rows = _by_country(data)
        return {
            "engine": engine,
            "rows": rows,
            "snapshots": snapshots,
            "seconds": clock.monotonic() - began,
        }

    def _read(self, topic: str, fields: str, config: str | None = None) -> DataFrame:
        messages = (
            self._spark.read.format("ister")
            .option("config", config or self._config)
            .option("topic", topic)
            .option("columns", "payload")
            .load()
        )
        return _parsed(messages, fields)


def _parsed(messages: DataFrame, fields: str) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: PLC0415, N812 - an extra

    return messages.select(
        F.from_json(F.col("payload").cast("string"), fields).alias("message")
    ).select("message.*")


def _by_country(data: Any) -> tuple[str, list[list[Any]]]:  # noqa: ANN401 - pyarrow's
    """Orders and cents of each country; by DuckDB where it is installed."""
    try:
        import duckdb  # noqa: PLC0415 - not required
    except ImportError:
        grouped = data.group_by("country").aggregate(
            [("total_cents", "count"), ("total_cents", "sum")]
        )
        rows = [
            [row["country"], row["total_cents_count"], row["total_cents_sum"]]
            for row in grouped.to_pylist()
        ]
        return "Arrow", sorted(rows, key=lambda row: -row[2])
    with duckdb.connect() as connection:
        connection.register("orders", data)
        found = connection.execute(
            "SELECT country, count(*), sum(total_cents)::BIGINT AS cents "
            "FROM orders GROUP BY country ORDER BY cents DESC"
        ).fetchall()
    return "DuckDB", [list(row) for row in found]


@contextmanager
def _session(directory: str) -> Iterator[SparkSession]:
    """A session whose JVM has ended when the block has."""
    temporary = os.path.join(directory, "tmp")
    settings = {
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={temporary} -XX:TieredStopAtLevel=1",
        "spark.driver.memory": "1g",
        "spark.local.dir": temporary,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": os.path.join(directory, "spark-warehouse"),
    }
    with jobs.open_session("local[2]", settings, name="python -m demo") as spark:
        gateway: Any = spark.sparkContext._gateway  # noqa: SLF001 - it alone knows the JVM
        yield spark
    gateway.shutdown()
    # The JVM ends with its standard input, and removes its files before.
    gateway.proc.stdin.close()
    gateway.proc.wait()


def main(arguments: list[str]) -> None:
    """Answers until its standard input ends."""
    directory, config = arguments
    # It starts while messages are on their way, and is not to be in theirs.
    os.nice(_NICE)
    logging.basicConfig(level=logging.WARNING)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        # Only answers go where answers go, whatever the JVM prints.
        os.dup2(2, 1)
        with _session(directory) as spark:
            worker = _Worker(spark, directory, config, _Progress(output))
            worker.warm_up()
            with open(os.path.join(directory, READY_NAME), "wb"):
                pass
            for line in sys.stdin:
                print(json.dumps(_answer(worker, json.loads(line))), file=output, flush=True)


def _answer(worker: _Worker, request: dict[str, Any]) -> dict[str, Any]:
    work: Callable[..., dict[str, Any]] = getattr(worker, request.pop("do"))
    try:
        return {"result": work(**request)}
    except IsterError as error:
        logging.getLogger("demo").exception("failed")
        return {"error": str(error)}
    except Exception as error:
        logging.getLogger("demo").exception("failed")
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


if __name__ == "__main__":
    main(sys.argv[1:])
