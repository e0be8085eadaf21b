"""How much a random test does: a little in `make test`, much more in `make nightly`.

A test that is too slow for everybody is marked `nightly`; one that only repeats itself takes its
count from here. Simulated worlds begin at a seed that is fixed by day, so that a run fails by what
was changed, and random by night, where new seeds look for what nobody has seen.
"""

import os
import random
from typing import Any, TypeVar

import pytest

IS_NIGHTLY = os.environ.get("ISTER_NIGHTLY") == "1"
T = TypeVar("T")


def scaled(everybody: T, nightly: T) -> T:
    """The first count in `make test`, the second in `make nightly`."""
    return nightly if IS_NIGHTLY else everybody


def first_seed() -> int:
    """ISTER_SIM_SEED; else 1 in `make test`, and a random seed in `make nightly`."""
    given = os.environ.get("ISTER_SIM_SEED")
    return int(given) if given else scaled(1, random.randrange(1 << 32))


def nightly(*values: Any, id: str | None = None) -> Any:
    """A parameter of a test that only `make nightly` runs."""
    return pytest.param(*values, marks=pytest.mark.nightly, id=id)
