"""The names of all topics, cached: listing them takes as long as there are topics.

Owns: the cache, and an index that finds the partitions of a topic: creating a topic looks for them,
and the cost of a lookup does not depend on the number of topics. What this broker creates and
deletes shows at once; what other brokers create or delete shows after the age that a caller
accepts. Used only on the broker's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from ister.base.model import TopicName
from ister.base.partitions import parse_partition, partition_name
from ister.broker.topics.broker_records import BrokerRecords
from ister.bucket.catalog import list_partitions
from ister.topic.log import Log

_CHANGES_MAX: Final = 10_000


class TopicNameIndex:
    """A set of topic names with an index of partitions. Not thread-safe."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names: set[str] = set()
        self._partitions: dict[str, dict[int, str]] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        """Adds a name."""
        self._names.add(name)
        if (partition := parse_partition(name)) is not None:
            base, number = partition
            self._partitions.setdefault(base, {})[number] = name

    def discard(self, name: str) -> None:
        """Removes a name if it is present."""
        self._names.discard(name)
        if (partition := parse_partition(name)) is not None:
            base, number = partition
            partitions = self._partitions.get(base, {})
            partitions.pop(number, None)
            if not partitions:
                self._partitions.pop(base, None)

    def partitions_of(self, base: str) -> list[str]:
        """The partitions of a topic, in the order of their numbers."""
        return [name for _, name in sorted(self._partitions.get(base, {}).items())]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class TopicListing:
    """The topics of the stores, and those that this broker serves.

    `log` has the topics with a log, `records` the others; `served` returns the names of topics that
    are open here.
    """

    def __init__(
        self, log: Log, records: BrokerRecords, served: Callable[[], Iterable[str]]
    ) -> None:
        self._log = log
        self._records = records
        self._served = served
        self._names = TopicNameIndex()
        self._listed_at = float("-inf")
        self._change_count = 0
        self._changes: list[tuple[int, str, bool]] = []

    async def list(self) -> set[str]:
        """Lists all topics, open or not, of this broker and others."""
        return await asyncio.to_thread(lambda: {*self._log.topics(), *self._records.non_reliable()})

    async def cached(self, age_max: float) -> TopicNameIndex:
        """All topics, listed at most `age_max` seconds ago."""
        now = asyncio.get_running_loop().time()
        if now - self._listed_at >= age_max:
            changed_before = self._change_count
            listed = await self.list()
            # What was created or deleted here while they were listed may be on the list or not.
            for number, name, exists in self._changes:
                if number > changed_before:
                    (listed.add if exists else listed.discard)(name)
            listed.update(self._served())
            self._names, self._listed_at = TopicNameIndex(listed), now
        return self._names

    def record(self, name: str, *, exists: bool) -> None:
        """Records that this broker has created or deleted a topic."""
        (self._names.add if exists else self._names.discard)(name)
        self._change_count += 1
        self._changes.append((self._change_count, name, exists))
        del self._changes[:-_CHANGES_MAX]

    def expire(self) -> None:
        """Makes the next call list all topics again."""
        self._listed_at = float("-inf")

    def read_partitions(self, name: TopicName) -> Sequence[str]:
        """The topics behind a name, as the stores have them now. Blocks."""
        stores = self._log.stores
        if stores is None:
            return []
        record = stores.catalog(name).record()
        if (record is not None and record[0].is_open) or self._records.topic(name) is not None:
            return [str(name)]
        root = stores.storage.metadata.root_prefix
        numbers = {
            *list_partitions(stores.metadata, root, name),
            *self._records.partitions_of(name),
        }
        return [f"/{name.namespace}/{partition_name(name.topic, one)}" for one in sorted(numbers)]
