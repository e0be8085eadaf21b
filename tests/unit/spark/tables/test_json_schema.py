"""JSON Schemas as columns."""

import json
import pickle

import pyarrow as pa
import pytest

from ister.errors import InvalidRequestError, NotFoundError
from ister.spark.tables.json_schema import columns_of, load_schema, with_types
from tests.support.cases import case


def _type_of(schema: dict, **more) -> pa.DataType:
    [member] = columns_of({"properties": {"c": schema}, **more})
    assert pickle.loads(pickle.dumps(member)) == member
    return member.kind.type


def test_types():
    for schema, kind in [
        ({"type": "string"}, pa.string()),
        ({"type": ["null", "string"]}, pa.string()),
        ({"type": "integer"}, pa.int64()),
        ({"type": "number"}, pa.float64()),
        ({"type": "boolean"}, pa.bool_()),
        ({"type": "string", "format": "date-time"}, pa.timestamp("us", tz="UTC")),
        ({"type": "string", "format": "date"}, pa.date32()),
        ({"type": "string", "format": "email"}, pa.string()),
        ({"enum": ["a", "b", None]}, pa.string()),
        ({"const": "a"}, pa.string()),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, pa.int64()),
        ({"type": "array", "items": {"type": "integer"}}, pa.list_(pa.int64())),
        (
            {"type": "object", "properties": {"a": {"type": "boolean"}}},
            pa.struct([("a", pa.bool_())]),
        ),
    ]:
        with case(schema, kind):
            assert _type_of(schema) == kind


def test_anything_else_is_text():
    for schema in [
        {},
        {"type": ["string", "integer"]},
        {"type": "object"},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "array"},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"enum": ["a", 1]},
        {"$ref": "https://elsewhere/x.json"},
        {"$ref": "#/$defs/missing"},
        True,
    ]:
        with case(schema):
            [member] = columns_of({"properties": {"c": schema}})
            assert (member.kind.form, member.kind.type) == ("json", pa.string())


def test_references_are_followed():
    more = {"$defs": {"money": {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}}}}
    more["$defs"]["n"] = {"type": "number"}
    assert _type_of({"$ref": "#/$defs/money"}, **more) == pa.struct([("x", pa.float64())])


def test_a_schema_that_contains_itself_ends():
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}}
    assert _type_of({"$ref": "#/$defs/tree"}, **{"$defs": {"tree": tree}}) == pa.struct(
        [("next", pa.string())]
    )


def test_names():
    properties = {key: {"type": "string"} for key in ("offset", "Topic", "a b", "x.y", "größe")}
    columns = [member.column for member in columns_of({"properties": properties})]
    assert columns == ["payload_offset", "payload_Topic", "a_b", "x_y", "größe"]


def test_two_properties_are_not_one_column():
    for names in [("a b", "a_b"), ("id", "ID"), ("offset", "payload_offset")]:
        with case(names), pytest.raises(InvalidRequestError, match="one column"):
            columns_of({"properties": {key: {"type": "string"} for key in names}})


def test_a_schema_needs_properties():
    for schema in [{}, {"type": "string"}, {"properties": {}}, {"properties": []}]:
        with case(schema), pytest.raises(InvalidRequestError, match="properties"):
            columns_of(schema)


def test_types_of_a_table_are_taken_over():
    schema = {
        "properties": {
            "n": {"type": "integer"},
            "o": {"type": "object", "properties": {"m": {"type": "integer"}}},
            "l": {"type": "array", "items": {"type": "integer"}},
        }
    }
    theirs = pa.schema(
        [
            ("n", pa.float64()),
            ("o", pa.struct([("m", pa.float64())])),
            ("l", pa.list_(pa.float64())),
        ]
    )
    members = with_types(columns_of(schema), theirs)
    assert pa.schema([(item.column, item.kind.type) for item in members]).equals(theirs)
    assert members[0].kind.form == "number"


def test_files(tmp_path):
    path = tmp_path / "schema.json"
    with pytest.raises(NotFoundError):
        load_schema(path)
    path.write_text("nope")
    with pytest.raises(InvalidRequestError):
        load_schema(path)
    path.write_text("[]")
    with pytest.raises(InvalidRequestError):
        load_schema(path)
    path.write_text(json.dumps({"a": 1}))
    assert load_schema(str(path)) == load_schema({"a": 1}) == {"a": 1}
