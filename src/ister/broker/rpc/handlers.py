"""Handlers of gRPC methods: requests parsed, errors turned into statuses, calls counted.

Handlers raise errors of `ister.errors`, or `Refused` where a client depends on a certain status.
Any other exception is a bug: the client gets INTERNAL and a number, the log has the number and the
traceback.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from ister.broker.counters import CallCounters
from ister.broker.dispatch.write_queue import STALLED
from ister.broker.security.principal_limits import PrincipalLimit
from ister.errors import (
    CapacityError,
    FencedError,
    InvalidRequestError,
    IsterError,
    UnavailableError,
)
from ister.wire.errors import ANSWERED, BROKER_FAILED

_log = logging.getLogger("ister.broker.rpc.handlers")

# gRPC carries the text in a header, where every byte that is not printable ASCII takes three. A
# client that finds more than 8 KiB of headers sees RESOURCE_EXHAUSTED instead of what it was told.
_TEXT_BYTES_MAX: Final = 1000

# How often a closed gate checks whether all calls have ended.
_LEAVING_SECONDS: Final = 0.005


Request = TypeVar("Request")
Answer: TypeAlias = Message | bytes
"""A message, or its bytes."""


class Context(Protocol):
    """The part of grpcio's `ServicerContext` that handlers use."""

    async def write(self, message: bytes) -> None:
        """Writes a message to the call's stream."""

    async def abort(
        self, status: grpc.StatusCode, text: str = "", metadata: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """Ends the call with a status; raises AbortError."""


class Refused(IsterError):  # noqa: N818 - it is not always an error: a client may act on it
    """A call that ends with a certain status."""

    def __init__(self, status: grpc.StatusCode, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


def status_of(error: IsterError) -> grpc.StatusCode:
    """Returns the gRPC status of an error."""
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, FencedError):
        # Another broker has the topic: looking it up again finds it.
        return grpc.StatusCode.UNAVAILABLE
    status: grpc.StatusCode = getattr(grpc.StatusCode, error.code)
    return status


class CallGate:
    """Counts unary calls in progress, and refuses new ones once it is closed. Thread-safe.

    A gRPC server that stops cancels calls that have arrived and were not begun, and Danube's client
    shows that to its user. Behind a closed gate they are UNAVAILABLE, which it tries again.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._lock = threading.Lock()
        self._count = 0

    def enter(self, count: int = 1) -> None:
        """Counts calls that begin."""
        with self._lock:
            if self.is_closed:
                raise UnavailableError("the broker is shutting down")
            self._count += count

    @property
    def count(self) -> int:
        """The number of calls in progress."""
        return self._count

    def leave(self, count: int = 1) -> None:
        """Counts calls that have ended."""
        with self._lock:
            self._count -= count

    async def close(self, timeout: float) -> None:
        """Refuses new calls; waits up to `timeout` seconds for those in progress."""
        with self._lock:
            self.is_closed = True
        end_at = time.monotonic() + timeout
        while self._count and time.monotonic() < end_at:  # noqa: ASYNC110 - threads leave, too
            await asyncio.sleep(_LEAVING_SECONDS)


class ConsumerSlots:
    """Limits how many consumers may have a stream at once, in all services."""

    def __init__(self, count_max: int, limit: PrincipalLimit | None = None) -> None:
        self.count = 0
        self._count_max = count_max
        self._limit = limit

    def check(self, principal: str = "") -> None:
        """Refuses a consumer beyond the limit.

        `principal` is "" if it is not known.
        """
        if self._limit is not None:
            self._limit.check(principal)
        if self.count >= self._count_max:
            raise CapacityError(
                f"{self.count} consumers are connected",
                hint=f"broker.limits.max_connections is {self._count_max}",
            )

    @contextmanager
    def taken(self, principal: str = "") -> Iterator[None]:
        """Takes a slot for the time of the block."""
        self.check(principal)
        self.count += 1
        if self._limit is not None:
            self._limit.add(principal)
        try:
            yield
        finally:
            if self._limit is not None:
                self._limit.remove(principal)
            self.count -= 1


def unary_handler(
    call: Callable[[Request, Context], Awaitable[Answer]],
    parse: Callable[[bytes], Request],
    where: str,
    gate: CallGate,
    counters: CallCounters | None = None,
) -> Callable[[bytes, Context], Awaitable[bytes]]:
    """Returns the handler of a unary method: takes bytes, returns the answer's bytes or aborts."""
    counters = counters or CallCounters()

    async def handle(data: bytes, context: Context) -> bytes:
        began = time.monotonic()
        try:
            gate.enter()
            try:
                answer = await call(_parsed(parse, data), context)
            finally:
                gate.leave()
        except asyncio.CancelledError:
            counters.count_refused("CANCELLED")
            raise
        except grpc.aio.AbortError:
            counters.count_refused("ABORTED")
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            status, text = explained(error, where)
            counters.count_refused(status.name)
        else:
            counters.count_answers(1, time.monotonic() - began)
            return _serialized(answer)
        # gRPC keeps what `abort` raises until the garbage collector runs, with everything that its
        # frames hold. So it is called outside of `except`, and without the request.
        data = b""
        await context.abort(status, text, ANSWERED)
        raise AssertionError("abort raises")

    return handle


def streaming_handler(
    call: Callable[..., AsyncIterator[Answer | list[bytes]]],
    parse: Callable[[bytes], object],
    where: str,
    *,
    counters: CallCounters | None = None,
    explain: Callable[[Exception, str], tuple[grpc.StatusCode, str]] | None = None,
) -> Callable[[bytes | AsyncIterator[bytes], Context], Awaitable[None]]:
    """Returns the handler of a method that answers with a stream, of messages or of lists of them.

    `explain` makes a status and a text of an error; by default `explained` does.
    """
    counters = counters or CallCounters()
    explain = explain or explained

    async def parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[object]:
        async for data in requests:
            yield _parsed(parse, data)

    async def handle(data: bytes | AsyncIterator[bytes], context: Context) -> None:
        refusal: tuple[grpc.StatusCode, str] | None = None
        answers: AsyncIterator[Answer | list[bytes]] | None = None
        try:
            answers = call(
                _parsed(parse, data) if isinstance(data, bytes) else parsed(data), context
            )
            async for answer in answers:
                await _write(context, answer)
                del answer  # it is not held while nothing else comes
        except asyncio.CancelledError as error:
            counters.count_refused("CANCELLED")
            if STALLED in error.args:
                _reset_call()
            raise
        except grpc.aio.AbortError:
            counters.count_refused("ABORTED")
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            refusal = explain(error, where)
            counters.count_refused(refusal[0].name)
        else:
            counters.count_answers(1, None)
        finally:
            close = getattr(answers, "aclose", None)
            if close is not None:
                # Releases what the method holds now, not when the garbage collector runs.
                await close()
        if refusal is not None:
            data, answers = b"", None  # as above
            await context.abort(*refusal, ANSWERED)

    return handle


def _parsed(parse: Callable[[bytes], Request], data: bytes) -> Request:
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidRequestError(
            "the request cannot be decoded as this method's message"
        ) from error


def _serialized(answer: Answer) -> bytes:
    if isinstance(answer, bytes):
        return answer
    data: bytes = answer.SerializeToString()
    return data


def explained(error: Exception, where: str) -> tuple[grpc.StatusCode, str]:
    """Returns the status and text that a client gets for an error of the call `where`."""
    if isinstance(error, IsterError) and error.code != "INTERNAL":
        return status_of(error), _cut(str(error).replace("\n", " "))
    number = secrets.token_hex(4)
    _log.error("a call failed", exc_info=error, extra={"call": where, "number": number})
    return grpc.StatusCode.INTERNAL, f"{BROKER_FAILED} [{number}]"


def _cut(text: str) -> str:
    """As much of a text as a header takes."""
    room = _TEXT_BYTES_MAX
    for at, character in enumerate(text):
        room -= 1 if " " <= character <= "~" else 3 * len(character.encode())
        if room < 0:
            return text[:at]
    return text


def _reset_call() -> None:
    """Makes grpcio end the call of this task, and release the message that it is writing.

    A status would wait behind that message, for a client that does not read. grpcio resets a call
    that nothing refers to any more. Besides this task, the task that waits for the client to cancel
    the call refers to it. Other engines have no such task.
    """
    task = asyncio.current_task()
    for other in asyncio.all_tasks():
        call = other.get_coro()
        if getattr(call, "__name__", "") == "_schedule_rpc_coro" and any(
            found is task for scope in gc.get_referents(call) for found in gc.get_referents(scope)
        ):
            other.cancel()


async def _write(context: Context, answer: Answer | list[bytes]) -> None:
    try:
        if not isinstance(answer, list):
            await context.write(_serialized(answer))
        elif hasattr(context, "write_all"):  # of the native engine
            await context.write_all(answer)
        else:
            for one in answer:
                await context.write(one)
    except grpc.aio.InternalError as error:
        # The client has gone, or does not take messages of this size; the call is over either way.
        raise asyncio.CancelledError from error
