"""How a broker is chosen for a topic, and which topics should move: pure functions.

`fair` counts topics; `balanced` compares loads. Rendezvous hashing breaks ties, so that every
broker chooses the same one for a name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

from ister.base.limits import MIB
from ister.bucket.members import Load, Member
from ister.config import Strategy

_RELIEF: Final = 0.8
"""A rebalance stops when the variation is below this share of the threshold (hysteresis), so that
the next one does not start at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How evenly the load is spread over the active brokers."""

    loads: Mapping[str, float]
    """By node."""
    mean: float
    deviation: float
    """The standard deviation."""

    @property
    def variation(self) -> float:
        """The coefficient of variation: 0 if all brokers have the same load."""
        return self.deviation / self.mean if self.mean > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A topic that should be at another broker."""

    topic: str
    source: str
    target: str
    load: float
    """The load that moves with it, estimated."""


def rendezvous(topic: str, nodes: Collection[str]) -> str:
    """The node that every broker picks for a topic from the same nodes, without talking to others.

    If a node is added or removed, only its own topics are picked for another one.
    """
    return max(nodes, key=lambda node: _rank(topic, node))


def score(load: Load) -> float:
    """A broker's load as one number.

    A busy core, 10 MiB/s, 10,000 messages/s, 640 MiB that wait for their upload, and 100 topics
    weigh 10 each.
    """
    return (
        load.cpu * 10
        + (load.bytes_in + load.bytes_out) / MIB
        + (load.messages_in + load.messages_out) / 1000
        + load.upload_lag_bytes / (64 * MIB)
        + load.topics / 10
    )


def measure(members: Sequence[Member], counts: Mapping[str, int], strategy: Strategy) -> Balance:
    """The balance of the active brokers; `counts` are their numbers of topics by node."""
    loads = {
        one.node: float(counts.get(one.node, 0)) if strategy is Strategy.FAIR else score(one.load)
        for one in members
        if one.takes_topics
    }
    count = max(1, len(loads))
    mean = sum(loads.values()) / count
    deviation = sqrt(sum((load - mean) ** 2 for load in loads.values()) / count)
    return Balance(loads=loads, mean=mean, deviation=deviation)


class Placement:
    """Chooses brokers for several topics, each choice counting for the next."""

    def __init__(
        self, members: Sequence[Member], counts: Mapping[str, int], strategy: Strategy
    ) -> None:
        """Places topics on the active `members`; `counts` are their topics by node."""
        balance = measure(members, counts, strategy)
        self._loads = dict(balance.loads)
        self._counts = {node: counts.get(node, 0) for node in self._loads}
        topics = sum(self._counts.values())
        # The load of a new topic is not known: assume the average of the others.
        weight = sum(self._loads.values()) / topics if topics else 0.0
        self._weight = weight or 1.0

    def choose(self, topic: str, *, exclude: Collection[str] = ()) -> str | None:
        """The node for a topic; None if no broker takes topics."""
        nodes = [node for node in self._loads if node not in exclude]
        if not nodes:
            return None
        least = min((self._loads[node], self._counts[node]) for node in nodes)
        equals = [node for node in nodes if (self._loads[node], self._counts[node]) == least]
        chosen = rendezvous(topic, equals)
        self._loads[chosen] += self._weight
        self._counts[chosen] += 1
        return chosen


def plan_moves(
    members: Sequence[Member],
    owned: Mapping[str, Sequence[str]],
    strategy: Strategy,
    *,
    threshold: float,
    moves_max: int,
    keep: Collection[str] = (),
) -> list[Move]:
    """The moves that even out the load; none if the variation is at most the threshold.

    Args:
        members: All brokers.
        owned: The topics of each node.
        strategy: How load is measured.
        threshold: The coefficient of variation above which topics move.
        moves_max: The most moves.
        keep: Topics that stay, because they moved lately.
    """
    counts = {node: len(topics) for node, topics in owned.items()}
    balance = measure(members, counts, strategy)
    if len(balance.loads) < 2 or balance.variation <= threshold:
        return []
    loads = dict(balance.loads)
    left = {node: [t for t in owned.get(node, ()) if t not in keep] for node in loads}
    weights = {node: loads[node] / max(1, counts.get(node, 0)) for node in loads}
    moves: list[Move] = []
    while len(moves) < moves_max:
        now = _variation(loads)
        source = max(loads, key=lambda node: (loads[node], node))
        target = min(loads, key=lambda node: (loads[node], node))
        weight = weights[source]
        # A move that only swaps the two, or makes it worse, would be undone by the next round.
        if (
            now <= threshold * _RELIEF
            or not left[source]
            or loads[source] - loads[target] <= weight
        ):
            break
        topic = left[source].pop()
        moves.append(Move(topic=topic, source=source, target=target, load=weight))
        loads[source] -= weight
        loads[target] += weight
    return moves


def _variation(loads: Mapping[str, float]) -> float:
    mean = sum(loads.values()) / len(loads)
    deviation = sqrt(sum((load - mean) ** 2 for load in loads.values()) / len(loads))
    return deviation / mean if mean > 0 else 0.0


def _rank(topic: str, node: str) -> bytes:
    return hashlib.blake2b(f"{node}\0{topic}".encode(), digest_size=8).digest()
