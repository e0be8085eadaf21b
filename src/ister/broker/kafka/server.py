"""Connections of Kafka's clients: requests in, answers out, and what bounds them.

    bytes ─► frames ─► one request after the other ─► handler ─► answers, in the order of requests
                                                        └─ some later: what waits for the disk

Owns: the port, framing, order, and limits: connections, the size of a request, bytes in flight,
time to log in, to send a request, to read an answer, to be idle. Does not own: what requests mean
(`door`).

A size by itself reserves nothing: memory is taken as bytes arrive, and counted for all connections
together. While too much is in flight, connections are not read, but for one after the other. Idle
connections have no task.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, cast

from ister.base import threads
from ister.base.clock import Clock
from ister.base.limits import KIB, MIB
from ister.broker.counters import Calls
from ister.broker.kafka.fetch import Readers
from ister.broker.kafka.protocol import BEFORE_LOGIN, Entity, MalformedError, Request
from ister.broker.kafka.sasl import Login
from ister.broker.security.guard import Guard, entered
from ister.broker.security.tls import ServerTls
from ister.config import BrokerKafkaConfig
from ister.errors import IsterError, UnauthenticatedError

_log = logging.getLogger("ister.broker.kafka.server")

SERVICE: Final = "kafka"
"""What calls are counted under."""

LOGIN_SECONDS: Final = 10.0
LOGIN_BYTES: Final = 64 * KIB
_SIZE: Final = struct.Struct(">i")
# A request that has begun arrives within this time, and an answer is read within it.
_STALL_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 1.0
_HANDSHAKE_SECONDS: Final = 10.0
# What a connection may have asked for and not been answered yet.
_UNANSWERED_MAX: Final = 64
_QUEUED_BYTES: Final = 1 * MIB
_BACKLOG: Final = 512

Handler = Callable[["Connection", Request], Awaitable[Entity]]
"""Answers a request; an awaitable answer follows later, and None is no answer."""


class Memory:
    """Bytes of requests and answers of all connections together. Used on the loop."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self._waiting: deque[Connection] = deque()
        self._turn: Connection | None = None

    @property
    def is_over(self) -> bool:
        """Whether more is in flight than there should be."""
        return self.used >= self.bytes_max

    def add(self, size: int) -> None:
        """Counts bytes."""
        self.used += size

    def release(self, size: int) -> None:
        """Counts bytes no more; connections that wait are read again while there is room."""
        self.used -= size
        while self._waiting and not self.is_over:
            self._waiting.popleft().resume()

    def wait(self, connection: Connection) -> None:
        """Has a connection read again when there is room, or when it is its turn."""
        self._waiting.append(connection)
        if self._turn is None:
            self._next_turn()

    def may_read(self, connection: Connection) -> bool:
        """Whether a connection may be read now."""
        return not self.is_over or self._turn is connection

    def end_turn(self, connection: Connection) -> None:
        """A connection has sent its whole request, or is lost: the next one that waits goes on."""
        if self._turn is connection:
            self._next_turn()

    def _next_turn(self) -> None:
        self._turn = None
        while self._turn is None and self._waiting:
            waiting = self._waiting.popleft()
            self._turn = waiting if waiting.resume() else None


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, port: KafkaPort) -> None:
        self._port = port
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._need: int | None = None
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._answers: deque[asyncio.Future[bytes | None]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._late: set[asyncio.Task[Entity]] = set()
        self._writable = asyncio.Event()
        self._writable.set()
        self._unsent = self._unread = 0
        self._is_paused = False
        self._is_made = False
        self._early = b""
        self._is_closed = False
        now = asyncio.get_running_loop().time()
        self._opened_at = self._heard_at = self._sent_at = now
        self._began_at: float | None = None
        self.readers = Readers()
        self.peer = ""
        self.host = ""
        self.login: Login

    # -- the transport ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to serve a client, unless there are too many."""
        transport = cast("asyncio.Transport", transport)
        self._transport = transport
        found = transport.get_extra_info("peername")
        self.host = str(found[0]) if found else ""
        self.peer = f"{found[0]}:{found[1]}" if found else ""
        port = self._port
        if self._is_closed or not port.admit(self):
            self._is_closed = True
            transport.abort()
            return
        encrypted = transport.get_extra_info("ssl_object")
        certificate = None if encrypted is None else encrypted.getpeercert(binary_form=True)
        try:
            self.login = Login(
                port.guard, peer=self.peer, certificate=certificate, clock=port.clock
            )
        except UnauthenticatedError:
            self.close()
        self._is_made = True
        if self._early:
            early, self._early = self._early, b""
            self.data_received(early)

    def connection_lost(self, _: Exception | None) -> None:
        """Gives everything back."""
        self._is_closed = True
        self._port.forget(self)
        memory = self._port.memory
        memory.end_turn(self)
        memory.release(len(self._buffer) + self._queued_bytes + self._unsent)
        self._buffer.clear()
        self._queue.clear()
        self._queued_bytes = self._unsent = 0
        self._writable.set()
        if self._task is not None:
            self._task.cancel()
        self.readers.close()

    def close(self) -> None:
        """Ends the connection, once what was answered is sent."""
        self._is_closed = True
        self._transport.close()

    def abort(self) -> None:
        """Ends the connection."""
        self._is_closed = True
        self._transport.abort()

    def pause_writing(self) -> None:
        """The client reads more slowly than it asks."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The client has read what it was sent."""
        unsent, self._unsent = self._unsent, 0
        self._port.memory.release(unsent)
        self._sent_at = asyncio.get_running_loop().time()
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """Takes requests apart."""
        if self._is_closed:
            return
        if not self._is_made:
            # With TLS, what comes with the end of the handshake is here before the connection is.
            self._early += data[:LOGIN_BYTES]
            return
        self._heard_at = now = asyncio.get_running_loop().time()
        buffer = self._buffer
        buffer += data
        self._port.memory.add(len(data))
        self._port.bytes_in += len(data)
        while True:
            if self._need is None:
                if len(buffer) < _SIZE.size:
                    break
                (self._need,) = _SIZE.unpack_from(buffer)
                if not 0 < self._need <= self._size_max:
                    self._port.count_malformed()
                    self.abort()
                    return
            end = _SIZE.size + self._need
            if len(buffer) < end:
                break
            self._queue.append(bytes(memoryview(buffer)[_SIZE.size : end]))
            self._queued_bytes += end
            del buffer[:end]
            self._need = None
            self._began_at = None
        if buffer and self._began_at is None:
            self._began_at = now
        if not buffer:
            self._port.memory.end_turn(self)
        if self._queue and self._task is None:
            self._start()
        if self._queued_bytes > _QUEUED_BYTES or len(self._queue) > _UNANSWERED_MAX:
            self._pause()
        elif not self._is_paused and not self._port.memory.may_read(self):
            self._pause()
            self._port.memory.wait(self)

    @property
    def _size_max(self) -> int:
        is_known = self.login.caller is not None
        return self._port.config.max_request_bytes if is_known else LOGIN_BYTES

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> bool:
        """Reads again; False if it has ended."""
        if self._is_paused and not self._is_closed:
            self._is_paused = False
            self._transport.resume_reading()
        return not self._is_closed

    # -- requests ---------------------------------------------------------------------------

    def _start(self) -> None:
        self._task = task = asyncio.get_running_loop().create_task(self._serve())
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        elif self._queue and not self._is_closed:
            self._start()

    def _fail(self, error: BaseException) -> None:
        """Ends the connection after a request that has no answer."""
        if isinstance(error, MalformedError):
            self._port.count_malformed()
            _log.debug("malformed request", extra={"peer": self.peer, "error": str(error)})
        elif not isinstance(error, IsterError):
            threads.record("ister-kafka", error)
        self.abort()

    async def _serve(self) -> None:
        """Serves what has arrived."""
        while self._queue and not self._is_closed:
            await self._writable.wait()
            while len(self._answers) >= _UNANSWERED_MAX:
                await asyncio.wait([self._answers[0]])
            if not self._queue:
                return  # the connection is lost
            frame = self._queue.popleft()
            size = len(frame) + _SIZE.size
            self._queued_bytes -= size
            future: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
            self._answers.append(future)
            try:
                await self._handle(Request(frame), future, size)
            except BaseException:
                self._port.memory.release(size)
                raise
            if self._is_paused and self._queued_bytes <= _QUEUED_BYTES:
                if self._port.memory.may_read(self):
                    self.resume()
                else:
                    self._port.memory.wait(self)

    async def _handle(
        self, request: Request, future: asyncio.Future[bytes | None], size: int
    ) -> None:
        began = time.monotonic()
        caller = self.login.caller
        if request.key in BEFORE_LOGIN:
            answer = await self._port.handlers[request.key](self, request)
        elif caller is None:
            raise MalformedError("a request before authentication")
        else:
            caller.action = request.key.name
            caller.verify()
            with entered(caller):
                answer = await self._port.handlers[request.key](self, request)
                if isinstance(answer, Awaitable):
                    task = asyncio.ensure_future(self._finish(request, answer, future, size, began))
                    self._late.add(task)
                    task.add_done_callback(self._late.discard)
                    return
        self._settle(request, answer, future, size, began)

    async def _finish(
        self,
        request: Request,
        later: Awaitable[Entity],
        future: asyncio.Future[bytes | None],
        size: int,
        began: float,
    ) -> None:
        """Waits for an answer that follows later."""
        try:
            self._settle(request, await later, future, size, began)
        except Exception as error:  # noqa: BLE001 - as if the request had been served at once
            self._port.memory.release(size)
            self._fail(error)

    def _settle(
        self,
        request: Request,
        answer: Entity,
        future: asyncio.Future[bytes | None],
        size: int,
        began: float,
    ) -> None:
        """Answers a request, and all behind it that have waited for it."""
        future.set_result(None if answer is None else request.encode(answer))
        self._port.memory.release(size)
        self._port.calls.of(SERVICE, request.key.name).count_answers(1, time.monotonic() - began)
        while self._answers and self._answers[0].done():
            data = self._answers.popleft().result()
            if data is not None and not self._is_closed:
                self._write(data)

    def _write(self, data: bytes) -> None:
        self._port.bytes_out += len(data)
        self._sent_at = asyncio.get_running_loop().time()
        self._transport.write(data)
        if not self._writable.is_set():
            self._unsent += len(data)
            self._port.memory.add(len(data))

    # -- limits -----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether requests are under way that change something."""
        return bool(self._late)

    def check_times(self, now: float) -> None:
        """Ends a connection that is idle or does not go on."""
        if self._is_closed:
            return
        unread = self._transport.get_write_buffer_size()
        if unread != self._unread:
            # However slowly, it reads.
            self._unread, self._sent_at = unread, now
        is_stalled = (
            (self.login.caller is None and now - self._opened_at > LOGIN_SECONDS)
            or (self._began_at is not None and now - self._began_at > _STALL_SECONDS)
            or (not self._writable.is_set() and now - self._sent_at > _STALL_SECONDS)
        )
        is_idle = self._task is None and not self._late
        if is_stalled:
            self.abort()
        elif is_idle and now - max(self._heard_at, self._sent_at) > self._port.config.idle_seconds:
            self.close()


class KafkaPort:
    """The port, bound when it is made; serves once it is started."""

    def __init__(self, config: BrokerKafkaConfig, listener: socket.socket) -> None:
        self.config = config
        self.number: int = listener.getsockname()[1]
        self.memory = Memory(config.max_bytes_in_flight)
        self.bytes_in = self.bytes_out = 0
        self.malformed = 0
        """Requests that could not be read."""
        self.refused = 0
        """Connections that were one too many."""
        self.guard: Guard
        self.clock: Clock
        self.calls: Calls
        self.handlers: dict[Any, Handler]
        self._listener = listener
        self._connections: dict[Connection, None] = {}
        self._handshakes: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._looking: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        """Clients that are connected."""
        return len(self._connections)

    async def start(
        self,
        handlers: dict[Any, Handler],
        *,
        guard: Guard,
        clock: Clock,
        calls: Calls,
        tls: ServerTls | None,
    ) -> None:
        """Begins to accept clients."""
        self.handlers, self.guard, self.clock, self.calls = handlers, guard, clock, calls
        loop = asyncio.get_running_loop()
        accept: Callable[[], asyncio.BaseProtocol] = lambda: Connection(self)  # noqa: E731
        if tls is not None:
            accept = lambda: _Greeting(self, tls)  # noqa: E731
        self._server = await loop.create_server(accept, sock=self._listener, backlog=_BACKLOG)
        self._look()

    def greet(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        """Begins the TLS handshake of a client."""
        if len(self._handshakes) + len(self._connections) >= self.config.max_connections:
            self.refused += 1
            transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._shake_hands(transport, context))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        connection = Connection(self)
        try:
            encrypted = await asyncio.get_running_loop().start_tls(
                transport,
                connection,
                context,
                server_side=True,
                ssl_handshake_timeout=_HANDSHAKE_SECONDS,
            )
        except (OSError, TimeoutError) as error:
            # The traceback and the future that `start_tls` awaits refer to each other.
            error.__traceback__ = None
            return
        if encrypted is not None and not transport.is_closing():
            connection.connection_made(encrypted)

    def admit(self, connection: Connection) -> bool:
        """Counts a connection; False if it is one too many."""
        if len(self._connections) >= self.config.max_connections:
            self.refused += 1
            return False
        self._connections[connection] = None
        return True

    def forget(self, connection: Connection) -> None:
        """Counts a connection no more."""
        self._connections.pop(connection, None)

    def count_malformed(self) -> None:
        """Counts a request that could not be read."""
        self.malformed += 1

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        with threads.guard("ister-kafka"):
            for connection in list(self._connections):
                connection.check_times(now)
        self._looking = loop.call_later(_LOOK_SECONDS, self._look)

    async def close(self, seconds: float) -> None:
        """Accepts nobody any more; requests that wait for the disk are answered, if in time."""
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            self._server.close()
        loop = asyncio.get_running_loop()
        end_at = loop.time() + seconds
        while loop.time() < end_at and any(  # noqa: ASYNC110 - they end by themselves
            one.has_work for one in self._connections
        ):
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.close()
        for task in list(self._handshakes):
            task.cancel()
        await asyncio.sleep(0)
        for connection in list(self._connections):
            connection.abort()
        self.unbind()

    def unbind(self) -> None:
        """Gives the port back, also one that was never started."""
        with suppress(OSError):
            self._listener.close()


class _Greeting(asyncio.Protocol):
    """A connection before its TLS handshake; reads nothing."""

    def __init__(self, port: KafkaPort, tls: ServerTls) -> None:
        self._port = port
        self._tls = tls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)
        transport.pause_reading()
        self._port.greet(transport, self._tls.http_context())


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        OSError: The port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
