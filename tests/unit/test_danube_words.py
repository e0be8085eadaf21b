"""Every metric that Danube's design documents name has a row in the table of words."""

import re
from pathlib import Path

from ister.base.metrics import METRICS

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "danube-words.md"

DOCUMENTS = {
    "persistence, as implemented": """
        danube_wal_append_latency_seconds danube_wal_fsync_latency_seconds
        danube_wal_bytes_written_total danube_wal_cache_size danube_wal_rotation_total
        danube_uploader_cycle_duration_seconds danube_uploader_bytes_uploaded_total
        danube_uploader_objects_created_total danube_uploader_errors_total
        danube_cloud_reader_query_duration_seconds danube_cloud_reader_bytes_read_total
        danube_etcd_put_latency_seconds danube_etcd_descriptor_write_total
    """,
    "persistence, as proposed": """
        wal.append_latency_ms wal.fsync_latency_ms wal.bytes_total walcache.hit_ratio
        wal.tail_read_latency_ms wal.truncate_events upload.batch_bytes upload.latency_ms
        upload.inflight_parts upload.retries manifest.txn_latency_ms session.resume_events
        session.abort_events
    """,
    "streaming uploader and cloud reader": """
        uploader.stream_chunk_bytes uploader.memory_usage_bytes cloud_reader.range_requests_total
        cloud_reader.bytes_fetched cloud_reader.bytes_used
    """,
    "performance of the WAL": """
        wal.append_enq_latency_us wal.writer_flush_latency_ms wal.writer_flush_bytes
        wal.writer_rotate_events wal.cache.size wal.cache.evictions
        wal.reader.stitch_file_bytes wal.reader.stitch_cache_items
    """,
    "readers at the tail": """
        wal_reader.memory_bytes wal_reader.chunk_read_latency_ms wal_reader.frames_parsed_total
        wal_reader.crc_errors_total wal_reader.rotated_files_accessed wal_reader.active_readers
    """,
}
"""The names, as the documents write them."""


def section() -> str:
    _, _, rest = PAGE.read_text().partition("\n## Metrics\n")
    return rest.partition("\n## ")[0]


def test_table_has_each_metric_of_the_documents_once_and_no_other() -> None:
    wanted = [name for names in DOCUMENTS.values() for name in names.split()]
    assert len(wanted) == len(set(wanted)) == 45
    listed = re.findall(r"^\| `([\w.]+)` \|", section(), re.MULTILINE)
    assert sorted(listed) == sorted(wanted)


def test_table_names_metrics_that_are_on_metrics() -> None:
    """That each declared metric is told there is `test_prometheus`'s."""
    declared = {metric.exposed for metric in METRICS}
    rows = re.findall(r"^\| `[\w.]+` \| `(\w+)` \|", section(), re.MULTILINE)
    assert len(rows) == 45
    assert set(rows) <= declared
    differences = re.sub(r"^\| `[\w.]+` \|", "", section(), flags=re.MULTILINE)
    assert set(re.findall(r"`((?:ister|danube)_\w+)`", differences)) <= declared
