"""`ister pipeline replay SOURCE TARGET`: a topic into another one, through a function or SQL.

Owns: the arguments, and how a sample is shown. Does not own: `ister.spark.jobs.replay_job`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final, cast

from ister.base.model import JsonObject
from ister.cli.connection import FIXED_START_HELP, parse_fixed_start
from ister.cli.output import Subparsers, add_command, print_table
from ister.cli.pipeline.common import Bar, JobLocation, add_job_arguments, run_job
from ister.errors import InvalidRequestError

if TYPE_CHECKING:
    from ister.spark.jobs.job_report import JobReport
    from ister.spark.jobs.replay_job import SampleJson
    from ister.spark.jobs.tasks import TaskRunner

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
  --per-message and --per-batch override that.

exactly once:
  Running the same command again continues where it stopped, and does nothing once it is done.
  --until latest is the end of the source when the replay is first begun. --name tells two
  replays apart that are the same otherwise, or does one again.

SQL:
  It sees the whole range as the view messages: the connector's columns, and text, the payload as
  text. Its rows come in the order of Spark's partitions, which is that of the messages unless it
  sorts, groups or joins them. They are appended in one commit.
"""


def register(jobs: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        jobs,
        "replay",
        help="copy a topic into another, through a function or SQL",
        description="Replays a range of a topic into another topic, exactly once.",
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
    parser.add_argument("source", metavar="SOURCE", help="source topic")
    parser.add_argument("target", metavar="TARGET", help="target topic")
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
        help="the function takes one message at a time",
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
        metavar="WHERE",
        type=parse_fixed_start,
        help=f"start: {FIXED_START_HELP} (default: earliest)",
    )
    parser.add_argument(
        "--until",
        dest="end",
        metavar="WHERE",
        type=parse_fixed_start,
        help="end, exclusive: as --from (default: latest)",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="identity of this replay: running it again continues it"
    )
    parser.add_argument(
        "--no-create", action="store_true", help="fail if the target does not exist"
    )
    parser.add_argument(
        "--mark", action="store_true", help="add the attribute ister-source-offset to each message"
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=10,
        metavar="N",
        help="number of messages that --dry-run shows (default: 10)",
    )
    parser.set_defaults(run=_run, per_message=None)


def _run(options: argparse.Namespace) -> int:
    if options.sql is not None and options.per_message is not None:
        raise InvalidRequestError(
            "--sql takes no function", hint="omit --per-message and --per-batch"
        )
    shown: list[JobReport] = []

    def work(spark: TaskRunner, place: JobLocation, bar: Bar) -> JobReport:
        from ister.spark.jobs.replay_job import replay  # noqa: PLC0415

        report = replay(
            spark,
            place.config,
            broker=place.broker,
            source=options.source,
            target=options.target,
            transform=options.transform,
            sql=options.sql,
            per_message=options.per_message,
            start=options.start,
            end=options.end,
            name=options.name,
            create=not options.no_create,
            mark=options.mark,
            dry_run=options.dry_run,
            sample=options.sample,
            progress=bar,
        )
        shown.append(report)
        return report

    is_query = options.sql is not None
    code = run_job(
        options,
        "replay",
        work,
        columns=_COLUMNS,
        # Only Spark can say whether a query makes sense.
        needs_spark=is_query,
        is_short=not is_query,
    )
    if shown and not options.json:
        _print_more(shown[0].more)
    return code


def _print_more(more: JsonObject) -> None:
    sample = cast("list[SampleJson] | None", more.get("sample"))
    if sample is not None:
        print_sample(sample)
    if more.get("state") == "already done":
        print("already done: 0 messages were replayed")
    if more.get("hint"):
        print(more["hint"])


def print_sample(sample: list[SampleJson]) -> None:
    """The messages of a sample as a table."""
    if not sample:
        print("sample: no message came through")
        return
    rows = [
        (
            _shorten(
                f"base64:{message['payload_base64']}"
                if message["payload"] is None
                else message["payload"]
            ),
            message["routing_key"],
            _shorten(", ".join(f"{name}={value}" for name, value in message["attributes"].items())),
            message["publish_time"],
        )
        for message in sample
    ]
    print_table(("payload", "routing key", "attributes", "published"), rows)


def _shorten(text: str) -> str:
    line = text.replace("\n", "\\n")
    return line if len(line) <= _SAMPLE_WIDTH else f"{line[: _SAMPLE_WIDTH - 1]}…"
