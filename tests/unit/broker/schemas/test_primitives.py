"""Bytes, texts and numbers."""

from ister.broker.schemas.definitions import find_incompatibilities, read_definition
from ister.topic.schema_kinds import CompatibilityMode
from tests.support.cases import each


@each("data", [b"", b"anything at all", b"\xff"])
def test_definition_of_bytes_and_strings_is_a_remark(data):
    for name in ("bytes", "string"):
        assert read_definition(name, data).fingerprint == read_definition(name, b"else").fingerprint


def test_bytes_take_all():
    assert read_definition("bytes", b"").check(b"\xff\x00") is None


def test_string_is_utf8():
    definition = read_definition("string", b"")
    assert definition.check("hé".encode()) is None
    assert definition.check(b"") is None
    assert definition.check(b"ab\xff") == "byte 2 is not UTF-8"


@each(
    ("type_name", "data", "widths"),
    [
        ("number", b"", {4, 8}),
        ("number", b"a remark", {4, 8}),
        ("number", b"int", {4}),
        ("number", b'"double"', {8}),
        ("int64", b"", {8}),
        ("FLOAT", b"", {4}),
        # What the definition says is more than what the type was called.
        ("int", b"int64", {8}),
    ],
)
def test_number_has_the_width_of_its_kind(type_name, data, widths):
    definition = read_definition(type_name, data)
    fitting = {width for width in range(12) if definition.check(bytes(width)) is None}
    assert fitting == widths
    assert definition.schema_type == "number"


@each(
    ("old", "new", "backward", "forward"),
    [
        ("int", "int", True, True),
        ("int", "number", True, False),
        ("number", "int", False, True),
        ("int", "int64", False, False),
        ("int64", "double", False, False),
    ],
)
def test_number_reads_its_own_kind(old, new, backward, forward):
    before, after = read_definition(old, b""), read_definition(new, b"")
    found = {
        mode: not find_incompatibilities(before, after, mode)
        for mode in (CompatibilityMode.BACKWARD, CompatibilityMode.FORWARD)
    }
    assert found == {CompatibilityMode.BACKWARD: backward, CompatibilityMode.FORWARD: forward}
