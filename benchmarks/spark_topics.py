"""The sink with few and with many topics, for `benchmarks spark`.

    the same rows ─► 10 topics, 300 topics ─► seconds, processor time, staged files

Owns: these figures. Does not own: the session and the process (`spark_process`).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from typing import Final

from pyspark.sql import DataFrame, SparkSession, functions

from benchmarks.measurement import Run, median, median_ratio, spread, take_turns
from benchmarks.spark_process import time_work
from benchmarks.spark_sources import NullSource, WatchedSource, read_notes
from ister.errors import check

_TASKS: Final = 2
_FEW: Final = 10
_MANY: Final = 300
_TARGET: Final = 4.0
_MESSAGE_BYTES: Final = 100
_BATCH_ROWS: Final = 10_000
_COLUMNS: Final = "offset,publish_time,producer_name,payload"


def measure_topics(
    run: Run, spark: SparkSession, *, rounds: int, written_bytes: int, report: str
) -> None:
    """Compares a write of rows into many new topics with one into few."""
    batches = max(1, written_bytes // _MESSAGE_BYTES // _BATCH_ROWS // _TASKS)
    count = _TASKS * batches * _BATCH_ROWS
    source = spark.read.format(NullSource.name()).options(
        plan=json.dumps([[_BATCH_ROWS] * batches] * _TASKS),
        message_bytes=str(_MESSAGE_BYTES),
        topic="/default/t0",
        columns=_COLUMNS,
    )
    written = run.path("topics")
    cpu: dict[int, list[float]] = {_FEW: [], _MANY: []}

    def write(topics: int) -> float:
        # Nothing is removed between rounds: ext4 creates files slowly for five seconds after many
        # were deleted, which would slow down the side with many topics most.
        target = os.path.join(written, secrets.token_hex(4))
        os.sync()
        writer = _with_topics(source.load(), topics).write.format(WatchedSource.name())
        save: Callable[[], None] = writer.mode("append").options(config=target, report=report).save
        seconds, used = time_work(save)
        cpu[topics].append(used)
        return seconds

    sides = {"few": lambda: write(_FEW), "many": lambda: write(_MANY)}
    write(_FEW)  # compiles what the JVM compiles
    read_notes(report, "commit")
    read_notes(report, "write")
    cpu = {_FEW: [], _MANY: []}
    seconds = take_turns(rounds, sides)
    shutil.rmtree(written)
    files = sum(note["files"] for note in read_notes(report, "write"))
    commits = read_notes(report, "commit")
    check(len(commits) == 2 * rounds, "every write is committed once")
    few, many = median(seconds["few"]), median(seconds["many"])
    run.add(
        f"write with Spark into {_MANY} new topics",
        many,
        "s",
        limit=few,
        limit_name=f"the same rows into {_FEW} new topics",
        at_most=_TARGET,
        on="ratio",
        ratio=median_ratio(seconds["many"], seconds["few"]),
        note=f"local[2], {count} rows of {_MESSAGE_BYTES} B in {_TASKS} tasks; median of {rounds} "
        f"rounds, {spread(seconds['many'])} s (limit {spread(seconds['few'])} s); processor time "
        f"{median(cpu[_MANY]):.2f} s (limit {median(cpu[_FEW]):.2f} s)",
    )
    run.add(
        f"staged files of a write into {_MANY} or {_FEW} topics",
        files / (2 * rounds),
        "files",
        limit=_TASKS,
        limit_name="tasks",
        at_most=1.0,
        on="ratio",
    )


def _with_topics(rows: DataFrame, topics: int) -> DataFrame:
    number = (functions.col("offset") % topics).cast("string")
    return rows.withColumn("topic", functions.concat(functions.lit("/default/t"), number))
