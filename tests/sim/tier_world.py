"""Two machines, one bucket and one metadata store that crash and fail, driven by one seed.

A `TierWorld` has two nodes, each with a disk of its own, and a topic that they write in turns. A
process of a node lives from its opening, which goes through recovery, to a power cut, a kill or a
close; its machine may lose its disk. The stores outlive every process. A life ends before or after
any operation on files, objects or metadata, or at a named failpoint. Answers of both stores get
lost, changes of metadata land late or never, objects rot while a local copy is left. In the middle
of one node's work the other one may get its turn, with time passing, so that an owner wakes up as
one that was fenced. In most worlds there is a pipeline, too, which uploads and merges objects in
the owner's name, from outside of its process (`outsider`).

A node claims the topic of the other one after its lease has ended: with a take-over, or where the
record proves that nothing acknowledged or delivered can be missing (the level is `tiered`, or the
owner has marked the topic as idle). Where it may do neither, it serves the history, read-only. A
subscription is served by whoever has the topic, and its cursor is saved.

With `restores`, stores are put back to older states, too, and other rules apply than those below
(`restores`): there are two topics, and no steps of the clock. In some of these worlds the topics
share express objects, messages expire, or a pipeline merges objects.

In a third of the worlds there are two or three topics, which share express objects
(`express_part`): every turn is about one of them, and all of them are looked at after it.

In half of the worlds the clock of the machines steps, by minutes to decades, and is set right again
or confirmed; machines are suspended past their leases, and producers send any publish time. The
bucket's own clock is right, and so is that of a machine that starts for the first time.

What is checked, by looking at the stores directly after every turn (`Observer`) and by reading the
whole topic through a chained reader after every opening (`TierWorld.check_opened`):

- a message acknowledged at a level that survives what happened is there, once, unchanged: `written`
  a kill, `synced` a power cut, `tiered` the loss of the disk;
- what is there was sent, at that offset, by an owner that had the right to;
- descriptors follow each other without a hole or an overlap, each names an object that exists, with
  its size and checksum, and with the messages that were sent;
- `trimmed` ≤ `tiered` ≤ `synced` ≤ `written` ≤ `next`;
- an owner that was fenced changes nothing, and acknowledges nothing; nor does a pipeline change
  anything whose lease has ended;
- objects may be replaced by one with the messages of all of them;
- what a node had made durable and could not upload stays on its disk, in files set aside;
- nothing that was acknowledged at the topic's level, or delivered, is missing after a claim without
  a take-over; no such claim happens without the proof;
- no offset is delivered twice with other bytes, unless a take-over, or a power cut at the level
  `written`, was between; what is delivered of a `tiered` topic is in the bucket, also if a fenced
  owner or one without the right to write delivers it;
- no cursor is ahead of the topic's end after an opening;
- only bucket retention takes messages out of a topic, and only the oldest ones;
- nothing is deleted by age, messages or garbage, that is younger, by the time since it really came;
- a deleted topic leaves nothing behind, and nothing of it comes back;
- when the faults are over, uploads catch up, retention works and garbage goes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Final

from ister.base import failpoints
from ister.base.clock_guard import STEP_SECONDS
from ister.base.model import AckLevel, Codec, TopicName, TopicState
from ister.bucket.names import (
    TOPICS_PREFIX,
    TopicKeys,
    object_key,
    objects_prefix,
    parse_object_id,
)
from ister.config import Config, load_config
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    CorruptDataError,
    FencedError,
    InvariantError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
    WaitsForDiskError,
)
from ister.format.crc import crc32
from ister.format.descriptor import (
    FORMAT_EXPRESS,
    ObjectDescriptor,
    decode_descriptor,
    format_checksum,
)
from ister.format.frame import scan_frames
from ister.format.records import (
    Progress,
    SealedState,
    TopicRecord,
    decode_pointer,
    decode_progress,
    decode_sealed,
    decode_topic,
    encode_progress,
)
from ister.metadata.base import Put
from ister.topic.log import Log
from ister.topic.message import MessageBatch
from ister.topic.read_only import ReadOnlyTopic
from ister.topic.reader import Reader
from ister.topic.topic import Topic
from tests.sim.express_part import Rounds, Sharing, check_footer, read_run
from tests.sim.outsider import OUTSIDE_POINTS, Outsider
from tests.sim.restores import REFUSALS, Restores
from tests.sim.world import (
    BrokenPromiseError,
    InlineSchedule,
    other_processes,
    replay,
    replayable,
    seeded_names,
)
from tests.support.clock import ManualClock
from tests.support.memory_fs import MemoryFileSystem, SimulatedCrash, _Directory
from tests.support.memory_metadata import MemoryMetadata
from tests.support.memory_store import MemoryObjectStore

TOPIC: Final = "/ns/a"
SHARING_SHARE: Final = 0.33
"""Of the worlds, in which topics share express objects."""
LEASE_SECONDS: Final = 5
GRACE_MINUTES: Final = 2
LEVELS: Final = ("synced", "tiered", "written")
_RANKS: Final = ("memory", "written", "synced", "tiered")
_CHANGES: Final = frozenset({"put", "delete", "delete_prefix", "transact"})
_LATE_SECONDS_MAX: Final = 30.0
# Batches are no part of these worlds; `tests/unit/topic/test_batches.py` crashes them.
PLAIN_POINTS = sorted(name for name in failpoints.FAILPOINTS if name.startswith(("tier.", "wal.")))
EXPRESS_POINTS = sorted(name for name in failpoints.FAILPOINTS if name.startswith("express."))
POINTS = [*PLAIN_POINTS, *EXPRESS_POINTS]
_AROUND_A_COMMIT: Final = (
    "tier.after_claim",
    "tier.before_complete",
    "tier.after_complete",
    "tier.before_commit",
    "tier.after_commit",
    "tier.after_mark_deleting",
    "tier.before_swap",
    "tier.after_expire",
)
_AROUND_AN_EXPRESS_COMMIT: Final = (
    "express.before_put",
    "express.after_put",
    "express.after_put",
    "express.before_commit",
    "express.after_commit",
)
# What leads to points that are rarely come by, where a world is made for one.
_LEADING: Final = {
    "tier.after_replace": ("rot", "repair", "upload"),
    "tier.after_expire": ("expire", "idle", "upload"),
    "tier.after_delete_object": ("expire", "idle", "delete"),
    "tier.after_mark_deleting": ("delete",),
    "tier.after_seal": ("seal",),
    "tier.after_remove_local": ("seal",),
    "tier.after_set_aside": ("idle", "upload"),
    "wal.after_remove_file": ("trim", "upload"),
    "express.after_collect": ("write", "expire", "idle", "collect_express"),
    "express.before_resort": ("write", "resort"),
    "express.after_resort": ("write", "resort"),
}


_STEPS_MS: Final = tuple(
    1000 * seconds * sign
    for seconds in (120, 3600, 30 * 86_400, 20 * 365 * 86_400)
    for sign in (1, -1)
)
_YEAR_2099_MS: Final = 4_070_908_800_000


# -- what is promised -----------------------------------------------------------------------


@dataclass
class Promises:
    """What one incarnation of the topic owes its users."""

    sent: dict[int, set[bytes]] = field(default_factory=dict)
    """Every payload that an owner with the right to has given this offset."""
    written: dict[int, bytes] = field(default_factory=dict)
    """Acknowledged at `written`: survives a kill."""
    durable: dict[int, bytes] = field(default_factory=dict)
    """Acknowledged at `synced`, seen by a reader, or found by a recovery: survives a power cut."""
    tiered: dict[int, bytes] = field(default_factory=dict)
    """Acknowledged at `tiered`, or in a committed object: survives the loss of the disk."""
    promised: dict[int, bytes] = field(default_factory=dict)
    """Acknowledged at the topic's level or a higher one, or delivered: survives what the level
    survives, and every claim without a take-over."""
    expired: int = 0
    """Below this, bucket retention has taken messages out."""
    given_up: dict[str, list[bytes]] = field(default_factory=dict)
    """By node: what was durable there alone when another one took the topic."""

    def give_up_from(self, start: int, node: str) -> None:
        """Another node goes on from `start`, and the messages behind it were not handed over."""
        for offset in self.tiered:
            if offset >= start:
                raise BrokenPromiseError(f"{offset} was tiered, and the new owner is at {start}")
        lost = [payload for offset, payload in self.durable.items() if offset >= start]
        self.given_up.setdefault(node, []).extend(lost)
        # What was sent there may be in an object that is adopted.
        for promised in (self.written, self.durable, self.promised):
            for offset in [o for o in promised if o >= start]:
                del promised[offset]

    def check(self, found: dict[int, bytes], *, first: int, next_offset: int, kill: bool) -> None:
        """Compares a topic that was just opened with what was promised."""
        owed = {**self.tiered, **self.durable, **(self.written if kill else {})}
        for offset, payload in owed.items():
            if offset < first:
                if offset >= self.expired:
                    raise BrokenPromiseError(f"{offset} was promised, the topic begins at {first}")
                continue
            if found.get(offset) != payload:
                raise BrokenPromiseError(
                    f"{offset} was {payload[:20]!r} and is {found.get(offset, b'gone')[:20]!r}"
                )
        if first > self.expired:
            raise BrokenPromiseError(f"begins at {first}, and only {self.expired} have expired")
        if sorted(found) != list(range(first, next_offset)):
            raise BrokenPromiseError(f"a hole between {first} and {next_offset}: {sorted(found)}")
        for offset, payload in found.items():
            if payload not in self.sent.get(offset, ()):
                raise BrokenPromiseError(f"{offset} holds {payload[:20]!r}, never sent there")
        self.durable.update(found)
        self.written.clear()
        # A power cut may have taken back what was promised at `written`.
        self.promised = {o: p for o, p in self.promised.items() if found.get(o, p) == p}
        for offset in [o for o in self.promised if o >= next_offset]:
            del self.promised[offset]

    def deliver(self, offset: int, payload: bytes) -> None:
        """Somebody has got a message: it stays what it was."""
        if self.promised.setdefault(offset, payload) != payload:
            raise BrokenPromiseError(
                f"{offset} was delivered as {self.promised[offset][:20]!r}, and as {payload[:20]!r}"
            )

    def keep_from(self, start: int) -> None:
        """Another node goes on from `start` because nothing promised is behind it."""
        for offset, payload in self.promised.items():
            if offset >= start:
                raise BrokenPromiseError(f"{offset}, {payload[:20]!r}, was not in the bucket")


# -- what the stores hold -------------------------------------------------------------------


@dataclass
class Observer:
    """Looks at the stores after every turn, without the code under test, and judges what it sees.

    Owns what is known about the topic: its record, its seal, its descriptors, and the promises.
    """

    meta: MemoryMetadata
    store: MemoryObjectStore
    keys: TopicKeys
    promises: Promises = field(default_factory=Promises)
    record: TopicRecord | None = None
    sealed: SealedState | None = None
    described: dict[int, ObjectDescriptor] = field(default_factory=dict)
    rotten: set[str] = field(default_factory=set)
    """Objects that were lost or damaged on purpose and not yet uploaded again."""
    failovers: int = 0
    """Claims without a take-over, because the bucket had everything."""
    failovers_by_mark: int = 0
    """Claims of a topic that was marked as idle."""
    takers: set[str] = field(default_factory=set)
    """The nodes that may be taking the topic over."""
    check_age: Callable[[bytes], None] = lambda payload: None
    """Raises for a payload that is too young to expire."""
    ever_tiered: dict[str, dict[int, bytes]] = field(default_factory=dict)
    """By incarnation: what has been in the bucket, whatever became of it since."""
    may_adopt: bool = False
    """Whether the topic was opened since the last look: its owner may have added objects of its
    predecessor."""
    judges: bool = True
    """Off: takes what it sees as it is, where stores go back."""
    _verified: dict[str, bytes] = field(default_factory=dict)
    _revision: int = -1

    @property
    def epoch(self) -> int:
        """Of the owner with the right to write."""
        return self.record.epoch if self.record is not None else 0

    @property
    def writer(self) -> str | None:
        """The node that wrote last."""
        record = self.record
        return record.lineage[-1].node if record is not None and record.lineage else None

    @property
    def is_open(self) -> bool:
        """Whether there is a topic."""
        return self.record is not None and self.record.is_open

    @property
    def end(self) -> int:
        """The first offset that no committed object holds."""
        return max((d.end for d in self.described.values()), default=0)

    def look(self, *, may_expire: bool = True) -> None:
        """Takes in what has changed, and checks it."""
        if not self.judges:
            found = self.meta.get(self.keys.record)
            self.record = None if found is None else decode_topic(found.value, key=found.key)
            return
        if self.meta.revision != self._revision:
            self._revision = self.meta.revision
            self._look_at_record()
            if self.is_open:
                self._look_at_descriptors(may_expire=may_expire)
        self._look_at_objects()

    def _look_at_record(self) -> None:
        before, sealed_before = self.record, self.sealed
        found = self.meta.get(self.keys.record)
        self.record = None if found is None else decode_topic(found.value, key=found.key)
        found = self.meta.get(self.keys.sealed)
        self.sealed = None if found is None else decode_sealed(found.value, key=found.key)
        now = self.record
        if before is not None and (now is None or now.epoch < before.epoch):
            raise BrokenPromiseError(f"the record went from {before} to {now}")
        if now is None or not now.is_open:
            self._forget()
            return
        if before is None or before.incarnation != now.incarnation:
            if before is not None and before.is_open:
                raise BrokenPromiseError("a topic was made anew that had not been deleted")
            self._forget()
            return
        last = now.lineage[-1] if now.lineage else None
        if last is not None and before.lineage and last != before.lineage[-1]:
            if sealed_before is None:
                # An object may have been committed between the look at the end and the claim.
                start = max(last.start, self.end)
                if self.is_whole(before):
                    self.promises.keep_from(start)
                    self.failovers += last.node not in self.takers
                    self.failovers_by_mark += before.acked_end is not None
                elif last.node not in self.takers:
                    raise BrokenPromiseError(f"{last.node} has claimed what {before} keeps")
                self.promises.give_up_from(start, before.lineage[-1].node)
            elif last.start != sealed_before.next_offset:
                raise BrokenPromiseError(f"sealed at {sealed_before.next_offset}, goes on: {last}")

    def is_whole(self, record: TopicRecord) -> bool:
        """Whether a record proves that the bucket has everything, by the rules and not the code."""
        if record.ack is AckLevel.TIERED:
            return True
        is_marked = record.acked_end is not None and record.acked_epoch == record.epoch
        return is_marked and record.acked_end <= self.end

    def _forget(self) -> None:
        """The topic is gone, or begins anew: nothing is owed."""
        self.promises = Promises()
        self.described = {}
        self.rotten = set()
        self._verified = {}

    def _look_at_descriptors(self, *, may_expire: bool) -> None:
        found = self.meta.range(self.keys.objects, end=self.keys.objects_end)
        now: dict[int, ObjectDescriptor] = {}
        at: int | None = None
        for entry in found:
            described = decode_descriptor(entry.value, key=entry.key)
            if entry.key != self.keys.descriptor(described.start):
                raise BrokenPromiseError(f"{entry.key} describes {described.start}")
            if at is not None and described.start != at:
                raise BrokenPromiseError(f"descriptors: {at} is followed by {described.start}")
            at = described.end
            now[described.start] = described
        current = self.meta.get(self.keys.current)
        last = max(now, default=None)
        if current is not None:
            pointer = decode_pointer(current.value, key=current.key)
            if last is None or not pointer.names(last, now[last].end):
                raise BrokenPromiseError(f"cur is {current.value!r}, the newest object {last}")
        before, self.described = self.described, now
        self._look_for_removed(before, now, may_expire=may_expire)
        for start, described in now.items():
            if before.get(start) != described:
                self._check_new(before.get(start), described)

    def _look_for_removed(
        self,
        before: dict[int, ObjectDescriptor],
        now: dict[int, ObjectDescriptor],
        *,
        may_expire: bool,
    ) -> None:
        merged = [new for new in now.values() if _is_merged(new)]
        removed = sorted(
            start
            for start in before.keys() - now.keys()
            if not any(new.start <= start and before[start].end <= new.end for new in merged)
        )
        for start in before.keys() - now.keys():
            self.rotten.discard(before[start].object_id)
        if not removed:
            return
        if not now or removed[-1] > min(now):
            raise BrokenPromiseError(f"the objects at {removed} are gone, of {sorted(before)}")
        if not may_expire:
            raise BrokenPromiseError(f"the objects at {removed} expired, and nothing expires")
        self.promises.expired = max(self.promises.expired, min(now))
        for offset in [o for o in self.promises.tiered if o < min(now)]:
            self.check_age(self.promises.tiered.pop(offset))

    def _check_new(self, before: ObjectDescriptor | None, described: ObjectDescriptor) -> None:
        record = self.record
        is_adopted = self.may_adopt and record is not None and described.epoch < record.epoch
        if (
            record is None
            or described.incarnation != record.incarnation
            or (described.epoch != record.epoch and not is_adopted)
        ):
            raise BrokenPromiseError(f"{described} came from another owner than {record}")
        if before is not None:
            has_grown = _is_merged(described) and before.end < described.end
            if before.end != described.end and not has_grown:
                raise BrokenPromiseError(f"{before} became {described}")
            self.rotten.discard(before.object_id)
        self._check_content(described)

    def _check_content(self, described: ObjectDescriptor) -> None:
        key = object_key(self.keys.topic, described.object_id)
        found = read_run(self.store, key)
        if found is None:
            raise BrokenPromiseError(f"{described.object_id} is described and does not exist")
        whole, data = found
        if len(data) != described.size_bytes:
            raise BrokenPromiseError(f"{described.object_id}: {len(data)} bytes, {described}")
        if described.checksum != format_checksum(crc32(data)):
            raise BrokenPromiseError(f"{described.object_id} has another checksum")
        scan = scan_frames(data, expected_offset=described.start)
        if scan.end != len(data) or len(scan.starts) != described.end - described.start:
            raise BrokenPromiseError(f"{described.object_id} holds other frames than described")
        for offset, position in described.offset_index:
            if scan.starts[offset - described.start] != position:
                raise BrokenPromiseError(f"{described.object_id}: a wrong index entry {offset}")
        ends = [*scan.starts[1:], scan.end]
        codec = described.codec or Codec.BINCODE2
        for message in MessageBatch(data, scan.starts, ends, described.start, codec):
            self._take_tiered(message.offset, message.payload)
        if described.format == FORMAT_EXPRESS:
            check_footer(whole, self.keys.topic, described)
        self._verified[key] = whole

    def _take_tiered(self, offset: int, payload: bytes) -> None:
        promises = self.promises
        for promised in (promises.durable, promises.tiered):
            if promised.get(offset, payload) != payload:
                raise BrokenPromiseError(f"{offset} went to the bucket as {payload[:20]!r}")
        if payload not in promises.sent.get(offset, ()):
            raise BrokenPromiseError(f"{offset} in the bucket was never sent: {payload[:20]!r}")
        promises.tiered[offset] = payload
        self.ever_tiered.setdefault(self.record.incarnation, {})[offset] = payload

    def _look_at_objects(self) -> None:
        if not self.is_open:
            return
        for described in self.described.values():
            key = object_key(self.keys.topic, described.object_id)
            found = read_run(self.store, key)
            if found is not None and found[0] is self._verified.get(key):
                continue
            if described.object_id in self.rotten and (
                found is None or format_checksum(crc32(found[1])) != described.checksum
            ):
                continue
            self._check_content(described)
            self.rotten.discard(described.object_id)


@dataclass
class View:
    """A topic of a world, and what is known about it."""

    text: str
    name: TopicName
    ack: str
    seen: Observer


class _RightClock:
    """The clock of the bucket, which nobody sets."""

    def __init__(self, world: TierWorld) -> None:
        self._world = world
        self.monotonic = world.clock.monotonic
        self.boottime = world.clock.boottime

    def now_ns(self) -> int:
        return self._world.clock.now_ns() - self._world.wrong_ms * 1_000_000


# -- who lives ------------------------------------------------------------------------------


@dataclass
class Plan:
    """Where a life ends: at the operation number `left` on `where`, or at a failpoint."""

    where: str = ""
    left: int = 0
    interrupt_in: int = 0


@dataclass
class Opened:
    """What a process knows of a topic."""

    topic: Topic | None = None
    current: dict[int, bytes] = field(default_factory=dict)
    """What this process has appended or found."""
    readers: list[Reader] = field(default_factory=list)
    has_cut_expiry: bool = False
    """Whether an expiry got no answer: what is on record as going may be gone, and is refused
    to readers."""


class Process:
    """One life of a node."""

    def __init__(self, node: Node, plan: Plan, at: Callable[[], str] = lambda: TOPIC) -> None:
        """A process; `at` tells which topic a turn is about."""
        self.node = node
        self.plan = plan
        self.log: Log | None = None
        self.schedule = InlineSchedule()
        self.rounds: Rounds | None = None
        self.states: dict[str, Opened] = {}
        self._at = at
        self.is_dead = False
        self.had_fault = False
        self.has_unknown = False
        """Whether a change of this life has landed, or may yet land, without anybody knowing."""

    @property
    def state(self) -> Opened:
        """What it knows of the topic that this turn is about."""
        return self.states.setdefault(self._at(), Opened())

    @property
    def topic(self) -> Topic | None:
        return self.state.topic

    @property
    def current(self) -> dict[int, bytes]:
        return self.state.current

    @property
    def readers(self) -> list[Reader]:
        return self.state.readers

    @readers.setter
    def readers(self, readers: list[Reader]) -> None:
        self.state.readers = readers


@dataclass
class Node:
    """A machine."""

    number: int
    fs: MemoryFileSystem
    process: Process | None = None
    id: str | None = None
    cut: set[str] = field(default_factory=set)
    """Topics that were not checked since a life ended with the power."""


class TierWorld:
    """See the module header."""

    def __init__(
        self,
        seed: int,
        *,
        failpoint: str | None = None,
        shares: bool | None = None,
        restores: bool = False,
    ) -> None:
        """A world.

        Args:
            seed: Of all chances.
            failpoint: Where lives end.
            shares: Whether topics share express objects; by default, the seed tells.
            restores: Whether stores are put back to older states.
        """
        # Of its own: the other worlds are what they were before stores were put back in these.
        beside = random.Random(f"beside restores {seed}")
        if restores:
            shares = beside.random() < 0.4
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.failpoint = failpoint
        # Of its own: worlds without express objects are what they were before there were any.
        share_rng = random.Random(f"express {seed}")
        if shares is None:
            is_chosen = share_rng.random() < SHARING_SHARE
            shares = is_chosen if failpoint is None else failpoint in EXPRESS_POINTS
        self.clock = ManualClock()
        # Of its own: worlds without steps are what they were before there were any.
        self.clock_rng = random.Random(f"clock {seed}")
        self.steps_clock = self.clock_rng.random() < 0.5 and failpoint is None and not restores
        self.wrong_ms = 0
        """How far the machines' clock is ahead."""
        self.was_corrected = False
        """Whether the clock was wrong from the beginning, and then set right."""
        self.steps = 0
        self.arrived: dict[bytes, float] = {}
        """When each payload came, in boottime."""
        self.made: dict[str, float] = {}
        """When each object was written, likewise."""
        self.finalize = rng.choice(("direct", "direct", "copy"))
        self.store = MemoryObjectStore(
            clock=_RightClock(self),
            supports_copy=rng.random() < 0.7,
            half_written_visible=self.finalize == "copy" and rng.random() < 0.5,
        )
        self.meta = MemoryMetadata(self.clock)
        self.meta.close = lambda: None  # it outlives the processes
        self.ack = rng.choice(LEVELS)
        self.expires = rng.random() < 0.3 or "expire" in _LEADING.get(failpoint or "", ())
        # A clock that steps matters where something becomes too old.
        self.expires = self.expires or (self.steps_clock and self.clock_rng.random() < 0.7)
        if restores:
            self.expires = beside.random() < 0.3
        self.fault_rate = rng.choice((0.0, 0.0, 0.02, 0.08))
        self.config = self._make_config(share_rng if shares else None)
        self.nodes = [Node(number, self._make_disk()) for number in range(2)]
        self.views = [
            self._make_view(name, ack)
            for name, ack in zip(
                ("/ns/a", "/ns/b", "/ns/c")[: share_rng.choice((2, 2, 3)) if shares else 1],
                (self.ack, share_rng.choice(LEVELS), "tiered"),
                strict=False,
            )
        ]
        self.at = self.views[0]
        """The topic that a turn is about."""
        self.sharing = Sharing(self, share_rng, judges=not restores) if shares else None
        self.outsider: Outsider | None = None
        has_outsider = rng.random() < 0.7 or failpoint in OUTSIDE_POINTS
        if beside.random() < 0.4 if restores else has_outsider:
            self.outsider = Outsider(self, self._make_outside)
        self.restores: Restores | None = None
        if restores:
            self._use_restores()
        self.adopting: set[str] = set()
        """The topics that were opened in this turn."""
        self.turns = self.sent = self.crashes = self.takeovers = self.faults = 0
        self.histories = 0
        """How often a history was served without a claim."""
        self.crashed_at: set[str] = set()
        self._running: list[Process | None] = []
        self._depth = 0
        self._late_since: float | None = None
        self.trace: Callable[[str], None] = lambda text: None
        self.store.before = lambda kind, key: self._operation("store", "before", kind)
        self.store.after = self._after_store
        self.meta.before = lambda kind, key: self._operation("meta", "before", kind)
        self.meta.after = lambda kind, key: self._operation("meta", "after", kind)

    def _use_restores(self) -> None:
        levels = self.rng.choice((("synced", "tiered"), ("tiered", "synced"), ("synced", "synced")))
        self.views = [
            self._make_view(*both) for both in zip(("/ns/a", "/ns/b"), levels, strict=True)
        ]
        for view in self.views:
            view.seen.judges = False
        self.fault_rate = self.rng.choice((0.0, 0.0, 0.0, 0.02))
        self.at = self.views[0]
        self.restores = Restores(
            self.seed,
            meta=self.meta,
            store=self.store,
            machines=lambda: self.nodes,
            names=[view.text for view in self.views],
            stop=self._stop,
            clock=self.clock,
            quietly=self._quietly,
            trace=self._say,
            upload=self._upload_restored,
            expires_after=60.0 if self.expires else None,
        )

    def _upload_restored(self, node: Node, topic: Topic) -> None:
        """Uploads what a topic of the level `tiered` has, so that it can be acknowledged."""
        if topic.bucket.uploads.is_express:
            topic.flush()
            self.sharing.drain(node.process, rounds_max=3)
        else:
            topic.upload()

    def _say(self, text: str) -> None:
        self.trace(text)

    def _stop(self, node: Node) -> None:
        if node.process is not None:
            node.process.is_dead = True
        node.process = None
        node.fs.kill()

    @property
    def seen(self) -> Observer:
        """What is known of the topic that a turn is about."""
        return self.at.seen

    def _make_view(self, text: str, ack: str) -> View:
        name = TopicName.parse(text)
        seen = Observer(self.meta, self.store, TopicKeys("/danube", name))
        seen.check_age = self._check_expired_age
        return View(text, name, ack, seen)

    @contextmanager
    def _viewing(self, view: View) -> Iterator[None]:
        before, self.at = self.at, view
        try:
            yield
        finally:
            self.at = before

    def _make_config(self, share_rng: random.Random | None) -> Config:
        rng = self.rng
        express: dict[str, object] = {"engine": "none"}
        if share_rng is not None:
            is_all = share_rng.random() < 0.6
            resort_seconds = share_rng.choice((1, 1, 30, 300))
            express = {
                "engine": "auto",
                "express": {"all_topics": is_all, "resort_seconds": resort_seconds},
            }
        return load_config(
            {
                "storage": {
                    "mode": "wal_cloud",
                    "ack": self.ack,
                    "wal": {
                        "dir": "/data/wal",
                        "rotate_max_bytes": 4096,
                        "rotate_max_seconds": 30,
                        "cache_capacity": rng.choice((1, 3, 64)),
                        "fsync_max_batch_bytes": rng.choice((1, 2000, 1 << 20)),
                        "stream_chunk_size": 65536,
                        "retention": rng.choice(
                            (
                                {"time_minutes": 0, "size_mb": None},
                                {"time_minutes": 1, "size_mb": None},
                                {"time_minutes": None, "size_mb": 0},
                            )
                        ),
                    },
                    "uploader": {
                        **express,
                        "max_object_bytes": rng.choice((4096, 4096, 65536)),
                        "max_object_seconds": rng.choice((1, 30, 300)),
                        "index_every_messages": rng.choice((1, 2, 1000)),
                        "stream_chunk_size": 65536,
                        "finalize": self.finalize,
                    },
                    "cloud": {
                        "backend": "memory",
                        "orphan_grace_minutes": GRACE_MINUTES,
                        "retention": {"time_minutes": 1 if self.expires else None},
                    },
                    "cloud_reader": {
                        "fetch_chunk_size": 65536,
                        "read_ahead": False,
                        "enable_ranged_reads": rng.random() < 0.8,
                    },
                    "metadata": {"backend": "memory", "lease_ttl_seconds": LEASE_SECONDS},
                }
            },
            {},
        )

    def _make_disk(self) -> MemoryFileSystem:
        fs = MemoryFileSystem()
        fs.now_ms = lambda: self.clock.now_ns() // 1_000_000
        return fs

    # -- the clock --------------------------------------------------------------------------

    def step_clock(self) -> None:
        """The clock of the machines is set: wrong, right again, or once and for all."""
        rng = self.clock_rng
        if self.wrong_ms and rng.random() < 0.6:
            self.set_clock_right()
            return
        jump_ms = rng.choice(_STEPS_MS)
        if self.clock.now_ns() // 1_000_000 + jump_ms < 0:
            return  # no machine's clock is before 1970
        self.trace(f"the clock steps by {jump_ms / 1000:.0f} s")
        self.steps += 1
        self.clock.jump_wall(jump_ms)
        self.wrong_ms += jump_ms
        is_correction = self.wrong_ms == jump_ms > 0 and rng.random() < 0.3
        # A node that starts for the first time afterwards knows nothing of it, as documented.
        if is_correction and all(node.id is not None for node in self.nodes):
            self.trace("which is right: it was wrong before")
            self.was_corrected = True
            for key, entry in self.store._objects.items():
                # The bucket's clock was not.
                modified_at = entry.modified_at + self.wrong_ms / 1000
                self.store._objects[key] = replace(entry, modified_at=modified_at)
            self.wrong_ms = 0
        self._look_at_clocks()

    def set_clock_right(self) -> None:
        """Undoes what the steps have done."""
        if self.wrong_ms:
            self.trace("the clock is set right")
        self.clock.jump_wall(-self.wrong_ms)
        self.wrong_ms = 0
        self._look_at_clocks()

    def _look_at_clocks(self) -> None:
        """What every process does several times a second, and an operator who reads its alarms."""
        for node in self.nodes:
            if node.process is not None and node.process.log is not None:
                self._look_at_clock(node.process)

    def _look_at_clock(self, process: Process) -> None:
        with self._quietly():
            if process.log.stores.node_clock.check() is not None and not self.wrong_ms:
                process.log.confirm_clock()

    def _check_age(self, what: str, since: float | None, limit_seconds: float) -> None:
        age = None if since is None else self.clock.boottime() - since
        # Smaller steps than these are corrections.
        if age is not None and age < limit_seconds - STEP_SECONDS - 1:
            raise BrokenPromiseError(f"{what} was deleted after {age:.0f} s")

    def _check_expired_age(self, payload: bytes) -> None:
        minutes = self.config.storage.cloud.retention.time_minutes
        self._check_age(f"{payload[:20]!r}", self.arrived.get(payload), (minutes or 0) * 60)

    def _after_store(self, kind: str, key: str) -> None:
        if kind in ("close", "copy", "put"):
            self.made[key] = self.clock.boottime()
        if self.sharing is not None and kind == "put":
            self.sharing.note_put(key)
        if self.sharing is not None and kind == "delete":
            self.sharing.note_delete(key)
        self._operation("store", "after", kind)

    # -- faults -----------------------------------------------------------------------------

    def _operation(self, where: str, when: str, kind: str) -> None:
        """Every operation of every process comes through here, before and after it happens."""
        process = self._running[-1] if self._running else None
        if process is None:
            return
        if process.is_dead:
            raise SimulatedCrash(kind)
        if when == "after" and kind == "transact" and self.outsider is not None:
            self.outsider.check_change(process)
        plan = process.plan
        if plan.where == where:
            plan.left -= 1
            if plan.left <= 0:
                self._die(process, f"{where}: {when} {kind}")
        if where == "fs":
            return
        if plan.interrupt_in and self._depth == 0:
            plan.interrupt_in -= 1
            if not plan.interrupt_in:
                self._interrupt(process, is_putting=kind == "put")
        if self.fault_rate and self.rng.random() < self.fault_rate:
            self._fail(process, where, when, kind)
        if when == "before" and kind == "transact" and self.outsider is not None:
            self.outsider.note_change(process)

    def _die(self, process: Process, where: str) -> None:
        self.trace(f"node {process.node.number}: crash at {where}")
        process.is_dead = True
        raise SimulatedCrash(where)

    def _fail(self, process: Process, where: str, when: str, kind: str) -> None:
        self.faults += 1
        process.had_fault = True
        self.trace(f"node {process.node.number}: fault {when} {where} {kind}")
        if where == "meta" and kind in _CHANGES:
            fate = self.rng.random()
            process.has_unknown = True
            if when == "after" or fate < 0.3:
                raise CommitUnknownError(f"no answer to {kind}")
            if fate < 0.6:
                self._late_since = self._late_since or self.clock.monotonic()
                self.meta.delay_next_change()
                return
        raise UnavailableError(f"no answer to {kind}")

    def _arm_failpoint(self, process: Process, name: str, visit: int, *, is_crash: bool) -> None:
        """Has the process end, or be interrupted, when it comes by a named point."""
        left = visit

        def act() -> None:
            nonlocal left
            if self._running and self._running[-1] is process and not process.is_dead:
                left -= 1
                if left <= 0 and is_crash:
                    self.crashed_at.add(name)
                    self._die(process, name)
                elif left == 0 and not self._depth:
                    self._interrupt(process)

        failpoints.arm(name, act)

    def _interrupt(self, process: Process, *, is_putting: bool = False) -> None:
        """Time passes, and the other node has its turn, in the middle of this one's operation."""
        self._depth += 1
        self.trace(f"node {process.node.number}: interrupted")
        self.look()
        if self.restores is not None:
            self.restores.maybe_act(is_within=True)
        is_node = process.node in self.nodes
        other = self.nodes[1 - process.node.number] if is_node else self._whose_turn()
        try:
            with other_processes():
                self._let_others_act(process, other, is_putting=is_putting)
        finally:
            self._depth -= 1
            self.trace(f"node {process.node.number}: goes on")
        if process.is_dead:
            raise SimulatedCrash("interrupted")

    def _let_others_act(self, process: Process, other: Node, *, is_putting: bool) -> None:
        is_node = process.node in self.nodes
        if is_putting and self.sharing is not None:
            self.sharing.beside(process)
            self.look()
        self.pass_time(self.rng.choice((0.0, 1.0, 7.0, 7.0, 150.0)))
        if is_node and self.outsider is not None:
            for _ in range(self.rng.randrange(3)):
                self.outsider.turn()
        for _ in range(self.rng.randrange(1, 5)):
            self.turn(other)
        if self.rng.random() < 0.5:
            self.pass_time(self.rng.choice((1.0, 150.0, 150.0)))
            self.turn(other, self.rng.choice((self.collect, self.append, self.upload)))
            self.turn(other, self.rng.choice((self.collect, self.trim, self.upload)))
            if self.sharing is not None:
                self.turn(other, self.collect_express)

    def pass_time(self, seconds: float) -> None:
        """Moves the clock. Changes that are under way land, or are lost, before long."""
        now = self.clock.monotonic()
        if self._late_since is not None and (
            now + seconds - self._late_since > _LATE_SECONDS_MAX or self.rng.random() < 0.5
        ):
            self.deliver_late()
        if self.steps_clock and self.clock_rng.random() < 0.5:
            self.clock.suspend(seconds)
        else:
            self.clock.advance(seconds)

    def deliver_late(self) -> None:
        """What was under way to the metadata store lands there, or does not."""
        self._late_since = None
        with self._quietly():
            if self.rng.random() < 0.3:
                self.meta.delayed.clear()
            else:
                self.meta.deliver_delayed()
        self.look()

    # -- lives ------------------------------------------------------------------------------

    @contextmanager
    def _running_as(self, process: Process | None) -> Iterator[None]:
        self._running.append(process)
        try:
            yield
        finally:
            self._running.pop()

    def _quietly(self) -> contextmanager:
        """Nothing fails in here."""
        return self._running_as(None)

    def live(self, turns: int) -> None:
        """Lives through `turns` turns, heals, and checks that everything is in order."""
        logging.disable(logging.CRITICAL)
        if self.sharing is not None:
            self.sharing.use_transactions(self.sharing.topics_per_transaction)
        try:
            for _ in range(turns):
                self.turns += 1
                if self.steps_clock and self.clock_rng.random() < 0.1:
                    self.step_clock()
                with self._viewing(self._choose_view()):
                    if self.outsider is not None and self.rng.random() < 0.3:
                        self.outsider.turn()
                    else:
                        self.turn(self._whose_turn())
                if self.restores is not None:
                    self.restores.maybe_act()
                elif self.sharing is not None and self.sharing.rng.random() < 0.1:
                    self.check_recoverable()
            self.heal()
        finally:
            logging.disable(logging.NOTSET)
            failpoints.disarm()
            if self.sharing is not None:
                self.sharing.use_transactions()

    def _choose_view(self) -> View:
        if self.restores is not None:
            return self.rng.choice(self.views)
        return self.at if self.sharing is None else self.sharing.rng.choice(self.views)

    def check_recoverable(self) -> None:
        """Whether everything that is tiered could be recovered from the bucket alone."""
        with self._quietly():
            for view in self.views:
                self.sharing.check_recoverable(view)

    def _whose_turn(self) -> Node:
        """Mostly the owner's."""
        for node in self.nodes:
            if node.id is not None and node.id == self.seen.writer and self.rng.random() < 0.75:
                return node
        return self.rng.choice(self.nodes)

    def turn(self, node: Node, action: Callable[[Process], None] | None = None) -> None:
        """One thing that happens to a node."""
        process = node.process
        adopting, self.adopting = self.adopting, set()
        if process is None:
            self.start(node)
            self.adopting = adopting
            return
        if action is None:
            action = self._choose()
        self.trace(f"node {node.number}: {action.__name__}")
        process.had_fault = False
        try:
            with self._running_as(process):
                try:
                    action(process)
                except WaitsForDiskError:
                    self.consume(process)
        except SimulatedCrash:
            self.end_life(node)
        except IsterError as error:
            self._judge(process, error)
        finally:
            self.look()
            self.adopting = adopting
        if self.rng.random() < 0.5 and node.process is process:
            try:
                with self._running_as(process):
                    process.schedule.run()
            except SimulatedCrash:
                self.end_life(node)

    def look(self) -> None:
        """Compares the stores with what is known."""
        if self.restores is not None:
            self.restores.check_kept()
        for view in self.views:
            with self._quietly(), self._viewing(view):
                self.seen.may_adopt = view.text in self.adopting
                self.seen.look(may_expire=self.expires)
                for node in self.nodes if self.seen.judges else ():
                    process = node.process
                    if process is not None and process.topic is not None and self.is_right(process):
                        _check_order(process.topic, self.seen.end)

    def start(self, node: Node) -> None:
        """A process begins, and may end before it has begun."""
        self.trace(f"node {node.number}: start")
        if node.id is None:
            # Nothing to compare the clock with: a first start with a wrong one is not noticed.
            self.set_clock_right()
        elif self.steps_clock and self.clock_rng.random() < 0.2:
            self.step_clock()  # while it did not run
        process = node.process = self._make_process(node, self._make_plan())
        node.fs.before = lambda kind, path: self._operation("fs", "before", kind)
        self._arm_some(process)
        if self.failpoint is not None and "_cut" in self.failpoint:
            # A torn tail comes first.
            self._arm_failpoint(process, "wal.after_write", 2, is_crash=True)
        try:
            with self._running_as(process):
                self._open_log(process)
                self.open_topic(process)
        except SimulatedCrash:
            self.end_life(node)
        except IsterError as error:
            if process.log is None:
                node.process = None
            self._judge(process, error)
        finally:
            self.look()

    def _arm_some(self, process: Process) -> None:
        wanted = self.failpoint
        if wanted in OUTSIDE_POINTS and process.node in self.nodes:
            return
        if wanted is None and self.rng.random() >= 0.4:
            return
        is_crash = wanted is not None or self.rng.random() < 0.6
        names = PLAIN_POINTS if is_crash else _AROUND_A_COMMIT
        if self.sharing is not None and self.sharing.rng.random() < 0.5:
            names = EXPRESS_POINTS if is_crash else _AROUND_AN_EXPRESS_COMMIT
        if process.node not in self.nodes:
            names = [name for name in names if not name.startswith("wal.")]
        name = wanted or self.rng.choice(names)
        visit = 1 if name in _LEADING or "recovery" in name else self.rng.randrange(1, 4)
        self._arm_failpoint(process, name, visit, is_crash=is_crash)

    def _make_outside(self) -> Process:
        """A process of the pipeline, on a machine of its own."""
        node = Node(len(self.nodes), self._make_disk())
        process = self._make_process(node, self._make_plan())
        self._arm_some(process)
        return process

    def _make_process(self, node: Node, plan: Plan) -> Process:
        return Process(node, plan, lambda: self.at.text)

    def _open_log(self, process: Process) -> None:
        process.log = Log(
            self.config,
            fs=process.node.fs,
            clock=self.clock,
            scheduler=process.schedule,
            objects=self.store,
            metadata=self.meta,
            background=False,
        )
        process.node.id = process.log.stores.membership.node
        if self.sharing is not None:
            self.sharing.open(process)
        self._look_at_clock(process)

    def _make_plan(self) -> Plan:
        rng = self.rng
        plan = Plan(interrupt_in=rng.randrange(1, 120) if rng.random() < 0.5 else 0)
        # Where stores go back, processes have to get somewhere before.
        if self.failpoint is None and rng.random() < (0.7 if self.restores is None else 0.3):
            plan.where = rng.choice(("fs", "store", "store", "meta", "meta"))
            plan.left = rng.randrange(1, 150 if plan.where == "fs" else 50)
        elif self.failpoint is not None and rng.random() < 0.3:
            plan.where, plan.left = "fs", rng.randrange(20, 80)
        return plan

    def end_life(self, node: Node, *, is_clean: bool = False) -> None:
        """The process is gone: killed, or with the power, or together with its disk."""
        node.process = None
        if is_clean:
            return
        self.crashes += 1
        if self.rng.random() < 0.3:
            node.fs.kill()
        else:
            node.cut = {view.text for view in self.views}
            node.fs.crash(self.rng)
        is_rotten = any(view.seen.rotten for view in self.views)
        if self.rng.random() < 0.06 and not is_rotten and not self.was_corrected:
            self.trace(f"node {node.number}: its disk is lost")
            node.fs = self._make_disk()
            node.id = None
        if self.restores is not None:
            self.restores.rebase()

    def is_right(self, process: Process) -> bool:
        """Whether a process has the topic, by what the metadata store says."""
        topic = process.topic
        return (
            topic is not None
            and topic.bucket is not None
            and self.seen.is_open
            and topic.bucket.owned.epoch == self.seen.epoch
        )

    def _judge(self, process: Process, error: IsterError) -> None:
        """Whether an error is one that callers have to expect now."""
        self.trace(f"node {process.node.number}: {error!r}")
        if isinstance(error, InvariantError):
            raise BrokenPromiseError(f"{error!r}") from error
        if self.restores is not None and isinstance(error, REFUSALS):
            return
        if process.had_fault and isinstance(error, UnavailableError):
            return
        with self._quietly():
            self.seen.look(may_expire=self.expires)
        topic = process.topic
        is_lapsed = (
            process.log is None
            or not process.log.stores.membership.is_valid
            # The process has a lease again, and has not got to the topic.
            or (topic is not None and not topic.bucket.owned.is_leased)
        )
        if not self.is_right(process):
            if isinstance(
                error, ConflictError | FencedError | NotFoundError | OffsetOutOfRangeError
            ) or (is_lapsed and isinstance(error, UnavailableError)):
                return
            if process.topic is not None and isinstance(error, CorruptDataError):
                return  # a reader of one that was fenced; the topic is another one by now
        elif is_lapsed and isinstance(error, UnavailableError | NotFoundError):
            return
        if isinstance(error, ConflictError | FencedError) and (
            process.had_fault or process.has_unknown
        ):
            return
        # Not as it is: this may be in the middle of the other node's work, which handles errors.
        raise BrokenPromiseError(f"{error!r}") from error

    def open_topic(self, process: Process, *, take_over: bool | None = None) -> Topic:
        """The topic, as its owner; the one that is open if there is one."""
        if take_over is None:
            take_over = self.rng.random() < 0.3 and not self.seen.rotten
        if self.restores is not None:
            return self._open_restored(process, take_over=take_over)
        node = process.node.id
        if self.seen.rotten and self.seen.writer not in (None, node):
            # The other node's copy is the only one; nobody goes on without it.
            raise ConflictError("an object is rotten")
        if not self.meta.delayed:
            self.seen.takers.discard(node)
        if take_over:
            self.seen.takers.add(node)
        self.adopting.add(self.at.text)
        try:
            topic = process.log.topic(
                self.at.text, create=True, ack=self.at.ack, take_over=take_over
            )
        except NotFoundError:
            if self.seen.record is None or self.seen.record.state != "deleting":
                raise
            process.log.delete(self.at.text)
            raise
        if topic is not process.topic:
            self.takeovers += take_over
            process.states[self.at.text] = Opened(topic)
            self.check_opened(process)
        return topic

    def _open_restored(self, process: Process, *, take_over: bool) -> Topic:
        restores, name = self.restores, self.at.text
        # An operator accepts first what was put back.
        take_over = take_over and not restores.is_pending
        before = restores.record(name)
        try:
            topic = process.log.topic(name, create=True, ack=self.at.ack, take_over=take_over)
        finally:
            now = restores.record(name)
            is_open = now is not None and now.is_open
            if take_over and is_open and (before is None or before.claim != now.claim):
                restores.note_taken_over(name, now.lineage[-1].start)
        if topic is not process.topic:
            process.states[name] = Opened(topic)
            restores.note_opened(process.node, name)
        return topic

    def check_opened(self, process: Process) -> None:
        """Reads everything, and compares it with what was promised."""
        topic = process.topic
        with self._quietly():
            self.look()
            if not self.is_right(process):
                return
            if topic.state is TopicState.QUARANTINED:
                raise BrokenPromiseError(f"a crash made the topic quarantined: {topic.damage}")
            node = process.node
            process.state.current = read_all(topic)
            self._check_cursor(topic)
            self.seen.promises.check(
                process.current,
                first=topic.earliest,
                next_offset=topic.wal.next,
                kill=self.at.text not in node.cut,
            )
            node.cut.discard(self.at.text)

    def _check_cursor(self, topic: Topic) -> None:
        cursor = self._cursor()
        if cursor is not None and cursor > topic.wal.next:
            raise BrokenPromiseError(f"the cursor is at {cursor}, the topic ends {topic.wal.next}")

    def _cursor(self) -> int | None:
        found = self.meta.get(self.seen.keys.progress("s"))
        return None if found is None else decode_progress(found.value, key=found.key).offset

    # -- work -------------------------------------------------------------------------------

    def _choose(self) -> Callable[[Process], None]:
        if self.restores is not None:
            return self._choose_beside_restores()
        actions: dict[Callable[[Process], None], float] = {
            self.append: 8,
            self.wait: 5,
            self.upload: 5 if self.outsider is None else 2.5,
            self.read: 3,
            self.follow: 2,
            self.consume: 2,
            self.mark: 3,
            self.idle: 3,
            self.renew: 3,
            self.trim: 2.5,
            self.release: 1.5,
            self.note_outside: 3 if self.outsider is not None else 0,
            self.save: 4 if self.outsider is not None else 0,
            self.expire: (1 if self.outsider is None and not self.steps_clock else 3)
            if self.expires
            else 0,
            self.collect: 1,
            self.rot: 0.8,
            self.repair: 0.5,
            self.seal: 0.8,
            self.delete: 0.25,
            self.close: 0.4,
            self.kill: 0.4,
        }
        if self.sharing is not None:
            actions[self.write] = 14
            actions[self.collect_express] = 1.5
            actions[self.resort] = 4
        for action in actions:
            if action.__name__ in _LEADING.get(self.failpoint or "", ()):
                actions[action] = 8
        return self.rng.choices(list(actions), list(actions.values()))[0]

    def _choose_beside_restores(self) -> Callable[[Process], None]:
        actions: dict[Callable[[Process], None], float] = {
            self.append: 14,
            self.upload: 4,
            self.mark: 3,
            self.idle: 1.5,
            self.renew: 5,
            self.trim: 2,
            self.release: 1,
            self.consume: 1,
            self.save: 2,
            self.collect: 3,
            self.seal: 3,
            self.delete: 0 if self.restores.is_pending else 2,
            self.close: 2,
            self.kill: 1,
        }
        if self.expires:
            actions[self.expire] = 4
        if self.sharing is not None:
            actions |= {self.write: 8, self.collect_express: 4, self.resort: 4}
        return self.rng.choices(list(actions), list(actions.values()))[0]

    def append(self, process: Process) -> None:
        topic = self.open_topic(process)
        if self.restores is not None:
            self.restores.append(process.node, self.at.text, topic, process.schedule)
            return
        for _ in range(self.rng.randrange(1, 6)):
            self.sent += 1
            payload = b"<%d>" % self.sent + bytes(self.rng.choice((0, 20, 400, 1500)))
            publish_time = None
            if self.steps_clock:
                publish_time = self.clock_rng.choice((None, None, 0, _YEAR_2099_MS))
            self.arrived[payload] = self.clock.boottime()
            # Here nobody else does it.
            topic.bucket.uploads.idle_mark.clear()
            if self.sharing is not None:
                self.sharing.incarnations[payload] = topic.bucket.owned.record.incarnation
            offset = topic.append(payload, publish_time=publish_time)
            process.current[offset] = payload
            if self.is_right(process):
                self.seen.promises.sent.setdefault(offset, set()).add(payload)

    def wait(self, process: Process) -> None:
        topic = self.open_topic(process)
        if topic.wal.next == topic.earliest:
            return
        offset = self.rng.randrange(topic.earliest, topic.wal.next)
        level = self.rng.choice(("synced", "synced", "written", "tiered"))
        if level == "tiered" and topic.bucket.uploads.is_express:
            self.sharing.drain(process, rounds_max=3)
            if topic.watermarks.tiered <= offset:
                return  # with threads, the caller would wait for another round
        elif level == "tiered":
            topic.upload()
        topic.wait(offset, level)
        self._note_ack(process, topic, offset, level)

    def _note_ack(self, process: Process, topic: Topic, offset: int, level: str) -> None:
        self.look()
        if not self.is_right(process):
            raise BrokenPromiseError(f"{offset} was acknowledged by an owner that was fenced")
        marks = topic.watermarks
        if getattr(marks, level) <= offset:
            raise BrokenPromiseError(f"told that {offset} is {level}, watermarks say {marks}")
        promises = self.seen.promises
        if level == "tiered" and self.seen.end <= offset:
            raise BrokenPromiseError(f"told that {offset} is tiered, the bucket: {self.seen.end}")
        promised = promises.written if level == "written" else promises.durable
        is_promised = _RANKS.index(level) >= _RANKS.index(str(topic.ack))
        for below in range(topic.earliest, offset + 1):
            promised.setdefault(below, process.current[below])
            if is_promised:
                promises.deliver(below, process.current[below])

    def mark(self, process: Process) -> None:
        """The owner marks the topic as idle, if it is."""
        topic = self.open_topic(process)
        if self.rng.random() < 0.5:
            topic.upload()
        topic.bucket.uploads.idle_mark.set()

    def upload(self, process: Process) -> None:
        topic = self.open_topic(process)
        target = topic.wal.next
        tiered = topic.upload()
        self.look()
        if (
            self.restores is None
            and self.is_right(process)
            and self.seen.end != target
            and tiered.end != target
        ):
            raise BrokenPromiseError(f"{tiered}, the bucket: {self.seen.end}, log: {target}")

    def write(self, process: Process) -> None:
        """Express objects of all topics that the process has open."""
        topic = self.open_topic(process)
        if self.sharing.rng.random() < 0.7:
            self.append(process)
        topic.flush()
        self.sharing.write(process)

    def resort(self, process: Process) -> None:
        """Runs become objects of their topic."""
        topic = self.open_topic(process)
        try:
            self.sharing.resort(topic, groups_max=self.sharing.rng.randrange(1, 4))
        except CorruptDataError:
            # Where local files do not have the whole group, a damaged run waits for a repair.
            if not self.seen.rotten:
                raise

    def collect_express(self, process: Process) -> None:
        """Express objects that nobody needs go."""
        if self.sharing.rng.random() < 0.6:
            self.pass_time(GRACE_MINUTES * 60 + 5)
            self.renew(process)
        self.sharing.collect(process)

    def save(self, process: Process) -> None:
        """What is synced shows to others, as it does within a second."""
        wal = self.open_topic(process).wal
        wal.wait(wal.next - 1, AckLevel.SYNCED)
        wal.save_checkpoint()

    def note_outside(self, process: Process) -> None:
        """The owner looks how far a pipeline has come."""
        topic = self.open_topic(process)
        self.look()
        expected = min(self.seen.end, topic.watermarks.synced)
        tiered = topic.bucket.uploads.follow()
        self.look()
        if self.is_right(process) and tiered < expected:
            raise BrokenPromiseError(f"follows up to {tiered}, and the bucket had {expected}")

    def read(self, process: Process) -> None:
        """A reader from anywhere, to the end."""
        topic = self.open_topic(process)
        start = self.rng.randrange(topic.earliest, topic.wal.next + 1)
        with topic.reader(start) as reader:
            while self._poll(process, topic, reader):
                pass

    def follow(self, process: Process) -> None:
        """Readers that stay, while files are trimmed and objects come and go under them."""
        topic = self.open_topic(process)
        if len(process.readers) < 2:
            process.readers.append(topic.reader(self.rng.choice(("earliest", "latest"))))
        reader = self.rng.choice(process.readers)
        try:
            self._poll(process, topic, reader)
        except OffsetOutOfRangeError:
            process.readers.remove(reader)
            self.look()
            kept_from = self.seen.promises.expired
            if process.state.has_cut_expiry:
                kept_from = max(kept_from, self.seen.record.expired_before)
            if self.is_right(process) and reader.next_offset >= kept_from:
                raise

    def _poll(self, process: Process, topic: Topic, reader: Reader) -> bool:
        at = reader.next_offset
        messages = reader.poll(self.rng.randrange(1, 50), self.rng.choice((1, 1 << 20)))
        is_right = self.is_right(process)
        promises = self.seen.promises
        incarnation = topic.bucket.owned.record.incarnation
        tiered = self.seen.ever_tiered.get(incarnation, {})
        for message in messages:
            if message.offset != at:
                raise BrokenPromiseError(f"a reader at {at} was given {message.offset}")
            at += 1
            if topic.ack is AckLevel.TIERED and tiered.get(message.offset) != message.payload:
                raise BrokenPromiseError(f"{message.offset} was delivered and is not tiered")
            if not is_right:
                continue
            promises.deliver(message.offset, message.payload)
            if process.current.get(message.offset) != message.payload:
                raise BrokenPromiseError(f"{message.offset} reads as {message.payload[:20]!r}")
            if topic.ack is AckLevel.WRITTEN:
                promises.written.setdefault(message.offset, message.payload)
            else:
                promises.durable.setdefault(message.offset, message.payload)
        return bool(messages)

    def consume(self, process: Process) -> None:
        """A subscription is served by the owner or, while there is none, from the bucket alone."""
        if self.restores is not None:
            self._move_cursor(self.open_topic(process, take_over=False))
            return
        try:
            topic = self.open_topic(process, take_over=False)
        except WaitsForDiskError:
            try:
                topic = process.log.read_only_topic(self.at.text)
            except UnavailableError:
                return  # a claim that was on its way has landed meanwhile
            topic.check()
            self.histories += 1
            self.look()
        owned, cursor = topic.bucket.owned, self._cursor()
        is_known = self.seen.is_open and owned.epoch == self.seen.epoch
        # Those of now: if the topic is created anew while this reads, they are not the new one's.
        promises = self.seen.promises
        start = max(topic.earliest, min(cursor or 0, topic.wal.next))
        with topic.reader(start) as reader:
            messages = reader.poll(self.rng.randrange(1, 20))
        tiered = self.seen.ever_tiered.get(owned.record.incarnation, {})
        for message in messages:
            if isinstance(topic, ReadOnlyTopic) and (tiered.get(message.offset) != message.payload):
                raise BrokenPromiseError(f"{message.offset} was delivered and is not tiered")
            if is_known:
                promises.deliver(message.offset, message.payload)
        key = self.seen.keys.progress("s")
        progress = Progress(
            offset=max(cursor or 0, start + len(messages)),
            timestamp=0,  # long ago: retention does not keep anything for it
            incarnation=owned.record.incarnation,
        )
        owned.transact([], [Put(key, encode_progress(progress))])

    def _move_cursor(self, topic: Topic) -> None:
        owned = topic.bucket.owned
        progress = Progress(
            offset=getattr(topic.watermarks, str(topic.ack)),
            timestamp=0,
            incarnation=owned.record.incarnation,
        )
        owned.transact([], [Put(self.seen.keys.progress("s"), encode_progress(progress))])

    def idle(self, process: Process) -> None:
        self.pass_time(self.rng.choice((0.01, 0.3, 1.1, 4.0, 7.0, 40.0, 70.0, 150.0)))

    def renew(self, process: Process) -> None:
        with suppress(NotFoundError):  # paused for longer than the new lease has lasted
            process.log.stores.membership.renew()
        if self.restores is not None:
            self.restores.renew(process.log)

    def trim(self, process: Process) -> None:
        topic = self.open_topic(process)
        before = topic.wal.trimmed
        topic.bucket.retention.trim()
        retention = self.config.storage.wal.retention
        if self.restores is not None:
            return
        for offset in range(before, topic.wal.trimmed if retention.size_mb is None else before):
            payload = process.current.get(offset, b"")
            self._check_age(
                f"{payload[:20]!r}", self.arrived.get(payload), (retention.time_minutes or 0) * 60
            )
        if topic.wal.trimmed > before and not self.is_right(process):
            # What it gave up is not in the topic any more; its files were all that was left.
            self._check_given_up(process, topic, before)

    def release(self, process: Process) -> None:
        """The disk is low: what the bucket has goes, the active file included."""
        topic = self.open_topic(process)
        before = topic.wal.trimmed
        topic.bucket.retention.release(
            past_subscriptions=self.rng.random() < 0.5, is_enough=lambda: self.rng.random() < 0.5
        )
        if self.restores is None and topic.wal.trimmed > before and not self.is_right(process):
            self._check_given_up(process, topic, before)

    def _check_given_up(self, process: Process, topic: Topic, before: int) -> None:
        # It has expired, or was deleted with its topic: the bucket had it all the same.
        tiered = self.seen.ever_tiered.get(topic.bucket.owned.record.incarnation, {})
        for offset in range(before, topic.wal.trimmed):
            if offset in process.current and tiered.get(offset) != process.current[offset]:
                raise BrokenPromiseError(f"{offset} was removed by an owner that was fenced")

    def expire(self, process: Process) -> None:
        topic = self.open_topic(process)
        try:
            topic.bucket.retention.expire()
        except UnavailableError:
            process.state.has_cut_expiry = True
            raise

    def collect(self, process: Process) -> None:
        topic = self.open_topic(process)
        if self.restores is not None:
            self.pass_time(self.rng.choice((1.0, GRACE_MINUTES * 60 + 5)))
            self.renew(process)
        for object_id in topic.bucket.retention.collect_orphans():
            made = self.made.get(object_key(self.at.name, object_id))
            # A pipeline that has lost its lease may write it again in the middle, for nothing.
            if self.restores is None or self.outsider is None:
                self._check_age(object_id, made, GRACE_MINUTES * 60)

    def rot(self, process: Process) -> None:
        """The bucket loses or damages an object of which there is a local copy.

        Only while nobody is about to go on without that copy: that would be the loss of both.
        """
        topic = self.open_topic(process)
        if not self.is_right(process) or self._depth or self.meta.delayed:
            return
        local = [d for s, d in self.seen.described.items() if s >= topic.wal.trimmed]
        if not local or self.seen.rotten:
            return
        described = self.rng.choice(local)
        key, _, place = object_key(self.at.name, described.object_id).partition("@")
        if place:
            # A shared object is not lost as a whole: others may have no copy of their parts.
            begin = int(place.partition("+")[0])
            self.store.corrupt(key, begin + self.rng.randrange(described.size_bytes))
        elif self.rng.random() < 0.5:
            self.store.drop(key)
        else:
            self.store.corrupt(key, self.rng.randrange(described.size_bytes))
        self.seen.rotten.add(described.object_id)

    def repair(self, process: Process) -> None:
        topic = self.open_topic(process)
        errors = topic.bucket.repair_objects().errors
        self.look()
        if self.is_right(process) and (errors or self.seen.rotten):
            raise BrokenPromiseError(f"not repaired: {self.seen.rotten}, {errors}")

    def seal(self, process: Process) -> None:
        self.open_topic(process)
        epoch = process.topic.bucket.owned.epoch
        owed = dict(process.current)
        process.topic.flush()
        next_offset = process.log.seal(self.at.text)
        self.look()
        if self.restores is None and epoch == self.seen.epoch:
            sealed = self.seen.sealed
            if sealed is None or sealed.next_offset != next_offset:
                raise BrokenPromiseError(f"sealed at {next_offset}, the store says {sealed}")
            for offset, payload in owed.items():
                if offset >= self.seen.promises.expired and (
                    self.seen.promises.tiered.get(offset) != payload
                ):
                    raise BrokenPromiseError(f"sealed, and {offset} is not in the bucket")

    def delete(self, process: Process) -> None:
        self.open_topic(process)
        epoch = process.topic.bucket.owned.epoch
        if self.restores is not None:
            self.restores.note_deleted(self.at.text)
            process.log.delete(self.at.text)
            return
        process.log.delete(self.at.text)
        with self._quietly():
            self.look()
            if self.seen.epoch == epoch:
                self.check_deleted()

    def check_deleted(self) -> None:
        """Nothing is left of a topic but its record."""
        if self.seen.record is not None and self.seen.record.state != "deleted":
            raise BrokenPromiseError(f"deleted, and the record says {self.seen.record}")
        objects = [i.key for i in self.store.list(f"{TOPICS_PREFIX}{self.at.text[1:]}/")]
        keys = [found.key for found in self.meta.range(self.seen.keys.storage)]
        if objects or keys:
            raise BrokenPromiseError(f"deleted, and there is {objects} {keys}")

    def close(self, process: Process) -> None:
        """The process ends in peace; what it had appended is durable."""
        process.log.close()
        self.look()
        for view in self.views if self.restores is None else ():
            with self._viewing(view):
                if self.is_right(process):
                    self.seen.promises.durable.update(process.current)
        process.is_dead = True
        self.end_life(process.node, is_clean=True)

    def kill(self, process: Process) -> None:
        self._die(process, "any time")

    # -- the end ----------------------------------------------------------------------------

    def heal(self) -> None:
        """No more faults: everything has to come right."""
        failpoints.disarm()
        self.fault_rate = 0.0
        self.failpoint = None
        self.set_clock_right()
        self.deliver_late()
        if self.outsider is not None:
            self.outsider.end()
        for node in self.nodes:
            if node.process is not None:
                self.end_life(node)
        self.look()
        if self.restores is not None:
            self._settle_restored()
            return
        self._check_given_up_files()
        self.pass_time(LEASE_SECONDS + 1)
        with self._quietly():
            homes = [self._home(view) for view in self.views]
            for view, home in zip(self.views, homes, strict=True):
                with self._viewing(view):
                    self._heal_on(home)
            self._pass_grace()
            for view, home in zip(self.views, homes, strict=True):
                with self._viewing(view):
                    self._check_bucket(home.process.topic)
            if self.sharing is not None:
                self.sharing.check_end([n.process for n in self.nodes if n.process is not None])
                self.sharing.check_resort(homes)
                self.check_recoverable()
            self._check_handovers(homes)

    def _settle_restored(self) -> None:
        """Both machines start again, and topics go on with what was put back."""

        def start(node: Node) -> None:
            node.fs.kill()
            process = self._make_process(node, Plan())
            self._open_log(process)
            node.process = process

        with self._quietly():
            self.restores.settle(start, lambda: self.pass_time(2 * LEASE_SECONDS))

    def _home(self, view: View) -> Node:
        """The node that wrote a topic last."""
        writer = view.seen.writer
        return next((n for n in self.nodes if n.id and n.id == writer), self.nodes[0])

    def _check_given_up_files(self) -> None:
        """What a node could not upload is still on its disk, unless that was lost."""
        for node in self.nodes:
            owed = [
                payload
                for view in self.views
                for payload in view.seen.promises.given_up.get(node.id or "", [])
            ]
            data = b"".join(_read_tree(node.fs, "/data/wal/ns")) if owed else b""
            for payload in owed:
                if payload not in data:
                    raise BrokenPromiseError(
                        f"node {node.number} had {payload[:20]!r}, and lost it"
                    )

    def _heal_on(self, node: Node) -> None:
        if node.process is None:
            node.process = self._make_process(node, Plan())
            self._open_log(node.process)
        process = node.process
        if self.seen.record is not None and self.seen.record.state == "deleting":
            process.log.delete(self.at.text)
            self.look()
            self.check_deleted()
        topic = self.open_topic(process, take_over=True)
        if errors := topic.bucket.repair_objects().errors:
            raise BrokenPromiseError(f"not repaired: {errors}")
        self._upload_all(process, topic)
        for _ in range(3):
            self.append(process)
        self._upload_all(process, topic)
        self._note_ack(process, topic, topic.wal.next - 1, "tiered")
        marks = topic.watermarks
        if not marks.tiered == marks.synced == marks.next == self.seen.end:
            raise BrokenPromiseError(f"uploads do not catch up: {marks}")

    def _upload_all(self, process: Process, topic: Topic) -> None:
        if not topic.bucket.uploads.is_express:
            topic.upload()
            return
        topic.flush()
        self._advance(2)  # what has failed is tried again by then
        self.sharing.drain(process)
        self.look()

    def _pass_grace(self) -> None:
        # What a clock that was a few hours ahead has dated is kept for as much longer.
        self._advance(GRACE_MINUTES * 60 + 61 + (20 * 3600 if self.steps_clock else 0))

    def _advance(self, seconds: float) -> None:
        """Time passes, and every process has its lease again."""
        self.clock.advance(seconds)
        for node in self.nodes:
            if node.process is not None:
                node.process.log.stores.membership.renew()

    def _check_bucket(self, topic: Topic) -> None:
        """Retention and garbage collection do their work, and history is read from the bucket."""
        topic.bucket.retention.expire()
        self.look()
        topic.bucket.retention.trim()
        if len(topic.wal.files) > 1 and topic.wal.files[1].first_offset < topic.wal.synced:
            raise BrokenPromiseError("old files that are in the bucket are not trimmed")
        topic.bucket.retention.collect_orphans()
        self.look()
        described = {object_key(self.at.name, d.object_id) for d in self.seen.described.values()}
        garbage = {
            info.key
            for info in self.store.list(objects_prefix(self.at.name))
            if info.key not in described and not self._is_ahead(info.key)
        }
        if garbage:
            raise BrokenPromiseError(f"garbage stays: {garbage}")
        self.seen.promises.check(
            read_all(topic), first=topic.earliest, next_offset=topic.wal.next, kill=True
        )

    def _is_ahead(self, key: str) -> bool:
        """Whether a merged object has more than the catalog, which may then be an older copy."""
        name = parse_object_id(key.removeprefix(objects_prefix(self.at.name)))
        return name is not None and name.tag is not None and name.end > self.seen.end

    def _check_handovers(self, homes: list[Node]) -> None:
        """The other node goes on where this one ends."""
        ends: list[int] = []
        for view, home in zip(self.views, homes, strict=True):
            with self._viewing(view):
                ends.append(home.process.log.seal(view.text))
                self.look()
        for node in self.nodes:
            if node.process is not None:
                node.process.log.close()
                node.process = None
        for view, home, end in zip(self.views, homes, ends, strict=True):
            with self._viewing(view):
                other = self.nodes[1 - home.number]
                if other.process is None:
                    other.process = self._make_process(other, Plan())
                    other.fs.before = lambda kind, path: None
                    self._open_log(other.process)
                topic = self.open_topic(other.process, take_over=False)
                if topic.append(b"next") != end:
                    raise BrokenPromiseError(f"sealed at {end}, and goes on elsewhere")
        for node in self.nodes:
            if node.process is not None:
                node.process.log.close()


def _is_merged(described: ObjectDescriptor) -> bool:
    name = parse_object_id(described.object_id)
    return name is not None and name.tag is not None


def _check_order(topic: Topic, bucket_end: int) -> None:
    wal = topic.wal
    marks = topic.watermarks
    order = (marks.trimmed, marks.tiered, marks.synced, marks.written, marks.next)
    if list(order) != sorted(order):
        raise BrokenPromiseError(f"watermarks out of order: {marks}")
    if wal.state is TopicState.OPEN and wal.trimmed > marks.tiered:
        # The watermarks hide it; readers would find it.
        raise BrokenPromiseError(f"a gap between the tiers: trimmed {wal.trimmed}, {marks}")
    if marks.tiered > max(bucket_end, 0):
        raise BrokenPromiseError(f"tiered is {marks.tiered}, the bucket ends at {bucket_end}")
    if wal.state is TopicState.OPEN and bucket_end > marks.synced:
        raise BrokenPromiseError(f"the bucket ends at {bucket_end}, the synced log: {marks}")


def _read_tree(fs: MemoryFileSystem, path: str) -> Iterator[bytes]:
    if isinstance(node := fs._find(path), _Directory):
        for name in node.entries:
            yield from _read_tree(fs, f"{path}/{name}")
    elif node is not None:
        yield bytes(node.cache)


def read_all(topic: Topic) -> dict[int, bytes]:
    """Everything that the topic holds now."""
    found: dict[int, bytes] = {}
    # Also what readers do not see yet.
    with topic._open_reader("earliest", topic.wal.next, topic.wal.levels.local_level) as reader:
        while messages := reader.poll():
            for message in messages:
                if message.offset in found:
                    raise BrokenPromiseError(f"{message.offset} came twice")
                found[message.offset] = message.payload
    return found


@replayable()
def run_seed(
    seed: int,
    *,
    turns: int = 40,
    failpoint: str | None = None,
    shares: bool | None = None,
    restores: bool = False,
    trace: Callable[[str], None] | None = None,
) -> TierWorld:
    """One world from its beginning to its end; with `restores`, stores are put back."""
    world = TierWorld(seed, failpoint=failpoint, shares=shares, restores=restores)
    if trace is not None:
        world.trace = trace
    with seeded_names(seed):
        world.live(turns)
    return world


if __name__ == "__main__":
    replay(
        run_seed,
        lambda world: f"{world.crashes} crashes, {world.faults} faults, {world.sent} messages",
    )
