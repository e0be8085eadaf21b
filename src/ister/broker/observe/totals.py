"""The numbers and bytes of files and objects, of each topic and of all topics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from ister.base import threads
from ister.base.clock import Clock
from ister.broker.observe.query_threads import QueryThreads
from ister.broker.observe.storage_counts import StorageCounts
from ister.broker.topics.served_topic import ServedTopic
from ister.broker.topics.topics import Topics
from ister.errors import IsterError
from ister.topic.describe import TopicView

_log = logging.getLogger("ister.broker.observe.totals")

# The oldest that the totals of all topics may become.
_SUMS_SECONDS: Final = 10.0
# A request waits this long for the totals, then uses what was counted so far.
_SUMS_PART_SECONDS: Final = 0.5
_SUMS_TOPICS: Final = 100


@dataclass(slots=True)
class StoredTotals:
    """The numbers and bytes of a topic's files and objects."""

    files: int = 0
    files_bytes: int = 0
    objects: int = 0
    objects_bytes: int = 0

    def fill(self, view: TopicView) -> None:
        """Sets the fields of a view."""
        view.files_total, view.files_bytes = self.files, self.files_bytes
        view.objects_total, view.objects_bytes = self.objects, self.objects_bytes


class TotalsCache:
    """The totals of files and objects of all topics, some seconds old."""

    def __init__(
        self,
        topics: Topics,
        storage_counts: StorageCounts,
        query_threads: QueryThreads,
        *,
        clock: Clock,
    ) -> None:
        self._topics = topics
        self._storage_counts = storage_counts
        self._query_threads = query_threads
        self._clock = clock
        self._known: dict[str, StoredTotals] = {}
        self._at = -float("inf")
        self._counting: asyncio.Task[None] | None = None

    async def get(self, visible: Iterable[ServedTopic] | None) -> dict[str, int]:
        """The totals of some topics, or of all. Long counts continue in the background."""
        is_idle = self._counting is None or self._counting.done()
        if is_idle and self._clock.monotonic() - self._at > _SUMS_SECONDS:
            self._counting = asyncio.get_running_loop().create_task(self._count_all())
            threads.watch_task("ister-sums", self._counting)
            await asyncio.wait([self._counting], timeout=_SUMS_PART_SECONDS)
        names = None if visible is None else {topic.name for topic in visible}
        each = [one for name, one in self._known.items() if names is None or name in names]
        return {
            "objects": sum(one.objects for one in each),
            "objects_bytes": sum(one.objects_bytes for one in each),
            "files_bytes": sum(one.files_bytes for one in each),
        }

    async def stop(self) -> None:
        """Cancels a running count."""
        if self._counting is not None:
            self._counting.cancel()
            await asyncio.gather(self._counting, return_exceptions=True)

    async def _count_all(self) -> None:
        served = self._topics.served
        try:
            for at in range(0, len(served), _SUMS_TOPICS):
                await self._query_threads.run(self._count_some, served[at : at + _SUMS_TOPICS])
        except IsterError as error:
            _log.debug("files and objects cannot be counted", extra={"error": str(error)})
        self._at = self._clock.monotonic()
        names = {topic.name for topic in self._topics.served}
        for name in [name for name in self._known if name not in names]:
            self._known.pop(name, None)
            self._storage_counts.forget(name)

    def _count_some(self, topics: Iterable[ServedTopic]) -> None:
        for topic in topics:
            if not topic.is_closed:
                self.count(topic)

    def count(self, topic: ServedTopic) -> StoredTotals:
        """The files and objects of a topic; the last known totals where they cannot be read."""
        core = topic.topic
        if core is None:
            return StoredTotals()
        found = replace(self._known.get(topic.name, StoredTotals()))
        try:
            found.files, found.files_bytes = self._storage_counts.files(core)
            if core.bucket is not None:
                counted = self._storage_counts.objects(
                    topic.name, topic.incarnation, core.bucket.owned.catalog
                )
                found.objects, found.objects_bytes = counted.objects, counted.size_bytes
        except IsterError as error:
            _log.debug(
                "files and objects cannot be counted",
                extra={"topic": topic.name, "error": str(error)},
            )
        self._known[topic.name] = found
        return found
