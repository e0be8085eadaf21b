"""Partitioned topics: the names of their partitions, and which one a message goes to.

The topics `<name>-part-0`, `<name>-part-1`, ... are the partitions of the topic `<name>`. A topic
of that name without partitions cannot exist beside them. Messages with the same routing key go to
the same partition as with Danube's clients.

Owns: names and the hash. Does not own: which partitions there are.
"""

from __future__ import annotations

import re
from typing import Final

PARTITION_INFIX: Final = "-part-"
PARTITIONS_MAX: Final = 1024
"""The most partitions of a topic."""
_PARTITION: Final = re.compile(rf"(?P<base>.+){PARTITION_INFIX}(?P<number>0|[1-9][0-9]{{0,5}})")
_BASIS: Final = 0xCBF29CE484222325
_PRIME: Final = 0x100000001B3
_MASK: Final = (1 << 64) - 1


def partition_name(base: str, number: int) -> str:
    """The name of a partition."""
    return f"{base}{PARTITION_INFIX}{number}"


def parse_partition(name: str) -> tuple[str, int] | None:
    """Splits the name of a partition into topic and number; None if it is not a partition."""
    match = _PARTITION.fullmatch(name)
    return None if match is None else (match["base"], int(match["number"]))


def base_of_partition(name: str) -> str | None:
    """The topic that a partition belongs to, by its name; None if it is not a partition."""
    parsed = parse_partition(name)
    return None if parsed is None else parsed[0]


def hash_key(key: str) -> int:
    """FNV-1a of 64 bits, over the key in UTF-8."""
    value = _BASIS
    for byte in key.encode():
        value = (value ^ byte) * _PRIME & _MASK
    return value


def partition_of(key: str, partitions: int) -> int:
    """The number of the partition that all messages of a key go to."""
    return hash_key(key) % partitions
