"""`ister pipeline tier`: what is synced and not in the bucket yet goes there, on Spark.

Owns: arguments and the columns of its table. Does not own: uploads (`ister.spark.jobs.tier_job`).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from ister.cli.connection import parse_seconds
from ister.cli.output import Subparsers, add_command
from ister.cli.pipeline.common import Bar, JobLocation, add_job_arguments, run_job

if TYPE_CHECKING:
    from ister.spark.jobs.job_report import JobReport
    from ister.spark.jobs.tasks import TaskRunner


COLUMNS: Final = [
    ("topic", "topic"),
    ("start", "from"),
    ("end", "up to"),
    ("messages", "messages"),
    ("objects", "objects"),
    ("bytes", "size"),
    ("skipped", "why not"),
]
"""What the report's table shows: (field, title)."""


def register(jobs: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        jobs,
        "tier",
        help="upload messages that are not in the bucket yet",
        description="Uploads synced messages to the bucket, of hundreds of topics at once, "
        "and a large backlog of one topic with many tasks. The objects are the same as those "
        "that a broker makes. While this runs, brokers with `uploader.engine: auto` do not "
        "upload. Run it where the topics' local files are, or pass the address of the broker "
        "that has them.",
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
        type=parse_seconds,
        help="run until stopped: upload a topic this many seconds after its newest object, "
        "or earlier if much has arrived (default: upload everything once)",
    )

    def run(options: argparse.Namespace) -> int:
        if options.interval is not None and not options.interval > 0:
            parser.error("--interval must be more than 0 seconds")
        if options.interval is not None and options.dry_run:
            parser.error("--dry-run cannot be combined with --interval")
        return _run(options)

    parser.set_defaults(run=run)


def _run(options: argparse.Namespace) -> int:
    def work(spark: TaskRunner, place: JobLocation, bar: Bar) -> JobReport:
        from ister.spark.jobs.tier_job import tier  # noqa: PLC0415 - after Spark was found

        return tier(
            spark,
            place.config,
            broker=place.broker,
            topics=options.topics,
            dry_run=options.dry_run,
            progress=bar,
            interval=options.interval,
        )

    return run_job(options, "tier", work, columns=COLUMNS, is_lasting=options.interval is not None)
