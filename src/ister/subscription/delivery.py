"""Decides which message is sent to which consumer, and what its answer means. Does no I/O.

    offered ─► queued ─► sent ─► acknowledged
                 ▲         │ nack, ack timeout
                 │         ▼
                 ├──── waiting ────► (too often) blocked, or given up ─► resolved

Owns: which message goes to which consumer, windows, failures, the ack floor. Does not own: I/O,
clocks (times are seconds, given with each event), payloads, threads. Not thread-safe.

The rules and bounds are in the header of this package.

Invariants, checked by `validate_state`: every offset from the floor up to `next_offset` is
acknowledged or held in exactly one state, or with key_shared waits in the queue of its key; what is
in flight is in the window of one attached consumer; see also `offset_queue`, `key_queues`, `timers`
and `floor`.

What a crash leaves: what `saved` gave to the store. What was acknowledged since is sent again;
attempts made since do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ister.errors import CapacityError, InvalidRequestError, InvariantError, check
from ister.subscription.consumer_set import ConsumerSet
from ister.subscription.entries import (
    AckResult,
    ConsumerState,
    DeliveryStats,
    Entry,
    Instruction,
    State,
)
from ister.subscription.floor import RANGES_MAX, AckFloor
from ister.subscription.key_queues import KeyQueues
from ister.subscription.offset_queue import OffsetQueue
from ister.subscription.policy import FailurePolicy, SubscriptionKind
from ister.subscription.receipts import ATTEMPT_MAX
from ister.subscription.redelivery import Redelivery
from ister.subscription.saved_state import Failures, SavedState, decode_saved, encode_saved
from ister.subscription.timers import Timers

KEYED_MESSAGES_MIN: Final = 1024
"""What key_shared reads ahead at least: a stuck key must not stop the others."""

KEYED_MESSAGES_MAX: Final = 4_000_000
"""Messages that key_shared reads past because a consumer is slow or away, and others are idle."""

KEYS_MAX: Final = 200_000
"""Keys of such messages: each takes some hundred bytes."""

_KEYED_STEP: Final = 512
_STUCK_SECONDS: Final = 10.0

# References to messages that are done, beyond as many as there are messages, before they are
# removed. Each message is referred to when it is taken and when it leaves, and perhaps once more.
_WAITS_FACTOR: Final = 4
_STALE_MIN: Final = 256

# Looked up once: each message passes here.
_SENT: Final = State.SENT
_DONE: Final = State.DONE


class Delivery:
    """The deliveries of one subscription; see the module header. Not thread-safe.

    `window`: how many unacknowledged messages a consumer may have.
    `cursor`: the first offset that is not acknowledged.
    `saved`: the state that `saved` returned before; see `decode_saved`.
    `waits_for_writes`: whether `begin_write` reports when a message is written to its stream. Until
    then it cannot fail: one that waits too long for that is redelivered, to any consumer that can
    take it. Otherwise a message counts as written when it is taken.
    """

    def __init__(
        self,
        *,
        kind: SubscriptionKind,
        policy: FailurePolicy,
        window: int,
        cursor: int,
        saved: SavedState | None = None,
        end: int | None = None,
        waits_for_writes: bool = False,
    ) -> None:
        _check_window(window)
        self._waits_for_writes = waits_for_writes
        self.kind = SubscriptionKind(kind)
        self.window = window
        """How many unacknowledged messages a consumer may have."""
        self._floor = AckFloor(cursor)
        restored: Failures = {}
        if saved is not None:
            self._floor, restored = decode_saved(saved, cursor, end)
        self.next_offset = self._floor.floor
        """The next offset to be offered. Below the cursor if messages were acknowledged unread."""
        self._acks = 0
        self.timeouts = 0
        """Messages that were not answered in time, so far."""
        self._entries: dict[int, Entry] = {}
        self._timers = Timers(self._entries, policy.ack_timeout_ms / 1000)
        self._redelivery = Redelivery(self._entries, self._timers, policy, restored)
        self._stale = 0
        has_one = self.kind in (SubscriptionKind.EXCLUSIVE, SubscriptionKind.FAILOVER)
        self._offsets = OffsetQueue(
            self._entries, apply_policy=self._redelivery.apply_policy, is_shared=not has_one
        )
        self._keys: KeyQueues | None = None
        if self.kind is SubscriptionKind.KEY_SHARED:
            self._keys = KeyQueues(
                self._entries,
                apply_policy=self._redelivery.apply_policy,
                pass_over=self._pass_over_keyed,
                is_acked=self._floor.is_acked,
                make=self._make_keyed,
            )
        self._queue: OffsetQueue | KeyQueues = self._keys or self._offsets
        self._redelivery.queue = self._queue
        self._consumers = ConsumerSet(self.kind, self._queue, self._timers, self._redelivery)
        self._attached = self._consumers.attached

    # -- consumers --------------------------------------------------------------------------

    @property
    def active(self) -> int | None:
        """The consumer that gets messages, for exclusive and failover; None for other kinds."""
        consumer = self._consumers.active()
        return None if consumer is None else consumer.id

    def remember(self, consumer: int, *, filters: Sequence[str] = ()) -> None:
        """Adds a consumer that is not attached, such as after a restart; see `attach`."""
        self._consumers.remember(consumer, filters)

    def attach(
        self,
        consumer: int,
        *,
        filters: Sequence[str] = (),
        reports: bool = False,
        active_elsewhere_at: Callable[[], float] | None = None,
        now: float,
    ) -> None:
        """Attaches a consumer that has opened a stream. It gets nothing until `set_room`.

        One that is attached already is sent what it has in flight again, and keeps its place.

        `filters`: which keys it takes; all without any.
        `reports`: whether it reports what its program has received; see `received`.
        `active_elsewhere_at`: returns when its program last answered at another partition, whose
        messages it handles in the same queue.

        Raises:
            ConflictError: The subscription is exclusive, and has another consumer.
        """
        self._advance(now)
        self._consumers.attach(
            consumer, filters=filters, reports=reports, active_elsewhere_at=active_elsewhere_at
        )

    def detach(self, consumer: int, *, now: float) -> None:
        """Detaches a consumer whose stream has ended: what it had goes to others, or waits."""
        self._advance(now)
        self._consumers.detach(consumer)

    def forget(self, consumer: int, *, now: float) -> None:
        """Removes a consumer: keys that only it took are passed over from now on."""
        self._advance(now)
        self._consumers.forget(consumer)

    def set_room(self, consumer: int, messages: int) -> None:
        """Sets how many more messages a consumer's outbound queue takes now; 0 stops it."""
        known = self._attached.get(consumer)
        if known is not None:
            known.room = max(0, messages)
            self._queue.give_turn(known)

    # -- messages ---------------------------------------------------------------------------

    def wanted(self) -> int:
        """How many further messages may be offered now."""
        keys = self._keys
        if not self._attached or (self._redelivery.blocked and keys is None):
            return 0
        shares = 1 if self._consumers.has_one_active else len(self._attached)
        bound = self.window * (shares + 1)
        if keys is None:
            return max(0, bound - len(self._entries))
        waiting = keys.waiting + len(self._entries)
        if waiting < (bound := max(4 * bound, KEYED_MESSAGES_MIN)):
            return bound - waiting
        is_too_much = waiting >= KEYED_MESSAGES_MAX or keys.key_count >= KEYS_MAX
        return 0 if is_too_much or not self.has_idle_consumer() else _KEYED_STEP

    def has_idle_consumer(self) -> bool:
        """Whether a consumer could take messages, and none of those that were read is for it."""
        if self._consumers.has_one_active or self._offsets.has_work:
            return False
        return any(
            consumer.can_take(self.window) and not consumer.ready and self._has_taken_all(consumer)
            for consumer in self._attached.values()
        )

    def _has_taken_all(self, consumer: ConsumerState) -> bool:
        newest = next(reversed(consumer.flight.values()), None)
        if newest is None:
            return True
        if self._keys is None:
            return newest.is_written
        # A consumer that is stuck for so long with a key must not stop those of other keys.
        return newest.sent_at + _STUCK_SECONDS <= self._timers.now

    def offer(self, messages: Iterable[tuple[int, str]], *, now: float) -> None:
        """Takes in messages as they are in the log, from `next_offset` on, without a gap.

        `messages`: offset and key of each. Messages that were offered before, or are acknowledged,
        are skipped.

        Raises:
            InvariantError: There is a gap before a message. Those before it have been taken in.
        """
        self._advance(now)
        expected = self.next_offset
        floor, entries, keys, offsets = self._floor, self._entries, self._keys, self._offsets
        restored = self._redelivery.restored
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
                if keys is not None:
                    if not keys.add(offset, key):
                        self._pass_over_keyed(offset, offset + 1)
                    continue
                entry = Entry(offset, key)
                entries[offset] = entry
                if restored:
                    self._redelivery.restore(entry)
                offsets.add(entry)
        finally:
            self.next_offset = expected

    def is_due(self, consumer: int, offset: int) -> bool:
        """Whether a message that was assigned to a consumer still is, and is not written yet."""
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
        """Records that a message is written to its stream; False if it must not be any more."""
        entry = self._entries.get(offset)
        if entry is None or entry.state is not _SENT or entry.is_written:
            return False
        holder = entry.consumer
        if holder is None or holder.id != consumer:
            return False
        timers = self._timers
        if now > timers.now:  # noqa: PLR1730 - `max` takes three times as long
            timers.now = now
        timers.write(entry, holder)
        return True

    def received(self, consumer: int, offset: int, *, now: float) -> None:
        """Records that a program has received a message, and all that were sent to it before."""
        self._advance(now)
        known = self._attached.get(consumer)
        if known is not None:
            self._consumers.record_contact(known)
            if self.is_with(consumer, offset):
                self._timers.mark_received(known, self._entries[offset].number)

    def pass_over(self, end: int) -> None:
        """Continues reading at `end`: messages before it do not exist, and count as done."""
        self._floor.ack_range(self.next_offset, end)
        restored = self._redelivery.restored
        for offset in [at for at in restored if self.next_offset <= at < end]:
            del restored[offset]
        self.next_offset = max(self.next_offset, end)
        self._acks += 1

    def holds(self, offset: int) -> bool:
        """Whether a message that was offered is still to be acknowledged."""
        if offset in self._entries:
            return True
        return (
            self._keys is not None
            and offset < self.next_offset
            and not self._floor.is_acked(offset)
        )

    def _make_keyed(self, offset: int, key: str) -> Entry:
        """Makes the entry of a message that is about to be sent for the first time."""
        entry = self._entries[offset] = Entry(offset, key)
        if self._redelivery.restored:
            self._redelivery.restore(entry)
        return entry

    def _pass_over_keyed(self, start: int, end: int) -> None:
        """Counts a range of messages that match no filter as done."""
        entry = self._entries.get(start)
        if entry is not None:
            self._finish(entry)
            return
        self._floor.ack_range(start, end)
        self._acks += 1
        if self._redelivery.restored:
            for offset in range(start, end):
                self._redelivery.restored.pop(offset, None)

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
        """Takes an acknowledgement, of any consumer and of any age.

        `end`: the log's visible end: no consumer can have a message beyond it.
        `consumer`: the consumer that answers; None for the one that has it.
        `attempt`: the attempt that is answered, up to `ATTEMPT_MAX`; None if it is not known.
        """
        self._advance(now)
        if offset >= end:
            return AckResult.REFUSED
        entry = self._entries.get(offset)
        self._record_answer(entry, consumer, attempt)
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
            self._stale += 1  # in the queue of its key
        self._redelivery.restored.pop(offset, None)
        self._acks += 1
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
        """Takes a negative acknowledgement; returns whether it counts as a failure.

        It counts only for a message in flight to the consumer: others are delivered again anyway,
        or are with another consumer by now. `delay_ms` and `reason` are what the consumer gives;
        `consumer` and `attempt` are as for `ack`.
        """
        self._advance(now)
        entry = self._entries.get(offset)
        if entry is None or entry.state is not State.SENT:
            return False
        if consumer is not None and not self.is_with(consumer, offset):
            return False
        self._record_answer(entry, consumer, attempt)
        self._redelivery.fail(entry, reason, delay_ms)
        return True

    def resolve(self, offset: int, *, now: float) -> None:
        """Records that a `DeadLetter` or `Drop` was carried out, durably: the message is done."""
        self._advance(now)
        entry = self._entries.get(offset)
        if entry is not None and entry.state in (State.GIVEN_UP, State.POSTPONED):
            self._finish(entry)

    def unresolved(self, offset: int, *, now: float, delay_ms: int) -> None:
        """Records that a `DeadLetter` or `Drop` failed: it is given again after a while."""
        self._advance(now)
        entry = self._entries.get(offset)
        if entry is not None and entry.state is State.GIVEN_UP:
            entry.state = State.POSTPONED
            self._timers.start_delay(entry, delay_ms)

    def _record_answer(
        self, entry: Entry | None, consumer: int | None, attempt: int | None
    ) -> None:
        """Records an answer: the program has all messages that were sent to it before this one."""
        holder = entry.consumer if entry is not None and entry.state is _SENT else None
        if holder is not None and consumer in (None, holder.id):
            self._consumers.record_contact(holder)
            if entry is not None and entry.is_written:
                failures = entry.failures
                if not failures or attempt == min(failures + 1, ATTEMPT_MAX):
                    self._timers.mark_received(holder, entry.number, but=entry)
        elif consumer is not None and consumer in self._attached:
            self._consumers.record_contact(
                self._attached[consumer]
            )  # of a message that it no longer has

    def _finish(self, entry: Entry) -> None:
        """Removes a message that is acknowledged, resolved or passed over."""
        offset, state, consumer = entry.offset, entry.state, entry.consumer
        del self._entries[offset]
        entry.state = _DONE
        # Held messages bound the ranges: between two there is one of these.
        self._floor.ack(offset, None)
        self._acks += 1
        if entry.failures:
            self._redelivery.failed.discard(offset)
        if consumer is not None:
            entry.consumer = None
            del consumer.flight[offset]
            self._queue.give_turn(consumer)
            if consumer.unreceived and consumer.unreceived[0][1] is entry:
                # Another consumer has acknowledged it; the next one becomes the oldest.
                consumer.unreceived.popleft()
                consumer.last_contact_at = self._timers.now
        if state is not _SENT:
            self._stale += 1
            if state is State.BLOCKED:
                self._redelivery.unblock(offset)
        if self._keys is not None:
            self._keys.leave(entry)

    # -- time -------------------------------------------------------------------------------

    @property
    def due_at(self) -> float:
        """Seconds: before this time `tick` has nothing to do. Not later than `deadline`."""
        return self._timers.due_at

    def deadline(self) -> float | None:
        """When `tick` has something to do; None if nothing is coming."""
        return self._timers.deadline()

    def _advance(self, now: float) -> None:
        if now > self._timers.now:  # noqa: PLR1730 - `max` takes three times as long
            self._timers.now = now

    def tick(self, now: float) -> None:
        """Handles what is due at `now`: ack timeouts, silent consumers, ends of delays."""
        self._advance(now)
        timers = self._timers
        if now < timers.due_at:
            return
        while (entry := timers.pop_timed_out()) is not None:
            if entry.is_received:
                self._time_out(entry)
            else:
                self._redelivery.requeue(entry)  # it was not even written
        while (consumer := timers.silent_consumer()) is not None:
            if self._consumers.extend_silence(consumer):
                continue
            consumer.last_contact_at = timers.now  # the next message becomes the oldest
            if not consumer.reports:
                self._time_out(consumer.unreceived.popleft()[1])
            self._consumers.stall(consumer)
        while (entry := timers.pop_delayed()) is not None:
            if entry.state is State.WAITING:
                self._redelivery.requeue(entry)
            else:
                self._redelivery.apply_policy(entry)
        timers.reschedule()

    def _time_out(self, entry: Entry) -> None:
        self.timeouts += 1
        self._redelivery.fail(entry, f"no answer in {self.policy.ack_timeout_ms} ms", None)

    # -- instructions -----------------------------------------------------------------------

    def take(self, now: float | None = None) -> list[Instruction]:
        """Returns what is to be done at `now`, or at the last event; each instruction once."""
        if now is not None:
            self._advance(now)
        timers, keys, redelivery = self._timers, self._keys, self._redelivery
        instructions: list[Instruction] = []
        if redelivery.given_up or self._queue.has_work:
            sends, sent = self._queue.send(
                self._consumers.active(),
                window=self.window,
                failures_max=redelivery.policy.max_redelivery_count,
                now=timers.now,
            )
            if not self._waits_for_writes:
                for entry in sent:
                    assert entry.consumer is not None  # noqa: S101 - for mypy
                    timers.write(entry, entry.consumer)
            elif sent:
                timers.expect_write(sent)
            if redelivery.given_up:
                instructions += redelivery.take_given_up()
            instructions += sends
        stale, waiting = self._stale, 0 if keys is None else keys.waiting
        if stale > _STALE_MIN // 2 and stale > len(self._entries) + _STALE_MIN + waiting - stale:
            self._stale = 0
            self._queue.sweep()
            timers.sweep()
        elif len(timers.waits) > _WAITS_FACTOR * len(self._entries) + _STALE_MIN:
            timers.sweep_waits()
        return instructions

    # -- progress ---------------------------------------------------------------------------

    @property
    def cursor(self) -> int:
        """The first offset that is not acknowledged."""
        return self._floor.floor

    @property
    def version(self) -> int:
        """Changes whenever the cursor, or what `saved` returns, has changed."""
        return self._acks + self._redelivery.version

    def saved(self) -> dict[str, object]:
        """Returns what a successor has to know besides the cursor, as JSON; bounded."""
        return encode_saved(self._floor, self._redelivery.failures())

    def seek(self, offset: int, *, now: float) -> None:
        """Continues from another offset, and forgets everything else; consumers stay attached.

        What they have in flight may still be acknowledged, and counts if it lies ahead.
        """
        if offset < 0:
            raise InvalidRequestError(f"offset must not be negative: {offset}")
        self._advance(now)
        self._entries.clear()
        self._queue.reset()
        self._timers.clear()
        self._redelivery.clear()
        self._stale = 0
        self._floor.reset(offset)
        self.next_offset = offset
        self._acks += 1
        for consumer in self._attached.values():
            consumer.flight.clear()
            consumer.unreceived.clear()
            self._queue.give_turn(consumer)

    # -- settings ---------------------------------------------------------------------------

    @property
    def policy(self) -> FailurePolicy:
        """What happens to messages that fail."""
        return self._redelivery.policy

    def set_policy(self, policy: FailurePolicy, now: float) -> None:
        """Changes the policy, also for messages that are blocked or about to be given up."""
        self._advance(now)
        self._timers.timeout = policy.ack_timeout_ms / 1000
        self._timers.due_at = float("-inf")  # timeouts may be shorter than they were
        self._redelivery.set_policy(policy)

    def set_window(self, window: int) -> None:
        """Changes the window; what is in flight beyond it stays in flight."""
        _check_window(window)
        self.window = window
        for consumer in self._attached.values():
            self._queue.give_turn(consumer)

    # -- inspection -------------------------------------------------------------------------

    @property
    def blocked_count(self) -> int:
        """How many messages block."""
        return len(self._redelivery.blocked)

    @property
    def exhausted(self) -> int:
        """Messages that failed too often, so far."""
        return self._redelivery.exhausted

    def stats(self) -> DeliveryStats:
        """Returns a summary; examines every message that is held."""
        in_flight = pending = waiting = unresolved = 0
        # Called every other second, for hundreds of thousands: without hashing enumerations.
        queued, waiting_retry = State.QUEUED, State.WAITING
        given_up, postponed = State.GIVEN_UP, State.POSTPONED
        for entry in self._entries.values():
            state = entry.state
            if state is _SENT:
                in_flight += 1
            elif state is queued:
                pending += 1
            elif state is waiting_retry:
                waiting += 1
            elif state is given_up or state is postponed:
                unresolved += 1
        if self._keys is not None:
            pending += self._keys.waiting
        return DeliveryStats(
            cursor=self.cursor,
            next_offset=self.next_offset,
            in_flight=in_flight,
            pending=pending,
            waiting_retry=waiting,
            unresolved=unresolved,
            blocked=min(self._redelivery.blocked, default=None),
            blocked_count=self.blocked_count,
            consumers=len(self._attached),
            known_consumers=len(self._consumers.known),
        )

    def validate_state(self) -> None:
        """Checks every invariant. Examines everything: for tests."""
        self._floor.validate()
        self._validate_messages()
        self._consumers.validate(self._entries)
        self._timers.validate(self._consumers.known)
        self._queue.validate(self._attached, self.window)

    def _validate_messages(self) -> None:
        floor, entries = self._floor, self._entries
        waiting = set() if self._keys is None else set(self._keys.offsets())
        check(not waiting & entries.keys(), "sent, and waiting to be sent for the first time")
        held = len(entries) + len(waiting)
        owed = 0
        if self.next_offset > floor.floor:
            owed = self.next_offset - floor.floor - floor.count_below(self.next_offset)
        check(owed == held, f"{owed} messages are unacknowledged, and {held} are held")
        for offset, entry in entries.items():
            check(entry.offset == offset, f"{entry} is held as {offset}")
            check(floor.floor <= offset < self.next_offset, f"{entry} is outside of what was read")
            check(not floor.is_acked(offset), f"{entry} is acknowledged")
            check(entry.state is not State.DONE, f"{entry} is done and held")
        self._redelivery.validate(floor, self.next_offset, waiting)


def _check_window(window: int) -> None:
    if window < 1:
        raise InvalidRequestError(
            f"invalid window: {window} messages", hint="a window has at least 1 message"
        )
