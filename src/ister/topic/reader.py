"""A reader: one place in one topic, from any offset to the live tail.

    bucket ─► files ─► cache ─► live     pulled by offset; each fetch decides where to read

Owns: its position. Does not own: anything that others share; a slow reader holds one chunk and
one file (one more chunk while it reads the bucket), and costs others nothing. It falls back
from live to cache to files to the bucket by itself, because each fetch looks up where the next
offset is. So local files may be trimmed, and objects replaced, under a reader that never notices.

Invariants: every message that comes out is the one after the last (unless those between were left
out of their object on purpose, or are damaged and left out by configuration); an offset that should
exist and that no tier holds raises, with the range; nothing comes out that is not visible (has not
reached the topic's level); an end of data and an error are different answers.

Used by one thread at a time, except `close`, which any thread may call and which wakes a reader
that waits. If an exception from a signal handler ends a call, the reader returns to the position
that it had before, and drops everything it had read ahead.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from ister.base import forks
from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import AckLevel
from ister.bucket.history_reader import HistoryReader
from ister.errors import (
    ClosedError,
    CorruptDataError,
    DataGapError,
    InvariantError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    check,
)
from ister.format.frame import FrameBatch, NothingLeftError, encode_frame
from ister.topic.arguments import as_number, as_timeout
from ister.topic.message import Message, MessageBatch
from ister.wal.log import Wal
from ister.wal.reader import WalReader
from ister.wal.signals import is_held
from ister.wal.waiters import ThreadWaiter

if TYPE_CHECKING:
    from ister.topic.cache import Cache

_log = logging.getLogger("ister.topic.reader")

_T = TypeVar("_T")

_BATCH_MESSAGES = 4096
_COUNT_LOT = 256
TAIL_SAMPLE = 16
"""One of this many waits at the tail is measured."""


class _MeasuredWaiter(ThreadWaiter):
    """A waiter that records when it was woken."""

    __slots__ = ("_clock", "woken_at")

    def __init__(self, offset: int, clock: Clock) -> None:
        super().__init__(offset, is_patient=True)
        self._clock = clock
        self.woken_at: float | None = None

    def _wake(self, error: IsterError | None) -> None:
        self.woken_at = self._clock.monotonic()
        super()._wake(error)


class Reader:
    """Reads a topic in order. Made by `Topic.reader` and `Topic.read`."""

    def __init__(
        self,
        *,
        wal: Wal,
        cache: Cache,
        start: int,
        end: int | None,
        chunk_bytes: int,
        clock: Clock,
        metrics: Metrics,
        earliest: Callable[[], int],
        open_bucket: Callable[[], HistoryReader] | None = None,
        level: AckLevel | None = None,
    ) -> None:
        """Opens at `start`; `level` replaces the level at which messages are visible."""
        self._wal = wal
        self._level = level
        self._cache = cache
        self._earliest = earliest
        self._open_bucket = open_bucket
        self._end = end
        self._chunk_bytes = chunk_bytes
        self._clock = clock
        self._metrics = metrics
        self._files: WalReader | None = None
        self._history: HistoryReader | None = None
        self._batch: FrameBatch | None = None
        self._waiter: ThreadWaiter | None = None
        self._is_closed = False
        self._reading = threading.RLock()
        self._is_reading = False
        self._cached_count = 0
        self._wait_count = 0
        self._damage_left_out = 0
        self.span: Callable[[int, int], int | None] | None = None
        """Returns the size of the frames of a range, in bytes; None if it is not known.

        With it a single frame is found without reading those before it.
        """
        self.next_offset = start
        """The offset of the message that comes next."""

    # -- pulling ----------------------------------------------------------------------------

    def next_batch(
        self,
        max_messages: int = _BATCH_MESSAGES,
        max_bytes: int | None = None,
        timeout: float | None = None,
    ) -> Sequence[Message]:
        """The next messages, in order: as many as are available, at least one.

        Args:
            max_messages: At most so many.
            max_bytes: At most about so many bytes of them; a larger message comes alone.
            timeout: How long to wait for the first one, in seconds; None waits without an end.

        Returns:
            A sequence; an empty one when the time ran out, or when the reader's `end` is reached.

        Raises:
            ClosedError: The reader or its topic was closed.
            CorruptDataError: The next frame is damaged, in every tier; `next_offset` stays.
            DataGapError: No tier holds the next offset; carries the range.
            UnavailableError: The bucket or the metadata store does not answer.
            OffsetOutOfRangeError: The next message is no longer kept.
        """
        timeout = as_timeout(timeout)
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        bytes_max = (
            self._chunk_bytes if max_bytes is None else max(1, as_number("max_bytes", max_bytes))
        )
        start = self.next_offset
        messages: Sequence[Message] = ()
        try:
            try:
                while True:
                    messages = self.poll(max_messages, bytes_max)
                    if messages or self.is_at_end:
                        return messages
                    remaining = None if deadline is None else deadline - self._clock.monotonic()
                    if remaining is not None and remaining <= 0:
                        return []
                    woken_at = self._wait_visible(remaining)
                    if woken_at is not None and (messages := self.poll(max_messages, bytes_max)):
                        self.observe_tail_read(self._clock.monotonic() - woken_at)
                        return messages
            except BaseException as error:
                self._settle(error, start, messages)
                raise
        except BaseException as error:
            self._settle(error, start, messages)
            raise

    def observe_tail_read(self, seconds: float) -> None:
        """Records how long messages were visible before this waiting reader returned them."""
        self._metrics.observe("wal.tail_read_latency_ms", seconds * 1000)

    def poll(
        self, max_messages: int = _BATCH_MESSAGES, max_bytes: int = 1 << 22
    ) -> Sequence[Message]:
        """The messages that can be read now, without waiting for appends; may be empty."""
        count = as_number("max_messages", max_messages, least=1)
        return self._read(lambda: self._poll(count, max_bytes))

    def _read(self, read: Callable[[], _T]) -> _T:
        """Calls `read` with the reading lock held."""
        start = self.next_offset
        found: _T | None = None
        try:
            try:
                self._reading.acquire()
                self._is_reading = True
                self._check_open()
                found = read()
                self._is_reading = False
                self._reading.release()
                if self._is_closed:
                    self._drop_if_idle()
                return found  # noqa: TRY300 - the call may be cut short here too
            except BaseException as error:
                self._settle(error, start, found)
                raise
        except BaseException as error:
            self._settle(error, start, found)
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._closed_error()

    def _settle(self, error: BaseException, start: int, found: object) -> None:
        """Cleans up after a call that `error` ended: resets the position, releases the lock.

        Args:
            error: The exception.
            start: The position at the start of the call.
            found: What the call had read, if anything.
        """
        try:
            self._wal.committer.clean_up_interrupt()
        finally:
            if found or not isinstance(error, IsterError):
                self.next_offset = start
            if is_held(self._reading):
                # Their positions may be inconsistent. A dropped file closes itself.
                self._files = self._batch = None
                history, self._history = self._history, None
                if history is not None:
                    self._damage_left_out += history.damage_left_out
                self._is_reading = False
                self._reading.release()
            if self._is_closed:
                self._drop_if_idle()

    def poll_cache(
        self, max_messages: int = _BATCH_MESSAGES, max_bytes: int = 1 << 22
    ) -> Sequence[Message]:
        """The messages that can be read now from memory; may be empty. Touches no file.

        Raises:
            ClosedError: The reader is closed.
            InvalidRequestError: `max_messages` is below one.
        """
        if self._is_closed or max_messages < 1:
            return self.poll(max_messages, max_bytes)  # raises the reader's error
        start = self.next_offset
        end = min(self.visible, start + max_messages)
        if self._end is not None:
            end = min(end, self._end)
        if start >= end or self._batch is not None:
            return []
        messages: Sequence[Message] = ()
        try:
            messages = self._from_cache(start, end, max_bytes)
            self.next_offset = start + len(messages)
            return messages  # noqa: TRY300 - as in `_read`
        except BaseException as error:
            self._settle(error, start, messages)
            raise

    def next_frames(self, max_bytes: int | None = None) -> FrameBatch | None:
        """The next frames as they are stored, at least one, without waiting for appends.

        For those who decode many at once: messages pass by the cache (of a log with files), so
        nothing is made for each of them.

        Returns:
            Frames that begin with `next_offset`, which moves behind them; None if nothing more is
            visible before the reader's end.

        Raises:
            As `next_batch`.
        """
        bytes_max = self._chunk_bytes if max_bytes is None else max_bytes
        return self._read(lambda: self._next_frames(bytes_max))

    def _next_frames(self, max_bytes: int) -> FrameBatch | None:
        start, end = self.next_offset, self.visible
        if self._end is not None:
            end = min(end, self._end)
        if start >= end:
            return None
        # What a call of `poll` has left over of a chunk is read again.
        self._batch = None
        if self._wal.is_volatile:
            frames = self._frames_from_cache(start, end, max_bytes)
        else:
            frames = self._frames_from_tiers(start, max_bytes)
        if frames is not None:
            self.next_offset = frames.next_offset
        return frames

    def _frames_from_cache(self, start: int, end: int, max_bytes: int) -> FrameBatch | None:
        """Frames made of the cached bodies; for logs that never had any."""
        with self._wal.lock:
            self._wal.fill_cache(end)
            bodies = self._cache.bodies(start, end, bytes_max=max_bytes)
        if not bodies:
            return self._frames_from_tiers(start, max_bytes)  # raises: it has left the memory
        frames = [encode_frame(offset, body) for offset, body in enumerate(bodies, start)]
        starts = list(accumulate(map(len, frames[:-1]), initial=0))
        chunk = b"".join(frames)
        return FrameBatch(chunk, starts, len(chunk), start, self._wal.settings.codec)

    def _poll(self, max_messages: int, max_bytes: int) -> Sequence[Message]:
        start = self.next_offset
        end = min(self.visible, start + max_messages)
        if self._end is not None:
            end = min(end, self._end)
        if start >= end:
            return []
        messages: Sequence[Message] = self._from_batch(start, end, max_bytes)
        if not messages:
            messages = self._from_cache(start, end, max_bytes)
        if not messages:
            messages = self._from_tiers(start, end, max_bytes)
            # Messages that are not there, for a good reason, end before the first one here.
            is_skipped, start = self.next_offset > start, self.next_offset
            if is_skipped and not messages:
                return []
        check(bool(messages), "what is visible can be read")
        if messages[0].offset != start:
            raise InvariantError(
                f"a reader at {start} was given {messages[0].offset}",
                topic=self._wal.settings.topic,
                offset=start,
            )
        self.next_offset = start + len(messages)
        return messages

    @property
    def level(self) -> AckLevel:
        """The level that a message has to reach before it comes out."""
        return self._level or self._wal.levels.visible_level

    @property
    def visible(self) -> int:
        """The first offset that does not come out yet."""
        level = self._level
        return self._wal.visible if level is None else self._wal.levels.watermark(level)

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return self._is_closed

    @property
    def is_at_end(self) -> bool:
        """Whether everything before the reader's `end` has been read."""
        return self._end is not None and self.next_offset >= self._end

    @property
    def held_bytes(self) -> int:
        """The size of what the reader holds on to."""
        return sum(self.held_parts)

    @property
    def held_parts(self) -> tuple[int, int]:
        """What the reader holds on to: a chunk of a file, and what it has of the bucket."""
        batch, history = self._batch, self._history
        chunk = len(batch.chunk) if batch is not None else 0
        return (chunk, 0) if history is None else (0, chunk + history.held_bytes)

    @property
    def damage_left_out(self) -> int:
        """How many offsets were left out because they are damaged, so far.

        Others that do not come out were left out of their object on purpose.
        """
        history = self._history
        return self._damage_left_out + (history.damage_left_out if history is not None else 0)

    def limit(self, end: int) -> None:
        """Stops before `end` instead of where it would have."""
        self._end = end

    def seek(self, offset: int) -> None:
        """Continues from another offset.

        Raises:
            OffsetOutOfRangeError: The topic has no such offset.
        """
        offset = as_number("offset", offset, least=-(1 << 63))
        check_start(self._wal, self._earliest(), offset)
        batch = self._batch
        if batch is not None and not batch.first_offset <= offset < batch.next_offset:
            self._batch = None
        self.next_offset = offset

    def _from_batch(self, start: int, end: int, max_bytes: int) -> Sequence[Message]:
        """What the last chunk from a file still holds."""
        batch = self._batch
        if batch is None:
            return []
        at = start - batch.first_offset
        count = len(batch.starts)
        if not 0 <= at < count:
            self._batch = None
            return []
        upto = min(count, end - batch.first_offset)
        starts = batch.starts
        limit = starts[at] + max_bytes
        if batch.end > limit:
            # A frame ends where the next one begins: at most those that end within the limit.
            within = bisect_right(starts, limit, at + 1, min(upto + 1, count)) - 1
            upto = max(at + 1, min(upto, within))
        ends = [*starts[at + 1 : upto], starts[upto] if upto < count else batch.end]
        messages = MessageBatch(batch.chunk, starts[at:upto], ends, start, batch.codec)
        if upto == count:
            self._batch = None
        return messages

    def _from_cache(self, start: int, end: int, max_bytes: int) -> Sequence[Message]:
        cache = self._cache
        if start < cache.start:
            return []
        self._wal.gate.check_reentry()
        with self._wal.lock:
            self._wal.fill_cache(end)
            messages = cache.read(start, end, bytes_max=max_bytes)
        if messages:
            self._count_cached(len(messages))
            if self._files is not None:
                # Near the tail: files are needed again only if this reader falls behind.
                self._files.close()
        return messages

    def _count_cached(self, count: int) -> None:
        """Counts messages from the cache, in lots: a reader at the tail takes them one by one."""
        self._cached_count += count
        if self._cached_count >= _COUNT_LOT or self._is_closed:
            self._metrics.count("wal.reader.stitch_cache_items", self._cached_count)
            self._cached_count = 0

    def _from_tiers(self, start: int, end: int, max_bytes: int) -> Sequence[Message]:
        """Messages from the local files, or from the bucket where those no longer reach."""
        batch = self._frames_from_tiers(start, max_bytes, before=self._cache.start)
        if batch is None:
            return []
        self._batch = batch
        self._metrics.count("wal.reader.stitch_tier_items", len(batch.starts))
        start = batch.first_offset
        return self._from_batch(start, max(end, start + 1), max_bytes)

    def _frames_from_tiers(
        self, start: int, max_bytes: int, *, before: int = 0
    ) -> FrameBatch | None:
        """Frames from `start` on; `next_offset` moves over those that are left out.

        None if nothing but such ones is left. None at or after `before` are read, if `start` is
        before it.
        """
        wal = self._wal
        if wal.is_volatile:
            raise OffsetOutOfRangeError(
                "the message has left the memory of this log",
                topic=wal.settings.topic,
                offset=start,
                earliest=self._cache.start,
                next=wal.next,
            )
        if start >= wal.written:
            # Visible at the level `memory`, gone from the cache, and not in a file yet.
            wal.wait(start, AckLevel.WRITTEN)
        readable = min(self.visible, wal.written)
        if self._end is not None:
            readable = min(readable, self._end)
        if start < before:
            readable = min(readable, before)
        while True:
            try:
                batch = self._fetch(start, readable, max_bytes)
            except NothingLeftError as skipped:
                self.next_offset = start = skipped.next_offset
                if start >= readable:
                    return None
            else:
                self.next_offset = max(start, batch.first_offset)
                return batch

    def _fetch(self, start: int, readable: int, max_bytes: int) -> FrameBatch:
        wal = self._wal
        while start >= wal.trimmed:
            if self._files is None:
                self._files = WalReader(
                    wal, chunk_bytes=self._chunk_bytes, metrics=self._metrics, clock=self._clock
                )
            try:
                batch = self._files.fetch(start, readable, bytes_max=max_bytes, span=self.span)
            except OffsetOutOfRangeError:
                # Trimmed between looking and reading; the bucket has it.
                continue
            except (CorruptDataError, NotFoundError):
                if self._open_bucket is None or start >= (wal.tiered or 0):
                    raise
                # The other tier has a copy.
                break
            else:
                self._leave_history()
                return batch
        return self._fetch_history(start, readable, max_bytes)

    def _fetch_history(self, start: int, readable: int, max_bytes: int) -> FrameBatch:
        """Frames from the bucket; raises if it does not have them."""
        wal = self._wal
        tiered = wal.tiered or 0
        if self._open_bucket is None or start < self._earliest():
            raise self._not_kept(start)
        if start >= tiered:
            raise DataGapError(
                "neither the local files nor the bucket hold the offset",
                start=start,
                end=max(wal.trimmed, start + 1),
                topic=wal.settings.topic,
            )
        if self._history is None:
            self._history = self._open_bucket()
            self._metrics.count("reader.history_entered_total")
            _log.debug(
                "reader switches to the bucket",
                extra={"topic": wal.settings.topic, "offset": start},
            )
        if self._files is not None:
            self._files.close()
        # Local files have what follows, also of an object that is left out because it is lost.
        end = min(readable, tiered, wal.trimmed if start < wal.trimmed else tiered)
        try:
            return self._history.fetch(start, end, bytes_max=max_bytes, span=self.span)
        except (NotFoundError, DataGapError) as error:
            if start < self._earliest():
                raise self._not_kept(start) from error
            raise

    def _leave_history(self) -> None:
        if self._history is not None:
            self._damage_left_out += self._history.damage_left_out
            self._history.close()
            self._history = None
            self._metrics.count("reader.handoffs_total")
            _log.debug(
                "reader switches to local files",
                extra={"topic": self._wal.settings.topic, "offset": self.next_offset},
            )

    def _not_kept(self, start: int) -> OffsetOutOfRangeError:
        return OffsetOutOfRangeError(
            "the message is no longer kept",
            topic=self._wal.settings.topic,
            offset=start,
            earliest=self._earliest(),
            next=self._wal.next,
        )

    def _wait_visible(self, timeout: float | None) -> float | None:
        """Waits for the next message to become visible, for `timeout`, or for `close`.

        Returns:
            When it was woken, for one of `TAIL_SAMPLE` waits; else None.
        """
        self._wait_count += 1
        is_measured = self._wait_count % TAIL_SAMPLE == 1
        waiter = (
            _MeasuredWaiter(self.next_offset, self._clock)
            if is_measured
            else ThreadWaiter(self.next_offset, is_patient=True)
        )
        self._waiter = waiter
        try:
            if self._is_closed or not self._wal.enlist(waiter, self.level):
                return None
            is_told = waiter.block(timeout)
        finally:
            waiter.is_done = True
        if is_told and waiter.error is not None:
            raise waiter.error
        return waiter.woken_at if isinstance(waiter, _MeasuredWaiter) else None

    # -- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the reader; one that waits in another thread is woken. May be called twice."""
        self._is_closed = True
        self._count_cached(0)
        waiter = self._waiter
        if waiter is not None:
            waiter.finish(self._closed_error())
        self._drop_if_idle()

    def _closed_error(self) -> ClosedError:
        self._wal.gate.check_process()
        return ClosedError("the reader is closed", topic=self._wal.settings.topic)

    def _after_fork(self) -> None:
        """Closes a forked child's copy: the thread that prefetches for it does not exist there."""
        forks.reset_locks(self._reading)
        self._is_closed = True
        self._is_reading = False
        self._files = self._history = self._batch = self._waiter = None

    def _drop_if_idle(self) -> None:
        """Closes the file, unless a thread is reading it, which then closes it."""
        # Not within a `_read` that a signal handler has interrupted, either.
        if not self._is_reading and self._reading.acquire(blocking=False):
            try:
                files, self._files, self._batch = self._files, None, None
                history, self._history = self._history, None
                if files is not None:
                    files.close()
                if history is not None:
                    history.close()
            finally:
                self._reading.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Message]:
        """Every message up to the reader's end; without an end, it never stops."""
        while batch := self.next_batch():
            yield from batch


def check_start(wal: Wal, earliest: int, offset: int) -> None:
    """Refuses an offset that the topic does not have (`next` itself is fine: the tail).

    Raises:
        OffsetOutOfRangeError: With the valid range.
    """
    if not earliest <= offset <= wal.next:
        raise OffsetOutOfRangeError(
            "the offset is beyond the end" if offset > wal.next else "the offset is not kept",
            topic=wal.settings.topic,
            offset=offset,
            earliest=earliest,
            next=wal.next,
        )
