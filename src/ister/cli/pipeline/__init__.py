"""`ister pipeline JOB`: the pipeline's jobs as commands, a file each.

Owns: the list of jobs. Does not own: what is common to their arguments and output (`common`), what
a job does (`ister.spark.jobs`).

run, status     the pipeline as a service, and what it does
tier, compact, export, gc, scrub, replay     one job each
child_process   starts a pipeline beside a broker
"""

from __future__ import annotations

from ister.cli.output import Subparsers, add_command
from ister.cli.pipeline import compact, export, gc, replay, run, scrub, status, tier

__all__ = ["register"]


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "pipeline",
        help="upload, merge, check, clean up, export and replay topics with Spark",
        description="Jobs on Spark: on this machine by default, on a cluster with --master. "
        "Each can be stopped at any time and run again.",
        examples=(
            "ister pipeline run --config ister.yml",
            "ister pipeline status",
            "ister pipeline compact --data ./ister-data",
        ),
    )
    jobs = parser.add_subparsers(metavar="JOB", required=True)
    for job in (run, status, tier, compact, export, gc, scrub, replay):
        job.register(jobs)
