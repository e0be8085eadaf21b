"""Metrics: declared once, used, readable, right."""

import re
import threading
from pathlib import Path

import pytest

import ister
from ister.base.metrics import BY_NAME, LEFT_OUT, METRICS, Histogram, Metrics, bounds_of
from ister.errors import InvariantError
from tests.support.machine import NAME, numbered

_SOURCE = Path(ister.__file__).resolve().parent


def test_every_metric_is_declared_once_and_described():
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    exposed = [metric.exposed for metric in METRICS]
    assert len(exposed) == len(set(exposed))
    assert not {name for name, _ in LEFT_OUT} & set(exposed)
    for metric in METRICS:
        if metric.scope == "log":
            assert re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", metric.name)
            assert len(metric.labels) == bool(metric.parts)
        else:
            assert re.fullmatch(r"(danube|ister|process)_[a-z_]+", metric.name)
        assert re.fullmatch(r"[a-z_]+", metric.exposed)
        assert metric.exposed.endswith("_total") == (metric.kind == "counter"), metric.exposed
        assert all(re.fullmatch(r"[a-z_]+", label) for label in metric.labels)
        assert metric.unit
        assert metric.description


def test_every_metric_is_used_by_the_code():
    text = "".join(path.read_text() for path in _SOURCE.rglob("*.py") if path.name != "metrics.py")
    unused = [metric.name for metric in METRICS if f'"{metric.name}"' not in text]
    assert not unused


def test_every_metric_is_readable_through_a_log(machine):
    log = machine.open(cache_capacity=4, rotate_max_bytes=4096)
    topic = log.topic(NAME, create=True)
    for payload in numbered(30, size=500):
        topic.wait(topic.append(payload))
    reader = topic.reader()
    reader.next_batch(max_messages=2)
    values = log.metrics.snapshot()
    declared = [metric for metric in METRICS if metric.scope == "log"]
    assert set(values) == {name for metric in declared for name in (metric.name, *metric.keys)}
    for metric in declared:
        is_summary = isinstance(values[metric.name], dict)
        assert is_summary == (metric.kind == "histogram"), metric.name
    assert values["wal.topics"] == 1
    assert values["wal.cache.size"] == 4
    assert values["wal.cache.evictions"] == 26
    assert values["wal.cache.bytes"] == topic.cache.size_bytes > 0
    assert values["wal.open_files"] == 1
    assert values["wal_reader.active_readers"] == 1
    held = values["wal_reader.memory_bytes"]
    assert held == values["wal_reader.memory_bytes.file_stream"] > 0
    assert values["wal_reader.memory_bytes.bucket"] == 0
    assert values["wal.file_bytes"] == values["wal.writer_flush_bytes"]
    assert values["wal.writer_rotate_events"] == len(topic.wal.files) - 1
    assert values["wal.writer_sync_latency_ms"]["count"] >= 30
    assert values["wal.writer_flush_bytes"] == sum(
        len(machine.read(topic.wal.directory.log_path(file.seq))) for file in topic.wal.files
    )


def test_unknown_metric_cannot_be_counted():
    metrics = Metrics()
    for use in (
        lambda: metrics.count("wal.unknown"),
        lambda: metrics.observe("wal.unknown", 1),
        lambda: metrics.register_gauge("wal.unknown", lambda: 1),
        lambda: metrics.count("wal.topics"),
        lambda: metrics.count("cloud_reader.range_requests_total"),
        lambda: metrics.count("cloud_reader.range_requests_total", part="other"),
    ):
        with pytest.raises(KeyError):
            use()
    with pytest.raises(InvariantError):
        metrics.register_gauge("wal.append_refused", lambda: 1)


def test_counts_from_many_threads_add_up():
    metrics = Metrics()

    def work():
        for _ in range(2000):
            metrics.count("wal.append_refused", 2)
            metrics.observe("wal.append_enq_latency_us", 1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = metrics.snapshot()
    assert values["wal.append_refused"] == 16_000
    assert values["wal.append_enq_latency_us"]["count"] == 8000


def test_derived_counter_is_computed_when_somebody_looks():
    metrics = Metrics()
    made = [3]
    metrics.register_counter("broker.messages_in_total", lambda: made[0])
    metrics.count("broker.messages_in_total", 2)
    assert metrics.snapshot()["broker.messages_in_total"] == 5
    made[0] = 10
    assert metrics.snapshot()["broker.messages_in_total"] == 12
    with pytest.raises(InvariantError):
        metrics.register_counter("wal.topics", lambda: 1)


def test_steps_of_a_histogram_go_by_its_unit():
    for metric in METRICS:
        if metric.kind == "histogram":
            bounds = bounds_of(metric.name)
            assert list(bounds) == sorted(set(bounds))
            assert 8 < len(bounds) < 30
    assert bounds_of("metadata.put_latency_seconds")[0] == 0.001
    assert BY_NAME["danube_topic_message_size_bytes"].unit == "bytes"
    assert bounds_of("danube_topic_message_size_bytes")[:3] == (16.0, 64.0, 256.0)


def test_histograms_are_added_and_copied():
    one, other = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 5.0):
        one.observe(value)
    other.observe(2.0)
    copied = one.copy()
    one.add(other)
    assert (one.counts, one.count, one.sum, one.max) == ([2, 1, 1], 4, 8.5, 5.0)
    assert (copied.counts, copied.count, copied.sum, copied.max) == ([2, 0, 1], 3, 6.5, 5.0)
    with pytest.raises(InvariantError):
        one.add(Histogram())


def test_histogram_bounds_its_quantiles():
    histogram = Histogram()
    assert histogram.summary() == {"count": 0, "mean": 0.0, "p50": 0.0, "p99": 0.0, "max": 0.0}
    for value in range(1, 101):
        histogram.observe(float(value))
    summary = histogram.summary()
    assert (summary["count"], summary["mean"], summary["max"]) == (100, 50.5, 100.0)
    assert summary["p50"] == 50.0
    assert 99.0 <= summary["p99"] <= 100.0
    histogram.observe(1e9)
    assert histogram.quantile(1.0) == 1e9
    assert sum(histogram.counts) == histogram.count == 101
