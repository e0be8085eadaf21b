"""The next whole frame behind damage is found, wherever the damage is."""

import random

from ister.format.frame import encode_frame
from ister.format.frame_search import find_frame_behind, read_frame, search_frame


def a_file(offsets, *, size=40):
    """Frames with random bodies, and where each begins."""
    rng = random.Random(7)
    data, starts = b"", []
    for offset in offsets:
        starts.append(len(data))
        data += encode_frame(offset, rng.randbytes(rng.randint(1, size)))
    return bytearray(data), starts


def reader_of(data):
    return lambda position, size: bytes(data[position : position + size])


def behind(data, position, offset, *, end=None, chunk_bytes=1 << 20):
    return find_frame_behind(
        reader_of(data),
        position,
        offset,
        size_bytes=len(data),
        end_offset=end,
        chunk_bytes=chunk_bytes,
    )


def test_any_damaged_byte_costs_one_frame():
    for first in (0, 65_500, 1 << 40):
        data, starts = a_file(range(first, first + 60))
        for position in range(starts[20], starts[21]):
            for chunk_bytes in (19, 1 << 20):
                damaged = data.copy()
                damaged[position] ^= 0x55
                found = behind(damaged, starts[20], first + 20, chunk_bytes=chunk_bytes)
                assert found == (starts[21], first + 21), (first, position, chunk_bytes)


def test_frame_that_is_whole_after_inserted_or_missing_bytes_is_kept():
    data, starts = a_file(range(10, 20))
    inserted = data[: starts[3]] + b"\xff" * 5 + data[starts[3] :]
    assert behind(inserted, starts[3], 13) == (starts[3] + 5, 13)
    missing = data[: starts[3]] + data[starts[5] :]
    assert behind(missing, starts[3], 13) == (starts[3], 15)


def test_zeros_and_garbage_are_passed_and_an_unknown_offset_is_found():
    data, _ = a_file(range(7, 12))
    for garbage in (bytes(100_000), random.Random(1).randbytes(5000)):
        assert behind(garbage + data, 0, 3) == (len(garbage), 7)
        assert behind(garbage[:9000] + data, 0, None) == (len(garbage[:9000]), 7)
        assert behind(garbage, 0, 3) is None


def test_damaged_last_frame_ends_the_file():
    data, starts = a_file(range(5))
    data[-1] ^= 1
    assert behind(data, starts[4], 4) is None
    assert behind(data, starts[4], 4, end=5) == (len(data), 5)


def test_frame_larger_than_a_chunk_is_found():
    data, starts = a_file(range(3))
    large = encode_frame(3, b"x" * 5000)
    data[starts[2] + 8] = 0
    assert behind(data + large, starts[2], 2, chunk_bytes=64) == (len(data), 3)


def test_search_keeps_to_its_range_of_offsets():
    data, starts = a_file(range(100, 110))
    for low, high, found in ((105, 106, 5), (0, 101, 0), (107, 1 << 20, 7)):
        got = search_frame(
            reader_of(data), 0, offset_min=low, end_offset=high, size_bytes=len(data)
        )
        assert got == (starts[found], 100 + found), (low, high)
    assert (
        search_frame(reader_of(data), 0, offset_min=110, end_offset=999, size_bytes=len(data))
        is None
    )


def test_only_a_whole_frame_is_read():
    data, starts = a_file(range(3))
    assert read_frame(reader_of(data), starts[1]).offset == 1
    assert read_frame(reader_of(data), starts[1], expected_offset=2) is None
    assert read_frame(reader_of(data), starts[1] + 1) is None
    assert read_frame(reader_of(data), len(data)) is None
    assert read_frame(reader_of(data[:-1]), starts[2]) is None
