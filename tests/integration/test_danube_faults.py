"""Faults that were found in Danube's storage, each as a test that it does not exist here.

Faults are numbered by where they lie: 2.1 append and durability, 2.2 `Latest`, 2.3 handoff and
readers, 2.4 the uploader of 0.5, 2.5 the segment exporter of later versions, 2.6 retention, 2.7
restart, crash, move and delete.
"""

import errno
import os
import shutil
import threading
import time
from dataclasses import replace

import pytest

from ister import failpoints
from ister.clock import ManualClock
from ister.config import load_config
from ister.errors import (
    CapacityError,
    ClosedError,
    CommitUnknownError,
    ConflictError,
    CorruptDataError,
    DataGapError,
    DiskError,
    FencedError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
)
from ister.format.checkpoint import UploaderCheckpoint
from ister.format.frame import scan_frames
from ister.fs.local import LocalFileSystem
from ister.model import MessageId, TopicState
from ister.wal.directory import WalDirectory
from tests.integration.places import (
    TOPIC,
    Place,
    Shelf,
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
from tests.support.builders import measured_allocation
from tests.support.danube_storage import StartPosition, WalStorageFactory
from tests.support.machine import Task, TurningClock, eventually, numbered, payloads
from tests.support.memory_fs import SimulatedCrash

KIB = 1024
MIB = 1024 * KIB
LEASE_SECONDS = 15


@pytest.fixture
def place(tmp_path):
    """A directory for a bucket, and SQLite."""
    with Place(tmp_path) as place:
        yield place


@pytest.fixture
def shelf():
    """Stores and disks in memory."""
    with Shelf() as shelf:
        yield shelf


# -- 2.1: append and durability -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_acknowledged_messages_survive_a_power_cut(machine, seed):
    """Fault 2.1: "flush" only empties a buffer, and nothing is ever synced."""
    topic = machine.topic(rotate_max_bytes=4096)
    for payload in numbered(20, size=300):
        topic.wait(topic.append(payload))
    machine.cut_power(seed)
    assert payloads(machine.reopened().read()) == numbered(20, size=300)


def test_acknowledged_messages_survive_the_end_of_the_process(place):
    """Fault 2.1: the reply goes out before the write; SIGTERM or SIGKILL takes seconds of them."""
    one = place.node()
    storage = one.for_topic(TOPIC)
    for payload in numbered(20):
        storage.wait(storage.append_message(TOPIC, record(payload)))
    place.kill(one)
    assert payloads(read_from(place.node().for_topic(TOPIC), 0)) == numbered(20)


def test_write_error_reaches_the_producer(machine):
    """Fault 2.1: the writer's errors are only logged, and appends go on being answered OK."""
    topic = machine.topic()
    topic.wait(topic.append(b"stored"))

    def fail(kind, path):
        if kind == "write" and path.endswith(".log"):
            raise OSError(errno.EIO, "injected")

    machine.fs.before = fail
    offset = topic.append(b"lost")
    with pytest.raises(DiskError):
        topic.wait(offset)
    with pytest.raises(ClosedError):
        topic.append(b"refused")
    machine.fs.before = lambda kind, path: None
    machine.kill()
    assert payloads(machine.reopened().read()) == [b"stored"]


def test_write_that_ended_in_the_middle_leaves_no_torn_frame_behind(machine):
    """Fault 2.1: after a partial write the buffer is written again whole, behind a torn frame."""
    topic = machine.topic()
    topic.wait(topic.append(b"first"))
    machine.fs.write_limit_bytes = machine.used_bytes() + 100
    offset = topic.append(b"x" * 1000)
    with pytest.raises(CapacityError):
        topic.wait(offset)
    machine.fs.write_limit_bytes = None
    topic.flush()
    path = f"{topic.wal.directory.path}/wal.log"
    scan = scan_frames(machine.read(path), expected_offset=0)
    assert (scan.next_offset, scan.end) == (2, len(machine.read(path)))
    assert payloads(topic.read()) == [b"first", b"x" * 1000]


# -- 2.2: Latest ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [8, 4096])
def test_latest_reader_that_falls_behind_by_more_than_256_misses_nothing(place, cache):
    """Fault 2.2 (a): a new subscription more than 256 behind goes on after a hole."""
    storage = place.node(wal={"cache_capacity": cache}).for_topic(TOPIC)
    fill(storage, numbered(10))
    with storage.create_reader(TOPIC, StartPosition.latest()) as stream:
        fill(storage, numbered(2000, first=10), every=100)
        found = take(stream, 2000)
    assert offsets(found) == list(range(10, 2010))
    assert payloads(found) == numbered(2000, first=10)


def test_subscription_that_restarts_before_its_first_ack_skips_nothing(place):
    """Fault 2.2 (b): nothing is stored at creation, so that a restart begins at `Latest` again.

    Whoever subscribes at the tail records it at once: everything before it counts as dealt with.
    """
    one = place.node()
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(5))
    cursor = storage.ack_checkpoint(TOPIC, storage.topic.wal.next - 1, "new")
    assert cursor == 5
    fill(storage, numbered(300, first=5))
    place.kill(one)
    storage = place.node().for_topic(TOPIC)
    assert storage.checkpoint(TOPIC, "new") == 5
    assert offsets(read_from(storage, storage.checkpoint(TOPIC, "new"))) == list(range(5, 305))


def test_late_or_repeated_ack_does_not_move_a_cursor_back(place):
    """Fault 2.2: what a cursor has passed stays passed, also at the next owner."""
    one = place.node()
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(10))
    assert storage.ack_checkpoint(TOPIC, 6, "s") == 7
    assert storage.ack_checkpoint(TOPIC, 2, "s") == 7
    one.flush_and_seal(TOPIC)
    assert place.node("two").for_topic(TOPIC).checkpoint(TOPIC, "s") == 7


# -- 2.3: handoff and readers ---------------------------------------------------------------------


def test_hole_in_the_catalog_is_an_error_with_its_range(shelf):
    """Fault 2.3: cloud holes are skipped silently."""
    two = move(shelf, lots=3, size=10)
    storage = two.for_topic(TOPIC)
    fill(storage, numbered(5, first=30))
    shelf.metadata.delete(catalog(two).keys.descriptor(10))
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        assert offsets(take(stream, 10)) == list(range(10))
        for _ in range(2):
            with pytest.raises(DataGapError) as caught:
                stream.next_batch(timeout=0)
            assert (caught.value.start, caught.value.end) == (10, 20)
        assert stream.reader.next_offset == 10
    assert offsets(read_from(storage, 20)) == list(range(20, 35))


def test_lost_object_is_an_error_that_names_it(shelf):
    """Fault 2.3: the same with the descriptor in place and the object gone."""
    two = move(shelf, lots=3, size=10)
    storage = two.for_topic(TOPIC)
    key = f"storage/topics{TOPIC}/objects/{descriptors(two)[1].object_id}"
    shelf.objects.drop(key)
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        assert offsets(take(stream, 10)) == list(range(10))
        with pytest.raises(NotFoundError, match="10 up to 20") as caught:
            stream.next_batch(timeout=0)
    assert caught.value.path == key


def test_offset_in_the_middle_of_an_object_is_found_in_it(shelf):
    """Fault 2.3: the handoff is decided by where the log begins, whatever the objects cover."""
    two = move(shelf, lots=3, size=10)
    storage = two.for_topic(TOPIC)
    fill(storage, numbered(5, first=30))
    for start in range(0, 36, 5):
        assert payloads(read_from(storage, start)) == numbered(35 - start, first=start)


def test_reader_behind_files_that_yield_nothing_gets_the_first_append(shelf):
    """Fault 2.3: "nothing yielded" is 2^64-1, and the cache is looked up from there on."""
    two = move(shelf, lots=1, size=3)
    storage = two.for_topic(TOPIC)
    assert storage.topic.wal.files == ()
    with storage.create_reader(TOPIC, StartPosition.at(3)) as stream:
        assert has_nothing(stream)
        fill(storage, [b"3"])
        assert offsets(take(stream, 1)) == [3]


def test_append_at_the_turn_to_live_is_seen_without_another_one(place):
    """Fault 2.3: an append between cache and live shows only with the next append."""
    storage = place.node(ack="memory").for_topic(TOPIC)
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        for number in range(300):
            reading = Task(take, stream, 1)
            storage.append_message(TOPIC, record(b"%d" % number))
            (found,) = reading.result()
            assert found.payload == b"%d" % number


def test_reader_at_the_tail_sleeps(place):
    """Fault 2.3: a reader at the end of the cache builds an empty stream in a loop."""
    storage = place.node().for_topic(TOPIC)
    fill(storage, numbered(3))
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        take(stream, 3)
        before = time.thread_time()
        assert stream.next_batch(timeout=0.3) == []
        assert time.thread_time() - before < 0.1


def test_live_reader_that_lags_beyond_the_cache_goes_on_in_files_and_bucket(place):
    """Fault 2.3: a reader that is live dies when it lags by more than the cache."""
    wal = {"cache_capacity": 16, "retention": {"time_minutes": 0}}
    one = place.node(wal=wal)
    storage = one.for_topic(TOPIC)
    with (
        storage.create_reader(TOPIC, StartPosition.at(0)) as in_files,
        storage.create_reader(TOPIC, StartPosition.at(0)) as in_bucket,
    ):
        fill(storage, numbered(5))
        for stream in (in_files, in_bucket):
            assert len(take(stream, 5)) == 5
            assert has_nothing(stream)
        fill(storage, numbered(300, first=5, size=50), every=10)
        assert offsets(take(in_files, 300)) == list(range(5, 305))
        storage.topic.upload()
        eventually(storage.topic.tier.trim)
        assert storage.topic.watermarks.trimmed > 200
        assert offsets(take(in_bucket, 300)) == list(range(5, 305))
        fill(storage, numbered(1, first=305))
        assert offsets(take(in_bucket, 1)) == offsets(take(in_files, 1)) == [305]
    assert counted(one, "reader.history_entered_total") == 1


def test_torn_bytes_at_the_end_of_one_file_hide_no_later_file(place):
    """Fault 2.3: leftover bytes are carried over into the next file, and nothing decodes."""
    storage = place.node(wal={"cache_capacity": 1}).for_topic(TOPIC)
    three_files(storage)
    whole = place.logs()[1].read_bytes()
    with place.logs()[0].open("ab") as file:
        file.write(whole[: len(whole) // 3])
    assert offsets(read_from(storage, 0)) == list(range(200))
    storage.topic.upload()
    assert storage.topic.watermarks.tiered == 200


def test_crc_mismatch_costs_no_memory_and_hides_nothing_behind_it(place):
    """Fault 2.3: the parser stalls at a bad crc and gathers chunks without an end."""
    wal = {"rotate_max_bytes": 64 * MIB, "cache_capacity": 1, "stream_chunk_size": 64 * KIB}
    storage = place.node(wal=wal).for_topic(TOPIC)
    fill(storage, numbered(400, size=10 * KIB))
    (log,) = place.logs()
    flip_byte(log, log.read_bytes().index(b"5....") + 100)
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        assert offsets(take(stream, 5)) == list(range(5))
        with measured_allocation() as allocation:
            for _ in range(20):
                with pytest.raises(CorruptDataError) as caught:
                    stream.next_batch(timeout=0)
                assert caught.value.offset == 5
        assert allocation.peak_bytes < MIB
        assert stream.reader.held_bytes <= 64 * KIB
    assert offsets(read_from(storage, 6)) == list(range(6, 400))


def test_frame_that_is_damaged_in_the_files_is_read_from_the_bucket(place):
    """Fault 2.3: a bad crc ends the stream although another tier has the message."""
    storage = place.node(wal={"cache_capacity": 1}).for_topic(TOPIC)
    three_files(storage)
    storage.topic.upload()
    flip_byte(place.logs()[0], 2000)
    assert offsets(read_from(storage, 0)) == list(range(200))


def test_missing_local_file_is_reported_and_not_skipped(place):
    """Fault 2.3: missing files are skipped."""
    one = place.node()
    three_files(one.for_topic(TOPIC))
    one.shutdown()
    place.logs()[1].unlink()
    storage = place.node().for_topic(TOPIC)
    assert storage.topic.state is TopicState.QUARANTINED
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        assert offsets(take(stream, 100)) == list(range(100))
        with pytest.raises(CorruptDataError) as caught:
            stream.next_batch(timeout=0)
    assert caught.value.offset == 100
    assert offsets(read_from(storage, 150)) == list(range(150, 200))
    with pytest.raises(CorruptDataError):
        storage.append_message(TOPIC, record(b"refused"))


def test_messages_that_are_not_exported_yet_are_not_skipped_after_a_move(shelf):
    """Fault 2.3: after a move a lagging reader goes to the cloud for what only local files have."""
    move(shelf, lots=2, size=10).shutdown()
    two = shelf.node("two", wal={"cache_capacity": 16})
    storage = two.for_topic(TOPIC)
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        found = take(stream, 5)
        fill(storage, numbered(1100, first=20), every=50)
        assert storage.topic.watermarks.tiered == 20
        assert storage.topic.cache.start > 1000
        found += take(stream, 1115)
    assert payloads(found) == numbered(1120)


# -- 2.4: the uploader ----------------------------------------------------------------------------


def test_upload_that_resumes_never_begins_in_the_middle_of_a_frame(place):
    """Fault 2.4 (1): the resume position counts the part of a frame that was read and not used."""
    one = place.node(
        wal={"rotate_max_bytes": 400_000, "fsync_interval_ms": 3_600_000},
        uploader={"stream_chunk_size": 64 * KIB},
    )
    storage = one.for_topic(TOPIC)
    sent = [os.urandom(1 + number * 7919 % 90_000) for number in range(40)]
    for at in range(0, 40, 4):
        fill(storage, sent[at : at + 3])
        # One more is on its way and not synced: no part of it is uploaded.
        storage.append_message(TOPIC, record(sent[at + 3]))
        storage.topic.tier.upload()
        assert descriptors(one)[-1].end == at + 3
    storage.topic.upload()
    assert tiered_offsets(one) == list(range(40))
    one.flush_and_seal(TOPIC)
    assert payloads(read_from(place.node("two").for_topic(TOPIC), 0)) == sent


def test_upload_after_a_kill_in_the_middle_of_a_frame_goes_on(place):
    """Fault 2.4 (1): the same with a torn frame at the end of the file, and a new process."""
    one = place.node()
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(10))
    storage.topic.upload()
    fill(storage, numbered(5, first=10))
    place.kill(one)
    with place.logs()[-1].open("ab") as file:
        file.write((15).to_bytes(8, "little") + b"\xff\0\0\0half a frame")
    one = place.node()
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(5, first=15))
    storage.topic.upload()
    assert tiered_offsets(one) == list(range(20))


@pytest.mark.parametrize("how", ["copy fails", "copy is lost", "pending is lost"])
def test_copy_that_fails_publishes_no_descriptor_to_a_missing_object(shelf, how):
    """Fault 2.4 (2): the copy's error is dropped, and a descriptor to nothing is published."""
    one = shelf.node(uploader={"finalize": "copy"})
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(5))

    def before(kind, key):
        if kind == "copy" and how == "copy fails":
            raise UnavailableError("injected")
        if kind == "copy" and how == "pending is lost":
            shelf.objects.drop(key)

    def after(kind, key):
        if kind == "copy" and how == "copy is lost":
            shelf.objects.drop(f"storage/topics{TOPIC}/objects/data-0-4.dnb1")

    shelf.objects.before, shelf.objects.after = before, after
    for _ in range(2):
        with pytest.raises((UnavailableError, NotFoundError)):
            storage.topic.upload()
        assert descriptors(one) == []
        assert storage.topic.watermarks.tiered == 0
    shelf.objects.before = shelf.objects.after = lambda kind, key: None
    storage.topic.upload()
    assert object_names(one) == ["data-0-4.dnb1"]
    assert tiered_offsets(one) == [0, 1, 2, 3, 4]


def test_store_without_copies_gets_the_object_all_the_same():
    """Fault 2.4 (2): the fallback, a second put, may fail unnoticed too."""
    with Shelf(supports_copy=False) as shelf:
        one = shelf.node(uploader={"finalize": "copy"})
        storage = one.for_topic(TOPIC)
        fill(storage, numbered(5))
        storage.topic.upload()
        assert object_names(one) == ["data-0-4.dnb1"]
        assert tiered_offsets(one) == [0, 1, 2, 3, 4]


def test_object_is_written_once_under_its_final_name(shelf):
    """Section 2.4, issue 158: copying doubles the writes."""
    one = shelf.node()
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(5))
    storage.topic.upload()
    kinds = [kind for kind, key in shelf.objects.calls if key.endswith(".dnb1")]
    assert kinds.count("open_writer") == 1
    assert not {"copy", "delete"} & set(kinds)


@pytest.mark.parametrize("point", ["tier.after_commit", "tier.before_checkpoint_rename"])
def test_crash_between_descriptor_and_checkpoint_neither_repeats_nor_orphans(shelf, point):
    """Fault 2.4 (3): the range is uploaded again under the same key, the old object orphaned."""
    one = shelf.node()
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(5))
    crash_at(point, storage.topic.upload)
    shelf.kill(one)
    one = shelf.node()
    storage = one.for_topic(TOPIC)
    (published,) = descriptors(one)
    assert storage.topic.watermarks.tiered == 5
    fill(storage, numbered(5, first=5))
    storage.topic.upload()
    assert descriptors(one)[0] == published
    assert sorted(object_names(one)) == sorted(d.object_id for d in descriptors(one))
    assert tiered_offsets(one) == list(range(10))


def test_crash_between_object_and_descriptor_leaves_garbage_that_is_collected():
    """Fault 2.4 (3), the moment before: the object stays until its grace is over, no longer."""
    clock = ManualClock()
    with Shelf(clock=clock) as shelf:
        one = shelf.node()
        storage = one.for_topic(TOPIC)
        fill(storage, numbered(5))
        crash_at("tier.after_complete", storage.topic.upload)
        shelf.kill(one)
        one = shelf.node(metadata={"lease_ttl_seconds": 3600}, cloud={"orphan_grace_minutes": 10})
        storage = one.for_topic(TOPIC)
        assert descriptors(one) == []
        storage.topic.upload()
        assert object_names(one) == ["data-0-4-2.dnb1", "data-0-4.dnb1"]
        assert storage.topic.tier.collect_orphans() == []
        clock.advance(700)
        assert storage.topic.tier.collect_orphans() == ["data-0-4.dnb1"]
        assert tiered_offsets(one) == [0, 1, 2, 3, 4]


def test_lost_answer_to_a_commit_is_found_out_and_not_repeated(shelf):
    """Fault 2.4 (3), by a lost answer instead of a crash."""
    one = shelf.node()
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(5))
    lost = []

    def after(kind, key):
        if kind == "transact" and key.endswith("/objects/" + "0" * 20) and not lost:
            lost.append(key)
            raise CommitUnknownError("injected")

    shelf.metadata.after = after
    storage.topic.upload()
    fill(storage, numbered(5, first=5))
    storage.topic.upload()
    assert lost
    assert tiered_offsets(one) == list(range(10))
    assert len(object_names(one)) == 2


@pytest.mark.parametrize("what", ["missing", "older", "ahead", "garbage"])
def test_uploader_checkpoint_that_is_wrong_does_no_harm(shelf, what):
    """Fault 2.4 (4): nothing keeps the checkpoint from going back, and it is what counts."""
    one = shelf.node()
    storage = one.for_topic(TOPIC)
    for first in (0, 5):
        fill(storage, numbered(5, first=first))
        storage.topic.upload()
    published = descriptors(one)
    fill(storage, numbered(5, first=10))
    one.shutdown()
    fs = shelf.disks["one"]
    directory = WalDirectory(fs, f"/wal{TOPIC}")
    known = directory.load_uploader()
    assert isinstance(known, UploaderCheckpoint)
    if what == "older":
        directory.save_uploader(replace(known, last_committed_offset=4, last_read_byte_position=3))
    elif what == "ahead":
        directory.save_uploader(
            replace(known, last_committed_offset=14, last_read_byte_position=10**6)
        )
    else:
        fs.remove(f"{directory.path}/uploader.ckpt")
    if what == "garbage":
        file = fs.create(f"{directory.path}/uploader.ckpt")
        file.write_at(0, [b"garbage"])
        file.close()
    one = shelf.node()
    storage = one.for_topic(TOPIC)
    storage.topic.upload()
    assert descriptors(one)[:2] == published
    assert tiered_offsets(one) == list(range(15))
    assert len(object_names(one)) == 3


def test_damaged_frame_stops_uploads_there_and_says_so_until_it_is_whole(place):
    """Fault 2.4 (5): a bad crc blocks its file silently, and later files go on with the leftover.

    What lies before the damage is uploaded, nothing behind it is, and every cycle says why.
    """
    one = place.node()
    storage = one.for_topic(TOPIC)
    three_files(storage)
    log = place.logs()[1]
    position = scan_frames(log.read_bytes(), expected_offset=100).starts[20] + 30
    flip_byte(log, position)
    for _ in range(2):
        with pytest.raises(CorruptDataError) as caught:
            storage.topic.upload()
        assert caught.value.offset == 120
        assert tiered_offsets(one) == list(range(120))
        assert storage.topic.tier.last_error is not None
    flip_byte(log, position)
    storage.topic.upload()
    assert tiered_offsets(one) == list(range(200))
    assert storage.topic.tier.last_error is None


def test_object_does_not_exceed_its_limit_by_a_file(place):
    """Section 2.4: the cap is looked at between files alone."""
    one = place.node(wal={"rotate_max_bytes": MIB}, uploader={"max_object_bytes": 16 * KIB})
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(300, size=500))
    assert [path.name for path in place.logs()] == ["wal.log"]
    storage.topic.upload()
    sizes = [described.size_bytes for described in descriptors(one)]
    assert len(sizes) > 8
    assert max(sizes) <= 16 * KIB
    assert tiered_offsets(one) == list(range(300))


# -- 2.5: the segment exporter --------------------------------------------------------------------


def test_recorded_first_offset_of_each_file_is_that_of_its_first_frame(place):
    """Fault 2.5: rotation does not flush first, so that a file begins later than recorded."""
    storage = place.node().for_topic(TOPIC)
    for payload in numbered(200, size=300):
        offset = storage.append_message(TOPIC, record(payload))
        if offset % 7 == 0:
            storage.wait(offset, "written")
    storage.flush(TOPIC)
    storage.topic.wal.save_checkpoint()
    recorded = [file.first_offset for file in storage.topic.wal.files]
    found = [int.from_bytes(path.read_bytes()[:8], "little") for path in place.logs()]
    assert recorded == found
    assert len(found) > 5
    checkpoint = checkpoint_of(place)
    assert [file.first_offset for file in checkpoint.rotated_files] == found[:-1]
    assert checkpoint.active_file_first_offset == found[-1]


def test_file_is_not_exported_again_in_the_next_cycle(shelf):
    """Fault 2.5: a file whose start is not recorded right is exported in every cycle."""
    one = shelf.node()
    storage = one.for_topic(TOPIC)
    for payload in numbered(100, size=300):
        offset = storage.append_message(TOPIC, record(payload))
        if offset % 7 == 0:
            storage.wait(offset, "written")
    storage.topic.upload()
    published, names = descriptors(one), object_names(one)
    del shelf.objects.calls[:]
    for _ in range(3):
        assert storage.topic.upload().objects == ()
    assert shelf.objects.calls == [], "an idle cycle asks nothing of the bucket"
    assert descriptors(one) == published
    assert object_names(one) == names


def test_file_with_a_damaged_head_is_neither_passed_over_nor_deleted(place):
    """Fault 2.5: a corrupt head has the file skipped, `cur` moves on, the deleter removes it."""
    one = place.node(wal={"retention": {"time_minutes": 5}})
    storage = one.for_topic(TOPIC)
    three_files(storage)
    damaged = place.logs()[1]
    flip_byte(damaged, 20)
    with pytest.raises(CorruptDataError):
        storage.topic.upload()
    assert tiered_offsets(one) == list(range(100))
    for path in place.logs():
        grow_old(path)
    assert storage.topic.tier.trim() == 1
    assert place.logs()[0] == damaged
    flip_byte(damaged, 20)
    storage.topic.upload()
    assert tiered_offsets(one) == list(range(200)), "what lay behind the damage is not dropped"


def test_upload_takes_chunks_and_not_whole_files_of_memory(place):
    """Section 2.5: each file is read whole into memory."""
    one = place.node(
        wal={"rotate_max_bytes": 64 * MIB},
        uploader={"stream_chunk_size": 64 * KIB, "max_object_bytes": 64 * MIB},
    )
    storage = one.for_topic(TOPIC)
    fill(storage, [os.urandom(100_000) for _ in range(160)])
    with measured_allocation() as allocation:
        storage.topic.upload()
    assert descriptors(one)[-1].size_bytes > 15 * MIB
    assert allocation.peak_bytes < 4 * MIB


def test_owner_that_was_replaced_publishes_nothing():
    """Fault 2.5: no epoch and no comparison guard the writes of descriptors."""
    clock = ManualClock()
    with Shelf(clock=clock) as shelf:
        one = shelf.node("one")
        storage = one.for_topic(TOPIC)
        fill(storage, numbered(5))
        storage.topic.upload()
        fill(storage, numbered(5, first=5))
        clock.advance(LEASE_SECONDS + 1)
        two = shelf.node("two")
        successor = two.for_topic(TOPIC, take_over=True)
        fill(successor, [b"other"] * 3)
        successor.topic.upload()
        published, names = descriptors(two), object_names(two)
        with pytest.raises(FencedError):
            storage.topic.upload()
        with pytest.raises(FencedError):
            storage.append_message(TOPIC, record(b"refused"))
        assert descriptors(two) == published
        assert object_names(two) == names
        assert payloads(read_from(successor, 0)) == [*numbered(5), b"other", b"other", b"other"]


# -- 2.6: retention -------------------------------------------------------------------------------


def test_retention_is_not_undone_by_the_next_flush(place):
    """Fault 2.6: the writer's next checkpoint begins at 0 again, with every file ever rotated."""
    wal = {"cache_capacity": 1, "retention": {"time_minutes": 5}}
    one = place.node(wal=wal)
    storage = one.for_topic(TOPIC)
    three_files(storage)
    storage.topic.upload()
    grow_old(place.logs()[0])
    assert storage.topic.tier.trim() == 1
    fill(storage, numbered(100, first=200, size=100), every=50)
    storage.topic.wal.save_checkpoint()
    assert checkpoint_of(place).start_offset == 100
    assert len(checkpoint_of(place).rotated_files) == len(place.logs()) - 1
    assert offsets(read_from(storage, 0)) == list(range(300))
    one.shutdown()
    storage = place.node(wal=wal).for_topic(TOPIC)
    assert storage.topic.watermarks.trimmed == 100
    assert storage.topic.state is TopicState.OPEN
    assert offsets(read_from(storage, 0)) == list(range(300))


def test_list_of_rotated_files_does_not_grow_without_an_end(place):
    """Fault 2.6: `rotated_files` grows forever, in memory and in `wal.ckpt`."""
    storage = place.node(wal={"retention": {"time_minutes": 0}}).for_topic(TOPIC)
    for _ in range(10):
        fill(storage, numbered(30, size=300), every=10)
        storage.topic.upload()
        eventually(storage.topic.tier.trim, "the oldest file is a millisecond old")
    storage.topic.wal.save_checkpoint()
    assert len(storage.topic.wal.files) < 4
    assert len(checkpoint_of(place).rotated_files) < 4
    assert len(place.logs()) < 4


def test_files_removed_by_time_count_for_the_size_limit(place):
    """Fault 2.6: files that the time rule has chosen do not count as freed: too many go."""
    wal = {"rotate_max_bytes": 128 * KIB, "retention": {"time_minutes": 5, "size_mb": 1}}
    storage = place.node(wal=wal).for_topic(TOPIC)
    fill(storage, numbered(9, size=200 * KIB), every=1)
    assert len(place.logs()) == 9
    storage.topic.upload()
    for path in place.logs()[:4]:
        grow_old(path)
    # 9 files of 200 KiB are over 1 MiB; the 5 that are left by the time rule are not.
    assert storage.topic.tier.trim() == 4
    assert len(place.logs()) == 5


def test_subscription_holds_back_the_files_that_it_has_yet_to_read(place):
    """Fault 2.6: subscriptions never hold files back; here they do while they move."""
    clock = TurningClock()
    storage = place.node(clock=clock, wal={"retention": {"time_minutes": 5}}).for_topic(TOPIC)
    three_files(storage)
    storage.topic.upload()
    storage.ack_checkpoint(TOPIC, 49, "slow")
    storage.ack_checkpoint(TOPIC, 199, "quick")
    for path in place.logs():
        grow_old(path)
    assert storage.topic.tier.trim() == 0
    storage.ack_checkpoint(TOPIC, 99, "slow")
    assert storage.topic.tier.trim() == 1
    clock.shift_ns = 301 * 10**9
    storage.topic.tier._tiers.membership.renew()
    assert storage.topic.tier.trim() == 1, "one that has not moved for long counts no more"
    assert place.logs()[0].name == "wal.2.log"


def test_no_file_goes_before_the_bucket_surely_has_it(shelf):
    """Faults 2.6, 2.7: what is not exported can be trimmed, and nobody looks at the copy."""
    one = shelf.node(
        wal={"retention": {"time_minutes": None, "size_mb": 0}},
        uploader={"max_object_bytes": 8 * KIB},
    )
    storage = one.for_topic(TOPIC)
    three_files(storage)
    assert storage.topic.tier.trim() == 0
    storage.topic.upload()
    lost, rotten = (f"storage/topics{TOPIC}/objects/{d.object_id}" for d in descriptors(one)[:2])
    shelf.objects.drop(lost)
    shelf.objects.corrupt(rotten, 500)
    assert storage.topic.tier.trim() == 2
    assert counted(one, "uploader.objects_repaired_total") == 2
    assert tiered_offsets(one) == list(range(200))
    assert offsets(read_from(storage, 0)) == list(range(200))


def test_objects_expire_and_a_reader_is_told_where_history_begins(place):
    """Fault 2.6: objects never expire, and a read of what is gone jumps."""
    clock = TurningClock()
    one = place.node(
        clock=clock,
        wal={"cache_capacity": 1, "retention": {"time_minutes": 5}},
        cloud={"retention": {"time_minutes": 5}},
    )
    storage = one.for_topic(TOPIC)
    for number in range(2):
        fill(storage, numbered(50, first=50 * number, size=100))
        storage.topic.upload()
    clock.shift_ns = 600 * 10**9
    storage.topic.tier._tiers.membership.renew()
    fill(storage, numbered(50, first=100, size=100))
    storage.topic.upload()
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        take(stream, 10)
        assert storage.topic.tier.trim() == 2
        assert storage.topic.tier.expire() == 2
        stream.reader.seek(100)
        assert offsets(take(stream, 50)) == list(range(100, 150))
    assert object_names(one) == ["data-100-149.dnb1"]
    with pytest.raises(OffsetOutOfRangeError) as caught:
        storage.create_reader(TOPIC, StartPosition.at(0))
    assert caught.value.earliest == 100
    assert offsets(read_from(storage, 100)) == list(range(100, 150))


# -- 2.7: restart, crash, move, delete ------------------------------------------------------------


@pytest.mark.parametrize("ending", ["shutdown", "kill"])
def test_restart_without_a_seal_repeats_no_offset(place, ending):
    """Fault 2.7: with local files present, an ordinary restart begins at offset 0 again."""
    sent = numbered(30, size=1000)
    for life in range(3):
        node = place.node()
        storage = node.for_topic(TOPIC)
        lot = sent[10 * life : 10 * life + 10]
        assert fill(storage, lot, every=5) == range(10 * life, 10 * life + 10)
        if life != 1:
            storage.topic.upload()
        node.shutdown() if ending == "shutdown" else place.kill(node)
    node = place.node()
    storage = node.for_topic(TOPIC)
    assert payloads(read_from(storage, 0)) == sent
    assert tiered_offsets(node) == list(range(30))
    assert len(place.logs()) > 2, "the older files are not forgotten"


def test_restart_without_a_seal_repeats_no_offset_in_a_local_log(tmp_path):
    """Fault 2.7: the same without a bucket."""
    config = load_config({"storage": {"mode": "local_only", "wal": {"dir": str(tmp_path)}}}, {})
    for life in range(3):
        with WalStorageFactory(config) as factory:
            storage = factory.for_topic(TOPIC)
            assert fill(storage, numbered(10, first=10 * life)) == range(10 * life, 10 * life + 10)
            assert payloads(read_from(storage, 0)) == numbered(10 * life + 10)


def test_cursor_hides_no_new_message_after_a_restart(place):
    """Fault 2.7: offsets begin anew, and the reader drops those below the cursor."""
    one = place.node()
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(10))
    storage.ack_checkpoint(TOPIC, 9)
    place.kill(one)
    storage = place.node().for_topic(TOPIC)
    fill(storage, [b"new"])
    assert payloads(read_from(storage, storage.checkpoint(TOPIC))) == [b"new"]


@pytest.mark.parametrize("trouble", ["unavailable", "garbage"])
def test_seal_that_cannot_be_read_does_not_begin_the_topic_at_zero(shelf, trouble):
    """Fault 2.7: an error while the sealed state is read counts as offset 0."""
    one = shelf.node("one")
    fill(one.for_topic(TOPIC), numbered(3))
    one.flush_and_seal(TOPIC)
    keys = catalog(one).keys
    key = keys.sealed
    kept = shelf.metadata.get(key).value

    def before(kind, name):
        # A claim reads the record, the owner and the seal with one request.
        if kind == "get_many" and name == keys.record:
            raise UnavailableError("injected")

    two = shelf.node("two")
    if trouble == "garbage":
        shelf.metadata.put(key, b"garbage")
    else:
        shelf.metadata.before = before
    with pytest.raises((UnavailableError, CorruptDataError)):
        two.for_topic(TOPIC)
    shelf.metadata.before = lambda kind, name: None
    shelf.metadata.put(key, kept)
    assert fill(two.for_topic(TOPIC), [b"3"]) == range(3, 4)


def test_sealed_empty_topic_begins_at_zero_at_the_next_owner(place):
    """Fault 2.7: the seal of an empty topic stores 0, and the next owner begins at 1."""
    one = place.node("one")
    one.for_topic(TOPIC)
    assert one.flush_and_seal(TOPIC) == 0
    storage = place.node("two").for_topic(TOPIC)
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        assert fill(storage, [b"first"]) == range(1)
        assert offsets(take(stream, 1)) == [0]


def test_empty_topic_that_is_sealed_again_and_again_stays_where_it_is(place):
    """Fault 2.7: the same with a history, and owners that write nothing."""
    one = place.node("one")
    fill(one.for_topic(TOPIC), [b"only"])
    assert one.flush_and_seal(TOPIC) == 1
    for name in ("two", "three"):
        node = place.node(name)
        assert node.for_topic(TOPIC).topic.wal.next == 1
        assert node.flush_and_seal(TOPIC) == 1
    storage = place.node("one-again").for_topic(TOPIC)
    assert fill(storage, [b"second"]) == range(1, 2)
    assert payloads(read_from(storage, 0)) == [b"only", b"second"]


def test_seal_waits_for_everything_that_was_appended(place):
    """Fault 2.7: the flush of a seal is not waited for, nor are the cursors."""
    one = place.node("one")
    storage = one.for_topic(TOPIC)
    for payload in numbered(500):
        storage.append_message(TOPIC, record(payload))
    storage.ack_checkpoint(TOPIC, 400)
    assert one.flush_and_seal(TOPIC) == 500
    storage = place.node("two").for_topic(TOPIC)
    assert payloads(read_from(storage, 0)) == numbered(500)
    assert storage.checkpoint(TOPIC) == 401


def test_loss_of_an_owner_is_not_taken_for_a_hand_over(shelf):
    """Fault 2.7: after a crash a new owner begins behind the last export, and nobody is asked.

    What the lost node had acknowledged is on its disk, so the topic is given up there by an
    explicit word alone; without it the topic waits for that node and loses nothing.
    """
    one = shelf.node("one")
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(5))
    storage.topic.upload()
    fill(storage, numbered(5, first=5))
    one.shutdown()
    two = shelf.node("two")
    with pytest.raises(ConflictError, match="not handed it over") as caught:
        two.for_topic(TOPIC)
    assert caught.value.offset == 5
    storage = shelf.node("one").for_topic(TOPIC)
    assert payloads(read_from(storage, 0)) == numbered(10)


def test_checkpoint_that_proves_more_than_the_bucket_has_keeps_offsets_from_being_reused(place):
    """Fault 2.7: what was acknowledged and not exported is lost, and its offsets are given again.

    The log files are gone, the checkpoint says how far they went: the topic opens read-only.
    """
    one = place.node()
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(5))
    storage.topic.upload()
    fill(storage, numbered(5, first=5))
    one.shutdown()
    for path in place.logs():
        path.unlink()
    storage = place.node().for_topic(TOPIC)
    assert storage.topic.state is TopicState.QUARANTINED
    assert storage.topic.wal.next == 10
    with storage.create_reader(TOPIC, StartPosition.at(0)) as stream:
        assert offsets(take(stream, 5)) == list(range(5))
        with pytest.raises((CorruptDataError, DataGapError)):
            stream.next_batch(timeout=0)


def test_loss_of_a_topics_directory_is_not_taken_for_an_empty_log(place):
    """Fault 2.7: the same with the checkpoint gone too, on the node that wrote the topic last.

    Its messages were acknowledged as synced, so giving them up takes an explicit word here too.
    """
    one = place.node()
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(5))
    storage.topic.upload()
    fill(storage, numbered(5, first=5))
    one.shutdown()
    shutil.rmtree(place.files())
    one = place.node()
    try:
        storage = one.for_topic(TOPIC)
    except ConflictError:
        storage = one.for_topic(TOPIC, take_over=True)
        assert storage.topic.wal.next == 5
    else:
        assert storage.topic.state is TopicState.QUARANTINED


def test_cursor_ahead_of_a_new_owners_tip_does_not_pass_by_silently(shelf):
    """Fault 2.7: a cursor ahead of the new tip silently drops new messages: first, at the tip."""
    storage = taken_over_with_a_cursor_ahead(shelf)
    assert storage.topic.wal.next == 5
    with pytest.raises(OffsetOutOfRangeError) as caught:
        storage.create_reader(TOPIC, StartPosition.at(8))
    assert caught.value.next == 5


def test_cursor_ahead_of_a_new_owners_tip_drops_no_new_message(shelf):
    """Fault 2.7: a cursor ahead of the new tip silently drops new messages: later on."""
    storage = taken_over_with_a_cursor_ahead(shelf)
    fill(storage, [b"new"] * 10)
    assert storage.checkpoint(TOPIC) <= 5
    assert payloads(read_from(storage, storage.checkpoint(TOPIC)))[-10:] == [b"new"] * 10


def test_ack_at_a_new_owner_is_taken_though_an_old_cursor_was_ahead(shelf):
    """Fault 2.7: the other half of it: what the new owner's readers acknowledge is what counts."""
    storage = taken_over_with_a_cursor_ahead(shelf)
    fill(storage, [b"new"] * 2)
    assert storage.ack_checkpoint(TOPIC, 5) == 6


def test_owner_that_lost_its_topic_destroys_nothing():
    """Fault 2.7: an owner whose assignment vanishes (a rebalance, its end of lease) wipes all."""
    clock = ManualClock()
    with Shelf(clock=clock) as shelf:
        one = shelf.node("one")
        storage = one.for_topic(TOPIC)
        fill(storage, numbered(5))
        storage.topic.upload()
        storage.ack_checkpoint(TOPIC, 3)
        fill(storage, numbered(5, first=5))
        clock.advance(LEASE_SECONDS + 1)
        two = shelf.node("two")
        successor = two.for_topic(TOPIC, take_over=True)
        fill(successor, [b"new"])
        names = stored_keys(two)
        with pytest.raises(FencedError):
            storage.topic.upload()
        one.shutdown()
        assert stored_keys(two) == names
        assert payloads(read_from(successor, 0)) == [*numbered(5), b"new"]
        assert successor.checkpoint(TOPIC) == 4
        disk = shelf.disks["one"]
        assert "wal.log" in disk.list_directory(f"/wal{TOPIC}"), "its files stay for a person"
        two.flush_and_seal(TOPIC)
        again = shelf.node("one").for_topic(TOPIC)
        assert payloads(read_from(again, 0)) == [*numbered(5), b"new"]
        asides = [n for n in disk.list_directory("/wal/default") if "aside" in n]
        assert len(asides) == 1, "what it alone had is set aside, not mixed in and not removed"


def test_owner_without_a_lease_acknowledges_nothing():
    """Fault 2.7: no fencing: an owner that was stopped for long goes on as if nothing was."""
    clock = ManualClock()
    with Shelf(clock=clock) as shelf:
        storage = shelf.node("one").for_topic(TOPIC)
        fill(storage, numbered(1))
        clock.advance(LEASE_SECONDS + 1)
        offset = storage.append_message(TOPIC, record(b"?"))
        with pytest.raises(UnavailableError):
            storage.wait(offset)


def test_second_node_cannot_have_a_topic_that_is_open(shelf):
    """Fault 2.7: two owners at once."""
    storage = shelf.node("one").for_topic(TOPIC)
    two = shelf.node("two")
    for take_over in (False, True):
        with pytest.raises(ConflictError, match="is open on node"):
            two.for_topic(TOPIC, take_over=take_over)
    assert fill(storage, [b"0"]) == range(1)


def test_seal_that_the_stores_refuse_leaves_the_topic_and_its_files_where_they_are(shelf):
    """Fault 2.7: the local directory goes before the sealed state is stored."""
    one = shelf.node("one")
    fill(one.for_topic(TOPIC), numbered(10))
    sealed = catalog(one).keys.sealed

    def before(kind, key):
        if kind == "transact" and key == sealed:
            raise UnavailableError("injected")

    shelf.metadata.before = before
    with pytest.raises(UnavailableError):
        one.flush_and_seal(TOPIC)
    shelf.metadata.before = lambda kind, key: None
    assert "wal.log" in shelf.disks["one"].list_directory(f"/wal{TOPIC}")
    with pytest.raises(ConflictError):
        shelf.node("two").for_topic(TOPIC)
    storage = one.for_topic(TOPIC)
    assert fill(storage, [b"10"]) == range(10, 11)
    assert one.flush_and_seal(TOPIC) == 11


@pytest.mark.parametrize("point", ["tier.before_commit", "tier.after_commit", "tier.after_seal"])
def test_crash_inside_of_a_seal_loses_and_repeats_nothing(shelf, point):
    """Fault 2.7: a move that is cut off in the middle."""
    one = shelf.node("one")
    fill(one.for_topic(TOPIC), numbered(10))
    crash_at(point, one.flush_and_seal, TOPIC)
    shelf.kill(one)
    if point == "tier.after_seal":
        two = shelf.node("two")
        fill(two.for_topic(TOPIC), [b"10"])
        two.flush_and_seal(TOPIC)
        sent = numbered(11)
    else:
        sent = numbered(10)
    one = shelf.node("one")
    storage = one.for_topic(TOPIC)
    assert payloads(read_from(storage, 0)) == sent
    assert fill(storage, [b"on"]) == range(len(sent), len(sent) + 1)
    one.flush_and_seal(TOPIC)
    assert tiered_offsets(one) == list(range(len(sent) + 1))


def test_topics_of_a_single_node_are_found_again_after_a_restart(place):
    """Fault 2.7: a standalone broker does not know its topics after a restart."""
    one = place.node()
    names = ["/default/a", "/default/b"]
    for name in names:
        fill(one.for_topic(name), [name.encode()])
    one.shutdown()
    one = place.node()
    assert one.log.topics() == names
    for name in names:
        assert payloads(one.log.topic(name).read()) == [name.encode()]


def test_delete_on_a_single_node_leaves_no_files(tmp_path):
    """Fault 2.7: a standalone delete leaves the WAL files, and the topic comes back."""
    config = load_config({"storage": {"mode": "local_only", "wal": {"dir": str(tmp_path)}}}, {})
    with WalStorageFactory(config) as factory:
        fill(factory.for_topic(TOPIC), numbered(3))
        factory.delete_storage(TOPIC)
        assert not (tmp_path / "default/orders").exists()
        assert factory.log.topics() == []
        assert fill(factory.for_topic(TOPIC), [b"anew"]) == range(1)


@pytest.mark.parametrize("point", ["tier.after_mark_deleting", "tier.after_delete_object"])
def test_delete_that_was_cut_off_is_carried_through(shelf, point):
    """Fault 2.7: a delete leaves objects in the bucket."""
    one = shelf.node()
    storage = one.for_topic(TOPIC)
    for first in (0, 5, 10):
        fill(storage, numbered(5, first=first))
        storage.topic.upload()
    crash_at(point, one.delete_storage, TOPIC)
    shelf.kill(one)
    one = shelf.node()
    with pytest.raises(NotFoundError):
        one.for_topic(TOPIC)
    one.delete_storage(TOPIC)
    assert stored_keys(one) == []
    assert descriptors(one) == []
    storage = one.for_topic(TOPIC)
    assert fill(storage, [b"anew"]) == range(1)
    assert payloads(read_from(storage, 0)) == [b"anew"]


def test_appends_at_once_lie_on_disk_in_the_order_of_their_offsets(place):
    """Fault 2.7: concurrent appends are queued in another order than their offsets."""
    one = place.node(wal={"cache_capacity": 1})
    storage = one.for_topic(TOPIC)
    ready = threading.Barrier(8)

    def produce(number):
        ready.wait(60)
        told = {}
        for message in range(200):
            payload = b"%d:%d" % (number, message)
            told[storage.append_message(TOPIC, record(payload))] = payload
        return told

    tasks = [Task(produce, number) for number in range(8)]
    told = {}
    for task in tasks:
        told |= task.result()
    storage.flush(TOPIC)
    assert sorted(told) == list(range(1600))
    expected = 0
    for path in place.logs():
        scan = scan_frames(path.read_bytes(), expected_offset=expected)
        assert scan.end == path.stat().st_size
        expected = scan.next_offset
    assert expected == 1600
    assert payloads(read_from(storage, 0)) == [told[offset] for offset in range(1600)]


def test_every_tier_stamps_the_offset_into_the_message(place):
    """Fault 2.7: the stored copy is not stamped with its offset, and reads do not restamp it."""
    wal = {"cache_capacity": 5, "retention": {"time_minutes": 0}}
    one = place.node(wal=wal)
    storage = one.for_topic(TOPIC)
    stranger = MessageId(producer_id=7, topic_name="elsewhere", topic_offset=999)
    for _ in range(3):
        for _ in range(50):
            storage.append_message(TOPIC, record(b"x" * 100, msg_id=stranger))
        storage.flush(TOPIC)
        if storage.topic.wal.next == 50:
            storage.topic.upload()
    eventually(storage.topic.tier.trim)
    assert (storage.topic.watermarks.trimmed, storage.topic.cache.start) == (50, 145)
    found = read_from(storage, 0)
    assert offsets(found) == list(range(150))
    assert {m.msg_id.producer_id for m in found} == {7}
    stored = [message.record.msg_id.topic_offset for message in storage.topic.read(0)]
    assert stored == list(range(150)), "it is stamped where it is stored"


# -- how things get into shape ------------------------------------------------------------------


def move(shelf, *, lots, size):
    """So many objects of `size` messages by node one, which hands over; node two."""
    one = shelf.node("one")
    storage = one.for_topic(TOPIC)
    for lot in range(lots):
        fill(storage, numbered(size, first=lot * size))
        storage.topic.upload()
    one.flush_and_seal(TOPIC)
    one.shutdown()
    return shelf.node("two")


def taken_over_with_a_cursor_ahead(shelf):
    """Node one had 10 messages, 5 in the bucket, and a cursor at 8; node two goes on from 5."""
    one = shelf.node("one")
    storage = one.for_topic(TOPIC)
    fill(storage, numbered(5))
    storage.topic.upload()
    fill(storage, numbered(5, first=5))
    storage.ack_checkpoint(TOPIC, 7)
    one.shutdown()
    return shelf.node("two").for_topic(TOPIC, take_over=True)


def checkpoint_of(place):
    """What `wal.ckpt` of the topic says."""
    return WalDirectory(LocalFileSystem(), str(place.files())).load_state().checkpoint


def crash_at(point, function, *args):
    """Runs a function up to a failpoint, where the process ends."""

    def crash():
        raise SimulatedCrash

    failpoints.arm(point, crash)
    with pytest.raises(SimulatedCrash):
        function(*args)
    failpoints.disarm()
