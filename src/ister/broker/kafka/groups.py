"""The members of a consumer group: Kafka's classic protocol as a state machine without I/O.

    Empty ──join──► PreparingRebalance ──all joined, or time over──► CompletingRebalance
                        ▲    ▲                                              │ the leader's sync
                        │    └── join, leave, time over ── Stable ◄─────────┘
                        └──────────── join, leave, time over ───────────────┘

Events and the time go in; answers to JoinGroup and SyncGroup, which may wait, come out by the token
that the caller gave them. Assignments are computed by the members' leader, and are bytes here.

Owns: states, generations, sessions, static members, which answer waits for what. Does not own:
connections and clocks (`coordinator`), offsets.

Generations have the coordinator's epoch in their upper 15 bits: those of an older coordinator are
always lower. After a fail-over all members are unknown, and join again.

Invariants (`validate_state`): each token is answered once; the leader is a member; answers that
wait are of members; nobody has an assignment of another generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode

from ister.errors import check

INITIAL_SECONDS: Final = 0.5
"""How long a group's first rebalance waits for more members, each time that one joins."""
EPOCH_BITS: Final = 15
_COUNTER_BITS: Final = 16
NO_GENERATION: Final = -1


class GroupState(StrEnum):
    """The state of a group, as Kafka names it."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class Joined(NamedTuple):
    """The answer to a JoinGroup."""

    code: ErrorCode
    member: str
    generation: int = NO_GENERATION
    protocol: str | None = None
    leader: str = ""
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    """Id, instance id and metadata; for the leader alone."""
    skips_assignment: bool = False


class Synced(NamedTuple):
    """The answer to a SyncGroup."""

    code: ErrorCode
    assignment: bytes = b""


class Wish(NamedTuple):
    """What a member brings when it joins."""

    client_id: str
    host: str
    session_seconds: float
    rebalance_seconds: float
    protocol_type: str
    protocols: dict[str, bytes]
    """Metadata by the protocol's name, the preferred one first."""
    instance: str | None = None
    """Names a static member."""


@dataclass(slots=True, eq=False)
class Member:
    """One member."""

    id: str
    wish: Wish
    deadline: float
    """When its session ends, unless it is heard of."""
    assignment: bytes = b""
    joining: object | None = None
    """The token of a JoinGroup that waits."""
    syncing: object | None = None
    """The token of a SyncGroup that waits."""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for an answer, so that it need not send heartbeats."""
        return self.joining is not None or self.syncing is not None


Answer = tuple[object, Joined | Synced]


@dataclass(slots=True)
class Group:
    """See the module header. Not thread-safe."""

    name: str
    epoch: int
    members: dict[str, Member] = field(default_factory=dict)
    state: GroupState = GroupState.EMPTY
    protocol_type: str = ""
    protocol: str | None = None
    leader: str = ""
    answers: list[Answer] = field(default_factory=list)
    """Tokens with their answers, for the caller to take."""
    deadline: float | None = None
    """When a rebalance goes on without those who are missing."""
    _counter: int = 0
    _static: dict[str, str] = field(default_factory=dict)
    _pending: dict[str, float] = field(default_factory=dict)
    """Ids that were given out and have not joined yet, and until when they may."""
    _is_initial: bool = False
    _unsynced: set[str] = field(default_factory=set)

    @property
    def generation(self) -> int:
        """The number of the generation."""
        epoch = self.epoch % (1 << EPOCH_BITS)
        return epoch << _COUNTER_BITS | self._counter % (1 << _COUNTER_BITS)

    def take_answers(self) -> list[Answer]:
        """The answers since the last call."""
        found, self.answers = self.answers, []
        return found

    def next_at(self) -> float | None:
        """When `tick` has something to do; None if it has nothing."""
        times = [one.deadline for one in self.members.values() if not one.is_waiting]
        times += self._pending.values()
        if self.deadline is not None:
            times.append(self.deadline)
        return min(times, default=None)

    # -- joining ----------------------------------------------------------------------------

    def join(
        self,
        now: float,
        token: object,
        member: str,
        wish: Wish,
        *,
        new_id: str,
        needs_id: bool,
        can_skip: bool = False,
    ) -> None:
        """A JoinGroup.

        Args:
            now: The time.
            token: What its answer comes out with.
            member: The member's id; "" for one that has none yet.
            wish: What it brings.
            new_id: Its id if it has none.
            needs_id: Whether it has to come again with its new id.
            can_skip: Whether a leader can be told not to compute an assignment.
        """
        code = self._refusal(member, wish)
        if code is not ErrorCode.none:
            self._say(token, Joined(code, member))
        elif member in self.members:
            self._rejoin(now, token, self.members[member], wish)
        elif member:
            # An id that was given out a moment ago.
            del self._pending[member]
            self._add(now, token, member, wish)
        elif wish.instance is not None and wish.instance in self._static:
            self._replace(now, token, wish, new_id, can_skip=can_skip)
        elif needs_id and wish.instance is None:
            self._pending[new_id] = now + wish.session_seconds
            self._say(token, Joined(ErrorCode.member_id_required, new_id))
        else:
            self._add(now, token, new_id, wish)

    def _refusal(self, member: str, wish: Wish) -> ErrorCode:
        if self.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        if not wish.protocols or not wish.protocol_type:
            return ErrorCode.inconsistent_group_protocol
        others = [
            one
            for one in self.members.values()
            if one.id != member and (wish.instance is None or one.wish.instance != wish.instance)
        ]
        if others and (
            wish.protocol_type != self.protocol_type
            or not _common([wish, *(one.wish for one in others)])
        ):
            return ErrorCode.inconsistent_group_protocol
        if not member:
            return ErrorCode.none
        return self._unknown(member, wish.instance, pending_is_known=True)

    def _unknown(
        self, member: str, instance: str | None, *, pending_is_known: bool = False
    ) -> ErrorCode:
        """Whether a member is not one, or another one has its instance id by now."""
        if instance is not None:
            owner = self._static.get(instance)
            if owner is None:
                return ErrorCode.unknown_member_id
            return ErrorCode.none if owner == member else ErrorCode.fenced_instance_id
        is_known = member in self.members or (pending_is_known and member in self._pending)
        return ErrorCode.none if is_known else ErrorCode.unknown_member_id

    def _add(self, now: float, token: object, id: str, wish: Wish) -> None:
        self.members[id] = Member(id, wish, now + wish.session_seconds, joining=token)
        self.protocol_type = wish.protocol_type
        if wish.instance is not None:
            self._static[wish.instance] = id
        if not self.leader:
            self.leader = id
        if self.state is GroupState.PREPARING:
            if self._is_initial:
                self._wait_for_more(now)
            self._try_complete(now)
        else:
            self._prepare(now)

    def _rejoin(self, now: float, token: object, member: Member, wish: Wish) -> None:
        is_same = member.wish.protocols == wish.protocols
        is_current = self.state is GroupState.COMPLETING or (
            self.state is GroupState.STABLE and member.id != self.leader
        )
        member.wish = wish
        member.deadline = now + wish.session_seconds
        if is_same and is_current:
            # It did not get the answer, or asks without a reason.
            self._say(token, self._joined(member))
            return
        self._drop_waiting(member, ErrorCode.unknown_member_id)
        member.joining = token
        if self.state is GroupState.PREPARING:
            self._try_complete(now)
        else:
            self._prepare(now)

    def _replace(
        self, now: float, token: object, wish: Wish, new_id: str, *, can_skip: bool
    ) -> None:
        """A static member that was started again: another id, and the same place in the group."""
        assert wish.instance is not None  # noqa: S101 - for mypy: it is static
        old = self.members.pop(self._static[wish.instance])
        self._drop_waiting(old, ErrorCode.fenced_instance_id)
        deadline = now + wish.session_seconds
        member = Member(new_id, wish, deadline, assignment=old.assignment)
        self.members[new_id] = member
        self._static[wish.instance] = new_id
        if old.id in self._unsynced:
            self._unsynced.discard(old.id)
            self._unsynced.add(new_id)
        was_leader = self.leader == old.id
        if was_leader:
            self.leader = new_id
        if self.state is GroupState.STABLE and self._choose() == self.protocol:
            answer = self._joined(member)
            if was_leader:
                # It must not compute another assignment: nobody would ask for it.
                answer = (
                    answer._replace(skips_assignment=True)
                    if can_skip
                    else answer._replace(leader=old.id, members=())
                )
            self._say(token, answer)
            return
        member.joining = token
        if self.state is GroupState.PREPARING:
            self._try_complete(now)
        else:
            self._prepare(now)

    # -- rebalances -------------------------------------------------------------------------

    def _prepare(self, now: float) -> None:
        """Begins a rebalance: all members have to join again."""
        for member in self.members.values():
            member.assignment = b""
            if member.syncing is not None:
                self._say(member.syncing, Synced(ErrorCode.rebalance_in_progress))
                member.syncing = None
                member.deadline = now + member.wish.session_seconds
        self._unsynced.clear()
        self._is_initial = self.state is GroupState.EMPTY
        self.state = GroupState.PREPARING
        self.deadline = now + self._rebalance_seconds()
        if self._is_initial:
            self._wait_for_more(now)
        self._try_complete(now)

    def _wait_for_more(self, now: float) -> None:
        self.deadline = now + min(INITIAL_SECONDS, self._rebalance_seconds())

    def _rebalance_seconds(self) -> float:
        return max((one.wish.rebalance_seconds for one in self.members.values()), default=0.0)

    def _try_complete(self, now: float) -> None:
        """Ends a rebalance that nobody is missing from."""
        if (
            self.state is GroupState.PREPARING
            and not self._is_initial
            and not self._pending
            and all(one.joining is not None for one in self.members.values())
        ):
            self._complete(now)

    def _complete(self, now: float) -> None:
        """Ends a rebalance: those who joined are the next generation."""
        for member in list(self.members.values()):
            if member.joining is None and member.wish.instance is None:
                self._forget(member)
        joined = [one for one in self.members.values() if one.joining is not None]
        if self.members and not joined:
            # Static members that have not come yet.
            self.deadline = now + self._rebalance_seconds()
            return
        self._is_initial = False
        self._counter += 1
        if not joined:
            self._become_empty()
            return
        if self.leader not in {one.id for one in joined}:
            self.leader = joined[0].id
        self.protocol = self._choose()
        self.state = GroupState.COMPLETING
        self.deadline = now + self._rebalance_seconds()
        self._unsynced = {one.id for one in joined}
        for member in joined:
            token, member.joining = member.joining, None
            member.deadline = now + member.wish.session_seconds
            self._say(token, self._joined(member))

    def _become_empty(self) -> None:
        self.state = GroupState.EMPTY
        self.protocol, self.leader, self.deadline = None, "", None
        self._is_initial = False
        self._unsynced.clear()

    def _choose(self) -> str:
        """The protocol that all members know and most prefer."""
        wishes = [one.wish for one in self.members.values()]
        common = _common(wishes)
        votes = Counter(next(name for name in wish.protocols if name in common) for wish in wishes)
        return max(votes, key=lambda name: votes[name])

    def _joined(self, member: Member) -> Joined:
        members: tuple[tuple[str, str | None, bytes], ...] = ()
        if member.id == self.leader and self.protocol is not None:
            members = tuple(
                (one.id, one.wish.instance, one.wish.protocols.get(self.protocol, b""))
                for one in self.members.values()
            )
        return Joined(
            ErrorCode.none, member.id, self.generation, self.protocol, self.leader, members
        )

    # -- synchronising ----------------------------------------------------------------------

    def sync(
        self,
        now: float,
        token: object,
        member: str,
        instance: str | None,
        generation: int,
        *,
        assignments: Mapping[str, bytes],
    ) -> None:
        """A SyncGroup; the leader's has the assignments."""
        code = self._check(member, instance, generation)
        if code is ErrorCode.none and self.state is GroupState.PREPARING:
            code = ErrorCode.rebalance_in_progress
        if code is not ErrorCode.none:
            self._say(token, Synced(code))
            return
        found = self.members[member]
        found.deadline = now + found.wish.session_seconds
        self._unsynced.discard(member)
        if self.state is GroupState.STABLE:
            if not self._unsynced:
                self.deadline = None
            self._say(token, Synced(ErrorCode.none, found.assignment))
            return
        if found.syncing is not None:  # of a connection that is lost
            self._say(found.syncing, Synced(ErrorCode.rebalance_in_progress))
        found.syncing = token
        if member != self.leader:
            return
        self.state = GroupState.STABLE
        if not self._unsynced:
            self.deadline = None
        for one in self.members.values():
            one.assignment = assignments.get(one.id, b"")
            if one.syncing is not None:
                self._say(one.syncing, Synced(ErrorCode.none, one.assignment))
                one.syncing = None
                one.deadline = now + one.wish.session_seconds

    def _check(self, member: str, instance: str | None, generation: int) -> ErrorCode:
        if self.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        code = self._unknown(member, instance)
        if code is ErrorCode.none and generation != self.generation:
            code = ErrorCode.illegal_generation
        return code

    # -- living and leaving -----------------------------------------------------------------

    def heartbeat(
        self, now: float, member: str, instance: str | None, generation: int
    ) -> ErrorCode:
        """A Heartbeat."""
        code = self._check(member, instance, generation)
        if code is not ErrorCode.none:
            return code
        found = self.members[member]
        found.deadline = now + found.wish.session_seconds
        is_rebalancing = self.state is GroupState.PREPARING
        return ErrorCode.rebalance_in_progress if is_rebalancing else ErrorCode.none

    def check_commit(
        self, now: float, member: str, instance: str | None, generation: int
    ) -> ErrorCode:
        """Whether a member may commit offsets; without members, anybody may who is none."""
        if self.state is GroupState.EMPTY and generation < 0 and not member and instance is None:
            return ErrorCode.none
        code = self._check(member, instance, generation)
        if code is not ErrorCode.none:
            return code
        if self.state is GroupState.COMPLETING:
            return ErrorCode.rebalance_in_progress
        found = self.members[member]
        found.deadline = now + found.wish.session_seconds
        return ErrorCode.none

    def leave(self, now: float, member: str, instance: str | None) -> ErrorCode:
        """A member leaves; a static one by its instance id."""
        if instance is not None and not member:
            member = self._static.get(instance, "")
        if member in self._pending:
            del self._pending[member]
            self._try_complete(now)
            return ErrorCode.none
        code = self._unknown(member, instance)
        if code is ErrorCode.none:
            self._remove(now, self.members[member])
        return code

    def tick(self, now: float) -> None:
        """Goes on without members whose time is over."""
        for given in [one for one, until in self._pending.items() if now >= until]:
            del self._pending[given]
            self._try_complete(now)
        for member in list(self.members.values()):
            if member.id in self.members and not member.is_waiting and now >= member.deadline:
                self._remove(now, member)
        if self.deadline is None or now < self.deadline:
            return
        if self.state is GroupState.PREPARING:
            self._pending.clear()
            self._complete(now)
        elif self._unsynced:
            for missing in sorted(self._unsynced):
                self._forget(self.members[missing])
            self._after_removal(now)
        else:
            self.deadline = None

    def end(self) -> None:
        """Ends the group here: another broker has it, or it is deleted."""
        for member in list(self.members.values()):
            self._drop_waiting(member, ErrorCode.not_coordinator)
        self.members.clear()
        self._static.clear()
        self._pending.clear()
        self._become_empty()
        self.state = GroupState.DEAD

    def _remove(self, now: float, member: Member) -> None:
        self._forget(member)
        self._after_removal(now)

    def _after_removal(self, now: float) -> None:
        if self.state in (GroupState.STABLE, GroupState.COMPLETING):
            if self.members:
                self._prepare(now)
            else:
                self._counter += 1
                self._become_empty()
        elif self.state is GroupState.PREPARING:
            if not self.members and not self._pending:
                self._complete(now)
            else:
                self._try_complete(now)

    def _forget(self, member: Member) -> None:
        self._drop_waiting(member, ErrorCode.unknown_member_id)
        del self.members[member.id]
        self._unsynced.discard(member.id)
        if member.wish.instance is not None and self._static.get(member.wish.instance) == member.id:
            del self._static[member.wish.instance]
        if self.leader == member.id:
            self.leader = next(iter(self.members), "")

    def _drop_waiting(self, member: Member, code: ErrorCode) -> None:
        if member.joining is not None:
            self._say(member.joining, Joined(code, member.id))
            member.joining = None
        if member.syncing is not None:
            self._say(member.syncing, Synced(code))
            member.syncing = None

    def _say(self, token: object, answer: Joined | Synced) -> None:
        self.answers.append((token, answer))

    # -- invariants -------------------------------------------------------------------------

    def validate_state(self) -> None:
        """Checks every invariant.

        Raises:
            InvariantError: One does not hold.
        """
        members, state = self.members, self.state
        may_be_empty = state in (GroupState.EMPTY, GroupState.DEAD, GroupState.PREPARING)
        check(bool(members) or may_be_empty, "a group without members is empty")
        check((state is GroupState.EMPTY) <= (not members), "an empty group has no members")
        check(not self.leader or self.leader in members, "the leader is a member")
        check(bool(self.leader) or not members, "there is a leader")
        check(set(self._static.values()) <= set(members), "static members are members")
        check(self._unsynced <= set(members), "who has not synchronised is a member")
        check(not self._pending.keys() & members.keys(), "an id is given out or a member's")
        for member in members.values():
            may_join, may_sync = state is GroupState.PREPARING, state is GroupState.COMPLETING
            check(member.joining is None or may_join, "joins wait for others")
            check(member.syncing is None or may_sync, "syncs wait for the leader")
            check(not member.assignment or state is GroupState.STABLE, "assignments are current")
        waits = state in (GroupState.PREPARING, GroupState.COMPLETING)
        check(not waits or self.deadline is not None, "every wait has an end")


def _common(wishes: Sequence[Wish]) -> set[str]:
    """The protocols that all of them know."""
    found = set(wishes[0].protocols)
    for wish in wishes[1:]:
        found &= wish.protocols.keys()
    return found
