"""The newest messages of a topic, in memory, for readers near the tail.

A ring by offset, bounded by count and by bytes. A slot holds the body of a message appended on its
own, or the run of frames that its message was appended with: all rows of a batch share one entry,
so that a batch costs no object per message until somebody reads it. Bodies are decoded at most once
however many readers there are, because the decoded message is kept beside its entry.

A run counts with all its bytes until its last message has left: so long they are in memory.

Owns: the ring. Does not own: visibility; a cached message may be above what readers may see.
All methods are called with the log's lock held; they are short. A message is put here
before the log accepts it, so that every accepted message is cached; `mend` drops messages that were
not accepted.
"""

from __future__ import annotations

from typing import TypeVar

from ister.format.frame import FRAME_HEADER_SIZE, scan_frames
from ister.model import Codec
from ister.topic.message import Message, make_message

__all__ = ["Cache"]

_T = TypeVar("_T")


class _Run:
    """Frames of the messages `first` up to, not including, `end`, as they are in the log."""

    __slots__ = ("_starts", "data", "end", "first")

    def __init__(self, data: bytes, first: int, end: int) -> None:
        self.data = data
        self.first = first
        self.end = end
        self._starts: list[int] | None = None

    def body_at(self, offset: int) -> tuple[int, int]:
        """Where the body of a message begins and ends in `data`."""
        starts = self._starts
        if starts is None:
            scan = scan_frames(self.data, expected_offset=self.first)
            starts = self._starts = [*scan.starts, scan.end]
        at = offset - self.first
        return starts[at] + FRAME_HEADER_SIZE, starts[at + 1]


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
        # Offset n lies in slot n % capacity. An idle topic has no ring: thousands cost nothing.
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

    def append(self, offset: int, body: bytes) -> None:
        """Takes the next message; the oldest ones go where a bound is passed. The hot path."""
        ring = self._ring
        slot = offset % self._capacity
        try:
            oldest = ring[slot]
        except IndexError:
            ring = self._allocate()
            oldest = None
        size = self.size_bytes + len(body)
        if oldest is not None:
            # The ring is full: this slot still holds the oldest message.
            self.start += 1
            if isinstance(oldest, bytes):
                size -= len(oldest)
            elif oldest.end == self.start:
                size -= len(oldest.data)
        ring[slot] = body
        self.end = offset + 1
        self.size_bytes = size
        if size > self._bytes_max:
            self._shrink()

    def append_frames(self, frames: bytes, offset: int, count: int) -> None:
        """Takes the next `count` messages, of which `frames` holds the frames."""
        end = offset + count
        run = _Run(frames, offset, end)
        if len(frames) > self._bytes_max:
            # As a run, all of it would stay in memory for the last few messages.
            for number in range(max(offset, end - self._capacity), end):
                start, stop = run.body_at(number)
                if number > self.end:
                    self.skip_to(number)
                self.append(number, frames[start:stop])
            return
        ring = self._ring or self._allocate()
        self._evict_to(end - self._capacity)
        first = self.start = max(self.start, end - self._capacity)
        self._fill(ring, max(offset, first), end, run)
        self.end = end
        self.size_bytes += len(frames)
        if self.size_bytes > self._bytes_max:
            self._shrink()

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
                    size -= len(entry.data)
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
        """Begins anew at `offset`, empty: what lies before it went past the cache."""
        self._ring, self._messages = [], []
        self.size_bytes = 0
        self.start = self.end = offset

    def mend(self, next_offset: int) -> None:
        """Repairs the cache after an interrupted append, so that it ends before `next_offset`.

        Idempotent: an interrupted repair can be repeated.
        """
        old, capacity, start = self._ring, self._capacity, next_offset
        ring: list[bytes | _Run | None] = [None] * capacity
        size = 0
        if old and self.end >= next_offset:
            while start > self.start and (entry := old[(start - 1) % capacity]) is not None:
                start -= 1
                ring[start % capacity] = entry
                if isinstance(entry, bytes):
                    size += len(entry)
                elif start == entry.end - 1:
                    size += len(entry.data)
        if start == next_offset:
            self.skip_to(next_offset)
            return
        self._messages = [None] * capacity
        self._ring = ring
        self.start = start
        self.end = next_offset
        self.size_bytes = size
        if size > self._bytes_max:
            self._shrink()

    def _shrink(self) -> None:
        """Drops the oldest until the bound on bytes holds; the newest entry always stays."""
        ring, capacity, end = self._ring, self._capacity, self.end
        newest = ring[(end - 1) % capacity]
        last = newest.first if isinstance(newest, _Run) else end - 1
        while self.start < last and self.size_bytes > self._bytes_max:
            oldest = ring[self.start % capacity]
            self._evict_to(oldest.end if isinstance(oldest, _Run) else self.start + 1)

    def read(self, start: int, end: int, *, bytes_max: int) -> list[Message]:
        """The messages from `start` on, before `end`; empty if `start` is not here."""
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
        """The encoded messages from `start` on, before `end`; empty if `start` is not here."""
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
