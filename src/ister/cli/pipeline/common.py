"""What all jobs of `ister pipeline` have in common: arguments, Spark, progress, report, exit code.

Owns: these. Does not own: a job's own arguments, or what it says about a topic in words.

Exit codes: 0 when everything was done, 1 when anything failed, 2 after wrong usage. With `--json`
one object goes to standard output; progress goes to standard error, and only to a terminal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from ister.cli.place import add_place_arguments, has_place, load_place
from ister.cli.report import answer, print_json
from ister.cli.table import format_table
from ister.config import Config
from ister.errors import InvalidRequestError, IsterError
from ister.limits import GIB, KIB, MIB

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ister.spark.jobs.report import JobReport

__all__ = [
    "Bar",
    "Place",
    "add_job_arguments",
    "find_place",
    "format_bytes",
    "print_report",
    "run_job",
]

_BAR_WIDTH: Final = 24
_BAR_EVERY_SECONDS: Final = 0.2
_SHOWN_TOPICS_MAX: Final = 60


class Place:
    """Where a job works: settings, a broker, or both."""

    def __init__(self, config: Config | None, broker: str | None) -> None:
        self.config = config
        self.broker = broker


def add_job_arguments(parser: argparse.ArgumentParser, *, topics: bool = True) -> None:
    """Adds what every job takes."""
    add_place_arguments(parser)
    parser.add_argument(
        "--broker",
        metavar="HOST:PORT",
        help="a broker's Flight address: for the settings where no --data or --config is given, "
        "and for messages that are neither in the bucket nor on this machine",
    )
    if topics:
        parser.add_argument(
            "--topics",
            metavar="NAMES",
            help="names or patterns, by comma: /default/orders,/shop/* (default: all)",
        )
    parser.add_argument(
        "--master",
        metavar="URL",
        help="Spark's master (default: pipeline.master of the config, else local[*])",
    )
    parser.add_argument(
        "--conf",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a setting of Spark; may be given more than once",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be done, and do nothing"
    )


def find_place(options: argparse.Namespace) -> Place:
    """The place that the arguments name.

    Raises:
        NotFoundError: There is no such directory.
        ConfigError: The config file cannot be used.
    """
    if options.broker is not None and not has_place(options):
        return Place(None, options.broker)
    return Place(load_place(options), options.broker)


def _conf(options: argparse.Namespace, config: Config | None) -> dict[str, str]:
    conf = dict(config.pipeline.conf) if config is not None else {}
    for item in options.conf:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise InvalidRequestError(f"--conf {item}", hint="write --conf NAME=VALUE")
        conf[name] = value
    return conf


def run_job(
    options: argparse.Namespace,
    job: str,
    work: Callable[[SparkSession, Place, Bar], JobReport],
    *,
    columns: Sequence[tuple[str, str]],
) -> int:
    """Runs a job in a Spark session of its own and prints its report; the exit code.

    Args:
        options: The arguments.
        job: Its name.
        work: The job itself; is given the session, the place and who shows progress.
        columns: What of a topic's report is shown in the table: (field, title); fields that end
            with `bytes` are shown as sizes.
    """

    def run() -> int:
        from ister.spark.jobs.session import open_session  # noqa: PLC0415 - loads Spark

        place = find_place(options)
        config = place.config
        master = options.master or (config.pipeline.master if config is not None else "local[*]")
        bar = Bar()
        with open_session(master, _conf(options, config), name=f"ister {job}") as spark:
            try:
                report = work(spark, place, bar)
            finally:
                bar.end()
        if options.json:
            print_json(report.as_json())
        else:
            print_report(report, columns)
        return 0 if report.ok else 1

    def failed(error: IsterError) -> Mapping[str, Any]:
        from ister.spark.jobs.report import error_as_fields  # noqa: PLC0415

        return {"ok": False, "job": job, "topics": [], "errors": [error_as_fields(error)]}

    return answer(run, as_json=options.json, on_error=failed)


def print_report(report: JobReport, columns: Sequence[tuple[str, str]]) -> None:
    """A table of the topics, a line for the whole, and errors on standard error."""
    fields = report.as_json()
    topics = fields["topics"]
    rows = [
        tuple(
            format_bytes(topic.get(name)) if name.endswith("bytes") else topic.get(name)
            for name, _ in columns
        )
        for topic in topics[:_SHOWN_TOPICS_MAX]
    ]
    if rows:
        print(format_table(tuple(title for _, title in columns), rows))
    if len(topics) > _SHOWN_TOPICS_MAX:
        print(f"… and {len(topics) - _SHOWN_TOPICS_MAX} more topics")
    what = "would be done" if report.dry_run else "done"
    print(f"{report.job}: {len(topics)} topics, {what} in {report.seconds:.1f} s")
    for error in report.errors:
        where = f"{error['topic']}: " if error.get("topic") else ""
        hint = f" ({error['hint']})" if error.get("hint") else ""
        print(f"ister: {where}{error['message']}{hint}", file=sys.stderr)


def format_bytes(size: object) -> str | None:
    """A size for people."""
    if not isinstance(size, int):
        return None
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


class Bar:
    """A line on a terminal that shows how far a job has come; silent anywhere else."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._what, self._total, self._unit = "", 0, ""
        self._done = 0
        self._began = self._shown_at = 0.0
        self._has_line = False

    def begin(self, what: str, total: int, unit: str) -> None:
        """A part of the job begins."""
        self.end()
        self._what, self._total, self._unit, self._done = what, total, unit, 0
        self._began = time.monotonic()
        self._show("")

    def advance(self, amount: int, note: str = "") -> None:
        """So much more is done."""
        self._done += amount
        now = time.monotonic()
        if now - self._shown_at >= _BAR_EVERY_SECONDS or self._done >= self._total:
            self._show(note)

    def end(self) -> None:
        """The line goes away."""
        if self._has_line:
            with suppress(OSError):
                sys.stderr.write("\r\033[K")
                sys.stderr.flush()
        self._has_line = False

    def _show(self, note: str) -> None:
        if not self._is_shown:
            return
        self._shown_at = time.monotonic()
        share = min(self._done / self._total, 1.0) if self._total else 0.0
        full = round(share * _BAR_WIDTH)
        seconds = max(self._shown_at - self._began, 1e-9)
        done = format_bytes(self._done) if self._unit == "bytes" else f"{self._done} {self._unit}"
        rate = self._done / seconds
        speed = f"{format_bytes(int(rate))}/s" if self._unit == "bytes" else f"{rate:.0f}/s"
        line = f"{self._what} {'█' * full}{'·' * (_BAR_WIDTH - full)} {share:4.0%} {done} {speed}"
        with suppress(OSError):
            sys.stderr.write(f"\r\033[K{line} {note}"[:160])
            sys.stderr.flush()
        self._has_line = True
