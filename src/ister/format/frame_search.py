"""Finds the next whole frame behind a damaged one, in a file or an object, in bounded memory.

A damaged frame's own length usually leads to the next frame: a flipped bit in a body costs one
frame and no search. Where it does not, the bytes behind the damage are searched for a frame whose
offset may follow and whose crc holds. What the damage means is the caller's to judge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from ister.base.limits import MIB, RECOVERY_CHUNK_BYTES
from ister.format.frame import FRAME_HEADER_SIZE, Frame, NeedMore, decode_frame, find_frame

Read: TypeAlias = Callable[[int, int], bytes]
"""(position, size) → bytes; fewer at the end."""

_FRAME_BYTES_MIN: Final = FRAME_HEADER_SIZE + 1
_OFFSET_END: Final = 1 << 63
"""No log gets this far; the bound for frames behind damage where nothing better is known."""
_PATTERNS_MAX: Final = 4096
"""More upper offset bytes than this are not searched one by one; every byte is tried instead."""
_WINDOW_STEP_BYTES: Final = 2 * MIB
"""Where every byte is tried, windows of `RECOVERY_CHUNK_BYTES` overlap by the rest: a frame up to
that size is always found."""


class FramePosition(NamedTuple):
    """Where a whole frame begins, and its offset."""

    position: int
    offset: int


def read_frame(read: Read, position: int, *, expected_offset: int | None = None) -> Frame | None:
    """The frame that begins at `position`, if it is whole.

    The body is read only if the header can be one; `Frame.end` counts from the frame's beginning.
    """
    decoded = decode_frame(read(position, FRAME_HEADER_SIZE), expected_offset=expected_offset)
    if isinstance(decoded, NeedMore) and decoded.size_bytes > FRAME_HEADER_SIZE:
        decoded = decode_frame(read(position, decoded.size_bytes), expected_offset=expected_offset)
    return decoded if isinstance(decoded, Frame) else None


def find_frame_behind(
    read: Read,
    position: int,
    offset: int | None,
    *,
    size_bytes: int,
    end_offset: int | None = None,
    chunk_bytes: int = RECOVERY_CHUNK_BYTES,
) -> FramePosition | None:
    """The next whole frame behind the damaged one at `position`.

    Args:
        read: Reads the file or object.
        position: Where the damaged frame begins.
        offset: The offset that it should have; None if that is not known.
        size_bytes: The size of the file or object.
        end_offset: The offset before which all frames end, if known. A damaged last frame is
            followed by this offset at `size_bytes`.
        chunk_bytes: How much to read at once.
    """
    if offset is not None:
        found = _step_over(read, position, offset, size_bytes, end_offset)
        if found is not None:
            return found
    return search_frame(
        read,
        position + 1,
        offset_min=offset or 0,
        end_offset=_OFFSET_END if offset is None else end_offset,
        size_bytes=size_bytes,
        chunk_bytes=chunk_bytes,
    )


def _step_over(
    read: Read, position: int, offset: int, size_bytes: int, end_offset: int | None
) -> FramePosition | None:
    """Where the damaged frame's own length leads, if the next frame is there.

    Where the frame itself is whole and its successor follows it, offsets are missing before it.
    """
    header = read(position, FRAME_HEADER_SIZE)
    if len(header) < FRAME_HEADER_SIZE:
        return None
    behind = position + FRAME_HEADER_SIZE + int.from_bytes(header[8:12], "little")
    if behind == size_bytes and offset + 1 == end_offset:
        return FramePosition(behind, offset + 1)
    following = read_frame(read, behind) if behind < size_bytes else None
    if following is None:
        return None
    if following.offset == offset + 1:
        return FramePosition(behind, following.offset)
    itself = read_frame(read, position)
    if itself is not None and offset < itself.offset == following.offset - 1:
        return FramePosition(position, itself.offset)
    return None


def search_frame(
    read: Read,
    position: int,
    *,
    offset_min: int,
    size_bytes: int,
    end_offset: int | None = None,
    chunk_bytes: int = RECOVERY_CHUNK_BYTES,
) -> FramePosition | None:
    """The first whole frame at or behind `position` with an offset in a range.

    However many frames are gone, the rest cannot hold more than one for every few bytes, which
    bounds the offsets that may come. Their upper bytes are the same for nearly all of them, and
    those are searched for; the rest of the header and the crc decide.
    """
    if end_offset is None:
        end_offset = offset_min + (size_bytes - position) // _FRAME_BYTES_MIN + 1
    if (end_offset >> 16) - (offset_min >> 16) > _PATTERNS_MAX:
        return _try_every_byte(read, position, offset_min, end_offset, size_bytes)
    while position + FRAME_HEADER_SIZE <= size_bytes:
        chunk = read(position, chunk_bytes)
        if not chunk:
            break
        begin = _first_possible(chunk)
        for upper in range(offset_min >> 16, ((end_offset - 1) >> 16) + 1):
            pattern = upper.to_bytes(6, "little")
            at = chunk.find(pattern, begin + 2)
            while at >= 0:
                offset = int.from_bytes(chunk[at - 2 : at + 6], "little")
                if offset_min <= offset < end_offset and _is_frame(
                    read, chunk, at - 2, position, offset
                ):
                    return FramePosition(position + at - 2, offset)
                at = chunk.find(pattern, at + 1)
        # The bytes of an offset may lie across two chunks.
        position += max(1, len(chunk) - 7)
    return None


def _first_possible(chunk: bytes) -> int:
    """Where the first frame of a chunk can begin: a length follows at most 11 zeros."""
    return max(0, len(chunk) - len(chunk.lstrip(b"\0")) - 11)


def _is_frame(read: Read, chunk: bytes, at: int, position: int, offset: int) -> bool:
    """Whether a whole frame begins at `at` in `chunk`, which was read from `position` on."""
    decoded = decode_frame(chunk, at, expected_offset=offset)
    if isinstance(decoded, NeedMore):
        return read_frame(read, position + at, expected_offset=offset) is not None
    return isinstance(decoded, Frame)


def _try_every_byte(
    read: Read, position: int, offset_min: int, end_offset: int, size_bytes: int
) -> FramePosition | None:
    while size_bytes - position >= _FRAME_BYTES_MIN:
        window = read(position, RECOVERY_CHUNK_BYTES)
        found = find_frame(
            window, _first_possible(window), offset_min=offset_min, offset_max=end_offset
        )
        if found is not None:
            return FramePosition(position + found[0], found[1])
        position += _WINDOW_STEP_BYTES
    return None
