"""Walks the whole frames of a file or object in bounded memory, and on behind damage if asked.

    whole frames ─► bad bytes ─► on_damage ─► whole frames behind them ─► … ─► the end

Owns: reading in chunks, with the unfinished frame read again from its first byte. Does not own:
what bad bytes mean; who walks compares them with a durable watermark, a name or a descriptor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

from ister.base.limits import KIB, RECOVERY_CHUNK_BYTES
from ister.format.frame import FRAME_HEADER_SIZE, Corrupt, NeedMore, Scan, scan_frames
from ister.format.frame_search import FramePosition, find_frame_behind

_SEARCH_BYTES_MIN: Final = 64 * KIB


class Readable(Protocol):
    """A file or object, as far as it is read."""

    path: str

    def read_at(self, position: int, size: int) -> bytes:
        """Reads `size` bytes from `position`; fewer only at the end."""
        ...

    def size(self) -> int:
        """Number of bytes."""
        ...


@dataclass(frozen=True)
class BadBytes:
    """Bytes that are not the whole frame that should be there."""

    walk: FrameWalk
    position: int
    offset: int | None
    """The offset that should stand there; None if nothing says so."""
    size: int
    """The file's size."""
    stop: NeedMore | Corrupt

    @cached_property
    def behind(self) -> FramePosition | None:
        """The next whole frame, which is searched for when this is first asked."""
        return self.walk.find_behind(self)

    @property
    def reason(self) -> str:
        """Why the frames end here, in words."""
        if isinstance(self.stop, Corrupt):
            return f"{self.stop.reason} ({self.stop.detail})"
        if self.position == self.size:
            return "end of file"
        return f"torn frame ({self.size - self.position} of {self.stop.size_bytes} bytes)"


class FrameWalk:
    """The whole frames of a file from a position on. Iterate once.

    Each item is a chunk, the position of its first byte in the file, and its scan, which has at
    least one frame. The attributes tell how far the walk is.
    """

    def __init__(
        self,
        file: Readable,
        *,
        position: int = 0,
        expected_offset: int | None,
        end_offset: int | None = None,
        chunk_bytes: int = RECOVERY_CHUNK_BYTES,
        on_damage: Callable[[BadBytes], bool] = lambda bad: False,
    ) -> None:
        """Begins a walk.

        Args:
            file: Read only.
            position: Where a frame begins.
            expected_offset: Its offset; None takes it from the frame.
            end_offset: Where to stop, if anywhere before the end.
            chunk_bytes: How much is read at once; a larger frame is read whole.
            on_damage: Called where bytes follow that are not the expected frame; whether to go on
                at the next whole frame.
        """
        self._file = file
        self._end_offset = end_offset
        self._chunk_bytes = chunk_bytes
        self._on_damage = on_damage
        self.frames = 0
        self.end = position
        """The position after the last whole frame."""
        self.next_offset = expected_offset
        """The offset after the last whole frame; None if there was none and none was expected."""
        self.size = 0
        """The file's size when the walk ended."""
        self.stop: NeedMore | Corrupt = NeedMore(FRAME_HEADER_SIZE)
        """Why it ended."""

    @property
    def is_clean(self) -> bool:
        """Whether the file ends with its last whole frame."""
        return self.end == self.size

    @property
    def bad(self) -> BadBytes:
        """The bytes that follow the last whole frame."""
        return BadBytes(self, self.end, self.next_offset, self.size, self.stop)

    def __iter__(self) -> Iterator[tuple[bytes, int, Scan]]:
        wanted = self._chunk_bytes
        while not self._is_over():
            chunk = self._file.read_at(self.end, wanted)
            scan = scan_frames(chunk, expected_offset=self.next_offset, end_offset=self._end_offset)
            if scan.starts:
                position = self.end
                self.frames += len(scan.starts)
                self.next_offset = scan.next_offset
                self.end += scan.end
                yield chunk, position, scan
                if self._is_over():
                    break
            is_last = len(chunk) < wanted
            stop = scan.stop
            if isinstance(stop, NeedMore) and not (is_last and not self._has(stop.size_bytes)):
                wanted = max(self._chunk_bytes, stop.size_bytes)
                continue
            self.size, self.stop = self._file.size(), stop
            bad = self.bad
            if self.is_clean and self._end_offset is None:
                return
            if not self._on_damage(bad) or bad.behind is None:
                return
            self.end, self.next_offset = bad.behind
            wanted = self._chunk_bytes
        self.size, self.stop = self._file.size(), NeedMore(FRAME_HEADER_SIZE)

    def _is_over(self) -> bool:
        end = self._end_offset
        return end is not None and self.next_offset is not None and self.next_offset >= end

    def _has(self, size_bytes: int) -> bool:
        """Whether bytes that complete the unfinished frame arrived since the chunk was read."""
        return self._file.size() >= self.end + size_bytes

    def find_behind(self, bad: BadBytes) -> FramePosition | None:
        """The next whole frame behind bad bytes."""
        return find_frame_behind(
            self._file.read_at,
            bad.position,
            bad.offset,
            size_bytes=bad.size,
            end_offset=self._end_offset,
            chunk_bytes=max(self._chunk_bytes, _SEARCH_BYTES_MIN),
        )


def scan_file(
    file: Readable,
    *,
    position: int,
    expected_offset: int | None,
    visit: Callable[[bytes, int, Scan], None] = lambda chunk, position, scan: None,
    chunk_bytes: int = RECOVERY_CHUNK_BYTES,
) -> FrameWalk:
    """Walks to the first bytes that are not a whole frame; `visit` gets every chunk with frames."""
    walk = FrameWalk(
        file, position=position, expected_offset=expected_offset, chunk_bytes=chunk_bytes
    )
    for found in walk:
        visit(*found)
    return walk
