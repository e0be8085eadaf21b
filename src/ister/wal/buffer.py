"""The append buffer: where frames are from `append` until they are written.

    chunk (sealed) · chunk (sealed) · parts of the open chunk: header, body, header, body …

Owns: `next`, the lock under which offsets are given out, the frames, the bound on their bytes.
Does not own: when somebody has to be woken or has to write; `push` calls `on_attention` when
`appended_bytes` passes `attention_at`, which whoever commits sets as it needs.

All methods are called with `lock` held, except where they say otherwise. The counters are bytes
since opening and only rise: `appended_bytes` belongs to the holder of `lock`, `written_bytes` and
`admit_limit` to the holder of the commit lock.

Frames are accepted in one atomic step, which extends the open chunk's list or the list of chunks.
Everything else is derived from the two lists; `mend` derives it again after an append that an
exception interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ister.errors import check
from ister.format.crc import crc32
from ister.format.frame import FRAME_HEADER_SIZE, pack_header
from ister.limits import APPEND_CHUNK_BYTES

__all__ = ["AppendBuffer", "Chunk", "VolatileBuffer"]


@dataclass(slots=True)
class Chunk:
    """Frames that were appended one after the other."""

    first_offset: int
    end_offset: int
    size_bytes: int
    end_bytes: int
    """`appended_bytes` at its end."""
    publish_time_max: int
    parts: list[bytes]

    def data(self) -> bytes:
        """The frames' bytes; the first call joins them."""
        if len(self.parts) != 1:
            self.parts = [b"".join(self.parts)]
        return self.parts[0]


class AppendBuffer:
    """See the module header. Slots, because `push` is called for every message."""

    __slots__ = (
        "_bytes_max",
        "_chunk_first",
        "_chunk_time_max",
        "_chunks",
        "_parts",
        "admit_limit",
        "appended_bytes",
        "attention_at",
        "chunk_base",
        "is_changing",
        "is_refusing",
        "lock",
        "next",
        "on_attention",
        "written_bytes",
    )

    def __init__(
        self, *, next_offset: int, bytes_max: int, on_attention: Callable[[], None]
    ) -> None:
        self.lock = threading.RLock()
        """Guards the buffer, the offsets and the waiters. Held for microseconds.

        Never acquired twice; `ister.wal.interrupts` explains why it is an `RLock`.
        """
        self.is_changing = False
        """Whether an append is in progress, or was interrupted and not repaired yet."""
        self.next = next_offset
        """The offset that the next append gets."""
        self.appended_bytes = 0
        """Bytes of all frames appended."""
        self.written_bytes = 0
        """Bytes of all frames written."""
        self.admit_limit = bytes_max
        """How far `appended_bytes` may go; beyond it, `append` asks before it goes on."""
        self.is_refusing = False
        """Whether appends are refused whatever their size."""
        self.attention_at = 0
        """`push` calls `on_attention` when `appended_bytes` has reached this."""
        self.chunk_base = 0
        """`appended_bytes` when the open chunk was begun."""
        self.on_attention = on_attention
        self._bytes_max = bytes_max
        self._parts: list[bytes] = []
        self._chunk_first = next_offset
        self._chunk_time_max = 0
        self._chunks: list[Chunk] = []

    @property
    def pending_bytes(self) -> int:
        """Appended and not written."""
        return self.appended_bytes - self.written_bytes

    def push(self, offset: int, body: bytes, publish_time_ms: int) -> None:
        """Takes the frame for `offset`, which is `next`. The hot path."""
        size = len(body)
        # Before the frame: a maximum that is too high is harmless, one too low hides messages.
        if publish_time_ms > self._chunk_time_max:  # noqa: PLR1730 - a call to max() costs more
            self._chunk_time_max = publish_time_ms
        self._parts += (pack_header(offset, size, crc32(body)), body)  # accepted
        self.next = offset + 1
        self.appended_bytes = appended = self.appended_bytes + size + FRAME_HEADER_SIZE
        if appended >= self.attention_at:
            self.on_attention()

    def push_many(self, bodies: Sequence[bytes], publish_time_ms: int) -> None:
        """Appends messages from offset `next` on, atomically."""
        offset = first = self.next
        base = end = self.appended_bytes
        chunks: list[Chunk] = []
        parts: list[bytes] = []
        for body in bodies:
            size = len(body)
            parts += (pack_header(offset, size, crc32(body)), body)
            offset += 1
            end += size + FRAME_HEADER_SIZE
            if end - base >= APPEND_CHUNK_BYTES:
                chunks.append(Chunk(first, offset, end - base, end, publish_time_ms, parts))
                chunks[-1].data()
                first, base, parts = offset, end, []
        if not chunks:
            self._chunk_time_max = max(self._chunk_time_max, publish_time_ms)
            self._parts += parts  # accepted
            self.next = offset
            self.appended_bytes = end
        else:
            if parts:
                chunks.append(Chunk(first, offset, end - base, end, publish_time_ms, parts))
            self._accept(chunks)
        if self.appended_bytes >= self.attention_at:
            self.on_attention()

    def push_frames(self, batches: Sequence[tuple[bytes, int, int]]) -> None:
        """Appends encoded frames from offset `next` on, atomically.

        Args:
            batches: Frames, their number, and their highest publish time.
        """
        offset, end = self.next, self.appended_bytes
        chunks: list[Chunk] = []
        for frames, count, time_max in batches:
            first, offset, end = offset, offset + count, end + len(frames)
            chunks.append(Chunk(first, offset, len(frames), end, time_max, [frames]))
        if chunks:
            self._accept(chunks)
        if self.appended_bytes >= self.attention_at:
            self.on_attention()

    def _accept(self, chunks: list[Chunk]) -> None:
        """Appends chunks, the first of which begins at `next`."""
        self._seal()
        self._chunks += chunks  # accepted
        self.next = self._chunk_first = chunks[-1].end_offset
        self.appended_bytes = self.chunk_base = chunks[-1].end_bytes

    def mend(self) -> None:
        """Derives all other fields from the frames again, after an interrupted append."""
        if self._chunks:
            last = self._chunks[-1]
            if last.parts is self._parts:  # sealed, but the next chunk was not begun
                self._parts = []
            self._chunk_first = last.end_offset
            self.chunk_base = last.end_bytes
        self.next = self._chunk_first + len(self._parts) // 2
        self.appended_bytes = self.chunk_base + sum(map(len, self._parts))

    def has_room(self, size_bytes: int) -> bool:
        """Whether so many more bytes fit; a batch larger than the buffer fits when it is empty."""
        return self.appended_bytes + size_bytes <= self.admit_limit or self.pending_bytes == 0

    def seal_if_full(self) -> None:
        """Ends the open chunk if it has its size.

        The producer joins its frames right here, while they are in the processor's cache: the
        bodies' memory is free for the next ones at once, and the writer has nothing left to do
        that needs the interpreter lock.
        """
        if self.appended_bytes - self.chunk_base >= APPEND_CHUNK_BYTES:
            self._seal()
            self._chunks[-1].data()

    def take(self) -> list[Chunk]:
        """Empties the buffer. The bytes stay counted as pending until `note_written`."""
        self._seal()
        taken, self._chunks = self._chunks, []
        return taken

    def note_written(self, size_bytes: int) -> None:
        """So many bytes of what was taken have been written. Called with the commit lock held."""
        self.written_bytes += size_bytes
        self.admit_limit = self.written_bytes + self._bytes_max
        check(self.written_bytes <= self.appended_bytes, "what is written was appended before")

    def discard(self) -> None:
        """Drops everything, because the writer has stopped."""
        self._seal()
        self._chunks = []
        self.written_bytes = self.appended_bytes

    def _seal(self) -> None:
        if self._parts:
            self._chunks.append(
                Chunk(
                    first_offset=self._chunk_first,
                    end_offset=self.next,
                    size_bytes=self.appended_bytes - self.chunk_base,
                    end_bytes=self.appended_bytes,
                    publish_time_max=self._chunk_time_max,
                    parts=self._parts,
                )
            )
            self._parts = []
        self._chunk_first = self.next
        self.chunk_base = self.appended_bytes
        self._chunk_time_max = 0


class VolatileBuffer(AppendBuffer):
    """For a log without a directory: gives out offsets and keeps no frames."""

    __slots__ = ()

    def push(self, offset: int, body: bytes, publish_time_ms: int) -> None:
        """Takes the offset. The hot path."""
        self.next = offset + 1
        if self.attention_at == 0:
            self.on_attention()

    def push_many(self, bodies: Sequence[bytes], publish_time_ms: int) -> None:
        """Assigns an offset to each message."""
        self._take_offsets(len(bodies))

    def push_frames(self, batches: Sequence[tuple[bytes, int, int]]) -> None:
        """Assigns an offset to each frame."""
        self._take_offsets(sum(count for _, count, _ in batches))

    def _take_offsets(self, count: int) -> None:
        self.next += count
        if self.attention_at == 0:
            self.on_attention()

    def mend(self) -> None:
        """Does nothing: without frames there is nothing to derive."""
