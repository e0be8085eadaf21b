"""Messages that failed: delay (`policy.FailurePolicy.delay_ms`), next attempt, poison policy.

Owns: failures, and messages that failed too often. Does not own: acknowledgements (`delivery`),
times (`timers`), the order of sending (the queues). Does no I/O.

Invariants: a message is blocked, given up or postponed only after a failure; failures from before a
restart are kept until their message is sent again, and are gone once it is acknowledged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ister.errors import check
from ister.subscription.entries import DeadLetter, Drop, Entry, State
from ister.subscription.floor import AckFloor
from ister.subscription.key_queues import KeyQueues
from ister.subscription.offset_queue import OffsetQueue
from ister.subscription.policy import FailurePolicy, PoisonPolicy
from ister.subscription.saved_state import Failures
from ister.subscription.timers import Timers

REASON_CHARACTERS_MAX: Final = 256
"""The longest stored reason of a failure; the rest is cut off."""


class Redelivery:
    """The failed messages of one subscription.

    `restored`: failures from before a restart.
    """

    queue: OffsetQueue | KeyQueues
    """The queue that messages are sent from; set by the owner."""

    def __init__(
        self,
        entries: Mapping[int, Entry],
        timers: Timers,
        policy: FailurePolicy,
        restored: Failures,
    ) -> None:
        self._entries = entries
        self._timers = timers
        self.policy = policy
        self.restored = restored
        self.failed: set[int] = set()
        self.blocked: set[int] = set()
        self.given_up: list[Entry] = []
        """Messages whose instructions were not taken yet."""
        self.exhausted = 0
        """Messages that failed too often, so far."""
        self.version = 0
        """Changes whenever `failures` has changed."""

    def restore(self, entry: Entry) -> None:
        """Restores how often a message failed before the restart."""
        found = self.restored.pop(entry.offset, None)
        if found is not None:
            entry.failures, entry.reason = found
            self.failed.add(entry.offset)

    def failures(self) -> Failures:
        """The failures of all messages that are not acknowledged."""
        found = dict(self.restored)
        for offset in self.failed:
            entry = self._entries[offset]
            found[offset] = (entry.failures, entry.reason)
        return found

    def fail(self, entry: Entry, reason: str | None, requested_ms: int | None) -> None:
        """Counts a failure of a message that was in flight."""
        entry.failures += 1
        entry.reason = None if reason is None else reason[:REASON_CHARACTERS_MAX]
        self.failed.add(entry.offset)
        self.version += 1
        if entry.failures > self.policy.max_redelivery_count:
            self.exhausted += 1
            self._release(entry)
            self.apply_policy(entry)
            return
        delay_ms = self.policy.delay_ms(entry.failures, requested_ms)
        if delay_ms == 0:
            self.requeue(entry)
        else:
            # It stays in the window of the consumer that failed it.
            entry.state = State.WAITING
            self._timers.start_delay(entry, delay_ms)

    def _release(self, entry: Entry) -> None:
        """Takes a message out of the window that it is in."""
        consumer = entry.consumer
        if consumer is not None:
            entry.consumer = None
            del consumer.flight[entry.offset]
            self.queue.give_turn(consumer)

    def enqueue(self, entry: Entry) -> None:
        """Queues a message that is in no window, to be sent again."""
        entry.state = State.QUEUED
        self.queue.add_again(entry)

    def requeue(self, entry: Entry) -> None:
        """Takes a message back from its consumer, to be sent again to any."""
        self._release(entry)
        self.enqueue(entry)

    def apply_policy(self, entry: Entry) -> None:
        """Decides about a failed message that is in no window and in no queue."""
        if entry.failures <= self.policy.max_redelivery_count:
            self.enqueue(entry)
        elif self.policy.poison is PoisonPolicy.BLOCK:
            entry.state = State.BLOCKED
            self.blocked.add(entry.offset)
            at = self.queue.block_at
            self.queue.block_at = entry.offset if at is None else min(at, entry.offset)
        else:
            entry.state = State.GIVEN_UP
            self.given_up.append(entry)

    def unblock(self, offset: int) -> None:
        """Removes a blocking message that is done."""
        self.blocked.remove(offset)
        if offset == self.queue.block_at:
            self.queue.block_at = min(self.blocked, default=None)

    def take_given_up(self) -> list[DeadLetter | Drop]:
        """Returns the instructions for messages that were given up; each once."""
        given_up, self.given_up = self.given_up, []
        kind = DeadLetter if self.policy.poison is PoisonPolicy.DEAD_LETTER else Drop
        return [
            kind(entry.offset, entry.failures, entry.reason)
            for entry in given_up
            if entry.state is State.GIVEN_UP  # not acknowledged at the last moment
        ]

    def set_policy(self, policy: FailurePolicy) -> None:
        """Changes the policy; it is applied to what is blocked, or about to be given up."""
        self.policy = policy
        given_up, self.given_up = self.given_up, []
        affected = [self._entries[offset] for offset in sorted(self.blocked)]
        affected += [entry for entry in given_up if entry.state is State.GIVEN_UP]
        self.blocked.clear()
        self.queue.block_at = None
        for entry in affected:
            self.apply_policy(entry)

    def clear(self) -> None:
        """Forgets every message."""
        for container in (self.restored, self.failed, self.blocked, self.given_up):
            container.clear()

    def validate(self, floor: AckFloor, next_offset: int, waiting: set[int]) -> None:
        """Checks the invariants; `waiting` are messages that were never sent."""
        blocked = set()
        for offset, entry in self._entries.items():
            check((entry.failures > 0) == (offset in self.failed), f"{entry} is not on record")
            has_failed = entry.state in (State.BLOCKED, State.GIVEN_UP, State.POSTPONED)
            check(entry.failures > 0 or not has_failed, f"{entry} never failed")
            if entry.state is State.BLOCKED:
                blocked.add(offset)
        check(blocked == self.blocked, "other messages are blocked")
        check(self.queue.block_at == min(blocked, default=None), "the queue is blocked elsewhere")
        check(self.failed <= self._entries.keys(), "failures of messages that are not held")
        for offset in self.restored:
            check(
                (offset >= next_offset or offset in waiting) and not floor.is_acked(offset),
                f"the failures of {offset} are kept apart",
            )
