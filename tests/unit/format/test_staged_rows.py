"""Staged rows: blocks and manifests, both directions, and every damage noticed."""

import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ister.base.model import COLUMNS
from ister.errors import CorruptDataError, UnsupportedVersionError
from ister.format.crc import crc32
from ister.format.manifest import StagedFile, decode_manifest, encode_manifest
from ister.format.staged_rows import (
    BLOCK_HEADER_SIZE,
    DIGEST_MODULUS,
    STAGED_COLUMNS,
    STAGED_SCHEMA,
    decode_block,
    digest_rows,
    encode_block,
    parse_block_size,
)
from tests.support.builders import with_bit_flipped
from tests.support.cases import each

KEY = "staging/default/orders/q/0/part-0"

_TEXT = st.text(max_size=5)
_ROWS = st.fixed_dictionaries(
    {"payload": st.binary(max_size=20)},
    optional={
        "publish_time": st.integers(0, 253_402_300_799_999_999),
        "producer_name": st.none() | _TEXT,
        "attributes": st.none()
        | st.dictionaries(_TEXT, _TEXT, max_size=3).map(dict.items).map(list),
        "routing_key": st.none() | _TEXT,
        "schema_id": st.none() | st.integers(-(2**63), 2**63 - 1),
        "schema_version": st.none() | st.integers(-(2**31), 2**31 - 1),
    },
)


def a_batch(rows):
    """Rows as a batch of the staged schema."""
    columns = [
        pa.array([row.get(field.name) for row in rows], field.type) for field in STAGED_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=STAGED_SCHEMA)


def as_bytes(batch):
    header, body = encode_block(batch, "")
    return header, body.to_pybytes()


# -- blocks -------------------------------------------------------------------------------------


def test_staged_columns_are_all_that_a_row_has_but_what_its_owner_gives():
    assert set(COLUMNS) - set(STAGED_COLUMNS) == {"topic", "offset"}
    assert tuple(STAGED_SCHEMA.names) == STAGED_COLUMNS
    assert [name for name in COLUMNS if name in STAGED_COLUMNS] == list(STAGED_COLUMNS)


@settings(deadline=None)
@given(st.lists(_ROWS, max_size=20))
def test_block_comes_back_as_it_was(rows):
    batch = a_batch(rows)
    header, body = as_bytes(batch)
    found = decode_block(header, body, key=KEY, topic="")
    found.validate(full=True)
    assert found.equals(batch)
    assert found.schema.equals(STAGED_SCHEMA)


def test_header_is_the_length_and_the_crc_of_the_body():
    header, body = as_bytes(a_batch([{"payload": b"x"}]))
    assert BLOCK_HEADER_SIZE == len(header) == 8
    assert parse_block_size(header) == len(body) == int.from_bytes(header[:4], "little")
    assert int.from_bytes(header[4:], "little") == crc32(body)


def digest(rows):
    return digest_rows(pa.RecordBatch.from_pylist(rows, schema=STAGED_SCHEMA))


def test_digest_is_of_the_rows_and_not_of_their_order_or_division():
    rows = [
        {"payload": b"a", "routing_key": "k"},
        {"payload": b"a"},
        {"payload": b"", "routing_key": "l"},
        {"payload": b"b"},
        {"payload": b"b"},
    ]
    whole = digest(rows)
    assert digest(rows[::-1]) == whole
    assert (digest(rows[:2]) + digest(rows[2:])) % DIGEST_MODULUS == whole
    for at, change in ((0, {"routing_key": "m"}), (1, {"payload": b"c"}), (3, {"payload": b"a"})):
        other = [row | change if number == at else row for number, row in enumerate(rows)]
        assert digest(other) != whole
    assert digest(rows[:4]) != whole
    assert digest([]) == 0


def test_every_flipped_bit_of_a_block_is_noticed():
    """Goal: no bit that a store flips becomes part of a message."""
    header, body = as_bytes(a_batch([{"payload": b"abc", "producer_name": "p"}]))
    for bit in range(8 * (len(header) + len(body))):
        damaged = with_bit_flipped(header + body, bit)
        with pytest.raises(CorruptDataError) as caught:
            decode_block(
                damaged[:BLOCK_HEADER_SIZE], damaged[BLOCK_HEADER_SIZE:], key=KEY, topic=""
            )
        assert caught.value.path == KEY


def test_block_of_another_schema_is_not_taken_for_rows():
    """The bytes are those that were written; who wrote them had other columns."""
    other = pa.RecordBatch.from_pydict({"value": pa.array([1, 2, 3], pa.int64())})
    header, body = as_bytes(other)
    with pytest.raises(CorruptDataError):
        decode_block(header, body, key=KEY, topic="")


# -- manifests ----------------------------------------------------------------------------------

_FILES = st.builds(
    StagedFile,
    key=st.text(min_size=1, max_size=30),
    rows=st.integers(0, 2**53),
    size_bytes=st.integers(0, 2**53),
)


@settings(deadline=None)
@given(st.lists(_FILES, max_size=10))
def test_manifest_comes_back_in_its_order(files):
    assert decode_manifest(encode_manifest(files), key=KEY) == tuple(files)


@each(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"7",
        b"{}",
        b'{"version":1}',
        b'{"version":1,"files":7}',
        b'{"version":1,"files":[7]}',
        b'{"version":1,"files":[{}]}',
        b'{"version":1,"files":[{"key":"a","rows":"x","size":1}]}',
        b'{"version":1,"files":[{"key":"a","rows":1}]}',
        b'{"version":1,"files":[{"key":"a","rows":1e999,"size":1}]}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
    ids=lambda data: repr(data[:40]),
)
def test_something_else_is_not_a_manifest(data):
    with pytest.raises(CorruptDataError) as caught:
        decode_manifest(data, key=KEY)
    assert caught.value.path == KEY


@each("version", [3, 0, "1", None])
def test_manifest_of_another_version_is_not_taken_for_damage(version):
    data = json.dumps({"version": version, "files": []}).encode()
    with pytest.raises(UnsupportedVersionError):
        decode_manifest(data, key=KEY)


def test_fields_of_a_later_ister_are_passed_over():
    data = b'{"version":1,"files":[{"key":"a","rows":1,"size":2,"more":3}],"more":[]}'
    assert decode_manifest(data, key=KEY) == (StagedFile(key="a", rows=1, size_bytes=2),)
