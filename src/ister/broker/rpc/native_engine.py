"""The engine pygrpc-native: HTTP/2 and gRPC in Rust threads, outside of the interpreter lock.

    call ─► front (Rust) ─► a receiver thread ─► `Name_batch`, answered from whichever thread
                                          └────► the loop: the same, or a task for the method
    streams in both directions, Flight ─► front ─► Unix socket ─► the server of grpcio

The front is the package's server object, `NativeGrpcFront`.

Owns: the front, the calls taken from it, and the limits that the front lacks: on concurrent calls,
and on connections (`connections`). Does not own: methods, who may call, the server of grpcio.

Invariants: each call that the front hands over is answered, failed or ended exactly once, unless
its client has left; a call counts as in progress from when it is taken until then.

Plaintext only. The front buffers a whole request, however large, before it hands it over, and
decompresses what is compressed: it is for trusted networks. See docs/howto/native-engine.md.

A crash leaves calls without answers; their messages may be stored.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Final, cast

import grpc

from ister.base import threads
from ister.broker.rpc.batch_calls import BatchCall
from ister.broker.rpc.handlers import CallGate, explained
from ister.broker.rpc.methods import BatchForm, Handler, Method, check_size
from ister.broker.rpc.native_connections import ConnectionLimits
from ister.broker.rpc.native_receivers import Receivers
from ister.broker.rpc.native_support import native_refusal
from ister.broker.rpc.native_writers import Senders
from ister.broker.security.grpc_guard import GrpcGuard
from ister.broker.security.guard import Caller, entered
from ister.errors import CapacityError, ConfigError, UnavailableError
from ister.wire.errors import ANSWERED

_log = logging.getLogger("ister.broker.rpc.native_engine")

# Calls that a receiver takes at once.
_BATCH_CALLS: Final = 512
# How often to check for a stuck receiver.
_STUCK_CHECK_SECONDS: Final = 0.05
IO_THREADS: Final = max(1, (os.cpu_count() or 1) // 4)
"""The number of the engine's own threads. Each answer wakes one: few cost less than many."""
_KEEPALIVE_MS: Final = (20_000, 10_000)

_Event = tuple[int, int, int, bytes, str, *tuple["_Details", ...]]
"""Kind, call, number of the method, request, path, and the details if they were asked for."""
_Details = tuple[tuple[tuple[str, str | bytes], ...], str, float | None]


def load_native() -> ModuleType:
    """Imports the engine's package."""
    if (reason := native_refusal()) is not None:
        raise ConfigError(
            f"broker.grpc.engine 'native' cannot be used here: {reason}",
            hint="or set broker.grpc.engine to 'grpcio'",
        )
    # It logs up to twenty lines a second while no file descriptor is free; other errors are raised.
    logging.getLogger("pygrpc_native").setLevel(logging.CRITICAL)
    import pygrpc_native  # noqa: PLC0415 - an extra

    return pygrpc_native


class NativeEngine:
    """Serves a port with the native engine. Used on the broker's loop, except where it says so.

    Args:
        address: Where to listen.
        guard: Authenticates callers; None if authentication is off.
        gate: Counts unary calls in progress.
        calls_max: The most calls in progress, streams included; more are refused.
        connections_max: The most connections; more are closed.
        streams_per_connection: The most calls in progress on one connection; more wait in the
            client.
        metadata_bytes_max: The most bytes of a call's metadata; calls with more are refused.
    """

    def __init__(
        self,
        address: str,
        *,
        guard: GrpcGuard | None,
        gate: CallGate,
        calls_max: int,
        connections_max: int,
        streams_per_connection: int,
        metadata_bytes_max: int,
    ) -> None:
        native = load_native()
        try:
            self._front = native.NativeGrpcFront(
                address,
                [],
                io_threads=IO_THREADS,
                call_details=guard is not None,
                delay_stream_headers=True,
                keepalive_time_ms=_KEEPALIVE_MS[0],
                keepalive_timeout_ms=_KEEPALIVE_MS[1],
                keepalive_permit_without_calls=False,
                max_concurrent_streams=streams_per_connection,
                max_metadata_size=metadata_bytes_max,
            )
        except OSError as error:
            raise UnavailableError(
                f"cannot listen on {address}", hint="is another broker running there?"
            ) from error
        self._cancelled: int = native.EVENT_CANCEL
        self._full: int = native.STREAM_FULL
        self._closed: int = native.STREAM_CLOSED
        self.port: int = self._front.bound_port
        self._connections = ConnectionLimits(self.port, count_max=connections_max)
        self._guard = guard
        self._gate = gate
        self._calls_max = calls_max
        self._table: list[_Served] = []
        self._by_number: list[_Served | None] = []
        self._loop = asyncio.get_running_loop()
        # Calls that receivers have passed to the loop, and that it has not begun.
        self._passed = 0
        self._passed_lock = threading.Lock()
        # Streams in progress; the gate counts unary calls.
        self._streams = 0
        # The tasks that serve single calls, by call.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._receivers = Receivers(self._receive, self._handle)
        self._senders: Senders | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add_methods(self, methods: Iterable[Method]) -> None:
        """Adds methods, except those whose requests are streams: the server of grpcio has those."""
        for method in methods:
            if not method.takes_stream:
                self._table.append(_Served(self, method, self._guard))

    def start(self, fallback: str | None) -> None:
        """Starts to take calls.

        `fallback` is the Unix socket of the server that gets calls of other methods.
        """
        if fallback is not None:
            self._front.set_fallback(fallback)
        numbers = self._front.add_methods(
            [(one.method.path, one.method.gives_stream) for one in self._table]
        )
        table: list[_Served | None] = [None] * (max(numbers, default=-1) + 1)
        for number, one in zip(numbers, self._table, strict=True):
            table[number] = one
        self._by_number = table
        self._senders = Senders(self._try_send, self._front.stream_send)
        self._receivers.start()
        self._front.start()
        self._connections.start()
        self._watch_receivers()

    async def stop(self) -> None:
        """Closes all connections. Answers that were given just before may be lost."""
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.to_thread(self._connections.close)
        await asyncio.to_thread(self._front.close)
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._senders is not None:
            await asyncio.to_thread(self._senders.close)
            await asyncio.to_thread(self._receivers.join)

    def _watch_receivers(self) -> None:
        self._receivers.replace_stuck()
        self._timer = self._loop.call_later(_STUCK_CHECK_SECONDS, self._watch_receivers)

    # -- in a receiver thread ---------------------------------------------------------------

    def _receive(self) -> list[_Event] | None:
        found: list[_Event] | None
        if self._guard is not None:
            found = self._front.recv_batch_details(_BATCH_CALLS)
        else:
            found = self._front.recv_batch(_BATCH_CALLS)
        return found

    def _handle(self, events: list[_Event]) -> None:
        with threads.guard("ister-receive"):
            self._dispatch(events)

    def _dispatch(self, events: list[_Event]) -> None:
        """Handles calls that any thread may handle, and passes all others to the loop at once."""
        arrived = time.monotonic()
        room = self._calls_max - self._gate.count - self._streams - self._passed
        left: list[tuple[int, _Served | None, bytes, _Details | None]] = []
        batches: dict[_Served, list[BatchCall]] = {}
        for kind, call, number, data, _, *details in events:
            if kind == self._cancelled:
                left.append((call, None, b"", None))
                continue
            served = self._by_number[number]
            assert served is not None  # noqa: S101 - for mypy: only methods of the table arrive
            room -= 1
            if room < 0:
                self.refuse(served, call, CapacityError("too many calls are in progress"))
            elif served.batch is None:
                left.append((call, served, data, details[0] if details else None))
            else:
                made = self._make_call(served, call, data, arrived, details)
                if made is not None:
                    batches.setdefault(served, []).append(made)
        own = [(one, calls) for one, calls in batches.items() if one.is_thread_safe]
        loop = [(one, calls) for one, calls in batches.items() if not one.is_thread_safe]
        if left or loop:
            with self._passed_lock:
                self._passed += len(left)
            # First, because the others may keep this thread for a sync of the disk.
            self._loop.call_soon_threadsafe(self._on_loop, left, loop)
        for served, calls in own:
            served.handle_batch(calls, self._receivers)

    def _make_call(
        self, served: _Served, call: int, data: bytes, arrived: float, details: list[_Details]
    ) -> _NativeCall | None:
        """Makes the call of a method with a batch form; None if it was refused."""
        try:
            check_size(data, served.size_max)
            caller: Caller | None = None
            if self._guard is not None:
                metadata, peer, _ = details[0]
                caller = self._guard.enter(metadata, peer=peer, action=served.method.where)
            served.method.gate.enter()
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            self.refuse(served, call, error)
            return None
        return _NativeCall(data, caller, arrived, call, served)

    def refuse(self, served: _Served, call: int, error: Exception) -> None:
        """Ends a call with the status of an error. In any thread."""
        status, text = explained(error, served.method.where)
        served.method.counters.count_refused(status.name)
        self.fail(call, status, text, ANSWERED)

    # -- in any thread ----------------------------------------------------------------------

    def respond(self, call: int, answer: bytes) -> None:
        """Answers a call; nothing happens if its client has left."""
        self._front.respond(call, answer)

    def fail(
        self,
        call: int,
        status: grpc.StatusCode,
        text: str,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Ends a call with a status."""
        self._front.fail(call, status.value[0], text, list(metadata))

    def defer(self, call: _NativeCall) -> None:
        """Leaves a call to the ordinary form of its method."""
        self._loop.call_soon_threadsafe(self._begin, call.call, call.served, call.data, call.caller)

    def _try_send(self, call: int, message: bytes) -> bool | None:
        outcome = self._front.stream_try_send(call, message)
        if outcome == self._full:
            return False
        return None if outcome == self._closed else True

    # -- on the loop ------------------------------------------------------------------------

    def _on_loop(
        self,
        left: list[tuple[int, _Served | None, bytes, _Details | None]],
        batches: list[tuple[_Served, list[BatchCall]]],
    ) -> None:
        with self._passed_lock:
            self._passed -= len(left)
        for served, calls in batches:
            served.handle_batch(calls, None)
        for call, one, data, details in left:
            if one is None:
                task = self._tasks.get(call)
                if task is not None:
                    task.cancel()
            else:
                self._begin(call, one, data, None, details)

    def _begin(
        self,
        call: int,
        served: _Served,
        data: bytes,
        caller: Caller | None,
        details: _Details | None = None,
    ) -> None:
        """Starts a task for a call."""
        context = _Context(self, call, data, details)
        task = self._loop.create_task(self._serve(served, context, data, caller))
        self._tasks[call] = task
        self._streams += served.method.gives_stream

        def on_done(_: asyncio.Task[None]) -> None:
            del self._tasks[call]
            self._streams -= served.method.gives_stream

        task.add_done_callback(on_done)
        threads.watch_task("ister-rpc", task)

    async def _serve(
        self, served: _Served, context: _Context, data: bytes, caller: Caller | None
    ) -> None:
        """Serves one call with the ordinary form of its method."""
        try:
            if caller is not None:
                answer = await served.handle_as(caller, data, context)
            else:
                answer = await served.handle(data, context)
        except grpc.aio.AbortError:
            self.fail(context.call, context.status, context.text, context.metadata)
        except asyncio.CancelledError:
            # A client that has left does not get this; one whose task was cancelled here does.
            self.fail(context.call, grpc.StatusCode.CANCELLED, "the call was cancelled")
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            status, text = explained(error, served.method.where)
            self.fail(context.call, status, text)
        else:
            if served.method.gives_stream:
                self._front.stream_end(context.call)
            else:
                self.respond(context.call, answer)

    async def write(self, call: int, messages: Sequence[bytes]) -> None:
        """Writes messages to a stream, as fast as its client reads.

        Raises:
            CancelledError: The client has left.
        """
        has_yielded = False
        for number, message in enumerate(messages):
            outcome = self._try_send(call, message)
            if outcome is False and not has_yielded:
                # A client that reads has often made room by the loop's next turn.
                has_yielded = True
                await asyncio.sleep(0)
                outcome = self._try_send(call, message)
            if outcome:
                continue
            if outcome is None or not await self._write_slowly(call, messages[number:]):
                raise asyncio.CancelledError
            return
        if not has_yielded:
            # Other tasks get their turn, however much there is to write.
            await asyncio.sleep(0)

    async def _write_slowly(self, call: int, messages: Sequence[bytes]) -> bool:
        written: asyncio.Future[bool] = self._loop.create_future()

        def set_result(outcome: bool) -> None:
            if not written.done():
                written.set_result(outcome)

        def on_done(outcome: bool) -> None:
            self._loop.call_soon_threadsafe(set_result, outcome)

        assert self._senders is not None  # noqa: S101 - for mypy
        self._senders.write(call, messages, on_done)
        return await written


class _Served:
    """A method as this engine serves it: alone, for a known caller, or in batches."""

    def __init__(self, engine: NativeEngine, method: Method, guard: GrpcGuard | None) -> None:
        self.engine = engine
        self.method = method
        self.batch: BatchForm | None = method.batch
        self.is_thread_safe = method.batch is not None and method.batch.is_thread_safe
        self.size_max = None if method.batch is None else method.batch.size_max
        self.handle: Handler = method.handle
        if guard is not None:
            # Authenticates the caller, and then reads the request from the context.
            wrapped = guard.wrap(method.grpc_handler(), method.where)
            self.handle = wrapped.stream_stream if method.gives_stream else wrapped.stream_unary
        self._handle_inside = method.handle

    async def handle_as(self, caller: Caller, data: bytes, context: _Context) -> bytes:
        """Serves a call whose caller is authenticated already."""
        with entered(caller):
            answer: bytes = await self._handle_inside(data, context)
            return answer

    def handle_batch(self, calls: Sequence[BatchCall], receivers: Receivers[_Event] | None) -> None:
        """Handles calls together; if that fails, refuses those without an answer.

        A receiver commits the messages of one topic itself: what arrives meanwhile is the next
        batch. Each of several topics needs a sync, which the log's threads do at the same time.
        """
        assert self.batch is not None  # noqa: S101 - for mypy
        try:
            appended = self.batch.handle(calls)
            if receivers is not None and len(appended) == 1 and receivers.begin():
                try:
                    appended[0].wait()
                finally:
                    receivers.end()
                return
            for one in appended:
                one.notify()
        except Exception as error:  # noqa: BLE001 - a bug, sent to the clients
            for call in calls:
                call.refuse(error)


class _NativeCall(BatchCall):
    """A call of the front, which identifies calls by number."""

    __slots__ = ("_is_done", "call", "served")

    def __init__(
        self, data: bytes, caller: Caller | None, arrived: float, call: int, served: _Served
    ) -> None:
        super().__init__(data, caller, arrived)
        self.call = call
        self.served = served
        self._is_done = False

    def refuse(self, error: Exception) -> None:
        """Ends the call with the status of an error, unless it has ended."""
        if not self._is_done:
            self._is_done = True
            self.served.method.gate.leave()
            self.served.engine.refuse(self.served, self.call, error)

    def defer(self) -> None:
        """Starts a task that serves the call."""
        if not self._is_done:
            self._is_done = True
            self.served.method.gate.leave()
            self.served.engine.defer(self)

    @staticmethod
    def answer_all(calls: Sequence[BatchCall], answers: Sequence[bytes]) -> None:
        """Answers from the calling thread."""
        first = cast("_NativeCall", calls[0])
        method, respond = first.served.method, first.served.engine.respond
        for call, answer in zip(cast("Sequence[_NativeCall]", calls), answers, strict=True):
            call._is_done = True  # noqa: SLF001 - of this class
            respond(call.call, answer)
        method.gate.leave(len(calls))
        method.counters.count_answers(len(calls), time.monotonic() - first.arrived)


class _Context:
    """The part of grpcio's `ServicerContext` that methods and the guard use."""

    def __init__(
        self, engine: NativeEngine, call: int, data: bytes, details: _Details | None
    ) -> None:
        self.call = call
        self.status = grpc.StatusCode.UNKNOWN
        self.text = ""
        self.metadata: Sequence[tuple[str, str]] = ()
        self._engine = engine
        self._request: bytes | None = data
        self._details = details

    def peer(self) -> str:
        """The address of the client; "" if authentication is off."""
        return "" if self._details is None else self._details[1]

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The headers of the call."""
        return () if self._details is None else self._details[0]

    async def read(self) -> object:
        """The request, once."""
        request, self._request = self._request, None
        return grpc.aio.EOF if request is None else request

    async def write(self, message: bytes) -> None:
        """Writes a message to the call's stream."""
        await self._engine.write(self.call, [message])

    async def write_all(self, messages: Sequence[bytes]) -> None:
        """Writes messages to the call's stream."""
        await self._engine.write(self.call, messages)

    async def abort(
        self, status: grpc.StatusCode, text: str = "", metadata: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Ends the call with a status."""
        self.status, self.text, self.metadata = status, text, metadata
        raise grpc.aio.AbortError
