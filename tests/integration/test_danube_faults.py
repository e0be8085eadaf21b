"""Faults that were found in Danube's storage, each as a test that it does not exist here.

Faults are numbered by where they lie: 2.1 append and durability, 2.2 `Latest`, 2.3 handoff and
readers, 2.4 the uploader of 0.5, 2.5 the segment exporter of later versions, 2.6 retention, 2.7
restart, crash, move and delete. Those that unit tests show not to exist are in docs/TESTING.md.
"""

import errno
import os
import shutil
import threading
import time
from dataclasses import replace

import pytest

from ister.base import failpoints
from ister.base.model import MessageId, TopicState
from ister.config import load_config
from ister.errors import (
    ClosedError,
    ConflictError,
    CorruptDataError,
    DiskError,
    FencedError,
    OffsetOutOfRangeError,
    UnavailableError,
)
from ister.format.checkpoint import UploaderCheckpoint
from ister.format.frame import scan_frames
from ister.fs.local import LocalFileSystem
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
from tests.support.clock import ManualClock
from tests.support.danube_storage import StartPosition, WalStorageFactory
from tests.support.machine import Task, eventually, numbered, payloads
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


# -- 2.2: Latest ----------------------------------------------------------------------------------


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
        eventually(storage.topic.bucket.retention.trim)
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
        storage.topic.bucket.uploads.upload()
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
    assert storage.topic.bucket.retention.trim() == 1
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


# -- 2.6: retention -------------------------------------------------------------------------------


def test_retention_is_not_undone_by_the_next_flush(place):
    """Fault 2.6: the writer's next checkpoint begins at 0 again, with every file ever rotated."""
    wal = {"cache_capacity": 1, "retention": {"time_minutes": 5}}
    one = place.node(wal=wal)
    storage = one.for_topic(TOPIC)
    three_files(storage)
    storage.topic.upload()
    grow_old(place.logs()[0])
    assert storage.topic.bucket.retention.trim() == 1
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
        eventually(storage.topic.bucket.retention.trim, "the oldest file is a millisecond old")
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
    assert storage.topic.bucket.retention.trim() == 4
    assert len(place.logs()) == 5


# -- 2.7: restart, crash, move, delete ------------------------------------------------------------


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
    eventually(storage.topic.bucket.retention.trim)
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
