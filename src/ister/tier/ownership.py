"""Who may write a topic, and the only way in which its objects become visible.

    claim ─► epoch + 1 ─► commit, commit, … ─► seal (hand over)  or  release (close)

Owns: a topic's epoch and every change of its descriptors. Does not own: uploads, files, threads.

Invariants:

- every change is one transaction that requires the topic's record to be the one this owner knows:
  whoever claims the topic next changes the record, and from then on this one publishes nothing,
  however late it wakes up;
- descriptors follow each other: a commit also requires `cur`, the pointer to the newest one, to be
  unchanged, and begins where that one ends;
- a lost answer (`CommitUnknownError`) is resolved by reading back; repeating the transaction is
  harmless, because the first run changes what the second one requires.

Nodes. An owner is a `node`: an identity that is kept with the local files and used under their
lock, so a node that comes back may take its own topics at once, without waiting for a lease to
end: the lock proves that the process before it is gone. Another node may claim a topic that was
sealed. One that was not has messages on a disk that is not here; claiming it takes `take_over`,
which goes on from what the bucket holds and gives up the rest.

What a crash leaves: an owner key that ends with its lease, a session that says which object may be
lying around, and descriptors that are all true.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ister import failpoints
from ister.clock import Clock
from ister.errors import (
    CapacityError,
    CommitUnknownError,
    ConflictError,
    FencedError,
    IsterError,
    NotFoundError,
    UnavailableError,
    check,
)
from ister.format.descriptor import ObjectDescriptor, decode_descriptor, encode_descriptor
from ister.format.records import (
    Lineage,
    OwnerRecord,
    SealedState,
    TopicRecord,
    UploadSession,
    decode_session,
    encode_current,
    encode_owner,
    encode_sealed,
    encode_session,
    encode_topic,
)
from ister.limits import OWNER_LINEAGE_MAX
from ister.metadata.base import (
    Absent,
    Compare,
    Delete,
    Lease,
    MetadataStore,
    Operation,
    Put,
    RevisionIs,
)
from ister.metrics import Metrics
from ister.model import AckLevel, Codec
from ister.tier.catalog import Catalog

__all__ = [
    "ClaimCheck",
    "Membership",
    "NewTopic",
    "OwnedTopic",
    "check_claim",
    "claim",
    "resume_delete",
]

_log = logging.getLogger("ister.tier.ownership")

_ATTEMPTS: Final = 5
# Deletions in one transaction; etcd takes 128 operations.
_BATCH: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTopic:
    """How to make a topic that does not exist."""

    ack: AckLevel
    codec: Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimCheck:
    """What a look at a topic before its claim has shown."""

    is_current: bool
    """Whether local files, if there are any, are the topic's newest."""
    revision: int | None
    """Of the record that says so; None if there is no record."""

    def still_holds(self, catalog: Catalog) -> bool:
        """Whether the record is still that one."""
        found = catalog.record()
        return self.revision == (found[1] if found is not None else None)


class Membership:
    """This process's lease, under which it owns topics. Thread-safe.

    `valid_until` is asked before anything is acknowledged: a process that was stopped for longer
    than its lease knows it by its own clock, before it has heard from anybody.
    """

    def __init__(
        self, store: MetadataStore, *, node: str, ttl_seconds: float, clock: Clock
    ) -> None:
        self.node = node
        self._store = store
        self._ttl = ttl_seconds
        self._clock = clock
        self._lock = threading.RLock()
        self._owned: dict[str, OwnedTopic] = {}
        self.lease = store.grant_lease(ttl_seconds)

    @property
    def valid_until(self) -> float:
        """The monotonic second up to which this process surely owns its topics."""
        return self.lease.valid_until

    @property
    def is_valid(self) -> bool:
        """Whether it still does."""
        return self._clock.monotonic() < self.lease.valid_until

    def add(self, owned: OwnedTopic, lease: Lease) -> None:
        """Takes note of a topic that was claimed with `lease`.

        Raises:
            FencedError: That lease has ended meanwhile, and somebody else has the topic.
            UnavailableError: It has ended, and the metadata store does not answer.
        """
        with self._lock:
            self._owned[owned.topic] = owned
            if lease is self.lease:
                return
            try:
                self._reassert(owned, self.lease)
            except IsterError:
                self.remove(owned)
                raise

    def _reassert(self, owned: OwnedTopic, lease: Lease) -> None:
        try:
            owned.reassert(lease)
        except NotFoundError as error:
            raise UnavailableError("a new lease has ended at once") from error

    def remove(self, owned: OwnedTopic) -> None:
        """Forgets a topic that was released."""
        with self._lock:
            if self._owned.get(owned.topic) is owned:
                del self._owned[owned.topic]

    def renew(self) -> None:
        """Renews the lease; where it has ended, takes a new one and puts the owner keys back.

        Raises:
            UnavailableError: The metadata store does not answer; try again before `valid_until`.
        """
        # One at a time: two that each took a new lease would leave owner keys under the other's.
        with self._lock:
            try:
                self.lease.renew()
            except NotFoundError:
                _log.warning("the lease ended", extra={"node": self.node})
            else:
                return
            lease = self._store.grant_lease(self._ttl)
            try:
                self._reassert_all(lease)
            except UnavailableError:
                lease.revoke()
                raise
            self.lease = lease

    def _reassert_all(self, lease: Lease) -> None:
        for topic in list(self._owned.values()):
            try:
                self._reassert(topic, lease)
            except FencedError:
                self.remove(topic)
            except UnavailableError:
                raise
            except IsterError as error:
                # One topic's record cannot be read or written: that is its own trouble.
                topic.give_up(error)
                self.remove(topic)

    def end(self) -> None:
        """Gives the lease back, and with it every owner key."""
        self.lease.revoke()


class OwnedTopic:
    """A topic that this process may write. Made by `claim`. Thread-safe."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        record: TopicRecord,
        revision: int,
        node: str,
        sealed: SealedState | None,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.catalog = catalog
        self.topic = str(catalog.keys.topic)
        self.record = record
        self.epoch = record.epoch
        self.is_rebuilt = False
        """Whether nobody knew who wrote the topic last: its metadata was made from the bucket."""
        self.sealed_before = sealed
        """The seal that this claim has taken."""
        self._node = node
        self._revision = revision
        self._clock = clock
        self._metrics = metrics
        self._lock = threading.RLock()
        self._fence: FencedError | None = None
        self.on_fenced: Callable[[FencedError], None] = lambda error: None
        """Called once, when it turns out that somebody else owns the topic."""
        self._current_revision = self._read_current()
        self.first = catalog.first()
        """The oldest object."""
        self.last = catalog.last()
        """The newest object."""

    # -- what it is -------------------------------------------------------------------------

    @property
    def tiered(self) -> int:
        """The first offset after the newest object; 0 without objects."""
        return self.last.end if self.last is not None else 0

    @property
    def start(self) -> int:
        """Where this owner's own offsets begin, at the earliest."""
        mine = self.record.lineage[-1].start if self.record.lineage else 0
        sealed = self.sealed_before.next_offset if self.sealed_before is not None else 0
        return max(mine, sealed, self.tiered)

    @property
    def is_fenced(self) -> bool:
        """Whether somebody else owns the topic by now, as far as this one has noticed."""
        return self._fence is not None

    # -- changes ----------------------------------------------------------------------------

    def transact(self, compares: list[Compare], operations: list[Operation]) -> bool:
        """One transaction that only the topic's owner can do; whether the compares held.

        Raises:
            FencedError: Somebody else owns the topic.
            UnavailableError: The metadata store does not answer, or the answer was lost.
        """
        try:
            self._change(compares, operations)
        except FencedError:
            raise
        except ConflictError:
            return False
        return True

    def begin(self, session: UploadSession) -> None:
        """Notes which object is about to be written. Finds out early about being fenced.

        Raises:
            FencedError: Somebody else owns the topic.
            UnavailableError: The metadata store does not answer.
        """
        self._require_open()
        failpoints.reach("tier.before_session")
        self._change([], [Put(self.catalog.keys.session, encode_session(session))])
        failpoints.reach("tier.after_session")

    def session(self) -> UploadSession | None:
        """The object that was under way when the last owner, or this one, stopped."""
        found = self.catalog.store.get(self.catalog.keys.session)
        return None if found is None else decode_session(found.value, key=found.key)

    def commit(self, descriptor: ObjectDescriptor) -> None:
        """Publishes an object: from here on it is part of the topic.

        Raises:
            FencedError: Somebody else owns the topic; nothing was published.
            ConflictError: An earlier commit, whose outcome was unknown, has happened after all;
                `tiered` has moved, and the next object begins there.
            CommitUnknownError: The store's answers were lost, again and again. The same commit may
                be tried again.
            UnavailableError: The metadata store does not answer.
        """
        keys = self.catalog.keys
        key = keys.descriptor(descriptor.start)
        data = encode_descriptor(descriptor)
        with self._lock:
            self._require_open()
            check(
                self.last is None or self.last.end == descriptor.start,
                f"a commit continues: {descriptor.start} after {self.tiered}",
            )
            failpoints.reach("tier.before_commit")
            began = self._clock.monotonic()
            try:
                revision = self._change(
                    [self._current_is_known(), Absent(key)],
                    [
                        Put(key, data),
                        Put(keys.current, encode_current(descriptor.start)),
                        Delete(keys.session),
                    ],
                    is_done=lambda: self._holds(key, data),
                )
            except FencedError:
                raise
            except ConflictError:
                # A commit of our own that had been given up on has happened after all.
                self._resync()
                raise
            self._metrics.observe("metadata.put_latency_seconds", self._clock.monotonic() - began)
            self._metrics.count("metadata.descriptor_write_total")
            failpoints.reach("tier.after_commit")
            self._current_revision = revision or self._read_current()
            self.last = descriptor
            if self.first is None:
                self.first = descriptor

    def replace(self, old: ObjectDescriptor, new: ObjectDescriptor, revision: int) -> bool:
        """Puts an object in the place of another one with the same offsets.

        Args:
            old: As read.
            new: With the same offsets.
            revision: Of the old descriptor's key.

        Returns:
            False if the descriptor has changed meanwhile.
        """
        check((old.start, old.end) == (new.start, new.end), "a replacement has the same offsets")
        key = self.catalog.keys.descriptor(old.start)
        data = encode_descriptor(new)
        with self._lock:
            try:
                self._change(
                    [RevisionIs(key, revision)],
                    [Put(key, data)],
                    is_done=lambda: self._holds(key, data),
                )
            except FencedError:
                raise
            except ConflictError:
                return False
            if self.last is not None and self.last.start == new.start:
                self.last = new
            if self.first is not None and self.first.start == new.start:
                self.first = new
            return True

    def insert(self, descriptor: ObjectDescriptor) -> None:
        """Publishes an object that fills a hole between two others.

        Raises:
            FencedError: Somebody else owns the topic; nothing was published.
            ConflictError: There is an object that begins there.
            UnavailableError: The metadata store does not answer.
        """
        key = self.catalog.keys.descriptor(descriptor.start)
        data = encode_descriptor(descriptor)
        with self._lock:
            check(
                self.last is not None and descriptor.end <= self.last.start,
                "a hole lies before the newest object",
            )
            self._change(
                [Absent(key)],
                [Put(key, data), Delete(self.catalog.keys.session)],
                is_done=lambda: self._holds(key, data),
            )
            self.first = self.catalog.first()

    def adopt(self, descriptors: Sequence[ObjectDescriptor]) -> None:
        """Takes objects into the catalog that it has forgotten; each continues the one before."""
        for descriptor in descriptors:
            self.commit(descriptor)

    def expire(self, descriptors: Sequence[ObjectDescriptor]) -> None:
        """Takes the oldest objects, ascending, out of the topic. The newest one stays, always.

        Raises:
            FencedError: Somebody else owns the topic.
            UnavailableError: The metadata store does not answer. What was to go may be gone, and is
                not offered to readers any more.
        """
        with self._lock:
            self.check()
            check(
                self.last is not None and all(d.end <= self.last.start for d in descriptors),
                "the newest object stays",
            )
            # Before the change, whose answer may be lost: what may be gone is not offered.
            self.first = self.catalog.following(descriptors[-1].end)
            # And on record before it, so that nobody takes them for lost.
            floor = descriptors[-1].end
            self._put_record(
                lambda record: replace(record, expired_before=max(record.expired_before, floor))
            )
            for at in range(0, len(descriptors), _BATCH):
                batch = descriptors[at : at + _BATCH]
                self._change([], [Delete(self.catalog.keys.descriptor(d.start)) for d in batch])
                failpoints.reach("tier.after_expire")

    def seal(self, next_offset: int) -> None:
        """Hands the topic over: everything below `next_offset` is in the bucket.

        Raises:
            FencedError: Somebody else owns the topic.
            UnavailableError: The metadata store does not answer.
        """
        keys = self.catalog.keys
        with self._lock:
            check(
                next_offset in (self.tiered, self.start),
                f"sealed at {next_offset}, and the bucket ends at {self.tiered}",
            )
            state = SealedState(
                next_offset=next_offset,
                node=self._node,
                epoch=self.epoch,
                sealed_at=self._clock.now_ns() // 1_000_000_000,
            )
            self._change(
                [self._current_is_known()],
                [
                    Put(keys.sealed, encode_sealed(state)),
                    Delete(keys.owner),
                    Delete(keys.session),
                ],
            )
            failpoints.reach("tier.after_seal")

    def release(self) -> None:
        """Lets go of a topic that is closed; its next owner need not wait for the lease.

        Raises:
            UnavailableError: The metadata store does not answer; the lease ends by itself.
        """
        if not self.is_fenced:
            self._change([], [Delete(self.catalog.keys.owner)])

    def reassert(self, lease: Lease) -> None:
        """Puts the owner key back after the lease had ended, if nobody took the topic meanwhile.

        Raises:
            FencedError: Somebody has.
            UnavailableError: The metadata store does not answer.
        """
        self._change([], [self._owner_put(lease)])

    def mark_deleting(self) -> None:
        """Ends the topic: from here on nobody opens it, and its deletion goes on after a crash."""
        self._put_record(lambda record: replace(record, state="deleting"))

    def finish_delete(self) -> None:
        """The last step of a deletion; the record stays, so that the epoch goes on rising."""
        store, keys = self.catalog.store, self.catalog.keys
        # Key by key, each under the epoch: somebody else may have finished it, and the name may
        # be in use again.
        for prefix in (keys.storage, keys.subscriptions):
            while found := store.range(prefix, limit=_BATCH):
                self._change([], [Delete(item.key) for item in found])
        self._put_record(lambda record: replace(record, state="deleted", lineage=()))
        self.release()

    def _put_record(self, change: Callable[[TopicRecord], TopicRecord]) -> None:
        """Changes the record; what others have put into it meanwhile stays."""
        with self._lock:
            key = self.catalog.keys.record
            self._change([], lambda: [Put(key, encode_topic(change(self.record)))])
            self._refresh_record()

    # -- transactions -----------------------------------------------------------------------

    def _change(
        self,
        compares: list[Compare],
        operations: list[Operation] | Callable[[], list[Operation]],
        *,
        is_done: Callable[[], bool] | None = None,
    ) -> int | None:
        """One fenced transaction, carried through lost answers.

        Args:
            compares: What has to hold besides the epoch.
            operations: What to do; a function is asked anew at every attempt.
            is_done: Whether it has been done already, asked when an answer was lost or a compare
                failed. Without one, doing it twice is harmless.

        Returns:
            The revision; None if it turned out to have been done.
        """
        if self._fence is not None:
            raise self._fence.again()
        store = self.catalog.store
        unknown: CommitUnknownError | None = None
        for _ in range(_ATTEMPTS):
            with self._lock:
                fenced = RevisionIs(self.catalog.keys.record, self._revision)
                doing = operations() if callable(operations) else operations
                try:
                    revision = store.transact([fenced, *compares], doing)
                except CommitUnknownError as error:
                    unknown = error
                    if is_done is not None and is_done():
                        return None
                    continue
                except CapacityError:
                    # A store that fills up in the middle may refuse what it has done.
                    if is_done is not None and is_done():
                        return None
                    raise
                if revision is not None:
                    return revision
                if is_done is not None and is_done():
                    return None
                if not self._refresh_record():
                    raise ConflictError("the descriptors have changed", topic=self.topic)
        raise unknown or UnavailableError("the topic's record keeps changing", topic=self.topic)

    def _refresh_record(self) -> bool:
        """Reads the record again after a failed compare; whether it had changed.

        Raises:
            FencedError: It has another epoch, or the topic is gone.
        """
        if self._fence is not None:
            raise self._fence.again()
        found = self.catalog.record()
        if found is None or (found[0].epoch, found[0].claim) != (self.epoch, self.record.claim):
            self._fence = FencedError(
                "another owner has the topic",
                topic=self.topic,
                hint="what this one acknowledged and had not uploaded stays in its local files",
            )
            _log.error("fenced", extra={"topic": self.topic, "epoch": self.epoch})
            self.on_fenced(self._fence)
            raise self._fence.again()
        record, revision = found
        has_changed = revision != self._revision
        self.record, self._revision = record, revision
        return has_changed

    def check(self) -> None:
        """Makes sure, by asking, that nobody else has the topic.

        Raises:
            FencedError: Somebody has.
            UnavailableError: The metadata store does not answer.
        """
        self._refresh_record()

    def give_up(self, reason: IsterError) -> None:
        """Stops being the owner, because it cannot be told whether this one still is."""
        if self._fence is None:
            self._fence = FencedError(
                f"the topic's record cannot be used: {reason.message}", topic=self.topic
            )
            _log.error("given up", extra={"topic": self.topic, "error": str(reason)})
            self.on_fenced(self._fence)

    def _require_open(self) -> None:
        """Refuses to publish into a topic that is being deleted."""
        if not self.record.is_open:
            raise FencedError("the topic is being deleted", topic=self.topic)

    def _resync(self) -> None:
        self._current_revision = self._read_current()
        self.first, self.last = self.catalog.first(), self.catalog.last()

    def _current_is_known(self) -> Compare:
        key = self.catalog.keys.current
        if self._current_revision is None:
            return Absent(key)
        return RevisionIs(key, self._current_revision)

    def _read_current(self) -> int | None:
        found = self.catalog.store.get(self.catalog.keys.current)
        return None if found is None else found.revision

    def _holds(self, key: str, data: bytes) -> bool:
        found = self.catalog.store.get(key)
        if found is None:
            return False
        # Compared by meaning: the same object, whatever the spelling of its JSON.
        return decode_descriptor(found.value, key=key) == decode_descriptor(data, key=key)

    def _owner_put(self, lease: Lease) -> Put:
        return Put(
            self.catalog.keys.owner,
            encode_owner(OwnerRecord(node=self._node, epoch=self.epoch)),
            lease,
        )


def claim(
    catalog: Catalog,
    membership: Membership,
    *,
    new: NewTopic | None,
    take_over: bool,
    clock: Clock,
    metrics: Metrics,
    seen: ClaimCheck | None = None,
) -> OwnedTopic | None:
    """Makes this process the owner of a topic, under a new epoch.

    Args:
        catalog: The topic's.
        membership: This process's.
        new: How to make the topic if there is none.
        take_over: Claim a topic that another node did not hand over: what that one had not
            uploaded is given up.
        clock: For timestamps.
        metrics: Where commits are counted.
        seen: What `check_claim` has answered.

    Returns:
        The claim; None if the topic's record has changed since `seen`.

    Raises:
        NotFoundError: There is no such topic, and `new` is None.
        ConflictError: Another node has it.
        UnavailableError: The metadata store does not answer.
    """
    claimant = _Claimant(catalog, membership, new, take_over, clock, metrics)
    for _ in range(_ATTEMPTS):
        if seen is not None and not seen.still_holds(catalog):
            return None
        owned = claimant.attempt(seen)
        if owned is not None:
            return owned
    raise ConflictError("the topic keeps changing hands", topic=str(catalog.keys.topic))


def check_claim(
    catalog: Catalog,
    membership: Membership,
    *,
    new: NewTopic | None,
    has_files: bool,
    take_over: bool,
    clock: Clock,
    metrics: Metrics,
) -> ClaimCheck:
    """Makes sure that a topic may be claimed, without claiming it.

    Args:
        catalog: The topic's.
        membership: This process's.
        new: As for `claim`.
        has_files: Whether this node has local files of the topic.
        take_over: As for `claim`.
        clock: As for `claim`.
        metrics: As for `claim`.

    Returns:
        Whether such files are the topic's newest, and under which record. If not, somebody else
        has written it since, or it was deleted, and they have to be out of the way before the
        claim: after it nobody could tell.

    Raises:
        As `claim`, and:
        ConflictError: This node wrote the topic last, has not sealed it, and has no files of it.
    """
    claimant = _Claimant(catalog, membership, new, take_over, clock, metrics)
    found, sealed = catalog.record(), catalog.sealed()
    known = found[0] if found is not None else None
    owner = catalog.owner()
    claimant.refuse(known, owner[0] if owner is not None else None)
    claimant.next_record(known, sealed[0] if sealed is not None else None)
    revision = found[1] if found is not None else None
    if known is None or not known.is_open:
        return ClaimCheck(is_current=known is None, revision=revision)
    is_mine = bool(known.lineage) and known.lineage[-1].node == membership.node
    if is_mine and sealed is None and not has_files and not take_over:
        last = catalog.last()
        tiered = last.end if last is not None else 0
        raise ConflictError(
            "the topic's local files are gone, and they may have held messages that were "
            "acknowledged and not uploaded",
            topic=str(catalog.keys.topic),
            offset=tiered,
            hint=f"restore them; if they are lost, take_over=True goes on from offset {tiered}",
        )
    return ClaimCheck(is_current=is_mine or not known.lineage, revision=revision)


@dataclass(frozen=True, slots=True)
class _Claimant:
    """One claim, tried until nothing changes under it."""

    catalog: Catalog
    membership: Membership
    new: NewTopic | None
    take_over: bool
    clock: Clock
    metrics: Metrics

    def attempt(self, seen: ClaimCheck | None) -> OwnedTopic | None:
        """Reads, decides, and writes if what was read still holds; None if it does not."""
        catalog, keys, node = self.catalog, self.catalog.keys, self.membership.node
        found, owner, sealed = catalog.record(), catalog.owner(), catalog.sealed()
        if seen is not None and seen.revision != (found[1] if found is not None else None):
            return None
        known = found[0] if found is not None else None
        self.refuse(known, owner[0] if owner is not None else None)
        seal = sealed[0] if sealed is not None else None
        record, lease = self.next_record(known, seal), self.membership.lease
        compares: list[Compare] = [
            Absent(keys.record) if found is None else RevisionIs(keys.record, found[1]),
            Absent(keys.owner) if owner is None else RevisionIs(keys.owner, owner[1]),
            Absent(keys.sealed) if sealed is None else RevisionIs(keys.sealed, sealed[1]),
        ]
        operations: list[Operation] = [
            Put(keys.record, encode_topic(record)),
            Put(
                keys.owner,
                encode_owner(OwnerRecord(node=node, epoch=record.epoch)),
                lease,
            ),
            Delete(keys.sealed),
        ]
        try:
            revision = catalog.store.transact(compares, operations)
        except CommitUnknownError:
            again = catalog.record()
            revision = again[1] if again is not None and again[0] == record else None
        except NotFoundError:
            # The lease has ended, and nobody has noticed yet.
            self.membership.renew()
            return None
        if revision is None:
            return None
        failpoints.reach("tier.after_claim")
        owned = OwnedTopic(
            catalog,
            record=record,
            revision=revision,
            node=node,
            sealed=seal,
            clock=self.clock,
            metrics=self.metrics,
        )
        owned.is_rebuilt = known is not None and known.is_open and not known.lineage
        self.membership.add(owned, lease)
        return owned

    def refuse(self, known: TopicRecord | None, owner: OwnerRecord | None) -> None:
        """Raises if the topic is not there, or is somebody else's."""
        topic = str(self.catalog.keys.topic)
        if known is not None and known.state == "deleting":
            raise NotFoundError(f"the topic {topic} is being deleted", topic=topic)
        if self.new is None and (known is None or not known.is_open):
            raise NotFoundError(f"there is no topic {topic}", topic=topic)
        if owner is not None and owner.node != self.membership.node:
            raise ConflictError(
                f"the topic is open on node {owner.node}",
                topic=topic,
                hint="seal it there first, or wait for that node's lease to end",
            )

    def next_record(self, known: TopicRecord | None, sealed: SealedState | None) -> TopicRecord:
        """The record under this node's new epoch."""
        node = self.membership.node
        epoch = known.epoch + 1 if known is not None else 1
        if known is None or not known.is_open:
            check(self.new is not None, "a topic is made from something")
            return TopicRecord(
                epoch=epoch,
                incarnation=secrets.token_hex(8),
                claim=secrets.token_hex(8),
                ack=self.new.ack if self.new is not None else AckLevel.SYNCED,
                codec=self.new.codec if self.new is not None else Codec.BINCODE2,
                created_at=self.clock.now_ns() // 1_000_000_000,
                lineage=(Lineage(epoch=epoch, start=0, node=node),),
            )
        known = replace(known, epoch=epoch, claim=secrets.token_hex(8))
        if known.lineage and known.lineage[-1].node == node:
            return known
        last = self.catalog.last()
        tiered = last.end if last is not None else 0
        if known.lineage and sealed is None and not self.take_over:
            raise ConflictError(
                f"the topic was last written by node {known.lineage[-1].node}, which has not "
                "handed it over",
                topic=str(self.catalog.keys.topic),
                offset=tiered,
                hint="open it there, or hand it over there with `log.seal`; if that disk is lost, "
                f"take_over=True goes on from offset {tiered} and gives up what was not committed",
            )
        start = sealed.next_offset if sealed is not None else tiered
        lineage = (*known.lineage, Lineage(epoch=epoch, start=start, node=node))
        return replace(known, lineage=lineage[-OWNER_LINEAGE_MAX:])


def resume_delete(catalog: Catalog, *, clock: Clock, metrics: Metrics) -> OwnedTopic:
    """The right to finish a deletion that a crash has interrupted.

    Raises:
        NotFoundError: The topic is not being deleted.
    """
    found = catalog.record()
    if found is None or found[0].state != "deleting":
        raise NotFoundError(
            f"there is no topic {catalog.keys.topic}", topic=str(catalog.keys.topic)
        )
    record, revision = found
    return OwnedTopic(
        catalog,
        record=record,
        revision=revision,
        node="",
        sealed=None,
        clock=clock,
        metrics=metrics,
    )
