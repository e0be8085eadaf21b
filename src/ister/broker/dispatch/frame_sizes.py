"""The sizes of frames that a subscription has read and may have to read again.

Frames follow each other without a gap, in local files and in objects alike. So the position of a
frame is that of an index entry plus the sizes of the frames in between, and a single frame can be
read alone, in either tier. This takes 4 bytes for each message from the cursor on.

Owns: the sizes, in blocks of neighbours. Does not own: where a file begins. The user of a span
checks that the frame there has the expected offset, because messages may have been left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from ister.format.frame import FRAME_HEADER_SIZE

_BLOCK: Final = 4096
# Kept below the cursor: an index entry lies up to 256 KiB before the frame that it leads to.
_BLOCKS_BEHIND: Final = 2
# 4 million messages, 16 MiB; beyond, the oldest are found by the index alone.
_BLOCKS_MAX: Final = 1024


class FrameSizes:
    """The sizes of frames by offset; 0 where one is not known."""

    def __init__(self) -> None:
        self._blocks: dict[int, array[int]] = {}

    def __len__(self) -> int:
        """The number of sizes in all blocks, unknown ones included."""
        return _BLOCK * len(self._blocks)

    def record(self, first: int, body_sizes: Sequence[int]) -> None:
        """Records the sizes of consecutive messages, given those of their bodies."""
        sizes = array("I", [size + FRAME_HEADER_SIZE for size in body_sizes])
        at = 0
        while at < len(sizes):
            number, place = divmod(first + at, _BLOCK)
            block = self._blocks.get(number)
            if block is None:
                block = self._blocks[number] = array("I", bytes(4 * _BLOCK))
                while len(self._blocks) > _BLOCKS_MAX:
                    del self._blocks[min(self._blocks)]
            part = sizes[at : at + _BLOCK - place]
            block[place : place + len(part)] = part
            at += len(part)

    def of(self, offset: int) -> int:
        """The size of one frame; 0 if it is not known."""
        number, place = divmod(offset, _BLOCK)
        block = self._blocks.get(number)
        return 0 if block is None else block[place]

    def span(self, start: int, end: int) -> int | None:
        """The size of the frames of `start` up to `end`, in bytes; None if one is not known."""
        total = 0
        while start < end:
            number, place = divmod(start, _BLOCK)
            block = self._blocks.get(number)
            if block is None:
                return None
            part = block[place : place + end - start]
            if not all(part):
                return None
            total += sum(part)
            start += len(part)
        return total

    def forget_below(self, offset: int) -> None:
        """Removes blocks that are well below an offset."""
        lowest = offset // _BLOCK - _BLOCKS_BEHIND
        if self._blocks and min(self._blocks) < lowest:
            for number in [one for one in self._blocks if one < lowest]:
                del self._blocks[number]

    def clear(self) -> None:
        """Removes all sizes."""
        self._blocks.clear()
