"""`ister pipeline status`: whether a pipeline runs, and what each job did last.

Owns: arguments and output. Needs no Spark: everything is in the metadata store, where the pipeline
and every job that ends leave it (`ister.bucket.pipeline`).
"""

from __future__ import annotations

import argparse
from typing import Final

from ister.base.clock import Clock, SystemClock
from ister.base.positions import format_time
from ister.cli.errors_out import answer, print_json
from ister.cli.location import add_place_arguments, load_place
from ister.cli.output import Subparsers, add_command, format_bytes, format_span, print_table
from ister.errors import InvalidRequestError, NotFoundError
from ister.topic.pipeline_status import JOBS, describe_absence, no_status, read_status
from ister.topic.stores import open_metadata
from ister.wire.views import PipelineJson, PipelineRequestJson, PipelineStatusJson

_QUIET_SECONDS: Final = 60


def register(jobs: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        jobs,
        "status",
        help="show whether a pipeline runs, and its jobs",
        description="Shows whether a pipeline runs, since when, and the last run of each "
        "job. Needs no Spark.",
        examples=("ister pipeline status", "ister pipeline status --config ister.yml --json"),
    )
    add_place_arguments(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    def run() -> int:
        config = load_place(options)
        if not config.storage.mode.has_bucket:
            raise InvalidRequestError(
                f"storage.mode is {config.storage.mode.value!r}, so this log has no pipeline",
                hint="only a log with storage.mode 'wal_cloud' has one",
            )
        clock = SystemClock()
        try:
            store = open_metadata(config.storage.metadata, clock, read_only=True)
        except NotFoundError:
            fields = no_status(config)
        else:
            try:
                fields = read_status(store, config)
            finally:
                store.close()
        if options.json:
            print_json(fields)
        else:
            print_status(fields, clock)
        return 0

    return answer(options, run, {"ok": False, "job": "status", "topics": []})


# -- in words -------------------------------------------------------------------------------


def print_status(fields: PipelineJson, clock: Clock) -> None:
    """Prints the status as text."""
    now = clock.now_ns() // 1_000_000_000
    print("\n".join(_describe(fields, now)))
    rows = _job_rows(fields, now)
    if rows:
        print()
        print_table(("job", "last run", "took", "result", "next"), rows)


def _describe(fields: PipelineJson, now: int) -> list[str]:
    lease, status = fields["lease"], fields["status"]
    lines: list[str] = []
    if lease is None:
        lines.append(describe_absence(fields["engine"]))
        if status is not None:
            lines.append(
                f"The last one ran on {status.get('host')} until "
                f"{_moment(status.get('updated_at'))}."
            )
    else:
        what = "A pipeline runs" if lease.get("job") == "run" else f"`{lease.get('job')}` runs"
        lines.append(
            f"{what} on {lease.get('host')}, process {lease.get('process')}, since "
            f"{_moment(lease.get('since'))} ({format_span(now - int(lease['since']))})."
        )
        if status is not None and status.get("holder") == lease.get("holder"):
            lines += _describe_running(status, now)
        elif lease.get("job") == "run":
            lines.append("It has not reported its status yet.")
    lines += [
        _describe_request(job, one, now) for job, one in (fields.get("requests") or {}).items()
    ]
    return lines


def _describe_running(status: PipelineStatusJson, now: int) -> list[str]:
    tier = status.get("tier") or {}
    lines: list[str] = []
    if not tier.get("is_on", True):
        lines.append("Uploads are not its work: see storage.uploader.engine.")
    else:
        lag = tier.get("lag_messages")
        lines.append(
            f"Uploads: {tier.get('topics')} topics, {status.get('cycles')} cycles, "
            f"{tier.get('tiered_messages_total')} messages, "
            f"{format_bytes(tier.get('tiered_bytes_total'))}; "
            + (f"{lag} messages behind." if lag is not None else "lag unknown.")
        )
    failing = tier.get("failing_topics") or []
    if failing:
        more = int(tier.get("failing_topics_total") or len(failing)) - len(failing)
        lines.append(
            f"Failing: {', '.join(failing)}" + (f" and {more} more" if more > 0 else "") + "."
        )
    if tier.get("last_error"):
        lines.append(f"The last cycle failed: {tier['last_error']}")
    memory = status.get("memory") or {}
    sizes = [
        f"{name} {format_bytes(memory[key])}"
        for name, key in (
            ("driver", "driver_rss_bytes"),
            ("JVM", "jvm_rss_bytes"),
            ("workers", "workers_rss_bytes"),
        )
        if memory.get(key) is not None
    ]
    if sizes:
        lines.append(f"Memory: {', '.join(sizes)}.")
    age = now - int(status.get("updated_at") or now)
    if age > _QUIET_SECONDS:
        lines.append(f"No status for {format_span(age)}.")
    return lines


def _describe_request(job: str, request: PipelineRequestJson, now: int) -> str:
    """The outcome of a requested job, in words."""
    topics = request.get("topics")
    what = f"{job} of {len(topics)} topics" if topics is not None else job
    age = format_span(max(now - int(request.get("requested_at") or now), 0))
    by = f" by {request['by']}" if request.get("by") else ""
    outcome = {
        "waiting": "waiting",
        "running": "running",
        "done": "done",
        "failed": f"failed: {request.get('error')}",
    }.get(str(request.get("state")), str(request.get("state")))
    return f"Asked for {age} ago{by}: {what}; {outcome}."


def _job_rows(fields: PipelineJson, now: int) -> list[tuple[object, ...]]:
    is_running = fields["is_running"]
    status = fields["status"] if is_running else None
    planned = (status or {}).get("jobs") or {}
    rows: list[tuple[object, ...]] = []
    for name in JOBS:
        report, plan = fields["reports"].get(name), planned.get(name)
        if report is None and plan is None:
            continue
        result = took = began = None
        if report is not None:
            began, took = report.get("started_at"), report.get("seconds")
            errors = report.get("errors") or []
            result = "ok" if not errors else f"{len(errors)} errors: {errors[0].get('message')}"
        coming = None
        if plan is not None:
            if plan.get("is_running"):
                coming = "runs now"
            elif (next_at := plan.get("next_at")) is not None:
                coming = f"in {format_span(max(next_at - now, 0))}"
            if plan.get("last_error"):
                result = str(plan["last_error"])
        rows.append(
            (
                name,
                _moment(began) if began else "never",
                format_span(took) if took is not None else None,
                result[:100] if result is not None else None,
                coming,
            )
        )
    return rows


def _moment(seconds: object) -> str:
    if not isinstance(seconds, int | float):
        return "an unknown time"
    return format_time(seconds * 1000)
