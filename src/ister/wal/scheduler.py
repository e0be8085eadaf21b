"""Background threads that commit and maintain logs.

A few threads serve every topic of a process, and call `run`; as many call `run_upkeep`; one more is
the timer, and calls `on_timer`. A log holds at most one thread of either kind. Logs whose syncs
were slow have threads of their own for commits, so that the others do not wait for them, however
many they are.

Owns: the queues, the timer heap, the limit on open files. Does not own: any log's state. A log is
in each queue once (it keeps a flag), and once more for each call that an exception from a signal
handler has ended, so the queues are bounded by the number of topics and of such calls.
"""

from __future__ import annotations

import threading
from heapq import heappop, heappush
from itertools import count
from queue import Empty, SimpleQueue
from typing import Protocol

from ister.base import threads as background
from ister.base.clock import Clock
from ister.errors import IsterError
from ister.wal.commit import Committer, LogScheduler
from ister.wal.signals import is_main_thread


class Threads(LogScheduler, Protocol):
    """What a log of topics needs of its background threads."""

    def forget(self, log: Committer) -> None:
        """Drops a closed log."""
        ...

    def stop(self) -> None:
        """Ends the threads, after every log was closed."""
        ...


class Scheduler:
    """Runs logs on `threads` threads; see `ister.wal.commit.LogScheduler`."""

    def __init__(self, *, threads: int, clock: Clock, open_files_max: int) -> None:
        self._clock = clock
        self._open_files_max = open_files_max
        self._queue: SimpleQueue[Committer | None] = SimpleQueue()
        self._slow: SimpleQueue[Committer | None] = SimpleQueue()
        self._upkeep: SimpleQueue[Committer | None] = SimpleQueue()
        self._alarms: SimpleQueue[tuple[float, Committer] | None] = SimpleQueue()
        # Logs that may hold a file, in the order in which they were last run.
        self._holders: dict[Committer, None] = {}
        # Reentrant: a finalizer may commit while this thread holds it.
        self._holders_lock = threading.RLock()
        self._threads = [background.start("ister-timer", self._tick)]
        for number in range(threads):
            self._threads += [
                background.start(f"ister-commit-{number}", self._commit, self._queue),
                background.start(f"ister-commit-slow-{number}", self._commit, self._slow),
                background.start(f"ister-upkeep-{number}", self._maintain),
            ]

    def submit(self, log: Committer) -> None:
        """Has `log.run()` called soon."""
        (self._slow if log.slow_sync_seconds else self._queue).put(log)

    def submit_upkeep(self, log: Committer) -> None:
        """Has `log.run_upkeep()` called soon, by a thread that does not call `run`."""
        self._upkeep.put(log)

    def submit_at(self, log: Committer, when: float) -> None:
        """Has `log.on_timer(when)` called at `when`."""
        self._alarms.put((when, log))

    def is_interruptible(self) -> bool:
        """Whether this is the main thread, in which Python runs signal handlers."""
        return is_main_thread()

    def forget(self, log: Committer) -> None:
        """Drops a closed log."""
        with self._holders_lock:
            self._holders.pop(log, None)

    def stop(self) -> None:
        """Ends the threads; what is queued is dropped. Every log has been closed before."""
        self._alarms.put(None)
        for _ in range(len(self._threads) // 3):
            for queue in (self._queue, self._slow, self._upkeep):
                queue.put(None)
        for thread in self._threads:
            thread.join()

    def _commit(self, queue: SimpleQueue[Committer | None]) -> None:
        while (log := queue.get()) is not None:
            try:
                log.run()
                self._limit_open_files(log)
            except Exception as error:  # noqa: BLE001
                self._stop_log("ister-commit", log, error)

    def _maintain(self) -> None:
        while (log := self._upkeep.get()) is not None:
            try:
                log.run_upkeep()
            except Exception as error:  # noqa: BLE001
                self._stop_log("ister-upkeep", log, error)

    @staticmethod
    def _stop_log(thread: str, log: Committer, error: Exception) -> None:
        """Stops a log after an unexpected exception; the thread continues with other logs.

        Logs handle the errors that they expect, so this is a bug. The state of the log's commits is
        unknown: waiting calls fail, and the log has to be opened again, with recovery.
        """
        background.record(thread, error, topic=log.settings.topic)
        with background.guard(thread, topic=log.settings.topic):
            log.stop(error)

    def _limit_open_files(self, log: Committer) -> None:
        """Closes the files of those that have been idle longest, beyond the limit."""
        with self._holders_lock:
            self._holders.pop(log, None)
            if log.has_open_file:
                self._holders[log] = None
            excess = len(self._holders) - self._open_files_max
            oldest = list(self._holders)[:excess] if excess > 0 else []
        for holder in oldest:
            try:
                is_released = holder.release_file(sync=True)
            except IsterError:
                # Its writer has stopped, and its waiters have the error.
                is_released = True
            if is_released or not holder.has_open_file:
                with self._holders_lock:
                    self._holders.pop(holder, None)

    def _tick(self) -> None:
        heap: list[tuple[float, int, Committer]] = []
        # A log asks for the same time again after each earlier alarm: once is enough.
        armed: set[tuple[float, Committer]] = set()
        order = count()
        while True:
            try:
                timeout = max(0.0, heap[0][0] - self._clock.monotonic()) if heap else None
                alarm = self._alarms.get(timeout=timeout)
                if alarm is None:
                    return
                if alarm not in armed:
                    armed.add(alarm)
                    heappush(heap, (alarm[0], next(order), alarm[1]))
            except Empty:
                while heap and heap[0][0] <= self._clock.monotonic():
                    when, _, log = heappop(heap)
                    armed.discard((when, log))
                    try:
                        log.on_timer(when)
                    except Exception as error:  # noqa: BLE001
                        self._stop_log("ister-timer", log, error)
