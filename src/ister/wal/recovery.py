"""Opening a topic's files after anything: what they hold, where they end, what is damaged.

The files are the truth and the checkpoint is a hint: it makes opening quick and says how far the
log was durable, which is the only thing that tells a torn tail from damage.

    durable = the checkpoint's `synced`, or the first offset of the last file if that is higher
              (a file is synced whole before its successor exists)

Steps, each repeatable after a crash inside of it:

1. Sync the directories: names that a killed process left unsynced become durable.
2. Take each file's first offset from its first frame. Files at the end without a whole first frame
   do not count: no frame in them was ever durable. A missing number in the sequence, a file that
   begins below the one before it, or a bad first frame in a file before one with frames, is damage.
3. Scan the last file from its last index entry below the durable watermark to its end.
4. Bad bytes at an offset below `durable`, or a log that ends below it: damage. Nothing is cut or
   written, and the topic opens read-only (quarantined). Other topics are not concerned.
5. Bad bytes at or above `durable`: a torn tail. It is cut, and the cut is synced before anything
   is appended, or old bytes could come to life again behind new ones.
6. Sync the last file: after kill -9 its tail may be in the page cache alone, and from here on it
   counts as durable.
7. After a failed sync (the log is poisoned above `synced`): frames above `synced` are copied into
   a new file, which is synced and only then given its name, and the old file ends where the new
   one begins, whatever it holds.

Where offsets were given up (`wal.gaps`), all of this is about the files since then: what was judged
at that time is not checked again, and the log continues at the offset that was written down.

What a crash leaves: the state before, or one on the way that the next recovery takes up; next
offset and acknowledged frames are the same in all of them.
"""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from ister.base import failpoints
from ister.base.limits import RECOVERY_CHUNK_BYTES
from ister.base.model import Codec
from ister.errors import CorruptDataError, DiskError, IsterError, NotFoundError
from ister.format.checkpoint import WalState
from ister.format.frame import FRAME_HEADER_SIZE, Frame, NeedMore, Scan, decode_frame
from ister.format.frame_search import search_frame
from ister.format.frame_walk import FrameWalk, scan_file
from ister.format.gaps import Gaps
from ister.format.message import decode_publish_time, recognise
from ister.fs.base import File
from ister.wal.directory import WalDirectory, format_log_name
from ister.wal.index import SparseIndex

_log = logging.getLogger("ister.wal.recovery")

# Enough for the first frame of most files, in one read.
_FIRST_READ_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class WalFile:
    """A file of the log; it ends where the next one begins."""

    seq: int
    first_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Bytes that are not what was written, below the durable watermark."""

    path: str
    position: int
    offset: int | None
    """The offset that should stand there, where that is known."""
    reason: str

    def as_error(self, topic: str) -> CorruptDataError:
        """The error for an operation that meets this damage."""
        return CorruptDataError(
            f"the log is damaged below its durable watermark: {self.reason}",
            topic=topic,
            offset=self.offset,
            path=self.path,
            position=self.position,
            hint="the topic is quarantined (read-only); `ister inspect wal` shows what is whole, "
            "`ister repair` restores what a bucket has, with --give-up it gives up the rest",
        )


class UntrustedTailError(DiskError):
    """A sync failed during recovery: nothing above `synced` may be taken as stored."""

    def __init__(self, cause: IsterError, *, synced: int) -> None:
        super().__init__(cause.message, errno=getattr(cause, "errno", None), path=cause.path)
        self.synced = synced


@dataclass(slots=True, kw_only=True)
class Recovered:
    """What the files hold, ready to be appended to (unless there is damage)."""

    files: tuple[WalFile, ...] = ()
    next_offset: int = 0
    active_seq: int = 0
    """The number of the file that appends go to; it may not exist yet."""
    end_position: int = 0
    """Where in the active file the next frame goes."""
    index: SparseIndex = field(default_factory=SparseIndex)
    """The active file's."""
    publish_time_max: int = 0
    """The highest publish time in the active file."""
    state: WalState | None = None
    damage: tuple[Damage, ...] = ()
    has_unread_bytes: bool = False
    """With damage: whether some of the last file's bytes are neither frames nor one damaged one."""
    cut_bytes: int = 0
    """How much torn tail was cut."""
    codec: Codec | None = None
    """As recorded, or recognised from the first frame; None for an empty log."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Offsets that were given up: (start, end) of each range."""


def recover(
    directory: WalDirectory, *, untrusted_from: int | None = None, floor: int = 0, durable: int = 0
) -> Recovered:
    """Opens the log in `directory`; see the module header.

    `directory`: the topic's; made where missing.
    `untrusted_from`: the `synced` watermark of a writer in this process whose sync failed.
    `floor`: where a log begins of which nothing is here: its history is elsewhere.
    `durable`: everything below this offset was durable, by what another tier has; the checkpoint
    may know less.

    Raises:
        UntrustedTailError: A sync failed; pass its `synced` as `untrusted_from` the next time.
        CapacityError: No room for the cut's bookkeeping.
        DiskError: The disk failed in another way.
    """
    directory.make()
    state = directory.load_state()
    if state is not None and state.is_poisoned:
        untrusted_from = min(state.synced, untrusted_from or state.synced)
    recovery = _Recovery(directory, state, untrusted_from, floor=floor, durable=durable)
    try:
        return recovery.run()
    finally:
        recovery.close()


class _Recovery:
    """One recovery under way."""

    def __init__(
        self,
        directory: WalDirectory,
        state: WalState | None,
        untrusted_from: int | None,
        *,
        floor: int,
        durable: int,
    ) -> None:
        self._directory = directory
        self._state = state
        # Where each file begins by the checkpoint.
        self._hints = state.first_offsets() if state is not None else {}
        self._gaps = directory.load_gaps()
        # Files that were judged when offsets were given up: they are not checked again.
        self._judged: tuple[WalFile, ...] = ()
        self._untrusted_from = untrusted_from
        self._floor = floor
        self._durable = durable
        self._damage: list[Damage] = []
        self._file: File | None = None
        self._codec: Codec | None = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def run(self) -> Recovered:
        seqs = self._directory.log_seqs()
        if self._gaps is not None:
            seqs = self._take_judged(self._gaps, seqs)
        recovered = self._recover(seqs) if seqs else self._without_files()
        recovered.state, recovered.codec = self._state, self._codec
        recovered.damage = tuple(self._damage)
        recovered.files = (*self._judged, *recovered.files)
        recovered.gaps = self._gaps.ranges if self._gaps is not None else ()
        return recovered

    def _take_judged(self, gaps: Gaps, seqs: list[int]) -> list[int]:
        """Sets apart the files before the log continued; returns the numbers of the others."""
        self._floor = max(self._floor, gaps.next_offset)
        self._judged = tuple(WalFile(*file) for file in gaps.files if file[0] in seqs)
        for number, file in enumerate(reversed(self._judged), 1):
            if (file.seq, file.first_offset) != gaps.files[-number]:
                # Trim removes the oldest ones first.
                self._add_damage(
                    gaps.files[-number][0], "file missing", offset=gaps.files[-number][1]
                )
                break
        return [seq for seq in seqs if seq >= gaps.seq]

    def _recover(self, seqs: list[int]) -> Recovered:
        state = self._state
        self._check_sequence(seqs)
        first_offsets = self._read_first_offsets(seqs)
        strays: list[int] = []
        hints = self._hints
        while len(seqs) > 1 and seqs[-1] not in first_offsets and seqs[-1] not in hints:
            # No frame was ever durable here, so the file before it is the last one that counts.
            # (The checkpoint names a file only once its first frame is durable.)
            strays.append(seqs.pop())
        files = self._order_files(seqs, first_offsets)
        known = state.synced if state is not None else 0
        durable = max(known, self._durable, *(file.first_offset for file in files))
        self._codec = self._known_codec(*files)
        recovered = self._scan_last(files, durable)
        if not self._damage:
            taken = {file.seq for file in recovered.files}
            for seq in strays:
                if seq not in taken:
                    self._drop_stray(seq)
        return recovered

    def _drop_stray(self, seq: int) -> None:
        """Takes a file without a whole first frame away; without a checkpoint, sets it aside."""
        path = self._directory.log_path(seq)
        fs = self._directory.fs
        with self._directory.open_log(seq) as file:
            is_empty = file.size() == 0
        if is_empty or self._state is not None:
            self._directory.remove_log(seq)
            return
        fs.rename(path, f"{path}.cut-0")
        fs.sync_directory(self._directory.path)
        _log.error(
            "no checkpoint to judge a file without a whole first frame by; it was set aside",
            extra={"path": f"{path}.cut-0"},
        )

    # -- what there is ----------------------------------------------------------------------

    def _without_files(self) -> Recovered:
        state, gaps = self._state, self._gaps
        self._codec = self._known_codec()
        seq = gaps.seq if gaps is not None else 0
        if state is None:
            return Recovered(next_offset=self._floor, active_seq=seq)
        floor = self._floor if gaps is not None else 0
        if state.synced > max(state.checkpoint.start_offset, floor):
            # The checkpoint proves that there were frames. The next offset stays beyond them.
            self._add_damage(
                state.checkpoint.file_seq,
                f"no log file is left, the log was durable up to {state.synced}",
                offset=state.checkpoint.start_offset,
            )
        return Recovered(
            next_offset=max(state.synced, floor),
            active_seq=max(seq, state.checkpoint.file_seq + (1 if self._damage else 0)),
        )

    def _check_sequence(self, seqs: list[int]) -> None:
        for before, after in pairwise(seqs):
            if after != before + 1:
                self._add_damage(
                    before + 1,
                    f"file missing between {format_log_name(before)} and {format_log_name(after)}",
                )

    def _add_damage(
        self, seq: int, reason: str, *, position: int = 0, offset: int | None = None
    ) -> None:
        path = self._directory.log_path(seq)
        self._damage.append(Damage(path=path, position=position, offset=offset, reason=reason))

    def _read_first_offsets(self, seqs: list[int]) -> dict[int, int]:
        """The offset of each file's first frame, where that is whole.

        The checkpoint names only files whose first frame is durable: one that says something else
        now is damaged.
        """
        hints = self._hints
        found: dict[int, int] = {}
        for seq in seqs:
            frame = self._first_frame(seq)
            if frame is None:
                continue
            found[seq] = hints.get(seq, frame.offset)
            if frame.offset != found[seq]:
                self._add_damage(
                    seq,
                    f"the first frame says {frame.offset}, the checkpoint {found[seq]}",
                    offset=found[seq],
                )
        return found

    def _order_files(self, seqs: list[int], found: dict[int, int]) -> list[WalFile]:
        """The files with the offsets at which they begin.

        A file before one with a frame was synced whole before that one was made: a bad first frame
        there is damage, unless the file's range is empty. (It is when a failed sync made its
        successor begin where it did itself.)
        """
        hints = self._hints
        files: list[WalFile] = []
        for at, seq in enumerate(seqs):
            begin = found.get(seq)
            if begin is None:
                begin = hints.get(seq)
                if begin is None and files and files[-1].seq == seq - 1:
                    begin = self._end_of(files[-1])
                is_last = seq == seqs[-1]  # then it is the only one
                next_begin = next(
                    (found[later] for later in seqs[at + 1 :] if later in found), None
                )
                if is_last and begin is None:
                    begin = self._begin_of_only_file(seq)
                elif not is_last and (begin is None or begin != next_begin):
                    self._add_damage(seq, "bad first frame", offset=begin)
            if begin is not None:
                files.append(WalFile(seq, begin))
        for before, after in pairwise(files):
            if after.first_offset < before.first_offset:
                self._add_damage(
                    after.seq,
                    f"the file begins at offset {after.first_offset}, the one before it at "
                    f"{before.first_offset}",
                    offset=after.first_offset,
                )
        checkpoint = self._state.checkpoint if self._state is not None else None
        start = checkpoint.start_offset if checkpoint is not None else None
        if self._gaps is not None and (
            self._judged or (checkpoint is not None and checkpoint.file_seq < self._gaps.seq)
        ):
            start = self._gaps.next_offset
        if start is not None and files[0].first_offset > start:
            self._add_damage(max(0, files[0].seq - 1), "file missing", offset=start)
        return files

    def _begin_of_only_file(self, seq: int) -> int:
        """Where a log begins whose only file has no whole frame.

        Where the checkpoint says, if the log was empty then; at 0, if it is the first file.
        """
        state = self._state
        if self._gaps is not None and seq == self._gaps.seq:
            return self._gaps.next_offset
        if state is not None and state.synced == state.checkpoint.start_offset:
            return state.synced
        if seq == 0:
            return self._floor
        known = self._state.synced if self._state is not None else 0
        self._add_damage(
            seq, "the only file has no whole frame, and nothing says where it began", offset=known
        )
        return known

    def _end_of(self, file: WalFile) -> int:
        scan, _ = self._scan(file, trusted_position=None)
        return scan.next_offset if scan.next_offset is not None else file.first_offset

    def _first_frame(self, seq: int) -> Frame | None:
        with self._directory.open_log(seq) as file:
            decoded = decode_frame(file.read_at(0, _FIRST_READ_BYTES))
            if isinstance(decoded, NeedMore) and decoded.size_bytes > _FIRST_READ_BYTES:
                decoded = decode_frame(file.read_at(0, decoded.size_bytes))
            return decoded if isinstance(decoded, Frame) else None

    def _known_codec(self, *files: WalFile) -> Codec | None:
        """The checkpoint's codec, or that of the first frame."""
        if self._state is not None:
            return self._state.codec
        for file in (*self._judged, *files):
            frame = self._first_frame(file.seq)
            if frame is not None:
                return recognise(frame.body, offset=frame.offset)
        return None

    # -- the tail ---------------------------------------------------------------------------

    def _scan(
        self, file: WalFile, *, trusted_position: int | None
    ) -> tuple[FrameWalk, SparseIndex]:
        """Scans a file from its last index entry (not behind `trusted_position`) to its end."""
        index = SparseIndex(self._directory.load_index(file.seq))
        index.saved_count = len(index.entries)
        with self._directory.open_log(file.seq) as handle:
            size = handle.size()
            limit = size if trusted_position is None else min(trusted_position, size)
            index.cut(limit + 1)
            if index.entries and not _points_at_frame(handle, index, file):
                index = SparseIndex()
            if index.entries:
                offset, position, time_max = index.entries[-1]
            else:
                position, offset, time_max = 0, file.first_offset, 0
            builder = _IndexBuilder(index, self._codec, time_max)
            scan = scan_file(handle, position=position, expected_offset=offset, visit=builder.visit)
        self._time_max = builder.publish_time_max
        return scan, index

    def _scan_last(self, files: list[WalFile], durable: int) -> Recovered:
        state = self._state
        last = files[-1]
        trusted = 0
        is_behind = False
        if state is not None:
            # The checkpoint speaks of this file, of a later one that holds nothing (then this one
            # was synced whole), or of an earlier one.
            if state.checkpoint.file_seq == last.seq:
                trusted = state.synced_position
            is_behind = state.checkpoint.file_seq > last.seq
        scan, index = self._scan(last, trusted_position=None if is_behind else trusted)
        next_offset = scan.next_offset if scan.next_offset is not None else last.first_offset
        path = self._directory.log_path(last.seq)
        if next_offset < durable or scan.end < trusted:
            self._add_damage(
                last.seq,
                f"{scan.bad.reason}, durable up to {durable}",
                position=scan.end,
                offset=next_offset,
            )
        if self._damage:
            # Whatever follows the damage stays where it is. Offsets up to `durable` were given
            # out, and those of frames behind the damage, so the next one is beyond them even
            # though nothing will be appended.
            end_behind, has_unread_bytes = self._scan_behind(last, scan)
            return Recovered(
                files=_ascending(files),
                has_unread_bytes=has_unread_bytes,
                next_offset=max(end_behind, next_offset, durable),
                active_seq=last.seq,
                end_position=scan.end,
                index=index,
                publish_time_max=self._time_max,
            )
        if self._untrusted_from is not None:
            # Files before the last were synced whole, whatever happened to the last one.
            untrusted_from = max(self._untrusted_from, last.first_offset)
            if next_offset > untrusted_from:
                return self._rehome(files, untrusted_from)
        self._finish_last(path, scan, durable, trusted)
        return Recovered(
            files=tuple(files),
            next_offset=next_offset,
            active_seq=last.seq,
            end_position=scan.end,
            index=index,
            publish_time_max=self._time_max,
            cut_bytes=scan.size - scan.end,
        )

    def _scan_behind(self, file: WalFile, scan: FrameWalk) -> tuple[int, bool]:
        """The offset after the last whole frame behind damage, or 0; and `has_unread_bytes`.

        There are unread bytes if the damage is more than one frame, by its own length, and is not
        followed by whole frames to the end.
        """
        low = (scan.next_offset if scan.next_offset is not None else file.first_offset) + 1
        end = 0
        with self._directory.open_log(file.seq) as handle:
            header = handle.read_at(scan.end, FRAME_HEADER_SIZE)
            explained = scan.end + FRAME_HEADER_SIZE + int.from_bytes(header[8:12], "little")
            position = scan.end + 1
            size = handle.size()
            while found := search_frame(handle.read_at, position, offset_min=low, size_bytes=size):
                run = scan_file(handle, position=found.position, expected_offset=found.offset)
                end = max(end, run.next_offset or 0)
                low, position, explained = end, run.end + 1, run.end
            return end, scan.end < handle.size() != explained

    def _finish_last(self, path: str, scan: FrameWalk, durable: int, trusted: int) -> None:
        """Cuts the torn tail, if there is one, and makes what remains durable."""
        if scan.is_clean and scan.end == trusted and self._state is not None:
            return
        with closing(self._directory.fs.open(path)) as file:
            if not scan.is_clean:
                if self._state is None:
                    self._set_aside(file, scan)
                failpoints.reach("wal.recovery_before_cut")
                file.truncate(scan.end)
                failpoints.reach("wal.recovery_after_cut")
                _log.warning(
                    "torn tail cut",
                    extra={
                        "path": path,
                        "position": scan.end,
                        "offset": scan.next_offset,
                        "cut_bytes": scan.size - scan.end,
                        "reason": scan.bad.reason,
                    },
                )
            self._sync_or_poison(file, durable)

    def _sync_or_poison(self, file: File, durable: int) -> None:
        try:
            file.sync()
        except IsterError as error:
            state = self._state
            if state is not None:
                _save_poisoned(self._directory, state)
            raise UntrustedTailError(error, synced=durable) from error

    def _set_aside(self, file: File, scan: FrameWalk) -> None:
        """Keeps a copy of the tail that is about to be cut, when no checkpoint can judge it.

        Without a durable watermark a torn tail and damage look the same. The log goes on as after
        a crash, which is by far the likelier cause, and what it leaves out stays on disk.
        """
        copy_path = f"{file.path}.cut-{scan.end}"
        copy = self._directory.fs.create(copy_path)
        try:
            position = 0
            while tail := file.read_at(scan.end + position, RECOVERY_CHUNK_BYTES):
                copy.write_at(position, [tail])
                position += len(tail)
            copy.sync()
        finally:
            copy.close()
        self._directory.fs.sync_directory(self._directory.path)
        _log.error(
            "no checkpoint to judge the tail by; it was set aside",
            extra={"path": copy_path, "position": scan.end, "offset": scan.next_offset},
        )

    def _rehome(self, files: list[WalFile], untrusted_from: int) -> Recovered:
        """Copies the frames from `untrusted_from` on into a new file, which is synced.

        They read back whole, but the sync that should have stored them failed, so the disk may
        not have them and syncing the old file again would prove nothing.
        """
        last = files[-1]
        seq = last.seq + 1
        # Under a name that no recovery takes for a log until the copy is whole and durable.
        temporary = f"{self._directory.log_path(seq)}.tmp"
        target = self._directory.fs.create(temporary)
        try:
            copier = _Copier(target, untrusted_from, self._codec)
            with self._directory.open_log(last.seq) as source:
                scan_file(source, position=0, expected_offset=last.first_offset, visit=copier.visit)
            self._sync_or_poison(target, untrusted_from)
        finally:
            target.close()
        self._directory.fs.rename(temporary, self._directory.log_path(seq))
        self._directory.fs.sync_directory(self._directory.path)
        self._truncate_quietly(last.seq, copier.source_position)
        _log.error(
            "frames after a failed sync were copied into a new file",
            extra={"path": target.path, "offset": untrusted_from, "frames": copier.frames},
        )
        return Recovered(
            files=(*files, WalFile(seq, untrusted_from)),
            next_offset=untrusted_from + copier.frames,
            active_seq=seq,
            end_position=copier.position,
            index=copier.builder.index,
            publish_time_max=copier.builder.publish_time_max,
        )

    def _truncate_quietly(self, seq: int, position: int | None) -> None:
        """Drops from the old file what the new one holds, if its disk still takes that.

        For tidiness alone: a file ends where its successor begins, whatever it holds.
        """
        if position is None:
            return
        try:
            with closing(self._directory.fs.open(self._directory.log_path(seq))) as file:
                file.truncate(position)
                file.sync()
        except IsterError:
            _log.warning("old tail left in place", extra={"path": self._directory.log_path(seq)})


def _ascending(files: list[WalFile]) -> tuple[WalFile, ...]:
    """The files without those that begin after a later one: a rewritten log's new file counts."""
    ascending: list[WalFile] = []
    for file in files:
        while ascending and ascending[-1].first_offset > file.first_offset:
            ascending.pop()
        ascending.append(file)
    return tuple(ascending)


class _IndexBuilder:
    """Adds index entries and keeps the highest publish time while a file is scanned."""

    def __init__(self, index: SparseIndex, codec: Codec | None, publish_time_max: int) -> None:
        self.index = index
        self.publish_time_max = publish_time_max
        self._codec = codec

    def visit(self, chunk: bytes, position: int, scan: Scan) -> None:
        offset = (scan.next_offset or 0) - len(scan.starts)
        ends = [*scan.starts[1:], scan.end]
        for start, end in zip(scan.starts, ends, strict=True):
            if self.index.wants(position + start):
                self.index.add(offset, position + start, self.publish_time_max)
            self._record_time(chunk, start + FRAME_HEADER_SIZE, end, offset)
            offset += 1

    def _record_time(self, chunk: bytes, start: int, end: int, offset: int) -> None:
        if self._codec is None:
            self._codec = recognise(chunk[start:end], offset=offset)
            if self._codec is None:
                return
        try:
            time = decode_publish_time(chunk, self._codec, start=start, end=end)
        except CorruptDataError:
            # A frame with a good crc and a foreign body: its reader will say so by name.
            return
        self.publish_time_max = max(self.publish_time_max, time)


class _Copier:
    """Writes the frames from an offset on into another file."""

    def __init__(self, target: File, start_offset: int, codec: Codec | None) -> None:
        self._target = target
        self._start_offset = start_offset
        self.builder = _IndexBuilder(SparseIndex(), codec, 0)
        self.position = 0
        self.frames = 0
        self.source_position: int | None = None
        """Where, in the file copied from, the first frame copied begins."""

    def visit(self, chunk: bytes, position: int, scan: Scan) -> None:
        first = (scan.next_offset or 0) - len(scan.starts)
        skip = max(0, self._start_offset - first)
        if skip >= len(scan.starts):
            return
        begin = scan.starts[skip]
        if self.source_position is None:
            self.source_position = position + begin
        data = chunk[begin : scan.end]
        self._target.write_at(self.position, [data])
        moved = Scan(
            starts=[start - begin for start in scan.starts[skip:]],
            end=scan.end - begin,
            next_offset=scan.next_offset,
            stop=scan.stop,
        )
        self.builder.visit(data, self.position, moved)
        self.position += len(data)
        self.frames += len(moved.starts)


def build_index(directory: WalDirectory, file: WalFile, codec: Codec | None) -> SparseIndex:
    """Builds the index of a rotated file that lost its own, by scanning it once, and saves it."""
    builder = _IndexBuilder(SparseIndex(), codec, 0)
    with directory.open_log(file.seq) as handle:
        scan = scan_file(handle, position=0, expected_offset=file.first_offset, visit=builder.visit)
    index = builder.index
    if scan.next_offset is not None and scan.is_clean and scan.frames:
        index.add(scan.next_offset, scan.end, builder.publish_time_max)
    if index.entries:
        try:
            directory.save_index(file.seq, index.entries, start=0)
        except IsterError as error:
            _log.warning("index not saved", extra={"path": error.path, "error": str(error)})
    return index


def _points_at_frame(handle: File, index: SparseIndex, file: WalFile) -> bool:
    """Whether the first and the last entry agree with the file."""
    first, last = index.entries[0], index.entries[-1]
    if first.offset != file.first_offset or first.position != 0:
        return False
    head = handle.read_at(last.position, FRAME_HEADER_SIZE)
    # At the end of the file there is no frame yet to compare with.
    return not head or int.from_bytes(head[:8], "little") == last.offset


def _save_poisoned(directory: WalDirectory, state: WalState) -> None:
    """Records that the tail is not to be trusted, if the disk still takes it."""
    try:
        directory.save_state(replace(state, is_poisoned=True))
    except (IsterError, NotFoundError):
        _log.exception("the poisoned state could not be recorded", extra={"path": directory.path})
