"""The gauges of a log: sums over its open topics, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from ister.base.metrics import BY_NAME, Metrics
from ister.topic.node_clock import NodeClock
from ister.topic.room import SpaceGuards
from ister.topic.stores import Stores
from ister.topic.topic import Topic

_OF_TOPIC: Final[dict[str, Callable[[Topic], int]]] = {
    "wal.topics": lambda topic: 1,
    "wal.cache.size": lambda topic: len(topic.cache),
    "wal.cache.bytes": lambda topic: topic.cache.size_bytes,
    "wal.cache.evictions": lambda topic: topic.cache.evictions,
    "wal.open_files": lambda topic: int(topic.wal.committer.has_open_file),
    "wal.file_bytes": lambda topic: topic.wal.file_bytes,
    "uploader.lag_bytes": lambda topic: (
        topic.bucket.uploads.lag_bytes if topic.bucket is not None else 0
    ),
    "wal_reader.active_readers": lambda topic: len(topic.readers),
}


def register_gauges(
    metrics: Metrics,
    topics: Callable[[], list[Topic]],
    *,
    stores: Stores | None,
    room: SpaceGuards,
    node_clock: NodeClock,
) -> None:
    """Registers the gauges of a log; `topics` returns the open topics."""

    def total(of_topic: Callable[[Topic], int]) -> int:
        return sum(map(of_topic, topics()))

    def held_by_readers(at: int) -> int:
        return total(lambda topic: sum(reader.held_parts[at] for reader in topic.readers))

    def cache_hit_ratio() -> float:
        hits = metrics.counted("wal.reader.stitch_cache_items")
        reads = hits + metrics.counted("wal.reader.stitch_tier_items")
        return hits / reads if reads else 0.0

    def clock_step_seconds() -> int:
        step = node_clock.step
        return 0 if step is None else round(step.seconds)

    for name, of_topic in _OF_TOPIC.items():
        metrics.register_gauge(name, partial(total, of_topic))
    for at, part in enumerate(BY_NAME["wal_reader.memory_bytes"].parts):
        metrics.register_gauge("wal_reader.memory_bytes", partial(held_by_readers, at), part=part)
    metrics.register_gauge(
        "uploader.memory_usage_bytes", lambda: stores.upload_memory_bytes if stores else 0
    )
    metrics.register_gauge("upload.inflight_parts", lambda: stores.upload_parts if stores else 0)
    metrics.register_gauge("walcache.hit_ratio", cache_hit_ratio)
    metrics.register_gauge("clock.step_seconds", clock_step_seconds)
    if (disk := room.disk) is not None:
        metrics.register_gauge("disk.reserve_bytes", lambda: disk.reserve_bytes)
        metrics.register_gauge("disk.is_low", lambda: int(disk.is_low()))
    if (memory := room.memory) is not None:
        metrics.register_gauge("memory.used_bytes", lambda: memory.used_bytes)
        metrics.register_gauge("memory.limit_bytes", lambda: memory.limit_bytes)
        metrics.register_gauge("memory.is_full", lambda: int(memory.is_full))
