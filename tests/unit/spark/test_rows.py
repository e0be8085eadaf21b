"""Schemas of reads and writes: which columns are refused, and what the error tells to do."""

import pytest
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from ister.errors import InvalidRequestError
from ister.spark.options import ReadOptions
from ister.spark.rows import check_read_schema, check_write_schema
from tests.support.cases import each

INT, LONG, TEXT, BYTES = IntegerType(), LongType(), StringType(), BinaryType()


def columns(named):
    return StructType([StructField(name, kind) for name, kind in named])


@each(
    "named, texts",
    [
        ([("offset", INT)], ["the column offset is bigint, not int"]),
        ([("offset", LONG), ("value", BYTES)], ["there is no column 'value'", "payload"]),
        ([("payload", INT)], ["the column payload is binary, not int", "cast"]),
        ([("offset", LONG)] * 2, ["names each of its columns once"]),
    ],
)
def test_schema_of_other_columns_than_a_message_has_is_refused(named, texts):
    options = ReadOptions.parse({"topic": "/default/a", "config": "-"}, is_streaming=False)
    with pytest.raises(InvalidRequestError) as caught:
        check_read_schema(columns(named), options)
    assert [one for one in texts if one not in str(caught.value)] == []


@each(
    "named, texts",
    [
        ([("other", TEXT)], ["a message has no column 'other'", "to_json(struct(...))"]),
        ([("routing_key", TEXT)], ["the rows have no column payload"]),
        ([("value", TEXT)], ["no column 'value'", '.withColumnRenamed("value", "payload")']),
        ([("payload", LONG)], ["the column payload is bigint", "cast it to binary or string"]),
        ([("payload", TEXT), ("publish_time", LONG)], ["publish_time is bigint", "timestamp"]),
        (
            [("payload", TEXT), ("attributes", MapType(TEXT, INT))],
            ["the column attributes is map<string,int>", "map<string,string>"],
        ),
        ([("payload", TEXT)], ["no column topic", "the option topic is not set"]),
    ],
)
def test_rows_that_are_no_messages_are_refused(named, texts):
    with pytest.raises(InvalidRequestError) as caught:
        check_write_schema(columns(named), needs_topic=True)
    assert [one for one in texts if one not in str(caught.value)] == []
