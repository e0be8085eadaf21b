"""Operations on the cluster: drain and activate brokers, rebalance, move and take over topics.

Owns: the steps of these, and which broker has to do them: a broker hands over its own topics, the
leader plans moves. Does not own: permissions (callers ask the guard first), the call to another
broker (`ister.broker.services.forwarding`), topics (`topics`).

A crash leaves a partly drained broker, which is active again after its restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ister.base.clock import Clock
from ister.base.model import TopicName
from ister.broker.cluster.placement import Balance, Move, measure
from ister.broker.topics.topics import ElsewhereError, GivenUp, Topics
from ister.bucket.directory import TopicDirectory
from ister.bucket.members import Member, MemberState
from ister.config import Strategy
from ister.errors import ConflictError, IsterError, NotFoundError, UnavailableError

_AT_ONCE: Final = 8
# How long another broker may take for a forwarded call: it may have to hand over all its topics.
_OTHER_SECONDS: Final = 600.0
_WAITING_MAX: Final = 200
_VIEW_SECONDS: Final = 2.0


class OtherBrokerError(ElsewhereError):
    """Another broker has to do this: the call is forwarded to it."""

    def __init__(self, member: Member) -> None:
        super().__init__(member, "")
        self.timeout_seconds = _OTHER_SECONDS
        self.message = f"send this call to the broker {member.broker_url}, which has to do it"
        self.topic = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """The result of draining a broker."""

    node: str
    total: int
    moved: int
    failed: tuple[str, ...]

    @property
    def pending(self) -> int:
        """Topics that were not tried: it was a dry run, or time was up."""
        return self.total - self.moved - len(self.failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """The state of the cluster, from the metadata store."""

    members: tuple[Member, ...]
    leader: str | None
    """The leader's node."""
    topics: dict[str, int]
    """How many topics each node has open."""
    moves: tuple[Pending, ...]
    waiting: tuple[Waiting, ...]
    """Topics whose newest messages are on the disk of a broker that is down."""
    waiting_total: int

    @classmethod
    def alone(cls, own: Member, topics: int = 0) -> ClusterState:
        """A cluster of one broker."""
        return cls(
            members=(own,),
            leader=own.node,
            topics={own.node: topics},
            moves=(),
            waiting=(),
            waiting_total=0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A move under way."""

    topic: str
    source: str
    target: str
    reason: str
    at: int
    """When that was decided, in Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A topic that waits for a disk."""

    topic: str
    node: str
    """The node whose disk the topic waits for."""
    offset: int
    """The first offset that a take-over gives up."""
    since: int | None
    """When another broker was chosen for it, in Unix seconds; None if that is not known."""


class ClusterControl:
    """Drains, balances and moves for operators. Used on the broker's loop."""

    def __init__(self, topics: Topics, *, clock: Clock) -> None:
        self._topics = topics
        self._cluster = topics.cluster
        self._clock = clock
        self._state: tuple[float, ClusterState] | None = None

    # -- brokers ----------------------------------------------------------------------------

    async def find(self, broker: str) -> Member:
        """A broker, by its node or by its number in Danube's calls; "" for this one."""
        if broker in ("", self._cluster.own.node):
            return self._cluster.own
        members = await asyncio.to_thread(self._cluster.brokers)
        found = next((one for one in members if one.node == broker), None)
        if found is None:
            found = next((one for one in members if str(broker_number(one.node)) == broker), None)
        if found is None:
            raise NotFoundError(f"broker {broker[:64]} does not exist", hint="ister brokers list")
        return found

    async def _find_own(self, broker: str) -> Member:
        found = await self.find(broker)
        if found.node != self._cluster.own.node:
            raise OtherBrokerError(found)
        return found

    async def drain(
        self,
        broker: str,
        *,
        is_wanted: Callable[[TopicName], bool] | None = None,
        at_once: int = 0,
        timeout: float | None = None,
        dry_run: bool = False,
    ) -> Drained:
        """Makes a broker hand over its topics; without `is_wanted`, it also takes no new ones.

        Args:
            broker: This broker, by its node.
            is_wanted: Selects topics; all by default.
            at_once: How many at a time; 0 for the default.
            timeout: Seconds after which no further topic is handed over; None for no limit.
            dry_run: Only count.

        Raises:
            ConflictError: There is no other broker that takes topics.
            OtherBrokerError: It is another broker.
        """
        own = await self._find_own(broker)
        others = await asyncio.to_thread(self._cluster.others)
        if not others:
            raise ConflictError("there is no other broker that takes topics")
        names = [
            topic.name
            for topic in self._topics.served
            if is_wanted is None or is_wanted(topic.parsed)
        ]
        if dry_run:
            return Drained(node=own.node, total=len(names), moved=0, failed=())
        members = self._cluster.members
        if is_wanted is None:
            await asyncio.to_thread(members.publish, state=MemberState.DRAINING)
        self._state = None
        moved, failed = await self._topics.hand_over_topics(
            names, at_once=at_once or _AT_ONCE, timeout=timeout
        )
        return Drained(node=own.node, total=len(names), moved=len(moved), failed=tuple(failed))

    async def activate(self, broker: str) -> Member:
        """Makes a broker take topics again."""
        await self._find_own(broker)
        await asyncio.to_thread(self._cluster.members.publish, state=MemberState.ACTIVE)
        self._state = None
        return self._cluster.own

    async def leader(self) -> str:
        """The leader's node."""
        leadership = self._cluster.leadership
        if leadership is None:
            return self._cluster.own.node
        found = await asyncio.to_thread(leadership.read)
        if found is None:
            raise UnavailableError("there is no leader at the moment")
        return found

    # -- balance ----------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """How load is measured."""
        return self._cluster.config.strategy

    @property
    def threshold(self) -> float:
        """The coefficient of variation above which topics should move."""
        return self._cluster.config.rebalance.threshold_percent / 100

    async def balance(self) -> tuple[Balance, dict[str, int]]:
        """How evenly the load is spread over active brokers, and their numbers of topics."""
        return await asyncio.to_thread(self._balance)

    def _balance(self) -> tuple[Balance, dict[str, int]]:
        cluster = self._cluster
        counts = dict(cluster.count_topics())
        if cluster.leader is None:
            counts = {cluster.own.node: len(self._topics.served)}
        return measure(cluster.brokers(), counts, self.strategy), counts

    async def rebalance(self, *, dry_run: bool, moves_max: int = 0) -> list[Move]:
        """Plans moves that even out the load, and requests them unless it is a dry run.

        Raises:
            OtherBrokerError: Another broker leads.
            UnavailableError: There is no leader, or the metadata store does not answer.
        """
        leader, leadership = self._cluster.leader, self._cluster.leadership
        if leader is None or leadership is None:
            return []
        if not leadership.is_leader:
            node = await self.leader()
            if node != self._cluster.own.node:
                raise OtherBrokerError(await self.find(node))
        count = moves_max or self._cluster.config.rebalance.max_moves
        moves = await asyncio.to_thread(leader.plan, count)
        return moves if dry_run else await asyncio.to_thread(leader.move, moves)

    # -- topics -----------------------------------------------------------------------------

    async def move(self, topic: str, to: str) -> Member:
        """Moves a topic to a broker, whichever broker has it; returns when it is there."""
        if not to:
            raise NotFoundError("no target broker was given", hint="ister brokers list")
        target = await self.find(to)
        await self._topics.move(topic, target.node)
        return target

    async def take_over(self, topic: str, *, confirm: bool) -> GivenUp:
        """Takes over a topic; without `confirm`, only returns what that would give up."""
        if not confirm:
            return await self._topics.find_lost_tail(topic)
        return await self._topics.take_over(topic)

    # -- state ------------------------------------------------------------------------------

    async def state(self, *, is_new: bool = False) -> ClusterState:
        """The state of the cluster, cached for up to 2 s unless `is_new`."""
        now = self._clock.monotonic()
        if is_new or self._state is None or now - self._state[0] > _VIEW_SECONDS:
            self._state = (now, await asyncio.to_thread(self._read_state))
        return self._state[1]

    def _read_state(self) -> ClusterState:
        cluster, own = self._cluster, self._cluster.own
        members = cluster.brokers()
        if cluster.assignments is None or cluster.leadership is None:
            return ClusterState.alone(own, len(self._topics.served))
        owners, assigned = cluster.owners(), cluster.assignments.all()
        live = {one.node for one in members}
        moves = [
            Pending(
                topic=topic,
                source=owners[topic],
                target=known.node,
                reason=known.reason,
                at=known.at,
            )
            for topic, (known, _) in sorted(assigned.items())
            if topic in owners and known.node != owners[topic] and known.node in live
        ]
        since = {topic: known.at for topic, (known, _) in assigned.items()}
        names, waiting = self._find_waiting(live, since)
        topics: dict[str, int] = dict.fromkeys(live, 0)
        for node in owners.values():
            topics[node] = topics.get(node, 0) + 1
        return ClusterState(
            members=tuple(members),
            leader=cluster.leadership.read(),
            topics=topics,
            moves=tuple(moves),
            waiting=tuple(waiting),
            # Beyond the maximum, topics that could be claimed count, too: to tell takes two reads.
            waiting_total=len(names) if len(names) > _WAITING_MAX else len(waiting),
        )

    def _find_waiting(
        self, live: set[str], since: dict[str, int]
    ) -> tuple[Sequence[str], list[Waiting]]:
        """Topics without an owner whose last node is not running, and which of them wait for it.

        The others can be claimed: the bucket has everything. Examines at most `_WAITING_MAX`.
        """
        stores = self._topics.log.stores
        if stores is None:
            return [], []
        directory = TopicDirectory(stores.metadata, stores.storage.metadata.root_prefix)
        records = {
            name: entry.record
            for name, entry in sorted(directory.read().items())
            if entry.owner is None and entry.record is not None
        }
        names = [name for name, one in records.items() if one.node and one.node not in live]
        examined = names[:_WAITING_MAX]
        pointers, seals = directory.pointers(examined), directory.seals(examined)
        waiting: list[Waiting] = []
        for name in examined:
            pointer = pointers.get(name)
            end = pointer.value.end if pointer is not None else 0
            if end is None:
                try:
                    last = stores.catalog(TopicName.parse(name)).last()
                except IsterError:
                    continue
                end = last.end if last is not None else 0
            if name not in seals and not records[name].is_whole(end):
                waiting.append(
                    Waiting(topic=name, node=records[name].node, offset=end, since=since.get(name))
                )
        return names, waiting


def broker_number(node: str) -> int:
    """The number of a broker in Danube's calls: its node, read as a hexadecimal number.

    1 for a broker without a bucket: it is alone, and its node has no digits. 0 is no broker.
    """
    try:
        return int(node, 16) or 1
    except ValueError:
        return 1


def broker_id(node: str) -> str:
    """The id of a broker in Danube's calls: its number, as a text."""
    return str(broker_number(node))
