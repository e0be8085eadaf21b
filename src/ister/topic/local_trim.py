"""Retention for logs without a bucket: removes the oldest local files.

Owns: one thread and its schedule. Does not own: which files are removed (`ister.topic.retention`).

No file of a topic is removed until it has been open for `active_subscription_grace_seconds`:
consumers of the previous process have that time to reconnect.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ister.base import threads
from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.config import WalRetentionConfig
from ister.errors import ClosedError, IsterError
from ister.topic.node_clock import NodeClock
from ister.topic.retention import list_files, plan_trim
from ister.topic.topic import Topic

_log = logging.getLogger("ister.topic.local_trim")

_TICK_SECONDS = 1.0


class LocalRetention:
    """Removes expired local files in a background thread. Thread-safe."""

    def __init__(
        self,
        topics: Callable[[], list[Topic]],
        retention: WalRetentionConfig,
        *,
        node_clock: NodeClock,
        clock: Clock,
        metrics: Metrics,
        on_tick: Callable[[], None],
    ) -> None:
        """Removes files of `topics`; the thread calls `on_tick` once a second."""
        self._topics = topics
        self._on_tick = on_tick
        self._retention = retention
        self._node_clock = node_clock
        self._clock = clock
        self._metrics = metrics
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threads.start("ister-retention", self._run)

    def stop(self) -> None:
        """Stops the thread. May be called more than once."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        interval = self._retention.check_interval_minutes * 60
        due = self._clock.monotonic() + interval
        while not self._stopping.wait(_TICK_SECONDS):
            with threads.guard("ister-retention"):
                self._node_clock.check()
                self._on_tick()
                if self._clock.monotonic() >= due:
                    due = self._clock.monotonic() + interval
                    self._trim_all()

    def _trim_all(self) -> None:
        grace = self._retention.active_subscription_grace_seconds
        for topic in self._topics():
            if self._stopping.is_set():
                return
            if self._clock.boottime() - topic.opened_at < grace:
                continue
            try:
                self.trim(topic)
            except ClosedError:
                continue
            except IsterError as error:
                self._metrics.count("retention.errors_total")
                _log.warning(
                    "cannot remove expired files", extra={"topic": topic.name, "error": str(error)}
                )

    def trim(self, topic: Topic) -> int:
        """Removes the expired files of a topic; returns their number.

        Raises:
            IsterError: A file could not be removed or the checkpoint not be written.
        """
        wal, retention = topic.wal, self._retention
        step = self._node_clock.check()
        before = plan_trim(
            list_files(wal),
            retention,
            safe_before=min(wal.synced, topic.active_floor(include_inactive=step is not None)),
            now_ms=self._clock.now_ns() // 1_000_000,
            is_clock_trusted=step is None,
            correct_ms=self._node_clock.correct_ms,
        )
        if before is None or before <= wal.trimmed:
            return 0
        return wal.trim(before)
