"""A crash at a chosen step: the process ends there, and changes nothing after that."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from tests.support.memory_fs import SimulatedCrash
from tests.support.stores import Site

CHANGES: Final = frozenset(
    {"create", "write", "sync", "rename", "sync_directory", "put", "delete", "transact"}
    | {"open_writer", "close", "copy"}
)
"""Operations of files and stores that change something."""


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
