"""Keeps free space on the disks of a log: a watermark for appends, and a reserve.

    free ≥ min_free            appends go on
    free < min_free            appends of every topic are refused, until free ≥ 1.25 × min_free;
                               local files that the bucket holds go, whatever retention says
    disk full                  the reserve is freed: freeing space needs some itself; until the
                               reserve is allocated again nothing else is written

Owns: the reserve file, the hold `disk` on every topic, two threads. Does not own: how files are
removed (`tier`, `ister.wal`), or uploads, which continue meanwhile (`background`). It also logs
when syncs become slow.

A local file that was uploaded, read back and compared is only a cache: it is removed when its disk
is low; files that an active subscription still has to read come last. Files that were not uploaded
are never removed. So a disk that filled up during an outage of the bucket recovers when the bucket
is available again.

Some work needs space in order to free space: a session, a descriptor and a lease in SQLite, and the
checkpoint before a trim. When such work finds the disk full, it frees the reserve and retries. The
reserve has allocated blocks (posix_fallocate), so that appends and other programs cannot use them
before. It is allocated again when there is enough free space.

What a crash leaves: the reserve, or an empty file, which the next process allocates again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from ister.base import threads
from ister.base.limits import KIB, MIB
from ister.base.metrics import Metrics
from ister.config import CloudBackend, DiskConfig, MetadataBackend, StorageConfig
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
from ister.fs.whole_files import file_size

if TYPE_CHECKING:
    from ister.topic.topic import Topic

_log = logging.getLogger("ister.topic.disk")

RESERVE_NAME: Final = ".reserve"

_MIN_FREE_BYTES: Final = 256 * MIB
_MIN_FREE_SHARE: Final = 20
_RESERVE_BYTES: Final = 16 * MIB
_RESERVE_BYTES_LEAST: Final = 1 * MIB
_RESERVE_SHARE: Final = 100
# The reserve takes at most this fraction of the disk; disks too small for it have none.
_RESERVE_SHARE_MOST: Final = 16
_MEASURE_SECONDS_MAX: Final = 1.0
_MEASURE_SECONDS_MIN: Final = 0.02
_MEASURE_SECONDS_LOW: Final = 0.1
# Assumed write rate: the disk is measured again before it can reach the watermark.
_FILL_BYTES_PER_SECOND: Final = 1024 * MIB
_FREEING_SECONDS: Final = 1.0
# Free several times the required space, so that producers do not stop again soon.
_PLENTY_FACTOR: Final = 4


def min_free_bytes(settings: DiskConfig, total_bytes: int) -> int:
    """The free space below which appends stop, on a disk of that size."""
    if settings.min_free is not None:
        return settings.min_free
    return min(_MIN_FREE_BYTES, total_bytes // _MIN_FREE_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskState:
    """The last measurement of a disk."""

    path: str
    """A path of the log on this disk."""
    total_bytes: int
    free_bytes: int
    min_free_bytes: int
    """Appends stop below this: the setting, or `tidy_bytes` while the reserve is freed."""
    is_low: bool
    """Whether this disk stops appends."""
    tidy_bytes: int
    """Local files are removed below this: `min_free_bytes`, or the reserve's size if larger."""
    is_tight: bool
    """Whether local files have to be removed to free space."""
    holds_log: bool
    """Whether the log's own files are on this disk, so that removing some helps."""
    holds_bucket: bool
    """Whether the bucket is on this disk, so that uploads need space on it."""

    @property
    def resume_bytes(self) -> int:
        """The free space at which appends resume."""
        return self.min_free_bytes + self.min_free_bytes // 4


class DiskGuard:
    """Stops appends on low disk space, and frees space. Thread-safe."""

    def __init__(
        self,
        storage: StorageConfig,
        *,
        fs: FileSystem,
        root: str,
        topics: Callable[[], list[Topic]],
        metrics: Metrics,
    ) -> None:
        """Measures the disks and allocates the reserve."""
        self._settings = storage.disk
        self._root = root
        self._topics = topics
        self._metrics = metrics
        self._places: list[tuple[FileSystem, str]] = [(fs, root)]
        self._bucket_path: str | None = None
        self._has_bucket = storage.mode.has_bucket
        if self._has_bucket:
            self._add_stores(storage)
        self._lock = threading.Lock()
        self._states: tuple[DiskState, ...] = ()
        self._reserve = _Reserve(fs, f"{root}/{RESERVE_NAME}")
        self._stopping = threading.Event()
        self._is_wanted = threading.Event()
        self._threads: list[threading.Thread] = []
        self._is_low = False
        self._is_slow = False
        self.measure()

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
        """The current size of the reserve."""
        return self._reserve.size_bytes

    @property
    def free_bytes(self) -> int:
        """The free space of the fullest disk; 0 if no disk has a known size."""
        return min((state.free_bytes for state in self._states), default=0)

    # -- threads ----------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the background threads if a disk has a known size."""
        if not self._states:
            return
        self._threads = [
            threads.start("ister-disk", self._keep_measuring),
            threads.start("ister-disk-relief", self._keep_freeing),
        ]

    def stop(self) -> None:
        """Stops the threads after a removal in progress. May be called more than once."""
        self._stopping.set()
        self._is_wanted.set()
        for thread in self._threads:
            thread.join()

    def _keep_measuring(self) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            with threads.guard("ister-disk"):
                self.measure()
                self.report_slow_syncs()
            pause = self._pause()

    def _pause(self) -> float:
        if self._is_low:
            return _MEASURE_SECONDS_LOW
        headroom = min((s.free_bytes - s.min_free_bytes for s in self._states), default=1 << 62)
        return min(
            _MEASURE_SECONDS_MAX, max(_MEASURE_SECONDS_MIN, headroom / _FILL_BYTES_PER_SECOND)
        )

    def _keep_freeing(self) -> None:
        while not self._stopping.is_set():
            self._is_wanted.wait()
            with threads.guard("ister-disk-relief"):
                self.free_space()
            self._stopping.wait(_FREEING_SECONDS)

    # -- the watermark ----------------------------------------------------------------------

    def measure(self) -> None:
        """Measures the disks, and stops or resumes appends."""
        with self._lock:
            before = {state.path: state for state in self._states}
            self._states = states = tuple(self._measure_disks(before))
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
                self._allocate_reserve(own)

    def _measure_disks(self, before: dict[str, DiskState]) -> list[DiskState]:
        found: dict[int, DiskState] = {}
        for fs, path in self._places:
            try:
                usage = fs.disk_usage(path)
            except IsterError:
                # Writing there will report the error with more details.
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
            min_free = min_free_bytes(self._settings, usage.total_bytes)
            was = before.get(path)
            reserve = self._reserve_size(usage.total_bytes) if path == self._root else 0
            tight = max(min_free, reserve)
            # The freed reserve is for freeing space; appends would use it up.
            is_freed = reserve > 0 and self._reserve.is_freed
            if is_freed:
                min_free = tight
            found[usage.device] = DiskState(
                path=path,
                total_bytes=usage.total_bytes,
                free_bytes=usage.free_bytes,
                min_free_bytes=min_free,
                is_low=_is_below(
                    usage.free_bytes, min_free, is_freed or (was is not None and was.is_low)
                ),
                tidy_bytes=tight,
                is_tight=_is_below(
                    usage.free_bytes, tight, is_freed or (was is not None and was.is_tight)
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
            _log.info("appends resumed", extra={"free_bytes": self.free_bytes})

    def add(self, topic: Topic) -> None:
        """Includes a topic that was opened."""
        with self._lock:
            self._apply(topic)

    def _apply(self, topic: Topic) -> None:
        if self._is_low:
            topic.wal.gate.hold("disk", partial(self.error, topic.name), waits=False)
        else:
            topic.wal.gate.unhold("disk")

    def error(self, topic: str | None = None) -> CapacityError:
        """The error of appends while a disk is low."""
        low = [state for state in self._states if state.is_low]
        if not low:
            return CapacityError("the disk was full a moment ago", topic=topic, hint="retry")
        state = low[0]
        remedy = "appends resume when there is space"
        if state.holds_bucket:
            remedy += (
                "; the bucket is on the same disk: free space, or let objects expire with "
                "storage.cloud.retention"
            )
        elif state.holds_log and self._has_bucket:
            remedy += "; local files are removed once they are uploaded"
        elif state.holds_log:
            remedy += "; files are removed by the limits of storage.wal.retention, if set"
        return CapacityError(
            f"{_size(state.free_bytes)} of {_size(state.total_bytes)} are free on the disk; "
            f"appends stop below {_size(state.min_free_bytes)} and resume at "
            f"{_size(state.resume_bytes)}",
            topic=topic,
            path=state.path,
            hint=f"nothing acknowledged is lost; {remedy}. storage.disk.min_free sets the limit",
        )

    # -- slow syncs -------------------------------------------------------------------------

    def report_slow_syncs(self) -> None:
        """Logs the slowest sync when the first one becomes slow, and when none is any more."""
        slow = [(topic.wal.committer.slow_sync_seconds, topic) for topic in self._topics()]
        seconds, slowest = max(slow, key=itemgetter(0), default=(0.0, None))
        if bool(seconds) is self._is_slow:
            return
        self._is_slow = bool(seconds)
        if slowest is None or not seconds or slowest.wal.directory is None:
            _log.info("disk is fast again")
            return
        _log.warning(
            "disk is slow: a sync takes long, and producers wait for it",
            extra={
                "topic": slowest.name,
                "path": slowest.wal.directory.path,
                "seconds": round(seconds, 1),
            },
        )

    # -- making room ------------------------------------------------------------------------

    def has_plenty(self) -> bool:
        """Measures the disks; returns whether the log's own has plenty of free space."""
        self.measure()
        return not any(
            state.holds_log and state.free_bytes < _PLENTY_FACTOR * state.tidy_bytes
            for state in self._states
        )

    def free_space(self) -> int:
        """Removes uploaded local files until the disk has enough space; returns their number."""
        count = 0
        for past_subscriptions in (False, True):
            for topic in self._topics():
                if self._stopping.is_set() or self.has_plenty():
                    return count
                if topic.bucket is None:
                    continue
                try:
                    count += topic.bucket.retention.release(
                        past_subscriptions=past_subscriptions, is_enough=self.has_plenty
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
        """Whether a write that failed on a full disk may be retried: not in the reserve's space."""
        own = next((state for state in self._states if state.holds_log), None)
        return own is None or not own.is_tight or not self._reserve.is_freed

    def free_reserve(self) -> bool:
        """Frees the reserve, for work that frees space; returns whether there was one."""
        if not self._reserve.free():
            return False
        self._metrics.count("disk.reserve_used_total")
        _log.warning("disk full; the reserve was freed", extra={"path": self._root})
        return True

    def _allocate_reserve(self, own: DiskState) -> None:
        size = self._reserve_size(own.total_bytes)
        # Allocating it must not bring the disk below the watermark.
        if self._reserve.size_bytes < size and own.free_bytes - size >= own.resume_bytes:
            self._reserve.allocate(size)

    def _reserve_size(self, total_bytes: int) -> int:
        size = self._settings.reserve
        if size is not None:
            return size
        size = min(_RESERVE_BYTES, max(_RESERVE_BYTES_LEAST, total_bytes // _RESERVE_SHARE))
        return size if size <= total_bytes // _RESERVE_SHARE_MOST else 0


class _Reserve:
    """A file that occupies space so that it can be freed when the disk is full. Thread-safe."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._lock = threading.Lock()
        self.size_bytes = 0
        self.is_freed = False
        """Whether it was freed and has not been allocated again."""
        self._is_known = False

    def find(self) -> None:
        """Finds the reserve of an earlier process, once."""
        with self._lock:
            if self._is_known:
                return
            self._is_known = True
            try:
                self.size_bytes = file_size(self._fs, self._path)
                self.is_freed = self.size_bytes == 0
            except NotFoundError:
                return
            except IsterError as error:
                _log.warning(
                    "disk reserve cannot be read", extra={"path": self._path, "error": str(error)}
                )

    def allocate(self, size: int) -> None:
        """Allocates the reserve; a failure is logged, and retried later."""
        with self._lock:
            try:
                file = self._fs.create(self._path)
                try:
                    file.allocate(size)
                finally:
                    file.close()
            except IsterError as error:
                _log.warning(
                    "disk reserve cannot be allocated",
                    extra={"path": self._path, "error": str(error)},
                )
                self._empty()
                return
            self.size_bytes = size
            self.is_freed = False

    def free(self) -> bool:
        """Frees the reserve; returns whether there was one."""
        with self._lock:
            return self.size_bytes > 0 and self._empty()

    def _empty(self) -> bool:
        try:
            file = self._fs.open(self._path)
            try:
                file.truncate(0)
                # Some file systems free the blocks only after a sync.
                file.sync()
            finally:
                file.close()
        except IsterError as error:
            _log.warning("cannot free the reserve", extra={"path": self._path, "error": str(error)})
            return False
        self.size_bytes = 0
        self.is_freed = True
        return True


def _is_below(free_bytes: int, limit: int, was_below: bool) -> bool:
    """Whether free space is below a limit, with a hysteresis of a quarter."""
    return free_bytes < (limit + limit // 4 if was_below else limit)


def _size(number: int) -> str:
    if number >= 1024 * MIB:
        return f"{number / (1024 * MIB):.1f} GiB"
    return f"{number / MIB:.1f} MiB" if number >= MIB else f"{number / KIB:.0f} KiB"
