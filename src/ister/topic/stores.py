"""The stores behind a log's topics, opened from its settings and shared by all of them.

    Tiers = object store + metadata store + this node's membership + threads that read ahead

Owns: their opening and closing. Does not own: any topic's state, the node's identity (`node`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ister import failpoints
from ister.bucket.catalog import Catalog
from ister.bucket.claim import (
    ClaimCheck,
    ClaimView,
    NewTopic,
    act_outside,
    check_claim,
    claim,
)
from ister.bucket.egress import EgressLimit
from ister.bucket.fence import MemberFence
from ister.bucket.history_reader import HistoryReader, ReaderSettings
from ister.bucket.listing import list_objects
from ister.bucket.membership import Membership
from ister.bucket.names import (
    EXPRESS_PREFIX,
    TopicKeys,
    manifest_key,
    object_id_of,
    objects_prefix,
    parse_epoch,
    segments_prefix,
    staging_prefix,
    topic_prefix,
)
from ister.bucket.object_maker import ObjectMaker, UploadSettings
from ister.bucket.ownership import OwnedTopic, resume_delete
from ister.bucket.rebuild import has_manifest, load_manifest, manifest_of, save_manifest
from ister.bucket.shared_staging import collect_shared_staging
from ister.bucket.upload import Uploader
from ister.clock import Clock
from ister.config import (
    CloudBackend,
    Finalize,
    MetadataBackend,
    MetadataConfig,
    OnDamage,
    StorageConfig,
    StorageMode,
    UploaderConfig,
)
from ister.errors import ClosedError, ConflictError, FencedError, IsterError
from ister.metadata.base import MetadataStore
from ister.metrics import Metrics
from ister.model import Layout, TopicName
from ister.objectstore.base import Capabilities, ObjectStore
from ister.objectstore.slices import with_slices
from ister.topic.node import Node
from ister.topic.node_clock import NodeClock

_log = logging.getLogger("ister.topic.stores")

_READ_AHEAD_THREADS: Final = 4
_STALE_SECONDS_MIN: Final = 3600
# One request of a call, of which there may be several attempts.
_IO_TIMEOUT_SECONDS: Final = 20.0


def open_objects(storage: StorageConfig, clock: Clock) -> ObjectStore:
    """The object store that the settings name.

    Raises:
        ConfigError: The settings do not make sense, or a library is missing.
    """
    from ister.objectstore.opendal_store import open_store  # noqa: PLC0415 - loads a large library

    cloud = storage.cloud
    backend = CloudBackend.FS if cloud.backend is CloudBackend.LOCAL else cloud.backend
    store = open_store(
        backend.value,
        cloud.root or "",
        cloud.options,
        clock=clock,
        call_timeout_seconds=float(cloud.call_timeout_seconds),
        io_timeout_seconds=min(_IO_TIMEOUT_SECONDS, float(cloud.call_timeout_seconds)),
    )
    return with_slices(store)


def open_metadata(
    config: MetadataConfig,
    clock: Clock,
    *,
    read_only: bool = False,
    on_full: Callable[[], bool] | None = None,
) -> MetadataStore:
    """The metadata store that the settings name.

    Args:
        config: The settings.
        clock: Measures leases.
        read_only: Creates and changes nothing.
        on_full: Called when the store's local disk is full; returns whether it freed space.

    Raises:
        ConfigError: The settings do not make sense, or a library is missing.
        UnavailableError: It does not answer.
        CorruptDataError: SQLite's file is damaged.
    """
    if config.backend is MetadataBackend.MEMORY:
        from ister.metadata.memory import MemoryMetadata  # noqa: PLC0415

        return MemoryMetadata(clock)
    if config.backend is MetadataBackend.ETCD:
        from ister.metadata.etcd import EtcdMetadata  # noqa: PLC0415 - an extra

        return EtcdMetadata(
            config.endpoints,
            clock=clock,
            username=config.username,
            password=config.password,
            tls=config.tls,
        )
    from ister.metadata.sqlite import SqliteMetadata  # noqa: PLC0415

    return SqliteMetadata(config.path or "", clock=clock, read_only=read_only, on_full=on_full)


def open_tiers(
    storage: StorageConfig,
    *,
    node: Node,
    objects: ObjectStore | None,
    metadata: MetadataStore | None,
    on_full: Callable[[], bool] | None,
    node_clock: NodeClock,
    clock: Clock,
    metrics: Metrics,
) -> Tiers:
    """Opens the stores that were not given, and joins as `node`; on an error, all are closed.

    Raises:
        As `open_objects`, `open_metadata` and `Tiers`.
    """
    if objects is None:
        objects = open_objects(storage, clock)
    if metadata is None:
        metadata = open_metadata(storage.metadata, clock, on_full=on_full)
    try:
        return Tiers(
            storage,
            node=node,
            objects=objects,
            metadata=metadata,
            clock=clock,
            metrics=metrics,
            node_clock=node_clock,
        )
    except BaseException:
        metadata.close()
        objects.close()
        raise


def upload_settings(config: UploaderConfig, layout: Layout = Layout.OBJECTS) -> UploadSettings:
    """The settings of uploads, for a topic's owner and for a job's tasks."""
    return UploadSettings(
        copies=config.finalize is Finalize.COPY,
        chunk_bytes=config.stream_chunk_size,
        concurrent_parts=config.concurrent_parts,
        index_every_messages=config.index_every_messages,
        object_bytes_max=config.max_object_bytes,
        object_span_ms_max=config.max_object_seconds * 1000,
        layout=layout,
    )


class Tiers:
    """What the topics of one log share beside their files. Thread-safe."""

    def __init__(
        self,
        storage: StorageConfig,
        *,
        node: Node,
        objects: ObjectStore,
        metadata: MetadataStore,
        clock: Clock,
        metrics: Metrics,
        node_clock: NodeClock | None = None,
    ) -> None:
        """Joins the metadata store as `node`; the stores are closed with this.

        Raises:
            As `ister.bucket.membership.Membership`.
        """
        self.storage = storage
        self.objects = with_slices(objects)
        self.metadata = metadata
        self.clock = clock
        self.metrics = metrics
        self.node_clock = node_clock if node_clock is not None else NodeClock(clock)
        """Detects steps of this node's clock."""
        self.membership = Membership(
            metadata,
            root_prefix=storage.metadata.root_prefix,
            node=node.id,
            directory=node,
            ttl_seconds=storage.metadata.lease_ttl_seconds,
            clock=clock,
        )
        self._lock = threading.Lock()
        self._ahead: ThreadPoolExecutor | None = None
        rate = storage.uploader.max_bytes_per_second
        self._egress = None if rate is None else EgressLimit(rate, clock=clock)
        self._without_manifest: set[str] = set()
        self.upload_memory_bytes = 0
        """Upper bound of the memory of running uploads."""
        self.upload_parts = 0
        """Upload parts in flight (upper bound)."""
        self.is_disk_low: Callable[[], bool] = lambda: False
        """Returns whether low disk space stops appends, so that uploads should start now."""
        self.is_diskless = storage.mode is StorageMode.BUCKET
        """Whether local files are in memory, so that only what is tiered counts."""
        self.marks_idle = storage.metadata.backend is MetadataBackend.ETCD
        """Whether other nodes can share the metadata store, so that idle topics are marked."""
        self.capabilities: Capabilities | None = None
        """The object store's capabilities; None before `probe`."""

    # -- topics -----------------------------------------------------------------------------

    def keys(self, name: TopicName) -> TopicKeys:
        """The metadata keys of a topic."""
        return TopicKeys(self.storage.metadata.root_prefix, name)

    def catalog(self, name: TopicName) -> Catalog:
        """What the metadata store knows about a topic."""
        return Catalog(self.metadata, self.keys(name), clock=self.clock, metrics=self.metrics)

    def view(self, name: TopicName) -> ClaimView:
        """Reads the keys that a claim of the topic depends on."""
        return ClaimView.read(self.catalog(name))

    def check_claim(
        self,
        name: TopicName,
        view: ClaimView,
        *,
        new: NewTopic | None,
        has_files: bool,
        take_over: bool,
    ) -> ClaimCheck:
        """Whether local files are the topic's newest; as `ister.bucket.claim.check_claim`."""
        if new is not None and view.record is None:
            self._refuse_forgotten(name)
        return check_claim(
            self.catalog(name),
            self.membership,
            view,
            new=new,
            has_files=has_files,
            take_over=take_over,
            clock=self.clock,
            metrics=self.metrics,
        )

    def claim(
        self, name: TopicName, *, new: NewTopic | None, take_over: bool, seen: ClaimCheck
    ) -> OwnedTopic | None:
        """Makes this node the owner of a topic; None if its record has changed since `seen`.

        Raises:
            NotFoundError: There is no such topic, and `new` is None.
            ConflictError: Another node has it, or the bucket knows more than the metadata store.
            UnavailableError: A store does not answer.
        """
        known = seen.view.known
        owned = claim(
            self.catalog(name),
            self.membership,
            new=new,
            take_over=take_over,
            clock=self.clock,
            metrics=self.metrics,
            seen=seen,
        )
        if owned is None:
            return None
        if known is None or not known.is_open:
            self._save_manifest(name, owned)
        elif owned.last is None:
            # The process that made the topic may have been killed before it saved the manifest.
            self._without_manifest.add(owned.topic)
        return owned

    def take_reader_key(self, name: TopicName) -> MemberFence:
        """Makes this node the one that serves the history of a topic that waits for a disk.

        Raises:
            ConflictError: Another node does.
            UnavailableError: The metadata store does not answer.
        """
        membership = self.membership
        return MemberFence.take_with(
            self.metadata,
            self.keys(name).reader,
            node=membership.node,
            lease=membership.lease,
            is_here=membership.is_here,
            clock=self.clock,
        )

    def act_outside(self, name: TopicName, fence: MemberFence) -> OwnedTopic:
        """As `ister.bucket.claim.act_outside`."""
        return act_outside(self.catalog(name), fence, clock=self.clock, metrics=self.metrics)

    def _refuse_forgotten(self, name: TopicName) -> None:
        """Refuses to create a topic whose history is in the bucket."""
        if not self._has_any(topic_prefix(name)):
            return  # neither objects nor a manifest
        has_objects = any(map(self._has_any, (objects_prefix(name), segments_prefix(name))))
        if has_objects or (
            # Its messages may be in express objects alone; a deletion removes the manifest.
            self._has_any(EXPRESS_PREFIX) and has_manifest(self.objects, name)
        ):
            raise ConflictError(
                "the bucket has objects of this topic, and the metadata store does not know it",
                topic=str(name),
                hint="`ister recover` rebuilds the metadata from the bucket",
            )

    def _has_any(self, prefix: str) -> bool:
        return next(iter(self.objects.list(prefix)), None) is not None

    def _save_manifest(self, name: TopicName, owned: OwnedTopic) -> None:
        try:
            save_manifest(self.objects, name, manifest_of(owned.record))
        except IsterError as error:
            # Only `ister recover` reads it, and can do without it if the topic has objects of its
            # own.
            self._without_manifest.add(owned.topic)
            _log.warning("manifest not saved", extra={"topic": str(name), "error": str(error)})

    def assure_manifest(self, owned: OwnedTopic) -> None:
        """Saves the manifest of a topic that shares express objects, if it may be missing.

        Raises:
            FencedError: The topic is being deleted.
            IsterError: It could not be saved.
        """
        if owned.topic not in self._without_manifest:
            return
        # Under the lock: a deletion, which removes the manifest, is marked before this or after.
        with owned.lock:
            if not owned.record.is_open:
                raise FencedError("the topic is being deleted", topic=owned.topic)
            save_manifest(self.objects, owned.catalog.keys.topic, manifest_of(owned.record))
        self._without_manifest.discard(owned.topic)

    def delete(
        self, name: TopicName, owned: OwnedTopic | None, remove_files: Callable[[], None]
    ) -> None:
        """Removes what the stores hold of a topic that this node owns, or had begun to delete.

        Args:
            name: The topic.
            owned: The claim; None to finish a deletion that a crash has interrupted.
            remove_files: Removes the local files; done while the record says "deleting", so that
                a crash leaves nothing behind that the next deletion would not find.

        Raises:
            FencedError: Another owner has the topic.
            UnavailableError: A store does not answer; call it again.
        """
        if owned is None:
            owned = resume_delete(self.catalog(name), clock=self.clock, metrics=self.metrics)
        else:
            owned.mark_deleting()
        failpoints.reach("tier.after_mark_deleting")
        for info in list(list_objects(self.objects, name)):
            # Another process may have finished this deletion and created the topic again: the
            # new objects have a later epoch in their names.
            if parse_epoch(object_id_of(name, info.key)) <= owned.epoch:
                self.objects.delete(info.key)
                failpoints.reach("tier.after_delete_object")
        for info in list(self.objects.list(staging_prefix(name))):
            self.objects.delete(info.key)
        owned.check()
        # Another process may have finished this deletion and created the topic again. One that
        # was paused right here removes the new manifest, which the new owner saves again.
        manifest = load_manifest(self.objects, name)
        if manifest is None or manifest.incarnation == owned.record.incarnation:
            self.objects.delete(manifest_key(name))
        remove_files()
        self.membership.remove(owned)
        owned.finish_delete()

    def uploader(self, owned: OwnedTopic, is_stopping: Callable[[], bool]) -> Uploader:
        """An uploader of a topic that stops when `is_stopping` returns True."""
        return Uploader(
            owned,
            self.objects,
            settings=upload_settings(self.storage.uploader, self.storage.cloud.layout),
            clock=self.clock,
            metrics=self.metrics,
            correct_ms=self.node_clock.correct_ms,
            on_memory=self._add_upload_memory,
            on_parts=self._add_upload_parts,
            is_stopping=is_stopping,
            egress=self._egress,
        )

    def object_maker(
        self, owned: OwnedTopic, is_stopping: Callable[[], bool], *, pending_tag: str
    ) -> ObjectMaker:
        """Makes objects of a topic beside its uploader; see `ObjectMaker`."""
        return ObjectMaker(
            owned.catalog.keys.topic,
            self.objects,
            settings=upload_settings(self.storage.uploader, self.storage.cloud.layout),
            clock=self.clock,
            metrics=self.metrics,
            pending_tag=pending_tag,
            on_memory=self._add_upload_memory,
            on_parts=self._add_upload_parts,
            is_stopping=is_stopping,
            egress=self._egress,
        )

    def wait_for_egress(self, size_bytes: int, is_stopping: Callable[[], bool]) -> None:
        """Waits until the rate limit allows an upload of `size_bytes`.

        Raises:
            ClosedError: `is_stopping` returned True.
        """
        if self._egress is not None and not self._egress.take(size_bytes, is_stopping):
            raise ClosedError("the log is being closed")

    def _add_upload_memory(self, change: int) -> None:
        with self._lock:
            self.upload_memory_bytes += change

    def _add_upload_parts(self, change: int) -> None:
        with self._lock:
            self.upload_parts += change

    def probe(self) -> None:
        """Probes the object store's capabilities, logs what is missing, and removes stale parts.

        Nothing depends on the result: names are unique, and commits go through the metadata
        store. Messages are accepted even if the bucket does not answer.
        """
        try:
            self.capabilities = self.objects.probe()
            if self.capabilities.leftovers:
                _log.warning(
                    "%s; only a lifecycle rule of the bucket can remove parts of killed processes",
                    self.capabilities.leftovers,
                    extra={"store": self.objects.location},
                )
            if self.node_clock.check() is not None:
                return
            # Another process may be writing: only parts that are old enough are left over.
            grace = self.storage.cloud.orphan_grace_minutes * 60
            self.objects.remove_stale_parts(max(grace, _STALE_SECONDS_MIN))
        except ClosedError:
            return  # the log was closed meanwhile
        except IsterError as error:
            _log.error(
                "the object store cannot be used; messages wait for it meanwhile",
                extra={"store": self.objects.location, "error": str(error)},
            )

    def collect_shared_staging(self) -> list[str]:
        """Removes old staged files that no topic needs; returns their keys. Logs errors."""
        if self.node_clock.check() is not None:
            return []
        try:
            return collect_shared_staging(
                self.objects,
                self.metadata,
                self.storage.metadata.root_prefix,
                grace_seconds=self.storage.cloud.orphan_grace_minutes * 60,
                clock=self.clock,
                metrics=self.metrics,
                correct_ms=self.node_clock.correct_ms,
            )
        except ClosedError:
            pass  # the log was closed meanwhile
        except IsterError as error:
            _log.warning("collecting staged files failed", extra={"error": str(error)})
        return []

    def reader(self, catalog: Catalog) -> HistoryReader:
        """A reader of a topic's objects."""
        settings = self.storage.cloud_reader
        return HistoryReader(
            catalog,
            self.objects,
            settings=ReaderSettings(
                chunk_bytes=settings.fetch_chunk_size,
                ranged=settings.enable_ranged_reads,
                skips_damage=settings.on_damage is OnDamage.SKIP,
            ),
            clock=self.clock,
            metrics=self.metrics,
            ahead=self._read_ahead() if settings.read_ahead else None,
        )

    def _read_ahead(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._ahead is None:
                self._ahead = ThreadPoolExecutor(
                    _READ_AHEAD_THREADS, thread_name_prefix="ister-read-ahead"
                )
            return self._ahead

    def close(self) -> None:
        """Releases every topic and closes the stores. May be called twice."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=True, cancel_futures=True)
        self.membership.end()
        self.metadata.close()
        self.objects.close()
