"""A reliable subscription at work: the log is read, consumers get messages, the cursor is kept.

    log ─ Reading ─► Delivery (decides) ─ Send ─► outboxes ─► consumers' streams
                      ▲        │  ├ DeadLetter ─► another topic
     acks, nacks ─────┘        │  └ Drop
                               └─ cursor ─► metadata store, by time and by distance

Owns: consumers, outcomes, settings and the cursor of one subscription. Does not own: decisions
about delivery (`ister.subscription.delivery`), readers and bytes (`ister.broker.reading`),
streams (`ister.broker.services`), consumers' ids.

All of it runs on the broker's loop. Whatever happens ends in `_pump`, which carries out what the
machine decides. What the machine has in mind is offsets.

What a crash leaves: the cursor as it was last written, with the offsets acknowledged beyond it and
the failures counted so far. What was acknowledged since comes again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from ister import failpoints, threads
from ister.broker.budget import Budget
from ister.broker.counters import SubscriptionCounters, TopicCounters
from ister.broker.letters import has_used_up_hops, make_letter
from ister.broker.outbox import TAKEN_OVER_SECONDS, Outbox
from ister.broker.policies import Rate
from ister.broker.reading import Reading
from ister.broker.tasks import to_the_end
from ister.errors import (
    ClosedError,
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    IsterError,
    MessageTooLargeError,
    UnavailableError,
)
from ister.metrics import Metrics
from ister.model import StreamMessage, TopicName
from ister.subscription.delivery import AckResult, DeadLetter, Delivery, Drop, Send
from ister.subscription.policy import FailurePolicy, SubscriptionKind
from ister.subscription.progress import ProgressPlan
from ister.subscription.receipts import Receipts
from ister.subscription.store import StoredSubscription, SubscriptionStore
from ister.tier.ownership import OwnedTopic
from ister.topic.message import Message
from ister.topic.topic import Topic

__all__ = ["Dispatch", "Sent"]

_log = logging.getLogger("ister.broker.dispatch")

_RETRY_SECONDS: Final = 1.0
_DEAD_LETTER_RETRY_MS: Final = 2000

Sent = tuple[int, int]
"""An offset, and which attempt it is."""
PublishDeadLetter = Callable[[str, StreamMessage], Awaitable[None]]


class Dispatch:
    """One subscription of one topic. Used on the broker's loop alone."""

    def __init__(
        self,
        topic: Topic,
        stored: StoredSubscription,
        *,
        store: SubscriptionStore,
        budget: Budget,
        window: int,
        plan: ProgressPlan,
        rate: Rate,
        grace_seconds: float,
        publish_dead_letter: PublishDeadLetter,
        on_fenced: Callable[[], None],
        metrics: Metrics,
        counters: SubscriptionCounters | None = None,
    ) -> None:
        self.topic = topic
        self.counters = counters or SubscriptionCounters(TopicCounters())
        self._parsed = TopicName.parse(topic.name)
        self.stored = stored
        self.rate = rate
        self._store = store
        self._default_window = window
        self._plan = plan
        self._grace = grace_seconds
        self._publish_dead_letter = publish_dead_letter
        self._on_fenced = on_fenced
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self.delivery = Delivery(
            kind=stored.kind,
            policy=stored.policy,
            window=stored.window or window,
            # Beyond the end only while a damaged topic takes no messages: see `Topics`.
            cursor=min(stored.cursor, topic.wal.next),
            saved=stored.saved,
            end=topic.wal.next,
            waits_for_writes=True,
        )
        self.receipts = Receipts(stored.receipt_key)
        self._outboxes: dict[int, Outbox[Sent]] = {}
        self.reading = Reading(
            topic,
            self.delivery,
            name=stored.name,
            budget=budget,
            rate=rate,
            pump=self._pump,
            on_passed_over=self._note_passed_over,
            on_end=self.end_streams,
            on_fenced=on_fenced,
        )
        self._forgetting: dict[int, asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self._flushing = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flushes: set[asyncio.Task[None]] = set()
        self._is_closed = False
        # Counts as active at first: consumers of the previous broker process may reconnect.
        self._active_at = self._loop.time()
        self._active_cursor = self.delivery.cursor
        plan.written(stored.cursor, self._loop.time(), version=self.delivery.version)
        for consumer in stored.consumers.values():
            # It may come back: until then nobody passes over what it would take.
            self.delivery.remember(consumer.id, filters=consumer.filters)
            self._forget_later(consumer.id)

    @property
    def name(self) -> str:
        """The subscription's."""
        return self.stored.name

    @property
    def kind(self) -> SubscriptionKind:
        """Who gets what."""
        return self.stored.kind

    @property
    def end(self) -> int:
        """The first offset that no consumer may see yet."""
        return self.topic.wal.visible

    @property
    def window(self) -> int:
        """Messages that a consumer may have and not have acknowledged."""
        return self.delivery.window

    @property
    def lag(self) -> int:
        """Messages from the cursor to the end."""
        return max(0, self.end - self.delivery.cursor)

    @property
    def attached(self) -> list[int]:
        """The consumers with a stream."""
        return list(self._outboxes)

    def is_active(self, grace_seconds: float) -> bool:
        """Whether a consumer is connected, or the subscription was used in the grace period.

        Used means that a consumer was connected or the cursor moved. May be called by any thread.
        """
        return bool(self._outboxes) or self._loop.time() - self._active_at <= grace_seconds

    # -- consumers --------------------------------------------------------------------------

    def expect(self, consumer: int, filters: Sequence[str]) -> None:
        """Keeps messages for a consumer that has subscribed, until its stream is there."""
        if not self._is_closed and consumer not in self._outboxes:
            self.delivery.remember(consumer, filters=tuple(filters))
            self._forget_later(consumer)

    def attach(
        self,
        consumer: int,
        filters: Sequence[str],
        *,
        reports: bool = False,
        elsewhere: Callable[[], float] | None = None,
    ) -> Outbox[Sent]:
        """Begins to deliver to a consumer; a stream that it had before ends.

        Args:
            consumer: Its id.
            filters: Which keys it takes.
            reports: Whether it says what its program has received; see `received`.
            elsewhere: As of `Delivery.attach`.

        Raises:
            ConflictError: The subscription is exclusive, and somebody else has it.
            ClosedError: The topic is about to be closed.
        """
        if self._is_closed:
            raise ClosedError("the topic is being closed", topic=self.topic.name)
        now = self._loop.time()
        others = [other for other in self._outboxes if other != consumer]
        if self.kind is SubscriptionKind.EXCLUSIVE and others:
            raise ConflictError(
                f"subscription {self.name!r} is exclusive, and has a consumer",
                topic=self.topic.name,
            )
        before = self._outboxes.pop(consumer, None)
        if before is not None:
            before.end(after_seconds=TAKEN_OVER_SECONDS)
        self.delivery.attach(
            consumer, filters=tuple(filters), reports=reports, elsewhere=elsewhere, now=now
        )
        outbox: Outbox[Sent] = Outbox(consumer)
        self._outboxes[consumer] = outbox
        self.delivery.set_room(consumer, outbox.room)
        self.reading.start()
        self._pump()
        if self.kind is SubscriptionKind.KEY_SHARED:
            self.reading.discard_done()  # what it took by the filters that it had before
        return outbox

    def detach(self, outbox: Outbox[Sent]) -> None:
        """Ends delivery to a consumer; what it has not acknowledged goes to others, or waits."""
        consumer = outbox.consumer
        self.reading.note_written(outbox)
        if self._outboxes.get(consumer) is not outbox:
            return  # another stream of the same consumer has taken over
        del self._outboxes[consumer]
        self._active_at = self._loop.time()
        outbox.end()
        self.delivery.detach(consumer, now=self._loop.time())
        self._forget_later(consumer)
        if not self._outboxes:
            self.reading.stop()
        self._pump()

    def _forget_later(self, consumer: int) -> None:
        before = self._forgetting.pop(consumer, None)
        if before is not None:
            before.cancel()
        if self._is_closed:
            return
        self._forgetting[consumer] = self._loop.call_later(self._grace, self._forget, consumer)

    def _forget(self, consumer: int) -> None:
        self._forgetting.pop(consumer, None)
        if not self._is_closed and consumer not in self._outboxes:
            self.delivery.forget(consumer, now=self._loop.time())
            self._pump()
            self.reading.discard_done()
            self._pump()

    def written(self, outbox: Outbox[Sent], count: int) -> None:
        """Notes that a stream has written so many messages, so there is room for more."""
        outbox.written(count)
        self.reading.note_written(outbox)
        if self._outboxes.get(outbox.consumer) is outbox:
            self.delivery.set_room(outbox.consumer, outbox.room)
            self._pump()

    async def next_message(self, outbox: Outbox[Sent], offset: int) -> Message | None:
        """A message that leaves for a consumer now; None if it must not, or cannot."""
        delivery, consumer = self.delivery, outbox.consumer
        if self._outboxes.get(consumer) is not outbox or not delivery.is_due(consumer, offset):
            return None
        message = await self.reading.message(offset)
        if message is None or self._outboxes.get(consumer) is not outbox:
            return None
        if not delivery.begin_write(consumer, offset, now=self._loop.time()):
            return None
        self.reading.note_leaving(outbox, message)
        return message

    def readable(self, message: Message) -> StreamMessage | None:
        """The fields of a message that leaves; None if it has none, and then it counts as failed.

        Its frame is whole, so nothing is lost; another program wrote something else into it.
        """
        try:
            record = message.record
        except CorruptDataError as error:
            _log.error("a message is none", extra={"error": str(error), "offset": message.offset})
            self.fail(message.offset, "it cannot be decoded")
            return None
        self.counters.note_out(len(record.payload))
        return record

    def _note_passed_over(self, count: int) -> None:
        self.counters.passed_over += count
        self._metrics.count("subscription.messages_passed_over_total", count)

    # -- outcomes ---------------------------------------------------------------------------

    def received(self, consumer: int, offset: int) -> None:
        """Notes that a consumer's program has received a message, and those sent before it."""
        if not self._is_closed:
            self.delivery.received(consumer, offset, now=self._loop.time())
            self._pump()

    def ack(self, offset: int, consumer: int | None = None, *, attempt: int | None = None) -> None:
        """Takes an acknowledgement: in any order, twice, late. Trusts the caller; see `receipts`.

        Args:
            offset: Which message.
            consumer: Who says so; None for whoever has it.
            attempt: Which attempt it answers; None if that is not known.

        Raises:
            InvalidRequestError: There is no such message.
            UnavailableError: The cursor was written for the last time.
        """
        self._check_open()
        result = self.delivery.ack(
            offset, end=self.end, now=self._loop.time(), consumer=consumer, attempt=attempt
        )
        if result is AckResult.REFUSED:
            raise self.refuse(offset)
        self.reading.discard(offset)
        self._pump()

    def ack_by_id(self, offset: int, stamped: str) -> int:
        """Acknowledges a message by its id: the offset, and the broker address with the receipt.

        Returns:
            The consumer that the message was delivered to.

        Raises:
            InvalidRequestError: The subscription has delivered no such message.
            UnavailableError: The cursor was written for the last time.
        """
        self._check_open()
        found = self.receipts.find_delivery(stamped, offset)
        if found is None:
            raise self.refuse(offset)
        consumer, attempt = found
        self.ack(offset, consumer, attempt=attempt)
        return consumer

    def ack_many(self, offsets: Sequence[int], tokens: Sequence[int], consumer: int) -> list[int]:
        """Acknowledges messages of a consumer; returns those that count, or did before.

        Args:
            offsets: The messages, in any order.
            tokens: The receipt of each; without receipts, only messages in flight to the consumer
                can be acknowledged.
            consumer: The consumer that they were delivered to.

        Raises:
            InvalidRequestError: There are more or fewer receipts than messages.
            UnavailableError: The cursor was written for the last time.
        """
        self._check_open()
        if tokens and len(tokens) != len(offsets):
            raise InvalidRequestError(f"{len(offsets)} acknowledgements, {len(tokens)} receipts")
        now, end, delivery, find_attempt = (
            self._loop.time(),
            self.end,
            self.delivery,
            self.receipts.find_attempt,
        )
        taken = []
        for number, offset in enumerate(offsets):
            attempt = find_attempt(tokens[number], consumer, offset) if tokens else None
            is_ours = attempt is not None if tokens else delivery.is_with(consumer, offset)
            if (
                is_ours
                and delivery.ack(offset, end=end, now=now, consumer=consumer, attempt=attempt)
                is not AckResult.REFUSED
            ):
                taken.append(offset)
                self.reading.discard(offset)
            else:
                self.refuse(offset)
        self._pump()
        return taken

    def refuse(self, offset: int) -> InvalidRequestError:
        """Counts an acknowledgement of a message that was not delivered; returns the error."""
        self.counters.acks_refused += 1
        self._metrics.count("subscription.acks_refused_total")
        return InvalidRequestError(
            f"subscription {self.name!r} has delivered no such message: it was not sent yet, or "
            "the topic or the subscription was deleted and created again",
            topic=self.topic.name,
            offset=offset,
        )

    def nack(
        self,
        offset: int,
        *,
        delay_ms: int | None,
        reason: str | None,
        consumer: int | None = None,
        attempt: int | None = None,
    ) -> None:
        """Has a message come again later; if a consumer is given, only one that it has."""
        self._check_open()
        if self.delivery.nack(
            offset,
            consumer=consumer,
            attempt=attempt,
            delay_ms=delay_ms,
            reason=reason,
            now=self._loop.time(),
        ):
            self.counters.nacks += 1
            self._metrics.count("subscription.nacks_total")
        self._pump()

    def fail(self, offset: int, reason: str) -> None:
        """Counts a message as failed that its consumer could not take."""
        if not self._is_closed and self.delivery.holds(offset):
            self.nack(offset, delay_ms=None, reason=reason)

    def _check_open(self) -> None:
        """What is told to a subscription after its last cursor would be forgotten."""
        if self._is_closed:
            raise UnavailableError("the topic is being closed", topic=self.topic.name)

    # -- settings ---------------------------------------------------------------------------

    async def set_policy(self, policy: FailurePolicy) -> None:
        """Changes what happens to messages that fail, from now on."""
        await self._save_options(lambda stored: replace(stored, policy=policy))
        self.delivery.set_policy(policy, now=self._loop.time())
        self._pump()

    async def set_window(self, window: int) -> None:
        """Changes how many messages a consumer may have and not have acknowledged."""
        await self._save_options(lambda stored: replace(stored, window=window))
        self.delivery.set_window(window)
        self._pump()

    @property
    def principals(self) -> tuple[str, ...] | None:
        """Those who may use it; None for all who may consume the topic."""
        return self.stored.principals

    async def set_principals(self, principals: tuple[str, ...] | None) -> None:
        """Changes who may use it."""
        await self._save_options(lambda stored: replace(stored, principals=principals))

    async def save_consumers(self, stored: StoredSubscription) -> None:
        """Remembers who the consumers are."""
        await self._save_options(lambda known: replace(known, consumers=stored.consumers))

    async def _save_options(
        self, change: Callable[[StoredSubscription], StoredSubscription]
    ) -> None:
        async with self._saving:  # each change is made to what the one before it has left
            changed = change(self.stored)
            await asyncio.to_thread(
                self._store.save_options, self._parsed, changed, owned=self._owned
            )
            self.stored = changed

    async def seek(self, offset: int) -> None:
        """Goes on from another offset, for all consumers, and writes that down first."""
        await to_the_end(self._seek(offset))

    async def _seek(self, offset: int) -> None:
        async with self._flushing:
            self._check_open()
            await asyncio.to_thread(
                self._store.save_cursor,
                self._parsed,
                self.name,
                cursor=offset,
                saved={},
                incarnation=self.stored.incarnation,
                owned=self._owned,
                force=True,
            )
            now = self._loop.time()
            self.delivery.seek(offset, now=now)
            for consumer, outbox in self._outboxes.items():
                outbox.clear()
                self.delivery.set_room(consumer, outbox.room)
            self.reading.restart()
            self._plan.written(offset, now, version=self.delivery.version)
        self._pump()

    @property
    def _owned(self) -> OwnedTopic | None:
        tier = self.topic.tier
        return tier.owned if tier is not None else None

    # -- the pump ---------------------------------------------------------------------------

    def _pump(self) -> None:
        """Carries out what the machine decides, and sees that it is asked again in time."""
        if self._is_closed:
            return
        delivery, now = self.delivery, self._loop.time()
        delivery.tick(now)
        while instructions := delivery.take():
            for instruction in instructions:
                if type(instruction) is Send:
                    outbox = self._outboxes.get(instruction.consumer)
                    if outbox is not None:
                        outbox.push((instruction.offset, instruction.attempt))
                        self.reading.expect(instruction.offset)
                        if instruction.attempt > 1:
                            self.counters.redeliveries += 1
                            self._metrics.count("subscription.redeliveries_total")
                elif isinstance(instruction, DeadLetter):
                    target = delivery.policy.dead_letter_topic or ""
                    self._spawn(self._dead_letter(instruction, target))
                elif isinstance(instruction, Drop):
                    _log.warning(
                        "a message was dropped after its last attempt",
                        extra={"topic": self.topic.name, "offset": instruction.offset},
                    )
                    self._note_dropped()
                    self.reading.discard(instruction.offset)
                    delivery.resolve(instruction.offset, now=now)
        self.reading.note_changed()
        self._schedule(delivery.deadline())
        self._note_progress(now)

    def _schedule(self, deadline: float | None) -> None:
        timer = self._timer
        if deadline is None:
            return
        if timer is not None and not timer.cancelled() and timer.when() <= deadline:
            return  # it looks again when it gets there
        if timer is not None:
            timer.cancel()
        self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()

    def _spawn(
        self, work: Coroutine[Any, Any, None], into: set[asyncio.Task[None]] | None = None
    ) -> None:
        tasks = self._tasks if into is None else into
        task = self._loop.create_task(work)
        threads.watch_task("ister-dispatch", task)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _dead_letter(self, instruction: DeadLetter, target: str) -> None:
        offset = instruction.offset
        try:
            message = await self.reading.message(offset)
            if message is not None and has_used_up_hops(message):
                _log.error(
                    "a message is dropped: it has passed through too many dead-letter topics",
                    extra={"topic": self.topic.name, "subscription": self.name, "offset": offset},
                )
                self._note_dropped()
            elif message is not None:
                await self._publish_letter(message, instruction, target)
                failpoints.reach("broker.after_dead_letter")
                self.counters.dead_letters += 1
                self._metrics.count("subscription.dead_letters_total")
        except Exception as error:  # noqa: BLE001 - whatever it is, the message is tried again
            if not isinstance(error, IsterError):
                threads.record("ister-dispatch", error, topic=self.topic.name)
            _log.warning(
                "a message could not be dead-lettered yet",
                extra={"topic": self.topic.name, "offset": offset, "error": str(error)},
            )
            self.delivery.unresolved(offset, now=self._loop.time(), delay_ms=_DEAD_LETTER_RETRY_MS)
        else:
            self.delivery.resolve(offset, now=self._loop.time())
        self._pump()

    async def _publish_letter(self, message: Message, instruction: DeadLetter, target: str) -> None:
        make = partial(
            make_letter,
            message,
            instruction,
            topic=self.topic.name,
            subscription=self.name,
            target=target,
        )
        try:
            await self._publish_dead_letter(target, make())
        except MessageTooLargeError:
            # Its own attributes leave no room for ours, or its body is all that there is.
            await self._publish_dead_letter(target, make(is_bare=True))

    def _note_dropped(self) -> None:
        self.counters.dropped += 1
        self._metrics.count("subscription.dropped_total")

    # -- progress ---------------------------------------------------------------------------

    def _note_progress(self, now: float) -> None:
        if self._is_closed:
            return
        plan = self._plan
        if self.delivery.cursor != self._active_cursor:
            self._active_cursor, self._active_at = self.delivery.cursor, now
        plan.note(self.delivery.cursor, now, version=self.delivery.version)
        if plan.is_due(now):
            if not self._flushing.locked():
                self._spawn(self._flush(), into=self._flushes)
        elif self._flush_timer is None:
            deadline = plan.deadline()
            if deadline is not None:
                self._flush_timer = self._loop.call_at(deadline, self._on_flush_timer)

    def _on_flush_timer(self) -> None:
        self._flush_timer = None
        if not self._is_closed:
            self._spawn(self._flush(), into=self._flushes)

    async def _flush(self) -> None:
        """Writes the cursor down; tries again by itself if that fails."""
        try:
            await self.flush()
        except FencedError:
            self._on_fenced()
        except IsterError as error:
            _log.warning("a cursor was not written", extra={"error": str(error)})
        # What was acknowledged meanwhile, or has to be tried again.
        self._note_progress(self._loop.time())

    async def flush(self) -> None:
        """Writes the cursor down.

        Raises:
            FencedError: Another broker has the topic.
            UnavailableError: The metadata store does not answer.
        """
        async with self._flushing:
            delivery = self.delivery
            cursor, saved, version = delivery.cursor, delivery.saved(), delivery.version
            failpoints.reach("broker.before_cursor")
            try:
                await asyncio.to_thread(
                    self._store.save_cursor,
                    self._parsed,
                    self.name,
                    cursor=cursor,
                    saved=saved,
                    incarnation=self.stored.incarnation,
                    owned=self._owned,
                )
            except IsterError:
                self._plan.failed(self._loop.time(), _RETRY_SECONDS)
                raise
            failpoints.reach("broker.after_cursor")
            self._plan.written(cursor, self._loop.time(), version=version)

    # -- the end ----------------------------------------------------------------------------

    def end_streams(self, reason: IsterError | None) -> None:
        """Has every consumer's stream end."""
        for outbox in list(self._outboxes.values()):
            outbox.end(reason)

    @property
    def is_dirty(self) -> bool:
        """Whether there is progress that is not written down."""
        self._plan.note(self.delivery.cursor, self._loop.time(), version=self.delivery.version)
        return self._plan.is_dirty

    async def close(self, reason: IsterError | None, *, flush: bool = True) -> None:
        """Ends all streams and writes the cursor down, if that can be done."""
        if self._is_closed:
            return
        self._is_closed = True
        self.end_streams(reason)
        for timer in (self._timer, self._flush_timer, *self._forgetting.values()):
            if timer is not None:
                timer.cancel()
        working = [*self._tasks, *self.reading.cancel()]
        for task in self._tasks:
            task.cancel()
        # A cursor that is being written is waited for: its thread would go on, and come last.
        await asyncio.gather(*working, *self._flushes, return_exceptions=True)
        self.reading.close()
        if flush and self.is_dirty:
            try:
                await self.flush()
            except IsterError as error:
                _log.warning("a cursor was not written at the end", extra={"error": str(error)})
