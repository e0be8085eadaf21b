"""Copies a data directory while a broker uses it, so that the copy opens clean: `ister backup`.

    metadata ─► local files, topic by topic ─► identity of the node ─► objects ─► check

Owns: the order in which things are copied, and the check at the end. Does not own: output. Does not
copy stores that are servers: a bucket that is not a directory, and etcd, have their own backups.

Nothing is locked, and nothing is changed in the directory that is copied. The copy is consistent
because of its order: each part is at least as new as the parts before it. Metadata comes first, so
cursors are never beyond the copied messages; messages that were uploaded since are in the bucket,
which comes last. A topic's files are opened before its checkpoint is copied: they have all frames
below its watermark, whatever is appended, rotated or trimmed meanwhile, and a frame that is cut off
at the end of the copy is above it. Indexes are left out; they are built again. Leases are left out,
too: the copy's owner is not this broker.

So everything that was acknowledged before the copy began is in it. What a crash leaves: a directory
named `….partial`, which the next backup of that name replaces.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Final

from ister.base.clock import Clock
from ister.base.limits import CHECKPOINT_BYTES_MAX, MIB
from ister.base.metrics import Metrics
from ister.base.model import TopicName
from ister.bucket.catalog import Catalog
from ister.bucket.directory import list_records
from ister.bucket.names import TopicKeys, object_key
from ister.bucket.terms import newest_terms
from ister.bucket.trust import TRUST_PREFIX
from ister.config import CloudBackend, Config, MetadataBackend, StorageMode
from ister.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from ister.fs.base import File
from ister.fs.local import LocalFileSystem
from ister.fs.whole_files import read_file, write_file
from ister.objectstore.base import ObjectStore
from ister.topic.directories import list_directories
from ister.topic.heads import read_local
from ister.topic.node import INSTANCES_NAME, NODE_NAME, read_node_id
from ister.topic.node_clock import CLOCK_NAME
from ister.topic.stores import metadata_of, open_metadata, open_objects
from ister.wal.directory import CHECKPOINT_NAME, GAPS_NAME, ORIGIN_NAME, WalDirectory

_ATTEMPTS: Final = 10
_CHUNK_BYTES: Final = 4 * MIB
# Enough to tell the file of a topic from that of a later topic of the same name.
_FIRST_BYTES: Final = 4096


@dataclass(slots=True, kw_only=True)
class BackupReport:
    """What a backup has copied."""

    path: str
    topics: int = 0
    """The number of topics with local files."""
    file_bytes: int = 0
    objects: int | None = None
    """None if the bucket was not copied, because it is not a directory."""
    object_bytes: int = 0
    has_metadata: bool = False
    """False if it is in etcd, or if there is none yet."""


def back_up(config: Config, target: str, *, clock: Clock) -> BackupReport:
    """Copies the data directory of a log to `target`, which must not exist.

    Raises:
        AlreadyExistsError: `target` exists.
        InvalidRequestError: `target` is inside a directory that is copied, or the log is in memory
            only.
        UnavailableError: Topics or objects are removed faster than they can be copied.
    """
    return _Backup(config, os.path.abspath(target), clock).run()


class _ChangedError(Exception):
    """The source changed while it was copied; the copy has to be made again."""


class _Backup:
    def __init__(self, config: Config, target: str, clock: Clock) -> None:
        storage = config.storage
        self._storage = storage
        self._target = target
        self._clock = clock
        self._fs = LocalFileSystem()
        self._partial = f"{target}.partial"
        self._report = BackupReport(path=target)
        self._metadata = metadata_of(storage)
        has_files = storage.mode in (StorageMode.WAL_CLOUD, StorageMode.LOCAL_ONLY)
        self._root = os.path.abspath(storage.wal.dir) if has_files and storage.wal.dir else None
        cloud = storage.cloud
        is_directory = cloud.backend in (CloudBackend.FS, CloudBackend.LOCAL)
        has_bucket = storage.mode.has_bucket and is_directory and bool(cloud.root)
        self._bucket = os.path.abspath(cloud.root or "") if has_bucket else None
        self._target_storage = replace(
            storage,
            cloud=replace(cloud, root=f"{self._partial}/objects"),
            metadata=replace(self._metadata, path=f"{self._partial}/metadata.db"),
        )

    def run(self) -> BackupReport:
        fs, report = self._fs, self._report
        if self._root is None and not self._storage.mode.has_bucket:
            raise InvalidRequestError("this log is in memory only; there is nothing to copy")
        if fs.exists(self._target):
            raise AlreadyExistsError(
                "the target exists already", path=self._target, hint="use a path that is free"
            )
        for source in (self._root, self._bucket):
            if source is not None and f"{self._target}/".startswith(f"{source}/"):
                raise InvalidRequestError(
                    f"the target is inside {source}, which is copied", path=self._target
                )
        self._remove(self._partial)
        for _ in range(_ATTEMPTS):
            fs.make_directories(self._partial)
            try:
                self._copy()
            except _ChangedError:
                self._remove(f"{self._partial}/wal")
                for name in fs.list_directory(self._partial):
                    if name.startswith("metadata.db"):
                        fs.remove(f"{self._partial}/{name}")
                continue
            fs.sync_directory(self._partial)
            fs.rename(self._partial, self._target)
            fs.sync_directory(os.path.dirname(self._target))
            return report
        raise UnavailableError(
            "topics or objects are removed faster than they can be copied",
            path=self._target,
            hint="try again, or pause retention meanwhile",
        )

    def _copy(self) -> None:
        report = self._report
        report.has_metadata = self._copy_metadata()
        if self._root is not None:
            self._copy_files(self._root)
        if self._bucket is not None:
            self._copy_objects()
        if report.has_metadata and self._storage.mode.has_bucket:
            self._check()

    # -- metadata ---------------------------------------------------------------------------

    def _copy_metadata(self) -> bool:
        if self._metadata.backend is not MetadataBackend.SQLITE:
            return False
        from ister.metadata.sqlite_file import copy_database  # noqa: PLC0415 - not with etcd

        try:
            copy_database(self._metadata.path or "", f"{self._partial}/metadata.db")
        except NotFoundError:
            return False  # no broker was ever started here
        return True

    def _check(self) -> None:
        """Makes sure that the copy has the objects and files that its metadata names.

        Raises:
            _ChangedError: One was removed after the metadata had been copied.
        """
        prefix, node = self._metadata.root_prefix, None
        if self._root is not None:
            node = read_node_id(self._fs, self._root)
        with ExitStack() as stack:
            copied = open_metadata(self._target_storage.metadata, self._clock, read_only=True)
            stack.callback(copied.close)
            current = open_metadata(self._metadata, self._clock, read_only=True)
            stack.callback(current.close)
            store = open_objects(self._target_storage, self._clock) if self._bucket else None
            if store is not None:
                stack.callback(store.close)
            records = list_records(copied, prefix)
            for name in {*records, *self._copied_topics()}:
                keys = TopicKeys(prefix, TopicName.parse(name))
                then, now = (
                    Catalog(one, keys, clock=self._clock, metrics=Metrics())
                    for one in (copied, current)
                )
                self._check_term(then, store)
                if not records.get(name):
                    continue
                self._check_files(then, now, node)
                if store is not None:
                    _check_objects(then, now, store)

    def _copied_topics(self) -> Iterator[str]:
        if self._root is not None:
            yield from map(str, list_directories(self._fs, f"{self._partial}/wal"))

    def _check_term(self, then: Catalog, store: ObjectStore | None) -> None:
        """Makes sure that no copied file or object has a later owner than the copied record."""
        record, name = then.record(), then.keys.topic
        terms = [] if store is None else newest_terms(store, name)
        local = read_local(WalDirectory(self._fs, f"{self._partial}/wal{name}"), None)
        if local.term is not None:
            terms.append(local.term)
        if any(term.is_after(None if record is None else record[0]) for term in terms):
            raise _ChangedError

    def _check_files(self, then: Catalog, now: Catalog, node: str | None) -> None:
        """Makes sure that the copy has a topic's files, unless the source has lost them."""
        record, name = then.record(), then.keys.topic
        is_here = record is not None and record[0].lineage and record[0].lineage[-1].node == node
        if node is None or record is None or not is_here or then.sealed() is not None:
            return
        if not WalDirectory(self._fs, f"{self._partial}/wal{name}").is_blank():
            return
        current = now.record()
        is_same = current is not None and current[0].is_open and current[0].claim == record[0].claim
        if not is_same or not WalDirectory(self._fs, f"{self._root}{name}").is_blank():
            raise _ChangedError

    # -- local files ------------------------------------------------------------------------

    def _copy_files(self, root: str) -> None:
        fs, report, target = self._fs, self._report, f"{self._partial}/wal"
        report.topics = report.file_bytes = 0
        fs.make_directories(target)
        for name in list_directories(fs, root):
            self._copy_topic(f"{root}{name}", f"{target}{name}")
        # After the metadata, which therefore names the same process or an earlier one.
        for file in (NODE_NAME, INSTANCES_NAME, CLOCK_NAME):
            with suppress(NotFoundError):
                write_file(fs, f"{target}/{file}", read_file(fs, f"{root}/{file}", MIB))
        fs.sync_directory(target)

    def _copy_topic(self, source: str, target: str) -> None:
        for _ in range(_ATTEMPTS):
            try:
                size = self._try_copy_topic(source, target)
            except (NotFoundError, _ChangedError):
                self._remove(target)
                if not self._fs.exists(source):
                    return  # deleted meanwhile
            else:
                self._report.topics += 1
                self._report.file_bytes += size
                return
        raise _ChangedError

    def _try_copy_topic(self, source: str, target: str) -> int:
        """Copies a topic's directory; returns how many bytes.

        Raises:
            NotFoundError: A file was trimmed before it could be opened.
            _ChangedError: The checkpoint is not that of these files.
        """
        fs = self._fs
        directory, copy = WalDirectory(fs, source), WalDirectory(fs, target)
        with ExitStack() as stack:
            files = {seq: self._open(stack, directory, seq) for seq in directory.log_seqs()}
            fs.make_directories(target)
            for name in (CHECKPOINT_NAME, GAPS_NAME, ORIGIN_NAME):
                with suppress(NotFoundError):
                    data = read_file(fs, f"{source}/{name}", CHECKPOINT_BYTES_MAX)
                    write_file(fs, f"{target}/{name}", data)
            state = copy.load_state()
            if state is not None and state.first_offsets() and not files:
                raise _ChangedError  # the files were created after they were listed
            total, seq = 0, min(files, default=None)
            while seq is not None:
                if seq not in files:
                    files[seq] = self._open(stack, directory, seq)
                # A file is whole once its successor exists; otherwise it is the last one.
                has_next = seq + 1 in files or fs.exists(directory.log_path(seq + 1))
                total += self._copy_bytes(files[seq], copy.log_path(seq))
                last, seq = seq, seq + 1 if has_next else None
                if seq is None and _begin(files[last]) != self._begin_of(directory, last):
                    raise _ChangedError  # deleted, and created again with the same name
        fs.sync_directory(target)
        fs.sync_directory(os.path.dirname(target))
        return total

    def _open(self, stack: ExitStack, directory: WalDirectory, seq: int) -> File:
        file = self._fs.open_read(directory.log_path(seq))
        stack.callback(file.close)
        return file

    def _begin_of(self, directory: WalDirectory, seq: int) -> bytes:
        with closing(self._fs.open_read(directory.log_path(seq))) as file:
            return _begin(file)

    def _copy_bytes(self, source: File, path: str) -> int:
        with closing(self._fs.create(path)) as copy:
            position = 0
            while chunk := source.read_at(position, _CHUNK_BYTES):
                copy.write_at(position, [chunk])
                position += len(chunk)
            copy.sync()
        return position

    # -- objects ----------------------------------------------------------------------------

    def _copy_objects(self) -> None:
        """Copies the objects that the copy does not have; objects do not change."""
        self._fs.make_directories(f"{self._partial}/objects")
        with ExitStack() as stack:
            source = open_objects(self._storage, self._clock)
            stack.callback(source.close)
            target = open_objects(self._target_storage, self._clock)
            stack.callback(target.close)
            have = {info.key: info.size for info in target.list("")}
            for info in source.list(""):
                # Not the highest revision: the copied metadata would be older, and distrusted.
                if have.get(info.key) == info.size or info.key.startswith(TRUST_PREFIX):
                    continue
                with suppress(NotFoundError):  # removed meanwhile: `_check` decides if it matters
                    have[info.key] = _copy_object(source, target, info.key)
            self._report.objects = len(have)
            self._report.object_bytes = sum(have.values())

    def _remove(self, path: str) -> None:
        """Removes a directory and all that is in it; one that does not exist is fine."""
        fs = self._fs
        if not fs.exists(path):
            return
        for name in fs.list_directory(path):
            inner = os.path.join(path, name)
            if os.path.isdir(inner) and not os.path.islink(inner):
                self._remove(inner)
            else:
                fs.remove(inner)
        fs.remove_directory(path)


def _begin(file: File) -> bytes:
    return file.read_at(0, _FIRST_BYTES)


def _check_objects(then: Catalog, now: Catalog, store: ObjectStore) -> None:
    """Makes sure that the copy has the objects of a topic, unless the source has lost them."""
    for described, _ in then.descriptors():
        try:
            store.stat(object_key(then.keys.topic, described.object_id))
        except NotFoundError:
            current = now.find(described.start)
            if current is None or current.object_id != described.object_id:
                raise _ChangedError from None


def _copy_object(source: ObjectStore, target: ObjectStore, key: str) -> int:
    writer = target.open_writer(key, chunk_bytes=_CHUNK_BYTES, concurrent_parts=1)
    try:
        position = 0
        while chunk := source.read(key, position, _CHUNK_BYTES):
            writer.write(chunk)
            position += len(chunk)
        writer.close()
    finally:
        writer.abort()
    return position
