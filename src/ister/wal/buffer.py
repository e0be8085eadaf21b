"""The append buffer: holds messages from `append` until they are written.

    chunk (sealed) · chunk (sealed) · parts of the open chunk, message by message

The open chunk holds either the parts that `ister.format.frame_encoder` makes frames of, all at once
(blank, payload, tail), or frames whose bodies were encoded before (header, body). A message of the
other kind begins the next chunk.

Owns: `next`, the lock under which offsets are assigned, the frames, the bound on their bytes.
Does not own: when a thread is woken or writes; `push` calls `on_attention` when `appended_bytes`
reaches `attention_at`, which the committing thread sets. Nor what readers find in memory:
`on_sealed` is called with each chunk, in order, and `seal` ends the open one. A crash loses what is
here: none of it is acknowledged above the level `memory`.

All methods are called with `lock` held, except where they say otherwise. The counters are bytes
since opening and only rise: `appended_bytes` belongs to the holder of `lock`, `written_bytes` and
`admit_limit` to the holder of the commit lock.

Frames are accepted in one atomic step, which extends the open chunk's list or the list of chunks.
Everything else is derived from the two lists; `rebuild` derives it again after an append that an
exception interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ister.base.limits import APPEND_CHUNK_BYTES
from ister.errors import check
from ister.format.crc import Buffer, crc32
from ister.format.frame import FRAME_HEADER_SIZE, pack_header
from ister.format.frame_encoder import FrameEncoder


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
    encoder: FrameEncoder | None = None
    """Encodes the parts as frames; None if they are frames."""
    _data: Buffer | None = None

    def data(self) -> Buffer:
        """The frames' bytes; the first call joins them.

        May be called by two threads at once: both get the same bytes.
        """
        # In this order: they are emptied after the bytes were set.
        parts = self.parts
        data = self._data
        if data is None:
            if self.encoder is not None:
                data = self.encoder.fill(parts, self.first_offset)
            else:
                data = parts[0] if len(parts) == 1 else b"".join(parts)
            check(len(data) == self.size_bytes, "a chunk has the bytes that were counted")
            self._data = data
            self.parts = []
        return data


class AppendBuffer:
    """See the module header. Slots, because `push` is called for every message."""

    __slots__ = (
        "_blank",
        "_blank_end",
        "_blank_size",
        "_bytes_max",
        "_chunk_first",
        "_chunk_time_max",
        "_chunks",
        "_encoder",
        "_envelope",
        "_is_encoded",
        "_on_attention",
        "_on_sealed",
        "_parts",
        "_suffix",
        "_tail",
        "_tail_time",
        "admit_limit",
        "appended_bytes",
        "attention_at",
        "chunk_base",
        "is_changing",
        "is_refusing",
        "lock",
        "next",
        "written_bytes",
    )

    def __init__(
        self,
        *,
        next_offset: int,
        bytes_max: int,
        on_attention: Callable[[], None],
        on_sealed: Callable[[Chunk], None],
        encoder: FrameEncoder,
    ) -> None:
        """Begins empty.

        `bytes_max`: how many bytes may wait to be written.
        `on_attention`: called with `lock` held when `attention_at` is reached.
        `on_sealed`: called with each chunk after it was sealed; may keep it.
        """
        self.lock = threading.RLock()
        """Guards the buffer, the offsets and the waiters. Held for microseconds.

        Never acquired twice; `ister.wal.signals` explains why it is an `RLock`.
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
        """The limit of `appended_bytes`; beyond it, `append` asks before it continues."""
        self.is_refusing = False
        """Whether all appends are refused."""
        self.attention_at = 0
        """`push` calls `on_attention` when `appended_bytes` has reached this."""
        self.chunk_base = 0
        """`appended_bytes` when the open chunk was begun."""
        self._on_attention = on_attention
        self._on_sealed = on_sealed
        self._bytes_max = bytes_max
        self._encoder = encoder
        # What the messages of one size and millisecond have in common. No time is below 0.
        self._tail_time = -1
        self._suffix = self._tail = self._blank = b""
        self._blank_size = self._blank_end = self._envelope = 0
        self._parts: list[bytes] = []
        self._is_encoded = False  # whether the open chunk's parts are frames
        self._chunk_first = next_offset
        self._chunk_time_max = 0
        self._chunks: list[Chunk] = []

    @property
    def pending_bytes(self) -> int:
        """Appended and not written."""
        return self.appended_bytes - self.written_bytes

    def push_message(self, payload: bytes, publish_time_ms: int, suffix: bytes) -> int:
        """Appends a message, given the encoded fields behind its payload; returns its offset."""
        offset, size = self.next, len(payload)
        if (
            publish_time_ms != self._tail_time
            or size != self._blank_size
            or suffix is not self._suffix
            or offset >= self._blank_end
        ):
            self._prepare(offset, size, publish_time_ms, suffix)
        self._parts += (self._blank, payload, self._tail)  # accepted
        self.next = offset + 1
        self.appended_bytes = appended = self.appended_bytes + size + self._envelope
        if appended >= self.attention_at:
            self._on_attention()
        return offset

    def _prepare(self, offset: int, size: int, publish_time_ms: int, suffix: bytes) -> None:
        """Encodes what surrounds the payload of this message, and of all messages like it."""
        # No time matches until the last line: an exception from a signal handler in between must
        # not leave parts that do not belong together.
        is_new_chunk, self._tail_time = self._tail_time < 0, -1
        if self._is_encoded:
            self._seal()
            self._is_encoded = False
        # Before the frame, as in `push`.
        self._chunk_time_max = max(self._chunk_time_max, publish_time_ms)
        tail = self._encoder.tail(publish_time_ms, suffix)
        if (
            is_new_chunk
            or size != self._blank_size
            or offset >= self._blank_end
            or len(tail) != len(self._tail)
        ):
            self._blank, self._blank_end = self._encoder.blank(offset, size, len(tail))
            self._blank_size = size
            self._envelope = len(self._blank) + len(tail)
        self._tail, self._suffix = tail, suffix
        self._tail_time = publish_time_ms

    def _expect_encoded(self) -> None:
        """Begins a chunk of frames."""
        if not self._is_encoded:
            self._seal()
            self._tail_time = -1
            self._is_encoded = True

    def push(self, offset: int, body: bytes, publish_time_ms: int) -> None:
        """Appends the frame for `offset`, which is `next`."""
        self._expect_encoded()
        size = len(body)
        # Before the frame: a maximum that is too high is harmless, one too low hides messages.
        if publish_time_ms > self._chunk_time_max:  # noqa: PLR1730 - a call to max() costs more
            self._chunk_time_max = publish_time_ms
        self._parts += (pack_header(offset, size, crc32(body)), body)  # accepted
        self.next = offset + 1
        self.appended_bytes = appended = self.appended_bytes + size + FRAME_HEADER_SIZE
        if appended >= self.attention_at:
            self._on_attention()

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
            self._expect_encoded()
            self._chunk_time_max = max(self._chunk_time_max, publish_time_ms)
            self._parts += parts  # accepted
            self.next = offset
            self.appended_bytes = end
        else:
            if parts:
                chunks.append(Chunk(first, offset, end - base, end, publish_time_ms, parts))
            self._accept(chunks)
        if self.appended_bytes >= self.attention_at:
            self._on_attention()

    def push_frames(self, batches: Sequence[tuple[bytes, int, int]]) -> None:
        """Appends encoded frames from offset `next` on, atomically.

        A batch is its frames, their number, and their highest publish time.
        """
        offset, end = self.next, self.appended_bytes
        chunks: list[Chunk] = []
        for frames, count, time_max in batches:
            first, offset, end = offset, offset + count, end + len(frames)
            chunks.append(Chunk(first, offset, len(frames), end, time_max, [frames]))
        if chunks:
            self._accept(chunks)
        if self.appended_bytes >= self.attention_at:
            self._on_attention()

    def _accept(self, chunks: list[Chunk]) -> None:
        """Appends chunks, the first of which begins at `next`."""
        self._seal()
        self._chunks += chunks  # accepted
        self.next = self._chunk_first = chunks[-1].end_offset
        self.appended_bytes = self.chunk_base = chunks[-1].end_bytes
        for chunk in chunks:
            self._on_sealed(chunk)

    def rebuild(self) -> None:
        """Derives all other fields from the frames again, after an interrupted append."""
        if self._chunks:
            last = self._chunks[-1]
            if last.parts is self._parts:  # sealed, but the next chunk was not begun
                self._parts = []
            self._chunk_first = last.end_offset
            self.chunk_base = last.end_bytes
        self._tail_time = -1
        self.next = self._chunk_first + len(self._parts) // (2 if self._is_encoded else 3)
        self.appended_bytes = self.chunk_base + sum(map(len, self._parts))

    def has_room(self, size_bytes: int) -> bool:
        """Whether so many more bytes fit; a batch larger than the buffer fits when it is empty."""
        return self.appended_bytes + size_bytes <= self.admit_limit or self.pending_bytes == 0

    def seal_if_full(self) -> None:
        """Ends the open chunk if it is full, and encodes its frames.

        The producer's thread encodes them here, while they are in the processor's cache: the
        memory of the bodies is free for the next ones at once, and the writer has nothing left to
        do that needs the interpreter lock.
        """
        if self.appended_bytes - self.chunk_base >= APPEND_CHUNK_BYTES:
            self._seal()
            if self._chunks:
                self._chunks[-1].data()

    def seal(self) -> None:
        """Ends the open chunk, so that `on_sealed` has received every message."""
        if self._parts:
            self.is_changing = True
            self._seal()
            self.is_changing = False

    @property
    def sealed_end(self) -> int:
        """Where the open chunk begins."""
        return self._chunk_first

    @property
    def sealed(self) -> Sequence[Chunk]:
        """The sealed chunks that have not been taken."""
        return self._chunks

    def skip_to(self, offset: int) -> None:
        """Makes `offset` the next one of a buffer that holds nothing."""
        check(not self._parts and not self._chunks, "only an empty buffer skips offsets")
        self.next = self._chunk_first = offset

    def take(self) -> list[Chunk]:
        """Empties the buffer. The bytes stay counted as pending until `mark_written`."""
        self._seal()
        taken, self._chunks = self._chunks, []
        return taken

    def mark_written(self, size_bytes: int) -> None:
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
        if not self._parts:
            return
        chunk = Chunk(
            first_offset=self._chunk_first,
            end_offset=self.next,
            size_bytes=self.appended_bytes - self.chunk_base,
            end_bytes=self.appended_bytes,
            publish_time_max=self._chunk_time_max,
            parts=self._parts,
            encoder=None if self._is_encoded else self._encoder,
        )
        self._chunks.append(chunk)
        self._parts = []
        self._chunk_first = self.next
        self.chunk_base = self.appended_bytes
        self._chunk_time_max = 0
        self._tail_time = -1
        self._on_sealed(chunk)


class VolatileBuffer(AppendBuffer):
    """For a log without a directory: chunks are sealed and not kept, so nothing is ever pending."""

    __slots__ = ()

    @property
    def pending_bytes(self) -> int:
        """Always 0: nothing is written."""
        return 0

    def _seal(self) -> None:
        super()._seal()
        self._forget()

    def _accept(self, chunks: list[Chunk]) -> None:
        super()._accept(chunks)
        self._forget()

    def _forget(self) -> None:
        self._chunks = []
        self.written_bytes = self.appended_bytes
        self.admit_limit = self.written_bytes + self._bytes_max
