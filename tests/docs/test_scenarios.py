"""Danube's scenarios: each test of its suites has its place in a table, and is a test here."""

from __future__ import annotations

import re

from tests.doc_runner.pages import ROOT

# The tests of Danube 0.15, by suite; of files with many alike, the file and their number.
SUITES = {
    "danube-persistent-storage": """
    cloud_native_seal_takeover_replay_and_live_continuity
    shared_fs_seal_takeover_replay_and_live_continuity
    cloud_native_recovers_from_catalog_when_checkpoint_points_to_missing_local_files
    shared_fs_recovers_from_catalog_when_checkpoint_points_to_missing_local_files
    shared_fs_periodically_exports_segments_during_active_ownership
    shared_fs_requires_wal_dir_for_durable_wal_state
    shared_fs_delete_removes_catalog_and_durable_segments
    cloud_native_delete_removes_catalog_and_durable_segments
    shared_fs_multiple_owner_changes_preserve_offsets_without_duplicates
    cloud_native_multiple_owner_changes_preserve_offsets_without_duplicates
    local_mode_append_read_seal_reload_continuity
    test_factory_multi_topic_wal_isolation
    test_multi_topic_segment_export_isolation
    multiple_topics: isolated_storage
    multiple_topics: independent_segment_exports
    multiple_topics: concurrent_operations
    multiple_topics: different_read_patterns
    multiple_topics: factory_reuse
    multiple_topics: namespace_isolation
    multiple_topics: mixed_workloads
    one_topic_multiple_subsc: independent_positions
    one_topic_multiple_subsc: concurrent_reading
    one_topic_multiple_subsc: durable_history_handoff
    one_topic_multiple_subsc: different_speeds
    one_topic_multiple_subsc: tail_reading
    one_topic_multiple_subsc: mixed_start_positions
    one_topic_one_subsc: basic_flow
    one_topic_one_subsc: wal_rotation_and_upload
    one_topic_one_subsc: durable_history_handoff_reading
    one_topic_one_subsc: resume_from_position
    one_topic_one_subsc: tail_reading
    one_topic_one_subsc: concurrent_write_read
    one_topic_one_subsc: large_message_handling
    streams_handoff: local_cache_only
    streams_handoff: local_files_cache_live
    streams_handoff: chaining_stream_handoff_memory
    streams_handoff: factory_durable_history_hot_handoff_per_topic
    streams_handoff: skip_durable_history_when_start_after_segments
    wal_retention: time_based_end_to_end
    wal_retention: multi_topic_independence
    wal_retention: stateful_reader_after_retention
    warm_tier_read: 2 tests
    write_buffer_valkey: 7 tests
    src: frame layout with crc
    src: crc mismatch stops
    src: rotated continuity
    src: sparse index seek
    src: deleter sequence watermark
    src: deleter by size
    src: deleter by time
    src: deleter with a missing file
    src: append after shutdown
    src: invalid WAL path
""",
    "danube-broker": """
    basic_subscription_shared
    basic_subscription_exclusive
    reliable_basic_shared
    reliable_basic_exclusive
    pubsub_fanout_exclusive_unique_subscriptions
    queue_shared_round_robin_distribution
    churn_shared_queue_join_leave
    churn_exclusive_fanout_join_leave
    partitioned_basic_*
    partitioned_queue_*
    partitioned_pubsub_*
    partitioning_validation
    producer_reconnection_reuse
    reliable_exclusive_reconnection_resends_pending_message
    reliable_multiple_reconnections_same_message
    reliable_shared_reconnection_failover_to_another_consumer
    heartbeat: notification_coalescing_recovery
    heartbeat: subscription_creation_race_condition
    heartbeat: consumer_disconnect_during_notification
    heartbeat: poll_next_returns_none_recovery
    reliable_exclusive_nack_redelivers_same_message
    reliable_shared_nack_redelivers_same_message
    reliable_exclusive_ack_timeout_redelivers_same_message
    reliable_retry_exhausted_block_prevents_progress
    reliable_retry_exhausted_drop_skips_poisoned_message
    reliable_retry_exhausted_deadletter_routes_message_to_dlq
    key_shared_basic_single_consumer_non_reliable
    key_shared_per_key_affinity_non_reliable
    key_shared_reliable_per_key_affinity
    key_shared_reliable_out_of_order_ack
    key_shared_filter_glob_non_reliable
    key_shared_filter_glob_reliable
    key_shared_filter_mixed_with_unfiltered
    key_shared_filter_multiple_patterns
    key_shared_partitioned_single_consumer
    key_shared_partitioned_multi_consumer_affinity
    key_shared_consumer_churn_join
    key_shared_reliable_partitioned
    key_shared_reliable_drop_poison_skips_exhausted_message
    key_shared_reliable_block_poison_stalls_only_affected_key
    key_shared_reliable_deadletter_routes_to_dlq_and_frees_key
    key_shared_reliable_nack_redelivers_same_message
    key_shared_reliable_inactive_consumer_eviction
    reliable_topic_move_shared_fs_continues_offsets
    reliable_topic_move_shared_fs_redelivers_unacked_message
    schema_registry_basic: 7 tests
    schema_compatibility: 9 tests
    schema_validation_policy: 8 tests
    schema_version_selection: 6 tests
    topic_schema_config: 4 tests
    security_e2e: authorized_produce
    security_e2e: authorized_consume
    security_e2e: denied_produce
    src: max_producers_per_topic
    src: max_subscriptions_per_topic
    src: max_consumers_per_topic, max_consumers_per_subscription
    src: max_message_size
    src: max_publish_rate
    src: max_subscription_dispatch_rate
    src: full non-reliable subscription
""",
}


def table(suite: str) -> dict[str, list[str]]:
    """The rows of a suite's table: which tests show each scenario."""
    text = (ROOT / "docs" / "TESTING.md").read_text()
    rows = text.split(f"| {suite} | shown by |\n|---|---|\n", 1)[1].split("\n\n", 1)[0]
    found: dict[str, list[str]] = {}
    for row in rows.splitlines():
        _, scenario, shown, _ = row.split("|")
        name = scenario.strip().replace("\\*", "*")
        assert name not in found, f"two rows of {name}"
        found[name] = re.findall(r"`(\w+)`", shown)
    return found


def find_tests() -> set[str]:
    files = (ROOT / "tests").rglob("test_*.py")
    return {
        name
        for path in files
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }


def test_each_scenario_of_danube_is_in_its_table():
    for suite, names in SUITES.items():
        assert list(table(suite)) == [line.strip() for line in names.split("\n") if line.strip()]


def test_each_scenario_of_danube_is_a_test():
    known = find_tests()
    for suite in [*SUITES, "fault of Danube's storage"]:
        for scenario, tests in table(suite).items():
            assert tests, f"no test shows {scenario}"
            assert set(tests) <= known, f"{scenario}: {set(tests) - known}"
