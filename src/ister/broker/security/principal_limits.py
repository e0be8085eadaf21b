"""Limits per principal: subscriptions, consumers, streams.

A limit keeps one principal from using up what all of them share. Anonymous callers cannot be told
apart: they count as one principal, or are not counted where a limit of the whole broker applies.

Owns: the counts of one kind of thing, and refusals beyond the limit. Does not own: who calls
(`ister.broker.security`). Used only on the broker's loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ister.base.metrics import Metrics
from ister.errors import CapacityError, IsterError


class PrincipalLimit:
    """The counts of one kind of thing, by principal."""

    def __init__(
        self,
        what: str,
        limit: int,
        metrics: Metrics,
        *,
        setting: str,
        error: type[IsterError] = CapacityError,
    ) -> None:
        """Starts with no counts.

        `what` is counted, in the plural; `setting` names the limit in the config, and `error` is
        what a refusal raises.
        """
        self._what = what
        self._limit = limit
        self._metrics = metrics
        self._setting = setting
        self._error = error
        self._counts: Counter[str] = Counter()

    def of(self, principal: str) -> int:
        """How many a principal has."""
        return self._counts[principal]

    def check(self, principal: str) -> None:
        """Refuses a principal that is at the limit; "" is never refused.

        Raises:
            IsterError: The principal is at the limit; the error is of the class `error`.
        """
        if principal and self._counts[principal] >= self._limit:
            self._metrics.count("broker.principal_limit_refusals_total")
            raise self._error(
                f"{principal} already has {self._counts[principal]} {self._what}",
                hint=f"{self._setting} is {self._limit}",
            )

    def add(self, principal: str) -> None:
        """Counts one more, regardless of the limit: it exists already."""
        if principal:
            self._counts[principal] += 1

    def remove(self, principal: str) -> None:
        """Counts one less."""
        if principal:
            self._counts[principal] -= 1
            if not self._counts[principal]:
                del self._counts[principal]

    @contextmanager
    def taken(self, principal: str) -> Iterator[None]:
        """Counts one more for the time of the block."""
        self.check(principal)
        self.add(principal)
        try:
            yield
        finally:
            self.remove(principal)
