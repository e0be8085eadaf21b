"""Reads frames back from a topic's local files, a chunk at a time.

Owns: one open file, one position in it, and nothing between two calls but those. Does not own:
which offsets may be seen (the caller passes `end`), the cache, message bodies.

Every call resolves again which file holds the wanted offset, so rotation under a reader is
invisible, and trim is noticed only by a reader whose next message it took. Continuity and crc are
checked for every frame; one that should be there and is not raises `CorruptDataError` with file,
position and offset. Offsets that were given up (`wal.gaps`) are passed over.

Memory: one chunk, or one frame where that is larger. A frame that a chunk cuts in two is read
again from its first byte with the next chunk, so nothing is carried over.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from typing import Protocol

from ister.base.clock import Clock
from ister.base.limits import FRAME_BODY_BYTES_MAX, KIB
from ister.base.metrics import Metrics
from ister.base.model import Codec
from ister.errors import CorruptDataError, NotFoundError, OffsetOutOfRangeError, check
from ister.format.frame import (
    FRAME_HEADER_SIZE,
    Corrupt,
    FrameBatch,
    NeedMore,
    NothingLeftError,
    Scan,
    scan_frames,
)
from ister.format.frame_search import search_frame
from ister.format.message import decode_publish_time, decode_publish_times, first_at_or_after
from ister.fs.base import File
from ister.wal.directory import WalDirectory
from ister.wal.index import SparseIndex
from ister.wal.recovery import WalFile, build_index
from ister.wal.writer import WalWriter

_log = logging.getLogger("ister.wal.reader")

# Indexes of rotated files that a reader keeps: a reader walks forward, so few are enough.
_INDEXES_MAX = 2
_CHUNK_BYTES_MIN = 64 * KIB
# Of a search by time, which can be ended between two chunks.
_SEARCH_BYTES = 1024 * KIB


class ReadableSettings(Protocol):
    """What a reader has to know about a log's bodies."""

    @property
    def topic(self) -> str:
        """The topic's name, for errors."""
        ...

    @property
    def codec(self) -> Codec:
        """How bodies are encoded."""
        ...


class ReadableLog(Protocol):
    """Where files are read from: a log that is open, or what its checkpoint says of it."""

    @property
    def settings(self) -> ReadableSettings:
        """What does not change."""
        ...

    @property
    def directory(self) -> WalDirectory | None:
        """Where the files are; None for a log in memory."""
        ...

    @property
    def files(self) -> tuple[WalFile, ...]:
        """The files, ascending."""
        ...

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Offsets that were given up: (start, end) of each range, ascending."""
        ...

    @property
    def writer(self) -> WalWriter | None:
        """Has the active file's index; None for a log that another process has open."""
        ...

    @property
    def trimmed(self) -> int:
        """The first offset in the files."""
        ...

    @property
    def next(self) -> int:
        """The offset after the last one."""
        ...


class WalReader:
    """One reader of one log's files. Used by one thread at a time."""

    def __init__(
        self, wal: ReadableLog, *, chunk_bytes: int, metrics: Metrics, clock: Clock
    ) -> None:
        self._wal = wal
        self._chunk_bytes = chunk_bytes
        self._metrics = metrics
        self._clock = clock
        self._file: File | None = None
        self._at: WalFile | None = None
        self._seq = -1
        self._position = 0
        self._next = -1
        self._indexes: OrderedDict[int, SparseIndex] = OrderedDict()
        self._known: tuple[int, int, int] | None = None

    def start_at(self, offset: int, place: tuple[int, int]) -> None:
        """Takes a hint where the frame with `offset` is: the `place` of an earlier reader."""
        self._known = (offset, *place)

    def close(self) -> None:
        """Releases the file. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def fetch(
        self,
        start: int,
        end: int,
        *,
        bytes_max: int,
        span: Callable[[int, int], int | None] | None = None,
    ) -> FrameBatch:
        """Frames from `start` on, at least one, none at or after `end`, about `bytes_max` of them.

        `end`: the offset before which to end.
        `bytes_max`: how many bytes to read at most, but for one frame.
        `span`: how many bytes the frames of a range take; None if that is not known. Where it is,
        no other frames are read.

        Raises:
            OffsetOutOfRangeError: `start` has been trimmed.
            NothingLeftError: `start` was given up.
            CorruptDataError: The frame is damaged or missing.
        """
        check(start < end, "a fetch asks for something")
        for gap, gap_end in self._wal.gaps:
            if gap <= start < gap_end:
                _log.warning(
                    "offsets that were given up are passed over",
                    extra={"topic": self._wal.settings.topic, "offset": start, "next": gap_end},
                )
                raise NothingLeftError(min(gap_end, end))
            if gap > start:
                end = min(end, gap)
                break
        file, limit = self._seek(start, end, span)
        size = self._whole_frames(min(self._chunk_bytes, max(bytes_max, _CHUNK_BYTES_MIN)), limit)
        if span is not None and self._next == start and (exact := span(start, min(end, limit))):
            size = min(size, exact)
        while True:
            started = self._clock.monotonic()
            chunk = file.read_at(self._position, size)
            self._metrics.observe(
                "wal_reader.chunk_read_latency_ms", (self._clock.monotonic() - started) * 1000
            )
            scan = scan_frames(chunk, expected_offset=self._next, end_offset=limit)
            self._metrics.count("wal.reader.stitch_file_bytes", len(chunk))
            batch = self._take(chunk, scan, start)
            if batch is not None:
                return batch
            if isinstance(scan.stop, NeedMore) and scan.stop.size_bytes > len(chunk) == size:
                # One frame larger than a chunk.
                size = min(scan.stop.size_bytes, FRAME_HEADER_SIZE + FRAME_BODY_BYTES_MAX)
                continue
            if not scan.starts and not (self._next < start and self._skip_damage(file, start)):
                raise self._damage(file, scan)
            # Only frames before `start` so far: on from where they end.

    def _whole_frames(self, size: int, end: int) -> int:
        """So much of `size` that a read from here ends with a frame, where the index knows one.

        A chunk without the beginning of another frame can be handed on as it is. Nor does it go
        beyond the first frame that the index knows at or after the offset `end`.
        """
        if self._at is None:
            return size
        entries = self._index(self._at).entries
        after = bisect_left(entries, end, key=attrgetter("offset"))
        if after < len(entries) and (unwanted := entries[after].position - self._position) > 0:
            size = min(size, unwanted)
        number = bisect_right(entries, self._position + size, key=attrgetter("position"))
        whole = entries[number - 1].position - self._position if number else 0
        return whole if whole > size // 2 else size

    def _take(self, chunk: bytes, scan: Scan, start: int) -> FrameBatch | None:
        """Moves over the frames of `scan` and returns those from `start` on."""
        count = len(scan.starts)
        if count == 0:
            return None
        first = self._next
        self._next = first + count
        self._position += scan.end
        self._metrics.count("wal_reader.frames_parsed_total", count)
        skip = start - first
        if skip >= count:
            return None
        return FrameBatch(
            chunk,
            scan.starts[skip:] if skip else scan.starts,
            scan.end,
            start,
            self._wal.settings.codec,
        )

    def _skip_damage(self, file: File, start: int) -> bool:
        """Looks for the frame `start` behind damage that lies before it; whether it was found.

        A read that starts behind the damage gets the messages there.
        """
        found = search_frame(
            file.read_at,
            self._position + 1,
            offset_min=start,
            end_offset=start + 1,
            size_bytes=file.size(),
            chunk_bytes=self._chunk_bytes,
        )
        if found is None:
            return False
        self._position, self._next = found
        return True

    def _damage(self, file: File, scan: Scan) -> CorruptDataError:
        self._metrics.count("wal_reader.crc_errors_total")
        if isinstance(scan.stop, Corrupt):
            reason = f"{scan.stop.reason} ({scan.stop.detail})"
        else:
            reason = "the file ends before its frames do"
        return CorruptDataError(
            f"damaged frame: {reason}",
            topic=self._wal.settings.topic,
            offset=self._next,
            path=file.path,
            position=self._position,
            hint="messages behind the damage can be read by starting there; "
            "`ister inspect wal` shows where",
        )

    # -- where ------------------------------------------------------------------------------

    def _seek(
        self, start: int, end: int, span: Callable[[int, int], int | None] | None = None
    ) -> tuple[File, int]:
        """Opens the file that holds `start`, at the best position known for it.

        Returns the file, and the offset before which its frames end.
        """
        while True:
            file, limit = self._resolve(start)
            self._at = file
            if self._file is not None and self._seq == file.seq:
                if self._next == start:
                    return self._file, min(limit, end)
            elif not self._open(file):
                continue  # trimmed between looking and opening: look again
            try:
                if span is None or not self._place_exactly(file, start, span):
                    self._place(file, start)
            except NotFoundError:
                if file in self._wal.files:
                    raise
                continue  # its index was trimmed, and it too
            check(self._file is not None, "a file is open after it was opened")
            if self._file is not None:
                return self._file, min(limit, end)

    def _resolve(self, offset: int) -> tuple[WalFile, int]:
        files = self._wal.files
        at = bisect_right(files, offset, key=attrgetter("first_offset"))
        if at == 0:
            raise OffsetOutOfRangeError(
                "the offset is no longer in local files",
                topic=self._wal.settings.topic,
                offset=offset,
                earliest=self._wal.trimmed,
                next=self._wal.next,
            )
        limit = files[at].first_offset if at < len(files) else 1 << 64
        return files[at - 1], limit

    def _open(self, file: WalFile) -> bool:
        directory = self._wal.directory
        check(directory is not None, "a log in memory has no files to read")
        if directory is None:
            return False
        self.close()
        try:
            self._file = directory.fs.open_read(directory.log_path(file.seq))
        except NotFoundError:
            if file in self._wal.files:
                raise
            return False
        self._seq = file.seq
        self._next = -1
        if file.seq != self._wal.files[-1].seq:
            self._metrics.count("wal_reader.rotated_files_accessed")
        return True

    def _place_exactly(
        self, file: WalFile, start: int, span: Callable[[int, int], int | None]
    ) -> bool:
        """Sets the position to `start` itself, by the sizes of the frames around; if it is there.

        Counted from a frame whose position is known: the last one read, or one of the index.
        """
        entries = self._index(file).entries
        at = bisect_right(entries, start, key=attrgetter("offset"))
        known = [(entry.offset, entry.position) for entry in entries[max(0, at - 1) : at + 1]]
        if self._next >= file.first_offset:
            known.append((self._next, self._position))
        for offset, position in known:
            size = span(min(offset, start), max(offset, start))
            if size is None:
                continue
            place = position + size if offset <= start else position - size
            if place >= 0 and self._agrees(start, place):
                self._position, self._next = place, start
                return True
        return False

    def _place(self, file: WalFile, start: int) -> None:
        """Sets the position to the last known frame at or before `start`."""
        if self._known is not None and self._known[:2] == (start, file.seq):
            position = self._known[2]
            if self._agrees(start, position):
                self._position, self._next = position, start
                return
        entry = self._index(file).find_offset(start)
        if entry is None or not self._agrees(entry.offset, entry.position):
            self._position, self._next = 0, file.first_offset
        else:
            self._position, self._next = entry.position, entry.offset

    def _agrees(self, offset: int, position: int) -> bool:
        """Whether the frame at `position` says that it is `offset`; an index is only a hint."""
        if self._file is None:
            return False
        return self._file.read_at(position, 8) == offset.to_bytes(8, "little")

    def _index(self, file: WalFile) -> SparseIndex:
        writer = self._wal.writer
        if writer is not None and writer.seq == file.seq:
            return writer.index
        index = self._indexes.get(file.seq)
        if index is None:
            directory = self._wal.directory
            check(directory is not None, "a log in memory has no files to read")
            if directory is None:
                return SparseIndex()
            index = SparseIndex(directory.load_index(file.seq))
            if not index.entries and writer is not None:
                # Only the owner's: others leave its directory as it is, and scan.
                index = build_index(directory, file, self._wal.settings.codec)
            self._indexes[file.seq] = index
            while len(self._indexes) > _INDEXES_MAX:
                self._indexes.popitem(last=False)
        return index

    # -- how far ----------------------------------------------------------------------------

    def plan(self, start: int, end: int, *, bytes_max: int, span_ms_max: int) -> int:
        """Where a range of whole frames from `start` on has to end to stay within limits.

        At least one frame, none at or after `end`; the range takes at most `bytes_max` bytes and
        no message in it arrived more than `span_ms_max` after the first one. Arrival times from
        before this process opened the log are known per file only. Found by the indexes; at most
        two blocks are read.

        Raises:
            OffsetOutOfRangeError: `start` has been trimmed.
            CorruptDataError: A frame on the way is damaged.
        """
        check(start < end, "the range of a plan is not empty")
        first = self.fetch(start, end, bytes_max=_CHUNK_BYTES_MIN)
        end = self._end_of_span(start, end, span_ms_max)
        room = bytes_max
        while True:
            file, limit = self._resolve(start)
            limit = min(limit, end)
            begin = self._position_of(start, limit)
            entries = self._index(file).entries
            # Everything up to the last entry within both limits fits; what follows is counted.
            at, fits = start, 0
            for entry in entries:
                if entry.offset >= limit or entry.position - begin > room:
                    break
                if entry.offset > at:
                    at, fits = entry.offset, entry.position - begin
            while at < limit:
                batch = self.fetch(at, limit, bytes_max=self._chunk_bytes)
                ends = [*batch.starts[1:], batch.end]
                for head, tail in zip(batch.starts, ends, strict=True):
                    fits += tail - head
                    if fits > room and at > first.first_offset:
                        return at
                    at += 1
                    if fits > room:
                        return at
            if at >= end:
                return end
            start, room = at, room - fits
            if room <= 0:
                return at

    def arrived_ms(self, start: int, end: int) -> int | None:
        """The latest possible arrival time of a range's newest message; None if unknown.

        Always None without a writer: only the node that wrote the files knows when its clock was
        wrong.
        """
        check(start < end, "a range has messages")
        if self._wal.writer is None:
            return None
        if (known := self._wal.writer.arrivals.times_of(end - 1)) is not None:
            return known[1]
        return self._modified_ms(self._resolve(end - 1)[0])

    def _end_of_span(self, start: int, end: int, span_ms_max: int) -> int:
        """Shortens a range so that its messages arrived within a time; returns the new end."""
        arrivals = self._wal.writer.arrivals if self._wal.writer is not None else None
        if arrivals is not None and (known := arrivals.times_of(start)) is not None:
            return arrivals.end_before(known[0] + span_ms_max, start=start, end=end)
        since = self._modified_ms(self._resolve(start)[0])
        if since is None:
            return end
        known_from = arrivals.start if arrivals is not None else None
        for file in self._wal.files:
            if file.first_offset <= start:
                continue
            if file.first_offset >= end or (
                known_from is not None and file.first_offset >= known_from
            ):
                break
            modified_ms = self._modified_ms(file)
            if modified_ms is not None and modified_ms > since + span_ms_max:
                return file.first_offset
        if arrivals is None:
            return end
        return arrivals.end_before(since + span_ms_max, start=start, end=end)

    def _modified_ms(self, file: WalFile) -> int | None:
        directory = self._wal.directory
        if directory is None:
            return None
        return directory.fs.modified_ms(directory.log_path(file.seq))

    def _position_of(self, offset: int, limit: int) -> int:
        """The byte at which a frame begins in its file."""
        batch = self.fetch(offset, limit, bytes_max=_CHUNK_BYTES_MIN)
        return self._position - (batch.end - batch.starts[0])

    @property
    def place(self) -> tuple[int, int]:
        """Where the last fetch ended: the number of the file, and the byte in it."""
        return self._seq, self._position

    def place_of(self, offset: int) -> tuple[int, int]:
        """Where the frames before `offset` end: as `place` after the fetch of the last of them.

        Raises:
            OffsetOutOfRangeError: It has been trimmed.
            CorruptDataError: A frame on the way is damaged.
        """
        self.fetch(offset - 1, offset, bytes_max=_CHUNK_BYTES_MIN)
        return self.place

    # -- by time ----------------------------------------------------------------------------

    def find_time(
        self,
        publish_time_ms: int,
        codec: Codec,
        *,
        start: int = 0,
        end: int,
        on_read: Callable[[int], None] | None = None,
    ) -> int | None:
        """The first offset in a range whose message was published at or after the time.

        Whole files and index blocks are passed over by their highest publish time. One block is
        read, unless a message before `start` has a later time than those from there on: the index
        knows the highest time up to a block, so that all blocks up to a later one are read.

        `on_read`: called with the size of each chunk that was read; may raise to end the search.
        Returns the offset; None if every message in the files is older.
        """
        while True:
            files = self._wal.files
            try:
                return self._find_time(files, publish_time_ms, codec, range(start, end), on_read)
            except (NotFoundError, OffsetOutOfRangeError):
                if files[0] in self._wal.files:
                    raise
                # Trimmed meanwhile: the first such message is in what is left.

    def _find_time(
        self,
        files: tuple[WalFile, ...],
        publish_time_ms: int,
        codec: Codec,
        among: range,
        on_read: Callable[[int], None] | None,
    ) -> int | None:
        start, end = among.start, among.stop
        for at, file in enumerate(files):
            is_last = at == len(files) - 1
            entries = self._index(file).entries
            limit = end if is_last else min(end, files[at + 1].first_offset)
            # A rotated file's last entry stands at its end and knows the whole file.
            knows_all = not is_last and bool(entries) and entries[-1].offset >= limit
            if limit <= start:
                continue
            if knows_all and entries[-1].publish_time_max < publish_time_ms:
                continue
            found = self._find_time_in(file, publish_time_ms, range(start, limit), codec, on_read)
            if found is not None:
                return found
        return None

    def _find_time_in(
        self,
        file: WalFile,
        publish_time_ms: int,
        among: range,
        codec: Codec,
        on_read: Callable[[int], None] | None,
    ) -> int | None:
        entry = self._index(file).find_time(publish_time_ms)
        offset = max(among.start, file.first_offset if entry is None else entry.offset)
        # It is usually in the first block. A longer search reads larger chunks.
        size = _CHUNK_BYTES_MIN
        while offset < among.stop:
            try:
                batch = self.fetch(offset, among.stop, bytes_max=size)
            except NothingLeftError as given_up:
                offset = given_up.next_offset
                continue
            if on_read is not None:
                on_read(len(batch.chunk))
            size = min(2 * size, _SEARCH_BYTES)
            times = decode_publish_times(batch.chunk, batch.starts, batch.end, codec)
            if times is None:  # a time that no clock gives, or none at all: which one is told
                times = [
                    decode_publish_time(
                        batch.chunk, codec, start=begin + FRAME_HEADER_SIZE, end=finish
                    )
                    for begin, finish in zip(
                        batch.starts, [*batch.starts[1:], batch.end], strict=True
                    )
                ]
            found = first_at_or_after(times, publish_time_ms)
            if found is not None:
                return offset + found
            offset += len(times)
        return None
