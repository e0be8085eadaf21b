"""Bugs that are planted, and where the search for a world that catches one begins.

`known_seeds.json` has, for each bug, a seed that caught it. `make test` begins there, and goes on
from there if the worlds have changed so that this seed does not catch it any more; `make nightly`
begins at 0. Run `python -m tests.sim.known_seeds OUTPUT` to take the seeds from the output of

    ISTER_NIGHTLY=1 pytest -s tests/sim -k "catch or caught"
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from tests.sim.world import find_break
from tests.support.scale import IS_NIGHTLY

Plant = Callable[[pytest.MonkeyPatch], None]
_FILE = Path(__file__).with_suffix(".json")


def plants_of(module: str, *, but: Collection[Plant] = ()) -> list[Plant]:
    """The bugs that a module has: its functions that take a `patch`, in their order."""
    return [
        found
        for found in vars(sys.modules[module]).values()
        if inspect.isfunction(found)
        and found.__module__ == module
        and [*inspect.signature(found).parameters] == ["patch"]
        and found not in but
    ]


def catch(
    world: str, plant: Plant, patch: pytest.MonkeyPatch, run: Callable[[int], object], count: int
) -> None:
    """Plants a bug, and fails if none of so many worlds catches it."""
    plant(patch)
    seed = find_break(seeds_for(world, plant.__name__, count), run)
    # As `main` reads it.
    print(f"{world}: {plant.__name__}: caught by seed {seed}")
    assert seed is not None, f"{plant.__name__} was not caught in {count} worlds"


def seeds_for(world: str, bug: str, count: int) -> range:
    """The seeds to try, in this order."""
    first = 0 if IS_NIGHTLY else json.loads(_FILE.read_text()).get(f"{world}: {bug}", 0)
    return range(first, first + count)


def main() -> None:
    """Writes the seeds that are worth it: those that are found at once need none."""
    found = re.findall(
        r"^\.?(\w+: \w+): caught by seed (\d+)$", Path(sys.argv[1]).read_text(), re.M
    )
    seeds = {name: int(seed) for name, seed in found if int(seed) > 2}
    _FILE.write_text(json.dumps(seeds, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
