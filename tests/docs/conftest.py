"""The world that pages are run in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.doc_runner.run import end_interpreter, start_interpreter
from tests.doc_runner.world import World, busy_ports, new_world


@dataclass
class Stage:
    """Where pages are run."""

    world: World
    interpreter: str


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """A network of its own, and the interpreter that has the one Spark session in it."""
    with (
        new_world() as world,
        tempfile.TemporaryDirectory(prefix="ister-docs-", ignore_cleanup_errors=True) as directory,
    ):
        if not world.is_private and (busy := busy_ports()):
            pytest.skip(f"no network namespace is permitted here, and ports {busy} are in use")
        path = f"{directory}/interpreter"
        process = start_interpreter(path, world.enter)
        try:
            yield Stage(world=world, interpreter=path)
        finally:
            end_interpreter(process)
