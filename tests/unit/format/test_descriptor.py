"""Descriptors: both directions, Danube's own, and what is refused by its key."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ister.base.limits import DESCRIPTOR_BYTES_MAX, OBJECT_INDEX_ENTRIES_MAX
from ister.base.model import Codec
from ister.errors import CorruptDataError, InvariantError, UnsupportedVersionError
from ister.format.descriptor import (
    ObjectDescriptor,
    count_messages,
    decode_descriptor,
    encode_descriptor,
    format_checksum,
)
from tests.support.cases import each

_GOLDEN = Path(__file__).resolve().parents[2] / "golden"
_KEY = "/danube/storage/topics/default/orders/objects/00000000000000001000"

FULL = ObjectDescriptor(
    object_id="data-1000-5000.dnb1",
    start=1000,
    end=5001,
    size_bytes=524_288,
    etag='"abc"',
    created_at=1_703_001_234,
    offset_index=((1000, 0), (2000, 131_072)),
    codec=Codec.BINCODE2,
    epoch=1,
    incarnation="0123456789abcdef",
    messages=4001,
    publish_time_min=1_703_001_000_000,
    publish_time_max=1_703_001_200_000,
    publish_time_index=(0, 1_703_001_100_000),
    checksum=format_checksum(0x0A1B2C3D),
)
# What Danube itself writes: its own fields and no others.
DANUBE = {
    "object_id": "data-1000-5000.dnb1",
    "start_offset": 1000,
    "end_offset": 5000,
    "size": 524_288,
    "etag": None,
    "created_at": 1_703_001_234,
    "completed": True,
    "offset_index": [[1000, 0], [2000, 131_072]],
}
_NUMBERS = st.integers(0, 2**64 - 1)


@st.composite
def _descriptors(draw):
    start = draw(st.integers(0, 2**64 - 2))
    index = draw(st.lists(st.tuples(_NUMBERS, _NUMBERS), max_size=20))
    return ObjectDescriptor(
        object_id=draw(st.text(min_size=1).filter(lambda text: "/" not in text)),
        start=start,
        end=draw(st.integers(start + 1, 2**64)),
        size_bytes=draw(_NUMBERS),
        etag=draw(st.none() | st.text()),
        arrival_time_max=draw(st.none() | _NUMBERS),
        created_at=draw(_NUMBERS),
        completed=draw(st.booleans()),
        offset_index=tuple(index),
        codec=draw(st.none() | st.sampled_from(Codec)),
        epoch=draw(_NUMBERS),
        incarnation=draw(st.text()),
        messages=draw(_NUMBERS),
        publish_time_min=draw(st.none() | _NUMBERS),
        publish_time_max=draw(st.none() | _NUMBERS),
        publish_time_index=tuple(draw(st.lists(_NUMBERS, max_size=20))),
        checksum=draw(st.none() | st.text()),
        uncompressed_bytes=draw(st.none() | _NUMBERS),
    )


@given(_descriptors())
def test_descriptor_comes_back_as_it_was(descriptor):
    assert decode_descriptor(encode_descriptor(descriptor), key=_KEY) == descriptor


@each(
    ("name", "fields", "arrived_ms"),
    [
        ("descriptor.json", {}, 1_703_001_234_000),
        ("descriptor_arrival.json", {"arrival_time_max": 1_703_001_233_456}, 1_703_001_233_456),
        (
            "descriptor_parquet.json",
            {
                "object_id": "data-1000-5000-1-c0a1b2c3d.parquet",
                "format": "parquet",
                "offset_index": ((1000, 4), (2000, 131_072)),
                "uncompressed_bytes": 2_097_152,
            },
            1_703_001_234_000,
        ),
    ],
)
def test_golden_bytes_are_these(name, fields, arrived_ms):
    golden = (_GOLDEN / name).read_bytes().rstrip(b"\n")
    described = replace(FULL, **fields)
    assert encode_descriptor(described) == golden
    assert decode_descriptor(golden, key=_KEY) == described
    assert described.arrived_ms == arrived_ms


def test_descriptor_of_danube_is_read_and_what_it_does_not_say_is_unknown():
    found = decode_descriptor(json.dumps(DANUBE).encode(), key=_KEY)
    assert (found.object_id, found.start, found.end) == ("data-1000-5000.dnb1", 1000, 5001)
    assert (found.size_bytes, found.created_at, found.completed) == (524_288, 1_703_001_234, True)
    assert found.offset_index == ((1000, 0), (2000, 131_072))
    assert (found.codec, found.checksum, found.etag) == (None, None, None)
    assert (found.publish_time_min, found.publish_time_max) == (None, None)
    assert (found.epoch, found.incarnation, found.publish_time_index) == (0, "", ())


def test_fields_of_a_newer_writer_are_passed_over():
    fields = {**json.loads(encode_descriptor(FULL)), "compression": "none"}
    assert decode_descriptor(json.dumps(fields).encode(), key=_KEY) == FULL


def test_largest_descriptor_stays_below_its_limit():
    top = 2**64 - 1
    largest = ObjectDescriptor(
        object_id=f"data-{top}-{top}-{top}.dnb1",
        start=top,
        end=top + 1,
        size_bytes=top,
        etag='"' + "f" * 200 + '"',
        created_at=top,
        offset_index=((top, top),) * OBJECT_INDEX_ENTRIES_MAX,
        codec=Codec.BINCODE2,
        epoch=top,
        incarnation="f" * 16,
        messages=top,
        publish_time_min=top,
        publish_time_max=top,
        publish_time_index=(top,) * OBJECT_INDEX_ENTRIES_MAX,
        checksum=format_checksum(2**32 - 1),
        uncompressed_bytes=top,
    )
    data = encode_descriptor(largest)
    assert len(data) < DESCRIPTOR_BYTES_MAX == 65_536
    assert decode_descriptor(data, key=_KEY) == largest


@each(
    "wrong",
    [
        {"start": 5, "end": 5},
        {"start": 6, "end": 5},
        {"offset_index": ((0, 0),) * (OBJECT_INDEX_ENTRIES_MAX + 1)},
        {"etag": "x" * DESCRIPTOR_BYTES_MAX},
    ],
    ids=["empty range", "backward range", "too many entries", "too many bytes"],
)
def test_descriptor_that_must_not_be_is_not_written(wrong):
    with pytest.raises(InvariantError):
        encode_descriptor(replace(FULL, **wrong))


_WRONG_JSON = {
    "empty": b"",
    "cut": encode_descriptor(FULL)[:-1],
    "not UTF-8": b"\xff\xfe",
    "a list": b"[]",
    "a number": b"5",
    "null": b"null",
    "nothing in it": b"{}",
    "nested without an end": b"[" * 60_000,
}


@each("data", _WRONG_JSON.values(), ids=_WRONG_JSON)
def test_bytes_that_are_no_descriptor_are_refused_with_their_key(data):
    with pytest.raises(CorruptDataError) as refused:
        decode_descriptor(data, key=_KEY)
    assert refused.value.path == _KEY


_WRONG_FIELDS = [
    *((name, None) for name in ("start_offset", "end_offset", "size")),
    *((name, -1) for name in ("start_offset", "end_offset", "size", "created_at", "epoch")),
    *((name, "5") for name in ("start_offset", "end_offset", "size", "messages")),
    *((name, 1.5) for name in ("start_offset", "publish_time_min", "publish_time_max")),
    ("start_offset", True),
    ("end_offset", 999),
    ("object_id", "a/b"),
    ("object_id", "../x"),
    ("format", 5),
    ("codec", "bincode9"),
    ("codec", 5),
    ("offset_index", [1000]),
    ("offset_index", [[1000]]),
    ("offset_index", [[1000, 0, 1]]),
    ("offset_index", [[1000, -1]]),
    ("offset_index", 5),
    ("publish_time_index", [None]),
    ("publish_time_index", 5),
    ("uncompressed_size", "5"),
    ("uncompressed_size", -1),
]


@each(("name", "value"), _WRONG_FIELDS, ids=repr)
def test_field_of_another_kind_is_refused_with_its_key(name, value):
    fields = {**json.loads(encode_descriptor(FULL)), name: value}
    with pytest.raises(CorruptDataError) as refused:
        decode_descriptor(json.dumps(fields).encode(), key=_KEY)
    assert refused.value.path == _KEY


@each("name", ["object_id", "start_offset", "end_offset", "size"])
def test_field_that_is_missing_is_refused_by_name(name):
    fields = json.loads(encode_descriptor(FULL))
    del fields[name]
    with pytest.raises(CorruptDataError, match=name):
        decode_descriptor(json.dumps(fields).encode(), key=_KEY)


def test_format_of_a_newer_ister_is_refused_as_newer():
    fields = {**json.loads(encode_descriptor(FULL)), "format": "dnb2", "offset_index": "elsewhere"}
    with pytest.raises(UnsupportedVersionError, match="dnb2") as refused:
        decode_descriptor(json.dumps(fields).encode(), key=_KEY)
    assert refused.value.path == _KEY


# -- looking up ---------------------------------------------------------------------------------

INDEXED = replace(
    FULL,
    start=100,
    end=400,
    offset_index=((100, 0), (200, 5000), (300, 9000)),
    # The highest publish time before 100, 200 and 300.
    publish_time_index=(0, 50, 70),
)


@each(
    ("fields", "offset", "expected"),
    [
        *(({}, offset, (100, 0)) for offset in (100, 199)),
        *(({}, offset, (200, 5000)) for offset in (200, 201)),
        ({}, 399, (300, 9000)),
        ({"offset_index": ()}, 250, (100, 0)),
        ({"offset_index": ((200, 5000),)}, 150, (100, 0)),
    ],
)
def test_position_is_that_of_the_last_entry_at_or_before(fields, offset, expected):
    assert replace(INDEXED, **fields).position_before(offset) == expected


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=60), st.integers(1, 9), st.integers(0, 110)
)
def test_position_by_time_is_never_behind_the_first_message_of_that_time(times, stride, wanted):
    entries = range(0, len(times), stride)
    described = replace(
        FULL,
        start=0,
        end=len(times),
        offset_index=tuple((offset, offset * 10) for offset in entries),
        publish_time_index=tuple(max(times[:offset], default=0) for offset in entries),
    )
    first = next((at for at, time in enumerate(times) if time >= wanted), None)
    offset, position = described.position_before_time(wanted)
    assert position == offset * 10
    if first is not None:
        assert offset <= first


def test_what_was_kept_is_said_only_where_something_was_left_out():
    """Goal: descriptors of today keep their bytes."""
    plain = ObjectDescriptor(object_id="data-0-9.dnb1", start=0, end=10, size_bytes=5)
    assert b"kept" not in encode_descriptor(plain)
    thin = replace(plain, object_id="data-0-9-c00000000.parquet", format="parquet")
    thin = replace(thin, kept="latest-per-key", messages=3)
    assert decode_descriptor(encode_descriptor(thin), key="k") == thin
    assert (count_messages(plain), count_messages(thin)) == (10, 3)
    with pytest.raises(CorruptDataError):
        decode_descriptor(encode_descriptor(thin).replace(b'"latest-per-key"', b"7"), key="k")
