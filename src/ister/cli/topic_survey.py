"""What a topic is in all tiers, found out from outside: read-only, no lock, while others write.

    catalog (metadata store) ─► checkpoint ─► local files ─► watermarks

Owns: putting together what the stores and files say, in an order that makes it consistent. Does
not own: how it is shown, reading objects, or judging damage (`survey` does).

The catalog is read first: what it calls tiered was synced before, so the files, read later, are
never behind it. Rotated files are not read, their ends follow from each other; of the last one,
only what lies behind the checkpoint's position is.

What another process holds in memory is not seen: `written` and `next` are what files prove, and
`synced` what the checkpoint or the files prove.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from ister.broker.records import BrokerRecords, ServedRecord
from ister.clock import SystemClock
from ister.config import CloudBackend, MetadataBackend, StorageConfig, StorageMode
from ister.errors import CorruptDataError, IsterError, NotFoundError, UnsupportedVersionError
from ister.format.checkpoint import WalState
from ister.format.descriptor import ObjectDescriptor
from ister.format.frame import FRAME_HEADER_SIZE, Frame, NeedMore, decode_frame
from ister.format.records import OwnerRecord, SealedState, TopicRecord
from ister.fs.base import File
from ister.fs.local import LocalFileSystem
from ister.limits import KIB
from ister.metadata.base import MetadataStore
from ister.metrics import Metrics
from ister.model import TopicName, Watermarks
from ister.subscription.store import StoredSubscription, SubscriptionStore
from ister.tier.catalog import Catalog, Subscription, list_topics
from ister.tier.names import TopicKeys
from ister.topic.node import NODE_NAME
from ister.topic.tiers import open_metadata
from ister.wal.directory import WalDirectory, format_log_name
from ister.wal.scan import scan_file

__all__ = ["LocalLog", "LogFile", "TopicFacts", "survey_topic", "survey_topics"]

_RECOVER_HINT: Final = "`ister recover` rebuilds the metadata from the bucket"


@dataclass(slots=True, kw_only=True)
class LogFile:
    """A local file, as far as it is known without reading it whole."""

    name: str
    first_offset: int | None
    next_offset: int | None
    bytes: int


@dataclass(slots=True, kw_only=True)
class LocalLog:
    """A topic's directory."""

    path: str
    state: WalState | None
    files: list[LogFile]
    is_current: bool
    """Whether it is the topic's newest; not so if another node has written since."""


@dataclass(slots=True, kw_only=True)
class TopicFacts:
    """All that can be found out about a topic."""

    topic: str
    watermarks: Watermarks
    record: TopicRecord | None
    owner: OwnerRecord | None
    sealed: SealedState | None
    local: LocalLog | None
    objects: list[ObjectDescriptor] = field(default_factory=list)
    subscriptions: list[Subscription] = field(default_factory=list)
    stored: dict[str, StoredSubscription] = field(default_factory=dict)
    """Subscriptions that a broker has made, by name; their cursors are in `subscriptions` too."""
    served: ServedRecord | None = None
    """How brokers serve it; None if none ever did."""
    errors: list[IsterError] = field(default_factory=list)
    """What could not be found out."""


@dataclass(slots=True, kw_only=True)
class _Catalogued:
    """What the metadata store says; nothing if there is none."""

    names: list[str] = field(default_factory=list)
    record: TopicRecord | None = None
    owner: OwnerRecord | None = None
    sealed: SealedState | None = None
    objects: list[ObjectDescriptor] = field(default_factory=list)
    subscriptions: list[Subscription] = field(default_factory=list)
    stored: dict[str, StoredSubscription] = field(default_factory=dict)
    served: ServedRecord | None = None
    error: IsterError | None = None


def survey_topics(
    storage: StorageConfig, root: str, namespace: str | None = None
) -> list[TopicFacts]:
    """Looks at all topics, by name; what cannot be found out about one is in its errors.

    Args:
        storage: The log's settings.
        root: Where its topics' directories are.
        namespace: Only those of one.

    Raises:
        UnavailableError: The metadata store does not answer.
    """
    with _open_catalog(storage) as (store, error):
        prefix = storage.metadata.root_prefix
        names = {*_local_names(root)}
        if store is not None:
            names.update(_list_names(store, prefix))
            names.update(BrokerRecords(store, root_prefix=prefix).non_reliable())
        found: list[TopicFacts] = []
        for name in map(TopicName.parse, sorted(names)):
            if namespace is None or name.namespace == namespace:
                with suppress(NotFoundError):  # deleted meanwhile, or left behind
                    found.append(
                        _survey(storage, root, name, _read_catalog(store, error, storage, name))
                    )
        return found


def survey_topic(storage: StorageConfig, root: str, name: TopicName) -> TopicFacts:
    """Looks at a topic.

    Args:
        storage: The log's settings.
        root: Where its topics' directories are.
        name: The topic.

    Raises:
        NotFoundError: There is no such topic.
        UnavailableError: The metadata store does not answer.
    """
    with _open_catalog(storage) as (store, error):
        return _survey(storage, root, name, _read_catalog(store, error, storage, name))


def _survey(
    storage: StorageConfig, root: str, name: TopicName, catalogued: _Catalogued
) -> TopicFacts:
    record, served = catalogued.record, catalogued.served
    local = _read_local(root, name, record)
    has_log = local is not None or (record is not None and record.state != "deleted")
    if not has_log and (served is None or served.is_reliable):
        raise _not_found(root, name, catalogued)
    return TopicFacts(
        topic=str(name),
        watermarks=_watermarks(storage, catalogued, local),
        record=record,
        owner=catalogued.owner,
        sealed=catalogued.sealed,
        local=local,
        objects=catalogued.objects,
        subscriptions=catalogued.subscriptions,
        stored=catalogued.stored,
        served=served,
        errors=[catalogued.error] if catalogued.error is not None else [],
    )


# -- the metadata store ---------------------------------------------------------------------


@contextmanager
def _open_catalog(
    storage: StorageConfig,
) -> Iterator[tuple[MetadataStore | None, IsterError | None]]:
    """The metadata store, or why there is none although there should be."""
    config = storage.metadata
    is_shared = config.backend is not MetadataBackend.MEMORY
    if storage.mode is not StorageMode.WAL_CLOUD or not is_shared:
        yield None, None
        return
    try:
        store = open_metadata(config, SystemClock(), read_only=True)
    except NotFoundError as error:
        error.hint = error.hint or _RECOVER_HINT
        # Without a bucket, nothing was ever tiered here.
        yield None, error if _has_bucket(storage) else None
        return
    except CorruptDataError as error:
        error.hint = _RECOVER_HINT
        yield None, error
        return
    try:
        yield store, None
    finally:
        store.close()


def _read_catalog(
    store: MetadataStore | None, error: IsterError | None, storage: StorageConfig, name: TopicName
) -> _Catalogued:
    if store is None:
        return _Catalogued(error=error)
    clock, prefix = SystemClock(), storage.metadata.root_prefix
    catalog = Catalog(store, TopicKeys(prefix, name), clock=clock, metrics=Metrics())
    found = _read_topic(catalog, prefix)
    found.served = BrokerRecords(store, root_prefix=prefix).topic(name)
    subscriptions = SubscriptionStore(store, root_prefix=prefix, clock=clock)
    incarnation = found.record.incarnation if found.record is not None else ""
    found.stored = subscriptions.load(name, incarnation)
    return found


def _read_topic(catalog: Catalog, root_prefix: str) -> _Catalogued:
    found = _Catalogued()
    try:
        record, owner, sealed = catalog.record(), catalog.owner(), catalog.sealed()
        found.record = record[0] if record is not None else None
        found.owner = owner[0] if owner is not None else None
        found.sealed = sealed[0] if sealed is not None else None
        if found.record is None:
            found.names = _list_names(catalog.store, root_prefix)
        found.subscriptions = catalog.subscriptions()
        found.objects = [described for described, _ in catalog.descriptors()]
    except (CorruptDataError, UnsupportedVersionError) as error:
        # A value that cannot be read; the rest is worth seeing.
        found.error = error
    return found


def _list_names(store: MetadataStore, root_prefix: str) -> list[str]:
    try:
        return list_topics(store, root_prefix)
    except CorruptDataError:
        return []


def _has_bucket(storage: StorageConfig) -> bool:
    """Whether there is a bucket whose metadata is missed."""
    is_directory = storage.cloud.backend in (CloudBackend.FS, CloudBackend.LOCAL)
    return not is_directory or os.path.isdir(storage.cloud.root or "")


# -- local files ----------------------------------------------------------------------------


def _read_local(root: str, name: TopicName, record: TopicRecord | None) -> LocalLog | None:
    directory = WalDirectory(LocalFileSystem(), f"{root}/{name.namespace}/{name.topic}")
    if not os.path.isdir(directory.path):
        return None
    try:
        state = directory.load_state()
    except UnsupportedVersionError as error:
        error.path = directory.checkpoint_path
        raise
    lineage = record.lineage if record is not None else ()
    return LocalLog(
        path=directory.path,
        state=state,
        files=_read_files(directory, state),
        is_current=not lineage or lineage[-1].node == _read_node(root),
    )


def _read_files(directory: WalDirectory, state: WalState | None) -> list[LogFile]:
    files: list[LogFile] = []
    seqs = directory.log_seqs()
    for seq in seqs:
        try:
            handle = directory.fs.open_read(directory.log_path(seq))
        except NotFoundError:
            continue  # trimmed since the directory was read
        try:
            first = _first_offset(handle, seq, state)
            files.append(
                LogFile(
                    name=format_log_name(seq),
                    first_offset=first,
                    next_offset=_end_of(directory, handle, seq, first, state)
                    if seq == seqs[-1]
                    else None,
                    bytes=handle.size(),
                )
            )
        finally:
            handle.close()
    for file, following in pairwise(files):
        file.next_offset = following.first_offset
    return files


def _first_offset(handle: File, seq: int, state: WalState | None) -> int | None:
    """Where a file begins: by the checkpoint, or by its first frame."""
    if state is not None:
        checkpoint = state.checkpoint
        for rotated in checkpoint.rotated_files:
            if rotated.seq == seq:
                return rotated.first_offset
        if checkpoint.file_seq == seq and checkpoint.active_file_first_offset is not None:
            return checkpoint.active_file_first_offset
    decoded = decode_frame(handle.read_at(0, FRAME_HEADER_SIZE))
    if isinstance(decoded, NeedMore) and decoded.size_bytes > FRAME_HEADER_SIZE:
        decoded = decode_frame(handle.read_at(0, decoded.size_bytes))
    return decoded.offset if isinstance(decoded, Frame) else None


def _end_of(
    directory: WalDirectory, handle: File, seq: int, first: int | None, state: WalState | None
) -> int | None:
    """The offset after the last whole frame, read from the last known position on."""
    if first is None:
        return None
    offset, position = first, 0
    if state is not None and state.checkpoint.file_seq == seq:
        offset, position = state.synced, state.synced_position
    else:
        index = directory.load_index(seq)
        if index:
            offset, position = index[-1].offset, index[-1].position
    if position > handle.size():
        offset, position = first, 0
    scan = scan_file(handle, position=position, expected_offset=offset)
    return scan.next_offset


def _read_node(root: str) -> str:
    """The identity of the node whose files these are; empty if it has none yet."""
    try:
        file = LocalFileSystem().open_read(f"{root}/{NODE_NAME}")
    except NotFoundError:
        return ""
    try:
        return file.read_at(0, KIB).decode("ascii", errors="replace").strip()
    finally:
        file.close()


# -- together -------------------------------------------------------------------------------


def _watermarks(
    storage: StorageConfig, catalogued: _Catalogued, local: LocalLog | None
) -> Watermarks:
    """How far the topic has come, by everything that says so."""
    tiered = catalogued.objects[-1].end if catalogued.objects else 0
    synced = tiered
    if catalogued.sealed is not None:
        synced = max(synced, catalogued.sealed.next_offset)
    trimmed, written = synced, synced
    if local is not None and local.is_current:
        state = local.state
        firsts = [file.first_offset for file in local.files if file.first_offset is not None]
        trimmed = state.checkpoint.start_offset if state is not None else trimmed
        if firsts:
            trimmed = firsts[0]
            # A file is synced whole before its successor exists.
            synced = max(synced, firsts[-1])
        if state is not None:
            synced = max(synced, state.synced)
        written = max([synced, *(file.next_offset or 0 for file in local.files)])
    if storage.mode is not StorageMode.WAL_CLOUD:
        tiered = trimmed  # as a topic without a bucket says itself
    return Watermarks(
        trimmed=min(trimmed, tiered),
        tiered=tiered,
        synced=synced,
        written=written,
        next=written,
    )


def _not_found(root: str, name: TopicName, catalogued: _Catalogued) -> NotFoundError:
    names = {*catalogued.names, *_local_names(root)}
    near = difflib.get_close_matches(str(name), sorted(names))
    if near:
        hint = f"did you mean {', '.join(near)}?"
    elif catalogued.error is not None:
        hint = f"{catalogued.error.message}: {_RECOVER_HINT}"
    else:
        hint = f"there are: {', '.join(sorted(names)[:10])}" if names else "there are no topics"
    return NotFoundError(f"there is no topic {name}", topic=str(name), hint=hint)


def _local_names(root: str) -> Iterable[str]:
    for namespace in _directories(root):
        for topic in _directories(f"{root}/{namespace}"):
            # A dot marks what was set aside.
            if "." not in topic:
                yield f"/{namespace}/{topic}"


def _directories(path: str) -> list[str]:
    if not os.path.isdir(path):
        return []
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
