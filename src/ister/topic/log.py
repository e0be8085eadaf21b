"""All topics of one data directory, opened by one process.

Owns: the directory lock, the threads, which topics are open, their hand-over and end. Does not own:
how a topic is opened (`opening`), or what happens inside of one; a damaged or failed topic does not
affect the others.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar
from weakref import WeakMethod, WeakValueDictionary

from ister.base import failpoints, forks
from ister.base.clock import Clock, SystemClock
from ister.base.clock_guard import ClockStep
from ister.base.guarded_lock import check_wait
from ister.base.metrics import Metrics
from ister.base.model import AckLevel, Codec, TopicName
from ister.base.partitions import base_of_partition
from ister.base.tracing import span
from ister.bucket.claim import Head
from ister.config import Config, StorageMode
from ister.errors import (
    ClosedError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    WaitsForDiskError,
)
from ister.fs.base import FileSystem
from ister.metadata.base import MetadataStore
from ister.objectstore.base import ObjectStore
from ister.rescue.giving_up import GivenUp, foresee_lost, give_up_lost
from ister.rescue.repair import Repaired, repair_topic
from ister.topic.append import load_batches
from ister.topic.arguments import check_ack, parse_ack, parse_codec
from ister.topic.background import Background
from ister.topic.directories import TopicDirectories, open_root
from ister.topic.gauges import register_gauges
from ister.topic.heads import Heads
from ister.topic.known_topics import KnownTopics
from ister.topic.local_trim import LocalRetention
from ister.topic.node import Node
from ister.topic.node_clock import NodeClock
from ister.topic.opening import TopicOpener, check_same
from ister.topic.partitioned import PartitionedTopic
from ister.topic.read_only import ReadOnlyTopic, ReadOnlyTopics
from ister.topic.room import SpaceGuards
from ister.topic.stores import Stores, open_stores
from ister.topic.table import render_topics
from ister.topic.topic import Topic
from ister.wal.scheduler import Scheduler, Threads
from ister.wal.signals import shielded

if TYPE_CHECKING:
    from ister.topic.batches import AppendedBatch, Gate, StagedBatch

__all__ = ["Log", "Repaired"]

_T = TypeVar("_T")

_log = logging.getLogger("ister.topic.log")


class Log:
    """The topics of one directory. Thread-safe. Made by `ister.open`."""

    _is_closed = True  # until it is open

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
            fs: The file system; by default the one that `open_root` chooses.
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
        self.is_diskless = config.storage.mode is StorageMode.BUCKET
        """Whether files are in memory, on their way to the bucket."""
        self._fs, self._root = open_root(config.storage, fs=fs, clock=self._clock)
        self._directories: TopicDirectories | None = None
        self._topics: dict[str, Topic] = {}
        # Neither refers to `self`: threads must not keep a log that the program has dropped.
        topics, retire = self._topics, WeakMethod(self._retire_stopped)
        self._open_topics: Callable[[], list[Topic]] = lambda: list(topics.values())
        if self._root is not None:
            self._directories = TopicDirectories(self._fs, self._root)
            self._directories.lock()
        try:
            # Before the stores: on a full disk, opening SQLite's file may need the reserve.
            self.room = SpaceGuards(
                config.storage,
                fs=self._fs,
                root=self._root,
                topics=self._open_topics,
                retire=lambda topic: bool((method := retire()) and method(topic)),
                metrics=self.metrics,
            )
            """Watches free disk space, and the memory of a log without local files."""
            self._node_clock = NodeClock(
                self._clock, fs=self._fs, root=self._root, storage=config.storage
            )
            self._heads = Heads(
                self._fs,
                None if self.is_diskless else self._root,
                topics=self._open_topics,
                clock=self._clock,
            )
        except BaseException:
            self._unlock_directory()
            raise
        wal = config.storage.wal
        self._scheduler: Threads = scheduler or Scheduler(
            threads=wal.writer_threads, clock=self._clock, open_files_max=wal.max_open_files
        )
        self._lock = threading.RLock()  # a finalizer may open a topic while this thread holds it
        # Held while the log is being closed.
        self._ending = threading.Lock()
        # Each lives as long as its topic is being opened, so invalid names leave nothing behind.
        self._opening: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._fork_error: ClosedError | None = None
        forks.register(self)
        self._stores = self._open_tiers(objects, metadata)
        self._known = KnownTopics(
            self._fs, directories=self._directories, stores=self._stores, opened=self._topics
        )
        self._opener = TopicOpener(
            config.storage,
            fs=self._fs,
            directories=self._directories,
            stores=self._stores,
            known=self._known,
            heads=self._heads,
            room=self.room,
            scheduler=self._scheduler,
            clock=self._clock,
            metrics=self.metrics,
        )
        self._read_only = ReadOnlyTopics(self._opener.open_read_only, self._scheduler.forget)
        self._background: Background | None = None
        self._local_retention: LocalRetention | None = None
        # A caller with its own scheduler also runs local retention itself.
        self._start(background=background, trims=background and scheduler is None)
        register_gauges(
            self.metrics,
            self._open_topics,
            stores=self._stores,
            room=self.room,
            node_clock=self._node_clock,
        )
        self._is_closed = False

    def _start(self, *, background: bool, trims: bool) -> None:
        """Starts what uploads, trims and watches the disk."""
        storage = self.config.storage
        if self._stores is not None:
            self._stores.is_disk_low = self.room.is_pressed
            if background:
                self._background = Background(
                    self._open_topics, self._stores, storage, self._clock, self._heads.check
                )
        elif self._root is not None:
            self._local_retention = LocalRetention(
                self._open_topics,
                storage.wal.retention,
                node_clock=self._node_clock,
                clock=self._clock,
                metrics=self.metrics,
                on_tick=self._heads.check,
            )
            if trims:
                self._local_retention.start()
        if background:
            self.room.start()

    def _unlock_directory(self) -> None:
        if self._directories is not None:
            self._directories.unlock()

    def _open_tiers(
        self, objects: ObjectStore | None, metadata: MetadataStore | None
    ) -> Stores | None:
        """Opens the stores, if there is a bucket."""
        storage = self.config.storage
        if self._root is None or not storage.mode.has_bucket:
            return None
        try:
            return open_stores(
                storage,
                node=Node(self._fs, self._root, is_lasting=not self.is_diskless),
                objects=objects,
                metadata=metadata,
                on_full=self.room.free_reserve,
                node_clock=self._node_clock,
                clock=self._clock,
                metrics=self.metrics,
            )
        except BaseException:
            self._scheduler.stop()
            self._unlock_directory()
            raise

    @property
    def stores(self) -> Stores | None:
        """The stores behind the topics; None without a bucket."""
        return self._stores

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
        if topic.bucket is not None:
            return topic.wal.run_shielded(topic.bucket.retention.trim)
        retention = self._local_retention
        if retention is None:
            return 0
        return topic.wal.run_shielded(lambda: retention.trim(topic))

    @property
    def has_files(self) -> bool:
        """Whether messages are in local files, and not in memory alone."""
        return self._root is not None and not self.is_diskless

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
        """The topic of that name; the same object for every call.

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
        wanted_ack = None
        if ack is not None:
            wanted_ack = check_ack(
                parse_ack(ack),
                has_bucket=self._stores is not None,
                has_files=self._root is not None,
                is_diskless=self.is_diskless,
            )
        wanted_codec = None if codec is None else parse_codec(codec)
        self._check_open()
        # Without a lock, which an exception from a signal handler could leave taken.
        topic, opening = self._topics.get(text), self._opening.get(text)
        is_changing = opening is not None and opening.locked()
        if topic is None or is_changing or topic.has_stopped:
            topic = self._shielded(
                text,
                lambda: self._find_topic(
                    parsed, wanted_ack, wanted_codec, create=create, take_over=take_over
                ),
            )
        check_same(topic, wanted_ack, wanted_codec)
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
        """The topic, which is opened unless another thread has opened it meanwhile."""
        text = str(name)
        base = base_of_partition(text) if create else None
        # A topic and its partitions exclude each other, so they are made one after the other.
        making = nullcontext() if base is None else self._opening_of(base)
        with making, self._opening_of(text):
            self._check_open()
            topic = self._topics.get(text)
            if topic is not None and topic.has_stopped:
                self._retire(topic)
                topic = None
            if topic is None:
                with span("open topic", topic=text):
                    topic = self._opener.open(name, ack, codec, create=create, take_over=take_over)
                with self._lock:
                    if self._is_closed:
                        topic.close()
                        self._check_open()
                    self._topics[text] = topic
                self._read_only.close(text)
                self.room.add(topic)
                if self._background is not None:
                    self._background.add(topic)
            return topic

    def read_only_topic(self, name: str) -> ReadOnlyTopic:
        """The history of a topic that waits for another node's disk; the same object for each call.

        What is in the bucket can be read, and cursors move; appends are refused with the reason.
        One process of the cluster serves it. `ReadOnlyTopic.check` finds out that it has ended,
        because the topic was opened for writing: call it now and then. Close it after use.

        Raises:
            NotFoundError: There is no such topic.
            ConflictError: It does not wait for a disk, or another process serves its history.
            UnavailableError: The metadata store does not answer.
        """
        parsed = TopicName.parse(name)
        return self._shielded(str(parsed), lambda: self._open_read_only(parsed))

    def _open_read_only(self, name: TopicName) -> ReadOnlyTopic:
        with self._opening_of(str(name)):
            self._check_open()
            return self._read_only.get(name)

    def _shielded(self, name: str, work: Callable[[], _T]) -> _T:
        """Runs `work`, which changes a topic, where no signal handler can interrupt it.

        Raises:
            InvalidRequestError: A signal handler calls it in the middle of an append.
            BaseException: What `work` raises.
        """
        topic = self._topics.get(str(TopicName.parse(name)))
        if topic is not None:
            return topic.wal.run_shielded(work)
        return shielded(work, "ister-call") if self._scheduler.is_interruptible() else work()

    def topics(self) -> list[str]:
        """The names of all topics, sorted, whether open or not."""
        self._check_open()
        return self._known.add_names({topic.name for topic in self._open_topics()})

    def partitions(self, name: str) -> list[str]:
        """The topics behind a name: itself, or its partitions in order; none if there is none.

        Raises TopicNameError, and UnavailableError if the metadata store does not answer.
        """
        self._check_open()
        parsed = TopicName.parse(name)
        return [name] if self._known.exists(parsed) else self._known.partitions_of(parsed)

    def partitioned(self, name: str) -> PartitionedTopic:
        """A topic whose messages are in partitions, to be appended to.

        Raises:
            NotFoundError: The topic has no partitions.
            As `topic`, for each partition.
        """
        names = self.partitions(name)
        if names in ([], [name]):
            raise NotFoundError(f"there is no partitioned topic {name}", topic=name)
        return PartitionedTopic(name, [self.topic(one) for one in names])

    def _retire(self, topic: Topic) -> None:
        """Removes a topic that stopped, and records from where on its files are untrusted."""
        topic.close_quietly()
        if topic.bucket is not None and self._stores is not None:
            # Nothing of it may touch the files, or the bucket, once the topic is opened again.
            with topic.bucket.ended():
                self._stores.membership.remove(topic.bucket.owned)
        self._opener.distrust(topic)
        self._unlist(topic)

    def _retire_stopped(self, topic: Topic) -> bool:
        """Removes a topic that stopped, unless it is being opened again; returns whether it did."""
        opening = self._opening_of(topic.name)
        if not opening.acquire(blocking=False):
            return False
        try:
            is_here = self._topics.get(topic.name) is topic
            if is_here:
                self._retire(topic)
            return is_here
        finally:
            opening.release()

    def _opening_of(self, name: str) -> threading.Lock:
        """The lock that is held while a topic is opened or ended."""
        with self._lock:
            opening = self._opening.get(name)
            if opening is None:
                opening = self._opening[name] = threading.Lock()
            return opening

    # -- hand-over and deletion -------------------------------------------------------------

    def seal(self, name: str, *, assured: set[tuple[str, int]] | None = None) -> int:
        """Hands a topic over: everything in it goes to the bucket, and any node may open it next.

        Appends end, everything is synced and uploaded, the seal is committed, and only then the
        local files are removed. Until the seal is committed the topic is this node's. Without a
        bucket the topic is closed, and its files stay.

        Args:
            name: The topic.
            assured: What `TopicBucket.prepare_seal` has checked a moment ago.

        Returns:
            The offset that the next owner's first message gets.

        Raises:
            NotFoundError: There is no such topic.
            UnavailableError: A store does not answer; the topic is closed and not handed over.
            As `Topic.upload`.
        """
        return self._shielded(name, lambda: self._seal(name, assured))

    def _seal(self, name: str, assured: set[tuple[str, int]] | None) -> int:
        with self._exclusively(name) as topic:
            bucket, stores = topic.bucket, self._stores
            topic.wal.gate.hold(
                "sealing",
                lambda: ClosedError("the topic is being handed over", topic=topic.name),
                waits=False,
            )
            try:
                topic.flush()
                if bucket is not None:
                    bucket.uploads.upload()
                    # The bucket's copy is about to be the only one.
                    bucket.assure_local(topic.wal.next, assured)
                next_offset = topic.wal.next
            finally:
                topic.close()
                self._unlist(topic)
            if bucket is not None and stores is not None:
                with bucket.ended():
                    # First: a renewal of the lease must not put the owner key back.
                    stores.membership.remove(bucket.owned)
                    bucket.owned.seal(next_offset)
                self._remove_files(TopicName.parse(name))
                failpoints.reach("tier.after_remove_local")
            return next_offset

    def append_staged(
        self, name: str, staged: StagedBatch, gate: Gate | None = None
    ) -> AppendedBatch:
        """Appends rows that were staged in the bucket; repeated calls append them once.

        `gate` admits the rows; without one, only the log's own limits apply.

        Raises:
            NotFoundError: There is no such topic, or a staged file is lost.
            InvalidRequestError: This log has no object store, or a row is not a message.
            As `ister.topic.batches.append_staged`.
        """
        topic = self.topic(name)
        if topic.bucket is None or self._stores is None:
            raise InvalidRequestError("this log has no object store to stage rows in", topic=name)
        append: Callable[[], AppendedBatch] = partial(
            load_batches().append_staged,
            topic,
            topic.bucket.owned,
            self._stores.objects,
            staged,
            clock=self._clock,
            gate=gate,
        )
        return topic.wal.run_shielded(partial(topic._append_alone, append))  # noqa: SLF001 - of this package

    @contextmanager
    def _exclusively(self, name: str) -> Iterator[Topic]:
        """The topic, which no other thread opens, seals, repairs or deletes meanwhile."""
        while True:
            topic = self.topic(name)
            with self._opening_of(topic.name):
                self._check_open()
                if self._topics.get(topic.name) is topic:
                    yield topic
                    return

    def _unlist(self, topic: Topic) -> None:
        """Forgets a topic that was closed."""
        self._scheduler.forget(topic.wal.committer)
        if self._background is not None:
            self._background.remove(topic)
        with self._lock:
            if self._topics.get(topic.name) is topic:
                del self._topics[topic.name]
        if self.is_diskless:
            # Everything acknowledged is in the bucket, and other topics need the memory.
            self._remove_files(TopicName.parse(topic.name))

    def repair(self, name: str, *, content: bool = True) -> Repaired:
        """Restores what one tier has lost from the other one, in both directions.

        `ister.rescue.repair` says in which order.

        Args:
            name: The topic.
            content: Read everything; else only check the names and sizes of objects, and what
                opening the topic has found.

        Returns:
            What was done (`local_frames`, `objects`) and what cannot be repaired (`errors`);
            `is_whole` says whether the topic is in order now.

        Raises:
            NotFoundError: There is no such topic.
            InvalidRequestError: This log has no object store.
            UnavailableError: A store does not answer.
        """
        if self._stores is None:
            raise InvalidRequestError("this log has no object store to repair from", topic=name)
        work = partial(repair_topic, stores=self._stores, content=content)
        return self._shielded(name, lambda: self._mend(name, work))

    def give_up(self, name: str, *, at_least: int = 0, is_dry: bool = False) -> GivenUp:
        """Gives up the offsets that no tier has; the topic continues after them.

        With a bucket, call `repair` first, and pyarrow is needed. The topic continues at `at_least`
        or above. If `is_dry`, returns what would be given up and changes nothing. Raises as
        `repair`, except that the log needs no object store.
        """
        if (head := self._heads.get(name)) is not None:
            at_least = max(at_least, head.end)
        try:
            self.topic(name)
        except WaitsForDiskError as error:
            stores = self._stores
            if stores is None or not error.known_end:
                raise  # another node's disk, or all files are gone: that takes a take-over
            # This node's files are an older copy.
            at_least = max(at_least, error.known_end)
            if is_dry:
                return self._shielded(name, partial(self._foresee_lost, name, stores, at_least))
            self._expect(name, at_least)
            self.topic(name, take_over=True)
        work = partial(give_up_lost, stores=self._stores, at_least=at_least, is_dry=is_dry)
        return self._shielded(name, lambda: self._mend(name, work))

    def _foresee_lost(self, name: str, stores: Stores, at_least: int) -> GivenUp:
        parsed = TopicName.parse(name)
        seen, directory = self._opener.foresee_take_over(stores, parsed)
        catalog = stores.catalog(parsed)
        return foresee_lost(catalog, stores, seen, directory, at_least=at_least)

    def expect_end(self, name: str, end: int) -> Topic:
        """Opens a topic of a log without a bucket again: it is quarantined if it ends before `end`.

        For a caller who knows that its messages up to there were durable.
        """
        with self._exclusively(name) as topic:
            self._retire(topic)
            self._heads.expect(name, Head("", 0, end))
        return self.topic(name)

    def _expect(self, name: str, end: int) -> None:
        """Has an opening after a crash refuse the files again, until all is given up."""
        known = self._stores.view(TopicName.parse(name)).known if self._stores is not None else None
        if known is not None:
            self._heads.expect(name, Head(known.incarnation, known.epoch + 1, end))

    def _mend(self, name: str, work: Callable[..., _T]) -> _T:
        with self._exclusively(name) as topic:
            done = work(topic, retire=partial(self._retire, topic))
        self.topic(name)  # again, if it was closed
        return done

    def delete(self, name: str) -> None:
        """Removes a topic and everything in it, in every tier. It can be made again, empty.

        First the record is marked, so that no node opens the topic; then the objects, the rest of
        the metadata and the local files are removed. After a crash the next `delete` continues.

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
            stores = self._stores
            if stores is None or not self._is_half_deleted(stores, parsed):
                raise
            with self._opening_of(str(parsed)):
                self._check_open()
                stores.delete(parsed, None, lambda: self._remove_files(parsed))

    def _delete(self, name: TopicName, topic: Topic) -> None:
        topic.close_quietly()
        self._unlist(topic)
        bucket, stores = topic.bucket, self._stores
        if bucket is None or stores is None:
            self._remove_files(name)
            return
        with bucket.ended():
            stores.delete(name, bucket.owned, lambda: self._remove_files(name))

    def _remove_files(self, name: TopicName) -> None:
        if self._directories is not None:
            # First, so that files that are made again later are not taken for an older copy.
            self._heads.forget(str(name))
            self._directories.remove(name)

    def _is_half_deleted(self, stores: Stores, name: TopicName) -> bool:
        found = stores.catalog(name).record()
        return found is not None and found[0].state == "deleting"

    # -- the whole --------------------------------------------------------------------------

    def close(self) -> None:
        """Closes every topic, ends the threads and unlocks the directory. May be called twice.

        If an exception from a signal handler ends the call, closing continues in the background;
        the next call waits for it.

        Raises:
            IsterError: The last messages of a topic could not be stored (the first such error);
                everything is closed all the same.
            InvalidRequestError: It was called by a signal handler that interrupted an append.
        """
        check_wait()
        for topic in self._open_topics():
            topic.wal.gate.check_reentry()
        close = self._close_once
        shielded(close, "ister-call") if self._scheduler.is_interruptible() else close()

    def _close_once(self) -> None:
        with self._ending:
            if not self._is_closed:
                self._close()

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            openings = list(self._opening.values())
        for opening in openings:
            with opening:
                pass  # a running recovery still writes: the directory is unlocked after its end
        if self._background is not None:
            self._background.stop()
        self.room.stop()
        if self._local_retention is not None:
            self._local_retention.stop()
        self._read_only.close_all()
        failure: IsterError | None = None
        for topic in self._open_topics():
            try:
                topic.close()
            except IsterError as error:
                failure = failure or error
        self._heads.save()
        if self._stores is not None:
            self._stores.close()
        self._scheduler.stop()
        self._node_clock.close()
        self._unlock_directory()
        if failure is not None:
            raise failure

    def _after_fork(self, error: ClosedError) -> None:
        """Makes a forked child's copy unusable; see `ister.base.forks`."""
        forks.reset_locks(self._lock, self._ending)
        self._fork_error = error
        self._is_closed = True

    def _check_open(self) -> None:
        if self._fork_error is not None:
            raise self._fork_error.again()
        if self._is_closed:
            raise ClosedError("the log is closed")

    # The default stays when the interpreter has emptied this module at its exit.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not self._is_closed and self._directories is not None and not is_finalizing():
            self._directories.abandon(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = self._root if self._root is not None else "memory"
        return f"<Log {where} {'closed' if self._is_closed else 'open'}>"

    def _repr_html_(self) -> str:
        names = [] if self._is_closed else self.topics()
        return render_topics(repr(self)[1:-1], [self._topics.get(name, name) for name in names])
