"""Gathers what a descriptor says about an object while its frames go by.

One pass, no frame is kept. The index gets an entry every so many messages or bytes, whichever
comes first, so that a reader finds its place among small messages and among large ones; when there
are too many entries every second one goes and both distances double.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from ister.errors import check
from ister.format.crc import Buffer, crc32
from ister.format.descriptor import ObjectDescriptor, format_checksum
from ister.format.frame import FrameBatch
from ister.format.message import decode_publish_times
from ister.limits import MIB, OBJECT_INDEX_ENTRIES_MAX
from ister.model import Codec

__all__ = ["ObjectSummary"]

_INDEX_BYTES: Final = MIB


class ObjectSummary:
    """The sum of the frames of one object, in their order."""

    def __init__(self, start: int, *, index_every_messages: int) -> None:
        self.start = start
        self.end = start
        self.size_bytes = 0
        self.crc = 0
        self.codec: Codec | None = None
        self._every_messages = index_every_messages
        self._every_bytes = _INDEX_BYTES
        self._index: list[tuple[int, int]] = []
        self._times_before: list[int] = []
        self._time_min: int | None = None
        self._time_max = 0
        self._has_times = True

    def add(self, batch: FrameBatch) -> Buffer:
        """Takes the next frames; returns their bytes, which are the object's next ones."""
        check(batch.first_offset == self.end, "frames of an object follow each other")
        check(self.codec in (None, batch.codec), "an object has one codec")
        self.codec = batch.codec
        first = batch.starts[0]
        data: Buffer = batch.chunk
        if first or batch.end < len(data):
            data = memoryview(data)[first : batch.end]
        self.crc = crc32(data, self.crc)
        times = (
            decode_publish_times(batch.chunk, batch.starts, batch.end, batch.codec)
            if self._has_times
            else None
        )
        self._has_times = times is not None
        self._add_entries(batch, first, times or [])
        if times:
            low, high = min(times), max(times)
            self._time_max = max(self._time_max, high)
            self._time_min = low if self._time_min is None else min(self._time_min, low)
        self.size_bytes += len(data)
        self.end = batch.next_offset
        return data

    def _add_entries(self, batch: FrameBatch, first: int, times: list[int]) -> None:
        """Puts those frames of a batch into the index whose turn it is."""
        base = self.size_bytes - first
        count = len(batch.starts)
        at, time_max, seen = 0, self._time_max, 0
        while True:
            if self._index:
                offset, position = self._index[-1]
                at = min(
                    max(offset + self._every_messages - self.end, 0),
                    bisect_left(batch.starts, position + self._every_bytes - base),
                )
            if at >= count:
                return
            if times:
                time_max = max([time_max, *times[seen:at]])
                seen = at
            self._index.append((self.end + at, base + batch.starts[at]))
            self._times_before.append(time_max)
            if len(self._index) > OBJECT_INDEX_ENTRIES_MAX:
                del self._index[1::2]
                del self._times_before[1::2]
                self._every_messages *= 2
                self._every_bytes *= 2

    def describe(
        self,
        object_id: str,
        *,
        epoch: int,
        incarnation: str,
        created_at: int,
        etag: str | None,
    ) -> ObjectDescriptor:
        """The descriptor of an object with exactly these frames."""
        return ObjectDescriptor(
            object_id=object_id,
            start=self.start,
            end=self.end,
            size_bytes=self.size_bytes,
            etag=etag,
            created_at=created_at,
            offset_index=tuple(self._index),
            codec=self.codec,
            epoch=epoch,
            incarnation=incarnation,
            messages=self.end - self.start,
            publish_time_min=self._time_min if self._has_times else None,
            publish_time_max=self._time_max if self._has_times else None,
            publish_time_index=tuple(self._times_before) if self._has_times else (),
            checksum=format_checksum(self.crc),
        )
