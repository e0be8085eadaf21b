"""The consumer groups that this broker coordinates: claims, committed offsets, requests of members.

    <root>/cluster/groups/<group>   {"node": …, "epoch": …, "topics": ["/default/orders-part-0"]}

A broker claims a group by writing its node and the next epoch into the group's record. A commit is
a transaction that requires the record as this broker knows it, and is answered after it: so an
answered commit survives, and a broker that was replaced commits nothing, however late it wakes up.
Commits that arrive meanwhile are the next transaction, of up to 40 partitions.

Committed offsets are cursors of the kind `kafka` (`ister.subscription.store`): they hold retention
while they are fresh, and are written again now and then while the group has members. Those of
another incarnation of a topic do not count.

Which broker should coordinate a group: the one in its record while that is up, else the one that
all brokers pick from the same list. The claim decides.

Owns: the records, the answers. Does not own: the state of groups (`groups`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
from kio.schema.errors import ErrorCode

from ister.base import threads
from ister.base.model import TopicName
from ister.base.structs import known
from ister.broker.cluster.placement import rendezvous
from ister.broker.kafka.groups import EPOCH_BITS, Group, GroupState, Joined, Synced, Wish
from ister.broker.kafka.produce import no_transactions
from ister.broker.kafka.protocol import Entity, KafkaError, Request, code_of
from ister.broker.kafka.topics import KafkaTopics, base_of, split_address
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.bucket.members import Member
from ister.errors import (
    ConflictError,
    InvalidRequestError,
    IsterError,
    PermissionDeniedError,
    UnavailableError,
)
from ister.metadata.base import Compare, Delete, MetadataStore, Operation, Put, RevisionIs
from ister.metadata.transact import transact, unchanged
from ister.subscription.store import GroupCursor, SubscriptionStore, check_subscription_name

_PARTITIONS_AT_ONCE: Final = 40
_SESSION_SECONDS: Final = (1.0, 1800.0)
_METADATA_MAX: Final = 4096
_MEMBERS_MAX: Final = 5000
_REFRESH_SECONDS: Final = 60.0
_NO_OFFSET: Final = -1


class _Record(msgspec.Struct):
    """A group as it is stored."""

    node: str
    epoch: int
    topics: list[str] = []


class Committed(NamedTuple):
    """What a group has committed for a partition."""

    offset: int
    leader_epoch: int
    metadata: str
    incarnation: str


@dataclass(slots=True, eq=False)
class _Held:
    """A group that this broker has claimed."""

    group: Group
    revision: int
    """Of the group's record."""
    offsets: dict[str, Committed]
    """By the name of the partition's topic."""
    waiting: dict[str, Committed] = field(default_factory=dict)
    answers: list[asyncio.Future[None]] = field(default_factory=list)
    """Commits that wait for what is in `waiting`."""
    writing: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None


class Coordinator:
    """Serves the requests about groups. Used on the broker's loop alone."""

    def __init__(
        self,
        names: KafkaTopics,
        guard: Guard,
        metadata: MetadataStore,
        store: SubscriptionStore,
        *,
        root_prefix: str,
    ) -> None:
        self._names = names
        self._guard = guard
        self._metadata = metadata
        self._store = store
        self._prefix = f"{root_prefix}/cluster/groups/"
        self._held: dict[str, _Held] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def groups(self) -> int:
        """How many groups are coordinated here."""
        return len(self._held)

    @property
    def members(self) -> int:
        """How many members they have."""
        return sum(len(one.group.members) for one in self._held.values())

    def start(self) -> None:
        """Begins to keep the cursors of groups with members fresh."""
        self._refreshing = asyncio.get_running_loop().create_task(self._refresh())
        threads.watch_task("ister-kafka-groups", self._refreshing)

    async def close(self) -> None:
        """Ends all groups here, once what was committed is written."""
        if self._refreshing is not None:
            self._refreshing.cancel()
        for held in list(self._held.values()):
            if held.writing is not None:
                with suppress(asyncio.CancelledError, IsterError):
                    await held.writing
            self._drop(held)

    # -- which broker -----------------------------------------------------------------------

    async def _find(self, name: str) -> Member:
        """The broker that should coordinate a group.

        Raises:
            KafkaError: There is none at the moment.
        """
        cluster = self._names.topics.cluster
        members = {
            one.node: one
            for one, _, _ in await self._names.brokers()
            if one.is_active and one.kafka_id >= 0
        }
        own = cluster.own
        if not cluster.is_leased:
            members.pop(own.node, None)
        if not members:
            raise KafkaError(ErrorCode.coordinator_not_available)
        if set(members) == {own.node}:
            return own
        found = await asyncio.to_thread(self._metadata.get, self._prefix + name)
        if found is not None and (member := members.get(_decode(found.value).node)) is not None:
            return member
        return members[rendezvous(name, members)]

    async def find(self, request: Request) -> Entity:
        """Answers FindCoordinator."""
        body = request.body
        is_group = getattr(body, "key_type", 0) == 0
        keys = body.coordinator_keys if request.version >= 4 else (body.key,)
        found = []
        for key in keys:
            code, message, place = ErrorCode.none, None, (-1, "", -1)
            try:
                if not is_group:
                    raise no_transactions()
                _check_name(key)
                self._check_anywhere()
                member = await self._find(key)
                place = (member.kafka_id, *split_address(member.kafka_url))
            except IsterError as error:
                code, message = group_code(error), error.message
            found.append((key, code, message, place))
        described = [
            {
                "key": key,
                "node_id": node,
                "host": host,
                "port": port,
                "error_code": code,
                "error_message": message,
            }
            for key, code, message, (node, host, port) in found
        ]
        if request.version < 4:
            return request.make("FindCoordinatorResponse", **described[0])
        parts = request.many("Coordinator", described)
        return request.make("FindCoordinatorResponse", coordinators=parts)

    # -- claims -----------------------------------------------------------------------------

    async def _hold(self, name: str) -> _Held:
        """A group that this broker coordinates; claims it if it should.

        Raises:
            KafkaError: Another broker does, or none can at the moment.
            UnavailableError: The metadata store does not answer.
        """
        _check_name(name)
        cluster = self._names.topics.cluster
        found = self._held.get(name)
        if found is not None and cluster.is_leased:
            return found
        async with self._locks.setdefault(name, asyncio.Lock()):
            found = self._held.get(name)
            if found is not None and cluster.is_leased:
                return found
            if (await self._find(name)).node != cluster.own.node:
                raise KafkaError(ErrorCode.not_coordinator)
            if found is not None:
                self._drop(found)
            held = await asyncio.to_thread(self._claim, name)
            self._held[name] = held
            return held

    def _claim(self, name: str) -> _Held:
        key, own = self._prefix + name, self._names.topics.cluster.own.node

        def attempt() -> tuple[_Record, int] | None:
            found = self._metadata.get(key)
            record = _Record(node="", epoch=0) if found is None else _decode(found.value)
            epoch = (record.epoch + 1) % (1 << EPOCH_BITS)
            claimed = _Record(node=own, epoch=max(1, epoch), topics=record.topics)
            put = Put(key, msgspec.json.encode(claimed))
            revision = self._metadata.transact([unchanged(key, found), *self._is_here()], [put])
            return None if revision is None else (claimed, revision)

        error = UnavailableError("the group's record keeps changing", path=key)
        record, revision = transact(attempt, error)
        topics = [TopicName.parse(one) for one in record.topics]
        cursors = self._store.read_group(topics, name)
        offsets = {str(topic): _committed(cursor) for topic, cursor in cursors.items()}
        return _Held(Group(name, record.epoch), revision, offsets)

    def _is_here(self) -> list[Compare]:
        """Holds while no copy of this broker's directory has replaced it."""
        stores = self._names.topics.log.stores
        return [] if stores is None else [stores.membership.is_here]

    def _drop(self, held: _Held) -> None:
        """Ends a group here; its members look for their coordinator."""
        if self._held.get(held.group.name) is held:
            del self._held[held.group.name]
        held.group.end()
        self._pump(held)

    def _check_anywhere(self) -> None:
        self._guard.check_anywhere(current_principal(), Permission.CONSUME)

    # -- members ----------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _pump(self, held: _Held) -> None:
        """Hands out the answers of a group, and sets its timer."""
        for token, answer in held.group.take_answers():
            assert isinstance(token, asyncio.Future)  # noqa: S101 - for mypy: as it was given
            if not token.done():
                token.set_result(answer)
        if held.timer is not None:
            held.timer.cancel()
            held.timer = None
        at = held.group.next_at()
        if at is not None and held.group.state is not GroupState.DEAD:
            held.timer = asyncio.get_running_loop().call_at(at, self._tick, held)

    def _tick(self, held: _Held) -> None:
        held.group.tick(self._now())
        self._pump(held)

    async def join(self, request: Request, host: str) -> Entity:
        """Answers JoinGroup, when all members have joined."""
        body = request.body
        session = body.session_timeout.total_seconds()
        rebalance = getattr(body, "rebalance_timeout", body.session_timeout).total_seconds()
        wish = Wish(
            client_id=request.client_id,
            host=host,
            session_seconds=session,
            rebalance_seconds=session if rebalance < 0 else rebalance,
            protocol_type=body.protocol_type,
            protocols={one.name: one.metadata for one in body.protocols},
            instance=getattr(body, "group_instance_id", None),
        )
        answer = Joined(ErrorCode.none, body.member_id)
        held: _Held | None = None
        try:
            self._check_anywhere()
            if not _SESSION_SECONDS[0] <= session <= _SESSION_SECONDS[1]:
                raise KafkaError(ErrorCode.invalid_session_timeout)
            held = await self._hold(body.group_id)
            if len(held.group.members) >= _MEMBERS_MAX and not body.member_id:
                raise KafkaError(ErrorCode.group_max_size_reached)
            token: asyncio.Future[Joined] = asyncio.get_running_loop().create_future()
            held.group.join(
                self._now(),
                token,
                body.member_id,
                wish,
                new_id=f"{(wish.instance or request.client_id)[:100]}-{uuid.uuid4()}",
                needs_id=request.version >= 4,
                can_skip=request.version >= 9,
            )
            self._pump(held)
            answer = await token
        except IsterError as error:
            answer = Joined(group_code(error), body.member_id)
        has_type = held is not None and answer.code is ErrorCode.none
        protocol = answer.protocol
        return request.make(
            "JoinGroupResponse",
            error_code=answer.code,
            generation_id=answer.generation,
            protocol_type=wish.protocol_type if has_type else None,
            protocol_name=protocol if protocol is not None or request.version >= 7 else "",
            leader=answer.leader,
            skip_assignment=answer.skips_assignment,
            member_id=answer.member,
            members=tuple(
                request.make(
                    "JoinGroupResponseMember",
                    member_id=member,
                    group_instance_id=instance,
                    metadata=metadata,
                )
                for member, instance, metadata in answer.members
            ),
        )

    async def sync(self, request: Request) -> Entity:
        """Answers SyncGroup, when the leader has sent the assignments."""
        body = request.body
        answer = Synced(ErrorCode.none)
        protocol_type: str | None = None
        protocol: str | None = None
        try:
            self._check_anywhere()
            held = await self._hold(body.group_id)
            group = held.group
            for name, own in (
                (getattr(body, "protocol_type", None), group.protocol_type),
                (getattr(body, "protocol_name", None), group.protocol),
            ):
                if name is not None and own and name != own:
                    raise KafkaError(ErrorCode.inconsistent_group_protocol)
            token: asyncio.Future[Synced] = asyncio.get_running_loop().create_future()
            group.sync(
                self._now(),
                token,
                body.member_id,
                getattr(body, "group_instance_id", None),
                body.generation_id,
                assignments={one.member_id: one.assignment for one in body.assignments},
            )
            self._pump(held)
            answer = await token
            if answer.code is ErrorCode.none:
                protocol_type, protocol = group.protocol_type, group.protocol
        except IsterError as error:
            answer = Synced(group_code(error))
        return request.make(
            "SyncGroupResponse",
            error_code=answer.code,
            protocol_type=protocol_type,
            protocol_name=protocol,
            assignment=answer.assignment,
        )

    async def heartbeat(self, request: Request) -> Entity:
        """Answers Heartbeat."""
        body = request.body
        try:
            self._check_anywhere()
            held = await self._hold(body.group_id)
            instance = getattr(body, "group_instance_id", None)
            code = held.group.heartbeat(self._now(), body.member_id, instance, body.generation_id)
            self._pump(held)
        except IsterError as error:
            code = group_code(error)
        return request.make("HeartbeatResponse", error_code=code)

    async def leave(self, request: Request) -> Entity:
        """Answers LeaveGroup."""
        body = request.body
        leaving = (
            [(one.member_id, one.group_instance_id) for one in body.members]
            if request.version >= 3
            else [(body.member_id, None)]
        )
        code, codes = ErrorCode.none, [ErrorCode.none] * len(leaving)
        try:
            self._check_anywhere()
            held = await self._hold(body.group_id)
            codes = [held.group.leave(self._now(), *one) for one in leaving]
            self._pump(held)
        except IsterError as error:
            code = group_code(error)
        if request.version < 3:
            return request.make("LeaveGroupResponse", error_code=code or codes[0])
        return request.make(
            "LeaveGroupResponse",
            error_code=code,
            members=tuple(
                request.make(
                    "MemberResponse", member_id=member, group_instance_id=instance, error_code=one
                )
                for (member, instance), one in zip(leaving, codes, strict=True)
            ),
        )

    # -- offsets ----------------------------------------------------------------------------

    async def commit(self, request: Request) -> Entity:
        """Answers OffsetCommit, when the offsets are stored."""
        body = request.body
        refusal: ErrorCode | None = None
        codes: dict[tuple[str, int], ErrorCode] = {}
        try:
            self._check_anywhere()
            held = await self._hold(body.group_id)
            wanted = await self._committable(body.topics, codes)
            # After all waiting, so that what is checked is still true when it is put in line.
            instance = getattr(body, "group_instance_id", None)
            code = held.group.check_commit(
                self._now(), body.member_id, instance, body.generation_id_or_member_epoch
            )
            self._pump(held)
            if code is not ErrorCode.none:
                raise KafkaError(code)
            if wanted:
                await self._write(held, wanted)
        except IsterError as error:
            refusal = group_code(error)
        found = [
            (
                topic.name,
                [
                    {
                        "partition_index": one.partition_index,
                        "error_code": refusal
                        or codes.get((topic.name, one.partition_index), ErrorCode.none),
                    }
                    for one in topic.partitions
                ],
            )
            for topic in body.topics
        ]
        kinds = ("OffsetCommitResponseTopic", "OffsetCommitResponsePartition")
        return request.make("OffsetCommitResponse", topics=request.by_topic(*kinds, found))

    async def _committable(
        self, topics: Iterable[Entity], codes: dict[tuple[str, int], ErrorCode]
    ) -> dict[str, Committed]:
        """What of a commit can be stored, by the partition's topic; fills `codes` for the rest."""
        wanted: dict[str, Committed] = {}
        for topic in topics:
            code = ErrorCode.none
            partitions: dict[int, str] = {}
            try:
                path = self._names.path_of(topic.name)
                self._names.check(Permission.CONSUME, path)
                partitions = await self._names.partitions(path)
            except IsterError as error:
                code = code_of(error)
            for one in topic.partitions:
                number, place = one.partition_index, (topic.name, one.partition_index)
                metadata = one.committed_metadata or ""
                if code is not ErrorCode.none:
                    codes[place] = code
                elif number not in partitions:
                    codes[place] = ErrorCode.unknown_topic_or_partition
                elif len(metadata) > _METADATA_MAX:
                    codes[place] = ErrorCode.offset_metadata_too_large
                elif one.committed_offset >= 0:
                    wanted[partitions[number]] = Committed(
                        one.committed_offset,
                        getattr(one, "committed_leader_epoch", -1),
                        metadata,
                        await self._names.incarnation(partitions[number]),
                    )
        return wanted

    async def _write(self, held: _Held, wanted: dict[str, Committed]) -> None:
        """Stores offsets, together with those of others; returns when they are stored."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        held.waiting.update(wanted)
        held.answers.append(done)
        if held.writing is None:
            held.writing = loop.create_task(self._write_all(held))
            threads.watch_task("ister-kafka-commit", held.writing)
        await done

    async def _write_all(self, held: _Held) -> None:
        try:
            while held.waiting or held.answers:
                waiting, held.waiting = held.waiting, {}
                answers, held.answers = held.answers, []
                failed: IsterError | None = None
                entries = list(waiting.items())
                try:
                    for at in range(0, len(entries), _PARTITIONS_AT_ONCE):
                        chunk = entries[at : at + _PARTITIONS_AT_ONCE]
                        await asyncio.to_thread(self._store_chunk, held, chunk)
                        held.offsets.update(chunk)
                except IsterError as error:
                    failed = error
                    if isinstance(error, KafkaError):
                        self._drop(held)
                for answer in answers:
                    if answer.done():
                        continue
                    if failed is None:
                        answer.set_result(None)
                    else:
                        answer.set_exception(failed.again())
        finally:
            held.writing = None

    def _store_chunk(self, held: _Held, chunk: Sequence[tuple[str, Committed]]) -> None:
        """Stores offsets in one transaction that requires the group's record. Blocks.

        Raises:
            KafkaError: Another broker has claimed the group.
            UnavailableError: The metadata store does not answer.
        """
        group, key = held.group, self._prefix + held.group.name
        own = self._names.topics.cluster.own.node

        def attempt() -> bool | None:
            compares: list[Compare] = [RevisionIs(key, held.revision), *self._is_here()]
            operations: list[Operation] = []
            topics = dict.fromkeys(held.offsets)
            for name, one in chunk:
                topic, before = TopicName.parse(name), held.offsets.get(name)
                if before is None or before.incarnation != one.incarnation:
                    more, planned = self._store.plan_group(topic, group.name, one.incarnation)
                    compares += more
                    operations += planned
                    topics[name] = None
                more_fields = {"metadata": one.metadata, "leader_epoch": one.leader_epoch}
                operations.append(
                    self._store.put_group(
                        topic, group.name, one.offset, one.incarnation, more_fields
                    )
                )
            grows = len(topics) > len(held.offsets)
            if grows:
                record = _Record(node=own, epoch=group.epoch, topics=list(topics))
                operations.append(Put(key, msgspec.json.encode(record)))
            revision = self._metadata.transact(compares, operations)
            if revision is not None:
                if grows:
                    held.revision = revision
                return True
            self._check_record(held)
            return None

        transact(attempt, UnavailableError("the group's record keeps changing", path=key))

    def _check_record(self, held: _Held) -> None:
        """Reads a group's record after a transaction that was not done.

        Raises:
            KafkaError: It is another broker's.
        """
        found = self._metadata.get(self._prefix + held.group.name)
        record = None if found is None else _decode(found.value)
        own = self._names.topics.cluster.own.node
        if (
            found is None
            or record is None
            or (record.node, record.epoch) != (own, held.group.epoch)
        ):
            raise KafkaError(ErrorCode.not_coordinator)
        held.revision = found.revision

    async def fetch(self, request: Request) -> Entity:
        """Answers OffsetFetch."""
        body, make = request.body, request.make
        asked = (
            [(one.group_id, one.topics) for one in body.groups]
            if request.version >= 8
            else [(body.group_id, body.topics)]
        )
        groups = []
        for name, topics in asked:
            code, found = ErrorCode.none, []
            try:
                self._check_anywhere()
                found = await self._fetch(name, topics)
            except IsterError as error:
                code = group_code(error)
                found = [
                    (topic.name, [(number, None, code) for number in topic.partition_indexes])
                    for topic in topics or ()
                ]
            groups.append((name, code, found))
        ending = "s" if request.version >= 8 else ""
        kinds = (f"OffsetFetchResponseTopic{ending}", f"OffsetFetchResponsePartition{ending}")
        if request.version < 8:
            [(_, code, found)] = groups
            topics = request.by_topic(*kinds, _fetched(found))
            return make("OffsetFetchResponse", topics=topics, error_code=code)
        described = [
            {
                "group_id": name,
                "topics": request.by_topic(*kinds, _fetched(found)),
                "error_code": code,
            }
            for name, code, found in groups
        ]
        parts = request.many("OffsetFetchResponseGroup", described)
        return make("OffsetFetchResponse", groups=parts)

    async def _fetch(self, name: str, topics: Sequence[Entity] | None) -> list[_Fetched]:
        offsets: dict[str, Committed] = {}
        # A question makes no group.
        if name in self._held or await self._exists(name):
            held = await self._hold(name)
            if held.writing is not None:
                # What was committed before must be seen.
                await self._write(held, {})
            offsets = held.offsets
        wanted: list[tuple[str, list[int]]]
        if topics is None:
            bases = dict.fromkeys(map(base_of, offsets))
            wanted = [
                (self._names.name_of(base), list(await self._names.partitions(base)))
                for base in bases
                if self._names.allows(Permission.LOOKUP, base)
            ]
        else:
            wanted = [(topic.name, list(topic.partition_indexes)) for topic in topics]
        found: list[_Fetched] = []
        for topic_name, numbers in wanted:
            code = ErrorCode.none
            partitions: dict[int, str] = {}
            try:
                path = self._names.path_of(topic_name)
                self._names.check(Permission.LOOKUP, path)
                partitions = await self._names.partitions(path)
            except IsterError as error:
                code = code_of(error)
            answers: list[tuple[int, Committed | None, ErrorCode]] = []
            for number in numbers:
                one = offsets.get(partitions.get(number, ""))
                if one is not None:
                    current = await self._names.incarnation(partitions[number])
                    one = one if one.incarnation == current else None
                if one is not None or topics is not None:
                    answers.append((number, one, code))
            if answers:
                found.append((topic_name, answers))
        return found

    async def _refresh(self) -> None:
        """Writes the cursors of groups with members again, so that they hold retention."""
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            for held in list(self._held.values()):
                if held.group.members and held.offsets:
                    with suppress(IsterError):
                        fresh = {**held.offsets, **held.waiting}
                        await self._write(held, fresh)

    # -- operators --------------------------------------------------------------------------

    async def list(self, request: Request) -> Entity:
        """Answers ListGroups: those that this broker coordinates."""
        code, found = ErrorCode.none, []
        try:
            self._check_anywhere()
            states = {one.lower() for one in getattr(request.body, "states_filter", ())}
            own = self._names.topics.cluster.own.node
            items = await asyncio.to_thread(self._metadata.range, self._prefix)
            for item in items:
                name = item.key.removeprefix(self._prefix)
                held = self._held.get(name)
                if held is None and _decode(item.value).node != own:
                    continue
                state = GroupState.EMPTY if held is None else held.group.state
                kind = "consumer" if held is None else held.group.protocol_type
                if not states or state.lower() in states:
                    found.append((name, kind, state))
        except IsterError as error:
            code = group_code(error)
        return request.make(
            "ListGroupsResponse",
            error_code=code,
            groups=tuple(
                request.make("ListedGroup", group_id=name, protocol_type=kind, group_state=state)
                for name, kind, state in found
            ),
        )

    async def describe(self, request: Request) -> Entity:
        """Answers DescribeGroups."""
        described = []
        for name in request.body.groups:
            code, group = ErrorCode.none, None
            try:
                self._check_anywhere()
                if name in self._held or await self._exists(name):
                    group = (await self._hold(name)).group
            except IsterError as error:
                code = group_code(error)
            described.append(_described(request, name, code, group))
        return request.make("DescribeGroupsResponse", groups=tuple(described))

    async def _exists(self, name: str) -> bool:
        _check_name(name)
        return await asyncio.to_thread(self._metadata.get, self._prefix + name) is not None

    async def delete(self, request: Request) -> Entity:
        """Answers DeleteGroups: groups without members, with all that they have committed."""
        results = []
        for name in request.body.groups_names:
            code = ErrorCode.none
            try:
                await self._delete(name)
            except IsterError as error:
                code = group_code(error)
            results.append(request.make("DeletableGroupResult", group_id=name, error_code=code))
        return request.make("DeleteGroupsResponse", results=tuple(results))

    async def _delete(self, name: str) -> None:
        self._check_anywhere()
        if not await self._exists(name):
            raise KafkaError(ErrorCode.group_id_not_found)
        held = await self._hold(name)
        for topic in held.offsets:
            self._names.check(Permission.CONSUME, base_of(topic))
        if held.group.state is not GroupState.EMPTY:
            raise KafkaError(ErrorCode.non_empty_group)
        await asyncio.to_thread(self._remove, held, list(held.offsets), is_all=True)
        self._drop(held)

    def _remove(self, held: _Held, topics: Sequence[str], *, is_all: bool) -> None:
        """Removes topics of a group, and the group itself if these are all. Blocks."""
        key, name = self._prefix + held.group.name, held.group.name
        for at in range(0, max(1, len(topics)), _PARTITIONS_AT_ONCE):
            chunk = topics[at : at + _PARTITIONS_AT_ONCE]
            is_last = is_all and at + _PARTITIONS_AT_ONCE >= len(topics)

            def attempt(chunk: Sequence[str] = chunk, *, is_last: bool = is_last) -> bool | None:
                operations: list[Operation] = []
                for topic in chunk:
                    operations += self._store.delete_group(TopicName.parse(topic), name)
                if is_last:
                    operations.append(Delete(key))
                compares = [RevisionIs(key, held.revision)]
                if self._metadata.transact(compares, operations) is not None:
                    return True
                self._check_record(held)
                return None

            transact(attempt, UnavailableError("the group's record keeps changing", path=key))

    async def delete_offsets(self, request: Request) -> Entity:
        """Answers OffsetDelete: in a group without members."""
        body, make = request.body, request.make
        refusal = ErrorCode.none
        codes: dict[tuple[str, int], ErrorCode] = {}
        try:
            self._check_anywhere()
            held = await self._hold(body.group_id)
            gone: list[str] = []
            for topic in body.topics:
                path = self._names.path_of(topic.name)
                self._names.check(Permission.CONSUME, path)
                partitions = await self._names.partitions(path)
                for one in topic.partitions:
                    name = partitions.get(one.partition_index)
                    place = (topic.name, one.partition_index)
                    if name is None:
                        codes[place] = ErrorCode.unknown_topic_or_partition
                    elif held.group.state is not GroupState.EMPTY:
                        codes[place] = ErrorCode.group_subscribed_to_topic
                    elif name in held.offsets:
                        gone.append(name)
            await asyncio.to_thread(self._remove, held, gone, is_all=False)
            for name in gone:
                held.offsets.pop(name, None)
        except IsterError as error:
            refusal = group_code(error)
        found = [
            (
                topic.name,
                [
                    {
                        "partition_index": one.partition_index,
                        "error_code": codes.get((topic.name, one.partition_index), ErrorCode.none),
                    }
                    for one in topic.partitions
                ],
            )
            for topic in (body.topics if refusal is ErrorCode.none else ())
        ]
        kinds = ("OffsetDeleteResponseTopic", "OffsetDeleteResponsePartition")
        topics = request.by_topic(*kinds, found)
        return make("OffsetDeleteResponse", error_code=refusal, topics=topics)


_Fetched = tuple[str, list[tuple[int, Committed | None, ErrorCode]]]
"""A topic, and its partitions with what was committed for them."""


def _fetched(found: list[_Fetched]) -> list[tuple[str, list[dict[str, Entity]]]]:
    """What was committed, as an answer has it."""
    return [
        (
            name,
            [
                {
                    "partition_index": number,
                    "committed_offset": _NO_OFFSET if one is None else one.offset,
                    "committed_leader_epoch": -1 if one is None else one.leader_epoch,
                    "metadata": "" if one is None else one.metadata,
                    "error_code": code,
                }
                for number, one, code in partitions
            ],
        )
        for name, partitions in found
    ]


def group_code(error: IsterError) -> ErrorCode:
    """Kafka's code for an error of a request about a group."""
    if isinstance(error, KafkaError):
        return error.kafka
    if isinstance(error, PermissionDeniedError):
        return ErrorCode.group_authorization_failed
    if isinstance(error, UnavailableError):
        return ErrorCode.coordinator_not_available
    if isinstance(error, (InvalidRequestError, ConflictError)):
        return ErrorCode.invalid_group_id
    return code_of(error)


def _check_name(name: str) -> None:
    try:
        check_subscription_name(name)
    except InvalidRequestError as error:
        raise KafkaError(ErrorCode.invalid_group_id, str(error)) from error


def _decode(value: bytes) -> _Record:
    try:
        return msgspec.json.decode(value, type=known(_Record))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Record(node="", epoch=0)


def _committed(cursor: GroupCursor) -> Committed:
    epoch, metadata = cursor.more.get("leader_epoch"), cursor.more.get("metadata")
    return Committed(
        cursor.cursor,
        epoch if isinstance(epoch, int) else -1,
        metadata if isinstance(metadata, str) else "",
        cursor.incarnation,
    )


def _described(request: Request, name: str, code: ErrorCode, group: Group | None) -> Entity:
    members = () if group is None else tuple(group.members.values())
    protocol = "" if group is None or group.protocol is None else group.protocol
    return request.make(
        "DescribedGroup",
        error_code=code,
        group_id=name,
        group_state=GroupState.DEAD if group is None else group.state,
        protocol_type="" if group is None else group.protocol_type or "consumer",
        protocol_data=protocol,
        members=tuple(
            request.make(
                "DescribedGroupMember",
                member_id=one.id,
                group_instance_id=one.wish.instance,
                client_id=one.wish.client_id,
                client_host=one.wish.host,
                member_metadata=one.wish.protocols.get(protocol, b""),
                member_assignment=one.assignment,
            )
            for one in members
        ),
    )
