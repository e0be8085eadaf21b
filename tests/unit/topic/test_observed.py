"""What operators see of reading, trimming and uploading: log lines and metrics."""

import asyncio
import logging
import threading

import pyarrow as pa
import pytest

import ister
from ister.base.limits import INDEX_STRIDE_BYTES
from ister.errors import UnavailableError
from ister.format.payloads import Payloads
from ister.topic.reader import TAIL_SAMPLE
from tests.support.builders import a_message
from tests.support.machine import eventually, numbered, payloads
from tests.support.stores import NAME, calm, silent

ROTATE = {"rotate_max_bytes": 4096, "cache_capacity": 1}
KEEP_NOTHING = {"retention": {"time_minutes": 0, "size_mb": 0}}


def fill(topic, count, *, size=0):
    for payload in numbered(count, first=topic.watermarks.next, size=size):
        topic.append(payload)
    topic.flush()


def lines(caplog, event):
    """The fields of every record of an event."""
    return [vars(record) for record in caplog.records if record.getMessage() == event]


def test_reader_start_hand_off_and_trim_are_logged_with_topic_and_offset(site, caplog):
    caplog.set_level(logging.DEBUG, logger="ister")
    log = site.open("a", **ROTATE, **KEEP_NOTHING)
    topic = log.topic(str(NAME), create=True)
    for _ in range(8):
        fill(topic, 4, size=600)
    topic.upload()
    assert topic.bucket.retention.trim()
    *_, trimmed = lines(caplog, "trimmed")
    assert trimmed["levelno"] == logging.INFO
    assert (trimmed["topic"], trimmed["offset"]) == (str(NAME), topic.watermarks.trimmed)
    assert trimmed["files"] > 0
    fill(topic, 4)
    assert len(payloads(topic.read("earliest"))) == 36
    (opened,) = lines(caplog, "reader opened")
    assert (opened["topic"], opened["offset"], opened["tier"]) == (str(NAME), 0, "bucket")
    assert opened["files_count"] == len(topic.wal.files) > 0
    assert opened["chunk_size"] == log.config.storage.wal.stream_chunk_size
    (entered,) = lines(caplog, "reader switches to the bucket")
    assert (entered["topic"], entered["offset"]) == (str(NAME), 0)
    (left,) = lines(caplog, "reader switches to local files")
    assert (left["topic"], left["offset"]) == (str(NAME), topic.watermarks.trimmed)


def test_hit_ratio_is_the_share_of_messages_from_the_cache(tmp_path):
    with ister.open({"storage": {"wal": {"dir": str(tmp_path), "cache_capacity": 30}}}) as log:
        assert log.metrics.snapshot()["walcache.hit_ratio"] == 0
        topic = log.topic("/default/a", create=True)
        fill(topic, 100)
        with topic.reader(80) as reader:
            assert len(reader.poll()) == 20
        assert log.metrics.snapshot()["walcache.hit_ratio"] == 1
        with topic.reader(0, end=60) as reader:
            assert sum(len(batch) for batch in iter(reader.poll, [])) == 60
        snapshot = log.metrics.snapshot()
        hits, others = (snapshot[f"wal.reader.stitch_{kind}_items"] for kind in ("cache", "tier"))
        assert (hits, others) == (20, 60)
        assert snapshot["walcache.hit_ratio"] == hits / (hits + others)


def test_replay_from_behind_the_cache_reads_no_cached_message_from_a_file(site):
    log = site.open("a", cache_capacity=624)
    topic = log.topic(str(NAME), create=True)
    fill(topic, 1000, size=1000)
    first, size = topic.cache.start, topic.wal.committer.synced_bytes_total
    assert first == 376
    with topic.reader(0) as reader:
        assert sum(len(batch) for batch in iter(reader.poll, [])) == 1000
    counted = log.metrics.snapshot()
    assert counted["wal.reader.stitch_cache_items"] == 1000 - first
    assert counted["wal.reader.stitch_tier_items"] == first
    assert counted["wal_reader.frames_parsed_total"] == first
    # An index has an entry for every 256 KiB: a read of a file ends at one.
    assert counted["wal.reader.stitch_file_bytes"] < size * first / 1000 + INDEX_STRIDE_BYTES


def test_replay_of_the_bucket_reads_no_cached_message_again(site):
    log = site.open("a", rotate_max_bytes=4096, cache_capacity=60, **KEEP_NOTHING)
    topic = log.topic(str(NAME), create=True)
    for _ in range(10):
        fill(topic, 10, size=1000)
    topic.upload()
    assert topic.bucket.retention.trim()
    assert topic.watermarks.trimmed > topic.cache.start == 40
    with topic.reader(0) as reader:
        assert sum(len(batch) for batch in iter(reader.poll, [])) == 100
    counted = log.metrics.snapshot()
    assert counted["wal.reader.stitch_cache_items"] == 60
    assert counted["wal.reader.stitch_tier_items"] == 40


def test_latency_at_the_tail_is_measured_for_one_wait_in_sixteen():
    with ister.open() as log:
        topic = log.topic("/default/a", create=True)
        taken = []

        def follow():
            with topic.reader("latest") as reader:
                while len(taken) < 2 * TAIL_SAMPLE:
                    taken.extend(reader.next_batch())

        reading = threading.Thread(target=follow)
        reading.start()
        for number in range(2 * TAIL_SAMPLE):
            eventually(lambda: bool(topic.wal.levels.waiters[topic.wal.levels.visible_level]))
            topic.append(b"%d" % number)
            eventually(lambda number=number: len(taken) > number)
        reading.join()
        found = log.metrics.snapshot()["wal.tail_read_latency_ms"]
        assert found["count"] == 2
        assert 0 <= found["max"] < 60_000


def test_latency_at_the_tail_is_measured_on_event_loops_too():
    async def scenario(log):
        topic = log.topic("/default/a", create=True)
        reader = topic.aio.reader("latest")
        for number in range(TAIL_SAMPLE + 1):
            waiting = asyncio.ensure_future(reader.next_batch())
            await asyncio.sleep(0)
            assert not waiting.done()
            topic.append(b"%d" % number)
            assert payloads(await waiting) == [b"%d" % number]
        reader.close()

    with ister.open() as log:
        asyncio.run(scenario(log))
        assert log.metrics.snapshot()["wal.tail_read_latency_ms"]["count"] == 2


def test_replay_measures_no_latency_of_the_tail(tmp_path):
    with ister.open(tmp_path) as log:
        topic = log.topic("/default/a", create=True)
        fill(topic, 3000)
        assert len(payloads(topic.read("earliest"))) == 3000
        assert log.metrics.snapshot()["wal.tail_read_latency_ms"]["count"] == 0


def test_parts_in_flight_are_counted_while_an_object_is_under_way(site):
    log = site.open("a", storage={"uploader": {"stream_chunk_size": 65536, "concurrent_parts": 2}})
    topic = log.topic(str(NAME), create=True)
    fill(topic, 40, size=8000)
    seen = []
    site.objects.before = lambda *_: seen.append(log.metrics.snapshot()["upload.inflight_parts"])
    topic.upload()
    assert max(seen) == 2
    assert log.metrics.snapshot()["upload.inflight_parts"] == 0


# -- figures by kind ----------------------------------------------------------------------------


def test_each_way_to_append_is_timed(site):
    log = site.open("a")
    topic = log.topic(str(NAME), create=True)

    def timed():
        return log.metrics.snapshot()["wal.append_enq_latency_us"]["count"]

    topic.append(b"x")  # the offset 0 is among those that are measured
    assert timed() == 1
    rows = pa.record_batch({"payload": pa.array([b"a", b"b"])})
    for times, append in enumerate(
        (
            lambda: topic.append_many([b"a", b"b"]),
            lambda: topic.append_arrow(rows),
            lambda: topic.appender.append_record(a_message(topic_name=str(NAME))),
            lambda: topic.appender.append_payloads(
                Payloads(tuple(range(4)), memoryview(b"abc"), 3)
            ),
        ),
        2,
    ):
        append()
        assert timed() == times


def test_local_files_are_told_in_bytes_whoever_wrote_them(site):
    log = site.open("a", rotate_max_bytes=4096, **KEEP_NOTHING)
    topic = log.topic(str(NAME), create=True)
    for _ in range(8):
        fill(topic, 4, size=600)

    def sizes(log, topic):
        told = log.metrics.snapshot()["wal.file_bytes"]
        assert told == sum(topic.wal.directory.log_size(file.seq) for file in topic.wal.files)
        return told

    before = sizes(log, topic)
    assert len(topic.wal.files) > 2
    log.close()
    log = site.open("a", rotate_max_bytes=4096, **KEEP_NOTHING)
    topic = log.topic(str(NAME))
    assert sizes(log, topic) == before
    topic.upload()
    assert topic.bucket.retention.trim()
    assert 0 <= sizes(log, topic) < before


def test_reads_of_whole_objects_and_of_parts_are_told_apart(site):
    storage = {"cloud_reader": {"fetch_chunk_size": 65536}}
    log = site.open("a", rotate_max_bytes=4096, storage=storage, cache_capacity=1, **KEEP_NOTHING)
    topic = log.topic(str(NAME), create=True)
    held = []

    def replayed():
        """Uploads, trims, and reads all of it; returns the requests of a part, and full ones."""
        start = topic.watermarks.tiered
        topic.upload()
        assert topic.bucket.retention.trim()
        before = log.metrics.snapshot()
        with topic.reader(start) as reader:
            while reader.poll(10):
                held.append(log.metrics.snapshot()["wal_reader.memory_bytes.bucket"])
        after = log.metrics.snapshot()
        name = "cloud_reader.range_requests_total"
        return [after[f"{name}.{kind}"] - before[f"{name}.{kind}"] for kind in ("ranged", "full")]

    for _ in range(2):
        fill(topic, 10, size=1000)
    assert replayed() == [0, 1]
    for _ in range(4):
        fill(topic, 100, size=1000)
    ranged, full = replayed()
    assert ranged >= 3
    assert full == 0
    assert max(held) > 1000


def test_upload_after_a_failed_one_is_a_retry(site):
    log = site.open("a")
    topic = log.topic(str(NAME), create=True)
    fill(topic, 4)
    site.objects.before = lambda kind, key: silent() if kind == "write" else None
    for _ in range(2):
        with pytest.raises(UnavailableError):
            topic.upload()
    site.objects.before = calm
    topic.upload()
    fill(topic, 4)
    topic.upload()
    counted = log.metrics.snapshot()
    assert (counted["upload.retries"], counted["uploader.errors_total"]) == (2, 2)
    assert counted["session.resume_events"] == 2
    assert counted["session.abort_events"] == 2
    assert counted["upload.batch_bytes"]["count"] == 2
