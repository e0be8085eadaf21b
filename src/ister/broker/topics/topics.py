"""All topics of this broker: found, created, opened, moved, deleted.

Owns: which topics are served here, their names and namespaces, partitions. Does not own: what is
done with a topic (`served_topic`), and which node owns it (`ister.bucket.claim`).

Names are compared whole, everywhere: `/default/t` is neither `/default/t2` nor a part of it. A
partitioned topic is the topics `<name>-part-0`, `<name>-part-1`, …; a plain one of the same name
excludes them.

Opening a topic is owning it. A topic that another broker has is refused with UNAVAILABLE, which
makes clients look it up again; the look-up sends them there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final
from weakref import WeakValueDictionary

from ister import threads
from ister.broker.cluster import Address, Cluster
from ister.broker.dispatch.memory_budget import Budget
from ister.broker.policies import Policies
from ister.broker.publish.admission import Admission
from ister.broker.rpc.principal_limits import PrincipalLimit
from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.topics.broker_records import BrokerRecords, ServedRecord
from ister.broker.topics.consumer_ids import ConsumerIds
from ister.broker.topics.listing import TopicListing
from ister.broker.topics.served_topic import ServedTopic, TopicContext
from ister.broker.topics.tasks import finish, run_to_completion
from ister.broker.topics.time_searches import TimeSearches
from ister.clock import Clock
from ister.config import Config, StorageMode
from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    PermissionDeniedError,
    TopicNameError,
    UnavailableError,
)
from ister.limits import MIB
from ister.metadata.base import MetadataStore
from ister.model import AckLevel, Codec, StreamMessage, TopicName, TopicState
from ister.partitions import parse_partition, partition_name
from ister.subscription.store import StoredSubscription, SubscriptionStore
from ister.topic.dedup import SequencedTopics
from ister.topic.log import Log
from ister.topic.topic import Topic

_log = logging.getLogger("ister.broker.topics.topics")

_PARTITIONS_MAX: Final = 1024
_BUILT_IN_NAMESPACES: Final = ("default", "system")
_OPEN_AT_ONCE: Final = 8
# Listing all names takes as long as there are topics; other brokers' new ones show after this time.
_KNOWN_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 1.0
_LISTED_SECONDS: Final = 3.0
# How long an end waits for deletions and the like; a store may not answer.
_FINISH_SECONDS: Final = 3.0
# After an unload, other brokers come first for so long.
_MOVED_SECONDS: Final = 30.0


class NoNamespaceError(NotFoundError):
    """A topic cannot be created: its namespace does not exist."""


class Topics:
    """The topics of one broker. Used on its loop alone."""

    def __init__(
        self,
        log: Log,
        metadata: MetadataStore,
        cluster: Cluster,
        *,
        config: Config,
        clock: Clock,
        schemas: SchemaRegistry | None = None,
    ) -> None:
        self.log = log
        self.admission = Admission(schemas)
        self.config = config
        self.cluster = cluster
        self.consumers = ConsumerIds()
        self.sequenced = SequencedTopics()
        self.producers: dict[int, str] = {}
        """The topic of each producer, by its id."""
        root = config.storage.metadata.root_prefix
        self.store = SubscriptionStore(metadata, root_prefix=root, clock=clock)
        self.records = BrokerRecords(metadata, root_prefix=root)
        self.searches = TimeSearches(log.metrics)
        budget_mb = config.dispatch.memory_budget_mb
        self.budget = Budget(None if budget_mb is None else budget_mb * MIB)
        self._context = TopicContext(
            store=self.store,
            budget=self.budget,
            dispatch=config.dispatch,
            grace_seconds=config.broker.consumer_grace_seconds,
            retention_grace_seconds=config.storage.wal.retention.active_subscription_grace_seconds,
            consumers=self.consumers,
            sequenced=self.sequenced,
            searches=self.searches,
            subscription_limit=PrincipalLimit(
                "subscriptions",
                config.broker.limits.max_subscriptions_per_principal,
                log.metrics,
                setting="broker.limits.max_subscriptions_per_principal",
                error=PermissionDeniedError,
            ),
            producers=self.producers,
            message_size_max=config.storage.max_message_size,
            clock=clock,
            metrics=log.metrics,
            admission=self.admission,
            records=self.records,
            publish_dead_letter=self._publish_dead_letter,
            on_lost=self._on_lost,
        )
        self._served: dict[str, ServedTopic] = {}
        # Each lives as long as its topic is being opened: invalid names leave nothing behind.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # Until when another broker should have a topic, and the epoch in which this one had it.
        self._moved: dict[str, tuple[float, int]] = {}
        self._listing = TopicListing(log, self.records, lambda: self._served)
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_draining = False
        self.opening = (0, 0)
        """Of the topics that are opened at the start: how many are through, of how many."""
        self.unopened: dict[str, str] = {}
        """Topics that could not be opened when they were last tried, and why."""
        self.redirects: Counter[str] = Counter()
        """How often clients were sent to another broker, by namespace."""
        log.metrics.register_counter("broker.messages_in_total", lambda: self.messages_in)
        log.metrics.register_counter("broker.bytes_in_total", lambda: self.bytes_in)

    # -- finding ----------------------------------------------------------------------------

    @property
    def served(self) -> list[ServedTopic]:
        """The topics that are open here."""
        return list(self._served.values())

    @property
    def messages_in(self) -> int:
        """Messages that were published here since the start."""
        # One that is closed has been counted already, and may be among them a while longer.
        served = sum(one.counters.messages_in for one in self.served if not one.is_closed)
        return self._context.closed_messages_in + served

    @property
    def bytes_in(self) -> int:
        """Payloads of these."""
        served = sum(one.counters.bytes_in for one in self.served if not one.is_closed)
        return self._context.closed_bytes_in + served

    def find_open(self, name: str) -> ServedTopic | None:
        """A topic that is open here and can be used."""
        found = self._served.get(name)
        return found if found is not None and found.is_usable else None

    async def get(self, name: str) -> ServedTopic:
        """Returns a topic; opens it if necessary.

        Raises:
            TopicNameError: The name is invalid.
            NotFoundError: It does not exist.
            UnavailableError: Another broker has it; look it up again.
        """
        found = self.find_open(name)
        if found is not None:
            return found
        return await self._open(TopicName.parse(name), None)

    async def get_or_create(
        self,
        name: str,
        *,
        is_reliable: bool,
        ack: AckLevel | None = None,
        codec: Codec | None = None,
        is_implied: bool = True,
    ) -> ServedTopic:
        """Returns a topic; creates it if it does not exist.

        Args:
            name: Its name.
            is_reliable: Whether a new topic has a log.
            ack: The ack level of a new topic.
            codec: The codec of a new topic.
            is_implied: Whether it is created because it is used (`broker.auto_create_topics`).

        Raises:
            As `get`.
            NotFoundError: It does not exist, and is not created by using it.
            NoNamespaceError: Its namespace does not exist.
            AlreadyExistsError: There is a partitioned topic of that name, or a plain one.
            CapacityError: There are too many topics.
        """
        try:
            return _as_wanted(await self.get(name), ack, codec)
        except NotFoundError:
            if is_implied and not self.config.broker.auto_create_topics:
                raise
        parsed = TopicName.parse(name)
        partition = parse_partition(name)
        # A topic and its partitions exclude each other, so they are made one after the other.
        async with self._lock_of(f"new {partition[0] if partition is not None else name}"):
            await self._check_new(parsed, is_implied=is_implied)
            made = await self._open(parsed, ServedRecord(is_reliable=is_reliable), ack, codec)
        return _as_wanted(made, ack, codec)

    async def _check_new(self, name: TopicName, *, is_implied: bool) -> None:
        if name.namespace not in await self.namespaces():
            # Not retriable: nothing creates it later.
            raise NoNamespaceError(
                f"namespace {name.namespace!r} does not exist",
                hint=f"create it: ister namespaces create {name.namespace}",
            )
        known = await self._listing.cached(_KNOWN_SECONDS)
        if is_implied and len(known) >= self.config.broker.limits.max_topics:
            raise CapacityError(
                f"topic limit reached: {len(known)}", hint="raise broker.limits.max_topics"
            )
        if partitions := known.partitions_of(str(name)):
            raise AlreadyExistsError(
                f"{name} is a partitioned topic with {len(partitions)} partitions", topic=str(name)
            )
        partition = parse_partition(str(name))
        if partition is not None and partition[0] in known:
            raise AlreadyExistsError(
                f"{partition[0]} is a topic without partitions", topic=str(name)
            )

    async def _open(
        self,
        name: TopicName,
        new: ServedRecord | None,
        ack: AckLevel | None = None,
        codec: Codec | None = None,
    ) -> ServedTopic:
        return await run_to_completion(self._open_locked(name, new, ack, codec))

    async def _open_locked(
        self, name: TopicName, new: ServedRecord | None, ack: AckLevel | None, codec: Codec | None
    ) -> ServedTopic:
        text = str(name)
        async with self._lock_of(text):
            found = self._served.get(text)
            if found is not None and found.is_usable:
                return found
            if self.is_draining:
                raise UnavailableError("the broker is shutting down", topic=text)
            if found is not None:
                await self._drop(
                    found, UnavailableError("the topic is being reopened; retry", topic=text)
                )
            if self.is_moved(text):
                raise UnavailableError("the topic was moved: look it up again", topic=text)
            topic, policies, stored = await asyncio.to_thread(
                self._open_blocking, name, new, ack, codec
            )
            if self.is_draining:
                raise UnavailableError("the broker is shutting down", topic=text)
            self._served[text] = served = ServedTopic(name, topic, policies, stored, self._context)
            self.unopened.pop(text, None)
            self._listing.record(text, exists=True)
            return served

    def _lock_of(self, name: str) -> asyncio.Lock:
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    def _open_blocking(
        self,
        name: TopicName,
        new: ServedRecord | None,
        ack: AckLevel | None,
        codec: Codec | None,
    ) -> tuple[Topic | None, Policies, dict[str, StoredSubscription]]:
        text = str(name)
        record = self.records.topic(name)
        if record is None and new is not None:
            record = new
            if not new.is_reliable:
                record = self.records.create_topic(name, new)
        record = record or ServedRecord()
        policies = self._policies_of(name, record)
        if not record.is_reliable:
            return None, policies, self.store.load(name, "")
        try:
            try:
                topic = self.log.topic(text)
            except NotFoundError:
                if new is None:
                    raise
                topic = self.log.topic(text, create=True, ack=ack, codec=codec)
        except ConflictError as error:
            if isinstance(error, AlreadyExistsError):
                raise
            # Another broker has it, or its files are elsewhere: the client looks it up again.
            raise UnavailableError(str(error), topic=text) from error
        owned = topic.tier.owned if topic.tier is not None else None
        clipped: list[str] = []
        if topic.state is not TopicState.QUARANTINED:
            # Offsets behind the end are given out again. What is written down about them must go
            # before they are: else new messages would count as acknowledged.
            clipped = self.store.clip(name, topic.next_offset, owned=owned)
        incarnation = owned.record.incarnation if owned is not None else ""
        stored = self.store.load(name, incarnation)
        for one in list(stored.values()):
            # Receipts of offsets that are given out again are void, too.
            if clipped or not one.receipt_key:
                stored[one.name] = self.store.renew_key(name, one, owned=owned)
        return topic, policies, stored

    def policies_of(self, name: TopicName) -> Policies:
        """Reads the policies of a topic, open or not. Blocks."""
        return self._policies_of(name, self.records.topic(name) or ServedRecord())

    def _policies_of(self, name: TopicName, record: ServedRecord) -> Policies:
        namespace = self.records.namespace_policies(name.namespace)
        return Policies.of(self.config.broker.policies, namespace, record.policies)

    # -- where a topic is -------------------------------------------------------------------

    async def locate(self, name: str) -> Address:
        """Returns the broker that has a topic.

        Raises:
            TopicNameError: The name is invalid.
            NotFoundError: It does not exist.
            UnavailableError: The process that has it is not a broker.
        """
        if self.find_open(name) is not None:
            return self.cluster.own
        parsed = TopicName.parse(name)
        owner = await asyncio.to_thread(self.cluster.owner, parsed)
        if owner is not None:
            self.redirects[parsed.namespace] += 1
            return owner
        if self.is_moved(name) and not await asyncio.to_thread(self._was_elsewhere, parsed):
            brokers = await asyncio.to_thread(self.cluster.brokers)
            others = [one for one in brokers if one.node != self.cluster.own.node]
            if others:
                self.redirects[parsed.namespace] += 1
                return others[hash(name) % len(others)]
        self._moved.pop(name, None)
        await self.get(name)
        return self.cluster.own

    async def is_elsewhere(self, name: str) -> bool:
        """Whether another broker has a topic, or should have it: `locate` says which."""
        if self.is_moved(name):
            return True
        if self.find_open(name) is not None:
            return False
        parsed = TopicName.parse(name)
        try:
            return await asyncio.to_thread(self.cluster.owner, parsed) is not None
        except IsterError:
            return False

    def _was_elsewhere(self, name: TopicName) -> bool:
        """Whether another broker has had a topic since it was unloaded here."""
        tiers = self.log.tiers
        found = tiers.catalog(name).record() if tiers is not None else None
        return found is not None and found[0].epoch > self._moved.get(str(name), (0.0, 0))[1]

    def is_moved(self, name: str) -> bool:
        """Whether a topic was unloaded here so lately that another broker should have it."""
        moved = self._moved.get(name)
        if moved is None:
            return False
        if asyncio.get_running_loop().time() >= moved[0]:
            del self._moved[name]
            return False
        return True

    # -- names ------------------------------------------------------------------------------

    async def names(self) -> set[str]:
        """The names of all topics, open or not, here or elsewhere."""
        return await self._listing.list()

    async def recent_names(self) -> set[str]:
        """Topic names, cached for up to 3 s."""
        return set(await self._listing.cached(_LISTED_SECONDS))

    async def partitions(self, name: str) -> list[str]:
        """The topics behind a name: itself, or its partitions in order; [] if it does not exist.

        Raises:
            TopicNameError: The name is invalid.
        """
        parsed = TopicName.parse(name)
        if self.find_open(name) is not None:
            return [name]
        known = await self._listing.cached(_LOOK_SECONDS)
        found = [name] if name in known else known.partitions_of(name)
        if not found and await asyncio.to_thread(self._listing.is_new, parsed):
            # Another broker has just made it. Danube's client gives up where there is nothing.
            known = await self._listing.cached(0.0)
            found = [name] if name in known else known.partitions_of(name)
        return found

    async def namespaces(self) -> list[str]:
        """The names of all namespaces."""
        made = await asyncio.to_thread(self.records.namespaces)
        return sorted({*_BUILT_IN_NAMESPACES, *self.config.broker.bootstrap_namespaces, *made})

    async def create_namespace(self, name: str) -> None:
        """Creates a namespace.

        Raises:
            TopicNameError: The name is invalid.
            AlreadyExistsError: It exists.
        """
        TopicName.parse(f"/{name}/x")
        if name in await self.namespaces():
            raise AlreadyExistsError(f"namespace {name!r} already exists")
        await asyncio.to_thread(self.records.create_namespace, name)

    async def delete_namespace(self, name: str) -> None:
        """Removes an empty namespace.

        Raises:
            NotFoundError: It does not exist.
            ConflictError: It has topics.
        """
        if name in (*_BUILT_IN_NAMESPACES, *self.config.broker.bootstrap_namespaces):
            raise ConflictError(f"the namespace {name!r} always exists")
        if topics := await self.topics_of(name):
            raise ConflictError(
                f"the namespace {name!r} has {len(topics)} topics", hint="delete them first"
            )
        await asyncio.to_thread(self.records.delete_namespace, name)

    async def topics_of(self, namespace: str) -> list[str]:
        """The topics of a namespace.

        Raises:
            NotFoundError: There is no such namespace.
        """
        if namespace not in await self.namespaces():
            raise NotFoundError(f"namespace {namespace!r} does not exist")
        prefix = f"/{namespace}/"
        return sorted(name for name in await self.names() if name.startswith(prefix))

    async def create_partitioned(
        self,
        name: str,
        count: int,
        *,
        is_reliable: bool,
        ack: AckLevel | None = None,
        codec: Codec | None = None,
        is_growing: bool = False,
    ) -> list[str]:
        """Creates a topic of `count` partitions, unless it exists.

        The first partition is created last: while it is missing, the topic is incomplete, and the
        same call completes it.

        Args:
            name: The topic's name.
            count: The number of partitions.
            is_reliable: Whether new partitions have a log.
            ack: The ack level of new partitions.
            codec: The codec of new partitions.
            is_growing: Whether to add partitions to a topic that has fewer. Which partition a key
                goes to depends on their number, so this has to be asked for.

        Raises:
            InvalidRequestError: Not a number of partitions.
            AlreadyExistsError: It has another number of partitions.
            NotFoundError: `is_growing`, and there is no such partitioned topic.
            As `get_or_create`.
        """
        if not 1 <= count <= _PARTITIONS_MAX:
            raise InvalidRequestError(f"a topic has 1 to {_PARTITIONS_MAX} partitions")
        async with self._lock_of(f"partitions {name}"):
            TopicName.parse(name)
            known = (await self._listing.cached(0.0)).partitions_of(name)
            if not known and is_growing:
                raise NotFoundError(f"there is no partitioned topic {name}", topic=name)
            last = parse_partition(known[-1]) if known else None
            has = count if last is None else last[1] + 1
            if has > count or (has < count and not is_growing):
                raise AlreadyExistsError(
                    f"{name} has {has} partitions, not {count}",
                    topic=name,
                    hint="`ister topics grow` adds partitions; most keys then move to another one"
                    if has < count
                    else "partitions cannot be removed",
                )
            names = [partition_name(name, number) for number in range(count)]
            for one in reversed(names):
                await self.get_or_create(
                    one, is_reliable=is_reliable, ack=ack, codec=codec, is_implied=False
                )
            return names

    # -- bounds -----------------------------------------------------------------------------

    async def set_topic_policies(self, name: str, policies: dict[str, int]) -> Policies:
        """Replaces a topic's own policies; returns the policies in force."""
        topic = await self.get(name)
        await asyncio.to_thread(self.records.set_topic_policies, topic.parsed, policies)
        return await self._refresh_policies(topic)

    async def set_namespace_policies(self, namespace: str, policies: dict[str, int]) -> None:
        """Replaces the policies of a namespace's topics.

        Raises:
            NotFoundError: There is no such namespace.
        """
        if namespace not in await self.namespaces():
            raise NotFoundError(f"namespace {namespace!r} does not exist")
        await asyncio.to_thread(self.records.set_namespace_policies, namespace, policies)
        for topic in self.served:
            if topic.parsed.namespace == namespace:
                await self._refresh_policies(topic)

    async def namespace_policies(self, namespace: str) -> Policies:
        """The policies of a namespace's topics, unless they have their own.

        Raises:
            NotFoundError: There is no such namespace.
        """
        if namespace not in await self.namespaces():
            raise NotFoundError(f"namespace {namespace!r} does not exist")
        own = await asyncio.to_thread(self.records.namespace_policies, namespace)
        return Policies.of(self.config.broker.policies, own)

    async def _refresh_policies(self, topic: ServedTopic) -> Policies:
        def read() -> Policies:
            record = self.records.topic(topic.parsed) or ServedRecord()
            return self._policies_of(topic.parsed, record)

        policies = await asyncio.to_thread(read)
        topic.set_policies(policies)
        return policies

    # -- moving and deleting ----------------------------------------------------------------

    async def unload(self, name: str) -> None:
        """Hands a topic over, so that any broker may have it; another one is preferred for a while.

        Streams end, cursors and all messages are in the stores.

        Raises:
            ConflictError: There is no other place for it: the log is in memory.
            NotFoundError: It is not open here.
            UnavailableError: A store does not respond; the topic is still this broker's.
        """
        await run_to_completion(self._unload(name))

    async def _unload(self, name: str) -> None:
        await self.get(name)
        if self.config.storage.mode is StorageMode.MEMORY:
            raise ConflictError(
                "storage.mode is memory: a topic that is unloaded would be gone", topic=name
            )
        async with self._lock_of(name):
            topic = self._served.get(name)
            if topic is None:
                raise NotFoundError(f"the topic {name} is not open here", topic=name)
            # First, and again when its streams have ended: no other broker can write them.
            await topic.flush()
            await self._drop(topic, UnavailableError("the topic is moved", topic=name))
            await topic.flush()
            if topic.is_reliable:
                await asyncio.to_thread(self.log.seal, name)
                self.sequenced.forget(name)
            if len(await asyncio.to_thread(self.cluster.brokers)) > 1:
                epoch = topic.owned.epoch if topic.owned is not None else 0
                until = asyncio.get_running_loop().time() + _MOVED_SECONDS
                self._moved[name] = (until, epoch)

    async def delete(self, name: str) -> None:
        """Deletes a topic for good, or all partitions of one.

        Raises:
            NotFoundError: It does not exist.
            As `Log.delete`.
        """
        await run_to_completion(self._delete_all(name))

    async def _delete_all(self, name: str) -> None:
        self._listing.expire()  # all partitions have to be found
        partitions = await self.partitions(name)
        if not partitions:
            raise NotFoundError(f"topic {name} does not exist", topic=name)
        for one in partitions:
            await self._delete(one)

    async def _delete(self, name: str) -> None:
        await self.get(name)
        async with self._lock_of(name):
            topic = self._served.get(name)
            if topic is None:
                raise NotFoundError(f"topic {name} does not exist", topic=name)
            await self._drop(
                topic, NotFoundError(f"the topic {name} was deleted", topic=name), flush=False
            )

            def remove() -> None:
                # The log last: as long as it exists, a failed deletion can be repeated.
                self.store.delete_all(topic.parsed)
                if topic.is_reliable:
                    self.log.delete(name)
                self.records.delete_topic(topic.parsed)

            await asyncio.to_thread(remove)
            self.unopened.pop(name, None)
            self._listing.record(name, exists=False)
            self.sequenced.forget(name)
            self.consumers.forget_subscription(name)

    async def _drop(
        self, topic: ServedTopic, reason: IsterError | None, *, flush: bool = True
    ) -> None:
        await topic.close(reason, flush=flush)
        if self._served.get(topic.name) is topic:
            del self._served[topic.name]

    def _on_lost(self, name: str) -> None:
        """Closes a topic that another broker has: clients have to look it up again."""
        topic = self._served.get(name)
        if topic is not None:
            _log.warning("another broker has the topic", extra={"topic": name})
            reason = UnavailableError("another broker has the topic", topic=name)
            task = asyncio.get_running_loop().create_task(self._drop(topic, reason, flush=False))
            threads.watch_task("ister-drop", task)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _publish_dead_letter(self, name: str, message: StreamMessage) -> None:
        topic = await self.get_or_create(name, is_reliable=True, is_implied=False)
        if not topic.is_reliable:
            raise ConflictError("the dead-letter topic is not reliable", topic=name)
        await topic.publish(message)

    # -- life -------------------------------------------------------------------------------

    async def open_all(self) -> None:
        """Opens every topic that is this node's, so that the first call finds it recovered."""
        names = sorted(await self.names())
        gate = asyncio.Semaphore(_OPEN_AT_ONCE)
        self.opening = (0, len(names))

        async def open_one(name: str) -> None:
            async with gate:
                try:
                    await self.get(name)
                except (UnavailableError, NotFoundError, TopicNameError) as error:
                    _log.info("topic not opened", extra={"topic": name, "why": str(error)})
                except (IsterError, CorruptDataError) as error:
                    # One bad topic must not keep the others from their users.
                    self.unopened[name] = str(error)
                    _log.error("topic not opened", extra={"topic": name, "error": str(error)})
                self.opening = (self.opening[0] + 1, len(names))

        await asyncio.gather(*(open_one(name) for name in names))

    async def close(self) -> None:
        """Ends every stream and writes every cursor; no topic is opened any more."""
        self.is_draining = True
        await asyncio.to_thread(self.searches.close)
        await finish(_FINISH_SECONDS)
        reason = UnavailableError("the broker is shutting down")
        await asyncio.gather(*(self._drop(topic, reason) for topic in self.served))
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _as_wanted(topic: ServedTopic, ack: AckLevel | None, codec: Codec | None) -> ServedTopic:
    """Refuses an existing topic that has another ack level or codec."""
    core = topic.topic
    if core is not None:
        for what, wanted, has in (("ack level", ack, core.ack), ("codec", codec, core.codec)):
            if wanted is not None and wanted != has:
                raise AlreadyExistsError(
                    f"the topic has the {what} {has}, not {wanted}", topic=topic.name
                )
    return topic
