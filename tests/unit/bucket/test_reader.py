"""Reading objects back: positions, chunks, damage, and objects that change under a reader."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ister.bucket.chunks import OBJECTS_AHEAD_MAX
from ister.errors import CorruptDataError, DataGapError, InvariantError, UnavailableError
from ister.format.descriptor import encode_descriptor
from tests.support.builders import frames as raw_frames
from tests.support.stores import KIB, Frames, SlowReads, a_descriptor, frames_of, read_all

CHUNK = 64 * KIB


@pytest.fixture
def ahead():
    with ThreadPoolExecutor(2) as threads:
        yield threads


def payloads(count, size=100):
    return [b"%d." % number + b"x" * size for number in range(count)]


def as_pairs(frames, start, end):
    return list(enumerate(frames.frames[start - frames.first : end - frames.first], start))


def test_objects_that_follow_are_fetched_at_the_same_time(cluster):
    """Goal: a reader that goes on from object to object does not wait for each of them."""
    frames = Frames(payloads(300))
    cluster.filled(frames, *range(10, 301, 10))
    with ThreadPoolExecutor(OBJECTS_AHEAD_MAX) as ahead:
        reader = cluster.reader(chunk_bytes=CHUNK, ahead=ahead)
        # The first object may be all that is wanted.
        slow = SlowReads(cluster.objects, OBJECTS_AHEAD_MAX + 1, alone=1)
        found = []
        start = 0
        while start < 300:
            batch = reader.fetch(start, 300, bytes_max=1000)
            assert reader.held_bytes <= 2 * CHUNK
            found += frames_of(batch)
            start = batch.next_offset
        assert found == frames.frames
        assert slow.most == OBJECTS_AHEAD_MAX + 1
        assert cluster.metrics.snapshot()["cloud_reader.range_requests_total"] == 30
        reader.close()
        assert reader.held_bytes == 0


def test_objects_that_follow_are_not_fetched_for_one_message(cluster):
    frames = Frames(payloads(300))
    cluster.filled(frames, *range(10, 301, 10))
    with ThreadPoolExecutor(OBJECTS_AHEAD_MAX) as ahead:
        for start in (5, 95, 204):
            reader = cluster.reader(chunk_bytes=CHUNK, ahead=ahead)
            reader.fetch(start, 300, bytes_max=100)
            reader.close()
    assert cluster.metrics.snapshot()["cloud_reader.range_requests_total"] == 3


def put_raw(cluster, start, end, data, **fields):
    """An object with any bytes, and a descriptor that promises frames."""
    described = a_descriptor(start, end, size_bytes=len(data), checksum=None, **fields)
    cluster.objects.put(cluster.key(described.object_id), data)
    cluster.metadata.put(cluster.keys.descriptor(start), encode_descriptor(described))
    return described


def change_descriptor(cluster, described, **fields):
    changed = replace(described, **fields)
    cluster.metadata.put(cluster.keys.descriptor(described.start), encode_descriptor(changed))
    return changed


# -- plain reading ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranged", [True, False], ids=["ranged", "whole"])
@pytest.mark.parametrize("is_ahead", [True, False], ids=["ahead", "not ahead"])
def test_everything_comes_back_in_order(cluster, ahead, ranged, is_ahead):
    frames = Frames(payloads(3000, size=200))
    cluster.filled(frames, 700, 701, 3000)
    reader = cluster.reader(ranged=ranged, ahead=ahead if is_ahead else None)
    assert read_all(reader, 0, 3000) == as_pairs(frames, 0, 3000)
    reader.close()


def test_fetch_of_nothing_is_refused(cluster):
    with pytest.raises(InvariantError):
        cluster.reader().fetch(5, 5, bytes_max=100)


def test_reader_jumps_in_any_order(cluster, ahead):
    frames = Frames(payloads(500, size=1000))
    cluster.filled(frames, 200, 500)
    reader = cluster.reader(ahead=ahead)
    for start in (450, 0, 201, 199, 450, 10, 11):
        batch = reader.fetch(start, start + 1, bytes_max=1)
        assert frames_of(batch) == [frames.frames[start]]


# -- where it begins ----------------------------------------------------------------------------


def test_read_begins_at_the_last_entry_before(cluster):
    frames = Frames(payloads(2000, size=1000))
    cluster.filled(frames, 2000, index_every_messages=100)
    cluster.reader().fetch(1234, 1235, bytes_max=1)
    assert [start for _, start, _ in cluster.objects.reads] == [len(frames.between(0, 1200))]


# -- chunks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", range(40))
def test_frame_cut_by_a_chunk_at_any_byte_is_read_whole(cluster, shift):
    """Goal: a boundary inside of a header or of a body loses nothing.

    Method: the first message moves every later frame by one byte at a time.
    """
    sizes = [CHUNK - 200 + shift, 0, 0, 0, 0, 30]
    frames = Frames([b"x" * size for size in sizes])
    cluster.filled(frames, 6)
    reader = cluster.reader(chunk_bytes=CHUNK)
    assert read_all(reader, 0, 6, bytes_max=1) == as_pairs(frames, 0, 6)
    assert len(cluster.objects.reads) >= 2


@pytest.mark.parametrize("is_ahead", [True, False], ids=["ahead", "not ahead"])
def test_frame_larger_than_a_chunk_is_read_whole(cluster, ahead, is_ahead):
    frames = Frames([b"a", b"b" * (3 * CHUNK + 17), b"c", b"d" * (CHUNK + 1), b"e"])
    cluster.filled(frames, 5)
    reader = cluster.reader(chunk_bytes=CHUNK, ahead=ahead if is_ahead else None)
    assert read_all(reader, 0, 5) == as_pairs(frames, 0, 5)
    assert read_all(reader, 1, 2) == as_pairs(frames, 1, 2)


def test_whole_objects_are_read_once_where_ranges_are_off(cluster):
    frames = Frames(payloads(2000, size=200))
    cluster.filled(frames, 1000, 2000)
    reader = cluster.reader(ranged=False)
    assert read_all(reader, 500, 2000, bytes_max=1000) == as_pairs(frames, 500, 2000)
    sizes = [d.size_bytes for d, _ in cluster.catalog().descriptors()]
    assert [(start, size) for _, start, size in cluster.objects.reads] == [
        (0, size) for size in sizes
    ]
    assert reader.held_bytes == sizes[-1]
    reader.close()
    assert reader.held_bytes == 0


def test_read_ahead_fetches_what_comes_next_and_nothing_twice(cluster, ahead):
    frames = Frames(payloads(2000, size=400))
    cluster.filled(frames, 2000)
    reader = cluster.reader(chunk_bytes=CHUNK, ahead=ahead)
    assert read_all(reader, 0, 2000) == as_pairs(frames, 0, 2000)
    starts = [start for _, start, _ in cluster.objects.reads]
    assert len(starts) == len(set(starts))


def test_failure_of_what_was_fetched_ahead_shows_at_the_next_fetch_alone(cluster, ahead):
    frames = Frames(payloads(1000, size=400))
    cluster.filled(frames, 1000)
    reader = cluster.reader(chunk_bytes=CHUNK, ahead=ahead)
    seen = 0

    def fail(kind, key):
        nonlocal seen
        seen += kind == "read"
        if seen == 2:
            raise UnavailableError("silent")

    cluster.objects.before = fail
    first = reader.fetch(0, 1000, bytes_max=CHUNK)
    with pytest.raises(UnavailableError):
        reader.fetch(first.next_offset, 1000, bytes_max=CHUNK)
    rest = read_all(reader, first.next_offset, 1000)
    assert rest == as_pairs(frames, first.next_offset, 1000)


# -- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranged", [True, False], ids=["ranged", "whole"])
def test_bit_flipped_on_the_way_once_is_read_again(cluster, ranged):
    frames = Frames(payloads(50))
    cluster.filled(frames, 50)
    key = cluster.key(cluster.catalog().last().object_id)
    reader = cluster.reader(ranged=ranged)
    reads = 0

    def flip(kind, name):
        nonlocal reads
        if kind == "read":
            reads += 1
            if reads <= 2:
                cluster.objects.corrupt(key, 30)  # there at the first read, gone at the second

    cluster.objects.before = flip
    assert read_all(reader, 0, 50) == as_pairs(frames, 0, 50)
    assert reads == 2


def damage(cluster, frames, offset, *, within=20):
    """Flips a bit of one frame for good."""
    described = cluster.catalog().find(offset)
    position = len(frames.between(described.start, offset)) + within
    cluster.objects.corrupt(cluster.key(described.object_id), position)
    return described, position - within


@pytest.mark.parametrize("within", [0, 9, 13, 20], ids=["offset", "length", "crc", "body"])
@pytest.mark.parametrize("offset", [0, 1, 25, 49])
def test_damage_is_an_error_that_says_where(cluster, offset, within):
    frames = Frames(payloads(50))
    cluster.filled(frames, 50)
    described, position = damage(cluster, frames, offset, within=within)
    reader = cluster.reader()
    if offset:
        assert read_all(reader, 0, offset) == as_pairs(frames, 0, offset)
    for _ in range(2):
        with pytest.raises(CorruptDataError) as refused:
            reader.fetch(offset, 50, bytes_max=1 << 20)
        assert refused.value.offset == offset
        assert refused.value.position == position
        assert refused.value.path == cluster.key(described.object_id)
        assert refused.value.topic == "/default/orders"


def test_damage_at_the_end_of_an_object_is_left_out_and_the_next_one_follows(cluster):
    frames = Frames(payloads(30))
    cluster.filled(frames, 10, 20, 30)
    damage(cluster, frames, 19)
    found = read_all(cluster.reader(skips_damage=True), 0, 30)
    assert found == as_pairs(frames, 0, 19) + as_pairs(frames, 20, 30)


def test_large_message_behind_damage_is_not_left_out_with_it(cluster):
    size = CHUNK * 3 // 4
    frames = Frames([b"%d" % number * size for number in range(6)])
    cluster.filled(frames, 6)
    damage(cluster, frames, 2)
    found = read_all(cluster.reader(chunk_bytes=CHUNK, skips_damage=True), 0, 6)
    assert [offset for offset, _ in found] == [0, 1, 3, 4, 5]


def test_object_with_frames_of_other_offsets_is_damaged(cluster):
    put_raw(cluster, 0, 3, raw_frames(5, [b"a", b"b", b"c"]))
    with pytest.raises(CorruptDataError) as refused:
        cluster.reader().fetch(0, 3, bytes_max=100)
    assert (refused.value.offset, refused.value.position) == (0, 0)


# -- objects that are not there -----------------------------------------------------------------


def test_gap_before_the_first_and_after_the_last_object_say_their_range(cluster):
    frames = Frames(payloads(20), first=50)
    cluster.filled(frames, 70)
    with pytest.raises(DataGapError) as gap:
        cluster.reader().fetch(12, 70, bytes_max=100)
    assert (gap.value.start, gap.value.end) == (12, 50)
    with pytest.raises(DataGapError) as gap:
        cluster.reader().fetch(70, 80, bytes_max=100)
    assert gap.value.start == 70


# -- by time ------------------------------------------------------------------------------------


def test_time_is_the_first_message_of_it_even_if_clocks_went_back(cluster):
    times = [100, 105, 103, 104, 110, 101, 107, 120, 90, 119]
    cluster.filled(Frames(payloads(10), times=times), 4, 10, index_every_messages=2)
    for wanted in range(90, 122):
        first = next((at for at, time in enumerate(times) if time >= wanted), None)
        assert cluster.reader().find_time(wanted, end=10) == first, wanted


def test_objects_before_the_time_are_not_read(cluster):
    cluster.filled(Frames(payloads(30), times=range(100, 130)), 10, 20, 30)
    cluster.reader().find_time(125, end=30)
    assert {key for key, _, _ in cluster.objects.reads} == {
        cluster.key(cluster.catalog().last().object_id)
    }


def test_time_in_objects_that_do_not_tell_is_found_by_reading(cluster):
    frames = Frames(payloads(30), times=range(100, 130))
    cluster.filled(frames, 10, 30)
    for described, _ in list(cluster.catalog().descriptors()):
        change_descriptor(
            cluster, described, publish_time_min=None, publish_time_max=None, publish_time_index=()
        )
    assert cluster.reader().find_time(117, end=30) == 17
