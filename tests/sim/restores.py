"""Stores that are put back to an older state, and what must not happen then.

An administrator puts back the metadata store (with all processes dead, or while they run), the
bucket, a node's files, a topic's directory or some of its files, each to a backup that the world
made earlier; or removes files of a topic; or does two of these at once. `Restores` makes backups,
does such things to the stores of a world, and knows what was acknowledged. The worlds themselves
(`tier_world`, `clone_world`, `cluster_world`) call it at acknowledgements and after their turns.

The rule: a store that is older than the others is noticed, said, and never acted on by deletion;
nothing acknowledged is lost without an error that names it. What is checked, without the code under
test, by searching for the payloads in the bytes of the stores:

- kept: no process removes the last copy of an acknowledged message, unless it is old enough to
  expire;
- offsets: no message is acknowledged at the offset of another one that is in the bucket, or on the
  disk of the process that acknowledges; or on another disk, where a store that was not put back
  proves the term of ownership that it belongs to;
- readable: when a topic acknowledges again, each acknowledged message that is in the bucket or on
  its disk is read at its offset, or reading it fails with an error;
- said: a topic whose newest messages went with its files does not acknowledge again, if its
  record, or the files that are left, prove that there were more;
- accepted: after `ister metadata accept` each topic can be used, or its refusal names copies to
  choose from; and everything that the stores still hold of it is readable, unless another
  acknowledged message, of another topic of that name, has its offset, or a take-over was needed
  and has set its file aside: what the bucket has lost is not taken from such files.

What cannot be detected is excluded, and nothing else (docs/DURABILITY.md): a term that no store
that is left knows of; another node's term, for an owner that was cut off meanwhile and goes on;
messages that no store has any more, unless files alone were put back to an earlier term, or
removed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ister.base.clock import Clock
from ister.base.model import AckLevel, TopicName, TopicState
from ister.bucket.names import EXPRESS_PREFIX, TopicKeys
from ister.errors import (
    ClosedError,
    ConflictError,
    CorruptDataError,
    FencedError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
    WaitsForDiskError,
)
from ister.format.records import TopicRecord, decode_topic
from ister.topic.log import Log
from ister.topic.metadata_trust import UNKNOWN, MetadataTrust
from ister.topic.topic import Topic
from ister.wal.directory import WalDirectory
from tests.sim.world import BrokenPromiseError, InlineSchedule
from tests.support.backups import BucketBackup, DiskBackup, MetadataBackup
from tests.support.memory_fs import MemoryFileSystem, _Directory
from tests.support.memory_metadata import MemoryMetadata
from tests.support.memory_store import MemoryObjectStore

__all__ = ["REFUSALS", "Restores"]

REFUSALS: Final = (
    ConflictError,
    FencedError,
    UnavailableError,
    NotFoundError,
    ClosedError,
    CorruptDataError,
    OffsetOutOfRangeError,
)
_CHOICES: Final = ("different messages", "files without a checkpoint")
"""What an accepted topic is refused for: an operator has to choose between its copies."""
_ROOT: Final = "/danube"
_FILES: Final = "/data/wal"
_PAYLOAD: Final = re.compile(rb"<(\d+)>")
_BACKUPS_MAX: Final = 4
_CHANGES_BEFORE: Final = 10
"""How far processes may raise the revision before one of them compares it."""
_FIRST_BACKUP: Final = 8
"""After how many turns there is one for sure."""
PATTERNS: Final = (r"wal\..*", r".*\.(log|ckpt)", r".*")
"""What somebody types after `rm` in a topic's directory."""


class Machine(Protocol):
    """What every world has: a machine with a disk, on which a process may run."""

    fs: MemoryFileSystem
    process: Any


@dataclass(frozen=True, kw_only=True)
class Acked:
    """A message that was acknowledged."""

    number: int
    offset: int
    epoch: int
    claim: str
    incarnation: str
    node: str
    revision: int
    """Of the metadata store, when it was acknowledged."""

    @property
    def payload(self) -> bytes:
        return b"<%d>" % self.number


@dataclass(frozen=True, kw_only=True)
class Backup:
    """All stores, as they were at one moment."""

    metadata: MetadataBackup
    bucket: BucketBackup
    disks: dict[int, DiskBackup]
    """By machine."""
    records: dict[str, TopicRecord | None]
    acked: int
    """How many messages had been acknowledged."""

    @property
    def revision(self) -> int:
        """Of the metadata store."""
        return self.metadata.revision

    @property
    def claims(self) -> set[str]:
        """The terms that it knows."""
        return {one.claim for one in self.records.values() if one is not None}


@dataclass
class Owed:
    """What one topic owes its users."""

    acked: dict[int, Acked] = field(default_factory=dict)
    """By number; without what was deleted, given up or declared lost."""
    unsaid: set[int] = field(default_factory=set)
    """What went with files, and has to be noticed."""


class Restores:
    """See the module header.

    Args:
        seed: Of what is put back, when and to what.
        meta: The metadata store.
        store: The bucket.
        machines: Returns the machines of the world.
        names: The topics.
        stop: Ends the process of a machine, as kill -9 does.
        clock: Of the world.
        quietly: A context in which nothing fails.
        trace: Told what happens.
        upload: Uploads what a topic of the level `tiered` has.
        expires_after: How old messages are that retention may remove, in seconds; None for never.
    """

    def __init__(
        self,
        seed: int,
        *,
        meta: MemoryMetadata,
        store: MemoryObjectStore,
        machines: Callable[[], Sequence[Machine]],
        names: Sequence[str],
        stop: Callable[[Machine], None],
        clock: Clock,
        quietly: Callable[[], AbstractContextManager[None]],
        trace: Callable[[str], None],
        upload: Callable[[Any, Topic], object] = lambda machine, topic: topic.upload(),
        expires_after: float | None = None,
    ) -> None:
        self.rng = random.Random(f"restores {seed}")
        self._meta = meta
        self._store = store
        self._machines = machines
        self._names = tuple(names)
        self._stop = stop
        self._quietly = quietly
        self._clock = clock
        self._trace = trace
        self._upload = upload
        self._expires_after = expires_after
        self._arrived: dict[int, float] = {}
        """By number: when a message came."""
        self._owed = {name: Owed() for name in self._names}
        self._backups: list[Backup] = []
        self._numbers = 0
        self._scanned: dict[tuple[str, int], frozenset[int]] = {}
        self._held: set[int] = set()
        self._unchecked: set[tuple[int, str]] = set()
        self._revision_seen = 0
        self._is_bumped = False
        self._metadata_from: Backup | None = None
        """The backup that the metadata store was last put back to."""
        self._is_bucket_older = False
        """Whether the bucket was put back, and no operator has accepted it."""
        self._seen_before: dict[int, int] = {}
        """By machine: the revision that its process had seen when something was put back."""
        self._moments = 0
        self._unknown: set[str] = set()
        """Topics that the metadata store did not have when it was accepted: `ister recover`."""
        self._sent: dict[bytes, str] = {}
        """The claim under which a message was sent."""
        self._went_on: set[str] = set()
        """Claims that the metadata store knew again while their processes ran."""
        self._terms: dict[str, int] = {}
        """By claim: how often something had been put back when a term of ownership began."""
        self._emptied: set[str] = set()
        """Topics of which all files of messages were removed, by what is left visibly so."""
        self._mixed: set[str] = set()
        """Topics with older log files beside their newest checkpoint."""
        self.is_pending = False
        """Whether something was put back, and no operator has accepted it."""
        self.done: list[str] = []
        """What was put back."""
        self.acks = self.acks_after = self.events = self.refusals = self.accepted = 0

    # -- what the stores hold ---------------------------------------------------------------

    def _in_bucket(self) -> set[int]:
        """The messages of the bucket's objects; an upload that did not end promises nothing."""
        found: set[int] = set()
        for key, entry in self._store._objects.items():
            if "-pending-" in key:
                continue
            place = (key, entry.version)
            if place not in self._scanned:
                self._scanned[place] = frozenset(_numbers(entry.data))
            found |= self._scanned[place]
        return found

    def _on_disk(self, machine: Machine, *, aside: bool = True) -> set[int]:
        """The messages of a machine's files, or only of those that were not set aside."""
        return {n for file in _files_below(machine.fs._root, aside=aside) for n in _numbers(file)}

    def _everywhere(self) -> set[int]:
        return self._in_bucket().union(*(self._on_disk(one) for one in self._machines()))

    def record(self, name: str) -> TopicRecord | None:
        """A topic's record, read past all faults."""
        key = TopicKeys(_ROOT, TopicName.parse(name)).record
        entry = self._meta._entries.get(key)
        return None if entry is None else decode_topic(entry.value, key=key)

    # -- what the worlds report -------------------------------------------------------------

    def payload(self) -> bytes:
        """The next message; no two are equal."""
        self._numbers += 1
        self._arrived[self._numbers] = self._clock.boottime()
        return b"<%d>" % self._numbers

    def _may_expire(self, number: int) -> bool:
        limit = self._expires_after
        return limit is not None and self._clock.boottime() - self._arrived[number] >= limit

    def append(self, machine: Machine, name: str, topic: Topic, schedule: InlineSchedule) -> None:
        """A producer sends some messages, and waits for each answer."""
        for _ in range(self.rng.choice((1, 1, 2, 4))):
            payload = self.payload()
            self._sent[payload] = topic.bucket.owned.record.claim
            topic.bucket.uploads.idle_mark.clear()  # here nobody else does it
            offset = topic.append(payload)
            schedule.run()
            if str(topic.ack) == "tiered":
                self._upload(machine, topic)
                if topic.watermarks.tiered <= offset:
                    return  # with threads, the producer would wait for another round
            topic.wait(offset)
            self.note_ack(machine, name, topic, topic.bucket.owned.record, offset, payload)
            if self.rng.random() < 0.3:
                topic.bucket.uploads.begin_term()

    def renew(self, log: Log) -> None:
        """Does what threads do beside each renewal of the lease, or now and then."""
        with suppress(UnavailableError):
            log.stores.trust.check_revision()
        if self.rng.random() < 0.2:
            log.stores.trust.follow()
            log._heads.save()

    def note_ack(
        self,
        machine: Machine,
        name: str,
        topic: Topic,
        record: TopicRecord,
        offset: int,
        payload: bytes,
    ) -> None:
        """A message was acknowledged: what has its offset, and what else is owed?"""
        owed = self._owed[name]
        acked = Acked(
            number=int(payload[1:-1]),
            offset=offset,
            epoch=record.epoch,
            claim=record.claim,
            incarnation=record.incarnation,
            node=record.node,
            revision=self._meta.revision,
        )
        self._terms.setdefault(acked.claim, self.events)
        self._trace(f"{name}: {acked} is acknowledged")
        if owed.unsaid:
            raise BrokenPromiseError(
                f"{name}: {sorted(owed.unsaid)} went with their files, and the topic goes on at "
                f"{offset} as if nothing were missing"
            )
        disk = self._on_disk(machine)
        here = self._in_bucket() | disk
        # Terms that the files of this disk are from, or a copy of it: also without a message.
        files = b"".join(_files_below(machine.fs._root))
        own = {one.claim for one in owed.acked.values() if one.claim.encode() in files}
        is_cut_off = self._was_cut_off(machine, record)
        known = {
            n: one
            for n, one in owed.acked.items()
            if not self._is_within_term(one, record)
            and (n in here or (not is_cut_off and self._is_known(name, one, record, here, own)))
        }
        # Opened while the bucket did not answer, which is compared before the first upload.
        is_unread = topic.bucket.owned.unread is not None
        for other in known.values():
            if other.offset == offset and (other.number in disk or not is_unread):
                raise BrokenPromiseError(
                    f"{name}: the offset {offset} of {other} was given to {acked}"
                )
        self._held.add(acked.number)
        self.acks += 1
        self.acks_after += self.is_pending
        if (id(machine), name) in self._unchecked and not is_unread:
            self._unchecked.discard((id(machine), name))
            # What nobody could know of is not part of the topic that goes on here.
            owed.acked = known
            with self._quietly():
                self._check_readable(name, topic, here, is_strict=False)
        owed.acked[acked.number] = acked

    def note_opened(self, machine: Machine, name: str) -> None:
        """A process has opened a topic: with its next acknowledgement everything is checked."""
        self._unchecked.add((id(machine), name))

    def note_replaced(self, machine: Machine) -> None:
        """A copy of a disk goes on in the place of a process, which loses what it lacks.

        Terms that the metadata store has forgotten are no part of that: by what it says, there
        was no such process.
        """
        here = self._in_bucket() | self._on_disk(machine)
        source = self._metadata_from
        for owed in self._owed.values() if source is not None else ():
            here |= {n for n, one in owed.acked.items() if self._is_forgotten(one)}
        for name in self._names:
            self._declare_lost(name, here)

    def note_deleted(self, name: str) -> None:
        """An operator deletes a topic: nothing is owed."""
        self._owed[name] = Owed()

    def note_taken_over(self, name: str, start: int) -> None:
        """An operator gives up what is on another disk, from an offset on."""
        owed = self._owed[name]
        owed.acked = {n: one for n, one in owed.acked.items() if one.offset < start}
        owed.unsaid.clear()

    def check_kept(self) -> None:
        """After something a process did: was the last copy of a message removed?"""
        now = self._everywhere()
        for name, owed in self._owed.items():
            gone = sorted((self._held - now) & owed.acked.keys())
            for number in [one for one in gone if self._may_expire(one)]:
                del owed.acked[number]
                gone.remove(number)
            if gone:
                raise BrokenPromiseError(
                    f"{name}: the last copies of {[owed.acked[n] for n in gone]} were removed"
                )
        self._held = now

    def rebase(self) -> None:
        """After something that happened to the stores: takes them as they are."""
        self._held = self._everywhere()

    # -- checks -----------------------------------------------------------------------------

    def _is_forgotten(self, acked: Acked) -> bool:
        """Whether the metadata store was put back to before a message's term of ownership."""
        source = self._metadata_from
        is_older = self._terms[acked.claim] < self.events
        return source is not None and is_older and acked.claim not in source.claims

    def _was_cut_off(self, machine: Machine, record: TopicRecord) -> bool:
        """Whether the metadata store was put back while an owner saw nothing of it.

        It goes on under its term: what was changed after the backup was after the last revision
        that it saw, another node's term included.
        """
        source = self._metadata_from
        is_older = self._terms[record.claim] < self.events
        seen = self._seen_before.get(id(machine))
        return source is not None and is_older and seen is not None and seen <= source.revision

    def _is_known(
        self, name: str, other: Acked, record: TopicRecord, here: set[int], own: set[str]
    ) -> bool:
        """Whether the owner with `record` can know of an acknowledged message.

        It has the messages `here`; those on its disk are of the terms `own`.
        """
        if other.number in here:
            return True
        if other.number not in self._everywhere():
            return False
        if record.node == other.node and other.claim in own:
            return False  # on another copy of its disk, and no store says which one is newer
        if self._is_forgotten(other) and self._knows(other.claim):
            return True
        if record.node == other.node:
            return False  # on a copy of its disk
        source = self._metadata_from
        if source is None or self._terms[other.claim] == self.events:
            return True  # the record names the disk
        if source.revision >= other.revision and other.claim in source.claims:
            return True
        known = source.records[name]
        if known is not None and record.node == known.node:
            return False  # it goes on with its own files, which are as old as the record
        # Nothing that the record says proves then that other nodes have no more; but the bucket
        # has everything that was acknowledged at `tiered`.
        seen = self._revision_seen - _CHANGES_BEFORE
        return record.ack is not AckLevel.TIERED and seen > source.revision

    def _is_within_term(self, other: Acked, record: TopicRecord) -> bool:
        """Whether metadata and bucket were both put back within the term of a message.

        If the fall of the revision is not noticed, either, they agree: at `tiered` another owner
        continues where the bucket ends, and what only the files have is set aside.
        """
        source = self._metadata_from
        return (
            source is not None
            and self._is_bucket_older
            and record.ack is AckLevel.TIERED
            and record.claim != other.claim
            and other.claim in source.claims
            and other.number not in self._in_bucket()
            and self._revision_seen - _CHANGES_BEFORE <= source.revision
        )

    def _went_on_instead(self, found: bytes, acked: Acked) -> bool:
        """Whether an owner that was cut off has committed a message at the offset of another's."""
        return self._sent.get(found) in self._went_on and acked.claim not in self._went_on

    def _find_revision_seen(self) -> int:
        """The highest revision that the bucket has a witness of; 0 if the store is a new one."""
        found = self._meta._entries.get(f"{_ROOT}/cluster/store")
        key = "" if found is None else f"storage/metadata/{found.value.decode()}.json"
        entry = self._store._objects.get(key)
        return 0 if entry is None else json.loads(entry.data)["revision"]

    def _check_readable(self, name: str, topic: Topic, here: set[int], *, is_strict: bool) -> None:
        owed = self._owed[name]
        by_offset: dict[int, bytes | IsterError] = {}
        for acked in owed.acked.values():
            if acked.number not in here:
                continue
            if acked.offset not in by_offset:
                by_offset[acked.offset] = _read(topic, acked.offset)
            found = by_offset[acked.offset]
            if found == acked.payload:
                continue
            if isinstance(found, bytes) and self._went_on_instead(found, acked):
                continue
            is_said = isinstance(found, IsterError) and not isinstance(found, OffsetOutOfRangeError)
            if is_said and not is_strict:
                continue
            if isinstance(found, IsterError) and self._may_expire(acked.number):
                continue
            if is_strict and self._is_other_topic(owed, acked, found):
                continue
            # The catalog names a merged object that the older bucket does not have; those that it
            # has replaced stay for `ister repair`.
            if isinstance(found, NotFoundError) and self.put_back_bucket.__name__ in self.done:
                continue
            raise BrokenPromiseError(
                f"{name}: {acked} is in the stores, and reads as {found!r} "
                f"({topic.earliest} to {topic.wal.next})"
            )

    def _is_other_topic(self, owed: Owed, acked: Acked, found: object) -> bool:
        """Whether a message of another topic of that name has the offset."""
        return any(
            one.payload == found and one.incarnation != acked.incarnation
            for one in owed.acked.values()
        )

    # -- what an administrator does ---------------------------------------------------------

    def back_up(self) -> None:
        """Copies all stores."""
        self._trace("a backup")
        backup = Backup(
            metadata=MetadataBackup.of(self._meta),
            bucket=BucketBackup.of(self._store),
            disks={id(one): DiskBackup.of(one.fs) for one in self._machines()},
            records={name: self.record(name) for name in self._names},
            acked=self._numbers,
        )
        self._backups.append(backup)
        if len(self._backups) > _BACKUPS_MAX:
            del self._backups[self.rng.randrange(_BACKUPS_MAX)]

    def maybe_act(self, *, is_within: bool = False) -> None:
        """Perhaps a backup, or something is put back; between two turns, or within a call.

        The bucket is not put back within a call: what was checked a moment ago counts.
        """
        self._moments += 1
        if self.rng.random() < 0.12 or self._moments == _FIRST_BACKUP:
            self.back_up()
        elif self._is_worth_it() and self.rng.random() < 0.02 * self._moments / _FIRST_BACKUP:
            self.put_back_something(is_within=is_within)

    def _is_worth_it(self) -> bool:
        """Whether something was acknowledged since a backup."""
        return bool(self._backups) and not self.is_pending and self._is_newer(self._backups[0])

    def _is_newer(self, backup: Backup) -> bool:
        return any(n > backup.acked for owed in self._owed.values() for n in owed.acked)

    def put_back_something(self, *, is_within: bool = False) -> None:
        """Puts one store back, or two."""
        self.check_kept()
        self.events += 1
        self.is_pending = True
        self._unchecked = {(id(m), name) for m in self._machines() for name in self._names}
        for record in filter(None, map(self.record, self._names)):
            self._terms.setdefault(record.claim, self.events - 1)
        count = 2 if self.rng.random() < 0.3 else 1
        actions = (
            self.put_back_metadata,
            self.put_back_metadata,
            self.put_back_metadata,
            self.put_back_metadata,
            self.put_back_bucket,
            self.put_back_disk,
            self.put_back_topic,
            self.put_back_files,
            self.remove_files,
        )
        chosen: list[Callable[[Backup], None]] = []
        while len(chosen) < count:
            action = self.rng.choice(actions)
            if is_within and action == self.put_back_bucket:
                action = self.put_back_metadata
            if action not in chosen:
                chosen.append(action)
        if self.rng.random() < 0.6:
            for machine in self._machines():
                self._end(machine)
        self._seen_before = {
            id(machine): machine.process.log.stores.trust._seen.revision
            for machine in self._machines()
            if machine.process is not None and machine.process.log is not None
        }
        backup = self.rng.choice(self._backups)
        before = self._everywhere()
        self._emptied.clear()
        self._mixed.clear()
        for action in chosen:
            self.done.append(action.__name__)
            action(backup)
            if self.rng.random() < 0.5:
                backup = self.rng.choice(self._backups)
        self._revision_seen = 0 if self._is_bumped else self._find_revision_seen()
        self._trace(f"the bucket knows the revision {self._revision_seen}")
        self.rebase()
        if self.put_back_metadata not in chosen and self.put_back_bucket not in chosen:
            self._expect_notice(before - self._held)

    def put_back_metadata(self, backup: Backup) -> None:
        """As `etcdutl snapshot restore` does: keys, revisions and leases are those of then."""
        self._trace(f"metadata: {self._meta.revision} is put back to {backup.revision}")
        # With --bump-revision, the store's revision does not fall.
        is_running = any(machine.process is not None for machine in self._machines())
        # Processes that run then notice nothing: see docs/DURABILITY.md.
        bump = 1_000_000 if self.rng.random() < 0.2 and not is_running else 0
        backup.metadata.put_back(self._meta, bump=bump)
        self._metadata_from = backup
        if is_running:
            self._went_on |= backup.claims
        self._is_bumped = bool(bump)

    def put_back_bucket(self, backup: Backup) -> None:
        """Objects made since are gone, and those deleted since are back."""
        self._trace(f"the bucket is put back to when metadata was {backup.revision}")
        backup.bucket.put_back(self._store)
        self._is_bucket_older = True

    def put_back_disk(self, backup: Backup) -> None:
        """A machine starts again from a copy of its disk."""
        machine = self._choose(backup)
        self._trace(f"a disk is put back to when metadata was {backup.revision}")
        self._end(machine)
        self._emptied.clear()
        backup.disks[id(machine)].put_back(machine.fs)

    def put_back_topic(self, backup: Backup) -> None:
        """A topic's directory is replaced by an older copy."""
        self._put_back_below(backup, is_whole=True)

    def put_back_files(self, backup: Backup) -> None:
        """Some files of a topic are replaced by older copies."""
        self._put_back_below(backup, is_whole=False)

    def _put_back_below(self, backup: Backup, *, is_whole: bool) -> None:
        machine, name = self._choose(backup), self.rng.choice(self._names)
        path, disk = f"{_FILES}{name}", backup.disks[id(machine)]
        names = [one for one in disk.names(path) if is_whole or self.rng.random() < 0.5]
        if names:
            self._end(machine)
            self._trace(f"{name}: {names} are put back")
            self._emptied.clear()
            if not is_whole and "wal.ckpt" not in names:
                self._mixed.add(name)
            disk.put_back(machine.fs, path, None if is_whole else names)
            if WalDirectory(machine.fs, path).load_state() is None:
                self._mixed.add(name)  # nothing says which term these files are from

    def remove_files(self, backup: Backup) -> None:
        """Files of a topic are removed, by a pattern that somebody types."""
        machine, name = self._choose(backup), self.rng.choice(self._names)
        path, pattern = f"{_FILES}{name}", self.rng.choice(PATTERNS)
        if not machine.fs.exists(path):
            return
        self._end(machine)
        names = machine.fs.list_directory(path)
        self._trace(f"{name}: {pattern} are removed of {names}")
        is_marked = any(not re.fullmatch(pattern, found) for found in names if "origin" in found)
        record = self.record(name)
        if not is_marked or (record is not None and self._knows(record.claim)):
            self._emptied = {name}
        for found in names:
            if re.fullmatch(pattern, found):
                machine.fs.remove(f"{path}/{found}")
        machine.fs.sync_directory(path)

    def _knows(self, claim: str) -> bool:
        """Whether the bucket knows a term of ownership."""
        return any(claim in key for key in self._store._objects)

    def _choose(self, backup: Backup) -> Machine:
        known = [one for one in self._machines() if id(one) in backup.disks]
        return self.rng.choice(known or list(self._machines()))

    def _end(self, machine: Machine) -> None:
        if machine.process is not None:
            self._stop(machine)

    def _expect_notice(self, lost: set[int]) -> None:
        """Files alone went back or are gone: the bucket, or what is left, knows of more.

        An owner's term is in the bucket only if its checkpoint is on its disk. Without it, files of
        an earlier term are what a crash after a claim leaves. Beside the newest checkpoint, older
        log files that are as long as it says are not told from newer ones.
        """
        for name, owed in self._owed.items():
            record = self.record(name)
            if record is None or not record.is_open or name in self._mixed:
                continue
            for acked in owed.acked.values():
                is_later = all(acked.claim not in backup.claims for backup in self._backups)
                is_known = self._knows(acked.claim)
                if (
                    acked.number in lost
                    and not self._may_expire(acked.number)
                    and acked.claim == record.claim
                    and (name in self._emptied or (is_known and is_later))
                ):
                    owed.unsaid.add(acked.number)

    # -- what an operator does then ---------------------------------------------------------

    def accept(self) -> None:
        """Runs `ister metadata accept` on every node; no process runs."""
        for machine in self._machines():
            trust = MetadataTrust(
                self._store,
                self._meta,
                _ROOT,
                fs=machine.fs,
                wal_root=_FILES if machine.fs.exists(_FILES) else None,
                clock=self._clock,
            )
            for name in trust.topics():
                with suppress(ConflictError):
                    row = trust.accept(name)
                    self._trace(f"{row}")
                    if row.status == UNKNOWN:
                        self._unknown.add(row.topic)
            trust.finish()
        self.accepted += 1
        self.is_pending = False
        self._metadata_from = None
        self._is_bucket_older = False
        for owed in self._owed.values():
            for number in owed.unsaid:
                owed.acked.pop(number, None)
            owed.unsaid.clear()

    def settle(self, start: Callable[[Machine], None], rest: Callable[[], None]) -> None:
        """The end of a world: each topic goes on, or says why not; and does after an acceptance.

        Args:
            start: Starts a process on a machine.
            rest: Lets leases end.
        """
        rest()
        left = [name for name in self._names if not self._use(name, self._start_all(start))]
        self.check_kept()
        for machine in self._machines():
            if machine.process is not None:
                with suppress(*REFUSALS):
                    machine.process.log.close()
                self._stop(machine)
        rest()
        self.accept()
        self.check_kept()
        for name in left:
            machines = self._start_all(start)
            is_used = self._use(name, machines, is_accepted=True)
            # A disk that is an older copy is refused as a whole.
            has_all = len(machines) == len(self._machines())
            if not is_used and has_all and name not in self._unknown:
                raise BrokenPromiseError(f"{name} cannot be used after everything was accepted")
        self.check_kept()

    def _start_all(self, start: Callable[[Machine], None]) -> list[Machine]:
        for machine in self._machines():
            if machine.process is None:
                try:
                    start(machine)
                except REFUSALS as error:
                    self._trace(f"{error!r}")
        return [one for one in self._machines() if one.process is not None]

    def _use(self, name: str, machines: list[Machine], *, is_accepted: bool = False) -> bool:
        """Whether a topic takes a message, or is read-only with its damage told."""
        if is_accepted:
            self._declare_lost(name, self._everywhere())
        record, acked = self.record(name), self._owed[name].acked.values()
        if record is None and not acked:
            return True  # it was never made
        if (
            record is not None
            and not record.is_open
            and all(one.epoch <= record.epoch for one in acked)
        ):
            return True  # a deletion whose answer was lost
        for gives_up in (False, True) if is_accepted else (False,):
            for machine in machines:
                log, schedule = machine.process.log, machine.process.schedule
                try:
                    topic = log.topic(name, take_over=gives_up)
                    if topic.state is TopicState.QUARANTINED:
                        return True
                    # A take-over gives up the files that it sets aside, whose topic was refused.
                    here = self._in_bucket() | self._on_disk(machine, aside=not gives_up)
                    if gives_up:
                        here -= self._left_in_runs(name, topic, record) - self._on_disk(machine)
                    if is_accepted:
                        self._declare_lost(name, here)
                    self.note_opened(machine, name)
                    self.append(machine, name, topic, schedule)
                    self._check_readable(name, topic, here, is_strict=is_accepted)
                except REFUSALS as error:
                    self._trace(f"{name}: {error!r}")
                    self.refusals += not isinstance(error, WaitsForDiskError)
                    if is_accepted and any(text in str(error) for text in _CHOICES):
                        return True
                else:
                    return True
        return False

    def _left_in_runs(self, name: str, topic: Topic, before: TopicRecord | None) -> set[int]:
        """What a take-over does not find in objects that were not committed.

        It looks for objects that begin where the catalog ends, and for runs of the owner before it.
        Its owner may have opened the topic again since it put the object, and have had the messages
        in its files; or it, or a pipeline, has committed some of them from there in another object.
        Then the disk was lost. What was acknowledged at `tiered` is in a committed object.
        """
        owned, acked = topic.bucket.owned, self._owed[name].acked
        if owned.record.ack is AckLevel.TIERED:
            return set()
        start, found = owned.record.lineage[-1].start, set[int]()
        for key, entry in self._store._objects.items():
            run = [number for number in _numbers(entry.data) if number in acked]
            is_cut = any(acked[number].offset < start for number in run)
            is_others = key.startswith(EXPRESS_PREFIX) and (
                before is None or key.split("/")[3] not in before.claim
            )
            if is_cut or is_others:
                found |= {number for number in run if acked[number].offset >= start}
        return found

    def _declare_lost(self, name: str, here: set[int]) -> None:
        """What an operator gave up with other disks."""
        owed = self._owed[name]
        owed.acked = {number: one for number, one in owed.acked.items() if number in here}


def _numbers(data: bytes | bytearray) -> Iterator[int]:
    return (int(found) for found in _PAYLOAD.findall(data))


def _files_below(directory: _Directory, *, aside: bool = True) -> Iterator[bytes]:
    for name, node in directory.entries.items():
        if isinstance(node, _Directory):
            if aside or ".aside-" not in name:
                yield from _files_below(node, aside=aside)
        else:
            yield bytes(node.cache)


def _read(topic: Topic, offset: int) -> bytes | IsterError:
    """A message by its offset, or why it cannot be read."""
    try:
        with topic._open_reader(offset, topic.wal.next, topic.wal.levels.local_level) as reader:
            messages = reader.poll(1)
    except IsterError as error:
        return error
    if not messages:
        end = topic.wal.next
        return OffsetOutOfRangeError(
            "nothing there", earliest=topic.earliest, next=end, topic=topic.name, offset=offset
        )
    return messages[0].payload if messages[0].offset == offset else CorruptDataError("a gap")
