"""Calls to other brokers, on behalf of callers of this one.

    a call with a topic that another broker has ─► relay ─► that broker's `forwarded.` methods

Owns: channels to other brokers, and what a call to them carries. Does not own: which broker to call
(`cluster`), which calls are forwarded (`ister.broker.services.forwarding`).

A call carries its caller's own credentials, so the other broker decides what the caller may do. A
client certificate cannot be forwarded: its owner has to call the other broker itself. A dead letter
and the question for owners have no caller; they carry the secret of the cluster
(`ister.broker.security.cluster_secret`), which is accepted for nothing else.

Forwarded calls are served under names of their own (`forwarded.ister.Admin/Seek`), and are not
forwarded again, so that two brokers that each take the other for the owner of a topic do not call
each other for ever. A header cannot mark them: with authentication off, the native engine drops
headers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeVar

import grpc
import msgspec
from google.protobuf.message import Message

from ister.base.model import AckLevel, Codec, StreamMessage
from ister.base.structs import make_decoder
from ister.broker.rpc.handlers import Refused
from ister.broker.security.guard import current_caller
from ister.broker.security.tls import ServerTls
from ister.bucket.members import Member
from ister.errors import CorruptDataError, IsterError, UnavailableError
from ister.format.message import encode_message
from ister.wire import Rpc, danube_admin, ister_api, services
from ister.wire.errors import error_of, is_answer

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)

FORWARDED: Final = "forwarded."
"""The prefix of services that serve forwarded calls."""

_CALL_SECONDS: Final = 30.0
# Clients wait for this one while they look a topic up.
_OWNERS_SECONDS: Final = 2.0
_OPTIONS: Final = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Reconnect soon to a broker that was restarted.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 300),
]

_owners: Final = make_decoder(dict[str, Member])
_is_forwarded: ContextVar[bool] = ContextVar("ister_forwarded", default=False)


@contextmanager
def forwarded() -> Iterator[None]:
    """Marks the current call as one that another broker has forwarded."""
    token = _is_forwarded.set(True)
    try:
        yield
    finally:
        _is_forwarded.reset(token)


def is_forwarded() -> bool:
    """Whether another broker has forwarded the current call."""
    return _is_forwarded.get()


def may_forward() -> bool:
    """Whether the current call can be forwarded: it was not yet, and its credentials can be."""
    caller = current_caller()
    return not _is_forwarded.get() and (caller is None or caller.principal.via != "mtls")


class Peers:
    """The other brokers. Belongs to the broker's loop."""

    def __init__(self, tls: ServerTls | None, *, secret: str | None = None) -> None:
        """Calls brokers with TLS, unless `tls` is None; `secret` is that of the cluster."""
        self._tls = tls
        self._secret = secret
        # By address, each with the serial number of its certificates.
        self._channels: dict[str, tuple[int, grpc.aio.Channel]] = {}

    async def call(
        self,
        member: Member,
        rpc: Rpc[_Request, _Response],
        request: _Request,
        *,
        topic: str | None = None,
        timeout: float = _CALL_SECONDS,
    ) -> _Response:
        """Calls another broker once, for the current caller."""
        data: bytes = request.SerializeToString()
        try:
            return rpc.parse(await self._send(member, rpc.path, data, topic, timeout))
        except grpc.aio.AioRpcError as error:
            raised: IsterError = error_of(error, member.broker_url, topic)
            raise raised from error

    async def relay(
        self,
        member: Member,
        path: str,
        data: bytes,
        *,
        topic: str | None = None,
        timeout: float = _CALL_SECONDS,
    ) -> bytes:
        """Sends the request of a unary method to another broker, for the current caller.

        Raises:
            Refused: The other broker's error, with the same status.
            UnavailableError: It does not answer, or the call cannot be forwarded.
        """
        try:
            return await self._send(member, path, data, topic, timeout)
        except grpc.aio.AioRpcError as error:
            if is_answer(error):
                raise Refused(error.code(), str(error.details() or "")) from error
            raised: IsterError = error_of(error, member.broker_url, topic)
            raise raised from error

    async def _send(
        self, member: Member, path: str, data: bytes, topic: str | None, timeout: float
    ) -> bytes:
        if not may_forward():
            raise UnavailableError(
                f"the call cannot be forwarded; send it to the broker {member.broker_url}",
                topic=topic,
            )
        caller = current_caller()
        headers = () if caller is None else caller.credentials
        address = member.broker_url.partition("://")[2]
        method = self._channel(address).unary_unary(f"/{FORWARDED}{path.lstrip('/')}")
        answer: bytes = await method(data, timeout=timeout, metadata=headers)
        return answer

    async def create_topic(
        self,
        member: Member,
        name: str,
        *,
        is_reliable: bool,
        ack: AckLevel | None,
        codec: Codec | None,
    ) -> None:
        """Creates a topic at another broker."""
        request = ister_api.CreateTopicRequest(
            topic=name,
            ack=ack.value if ack is not None else "",
            codec=codec.value if codec is not None else "",
            non_reliable=not is_reliable,
        )
        await self.call(member, services.Admin.CreateTopic, request, topic=name)

    async def delete_topic(self, member: Member, name: str) -> None:
        """Deletes a topic at another broker."""
        request = danube_admin.TopicRequest(name=name)
        await self.call(member, services.TopicAdmin.DeleteTopic, request, topic=name)

    async def publish_dead_letter(self, member: Member, name: str, message: StreamMessage) -> None:
        """Publishes a dead letter at another broker."""
        request = ister_api.DeadLetter(topic=name, message=encode_message(message, Codec.BINCODE2))
        await self._ask(member, services.Peers.PublishDeadLetter, request, topic=name)

    async def find_owners(self, member: Member, topics: Sequence[str]) -> dict[str, Member] | None:
        """Asks another broker which brokers own topics; those without an owner are missing.

        Returns:
            None if that broker seems not to reach the metadata store either.
        """
        request = ister_api.OwnTopicsRequest(topics=topics)
        found = await self._ask(member, services.Peers.FindOwners, request, timeout=_OWNERS_SECONDS)
        try:
            return _owners.decode(found.json) if found.json else None
        except msgspec.DecodeError as error:
            raise CorruptDataError(f"{member.broker_url}: the answer is invalid") from error

    async def _ask(
        self,
        member: Member,
        rpc: Rpc[_Request, _Response],
        request: _Request,
        *,
        topic: str | None = None,
        timeout: float = _CALL_SECONDS,
    ) -> _Response:
        """Calls another broker in this one's own name."""
        address = member.broker_url.partition("://")[2]
        headers = () if self._secret is None else (("authorization", f"Broker {self._secret}"),)
        try:
            return await rpc.call(
                self._channel(address), request, timeout=timeout, metadata=headers
            )
        except grpc.aio.AioRpcError as error:
            raised: IsterError = error_of(error, address, topic)
            raise raised from error

    def _channel(self, address: str) -> grpc.aio.Channel:
        serial = 0 if self._tls is None else self._tls.material().serial
        found = self._channels.get(address)
        if found is None or found[0] != serial:
            # Calls in progress keep the old channel, which is closed after the last of them.
            channel = (
                grpc.aio.insecure_channel(address, options=_OPTIONS)
                if self._tls is None
                else grpc.aio.secure_channel(
                    address, self._tls.client_credentials(), options=_OPTIONS
                )
            )
            found = self._channels[address] = (serial, channel)
        return found[1]

    async def close(self) -> None:
        """Closes all channels."""
        channels, self._channels = list(self._channels.values()), {}
        for _, channel in channels:
            await channel.close()
