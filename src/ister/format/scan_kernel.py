"""The loop that `ister.format.compiled` loads; nothing else imports it, because numba is an extra.

Kept apart so that numba's cache on disk, which goes by this file, stays valid when other code
changes. Written for the compiler: flat, fixed-width integers, no objects. Every index is checked
against the buffer's size before it is used. It stops at the first byte that is not part of a whole,
expected frame; why is found out in Python, once.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from isal import isal_zlib
from llvmlite import binding
from numba import types

__all__ = ["scan"]

# isal's wheel exports its crc32 as a plain C function, which compiled code can call.
binding.load_library_permanently(isal_zlib.__file__)
_crc32: Any = types.ExternalFunction(
    "crc32_gzip_refl", types.uint32(types.uint32, types.uintp, types.uint64)
)


@numba.njit(cache=True, nogil=True)
def scan(  # noqa: PLR0917 - numba compiles positional arguments
    data: Any,  # noqa: ANN401 - an array of bytes
    position: int,
    expected: int,
    end_offset: int,
    body_max: int,
    starts: Any,  # noqa: ANN401 - an array of integers
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
