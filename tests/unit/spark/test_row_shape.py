"""Payloads as text and JSON, and headers: what a read makes of a message's columns, in tasks."""

import json
import pickle
from datetime import UTC, date, datetime
from decimal import Decimal

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ister.base.clock import SystemClock
from ister.broker.schemas.registry import SchemaRegistry
from ister.config import load_config
from ister.errors import InvalidRequestError, IsterError, NotFoundError, UnsupportedOperationError
from ister.spark.compat import arrow_schema_of
from ister.spark.rows import HEADERS_TYPE, row_schema
from ister.spark.source import IsterDataSource
from ister.topic.schema_kinds import ValidationPolicy
from ister.topic.stores import open_metadata
from tests.support.cases import case
from tests.support.streams import A, B

pytestmark = pytest.mark.usefixtures("quick")

ORDER = StructType([StructField("id", LongType()), StructField("note", StringType())])


def publish(home, *payloads, name=A, **fields):
    with home.open() as log:
        topic = log.topic(name, create=True)
        for payload in payloads:
            topic.append(payload, **fields)
        topic.flush()
        topic.upload()


def source(home, **options):
    return IsterDataSource({"config": home.config, "topic": A, **options})


def read(home, schema=None, **options):
    """Rows of a batch, read by a reader that was pickled, as dicts; checks the Arrow schema."""
    found = source(home, **options)
    schema = found.schema() if schema is None else schema
    reader = found.reader(schema)
    tasks = pickle.loads(pickle.dumps(reader))
    rows = []
    for part in reader.partitions():
        for batch in tasks.read(part):
            assert batch.schema == arrow_schema_of(schema)
            batch.validate(full=True)
            rows += batch.to_pylist()
    return rows


def spark_schema(kind, name="a"):
    field = f'{{"name":"{name}","type":{kind},"nullable":true,"metadata":{{}}}}'
    return f'{{"type":"struct","fields":[{field}]}}'


ITEM = '{"type":"array","containsNull":true,"elementType":'
DEEP = f'{ITEM * 400}"long"{"}" * 400}'


def with_payload(kind, *more):
    return StructType([StructField("payload", kind), *more])


# -- text ---------------------------------------------------------------------------------------


def test_payload_as_text(home):
    publish(home, b"one", "zwölf".encode(), b"")
    assert [row["payload"] for row in read(home, payloadFormat="text")] == ["one", "zwölf", ""]
    assert read(home, with_payload(StringType())) == [
        {"payload": text} for text in ["one", "zwölf", ""]
    ], "a string in the schema says it, too"


def test_payload_that_is_not_utf8_is_null_with_a_reason(home):
    publish(home, b"one", b"a\xff", b"two")
    found = read(home, payloadFormat="text", payloadErrors="column", columns="offset, payload")
    assert [(row["offset"], row["payload"], row["payload_error"]) for row in found] == [
        (0, "one", None),
        (1, None, "not UTF-8: byte 1"),
        (2, "two", None),
    ]
    with pytest.raises(InvalidRequestError, match=r"invalid payload: not UTF-8: byte 1") as error:
        read(home, payloadFormat="text", payloadErrors="fail", columns="payload")
    assert (error.value.topic, error.value.offset) == (A, 1)


# -- JSON ---------------------------------------------------------------------------------------


def test_payload_as_a_struct(home):
    publish(home, b'{"id": 1, "note": "x"}', b'{"note": null}', b'{"id": 3, "other": [1]}')
    expected = [{"id": 1, "note": "x"}, {"id": None, "note": None}, {"id": 3, "note": None}]
    assert [row["payload"] for row in read(home, with_payload(ORDER))] == expected
    schema = json.dumps({"type": "object", "properties": {"id": {"type": "integer"}}})
    found = read(home, payloadSchema=schema, columns="payload")
    assert [row["payload"] for row in found] == [{"id": 1}, {"id": None}, {"id": 3}]
    found = read(home, payloadFormat="json", payloadSchema=ORDER.json(), columns="payload")
    assert [row["payload"] for row in found] == expected


def test_payload_by_ddl_is_left_to_spark(home):
    """That Spark parses it is seen in test_spark_sql: `test_typed_payloads_in_...`."""
    for text in ("id BIGINT", "STRUCT<id: BIGINT>"):
        kind = text if text.startswith("STRUCT") else f"STRUCT<{text}>"
        found = source(home, payloadSchema=text, columns="offset, payload, headers")
        assert found.schema() == (
            f"offset bigint, payload {kind}, headers array<struct<key:string,value:binary>>"
        )
        assert source(home, payloadSchema=text, columns="offset").schema() == "offset bigint"


def test_every_type_that_json_is_read_as(home):
    kind = StructType(
        [
            StructField("whole", IntegerType()),
            StructField("amount", DecimalType(10, 2)),
            StructField("ratio", DoubleType()),
            StructField("at", TimestampType()),
            StructField("day", DateType()),
            StructField("tags", ArrayType(StringType())),
            StructField("lines", ArrayType(StructType([StructField("sku", StringType())]))),
            StructField("anything", StringType()),
        ]
    )
    value = {
        "whole": 5,
        "amount": 12.25,
        "ratio": 1,
        "at": "2026-01-01T00:00:00Z",
        "day": "2026-01-02",
        "tags": ["a", None],
        "lines": [{"sku": "s"}, None],
    }
    typed = {
        "whole": 5,
        "amount": Decimal("12.25"),
        "ratio": 1.0,
        "at": datetime(2026, 1, 1, tzinfo=UTC),
        "day": date(2026, 1, 2),
        "tags": ["a", None],
        "lines": [{"sku": "s"}, None],
    }
    texts = [("text", "text"), (5, "5"), ({"a": [1.5]}, '{"a":[1.5]}'), (True, "true")]
    publish(home, *(json.dumps(value | {"anything": given}).encode() for given, _ in texts))
    found = read(home, with_payload(kind))
    assert [row["payload"] for row in found] == [typed | {"anything": text} for _, text in texts]


def test_decimals_are_exact_in_both_ways_of_parsing(home):
    kind = StructType([StructField("amount", DecimalType(20, 2)), StructField("n", LongType())])
    exact = Decimal("123456789012345678.12")
    # `1.0` as an integer is what pyarrow does not take: the whole batch is parsed row by row.
    for more in (b'{"n": 1}', b'{"n": 1.0}'):
        with case(more):
            name = B if b"." in more else A
            publish(home, b'{"amount": 123456789012345678.12}', more, name=name)
            found = read(home, with_payload(kind), topic=name)
            assert found[0]["payload"] == {"amount": exact, "n": None}
            assert found[1]["payload"] == {"amount": None, "n": 1}
    publish(home, b'{"amount": 0.125}', name="/default/c")
    error = StructField("payload_error", StringType())
    (row,) = read(home, with_payload(kind, error), topic="/default/c")
    assert row == {
        "payload": None,
        "payload_error": "does not fit into decimal128(20, 2): 0.125 at `$.amount`",
    }


def test_payload_that_does_not_fit_keeps_its_row(home):
    publish(home, b'{"id": 1}', b"no json", b'{"id": "x"}', b"", b'{"id": 2}', b"[1]")
    schema = json.dumps({"properties": {"id": {"type": "integer"}}})
    found = read(home, payloadSchema=schema, payloadErrors="column", columns="offset, payload")
    assert [(row["offset"], row["payload"], row["payload_error"]) for row in found] == [
        (0, {"id": 1}, None),
        (1, None, "not JSON: invalid character (byte 4)"),
        (2, None, "not of the schema: Expected `int | float | null`, got `str` - at `$.id`"),
        (3, None, None),  # a tombstone is no error
        (4, {"id": 2}, None),
        (5, None, "not of the schema: Expected `object`, got `array`"),
    ]
    plain = read(home, payloadSchema=schema, columns="payload")
    assert [row["payload"] for row in plain] == [row["payload"] for row in found]
    with pytest.raises(InvalidRequestError, match="not JSON: invalid character") as error:
        read(home, payloadSchema=schema, payloadErrors="fail", columns="payload")
    assert (error.value.topic, error.value.offset) == (A, 1)


def test_schemas_that_json_is_not_read_as_are_refused(home):
    publish(home, b"{}")
    for kind, text in [
        (StructType([]), "has no fields"),
        (StructType([StructField("m", MapType(StringType(), StringType()))]), "the field m"),
        (StructType([StructField("a", ArrayType(BinaryType()))]), r"the field a\[\]"),
        (StructType([StructField("i", LongType(), nullable=False)]), "omit NOT NULL"),
        (StructType([StructField("i", LongType())] * 2), "the field i of the payload occurs twice"),
    ]:
        with case(kind, text), pytest.raises(InvalidRequestError, match=text):
            read(home, with_payload(kind))
    for options, text in [
        ({"payloadFormat": "json"}, "payloadSchema is not set"),
        ({"payloadSchema": "{"}, "payloadSchema is not JSON"),
        ({"payloadSchema": '{"a":' * 5000}, "not JSON"),
        ({"payloadSchema": '{"type": "string"}'}, "has no properties"),
        ({"payloadSchema": '{"type": "struct", "fields": [{}]}'}, "not a Spark schema"),
        ({"payloadSchema": '{"type": "struct", "fields": [3]}'}, "not a Spark schema"),
        ({"payloadSchema": '{"type": "struct", "fields": null}'}, "not a Spark schema"),
        ({"payloadSchema": spark_schema('"decimal(99,2)"')}, "no payload has the given type"),
        ({"payloadSchema": spark_schema('"long"', name="\\ud800")}, "no payload has the given"),
        ({"payloadSchema": spark_schema(DEEP)}, "no payload has the given type"),
        ({"payloadSchema": '{"properties": {"\\ud800": {}}}'}, "no payload has the given type"),
    ]:
        with case(options, text), pytest.raises(InvalidRequestError, match=text):
            source(home, **options).schema()


def test_schema_and_options_must_agree(home):
    publish(home, b"{}")
    error = StructField("payload_error", StringType())
    for schema, options, text in [
        (with_payload(StringType()), {"payloadFormat": "json"}, "payloadFormat is json"),
        (with_payload(ORDER), {"payloadFormat": "binary"}, "payloadFormat is binary"),
        (with_payload(LongType()), {}, "the column payload is binary, not bigint"),
        (with_payload(BinaryType(), error), {}, "payload_error is for a payload that is text"),
        (StructType([error]), {}, "payload_error is for a payload that is text"),
        (with_payload(StringType(), error), {"payloadErrors": "fail"}, "payload_error is for"),
        (StructType([StructField("payload", ORDER, nullable=False)]), {}, "omit NOT NULL"),
        (row_schema(["offset"]), {"columns": "payload"}, "name different columns"),
    ]:
        with case(schema, options, text), pytest.raises(InvalidRequestError, match=text):
            read(home, schema, **options)


# -- the registry -------------------------------------------------------------------------------


def register(home, topic, definition, kind="json_schema"):
    config = load_config(home.config)
    store = open_metadata(config.storage.metadata, SystemClock())
    try:
        registry = SchemaRegistry(
            store, root_prefix=config.storage.metadata.root_prefix, clock=SystemClock()
        )
        subject = f"_{topic}-value"
        registry.register(subject, kind, json.dumps(definition).encode())
        registry.configure_topic(topic, subject, ValidationPolicy.WARN, checks_payload=False)
        registry.close()
    finally:
        store.close()


def test_schema_of_the_registry_is_the_newest_version(home):
    publish(home, b'{"id": 1, "at": "2026-01-01T00:00:00Z", "more": {"a": 1}}')
    first = {"type": "object", "properties": {"id": {"type": "integer"}}}
    second = {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "at": {"type": "string", "format": "date-time"},
            "more": {},
        },
    }
    register(home, A, first)
    assert read(home, payloadSchema="registry", columns="payload") == [{"payload": {"id": 1}}]
    register(home, A, second)
    assert read(home, payloadFormat="json", payloadSchema="registry", columns="payload") == [
        {"payload": {"id": 1, "at": datetime(2026, 1, 1, tzinfo=UTC), "more": '{"a":1}'}}
    ]


def test_partitions_have_the_schema_of_their_topic(home):
    publish(home, b'{"id": 1}', name="/default/p-part-0")
    publish(home, b'{"id": 2}', name="/default/p-part-1")
    register(home, "/default/p", {"type": "object", "properties": {"id": {"type": "integer"}}})
    found = read(home, topic="/default/p", payloadSchema="registry", columns="payload")
    assert sorted(row["payload"]["id"] for row in found) == [1, 2]


def test_topics_without_one_schema_are_refused(home):
    publish(home, b"{}")
    publish(home, b"{}", name=B)
    with pytest.raises(NotFoundError, match="has no registered schema"):
        source(home, payloadSchema="registry").schema()
    register(home, A, {"type": "object", "properties": {"id": {"type": "integer"}}})
    register(home, B, {"type": "object", "properties": {"id": {"type": "string"}}})
    with pytest.raises(InvalidRequestError, match="have different schemas"):
        source(home, topic=f"{A},{B}", payloadSchema="registry").schema()
    register(home, "/default/c", {"type": "record", "name": "r", "fields": []}, kind="avro")
    publish(home, b"{}", name="/default/c")
    with pytest.raises(InvalidRequestError, match="is avro, not a JSON Schema"):
        source(home, topic="/default/c", payloadSchema="registry").schema()


# -- headers ------------------------------------------------------------------------------------


def test_attributes_as_headers(home):
    publish(home, b"1", attributes={"a": "1", "b": "zwölf"})
    publish(home, b"2")
    found = read(home, includeHeaders="true", columns="offset")
    assert found == [
        {
            "offset": 0,
            "headers": [{"key": "a", "value": b"1"}, {"key": "b", "value": "zwölf".encode()}],
        },
        {"offset": 1, "headers": None},
    ]
    schema = StructType([StructField("headers", HEADERS_TYPE)])
    assert read(home, schema) == [{"headers": row["headers"]} for row in found]
    assert read(home, includeHeaders="true")[1]["attributes"] == []


# -- tables -------------------------------------------------------------------------------------


def test_table_with_options_explains_itself(home):
    created = {"owner": "me", "provider": "ister"}
    assert IsterDataSource(created).schema() == row_schema(None)
    with pytest.raises(
        UnsupportedOperationError, match=r": topic; .*without OPTIONS.*WITH \(config"
    ):
        IsterDataSource(created | {"topic": A, "option.topic": A}).schema()
    with pytest.raises(IsterError, match=r"no option is given.*SELECT \* FROM t WITH"):
        IsterDataSource({}).reader(row_schema(None))
