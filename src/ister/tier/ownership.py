"""Who may write a topic, and the only way in which its objects become visible.

    claim ─► commit, commit, … ─► seal (hand over)  or  release (close)

Owns: every change of a topic's metadata. Does not own: claims (`claim`), uploads, files, threads.

Invariants:

- every change is one transaction that requires the topic's record to be the one this owner knows:
  whoever claims the topic next changes the record, and from then on this one publishes nothing,
  however late it wakes up;
- descriptors follow each other: a commit also requires `cur`, the pointer to the newest one, to be
  unchanged, and begins where that one ends;
- somebody who acts in the owner's name (`outside`) requires the same record, and a fence of its
  own; what it changes does not change the record, so the owner goes on, and finds out by `refresh`,
  or by a commit of its own that fails because the pointer has moved;
- a lost answer (`CommitUnknownError`) is resolved by reading back; repeating the transaction is
  harmless, because the first run changes what the second one requires.

How one becomes a topic's owner is in `claim`, how one acts for it in `outside`.

What a crash leaves: an owner key that ends with its lease, a session that says which object may be
lying around, and descriptors that are all true.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Final

from ister import failpoints
from ister.clock import Clock
from ister.errors import (
    CapacityError,
    CommitUnknownError,
    ConflictError,
    CorruptDataError,
    FencedError,
    IsterError,
    NotFoundError,
    UnavailableError,
    check,
)
from ister.format.descriptor import ObjectDescriptor, decode_descriptor, encode_descriptor
from ister.format.records import (
    OwnerRecord,
    RetiredObjects,
    SealedState,
    TopicRecord,
    UploadSession,
    decode_current,
    decode_session,
    encode_current,
    encode_owner,
    encode_retired,
    encode_sealed,
    encode_session,
    encode_topic,
)
from ister.metadata.base import (
    Absent,
    Compare,
    Delete,
    Lease,
    Operation,
    Put,
    RevisionIs,
)
from ister.metrics import Metrics
from ister.tier.catalog import Catalog
from ister.tier.fence import Fence

__all__ = ["OwnedTopic", "resume_delete"]

_log = logging.getLogger("ister.tier.ownership")

_ATTEMPTS: Final = 5
# Deletions in one transaction; etcd takes 128 operations.
_BATCH: Final = 100


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
        fence: Fence | None = None,
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
        self._outside = fence
        self._fence: FencedError | None = None
        self.on_fenced: Callable[[FencedError], None] = lambda error: None
        """Called once, when it turns out that somebody else owns the topic."""
        self.lease: Lease | None = None
        """The lease of the owner key; None if another process acts for the owner."""
        self.on_regained: Callable[[], None] = lambda: None
        """Called when the owner key has been restored after the lease expired."""
        ends = catalog.ends()
        self._current_revision = ends.pointer_revision
        self.first = ends.first
        """The oldest object."""
        self.last = ends.last
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

    @property
    def is_leased(self) -> bool:
        """Whether the lease of the owner key is valid, by this process's clock."""
        return self.lease is not None and self._clock.boottime() < self.lease.valid_until

    # -- changes ----------------------------------------------------------------------------

    def transact(self, compares: list[Compare], operations: list[Operation]) -> bool:
        """One transaction that only the topic's owner can do; whether the compares held.

        Raises:
            FencedError: Somebody else owns the topic.
            UnavailableError: The metadata store does not answer, or the answer was lost.
        """
        try:
            self._change(compares, operations)
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
            ConflictError: An earlier commit, whose outcome was unknown, has happened after all, or
                one in this owner's name; `tiered` has moved, and the next object begins there.
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
            revision = self._publish(descriptor, key, data)
            self._metrics.observe("metadata.put_latency_seconds", self._clock.monotonic() - began)
            self._metrics.count("metadata.descriptor_write_total")
            failpoints.reach("tier.after_commit")
            if revision is None:
                # It is there, and others may have gone on from it.
                self._resync()
                if self.tiered > descriptor.end:
                    raise ConflictError("others have gone on", topic=self.topic)
                return
            self._current_revision = revision
            self.last = descriptor
            if self.first is None:
                self.first = descriptor

    def _publish(self, descriptor: ObjectDescriptor, key: str, data: bytes) -> int | None:
        keys = self.catalog.keys
        for _ in range(_ATTEMPTS):
            try:
                return self._change(
                    [self._current_is_known(), Absent(key)],
                    [
                        Put(key, data),
                        Put(keys.current, encode_current(descriptor.start)),
                        *self._session_ends(),
                    ],
                    is_done=lambda: self._holds(key, data),
                )
            except ConflictError:
                # A commit of our own that had been given up on has happened after all, somebody
                # has committed in our name, or has merged the newest object with others.
                self._resync()
                if self.last is None or self.last.end != descriptor.start:
                    raise
        raise UnavailableError("the newest object keeps changing", topic=self.topic)

    def _session_ends(self) -> list[Operation]:
        """The owner's upload is over with its commit; a job's commit says nothing about it."""
        return [] if self._outside is not None else [Delete(self.catalog.keys.session)]

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
            except ConflictError:
                return False
            if self.last is not None and self.last.start == new.start:
                self.last = new
            if self.first is not None and self.first.start == new.start:
                self.first = new
            return True

    def refresh(self) -> bool:
        """Looks whether somebody has committed in this owner's name; whether that is so.

        Raises:
            FencedError: Somebody has, in another owner's.
            UnavailableError: The metadata store does not answer.
        """
        with self._lock:
            if self._read_current() == self._current_revision:
                return False
            self._resync()
            return True

    def swap(
        self, old: Sequence[tuple[ObjectDescriptor, int]], new: ObjectDescriptor, *, until: int
    ) -> bool:
        """Puts one object in the place of several that follow each other.

        Args:
            old: As read, ascending, each with its key's revision; at most 100.
            new: With the offsets of all of them.
            until: The second since the Unix epoch up to which the old objects are kept, for those
                who are reading them.

        Returns:
            False if one of the descriptors has changed meanwhile; nothing was done then.

        Raises:
            FencedError: Somebody else owns the topic.
            UnavailableError: The metadata store does not answer.
        """
        keys = self.catalog.keys
        first, last = old[0][0], old[-1][0]
        check(
            (first.start, last.end) == (new.start, new.end)
            and all(a.end == b.start for (a, _), (b, _) in pairwise(old))
            and len(old) <= _BATCH,
            "a merged object has the offsets of those that it replaces",
        )
        key, data = keys.descriptor(new.start), encode_descriptor(new)
        retired = RetiredObjects(objects=tuple(d.object_id for d, _ in old), until=until)
        compares: list[Compare] = [RevisionIs(keys.descriptor(d.start), r) for d, r in old]
        operations: list[Operation] = [
            Put(key, data),
            *(Delete(keys.descriptor(d.start)) for d, _ in old[1:]),
            Put(keys.retired(new.object_id), encode_retired(retired)),
        ]
        with self._lock:
            self._require_open()
            self.refresh()
            is_newest = self.last is not None and self.last.end == new.end
            if is_newest:
                # The pointer says where the newest one starts.
                compares.append(self._current_is_known())
                operations.append(Put(keys.current, encode_current(new.start)))
            failpoints.reach("tier.before_swap")
            try:
                self._change(compares, operations, is_done=lambda: self._holds(key, data))
            except ConflictError:
                return False
            failpoints.reach("tier.after_swap")
            self._resync()
            return True

    def remove(self, descriptor: ObjectDescriptor, revision: int) -> bool:
        """Takes a descriptor out that should not be there: others have its offsets.

        Returns:
            False if it has changed meanwhile.

        Raises:
            FencedError: Somebody else owns the topic.
            UnavailableError: The metadata store does not answer.
        """
        key = self.catalog.keys.descriptor(descriptor.start)
        with self._lock:
            try:
                self._change(
                    [RevisionIs(key, revision)],
                    [Delete(key)],
                    is_done=lambda: self.catalog.store.get(key) is None,
                )
            except ConflictError:
                return False
            self._resync()
            self.mend_current()
            return True

    def mend_current(self) -> bool:
        """Has the pointer to the newest object name it again; whether it did not.

        Raises:
            FencedError: Somebody else owns the topic.
            UnavailableError: The metadata store does not answer.
        """
        keys = self.catalog.keys
        with self._lock:
            found = self.catalog.store.get(keys.current)
            self._resync()
            if self.last is None:
                return False
            data = encode_current(self.last.start)
            with suppress(CorruptDataError):
                if found is not None and (
                    decode_current(found.value, key=found.key) == self.last.start
                ):
                    return False
            # A commit or a merge of the newest one changes the pointer: then it is right by itself.
            try:
                self._change([self._current_is_known()], [Put(keys.current, data)])
            except ConflictError:
                return False
            self._resync()
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
                [Put(key, data), *self._session_ends()],
                is_done=lambda: self._holds(key, data),
            )
            self.first = self.catalog.first()

    def adopt(self, descriptors: Sequence[ObjectDescriptor]) -> None:
        """Takes objects into the catalog that it has forgotten; each continues the one before."""
        for descriptor in descriptors:
            self.commit(descriptor)

    def expire(self, descriptors: Sequence[ObjectDescriptor]) -> list[ObjectDescriptor]:
        """Takes the oldest objects, ascending, out of the topic. The newest one stays, always.

        Returns:
            Those that went; an object that was merged with others meanwhile is not among them, nor
            is one that does not lie before the newest object of now.

        Raises:
            FencedError: Somebody else owns the topic.
            UnavailableError: The metadata store does not answer. If it is on record that they go,
                they may be gone, and are not offered to readers any more.
        """
        with self._lock:
            self.check()
            # By what is known now, not when this was planned: the newest one may be a merged one.
            newest = self.last.start if self.last is not None else 0
            descriptors = [described for described in descriptors if described.end <= newest]
            if not descriptors:
                return []
            floor = descriptors[-1].end
            first = self.catalog.holding(floor)
            # On record before it happens, so that nobody takes them for lost.
            self._put_record(
                lambda record: replace(record, expired_before=max(record.expired_before, floor))
            )
            # Before the change, whose answer may be lost: what may be gone is not offered. And not
            # sooner: what nothing was done about is still offered.
            self.first = first
            expired: list[ObjectDescriptor] = []
            for at in range(0, len(descriptors), _BATCH):
                expired += self._expire(descriptors[at : at + _BATCH])
                failpoints.reach("tier.after_expire")
            # Not what was looked up before: it may have been merged with what was to go.
            self.first = self.catalog.first()
            return expired

    def _expire(self, planned: Sequence[ObjectDescriptor]) -> list[ObjectDescriptor]:
        keys, wanted = self.catalog.keys, {d.object_id for d in planned}

        def there() -> list[tuple[ObjectDescriptor, int]]:
            # By what is there now: under a key of the plan there may be a merged object, with more.
            return [
                (described, revision)
                for described, revision in self.catalog.descriptors(
                    planned[0].start, planned[-1].end
                )
                if described.object_id in wanted
            ]

        for _ in range(_ATTEMPTS):
            found = there()
            if not found:
                return []
            try:
                self._change(
                    [RevisionIs(keys.descriptor(d.start), revision) for d, revision in found],
                    [Delete(keys.descriptor(d.start)) for d, _ in found],
                    is_done=lambda: not there(),
                )
            except ConflictError:
                continue  # one of them was merged just now
            return [described for described, _ in found]
        raise UnavailableError("the topic's objects keep changing", topic=self.topic)

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
            data = encode_sealed(state)
            operations: list[Operation] = [
                Put(keys.sealed, data),
                Delete(keys.owner),
                Delete(keys.session),
            ]

            def is_done() -> bool:
                found = self.catalog.store.get(keys.sealed)
                return found is not None and found.value == data

            for attempt in range(_ATTEMPTS):
                try:
                    self._change([self._current_is_known()], operations, is_done=is_done)
                    break
                except ConflictError:
                    # The newest object was merged with others meanwhile: the end is the same.
                    self._resync()
                    if attempt == _ATTEMPTS - 1 or next_offset not in (self.tiered, self.start):
                        raise
            failpoints.reach("tier.after_seal")

    def release(self) -> None:
        """Lets go of a topic that is closed; its next owner need not wait for the lease.

        Raises:
            UnavailableError: The metadata store does not answer; the lease ends by itself.
        """
        if not self.is_fenced:
            self._change([], [Delete(self.catalog.keys.owner)])

    def reassert(self, lease: Lease, is_here: Compare) -> None:
        """Restores the owner key after the lease expired, if no other node has claimed the topic.

        Args:
            lease: The new lease.
            is_here: A compare that holds while this process has the node.

        Raises:
            FencedError: Another node has claimed it.
            ConflictError: The topic was handed over, or `is_here` does not hold.
            UnavailableError: The metadata store does not respond.
        """
        if not self.transact([is_here, self._is_kept()], [self._owner_put(lease)]):
            raise ConflictError("the topic was handed over", topic=self.topic)

    def reassertion(self, lease: Lease) -> tuple[list[Compare], Put]:
        """The compares and the put of `reassert`, to combine topics in one transaction."""
        with self._lock:
            is_known = RevisionIs(self.catalog.keys.record, self._revision)
        return [is_known, self._is_kept()], self._owner_put(lease)

    def _is_kept(self) -> Compare:
        # A seal leaves the record as it is: without this, a request that lands late would make a
        # topic that was handed over this node's again, for as long as it lives.
        return Absent(self.catalog.keys.sealed)

    def regain(self, lease: Lease) -> None:
        """Records that the owner key was restored with a new lease."""
        self.lease = lease
        self.on_regained()

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
                fenced: list[Compare] = [RevisionIs(self.catalog.keys.record, self._revision)]
                if self._outside is not None:
                    fenced.append(self._outside.compare)
                doing = operations() if callable(operations) else operations
                try:
                    revision = store.transact([*fenced, *compares], doing)
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
                if self._outside is not None:
                    self._outside.check(self.topic)
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
        if self._outside is not None and not record.is_open:
            # Its owner may change it still; what others put there would be left behind.
            raise FencedError("the topic is being deleted", topic=self.topic)
        has_changed = revision != self._revision
        self.record, self._revision = record, revision
        return has_changed

    def check(self) -> None:
        """Makes sure, by asking, that nobody else has the topic.

        Raises:
            FencedError: Somebody has.
            UnavailableError: The metadata store does not answer.
        """
        if self._outside is not None:
            self._outside.check(self.topic)
        self._refresh_record()

    def give_up(self, reason: IsterError) -> None:
        """Stops being the owner, because it cannot be told whether this one still is."""
        if self._fence is None:
            text = f"the topic's record cannot be used: {reason.message}"
            if isinstance(reason, FencedError):
                text = reason.message
            self._fence = FencedError(text, topic=self.topic, hint=reason.hint)
            _log.error("given up", extra={"topic": self.topic, "error": str(reason)})
            self.on_fenced(self._fence)

    def _require_open(self) -> None:
        """Refuses to publish into a topic that is being deleted."""
        if not self.record.is_open:
            raise FencedError("the topic is being deleted", topic=self.topic)

    def _resync(self) -> None:
        """Reads anew what the topic consists of.

        Raises:
            FencedError: The topic is another owner's by now, and so may be what was read.
        """
        # The pointer may be older than the rest; then only the next commit fails.
        ends = self.catalog.ends()
        self._refresh_record()
        self._current_revision = ends.pointer_revision
        self.first, self.last = ends.first, ends.last

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
