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

Before a claim the record is compared with the terms in the bucket and in the local checkpoint
(`ister.bucket.terms`): an older record is refused. While the metadata store as a whole is
distrusted (`ister.bucket.trust`), seals and idle marks prove nothing, and no topic is made. If this
node was the last owner, its local files are compared with what other places say about them: an
older copy is refused, or set aside if the bucket has everything.

What a crash leaves: an owner key that expires with its lease.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ister.base import failpoints
from ister.base.clock import Clock
from ister.base.limits import OWNER_LINEAGE_MAX
from ister.base.metrics import Metrics
from ister.base.model import AckLevel, Codec, TopicName
from ister.bucket.catalog import Catalog
from ister.bucket.fence import Fence
from ister.bucket.membership import Membership
from ister.bucket.ownership import OwnedTopic
from ister.bucket.terms import Term, refuse_older
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    NotFoundError,
    StoresDifferError,
    WaitsForDiskError,
    check,
)
from ister.format.descriptor import ObjectDescriptor
from ister.format.records import (
    Lineage,
    OwnerRecord,
    SealedState,
    TopicRecord,
    encode_owner,
    encode_topic,
)
from ister.metadata.base import Absent, Compare, Delete, Operation, Put, RevisionIs
from ister.metadata.transact import ATTEMPTS


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTopic:
    """Settings of a topic that the claim creates."""

    ack: AckLevel
    codec: Codec
    incarnation: str = ""
    """The incarnation of local files whose record was lost; empty for a new one."""
    epoch: int = 0
    """The epoch of those local files; the claim gets a higher one."""
    end: int | None = None
    """Where those local files end."""


class Head(NamedTuple):
    """The offset at which the durable part of a topic's local files ended, when last recorded."""

    incarnation: str
    epoch: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFiles:
    """The state of a topic's local directory, without its messages."""

    is_there: bool = False
    """Whether the directory has any file."""
    is_new: bool = False
    """Whether it has only the mark that every new directory gets."""
    is_marked: bool = False
    """Whether it has that mark; if not, files were removed."""
    has_checkpoint: bool = False
    has_log: bool = False
    """Whether it has a checkpoint or files of messages."""
    incarnation: str = ""
    term: Term | None = None
    """The term in its checkpoint; None without one."""
    start: int = 0
    """The first offset in the files, according to the checkpoint."""
    synced: int = 0
    """The checkpoint's watermark: the files end there, or later."""
    end: Callable[[], int | None] = lambda: None
    """Reads the files, and returns the offset after the last whole message; None if damaged."""
    uploaded_end: int = 0
    """The end of what was uploaded, according to the uploader's checkpoint."""
    head: Head | None = None
    """The end of the files, according to `.heads` (`ister.topic.heads`)."""

    @property
    def has_any(self) -> bool:
        """Whether the topic's files exist, even without a message."""
        return self.has_log or self.is_marked

    def covers(self, start: int, end: int) -> bool:
        """Whether the files have all messages of a range."""
        if not self.has_checkpoint or self.start > start:
            return False
        return self.synced >= end or (self.end() or 0) >= end


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
    is_older_copy: bool = False
    """Whether local files are not current because they were put back to an older state, and the
    bucket has everything that was acknowledged."""
    gives_up: bool = False
    """Whether this node continues without some messages of its own, whose offsets it assigns
    again."""
    is_distrusted: bool = False
    """Whether seals and idle marks prove nothing."""
    terms: Sequence[Term] | None = ()
    """The newest terms in the bucket; None if it did not answer."""
    found: Sequence[ObjectDescriptor] = ()
    """Objects that continue the catalog and are neither in it nor in local files. They are part of
    the topic and are adopted after the claim. They are found before it, so that a crash in between
    does not lose them."""


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

    `take_over`: claim a topic that another node did not hand over: what that node had not uploaded
    is lost.
    Returns the claim; None if the topic's record has changed since `seen`.

    Raises:
        WaitsForDiskError: Its newest messages may be on another node's disk.
        ConflictError: Another node has it.
    """
    claimant = _Claimant(catalog, membership, new, take_over, clock, metrics)
    view = seen.view if seen is not None else ClaimView.read(catalog)
    for _ in range(ATTEMPTS):
        owned = claimant.attempt(view, seen)
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
    local: LocalFiles,
    terms: Sequence[Term] | None,
    is_distrusted: bool,
    take_over: bool,
    clock: Clock,
    metrics: Metrics,
) -> ClaimCheck:
    """Makes sure that a topic may be claimed, without claiming it.

    `terms`: the newest terms in the bucket; None if it did not answer.
    `is_distrusted`: whether the metadata store was rolled back to an older state.
    Returns whether the local files are the topic's newest, and under which record. If not, another
    node has written the topic since, or it was deleted, and the files have to be set aside before
    the claim: afterwards they look like new ones.

    Raises:
        As `claim`, and:
        StoresDifferError: The bucket or the local files name a later owner than the record.
        WaitsForDiskError: This node wrote the topic last, and its files are lost or an older copy.
    """
    known, topic, others = view.known, catalog.keys.topic, list(terms or ())
    if known is None and local.term is not None:
        # The record was lost: files of the newest owner, or of a later one, replace it.
        others = [one for one in others if one != local.term and one.epoch >= local.term.epoch]
    elif local.term is not None:
        refuse_older(topic, known, [local.term], where="the checkpoint of the local files")
    refuse_older(topic, known, others, where="the bucket")
    if is_distrusted and not (known is not None and known.is_open):
        # Another node may have written the topic after this one.
        raise StoresDifferError(
            "the metadata store was rolled back to an older state and does not have the topic",
            topic=str(topic),
            hint="`ister metadata check` shows what the other stores have; "
            "`ister metadata accept` continues from that",
        )
    if known is not None and not known.is_open and local.has_log and not local.has_checkpoint:
        raise StoresDifferError(
            "the topic was deleted, but it has local files without a checkpoint, which may be "
            "newer than the deletion",
            topic=str(topic),
            hint="inspect them with `ister inspect wal`, then move the topic's directory away",
        )
    if known is not None and local.term is not None:
        _refuse_forked(topic, known, local, local.term, membership.node)
    claimant = _Claimant(catalog, membership, new, take_over, clock, metrics)
    check = ClaimCheck(
        is_current=known is None, view=view, is_distrusted=is_distrusted, terms=terms
    )
    claimant.refuse(view)
    claimant.next_record(view, check)
    if known is None or not known.is_open:
        return check
    is_mine = bool(known.lineage) and known.lineage[-1].node == membership.node
    is_kept = view.sealed is None or (is_distrusted and known.ack is not AckLevel.TIERED)
    gives_up = False
    if is_mine and is_kept:
        lost = _find_lost(catalog, known, local, others)
        gives_up = lost is not None or not local.has_any
        if lost is not None and not take_over:
            raise lost
    # Restored files of a deleted topic of this name are not current: what this topic acknowledged
    # is in the bucket, or was found to be lost above.
    is_current = not known.lineage or (is_mine and not _is_foreign(known, local))
    is_older = is_mine and is_current and not gives_up and _is_older_copy(known, local, others)
    return replace(
        check,
        is_current=is_current and not is_older,
        is_older_copy=is_older,
        gives_up=gives_up,
    )


def _is_foreign(known: TopicRecord, local: LocalFiles) -> bool:
    """Whether local files belong to an earlier topic of the same name, which was deleted."""
    return local.incarnation not in ("", known.incarnation)


def _is_older_copy(known: TopicRecord, local: LocalFiles, terms: Sequence[Term]) -> bool:
    """Whether this node has begun a term in the bucket since its local files were written.

    They may end in messages that were not acknowledged, with offsets that others have now.
    """
    newest = _newest_epoch(terms)
    is_since = local.term is not None and local.term.epoch < newest
    return is_since and known.lineage[-1].epoch <= newest


def _newest_epoch(terms: Sequence[Term]) -> int:
    # The bucket has a term only after the checkpoint has it; a repair makes objects before.
    return max((term.epoch for term in terms if term.claim), default=0)


def _refuse_forked(
    topic: TopicName, known: TopicRecord, local: LocalFiles, term: Term, node: str
) -> None:
    """Refuses local files that contradict the lineage of the record.

    They are of a topic that was made later; or were written under an epoch that was another node's;
    or name an upload that the next owner would have continued after, had it known of it; or go on
    where a seal or an idle mark told the next owner that they end.
    """
    if _is_foreign(known, local) and known.born and term.epoch >= known.born:
        raise StoresDifferError(
            f"the local files belong to a later topic of this name: their epoch is {term.epoch}, "
            f"and this topic was made under epoch {known.born}; the metadata store was rolled back "
            "to an older state",
            topic=str(topic),
            hint="move the topic's directory away, and publish the messages again that only it has",
        )
    if local.incarnation != known.incarnation or not known.lineage:
        return
    later = next((entry for entry in known.lineage if entry.epoch > term.epoch), None)
    if later is not None and later.node != node:
        hint = "move the topic's directory away, and publish the messages again that only it has"
        if local.uploaded_end > later.start:
            raise StoresDifferError(
                f"the offsets {later.start} up to, not including, {local.uploaded_end} were "
                f"uploaded from the local files, but node {later.node} did not find them in the "
                "bucket and assigned them again: the metadata store and the bucket were rolled "
                "back to an older state",
                topic=str(topic),
                hint=hint,
            )
        if later.is_proven and (end := local.end() or local.synced) > later.start:
            raise StoresDifferError(
                f"the offsets {later.start} up to, not including, {end} are in the local files, "
                f"but node {later.node} was told that they end before, and assigned these offsets "
                "again: the metadata store was rolled back to an older state",
                topic=str(topic),
                offset=later.start,
                hint=hint,
            )
    owners = [entry for entry in known.lineage if entry.epoch <= term.epoch]
    if owners and owners[-1].node != node:
        if term == Term(known.epoch, known.claim):
            raise StoresDifferError(
                f"the local files are the newest ones of the node {known.node}, and `.node` beside "
                f"the topics has {node}",
                topic=str(topic),
                hint=f"if this is the directory of that node, write {known.node} to `.node` again; "
                "if it is a copy, move the topic's directory away",
            )
        raise StoresDifferError(
            f"the local files were written under epoch {term.epoch}, which belonged to node "
            f"{owners[-1].node} according to the metadata store: the store was rolled back to an "
            "older state, and the topic continued without these files",
            topic=str(topic),
            hint="move the topic's directory away, and publish the messages again that only it has",
        )


def _find_lost(
    catalog: Catalog, known: TopicRecord, local: LocalFiles, terms: Sequence[Term]
) -> WaitsForDiskError | None:
    """The error if files of the last owner are gone or an older copy; None if they are not."""
    tiered = _tiered(catalog)
    if known.is_whole(tiered):
        return None
    run, topic = known.lineage[-1], str(catalog.keys.topic)
    if not local.has_any:
        return WaitsForDiskError(
            "the topic's local files are gone, and may have held messages that were acknowledged "
            "but not uploaded",
            node=run.node,
            topic=topic,
            offset=tiered,
            hint=f"restore them; if they are lost, take_over=True continues from offset {tiered}",
        )
    ends = [tiered, local.uploaded_end]
    if known.ack is AckLevel.SYNCED:
        # At lower levels, messages before a cursor may have been lost in a crash.
        ends += [
            found.progress.offset
            for found in catalog.subscriptions()
            if found.progress.incarnation in ("", known.incarnation)
        ]
    head = local.head
    if head is not None and head.incarnation == known.incarnation and head.epoch >= run.epoch:
        ends.append(head.end)
    should_end = max(ends)
    end: int | None = run.start
    if local.has_log:
        end = local.synced if local.synced >= should_end else local.end()
    newest = _newest_epoch(terms)
    is_earlier = (
        _is_foreign(known, local)
        or _is_older_copy(known, local, terms)
        or (local.term is None and not local.has_log and run.epoch <= newest)
    )
    if not is_earlier and (end is None or end >= should_end):
        return None
    how = "they are damaged" if end is None else f"they end at offset {end}"
    how += f", but had reached offset {should_end}"
    if is_earlier and (end is None or end >= should_end):
        how = f"newer ones were written under epoch {newest}"
    goes_on = max(tiered, end or 0)
    if _is_foreign(known, local):
        how, goes_on = "they belong to a deleted topic of this name", tiered
    return WaitsForDiskError(
        f"the topic's local files are an older copy, or some are missing: {how}",
        node=run.node,
        topic=topic,
        offset=goes_on,
        hint="restore the newer files; if they are lost, `ister repair --give-up` continues after "
        f"the lost offsets, and take_over=True continues from offset {goes_on}",
        known_end=max(should_end, goes_on),
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

    def attempt(self, view: ClaimView, seen: ClaimCheck | None) -> OwnedTopic | None:
        """Claims the topic if the keys are still as read; None if they are not."""
        catalog, keys, node = self.catalog, self.catalog.keys, self.membership.node
        found, owner, sealed = view.record, view.owner, view.sealed
        self.refuse(view)
        record, lease = self.next_record(view, seen), self.membership.lease
        compares: list[Compare] = [
            Absent(keys.record) if found is None else RevisionIs(keys.record, found[1]),
            Absent(keys.owner) if owner is None else RevisionIs(keys.owner, owner[1]),
            Absent(keys.sealed) if sealed is None else RevisionIs(keys.sealed, sealed[1]),
            self.membership.is_here,
        ]
        operations: list[Operation] = [
            Put(keys.record, encode_topic(record)),
            Put(keys.owner, encode_owner(OwnerRecord(node=node, epoch=record.epoch)), lease),
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

    def next_record(self, view: ClaimView, seen: ClaimCheck | None) -> TopicRecord:
        """The record under this node's new epoch."""
        node, known, sealed = self.membership.node, view.known, view.seal
        claim = f"{self.membership.instance}-{secrets.token_hex(4)}"
        if known is None or not known.is_open:
            new = self.new or NewTopic(ack=AckLevel.SYNCED, codec=Codec.BINCODE2)
            check(self.new is not None, "a topic is made from something")
            epoch = max(new.epoch, known.epoch if known is not None else 0) + 1
            # Files whose record was lost are this node's from their own epoch on.
            first = new.epoch or epoch
            return TopicRecord(
                epoch=epoch,
                incarnation=new.incarnation or secrets.token_hex(8),
                claim=claim,
                ack=new.ack,
                codec=new.codec,
                created_at=self.clock.now_ns() // 1_000_000_000,
                lineage=(Lineage(epoch=first, start=0, node=node),),
                born=first,
                # The bucket may have lost what they have: other nodes wait until it has it again.
                acked_end=new.end if new.ack is AckLevel.TIERED else None,
                acked_epoch=epoch if new.ack is AckLevel.TIERED and new.end is not None else 0,
            )
        epoch = known.epoch + 1
        claimed = replace(known, epoch=epoch, claim=claim, acked_end=None, acked_epoch=0)
        if known.node == node and not (seen is not None and seen.gives_up):
            if known.ack is AckLevel.TIERED and known.acked_epoch == known.epoch:
                # The files still have more than the bucket.
                claimed = replace(claimed, acked_end=known.acked_end, acked_epoch=epoch)
            return claimed
        tiered = _tiered(self.catalog)
        is_whole = known.is_whole(tiered)
        is_tiered = known.ack is AckLevel.TIERED
        is_trusted = seen is None or not seen.is_distrusted
        is_proven = is_trusted and (is_whole or sealed is not None)
        may_continue = self.take_over or is_proven or (is_whole and is_tiered)
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
        if seen is not None and seen.found:
            start = max(start, seen.found[-1].end)
        mine = Lineage(
            epoch=epoch,
            start=start,
            node=node,
            is_proven=is_proven and not is_tiered and bool(known.lineage),
        )
        return replace(claimed, lineage=(*known.lineage, mine)[-OWNER_LINEAGE_MAX:])


def act_outside(catalog: Catalog, fence: Fence, *, clock: Clock, metrics: Metrics) -> OwnedTopic:
    """Lets a job change a topic while the topic keeps its owner and the fence is valid.

    The epoch does not rise, so the owner continues; changes are committed under its epoch. If the
    topic gets another owner meanwhile, the change is refused, and the job plans again. A topic that
    no process has open is changed in the name of its last owner.
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
