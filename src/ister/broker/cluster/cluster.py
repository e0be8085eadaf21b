"""Which broker has a topic, or should have it; and this broker's part in deciding that.

    owner ─► last owner, whose disk has the newest messages ─► assignment ─► ask the leader

Owns: routing, which takes the first of these that there is; and the owner keys of topics without a
log. Does not own: the claim of a topic with a log (`ister.bucket.claim`), which alone gives
ownership; members, leader and assignments.

A broker that is alone has every topic that no other process has open; it reads only owners and the
list of brokers.

A crash leaves owner keys that end with the lease.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ister.base.clock import Clock
from ister.base.model import TopicName
from ister.broker.cluster.assignments import Assignment, Assignments
from ister.broker.cluster.leader import Leader, Leadership, takes
from ister.broker.cluster.members import Members
from ister.broker.cluster.placement import Placement, rendezvous
from ister.bucket.directory import read_owners, read_records
from ister.bucket.members import Member, MemberState
from ister.config import ClusterConfig
from ister.errors import (
    CommitUnknownError,
    IsterError,
    NotFoundError,
    TopicNameError,
    UnavailableError,
)
from ister.format.records import OwnerRecord, encode_owner
from ister.metadata.base import Absent, Delete, Lease, Put, ValueIs, Watch
from ister.topic.stores import Stores

_log = logging.getLogger("ister.broker.cluster")

# How long a call waits for the leader to assign a topic before its client has to ask again.
_ASSIGN_SECONDS: Final = 1.5
_ASSIGN_POLL_SECONDS: Final = 0.02
# After so many lease times without a leader, rendezvous hashing chooses brokers.
_LEADERLESS_TTLS: Final = 2
# More topics than this are found faster by reading everything.
_ONE_BY_ONE_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentChanges:
    """What this broker has to do to follow the assignments."""

    opens: tuple[str, ...]
    """Topics that it should open: nobody has them."""
    leaves: dict[str, str]
    """Topics that it has and another broker should have, with that broker's node."""


class Cluster:
    """This broker among the others. Thread-safe; its calls block."""

    def __init__(
        self, own: Member, stores: Stores | None, *, config: ClusterConfig, clock: Clock
    ) -> None:
        self._stores = stores
        self._clock = clock
        self.config = config
        self.members = Members(own, stores, clock=clock)
        self.assignments: Assignments | None = None
        self.leadership: Leadership | None = None
        self.leader: Leader | None = None
        if stores is not None:
            root = stores.storage.metadata.root_prefix
            self.assignments = Assignments(stores.metadata, root_prefix=root)
            self.leadership = Leadership(stores, clock=clock)
            self.leader = Leader(
                stores,
                self.members,
                self.leadership,
                self.assignments,
                config=config,
                clock=clock,
            )
        self._lock = threading.Lock()
        # Topics without a log that this broker has, each with the lease of its owner key.
        self._unlogged: dict[str, Lease] = {}

    @property
    def own(self) -> Member:
        """This broker."""
        return self.members.own

    def drain(self) -> None:
        """Makes this broker take no new topics, and lets another broker lead."""
        self.members.publish(state=MemberState.DRAINING)
        self._resign()

    def leave(self) -> None:
        """Removes this broker from the cluster: its entry, and the leader's key if it leads."""
        if self.is_leased:  # else they have ended with the lease
            self._resign()
            self.members.leave()

    def _resign(self) -> None:
        with suppress(IsterError):
            if self.leadership is not None:
                self.leadership.resign()

    def brokers(self) -> list[Member]:
        """All brokers that are up, this one among them unless it was replaced."""
        return self.members.read()

    def others(self) -> list[Member]:
        """All other brokers that take topics."""
        return [
            one for one in self.members.read() if one.node != self.own.node and one.takes_topics
        ]

    def watch(self, on_change: Callable[[str], None]) -> Watch | None:
        """Calls `on_change`, in any thread, when members, leader or assignments change: a hint.

        Its argument is the part of the key below `/cluster/`.
        """
        if self._stores is None:
            return None
        prefix = f"{self._stores.storage.metadata.root_prefix}/cluster/"

        def on_key(key: str) -> None:
            part = key.removeprefix(prefix)
            # Owner keys change with every topic that is opened, and are read when needed.
            if not part.startswith(("owners/", "nodes/", "readers/")):
                on_change(part)

        return self._stores.metadata.watch(prefix, on_key)

    @property
    def is_leased(self) -> bool:
        """Whether this broker may own topics: its lease is valid, or it needs none."""
        return self._stores is None or self._stores.membership.is_valid

    @property
    def is_in_doubt(self) -> bool:
        """Whether the lease was not renewed when it was due, and other brokers may take over."""
        stores = self._stores
        if stores is None or self.members.is_replaced or not self.members.known_others:
            return False
        left = stores.membership.valid_until - self._clock.boottime()
        return left < stores.storage.metadata.lease_ttl_seconds / 2

    # -- where a topic is -------------------------------------------------------------------

    def owner(self, topic: TopicName) -> Member | None:
        """The other broker that has a topic open now; None if no other has.

        Raises:
            UnavailableError: The topic is open in a process that is no broker.
        """
        found = self._owner(topic)
        return None if found is None or found is self.own else found

    def owner_node(self, topic: TopicName) -> str | None:
        """The node that has a topic open now, a broker or not; None if none has."""
        found = self._stores.catalog(topic).owner() if self._stores is not None else None
        return None if found is None else found[0].node

    def _owner(self, topic: TopicName) -> Member | None:
        """The broker that has a topic open now; None if no broker has."""
        stores, own = self._stores, self.own
        if stores is None:
            return None
        found = stores.catalog(topic).owner()
        # A copy of the data directory that replaced this broker is the same node elsewhere.
        if self.members.is_replaced:
            return self._member(found[0].node if found is not None else own.node, topic)
        if found is None:
            return None
        return own if found[0].node == own.node else self._member(found[0].node, topic)

    def _member(self, node: str, topic: TopicName) -> Member:
        for members in (self.members.recent, self.members.read):
            found = next((one for one in members() if one.node == node), None)
            if found is not None:
                return found
        raise UnavailableError(
            "another process has the topic, and it is not a broker", topic=str(topic)
        )

    def route(
        self, topic: TopicName, *, is_unlogged: Callable[[], bool], creates: bool = False
    ) -> Member:
        """The broker that has a topic, or that should have it.

        Args:
            topic: Its name.
            is_unlogged: Returns whether the topic exists without a log; called if it has no record.
            creates: Whether the caller wants to create it.

        Raises:
            NotFoundError: It does not exist, and no broker was chosen for it.
            UnavailableError: It is on its way to a broker; ask again.
        """
        stores, own = self._stores, self.own
        if stores is None or self.assignments is None:
            return own
        owner = self._owner(topic)
        if owner is not None:
            return owner
        members = {one.node: one for one in self.members.recent()}
        if not any(node != own.node for node in members):
            return own
        catalog = stores.catalog(topic)
        found = catalog.record()
        exists = found is not None and found[0].is_open
        if found is not None and exists:
            last = members.get(found[0].node)
            if last is not None and catalog.sealed() is None:
                # Its disk has the newest messages.
                return self._listening(last, topic)
        assigned = self.assignments.get(str(topic))
        if assigned is not None and takes(members.get(assigned[0].node)):
            return self._listening(members[assigned[0].node], topic)
        if not (creates or exists or is_unlogged()):
            raise NotFoundError(f"topic {topic} does not exist", topic=str(topic))
        return self._listening(self._member(self._assign(str(topic)), topic), topic)

    def _listening(self, member: Member, topic: TopicName) -> Member:
        if member.state is MemberState.STARTING and member.node != self.own.node:
            raise UnavailableError(
                f"the broker {member.broker_url}, which has the topic, is starting",
                topic=str(topic),
            )
        return member

    def _assign(self, topic: str) -> str:
        """The node that a topic without an owner is assigned to."""
        stores, leadership, leader = self._stores, self.leadership, self.leader
        assert stores is not None and leadership is not None and leader is not None  # noqa: S101, PT018 - for mypy
        assert self.assignments is not None  # noqa: S101 - for mypy
        if leadership.is_leader:
            return leader.assign(topic)
        ttl = stores.storage.metadata.lease_ttl_seconds
        if leadership.absent_seconds() >= _LEADERLESS_TTLS * ttl:
            active = [one.node for one in self.members.recent() if one.takes_topics]
            return rendezvous(topic, active or [self.own.node])
        with suppress(CommitUnknownError, NotFoundError):
            self.assignments.request(topic, node=self.own.node, lease=stores.membership.lease)
        give_up_at = self._clock.monotonic() + _ASSIGN_SECONDS
        while self._clock.monotonic() < give_up_at:
            found = self.assignments.get(topic)
            # An assignment to a broker that is gone may still be there.
            live = {one.node: one for one in self.members.recent()}
            if found is not None and takes(live.get(found[0].node)):
                return found[0].node
            self._clock.sleep(_ASSIGN_POLL_SECONDS)
        raise UnavailableError(
            "the topic is being assigned to a broker; look it up again", topic=topic
        )

    def assign(self, topic: str, node: str, reason: str) -> None:
        """Assigns a topic to a broker: for an operator, or because its broker hands it over."""
        if self.assignments is not None:
            at = self._clock.now_ns() // 1_000_000_000
            self.assignments.assign(topic, Assignment(node=node, reason=reason, at=at))

    def keep(self, topic: str, node: str, reason: str) -> None:
        """Assigns a topic to the broker that has it, if it is assigned to another one."""
        if self.assigned_node(topic) not in (None, node):
            self.assign(topic, node, reason)

    def assigned_node(self, topic: str) -> str | None:
        """The node that a topic is assigned to; None if it has no assignment."""
        found = self.assignments.get(topic) if self.assignments is not None else None
        return None if found is None else found[0].node

    def assignment_changes(self, topics: Collection[str] | None = None) -> AssignmentChanges:
        """What this broker has to do to follow the assignments.

        Args:
            topics: The topics to look at; None for all, which reads all owners and assignments.
        """
        if self._stores is None or self.assignments is None:
            return AssignmentChanges(opens=(), leaves={})
        own = self.own
        active = {one.node for one in self.members.recent() if one.is_active}
        opens: list[str] = []
        leaves: dict[str, str] = {}
        for topic, assignment, owner in self._assigned(topics):
            if owner is None:
                if assignment.node == own.node and takes(own):
                    opens.append(topic)
            elif (
                owner == own.node != assignment.node
                and assignment.node in active
                # A stand-in for this broker is not needed: this broker has the topic.
                and not assignment.is_stand_in
            ):
                leaves[topic] = assignment.node
        return AssignmentChanges(opens=tuple(opens), leaves=leaves)

    def _assigned(
        self, topics: Collection[str] | None
    ) -> Iterator[tuple[str, Assignment, str | None]]:
        """Assigned topics, each with its assignment and its owner's node."""
        assert self.assignments is not None  # noqa: S101 - for mypy
        if topics is None or len(topics) > _ONE_BY_ONE_MAX:
            owners = self.owners()
            for topic, (assignment, _) in self.assignments.all().items():
                yield topic, assignment, owners.get(topic)
            return
        for topic in topics:
            found = self.assignments.get(topic)
            if found is not None:
                with suppress(TopicNameError):
                    yield topic, found[0], self.owner_node(TopicName.parse(topic))

    # -- topics -----------------------------------------------------------------------------

    def placement(self) -> Placement:
        """Chooses among the other brokers that take topics; each choice counts for the next."""
        others = self.others()
        return Placement(
            others, {one.node: one.load.topics for one in others}, self.config.strategy
        )

    def owners(self) -> dict[str, str]:
        """The node that has each topic open."""
        if self._stores is None:
            return {}
        return read_owners(self._stores.metadata, self._stores.storage.metadata.root_prefix)

    def find_owners(self, topics: Collection[str]) -> dict[str, Member]:
        """The broker that owns each of these topics; those without one are missing."""
        members = {one.node: one for one in self.members.read()}
        owners: Mapping[str, str | None] = (
            self.owners()
            if len(topics) > _ONE_BY_ONE_MAX
            else {topic: self.owner_node(TopicName.parse(topic)) for topic in topics}
        )
        found = ((topic, members.get(owners.get(topic) or "")) for topic in topics)
        return {topic: member for topic, member in found if member is not None}

    def own_topics(self) -> list[str] | None:
        """The topics that this broker should open when it starts; None for all: it is alone.

        Those whose newest messages are on its disk, and those that are assigned to it.
        """
        stores, own = self._stores, self.own
        if stores is None or all(one.node == own.node for one in self.members.read()):
            return None
        owners = self.owners()
        last = read_records(stores.metadata, stores.storage.metadata.root_prefix)
        found = {
            topic
            for topic, record in last.items()
            if record.node == own.node and owners.get(topic, own.node) == own.node
        }
        return sorted(found.union(self.assignment_changes().opens))

    def forget(self, topic: str) -> None:
        """Removes the assignment of a topic that was deleted."""
        if self.assignments is not None:
            self.assignments.delete(topic)

    def count_topics(self) -> dict[str, int]:
        """How many topics each node has open."""
        return Counter(self.owners().values())

    def claim_unlogged(self, topic: TopicName) -> None:
        """Makes this broker the owner of a topic that has no log; UnavailableError if one is."""
        stores = self._stores
        if stores is None:
            return
        lease = stores.membership.lease
        if not self._put_owner(stores, topic, lease):
            raise UnavailableError(
                "another broker has the topic: look it up again", topic=str(topic)
            )
        with self._lock:
            self._unlogged[str(topic)] = lease

    def _put_owner(self, stores: Stores, topic: TopicName, lease: Lease) -> bool:
        key = stores.keys(topic).owner
        value = encode_owner(OwnerRecord(node=self.own.node, epoch=0))
        is_here, put = stores.membership.is_here, Put(key, value, lease)
        unknown: CommitUnknownError | None = None
        for compare in (Absent(key), ValueIs(key, value)):
            try:
                if stores.metadata.transact([compare, is_here], [put]) is not None:
                    return True
            except CommitUnknownError as error:
                unknown = error
            except NotFoundError as error:
                raise UnavailableError("the lease has expired; retry", topic=str(topic)) from error
        if unknown is not None:
            raise unknown
        return False

    def release_unlogged(self, topic: TopicName) -> None:
        """Gives up a topic that has no log."""
        stores = self._stores
        with self._lock:
            if self._unlogged.pop(str(topic), None) is None or stores is None:
                return
        key = stores.keys(topic).owner
        value = encode_owner(OwnerRecord(node=self.own.node, epoch=0))
        with suppress(IsterError):
            # Not the key of a process that has replaced this one: it has the same node.
            stores.metadata.transact(
                [ValueIs(key, value), stores.membership.is_here], [Delete(key)]
            )

    def renew_unlogged(self) -> list[str]:
        """Restores owner keys that have expired; returns the topics that another broker has."""
        stores = self._stores
        if stores is None:
            return []
        lease = stores.membership.lease
        is_replaced = self.members.is_replaced
        with self._lock:
            left = [
                topic for topic, held in self._unlogged.items() if held is not lease or is_replaced
            ]
        lost: list[str] = []
        for topic in left:
            is_kept = self._put_owner(stores, TopicName.parse(topic), lease)
            with self._lock:
                if topic not in self._unlogged:
                    continue  # released meanwhile
                if is_kept:
                    self._unlogged[topic] = lease
                else:
                    del self._unlogged[topic]
                    lost.append(topic)
        return lost

    # -- leading ----------------------------------------------------------------------------

    def lead(self, *, has_changed: bool) -> bool:
        """One round of leading, if this broker leads or can; returns whether it leads.

        Args:
            has_changed: Whether a broker has come or gone since the last round, or it is time to
                look at all topics.
        """
        leadership, leader = self.leadership, self.leader
        if leadership is None or leader is None:
            return False
        was_leader = leadership.is_leader
        if not leadership.step(may_lead=self.own.is_active):
            return False
        if not self.own.is_active:
            # `drain` could not reach the store.
            leadership.resign()
            return False
        if not any(one.node != self.own.node for one in self.members.recent()):
            return True
        leader.answer_requests()
        if has_changed or not was_leader:
            leader.sweep()
        leader.rebalance()
        return True
