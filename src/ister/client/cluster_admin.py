"""Calls for operators about the brokers of a cluster, and about moving topics between them.

Owns: calls of ister.Admin about brokers. Does not own: those about topics and subscriptions
(`admin`).

Any broker takes these calls, and forwards those that another broker has to serve.
"""

from __future__ import annotations

import json
from typing import Final

from ister import wire
from ister.client.core.network import Network
from ister.errors import InvalidRequestError
from ister.topic.arguments import as_timeout
from ister.wire.views import (
    BalanceJson,
    BrokerJson,
    ClusterJson,
    DrainJson,
    RebalanceJson,
    TakeOverJson,
)

# A topic is uploaded before it moves; a drained broker uploads all of its topics.
_MOVE_SECONDS: Final = 120.0
_DRAIN_SECONDS: Final = 600.0


class ClusterCalls:
    """Lists, drains and balances brokers, and moves topics. Belongs to the network's loop."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def brokers(self) -> list[BrokerJson]:
        """All brokers that are up, the one that answers first.

        Each with its addresses, state, zone, version, load, and whether it leads;
        `ister.wire.views` names the fields.

        Raises:
            IsterError: It is refused, or no broker has answered in time.
        """
        answer = await self._network.call(
            wire.services.Admin.ShowBrokers, wire.ister_api.InfoRequest()
        )
        brokers: list[BrokerJson] = json.loads(answer.json)["brokers"]
        return brokers

    async def cluster(self) -> ClusterJson:
        """Brokers, leader, balance, moves under way, and topics that wait for a disk.

        Raises:
            IsterError: It is refused, or no broker has answered in time.
        """
        answer = await self._network.call(
            wire.services.Admin.ShowCluster, wire.ister_api.InfoRequest()
        )
        found: ClusterJson = json.loads(answer.json)
        return found

    async def move_topic(self, topic: str, to: str) -> None:
        """Moves a topic to another broker; returns when it is there.

        Producers and consumers follow by themselves. Nothing is lost.

        Args:
            topic: Its name; all partitions of a partitioned one.
            to: The node of the broker; `brokers` lists them.

        Raises:
            NotFoundError: There is no such topic, or no such broker.
            ConflictError: The broker takes no topics.
            IsterError: It is refused, or no broker has answered in time.
        """
        for name in await self._partitions(topic):
            request = wire.ister_api.MoveTopicRequest(topic=name, to=to)
            await self._network.call(
                wire.services.Admin.MoveTopic, request, answer_within=_MOVE_SECONDS
            )

    async def take_over(self, topic: str, *, confirm: bool = False) -> TakeOverJson:
        """Continues a topic whose newest messages are on a lost disk, and gives those up.

        Args:
            topic: The topic, or one partition of a partitioned topic.
            confirm: Whether to do it; if False, only returns what would be given up.

        Returns:
            What is given up: messages from `offset` on that only the disk of `node` has.

        Raises:
            NotFoundError: There is no such topic.
            ConflictError: A broker has it, or its last broker is up: there is nothing to take over.
            IsterError: It is refused, or no broker has answered in time.
        """
        names = await self._partitions(topic)
        if names != [topic]:
            raise InvalidRequestError(
                f"{topic} is a partitioned topic with {len(names)} partitions",
                topic=topic,
                hint=f"name one of them, such as {names[0]}",
            )
        request = wire.ister_api.TakeOverRequest(topic=topic, confirm=confirm)
        found = await self._network.call(
            wire.services.Admin.TakeOverTopic, request, answer_within=_MOVE_SECONDS
        )
        return {
            "topic": found.topic,
            "node": found.node,
            "offset": found.offset,
            "done": found.done,
        }

    async def drain_broker(self, broker: str, *, timeout: float | None = None) -> DrainJson:
        """Makes a broker hand its topics over to others, and take no new ones.

        Args:
            broker: The node of the broker; `brokers` lists them.
            timeout: Seconds after which no further topic is handed over; None for no limit.

        Raises:
            NotFoundError: There is no such broker.
            ConflictError: There is no other broker that takes topics.
            IsterError: It is refused, or no broker has answered in time.
        """
        _check_broker(broker)
        timeout = as_timeout(timeout)
        request = wire.ister_api.DrainBrokerRequest(
            broker=broker, timeout_seconds=0 if timeout is None else max(1, int(timeout))
        )
        answer = await self._network.call(
            wire.services.Admin.DrainBroker, request, answer_within=_DRAIN_SECONDS
        )
        found: DrainJson = json.loads(answer.json)
        return found

    async def activate_broker(self, broker: str) -> None:
        """Makes a broker take topics again.

        Raises:
            NotFoundError: There is no such broker.
            IsterError: It is refused, or no broker has answered in time.
        """
        _check_broker(broker)
        request = wire.ister_api.BrokerName(broker=broker)
        await self._network.call(wire.services.Admin.ActivateBroker, request)

    async def balance(self) -> BalanceJson:
        """How evenly the load is spread over the brokers that take topics.

        Raises:
            IsterError: It is refused, or no broker has answered in time.
        """
        answer = await self._network.call(
            wire.services.Admin.ShowBalance, wire.ister_api.InfoRequest()
        )
        found: BalanceJson = json.loads(answer.json)
        return found

    async def rebalance(self, *, dry_run: bool = False) -> RebalanceJson:
        """Asks the leader to move topics to even out the load; returns the moves at once.

        Nothing moves if the load is even, and no topic that has just moved.

        Args:
            dry_run: Only plan the moves.

        Raises:
            IsterError: It is refused, or no broker has answered in time.
        """
        request = wire.ister_api.RebalanceRequest(dry_run=dry_run)
        answer = await self._network.call(wire.services.Admin.Rebalance, request)
        found: RebalanceJson = json.loads(answer.json)
        return found

    async def _partitions(self, topic: str) -> list[str]:
        raise NotImplementedError


def _check_broker(broker: str) -> None:
    # An empty name is the broker that is asked, whichever that is.
    if not broker:
        raise InvalidRequestError("broker is empty", hint="pass a node; `brokers` lists them")
