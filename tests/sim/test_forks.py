"""Forks: a child that goes on with its parent's log is refused, and changes nothing."""

import os
import subprocess
import sys

import pytest

from tests.sim.fork_world import MODES, PLANTED
from tests.support.scale import scaled

SEED = int(os.environ.get("ISTER_SIM_SEED", "1"))
COUNT = scaled(1, 100)


def run_world(*arguments):
    """In a process of its own: pytest's has threads, which Python warns about at a fork."""
    return subprocess.run(
        [sys.executable, "-m", "tests.sim.fork_world", str(SEED), *arguments],
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )


@pytest.mark.parametrize("mode", MODES)
def test_no_child_uses_or_changes_resources_of_its_parent(mode):
    ended = run_world("--count", str(COUNT), "--mode", mode)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert int(ended.stdout.split()[0]) >= 10 * COUNT


@pytest.mark.parametrize("plant", sorted(PLANTED))
def test_planted_bugs_are_found(plant):
    ended = run_world("--count", "20", "--plant", plant, "--hang-seconds", "5")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "broken: a child" in ended.stdout
