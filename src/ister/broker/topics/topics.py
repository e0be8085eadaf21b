"""The topics of this broker: finding, creating and opening, moving, taking over and deleting them.

Owns: which topics are served here, which broker a client is sent to, what is done with whole
topics. Does not own: names and namespaces (`names`), what is done with an open topic
(`served_topic`), which node owns it (`ister.bucket.claim`), who stands in for a broker that is cut
off (`stand_in`).

Opening a topic claims it. A topic that another broker has, or should have, is refused with
UNAVAILABLE, which makes clients look it up again; the look-up sends them there. A topic whose
newest messages are on the disk of a broker that is down is opened read-only.

Names are compared whole, everywhere: `/default/t` is neither `/default/t2` nor a part of it. A
partitioned topic is the topics `<name>-part-0`, `<name>-part-1`, …; a plain one of the same name
excludes them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from ister.base import threads
from ister.base.clock import Clock
from ister.base.limits import MIB
from ister.base.model import AckLevel, Codec, StreamMessage, TopicName, TopicState
from ister.base.partitions import PARTITIONS_MAX, parse_partition, partition_name
from ister.broker.cluster.cluster import Cluster
from ister.broker.cluster.peers import Peers
from ister.broker.dispatch.consumer_ids import ConsumerIds
from ister.broker.dispatch.dead_letters import LetterSigner
from ister.broker.dispatch.memory_budget import Budget
from ister.broker.policies import Policies
from ister.broker.publish.admission import Admission
from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.security.principal_limits import PrincipalLimit
from ister.broker.tasks import finish, run_to_completion
from ister.broker.topics.broker_records import BrokerRecords, ServedRecord
from ister.broker.topics.names import TopicNames
from ister.broker.topics.served_topic import ServedTopic, TopicContext
from ister.broker.topics.stand_in import StandIn
from ister.broker.topics.time_searches import TimeSearches
from ister.bucket.members import Member
from ister.config import Config, StorageMode
from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    PermissionDeniedError,
    StoresDifferError,
    TopicNameError,
    UnavailableError,
    WaitsForDiskError,
)
from ister.metadata.base import MetadataStore
from ister.subscription.store import StoredSubscription, SubscriptionStore
from ister.topic.dedup import SequencedTopics
from ister.topic.log import Log
from ister.topic.read_only import ReadOnlyTopic
from ister.topic.topic import Topic

_log = logging.getLogger("ister.broker.topics.topics")
_opening_log = logging.getLogger("ister.broker.topics.open_topics")

# Listing all names takes as long as there are topics; other brokers' new ones show after this time.
_KNOWN_SECONDS: Final = 10.0
# How long a client may take to create all partitions of a topic by using them.
_PARTITIONS_SECONDS: Final = 60
_ELSEWHERE_SECONDS: Final = 30.0
_OPEN_AT_ONCE: Final = 8
# How long an end waits for deletions and the like; a store may not answer.
_FINISH_SECONDS: Final = 3.0
# How long a caller waits for another broker to hand a topic over.
_MOVE_SECONDS: Final = 30.0
_MOVE_POLL_SECONDS: Final = 0.1


class NoNamespaceError(NotFoundError):
    """A topic cannot be created: its namespace does not exist."""


class ElsewhereError(UnavailableError):
    """Another broker has the topic, or should have it: clients look it up again."""

    def __init__(self, member: Member, topic: str) -> None:
        super().__init__(
            f"the topic is at the broker {member.broker_url}: look it up again", topic=topic
        )
        self.member = member
        self.timeout_seconds = _ELSEWHERE_SECONDS
        """How long that broker may take for a forwarded call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """What a take-over gives up: messages from `offset` on that only the disk of `node` has."""

    topic: str
    node: str
    offset: int


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
        secret: str,
        schemas: SchemaRegistry | None = None,
    ) -> None:
        root = config.storage.metadata.root_prefix
        self.log = log
        self.config = config
        self.records = BrokerRecords(metadata, root_prefix=root)
        self._served: dict[str, ServedTopic] = {}
        self.names = TopicNames(log, self.records, config=config, served=self._served)
        self.admission = Admission(schemas)
        self._schemas = schemas
        self.cluster = cluster
        self.stand_in = StandIn(cluster)
        self.signer = LetterSigner(secret)
        """Marks the dead letters of this cluster's brokers."""
        self.consumers = ConsumerIds()
        self.sequenced = SequencedTopics()
        self.producers: dict[int, str] = {}
        """The topic of each producer, by its id."""
        self.store = SubscriptionStore(metadata, root_prefix=root, clock=clock)
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
            signer=self.signer,
            on_lost=self.lose,
        )
        # Each lives as long as its topic is being opened: invalid names leave nothing behind.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._moving: set[str] = set()
        self.moved_total = 0
        """Topics that were handed over to other brokers since the start."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_draining = False
        self.opening = (0, 0)
        """Of the topics that are opened at the start: how many were tried, of how many."""
        self.unopened: dict[str, str] = {}
        """Topics that could not be opened when they were last tried, and why."""
        self.redirects: Counter[str] = Counter()
        """How often clients were sent to another broker, by namespace."""
        log.metrics.register_counter("broker.messages_in_total", lambda: self.messages_in)
        log.metrics.register_counter("broker.bytes_in_total", lambda: self.bytes_in)

    @property
    def peers(self) -> Peers | None:
        """Calls other brokers; None while the broker starts."""
        return self.stand_in.peers

    @property
    def served(self) -> list[ServedTopic]:
        """The topics that are open here."""
        return list(self._served.values())

    # -- finding ----------------------------------------------------------------------------

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
        is_exact: bool = False,
        check_growth: Callable[[str], None] | None = None,
    ) -> ServedTopic:
        """Returns a topic; creates it if it does not exist.

        Args:
            name: Its name.
            is_reliable: Whether a new topic has a log.
            ack: The ack level of a new topic.
            codec: The codec of a new topic.
            is_implied: Whether it is created because it is used (`broker.auto_create_topics`).
            is_exact: Whether to refuse an existing topic that is reliable where a new one would
                not be, or the other way round.
            check_growth: Called with a topic; raises if the caller may not add a partition to it.
                None refuses all callers.

        Raises:
            As `get`.
            NotFoundError: It does not exist, and is not created by using it.
            NoNamespaceError: Its namespace does not exist.
            AlreadyExistsError: There is a partitioned topic of that name, or a plain one; or it
                would be a partition of a topic that has fewer.
            CapacityError: There are too many topics.
        """
        try:
            return _as_wanted(await self.get(name), ack, codec, is_reliable if is_exact else None)
        except NotFoundError:
            if is_implied and not self.config.broker.auto_create_topics:
                raise
        parsed = TopicName.parse(name)
        partition = parse_partition(name)
        # A topic and its partitions exclude each other, so they are made one after the other.
        async with self._lock_of(f"new {partition[0] if partition is not None else name}"):
            await self._check_new(parsed, is_implied=is_implied)
            if partition is not None:
                await self._check_growth(*partition, check_growth, is_implied=is_implied)
            made = await self._open(parsed, ServedRecord(is_reliable=is_reliable), ack, codec)
        return _as_wanted(made, ack, codec, is_reliable if is_exact else None)

    async def _check_new(self, name: TopicName, *, is_implied: bool) -> None:
        if name.namespace not in await self.names.namespaces():
            # Not retriable: nothing creates it later.
            raise NoNamespaceError(
                f"namespace {name.namespace!r} does not exist",
                hint=f"create it: ister namespaces create {name.namespace}",
            )
        known = await self.names.listing.cached(_KNOWN_SECONDS)
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

    async def _check_growth(
        self,
        base: str,
        number: int,
        check: Callable[[str], None] | None,
        *,
        is_implied: bool,
    ) -> None:
        """Refuses a partition that would be one more of a partitioned topic.

        Most keys would move to another partition. But Danube's clients create a partitioned topic
        by using its partitions, in any order and at several brokers.
        """
        if number >= PARTITIONS_MAX:
            raise InvalidRequestError(
                f"a topic has at most {PARTITIONS_MAX} partitions",
                topic=partition_name(base, number),
            )
        existing = await self.names.partitions(base)
        parsed, now = TopicName.parse(base), self._context.clock.now_ns() // 10**9
        if not existing:
            if is_implied:
                await asyncio.to_thread(self.records.begin_partitions, parsed, now)
            return
        last = parse_partition(existing[-1])
        count = 0 if last is None else last[1] + 1
        if number < count:  # its creation was cut short
            return
        if is_implied:
            begun = await asyncio.to_thread(self.records.partitions_begun, parsed)
            if begun is not None and abs(now - begun) < _PARTITIONS_SECONDS:
                return
        if check is not None:
            check(base)
        if check is None or number > count:
            raise AlreadyExistsError(
                f"{base} has {count} partitions",
                topic=partition_name(base, number),
                hint="`ister topics grow` adds partitions; most keys then move to another one",
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
            if (stand_in := self.stand_in.find()) is not None:
                raise ElsewhereError(await self.stand_in.find_owner(stand_in, text), text)
            try:
                await asyncio.to_thread(self._check_here, name, creates=new is not None)
            except ElsewhereError:
                self.unopened.pop(text, None)
                raise
            changes = self.names.policy_changes
            topic, policies, stored = await asyncio.to_thread(
                self._open_blocking, name, new, ack, codec
            )
            if self.is_draining:
                raise UnavailableError("the broker is shutting down", topic=text)
            self._served[text] = served = ServedTopic(name, topic, policies, stored, self._context)
            self.unopened.pop(text, None)
            self.names.listing.record(text, exists=True)
            if self.names.policy_changes != changes:
                await self.names.refresh_policies(served)
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
        policies = self.names.policies_with(name, record)
        if not record.is_reliable:
            self.cluster.claim_unlogged(name)
            return None, policies, self.store.load(name, "")
        topic = self._open_log(text, ack, codec, creates=new is not None)
        owned = topic.bucket.owned if topic.bucket is not None else None
        clipped: list[str] = []
        if topic.state is not TopicState.QUARANTINED and not isinstance(topic, ReadOnlyTopic):
            # Offsets beyond the end are assigned again. What cursors say about them must be removed
            # first, or new messages would count as acknowledged.
            clipped = self.store.clip(name, topic.next_offset, owned=owned)
        incarnation = owned.record.incarnation if owned is not None else ""
        stored = self.store.load(name, incarnation)
        for one in list(stored.values()):
            # Receipts of offsets that are assigned again become invalid, too.
            if clipped or not one.receipt_key:
                stored[one.name] = self.store.renew_key(name, one, owned=owned)
        return topic, policies, stored

    def _open_log(
        self, name: str, ack: AckLevel | None, codec: Codec | None, *, creates: bool
    ) -> Topic:
        try:
            try:
                return self._open_found(name)
            except NotFoundError:
                if not creates:
                    raise
                return self.log.topic(name, create=True, ack=ack, codec=codec)
        except WaitsForDiskError as error:
            if error.node == self.cluster.own.node:
                raise self._refused(name, error) from error
            return self._open_read_only(name, error)
        except AlreadyExistsError:
            raise
        except StoresDifferError as error:
            raise self._refused(name, error) from error
        except ConflictError as error:
            # Another broker has just claimed it: the client looks it up again.
            raise UnavailableError(str(error), topic=name) from error

    def _open_found(self, name: str) -> Topic:
        topic = self.log.topic(name)
        if (
            topic.bucket is not None
            or topic.wal.directory is None
            or topic.ack is not AckLevel.SYNCED
        ):
            # With a bucket, the claim has compared the cursors. At lower levels, messages before a
            # cursor may have been lost in a crash.
            return topic
        end = self.store.highest_cursor(TopicName.parse(name))
        return self.log.expect_end(name, end) if end > topic.next_offset else topic

    def _refused(self, name: str, error: ConflictError) -> UnavailableError:
        """Records that an operator has to decide about a topic; clients wait meanwhile."""
        if self.unopened.get(name) != str(error):
            self.unopened[name] = str(error)
            _opening_log.error("topic not opened", extra={"topic": name, "error": str(error)})
        return UnavailableError(str(error), topic=name)

    def _open_read_only(self, name: str, waits: WaitsForDiskError) -> Topic:
        try:
            topic = self.log.read_only_topic(name)
        except ConflictError as error:
            # Another broker serves it read-only, or its own broker is back.
            raise UnavailableError(str(error), topic=name) from error
        _opening_log.warning(
            "topic is read-only: its newest messages may be on the disk of a broker that is down",
            extra={"topic": name, "node": waits.node, "offset": waits.offset},
        )
        return topic

    # -- where a topic is -------------------------------------------------------------------

    def _route(self, name: TopicName, *, creates: bool = False) -> Member:
        """The broker that has a topic, or should have it. Blocks; see `Cluster.route`."""
        return self.cluster.route(
            name, is_unlogged=lambda: self.records.topic(name) is not None, creates=creates
        )

    def _is_other(self, member: Member) -> bool:
        """Whether a member is another process; a copy that replaced this one has the same node."""
        return member.node != self.cluster.own.node or self.cluster.members.is_replaced

    def _check_here(self, name: TopicName, *, creates: bool) -> None:
        found = self._route(name, creates=creates)
        if self._is_other(found):
            raise ElsewhereError(found, str(name))

    async def locate(self, name: str) -> Member:
        """Returns the broker that has a topic, or should have it.

        Raises:
            UnavailableError: It is on its way to a broker, or a process that is no broker has it.
        """
        parsed = TopicName.parse(name)
        if (stand_in := self.stand_in.find()) is not None:
            found = await self.stand_in.find_owner(stand_in, name)
        elif self.find_open(name) is not None:
            return self.cluster.own
        else:
            found = await asyncio.to_thread(self._route, parsed)
        if self._is_other(found):
            self.redirects[parsed.namespace] += 1
            return found
        await self.get(name)
        return self.cluster.own

    async def is_elsewhere(self, name: str) -> bool:
        """Whether another broker has a topic, or should have it: `locate` says which."""
        if self.stand_in.member is not None and self.cluster.is_in_doubt:
            return True
        if self.find_open(name) is not None:
            return False
        parsed = TopicName.parse(name)
        try:
            found = await asyncio.to_thread(self._route, parsed)
        except IsterError:
            return False
        return self._is_other(found)

    # -- cut off from the metadata store ----------------------------------------------------

    async def check_lease(self) -> None:
        """Asks other brokers while the lease is in doubt.

        Once it has ended, gives topics up that have a new owner, and refuses sends that wait for
        the bucket. If no broker reaches the metadata store, nothing changes: it is waited for.
        """
        owners = await self.stand_in.ask(list(self._served))
        if self.cluster.is_leased or not (self.stand_in.member or self.stand_in.is_isolated):
            return
        for topic in self.served:
            owner, core = owners.get(topic.name), topic.topic
            has_moved = owner is not None and owner.node != self.cluster.own.node
            if core is None or core.bucket is None or topic.is_read_only:
                if has_moved:
                    self.lose(topic.name)
            elif has_moved:
                error = FencedError("another broker has the topic", topic=topic.name)
                core.bucket.owned.give_up(error)
            else:
                # They would wait until the store answers.
                core.aio.refuse_waits(core.bucket.lapsed_error())

    # -- losing -----------------------------------------------------------------------------

    async def _drop(
        self, topic: ServedTopic, reason: IsterError | None, *, flush: bool = True
    ) -> None:
        await topic.close(reason, flush=flush)
        if self._served.get(topic.name) is topic:
            del self._served[topic.name]

    def _release(self, topic: ServedTopic) -> None:
        """Releases a closed topic that has no claim: read-only, or without a log."""
        if isinstance(topic.topic, ReadOnlyTopic):
            topic.topic.close()
        elif not topic.is_reliable:
            self.cluster.release_unlogged(topic.parsed)

    async def check_read_only(self) -> None:
        """Closes read-only topics whose broker is back, so that clients look them up again."""
        for topic in self.served:
            if isinstance(topic.topic, ReadOnlyTopic):
                try:
                    await asyncio.to_thread(topic.topic.check)
                except FencedError:
                    self.lose(topic.name)

    def lose(self, name: str) -> None:
        """Closes a topic that another broker has: clients have to look it up again."""
        topic = self._served.get(name)
        if topic is not None:
            _opening_log.warning("another broker has the topic", extra={"topic": name})
            reason = UnavailableError("another broker has the topic", topic=name)
            task = asyncio.get_running_loop().create_task(self._give_up(topic, reason))
            threads.watch_task("ister-drop", task)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _give_up(self, topic: ServedTopic, reason: IsterError) -> None:
        await self._drop(topic, reason, flush=False)
        await asyncio.to_thread(self._release, topic)

    async def _publish_dead_letter(self, name: str, message: StreamMessage) -> None:
        try:
            topic = await self.get_or_create(name, is_reliable=True, is_implied=False)
        except ElsewhereError as error:
            if self.peers is None:
                raise
            await self.peers.publish_dead_letter(error.member, name, message)
            return
        await topic.publish_dead_letter(message)

    async def take_dead_letter(self, name: str, message: StreamMessage) -> None:
        """Publishes a dead letter of another broker."""
        topic = await self.get_or_create(name, is_reliable=True, is_implied=False)
        await topic.publish_dead_letter(message)

    # -- partitions -------------------------------------------------------------------------

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

        The first partition of a new topic is created last: while it is missing, the topic is
        incomplete, and the same call completes it.

        Args:
            name: The topic's name.
            count: The number of partitions.
            is_reliable: Whether new partitions have a log.
            ack: The ack level of new partitions.
            codec: The codec of new partitions.
            is_growing: Whether to add partitions to a topic that has fewer. Which partition a key
                goes to depends on their number, so this has to be asked for.

        Raises:
            AlreadyExistsError: It has another number of partitions.
            NotFoundError: `is_growing`, and there is no such partitioned topic.
            As `get_or_create`.
        """
        if not 1 <= count <= PARTITIONS_MAX:
            raise InvalidRequestError(f"a topic has 1 to {PARTITIONS_MAX} partitions")
        async with self._lock_of(f"partitions {name}"):
            TopicName.parse(name)
            known = (await self.names.listing.cached(0.0)).partitions_of(name)
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
            for one in names if is_growing else reversed(names):
                await self.create_anywhere(one, is_reliable=is_reliable, ack=ack, codec=codec)
            return names

    async def create_anywhere(
        self, name: str, *, is_reliable: bool, ack: AckLevel | None, codec: Codec | None
    ) -> None:
        """Creates a topic at the broker that should have it."""
        try:
            await self.get_or_create(
                name,
                is_reliable=is_reliable,
                ack=ack,
                codec=codec,
                is_implied=False,
                is_exact=True,
                check_growth=lambda _: None,
            )
        except ElsewhereError as error:
            if self.peers is None:
                raise
            await self.peers.create_topic(
                error.member, name, is_reliable=is_reliable, ack=ack, codec=codec
            )
            self.names.listing.record(name, exists=True)

    # -- changing, moving and deleting ------------------------------------------------------

    async def set_topic_policies(self, name: str, policies: dict[str, int]) -> Policies:
        """Replaces a topic's own policies; returns the policies in force."""
        topic = await self.get(name)
        await asyncio.to_thread(self.records.set_topic_policies, topic.parsed, policies)
        return await self.names.refresh_policies(topic)

    async def unload(self, name: str, *, to: str | None = None, reason: str = "unloaded") -> None:
        """Hands a topic over to another broker, if there is one.

        Appends continue while what is in local files is uploaded and checked. Then streams end,
        the rest and all cursors go to the stores, and the other broker opens the topic.

        Args:
            name: The topic.
            to: The other broker's node; the one with the least load by default.
            reason: Why, for the assignment.

        Raises:
            ConflictError: The log is in memory, so the topic would be lost.
            NotFoundError: It is not open here.
            UnavailableError: A store does not respond; the topic is still this broker's.
        """
        if name in self._moving:
            raise UnavailableError("the topic is being handed over", topic=name)
        self._moving.add(name)
        try:
            await run_to_completion(self._unload(name, to, reason))
        finally:
            self._moving.discard(name)

    async def _unload(self, name: str, to: str | None, reason: str) -> None:
        topic = await self.get(name)
        if self.config.storage.mode is StorageMode.MEMORY:
            raise ConflictError(
                "storage.mode is memory: a topic that is unloaded would be gone", topic=name
            )
        if to is None:
            placement = await asyncio.to_thread(self.cluster.placement)
            to = placement.choose(name)
        assured: set[tuple[str, int]] = set()
        bucket = topic.topic.bucket if topic.topic is not None else None
        if bucket is not None and not topic.is_read_only:
            # Before its streams end: it may take long, and clients do not notice.
            try:
                assured = await asyncio.to_thread(bucket.prepare_seal)
            except CorruptDataError:
                if self._served.get(name) is not topic:
                    # Nothing is corrupt: it was deleted meanwhile.
                    raise _not_open_here(name) from None
                raise
        async with self._lock_of(name):
            if self._served.get(name) is not topic or self.is_draining:
                raise _not_open_here(name)
            # Cursors, now and again when the streams have ended: no other broker can write them.
            await topic.flush()
            if to is not None:
                # Before the hand-over, so that look-ups already lead there; and again after it,
                # because that is when the other broker can open it.
                await asyncio.to_thread(self.cluster.assign, name, to, reason)
            reason_text = "the topic is being moved to another broker"
            await self._drop(topic, UnavailableError(reason_text, topic=name))
            await topic.flush()
            if topic.is_read_only or not topic.is_reliable:
                await asyncio.to_thread(self._release, topic)
            else:
                await asyncio.to_thread(partial(self.log.seal, name, assured=assured))
                self.sequenced.forget(name)
            if to is not None:
                await asyncio.to_thread(self.cluster.assign, name, to, reason)
                self.moved_total += 1

    async def hand_over(self) -> int:
        """Hands all topics over to other brokers, several at a time; takes none from now on.

        A topic that cannot be handed over stays this node's.

        Returns:
            How many topics were handed over; 0 if there is no other broker.
        """
        await asyncio.to_thread(self.cluster.drain)
        moved, _ = await self.hand_over_topics([topic.name for topic in self.served])
        return len(moved)

    async def hand_over_topics(
        self, names: Sequence[str], *, at_once: int = _OPEN_AT_ONCE, timeout: float | None = None
    ) -> tuple[list[str], list[str]]:
        """Hands topics over to other brokers, each to the one with the least load.

        Args:
            names: The topics.
            at_once: How many at a time.
            timeout: Seconds after which no further topic is handed over; None for no limit.

        Returns:
            Those that were handed over, and those that could not be.
        """
        placement = await asyncio.to_thread(self.cluster.placement)
        loop, gate = asyncio.get_running_loop(), asyncio.Semaphore(at_once)
        end_at = float("inf") if timeout is None else loop.time() + timeout
        moved: list[str] = []
        failed: list[str] = []

        async def leave(name: str, to: str) -> None:
            async with gate:
                if loop.time() >= end_at:
                    return
                try:
                    await self.unload(name, to=to, reason="its broker is drained")
                    moved.append(name)
                except IsterError as error:
                    failed.append(name)
                    _log.warning(
                        "topic not handed over", extra={"topic": name, "error": str(error)}
                    )

        chosen = [(name, placement.choose(name)) for name in names]
        await asyncio.gather(*(leave(name, to) for name, to in chosen if to is not None))
        return moved, failed

    async def move(self, name: str, to: str) -> None:
        """Moves a topic to another broker, whichever broker has it; returns when it is there.

        A later move of the same topic replaces this one.

        Raises:
            ConflictError: The broker takes no topics, or the topic was assigned to another one.
            UnavailableError: The topic is not there in time, or a store does not respond.
        """
        parsed = TopicName.parse(name)
        members = {one.node: one for one in await asyncio.to_thread(self.cluster.brokers)}
        target = members.get(to)
        if target is None:
            raise NotFoundError(f"broker {to} does not exist", hint="ister brokers list")
        if not target.takes_topics:
            why = f"is {target.state}" if not target.is_active else "has no room on its disk"
            raise ConflictError(f"the broker {to} {why}")
        found = await asyncio.to_thread(self._route, parsed)
        if found.node == to:
            # A move that is under way, or cannot be made, would still take it away.
            await asyncio.to_thread(self.cluster.keep, name, to, "moved")
        elif found.node == self.cluster.own.node:
            await self.unload(name, to=to, reason="moved")
        else:
            await asyncio.to_thread(self.cluster.assign, name, to, "moved")
        await self._wait_for_owner(parsed, to)

    async def _wait_for_owner(self, name: TopicName, node: str) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _MOVE_SECONDS
        while (await asyncio.to_thread(self.cluster.owner_node, name)) != node:
            assigned = await asyncio.to_thread(self.cluster.assigned_node, str(name))
            if assigned != node:
                raise ConflictError(
                    f"the topic was assigned to the broker {assigned} meanwhile"
                    if assigned is not None
                    else "the topic was deleted meanwhile",
                    topic=str(name),
                )
            if loop.time() > give_up_at:
                raise UnavailableError(
                    f"the broker {node} does not have the topic after {_MOVE_SECONDS:.0f} seconds",
                    topic=str(name),
                    hint="it is assigned to that broker, and moves when both brokers can",
                )
            await asyncio.sleep(_MOVE_POLL_SECONDS)

    async def find_lost_tail(self, name: str) -> GivenUp:
        """What a take-over of a topic would give up.

        Raises:
            ConflictError: A broker has it, or its last broker is up.
        """
        return await asyncio.to_thread(self._find_lost_tail, TopicName.parse(name))

    def _find_lost_tail(self, name: TopicName) -> GivenUp:
        stores = self.log.stores
        if stores is None:
            raise ConflictError("this broker has no bucket to continue from", topic=str(name))
        catalog = stores.catalog(name)
        found, owner = catalog.record(), self.cluster.owner_node(name)
        if found is None or not found[0].is_open:
            if self.records.topic(name) is not None:
                raise ConflictError(
                    "the topic is not reliable: no disk has messages of it", topic=str(name)
                )
            raise NotFoundError(f"topic {name} does not exist", topic=str(name))
        node = owner if owner is not None else found[0].node
        if owner is not None or any(one.node == node for one in self.cluster.brokers()):
            raise ConflictError(
                f"the broker {node}, which has the topic, is up, or its lease has not ended yet",
                topic=str(name),
                hint=f"ister topics move {name} --to NODE moves it without a loss",
            )
        last = catalog.last()
        return GivenUp(topic=str(name), node=node, offset=last.end if last is not None else 0)

    async def take_over(self, name: str) -> GivenUp:
        """Opens a topic whose newest messages are on a lost disk; returns what it gives up."""
        return await run_to_completion(self._take_over(TopicName.parse(name)))

    async def _take_over(self, name: TopicName) -> GivenUp:
        text = str(name)
        async with self._lock_of(text):
            given_up = await asyncio.to_thread(self._find_lost_tail, name)
            served = self._served.get(text)
            if served is not None:
                ended = UnavailableError("the topic is being taken over", topic=text)
                await self._drop(served, ended)
                await asyncio.to_thread(self._release, served)
            await asyncio.to_thread(self.log.topic, text, take_over=True)
            await asyncio.to_thread(self.cluster.assign, text, self.cluster.own.node, "taken over")
        _log.warning(
            "topic taken over",
            extra={"topic": text, "node": given_up.node, "offset": given_up.offset},
        )
        await self.get(text)
        return given_up

    async def give_up_tails(self) -> None:
        """Takes over topics that have waited for their broker for as long as the settings allow."""
        after = self.config.broker.cluster.failover.give_up_tail_after_seconds
        if after is None:
            return
        now = self._context.clock.boottime()
        for topic in self.served:
            core = topic.topic
            if isinstance(core, ReadOnlyTopic) and now - core.opened_at >= after:
                try:
                    await self.take_over(topic.name)
                except IsterError as error:
                    _log.warning(
                        "topic not taken over", extra={"topic": topic.name, "error": str(error)}
                    )

    async def delete(self, name: str) -> None:
        """Deletes a topic for good, or all partitions of one."""
        await run_to_completion(self._delete_all(name))

    async def _delete_all(self, name: str) -> None:
        self.names.listing.expire()  # all partitions have to be found
        partitions = await self.names.partitions(name)
        if not partitions:
            raise NotFoundError(f"topic {name} does not exist", topic=name)
        for one in partitions:
            await self._delete(one)

    async def _delete(self, name: str) -> None:
        try:
            await self.get(name)
        except ElsewhereError as error:
            if self.peers is None:
                raise
            await self.peers.delete_topic(error.member, name)
            self.names.listing.record(name, exists=False)
            # This broker has settings of it in a cache.
            await asyncio.to_thread(self._forget_schema, name)
            return
        async with self._lock_of(name):
            topic = self._served.get(name)
            if topic is None:
                raise NotFoundError(f"topic {name} does not exist", topic=name)
            if isinstance(topic.topic, ReadOnlyTopic):
                # Before anything of it is removed: its broker comes back with it.
                raise topic.topic.refused_error()
            await self._drop(
                topic, NotFoundError(f"the topic {name} was deleted", topic=name), flush=False
            )

            def remove() -> None:
                # The log last: as long as it exists, a failed deletion can be repeated.
                self.store.delete_all(topic.parsed)
                self._forget_schema(name)
                if topic.is_reliable:
                    self.log.delete(name)
                self.records.delete_topic(topic.parsed)
                self.cluster.release_unlogged(topic.parsed)
                self.cluster.forget(name)

            await asyncio.to_thread(remove)
            self.unopened.pop(name, None)
            self.names.listing.record(name, exists=False)
            self.sequenced.forget(name)
            self.consumers.forget_subscription(name)

    def _forget_schema(self, name: str) -> None:
        if self._schemas is not None:
            self._schemas.forget_topic(name)

    # -- life -------------------------------------------------------------------------------

    async def open_all(self) -> None:
        """Opens every topic that is this node's, so that the first call finds it recovered."""
        own = await asyncio.to_thread(self.cluster.own_topics)
        names = sorted(await self.names.all() if own is None else own)
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
        flush = self.cluster.is_leased
        await asyncio.gather(*(self._drop(topic, reason, flush=flush) for topic in self.served))
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _as_wanted(
    topic: ServedTopic, ack: AckLevel | None, codec: Codec | None, is_reliable: bool | None
) -> ServedTopic:
    """Refuses an existing topic that has another dispatch strategy, ack level or codec."""
    core = topic.topic
    if is_reliable not in {None, topic.is_reliable}:
        has = "reliable" if topic.is_reliable else "not reliable"
        raise AlreadyExistsError(f"topic {topic.name} exists and is {has}", topic=topic.name)
    if core is not None:
        for what, wanted, has in (("ack level", ack, core.ack), ("codec", codec, core.codec)):
            if wanted is not None and wanted != has:
                raise AlreadyExistsError(
                    f"the topic has the {what} {has}, not {wanted}", topic=topic.name
                )
    return topic


def _not_open_here(name: str) -> NotFoundError:
    return NotFoundError(f"the topic {name} is not open here", topic=name)
