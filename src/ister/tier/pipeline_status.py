"""What the metadata store says about the pipeline: whether one runs, and what each job did last.

Owns: reading it. Does not own: writing it (`ister.spark.jobs.service`), saying it in words beyond
the first sentence (`ister.cli.pipeline.status`, the dashboard).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from ister.config import Config, Engine
from ister.errors import CorruptDataError
from ister.metadata.base import MetadataStore
from ister.tier.fence import read_holder
from ister.tier.pipeline import PipelineKeys
from ister.tier.pipeline_requests import read_requests

__all__ = ["JOBS", "describe_absence", "describe_pipeline", "no_status", "read_status"]

JOBS: Final = ("tier", "compact", "export", "scrub", "replay", "stats")
"""All jobs that leave reports."""


def no_status(config: Config) -> dict[str, Any]:
    """What is said where there never was a pipeline."""
    return {
        "ok": True,
        "job": "status",
        "is_running": False,
        "engine": config.storage.uploader.engine.value,
        "lease": None,
        "status": None,
        "reports": {},
        "requests": {},
        "topics": [],
        "errors": [],
    }


def read_status(store: MetadataStore, config: Config) -> dict[str, Any]:
    """What the metadata store says about the pipeline.

    Raises:
        UnavailableError: It does not answer.
    """
    keys = PipelineKeys(config.storage.metadata.root_prefix)
    fields = no_status(config)
    try:
        holder = read_holder(store, keys.lease)
    except CorruptDataError as error:
        holder = None
        fields["errors"].append({"code": error.code, "message": error.message, "hint": error.hint})
    reports = {name: _read(store, keys.report(name)) for name in JOBS}
    status = _read(store, keys.status)
    # Those that were taken are in the status of whoever took them.
    requests = dict((status or {}).get("requests") or {}) if holder is not None else {}
    for request in read_requests(store, keys):
        requests[request.job] = {**request.as_json(), "state": "waiting"}
    return {
        **fields,
        "is_running": holder is not None,
        "lease": None
        if holder is None
        else {"holder": holder.id, "since": holder.since, **holder.about},
        "status": status,
        "reports": {name: report for name, report in reports.items() if report is not None},
        "requests": requests,
    }


def describe_pipeline(fields: Mapping[str, Any]) -> str:
    """Whether one runs, in one sentence."""
    lease = fields["lease"]
    if lease is None:
        return describe_absence(fields["engine"])
    if lease.get("job") == "run":
        return f"A pipeline runs on {lease.get('host')}."
    return f"`ister pipeline {lease.get('job')}` runs on {lease.get('host')}."


def describe_absence(engine: str) -> str:
    """What follows from there being none."""
    if engine == Engine.SPARK.value:
        return (
            "No pipeline is running, and uploader.engine is spark: nothing is uploaded until one "
            "is. `ister pipeline run` starts it."
        )
    if engine == Engine.NONE.value:
        return "No pipeline is running, and uploader.engine is none: nothing is uploaded."
    return "No pipeline is running: brokers upload by themselves."


def _read(store: MetadataStore, key: str) -> dict[str, Any] | None:
    found = store.get(key)
    if found is None:
        return None
    try:
        fields = json.loads(found.value)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None
