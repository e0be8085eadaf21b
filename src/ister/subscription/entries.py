"""The values of the delivery state machine: messages, consumers, and the instructions it gives.

Values only; `delivery` changes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

from ister.subscription.keys import KeyFilter


class State(Enum):
    """Where a message is that was read and is not acknowledged."""

    QUEUED = "queued"
    """To be sent as soon as a consumer can take it."""
    SENT = "sent"
    """In flight to a consumer."""
    WAITING = "waiting"
    """It failed, and its redelivery delay has not passed."""
    BLOCKED = "blocked"
    """It failed too often, and the policy is to stop."""
    GIVEN_UP = "given up"
    """It failed too often, and is being dropped or dead-lettered."""
    POSTPONED = "postponed"
    """Dropping or dead-lettering failed, and is tried again later."""
    DONE = "done"
    """Acknowledged; queues may still refer to it."""


_QUEUED: Final = State.QUEUED


class Entry:
    """A message that was read and is not acknowledged."""

    __slots__ = (
        "consumer",
        "due",
        "failures",
        "is_received",
        "is_written",
        "key",
        "number",
        "offset",
        "reason",
        "sent_at",
        "state",
    )

    def __init__(self, offset: int, key: str) -> None:
        self.offset = offset
        self.key = key
        self.state = _QUEUED
        self.consumer: ConsumerState | None = None
        """The consumer whose window it is in: it is in flight there, or failed there and waits."""
        self.failures = 0
        self.reason: str | None = None
        self.sent_at = 0.0
        """When its wait began: to be written to the stream or, once received, for an answer."""
        self.is_written = False
        """Whether it was written to its consumer's stream, and not only handed to it."""
        self.number = 0
        """The number of its sending; later sendings have higher numbers."""
        self.is_received = False
        """Whether the consumer's program is known to have it."""
        self.due = 0.0

    def __repr__(self) -> str:
        return f"<{self.offset} {self.key!r:.20} {self.state.value} failed {self.failures}>"


class ConsumerState:
    """A consumer as the subscription knows it."""

    __slots__ = (
        "active_elsewhere_at",
        "filter",
        "flight",
        "id",
        "is_attached",
        "is_in_rotation",
        "is_stalled",
        "is_watched",
        "last_contact_at",
        "ready",
        "reports",
        "room",
        "silence_extensions",
        "unreceived",
    )

    def __init__(self, id: int, filter: KeyFilter) -> None:
        self.id = id
        self.filter = filter
        self.is_attached = False
        self.room = 0
        """How many more messages its outbound queue takes."""
        self.flight: dict[int, Entry] = {}
        """What counts against its window: in flight to it, or failed there and waiting."""
        self.reports = False
        """Whether it reports which messages its program has received."""
        self.unreceived: deque[tuple[int, Entry]] = deque()
        """Messages sent to it that its program may not have yet, each with its number."""
        self.last_contact_at = 0.0
        """When it last answered or reported, or the oldest of `unreceived` became the oldest."""
        self.active_elsewhere_at: Callable[[], float] | None = None
        """Returns when its program last answered at another partition; None without partitions."""
        self.silence_extensions = 0
        """Ack timeouts granted for activity at other partitions since it last answered here."""
        self.is_watched = False
        """Whether its silence has a timer."""
        self.is_stalled = False
        """Whether it was silent, its messages went to others, and it has not answered since."""
        self.is_in_rotation = False
        self.ready: list[tuple[int, str]] = []
        """A heap of the key queues whose first message is for it, by offset."""

    def can_take(self, window: int) -> bool:
        """Whether it may be sent another message now; a stalled one gets one at a time."""
        return self.room > 0 and len(self.flight) < (1 if self.is_stalled else window)


class AckResult(Enum):
    """The outcome of an acknowledgement."""

    ACCEPTED = "accepted"
    LATE = "late"
    """The message was acknowledged, dropped or passed over before; harmless."""
    REFUSED = "refused"
    """There is no such message yet, or too many are acknowledged out of order."""


class Send(NamedTuple):
    """Send the message at `offset` to a consumer."""

    consumer: int
    offset: int
    attempt: int
    """1 for the first; failures count, disconnects do not."""


class DeadLetter(NamedTuple):
    """Publish the message to the dead-letter topic; then call `resolve` or `unresolved`."""

    offset: int
    attempt: int
    """The number of attempts made."""
    reason: str | None


class Drop(NamedTuple):
    """The message is given up: report it; then call `resolve`."""

    offset: int
    attempt: int
    """The number of attempts made."""
    reason: str | None


Instruction: TypeAlias = Send | DeadLetter | Drop


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryStats:
    """A subscription at a glance."""

    cursor: int
    next_offset: int
    in_flight: int
    pending: int
    """Read, and to be sent."""
    waiting_retry: int
    unresolved: int
    """Being dropped or dead-lettered."""
    blocked: int | None
    """The lowest offset that blocks; None if nothing does."""
    blocked_count: int
    consumers: int
    """Attached consumers."""
    known_consumers: int
