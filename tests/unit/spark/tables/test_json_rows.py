"""JSON payloads as columns: both ways of parsing agree, and whatever does not fit is told."""

import json
import random

import pyarrow as pa

from ister.spark.tables.json_rows import JsonParser
from ister.spark.tables.json_schema import columns_of
from support.cases import case

_SCHEMA = {
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string"},
        "price": {"type": "number"},
        "ok": {"type": "boolean"},
        "at": {"type": "string", "format": "date-time"},
        "day": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "to": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "since": {"type": "string", "format": "date-time"},
                "visits": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"d": {"type": "string", "format": "date"}},
                    },
                },
            },
        },
    }
}
_GOOD = {
    "id": 7,
    "name": "größer 🐘",
    "price": 1.5,
    "ok": True,
    "at": "2026-03-01T10:00:00.123456+02:00",
    "day": "2026-03-01",
    "tags": ["a", None, "b"],
    "to": {"city": "Ulm", "since": "2026-03-01T10:00:00Z", "visits": [{"d": "2026-03-01"}, None]},
}


def _parser(schema: dict | None = None) -> JsonParser:
    return JsonParser(columns_of(schema or _SCHEMA))


def _array(payloads: list[bytes]) -> pa.Array:
    return pa.array(payloads, pa.binary())


def _columns(parser: JsonParser, payloads: list[bytes]) -> tuple[list[dict], list]:
    arrays, bad = parser.parse(_array(payloads))
    for array in arrays:
        array.validate(full=True)
    return pa.RecordBatch.from_arrays(arrays, schema=parser.schema).to_pylist(), bad


def _some(rng: random.Random):
    row = {name: value for name, value in _GOOD.items() if rng.random() < 0.7}
    for name in list(row):
        if rng.random() < 0.2:
            row[name] = None
    if rng.random() < 0.3:
        row["more"] = rng.choice([1, "x", [1], {"a": [{}]}, None, [1, "b", {"c": None}]])
    return row


def test_both_ways_agree():
    for seed in range(4):
        with case(seed):
            rng = random.Random(seed)
            parser = _parser()
            payloads = _array(
                [json.dumps(_some(rng), indent=rng.choice([None, 1])).encode() for _ in range(300)]
            )
            fast = parser._parse_fast(payloads)
            slow, bad = parser._parse_slowly(payloads, 0)
            assert bad == []
            assert fast is not None
            for one, other in zip(fast, slow, strict=True):
                one.validate(full=True)
                assert one.equals(other)


_BAD = {
    b"": "empty",
    b" ": "empty",
    b"nope": "not JSON",
    b"null": "null, not an object",
    b"[]": "an array, not an object",
    b'"x"': "a string, not an object",
    b'{"id":1},{"id":2}': "Extra data",
    b'{"id":1}\n{"id":2}': "Extra data",
    b'{"id":1}],"x":[{}': "Extra data",
    b'{"id":1}]}\n{"n":1,"p":[{"id":2}': "Extra data",
    b'{"id":1},"x":2': "Extra data",
    b'{"id":NaN}': "NaN",
    b'{"other":NaN}': "NaN",
    b'{"price":Infinity}': "Infinity",
    b'{"price":1e999}': "too large",
    b'{"id":"1"}': "`id` is a string, not an integer",
    b'{"id":true}': "`id` is a boolean, not an integer",
    b'{"id":1.5}': "`id` is a number, not an integer",
    b'{"id":99999999999999999999}': "64 bits",
    b'{"name":5}': "`name` is a number, not a string",
    b'{"name":"\\ud800"}': "unpaired surrogate",
    b'{"name":"\xff"}': "not UTF-8: byte 9",
    b'{"ok":1}': "`ok` is a number, not a boolean",
    b'{"ok":"true"}': "not a boolean",
    b'{"at":"yesterday"}': "`at` is not a date-time",
    b'{"at":"2026-03-01"}': "`at` is not a date-time",
    b'{"at":17}': "not a date-time",
    b'{"day":"2026-02-30"}': "`day` is not a date",
    b'{"day":"20260301"}': "`day` is not a date",
    b'{"tags":"a"}': "`tags` is a string, not an array",
    b'{"tags":["a",1]}': "`tags[1]` is a number, not a string",
    b'{"to":{"visits":[{"d":"x"}]}}': "`to.visits[0].d` is not a date",
    b'{"to":[]}': "`to` is an array, not an object",
    b'{"id":' + b"9" * 5000 + b"}": "",
}


def test_what_does_not_fit_is_told_and_harms_no_other():
    for payload, reason in _BAD.items():
        with case(payload):
            good = json.dumps(_GOOD).encode()
            rows, bad = _columns(_parser(), [good, payload, b'{"id":8}'])
            assert [number for number, _ in bad] == [1]
            assert reason in bad[0][1]
            assert [row["id"] for row in rows] == [7, 8]


def test_what_fits():
    for payload, column, value in [
        (b'{"id":1.0}', "id", 1),
        (b'{"id":1e3}', "id", 1000),
        (b'{"id":1,"id":2}', "id", 2),
        (b'{"price":3}', "price", 3.0),
        (b'{"name":"a\\u0000b"}', "name", "a\x00b"),
        (b' {"id":\n4} ', "id", 4),
        (b'{"more":[1],"id":5,"x":["]",{"y":[]}]}', "id", 5),
        (b'{"name":"],\\"x\\":[NaN"}', "name", '],"x":[NaN'),
    ]:
        with case(payload, column, value):
            rows, bad = _columns(_parser(), [b"{}", payload, b"{}"])
            assert bad == []
            assert rows[1][column] == value


def test_a_time_without_a_zone_is_in_utc():
    rows, bad = _columns(
        _parser(), [b'{"at":"2026-03-01T10:00:00"}', b'{"at":"2026-03-01T10:00:00Z"}']
    )
    assert bad == []
    assert rows[0]["at"] == rows[1]["at"]


def test_depth_does_not_depend_on_neighbours():
    """Nobody's stack ends, and a payload is taken or not whatever comes beside it."""
    for depth in [5000, 2_000_000]:
        with case(depth):
            deep = b'{"id":9,"a":' + b"[" * depth + b"]" * depth + b"}"
            for neighbour in (b"{}", b"?"):
                rows, bad = _columns(_parser(), [neighbour, deep])
                assert rows[-1]["id"] == 9
                assert len(bad) == (neighbour == b"?")


def test_one_bad_payload_among_many():
    payloads = [b'{"id":%d}' % number for number in range(2000)]
    payloads[1234] = b"?"
    rows, bad = _columns(_parser(), payloads)
    assert [number for number, _ in bad] == [1234]
    assert [row["id"] for row in rows] == [n for n in range(2000) if n != 1234]


def test_all_bad_and_none_at_all():
    assert _columns(_parser(), []) == ([], [])
    rows, bad = _columns(_parser(), [b"?"] * 3)
    assert rows == []
    assert [number for number, _ in bad] == [0, 1, 2]


def test_json_is_kept_as_text_where_a_type_is_not_known():
    parser = _parser({"properties": {"x": {}, "o": {"type": "object", "properties": {"y": {}}}}})
    payloads = [
        b'{"x":{"a":[1, 2.5, null]},"o":{"y":"\xc3\xbc"}}',
        b'{"x":"text"}',
        b'{"x":"\\udc00"}',
    ]
    rows, bad = _columns(parser, payloads)
    assert rows == [
        {"x": '{"a":[1,2.5,null]}', "o": {"y": '"ü"'}},
        {"x": '"text"', "o": None},
    ]
    assert [number for number, _ in bad] == [2]
