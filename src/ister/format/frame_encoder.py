"""Encodes the messages of one topic as frames, many at a time.

An append stores three parts for a message, and computes nothing:

     ┌──────────────────┬───────────────────┬─────────┬───────────────────────┐
     │ 0 │ len │ 0      │ ids · topic · 0 · │ payload │ publish time · suffix │
     └──────────────────┴───────────────────┴─────────┴───────────────────────┘
       frame header       body
     └──────── `blank`: without offset and crc ────────┘ as given ┘ └── `tail` ──┘

All messages of one size share a blank, and all messages of one millisecond share a tail. `fill`
joins the parts of many messages, writes the offsets and computes the crcs: with JIT-compiled code
where that is loaded, in a fraction of the time and without the interpreter lock.

Owns: the parts and how they become frames. Does not own: the encoding of bodies
(`ister.format.message`), which these are byte for byte; offsets; size limits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from ister import kernels
from ister.base.limits import KIB
from ister.base.model import Codec
from ister.errors import check
from ister.format.bincode import varint_form
from ister.format.crc import crc32
from ister.format.frame import FRAME_HEADER_SIZE, pack_header
from ister.format.message import BodyEncoder

_U64: Final = struct.Struct("<Q")
# The compiled loop counts in signed 64-bit integers; what lies beyond is left to Python.
_COMPILED_OFFSET_END: Final = (1 << 63) - 1
# Below this a call of the compiled loop costs more than it saves.
_COMPILED_BYTES_MIN: Final = 4 * KIB


class FrameEncoder:
    """Encodes the messages of one topic. Immutable."""

    __slots__ = ("_codec", "_number", "_prefix")

    def __init__(self, *, topic_name: str, codec: Codec) -> None:
        self._codec = codec
        bodies = BodyEncoder(codec)
        self._number = bodies.number
        # request_id and producer_id name a producer's connection and broker_addr the broker;
        # a log opened in-process has none of them.
        self._prefix = bodies.head(0, 0, topic_name, "")

    def blank(self, offset: int, payload_size: int, tail_size: int) -> tuple[bytes, int]:
        """Returns what comes before the payload, with zeros for the offset and the crc.

        Returns:
            The bytes, and the first offset above `offset` that does not fit into them.
        """
        if self._codec is Codec.BINCODE2:
            _, end, tag, letter = varint_form(offset)
            head = self._prefix + tag + bytes(struct.calcsize(f"<{letter}"))
        else:
            end = 1 << 64
            head = self._prefix + bytes(8)
        head += self._number(payload_size)
        return pack_header(0, len(head) + payload_size + tail_size, 0) + head, end

    def tail(self, publish_time_ms: int, suffix: bytes) -> bytes:
        """Returns what comes after the payload; `suffix` is from `BodyEncoder.tail`."""
        return self._number(publish_time_ms) + suffix

    def fill(self, parts: Sequence[bytes], first_offset: int) -> bytes | bytearray:
        """Returns the frames of messages with successive offsets.

        `parts` are blank, payload and tail of each message.
        """
        size, count = sum(map(len, parts)), len(parts) // 3
        if not (
            kernels.current() is not None
            and size >= _COMPILED_BYTES_MIN
            and first_offset + count <= _COMPILED_OFFSET_END
        ):
            kernels.count_work(size)
            return self._fill(parts, first_offset)
        data = bytearray().join(parts)
        end = kernels.fill(
            data, first_offset, count, len(self._prefix), is_varint=self._codec is Codec.BINCODE2
        )
        check(end == size, "the parts of messages are whole frames")
        return data

    def _fill(self, parts: Sequence[bytes], first_offset: int) -> bytes:
        """Like `fill`, in Python."""
        pack, place, place_end = _U64.pack, FRAME_HEADER_SIZE + len(self._prefix), 0
        offset_end = -1 if self._codec is Codec.BINCODE2 else 1 << 64
        frames: list[bytes] = []
        last = before = after = b""
        each, join = iter(parts), b"".join
        offset = first_offset
        for blank, payload, tail in zip(each, each, each, strict=True):
            if blank is not last or offset >= offset_end:
                last = blank
                if offset >= offset_end:
                    _, offset_end, tag, letter = varint_form(offset)
                    pack = struct.Struct(f"<{letter}").pack
                    place = FRAME_HEADER_SIZE + len(self._prefix) + len(tag)
                place_end = place + len(pack(0))
                before, after = blank[FRAME_HEADER_SIZE:place], blank[place_end:]
            body = join((before, pack(offset), after, payload, tail))
            frames += (pack_header(offset, len(body), crc32(body)), body)
            offset += 1
        return join(frames)
