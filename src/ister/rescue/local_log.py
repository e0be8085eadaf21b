"""Repairs a damaged log whose older part another tier holds, and gives up what no tier has.

What no other tier has yet, the frames from `start` on, is copied out of the damaged files, checked
frame by frame, into one new file. The old files are set aside beside it, under names that no log
file has; nothing removes those but a person.

    write wal.<n>.log ─► set the old files aside ─► checkpoint

Each step is durable before the next one, and the new file is the first of them: a crash in between
leaves a log that is still damaged, whose newest file has all that is needed, and the next repair
begins there.

What no tier has is found by `judge_log`, which reads all files, and given up by `give_up`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ister.base import failpoints
from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import Codec
from ister.errors import CorruptDataError, IsterError
from ister.format.checkpoint import WalCheckpoint, WalState
from ister.format.frame import FRAME_HEADER_SIZE, Scan
from ister.format.frame_walk import BadBytes, FrameWalk
from ister.format.gaps import Gaps
from ister.format.message import decode_identity, recognise, split
from ister.format.offset_ranges import is_within, merge_ranges, missing_from
from ister.fs.base import File
from ister.rescue.examine_files import find_first_offset
from ister.wal.directory import WalDirectory, format_log_name
from ister.wal.log import Wal
from ister.wal.reader import WalReader
from ister.wal.recovery import WalFile

_log = logging.getLogger("ister.wal.repair")


def rewrite_log(wal: Wal, start: int, *, chunk_bytes: int, clock: Clock, metrics: Metrics) -> int:
    """Replaces the files of a quarantined log by one with the frames from `start` on.

    Nothing is appended to the log meanwhile, and it is closed afterwards. Everything before `start`
    is in the other tier; `chunk_bytes` are copied at once.

    Returns how many frames were copied.

    Raises:
        CorruptDataError: A frame at or after `start` is damaged too; nothing was changed.
        OffsetOutOfRangeError: It is missing; nothing was changed.
        DiskError: The new file could not be written.
    """
    directory = wal.directory
    if directory is None:
        return 0
    old = directory.log_seqs()
    seq = old[-1] + 1 if old else 0
    size = _copy_frames(wal, directory, seq, start, chunk_bytes, clock, metrics)
    fs = directory.fs
    # From the newest on, one after the other: whatever is left of them begins before the new file
    # does, so that what lies behind its first offset is always read from there.
    for number in reversed(old):
        for path in (directory.log_path(number), directory.index_path(number)):
            if fs.exists(path):
                fs.rename(path, f"{path}.aside")
        directory.sync_names()
    end = wal.next
    directory.save_state(
        WalState(
            synced=end,
            synced_position=size,
            codec=wal.settings.codec,
            ack=wal.settings.ack,
            incarnation=wal.settings.incarnation,
            epoch=wal.settings.epoch,
            claim=wal.settings.claim,
            checkpoint=WalCheckpoint(
                start_offset=start,
                last_offset=max(end - 1, 0),
                file_seq=seq,
                file_path=format_log_name(seq),
                active_file_name=format_log_name(seq),
                active_file_first_offset=start if end > start else None,
            ),
        )
    )
    _log.warning(
        "log rewritten; the damaged files are set aside",
        extra={"path": directory.path, "offset": start, "frames": end - start},
    )
    return end - start


def _copy_frames(  # noqa: PLR0917
    wal: Wal,
    directory: WalDirectory,
    seq: int,
    start: int,
    chunk_bytes: int,
    clock: Clock,
    metrics: Metrics,
) -> int:
    """Writes the new file under a temporary name, and gives it its own when it is durable."""
    fs = directory.fs
    path = directory.log_path(seq)
    source = WalReader(wal, chunk_bytes=chunk_bytes, metrics=metrics, clock=clock)
    file = fs.create(f"{path}.tmp")
    position = 0
    try:
        at = start
        while at < wal.next:
            batch = source.fetch(at, wal.next, bytes_max=chunk_bytes)
            data = memoryview(batch.chunk)[batch.starts[0] : batch.end]
            file.write_at(position, [data])
            position += len(data)
            at = batch.next_offset
        file.sync()
    except IsterError:
        with suppress(IsterError):
            fs.remove(f"{path}.tmp")
        raise
    finally:
        file.close()
        source.close()
    fs.rename(f"{path}.tmp", path)
    directory.sync_names()
    return position


# -- what is left of a damaged log --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFile:
    """A file whose messages name another topic."""

    path: str
    topic: str
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedLog:
    """Which offsets the files of a log still have, whatever their order and their checkpoint."""

    files: tuple[WalFile, ...]
    """Those that have frames of the topic, in the order of offsets."""
    whole: tuple[tuple[int, int], ...]
    """The offsets that can be read from them, as (start, end) of each range, ascending."""
    start: int
    """The first offset that the log had."""
    next_offset: int
    """The offset after the last one that was assigned, as far as the files show."""
    foreign: tuple[ForeignFile, ...]

    def lost(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of a range that the files do not have."""
        return missing_from(self.whole, start, end)


NO_FILES: Final = JudgedLog(files=(), whole=(), start=0, next_offset=0, foreign=())
"""What a log without files has."""


def judge_log(directory: WalDirectory, topic: str) -> JudgedLog:
    """Reads all files of a log that no writer changes meanwhile.

    A file belongs to another topic if all its messages name that one, and other files have messages
    that name this one. Less proves nothing: a program may append records of other topics.
    """
    state, gaps = directory.load_state(), directory.load_gaps()
    hints = state.first_offsets() if state is not None else {}
    if gaps is not None:
        hints |= dict(gaps.files)
    found = [_FileWalk(directory, seq, hints.get(seq)) for seq in directory.log_seqs()]
    names_own = any(topic in file.names for file in found)
    foreign = [file for file in found if names_own and file.is_of_other(topic)]
    own = sorted(
        (file for file in found if file.runs and file not in foreign),
        key=lambda file: (file.runs[0], file.seq),
    )
    ends = [file.end_max for file in found if file not in foreign]
    if state is not None:
        ends.append(state.synced)
    if gaps is not None:
        ends.append(gaps.next_offset)
    files, whole = _choose(own)
    first = files[0].first_offset if files else max(ends, default=0)
    return JudgedLog(
        files=files,
        whole=tuple(merge_ranges(whole)),
        start=min(first, state.checkpoint.start_offset) if state is not None else first,
        next_offset=max(ends, default=0),
        foreign=tuple(
            ForeignFile(
                path=directory.log_path(file.seq),
                topic=next(iter(file.names)),
                ranges=tuple(file.runs),
            )
            for file in foreign
        ),
    )


def give_up(directory: WalDirectory, judged: JudgedLog, next_offset: int) -> Gaps:
    """Records that a log has lost what its files do not have, and continues at `next_offset`.

    The log must be closed. Nothing is removed: the files stay as they are until they are trimmed.
    Commit point: `wal.gaps` is replaced. A crash leaves the log as it was, or one that continues
    after the gaps.
    """
    start = judged.files[0].first_offset if judged.files else next_offset
    state = directory.load_state()
    seqs = [*directory.log_seqs(), state.checkpoint.file_seq if state is not None else -1]
    gaps = Gaps(
        ranges=tuple(judged.lost(start, next_offset)),
        files=tuple((file.seq, file.first_offset) for file in judged.files),
        next_offset=next_offset,
        seq=max(seqs) + 1,
    )
    failpoints.reach("repair.before_gaps")
    directory.save_gaps(gaps)
    failpoints.reach("repair.after_gaps")
    _log.warning(
        "offsets given up", extra={"path": directory.path, "gaps": gaps.ranges, "next": next_offset}
    )
    return gaps


def _choose(found: Sequence[_FileWalk]) -> tuple[tuple[WalFile, ...], list[tuple[int, int]]]:
    """The files that have offsets which those before them do not have, and what they cover.

    A file is read up to the first offset of the next one.
    """
    files: list[WalFile] = []
    runs: list[list[tuple[int, int]]] = []
    covered: list[tuple[int, int]] = []
    for file in found:
        if not all(is_within(covered, *run) for run in file.runs):
            # Damage at its beginning is this file's, unless an earlier one has the offsets.
            first = max(file.first_offset, covered[-1][1] if covered else 0)
            files.append(WalFile(file.seq, min(first, file.runs[0][0])))
            runs.append(file.runs)
            covered = merge_ranges([*covered, *file.runs])
    ends = [*(file.first_offset for file in files[1:]), 1 << 64][: len(files)]
    whole = [
        (start, min(end, limit))
        for ranges, limit in zip(runs, ends, strict=True)
        for start, end in ranges
        if start < limit
    ]
    return tuple(files), whole


class _FileWalk:
    """The whole frames of one file, and which topics they name."""

    def __init__(self, directory: WalDirectory, seq: int, hint: int | None) -> None:
        self.seq = seq
        self.runs: list[tuple[int, int]] = []
        self.names: set[str] = set()
        self.end_max = 0
        """The offset after the last frame that may have been here."""
        self._codec: Codec | None = None
        self._identity = b""
        with directory.open_log(seq) as file:
            self._first = find_first_offset(file, hint)
            self._walk(file)

    @property
    def first_offset(self) -> int:
        """Where it begins: damage at its beginning counts."""
        start = self.runs[0][0]
        return start if self._first is None else min(self._first, start)

    def is_of_other(self, topic: str) -> bool:
        """Whether all of its messages name the same topic, and not this one."""
        return len(self.names) == 1 and not self.names & {topic, ""}

    def _walk(self, file: File) -> None:
        def note(bad: BadBytes) -> bool:
            if bad.behind is None:
                self.end_max = max(self.end_max, (bad.offset or 0) + _count_unread(file, bad))
            return True

        for chunk, _, scan in FrameWalk(file, expected_offset=self._first, on_damage=note):
            end = self.end_max = scan.next_offset or 0
            start = end - len(scan.starts)
            if self.runs and self.runs[-1][1] == start:
                start = self.runs.pop()[0]
            self.runs.append((start, end))
            self._visit(chunk, scan)

    def _visit(self, chunk: bytes, scan: Scan) -> None:
        for start, end in zip(scan.starts, [*scan.starts[1:], scan.end], strict=True):
            begin = start + FRAME_HEADER_SIZE
            if self._codec is None:
                self._codec = recognise(chunk[begin:end])
            if self._codec is None:
                continue
            with suppress(CorruptDataError):
                identity = split(chunk, begin, end, self._codec, self._identity)[1]
                if identity is not self._identity:
                    self._identity = identity
                    self.names.add(decode_identity(identity, self._codec).topic_name)


def _count_unread(file: File, bad: BadBytes) -> int:
    """How many frames bytes at the end can have held: none of their offsets is used again."""
    length = int.from_bytes(file.read_at(bad.position, FRAME_HEADER_SIZE)[8:12], "little")
    if bad.position + FRAME_HEADER_SIZE + length == bad.size:
        return 1  # one damaged frame, by its own length
    return -(-(bad.size - bad.position) // (FRAME_HEADER_SIZE + 1))
