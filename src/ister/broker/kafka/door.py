"""The door itself: its port, its number in the cluster, and which handler serves which API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Self

from kio.schema.errors import ErrorCode

from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.broker.counters import Calls
from ister.broker.kafka.admin import Admin
from ister.broker.kafka.coordinator import Coordinator
from ister.broker.kafka.fetch import Fetching
from ister.broker.kafka.produce import ProducerIds, Producing
from ister.broker.kafka.protocol import VERSIONS, ApiKey, Entity, Request
from ister.broker.kafka.server import Connection, Handler, KafkaPort, bind
from ister.broker.kafka.topics import KafkaTopics, allot_number
from ister.broker.security.guard import Guard
from ister.broker.security.tls import ServerTls
from ister.broker.topics.topics import Topics
from ister.config import BrokerConfig, StorageConfig
from ister.metadata.base import MetadataStore


class KafkaDoor:
    """See the package. Made by `bind`; belongs to the broker's loop."""

    def __init__(self, port: KafkaPort) -> None:
        self.port = port
        self.number = -1
        """This broker's number for Kafka's clients."""
        self._root = self._root_prefix = ""
        self._groups: Coordinator | None = None

    @classmethod
    def bind(cls, config: BrokerConfig, port: int) -> Self:
        """A door with a port.

        Raises:
            OSError: The port is taken.
        """
        return cls(KafkaPort(config.kafka, bind(config.host, port)))

    def take_number(self, metadata: MetadataStore, node: str, storage: StorageConfig) -> None:
        """Takes the number of a broker, which stays the same. Blocks.

        Raises:
            UnavailableError: The metadata store does not answer.
        """
        self._root_prefix = storage.metadata.root_prefix
        self._root = f"{self._root_prefix}/broker/kafka"
        self.number = allot_number(metadata, f"{self._root}/nodes", node)

    def url(self, host: str, advertised: str | None) -> str:
        """Where clients connect to, as host:port."""
        return advertised or f"{host}:{self.port.number}"

    async def start(
        self,
        topics: Topics,
        guard: Guard,
        metadata: MetadataStore,
        *,
        clock: Clock,
        calls: Calls,
        tls: ServerTls | None,
    ) -> None:
        """Begins to serve clients."""
        names = KafkaTopics(topics, guard)
        ids = ProducerIds(metadata, f"{self._root}/producers")
        producing, fetching = Producing(names, guard, ids), Fetching(names)

        groups = self._groups = Coordinator(
            names, guard, metadata, topics.store, root_prefix=self._root_prefix
        )
        groups.start()
        admin = Admin(names, guard)

        def plain(serve: Callable[[Request], Awaitable[Entity]]) -> Handler:
            async def handler(_: Connection, request: Request) -> Entity:
                return await serve(request)

            return handler

        async def handshake(connection: Connection, request: Request) -> Entity:
            return connection.login.handshake(request)

        async def authenticate(connection: Connection, request: Request) -> Entity:
            return await connection.login.authenticate(request)

        async def fetch(connection: Connection, request: Request) -> Entity:
            return await fetching.fetch(request, connection.readers)

        async def join(connection: Connection, request: Request) -> Entity:
            return await groups.join(request, connection.host)

        handlers: dict[ApiKey, Handler] = {
            ApiKey.API_VERSIONS: self._versions,
            ApiKey.SASL_HANDSHAKE: handshake,
            ApiKey.SASL_AUTHENTICATE: authenticate,
            ApiKey.METADATA: plain(names.metadata),
            ApiKey.PRODUCE: plain(producing.produce),
            ApiKey.INIT_PRODUCER_ID: plain(producing.init_producer),
            ApiKey.FETCH: fetch,
            ApiKey.LIST_OFFSETS: plain(fetching.list_offsets),
            ApiKey.FIND_COORDINATOR: plain(groups.find),
            ApiKey.JOIN_GROUP: join,
            ApiKey.SYNC_GROUP: plain(groups.sync),
            ApiKey.HEARTBEAT: plain(groups.heartbeat),
            ApiKey.LEAVE_GROUP: plain(groups.leave),
            ApiKey.OFFSET_COMMIT: plain(groups.commit),
            ApiKey.OFFSET_FETCH: plain(groups.fetch),
            ApiKey.OFFSET_DELETE: plain(groups.delete_offsets),
            ApiKey.LIST_GROUPS: plain(groups.list),
            ApiKey.DESCRIBE_GROUPS: plain(groups.describe),
            ApiKey.DELETE_GROUPS: plain(groups.delete),
            ApiKey.CREATE_TOPICS: plain(admin.create_topics),
            ApiKey.DELETE_TOPICS: plain(admin.delete_topics),
            ApiKey.CREATE_PARTITIONS: plain(admin.create_partitions),
            ApiKey.DESCRIBE_CONFIGS: plain(admin.describe_configs),
            ApiKey.INCREMENTAL_ALTER_CONFIGS: plain(admin.alter_configs),
            ApiKey.DESCRIBE_CLUSTER: plain(admin.describe_cluster),
        }
        await self.port.start(handlers, guard=guard, clock=clock, calls=calls, tls=tls)

    async def _versions(self, _: Connection, request: Request) -> Entity:
        """Answers ApiVersions: what is served."""
        code = ErrorCode.none if request.is_readable else ErrorCode.unsupported_version
        offered = sorted(VERSIONS.keys() & self.port.handlers.keys())
        return request.make(
            "ApiVersionsResponse",
            error_code=code,
            api_keys=tuple(
                request.make(
                    "ApiVersion",
                    api_key=key.value,
                    min_version=VERSIONS[key][0],
                    max_version=VERSIONS[key][1],
                )
                for key in offered
            ),
        )

    def register(self, metrics: Metrics) -> None:
        """Registers what is counted."""
        port = self.port
        metrics.register_gauge("broker.kafka_connections", lambda: port.connections)
        metrics.register_gauge("broker.kafka_in_flight_bytes", lambda: port.memory.used)
        metrics.register_gauge("broker.kafka_groups", lambda: self.report()["groups"])
        metrics.register_gauge("broker.kafka_group_members", lambda: self.report()["members"])
        metrics.register_counter("broker.kafka_received_bytes_total", lambda: port.bytes_in)
        metrics.register_counter("broker.kafka_sent_bytes_total", lambda: port.bytes_out)
        metrics.register_counter("broker.kafka_malformed_total", lambda: port.malformed)
        metrics.register_counter("broker.kafka_connections_refused_total", lambda: port.refused)

    def report(self) -> dict[str, int]:
        """What /health says of it."""
        groups = self._groups
        return {
            "port": self.port.number,
            "connections": self.port.connections,
            "groups": 0 if groups is None else groups.groups,
            "members": 0 if groups is None else groups.members,
        }

    async def close(self, seconds: float) -> None:
        """Ends all connections; requests that wait for the disk are answered, if in time."""
        if self._groups is not None:
            await self._groups.close()
        await self.port.close(max(0.0, seconds))

    def unbind(self) -> None:
        """Gives the port back."""
        self.port.unbind()
