"""The scenarios of Danube's own tests of its storage, on every pair of stores.

Each docstring names the original test, of `danube-persistent-storage/tests` unless it says
otherwise. Danube's `shared_fs` is the bucket in a directory here, its `cloud_native` the one in S3,
and its metadata is in etcd; scenarios run on both kinds of bucket with both kinds of metadata.
"""

import os
import threading
import zlib

import pytest

from ister.config import load_config
from ister.errors import ClosedError, ConfigError, CorruptDataError, DiskError, NotFoundError
from ister.format.frame import scan_frames
from ister.model import TopicState
from ister.wal.directory import WalDirectory
from tests.integration.places import (
    PUBLISHED_MS,
    TOPIC,
    Place,
    catalog,
    counted,
    descriptors,
    fill,
    flip_byte,
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


@pytest.fixture
def local_place(tmp_path):
    """A directory and SQLite, for what the stores have no part in."""
    with Place(tmp_path) as place:
        yield place


# -- owners: shared_fs_* and cloud_native_* -----------------------------------------------------


def test_sealed_topic_is_replayed_from_the_bucket_and_goes_on_live_at_the_next_owner(place):
    """`cloud_native_seal_takeover_replay_and_live_continuity`, and its `shared_fs` twin."""
    one = place.node("one")
    fill(one.for_topic(TOPIC), numbered(3))
    assert one.flush_and_seal(TOPIC) == 3
    assert tiered_offsets(one) == [0, 1, 2]
    assert not place.files("one").exists()

    storage = place.node("two").for_topic(TOPIC)
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        assert payloads(take(stream, 3)) == numbered(3)
        assert has_nothing(stream)
        assert fill(storage, [b"live"]) == range(3, 4)
        (live,) = take(stream, 1)
        assert (live.payload, live.msg_id.topic_offset) == (b"live", 3)


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
    """`shared_fs_delete_removes_catalog_and_durable_segments` and `cloud_native_delete_…`."""
    one = place.node("one")
    other = "/default/kept"
    fill(one.for_topic(TOPIC), numbered(3))
    fill(one.for_topic(other), numbered(2))
    one.for_topic(other).topic.upload()
    one.flush_and_seal(TOPIC)
    two = place.node("two")
    storage = two.for_topic(TOPIC)
    fill(storage, numbered(2, first=3))
    storage.topic.upload()
    storage.ack_checkpoint(TOPIC, 1)
    assert len(descriptors(two)) == 2

    two.delete_storage(TOPIC)
    assert stored_keys(two) == []
    assert two.log.tiers.metadata.range(catalog(two).keys.storage) == []
    assert two.log.tiers.metadata.range(catalog(two).keys.subscriptions) == []
    assert not place.files("two").exists()
    assert TOPIC not in two.log.topics()
    assert tiered_offsets(one, other) == [0, 1], "another topic is not concerned"
    with pytest.raises(NotFoundError):
        two.log.topic(TOPIC)
    again = two.for_topic(TOPIC)
    assert fill(again, [b"anew"]) == range(1)
    assert payloads(read_from(again, 0)) == [b"anew"]


def test_delete_of_a_sealed_topic_that_nobody_has_open_removes_everything(place):
    """The part of `…_delete_removes_catalog_and_durable_segments` about the sealed state."""
    one = place.node("one")
    fill(one.for_topic(TOPIC), numbered(3))
    one.flush_and_seal(TOPIC)
    assert catalog(one).sealed() is not None

    two = place.node("two")
    two.delete_storage(TOPIC)
    assert stored_keys(two) == []
    assert catalog(two).sealed() is None
    assert descriptors(two) == []
    assert not place.files("two").exists()


def test_three_owners_in_a_row_keep_every_offset_once(place):
    """`…_multiple_owner_changes_preserve_offsets_without_duplicates`: 0..4 once each."""
    for name, count in (("one", 2), ("two", 2)):
        node = place.node(name)
        storage = node.for_topic(TOPIC)
        first = storage.topic.wal.next
        assert fill(storage, numbered(count, first=first)) == range(first, first + count)
        node.flush_and_seal(TOPIC)
    three = place.node("three")
    storage = three.for_topic(TOPIC)
    assert fill(storage, [b"4"]) == range(4, 5)
    assert payloads(read_from(storage, 0)) == numbered(5)
    storage.topic.upload()
    assert tiered_offsets(three) == [0, 1, 2, 3, 4]


def test_topic_that_comes_back_to_its_first_owner_goes_on(place):
    """More of the same: the first owner has the topic again, and its own files are long gone."""
    for turn, name in enumerate(("one", "two", "one")):
        node = place.node(name)
        assert fill(node.for_topic(TOPIC), [b"%d" % turn]) == range(turn, turn + 1)
        assert payloads(read_from(node.for_topic(TOPIC), 0)) == numbered(turn + 1)
        node.flush_and_seal(TOPIC)
        node.shutdown()


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
        assert factory.log.tiers is None
    with WalStorageFactory(config) as factory:
        storage = factory.for_topic(TOPIC)
        assert storage.topic.wal.next == 3
        assert fill(storage, [b"3"]) == range(3, 4)
        assert payloads(read_from(storage, 0)) == numbered(4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wal"]


# -- many topics: factory tests and multiple_topics ---------------------------------------------


def test_topics_of_one_factory_have_files_of_their_own(place):
    """`test_factory_multi_topic_wal_isolation`."""
    one = place.node("one")
    names = ["/default/a", "/default/b"]
    for name in names:
        fill(one.for_topic(name), [f"only in {name}".encode()])
    for name, other in zip(names, reversed(names), strict=True):
        (log,) = place.logs("one", name)
        assert f"only in {name}".encode() in log.read_bytes()
        assert f"only in {other}".encode() not in log.read_bytes()


def test_topics_of_one_factory_have_objects_of_their_own(place):
    """`test_multi_topic_segment_export_isolation`."""
    one = place.node("one")
    for name, count in (("/default/a", 2), ("/default/b", 5)):
        storage = one.for_topic(name)
        fill(storage, numbered(count))
        storage.topic.upload()
    for name, last in (("/default/a", 1), ("/default/b", 4)):
        assert object_names(one, name) == [f"data-0-{last}.dnb1"]
        assert tiered_offsets(one, name) == list(range(last + 1))


def test_topics_count_their_offsets_from_zero_each(place):
    """`multiple_topics: isolated_storage`."""
    one = place.node("one")
    for number in range(3):
        name = f"/default/topic-{number}"
        sent = [b"%d:%d" % (number, message) for message in range(4)]
        assert fill(one.for_topic(name), sent) == range(4)
    for number in range(3):
        storage = one.for_topic(f"/default/topic-{number}")
        expected = [b"%d:%d" % (number, message) for message in range(4)]
        assert payloads(read_from(storage, 0)) == expected


def test_one_topics_exports_do_not_touch_another_topic(place):
    """`multiple_topics: independent_segment_exports`."""
    one = place.node("one")
    busy, idle = one.for_topic("/default/busy"), one.for_topic("/default/idle")
    fill(idle, numbered(2))
    for round_number in range(3):
        fill(busy, numbered(2, first=2 * round_number))
        busy.topic.upload()
    assert len(descriptors(one, "/default/busy")) == 3
    assert descriptors(one, "/default/idle") == []
    assert idle.topic.watermarks.tiered == 0
    idle.topic.upload()
    assert tiered_offsets(one, "/default/idle") == [0, 1]
    assert tiered_offsets(one, "/default/busy") == [0, 1, 2, 3, 4, 5]


def test_topics_are_written_read_and_uploaded_at_once(place):
    """`multiple_topics: concurrent_operations`."""
    one = place.node("one", uploads=True)
    count = 40

    def work(name):
        storage = one.for_topic(name)
        with storage.create_reader(name, StartPosition.at(0)) as stream:
            fill(storage, numbered(count), every=8)
            found = take(stream, count)
        storage.wait(count - 1, "tiered")
        return offsets(found), payloads(found)

    names = [f"/default/topic-{number}" for number in range(4)]
    for task in [Task(work, name) for name in names]:
        assert task.result() == (list(range(count)), numbered(count))
    for name in names:
        assert tiered_offsets(one, name) == list(range(count))


def test_topics_are_read_from_their_beginning_middle_and_end(place):
    """`multiple_topics: different_read_patterns`."""
    one = place.node("one")
    starts = {
        "/default/beginning": StartPosition.at(0),
        "/default/middle": StartPosition.at(6),
        "/default/end": StartPosition.latest(),
    }
    streams = {}
    for name, start in starts.items():
        fill(one.for_topic(name), numbered(10))
        streams[name] = one.for_topic(name).create_reader(name, start)
        fill(one.for_topic(name), numbered(2, first=10))
    for name, first in (("/default/beginning", 0), ("/default/middle", 6), ("/default/end", 10)):
        with streams[name] as stream:
            assert offsets(take(stream, 12 - first)) == list(range(first, 12))
            assert has_nothing(stream)


def test_factory_hands_out_the_same_storage_every_time(place):
    """`multiple_topics: factory_reuse`."""
    one = place.node("one")
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(2))
    again = one.for_topic(TOPIC)
    assert again is storage
    assert one.for_topic(TOPIC.removeprefix("/")) is storage
    assert fill(again, [b"2"]) == range(2, 3)
    assert payloads(read_from(storage, 0)) == numbered(3)


def test_same_topic_name_in_two_namespaces_is_two_topics(place):
    """`multiple_topics: namespace_isolation`."""
    one = place.node("one")
    for namespace in ("sales", "audit"):
        storage = one.for_topic(f"/{namespace}/orders")
        assert fill(storage, [namespace.encode()]) == range(1)
        storage.topic.upload()
    one.delete_storage("/sales/orders")
    assert stored_keys(one, "/sales/orders") == []
    assert tiered_offsets(one, "/audit/orders") == [0]
    assert payloads(read_from(one.for_topic("/audit/orders"), 0)) == [b"audit"]


def test_topics_with_different_loads_do_not_disturb_each_other(place):
    """`multiple_topics: mixed_workloads`: many small, few large, and one that only reads."""
    one = place.node("one", uploads=True)
    small, large, quiet = (one.for_topic(f"/default/{name}") for name in ("small", "large", "q"))
    fill(quiet, numbered(5))
    tasks = [
        Task(fill, small, numbered(200), every=20),
        Task(fill, large, [b"%d" % number + b"x" * 100_000 for number in range(5)], every=1),
        Task(read_from, quiet, 0),
    ]
    assert [len(task.result()) for task in tasks] == [200, 5, 5]
    for storage, count in ((small, 200), (large, 5), (quiet, 5)):
        assert len(read_from(storage, 0)) == count
        storage.wait(count - 1, "tiered")
        assert tiered_offsets(one, storage.topic.name) == list(range(count))


# -- one_topic_multiple_subsc -------------------------------------------------------------------


def test_readers_keep_positions_of_their_own(place):
    """`one_topic_multiple_subsc: independent_positions`."""
    storage = place.node("one").for_topic(TOPIC)
    fill(storage, numbered(12))
    streams = [storage.create_reader(TOPIC, StartPosition.at(start)) for start in (0, 3, 7)]
    assert [offsets(take(stream, 2)) for stream in streams] == [[0, 1], [3, 4], [7, 8]]
    streams[1].close()
    assert offsets(take(streams[0], 10)) == list(range(2, 12))
    assert offsets(take(streams[2], 3)) == [9, 10, 11]
    for stream in streams:
        stream.close()


def test_readers_at_once_all_get_everything(place):
    """`one_topic_multiple_subsc: concurrent_reading`."""
    storage = place.node("one").for_topic(TOPIC)
    count = 60
    ready = threading.Barrier(5)

    def read():
        with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
            ready.wait(60)
            return payloads(take(stream, count))

    tasks = [Task(read) for _ in range(4)]
    ready.wait(60)
    fill(storage, numbered(count), every=10)
    assert [task.result() for task in tasks] == [numbered(count)] * 4


def test_readers_pass_from_the_bucket_to_the_tail_each_for_itself(place):
    """`one_topic_multiple_subsc: durable_history_handoff`."""
    storage = sealed_and_taken(place, 6)
    fill(storage, numbered(4, first=6))
    for start in (0, 3, 6, 9):
        assert payloads(read_from(storage, start)) == numbered(10 - start, first=start)


def test_slow_reader_holds_up_neither_the_others_nor_the_producer(place):
    """`one_topic_multiple_subsc: different_speeds`."""
    storage = place.node("one", wal={"cache_capacity": 8}).for_topic(TOPIC)
    with (
        storage.create_reader(TOPIC, StartPosition.at(0)) as slow,
        storage.create_reader(TOPIC, StartPosition.at(0)) as fast,
    ):
        fill(storage, numbered(5))
        assert offsets(take(slow, 1)) == [0]
        for first in range(5, 65, 10):
            fill(storage, numbered(10, first=first))
            take(fast, storage.topic.wal.next - fast.reader.next_offset)
        assert fast.reader.next_offset == 65
        assert payloads(take(slow, 64)) == numbered(64, first=1)


def test_tail_readers_all_get_the_new_messages_alone(place):
    """`one_topic_multiple_subsc: tail_reading`."""
    storage = place.node("one").for_topic(TOPIC)
    fill(storage, numbered(5))
    streams = [storage.create_reader(TOPIC, StartPosition.latest()) for _ in range(3)]
    assert all(map(has_nothing, streams))
    fill(storage, numbered(3, first=5))
    for stream in streams:
        assert offsets(take(stream, 3)) == [5, 6, 7]
        stream.close()


def test_readers_with_mixed_starts_each_get_their_part(place):
    """`one_topic_multiple_subsc: mixed_start_positions`: bucket, files, cache and latest."""
    node = place.node("one", wal={"cache_capacity": 4, "retention": {"time_minutes": 0}})
    storage = node.for_topic(TOPIC)
    make_tiers(storage, bucket=10, files=10)
    fill(storage, numbered(4, first=20))
    with storage.create_reader(TOPIC, StartPosition.latest()) as latest:
        for start in (0, 5, 10, 15, 20, 23, 24):
            assert offsets(read_from(storage, start)) == list(range(start, 24))
        fill(storage, [b"24"])
        assert offsets(take(latest, 1)) == [24]


# -- one_topic_one_subsc ------------------------------------------------------------------------


def test_messages_come_back_whole_and_in_order(place):
    """`one_topic_one_subsc: basic_flow`."""
    storage = place.node("one").for_topic(TOPIC)
    sent = [
        record(b"%d" % number, request_id=number, attributes={"n": str(number)}, routing_key="k")
        for number in range(5)
    ]
    assert [storage.append_message(TOPIC, message) for message in sent] == [0, 1, 2, 3, 4]
    storage.wait(4)
    found = read_from(storage, 0)
    assert [(m.request_id, m.payload, m.attributes, m.routing_key) for m in found] == [
        (m.request_id, m.payload, m.attributes, m.routing_key) for m in sent
    ]
    assert {(m.publish_time, m.producer_name) for m in found} == {(PUBLISHED_MS, "p")}
    assert storage.ack_checkpoint(TOPIC, 4) == 5
    assert storage.checkpoint(TOPIC) == 5


def test_rotated_files_are_uploaded_and_read_without_a_gap(place):
    """`one_topic_one_subsc: wal_rotation_and_upload`."""
    one = place.node("one")
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(60, size=500), every=5)
    assert len(place.logs("one")) > 4
    storage.topic.upload()
    assert tiered_offsets(one) == list(range(60))
    assert payloads(read_from(storage, 0)) == numbered(60, size=500)


def test_history_and_tail_are_one_sequence(place):
    """`one_topic_one_subsc: durable_history_handoff_reading`: no gap and no duplicate."""
    storage = sealed_and_taken(place, 20)
    fill(storage, numbered(10, first=20))
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        assert payloads(take(stream, 30)) == numbered(30)
        fill(storage, numbered(2, first=30))
        assert payloads(take(stream, 2)) == numbered(2, first=30)


def test_reader_resumes_at_10_of_40_behind_its_checkpoint(place):
    """`one_topic_one_subsc: resume_from_position`; the cursor also survives a restart."""
    one = place.node("one")
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(40))
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        last = take(stream, 10)[-1]
    storage.ack_checkpoint(TOPIC, last.msg_id.topic_offset, "reports")
    one.shutdown()
    storage = place.node("one").for_topic(TOPIC)
    cursor = storage.checkpoint(TOPIC, "reports")
    assert cursor == 10
    assert payloads(read_from(storage, cursor)) == numbered(30, first=10)


def test_latest_is_only_what_comes_after_the_call(place):
    """`one_topic_one_subsc: tail_reading`."""
    storage = place.node("one").for_topic(TOPIC)
    fill(storage, numbered(10))
    with storage.create_reader(TOPIC, StartPosition.latest()) as stream:
        assert has_nothing(stream)
        fill(storage, numbered(3, first=10))
        assert payloads(take(stream, 3)) == numbered(3, first=10)
        assert has_nothing(stream)


def test_reader_follows_a_producer_that_goes_on_writing(place):
    """`one_topic_one_subsc: concurrent_write_read`, over rotations and uploads under way."""
    one = place.node("one", uploads=True, wal={"cache_capacity": 16})
    storage = one.for_topic(TOPIC)
    count = 300
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        reading = Task(take, stream, count)
        fill(storage, numbered(count, size=50), every=6)
        found = reading.result()
    assert offsets(found) == list(range(count))
    assert payloads(found) == numbered(count, size=50)
    assert len(place.logs("one")) > 2


def test_message_of_one_mebibyte_comes_back_from_every_tier(place):
    """`one_topic_one_subsc: large_message_handling`."""
    large = os.urandom(MIB)
    one = place.node("one", cloud_reader={"fetch_chunk_size": 64 * 1024})
    storage = one.for_topic(TOPIC)
    sent = [b"before", large, b"after"]
    fill(storage, sent, every=1)
    assert payloads(read_from(storage, 0)) == sent
    one.flush_and_seal(TOPIC)
    storage = place.node("two", cloud_reader={"fetch_chunk_size": 64 * 1024}).for_topic(TOPIC)
    assert payloads(read_from(storage, 0)) == sent


# -- streams_handoff ----------------------------------------------------------------------------


def test_messages_in_the_cache_touch_neither_files_nor_bucket(place):
    """`streams_handoff: local_cache_only`."""
    one = place.node("one")
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(6))
    assert payloads(read_from(storage, 0)) == numbered(6)
    assert counted(one, "wal.reader.stitch_file_bytes") == 0
    assert counted(one, "reader.history_entered_total") == 0


def test_stream_passes_from_files_to_cache_to_live(place):
    """`streams_handoff: local_files_cache_live`: 0..5 in order."""
    one = place.node("one", wal={"cache_capacity": 2})
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(4))
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        found = take(stream, 4)
        assert counted(one, "wal.reader.stitch_file_bytes") > 0
        fill(storage, numbered(2, first=4))
        found += take(stream, 2)
    assert payloads(found) == numbered(6)
    assert offsets(found) == [0, 1, 2, 3, 4, 5]


def test_stream_passes_from_a_bucket_in_memory_to_files(tmp_path):
    """`streams_handoff: chaining_stream_handoff_memory`: both stores in memory."""
    config = load_config(
        {
            "storage": {
                "wal": {
                    "dir": str(tmp_path / "wal"),
                    "cache_capacity": 1,
                    "rotate_max_bytes": 4096,
                    "retention": {"time_minutes": 0},
                },
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
        found = read_from(storage, 0)
        assert payloads(found) == sent
        assert offsets(found) == [0, 1, 2, 3, 4, 5]
        assert counted(factory, "reader.handoffs_total") == 1


def test_each_topic_passes_from_its_own_history_to_its_own_tail(place):
    """`streams_handoff: factory_durable_history_hot_handoff_per_topic`."""
    names = ["/default/a", "/default/b"]
    one = place.node("one")
    for name in names:
        fill(one.for_topic(name), [f"{name} {number}".encode() for number in range(3)])
        one.flush_and_seal(name)
    two = place.node("two")
    for name in names:
        fill(two.for_topic(name), [f"{name} {number}".encode() for number in (3, 4, 5)])
    for name in names:
        found = read_from(two.for_topic(name), 0)
        assert payloads(found) == [f"{name} {number}".encode() for number in range(6)]


def test_start_behind_the_history_opens_no_object(place):
    """`streams_handoff: skip_durable_history_when_start_after_segments`."""
    storage = sealed_and_taken(place, 3)
    fill(storage, numbered(3, first=3))
    metrics = storage.topic._metrics
    assert payloads(read_from(storage, 3)) == numbered(3, first=3)
    assert metrics.snapshot()["cloud_reader.objects_opened_total"] == 0
    assert payloads(read_from(storage, 2)) == numbered(4, first=2)
    assert metrics.snapshot()["cloud_reader.objects_opened_total"] == 1


# -- wal_retention ------------------------------------------------------------------------------


def test_time_based_retention_removes_the_old_uploaded_file_alone(place):
    """`wal_retention: time_based_end_to_end`: the log begins at 100 afterwards."""
    one = place.node("one", wal={"cache_capacity": 8, "retention": {"time_minutes": 5}})
    storage = one.for_topic(TOPIC)
    three_files(storage)
    grow_old(place.logs("one")[0])
    assert storage.topic.tier.trim() == 0, "nothing is in the bucket yet"
    storage.topic.upload()
    assert storage.topic.tier.trim() == 1
    assert [path.name for path in place.logs("one")] == ["wal.1.log", "wal.2.log"]
    assert storage.topic.watermarks.trimmed == 100
    state = WalDirectory(one.log._fs, str(place.files("one"))).load_state()
    assert state.checkpoint.start_offset == 100
    for start in (0, 99, 100, 120):
        assert len(read_from(storage, start)) == 200 - start


def test_retention_of_one_topic_leaves_the_others_alone(place):
    """`wal_retention: multi_topic_independence`."""
    one = place.node("one", wal={"retention": {"time_minutes": 5}})
    uploaded, waiting, young = (one.for_topic(f"/default/{name}") for name in ("a", "b", "c"))
    for storage in (uploaded, waiting, young):
        three_files(storage)
    uploaded.topic.upload()
    young.topic.upload()
    for name in ("/default/a", "/default/b"):
        grow_old(place.logs("one", name)[0])
    assert [s.topic.tier.trim() for s in (uploaded, waiting, young)] == [1, 0, 0]
    assert [s.topic.watermarks.trimmed for s in (uploaded, waiting, young)] == [100, 0, 0]
    for storage in (uploaded, waiting, young):
        assert len(read_from(storage, 0)) == 200


def test_reader_under_way_does_not_notice_retention(place):
    """`wal_retention: stateful_reader_after_retention`: from 0, from the middle, under way."""
    one = place.node("one", wal={"cache_capacity": 8, "retention": {"time_minutes": 0}})
    storage = one.for_topic(TOPIC)
    three_files(storage)
    storage.topic.upload()
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        before = take(stream, 40)
        eventually(lambda: storage.topic.tier.trim() or storage.topic.watermarks.trimmed == 150)
        assert place.logs("one")[0].name == "wal.2.log"
        found = before + take(stream, 160)
    assert offsets(found) == list(range(200))
    for start in (0, 75, 150, 180):
        assert offsets(read_from(storage, start)) == list(range(start, 200))


# -- warm_tier_read and write_buffer_valkey -----------------------------------------------------


def test_120_messages_are_stitched_from_bucket_files_and_cache(place):
    """`warm_tier_read`: 120 messages, the oldest 40 cold, the newest 40 hot.

    Danube's warm tier is a Valkey stream. There is none here: the middle tier is the local files.
    """
    one = place.node("one", wal={"cache_capacity": 40, "retention": {"time_minutes": 0}})
    storage = one.for_topic(TOPIC)
    sent = make_tiers(storage, bucket=40, files=40) + numbered(40, first=80)
    fill(storage, sent[80:])
    assert (storage.topic.watermarks.trimmed, storage.topic.cache.start) == (40, 80)
    found = read_from(storage, 0)
    assert offsets(found) == list(range(120))
    assert payloads(found) == sent
    assert counted(one, "reader.history_entered_total") == 1
    assert counted(one, "reader.handoffs_total") == 1
    assert counted(one, "wal.reader.stitch_cache_items") == 40


def test_stream_that_begins_in_any_tier_reaches_the_live_tail(place):
    """`warm_tier_read`, the second: a start in each tier, and live behind the last."""
    one = place.node("one", wal={"cache_capacity": 40, "retention": {"time_minutes": 0}})
    storage = one.for_topic(TOPIC)
    make_tiers(storage, bucket=40, files=40)
    fill(storage, numbered(40, first=80))
    streams = {s: storage.create_reader(TOPIC, StartPosition.at(s)) for s in (20, 60, 100)}
    found = {start: take(stream, 120 - start) for start, stream in streams.items()}
    fill(storage, [b"120"])
    for start, stream in streams.items():
        assert offsets(found[start] + take(stream, 1)) == list(range(start, 121))
        stream.close()


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


# -- src unit tests -----------------------------------------------------------------------------


def test_frame_on_disk_is_offset_length_crc_and_body(local_place):
    """`src` unit test of the frame layout: u64, u32, u32, all little endian, crc32 of the body."""
    storage = local_place.node().for_topic(TOPIC)
    fill(storage, numbered(3))
    data, position = local_place.logs()[0].read_bytes(), 0
    for offset, payload in enumerate(numbered(3)):
        header, body_at = data[position : position + 16], position + 16
        size = int.from_bytes(header[8:12], "little")
        body = data[body_at : body_at + size]
        assert int.from_bytes(header[:8], "little") == offset
        assert int.from_bytes(header[12:16], "little") == zlib.crc32(body)
        assert payload in body
        position = body_at + size
    assert position == len(data)


def test_crc_mismatch_stops_the_reader_with_an_error(local_place):
    """`src` unit test of the crc: nothing behind the bad frame comes out, and not silently."""
    storage = local_place.node(wal={"cache_capacity": 1}).for_topic(TOPIC)
    fill(storage, numbered(6))
    log = local_place.logs()[0]
    starts = scan_frames(log.read_bytes(), expected_offset=0).starts
    flip_byte(log, starts[3] + 20)
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        assert offsets(take(stream, 3)) == [0, 1, 2]
        with pytest.raises(CorruptDataError) as caught:
            stream.next_batch(timeout=0)
    assert (caught.value.offset, caught.value.position) == (3, starts[3])
    assert caught.value.path == str(log)


def test_rotated_files_follow_each_other_without_a_gap(local_place):
    """`src` unit test of continuity over rotated files."""
    storage = local_place.node(wal={"cache_capacity": 1}).for_topic(TOPIC)
    fill(storage, numbered(60, size=500), every=4)
    expected = 0
    for path in local_place.logs():
        scan = scan_frames(path.read_bytes(), expected_offset=expected)
        assert scan.end == path.stat().st_size
        expected = scan.next_offset
    assert expected == 60
    assert len(local_place.logs()) > 5
    assert payloads(read_from(storage, 0)) == numbered(60, size=500)


def test_sparse_index_leads_to_the_offset_without_reading_the_file(local_place):
    """`src` unit test of the index: seeking reads a chunk, not everything before it."""
    one = local_place.node(wal={"rotate_max_bytes": 64 * MIB, "cache_capacity": 1})
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(800, size=10_000))
    with storage.create_reader(TOPIC, StartPosition.at(700)) as stream:
        (found,) = stream.next_batch(1)
    assert found.payload == numbered(1, first=700, size=10_000)[0]
    assert counted(one, "wal.reader.stitch_file_bytes") < 5 * MIB
    assert local_place.logs()[0].stat().st_size > 7 * MIB


def test_deleter_keeps_what_the_bucket_does_not_have(local_place):
    """`src` unit test of the deleter's watermark."""
    storage = local_place.node(wal={"retention": {"time_minutes": 5}}).for_topic(TOPIC)
    three_files(storage)
    storage.topic.upload()
    fill(storage, numbered(50, first=200, size=100))
    fill(storage, numbered(1, first=250))
    for path in local_place.logs():
        grow_old(path)
    assert storage.topic.tier.trim() == 3
    assert [path.name for path in local_place.logs()] == ["wal.3.log", "wal.4.log"]
    assert offsets(read_from(storage, 0)) == list(range(251))


def test_deleter_removes_the_oldest_files_beyond_the_size(local_place):
    """`src` unit test of the deleter's size rule."""
    wal = {"rotate_max_bytes": 256 * 1024, "retention": {"time_minutes": None, "size_mb": 1}}
    storage = local_place.node(wal=wal).for_topic(TOPIC)
    fill(storage, numbered(8, size=256 * 1024), every=1)
    storage.topic.upload()
    assert storage.topic.tier.trim() > 0
    left = [path.stat().st_size for path in local_place.logs()]
    assert sum(left) <= MIB < sum(left) + 256 * 1024 + 1000
    assert len(read_from(storage, 0)) == 8


def test_deleter_removes_files_beyond_the_time(local_place):
    """`src` unit test of the deleter's time rule; the active file stays, however old."""
    storage = local_place.node(wal={"retention": {"time_minutes": 5}}).for_topic(TOPIC)
    three_files(storage)
    storage.topic.upload()
    assert storage.topic.tier.trim() == 0
    for path in local_place.logs():
        grow_old(path)
    assert storage.topic.tier.trim() == 2
    assert [path.name for path in local_place.logs()] == ["wal.2.log"]


def test_deleter_passes_over_a_file_that_is_missing(local_place):
    """`src` unit test of the deleter with a missing file: it goes on with the others."""
    storage = local_place.node(wal={"retention": {"time_minutes": 5}}).for_topic(TOPIC)
    three_files(storage)
    storage.topic.upload()
    for path in local_place.logs():
        grow_old(path)
    local_place.logs()[0].unlink()
    storage.topic.tier.trim()
    assert [path.name for path in local_place.logs()] == ["wal.2.log"]
    assert storage.topic.watermarks.trimmed == 150


def test_local_file_that_is_missing_is_read_from_the_bucket(local_place):
    """The same for readers: another tier has a copy of what was in the file."""
    storage = local_place.node(wal={"cache_capacity": 1}).for_topic(TOPIC)
    three_files(storage)
    storage.topic.upload()
    local_place.logs()[0].unlink()
    assert offsets(read_from(storage, 0)) == list(range(200))


def test_append_after_shutdown_is_refused_and_never_seen(local_place):
    """`src` unit test: an append after the shutdown is not visible."""
    one = local_place.node()
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(2))
    one.shutdown()
    with pytest.raises(ClosedError):
        storage.append_message(TOPIC, record(b"late"))
    storage = local_place.node().for_topic(TOPIC)
    assert payloads(read_from(storage, 0)) == numbered(2)


def test_wal_path_that_cannot_be_a_directory_fails_at_the_start(local_place, tmp_path):
    """`src` unit test: an invalid WAL path fails when the factory starts."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskError):
        local_place.node(wal={"dir": str(tmp_path / "file" / "wal")})


# -- how topics get into shape ------------------------------------------------------------------


def sealed_and_taken(place, count):
    """A topic with so many messages in the bucket, opened by its second owner."""
    one = place.node("one")
    fill(one.for_topic(TOPIC), numbered(count))
    one.flush_and_seal(TOPIC)
    return place.node("two").for_topic(TOPIC)


def make_tiers(storage, *, bucket, files):
    """Messages that only the bucket has, and behind them messages that only local files have."""
    sent = numbered(bucket, size=4096 // bucket)
    sent += numbered(files, first=bucket, size=4096 // files)
    fill(storage, sent[:bucket])
    storage.topic.upload()
    fill(storage, sent[bucket:])
    eventually(storage.topic.tier.trim, "the first file is a millisecond old")
    assert storage.topic.watermarks.trimmed == bucket
    return sent
