"""Keeps a topic's checkpoint: what it says, when it is due, how it is saved.

The checkpoint carries the durable watermark, which tells a torn tail from damage at the next
opening. It is saved after a sync, sooner when more than `CHECKPOINT_BYTES_BEHIND_MAX` lie behind
it, at rotation, before trim and at the end, and otherwise `CHECKPOINT_INTERVAL_SECONDS` after the
end of the last save: on a slow disk, saves do not follow each other without a pause. It is a hint:
a save that fails is counted and tried again, and costs time at the next opening, not data.

Owns: `wal.ckpt` and the saved part of the active file's index. Does not own: the watermarks.

A `DurablePoint` is a few references taken when a sync has just ended; the checkpoint itself is
put together when it is saved, so that a sync pays next to nothing for it.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import replace
from typing import NamedTuple

from ister.base.clock import Clock
from ister.base.limits import CHECKPOINT_BYTES_BEHIND_MAX, CHECKPOINT_INTERVAL_SECONDS
from ister.base.metrics import Metrics
from ister.errors import IsterError
from ister.format.checkpoint import RotatedFile, WalCheckpoint, WalState
from ister.wal.directory import format_log_name
from ister.wal.recovery import Recovered, WalFile
from ister.wal.settings import WalSettings
from ister.wal.writer import WalWriter

_log = logging.getLogger("ister.wal.checkpointer")


class DurablePoint(NamedTuple):
    """How far the log is durable, and in which files."""

    synced: int
    position: int
    """Where, in the file `seq`, the frame `synced` begins or will begin."""
    seq: int
    files: tuple[WalFile, ...]


class Checkpointer:
    """See the module header. Thread-safe."""

    def __init__(
        self,
        writer: WalWriter,
        recovered: Recovered,
        settings: WalSettings,
        *,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """Continues from recovery's result."""
        self._writer = writer
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._lock = threading.Lock()
        self._ended_at = clock.monotonic()
        """When the last save ended."""
        self._has_failed = False
        self._saved: DurablePoint | None = None
        self._stored = recovered.state
        self._has_term = False
        """Whether the stored one says who owns the topic now, durably."""
        self._is_poisoned = False
        self._is_ended = False
        self._point = self._take(recovered.next_offset)

    def update(self, synced: int) -> None:
        """Takes the state after a sync or a change of files; no other thread changes them now."""
        self._point = self._take(synced)

    def _take(self, synced: int) -> DurablePoint:
        writer = self._writer
        return DurablePoint(synced, writer.synced_position, writer.seq, writer.files)

    def due_at(self) -> float:
        """When the checkpoint has to be saved; infinity if it says what is true."""
        if self._lock.locked():
            return self._clock.monotonic() + CHECKPOINT_INTERVAL_SECONDS  # look again then
        point, saved = self._point, self._saved
        if saved == point or self._is_poisoned or self._is_ended:
            return math.inf
        is_far_behind = saved is not None and (
            point.seq != saved.seq or point.position - saved.position >= CHECKPOINT_BYTES_BEHIND_MAX
        )
        if is_far_behind and not self._has_failed:
            return self._ended_at
        return self._ended_at + CHECKPOINT_INTERVAL_SECONDS

    def save(self, *, is_synced: bool = True, with_term: bool = False) -> bool:
        """Replaces the checkpoint by one for this moment; durable on return if `is_synced`.

        `with_term`: whether it has to say who owns the topic now, even if nothing else changed.
        Returns whether the stored one says, durably, who owns the topic now; False for a closed
        log.

        Raises:
            IsterError: It could not be replaced; the old one stands.
        """
        with self._lock:
            self._save(is_synced=is_synced, with_term=with_term)
            return self._has_term

    def _save(self, *, is_synced: bool, with_term: bool = False) -> None:
        point = self._point
        with_term = with_term and not self._has_term
        if (point == self._saved and not with_term) or self._is_poisoned or self._is_ended:
            return
        self._has_failed = True
        try:
            self._writer.save_index(below=point.synced)
            state = self._state(point, is_poisoned=False)
            # Opening an unchanged topic writes nothing.
            if with_term or not _says_same(self._stored, state):
                self._writer.directory.save_state(state, is_synced=is_synced)
                self._metrics.count("wal.checkpoint_saves")
                self._stored = state
                self._has_term = is_synced
            self._saved = point
            self._has_failed = False
        finally:
            self._ended_at = self._clock.monotonic()

    def end(self) -> None:
        """Saves nothing after this: the next process that opens the log owns the file."""
        with self._lock:
            self._is_ended = True

    def save_quietly(self) -> None:
        """Saves the checkpoint, unless another thread does; an error is counted and logged.

        `due_at` says when to try again. The data itself is durable, and an error of the disk that
        concerns it shows at its sync.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._save(is_synced=True)
        except IsterError as error:
            self._metrics.count("wal.checkpoint_errors")
            _log.warning(
                "checkpoint not saved", extra={"topic": self._settings.topic, "error": str(error)}
            )
        finally:
            self._lock.release()

    def record_poison(self) -> None:
        """Notes on disk that bytes above `synced` are not to be trusted, if the disk takes it."""
        with self._lock:
            # From here on nothing may say that all is well again but the next recovery.
            self._is_poisoned = True
            try:
                self._writer.directory.save_state(self._state(self._point, is_poisoned=True))
            except IsterError as error:
                _log.warning(
                    "the failed sync could not be recorded; reopen in this process to be safe",
                    extra={"topic": self._settings.topic, "error": str(error)},
                )

    def _state(self, point: DurablePoint, *, is_poisoned: bool) -> WalState:
        files = point.files
        active = next((file for file in files if file.seq == point.seq), None)
        return WalState(
            synced=point.synced,
            synced_position=point.position,
            is_poisoned=is_poisoned,
            codec=self._settings.codec,
            ack=self._settings.ack,
            incarnation=self._settings.incarnation,
            epoch=self._settings.epoch,
            claim=self._settings.claim,
            checkpoint=WalCheckpoint(
                start_offset=files[0].first_offset if files else point.synced,
                last_offset=max(point.synced - 1, 0),
                file_seq=point.seq,
                file_path=format_log_name(point.seq),
                rotated_files=tuple(
                    RotatedFile(
                        seq=file.seq, path=format_log_name(file.seq), first_offset=file.first_offset
                    )
                    for file in files
                    if file.seq != point.seq
                ),
                active_file_name=format_log_name(point.seq),
                last_rotation_at=self._writer.last_rotation_at,
                # A file whose first frame is not durable may begin elsewhere after a crash.
                active_file_first_offset=active.first_offset
                if active is not None and active.first_offset < point.synced
                else None,
            ),
        )


def _says_same(stored: WalState | None, state: WalState) -> bool:
    """Whether two checkpoints differ in the owner's term alone, or not at all."""
    return stored is not None and stored == replace(state, epoch=stored.epoch, claim=stored.claim)
