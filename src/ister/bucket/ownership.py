"""The objects of a topic, as its owner publishes, replaces and removes them.

    claim ─► commit, commit, … ─► seal (hand over)  or  release (close)

Descriptors follow each other: a commit requires `cur`, the pointer to the newest one, to be
unchanged, and begins where that one ends. A job that acts in the owner's name (`claim.act_outside`)
changes descriptors and not the record, so the owner continues. It notices such changes in
`refresh`, or when a commit of its own fails because the pointer has moved.

Every change of a topic's metadata requires the topic's record to be the one this owner knows. The
next claim changes the record, so a replaced owner cannot publish, however late it wakes up. A job
that acts in the owner's name requires the same record, and its own fence. A lost answer
(`CommitUnknownError`) is resolved by reading back. Repeating the transaction is harmless, because
the first run changes what the second one requires.

What a crash leaves: an owner key that expires with its lease, a session that names the object that
may be left over, and descriptors that are all true.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from ister.base import failpoints
from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.bucket.catalog import Catalog
from ister.bucket.fence import Fence
from ister.errors import (
    CapacityError,
    CommitUnknownError,
    ConflictError,
    CorruptDataError,
    FencedError,
    IsterError,
    NotFoundError,
    StoresDifferError,
    UnavailableError,
    check,
)
from ister.format.descriptor import (
    FORMAT_EXPRESS,
    ObjectDescriptor,
    decode_descriptor,
    encode_descriptor,
)
from ister.format.records import (
    OwnerRecord,
    RetiredObjects,
    SealedState,
    TopicRecord,
    UploadSession,
    decode_pointer,
    decode_session,
    encode_current,
    encode_owner,
    encode_retired,
    encode_sealed,
    encode_session,
    encode_topic,
)
from ister.metadata.base import Absent, Compare, Delete, KeyValue, Lease, Operation, Put, RevisionIs

if TYPE_CHECKING:
    from ister.bucket.claim import ClaimCheck

_log = logging.getLogger("ister.bucket.ownership")

_ATTEMPTS: Final = 5
# Deletions in one transaction; etcd takes 128 operations.
_BATCH: Final = 100


class OwnedTopic:
    """A topic that this process may write. Made by `claim`. Thread-safe.

    Every change raises FencedError if another process owns the topic by now, and UnavailableError
    if the metadata store does not answer.
    """

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
        """Whether the last writer is unknown: the metadata was rebuilt from the bucket."""
        self.sealed_before = sealed
        """The seal that this claim has removed; None if the topic was not sealed."""
        self._node = node
        self._revision = revision
        self._clock = clock
        self._metrics = metrics
        self.lock = threading.RLock()
        """Held while the topic's objects are changed."""
        self._outside = fence
        self._fence: FencedError | None = None
        self.on_fenced: Callable[[FencedError], None] = lambda error: None
        """Called once, when it turns out that another process owns the topic."""
        self.changed_at = revision
        """The revision of this owner's last change, or of the claim."""
        self.unread: ClaimCheck | None = None
        """What was known before the claim, if the objects were not compared with the catalog since,
        because the bucket did not answer; else None."""
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
    def is_fenced(self) -> bool:
        """Whether this process has noticed that another one owns the topic."""
        return self._fence is not None

    @property
    def is_leased(self) -> bool:
        """Whether the lease of the owner key is valid, by this process's clock."""
        return self.lease is not None and self._clock.boottime() < self.lease.valid_until

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

    # -- transactions -------------------------------------------------------------------------

    def transact(self, compares: list[Compare], operations: list[Operation]) -> bool:
        """Runs a transaction that only the topic's owner can do; returns whether the compares held.

        Raises:
            UnavailableError: The metadata store does not answer, or the answer was lost.
        """
        return self.transact_at(compares, operations) is not None

    def transact_at(self, compares: list[Compare], operations: list[Operation]) -> int | None:
        """Like `transact`, but returns the transaction's revision; None if a compare did not hold.

        Raises:
            UnavailableError: The metadata store does not answer, or the answer was lost.
        """
        try:
            return self._change(compares, operations)
        except ConflictError:
            return None

    def release(self) -> None:
        """Removes the owner key of a closed topic; its next owner need not wait for the lease.

        Raises:
            UnavailableError: The metadata store does not answer; the lease expires by itself.
        """
        if not self.is_fenced:
            self._change([], [Delete(self.catalog.keys.owner)])

    def reassert(self, lease: Lease, is_here: Compare) -> None:
        """Restores the owner key after the lease expired, if no other node has claimed the topic.

        `is_here`: A compare that holds while this process has the node.

        Raises:
            FencedError: Another node has claimed it.
            ConflictError: The topic was handed over, or `is_here` does not hold.
        """
        if not self.transact([is_here, self._is_kept()], [self._owner_put(lease)]):
            raise ConflictError("the topic was handed over", topic=self.topic)

    def reassertion(self, lease: Lease) -> tuple[list[Compare], Put]:
        """The compares and the put of `reassert`, to combine topics in one transaction."""
        with self.lock:
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

    def _change(
        self,
        compares: list[Compare],
        operations: list[Operation] | Callable[[], list[Operation]],
        *,
        is_done: Callable[[], bool] | None = None,
    ) -> int | None:
        """Runs a fenced transaction; a lost answer is resolved by reading back.

        `compares`: what has to hold besides the epoch.
        `operations`: the operations; a function is called again for every attempt.
        `is_done`: whether it has been done already, asked when an answer was lost or a compare
        failed. Without one, doing it twice is harmless.
        Returns the revision; None if it turned out to have been done.
        """
        if self._fence is not None:
            raise self._fence.again()
        store = self.catalog.store
        unknown: CommitUnknownError | None = None
        for _ in range(_ATTEMPTS):
            with self.lock:
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
                    self.changed_at = max(self.changed_at, revision)
                    return revision
                if is_done is not None and is_done():
                    return None
                if self._outside is not None:
                    self._outside.check(self.topic)
                if not self._refresh_record():
                    raise ConflictError("the descriptors have changed", topic=self.topic)
        raise unknown or UnavailableError("the topic's record keeps changing", topic=self.topic)

    def _refresh_record(self) -> bool:
        """Reads the record again after a failed compare; returns whether it has changed.

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
        """Reads the record to make sure that this process still owns the topic."""
        if self._outside is not None:
            self._outside.check(self.topic)
        self._refresh_record()

    def give_up(self, reason: IsterError) -> None:
        """Stops being the owner, because it is unknown whether this process still is."""
        if self._fence is None:
            text = f"the topic's record cannot be used: {reason.message}"
            if isinstance(reason, FencedError):
                text = reason.message
            self._fence = FencedError(text, topic=self.topic, hint=reason.hint)
            _log.error("ownership given up", extra={"topic": self.topic, "error": str(reason)})
            self.on_fenced(self._fence)

    def _require_open(self) -> None:
        """Refuses to publish into a topic that is being deleted."""
        if not self.record.is_open:
            raise FencedError("the topic is being deleted", topic=self.topic)

    def _put_record(self, change: Callable[[TopicRecord], TopicRecord]) -> None:
        """Changes the record; what others have put into it meanwhile stays."""
        with self.lock:
            key = self.catalog.keys.record
            self._change([], lambda: [Put(key, encode_topic(change(self.record)))])
            self._refresh_record()

    def _owner_put(self, lease: Lease) -> Put:
        return Put(
            self.catalog.keys.owner,
            encode_owner(OwnerRecord(node=self._node, epoch=self.epoch)),
            lease,
        )

    # -- changes ----------------------------------------------------------------------------

    def begin(self, session: UploadSession) -> None:
        """Records which object is about to be written; a fenced owner is refused here already."""
        self._require_open()
        failpoints.reach("tier.before_session")
        self._change([], [Put(self.catalog.keys.session, encode_session(session))])
        failpoints.reach("tier.after_session")

    def session(self) -> UploadSession | None:
        """The object whose upload the last owner, or this one, has not finished."""
        found = self.catalog.store.get(self.catalog.keys.session)
        return None if found is None else decode_session(found.value, key=found.key)

    def commit(self, descriptor: ObjectDescriptor, *, also: Sequence[Compare] = ()) -> None:
        """Publishes an object: from here on it is part of the topic.

        `descriptor`: of the object; begins where the newest one ends.

        Raises:
            FencedError: Another process owns the topic; nothing was published.
            ConflictError: An earlier commit, whose outcome was unknown, has happened after all, or
                one in this owner's name, or by another thread; `tiered` has moved, and the next
                object begins there.
            CommitUnknownError: The store's answers were lost, again and again. The same commit may
                be tried again.
        """
        keys = self.catalog.keys
        key = keys.descriptor(descriptor.start)
        data = encode_descriptor(descriptor)
        with self.lock:
            self._require_open()
            if self.tiered > descriptor.start:
                # An object of another thread has these offsets: an express object.
                self.check()
                raise self._moved()
            check(
                self.last is None or self.last.end == descriptor.start,
                f"a commit continues: {descriptor.start} after {self.tiered}",
            )
            failpoints.reach("tier.before_commit")
            began = self._clock.monotonic()
            revision = self._publish(descriptor, key, data, also)
            self._metrics.observe("metadata.put_latency_seconds", self._clock.monotonic() - began)
            self._metrics.count("metadata.descriptor_write_total")
            failpoints.reach("tier.after_commit")
            if revision is None:
                # It was committed, and others may have continued from it.
                self._resync()
                if self.tiered > descriptor.end:
                    raise self._moved()
                return
            self.take_commit(descriptor, revision)

    def prepare_commit(
        self, descriptor: ObjectDescriptor, *, is_first: bool
    ) -> tuple[list[Compare], list[Operation]]:
        """The compares and operations of `commit`, to commit for many topics in one transaction.

        The caller holds `lock` until it has called `take_commit`, or given up.

        `is_first`: whether it may be the topic's first one; else it has to continue another.

        Raises:
            ConflictError: The newest object is another one.
        """
        self._require_open()
        if self._fence is not None:
            raise self._fence.again()
        if not (is_first if self.last is None else self.last.end == descriptor.start):
            raise self._moved()
        keys = self.catalog.keys
        key = keys.descriptor(descriptor.start)
        return (
            [RevisionIs(keys.record, self._revision), self._current_is_known(), Absent(key)],
            [
                Put(key, encode_descriptor(descriptor)),
                Put(keys.current, encode_current(descriptor.start, descriptor.end)),
            ],
        )

    def _moved(self) -> ConflictError:
        return ConflictError("the topic's newest object has changed", topic=self.topic)

    def take_commit(self, descriptor: ObjectDescriptor, revision: int) -> None:
        """Records a commit that has succeeded."""
        self._current_revision = revision
        self.changed_at = max(self.changed_at, revision)
        self.last = descriptor
        if self.first is None:
            self.first = descriptor

    def _publish(
        self, descriptor: ObjectDescriptor, key: str, data: bytes, also: Sequence[Compare]
    ) -> int | None:
        keys = self.catalog.keys
        # A run of an express object may be committed while an upload is under way.
        ends = [] if descriptor.format == FORMAT_EXPRESS else self._session_ends()
        for _ in range(_ATTEMPTS):
            try:
                return self._change(
                    [self._current_is_known(), Absent(key), *also],
                    [
                        Put(key, data),
                        Put(keys.current, encode_current(descriptor.start, descriptor.end)),
                        *ends,
                    ],
                    is_done=lambda: self._holds(key, data),
                )
            except ConflictError:
                # An earlier commit of ours, which seemed to have failed, has happened; or a job has
                # committed in our name, or merged the newest object with others.
                self._resync()
                if self.last is None or self.last.end != descriptor.start:
                    raise
        raise UnavailableError("the newest object keeps changing", topic=self.topic)

    def _session_ends(self) -> list[Operation]:
        """The owner's commit ends its upload session; a job's commit does not."""
        return [] if self._outside is not None else [Delete(self.catalog.keys.session)]

    def replace(self, old: ObjectDescriptor, new: ObjectDescriptor, revision: int) -> bool:
        """Puts an object in the place of another one with the same offsets.

        Returns False if the descriptor has changed meanwhile.
        """
        check((old.start, old.end) == (new.start, new.end), "a replacement has the same offsets")
        key = self.catalog.keys.descriptor(old.start)
        data = encode_descriptor(new)
        with self.lock:
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
        """Reads the newest object again; returns whether a job committed in this owner's name."""
        with self.lock:
            if self._read_current() == self._current_revision:
                return False
            self._resync()
            return True

    def swap(
        self,
        old: Sequence[tuple[ObjectDescriptor, int]],
        new: ObjectDescriptor,
        *,
        until: int,
        also: Sequence[Compare] = (),
        stays: Callable[[ObjectDescriptor], bool] = lambda described: False,
    ) -> bool:
        """Puts one object in the place of several that follow each other.

        `old`: as read, ascending, each with its key's revision; at most 100.
        `until`: the second since the Unix epoch up to which the old objects are kept, for those who
        are reading them.
        `stays`: whether an old object stays long enough without being listed for `until`.
        Returns False if one of the descriptors has changed meanwhile, or a further condition does
        not hold; nothing was done then.
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
        kept = tuple(d.object_id for d, _ in old if not stays(d))
        compares: list[Compare] = [RevisionIs(keys.descriptor(d.start), r) for d, r in old]
        compares += also
        operations: list[Operation] = [
            Put(key, data),
            *(Delete(keys.descriptor(d.start)) for d, _ in old[1:]),
        ]
        if kept:
            retired = encode_retired(RetiredObjects(objects=kept, until=until))
            operations.append(Put(keys.retired(new.object_id), retired))
        with self.lock:
            self._require_open()
            self.refresh()
            is_newest = self.last is not None and self.last.end == new.end
            if is_newest:
                # The pointer has the start of the newest object.
                compares.append(self._current_is_known())
                operations.append(Put(keys.current, encode_current(new.start, new.end)))
            failpoints.reach("tier.before_swap")
            try:
                self._change(compares, operations, is_done=lambda: self._holds(key, data))
            except ConflictError:
                return False
            failpoints.reach("tier.after_swap")
            self._resync()
            return True

    def remove(self, descriptor: ObjectDescriptor, revision: int) -> bool:
        """Removes a descriptor whose offsets other objects have.

        Returns False if it has changed meanwhile.
        """
        key = self.catalog.keys.descriptor(descriptor.start)
        with self.lock:
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
        """Corrects the pointer to the newest object; returns whether it was wrong."""
        keys = self.catalog.keys
        with self.lock:
            found = self.catalog.store.get(keys.current)
            self._resync()
            if self.last is None:
                return False
            data = encode_current(self.last.start, self.last.end)
            with suppress(CorruptDataError):
                if found is not None:
                    pointer = decode_pointer(found.value, key=found.key)
                    if pointer.names(self.last.start, self.last.end):
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
            FencedError: Another process owns the topic; nothing was published.
            ConflictError: There is an object that begins there.
        """
        key = self.catalog.keys.descriptor(descriptor.start)
        data = encode_descriptor(descriptor)
        with self.lock:
            check(
                self.last is not None and descriptor.end <= self.last.start,
                "a hole is before the newest object",
            )
            self._change(
                [Absent(key)],
                [Put(key, data), *self._session_ends()],
                is_done=lambda: self._holds(key, data),
            )
            self.first = self.catalog.first()

    def adopt(self, descriptors: Sequence[ObjectDescriptor]) -> None:
        """Adds objects that the catalog has lost; each continues the one before."""
        for descriptor in descriptors:
            self.commit(descriptor)

    def expire(self, descriptors: Sequence[ObjectDescriptor]) -> list[ObjectDescriptor]:
        """Removes the oldest objects, ascending, from the topic. The newest one always stays.

        Returns the removed ones; not objects that were merged meanwhile or that are not before the
        current newest object.

        Raises:
            UnavailableError: The metadata store does not answer. If their expiry was recorded, they
                may be removed, and are not offered to readers any more.
        """
        with self.lock:
            self.check()
            # By what is known now, not when this was planned: the newest one may be a merged one.
            newest = self.last.start if self.last is not None else 0
            descriptors = [described for described in descriptors if described.end <= newest]
            if not descriptors:
                return []
            floor = descriptors[-1].end
            first = self.catalog.holding(floor)
            # Recorded before it happens, so that they are not taken for lost.
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
            StoresDifferError: The bucket ends elsewhere.
        """
        keys = self.catalog.keys
        with self.lock:
            if next_offset not in (self.tiered, self.start):
                # The local files of an earlier term, and a catalog that was put back to before it.
                raise StoresDifferError(
                    f"the local files end at {next_offset}, and the bucket at {self.tiered}",
                    topic=self.topic,
                    hint="`ister metadata check` shows what the other stores have",
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

    def begin_at(self, start: int) -> None:
        """Corrects where this owner's offsets begin: objects that it was to adopt are gone."""
        if self.record.lineage and self.record.lineage[-1].epoch == self.epoch:
            entry = replace(self.record.lineage[-1], start=start)
            self._put_record(lambda record: replace(record, lineage=(*record.lineage[:-1], entry)))

    def set_acked_end(self, end: int | None) -> None:
        """Records that nothing from `end` on was acknowledged or delivered, or that this ended.

        Always writes, so that an earlier change whose answer was lost cannot happen after this one.

        Raises:
            FencedError: Another process owns the topic; nothing was recorded.
            UnavailableError: The metadata store does not answer; it may have been recorded.
        """
        epoch = 0 if end is None else self.epoch
        self._put_record(lambda record: replace(record, acked_end=end, acked_epoch=epoch))

    def mark_deleting(self) -> None:
        """Marks the topic: no process opens it any more, and deletion continues after a crash."""
        self._put_record(lambda record: replace(record, state="deleting"))

    def finish_delete(self) -> None:
        """Finishes a deletion; the record stays, so that the epoch continues to rise."""
        store, keys = self.catalog.store, self.catalog.keys
        # Key by key, each under the epoch: another process may have finished the deletion and
        # created the topic again.
        for prefix in (keys.storage, keys.subscriptions):
            while found := store.range(prefix, limit=_BATCH):
                self._change([], [Delete(item.key) for item in found])
        self._put_record(lambda record: replace(record, state="deleted", lineage=()))
        self.release()

    def _resync(self) -> None:
        """Reads the topic's first and newest object again.

        Raises:
            FencedError: The topic is another owner's by now, and so may be what was read; or the
                metadata store was rolled back to an older state: open the topic again.
        """
        # The pointer may be older than the rest; then only the next commit fails.
        ends = self.catalog.ends()
        self._refresh_record()
        if self.tiered > (ends.last.end if ends.last is not None else 0):
            self.give_up(ConflictError("the catalog ends before what was committed"))
            self._refresh_record()
        self._current_revision = ends.pointer_revision
        self.first, self.last = ends.first, ends.last

    def knows_pointer(self, found: KeyValue | None) -> bool:
        """Whether the pointer to the newest object is as this owner left it."""
        return (None if found is None else found.revision) == self._current_revision

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


def resume_delete(catalog: Catalog, *, clock: Clock, metrics: Metrics) -> OwnedTopic:
    """The right to finish a deletion that a crash has interrupted.

    Raises:
        NotFoundError: The topic is not being deleted.
    """
    found = catalog.record()
    if found is None or found[0].state != "deleting":
        raise NotFoundError(
            f"topic {catalog.keys.topic} does not exist", topic=str(catalog.keys.topic)
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
