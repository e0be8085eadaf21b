"""The sparse index of one WAL file, in memory.

Answers where to begin reading for an offset or a time; the bytes are `ister.format.sparse_index`,
when they are saved is the writer's business. Entry 0 is the file's first frame at position 0.
Appended to by one thread while others search: lists only grow, and a search that misses the
newest entry starts a little earlier in the file, which is always correct.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter

from ister.base.limits import INDEX_STRIDE_BYTES
from ister.format.sparse_index import IndexEntry


class SparseIndex:
    """Entries in ascending order; see the module header."""

    __slots__ = ("entries", "saved_count")

    def __init__(self, entries: list[IndexEntry] | None = None, *, saved_count: int = 0) -> None:
        self.entries: list[IndexEntry] = entries if entries is not None else []
        self.saved_count = saved_count
        """How many entries are in the index file."""

    def wants(self, position: int) -> bool:
        """Whether an entry at `position` is due."""
        return not self.entries or position - self.entries[-1].position >= INDEX_STRIDE_BYTES

    def add(self, offset: int, position: int, publish_time_max: int) -> None:
        """Adds an entry behind the others."""
        self.entries.append(IndexEntry(offset, position, publish_time_max))

    def find_offset(self, offset: int) -> IndexEntry | None:
        """The last entry at or before `offset`."""
        at = bisect_right(self.entries, offset, key=attrgetter("offset"))
        return self.entries[at - 1] if at else None

    def find_time(self, publish_time: int) -> IndexEntry | None:
        """The last entry before which every message was published before `publish_time`.

        `publish_time_max` never falls from entry to entry, whatever the producers' clocks did, so
        the first message at or after `publish_time` is not before this entry.
        """
        at = bisect_right(self.entries, publish_time - 1, key=attrgetter("publish_time_max"))
        return self.entries[at - 1] if at else None

    def cut(self, position: int) -> None:
        """Drops the entries that point at or behind `position`."""
        keep = bisect_right(self.entries, position - 1, key=attrgetter("position"))
        del self.entries[keep:]
        self.saved_count = min(self.saved_count, keep)
