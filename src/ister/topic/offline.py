"""Describes topics without opening them: read-only, without locks, while other processes write.

    catalog (metadata store) ─► checkpoint ─► local files ─► watermarks

The catalog is read first: messages that it calls tiered were synced before, so the files, which are
read later, are never behind it. Of the local files only the last one is read, from the checkpoint's
position on; a rotated file ends where the next one begins.

Messages that another process holds in memory are not seen: `written` and `next` follow from the
files, `synced` from the checkpoint or the files.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Final, Protocol

from ister.base.clock import SystemClock
from ister.base.metrics import Metrics
from ister.base.model import JsonObject, TopicName, Watermarks
from ister.base.positions import lag_of
from ister.bucket.catalog import Catalog, Subscription
from ister.bucket.directory import list_topics
from ister.bucket.names import TopicKeys
from ister.config import CloudBackend, MetadataBackend, StorageConfig
from ister.errors import CorruptDataError, IsterError, NotFoundError, UnsupportedVersionError
from ister.format.checkpoint import WalState
from ister.format.descriptor import ObjectDescriptor
from ister.format.frame_search import read_frame
from ister.format.frame_walk import scan_file
from ister.format.records import OwnerRecord, SealedState, TopicRecord
from ister.fs.base import File
from ister.fs.local import LocalFileSystem
from ister.metadata.base import MetadataStore
from ister.topic.describe import SubscriptionView, TopicView, UploadLag, describe_descriptor
from ister.topic.directories import list_directories
from ister.topic.node import read_node_id
from ister.topic.stores import open_metadata
from ister.wal.directory import WalDirectory, format_log_name
from ister.wire.views import TopicJson

_RECOVER_HINT: Final = "`ister recover` rebuilds the metadata from the bucket"


@dataclass(slots=True, kw_only=True)
class Served:
    """What brokers have stored about a topic."""

    is_reliable: bool = True
    policies: Mapping[str, int] = field(default_factory=dict)
    subscriptions: dict[str, SubscriptionView] = field(default_factory=dict)


class BrokerState(Protocol):
    """Reads what brokers have stored, in formats that this layer does not know."""

    def non_reliable(self, store: MetadataStore) -> Iterable[str]:
        """The names of non-reliable topics, which have no log."""
        ...

    def read(self, store: MetadataStore, name: TopicName, incarnation: str) -> Served:
        """What is stored about a topic."""
        ...


@dataclass(slots=True, kw_only=True)
class LogFile:
    """A local file, as far as it is known without reading it whole."""

    name: str
    first_offset: int | None
    next_offset: int | None
    bytes: int


@dataclass(slots=True, kw_only=True)
class LocalLog:
    """A topic's local files."""

    path: str
    state: WalState | None
    files: list[LogFile]
    is_current: bool
    """Whether they are the newest; False if another node has written since."""


@dataclass(slots=True, kw_only=True)
class OfflineTopic:
    """A topic as stores and files describe it."""

    topic: str
    watermarks: Watermarks
    record: TopicRecord | None
    owner: OwnerRecord | None
    sealed: SealedState | None
    local: LocalLog | None
    objects: list[ObjectDescriptor] = field(default_factory=list)
    subscriptions: list[Subscription] = field(default_factory=list)
    """The cursors of subscriptions."""
    served: Served
    errors: list[IsterError] = field(default_factory=list)
    """What could not be read."""

    @property
    def ack(self) -> str | None:
        """The topic's ack level, if it is known."""
        if self.record is not None:
            return self.record.ack
        state = self.local.state if self.local is not None else None
        return state.ack if state is not None else None

    @property
    def codec(self) -> str | None:
        """The topic's codec, if it is known."""
        if self.record is not None:
            return self.record.codec
        state = self.local.state if self.local is not None else None
        return state.codec if state is not None else None

    def to_json(self, error_fields: Callable[[IsterError], JsonObject]) -> TopicJson:
        """The fields that describe the topic; `error_fields` gives those of an error."""
        record, local, marks = self.record, self.local, self.watermarks
        files = local.files if local is not None else []
        return TopicView(
            topic=self.topic,
            is_reliable=self.served.is_reliable,
            ack=self.ack,
            codec=self.codec,
            epoch=record.epoch if record is not None else None,
            incarnation=record.incarnation if record is not None else None,
            state=record.state if record is not None else None,
            created_at=record.created_at if record is not None else None,
            owner={**asdict(self.owner), "broker_url": None} if self.owner is not None else None,
            sealed=asdict(self.sealed) if self.sealed is not None else None,
            earliest=self._earliest(),
            watermarks=marks,
            path=local.path if local is not None else None,
            is_local_current=local.is_current if local is not None else None,
            files=[
                {**asdict(file), "is_active": number == len(files)}
                for number, file in enumerate(files, 1)
            ],
            objects=[describe_descriptor(item) for item in self.objects],
            files_total=len(files),
            files_bytes=sum(file.bytes for file in files),
            objects_total=len(self.objects),
            objects_bytes=sum(item.size_bytes for item in self.objects),
            policies=dict(self.served.policies),
            schema=None,
            upload_lag=UploadLag(
                marks.next - marks.tiered,
                _bytes_from(files, marks.tiered) if marks.next > marks.tiered else 0,
            ),
            subscriptions=self._subscriptions(),
            errors=[error_fields(error) for error in self.errors],
        ).to_json()

    def _earliest(self) -> int:
        """The first offset in any tier; the next offset if there are no messages."""
        firsts = [self.objects[0].start] if self.objects else []
        if self.local is not None and self.local.is_current:
            known = [file.first_offset for file in self.local.files]
            firsts += [offset for offset in known if offset is not None][:1]
        return min([*firsts, self.watermarks.next])

    def _subscriptions(self) -> list[SubscriptionView]:
        cursors: dict[str, int | None] = dict.fromkeys(self.served.subscriptions)
        cursors |= {one.name: one.progress.offset for one in self.subscriptions}
        earliest, end = self._earliest(), self.watermarks.next
        found = []
        for name, cursor in sorted(cursors.items()):
            view = self.served.subscriptions.get(name) or SubscriptionView(name=name, type=None)
            view.cursor = cursor
            view.lag = None if cursor is None else lag_of(cursor, earliest=earliest, end=end)
            found.append(view)
        return found


@dataclass(slots=True, kw_only=True)
class _Catalogued:
    """What the metadata store says; empty without one."""

    names: list[str] = field(default_factory=list)
    record: TopicRecord | None = None
    owner: OwnerRecord | None = None
    sealed: SealedState | None = None
    objects: list[ObjectDescriptor] = field(default_factory=list)
    subscriptions: list[Subscription] = field(default_factory=list)
    served: Served = field(default_factory=Served)
    error: IsterError | None = None


def read_topics(
    storage: StorageConfig, root: str | None, brokers: BrokerState, namespace: str | None = None
) -> list[OfflineTopic]:
    """Describes all topics, by name; what cannot be read of a topic is in its errors.

    `root`: where its topics' directories are; None if it keeps no local files.
    `namespace`: only the topics of this namespace.
    """
    with _open_catalog(storage) as (store, error):
        names = {*_local_names(root)}
        if store is not None:
            names.update(_list_names(store, storage.metadata.root_prefix))
            names.update(brokers.non_reliable(store))
        found: list[OfflineTopic] = []
        for name in map(TopicName.parse, sorted(names)):
            if namespace is None or name.namespace == namespace:
                with suppress(NotFoundError):  # deleted meanwhile, or left behind
                    catalogued = _read_catalog(store, error, storage, brokers, name)
                    found.append(_combine(storage, root, name, catalogued))
        return found


def read_topic(
    storage: StorageConfig, root: str | None, brokers: BrokerState, name: TopicName
) -> OfflineTopic:
    """Describes a topic; what cannot be read is in its errors."""
    with _open_catalog(storage) as (store, error):
        return _combine(storage, root, name, _read_catalog(store, error, storage, brokers, name))


def _combine(
    storage: StorageConfig, root: str | None, name: TopicName, catalogued: _Catalogued
) -> OfflineTopic:
    record, served = catalogued.record, catalogued.served
    local = _read_local(root, name, record)
    has_log = local is not None or (record is not None and record.state != "deleted")
    if not has_log and served.is_reliable:
        raise _not_found(root, name, catalogued)
    return OfflineTopic(
        topic=str(name),
        watermarks=_watermarks(storage, catalogued, local),
        record=record,
        owner=catalogued.owner,
        sealed=catalogued.sealed,
        local=local,
        objects=catalogued.objects,
        subscriptions=catalogued.subscriptions,
        served=served,
        errors=[catalogued.error] if catalogued.error is not None else [],
    )


# -- the metadata store ---------------------------------------------------------------------


@contextmanager
def _open_catalog(
    storage: StorageConfig,
) -> Iterator[tuple[MetadataStore | None, IsterError | None]]:
    """The metadata store, or the error that explains its absence."""
    config = storage.metadata
    is_shared = config.backend is not MetadataBackend.MEMORY
    if not storage.mode.has_bucket or not is_shared:
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
    store: MetadataStore | None,
    error: IsterError | None,
    storage: StorageConfig,
    brokers: BrokerState,
    name: TopicName,
) -> _Catalogued:
    if store is None:
        return _Catalogued(error=error)
    clock, prefix = SystemClock(), storage.metadata.root_prefix
    catalog = Catalog(store, TopicKeys(prefix, name), clock=clock, metrics=Metrics())
    found = _read_topic(catalog, prefix)
    incarnation = found.record.incarnation if found.record is not None else ""
    found.served = brokers.read(store, name, incarnation)
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
        # One value cannot be read; the others are still useful.
        found.error = error
    return found


def _list_names(store: MetadataStore, root_prefix: str) -> list[str]:
    try:
        return list_topics(store, root_prefix)
    except CorruptDataError:
        return []


def _has_bucket(storage: StorageConfig) -> bool:
    """Whether there is a bucket, whose metadata is missing."""
    is_directory = storage.cloud.backend in (CloudBackend.FS, CloudBackend.LOCAL)
    return not is_directory or os.path.isdir(storage.cloud.root or "")


# -- local files ----------------------------------------------------------------------------


def _read_local(root: str | None, name: TopicName, record: TopicRecord | None) -> LocalLog | None:
    if root is None:
        return None
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
        is_current=not lineage or lineage[-1].node == (read_node_id(LocalFileSystem(), root) or ""),
    )


def _read_files(directory: WalDirectory, state: WalState | None) -> list[LogFile]:
    files: list[LogFile] = []
    seqs = directory.log_seqs()
    for seq in seqs:
        # A file that is gone was trimmed since the directory was read.
        with suppress(NotFoundError), directory.open_log(seq) as handle:
            first = _first_offset(handle, seq, state)
            is_last = seq == seqs[-1]
            files.append(
                LogFile(
                    name=format_log_name(seq),
                    first_offset=first,
                    next_offset=_end_of(directory, handle, seq, first, state) if is_last else None,
                    bytes=handle.size(),
                )
            )
    for file, following in pairwise(files):
        file.next_offset = following.first_offset
    return files


def _first_offset(handle: File, seq: int, state: WalState | None) -> int | None:
    """The first offset of a file, from the checkpoint or its first frame."""
    if state is not None and (known := state.first_offsets().get(seq)) is not None:
        return known
    frame = read_frame(handle.read_at, 0)
    return frame.offset if frame is not None else None


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


# -- together -------------------------------------------------------------------------------


def _watermarks(
    storage: StorageConfig, catalogued: _Catalogued, local: LocalLog | None
) -> Watermarks:
    """The watermarks that follow from the catalog, the checkpoint and the files."""
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
    if not storage.mode.has_bucket:
        tiered = trimmed  # as in an open topic without a bucket
    return Watermarks(
        trimmed=min(trimmed, tiered), tiered=tiered, synced=synced, written=written, next=written
    )


def _not_found(root: str | None, name: TopicName, catalogued: _Catalogued) -> NotFoundError:
    names = {*catalogued.names, *_local_names(root)}
    near = difflib.get_close_matches(str(name), sorted(names))
    if near:
        hint = f"did you mean {', '.join(near)}?"
    elif catalogued.error is not None:
        hint = f"{catalogued.error.message}: {_RECOVER_HINT}"
    else:
        hint = f"there are: {', '.join(sorted(names)[:10])}" if names else "there are no topics"
    return NotFoundError(f"topic {name} does not exist", topic=str(name), hint=hint)


def _local_names(root: str | None) -> Iterable[str]:
    if root is not None and os.path.isdir(root):
        for name in list_directories(LocalFileSystem(), root):
            if os.path.isdir(f"{root}{name}"):
                yield str(name)


def _bytes_from(files: Sequence[LogFile], offset: int) -> int:
    """The approximate bytes of the messages from an offset on, in local files."""
    size = 0
    for file in files:
        first, end = file.first_offset, file.next_offset
        if first is None or end is None or end <= max(first, offset):
            continue
        size += file.bytes * (end - max(first, offset)) // (end - first)
    return size
