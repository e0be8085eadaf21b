"""What a subscription sends to whom, and what it makes of the answers: events in, instructions out.

    offered ─► queued ─► sent ─► acknowledged
                 ▲         │ nack, ack timeout
                 │         ▼
                 ├──── waiting ────► (too often) blocked, or handed out ─► resolved

Owns: which message goes to which consumer, windows, failures, the ack floor. Does not own: I/O,
clocks (times are seconds, given with each event), payloads, threads. Not thread-safe.

Rules:

- `window` is how many unacknowledged messages one consumer may have. A message that failed counts
  in the window of who failed it until it is sent again, so that a consumer that refuses everything
  stops itself and nobody else;
- every event only notes what happened; `take` decides what is sent. It sends at the time of the
  last event, or at the one it is given;
- a consumer that leaves is no failure: what it had is sent again at once, in the order of offsets,
  before anything new;
- attempt `n` of a message is its first after `n - 1` failures;
- the ack timeout of a message begins when the consumer's program can have it, not when it was
  sent: clients prefetch. A client that reports tells up to which message its program has received.
  One that does not report is taken to have received the oldest message that it has not answered,
  and all that were sent before a message that it answers. A late answer to an earlier attempt does
  not count for messages sent since;
- a consumer is silent if it does not answer or report for the ack timeout while it has messages
  that its program has not received. Without reports its oldest message fails. With kind shared, if
  another consumer is not stalled, this one becomes stalled: its remaining messages go to others,
  which is not a failure, and it gets one message at a time until it answers. A consumer whose
  program answers at another partition is not silent, for up to `EXCUSES_MAX` ack timeouts;
- a subscription is blocked by a message that failed too often under the policy `block`: nothing
  that was never sent before is sent then. What was sent already may still be acknowledged, and
  comes again if it has to. With key_shared only that key stops;
- a key that no known consumer takes is passed over, which counts as acknowledged. One that only
  detached consumers take is kept. While nobody is known at all, everything is kept.

Bounds: `wanted` asks for no more than `window` messages for each consumer that gets messages, and
as many again to be read ahead; with key_shared four times that, and at least
`KEYED_MESSAGES_MIN`, because messages wait there behind others of their key. If all of these are
for consumers that are slow or away, or behind blocked keys, and another consumer is idle, it asks
for more, up to `KEYED_MESSAGES_MAX` and `KEYS_MAX`: a waiting message takes a few bytes, and a key
some hundred. Beyond that, all keys wait. Acknowledgements of messages that were not read yet make
at most `RANGES_MAX` ranges.

Invariants, checked by `validate_state`: every offset from the floor up to `next_offset` is
acknowledged or held in exactly one state, or with key_shared waits in the lane of its key; what is
in flight is in the window of one attached consumer, and has a timeout or is unseen there, whose
silence is watched; what waits has a timer; see also `queues` and `floor`.

What a crash leaves: what `saved` gave to the store. What was acknowledged since is sent again;
attempts made since do not count.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Final, NamedTuple, TypeAlias

from ister.errors import (
    CapacityError,
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    InvariantError,
    check,
)
from ister.subscription.floor import RANGES_MAX, AckFloor
from ister.subscription.keys import KeyFilter
from ister.subscription.policy import FailurePolicy, PoisonPolicy, SubscriptionKind
from ister.subscription.queues import Consumer, Entry, Lanes, Line, Send, State
from ister.subscription.receipts import ATTEMPT_MAX

__all__ = [
    "EXCUSES_MAX",
    "KEYED_MESSAGES_MAX",
    "KEYED_MESSAGES_MIN",
    "KEYS_MAX",
    "REASON_CHARACTERS_MAX",
    "AckResult",
    "DeadLetter",
    "Delivery",
    "DeliveryStats",
    "Drop",
    "Instruction",
    "Send",
]

_log = logging.getLogger("ister.subscription.delivery")

KEYED_MESSAGES_MIN: Final = 1024
"""What key_shared reads ahead at least, however small the window: one stuck key is not to stop all
others."""

KEYED_MESSAGES_MAX: Final = 4_000_000
"""Messages that key_shared reads past because a consumer is slow or away, and others are idle."""

KEYS_MAX: Final = 200_000
"""Keys of such messages: each takes some hundred bytes."""

_KEYED_STEP: Final = 512
_STUCK_SECONDS: Final = 10.0

EXCUSES_MAX: Final = 10
"""Ack timeouts for which a consumer is not silent because its program answers elsewhere."""

REASON_CHARACTERS_MAX: Final = 256
"""Of why a message failed; the rest is cut off."""

_SAVED_FAILURES_MAX: Final = 1_000
_SAVED_REASON_BYTES_MAX: Final = 128 * 1024
# Traces of messages that are done, beyond as many as there are messages, before they are removed.
# Each message is noted when it is taken and when it leaves, and perhaps once more.
_SENT_FACTOR: Final = 4
_TRACES_MIN: Final = 256


# Looked up once: each message passes here.
_SENT: Final = State.SENT
_DONE: Final = State.DONE


class AckResult(Enum):
    """What became of an acknowledgement."""

    ACCEPTED = "accepted"
    LATE = "late"
    """It had been acknowledged, dropped or passed over before. Nothing to worry about."""
    REFUSED = "refused"
    """There is no such message yet, or too many stand acknowledged out of order."""


class DeadLetter(NamedTuple):
    """Publish the message to the dead-letter topic; then `resolve`, or `unresolved`."""

    offset: int
    attempt: int
    """How many attempts there were."""
    reason: str | None


class Drop(NamedTuple):
    """The message is given up: tell whom it concerns; then `resolve`."""

    offset: int
    attempt: int
    """How many attempts there were."""
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
    acked_ranges: int
    """Ranges that are acknowledged above the cursor."""
    consumers: int
    """Attached."""
    known_consumers: int


class Delivery:
    """One subscription's deliveries; see the module header. Not thread-safe.

    Args:
        kind: Who gets a message.
        policy: What becomes of messages that fail.
        window: How many unacknowledged messages a consumer may have.
        cursor: The first offset that is not acknowledged.
        saved: What `saved` gave before. If it is damaged, or the cursor has been put back behind
            it, it is left aside: messages come twice then, and none is lost.
        end: The log's end, if known: what `saved` says about offsets from there on is left aside,
            because they will be other messages'.
        waits_for_writes: Whether `begin_write` says when a message leaves for its consumer. Until
            then it cannot fail: one that waits too long for that is to be sent anew, to whoever
            can take it. Otherwise a message leaves when it is taken.
    """

    def __init__(
        self,
        *,
        kind: SubscriptionKind,
        policy: FailurePolicy,
        window: int,
        cursor: int,
        saved: Mapping[str, Any] | None = None,
        end: int | None = None,
        waits_for_writes: bool = False,
    ) -> None:
        _check_window(window)
        self._waits_for_writes = waits_for_writes
        self.kind = SubscriptionKind(kind)
        self._policy = policy
        self._window = window
        self._now = float("-inf")
        self._floor = AckFloor(cursor)
        self._remembered: dict[int, tuple[int, str | None]] = {}
        if saved is not None:
            self._restore(saved, cursor, end)
        self.next_offset = self._floor.floor
        """The next offset to be offered. Below the cursor if messages were acknowledged unread."""
        self.version = 0
        """Another number whenever the cursor, or what `saved` gives, has changed."""
        self.timeouts = 0
        """Messages that were not answered in time, so far."""
        self.exhausted = 0
        """Messages that failed too often, so far."""
        self._known: dict[int, Consumer] = {}
        self._attached: dict[int, Consumer] = {}
        self._entries: dict[int, Entry] = {}
        self._failed: set[int] = set()
        self._blocked: set[int] = set()
        self._sent: deque[tuple[float, Entry]] = deque()
        self._silences: list[tuple[float, int]] = []
        self._numbers = 0
        self._timers: list[tuple[float, int]] = []
        self._outbox: list[Entry] = []
        self._traces = 0
        self._is_keyed = self.kind is SubscriptionKind.KEY_SHARED
        self._has_one = self.kind in (SubscriptionKind.EXCLUSIVE, SubscriptionKind.FAILOVER)
        self._lanes = (
            Lanes(
                self._entries,
                judge=self._judge,
                pass_over=self._pass_over_keyed,
                is_acked=self._is_acked,
                make=self._make_keyed,
            )
            if self._is_keyed
            else None
        )
        self._line = Line(self._entries, judge=self._judge, is_shared=not self._has_one)
        self._queue: Line | Lanes = self._lanes or self._line

    # -- consumers --------------------------------------------------------------------------

    @property
    def active(self) -> int | None:
        """Who gets messages, for exclusive and failover; None without consumers, or for others."""
        consumer = self._active()
        return None if consumer is None else consumer.id

    @property
    def consumers(self) -> list[int]:
        """The attached consumers, in the order in which they came."""
        return list(self._attached)

    def _active(self) -> Consumer | None:
        return next(iter(self._attached.values()), None) if self._has_one else None

    def remember(self, consumer: int, *, filters: Sequence[str] = ()) -> None:
        """Makes a consumer known that is not attached, such as after a restart; see `attach`.

        Raises:
            InvalidRequestError: The filters are none.
        """
        key_filter = KeyFilter(filters)
        known = self._known.get(consumer)
        if known is None:
            self._known[consumer] = Consumer(consumer, key_filter)
        elif known.filter.patterns == key_filter.patterns:
            return
        else:
            known.filter = key_filter
        self._queue.note_known(self._known)

    def attach(
        self,
        consumer: int,
        *,
        filters: Sequence[str] = (),
        reports: bool = False,
        elsewhere: Callable[[], float] | None = None,
        now: float,
    ) -> None:
        """A consumer has a stream. It gets nothing until `set_room`.

        One that is attached gets what it has in flight again, and keeps its place.

        Args:
            consumer: Its id.
            filters: Which keys it takes; all without any.
            reports: Whether it reports what its program has received; see `received`.
            elsewhere: Returns when its program last answered at another partition, whose messages
                it handles in the same queue.
            now: Seconds.

        Raises:
            ConflictError: The subscription is exclusive, and another one has it.
            InvalidRequestError: The filters are none.
        """
        self._note_time(now)
        if self.kind is SubscriptionKind.EXCLUSIVE and self._attached.keys() - {consumer}:
            raise ConflictError(
                "another consumer has the exclusive subscription",
                hint="close that one first, or use a shared or failover subscription",
            )
        self.remember(consumer, filters=filters)
        known = self._known[consumer]
        self._take_back(known)
        known.reports = reports
        known.elsewhere = elsewhere
        known.room = 0
        if not known.is_attached:
            known.is_attached = True
            self._attached[consumer] = known
            self._queue.attach(known)

    def detach(self, consumer: int, *, now: float) -> None:
        """A consumer's stream has ended: what it had goes to others, or waits for it."""
        self._note_time(now)
        known = self._attached.pop(consumer, None)
        if known is None:
            return
        known.is_attached = False
        known.room = 0
        self._queue.detach(known)
        self._take_back(known)

    def forget(self, consumer: int, *, now: float) -> None:
        """A consumer does not come back: keys that only it took are passed over from now on."""
        self.detach(consumer, now=now)
        known = self._known.pop(consumer, None)
        if known is not None:
            self._queue.note_known(self._known)
            if known.is_watched:
                self._silences = [one for one in self._silences if one[1] != consumer]
                heapify(self._silences)

    def set_room(self, consumer: int, messages: int) -> None:
        """How many more messages a consumer's outbound queue takes now; 0 stops it."""
        known = self._attached.get(consumer)
        if known is not None:
            known.room = max(0, messages)
            self._queue.note_free(known)

    def _take_back(self, consumer: Consumer) -> None:
        """Everything leaves a consumer's window: what is in flight is to be sent again."""
        flight, consumer.flight = consumer.flight, {}
        consumer.unseen.clear()
        consumer.excuses = 0
        consumer.is_stalled = False
        for entry in flight.values():
            entry.consumer = None
            if entry.state is State.SENT:
                self._enqueue(entry)

    # -- messages ---------------------------------------------------------------------------

    def wanted(self) -> int:
        """How many further messages may be offered now."""
        if not self._attached or (self._blocked and not self._is_keyed):
            return 0
        shares = 1 if self._has_one else len(self._attached)
        bound = self._window * (shares + 1)
        lanes = self._lanes
        if lanes is None:
            return max(0, bound - len(self._entries))
        waiting = lanes.waiting + len(self._entries)
        if waiting < (bound := max(4 * bound, KEYED_MESSAGES_MIN)):
            return bound - waiting
        is_too_much = waiting >= KEYED_MESSAGES_MAX or lanes.key_count >= KEYS_MAX
        return 0 if is_too_much or not self.has_idle_consumer() else _KEYED_STEP

    def has_idle_consumer(self) -> bool:
        """Whether a consumer could take messages, and none of those that were read is for it.

        With key_shared, messages that it has not answered for `_STUCK_SECONDS` do not count as work
        under way.
        """
        if self._has_one or self._line.has_messages:
            return False
        return any(
            consumer.can_take(self._window) and not consumer.ready and self._has_taken_all(consumer)
            for consumer in self._attached.values()
        )

    def _has_taken_all(self, consumer: Consumer) -> bool:
        newest = next(reversed(consumer.flight.values()), None)
        if newest is None:
            return True
        if not self._is_keyed:
            return newest.is_written
        return newest.sent_at + _STUCK_SECONDS <= self._now

    def offer(self, messages: Iterable[tuple[int, str]], *, now: float) -> None:
        """Takes in messages as they are in the log, from `next_offset` on, without a hole.

        Args:
            messages: Offset and key of each. What was offered before is passed over, and so is
                what has been acknowledged.
            now: Seconds.

        Raises:
            InvariantError: There is a hole before a message. Those before it have been taken in.
        """
        self._note_time(now)
        expected = self.next_offset
        floor, entries, lanes, line = self._floor, self._entries, self._lanes, self._line
        first_acked = floor.first_acked(expected)
        # Before this offset and above the floor nothing is acknowledged, which is the usual case.
        clear_end = float("inf") if first_acked is None else first_acked
        try:
            for offset, key in messages:
                if offset != expected:
                    if offset < expected:
                        continue
                    raise InvariantError(f"offered {offset}, and {expected} comes next")
                expected += 1
                if (offset >= clear_end or offset < floor.floor) and floor.is_acked(offset):
                    continue
                if lanes is not None:
                    if not lanes.add(offset, key):
                        self._pass_over_keyed(offset, offset + 1)
                    continue
                entry = Entry(offset, key)
                entries[offset] = entry
                if self._remembered:
                    self._recall(entry)
                line.add(entry)
        finally:
            self.next_offset = expected

    def is_due(self, consumer: int, offset: int) -> bool:
        """Whether a message that was to be sent to a consumer still is, and has not left."""
        return self.is_with(consumer, offset) and not self._entries[offset].is_written

    def is_with(self, consumer: int, offset: int) -> bool:
        """Whether a message is in flight to a consumer."""
        entry = self._entries.get(offset)
        return (
            entry is not None
            and entry.state is _SENT
            and entry.consumer is not None
            and entry.consumer.id == consumer
        )

    def is_sent(self, offset: int) -> bool:
        """Whether a message is assigned to a consumer, and not yet written to its stream."""
        entry = self._entries.get(offset)
        return entry is not None and entry.state is State.SENT and not entry.is_written

    def begin_write(self, consumer: int, offset: int, *, now: float) -> bool:
        """Records that a message is written to its consumer's stream.

        Returns:
            False if it must not leave: it was acknowledged, taken back, or has left already.
        """
        if not self.is_due(consumer, offset):
            return False
        self._note_time(now)
        self._write(self._entries[offset])
        return True

    def _write(self, entry: Entry) -> None:
        self._numbers += 1
        entry.is_written = True
        entry.number = self._numbers
        consumer = entry.consumer
        assert consumer is not None  # noqa: S101 - for mypy
        if not _trim(consumer.unseen):
            consumer.heard_at = self._now
        consumer.unseen.append((entry.number, entry))
        if not consumer.is_watched:
            consumer.is_watched = True
            heappush(self._silences, (consumer.heard_at, consumer.id))

    def received(self, consumer: int, offset: int, *, now: float) -> None:
        """Records that a program has received a message, and all that were sent to it before."""
        self._note_time(now)
        known = self._attached.get(consumer)
        if known is not None:
            self._hear(known)
            if self.is_with(consumer, offset):
                self._note_seen(known, self._entries[offset].number)

    def _hear(self, consumer: Consumer) -> None:
        """Records an answer or a report of a consumer."""
        consumer.heard_at = self._now
        consumer.excuses = 0
        if consumer.is_stalled:
            consumer.is_stalled = False
            self._queue.note_free(consumer)

    def _note_seen(self, consumer: Consumer, last: int, but: Entry | None = None) -> None:
        """Starts the ack timeouts of messages up to a number: the program has them."""
        unseen, now = consumer.unseen, self._now
        while unseen and unseen[0][0] <= last:
            number, entry = unseen.popleft()
            if entry is not but and entry.number == number and entry.state is _SENT:
                entry.is_seen = True
                entry.sent_at = now
                self._sent.append((now, entry))

    def pass_over(self, end: int) -> None:
        """Goes on at `end` with reading: what lies before it is not there, and counts as done."""
        self._floor.ack_range(self.next_offset, end)
        for offset in [at for at in self._remembered if self.next_offset <= at < end]:
            del self._remembered[offset]
        self.next_offset = max(self.next_offset, end)
        self.version += 1

    def holds(self, offset: int) -> bool:
        """Whether a message that was offered is still to be acknowledged."""
        if offset in self._entries:
            return True
        return self._is_keyed and offset < self.next_offset and not self._floor.is_acked(offset)

    def _is_acked(self, offset: int) -> bool:
        return self._floor.is_acked(offset)

    def _make_keyed(self, offset: int, key: str) -> Entry:
        """Makes the entry of a message that is about to be sent for the first time."""
        entry = self._entries[offset] = Entry(offset, key)
        if self._remembered:
            self._recall(entry)
        return entry

    def _pass_over_keyed(self, start: int, end: int) -> None:
        """Counts a range of messages that match no filter as done."""
        entry = self._entries.get(start)
        if entry is not None:
            self._finish(entry)
            return
        self._floor.ack_range(start, end)
        self.version += 1
        if self._remembered:
            for offset in range(start, end):
                self._remembered.pop(offset, None)

    def _recall(self, entry: Entry) -> None:
        """Gives a message back how often it failed before the restart."""
        failures = self._remembered.pop(entry.offset, None)
        if failures is not None:
            entry.failures, entry.reason = failures
            self._failed.add(entry.offset)

    # -- outcomes ---------------------------------------------------------------------------

    def ack(
        self,
        offset: int,
        *,
        end: int,
        now: float,
        consumer: int | None = None,
        attempt: int | None = None,
    ) -> AckResult:
        """A message has been dealt with, whoever had it and whenever that was.

        Args:
            offset: Which one.
            end: The log's visible end: what lies beyond it nobody can have seen.
            now: Seconds.
            consumer: Who says so; None for whoever has it.
            attempt: Which attempt it answers, up to `ATTEMPT_MAX`; None if that is not known.
        """
        if now > self._now:  # noqa: PLR1730 - a third of the time
            self._now = now
        if offset >= end:
            return AckResult.REFUSED
        entry = self._entries.get(offset)
        self._note_answer(entry, consumer, attempt)
        if entry is not None:
            self._finish(entry)
            return AckResult.ACCEPTED
        if offset < self._floor.floor:
            return AckResult.LATE
        try:
            # Sent before a restart, by another process. What is held here has bounds of its own.
            is_new = self._floor.ack(offset, None if self.holds(offset) else RANGES_MAX)
        except CapacityError:
            return AckResult.REFUSED
        if not is_new:
            return AckResult.LATE
        if offset < self.next_offset:
            self._traces += 1  # in its lane
        self._remembered.pop(offset, None)
        self.version += 1
        return AckResult.ACCEPTED

    def nack(
        self,
        offset: int,
        *,
        consumer: int | None = None,
        attempt: int | None = None,
        delay_ms: int | None,
        reason: str | None,
        now: float,
    ) -> bool:
        """A consumer could not deal with a message; whether that counts as a failure.

        A nack counts only for a message in flight to the consumer. Other messages are delivered
        again anyway, or are with another consumer by now.

        Args:
            offset: The message.
            consumer: The consumer that nacks it; None for the one that has it.
            attempt: As for `ack`.
            delay_ms: The delay that the consumer asks for.
            reason: The reason that it gives.
            now: Seconds.
        """
        self._note_time(now)
        entry = self._entries.get(offset)
        if entry is None or entry.state is not State.SENT:
            return False
        if consumer is not None and not self.is_with(consumer, offset):
            return False
        self._note_answer(entry, consumer, attempt)
        self._fail(entry, reason, delay_ms)
        return True

    def resolve(self, offset: int, *, now: float) -> None:
        """What `DeadLetter` or `Drop` said has been done, durably: the message is done."""
        self._note_time(now)
        entry = self._entries.get(offset)
        if entry is not None and entry.state in (State.HANDED, State.POSTPONED):
            self._finish(entry)

    def unresolved(self, offset: int, *, now: float, delay_ms: int) -> None:
        """What `DeadLetter` or `Drop` said could not be done: it is said again after a while."""
        self._note_time(now)
        entry = self._entries.get(offset)
        if entry is not None and entry.state is State.HANDED:
            entry.state = State.POSTPONED
            self._set_timer(entry, delay_ms)

    def _note_answer(self, entry: Entry | None, consumer: int | None, attempt: int | None) -> None:
        """Records an answer: the program has all messages that were sent to it before this one."""
        holder = entry.consumer if entry is not None and entry.state is _SENT else None
        if holder is not None and consumer in (None, holder.id):
            self._hear(holder)
            if entry is not None and entry.is_written:
                failures = entry.failures
                if not failures or attempt == min(failures + 1, ATTEMPT_MAX):
                    self._note_seen(holder, entry.number, but=entry)
        elif consumer is not None and consumer in self._attached:
            self._hear(self._attached[consumer])  # of a message that it has no longer

    def _finish(self, entry: Entry) -> None:
        """A message is acknowledged, resolved or passed over."""
        offset, state, consumer = entry.offset, entry.state, entry.consumer
        del self._entries[offset]
        entry.state = _DONE
        # Held messages bound the ranges: between two there is one of these.
        self._floor.ack(offset, None)
        self.version += 1
        if entry.failures:
            self._failed.discard(offset)
        if consumer is not None:
            entry.consumer = None
            del consumer.flight[offset]
            self._queue.note_free(consumer)
            if consumer.unseen and consumer.unseen[0][1] is entry:
                # Somebody else has acknowledged it; the next one becomes the oldest.
                consumer.unseen.popleft()
                consumer.heard_at = self._now
        if state is not _SENT:
            self._traces += 1
            if state is State.BLOCKED:
                self._unblock(offset)
        if self._lanes is not None:
            self._lanes.leave(entry)

    def _fail(self, entry: Entry, reason: str | None, requested_ms: int | None) -> None:
        """A message that was in flight has failed."""
        entry.failures += 1
        entry.reason = None if reason is None else reason[:REASON_CHARACTERS_MAX]
        self._failed.add(entry.offset)
        self.version += 1
        if entry.failures > self._policy.max_redelivery_count:
            self.exhausted += 1
            self._release(entry)
            self._judge(entry)
            return
        delay_ms = self._policy.delay_ms(entry.failures, requested_ms)
        if delay_ms == 0:
            self._release(entry)
            self._enqueue(entry)
        else:
            # It stays in the window of who failed it.
            entry.state = State.WAITING
            self._set_timer(entry, delay_ms)

    def _release(self, entry: Entry) -> None:
        """Takes a message out of the window that it is in."""
        consumer = entry.consumer
        if consumer is not None:
            entry.consumer = None
            del consumer.flight[entry.offset]
            self._queue.note_free(consumer)

    def _enqueue(self, entry: Entry) -> None:
        entry.state = State.QUEUED
        self._queue.put_back(entry)

    def _judge(self, entry: Entry) -> None:
        """What becomes of a message that is in nobody's window and in no queue."""
        if entry.failures <= self._policy.max_redelivery_count:
            self._enqueue(entry)
        elif self._policy.poison is PoisonPolicy.BLOCK:
            entry.state = State.BLOCKED
            self._blocked.add(entry.offset)
            at = self._queue.block_at
            self._queue.block_at = entry.offset if at is None else min(at, entry.offset)
        else:
            entry.state = State.HANDED
            self._outbox.append(entry)

    def _unblock(self, offset: int) -> None:
        self._blocked.remove(offset)
        if offset == self._queue.block_at:
            self._queue.block_at = min(self._blocked, default=None)

    # -- time -------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Lets what is due at `now` happen: ack timeouts, and the ends of pauses."""
        self._note_time(now)
        timeout = self._policy.ack_timeout_ms / 1000
        while (oldest := self._oldest_sent()) is not None and oldest + timeout <= now:
            entry = self._sent.popleft()[1]
            if entry.is_seen:
                self._time_out(entry)
            else:
                # It did not even leave.
                self._release(entry)
                self._enqueue(entry)
        while (silence := self._first_silence()) is not None and silence[0] + timeout <= now:
            self._end_silence(self._attached[silence[1]])
        while (due := self._next_timer()) is not None and due <= now:
            entry = self._entries[heappop(self._timers)[1]]
            if entry.state is State.WAITING:
                self._release(entry)
                self._enqueue(entry)
            else:
                self._judge(entry)

    def _time_out(self, entry: Entry) -> None:
        self.timeouts += 1
        self._fail(entry, f"no answer in {self._policy.ack_timeout_ms} ms", None)

    def _end_silence(self, consumer: Consumer) -> None:
        """Fails or moves messages of a consumer that has been silent for the ack timeout."""
        if consumer.elsewhere is not None and consumer.excuses < EXCUSES_MAX:
            heard_at = consumer.elsewhere()
            if heard_at > consumer.heard_at:
                # Its program is busy with other messages.
                consumer.heard_at = min(heard_at, self._now)
                consumer.excuses += 1
                return
        consumer.heard_at = self._now  # the next one becomes the oldest
        if not consumer.reports:
            self._time_out(consumer.unseen.popleft()[1])
        if self.kind is SubscriptionKind.SHARED and any(
            other is not consumer and not other.is_stalled for other in self._attached.values()
        ):
            consumer.is_stalled = True
            unseen = [entry for number, entry in consumer.unseen if _is_unseen(number, entry)]
            consumer.unseen.clear()
            for entry in unseen:
                self._release(entry)
                self._enqueue(entry)

    def _first_silence(self) -> tuple[float, int] | None:
        """The consumer with unseen messages that has been silent for longest, and since when.

        Its first unseen message is still in flight.
        """
        silences = self._silences
        while silences:
            since, name = silences[0]
            consumer = self._known[name]
            if not _trim(consumer.unseen):
                heappop(silences)
                consumer.is_watched = False
            elif consumer.heard_at > since:
                heapreplace(silences, (consumer.heard_at, name))
            else:
                return silences[0]
        return None

    def deadline(self) -> float | None:
        """When `tick` has something to do; None if nothing is coming."""
        oldest, silence, due = self._oldest_sent(), self._first_silence(), self._next_timer()
        timeout = self._policy.ack_timeout_ms / 1000
        times = [] if due is None else [due]
        if oldest is not None:
            times.append(oldest + timeout)
        if silence is not None:
            times.append(silence[0] + timeout)
        return min(times, default=None)

    def _note_time(self, now: float) -> None:
        self._now = max(self._now, now)

    def _oldest_sent(self) -> float | None:
        """When the longest wait of a message began: to be written, or for an answer."""
        sent = self._sent
        while sent:
            sent_at, entry = sent[0]
            if _is_timed(sent_at, entry):
                return sent_at
            sent.popleft()
        return None

    def _next_timer(self) -> float | None:
        """When the next pause ends."""
        timers = self._timers
        while timers:
            if self._is_running(timers[0]):
                return timers[0][0]
            heappop(timers)
        return None

    def _is_running(self, timer: tuple[float, int]) -> bool:
        entry = self._entries.get(timer[1])
        return (
            entry is not None
            and entry.state in (State.WAITING, State.POSTPONED)
            and entry.due == timer[0]
        )

    def _set_timer(self, entry: Entry, delay_ms: int) -> None:
        entry.due = self._now + max(0, delay_ms) / 1000
        heappush(self._timers, (entry.due, entry.offset))

    # -- instructions -----------------------------------------------------------------------

    def take(self, now: float | None = None) -> list[Instruction]:
        """What is to be done now; asked for once, it is taken to be done.

        Args:
            now: Seconds, from which ack timeouts count; the time of the last event if not given.
        """
        if now is not None:
            self._note_time(now)
        sends, sent = self._queue.send(
            self._active(),
            window=self._window,
            failures_max=self._policy.max_redelivery_count,
            now=self._now,
        )
        if self._waits_for_writes:
            self._sent.extend([(self._now, entry) for entry in sent])
        else:
            for entry in sent:
                self._write(entry)
        instructions: list[Instruction] = []
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            instructions += [made for made in map(self._hand_out, outbox) if made is not None]
        instructions += sends
        if self._traces > len(self._entries) + _TRACES_MIN + self._waiting - self._traces:
            self._sweep()
        elif len(self._sent) > _SENT_FACTOR * len(self._entries) + _TRACES_MIN:
            self._sweep_sent()
        return instructions

    @property
    def _waiting(self) -> int:
        return 0 if self._lanes is None else self._lanes.waiting

    def _hand_out(self, entry: Entry) -> Instruction | None:
        if entry.state is not State.HANDED:
            return None  # acknowledged at the last moment
        kind = DeadLetter if self._policy.poison is PoisonPolicy.DEAD_LETTER else Drop
        return kind(entry.offset, entry.failures, entry.reason)

    def _sweep(self) -> None:
        """Removes the traces of messages that are done."""
        self._traces = 0
        self._queue.sweep()
        self._timers = [timer for timer in self._timers if self._is_running(timer)]
        heapify(self._timers)
        self._sweep_sent()

    def _sweep_sent(self) -> None:
        self._sent = deque(
            (sent_at, entry) for sent_at, entry in self._sent if _is_timed(sent_at, entry)
        )

    # -- progress ---------------------------------------------------------------------------

    @property
    def cursor(self) -> int:
        """The first offset that is not acknowledged."""
        return self._floor.floor

    def saved(self) -> dict[str, Any]:
        """What a successor has to know besides the cursor, as JSON; bounded.

        Acknowledged ranges and failures beyond the bounds are left out, the highest ones first:
        those messages come again, or are tried more often.
        """
        failures = dict(self._remembered)
        for offset in self._failed:
            entry = self._entries[offset]
            failures[offset] = (entry.failures, entry.reason)
        failed: list[list[Any]] = []
        room = _SAVED_REASON_BYTES_MAX
        for offset in sorted(failures)[:_SAVED_FAILURES_MAX]:
            count, reason = failures[offset]
            room -= len(json.dumps(reason))
            failed.append([offset, count, reason if room >= 0 else None])
        made = self._floor.to_json()
        ends = [made["end"], *(offset + 1 for offset, _, _ in failed[-1:])]
        return {**made, "failed": failed, "end": max(ends)}

    def _restore(self, saved: Mapping[str, Any], cursor: int, end: int | None) -> None:
        try:
            floor = AckFloor.from_json(saved, floor=cursor)
            is_behind = int(saved["floor"]) > cursor
            failed = {
                int(offset): (int(count), None if reason is None else str(reason))
                for offset, count, reason in saved.get("failed", ())
            }
        except (CorruptDataError, KeyError, TypeError, ValueError, OverflowError) as error:
            _log.error("a subscription's saved state is left aside", extra={"error": str(error)})
            return
        if is_behind or (end is not None and end < cursor):
            return
        if end is not None:
            floor.clip(end)
        self._floor = floor
        self._remembered = {
            offset: (count, reason)
            for offset, (count, reason) in failed.items()
            if count > 0 and not floor.is_acked(offset) and (end is None or offset < end)
        }

    def seek(self, offset: int, *, now: float) -> None:
        """Goes on from another offset, and forgets everything else; consumers stay attached.

        What they have in flight may still be acknowledged, and counts if it lies ahead.

        Raises:
            InvalidRequestError: The offset is negative.
        """
        if offset < 0:
            raise InvalidRequestError(f"seek to offset {offset}")
        self._note_time(now)
        self._entries.clear()
        self._queue.reset()
        for container in (self._remembered, self._failed, self._blocked, self._sent, self._timers):
            container.clear()
        self._outbox.clear()
        self._traces = 0
        self._floor = AckFloor(offset)
        self.next_offset = offset
        self.version += 1
        for consumer in self._attached.values():
            consumer.flight.clear()
            consumer.unseen.clear()
            self._queue.note_free(consumer)

    # -- settings ---------------------------------------------------------------------------

    @property
    def policy(self) -> FailurePolicy:
        """What becomes of messages that fail."""
        return self._policy

    @property
    def window(self) -> int:
        """How many unacknowledged messages a consumer may have."""
        return self._window

    def set_policy(self, policy: FailurePolicy, now: float) -> None:
        """Another policy from now on; what is blocked, or to be handed out, is judged by it.

        What was handed out already is still to be resolved.
        """
        self._note_time(now)
        self._policy = policy
        outbox, self._outbox = self._outbox, []
        judged = [self._entries[offset] for offset in sorted(self._blocked)]
        judged += [entry for entry in outbox if entry.state is State.HANDED]
        self._blocked.clear()
        self._queue.block_at = None
        for entry in judged:
            self._judge(entry)

    def set_window(self, window: int) -> None:
        """Another window from now on; what is in flight beyond it stays so.

        Raises:
            InvalidRequestError: It is not at least 1.
        """
        _check_window(window)
        self._window = window
        for consumer in self._attached.values():
            self._queue.note_free(consumer)

    # -- looking ----------------------------------------------------------------------------

    @property
    def blocked_count(self) -> int:
        """How many messages block."""
        return len(self._blocked)

    def stats(self) -> DeliveryStats:
        """A subscription at a glance; looks at every message that is held."""
        in_flight = pending = waiting = unresolved = 0
        # Somebody looks every other second, at hundreds of thousands: no hash of an enumeration.
        queued, waiting_retry = State.QUEUED, State.WAITING
        handed, postponed = State.HANDED, State.POSTPONED
        for entry in self._entries.values():
            state = entry.state
            if state is _SENT:
                in_flight += 1
            elif state is queued:
                pending += 1
            elif state is waiting_retry:
                waiting += 1
            elif state is handed or state is postponed:
                unresolved += 1
        if self._lanes is not None:
            pending += self._lanes.waiting
        return DeliveryStats(
            cursor=self.cursor,
            next_offset=self.next_offset,
            in_flight=in_flight,
            pending=pending,
            waiting_retry=waiting,
            unresolved=unresolved,
            blocked=min(self._blocked, default=None),
            blocked_count=len(self._blocked),
            acked_ranges=self._floor.range_count,
            consumers=len(self._attached),
            known_consumers=len(self._known),
        )

    def validate_state(self) -> None:
        """Checks every invariant. Looks at everything: for tests.

        Raises:
            InvariantError: One does not hold.
        """
        self._floor.validate()
        self._validate_messages()
        self._validate_consumers()
        self._validate_timers()
        check(
            self._queue.block_at == min(self._blocked, default=None),
            "the line is blocked elsewhere",
        )
        self._queue.validate(self._attached, self._window)

    def _validate_messages(self) -> None:
        floor = self._floor
        held = len(self._entries)
        waiting = set() if self._lanes is None else set(self._lanes.offsets())
        check(not waiting & self._entries.keys(), "sent, and waiting to be sent for the first time")
        held += len(waiting)
        if self.next_offset > floor.floor:
            owed = self.next_offset - floor.floor - floor.count_below(self.next_offset)
            check(owed == held, f"{owed} messages are owed, and {held} are held")
        else:
            check(held == 0, f"{held} messages are held, and none is owed")
        by_state: dict[State, set[int]] = {state: set() for state in State}
        for offset, entry in self._entries.items():
            check(entry.offset == offset, f"{entry} is held as {offset}")
            check(floor.floor <= offset < self.next_offset, f"{entry} is outside of what was read")
            check(not floor.is_acked(offset), f"{entry} is acknowledged")
            check((entry.failures > 0) == (offset in self._failed), f"{entry} is not on record")
            by_state[entry.state].add(offset)
        check(not by_state[State.DONE], f"done and held: {by_state[State.DONE]}")
        check(by_state[State.BLOCKED] == self._blocked, "other messages are blocked")
        check(self._failed <= self._entries.keys(), "failures of messages that are not held")
        for offset in self._remembered:
            check(
                (offset >= self.next_offset or offset in waiting) and not floor.is_acked(offset),
                f"the failures of {offset} are kept apart",
            )
        limit = self._policy.max_redelivery_count
        for state in (State.BLOCKED, State.HANDED, State.POSTPONED):
            early = {o for o in by_state[state] if self._entries[o].failures == 0}
            check(not early, f"{early} never failed, with at most {limit} failures allowed")

    def _validate_consumers(self) -> None:
        in_windows: set[int] = set()
        for name, consumer in self._known.items():
            check(consumer.id == name, f"consumer {consumer.id} is known as {name}")
            check(consumer.is_attached == (name in self._attached), f"{name} is half attached")
            check(consumer.room >= 0, f"{name} has room for {consumer.room}")
            check(consumer.is_attached or not consumer.flight, f"{name} is away and has messages")
            for offset, entry in consumer.flight.items():
                check(self._entries.get(offset) is entry, f"{entry} is in a window and not held")
                check(entry.consumer is consumer, f"{entry} is in the window of {name} as well")
                check(entry.state in (State.SENT, State.WAITING), f"{entry} is in a window")
            in_windows.update(consumer.flight)
        check(self._attached.keys() <= self._known.keys(), "attached and not known")
        if self.kind is SubscriptionKind.EXCLUSIVE:
            check(len(self._attached) <= 1, "two have an exclusive subscription")
        for offset, entry in self._entries.items():
            check(
                (entry.consumer is not None) == (offset in in_windows), f"{entry} is in no window"
            )
            check(entry.state is not State.SENT or offset in in_windows, f"{entry} is with nobody")

    def _validate_timers(self) -> None:
        timeouts = {(entry.offset, sent_at) for sent_at, entry in self._sent}
        times = [sent_at for sent_at, _ in self._sent]
        check(times == sorted(times), "timeouts are out of order")
        timers = {(offset, due) for due, offset in self._timers}
        unseen: set[tuple[int, int]] = set()
        watched = [name for _, name in self._silences]
        check(len(watched) == len(set(watched)), f"watched twice: {watched}")
        for name, consumer in self._known.items():
            numbers = [number for number, _ in consumer.unseen]
            check(numbers == sorted(set(numbers)), f"unseen out of order at {name}")
            check(not numbers or consumer.is_watched, f"{name} may be silent for ever")
            check(consumer.is_watched == (name in watched), f"{name} is half watched")
            unseen.update((entry.offset, number) for number, entry in consumer.unseen)
        for offset, entry in self._entries.items():
            if entry.state is State.SENT and entry.is_written and not entry.is_seen:
                check((offset, entry.number) in unseen, f"{entry} is neither seen nor unseen")
            elif entry.state is State.SENT:
                check((offset, entry.sent_at) in timeouts, f"{entry} never times out")
            elif entry.state in (State.WAITING, State.POSTPONED):
                check((offset, entry.due) in timers, f"{entry} waits for ever")


def _is_timed(sent_at: float, entry: Entry) -> bool:
    """Whether a message has waited since `sent_at`: to be written or, once seen, for an answer."""
    return entry.state is _SENT and entry.sent_at == sent_at and entry.is_written == entry.is_seen


def _is_unseen(number: int, entry: Entry) -> bool:
    """Whether a message that was sent under a number is still in flight, and not known as seen."""
    return entry.number == number and entry.state is _SENT and not entry.is_seen


def _trim(unseen: deque[tuple[int, Entry]]) -> bool:
    """Removes messages that are no longer in flight from the front; whether one is left."""
    while unseen and not _is_unseen(*unseen[0]):
        unseen.popleft()
    return bool(unseen)


def _check_window(window: int) -> None:
    if window < 1:
        raise InvalidRequestError(
            f"a window of {window} messages", hint="a consumer has at least one unacknowledged"
        )
