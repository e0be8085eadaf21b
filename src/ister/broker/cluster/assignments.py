"""The broker that should have each topic, as decided by the leader or an operator.

    <root>/cluster/assignments/<ns>/<topic>   {"node": …, "reason": …, "at": seconds}
    <root>/cluster/unassigned/<ns>/<topic>    a topic that waits for the leader; under the lease of
                                              the broker that was asked for it

Owns: these keys. Does not own: who writes them (`leader`), who follows them
(`ister.broker.topics.assignee`).

A crash leaves assignments, which the next leader replaces where their broker is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from ister.base.structs import known
from ister.metadata.base import (
    Absent,
    Compare,
    Delete,
    Lease,
    MetadataStore,
    Operation,
    Put,
    RevisionIs,
)

# A compare and two operations for each topic; etcd takes 128 of each.
_TOPICS_PER_TRANSACTION: Final = 40


NEW: Final = "new"
"""The reason for the first broker of a topic."""
OWNER_DOWN: Final = "its broker is down"
"""The reason for a stand-in: the broker whose disk has the topic's newest messages is down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A topic's broker, and why."""

    node: str
    reason: str
    at: int
    """Seconds since the Unix epoch."""

    @property
    def is_stand_in(self) -> bool:
        """Whether the broker stands in for another one, which may come back and keep the topic."""
        return self.reason == OWNER_DOWN


class Assignments:
    """The assignments of all topics. Thread-safe; its calls block."""

    def __init__(self, store: MetadataStore, *, root_prefix: str) -> None:
        self._store = store
        self._assigned = f"{root_prefix}/cluster/assignments"
        self._wanted = f"{root_prefix}/cluster/unassigned"

    def get(self, topic: str) -> tuple[Assignment, int] | None:
        """The assignment of a topic and its revision; None if it has none."""
        found = self._store.get(f"{self._assigned}{topic}")
        return None if found is None else (_decode(found.value), found.revision)

    def all(self) -> dict[str, tuple[Assignment, int]]:
        """The assignments of all topics, each with its revision."""
        return {
            item.key.removeprefix(self._assigned): (_decode(item.value), item.revision)
            for item in self._store.range(f"{self._assigned}/")
        }

    def assign(self, topic: str, assignment: Assignment) -> None:
        """Assigns a topic, whatever its assignment was."""
        self._store.transact(
            [],
            [
                Put(f"{self._assigned}{topic}", msgspec.json.encode(assignment)),
                Delete(f"{self._wanted}{topic}"),
            ],
        )

    def assign_all(
        self,
        assignments: Mapping[str, Assignment],
        *,
        known: Mapping[str, int],
        condition: Compare,
    ) -> list[str]:
        """Assigns topics whose assignments are as known; returns those that were.

        Args:
            assignments: By topic.
            known: The revisions of the assignments that were read; others had none.
            condition: What has to hold besides: that the caller leads.
        """

        def assign(some: Sequence[str]) -> bool:
            compares: list[Compare] = [condition]
            operations: list[Operation] = []
            for topic in some:
                key = f"{self._assigned}{topic}"
                compares.append(RevisionIs(key, known[topic]) if topic in known else Absent(key))
                operations.append(Put(key, msgspec.json.encode(assignments[topic])))
                operations.append(Delete(f"{self._wanted}{topic}"))
            return self._store.transact(compares, operations) is not None

        return _in_batches(list(assignments), assign)

    def remove(self, known: Mapping[str, int], *, condition: Compare) -> list[str]:
        """Removes assignments that are as known; returns those that were.

        Args:
            known: The revisions of the assignments that were read, by topic.
            condition: As for `assign_all`.
        """

        def remove(some: Sequence[str]) -> bool:
            keys = {topic: f"{self._assigned}{topic}" for topic in some}
            compares = [RevisionIs(key, known[topic]) for topic, key in keys.items()]
            deletes = [Delete(key) for key in keys.values()]
            return self._store.transact([condition, *compares], deletes) is not None

        return _in_batches(list(known), remove)

    def delete(self, topic: str) -> None:
        """Removes the assignment of a topic."""
        self._store.delete(f"{self._assigned}{topic}")

    def request(self, topic: str, *, node: str, lease: Lease) -> None:
        """Asks the leader to assign a topic; returns at once."""
        self._store.put(f"{self._wanted}{topic}", node.encode(), lease)

    def requests(self) -> list[str]:
        """The topics that wait for the leader."""
        return [
            item.key.removeprefix(self._wanted) for item in self._store.range(f"{self._wanted}/")
        ]

    def withdraw(self, topic: str) -> None:
        """Removes a request: the topic has a broker."""
        self._store.delete(f"{self._wanted}{topic}")


def _in_batches(topics: Sequence[str], change: Callable[[Sequence[str]], bool]) -> list[str]:
    """Changes several topics at a time; returns those that were changed.

    A topic that has changed meanwhile must not hold up the others: they are tried one by one. If
    none of them can be changed, the caller's condition does not hold, and the rest is not tried.
    """
    done: list[str] = []
    for at in range(0, len(topics), _TOPICS_PER_TRANSACTION):
        some = topics[at : at + _TOPICS_PER_TRANSACTION]
        if change(some):
            done += some
        elif len(some) > 1:
            changed = [topic for topic in some if change([topic])]
            if not changed:
                break
            done += changed
    return done


def _decode(value: bytes) -> Assignment:
    try:
        return msgspec.json.decode(value, type=known(Assignment))
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Replaced like one whose broker is gone.
        return Assignment(node="", reason="unreadable", at=0)
