"""`ister pipeline tier`: what is synced and not in the bucket yet goes there, on Spark.

Owns: arguments and the columns of its table. Does not own: uploads (`ister.spark.jobs.tiering`).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from ister.cli.look import add_command
from ister.cli.pipeline.common import Bar, Place, add_job_arguments, run_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ister.spark.jobs.report import JobReport

    # argparse has no public name for it.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

__all__ = ["register"]

_COLUMNS: Final = [
    ("topic", "topic"),
    ("start", "from"),
    ("end", "up to"),
    ("messages", "messages"),
    ("objects", "objects"),
    ("bytes", "size"),
    ("skipped", "why not"),
]


def register(jobs: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        jobs,
        "tier",
        help="upload what is not in the bucket yet",
        description="Moves messages that are synced into the bucket, of hundreds of topics at "
        "once, and a large backlog of one topic by many tasks. The objects are those that the "
        "broker itself would make. While this runs, brokers with `uploader.engine: auto` leave "
        "their uploads to it. Run it where the topics' local files are, or give the address of "
        "the broker that has them.",
        examples=(
            "ister pipeline tier --data ./ister-data",
            "ister pipeline tier --config ister.yml --topics '/shop/*' --dry-run",
            "ister pipeline tier --broker 10.0.0.5:6651 --master spark://10.0.0.7:7077",
            "ister pipeline tier --config ister.yml --interval 10",
        ),
    )
    add_job_arguments(parser)
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=float,
        help="go on until stopped: upload a topic so many seconds after its newest object was "
        "made, and sooner if much has come (default: once, everything)",
    )

    def run(options: argparse.Namespace) -> int:
        if options.interval is not None and not options.interval > 0:
            parser.error("--interval has to be more than 0 seconds")
        if options.interval is not None and options.dry_run:
            parser.error("--dry-run does nothing, and has no --interval")
        return _run(options)

    parser.set_defaults(run=run)


def _run(options: argparse.Namespace) -> int:
    def work(spark: SparkSession, place: Place, bar: Bar) -> JobReport:
        from ister.spark.jobs.tiering import tier  # noqa: PLC0415 - after Spark was found

        return tier(
            spark,
            place.config,
            broker=place.broker,
            topics=options.topics,
            dry_run=options.dry_run,
            progress=bar,
            interval=options.interval,
        )

    return run_job(options, "tier", work, columns=_COLUMNS)
