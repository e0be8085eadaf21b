"""A subscription of a topic without a log: messages are pushed at publish, or dropped.

Owns: which consumer gets a message, and dropping. Does not own: streams, consumers' ids.

Nothing is kept, so nothing is redelivered: acknowledgements have no effect. A consumer that does
not read misses messages; the others do not wait for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from ister.base.limits import MIB
from ister.base.metrics import Metrics
from ister.base.model import StreamMessage
from ister.broker.counters import SubscriptionCounters, TopicCounters
from ister.broker.dispatch.encoder import key_of_record
from ister.broker.dispatch.memory_budget import Budget
from ister.broker.dispatch.outbox import TAKEN_OVER_SECONDS, Outbox
from ister.errors import ClosedError, ConflictError, IsterError
from ister.subscription.keys import HashRing, KeyFilter
from ister.subscription.policy import SubscriptionKind
from ister.subscription.store import StoredSubscription

# Bytes that wait for one consumer; the message that goes beyond is the last.
_WAITING_BYTES_MAX: Final = 8 * MIB


class _Pushed(Outbox[StreamMessage]):
    """An outbox of whole messages, whose bytes are bounded as well."""

    def __init__(self, consumer: int, budget: Budget, on_dropped: Callable[[int], None]) -> None:
        super().__init__(consumer, budget.writes)
        self._sizes: deque[int] = deque()
        self._bytes = 0
        self._share = budget.share(self._shed)
        self._on_dropped = on_dropped

    @property
    def room(self) -> int:
        # One message always has a place.
        bytes_max = min(_WAITING_BYTES_MAX, self._share.allowance)
        return super().room if self._bytes < max(1, bytes_max) else 0

    def push(self, item: StreamMessage) -> None:
        size = _size_of(item)
        self._sizes.append(size)
        self._bytes += size
        super().push(item)
        self._count()

    def written(self, count: int) -> None:
        super().written(count)
        self._bytes -= sum(self._sizes.popleft() for _ in range(count))
        self._count()

    def _count(self) -> None:
        # What the stream has taken cannot be dropped.
        self._share.set(self._bytes, fixed=sum(islice(self._sizes, self._taken)))

    def end(self, reason: IsterError | None = None, *, after_seconds: float = 0.0) -> None:
        super().end(reason, after_seconds=after_seconds)
        self._share.close()

    def _shed(self) -> None:
        """Drops what the stream has not taken yet."""
        dropped = len(self._items)
        self._items.clear()
        self._bytes -= sum(self._sizes.pop() for _ in range(dropped))
        self._count()
        self._on_dropped(dropped)


class Fanout:
    """One subscription of one non-reliable topic. Used on the broker's loop alone."""

    def __init__(
        self,
        topic: str,
        stored: StoredSubscription,
        *,
        budget: Budget,
        metrics: Metrics,
        counters: SubscriptionCounters | None = None,
    ) -> None:
        self.topic_name = topic
        self.counters = counters or SubscriptionCounters(TopicCounters())
        self.stored = stored
        self._budget = budget
        self._metrics = metrics
        self._outboxes: dict[int, Outbox[StreamMessage]] = {}
        self._filters: dict[int, KeyFilter] = {}
        self._ring = HashRing()
        self._expected: dict[int, asyncio.TimerHandle] = {}
        self._turn = 0
        self._is_closed = False

    @property
    def name(self) -> str:
        """The name of the subscription."""
        return self.stored.name

    @property
    def principals(self) -> tuple[str, ...] | None:
        """The principals that may use it; None for all that may consume the topic."""
        return self.stored.principals

    @property
    def kind(self) -> SubscriptionKind:
        """The kind of the subscription."""
        return self.stored.kind

    @property
    def attached(self) -> list[int]:
        """The consumers with a stream."""
        # Of a copy: metrics look from another thread.
        return [one for one in list(self._outboxes) if one not in self._expected]

    @property
    def active(self) -> int | None:
        """The consumer that gets everything, of an exclusive or failover subscription."""
        return next(iter(self._outboxes), None)

    def expect(self, consumer: int, filters: Sequence[str], seconds: float) -> None:
        """Keeps messages for a consumer that has subscribed, until its stream is open.

        Clients publish as soon as they have subscribed, and open the stream later.
        """
        if consumer not in self._outboxes and not self._is_closed:
            outbox = self._add(consumer, filters)
            loop = asyncio.get_running_loop()
            self._expected[consumer] = loop.call_later(seconds, self.detach, outbox)

    def attach(self, consumer: int, filters: Sequence[str]) -> Outbox[StreamMessage]:
        """Attaches a consumer; a stream that it had before ends.

        Raises:
            ConflictError: The subscription is exclusive, and has another consumer.
        """
        if self._is_closed:
            raise ClosedError("the topic is being closed", topic=self.topic_name)
        if self.kind is SubscriptionKind.EXCLUSIVE and {*self.attached} - {consumer}:
            raise ConflictError(
                f"subscription {self.name!r} is exclusive, and has a consumer",
                topic=self.topic_name,
            )
        timer = self._expected.pop(consumer, None)
        if timer is not None:
            timer.cancel()
            return self._outboxes[consumer]
        before = self._outboxes.get(consumer)
        if before is not None:
            before.end(after_seconds=TAKEN_OVER_SECONDS)
            self.detach(before)
        return self._add(consumer, filters)

    def _add(self, consumer: int, filters: Sequence[str]) -> Outbox[StreamMessage]:
        outbox = _Pushed(consumer, self._budget, self._count_dropped)
        self._filters[consumer] = KeyFilter(filters)
        self._outboxes[consumer] = outbox
        self._ring.add(consumer)
        return outbox

    def detach(self, outbox: Outbox[StreamMessage]) -> None:
        """Ends delivery to a consumer."""
        if self._outboxes.get(outbox.consumer) is outbox:
            del self._outboxes[outbox.consumer]
            del self._filters[outbox.consumer]
            self._ring.remove(outbox.consumer)
            self._expected.pop(outbox.consumer, None)
            outbox.end()
        outbox.memory.set(0)

    def publish(self, message: StreamMessage) -> bool:
        """Hands a message to the consumer that it is for; returns whether that has room."""
        outbox = self._choose(message)
        if outbox is not None:
            outbox.push(message)
            return True
        if self._outboxes:
            self._count_dropped(1)
        return False

    def _count_dropped(self, count: int) -> None:
        self.counters.dropped += count
        self._metrics.count("subscription.non_reliable_dropped_total", count)

    def _choose(self, message: StreamMessage) -> Outbox[StreamMessage] | None:
        outboxes = self._outboxes
        if self.kind is SubscriptionKind.SHARED:
            candidates = list(outboxes.values())
            for step in range(len(candidates)):
                candidate = candidates[(self._turn + step) % len(candidates)]
                if candidate.room > 0:
                    self._turn += step + 1
                    return candidate
            return None
        if self.kind is SubscriptionKind.KEY_SHARED:
            key = key_of_record(message)
            consumer = self._ring.find(key, lambda one: self._filters[one].matches(key))
        else:
            consumer = self.active
        outbox = outboxes.get(consumer) if consumer is not None else None
        return outbox if outbox is not None and outbox.room > 0 else None

    def end_streams(self, reason: IsterError | None) -> None:
        """Ends the streams of all consumers."""
        for outbox in list(self._outboxes.values()):
            outbox.end(reason)

    async def close(self, reason: IsterError | None, *, flush: bool = True) -> None:
        """Ends all streams."""
        self._is_closed = True
        for timer in self._expected.values():
            timer.cancel()
        self.end_streams(reason)


def _size_of(message: StreamMessage) -> int:
    named = sum(len(name) + len(value) for name, value in message.attributes.items())
    return len(message.payload) + named
