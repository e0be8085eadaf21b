"""Protobuf schemas: descriptor sets and texts, compatibility, and payloads."""

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from ister.broker.schemas.definitions import find_incompatibilities
from ister.broker.schemas.protobuf import ProtoText, read_protobuf
from ister.errors import InvalidRequestError
from ister.topic.schema_kinds import CompatibilityMode
from tests.support.cases import each
from tests.support.protos import compile_proto

BOTH = (CompatibilityMode.BACKWARD, CompatibilityMode.FORWARD)
HEAD = 'syntax = "proto3"; package p;'
FieldType = descriptor_pb2.FieldDescriptorProto


def proto(body, head=HEAD):
    return read_protobuf(compile_proto(f"{head}\n{body}"))


def message_of(body, head=HEAD):
    """A class to write with, made without the code under test's pool."""
    pool = descriptor_pool.DescriptorPool()
    [file] = descriptor_pb2.FileDescriptorSet.FromString(compile_proto(f"{head}\n{body}")).file
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("p.M"))


def damaged(change):
    """A descriptor set of one message, changed in a way that protoc would refuse."""
    files = descriptor_pb2.FileDescriptorSet.FromString(
        compile_proto(f"{HEAD} message M {{ int32 a = 1; int32 b = 2; }}")
    )
    change(files.file[0])
    return files.SerializeToString()


def test_invalid_sets_are_refused():
    def two_of_a_number(file):
        file.message_type[0].field[1].number = 1

    def two_of_a_name(file):
        file.message_type[0].field[1].name = "a"

    def number_zero(file):
        file.message_type[0].field[0].number = 0

    def missing_type(file):
        file.message_type[0].field[0].type = FieldType.TYPE_MESSAGE
        file.message_type[0].field[0].type_name = ".p.Missing"

    def missing_import(file):
        file.dependency.append("/etc/passwd")

    def no_message(file):
        del file.message_type[:]

    changes = (two_of_a_number, two_of_a_name, number_zero, missing_type, missing_import)
    cases = [(change.__name__, damaged(change)) for change in (*changes, no_message)]
    others = (b"", b" ", b"\xff\xfe", b"\x00\x01\x02", b"\x0a\x02\x0a\x00")
    cases += [(repr(data), data) for data in others]
    for name, data in cases:
        try:
            read_protobuf(data)
        except InvalidRequestError:
            continue
        pytest.fail(f"accepted: {name}")


def test_text_is_stored_without_checks():
    """Danube's clients register texts, and Danube neither parses nor compares them."""
    text = f"{HEAD} message M {{ int32 a = 1; }}".encode()
    old, new = read_protobuf(text), read_protobuf(text.replace(b"int32", b"string"))
    assert isinstance(old, ProtoText)
    assert old.fingerprint == read_protobuf(text).fingerprint
    assert old.fingerprint != new.fingerprint
    compiled = proto("message M { int32 a = 1; }")
    for mode in BOTH:
        assert not find_incompatibilities(old, new, mode)
        assert not find_incompatibilities(old, compiled, mode), "a text may become a set"
        [reason] = find_incompatibilities(compiled, old, mode)
        assert "--descriptor_set_out" in reason, "a set must not become a text, which ends checks"
    assert "--descriptor_set_out" in old.check(b"")


def test_well_known_types_are_there():
    definition = proto(
        'import "google/protobuf/timestamp.proto"; import "google/protobuf/struct.proto";'
        "message M { google.protobuf.Timestamp at = 1; google.protobuf.Struct more = 2; }"
    )
    assert definition.check(b"") is None


def test_spelling_and_options_do_not_change_the_schema():
    text = f"{HEAD} message M {{ string long_name = 1; M m = 2; }}"
    spelled = text.replace("; ", ";\n\n// a comment\n").replace("= 2", "= 2 [deprecated = true]")
    spelled = spelled.replace("= 1", '= 1 [json_name = "longName"]')
    prints = {read_protobuf(compile_proto(one)).fingerprint for one in (text, spelled)}
    assert len(prints) == 1
    assert read_protobuf(compile_proto(text.replace("= 1", "= 3"))).fingerprint not in prints


def test_set_has_its_imports():
    data = compile_proto(
        f'{HEAD} import "base.proto"; message M {{ B b = 1; }}',
        base=f"{HEAD} message B {{ int32 n = 1; }}",
    )
    definition = read_protobuf(data)
    assert definition.check(b"\x0a\x02\x08\x05") is None
    assert definition.check(b"\x0a\x02\x0a\x00") is not None, "n of B is a number"
    changed = descriptor_pb2.FileDescriptorSet.FromString(data)
    changed.file[0].message_type[0].field[0].type = FieldType.TYPE_STRING
    other = read_protobuf(changed.SerializeToString())
    assert other.fingerprint != definition.fingerprint
    assert definition.cannot_read(other)
    del changed.file[0]
    with pytest.raises(InvalidRequestError, match=r"base\.proto"):
        read_protobuf(changed.SerializeToString())


@each(
    ("old", "new", "backward", "forward"),
    [
        ("int32 a = 1;", "int32 a = 1; string b = 2;", True, True),
        ("int32 a = 1;", "int32 renamed = 1;", True, True),
        ("int32 a = 1; string b = 2;", "int32 a = 1; reserved 2;", True, True),
        ("int32 a = 1;", "int64 a = 1;", True, False),
        ("int32 a = 1;", "string a = 1;", False, False),
        ("int32 a = 1;", "sint32 a = 1;", False, False),
        ("int32 a = 1;", "fixed32 a = 1;", False, False),
        ("string a = 1;", "bytes a = 1;", True, False),
        ("string a = 1;", "repeated string a = 1;", True, False),
        ("int32 a = 1;", "repeated int32 a = 1;", False, False),
        ("bool a = 1;", "uint32 a = 1;", True, False),
        ("int32 a = 1;", "int32 a = 2;", False, False),
        ("reserved 5;", "int32 a = 5;", False, False),
        ('reserved "a";', "int32 a = 5;", False, False),
        ("int32 a = 1; int32 b = 2;", "oneof o { int32 a = 1; int32 b = 2; }", False, False),
        ("int32 a = 1;", "oneof o { int32 a = 1; int32 b = 2; }", True, True),
        ("map<string, int32> a = 1;", "map<string, int64> a = 1;", True, False),
        ("map<string, int32> a = 1;", "map<string, string> a = 1;", False, False),
        ("enum E { Z = 0; } E e = 1;", "enum E { Z = 0; Y = 1; } E e = 1;", True, True),
        (
            "message I { int32 n = 1; } I i = 1;",
            "message I { string n = 1; } I i = 1;",
            False,
            False,
        ),
        ("message I {} message J {} I i = 1;", "message I {} message J {} J i = 1;", False, False),
        ("M m = 1; int32 n = 2;", "M m = 1; int64 n = 2;", True, False),
    ],
)
def test_rules(old, new, backward, forward):
    before, after = proto(f"message M {{ {old} }}"), proto(f"message M {{ {new} }}")
    found = tuple(not find_incompatibilities(before, after, mode) for mode in BOTH)
    assert found == (backward, forward)


@each(
    ("old", "new", "backward", "forward"),
    [
        ("optional int32 a = 1;", "required int32 a = 1;", False, True),
        ("required int32 a = 1;", "optional int32 a = 1;", True, False),
        ("", "required int32 a = 1;", False, True),
        (
            "enum E { Z = 0; } optional E e = 1;",
            "enum E { Z = 0; Y = 1; } optional E e = 1;",
            True,
            False,
        ),
    ],
)
def test_rules_of_proto2(old, new, backward, forward):
    before, after = (proto(f"message M {{ {one} }}", "") for one in (old, new))
    found = tuple(not find_incompatibilities(before, after, mode) for mode in BOTH)
    assert found == (backward, forward)


def test_message_that_is_gone_is_missed():
    both = proto("message M {} message N {}")
    assert "p.N: is missing" in proto("message M {}").cannot_read(both)
    assert not both.cannot_read(proto("message M {}"))
    assert proto("message M {}", 'syntax = "proto3"; package q;').cannot_read(proto("message M {}"))


def test_payloads():
    body = "message M { string s = 1; repeated int32 n = 2; M m = 3; map<string, M> k = 4; }"
    writer = message_of(body)
    definition = proto(body)
    inner = writer(s="x", n=[1, 2])
    good = writer(s="é", n=[1], m=inner, k={"a": inner})
    assert definition.check(good.SerializeToString()) is None
    assert definition.check(b"") is None
    assert definition.check(good.SerializeToString()[:-1]) == "not a p.M"
    assert definition.check(b'{"s": "x"}') is not None
    assert definition.check(b"\x0a\x01\xff") is not None, "a text that is not UTF-8"
    # Fields that the schema does not have are no fault: a newer producer may write them.
    assert definition.check(b"\x78\x01") is None


@each("payload", [b"\x08\x05", b"\x1a\x02\x08\x05", b"\x22\x04\x12\x02\x08\x05"])
def test_field_of_another_type_is_found_at_any_depth(payload):
    definition = proto("message M { string s = 1; M m = 3; map<string, M> k = 4; }")
    assert "p.M.s has another type" in definition.check(payload)


def test_required_fields_are_asked_for():
    definition = proto("message M { required int32 a = 1; optional M m = 2; }", "")
    assert definition.check(b"\x08\x01") is None
    assert "required" in definition.check(b"")
    assert "required" in definition.check(b"\x08\x01\x12\x00")


def test_unknown_value_of_a_closed_enumeration_is_no_other_type():
    definition = proto("message M { enum E { Z = 0; } optional E e = 1; }", "")
    assert definition.check(b"\x08\x05") is None


def test_payload_is_of_the_first_message():
    definition = proto("message A { int32 n = 1; } message B { string s = 1; }")
    assert definition.check(b"\x08\x01") is None
    assert definition.check(b"\x0a\x01x") is not None


def test_deep_payload_is_refused():
    definition = proto("message M { M m = 1; }")
    payload = b""
    for _ in range(3000):
        size, head = len(payload), bytearray([0x0A])
        while size >= 0x80:
            head.append(size & 0x7F | 0x80)
            size >>= 7
        payload = bytes([*head, size]) + payload
    assert definition.check(payload) is not None
