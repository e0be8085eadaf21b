"""The spellings that are taken."""

import pytest

from ister.errors import InvalidRequestError
from ister.topic.schema_kinds import (
    CompatibilityMode,
    SchemaType,
    ValidationPolicy,
    parse_mode,
    parse_policy,
    parse_schema_type,
)
from tests.support.cases import each


@each(
    ("text", "schema_type"),
    [
        ("bytes", SchemaType.BYTES),
        ("String", SchemaType.STRING),
        ("number", SchemaType.NUMBER),
        ("int64", SchemaType.NUMBER),
        ("int", SchemaType.NUMBER),
        ("float", SchemaType.NUMBER),
        ("double", SchemaType.NUMBER),
        ("AVRO", SchemaType.AVRO),
        ("json_schema", SchemaType.JSON_SCHEMA),
        ("json", SchemaType.JSON_SCHEMA),
        ("protobuf", SchemaType.PROTOBUF),
        ("proto", SchemaType.PROTOBUF),
    ],
)
def test_types_have_danubes_names(text, schema_type):
    assert parse_schema_type(text) is schema_type


def test_words_of_no_meaning_are_refused():
    for parse in (parse_schema_type, parse_mode, parse_policy):
        for text in ("", "nonsense", "x" * 10_000):
            with pytest.raises(InvalidRequestError) as caught:
                parse(text)
            assert len(str(caught.value)) < 300
            assert caught.value.hint


def test_words_are_taken_in_any_case():
    assert parse_mode("FULL") is CompatibilityMode.FULL
    assert parse_policy("Enforce") is ValidationPolicy.ENFORCE
