"""The message classes and RPCs of the wire protocol.

The symbols are Danube's own, and its Python client registers the same ones in protobuf's default
pool. So these messages live in a pool of their own, and both can be imported into one process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, cast

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

__all__ = [
    "Rpc",
    "Stream",
    "danube",
    "danube_admin",
    "danube_schema",
    "describe_service",
    "ister_api",
    "message_class",
    "stub",
]

COMPILED: Final = "services.binpb"
SOURCES: Final = ("danube.proto", "danube_schema.proto", "danube_admin.proto", "ister.proto")

Metadata = tuple[tuple[str, str], ...]

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)
_SentT_contra = TypeVar("_SentT_contra", bound=Message, contravariant=True)

_pool: Final = descriptor_pool.DescriptorPool()


def _load() -> dict[str, SimpleNamespace]:
    content = resources.files(__package__).joinpath(COMPILED).read_bytes()
    namespaces: dict[str, SimpleNamespace] = {}
    for file in descriptor_pb2.FileDescriptorSet.FromString(content).file:
        _pool.AddSerializedFile(file.SerializeToString())
        names = namespaces.setdefault(file.package, SimpleNamespace())
        described = _pool.FindFileByName(file.name)
        for name, message in described.message_types_by_name.items():
            setattr(names, name, message_factory.GetMessageClass(message))
        for name, enum in described.enum_types_by_name.items():
            setattr(names, name, EnumTypeWrapper(enum))
    return namespaces


if TYPE_CHECKING:
    from ister.wire import danube_admin_pb2 as danube_admin
    from ister.wire import danube_pb2 as danube
    from ister.wire import danube_schema_pb2 as danube_schema
    from ister.wire import ister_pb2 as ister_api
else:
    _namespaces = _load()
    danube = _namespaces["danube"]
    danube_schema = _namespaces["danube_schema"]
    danube_admin = _namespaces["danube_admin"]
    ister_api = _namespaces["ister"]


def describe_service(name: str) -> ServiceDescriptor:
    """Returns the methods of a service and their message types."""
    service: ServiceDescriptor = _pool.FindServiceByName(name)
    return service


def message_class(descriptor: Descriptor) -> type[Message]:
    """Returns the class of a message type."""
    found: type[Message] = message_factory.GetMessageClass(descriptor)
    return found


class Stream(Protocol[_SentT_contra]):
    """A bidirectional call: the part of grpc.aio's call object that is used here."""

    async def write(self, request: _SentT_contra | bytes) -> None: ...
    async def read(self) -> object:
        """Returns the next message, or grpc's end of the stream."""

    async def done_writing(self) -> None: ...
    def cancel(self) -> bool: ...


class Rpc(Generic[_Request, _Response]):
    """One RPC. A request may be given as a message or as its bytes."""

    __slots__ = ("_shape", "parse", "path")

    def __init__(self, service: str, name: str) -> None:
        method = describe_service(service).methods_by_name[name]
        kinds = (method.client_streaming, method.server_streaming)
        self._shape = "_".join("stream" if is_stream else "unary" for is_stream in kinds)
        self.path = f"/{service}/{name}"
        """As gRPC names it."""
        response = cast("type[_Response]", message_class(method.output_type))
        self.parse: Callable[[bytes], _Response] = response.FromString

    def on(
        self, channel: grpc.Channel | grpc.aio.Channel
    ) -> Callable[..., Any]:  # Any: the result depends on the channel and the RPC's shape
        """Returns grpc's callable for the RPC."""
        made: Callable[..., Any] = getattr(channel, self._shape)(
            self.path, request_serializer=_serialize, response_deserializer=self.parse
        )
        return made

    def call(
        self,
        channel: grpc.aio.Channel,
        request: _Request,
        *,
        timeout: float,
        metadata: Metadata = (),
    ) -> Awaitable[_Response]:
        """Calls a unary RPC."""
        answer: Awaitable[_Response] = self.on(channel)(request, timeout=timeout, metadata=metadata)
        return answer

    def open(self, channel: grpc.aio.Channel, *, metadata: Metadata = ()) -> Stream[_Request]:
        """Opens a bidirectional RPC."""
        stream: Stream[_Request] = self.on(channel)(metadata=metadata)
        return stream


def _serialize(request: Message | bytes) -> bytes:
    if isinstance(request, bytes):
        return request
    data: bytes = request.SerializeToString()
    return data


def stub(channel: grpc.Channel | grpc.aio.Channel, service: str) -> SimpleNamespace:
    """Returns grpc's callables for every RPC of a service, by their names."""
    methods = describe_service(service).methods
    return SimpleNamespace(
        **{method.name: Rpc(service, method.name).on(channel) for method in methods}
    )
