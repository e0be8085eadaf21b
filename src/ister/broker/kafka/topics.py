"""Kafka's names, ids and leaders of topics.

    orders               /default/orders (`broker.kafka.namespace` names another one)
    analytics/orders     /analytics/orders
    partition 2          /default/orders-part-2; partition 0 of a topic without partitions is itself
    topic id             derived from the topic's incarnation: a recreated topic has another one
    broker id            a small number, allotted in the metadata store

Owns: this table, and answers to Metadata. Does not own: where topics are (`ister.broker.topics`).
Used on the broker's loop alone.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any, Final

from kio.schema.errors import ErrorCode

from ister.base.model import TopicName
from ister.base.partitions import parse_partition, partition_name
from ister.broker.kafka.protocol import Entity, KafkaError, Request, code_of
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.broker.topics.served_topic import ServedTopic
from ister.broker.topics.topics import ElsewhereError, Topics
from ister.bucket.members import Member
from ister.errors import (
    ConflictError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    TopicNameError,
    UnavailableError,
)
from ister.metadata.base import MetadataStore, Operation, Put
from ister.metadata.transact import transact, unchanged
from ister.topic.topic import Topic

NO_LEADER: Final = -1
NO_ID: Final = uuid.UUID(int=0)
_IDS: Final = uuid.UUID("6f1b0f52-2a0e-4c0e-9a55-6973746572aa")
_KNOWN_SECONDS: Final = 5.0
_KNOWN_MAX: Final = 10_000
_AT_ONCE: Final = 16
_NODE_MAX: Final = (1 << 31) - 1


def allot_number(metadata: MetadataStore, key: str, name: str) -> int:
    """A small number for a name, the same one each time; from 1 on. Blocks.

    `key` is where numbers are: the last one, and below it each name's.
    """
    own = f"{key}/{name}"

    def attempt() -> int | None:
        found, last = metadata.get(own), metadata.get(key)
        if found is not None:
            return int(found.value)
        number = 1 if last is None else int(last.value) + 1
        operations: list[Operation] = [Put(key, b"%d" % number), Put(own, b"%d" % number)]
        done = metadata.transact([unchanged(own, found), unchanged(key, last)], operations)
        return None if done is None else number

    return transact(attempt, ConflictError("broker numbers keep changing", path=key), attempts=20)


@dataclass(slots=True)
class _Known:
    """Incarnations of topics that are not open here, each with when it was read."""

    incarnations: dict[str, tuple[str, float]] = field(default_factory=dict)
    names: dict[uuid.UUID, str] = field(default_factory=dict)


class KafkaTopics:
    """The topics of the cluster, in Kafka's words."""

    def __init__(self, topics: Topics, guard: Guard) -> None:
        self.topics = topics
        self._guard = guard
        self._config = topics.config.broker.kafka
        self._known = _Known()

    # -- names ------------------------------------------------------------------------------

    def path_of(self, name: str | None) -> str:
        """The topic, as Ister names it, that a name of Kafka's stands for.

        Raises:
            TopicNameError: It stands for none.
        """
        text = name or ""
        path = f"/{text}" if "/" in text else f"/{self._config.namespace}/{text}"
        parsed = TopicName.parse(path)
        if parse_partition(parsed.topic) is not None:
            raise TopicNameError(
                f"topic name {text!r} is that of a partition",
                hint="use the topic's name, and the number of the partition",
            )
        return path

    def name_of(self, path: str) -> str:
        """Kafka's name of a topic."""
        parsed = TopicName.parse(path)
        in_default = parsed.namespace == self._config.namespace
        return parsed.topic if in_default else f"{parsed.namespace}/{parsed.topic}"

    # -- partitions -------------------------------------------------------------------------

    async def partitions(self, path: str) -> dict[int, str]:
        """The topics behind a topic, by the number of the partition; none if it does not exist."""
        found = await self.topics.names.partitions(path)
        numbered = ((parse_partition(one), one) for one in found)
        return {
            (0 if parsed is None or one == path else parsed[1]): one for parsed, one in numbered
        }

    async def open(self, path: str, number: int) -> ServedTopic:
        """A partition that is served here.

        Raises:
            NotFoundError: There is none.
            UnavailableError: Another broker has it, or it has no log.
        """
        topics = self.topics
        found = topics.find_open(partition_name(path, number))
        if found is None and number == 0:
            found = topics.find_open(path)
        if found is None:
            one = (await self.partitions(path)).get(number)
            if one is None:
                raise NotFoundError(f"topic {path} has no partition {number}", topic=path)
            found = await topics.get(one)
        log_of(found)
        return found

    async def open_or_create(self, path: str, number: int) -> ServedTopic:
        """As `open`; creates a topic that does not exist, where that is allowed."""
        try:
            return await self.open(path, number)
        except NotFoundError:
            if number >= self._config.default_partitions or await self.partitions(path):
                raise
        return await self.topics.get_or_create(
            partition_name(path, number),
            is_reliable=True,
            check_growth=lambda base: self.check(Permission.MANAGE_TOPIC, base),
        )

    async def create(self, path: str) -> None:
        """Creates a topic because it is used; its partitions at other brokers follow by their use.

        Raises:
            IsterError: It may not be created, or not now.
        """
        for number in reversed(range(self._config.default_partitions)):
            try:
                await self.topics.get_or_create(partition_name(path, number), is_reliable=True)
            except ElsewhereError:
                continue

    def check(self, permission: Permission, path: str) -> None:
        """Refuses callers without a permission on a topic.

        Raises:
            PermissionDeniedError: They have not.
        """
        self._guard.check(current_principal(), permission, topic=path)

    def allows(self, permission: Permission, path: str) -> bool:
        """Whether the caller has a permission on a topic."""
        return self._guard.allows(current_principal(), permission, topic=path)

    # -- ids --------------------------------------------------------------------------------

    async def id_of(self, path: str, partitions: dict[int, str]) -> uuid.UUID:
        """The id of a topic with these partitions."""
        if not partitions:
            return NO_ID
        incarnation = await self.incarnation(partitions[min(partitions)])
        found = uuid.uuid5(_IDS, f"{path} {incarnation}")
        names = self._known.names
        if len(names) >= _KNOWN_MAX:
            names.clear()
        names[found] = path
        return found

    async def incarnation(self, name: str) -> str:
        """The incarnation of a partition, wherever it is."""
        served = self.topics.find_open(name)
        if served is not None:
            return served.incarnation
        known, now = self._known.incarnations, asyncio.get_running_loop().time()
        found = known.get(name)
        if found is not None and now - found[1] < _KNOWN_SECONDS:
            return found[0]
        stores = self.topics.log.stores
        if stores is None:
            return ""
        record = await asyncio.to_thread(stores.catalog(TopicName.parse(name)).record)
        incarnation = "" if record is None else record[0].incarnation
        if len(known) >= _KNOWN_MAX:
            known.clear()
        known[name] = (incarnation, now)
        return incarnation

    async def path_of_id(self, id: uuid.UUID | None) -> str:
        """The topic that has an id.

        Raises:
            KafkaError: None has.
        """
        path = None if id is None else self._known.names.get(id)
        if path is not None and await self.id_of(path, await self.partitions(path)) == id:
            return path
        # Another broker has told it: if it is served here, its topic is among these.
        bases = {base_of(topic.name) for topic in self.topics.served}
        for base in sorted(bases):
            if id is not None and await self.id_of(base, await self.partitions(base)) == id:
                return base
        raise KafkaError(ErrorCode.unknown_topic_id)

    # -- metadata ---------------------------------------------------------------------------

    async def metadata(self, request: Request) -> Entity:
        """Answers Metadata: brokers, topics, and the leaders of partitions."""
        body, make = request.body, request.make
        asked = body.topics
        # In version 0, no topics are all topics.
        if asked is None or (request.version == 0 and not asked):
            described = [
                await self._describe(request, path, self.name_of(path), None)
                for path in await self.visible()
            ]
        else:
            creates = getattr(body, "allow_auto_topic_creation", True)
            gate = asyncio.Semaphore(_AT_ONCE)

            async def describe(one: Entity) -> Entity:
                async with gate:
                    return await self._describe_asked(request, one, creates=creates)

            described = await asyncio.gather(*map(describe, asked))
        own = self.topics.cluster.own
        return make(
            "MetadataResponse",
            brokers=await self.describe_brokers(request, "MetadataResponseBroker", "node_id"),
            cluster_id=self.cluster_id,
            controller_id=own.kafka_id,
            topics=tuple(described),
        )

    @property
    def cluster_id(self) -> str:
        """What Kafka's clients see as the id of the cluster."""
        return str(uuid.uuid5(_IDS, self.topics.config.storage.metadata.root_prefix))[:22]

    async def visible(self) -> list[str]:
        """All topics that the caller may see and that have a log, without their partitions."""
        names = await self.topics.names.all()
        unlogged = set(await asyncio.to_thread(self.topics.records.non_reliable))
        seen = self._guard.visible(current_principal(), names - unlogged)
        return sorted({base_of(name) for name in seen})

    async def brokers(self) -> list[tuple[Member, str, int]]:
        """The brokers that serve Kafka's clients, and where."""
        cluster = self.topics.cluster
        members = {one.node: one for one in await asyncio.to_thread(cluster.members.recent)}
        members[cluster.own.node] = cluster.own
        return [(one, *split_address(one.kafka_url)) for one in members.values() if one.kafka_url]

    async def describe_brokers(
        self, request: Request, kind: str, id_field: str
    ) -> tuple[Entity, ...]:
        """The brokers, as an answer has them."""
        found = [
            {id_field: one.kafka_id, "host": host, "port": port, "rack": one.zone or None}
            for one, host, port in await self.brokers()
        ]
        return request.many(kind, found)

    async def _describe_asked(self, request: Request, asked: Entity, *, creates: bool) -> Entity:
        name, topic_id = asked.name, getattr(asked, "topic_id", None)
        try:
            path = await self.path_of_id(topic_id) if name is None else self.path_of(name)
            if name is None:
                name = self.name_of(path)
            if not self.allows(Permission.LOOKUP, path):
                self.check(Permission.LOOKUP, path)
            if creates and not await self.partitions(path) and self._may_create(path):
                await self.create(path)
        except IsterError as error:
            return self._topic(request, code_of(error), name, topic_id, ())
        return await self._describe(request, path, name, topic_id)

    def _may_create(self, path: str) -> bool:
        return self.topics.config.broker.auto_create_topics and self.allows(
            Permission.PRODUCE, path
        )

    async def _describe(
        self, request: Request, path: str, name: str, topic_id: uuid.UUID | None
    ) -> Entity:
        try:
            partitions = await self.partitions(path)
            if not partitions:
                code = ErrorCode.unknown_topic_or_partition
                return self._topic(request, code, name, topic_id, ())
            described = [
                await self._partition(request, number, one)
                for number, one in sorted(partitions.items())
            ]
            topic_id = await self.id_of(path, partitions)
        except IsterError as error:
            return self._topic(request, code_of(error), name, topic_id, ())
        return self._topic(request, ErrorCode.none, name, topic_id, tuple(described))

    def _topic(
        self,
        request: Request,
        code: ErrorCode,
        name: str | None,
        id: uuid.UUID | None,
        partitions: tuple[Any, ...],
    ) -> Entity:
        if name is None and request.version < 12:
            name = ""
        return request.make(
            "MetadataResponseTopic",
            error_code=code,
            name=name,
            topic_id=None if id == NO_ID else id,
            partitions=partitions,
        )

    async def _partition(self, request: Request, number: int, name: str) -> Entity:
        leader, code = NO_LEADER, ErrorCode.none
        try:
            member = await self.locate(name)
            leader = member.kafka_id if member.kafka_url else NO_LEADER
        except IsterError as error:
            if not isinstance(error, (UnavailableError, NotFoundError)):
                code = code_of(error)
        if leader == NO_LEADER and code is ErrorCode.none:
            code = ErrorCode.leader_not_available
        nodes = () if leader == NO_LEADER else (leader,)
        return request.make(
            "MetadataResponsePartition",
            error_code=code,
            partition_index=number,
            leader_id=leader,
            replica_nodes=nodes,
            isr_nodes=nodes,
            offline_replicas=(),
        )

    async def locate(self, name: str) -> Member:
        """The broker that a partition's clients go to."""
        own = self.topics.cluster.own
        if self.topics.find_open(name) is not None:
            return own
        try:
            found = await self.topics.locate(name)
        except ElsewhereError as error:
            found = error.member
        return own if found.node == own.node else found


def base_of(name: str) -> str:
    """The topic that a partition belongs to; other topics are their own."""
    parsed = parse_partition(name)
    return name if parsed is None else parsed[0]


def log_of(topic: ServedTopic) -> Topic:
    """The log of a topic.

    Raises:
        InvalidRequestError: It has none.
    """
    if topic.topic is None:
        raise InvalidRequestError("the topic is not reliable: it has no log", topic=topic.name)
    return topic.topic


def split_address(url: str) -> tuple[str, int]:
    """Host and port of an address; without brackets."""
    host, _, port = url.rpartition(":")
    return host.strip("[]"), int(port)
