"""`ister pipeline export`: topics as tables.

Owns: the command's arguments. Does not own: the job (`ister.spark.jobs.export_job`).
"""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Final

from ister.base.model import Start
from ister.cli.connection import START_HELP, parse_seconds, parse_start
from ister.cli.interrupts import SignalHandler
from ister.cli.output import Subparsers, add_command
from ister.cli.pipeline.common import Bar, JobLocation, add_job_arguments, run_job
from ister.config import TableFormat
from ister.errors import InvalidRequestError

if TYPE_CHECKING:
    from ister.spark.jobs.job_report import JobReport
    from ister.spark.jobs.tasks import TaskRunner

_NOTES: Final = """\
Each offset is exported once: the table's own commits say which it has, so the command may be
stopped and run again at any moment, and adds what is missing. With executors on other machines,
--to is a bucket or a directory that all of them share. Read a Parquet directory with
spark.read.parquet("lake/default/orders"), or in DuckDB with
read_parquet('lake/default/orders/publish_date=*/*.parquet', hive_partitioning=true).
"""

COLUMNS: Final = (
    ("topic", "topic"),
    ("messages", "messages"),
    ("bytes", "bytes"),
    ("files", "files"),
    ("dead_letters", "dead letters"),
    ("table", "table"),
)
"""What the report's table shows: (field, title)."""


def register(jobs: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        jobs,
        "export",
        help="export topics to Parquet, Iceberg or Delta tables",
        description="Exports topics to tables that are partitioned by publish date, with the "
        "message's columns, or typed columns from a JSON Schema. Messages that do not match "
        "the schema go to a dead-letter table, with the reason.",
        examples=(
            "ister pipeline export --to './lake/{namespace}/{topic}'",
            "ister pipeline export --topics /default/orders --format delta --to s3://lake/orders",
            (
                "ister pipeline export --topics /default/orders --format iceberg \\\n"
                "--to shop.orders --catalog type=rest --catalog uri=https://catalog:8181"
            ),
            (
                "ister pipeline export --topics '/shop/*' --format iceberg --to ./lake/events \\\n"
                "--interval 300"
            ),
        ),
        notes=_NOTES,
    )
    add_job_arguments(parser)
    _add_table_arguments(parser)
    _add_range_arguments(parser)
    parser.set_defaults(run=_run)


def _add_table_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--to",
        metavar="TABLE",
        required=True,
        help="table location: directory or URL (parquet, delta), <namespace>.<table> or "
        "<warehouse>/<table> (iceberg); {namespace} and {topic} are replaced by each "
        "topic's, without them all topics go to one table",
    )
    parser.add_argument(
        "--format",
        choices=[item.value for item in TableFormat],
        default=TableFormat.PARQUET.value,
        help="table format (default: parquet)",
    )
    parser.add_argument(
        "--schema",
        metavar="FILE",
        help="JSON Schema file, or 'registry' for each topic's registered schema; the schema's "
        "properties become columns instead of the payload",
    )
    parser.add_argument(
        "--catalog",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="Iceberg catalog property; repeatable (default: a SQLite catalog in the warehouse)",
    )
    parser.add_argument(
        "--storage-option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="option of the table's bucket, as in storage.cloud.options; repeatable "
        "(default: those of the log's bucket if it is of the same kind)",
    )
    parser.add_argument(
        "--file-mb",
        type=int,
        default=128,
        metavar="N",
        help="approximate maximum file size in MiB (default: 128)",
    )
    parser.add_argument(
        "--zstd-level",
        type=int,
        default=3,
        metavar="N",
        help="zstd compression level, 1 to 22 (default: 3)",
    )


def _add_range_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="start",
        metavar="WHERE",
        type=parse_start,
        help=f"start: {START_HELP} (default: earliest)",
    )
    parser.add_argument(
        "--until",
        dest="end",
        metavar="WHERE",
        type=parse_start,
        help="end, exclusive: as --from (default: latest)",
    )
    parser.add_argument(
        "--dead-letters",
        metavar="TABLE",
        help="table for messages that do not match the schema (default: <table>_dead_letters)",
    )
    parser.add_argument(
        "--include-tail",
        action="store_true",
        help="also export durable messages that are not in the bucket yet",
    )
    parser.add_argument(
        "--accept-remade",
        action="store_true",
        help="export a topic that was deleted and created again into the same table",
    )
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--available-now", action="store_true", help="export once (default)")
    when.add_argument(
        "--interval",
        type=parse_seconds,
        metavar="SECONDS",
        help="repeat with this many seconds between rounds, until interrupted",
    )


def _run(options: argparse.Namespace) -> int:
    return run_job(
        options,
        "export",
        lambda spark, place, bar: _export(options, spark, place, bar),
        columns=COLUMNS,
        is_lasting=options.interval is not None and not options.dry_run,
    )


def _export(
    options: argparse.Namespace, spark: TaskRunner, place: JobLocation, bar: Bar
) -> JobReport:
    from ister.spark.jobs.export_job import export  # noqa: PLC0415 - loads Spark

    if options.interval is not None and options.interval <= 0:
        raise InvalidRequestError("--interval must be greater than 0")
    with _until_interrupted(is_wanted=options.interval is not None) as stop:
        return export(
            spark,
            place.config,
            broker=place.broker,
            topics=options.topics,
            to=options.to,
            format=options.format,
            schema=options.schema,
            catalog=_pairs("--catalog", options.catalog),
            storage_options=_pairs("--storage-option", options.storage_option),
            start=_bound("--from", options.start, whole="earliest"),
            end=_bound("--until", options.end, whole="latest"),
            dead_letters=options.dead_letters,
            include_tail=options.include_tail,
            file_mb=options.file_mb,
            zstd_level=options.zstd_level,
            accept_remade=options.accept_remade,
            available_now=options.interval is None,
            interval=options.interval,
            stop=stop,
            dry_run=options.dry_run,
            progress=bar,
        )


@contextmanager
def _until_interrupted(*, is_wanted: bool) -> Iterator[threading.Event]:
    """Set by the first signal, after which the round under way is the last; a second one ends."""
    stop = threading.Event()
    before: dict[int, SignalHandler] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        before.clear()

    def end(number: int, frame: object) -> None:
        stop.set()
        restore()

    if is_wanted and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, end)
    try:
        yield stop
    finally:
        restore()


def _pairs(option: str, items: Iterable[str]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            # The value is not repeated: it may be a secret.
            raise InvalidRequestError(f"{option} {name}", hint=f"write {option} NAME=VALUE")
        found[name] = value
    return found or None


def _bound(option: str, found: Start | None, *, whole: str) -> int | datetime | None:
    """An end of the range; None for `whole`, which is the default."""
    if isinstance(found, str):
        if found != whole:
            raise InvalidRequestError(f"{option} {found} leaves nothing to export")
        return None
    return found
