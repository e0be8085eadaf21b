"""`ister pipeline replay SOURCE TARGET`: a topic into another one, through a function or SQL.

Owns: the arguments, and how a sample is shown. Does not own: `ister.spark.jobs.replaying`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from ister.cli.look import add_command, print_table
from ister.cli.pipeline.common import Bar, Place, add_job_arguments, run_job
from ister.errors import InvalidRequestError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ister.cli.pipeline import Subparsers
    from ister.spark.jobs.report import JobReport

__all__ = ["register"]

_COLUMNS: Final = (
    ("topic", "TOPIC"),
    ("source", "SOURCE"),
    ("start_offset", "FROM"),
    ("next_offset", "UNTIL"),
    ("messages_read", "READ"),
    ("messages", "WRITTEN"),
    ("bytes", "BYTES"),
    ("chunks", "CHUNKS"),
)
_SAMPLE_WIDTH: Final = 60

_NOTES: Final = """\
the transform:
  def transform(message):            # one message: .offset .payload .text .attributes
      return message.text.upper()    # bytes, text, {"payload": …, "routing_key": …},
                                     # message.replace(…), None to leave it out, or a list
  def transform(batch: pyarrow.RecordBatch):
      return batch.filter(…)         # many at once, with the connector's columns: far faster

  A parameter that is annotated with RecordBatch, or is called batch, gets batches;
  --per-message and --per-batch say it instead.

exactly once:
  The same command run again goes on where it was stopped, and does nothing once all is done.
  --until latest is the end of the source when the replay is first begun. --name tells two
  replays apart that are the same otherwise, or does one again.

SQL:
  It sees the view messages: the connector's columns, and text, the payload as text. Queries
  that look at several messages at once (aggregates, joins, windows) see the whole range at once,
  and their rows come in the order of Spark's partitions.
"""


def register(jobs: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        jobs,
        "replay",
        help="one topic into another one, through a function or SQL",
        description="Replays a range of a topic into another one, exactly once.",
        examples=(
            (
                "ister pipeline replay /default/orders /default/eu --transform shop.py:only_eu \\\n"
                "--dry-run"
            ),
            "ister pipeline replay /default/orders /default/copy --from 2026-01-01T00:00:00Z",
            (
                "ister pipeline replay /default/orders /default/big \\\n"
                "--sql \"SELECT * FROM messages WHERE get_json_object(text, '$.total') > 100\""
            ),
        ),
        notes=_NOTES,
    )
    parser.add_argument("source", metavar="SOURCE", help="the topic to read")
    parser.add_argument("target", metavar="TARGET", help="the topic to append to")
    add_job_arguments(parser, topics=False)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--transform", metavar="WHERE:FUNCTION", help="module:function, or path/to/file.py:function"
    )
    what.add_argument("--sql", metavar="QUERY", help="SELECT … FROM messages, with a payload")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--per-message",
        dest="per_message",
        action="store_const",
        const=True,
        help="the function takes one message",
    )
    kind.add_argument(
        "--per-batch",
        dest="per_message",
        action="store_const",
        const=False,
        help="the function takes a pyarrow.RecordBatch",
    )
    parser.add_argument(
        "--from",
        dest="start",
        metavar="PLACE",
        help="an offset, a time (2026-01-31T12:00:00Z), earliest (the default) or latest",
    )
    parser.add_argument(
        "--until", dest="end", metavar="PLACE", help="likewise, not included; latest by default"
    )
    parser.add_argument("--name", metavar="NAME", help="what tells this replay from others")
    parser.add_argument(
        "--no-create", action="store_true", help="fail if the target does not exist"
    )
    parser.add_argument(
        "--mark",
        action="store_true",
        help="give each message the attribute ister-source-offset",
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=10,
        metavar="N",
        help="how many messages --dry-run shows (default: 10)",
    )
    parser.set_defaults(run=_run, per_message=None)


def _run(options: argparse.Namespace) -> int:
    if options.sql is not None and options.per_message is not None:
        raise InvalidRequestError(
            "--sql takes no function", hint="leave --per-message and --per-batch out"
        )
    shown: list[JobReport] = []

    def work(spark: SparkSession, place: Place, bar: Bar) -> JobReport:
        from ister.spark.jobs.replay_plan import parse_place  # noqa: PLC0415 - loads Spark
        from ister.spark.jobs.replaying import replay  # noqa: PLC0415

        report = replay(
            spark,
            place.config,
            broker=place.broker,
            source=options.source,
            target=options.target,
            transform=options.transform,
            sql=options.sql,
            per_message=options.per_message,
            start=parse_place(options.start) if options.start is not None else None,
            end=parse_place(options.end) if options.end is not None else None,
            name=options.name,
            create=not options.no_create,
            mark=options.mark,
            dry_run=options.dry_run,
            sample=options.sample,
            progress=bar,
        )
        shown.append(report)
        return report

    code = run_job(options, "replay", work, columns=_COLUMNS)
    if shown and not options.json:
        _print_more(shown[0].more)
    return code


def _print_more(more: dict[str, Any]) -> None:
    sample = more.get("sample")
    if sample is not None:
        print_sample(sample)
    if more.get("state") == "already done":
        print("already done: nothing was replayed")
    if more.get("hint"):
        print(more["hint"])


def print_sample(sample: list[dict[str, Any]]) -> None:
    """The messages of a sample as a table."""
    if not sample:
        print("sample: no message came through")
        return
    rows = [
        (
            _shorten(message["payload"] if message["payload"] is not None else _binary(message)),
            message["routing_key"],
            _shorten(", ".join(f"{name}={value}" for name, value in message["attributes"].items())),
            message["publish_time"],
        )
        for message in sample
    ]
    print_table(("payload", "routing key", "attributes", "published"), rows)


def _binary(message: dict[str, Any]) -> str:
    return f"base64:{message['payload_base64']}"


def _shorten(text: str) -> str:
    line = text.replace("\n", "\\n")
    return line if len(line) <= _SAMPLE_WIDTH else f"{line[: _SAMPLE_WIDTH - 1]}…"
