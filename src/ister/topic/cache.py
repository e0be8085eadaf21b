"""The newest messages of a topic, in memory, for readers near the tail.

A ring by offset, bounded by count and by bytes. A slot refers to the run of frames that its message
belongs to, which is one chunk of the append buffer, so a message costs nothing here until it is
read. A body is decoded at most once however many readers there are, because the decoded message
is kept beside its entry.

A run counts with all of its bytes until its last message is evicted, because they stay in memory
until then. A run that is larger than the cache may be is split into bodies.

Owns: the ring. Does not own: visibility; a cached message may be above what readers may see.
All methods are called with the log's lock held; they are short. The append buffer adds each chunk
when it is sealed; readers first seal the open chunk (`Wal.fill_cache`), so that every accepted
message is found. Nothing here survives a crash; readers fall back to the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ister.base.model import Codec
from ister.format.frame import FRAME_HEADER_SIZE, frame_starts
from ister.topic.message import Message, make_message
from ister.wal.buffer import Chunk

_T = TypeVar("_T")


class _Run:
    """The frames of a chunk, as they are in the log."""

    __slots__ = ("_chunk", "_data", "_starts", "end", "first", "size_bytes")

    def __init__(self, chunk: Chunk) -> None:
        self.first = chunk.first_offset
        self.end = chunk.end_offset
        self.size_bytes = chunk.size_bytes
        self._chunk: Chunk | None = chunk
        self._data = b""
        self._starts: list[int] = []

    @property
    def data(self) -> bytes:
        """The frames' bytes."""
        chunk = self._chunk
        if chunk is not None:
            self._data = bytes(chunk.data())
            self._chunk = None
        return self._data

    def body_at(self, offset: int) -> tuple[int, int]:
        """Returns where the body of a message begins and ends in `data`."""
        if not self._starts:
            self._starts = frame_starts(self.data, self.end - self.first)
        at = offset - self.first
        return self._starts[at] + FRAME_HEADER_SIZE, self._starts[at + 1]


class Cache:
    """The messages `start` up to, not including, `end`."""

    __slots__ = (
        "_bytes_max",
        "_capacity",
        "_codec",
        "_messages",
        "_ring",
        "_start_initial",
        "end",
        "size_bytes",
        "start",
    )

    def __init__(self, *, capacity: int, bytes_max: int, next_offset: int, codec: Codec) -> None:
        self._capacity = capacity
        # Offset n is in slot n % capacity. An idle topic has no ring: thousands cost nothing.
        self._ring: list[bytes | _Run | None] = []
        self._messages: list[Message | None] = []
        self._bytes_max = bytes_max
        self._codec = codec
        self._start_initial = next_offset
        self.size_bytes = 0
        self.start = next_offset
        self.end = next_offset

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def evictions(self) -> int:
        """How many messages have left the cache."""
        return self.start - self._start_initial

    def append(self, chunk: Chunk) -> None:
        """Adds the next messages; evicts the oldest ones beyond a bound."""
        run = _Run(chunk)
        if run.size_bytes > self._bytes_max:
            # As a run, all of it would stay in memory for the sake of the last few messages.
            self._append_bodies(run)
            return
        ring = self._ring or self._allocate()
        self._evict_to(run.end - self._capacity)
        first = self.start = max(self.start, run.end - self._capacity)
        self._fill(ring, max(run.first, first), run.end, run)
        self.end = run.end
        self.size_bytes += run.size_bytes
        if self.size_bytes > self._bytes_max:
            self._shrink()

    def _append_bodies(self, run: _Run) -> None:
        """Adds the newest messages of a run one by one, as many as fit."""
        size, first = 0, run.end
        while first > run.first and run.end - first < self._capacity:
            start, stop = run.body_at(first - 1)
            size += stop - start
            if size > self._bytes_max and first < run.end:
                size -= stop - start
                break
            first -= 1
        self.skip_to(first)
        ring = self._allocate()
        for offset in range(first, run.end):
            start, stop = run.body_at(offset)
            ring[offset % self._capacity] = run.data[start:stop]
        self.end = run.end
        self.size_bytes = size

    def _allocate(self) -> list[bytes | _Run | None]:
        self._messages = [None] * self._capacity
        self._ring = [None] * self._capacity
        return self._ring

    def _fill(self, slots: list[_T], start: int, end: int, value: _T) -> None:
        """Sets the slots of `start` up to, not including, `end`; at most `capacity` of them."""
        first, count, capacity = start % self._capacity, end - start, self._capacity
        behind = min(count, capacity - first)
        slots[first : first + behind] = [value] * behind
        slots[: count - behind] = [value] * (count - behind)

    def _evict_to(self, offset: int) -> None:
        """Drops the messages before `offset`; one step for all messages of a run."""
        ring, messages, capacity = self._ring, self._messages, self._capacity
        start, size = self.start, self.size_bytes
        upto = min(offset, self.end)
        while start < upto:
            slot = start % capacity
            entry = ring[slot]
            if isinstance(entry, _Run):
                after = min(entry.end, upto)
                if after == entry.end:
                    size -= entry.size_bytes
                self._fill(ring, start, after, None)
                self._fill(messages, start, after, None)
                start = after
                continue
            if entry is not None:
                size -= len(entry)
            ring[slot] = messages[slot] = None
            start += 1
        self.start = start
        self.size_bytes = size

    def skip_to(self, offset: int) -> None:
        """Empties the cache; the next message it gets is that of `offset`."""
        self._ring, self._messages = [], []
        self.size_bytes = 0
        self.start = self.end = offset

    def mend(self, end: int, chunks: Sequence[Chunk]) -> None:
        """Repairs the cache after an interrupted append, so that it ends before `end`.

        Idempotent: an interrupted repair can be repeated.

        `chunks`: the newest sealed chunks; the last one may be missing here.
        """
        old, capacity, start = self._ring, self._capacity, self.end
        ring: list[bytes | _Run | None] = [None] * capacity
        size = 0
        while old and start > self.start and (entry := old[(start - 1) % capacity]) is not None:
            start -= 1
            ring[start % capacity] = entry
            if isinstance(entry, bytes):
                size += len(entry)
            elif start == entry.end - 1:
                size += entry.size_bytes
        if start == self.end:
            self.skip_to(self.end)
        else:
            self._messages = [None] * capacity
            self._ring = ring
            self.start = start
            self.size_bytes = size
        for chunk in chunks:
            if chunk.first_offset >= self.end:
                if chunk.first_offset > self.end:
                    self.skip_to(chunk.first_offset)
                self.append(chunk)
        if self.end < end:
            self.skip_to(end)

    def _shrink(self) -> None:
        """Drops the oldest until the bound on bytes holds; the newest entry always stays."""
        ring, capacity, end = self._ring, self._capacity, self.end
        newest = ring[(end - 1) % capacity]
        last = newest.first if isinstance(newest, _Run) else end - 1
        while self.start < last and self.size_bytes > self._bytes_max:
            oldest = ring[self.start % capacity]
            self._evict_to(oldest.end if isinstance(oldest, _Run) else self.start + 1)

    def read(self, start: int, end: int, *, bytes_max: int) -> list[Message]:
        """The messages from `start` on, before `end`; empty if `start` is not cached."""
        if not self.start <= start < self.end:
            return []
        ring, messages, capacity = self._ring, self._messages, self._capacity
        found: list[Message] = []
        size = 0
        for offset in range(start, min(end, self.end)):
            slot = offset % capacity
            message = messages[slot]
            if message is None or message.offset != offset:
                entry = ring[slot]
                if entry is None:
                    break
                if isinstance(entry, bytes):
                    message = make_message(offset, entry, 0, len(entry), self._codec)
                else:
                    message = make_message(offset, entry.data, *entry.body_at(offset), self._codec)
                messages[slot] = message
            size += message.size_bytes
            if found and size > bytes_max:
                break
            found.append(message)
        return found

    def bodies(self, start: int, end: int, *, bytes_max: int) -> list[bytes]:
        """The encoded messages from `start` on, before `end`; empty if `start` is not cached."""
        if not self.start <= start < self.end:
            return []
        found: list[bytes] = []
        size = 0
        for offset in range(start, min(end, self.end)):
            body = self._ring[offset % self._capacity]
            if isinstance(body, _Run):
                first, stop = body.body_at(offset)
                body = body.data[first:stop]
            size += len(body or b"")
            if body is None or (found and size > bytes_max):
                break
            found.append(body)
        return found
