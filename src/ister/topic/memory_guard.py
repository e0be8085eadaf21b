"""Bounds the memory of a log without local files: its files are in memory (`ister.fs.memory`).

    used ≤ 1/2 of the limit    uploaded messages stay, for readers near the tail
    used > 1/2                 uploads start at once, and uploaded files are dropped
    used > the limit           appends of every topic wait, or are refused, until 7/8 are used
                               (`storage.wal.buffer_full`)

Owns: the hold `memory` on every topic, and one thread that drops files. Does not own: how files are
removed (`retention`, `ister.wal`), uploads (`background`), the caches of topics.

A file is dropped when committed descriptors cover all of it. Its objects are not read back, unlike
those of a file on disk: producers were answered when the descriptor was committed, and from then on
the bucket's copy counts. Files that are not uploaded are never dropped, so while the bucket does
not answer, memory fills up to the limit and appends are held.

The hold begins in the write that exceeds the limit, so the limit is exceeded by the rest of that
write and by what the append buffers hold at that moment. A crash leaves nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from ister.base import threads
from ister.base.metrics import Metrics
from ister.errors import CapacityError, ClosedError, FencedError, IsterError
from ister.fs.memory import MemoryFileSystem

if TYPE_CHECKING:
    from ister.topic.topic import Topic

_log = logging.getLogger("ister.topic.memory_guard")

_PAUSE_SECONDS: Final = 0.02
# Nothing could be dropped: the bucket has to catch up first.
_PAUSE_SECONDS_BLOCKED: Final = 0.25


class MemoryGuard:
    """Holds appends when the memory is used up, and drops uploaded files. Thread-safe."""

    def __init__(
        self,
        fs: MemoryFileSystem,
        *,
        limit_bytes: int,
        topics: Callable[[], list[Topic]],
        retire: Callable[[Topic], bool],
        metrics: Metrics,
    ) -> None:
        """Watches a file system.

        `retire`: removes a topic that stopped, with its files; returns whether it did.
        """
        self._fs = fs
        self.limit_bytes = limit_bytes
        self._keep_bytes = limit_bytes // 2
        self._enough_bytes = limit_bytes * 3 // 8
        self._resume_bytes = limit_bytes * 7 // 8
        self._topics = topics
        self._retire = retire
        self._metrics = metrics
        self._lock = threading.Lock()
        self._is_full = False
        self._is_applied = False  # whether all topics are held
        self._turn = 0
        self._stopping = threading.Event()
        self._is_wanted = threading.Event()
        self._thread: threading.Thread | None = None
        fs.on_growth = self._on_growth

    @property
    def used_bytes(self) -> int:
        """The size of all files in memory."""
        return self._fs.used_bytes

    @property
    def is_full(self) -> bool:
        """Whether appends are held."""
        return self._is_full

    def is_pressed(self) -> bool:
        """Whether uploads should start now."""
        return self._fs.used_bytes > self._keep_bytes

    # -- the thread -------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threads.start("ister-memory", self._run)

    def stop(self) -> None:
        """Stops the thread. May be called more than once."""
        self._stopping.set()
        self._is_wanted.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._is_wanted.wait()
            if self._stopping.is_set():
                return
            count = 0
            with threads.guard("ister-memory"):
                count = self.free()
            if not self.is_pressed():
                self._is_wanted.clear()
                # A write in between has found the event set, and did not set it.
                if self.is_pressed():
                    self._is_wanted.set()
            self._stopping.wait(_PAUSE_SECONDS if count else _PAUSE_SECONDS_BLOCKED)

    # -- the limit --------------------------------------------------------------------------

    def _on_growth(self, used_bytes: int) -> None:
        """Called by the thread that writes, with its topic's commit lock held."""
        if used_bytes > self._keep_bytes and not self._is_wanted.is_set():
            self._is_wanted.set()
        # Waits while another thread applies the hold: else this topic would write on meanwhile.
        if used_bytes > self.limit_bytes and not self._is_applied:
            self._hold()

    def _hold(self) -> None:
        with self._lock:
            if self._is_full or self.used_bytes <= self.limit_bytes:
                return
            self._is_full = True
            for topic in self._topics():
                self._apply(topic)
            self._is_applied = True
        self._metrics.count("memory.full_total")
        _log.warning("appends held", extra={"error": str(self.error())})

    def _let_go(self) -> None:
        """Ends the hold once there is room."""
        with self._lock:
            if not self._is_full or self.used_bytes > self._resume_bytes:
                return
            self._is_full = self._is_applied = False
            for topic in self._topics():
                self._apply(topic)
        _log.info("appends resumed", extra={"used_bytes": self.used_bytes})

    def add(self, topic: Topic) -> None:
        """Includes a topic that was opened."""
        with self._lock:
            self._apply(topic)

    def _apply(self, topic: Topic) -> None:
        if self._is_full:
            topic.wal.gate.hold("memory", partial(self.error, topic.name), waits=True)
        else:
            topic.wal.gate.unhold("memory")

    def error(self, topic: str | None = None) -> CapacityError:
        """The error of appends while the memory is used up."""
        return CapacityError(
            f"{self.used_bytes} bytes in memory wait for their upload; the limit is "
            f"{self.limit_bytes}",
            topic=topic,
            hint="appends resume when the bucket has caught up; "
            "storage.bucket.memory_max_bytes sets the limit",
        )

    # -- making room ------------------------------------------------------------------------

    def free(self) -> int:
        """Drops uploaded files until enough memory is free; returns their number."""
        count = 0
        topics = self._topics()
        # Another topic comes first each time, so that not always the same readers lose files.
        first = self._turn % len(topics) if topics else 0
        for topic in topics[first:] + topics[:first]:
            if self._stopping.is_set() or not self.is_pressed():
                break
            self._turn += 1
            try:
                count += self._free(topic)
            except (FencedError, ClosedError):
                continue
            except IsterError as error:
                self._metrics.count("retention.errors_total")
                _log.warning(
                    "dropping uploaded files failed",
                    extra={"topic": topic.name, "error": str(error)},
                )
        self._let_go()
        return count

    def _free(self, topic: Topic) -> int:
        if topic.has_stopped:
            return int(self._retire(topic))
        if topic.bucket is None:
            return 0
        return topic.bucket.retention.drop_tiered(is_enough=self._has_enough)

    def _has_enough(self) -> bool:
        return self._fs.used_bytes <= self._enough_bytes
