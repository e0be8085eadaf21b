"""All topics of one data directory, opened by one process.

Owns: the directory lock, the threads, which topics are open, their creation. Does not own: what
happens inside of a topic; a damaged or failed one does not concern the others.

A topic exists when its directory does. Making one ends with its first checkpoint, which records
its ack level and codec; a crash before that leaves an empty topic with the configured ones.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Final, Self

from ister import failpoints
from ister.clock import Clock, SystemClock
from ister.config import BufferFull, Config, StorageMode
from ister.errors import (
    ClosedError,
    ConflictError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    TopicNameError,
)
from ister.fs.base import FileLock, FileSystem
from ister.fs.local import LocalFileSystem
from ister.metrics import Metrics
from ister.model import AckLevel, Codec, TopicName, TopicState
from ister.topic.cache import Cache
from ister.topic.topic import Topic
from ister.wal.directory import LOCK_NAME, WalDirectory
from ister.wal.log import Wal, WalSettings
from ister.wal.recovery import Recovered, UntrustedTailError, recover
from ister.wal.scheduler import Scheduler, Threads

__all__ = ["Log"]

_log = logging.getLogger("ister.topic.log")


class Log:
    """The topics of one directory. Thread-safe. Made by `ister.open`."""

    def __init__(
        self,
        config: Config,
        *,
        fs: FileSystem | None = None,
        clock: Clock | None = None,
        scheduler: Threads | None = None,
    ) -> None:
        """Opens the directory of `config`, which is made where missing.

        Args:
            config: The settings.
            fs: Where files live; the machine's own file system by default.
            clock: Where time comes from; the machine's by default.
            scheduler: Who commits in the background; threads of this log's own by default.

        Raises:
            DirectoryLockedError: Another process has it open.
            DiskError: It cannot be made or locked.
        """
        self.config = config
        self.metrics = Metrics()
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._fs: FileSystem = fs if fs is not None else LocalFileSystem()
        self._root = self._wal_root()
        self._directory_lock: FileLock | None = None
        if self._root is not None:
            self._fs.make_directories(self._root)
            self._directory_lock = self._fs.lock(f"{self._root}/{LOCK_NAME}")
        wal = config.storage.wal
        self._scheduler: Threads = scheduler or Scheduler(
            threads=wal.writer_threads, clock=self._clock, open_files_max=wal.max_open_files
        )
        self._lock = threading.Lock()
        self._topics: dict[str, Topic] = {}
        # What a failed sync left behind, by topic: see `ister.wal.recovery`, step 7.
        self._untrusted_from: dict[str, int] = {}
        self._opening: dict[str, threading.Lock] = {}
        self._is_closed = False
        self._register_gauges()

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
    ) -> Topic:
        """The topic of that name; the same object however often it is asked for.

        A topic whose writer stopped after an error is opened again, through recovery.

        Args:
            name: `/namespace/topic`.
            create: Make it if it does not exist.
            ack: Its ack level, if it is new; has to be the one it has otherwise.
            codec: Its codec, likewise.

        Raises:
            TopicNameError: Not a name.
            NotFoundError: There is none, and `create` is not set.
            ConflictError: It exists with another ack level or codec.
            UnsupportedVersionError: A newer Ister wrote it.
            DiskError: It could not be opened.
            ClosedError: The log is closed.
        """
        parsed = TopicName.parse(name)
        text = str(parsed)
        wanted_ack = self._parse_ack(ack)
        wanted_codec = _parse_codec(codec)
        with self._lock:
            self._check_open()
            opening = self._opening.setdefault(text, threading.Lock())
        with opening:
            self._check_open()
            topic = self._topics.get(text)
            if topic is not None and topic.state in (TopicState.FAILED, TopicState.CLOSED):
                self._retire(topic)
                topic = None
            if topic is None:
                topic = self._open_topic(parsed, wanted_ack, wanted_codec, create=create)
                with self._lock:
                    if self._is_closed:
                        topic.close()
                        self._check_open()
                    self._topics[text] = topic
            _check_same(topic, wanted_ack, wanted_codec)
            return topic

    def topics(self) -> list[str]:
        """The names of all topics, sorted, whether open or not."""
        with self._lock:
            self._check_open()
            names = set(self._topics)
        if self._root is not None:
            for namespace in self._fs.list_directory(self._root):
                if namespace == LOCK_NAME:
                    continue
                try:
                    found = self._fs.list_directory(f"{self._root}/{namespace}")
                except IsterError:
                    continue  # a stray file beside the namespaces
                names.update(f"/{namespace}/{topic}" for topic in found)
        return sorted(name for name in names if _is_topic_name(name))

    def _open_topic(
        self, name: TopicName, ack: AckLevel | None, codec: Codec | None, *, create: bool
    ) -> Topic:
        text = str(name)
        storage = self.config.storage
        if self._root is None:
            if not create:
                raise self._not_found(text)
            return self._make_topic(
                text, None, Recovered(), ack or AckLevel.MEMORY, codec or storage.codec
            )
        path = f"{self._root}/{name.namespace}/{name.topic}"
        is_new = not self._fs.exists(path)
        if is_new:
            if not create:
                raise self._not_found(text)
            self._refuse_twin(name)
        directory = WalDirectory(self._fs, path)
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
    ) -> Topic:
        settings = self.config.storage.wal
        wal = Wal(
            directory=directory,
            recovered=recovered,
            settings=WalSettings(
                topic=name,
                ack=ack,
                codec=codec,
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
        if topic.wal.has_failed_sync:
            self._untrusted_from[topic.name] = topic.wal.synced
        self._scheduler.forget(topic.wal)
        with self._lock:
            self._topics.pop(topic.name, None)

    def _refuse_twin(self, name: TopicName) -> None:
        """Refuses a name that differs from an existing one in case alone.

        The two would be one on a file system that folds case, and a copy of the directory would
        mix them.
        """
        root = self._root
        for parent, child, shown in (
            (root, name.namespace, f"/{name.namespace}"),
            (f"{root}/{name.namespace}", name.topic, str(name)),
        ):
            if parent is None or not self._fs.exists(parent):
                continue
            for existing in self._fs.list_directory(parent):
                if existing != child and existing.casefold() == child.casefold():
                    raise TopicNameError(
                        f"{shown!r} differs from an existing name in case alone",
                        hint=f"the existing one is {existing!r}",
                    )

    def _not_found(self, name: str) -> NotFoundError:
        return NotFoundError(f"there is no topic {name}", topic=name, hint="create=True makes it")

    def _parse_ack(self, ack: AckLevel | str | None) -> AckLevel | None:
        if ack is None:
            return None
        try:
            level = AckLevel(ack)
        except ValueError as error:
            raise InvalidRequestError(
                f"there is no ack level {ack!r}", hint="one of: memory, written, synced"
            ) from error
        if level is AckLevel.TIERED:
            raise InvalidRequestError("this log has no object store, so nothing becomes tiered")
        if level is not AckLevel.MEMORY and self._root is None:
            raise InvalidRequestError(
                f"this log is in memory, so nothing becomes {level}",
                hint="open a directory, or use ack='memory'",
            )
        return level

    # -- the whole --------------------------------------------------------------------------

    def close(self) -> None:
        """Closes every topic, ends the threads and gives the directory back. May be called twice.

        Raises:
            IsterError: The last messages of a topic could not be stored (the first such error);
                everything is closed all the same.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            openings = list(self._opening.values())
        for opening in openings:
            # A recovery under way still writes: the directory is not given back before its end.
            with opening:
                pass
        topics = list(self._topics.values())
        failure: IsterError | None = None
        for topic in topics:
            try:
                topic.close()
            except IsterError as error:
                failure = failure or error
        self._scheduler.stop()
        if self._directory_lock is not None:
            self._directory_lock.release()
        if failure is not None:
            raise failure

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the log is closed")

    def _register_gauges(self) -> None:
        for name, of_topic in _GAUGES.items():
            self.metrics.register_gauge(name, partial(self._sum_over_topics, of_topic))

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
    "wal_reader.active_readers": lambda topic: len(topic.readers),
    "wal_reader.memory_bytes": lambda topic: sum(r.held_bytes for r in topic.readers),
}


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
