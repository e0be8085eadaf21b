"""Payloads as people see them, by each kind of schema; and payloads that were made to do harm."""

import io
import json
import struct

import fastavro
import pytest

from ister.broker.schemas.decoding import DECODED_BYTES_MAX, decode_payload, parse_json
from ister.broker.schemas.definitions import read_definition
from ister.errors import InvalidRequestError
from tests.support.cases import each
from tests.support.protos import compile_proto

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"]},
        {"name": "key", "type": "bytes"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "lines", "type": {"type": "array", "items": "double"}},
    ],
}
PROTO = compile_proto(
    'syntax = "proto3";message Order { int64 id = 1; repeated string tags = 2; bytes key = 3; }'
)


def avro(schema, value):
    data = io.BytesIO()
    fastavro.schemaless_writer(data, fastavro.parse_schema(schema), value)
    return data.getvalue()


def definition(kind, content):
    return read_definition(
        kind, content if isinstance(content, bytes) else json.dumps(content).encode()
    )


def test_avro():
    value = {"id": 7, "note": None, "key": b"\x00\xff", "at": 1_700_000_000_000, "lines": [1.5]}
    found = decode_payload(definition("avro", ORDER), avro(ORDER, value))
    assert found == {
        "id": 7,
        "note": None,
        "key": "AP8=",
        "at": "2023-11-14T22:13:20+00:00",
        "lines": [1.5],
    }
    json.dumps(found, allow_nan=False)


def test_avro_file():
    schema = {"type": "record", "name": "R", "fields": [{"name": "x", "type": "int"}]}
    data = io.BytesIO()
    fastavro.writer(data, fastavro.parse_schema(schema), [{"x": 1}, {"x": 2}])
    assert decode_payload(definition("avro", schema), data.getvalue()) == [{"x": 1}, {"x": 2}]


def test_protobuf():
    # 1: 5, 2: "a", 3: 0x00ff
    payload = b"\x08\x05\x12\x01a\x1a\x02\x00\xff"
    found = decode_payload(definition("protobuf", PROTO), payload)
    assert found == {"id": "5", "tags": ["a"], "key": "AP8="}


def test_json_and_text_and_numbers():
    schema = {"type": "object", "required": ["x"]}
    assert decode_payload(definition("json_schema", schema), b'{"x": [1, null]}') == {
        "x": [1, None]
    }
    assert decode_payload(definition("string", b""), "öl".encode()) == "öl"
    found = decode_payload(definition("int", b""), struct.pack("<i", 1))
    assert found == {"little_endian": 1, "big_endian": 1 << 24}
    assert decode_payload(definition("number", b""), b"\x00" * 4) is None
    assert decode_payload(definition("bytes", b""), b"\x00") == "AA=="


@each(
    ("kind", "content", "payload"),
    [
        ("avro", ORDER, b"\x01\x02"),
        ("protobuf", PROTO, b"\x0f\xff"),
        ("json_schema", {"type": "object"}, b"[]"),
        ("string", b"", b"\xff"),
        ("bytes", b"", b"x" * (DECODED_BYTES_MAX + 1)),
    ],
)
def test_what_does_not_fit_says_so(kind, content, payload):
    with pytest.raises(InvalidRequestError):
        decode_payload(definition(kind, content), payload)


def test_numbers_that_json_has_not():
    schema = {"type": "array", "items": "double"}
    payload = avro(schema, [float("nan"), float("inf"), -0.5])
    assert decode_payload(definition("avro", schema), payload) == ["nan", "inf", -0.5]


def test_long_names_that_come_often_are_not_written_out():
    """A few bytes that would become gigabytes of JSON."""
    name = "n" * 50_000
    schema = {
        "type": "array",
        "items": {"type": "record", "name": "R", "fields": [{"name": name, "type": "boolean"}]},
    }
    payload = avro(schema, [{name: True}] * 50_000)
    assert len(payload) < 60_000
    with pytest.raises(InvalidRequestError, match="too large"):
        decode_payload(definition("avro", schema), payload)


def test_half_of_a_surrogate_pair_is_replaced():
    found = parse_json(rb'{"\ud800": ["\udfff", "\ud83d\ude00"]}')
    assert found == {"?": ["?", "\U0001f600"]}


def test_json_that_is_nested_deep_is_none():
    with pytest.raises((ValueError, InvalidRequestError)):
        parse_json(b"[" * 100_000 + b"]" * 100_000)
    with pytest.raises((ValueError, InvalidRequestError)):
        parse_json(b"[" * 500 + b"]" * 500)
    with pytest.raises(ValueError, match="NaN"):
        parse_json(b"NaN")
    assert parse_json(b'{"a": 123456789012345678901234567890}') == {
        "a": hex(123456789012345678901234567890)
    }
