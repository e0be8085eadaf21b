"""The outbound queue of one consumer, from its subscription to its stream.

    subscription ─ push ─► outbox ─ take ─► the consumer's stream ─ written ─► room again

Bounded: a subscription pushes only while there is room, and there is room again once the stream has
written, which waits for the consumer's flow control. What it writes takes memory that it has to
reserve first (`write_queue`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Generic, TypeVar

from ister.broker.dispatch.write_queue import StreamMemory, WriteQueue
from ister.errors import IsterError

TAKEN_OVER_SECONDS: Final = 1.0
"""How long a stream still stands that another one of the same consumer has taken over. Two clients
of one name would take over from each other as fast as they can."""

OUTBOX_MESSAGES: Final = 128
"""Messages that are handed over and not written yet, per consumer."""

Sent = tuple[int, int]
"""An offset, and the number of the attempt."""

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """A queue with one taker, on one loop."""

    def __init__(self, consumer: int, writes: WriteQueue) -> None:
        self.consumer = consumer
        self.memory = StreamMemory(writes, consumer)
        """The memory of what the stream is writing."""
        self._items: deque[Item] = deque()
        self._taken = 0
        self._waiting: asyncio.Future[None] | None = None
        self._end: IsterError | None = None
        self._pause = 0.0
        self.is_ended = False

    @property
    def room(self) -> int:
        """How many more items it takes now."""
        return 0 if self.is_ended else OUTBOX_MESSAGES - len(self._items) - self._taken

    def push(self, item: Item) -> None:
        """Hands an item to the stream."""
        self._items.append(item)
        if self._waiting is not None:
            self.wake()

    def end(self, reason: IsterError | None = None, *, after_seconds: float = 0.0) -> None:
        """Ends the stream, with an error or in order. What was not written is dropped.

        `after_seconds` is a pause before the end, for clients that reconnect at once.
        """
        if not self.is_ended:
            self.is_ended = True
            self._end = reason
            self._pause = after_seconds
            self._items.clear()
            self.memory.close()
            self.wake()

    async def take(self, count_max: int = OUTBOX_MESSAGES) -> list[Item]:
        """Returns the next items, at least one; [] when the stream has to end in order."""
        while not self._items:
            if self.is_ended:
                await asyncio.sleep(self._pause)
                if self._end is not None:
                    raise self._end
                return []
            await self.wait()
        items = self._items
        count = len(items)
        if count > count_max:
            count = count_max
            taken = [items.popleft() for _ in range(count)]
        else:
            taken = list(items)
            items.clear()
        self._taken += count
        return taken

    @property
    def is_ready(self) -> bool:
        """Whether `take` returns at once."""
        return bool(self._items) or self.is_ended

    async def wait(self) -> None:
        """Waits for the next item, for the end, or for `wake`, whichever comes first."""
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting

    def clear(self) -> None:
        """Drops what the stream has not taken yet."""
        self._items.clear()

    def written(self, count: int) -> None:
        """Makes room for items that the stream has written."""
        self._taken -= count

    def wake(self) -> None:
        """Wakes the caller of `wait`."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
