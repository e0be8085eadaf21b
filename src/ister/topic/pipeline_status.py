"""What the metadata store says about the pipeline: whether one runs, and what each job did last.

Owns: reading it. Does not own: writing it (`ister.spark.jobs.service`), saying it in words beyond
the first sentence (`ister.cli.pipeline.status`, the dashboard).
"""

from __future__ import annotations

import json
from typing import Any, Final, cast

from ister.bucket.fence import read_holder
from ister.bucket.pipeline import PipelineKeys, read_requests
from ister.config import Config, Engine
from ister.errors import CorruptDataError
from ister.metadata.base import MetadataStore
from ister.wire.views import (
    PipelineJson,
    PipelineLeaseJson,
    PipelineReportJson,
    PipelineRequestJson,
    PipelineStatusJson,
)

JOBS: Final = ("tier", "resort", "compact", "export", "gc", "scrub", "replay")
"""All jobs that leave reports."""


def no_status(config: Config) -> PipelineJson:
    """The status of a log that never had a pipeline."""
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


def read_status(store: MetadataStore, config: Config) -> PipelineJson:
    """The pipeline's lease, status, reports and requests, from the metadata store."""
    keys = PipelineKeys(config.storage.metadata.root_prefix)
    fields = no_status(config)
    try:
        holder = read_holder(store, keys.lease)
    except CorruptDataError as error:
        holder = None
        fields["errors"].append({**error.to_dict()})
    reports: dict[str, PipelineReportJson | None] = {
        name: _read(store, keys.report(name)) for name in JOBS
    }
    status: PipelineStatusJson | None = _read(store, keys.status)
    # Requests that were taken are in the status of the pipeline that took them.
    requests: dict[str, PipelineRequestJson] = {}
    if holder is not None and status is not None:
        requests |= status.get("requests") or {}
    for request in read_requests(store, keys):
        requests[request.job] = {
            "requested_at": request.requested_at,
            "by": request.by,
            "topics": None if request.topics is None else [*request.topics],
            "state": "waiting",
        }
    lease: PipelineLeaseJson | None = None
    if holder is not None:
        about = {"holder": holder.id, "since": holder.since, **holder.about}
        lease = cast("PipelineLeaseJson", about)
    return {
        **fields,
        "is_running": holder is not None,
        "lease": lease,
        "status": status,
        "reports": {name: report for name, report in reports.items() if report is not None},
        "requests": requests,
    }


def describe_pipeline(fields: PipelineJson) -> str:
    """Whether a pipeline runs, in one sentence."""
    lease = fields["lease"]
    if lease is None:
        return describe_absence(fields["engine"])
    if lease.get("job") == "run":
        return f"A pipeline runs on {lease.get('host')}."
    return f"`ister pipeline {lease.get('job')}` runs on {lease.get('host')}."


def describe_absence(engine: str) -> str:
    """What happens without a pipeline, in one sentence."""
    if engine == Engine.SPARK.value:
        return (
            "No pipeline is running, and uploader.engine is spark: nothing is uploaded until one "
            "is. `ister pipeline run` starts it."
        )
    if engine == Engine.NONE.value:
        return "No pipeline is running, and uploader.engine is none: nothing is uploaded."
    return "No pipeline is running: brokers upload by themselves."


# Any: the caller knows what is stored under the key.
def _read(store: MetadataStore, key: str) -> Any:  # noqa: ANN401
    found = store.get(key)
    if found is None:
        return None
    try:
        fields = json.loads(found.value)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None
