"""Keeps room on the disks that a log uses: a watermark for appends, a reserve for tidying up.

    free ≥ min_free            appends go on
    free < min_free            appends of every topic are refused, until free ≥ 1.25 × min_free;
                               local files that the bucket holds go, whatever retention says
    no room at all             the reserve is given up: what frees room needs a little itself;
                               until it is taken again nothing else is written

Owns: the reserve file, the hold `disk` on every topic, two threads. Does not own: how files are
removed (`tier`, `ister.wal`), or uploads, which go on meanwhile (`background`).

A local file that is in the bucket, read back and compared, is only a cache: it goes when its disk
is low, first where no active subscription has to read it, then in any case. What is not in the
bucket never goes. So a disk that the bucket's outage has filled heals when the bucket is back.

What needs room to free room, and where it comes from: a session, a descriptor and a lease in
SQLite, and the checkpoint before a trim. Each of them gives the reserve up when it meets a full
disk, and tries again. The reserve takes blocks (posix_fallocate), so that appends and other
programs cannot have them before; it is taken again when there is clearly room.

What a crash leaves: the reserve, or an empty file in its place, which the next process takes again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from ister import threads
from ister.config import CloudBackend, MetadataBackend, StorageConfig, StorageMode
from ister.errors import (
    CapacityError,
    ClosedError,
    FencedError,
    IsterError,
    NotFoundError,
    UnavailableError,
)
from ister.fs.base import FileSystem
from ister.fs.local import LocalFileSystem
from ister.limits import KIB, MIB
from ister.metrics import Metrics

if TYPE_CHECKING:
    from ister.topic.topic import Topic

__all__ = ["RESERVE_NAME", "DiskGuard", "DiskState"]

_log = logging.getLogger("ister.topic.disk")

RESERVE_NAME: Final = ".reserve"

_MIN_FREE_BYTES: Final = 256 * MIB
_MIN_FREE_SHARE: Final = 20
_RESERVE_BYTES: Final = 16 * MIB
_RESERVE_BYTES_LEAST: Final = 1 * MIB
_RESERVE_SHARE: Final = 100
# A reserve may take this part of a disk at the most; a smaller disk has none.
_RESERVE_SHARE_MOST: Final = 16
_LOOK_SECONDS_MAX: Final = 1.0
_LOOK_SECONDS_MIN: Final = 0.02
_LOOK_SECONDS_LOW: Final = 0.1
# How fast a disk may fill up: the next look comes before it can be at the watermark.
_FILL_BYTES_PER_SECOND: Final = 1024 * MIB
_RELIEF_SECONDS: Final = 1.0
# Once files go, so many go that producers do not stop again at once: room for several times
# what has to be free.
_RELIEF_FACTOR: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskState:
    """A disk as it was a moment ago."""

    path: str
    """What the log has there."""
    total_bytes: int
    free_bytes: int
    min_free_bytes: int
    """Below this appends are stopped: the setting, or `tidy_bytes` while the reserve is out."""
    is_low: bool
    """Whether appends are stopped because of it."""
    tidy_bytes: int
    """Below this room has to be made on it: `min_free_bytes`, or what the reserve would take."""
    is_tight: bool
    """Whether room has to be made on it."""
    holds_log: bool
    """Whether the log's own files are on it: removing some helps."""
    holds_bucket: bool
    """Whether the bucket is, too: uploads need room on it."""

    @property
    def resume_bytes(self) -> int:
        """How much has to be free for appends to go on."""
        return self.min_free_bytes + self.min_free_bytes // 4


class DiskGuard:
    """See the module header. Thread-safe."""

    def __init__(
        self,
        storage: StorageConfig,
        *,
        fs: FileSystem,
        root: str,
        topics: Callable[[], list[Topic]],
        metrics: Metrics,
    ) -> None:
        """Looks at the disks for the first time and takes the reserve.

        Args:
            storage: The settings.
            fs: Where the log's files are.
            root: Their directory.
            topics: Those that are open.
            metrics: Where to count.
        """
        self._settings = storage.disk
        self._root = root
        self._topics = topics
        self._metrics = metrics
        self._places: list[tuple[FileSystem, str]] = [(fs, root)]
        self._bucket_path: str | None = None
        self._has_bucket = storage.mode is StorageMode.WAL_CLOUD
        if self._has_bucket:
            self._add_stores(storage)
        self._lock = threading.Lock()
        self._states: tuple[DiskState, ...] = ()
        self._reserve = _Reserve(fs, f"{root}/{RESERVE_NAME}")
        self._stopping = threading.Event()
        self._is_wanted = threading.Event()
        self._threads: list[threading.Thread] = []
        self._is_low = False
        self.look()

    def _add_stores(self, storage: StorageConfig) -> None:
        local = LocalFileSystem()
        metadata, cloud = storage.metadata, storage.cloud
        if metadata.backend is MetadataBackend.SQLITE and metadata.path:
            self._places.append((local, os.path.dirname(os.path.abspath(metadata.path))))
        if cloud.backend in (CloudBackend.FS, CloudBackend.LOCAL) and cloud.root:
            self._bucket_path = os.path.abspath(cloud.root)
            self._places.append((local, self._bucket_path))

    # -- what it is -------------------------------------------------------------------------

    def is_low(self) -> bool:
        """Whether appends are stopped."""
        return self._is_low

    @property
    def states(self) -> tuple[DiskState, ...]:
        """Each disk once, the log's own first; those without a known size are left out."""
        return self._states

    @property
    def reserve_bytes(self) -> int:
        """What the reserve holds now."""
        return self._reserve.size_bytes

    @property
    def free_bytes(self) -> int:
        """What is free on the disk that has least; 0 where no size is known."""
        return min((state.free_bytes for state in self._states), default=0)

    # -- threads ----------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to look by itself, where a disk has a size."""
        if not self._states:
            return
        self._threads = [
            threads.start("ister-disk", self._keep_looking),
            threads.start("ister-disk-relief", self._keep_relieving),
        ]

    def stop(self) -> None:
        """Ends the threads; a removal under way is finished first. May be called twice."""
        self._stopping.set()
        self._is_wanted.set()
        for thread in self._threads:
            thread.join()

    def _keep_looking(self) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            with threads.guard("ister-disk"):
                self.look()
            pause = self._pause()

    def _pause(self) -> float:
        if self._is_low:
            return _LOOK_SECONDS_LOW
        headroom = min((s.free_bytes - s.min_free_bytes for s in self._states), default=1 << 62)
        return min(_LOOK_SECONDS_MAX, max(_LOOK_SECONDS_MIN, headroom / _FILL_BYTES_PER_SECOND))

    def _keep_relieving(self) -> None:
        while not self._stopping.is_set():
            self._is_wanted.wait()
            with threads.guard("ister-disk-relief"):
                self.relieve()
            self._stopping.wait(_RELIEF_SECONDS)

    # -- the watermark ----------------------------------------------------------------------

    def look(self) -> None:
        """Measures the disks; stops appends, or lets them go on."""
        with self._lock:
            before = {state.path: state for state in self._states}
            self._states = states = tuple(self._measure(before))
            is_low = any(state.is_low for state in states)
            if is_low != self._is_low:
                self._change(is_low)
            own = states[0] if states and states[0].holds_log else None
            if own is not None:
                self._reserve.find()
            if own is not None and own.is_tight:
                self._is_wanted.set()
            elif not self._stopping.is_set():
                self._is_wanted.clear()
            if own is not None and not own.is_tight:
                self._take_reserve(own)

    def _measure(self, before: dict[str, DiskState]) -> list[DiskState]:
        found: dict[int, DiskState] = {}
        for fs, path in self._places:
            try:
                usage = fs.disk_usage(path)
            except IsterError:
                # Whoever writes there meets the error, and says more.
                _log.debug("disk not measured", extra={"path": path}, exc_info=True)
                continue
            if usage is None:
                continue
            is_bucket = path == self._bucket_path
            known = found.get(usage.device)
            if known is not None:
                if is_bucket:
                    found[usage.device] = replace(known, holds_bucket=True)
                continue
            min_free = self._settings.min_free
            if min_free is None:
                min_free = min(_MIN_FREE_BYTES, usage.total_bytes // _MIN_FREE_SHARE)
            was = before.get(path)
            reserve = self._reserve_size(usage.total_bytes) if path == self._root else 0
            tight = max(min_free, reserve)
            # What the reserve gave is for tidying up; appends would take it at once.
            is_out = reserve > 0 and self._reserve.is_out
            if is_out:
                min_free = tight
            found[usage.device] = DiskState(
                path=path,
                total_bytes=usage.total_bytes,
                free_bytes=usage.free_bytes,
                min_free_bytes=min_free,
                is_low=_is_below(
                    usage.free_bytes, min_free, is_out or (was is not None and was.is_low)
                ),
                tidy_bytes=tight,
                is_tight=_is_below(
                    usage.free_bytes, tight, is_out or (was is not None and was.is_tight)
                ),
                holds_log=path == self._root,
                holds_bucket=is_bucket,
            )
        return list(found.values())

    def _change(self, is_low: bool) -> None:
        self._is_low = is_low
        topics = self._topics()
        for topic in topics:
            self._apply(topic)
        if is_low:
            self._metrics.count("disk.low_total")
            _log.error("appends stopped", extra={"error": str(self.error())})
        else:
            _log.info("appends go on", extra={"free_bytes": self.free_bytes})

    def add(self, topic: Topic) -> None:
        """A topic was opened."""
        with self._lock:
            topic.wal.on_disk_full = self.give_up
            topic.wal.may_retry = self.may_write
            self._apply(topic)

    def _apply(self, topic: Topic) -> None:
        if self._is_low:
            topic.wal.hold("disk", partial(self.error, topic.name), waits=False)
        else:
            topic.wal.unhold("disk")

    def error(self, topic: str | None = None) -> CapacityError:
        """What an append is refused with while a disk is low."""
        low = [state for state in self._states if state.is_low]
        if not low:
            return CapacityError("the disk was full a moment ago", topic=topic, hint="try again")
        state = low[0]
        remedy = "it goes on by itself when there is room"
        if state.holds_bucket:
            remedy += (
                "; the bucket is on the same disk, so make room, or let objects expire: "
                "storage.cloud.retention"
            )
        elif state.holds_log and self._has_bucket:
            remedy += ": local files go when they are in the bucket"
        elif state.holds_log:
            remedy += "; files go by the limits of storage.wal.retention that are set"
        return CapacityError(
            f"{_size(state.free_bytes)} of {_size(state.total_bytes)} are free on the disk; "
            f"appends stop below {_size(state.min_free_bytes)} and go on at "
            f"{_size(state.resume_bytes)}",
            topic=topic,
            path=state.path,
            hint=f"nothing acknowledged is lost; {remedy}. storage.disk.min_free sets the limit",
        )

    # -- making room ------------------------------------------------------------------------

    def is_relieved(self) -> bool:
        """Whether the log's own disk has plenty of room again, measured now."""
        self.look()
        return not any(
            state.holds_log and state.free_bytes < _RELIEF_FACTOR * state.tidy_bytes
            for state in self._states
        )

    def relieve(self) -> int:
        """Removes local files that the bucket holds until the disk has room; how many."""
        count = 0
        for past_subscriptions in (False, True):
            for topic in self._topics():
                if self._stopping.is_set() or self.is_relieved():
                    return count
                if topic.tier is None:
                    continue
                try:
                    count += topic.tier.release(
                        past_subscriptions=past_subscriptions, is_enough=self.is_relieved
                    )
                except (FencedError, ClosedError):
                    continue
                except IsterError as error:
                    self._metrics.count("retention.errors_total")
                    _log.warning(
                        "local files not removed", extra={"topic": topic.name, "error": str(error)}
                    )
                    if isinstance(error, UnavailableError):
                        return count  # the bucket, or the metadata store, for every topic
        return count

    def may_write(self) -> bool:
        """Whether a log that met the full disk may try again: not with the room of the reserve."""
        own = next((state for state in self._states if state.holds_log), None)
        return own is None or not own.is_tight or not self._reserve.is_out

    def give_up(self) -> bool:
        """Gives the reserve up, for work that frees room; whether there was one."""
        if not self._reserve.give_up():
            return False
        self._metrics.count("disk.reserve_used_total")
        _log.warning("the disk is full; its reserve was given up", extra={"path": self._root})
        return True

    def _take_reserve(self, own: DiskState) -> None:
        size = self._reserve_size(own.total_bytes)
        # Taking it must not bring the disk below its watermark.
        if self._reserve.size_bytes < size and own.free_bytes - size >= own.resume_bytes:
            self._reserve.take(size)

    def _reserve_size(self, total_bytes: int) -> int:
        size = self._settings.reserve
        if size is not None:
            return size
        size = min(_RESERVE_BYTES, max(_RESERVE_BYTES_LEAST, total_bytes // _RESERVE_SHARE))
        return size if size <= total_bytes // _RESERVE_SHARE_MOST else 0


class _Reserve:
    """A file that takes room so that it can be given up. Thread-safe."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._lock = threading.Lock()
        self.size_bytes = 0
        self.is_out = False
        """Whether it was given up, and not taken again since."""
        self._is_known = False

    def find(self) -> None:
        """Looks for the one of an earlier process."""
        with self._lock:
            if self._is_known:
                return
            self._is_known = True
            try:
                file = self._fs.open_read(self._path)
                try:
                    self.size_bytes = file.size()
                    self.is_out = self.size_bytes == 0
                finally:
                    file.close()
            except NotFoundError:
                return
            except IsterError as error:
                _log.warning("no reserve", extra={"path": self._path, "error": str(error)})

    def take(self, size: int) -> None:
        """Takes so many bytes; what cannot be had is logged, and asked for again."""
        with self._lock:
            try:
                file = self._fs.create(self._path)
                try:
                    file.allocate(size)
                finally:
                    file.close()
            except IsterError as error:
                _log.warning("no reserve", extra={"path": self._path, "error": str(error)})
                self._empty()
                return
            self.size_bytes = size
            self.is_out = False

    def give_up(self) -> bool:
        with self._lock:
            return self.size_bytes > 0 and self._empty()

    def _empty(self) -> bool:
        try:
            file = self._fs.open(self._path)
            try:
                file.truncate(0)
                # Some file systems have the blocks only then.
                file.sync()
            finally:
                file.close()
        except IsterError as error:
            _log.warning("reserve not given up", extra={"path": self._path, "error": str(error)})
            return False
        self.size_bytes = 0
        self.is_out = True
        return True


def _is_below(free_bytes: int, limit: int, was_below: bool) -> bool:
    """Whether there is too little room; once there was, it takes a quarter more to be enough."""
    return free_bytes < (limit + limit // 4 if was_below else limit)


def _size(number: int) -> str:
    if number >= 1024 * MIB:
        return f"{number / (1024 * MIB):.1f} GiB"
    return f"{number / MIB:.1f} MiB" if number >= MIB else f"{number / KIB:.0f} KiB"
