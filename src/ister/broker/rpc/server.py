"""The gRPC port and the Flight port, and the engines that serve them.

    engine grpcio    gRPC port, Flight port ─► the server of grpcio
    engine native    gRPC port ─► the native engine, which forwards what it does not serve
                     Flight port, forwarded calls ─► the server of grpcio

Owns: which engine serves which port, and the limits of the server of grpcio. Does not own: methods.

Both ports serve every method, so there is one guard and one set of limits. A crash leaves at most
the socket file of the native engine (`forward_socket`), which the next start replaces.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import Final

import grpc

from ister.base.limits import KIB
from ister.broker.rpc.forward_socket import SocketFile
from ister.broker.rpc.grpcio_engine import add_methods
from ister.broker.rpc.handlers import CallGate
from ister.broker.rpc.methods import Method
from ister.broker.rpc.native_engine import NativeEngine
from ister.broker.rpc.native_support import native_refusal
from ister.broker.security.grpc_guard import GrpcGuard
from ister.broker.security.tls import ServerTls, is_loopback
from ister.config import BrokerConfig, BrokerLimitsConfig, GrpcEngine
from ister.errors import ConfigError, UnavailableError

# A connection without calls for so long is closed; the client's next call opens another.
_IDLE_MS: Final = 60_000
_METADATA_BYTES_MAX: Final = 16 * KIB


def choose_engine(config: BrokerConfig) -> GrpcEngine:
    """Returns the engine that the settings ask for: `grpcio` or `native`."""
    engine = config.grpc.engine
    has_tls = config.tls.cert_file is not None
    if engine is GrpcEngine.NATIVE and has_tls:
        raise ConfigError(
            "broker.grpc.engine 'native' cannot serve TLS, but broker.tls is set",
            hint="set broker.grpc.engine to 'grpcio', or terminate TLS in a proxy",
        )
    if engine is GrpcEngine.AUTO:
        is_fit = not has_tls and is_loopback(config.host)
        return GrpcEngine.NATIVE if is_fit and native_refusal() is None else GrpcEngine.GRPCIO
    return engine


def _connections_max(limits: BrokerLimitsConfig) -> int:
    """The most connections of one port: `max_connections` of consumers, and as many others.

    At most a quarter of the files that the process may open, so half of them for both ports.
    """
    wanted, (files, _) = 2 * limits.max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files == resource.RLIM_INFINITY else max(16, min(wanted, files // 4))


class RpcServer:
    """Serves the gRPC port and the Flight port. Used on the broker's loop.

    `tls` is None for plaintext, `guard` if authentication is off, `directory` without a data
    directory. `gate` counts unary calls, and can be closed to them; `message_bytes_max` is the
    largest request of any method.
    """

    def __init__(
        self,
        config: BrokerConfig,
        *,
        tls: ServerTls | None,
        guard: GrpcGuard | None,
        gate: CallGate,
        message_bytes_max: int,
        directory: str | None = None,
    ) -> None:
        self.engine = choose_engine(config)
        self._config = config
        self._tls = tls
        self._guard = guard
        self._gate = gate
        self._native: NativeEngine | None = None
        self._directory = directory
        self._socket: SocketFile | None = None
        self._is_started = False
        self.server = self._make_server(message_bytes_max)
        """The server of grpcio."""

    @property
    def _calls_max(self) -> int:
        limits = self._config.limits
        return limits.max_requests_in_flight + limits.max_connections

    def _make_server(self, message_bytes_max: int) -> grpc.aio.Server:
        limits, calls_max = self._config.limits, self._calls_max
        return grpc.aio.server(
            # Auth is off: skip the interceptor.
            interceptors=() if self._guard is None else (self._guard,),
            maximum_concurrent_rpcs=calls_max,
            options=[
                # Of a batch of rows; calls of other services are refused when they have less.
                ("grpc.max_receive_message_length", message_bytes_max),
                # What is sent was read in bounded parts.
                ("grpc.max_send_message_length", -1),
                # None: a few kilobytes could become as much as the largest message, in every call.
                ("grpc.compression_enabled_algorithms_bitset", 1),
                ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
                ("grpc.max_metadata_size", _METADATA_BYTES_MAX),
                # Queued calls, some 10 KiB each. Beyond that gRPC ends calls of
                # any client with CANCELLED; those over our own limit get a status that says why.
                ("grpc.server.max_pending_requests", 4 * calls_max),
                ("grpc.server.max_pending_requests_hard_limit", 8 * calls_max),
                # A connection takes a file descriptor, and topics need theirs.
                ("grpc.max_allowed_incoming_connections", _connections_max(limits)),
                # A connection is opened within this time, and makes a call within the next one.
                ("grpc.server_handshake_timeout_ms", 10_000),
                ("grpc.max_connection_idle_ms", _IDLE_MS),
                # A client that vanished is detected within half a minute.
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                # gRPC's own pings wait for a minute, and keepalive's wait behind them.
                ("grpc.http2.ping_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.so_reuseport", 0),
            ],
        )

    def bind(self) -> tuple[int, int]:
        """Binds both ports, and returns them: gRPC, Flight."""
        ports = self._config.ports
        if self.engine is GrpcEngine.GRPCIO:
            return self._bind(ports.grpc), self._bind(ports.flight)
        native = self._native = NativeEngine(
            self._address(ports.grpc),
            guard=self._guard,
            gate=self._gate,
            calls_max=self._calls_max,
            connections_max=_connections_max(self._config.limits),
            streams_per_connection=self._config.limits.max_streams_per_connection,
            metadata_bytes_max=_METADATA_BYTES_MAX,
        )
        self._socket = SocketFile(self._directory)
        self.server.add_insecure_port(f"unix:{self._socket.path}")
        return native.port, self._bind(ports.flight)

    def _address(self, port: int) -> str:
        host = self._config.host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _bind(self, port: int) -> int:
        address = self._address(port)
        try:
            if self._tls is None:
                bound: int = self.server.add_insecure_port(address)
            else:
                bound = self.server.add_secure_port(address, self._tls.grpc_credentials())
        except RuntimeError as error:
            raise UnavailableError(
                f"cannot listen on {address}", hint="is another broker running there?"
            ) from error
        return bound

    def add(self, methods: Iterable[Method]) -> None:
        """Adds methods to all engines."""
        methods = list(methods)
        add_methods(self.server, methods)
        if self._native is not None:
            self._native.add_methods(methods)

    async def start(self) -> None:
        """Starts to accept calls."""
        self._is_started = True
        await self.server.start()
        if self._native is not None:
            self._native.start(self._socket.path if self._socket is not None else None)

    async def unbind(self) -> None:
        """Releases the ports after a failed start: only a started server of grpcio does that."""
        if not self._is_started:
            await self.server.start()
            await self.stop(None)

    async def stop(self, grace: float | None) -> None:
        """Closes all connections; calls have the grace period, in seconds, to end."""
        if self._native is not None:
            await self._native.stop()
        await self.server.stop(grace)
        self.leave()

    def leave(self) -> None:
        """Removes the socket file; connections stay open until the process ends."""
        if self._socket is not None:
            self._socket.close()
