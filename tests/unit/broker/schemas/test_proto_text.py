"""The text of .proto files, read as the compiler reads it."""

import contextlib
import random
import time

import pytest
from google.protobuf import descriptor_pb2, text_format

from ister.broker.schemas.proto_text import read_proto_text
from ister.errors import InvalidRequestError

Field = descriptor_pb2.FieldDescriptorProto


def read(text):
    return read_proto_text(text, name="x.proto")


def test_everything_of_proto3():
    file = read(
        """
        // A remark.
        syntax = "proto3"; /* another
        one */
        package a.b;
        import "google/protobuf/timestamp.proto";
        import public 'other.proto';
        option java_package = "com.example";
        option (mine.opt).part = { a: 1 b: [ "}" ] };
        message Thing {
          option deprecated = true;
          string name = 1;
          repeated int32 many = 0x2 [packed = false, deprecated = true];
          map<string, .a.b.Thing> things = 3;
          oneof choice { option (x) = 1; int32 left = 4; Inner right = 5; }
          optional uint64 maybe = 6 [json_name = "perhaps"];
          message Inner { bytes data = 1; ; }
          enum Kind { option allow_alias = true; NONE = 0; NIL = 0 [(x) = 1]; LOW = -1; }
          Kind kind = 010;
          reserved 20, 30 to 40, 1000 to max;
          reserved "old", "older";
        }
        enum Top { ZERO = 0; reserved -5 to -3, 9; reserved "GONE"; }
        service Calls { rpc Do (Thing) returns (stream Thing) { option (y) = { z: "}" }; } }
        ;
        """
    )
    expected = """
        name: "x.proto" package: "a.b" syntax: "proto3"
        dependency: "google/protobuf/timestamp.proto" dependency: "other.proto"
        public_dependency: 1
        message_type {
          name: "Thing"
          field { name: "name" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
          field { name: "many" number: 2 label: LABEL_REPEATED type: TYPE_INT32
                  options { packed: false } }
          field { name: "things" number: 3 label: LABEL_REPEATED type: TYPE_MESSAGE
                  type_name: "ThingsEntry" }
          field { name: "left" number: 4 label: LABEL_OPTIONAL type: TYPE_INT32 oneof_index: 0 }
          field { name: "right" number: 5 label: LABEL_OPTIONAL type_name: "Inner" oneof_index: 0 }
          field { name: "maybe" number: 6 label: LABEL_OPTIONAL type: TYPE_UINT64
                  json_name: "perhaps" proto3_optional: true oneof_index: 1 }
          field { name: "kind" number: 8 label: LABEL_OPTIONAL type_name: "Kind" }
          nested_type { name: "ThingsEntry" options { map_entry: true }
            field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
            field { name: "value" number: 2 label: LABEL_OPTIONAL type_name: ".a.b.Thing" } }
          nested_type { name: "Inner"
            field { name: "data" number: 1 label: LABEL_OPTIONAL type: TYPE_BYTES } }
          enum_type { name: "Kind" options { allow_alias: true }
            value { name: "NONE" number: 0 } value { name: "NIL" number: 0 }
            value { name: "LOW" number: -1 } }
          oneof_decl { name: "choice" } oneof_decl { name: "_maybe" }
          reserved_range { start: 20 end: 21 } reserved_range { start: 30 end: 41 }
          reserved_range { start: 1000 end: 536870912 }
          reserved_name: "old" reserved_name: "older"
        }
        enum_type { name: "Top" value { name: "ZERO" number: 0 }
          reserved_range { start: -5 end: -3 } reserved_range { start: 9 end: 9 }
          reserved_name: "GONE" }
    """
    assert file == text_format.Parse(expected, descriptor_pb2.FileDescriptorProto())


def test_everything_of_proto2():
    file = read(
        r"""
        message Thing {
          required int32 must = 1 [default = 0x10];
          optional string text = 2 [default = "a\n" 'b'];
          optional bytes data = 3 [default = "\001\"x"];
          optional double ratio = 4 [default = -1.5e+3];
          optional bool flag = 5 [default = true];
          optional group Part = 6 [deprecated = true] { optional int32 n = 1; }
          extensions 100 to 199, 300 [verification = UNVERIFIED];
          extend Thing { optional int32 extra = 100; }
        }
        extend Thing { repeated string more = 101; }
        """
    )
    [thing] = file.message_type
    defaults = {field.name: field.default_value for field in thing.field}
    assert defaults == {
        "must": "16",
        "text": "a\nb",
        "data": '\\001\\"x',
        "ratio": "-1.5e+3",
        "flag": "true",
        "part": "",
    }
    assert thing.field[0].label == Field.LABEL_REQUIRED
    assert (thing.field[5].type, thing.field[5].type_name) == (Field.TYPE_GROUP, "Part")
    assert [(one.start, one.end) for one in thing.extension_range] == [(100, 200), (300, 301)]
    assert [one.extendee for one in (*thing.extension, *file.extension)] == ["Thing", "Thing"]
    assert file.syntax == ""


@pytest.mark.parametrize(
    "word", ["message", "enum", "oneof", "map", "reserved", "option", "extend", "group", "to"]
)
def test_words_of_the_grammar_are_names_as_well(word):
    file = read(
        f'syntax = "proto3"; message M {{ int32 {word} = 1; {word} other = 2; }}'.replace(
            f"{word} other", f".{word} other"
        )
    )
    assert [field.name for field in file.message_type[0].field] == [word, "other"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\a\b\f\n\r\t\v\\\'\"\?", b"\a\b\f\n\r\t\v\\'\"?"),
        (r"\0\07\101\1018\x4\x41\X41z", b"\0\x07AA8\x04AAz"),
        (r"é\u00e9\U0001F600", "éé\U0001f600".encode()),
        (r"\377", b"\xff"),
    ],
)
def test_escapes(text, value):
    file = read(f'message M {{ optional bytes a = 1 [default = "{text}"]; }}')
    default = file.message_type[0].field[0].default_value
    assert default.encode().decode("unicode_escape").encode("latin-1") == value


@pytest.mark.parametrize("text", [r"\q", r"\xZZ", r"\u00e", r"\U00110000", r"\8"])
def test_wrong_escapes_are_refused(text):
    with pytest.raises(InvalidRequestError, match="escape"):
        read(f'message M {{ optional string a = 1 [default = "{text}"]; }}')


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("garbage", "cannot stand here (line 1)"),
        ("\n\nmessage M { string a = ; }", "line 3"),
        ('syntax = "proto3"; message M { string a = ; }', "whole number"),
        ('syntax = "proto3"; message M { string = 1; }', "name"),
        ('syntax = "proto3"; message M { string a = 1 }', "';' is missing"),
        ('syntax = "proto3"; message M { string a = 1;', "'}' is missing"),
        ('syntax = "proto3"; message M { string a = 1; } }', "name is missing"),
        ('syntax = "proto3"; message M { string a = 99999999999; }', "above"),
        ('syntax = "proto3"; message M { string a = 1.5; }', "whole number"),
        ('syntax = "proto3"; message M { 5 a = 1; }', "field is missing"),
        ("message M { int32 a = 1; }", "optional, required or repeated"),
        ('syntax = "proto4"; message M {}', "no syntax"),
        ('edition = "2023"; message M {}', "FileDescriptorSet"),
        ("message M {} /* never ends", "no meaning"),
        ("message M { optional string a = 1 [default = 'never ends]; }", "no meaning"),
        ('message M { optional string a = 1 [default = "\\xZZ"]; }', "escape"),
        ("message M \x00", "no meaning"),
        ("message M {" * 200, "levels"),
        ("option a = {" * 100_000, "missing"),
    ],
)
def test_what_is_no_proto_text_is_refused(text, what):
    with pytest.raises(InvalidRequestError) as caught:
        read(text)
    assert what in str(caught.value)


@pytest.mark.parametrize(
    "text", ["/*" * 120_000, '"\\' * 120_000, "/" * 240_000, "message M {}" * 20_000, "." * 240_000]
)
def test_texts_take_time_in_proportion(text):
    begun = time.monotonic()
    with contextlib.suppress(InvalidRequestError):
        read(text)
    assert time.monotonic() - begun < 20


def test_mutated_texts_give_an_answer():
    seed = random.randrange(1 << 30)
    print(f"replay: seed {seed}")
    source = random.Random(seed)
    words = 'syntax = "proto3" ; message M { } ( ) [ ] < > , map string int32 a = 1 2 to reserved '
    words += (
        "oneof enum optional group extend package import option rpc service . - 'x' 0x /* */ //"
    )
    tokens = words.split()
    for _ in range(2000):
        text = " ".join(source.choice(tokens) for _ in range(source.randint(1, 40)))
        prefix = source.choice(["", 'syntax = "proto3"; message M { string a = 1; '])
        try:
            assert read(prefix + text).name == "x.proto"
        except InvalidRequestError:
            continue
