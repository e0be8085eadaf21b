"""Avro schemas as Spark types, and bodies as Arrow columns, without a Spark session."""

import decimal
import io
import pickle
import random
import uuid
from datetime import UTC, date, datetime, timedelta

import fastavro
import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from ister.errors import CorruptDataError, InvalidRequestError
from ister.spark.avro import (
    AvroDecoder,
    AvroEncoder,
    check_framing,
    fits,
    missing_field,
    read_schema,
)
from tests.support.cases import case


def record(*fields, name="Order"):
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields]}


def logical(kind, name, **more):
    return {"type": kind, "logicalType": name, **more}


def struct(*fields):
    return StructType([StructField(name, kind) for name, kind in fields])


def written(schema, *values):
    """Bodies as fastavro itself writes them, logical types and all."""
    parsed = fastavro.parse_schema(schema)
    bodies = []
    for value in values:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, parsed, value)
        bodies.append(stream.getvalue())
    return bodies


def decoder(schema, *, framing="plain", schema_id=None, fails=False, context=()):
    return AvroDecoder(
        read_schema(schema), framing=framing, schema_id=schema_id, fails=fails, context=context
    )


def decoded(schema, *bodies, **settings):
    rows = decoder(schema, **settings).decode(pa.array(bodies, pa.binary())).to_pylist()
    return [row["value"] for row in rows], [row["reason"] for row in rows]


def encoded(schema, rows, *, schema_id=None):
    form = read_schema(schema)
    names = [name for name in form.spark.names if name in rows.type.names]
    return AvroEncoder(form, names, schema_id=schema_id).encode(rows).to_pylist()


ENUM = {"type": "enum", "name": "Colour", "symbols": ["RED", "GREEN"]}
MONEY = {"type": "fixed", "name": "Money", "size": 8, **logical("fixed", "decimal")}
MONEY |= {"precision": 12, "scale": 2}

TYPES = {
    "null": ("null", NullType()),
    "boolean": ("boolean", BooleanType()),
    "int": ("int", IntegerType()),
    "long": ("long", LongType()),
    "float": ("float", FloatType()),
    "double": ("double", DoubleType()),
    "bytes": ("bytes", BinaryType()),
    "string": ("string", StringType()),
    "fixed": ({"type": "fixed", "name": "Four", "size": 4}, BinaryType()),
    "enum": (ENUM, StringType()),
    "array": ({"type": "array", "items": "long"}, ArrayType(LongType())),
    "map": ({"type": "map", "values": "int"}, MapType(StringType(), IntegerType())),
    "record": (record(("x", "int"), name="Inner"), struct(("x", IntegerType()))),
    "null-or": (["null", "long"], LongType()),
    "or-null": (["long", "null"], LongType()),
    "union-of-one": (["string"], StringType()),
    "null-as-object": ([{"type": "null"}, "int"], IntegerType()),
    "date": (logical("int", "date"), DateType()),
    "time-millis": (logical("int", "time-millis"), LongType()),
    "time-micros": (logical("long", "time-micros"), LongType()),
    "timestamp-millis": (logical("long", "timestamp-millis"), TimestampType()),
    "timestamp-micros": (logical("long", "timestamp-micros"), TimestampType()),
    "local-timestamp-millis": (logical("long", "local-timestamp-millis"), TimestampNTZType()),
    "local-timestamp-micros": (logical("long", "local-timestamp-micros"), TimestampNTZType()),
    "decimal-bytes": (logical("bytes", "decimal", precision=38, scale=4), DecimalType(38, 4)),
    "decimal-no-scale": (logical("bytes", "decimal", precision=9), DecimalType(9, 0)),
    "decimal-fixed": (MONEY, DecimalType(12, 2)),
    "decimal-no-precision": (logical("bytes", "decimal"), BinaryType()),
    "uuid": (logical("string", "uuid"), StringType()),
    "unknown-logical": (logical("long", "timestamp-nanos"), LongType()),
    "logical-on-wrong-type": (logical("string", "date"), StringType()),
}


def test_avro_type_becomes_a_spark_type():
    for avro, wanted in TYPES.values():
        with case(avro, wanted):
            assert read_schema(record(("f", avro))).spark == struct(("f", wanted))


def test_named_types_are_used_again_by_name():
    schema = {
        **record(("c", ENUM), ("d", ["null", "Colour"]), ("m", MONEY), ("n", "shop.Money")),
        "namespace": "shop",
    }
    value = {"c": "RED", "d": "GREEN", "m": decimal.Decimal("1.25"), "n": decimal.Decimal("-7.50")}
    assert read_schema(schema).spark == struct(
        ("c", StringType()),
        ("d", StringType()),
        ("m", DecimalType(12, 2)),
        ("n", DecimalType(12, 2)),
    )
    assert decoded(schema, *written(schema, value)) == ([value], [None])


REFUSED = {
    "union": (record(("a", record(("b", ["int", "null", "string"]), name="In"))), "a.b: int, str"),
    "union-in-array": (record(("a", {"type": "array", "items": ["int", "long"]})), "at a: int"),
    "union-of-named": (record(("a", [ENUM, MONEY])), "at a: Colour, Money"),
    "union-at-top": ('["int", "string"]', "at its top"),
    "recursive": (record(("next", ["null", "Order"])), "contains itself: Order at next"),
    "decimal-too-wide": (
        record(("d", logical("bytes", "decimal", precision=39))),
        "39 digits at d",
    ),
    "array-of-null": (record(("n", {"type": "array", "items": "null"})), "type null in .* at n"),
    "map-of-null": (record(("n", {"type": "map", "values": ["null"]})), "type null in .* at n"),
    "record-of-null-in-array": (
        record(("n", {"type": "array", "items": record(("x", "null"), ("y", "int"), name="E")})),
        "type null in .* at n",
    ),
    "array-of-empty": (
        record(("n", {"type": "array", "items": record(name="E")})),
        "empty items at n",
    ),
    "array-of-fixed-0": (
        record(("n", {"type": "array", "items": {"type": "fixed", "name": "F", "size": 0}})),
        "empty items at n",
    ),
    "no-json": ("{", "invalid Avro schema"),
    "no-schema": ("5", "invalid Avro schema"),
    "no-such-type": (record(("a", "nosuch")), "invalid Avro schema: nosuch"),
    "type-in-type": (record(("a", {"type": {"type": "long"}})), "invalid Avro schema"),
}


def test_schema_without_a_spark_type_is_refused_by_name():
    for schema, text in REFUSED.values():
        with case(schema, text), pytest.raises(InvalidRequestError, match=text):
            read_schema(schema)


def test_null_alone_is_read_and_written():
    schema = record(("n", "null"), ("r", record(("m", ["null"]), ("at", "int"), name="In")))
    value = {"n": None, "r": {"m": None, "at": 1}}
    bodies = written(schema, value, value)
    rows = decoder(schema).decode(pa.array(bodies)).field("value")
    rows.validate(full=True)
    assert rows.to_pylist() == [value, value]
    assert encoded(schema, rows) == bodies


ITEM = record(("n", "int"), ("at", logical("long", "timestamp-millis")), name="Item")
EVERYTHING = record(
    ("flag", "boolean"),
    ("small", "int"),
    ("large", "long"),
    ("single", "float"),
    ("real", "double"),
    ("text", "string"),
    ("raw", "bytes"),
    ("four", {"type": "fixed", "name": "Four", "size": 4}),
    ("colour", ENUM),
    ("maybe", ["null", "string"]),
    ("on", logical("int", "date")),
    ("at_ms", logical("long", "timestamp-millis")),
    ("at_us", ["null", logical("long", "timestamp-micros")]),
    ("local_ms", logical("long", "local-timestamp-millis")),
    ("local_us", logical("long", "local-timestamp-micros")),
    ("clock_ms", logical("int", "time-millis")),
    ("clock_us", logical("long", "time-micros")),
    ("price", logical("bytes", "decimal", precision=10, scale=3)),
    ("money", MONEY),
    ("id", logical("string", "uuid")),
    ("items", {"type": "array", "items": ITEM}),
    ("labels", {"type": "map", "values": ["null", "string"]}),
    ("seen", {"type": "map", "values": {"type": "array", "items": logical("int", "date")}}),
    ("inner", ["null", record(("deep", {"type": "map", "values": "long"}), name="Inner")]),
)


def anything(dice):
    """A value of EVERYTHING as fastavro takes it, and as Arrow gives it back."""
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=dice.randrange(-(10**9), 10**10))
    ms = moment + timedelta(milliseconds=dice.randrange(1000))
    us = moment + timedelta(microseconds=dice.randrange(10**6))
    clock = timedelta(microseconds=dice.randrange(86_400 * 10**6))
    at_ms = (clock // timedelta(milliseconds=1)) * timedelta(milliseconds=1)
    text = "".join(dice.choices("aé€😀\0 ", k=dice.randrange(6)))
    number = uuid.UUID(int=dice.getrandbits(128))
    same = {
        "flag": dice.random() < 0.5,
        "small": dice.choice([0, -1, 2**31 - 1, -(2**31)]),
        "large": dice.choice([0, -1, 2**63 - 1, -(2**63), dice.getrandbits(40)]),
        "single": dice.choice([0.5, -1.25, float("inf")]),
        "real": dice.random(),
        "text": text,
        "raw": dice.randbytes(dice.randrange(5)),
        "four": dice.randbytes(4),
        "colour": dice.choice(ENUM["symbols"]),
        "maybe": dice.choice([None, text]),
        "on": moment.date(),
        "at_ms": ms,
        "at_us": dice.choice([None, us]),
        "local_ms": ms.replace(tzinfo=None),
        "local_us": us.replace(tzinfo=None),
        "price": decimal.Decimal(dice.randrange(-(10**10) + 1, 10**10)).scaleb(-3),
        "money": decimal.Decimal(dice.randrange(-(10**12) + 1, 10**12)).scaleb(-2),
        "items": [{"n": n, "at": ms} for n in range(dice.randrange(3))],
    }
    labels = {f"k{n}": dice.choice([None, text]) for n in range(dice.randrange(3))}
    seen = {f"d{n}": [date(2024, 1, 1 + n)] * n for n in range(dice.randrange(3))}
    deep = dice.choice([None, {}, {"a": 1, "b": -1}])
    given = same | {
        "clock_ms": (datetime.min + at_ms).time(),
        "clock_us": (datetime.min + clock).time(),
        "id": number,
        "labels": labels,
        "seen": seen,
        "inner": None if deep is None else {"deep": deep},
    }
    wanted = same | {
        "clock_ms": at_ms // timedelta(milliseconds=1),
        "clock_us": clock // timedelta(microseconds=1),
        "id": str(number),
        "labels": list(labels.items()),
        "seen": list(seen.items()),
        "inner": None if deep is None else {"deep": list(deep.items())},
    }
    order = [field["name"] for field in EVERYTHING["fields"]]
    return {name: given[name] for name in order}, {name: wanted[name] for name in order}


def test_bodies_are_read_and_written_as_the_library_does_it():
    """Goal: the way around logical types changes nothing but the kind of objects.

    Method: random values are written by fastavro with the full schema; our reading of these bytes
    is compared with the values, and our writing of what was read with the bytes.
    """
    for seed in range(5):
        with case(seed):
            print(f"seed {seed}")
            dice = random.Random(seed)
            cases = [anything(dice) for _ in range(60)]
            bodies = written(EVERYTHING, *(given for given, _ in cases))
            reader = decoder(EVERYTHING)
            rows = reader.decode(pa.array(bodies, pa.binary()))
            values = rows.field("value")
            assert rows.field("reason").null_count == len(cases)
            assert values.to_pylist() == [wanted for _, wanted in cases]
            assert encoded(EVERYTHING, values) == bodies


def test_years_that_python_does_not_know_are_kept():
    schema = record(("at", logical("long", "timestamp-micros")), ("on", logical("int", "date")))
    plain = record(("at", "long"), ("on", "int"))
    far = 300_000 * 366 * 86_400 * 10**6 // 2
    body = written(plain, {"at": far, "on": 10**8})[0]
    rows = decoder(schema).decode(pa.array([body]))
    value = rows.field("value")
    assert value.field("at").cast(pa.int64()).to_pylist() == [far]
    assert value.field("on").cast(pa.int32()).to_pylist() == [10**8]
    assert encoded(schema, value) == [body]


def test_null_body_is_null_without_a_reason():
    schema = record(("a", "int"))
    assert decoded(schema, None, b"\x02", None) == ([None, {"a": 1}, None], [None] * 3)


def test_empty_batch_has_the_type():
    reader = decoder(EVERYTHING)
    rows = reader.decode(pa.array([], pa.binary()))
    assert len(rows) == 0
    assert rows.field("value").type == pa.struct(
        [(field.name, field.type) for field in reader._arrow]
    )


WIDE = record(("a", "int"), ("d", logical("bytes", "decimal", precision=4, scale=1)))
DAMAGED = {
    "empty": (record(("a", "int")), b"", "EOFError"),
    "cut": (record(("a", "string")), b"\x08ab", "EOFError: Expected 4 bytes, read 2"),
    "left-over": (record(("a", "int")), b"\x02\x02\x02", "2 of 3 bytes are left over"),
    "not-utf8": (record(("a", "string")), b"\x02\xff", "UnicodeDecodeError"),
    "no-such-symbol": (record(("a", ENUM)), b"\x08", "IndexError"),
    "no-such-branch": (record(("a", ["null", "int"])), b"\x08", "IndexError"),
    "negative-length": (record(("a", "bytes")), b"\x01", "EOFError"),
    "huge-length": (record(("a", "bytes")), b"\xfe" + b"\xff" * 7 + b"\x7fx", "EOFError"),
    "huge-array": (record(("a", {"type": "array", "items": "int"})), b"\xfe\xff\x7f\x02", "EOF"),
    "int-too-wide": (WIDE, b"\x80\x80\x80\x80\x80\x40\x02\x01", "ArrowInvalid"),
    "decimal-too-wide": (WIDE, b"\x02\x06\x7f\x7f\x7f", "ArrowInvalid"),
    "time-too-far": (
        record(("a", logical("long", "timestamp-millis"))),
        b"\xfe" + b"\xff" * 8 + b"\x01",
        "ArrowInvalid",
    ),
}


def test_body_that_does_not_parse_is_null_with_a_reason():
    """Goal: one bad body spoils none of its neighbours, wherever it lies."""
    for schema, body, reason in DAMAGED.values():
        with case(schema, body, reason):
            good = {"a": None, "d": decimal.Decimal("1.5")}
            kind = schema["fields"][0]["type"]
            good["a"] = {"int": 7, "string": "x", "bytes": b"x"}.get(
                kind if isinstance(kind, str) else ""
            )
            if isinstance(kind, dict):
                good["a"] = {"enum": "RED", "array": [1]}.get(
                    kind["type"], datetime(2024, 1, 1, tzinfo=UTC)
                )
            good = {field["name"]: good[field["name"]] for field in schema["fields"]}
            [fine] = written(schema, good)
            for at in (0, 3, 6):
                bodies = [fine] * 7
                bodies[at] = body
                values, reasons = decoded(schema, *bodies)
                assert values == [None if row == at else good for row in range(7)]
                assert [row for row in range(7) if reasons[row] is not None] == [at]
                assert reason in reasons[at]


def test_any_bytes_end_as_a_value_or_a_reason():
    """Goal: no bytes stop a batch. Method: bodies with flipped bytes, and bytes that never were."""
    for seed in range(4):
        with case(seed):
            print(f"seed {seed}")
            dice = random.Random(seed)
            bodies = []
            for body in written(EVERYTHING, *(anything(dice)[0] for _ in range(150))):
                damaged = bytearray(body)
                for _ in range(dice.randrange(1, 4)):
                    damaged[dice.randrange(len(damaged))] = dice.randrange(256)
                bodies += [
                    bytes(damaged),
                    body[: dice.randrange(len(body))],
                    dice.randbytes(40),
                    body,
                ]
            rows = decoder(EVERYTHING).decode(pa.array(bodies, pa.binary()))
            assert len(rows) == len(bodies)
            values, reasons = rows.field("value"), rows.field("reason")
            assert (values.is_null().to_pylist()) == reasons.is_valid().to_pylist()
            assert reasons.take(pa.array(range(3, len(bodies), 4))).null_count == 150
            # What a damaged body says may be anything, but it is something that Arrow can hold.
            values.validate(full=True)


def test_failing_decoder_names_the_message():
    schema = record(("a", "int"))
    reader = decoder(schema, fails=True, context=("topic", "offset"))
    bodies = pa.array([b"\x02", b"\x02\x02"])
    with pytest.raises(CorruptDataError, match="1 of 2 bytes are left over") as failure:
        reader.decode(bodies, pa.array(["/default/a", "/default/b"]), pa.array([4, 5]))
    assert (failure.value.topic, failure.value.offset) == ("/default/b", 5)
    too_wide = decoder(WIDE, fails=True, context=("offset",))
    with pytest.raises(CorruptDataError, match="ArrowInvalid") as failure:
        too_wide.decode(pa.array([DAMAGED["int-too-wide"][1]]), pa.array([9]))
    assert failure.value.offset == 9


def test_framed_body_has_a_header():
    schema = record(("a", "int"))
    rows = pa.array([{"a": 1}, {"a": -1}])
    bodies = encoded(schema, rows, schema_id=258)
    assert bodies == [b"\0\0\0\1\2\x02", b"\0\0\0\1\2\x01"]
    assert decoded(schema, *bodies, framing="confluent")[0] == rows.to_pylist()
    assert decoded(schema, *bodies, framing="confluent", schema_id=258)[0] == rows.to_pylist()
    values, reasons = decoded(schema, *bodies, framing="confluent", schema_id=7)
    assert values == [None, None]
    assert reasons == ["ValueError: its schema id is 258, not 7"] * 2
    for unframed in (b"", b"\0\0\0", b"\1\0\0\1\2\x02"):
        assert "no header" in decoded(schema, unframed, framing="confluent")[1][0]


def test_framing_that_cannot_be_is_refused():
    for framing, schema_id, text in [
        ("avro", None, "unknown framing 'avro'"),
        ("plain", 1, "has no schema_id"),
        ("confluent", -1, "31 bits"),
        ("confluent", 1 << 31, "31 bits"),
    ]:
        with case(framing, schema_id, text), pytest.raises(InvalidRequestError, match=text):
            check_framing(framing, schema_id)


def test_fields_that_are_not_given_get_their_default():
    schema = {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": "a", "type": "int"},
            {"name": "b", "type": "string", "default": "none"},
            {"name": "c", "type": ["null", "int"]},
            {"name": "d", "type": {"type": "map", "values": "int"}, "default": {"k": 1}},
        ],
    }
    form = read_schema(schema)
    assert missing_field(form, ["a"]) is None
    assert missing_field(form, ["b", "c"]) == "a"
    [body] = encoded(schema, pa.array([{"a": 5}]))
    assert decoded(schema, body)[0] == [{"a": 5, "b": "none", "c": None, "d": [("k", 1)]}]


UNWRITABLE = {
    "null": (record(("a", "int")), {"a": None}, "TypeError"),
    "symbol": (record(("a", ENUM)), {"a": "BLUE"}, "ValueError"),
    "fixed": (record(("a", {"type": "fixed", "name": "F", "size": 2})), {"a": b"x"}, "ValueError"),
    "time-of-day": (record(("a", logical("int", "time-millis"))), {"a": 2**40}, "ArrowInvalid"),
}


def test_value_that_its_field_does_not_take_is_refused():
    for schema, row, text in UNWRITABLE.values():
        misfit = f"does not fit the Avro schema: {text}"
        with case(schema, row, text), pytest.raises(InvalidRequestError, match=misfit):
            encoded(schema, pa.array([row]))


def test_type_fits_if_all_of_its_values_do():
    for given, wanted, is_fit in [
        (IntegerType(), LongType(), True),
        (ShortType(), IntegerType(), True),
        (LongType(), IntegerType(), False),
        (FloatType(), DoubleType(), True),
        (DoubleType(), FloatType(), False),
        (IntegerType(), DoubleType(), False),
        (StringType(), IntegerType(), False),
        (NullType(), StringType(), True),
        (TimestampType(), TimestampNTZType(), False),
        (DecimalType(5, 1), DecimalType(6, 2), True),
        (DecimalType(6, 1), DecimalType(6, 2), False),
        (DecimalType(5, 3), DecimalType(9, 2), False),
        (ArrayType(IntegerType()), ArrayType(LongType()), True),
        (ArrayType(StringType()), ArrayType(LongType()), False),
        (MapType(StringType(), IntegerType()), MapType(StringType(), LongType()), True),
        (MapType(LongType(), IntegerType()), MapType(StringType(), LongType()), False),
        (struct(("a", IntegerType())), struct(("a", LongType())), True),
        (struct(("a", IntegerType())), struct(("b", IntegerType())), False),
        (struct(("a", IntegerType())), IntegerType(), False),
    ]:
        with case(given, wanted, is_fit):
            assert fits(given, wanted) is is_fit


def test_codecs_travel_to_tasks():
    reader = pickle.loads(pickle.dumps(decoder(EVERYTHING)))
    given, wanted = anything(random.Random(1))
    values = reader.decode(pa.array(written(EVERYTHING, given))).field("value")
    assert values.to_pylist() == [wanted]
    form = read_schema(EVERYTHING)
    writer = pickle.loads(pickle.dumps(AvroEncoder(form, form.spark.names, schema_id=None)))
    assert writer.encode(values).to_pylist() == written(EVERYTHING, given)
