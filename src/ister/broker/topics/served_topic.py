"""A topic as the broker serves it: producers in, subscriptions out.

Owns: what belongs to one topic while this broker has it. Does not own: the log underneath
(`ister.topic`), which broker has the topic (`topics`), calls (`ister.broker.services`).

Everything here runs on the broker's loop. What touches a disk or a store runs in a thread, and is
awaited.

What a crash leaves is what the log and the subscriptions' records hold; producers are known again
by their next message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Final, TypeAlias

from ister.base import failpoints
from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import Start, StreamMessage, TopicName, TopicState
from ister.broker.counters import SubscriptionCounters, TopicCounters
from ister.broker.dispatch.consumer_ids import (
    ConsumerIdentity,
    ConsumerIds,
    check_consumer,
    consumer_id,
    remember,
)
from ister.broker.dispatch.dead_letters import LetterSigner
from ister.broker.dispatch.dispatcher import Dispatcher, PublishDeadLetter
from ister.broker.dispatch.fanout import Fanout
from ister.broker.dispatch.memory_budget import Budget
from ister.broker.policies import Policies, Rate
from ister.broker.publish.admission import Admission, admission_of_message, check_unlogged_size
from ister.broker.publish.producer_names import ProducerNames
from ister.broker.publish.producers import Producers
from ister.broker.security.principal_limits import PrincipalLimit
from ister.broker.tasks import run_to_completion
from ister.broker.topics.broker_records import BrokerRecords
from ister.broker.topics.time_searches import TimeSearches
from ister.bucket.ownership import OwnedTopic
from ister.config import DispatchConfig
from ister.errors import (
    CapacityError,
    ConflictError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from ister.subscription.policy import FailurePolicy, SubscriptionKind
from ister.subscription.progress import ProgressPlan
from ister.subscription.store import (
    PlannedSettings,
    StoredSubscription,
    SubscriptionStore,
    check_subscription_name,
)
from ister.topic.dedup import SequencedTopics
from ister.topic.read_only import ReadOnlyTopic
from ister.topic.retention import NO_FLOOR
from ister.topic.topic import Topic

_log = logging.getLogger("ister.broker.topics.served_topic")

AnySubscription: TypeAlias = Dispatcher | Fanout

# A consumer that has subscribed gets its stream within this time, or its place is free again.
_RESERVED_SECONDS: Final = 5.0
# How long a publish waits for room in the topic's buffer before the client has to retry.
_FULL_SECONDS: Final = 2.0
_FULL_RETRY_SECONDS: Final = 0.02


@dataclass(slots=True, kw_only=True)
class TopicContext:
    """What all topics of a broker share."""

    store: SubscriptionStore
    budget: Budget
    dispatch: DispatchConfig
    grace_seconds: float
    retention_grace_seconds: float
    consumers: ConsumerIds
    sequenced: SequencedTopics
    searches: TimeSearches
    subscription_limit: PrincipalLimit
    producers: dict[int, str]
    """The topic of each producer, by its id."""
    message_size_max: int
    clock: Clock
    metrics: Metrics
    admission: Admission
    records: BrokerRecords
    publish_dead_letter: PublishDeadLetter
    signer: LetterSigner
    on_lost: Callable[[str], None]
    """Called with a topic's name when it turns out that another broker has it."""
    closed_messages_in: int = 0
    """Messages published to topics that are closed by now."""
    closed_bytes_in: int = 0


@dataclass(frozen=True, slots=True)
class SubscriptionSettings:
    """Settings of a subscription; its kind is None if it does not exist yet."""

    policy: FailurePolicy
    window: int
    kind: SubscriptionKind | None


class ServedTopic:
    """One topic, open here."""

    def __init__(
        self,
        name: TopicName,
        topic: Topic | None,
        policies: Policies,
        stored: dict[str, StoredSubscription],
        context: TopicContext,
    ) -> None:
        """Opens a topic for clients.

        `topic` is its log; None for a topic that has none. `stored` are its subscriptions as
        stored, and `context` is what it shares with other topics.
        """
        self.parsed = name
        self.name = str(name)
        self.topic = topic
        self.policies = policies
        self.producers = Producers(self.name, context.producers)
        self.names = ProducerNames(context.records, name, clock=context.clock)
        self.counters = TopicCounters()
        self.publish_rate = Rate(policies.max_publish_rate)
        self.sequenced = context.sequenced.get(topic) if topic is not None else None
        self.subscriptions: dict[str, AnySubscription] = {}
        self._context = context
        # Consumers that have subscribed and have no stream yet, each with when its place is free.
        self._reserved: dict[str, dict[int, float]] = {}
        self._subscribing = asyncio.Lock()
        self._numbering = asyncio.Lock()
        self._pushed_total = 0
        self.is_closed = False
        for subscription in stored.values():
            self._begin(subscription)
        if topic is not None:
            topic.active_floor = self._active_floor
            if topic.bucket is not None:
                topic.bucket.on_fenced = partial(_call_on, asyncio.get_running_loop(), self._lose)

    def _lose(self) -> None:
        # Consumers without messages would not notice, and wait here for what comes elsewhere.
        if not self.is_closed:
            self._context.on_lost(self.name)

    def _active_floor(self, *, include_inactive: bool) -> int:
        """The lowest cursor of the active subscriptions. May be called by any thread."""
        grace = self._context.retention_grace_seconds
        return min(
            (
                found.delivery.cursor
                for found in list(self.subscriptions.values())
                if isinstance(found, Dispatcher) and (include_inactive or found.is_active(grace))
            ),
            default=NO_FLOOR,
        )

    # -- what it is -------------------------------------------------------------------------

    @property
    def is_reliable(self) -> bool:
        """Whether it has a log."""
        return self.topic is not None

    @property
    def is_read_only(self) -> bool:
        """Whether it waits for another broker's disk, and only its history is served."""
        return isinstance(self.topic, ReadOnlyTopic)

    @property
    def incarnation(self) -> str:
        """Identifies this topic among all of that name; "" without a bucket."""
        owned = self.owned
        return owned.record.incarnation if owned is not None else ""

    @property
    def owned(self) -> OwnedTopic | None:
        """The claim on the topic, if there is a metadata store that knows about claims."""
        bucket = self.topic.bucket if self.topic is not None else None
        return bucket.owned if bucket is not None else None

    @property
    def is_usable(self) -> bool:
        """Whether it can be used; else it has to be opened again."""
        if self.is_closed:
            return False
        topic = self.topic
        if topic is None:
            return True
        if topic.state in (TopicState.FAILED, TopicState.CLOSED):
            return False
        return topic.bucket is None or not topic.bucket.owned.is_fenced

    @property
    def next_offset(self) -> int:
        """The offset that the next message gets; without a log, the number of messages so far."""
        return self.topic.next_offset if self.topic is not None else self._pushed_total

    def live_producers(self, now: float) -> set[object]:
        """The names of producers that were active lately by gRPC, or publish by Flight."""
        return {one.name for one in self.producers.live(now)}.union(self.counters.streams)

    def count_producers(self, now: float) -> int:
        """The number of these; one that uses both, or several streams, counts once."""
        return len(self.live_producers(now))

    def set_policies(self, policies: Policies) -> None:
        """Changes the topic's policies."""
        self.policies = policies
        self.publish_rate.per_second = policies.max_publish_rate
        for subscription in self.subscriptions.values():
            if isinstance(subscription, Dispatcher):
                subscription.rate.per_second = policies.max_subscription_dispatch_rate

    # -- publishing -------------------------------------------------------------------------

    async def publish(
        self,
        message: StreamMessage,
        *,
        sequence: int | None = None,
        epoch: int = 0,
        principal: str | None = None,
    ) -> int:
        """Appends a message and waits for the topic's ack level.

        Args:
            message: The message.
            sequence: The producer's sequence number; a known one is not appended again.
            epoch: The producer epoch; a higher one fences lower ones.
            principal: The publisher; "" with authentication off, None for the broker itself.

        Returns:
            Its offset; 0 in a topic without a log, where messages have none.

        Raises:
            As `Admission.admit`, `Topic.append`, `Topic.wait` and `SequencedTopic.append_record`.
        """
        size = len(message.payload)
        await self._context.admission.admit(self, admission_of_message(message), principal)
        if self.topic is None:
            self._push(message)
            return 0
        offset = await self._append(message, sequence, epoch)
        self.counters.count_messages((size,))
        failpoints.reach("broker.after_append")
        await self.topic.aio.wait(offset)
        failpoints.reach("broker.before_answer")
        return offset

    async def publish_dead_letter(self, message: StreamMessage) -> None:
        """Publishes a dead letter; in a topic without a log, a consumer has to take it.

        Raises:
            UnavailableError: The topic has no log, and no consumer has room for the message.
            As `publish`.
        """
        if self.topic is not None:
            await self.publish(message)
            return
        await self._context.admission.admit(self, admission_of_message(message), None)
        if not self._push(message):
            raise UnavailableError(
                "the dead-letter topic is not reliable, and no consumer takes the message",
                topic=self.name,
                hint="attach a consumer, or use a reliable dead-letter topic",
            )

    async def _append(self, message: StreamMessage, sequence: int | None, epoch: int) -> int:
        assert self.topic is not None and self.sequenced is not None  # noqa: S101, PT018 - for mypy
        give_up_at = asyncio.get_running_loop().time() + _FULL_SECONDS
        while True:
            try:
                if sequence is None:
                    return self.topic.appender.append_record(message)
                return await self._append_numbered(message, sequence, epoch)
            except CapacityError:
                if asyncio.get_running_loop().time() > give_up_at:
                    raise
                await asyncio.sleep(_FULL_RETRY_SECONDS)

    async def _append_numbered(self, message: StreamMessage, sequence: int, epoch: int) -> int:
        sequenced = self.sequenced
        assert sequenced is not None  # noqa: S101 - for mypy
        # In turn: a message that overtakes the one before it would be refused.
        async with self._numbering:
            offset = sequenced.try_append_record(
                message, producer=message.producer_name, epoch=epoch, sequence=sequence
            )
            if offset is None:
                # It needs a search of the log, or the table is in use.
                offset = await asyncio.to_thread(
                    sequenced.append_record,
                    message,
                    producer=message.producer_name,
                    epoch=epoch,
                    sequence=sequence,
                )
            return offset

    def _push(self, message: StreamMessage) -> bool:
        """Hands a message to all subscriptions; returns whether a consumer takes it."""
        check_unlogged_size(message, self._context.message_size_max, topic=self.name)
        self._pushed_total += 1
        self.counters.count_messages((len(message.payload),))
        # Clients of Danube expect 0: there is no log in which the message could be found.
        stamped = replace(message, msg_id=replace(message.msg_id, topic_offset=0))
        taken = [
            subscription.publish(stamped)
            for subscription in self.subscriptions.values()
            if isinstance(subscription, Fanout)
        ]
        return any(taken)

    # -- subscriptions ----------------------------------------------------------------------

    def subscription(self, name: str) -> AnySubscription:
        """One of the topic's subscriptions."""
        found = self.subscriptions.get(name)
        if found is None:
            raise NotFoundError(f"the topic has no subscription {name!r}", topic=self.name)
        return found

    def reliable_subscription(self, name: str) -> Dispatcher:
        """Like `subscription`, for a topic with a log."""
        found = self.subscription(name)
        if not isinstance(found, Dispatcher):
            raise InvalidRequestError(
                "the topic is not reliable: it has no cursors", topic=self.name
            )
        return found

    async def subscribe(
        self,
        name: str,
        kind: SubscriptionKind,
        consumer: str,
        filters: tuple[str, ...],
        start: Start = "latest",
        *,
        created_by: str = "",
        check: Callable[[AnySubscription], None] = lambda found: None,
    ) -> ConsumerIdentity:
        """Registers a consumer; creates the subscription, with its cursor, if it does not exist.

        Args:
            name: The subscription's name.
            kind: Its kind.
            consumer: The consumer's name.
            filters: Its key filters.
            start: Where a new subscription begins.
            created_by: The principal that a new subscription counts for; "" for none.
            check: Called with a subscription that exists; raises if the caller may not use it.

        Raises:
            InvalidRequestError: A name or a filter is not one.
            ConflictError: The subscription is of another kind.
            PermissionDeniedError: It is exclusive and taken, or full.
            CapacityError: The topic has as many consumers as it may have.
            As `SubscriptionStore`.
        """
        check_consumer(consumer, filters)
        if (
            isinstance(start, datetime)
            and self.topic is not None
            and name not in self.subscriptions
        ):
            # Others subscribe meanwhile: a search may wait for its turn.
            start = await self._context.searches.start_of(self.topic, start)
        async with self._subscribing:
            found = self.subscriptions.get(name)
            if found is None:
                check_subscription_name(name)
                self._check_subscription_count()
                with self._context.subscription_limit.taken(created_by):
                    found = self._begin(await self._create(name, kind, start, created_by))
                check(found)
            else:
                check(found)
            if found.kind is not kind:
                raise ConflictError(
                    f"subscription {name!r} is {found.kind.value}, not {kind.value}",
                    topic=self.name,
                    hint="unsubscribe first, or subscribe as it is",
                )
            number = consumer_id(self.name, self.incarnation, name, consumer)
            self._reserve(found, number)
            entry = ConsumerIdentity(number, self.name, name, consumer, filters)
            await self._remember(found, entry)
            failpoints.reach("broker.after_subscribe")
            self._context.consumers.add(entry)
            if self.is_closed:
                raise UnavailableError("the topic is being closed", topic=self.name)
            if isinstance(found, Fanout):
                found.expect(number, filters, _RESERVED_SECONDS)
            else:
                found.expect(number, filters)
            return entry

    def arrive(self, consumer: ConsumerIdentity) -> AnySubscription:
        """Returns the subscription of a consumer that opens its stream; ends its reservation."""
        reserved = self._reserved.get(consumer.subscription, {})
        reserved.pop(consumer.id, None)
        if not reserved:
            self._reserved.pop(consumer.subscription, None)
        return self.subscription(consumer.subscription)

    async def _create(
        self, name: str, kind: SubscriptionKind, start: Start, created_by: str
    ) -> StoredSubscription:
        topic = self.topic
        cursor = 0
        if topic is not None:
            cursor = await asyncio.to_thread(topic.resolve_start, start)
        return await asyncio.to_thread(
            self._context.store.create,
            self.parsed,
            name,
            kind=kind,
            cursor=cursor,
            incarnation=self.incarnation,
            owned=self.owned,
            created_by=created_by,
        )

    def _begin(self, stored: StoredSubscription) -> AnySubscription:
        context = self._context
        subscription: AnySubscription
        if self.topic is None:
            subscription = Fanout(
                self.name,
                stored,
                budget=context.budget,
                metrics=context.metrics,
                counters=SubscriptionCounters(self.counters),
            )
        else:
            dispatch = context.dispatch
            subscription = Dispatcher(
                self.topic,
                stored,
                store=context.store,
                budget=context.budget,
                window=dispatch.max_unacked_messages,
                plan=ProgressPlan(
                    flush_interval_seconds=dispatch.progress_flush_interval_seconds,
                    min_offset_delta=dispatch.progress_min_offset_delta,
                ),
                rate=Rate(self.policies.max_subscription_dispatch_rate),
                grace_seconds=context.grace_seconds,
                publish_dead_letter=context.publish_dead_letter,
                signer=context.signer,
                on_fenced=lambda: context.on_lost(self.name),
                metrics=context.metrics,
                counters=SubscriptionCounters(self.counters),
            )
        self.subscriptions[stored.name] = subscription
        context.subscription_limit.add(stored.created_by)
        context.consumers.load(self.parsed, stored)
        return subscription

    def _check_subscription_count(self) -> None:
        limit = self.policies.max_subscriptions_per_topic
        if limit and len(self.subscriptions) >= limit:
            raise PermissionDeniedError(
                f"the topic has {limit} subscriptions",
                topic=self.name,
                hint="max_subscriptions_per_topic is the limit",
            )

    def _reserve(self, found: AnySubscription, number: int) -> None:
        """Reserves a slot for a consumer, or refuses it if there is none."""
        now = asyncio.get_running_loop().time()
        others = len(self._places(found, now) - {number})
        if found.kind is SubscriptionKind.EXCLUSIVE and others:
            raise PermissionDeniedError(
                f"subscription {found.name!r} is exclusive, and has a consumer", topic=self.name
            )
        limit = self.policies.max_consumers_per_subscription
        if limit and others >= limit:
            raise PermissionDeniedError(
                f"subscription {found.name!r} has {limit} consumers",
                topic=self.name,
                hint="max_consumers_per_subscription is the limit",
            )
        limit = self.policies.max_consumers_per_topic
        if limit and self._count_places(found, number, now) >= limit:
            raise CapacityError(
                f"the topic has {limit} consumers",
                topic=self.name,
                hint="max_consumers_per_topic is the limit",
            )
        self._reserved.setdefault(found.name, {})[number] = now + _RESERVED_SECONDS

    def _places(self, subscription: AnySubscription, now: float) -> set[int]:
        """Consumers that are connected, or have subscribed a moment ago."""
        reserved = self._reserved.pop(subscription.name, {})
        reserved = {number: until for number, until in reserved.items() if until > now}
        if reserved:
            self._reserved[subscription.name] = reserved
        return {*subscription.attached, *reserved}

    def _count_places(self, found: AnySubscription, number: int, now: float) -> int:
        """Counts consumers of all subscriptions like `_consumers_of`, without the one that asks."""
        return sum(
            len(self._places(one, now) - ({number} if one is found else set()))
            for one in self.subscriptions.values()
        )

    async def _remember(self, found: AnySubscription, entry: ConsumerIdentity) -> None:
        """Stores a consumer's id before it is given out."""
        stored = found.stored
        known = stored.consumers.get(entry.name)
        if known is not None and known.id == entry.id and tuple(known.filters) == entry.filters:
            return
        now_ms = self._context.clock.now_ns() // 1_000_000
        consumers, forgotten = remember(
            stored.consumers, entry, attached=found.attached, now_ms=now_ms
        )
        for number in forgotten:
            self._context.consumers.forget(number)
        changed = replace(stored, consumers=consumers)
        if isinstance(found, Dispatcher):
            await found.save_consumers(changed)
        else:
            await asyncio.to_thread(
                self._context.store.save_options, self.parsed, changed, owned=self.owned
            )
            found.stored = changed

    async def configure(
        self,
        name: str,
        *,
        policy: FailurePolicy | None = None,
        window: int | None = None,
    ) -> None:
        """Changes the failure policy or the window of a subscription; in force at once.

        Those of a subscription that does not exist are stored, and in force when it is created.

        Args:
            name: The subscription's name.
            policy: The failure policy; None leaves it as it is.
            window: `max_unacked_messages`; None leaves it as it is.
        """
        async with self._subscribing:
            if name not in self.subscriptions:
                await asyncio.to_thread(
                    self._context.store.plan,
                    self.parsed,
                    name,
                    PlannedSettings(policy=policy, window=window),
                    incarnation=self.incarnation,
                    owned=self.owned,
                )
                return
            found = self.reliable_subscription(name)
            if policy is not None:
                await found.set_policy(policy)
            if window is not None:
                await found.set_window(window)

    async def settings(self, name: str) -> SubscriptionSettings:
        """The settings of a subscription, or those that were stored for one to come."""
        if name in self.subscriptions:
            found = self.reliable_subscription(name)
            return SubscriptionSettings(found.stored.policy, found.window, found.kind)
        planned = await asyncio.to_thread(
            self._context.store.planned, self.parsed, name, self.incarnation
        )
        if planned is None:
            self.subscription(name)  # made meanwhile, or not found
            return await self.settings(name)
        return SubscriptionSettings(
            planned.policy or FailurePolicy(),
            planned.window or self._context.dispatch.max_unacked_messages,
            None,
        )

    async def restrict(self, name: str, principals: tuple[str, ...] | None) -> AnySubscription:
        """Changes the principals that may use a subscription; None for all consumers of the topic.

        Streams of others end within a second.
        """
        async with self._subscribing:
            found = self.subscription(name)
            if isinstance(found, Dispatcher):
                await found.set_principals(principals)
                return found
            changed = replace(found.stored, principals=principals)
            await asyncio.to_thread(
                self._context.store.save_options, self.parsed, changed, owned=self.owned
            )
            found.stored = changed
            return found

    async def unsubscribe(self, name: str) -> None:
        """Removes a subscription, its cursor included.

        Raises:
            ConflictError: It has consumers.
            As `SubscriptionStore.delete`, and then it stays.
        """
        await run_to_completion(self._unsubscribe(name))

    async def _unsubscribe(self, name: str) -> None:
        async with self._subscribing:
            found = self.subscription(name)
            if found.attached:
                raise ConflictError(
                    f"subscription {name!r} has {len(found.attached)} consumers",
                    topic=self.name,
                    hint="close them first",
                )
            await asyncio.to_thread(self._context.store.delete, self.parsed, name, owned=self.owned)
            del self.subscriptions[name]
            self._context.subscription_limit.remove(found.stored.created_by)
            self._reserved.pop(name, None)
            self._context.consumers.forget_subscription(self.name, name)
            await found.close(NotFoundError(f"subscription {name!r} is gone"), flush=False)

    # -- the end ----------------------------------------------------------------------------

    async def flush(self) -> None:
        """Writes every cursor."""
        for one in list(self.subscriptions.values()):
            if isinstance(one, Dispatcher) and one.is_dirty:
                await one.flush()

    async def close(self, reason: IsterError | None, *, flush: bool = True) -> None:
        """Ends every stream and writes every cursor; the log stays open."""
        if not self.is_closed:
            self._context.closed_messages_in += self.counters.messages_in
            self._context.closed_bytes_in += self.counters.bytes_in
            for one in self.subscriptions.values():
                self._context.subscription_limit.remove(one.stored.created_by)
        self.is_closed = True
        await asyncio.gather(
            *(one.close(reason, flush=flush) for one in self.subscriptions.values())
        )
        self.producers.clear()


def _call_on(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Calls something on a loop, from any thread; not on one that has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
