"""Admits the writes of consumers' streams, so that together they stay within the memory budget.

    stream ─ reserve ─► it fits ─► encode, write ─ release ─► the next one in the queue
                  └──► it does not fit ─► wait in the queue

Owns: the memory of what streams are writing, and the order in which they may write. Does not own:
the messages, and how they are written (`ister.broker.services`, `ister.broker.rpc`).

A message that is being written holds its memory until the client has read it, which may be never,
and gRPC cannot take it back. So a stream reserves memory before it encodes anything. Rules:

- writes take at most three quarters of the budget; if there is no other write, one is admitted
  whatever its size;
- a stream is *proven* once its client has read more than any flow control window holds. Unproven
  streams together take at most half of that, so that proven ones continue however many clients do
  not read;
- the queue is first come, first served, but unproven streams take turns: first the oldest, then the
  newest whose consumer has not stalled before. A client that reads thus overtakes many that do not;
- while the queue does not move, a stream that has been writing for longer than a time limit is
  ended: its client connects again when it reads again. The more streams wait, the shorter the
  limit, since each client that does not read delays all of them. It doubles each time for the same
  consumer, so that one with a slow network gets its message in the end.

Used only on the broker's loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ister.base.limits import MIB

_log = logging.getLogger("ister.broker.dispatch.write_queue")

STALLED: Final = "the client does not read, and others wait for the memory"
"""The message of the CancelledError that ends a stream whose client does not read."""

# The encoded bytes, and gRPC's own copy of them.
_COPIES: Final = 2
# More than is accepted for a client that does not read: grpcio has windows of 4 MiB and more.
_PROVEN_BYTES: Final = 16 * MIB
_PATIENCE_SECONDS: Final = 1.0
_PROVEN_PATIENCE_SECONDS: Final = 10.0
# More waiting streams than this share these times.
_CROWD: Final = 4
# A client that reads at half this speed is not ended.
_BYTES_PER_SECOND: Final = 64 * MIB
_CHECK_SECONDS: Final = 0.1
# How many consumers whose streams were ended are remembered.
_STALLED_MAX: Final = 10_000
_DOUBLINGS_MAX: Final = 8


class WriteQueue:
    """The writes of all streams of a broker. `count` is called with each change in their memory."""

    def __init__(self, bytes_max: int, count: Callable[[int], None]) -> None:
        self._bytes_max = bytes_max - bytes_max // 4
        self._count = count
        self.used = 0
        """Memory of all writes."""
        self.ended = 0
        """Streams that were ended because their clients did not read."""
        self._unproven = 0
        self._writing: dict[StreamMemory, None] = {}
        self._waiting: dict[_Waiting, None] = {}
        self._stalled: dict[int, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_turn_of_last = False
        # When the stream at the head began to wait; None after it was admitted.
        self._stuck_since: float | None = None

    def admits(self, stream: StreamMemory, size: int) -> bool:
        """Whether a stream may write `size` bytes now: they fit, and no other stream waits."""
        return not self._waiting and self._has_room(size) and self._fits_its_share(stream, size)

    def _has_room(self, size: int, freed: int = 0) -> bool:
        used = self.used - freed
        return not used or used + size <= self._bytes_max

    def _fits_its_share(self, stream: StreamMemory, size: int, freed: int = 0) -> bool:
        used = self._unproven - freed
        return stream.is_proven or not used or used + size <= self._bytes_max // 2

    async def wait(self, stream: StreamMemory, size: int) -> None:
        """Waits until a stream may write, and reserves its memory; ends if it is closed."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(stream, size, loop.create_future())
        self._waiting[waiting] = None
        self._admit()  # it may fit where those before it do not
        if self._waiting and self._timer is None:
            self._timer = loop.call_later(_CHECK_SECONDS, self._on_timer)
        try:
            await waiting.turn
        finally:
            if self._waiting.pop(waiting, waiting) is None:
                self._admit()

    def change(self, stream: StreamMemory, size: int) -> None:
        """Sets the memory of what a stream is writing; 0 once everything is written."""
        change = size - stream.size
        if stream.size and not stream.is_counted_proven:
            self._unproven -= stream.size
        stream.size = size
        stream.is_counted_proven = stream.is_proven
        if size:
            self._writing.setdefault(stream)
            if not stream.is_counted_proven:
                self._unproven += size
        else:
            self._writing.pop(stream, None)
        self.used += change
        self._count(change)
        if change < 0:
            self._admit()

    def forgive(self, stream: StreamMemory) -> None:
        """Resets the time limit of a consumer whose stream was ended before."""
        self._stalled.pop(stream.consumer, None)

    def wake(self, stream: StreamMemory) -> None:
        """Ends the wait of a stream that is closed."""
        for waiting in self._waiting:
            if waiting.stream is stream and not waiting.turn.done():
                waiting.turn.set_result(None)

    def _in_order(self) -> list[_Waiting]:
        """The streams that wait, the one whose turn it is first."""
        found = list(self._waiting)
        if self._is_turn_of_last:
            unproven = [at for at, one in enumerate(found) if not one.stream.is_proven]
            for at in reversed(unproven):
                if found[at].stream.consumer not in self._stalled:
                    # Not before proven streams: those need not wait for its share.
                    found.insert(unproven[0], found.pop(at))
                    break
        return found

    def _admit(self) -> None:
        """Admits waiting streams that fit, in their order."""
        for place, waiting in enumerate(self._in_order()):
            stream, size = waiting.stream, waiting.size
            if not self._has_room(size):
                return
            if self._fits_its_share(stream, size):
                del self._waiting[waiting]
                if place == 0:
                    self._stuck_since = None
                if not stream.is_proven:
                    self._is_turn_of_last = not self._is_turn_of_last
                if not waiting.turn.done():
                    self.change(stream, size)
                    waiting.turn.set_result(None)

    # -- clients that do not read -----------------------------------------------------------

    def _on_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        if not self._waiting:
            self._stuck_since = None
        else:
            self._timer = loop.call_later(_CHECK_SECONDS, self._on_timer)
            self._end_stalled(loop.time())

    def _end_stalled(self, now: float) -> None:
        """Ends streams that have been writing for too long, until the one whose turn it is fits."""
        if self._stuck_since is None:
            self._stuck_since = now  # the queue has moved
        if now - self._stuck_since < self._shared(_PATIENCE_SECONDS):
            return
        first = self._in_order()[0]
        freed = unproven = 0
        for stream in list(self._writing):
            has_room = self._has_room(first.size, freed)
            if has_room and self._fits_its_share(first.stream, first.size, unproven):
                return
            if has_room and stream.is_counted_proven:
                continue  # ending it would not help
            if not stream.is_ended:
                if now - stream.since < self._patience(stream):
                    continue
                self._end(stream)
            freed += stream.size
            unproven += 0 if stream.is_counted_proven else stream.size

    def _patience(self, stream: StreamMemory) -> float:
        base = _PROVEN_PATIENCE_SECONDS if stream.is_counted_proven else _PATIENCE_SECONDS
        doublings = self._stalled.get(stream.consumer, 0)
        return (self._shared(base) + stream.size / _BYTES_PER_SECOND) * 2.0**doublings

    def _shared(self, seconds: float) -> float:
        return seconds / max(1.0, len(self._waiting) / _CROWD)

    def _end(self, stream: StreamMemory) -> None:
        if len(self._stalled) >= _STALLED_MAX:
            self._stalled.clear()
        doublings = self._stalled.get(stream.consumer, 0)
        self._stalled[stream.consumer] = min(doublings + 1, _DOUBLINGS_MAX)
        self.ended += 1
        _log.warning(
            "stream ended: its client does not read, and others wait for the memory",
            extra={"consumer": stream.consumer, "bytes": stream.size},
        )
        stream.end()


@dataclass(slots=True, eq=False)
class _Waiting:
    """A stream that waits for memory."""

    stream: StreamMemory
    size: int
    turn: asyncio.Future[None]


class StreamMemory:
    """The memory of what one consumer's stream is writing."""

    __slots__ = (
        "_queue",
        "_task",
        "consumer",
        "is_closed",
        "is_counted_proven",
        "is_ended",
        "since",
        "size",
        "written_bytes",
    )

    def __init__(self, queue: WriteQueue, consumer: int) -> None:
        self._queue = queue
        self._task: asyncio.Task[object] | None = None
        self.consumer = consumer
        self.size = 0
        """The memory of what it is writing, in bytes."""
        self.since = 0.0
        """When the write began."""
        self.written_bytes = 0
        """Bytes that it has written so far."""
        self.is_counted_proven = False
        self.is_ended = False
        """Whether the stream was ended because its client did not read."""
        self.is_closed = False

    @property
    def is_proven(self) -> bool:
        """Whether its client has read more than a flow control window holds."""
        return self.written_bytes >= _PROVEN_BYTES

    async def reserve(self, size_bytes: int) -> None:
        """Waits until there is memory for a write; call `set` next. Does not wait if closed."""
        size = _COPIES * size_bytes
        self._task = asyncio.current_task()
        self.since = math.inf  # not stalled while it still reads its messages from the log
        if not self._queue.admits(self, size) and not self.is_closed:
            await self._queue.wait(self, size)

    def set(self, size_bytes: int) -> None:
        """Sets how many bytes it is writing, which may differ from what it reserved."""
        self._queue.change(self, _COPIES * size_bytes)

    def begin(self, size_bytes: int) -> None:
        """Like `set`, and records that the write begins now."""
        self.since = asyncio.get_running_loop().time()
        self.set(size_bytes)

    def written(self) -> None:
        """Records that the write has ended, and releases its memory."""
        if self.size:
            self.written_bytes += self.size // _COPIES
            if self.is_proven:
                self._queue.forgive(self)
            self.set(0)

    def end(self) -> None:
        """Ends the stream: its client does not read."""
        self.is_ended = True
        task, self._task = self._task, None  # a reference to the task would keep its call alive
        if task is not None:
            task.cancel(STALLED)

    def close(self) -> None:
        """Ends its wait for memory: the stream is about to end."""
        self.is_closed = True
        self._queue.wake(self)
