"""Detects steps of this node's clock, across restarts.

Owns: the guard (`ister.base.clock_guard`) and its mark, the file `.clock` beside the directories
of the topics. Does not own: what is suspended while the clock is not trusted.

The mark is saved at the start, once a minute while `check` is called, when the result changes, and
at the end. It is replaced atomically: a crash leaves the old or the new one. If it cannot be saved
or read, that is logged, and the clock is not compared with the previous process.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from ister.base.clock import Clock
from ister.base.clock_guard import ClockGuard, ClockMark, ClockStep
from ister.base.limits import KIB
from ister.config import StorageConfig
from ister.errors import IsterError, NotFoundError
from ister.fs.base import FileSystem
from ister.fs.local import boot_id
from ister.fs.whole_files import read_file, replace_file

_log = logging.getLogger("ister.topic.node_clock")

CLOCK_NAME: Final = ".clock"
_SAVE_SECONDS: Final = 60.0


class NodeClock:
    """A `ClockGuard` whose mark is kept in the log's directory. Thread-safe."""

    def __init__(
        self,
        clock: Clock,
        *,
        fs: FileSystem | None = None,
        root: str | None = None,
        storage: StorageConfig | None = None,
    ) -> None:
        """Compares the clock with the mark of the previous process, if there is one.

        `root`: its directory, which this process has locked; None to keep no mark.
        `storage`: settings; the longest retention time is used.
        """
        self._clock = clock
        self._fs = fs
        self._path = f"{root}/{CLOCK_NAME}" if root is not None else None
        self._lock = threading.Lock()
        self._saved_at = -float("inf")
        self._was_stepped = False
        self._guard = ClockGuard(
            clock,
            mark=self._load(),
            boot=boot_id() if root is not None else "",
            longest_seconds=longest_seconds(storage) if storage is not None else 0.0,
        )
        self.check()

    @property
    def step(self) -> ClockStep | None:
        """The step that suspends deletion by age, as of the last `check`; or None."""
        return self._guard.step

    def check(self) -> ClockStep | None:
        """Compares the clocks; returns the step that suspends deletion by age, or None."""
        step = self._guard.check()
        with self._lock:
            has_changed = (step is not None) != self._was_stepped
            self._was_stepped = step is not None
            if has_changed:
                self._log_change(step)
            if has_changed or self._clock.boottime() - self._saved_at >= _SAVE_SECONDS:
                self._save()
        return step

    def confirm(self) -> ClockStep | None:
        """Accepts the current time as right; returns the step that this ends, or None."""
        step = self._guard.confirm()
        with self._lock:
            if step is not None:
                _log.warning("clock confirmed", extra={"seconds": round(step.seconds)})
            self._was_stepped = False
            self._log_change(None)
            self._save()
        return step

    def correct_ms(self, time_ms: int) -> int:
        """Corrects a time recorded while the clock was wrong; see `ClockGuard.correct`."""
        return self._guard.correct(time_ms)

    def close(self) -> None:
        """Saves the mark for the next process. May be called twice."""
        self.check()
        with self._lock:
            self._save()

    def _log_change(self, step: ClockStep | None) -> None:
        if step is not None:
            _log.error(
                "clock step detected; deletion by age is suspended",
                extra={
                    "seconds": round(step.seconds),
                    "reason": step.reason,
                    "hint": "correct the clock, or confirm it: Log.confirm_clock, or "
                    "POST /api/clock/confirm",
                },
            )
        else:
            _log.info("clock is trusted")

    def _load(self) -> ClockMark | None:
        if self._fs is None or self._path is None:
            return None
        try:
            mark = ClockMark.decode(read_file(self._fs, self._path, 64 * KIB))
        except NotFoundError:
            return None
        except IsterError as error:
            _log.warning("cannot read the clock mark", extra={"error": str(error)})
            return None
        if mark is None:
            _log.warning("clock mark is damaged", extra={"path": self._path})
        return mark

    def _save(self) -> None:
        if self._fs is None or self._path is None:
            return
        self._saved_at = self._clock.boottime()
        try:
            replace_file(self._fs, self._path, self._guard.mark().encode())
        except IsterError as error:
            _log.warning("cannot save the clock mark", extra={"error": str(error)})


def longest_seconds(storage: StorageConfig) -> float:
    """The longest age limit of the settings."""
    minutes = (
        storage.wal.retention.time_minutes or 0,
        storage.wal.retention.min_minutes or 0,
        storage.cloud.retention.time_minutes or 0,
        storage.cloud.orphan_grace_minutes,
    )
    return max(max(minutes) * 60.0, float(storage.wal.retention.active_subscription_grace_seconds))
