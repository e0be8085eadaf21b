"""The messages and services of the wire, from `.proto` files of this package.

    danube          Danube's client protocol         danube_schema   its schema registry
    danube_admin    its administration               ister_api       what Ister adds

Each of them is a namespace of message classes: `danube.StreamMessage(…)`. `add_service` serves an
object's methods as the RPCs of a service, `stub` calls them.

The symbols are Danube's own, and its Python client registers the same ones with protobuf's default
pool. So these live in a pool of their own, and both can be imported into one process. The pool is
filled from `services.binpb`, which `make protos` compiles; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from types import SimpleNamespace
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import ServiceDescriptor

from ister.broker.counters import Calls
from ister.broker.rpc import Gate, Refused, status_of, streaming_handler, unary_handler
from ister.tracing import traced_call

__all__ = ["add_service", "danube", "danube_admin", "danube_schema", "ister_api", "stub"]

COMPILED: Final = "services.binpb"
SOURCES: Final = ("danube.proto", "danube_schema.proto", "danube_admin.proto", "ister.proto")

_pool: Final = descriptor_pool.DescriptorPool()


def _load() -> dict[str, SimpleNamespace]:
    content = resources.files(__name__).joinpath(COMPILED).read_bytes()
    namespaces: dict[str, SimpleNamespace] = {}
    for file in descriptor_pb2.FileDescriptorSet.FromString(content).file:
        _pool.Add(file)
        names = namespaces.setdefault(file.package, SimpleNamespace())
        described = _pool.FindFileByName(file.name)
        for name, message in described.message_types_by_name.items():
            setattr(names, name, message_factory.GetMessageClass(message))
        for name, enum in described.enum_types_by_name.items():
            values = {value.name: value.number for value in enum.values}
            setattr(names, name, SimpleNamespace(**values))
    return namespaces


_namespaces: Final = _load()
danube: Final[Any] = _namespaces["danube"]
danube_schema: Final[Any] = _namespaces["danube_schema"]
danube_admin: Final[Any] = _namespaces["danube_admin"]
ister_api: Final[Any] = _namespaces["ister"]


def _service(name: str) -> ServiceDescriptor:
    service: ServiceDescriptor = _pool.FindServiceByName(name)
    return service


def _class_of(message: Any) -> Any:  # noqa: ANN401 - protobuf's descriptors have no types
    return message_factory.GetMessageClass(message)


def _serialize(answer: Any) -> bytes:  # noqa: ANN401 - a message, or one that is bytes already
    return answer if type(answer) is bytes else answer.SerializeToString()


def _bounded(parse: Callable[[bytes], Any], size_max: int | None) -> Callable[[bytes], Any]:
    """Refuses what is too large, as gRPC does: the server's own limit is for the largest of all."""
    if size_max is None:
        return parse

    def parse_bounded(data: bytes) -> Any:  # noqa: ANN401 - any message
        if len(data) > size_max:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"received message larger than max ({len(data)} vs. {size_max})",
            )
        return parse(data)

    return parse_bounded


def add_service(
    server: grpc.aio.Server,
    name: str,
    instance: object,
    gate: Gate | None = None,
    calls: Calls | None = None,
    *,
    size_max: int | None = None,
) -> None:
    """Serves the RPCs of a service by an object's methods of the same names.

    A unary method is `async def Name(self, request, context) -> answer`. One that streams is an
    async generator, and may yield answers that are serialized already. One whose requests are a
    stream gets an async iterator of them. A gate can be closed for unary calls. `calls` counts.
    Requests of more than `size_max` bytes are refused.
    """
    gate, calls = gate or Gate(), calls or Calls()
    handlers: dict[str, grpc.RpcMethodHandler] = {}
    for method in _service(name).methods:
        call = getattr(instance, method.name)
        parse = _bounded(_class_of(method.input_type).FromString, size_max)
        where = f"{name}/{method.name}"
        if method.server_streaming:
            make = (
                grpc.stream_stream_rpc_method_handler
                if method.client_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            handler = streaming_handler(
                call,
                parse,
                where,
                is_stream=method.client_streaming,
                counters=calls.of(name, method.name),
            )
        else:
            make = grpc.unary_unary_rpc_method_handler
            call = traced_call(where, call, status_of)
            handler = unary_handler(call, parse, where, gate, calls.of(name, method.name))
        # Requests are parsed by the handler: what is no message gets a status that says so.
        handlers[method.name] = make(handler, response_serializer=_serialize)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


def stub(channel: grpc.Channel | grpc.aio.Channel, name: str) -> Any:  # noqa: ANN401 - methods of any service
    """An object with a callable per RPC of a service."""
    calls: dict[str, Callable[..., Any]] = {}
    for method in _service(name).methods:
        kind = f"{_shape(method.client_streaming)}_{_shape(method.server_streaming)}"
        calls[method.name] = getattr(channel, kind)(
            f"/{name}/{method.name}",
            request_serializer=_serialize,
            response_deserializer=_class_of(method.output_type).FromString,
        )
    return SimpleNamespace(**calls)


def _shape(is_stream: bool) -> str:
    return "stream" if is_stream else "unary"
