"""Whether an object is whole, and its descriptor true: what `scrub` asks about each of them.

    bytes ─► every frame, or every row group ─► against the descriptor ─► problems, one by one

Owns: the check, and the true descriptor of an object whose own is wrong. Does not own: what is done
about it. Nothing is changed here.

Where a frame is damaged the check continues behind it, so that a report says which offsets are lost
and not only where the first one is. An object whose frames are all whole and have exactly the
descriptor's offsets is whole, whatever else the descriptor says about it: frames carry checksums of
their own, and so do row groups.

Memory: two chunks, or a row group.
"""

from __future__ import annotations

import errno
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import Codec, TopicName
from ister.bucket.check import ObjectFile, load_archives
from ister.bucket.chunks import ObjectPart, fetch_chunks
from ister.bucket.names import ObjectName, object_key, parse_object_id
from ister.errors import CorruptDataError, DiskError, NotFoundError
from ister.format.arrow.decode import ColumnarDecoder, DecodedFrames
from ister.format.crc import Buffer, crc32
from ister.format.descriptor import (
    FORMAT_EXPRESS,
    FORMAT_PARQUET,
    ObjectDescriptor,
    format_checksum,
)
from ister.format.frame import (
    FRAME_HEADER_SIZE,
    Corrupt,
    Frame,
    NeedMore,
    decode_frame,
    scan_frames,
)
from ister.format.frame_walk import BadBytes, FrameWalk
from ister.format.message import decode_message, decode_publish_times, recognise
from ister.objectstore.base import ObjectInfo, ObjectStore
from ister.rescue.examine_object import walk_archive
from ister.rescue.rebuild import describe_object

if TYPE_CHECKING:
    from ister.format.archive import ArchiveReader, RowGroup

_PROBLEMS_MAX: Final = 16
# The last millisecond that columns can tell.
_Array: TypeAlias = npt.NDArray[np.int64]
_CALENDAR_END_MS: Final = 253_402_300_799_999


class ProblemKind:
    """What can be wrong with an object, as reports say it."""

    DAMAGED: Final = "damaged"
    TRUNCATED: Final = "truncated"
    MISSING: Final = "missing"
    WRONG_DESCRIPTOR: Final = "wrong_descriptor"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectProblem:
    """Something wrong with an object: the offsets `start` up to, not including, `end`."""

    kind: str
    reason: str
    start: int
    end: int
    position: int | None = None
    """The byte in the object."""
    offset: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was found of one object."""

    bytes: int = 0
    messages: int = 0
    """Those that are whole."""
    problems: tuple[ObjectProblem, ...] = ()
    right: ObjectDescriptor | None = None
    """The true descriptor, where only the descriptor is wrong."""


class ObjectChecker:
    """Checks the objects of one topic. Used by one thread at a time."""

    def __init__(
        self,
        topic: TopicName,
        store: ObjectStore,
        *,
        chunk_bytes: int,
        index_every_messages: int,
        ahead: Executor | None,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._topic = topic
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._every = index_every_messages
        self._ahead = ahead
        self._clock = clock
        self._metrics = metrics

    def check(self, described: ObjectDescriptor) -> Checked:
        """Reads an object whole, and compares it with its descriptor."""
        key = object_key(self._topic, described.object_id)
        try:
            try:
                info = self._store.stat(key)
            except CorruptDataError as error:
                # The express object ends before the run does.
                return self._whole_problem(ProblemKind.TRUNCATED, error.message, described)
            if described.format == FORMAT_PARQUET:
                return self._check_archive(key, info, described)
            return self._check_frames(key, info, described)
        except NotFoundError:
            reason = "the object is not in the bucket"
            return self._whole_problem(ProblemKind.MISSING, reason, described)
        except DiskError as error:
            if error.errno != errno.EIO:
                raise
            # A bad sector, or a checksum of the file system.
            return self._whole_problem(ProblemKind.DAMAGED, error.message, described)

    @staticmethod
    def _whole_problem(kind: str, reason: str, described: ObjectDescriptor) -> Checked:
        problem = ObjectProblem(kind=kind, reason=reason, start=described.start, end=described.end)
        return Checked(problems=(problem,))

    # -- frames -----------------------------------------------------------------------------

    def _check_frames(self, key: str, info: ObjectInfo, described: ObjectDescriptor) -> Checked:
        sums = _Sums(str(self._topic), described)
        is_over = self._walk(key, info.size, described, sums)
        if not is_over or sums.bytes != info.size:
            return self._map_damage(key, info.size, described, sums)
        problems, right = sums.bad_bodies, None
        if not problems and (problems := sums.compare()):
            etag = None if described.format == FORMAT_EXPRESS else info.etag
            right = replace(self._describe(described), etag=etag)
        return Checked(
            bytes=info.size,
            messages=sums.messages - len(sums.bad_bodies),
            problems=tuple(problems[:_PROBLEMS_MAX]),
            right=right,
        )

    def _walk(self, key: str, size_bytes: int, described: ObjectDescriptor, sums: _Sums) -> bool:
        """Reads frames for as long as they are whole; whether all of them are."""
        # Where the index says that frames begin nothing has to be carried over; that it says so is
        # no promise.
        cuts = {position for _, position in described.offset_index if 0 < position < size_bytes}
        part = ObjectPart(
            topic=str(self._topic),
            object_id=described.object_id,
            codec=described.codec,
            start=described.start,
            end=described.end,
            index_offset=described.start,
            position=0,
            end_position=size_bytes,
            boundaries=tuple(sorted(cuts)),
        )
        chunks = fetch_chunks(
            self._store,
            key,
            part,
            chunk_bytes=self._chunk_bytes,
            ahead=self._ahead,
            clock=self._clock,
            metrics=self._metrics,
        )
        carry, needed = b"", 0
        with closing(chunks):
            for chunk in chunks:
                data = b"".join((carry, chunk)) if carry else chunk
                if len(data) < needed:
                    carry = bytes(data)
                    continue
                end, stop = sums.add(data)
                if sums.next_offset == described.end:
                    return True
                if isinstance(stop, Corrupt):
                    return False
                carry, needed = bytes(memoryview(data)[end:]), stop.size_bytes
        return False

    def _map_damage(
        self, key: str, size_bytes: int, described: ObjectDescriptor, sums: _Sums
    ) -> Checked:
        """Continues behind damage, and returns which offsets are missing."""
        end = described.end
        problems: list[ObjectProblem] = []

        def add(kind: str, reason: str, position: int, at: int, upto: int) -> None:
            start = described.start if kind == ProblemKind.WRONG_DESCRIPTOR else at
            if len(problems) < _PROBLEMS_MAX:
                problems.append(
                    ObjectProblem(
                        kind=kind,
                        reason=reason,
                        start=start,
                        end=upto,
                        position=position,
                        offset=at,
                    )
                )

        def note(bad: BadBytes) -> bool:
            at = bad.offset or 0
            if isinstance(bad.stop, Corrupt):
                upto = end if bad.behind is None else bad.behind.offset
                add(ProblemKind.DAMAGED, bad.reason, bad.position, at, upto)
                return True
            kind, reason = ProblemKind.DAMAGED, "the object ends in the middle of a frame"
            if bad.position == bad.size and not problems and at == _end_by_name(described):
                kind = ProblemKind.WRONG_DESCRIPTOR
                reason = (
                    f"the object is whole and ends at the offset {at}, its descriptor says {end}"
                )
            elif bad.size < described.size_bytes:
                kind = ProblemKind.TRUNCATED
                reason = (
                    f"the object ends in the middle of its frames: {bad.size} of "
                    f"{described.size_bytes} bytes are there"
                )
            add(kind, reason, bad.position, at, end)
            return False

        walk = FrameWalk(
            ObjectFile(self._store, key, size_bytes),
            position=sums.bytes,
            expected_offset=sums.next_offset,
            end_offset=end,
            chunk_bytes=self._chunk_bytes,
            on_damage=note,
        )
        messages = sums.messages + sum(len(scan.starts) for _, _, scan in walk)
        size_bytes = walk.size
        if [problem.kind for problem in problems] == [ProblemKind.WRONG_DESCRIPTOR]:
            return self._as_named(size_bytes, described, problems, messages)
        if (walk.next_offset or 0) >= end and walk.end < size_bytes:
            following = decode_frame(
                self._store.read(key, walk.end, self._chunk_bytes), expected_offset=end
            )
            if isinstance(following, Frame):
                reason = f"the object has frames beyond the offset {end}, where its descriptor ends"
                add(ProblemKind.WRONG_DESCRIPTOR, reason, walk.end, end, end)
                return self._as_named(size_bytes, described, problems, messages)
            reason = f"{size_bytes - walk.end} bytes come after the last frame"
            add(ProblemKind.DAMAGED, reason, walk.end, end, end)
        return Checked(bytes=size_bytes, messages=messages, problems=tuple(problems))

    def _as_named(
        self,
        size_bytes: int,
        described: ObjectDescriptor,
        problems: list[ObjectProblem],
        messages: int,
    ) -> Checked:
        """An object whose name and descriptor do not agree: where it is what its name says."""
        right = None
        end = _end_by_name(described)
        if len(problems) == 1 and end is not None:
            try:
                right = self._describe(replace(described, end=end))
            except CorruptDataError:
                right = None
        return Checked(bytes=size_bytes, messages=messages, problems=tuple(problems), right=right)

    def _describe(self, described: ObjectDescriptor) -> ObjectDescriptor:
        right = describe_object(
            self._store,
            self._topic,
            described.object_id,
            ObjectName(start=described.start, end=described.end, epoch=described.epoch),
            incarnation=described.incarnation,
            created_at=described.created_at,
            index_every_messages=self._every,
        )
        return replace(
            right, etag=None, format=described.format, arrival_time_max=described.arrival_time_max
        )

    # -- Parquet ----------------------------------------------------------------------------

    def _check_archive(self, key: str, info: ObjectInfo, described: ObjectDescriptor) -> Checked:
        """The footer, every row group by its crc and by the checksums of its pages."""
        problems: list[ObjectProblem] = []
        try:
            archive: ArchiveReader = load_archives().ArchiveReader(
                lambda position, size: self._store.read(key, position, size),
                info.size,
                path=key,
                topic=str(self._topic),
            )
        except CorruptDataError as error:
            is_short = info.size < described.size_bytes
            reason = f"{error.message}; {info.size} of {described.size_bytes} bytes are there"
            problems.append(
                ObjectProblem(
                    kind=ProblemKind.TRUNCATED if is_short else ProblemKind.DAMAGED,
                    reason=reason if is_short else error.message,
                    start=described.start,
                    end=described.end,
                    position=info.size if is_short else error.position,
                    offset=described.start,
                )
            )
            return Checked(bytes=info.size, problems=tuple(problems))
        if (archive.start, archive.end) != (described.start, described.end):
            problems.append(
                ObjectProblem(
                    kind=ProblemKind.DAMAGED,
                    reason=f"it has the offsets {archive.start} up to {archive.end}",
                    start=described.start,
                    end=described.end,
                    position=0,
                )
            )
            return Checked(bytes=info.size, problems=tuple(problems))
        messages = sum(group.rows for group in archive.row_groups)

        def note(group: RowGroup, error: CorruptDataError) -> None:
            nonlocal messages
            messages -= group.rows
            problems.append(
                ObjectProblem(
                    kind=ProblemKind.DAMAGED,
                    reason=error.message,
                    start=group.first_offset,
                    end=group.next_offset,
                    position=group.position,
                    offset=group.first_offset,
                )
            )

        crc = walk_archive(archive, ObjectFile(self._store, key, info.size), note)
        right = None
        if not problems:
            right = archive.describe(crc).describe(
                described.object_id,
                epoch=described.epoch,
                incarnation=described.incarnation,
                created_at=described.created_at,
                etag=info.etag,
            )
            right = replace(right, arrival_time_max=described.arrival_time_max)
            problems = _compare_archives(described, right)
        if problems and (now := self._store.stat(key)).size != info.size:
            # Truncated meanwhile: what was found is not about one object.
            return self._check_archive(key, now, described)
        return Checked(
            bytes=info.size,
            messages=messages,
            problems=tuple(problems),
            right=right if problems else None,
        )


class _Sums:
    """What goes by when the frames of an object are walked over."""

    def __init__(self, topic: str, described: ObjectDescriptor) -> None:
        self._topic = topic
        self._described = described
        self._codec: Codec | None = None
        self._decoder: ColumnarDecoder | None = None
        self._crc = 0
        self._time_min: int | None = None
        self._time_max = 0
        self._has_times = True
        self._entry = 0
        self._wrong_entries = 0
        self._wrong_times = 0
        self.next_offset = described.start
        self.bytes = 0
        self.bad_bodies: list[ObjectProblem] = []

    @property
    def messages(self) -> int:
        """How many frames there were."""
        return self.next_offset - self._described.start

    def add(self, data: Buffer) -> tuple[int, NeedMore | Corrupt]:
        """Takes the frames that `data` begins with: where they end, and why there are no more."""
        decoder, view = self._decoder_of(data), memoryview(data)
        at, stop = 0, NeedMore(0)
        while self.next_offset < self._described.end:
            first, upto = self.next_offset, self._described.end
            try:
                found = decoder.decode(view, at, expected_offset=first, end_offset=upto)
            except CorruptDataError as error:
                bad = first if error.offset is None else error.offset
                found = decoder.decode(view, at, expected_offset=first, end_offset=bad)
                self._take(view, at, found)
                at = found.end + self._pass_body(view, found.end, error)
                continue
            self._take(view, at, found)
            at = found.end
            if found.next_offset < upto:
                return at, found.stop
        return at, stop

    def _decoder_of(self, data: Buffer) -> ColumnarDecoder:
        if self._decoder is None:
            first = decode_frame(data, expected_offset=self._described.start)
            self._codec = self._described.codec or Codec.BINCODE2
            if isinstance(first, Frame) and not _is_message(first.body, self._described.codec):
                self._codec = recognise(first.body, offset=first.offset) or self._codec
            self._decoder = ColumnarDecoder(self._topic, self._codec, ("publish_time",))
        return self._decoder

    def _take(self, view: memoryview, at: int, found: DecodedFrames) -> None:
        times = self._times(view, at, found)
        self._check_entries(view, at, found, times)
        if times is not None and len(times):
            low, high = int(times.min()), int(times.max())
            self._time_min = low if self._time_min is None else min(self._time_min, low)
            self._time_max = max(self._time_max, high)
        self._crc = crc32(view[at : found.end], self._crc)
        self.bytes += found.end - at
        self.next_offset = found.next_offset

    def _times(self, view: memoryview, at: int, found: DecodedFrames) -> _Array | None:
        """Publish times in milliseconds; None if there is one that no clock gives."""
        if not self._has_times or not found.batch.num_rows:
            return None
        times: _Array = found.batch.column(0).view(pa.int64()).to_numpy() // 1000
        if int(times.max()) >= _CALENDAR_END_MS:
            # Columns hold none beyond it, and so do not tell which one it is.
            scan = scan_frames(view[: found.end], at, expected_offset=self.next_offset)
            exact = decode_publish_times(view, scan.starts, scan.end, self._codec or Codec.BINCODE2)
            self._has_times = exact is not None
            return None if exact is None else np.array(exact, np.int64)
        return times

    def _check_entries(
        self, view: memoryview, at: int, found: DecodedFrames, times: _Array | None
    ) -> None:
        """Whether the entries of the index that fall among these frames point at them."""
        index, before = self._described.offset_index, self._described.publish_time_index
        time_max, seen = self._time_max, 0
        while self._entry < len(index) and index[self._entry][0] < found.next_offset:
            offset, position = index[self._entry]
            place = position - self.bytes + at
            is_there = at <= place < found.end and isinstance(
                decode_frame(view[: found.end], place, expected_offset=offset), Frame
            )
            if offset < self.next_offset or not is_there:
                self._wrong_entries += 1
            elif len(before) == len(index) and times is not None:
                row = offset - self.next_offset
                if row > seen:
                    time_max = max(time_max, int(times[seen:row].max()))
                    seen = row
                self._wrong_times += before[self._entry] != time_max
            self._entry += 1

    def _pass_body(self, view: memoryview, at: int, error: CorruptDataError) -> int:
        """Goes over a frame whose checksum is right and whose body is no message; its size."""
        size = FRAME_HEADER_SIZE + int.from_bytes(view[at + 8 : at + 12], "little")
        self.bad_bodies.append(
            ObjectProblem(
                kind=ProblemKind.DAMAGED,
                reason=error.message,
                start=self.next_offset,
                end=self.next_offset + 1,
                position=self.bytes,
                offset=self.next_offset,
            )
        )
        self._has_times = False
        self._crc = crc32(view[at : at + size], self._crc)
        self.bytes += size
        self.next_offset += 1
        return size

    def compare(self) -> list[ObjectProblem]:
        """What the descriptor says otherwise about an object that is whole."""
        described = self._described
        wrong: list[str] = []

        def expect(name: str, said: object, found: object) -> None:
            if said != found:
                wrong.append(f"{name} {found}, not {said}")

        expect("bytes", described.size_bytes, self.bytes)
        if described.checksum is not None:
            expect("checksum", described.checksum, format_checksum(self._crc))
            expect("messages", described.messages, self.messages)
        if described.codec is not None:
            expect("codec", described.codec, self._codec)
        if described.publish_time_min is not None or described.publish_time_max is not None:
            has_times = self._has_times
            expect(
                "publish_time_min",
                described.publish_time_min,
                self._time_min if has_times else None,
            )
            expect(
                "publish_time_max",
                described.publish_time_max,
                self._time_max if has_times else None,
            )
        entries = len(described.offset_index)
        if bad := self._wrong_entries + entries - self._entry:
            wrong.append(f"{bad} of {entries} index entries do not point at their frames")
        if self._wrong_times:
            wrong.append(f"{self._wrong_times} of {entries} times in the index are wrong")
        if described.kept:
            expect("kept", described.kept, "")
        return _wrong_descriptor(described, wrong)


def _end_by_name(described: ObjectDescriptor) -> int | None:
    """Where an object ends by its name, which its uploader gave it."""
    name = parse_object_id(described.object_id)
    return name.end if name is not None and name.start == described.start else None


def _is_message(body: bytes, codec: Codec | None) -> bool:
    if codec is None:
        return False
    try:
        decode_message(body, codec)
    except CorruptDataError:
        return False
    return True


def _compare_archives(described: ObjectDescriptor, right: ObjectDescriptor) -> list[ObjectProblem]:
    """What a descriptor says otherwise than the archive about itself."""
    wrong = [
        f"{name} {getattr(right, name)}, not {getattr(described, name)}"
        for name in (
            "size_bytes",
            "checksum",
            "messages",
            "codec",
            "kept",
            "publish_time_min",
            "publish_time_max",
        )
        if getattr(described, name) != getattr(right, name)
    ]
    if described.uncompressed_bytes not in (None, right.uncompressed_bytes):
        wrong.append(
            f"uncompressed_bytes {right.uncompressed_bytes}, not {described.uncompressed_bytes}"
        )
    wrong += [
        f"another {name}"
        for name in ("offset_index", "publish_time_index")
        if getattr(described, name) != getattr(right, name)
    ]
    return _wrong_descriptor(described, wrong)


def _wrong_descriptor(described: ObjectDescriptor, wrong: list[str]) -> list[ObjectProblem]:
    if not wrong:
        return []
    return [
        ObjectProblem(
            kind=ProblemKind.WRONG_DESCRIPTOR,
            reason="the object is whole, and its descriptor is wrong: it has " + ", ".join(wrong),
            start=described.start,
            end=described.end,
        )
    ]
