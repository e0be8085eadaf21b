"""Topics, partitions and configurations, for Kafka's administrators.

Configurations are told as they are in force here. Few of them can be set for a topic:

    max.message.bytes    the topic's policy `max_message_size`
    ister.ack            the topic's ack level, when it is created
    cleanup.policy, compression.type, message.timestamp.type    only to what they are anyway

Owns: answers to requests about these. Does not own: what is done (`ister.broker.topics`), who may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode

from ister.base.limits import MIB
from ister.base.model import AckLevel, TopicName
from ister.broker.kafka.protocol import Entity, KafkaError, Request, code_of
from ister.broker.kafka.topics import KafkaTopics, log_of
from ister.broker.policies import Policies
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.broker.topics.broker_records import ServedRecord
from ister.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
)

_TOPIC, _BROKER = 2, 4
_DEFAULT_SOURCE, _TOPIC_SOURCE, _STATIC_SOURCE = 5, 1, 4
_STRING, _LONG, _LIST = 2, 5, 7
_SET, _DELETE = 0, 1
_SIZE: Final = "max.message.bytes"
_ACK: Final = "ister.ack"
_FIXED: Final = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "message.timestamp.type": "CreateTime",
}
"""Configurations of topics that have one value here."""
_FOREVER: Final = -1


class _Config(NamedTuple):
    name: str
    value: str
    kind: int = _STRING
    source: int = _DEFAULT_SOURCE
    is_fixed: bool = True


class Admin:
    """Serves the requests of administrators."""

    def __init__(self, names: KafkaTopics, guard: Guard) -> None:
        self._names = names
        self._topics = names.topics
        self._guard = guard
        self._config = names.topics.config

    # -- topics -----------------------------------------------------------------------------

    async def _each(
        self,
        request: Request,
        kind: str,
        asked: Iterable[_Asked],
        act: Callable[[Entity], Awaitable[dict[str, Entity] | None]],
    ) -> tuple[Entity, ...]:
        """Does what is asked for, one after the other; parts of the class `kind` say how it went.

        What is asked for comes with the fields that say so again; `act` returns more of them.
        """
        results = []
        for one, fields in asked:
            code, message = ErrorCode.none, None
            more: dict[str, Entity] | None = None
            try:
                more = await act(one)
            except IsterError as error:
                code, message = code_of(error), str(error)
            told = {"error_code": code, "error_message": message, **fields, **(more or {})}
            results.append(request.make(kind, **told))
        return tuple(results)

    async def create_topics(self, request: Request) -> Entity:
        """Answers CreateTopics."""
        body = request.body
        unmade = {"topic_id": None, "num_partitions": -1, "replication_factor": -1, "configs": None}

        async def create(topic: Entity) -> dict[str, Entity]:
            count = await self._create(topic, is_trial=body.validate_only)
            path = self._names.path_of(topic.name)
            partitions = {} if body.validate_only else await self._names.partitions(path)
            topic_id = await self._names.id_of(path, partitions) if partitions else None
            return {
                "topic_id": topic_id,
                "num_partitions": count,
                "replication_factor": 1,
                "configs": (),
            }

        asked = [(one, {"name": one.name, **unmade}) for one in body.topics]
        results = await self._each(request, "CreatableTopicResult", asked, create)
        return request.make("CreateTopicsResponse", topics=results)

    async def _create(self, topic: Entity, *, is_trial: bool) -> int:
        """Creates a topic; returns the number of its partitions."""
        path = self._names.path_of(topic.name)
        self._names.check(Permission.MANAGE_TOPIC, path)
        count = topic.num_partitions
        if topic.assignments:
            count = len(topic.assignments)
        elif count == -1:
            count = self._config.broker.kafka.default_partitions
        if count < 1:
            raise KafkaError(ErrorCode.invalid_partitions, "a topic has at least one partition")
        ack: AckLevel | None = None
        size: int | None = None
        for config in topic.configs:
            if config.name == _ACK:
                ack = _parse_ack(config.value)
            elif config.name == _SIZE:
                size = _parse_size(config.value)
            else:
                _check_fixed(config.name, config.value)
        if await self._names.partitions(path):
            raise AlreadyExistsError(f"topic {path} exists", topic=path)
        if is_trial:
            return int(count)
        partitions = await self._topics.create_partitioned(path, count, is_reliable=True, ack=ack)
        if size is not None:
            for one in partitions:
                await self._set_size(one, size)
        return len(partitions)

    async def delete_topics(self, request: Request) -> Entity:
        """Answers DeleteTopics."""
        body = request.body
        names = (
            [(one.name, one.topic_id) for one in body.topics]
            if request.version >= 6
            else [(name, None) for name in body.topic_names]
        )

        async def delete(asked: Entity) -> None:
            name, topic_id = asked
            paths = self._names
            path = paths.path_of(name) if name is not None else await paths.path_of_id(topic_id)
            paths.check(Permission.MANAGE_TOPIC, path)
            await self._topics.delete(path)

        asked = [(one, {"name": one[0], "topic_id": one[1]}) for one in names]
        results = await self._each(request, "DeletableTopicResult", asked, delete)
        return request.make("DeleteTopicsResponse", responses=results)

    async def create_partitions(self, request: Request) -> Entity:
        """Answers CreatePartitions."""

        async def grow(topic: Entity) -> None:
            await self._grow(topic.name, topic.count, is_trial=request.body.validate_only)

        asked = [(one, {"name": one.name}) for one in request.body.topics]
        results = await self._each(request, "CreatePartitionsTopicResult", asked, grow)
        return request.make("CreatePartitionsResponse", results=results)

    async def _grow(self, name: str, count: int, *, is_trial: bool) -> None:
        path = self._names.path_of(name)
        self._names.check(Permission.MANAGE_TOPIC, path)
        partitions = await self._names.partitions(path)
        if not partitions:
            raise NotFoundError(f"topic {path} does not exist", topic=path)
        if partitions.get(0) == path:
            raise KafkaError(
                ErrorCode.invalid_partitions,
                "the topic was made without partitions: it cannot grow",
            )
        if count <= len(partitions):
            raise KafkaError(
                ErrorCode.invalid_partitions, f"the topic has {len(partitions)} partitions"
            )
        if not is_trial:
            first = self._topics.find_open(partitions[min(partitions)])
            ack = None if first is None else log_of(first).ack
            await self._topics.create_partitioned(
                path, count, is_reliable=True, ack=ack, is_growing=True
            )

    # -- configurations ---------------------------------------------------------------------

    async def describe_configs(self, request: Request) -> Entity:
        """Answers DescribeConfigs."""

        async def describe(resource: Entity) -> dict[str, Entity]:
            found = await self._configs(resource.resource_type, resource.resource_name)
            keys = resource.configuration_keys
            described = [
                {
                    "name": one.name,
                    "value": one.value,
                    "read_only": one.is_fixed,
                    "config_source": one.source,
                    "is_sensitive": False,
                    "synonyms": (),
                    "config_type": one.kind,
                    "documentation": None,
                }
                for one in found
                if not keys or one.name in keys
            ]
            return {"configs": request.many("DescribeConfigsResourceResult", described)}

        asked = [(one, {**_resource(one), "configs": ()}) for one in request.body.resources]
        results = await self._each(request, "DescribeConfigsResult", asked, describe)
        return request.make("DescribeConfigsResponse", results=results)

    async def _configs(self, kind: int, name: str) -> Iterable[_Config]:
        if kind == _TOPIC:
            return await self._topic_configs(name)
        if kind == _BROKER:
            self._guard.check(current_principal(), Permission.LOOKUP)
            kafka, broker = self._config.broker.kafka, self._config.broker
            retention, size = self._retention()
            return [
                _Config(one, value, type_, _STATIC_SOURCE)
                for one, value, type_ in (
                    ("auto.create.topics.enable", str(broker.auto_create_topics).lower(), _STRING),
                    ("num.partitions", str(kafka.default_partitions), _LONG),
                    ("message.max.bytes", str(self._config.storage.max_message_size), _LONG),
                    ("log.retention.ms", str(retention), _LONG),
                    ("log.retention.bytes", str(size), _LONG),
                    ("socket.request.max.bytes", str(kafka.max_request_bytes), _LONG),
                    ("connections.max.idle.ms", str(kafka.idle_seconds * 1000), _LONG),
                )
            ]
        raise InvalidRequestError(f"resources of the type {kind} have no configurations")

    async def _topic_configs(self, name: str) -> list[_Config]:
        path = self._names.path_of(name)
        self._names.check(Permission.LOOKUP, path)
        partitions = await self._names.partitions(path)
        if not partitions:
            raise NotFoundError(f"topic {path} does not exist", topic=path)
        served = self._topics.find_open(partitions[min(partitions)])
        size = self._config.storage.max_message_size
        ack = self._config.storage.ack
        if served is None:
            policies = await asyncio.to_thread(self._policies, partitions[min(partitions)])
        else:
            policies, ack = served.policies, log_of(served).ack
        is_own = bool(policies.max_message_size)
        if is_own:
            size = min(size, policies.max_message_size)
        retention_ms, retention_bytes = self._retention()
        source = _TOPIC_SOURCE if is_own else _DEFAULT_SOURCE
        return [
            *(_Config(one, value) for one, value in _FIXED.items()),
            _Config(_SIZE, str(size), _LONG, source, is_fixed=False),
            _Config("retention.ms", str(retention_ms), _LONG),
            _Config("retention.bytes", str(retention_bytes), _LONG),
            _Config(_ACK, ack.value),
        ]

    def _policies(self, partition: str) -> Policies:
        return self._topics.names.policies_of(TopicName.parse(partition))

    def _retention(self) -> tuple[int, int]:
        """How long and how much of a topic is kept, in milliseconds and bytes; -1 for all."""
        storage = self._config.storage
        has_bucket = self._topics.log.stores is not None
        minutes, size_mb = (
            (storage.cloud.retention.time_minutes, storage.cloud.retention.size_mb)
            if has_bucket
            else (storage.wal.retention.time_minutes, storage.wal.retention.size_mb)
        )
        return (
            _FOREVER if minutes is None else minutes * 60_000,
            _FOREVER if size_mb is None else size_mb * MIB,
        )

    async def alter_configs(self, request: Request) -> Entity:
        """Answers IncrementalAlterConfigs."""

        async def alter(resource: Entity) -> None:
            await self._alter(resource, is_trial=request.body.validate_only)

        asked = [(one, _resource(one)) for one in request.body.resources]
        results = await self._each(request, "AlterConfigsResourceResponse", asked, alter)
        return request.make("IncrementalAlterConfigsResponse", responses=results)

    async def _alter(self, asked: Entity, *, is_trial: bool) -> None:
        if asked.resource_type != _TOPIC:
            raise InvalidRequestError("only the configurations of topics can be changed")
        path = self._names.path_of(asked.resource_name)
        self._names.check(Permission.MANAGE_TOPIC, path)
        partitions = await self._names.partitions(path)
        if not partitions:
            raise NotFoundError(f"topic {path} does not exist", topic=path)
        sizes: list[int] = []
        for config in asked.configs:
            if config.config_operation not in (_SET, _DELETE):
                raise KafkaError(ErrorCode.invalid_config, "the configuration is no list")
            if config.name == _SIZE:
                is_set = config.config_operation == _SET
                sizes.append(_parse_size(config.value) if is_set else 0)
            elif config.config_operation == _SET:
                _check_fixed(config.name, config.value)
        if is_trial or not sizes:
            return
        # All of them are here, or nothing is changed.
        for one in partitions.values():
            await self._topics.get(one)
        for one in partitions.values():
            await self._set_size(one, sizes[-1])

    async def _set_size(self, partition: str, size: int) -> None:
        """Sets the policy of a partition; 0 removes it."""
        topic = await self._topics.get(partition)
        record = await asyncio.to_thread(self._topics.records.topic, topic.parsed)
        policies = dict((record or ServedRecord()).policies)
        policies.pop("max_message_size", None)
        if size:
            policies["max_message_size"] = size
        await self._topics.set_topic_policies(partition, policies)

    # -- the cluster ------------------------------------------------------------------------

    async def describe_cluster(self, request: Request) -> Entity:
        """Answers DescribeCluster."""
        return request.make(
            "DescribeClusterResponse",
            error_code=ErrorCode.none,
            cluster_id=self._names.cluster_id,
            controller_id=self._topics.cluster.own.kafka_id,
            brokers=await self._names.describe_brokers(
                request, "DescribeClusterBroker", "broker_id"
            ),
        )


_Asked = tuple[Entity, dict[str, Entity]]


def _resource(asked: Entity) -> dict[str, Entity]:
    return {"resource_type": asked.resource_type, "resource_name": asked.resource_name}


def _check_fixed(name: str, value: str | None) -> None:
    """Refuses configurations that have no setting here, unless they are so anyway."""
    if name in _FIXED and value == _FIXED[name]:
        return
    known = ", ".join((_SIZE, _ACK))
    raise KafkaError(
        ErrorCode.invalid_config,
        f"{name} cannot be set for a topic: only {known} can, see the docs",
    )


def _parse_ack(value: str | None) -> AckLevel:
    try:
        return AckLevel(value or "")
    except ValueError:
        levels = ", ".join(AckLevel)
        raise KafkaError(ErrorCode.invalid_config, f"{_ACK} is one of: {levels}") from None


def _parse_size(value: str | None) -> int:
    text = value or ""
    if not text.isascii() or not text.isdigit() or not 0 < len(text) <= 9 or not int(text):
        raise KafkaError(ErrorCode.invalid_config, f"{_SIZE} is a number of bytes")
    return int(text)
