"""Which objects of a topic have become too old or too many, and their removal.

Objects go from the oldest on, so that what is left has no hole, and the newest one always stays: it
shows where the topic ends. Descriptors go first, in a transaction of the owner's, then the objects;
a crash in between leaves objects without a descriptor, which garbage collection removes.

If metadata is lost, a topic that has only runs in express objects is found by its manifest. So the
manifest is saved before the last object of the topic itself is removed.

An object's age is the time since its newest message arrived; publish times, which producers set, do
not matter. An object of unknown age is kept, with all objects after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Final

from ister.base import failpoints
from ister.base.clock_guard import newest_arrivals
from ister.base.limits import MIB
from ister.base.metrics import Metrics
from ister.bucket.names import object_key
from ister.bucket.ownership import OwnedTopic
from ister.bucket.topic_manifest import has_manifest, manifest_of, save_manifest
from ister.bucket.writer_files import find_open_batch
from ister.errors import IsterError
from ister.format.descriptor import FORMAT_EXPRESS, ObjectDescriptor
from ister.objectstore.base import ObjectStore

_log = logging.getLogger("ister.bucket.retention")

_MINUTE_MS = 60_000
_WALKS_MAX: Final = 5


def plan_expiry(
    descriptors: Iterable[ObjectDescriptor],
    *,
    now_ms: int,
    time_minutes: int | None,
    size_mb: int | None,
    correct_ms: Callable[[int], int] = lambda time_ms: time_ms,
) -> list[ObjectDescriptor]:
    """The objects to remove, oldest first; never the newest one.

    `descriptors`: all of the topic's, ascending.
    `time_minutes`: objects older than this go; None keeps them.
    `size_mb`: the oldest go until no more than this is left; None keeps them.
    `correct_ms`: corrects times that were recorded while the clock was wrong.
    """
    if time_minutes is None and size_mb is None:
        return []
    everything = list(descriptors)
    excess = 0
    if size_mb is not None:
        excess = sum(d.size_bytes for d in everything) - size_mb * MIB
    arrived = newest_arrivals(
        [None if (ms := one.arrived_ms) is None else correct_ms(ms) for one in everything], now_ms
    )
    expired: list[ObjectDescriptor] = []
    for described, arrived_ms in zip(everything[:-1], arrived, strict=False):
        is_old = (
            time_minutes is not None
            and arrived_ms is not None
            and now_ms - arrived_ms > time_minutes * _MINUTE_MS
        )
        if not is_old and excess <= 0:
            break
        expired.append(described)
        excess -= described.size_bytes
    return expired


def list_known(owned: OwnedTopic) -> list[ObjectDescriptor] | None:
    """A topic's objects, ascending; None if they are merged faster than they are read.

    Without their indexes, because a topic may have very many, and without what was committed
    although the answer was lost: the newest one that is known stays.
    """
    for _ in range(_WALKS_MAX):
        known = owned.tiered
        found = [
            replace(described, offset_index=(), publish_time_index=())
            for described, _ in owned.catalog.descriptors()
            if described.end <= known
        ]
        # Objects that are merged under the walk may come as they were, and merged: their bytes
        # would count twice.
        if all(before.end <= after.start for before, after in pairwise(found)):
            return found
    return None


def expire(
    owned: OwnedTopic, store: ObjectStore, expired: list[ObjectDescriptor], *, metrics: Metrics
) -> int:
    """Removes objects from the topic, and then from the store.

    Objects that may have rows of an open batch stay (`find_open_batch`).

    Returns how many objects were removed; one that could not be is left to garbage collection.

    Raises:
        FencedError: Another process owns the topic; nothing was removed.
    """
    if not expired:
        return 0
    waits = find_open_batch(owned.catalog, owned.record.incarnation)
    if waits is not None and waits.counted_from < expired[-1].end:
        expired = [described for described in expired if described.end <= waits.counted_from]
        _log.info(
            "retention waits for an open batch",
            extra={"topic": owned.topic, "writer": waits.writer, "batch": waits.batch},
        )
        if not expired:
            return 0
    if any(described.format != FORMAT_EXPRESS for described in expired):
        keep_findable(owned, store)
    removed = 0
    for described in owned.expire(expired):
        try:
            store.delete(object_key(owned.catalog.keys.topic, described.object_id))
            removed += 1
        except IsterError as error:
            _log.warning(
                "cannot remove an expired object; will retry",
                extra={"topic": owned.topic, "object": described.object_id, "error": str(error)},
            )
        failpoints.reach("tier.after_delete_object")
    metrics.count("cloud.expired_objects", removed)
    _log.info("expired", extra={"topic": owned.topic, "objects": removed})
    return removed


def keep_findable(owned: OwnedTopic, store: ObjectStore) -> None:
    """Saves the manifest of a topic that may have runs of express objects alone, if it is missing.

    The process that made the topic may have been killed; or a deletion of the topic's predecessor,
    which was paused for long, has removed the manifest.
    """
    topic = owned.catalog.keys.topic
    if owned.last is None or owned.last.format != FORMAT_EXPRESS:
        return
    # Under the lock: a deletion, which removes the manifest, is marked before this or after.
    with owned.lock:
        if owned.record.is_open and not has_manifest(store, topic):
            save_manifest(store, topic, manifest_of(owned.record))
