"""`ister pipeline compact`: merges small objects into larger ones.

Owns: arguments and which numbers are shown. Does not own: the job (`ister.spark.jobs.compact_job`).
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from ister.cli.connection import parse_seconds
from ister.cli.output import Subparsers, add_command, confirm
from ister.cli.pipeline.common import add_job_arguments, run_job

if TYPE_CHECKING:
    from ister.cli.pipeline.common import Bar, JobLocation
    from ister.spark.jobs.job_report import JobReport
    from ister.spark.jobs.tasks import TaskRunner

COLUMNS: Final = (
    ("topic", "topic"),
    ("objects", "objects"),
    ("bytes", "size"),
    ("merged", "merged into"),
    ("new_bytes", "new size"),
    ("removed_messages", "messages removed"),
    ("skipped", "skipped"),
    ("waits", "waits"),
)
"""What the report's table shows: (field, title)."""


def register(jobs: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        jobs,
        "compact",
        help="merge small objects, as frames or as Parquet",
        description="Merges neighbouring small objects of topics into objects of a target "
        "size, while brokers and readers keep working. Offsets do not change. Merged objects "
        "are removed after a grace period.",
        examples=(
            "ister pipeline compact --data ./ister-data",
            "ister pipeline compact --config ister.yml --topics '/default/*' --format parquet",
            (
                "ister pipeline compact --config ister.yml --topics /shop/prices \\\n"
                "--format parquet --keep latest-per-key --tombstone-hours 72 --yes"
            ),
            "ister pipeline compact --config ister.yml --dry-run --json",
        ),
    )
    add_job_arguments(parser)
    parser.add_argument(
        "--format",
        choices=("dnb1", "parquet"),
        default="dnb1",
        help="format of merged objects: dnb1 (frames, as uploaded) or parquet (tables that "
        "DuckDB, pandas and Spark read directly); parquet also rewrites objects that are "
        "large enough (default: %(default)s)",
    )
    parser.add_argument(
        "--keep",
        choices=("all", "latest-per-key"),
        default="all",
        help="messages to keep: all, or the newest of each routing key in the bucket and "
        "every message without a key; latest-per-key needs --format parquet (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--target-mb",
        metavar="MIB",
        type=int,
        default=128,
        help="target size of objects, in MiB of messages; objects of at least half that size "
        "are left alone (default: %(default)s)",
    )
    parser.add_argument(
        "--min-objects",
        metavar="N",
        type=int,
        default=4,
        help="minimum number of neighbouring objects to merge (default: %(default)s)",
    )
    parser.add_argument(
        "--grace-minutes",
        metavar="MINUTES",
        type=parse_seconds,
        help="keep merged objects for this long, at least an hour, for readers that still use them "
        "(default: storage.cloud.orphan_grace_minutes of the config)",
    )
    parser.add_argument(
        "--tombstone-hours",
        metavar="HOURS",
        type=parse_seconds,
        default=24,
        help="with latest-per-key: keep a tombstone (an empty message that is the newest of "
        "its key) for this long after it was published (default: %(default)s)",
    )
    parser.add_argument(
        "--zstd-level",
        metavar="LEVEL",
        type=int,
        default=3,
        help="zstd compression level of Parquet, 1 to 22 (default: %(default)s)",
    )

    parser.add_argument(
        "--yes", action="store_true", help="with latest-per-key: skip the confirmation"
    )

    def run(options: argparse.Namespace) -> int:
        if options.keep == "latest-per-key" and options.format != "parquet":
            parser.error("--keep latest-per-key needs --format parquet")
        if not _may_remove(options):
            return 1
        return _run(options)

    parser.set_defaults(run=run)


def _may_remove(options: argparse.Namespace) -> bool:
    """Asks on a terminal before messages are removed; in a script, saying it is enough."""
    if options.keep != "latest-per-key" or options.dry_run:
        return True
    return confirm(
        f"Of {options.topics or 'all topics'} keep only the newest message of each key? "
        "The others are removed for good.",
        is_confirmed=options.yes or not sys.stdin.isatty(),
    )


def _run(options: argparse.Namespace) -> int:
    def work(spark: TaskRunner, place: JobLocation, bar: Bar) -> JobReport:
        from ister.spark.jobs.compact_job import compact  # noqa: PLC0415 - loads Spark

        return compact(
            spark,
            place.config,
            broker=place.broker,
            topics=options.topics,
            format=options.format,
            keep=options.keep,
            target_mb=options.target_mb,
            min_objects=options.min_objects,
            grace_minutes=options.grace_minutes,
            tombstone_hours=options.tombstone_hours,
            zstd_level=options.zstd_level,
            dry_run=options.dry_run,
            progress=bar,
        )

    return run_job(options, "compact", work, columns=COLUMNS, is_short=options.keep == "all")
