"""Reads of an object store that are counted and timed as `cloud_reader` metrics."""

from __future__ import annotations

from ister.clock import Clock
from ister.metrics import Metrics
from ister.objectstore.base import ObjectStore


class MeasuredReads:
    """Reads ranges of objects, and records requests, bytes and latency. Thread-safe."""

    def __init__(self, store: ObjectStore, *, clock: Clock, metrics: Metrics) -> None:
        self._store = store
        self._clock = clock
        self._metrics = metrics

    def read(self, key: str, start: int, size: int) -> bytes:
        """Like `ObjectStore.read`."""
        began = self._clock.monotonic()
        data = self._store.read(key, start, size)
        elapsed_ms = (self._clock.monotonic() - began) * 1000
        self._metrics.observe("cloud_reader.fetch_latency_ms", elapsed_ms)
        self._metrics.count("cloud_reader.range_requests_total")
        self._metrics.count("cloud_reader.bytes_read_total", len(data))
        return data
