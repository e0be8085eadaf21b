"""Protobuf schemas: which are taken, which are the same, which read which, and payloads."""

from importlib import resources

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from ister.broker.schemas.definitions import find_incompatibilities
from ister.broker.schemas.kinds import CompatibilityMode
from ister.broker.schemas.proto_text import read_proto_text
from ister.broker.schemas.protobuf import read_protobuf
from ister.errors import InvalidRequestError

BOTH = (CompatibilityMode.BACKWARD, CompatibilityMode.FORWARD)


def proto(body, head='syntax = "proto3"; package p;'):
    return read_protobuf(f"{head}\n{body}".encode())


def message_of(body, head='syntax = "proto3"; package p;'):
    """A class to write with, made without the code under test's pool."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(read_proto_text(f"{head}\n{body}", name="m.proto"))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("p.M"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'syntax = "proto3";',
        b"garbage",
        b"\xff\xfe",
        b"\x00\x01\x02",
        b"\x0a\x02\x0a\x00",
        b'syntax = "proto3"; message M { int32 a = 0; }',
        b'syntax = "proto3"; message M { int32 a = 1; int32 b = 1; }',
        b'syntax = "proto3"; message M { int32 a = 1; int32 a = 2; }',
        b'syntax = "proto3"; message M { Missing a = 1; }',
        b'syntax = "proto3"; message M {} message M {}',
        b'syntax = "proto3"; enum E { A = 1; } message M {}',
        b'syntax = "proto3"; import "other.proto"; message M {}',
        b'syntax = "proto3"; import "/etc/passwd"; message M {}',
    ],
)
def test_what_is_no_schema_is_refused(data):
    with pytest.raises(InvalidRequestError):
        read_protobuf(data)


def test_well_known_types_are_there():
    definition = proto(
        'import "google/protobuf/timestamp.proto"; import "google/protobuf/struct.proto";'
        "message M { google.protobuf.Timestamp at = 1; google.protobuf.Struct more = 2; }"
    )
    assert definition.check(b"") is None


def test_text_and_descriptors_are_the_same_schema():
    text = 'syntax = "proto3"; package p; message M { string long_name = 1; M m = 2; }'
    file = read_proto_text(text, name="any/name.proto")
    file.message_type[0].field[0].json_name = "longName"  # as the compiler writes it
    described = descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    spelled = text.replace("; ", ";\n\n// a remark\n")
    prints = {
        read_protobuf(data).fingerprint for data in (text.encode(), described, spelled.encode())
    }
    assert len(prints) == 1
    assert read_protobuf(text.replace("= 1", "= 3").encode()).fingerprint not in prints


def test_set_has_its_imports():
    base = read_proto_text(
        'syntax = "proto3"; package p; message B { int32 n = 1; }', name="b.proto"
    )
    main = read_proto_text(
        'syntax = "proto3"; package p; import "b.proto"; message M { B b = 1; }', name="m.proto"
    )
    files = descriptor_pb2.FileDescriptorSet(file=[base, main])
    definition = read_protobuf(files.SerializeToString())
    assert definition.check(b"\x0a\x02\x08\x05") is None
    assert definition.check(b"\x0a\x02\x0a\x00") is not None, "n of B is a number"
    changed = descriptor_pb2.FileDescriptorSet(file=[base, main])
    changed.file[0].message_type[0].field[0].type = 9
    other = read_protobuf(changed.SerializeToString())
    assert other.fingerprint != definition.fingerprint
    assert definition.cannot_read(other)
    with pytest.raises(InvalidRequestError, match=r"b\.proto"):
        read_protobuf(descriptor_pb2.FileDescriptorSet(file=[main]).SerializeToString())


@pytest.mark.parametrize(
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
        (
            "message I {} message J {} I i = 1;",
            "message I {} message J {} J i = 1;",
            False,
            False,
        ),
        ("M m = 1; int32 n = 2;", "M m = 1; int64 n = 2;", True, False),
    ],
)
def test_rules(old, new, backward, forward):
    before, after = proto(f"message M {{ {old} }}"), proto(f"message M {{ {new} }}")
    found = tuple(not find_incompatibilities(before, after, mode) for mode in BOTH)
    assert found == (backward, forward)


@pytest.mark.parametrize(
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
    assert "p.N: is not there" in proto("message M {}").cannot_read(both)
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


@pytest.mark.parametrize("payload", [b"\x08\x05", b"\x1a\x02\x08\x05", b"\x22\x04\x12\x02\x08\x05"])
def test_field_of_another_type_is_found_at_any_depth(payload):
    definition = proto("message M { string s = 1; M m = 3; map<string, M> k = 4; }")
    assert "p.M.s is of another type" in definition.check(payload)


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


PROTO3 = """
syntax = "proto3";
package a.b;
import "google/protobuf/timestamp.proto";
option java_package = "com.example";
/* A thing. */
message Thing {
  option deprecated = true;
  string long_name = 1 [deprecated = true];
  repeated int32 many = 0x2 [packed = false];
  map<string, .a.b.Thing> some_things = 3;
  oneof choice { int32 left = 4; Inner right = 5; }
  optional uint64 maybe = 6 [json_name = "perhaps"];
  message Inner { bytes data = 1; Thing.Kind kind = 2; b.Thing up = 3; }
  enum Kind { option allow_alias = true; NONE = 0; NIL = 0 [deprecated = true]; LOW = -1; }
  Kind kind = 010;
  google.protobuf.Timestamp at = 11;
  reserved 20, 30 to 40, 1000 to max;
  reserved "old", "older";
}
enum Top { ZERO = 0; reserved -5 to -3, 9; reserved "GONE"; }
service Calls { rpc Do (Thing) returns (stream Thing) { option deprecated = true; } }
"""
PROTO2 = r"""
message Thing {
  required int32 must = 1 [default = 0x10];
  optional string text = 2 [default = "a\n" 'b\x41\101'];
  optional bytes data = 3 [default = "\001\"x\xff"];
  optional double ratio = 4 [default = -1.5e+3];
  optional float huge = 7 [default = inf];
  optional bool flag = 5 [default = true];
  optional group Part = 6 [deprecated = true] { optional int32 n = 1; }
  optional Kind kind = 8 [default = LOW];
  enum Kind { HIGH = 1; LOW = -1; }
  extensions 100 to 199, 300;
  extend Thing { optional int32 extra = 100; }
}
extend Thing { repeated string more = 101; }
"""
WIRE = ["danube.proto", "danube_schema.proto", "danube_admin.proto", "ister.proto"]


@pytest.mark.parametrize("source", [PROTO3, PROTO2, *WIRE], ids=lambda text: text[:20].strip())
def test_text_is_read_as_the_compiler_reads_it(tmp_path, source):
    protoc = pytest.importorskip("grpc_tools.protoc")
    if source in WIRE:
        source = resources.files("ister.broker.wire").joinpath(source).read_text()
    (tmp_path / "x.proto").write_text(source)
    known = str(resources.files("grpc_tools").joinpath("_proto"))
    options = [f"-I{tmp_path}", f"-I{known}", "--include_imports"]
    command = ["protoc", *options, f"--descriptor_set_out={tmp_path}/x.pb", "x.proto"]
    assert protoc.main(command) == 0
    compiled = read_protobuf((tmp_path / "x.pb").read_bytes())
    assert read_protobuf(source.encode()).fingerprint == compiled.fingerprint
