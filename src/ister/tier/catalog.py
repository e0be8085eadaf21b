"""What the metadata store knows about a topic, read without owning it.

Owns: nothing. Every call asks the store anew, one key or one short range, so the size of a topic's
history does not matter: a descriptor is looked up when a reader comes to it. Lookups go by "the
last descriptor that starts at or before", never by "the first that starts after": an offset in the
middle of an object belongs to the object.

Anybody may read: other processes, other machines, Spark.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

from ister.clock import Clock
from ister.errors import CorruptDataError
from ister.format.descriptor import ObjectDescriptor, decode_descriptor
from ister.format.records import (
    OwnerRecord,
    Progress,
    SealedState,
    TopicRecord,
    decode_owner,
    decode_progress,
    decode_sealed,
    decode_topic,
)
from ister.metadata.base import KeyValue, MetadataStore
from ister.metrics import Metrics
from ister.model import TopicName
from ister.tier.names import TopicKeys

__all__ = ["Catalog", "Subscription", "list_records", "list_topics"]

_log = logging.getLogger("ister.tier.catalog")

_PAGE = 256


class Subscription(NamedTuple):
    """A subscription's cursor by its name."""

    name: str
    progress: Progress


class Catalog:
    """The read side of one topic's metadata. Thread-safe."""

    def __init__(
        self, store: MetadataStore, keys: TopicKeys, *, clock: Clock, metrics: Metrics
    ) -> None:
        self.store = store
        self.keys = keys
        self._clock = clock
        self._metrics = metrics

    def record(self) -> tuple[TopicRecord, int] | None:
        """The topic's record and its revision; None if there never was such a topic."""
        found = self.store.get(self.keys.record)
        if found is None:
            return None
        return decode_topic(found.value, key=found.key), found.revision

    def owner(self) -> tuple[OwnerRecord, int] | None:
        """Who has the topic open for writing now."""
        found = self.store.get(self.keys.owner)
        if found is None:
            return None
        return decode_owner(found.value, key=found.key), found.revision

    def sealed(self) -> tuple[SealedState, int] | None:
        """The seal, if the topic was handed over and nobody has taken it."""
        found = self.store.get(self.keys.sealed)
        if found is None:
            return None
        state = decode_sealed(found.value, key=found.key)
        return None if state is None else (state, found.revision)

    def find(self, offset: int) -> ObjectDescriptor | None:
        """The last object that starts at or before `offset`, whether or not it reaches it."""
        return self._one(end=self.keys.descriptor(offset + 1), descending=True)

    def following(self, offset: int) -> ObjectDescriptor | None:
        """The first object that starts at or after `offset`."""
        return self._one(start=self.keys.descriptor(offset), descending=False)

    def holding(self, offset: int) -> ObjectDescriptor | None:
        """The object that holds `offset`; the first one behind it, if none does."""
        before = self.find(offset)
        if before is not None and before.end > offset:
            return before
        return self.following(offset)

    def first(self) -> ObjectDescriptor | None:
        """The oldest object."""
        return self._one(descending=False)

    def last(self) -> ObjectDescriptor | None:
        """The newest object."""
        return self._one(descending=True)

    def descriptors(
        self, start: int = 0, end: int | None = None
    ) -> Iterator[tuple[ObjectDescriptor, int]]:
        """Every object with offsets in a range, ascending, each with its key's revision.

        Objects that are merged under the walk may come twice, as they were and merged.
        """
        stop = self.keys.objects_end if end is None else self.keys.descriptor(end)
        key = self._first_key(start)
        while True:
            page = self._range(start=key, end=stop, limit=_PAGE)
            for found in page:
                described = decode_descriptor(found.value, key=found.key)
                yield described, found.revision
            if len(page) < _PAGE:
                return
            # Not "after the last key": what follows may have been merged with what was here.
            key = self._first_key(described.end)

    def _first_key(self, start: int) -> str:
        """The key of the object that holds `start`, or would."""
        before = self.find(start)
        return self.keys.descriptor(
            before.start if before is not None and before.end > start else start
        )

    def subscriptions(self) -> list[Subscription]:
        """Every cursor that can be read."""
        suffix = "/progress"
        subscriptions: list[Subscription] = []
        for found in self.store.range(self.keys.subscriptions):
            if not found.key.endswith(suffix):
                continue
            name = found.key.removeprefix(self.keys.subscriptions).removesuffix(suffix)
            try:
                subscriptions.append(
                    Subscription(name, decode_progress(found.value, key=found.key))
                )
            except CorruptDataError as error:
                _log.error("unreadable cursor", extra={"error": str(error)})
        return subscriptions

    def _one(
        self, *, start: str | None = None, end: str | None = None, descending: bool
    ) -> ObjectDescriptor | None:
        found = self._range(
            start=start, end=end or self.keys.objects_end, limit=1, descending=descending
        )
        return decode_descriptor(found[0].value, key=found[0].key) if found else None

    def _range(
        self, *, start: str | None, end: str, limit: int, descending: bool = False
    ) -> list[KeyValue]:
        began = self._clock.monotonic()
        found = self.store.range(
            self.keys.objects, start=start, end=end, limit=limit, descending=descending
        )
        self._metrics.observe(
            "cloud_reader.query_duration_seconds", self._clock.monotonic() - began
        )
        return found


def list_topics(store: MetadataStore, root_prefix: str) -> list[str]:
    """The names of all topics that exist, sorted."""
    return sorted(name for name, exists in list_records(store, root_prefix).items() if exists)


def list_records(store: MetadataStore, root_prefix: str) -> dict[str, bool]:
    """The names of all topics that have a record, and whether each exists (or was deleted)."""
    prefix = f"{root_prefix}/topics/"
    names: dict[str, bool] = {}
    for found in store.range(prefix):
        namespace, _, topic = found.key.removeprefix(prefix).partition("/")
        if topic and "/" not in topic:
            name = str(TopicName(namespace=namespace, topic=topic))
            names[name] = decode_topic(found.value, key=found.key).is_open
    return names
