"""Finds an offset by publish time: in the bucket, then in local files, or in memory.

    bucket, below `trimmed` ─► local files, up to the end of the range

Owns: the order in which the tiers are searched. Does not own: indexes and blocks (`ister.bucket`,
`ister.wal`), which part of a topic is searched. Messages that readers do not see yet are searched
too: a position by time has to be after older messages that become visible later.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import AckLevel
from ister.errors import CapacityError, CorruptDataError, NotFoundError
from ister.topic.bucket_link import TopicBucket
from ister.topic.cache import Cache
from ister.wal.log import Wal
from ister.wal.reader import WalReader

OnRead: TypeAlias = Callable[[int], None]
"""Called with the size of each chunk that was read; may raise to end the search."""


def searchable_end(wal: Wal) -> int:
    """The end of what can be searched by time, once everything appended so far is there."""
    if wal.is_volatile:
        return wal.next
    last, level = wal.next - 1, wal.levels.local_level
    with suppress(CapacityError):  # on a full disk, what is there already has to do
        if last >= 0:
            wal.wait(last, level if level is AckLevel.SYNCED else AckLevel.WRITTEN)
    return min(last + 1, wal.levels.watermark(level), wal.written)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSearch:
    """A search by time in one topic."""

    wal: Wal
    cache: Cache
    bucket: TopicBucket | None
    chunk_bytes: int
    clock: Clock
    metrics: Metrics
    on_read: OnRead | None

    def find(self, time_ms: int, start: int, end: int) -> int | None:
        """The first offset in a range whose message was published at or after the time."""
        wal = self.wal
        if wal.is_volatile:
            return self._find_in_memory(time_ms, start, end)
        searched = start
        while True:
            trimmed = min(wal.trimmed, end)
            found = self._find_in_history(time_ms, searched, trimmed)
            if found is not None:
                return found
            searched = max(searched, trimmed)
            found = self._find_in_files(time_ms, searched, end)
            # Files that were trimmed meanwhile have to be searched in the bucket.
            if min(wal.trimmed, end) <= searched:
                return found

    def _find_in_memory(self, time_ms: int, start: int, end: int) -> int | None:
        wal = self.wal
        with wal.lock:
            wal.fill_cache(wal.next)
            recent = self.cache.read(self.cache.start, wal.next, bytes_max=1 << 62)
        among = (m for m in recent if start <= m.offset < end)
        return next((m.offset for m in among if m.publish_time_ms >= time_ms), None)

    def _find_in_history(self, time_ms: int, start: int, end: int) -> int | None:
        if self.bucket is None or start >= end:
            return None
        history = self.bucket.history()
        try:
            return history.find_time(time_ms, start=start, end=end, on_read=self.on_read)
        finally:
            history.close()

    def _find_in_files(self, time_ms: int, start: int, end: int) -> int | None:
        if start >= end:
            return None
        wal, codec, on_read = self.wal, self.wal.settings.codec, self.on_read
        files = WalReader(wal, chunk_bytes=self.chunk_bytes, metrics=self.metrics, clock=self.clock)
        try:
            return files.find_time(time_ms, codec, start=start, end=end, on_read=on_read)
        except (CorruptDataError, NotFoundError):
            tiered = min(end, wal.tiered or 0)
            if self.bucket is None or tiered <= max(start, wal.trimmed):
                raise
            # The bucket has a copy of the first part.
            found = self._find_in_history(time_ms, max(start, wal.trimmed), tiered)
            if found is not None:
                return found
            return files.find_time(time_ms, codec, start=tiered, end=end, on_read=on_read)
        finally:
            files.close()
