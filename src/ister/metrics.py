"""Every metric declared once: name, kind, unit, one sentence. Readable in-process.

`METRICS` is the list; a name that is not in it cannot be counted. Values are kept per open log
(not per topic: a process may have thousands of topics) and read with `Metrics.snapshot`. What has
to be cheap is not counted at all but derived when somebody looks (`register_gauge`).
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from ister.errors import check

__all__ = ["METRICS", "Histogram", "Metric", "Metrics"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A declaration."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    description: str


METRICS: Final[tuple[Metric, ...]] = (
    Metric("wal.append_enq_latency_us", "histogram", "µs", "append(), one call in 256 measured"),
    Metric("wal.append_refused", "counter", "calls", "appends refused: full, stalled or closed"),
    Metric("wal.writer_flush_latency_ms", "histogram", "ms", "one write to the active file"),
    Metric("wal.writer_flush_bytes", "counter", "bytes", "bytes handed to write(2)"),
    Metric("wal.writer_sync_latency_ms", "histogram", "ms", "one fdatasync of the active file"),
    Metric("wal.writer_rotate_events", "counter", "files", "files ended by size or age"),
    Metric("wal.rotate_errors", "counter", "files", "rotations put off because of an error"),
    Metric("wal.writer_failures", "counter", "topics", "writers stopped by a write or sync error"),
    Metric("wal.writer_stalls", "counter", "times", "a full disk met; goes on when room is back"),
    Metric("wal.checkpoint_saves", "counter", "files", "checkpoints replaced"),
    Metric("wal.checkpoint_errors", "counter", "files", "checkpoints that could not be replaced"),
    Metric("wal.index_save_errors", "counter", "files", "indexes not saved; rebuilt when needed"),
    Metric("wal.trimmed_files", "counter", "files", "local files removed by trim"),
    Metric("wal.recovery_cut_bytes", "counter", "bytes", "torn tails cut while opening topics"),
    Metric("wal.recovery_damage", "counter", "places", "damage found while opening topics"),
    Metric("wal.cache.size", "gauge", "messages", "messages in the caches of all open topics"),
    Metric("wal.cache.bytes", "gauge", "bytes", "bytes in the caches of all open topics"),
    Metric("wal.cache.evictions", "gauge", "messages", "messages that left a cache so far"),
    Metric("wal.open_files", "gauge", "files", "writer handles open now"),
    Metric("wal.topics", "gauge", "topics", "topics open now"),
    Metric("wal.reader.stitch_file_bytes", "counter", "bytes", "bytes read from WAL files"),
    Metric("wal.reader.stitch_cache_items", "counter", "messages", "messages read from a cache"),
    Metric("wal_reader.memory_bytes", "gauge", "bytes", "file chunks held by readers now"),
    Metric("wal_reader.chunk_read_latency_ms", "histogram", "ms", "one chunk read from a file"),
    Metric("wal_reader.frames_parsed_total", "counter", "frames", "frames parsed from WAL files"),
    Metric("wal_reader.crc_errors_total", "counter", "frames", "bad frames met by readers"),
    Metric("wal_reader.rotated_files_accessed", "counter", "files", "rotated files opened to read"),
    Metric("wal_reader.active_readers", "gauge", "readers", "readers open now"),
    Metric("uploader.cycle_duration_seconds", "histogram", "s", "one upload cycle of one topic"),
    Metric("uploader.bytes_uploaded_total", "counter", "bytes", "bytes of committed objects"),
    Metric("uploader.objects_created_total", "counter", "objects", "objects committed"),
    Metric("uploader.objects_repaired_total", "counter", "objects", "bad objects uploaded again"),
    Metric("uploader.errors_total", "counter", "cycles", "upload cycles that failed"),
    Metric("uploader.stream_chunk_bytes", "histogram", "bytes", "one piece handed to the store"),
    Metric("uploader.memory_usage_bytes", "gauge", "bytes", "what uploads under way may hold"),
    Metric("uploader.lag_bytes", "gauge", "bytes", "synced and not in the bucket, about"),
    Metric("cloud_reader.query_duration_seconds", "histogram", "s", "one look-up of descriptors"),
    Metric("cloud_reader.range_requests_total", "counter", "requests", "reads from objects"),
    Metric("cloud_reader.bytes_read_total", "counter", "bytes", "bytes fetched from objects"),
    Metric("cloud_reader.bytes_used", "counter", "bytes", "of these, bytes of frames wanted"),
    Metric("cloud_reader.fetch_latency_ms", "histogram", "ms", "one read from an object"),
    Metric("cloud_reader.objects_opened_total", "counter", "objects", "objects begun to be read"),
    Metric("cloud_reader.errors_total", "counter", "objects", "lost or damaged objects met"),
    Metric("reader.history_entered_total", "counter", "times", "readers that went to the bucket"),
    Metric("reader.handoffs_total", "counter", "times", "readers that came back to local files"),
    Metric("metadata.put_latency_seconds", "histogram", "s", "one commit of a descriptor"),
    Metric("metadata.descriptor_write_total", "counter", "commits", "descriptors committed"),
    Metric("cloud.expired_objects", "counter", "objects", "objects removed by bucket retention"),
    Metric("cloud.orphans_removed", "counter", "objects", "unreferenced objects removed"),
    Metric("retention.errors_total", "counter", "times", "retention runs that failed"),
    Metric("broker.topics", "gauge", "topics", "topics that this broker serves now"),
    Metric("broker.consumers", "gauge", "consumers", "consumers with an open stream"),
    Metric("broker.messages_in_total", "counter", "messages", "messages sent over gRPC"),
    Metric("broker.bytes_in_total", "counter", "bytes", "payloads of these"),
    Metric("broker.schema_misfits", "gauge", "messages", "messages that did not fit their schema"),
    Metric("subscription.nacks_total", "counter", "messages", "messages that consumers gave back"),
    Metric("subscription.redeliveries_total", "counter", "messages", "messages sent again"),
    Metric("subscription.dropped_total", "counter", "messages", "messages that failed too often"),
    Metric("subscription.dead_letters_total", "counter", "messages", "messages dead-lettered"),
    Metric(
        "subscription.messages_passed_over_total",
        "counter",
        "messages",
        "messages that retention took before a subscription saw them",
    ),
    Metric(
        "subscription.non_reliable_dropped_total",
        "counter",
        "messages",
        "messages of non-reliable topics that a consumer had no room for",
    ),
)

_BY_NAME: Final = {metric.name: metric for metric in METRICS}
check(len(_BY_NAME) == len(METRICS), "a metric is declared once")

# 1-2-5 steps: wide enough for microseconds and for seconds in milliseconds.
_BOUNDS: Final = tuple(
    step * 10.0**exponent for exponent in range(-3, 6) for step in (1.0, 2.0, 5.0)
)


class Histogram:
    """Counts of values by size, in 1-2-5 steps."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS) + 1)
        self.count = 0
        self.sum = 0.0
        self.max = 0.0

    def observe(self, value: float) -> None:
        """Adds one value."""
        self.counts[bisect_left(_BOUNDS, value)] += 1
        self.count += 1
        self.sum += value
        self.max = max(self.max, value)

    def quantile(self, q: float) -> float:
        """An upper bound of the q-quantile, as fine as the steps; 0 without values."""
        rank = q * self.count
        seen = 0
        for bound, count in zip(_BOUNDS, self.counts, strict=False):
            seen += count
            if count and seen >= rank:
                return min(bound, self.max)
        return self.max

    def summary(self) -> dict[str, float]:
        """Count, mean, maximum and two quantiles."""
        return {
            "count": self.count,
            "mean": self.sum / self.count if self.count else 0.0,
            "p50": self.quantile(0.5),
            "p99": self.quantile(0.99),
            "max": self.max,
        }


class Metrics:
    """The values of one open log. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = {m.name: 0 for m in METRICS if m.kind == "counter"}
        self._histograms = {m.name: Histogram() for m in METRICS if m.kind == "histogram"}
        # One that nobody computes is that of a part which this process does not have.
        self._gauges: dict[str, Callable[[], int]] = {
            m.name: lambda: 0 for m in METRICS if m.kind == "gauge"
        }

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to a counter."""
        with self._lock:
            self._counters[name] += amount

    def observe(self, name: str, value: float) -> None:
        """Adds a value to a histogram."""
        with self._lock:
            self._histograms[name].observe(value)

    def register_gauge(self, name: str, read: Callable[[], int]) -> None:
        """Has a gauge computed by `read` whenever somebody looks."""
        check(_BY_NAME[name].kind == "gauge", f"{name} is a gauge")
        self._gauges[name] = read

    def snapshot(self) -> dict[str, int | dict[str, float]]:
        """All values by name: numbers, and summaries for histograms."""
        gauges = {name: read() for name, read in self._gauges.items()}
        with self._lock:
            return {
                **self._counters,
                **gauges,
                **{name: histogram.summary() for name, histogram in self._histograms.items()},
            }
