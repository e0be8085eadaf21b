"""crc32 with the zlib polynomial, from the fastest library at hand.

`isal` is about three times as fast as zlib on the sizes that matter here. Both give the same
numbers, so a log written with one is read with the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

# The buffer protocol has no name in the type system of Python 3.11.
crc32: Callable[..., int]

try:
    from isal import isal_zlib

    crc32 = isal_zlib.crc32
except ImportError:  # pragma: no cover - depends on the platform's wheels
    import zlib

    crc32 = zlib.crc32

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes."""
