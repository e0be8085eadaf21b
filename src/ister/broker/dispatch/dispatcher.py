"""A reliable subscription: the log is read, consumers get messages, the cursor is written.

    log ─ Prefetcher ─► Delivery (decides) ─ Send ─► outboxes ─► consumers' streams
                      ▲        │  ├ DeadLetter ─► another topic
     acks, nacks ─────┘        │  └ Drop
                               └─ cursor ─► metadata store (`cursor_writer`)

Owns: consumers, outcomes and settings of one subscription. Does not own: decisions about delivery
(`ister.subscription.delivery`), readers and bytes (`prefetch`), the cursor (`cursor_writer`),
streams (`ister.broker.services`), consumers' ids.

All of it runs on the broker's loop. Every event ends in `_pump`, which carries out what the state
machine decides. The machine knows offsets, not messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from ister.base import failpoints, threads
from ister.base.metrics import Metrics
from ister.base.model import StreamMessage, TopicName
from ister.base.positions import lag_of
from ister.broker.counters import SubscriptionCounters, TopicCounters
from ister.broker.dispatch.cursor_writer import CursorWriter
from ister.broker.dispatch.dead_letters import LetterSigner, has_used_up_hops, make_letter
from ister.broker.dispatch.memory_budget import Budget
from ister.broker.dispatch.outbox import TAKEN_OVER_SECONDS, Outbox, Sent
from ister.broker.dispatch.prefetch import Prefetcher
from ister.broker.policies import Rate
from ister.broker.tasks import run_to_completion
from ister.bucket.ownership import OwnedTopic
from ister.errors import (
    ClosedError,
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    IsterError,
    MessageTooLargeError,
    UnavailableError,
)
from ister.subscription.delivery import Delivery
from ister.subscription.entries import AckResult, DeadLetter, Drop, Instruction, Send
from ister.subscription.policy import FailurePolicy, SubscriptionKind
from ister.subscription.progress import ProgressPlan
from ister.subscription.receipts import Receipts
from ister.subscription.store import StoredSubscription, SubscriptionStore
from ister.topic.message import Message
from ister.topic.topic import Topic

_log = logging.getLogger("ister.broker.dispatch.dispatcher")

_NEVER: Final = float("inf")
_DEAD_LETTER_RETRY_MS: Final = 2000

PublishDeadLetter = Callable[[str, StreamMessage], Awaitable[None]]


class Dispatcher:
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
        signer: LetterSigner,
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
        self._grace = grace_seconds
        self._publish_dead_letter = publish_dead_letter
        self._signer = signer
        self._on_fenced = on_fenced
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self.delivery = Delivery(
            kind=stored.kind,
            policy=stored.policy,
            window=stored.window or window,
            # Beyond the end only while a damaged topic takes no messages: see `Topics`.
            cursor=min(stored.cursor, topic.next_offset),
            saved=stored.saved,
            end=topic.next_offset,
            waits_for_writes=True,
        )
        self.receipts = Receipts(stored.receipt_key)
        self._outboxes: dict[int, Outbox[Sent]] = {}
        self._writes = budget.writes
        self.prefetcher = Prefetcher(
            topic,
            self.delivery,
            name=stored.name,
            budget=budget,
            rate=rate,
            pump=self._pump,
            on_passed_over=self._count_passed_over,
            on_end=self.end_streams,
            on_fenced=on_fenced,
        )
        self._forgetting: dict[int, asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = _NEVER
        self._saving = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._cursor = CursorWriter(
            topic, stored, delivery=self.delivery, store=store, plan=plan, on_fenced=on_fenced
        )
        # Counts as active at first: consumers of the previous broker process may reconnect.
        self._active_at = self._loop.time()
        for consumer in stored.consumers.values():
            # It may come back: until then messages that it takes are not passed over.
            self.delivery.remember(consumer.id, filters=consumer.filters)
            self._forget_later(consumer.id)

    @property
    def name(self) -> str:
        """The name of the subscription."""
        return self.stored.name

    @property
    def kind(self) -> SubscriptionKind:
        """The kind of the subscription."""
        return self.stored.kind

    @property
    def end(self) -> int:
        """The first offset that no consumer may see yet."""
        return self.topic.visible

    @property
    def window(self) -> int:
        """Messages that a consumer may have and not have acknowledged."""
        return self.delivery.window

    @property
    def lag(self) -> int:
        """Messages from the cursor to the end that still exist."""
        return lag_of(self.delivery.cursor, earliest=self.topic.earliest, end=self.end)

    @property
    def attached(self) -> list[int]:
        """The consumers with a stream."""
        return list(self._outboxes)

    def is_active(self, grace_seconds: float) -> bool:
        """Whether a consumer is connected, or the subscription was used in the grace period.

        Used means that a consumer was connected or the cursor moved. May be called by any thread.
        """
        active_at = max(self._active_at, self._cursor.moved_at)
        return bool(self._outboxes) or self._loop.time() - active_at <= grace_seconds

    # -- consumers --------------------------------------------------------------------------

    def expect(self, consumer: int, filters: Sequence[str]) -> None:
        """Keeps messages for a consumer that has subscribed, until it opens its stream."""
        if not self._is_closed and consumer not in self._outboxes:
            self.delivery.remember(consumer, filters=tuple(filters))
            self._forget_later(consumer)

    def attach(
        self,
        consumer: int,
        filters: Sequence[str],
        *,
        reports: bool = False,
        active_elsewhere_at: Callable[[], float] | None = None,
    ) -> Outbox[Sent]:
        """Attaches a consumer; a stream that it had before ends.

        `reports` says that it reports what its program has received; see `received`.

        Raises:
            ConflictError: The subscription is exclusive, and has another consumer.
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
            consumer,
            filters=tuple(filters),
            reports=reports,
            active_elsewhere_at=active_elsewhere_at,
            now=now,
        )
        outbox: Outbox[Sent] = Outbox(consumer, self._writes)
        self._outboxes[consumer] = outbox
        self.delivery.set_room(consumer, outbox.room)
        self.prefetcher.start()
        self._pump()
        if self.kind is SubscriptionKind.KEY_SHARED:
            self.prefetcher.discard_done()  # what it took by the filters that it had before
        return outbox

    def detach(self, outbox: Outbox[Sent]) -> None:
        """Ends delivery to a consumer; what it has not acknowledged goes to others, or waits."""
        consumer = outbox.consumer
        outbox.memory.set(0)
        if self._outboxes.get(consumer) is not outbox:
            return  # another stream of the same consumer has taken over
        del self._outboxes[consumer]
        self._active_at = self._loop.time()
        outbox.end()
        self.delivery.detach(consumer, now=self._loop.time())
        self._forget_later(consumer)
        if not self._outboxes:
            self.prefetcher.stop()
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
            self.prefetcher.discard_done()
            self._pump()

    def written(self, outbox: Outbox[Sent], count: int) -> None:
        """Records that a stream has written messages, so that there is room for more."""
        outbox.written(count)
        outbox.memory.written()
        if self._outboxes.get(outbox.consumer) is outbox:
            self.delivery.set_room(outbox.consumer, outbox.room)
            self._pump()

    async def next_message(self, outbox: Outbox[Sent], offset: int) -> Message | None:
        """Returns a message to write to a consumer's stream; None if it must not be written."""
        delivery, consumer = self.delivery, outbox.consumer
        if self._outboxes.get(consumer) is not outbox or not delivery.is_due(consumer, offset):
            return None
        message = await self.prefetcher.message(offset)
        if message is None or self._outboxes.get(consumer) is not outbox:
            return None
        if not delivery.begin_write(consumer, offset, now=self._loop.time()):
            return None
        outbox.memory.begin(message.size_bytes)
        return message

    async def next_messages(
        self, outbox: Outbox[Sent], items: list[Sent]
    ) -> list[tuple[Message, int]]:
        """Returns messages to write to a consumer's stream, and their attempts: a bounded batch.

        Waits until there is memory for it. Removes what it has handled from the front of `items`,
        including messages that must not be written. The stream writes them, and calls
        `outbox.memory.written`, before the next call.
        """
        room = self.prefetcher.batch_bytes(outbox, items[0][0])
        await outbox.memory.reserve(room)
        messages = self._messages_at_hand(outbox, items, room)
        if not messages and items:
            offset, attempt = items.pop(0)
            outbox.memory.set(room)
            message = await self.next_message(outbox, offset)
            messages = [] if message is None else [(message, attempt)]
        outbox.memory.begin(sum(message.size_bytes for message, _ in messages))
        return messages

    def _messages_at_hand(
        self, outbox: Outbox[Sent], items: list[Sent], room: int
    ) -> list[tuple[Message, int]]:
        """Like `next_messages`, but stops at a message that is not in memory."""
        consumer = outbox.consumer
        if self._outboxes.get(consumer) is not outbox:
            items.clear()
            return []
        now, begin_write = self._loop.time(), self.delivery.begin_write
        held, kept = self.prefetcher.held, self.prefetcher.kept
        offsets: list[int] = []
        attempts: list[int] = []
        count = 0
        for offset, attempt in items:
            message = held.get(offset) or kept.get(offset)
            if message is None:
                if self.delivery.is_due(consumer, offset):
                    break
            elif offsets and message.size_bytes > room:
                break
            elif begin_write(consumer, offset, now=now):
                offsets.append(offset)
                attempts.append(attempt)
                room -= message.size_bytes
            count += 1
        del items[:count]
        if not offsets:
            return []
        return list(zip(self.prefetcher.leave(offsets), attempts, strict=True))

    def readable(self, message: Message) -> StreamMessage | None:
        """Returns the fields of a message; None if its body cannot be decoded: it counts as failed.

        Its frame is intact, so nothing is lost: another program wrote something else into it.
        """
        try:
            record = message.record
        except CorruptDataError as error:
            _log.error(
                "message body cannot be decoded",
                extra={"error": str(error), "offset": message.offset},
            )
            self.fail(message.offset, "it cannot be decoded")
            return None
        self.counters.count_out(len(record.payload))
        return record

    def _count_passed_over(self, count: int) -> None:
        self.counters.passed_over += count
        self._metrics.count("subscription.messages_passed_over_total", count)

    # -- outcomes ---------------------------------------------------------------------------

    def received(self, consumer: int, offset: int) -> None:
        """Records that a consumer's program has received a message, and those sent before it."""
        if not self._is_closed:
            self.delivery.received(consumer, offset, now=self._loop.time())
            self._pump()

    def ack_by_ids(
        self, ids: Iterable[tuple[int, str]]
    ) -> tuple[set[int], list[InvalidRequestError | None]]:
        """Acknowledges messages by their ids: offset, and broker address with the receipt.

        Returns:
            The consumers that the messages were delivered to, and for each id the error if the
            subscription has delivered no such message, or None.
        """
        self._check_open()
        now, end = self._loop.time(), self.end
        ack, find_delivery = self.delivery.ack, self.receipts.find_delivery
        consumers: set[int] = set()
        refusals: list[InvalidRequestError | None] = []
        taken: list[int] = []
        for offset, stamped in ids:
            found = find_delivery(stamped, offset)
            if (
                found is None
                or ack(offset, end=end, now=now, consumer=found[0], attempt=found[1])
                is AckResult.REFUSED
            ):
                refusals.append(self.refuse(offset))
            else:
                refusals.append(None)
                taken.append(offset)
                consumers.add(found[0])
        self.prefetcher.discard(taken)
        self._pump()
        return consumers, refusals

    def ack_many(self, offsets: Sequence[int], tokens: Sequence[int], consumer: int) -> list[int]:
        """Acknowledges messages of a consumer; returns those that count, or did before.

        `tokens` has the receipt of each; without receipts, only messages in flight to the consumer
        can be acknowledged.
        """
        self._check_open()
        if tokens and len(tokens) != len(offsets):
            raise InvalidRequestError(
                f"{len(offsets)} acknowledgements with {len(tokens)} receipts: send one for each"
            )
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
            else:
                self.refuse(offset)
        self.prefetcher.discard(taken)
        self._pump()
        return taken

    def refuse(self, offset: int) -> InvalidRequestError:
        """Counts an acknowledgement of a message that was not delivered; returns its error."""
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
        """Redelivers a message later; if a consumer is given, only a message that it has."""
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
        """Counts a message that could not be delivered as failed."""
        if not self._is_closed and self.delivery.holds(offset):
            self.nack(offset, delay_ms=None, reason=reason)

    def _check_open(self) -> None:
        """Refuses events after the last cursor was written: they would be forgotten."""
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
        """The principals that may use it; None for all that may consume the topic."""
        return self.stored.principals

    async def set_principals(self, principals: tuple[str, ...] | None) -> None:
        """Changes the principals that may use it."""
        await self._save_options(lambda stored: replace(stored, principals=principals))

    async def save_consumers(self, stored: StoredSubscription) -> None:
        """Stores the consumers."""
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
        """Continues from another offset, for all consumers; the cursor is written first."""
        await run_to_completion(self._seek(offset))

    async def _seek(self, offset: int) -> None:
        def restart() -> None:
            self.delivery.seek(offset, now=self._loop.time())
            for consumer, outbox in self._outboxes.items():
                outbox.clear()
                self.delivery.set_room(consumer, outbox.room)
            self.prefetcher.restart()

        await self._cursor.move(offset, check=self._check_open, on_moved=restart)
        self._pump()

    @property
    def _owned(self) -> OwnedTopic | None:
        bucket = self.topic.bucket
        return bucket.owned if bucket is not None else None

    # -- the pump ---------------------------------------------------------------------------

    def _pump(self) -> None:
        """Carries out what the state machine decides, and sets the timer for its next decision."""
        if self._is_closed:
            return
        delivery, now = self.delivery, self._loop.time()
        delivery.tick(now)
        is_done = False
        while not is_done:
            # Sending changes nothing for the machine; other outcomes may.
            is_done = self._carry_out(delivery.take(now), now)
        self.prefetcher.update()
        if delivery.due_at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = delivery.due_at
            self._timer = self._loop.call_at(delivery.due_at, self._on_timer)
        if self._cursor.is_behind:
            self._cursor.update(now)

    def _carry_out(self, instructions: Sequence[Instruction], now: float) -> bool:
        """Carries out instructions; returns False if the machine may have more."""
        delivery, reading, outboxes = self.delivery, self.prefetcher, self._outboxes
        is_done = True
        for instruction in instructions:
            if type(instruction) is Send:
                consumer, offset, attempt = instruction
                outbox = outboxes.get(consumer)
                if outbox is not None:
                    outbox.push((offset, attempt))
                    reading.expect(offset)
                    if attempt > 1:
                        self.counters.redeliveries += 1
                        self._metrics.count("subscription.redeliveries_total")
            elif isinstance(instruction, DeadLetter):
                target = delivery.policy.dead_letter_topic or ""
                task = self._loop.create_task(self._dead_letter(instruction, target))
                threads.watch_task("ister-dispatch", task)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif isinstance(instruction, Drop):
                _log.warning(
                    "message dropped after its last attempt",
                    extra={"topic": self.topic.name, "offset": instruction.offset},
                )
                self._count_dropped()
                reading.discard((instruction.offset,))
                delivery.resolve(instruction.offset, now=now)
                is_done = False
        return is_done

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, _NEVER
        self._pump()

    async def _dead_letter(self, instruction: DeadLetter, target: str) -> None:
        offset = instruction.offset
        try:
            message = await self.prefetcher.message(offset)
            if message is not None and has_used_up_hops(message, self.topic.name, self._signer):
                _log.error(
                    "message dropped: it passed through too many dead-letter topics",
                    extra={"topic": self.topic.name, "subscription": self.name, "offset": offset},
                )
                self._count_dropped()
            elif message is not None:
                await self._publish_letter(message, instruction, target)
                failpoints.reach("broker.after_dead_letter")
                self.counters.dead_letters += 1
                self._metrics.count("subscription.dead_letters_total")
        except Exception as error:  # noqa: BLE001 - any failure is retried
            if not isinstance(error, IsterError):
                threads.record("ister-dispatch", error, topic=self.topic.name)
            _log.warning(
                "dead-letter publish failed; retrying",
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
            signer=self._signer,
        )
        try:
            await self._publish_dead_letter(target, make())
        except MessageTooLargeError:
            # Its own attributes leave no room for ours, or its body is all that there is.
            await self._publish_dead_letter(target, make(is_bare=True))

    def _count_dropped(self) -> None:
        self.counters.dropped += 1
        self._metrics.count("subscription.dropped_total")

    # -- progress ---------------------------------------------------------------------------

    @property
    def is_dirty(self) -> bool:
        """Whether there is progress that is not written."""
        return self._cursor.is_dirty

    async def flush(self) -> None:
        """Writes the cursor."""
        await self._cursor.flush()

    # -- the end ----------------------------------------------------------------------------

    def end_streams(self, reason: IsterError | None) -> None:
        """Ends the streams of all consumers."""
        for outbox in list(self._outboxes.values()):
            outbox.end(reason)

    async def close(self, reason: IsterError | None, *, flush: bool = True) -> None:
        """Ends all streams and writes the cursor, if that is possible."""
        if self._is_closed:
            return
        self._is_closed = True
        self.end_streams(reason)
        for timer in (self._timer, *self._forgetting.values()):
            if timer is not None:
                timer.cancel()
        working = [*self._tasks, *self.prefetcher.cancel()]
        for task in self._tasks:
            task.cancel()
        # A cursor that is being written is waited for: its thread would continue, and come last.
        await asyncio.gather(*working, *self._cursor.cancel(), return_exceptions=True)
        self.prefetcher.close()
        if flush and self.is_dirty:
            try:
                await self.flush()
            except IsterError as error:
                _log.warning("cursor not written at the end", extra={"error": str(error)})
