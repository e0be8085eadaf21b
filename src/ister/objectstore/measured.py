"""Reads of an object store that are counted and timed as `cloud_reader` metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.format.crc import Buffer
from ister.objectstore.base import ObjectStore

_Bytes = TypeVar("_Bytes", bound=Buffer)


class MeasuredReads:
    """Reads ranges of objects, and records requests, bytes and latency. Thread-safe."""

    def __init__(self, store: ObjectStore, *, clock: Clock, metrics: Metrics) -> None:
        self._store = store
        self._clock = clock
        self._metrics = metrics

    def read(self, key: str, start: int, size: int, object_bytes: int) -> bytes:
        """Like `ObjectStore.read`, of an object of a known size."""
        return self._measure(self._store.read, key, start, size, object_bytes)

    def view(self, key: str, start: int, size: int, object_bytes: int) -> Buffer:
        """Like `ObjectStore.view`, of an object of a known size."""
        return self._measure(self._store.view, key, start, size, object_bytes)

    def _measure(
        self,
        fetch: Callable[[str, int, int], _Bytes],
        key: str,
        start: int,
        size: int,
        object_bytes: int,
    ) -> _Bytes:
        began = self._clock.monotonic()
        data = fetch(key, start, size)
        elapsed_ms = (self._clock.monotonic() - began) * 1000
        self._metrics.observe("cloud_reader.fetch_latency_ms", elapsed_ms)
        kind = "full" if 0 < object_bytes <= size else "ranged"
        self._metrics.count("cloud_reader.range_requests_total", part=kind)
        self._metrics.count("cloud_reader.bytes_read_total", len(data))
        return data
