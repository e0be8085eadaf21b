"""Every metric declared once: name, kind, unit, one sentence, labels. Readable in-process.

`METRICS` is the list; a name that is not in it cannot be counted, and a broker serves no other.

- scope `log`: kept per open log (not per topic: a process may have thousands of topics) and read
  with `Metrics.snapshot`. On a broker's `/metrics` they are called `Metric.exposed`, in base units
  (seconds, bytes) as Prometheus' conventions ask;
- scope `broker`: what a broker says beside these, by topic and subscription and of its process.
  They are collected on request (`broker.observe.prometheus`), from plain numbers on the
  objects concerned. Those that Danube has too have Danube's names.

What has to be cheap is not counted at all but derived when somebody looks (`register_gauge`,
`register_counter`).
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ister.base import forks
from ister.errors import ClosedError, check

# Names whose unit is not at their end, or that do not say what they count.
_EXPOSED: Final = {
    "wal.cache.size": "ister_wal_cache_messages",
    "uploader.bytes_uploaded_total": "ister_uploader_uploaded_bytes_total",
    "cloud_reader.bytes_read_total": "ister_cloud_reader_read_bytes_total",
    "cloud_reader.bytes_used": "ister_cloud_reader_used_bytes_total",
    "broker.bytes_in_total": "ister_broker_in_bytes_total",
    "broker.schema_misfits": "ister_broker_schema_mismatches_total",
    "broker.delivery_releases": "ister_broker_delivery_memory_releases_total",
}
# How many of a unit are a second, and how names in that unit end.
_PER_SECOND: Final = {"ms": (1e3, "_ms"), "µs": (1e6, "_us")}


@dataclass(frozen=True, slots=True)
class Metric:
    """A declaration."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    scope: Literal["log", "broker"] = "log"
    parts: tuple[str, ...] = ()
    """Of a log's metric with a label: the values of that label. The metric is their sum."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The names under which its values are kept."""
        return tuple(f"{self.name}.{part}" for part in self.parts) or (self.name,)

    @property
    def exposed(self) -> str:
        """What it is called on `/metrics`."""
        if self.scope == "broker":
            return self.name
        if self.name in _EXPOSED:
            return _EXPOSED[self.name]
        name = "ister_" + self.name.replace(".", "_")
        if self.unit in _PER_SECOND:
            return name.removesuffix(_PER_SECOND[self.unit][1]) + "_seconds"
        is_bare = self.kind == "counter" and not name.endswith("_total")
        return f"{name}_total" if is_bare else name

    @property
    def exposed_unit(self) -> str:
        """The unit of the values on `/metrics`."""
        is_converted = self.scope == "log" and self.unit in _PER_SECOND
        return "s" if is_converted else self.unit

    @property
    def exposed_divisor(self) -> float:
        """What a value is divided by to be one of `exposed_unit`."""
        return _PER_SECOND[self.unit][0] if self.exposed_unit != self.unit else 1.0


def _of_broker(
    kind: Literal["counter", "gauge", "histogram"],
    labels: tuple[str, ...],
    *metrics: tuple[str, str, str],
) -> tuple[Metric, ...]:
    return tuple(
        Metric(name, kind, unit, description, labels, "broker")
        for name, unit, description in metrics
    )


_LOG: Final[tuple[Metric, ...]] = (
    Metric(
        "wal.append_enq_latency_us",
        "histogram",
        "µs",
        "accepting messages: one append() in 256, and every call that appends a batch",
    ),
    Metric("wal.append_refused", "counter", "calls", "appends refused: full, stalled or closed"),
    Metric("wal.writer_flush_latency_ms", "histogram", "ms", "one write to the active file"),
    Metric("wal.writer_flush_bytes", "counter", "bytes", "bytes handed to write(2)"),
    Metric("wal.writer_sync_latency_ms", "histogram", "ms", "one fdatasync of the active file"),
    Metric("wal.writer_rotate_events", "counter", "files", "files ended: by size, age or call"),
    Metric("wal.rotated_by_size", "counter", "files", "of these, files that were large enough"),
    Metric("wal.rotated_by_time", "counter", "files", "of these, files that were old enough"),
    Metric("wal.rotated_by_request", "counter", "files", "of these, ended by `Topic.rotate`"),
    Metric("wal.rotate_errors", "counter", "files", "rotations put off because of an error"),
    Metric("wal.writer_failures", "counter", "topics", "writers stopped by a write or sync error"),
    Metric(
        "wal.writer_stalls",
        "counter",
        "times",
        "writes stalled by a full disk; they resume with room",
    ),
    Metric("wal.checkpoint_saves", "counter", "files", "checkpoints replaced"),
    Metric("wal.checkpoint_errors", "counter", "files", "checkpoints that could not be replaced"),
    Metric("wal.index_save_errors", "counter", "files", "indexes not saved; rebuilt when needed"),
    Metric("wal.trimmed_files", "counter", "files", "local files removed by trim"),
    Metric("wal.recovery_cut_bytes", "counter", "bytes", "torn tails cut while opening topics"),
    Metric("wal.recovery_damage", "counter", "places", "damage found while opening topics"),
    Metric("wal.cache.size", "gauge", "messages", "messages in the caches of all open topics"),
    Metric("wal.cache.bytes", "gauge", "bytes", "bytes in the caches of all open topics"),
    Metric("wal.cache.evictions", "gauge", "messages", "messages that left a cache so far"),
    Metric("walcache.hit_ratio", "gauge", "1", "share of messages that readers took from a cache"),
    Metric("wal.tail_read_latency_ms", "histogram", "ms", "visible to read, one wait in 16"),
    Metric("wal.open_files", "gauge", "files", "writer handles open now"),
    Metric("wal.file_bytes", "gauge", "bytes", "local files of all open topics"),
    Metric("wal.topics", "gauge", "topics", "topics open now"),
    Metric(
        "clock.step_seconds",
        "gauge",
        "s",
        "clock step that suspends deletion by age, positive if the clock is ahead; else 0",
    ),
    Metric("wal.reader.stitch_file_bytes", "counter", "bytes", "bytes read from WAL files"),
    Metric("wal.reader.stitch_cache_items", "counter", "messages", "messages read from a cache"),
    Metric("wal.reader.stitch_tier_items", "counter", "messages", "read from files or the bucket"),
    Metric(
        "wal_reader.memory_bytes",
        "gauge",
        "bytes",
        "chunks held by readers now: of local files (file_stream) and of the bucket",
        ("type",),
        parts=("file_stream", "bucket"),
    ),
    Metric("wal_reader.chunk_read_latency_ms", "histogram", "ms", "one chunk read from a file"),
    Metric("wal_reader.frames_parsed_total", "counter", "frames", "frames parsed from WAL files"),
    Metric("wal_reader.crc_errors_total", "counter", "frames", "bad frames met by readers"),
    Metric("wal_reader.rotated_files_accessed", "counter", "files", "rotated files opened to read"),
    Metric("wal_reader.active_readers", "gauge", "readers", "readers open now"),
    Metric("uploader.cycle_duration_seconds", "histogram", "s", "one upload cycle of one topic"),
    Metric("uploader.object_latency_ms", "histogram", "ms", "one object, from reading to commit"),
    Metric("uploader.bytes_uploaded_total", "counter", "bytes", "bytes of committed objects"),
    Metric("uploader.objects_created_total", "counter", "objects", "objects committed"),
    Metric("uploader.objects_repaired_total", "counter", "objects", "bad objects uploaded again"),
    Metric("uploader.errors_total", "counter", "cycles", "upload cycles that failed"),
    Metric("uploader.stream_chunk_bytes", "histogram", "bytes", "one piece handed to the store"),
    Metric("uploader.memory_usage_bytes", "gauge", "bytes", "what uploads under way may hold"),
    Metric("upload.inflight_parts", "gauge", "parts", "upload parts in flight (upper bound)"),
    Metric(
        "upload.batch_bytes", "histogram", "bytes", "one upload: an object, or an express object"
    ),
    Metric(
        "upload.retries", "counter", "cycles", "upload cycles, or express runs, after a failed one"
    ),
    Metric(
        "session.resume_events",
        "counter",
        "objects",
        "uploads begun where an unfinished one began, after an error or a crash",
    ),
    Metric(
        "session.abort_events",
        "counter",
        "objects",
        "uploads given up before their object was whole",
    ),
    Metric("uploader.lag_bytes", "gauge", "bytes", "synced and not in the bucket, about"),
    Metric("express.objects_total", "counter", "objects", "express objects written"),
    Metric("express.bytes_total", "counter", "bytes", "bytes of express objects written"),
    Metric("express.runs_total", "counter", "runs", "runs in express objects committed"),
    Metric("express.errors_total", "counter", "objects", "express objects with failed runs"),
    Metric("express.resorted_objects_total", "counter", "objects", "objects made by re-sorting"),
    Metric("express.resorted_runs_total", "counter", "runs", "runs replaced by re-sorting"),
    Metric("express.resorted_bytes_total", "counter", "bytes", "bytes written by re-sorting"),
    Metric("express.resort_errors_total", "counter", "objects", "re-sorts that failed"),
    Metric("express.put_latency_ms", "histogram", "ms", "one put of an express object"),
    Metric("express.commit_latency_ms", "histogram", "ms", "one commit of an express object"),
    Metric("cloud_reader.query_duration_seconds", "histogram", "s", "one look-up of descriptors"),
    Metric(
        "cloud_reader.range_requests_total",
        "counter",
        "requests",
        "reads from objects: of a part (ranged), or of a whole object at once (full)",
        ("kind",),
        parts=("ranged", "full"),
    ),
    Metric("cloud_reader.bytes_read_total", "counter", "bytes", "bytes fetched from objects"),
    Metric("cloud_reader.bytes_used", "counter", "bytes", "of these, bytes of frames wanted"),
    Metric("cloud_reader.fetch_latency_ms", "histogram", "ms", "one read from an object"),
    Metric("cloud_reader.objects_opened_total", "counter", "objects", "objects begun to be read"),
    Metric("cloud_reader.errors_total", "counter", "objects", "lost or damaged objects met"),
    Metric("reader.opened_hot_total", "counter", "readers", "readers opened at local messages"),
    Metric("reader.opened_history_total", "counter", "readers", "readers opened in the bucket"),
    Metric("reader.history_entered_total", "counter", "times", "readers that went to the bucket"),
    Metric("reader.handoffs_total", "counter", "times", "readers that came back to local files"),
    Metric("metadata.put_latency_seconds", "histogram", "s", "one commit of a descriptor"),
    Metric("metadata.descriptor_write_total", "counter", "commits", "descriptors committed"),
    Metric("cloud.expired_objects", "counter", "objects", "objects removed by bucket retention"),
    Metric("cloud.orphans_removed", "counter", "objects", "unreferenced objects removed"),
    Metric("disk.is_low", "gauge", "flag", "1 while appends are stopped by storage.disk.min_free"),
    Metric("disk.low_total", "counter", "times", "appends were stopped by low disk space"),
    Metric("disk.reserve_bytes", "gauge", "bytes", "size of the file kept to be freed if full"),
    Metric("memory.used_bytes", "gauge", "bytes", "files in memory (storage.mode bucket)"),
    Metric("memory.limit_bytes", "gauge", "bytes", "storage.bucket.memory_max_bytes"),
    Metric("memory.is_full", "gauge", "flag", "1 while appends are held: memory is full"),
    Metric("memory.full_total", "counter", "times", "appends were held because memory was full"),
    Metric("disk.reserve_used_total", "counter", "times", "the reserve was freed on a full disk"),
    Metric("retention.errors_total", "counter", "times", "retention runs that failed"),
    Metric("broker.topics", "gauge", "topics", "topics that this broker serves now"),
    Metric(
        "broker.topics_waiting_for_disk",
        "gauge",
        "topics",
        "read-only topics here: their newest messages may be on the disk of a broker that is down",
    ),
    Metric("broker.members", "gauge", "brokers", "brokers of the cluster, this one among them"),
    Metric("broker.is_leader", "gauge", "0 or 1", "whether this broker assigns topics to brokers"),
    Metric("broker.moves_total", "counter", "topics", "topics handed over to other brokers"),
    Metric("broker.consumers", "gauge", "consumers", "consumers with an open stream"),
    Metric(
        "broker.messages_in_total", "counter", "messages", "messages published over gRPC and Flight"
    ),
    Metric("broker.bytes_in_total", "counter", "bytes", "payloads of these"),
    Metric(
        "broker.time_searches",
        "gauge",
        "searches",
        "searches for a time under way, including those that wait for a thread",
    ),
    Metric("broker.time_searches_total", "counter", "searches", "searches for a time started"),
    Metric("broker.time_search_bytes_total", "counter", "bytes", "bytes read by these"),
    Metric(
        "broker.principal_limit_refusals_total",
        "counter",
        "calls",
        "subscriptions, consumers and streams refused because their principal is at its limit",
    ),
    Metric("broker.flight_streams", "gauge", "streams", "Arrow Flight streams open"),
    Metric(
        "broker.flight_streams_max",
        "gauge",
        "streams",
        "limit of Arrow Flight streams: broker.limits.max_flight_streams",
    ),
    Metric(
        "broker.flight_stream_refusals_total",
        "counter",
        "streams",
        "Arrow Flight streams refused because too many were open",
    ),
    Metric(
        "broker.schema_misfits", "counter", "messages", "messages that did not fit their schema"
    ),
    Metric("broker.delivery_bytes", "gauge", "bytes", "memory of messages on their way out"),
    Metric(
        "broker.delivery_budget_bytes",
        "gauge",
        "bytes",
        "limit of this memory: dispatch.memory_budget_mb, or its default",
    ),
    Metric(
        "broker.delivery_releases",
        "counter",
        "times",
        "a subscription released memory because the budget was used up, since the start",
    ),
    Metric(
        "broker.stalled_streams_ended_total",
        "counter",
        "streams",
        "streams ended because their clients did not read while others waited for the memory",
    ),
    Metric("subscription.nacks_total", "counter", "messages", "messages that consumers gave back"),
    Metric(
        "subscription.acks_refused_total",
        "counter",
        "messages",
        "acknowledgements refused: the message was not delivered",
    ),
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

_TOPIC: Final = ("topic",)
_SUBSCRIPTION: Final = ("topic", "subscription")

_BROKER: Final[tuple[Metric, ...]] = (
    # Topics.
    *_of_broker(
        "counter",
        _TOPIC,
        ("danube_topic_messages_in_total", "messages", "messages published, by gRPC or Flight"),
        ("danube_topic_bytes_in_total", "bytes", "payloads of these"),
        ("danube_wal_append_total", "messages", "messages appended to the topic's log"),
        ("danube_wal_append_bytes_total", "bytes", "frames of these"),
    ),
    *_of_broker(
        "counter",
        ("topic", "result", "error_code"),
        ("danube_producer_send_total", "messages", "sends over gRPC, and what became of them"),
    ),
    *_of_broker(
        "histogram",
        _TOPIC,
        ("danube_topic_message_size_bytes", "bytes", "payloads of the messages published"),
        ("danube_producer_send_latency_ms", "ms", "sends over gRPC that were acknowledged"),
    ),
    *_of_broker(
        "gauge",
        _TOPIC,
        ("danube_topic_active_producers", "producers", "producers heard of in the last minute"),
        ("danube_topic_active_consumers", "consumers", "consumers with an open stream"),
        ("danube_topic_active_subscriptions", "subscriptions", "subscriptions of the topic"),
        ("ister_upload_lag_messages", "messages", "synced and not in the bucket"),
        ("ister_upload_lag_bytes", "bytes", "the same in bytes, about"),
        ("ister_upload_lag_seconds", "s", "how long the oldest of these has been waiting, about"),
        ("ister_upload_failures", "cycles", "upload cycles that failed since the last good one"),
    ),
    *_of_broker(
        "gauge",
        ("topic", "state"),
        ("ister_topic_state", "1", "1 for the state that the topic is in"),
    ),
    *_of_broker(
        "gauge", ("state",), ("ister_topics", "topics", "topics of this broker, by their state")
    ),
    # Subscriptions.
    *_of_broker(
        "counter",
        _SUBSCRIPTION,
        ("danube_consumer_messages_out_total", "messages", "messages handed to consumers"),
        ("danube_consumer_bytes_out_total", "bytes", "payloads of these"),
        ("danube_subscription_nack_total", "messages", "messages that consumers gave back"),
        (
            "ister_subscription_ack_refused_total",
            "messages",
            "acknowledgements refused: the message was not delivered",
        ),
        ("danube_subscription_redelivery_total", "messages", "messages sent again"),
        ("danube_subscription_ack_timeout_total", "messages", "messages not answered in time"),
        ("danube_subscription_retry_exhausted_total", "messages", "messages that failed too often"),
        ("danube_subscription_dlq_total", "messages", "messages dead-lettered"),
        ("ister_subscription_lost_total", "messages", "messages dropped or no longer kept"),
    ),
    *_of_broker(
        "gauge",
        _SUBSCRIPTION,
        ("danube_subscription_active_consumers", "consumers", "consumers with an open stream"),
        ("danube_subscription_lag_messages", "messages", "messages from the cursor to the end"),
        ("danube_subscription_pending_redelivery", "messages", "messages pending redelivery"),
        ("danube_subscription_terminal_blocked", "1", "1 while a failed message stops it"),
        ("ister_subscription_in_flight_messages", "messages", "sent and not acknowledged"),
        ("ister_subscription_held_bytes", "bytes", "messages in memory, to be sent or sent again"),
    ),
    # Calls, rights, schemas.
    *_of_broker(
        "counter",
        ("service", "method", "result"),
        ("danube_broker_rpc_total", "calls", "gRPC calls by their result, a status or OK"),
    ),
    *_of_broker(
        "histogram",
        ("service", "method"),
        ("ister_rpc_latency_seconds", "s", "gRPC calls that were answered, without streams"),
    ),
    *_of_broker(
        "counter",
        ("reason", "topic_ns"),
        ("danube_client_redirects_total", "look-ups", "clients sent to another broker"),
    ),
    *_of_broker(
        "counter",
        (),
        ("danube_authz_allow_total", "calls", "what callers were allowed"),
        ("danube_authz_deny_total", "calls", "what callers had no right to"),
        ("ister_auth_refused_total", "calls", "calls refused for missing or invalid credentials"),
    ),
    *_of_broker(
        "counter",
        _TOPIC,
        ("danube_schema_validation_total", "messages", "messages held against a schema"),
    ),
    *_of_broker(
        "counter",
        ("topic", "reason"),
        ("danube_schema_validation_failures_total", "messages", "messages that did not fit it"),
    ),
    *_of_broker(
        "gauge", (), ("danube_broker_topics_owned", "topics", "topics that this broker serves now")
    ),
    # What Danube and the first designs call the figures of the log.
    *_of_broker(
        "histogram",
        (),
        (
            "danube_wal_append_latency_seconds",
            "s",
            "accepting messages: one append() in 256, and every call that appends a batch",
        ),
        ("danube_wal_fsync_latency_seconds", "s", "one fdatasync of a log's file"),
        ("danube_wal_flush_latency_ms", "ms", "one write to a log's file"),
        ("danube_uploader_cycle_duration_seconds", "s", "one upload cycle of one topic"),
        ("danube_cloud_reader_query_duration_seconds", "s", "one look-up of descriptors"),
        ("danube_etcd_put_latency_seconds", "s", "one commit of a descriptor, where that is etcd"),
    ),
    *_of_broker(
        "counter",
        (),
        ("danube_wal_flush_total", "writes", "writes to logs' files"),
        ("danube_wal_bytes_written_total", "bytes", "bytes of these"),
        ("danube_wal_rotation_total", "files", "files ended: by size, age or call"),
        ("danube_wal_delete_total", "files", "local files removed by trim"),
        ("danube_uploader_bytes_uploaded_total", "bytes", "bytes of committed objects"),
        ("danube_uploader_objects_created_total", "objects", "objects committed"),
        ("danube_uploader_errors_total", "cycles", "upload cycles that failed"),
        ("danube_cloud_reader_bytes_read_total", "bytes", "bytes fetched from objects"),
        ("danube_etcd_descriptor_write_total", "commits", "descriptors committed, to etcd"),
        ("danube_handoff_durable_history_to_hot_total", "times", "readers back at local files"),
    ),
    *_of_broker("gauge", (), ("danube_wal_cache_size", "messages", "messages in all caches")),
    *_of_broker(
        "counter",
        ("reason",),
        ("danube_wal_file_rotate_total", "files", "files ended, by size, time or request"),
    ),
    *_of_broker(
        "counter",
        ("mode",),
        ("danube_wal_reader_create_total", "readers", "readers opened, by where they begin"),
    ),
    *_of_broker(
        "counter",
        ("provider", "result"),
        ("danube_cloud_upload_objects_total", "objects", "objects committed, and cycles failed"),
    ),
    *_of_broker(
        "counter",
        ("provider",),
        ("danube_cloud_upload_bytes_total", "bytes", "bytes of committed objects"),
        ("danube_durable_history_segments_read_total", "objects", "objects begun to be read"),
        ("danube_durable_history_read_bytes_total", "bytes", "bytes fetched from objects"),
    ),
    *_of_broker(
        "histogram",
        ("provider",),
        ("danube_cloud_upload_latency_ms", "ms", "one object, from reading to commit"),
    ),
    *_of_broker(
        "counter",
        ("provider", "reason"),
        ("danube_durable_history_reader_errors_total", "objects", "lost or damaged objects met"),
    ),
    # The broker and its machine.
    *_of_broker(
        "gauge",
        ("version", "python"),
        ("ister_build_info", "1", "always 1; the labels say what runs"),
    ),
    *_of_broker(
        "gauge",
        ("check",),
        ("ister_health_state", "state", "0: well, 1: attention, 2: bad; one of each check"),
    ),
    *_of_broker(
        "counter",
        ("thread",),
        ("ister_thread_failures_total", "errors", "unexpected errors of background threads"),
    ),
    *_of_broker(
        "gauge",
        (),
        ("ister_broker_ready", "1", "1 while clients should come"),
        ("ister_topics_summed", "topics", "topics that share the label _other"),
        ("ister_disk_free_bytes", "bytes", "room for the log on its file system"),
        ("ister_disk_size_bytes", "bytes", "size of that file system"),
        ("ister_lease_valid", "1", "1 while this node surely owns its topics"),
        ("ister_lease_seconds", "s", "how long the lease still holds"),
        ("ister_metadata_up", "1", "1 while the metadata store answers"),
        ("ister_certificate_expiry_timestamp_seconds", "s", "when the certificate ends"),
        ("ister_pipeline_wanted", "1", "1 if uploads are a pipeline's (engine: spark)"),
        ("ister_pipeline_running", "1", "1 while a pipeline holds its lease"),
        ("process_resident_memory_bytes", "bytes", "memory of the process"),
        ("process_open_fds", "files", "file descriptors open"),
        ("process_max_fds", "files", "file descriptors that the process may have"),
        ("process_start_time_seconds", "s", "when the process began, since 1970"),
    ),
    *_of_broker(
        "counter", (), ("process_cpu_seconds_total", "s", "processor time, user and system")
    ),
    *_of_broker(
        "gauge",
        # Not `job`: that is Prometheus' own label of what it scrapes.
        ("pipeline_job",),
        ("ister_job_last_start_timestamp_seconds", "s", "when a job was last begun, since 1970"),
        ("ister_job_last_duration_seconds", "s", "how long that took"),
        ("ister_job_last_ok", "1", "1 if it ended without errors"),
    ),
)

METRICS: Final[tuple[Metric, ...]] = (*_LOG, *_BROKER)

LEFT_OUT: Final[tuple[tuple[str, str], ...]] = (
    ("danube_leader_election_state", "`ister_broker_is_leader` says whether a broker leads"),
    ("danube_broker_assignments_total", "assignments are not counted"),
    ("danube_rebalancing_moves_total", "`ister_broker_moves_total` counts all moves"),
    ("danube_rebalancing_failures_total", "a failed move is logged and tried again"),
    ("danube_rebalancing_cycle_duration_seconds", "rebalancing is not timed"),
    ("danube_cluster_imbalance_cv", "`ister brokers balance` shows the variation"),
    ("danube_dispatcher_heartbeat_polls_total", "dispatchers are woken, they do not poll"),
    ("danube_dispatcher_notifier_polls_total", "likewise"),
    (
        "danube_cloud_list_total",
        "reading never lists the bucket: descriptors are in the metadata store",
    ),
    ("danube_cloud_list_latency_ms", "likewise"),
)
"""Metrics of Danube's that are not told under their names, and why."""

BY_NAME: Final = {metric.name: metric for metric in METRICS}
check(len(BY_NAME) == len(METRICS), "a metric is declared once")


def _steps(first: int, last: int) -> tuple[float, ...]:
    """1-2-5 steps from one power of ten to another, that included."""
    within = [float(f"{step}e{exponent}") for exponent in range(first, last) for step in (1, 2, 5)]
    return (*within, float(f"1e{last}"))


# 1-2-5 steps: wide enough for microseconds and for seconds in milliseconds.
_BOUNDS: Final = (*_steps(-3, 5), 2e5, 5e5)
_BOUNDS_BY_UNIT: Final = {
    "µs": _steps(0, 6),
    "ms": _steps(-1, 5),
    "s": _steps(-3, 3),
    # Powers of four: what `ister.broker.counters` relies on.
    "bytes": tuple(float(4**exponent) for exponent in range(2, 14)),
}


def bounds_of(name: str) -> tuple[float, ...]:
    """The steps of a histogram, by its unit."""
    return _BOUNDS_BY_UNIT[BY_NAME[name].unit]


class Histogram:
    """Counts of values by size, in 1-2-5 steps unless others are given."""

    __slots__ = ("bounds", "count", "counts", "max", "sum")

    def __init__(self, bounds: Sequence[float] = _BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.sum = 0.0
        self.max = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds a value, as often as it was seen."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.count += count
        self.sum += value * count
        if value > self.max:  # noqa: PLR1730 - a call to max() costs more
            self.max = value

    def add(self, other: Histogram) -> None:
        """Adds all values of another one of the same steps."""
        check(self.bounds == other.bounds, "histograms of the same steps")
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.count += other.count
        self.sum += other.sum
        self.max = max(self.max, other.max)

    def copy(self) -> Histogram:
        """Returns the current values."""
        made = Histogram(self.bounds)
        made.counts = self.counts.copy()
        # Whoever adds to it meanwhile may have done a part: buckets and count go together.
        made.count = sum(made.counts)
        made.sum, made.max = self.sum, self.max
        return made

    def divided(self, divisor: float) -> Histogram:
        """Returns the values in another unit; shares the counts."""
        if divisor == 1:
            return self
        made = Histogram([bound / divisor for bound in self.bounds])
        made.counts, made.count = self.counts, self.count
        made.sum, made.max = self.sum / divisor, self.max / divisor
        return made

    def quantile(self, q: float) -> float:
        """An upper bound of the q-quantile, as fine as the steps; 0 without values."""
        rank = q * self.count
        seen = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
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
        # Reentrant: a finalizer may append while this thread counts.
        self._lock = threading.RLock()
        self._counters = {key: 0 for m in _LOG if m.kind == "counter" for key in m.keys}
        self._histograms = {
            m.name: Histogram(bounds_of(m.name)) for m in _LOG if m.kind == "histogram"
        }
        # One that nobody computes is that of a part which this process does not have.
        self._gauges: dict[str, Callable[[], float]] = {
            key: lambda: 0 for m in _LOG if m.kind == "gauge" for key in m.keys
        }
        self._derived: dict[str, Callable[[], int]] = {}
        forks.register(self)

    def _after_fork(self, _error: ClosedError) -> None:
        """Keeps the values readable in a forked child, as they were at the fork."""
        forks.reset_locks(self._lock)

    def count(self, name: str, amount: int = 1, *, part: str = "") -> None:
        """Adds to a counter, or to one of its parts."""
        with self._lock:
            self._counters[f"{name}.{part}" if part else name] += amount

    def observe(self, name: str, value: float) -> None:
        """Adds a value to a histogram."""
        with self._lock:
            self._histograms[name].observe(value)

    def counted(self, name: str) -> int:
        """The value of a counter."""
        return sum(self._counters[key] for key in BY_NAME[name].keys)

    def register_gauge(self, name: str, read: Callable[[], float], *, part: str = "") -> None:
        """Registers a gauge, or one of its parts, that `read` computes on request."""
        check(BY_NAME[name].kind == "gauge", f"{name} is a gauge")
        self._gauges[f"{name}.{part}" if part else name] = read

    def register_counter(self, name: str, read: Callable[[], int]) -> None:
        """Has a counter computed, whose value never goes down; what is counted is added to it."""
        check(name in self._counters, f"{name} is a counter")
        self._derived[name] = read

    def snapshot(self) -> dict[str, float | dict[str, float]]:
        """All values by name: numbers, and summaries for histograms."""
        numbers, histograms = self.values()
        return {**numbers, **{name: one.summary() for name, one in histograms.items()}}

    def values(self) -> tuple[dict[str, float], dict[str, Histogram]]:
        """All counters and gauges, and copies of the histograms.

        Those with parts are the sums of these, whose names end with the part.
        """
        gauges = {name: read() for name, read in self._gauges.items()}
        derived = {name: read() for name, read in self._derived.items()}
        with self._lock:
            numbers: dict[str, float] = {**self._counters, **gauges}
            histograms = {name: one.copy() for name, one in self._histograms.items()}
        for name, value in derived.items():
            numbers[name] += value
        for metric in _LOG:
            if metric.parts:
                numbers[metric.name] = sum(numbers[key] for key in metric.keys)
        return numbers, histograms
