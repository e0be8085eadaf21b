"""`ister pipeline run`: the pipeline as a service, until it is stopped.

Owns: arguments, logs, and the settings that keep Spark small for days. Does not own: the service
(`ister.spark.jobs.service`).

SIGTERM and SIGINT end it in order: the lease is given back at once, so that brokers upload by
themselves again. A second one ends it where it is.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ister.base import logs, threads
from ister.cli.connection import parse_seconds
from ister.cli.errors_out import answer, print_json
from ister.cli.output import Subparsers, add_command, print_table
from ister.cli.pipeline import compact, export, gc, scrub, tier
from ister.cli.pipeline.common import (
    Bar,
    JobLocation,
    add_job_arguments,
    find_place,
    open_runner,
    print_report,
    run_job,
)
from ister.config import Engine
from ister.errors import InvalidRequestError

if TYPE_CHECKING:
    from ister.spark.jobs.job_report import JobReport
    from ister.spark.jobs.tasks import TaskRunner

_CONF: Final = {
    # Spark keeps its history for its web pages, which are not used here, and releases what tasks
    # were sent when the JVM next collects its garbage, which may be never.
    "spark.cleaner.periodicGC.interval": "10min",
    "spark.ui.retainedJobs": "20",
    "spark.ui.retainedStages": "40",
    "spark.ui.retainedTasks": "2000",
    "spark.ui.retainedDeadExecutors": "10",
    "spark.sql.ui.retainedExecutions": "10",
    "spark.python.worker.reuse": "true",
}
_TABLES: Final = {
    "tier": tier.COLUMNS,
    "resort": compact.COLUMNS,
    "compact": compact.COLUMNS,
    "export": export.COLUMNS,
    "gc": gc.COLUMNS,
    "scrub": scrub.COLUMNS,
}
_PARENT_SECONDS: Final = 1.0
# How long a pipeline without a parent may take to end in order.
_ORPHAN_SECONDS: Final = 10.0

_NOTES: Final = """\
One pipeline works at a time: a second one stands by, and takes over when the first one has ended.
Brokers with uploader.engine auto leave their uploads to it, and take them back when it has ended.
What it does besides, and how often, is in the config:

  pipeline:
    compact: {every_minutes: 60}
    export: {to: /lake/{topic}, format: delta, every_minutes: 15}
    gc: {every_minutes: 60}
    scrub: {every_minutes: 1440}
"""


def register(jobs: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        jobs,
        "run",
        help="run the pipeline as a service: tier, compact, export, gc and scrub",
        description="Tiers, re-sorts, compacts, exports, collects garbage and scrubs as "
        "configured, until it is stopped.",
        examples=(
            "ister pipeline run --config ister.yml",
            "ister pipeline run --config ister.yml --master spark://host:7077 --broker host:6651",
            "ister pipeline run --config ister.yml --once tier,compact,export",
            "ister pipeline status --config ister.yml",
        ),
        notes=_NOTES,
    )
    add_job_arguments(parser, topics=False)
    parser.add_argument(
        "--once",
        metavar="JOBS",
        help="run these jobs once, in this order, in one Spark application, then exit: one or more "
        "of tier,resort,compact,export,gc,scrub, with their settings in `pipeline` of the config",
    )
    parser.add_argument(
        "--max-seconds",
        type=parse_seconds,
        metavar="SECONDS",
        help="stop after this many seconds (default: never)",
    )
    parser.add_argument(
        "--log-level",
        metavar="LEVEL",
        default="INFO",
        help="log level: DEBUG, INFO, WARNING or ERROR (default: %(default)s)",
    )
    # For `ister up`: ends the pipeline if its broker, the process PID, was killed.
    parser.add_argument("--ends-with-parent", type=int, metavar="PID", help=argparse.SUPPRESS)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.max_seconds is not None and not options.max_seconds > 0:
        raise InvalidRequestError("--max-seconds must be greater than 0")
    if options.once is not None:
        return _run_once(options)
    if options.dry_run:
        facts = {"ok": False, "job": "run", "topics": []}
        return answer(options, lambda: _show(options), facts)
    logs.configure(level=options.log_level.upper(), as_text=not options.json)
    stop = threading.Event()

    def work(spark: TaskRunner, place: JobLocation, bar: Bar) -> JobReport:
        from ister.spark.jobs.service import run  # noqa: PLC0415 - loads Spark

        return run(
            spark, place.config, broker=place.broker, stop=stop, max_seconds=options.max_seconds
        )

    given = find_place(options).config
    known = set(given.pipeline.conf) if given is not None else set()
    lasting = [f"{name}={value}" for name, value in _CONF.items() if name not in known]
    # Those of the command line come last, and count.
    options.conf = [*lasting, *options.conf]
    with _orphan_watch(options.ends_with_parent, stop):
        return run_job(options, "run", work, columns=(("topic", "TOPIC"),), is_lasting=True)


def _run_once(options: argparse.Namespace) -> int:
    """Runs jobs one after the other, and prints a table for each."""
    if options.max_seconds is not None:
        raise InvalidRequestError("--once cannot be combined with --max-seconds")
    jobs = [name.strip() for name in options.once.split(",") if name.strip()]

    def run() -> int:
        from ister.spark.jobs.service import check_once, run_once  # noqa: PLC0415 - loads Arrow

        place = find_place(options)
        if place.config is not None:
            check_once(place.config, jobs)
        bar = Bar()
        with open_runner(options, place, "run", is_here=options.dry_run) as runner:
            try:
                report = run_once(
                    runner,
                    place.config,
                    broker=place.broker,
                    jobs=jobs,
                    dry_run=options.dry_run,
                    progress=bar,
                )
            finally:
                bar.end()
        if options.json:
            print_json(report.as_json())
        else:
            for part in report.parts:
                print_report(part, _TABLES[part.job])
        return 0 if report.ok else 1

    return answer(options, run, {"ok": False, "job": "run", "topics": [], "jobs": {}})


def _show(options: argparse.Namespace) -> int:
    """What would be done, and how often; needs neither Spark nor the stores."""
    config = find_place(options).config
    if config is None:
        raise InvalidRequestError(
            "--dry-run needs a config", hint="pass --config FILE or --data DIR"
        )
    pipeline, uploader = config.pipeline, config.storage.uploader
    is_tiered = uploader.engine in (Engine.AUTO, Engine.SPARK)
    export_minutes = pipeline.export.every_minutes if pipeline.export.to is not None else None
    seconds = {
        "tier": uploader.interval_seconds if is_tiered else None,
        "resort": uploader.express.resort_seconds if is_tiered else None,
        "compact": _seconds(pipeline.compact.every_minutes),
        "export": _seconds(export_minutes),
        "gc": _seconds(pipeline.gc.every_minutes),
        "scrub": _seconds(pipeline.scrub.every_minutes),
    }
    if options.json:
        jobs = {name: {"every_seconds": every} for name, every in seconds.items()}
        print_json(
            {"ok": True, "job": "run", "dry_run": True, "jobs": jobs, "topics": [], "errors": []}
        )
    else:
        rows = [
            (name, f"every {every:g} s" if every is not None else "never")
            for name, every in seconds.items()
        ]
        print_table(("job", "when"), rows)
    return 0


def _seconds(minutes: int | None) -> int | None:
    return None if minutes is None else minutes * 60


@contextmanager
def _orphan_watch(parent: int | None, stop: threading.Event) -> Iterator[None]:
    """Sets `stop` when the process that started this one is gone, and ends this one soon after.

    The JVM ends with this process, which holds its standard input.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_PARENT_SECONDS):
            if os.getppid() != parent:
                stop.set()
                if not over.wait(_ORPHAN_SECONDS):
                    os._exit(1)  # while Spark is starting, for example
                return

    if parent is None:
        yield
        return
    thread = threads.start("ister-pipeline-parent", watch)
    try:
        yield
    finally:
        over.set()
        thread.join()
