"""How large the project is: `python -m tools.size [--against REVISION] [--json | --budget]`.

Prints the lines of source by package, of tests by folder, the median and the longest files, the
longest functions, how often `Any` is written. Lines
are counted as they are in the files: code, comments and blank ones alike.

Each package has a budget, which `make lint` shows beside its lines. No test fails where one is
exceeded: state the reason in the commit message.
"""

import argparse
import ast
import io
import json
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_OUTSIDE_OF_THE_WHEEL = ("benchmarks", "demo", "tools")
_LONGEST = 8
# A name, what it counts, and how many lines it is to have. What is not named anywhere is `base`.
BUDGETS = {
    "base": ((), 5_800),
    "format": (("format", "kernels"), 6_700),
    "fs, objectstore, metadata": (("fs", "objectstore", "metadata"), 5_000),
    "wal": (("wal",), 4_500),
    "bucket": (("bucket",), 7_300),
    "topic, rescue": (("topic", "rescue"), 11_000),
    "subscription": (("subscription",), 3_300),
    "broker": (("broker",), 22_000),
    "client, wire": (("client", "wire"), 7_100),
    "spark": (("spark",), 15_500),
    "cli": (("cli",), 9_500),
}
_TESTS_BUDGET = 125_000


@dataclass(frozen=True)
class Size:
    """What is counted in one tree."""

    packages: dict[str, int]
    source: int
    outside: int
    tests: dict[str, int]
    median_file: float
    longest_files: dict[str, int]
    longest_functions: dict[str, int]
    any_count: int
    noqa_any: int


def measure(root: Path) -> Size:
    """Counts one tree."""
    package = root / "src" / "ister"
    files = {path: path.read_text().splitlines() for path in sorted(package.rglob("*.py"))}
    packages: Counter[str] = Counter()
    functions: dict[str, int] = {}
    for path, lines in files.items():
        parts = path.relative_to(package).parts
        packages[parts[0] if len(parts) > 1 else "(modules)"] += len(lines)
        functions |= _functions("\n".join(lines), str(path.relative_to(package)))
    lengths = {str(path.relative_to(package)): len(lines) for path, lines in files.items()}
    text = "\n".join("\n".join(lines) for lines in files.values())
    tests: Counter[str] = Counter()
    for path in sorted((root / "tests").rglob("*.py")):
        tests[path.relative_to(root / "tests").parts[0]] += len(path.read_text().splitlines())
    return Size(
        packages=dict(packages.most_common()),
        source=sum(packages.values()),
        outside=sum(
            len(path.read_text().splitlines())
            for folder in _OUTSIDE_OF_THE_WHEEL
            for path in (root / folder).rglob("*.py")
        ),
        tests=dict(tests.most_common()),
        median_file=statistics.median(lengths.values()),
        longest_files=_largest(lengths),
        longest_functions=_largest(functions),
        any_count=len(re.findall(r"\bAny\b", text)) - len(re.findall(r"import .*\bAny\b", text)),
        noqa_any=text.count("ANN401"),
    )


def _functions(source: str, where: str) -> dict[str, int]:
    return {
        f"{where}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _largest(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:_LONGEST])


def _measure_revision(revision: str) -> Size:
    archive = subprocess.run(  # noqa: S603 - a revision of this repository
        ["git", "archive", revision],  # noqa: S607
        cwd=_ROOT,
        check=True,
        capture_output=True,
    ).stdout
    with tempfile.TemporaryDirectory() as directory:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(directory, filter="data")
        return measure(Path(directory))


def _print(now: Size, before: Size | None) -> None:
    def row(name: str, value: float, old: float | None) -> None:
        was = "" if before is None else f"{old or 0:>12,.0f}"
        print(f"  {name:<52}{was}{value:>12,.0f}")  # noqa: T201

    def table(title: str, values: dict[str, int], old: dict[str, int] | None) -> None:
        print(title)  # noqa: T201
        for name in sorted(values.keys() | (old or {}).keys(), key=lambda n: -values.get(n, 0)):
            row(name, values.get(name, 0), (old or {}).get(name))

    table("source lines by package", now.packages, before and before.packages)
    row("all of src/ister", now.source, before and before.source)
    row("benchmarks, demo, tools", now.outside, before and before.outside)
    table("test lines by folder", now.tests, before and before.tests)
    row("all of tests", sum(now.tests.values()), before and sum(before.tests.values()))
    print("other counts")  # noqa: T201
    row("median file", now.median_file, before and before.median_file)
    row("`Any`", now.any_count, before and before.any_count)
    row("noqa: ANN401", now.noqa_any, before and before.noqa_any)
    for title, counts in (
        ("longest files", now.longest_files),
        ("longest functions", now.longest_functions),
    ):
        print(title)  # noqa: T201
        for name, lines in counts.items():
            print(f"  {name:<70}{lines:>6}")  # noqa: T201


def _print_budget(now: Size) -> None:
    counted = {part for parts, _ in BUDGETS.values() for part in parts}
    rows = []
    for name, (parts, budget) in BUDGETS.items():
        found = parts or [package for package in now.packages if package not in counted]
        rows.append((name, sum(now.packages.get(part, 0) for part in found), budget))
    rows.append(("all of src/ister", now.source, sum(budget for _, _, budget in rows)))
    rows.append(("all of tests", sum(now.tests.values()), _TESTS_BUDGET))
    print(f"{'package':<28}{'lines':>10}{'budget':>10}{'over':>10}")  # noqa: T201
    for name, lines, budget in rows:
        over = f"{lines - budget:,}" if lines > budget else ""
        print(f"{name:<28}{lines:>10,}{budget:>10,}{over:>10}")  # noqa: T201


def main() -> int:
    """Prints the size of this checkout, beside that of another revision if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--against", metavar="REVISION", help="a revision to compare with")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--budget", action="store_true", help="only lines and budgets of packages")
    arguments = parser.parse_args()
    now = measure(_ROOT)
    if arguments.budget:
        _print_budget(now)
        return 0
    before = _measure_revision(arguments.against) if arguments.against else None
    if arguments.json:
        found = {"now": asdict(now)} | ({"before": asdict(before)} if before else {})
        print(json.dumps(found, indent=2))  # noqa: T201
    else:
        _print(now, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
