"""An index of topic names that finds the partitions of a topic.

Creating a topic checks for partitions of that name. The cost of a lookup does not depend on the
number of topics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ister.base.partitions import parse_partition


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
