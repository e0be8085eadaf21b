"""Frames: how one message body lies in a WAL file or in an object.

     0        8      12      16              16 + len
     ┌────────┬───────┬───────┬───────────────┐
     │ offset │  len  │  crc  │     body      │   little endian
     │  u64   │  u32  │  u32  │   len bytes   │   crc = crc32(body), zlib's polynomial
     └────────┴───────┴───────┴───────────────┘

Frames follow each other without anything in between, so a file has no header and no footer. The
header has no checksum of its own. What protects it instead:

- `len` is never 0 (a message has at least its fixed fields) and never above
  `FRAME_BODY_BYTES_MAX`, so zero-filled space is not a frame and a length bomb allocates nothing;
- a reader that knows where it is passes `expected_offset`, and any other offset is damage.

Decoding gives one of three results: a frame, "need more bytes", or "corrupt" with a reason.
Whether a bad frame is a torn tail or damage is not decided here: only the durable watermark can.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

from ister import kernels
from ister.base.limits import FRAME_BODY_BYTES_MAX, KIB
from ister.base.model import Codec
from ister.errors import InvariantError, MessageTooLargeError, check
from ister.format.crc import Buffer, crc32

_HEADER = struct.Struct("<QII")
_unpack_header = _HEADER.unpack_from
pack_header = _HEADER.pack
FRAME_HEADER_SIZE: Final = _HEADER.size
_OFFSET_END: Final = 1 << 64
# The compiled scan counts in signed 64-bit integers; what lies beyond is left to Python.
_COMPILED_OFFSET_END: Final = (1 << 63) - 1
# Below this a call into the compiled scan costs more than it saves.
_COMPILED_BYTES_MIN: Final = 16 * KIB


class CorruptReason(StrEnum):
    """Why bytes cannot be a frame."""

    ZERO_LENGTH = "zero length"
    LENGTH_OVER_LIMIT = "length over limit"
    OFFSET_MISMATCH = "offset mismatch"
    CRC_MISMATCH = "crc mismatch"


class Frame(NamedTuple):
    """A whole frame whose crc holds."""

    offset: int
    body: bytes
    end: int
    """The position after the frame's last byte."""


class NeedMore(NamedTuple):
    """The bytes so far are the beginning of a frame."""

    size_bytes: int
    """How many bytes, counted from the frame's first, decoding needs to get further."""


class Corrupt(NamedTuple):
    """The bytes cannot be the expected frame."""

    reason: CorruptReason
    detail: str


Decoded: TypeAlias = Frame | NeedMore | Corrupt


def encode_frame(offset: int, body: bytes) -> bytes:
    """One frame.

    Raises:
        MessageTooLargeError: The body is empty or above `FRAME_BODY_BYTES_MAX`.
    """
    if not 0 < len(body) <= FRAME_BODY_BYTES_MAX:
        raise MessageTooLargeError(
            f"a frame's body has 1 to {FRAME_BODY_BYTES_MAX} bytes, not {len(body)}"
        )
    return pack_header(offset, len(body), crc32(body)) + body


def frame_starts(data: Buffer, count: int) -> list[int]:
    """Where frames begin that this process has encoded, and where the last one ends; unchecked."""
    starts = [0]
    position = 0
    for _ in range(count):
        position += FRAME_HEADER_SIZE + _unpack_header(data, position)[1]
        starts.append(position)
    return starts


def decode_frame(
    buffer: Buffer, position: int = 0, *, expected_offset: int | None = None
) -> Decoded:
    """Decodes the frame that begins at `position`. Never raises on bad bytes."""
    available = len(buffer) - position
    if available < FRAME_HEADER_SIZE:
        return NeedMore(FRAME_HEADER_SIZE)
    offset, length, crc = _unpack_header(buffer, position)
    # The header is judged before more bytes are asked for: a length that cannot be, or an offset
    # that is not the next one, must not make a reader wait for megabytes that never come.
    if corrupt := _judge_header(offset, length, expected_offset):
        return corrupt
    if available < FRAME_HEADER_SIZE + length:
        return NeedMore(FRAME_HEADER_SIZE + length)
    end = position + FRAME_HEADER_SIZE + length
    body = bytes(buffer[position + FRAME_HEADER_SIZE : end])
    if (actual := crc32(body)) != crc:
        return Corrupt(CorruptReason.CRC_MISMATCH, f"stored {crc:#010x}, computed {actual:#010x}")
    return Frame(offset, body, end)


def _judge_header(offset: int, length: int, expected_offset: int | None) -> Corrupt | None:
    if length == 0:
        return Corrupt(CorruptReason.ZERO_LENGTH, f"offset field {offset}")
    if length > FRAME_BODY_BYTES_MAX:
        return Corrupt(
            CorruptReason.LENGTH_OVER_LIMIT, f"{length} bytes, limit {FRAME_BODY_BYTES_MAX}"
        )
    if expected_offset is not None and offset != expected_offset:
        return Corrupt(CorruptReason.OFFSET_MISMATCH, f"found {offset}, expected {expected_offset}")
    return None


@dataclass(frozen=True, slots=True)
class FrameBatch:
    """Whole frames that follow each other, inside of one chunk, each checked."""

    chunk: bytes
    starts: list[int]
    """Where each frame begins in `chunk`."""
    end: int
    """Where the last one ends."""
    first_offset: int
    codec: Codec
    """Of the bodies."""

    @property
    def next_offset(self) -> int:
        """The offset after the last frame's."""
        return self.first_offset + len(self.starts)


class NothingLeftError(Exception):
    """A range has no frames before `next_offset`; this is not a failure.

    Messages were left out of an object on purpose, were given up, or are damaged and to be left
    out.
    """

    def __init__(self, next_offset: int) -> None:
        super().__init__(next_offset)
        self.next_offset = next_offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What `scan_frames` found: the whole frames up to the first byte that is not one."""

    starts: list[int]
    """The position of each whole frame, in order."""
    end: int
    """The position after the last whole frame: the safe boundary."""
    next_offset: int | None
    """The offset after the last whole frame; None without a frame or an expectation."""
    stop: NeedMore | Corrupt
    """Why the scan ended. `NeedMore(FRAME_HEADER_SIZE)` at `len(buffer)` is a clean end."""


def scan_frames(
    buffer: Buffer,
    position: int = 0,
    *,
    expected_offset: int | None = None,
    end_offset: int | None = None,
) -> Scan:
    """Finds the frames in `buffer`, each checked by crc and continuity.

    Frames begin at `position`. The first has `expected_offset`; None takes it from the frame. The
    scan stops before `end_offset`, which goes with `expected_offset`.
    """
    check(end_offset is None or expected_offset is not None, "an end needs a beginning")
    starts: list[int] = []
    view = memoryview(buffer)
    size = len(view)
    if expected_offset is None:
        first = decode_frame(view, position)
        if not isinstance(first, Frame):
            return Scan(starts=starts, end=position, next_offset=None, stop=first)
        expected_offset = first.offset
    offset_next = expected_offset
    offset_end = _OFFSET_END if end_offset is None else end_offset
    if size - position >= _COMPILED_BYTES_MIN and offset_next < _COMPILED_OFFSET_END:
        if kernels.current() is not None:
            starts, position = kernels.scan(
                view, position, offset_next, min(offset_end, _COMPILED_OFFSET_END)
            )
            offset_next += len(starts)
        else:
            kernels.count_work(size - position)
    # One test for everything that can be wrong; what it was is found out once, behind the loop.
    while offset_next < offset_end and position + FRAME_HEADER_SIZE <= size:
        offset, length, crc = _unpack_header(view, position)
        body_start = position + FRAME_HEADER_SIZE
        body_end = body_start + length
        if (
            offset != offset_next
            or body_end > size
            or not 0 < length <= FRAME_BODY_BYTES_MAX
            or crc32(view[body_start:body_end]) != crc
        ):
            break
        starts.append(position)
        offset_next += 1
        position = body_end
    stop: Decoded = NeedMore(FRAME_HEADER_SIZE)
    if offset_next < offset_end:
        stop = decode_frame(view, position, expected_offset=offset_next)
    if isinstance(stop, Frame):
        raise InvariantError(f"the scan stopped before a good frame at {position}")
    return Scan(starts=starts, end=position, next_offset=offset_next, stop=stop)


def find_frame(
    buffer: Buffer, position: int, *, offset_min: int, offset_max: int
) -> tuple[int, int] | None:
    """Looks for the next whole frame at any position, after damage.

    Every byte is tried, so this is for small buffers and rare occasions. Only a frame whose offset
    lies in `offset_min..offset_max` (exclusive) and whose crc holds counts.

    Returns:
        The frame's position and offset, or None.
    """
    view = memoryview(buffer)
    last = len(view) - FRAME_HEADER_SIZE
    while position <= last:
        offset, length, crc = _unpack_header(view, position)
        if (
            offset_min <= offset < offset_max
            and 0 < length <= len(view) - position - FRAME_HEADER_SIZE
            and crc32(view[position + FRAME_HEADER_SIZE : position + FRAME_HEADER_SIZE + length])
            == crc
        ):
            return position, offset
        position += 1
    return None
