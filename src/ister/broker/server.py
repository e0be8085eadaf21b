"""The broker: a log, served on three ports, from its start to its end.

    open the log ─► recover every topic ─► listen (gRPC and Flight, HTTP) ─► ready
    told to end ─► not ready ─► streams end, calls under way are answered ─► cursors ─► the log

One gRPC server listens on two ports, and serves everything on both: Danube's protocol, Ister's, and
Flight. So there is one guard and one set of limits.

Owns: the order of these steps, the limits of the server. Does not own: what is served (`services`,
`flight`, `http`).

What a crash leaves is what the log leaves: everything acknowledged. Cursors are those last written.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
from aiohttp import web

from ister import failpoints, threads
from ister.broker.api import Api, Served
from ister.broker.browse import Browser
from ister.broker.cluster import Address, Cluster
from ister.broker.counters import Calls
from ister.broker.exposition import Exposition
from ister.broker.flight.failures import explain
from ister.broker.flight.service import SERVICE as FLIGHT
from ister.broker.flight.service import FlightService, message_bytes_max
from ister.broker.flight.source import FlightLimits
from ister.broker.flight_edge import BrokerSource, FlightAccess
from ister.broker.health import BrokerHealth, Watch
from ister.broker.history import History
from ister.broker.http import Connections, make_application
from ister.broker.lookers import Lookers
from ister.broker.principal_limits import PrincipalLimit
from ister.broker.rpc import Gate, Places
from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.security.grpc_guard import GrpcGuard
from ister.broker.security.guard import Guard
from ister.broker.security.tls import ServerTls, check_exposure
from ister.broker.services.admin import (
    BrokerAdminService,
    ClusterAdminService,
    NamespaceAdminService,
    TopicAdminService,
)
from ister.broker.services.consumer import ConsumerService
from ister.broker.services.delivery import DeliveryService
from ister.broker.services.discovery import DiscoveryService, HealthService, StorageService
from ister.broker.services.operate import OperateService
from ister.broker.services.producer import ProducerService
from ister.broker.services.schemas import SchemaService
from ister.broker.services.security_admin import SecurityAdmin
from ister.broker.topics import Topics
from ister.broker.views import Views
from ister.broker.wire import add_service
from ister.clock import Clock, SystemClock
from ister.config import (
    BrokerLimitsConfig,
    BufferFull,
    Config,
    MetadataBackend,
    MetadataConfig,
    StorageMode,
)
from ister.errors import UnavailableError
from ister.limits import ENVELOPE_SIZE_BYTES_MAX, KIB
from ister.metadata.base import MetadataStore
from ister.topic.log import Log
from ister.topic.tiers import open_metadata

__all__ = ["Broker", "Listening"]

_log = logging.getLogger("ister.broker.server")

_HEARTBEAT_SECONDS: Final = 5.0
_WORKER_THREADS: Final = 48
# Calls that are on their way when the broker ends arrive within this time.
_LAST_SECONDS: Final = 0.3
# How long answers may take to their clients once everything is answered.
_CUT_SECONDS: Final = 1.0
# A client that has nothing to say for so long connects again with its next call.
_IDLE_MS: Final = 60_000
_FLIGHT_LIMITS: Final = FlightLimits()


async def _end_workers(workers: ThreadPoolExecutor) -> None:
    """Waits for the last ones; whoever uses the loop after this gets threads of its own."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
    await asyncio.to_thread(workers.shutdown)


async def _close_log(opening: asyncio.Future[Log]) -> None:
    """Closes the log, also one that is still being opened for a start that was given up."""
    try:
        log = await opening
    except Exception:  # noqa: BLE001 - whoever started the broker has been told
        return
    await asyncio.to_thread(log.close)


def _connections_max(limits: BrokerLimitsConfig) -> int:
    """Connections of one port: of consumers and as many others, if the process may have the files.

    The two ports of gRPC take at most half of them together.
    """
    wanted, (files, _) = 2 * limits.max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files == resource.RLIM_INFINITY else max(16, min(wanted, files // 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where a broker listens."""

    host: str
    grpc: int
    flight: int
    http: int

    def to_json(self) -> dict[str, str]:
        """The addresses, by kind."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return {
            "grpc": f"{host}:{self.grpc}",
            "flight": f"{host}:{self.flight}",
            "http": f"{host}:{self.http}",
        }


class Broker:
    """One broker. Belongs to the loop that `start` runs on."""

    def __init__(self, config: Config, *, clock: Clock | None = None) -> None:
        check_exposure(config.broker)
        # Nothing may wait for room in a buffer on the loop; publishing waits there by itself.
        wal = replace(config.storage.wal, buffer_full=BufferFull.REFUSE)
        self.config = replace(config, storage=replace(config.storage, wal=wal))
        self._clock: Clock = clock or SystemClock()
        self._tls: ServerTls | None = None
        self._log: Log
        self.guard: Guard
        self.schemas: SchemaRegistry
        self.cluster: Cluster
        self.topics: Topics
        self.health: BrokerHealth
        self.history: History
        self.views: Views
        self._api: Api
        self._flight: FlightService
        self._source: BrokerSource
        self._is_ready = False
        self._calls = Calls()
        self._leaves_connections = False
        self._left: grpc.aio.Server | None = None
        self._gate = Gate()
        # What has to be done at the end, in the order in which it was begun.
        self._endings = AsyncExitStack()

    # -- start ------------------------------------------------------------------------------

    async def start(self) -> Listening:
        """Recovers every topic, and listens.

        Raises:
            ConfigError: The settings do not make sense.
            DirectoryLockedError: Another process has the directory.
            UnavailableError: A store does not answer, or a port is taken.
        """
        try:
            return await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> Listening:
        config, clock = self.config, self._clock
        # Many: a store that does not answer holds a thread for each cursor that is to be written,
        # and reading from files must go on.
        workers = ThreadPoolExecutor(_WORKER_THREADS, thread_name_prefix="ister-broker")
        self._endings.push_async_callback(_end_workers, workers)
        asyncio.get_running_loop().set_default_executor(workers)
        self._tls = ServerTls.open(config.broker.tls, clock=clock)
        opening = asyncio.ensure_future(asyncio.to_thread(Log, config, clock=clock))
        self._endings.push_async_callback(_close_log, opening)
        self._log = await asyncio.shield(opening)
        metadata = await asyncio.to_thread(self._metadata)
        self._watch_health(metadata)
        self.guard = Guard.open(config, metadata, clock=clock)
        self._endings.push_async_callback(asyncio.to_thread, self.guard.close)
        await asyncio.to_thread(self.guard.start)
        self.schemas = SchemaRegistry(
            metadata, root_prefix=config.storage.metadata.root_prefix, clock=clock
        )
        self._endings.push_async_callback(asyncio.to_thread, self.schemas.close)
        self._api = Api(self.guard, config.broker)
        http = await self._start_http()
        server = self._make_grpc()
        # First: one port may be taken when the other is bound already.
        self._endings.push_async_callback(self._unbind, server)
        ports = config.broker.ports
        port, flight = self._bind(server, ports.grpc), self._bind(server, ports.flight)
        self.cluster = Cluster(self._address(port, flight), self._log.tiers)
        self.topics = Topics(
            self._log, metadata, self.cluster, config=config, clock=clock, schemas=self.schemas
        )
        self.health.topics = self.topics
        self._register_gauges()
        # First: whoever can connect finds every topic recovered.
        await self.topics.open_all()
        await self._join()
        self._serve_api(metadata)
        self._add_services(server)
        self._add_flight(server)
        failpoints.reach("broker.before_ready")
        await server.start()
        self._endings.push_async_callback(self._drain, server)
        listening = Listening(host=config.broker.host, grpc=port, flight=flight, http=http)
        self._is_ready = self.health.has_started = True
        _log.info("ready", extra=listening.to_json())
        return listening

    def _metadata(self) -> MetadataStore:
        """The log's metadata store, or one for the broker alone."""
        if self._log.tiers is not None:
            return self._log.tiers.metadata
        storage = self.config.storage
        backend, path = MetadataBackend.MEMORY, None
        if storage.mode is StorageMode.LOCAL_ONLY and storage.wal.dir is not None:
            home = os.path.dirname(os.path.abspath(storage.wal.dir))
            backend, path = MetadataBackend.SQLITE, os.path.join(home, "metadata.db")
        disk = self._log.disk
        metadata = open_metadata(
            MetadataConfig(backend=backend, path=path),
            self._clock,
            # Consumers go on where the disk is full: what they have read makes room.
            on_full=disk.give_up if disk is not None else None,
        )
        self._endings.push_async_callback(asyncio.to_thread, metadata.close)
        return metadata

    def _watch_health(self, metadata: MetadataStore) -> None:
        """Has somebody look how the stores and the machine are, until the end."""
        directory = self.config.storage.wal.dir if self._log.has_files else None
        watch = Watch(metadata, self.config, clock=self._clock, directory=directory)
        self.health = BrokerHealth(self.config, self._log, watch, clock=self._clock)
        self.health.tls = self._tls
        watch.start()
        self._endings.push_async_callback(watch.stop)

    def _make_grpc(self) -> grpc.aio.Server:
        limits, storage = self.config.broker.limits, self.config.storage
        calls_max = limits.max_requests_in_flight + limits.max_connections
        streams = PrincipalLimit(
            "streams",
            limits.max_streams_per_principal,
            self._log.metrics,
            setting="broker.limits.max_streams_per_principal",
        )
        arriving = PrincipalLimit(
            "calls without their request",
            limits.max_requests_in_flight,
            self._log.metrics,
            setting="broker.limits.max_requests_in_flight",
        )
        guard = GrpcGuard(
            self.guard,
            streams,
            arriving=arriving,
            texts={FLIGHT: lambda error: explain(error)[1]},
        )
        return grpc.aio.server(
            # Nobody to be asked for: then every call is spared the question.
            interceptors=(guard,) if self.guard.is_needed else (),
            maximum_concurrent_rpcs=calls_max,
            options=[
                # Of a batch of rows; calls of other services are refused when they have less.
                (
                    "grpc.max_receive_message_length",
                    message_bytes_max(_FLIGHT_LIMITS, storage.max_message_size),
                ),
                # What is sent was read in bounded parts.
                ("grpc.max_send_message_length", -1),
                # None: a few kilobytes could become as much as the largest message, in every call.
                ("grpc.compression_enabled_algorithms_bitset", 1),
                ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
                ("grpc.max_metadata_size", 16 * KIB),
                # Calls that wait to be looked at, some 10 KiB each. Beyond that gRPC ends calls of
                # anybody with CANCELLED; those over our own limit get a status that says why.
                ("grpc.server.max_pending_requests", 4 * calls_max),
                ("grpc.server.max_pending_requests_hard_limit", 8 * calls_max),
                # A connection takes a file descriptor, and topics need theirs.
                ("grpc.max_allowed_incoming_connections", _connections_max(limits)),
                # Whoever connects says something within this time, and calls within that one.
                ("grpc.server_handshake_timeout_ms", 10_000),
                ("grpc.max_connection_idle_ms", _IDLE_MS),
                # A client that is gone without a word is found out within half a minute.
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                # gRPC's own pings wait for a minute, and keepalive's wait behind them.
                ("grpc.http2.ping_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.so_reuseport", 0),
            ],
        )

    def _bind(self, server: grpc.aio.Server, port: int) -> int:
        host = self.config.broker.host
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is None:
                bound: int = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, self._tls.grpc_credentials())
        except RuntimeError as error:
            raise UnavailableError(
                f"cannot listen on {address}", hint="is another broker running there?"
            ) from error
        return bound

    async def _unbind(self, server: grpc.aio.Server) -> None:
        """Gives the port back after a start that failed: gRPC does that for servers that ran."""
        if not self._is_ready:
            await server.start()
            await server.stop(None)

    def _address(self, port: int, flight_port: int) -> Address:
        config = self.config.broker
        host = config.host if config.host not in ("0.0.0.0", "::") else "127.0.0.1"  # noqa: S104
        host = f"[{host}]" if ":" in host else host
        scheme = "http" if self._tls is None else "https"
        url = config.advertised.broker_url or f"{scheme}://{host}:{port}"
        flight_host = url.partition("://")[2].rpartition(":")[0]
        flight_scheme = "grpc" if self._tls is None else "grpc+tls"
        flight_url = f"{flight_scheme}://{flight_host}:{flight_port}"
        tiers = self._log.tiers
        return Address(
            node=tiers.membership.node if tiers is not None else "local",
            broker_url=url,
            connect_url=config.advertised.connect_url or url,
            flight_url=config.advertised.flight_url or flight_url,
        )

    async def _join(self) -> None:
        """Makes this broker known to others, for as long as it runs."""
        await asyncio.to_thread(self.cluster.join)
        heartbeat = asyncio.create_task(self._heartbeat())

        async def leave() -> None:
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)
            await asyncio.to_thread(self.cluster.leave)

        self._endings.push_async_callback(leave)

    def _add_services(self, server: grpc.aio.Server) -> None:
        topics, guard = self.topics, self.guard
        limits, storage = self.config.broker.limits, self.config.storage
        consumers = PrincipalLimit(
            "consumers",
            limits.max_consumers_per_principal,
            self._log.metrics,
            setting="broker.limits.max_consumers_per_principal",
        )
        places = Places(limits.max_connections, consumers)
        sent_max = limits.max_grpc_message_bytes
        services: dict[str, Any] = {
            "danube.ProducerService": ProducerService(
                topics, self.schemas, guard, size_max=sent_max
            ),
            "danube.ConsumerService": ConsumerService(topics, guard, places),
            "danube.Discovery": DiscoveryService(topics, guard),
            "danube.HealthCheck": HealthService(topics, guard),
            "danube.StorageService": StorageService(topics, guard),
            "danube_schema.SchemaRegistry": SchemaService(self.schemas, topics, guard),
            "danube_admin.BrokerAdmin": BrokerAdminService(topics, guard),
            "danube_admin.ClusterAdmin": ClusterAdminService(),
            "danube_admin.NamespaceAdmin": NamespaceAdminService(topics, guard),
            "danube_admin.TopicAdmin": TopicAdminService(topics, guard, self.schemas),
            "danube_admin.SecurityAdmin": SecurityAdmin(guard),
            "ister.Delivery": DeliveryService(topics, guard, places),
            "ister.Admin": OperateService(topics, guard, self.views),
        }
        size_max = storage.max_message_size + ENVELOPE_SIZE_BYTES_MAX + 64 * KIB
        for name, service in services.items():
            add_service(server, name, service, self._gate, self._calls, size_max=size_max)

    def _add_flight(self, server: grpc.aio.Server) -> None:
        self._source = BrokerSource(self.topics, asyncio.get_running_loop())
        self._flight = FlightService(
            self._source, access=FlightAccess(self.guard), limits=_FLIGHT_LIMITS
        )
        self._flight.add_to(server, self._calls)

    def _serve_api(self, metadata: MetadataStore) -> None:
        """Has the HTTP port tell about topics, and rates be watched."""
        clock = self._clock
        self.history = History(self.topics, clock=clock)
        lookers = Lookers()
        self.views = Views(
            self.topics,
            self.schemas,
            metadata,
            history=self.history,
            lookers=lookers,
            health=lambda names: self.health.overview(names=names),
            clock=clock,
        )
        browser = Browser(self.topics, self.schemas, lookers, clock=clock)
        served = Served(self.views, browser, metadata, clock=clock)
        self.history.start()
        self._api.serve(served)

        async def end() -> None:
            self._api.serve(None)
            await served.stop()
            await self.history.stop()
            await lookers.close()

        self._endings.push_async_callback(end)

    async def _start_http(self) -> int:
        config = self.config.broker
        figures = Exposition(
            self.config,
            self._log,
            self.health,
            guard=self.guard,
            schemas=self.schemas,
            calls=self._calls,
            clock=self._clock,
        )
        runner = web.AppRunner(
            make_application(self.health, figures, self.guard, self._api),
            access_log=None,
            shutdown_timeout=_CUT_SECONDS,
        )
        await runner.setup()
        self._endings.push_async_callback(runner.cleanup)
        context = self._tls.http_context() if self._tls is not None else None
        connections = Connections(runner)
        self._endings.push_async_callback(connections.close)
        try:
            return await connections.listen(config.host, config.ports.http, context)
        except OSError as error:
            raise UnavailableError(
                f"cannot listen on {config.host}:{config.ports.http}: {error.strerror}",
                hint="is another broker running there?",
            ) from error

    # -- while it runs ----------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether clients should come: everything is recovered, and it does not end yet."""
        return self._is_ready and self.health.is_ready

    def report(self, *, names: bool = True) -> dict[str, Any]:
        """How things are, with reasons; whether topics are named or only counted."""
        return self.health.report(names=names)

    async def _heartbeat(self) -> None:
        """Keeps this broker known to others."""
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            with threads.guard("ister-heartbeat"):
                await asyncio.to_thread(self.cluster.join)

    def _register_gauges(self) -> None:
        metrics, topics = self._log.metrics, self.topics
        schemas = self.schemas
        metrics.register_gauge("broker.schema_misfits", lambda: sum(schemas.misfits().values()))
        metrics.register_gauge("broker.topics", lambda: len(topics.served))
        budget = topics.budget
        metrics.register_gauge("broker.delivery_bytes", lambda: budget.used)
        metrics.register_gauge("broker.delivery_budget_bytes", lambda: budget.bytes_max)
        metrics.register_gauge("broker.delivery_releases", lambda: budget.released)
        metrics.register_gauge(
            "broker.consumers",
            lambda: sum(
                len(one.attached) for topic in topics.served for one in topic.subscriptions.values()
            ),
        )

    # -- the end ----------------------------------------------------------------------------

    async def stop(self, *, leave_connections: bool = False) -> None:
        """Ends in order: every call under way is answered, every cursor written. May be repeated.

        Takes at most about `broker.drain_seconds`.

        Args:
            leave_connections: Keep gRPC's connections, because the process is about to end: what
                arrives is told to come again to the very last. A gRPC server that is stopped
                cancels what has arrived and was not begun, and Danube's client shows that to its
                user.
        """
        if hasattr(self, "health"):
            self.health.is_ending = True
        self._leaves_connections = leave_connections
        await self._endings.aclose()

    async def _drain(self, server: grpc.aio.Server) -> None:
        loop = asyncio.get_running_loop()
        end_at = loop.time() + self.config.broker.drain_seconds - _LAST_SECONDS
        # At the same time: each of them may have clients that do not read their answers.
        self._source.end()
        flight = asyncio.ensure_future(self._flight.close())
        # Calls under way are answered; later ones are told to come again.
        await self._gate.close(end_at - loop.time())
        await self.topics.close()
        # Whatever has reached this process by now still gets its answer.
        await asyncio.sleep(_LAST_SECONDS)
        await flight
        if self._leaves_connections:
            self._left = server
            return
        # Nothing is under way any more but answers to those who do not read. Waiting for longer
        # would be waiting for connections that have not even said what they want.
        await server.stop(max(0.0, min(_CUT_SECONDS, end_at - loop.time())))
