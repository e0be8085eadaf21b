"""`python -m benchmarks NAME`: runs one benchmark and prints its figures beside their limits."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

from benchmarks.command import run
from ister.base import logs
from ister.cli.command import add_json_argument
from ister.cli.errors_out import print_errors
from ister.cli.output import Subparsers, add_command
from ister.cli.parser import Parser
from ister.errors import InvariantError, IsterError, NotFoundError

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark that the arguments name; returns the exit code."""
    parser = Parser(
        prog="python -m benchmarks",
        description="Prints each figure beside its limit: the same work without Ister, measured in "
        "the same run.",
        epilog="examples:\n  python -m benchmarks append --quick\n"
        "  python -m benchmarks broker --json",
    )
    names = cast("Subparsers", parser.add_subparsers(metavar="NAME", required=True))
    for name, what in _BENCHES.items():
        bench = add_command(names, name, help=what, description=f"Measures {what}.")
        add_json_argument(bench)
        bench.add_argument(
            "--dir", metavar="DIR", help="directory for temporary data (default: the system's)"
        )
        bench.add_argument(
            "--quick",
            action="store_true",
            help="run a twentieth of the work, for a first impression",
        )
        bench.set_defaults(bench=name)
    options = parser.parse_args(arguments)
    # Child processes import this package, wherever they run.
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    logs.configure(level="ERROR", as_text=True)
    try:
        if options.dir is not None and not os.path.isdir(options.dir):
            raise NotFoundError(
                "directory not found", path=options.dir, hint="create it, or omit --dir"
            )
        return run(options)
    except InvariantError:
        raise
    except IsterError as error:
        print_errors([error])
    return 1


if __name__ == "__main__":
    sys.exit(main())
