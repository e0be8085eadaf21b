"""What the metadata store knows about a topic, read without owning it.

Owns: only hints. Every call reads from the store, so a descriptor is looked up when a reader
reaches it. Lookups search "the last descriptor that starts at or before", never "the first that
starts after": an offset in the middle of an object belongs to that object.

The cost of a lookup does not depend on the length of the history: it reads ascending ranges that
are bounded at both ends and hold a few keys. etcd counts every key of a requested range, even with
a limit of one, and for a descending range it also reads every value. Hints tell where to search:
objects are contiguous, they are about as long as the last one read, and `cur` names the newest.
Results do not depend on the hints: if one is wrong, the next range is wider.

Objects may be merged between two reads of one lookup. A merge removes keys and never adds one, so a
lookup takes its result from a single range, or starts again.

Any process may read it, also on other machines: Spark, for example.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import TopicName
from ister.base.partitions import PARTITION_INFIX, parse_partition
from ister.bucket.names import TopicKeys
from ister.errors import CorruptDataError
from ister.format.descriptor import ObjectDescriptor, decode_descriptor
from ister.format.records import (
    OwnerRecord,
    Progress,
    SealedState,
    TopicRecord,
    decode_current,
    decode_owner,
    decode_progress,
    decode_sealed,
    decode_topic,
)
from ister.metadata.base import KeyValue, MetadataStore

_log = logging.getLogger("ister.bucket.catalog")

_PAGE: Final = 256
_FEW: Final = 8
"""The most descriptors that one step of a lookup reads; each may have 64 KiB."""

_OFFSET_MAX: Final = 2**64 - 1
_LENGTH_AT_FIRST: Final = 1024
_GROWTH: Final = 16


class Subscription(NamedTuple):
    """A subscription's cursor by its name."""

    name: str
    progress: Progress


class Ownership(NamedTuple):
    """The keys that say who may write a topic: value and revision of each; None if missing."""

    record: tuple[TopicRecord, int] | None
    owner: tuple[OwnerRecord, int] | None
    sealed: tuple[SealedState, int] | None


class Ends(NamedTuple):
    """The oldest and the newest object of a topic."""

    first: ObjectDescriptor | None
    last: ObjectDescriptor | None
    pointer_revision: int | None
    """The revision of the pointer to the newest object, read before the objects; or None."""


class Catalog:
    """The read side of one topic's metadata. Thread-safe."""

    def __init__(
        self, store: MetadataStore, keys: TopicKeys, *, clock: Clock, metrics: Metrics
    ) -> None:
        self.store = store
        self.keys = keys
        self._clock = clock
        self._metrics = metrics
        # Hints, set without a lock: the start of the oldest object, and the length of one.
        self._oldest = 0
        self._length = _LENGTH_AT_FIRST

    def record(self) -> tuple[TopicRecord, int] | None:
        """The topic's record and its revision; None if the topic never existed."""
        return _record(self.store.get(self.keys.record))

    def owner(self) -> tuple[OwnerRecord, int] | None:
        """The process that has the topic open for writing."""
        return _owner(self.store.get(self.keys.owner))

    def sealed(self) -> tuple[SealedState, int] | None:
        """The seal, if the topic was handed over and has no new owner yet."""
        return _seal(self.store.get(self.keys.sealed))

    def ownership(self) -> Ownership:
        """The record, the owner and the seal, read at one moment."""
        keys = self.keys
        found = self.store.get_many([keys.record, keys.owner, keys.sealed])
        return Ownership(
            _record(found.get(keys.record)),
            _owner(found.get(keys.owner)),
            _seal(found.get(keys.sealed)),
        )

    def find(self, offset: int) -> ObjectDescriptor | None:
        """The last object that starts at or before `offset`, whether or not it reaches it."""
        return self._last_before(min(offset, _OFFSET_MAX) + 1)

    def following(self, offset: int) -> ObjectDescriptor | None:
        """The first object that starts at or after `offset`."""
        near = offset + self._length
        # Objects are contiguous: an empty range means the end of the history, or a gap.
        page = self._range(offset, near, limit=1) or self._range(near, None, limit=1)
        return self._decode(page[0]) if page else None

    def holding(self, offset: int) -> ObjectDescriptor | None:
        """The object that holds `offset`; the first one behind it, if none does."""
        before = self.find(offset)
        if before is not None and before.end > offset:
            return before
        return self.following(offset)

    def first(self) -> ObjectDescriptor | None:
        """The oldest object."""
        near = self._oldest + self._length
        page = self._range(0, near, limit=1)
        if not page:
            # Older objects have expired; the record says up to which offset.
            record = self.record()
            floor = 0 if record is None else record[0].expired_before
            if floor >= near:
                page = self._range(near, floor + self._length, limit=1)
        page = page or self._range(near, None, limit=1)
        if not page:
            return None
        described = self._decode(page[0])
        self._oldest = described.start
        return described

    def last(self) -> ObjectDescriptor | None:
        """The newest object."""
        return self._last(self.store.get(self.keys.current))

    def ends(self) -> Ends:
        """The oldest and the newest object, and the revision of the pointer to the newest."""
        # Read the pointer first: it may then be older than the objects, but not newer.
        pointer = self.store.get(self.keys.current)
        last = self._last(pointer)
        return Ends(
            # No object precedes one that starts at offset 0.
            self.first() if last is not None and last.start > 0 else last,
            last,
            None if pointer is None else pointer.revision,
        )

    def descriptors(
        self, start: int = 0, end: int | None = None, *, is_partial: bool = False
    ) -> Iterator[tuple[ObjectDescriptor, int]]:
        """Every object with offsets in a range, ascending, each with its key's revision.

        Objects that are merged under the walk may come twice, as they were and merged.

        `end`: the offset after the last one; None for all.
        `is_partial`: the caller may stop early: pages are small at first, so that no more than
        about twice as many descriptors are read as are used.
        """
        stop = _OFFSET_MAX + 1 if end is None else end
        width = self._length
        size = _FEW if is_partial else _PAGE
        while (begin := self._first_start(start)) < stop:
            page = self._range(begin, min(begin + width, stop), limit=size)
            if not page and begin + width < stop:
                # An empty range: the end of the history, or a gap.
                page = self._range(begin + width, stop, limit=size)
            if (not page or self._start(page[0]) > begin) and self._first_start(start) < begin:
                continue  # it was merged into the previous object meanwhile
            if not page:
                return
            for found in page:
                described = self._decode(found)
                yield described, found.revision
            # Wide enough for about one full page.
            width = max(1, (described.end - self._start(page[0])) * size // len(page))
            size = min(2 * size, _PAGE)
            # Not "after the last key": what follows may have been merged with what was here.
            start = described.end

    def _first_start(self, offset: int) -> int:
        """The start of the object that contains `offset`; `offset` itself if there is none."""
        before = self.find(offset)
        return before.start if before is not None and before.end > offset else offset

    def _last(self, pointer: KeyValue | None) -> ObjectDescriptor | None:
        """The newest object, searched from the offset in the pointer."""
        while pointer is not None:
            start = _OFFSET_MAX
            with suppress(CorruptDataError):
                start = decode_current(pointer.value, key=pointer.key)
            page = self._range(start, None, limit=_FEW)
            if 0 < len(page) < _FEW:
                return self._decode(page[-1])
            again = self.store.get(self.keys.current)
            if again is None or again.revision == pointer.revision:
                break
            pointer = again  # the newest object was merged meanwhile
        # Usually, a topic without a pointer has no objects.
        if pointer is None and not self._range(0, None, limit=1):
            return None
        return self._last_before(_OFFSET_MAX + 1)

    def _last_before(self, end: int) -> ObjectDescriptor | None:
        """The last object that starts before `end`: searches backwards, then bisects."""
        high, low = end, 0
        width = self._length
        while True:
            begin = max(low, high - width)
            page = self._range(begin, high, limit=_FEW)
            if 0 < len(page) < _FEW:
                return self._decode(page[-1])
            if page:
                # The result starts at or after the last of these. If objects are about equally
                # long, the next range holds a few.
                first, low = self._start(page[0]), self._start(page[-1])
                width = min((low - first) * _FEW // (2 * (_FEW - 1)), (high - low + 1) // 2)
            elif begin > low:
                high = begin
                width = (high - low + 1) // 2 if low else width * _GROWTH
            elif low:
                # The object found before was merged meanwhile: start again.
                high, low, width = end, 0, self._length
            else:
                return None

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

    def _decode(self, found: KeyValue) -> ObjectDescriptor:
        described = decode_descriptor(found.value, key=found.key)
        self._length = max(1, described.end - described.start)
        return described

    def _start(self, found: KeyValue) -> int:
        try:
            return int(found.key.removeprefix(self.keys.objects))
        except ValueError:
            raise CorruptDataError("not the key of a descriptor", path=found.key) from None

    def _range(self, start: int, end: int | None, *, limit: int) -> list[KeyValue]:
        """The first descriptors that start in a range of offsets."""
        keys = self.keys
        began = self._clock.monotonic()
        found = self.store.range(
            keys.objects,
            start=keys.descriptor(start),
            end=keys.objects_end if end is None or end > _OFFSET_MAX else keys.descriptor(end),
            limit=limit,
        )
        self._metrics.observe(
            "cloud_reader.query_duration_seconds", self._clock.monotonic() - began
        )
        return found


def _record(found: KeyValue | None) -> tuple[TopicRecord, int] | None:
    return None if found is None else (decode_topic(found.value, key=found.key), found.revision)


def _owner(found: KeyValue | None) -> tuple[OwnerRecord, int] | None:
    return None if found is None else (decode_owner(found.value, key=found.key), found.revision)


def _seal(found: KeyValue | None) -> tuple[SealedState, int] | None:
    state = None if found is None else decode_sealed(found.value, key=found.key)
    return None if found is None or state is None else (state, found.revision)


def list_partitions(store: MetadataStore, root_prefix: str, name: TopicName) -> list[int]:
    """The numbers of a topic's partitions that have a record and exist, sorted."""
    topics = f"{root_prefix}/topics/"
    numbers: list[int] = []
    for found in store.range(f"{topics}{name.namespace}/{name.topic}{PARTITION_INFIX}"):
        partition = parse_partition("/" + found.key.removeprefix(topics))
        # The records of others begin like this one's: of partitions of a partition, for one.
        if partition is None or partition[0] != str(name):
            continue
        if decode_topic(found.value, key=found.key).is_open:
            numbers.append(partition[1])
    return sorted(numbers)
