"""`ister pipeline status`: whether a pipeline runs, and what each job did last.

Owns: what is said about it. Needs no Spark: everything is in the metadata store, where the pipeline
and every job that ends leave it (`ister.tier.pipeline`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from ister.cli.pipeline.common import format_bytes
from ister.cli.place import add_place_arguments, load_place
from ister.cli.report import answer, error_as_json, print_json
from ister.cli.table import format_table
from ister.clock import Clock, SystemClock
from ister.config import Config, Engine, StorageMode
from ister.errors import InvalidRequestError, IsterError, NotFoundError
from ister.metadata.base import MetadataStore
from ister.tier.fence import Holder, read_holder
from ister.tier.pipeline import PipelineKeys
from ister.topic.tiers import open_metadata

if TYPE_CHECKING:
    from ister.cli.pipeline import Subparsers

__all__ = ["describe_status", "read_status", "register"]

_JOBS: Final = ("tier", "compact", "export", "scrub", "replay", "stats")
_MINUTE: Final = 60
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR


def register(jobs: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = jobs.add_parser(
        "status",
        help="whether a pipeline runs, and what it does",
        description="Whether a pipeline runs, since when, and what each job did last. "
        "Needs no Spark.",
        epilog="examples:\n  ister pipeline status\n"
        "  ister pipeline status --config ister.yml --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_place_arguments(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    def run() -> int:
        config = load_place(options)
        if config.storage.mode is not StorageMode.WAL_CLOUD:
            raise InvalidRequestError(
                f"storage.mode is {config.storage.mode.value!r}, so this log has no pipeline",
                hint="only a log with storage.mode 'wal_cloud' has one",
            )
        clock = SystemClock()
        try:
            store = open_metadata(config.storage.metadata, clock, read_only=True)
        except NotFoundError:
            fields = _nothing(config)
        else:
            try:
                fields = read_status(store, config)
            finally:
                store.close()
        if options.json:
            print_json(fields)
        else:
            print(describe_status(fields, clock))
        return 0

    def failed(error: IsterError) -> Mapping[str, Any]:
        return {"ok": False, "job": "status", "topics": [], "errors": [error_as_json(error)]}

    return answer(run, as_json=options.json, on_error=failed)


# -- what there is --------------------------------------------------------------------------


def _nothing(config: Config) -> dict[str, Any]:
    return {
        "ok": True,
        "job": "status",
        "is_running": False,
        "engine": config.storage.uploader.engine.value,
        "lease": None,
        "status": None,
        "reports": {},
        "topics": [],
        "errors": [],
    }


def read_status(store: MetadataStore, config: Config) -> dict[str, Any]:
    """What the metadata store says about the pipeline.

    Raises:
        UnavailableError: It does not answer.
    """
    keys = PipelineKeys(config.storage.metadata.root_prefix)
    holder = read_holder(store, keys.lease)
    reports = {name: _read(store, keys.report(name)) for name in _JOBS}
    return {
        **_nothing(config),
        "is_running": holder is not None,
        "lease": None if holder is None else _as_fields(holder),
        "status": _read(store, keys.status),
        "reports": {name: report for name, report in reports.items() if report is not None},
    }


def _as_fields(holder: Holder) -> dict[str, Any]:
    return {"holder": holder.id, "since": holder.since, **holder.about}


def _read(store: MetadataStore, key: str) -> dict[str, Any] | None:
    found = store.get(key)
    if found is None:
        return None
    try:
        fields = json.loads(found.value)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


# -- in words -------------------------------------------------------------------------------


def describe_status(fields: Mapping[str, Any], clock: Clock) -> str:
    """The same for people."""
    now = clock.now_ns() // 1_000_000_000
    lease, status = fields["lease"], fields["status"]
    lines: list[str] = []
    if lease is None:
        lines.append(_without(fields["engine"]))
        if status is not None:
            lines.append(
                f"The last one ran on {status.get('host')} until "
                f"{_moment(status.get('updated_at'))}."
            )
    else:
        what = "A pipeline runs" if lease.get("job") == "run" else f"`{lease.get('job')}` runs"
        lines.append(
            f"{what} on {lease.get('host')}, process {lease.get('process')}, since "
            f"{_moment(lease.get('since'))} ({_span(now - int(lease['since']))})."
        )
        if status is not None and status.get("holder") == lease.get("holder"):
            lines += _describe_running(status, now)
        elif lease.get("job") == "run":
            lines.append("It has not said yet how it is.")
    rows = _job_rows(fields, now)
    if rows:
        lines += ["", format_table(("JOB", "LAST RUN", "TOOK", "RESULT", "NEXT"), rows)]
    return "\n".join(lines)


def _without(engine: str) -> str:
    if engine == Engine.SPARK.value:
        return (
            "No pipeline is running, and uploader.engine is spark: nothing is uploaded until one "
            "is. `ister pipeline run` starts it."
        )
    if engine == Engine.NONE.value:
        return "No pipeline is running, and uploader.engine is none: nothing is uploaded."
    return "No pipeline is running: brokers upload by themselves."


def _describe_running(status: Mapping[str, Any], now: int) -> list[str]:
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
    if age > _MINUTE:
        lines.append(f"It has said nothing for {_span(age)}.")
    return lines


def _job_rows(fields: Mapping[str, Any], now: int) -> list[tuple[object, ...]]:
    is_running = fields["is_running"]
    status = (fields["status"] or {}) if is_running else {}
    planned: Mapping[str, Any] = status.get("jobs") or {}
    rows: list[tuple[object, ...]] = []
    for name in _JOBS:
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
            elif plan.get("next_at") is not None:
                coming = f"in {_span(max(int(plan['next_at']) - now, 0))}"
            if plan.get("last_error"):
                result = str(plan["last_error"])
        rows.append(
            (
                name,
                _moment(began) if began else "never",
                _span(took) if took is not None else None,
                result[:100] if result is not None else None,
                coming,
            )
        )
    return rows


def _moment(seconds: object) -> str:
    if not isinstance(seconds, int | float):
        return "an unknown time"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _span(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    if seconds < 2 * _DAY:
        return f"{seconds / _HOUR:.1f} h"
    return f"{seconds / _DAY:.1f} days"
