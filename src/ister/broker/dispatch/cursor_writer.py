"""Writes the cursor of a subscription: some time after it moved, or at once when it moved far.

Owns: when and how the cursor is written. Does not own: the cursor (`ister.subscription.delivery`),
the decision when a write is due (`ister.subscription.progress`), the records
(`ister.subscription.store`). Used only on the broker's loop; writes run in threads.

What a crash leaves: the cursor as it was last written. What was acknowledged since is delivered
again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from ister.base import failpoints, threads
from ister.base.model import TopicName
from ister.errors import FencedError, IsterError
from ister.subscription.delivery import Delivery
from ister.subscription.progress import ProgressPlan
from ister.subscription.saved_state import SavedState
from ister.subscription.store import StoredSubscription, SubscriptionStore
from ister.topic.topic import Topic

_log = logging.getLogger("ister.broker.dispatch.cursor_writer")

_RETRY_SECONDS: Final = 1.0


class CursorWriter:
    """Writes the cursor of one subscription.

    `on_fenced` is called if another broker has the topic.
    """

    def __init__(
        self,
        topic: Topic,
        stored: StoredSubscription,
        *,
        delivery: Delivery,
        store: SubscriptionStore,
        plan: ProgressPlan,
        on_fenced: Callable[[], None],
    ) -> None:
        self._topic = topic
        self._parsed = TopicName.parse(topic.name)
        self._name, self._incarnation = stored.name, stored.incarnation
        self._delivery = delivery
        self._store = store
        self._plan = plan
        self._on_fenced = on_fenced
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._writing = asyncio.Lock()
        self._is_under_way = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._seen_version = -1
        self._moved_to = delivery.cursor
        self.moved_at = self._loop.time()
        """When the cursor last moved; at first, when the subscription was opened."""
        plan.written(stored.cursor, self._loop.time(), version=delivery.version)

    @property
    def is_behind(self) -> bool:
        """Whether `update` has something to do."""
        if self._delivery.version != self._seen_version:
            return True
        return self._timer is None and self._plan.is_dirty

    @property
    def is_dirty(self) -> bool:
        """Whether there is progress that is not written."""
        delivery = self._delivery
        self._plan.update(delivery.cursor, self._loop.time(), version=delivery.version)
        return self._plan.is_dirty

    def update(self, now: float) -> None:
        """Writes the cursor if that is due, or later."""
        if self._is_closed:
            return
        plan, cursor = self._plan, self._delivery.cursor
        self._seen_version = self._delivery.version
        if cursor != self._moved_to:
            self._moved_to, self.moved_at = cursor, now
        plan.update(cursor, now, version=self._seen_version)
        if plan.is_due(now):
            self._start()
        elif self._timer is None:
            deadline = plan.deadline()
            if deadline is not None:
                self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        # An acknowledgement may have had the cursor written at the same moment.
        self.update(self._loop.time())

    def _start(self) -> None:
        """Starts a write, unless one is under way: that one calls `update` at its end."""
        if self._is_under_way:
            return
        self._is_under_way = True
        task = self._loop.create_task(self._write())
        threads.watch_task("ister-dispatch", task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self) -> None:
        """Writes the cursor; a failed write is retried later."""
        try:
            await self.flush()
        except FencedError:
            self._on_fenced()
        except IsterError as error:
            _log.warning("cursor not written", extra={"error": str(error)})
        finally:
            self._is_under_way = False
        # What was acknowledged meanwhile, or has to be tried again.
        self.update(self._loop.time())

    async def flush(self) -> None:
        """Writes the cursor now."""
        async with self._writing:
            delivery = self._delivery
            cursor, saved, version = delivery.cursor, delivery.saved(), delivery.version
            failpoints.reach("broker.before_cursor")
            try:
                await self._save(cursor, saved)
            except IsterError:
                self._plan.failed(self._loop.time(), _RETRY_SECONDS)
                raise
            failpoints.reach("broker.after_cursor")
            self._plan.written(cursor, self._loop.time(), version=version)

    async def move(
        self, offset: int, *, check: Callable[[], None], on_moved: Callable[[], None]
    ) -> None:
        """Writes another cursor, which may be lower; then calls `on_moved`.

        `check` is called first, when no other write is under way; it may raise.
        """
        async with self._writing:
            check()
            await self._save(offset, {}, force=True)
            on_moved()
            self._plan.written(offset, self._loop.time(), version=self._delivery.version)

    async def _save(self, cursor: int, saved: SavedState, *, force: bool = False) -> None:
        bucket = self._topic.bucket
        await asyncio.to_thread(
            self._store.save_cursor,
            self._parsed,
            self._name,
            cursor=cursor,
            saved=saved,
            incarnation=self._incarnation,
            owned=None if bucket is None else bucket.owned,
            force=force,
        )

    def cancel(self) -> list[asyncio.Task[None]]:
        """Ends timed writes; returns writes under way, whose threads continue in any case."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        return list(self._tasks)
