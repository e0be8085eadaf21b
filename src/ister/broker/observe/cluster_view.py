"""The cluster for the dashboard, the HTTP API and gRPC: brokers, load, moves, topics that wait.

Owns: the fields. Does not own: what they say (`ister.broker.topics.cluster_control`), permissions.
"""

from __future__ import annotations

from dataclasses import asdict

from ister.broker.cluster.placement import Balance, Move
from ister.broker.topics.cluster_control import ClusterControl, ClusterState, Drained
from ister.bucket.members import Member
from ister.wire.views import (
    BalanceJson,
    BrokerJson,
    ClusterJson,
    DrainJson,
    MoveJson,
    RebalanceJson,
)


def describe_broker(member: Member, *, own: Member, leader: str | None, topics: int) -> BrokerJson:
    """Describes one broker."""
    return {
        "node": member.node,
        "broker_url": member.broker_url,
        "connect_url": member.connect_url,
        "flight_url": member.flight_url,
        "http_url": member.http_url,
        "topics": topics,
        "is_this": member.node == own.node,
        "is_leader": member.node == leader,
        "state": member.state.value,
        "zone": member.zone,
        "version": member.version,
        "load": asdict(member.load),
    }


def describe_brokers(state: ClusterState, own: Member, served: int) -> list[BrokerJson]:
    """All brokers, this one first; `served` is its number of topics."""
    found = [
        describe_broker(
            one,
            own=own,
            leader=state.leader,
            topics=served if one.node == own.node else state.topics.get(one.node, 0),
        )
        for one in state.members
    ]
    return sorted(found, key=lambda one: (not one["is_this"], one["node"]))


async def describe_cluster(control: ClusterControl, own: Member, served: int) -> ClusterJson:
    """Brokers, leader, balance, moves under way, and topics that wait for a disk."""
    state = await control.state()
    return {
        "brokers": describe_brokers(state, own, served),
        "leader": state.leader,
        "balance": await describe_balance(control),
        "moves": [
            {
                "topic": one.topic,
                "from": one.source,
                "to": one.target,
                "reason": one.reason,
                "since": one.at,
            }
            for one in state.moves
        ],
        "waiting": [asdict(one) for one in state.waiting],  # type: ignore[misc]
        "waiting_total": state.waiting_total,
    }


async def describe_balance(control: ClusterControl) -> BalanceJson:
    """How evenly the load is spread."""
    balance, counts = await control.balance()
    return _balance(balance, counts, control)


def _balance(balance: Balance, counts: dict[str, int], control: ClusterControl) -> BalanceJson:
    return {
        "strategy": control.strategy.value,
        "variation": round(balance.variation, 4),
        "threshold": control.threshold,
        "mean": round(balance.mean, 2),
        "deviation": round(balance.deviation, 2),
        "brokers": [
            {"node": node, "load": round(load, 2), "topics": counts.get(node, 0)}
            for node, load in sorted(balance.loads.items())
        ],
    }


def describe_rebalance(moves: list[Move], *, dry_run: bool) -> RebalanceJson:
    """The moves that were requested, or only planned."""
    return {
        "dry_run": dry_run,
        "moves": [
            MoveJson({"topic": one.topic, "from": one.source, "to": one.target}) for one in moves
        ],
    }


def describe_drain(drained: Drained) -> DrainJson:
    """What became of the topics of a broker that was drained."""
    return {
        "node": drained.node,
        "total": drained.total,
        "moved": drained.moved,
        "failed": list(drained.failed),
        "pending": drained.pending,
    }
