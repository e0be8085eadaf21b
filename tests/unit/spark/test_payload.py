"""Payloads as columns and back, through a Spark session: batches, streams and Spark Connect."""

import json
import os
import subprocess
import sys
from datetime import UTC, date, datetime
from decimal import Decimal

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - as everywhere
from pyspark.sql.types import LongType, StructField, StructType

from ister.errors import ConfigError, InvalidRequestError
from ister.spark import from_avro_payload, from_json_payload, to_avro_payload, to_json_payload
from tests.support.cases import case

ROWS = (
    "topic string, offset long, publish_time timestamp, producer_name string, payload binary, "
    "attributes map<string,string>, routing_key string, schema_id long, schema_version int"
)
ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "on", "type": {"type": "int", "logicalType": "date"}},
        {
            "name": "price",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        },
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "counts", "type": {"type": "map", "values": "int"}},
        {
            "name": "place",
            "type": {
                "type": "record",
                "name": "Place",
                "fields": [
                    {"name": "city", "type": "string"},
                    {
                        "name": "seen",
                        "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}],
                    },
                ],
            },
        },
    ],
}
ORDER_COLUMNS = (
    "id long, note string, at timestamp, on date, price decimal(9,2), tags array<string>, "
    "counts map<string,int>, place struct<city: string, seen: timestamp>"
)
AT = datetime(2024, 5, 6, 7, 8, 9, 123000)
SEEN = datetime(1969, 12, 31, 23, 59, 59, 999999)
ORDERS = [
    (1, "first", AT, date(2024, 5, 6), Decimal("9.99"), ["a"], {"x": 1}, ("Wien", SEEN)),
    (2, None, AT, date(1, 1, 1), Decimal("-0.01"), [], {}, ("Ulm", None)),
]


def messages(spark, *payloads):
    """Rows as the source gives them, in one partition."""
    at = datetime(2024, 1, 1, tzinfo=UTC)
    rows = [
        ("/default/a", offset, at, "shop", payload, {"k": "v"}, None, None, None)
        for offset, payload in enumerate(payloads)
    ]
    return spark.createDataFrame(rows, ROWS).coalesce(1)


@pytest.fixture(scope="module")
def empty(spark):
    """Rows for what is decided before a row is looked at."""
    return messages(spark)


def values(df, *names):
    return [tuple(row[name] for name in names) for row in df.orderBy("offset").collect()]


# -- JSON -----------------------------------------------------------------------------------------

JSON_BODIES = {
    "object": (b'{"a": 1, "b": "x"}', (1, "x"), None),
    "fields-in-any-order": (b'{"c": 0, "b": "\\u00e9", "a": 2}', (2, "é"), None),
    "nothing-in-it": (b"{}", (None, None), None),
    "null-payload": (None, (None, None), None),
    "no-json": (b"nonsense", (None, None), "nonsense"),
    "cut": (b'{"a": 1, "b', (None, None), '{"a": 1, "b'),
    "one-field-does-not-fit": (b'{"a": "?", "b": "x"}', (None, "x"), '{"a": "?", "b": "x"}'),
    "number-too-wide": (b'{"a": 99999999999}', (None, None), '{"a": 99999999999}'),
    "array": (b'[{"a": 1}]', (None, None), '[{"a": 1}]'),
    "json-null": (b"null", (None, None), "null"),
    "empty": (b"", (None, None), ""),
    "blank": (b"  ", (None, None), "  "),
    "not-utf8": (b'{"a": 1, "b": "\xff"}', (None, None), '{"a": 1, "b": "�"}'),
}


def test_json_becomes_columns_and_what_does_not_parse_is_told(spark):
    """Goal: each body gives the same values in every form, and its text where it does not parse."""
    df = messages(spark, *(body for body, _, _ in JSON_BODIES.values()))
    wanted = [fields for _, fields, _ in JSON_BODIES.values()]
    bad = [raw for _, _, raw in JSON_BODIES.values()]

    flat = from_json_payload(df, "a int, b string")
    assert flat.columns == [*df.columns[:4], "a", "b", *df.columns[5:]]
    assert values(flat, "a", "b") == wanted
    told = from_json_payload(df, "a int, b string", errors="bad")
    assert told.columns == [*df.columns[:4], "a", "b", "bad", *df.columns[5:]]
    assert values(told, "a", "b", "bad") == [
        (*fields, raw) for fields, raw in zip(wanted, bad, strict=True)
    ]
    nested = from_json_payload(df, "a int, b string", into="data", errors="bad")
    assert nested.columns == [*df.columns[:4], "data", "bad", *df.columns[5:]]
    assert nested.schema["data"].dataType.simpleString() == "struct<a:int,b:string>"
    assert values(nested.select("offset", "data.*", "bad"), "a", "b", "bad") == values(
        told, "a", "b", "bad"
    )


@pytest.mark.nightly
def test_json_that_does_not_parse_fails_the_query_that_asks_for_it(spark):
    for body in [b'{"a": "?"}', b"", b"\xff"]:
        with case(body):
            df = from_json_payload(messages(spark, b'{"a": 1}', body), "a int", fails=True)
            with pytest.raises(PySparkException, match=r"not JSON .* topic /default/a, offset 1: "):
                df.select("a").collect()


def test_json_options_reach_spark(spark):
    df = messages(spark, b'{"at": "06.05.2024"}')
    read = from_json_payload(df, "at date", options={"dateFormat": "dd.MM.yyyy"})
    assert values(read, "at") == [(date(2024, 5, 6),)]


def test_json_is_parsed_once_a_row(empty, capsys):
    from_json_payload(empty, "a int, b string, c string", errors="bad").explain()
    assert capsys.readouterr().out.count("from_json(") == 1


def test_json_payload_may_be_text_and_names_may_be_odd(spark):
    df = spark.createDataFrame(
        [(0, '{"a.b": 1, "c`d": 2}', "z")], "offset int, payload string, `x.y` string"
    )
    schema = StructType([StructField("a.b", LongType()), StructField("c`d", LongType())])
    read = from_json_payload(df, schema, errors="bad row")
    assert read.columns == ["offset", "a.b", "c`d", "bad row", "x.y"]
    assert tuple(read.collect()[0]) == (0, 1, 2, None, "z")
    packed = to_json_payload(read.drop("bad row"))
    assert json.loads(packed.collect()[0].payload) == {"a.b": 1, "c`d": 2, "x.y": "z"}


REFUSED = {
    "taken-name": ({"schema": "a int, offset long"}, "two columns 'offset'; into= takes"),
    "taken-in-other-case": ({"schema": "Topic string"}, "two columns 'Topic'; into= takes"),
    "payload-itself": ({"schema": "payload string"}, "two columns 'payload'; into= takes"),
    "twice-but-for-case": (
        {"schema": StructType([StructField(n, LongType()) for n in "aA"])},
        "columns 'A'",
    ),
    "into-taken": (
        {"schema": "a int", "into": "topic"},
        "two columns 'topic'; choose another into",
    ),
    "errors-taken": ({"schema": "a int", "errors": "A"}, "two columns 'A'; choose another errors"),
    "errors-is-into": (
        {"schema": "a int", "into": "d", "errors": "d"},
        "two columns 'd'; choose another errors",
    ),
    "errors-and-fails": ({"schema": "a int", "errors": "bad", "fails": True}, "cannot be combined"),
    "no-struct": ({"schema": "array<int>"}, "is a struct"),
    "no-fields": ({"schema": StructType()}, "is a struct"),
    "our-option": ({"schema": "a int", "options": {"Mode": "FAILFAST"}}, "option Mode is set"),
}


def test_json_call_that_cannot_be_is_refused(empty):
    for call, text in REFUSED.values():
        with case(call, text), pytest.raises(InvalidRequestError, match=text):
            from_json_payload(empty, **call)


def test_rows_without_a_fit_payload_are_refused(empty):
    for read in (
        lambda df: from_json_payload(df, "a int"),
        lambda df: from_avro_payload(df, ORDER),
    ):
        with pytest.raises(InvalidRequestError, match="no column payload; the option columns"):
            read(empty.drop("payload"))
        with pytest.raises(InvalidRequestError, match="payload is int, not"):
            read(empty.withColumn("payload", F.lit(1)))


@pytest.mark.nightly
def test_columns_are_packed_as_json_beside_what_a_message_has(spark):
    df = spark.createDataFrame(
        [("k1", "/default/b", 1, None, "x"), ("k2", "/default/b", 2, 0.5, "y")],
        "routing_key string, topic string, id long, share double, note string",
    ).coalesce(1)
    packed = to_json_payload(df)
    assert packed.schema.simpleString() == "struct<topic:string,payload:binary,routing_key:string>"
    assert [tuple(row) for row in packed.collect()] == [
        ("/default/b", b'{"id":1,"note":"x"}', "k1"),
        ("/default/b", b'{"id":2,"share":0.5,"note":"y"}', "k2"),
    ]
    some = to_json_payload(
        df, "share", F.upper("topic").alias("where"), options={"ignoreNullFields": "false"}
    )
    assert some.columns == packed.columns
    assert some.first().payload == b'{"share":null,"where":"/DEFAULT/B"}'


def test_json_comes_back_as_it_went(spark):
    df = spark.createDataFrame(
        [(0, *ORDERS[0]), (1, *ORDERS[1])], f"offset long, {ORDER_COLUMNS}"
    ).coalesce(1)
    again = from_json_payload(to_json_payload(df), ORDER_COLUMNS)
    assert again.columns == df.columns
    assert again.orderBy("offset").collect() == df.orderBy("offset").collect()


def test_json_times_keep_what_spark_knows_unless_told_otherwise(spark):
    df = spark.range(1).select(
        F.lit(SEEN).alias("at"), F.lit(SEEN).cast("timestamp_ntz").alias("local")
    )
    [row] = to_json_payload(df).collect()
    assert json.loads(row.payload) == {
        "at": "1969-12-31T23:59:59.999999Z",
        "local": "1969-12-31T23:59:59.999999",
    }
    [row] = to_json_payload(df, "at", options={"timestampformat": "yyyy"}).collect()
    assert row.payload == b'{"at":"1969"}'


def test_json_times_without_a_zone_are_in_utc_whatever_the_session_is_in(spark):
    df = messages(spark, b'{"at": "2026-03-01T10:00:00"}', b'{"at": "2026-03-01T11:00:00+01:00"}')
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        for more, wanted in [
            ({}, [10, 10]),
            ({"errors": "bad"}, [10, 10]),
            ({"options": {"timezone": "Asia/Tokyo"}}, [1, 10]),
        ]:
            found = from_json_payload(df, "at timestamp", **more)
            seconds = found.select("offset", F.col("at").cast("long").alias("at"))
            assert [at % 86_400 // 3600 for (at,) in values(seconds, "at")] == wanted
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_nothing_to_pack_is_refused(empty):
    with pytest.raises(InvalidRequestError, match="no column to pack"):
        to_json_payload(empty)
    with pytest.raises(InvalidRequestError, match="no column to pack"):
        to_avro_payload(empty, ORDER)


# -- Avro -----------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_avro_comes_back_as_it_went(spark):
    df = spark.createDataFrame(
        [(0, "/default/a", *ORDERS[0]), (1, "/default/a", *ORDERS[1])],
        f"offset long, topic string, {ORDER_COLUMNS}",
    ).coalesce(1)
    packed = to_avro_payload(df, json.dumps(ORDER))
    assert packed.schema.simpleString() == "struct<topic:string,offset:bigint,payload:binary>"
    again = from_avro_payload(packed, ORDER)
    assert (
        again.schema.simpleString()
        == df.select("topic", *df.columns[:1], *df.columns[2:]).schema.simpleString()
    )
    names = df.columns[2:]
    assert values(again, *names) == ORDERS
    framed = to_avro_payload(df, ORDER, framing="confluent", schema_id=9)
    nested = from_avro_payload(
        framed, ORDER, into="order", errors="bad", framing="confluent", schema_id=9
    )
    assert nested.columns == ["topic", "offset", "order", "bad"]
    assert [(tuple(order), bad) for order, bad in values(nested, "order", "bad")] == [
        (row, None) for row in ORDERS
    ]


@pytest.mark.nightly
def test_avro_that_does_not_parse_is_told_or_fails(spark):
    schema = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]}
    df = messages(spark, b"\x02", b"", b"\x02\x02", None)
    told = from_avro_payload(df, schema, errors="bad")
    assert told.columns == [*df.columns[:4], "a", "bad", *df.columns[5:]]
    assert values(from_avro_payload(df, schema), "a") == [(1,), (None,), (None,), (None,)]
    assert [bad for (bad,) in values(told, "bad")] == [
        None,
        "EOFError: ",
        "ValueError: 1 of 2 bytes are left over",
        None,
    ]
    failing = from_avro_payload(df, schema, fails=True)
    assert failing.count() == 4
    with pytest.raises(PySparkException, match=r"EOFError:  \(topic=/default/a, offset=1\)"):
        failing.collect()


@pytest.mark.nightly
def test_avro_value_that_is_no_record_is_one_column(spark):
    df = messages(spark, b"\x04hi")
    assert values(from_avro_payload(df, '"string"', into="text"), "text") == [("hi",)]
    with pytest.raises(InvalidRequestError, match="not a record"):
        from_avro_payload(df, '"string"')
    with pytest.raises(InvalidRequestError, match="packed into a record"):
        to_avro_payload(df.withColumn("text", F.lit("")), '"string"')
    with pytest.raises(InvalidRequestError, match="packed into a record"):
        to_avro_payload(df.withColumn("id", F.lit(1)), json.dumps(["null", ORDER]))


AVRO_REFUSED = {
    "taken-name": ({"schema": {**ORDER, "fields": [{"name": "topic", "type": "int"}]}}, "into="),
    "union": (
        {"schema": {**ORDER, "fields": [{"name": "u", "type": ["int", "string"]}]}},
        "union of several types at u",
    ),
    "framing": ({"schema": ORDER, "framing": "json"}, "unknown framing 'json'"),
    "id-without-header": ({"schema": ORDER, "schema_id": 3}, "a plain body has no schema_id"),
    "errors-and-fails": ({"schema": ORDER, "errors": "bad", "fails": True}, "cannot be combined"),
}


def test_avro_read_that_cannot_be_is_refused(empty):
    for call, text in AVRO_REFUSED.values():
        with case(call, text), pytest.raises(InvalidRequestError, match=text):
            from_avro_payload(empty, **call)


def test_avro_write_that_cannot_be_is_refused(spark):
    df = spark.createDataFrame([], f"offset long, {ORDER_COLUMNS}")
    named = {**ORDER, "fields": [*ORDER["fields"], {"name": "offset", "type": "long"}]}
    cases = [
        (df.drop("price"), ORDER, (), {}, "'price' has no column, no default"),
        (df.withColumn("more", F.lit(1)), ORDER, (), {}, "no field 'more'; name the columns"),
        (df, ORDER, ("id", "nosuch"), {}, "no column 'nosuch'"),
        (df.withColumn("id", F.lit("1")), ORDER, (), {}, "id is string, and .* bigint; cast"),
        (df, named, (), {}, "'offset' has no column.* is packed if it is named"),
        (df, ORDER, (), {"framing": "confluent"}, "needs a schema_id"),
    ]
    for rows, schema, columns, settings, text in cases:
        with pytest.raises(InvalidRequestError, match=text):
            to_avro_payload(rows, schema, *columns, **settings)
    assert to_avro_payload(df, named, *df.columns).columns == ["offset", "payload"]


def test_avro_without_its_library_says_what_to_install(empty, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastavro", None)
    with pytest.raises(ConfigError, match=r"pip install 'ister\[avro\]'"):
        from_avro_payload(empty, ORDER)


# -- streams and Connect --------------------------------------------------------------------------


_REMOTE = """
from pyspark.sql import SparkSession
from ister.spark import from_avro_payload, from_json_payload, to_avro_payload, to_json_payload

spark = SparkSession.builder.remote("local[1]").getOrCreate()
assert type(spark).__module__.startswith("pyspark.sql.connect")
df = spark.createDataFrame(
    [(0, bytearray(b'{"id": 1}')), (1, bytearray(b"?"))], "offset long, payload binary"
)
schema = '{"type": "record", "name": "R", "fields": [{"name": "id", "type": ["null", "long"]}]}'
told = from_json_payload(df, "id long", errors="bad")
assert [tuple(row) for row in told.collect()] == [(0, 1, None), (1, None, "?")]
read = from_json_payload(df, "id long")
read = from_avro_payload(to_avro_payload(read, schema), schema, into="r", errors="bad")
packed = to_json_payload(read.drop("bad")).collect()
assert [bytes(row.payload) for row in packed] == [b'{"r":{"id":1}}', b'{"r":{}}'], packed
spark.stop()
print("done")
"""


@pytest.mark.nightly
def test_payloads_over_spark_connect(tmp_path):
    """Goal: nothing needs the JVM of a classic session. A process has one of the two kinds."""
    java = f"-Djava.io.tmpdir={tmp_path} -XX:-UsePerfData -XX:TieredStopAtLevel=1"
    environment = {
        **os.environ,
        "JDK_JAVA_OPTIONS": java,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_DIRS": str(tmp_path),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_TESTING": "1",  # a free port, not the well-known one
    }
    done = subprocess.run(
        [sys.executable, "-c", _REMOTE],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.strip().endswith("done"), done.stderr[-3000:]
