"""The rows of `format("ister")` as Spark types, and what a user's schema may be.

Owns: the columns of reads and writes, and their types. Does not own: how frames become columns
(`ister.format.arrow`), how payloads become text or structs (`row_shape`).

Spark prunes no columns of a Python source by itself (4.0 to 4.3): the user's schema, or the option
`columns`, does. Other columns are neither built nor shipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ister.base.model import COLUMNS
from ister.errors import InvalidRequestError
from ister.format.staged_rows import STAGED_COLUMNS, STAGED_SCHEMA
from ister.spark.option_values import FOREIGN_COLUMNS, HEADERS, PAYLOAD_ERROR, READABLE_COLUMNS
from ister.spark.options import PayloadErrors, PayloadFormat, ReadOptions

HEADERS_TYPE: Final = ArrayType(
    StructType([StructField("key", StringType()), StructField("value", BinaryType())])
)
"""The type of Kafka's headers."""

_TYPES: Final[dict[str, DataType]] = {
    "topic": StringType(),
    "offset": LongType(),
    "publish_time": TimestampType(),
    "producer_name": StringType(),
    "payload": BinaryType(),
    "attributes": MapType(StringType(), StringType(), valueContainsNull=True),
    "routing_key": StringType(),
    "schema_id": LongType(),
    "schema_version": IntegerType(),
    HEADERS: HEADERS_TYPE,
    PAYLOAD_ERROR: StringType(),
}
_PAYLOADS: Final[dict[type[DataType], PayloadFormat]] = {
    BinaryType: PayloadFormat.BINARY,
    StringType: PayloadFormat.TEXT,
    StructType: PayloadFormat.JSON,
}
_NEVER_NULL: Final = frozenset(
    {"topic", "offset", "publish_time", "producer_name", "payload", "attributes"}
)
_INTEGERS: Final = (ByteType, ShortType, IntegerType, LongType)
# Accepted types of each column of a write; others are refused before a row is read.
_WRITABLE: Final[dict[str, tuple[type[DataType], ...]]] = {
    "topic": (StringType,),
    "offset": _INTEGERS,
    "publish_time": (TimestampType,),
    "producer_name": (StringType,),
    "payload": (BinaryType, StringType),
    "attributes": (MapType,),
    "routing_key": (StringType,),
    "schema_id": _INTEGERS,
    "schema_version": _INTEGERS,
}


def row_schema(columns: Sequence[str] | None) -> StructType:
    """Returns the schema of a read with the given columns; all by default."""
    return StructType([StructField(name, _TYPES[name]) for name in columns or COLUMNS])


def read_schema(
    options: ReadOptions, payload: DataType | str | None, comment: str | None = None
) -> StructType | str:
    """Returns the schema of a read without a schema of the user's; DDL if the payload is."""
    fields = row_schema(options.all_columns).fields
    if isinstance(payload, str):
        suffix = "" if comment is None else f" COMMENT {_quoted(comment)}"
        kinds = {field.name: field.dataType.simpleString() for field in fields}
        kinds |= {"payload": payload} if "payload" in kinds else {}
        return ", ".join(f"{name} {kind}{suffix}" for name, kind in kinds.items())
    metadata = None if comment is None else {"comment": comment}
    given = {} if payload is None else {"payload": payload}
    return StructType(
        [
            StructField(field.name, given.get(field.name, field.dataType), metadata=metadata)
            for field in fields
        ]
    )


def _quoted(text: str) -> str:
    """Returns a text as a literal of Spark SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def check_read_schema(schema: StructType, options: ReadOptions) -> None:
    """Checks a user's schema."""
    names: list[str] = []
    for field in schema.fields:
        wanted = _TYPES.get(field.name)
        if wanted is None:
            raise InvalidRequestError(
                f"there is no column {field.name!r}",
                hint=f"the columns are {', '.join(READABLE_COLUMNS)}",
            )
        if field.name == "payload" and type(field.dataType) in _PAYLOADS:
            _check_payload(field, options)
        elif not _is_same(field.dataType, wanted):
            raise InvalidRequestError(
                f"the column {field.name} is {wanted.simpleString()}, not "
                f"{field.dataType.simpleString()}",
                hint="read it as it is, and cast it afterwards",
            )
        if not field.nullable and field.name not in _NEVER_NULL:
            raise InvalidRequestError(f"the column {field.name} may be null")
        names.append(field.name)
    if len(set(names)) != len(names) or not names:
        raise InvalidRequestError("a schema names each of its columns once, and at least one")
    if options.columns is not None and options.all_columns != tuple(names):
        raise InvalidRequestError(
            "the option columns and the schema name different columns", hint="give one of the two"
        )
    if PAYLOAD_ERROR in names:
        kind = schema["payload"].dataType if "payload" in names else BinaryType()
        if isinstance(kind, BinaryType) or options.payload_errors is PayloadErrors.FAIL:
            raise InvalidRequestError(
                "the column payload_error is for a payload that is text or json",
                hint="read payload too, with payloadFormat text or json and payloadErrors=column",
            )


def _check_payload(field: StructField, options: ReadOptions) -> None:
    found = _PAYLOADS[type(field.dataType)]
    if options.payload_format not in (None, found):
        raise InvalidRequestError(
            f"payloadFormat is {options.payload_format}, and the column payload of the schema is "
            f"{field.dataType.simpleString()}",
            hint="binary is BINARY, text is STRING, json is STRUCT<...>",
        )
    if not field.nullable and found is not PayloadFormat.BINARY:
        raise InvalidRequestError(
            f"the column payload is NOT NULL, and an invalid {found} payload is null",
            hint="omit NOT NULL",
        )


def _is_same(given: DataType, wanted: DataType) -> bool:
    if isinstance(wanted, MapType):
        return (
            isinstance(given, MapType)
            and type(given.keyType) is type(wanted.keyType)
            and type(given.valueType) is type(wanted.valueType)
            and given.valueContainsNull
        )
    if isinstance(wanted, ArrayType):
        return given == wanted
    return type(given) is type(wanted)


def check_write_schema(schema: StructType, *, needs_topic: bool) -> None:
    """Checks that rows can become messages, before anything is written."""
    for field in schema.fields:
        allowed = _WRITABLE.get(field.name)
        if allowed is None:
            better = FOREIGN_COLUMNS.get(field.name.lower())
            raise InvalidRequestError(
                f"a message has no column {field.name!r}",
                hint=f'rename it: .withColumnRenamed("{field.name}", "{better}")'
                if better is not None
                else f"its columns are {', '.join(COLUMNS)}; pack others into the payload: "
                "to_json(struct(...))",
            )
        if not isinstance(field.dataType, allowed):
            names = " or ".join(kind().simpleString() for kind in allowed if kind is not MapType)
            raise InvalidRequestError(
                f"the column {field.name} is {field.dataType.simpleString()}",
                hint=f"cast it to {names or 'map<string,string>'} first",
            )
        if isinstance(field.dataType, MapType) and not (
            isinstance(field.dataType.keyType, StringType)
            and isinstance(field.dataType.valueType, StringType)
        ):
            raise InvalidRequestError(
                f"the column {field.name} is {field.dataType.simpleString()}",
                hint="attributes are map<string,string>",
            )
    given = set(schema.names)
    if len(given) != len(schema.names):
        raise InvalidRequestError("a column occurs twice")
    if "payload" not in given:
        raise InvalidRequestError(
            "the rows have no column payload",
            hint="the message itself, binary or string: to_json(struct(...)).alias('payload')",
        )
    if needs_topic and "topic" not in given:
        raise InvalidRequestError(
            "the rows have no column topic, and the option topic is not set",
            hint='.option("topic", "/default/orders"), or a column that says it for each row',
        )


def to_staged(batch: pa.RecordBatch, producer_name: str | None) -> pa.RecordBatch:
    """Converts a batch that Spark passes to a sink to the staged columns and types.

    A row with a routing key and without a payload becomes a tombstone: a message with an empty
    payload, which ends its key when a topic is compacted to the latest message of each key.
    """
    columns: list[pa.Array] = []
    for name in STAGED_COLUMNS:
        kind = STAGED_SCHEMA.field(name).type
        at = batch.schema.get_field_index(name)
        if at < 0:
            column = pa.nulls(batch.num_rows, kind)
        else:
            try:
                column = pc.cast(batch.column(at), kind)
            except pa.ArrowInvalid as error:
                raise InvalidRequestError(f"the column {name}: {error}") from error
        if name == "producer_name" and producer_name is not None:
            column = pc.fill_null(column, producer_name)
        columns.append(column)
    at = STAGED_COLUMNS.index("payload")
    columns[at] = _with_tombstones(columns[at], columns[STAGED_COLUMNS.index("routing_key")])
    return pa.RecordBatch.from_arrays(columns, schema=STAGED_SCHEMA)


def _with_tombstones(payloads: pa.Array, keys: pa.Array) -> pa.Array:
    if not payloads.null_count:
        return payloads
    refused = pc.and_(payloads.is_null(), keys.is_null())
    if (row := pc.index(refused, True).as_py()) >= 0:
        raise InvalidRequestError(
            f"row {row} has neither a payload nor a routing_key",
            hint="a null payload is a tombstone and needs a routing_key; b'' is an empty message",
        )
    return pc.fill_null(payloads, pa.scalar(b"", payloads.type))
