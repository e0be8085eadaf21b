"""The pipeline: jobs that move, merge, check, clean up, export and replay topics, on Spark.

    driver: plan ─► tasks: bytes become objects and files ─► driver: commit, under the job's lease

Each job is a function that takes a Spark session and says what it did, and a command, `ister
pipeline <job>`. All of them are safe to kill at any moment and to run again.

tier_job, tier_topics                        `tier`
compact_job, latest_per_key                  `compact`, and re-sorting of express runs within `run`
export_job, export_round, export_schema, export_task, export_commit    `export`
gc_job                                       `gc`
scrubbing, topic_scrub                       `scrub`
replay_job, replay_plan, replay_sql, transforms    `replay`
service, pipeline_term                       `run`: all of them as a service
job, job_report, leases, tasks               what jobs share: lease, report, and their tasks
session                                      the Spark session of a command

    from ister.spark import jobs
    report = jobs.tier(spark, "ister.yml")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ister.spark.jobs.compact_job import compact
    from ister.spark.jobs.export_job import export
    from ister.spark.jobs.gc_job import gc
    from ister.spark.jobs.job_report import JobReport
    from ister.spark.jobs.replay_job import replay
    from ister.spark.jobs.scrubbing import scrub
    from ister.spark.jobs.service import run, run_once
    from ister.spark.jobs.session import open_session
    from ister.spark.jobs.tier_job import tier

__all__ = [
    "JobReport",
    "compact",
    "export",
    "gc",
    "open_session",
    "replay",
    "run",
    "run_once",
    "scrub",
    "tier",
]

# Each is loaded when it is asked for: tables of Iceberg and Delta need libraries of their own.
_HOMES: Final = {
    "JobReport": "job_report",
    "compact": "compact_job",
    "export": "export_job",
    "gc": "gc_job",
    "open_session": "session",
    "replay": "replay_job",
    "run": "service",
    "run_once": "service",
    "scrub": "scrubbing",
    "tier": "tier_job",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
