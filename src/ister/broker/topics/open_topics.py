"""Finds, creates and opens the topics of this broker; closes those that another broker has.

Owns: which topics are served here, and which broker a client is sent to. Does not own: what is done
with a topic (`served_topic`), which node owns it (`ister.bucket.claim`), moves and deletion
(`topics`).

Opening a topic claims it. A topic that another broker has, or should have, is refused with
UNAVAILABLE, which makes clients look it up again; the look-up sends them there. A topic whose
newest messages are on the disk of a broker that is down is opened read-only.

A broker that cannot renew its lease asks the others, which may still reach the metadata store. One
that does is the stand-in: once the lease has ended, clients that look a topic up are sent to its
new owner or else to the stand-in, and topics that have a new owner are given up. A broker that
reaches neither the metadata store nor another broker answers UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Final
from weakref import WeakValueDictionary

from ister.base import threads
from ister.base.clock import Clock
from ister.base.limits import MIB
from ister.base.model import AckLevel, Codec, StreamMessage, TopicName, TopicState
from ister.base.partitions import PARTITIONS_MAX, parse_partition, partition_name
from ister.broker.cluster.cluster import Cluster
from ister.broker.cluster.peers import Peers
from ister.broker.dispatch.dead_letters import LetterSigner
from ister.broker.dispatch.memory_budget import Budget
from ister.broker.policies import Policies
from ister.broker.publish.admission import Admission
from ister.broker.rpc.principal_limits import PrincipalLimit
from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.topics.broker_records import BrokerRecords, ServedRecord
from ister.broker.topics.consumer_ids import ConsumerIds
from ister.broker.topics.names import TopicNames
from ister.broker.topics.served_topic import ServedTopic, TopicContext
from ister.broker.topics.tasks import run_to_completion
from ister.broker.topics.time_searches import TimeSearches
from ister.bucket.members import Member
from ister.config import Config
from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    ConflictError,
    FencedError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    PermissionDeniedError,
    StoresDifferError,
    UnavailableError,
    WaitsForDiskError,
    WaitTimeoutError,
)
from ister.metadata.base import MetadataStore
from ister.subscription.store import StoredSubscription, SubscriptionStore
from ister.topic.dedup import SequencedTopics
from ister.topic.log import Log
from ister.topic.read_only import ReadOnlyTopic
from ister.topic.topic import Topic

_log = logging.getLogger("ister.broker.topics.open_topics")

# Listing all names takes as long as there are topics; other brokers' new ones show after this time.
_KNOWN_SECONDS: Final = 10.0
# How long a client may take to create all partitions of a topic by using them.
_PARTITIONS_SECONDS: Final = 60
_ELSEWHERE_SECONDS: Final = 30.0
# A broker that is cut off asks this many others at a time.
_ASKED_AT_ONCE: Final = 3


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


class OpenTopics(TopicNames):
    """The part of `Topics` that opens them. Used on the broker's loop alone."""

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
        super().__init__(log, BrokerRecords(metadata, root_prefix=root), config=config)
        self.admission = Admission(schemas)
        self._schemas = schemas
        self.cluster = cluster
        self.peers: Peers | None = None
        """Calls other brokers; None while the broker starts."""
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
        self.stand_in: Member | None = None
        """Another broker that reaches the metadata store while this one seems not to."""
        self.is_isolated = False
        """Whether this broker reaches neither the metadata store nor another broker."""
        self.redirects: Counter[str] = Counter()
        """How often clients were sent to another broker, by namespace."""
        log.metrics.register_counter("broker.messages_in_total", lambda: self.messages_in)
        log.metrics.register_counter("broker.bytes_in_total", lambda: self.bytes_in)

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
        existing = await self.partitions(base)
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
            if (stand_in := self.find_stand_in()) is not None:
                raise ElsewhereError(await self._find_substitute(stand_in, text), text)
            try:
                await asyncio.to_thread(self._check_here, name, creates=new is not None)
            except ElsewhereError:
                self.unopened.pop(text, None)
                raise
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
            _log.error("topic not opened", extra={"topic": name, "error": str(error)})
        return UnavailableError(str(error), topic=name)

    def _open_read_only(self, name: str, waits: WaitsForDiskError) -> Topic:
        try:
            topic = self.log.read_only_topic(name)
        except ConflictError as error:
            # Another broker serves it read-only, or its own broker is back.
            raise UnavailableError(str(error), topic=name) from error
        _log.warning(
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
            TopicNameError: The name is invalid.
            NotFoundError: It does not exist.
            UnavailableError: It is on its way to a broker, or a process that is no broker has it.
        """
        parsed = TopicName.parse(name)
        if (stand_in := self.find_stand_in()) is not None:
            found = await self._find_substitute(stand_in, name)
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
        if self.stand_in is not None and self.cluster.is_in_doubt:
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

    def find_stand_in(self) -> Member | None:
        """The broker that clients are sent to; None while this one may serve them.

        Raises:
            UnavailableError: There is none.
        """
        if self.cluster.is_leased:
            return None
        if self.is_isolated:
            raise UnavailableError(
                "this broker reaches neither the metadata store nor another broker",
                hint="connect to another broker",
            )
        return self.stand_in

    async def _find_substitute(self, stand_in: Member, name: str) -> Member:
        """The broker that clients of a topic are sent to while this one is cut off."""
        assert self.peers is not None  # noqa: S101 - for mypy
        found = (await self.peers.find_owners(stand_in, [name]) or {}).get(name)
        return stand_in if found is None or found.node == self.cluster.own.node else found

    async def check_lease(self) -> None:
        """Asks other brokers while the lease is in doubt.

        Once it has ended, gives topics up that have a new owner, and refuses sends that wait for
        the bucket. If no broker reaches the metadata store, nothing changes: it is waited for.
        """
        self.stand_in, self.is_isolated, owners = await self._ask_others()
        if self.cluster.is_leased or not (self.stand_in or self.is_isolated):
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

    async def _ask_others(self) -> tuple[Member | None, bool, dict[str, Member]]:
        """The stand-in, whether no other broker responds, and the owners of open topics."""
        peers, others = self.peers, self.cluster.members.known_others
        if peers is None or not self.cluster.is_in_doubt:
            return None, False, {}
        names = [topic.name for topic in self.served]
        asked = random.sample(others, min(len(others), _ASKED_AT_ONCE))
        answers = await asyncio.gather(
            *(peers.find_owners(one, names) for one in asked), return_exceptions=True
        )
        for one, owners in zip(asked, answers, strict=True):
            if isinstance(owners, dict):
                return one, False, owners
        silent = all(isinstance(one, UnavailableError | WaitTimeoutError) for one in answers)
        return None, silent, {}

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
            _log.warning("another broker has the topic", extra={"topic": name})
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
        """Publishes a dead letter of another broker.

        Raises:
            As `get_or_create`, and `ServedTopic.publish_dead_letter`.
        """
        topic = await self.get_or_create(name, is_reliable=True, is_implied=False)
        await topic.publish_dead_letter(message)


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
