"""The leader: one broker that assigns topics to brokers.

    <root>/cluster/leader   {"node": …, "instance": …, "since": seconds}   under the broker's lease

The value stays the same while the process runs, so that a write of the key that arrives late is
recognised as its own.

Owns: the key, and the assignments that its holder writes. Every write requires that this process
holds the key, so an old leader writes nothing. Does not own: topics; the broker that an assignment
names still has to claim the topic.

A crash leaves the key, which ends with the lease; any other broker then takes it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from ister.base.clock import Clock
from ister.base.model import TopicName
from ister.broker.cluster.assignments import NEW, OWNER_DOWN, Assignment, Assignments
from ister.broker.cluster.members import Members
from ister.broker.cluster.placement import Move, Placement, plan_moves
from ister.bucket.directory import read_owners, read_records
from ister.bucket.members import Member, MemberState
from ister.bucket.names import TopicKeys
from ister.config import ClusterConfig
from ister.errors import (
    CommitUnknownError,
    CorruptDataError,
    NotFoundError,
    UnavailableError,
)
from ister.format.records import decode_owner
from ister.metadata.base import Absent, Compare, Delete, Put, ValueIs
from ister.topic.stores import Stores

_log = logging.getLogger("ister.broker.cluster")

# A topic that was assigned and never created: its client has given up.
_UNUSED_SECONDS: Final = 60
_MOVES_KEPT: Final = 100


class Leadership:
    """The leader's key. Thread-safe; its calls block."""

    def __init__(self, stores: Stores, *, clock: Clock) -> None:
        self._store = stores.metadata
        self._membership = stores.membership
        self._clock = clock
        self._key = f"{stores.storage.metadata.root_prefix}/cluster/leader"
        self._value = msgspec.json.encode(
            {
                "node": stores.membership.node,
                "instance": stores.membership.instance,
                "since": clock.now_ns() // 1_000_000_000,
            }
        )
        self._absent_since: float | None = None
        self._looked_at = clock.monotonic()
        self.is_leader = False
        """Whether this process had the key when it last looked."""
        self.node: str | None = None
        """The leader's node when this process last looked; None if there was none."""

    @property
    def holds(self) -> Compare:
        """A compare that holds while this process leads; part of every write of the leader's."""
        return ValueIs(self._key, self._value)

    def step(self, *, may_lead: bool) -> bool:
        """Takes the key if nobody has it; returns whether this process leads."""
        found = self._store.get(self._key)
        if found is None and may_lead:
            lease = self._membership.lease
            with suppress(CommitUnknownError, NotFoundError):  # read back
                self._store.transact(
                    [Absent(self._key), self._membership.is_here],
                    [Put(self._key, self._value, lease)],
                )
            found = self._store.get(self._key)
        self._looked_at = self._clock.monotonic()
        if found is not None:
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = self._looked_at
        was_leader = self.is_leader
        self.is_leader = found is not None and found.value == self._value
        self.node = None if found is None else _node_of(found.value)
        if self.is_leader and not was_leader:
            _log.info("this broker is the leader", extra={"node": self._membership.node})
        return self.is_leader

    def read(self) -> str | None:
        """Reads the leader's node; None if there is none."""
        found = self._store.get(self._key)
        return None if found is None else _node_of(found.value)

    def absent_seconds(self) -> float:
        """How long there had been no leader when this process last looked."""
        # Up to the last look: a leader may have come while the store did not answer.
        since = self._absent_since
        return 0.0 if since is None else self._looked_at - since

    def resign(self) -> None:
        """Lets another broker lead."""
        if self.is_leader:
            self._store.transact([self.holds], [Delete(self._key)])
            self.is_leader = False


class Leader:
    """Assigns topics to brokers, and plans moves. Thread-safe; its calls block."""

    def __init__(
        self,
        stores: Stores,
        members: Members,
        leadership: Leadership,
        assignments: Assignments,
        *,
        config: ClusterConfig,
        clock: Clock,
    ) -> None:
        self._store = stores.metadata
        self._root = stores.storage.metadata.root_prefix
        self._members = members
        self._leadership = leadership
        self._assignments = assignments
        self._config = config
        self._clock = clock
        # The node of each topic, as last read and as assigned since: what placement counts. Calls
        # that assign topics at the same time must count each other's.
        self._nodes: dict[str, str] = {}
        self._lock = threading.Lock()
        self._balanced_at = clock.monotonic()
        self.moves: deque[tuple[int, Move]] = deque(maxlen=_MOVES_KEPT)
        """The last moves that this leader requested, each with its time in Unix seconds."""

    # -- unassigned topics ------------------------------------------------------------------

    def assign(self, topic: str) -> str:
        """Assigns a topic that has no broker; returns the node."""
        known = self._assignments.get(topic)
        members = self._members.recent()
        live = {one.node: one for one in members}
        if known is not None and takes(live.get(known[0].node)):
            self._assignments.withdraw(topic)
            return known[0].node
        with self._lock:
            self._nodes.pop(topic, None)
            node = self._placement(members, self._nodes).choose(topic)
            if node is None:
                raise UnavailableError("no broker takes topics at the moment", topic=topic)
            self._nodes[topic] = node
        # Counted even if it is not written: the next sweep corrects that.
        if not self._assignments.assign_all(
            {topic: self._assignment(node, NEW)},
            known={} if known is None else {topic: known[1]},
            condition=self._leadership.holds,
        ):
            raise UnavailableError("the topic is being assigned; retry", topic=topic)
        return node

    def answer_requests(self) -> list[str]:
        """Assigns the topics that brokers have requested; returns their names."""
        requests = self._assignments.requests()
        if not requests:
            return []
        owners = self._owners() if len(requests) > 1 else self._owner(requests[0])
        for topic in requests:
            if topic in owners:
                self._assignments.withdraw(topic)
            else:
                self.assign(topic)
        return requests

    def sweep(self) -> list[str]:
        """Assigns every topic without an owner and without a live broker; returns their names.

        Where an assignment of an owned topic cannot be followed, assigns the topic to its owner.
        Reads all records, owners and assignments: linear in the number of topics. Called when a
        broker has come or gone, and now and then.
        """
        members = self._members.read()
        records = read_records(self._store, self._root)
        owners, assigned = self._owners(), self._assignments.all()
        nodes = {topic: known.node for topic, (known, _) in assigned.items()} | owners
        live = {one.node: one for one in members}
        placement = self._placement(members, nodes)
        wanted = self._kept(assigned, owners, live)
        for topic, record in records.items():
            if topic in owners:
                continue
            known, last = assigned.get(topic), live.get(record.node)
            if known is not None and takes(live.get(known[0].node)):
                is_due = self._is_misplaced(topic, known[0], last)
            else:
                # A last owner that starts will open the topic; one that drains hands it over.
                is_due = last is None or last.is_active or self._is_handed_over(topic, last)
            if not is_due:
                continue
            if last is not None and last.is_active:
                wanted[topic] = self._assignment(last.node, "last owner")
            elif (node := placement.choose(topic)) is not None:
                wanted[topic] = self._assignment(node, OWNER_DOWN)
        done = self._assignments.assign_all(
            wanted,
            known={topic: assigned[topic][1] for topic in wanted if topic in assigned},
            condition=self._leadership.holds,
        )
        with self._lock:
            self._nodes = nodes | {topic: wanted[topic].node for topic in done}
        self._forget_unused(assigned, records, owners)
        if done:
            _log.info("topics assigned", extra={"topics": len(done)})
        return done

    def _kept(
        self,
        assigned: Mapping[str, tuple[Assignment, int]],
        owners: Mapping[str, str],
        live: Mapping[str, Member],
    ) -> dict[str, Assignment]:
        """Assignments to the owners of topics whose present assignment cannot be followed.

        The assigned broker is gone, or is a stand-in for the owner, which has come back.
        """
        return {
            topic: self._assignment(owners[topic], "owner")
            for topic, (known, _) in assigned.items()
            if topic in owners
            and known.node != owners[topic]
            and takes(live.get(owners[topic]))
            and (known.is_stand_in or not takes(live.get(known.node)))
        }

    def _is_misplaced(self, topic: str, known: Assignment, last: Member | None) -> bool:
        """Whether a topic needs its last owner, which is back, and is assigned to another."""
        if last is None or not last.is_active or last.node == known.node:
            return False
        return known.is_stand_in or not self._is_sealed(topic)

    def _is_handed_over(self, topic: str, last: Member) -> bool:
        """Whether the last owner, which drains, has handed over a topic without an owner."""
        # A broker that starts has handed over nothing; that saves a read for each of its topics.
        return last.state is MemberState.DRAINING and self._is_sealed(topic)

    def _is_sealed(self, topic: str) -> bool:
        keys = TopicKeys(self._root, TopicName.parse(topic))
        return self._store.get(keys.sealed) is not None

    def _forget_unused(
        self,
        assigned: Mapping[str, tuple[Assignment, int]],
        records: Collection[str],
        owners: Collection[str],
    ) -> None:
        oldest = self._clock.now_ns() // 1_000_000_000 - _UNUSED_SECONDS
        unused = {
            topic: revision
            for topic, (known, revision) in assigned.items()
            if topic not in records and topic not in owners and known.at < oldest
        }
        if unused:
            self._assignments.remove(unused, condition=self._leadership.holds)

    # -- balance ----------------------------------------------------------------------------

    def rebalance(self) -> list[Move]:
        """Moves topics if `rebalance.enabled` is set and it is time; returns the moves."""
        settings, now = self._config.rebalance, self._clock.monotonic()
        if not settings.enabled or now - self._balanced_at < settings.interval_seconds:
            return []
        self._balanced_at = now
        return self.move(self.plan(settings.max_moves, has_cooldown=True))

    def plan(self, moves_max: int, *, has_cooldown: bool = False) -> list[Move]:
        """The moves that would even out the load.

        Args:
            moves_max: The most moves, with those that are under way.
            has_cooldown: Whether topics that moved lately stay, so that the leader does not move
                them back and forth by itself.
        """
        settings, now = self._config.rebalance, self._clock.now_ns() // 1_000_000_000
        owners, assigned, members = self._owners(), self._assignments.all(), self._members.read()
        live = {one.node: one for one in members}
        # From the assignments, so that the next leader knows it, too.
        recent = {
            topic
            for topic, (known, _) in assigned.items()
            if known.reason != NEW and abs(now - known.at) < settings.cooldown_seconds
        }
        moving = {
            topic
            for topic, (known, _) in assigned.items()
            if topic in owners and known.node != owners[topic] and takes(live.get(known.node))
        }
        owned: dict[str, list[str]] = {}
        for topic, node in sorted(owners.items()):
            owned.setdefault(node, []).append(topic)
        return plan_moves(
            members,
            owned,
            self._config.strategy,
            threshold=settings.threshold_percent / 100,
            moves_max=max(0, moves_max - len(moving)),
            keep=recent | moving if has_cooldown else moving,
        )

    def move(self, moves: list[Move]) -> list[Move]:
        """Requests moves, so that the owners hand the topics over; returns those requested."""
        if not moves:
            return []
        assigned = self._assignments.all()
        # Another move of a topic may have been requested since the plan was made.
        moves = [
            move
            for move in moves
            if move.topic not in assigned or assigned[move.topic][0].node == move.source
        ]
        done = self._assignments.assign_all(
            {move.topic: self._assignment(move.target, "rebalance") for move in moves},
            known={move.topic: assigned[move.topic][1] for move in moves if move.topic in assigned},
            condition=self._leadership.holds,
        )
        asked = [move for move in moves if move.topic in done]
        at = self._clock.now_ns() // 1_000_000_000
        self.moves.extend((at, move) for move in asked)
        return asked

    # -- reading ----------------------------------------------------------------------------

    def _placement(self, members: list[Member], nodes: Mapping[str, str]) -> Placement:
        return Placement(members, Counter(nodes.values()), self._config.strategy)

    def _assignment(self, node: str, reason: str) -> Assignment:
        return Assignment(node=node, reason=reason, at=self._clock.now_ns() // 1_000_000_000)

    def _owners(self) -> dict[str, str]:
        return read_owners(self._store, self._root)

    def _owner(self, topic: str) -> dict[str, str]:
        """The node that has one topic open, by topic; empty if none has."""
        found = self._store.get(f"{self._root}/cluster/owners{topic}")
        if found is not None:
            with suppress(CorruptDataError):
                return {topic: decode_owner(found.value, key=found.key).node}
        return {}


def takes(member: Member | None) -> bool:
    """Whether a member can have assigned topics: it is active, or starting."""
    return member is not None and member.state is not MemberState.DRAINING


def _node_of(value: bytes) -> str | None:
    try:
        return str(msgspec.json.decode(value, type=dict[str, object])["node"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
        return None
