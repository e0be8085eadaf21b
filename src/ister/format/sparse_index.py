"""The sparse index that lies beside each WAL file: where to begin reading for an offset or a time.

    0       8          16                 24        28     32
    ┌────────┬──────────┬──────────────────┬─────────┬──────┐
    │ offset │ position │ publish_time_max │ 'ISIX'  │ crc  │    one entry, repeated
    └────────┴──────────┴──────────────────┴─────────┴──────┘
       u64        u64        u64 (ms)                  u32, over the 28 bytes before it

An entry says: the frame `offset` begins at `position`, and no message before it in this file was
published after `publish_time_max`. Entries ascend strictly in offset and position. Each stands for
itself, so a torn or zeroed tail costs entries, never the file; a reader checks the frame that an
entry points at before it believes it. An index can always be built again from its file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from ister.base.limits import INDEX_ENTRIES_MAX
from ister.format.crc import Buffer, crc32

_BODY: Final = struct.Struct("<QQQ4s")
_CRC: Final = struct.Struct("<I")
_MARK: Final = b"ISIX"
INDEX_ENTRY_SIZE: Final = _BODY.size + _CRC.size


class IndexEntry(NamedTuple):
    """One entry; see the module header."""

    offset: int
    position: int
    publish_time_max: int


def encode_index(entries: Iterable[IndexEntry]) -> bytes:
    """The bytes of the entries, one after the other."""
    parts: list[bytes] = []
    for entry in entries:
        body = _BODY.pack(*entry, _MARK)
        parts += (body, _CRC.pack(crc32(body)))
    return b"".join(parts)


def decode_index(data: Buffer) -> list[IndexEntry]:
    """The entries up to the first bad one."""
    entries: list[IndexEntry] = []
    previous = IndexEntry(-1, -1, 0)
    whole = min(len(data) // INDEX_ENTRY_SIZE, INDEX_ENTRIES_MAX)
    for start in range(0, whole * INDEX_ENTRY_SIZE, INDEX_ENTRY_SIZE):
        offset, position, publish_time_max, mark = _BODY.unpack_from(data, start)
        (crc,) = _CRC.unpack_from(data, start + _BODY.size)
        if mark != _MARK or crc32(data[start : start + _BODY.size]) != crc:
            break
        if (
            offset <= previous.offset
            or position <= previous.position
            or publish_time_max < previous.publish_time_max
        ):
            break
        previous = IndexEntry(offset, position, publish_time_max)
        entries.append(previous)
    return entries
