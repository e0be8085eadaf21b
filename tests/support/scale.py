"""How much a random test does: a little in `make test`, much more in `make nightly`.

A test that is too slow for everybody is marked `nightly`; one that only repeats itself takes its
count from here.
"""

import os
from typing import Any, TypeVar

import pytest

IS_NIGHTLY = os.environ.get("ISTER_NIGHTLY") == "1"
T = TypeVar("T")


def scaled(everybody: T, nightly: T) -> T:
    """The first count in `make test`, the second in `make nightly`."""
    return nightly if IS_NIGHTLY else everybody


def nightly(*values: Any, id: str | None = None) -> Any:
    """A parameter of a test that only `make nightly` runs."""
    return pytest.param(*values, marks=pytest.mark.nightly, id=id)
