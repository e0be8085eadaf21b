"""A log's files as its checkpoint describes them, for readers outside of the process that owns it.

Owns: nothing. The owner keeps writing, rotating and trimming meanwhile, so a snapshot is true of
the past: below its `synced` every frame is durable and stays what it is, and a file that it names
may be trimmed by the time it is opened (`NotFoundError`; a newer snapshot, or the bucket, has it).

What lies in the files above `synced` is never read: the owner may still be writing it, a crash
may take it back, and other messages may get its offsets.

The owner saves its checkpoint within `CHECKPOINT_INTERVAL_SECONDS` of a sync; `covers` tells
whether a snapshot knows of all that the files held at a moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from ister.base.model import Codec
from ister.errors import NotFoundError
from ister.wal.directory import WalDirectory
from ister.wal.recovery import WalFile
from ister.wal.writer import WalWriter


@dataclass(frozen=True, slots=True)
class SnapshotSettings:
    """What a reader has to know about the bodies."""

    topic: str
    codec: Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class WalSnapshot:
    """The files of a log up to a durable offset; a `ister.wal.reader.ReadableLog`."""

    settings: SnapshotSettings
    directory: WalDirectory | None
    files: tuple[WalFile, ...]
    synced: int
    """Everything below this is durable."""
    active_seq: int
    synced_position: int
    """Where, in the file `active_seq`, the frame `synced` begins or will begin."""
    incarnation: str = ""
    """Which topic of its name this is; empty if the checkpoint does not say."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Offsets that were given up: (start, end) of each range, ascending."""

    @property
    def writer(self) -> WalWriter | None:
        """Always None: a snapshot has no writer."""
        return None

    @property
    def trimmed(self) -> int:
        """The first offset in the files."""
        return self.files[0].first_offset if self.files else self.synced

    @property
    def next(self) -> int:
        """The end of what may be read."""
        return self.synced

    def end_of_files(self) -> tuple[int, int]:
        """The number of the last file that has bytes now, and how many."""
        directory = self.directory
        if directory is not None:
            # A rotation that has just begun, or failed, leaves an empty last file.
            for seq in reversed(directory.log_seqs()):
                if size := _size(directory, seq):
                    return seq, size
        return self.active_seq, 0

    def covers(self, end: tuple[int, int]) -> bool:
        """Whether everything before an `end_of_files` is durable, as far as this one knows."""
        seq, size = end
        return size == 0 or (self.active_seq, self.synced_position) >= (seq, size)

    def measure(self, start: int, end: int) -> int:
        """About how many bytes the frames of a range take, by the sizes of the files."""
        directory = self.directory
        total = 0
        if directory is None or not self.files:
            return 0
        ends = [file.first_offset for file in self.files[1:]]
        for file, file_end in zip(self.files, [*ends, self.synced], strict=True):
            is_active = file.seq == self.active_seq
            size = self.synced_position if is_active else _size(directory, file.seq)
            wanted = min(end, file_end) - max(start, file.first_offset)
            if wanted > 0:
                total += size * wanted // (file_end - file.first_offset)
        return total


def _size(directory: WalDirectory, seq: int) -> int:
    try:
        return directory.log_size(seq)
    except NotFoundError:
        return 0


def load_snapshot(directory: WalDirectory, topic: str) -> WalSnapshot | None:
    """What the checkpoint in `directory` says; None without one that is whole."""
    state = directory.load_state()
    if state is None:
        return None
    checkpoint, gaps = state.checkpoint, directory.load_gaps()
    files = [WalFile(file.seq, file.first_offset) for file in checkpoint.rotated_files]
    if checkpoint.active_file_first_offset is not None:
        files.append(WalFile(checkpoint.file_seq, checkpoint.active_file_first_offset))
    return WalSnapshot(
        settings=SnapshotSettings(topic, state.codec),
        directory=directory,
        files=tuple(files),
        synced=state.synced,
        active_seq=checkpoint.file_seq,
        synced_position=state.synced_position,
        incarnation=state.incarnation,
        gaps=gaps.ranges if gaps is not None else (),
    )
