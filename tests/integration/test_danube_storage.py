"""The scenarios of Danube's own tests of its storage, on every pair of stores.

Each docstring, or each row, names the original test of `danube-persistent-storage/tests`. Danube's
`shared_fs` is the bucket in a directory here, its `cloud_native` the one in S3, and its metadata is
in etcd; scenarios run on both kinds of bucket with both kinds of metadata.
"""

import os
from itertools import product

import pytest

from ister.base.model import TopicState
from ister.config import load_config
from ister.errors import ConfigError, DiskError, NotFoundError
from ister.wal.directory import WalDirectory
from tests.integration.places import (
    PUBLISHED_MS,
    TOPIC,
    Place,
    catalog,
    counted,
    descriptors,
    fill,
    grow_old,
    has_nothing,
    object_names,
    offsets,
    read_from,
    record,
    stored_keys,
    take,
    three_files,
    tiered_offsets,
)
from tests.servers.etcd import EtcdServer
from tests.servers.s3 import rclone_server
from tests.support.danube_storage import StartPosition, WalStorageFactory
from tests.support.machine import Task, eventually, numbered, payloads
from tests.support.scale import nightly

MIB = 1024 * 1024
PLACES = ("fs+sqlite", nightly("s3+sqlite"), nightly("fs+etcd"), "s3+etcd")


@pytest.fixture(scope="module")
def s3():
    with rclone_server() as server:
        yield server


@pytest.fixture(scope="module")
def etcd():
    with EtcdServer() as server:
        yield server


@pytest.fixture(params=PLACES)
def place(request, tmp_path):
    """Each pair of stores in turn, with a prefix of its own."""
    servers = {
        name: request.getfixturevalue(name)
        for name in request.param.split("+")[:2]
        if name in ("s3", "etcd")
    }
    with Place(tmp_path, **servers) as place:
        yield place


# -- readers ------------------------------------------------------------------------------------

# How many messages are in a sealed history, in the bucket alone, in files and in the cache; and
# what reading all of them counts.
WHEREABOUTS = {
    "streams_handoff: local_cache_only": (
        {"cache": 6},
        {"reader.history_entered_total": 0, "wal.reader.stitch_file_bytes": 0},
    ),
    "streams_handoff: local_files_cache_live": (
        {"files": 4, "cache": 2},
        {"reader.history_entered_total": 0, "wal.reader.stitch_cache_items": 2},
    ),
    "one_topic_one_subsc: durable_history_handoff_reading": (
        {"sealed": 20, "cache": 10},
        {"reader.history_entered_total": 1, "wal.reader.stitch_file_bytes": 0},
    ),
    "warm_tier_read: 120 messages": (
        {"bucket": 40, "files": 40, "cache": 40},
        {
            "reader.history_entered_total": 1,
            "reader.handoffs_total": 1,
            "wal.reader.stitch_cache_items": 40,
        },
    ),
}


@pytest.mark.parametrize("row", WHEREABOUTS)
def test_messages_are_read_from_wherever_they_lie_and_on_to_the_live_tail(place, row):
    """Also `…_replay_and_live_continuity` and the `tail_reading` and `…start_positions` tests."""
    counts, expected = WHEREABOUTS[row]
    node, storage = lay_out(place, **counts)
    end = sum(counts.values())
    read_from(storage, 0)
    assert {name: counted(node, name) for name in expected} == expected
    starts = sorted({0, end // 3, end // 2, end - 1, end})
    streams = {start: storage.create_reader(TOPIC, StartPosition.at(start)) for start in starts}
    latest = [storage.create_reader(TOPIC, StartPosition.latest()) for _ in range(3)]
    found = {start: take(stream, end - start) for start, stream in streams.items()}
    assert all(map(has_nothing, [*streams.values(), *latest]))
    assert fill(storage, numbered(2, first=end)) == range(end, end + 2)
    for start, stream in streams.items():
        all_of_it = found[start] + take(stream, 2)
        assert offsets(all_of_it) == list(range(start, end + 2))
        # Some are filled up, so that their file ends where it has to.
        came = [payload.rstrip(b".") for payload in payloads(all_of_it)]
        assert came == numbered(end + 2 - start, first=start)
        stream.close()
    for stream in latest:
        assert payloads(take(stream, 2)) == numbered(2, first=end)
        assert has_nothing(stream)
        stream.close()


def test_stream_passes_from_a_bucket_in_memory_to_files(tmp_path):
    """`streams_handoff: chaining_stream_handoff_memory`: both stores in memory."""
    wal = {"dir": str(tmp_path / "wal"), "cache_capacity": 1, "rotate_max_bytes": 4096}
    config = load_config(
        {
            "storage": {
                "wal": wal | {"retention": {"time_minutes": 0}},
                "uploader": {"engine": "none"},
                "cloud": {"backend": "memory"},
                "metadata": {"backend": "memory"},
            }
        },
        {},
    )
    with WalStorageFactory(config) as factory:
        storage = factory.for_topic(TOPIC)
        sent = make_tiers(storage, bucket=3, files=3)
        assert payloads(read_from(storage, 0)) == sent
        assert counted(factory, "reader.handoffs_total") == 1


def test_start_behind_the_history_opens_no_object(place):
    """`streams_handoff: skip_durable_history_when_start_after_segments`."""
    _, storage = lay_out(place, sealed=3, cache=3)
    metrics = storage.topic._metrics
    for start, opened in ((3, 0), (2, 1)):
        assert payloads(read_from(storage, start)) == numbered(6 - start, first=start)
        assert metrics.snapshot()["cloud_reader.objects_opened_total"] == opened


def test_readers_keep_positions_and_speeds_of_their_own(place):
    """`one_topic_multiple_subsc: independent_positions` and `different_speeds`."""
    storage = place.node("one", wal={"cache_capacity": 8}).for_topic(TOPIC)
    fill(storage, numbered(12))
    slow, given_up, fast = (storage.create_reader(TOPIC, StartPosition.at(s)) for s in (0, 3, 7))
    assert [offsets(take(one, 2)) for one in (slow, given_up, fast)] == [[0, 1], [3, 4], [7, 8]]
    given_up.close()
    for first in range(12, 72, 10):
        fill(storage, numbered(10, first=first))
        take(fast, storage.topic.wal.next - fast.reader.next_offset)
    assert fast.reader.next_offset == 72
    assert payloads(take(slow, 70)) == numbered(70, first=2)
    slow.close()
    fast.close()


def test_readers_at_once_follow_a_producer_that_goes_on_writing(place):
    """`concurrent_reading` and `concurrent_write_read`, over rotations and uploads under way."""
    one = place.node("one", uploads=True, wal={"cache_capacity": 16})
    storage = one.for_topic(TOPIC)
    count = 300
    streams = [storage.create_reader(TOPIC, StartPosition.at(0)) for _ in range(4)]
    tasks = [Task(take, stream, count) for stream in streams]
    fill(storage, numbered(count, size=50), every=6)
    for task, stream in zip(tasks, streams, strict=True):
        found = task.result()
        assert offsets(found) == list(range(count))
        assert payloads(found) == numbered(count, size=50)
        stream.close()
    assert len(place.logs("one")) > 2


def test_messages_come_back_whole_and_in_order(place):
    """`one_topic_one_subsc: basic_flow`, and `resume_from_position` at 10 of 40."""
    one = place.node("one")
    storage = one.for_topic(TOPIC)
    sent = [
        record(b"%d" % number, request_id=number, attributes={"n": str(number)}, routing_key="k")
        for number in range(40)
    ]
    assert [storage.append_message(TOPIC, message) for message in sent] == list(range(40))
    storage.wait(39)
    found = read_from(storage, 0)
    assert [(m.request_id, m.payload, m.attributes, m.routing_key) for m in found] == [
        (m.request_id, m.payload, m.attributes, m.routing_key) for m in sent
    ]
    assert {(m.publish_time, m.producer_name) for m in found} == {(PUBLISHED_MS, "p")}
    assert storage.ack_checkpoint(TOPIC, 9, "reports") == 10
    one.shutdown()
    storage = place.node("one").for_topic(TOPIC)
    assert storage.checkpoint(TOPIC, "reports") == 10
    assert offsets(read_from(storage, 10)) == list(range(10, 40))


def test_rotated_files_are_uploaded_and_read_without_a_gap(place):
    """`one_topic_one_subsc: wal_rotation_and_upload`."""
    one = place.node("one")
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(60, size=500), every=5)
    assert len(place.logs("one")) > 4
    storage.topic.upload()
    assert tiered_offsets(one) == list(range(60))
    assert payloads(read_from(storage, 0)) == numbered(60, size=500)


def test_message_of_one_mebibyte_comes_back_from_every_tier(place):
    """`one_topic_one_subsc: large_message_handling`."""
    one = place.node("one", cloud_reader={"fetch_chunk_size": 64 * 1024})
    storage = one.for_topic(TOPIC)
    sent = [b"before", os.urandom(MIB), b"after"]
    fill(storage, sent, every=1)
    assert payloads(read_from(storage, 0)) == sent
    one.flush_and_seal(TOPIC)
    storage = place.node("two", cloud_reader={"fetch_chunk_size": 64 * 1024}).for_topic(TOPIC)
    assert payloads(read_from(storage, 0)) == sent


# -- owners: shared_fs_* and cloud_native_* -----------------------------------------------------


def test_owners_in_a_row_keep_every_offset_once(place):
    """`…_multiple_owner_changes_…`, and the first owner again, whose own files are long gone."""
    names = ("one", "two", "three", "one")
    for turn, name in enumerate(names):
        node = place.node(name)
        storage = node.for_topic(TOPIC)
        assert fill(storage, numbered(2, first=2 * turn)) == range(2 * turn, 2 * turn + 2)
        assert payloads(read_from(storage, 0)) == numbered(2 * turn + 2)
        assert node.flush_and_seal(TOPIC) == 2 * turn + 2
        assert tiered_offsets(node) == list(range(2 * turn + 2))
        assert not place.files(name).exists()
        if turn < len(names) - 1:
            node.shutdown()


def test_checkpoint_of_missing_local_files_goes_on_behind_the_catalog(place):
    """`cloud_native_recovers_from_catalog_when_checkpoint_points_to_missing_local_files`."""
    one = place.node("one")
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(3))
    storage.topic.upload()
    one.shutdown()
    for path in place.files("one").glob("wal*.log"):
        path.unlink()
    assert (place.files("one") / "wal.ckpt").exists()

    one = place.node("one")
    storage = one.for_topic(TOPIC)
    assert descriptors(one)[-1].end == 3
    assert fill(storage, [b"3"]) == range(3, 4)
    assert payloads(read_from(storage, 0)) == numbered(4)


@pytest.mark.nightly
def test_segments_are_exported_periodically_while_the_topic_is_owned(place):
    """`shared_fs_periodically_exports_segments_during_active_ownership`: without a seal."""
    one = place.node("one", uploads=True)
    storage = one.for_topic(TOPIC)
    for count in (4, 7):
        fill(storage, numbered(count - storage.topic.wal.next, first=storage.topic.wal.next))
        eventually(lambda: storage.topic.watermarks.tiered == count, "the export")  # noqa: B023
        assert tiered_offsets(one) == list(range(count))
    assert catalog(one).sealed() is None
    assert storage.topic.state is TopicState.OPEN
    assert fill(storage, [b"7"]) == range(7, 8)
    assert payloads(read_from(storage, 0)) == numbered(8)


def test_durable_storage_without_a_wal_directory_is_refused(place):
    """`shared_fs_requires_wal_dir_for_durable_wal_state`."""
    settings = place.settings("one")
    del settings["wal"]["dir"]
    with pytest.raises(ConfigError, match=r"storage\.wal\.dir"):
        WalStorageFactory(load_config({"storage": settings}, {}))


def test_delete_removes_objects_descriptors_seal_and_local_files(place):
    """`shared_fs_delete_removes_catalog_and_durable_segments` and `cloud_native_delete_…`.

    First of a sealed topic that nobody has open, then of one that its next owner has.
    """
    one = place.node("one")
    other = "/default/kept"
    fill(one.for_topic(other), numbered(2))
    one.for_topic(other).topic.upload()
    two = place.node("two")
    for is_open in (False, True):
        fill(one.for_topic(TOPIC), numbered(3))
        one.flush_and_seal(TOPIC)
        assert catalog(one).sealed() is not None
        if is_open:
            storage = two.for_topic(TOPIC)
            fill(storage, numbered(2, first=3))
            storage.topic.upload()
            storage.ack_checkpoint(TOPIC, 1)
            assert len(descriptors(two)) == 2
        two.delete_storage(TOPIC)
        assert stored_keys(two) == descriptors(two) == []
        assert two.log.stores.metadata.range(catalog(two).keys.storage) == []
        assert two.log.stores.metadata.range(catalog(two).keys.subscriptions) == []
        assert catalog(two).sealed() is None
        assert not place.files("two").exists()
        assert TOPIC not in two.log.topics()
        assert tiered_offsets(one, other) == [0, 1], "another topic is not concerned"
        with pytest.raises(NotFoundError):
            two.log.topic(TOPIC)
    again = two.for_topic(TOPIC)
    assert fill(again, [b"anew"]) == range(1)
    assert payloads(read_from(again, 0)) == [b"anew"]


def test_local_topic_is_sealed_reloaded_and_replayed_whole(tmp_path):
    """`local_mode_append_read_seal_reload_continuity`: a seal keeps the files, nothing leaves."""
    config = load_config(
        {"storage": {"mode": "local_only", "wal": {"dir": str(tmp_path / "wal")}}}, {}
    )
    with WalStorageFactory(config) as factory:
        storage = factory.for_topic(TOPIC)
        fill(storage, numbered(3))
        assert payloads(read_from(storage, 0)) == numbered(3)
        assert factory.flush_and_seal(TOPIC) == 3
        assert (tmp_path / "wal/default/orders/wal.log").stat().st_size > 0
        assert factory.log.stores is None
    with WalStorageFactory(config) as factory:
        storage = factory.for_topic(TOPIC)
        assert storage.topic.wal.next == 3
        assert fill(storage, [b"3"]) == range(3, 4)
        assert payloads(read_from(storage, 0)) == numbered(4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wal"]


@pytest.mark.nightly
def test_acknowledged_messages_outlive_the_loss_of_the_wal_directory(place):
    """`write_buffer_valkey`: an ack waits for the second copy; the WAL directory goes; replay.

    The second copy is the bucket's (`ack: tiered`), and another node takes over. Without a
    counterpart: the stream's entry ids, WAIT for replicas and its policies, trimming of the
    stream, its connection. All of these belong to Valkey.
    """
    one = place.node("one", uploads=True, ack="tiered", metadata={"lease_ttl_seconds": 3})
    storage = one.for_topic(TOPIC)
    for payload in numbered(120):
        offset = storage.append_message(TOPIC, record(payload))
    storage.wait(offset)
    place.kill(one)
    for path in place.files("one").iterdir():
        path.unlink()

    two = place.node("two")
    eventually(lambda: catalog(two).owner() is None, "the end of the lease")
    storage = two.for_topic(TOPIC, take_over=True)
    assert storage.topic.wal.next == 120
    assert payloads(read_from(storage, 0)) == numbered(120)


# -- many topics: factory tests and multiple_topics ---------------------------------------------


def test_topics_of_one_factory_share_nothing(place):
    """`…_multi_topic_wal_isolation`, `…_segment_export_isolation`, `isolated_storage`,
    `independent_segment_exports`, `namespace_isolation`, `factory_…_hot_handoff_per_topic`.
    """
    one = place.node("one")
    exports = {"/default/busy": 3, "/default/idle": 0, "/sales/orders": 1, "/audit/orders": 1}

    def sent(name, numbers):
        return [f"{name} {number}".encode() for number in numbers]

    for name in exports:
        assert fill(one.for_topic(name), sent(name, range(2))) == range(2)
    for name, other in product(exports, exports):
        (log,) = place.logs("one", name)
        assert (f"{other} 0".encode() in log.read_bytes()) == (name == other)
    for name, count in exports.items():
        storage = one.for_topic(name)
        for number in range(count):
            storage.topic.upload()
            fill(storage, sent(name, (number + 2,)))
    for name, count in exports.items():
        assert len(descriptors(one, name)) == len(object_names(one, name)) == count
        last = count + 1 if count else 0
        assert tiered_offsets(one, name) == list(range(last))
        assert one.for_topic(name).topic.watermarks.tiered == last
    one.delete_storage("/sales/orders")
    assert stored_keys(one, "/sales/orders") == []
    assert tiered_offsets(one, "/audit/orders") == [0, 1]
    del exports["/sales/orders"]
    # Each history goes on at the next owner, at the end that is its own.
    for name in exports:
        one.flush_and_seal(name)
    two = place.node("two")
    for name, count in exports.items():
        storage = two.for_topic(name)
        end = 2 + count
        assert fill(storage, sent(name, (end,))) == range(end, end + 1)
        assert payloads(read_from(storage, 0)) == sent(name, range(end + 1))


def test_topics_with_different_loads_are_written_read_and_uploaded_at_once(place):
    """`multiple_topics: concurrent_operations`, `mixed_workloads`, `different_read_patterns`."""
    one = place.node("one", uploads=True)
    many, few = numbered(200), [b"%d" % number + b"x" * 100_000 for number in range(5)]
    # What is sent, how many messages a write, and where the reader begins.
    loads = {"/default/small": (many, 20, 0), "/default/large": (few, 1, 0)}
    loads["/default/middle"] = (numbered(40), 8, 6)
    loads["/default/other"] = (numbered(40), 8, 0)

    def work(name):
        sent, every, start = loads[name]
        storage = one.for_topic(name)
        with storage.create_reader(name, StartPosition.at(0)) as stream:
            fill(storage, sent, every=every)
            found = take(stream, len(sent))[start:]
        storage.wait(len(sent) - 1, "tiered")
        return offsets(found), payloads(found), offsets(read_from(storage, start))

    for name, task in {name: Task(work, name) for name in loads}.items():
        sent, _, start = loads[name]
        expected = list(range(start, len(sent)))
        assert task.result() == (expected, sent[start:], expected)
        assert tiered_offsets(one, name) == list(range(len(sent)))


def test_factory_hands_out_the_same_storage_every_time(place):
    """`multiple_topics: factory_reuse`."""
    one = place.node("one")
    storage = one.for_topic(TOPIC)
    assert one.for_topic(TOPIC) is storage
    assert one.for_topic(TOPIC.removeprefix("/")) is storage


# -- wal_retention ------------------------------------------------------------------------------


def test_time_based_retention_removes_the_old_uploaded_file_alone(place):
    """`wal_retention: time_based_end_to_end`, and `multi_topic_independence`."""
    one = place.node("one", wal={"cache_capacity": 8, "retention": {"time_minutes": 5}})
    uploaded, waiting, young = (one.for_topic(f"/default/{name}") for name in ("a", "b", "c"))
    for storage in (uploaded, waiting, young):
        three_files(storage)
    for name in ("/default/a", "/default/b"):
        grow_old(place.logs("one", name)[0])
    assert uploaded.topic.bucket.retention.trim() == 0, "nothing is in the bucket yet"
    uploaded.topic.upload()
    young.topic.upload()
    assert [s.topic.bucket.retention.trim() for s in (uploaded, waiting, young)] == [1, 0, 0]
    assert [s.topic.watermarks.trimmed for s in (uploaded, waiting, young)] == [100, 0, 0]
    assert [path.name for path in place.logs("one", "/default/a")] == ["wal.1.log", "wal.2.log"]
    state = WalDirectory(one.log._fs, str(place.files("one", "/default/a"))).load_state()
    assert state.checkpoint.start_offset == 100
    for storage, start in product((uploaded, waiting, young), (0, 99, 100, 120)):
        assert len(read_from(storage, start)) == 200 - start


def test_reader_under_way_does_not_notice_retention(place):
    """`wal_retention: stateful_reader_after_retention`: from 0, from the middle, under way."""
    one = place.node("one", wal={"cache_capacity": 8, "retention": {"time_minutes": 0}})
    storage = one.for_topic(TOPIC)
    three_files(storage)
    storage.topic.upload()
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        before = take(stream, 40)
        eventually(
            lambda: storage.topic.bucket.retention.trim() or storage.topic.watermarks.trimmed == 150
        )
        assert place.logs("one")[0].name == "wal.2.log"
        found = before + take(stream, 160)
    assert offsets(found) == list(range(200))
    for start in (0, 75, 150, 180):
        read_from(storage, start)


# -- src unit tests: the others are in tests/unit, as docs/TESTING.md says -------------------------


def test_sparse_index_leads_to_the_offset_without_reading_the_file(place):
    """`src` unit test of the index: seeking reads a chunk, not everything before it."""
    one = place.node(wal={"rotate_max_bytes": 64 * MIB, "cache_capacity": 1})
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(800, size=10_000))
    with storage.create_reader(TOPIC, StartPosition.at(700)) as stream:
        (found,) = stream.next_batch(1)
    assert found.payload == numbered(1, first=700, size=10_000)[0]
    assert counted(one, "wal.reader.stitch_file_bytes") < 5 * MIB
    assert place.logs()[0].stat().st_size > 7 * MIB


def test_deleter_passes_over_a_file_that_is_missing(place):
    """`src` unit test of the deleter with a missing file: the bucket serves its messages."""
    storage = place.node(wal={"cache_capacity": 1, "retention": {"time_minutes": 5}}).for_topic(
        TOPIC
    )
    three_files(storage)
    storage.topic.upload()
    for path in place.logs():
        grow_old(path)
    place.logs()[0].unlink()
    assert offsets(read_from(storage, 0)) == list(range(200))
    storage.topic.bucket.retention.trim()
    assert [path.name for path in place.logs()] == ["wal.2.log"]
    assert storage.topic.watermarks.trimmed == 150


def test_wal_path_that_cannot_be_a_directory_fails_at_the_start(place, tmp_path):
    """`src` unit test: an invalid WAL path fails when the factory starts."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskError):
        place.node(wal={"dir": str(tmp_path / "file" / "wal")})


# -- how topics get into shape ------------------------------------------------------------------


def lay_out(place, *, sealed=0, bucket=0, files=0, cache=0):
    """A topic with messages in each place, their numbers as payloads; its node and storage."""
    wal = {"cache_capacity": cache, "retention": {"time_minutes": 0}}
    node = place.node("one", wal=wal)
    storage = node.for_topic(TOPIC)
    if sealed:
        fill(storage, numbered(sealed))
        node.flush_and_seal(TOPIC)
        node = place.node("two", wal=wal)
        storage = node.for_topic(TOPIC)
    if bucket:
        make_tiers(storage, bucket=bucket, files=files)
    else:
        fill(storage, numbered(files, first=sealed))
    fill(storage, numbered(cache, first=storage.topic.wal.next))
    return node, storage


def make_tiers(storage, *, bucket, files):
    """Messages that only the bucket has, and behind them messages that only local files have."""
    sent = numbered(bucket, size=4096 // bucket)
    sent += numbered(files, first=bucket, size=4096 // files)
    fill(storage, sent[:bucket])
    storage.topic.upload()
    fill(storage, sent[bucket:])
    eventually(storage.topic.bucket.retention.trim, "the first file is a millisecond old")
    assert storage.topic.watermarks.trimmed == bucket
    return sent
