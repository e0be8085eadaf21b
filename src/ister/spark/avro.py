"""Avro schemas as Spark types, and Avro bodies as Arrow columns.

    body ─ fastavro ─► numbers, texts, dicts ─► Arrow, dates and times in Avro's units ─► Spark's

Owns: which Spark type an Avro type becomes, and the conversion of a batch of bodies in a task. Does
not own: which columns of a DataFrame they come from and go to (`payload`).

Dates and times never become Python objects: fastavro gets a schema without those logical types, so
that it reads and writes numbers, whose units Arrow knows. That is faster, and years beyond Python's
range are no error.

A body may be anything. An error of fastavro or Arrow is the reason why one body does not parse; the
others in the batch are not affected.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
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

from ister.base.extras import missing_extra
from ister.errors import CorruptDataError, InvalidRequestError
from ister.spark.compat import arrow_type_of

AvroSchema: TypeAlias = Any  # nested dicts, lists and names, as fastavro and JSON have them

Framing = Literal["plain", "confluent"]
"""What precedes a body: nothing, or a zero byte and the schema's id in four bytes."""

VALUE: Final = "value"
REASON: Final = "reason"
"""The fields of a decoded body."""

_HEADER_BYTES: Final = 5
_SCHEMA_IDS: Final = range(1 << 31)
_DECIMAL_DIGITS_MAX: Final = 38


@dataclass(frozen=True, slots=True)
class AvroForm:
    """An Avro type, and its forms between bytes and Spark."""

    avro: AvroSchema
    """The schema for fastavro, without logical types that it would turn into objects."""
    counted: pa.DataType
    """The type that fastavro reads and writes: dates and times as numbers."""
    timed: pa.DataType
    """The type with dates and times, in Avro's units."""
    spark: DataType
    takes_bytes: bool = True
    """Whether a value takes at least one byte."""


_TIMESTAMPS: Final = {
    "timestamp-millis": (pa.timestamp("ms", "UTC"), TimestampType()),
    "timestamp-micros": (pa.timestamp("us", "UTC"), TimestampType()),
    "local-timestamp-millis": (pa.timestamp("ms"), TimestampNTZType()),
    "local-timestamp-micros": (pa.timestamp("us"), TimestampNTZType()),
}
_FORMS: Final[dict[tuple[str, str | None], AvroForm]] = {
    ("null", None): AvroForm("null", pa.null(), pa.null(), NullType(), takes_bytes=False),
    ("boolean", None): AvroForm("boolean", pa.bool_(), pa.bool_(), BooleanType()),
    ("int", None): AvroForm("int", pa.int32(), pa.int32(), IntegerType()),
    ("int", "date"): AvroForm("int", pa.int32(), pa.date32(), DateType()),
    ("int", "time-millis"): AvroForm("int", pa.int32(), pa.int32(), LongType()),
    ("long", None): AvroForm("long", pa.int64(), pa.int64(), LongType()),
    **{
        ("long", name): AvroForm("long", pa.int64(), timed, spark)
        for name, (timed, spark) in _TIMESTAMPS.items()
    },
    ("float", None): AvroForm("float", pa.float32(), pa.float32(), FloatType()),
    ("double", None): AvroForm("double", pa.float64(), pa.float64(), DoubleType()),
    ("bytes", None): AvroForm("bytes", pa.binary(), pa.binary(), BinaryType()),
    ("string", None): AvroForm("string", pa.string(), pa.string(), StringType()),
}
_WIDTHS: Final = (ByteType, ShortType, IntegerType, LongType)


# -- schemas --------------------------------------------------------------------------------------


def read_schema(schema: str | Mapping[str, object]) -> AvroForm:
    """Reads an Avro schema: JSON text, or decoded JSON.

    Raises:
        ConfigError: fastavro is not installed.
        InvalidRequestError: The schema is invalid, or has no Spark type.
    """
    try:
        import fastavro  # noqa: PLC0415 - an extra of its own
        import fastavro.schema  # noqa: PLC0415
    except ImportError as error:
        raise missing_extra("an Avro payload", "avro", error) from error
    try:
        given = json.loads(schema) if isinstance(schema, str) else dict(schema)
        parsed = fastavro.parse_schema(given)
    except (fastavro.schema.SchemaParseException, ValueError, TypeError, LookupError) as error:
        raise InvalidRequestError(f"invalid Avro schema: {error}") from error
    form = _FormReader().read(parsed, "")
    return replace(form, avro=fastavro.parse_schema(form.avro))


def fits(given: DataType, wanted: DataType) -> bool:
    """Returns whether every value of one type is also one of the other."""
    if isinstance(given, NullType):
        return True
    if isinstance(given, StructType) and isinstance(wanted, StructType):
        return given.names == wanted.names and all(
            fits(mine.dataType, other.dataType)
            for mine, other in zip(given.fields, wanted.fields, strict=True)
        )
    if isinstance(given, ArrayType) and isinstance(wanted, ArrayType):
        return fits(given.elementType, wanted.elementType)
    if isinstance(given, MapType) and isinstance(wanted, MapType):
        return fits(given.keyType, wanted.keyType) and fits(given.valueType, wanted.valueType)
    if isinstance(given, DecimalType) and isinstance(wanted, DecimalType):
        return (
            given.scale <= wanted.scale
            and given.precision - given.scale <= wanted.precision - wanted.scale
        )
    if isinstance(given, _WIDTHS) and isinstance(wanted, _WIDTHS):
        return _WIDTHS.index(type(given)) <= _WIDTHS.index(type(wanted))
    return type(given) is type(wanted) or (
        isinstance(given, FloatType) and isinstance(wanted, DoubleType)
    )


def missing_field(form: AvroForm, names: Sequence[str]) -> str | None:
    """Returns the first field of a record that is missing in `names` and has no default."""
    for field in form.avro["fields"]:
        if field["name"] in names or "default" in field:
            continue
        kind = field["type"]
        if "null" not in (kind if isinstance(kind, list) else [kind]):
            return str(field["name"])
    return None


def check_framing(framing: str, schema_id: int | None) -> None:
    """Checks a framing and its schema id."""
    if framing not in ("plain", "confluent"):
        raise InvalidRequestError(f"unknown framing {framing!r}", hint="plain or confluent")
    if schema_id is None:
        return
    if framing == "plain":
        raise InvalidRequestError("a plain body has no schema_id", hint="use framing='confluent'")
    if schema_id not in _SCHEMA_IDS:
        raise InvalidRequestError(f"schema_id {schema_id} does not fit into 31 bits")


class _FormReader:
    """Reads a schema that fastavro has parsed, so that names are complete and types are known.

    `where` is the path of the current field, for errors.
    """

    def __init__(self) -> None:
        self._named: dict[str, AvroForm] = {}
        self._open: set[str] = set()

    def read(self, schema: AvroSchema, where: str) -> AvroForm:
        if isinstance(schema, list):
            return self._union(schema, where)
        if isinstance(schema, str):
            return _FORMS.get((schema, None)) or self._by_name(schema, where)
        kind = schema["type"]
        if kind == "array":
            return self._array(schema, where)
        if kind == "map":
            values = self._repeated(schema["values"], where)
            return AvroForm(
                {"type": "map", "values": values.avro},
                pa.map_(pa.string(), values.counted),
                pa.map_(pa.string(), values.timed),
                MapType(StringType(), values.spark),
            )
        if "name" in schema:
            return self._definition(schema, where)
        if kind == "bytes" and _is_decimal(schema):
            return _decimal({"type": "bytes"}, schema, where)
        # An unknown logical type is ignored, as Avro demands.
        return _FORMS.get((kind, schema.get("logicalType"))) or self.read(kind, where)

    def _union(self, schema: list[AvroSchema], where: str) -> AvroForm:
        branches = [branch for branch in schema if _name_of(branch) != "null"]
        if len(branches) > 1:
            names = ", ".join(map(_name_of, branches))
            raise InvalidRequestError(
                f"the Avro schema has a union of several types at {_show(where)}: {names}",
                hint="a Spark column has one type, so a union is one type and null",
            )
        form = self.read(branches[0] if branches else "null", where)
        avro = ["null" if _name_of(branch) == "null" else form.avro for branch in schema]
        return replace(form, avro=avro, takes_bytes=True)

    def _array(self, schema: dict[str, AvroSchema], where: str) -> AvroForm:
        items = self._repeated(schema["items"], where)
        if not items.takes_bytes:
            # A few damaged bytes could announce more items than can be counted.
            raise InvalidRequestError(
                f"the Avro schema has an array of empty items at {_show(where)}",
                hint="an item must take at least one byte",
            )
        return AvroForm(
            {"type": "array", "items": items.avro},
            pa.list_(items.counted),
            pa.list_(items.timed),
            ArrayType(items.spark),
        )

    def _repeated(self, schema: AvroSchema, where: str) -> AvroForm:
        form = self.read(schema, where)
        if _has_void(form.spark):
            # Arrow's conversions of lists and maps do not support it.
            raise InvalidRequestError(
                f"the Avro schema has the type null in an array or a map at {_show(where)}",
                hint="a union of null and another type may be there",
            )
        return form

    def _by_name(self, name: str, where: str) -> AvroForm:
        if name in self._open:
            raise InvalidRequestError(
                f"the Avro schema contains itself: {name} at {_show(where)}",
                hint="Spark has no recursive types",
            )
        return replace(self._named[name], avro=name)

    def _definition(self, schema: dict[str, AvroSchema], where: str) -> AvroForm:
        name, kind = schema["name"], schema["type"]
        if kind == "enum":
            form = AvroForm(_unmarked(schema), pa.string(), pa.string(), StringType())
        elif kind == "fixed":
            avro = {"type": "fixed", "name": name, "size": schema["size"]}
            form = AvroForm(
                avro, pa.binary(), pa.binary(), BinaryType(), takes_bytes=schema["size"] > 0
            )
            if _is_decimal(schema):
                form = _decimal(avro, schema, where)
        else:
            self._open.add(name)
            form = self._record(schema, where)
            self._open.remove(name)
        self._named[name] = form
        return form

    def _record(self, schema: dict[str, AvroSchema], where: str) -> AvroForm:
        forms: dict[str, AvroForm] = {}
        for field in schema["fields"]:
            name = field["name"]
            forms[name] = self.read(field["type"], f"{where}.{name}" if where else name)
        fields = [{**field, "type": forms[field["name"]].avro} for field in schema["fields"]]
        return AvroForm(
            {**_unmarked(schema), "fields": fields},
            pa.struct([(name, form.counted) for name, form in forms.items()]),
            pa.struct([(name, form.timed) for name, form in forms.items()]),
            StructType([StructField(name, form.spark) for name, form in forms.items()]),
            takes_bytes=any(form.takes_bytes for form in forms.values()),
        )


def _unmarked(schema: Mapping[str, AvroSchema]) -> dict[str, AvroSchema]:
    """Returns a schema without the marks that fastavro adds when it parses one."""
    return {key: value for key, value in schema.items() if not key.startswith("__")}


def _show(where: str) -> str:
    return where or "its top"


def _name_of(schema: AvroSchema) -> str:
    found = schema.get("name", schema["type"]) if isinstance(schema, dict) else schema
    return str(found)


def _has_void(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_has_void(field.dataType) for field in kind.fields)
    return isinstance(kind, NullType)


def _is_decimal(schema: Mapping[str, AvroSchema]) -> bool:
    # Without a precision the logical type is invalid, and ignored.
    return schema.get("logicalType") == "decimal" and isinstance(schema.get("precision"), int)


def _decimal(avro: dict[str, AvroSchema], schema: Mapping[str, AvroSchema], where: str) -> AvroForm:
    precision, scale = schema["precision"], schema.get("scale", 0)
    if precision > _DECIMAL_DIGITS_MAX:
        raise InvalidRequestError(
            f"the Avro schema has a decimal of {precision} digits at {_show(where)}",
            hint=f"Spark's have at most {_DECIMAL_DIGITS_MAX}; without its logicalType it is bytes",
        )
    kind = pa.decimal128(precision, scale)
    marked = {**avro, "logicalType": "decimal", "precision": precision, "scale": scale}
    return AvroForm(marked, kind, kind, DecimalType(precision, scale))


# -- bodies ---------------------------------------------------------------------------------------


class AvroDecoder:
    """Decodes bodies to Spark's values, a batch at a time. Pickled to tasks.

    Attributes:
        spark: The type of the result: a struct of the value, and the reason if there is none.
    """

    def __init__(
        self,
        form: AvroForm,
        *,
        framing: Framing,
        schema_id: int | None,
        fails: bool,
        context: Sequence[str],
    ) -> None:
        """Takes what the decoder needs.

        Args:
            form: The schema that the bodies were written with.
            framing: What precedes them.
            schema_id: The only id that is accepted; None accepts any.
            fails: Whether a body that does not parse is an error.
            context: Which of `topic` and `offset` are passed to `decode`, for that error.
        """
        self._form = form
        self._is_framed = framing == "confluent"
        self._schema_id = schema_id
        self._fails = fails
        self._context = tuple(context)
        self._arrow = arrow_type_of(form.spark)
        self.spark = StructType([StructField(VALUE, form.spark), StructField(REASON, StringType())])

    def decode(self, bodies: pa.Array, *context: pa.Array) -> pa.Array:
        """Decodes a batch. A null stays a null, without a reason."""
        reasons: list[str | None] = [None] * len(bodies)

        def refuse(row: int, error: Exception) -> None:
            reasons[row] = f"{type(error).__name__}: {error}"
            if self._fails:
                known = [column[row].as_py() for column in context]
                raise CorruptDataError(
                    f"the payload is not Avro of the given schema: {reasons[row]}",
                    **dict(zip(self._context, known, strict=True)),
                ) from error

        read = self._reader()
        values: list[object] = []
        for row, body in enumerate(bodies.to_pylist()):
            value = None
            if body is not None:
                try:
                    value = read(body)
                except Exception as error:  # noqa: BLE001 - damaged bytes raise anything
                    refuse(row, error)
            values.append(value)
        column = self._convert(values, 0, refuse)
        return pa.StructArray.from_arrays(
            [column, pa.array(reasons, pa.string())], names=[VALUE, REASON]
        )

    def _reader(self) -> Callable[[bytes], object]:
        from fastavro import schemaless_reader  # noqa: PLC0415 - in a task, where it is needed

        schema = self._form.avro

        def read(body: bytes) -> object:
            stream = io.BytesIO(body)
            if self._is_framed:
                self._check_header(stream.read(_HEADER_BYTES))
            value: object = schemaless_reader(stream, schema, None)
            left = len(body) - stream.tell()
            if left:
                raise ValueError(f"{left} of {len(body)} bytes are left over")
            return value

        return read

    def _check_header(self, header: bytes) -> None:
        if len(header) < _HEADER_BYTES or header[0] != 0:
            raise ValueError("there is no header with a schema id")
        found = int.from_bytes(header[1:], "big")
        if self._schema_id is not None and found != self._schema_id:
            raise ValueError(f"its schema id is {found}, not {self._schema_id}")

    def _convert(
        self, values: list[object], start: int, refuse: Callable[[int, Exception], None]
    ) -> pa.Array:
        """Converts values to an array; finds those that do not fit by halving."""
        try:
            return pa.array(values, self._form.timed).cast(self._arrow)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            if len(values) == 1:
                refuse(start, error)
                return pa.nulls(1, self._arrow)
        half = len(values) // 2
        return pa.concat_arrays(
            [
                self._convert(values[:half], start, refuse),
                self._convert(values[half:], start + half, refuse),
            ]
        )


class AvroEncoder:
    """Encodes rows, a batch at a time. Pickled to tasks."""

    def __init__(self, form: AvroForm, names: Sequence[str], *, schema_id: int | None) -> None:
        """Takes what the encoder needs.

        `names` are the fields that rows have, in the record's order; others get their default.
        `schema_id` is the id in the header; None for no header.
        """
        self._avro = form.avro
        self._header = b"" if schema_id is None else b"\0" + schema_id.to_bytes(4, "big")
        self._timed = pa.struct([form.timed.field(name) for name in names])
        self._counted = pa.struct([form.counted.field(name) for name in names])

    def encode(self, rows: pa.Array) -> pa.Array:
        """Encodes a batch of structs."""
        from fastavro import schemaless_writer  # noqa: PLC0415 - in a task, where it is needed

        unpair = _unpairing(self._counted)
        bodies: list[bytes] = []
        try:
            # Times are truncated to the schema's unit. Nothing else may change.
            options = pc.CastOptions(self._timed, allow_time_truncate=True)
            counted = pc.cast(rows, options=options).cast(self._counted)
            for value in counted.to_pylist():
                stream = io.BytesIO()
                stream.write(self._header)
                schemaless_writer(stream, self._avro, unpair(value) if unpair else value)
                bodies.append(stream.getvalue())
        except Exception as error:
            raise InvalidRequestError(
                f"a row does not fit the Avro schema: {type(error).__name__}: {error}"
            ) from error
        return pa.array(bodies, pa.binary())


def _unpairing(kind: pa.DataType) -> Callable[[Any], object] | None:  # takes Arrow's values
    """Returns what turns Arrow's lists of pairs into dicts; None if there are no maps."""
    if pa.types.is_map(kind):
        inner = _unpairing(kind.item_type)
        return lambda pairs: (
            None if pairs is None else {k: inner(v) if inner else v for k, v in pairs}
        )
    if pa.types.is_list(kind):
        inner = _unpairing(kind.value_type)
        return inner and (lambda items: items and [inner(item) for item in items])
    if pa.types.is_struct(kind):
        changes = {field.name: change for field in kind if (change := _unpairing(field.type))}
        if changes:
            return lambda row: row and row | {name: f(row[name]) for name, f in changes.items()}
    return None
