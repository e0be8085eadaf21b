"""Whether an object is what its descriptor says."""

from dataclasses import replace

import pytest

from ister.bucket.check import verify_content, verify_size, walk_frames
from ister.errors import CorruptDataError, UnavailableError
from tests.support.stores import Cluster, Frames, silent

PAYLOADS = [b"%d" % number * 50 for number in range(40)]


@pytest.fixture
def cluster():
    cluster = Cluster()
    cluster.filled(Frames(PAYLOADS), 40)
    return cluster


@pytest.fixture
def described(cluster):
    return cluster.catalog().last()


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000, 1 << 20])
def test_whole_object_is_fine_however_it_is_read(cluster, described, chunk_bytes):
    verify_content(
        cluster.objects, cluster.key(described.object_id), described, chunk_bytes=chunk_bytes
    )
    read = cluster.objects.bytes_read(cluster.key(described.object_id))
    assert read == described.size_bytes


def test_size_alone_reads_nothing_and_gives_the_etag(cluster, described):
    key = cluster.key(described.object_id)
    assert verify_size(cluster.objects, key, described.size_bytes) == described.etag
    assert cluster.objects.reads == []


@pytest.mark.parametrize("position", [0, 17, -1])
def test_flipped_bit_is_found_by_content_and_not_by_size(cluster, described, position):
    key = cluster.key(described.object_id)
    cluster.objects.corrupt(key, position)
    verify_size(cluster.objects, key, described.size_bytes)
    with pytest.raises(CorruptDataError, match="checksum") as refused:
        verify_content(cluster.objects, key, described, chunk_bytes=100)
    assert (refused.value.path, refused.value.offset) == (key, described.start)


@pytest.mark.parametrize("change", [-1, 1, -1000])
def test_other_size_is_found_by_both(cluster, described, change):
    key = cluster.key(described.object_id)
    data = cluster.object_bytes(described.object_id)
    cluster.objects.put(key, data[:change] if change < 0 else data + b"x" * change)
    with pytest.raises(CorruptDataError, match="bytes"):
        verify_size(cluster.objects, key, described.size_bytes)
    with pytest.raises(CorruptDataError, match="bytes"):
        verify_content(cluster.objects, key, described, chunk_bytes=100)


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
def test_object_without_a_checksum_on_record_is_checked_frame_by_frame(
    cluster, described, chunk_bytes
):
    key = cluster.key(described.object_id)
    foreign = replace(described, checksum=None)
    verify_content(cluster.objects, key, foreign, chunk_bytes=chunk_bytes)
    with pytest.raises(CorruptDataError):
        verify_content(
            cluster.objects, key, replace(foreign, size_bytes=5), chunk_bytes=chunk_bytes
        )
    cluster.objects.corrupt(key, 20)
    with pytest.raises(CorruptDataError) as refused:
        verify_content(cluster.objects, key, foreign, chunk_bytes=chunk_bytes)
    assert (refused.value.path, refused.value.offset) == (key, 0)


@pytest.mark.parametrize("count", [39, 41])
def test_frames_other_than_promised_are_damage(cluster, described, count):
    key = cluster.key(described.object_id)
    batches = walk_frames(cluster.objects, key, 0, count, chunk_bytes=500)
    with pytest.raises(CorruptDataError):
        list(batches)


def test_object_that_ends_while_it_is_read_is_damaged(cluster, described):
    key = cluster.key(described.object_id)
    data = cluster.object_bytes(described.object_id)
    reads = []

    def swap(kind, name):
        if kind == "read":
            reads.append(name)
            if len(reads) == 2:
                cluster.objects.store(key, data[:50])
        elif kind == "stat":
            cluster.objects.store(key, data)

    cluster.objects.before = swap
    with pytest.raises(CorruptDataError, match="ends at byte"):
        verify_content(cluster.objects, key, described, chunk_bytes=100)


def test_silent_store_is_not_taken_for_damage(cluster, described):
    cluster.objects.before = silent
    with pytest.raises(UnavailableError):
        verify_content(
            cluster.objects, cluster.key(described.object_id), described, chunk_bytes=100
        )
