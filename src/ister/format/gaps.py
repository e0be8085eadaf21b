"""The record of offsets that an operator has given up: `wal.gaps`, beside the files of a log.

    {"gaps": [[120, 140]], "files": [[0, 0], [1, 100]], "next": 150, "seq": 2} 0a1b2c3d

One line of JSON, a space, and its crc32. The offsets of `gaps`, each a half-open range, are in no
file and are never used again. `files` are the numbers and first offsets of the files that existed
when it was written; the log continues at the offset `next`, in the file number `seq`. The record is
missing if nothing was ever given up. A damaged one counts as missing: readers then stop at the gap
with an error, and an operator gives it up again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ister.format.crc import crc32


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """What was given up, and where the log continues."""

    ranges: tuple[tuple[int, int], ...]
    """Ascending, each from its first offset up to, not including, its second one."""
    files: tuple[tuple[int, int], ...]
    """Number and first offset of each file before the log continued, in the order of offsets."""
    next_offset: int
    seq: int


def encode_gaps(gaps: Gaps) -> bytes:
    """The content of `wal.gaps`."""
    fields = {"gaps": gaps.ranges, "files": gaps.files, "next": gaps.next_offset, "seq": gaps.seq}
    text = json.dumps(fields).encode()
    return b"%s %08x\n" % (text, crc32(text))


def decode_gaps(data: bytes) -> Gaps | None:
    """The content of `wal.gaps`; None if it is damaged."""
    text, _, crc = data.rstrip(b"\n").rpartition(b" ")
    if crc != b"%08x" % crc32(text):
        return None
    try:
        fields = json.loads(text)
        return Gaps(
            ranges=tuple((int(start), int(end)) for start, end in fields["gaps"]),
            files=tuple((int(seq), int(first)) for seq, first in fields["files"]),
            next_offset=int(fields["next"]),
            seq=int(fields["seq"]),
        )
    except (ValueError, TypeError, KeyError):
        return None
