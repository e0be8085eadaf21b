"""`ister bench NAME`: runs one benchmark and prints its figures beside their limits.

Owns: the arguments. The benchmarks are the checkout's package `benchmarks`, not in the wheel.
"""

from __future__ import annotations

import argparse
import os
from typing import Final

from ister.cli.checkout import use_checkout
from ister.cli.output import Subparsers, add_command
from ister.errors import NotFoundError

_BENCHES: Final = {
    "startup": "CPU time of `import ister`, of `ister --help` and of the first use",
    "append": "appending 1 KiB messages, and making them durable",
    "replay": "reading a cold log from its beginning",
    "tail": "latency from an append to a reader",
    "recover": "opening a large log after a clean shutdown and after a crash",
    "topics": "thousands of topics: creating, opening after kill -9, idling, resuming after "
    "a pause",
    "readers": "memory of a hundred lagging readers",
    "upload": "uploading a backlog of one topic and of a hundred, with memory",
    "express": "ack level tiered with many topics: latency, uploads, throughput and memory",
    "history": "reading messages back from objects",
    "catalog": "looking up objects in a short and in a long history",
    "cycle": "a pipeline cycle over thousands of topics with nothing to upload",
    "chain": "reading from the bucket to the live tail while the topic is written",
    "broker": "a broker: Danube's client, CPU time per message with each gRPC engine, Flight",
    "spark": "topics as Arrow and as Spark's tables, reading and writing",
    "jobs": "the pipeline's jobs on Spark: tier, compact, export and scrub, and their memory",
    "up": "`ister up`: time to start and to stop, memory and CPU time of the idle pipeline",
}


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "bench",
        help="run a benchmark (needs a checkout of the project)",
        description="Prints each figure beside its limit: the same work without Ister, "
        "measured in the same run. Needs a checkout of the project.",
        examples=("ister bench append --quick", "ister bench broker --json"),
    )
    names = parser.add_subparsers(metavar="NAME", required=True)
    for name, what in _BENCHES.items():
        bench = add_command(
            names,
            name,
            help=what,
            description=f"Measures {what}.",
            examples=(f"ister bench {name} --quick", f"ister bench {name} --dir /mnt/disk --json"),
        )
        bench.add_argument("--json", action="store_true", help="print one JSON object")
        bench.add_argument(
            "--dir", metavar="DIR", help="directory for temporary data (default: the system's)"
        )
        bench.add_argument(
            "--quick",
            action="store_true",
            help="run a twentieth of the work, for a first impression",
        )
        bench.set_defaults(run=_run, bench=name)


def _run(options: argparse.Namespace) -> int:
    if options.dir is not None and not os.path.isdir(options.dir):
        raise NotFoundError(
            "directory not found", path=options.dir, hint="create it, or omit --dir"
        )
    use_checkout("ister bench", "benchmarks")
    from benchmarks.command import run  # noqa: PLC0415 - importable from here on

    return run(options)
