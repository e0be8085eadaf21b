"""The world that pages are run in, and a summary of what was run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

# `tools` is a package of the project, not of the tests.
_ROOT = str(Path(__file__).resolve().parents[2])
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

from doc_runner.run import Outcome, end_interpreter, start_interpreter  # noqa: E402
from doc_runner.world import World, busy_ports, new_world  # noqa: E402


@dataclass
class Stage:
    """Where pages are run, and what became of those that were."""

    world: World
    interpreter: str
    outcomes: list[Outcome] = field(default_factory=list)


_stage = pytest.StashKey[Stage]()


@pytest.fixture(scope="session")
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A network of its own, and the interpreter that has the one Spark session in it."""
    with (
        new_world() as world,
        tempfile.TemporaryDirectory(prefix="ister-docs-", ignore_cleanup_errors=True) as directory,
    ):
        if not world.is_private and (busy := busy_ports()):
            pytest.skip(f"no network namespace is permitted here, and ports {busy} are in use")
        path = f"{directory}/interpreter"
        process = start_interpreter(path, world.enter)
        stage = Stage(world=world, interpreter=path)
        request.config.stash[_stage] = stage
        try:
            yield stage
        finally:
            end_interpreter(process)


def pytest_terminal_summary(terminalreporter, config) -> None:
    """What was run, and what was only checked, for those who wonder."""
    stage = config.stash.get(_stage, None)
    if stage is None:
        return
    outcomes = stage.outcomes
    checked = [command for outcome in outcomes for command in outcome.checked]
    terminalreporter.section("documents")
    terminalreporter.write_line(
        f"{sum(one.ran for one in outcomes)} blocks of {len(outcomes)} pages were run, with "
        f"{sum(one.commands for one in outcomes)} lines of commands"
    )
    names = sorted({command[0] for command in checked})
    terminalreporter.write_line(
        f"{len(checked)} commands were only checked, not run: {', '.join(names) or 'none'}"
    )
    for outcome in outcomes:
        for note in (*outcome.skipped, *(f"{one} (run there)" for one in outcome.elsewhere)):
            terminalreporter.write_line(f"not run here: {note}")
