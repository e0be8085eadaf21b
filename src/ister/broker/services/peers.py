"""ister.Peers: calls between brokers, which authenticate with the secret of the cluster."""

from __future__ import annotations

import asyncio

import msgspec

from ister.base.model import Codec
from ister.broker.operations import checks
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.principal import PrincipalKind
from ister.broker.topics.topics import Topics
from ister.errors import CorruptDataError, InvalidRequestError, PermissionDeniedError
from ister.format.message import decode_message
from ister.wire import ister_api


class PeersService:
    """Serves the other brokers of the cluster."""

    def __init__(self, topics: Topics, guard: Guard) -> None:
        self._topics = topics
        self.guard = guard

    @checks("a broker of the cluster")
    async def PublishDeadLetter(
        self, request: ister_api.DeadLetter, context: object
    ) -> ister_api.InfoRequest:
        """Publishes a dead letter of another broker.

        The right to publish there was checked when the dead-letter topic was set.
        """
        self._check_broker()
        try:
            message = decode_message(request.message, Codec.BINCODE2)
        except CorruptDataError as error:
            raise InvalidRequestError("the message cannot be decoded") from error
        await self._topics.take_dead_letter(request.topic, message)
        return ister_api.InfoRequest()

    @checks("a broker of the cluster")
    async def FindOwners(
        self, request: ister_api.OwnTopicsRequest, context: object
    ) -> ister_api.Document:
        """The brokers that own topics; for a broker that does not reach the metadata store."""
        self._check_broker()
        cluster = self._topics.cluster
        if cluster.is_in_doubt:
            return ister_api.Document()
        found = await asyncio.to_thread(cluster.find_owners, request.topics)
        return ister_api.Document(json=msgspec.json.encode(found).decode())

    def _check_broker(self) -> None:
        if self.guard.is_on and current_principal().kind is not PrincipalKind.BROKER:
            raise PermissionDeniedError("only brokers of this cluster may do this")
