"""From a handler's errors to a status on the wire, in one place.

Handlers raise errors of `ister.errors`, or `Refused` where a client depends on a certain status.
Whatever else they raise is our fault: the client is told INTERNAL and a number, the log has the
number and the traceback.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from ister.broker.counters import CallCounters
from ister.broker.principal_limits import PrincipalLimit
from ister.errors import (
    CapacityError,
    FencedError,
    InvalidRequestError,
    IsterError,
    UnavailableError,
)

__all__ = [
    "ANSWERED",
    "Gate",
    "Places",
    "Refused",
    "status_of",
    "streaming_handler",
    "unary_handler",
]

_log = logging.getLogger("ister.broker.rpc")

# gRPC carries the text in a header, where every byte that is not printable ASCII takes three. A
# client that finds more than 8 KiB of headers sees RESOURCE_EXHAUSTED instead of what it was told.
_TEXT_BYTES_MAX: Final = 1000

ANSWERED: Final = (("ister-answered", "1"),)
"""What goes with each refusal. Without it, nobody could tell it from a connection that failed, as
those are UNAVAILABLE too."""


class Refused(IsterError):  # noqa: N818 - it is not always an error: a client may act on it
    """A call that ends with a certain status."""

    def __init__(self, status: grpc.StatusCode, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


def status_of(error: IsterError) -> grpc.StatusCode:
    """The status that tells a client what to do about an error."""
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, FencedError):
        # Another broker has the topic: looking it up again finds it.
        return grpc.StatusCode.UNAVAILABLE
    status: grpc.StatusCode = getattr(grpc.StatusCode, error.code)
    return status


class Gate:
    """Calls under way, and whether further ones are let in.

    A gRPC server that stops cancels calls that have arrived and were not begun, and Danube's client
    shows that to its user. Behind a closed gate they are UNAVAILABLE, which it tries again.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """Lets a call in.

        Raises:
            UnavailableError: The gate is closed.
        """
        if self.is_closed:
            raise UnavailableError("the broker is ending")
        self._count += 1
        self._idle.clear()

    def leave(self) -> None:
        """Notes that a call which was let in is answered."""
        self._count -= 1
        if not self._count:
            self._idle.set()

    async def close(self, timeout: float) -> None:
        """Lets nobody in any more; waits for those inside, but not longer than that."""
        self.is_closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()


class Places:
    """How many consumers may have a stream at once, whichever service they came to."""

    def __init__(self, count_max: int, limit: PrincipalLimit | None = None) -> None:
        self.count = 0
        self._count_max = count_max
        self._limit = limit

    def check(self, principal: str = "") -> None:
        """Refuses one more than there may be.

        Args:
            principal: Whose consumer it is; "" if that is not known.

        Raises:
            CapacityError: All places are taken, or as many as the principal may have.
        """
        if self._limit is not None:
            self._limit.check(principal)
        if self.count >= self._count_max:
            raise CapacityError(
                f"{self.count} consumers are connected",
                hint="broker.limits.max_connections is the limit",
            )

    @contextmanager
    def taken(self, principal: str = "") -> Iterator[None]:
        """Takes a place, for the time of the block.

        Raises:
            As `check`.
        """
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
    call: Callable[[Any, Any], Awaitable[Any]],
    parse: Callable[[bytes], Any],
    where: str,
    gate: Gate,
    counters: CallCounters | None = None,
) -> Callable[[bytes, Any], Awaitable[Any]]:
    """A method as gRPC calls it: bytes in, the answer or a status out."""
    counters = counters or CallCounters()

    async def handle(data: bytes, context: Any) -> Any:  # noqa: ANN401 - gRPC has no types
        now = asyncio.get_running_loop().time
        began = now()
        try:
            gate.enter()
            try:
                answer = await call(_parsed(parse, data), context)
            finally:
                gate.leave()
        except asyncio.CancelledError:
            counters.refused["CANCELLED"] += 1
            raise
        except grpc.aio.AbortError:
            counters.refused["ABORTED"] += 1
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            status, text = _explained(error, where)
            counters.refused[status.name] += 1
        else:
            counters.note_answer(now() - began)
            return answer
        # gRPC keeps what `abort` raises until the collector comes by, and with it everything that
        # its frames hold. So not within `except`, and without the request.
        data = b""
        return await context.abort(status, text, ANSWERED)

    return handle


def streaming_handler(
    call: Callable[[Any, Any], AsyncIterator[Any]],
    parse: Callable[[bytes], Any],
    where: str,
    *,
    is_stream: bool,
    counters: CallCounters | None = None,
    explain: Callable[[Exception, str], tuple[grpc.StatusCode, str]] | None = None,
) -> Callable[[Any, Any], Awaitable[None]]:
    """The same for a method that answers with a stream; `explain` puts errors in its own words."""
    counters = counters or CallCounters()
    explain = explain or _explained

    async def parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield _parsed(parse, data)

    async def handle(data: Any, context: Any) -> None:  # noqa: ANN401 - gRPC has no types
        refusal: tuple[grpc.StatusCode, str] | None = None
        answers: AsyncIterator[Any] | None = None
        try:
            request = parsed(data) if is_stream else _parsed(parse, data)
            answers = call(request, context)
            async for answer in answers:
                await _write(context, answer)
        except asyncio.CancelledError:
            counters.refused["CANCELLED"] += 1
            raise
        except grpc.aio.AbortError:
            counters.refused["ABORTED"] += 1
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            refusal = explain(error, where)
            counters.refused[refusal[0].name] += 1
        else:
            counters.answered += 1
        finally:
            close = getattr(answers, "aclose", None)
            if close is not None:
                # What the method holds is let go of now, not when the collector comes by.
                await close()
        if refusal is not None:
            data = request = answers = answer = None  # as above
            await context.abort(*refusal, ANSWERED)

    return handle


def _parsed(parse: Callable[[bytes], Any], data: bytes) -> Any:  # noqa: ANN401 - any message
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidRequestError("the request is not a message of this call") from error


def _explained(error: Exception, where: str) -> tuple[grpc.StatusCode, str]:
    """What the client is told about an error."""
    if isinstance(error, IsterError) and error.code != "INTERNAL":
        return status_of(error), _cut(str(error).replace("\n", " "))
    number = secrets.token_hex(4)
    _log.error("a call failed", exc_info=error, extra={"call": where, "number": number})
    return grpc.StatusCode.INTERNAL, f"the broker failed [{number}]"


def _cut(text: str) -> str:
    """As much of a text as a header takes."""
    room = _TEXT_BYTES_MAX
    for at, character in enumerate(text):
        room -= 1 if " " <= character <= "~" else 3 * len(character.encode())
        if room < 0:
            return text[:at]
    return text


async def _write(context: Any, answer: Any) -> None:  # noqa: ANN401 - gRPC has no types
    try:
        await context.write(answer)
    except grpc.aio.InternalError as error:
        # The client has gone, or does not take messages of this size; the call is over either way.
        raise asyncio.CancelledError from error
