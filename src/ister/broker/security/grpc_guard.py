"""The guard in front of every gRPC call, Flight's among them.

Every call is authenticated before its handler sees it, whatever the service: there is no list of
methods that could be forgotten. The handler runs with the caller as the current one. A request is
read only after its caller is authenticated, so that others cannot make the broker hold large ones:
a request of one message is read here.

A call that answers with a stream is judged again about once a second, and ended with
UNAUTHENTICATED or PERMISSION_DENIED as soon as it would no longer be let in. The handler is
cancelled for that, which releases what it holds. Streams of one principal are limited in number,
and so are its calls whose request has not arrived: otherwise they could block others for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeAlias

import grpc

from ister.broker.rpc.handlers import status_of
from ister.broker.security.authentication import collect_headers
from ister.broker.security.guard import VERIFY_SECONDS, Caller, Guard, entered
from ister.broker.security.principal import counted_as
from ister.broker.security.principal_limits import PrincipalLimit
from ister.errors import CapacityError, IsterError, UnauthenticatedError

_Context: TypeAlias = grpc.aio.ServicerContext

# A client that reads nothing also reads no status.
_ABORT_SECONDS: Final = 5.0
_CERTIFICATE: Final = "x509_pem_cert"


class GrpcGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Authenticates every call of a server.

    `streams` limits the streams of each principal, `arriving` its other calls whose request has not
    arrived; None for no limit. `texts` formats the errors of a service, by its name; `str` by
    default.
    """

    def __init__(
        self,
        guard: Guard,
        streams: PrincipalLimit | None = None,
        *,
        arriving: PrincipalLimit | None = None,
        texts: Mapping[str, Callable[[IsterError], str]] | None = None,
    ) -> None:
        self._guard = guard
        self._texts = dict(texts or {})
        self._streams = streams
        self._arriving = arriving
        # By the names of methods that exist, so there are not many.
        self._guarded: dict[str, tuple[grpc.RpcMethodHandler, grpc.RpcMethodHandler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Puts the guard around a method; called by gRPC with every call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        known = self._guarded.get(method)
        if known is None or known[0] is not handler:
            known = self._guarded[method] = (handler, self.wrap(handler, method.lstrip("/")))
        return known[1]

    def wrap(self, handler: grpc.RpcMethodHandler, action: str) -> grpc.RpcMethodHandler:
        """Puts the guard around a method, which then reads its request from gRPC's context."""
        takes_stream = handler.request_streaming
        if handler.response_streaming:
            inner = handler.stream_stream if takes_stream else handler.unary_stream

            async def stream(requests: object, context: _Context) -> None:
                await self._serve_stream(inner, requests, context, action, takes_stream)

            outer: Callable[[object, _Context], Awaitable[object]] = stream
            wrap = grpc.stream_stream_rpc_method_handler
        else:
            inner = handler.stream_unary if takes_stream else handler.unary_unary

            async def answer(requests: object, context: _Context) -> object:
                caller = await self._enter(context, action, is_stream=False)
                request = requests if takes_stream else await self._read(context, caller, action)
                with entered(caller):
                    return await inner(request, context)

            outer = answer
            wrap = grpc.stream_unary_rpc_method_handler
        return wrap(
            outer,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def enter(
        self,
        metadata: Iterable[tuple[str, str | bytes]],
        *,
        certificate: bytes | None = None,
        peer: str,
        action: str,
        is_stream: bool = False,
    ) -> Caller:
        """Authenticates the caller of a call that begins. Thread-safe."""
        try:
            headers = collect_headers(metadata)
        except UnauthenticatedError as error:
            self._guard.record_refused_login(error, peer=peer, action=action)
            raise
        return self._guard.enter(
            headers, certificate=certificate, peer=peer, action=action, is_stream=is_stream
        )

    async def _enter(self, context: _Context, action: str, *, is_stream: bool) -> Caller:
        certificate = _certificate(context) if self._guard.takes_certificates else None
        try:
            return self.enter(
                context.invocation_metadata() or (),
                certificate=certificate,
                peer=str(context.peer()),
                action=action,
                is_stream=is_stream,
            )
        except IsterError as error:
            return await self._refuse(context, error, action, is_stream=is_stream)

    async def _read(self, context: _Context, caller: Caller, action: str) -> object:
        """The request of a call that has one and no stream."""
        who, arriving = counted_as(caller.principal), self._arriving
        if arriving is None:
            return await _read_one(context)
        try:
            arriving.check(who)
        except CapacityError as error:
            await self._refuse(context, error, action, is_stream=False)
        arriving.add(who)
        try:
            return await _read_one(context)
        finally:
            arriving.remove(who)

    async def _refuse(
        self, context: _Context, error: IsterError, action: str, *, is_stream: bool
    ) -> Caller:
        if is_stream:
            await self._guard.pause_refusal()
        await context.abort(status_of(error), self._text(error, action))
        raise AssertionError("abort raises")

    def _text(self, error: IsterError, action: str) -> str:
        return self._texts.get(action.partition("/")[0], str)(error)

    async def _serve_stream(
        self,
        inner: Callable[[object, _Context], AsyncIterable[object] | Awaitable[None]],
        requests: object,
        context: _Context,
        action: str,
        takes_stream: bool,
    ) -> None:
        caller = await self._enter(context, action, is_stream=True)
        who, streams = counted_as(caller.principal), self._streams
        if streams is not None:
            try:
                streams.check(who)
            except CapacityError as error:
                await self._refuse(context, error, action, is_stream=True)
            streams.add(who)
        watch = _StreamWatch(caller)
        try:
            with entered(caller):
                if self._guard.is_on:
                    watch.start()
                request = requests if takes_stream else await _read_one(context)
                answers = inner(request, context)
                if isinstance(answers, AsyncIterable):
                    async for answer in answers:
                        await context.write(answer)
                else:
                    await answers
        except asyncio.CancelledError:
            if watch.error is None:
                raise
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            try:
                async with asyncio.timeout(_ABORT_SECONDS):
                    await context.abort(status_of(watch.error), self._text(watch.error, action))
            except TimeoutError:
                # The status waits behind messages that the client has not read.
                raise asyncio.CancelledError from None
        finally:
            watch.stop()
            if streams is not None:
                streams.remove(who)


class _StreamWatch:
    """Cancels the task that made it once its caller is no longer welcome."""

    def __init__(self, caller: Caller) -> None:
        self.error: IsterError | None = None
        """Why it was cancelled."""
        self._caller = caller
        self._timer: asyncio.TimerHandle | None = None
        self._task = asyncio.current_task()

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(VERIFY_SECONDS, self._verify)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _verify(self) -> None:
        try:
            self._caller.verify(at_once=True)
        except IsterError as error:
            self._timer = None
            self.error = error
            if self._task is not None:
                self._task.cancel()
            return
        self.start()


async def _read_one(context: _Context) -> object:
    """The request of a call that has one."""
    request = await context.read()
    if request is grpc.aio.EOF:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no request")
    return request


def _certificate(context: _Context) -> bytes | None:
    """The client certificate that the connection was opened with, in PEM."""
    found = (context.auth_context() or {}).get(_CERTIFICATE)
    return bytes(found[0]) if found else None
