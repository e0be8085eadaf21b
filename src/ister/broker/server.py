"""The broker: a log, served on three ports, from its start to its end.

    open the log ─► recover every topic ─► listen (gRPC and Flight, HTTP) ─► ready
    told to end ─► not ready ─► topics to other brokers ─► calls under way are answered, streams end
                ─► cursors ─► the log

Owns: the order of these steps. Does not own: how calls come in (`rpc`), what is served
(`services`, `flight`, `http`).

What a crash leaves is what the log leaves: everything acknowledged. Cursors are those last written.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import grpc
from aiohttp import web

from ister import __version__, kernels
from ister.base import failpoints
from ister.base.clock import Clock, SystemClock
from ister.base.limits import ENVELOPE_SIZE_BYTES_MAX, KIB
from ister.broker.cluster.cluster import Cluster
from ister.broker.cluster.peers import FORWARDED, Peers
from ister.broker.counters import Calls
from ister.broker.flight.broker_source import BrokerSource, FlightAccess, FlightLimits
from ister.broker.flight.failures import explain
from ister.broker.flight.service import SERVICE as FLIGHT
from ister.broker.flight.service import FlightService, message_bytes_max
from ister.broker.http.api import Api, ApiContext
from ister.broker.http.port import Connections, make_application
from ister.broker.observe.browse import Browser
from ister.broker.observe.health import BrokerHealth
from ister.broker.observe.probe import HealthProbe
from ister.broker.observe.prometheus import PrometheusMetrics
from ister.broker.observe.query_threads import QueryThreads
from ister.broker.observe.rates import RateHistory
from ister.broker.observe.views import Views
from ister.broker.rpc.handlers import CallGate, ConsumerSlots
from ister.broker.rpc.methods import methods_of
from ister.broker.rpc.server import RpcServer
from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.security.cluster_secret import read_secret
from ister.broker.security.grpc_guard import GrpcGuard
from ister.broker.security.guard import Guard
from ister.broker.security.principal_limits import PrincipalLimit
from ister.broker.security.tls import ServerTls, check_exposure
from ister.broker.services.admin import (
    BrokerAdminService,
    ClusterAdminService,
    NamespaceAdminService,
    TopicAdminService,
)
from ister.broker.services.consumer import ConsumerService
from ister.broker.services.dead_letter_queue import DeadLetterQueue
from ister.broker.services.dead_letters import DeadLetterService
from ister.broker.services.delivery import DeliveryService
from ister.broker.services.discovery import DiscoveryService, HealthService, StorageService
from ister.broker.services.forwarding import FORWARDING, forwarding, receiving
from ister.broker.services.ister_admin import IsterAdminService
from ister.broker.services.peers import PeersService
from ister.broker.services.producer import ProducerService
from ister.broker.services.schemas import SchemaService
from ister.broker.services.security_admin import SecurityAdmin
from ister.broker.topics.assignee import Assignee
from ister.broker.topics.topics import Topics
from ister.bucket.members import Load, Member, MemberState
from ister.config import (
    BufferFull,
    Config,
)
from ister.errors import IsterError, UnavailableError
from ister.metadata.base import MetadataStore
from ister.topic.log import Log
from ister.topic.stores import metadata_of, open_metadata

_log = logging.getLogger("ister.broker.server")

_WORKER_THREADS: Final = 48
# Calls that are on their way when the broker ends arrive within this time.
_LAST_SECONDS: Final = 0.3
# How long look-ups are still answered once all topics are at other brokers.
_FOLLOW_SECONDS: Final = 1.0
# How long answers may take to their clients once everything is answered.
_CUT_SECONDS: Final = 1.0


async def _end_workers(workers: ThreadPoolExecutor) -> None:
    """Waits for running threads; later users of the loop get threads of their own."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
    await asyncio.to_thread(workers.shutdown)


async def _close_log(opening: asyncio.Future[Log]) -> None:
    """Closes the log, also one that is still being opened for a start that was given up."""
    try:
        log = await opening
    except Exception:  # noqa: BLE001 - `start` has raised it
        return
    await asyncio.to_thread(log.close)


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
        self.history: RateHistory
        self.views: Views
        self.dead_letters: DeadLetterService
        self._topic_admin: TopicAdminService
        self._ister_admin: IsterAdminService
        self._api: Api
        self._flight: FlightService
        self._source: BrokerSource
        self._is_ready = False
        self._calls = Calls()
        self._assignee: Assignee | None = None
        self._leaves_connections = False
        self._left: RpcServer | None = None
        self._gate = CallGate()
        # What has to be done at the end, in the order in which it was begun.
        self._endings = AsyncExitStack()

    # -- start ------------------------------------------------------------------------------

    async def start(self) -> Listening:
        """Recovers every topic, and listens.

        Raises:
            ConfigError: The settings do not make sense.
            DirectoryLockedError: Another process has the directory.
            UnavailableError: A store does not respond, or a port is taken.
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
        rpc = self._make_rpc_server()
        # First: one port may be taken when the other is bound already.
        self._endings.push_async_callback(rpc.unbind)
        port, flight = rpc.bind()
        self.cluster = Cluster(
            self._member(port, flight, http),
            self._log.stores,
            config=config.broker.cluster,
            clock=clock,
        )
        root = config.storage.metadata.root_prefix
        secret = await asyncio.to_thread(read_secret, metadata, root_prefix=root)
        self.topics = Topics(
            self._log,
            metadata,
            self.cluster,
            config=config,
            clock=clock,
            secret=secret,
            schemas=self.schemas,
        )
        self.health.topics = self.topics
        self._register_gauges()
        await self._join(secret)
        followed = await self.topics.names.follow_policies()
        self._endings.push_async_callback(asyncio.to_thread, followed.close)
        # First: clients that connect find every topic recovered.
        await self.topics.open_all()
        self._serve_api(metadata)
        self._add_services(rpc)
        self._add_flight(rpc.server)
        failpoints.reach("broker.before_ready")
        await rpc.start()
        self._endings.push_async_callback(self._drain, rpc)
        await self._take_part()
        listening = Listening(host=config.broker.host, grpc=port, flight=flight, http=http)
        self._is_ready = self.health.has_started = True
        _log.info("ready", extra={**listening.to_json(), "engine": rpc.engine.value})
        kernels.prepare()
        return listening

    def _metadata(self) -> MetadataStore:
        """The log's metadata store, or one for the broker alone."""
        if self._log.stores is not None:
            return self._log.stores.metadata
        disk = self._log.room.disk
        metadata = open_metadata(
            metadata_of(self.config.storage),
            self._clock,
            # Consumers go on where the disk is full: what they have read makes room.
            on_full=disk.free_reserve if disk is not None else None,
        )
        self._endings.push_async_callback(asyncio.to_thread, metadata.close)
        return metadata

    def _watch_health(self, metadata: MetadataStore) -> None:
        """Starts the probe of the stores and the machine."""
        directory = self.config.storage.wal.dir if self._log.has_files else None
        probe = HealthProbe(metadata, self.config, clock=self._clock, directory=directory)
        self.health = BrokerHealth(self.config, self._log, probe, clock=self._clock)
        self.health.tls = self._tls
        probe.start()
        self._endings.push_async_callback(probe.stop)

    def _make_rpc_server(self) -> RpcServer:
        limits = self.config.broker.limits
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
        return RpcServer(
            self.config.broker,
            tls=self._tls,
            guard=guard if self.guard.is_needed else None,
            gate=self._gate,
            message_bytes_max=message_bytes_max(
                self._flight_limits, self.config.storage.max_message_size
            ),
            directory=self.config.storage.wal.dir if self._log.has_files else None,
        )

    def _member(self, port: int, flight_port: int, http_port: int) -> Member:
        config = self.config.broker
        host = config.host if config.host not in ("0.0.0.0", "::") else "127.0.0.1"  # noqa: S104
        host = f"[{host}]" if ":" in host else host
        scheme = "http" if self._tls is None else "https"
        url = config.advertised.broker_url or f"{scheme}://{host}:{port}"
        flight_host = url.partition("://")[2].rpartition(":")[0]
        flight_scheme = "grpc" if self._tls is None else "grpc+tls"
        flight_url = f"{flight_scheme}://{flight_host}:{flight_port}"
        stores = self._log.stores
        return Member(
            node=stores.membership.node if stores is not None else "local",
            broker_url=url,
            connect_url=config.advertised.connect_url or url,
            flight_url=config.advertised.flight_url or flight_url,
            http_url=f"{scheme}://{flight_host}:{http_port}",
            zone=config.cluster.zone or "",
            version=__version__,
            state=MemberState.STARTING,
        )

    async def _join(self, secret: str) -> None:
        """Makes this broker known to others, for as long as it runs."""
        await asyncio.to_thread(self.cluster.members.publish)
        self._endings.push_async_callback(asyncio.to_thread, self.cluster.leave)
        has_peers = self.guard.is_on and self._log.stores is not None
        if has_peers:
            self.guard.trust_brokers(secret)
        self.topics.stand_in.peers = peers = Peers(self._tls, secret=secret if has_peers else None)
        self._endings.push_async_callback(peers.close)

    async def _take_part(self) -> None:
        """Makes this broker active, and starts to follow the assignments."""
        await asyncio.to_thread(self.cluster.members.publish, state=MemberState.ACTIVE)
        self._assignee = Assignee(
            self.topics,
            ttl_seconds=self.config.storage.metadata.lease_ttl_seconds,
            measure=self._measure,
        )
        await self._assignee.start()

    def _measure(self) -> Load:
        rates = self.history.all_rates
        return Load(
            messages_in=rates.messages_in,
            messages_out=rates.messages_out,
            bytes_in=rates.bytes_in,
            bytes_out=rates.bytes_out,
            upload_lag_bytes=self.history.totals.upload_lag_bytes,
            is_disk_low=self._log.room.disk is not None and self._log.room.disk.is_low(),
        )

    def _add_services(self, rpc: RpcServer) -> None:
        topics, guard = self.topics, self.guard
        limits, storage = self.config.broker.limits, self.config.storage
        consumers = PrincipalLimit(
            "consumers",
            limits.max_consumers_per_principal,
            self._log.metrics,
            setting="broker.limits.max_consumers_per_principal",
        )
        slots = ConsumerSlots(limits.max_connections, consumers)
        sent_max = limits.max_grpc_message_bytes
        services: dict[str, object] = {
            "danube.ProducerService": ProducerService(
                topics, self.schemas, guard, size_max=sent_max
            ),
            "danube.ConsumerService": ConsumerService(topics, guard, slots),
            "danube.Discovery": DiscoveryService(topics, guard),
            "danube.HealthCheck": HealthService(topics, guard),
            "danube.StorageService": StorageService(topics, guard),
            "danube_schema.SchemaRegistry": SchemaService(self.schemas, topics, guard),
            "danube_admin.BrokerAdmin": BrokerAdminService(topics, guard, self.views.control),
            "danube_admin.ClusterAdmin": ClusterAdminService(topics, guard, self.views.control),
            "danube_admin.NamespaceAdmin": NamespaceAdminService(topics, guard),
            "danube_admin.TopicAdmin": self._topic_admin,
            "danube_admin.SecurityAdmin": SecurityAdmin(guard),
            "ister.Delivery": DeliveryService(topics, guard, slots),
            "ister.Admin": self._ister_admin,
            "ister.DeadLetters": self.dead_letters,
            "ister.Peers": PeersService(topics, guard),
        }
        size_max = storage.max_message_size + ENVELOPE_SIZE_BYTES_MAX + 64 * KIB
        assert topics.peers is not None  # noqa: S101 - for mypy
        forward = forwarding(topics.peers)
        for name, service in services.items():
            served = partial(methods_of, name, service, self._gate, self._calls, size_max=size_max)
            if name in FORWARDING:
                rpc.add(served(wrap=forward))
                rpc.add(served(prefix=FORWARDED, wrap=receiving))
            else:
                rpc.add(served())

    @property
    def _flight_limits(self) -> FlightLimits:
        limits = self.config.broker.limits
        return FlightLimits(
            streams_max=limits.max_flight_streams,
            streams_per_caller_max=limits.max_flight_streams_per_principal,
        )

    def _add_flight(self, server: grpc.aio.Server) -> None:
        self._source = BrokerSource(self.topics, asyncio.get_running_loop())
        self._flight = FlightService(
            self._source, access=FlightAccess(self.guard), limits=self._flight_limits
        )
        self.health.flight = self._flight
        metrics, flight = self._log.metrics, self._flight
        metrics.register_gauge("broker.flight_streams", lambda: flight.streams)
        metrics.register_gauge("broker.flight_streams_max", lambda: flight.streams_max)
        metrics.register_counter(
            "broker.flight_stream_refusals_total", lambda: flight.streams_refused
        )
        self._flight.add_to(server, self._calls)

    def _serve_api(self, metadata: MetadataStore) -> None:
        """Makes the HTTP port report topics, and starts sampling rates."""
        clock = self._clock
        self.history = RateHistory(self.topics, clock=clock)
        query_threads = QueryThreads()
        self.views = Views(
            self.topics,
            self.schemas,
            metadata,
            history=self.history,
            query_threads=query_threads,
            health=lambda names: self.health.overview(names=names),
            clock=clock,
        )
        browser = Browser(self.topics, self.schemas, query_threads, clock=clock)
        queue = DeadLetterQueue(self.topics, browser, query_threads, metadata, clock=clock)
        self.dead_letters = DeadLetterService(queue, self.guard)
        self._topic_admin = TopicAdminService(
            self.topics, self.guard, self.schemas, self.views.control
        )
        self._ister_admin = IsterAdminService(self.topics, self.guard, self.views)
        served = ApiContext(
            self.views,
            browser,
            metadata,
            operations={
                "danube_admin.TopicAdmin": self._topic_admin,
                "danube_admin.NamespaceAdmin": NamespaceAdminService(self.topics, self.guard),
                "ister.Admin": self._ister_admin,
                "ister.DeadLetters": self.dead_letters,
            },
            clock=clock,
        )
        self.history.start()
        self._api.serve(served)

        async def end() -> None:
            self._api.serve(None)
            await served.stop()
            await self.history.stop()
            await query_threads.close()

        self._endings.push_async_callback(end)

    async def _start_http(self) -> int:
        config = self.config.broker
        figures = PrometheusMetrics(
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
        make_context = None if self._tls is None else self._tls.http_context
        connections = Connections(runner)
        self._endings.push_async_callback(connections.close)
        try:
            return await connections.listen(config.host, config.ports.http, make_context)
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

    def report(self, *, names: bool = True) -> dict[str, object]:
        """How things are, with reasons; whether topics are named or only counted."""
        return self.health.report(names=names)

    def _register_gauges(self) -> None:
        metrics, topics = self._log.metrics, self.topics
        schemas = self.schemas
        metrics.register_counter("broker.schema_misfits", schemas.count_mismatches)
        metrics.register_gauge("broker.topics", lambda: len(topics.served))
        cluster = self.cluster
        metrics.register_gauge(
            "broker.topics_waiting_for_disk",
            lambda: sum(topic.is_read_only for topic in topics.served),
        )
        metrics.register_gauge("broker.members", lambda: cluster.members.count)
        metrics.register_gauge(
            "broker.is_leader",
            lambda: int(cluster.leadership is None or cluster.leadership.is_leader),
        )
        metrics.register_counter("broker.moves_total", lambda: topics.moved_total)
        budget = topics.budget
        metrics.register_gauge("broker.delivery_bytes", lambda: budget.used)
        metrics.register_gauge("broker.delivery_budget_bytes", lambda: budget.bytes_max)
        metrics.register_counter("broker.delivery_releases", lambda: budget.released)
        metrics.register_counter("broker.stalled_streams_ended_total", lambda: budget.writes.ended)
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
        if self._left is not None:
            self._left.leave()

    async def _hand_over(self, end_at: float) -> None:
        """Hands all topics over to other brokers, if there are any; calls are served meanwhile.

        What is not handed over in time stays this node's, in its local files.
        """
        assignee, loop = self._assignee, asyncio.get_running_loop()
        if assignee is None:
            return
        try:
            async with asyncio.timeout_at(end_at - _LAST_SECONDS):
                await assignee.stop()
                # Without a lease there is nothing to hand over: others may have the topics.
                if self.cluster.is_leased and await self.topics.hand_over():
                    # Clients that know this broker alone ask it where their topics are now.
                    await asyncio.sleep(min(_FOLLOW_SECONDS, max(0.0, end_at - loop.time()) / 2))
        except TimeoutError:
            left = sum(one.is_reliable for one in self.topics.served)
            _log.warning(
                "not all topics were handed over in time; they stay this broker's",
                extra={"topics": left, "seconds": self.config.broker.drain_seconds},
            )
        except IsterError as error:
            _log.warning("topics not handed over", extra={"error": str(error)})

    async def _drain(self, rpc: RpcServer) -> None:
        loop = asyncio.get_running_loop()
        end_at = loop.time() + self.config.broker.drain_seconds - _LAST_SECONDS
        await self._hand_over(end_at)
        # At the same time: each of them may have clients that do not read their answers.
        self._source.end()
        flight = asyncio.ensure_future(self._flight.close())
        # Calls in progress are answered; later ones are UNAVAILABLE, which clients retry.
        await self._gate.close(end_at - loop.time())
        await self.topics.close()
        # Whatever has reached this process by now still gets its answer.
        await asyncio.sleep(_LAST_SECONDS)
        await flight
        if self._leaves_connections:
            self._left = rpc
            return
        # Only answers to clients that do not read are left. Waiting for longer
        # would be waiting for connections that have not even said what they want.
        await rpc.stop(max(0.0, min(_CUT_SECONDS, end_at - loop.time())))
