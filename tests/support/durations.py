"""How long tests take: `make test` records it, `make durations` shows the record of the last run.

The record is a line of JSON for each file: how many tests ran, their seconds with fixtures, the
processor seconds of the process and of the programs that it waited for, and the longest test. Where
the processor had little to do, a test waited: for a program, a disk, a lock or a fixed time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).resolve().parents[2] / ".durations.jsonl"
_SHOWN = 25


class Durations:
    """A plugin that adds up durations, and writes them where that is asked for."""

    def __init__(self, record: Path | None) -> None:
        self._record = record
        self._files: dict[str, dict[str, Any]] = {}
        self._before = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> object:
        """Notes the processor's part in a report, in the process that runs the test."""
        report = yield
        now = processor_seconds()
        report.processor_seconds, self._before = now - self._before, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds up, in the process that shows the outcome."""
        path = report.nodeid.partition("::")[0]
        row = self._files.setdefault(
            path,
            {"file": path, "tests": 0, "seconds": 0.0, "processor": 0.0, "longest": ["", 0.0]},
        )
        row["tests"] += report.when == "call"
        row["seconds"] += report.duration
        row["processor"] += getattr(report, "processor_seconds", 0.0)
        if report.duration > row["longest"][1]:
            row["longest"] = [report.nodeid.partition("::")[2], report.duration]

    def pytest_sessionfinish(self) -> None:
        """Writes the record, the slowest file first."""
        if self._record is not None and self._files:
            rows = sorted(self._files.values(), key=lambda row: -row["seconds"])
            lines = [json.dumps(json.loads(json.dumps(row), parse_float=_rounded)) for row in rows]
            self._record.write_text("\n".join(lines) + "\n")


def processor_seconds() -> float:
    """What this process and the programs that it waited for took of the processor."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _rounded(text: str) -> float:
    return round(float(text), 3)


def shown(rows: list[dict[str, Any]]) -> Iterable[str]:
    """Two tables: by suite, and the slowest files with their longest test."""
    suites: dict[str, list[float]] = {}
    for row in rows:
        parts = Path(row["file"]).parts[1:-1]
        suite = "/".join(parts[:2]) or "tests"
        total = suites.setdefault(suite, [0, 0.0, 0.0])
        for at, key in enumerate(("tests", "seconds", "processor")):
            total[at] += row[key]
    suites["all"] = [sum(column) for column in zip(*suites.values(), strict=True)]
    yield f"{'suite':<50}{'tests':>7}{'seconds':>9}{'processor':>11}"
    for name, (tests, seconds, processor) in sorted(suites.items(), key=lambda one: -one[1][1]):
        yield f"{name:<50}{tests:>7}{seconds:>9.1f}{processor:>11.1f}"
    yield ""
    yield f"{'the slowest files':<50}{'tests':>7}{'seconds':>9}{'processor':>11}  longest test"
    for row in rows[:_SHOWN]:
        name, seconds = row["longest"]
        yield (
            f"{row['file'].removeprefix('tests/'):<50}{row['tests']:>7}{row['seconds']:>9.1f}"
            f"{row['processor']:>11.1f}  {seconds:.1f} {name}"
        )


def main() -> int:
    """Prints the record of the last run."""
    if not RECORD.exists():
        print("nothing is recorded yet: `make test` does it", file=sys.stderr)
        return 1
    rows = [json.loads(line) for line in RECORD.read_text().splitlines()]
    print("\n".join(shown(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
