"""Avro schemas: which are taken, which are the same, and which read which."""

import json

import pytest

from ister.broker.schemas.avro import read_avro
from ister.errors import InvalidRequestError
from tests.support.cases import each


def avro(schema):
    return read_avro(json.dumps(schema).encode())


def record(*fields, name="User"):
    return {"type": "record", "name": name, "fields": list(fields)}


def field(name, kind, **more):
    return {"name": name, "type": kind, **more}


@each(
    "schema",
    [
        5,
        None,
        "nothing",
        {},
        {"type": "nothing"},
        {"type": "record", "name": "x"},
        {"type": "record", "fields": []},
        {"type": "record", "name": 5, "fields": []},
        {"type": "record", "name": "x", "fields": "abc"},
        {"type": "record", "name": "x", "fields": [5]},
        {"type": "record", "name": "x", "fields": [{"name": "a"}]},
        {"type": "record", "name": "x", "fields": [{"name": "a", "type": "int"}] * 2},
        {"type": "record", "name": "x", "fields": [{"name": "a", "type": "int", "default": "x"}]},
        {"type": "enum", "name": "e", "symbols": ["A", "A"]},
        {"type": "enum", "name": "e"},
        {"type": "fixed", "name": "f"},
        {"type": "fixed", "name": "f", "size": -1},
        {"type": "fixed", "name": "f", "size": "4"},
        {"type": "array"},
        ["int", "int"],
        ["null", ["int"]],
        {"type": {}},
    ],
)
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(InvalidRequestError):
        avro(schema)


@each(
    ("one", "other"),
    [
        ("string", {"type": "string"}),
        (
            record(field("a", "int")),
            {
                "fields": [{"type": {"type": "int"}, "name": "a", "doc": "a field"}],
                "doc": "a record",
                "name": "User",
                "type": "record",
            },
        ),
        (
            {**record(field("a", "int")), "namespace": "com.example"},
            record(field("a", "int"), name="com.example.User"),
        ),
    ],
)
def test_same_schema_written_differently(one, other):
    assert avro(one).fingerprint == avro(other).fingerprint


@each(
    "other",
    [
        record(field("a", "long")),
        record(field("a", "int", default=0)),
        record(field("a", "int", aliases=["b"])),
        record(field("a", {"type": "int", "logicalType": "date"})),
        record(field("a", "int"), name="Other"),
    ],
)
def test_what_decides_about_reading_makes_another_schema(other):
    assert avro(record(field("a", "int"))).fingerprint != avro(other).fingerprint


COLOURS = {"type": "enum", "name": "Colour", "symbols": ["RED", "GREEN"]}
MORE_COLOURS = {**COLOURS, "symbols": ["RED", "GREEN", "BLUE"]}
LISTED = record(field("value", "int"), field("next", ["null", "Node"]), name="Node")
DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}


@each(
    ("reader", "writer", "problem"),
    [
        ("long", "int", None),
        ("double", "long", None),
        ("bytes", "string", None),
        ("string", "bytes", None),
        ("int", "long", "long is not read as int"),
        ("string", "int", "int is not read as string"),
        ("boolean", "int", "int is not read as boolean"),
        # Fields.
        (record(field("a", "int")), record(field("a", "int"), field("b", "int")), None),
        (
            record(field("a", "int"), field("b", "int")),
            record(field("a", "int")),
            "b: is not written and has no default",
        ),
        (record(field("a", "int"), field("b", "int", default=0)), record(field("a", "int")), None),
        (
            # Optional in Danube's eyes; Avro cannot fill it in.
            record(field("a", "int"), field("b", ["null", "int"])),
            record(field("a", "int")),
            "b: is not written and has no default",
        ),
        (record(field("new", "int", aliases=["old"])), record(field("old", "int")), None),
        (record(field("a", "int")), record(field("a", "string")), "a: string is not read as int"),
        (
            record(field("a", record(field("b", "int"), name="In"))),
            record(field("a", record(field("b", "string"), name="In"))),
            "a.b: string is not read as int",
        ),
        # Names.
        (record(name="New"), record(name="Old"), "Old is not New"),
        ({**record(name="New"), "aliases": ["Old"]}, record(name="Old"), None),
        (record(name="a.User"), record(name="b.User"), None),
        # Enumerations and fixed types.
        (MORE_COLOURS, COLOURS, None),
        (COLOURS, MORE_COLOURS, "Colour lacks the symbol BLUE"),
        ({**COLOURS, "default": "RED"}, MORE_COLOURS, None),
        (
            {"type": "fixed", "name": "F", "size": 4},
            {"type": "fixed", "name": "F", "size": 5},
            "F has 4 bytes and had 5",
        ),
        # Unions.
        (["null", "int"], "int", None),
        (["null", "long"], "int", None),
        (["null", "string"], "int", "no branch of the union reads int"),
        ("int", ["null", "int"], "null is not read as int"),
        (["null", "int", "string"], ["null", "int"], None),
        (["null", "int"], ["null", "int", "string"], "no branch of the union reads string"),
        # Types of the same short name and of different kinds.
        (
            [{"type": "enum", "name": "a.R", "symbols": ["X"]}, record(name="b.R")],
            [{"type": "enum", "name": "a.R", "symbols": ["X"]}, record(name="b.R")],
            None,
        ),
        # The first branch that matches reads it, or nobody does.
        (
            record(
                field(
                    "a",
                    [record(field("v", "int"), name="X"), {**record(name="Y"), "aliases": ["X"]}],
                ),
                field("b", "X"),
            ),
            record(field("a", record(field("v", "string"), name="X")), field("b", "X")),
            "a.v: string is not read as int",
        ),
        ({**record(name="New"), "aliases": ["b.Old"]}, record(name="a.Old"), "a.Old is not New"),
        # Containers.
        ({"type": "array", "items": "long"}, {"type": "array", "items": "int"}, None),
        (
            {"type": "map", "values": "int"},
            {"type": "map", "values": "string"},
            "{}: string is not read as int",
        ),
        # Recursion ends.
        (LISTED, LISTED, None),
        (
            record(field("value", "string"), field("next", ["null", "Node"]), name="Node"),
            LISTED,
            "value: int is not read as string",
        ),
        # Decimals.
        (DECIMAL, {**DECIMAL, "scale": 3}, "a decimal has another precision or scale"),
        (DECIMAL, "bytes", None),
    ],
)
def test_resolution(reader, writer, problem):
    problems = avro(reader).cannot_read(avro(writer))
    if problem is None:
        assert problems == []
    else:
        assert any(problem in one for one in problems), problems
