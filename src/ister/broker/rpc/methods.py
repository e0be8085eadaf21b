"""The methods of a service, as both engines serve them.

Owns: how an object's methods become handlers of bytes, with size limits, errors, counters, the gate
and spans. Does not own: transports.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from ister.base import tracing
from ister.broker.counters import CallCounters, Calls
from ister.broker.rpc.batch_calls import Appended, BatchCall
from ister.broker.rpc.handlers import (
    Answer,
    CallGate,
    Refused,
    status_of,
    streaming_handler,
    unary_handler,
)
from ister.wire import describe_service, message_class

Handler = Callable[..., Awaitable[bytes]]
"""Takes the request's bytes, or an iterator of them, and gRPC's context; returns the bytes of the
answer, or writes answers to the context."""

UnaryCall = Callable[..., Awaitable[Answer]]
"""A unary method of a service: takes a request and gRPC's context."""
Wrap = Callable[[str, UnaryCall], UnaryCall]
"""Wraps a unary method, given its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForm:
    """A method's form that takes many calls; see `ister.broker.rpc.batch_calls`."""

    handle: Callable[[Sequence[BatchCall]], Sequence[Appended]]
    """`Name_batch`."""
    is_thread_safe: bool
    """Whether any thread may call it, and not only the loop's."""
    size_max: int | None
    """Larger requests are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method of one service."""

    service: str
    name: str
    takes_stream: bool
    gives_stream: bool
    handle: Handler
    gate: CallGate
    counters: CallCounters
    batch: BatchForm | None = None

    @property
    def where(self) -> str:
        """The method as gRPC names it, without the first slash."""
        return f"{self.service}/{self.name}"

    @property
    def path(self) -> str:
        """The method as gRPC names it: `/package.Service/Name`."""
        return f"/{self.where}"

    def grpc_handler(self, handle: Handler | None = None) -> grpc.RpcMethodHandler:
        """Returns grpcio's handler of the method, which calls `handle` if one is given."""
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[self.takes_stream, self.gives_stream]
        return make(handle or self.handle)


def methods_of(
    name: str,
    instance: object,
    gate: CallGate | None = None,
    calls: Calls | None = None,
    *,
    size_max: int | None = None,
    prefix: str = "",
    wrap: Wrap | None = None,
) -> list[Method]:
    """Returns the methods of a service, served by an object's methods of the same names.

    A unary method is `async def Name(self, request, context) -> answer`, and may have the batch
    forms of `batch_calls` beside it. A method that answers with a stream is an async
    generator, which may yield serialized answers and lists of those. A method whose requests are a
    stream gets an async iterator of them.

    `gate` counts unary calls, and can be closed to them. Requests larger than `size_max` bytes are
    refused. `prefix` is put before the name of the service. `wrap` wraps each unary method, given
    its path.
    """
    gate, calls = gate or CallGate(), calls or Calls()
    return [
        _method(name, method, instance, gate, calls.of(name, method.name), size_max, prefix, wrap)
        for method in describe_service(name).methods
    ]


def _method(  # noqa: PLR0917 - private, and called once
    name: str,
    method: MethodDescriptor,
    instance: object,
    gate: CallGate,
    counters: CallCounters,
    size_max: int | None,
    prefix: str,
    wrap: Wrap | None,
) -> Method:
    call = getattr(instance, method.name)
    parse = _bounded(message_class(method.input_type).FromString, size_max)
    where = f"{prefix}{name}/{method.name}"
    batch: BatchForm | None = None
    if method.server_streaming:
        # It writes its answers to the context, and returns none.
        handle = cast("Handler", streaming_handler(call, parse, where, counters=counters))
    else:
        if wrap is not None:
            call = wrap(f"/{name}/{method.name}", call)
        traced = tracing.traced_call(where, call, status_of)
        handle = unary_handler(traced, parse, where, gate, counters)
        many = getattr(instance, f"{method.name}_batch", None)
        # A call that is traced has a span of its own.
        if many is not None and not tracing.is_on():
            is_safe = method.name in getattr(instance, "THREAD_SAFE", ())
            batch = BatchForm(handle=many, is_thread_safe=is_safe, size_max=size_max)
    return Method(
        service=f"{prefix}{name}",
        name=method.name,
        takes_stream=method.client_streaming,
        gives_stream=method.server_streaming,
        handle=handle,
        gate=gate,
        counters=counters,
        batch=batch,
    )


def _bounded(parse: Callable[[bytes], Message], size_max: int | None) -> Callable[[bytes], Message]:
    """Adds a size limit to `parse`: the server's own limit is that of its largest method."""
    if size_max is None:
        return parse

    def parse_bounded(data: bytes) -> Message:
        check_size(data, size_max)
        return parse(data)

    return parse_bounded


def check_size(data: bytes, size_max: int | None) -> None:
    """Refuses a request that is too large."""
    if size_max is not None and len(data) > size_max:
        raise Refused(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"received message larger than max ({len(data)} vs. {size_max})",
        )
