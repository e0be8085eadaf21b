"""Walks the frames of a WAL file in bounded memory, for recovery, index building and inspection.

Owns: chunked reading with the unfinished frame read again from its first byte. Does not own:
what a bad frame means; the caller compares it with the durable watermark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ister.base.limits import RECOVERY_CHUNK_BYTES
from ister.format.frame import FRAME_HEADER_SIZE, Corrupt, NeedMore, Scan, scan_frames
from ister.fs.base import File


@dataclass(frozen=True, slots=True, kw_only=True)
class FileScan:
    """How far the whole frames of a file reach, from where the scan began."""

    frames: int
    end: int
    """The position after the last whole frame."""
    next_offset: int | None
    """The offset after the last whole frame; None if there was none and none was expected."""
    size: int
    """The file's size when the scan ended."""
    stop: NeedMore | Corrupt

    @property
    def is_clean(self) -> bool:
        """Whether the file ends with its last whole frame."""
        return self.end == self.size


def scan_file(
    file: File,
    *,
    position: int,
    expected_offset: int | None,
    visit: Callable[[bytes, int, Scan], None] | None = None,
    chunk_bytes: int = RECOVERY_CHUNK_BYTES,
) -> FileScan:
    """Scans from `position` to the first byte that is not part of a whole frame.

    Args:
        file: Read only.
        position: Where a frame begins.
        expected_offset: Its offset; None takes it from the frame.
        visit: Called with (chunk, position of the chunk, its scan) for every chunk with frames.
        chunk_bytes: How much is read at once; a larger frame is read whole.
    """
    frames = 0
    wanted = chunk_bytes
    while True:
        chunk = file.read_at(position, wanted)
        scan = scan_frames(chunk, expected_offset=expected_offset)
        if scan.starts:
            frames += len(scan.starts)
            expected_offset = scan.next_offset
            if visit is not None:
                visit(chunk, position, scan)
            position += scan.end
        is_last = len(chunk) < wanted
        if isinstance(scan.stop, Corrupt) or (is_last and not _grew(file, position, scan)):
            return FileScan(
                frames=frames,
                end=position,
                next_offset=expected_offset,
                size=file.size(),
                stop=scan.stop,
            )
        needed = scan.stop.size_bytes if isinstance(scan.stop, NeedMore) else FRAME_HEADER_SIZE
        wanted = max(chunk_bytes, needed)


def _grew(file: File, position: int, scan: Scan) -> bool:
    """Whether bytes that complete the unfinished frame arrived since the chunk was read."""
    return isinstance(scan.stop, NeedMore) and file.size() >= position + scan.stop.size_bytes


def describe_stop(scan: FileScan) -> str:
    """Why the frames end where they do, in words."""
    if isinstance(scan.stop, Corrupt):
        return f"{scan.stop.reason} ({scan.stop.detail})"
    if scan.is_clean:
        return "end of file"
    return f"torn frame ({scan.size - scan.end} of {scan.stop.size_bytes} bytes)"
