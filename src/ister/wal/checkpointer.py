"""Keeps a topic's checkpoint: what it says, when it is due, how it is saved.

The checkpoint carries the durable watermark, which tells a torn tail from damage at the next
opening. It is saved at most `CHECKPOINT_INTERVAL_SECONDS` after a sync, sooner when more than
`CHECKPOINT_BYTES_BEHIND_MAX` lie behind it, at rotation, before trim and at the end. It is a hint:
a save that fails is counted and tried again, and costs time at the next opening, not data.

Owns: `wal.ckpt` and the saved part of the active file's index. Does not own: the watermarks.

A `DurablePoint` is a few references taken when a sync has just ended; the checkpoint itself is
put together when it is saved, so that a sync pays next to nothing for it.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import NamedTuple

from ister.clock import Clock
from ister.errors import IsterError
from ister.format.checkpoint import RotatedFile, WalCheckpoint, WalState
from ister.limits import CHECKPOINT_BYTES_BEHIND_MAX, CHECKPOINT_INTERVAL_SECONDS
from ister.metrics import Metrics
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
        self._saved_at = clock.monotonic()
        self._saved: DurablePoint | None = None
        self._stored = recovered.state
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
        point, saved = self._point, self._saved
        if saved == point or self._is_poisoned or self._is_ended:
            return math.inf
        if saved is not None and (
            point.seq != saved.seq or point.position - saved.position >= CHECKPOINT_BYTES_BEHIND_MAX
        ):
            return self._saved_at
        return self._saved_at + CHECKPOINT_INTERVAL_SECONDS

    def save(self, *, is_synced: bool = True) -> None:
        """Replaces the checkpoint by one for this moment; durable on return if `is_synced`.

        Raises:
            IsterError: It could not be replaced; the old one stands.
        """
        with self._lock:
            point = self._point
            if point == self._saved or self._is_poisoned or self._is_ended:
                return
            self._saved_at = self._clock.monotonic()
            self._writer.save_index(below=point.synced)
            state = self._state(point, is_poisoned=False)
            if state == self._stored:
                # Opening an unchanged topic writes nothing.
                self._saved = point
                return
            self._writer.directory.save_state(state, is_synced=is_synced)
            self._saved, self._stored = point, state
        self._metrics.count("wal.checkpoint_saves")

    def end(self) -> None:
        """Saves nothing after this: the next process that opens the log owns the file."""
        with self._lock:
            self._is_ended = True

    def save_quietly(self) -> None:
        """Saves the checkpoint; an error is counted, and the next second tries again.

        The data itself is durable, and an error of the disk that concerns it shows at its sync.
        """
        try:
            self.save()
        except IsterError as error:
            self._metrics.count("wal.checkpoint_errors")
            _log.warning(
                "checkpoint not saved", extra={"topic": self._settings.topic, "error": str(error)}
            )

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
            checkpoint=WalCheckpoint(
                start_offset=files[0].first_offset if files else point.synced,
                last_offset=max(point.synced - 1, 0),
                file_seq=point.seq,
                file_path=format_log_name(point.seq),
                rotated_files=tuple(
                    RotatedFile(
                        seq=file.seq,
                        path=format_log_name(file.seq),
                        first_offset=file.first_offset,
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
