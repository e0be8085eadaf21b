"""`ister up`: runs a broker and the pipeline on Spark; one Ctrl-C stops both.

Owns: its help. Does not own: the broker's process (`serve`), the pipeline's process (`pipeline`).
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
        description="Runs a broker like `ister serve`, and the pipeline (`ister pipeline run`) in "
        "the background, in a small Spark session on this machine. The broker serves at once and "
        "never waits for Spark: while the pipeline does not run, the broker uploads. A pipeline "
        "that dies is restarted. Without Java or pyspark, one line says what is missing and the "
        "broker runs alone. SIGTERM or Ctrl-C stops the pipeline, then the broker.",
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
