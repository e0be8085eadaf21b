"""Examines WAL files and objects from outside: read-only, without a lock, in bounded memory.

    whole frames ─► bad range ─► whole frames ─► … ─► torn tail

Owns: which files belong together, walking them, and the word for a bad range. Does not own: how it
is shown, and what is done about it; opening a topic (`ister.wal.recovery`) decides by itself and
cuts or quarantines.

A bad range is `torn` if it begins at or above the durable watermark: a crash explains it, and
opening the topic cuts it off. Below the watermark it is `damage`. Without a readable checkpoint,
bad bytes at the end of the last file count as torn if no whole frame follows them. Damage whose
offsets an operator has given up since (`wal.gaps`) is `given up`.

The log may be open in another process. The checkpoint is read first, so that every frame below its
watermark is in the files by the time they are read; files that are trimmed meanwhile are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from ister.base.limits import CHECKPOINT_BYTES_MAX
from ister.base.model import Codec
from ister.bucket.names import ObjectName
from ister.errors import CorruptDataError, NotFoundError, UnsupportedVersionError
from ister.format.checkpoint import (
    UploaderCheckpoint,
    WalState,
    decode_uploader_checkpoint,
    decode_wal_checkpoint,
)
from ister.format.frame import FRAME_HEADER_SIZE, Scan
from ister.format.frame_search import read_frame
from ister.format.frame_walk import BadBytes, FrameWalk, Readable
from ister.format.gaps import Gaps
from ister.format.message import decode_message, decode_publish_time, recognise
from ister.fs.local import LocalFileSystem
from ister.fs.whole_files import read_file
from ister.wal.directory import (
    CHECKPOINT_NAME,
    LOCK_NAME,
    UPLOADER_CHECKPOINT_NAME,
    WalDirectory,
    format_log_name,
    parse_log_name,
)

__all__ = [
    "CHECKPOINT_NAME",
    "UPLOADER_CHECKPOINT_NAME",
    "BadRange",
    "FileSurvey",
    "FrameLine",
    "Kind",
    "Listing",
    "Readable",
    "TopicSurvey",
    "UploaderCheckpoint",
    "WalState",
    "examine_frames",
    "find_topics",
    "load_checkpoint",
    "survey",
]

_DEPTH_MAX: Final = 3
"""A data directory holds `wal/namespace/topic`; no files of Ister are deeper."""


class Kind(StrEnum):
    """What a bad range is."""

    DAMAGE = "damage"
    TORN = "torn"
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRange:
    """Bytes between whole frames, or behind the last one, that are not frames."""

    position: int
    end_position: int
    offset: int | None
    """The offset that should stand there; None if nothing says so."""
    end_offset: int | None
    """The offset of the next whole frame; None if there is none."""
    reason: str
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLine:
    """One whole frame; the last two are None if its body is not a message."""

    offset: int
    position: int
    size: int
    publish_time: int | None
    producer: str | None


@dataclass(slots=True, kw_only=True)
class FileSurvey:
    """What one file holds."""

    name: str
    path: str
    topic: str
    first_offset: int | None = None
    """Of the first whole frame, or where the file should begin."""
    next_offset: int | None = None
    """After the last whole frame that counts: frames behind a torn one do not."""
    frames: int = 0
    bytes: int = 0
    is_missing: bool = False
    codec: Codec | None = None
    publish_time_min: int | None = None
    publish_time_max: int | None = None
    undecodable: int = 0
    """Frames whose crc holds and whose body is not a message in the codec."""
    damage: list[BadRange] = field(default_factory=list)
    listed: list[FrameLine] = field(default_factory=list)

    @property
    def is_damaged(self) -> bool:
        """Whether something is wrong that a crash does not explain."""
        return any(bad.kind is Kind.DAMAGE for bad in self.damage)

    def note(
        self,
        reason: str,
        positions: tuple[int, int],
        offset: int | None,
        end_offset: int | None,
        kind: Kind = Kind.DAMAGE,
    ) -> None:
        """Adds a bad range."""
        position, end_position = positions
        self.damage.append(
            BadRange(
                position=position,
                end_position=end_position,
                offset=offset,
                end_offset=end_offset,
                reason=reason,
                kind=kind,
            )
        )


@dataclass(slots=True, kw_only=True)
class TopicSurvey:
    """A topic's directory and its checkpoint."""

    topic: str
    path: str
    checkpoint: str
    """`ok`, `missing`, `damaged`, or which version cannot be read."""
    state: WalState | None
    files: list[FileSurvey] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Listing:
    """Which frames to list one by one, in all files together."""

    start_offset: int = 0
    remaining: int = 0


def find_topics(path: str) -> list[str]:
    """The topic directories at or below `path`, sorted."""
    fs = LocalFileSystem()
    found: list[str] = []
    is_ours = False

    def walk(directory: str, depth: int) -> None:
        nonlocal is_ours
        names = fs.list_directory(directory)
        is_ours = is_ours or LOCK_NAME in names
        if CHECKPOINT_NAME in names or any(parse_log_name(name) is not None for name in names):
            found.append(directory)
        elif depth < _DEPTH_MAX:
            for name in names:
                child = os.path.join(directory, name)
                if os.path.isdir(child) and not os.path.islink(child):
                    walk(child, depth + 1)

    walk(path, 0)
    if not found and not is_ours:
        raise NotFoundError(
            "no WAL files here",
            path=path,
            hint="give a WAL file, a topic's directory, or a data directory",
        )
    return sorted(found)


def load_checkpoint(path: str) -> WalState | UploaderCheckpoint | None:
    """A checkpoint of either kind; None if it is damaged."""
    data = read_file(LocalFileSystem(), path, CHECKPOINT_BYTES_MAX + 1)
    if len(data) > CHECKPOINT_BYTES_MAX:
        return None
    return decode_wal_checkpoint(data) or decode_uploader_checkpoint(data)


def survey(
    directory_path: str, *, only: str | None = None, listing: Listing | None = None
) -> TopicSurvey:
    """Examines the files of a topic.

    `only`: the name of the one file to look at; the others only serve to judge it.
    `listing`: frames to list; counted down.
    """
    directory = WalDirectory(LocalFileSystem(), directory_path)
    parts = directory_path.rstrip("/").split("/")
    result = TopicSurvey(
        topic=f"/{parts[-2]}/{parts[-1]}" if len(parts) > 1 else parts[-1],
        path=directory_path,
        checkpoint="ok",
        state=None,
    )
    try:
        result.state = directory.load_state()
        if result.state is None:
            exists = directory.fs.exists(directory.checkpoint_path)
            result.checkpoint = "damaged" if exists else "missing"
    except UnsupportedVersionError as error:
        result.checkpoint = error.message
    _TopicWalk(directory, result, listing or Listing()).run(only)
    if (gaps := directory.load_gaps()) is not None:
        for file in result.files:
            if (parse_log_name(file.name) or 0) < gaps.seq:
                file.damage = [
                    replace(bad, kind=Kind.GIVEN_UP) if _is_given_up(file, bad, gaps) else bad
                    for bad in file.damage
                ]
    return result


def _is_given_up(file: FileSurvey, bad: BadRange, gaps: Gaps) -> bool:
    if parse_log_name(file.name) not in dict(gaps.files) or bad.offset is None:
        return True  # nothing of it was readable
    return any(start <= bad.offset < end for start, end in gaps.ranges)


def examine_frames(
    file: Readable, entry: FileSurvey, expected: ObjectName | None, listing: Listing
) -> None:
    """Examines the frames of an object. Objects are never torn: a bad range is damage.

    `expected`: the offsets that its name says, if it says any.
    `listing`: frames to list; counted down.
    """
    walk = _FileWalk(file, entry, listing, durable=None, successor=None, is_last=False)
    walk.run(find_first_offset(file, expected.start if expected is not None else None))
    if expected is None:
        return
    first, end = entry.first_offset or 0, entry.next_offset or 0
    is_open = bool(entry.damage) and entry.damage[-1].end_offset is None
    if first != expected.start:
        reason = f"the name says {expected.start}, the first frame {first}"
        entry.note(reason, (0, entry.bytes), expected.start, None)
    elif end > expected.end or (end < expected.end and not is_open):
        reason = f"the name says up to offset {expected.end}, the frames end at {end}"
        end_offset = expected.end if end < expected.end else None
        entry.note(reason, (entry.bytes, entry.bytes), end, end_offset)


def find_first_offset(file: Readable, hint: int | None) -> int | None:
    """The offset at which a file begins: as checkpoint or name say, unless two frames differ.

    One alone does not tell: the offset in a header has no checksum.
    """
    first = read_frame(file.read_at, 0)
    if first is None or first.offset == hint:
        return hint
    second = read_frame(file.read_at, first.end)
    is_sure = second is not None and second.offset == first.offset + 1
    return first.offset if is_sure or (hint is None and second is None) else hint


class _TopicWalk:
    """A survey of one directory in progress."""

    def __init__(self, directory: WalDirectory, result: TopicSurvey, listing: Listing) -> None:
        self._directory = directory
        self._result = result
        self._state = result.state
        self._listing = listing
        self._hints = result.state.first_offsets() if result.state is not None else {}

    def run(self, only: str | None) -> None:
        if only is not None and parse_log_name(only) is None:
            # A copy under another name: no checkpoint describes it.
            self._state, self._hints = None, {}
            self._survey_file(self._new(only), expected=None, successor=None, is_last=True)
            return
        seqs = self._directory.log_seqs()
        firsts = self._first_offsets(seqs)
        before: FileSurvey | None = None
        for seq in self._with_missing(seqs):
            name = format_log_name(seq)
            if only is not None and only != name:
                continue
            entry = self._new(name)
            if seq not in seqs:
                self._report_missing(entry, seq)
                before = None
                continue
            expected = firsts.get(seq)
            if expected is None:
                expected = before.next_offset if before is not None else None
            self._survey_file(
                entry,
                expected=0 if expected is None and seq == 0 else expected,
                successor=firsts.get(seq + 1),
                is_last=seq == seqs[-1],
            )
            before = entry

    def _new(self, name: str) -> FileSurvey:
        return FileSurvey(
            name=name,
            path=f"{self._directory.path}/{name}",
            topic=self._result.topic,
            codec=self._state.codec if self._state is not None else None,
        )

    def _with_missing(self, seqs: list[int]) -> Iterator[int]:
        """The numbers of all files that should be there."""
        state = self._state
        if state is not None and state.synced > 0:
            active = state.checkpoint.file_seq
            known = {
                rotated.seq
                for rotated in state.checkpoint.rotated_files
                if rotated.first_offset >= state.checkpoint.start_offset
            }
            if active not in seqs and state.checkpoint.active_file_first_offset is not None:
                known.add(active)
            seqs = sorted({*seqs, *known})
        if not seqs:
            return
        yield from range(seqs[0], seqs[-1] + 1)

    def _report_missing(self, entry: FileSurvey, seq: int) -> None:
        entry.is_missing = True
        entry.first_offset = self._hints.get(seq)
        following = self._hints.get(seq + 1)
        entry.note("file missing", (0, 0), entry.first_offset, following)
        self._result.files.append(entry)

    def _first_offsets(self, seqs: list[int]) -> dict[int, int]:
        """Where each file begins: by the checkpoint, or by its first frame if that is whole."""
        firsts = {seq: self._hints[seq] for seq in seqs if seq in self._hints}
        for seq in seqs:
            if seq in firsts:
                continue
            try:
                with self._directory.open_log(seq) as file:
                    frame = read_frame(file.read_at, 0)
            except NotFoundError:
                continue
            if frame is not None:
                firsts[seq] = frame.offset
        return firsts

    def _survey_file(
        self, entry: FileSurvey, *, expected: int | None, successor: int | None, is_last: bool
    ) -> None:
        try:
            file = self._directory.fs.open_read(entry.path)
        except NotFoundError:
            return  # trimmed since the directory was read
        with closing(file):
            walk = _FileWalk(
                file,
                entry,
                self._listing,
                durable=self._state.synced if self._state is not None else None,
                successor=successor,
                is_last=is_last,
            )
            walk.run(expected)
        self._result.files.append(entry)


class _FileWalk:
    """One file: whole frames counted, bad ranges noted."""

    def __init__(
        self,
        file: Readable,
        entry: FileSurvey,
        listing: Listing,
        *,
        durable: int | None,
        successor: int | None,
        is_last: bool,
    ) -> None:
        self._file = file
        self._entry = entry
        self._listing = listing
        self._durable = durable
        self._successor = successor
        self._is_last = is_last
        self._is_cut_off = False

    def run(self, expected: int | None) -> None:
        entry = self._entry
        entry.first_offset = entry.next_offset = expected
        walk = FrameWalk(self._file, expected_offset=expected, on_damage=self._note)
        for chunk, position, scan in walk:
            entry.next_offset = scan.next_offset
            self._visit(chunk, position, scan)
        entry.bytes = walk.size
        if not self._is_cut_off:
            self._check_end()

    def _note(self, bad: BadBytes) -> bool:
        """Adds a bad range; whether frames behind it count."""
        if self._is_superseded(bad.offset):
            return False
        found, reason = bad.behind, bad.reason
        kind = self._judge(bad.offset, is_followed=found is not None)
        if kind is Kind.TORN and found is not None:
            reason += (
                f"; a whole frame follows at position {found.position}, opening cuts it off too"
            )
            found = None
        self._entry.note(
            reason,
            (bad.position, found.position if found else bad.size),
            bad.offset,
            found.offset if found else None,
            kind,
        )
        self._is_cut_off = found is None
        return found is not None

    def _check_end(self) -> None:
        """Reports missing frames at the end of a file whose frames are all whole."""
        entry = self._entry
        promised = self._durable if self._is_last else self._successor
        reached = entry.next_offset or 0
        if promised is None or reached >= promised:
            return
        what = "the log was durable up to" if self._is_last else "the next file begins at"
        reason = f"the frames end here, {what} offset {promised}"
        entry.note(reason, (entry.bytes, entry.bytes), reached, promised)

    def _is_superseded(self, offset: int | None) -> bool:
        """Whether the next file holds this offset: then it counts, whatever stands here."""
        return offset is not None and self._successor is not None and offset >= self._successor

    def _judge(self, offset: int | None, *, is_followed: bool) -> Kind:
        if not self._is_last:
            return Kind.DAMAGE  # it was synced whole before its successor was made
        if self._durable is None:
            return Kind.DAMAGE if is_followed else Kind.TORN
        is_above = offset is None or offset >= self._durable
        return Kind.TORN if is_above else Kind.DAMAGE

    # -- whole frames -----------------------------------------------------------------------

    def _visit(self, chunk: bytes, position: int, scan: Scan) -> None:
        entry = self._entry
        count = len(scan.starts)
        first = (scan.next_offset or 0) - count
        if entry.first_offset is None:
            entry.first_offset = first
        entry.frames += count
        ends = [*scan.starts[1:], scan.end]
        for offset, (start, end) in enumerate(zip(scan.starts, ends, strict=True), first):
            body = chunk[start + FRAME_HEADER_SIZE : end]
            time = self._publish_time(body, offset)
            if self._listing.remaining and offset >= self._listing.start_offset:
                self._list(offset, position + start, body, time)

    def _publish_time(self, body: bytes, offset: int) -> int | None:
        entry = self._entry
        if entry.codec is None:
            entry.codec = recognise(body, offset=offset)
        if entry.codec is None:
            entry.undecodable += 1
            return None
        try:
            time = decode_publish_time(body, entry.codec)
        except CorruptDataError:
            entry.undecodable += 1
            return None
        if entry.publish_time_min is None or time < entry.publish_time_min:
            entry.publish_time_min = time
        if entry.publish_time_max is None or time > entry.publish_time_max:
            entry.publish_time_max = time
        return time

    def _list(self, offset: int, position: int, body: bytes, time: int | None) -> None:
        producer: str | None = None
        if self._entry.codec is not None:
            try:
                producer = decode_message(body, self._entry.codec).producer_name
            except CorruptDataError:
                time = None
        self._listing.remaining -= 1
        self._entry.listed.append(
            FrameLine(
                offset=offset,
                position=position,
                size=FRAME_HEADER_SIZE + len(body),
                publish_time=time,
                producer=producer,
            )
        )
