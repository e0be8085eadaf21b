"""Where the search for a world that catches a planted bug begins.

`known_seeds.json` has, for each bug, a seed that caught it. `make test` begins there, and goes on
from there if the worlds have changed so that this seed does not catch it any more; `make nightly`
begins at 0. Run `python -m tests.sim.known_seeds OUTPUT` to take the seeds from the output of

    ISTER_NIGHTLY=1 pytest -s tests/sim -k "catch or caught"
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tests.support.scale import IS_NIGHTLY

_FILE = Path(__file__).with_suffix(".json")


def seeds_for(world: str, bug: str, count: int) -> range:
    """The seeds to try, in this order."""
    first = 0 if IS_NIGHTLY else json.loads(_FILE.read_text()).get(f"{world}: {bug}", 0)
    return range(first, first + count)


def say_caught(world: str, bug: str, seed: int | None) -> None:
    """Prints which seed it was, as `main` reads it."""
    print(f"{world}: {bug}: caught by seed {seed}")


def main() -> None:
    """Writes the seeds that are worth it: those that are found at once need none."""
    found = re.findall(
        r"^\.?(\w+: \w+): caught by seed (\d+)$", Path(sys.argv[1]).read_text(), re.M
    )
    seeds = {name: int(seed) for name, seed in found if int(seed) > 2}
    _FILE.write_text(json.dumps(seeds, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
