"""The loops over frames that `ister.kernels` compiles and calls; numba is an extra.

Nothing else imports them. They are in a separate file so that the cache on disk, which depends on
this file's content, stays valid when other code changes. Written for the compiler: flat,
fixed-width integers, no objects. Every index is checked against the buffer's size before it is
used. A loop stops at the first invalid byte; the caller then finds the reason in Python.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
from isal import isal_zlib
from llvmlite import binding
from numba import types

# isal's wheel exports its crc32 as a plain C function, which compiled code can call.
binding.load_library_permanently(isal_zlib.__file__)
_FRAME: Final = struct.pack("<QII", 0, 1, zlib.crc32(b"\xff")) + b"\xff"
"""A frame at offset 0, for `prove`."""
_Array: TypeAlias = Any  # numpy's, with elements that numba types as it compiles
_t: Any = types  # numba's stubs do not cover signatures
_crc32: Callable[[np.uint32, int, np.uint64], np.uint32] = _t.ExternalFunction(
    "crc32_gzip_refl", _t.uint32(_t.uint32, _t.uintp, _t.uint64)
)


def scan(  # noqa: PLR0917 - numba compiles positional arguments
    data: _Array, position: int, expected: int, end_offset: int, body_max: int, starts: _Array
) -> tuple[int, int]:
    """How many frames there are, with their positions in `starts`, and where they end."""
    size = data.shape[0]
    base = data.ctypes.data
    count = 0
    while expected < end_offset and position + 16 <= size:
        offset = np.uint64(0)
        for byte in range(8):
            offset |= np.uint64(data[position + byte]) << np.uint64(8 * byte)
        length = 0
        for byte in range(4):
            length |= int(data[position + 8 + byte]) << (8 * byte)
        crc = np.uint32(0)
        for byte in range(4):
            crc |= np.uint32(data[position + 12 + byte]) << np.uint32(8 * byte)
        body = position + 16
        if (
            offset != np.uint64(expected)
            or length == 0
            or length > body_max
            or body + length > size
            or _crc32(np.uint32(0), base + body, np.uint64(length)) != crc
        ):
            break
        starts[count] = position
        count += 1
        expected += 1
        position = body + length
    return count, position


def publish_times(data: _Array, starts: _Array, end: int, is_varint: bool, times: _Array) -> int:
    """The publish time of each frame's message, in `times`; how many could be read."""
    count: int = starts.shape[0]
    for frame in range(count):
        position = starts[frame] + 16
        limit = starts[frame + 1] if frame + 1 < count else end
        # Two ids, two texts, the offset, the payload, and then the time: see `ister.base.model`.
        for item in range(7):
            if is_varint:
                if position >= limit:
                    return frame
                tag = int(data[position])
                position += 1
                if tag < 251:
                    width = 0
                elif tag <= 253:
                    width = 2 << (tag - 251)
                else:
                    return frame
            else:
                tag = 0
                width = 8
            if width > limit - position:
                return frame
            value = np.uint64(tag)
            if width > 0:
                value = np.uint64(0)
                for byte in range(width):
                    value |= np.uint64(data[position + byte]) << np.uint64(8 * byte)
                position += width
            if item == 6:
                if value > np.uint64(0x7FFFFFFFFFFFFFFF):
                    return frame
                times[frame] = np.int64(value)
            elif item in (2, 3, 5):
                if value > np.uint64(limit - position):
                    return frame
                position += np.int64(value)
    return count


def fill(data: _Array, first_offset: int, count: int, prefix_size: int, is_varint: bool) -> int:
    """Writes offsets and crcs into frames that have all else; returns where they end.

    Stops before a frame that is not whole, or whose body has no room for the offset.
    """
    size = data.shape[0]
    base = data.ctypes.data
    position = 0
    for offset in range(first_offset, first_offset + count):
        body = position + 16
        if body > size:
            return position
        length = 0
        for byte in range(4):
            length |= int(data[position + 8 + byte]) << (8 * byte)
        place = body + prefix_size
        width = 8
        if is_varint:
            if offset < 251:
                width = 1
            elif offset < 1 << 16:
                width = 2
            elif offset < 1 << 32:
                width = 4
            if width > 1:
                place += 1
        if place + width > body + length or body + length > size:
            return position
        for byte in range(width):
            data[place + byte] = (offset >> (8 * byte)) & 0xFF
        crc = _crc32(np.uint32(0), base + body, np.uint64(length))
        for byte in range(8):
            data[position + byte] = (offset >> (8 * byte)) & 0xFF
        for byte in range(4):
            data[position + 12 + byte] = (crc >> np.uint32(8 * byte)) & np.uint32(0xFF)
        position = body + length
    return position


# To numba, read-only arrays are a separate type; the loops are called with these only.
_BYTES = _t.Array(_t.uint8, 1, "C", readonly=True)
_NUMBERS, _INT = _t.int64[::1], _t.int64

LOOPS: Final = {
    "scan": (scan, _t.UniTuple(_INT, 2)(_BYTES, _INT, _INT, _INT, _INT, _NUMBERS)),
    "fill": (fill, _INT(_t.uint8[::1], _INT, _INT, _INT, _t.boolean)),
    "publish_times": (publish_times, _INT(_BYTES, _NUMBERS, _INT, _t.boolean, _NUMBERS)),
}
"""The functions to compile, each with its signature; `ister.kernels` replaces them here."""


def prove() -> None:
    """Checks the compiled loops with a known frame.

    Raises:
        RuntimeError: A loop returns a wrong result.
    """
    data = np.frombuffer(_FRAME, dtype=np.uint8)
    numbers = np.zeros(4, dtype=np.int64)
    if scan(data, 0, 0, 1, len(_FRAME), numbers) != (1, len(_FRAME)):
        raise RuntimeError("the compiled scan does not find a frame")
    blank = np.frombuffer(bytearray(struct.pack("<QII", 0, 1, 0) + b"\0"), dtype=np.uint8)
    if fill(blank, 255, 1, 0, False) != 0 or fill(blank, 7, 1, 0, True) != len(blank):
        raise RuntimeError("the compiled loop finishes frames that it should not, or none")
    if blank.tobytes() != struct.pack("<QII", 7, 1, zlib.crc32(b"\7")) + b"\7":
        raise RuntimeError("the compiled loop does not finish a frame")
    # The frame's body is not a message.
    if publish_times(data, numbers[:1], len(_FRAME), True, numbers[1:2]) != 0:
        raise RuntimeError("the compiled loop finds a publish time in an invalid message")
