"""A topic for asyncio: calls are awaited instead of blocking.

Whatever may touch a disk runs in a worker thread; what is in the cache is read on the loop itself.
All tasks of a loop that wait for a topic share one waiter in the log, so an append wakes the loop
once however many of them there are; each task has its own future, so cancelling one does not affect
the others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, TypeVar, Unpack

from ister.base.model import AckLevel, Start
from ister.errors import (
    CapacityError,
    ClosedError,
    DiskError,
    FencedError,
    IsterError,
    WaitTimeoutError,
)
from ister.topic.append import MessageFields
from ister.topic.arguments import as_bytes, as_number, as_payloads, as_timeout
from ister.topic.message import Message
from ister.topic.reader import TAIL_SAMPLE
from ister.wal.waiters import Waiter

if TYPE_CHECKING:
    import pyarrow as pa

    from ister.topic.topic import Topic
    from ister.topic.uploads import UploadResult
    from ister.wal.log import Wal

_COMPACT_MIN = 64

_T = TypeVar("_T")


class AsyncTopic:
    """A topic's `append`, `wait`, `flush` and `read` for asyncio."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._hubs: dict[tuple[int, AckLevel, bool], _Hub] = {}
        self._last_hub: _Hub | None = None

    async def append(
        self, payload: bytes | bytearray | memoryview, **fields: Unpack[MessageFields]
    ) -> int:
        """Like `Topic.append`, but awaits where that would block.

        If the task is cancelled while it waits, nothing was appended.
        """
        payload = as_bytes(payload)
        return await self._admitted(len(payload), partial(self._topic.append, payload, **fields))

    async def publish(
        self,
        payload: bytes | bytearray | memoryview,
        *,
        level: AckLevel | str | None = None,
        timeout: float | None = None,
        **fields: Unpack[MessageFields],
    ) -> int:
        """Like `Topic.publish`, but awaits where that would block."""
        self._topic.resolve_level(level)
        timeout = as_timeout(timeout)
        offset = await self.append(payload, **fields)
        await self.wait(offset, level, timeout)
        return offset

    async def append_many(
        self, payloads: Iterable[bytes | bytearray | memoryview], **fields: Unpack[MessageFields]
    ) -> range:
        """Like `Topic.append_many`, but awaits where that would block."""
        messages = as_payloads(payloads)
        return await self._admitted(
            sum(map(len, messages)), partial(self._topic.append_many, messages, **fields)
        )

    async def append_arrow(self, batch: pa.RecordBatch) -> range:
        """Like `Topic.append_arrow`, but awaits where that would block."""
        # Something else has no size, and is refused by name.
        size = getattr(batch, "nbytes", 0)
        return await self._admitted(size, partial(self._topic.append_arrow, batch))

    async def _admitted(self, size_bytes: int, append: Callable[[], _T]) -> _T:
        """Calls `append` on the event loop once it would not block."""
        wal = self._topic.wal
        while True:
            if wal.settings.blocks_when_full and not wal.buffer.has_room(size_bytes):
                # Check again once the current buffer is written: others may append meanwhile.
                await self._passed(wal.next - 1, AckLevel.WRITTEN, None)
                continue
            try:
                return append()
            except CapacityError:
                if not await self._room():
                    raise

    async def _room(self) -> bool:
        """Waits until a held append should be retried; False if appends are refused instead."""
        loop = asyncio.get_running_loop()
        room = loop.create_future()

        def finish() -> None:
            if not room.done():
                room.set_result(None)

        def on_room() -> None:
            with suppress(RuntimeError):  # the loop has been closed, and its tasks with it
                loop.call_soon_threadsafe(finish)

        if not self._topic.wal.gate.notify_room(on_room):
            return False
        await room
        return True

    async def wait(
        self, offset: int, level: AckLevel | str | None = None, timeout: float | None = None
    ) -> None:
        """Like `Topic.wait`. A cancelled wait leaves the message as it is."""
        topic, timeout = self._topic, as_timeout(timeout)
        level = topic.resolve_level(level)
        if type(offset) is not int or not 0 <= offset < topic.wal.next:
            topic.wait(offset, level)  # raises, and says why
        if level is AckLevel.MEMORY:
            return
        if level is AckLevel.TIERED:
            await self._passed(offset, AckLevel.SYNCED, timeout)
        await self._passed(offset, level, timeout)
        if topic.bucket is not None:
            topic.bucket.check_owner()

    async def _passed(
        self, offset: int, level: AckLevel, timeout: float | None, *, is_patient: bool = False
    ) -> None:
        passed = self.hub(level, is_patient=is_patient).passed(offset)
        if passed is None:
            return
        if timeout is None:  # the usual case, without the cost of a timer
            await passed
            return
        topic = self._topic
        try:
            async with asyncio.timeout(timeout):
                await passed
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"offset not {level} after {timeout} s", topic=topic.name, offset=offset
            ) from error

    def refuse_waits(self, error: IsterError) -> None:
        """Ends all waits of the running loop for `tiered` with an error."""
        self.hub(AckLevel.TIERED, is_patient=False).refuse(error)

    async def flush(self) -> int:
        """Like `Topic.flush`."""
        return await asyncio.to_thread(self._topic.flush)

    async def rotate(self) -> bool:
        """Like `Topic.rotate`."""
        return await asyncio.to_thread(self._topic.rotate)

    async def upload(self) -> UploadResult:
        """Like `Topic.upload`."""
        return await asyncio.to_thread(self._topic.upload)

    def reader(self, start: Start = "earliest", *, end: int | None = None) -> AsyncReader:
        """Like `Topic.reader`; a start by time may read files, on the loop."""
        return AsyncReader(self, self._topic, start, end)

    async def read(
        self,
        start: Start = "earliest",
        *,
        end: int | None = None,
        follow: bool = False,
        timeout: float | None = None,
    ) -> AsyncIterator[Message]:
        """Like `Topic.read`."""
        reader, timeout = self.reader(start, end=end), as_timeout(timeout)
        try:
            if not follow:
                await self._limit(reader, end, timeout)
                timeout = None
            while batch := await reader.next_batch(timeout=timeout):
                for message in batch:
                    yield message
        finally:
            reader.close()

    async def _limit(self, reader: AsyncReader, end: int | None, timeout: float | None) -> None:
        """Limits a reader to what was appended before now, as `Topic.read` does."""
        wal = self._topic.wal
        upto = wal.next if end is None else min(end, wal.next)
        if upto > wal.visible:
            try:
                await self._passed(upto - 1, wal.levels.local_level, timeout)
                await self._passed(upto - 1, wal.levels.visible_level, timeout, is_patient=True)
            except (CapacityError, ClosedError, DiskError, FencedError):
                upto = max(wal.visible, reader.core.next_offset)
        reader.core.limit(upto)

    def hub(self, level: AckLevel, *, is_patient: bool) -> _Hub:
        """The hub of the running loop for one watermark."""
        loop = asyncio.get_running_loop()
        hub = self._last_hub
        if hub is not None and hub.serves(loop, level, is_patient):
            return hub
        key = (id(loop), level, is_patient)
        hub = self._hubs.get(key)
        if hub is None or hub.loop is not loop:
            self._hubs = {k: h for k, h in self._hubs.items() if not h.loop.is_closed()}
            hub = self._hubs[key] = _Hub(self._topic.wal, level, loop, is_patient=is_patient)
        self._last_hub = hub
        return hub


class AsyncReader:
    """A reader whose `next_batch` is awaited. Used by one task at a time."""

    def __init__(self, edge: AsyncTopic, topic: Topic, start: Start, end: int | None) -> None:
        self._edge = edge
        self._wal = topic.wal
        # A read in a worker thread whose task was cancelled. It moves the reader all the same, so
        # the next call gets its messages.
        self._left_behind: asyncio.Future[Sequence[Message]] | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._wait_count = 0
        self.core = topic.reader(start, end=end)
        """The reader underneath."""
        self.turns: AbstractAsyncContextManager[None] = nullcontext()
        """Entered for each read of files or objects; limits how many there are at once."""

    async def next_batch(
        self, max_messages: int = 4096, max_bytes: int = 1 << 22, timeout: float | None = None
    ) -> Sequence[Message]:
        """Like `Reader.next_batch`. A call that is cancelled or times out has taken no message."""
        timeout = as_timeout(timeout)
        max_messages = as_number("max_messages", max_messages, least=1)
        max_bytes = as_number("max_bytes", max_bytes)
        if timeout is None:  # the usual case, without the cost of a timer
            return await self._next_batch(max_messages, max_bytes)
        deadline: asyncio.Timeout
        try:
            async with asyncio.timeout(timeout) as deadline:
                return await self._next_batch(max_messages, max_bytes)
        except TimeoutError:
            if deadline.expired():
                return []
            raise

    async def _next_batch(self, max_messages: int, max_bytes: int) -> Sequence[Message]:
        core = self.core
        is_measured = False
        while True:
            if self._left_behind is None:
                # At the tail, which is where readers wait, this is all there is to do.
                if messages := core.poll_cache(max_messages, max_bytes):
                    if is_measured:
                        core.observe_tail_read(self._seconds_visible())
                    return messages
                if core.next_offset >= self._wal.visible:
                    if core.is_at_end:
                        return []
                    await self._visible()
                    self._wait_count += 1
                    is_measured = self._wait_count % TAIL_SAMPLE == 1
                    continue
            async with self.turns:
                messages = await self._poll_in_thread(max_messages, max_bytes)
            if messages:
                return messages
            if core.is_at_end:
                return []

    async def _poll_in_thread(self, max_messages: int, max_bytes: int) -> Sequence[Message]:
        if self._left_behind is None:
            loop = asyncio.get_running_loop()
            self._left_behind = loop.run_in_executor(None, self.core.poll, max_messages, max_bytes)
            # The next call gets the exception. If there is none, the reader was closed.
            self._left_behind.add_done_callback(_retrieve_exception)
        reading = self._left_behind
        try:
            messages = await asyncio.shield(reading)
        finally:
            if reading.done():
                self._left_behind = None
        return messages

    def _visible(self) -> asyncio.Future[None]:
        """A future that is done once the next message is visible, or the reader is closed."""
        hub = self._edge.hub(self._wal.levels.visible_level, is_patient=True)
        waiting = hub.passed(self.core.next_offset)
        if waiting is None:
            waiting = hub.loop.create_future()
            waiting.set_result(None)
        self._waiting = waiting
        return waiting

    def _seconds_visible(self) -> float:
        """Seconds since the log reported messages as visible."""
        hub = self._edge.hub(self._wal.levels.visible_level, is_patient=True)
        return hub.loop.time() - hub.passed_at

    def close(self) -> None:
        """Ends the reader and wakes a task that waits in it. Called on the task's loop."""
        self.core.close()
        waiting = self._waiting
        if waiting is not None and not waiting.done():
            waiting.set_exception(
                ClosedError("the reader is closed", topic=self._wal.settings.topic)
            )


def _retrieve_exception(done: asyncio.Future[Sequence[Message]]) -> None:
    """Keeps the event loop from logging that the exception was never retrieved."""
    if not done.cancelled():
        done.exception()


class _Hub:
    """The tasks of one loop that wait for one watermark of one log."""

    def __init__(
        self, wal: Wal, level: AckLevel, loop: asyncio.AbstractEventLoop, *, is_patient: bool
    ) -> None:
        self.loop = loop
        self._is_patient = is_patient
        self._wal = wal
        self._level = level
        self._thread = threading.get_ident()
        self._order = count()
        self._heap: list[tuple[int, int, asyncio.Future[None]]] = []
        self._enlisted: Waiter | None = None
        self._compact_at = _COMPACT_MIN
        self.passed_at = loop.time()
        """When the log last called, by the loop's clock."""

    def serves(self, loop: asyncio.AbstractEventLoop, level: AckLevel, is_patient: bool) -> bool:
        """Whether this is the hub of this loop and watermark."""
        return self.loop is loop and self._level is level and self._is_patient == is_patient

    def passed(self, offset: int) -> asyncio.Future[None] | None:
        """A future that is done once the watermark has passed `offset`; None if it has."""
        if self._watermark() > offset:
            return None
        future: asyncio.Future[None] = self.loop.create_future()
        heappush(self._heap, (offset, next(self._order), future))
        if len(self._heap) >= self._compact_at:
            # As in the log's own list of waiters: cancelled ones do not pile up at a quiet tail.
            self._heap = [entry for entry in self._heap if not entry[2].done()]
            heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + _COMPACT_MIN
        enlisted = self._enlisted
        if enlisted is None or enlisted.is_done or offset < enlisted.offset:
            self._enlist()
        return future

    def _watermark(self) -> int:
        return self._wal.levels.watermark(self._level)

    def _enlist(self) -> None:
        """Registers a callback for the lowest offset that a task waits for."""
        while self._heap:
            waiter = Waiter(self._heap[0][0], self._on_passed, is_patient=self._is_patient)
            previous, self._enlisted = self._enlisted, waiter
            if previous is not None:
                previous.is_done = True
            try:
                if self._wal.enlist(waiter, self._level):
                    return
            except IsterError as error:
                self._drain(error)
                return
            self._release_passed()
        self._enlisted = None

    def _on_passed(self, error: IsterError | None) -> None:
        """Called by the log, in any thread and with its lock held."""
        self.passed_at = self.loop.time()
        is_on_loop = threading.get_ident() == self._thread
        call = self.loop.call_soon if is_on_loop else self.loop.call_soon_threadsafe
        with suppress(RuntimeError):  # the loop has been closed, and its tasks with it
            call(self._drain, error)

    def refuse(self, error: IsterError) -> None:
        """Fails all tasks that wait now."""
        if self._enlisted is not None:
            self._enlisted.is_done = True
        self._drain(error)

    def _drain(self, error: IsterError | None) -> None:
        self._enlisted = None
        if error is not None:
            waiting, self._heap = self._heap, []
            for _, _, future in waiting:
                if not future.done():
                    future.set_exception(error.again())
            return
        self._release_passed()
        if self._heap:
            self._enlist()

    def _release_passed(self) -> None:
        watermark = self._watermark()
        heap = self._heap
        while heap and (heap[0][0] < watermark or heap[0][2].done()):
            _, _, future = heappop(heap)
            if not future.done():
                future.set_result(None)
