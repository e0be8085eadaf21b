"""Which topics of a log exist, and which are partitions of others.

Without a bucket, a topic exists when its directory does; with one, when the metadata store has its
record, or a directory was made before there was a bucket.
"""

from __future__ import annotations

from collections.abc import Container

from ister.base.model import TopicName
from ister.base.partitions import base_of_partition, partition_name
from ister.bucket.catalog import list_partitions
from ister.bucket.directory import list_records
from ister.errors import AlreadyExistsError
from ister.fs.base import FileSystem
from ister.topic.directories import TopicDirectories, list_directories
from ister.topic.stores import Stores


class KnownTopics:
    """Finds the topics of a log, open or not. Thread-safe."""

    def __init__(
        self,
        fs: FileSystem,
        *,
        directories: TopicDirectories | None,
        stores: Stores | None,
        opened: Container[str],
    ) -> None:
        """Looks in the directories and the metadata store; `opened` are the open topics."""
        self._fs = fs
        self._directories = directories
        self._stores = stores
        self._opened = opened

    def add_names(self, names: set[str]) -> list[str]:
        """All topics, sorted: `names` (the open ones) and those that are not open."""
        if self._directories is not None:
            names.update(map(str, list_directories(self._fs, self._directories.root)))
        if self._stores is not None:
            prefix = self._stores.storage.metadata.root_prefix
            for name, exists in list_records(self._stores.metadata, prefix).items():
                # Files of a topic that is being deleted, or was, are on their way out.
                (names.add if exists else names.discard)(name)
        return sorted(names)

    def exists(self, name: TopicName) -> bool:
        """Whether there is a topic of this name, which may be a partition."""
        if str(name) in self._opened:
            return True
        if self._stores is not None and (found := self._stores.catalog(name).record()) is not None:
            return found[0].is_open
        directories = self._directories
        return directories is not None and self._fs.exists(directories.directory_of(name).path)

    def partitions_of(self, name: TopicName) -> list[str]:
        """The partitions of a topic, in the order of their numbers."""
        numbers: set[int] = set()
        if self._stores is not None:
            prefix = self._stores.storage.metadata.root_prefix
            numbers.update(list_partitions(self._stores.metadata, prefix, name))
        number = 0
        # Those without a record: a log without a bucket has none.
        while number in numbers or self.exists(_partition(name, number)):
            numbers.add(number)
            number += 1
        return [str(_partition(name, one)) for one in sorted(numbers)]

    def check_new(self, name: TopicName) -> None:
        """Refuses a topic beside its partitions, and partitions beside their topic.

        Raises:
            AlreadyExistsError: The other one exists.
        """
        text = str(name)
        if partitions := self.partitions_of(name):
            raise AlreadyExistsError(
                f"{text} is a partitioned topic with {len(partitions)} partitions",
                topic=text,
                hint="log.partitioned(name) appends to its partitions",
            )
        base = base_of_partition(text)
        if base is not None and self.exists(TopicName.parse(base)):
            raise AlreadyExistsError(f"{base} is a topic without partitions", topic=text)


def _partition(name: TopicName, number: int) -> TopicName:
    return TopicName(namespace=name.namespace, topic=partition_name(name.topic, number))
