"""Payloads against Avro schemas: bytes are walked over, never built."""

import io
import json
import random
import tracemalloc

import fastavro

from ister.broker.schemas.avro import read_avro
from tests.support.cases import each

EVERYTHING = {
    "type": "record",
    "name": "Everything",
    "fields": [
        {"name": "flag", "type": "boolean"},
        {"name": "small", "type": "int"},
        {"name": "large", "type": "long"},
        {"name": "ratio", "type": "float"},
        {"name": "exact", "type": "double"},
        {"name": "blob", "type": "bytes"},
        {"name": "text", "type": "string"},
        {"name": "maybe", "type": ["null", "string"]},
        {"name": "list", "type": {"type": "array", "items": "long"}},
        {"name": "named", "type": {"type": "map", "values": "string"}},
        {"name": "colour", "type": {"type": "enum", "name": "C", "symbols": ["A", "B"]}},
        {"name": "key", "type": {"type": "fixed", "name": "K", "size": 3}},
        {"name": "again", "type": ["null", "Everything"]},
    ],
}


def datum(source, depth=2):
    return {
        "flag": source.random() < 0.5,
        "small": source.randint(-(2**31), 2**31 - 1),
        "large": source.randint(-(2**63), 2**63 - 1),
        "ratio": 0.5,
        "exact": source.random(),
        "blob": source.randbytes(source.randint(0, 9)),
        "text": "é" * source.randint(0, 9),
        "maybe": source.choice([None, "x"]),
        "list": [source.randint(-9, 9) for _ in range(source.randint(0, 9))],
        "named": {str(index): "y" for index in range(source.randint(0, 3))},
        "colour": source.choice("AB"),
        "key": b"abc",
        "again": datum(source, depth - 1) if depth else None,
    }


def encode(schema, value):
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


def definition(schema):
    return read_avro(json.dumps(schema).encode())


def test_every_datum_fits_and_no_cut_of_it_does():
    seed = random.randrange(1 << 30)
    print(f"replay: seed {seed}")
    source = random.Random(seed)
    checked = definition(EVERYTHING)
    for _ in range(50):
        data = encode(EVERYTHING, datum(source))
        assert checked.check(data) is None
        assert checked.check(data[: source.randrange(len(data))]) is not None
        assert checked.check(data + b"\x00") is not None


def test_mutated_bytes_are_judged_as_fastavro_does():
    """Goal: nothing but an answer comes of any bytes, and fits only what fastavro reads."""
    seed = random.randrange(1 << 30)
    print(f"replay: seed {seed}")
    source = random.Random(seed)
    schema = fastavro.parse_schema(EVERYTHING)
    checked = definition(EVERYTHING)
    fitting = 0
    for _ in range(2000):
        data = bytearray(encode(EVERYTHING, datum(source, 1)))
        for _ in range(source.randint(1, 3)):
            data[source.randrange(len(data))] = source.randrange(256)
        if checked.check(bytes(data)) is None:
            fitting += 1
            stream = io.BytesIO(data)
            fastavro.schemaless_reader(stream, schema, None)
            assert stream.tell() == len(data)
    assert fitting


@each(
    ("schema", "payload", "reason"),
    [
        ("int", b"", "ends inside"),
        ("int", b"\xff" * 11, "more than 32 bits"),
        ("int", b"\xff\xff\xff\xff\xff\x01", "more than 32 bits"),
        ("long", b"\xff" * 9 + b"\x7f", "more than 64 bits"),
        ("string", b"\x05", "goes beyond"),
        ("string", b"\x04ab\x00", "follow the datum"),
        ("string", b"\x02\xff", "not UTF-8"),
        ("bytes", b"\x01", "goes beyond"),
        ("boolean", b"\x02", "not a boolean"),
        ("null", b"\x00", "follow the datum"),
        (["null", "int"], b"\x04", "invalid branch 2 of 2"),
        (["null", "int"], b"\x01", "invalid branch -1 of 2"),
        ({"type": "enum", "name": "e", "symbols": ["A"]}, b"\x02", "invalid symbol 1 of 1"),
        ({"type": "array", "items": "int"}, b"\x02\x02", "ends inside"),
        # Nobody can say ten to the eighteenth nulls in nine bytes and have them counted.
        ({"type": "array", "items": "null"}, b"\xfe\xff\xff\xff\xff\xff\xff\x7f\x00", "more items"),
    ],
)
def test_reasons(schema, payload, reason):
    assert reason in (definition(schema).check(payload) or "")


def test_list_that_is_too_long_is_refused_without_an_end_of_the_stack():
    schema = {
        "type": "record",
        "name": "Node",
        "fields": [{"name": "next", "type": ["null", "Node"]}],
    }
    assert definition(schema).check(b"\x02" * 30 + b"\x00") is None
    assert "nested records" in definition(schema).check(b"\x02" * 1_000_000 + b"\x00")


def test_empty_records_cost_no_memory():
    schema = {"type": "array", "items": {"type": "record", "name": "E", "fields": []}}
    count = 100_000
    # A zigzag varint of the count, the end of the array, and padding that makes it plausible.
    head = bytearray()
    number = count << 1
    while number >= 0x80:
        head.append(number & 0x7F | 0x80)
        number >>= 7
    head.append(number)
    payload = bytes(head) + b"\x00" + bytes(count)
    tracemalloc.start()
    reason = definition(schema).check(payload)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "follow the datum" in reason
    assert peak < 2_000_000


def test_fields_that_take_no_bytes_do_not_multiply():
    wide = {
        "type": "record",
        "name": "Wide",
        "fields": [{"name": f"f{index}", "type": "null"} for index in range(2000)],
    }
    checked = definition({"type": "array", "items": wide})
    # 10,000 records of 2,000 fields that are nothing, in 10,010 bytes.
    payload = b"\xa0\x9c\x01" + b"\x00" + bytes(10_000)
    assert "too many fields" in checked.check(payload)


def test_file_of_the_same_schema_fits():
    schema = {"type": "record", "name": "U", "fields": [{"name": "a", "type": "int"}]}
    checked = definition(schema)

    def file(written, codec="null"):
        out = io.BytesIO()
        fastavro.writer(out, fastavro.parse_schema(written), [{"a": 1}, {"a": 2}], codec=codec)
        return out.getvalue()

    assert checked.check(file(schema)) is None
    other = {"type": "record", "name": "U", "fields": [{"name": "a", "type": "long"}]}
    assert "not the one of the message" in checked.check(file(other))
    assert "compressed" in checked.check(file(schema, "deflate"))
    whole = file(schema)
    for size in range(4, len(whole)):  # the first byte alone is a datum
        assert checked.check(whole[:size]) is not None
