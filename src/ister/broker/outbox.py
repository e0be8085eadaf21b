"""What is on its way to one consumer: from the subscription that decides to its stream.

    subscription ─ push ─► outbox ─ take ─► the consumer's stream ─ written ─► room again

Bounded: a subscription pushes only while there is room, and there is room again once the stream has
written, which waits for the consumer's flow control. So a consumer that does not read holds these
few messages, and no one else waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Generic, TypeVar

from ister.errors import IsterError

__all__ = ["OUTBOX_MESSAGES", "TAKEN_OVER_SECONDS", "Outbox"]

TAKEN_OVER_SECONDS: Final = 1.0
"""How long a stream still stands that another one of the same consumer has taken over. Two clients
of one name would take over from each other as fast as they can."""

OUTBOX_MESSAGES: Final = 128
"""Messages that are handed over and not written yet, per consumer."""

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """A queue with one taker, on one loop."""

    def __init__(self, consumer: int) -> None:
        self.consumer = consumer
        self._items: deque[Item] = deque()
        self._taken = 0
        self._waiting: asyncio.Future[None] | None = None
        self._end: IsterError | None = None
        self._pause = 0.0
        self.is_ended = False
        self.leaving_bytes = 0
        """What the stream is writing; kept by whoever counts it."""
        self.written_bytes = 0
        """What it has written so far, likewise."""

    @property
    def room(self) -> int:
        """How many more items it takes now."""
        return 0 if self.is_ended else OUTBOX_MESSAGES - len(self._items) - self._taken

    def push(self, item: Item) -> None:
        """Hands an item to the stream."""
        self._items.append(item)
        self.wake()

    def end(self, reason: IsterError | None = None, *, after_seconds: float = 0.0) -> None:
        """Has the stream end: with an error, or in order. What was not written is left out.

        Args:
            reason: What to end with.
            after_seconds: A pause before the end, for clients that would come again at once.
        """
        if not self.is_ended:
            self.is_ended = True
            self._end = reason
            self._pause = after_seconds
            self._items.clear()
            self.wake()

    async def take(self, count_max: int = OUTBOX_MESSAGES) -> list[Item]:
        """The next items, at least one; none when the stream has to end in order.

        Raises:
            IsterError: The stream has to end with this.
        """
        while not self._items:
            if self.is_ended:
                await asyncio.sleep(self._pause)
                if self._end is not None:
                    raise self._end
                return []
            await self.wait()
        items = self._items
        count = min(len(items), count_max)
        self._taken += count
        return [items.popleft() for _ in range(count)]

    @property
    def is_ready(self) -> bool:
        """Whether `take` has something to say at once."""
        return bool(self._items) or self.is_ended

    async def wait(self) -> None:
        """Waits for the next item, for the end, or for `wake`, whichever comes first."""
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting

    def clear(self) -> None:
        """Leaves out what the stream has not taken yet."""
        self._items.clear()

    def written(self, count: int) -> None:
        """Makes room: the stream has written so many of what it took."""
        self._taken -= count

    def wake(self) -> None:
        """Has whoever is in `wait` look again."""
        waiting = self._waiting
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
