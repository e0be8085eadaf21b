"""`/metrics`: everything that is counted, in Prometheus' text form (version 0.0.4).

Owns: names, labels, escaping, how many series there may be. Does not own: what is counted
(`ister.broker.counters`, `ister.base.metrics`), how the broker is (`observe.health`).

    on the loop    a part of the topics at a time: numbers are copied
    in a thread    topics with their own series, figures of the log and the process, the text

Nothing here asks a store: what stores say is remembered by `observe.probe`.

How many series there are is bounded. `TOPICS_MAX` topics have their own: those that are not well
first, then those with the most messages coming or waiting. All others share the topic `_other`,
where counters and lags are added up; a topic that goes there, or comes from there, does so with
what is counted from then on, so that no counter ever goes down. Sizes and latencies are told of
topics with their own series alone. Likewise `SUBSCRIPTIONS_MAX` subscriptions have their own. Who
has its own is chosen again once a minute.
"""

from __future__ import annotations

import asyncio
import math
import os
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import ister
from ister.base import threads
from ister.base.clock import Clock
from ister.base.metrics import BY_NAME, METRICS, Histogram, Metric
from ister.base.model import TopicState
from ister.broker.counters import Calls
from ister.broker.dispatch.dispatcher import Dispatcher
from ister.broker.observe.health import STATES, BrokerHealth, state_of
from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.security.guard import Guard
from ister.broker.topics.served_topic import ServedTopic
from ister.config import Config, Engine, MetadataBackend
from ister.topic.log import Log

TOPICS_MAX: Final = 1000
"""Topics with series of their own."""
SUBSCRIPTIONS_MAX: Final = 5000
"""Subscriptions with series of their own."""
OTHER: Final = "_other"
"""The topic, or the subscription, of all others."""

_CHOOSE_SECONDS: Final = 60.0
# A topic that has its own series keeps them unless another one has so many times its messages.
_STICKY: Final = 2.0
_TOPICS_AT_ONCE: Final = 50
# Gauges that are not added up: the worst one counts.
_WORST: Final = frozenset({"ister_upload_lag_seconds", "ister_upload_failures"})

# What Danube calls figures of the log: the name in `METRICS`, and what to divide it by.
_ALIASES: Final[Mapping[str, tuple[str, float]]] = {
    "danube_wal_append_latency_seconds": ("wal.append_enq_latency_us", 1e6),
    "danube_wal_fsync_latency_seconds": ("wal.writer_sync_latency_ms", 1e3),
    "danube_wal_flush_latency_ms": ("wal.writer_flush_latency_ms", 1),
    "danube_uploader_cycle_duration_seconds": ("uploader.cycle_duration_seconds", 1),
    "danube_cloud_reader_query_duration_seconds": ("cloud_reader.query_duration_seconds", 1),
    "danube_wal_bytes_written_total": ("wal.writer_flush_bytes", 1),
    "danube_wal_rotation_total": ("wal.writer_rotate_events", 1),
    "danube_wal_delete_total": ("wal.trimmed_files", 1),
    "danube_uploader_bytes_uploaded_total": ("uploader.bytes_uploaded_total", 1),
    "danube_uploader_objects_created_total": ("uploader.objects_created_total", 1),
    "danube_uploader_errors_total": ("uploader.errors_total", 1),
    "danube_cloud_reader_bytes_read_total": ("cloud_reader.bytes_read_total", 1),
    "danube_handoff_durable_history_to_hot_total": ("reader.handoffs_total", 1),
    "danube_wal_cache_size": ("wal.cache.size", 1),
}
_ETCD_ALIASES: Final[Mapping[str, tuple[str, float]]] = {
    "danube_etcd_put_latency_seconds": ("metadata.put_latency_seconds", 1),
    "danube_etcd_descriptor_write_total": ("metadata.descriptor_write_total", 1),
}
# Figures of the log with fixed labels; `provider` is the bucket's kind.
_LABELLED: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("danube_wal_file_rotate_total", "wal.rotated_by_size", ("size",)),
    ("danube_wal_file_rotate_total", "wal.rotated_by_time", ("time",)),
    ("danube_wal_file_rotate_total", "wal.rotated_by_request", ("request",)),
    ("danube_wal_reader_create_total", "reader.opened_hot_total", ("wal_only",)),
    (
        "danube_wal_reader_create_total",
        "reader.opened_history_total",
        ("durable_history_then_hot",),
    ),
    ("danube_cloud_upload_objects_total", "uploader.objects_created_total", ("provider", "ok")),
    ("danube_cloud_upload_objects_total", "uploader.errors_total", ("provider", "error")),
    ("danube_cloud_upload_bytes_total", "uploader.bytes_uploaded_total", ("provider",)),
    ("danube_cloud_upload_latency_ms", "uploader.object_latency_ms", ("provider",)),
    (
        "danube_durable_history_segments_read_total",
        "cloud_reader.objects_opened_total",
        ("provider",),
    ),
    ("danube_durable_history_read_bytes_total", "cloud_reader.bytes_read_total", ("provider",)),
    (
        "danube_durable_history_reader_errors_total",
        "cloud_reader.errors_total",
        ("provider", "lost_or_damaged"),
    ),
)

Labels = tuple[str, ...]
Value = int | float | Histogram
_Key = tuple[str, Labels]


@dataclass(slots=True)
class Family:
    """All series of one metric: values by their labels."""

    name: str
    series: dict[Labels, Value] = field(default_factory=dict)


class _Families:
    """Families of series, by the metric's name."""

    def __init__(self) -> None:
        self.by_name: dict[str, Family] = {}

    def set(self, name: str, value: Value, labels: Labels = ()) -> None:
        family = self.by_name.get(name)
        if family is None:
            family = self.by_name[name] = Family(name)
        family.series[labels] = value


@dataclass(slots=True)
class _Sample:
    """One topic: its numbers, with all labels but the topic."""

    name: str
    counters: dict[_Key, int]
    gauges: dict[_Key, float]
    histograms: dict[_Key, Histogram]
    weight: float
    state: str
    is_well: bool


class PrometheusMetrics:
    """Writes `/metrics`. Used on the broker's loop."""

    def __init__(
        self,
        config: Config,
        log: Log,
        health: BrokerHealth,
        *,
        guard: Guard,
        schemas: SchemaRegistry,
        calls: Calls,
        clock: Clock,
        topics_max: int = TOPICS_MAX,
        subscriptions_max: int = SUBSCRIPTIONS_MAX,
    ) -> None:
        """Reports these objects.

        At most `topics_max` topics and `subscriptions_max` subscriptions have series of their own.
        """
        self._config = config
        self._log = log
        self._health = health
        self._guard = guard
        self._schemas = schemas
        self._calls = calls
        self._clock = clock
        self._topics_max = topics_max
        self._subscriptions_max = subscriptions_max
        self._began_ns = clock.now_ns()
        self._chosen: set[str] | None = None
        self._chosen_at = -float("inf")
        # While not every topic has its own: what each had counted, and what `_other` has.
        self._last: dict[str, dict[_Key, int]] = {}
        self._other: dict[_Key, int] = {}
        self._lock = asyncio.Lock()

    async def text(self) -> str:
        """Returns the current values of all metrics."""
        async with self._lock:
            families = _Families()
            samples = await self._sample()
            self._write_calls(families)
            self._write_broker(families)
            return await asyncio.to_thread(self._finish, families, samples)

    def _finish(self, families: _Families, samples: list[_Sample]) -> str:
        """Adds the slow part; runs in a thread, one at a time."""
        self._write_topics(families, samples)
        self._write_log(families)
        self._write_process(families)
        return format_families(families.by_name.values())

    # -- topics -----------------------------------------------------------------------------

    async def _sample(self) -> list[_Sample]:
        topics = self._health.topics
        found = []
        for at, topic in enumerate(topics.served if topics is not None else []):
            if at % _TOPICS_AT_ONCE == _TOPICS_AT_ONCE - 1:
                await asyncio.sleep(0)
            found.append(self._sample_topic(topic, asyncio.get_running_loop().time()))
        return found

    def _sample_topic(self, topic: ServedTopic, now: float) -> _Sample:
        counted = topic.counters
        counters: dict[_Key, int] = {
            ("danube_topic_messages_in_total", ()): counted.messages_in,
            ("danube_topic_bytes_in_total", ()): counted.bytes_in,
            ("danube_producer_send_total", ("ok", "")): counted.sends,
        }
        for status, count in counted.refused.items():
            counters["danube_producer_send_total", ("error", status)] = count
        subscriptions = list(topic.subscriptions.values())
        gauges: dict[_Key, float] = {
            ("danube_topic_active_producers", ()): topic.count_producers(now),
            ("danube_topic_active_consumers", ()): sum(len(one.attached) for one in subscriptions),
            ("danube_topic_active_subscriptions", ()): len(subscriptions),
        }
        weight = 0.0
        core, is_well = topic.topic, True
        if core is not None:
            bucket = core.bucket
            counters["danube_wal_append_total", ()] = core.appended
            counters["danube_wal_append_bytes_total", ()] = core.appended_bytes
            is_well = core.state is TopicState.OPEN
            if bucket is not None:
                waiting = max(0, core.synced - core.tiered)
                gauges["ister_upload_lag_messages", ()] = waiting
                gauges["ister_upload_lag_bytes", ()] = bucket.uploads.lag_bytes
                gauges["ister_upload_lag_seconds", ()] = self._health.probe.lag_seconds(topic)
                gauges["ister_upload_failures", ()] = bucket.uploads.failures
                is_well = is_well and not bucket.uploads.failures
                weight += waiting
        for one in subscriptions:
            labels = (one.name,)
            own = one.counters
            counters["danube_consumer_messages_out_total", labels] = own.messages_out
            counters["danube_consumer_bytes_out_total", labels] = own.bytes_out
            counters["ister_subscription_lost_total", labels] = own.dropped + own.passed_over
            gauges["danube_subscription_active_consumers", labels] = len(one.attached)
            if isinstance(one, Dispatcher):
                delivery = one.delivery
                stats = delivery.stats()
                counters["danube_subscription_nack_total", labels] = own.nacks
                counters["ister_subscription_ack_refused_total", labels] = own.acks_refused
                counters["danube_subscription_redelivery_total", labels] = own.redeliveries
                counters["danube_subscription_ack_timeout_total", labels] = delivery.timeouts
                counters["danube_subscription_retry_exhausted_total", labels] = delivery.exhausted
                counters["danube_subscription_dlq_total", labels] = own.dead_letters
                gauges["danube_subscription_lag_messages", labels] = one.lag
                gauges["danube_subscription_pending_redelivery", labels] = stats.waiting_retry
                gauges["danube_subscription_terminal_blocked", labels] = int(
                    stats.blocked is not None
                )
                gauges["ister_subscription_in_flight_messages", labels] = stats.in_flight
                held = one.prefetcher.held_bytes + one.prefetcher.kept_bytes
                gauges["ister_subscription_held_bytes", labels] = held
                is_well = is_well and stats.blocked is None
                weight += one.lag
        histograms: dict[_Key, Histogram] = {}
        # Most topics of many are idle, and these are most of the series.
        if counted.messages_in:
            histograms["danube_topic_message_size_bytes", ()] = counted.sizes
        if counted.sends:
            histograms["danube_producer_send_latency_ms", ()] = counted.send_latency.copy()
        return _Sample(topic.name, counters, gauges, histograms, weight, state_of(topic), is_well)

    def _write_topics(self, families: _Families, samples: list[_Sample]) -> None:
        chosen = self._choose(samples)
        others = [one for one in samples if chosen is not None and one.name not in chosen]
        own = [one for one in samples if chosen is None or one.name in chosen]
        room = self._subscriptions_max
        for one in own:
            names = [labels[0] for name, labels in one.gauges if name == _CONSUMERS]
            shown = set(names[: max(0, room)])
            room -= len(names)
            for (name, labels), value in (*one.counters.items(), *one.gauges.items()):
                if labels and _is_of_subscription(name) and labels[0] not in shown:
                    _add(families, name, value, (one.name, OTHER))
                else:
                    families.set(name, value, (one.name, *labels))
            for (name, labels), histogram in one.histograms.items():
                families.set(name, histogram, (one.name, *labels))
        for (name, labels), value in self._other.items() if chosen is not None else ():
            families.set(name, value, (OTHER, *labels))
        for one in others:
            for (name, labels), value in one.gauges.items():
                _add(families, name, value, (OTHER, *_summed(name, labels)))
        families.set("ister_topics_summed", len(others))
        for one in own:
            families.set("ister_topic_state", 1, (one.name, one.state))
        states = {state.value: 0 for state in TopicState}
        for one in samples:
            states[one.state] += 1
        for state, count in states.items():
            families.set("ister_topics", count, (state,))
        families.set("danube_broker_topics_owned", len(samples))

    def _choose(self, samples: list[_Sample]) -> set[str] | None:
        """The topics with series of their own; None if all have."""
        if len(samples) <= self._topics_max:
            self._chosen, self._last, self._other = None, {}, {}
            self._chosen_at = -float("inf")
            return None
        now, before = self._clock.monotonic(), self._chosen or set()
        if self._chosen is None or now - self._chosen_at >= _CHOOSE_SECONDS:
            self._chosen_at = now

            def weigh(one: _Sample) -> tuple[bool, float, str]:
                key = ("danube_topic_messages_in_total", ())
                gained = one.counters[key] - self._last.get(one.name, {}).get(key, 0)
                weight = (one.weight + max(0, gained)) * (_STICKY if one.name in before else 1.0)
                return (one.is_well, -weight, one.name)

            self._chosen = {one.name for one in sorted(samples, key=weigh)[: self._topics_max]}
        else:
            # The room of topics that are gone stays free until the next choice.
            self._chosen = before & {one.name for one in samples}
        chosen = self._chosen
        for one in samples:
            if one.name not in chosen:
                self._count_other(one)
        self._last = {one.name: one.counters for one in samples}
        return chosen

    def _count_other(self, one: _Sample) -> None:
        """Adds what a topic has counted since its last sample."""
        last = self._last.get(one.name, {})
        for key, value in one.counters.items():
            gained = value - last.get(key, 0)
            summed = (key[0], _summed(*key))
            # It counts from 0 again where it was closed and opened meanwhile.
            self._other[summed] = self._other.get(summed, 0) + (gained if gained >= 0 else value)

    # -- the broker -------------------------------------------------------------------------

    def _write_calls(self, families: _Families) -> None:
        for (service, method), counted in self._calls.by_method.items():
            if counted.answered:
                families.set("danube_broker_rpc_total", counted.answered, (service, method, "OK"))
            for status, count in counted.refused.items():
                families.set("danube_broker_rpc_total", count, (service, method, status))
            if counted.latency.count:
                latency = counted.latency.copy()
                families.set("ister_rpc_latency_seconds", latency, (service, method))
        topics = self._health.topics
        for namespace, count in topics.redirects.items() if topics is not None else ():
            families.set("danube_client_redirects_total", count, ("not_local", namespace))
        guard = self._guard
        families.set("danube_authz_allow_total", guard.allowed_calls)
        families.set("danube_authz_deny_total", guard.refused_calls)
        families.set("ister_auth_refused_total", guard.refused_logins)
        self._write_schemas(families)

    def _write_schemas(self, families: _Families) -> None:
        for at, (topic, counts) in enumerate(sorted(self._schemas.checked().items())):
            name = topic if at < self._topics_max else OTHER
            total = sum(counts.values())
            _add(families, "danube_schema_validation_total", total, (name,))
            for reason, count in counts.items():
                if reason != "ok":
                    labels = (name, reason)
                    _add(families, "danube_schema_validation_failures_total", count, labels)

    def _write_broker(self, families: _Families) -> None:
        health, probe = self._health, self._health.probe
        families.set("ister_build_info", 1, (ister.__version__, platform.python_version()))
        families.set("ister_broker_ready", int(health.is_ready))
        for check in health.checks(names=False):
            families.set("ister_health_state", STATES.index(check.state), (check.name,))
        for failure in threads.failures():
            families.set("ister_thread_failures_total", failure.count, (failure.thread,))
        families.set("ister_metadata_up", int(probe.metadata_answers))
        if probe.disk is not None:
            families.set("ister_disk_free_bytes", probe.disk.free_bytes)
            families.set("ister_disk_size_bytes", probe.disk.total_bytes)
        if health.tls is not None:
            expires_at = health.tls.material().value.expires_at
            families.set("ister_certificate_expiry_timestamp_seconds", expires_at)
        stores = self._log.stores
        if stores is None:
            return
        left = stores.membership.valid_until - self._clock.boottime()
        families.set("ister_lease_valid", int(stores.membership.is_valid))
        families.set("ister_lease_seconds", round(max(0.0, left), 3))
        is_wanted = self._config.storage.uploader.engine is Engine.SPARK
        families.set("ister_pipeline_wanted", int(is_wanted))
        families.set("ister_pipeline_running", int(probe.pipeline_is_running))
        for job, report in sorted(probe.reports.items()):
            for name, key in (
                ("ister_job_last_start_timestamp_seconds", "started_at"),
                ("ister_job_last_duration_seconds", "seconds"),
            ):
                value = report.get(key)
                if isinstance(value, int | float):
                    families.set(name, value, (job,))
            families.set("ister_job_last_ok", int(report.get("ok") is True), (job,))

    # -- in a thread ------------------------------------------------------------------------

    def _write_log(self, families: _Families) -> None:
        numbers, histograms = self._log.metrics.values()
        values: dict[str, Value] = {**numbers, **histograms}
        for metric in METRICS:
            if metric.scope == "log":
                labels: list[Labels] = [(part,) for part in metric.parts] or [()]
                for key, its in zip(metric.keys, labels, strict=True):
                    families.set(metric.name, values[key], its)
        is_etcd = self._config.storage.metadata.backend is MetadataBackend.ETCD
        aliases = {**_ALIASES, **_ETCD_ALIASES} if is_etcd else _ALIASES
        for name, (source, divisor) in aliases.items():
            families.set(name, _divided(values[source], divisor))
        families.set("danube_wal_flush_total", histograms["wal.writer_flush_latency_ms"].count)
        backend = self._config.storage.cloud.backend.value
        provider = backend if self._log.stores is not None else "none"
        for name, source, fixed in _LABELLED:
            told = tuple(provider if label == "provider" else label for label in fixed)
            families.set(name, values[source], told)

    def _write_process(self, families: _Families) -> None:
        times = os.times()
        families.set("process_cpu_seconds_total", round(times.user + times.system, 2))
        families.set("process_open_fds", self._health.probe.open_files)
        if self._health.probe.files_max:
            families.set("process_max_fds", self._health.probe.files_max)
        with suppress(OSError, ValueError, IndexError):
            page = os.sysconf("SC_PAGE_SIZE")
            with open("/proc/self/statm", encoding="ascii") as file:
                families.set("process_resident_memory_bytes", int(file.read().split()[1]) * page)
        families.set("process_start_time_seconds", _started_at() or self._began_ns / 1e9)


_CONSUMERS: Final = "danube_subscription_active_consumers"


def _is_of_subscription(name: str) -> bool:
    return "subscription" in BY_NAME[name].labels


def _summed(name: str, labels: Labels) -> Labels:
    """The labels of a series to which many are added."""
    return (OTHER,) if labels and _is_of_subscription(name) else labels


def _add(families: _Families, name: str, value: float, labels: Labels) -> None:
    family = families.by_name.get(name)
    known = family.series.get(labels, 0) if family is not None else 0
    if isinstance(known, Histogram):
        return
    families.set(name, max(known, value) if name in _WORST else known + value, labels)


def _divided(value: Value, divisor: float) -> Value:
    return value.divided(divisor) if isinstance(value, Histogram) else value


def _started_at() -> float | None:
    """Returns when this process started, in Unix seconds."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            # The name of the program may have spaces and brackets in it.
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/stat", encoding="ascii", errors="replace") as file:
            booted = next(int(line.split()[1]) for line in file if line.startswith("btime "))
        return booted + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return None


# -- the text ---------------------------------------------------------------------------------


def format_families(families: Iterable[Family]) -> str:
    """Families in Prometheus' text form, in the order in which metrics are declared."""
    by_name = {family.name: family for family in families}
    lines: list[str] = []
    for metric in METRICS:
        family = by_name.get(metric.name)
        if family is None or not family.series:
            continue
        _add_family(lines, metric, family)
    return "\n".join(lines) + "\n"


def _add_family(lines: list[str], metric: Metric, family: Family) -> None:
    name, unit = metric.exposed, metric.exposed_unit
    about = metric.description + ("" if unit == "1" else f" ({unit})")
    lines.append(f"# HELP {name} {_escape_help(about)}")
    lines.append(f"# TYPE {name} {metric.kind}")
    for values, value in family.series.items():
        pairs = [
            f'{label}="{_escape_value(text)}"'
            for label, text in zip(metric.labels, values, strict=True)
        ]
        if isinstance(value, Histogram):
            _add_histogram(lines, name, pairs, value.divided(metric.exposed_divisor))
        else:
            lines.append(f"{name}{_labels(pairs)} {_number(value)}")


def _add_histogram(lines: list[str], name: str, pairs: list[str], histogram: Histogram) -> None:
    seen = 0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        seen += count
        lines.append(f"{name}_bucket{_labels([*pairs, _LE % _number(bound)])} {seen}")
    labels = _labels(pairs)
    lines.append(f"{name}_bucket{_labels([*pairs, _LE % '+Inf'])} {histogram.count}")
    lines.append(f"{name}_sum{labels} {_number(histogram.sum)}")
    lines.append(f"{name}_count{labels} {histogram.count}")


_LE: Final = 'le="%s"'


def _labels(pairs: list[str]) -> str:
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1 << 53 else repr(float(value))


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _escape_value(text: str) -> str:
    return _escape_help(text).replace('"', '\\"')
