"""Payloads as columns, and columns as payloads: JSON and Avro.

    df of format("ister") ─ from_json_payload / from_avro_payload ─► payload's fields as columns
    df of any kind ──────── to_json_payload / to_avro_payload ─────► rows that the sink takes

Owns: what becomes of the column `payload` and of the columns beside it. Does not own: the rows
themselves (`rows`), schema registries: a schema is given with the call. A topic that holds messages
of several schemas is filtered by `schema_id` first, each part read with its own.

JSON is parsed by Spark itself. Avro is parsed by fastavro in Arrow batches, because Spark's own
Avro module is a Java package that `pip` does not bring. Only the DataFrame API is used, so all of
this works on batches, on streams and over Spark Connect.

A payload that does not parse never stops a query unless it was asked to (`fails`), and is never
dropped: its row is there, with nulls. As with everything in Spark, a column that no one asks for is
not computed: `fails` does not fail a `count()`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know it by
from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType

from ister.base.model import COLUMNS
from ister.errors import InvalidRequestError
from ister.spark.avro import (
    REASON,
    VALUE,
    AvroDecoder,
    AvroEncoder,
    AvroForm,
    Framing,
    check_framing,
    fits,
    missing_field,
    read_schema,
)
from ister.spark.compat import with_arrow_column

_PAYLOAD: Final = "payload"
# Columns between two steps of a query; no one sees them.
_PARSED: Final = "__ister_parsed"
_UNPARSED: Final = "__ister_unparsed"

_OUR_JSON_OPTIONS: Final = ("mode", "columnnameofcorruptrecord")
# Spark's own formats end with milliseconds, its times with microseconds.
_TIME_FORMATS: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
# As much of a payload as an error shows.
_SHOWN_CHARACTERS: Final = 200


# -- JSON -----------------------------------------------------------------------------------------


def from_json_payload(
    df: DataFrame,
    schema: StructType | str,
    *,
    into: str | None = None,
    errors: str | None = None,
    fails: bool = False,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Replaces `payload`, which is JSON in UTF-8, by what is in it.

    What parses is for Spark's `from_json` to say. Of an object in which single fields do not fit,
    the others are kept; of what follows after the object, nothing is read. An empty payload and one
    that is not UTF-8 do not parse. A time without a zone is in UTC, not in the session's time zone,
    unless `options` has a `timeZone`.

    Args:
        df: Rows with a column `payload`, a stream or not.
        schema: The fields of an object: a `StructType`, or DDL such as `"id long, note string"`.
        into: A name for one struct column; None makes each field a column.
        errors: A name for one more column: the payload's text where it does not parse, else null.
        fails: Whether a payload that does not parse fails the query, instead of being nulls.
        options: More options for Spark's `from_json`, such as `timestampFormat`.

    Raises:
        InvalidRequestError: There is no payload, a name is taken, or the arguments contradict each
            other.
    """
    _check_payload(df, (BinaryType, StringType))
    _check_errors(errors, fails=fails)
    given = dict(options or {})
    if "timezone" not in {name.lower() for name in given}:
        given["timeZone"] = "UTC"  # as everywhere in Ister, and not the session's
    for name in given:
        if name.lower() in _OUR_JSON_OPTIONS:
            raise InvalidRequestError(
                f"the option {name} is set by this function",
                hint="use errors= for the text that does not parse, fails=True to fail",
            )
    wanted = _json_schema(df, schema)
    _check_names(df, wanted.names, into=into, errors=errors)

    bytes_as_text = F.col(_PAYLOAD).cast("string")
    text = F.try_validate_utf8(bytes_as_text)
    if errors is None and not fails:
        parsed = F.from_json(text, wanted, given)
        return _replace_payload(df.withColumn(_PARSED, parsed), F.col(_PARSED), wanted, into=into)

    watched = StructType([*wanted.fields, StructField(_UNPARSED, StringType())])
    given |= {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _UNPARSED}
    step = df.withColumn(_PARSED, F.from_json(text, watched, given))
    # Spark makes null of an empty text, and `text` is null if it is not UTF-8: neither has parsed.
    raw = F.coalesce(
        F.col(_PARSED).getField(_UNPARSED),
        F.when(F.col(_PARSED).isNull(), F.make_valid_utf8(bytes_as_text)),
    )
    value = F.col(_PARSED).dropFields(_UNPARSED)
    if fails:
        value = F.when(raw.isNull(), value).otherwise(F.raise_error(_complaint(df, raw)))
    step = step.withColumn(_UNPARSED, raw).withColumn(_PARSED, value)
    return _replace_payload(step, F.col(_PARSED), wanted, into=into, errors=errors)


def to_json_payload(
    df: DataFrame, *columns: str | Column, options: Mapping[str, str] | None = None
) -> DataFrame:
    """Packs columns into `payload` as a JSON object, in rows that `format("ister")` writes.

    The columns of a message that are there (`topic`, `routing_key`, `attributes` ...) stay, a
    `payload` is replaced, and every other column is gone, packed or not.

    Args:
        df: The rows, a stream or not.
        *columns: What to pack; all columns that are not a message's own, if none is named.
        options: Options for Spark's `to_json`, such as `timestampFormat`, which has microseconds
            here unless it is set; `ignoreNullFields` set to `false` writes nulls too.

    Raises:
        InvalidRequestError: There is nothing to pack.
    """
    packed = columns or tuple(_column(name) for name in _other_columns(df))
    given = {name.lower() for name in options or {}}
    formats = {name: text for name, text in _TIME_FORMATS.items() if name.lower() not in given}
    body = F.to_json(F.struct(*packed), {**formats, **(options or {})})
    return _with_payload(df, body.cast("binary"))


def _json_schema(df: DataFrame, schema: StructType | str) -> StructType:
    """The schema as a value; Spark itself reads one that is text."""
    if isinstance(schema, str):
        nothing = F.lit(None).cast("string")
        probe = df.select(F.from_json(nothing, schema).alias(_PARSED))
        found = probe.schema[_PARSED].dataType
    else:
        found = schema
    if not isinstance(found, StructType) or not found.fields:
        raise InvalidRequestError(
            "the schema of a payload is a struct with at least one field",
            hint='such as "id long, note string"',
        )
    return found


def _complaint(df: DataFrame, raw: Column) -> Column:
    """The text of an error about one row, which says which message it is."""
    parts = [F.lit("the payload is not JSON of the given schema")]
    known = [name for name in ("topic", "offset") if name in df.columns]
    for name in known:
        parts += [F.lit(f", {name} "), F.coalesce(_column(name).cast("string"), F.lit("null"))]
    return F.concat(*parts, F.lit(": "), F.substring(raw, 1, _SHOWN_CHARACTERS))


# -- Avro -----------------------------------------------------------------------------------------


def from_avro_payload(
    df: DataFrame,
    schema: str | Mapping[str, object],
    *,
    into: str | None = None,
    errors: str | None = None,
    fails: bool = False,
    framing: Framing = "plain",
    schema_id: int | None = None,
) -> DataFrame:
    """Replaces `payload`, which is the Avro binary form of one value, by what is in it.

    Avro bytes do not say by which schema they were written, so `schema` must be the writer's. Bytes
    that are left over after the value show that it was not; the payload then does not parse.

    Dates and timestamps become Spark's, times of day become longs (as Avro counts them), decimals,
    enums and uuids become decimals and strings, fixed becomes binary. Logical types that are not
    known here stay what they are without.

    Args:
        df: Rows with a column `payload`, a stream or not.
        schema: The Avro schema: JSON, or what JSON makes of it.
        into: A name for one column with the whole value; None makes each field of a record a
            column.
        errors: A name for one more column: why a payload does not parse, null where it does.
        fails: Whether a payload that does not parse fails the query, instead of being nulls.
        framing: `plain`, or `confluent` for bodies behind a header with a schema's id.
        schema_id: With `confluent`, the only id that is read; None reads all by the same schema.

    Raises:
        ConfigError: fastavro is not installed.
        InvalidRequestError: There is no payload, a name is taken, the schema is wrong or has no
            Spark type, or the arguments contradict each other.
    """
    _check_payload(df, (BinaryType,))
    _check_errors(errors, fails=fails)
    check_framing(framing, schema_id)
    form = read_schema(schema)
    if into is None and not isinstance(form.spark, StructType):
        raise InvalidRequestError(
            "the Avro schema is not a record, so it has no fields to become columns",
            hint="into= takes the value as one column",
        )
    names = form.spark.names if isinstance(form.spark, StructType) else []
    _check_names(df, names, into=into, errors=errors)

    context = [name for name in ("topic", "offset") if name in df.columns] if fails else []
    decoder = AvroDecoder(form, framing=framing, schema_id=schema_id, fails=fails, context=context)

    def from_avro(bodies: pa.Array, *context: pa.Array) -> pa.Array:
        return decoder.decode(bodies, *context)

    arguments = [F.col(_PAYLOAD), *map(_column, context)]
    step = with_arrow_column(df, _PARSED, from_avro, decoder.spark, *arguments)
    if errors is not None:
        step = step.withColumn(_UNPARSED, F.col(_PARSED).getField(REASON))
    value = F.col(_PARSED).getField(VALUE)
    return _replace_payload(step, value, form.spark, into=into, errors=errors)


def to_avro_payload(
    df: DataFrame,
    schema: str | Mapping[str, object],
    *columns: str,
    framing: Framing = "plain",
    schema_id: int | None = None,
) -> DataFrame:
    """Packs columns into `payload` as an Avro record, in rows that `format("ister")` writes.

    The columns of a message that are there (`topic`, `routing_key`, `attributes` ...) stay, a
    `payload` is replaced. A field without a column gets its default, or null where it may. A value
    that its field does not take (a null, an unknown symbol) fails the query.

    Args:
        df: The rows, a stream or not.
        schema: The Avro schema of a record: JSON, or what JSON makes of it.
        *columns: What to pack, by the names of fields; all columns that are not a message's own,
            if none is named.
        framing: `plain`, or `confluent` for a header with the schema's id before each body.
        schema_id: The id for that header.

    Raises:
        ConfigError: fastavro is not installed.
        InvalidRequestError: The schema is wrong or no record, a column is no field or of another
            type, or a field has neither a column nor a default.
    """
    check_framing(framing, schema_id)
    if framing == "confluent" and schema_id is None:
        raise InvalidRequestError("the framing confluent needs a schema_id")
    form = read_schema(schema)
    if not isinstance(form.spark, StructType) or isinstance(form.avro, list):
        raise InvalidRequestError(
            "columns are packed into a record, but the Avro schema is not a record"
        )
    given = columns or _other_columns(df)
    _check_fields(df, form, form.spark, given)
    # In the schema's order, because Arrow converts structs by position.
    names = [name for name in form.spark.names if name in given]
    encoder = AvroEncoder(form, names, schema_id=schema_id)

    def to_avro(rows: pa.Array) -> pa.Array:
        return encoder.encode(rows)

    row = F.struct(*map(_column, names))
    step = with_arrow_column(df, _PARSED, to_avro, BinaryType(), row)
    return _with_payload(step, F.col(_PARSED))


def _check_fields(df: DataFrame, form: AvroForm, record: StructType, names: Sequence[str]) -> None:
    """Refuses columns that the record does not have, before rows are read."""
    given = {field.name: field.dataType for field in df.schema.fields}
    for name in names:
        if name not in given:
            raise InvalidRequestError(f"there is no column {name!r}")
        if name not in record.names:
            raise InvalidRequestError(
                f"the Avro schema has no field {name!r}",
                hint="name the columns to pack, or drop this one",
            )
        wanted = record[name].dataType
        if not fits(given[name], wanted):
            raise InvalidRequestError(
                f"the column {name} is {given[name].simpleString()}, and the Avro field takes "
                f"{wanted.simpleString()}",
                hint="cast it first",
            )
    missing = missing_field(form, names)
    if missing is not None:
        raise InvalidRequestError(
            f"the Avro field {missing!r} has no column, no default, and may not be null",
            hint="a column of a message's own name is packed if it is named"
            if missing in given
            else None,
        )


# -- columns --------------------------------------------------------------------------------------


def _column(name: str) -> Column:
    """Returns a column by its exact name, with any characters."""
    return F.col("`" + name.replace("`", "``") + "`")


def _other_columns(df: DataFrame) -> tuple[str, ...]:
    """The columns that are not a message's own."""
    names = tuple(name for name in df.columns if name not in COLUMNS)
    if not names:
        raise InvalidRequestError(
            "there is no column to pack into the payload",
            hint="columns of a message's own names are packed if they are named",
        )
    return names


def _check_payload(df: DataFrame, kinds: tuple[type[DataType], ...]) -> None:
    found = next((field for field in df.schema.fields if field.name == _PAYLOAD), None)
    if found is None:
        raise InvalidRequestError(
            "the rows have no column payload", hint="the option columns must name it too"
        )
    if not isinstance(found.dataType, kinds):
        raise InvalidRequestError(
            f"the column payload is {found.dataType.simpleString()}, not "
            + " or ".join(kind().simpleString() for kind in kinds)
        )


def _check_errors(errors: str | None, *, fails: bool) -> None:
    if errors is not None and fails:
        raise InvalidRequestError(
            "`fails` and `errors` cannot be combined", hint="pass one of the two"
        )


def _check_names(
    df: DataFrame, fields: Sequence[str], *, into: str | None, errors: str | None
) -> None:
    """Refuses duplicate names. Spark ignores their case."""
    taken = {name.lower() for name in df.columns}
    new = fields if into is None else [into]
    hint = "into= takes the payload as one column" if into is None else "choose another into="
    if errors is not None:
        new = [*new, errors]
    for name in new:
        if name.lower() in taken:
            raise InvalidRequestError(
                f"there would be two columns {name!r}",
                hint="choose another errors=" if name == errors else hint,
            )
        taken.add(name.lower())


def _replace_payload(
    step: DataFrame, value: Column, kind: DataType, *, into: str | None, errors: str | None = None
) -> DataFrame:
    """Puts a value, or its fields, in the place of the payload, and the errors behind."""
    if into is not None:
        new = [value.alias(into)]
    else:
        names = kind.names if isinstance(kind, StructType) else []
        new = [value.getField(name).alias(name) for name in names]
    if errors is not None:
        new.append(F.col(_UNPARSED).alias(errors))
    columns: list[Column] = []
    for name in step.columns:
        if name == _PAYLOAD:
            columns += new
        elif name not in (_PARSED, _UNPARSED):
            columns.append(_column(name))
    return step.select(*columns)


def _with_payload(df: DataFrame, payload: Column) -> DataFrame:
    """Returns the existing columns of a message, in their order, with this payload."""
    return df.select(
        *[
            payload.alias(_PAYLOAD) if name == _PAYLOAD else F.col(name)
            for name in COLUMNS
            if name == _PAYLOAD or name in df.columns
        ]
    )
