"""`ister bench NAME`: runs one benchmark and prints its figures beside their limits.

Owns: arguments and output. Does not own: the measurements, which are `ister.bench`'s. The exit code
is 0 when the benchmark ran, whether or not its targets were met: `met` says that.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from typing import TYPE_CHECKING, Final

from ister.bench.measurement import Run
from ister.cli.look import add_command, print_table
from ister.errors import NotFoundError

if TYPE_CHECKING:
    # argparse has no public name for it.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

__all__ = ["register"]

_BENCHES: Final = {
    "append": "accepting 1 KiB messages, and making them durable",
    "replay": "reading a cold log from its beginning",
    "tail": "from an append until a reader has the message",
    "recover": "opening a large log after a clean end and after a crash",
    "topics": "thousands of topics: creating, opening after kill -9, idle, back after a pause",
    "readers": "memory of a hundred readers that lag behind",
    "upload": "uploading a backlog, of one topic and of a hundred, and its memory",
    "history": "reading messages back from objects",
    "catalog": "looking up objects in a short and in a long history",
    "chain": "reading from the bucket to the live tail while the topic is written",
    "broker": "Danube's client on a broker: sends, consuming, latency; bulk publishing by Flight",
    "spark": "topics as Arrow and as Spark's tables, reading and writing",
    "jobs": "the pipeline's jobs on Spark: tier, compact, export and scrub, and their memory",
}


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "bench",
        help="measure, each figure beside its limit",
        description="Each figure stands beside a limit: the same work without Ister, measured in "
        "the same run.",
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
        bench.add_argument("--json", action="store_true", help="one JSON object")
        bench.add_argument(
            "--dir",
            metavar="DIR",
            help="where temporary data goes (default: the system's directory for it)",
        )
        bench.add_argument(
            "--quick", action="store_true", help="a twentieth of the size: for a first look"
        )
        bench.set_defaults(run=_run, bench=name)


def _run(options: argparse.Namespace) -> int:
    if options.dir is not None and not os.path.isdir(options.dir):
        raise NotFoundError(
            "no such directory", path=options.dir, hint="make it first, or leave --dir out"
        )
    bench = importlib.import_module(f"ister.bench.{options.bench}")
    # No bar: drawing one would take time from what is measured. A run says what it is at.
    with Run.begin(options.bench, options.dir, is_quick=options.quick) as run:
        bench.run(run)
    if options.json:
        print(json.dumps(run.as_json()))
    else:
        _print_results(run)
    return 0


def _print_results(run: Run) -> None:
    rows = [
        (
            result.name,
            result.value,
            result.unit,
            result.limit,
            result.ratio,
            None
            if result.target is None
            else f"{result.target_on} {result.sense} {result.target:g}",
            result.met,
        )
        for result in run.results
    ]
    titles = ("name", "value", "unit", "limit", "ratio", "target", "met")
    print_table(titles, rows)
    for result in run.results:
        for what, text in (("limit", result.limit_name), ("note", result.note)):
            if text is not None:
                print(f"  {result.name}: {what}: {text}")
