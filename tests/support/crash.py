"""A crash at a chosen step: the process ends there, and changes nothing after that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from ister.base import failpoints
from tests.support.memory_fs import SimulatedCrash
from tests.support.stores import Site

CHANGES: Final = frozenset(
    {"create", "write", "sync", "rename", "sync_directory", "put", "delete", "transact"}
    | {"open_writer", "close", "copy"}
)
"""Operations of files and stores that change something."""


@contextmanager
def crashing(point: str, *, visit: int = 1) -> Iterator[None]:
    """What runs within crashes where it comes to a failpoint for the n-th time."""
    left = visit

    def crash() -> None:
        nonlocal left
        left -= 1
        if not left:
            raise SimulatedCrash

    failpoints.arm(point, crash)
    try:
        with pytest.raises(SimulatedCrash):
            yield
    finally:
        failpoints.disarm()


def crash_on(*kinds: str) -> Callable[[str, str], None]:
    """A hook that crashes before an operation of these kinds."""

    def crash(kind: str, path: str) -> None:
        if kind in kinds:
            raise SimulatedCrash

    return crash


class Crash:
    """Called before each operation; crashes at the one numbered `at`, from 1 on, and at all later.

    With `at=0` it only counts.
    """

    def __init__(self, at: int, kinds: Collection[str] = CHANGES) -> None:
        self.at, self.seen, self.step = at, 0, ""
        self._kinds = kinds

    def __call__(self, kind: str, path: str) -> None:
        if kind in self._kinds:
            self.seen += 1
            if self.step or self.seen == self.at:
                self.step = self.step or f"{kind} {path}"
                raise SimulatedCrash

    def arm(self, site: Site) -> None:
        """Is asked by the disk and both stores of a site."""
        site.disk().before = site.objects.before = site.metadata.before = self

    @staticmethod
    def disarm(site: Site) -> None:
        """Lets everything of a site succeed again."""
        site.disk().before = site.objects.before = site.metadata.before = lambda kind, key: None
