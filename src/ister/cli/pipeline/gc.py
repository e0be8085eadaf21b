"""`ister pipeline gc`: removes expired and orphaned objects from the bucket.

Owns: arguments, and how the result is shown. Does not own: what is removed
(`ister.spark.jobs.gc_job`).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from ister.cli.output import Subparsers, add_command, format_bytes
from ister.cli.pipeline.common import Bar, JobLocation, add_job_arguments, run_job

if TYPE_CHECKING:
    from ister.spark.jobs.job_report import JobReport
    from ister.spark.jobs.tasks import TaskRunner

COLUMNS: Final = (
    ("topic", "topic"),
    ("objects", "objects"),
    ("expired", "expired"),
    ("orphans", "orphans"),
    ("staged", "staged files"),
    ("skipped", "skipped"),
)
"""What the report's table shows: (field, title)."""


def register(jobs: Subparsers) -> None:
    """Adds the job to the parser."""
    parser = add_command(
        jobs,
        "gc",
        help="remove expired and orphaned objects from the bucket",
        description="For topics that no process has open: removes objects beyond bucket retention, "
        "and, after the grace period, objects without a descriptor and staged files. Owners do "
        "this for their own topics. Unless --topics is given, also removes unfinished uploads of "
        "processes that have ended, and express objects and staged files of Spark's sink that no "
        "topic needs.\n\n"
        "One gc runs at a time. Nothing is deleted by age while the clock is not trusted.",
        examples=(
            "ister pipeline gc --config ister.yml --dry-run",
            "ister pipeline gc --data ./ister-data --json",
        ),
    )
    add_job_arguments(parser)
    parser.add_argument(
        "--confirm-clock",
        action="store_true",
        help="accept this machine's clock as right after it was set or the machine was off",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    reports: list[JobReport] = []

    def work(spark: TaskRunner, place: JobLocation, bar: Bar) -> JobReport:
        from ister.spark.jobs.gc_job import gc  # noqa: PLC0415 - loads Spark

        reports.append(
            gc(
                spark,
                place.config,
                broker=place.broker,
                topics=options.topics,
                dry_run=options.dry_run,
                confirm_clock=options.confirm_clock,
                progress=bar,
            )
        )
        return reports[-1]

    code = run_job(options, "gc", work, columns=COLUMNS)
    if reports and not options.json:
        _print_rest(reports[-1])
    return code


def _print_rest(report: JobReport) -> None:
    """Prints the totals, and what belongs to no single topic."""
    more = report.more
    verb = "that would be removed" if report.dry_run else "removed"
    print(f"topics left to their owners: {more.get('open_topics', 0)}")
    if "stale_uploads" in more:
        print(f"unfinished uploads removed: {more['stale_uploads']}")
    if "express_objects" in more:
        size = more["express_bytes"]
        shown = format_bytes(size) if isinstance(size, int) else size
        print(f"express objects {verb}: {more['express_objects']} ({shown})")
    if more.get("shared_staged_files"):
        print(f"staged files of the sink {verb}: {more['shared_staged_files']}")
