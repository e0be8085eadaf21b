"""Columns that are derived from those of messages: text and JSON payloads, headers.

    columns of messages ─► RowShape, in the task ─► the columns of the schema
    payload, binary        text: a string · json: a struct · payload_error: why it is null
    attributes             headers: as the Kafka source has them

Owns: which of a message's columns a read needs, and how columns are derived from them. Does not
own: the schema (`rows`), the parsing of JSON (`tables.json_rows`).

A row with an invalid payload is never dropped: the payload is null, with the reason in the column
`payload_error` if the read has one, or the task fails and names the message's offset. An empty JSON
payload is a tombstone: null, and no error.
"""

from __future__ import annotations

from typing import Final, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from ister.errors import InvalidRequestError
from ister.spark.compat import arrow_type_of
from ister.spark.option_values import HEADERS, PAYLOAD_ERROR
from ister.spark.options import PayloadErrors
from ister.spark.rows import HEADERS_TYPE
from ister.spark.tables.json_rows import JsonParser
from ister.spark.tables.json_schema import Form, Member, ValueType

_PAYLOAD: Final = "payload"
_SOURCES: Final = {HEADERS: "attributes", PAYLOAD_ERROR: _PAYLOAD}

_FORMS: Final[dict[type[DataType], Form]] = {
    StringType: "text",
    BooleanType: "boolean",
    ByteType: "integer",
    ShortType: "integer",
    IntegerType: "integer",
    LongType: "integer",
    FloatType: "number",
    DoubleType: "number",
    DecimalType: "decimal",
    TimestampType: "time",
    DateType: "date",
}


class RowShape:
    """Converts the columns of messages to those of a read's schema. Can be pickled."""

    def __init__(self, schema: StructType, errors: PayloadErrors) -> None:
        self._names = tuple(schema.names)
        self._fails = errors is PayloadErrors.FAIL
        kind = schema[_PAYLOAD].dataType if _PAYLOAD in schema.names else None
        self._parser: JsonParser | None = None
        if isinstance(kind, StructType):
            self._parser = parser_of(kind)
        self._is_text = isinstance(kind, StringType)
        needed = [_SOURCES.get(name, name) for name in schema.names]
        if self._fails and self.is_parsed:
            needed += ["topic", "offset"]
        self.columns = tuple(dict.fromkeys(needed))
        """The columns of messages that a task reads."""

    @property
    def is_plain(self) -> bool:
        """Whether the rows are the columns of messages, unchanged and in the same order."""
        return self.columns == self._names and not self.is_parsed

    @property
    def is_parsed(self) -> bool:
        """Whether payloads are parsed, as text or JSON."""
        return self._is_text or self._parser is not None

    def apply(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Returns the columns of the schema, in its order."""
        found: dict[str, pa.Array] = dict(zip(self.columns, batch.columns, strict=True))
        if self.is_parsed:
            values, bad = self._parse(found[_PAYLOAD])
            if bad and self._fails:
                _refuse(found, *bad[0])
            found[_PAYLOAD] = values
            if PAYLOAD_ERROR in self._names:
                found[PAYLOAD_ERROR] = _reasons(batch.num_rows, bad)
        if HEADERS in self._names:
            found[HEADERS] = _headers(found["attributes"])
        return [found[name] for name in self._names]

    def _parse(self, payloads: pa.Array) -> tuple[pa.Array, list[tuple[int, str]]]:
        """Returns a value for each payload, and the index and reason of each invalid one."""
        if self._parser is None:
            return _to_text(payloads)
        is_empty = pc.equal(pc.fill_null(pc.binary_length(payloads), 0), 0)
        numbers = pc.indices_nonzero(pc.invert(is_empty)).cast(pa.int64()).to_pylist()
        columns, bad = self._parser.parse(
            payloads if len(numbers) == len(payloads) else payloads.take(pa.array(numbers))
        )
        bad = [(numbers[place], reason) for place, reason in bad]
        fields = list(self._parser.schema)
        if len(numbers) == len(payloads) and not bad:
            return pa.StructArray.from_arrays(columns, fields=fields), bad
        wrong = {place for place, _ in bad}
        places: list[int | None] = [None] * len(payloads)
        for row, place in enumerate(place for place in numbers if place not in wrong):
            places[place] = row
        taken = pa.array(places, pa.int64())
        return pa.StructArray.from_arrays(
            [column.take(taken) for column in columns],
            fields=fields,
            mask=taken.is_null(),
        ), bad


def parser_of(schema: StructType) -> JsonParser:
    """Returns what parses JSON payloads to a Spark struct."""
    try:
        return JsonParser(_members_of(schema, ""))
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"no payload has the given type: {error}") from error


def _members_of(schema: StructType, path: str) -> tuple[Member, ...]:
    found: list[Member] = []
    for field in schema.fields:
        name = f"{path}.{field.name}" if path else field.name
        if not field.nullable:
            raise InvalidRequestError(
                f"the field {name} of the payload is NOT NULL, and JSON may lack it",
                hint="omit NOT NULL",
            )
        if any(field.name == other.property for other in found):
            raise InvalidRequestError(f"the field {name} of the payload occurs twice")
        found.append(Member(field.name, field.name, _value_type(field.dataType, name)))
    if not found:
        raise InvalidRequestError(f"the struct {path or _PAYLOAD} has no fields")
    return tuple(found)


def _value_type(kind: DataType, path: str) -> ValueType:
    arrow = arrow_type_of(kind)
    if isinstance(kind, StructType):
        return ValueType("object", arrow, _members_of(kind, path))
    if isinstance(kind, ArrayType) and kind.containsNull:
        return ValueType("array", arrow, item=_value_type(kind.elementType, f"{path}[]"))
    form = _FORMS.get(type(kind))
    if form is None:
        raise InvalidRequestError(
            f"the field {path} of the payload has the unsupported type {kind.simpleString()}",
            hint="use from_json_payload(df, schema), which has the types of Spark's from_json",
        )
    return ValueType(form, arrow)


def _to_text(payloads: pa.Array) -> tuple[pa.Array, list[tuple[int, str]]]:
    try:
        return payloads.cast(pa.string()), []
    except pa.ArrowInvalid:
        pass  # some are not UTF-8: find out which
    texts: list[str | None] = []
    bad: list[tuple[int, str]] = []
    for number, payload in enumerate(payloads.to_pylist()):
        try:
            texts.append(payload if payload is None else payload.decode())
        except UnicodeDecodeError as error:
            texts.append(None)
            bad.append((number, f"not UTF-8: byte {error.start}"))
    return pa.array(texts, pa.string()), bad


def _reasons(rows: int, bad: list[tuple[int, str]]) -> pa.Array:
    reasons: list[str | None] = [None] * rows
    for number, reason in bad:
        reasons[number] = reason
    return pa.array(reasons, pa.string())


def _refuse(found: dict[str, pa.Array], number: int, reason: str) -> NoReturn:
    raise InvalidRequestError(
        f"invalid payload: {reason}",
        topic=found["topic"][number].as_py(),
        offset=found["offset"][number].as_py(),
        hint="with payloadErrors=column the row is kept, with a null payload and the reason",
    )


def _headers(attributes: pa.Array) -> pa.Array:
    """Attributes as Kafka's headers: a list of names and bytes, null where there are none."""
    whole = pa.concat_arrays([attributes])  # a slice's keys and items would not match its offsets
    kind = arrow_type_of(HEADERS_TYPE)
    pairs = pa.StructArray.from_arrays(
        [whole.keys, whole.items.cast(pa.binary())], fields=list(kind.value_type)
    )
    lengths = pc.subtract(whole.offsets[1:], whole.offsets[:-1])
    return pa.ListArray.from_arrays(whole.offsets, pairs, type=kind, mask=pc.equal(lengths, 0))
