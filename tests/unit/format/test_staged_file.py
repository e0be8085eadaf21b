"""Staged files: segments of topics and the footer, both directions, and every damage noticed."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from ister.errors import CorruptDataError, UnsupportedVersionError
from ister.format.footer import TRAILER_BYTES, FooterKind
from ister.format.manifest import StagedFile, decode_manifest, encode_manifest
from ister.format.staged_file import FOOTER, StagedSegment, decode_footer, encode_footer
from ister.format.staged_rows import (
    BLOCK_HEADER_SIZE,
    STAGED_SCHEMA,
    decode_block,
    encode_block,
    parse_block_size,
)
from tests.support.cases import each

GOLDEN = Path(__file__).parents[2] / "golden"
A, B = "/default/a", "/default/b"
SEGMENTS = [StagedSegment(A, 0, 400, 3), StagedSegment(B, 400, 90, 1), StagedSegment(A, 490, 10, 2)]


def read_end(data):
    """The segments in the last bytes of a file, from its footer on."""
    position = int.from_bytes(data[-TRAILER_BYTES:][:8], "little")
    place = FOOTER.find(data[-TRAILER_BYTES:], position + len(data), path="x")
    return decode_footer(data[:-TRAILER_BYTES], place, path="x")


def test_footer_has_these_bytes():
    golden = (GOLDEN / "staged_footer.hex").read_text().strip()
    assert encode_footer(SEGMENTS, 500).hex() == golden
    assert read_end(bytes.fromhex(golden)) == [SEGMENTS[0], SEGMENTS[2], SEGMENTS[1]]


def test_golden_file_is_read():
    """A file of two topics as this format's first writer left it."""
    data = bytes.fromhex((GOLDEN / "staged_file.hex").read_text())
    place = FOOTER.find(data[-TRAILER_BYTES:], len(data), path="x")
    footer = data[place.position : place.position + place.length]
    found = {}
    for topic, position, length, rows in decode_footer(footer, place, path="x"):
        size = parse_block_size(data[position : position + BLOCK_HEADER_SIZE])
        assert size + BLOCK_HEADER_SIZE == length
        header = data[position : position + BLOCK_HEADER_SIZE]
        body = data[position + BLOCK_HEADER_SIZE : position + length]
        found[topic] = decode_block(header, body, key="x", topic=topic)["payload"].to_pylist()
        assert len(found[topic]) == rows
    assert found == {A: [b"one", b"two"], B: [b"three"]}


def test_block_of_another_topic_is_damaged():
    batch = pa.RecordBatch.from_pylist([{"payload": b"x"}], schema=STAGED_SCHEMA)
    header, body = encode_block(batch, A)
    assert decode_block(header, memoryview(body), key="x", topic=A).num_rows == 1
    for topic in (B, ""):
        with pytest.raises(CorruptDataError):
            decode_block(header, memoryview(body), key="x", topic=topic)


def test_every_flipped_bit_is_found():
    data = bytearray(encode_footer(SEGMENTS, 500))
    for at in range(len(data)):
        data[at] ^= 1
        with pytest.raises((CorruptDataError, UnsupportedVersionError)):
            decode_with(bytes(data))
        data[at] ^= 1


def decode_with(data):
    """As `read_end`, for bytes whose trailer may be wrong."""
    place = FOOTER.find(data[-TRAILER_BYTES:], 500 + len(data), path="x")
    return decode_footer(data[:-TRAILER_BYTES], place, path="x")


@each(
    "footer",
    [
        b"[]",
        b"{}",
        b'{"topics":[]}',
        b'{"topics":{"/default/a":[[1,2]]}}',
        b'{"topics":{"/default/a":[["x",1,1]]}}',
        b'{"topics":{"no topic":[[0,1,1]]}}',
        b"\xff",
    ],
)
def test_something_else_is_not_a_footer(footer):
    with pytest.raises(CorruptDataError):
        read_end(FOOTER.encode(footer, 500))


def test_newer_version_is_not_taken_for_damage():
    newer = FooterKind(FOOTER.magic, 2, FOOTER.bytes_max, FOOTER.what)
    with pytest.raises(UnsupportedVersionError):
        read_end(newer.encode(b"{}", 500))


def test_manifest_with_segments_has_these_bytes():
    files = [
        StagedFile(key="staging/shared.files/q/0/x.rows", rows=3, size_bytes=400, position=0),
        StagedFile(key="staging/shared.files/q/0/x.rows", rows=2, size_bytes=10, position=490),
    ]
    data = encode_manifest(files)
    assert data == (
        b'{"version":2,"files":['
        b'{"key":"staging/shared.files/q/0/x.rows","position":0,"rows":3,"size":400},'
        b'{"key":"staging/shared.files/q/0/x.rows","position":490,"rows":2,"size":10}]}'
    )
    assert decode_manifest(data, key="m") == tuple(files)
    assert json.loads(encode_manifest([]))["version"] == 1
