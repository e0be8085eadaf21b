"""Danube's scenarios: each test of its suites has its place in a table, and is a test here."""

from __future__ import annotations

import re

from tests.doc_runner.pages import ROOT

# How many tests Danube 0.15 has, by suite; of files with many alike, the file and their number.
SUITES = {"danube-persistent-storage": 53, "danube-broker": 60}


def table(suite: str) -> dict[str, list[str]]:
    """The rows of a suite's table: which tests show each scenario."""
    text = (ROOT / "docs" / "TESTING.md").read_text()
    rows = text.split(f"| {suite} | shown by |\n|---|---|\n", 1)[1].split("\n\n", 1)[0]
    found: dict[str, list[str]] = {}
    for row in rows.splitlines():
        _, scenario, shown, _ = row.split("|")
        name = scenario.strip().replace("\\*", "*")
        assert name not in found, f"two rows of {name}"
        found[name] = re.findall(r"`(\w+)`", shown)
    return found


def find_tests() -> set[str]:
    files = (ROOT / "tests").rglob("test_*.py")
    return {
        name
        for path in files
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }


def test_each_scenario_of_danube_is_in_its_table():
    assert {suite: len(table(suite)) for suite in SUITES} == SUITES


def test_each_scenario_of_danube_is_a_test():
    known = find_tests()
    for suite in [*SUITES, "fault of Danube's storage"]:
        for scenario, tests in table(suite).items():
            assert tests, f"no test shows {scenario}"
            assert set(tests) <= known, f"{scenario}: {set(tests) - known}"
