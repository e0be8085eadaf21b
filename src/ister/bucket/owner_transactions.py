"""Transactions that only a topic's owner can do.

Every change of a topic's metadata requires the topic's record to be the one this owner knows.
The next claim changes the record, so a replaced owner cannot publish, however late it wakes up. A
job that acts in the owner's name requires the same record, and its own fence.

A lost answer (`CommitUnknownError`) is resolved by reading back. Repeating the transaction is
harmless, because the first run changes what the second one requires.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ister.bucket.catalog import Catalog
from ister.bucket.fence import Fence
from ister.clock import Clock
from ister.errors import (
    CapacityError,
    CommitUnknownError,
    ConflictError,
    FencedError,
    IsterError,
    UnavailableError,
)
from ister.format.records import OwnerRecord, SealedState, TopicRecord, encode_owner, encode_topic
from ister.metadata.base import Absent, Compare, Delete, Lease, Operation, Put, RevisionIs
from ister.metrics import Metrics

if TYPE_CHECKING:
    from ister.bucket.claim import ClaimCheck

_log = logging.getLogger("ister.bucket.ownership")

_ATTEMPTS: Final = 5


class OwnerTransactions:
    """Changes the metadata of a topic as its owner, or in the owner's name. Thread-safe."""

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

    @property
    def is_fenced(self) -> bool:
        """Whether this process has noticed that another one owns the topic."""
        return self._fence is not None

    @property
    def is_leased(self) -> bool:
        """Whether the lease of the owner key is valid, by this process's clock."""
        return self.lease is not None and self._clock.boottime() < self.lease.valid_until

    def transact(self, compares: list[Compare], operations: list[Operation]) -> bool:
        """Runs a transaction that only the topic's owner can do; returns whether the compares held.

        Raises:
            FencedError: Another process owns the topic.
            UnavailableError: The metadata store does not answer, or the answer was lost.
        """
        return self.transact_at(compares, operations) is not None

    def transact_at(self, compares: list[Compare], operations: list[Operation]) -> int | None:
        """Like `transact`, but returns the transaction's revision; None if a compare did not hold.

        Raises:
            FencedError: Another process owns the topic.
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

        Args:
            compares: What has to hold besides the epoch.
            operations: The operations; a function is called again for every attempt.
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
        """Reads the record to make sure that this process still owns the topic.

        Raises:
            FencedError: Another process owns it.
            UnavailableError: The metadata store does not answer.
        """
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
