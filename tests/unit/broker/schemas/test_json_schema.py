"""JSON Schemas: which are taken, and which payloads fit them, in bounded time."""

import json
import time

import pytest

from ister.broker.schemas.json_schema import read_json_schema
from ister.errors import InvalidRequestError
from tests.support.cases import each


def schema(value):
    return read_json_schema(json.dumps(value).encode())


@each(
    "value",
    [
        [],
        5,
        None,
        {"type": "nothing"},
        {"type": 5},
        {"properties": 5},
        {"properties": {"a": 5}},
        {"required": "a"},
        {"minimum": "1"},
        {"$schema": "http://example.com/mine"},
        {"$schema": 5},
        {"$id": 5},
        {"$ref": 5},
    ],
)
def test_what_is_no_schema_is_refused(value):
    with pytest.raises(InvalidRequestError):
        schema(value)


@each(
    "reference",
    [
        "http://127.0.0.1:1/schema.json",
        "file:///etc/passwd",
        "other.json",
        "#/$defs/missing",
        "#missing",
    ],
)
def test_reference_that_leads_out_of_the_schema_is_refused(reference):
    with pytest.raises(InvalidRequestError, match="cannot be resolved"):
        schema({"properties": {"a": {"items": {"$ref": reference}}}})


def test_references_inside_are_followed():
    node = {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "$ref": "#/$defs/node",
    }
    assert schema(node).check(b'{"next": {"next": {}}}') is None
    assert schema(node).check(b'{"next": {"next": 5}}') is not None
    named = {"$id": "http://e/x", "$defs": {"a": {"$id": "b", "type": "string"}}, "$ref": "b"}
    assert schema(named).check(b'"x"') is None
    assert schema(named).check(b"1") is not None
    meta = {"$ref": "https://json-schema.org/draft/2020-12/schema"}
    assert schema(meta).check(b'{"type": "string"}') is None
    assert schema(meta).check(b'{"type": "nothing"}') is not None


@each("pattern", ["(", "(?=a)b", "(a)\\1", "a{2000}"])
def test_pattern_that_is_not_re2s_is_refused(pattern):
    for value in ({"pattern": pattern}, {"patternProperties": {pattern: {}}}):
        with pytest.raises(InvalidRequestError, match="pattern"):
            schema({"items": value})


@each(
    ("pattern", "fitting", "other"),
    [
        ("^[a-z]+$", "abc", "a1"),
        ("b", "abc", "ac"),
        ("^\\u0041$", "A", "u0041"),
        ("^\\\\u0041$", "\\u0041", "A"),
        ("^\\p{L}+$", "é", "1"),
        ("^\\d{3}\\/x$", "123/x", "12/x"),
    ],
)
def test_patterns(pattern, fitting, other):
    assert schema({"pattern": pattern}).check(json.dumps(fitting).encode()) is None
    assert schema({"pattern": pattern}).check(json.dumps(other).encode()) is not None


@each(
    "value",
    [
        {"pattern": "^(a+)+$"},
        {"propertyNames": {"pattern": "^(a|a)*$"}},
        {"patternProperties": {"^(a+)+$": False}},
        {"patternProperties": {"^(a+)+$": True}, "additionalProperties": False},
    ],
)
def test_patterns_take_time_in_proportion(value):
    text = "a" * 200_000 + "!"
    payload = json.dumps(text if "pattern" in value else {text: 1}).encode()
    begun = time.monotonic()
    schema(value).check(payload)
    # The interpreter's own expressions would need longer than the sun has.
    assert time.monotonic() - begun < 60


def test_alternatives_that_multiply_end_in_a_refusal():
    definitions = {
        f"d{index}": {"anyOf": [{"$ref": f"#/$defs/d{index + 1}"}] * 2} for index in range(60)
    }
    definitions["d60"] = {"type": "string"}
    begun = time.monotonic()
    reason = schema({"$defs": definitions, "$ref": "#/$defs/d0"}).check(b"1")
    assert "too many alternatives" in reason
    assert time.monotonic() - begun < 60


def test_unique_items_are_counted_once():
    unique = schema({"uniqueItems": True})
    assert unique.check(b'[1, true, "1", {"a": 1}, {"a": 1.5}, [1]]') is None
    assert "uniqueItems" in unique.check(b'[{"a": 1, "b": 2}, {"b": 2, "a": 1.0}]')
    mixed = json.dumps([{"a": index} if index % 2 else index for index in range(20_000)]).encode()
    begun = time.monotonic()
    assert unique.check(mixed) is None
    assert time.monotonic() - begun < 60


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@each(
    ("payload", "reason"),
    [
        (b'{"name": "x"}', None),
        (b'{"name": "x", "age": 1, "tags": ["a"]}', None),
        (b'{"name": "x", "age": 1.0}', None),
        (b"{}", "the whole violates 'required' (\"name\")"),
        (b'{"name": 5}', "/name violates 'type' (\"string\")"),
        (b'{"name": "x", "age": -1}', "/age violates 'minimum' (0)"),
        (b'{"name": "x", "age": true}', "/age violates 'type'"),
        (b'{"name": "x", "tags": ["a", "c"]}', "/tags/1 violates 'enum'"),
        (b'{"name": "x", "other": 1}', "'additionalProperties'"),
        (b"[]", "'type'"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"NaN", "not JSON"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b"1" * 5000, "not JSON"),
    ],
)
def test_payloads(payload, reason):
    found = schema(PERSON).check(payload)
    if reason is None:
        assert found is None
    else:
        assert reason in (found or "")


def test_reasons_do_not_tell_the_payload():
    secret = "swordfish"
    for payload in ({"name": secret}, {"name": "x", "age": secret}, {"name": {"in": secret}}):
        reason = schema(PERSON).check(json.dumps(payload).encode())
        assert reason
        assert secret not in reason


def test_same_schema_written_differently():
    one = read_json_schema(b'{"type": "object", "properties": {"a": {"minimum": 1.0}}}')
    other = read_json_schema(b'{ "properties" : {"a":{"minimum":1}},\n"type":"object"}')
    third = read_json_schema(b'{"type": "object", "properties": {"a": {"minimum": 2}}}')
    assert one.fingerprint == other.fingerprint != third.fingerprint


def test_dialects_differ():
    draft4 = {"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 5}
    assert schema({**draft4, "exclusiveMaximum": True}).check(b"5") is not None
    with pytest.raises(InvalidRequestError):
        schema({"maximum": 5, "exclusiveMaximum": True})


def test_unevaluated_properties_need_no_patterns():
    assert schema({"properties": {"a": {}}, "unevaluatedProperties": False}).check(b'{"b": 1}')
    with pytest.raises(InvalidRequestError, match="patternProperties"):
        schema({"patternProperties": {"^a": {}}, "allOf": [{"unevaluatedProperties": False}]})
