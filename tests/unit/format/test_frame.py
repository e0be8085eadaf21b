"""Frames: the three results of decoding, and safe boundaries."""

import pytest

from ister.base.limits import FRAME_BODY_BYTES_MAX
from ister.errors import MessageTooLargeError
from ister.format.frame import (
    Corrupt,
    CorruptReason,
    Frame,
    NeedMore,
    decode_frame,
    encode_frame,
    find_frame,
    scan_frames,
)
from tests.support.builders import frames, measured_allocation, with_bit_flipped, with_bytes_at
from tests.support.cases import each

KIB = 1024

BODIES = [b"first", b"\0" * 20, b"x", bytes(range(256)), b"the last one"]
BUFFER = frames(10, BODIES)
STARTS = [sum(16 + len(body) for body in BODIES[:count]) for count in range(len(BODIES))]

LENGTH_AT, CRC_AT = 8, 12


def u32(value):
    return value.to_bytes(4, "little")


@each("body", [b"", bytes(FRAME_BODY_BYTES_MAX + 1)], ids=["empty", "over-limit"])
def test_body_of_impossible_size_is_refused(body):
    with pytest.raises(MessageTooLargeError):
        encode_frame(0, body)


def test_body_of_the_largest_size_survives():
    body = bytes(FRAME_BODY_BYTES_MAX)
    assert decode_frame(encode_frame(0, body)) == Frame(0, body, 16 + FRAME_BODY_BYTES_MAX)


@each("view", [bytes, bytearray, memoryview])
def test_frame_in_any_kind_of_buffer_decodes_to_bytes(view):
    decoded = decode_frame(view(BUFFER), STARTS[3], expected_offset=13)
    assert decoded == Frame(13, BODIES[3], STARTS[4])
    assert type(decoded.body) is bytes


def test_frame_cut_anywhere_needs_more():
    data = encode_frame(3, b"body")
    for size in range(16):
        assert decode_frame(data[:size], expected_offset=3) == NeedMore(16)
    for size in range(16, 20):
        assert decode_frame(data[:size], expected_offset=3) == NeedMore(20)


ONE = encode_frame(3, b"body")


@each(
    ("data", "reason"),
    [
        pytest.param(with_bytes_at(ONE, LENGTH_AT, u32(0)), "zero length", id="no-length"),
        pytest.param(bytes(100), "zero length", id="zeros"),
        pytest.param(
            with_bytes_at(ONE, LENGTH_AT, u32(FRAME_BODY_BYTES_MAX + 1)),
            "length over limit",
            id="one-over-limit",
        ),
        pytest.param(b"\xff" * 100, "length over limit", id="ones"),
        pytest.param(encode_frame(2, b"body"), "offset mismatch", id="offset-before"),
        pytest.param(encode_frame(4, b"body"), "offset mismatch", id="offset-behind"),
        pytest.param(encode_frame(4, b"body")[:16], "offset mismatch", id="judged-by-header-alone"),
        pytest.param(with_bytes_at(ONE, LENGTH_AT, u32(3)), "crc mismatch", id="shorter"),
        pytest.param(with_bytes_at(ONE, CRC_AT, u32(0)), "crc mismatch", id="other-crc"),
        pytest.param(ONE[:-1] + b"Y", "crc mismatch", id="other-body"),
    ],
)
def test_bad_frame_is_corrupt_with_its_reason(data, reason):
    decoded = decode_frame(data, expected_offset=3)
    assert isinstance(decoded, Corrupt)
    assert decoded.reason is CorruptReason(reason)
    assert scan_frames(data, expected_offset=3).stop.reason is decoded.reason


@each("length", [FRAME_BODY_BYTES_MAX, FRAME_BODY_BYTES_MAX + 1, 0xFFFFFFFF])
def test_length_bomb_allocates_nothing(length):
    data = with_bytes_at(ONE, LENGTH_AT, u32(length)) * 8
    with measured_allocation() as allocation:
        decoded = decode_frame(data)
        scan = scan_frames(data)
        found = find_frame(data, 0, offset_min=0, offset_max=2**64)
    if length == FRAME_BODY_BYTES_MAX:
        assert decoded == scan.stop == NeedMore(16 + length)
    else:
        assert decoded.reason is scan.stop.reason is CorruptReason.LENGTH_OVER_LIMIT
    assert found is None
    assert allocation.peak_bytes < 64 * KIB


@each(
    ("expected_offset", "end_offset", "count", "next_offset"),
    [
        pytest.param(10, None, 5, 15, id="right-expectation"),
        pytest.param(9, None, 0, 9, id="expects-earlier"),
        pytest.param(11, None, 0, 11, id="expects-later"),
        pytest.param(10, 10, 0, 10, id="ends-at-once"),
        pytest.param(10, 12, 2, 12, id="ends-within"),
        pytest.param(10, 15, 5, 15, id="ends-at-the-end"),
        pytest.param(10, 99, 5, 15, id="ends-beyond"),
    ],
)
def test_scan_is_bounded_by_offsets(expected_offset, end_offset, count, next_offset):
    scan = scan_frames(BUFFER, expected_offset=expected_offset, end_offset=end_offset)
    assert scan.starts == STARTS[:count]
    assert scan.end == [*STARTS, len(BUFFER)][count]
    assert scan.next_offset == next_offset


def test_any_flipped_bit_in_a_middle_frame_ends_the_scan_before_it():
    """Flips each bit of the second of three frames, and names what may be reported for it.

    The header has no crc: a flip in `len` may ask for bytes that are not there, and a flip in
    `offset` is seen only through the expectation. No flip may let a changed frame through.
    """
    middle = b"the middle of three"
    buffer = frames(100, [b"before", middle, b"behind"])
    start, size = 16 + len(b"before"), 16 + len(middle)
    reasons_by_field = {
        range(8): {CorruptReason.OFFSET_MISMATCH},
        range(8, 12): {CorruptReason.CRC_MISMATCH, CorruptReason.LENGTH_OVER_LIMIT, None},
        range(12, size): {CorruptReason.CRC_MISMATCH},
    }
    for field, reasons in reasons_by_field.items():
        seen = set()
        for bit in range(field.start * 8, field.stop * 8):
            damaged = with_bit_flipped(buffer, start * 8 + bit)
            scan = scan_frames(damaged, expected_offset=100)
            assert (scan.starts, scan.end, scan.next_offset) == ([0], start, 101), bit
            seen.add(scan.stop.reason if isinstance(scan.stop, Corrupt) else None)
        assert seen == reasons


@each(
    ("position", "offset_min", "offset_max", "found"),
    [
        pytest.param(0, 0, 2**64, (0, 10), id="at-once"),
        pytest.param(1, 0, 2**64, (STARTS[1], 11), id="next"),
        pytest.param(0, 12, 2**64, (STARTS[2], 12), id="offset-min-is-inclusive"),
        pytest.param(STARTS[2], 11, 14, (STARTS[2], 12), id="from-the-position-on"),
        pytest.param(1, 0, 11, None, id="offset-max-is-exclusive"),
        pytest.param(STARTS[4] + 1, 0, 2**64, None, id="behind-the-last"),
        pytest.param(len(BUFFER), 0, 2**64, None, id="at-the-end"),
    ],
)
def test_frame_is_looked_for_at_any_position(position, offset_min, offset_max, found):
    assert find_frame(BUFFER, position, offset_min=offset_min, offset_max=offset_max) == found


def test_frame_behind_damage_is_found():
    damaged = BUFFER[: STARTS[1]] + b"rubbish" + BUFFER[STARTS[2] :]
    position = STARTS[1] + len(b"rubbish")
    found = find_frame(damaged, STARTS[1], offset_min=11, offset_max=99)
    assert found == (position, 12)
    assert scan_frames(damaged, position, expected_offset=12).end == len(damaged)


def test_damaged_and_cut_frames_are_not_found():
    damaged = with_bit_flipped(ONE, len(ONE) * 8 - 1)
    for data in (damaged, ONE[:-1], ONE[1:], b""):
        assert find_frame(b"before" + data, 0, offset_min=3, offset_max=4) is None
