"""JSON payloads as columns, and the reasons why payloads are invalid.

    payload ─► msgspec, by the types of the schema ─► a row ─► columns, by pyarrow
               └ an integer may be written as 1.0: decoded again

Owns: the parsing, and what is valid: JSON in UTF-8, an object, values of the schema's types. Does
not own: what becomes of invalid payloads.

Invariant: each payload is decoded alone, so whether it is valid does not depend on the others of
its batch. `1.0` is an integer, as JSON Schema has it; a number is not valid for a string (unless
the column takes the JSON of other values), nor a string for a number, except for a decimal. A time
without a zone is in UTC.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Final, Self, TypedDict

import msgspec
import pyarrow as pa

from ister.spark.tables.json_schema import Member, ValueType

_SHOWN_CHARACTERS: Final = 200
# Half a unit in the last place above the largest float: what is below is rounded to that.
_FLOAT_END: Final = 3.4028235677973366e38


class JsonParser:
    """Payloads of one schema. Pickled; used by one thread at a time."""

    def __init__(self, members: tuple[Member, ...]) -> None:
        self._members = members
        self._strict = _Decoder(members, takes_floats=False)
        self._lenient = _Decoder(members, takes_floats=True)
        self.schema = pa.schema([(member.column, member.kind.type) for member in members])

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[Member, ...]]]:
        return type(self), (self._members,)

    def parse(self, payloads: pa.Array) -> tuple[list[pa.Array], list[tuple[int, str]]]:
        """Returns the columns of the valid payloads, and the invalid ones.

        Args:
            payloads: Binary, without nulls.

        Returns:
            The columns, with rows for valid payloads only, and for each other payload its index
            in `payloads` and the reason.
        """
        rows: list[dict[str, object]] = []
        bad: list[tuple[int, str]] = []
        for number, payload in enumerate(payloads.to_pylist()):
            try:
                rows.append(self._row(payload))
            except _InvalidError as error:
                bad.append((number, str(error)[:_SHOWN_CHARACTERS]))
        return [
            pa.array([row.get(member.column) for row in rows], member.kind.type)
            for member in self._members
        ], bad

    def _row(self, payload: bytes) -> dict[str, object]:
        try:
            text = payload.decode()  # msgspec does not look into properties that it skips
            try:
                return self._strict.decode(text)
            except msgspec.ValidationError:
                return self._lenient.decode(text)
        except UnicodeDecodeError as error:
            raise _InvalidError(f"not UTF-8: byte {error.start}") from error
        except msgspec.ValidationError as error:
            raise _InvalidError(f"not of the schema: {error}") from error
        except msgspec.DecodeError as error:
            reason = str(error).removeprefix("JSON is malformed: ")
            raise _InvalidError(f"not JSON: {reason}" if payload else "not JSON: empty") from error
        except RecursionError as error:
            raise _InvalidError("nested too deeply") from error


class _InvalidError(Exception):
    """Why a payload is invalid."""


class _Decoder:
    """Decodes an object to its columns' values; those that are missing or null may be left out."""

    def __init__(self, members: tuple[Member, ...], *, takes_floats: bool) -> None:
        kind = ValueType("object", pa.null(), members)
        self._load = msgspec.json.Decoder(_python_type(kind, takes_floats=takes_floats)).decode
        self._convert = _converter(kind, takes_floats=takes_floats)

    def decode(self, text: str) -> dict[str, Any]:
        row: dict[str, Any] = self._load(text)
        return row if self._convert is None else self._convert(row, "$")


def _python_type(kind: ValueType, *, takes_floats: bool) -> Any:  # noqa: ANN401 - a type
    """The type that msgspec decodes a value to."""
    if kind.form == "integer":
        end = 2 ** (kind.type.bit_width - 1)
        whole = Annotated[int, msgspec.Meta(ge=-end, le=end - 1)]
        return whole | float if takes_floats else whole
    if kind.form == "number" and kind.type == pa.float32():
        return Annotated[float, msgspec.Meta(gt=-_FLOAT_END, lt=_FLOAT_END)]
    if kind.form == "array" and kind.item is not None:
        return list[_python_type(kind.item, takes_floats=takes_floats) | None]  # type: ignore[misc]
    if kind.form == "object":
        fields = {
            member.property: _python_type(member.kind, takes_floats=takes_floats) | None
            for member in kind.members
        }
        return TypedDict("Payload", fields, total=False)  # type: ignore[operator]
    return _PYTHON_TYPES[kind.form]


_PYTHON_TYPES: Final[dict[str, Any]] = {
    "string": str,
    "number": float,
    "decimal": Decimal,
    "boolean": bool,
    "time": str,
    "date": date,
    "array": list[Any],
    "text": object,
    "json": object,
}


# -- what msgspec leaves to do --------------------------------------------------------------

_Converter = Callable[[Any, str], Any]


def _converter(kind: ValueType, *, takes_floats: bool) -> _Converter | None:
    """A function from a decoded value and its path to the column's; None if they are the same."""
    if kind.form == "object":
        return _object_converter(kind, takes_floats=takes_floats)
    if kind.form == "array" and kind.item is not None:
        of_item = _converter(kind.item, takes_floats=takes_floats)
        if of_item is None:
            return None
        return lambda value, path: [
            None if item is None else of_item(item, f"{path}[{number}]")
            for number, item in enumerate(value)
        ]
    if kind.form == "integer" and takes_floats:
        return lambda value, path: _to_integer(value, kind, path)
    if kind.form == "decimal":
        return lambda value, path: _to_decimal(value, kind, path)
    return {"time": _to_time, "text": _to_text, "json": _to_json}.get(kind.form)


def _object_converter(kind: ValueType, *, takes_floats: bool) -> _Converter | None:
    converters = [
        (member, _converter(member.kind, takes_floats=takes_floats)) for member in kind.members
    ]
    if any(member.property != member.column for member in kind.members):

        def build(value: dict[str, Any], path: str) -> dict[str, Any]:
            row = {}
            for member, convert in converters:
                found = value.get(member.property)
                if found is not None and convert is not None:
                    found = convert(found, f"{path}.{member.property}")
                row[member.column] = found
            return row

        return build
    steps = [(member.property, convert) for member, convert in converters if convert is not None]
    if not steps:
        return None

    def change(value: dict[str, Any], path: str) -> dict[str, Any]:
        for name, convert in steps:
            found = value.get(name)
            if found is not None:
                value[name] = convert(found, f"{path}.{name}")
        return value

    return change


def _to_integer(value: float, kind: ValueType, path: str) -> int:
    end = 2 ** (kind.type.bit_width - 1)
    if value != int(value) or not -end <= value < end:
        raise _InvalidError(f"not an integer of {kind.type.bit_width} bits: {value} at `{path}`")
    return int(value)


def _to_decimal(value: Decimal, kind: ValueType, path: str) -> Decimal:
    try:
        return pa.scalar(value, kind.type).as_py()  # type: ignore[no-any-return]
    except (InvalidOperation, pa.ArrowInvalid) as error:
        raise _InvalidError(f"does not fit into {kind.type}: {value} at `{path}`") from error


def _to_time(value: str, path: str) -> datetime:
    try:
        found = datetime.fromisoformat(value)
        if "T" not in value.upper() and " " not in value:
            raise ValueError("a date alone")  # noqa: TRY301 - what fromisoformat takes besides
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise _InvalidError(f"not an ISO 8601 date and time: {value!r} at `{path}`") from error


def _to_text(value: object, path: str) -> str:
    return value if isinstance(value, str) else _to_json(value, path)


def _to_json(value: object, path: str) -> str:
    del path  # any value has a text
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
