"""`ister pipeline scrub`: checks every object of topics, and repairs them if asked to.

Owns: arguments, and how findings are shown. Does not own: checking and repairing
(`ister.spark.jobs.scrubbing`).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final, cast

from ister.cli.output import Subparsers, add_command, print_table
from ister.cli.pipeline.common import Bar, JobLocation, add_job_arguments, run_job

if TYPE_CHECKING:
    from ister.rescue.catalog_check import FindingJson
    from ister.spark.jobs.job_report import JobReport
    from ister.spark.jobs.tasks import TaskRunner


_SHOWN_FINDINGS_MAX: Final = 200
COLUMNS: Final = (
    ("topic", "topic"),
    ("objects", "objects"),
    ("bytes", "bytes"),
    ("messages", "messages"),
    ("faults", "faults"),
    ("repaired", "repaired"),
    ("orphans", "orphans"),
)
"""What the report's table shows: (field, title)."""


def register(jobs: Subparsers) -> None:
    """Adds the job to the parser."""
    parser = add_command(
        jobs,
        "scrub",
        help="check every object and descriptor, and repair with --repair",
        description="Reads every object of the topics and compares it with what the metadata "
        "store says about it: size, checksum, each frame or row group, offsets, counts, "
        "times, index. Reports gaps and overlaps between descriptors, and objects "
        "without a descriptor.\n\n"
        "With --repair what is lost, damaged or wrongly described is made again, under "
        "new names: from the local files of the topic's owner where they are on this "
        "machine, from the broker (--broker), or from another copy in the bucket. Exit "
        "code 1 if a fault is left.",
        examples=(
            "ister pipeline scrub --data ./ister-data",
            "ister pipeline scrub --topics /default/orders --repair --json",
            "ister pipeline scrub --config ister.yml --master spark://host:7077 --dry-run",
        ),
    )
    add_job_arguments(parser)
    parser.add_argument("--repair", action="store_true", help="repair what can be repaired")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    reports: list[JobReport] = []

    def work(spark: TaskRunner, place: JobLocation, bar: Bar) -> JobReport:
        from ister.spark.jobs.scrubbing import scrub  # noqa: PLC0415 - loads Spark

        reports.append(
            scrub(
                spark,
                place.config,
                broker=place.broker,
                topics=options.topics,
                repair=options.repair,
                dry_run=options.dry_run,
                progress=bar,
            )
        )
        return reports[-1]

    code = run_job(options, "scrub", work, columns=COLUMNS)
    if reports and not options.json:
        _print_findings(reports[-1])
    return code


def _print_findings(report: JobReport) -> None:
    """What was found, fault by fault; those that are left are among the errors, too."""
    findings = [
        finding
        for fields in report.topics_as_json()
        for finding in cast("list[FindingJson]", fields.get("findings", []))
    ]
    rows = [
        (
            finding["topic"],
            finding["kind"].replace("_", " "),
            _outcome(finding),
            finding["object"],
            _range(finding),
            finding["position"],
            finding["reason"],
        )
        for finding in findings[:_SHOWN_FINDINGS_MAX]
    ]
    if rows:
        titles = ("topic", "finding", "outcome", "object", "offsets", "byte", "reason")
        print()
        print_table(titles, rows)
    if len(findings) > _SHOWN_FINDINGS_MAX:
        print(f"… and {len(findings) - _SHOWN_FINDINGS_MAX} more; --json has them all")


def _outcome(finding: FindingJson) -> str:
    if finding["repaired"]:
        return "repaired"
    if finding["kind"] in ("orphan", "staged"):
        return "note"
    return "repairable" if finding["repairable"] else "not repairable"


def _range(finding: FindingJson) -> str | None:
    start, end = finding["start_offset"], finding["next_offset"]
    if start is None:
        return None
    return f"{start}..{end - 1}" if end is not None and end > start else f"{start}.."
