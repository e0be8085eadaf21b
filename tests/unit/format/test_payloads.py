"""Rows that are payloads alone: found by their offsets, and encoded as Arrow's rows are."""

import struct

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa

from ister import kernels
from ister.base.limits import MIB
from ister.base.model import Codec
from ister.errors import InvalidRequestError, MessageTooLargeError
from ister.format.arrow.encode import encode_frames
from ister.format.payloads import FEW_ROWS, Payloads
from tests.support.cases import each

COUNTS = [1, FEW_ROWS, FEW_ROWS + 1, 1000]


@pytest.fixture(autouse=True, scope="module")
def _loops():
    if not kernels.load():
        pytest.skip("needs the compiled loops")


def texts(count):
    return [b"%d" % number * (number % 7) for number in range(count)]


def rows_of(payloads, width=4, before=b"", after=b""):
    """Payloads somewhere in their data, as those of a slice are."""
    offsets = [len(before)]
    for payload in payloads:
        offsets.append(offsets[-1] + len(payload))
    packed = struct.pack(f"<{len(offsets)}{'i' if width == 4 else 'q'}", *offsets)
    data = before + b"".join(payloads) + after
    return Payloads.of(memoryview(packed), width, memoryview(data), len(payloads))


def as_batch(payloads):
    return pa.record_batch({"payload": pa.array(payloads, pa.binary())})


@each("width", [4, 8])
@each("count", COUNTS)
def test_rows_are_what_arrow_says_of_them(count, width):
    expected = texts(count)
    rows = rows_of(expected, width, b"before", b"after")
    assert rows.num_rows == count
    assert rows.payloads() == expected
    assert rows.sizes() == [len(text) for text in expected]
    assert rows.nbytes == as_batch(expected).nbytes
    assert rows.to_arrow().column("payload").to_pylist() == expected
    assert rows.slice(count - 1).payloads() == expected[-1:]


@each("count", COUNTS)
@each(
    "change",
    [
        lambda offsets, size: [*offsets[:1], size + 1, *offsets[2:]],
        lambda offsets, size: [-1, *offsets[1:]],
        lambda offsets, size: [*offsets[:-1], size + 1],
        lambda offsets, size: [*offsets[:-1], -(2**31)],
        lambda offsets, size: offsets[:-1],
    ],
    ids=["beyond", "before", "end beyond", "end before", "too few"],
)
def test_offsets_that_lie_are_no_rows(count, change):
    data = b"x" * count
    offsets = change(list(range(count + 1)), count)
    packed = struct.pack(f"<{len(offsets)}i", *offsets)
    assert Payloads.of(memoryview(packed), 4, memoryview(data), count) is None


def test_no_rows_are_none():
    assert rows_of([]) is None


def test_many_rows_need_compiled_loops(monkeypatch):
    monkeypatch.setattr(kernels, "current", lambda: None)
    assert rows_of(texts(FEW_ROWS + 1)) is None
    assert rows_of(texts(FEW_ROWS)) is not None


@each("codec", list(Codec))
@each("producer", ["", "someone", "Jörg"])
def test_frames_are_those_of_the_same_rows_in_arrow(codec, producer):
    payloads = texts(1000)
    settings = {
        "topic": "/default/orders",
        "codec": codec,
        "first_offset": 2**16 - 500,
        "now_ms": 1_700_000_000_000,
        "payload_bytes_max": MIB,
        "producer_name": producer,
        "producer_id": 2**63 + 5,
        "first_request_id": 240,
        "segment_bytes": 10_000,
    }
    found = encode_frames(rows_of(payloads, 8, b"...", b"..."), **settings)
    for is_compiled in (False, True):
        assert found == encode_frames(as_batch(payloads), is_compiled=is_compiled, **settings)
    named = as_batch(payloads).append_column(
        "producer_name", pa.array([producer] * len(payloads), pa.string())
    )
    assert found == encode_frames(named, **{**settings, "producer_name": None})


def test_row_that_is_too_large_is_named():
    settings = {"topic": "/a/b", "codec": Codec.BINCODE2, "first_offset": 0, "now_ms": 1}
    rows = rows_of([b"x"] * 20 + [b"x" * 11])
    with pytest.raises(MessageTooLargeError, match="row 20 has a payload of 11 bytes"):
        encode_frames(rows, payload_bytes_max=10, **settings)
    with pytest.raises(InvalidRequestError, match="producer_name"):
        encode_frames(rows, payload_bytes_max=20, producer_name="\ud800", **settings)
    with pytest.raises(MessageTooLargeError, match="row 0 has names"):
        encode_frames(rows, payload_bytes_max=20, producer_name="x" * 2**20, **settings)
