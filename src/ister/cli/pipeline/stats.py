"""`ister pipeline stats`: what topics hold, as tables on the terminal and as JSON.

Owns: arguments and tables. Does not own: counting (`ister.spark.jobs.statistics`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

from ister.cli.output import Subparsers, add_command, format_bytes, print_table
from ister.cli.pipeline.common import Bar, JobLocation, add_job_arguments, run_job

if TYPE_CHECKING:
    from ister.spark.jobs.job_report import JobReport
    from ister.spark.jobs.runners import TaskRunner
    from ister.spark.jobs.topic_stats import HourJson, SizeJson, StatsJson


_BAR_WIDTH: Final = 40
_SHOWN_HOURS_MAX: Final = 48
_COLUMNS: Final = (
    ("topic", "topic"),
    ("messages", "messages"),
    ("bytes", "payload"),
    ("objects", "objects"),
    ("stored_bytes", "in bucket"),
    ("first_publish_time", "first"),
    ("last_publish_time", "last"),
)


def register(jobs: Subparsers) -> None:
    """Adds the job to the parser."""
    parser = add_command(
        jobs,
        "stats",
        help="count messages and bytes per topic, hour and producer; sizes; compression",
        description="Counts messages and payload bytes of topics per hour, per producer and "
        "by size, the distinct routing keys (approximate beyond two thousand), and measures "
        "the zstd compression of a sample. Changes nothing.",
        examples=(
            "ister pipeline stats --data ./ister-data",
            "ister pipeline stats --topics '/shop/*'",
            "ister pipeline stats --bucket-only --json",
        ),
    )
    add_job_arguments(parser)
    parser.add_argument(
        "--bucket-only", action="store_true", help="count only messages that are in the bucket"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    reports: list[JobReport] = []

    def work(spark: TaskRunner, place: JobLocation, bar: Bar) -> JobReport:
        from ister.spark.jobs.statistics import stats  # noqa: PLC0415 - loads Spark

        reports.append(
            stats(
                spark,
                place.config,
                broker=place.broker,
                topics=options.topics,
                include_tail=not options.bucket_only,
                dry_run=options.dry_run,
                progress=bar,
            )
        )
        return reports[-1]

    code = run_job(options, "stats", work, columns=_COLUMNS)
    if reports and not options.json:
        _print_totals(reports[-1])
    return code


def _print_totals(report: JobReport) -> None:
    """All topics together: hours, producers, sizes, keys, compression."""
    totals = cast("StatsJson | None", report.more.get("totals"))
    if not totals or not totals["messages"]:
        return
    for title, label, rows in (
        (_hours_title(totals["hours"]), "hour", _hours(totals["hours"])),
        ("by producer", "producer", _producers(totals)),
        ("by payload size", "size", _sizes(totals["sizes"])),
    ):
        print()
        _print_bars(title, label, rows)
    keys, compression = totals["keys"], totals["compression"]
    about = "" if keys["is_exact"] else "about "
    print(f"\nkeys: {keys['messages']} messages with a routing key, {about}{keys['distinct']} keys")
    if compression["ratio"] is not None:
        sample = format_bytes(compression["sample_bytes"])
        print(
            f"compression: {compression['codec']} makes payloads {compression['ratio']:g} times "
            f"smaller (measured on {sample})"
        )
    left_out = [
        topic["topic"]
        for topic in report.topics_as_json()
        if isinstance(tail := topic.get("tail"), dict) and not tail.get("is_counted", True)
    ]
    if left_out:
        print(
            f"not counted: what is not in the bucket yet of {len(left_out)} topics, which is on "
            "another machine (--broker HOST:PORT reaches it)"
        )


def _hours_title(hours: Sequence[HourJson]) -> str:
    left = len(hours) - _SHOWN_HOURS_MAX
    return f"by hour (the last {_SHOWN_HOURS_MAX} of {len(hours)})" if left > 0 else "by hour"


def _hours(hours: Sequence[HourJson]) -> list[tuple[str, int, int | None]]:
    shown = hours[-_SHOWN_HOURS_MAX:]
    return [
        (item["hour"][:13].replace("T", " "), item["messages"], item["bytes"]) for item in shown
    ]


def _producers(totals: StatsJson) -> list[tuple[str, int, int | None]]:
    rows: list[tuple[str, int, int | None]] = [
        (item["producer"] or "(no name)", item["messages"], item["bytes"])
        for item in totals["producers"]
    ]
    rest = totals["other_producers"]
    if rest["messages"]:
        rows.append((f"{rest['producers']} others", rest["messages"], rest["bytes"]))
    return rows


def _sizes(sizes: Sequence[SizeJson]) -> list[tuple[str, int, int | None]]:
    return [
        (
            f"{format_bytes(item['from_bytes'])} to {format_bytes(item['below_bytes'] - 1)}"
            if item["below_bytes"] > 2
            else format_bytes(item["from_bytes"]),
            item["messages"],
            None,
        )
        for item in sizes
    ]


def _print_bars(title: str, label: str, rows: Sequence[tuple[str, int, int | None]]) -> None:
    most = max((messages for _, messages, _ in rows), default=0) or 1
    has_bytes = any(size is not None for _, _, size in rows)
    titles = [label, "messages", *(["bytes"] if has_bytes else []), ""]
    print_table(
        titles,
        [
            (
                name,
                messages,
                *([format_bytes(size)] if has_bytes else []),
                "█" * max(round(_BAR_WIDTH * messages / most), 1 if messages else 0),
            )
            for name, messages, size in rows
        ],
        title=title,
    )
