"""All topics of one data directory, opened by one process.

Owns: the directory lock, the threads, which topics are open, their creation, hand-over and end.
Does not own: what happens inside of a topic; a damaged or failed one does not concern the others.

Without a bucket, a topic exists when its directory does. Making one ends with its first checkpoint,
which records its ack level and codec; a crash before that leaves an empty topic with the configured
ones. With a bucket, a topic exists when the metadata store has its record, which has both; a
directory without one, made before there was a bucket, is adopted when the topic is opened.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar
from weakref import WeakValueDictionary

from ister import failpoints, forks
from ister.clock import Clock, SystemClock
from ister.clock_guard import ClockStep
from ister.config import BufferFull, Config, StorageMode
from ister.errors import (
    AlreadyExistsError,
    ClosedError,
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    TopicNameError,
    UnavailableError,
    check,
)
from ister.extras import missing_extra
from ister.fs.base import FileLock, FileSystem
from ister.fs.local import LocalFileSystem
from ister.metadata.base import MetadataStore
from ister.metrics import Metrics
from ister.model import AckLevel, Codec, TopicName, TopicState
from ister.objectstore.base import ObjectStore
from ister.partitions import base_of_partition, partition_name
from ister.tier.catalog import list_partitions, list_records
from ister.tier.claim import NewTopic
from ister.tier.cursors import clip_progress
from ister.tier.ownership import OwnedTopic
from ister.topic.background import Background
from ister.topic.cache import Cache
from ister.topic.directories import TopicDirectories
from ister.topic.disk import RESERVE_NAME, DiskGuard
from ister.topic.local_retention import LocalRetention
from ister.topic.node import INSTANCES_NAME, NODE_NAME, Node
from ister.topic.node_clock import CLOCK_NAME, NodeClock
from ister.topic.opening import (
    finish_set_aside,
    measure_backlog,
    recover_tiered,
    remove_directory,
    set_aside,
)
from ister.topic.partitioned import PartitionedTopic
from ister.topic.tier import TopicTier
from ister.topic.tiers import Tiers, open_metadata, open_objects
from ister.topic.topic import Topic
from ister.tracing import span
from ister.wal.directory import LOCK_NAME, WalDirectory
from ister.wal.interrupts import shielded
from ister.wal.log import Wal, WalSettings
from ister.wal.recovery import Recovered, UntrustedTailError, recover
from ister.wal.repair import rewrite_log
from ister.wal.scheduler import Scheduler, Threads

if TYPE_CHECKING:
    from ister.topic.batches import AppendedBatch, Gate, StagedBatch

__all__ = ["Log", "Repaired"]

_T = TypeVar("_T")

_log = logging.getLogger("ister.topic.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What a repair has done to one topic."""

    topic: str
    local_frames: int | None
    """Frames copied into a new local file; None if the local files were in order."""
    objects: tuple[str, ...]
    """Objects uploaded again."""
    errors: tuple[IsterError, ...]
    """What cannot be repaired."""

    @property
    def is_whole(self) -> bool:
        """Whether the topic is in order now."""
        return not self.errors


class Log:
    """The topics of one directory. Thread-safe. Made by `ister.open`."""

    def __init__(
        self,
        config: Config,
        *,
        fs: FileSystem | None = None,
        clock: Clock | None = None,
        scheduler: Threads | None = None,
        objects: ObjectStore | None = None,
        metadata: MetadataStore | None = None,
        background: bool = True,
    ) -> None:
        """Opens the directory of `config`, which is made where missing, and its stores.

        Args:
            config: The settings.
            fs: Where files live; the machine's own file system by default.
            clock: Where time comes from; the machine's by default.
            scheduler: Who commits in the background; threads of this log's own by default.
            objects: Where objects live; the store that the settings name by default.
            metadata: Where metadata lives; likewise.
            background: Whether leases, uploads and retention see to themselves.

        Raises:
            DirectoryLockedError: Another process has it open.
            ConflictError: It is a copy of a directory that another process has open, or that was
                used since.
            DiskError: It cannot be made or locked.
            ConfigError: A store's settings do not make sense, or a library is missing.
            UnavailableError: The metadata store does not answer.
        """
        self.config = config
        self.metrics = Metrics()
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._fs: FileSystem = fs if fs is not None else LocalFileSystem()
        self._root = self._wal_root()
        self._directories: TopicDirectories | None = None
        self._directory_lock: FileLock | None = None
        self._topics: dict[str, Topic] = {}
        self._disk: DiskGuard | None = None
        if self._root is not None:
            self._directories = TopicDirectories(self._fs, self._root)
            self._fs.make_directories(self._root)
            self._directory_lock = self._fs.lock(f"{self._root}/{LOCK_NAME}")
        try:
            if self._root is not None:
                # Before the stores: on a full disk, opening SQLite's file may need the reserve.
                self._disk = DiskGuard(
                    config.storage,
                    fs=self._fs,
                    root=self._root,
                    topics=self._open_topics,
                    metrics=self.metrics,
                )
            self._node_clock = NodeClock(
                self._clock, fs=self._fs, root=self._root, storage=config.storage
            )
        except BaseException:
            self._unlock_directory()
            raise
        wal = config.storage.wal
        self._scheduler: Threads = scheduler or Scheduler(
            threads=wal.writer_threads, clock=self._clock, open_files_max=wal.max_open_files
        )
        self._lock = threading.Lock()
        # Held while the log is being closed.
        self._ending = threading.Lock()
        # What a failed sync left behind, by topic: see `ister.wal.recovery`, step 7.
        self._untrusted_from: dict[str, int] = {}
        # Each lives as long as somebody opens its topic: names that are none leave nothing behind.
        self._opening: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._is_closed = False
        self._fork_error: ClosedError | None = None
        forks.register(self)
        self._tiers: Tiers | None = None
        self._background: Background | None = None
        self._local_retention: LocalRetention | None = None
        if self._root is not None and config.storage.mode is StorageMode.WAL_CLOUD:
            try:
                self._tiers = self._open_tiers(self._root, objects, metadata)
            except BaseException:
                self._scheduler.stop()
                self._unlock_directory()
                raise
            if background:
                self._background = Background(
                    self._open_topics, self._tiers, config.storage, self._clock
                )
        elif self._root is not None:
            self._local_retention = LocalRetention(
                self._open_topics,
                wal.retention,
                node_clock=self._node_clock,
                clock=self._clock,
                metrics=self.metrics,
            )
            # A caller with its own scheduler also runs retention itself.
            if background and scheduler is None:
                self._local_retention.start()
        if self._disk is not None:
            if self._tiers is not None:
                self._tiers.is_disk_low = self._disk.is_low
            if background:
                self._disk.start()
        self._register_gauges()

    def _unlock_directory(self) -> None:
        if self._directory_lock is not None:
            self._directory_lock.release()

    def _open_tiers(
        self, root: str, objects: ObjectStore | None, metadata: MetadataStore | None
    ) -> Tiers:
        storage = self.config.storage
        node = Node(self._fs, root)
        if objects is None:
            objects = open_objects(storage, self._clock)
        if metadata is None:
            metadata = open_metadata(
                storage.metadata, self._clock, on_full=self._disk.give_up if self._disk else None
            )
        try:
            return Tiers(
                storage,
                node=node,
                objects=objects,
                metadata=metadata,
                clock=self._clock,
                metrics=self.metrics,
                node_clock=self._node_clock,
            )
        except BaseException:
            metadata.close()
            objects.close()
            raise

    def _open_topics(self) -> list[Topic]:
        return list(self._topics.values())

    @property
    def tiers(self) -> Tiers | None:
        """The stores behind the topics; None without a bucket."""
        return self._tiers

    @property
    def disk(self) -> DiskGuard | None:
        """Watches free disk space; None for a log in memory."""
        return self._disk

    @property
    def clock_step(self) -> ClockStep | None:
        """The clock step that suspends deletion by age, as of the last check; or None."""
        return self._node_clock.step

    def confirm_clock(self) -> ClockStep | None:
        """Accepts the machine's clock as right: deletion by age resumes.

        Returns:
            The clock step that had suspended it; None if it was not suspended.
        """
        self._check_open()
        return self._node_clock.confirm()

    def trim(self, name: str) -> int:
        """Removes the expired local files of a topic now.

        With a bucket, only files whose upload is verified; without one, this deletes messages.

        Returns:
            The number of files removed.

        Raises:
            NotFoundError: The topic does not exist.
            IsterError: A check or a removal failed; later files were not removed.
        """
        topic = self.topic(name)
        if topic.tier is not None:
            return topic.wal.run_shielded(topic.tier.trim)
        retention = self._local_retention
        if retention is None:
            return 0
        return topic.wal.run_shielded(lambda: retention.trim(topic))

    @property
    def has_files(self) -> bool:
        """Whether messages are in files, and not in memory alone."""
        return self._root is not None

    def _wal_root(self) -> str | None:
        storage = self.config.storage
        if storage.mode is StorageMode.MEMORY or storage.wal.dir is None:
            return None
        # Absolute, so that a program may change its working directory.
        return os.path.abspath(storage.wal.dir)

    # -- topics -----------------------------------------------------------------------------

    def topic(
        self,
        name: str,
        *,
        create: bool = False,
        ack: AckLevel | str | None = None,
        codec: Codec | str | None = None,
        take_over: bool = False,
    ) -> Topic:
        """The topic of that name; the same object however often it is asked for.

        A topic whose writer stopped after an error is opened again, through recovery. With a
        bucket, this process becomes the topic's owner: the only one that writes it.

        Args:
            name: `/namespace/topic`.
            create: Make it if it does not exist.
            ack: Its ack level, if it is new; has to be the one it has otherwise.
            codec: Its codec, likewise.
            take_over: Open a topic that another node wrote last and has not handed over, because
                that node's disk is lost: what it had not uploaded is given up.

        Raises:
            TopicNameError: Not a name.
            NotFoundError: There is none, and `create` is not set.
            AlreadyExistsError: It would be new, and it is the name of a partitioned topic, or of a
                partition of a topic without any.
            ConflictError: It exists with another ack level or codec, or another node has it.
            UnsupportedVersionError: A newer Ister wrote it.
            DiskError: It could not be opened.
            ClosedError: The log is closed.
        """
        parsed = TopicName.parse(name)
        text = str(parsed)
        wanted_ack = self._parse_ack(ack)
        wanted_codec = _parse_codec(codec)
        self._check_open()
        # Without a lock, which an exception from a signal handler could leave taken.
        topic, opening = self._topics.get(text), self._opening.get(text)
        is_changing = opening is not None and opening.locked()
        if topic is None or is_changing or _has_stopped(topic):
            topic = self._shielded(
                text,
                lambda: self._find_topic(
                    parsed, wanted_ack, wanted_codec, create=create, take_over=take_over
                ),
            )
        _check_same(topic, wanted_ack, wanted_codec)
        return topic

    def _find_topic(
        self,
        name: TopicName,
        ack: AckLevel | None,
        codec: Codec | None,
        *,
        create: bool,
        take_over: bool,
    ) -> Topic:
        """The topic, which is opened unless somebody has done it meanwhile."""
        text = str(name)
        base = base_of_partition(text) if create else None
        # A topic and its partitions exclude each other, so they are made one after the other.
        making = nullcontext() if base is None else self._opening_of(base)
        with making, self._opening_of(text):
            self._check_open()
            topic = self._topics.get(text)
            if topic is not None and _has_stopped(topic):
                self._retire(topic)
                topic = None
            if topic is None:
                with span("open topic", topic=text):
                    if self._tiers is None:
                        topic = self._open_topic(name, ack, codec, create=create)
                    else:
                        topic = self._claim_topic(
                            self._tiers, name, ack, codec, create=create, take_over=take_over
                        )
                with self._lock:
                    if self._is_closed:
                        topic.close()
                        self._check_open()
                    self._topics[text] = topic
                if self._disk is not None:
                    self._disk.add(topic)
                if self._background is not None:
                    self._background.add(topic)
            return topic

    def _shielded(self, name: str, work: Callable[[], _T]) -> _T:
        """Runs `work`, which changes a topic, where no signal handler can interrupt it.

        Raises:
            InvalidRequestError: A signal handler calls it in the middle of an append.
            BaseException: What `work` raises.
        """
        topic = self._topics.get(name)
        if topic is not None:
            return topic.wal.run_shielded(work)
        return shielded(work, "ister-call") if self._scheduler.is_exposed() else work()

    def topics(self) -> list[str]:
        """The names of all topics, sorted, whether open or not."""
        with self._lock:
            self._check_open()
            names = set(self._topics)
        if self._root is not None:
            for namespace in self._fs.list_directory(self._root):
                if namespace in (
                    LOCK_NAME,
                    NODE_NAME,
                    INSTANCES_NAME,
                    RESERVE_NAME,
                    CLOCK_NAME,
                ):
                    continue
                try:
                    found = self._fs.list_directory(f"{self._root}/{namespace}")
                except IsterError:
                    continue  # a stray file beside the namespaces
                names.update(f"/{namespace}/{topic}" for topic in found)
        if self._tiers is not None:
            prefix = self.config.storage.metadata.root_prefix
            for name, exists in list_records(self._tiers.metadata, prefix).items():
                # Files of a topic that is being deleted, or was, are on their way out.
                (names.add if exists else names.discard)(name)
        return sorted(name for name in names if _is_topic_name(name))

    def partitions(self, name: str) -> list[str]:
        """The topics behind a name: itself, or its partitions in order; none if there is none.

        Raises:
            TopicNameError: Not a name.
            UnavailableError: The metadata store does not answer.
        """
        self._check_open()
        parsed = TopicName.parse(name)
        return [name] if self._exists(parsed) else self._partitions_of(parsed)

    def partitioned(self, name: str) -> PartitionedTopic:
        """A topic whose messages are in partitions, to be appended to.

        Raises:
            NotFoundError: The topic has no partitions.
            As `topic`, for each partition.
        """
        parsed = TopicName.parse(name)
        names = [] if self._exists(parsed) else self._partitions_of(parsed)
        if not names:
            raise NotFoundError(f"there is no partitioned topic {name}", topic=name)
        return PartitionedTopic(name, [self.topic(one) for one in names])

    def _exists(self, name: TopicName) -> bool:
        if str(name) in self._topics:
            return True
        if self._tiers is not None and (found := self._tiers.catalog(name).record()) is not None:
            return found[0].is_open
        directories = self._directories
        return directories is not None and self._fs.exists(directories.of(name).path)

    def _partitions_of(self, name: TopicName) -> list[str]:
        """The partitions of a topic, in the order of their numbers."""
        numbers: set[int] = set()
        if self._tiers is not None:
            prefix = self.config.storage.metadata.root_prefix
            numbers.update(list_partitions(self._tiers.metadata, prefix, name))
        number = 0
        # Those without a record: a log without a bucket has none.
        while number in numbers or self._exists(_partition(name, number)):
            numbers.add(number)
            number += 1
        return [str(_partition(name, one)) for one in sorted(numbers)]

    def _check_new(self, name: TopicName) -> None:
        """Refuses a topic beside its partitions, and partitions beside their topic.

        Raises:
            AlreadyExistsError: The other one exists.
        """
        text = str(name)
        if partitions := self._partitions_of(name):
            raise AlreadyExistsError(
                f"{text} is a partitioned topic with {len(partitions)} partitions",
                topic=text,
                hint="log.partitioned(name) appends to its partitions",
            )
        base = base_of_partition(text)
        if base is not None and self._exists(TopicName.parse(base)):
            raise AlreadyExistsError(f"{base} is a topic without partitions", topic=text)

    def _open_topic(
        self, name: TopicName, ack: AckLevel | None, codec: Codec | None, *, create: bool
    ) -> Topic:
        text = str(name)
        storage = self.config.storage
        directories = self._directories
        if directories is None:
            if not create:
                raise self._not_found(text)
            self._check_new(name)
            return self._make_topic(
                text, None, Recovered(), ack or AckLevel.MEMORY, codec or storage.codec
            )
        directory = directories.of(name)
        is_new = not self._fs.exists(directory.path)
        if is_new:
            if not create:
                raise self._not_found(text)
            self._check_new(name)
            directories.refuse_twin(name)
            directories.note(name)
        try:
            recovered = recover(directory, untrusted_from=self._untrusted_from.get(text))
        except UntrustedTailError as error:
            self._untrusted_from[text] = error.synced
            raise
        self._untrusted_from.pop(text, None)
        state = recovered.state
        if state is not None:
            ack = ack if is_new else AckLevel(state.ack)
        topic = self._make_topic(
            text,
            directory,
            recovered,
            ack or storage.ack,
            recovered.codec or codec or storage.codec,
        )
        self._report(topic, recovered)
        if not recovered.damage:
            self._save_first_checkpoint(topic, is_new=is_new)
        return topic

    def _claim_topic(
        self,
        tiers: Tiers,
        name: TopicName,
        ack: AckLevel | None,
        codec: Codec | None,
        *,
        create: bool,
        take_over: bool,
    ) -> Topic:
        directories = self._directories
        check(directories is not None, "a log with a bucket has files")
        if directories is None:
            raise self._not_found(str(name))
        directory = directories.of(name)
        finish_set_aside(directory)
        try:
            owned = None
            while owned is None:
                owned = self._try_claim(
                    tiers,
                    name,
                    directory,
                    ack,
                    codec,
                    directories=directories,
                    create=create,
                    take_over=take_over,
                )
        except NotFoundError as error:
            if error.topic is None:
                raise  # the bucket is missing, not the topic
            raise self._not_found(str(name)) from None
        try:
            return self._take_topic(tiers, owned, directory)
        except BaseException:
            tiers.membership.remove(owned)
            with suppress(IsterError):
                owned.release()
            raise

    def _try_claim(
        self,
        tiers: Tiers,
        name: TopicName,
        directory: WalDirectory,
        ack: AckLevel | None,
        codec: Codec | None,
        *,
        directories: TopicDirectories,
        create: bool,
        take_over: bool,
    ) -> OwnedTopic | None:
        """Looks, makes the directory ready for what it saw, and claims; None if that has changed.

        The directory comes first: after the claim nobody could tell old files from new ones.
        """
        has_files = not directory.is_blank()
        if create and not has_files:
            directories.refuse_twin(name)
        view = tiers.view(name)
        is_unknown = view.record is None
        if create and is_unknown and not has_files:
            self._check_new(name)
        new: NewTopic | None = None
        if create or (is_unknown and has_files and not directory.is_new()):
            # Files without a record were made before there was a bucket: they say what they are.
            state = directory.load_state() if has_files and is_unknown else None
            new = NewTopic(
                ack=AckLevel(state.ack) if state is not None else ack or self.config.storage.ack,
                codec=state.codec if state is not None else codec or self.config.storage.codec,
            )
        seen = tiers.check_claim(name, view, new=new, has_files=has_files, take_over=take_over)
        if not has_files:
            directories.note(name)
            directory.mark()
        elif not seen.is_current and not directory.is_new():
            set_aside(directory, "another node has written the topic since")
        return tiers.claim(name, new=new, take_over=take_over, seen=seen)

    def _take_topic(self, tiers: Tiers, owned: OwnedTopic, directory: WalDirectory) -> Topic:
        """Opens the files of a topic that was claimed, and puts the two tiers together."""
        text = owned.topic
        try:
            recovered = recover_tiered(
                directory, owned, tiers, untrusted_from=self._untrusted_from.get(text)
            )
        except UntrustedTailError as error:
            self._untrusted_from[text] = error.synced
            raise
        self._untrusted_from.pop(text, None)
        topic = self._make_topic(
            text,
            directory,
            recovered,
            owned.record.ack,
            recovered.codec or owned.record.codec,
            incarnation=owned.record.incarnation,
        )
        self._report(topic, recovered)
        if not recovered.damage:
            prefix = owned.catalog.keys.subscriptions
            if clipped := clip_progress(tiers.metadata, prefix, recovered.next_offset, owned=owned):
                _log.warning("cursors put back to the end", extra={"topic": text, "keys": clipped})
        topic.tier = TopicTier(
            wal=topic.wal,
            owned=owned,
            tiers=tiers,
            backlog_bytes=measure_backlog(directory, recovered, owned.tiered),
        )
        topic.tier.active_floor = partial(_floor_of, topic)
        if not recovered.damage:
            # Where a log begins that has no file yet is in its checkpoint alone.
            self._save_first_checkpoint(topic, is_new=not recovered.files)
        try:
            # Recovery may have taken longer than the lease.
            owned.check()
        except IsterError:
            topic.close_quietly()
            raise
        return topic

    def _save_first_checkpoint(self, topic: Topic, *, is_new: bool) -> None:
        """Records what recovery found; for a new topic, its ack level and codec."""
        failpoints.reach("wal.recovery_before_checkpoint")
        try:
            topic.wal.save_checkpoint()
        except IsterError as error:
            if is_new:
                topic.wal.close_quietly()
                raise
            # The next opening takes longer. A full disk must not keep anybody from reading.
            self.metrics.count("wal.checkpoint_errors")
            _log.warning("checkpoint not saved", extra={"topic": topic.name, "error": str(error)})

    def _make_topic(
        self,
        name: str,
        directory: WalDirectory | None,
        recovered: Recovered,
        ack: AckLevel,
        codec: Codec,
        *,
        incarnation: str = "",
    ) -> Topic:
        settings = self.config.storage.wal
        wal = Wal(
            directory=directory,
            recovered=recovered,
            settings=WalSettings(
                topic=name,
                ack=ack,
                codec=codec,
                incarnation=incarnation,
                fsync_interval_seconds=settings.fsync_interval_ms / 1000,
                fsync_max_batch_bytes=settings.fsync_max_batch_bytes,
                rotate_max_bytes=settings.rotate_max_bytes,
                rotate_max_seconds=settings.rotate_max_seconds,
                buffer_max_bytes=settings.buffer_max_bytes,
                blocks_when_full=settings.buffer_full is BufferFull.BLOCK,
            ),
            schedule=self._scheduler,
            clock=self._clock,
            metrics=self.metrics,
        )
        return Topic(
            wal=wal,
            cache=Cache(
                capacity=settings.cache_capacity,
                bytes_max=settings.cache_max_bytes,
                next_offset=recovered.next_offset,
                codec=codec,
            ),
            max_message_size=self.config.storage.max_message_size,
            stream_chunk_size=settings.stream_chunk_size,
            clock=self._clock,
            metrics=self.metrics,
        )

    def _report(self, topic: Topic, recovered: Recovered) -> None:
        if recovered.cut_bytes:
            self.metrics.count("wal.recovery_cut_bytes", recovered.cut_bytes)
        for damage in recovered.damage:
            self.metrics.count("wal.recovery_damage")
            _log.error(
                "topic quarantined",
                extra={
                    "topic": topic.name,
                    "path": damage.path,
                    "position": damage.position,
                    "offset": damage.offset,
                    "reason": damage.reason,
                },
            )

    def _retire(self, topic: Topic) -> None:
        """Takes a topic that stopped out of the list, and notes from where not to trust it."""
        topic.close_quietly()
        if topic.tier is not None and self._tiers is not None:
            # Nothing of it may touch the files, or the bucket, once the topic is opened again.
            with topic.tier.ended():
                self._tiers.membership.remove(topic.tier.owned)
        if topic.wal.has_failed_sync:
            self._untrusted_from[topic.name] = topic.wal.synced
        self._unlist(topic)

    def _opening_of(self, name: str) -> threading.Lock:
        """What is held while a topic is opened or ended."""
        with self._lock:
            opening = self._opening.get(name)
            if opening is None:
                opening = self._opening[name] = threading.Lock()
            return opening

    def _not_found(self, name: str) -> NotFoundError:
        return NotFoundError(f"there is no topic {name}", topic=name, hint="create=True makes it")

    def _parse_ack(self, ack: AckLevel | str | None) -> AckLevel | None:
        if ack is None:
            return None
        try:
            level = AckLevel(ack)
        except ValueError as error:
            raise InvalidRequestError(
                f"there is no ack level {ack!r}", hint=f"one of: {', '.join(AckLevel)}"
            ) from error
        if level is AckLevel.TIERED and self._tiers is None:
            raise InvalidRequestError("this log has no object store, so nothing becomes tiered")
        if level is not AckLevel.MEMORY and self._root is None:
            raise InvalidRequestError(
                f"this log is in memory, so nothing becomes {level}",
                hint="open a directory, or use ack='memory'",
            )
        return level

    # -- hand-over and deletion -------------------------------------------------------------

    def seal(self, name: str) -> int:
        """Hands a topic over: everything in it goes to the bucket, and any node may open it next.

        Order: appends end, everything is synced and uploaded, the seal is committed, and only
        then the local files go. Until the seal is committed the topic is this node's, and opening
        it again goes on. Without a bucket the topic is closed, and its files stay.

        Returns:
            The offset that the next owner's first message gets.

        Raises:
            NotFoundError: There is no such topic.
            UnavailableError: A store does not answer; the topic is closed and not handed over.
            As `Topic.upload`.
        """
        return self._shielded(name, lambda: self._seal(name))

    def _seal(self, name: str) -> int:
        with self._exclusively(name) as topic:
            tier, tiers = topic.tier, self._tiers
            topic.wal.hold(
                "sealing",
                lambda: ClosedError("the topic is being handed over", topic=topic.name),
                waits=False,
            )
            try:
                topic.flush()
                if tier is not None:
                    tier.upload()
                    # The bucket's copy is about to be the only one.
                    tier.assure_local()
                next_offset = topic.wal.next
            finally:
                topic.close()
                self._unlist(topic)
            if tier is not None and tiers is not None:
                with tier.ended():
                    # First: a renewal of the lease must not put the owner key back.
                    tiers.membership.remove(tier.owned)
                    tier.owned.seal(next_offset)
                self._remove_files(TopicName.parse(name))
                failpoints.reach("tier.after_remove_local")
            return next_offset

    def append_staged(
        self, name: str, staged: StagedBatch, gate: Gate | None = None
    ) -> AppendedBatch:
        """Appends rows that were staged in the bucket, once however often it is asked for.

        Args:
            name: The topic.
            staged: The rows.
            gate: Admits them; None lets in whatever the log's own limits allow.

        Raises:
            NotFoundError: There is no such topic, or a staged file is lost.
            InvalidRequestError: This log has no object store, or a row is not a message.
            As `ister.topic.batches.append_staged`.
        """
        batches = _batches()
        topic = self.topic(name)
        if topic.tier is None or self._tiers is None:
            raise InvalidRequestError("this log has no object store to stage rows in", topic=name)
        owned, objects = topic.tier.owned, self._tiers.objects

        def append() -> AppendedBatch:
            with topic.batching:
                appended: AppendedBatch = batches.append_staged(
                    topic, owned, objects, staged, clock=self._clock, gate=gate
                )
            return appended

        return topic.wal.run_shielded(append)

    @contextmanager
    def _exclusively(self, name: str) -> Iterator[Topic]:
        """The topic, which nobody opens, hands over, repairs or deletes meanwhile."""
        while True:
            topic = self.topic(name)
            with self._opening_of(topic.name):
                self._check_open()
                if self._topics.get(topic.name) is topic:
                    yield topic
                    return

    def _unlist(self, topic: Topic) -> None:
        """Forgets a topic that was closed."""
        self._scheduler.forget(topic.wal)
        if self._background is not None:
            self._background.remove(topic)
        with self._lock:
            if self._topics.get(topic.name) is topic:
                del self._topics[topic.name]

    def repair(self, name: str, *, content: bool = True) -> Repaired:
        """Restores what one tier has lost from the other one, in both directions.

        First objects that are lost, damaged or missing are uploaded again, as far as local files
        have their offsets. Then local files that are damaged are replaced, if the bucket is whole
        there: what it holds is served from it, and what it does not is copied into a new file.

        Args:
            name: The topic.
            content: Read everything; else only look whether each object is there, with its size,
                and at what opening the topic has found.

        Returns:
            What was done, and what cannot be repaired.

        Raises:
            NotFoundError: There is no such topic.
            InvalidRequestError: This log has no object store.
            UnavailableError: A store does not answer.
        """
        if self._tiers is None:
            raise InvalidRequestError("this log has no object store to repair from", topic=name)
        return self._shielded(name, lambda: self._repair_exclusively(name, content=content))

    def _repair_exclusively(self, name: str, *, content: bool) -> Repaired:
        with self._exclusively(name) as topic:
            report = self._repair(topic, content=content)
        if report.local_frames is not None:
            self.topic(name)
        return report

    def _repair(self, topic: Topic, *, content: bool) -> Repaired:
        tier = topic.tier
        check(tier is not None, "a topic of a log with a bucket has one")
        if tier is None:
            return Repaired(topic=topic.name, local_frames=None, objects=(), errors=())
        found = tier.repair_objects(content=content)
        errors = list(found.errors)
        rewritten: int | None = None
        damage = self._local_damage(topic, tier, content=content)
        if damage is not None and any(end > topic.wal.trimmed for _, end in found.bad):
            # Local files may hold the only copy of something: they stay as they are.
            errors.append(damage)
        elif damage is not None:
            try:
                rewritten = self._rewrite(topic, tier)
            except (CorruptDataError, NotFoundError, OffsetOutOfRangeError) as error:
                errors.append(error)
        return Repaired(
            topic=topic.name,
            local_frames=rewritten,
            objects=tuple(found.objects),
            errors=tuple(errors),
        )

    def _local_damage(self, topic: Topic, tier: TopicTier, *, content: bool) -> IsterError | None:
        if topic.state is TopicState.QUARANTINED:
            return topic.damage[0].as_error(topic.name)
        return tier.find_local_damage() if content else None

    def _rewrite(self, topic: Topic, tier: TopicTier) -> int:
        """Replaces the local files by one with what the bucket does not have, and closes them."""
        topic.wal.hold(
            "repair",
            lambda: UnavailableError("the topic is being repaired", topic=topic.name),
            waits=False,
        )
        try:
            if topic.state is TopicState.OPEN:
                topic.flush()
            # From here on nothing of this log may touch the files.
            with tier.ended():
                topic.wal.abandon()
            return rewrite_log(
                topic.wal,
                max(tier.owned.tiered, tier.owned.start),
                chunk_bytes=self.config.storage.wal.stream_chunk_size,
                clock=self._clock,
                metrics=self.metrics,
            )
        finally:
            topic.wal.unhold("repair")
            self._retire(topic)

    def delete(self, name: str) -> None:
        """Removes a topic and everything in it, in every tier. It can be made again, empty.

        Order: the record says that the topic is being deleted, so that nobody opens it; then the
        objects, the rest of the metadata, and the local files go. After a crash the next call of
        `delete` goes on.

        Raises:
            NotFoundError: There is no such topic.
            ConflictError: Another node has it.
            UnavailableError: A store does not answer; call it again.
        """
        parsed = TopicName.parse(name)
        self._shielded(str(parsed), lambda: self._delete_exclusively(parsed))

    def _delete_exclusively(self, parsed: TopicName) -> None:
        try:
            with self._exclusively(str(parsed)) as topic:
                self._delete(parsed, topic)
        except NotFoundError:
            tiers = self._tiers
            if tiers is None or not self._is_half_deleted(tiers, parsed):
                raise
            with self._opening_of(str(parsed)):
                self._check_open()
                tiers.delete(parsed, None, lambda: self._remove_files(parsed))

    def _delete(self, name: TopicName, topic: Topic) -> None:
        topic.close_quietly()
        self._unlist(topic)
        tier, tiers = topic.tier, self._tiers
        if tier is None or tiers is None:
            self._remove_files(name)
            return
        with tier.ended():
            tiers.delete(name, tier.owned, lambda: self._remove_files(name))

    def _remove_files(self, name: TopicName) -> None:
        if self._directories is not None:
            remove_directory(self._fs, self._directories.of(name).path)

    def _is_half_deleted(self, tiers: Tiers, name: TopicName) -> bool:
        found = tiers.catalog(name).record()
        return found is not None and found[0].state == "deleting"

    # -- the whole --------------------------------------------------------------------------

    def close(self) -> None:
        """Closes every topic, ends the threads and gives the directory back. May be called twice.

        If an exception from a signal handler ends the call, closing continues in the background;
        the next call waits for it.

        Raises:
            IsterError: The last messages of a topic could not be stored (the first such error);
                everything is closed all the same.
            InvalidRequestError: It was called by a signal handler that interrupted an append.
        """
        for topic in list(self._topics.values()):
            topic.wal.check_outside()
        if self._scheduler.is_exposed():
            shielded(self._close_once, "ister-call")
        else:
            self._close_once()

    def _close_once(self) -> None:
        with self._ending:
            self._close()

    def _close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            openings = list(self._opening.values())
        for opening in openings:
            # A recovery under way still writes: the directory is not given back before its end.
            with opening:
                pass
        if self._background is not None:
            self._background.stop()
        if self._disk is not None:
            self._disk.stop()
        if self._local_retention is not None:
            self._local_retention.stop()
        topics = list(self._topics.values())
        failure: IsterError | None = None
        for topic in topics:
            try:
                topic.close()
            except IsterError as error:
                failure = failure or error
        if self._tiers is not None:
            self._tiers.close()
        self._scheduler.stop()
        self._node_clock.close()
        self._unlock_directory()
        if failure is not None:
            raise failure

    def _after_fork(self, error: ClosedError) -> None:
        """Makes a forked child's copy unusable; see `ister.forks`."""
        forks.reset_locks(self._lock, self._ending)
        self._fork_error = error
        self._is_closed = True

    def _check_open(self) -> None:
        if self._fork_error is not None:
            raise self._fork_error.again()
        if self._is_closed:
            raise ClosedError("the log is closed")

    def _register_gauges(self) -> None:
        self.metrics.register_gauge(
            "uploader.memory_usage_bytes",
            lambda: self._tiers.upload_memory_bytes if self._tiers is not None else 0,
        )
        self.metrics.register_gauge(
            "upload.inflight_parts",
            lambda: self._tiers.upload_parts if self._tiers is not None else 0,
        )
        self.metrics.register_gauge("walcache.hit_ratio", self._cache_hit_ratio)
        disk = self._disk
        if disk is not None:
            self.metrics.register_gauge("disk.reserve_bytes", lambda: disk.reserve_bytes)
            self.metrics.register_gauge("disk.is_low", lambda: int(disk.is_low()))
        self.metrics.register_gauge(
            "clock.step_seconds",
            lambda: round(step.seconds) if (step := self._node_clock.step) is not None else 0,
        )
        for name, of_topic in _GAUGES.items():
            self.metrics.register_gauge(name, partial(self._sum_over_topics, of_topic))

    def _cache_hit_ratio(self) -> float:
        hits = self.metrics.counted("wal.reader.stitch_cache_items")
        total = hits + self.metrics.counted("wal.reader.stitch_tier_items")
        return hits / total if total else 0.0

    def _sum_over_topics(self, of_topic: Callable[[Topic], int]) -> int:
        return sum(map(of_topic, list(self._topics.values())))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = self._root if self._root is not None else "memory"
        return f"<Log {where} {'closed' if self._is_closed else 'open'}>"


_GAUGES: Final[dict[str, Callable[[Topic], int]]] = {
    "wal.topics": lambda topic: 1,
    "wal.cache.size": lambda topic: len(topic.cache),
    "wal.cache.bytes": lambda topic: topic.cache.size_bytes,
    "wal.cache.evictions": lambda topic: topic.cache.evictions,
    "wal.open_files": lambda topic: int(topic.wal.has_open_file),
    "uploader.lag_bytes": lambda topic: topic.tier.lag_bytes if topic.tier is not None else 0,
    "wal_reader.active_readers": lambda topic: len(topic.readers),
    "wal_reader.memory_bytes": lambda topic: sum(r.held_bytes for r in topic.readers),
}


def _has_stopped(topic: Topic) -> bool:
    """Whether the topic has to be opened again."""
    return topic.state in (TopicState.FAILED, TopicState.CLOSED) or (
        topic.tier is not None and topic.tier.owned.is_fenced
    )


def _partition(name: TopicName, number: int) -> TopicName:
    return TopicName(namespace=name.namespace, topic=partition_name(name.topic, number))


def _floor_of(topic: Topic, *, include_inactive: bool) -> int:
    return topic.active_floor(include_inactive=include_inactive)


def _batches() -> ModuleType:
    """The module that appends staged rows, which needs pyarrow."""
    try:
        return importlib.import_module("ister.topic.batches")
    except ImportError as error:
        raise missing_extra("appending staged rows", "arrow", error) from error


def _parse_codec(codec: Codec | str | None) -> Codec | None:
    if codec is None:
        return None
    try:
        return Codec(codec)
    except ValueError as error:
        raise InvalidRequestError(
            f"there is no codec {codec!r}", hint=f"one of: {', '.join(Codec)}"
        ) from error


def _check_same(topic: Topic, ack: AckLevel | None, codec: Codec | None) -> None:
    for what, wanted, actual in (("ack level", ack, topic.ack), ("codec", codec, topic.codec)):
        if wanted is not None and wanted is not actual:
            raise ConflictError(
                f"the topic exists with {what} {actual}, not {wanted}",
                topic=topic.name,
                hint="leave it out to open the topic as it is",
            )


def _is_topic_name(name: str) -> bool:
    try:
        TopicName.parse(name)
    except TopicNameError:
        return False
    return True
