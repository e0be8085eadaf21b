"""Publish times of many frames at once: compiled and in Python the same, or None."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ister import kernels
from ister.base.model import Codec
from ister.format.frame import encode_frame
from ister.format.message import decode_publish_times
from tests.support.builders import a_message, bincode_body
from tests.support.cases import each

CODECS = pytest.mark.parametrize("codec", list(Codec))


@pytest.fixture(scope="module", autouse=True)
def loaded():
    if not kernels.load():
        pytest.skip("numba is not installed: the extra `fast` is half of what is tested here")


def both(chunk, starts, end, codec):
    """What each of the two loops says."""
    fast = kernels.publish_times(chunk, starts, end, is_varint=codec is Codec.BINCODE2)
    kept, kernels._current = kernels._current, None
    try:
        return fast, decode_publish_times(chunk, starts, end, codec)
    finally:
        kernels._current = kept


def laid_out(bodies):
    """The bodies as frames in a chunk, with bytes around them."""
    chunk, starts = b"head", []
    for number, body in enumerate(bodies):
        starts.append(len(chunk))
        chunk += encode_frame(number, body)
    return chunk + b"tail" * 8, starts, len(chunk)


def bodies_of(times, codec):
    return [
        bincode_body(a_message(publish_time=time, payload=b"x" * (time % 300)), codec)
        for time in times
    ]


@CODECS
@given(times=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=30))
def test_times_are_those_of_the_messages(codec, times):
    chunk, starts, end = laid_out(bodies_of(times, codec))
    fast, slow = both(chunk, starts, end, codec)
    assert fast == slow == times


@CODECS
@each("time", [2**63, 2**64 - 1])
def test_times_that_no_clock_gives_are_treated_alike(codec, time):
    chunk, starts, end = laid_out(bodies_of([5, time], codec))
    fast, slow = both(chunk, starts, end, codec)
    assert fast == slow


@CODECS
def test_bodies_cut_anywhere_before_their_time_have_none(codec):
    body = bodies_of([2**40], codec)[0]
    whole, *_ = laid_out([body])
    time_at = whole.index((2**40).to_bytes(8, "little")) - whole.index(body)
    for size in range(1, time_at + 8):
        chunk, starts, end = laid_out([body, body[:size], body])
        assert both(chunk, starts, end, codec) == (None, None), size
    chunk, starts, end = laid_out([body, body[: time_at + 8], body])
    assert both(chunk, starts, end, codec) == ([2**40] * 3, [2**40] * 3)


@CODECS
def test_changed_bytes_are_judged_alike(codec):
    """3,000 bodies with one byte changed, most of them in the lengths before the time."""
    seed = 7_719
    rng = random.Random(seed)
    body = bodies_of([1_760_745_600_000], codec)[0]
    refused = 0
    for _ in range(3_000):
        changed = bytearray(body)
        changed[rng.randrange(len(changed))] = rng.choice([0, 1, 250, 251, 252, 253, 254, 255])
        chunk, starts, end = laid_out([body, bytes(changed)])
        fast, slow = both(chunk, starts, end, codec)
        assert fast == slow, f"seed {seed}: {bytes(changed).hex()}"
        refused += fast is None
    assert 100 < refused < 2_900
