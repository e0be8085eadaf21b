"""Calls the compiled loops over frames.

Their results equal those of the loops in `ister.format.frame` and `ister.format.message`, several
times as fast and without holding the interpreter lock. They need the extra `ister[fast]`
(numba) and isal, whose crc32 is called directly. `ister.kernels` loads them.

Owns: how the loops are called. Does not own: what their results mean.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Final, cast

from ister import kernels
from ister.base.limits import FRAME_BODY_BYTES_MAX
from ister.format.crc import Buffer

if TYPE_CHECKING:
    from ister.format.arrow.loops import IntArray

_FRAME_BYTES_MIN: Final = 17


def is_loaded() -> bool:
    """Whether scans are compiled by now."""
    return kernels.current() is not None


def scan(
    buffer: Buffer, position: int, expected_offset: int, end_offset: int
) -> tuple[list[int], int]:
    """The positions of the whole frames from `position` on, and where they end."""
    loaded = kernels.current()
    if loaded is None:
        raise RuntimeError("the compiled scan is not loaded")
    numpy = loaded.numpy
    data = _as_bytes(numpy, buffer)
    # Pages of this array that no frame needs are never touched.
    starts = numpy.empty(data.shape[0] // _FRAME_BYTES_MIN + 1, dtype=numpy.int64)
    count, end = loaded.scan.scan(
        data, position, expected_offset, end_offset, FRAME_BODY_BYTES_MAX, starts
    )
    return starts[:count].tolist(), int(end)


def publish_times(
    buffer: Buffer, starts: list[int], end: int, *, is_varint: bool
) -> list[int] | None:
    """The publish time of each frame's message; None if one of them cannot be read."""
    loaded = kernels.current()
    if loaded is None:
        raise RuntimeError("the compiled loops are not loaded")
    numpy = loaded.numpy
    times = numpy.empty(len(starts), dtype=numpy.int64)
    count = loaded.scan.publish_times(
        _as_bytes(numpy, buffer),
        numpy.array(starts, dtype=numpy.int64),
        end,
        is_varint,
        times,
    )
    found: list[int] = times.tolist()
    return found if count == len(starts) else None


def fill(
    data: bytearray, first_offset: int, count: int, prefix_size: int, *, is_varint: bool
) -> int:
    """Writes offsets and crcs into blank frames; returns where they end."""
    loaded = kernels.current()
    if loaded is None:
        raise RuntimeError("the compiled loops are not loaded")
    frames = loaded.numpy.frombuffer(data, dtype=loaded.numpy.uint8)
    return int(loaded.scan.fill(frames, first_offset, count, prefix_size, is_varint))


def _as_bytes(numpy: ModuleType, buffer: Buffer) -> IntArray:
    data = numpy.frombuffer(buffer, dtype=numpy.uint8)
    # The loops are compiled for read-only arrays.
    data.flags.writeable = False
    return cast("IntArray", data)
