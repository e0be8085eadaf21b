"""Becoming a topic's owner.

    check ─► (the caller makes its directory ready) ─► claim ─► epoch + 1

Owns: the transaction that changes a topic's owner. Does not own: this process's lease and node key
(`membership`), what an owner may do (`ownership`), local files.

Nodes. An owner is a `node`, which has one process at a time: every claim compares the node's key.
So a node that restarts claims its own topics immediately, without waiting for the lease of its
earlier process to expire. Another node may claim a topic that was sealed, and one whose owner's
lease has ended if the record proves that the bucket has everything that was acknowledged or
delivered (`TopicRecord.is_whole`). Any other topic may have messages on another node's disk and
waits for it; claiming it takes `take_over`, which continues from what the bucket holds and abandons
the rest.

A claim requires the record to be the one that was read when the directory was prepared: outdated
files are set aside before the claim, because afterwards they look like new ones.

What a crash leaves: an owner key that expires with its lease.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Final

from ister import failpoints
from ister.bucket.catalog import Catalog
from ister.bucket.fence import Fence
from ister.bucket.membership import Membership
from ister.bucket.ownership import OwnedTopic
from ister.clock import Clock
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    NotFoundError,
    WaitsForDiskError,
    check,
)
from ister.format.records import (
    Lineage,
    OwnerRecord,
    SealedState,
    TopicRecord,
    encode_owner,
    encode_topic,
)
from ister.limits import OWNER_LINEAGE_MAX
from ister.metadata.base import (
    Absent,
    Compare,
    Delete,
    Operation,
    Put,
    RevisionIs,
)
from ister.metrics import Metrics
from ister.model import AckLevel, Codec

_ATTEMPTS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTopic:
    """Settings of a topic that the claim creates."""

    ack: AckLevel
    codec: Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimView:
    """The keys that a claim depends on, with their values and revisions as read.

    Read once for an opening: the claim's transaction requires all of them to be unchanged.
    """

    record: tuple[TopicRecord, int] | None
    owner: tuple[OwnerRecord, int] | None
    sealed: tuple[SealedState, int] | None

    @classmethod
    def read(cls, catalog: Catalog) -> ClaimView:
        """Reads the keys of one topic."""
        found = catalog.ownership()
        return cls(record=found.record, owner=found.owner, sealed=found.sealed)

    @property
    def known(self) -> TopicRecord | None:
        """The topic's record; None if the topic does not exist."""
        return self.record[0] if self.record is not None else None

    @property
    def seal(self) -> SealedState | None:
        """The seal of a topic that was handed over and has no owner yet; else None."""
        return self.sealed[0] if self.sealed is not None else None

    @property
    def revision(self) -> int | None:
        """The record's revision; None if the topic does not exist."""
        return self.record[1] if self.record is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimCheck:
    """The result of `check_claim`."""

    is_current: bool
    """Whether local files, if there are any, are the topic's newest."""
    view: ClaimView
    """The keys that this result was derived from."""
    gives_up: bool = False
    """Whether this node continues without its own files: their offsets are assigned again."""


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
        take_over: Claim a topic that another node did not hand over: what that node had not
            uploaded is lost.
        clock: For timestamps.
        metrics: Where commits are counted.
        seen: The result of `check_claim`.

    Returns:
        The claim; None if the topic's record has changed since `seen`.

    Raises:
        NotFoundError: There is no such topic, and `new` is None.
        WaitsForDiskError: Its newest messages may be on another node's disk.
        ConflictError: Another node has it.
        UnavailableError: The metadata store does not answer.
    """
    claimant = _Claimant(catalog, membership, new, take_over, clock, metrics)
    view = seen.view if seen is not None else ClaimView.read(catalog)
    for _ in range(_ATTEMPTS):
        owned = claimant.attempt(view, gives_up=seen is not None and seen.gives_up)
        if owned is not None:
            return owned
        view = ClaimView.read(catalog)
        if seen is not None and view.revision != seen.view.revision:
            return None
    raise ConflictError("the owner of the topic keeps changing", topic=str(catalog.keys.topic))


def check_claim(
    catalog: Catalog,
    membership: Membership,
    view: ClaimView,
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
        view: The topic's keys, as read for this claim.
        new: As for `claim`.
        has_files: Whether this node has local files of the topic.
        take_over: As for `claim`.
        clock: As for `claim`.
        metrics: As for `claim`.

    Returns:
        Whether the local files are the topic's newest, and under which record. If not, another
        node has written the topic since, or it was deleted, and the files have to be set aside
        before the claim: afterwards they look like new ones.

    Raises:
        As `claim`, and:
        WaitsForDiskError: This node wrote the topic last, and has no files of it any more.
    """
    claimant = _Claimant(catalog, membership, new, take_over, clock, metrics)
    claimant.refuse(view)
    claimant.next_record(view)
    known = view.known
    if known is None or not known.is_open:
        return ClaimCheck(is_current=known is None, view=view)
    is_mine = bool(known.lineage) and known.lineage[-1].node == membership.node
    is_lost = is_mine and view.sealed is None and not has_files
    if is_lost and not take_over and not known.is_whole(tiered := _tiered(catalog)):
        raise WaitsForDiskError(
            "the topic's local files are gone, and they may have held messages that were "
            "acknowledged and not uploaded",
            node=membership.node,
            topic=str(catalog.keys.topic),
            offset=tiered,
            hint=f"restore them; if they are lost, take_over=True continues from offset {tiered}",
        )
    return ClaimCheck(
        is_current=is_mine or not known.lineage,
        view=view,
        gives_up=is_lost,
    )


def _tiered(catalog: Catalog) -> int:
    """The first offset after the newest object; 0 without objects."""
    last = catalog.last()
    return last.end if last is not None else 0


@dataclass(frozen=True, slots=True)
class _Claimant:
    """One claim, repeated until the keys do not change meanwhile."""

    catalog: Catalog
    membership: Membership
    new: NewTopic | None
    take_over: bool
    clock: Clock
    metrics: Metrics

    def attempt(self, view: ClaimView, *, gives_up: bool) -> OwnedTopic | None:
        """Claims the topic if the keys are still as read; None if they are not."""
        catalog, keys, node = self.catalog, self.catalog.keys, self.membership.node
        found, owner, sealed = view.record, view.owner, view.sealed
        self.refuse(view)
        record, lease = self.next_record(view, gives_up=gives_up), self.membership.lease
        compares: list[Compare] = [
            Absent(keys.record) if found is None else RevisionIs(keys.record, found[1]),
            Absent(keys.owner) if owner is None else RevisionIs(keys.owner, owner[1]),
            Absent(keys.sealed) if sealed is None else RevisionIs(keys.sealed, sealed[1]),
            self.membership.is_here,
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
            # The lease has expired, which was not noticed yet.
            self.membership.renew()
            return None
        if revision is None:
            self.membership.check()
            return None
        failpoints.reach("tier.after_claim")
        owned = OwnedTopic(
            catalog,
            record=record,
            revision=revision,
            node=node,
            sealed=view.seal,
            clock=self.clock,
            metrics=self.metrics,
        )
        known = view.known
        owned.is_rebuilt = known is not None and known.is_open and not known.lineage
        self.membership.add(owned, lease)
        return owned

    def refuse(self, view: ClaimView) -> None:
        """Raises if the topic does not exist or another node has it."""
        topic = str(self.catalog.keys.topic)
        known, owner = view.known, view.owner[0] if view.owner is not None else None
        if known is not None and known.state == "deleting":
            raise NotFoundError(f"the topic {topic} is being deleted", topic=topic)
        if self.new is None and (known is None or not known.is_open):
            raise NotFoundError(f"topic {topic} does not exist", topic=topic)
        if owner is not None and owner.node != self.membership.node:
            raise ConflictError(
                f"the topic is open on node {owner.node}",
                topic=topic,
                hint="seal it there first, or wait for that node's lease to expire",
            )

    def next_record(self, view: ClaimView, *, gives_up: bool = False) -> TopicRecord:
        """The record under this node's new epoch."""
        node, known, sealed = self.membership.node, view.known, view.seal
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
        claimed = replace(
            known, epoch=epoch, claim=secrets.token_hex(8), acked_end=None, acked_epoch=0
        )
        if known.node == node and not gives_up:
            return claimed
        tiered = _tiered(self.catalog)
        may_continue = sealed is not None or self.take_over or known.is_whole(tiered)
        if known.lineage and not may_continue:
            raise WaitsForDiskError(
                f"the topic was last written by node {known.node}, which has not handed it over",
                node=known.node,
                topic=str(self.catalog.keys.topic),
                offset=tiered,
                hint="open it there, or hand it over there with `log.seal`; if that disk is lost, "
                f"take_over=True continues from offset {tiered} and loses what was not committed",
            )
        start = sealed.next_offset if sealed is not None else tiered
        lineage = (*known.lineage, Lineage(epoch=epoch, start=start, node=node))
        return replace(claimed, lineage=lineage[-OWNER_LINEAGE_MAX:])


def act_outside(catalog: Catalog, fence: Fence, *, clock: Clock, metrics: Metrics) -> OwnedTopic:
    """Lets a job change a topic while the topic keeps its owner and the fence is valid.

    The epoch does not rise, so the owner continues; changes are committed under its epoch. If the
    topic gets another owner meanwhile, the change is refused, and the job plans again. A topic that
    no process has open is changed in the name of its last owner.

    Raises:
        NotFoundError: There is no such topic.
        UnavailableError: The metadata store does not answer.
    """
    found = catalog.record()
    topic = str(catalog.keys.topic)
    if found is None or not found[0].is_open:
        raise NotFoundError(f"topic {topic} does not exist", topic=topic)
    record, revision = found
    return OwnedTopic(
        catalog,
        record=record,
        revision=revision,
        node=record.node,
        sealed=None,
        clock=clock,
        metrics=metrics,
        fence=fence,
    )
