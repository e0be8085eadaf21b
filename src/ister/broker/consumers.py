"""Consumers' ids: given out once, and known again after a restart.

Danube's client subscribes once and then opens streams by the id that it was given, on and on, also
after an outage. So an id follows from the topic, the subscription and the consumer's name, and is
written down with the subscription before it is given out: a broker that was started again knows
whose it is.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

from ister.model import TopicName
from ister.partitions import parse_partition
from ister.subscription.store import StoredSubscription

__all__ = ["Consumer", "Consumers", "consumer_id"]


def consumer_id(topic: str, incarnation: str, subscription: str, name: str) -> int:
    """The id of a consumer: not 0, which Danube's clients have before they got one."""
    text = "\n".join((topic, incarnation, subscription, name))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % ((1 << 63) - 1) + 1


@dataclass(frozen=True, slots=True)
class Consumer:
    """Who an id belongs to."""

    id: int
    topic: str
    subscription: str
    name: str
    filters: tuple[str, ...] = ()


class Consumers:
    """All ids that this broker has given out, or finds written down."""

    def __init__(self) -> None:
        self._by_id: dict[int, Consumer] = {}
        # Of consumers of partitions: the program that they are of, and when that has answered.
        self._programs: dict[int, tuple[str, str, str]] = {}
        self._heard: dict[tuple[str, str, str], float] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, id: int) -> Consumer | None:
        """Whose id it is."""
        return self._by_id.get(id)

    def add(self, consumer: Consumer) -> None:
        """Takes note of an id."""
        self._by_id[consumer.id] = consumer
        partition = parse_partition(consumer.topic)
        if partition is not None:
            self._programs[consumer.id] = (partition[0], consumer.subscription, consumer.name)

    def forget(self, id: int) -> None:
        """Forgets an id."""
        self._by_id.pop(id, None)
        program = self._programs.pop(id, None)
        if program is not None:
            self._heard.pop(program, None)

    def hear(self, id: int) -> None:
        """Notes that a consumer has answered."""
        program = self._programs.get(id)
        if program is not None:
            self._heard[program] = asyncio.get_running_loop().time()

    def heard_at(self, id: int) -> float:
        """When the program of a consumer has last answered at any partition of its topic.

        Danube's clients put the messages of all partitions into one queue.
        """
        program = self._programs.get(id)
        return float("-inf") if program is None else self._heard.get(program, float("-inf"))

    def load(self, topic: TopicName, stored: StoredSubscription) -> None:
        """Takes note of the ids that are written down with a subscription."""
        for name, known in stored.consumers.items():
            self.add(Consumer(known.id, str(topic), stored.name, name, tuple(known.filters)))

    def forget_subscription(self, topic: str, subscription: str | None = None) -> None:
        """Forgets the consumers of a subscription, or of all of a topic's."""
        for number, one in list(self._by_id.items()):
            if one.topic == topic and subscription in (None, one.subscription):
                self.forget(number)
