"""Garbage in the bucket: objects that crashes, fenced owners and failed deletions left behind.

A listing says what there is, the catalog says what belongs to the topic, and what is left after a
grace period goes. The catalog is asked again for each object right before it is removed, and never
about objects of a later epoch than the caller's: a successor's object may be waiting for its
commit. An object whose age the store does not tell is kept, and one that a merged object has taken
the place of, until the time that the merge has set: readers may be at it. An object in a hole of
the catalog stays as well: somebody may want to put its descriptor back.

One owner does this for its topic. Parts of uploads that never completed are invisible to a listing:
`ister.objectstore` aborts them, or a lifecycle rule of the bucket does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ister.clock import Clock
from ister.errors import NotFoundError
from ister.format.records import decode_retired
from ister.metadata.base import Delete, RevisionIs
from ister.metrics import Metrics
from ister.objectstore.base import ObjectInfo, ObjectStore
from ister.tier.names import (
    ObjectName,
    format_pending_id,
    objects_prefix,
    parse_object_id,
    parse_pending_epoch,
)
from ister.tier.ownership import OwnedTopic

__all__ = ["collect_orphans"]

_log = logging.getLogger("ister.tier.orphans")


def collect_orphans(
    owned: OwnedTopic,
    store: ObjectStore,
    *,
    grace_seconds: float,
    clock: Clock,
    metrics: Metrics,
    has_jobs: Callable[[], bool] = lambda: False,
    correct_ms: Callable[[int], int] = lambda time_ms: time_ms,
) -> list[str]:
    """Removes objects of the topic that no descriptor names.

    Args:
        owned: The topic.
        store: Where its objects are.
        grace_seconds: How long an object is kept that nobody names.
        clock: Where time comes from.
        metrics: What was removed is counted there.
        has_jobs: Whether somebody may be making objects in this owner's name: what lies at or
            behind the topic's end is left alone then.
        correct_ms: Corrects times that were recorded while the clock was wrong.

    Returns:
        Their names.

    Raises:
        UnavailableError: A store does not answer; what was not looked at stays.
        FencedError: Somebody else owns the topic.
    """
    prefix = objects_prefix(owned.catalog.keys.topic)
    oldest = clock.now_ns() / 1e9 - grace_seconds
    session = owned.session()
    under_way = (
        (session.object_id, format_pending_id(session.start, session.epoch))
        if session is not None
        else ()
    )
    now = clock.now_ns() // 1_000_000_000
    _forget_retired(owned, now)
    removed: list[str] = []
    for info in list(store.list(prefix)):
        object_id = info.key.removeprefix(prefix)
        if object_id in under_way or not _is_past(info, oldest, correct_ms):
            continue
        # In this order: a merge between the two questions shows in the second one.
        if (
            _is_garbage(owned, object_id)
            and object_id not in _retired(owned, now)
            and not (_is_ahead(owned, object_id) and has_jobs())
            and _is_still_past(store, info.key, oldest, correct_ms)
        ):
            owned.check()
            store.delete(info.key)
            removed.append(object_id)
    if removed:
        metrics.count("cloud.orphans_removed", len(removed))
        _log.info("orphans removed", extra={"topic": owned.topic, "objects": removed})
    return removed


def _retired(owned: OwnedTopic, now: int) -> set[str]:
    """What was replaced and is still kept."""
    kept: set[str] = set()
    for found in owned.catalog.store.range(owned.catalog.keys.retired("")):
        retired = decode_retired(found.value, key=found.key)
        if retired.until > now:
            kept.update(retired.objects)
    return kept


def _forget_retired(owned: OwnedTopic, now: int) -> None:
    """Ends the records of what is not kept any more.

    A crash between the end of a record and that of its objects leaves objects that nobody names.
    """
    for found in owned.catalog.store.range(owned.catalog.keys.retired("")):
        if decode_retired(found.value, key=found.key).until <= now:
            owned.transact([RevisionIs(found.key, found.revision)], [Delete(found.key)])


def _is_past(info: ObjectInfo, oldest: float, correct_ms: Callable[[int], int]) -> bool:
    return info.modified_at is not None and correct_ms(int(info.modified_at * 1000)) < oldest * 1000


def _is_ahead(owned: OwnedTopic, object_id: str) -> bool:
    """Whether an object could be the next one that a job commits."""
    name = parse_object_id(object_id)
    return name is None or name.start >= owned.tiered


def _is_still_past(
    store: ObjectStore, key: str, oldest: float, correct_ms: Callable[[int], int]
) -> bool:
    """Whether an object is as old as the listing said: a job may have made it again meanwhile."""
    try:
        return _is_past(store.stat(key), oldest, correct_ms)
    except NotFoundError:
        return False


def _is_garbage(owned: OwnedTopic, object_id: str) -> bool:
    name = parse_object_id(object_id)
    if name is None:
        # A pending object's upload is over, or it would be the one under way.
        pending = parse_pending_epoch(object_id)
        return pending is not None and pending <= owned.epoch
    if name.epoch > owned.epoch:
        return False
    described = owned.catalog.find(name.start)
    if described is not None and described.object_id == object_id:
        return False
    if name.tag is not None and not _is_covered(owned, name):
        # A merged object with more than the catalog has: the catalog is older than it.
        return False
    is_held = described is not None and name.start < described.end
    # Offsets in the midst of the topic that no descriptor has: one was lost, and this may be the
    # object that it named.
    return is_held or not owned.record.expired_before <= name.start < owned.tiered


def _is_covered(owned: OwnedTopic, name: ObjectName) -> bool:
    """Whether the catalog has all offsets of an object, or they have expired."""
    at = max(name.start, owned.record.expired_before)
    for described, _ in owned.catalog.descriptors(at, name.end):
        if described.start > at:
            return False
        at = max(at, described.end)
    return at >= name.end
