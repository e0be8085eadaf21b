"""JSON from strangers, fingerprints, and the bounds of all definitions."""

import json
import time
from contextlib import suppress

import pytest

from ister.broker.schemas.definition import (
    DEFINITION_BYTES_MAX,
    DEPTH_MAX,
    canonical_json,
    read_json,
)
from ister.broker.schemas.definitions import find_incompatibilities, read_definition
from ister.errors import InvalidRequestError
from ister.topic.schema_kinds import CompatibilityMode
from tests.support.cases import each


@each(
    "data", [b"", b"{", b"\xff", b"NaN", b"[1,]", b"[" * 200_000, b"9" * 5000, b'{"a": Infinity}']
)
def test_no_json_is_refused(data):
    with pytest.raises(InvalidRequestError):
        read_json(data, "thing")


def test_depth_is_bounded():
    fine = b"[" * (DEPTH_MAX - 1) + b"]" * (DEPTH_MAX - 1)
    assert read_json(fine, "thing")
    with pytest.raises(InvalidRequestError, match="deeper"):
        read_json(b"[" * (DEPTH_MAX + 1) + b"]" * (DEPTH_MAX + 1), "thing")


def test_canonical_form_forgets_layout_and_spelling_of_numbers():
    one = json.loads('{"b": [1.0, {"y": 1, "x": "\\u00e9"}], "a": 2}')
    other = json.loads('{"a":2.0,"b":[1,{"x":"é","y":1}]}')
    assert canonical_json(one) == canonical_json(other)
    assert canonical_json([1]) != canonical_json([True])
    assert canonical_json([1.5]) != canonical_json([1])


@each("name", ["bytes", "string", "number", "avro", "json_schema", "protobuf"])
def test_large_definitions_are_refused(name):
    with pytest.raises(InvalidRequestError, match="bytes"):
        read_definition(name, b" " * (DEFINITION_BYTES_MAX + 1))


LAUGHS = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n - 1}"}] * 10} for n in range(1, 30)}


@each(
    ("name", "definition"),
    [
        ("json_schema", {"$defs": {"a0": {}, **LAUGHS}, "$ref": "#/$defs/a29"}),
        ("json_schema", {"$ref": "#"}),
        ("json_schema", {"enum": list(range(200_000))}),
        ("json_schema", {"pattern": "((((a{1,100}){1,100}){1,100}){1,100})"}),
        ("avro", [{"type": "record", "name": f"r{n}", "fields": []} for n in range(10_000)]),
        ("avro", {"type": "fixed", "name": "f", "size": 2**62}),
        ("protobuf", "/*" * 100_000),
        ("protobuf", "message A {" * 20_000 + "}" * 20_000),
    ],
)
def test_bombs_are_refused_or_judge_messages_soon(name, definition):
    text = definition if isinstance(definition, str) else json.dumps(definition)
    begun = time.monotonic()
    with suppress(InvalidRequestError):
        found = read_definition(name, text.encode())
        for payload in (b'"' + b"a" * 5000 + b'!"', b"[" * 100_000, b"\xff" * 100_000):
            found.check(payload)
    assert time.monotonic() - begun < 60


def test_type_changes_only_where_nothing_is_checked():
    text, number = read_definition("string", b""), read_definition("number", b"")
    for mode in CompatibilityMode:
        problems = find_incompatibilities(text, number, mode)
        assert bool(problems) == (mode is not CompatibilityMode.NONE)
