"""JSON payloads as columns: what is valid, the values, and that neighbours do not matter."""

import json
import pickle
import random
import re
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from ister.spark.tables.json_rows import JsonParser
from ister.spark.tables.json_schema import Member, ValueType, columns_of
from tests.support.cases import case

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


# -- a reference: Python's json, one payload at a time ----------------------------------------


class _InvalidError(Exception):
    pass


def _reference(payload: bytes) -> dict | None:
    """The row of a payload of `_SCHEMA`; None if it is invalid."""

    def refuse(_: str):
        raise _InvalidError

    try:
        value = json.loads(payload.decode(), parse_constant=refuse, object_pairs_hook=_object)
        if not isinstance(value, dict) or _has_surrogate(value):
            return None
        return {name: _value(value.get(name), _SCHEMA["properties"][name]) for name in _GOOD}
    except (ValueError, OverflowError, _InvalidError):
        return None


def _object(pairs: list) -> dict:
    _check(not any(_has_surrogate(item) for pair in pairs for item in pair))  # also of one twice
    return dict(pairs)


def _has_surrogate(value) -> bool:
    if isinstance(value, str):
        return re.search("[\ud800-\udfff]", value) is not None
    if isinstance(value, dict):
        return any(_has_surrogate(item) for pair in value.items() for item in pair)
    return isinstance(value, list) and any(_has_surrogate(item) for item in value)


def _value(value, schema: dict):
    if value is None:
        return None
    kind = schema.get("format", schema["type"])
    if kind == "integer":
        _check(type(value) in (int, float) and value == value and abs(value) != float("inf"))
        _check(int(value) == value and -(2**63) <= value < 2**63)
        return int(value)
    if kind == "number":
        _check(type(value) in (int, float) and abs(value) <= 1.7976931348623157e308)
        return float(value)
    kinds = {"string": str, "boolean": bool, "array": list, "object": dict}
    _check(isinstance(value, kinds.get(kind, str)))
    if kind == "array":
        return [_value(item, schema["items"]) for item in value]
    if kind == "object":
        return {name: _value(value.get(name), one) for name, one in schema["properties"].items()}
    if kind == "date":
        _check(re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value))
        return date.fromisoformat(value)
    if kind == "date-time":
        _check(re.search("[Tt ]", value))
        found = datetime.fromisoformat(value)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    return value


def _check(is_valid: object) -> None:
    if not is_valid:
        raise _InvalidError


_NUMBERS = [
    "0", "-0", "-0.0", "7", "1.0", "1e3", "1.5", "1E-3", "9223372036854775807",
    "9223372036854775808", "-9223372036854775808", "-9223372036854775809", "1e18", "1e19",
    "1.7976931348623157e308", "1.7976931348623159e308", "1e308", "1e309", "1e999", "5e-324",
    "1e-999", "99999999999999999999", "01", "1.", ".5", "+1", "NaN", "-Infinity", "0x10", "1_0",
]  # fmt: skip
_TEXTS = [
    "", "a", "größer 🐘", "true", "1", "2026-03-01", "2026-3-1", "20260301", "2026-W09-7",
    "2026-02-30", "2026-03-01T10:00:00", "2026-03-01T10:00:00Z", "2026-03-01t10:00:00z",
    "2026-03-01 10:00", "2026-03-01T10:00:00.123456789+02:00", "2026-03-01T10", "10:00:00",
    "0001-01-01T00:00:00+10:00", "9999-12-31T23:59:59-01:00", "2026-03-01T24:00:00Z", "Infinity",
    "],\"x\":[NaN", "a\x00b",
]  # fmt: skip


def _any_value(rng: random.Random, depth: int = 0) -> str:
    """A JSON value, or nearly one."""
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind == 0:
        return rng.choice(["null", "true", "false", "nul", "None"])
    if kind <= 2:
        return rng.choice(_NUMBERS)
    if kind <= 4:
        return json.dumps(rng.choice(_TEXTS), ensure_ascii=rng.random() < 0.5)
    if kind == 5:
        return rng.choice(['"\\ud83d\\udc18"', '"\\ud800"', '"\\u0000"', '"\\x"', '"\t"', "''"])
    items = [_any_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 6:
        return f"[{','.join(items)}]"
    return "{" + ",".join(f'"{rng.choice("abc")}":{item}' for item in items) + "}"


def _any_payload(rng: random.Random) -> bytes:
    """A payload that fits, with up to three properties of any value, and sometimes a wrong byte."""
    row = {
        name: json.dumps(value, ensure_ascii=rng.random() < 0.5)
        for name, value in _GOOD.items()
        if rng.random() < 0.7
    }
    for _ in range(rng.choice([0, 0, 1, 3])):
        row[rng.choice([*_GOOD, "more"])] = _any_value(rng)
    if rng.random() < 0.2:
        inner = rng.choice(["city", "since", "visits"])
        row["to"] = f'{{"{inner}": {_any_value(rng)}}}'
    space = rng.choice(["", " ", "\n"])
    pairs = [f'"{name}":{space}{value}' for name, value in row.items()]
    has_twice = pairs and rng.random() < 0.1  # the last one counts, and all must be valid
    if has_twice:
        pairs.append(rng.choice(pairs))
    payload = ("{" + f",{space}".join(pairs) + "}").encode()
    if not has_twice and rng.random() < 0.1:
        at = rng.randrange(len(payload) + 1)
        cut = payload[at + rng.randrange(2) :]
        payload = payload[:at] + rng.choice([b"", b'"', b"]", b"}", b",", b"\xff", b"\\"]) + cut
    return payload


def _check_batch(seed: int) -> None:
    with case(seed):
        rng = random.Random(seed)
        payloads = [_any_payload(rng) for _ in range(rng.choice([1, 2, 30]))]
        rows, bad = _columns(_PARSER, payloads)
        wanted = [_reference(payload) for payload in payloads]
        for payload, row in zip(payloads, wanted, strict=True):
            with case(payload):
                valid, _ = _columns(_PARSER, [payload])
                assert valid == ([] if row is None else [row])
        assert rows == [row for row in wanted if row is not None]
        assert [number for number, _ in bad] == [n for n, row in enumerate(wanted) if row is None]


_PARSER = _parser()


def test_payloads_are_what_the_reference_says_whatever_their_neighbours_are():
    for seed in range(60):
        _check_batch(seed)


@pytest.mark.nightly
def test_many_payloads_are_what_the_reference_says():
    for seed in range(34_000):
        _check_batch(seed)


_BAD = {
    b"": "empty",
    b" ": "not JSON",
    b"nope": "not JSON",
    b"null": "Expected `object`, got `null`",
    b"[]": "Expected `object`, got `array`",
    b'"x"': "Expected `object`, got `str`",
    b'{"id":1},{"id":2}': "trailing characters (byte 9)",
    b'{"id":1}\n{"id":2}': "trailing characters",
    b'{"id":1}],"x":[{}': "trailing characters",
    b'{"id":1}]}\n{"n":1,"p":[{"id":2}': "trailing characters",
    b'{"id":1},"x":2': "trailing characters",
    b'{"id":NaN}': "not JSON",
    b'{"other":NaN}': "not JSON",
    b'{"price":Infinity}': "not JSON",
    b'{"price":1e999}': "out of range - at `$.price`",
    b'{"id":"1"}': "got `str` - at `$.id`",
    b'{"id":true}': "got `bool` - at `$.id`",
    b'{"id":1.5}': "not an integer of 64 bits: 1.5 at `$.id`",
    b'{"id":1e19}': "not an integer of 64 bits",
    b'{"id":99999999999999999999}': "at `$.id`",
    b'{"name":5}': "got `int` - at `$.name`",
    b'{"name":"\\ud800"}': "not JSON",
    b'{"name":"\xff"}': "not UTF-8: byte 9",
    b'{"other":"\xff"}': "not UTF-8: byte 10",
    b'{"ok":1}': "got `int` - at `$.ok`",
    b'{"ok":"true"}': "got `str` - at `$.ok`",
    b'{"at":"yesterday"}': "not an ISO 8601 date and time: 'yesterday' at `$.at`",
    b'{"at":"2026-03-01"}': "not an ISO 8601 date and time",
    b'{"at":17}': "got `int` - at `$.at`",
    b'{"day":"2026-02-30"}': "at `$.day`",
    b'{"day":"20260301"}': "at `$.day`",
    b'{"tags":"a"}': "got `str` - at `$.tags`",
    b'{"tags":["a",1]}': "got `int` - at `$.tags[1]`",
    b'{"to":{"visits":[{"d":"x"}]}}': "at `$.to.visits[0].d`",
    b'{"to":{"since":"x"}}': "at `$.to.since`",
    b'{"to":[]}': "got `array` - at `$.to`",
    b'{"id":' + b"9" * 5000 + b"}": "out of range",
    b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}": "nested too deeply",
    b'{"a":' + b"[" * 2_000_000 + b"]" * 2_000_000 + b"}": "nested too deeply",
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


def test_types_of_a_table():
    """Decimals, narrow numbers, and names that a table spells in another way."""
    kinds = {
        "d": ValueType("decimal", pa.decimal128(10, 2)),
        "i": ValueType("integer", pa.int8()),
        "f": ValueType("number", pa.float32()),
    }
    inner = tuple(Member(name, name, kind) for name, kind in kinds.items())
    item = ValueType(
        "object", pa.struct([(name, kind.type) for name, kind in kinds.items()]), inner
    )
    members = (*inner, Member("a b", "a_b", ValueType("array", pa.list_(item.type), item=item)))
    parser = pickle.loads(pickle.dumps(JsonParser(members)))
    row = {"d": Decimal("1.50"), "i": -128, "f": 0.5, "a_b": None}
    rows, bad = _columns(
        parser,
        [
            b'{"d":"1.5","i":-128,"f":0.5}',
            b'{"d":1.50,"i":-1.28e2,"f":0.5,"a b":[null,{"d":"1.50"}]}',
            b'{"f":3.4028235e38}',
            b'{"d":1.234}',
            b'{"d":"NaN"}',
            b'{"d":1e400}',
            b'{"d":true}',
            b'{"i":128}',
            b'{"i":128.0}',
            b'{"f":1e39}',
            b'{"a b":[{"d":0.001}]}',
        ],
    )
    assert rows[:2] == [row, {**row, "a_b": [None, {"d": Decimal("1.50"), "i": None, "f": None}]}]
    assert rows[2]["f"] == pytest.approx(3.4028235e38)
    assert [number for number, _ in bad] == list(range(3, 11))
    assert "`$.a b[0].d`" in bad[-1][1]
