"""What all jobs of `ister pipeline` have in common: arguments, Spark, progress, report, exit code.

Owns: these. Does not own: a job's own arguments, or its words about a topic.

Exit codes: 0 when everything was done, 1 when anything failed, 2 after wrong usage. With `--json`
one object goes to standard output; progress goes to standard error, and only to a terminal.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from ister.base import tracing
from ister.cli.errors_out import answer, print_json
from ister.cli.location import add_place_arguments, has_place, load_place
from ister.cli.output import ProgressBar, format_bytes, print_error, print_table, progress
from ister.config import Config
from ister.errors import InvalidRequestError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ister.spark.jobs.job_report import JobReport
    from ister.spark.jobs.tasks import TaskRunner

_NOTE_MAX: Final = 60
_SHOWN_TOPICS_MAX: Final = 60


class JobLocation:
    """Where a job works: settings, brokers, or both."""

    def __init__(self, config: Config | None, broker: str | None) -> None:
        self.config = config
        self.broker = broker


def add_job_arguments(parser: argparse.ArgumentParser, *, topics: bool = True) -> None:
    """Adds what every job takes."""
    add_place_arguments(parser)
    parser.add_argument(
        "--broker",
        metavar="HOST:PORT",
        help="Flight addresses of brokers, comma-separated; they provide the settings if neither "
        "--data nor --config is given (default: the brokers in the metadata store)",
    )
    if topics:
        parser.add_argument(
            "--topics",
            metavar="NAMES",
            help="topic names or patterns, comma-separated: /default/orders,/shop/* (default: all)",
        )
    parser.add_argument(
        "--master",
        metavar="URL",
        help="Spark master (default: pipeline.master of the config, else local[*])",
    )
    parser.add_argument(
        "--conf",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="Spark setting; repeatable",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="report what would be done, without doing it"
    )


def find_place(options: argparse.Namespace) -> JobLocation:
    """The place that the arguments name.

    Raises:
        NotFoundError: There is no such directory.
        ConfigError: The config file cannot be used.
    """
    if options.broker is not None and not has_place(options):
        return JobLocation(None, options.broker)
    return JobLocation(load_place(options), options.broker)


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
    work: Callable[[TaskRunner, JobLocation, Bar], JobReport],
    *,
    columns: Sequence[tuple[str, str]],
    needs_spark: bool = False,
    is_short: bool = True,
    is_lasting: bool = False,
) -> int:
    """Runs a job and prints its report; returns the exit code.

    Spark is started when the job first needs it. A dry run needs none: its tasks run in this
    process.

    Args:
        options: The arguments.
        job: Its name.
        work: The job itself; takes a runner, the place and the progress bar.
        columns: What of a topic's report is shown in the table: (field, title); fields that end
            with `bytes` are shown as sizes.
        needs_spark: Whether a dry run needs Spark, too.
        is_short: See `open_session`; false if the JVM itself works on messages.
        is_lasting: Whether it runs until it is stopped; then Spark starts at once.
    """

    def run() -> int:
        place = find_place(options)
        with open_runner(
            options,
            place,
            job,
            is_here=options.dry_run and not needs_spark,
            is_short=is_short and not is_lasting,
            is_eager=is_lasting,
        ) as runner:
            bar = Bar()
            try:
                report = work(runner, place, bar)
            finally:
                bar.end()
        if options.json:
            print_json(report.as_json())
        else:
            print_report(report, columns)
        return 0 if report.ok else 1

    return answer(options, run, {"ok": False, "job": job, "topics": []})


@contextmanager
def open_runner(
    options: argparse.Namespace,
    place: JobLocation,
    job: str,
    *,
    is_here: bool = False,
    is_short: bool = True,
    is_eager: bool = False,
) -> Iterator[TaskRunner]:
    """Opens the runner of a command's tasks, and traces what is done meanwhile.

    Args:
        options: The arguments.
        place: Where the job works; its config has settings of Spark.
        job: Its name.
        is_here: Whether tasks run in this process, without Spark.
        is_short: See `open_session`.
        is_eager: Whether to start Spark at once.
    """
    from ister.spark.jobs.tasks import SparkRunner, TaskRunner  # noqa: PLC0415 - loads Arrow

    config = place.config
    master = options.master or (config.pipeline.master if config is not None else "local[*]")
    conf = _conf(options, config)
    with ExitStack() as opened:

        def open_spark() -> SparkSession:
            from ister.spark.jobs.session import open_session  # noqa: PLC0415 - loads Spark

            return opened.enter_context(
                open_session(master, conf, name=f"ister {job}", is_quiet=True, is_short=is_short)
            )

        runner = TaskRunner() if is_here else SparkRunner(open_spark)
        if not is_here and (is_eager or tracing.is_wanted(os.environ)):
            # Before tracing: its thread would start in the process forked for the JVM, too.
            runner.session()
        tracing.start("ister-pipeline", os.environ)
        try:
            yield runner
        finally:
            tracing.stop()


def print_report(report: JobReport, columns: Sequence[tuple[str, str]]) -> None:
    """A table of the topics, a line for the whole, and errors on standard error."""
    topics = report.topics_as_json()
    rows = [
        tuple(
            _as_size(topic.get(name)) if name.endswith("bytes") else topic.get(name)
            for name, _ in columns
        )
        for topic in topics[:_SHOWN_TOPICS_MAX]
    ]
    if rows:
        print_table([title for _, title in columns], rows)
    if len(topics) > _SHOWN_TOPICS_MAX:
        print(f"… and {len(topics) - _SHOWN_TOPICS_MAX} more topics")
    what = "would be done" if report.dry_run else "done"
    print(f"{report.job}: {len(topics)} topics, {what} in {report.seconds:.1f} s")
    for error in report.errors:
        where = f"{error['topic']}: " if error.get("topic") else ""
        print_error(
            f"{where}{error['message']}", hint=str(error["hint"]) if error.get("hint") else None
        )


def _as_size(size: object) -> str | None:
    return format_bytes(size) if isinstance(size, int) else None


class Bar:
    """Progress of a job on a terminal; silent elsewhere.

    Jobs have several parts, each with an amount of its own: `begin` ends the one before.
    """

    def __init__(self) -> None:
        self._shown = ExitStack()
        self._what = ""
        self._progress: ProgressBar | None = None

    def begin(self, what: str, total: int, unit: str) -> None:
        """A part of the job begins."""
        self.end()
        self._what = what
        self._progress = self._shown.enter_context(progress(what, total, unit=unit))

    def advance(self, amount: int, note: str = "") -> None:
        """So much more is done."""
        if self._progress is None:
            return
        self._progress.advance(amount)
        if note:
            self._progress.describe(f"{self._what} {note}"[:_NOTE_MAX])

    def end(self) -> None:
        """The bar goes away. May be called twice."""
        self._progress = None
        self._shown.close()
