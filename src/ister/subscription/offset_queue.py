"""The order in which messages are sent where keys do not matter: by offset.

Owns: the order of messages that wait to be sent, and whose turn it is. Does not own: what becomes
of a message once it was sent (`delivery`), and time.

Invariants: a message in state QUEUED is in the queue once; other entries may be left in it, which
are skipped when met and removed by `sweep`. Messages are sent for the first time in the order of
offsets; those that are sent again are lower than all new ones. With several consumers, one that can
take a message is in the rotation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from ister.errors import check
from ister.subscription.entries import ConsumerState, Entry, Send, State

_QUEUED: Final = State.QUEUED
_SENT: Final = State.SENT


class OffsetQueue:
    """Messages in the order of offsets: for one consumer, or for all in turn."""

    def __init__(
        self,
        entries: Mapping[int, Entry],
        *,
        apply_policy: Callable[[Entry], None],
        is_shared: bool,
    ) -> None:
        self._entries = entries
        self._apply_policy = apply_policy
        self._is_shared = is_shared
        self._fresh: deque[Entry] = deque()
        self._redeliveries: list[int] = []
        self._rotation: deque[ConsumerState] = deque()
        self.block_at: int | None = None
        """Messages after this offset that were never sent stay where they are."""

    @property
    def has_work(self) -> bool:
        """Whether `send` may have something to do."""
        return bool(self._fresh or self._redeliveries)

    def add(self, entry: Entry) -> None:
        """Adds a message that was just read."""
        self._fresh.append(entry)

    def add_again(self, entry: Entry) -> None:
        """Adds a message that is to be sent again."""
        heappush(self._redeliveries, entry.offset)

    def attach(self, consumer: ConsumerState) -> None:
        """Adds a consumer; it gets its first turn by `give_turn`."""

    def detach(self, consumer: ConsumerState) -> None:
        """Removes a consumer."""
        leave_rotation(self._rotation, consumer)

    def set_known(self, known: Mapping[int, ConsumerState]) -> None:
        """Does nothing: only key queues need all known consumers."""

    def give_turn(self, consumer: ConsumerState) -> None:
        """Puts a consumer that may be able to take messages into the rotation."""
        if self._is_shared and not consumer.is_in_rotation:
            consumer.is_in_rotation = True
            self._rotation.append(consumer)

    def send(
        self, active: ConsumerState | None, *, window: int, failures_max: int, now: float
    ) -> tuple[list[Send], list[Entry]]:
        """Assigns all messages that can be sent now; returns the instructions and the entries.

        `active`: the consumer that gets all messages; None with kind shared.
        `window`: how many unacknowledged messages a consumer may have.
        `failures_max`: the policy is applied to a message that has failed more often.
        """
        sends: list[Send] = []
        sent: list[Entry] = []
        while (consumer := self._next_turn(window) if self._is_shared else active) is not None:
            flight = consumer.flight
            # All it can take, or one: then it is the next one's turn.
            room = min(consumer.room, window - len(flight))
            if self._is_shared:
                room = min(room, 1)
            while room > 0 and (entry := self._pop()) is not None:
                if entry.failures > failures_max:
                    self._apply_policy(entry)
                    continue
                offset = entry.offset
                entry.state = _SENT
                entry.consumer = consumer
                entry.sent_at = now
                entry.is_written = entry.is_received = False
                flight[offset] = entry
                consumer.room -= 1
                room -= 1
                sends.append(Send(consumer.id, offset, entry.failures + 1))
                sent.append(entry)
            if room > 0 or not self._is_shared:
                # Nothing more to send (its turn is kept), or no other consumer to send it to.
                if self._is_shared:
                    self._rotation.appendleft(consumer)
                    consumer.is_in_rotation = True
                break
            self.give_turn(consumer)
        return sends, sent

    def _next_turn(self, window: int) -> ConsumerState | None:
        while self._rotation:
            consumer = self._rotation.popleft()
            consumer.is_in_rotation = False
            if consumer.can_take(window):
                return consumer
        return None

    def _pop(self) -> Entry | None:
        """Removes and returns the lowest message that may be sent."""
        redeliveries = self._redeliveries
        while redeliveries:
            entry = self._entries.get(heappop(redeliveries))
            if entry is not None and entry.state is _QUEUED:
                return entry
        fresh, block_at = self._fresh, self.block_at
        while fresh:
            entry = fresh[0]
            if entry.state is _QUEUED and block_at is not None and entry.offset > block_at:
                return None
            del fresh[0]
            if entry.state is _QUEUED:
                return entry
        return None

    def reset(self) -> None:
        """Forgets every message."""
        self._fresh.clear()
        self._redeliveries.clear()
        self.block_at = None

    def sweep(self) -> None:
        """Removes entries that are no longer queued."""
        self._fresh = deque(entry for entry in self._fresh if entry.state is _QUEUED)
        self._redeliveries = [offset for offset in self._redeliveries if self._is_queued(offset)]
        heapify(self._redeliveries)

    def _is_queued(self, offset: int) -> bool:
        entry = self._entries.get(offset)
        return entry is not None and entry.state is _QUEUED

    def validate(self, attached: Mapping[int, ConsumerState], window: int) -> None:
        """Raises InvariantError if an invariant does not hold."""
        fresh = [entry.offset for entry in self._fresh if entry.state is _QUEUED]
        again = [offset for offset in self._redeliveries if self._is_queued(offset)]
        check(fresh == sorted(set(fresh)), "new messages are out of order")
        check(not fresh or max(again, default=-1) < fresh[0], "a new one before one sent again")
        queued = [offset for offset in self._entries if self._is_queued(offset)]
        check(sorted(fresh + again) == sorted(queued), "a queued message is not in the queue once")
        check_rotation(self._rotation)
        if self._is_shared:
            for consumer in attached.values():
                check(
                    consumer.is_in_rotation or not consumer.can_take(window),
                    f"consumer {consumer.id} can take messages and gets no turn",
                )


def leave_rotation(rotation: deque[ConsumerState], consumer: ConsumerState) -> None:
    """Takes a consumer out of the rotation."""
    if consumer.is_in_rotation:
        consumer.is_in_rotation = False
        rotation.remove(consumer)


def check_rotation(rotation: deque[ConsumerState]) -> None:
    """Checks that each consumer of the rotation is attached, and in it once."""
    ids = [consumer.id for consumer in rotation]
    check(len(ids) == len(set(ids)), f"a consumer has two turns: {ids}")
    check(
        all(consumer.is_in_rotation and consumer.is_attached for consumer in rotation),
        "a consumer in the rotation is not attached",
    )
