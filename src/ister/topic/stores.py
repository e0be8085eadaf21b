"""The stores behind a log's topics, opened from its settings and shared by all of them.

    Stores = object store + metadata store + this node's membership + threads that read ahead

Owns: their opening and closing. Does not own: any topic's state, the node's identity (`node`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Final, TypeVar

from ister.base import failpoints, threads
from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import AckLevel, Layout, TopicName
from ister.bucket.catalog import Catalog
from ister.bucket.chunks import OBJECTS_AHEAD_MAX
from ister.bucket.claim import (
    ClaimCheck,
    ClaimView,
    LocalFiles,
    NewTopic,
    act_outside,
    check_claim,
    claim,
)
from ister.bucket.egress import EgressLimit
from ister.bucket.express import find_runs_from
from ister.bucket.fence import MemberFence
from ister.bucket.history_reader import HistoryReader, ReaderSettings
from ister.bucket.identity import BucketIdentity, check_bucket
from ister.bucket.listing import list_objects
from ister.bucket.membership import Membership, has_ended
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
from ister.bucket.orphans import at_least
from ister.bucket.ownership import OwnedTopic, resume_delete
from ister.bucket.shared_staging import collect_shared_staging
from ister.bucket.terms import (
    ForgottenRuns,
    Term,
    load_term,
    newest_terms,
    process_of_claim,
    remove_terms,
    save_term,
)
from ister.bucket.topic_manifest import has_manifest, load_manifest, manifest_of, save_manifest
from ister.bucket.trust import Trust
from ister.bucket.upload import Uploader
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
from ister.config.aliases import name_as_given
from ister.errors import (
    ClosedError,
    FencedError,
    IsterError,
    NotFoundError,
    PermissionDeniedError,
    StoresDifferError,
    UnavailableError,
)
from ister.format.descriptor import ObjectDescriptor
from ister.format.records import TopicRecord
from ister.metadata.base import MetadataStore
from ister.objectstore.base import Capabilities, ObjectStore
from ister.objectstore.slices import with_slices
from ister.rescue.rebuild import find_continuation
from ister.topic.node import Node
from ister.topic.node_clock import NodeClock

_T = TypeVar("_T")

_log = logging.getLogger("ister.topic.stores")

# How long a start, and the opening of a topic that does not need the bucket, wait for it.
_PATIENCE_SECONDS: Final = 5.0
_ASK_AGAIN_SECONDS: Final = 30.0
_NO_ANSWER: Final = (UnavailableError, PermissionDeniedError, NotFoundError)
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
    try:
        store = open_store(
            backend.value,
            cloud.root or "",
            cloud.options,
            clock=clock,
            call_timeout_seconds=float(cloud.call_timeout_seconds),
            io_timeout_seconds=min(_IO_TIMEOUT_SECONDS, float(cloud.call_timeout_seconds)),
        )
    except IsterError as error:
        name_as_given(error, cloud.given_as)
        raise
    return with_slices(store)


def open_metadata(
    config: MetadataConfig,
    clock: Clock,
    *,
    read_only: bool = False,
    on_full: Callable[[], bool] | None = None,
) -> MetadataStore:
    """The metadata store that the settings name.

    `on_full`: called when the store's local disk is full; returns whether it freed space.

    Raises:
        ConfigError: The settings do not make sense, or a library is missing.
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


def metadata_of(storage: StorageConfig) -> MetadataConfig:
    """Where a log's metadata is; for a log without a bucket, where its broker's own is."""
    if storage.mode.has_bucket:
        return storage.metadata
    if storage.mode is StorageMode.LOCAL_ONLY and storage.wal.dir is not None:
        home = os.path.dirname(os.path.abspath(storage.wal.dir))
        return MetadataConfig(
            backend=MetadataBackend.SQLITE, path=os.path.join(home, "metadata.db")
        )
    return MetadataConfig(backend=MetadataBackend.MEMORY)


@contextmanager
def open_identity(
    storage: StorageConfig, clock: Clock, *, read_only: bool = True
) -> Iterator[BucketIdentity]:
    """Opens a bucket and a metadata store to compare their ids; closes both after the block."""
    with (
        closing(open_objects(storage, clock)) as objects,
        closing(open_metadata(storage.metadata, clock, read_only=read_only)) as metadata,
    ):
        yield BucketIdentity(objects, metadata, root_prefix=storage.metadata.root_prefix)


def open_stores(
    storage: StorageConfig,
    *,
    node: Node,
    objects: ObjectStore | None,
    metadata: MetadataStore | None,
    on_full: Callable[[], bool] | None,
    node_clock: NodeClock,
    clock: Clock,
    metrics: Metrics,
) -> Stores:
    """Opens the stores that were not given, and joins as `node`; on an error, all are closed.

    A bucket that is opened here must be the one that the metadata store expects.
    """
    is_checked = objects is None and storage.cloud.backend is not CloudBackend.MEMORY
    if objects is None:
        objects = open_objects(storage, clock)
    if metadata is None:
        metadata = open_metadata(storage.metadata, clock, on_full=on_full)
    try:
        given = objects
        if is_checked:
            objects = check_bucket(given, metadata, root_prefix=storage.metadata.root_prefix)
        trust = Trust(with_slices(objects), metadata, storage.metadata.root_prefix, clock)
        if is_checked:
            # One that has not answered is not waited for again.
            threads.start("ister-trust", trust.follow).join(
                _PATIENCE_SECONDS if objects is given else 0
            )
        else:
            trust.follow()
        stores = Stores(
            storage,
            trust=trust,
            patience_seconds=_PATIENCE_SECONDS if is_checked else None,
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
    if objects is not given:
        stores.stop_asking()
    return stores


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


class Stores:
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
        trust: Trust | None = None,
        patience_seconds: float | None = None,
    ) -> None:
        """Joins the metadata store as `node`; the stores are closed with this.

        `trust`: detects that the metadata store was rolled back; None for a new one.
        `patience_seconds`: how long the opening of a topic waits for the bucket if it does not need
        it; None for no limit of its own.
        """
        self.storage = storage
        self.objects = with_slices(objects)
        self.metadata = metadata
        self.clock = clock
        self.metrics = metrics
        self.node_clock = node_clock if node_clock is not None else NodeClock(clock)
        """Detects steps of this node's clock."""
        root_prefix = storage.metadata.root_prefix
        self.trust = trust or Trust(self.objects, metadata, root_prefix, clock)
        """Detects that the metadata store was rolled back to an older state."""
        self._patience = patience_seconds
        self._ask_again_at = -float("inf")
        self.membership = Membership(
            metadata,
            root_prefix=storage.metadata.root_prefix,
            node=node.id,
            directory=node,
            ttl_seconds=storage.metadata.lease_ttl_seconds,
            clock=clock,
        )
        self._forgotten_runs = ForgottenRuns(self.objects, metadata, root_prefix, clock)
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
        local: LocalFiles,
        take_over: bool,
    ) -> ClaimCheck:
        """Whether local files are the topic's newest; as `ister.bucket.claim.check_claim`."""
        # The metadata store may have been rolled back since the last renewal of the lease.
        self.trust.check_revision()
        if self.trust.is_distrusted:
            self.trust.follow()
        known = view.known
        # A new name has nothing at all in the bucket.
        is_new = known is None and not self._has_any(topic_prefix(name))
        terms: list[Term] | None = []
        is_mine = known is not None and known.node == self.membership.node
        if is_mine and local.has_log and view.sealed is None:
            # This node wrote the topic last and can continue without the bucket. If the bucket does
            # not answer, the terms are compared before the first upload: see `begin_term`.
            terms = self._try_to_ask(lambda: newest_terms(self.objects, name))
        else:
            if not self.trust.is_compared:
                self.trust.check()
            if not is_new:
                terms = newest_terms(self.objects, name)
        if new is not None and known is None and not is_new:
            self._refuse_forgotten(name)
        catalog = self.catalog(name)
        seen = check_claim(
            catalog,
            self.membership,
            view,
            new=new,
            local=local,
            terms=terms,
            is_distrusted=self.trust.is_distrusted,
            take_over=take_over,
            clock=self.clock,
            metrics=self.metrics,
        )
        if known is None:
            return seen
        found = self.find_forgotten(catalog, seen) if terms is not None else []
        if terms is None or (
            found
            and is_mine
            and not seen.gives_up
            # Other nodes continue a topic of that level without these files.
            and known.ack is not AckLevel.TIERED
            and local.covers(found[0].start, found[-1].end)
        ):
            # Local files have them, and are uploaded again. If this process closes the topic before
            # that, its catalog is not complete, and the next owner has to look, too.
            self.membership.is_whole = False
            return seen
        return replace(seen, found=found) if found else seen

    def claim(
        self, name: TopicName, *, new: NewTopic | None, take_over: bool, seen: ClaimCheck
    ) -> OwnedTopic | None:
        """Makes this node the owner of a topic; None if its record has changed since `seen`.

        Raises:
            ConflictError: Another node has it, or the bucket knows more than the metadata store.
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

    def _try_to_ask(self, ask: Callable[[], _T]) -> _T | None:
        """Calls `ask`, which reads the bucket, with the time limit; None if there is no answer."""
        if self._patience is None:
            with suppress(*_NO_ANSWER):
                return ask()
            return None
        if self.clock.monotonic() < self._ask_again_at:
            return None
        answers: list[_T] = []
        errors: list[IsterError] = []

        def call() -> None:
            try:
                answers.append(ask())
            except IsterError as error:
                errors.append(error)

        threads.start("ister-bucket-terms", call).join(self._patience)
        if answers:
            return answers[0]
        if errors and not isinstance(errors[0], _NO_ANSWER):
            raise errors[0]
        _log.warning("no answer from the bucket; topics are opened without it")
        self.stop_asking()
        return None

    def stop_asking(self) -> None:
        """Has topics be opened without the bucket for a while, if they can do without it."""
        self._ask_again_at = self.clock.monotonic() + _ASK_AGAIN_SECONDS

    def find_forgotten(
        self, catalog: Catalog, before: ClaimCheck, *, has_gap: bool = False
    ) -> list[ObjectDescriptor]:
        """Finds objects that continue a topic's catalog and are not in it.

        There are some if the last owner's process ended between an upload and its commit, or if the
        metadata store was rolled back to an older state.

        `catalog`: the topic's, which no other process changes.
        `has_gap`: whether the local files begin after the catalog's end: then, and while the
        metadata store is distrusted, runs are searched in the express objects of all processes.

        Raises:
            StoresDifferError: The bucket has newer messages in an object that begins before the
                catalog's end: objects were merged since.
        """
        name, known = catalog.keys.topic, before.view.known
        if known is None or not known.is_open:
            return []
        last = catalog.last()
        tiered = last.end if last is not None else 0
        # After a rollback, owners follow each other quickly, and each removes the terms before its.
        if has_gap or self.trust.is_distrusted:
            runs = find_runs_from(self.objects, name, tiered, known.incarnation)
        elif before.view.sealed is not None or self._has_ended(known):
            return []
        else:
            runs = self._forgotten_runs.runs_of(name, self._processes(name, known, before.terms))
        # Not the record after a take-over: what the previous owner uploaded is part of the topic.
        return find_continuation(self.objects, name, tiered, record=known, runs=runs)

    def _has_ended(self, known: TopicRecord) -> bool:
        """Whether the last owner's process closed its topics, so that the catalog is complete."""
        process = process_of_claim(known.node, known.claim)
        if process is None or self.trust.is_distrusted:
            return False
        if process[0] == self.membership.node:
            return process[1] == self.membership.ended
        return has_ended(self.metadata, self.storage.metadata.root_prefix, *process)

    def _processes(
        self, name: TopicName, known: TopicRecord, terms: Sequence[Term] | None
    ) -> set[tuple[str, str]]:
        """Node and instance of the last owners: the record's, and those of the newest terms.

        A later owner may have been killed before it looked for an earlier one's objects.
        """
        processes = {process_of_claim(known.node, known.claim)}
        for term in terms if terms is not None else newest_terms(self.objects, name):
            is_known = term.claim == known.claim
            record = None if is_known else load_term(self.objects, name, term)
            if record is not None:
                processes.add(process_of_claim(record.node, term.claim))
        return {process for process in processes if process is not None}

    def begin_term(self, owned: OwnedTopic, end: int) -> None:
        """Records in the bucket that this process owns a topic.

        Raises:
            StoresDifferError: The bucket names a later owner or another one with this epoch, or has
                messages that the catalog does not have.
        """
        if owned.unread is not None:
            found = self.find_forgotten(owned.catalog, owned.unread)
            if found and found[-1].end > end:
                raise StoresDifferError(
                    "the bucket has messages that the catalog and the local files do not have",
                    topic=owned.topic,
                )
        owned.unread = None
        save_term(self.objects, owned.catalog.keys.topic, owned.record)

    def take_reader_key(self, name: TopicName) -> MemberFence:
        """Makes this node the one that serves the history of a topic that waits for a disk.

        Raises:
            ConflictError: Another node does.
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
        has_objects = any(map(self._has_any, (objects_prefix(name), segments_prefix(name))))
        if has_objects or (
            # Its messages may be in express objects alone; a deletion removes the manifest.
            self._has_any(EXPRESS_PREFIX) and has_manifest(self.objects, name)
        ):
            raise StoresDifferError(
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

        `owned`: the claim; None to finish a deletion that a crash has interrupted.
        `remove_files`: removes the local files; done while the record says "deleting", so that a
        crash leaves nothing behind that the next deletion would not find.

        Raises:
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
        remove_terms(self.objects, name, owned.epoch)
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
        """Waits until the rate limit allows an upload of `size_bytes`."""
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
            if self.node_clock.check() is not None:
                return
            # Another process may be writing: only parts that are old enough are left over.
            grace = self.storage.cloud.orphan_grace_minutes * 60
            self.objects.remove_stale_parts(at_least(grace))
        except ClosedError:
            return  # the log was closed meanwhile
        except IsterError as error:
            _log.error(
                "the object store cannot be used; messages wait for it meanwhile",
                extra={"store": self.objects.location, "error": str(error)},
            )

    def collect_shared_staging(self) -> list[str]:
        """Removes old staged files that no topic needs; returns their keys. Logs errors."""
        if self.node_clock.check() is not None or self.trust.is_distrusted:
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
                    OBJECTS_AHEAD_MAX, thread_name_prefix="ister-read-ahead"
                )
            return self._ahead

    def close(self) -> None:
        """Releases every topic and closes the stores. May be called twice."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=True, cancel_futures=True)
        with suppress(IsterError):
            self.trust.check_revision()
            self.membership.check_whole()
        if self.trust.is_distrusted:
            # The rolled-back catalog may lack objects that this process has committed.
            self.membership.is_whole = False
        self.membership.end()
        self.metadata.close()
        self.objects.close()
