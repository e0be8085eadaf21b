"""What a descriptor says about an object, gathered in one pass over its frames."""

import zlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ister.base.limits import MIB, OBJECT_INDEX_ENTRIES_MAX
from ister.base.model import Codec
from ister.bucket.object_maker import ObjectSummary
from ister.errors import InvariantError
from tests.support.builders import frames as raw_frames
from tests.support.cases import each
from tests.support.stores import NOW_MS, Frames, a_batch


def summarise(frames, *, every=10, batches=(7,)):
    """The descriptor of all frames, added in batches of these sizes in turn."""
    summary = ObjectSummary(frames.first, index_every_messages=every)
    at, turn = 0, 0
    data = b""
    while at < len(frames):
        size = batches[turn % len(batches)]
        turn += 1
        batch = a_batch(frames.frames[at : at + size], frames.first + at, frames.codec)
        data += bytes(summary.add(batch))
        at += size
    assert data == b"".join(frames.frames)
    return summary.describe("x.dnb1", epoch=3, incarnation="i", created_at=5, etag="e")


def payloads(count, size=20):
    return [b"%d." % number + b"x" * size for number in range(count)]


def position(frames, offset):
    return len(frames.between(frames.first, offset))


def test_descriptor_says_what_the_frames_are():
    frames = Frames(payloads(25), first=100, times=range(50, 75), codec=Codec.BINCODE1)
    found = summarise(frames)
    data = b"".join(frames.frames)
    assert (found.start, found.end, found.messages) == (100, 125, 25)
    assert (found.size_bytes, found.checksum) == (len(data), f"crc32:{zlib.crc32(data):08x}")
    assert (found.object_id, found.epoch, found.incarnation) == ("x.dnb1", 3, "i")
    assert (found.created_at, found.etag, found.codec) == (5, "e", Codec.BINCODE1)
    assert (found.publish_time_min, found.publish_time_max) == (50, 74)


@each("every", [1, 2, 10, 24, 25, 100])
def test_index_has_an_entry_every_so_many_messages(every):
    frames = Frames(payloads(25), first=100)
    found = summarise(frames, every=every)
    expected = range(100, 125, every)
    assert found.offset_index == tuple((offset, position(frames, offset)) for offset in expected)


def test_index_has_an_entry_every_megabyte_of_large_messages():
    frames = Frames(payloads(12, size=400 * 1024))
    found = summarise(frames, every=1000, batches=(5,))
    # A frame is a little over 400 KiB, so every third one begins a megabyte after the last entry.
    assert [offset for offset, _ in found.offset_index] == [0, 3, 6, 9]
    for (_, one), (_, other) in pairwise(found.offset_index):
        assert other - one >= MIB


@given(
    count=st.integers(1, 80),
    every=st.integers(1, 30),
    batches=st.lists(st.integers(1, 40), min_size=1, max_size=5),
)
@settings(max_examples=60)
def test_how_frames_come_in_makes_no_difference(count, every, batches):
    frames = Frames(payloads(count), times=[(7919 * n) % 101 for n in range(count)])
    assert summarise(frames, every=every, batches=batches) == summarise(
        frames, every=every, batches=(count,)
    )


@each("batches", [(1,), (100,), (5000,)], ids=["one", "some", "all"])
def test_index_that_is_full_keeps_every_second_entry_and_widens(batches):
    frames = Frames(payloads(2 * OBJECT_INDEX_ENTRIES_MAX + 1, size=0))
    found = summarise(frames, every=1, batches=batches)
    offsets = [offset for offset, _ in found.offset_index]
    assert len(offsets) <= OBJECT_INDEX_ENTRIES_MAX
    assert offsets[0] == 0
    gaps = {other - one for one, other in pairwise(offsets)}
    assert gaps <= {2, 4}
    assert offsets[-1] >= len(frames) - 8
    assert all(at == position(frames, offset) for offset, at in found.offset_index)


def test_index_widens_in_bytes_too():
    summary = ObjectSummary(0, index_every_messages=10**9)
    frame = raw_frames(0, [b"x" * MIB])
    for offset in range(OBJECT_INDEX_ENTRIES_MAX + 40):
        summary.add(a_batch([frame], offset))
    found = summary.describe("x", epoch=1, incarnation="", created_at=0, etag=None)
    assert len(found.offset_index) <= OBJECT_INDEX_ENTRIES_MAX
    assert len(found.offset_index) > OBJECT_INDEX_ENTRIES_MAX // 4


# -- times --------------------------------------------------------------------------------------


@given(
    times=st.lists(st.integers(0, 2**62), min_size=1, max_size=60),
    every=st.integers(1, 9),
    batch=st.integers(1, 20),
)
@settings(max_examples=60)
def test_each_entry_has_the_highest_time_before_it(times, every, batch):
    found = summarise(Frames(payloads(len(times)), times=times), every=every, batches=(batch,))
    assert len(found.publish_time_index) == len(found.offset_index)
    for (offset, _), before in zip(found.offset_index, found.publish_time_index, strict=True):
        assert before == max(times[:offset], default=0)
    assert (found.publish_time_min, found.publish_time_max) == (min(times), max(times))


def test_times_stay_right_when_the_index_widens():
    times = [(7919 * n) % 10_007 for n in range(OBJECT_INDEX_ENTRIES_MAX * 3)]
    found = summarise(Frames(payloads(len(times), size=0), times=times), every=1, batches=(13,))
    for (offset, _), before in zip(found.offset_index, found.publish_time_index, strict=True):
        assert before == max(times[:offset], default=0)


def test_object_with_a_message_of_another_kind_has_no_times():
    summary = ObjectSummary(0, index_every_messages=1)
    good = Frames(payloads(2), times=[NOW_MS] * 2)
    summary.add(a_batch(good.frames, 0))
    summary.add(a_batch([raw_frames(2, [b"\xff"])], 2))
    summary.add(a_batch(Frames(payloads(2), first=3).frames, 3))
    found = summary.describe("x", epoch=1, incarnation="", created_at=0, etag=None)
    assert (found.publish_time_min, found.publish_time_max) == (None, None)
    assert found.publish_time_index == ()
    assert [offset for offset, _ in found.offset_index] == [0, 1, 2, 3, 4]


# -- what must not happen -----------------------------------------------------------------------


@each("first", [4, 6])
def test_frames_with_a_hole_or_twice_are_refused(first):
    summary = ObjectSummary(0, index_every_messages=10)
    summary.add(a_batch(Frames(payloads(5)).frames, 0))
    with pytest.raises(InvariantError):
        summary.add(a_batch(Frames(payloads(2), first=first).frames, first))


def test_frames_of_another_codec_are_refused():
    summary = ObjectSummary(0, index_every_messages=10)
    summary.add(a_batch(Frames(payloads(5)).frames, 0))
    other = Frames(payloads(2), first=5, codec=Codec.BINCODE1)
    with pytest.raises(InvariantError):
        summary.add(a_batch(other.frames, 5, Codec.BINCODE1))
