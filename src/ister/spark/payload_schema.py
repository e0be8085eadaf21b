"""The type of a JSON payload: from DDL, a JSON Schema, or the schema registry.

    payloadSchema = 'id BIGINT, note STRING'   DDL
                    '{"type": "object", …}'    a JSON Schema, or a Spark schema in JSON
                    registry                   the newest version of the topic's schema

Owns: how the option `payloadSchema` becomes a type. Does not own: the registry's records
(`ister.topic.schema_records`); DDL, which Spark parses (a data source runs in a Python process
without a session, and has no parser); how payloads are parsed (`row_shape`).
Runs on the driver. Only `registry` does I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ister.base.partitions import base_of_partition
from ister.base.retry import retry_unavailable
from ister.errors import InvalidRequestError, NotFoundError
from ister.spark.location import LogLocation, find_place
from ister.spark.offset_resolver import OffsetResolver
from ister.spark.options import PayloadFormat, ReadOptions
from ister.spark.row_shape import parser_of
from ister.spark.tables.json_schema import Form, Member, ValueType, columns_of
from ister.topic.schema_kinds import SchemaType
from ister.topic.schema_records import read_topic_schema

_REGISTRY: Final = "registry"
_TYPES: Final[dict[Form, DataType]] = {
    "string": StringType(),
    "integer": LongType(),
    "number": DoubleType(),
    "boolean": BooleanType(),
    "time": TimestampType(),
    "date": DateType(),
    "json": StringType(),
}


def payload_type(options: ReadOptions) -> DataType | str | None:
    """Returns the type of the column `payload`; a text is DDL for Spark, None stands for binary.

    Raises:
        InvalidRequestError: `payloadSchema` is missing, or is not the schema of an object.
        NotFoundError: With `registry`: a topic does not exist, or has no schema.
        UnavailableError: With `registry`: the metadata store does not respond.
    """
    if options.payload_format is PayloadFormat.TEXT:
        return StringType()
    if options.payload_format is not PayloadFormat.JSON:
        return None
    text = options.payload_schema
    if text is None:
        raise InvalidRequestError(
            "payloadFormat is json, and payloadSchema is not set",
            hint="set it to DDL such as 'id BIGINT, note STRING', a JSON Schema, or registry",
        )
    if text.lower() == _REGISTRY:
        place = find_place(options.config, options.brokers)
        return retry_unavailable(lambda: _registered_type(place, options))
    if text.startswith("{"):
        found = _json_type(text)
        parser_of(found)  # raises for what no payload has
        return found
    return text if re.match(r"struct\s*<", text, re.IGNORECASE) else f"STRUCT<{text}>"


def _find_json_schema(place: LogLocation, topic: str) -> dict[str, object]:
    """Returns the newest version of a topic's registered schema, a JSON Schema."""
    history = place.history()
    prefix = history.config.storage.metadata.root_prefix
    found = read_topic_schema(history.metadata, prefix, topic)
    if found is None:
        raise NotFoundError(
            "the topic has no registered schema",
            topic=topic,
            hint="set payloadSchema to DDL, or to a JSON Schema",
        )
    if found.schema_type is not SchemaType.JSON_SCHEMA:
        raise InvalidRequestError(
            f"the topic's schema {found.subject!r} is {found.schema_type}, not a JSON Schema",
            topic=topic,
            hint="for Avro, use from_avro_payload(df, schema)",
        )
    return _json_object(found.definition, "the registered schema", topic)


def _registered_type(place: LogLocation, options: ReadOptions) -> StructType:
    names = OffsetResolver(place, options).names(must_exist=True)
    topics = sorted({base_of_partition(name) or name for name in names})
    found = {topic: struct_of(_find_json_schema(place, topic)) for topic in topics}
    first = topics[0]
    for topic in topics:
        if found[topic] != found[first]:
            raise InvalidRequestError(
                f"{first} and {topic} have different schemas",
                hint="read them one by one, or set payloadSchema to a schema for both",
            )
    return found[first]


def _json_object(text: str | bytes, what: str, topic: str | None = None) -> dict[str, object]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{what} is not JSON: {error}", topic=topic) from error
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{what} is not a JSON object", topic=topic)
    return schema


def _json_type(text: str) -> StructType:
    schema = _json_object(text, "payloadSchema")
    if schema.get("type") != "struct":
        return struct_of(schema)
    try:
        return StructType.fromJson(schema)
    # PySpark does not validate: any exception may be raised.
    except Exception as error:
        raise InvalidRequestError(f"payloadSchema is not a Spark schema: {error!r}") from error


def struct_of(schema: Mapping[str, object]) -> StructType:
    """Returns the Spark type of a JSON Schema's objects."""
    try:
        return _struct(columns_of(schema, taken=frozenset()))
    except RecursionError as error:
        raise InvalidRequestError("the schema is nested too deeply") from error


def _struct(members: tuple[Member, ...]) -> StructType:
    return StructType(
        [StructField(member.property, _spark_type(member.kind)) for member in members]
    )


def _spark_type(kind: ValueType) -> DataType:
    if kind.form == "array" and kind.item is not None:
        return ArrayType(_spark_type(kind.item))
    return _struct(kind.members) if kind.form == "object" else _TYPES[kind.form]
