"""The newest messages of a topic, in memory, for readers near the tail.

A ring of message bodies by offset, bounded by count and by bytes. Bodies are decoded at most once
however many readers there are, because the decoded message is kept beside its body.

Owns: the ring. Does not own: visibility; a cached message may be above what readers may see.
`append` and `read` are called with the log's lock held; both are short. A message is put here
before the log accepts it, so that every accepted message is cached; `mend` drops messages that were
not accepted.
"""

from __future__ import annotations

from ister.model import Codec
from ister.topic.message import Message, make_message

__all__ = ["Cache"]


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
        self._ring: list[bytes | None] = []
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
            self._messages = [None] * self._capacity
            self._ring = ring = [None] * self._capacity
            oldest = None
        if oldest is None:
            size = self.size_bytes + len(body)
        else:
            # The ring is full: this slot still holds the oldest message.
            self.start += 1
            size = self.size_bytes + len(body) - len(oldest)
        ring[slot] = body
        self.end = offset + 1
        self.size_bytes = size
        if size > self._bytes_max:
            self._shrink()

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
        ring: list[bytes | None] = [None] * capacity
        size = 0
        if old and self.end >= next_offset:
            while start > self.start and (body := old[(start - 1) % capacity]) is not None:
                start -= 1
                ring[start % capacity] = body
                size += len(body)
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
        """Drops the oldest until the bound on bytes holds; the newest always stays."""
        ring, capacity, start = self._ring, self._capacity, self.start
        size = self.size_bytes
        while start < self.end - 1 and size > self._bytes_max:
            body = ring[start % capacity]
            if body is not None:
                size -= len(body)
            ring[start % capacity] = None
            self._messages[start % capacity] = None
            start += 1
        self.start = start
        self.size_bytes = size

    def read(self, start: int, end: int, *, bytes_max: int) -> list[Message]:
        """The messages from `start` on, before `end`; empty if `start` is not here."""
        if not self.start <= start < self.end:
            return []
        ring, messages, capacity = self._ring, self._messages, self._capacity
        found: list[Message] = []
        size = 0
        for offset in range(start, min(end, self.end)):
            slot = offset % capacity
            body = ring[slot]
            if body is None:
                break
            size += len(body)
            if found and size > bytes_max:
                break
            message = messages[slot]
            if message is None or message.offset != offset:
                message = make_message(offset, body, 0, len(body), self._codec)
                messages[slot] = message
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
            size += len(body or b"")
            if body is None or (found and size > bytes_max):
                break
            found.append(body)
        return found
