"""Checks for `gc` whether a topic may have anything to remove. Runs in a task.

Owns: nothing; it only reads. Mistakes do no harm: the driver examines a busy topic again
(`gc_job`), and what a task misses stays until the next `gc`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ister.base.model import TopicName
from ister.bucket.listing import list_objects
from ister.bucket.names import object_id_of, staging_prefix
from ister.bucket.orphans import JOB_PREFIX
from ister.bucket.retention import plan_expiry
from ister.format.records import decode_retired
from ister.objectstore.base import ObjectInfo
from ister.spark.location import LogLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class GcItem:
    """A topic to check. Pickled to a task."""

    topic: str
    now_ms: int
    """The driver's time; the clocks of executors have no effect."""
    grace_seconds: float | None
    """How long an object without a descriptor is kept; None if the clock is not trusted."""
    time_minutes: int | None
    size_mb: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GcResult:
    """The result of a check."""

    objects: int
    """Objects that descriptors name."""
    is_busy: bool
    """Whether there may be something to remove."""


def look_at_topic(place: LogLocation, item: GcItem) -> GcResult:
    """Checks whether a topic may have anything to remove.

    Raises:
        NotFoundError: It was deleted.
        CorruptDataError: Its metadata cannot be read.
        UnavailableError: A store does not respond.
    """
    history, name = place.history(), TopicName.parse(item.topic)
    catalog = history.topic(item.topic).catalog
    now = item.now_ms // 1000
    old: list[str] = []
    staged = False
    if item.grace_seconds is not None:
        oldest = item.now_ms / 1000 - item.grace_seconds
        # Listed before the catalog is read, so that it has objects that are committed meanwhile.
        old = [
            object_id_of(name, info.key)
            for info in list_objects(history.objects, name)
            if _is_old(info, oldest)
        ]
        staged = any(_is_old(info, oldest) for info in history.objects.list(staging_prefix(name)))
        staged |= bool(history.metadata.range(catalog.keys.writer(JOB_PREFIX), limit=1))
    described = [
        replace(one, offset_index=(), publish_time_index=()) for one, _ in catalog.descriptors()
    ]
    named = {one.object_id for one in described}
    expired = plan_expiry(
        described,
        now_ms=item.now_ms,
        time_minutes=item.time_minutes,
        size_mb=item.size_mb,
    )
    retired = item.grace_seconds is not None and any(
        decode_retired(found.value, key=found.key).until <= now
        for found in history.metadata.range(catalog.keys.retired(""))
    )
    is_busy = bool(expired) or staged or retired or not named.issuperset(old)
    return GcResult(objects=len(described), is_busy=is_busy)


def _is_old(info: ObjectInfo, oldest: float) -> bool:
    return info.modified_at is not None and info.modified_at < oldest
