"""Finds metadata that is older than the bucket or the local files, and brings it up to date.

Behind `ister metadata check` and `ister metadata accept`:

    records ─┐
    terms   ─┼─► which one is older ─► the record of the newest owner, under a higher epoch
    files   ─┘

A topic's record is older if the bucket has a later term, or the checkpoint of its local files does
(`ister.bucket.terms`). Accepting writes the record of the newest owner, with an epoch above all
that were seen, so that no object of a forgotten owner is overwritten. Where the catalog names
objects that are gone, or is of another incarnation, it is rebuilt from the bucket first. The next
opening adopts objects that continue the catalog, and compares the local files with it. At the end
the store as a whole is trusted again (`ister.bucket.trust`).

Only the files of this node are read. A node whose files are newer than the bucket refuses its
topics until this is done there, too. What a crash leaves: some topics accepted, others not.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import AckLevel, TopicName
from ister.bucket.catalog import Catalog
from ister.bucket.directory import list_records
from ister.bucket.express import ExpressRuns, find_runs
from ister.bucket.names import ObjectName, TopicKeys, object_id_of, parse_object_id
from ister.bucket.orphans import is_there
from ister.bucket.terms import (
    ForgottenRuns,
    Term,
    is_of_lineage,
    load_term,
    newest_terms,
    process_of_claim,
)
from ister.bucket.trust import Trust
from ister.errors import ConflictError, CorruptDataError, IsterError, NotFoundError
from ister.format.descriptor import ObjectDescriptor
from ister.format.records import Lineage, TopicRecord, encode_topic
from ister.fs.base import FileSystem
from ister.fs.local import LocalFileSystem
from ister.metadata.base import Absent, Compare, Delete, MetadataStore, Operation, Put, RevisionIs
from ister.objectstore.base import ObjectInfo, ObjectStore
from ister.objectstore.slices import with_slices
from ister.rescue.rebuild import extend_catalog, find_topics, rebuild_catalog, rebuild_topic
from ister.topic.directories import list_directories
from ister.topic.heads import read_local
from ister.topic.node import read_node_id
from ister.wal.directory import WalDirectory

_log = logging.getLogger("ister.topic.metadata_trust")

OK: Final = "ok"
OLDER: Final = "older"
UNKNOWN: Final = "unknown"
INCOMPLETE: Final = "incomplete"
MISSING: Final = "missing"
ACCEPTED: Final = "accepted"


@dataclass(slots=True, kw_only=True)
class TopicTrust:
    """What the stores have of one topic; ends are exclusive offsets."""

    topic: str
    status: str
    """`ok`; `older`: its record is older than another store; `incomplete`: its catalog is;
    `missing`: it names objects that the bucket does not have; `unknown`: the metadata store does
    not have the topic; `accepted`."""
    epoch: int = 0
    """The epoch of the record; 0 without one."""
    bucket_epoch: int = 0
    """The epoch of the newest term in the bucket."""
    local_epoch: int = 0
    """The epoch of this node's files."""
    catalog_end: int = 0
    bucket_end: int = 0
    """The highest end in the names of objects, whether or not they belong to the topic."""
    local_end: int | None = None
    missing: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of the catalog whose objects are not in the bucket."""
    errors: list[IsterError] = field(default_factory=list)


class _Files(NamedTuple):
    """What this node's checkpoint says of a topic."""

    term: Term
    incarnation: str
    ack: AckLevel
    start: int
    end: int


@dataclass(slots=True)
class _Found:
    """What was read from the stores about one topic."""

    row: TopicTrust
    keys: TopicKeys
    record: tuple[TopicRecord, int] | None
    terms: list[Term]
    local: _Files | None
    objects: list[ObjectInfo]
    names: list[ObjectName] = field(default_factory=list)
    """Of the objects."""

    def needs_rebuild(self, record: TopicRecord, runs: Sequence[ObjectDescriptor]) -> bool:
        """Whether the catalog of a topic with this record lacks objects that do not continue it.

        `runs`: the topic's runs in express objects.
        """
        row = self.row
        own = [one for one in self.names if is_of_lineage(record, one.epoch, one.end)]
        tagged = [one for one in own if one.tag is not None]
        is_merged = any(one.start < row.catalog_end < one.end for one in tagged)
        ranges = [(one.start, one.end) for one in own]
        own_runs = [
            (run.start, run.end) for run in runs if is_of_lineage(record, run.epoch, run.end)
        ]
        return (
            is_merged
            or bool(row.missing and tagged)
            or self._has_expired([*ranges, *own_runs])
            # Only an owner writes runs, in order; what is gone before one has expired.
            or (record.ack is AckLevel.TIERED and bool(row.missing) and self._follows_gap(own_runs))
        )

    def _has_expired(self, own: Iterable[tuple[int, int]]) -> bool:
        """Whether all that an older catalog names has expired since, and what followed it, too.

        Tasks of a pipeline that was killed leave objects after a gap, too, but then the messages
        before them are in local files.
        """
        row, local = self.row, self.local
        is_gone = not row.catalog_end or any(end == row.catalog_end for _, end in row.missing)
        has_messages = (
            local is not None
            and local.term.epoch >= row.bucket_epoch
            and local.start <= row.catalog_end < local.end
        )
        return is_gone and not has_messages and self._follows_gap(own)

    def _follows_gap(self, own: Iterable[tuple[int, int]]) -> bool:
        """Whether all of these ranges that the catalog lacks begin after its end."""
        end = self.row.catalog_end
        later = [first for first, last in own if last > end]
        return self.row.status == OLDER and bool(later) and min(later) > end


class MetadataTrust:
    """Compares the stores of a log."""

    def __init__(
        self,
        objects: ObjectStore,
        metadata: MetadataStore,
        root_prefix: str,
        *,
        wal_root: str | None,
        clock: Clock,
        fs: FileSystem | None = None,
    ) -> None:
        """Reads which topics there are.

        `wal_root`: where the local files are; None if there are none.
        `fs`: their file system; by default the machine's.
        """
        self._objects = with_slices(objects)
        self._metadata = metadata
        self._root = root_prefix
        self._fs: FileSystem = fs or LocalFileSystem()
        self._wal_root = wal_root
        self._clock = clock
        self._trust = Trust(self._objects, metadata, root_prefix, clock)
        self._trust.check()
        self._listed = find_topics(self._objects)
        self._runs: ExpressRuns | None = None
        self._forgotten = ForgottenRuns(self._objects, metadata, root_prefix, clock)

    @property
    def reason(self) -> str | None:
        """Why the store as a whole is distrusted; None if it is not."""
        return self._trust.reason

    def topics(self) -> list[TopicName]:
        """The topics that any store knows."""
        names = set(self._listed)
        records = list_records(self._metadata, self._root)
        names.update(TopicName.parse(name) for name, exists in records.items() if exists)
        if self._wal_root is not None:
            with suppress(NotFoundError):
                names.update(list_directories(self._fs, self._wal_root))
        return sorted(names, key=str)

    def check(self, name: TopicName) -> TopicTrust:
        """Compares what the stores have of a topic."""
        return self._find(name).row

    def accept(self, name: TopicName) -> TopicTrust:
        """Replaces the record of a topic with that of the newest owner that any store names.

        Raises:
            ConflictError: The topic is open, or was changed meanwhile.
        """
        found = self._find(name)
        row = found.row
        if row.status in (OK, MISSING):
            return row
        if found.record is None and not any(term.claim for term in found.terms):
            return self._recover(found)
        if self._metadata.get(found.keys.owner) is not None:
            raise ConflictError(
                "the topic is open", topic=row.topic, hint="stop its broker, or wait for its lease"
            )
        newest, key = self._newest(found), found.keys.record
        is_same = found.record is not None and found.record[0].incarnation == newest.incarnation
        compares: list[Compare] = [
            Absent(key) if found.record is None else RevisionIs(key, found.record[1]),
            Absent(found.keys.owner),
        ]
        if not is_same or found.needs_rebuild(newest, self._runs_of(name)):
            if not is_same:
                self._metadata.delete_prefix(found.keys.storage)
            rebuild_catalog(
                self._objects,
                self._metadata,
                found.keys,
                found.objects,
                record=newest,
                runs=self._runs_of(name),
            )
        elif row.status == OLDER and (runs := self._runs_of(name)):
            # The next opening asks for the runs of the newest owner's process only, and those of
            # the processes before it may be missing, too.
            extend_catalog(
                self._objects, self._metadata, found.keys, row.catalog_end, record=newest, runs=runs
            )
        operations: list[Operation] = [Put(found.keys.record, encode_topic(newest))]
        if row.status != INCOMPLETE:
            # With the seal of an earlier term, the next owner would continue where that term ended.
            operations.append(Delete(found.keys.sealed))
        if self._metadata.transact(compares, operations) is None:
            raise ConflictError("the topic was changed meanwhile", topic=row.topic)
        row.status, row.epoch = ACCEPTED, newest.epoch
        return row

    def _recover(self, found: _Found) -> TopicTrust:
        """Rebuilds a topic that only objects are left of; local files alone open as they are."""
        row, runs = found.row, self._runs_of(found.keys.topic)
        if found.objects or runs:
            report = rebuild_topic(
                self._objects,
                self._metadata,
                found.keys,
                found.objects,
                runs=runs,
                clock=self._clock,
                dry_run=False,
            )
            row.errors += report.errors
            row.status = ACCEPTED if report.status == "recovered" else row.status
        return row

    def finish(self) -> None:
        """Trusts the metadata store as a whole again; every topic was accepted."""
        self._trust.accept()

    def _runs_of(self, name: TopicName) -> Sequence[ObjectDescriptor]:
        if self._runs is None:
            self._runs = find_runs(self._objects, on_damage=lambda error: _log.error("%s", error))
        return self._runs.runs_of(name)

    def _find(self, name: TopicName) -> _Found:
        keys = TopicKeys(self._root, name)
        catalog = Catalog(self._metadata, keys, clock=self._clock, metrics=Metrics())
        row = TopicTrust(topic=str(name), status=OK)
        found = _Found(
            row=row,
            keys=keys,
            record=catalog.record(),
            terms=newest_terms(self._objects, name),
            local=self._read_local(name, row),
            objects=self._listed.get(name, []),
        )
        record = found.record[0] if found.record is not None else None
        row.epoch = record.epoch if record is not None else 0
        row.bucket_epoch = max((term.epoch for term in found.terms), default=0)
        self._compare_objects(found, catalog, name)
        for run in self._forgotten.runs_of(name, self._processes(found)):
            row.bucket_end = max(row.bucket_end, run.end)
        if record is None:
            row.status = UNKNOWN
        elif any(term.is_after(record) for term in _terms_of(found)):
            row.status = OLDER
        elif record.is_open and found.needs_rebuild(record, ()):
            row.status = INCOMPLETE
        elif row.missing:
            row.status = MISSING
            row.errors += [
                NotFoundError(
                    f"the object with the offsets {start} up to, not including, {end} is missing",
                    topic=row.topic,
                    offset=start,
                    hint="`ister repair` uploads it again if local files have the messages; "
                    "`ister repair --give-up` gives them up",
                )
                for start, end in row.missing
            ]
        return found

    def _read_local(self, name: TopicName, row: TopicTrust) -> _Files | None:
        if self._wal_root is None:
            return None
        path = f"{self._wal_root}/{name.namespace}/{name.topic}"
        directory = WalDirectory(self._fs, path)
        local = read_local(directory, None)
        if not local.has_log:
            return None
        row.local_end = local.end()
        if local.term is None:
            return None
        row.local_epoch = local.term.epoch
        state = directory.load_state()
        ack = AckLevel(state.ack) if state is not None else AckLevel.SYNCED
        end = max(local.synced, row.local_end or 0)
        return _Files(local.term, local.incarnation, ack, local.start, end)

    def _compare_objects(self, found: _Found, catalog: Catalog, name: TopicName) -> None:
        row, there, epoch = found.row, set[str](), 0
        for info in found.objects:
            object_id = object_id_of(name, info.key)
            there.add(object_id)
            parsed = parse_object_id(object_id)
            if parsed is None:
                continue
            row.bucket_end = max(row.bucket_end, parsed.end)
            epoch = max(epoch, parsed.epoch)
            found.names.append(parsed)
        if epoch > row.bucket_epoch:
            # A pipeline may upload before the owner has recorded its term.
            row.bucket_epoch = epoch
            found.terms.append(Term(epoch, ""))
        for described, _ in catalog.descriptors():
            row.catalog_end = described.end
            if not is_there(self._objects, name, there, described.object_id):
                row.missing.append((described.start, described.end))
        row.bucket_end = max(row.bucket_end, row.catalog_end if not row.missing else 0)

    def _processes(self, found: _Found) -> set[tuple[str, str]]:
        """Node and instance of the processes that had the newest terms."""
        processes = set[tuple[str, str]]()
        for term in found.terms:
            record = load_term(self._objects, found.keys.topic, term)
            if record is not None and (its := process_of_claim(record.node, term.claim)):
                processes.add(its)
        return processes

    def _newest(self, found: _Found) -> TopicRecord:
        """The record of the newest owner, with an epoch above all others.

        Raises:
            CorruptDataError: There is no record, and the term in the bucket cannot be read.
        """
        record = found.record[0] if found.record is not None else None
        later = [term for term in found.terms if term.is_after(record) and term.claim]
        if later:
            stored = load_term(self._objects, found.keys.topic, max(later))
            if stored is not None:
                expired = stored.expired_before
                if record is not None and record.incarnation == stored.incarnation:
                    expired = max(expired, record.expired_before)
                record = replace(stored, expired_before=expired)
        if record is None:
            raise CorruptDataError(
                "the topic's term cannot be read",
                topic=found.row.topic,
                hint="remove the objects below `terms/` of the topic, and use `ister recover`",
            )
        epoch = max([record.epoch, *(term.epoch for term in _terms_of(found))]) + 1
        # Idle marks prove nothing now; at level `tiered` there are none.
        acked_end = record.acked_end if record.acked_epoch == record.epoch else None
        if found.local is not None and found.local.term.is_after(record):
            record, acked_end = self._of_files(record, found.local), found.local.end
        is_tiered = record.ack is AckLevel.TIERED
        return replace(
            record,
            epoch=epoch,
            claim=secrets.token_hex(8),
            acked_end=acked_end if is_tiered else None,
            acked_epoch=epoch if is_tiered else 0,
        )

    def _of_files(self, record: TopicRecord, files: _Files) -> TopicRecord:
        """The record of the owner that wrote this node's files, as far as it can be derived."""
        node = read_node_id(self._fs, self._wal_root or "") or ""
        epoch = files.term.epoch
        if record.incarnation != files.incarnation or not record.is_open:
            return replace(
                record,
                state="open",
                incarnation=files.incarnation,
                ack=files.ack,
                lineage=(Lineage(epoch=epoch, start=0, node=node),),
                born=epoch,
                expired_before=0,
            )
        if record.node == node:
            return record
        # A topic's directory is new when a node claims it: the files begin where the term does. If
        # the record that named this node before was rolled back, they begin earlier.
        before = record.lineage[-1].start if record.lineage else 0
        entry = Lineage(epoch=epoch, start=max(files.start, before), node=node)
        return replace(record, lineage=(*record.lineage, entry))


def _terms_of(found: _Found) -> list[Term]:
    return [*found.terms, *([found.local.term] if found.local is not None else [])]
