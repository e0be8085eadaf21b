"""The ids of consumers, which stay valid after a restart; which consumers are remembered.

Danube's client subscribes once and then opens streams by the id that it got, also after an outage.
So an id is a hash of the topic, the subscription and the consumer's name, and is stored with the
subscription before it is given out: a broker knows it after a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from ister.base.limits import KIB
from ister.base.model import TopicName
from ister.base.partitions import parse_partition
from ister.errors import InvalidRequestError
from ister.subscription.store import StoredConsumer, StoredSubscription

_TOLD_SECONDS: Final = 0.05
_NAME_CHARACTERS_MAX: Final = 256
_FILTERS_MAX: Final = 64
_FILTER_CHARACTERS_MAX: Final = 256
# Consumers that a subscription remembers; beyond that the longest unseen go.
_REMEMBERED_MAX: Final = 1000
# The most bytes of their names and filters: they are one value in the metadata store.
_REMEMBERED_BYTES_MAX: Final = 256 * KIB


def consumer_id(topic: str, incarnation: str, subscription: str, name: str) -> int:
    """The id of a consumer: not 0, which Danube's clients have before they got one."""
    text = "\n".join((topic, incarnation, subscription, name))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % ((1 << 63) - 1) + 1


@dataclass(frozen=True, slots=True)
class ConsumerIdentity:
    """The consumer that an id belongs to."""

    id: int
    topic: str
    subscription: str
    name: str
    filters: tuple[str, ...] = ()


class ConsumerIds:
    """All ids that this broker has given out or found in the store."""

    def __init__(self) -> None:
        self._by_id: dict[int, ConsumerIdentity] = {}
        # Of consumers of partitions: the program that they are of, and when that has answered.
        self._programs: dict[int, tuple[str, str, str]] = {}
        self._answered_at: dict[tuple[str, str, str], float] = {}
        self._dismissals: dict[int, asyncio.Event] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, id: int) -> ConsumerIdentity | None:
        """Returns the consumer of an id; None if it is unknown."""
        return self._by_id.get(id)

    def add(self, consumer: ConsumerIdentity) -> None:
        """Adds a consumer."""
        self._by_id[consumer.id] = consumer
        partition = parse_partition(consumer.topic)
        if partition is not None:
            self._programs[consumer.id] = (partition[0], consumer.subscription, consumer.name)

    def forget(self, id: int) -> None:
        """Forgets an id."""
        self._by_id.pop(id, None)
        program = self._programs.pop(id, None)
        if program is not None:
            self._answered_at.pop(program, None)

    def record_answer(self, id: int) -> None:
        """Records that a consumer has answered."""
        program = self._programs.get(id)
        if program is not None:
            self._answered_at[program] = asyncio.get_running_loop().time()

    def last_answer_at(self, id: int) -> float:
        """Returns when the program of a consumer last answered at any partition of its topic.

        Danube's clients put the messages of all partitions into one queue.
        """
        program = self._programs.get(id)
        return float("-inf") if program is None else self._answered_at.get(program, float("-inf"))

    def dismiss(self, id: int) -> None:
        """Ends `wait_dismissed` of a consumer whose client was told to subscribe again."""
        event = self._dismissals.get(id)
        if event is not None:
            event.set()

    async def wait_dismissed(self, id: int, seconds: float) -> None:
        """Waits for `seconds` at most, or until shortly after `dismiss` is called."""
        event = self._dismissals.setdefault(id, asyncio.Event())
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
                # So that the answer reaches the client before its stream ends.
                await asyncio.sleep(_TOLD_SECONDS)
        except TimeoutError:
            pass
        finally:
            if self._dismissals.get(id) is event:
                del self._dismissals[id]

    def load(self, topic: TopicName, stored: StoredSubscription) -> None:
        """Adds the consumers that are stored with a subscription."""
        for name, known in stored.consumers.items():
            self.add(
                ConsumerIdentity(known.id, str(topic), stored.name, name, tuple(known.filters))
            )

    def forget_subscription(self, topic: str, subscription: str | None = None) -> None:
        """Forgets the consumers of a subscription, or of all of a topic's."""
        for number, one in list(self._by_id.items()):
            if one.topic == topic and subscription in (None, one.subscription):
                self.forget(number)


def check_consumer(name: str, filters: tuple[str, ...]) -> None:
    """Checks the name and the key filters of a consumer."""
    if not 0 < len(name) <= _NAME_CHARACTERS_MAX or not name.isprintable():
        raise InvalidRequestError(
            f"a consumer's name is printable and has at most {_NAME_CHARACTERS_MAX} characters"
        )
    if len(filters) > _FILTERS_MAX or any(
        not 0 < len(one) <= _FILTER_CHARACTERS_MAX for one in filters
    ):
        raise InvalidRequestError(
            f"at most {_FILTERS_MAX} key filters of at most {_FILTER_CHARACTERS_MAX} characters"
        )


def remember(
    known: Mapping[str, StoredConsumer],
    consumer: ConsumerIdentity,
    *,
    attached: Collection[int],
    now_ms: int,
) -> tuple[dict[str, StoredConsumer], list[int]]:
    """Adds a consumer to those of its subscription; those seen longest ago may have to go.

    Returns:
        The consumers by name, and the ids of those that have to go; none of them is attached.
    """
    consumers, forgotten = dict(known), list[int]()
    consumers[consumer.name] = StoredConsumer(
        id=consumer.id, filters=consumer.filters, seen_ms=now_ms
    )
    kept = {consumer.id, *attached}
    while len(consumers) > _REMEMBERED_MAX or _size(consumers) > _REMEMBERED_BYTES_MAX:
        gone = [name for name, one in consumers.items() if one.id not in kept]
        if not gone:
            break
        oldest = min(gone, key=lambda name: consumers[name].seen_ms)
        forgotten.append(consumers.pop(oldest).id)
    return consumers, forgotten


def _size(consumers: Mapping[str, StoredConsumer]) -> int:
    return sum(
        len(name.encode()) + sum(len(one.encode()) + 8 for one in known.filters) + 64
        for name, known in consumers.items()
    )
