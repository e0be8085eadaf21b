"""Garbage in the bucket: objects that crashes, fenced owners and failed deletions left behind.

A listing says what there is, the catalog says what belongs to the topic, and what is left after a
grace period goes. The catalog is asked again for each object right before it is removed, and never
about objects of a later epoch than the caller's: a successor's object may be waiting for its
commit. An object whose age the store does not tell is kept.

One owner does this for its topic. Parts of uploads that never completed are invisible to a listing;
on S3 a lifecycle rule has to abort them.
"""

from __future__ import annotations

import logging

from ister.clock import Clock
from ister.metrics import Metrics
from ister.objectstore.base import ObjectInfo, ObjectStore
from ister.tier.names import (
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
) -> list[str]:
    """Removes objects of the topic that no descriptor names.

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
    removed: list[str] = []
    for info in list(store.list(prefix)):
        object_id = info.key.removeprefix(prefix)
        if object_id in under_way or not _is_past(info, oldest):
            continue
        if _is_garbage(owned, object_id):
            owned.check()
            store.delete(info.key)
            removed.append(object_id)
    if removed:
        metrics.count("cloud.orphans_removed", len(removed))
        _log.info("orphans removed", extra={"topic": owned.topic, "objects": removed})
    return removed


def _is_past(info: ObjectInfo, oldest: float) -> bool:
    return info.modified_at is not None and info.modified_at < oldest


def _is_garbage(owned: OwnedTopic, object_id: str) -> bool:
    name = parse_object_id(object_id)
    if name is None:
        # A pending object's upload is over, or it would be the one under way.
        pending = parse_pending_epoch(object_id)
        return pending is not None and pending <= owned.epoch
    if name.epoch > owned.epoch:
        return False
    described = owned.catalog.find(name.start)
    return described is None or described.object_id != object_id
