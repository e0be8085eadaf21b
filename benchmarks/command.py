"""Runs one benchmark and prints its figures beside their limits.

The exit code is 0 when the benchmark ran, whether or not its targets were met: `met` says that.
"""

from __future__ import annotations

import argparse
import importlib
import json

from benchmarks.measurement import Run
from ister.cli.output import print_table


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark that the options of `python -m benchmarks` name; returns the exit code."""
    bench = importlib.import_module(f"benchmarks.{options.bench}")
    # No progress bar: drawing one would take time from what is measured.
    with Run.begin(options.bench, options.dir, is_quick=options.quick) as measured:
        bench.run(measured)
    if options.json:
        print(json.dumps(measured.as_json()))
    else:
        _print_results(measured)
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
    for name, why in run.skipped:
        print(f"  {name}: skipped: {why}")
