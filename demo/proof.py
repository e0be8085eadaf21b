"""Proves that nothing was lost, duplicated or reordered, from acknowledgements and stored messages.

Knows neither brokers nor files: it takes the acknowledgements of producers, the messages that a
reader found, and those that consumers received.

    acknowledged   id ─► offset, as the broker has answered
    found          the chain: every message from offset 0 to the end, in the order it was read
    received       for each subscription, the offsets as its consumers got them
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

_SHOWN: Final = 5
_NOT_YET: Final = -1
_SOMEWHERE: Final = -2


class Acknowledged:
    """What a broker has promised for one topic, by the message's id."""

    def __init__(self, topic: str, messages: int) -> None:
        """Nothing is promised yet.

        Args:
            topic: Whose.
            messages: How many there will be, with ids from 0.
        """
        self.topic = topic
        self.offsets = array("q", [_NOT_YET]) * messages
        self.count = 0

    def add(self, number: int, offset: int | None) -> None:
        """A message was acknowledged; None if the client does not know its offset."""
        if self.offsets[number] == _NOT_YET:
            self.count += 1
        self.offsets[number] = _SOMEWHERE if offset is None else offset


@dataclass(slots=True, kw_only=True)
class ChainProof:
    """What was found in a topic, against what was acknowledged."""

    topic: str
    acknowledged: int = 0
    found: int = 0
    lost: int = 0
    """Acknowledged, and not there."""
    misplaced: int = 0
    """There, at another offset than the broker had answered."""
    doubled: int = 0
    """There more than once."""
    gaps: int = 0
    """Offsets that do not follow the one before."""
    foreign: int = 0
    """There, and never sent by the demo."""
    examples: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every promise was kept, and nothing else is there."""
        return not (self.lost or self.misplaced or self.doubled or self.gaps or self.foreign)

    def say(self) -> str:
        """What is wrong; empty if nothing is."""
        wrong = [
            f"{count:,} {name}"
            for name, count in (
                ("lost", self.lost),
                ("misplaced", self.misplaced),
                ("doubled", self.doubled),
                ("gaps", self.gaps),
                ("foreign", self.foreign),
            )
            if count
        ]
        if not wrong:
            return ""
        return f"{self.topic}: {', '.join(wrong)} ({'; '.join(self.examples)})"

    def as_json(self) -> dict[str, Any]:
        """All numbers."""
        return {
            "topic": self.topic,
            "ok": self.ok,
            "acknowledged": self.acknowledged,
            "found": self.found,
            "lost": self.lost,
            "misplaced": self.misplaced,
            "doubled": self.doubled,
            "gaps": self.gaps,
            "foreign": self.foreign,
            "examples": list(self.examples),
        }

    def note(self, example: str) -> None:
        """Keeps an example, if there are few."""
        if len(self.examples) < _SHOWN:
            self.examples.append(example)


def check_chain(
    acknowledged: Acknowledged, chain: Iterable[tuple[int, int | None]], *, start: int = 0
) -> ChainProof:
    """Compares a topic, read from its first offset to its end, with what was acknowledged.

    Args:
        acknowledged: The promises.
        chain: Offset and id of each message, as it was read; None for an id that is not the demo's.
        start: The first offset.
    """
    promised = acknowledged.offsets
    proof = ChainProof(topic=acknowledged.topic, acknowledged=acknowledged.count)
    times = bytearray(len(promised))
    expected = start
    for offset, number in chain:
        proof.found += 1
        if offset != expected:
            proof.gaps += 1
            proof.note(f"offset {offset} follows {expected - 1}")
        expected = offset + 1
        if number is None or not 0 <= number < len(promised):
            proof.foreign += 1
            proof.note(f"offset {offset} is not a message of the demo")
            continue
        if times[number]:
            proof.doubled += 1
            proof.note(f"message {number} again at offset {offset}")
        elif promised[number] >= 0 and promised[number] != offset:
            proof.misplaced += 1
            proof.note(f"message {number} was promised at {promised[number]} and is at {offset}")
        times[number] = 1
    for number, offset in enumerate(promised):
        if offset != _NOT_YET and not times[number]:
            proof.lost += 1
            proof.note(f"message {number} was acknowledged and is not there")
    return proof


class Received:
    """What one subscription got, noted while it comes."""

    def __init__(self, topic: str, subscription: str, kind: str) -> None:
        self.topic = topic
        self.subscription = subscription
        self.kind = kind
        self.by_consumer: dict[str, int] = {}
        self.unique = 0
        self.duplicates = 0
        self.disordered = 0
        self._seen = bytearray()
        self._newest: dict[str, int] = {}
        self.examples: list[str] = []

    def add(self, consumer: str, offset: int, key: str | None) -> bool:
        """A consumer got a message; True if it is the first time for the subscription.

        What comes again after a kill may be behind what came before: it is a duplicate, and no
        disorder. What comes for the first time has to come in order: of its key with `key_shared`,
        of all where one consumer gets everything, and in none with `shared`.
        """
        self.by_consumer[consumer] = self.by_consumer.get(consumer, 0) + 1
        seen = self._seen
        if offset >= len(seen):
            seen.extend(bytes(max(offset + 1, 2 * len(seen)) - len(seen)))
        if seen[offset]:
            self.duplicates += 1
            return False
        seen[offset] = 1
        self.unique += 1
        if self.kind == "shared":
            return True
        group = (key or "") if self.kind == "key_shared" else ""
        newest = self._newest.get(group, -1)
        if offset < newest:
            self.disordered += 1
            if len(self.examples) < _SHOWN:
                self.examples.append(f"offset {offset} after {newest} of {group or 'the topic'}")
        else:
            self._newest[group] = offset
        return True

    def missing(self, end: int) -> int:
        """Offsets below `end` that never came."""
        return end - self._seen.count(1, 0, min(end, len(self._seen)))

    def prove(self, end: int) -> DeliveryProof:
        """The judgement, once everything should have come."""
        return DeliveryProof(
            topic=self.topic,
            subscription=self.subscription,
            kind=self.kind,
            messages=end,
            received=self.unique + self.duplicates,
            missing=self.missing(end),
            duplicates=self.duplicates,
            disordered=self.disordered,
            by_consumer=dict(self.by_consumer),
            examples=list(self.examples),
        )


@dataclass(slots=True, kw_only=True)
class DeliveryProof:
    """What a subscription got, against what was in its topic."""

    topic: str
    subscription: str
    kind: str
    messages: int
    received: int
    missing: int
    duplicates: int
    disordered: int
    by_consumer: dict[str, int]
    examples: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether each message came at least once, and in the order that its kind promises."""
        return not (self.missing or self.disordered)

    def say(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.ok:
            return ""
        return (
            f"{self.subscription} of {self.topic}: {self.missing:,} messages never came, "
            f"{self.disordered:,} out of order ({'; '.join(self.examples)})"
        )

    def as_json(self) -> dict[str, Any]:
        """All numbers."""
        return {
            "topic": self.topic,
            "subscription": self.subscription,
            "type": self.kind,
            "ok": self.ok,
            "messages": self.messages,
            "received": self.received,
            "missing": self.missing,
            "duplicates": self.duplicates,
            "disordered": self.disordered,
            "consumers": self.by_consumer,
            "examples": self.examples,
        }
