"""JSON payloads as columns, whole batches at a time, and which of them do not fit.

    payloads ─► all at once, by pyarrow ─► columns
                └ something does not fit ─► pieces ─► row by row ─► columns, and reasons

Owns: the parsing, and what fits: JSON in UTF-8, an object, values of the schema's types. Does not
own: what becomes of payloads that do not.

Both ways give the same columns: what pyarrow does not take is decoded again by the slow way, and
only that has the last word about a payload. `1.0` is an integer, as JSON Schema has it; a number is
no text (unless the column takes the JSON of other values), and a text no number, but a decimal. A
time without a zone is in UTC.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Final, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from ister.spark.tables.json_schema import Member, ValueType

_PIECE_ROWS: Final = 256
_SHOWN_CHARACTERS: Final = 200
# What has to be in a payload that closes the array around it and opens another.
_SUSPICIOUS: Final = rb"\]\s*,\s*\""
# What pyarrow takes for numbers, and JSON does not.
_NO_NUMBERS: Final = rb"NaN|Inf"


class JsonParser:
    """Payloads of one schema. Pickled; used by one thread at a time."""

    def __init__(self, members: tuple[Member, ...]) -> None:
        self._members = members
        self._is_fast = not any(member.kind.has_text_of_json for member in members)
        self.schema = pa.schema([(member.column, member.kind.type) for member in members])

    def parse(self, payloads: pa.Array) -> tuple[list[pa.Array], list[tuple[int, str]]]:
        """Columns of those payloads that fit, and the others.

        Args:
            payloads: Binary, without nulls.

        Returns:
            The columns, with rows for payloads that fit only, and for each other payload its place
            among `payloads` and the reason.
        """
        if not len(payloads):
            return self._empty(), []
        if not self._is_fast:
            return self._parse_slowly(payloads, 0)
        columns = self._parse_fast(payloads)
        if columns is not None:
            return columns, []
        pieces: list[list[pa.Array]] = []
        bad: list[tuple[int, str]] = []
        for at in range(0, len(payloads), _PIECE_ROWS):
            piece = payloads.slice(at, _PIECE_ROWS)
            found = self._parse_fast(piece)
            if found is None:
                found, reasons = self._parse_slowly(piece, at)
                bad += reasons
            pieces.append(found)
        joined = [
            pa.concat_arrays([piece[number] for piece in pieces])
            for number in range(len(self._members))
        ]
        return joined, bad

    def _empty(self) -> list[pa.Array]:
        return [pa.array([], member.kind.type) for member in self._members]

    # -- all at once ------------------------------------------------------------------------

    def _parse_fast(self, payloads: pa.Array) -> list[pa.Array] | None:
        """The columns, if all payloads fit in the plain way; else None.

        Each payload is wrapped into a line of its own, with its number, within an array: a payload
        that is no JSON could else be taken for two, or shift those after it.
        """
        try:
            payloads.cast(pa.string())  # which looks whether they are UTF-8
        except pa.ArrowInvalid:
            return None
        values = payloads.to_pylist()
        text = b"".join(
            b'{"n":%d,"p":[%b]}\n' % (number, value) for number, value in enumerate(values)
        )
        if re.search(_NO_NUMBERS, text) is not None:
            return None
        for unexpected in ("error", "ignore"):
            found = self._read(text, unexpected)
            if found is not None:
                break
        else:
            return None
        rows = found.combine_chunks()
        lists = rows.column("p").combine_chunks()
        numbers = rows.column("n").combine_chunks()
        if (
            rows.num_rows != len(values)
            or lists.null_count
            or len(lists.flatten()) != len(values)
            or not numbers.equals(pa.array(range(len(values)), pa.int64()))
            or not pc.all(pc.equal(pc.list_value_length(lists), 1)).as_py()
        ):
            return None
        if unexpected == "ignore" and not _all_valid(values):
            return None
        structs = lists.flatten()
        if structs.null_count:
            return None  # `null` is no object
        columns: list[pa.Array] = []
        for number, member in enumerate(self._members):
            column = _cast_text(structs.field(number), member.kind)
            if column is None:
                return None
            columns.append(column)
        return columns

    def _read(self, text: bytes, unexpected: str) -> pa.Table | None:
        properties = pa.struct(
            [(member.property, _text_type(member.kind)) for member in self._members]
        )
        schema = pa.schema([("n", pa.int64()), ("p", pa.list_(properties))])
        try:
            return pj.read_json(
                io.BytesIO(text),
                read_options=pj.ReadOptions(use_threads=False, block_size=len(text) + 1),
                parse_options=pj.ParseOptions(
                    explicit_schema=schema,
                    newlines_in_values=True,
                    unexpected_field_behavior=unexpected,
                ),
            )
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return None

    # -- row by row -------------------------------------------------------------------------

    def _parse_slowly(
        self, payloads: pa.Array, first: int
    ) -> tuple[list[pa.Array], list[tuple[int, str]]]:
        rows: list[list[object]] = []
        bad: list[tuple[int, str]] = []
        for number, payload in enumerate(payloads.to_pylist(), first):
            try:
                rows.append(self._row(payload))
            except _TooDeepError as error:
                # What pyarrow takes must not depend on a payload's neighbours.
                found = (
                    self._parse_fast(payloads.slice(number - first, 1)) if self._is_fast else None
                )
                if found is None:
                    bad.append((number, str(error)))
                else:
                    rows.append([column[0].as_py() for column in found])
            except _MisfitError as error:
                bad.append((number, str(error)[:_SHOWN_CHARACTERS]))
        if not rows:
            return self._empty(), bad
        columns = [
            pa.array(column, member.kind.type)
            for column, member in zip(zip(*rows, strict=True), self._members, strict=True)
        ]
        return columns, bad

    def _row(self, payload: bytes) -> list[object]:
        value = _load(payload)
        if not isinstance(value, dict):
            _misfit("", value, "an object")
        return [
            _convert(value.get(member.property), member.kind, member.property)
            for member in self._members
        ]


class _MisfitError(Exception):
    """Why a payload does not fit."""


class _TooDeepError(_MisfitError):
    """Python's parser does not get to the bottom of it."""


def _load(payload: bytes) -> object:
    try:
        text = payload.decode()
    except UnicodeDecodeError as error:
        raise _MisfitError(f"not UTF-8: byte {error.start}") from error
    if not text.strip():
        raise _MisfitError("not JSON: it is empty")
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=Decimal)
    except json.JSONDecodeError as error:
        raise _MisfitError(f"not JSON: {error.msg} at {error.pos}") from error
    except RecursionError as error:
        raise _TooDeepError("nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits
        raise _MisfitError(f"not JSON that is read here: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise _MisfitError(f"not JSON: {name}")


def _all_valid(payloads: Sequence[bytes]) -> bool:
    """Whether payloads that look as if they left the array around them are JSON by themselves."""
    for payload in payloads:
        if re.search(_SUSPICIOUS, payload) is None:
            continue
        try:
            _load(payload)
        except _TooDeepError:
            continue  # so deep that it does not matter
        except _MisfitError:
            return False
    return True


def _text_type(kind: ValueType) -> pa.DataType:
    """The type that pyarrow parses: times and dates are cast afterwards."""
    if kind.form in ("time", "date"):
        return pa.string()
    if kind.form == "array" and kind.item is not None:
        return pa.list_(_text_type(kind.item))
    if kind.form == "object":
        return pa.struct([(item.property, _text_type(item.kind)) for item in kind.members])
    return kind.type


def _cast_text(column: pa.Array, kind: ValueType) -> pa.Array | None:
    """A column as pyarrow has parsed it, with its own type; None if a text is no time."""
    if kind.form in ("time", "date"):
        for wanted in (kind.type, pa.timestamp("us")) if kind.form == "time" else (kind.type,):
            try:
                return pc.cast(pc.cast(column, wanted), kind.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                continue
        return None
    if kind.form == "array" and kind.item is not None:
        column = pa.concat_arrays([column])  # without an offset, so that its parts fit together
        items = _cast_text(column.values, kind.item)
        if items is None:
            return None
        mask = column.is_null() if column.null_count else None
        return pa.ListArray.from_arrays(column.offsets, items, type=kind.type, mask=mask)
    if kind.form == "object":
        parts = [
            _cast_text(column.field(number), member.kind)
            for number, member in enumerate(kind.members)
        ]
        if any(part is None for part in parts):
            return None
        mask = column.is_null() if column.null_count else None
        return pa.StructArray.from_arrays(parts, fields=list(kind.type), mask=mask)
    return column if column.type == kind.type else pc.cast(column, kind.type)


# -- single values --------------------------------------------------------------------------


def _convert(value: object, kind: ValueType, path: str) -> object:
    """A value as its column has it."""
    if isinstance(value, Decimal) and kind.form != "decimal":
        value = float(value)
    return None if value is None else _CONVERTERS[kind.form](value, kind, path)


def _to_string(value: object, kind: ValueType, path: str) -> str:
    if not isinstance(value, str):
        _misfit(path, value, "a string")
    return _check_text(value, path)


def _to_integer(value: object, kind: ValueType, path: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        _misfit(path, value, "an integer")
    bits = kind.type.bit_width
    if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
        raise _MisfitError(f"{_name(path)} does not fit into {bits} bits")
    return value


def _to_number(value: object, kind: ValueType, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _misfit(path, value, "a number")
    try:
        found = float(value)
    except OverflowError:
        found = float("inf")
    if found in (float("inf"), float("-inf")):
        raise _MisfitError(f"{_name(path)} is too large for a double")
    return found


def _to_decimal(value: object, kind: ValueType, path: str) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | str | Decimal):
        _misfit(path, value, "a number")
    try:
        return pa.scalar(Decimal(value), kind.type).as_py()  # type: ignore[no-any-return]
    except (InvalidOperation, pa.ArrowInvalid) as error:
        raise _MisfitError(f"{_name(path)} does not fit into {kind.type}") from error


def _to_boolean(value: object, kind: ValueType, path: str) -> bool:
    if not isinstance(value, bool):
        _misfit(path, value, "a boolean")
    return value


def _to_time(value: object, kind: ValueType, path: str) -> datetime:
    if not isinstance(value, str):
        _misfit(path, value, "a date-time")
    try:
        found = datetime.fromisoformat(value)
        if "T" not in value.upper() and " " not in value:
            raise ValueError("a date alone")  # noqa: TRY301 - what fromisoformat takes besides
        found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise _MisfitError(f"{_name(path)} is not a date-time") from error
    return found


def _to_date(value: object, kind: ValueType, path: str) -> date:
    if not isinstance(value, str):
        _misfit(path, value, "a date")
    try:
        if len(value) != len("YYYY-MM-DD"):
            raise ValueError("another form")  # noqa: TRY301 - what fromisoformat takes besides
        return date.fromisoformat(value)
    except ValueError as error:
        raise _MisfitError(f"{_name(path)} is not a date") from error


def _to_array(value: object, kind: ValueType, path: str) -> list[object]:
    if not isinstance(value, list):
        _misfit(path, value, "an array")
    item = kind.item
    if item is None:
        return []
    return [_convert(one, item, f"{path}[{number}]") for number, one in enumerate(value)]


def _to_object(value: object, kind: ValueType, path: str) -> dict[str, object]:
    if not isinstance(value, dict):
        _misfit(path, value, "an object")
    return {
        member.column: _convert(
            value.get(member.property), member.kind, f"{path}.{member.property}"
        )
        for member in kind.members
    }


def _to_text(value: object, kind: ValueType, path: str) -> str:
    return _check_text(value, path) if isinstance(value, str) else _to_json(value, kind, path)


def _to_json(value: object, kind: ValueType, path: str) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=float)
    return _check_text(text, path)


_CONVERTERS: Final[dict[str, Callable[[object, ValueType, str], object]]] = {
    "string": _to_string,
    "integer": _to_integer,
    "number": _to_number,
    "decimal": _to_decimal,
    "boolean": _to_boolean,
    "time": _to_time,
    "date": _to_date,
    "array": _to_array,
    "object": _to_object,
    "text": _to_text,
    "json": _to_json,
}


def _check_text(text: str, path: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _MisfitError(f"{_name(path)} has an unpaired surrogate") from error
    return text


def _misfit(path: str, value: object, wanted: str) -> NoReturn:
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        Decimal: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
        type(None): "null",
    }
    raise _MisfitError(f"{_name(path)} is {names[type(value)]}, not {wanted}")


def _name(path: str) -> str:
    return f"`{path}`" if path else "the payload"
