"""Which partition a message goes to; the same one as with Danube's clients."""

from __future__ import annotations

from typing import Final

__all__ = ["hash_key", "partition_of"]

_BASIS: Final = 0xCBF29CE484222325
_PRIME: Final = 0x100000001B3
_MASK: Final = (1 << 64) - 1


def hash_key(key: str) -> int:
    """FNV-1a of 64 bits, over the key in UTF-8."""
    value = _BASIS
    for byte in key.encode():
        value = (value ^ byte) * _PRIME & _MASK
    return value


def partition_of(key: str, partitions: int) -> int:
    """The number of the partition that all messages of a key go to."""
    return hash_key(key) % partitions
