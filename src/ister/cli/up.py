"""`ister up`: a broker with its pipeline on Spark, in one command; one Ctrl-C stops both.

Owns: its help. Does not own: the broker's process (`serve`), the pipeline's (`pipeline`).
"""

from __future__ import annotations

import argparse

from ister.cli.output import Subparsers, add_command
from ister.cli.serve import PipelineWish, add_broker_arguments, run_broker


def register(commands: Subparsers) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "up",
        help="run a broker and the pipeline on Spark",
        description="Runs a broker as `ister serve` does, and starts the pipeline (`ister pipeline "
        "run`) in the background, in a small Spark session on this machine. The broker serves at "
        "once and never waits for Spark: it uploads by itself until the pipeline runs, and "
        "whenever it does not. A pipeline that dies is restarted. Without Java or pyspark the "
        "broker says so and runs alone. SIGTERM or Ctrl-C stops both in order.",
        examples=(
            "ister up",
            "ister up --data-dir /var/lib/ister",
            "ister up --config ister.yml --json",
        ),
    )
    add_broker_arguments(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    return run_broker(options, PipelineWish.OPTIONAL)
