"""The producers of a topic that are registered with this broker.

Danube's client numbers a producer's messages by an id that the broker gave out. Here the id follows
from the topic and the producer's name, so a broker that was started again knows it at once: a
message says both, and a producer that is not registered is registered by its next message.

A producer that was inactive for a while does not count towards a limit: clients do not unregister.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from ister.broker.policies import Policies
from ister.errors import CapacityError, PermissionDeniedError

# Danube's clients ask for their producer's health every five seconds.
_SILENT_SECONDS: Final = 60.0
_PRODUCERS_MAX: Final = 100_000
# The upper bits are for producers whose messages are numbered: see `ister.topic.dedup`.
_ID_BITS: Final = 61


def producer_id(topic: str, name: str) -> int:
    """The id of a producer: not 0, which Danube's clients have before they got one."""
    digest = hashlib.blake2b(f"{topic}\n{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % ((1 << _ID_BITS) - 1) + 1


@dataclass(slots=True)
class RegisteredProducer:
    """A registered producer."""

    id: int
    name: str
    is_exclusive: bool
    seen_at: float


class Producers:
    """The producers of one topic. Used on the broker's loop alone, except `has`."""

    def __init__(self, topic: str, index: dict[int, str] | None = None) -> None:
        """Begins without any.

        `index` has the topic of each producer id, is shared by all topics, and updated here.
        """
        self._topic = topic
        self._index = {} if index is None else index
        self._by_id: dict[int, RegisteredProducer] = {}
        self._exclusive: set[int] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    def live(self, now: float) -> list[RegisteredProducer]:
        """The producers that were active lately."""
        return [p for p in self._by_id.values() if now - p.seen_at < _SILENT_SECONDS]

    def find(self, id: int, now: float) -> RegisteredProducer | None:
        """Returns a registered producer, and records that it is active."""
        producer = self._by_id.get(id)
        if producer is not None:
            producer.seen_at = now
        return producer

    def has(self, id: int, name: str, now: float) -> bool:
        """Whether a producer of that id and name is registered; if so, notes that it is active.

        Thread-safe; may miss a producer that is registered or removed at the same time.
        """
        producer = self._by_id.get(id)
        if producer is None or producer.name != name:
            return False
        producer.seen_at = now
        return True

    def register(
        self, name: str, *, is_exclusive: bool, policies: Policies, now: float
    ) -> RegisteredProducer:
        """Registers a producer; one of the same name is the same one.

        Raises:
            CapacityError: There are as many as the topic's policy allows.
            PermissionDeniedError: Another producer has exclusive access.
        """
        number = producer_id(self._topic, name)
        limit = policies.max_producers_per_topic or _PRODUCERS_MAX
        is_shared = not is_exclusive and not self._exclusive
        # Counted only where it matters: a topic may have very many.
        if not is_shared or len(self._by_id) >= limit:
            self._check(number, now, limit, is_exclusive=is_exclusive)
        producer = self._by_id[number] = RegisteredProducer(number, name, is_exclusive, now)
        (self._exclusive.add if is_exclusive else self._exclusive.discard)(number)
        self._index[number] = self._topic
        return producer

    def _check(self, number: int, now: float, limit: int, *, is_exclusive: bool) -> None:
        """Refuses a producer beyond the limits; forgets inactive ones."""
        live = self.live(now)
        self.clear()
        self._by_id = {p.id: p for p in live}
        self._exclusive = {p.id for p in live if p.is_exclusive}
        self._index.update(dict.fromkeys(self._by_id, self._topic))
        others = self._by_id.keys() - {number}
        if len(others) >= limit:
            raise CapacityError(
                f"the topic has {len(others)} producers",
                topic=self._topic,
                hint="max_producers_per_topic is the limit",
            )
        if others and (is_exclusive or self._exclusive - {number}):
            raise PermissionDeniedError(
                "a producer has exclusive access to the topic, or asks for it while others publish",
                topic=self._topic,
            )

    def clear(self) -> None:
        """Forgets all of them."""
        for number in self._by_id:
            self._index.pop(number, None)
        self._by_id.clear()
        self._exclusive.clear()
