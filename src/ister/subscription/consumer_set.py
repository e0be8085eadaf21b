"""The consumers of one subscription: known, attached, silent, stalled.

Owns: which consumers are known and attached, and their windows. Does not own: which message a
consumer gets (the queues), times (`timers`). Does no I/O.

Invariants: what is in flight is in the window of exactly one attached consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ister.errors import ConflictError, check
from ister.subscription.entries import ConsumerState, Entry, State
from ister.subscription.key_queues import KeyQueues
from ister.subscription.keys import KeyFilter
from ister.subscription.offset_queue import OffsetQueue
from ister.subscription.policy import SubscriptionKind
from ister.subscription.redelivery import Redelivery
from ister.subscription.timers import Timers, is_unreceived

SILENCE_EXTENSIONS_MAX: Final = 10
"""Ack timeouts for which a consumer is not silent because its program answers elsewhere."""


class ConsumerSet:
    """The consumers of one subscription."""

    def __init__(
        self,
        kind: SubscriptionKind,
        queue: OffsetQueue | KeyQueues,
        timers: Timers,
        redelivery: Redelivery,
    ) -> None:
        self._kind = kind
        self._queue = queue
        self._timers = timers
        self._redelivery = redelivery
        self.has_one_active = kind in (SubscriptionKind.EXCLUSIVE, SubscriptionKind.FAILOVER)
        self.known: dict[int, ConsumerState] = {}
        self.attached: dict[int, ConsumerState] = {}

    def active(self) -> ConsumerState | None:
        """The consumer that gets all messages; None without consumers, or for other kinds."""
        return next(iter(self.attached.values()), None) if self.has_one_active else None

    def remember(self, consumer: int, filters: Sequence[str]) -> ConsumerState:
        """Adds a consumer that is not attached, or changes the filters of one that is known."""
        key_filter = KeyFilter(filters)
        known = self.known.get(consumer)
        if known is None:
            known = self.known[consumer] = ConsumerState(consumer, key_filter)
        elif known.filter.patterns == key_filter.patterns:
            return known
        else:
            known.filter = key_filter
        self._queue.set_known(self.known)
        return known

    def attach(
        self,
        consumer: int,
        *,
        filters: Sequence[str],
        reports: bool,
        active_elsewhere_at: Callable[[], float] | None,
    ) -> None:
        """Attaches a consumer; see `Delivery.attach`."""
        if self._kind is SubscriptionKind.EXCLUSIVE and self.attached.keys() - {consumer}:
            raise ConflictError(
                "another consumer has the exclusive subscription",
                hint="close that one first, or use a shared or failover subscription",
            )
        known = self.remember(consumer, filters)
        self._take_back(known)
        known.reports = reports
        known.active_elsewhere_at = active_elsewhere_at
        known.room = 0
        if not known.is_attached:
            known.is_attached = True
            self.attached[consumer] = known
            self._queue.attach(known)

    def detach(self, consumer: int) -> None:
        """Detaches a consumer; what it had goes to others, or waits for it."""
        known = self.attached.pop(consumer, None)
        if known is not None:
            known.is_attached = False
            known.room = 0
            self._queue.detach(known)
            self._take_back(known)

    def forget(self, consumer: int) -> None:
        """Detaches and removes a consumer: keys that only it took are passed over."""
        self.detach(consumer)
        known = self.known.pop(consumer, None)
        if known is not None:
            self._queue.set_known(self.known)
            self._timers.forget(known)

    def _take_back(self, consumer: ConsumerState) -> None:
        """Empties a consumer's window: what is in flight is to be sent again."""
        flight, consumer.flight = consumer.flight, {}
        consumer.unreceived.clear()
        consumer.silence_extensions = 0
        consumer.is_stalled = False
        for entry in flight.values():
            entry.consumer = None
            if entry.state is State.SENT:
                self._redelivery.enqueue(entry)

    def record_contact(self, consumer: ConsumerState) -> None:
        """Records an answer or a report of a consumer."""
        consumer.last_contact_at = self._timers.now
        consumer.silence_extensions = 0
        if consumer.is_stalled:
            consumer.is_stalled = False
            self._queue.give_turn(consumer)

    def extend_silence(self, consumer: ConsumerState) -> bool:
        """Grants a silent consumer more time if its program is busy with other partitions."""
        elsewhere = consumer.active_elsewhere_at
        if elsewhere is None or consumer.silence_extensions >= SILENCE_EXTENSIONS_MAX:
            return False
        active_at = elsewhere()
        if active_at <= consumer.last_contact_at:
            return False
        consumer.last_contact_at = min(active_at, self._timers.now)
        consumer.silence_extensions += 1
        return True

    def stall(self, consumer: ConsumerState) -> None:
        """Gives the unreceived messages of a silent consumer to others, with kind shared."""
        if self._kind is SubscriptionKind.SHARED and any(
            other is not consumer and not other.is_stalled for other in self.attached.values()
        ):
            consumer.is_stalled = True
            unreceived = [one for number, one in consumer.unreceived if is_unreceived(number, one)]
            consumer.unreceived.clear()
            for entry in unreceived:
                self._redelivery.requeue(entry)

    def validate(self, entries: Mapping[int, Entry]) -> None:
        """Raises InvariantError if an invariant does not hold."""
        in_windows: set[int] = set()
        for name, consumer in self.known.items():
            check(consumer.id == name, f"consumer {consumer.id} is known as {name}")
            check(consumer.is_attached == (name in self.attached), f"{name} is half attached")
            check(consumer.room >= 0, f"{name} has room for {consumer.room}")
            check(consumer.is_attached or not consumer.flight, f"{name} is away and has messages")
            for offset, entry in consumer.flight.items():
                check(entries.get(offset) is entry, f"{entry} is in a window and not held")
                check(entry.consumer is consumer, f"{entry} is in the window of {name} as well")
                check(entry.state in (State.SENT, State.WAITING), f"{entry} is in a window")
            in_windows.update(consumer.flight)
        check(self.attached.keys() <= self.known.keys(), "attached and not known")
        if self._kind is SubscriptionKind.EXCLUSIVE:
            check(len(self.attached) <= 1, "two consumers have an exclusive subscription")
        for offset, entry in entries.items():
            has_window = offset in in_windows
            check((entry.consumer is not None) == has_window, f"{entry} is in no window")
            check(entry.state is not State.SENT or has_window, f"{entry} has no consumer")
