"""A JSON Schema as columns: which of a payload's properties become what.

    string ─ string      date-time ─ timestamp, UTC    array ── list
    integer ─ 64 bits    date ────── date              object with properties ── struct
    number ─ double      boolean ─── boolean           anything else ── its JSON as text

Owns: this mapping. Does not own: payloads (`json_rows`).

Every column may be null: a property that is missing, or null, is. What a schema demands beyond
types (`required`, `minimum`, `pattern` …) is ignored: publishers check it. A property
whose name an envelope's column has already is called `payload_<name>`; characters that tables do
not take in names become `_`. References within the schema (`#/$defs/…`) are followed; a schema that
contains itself is text where it does.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import pyarrow as pa

from ister.errors import InvalidRequestError, NotFoundError
from ister.spark.tables.base import PUBLISH_DATE
from ister.spark.tables.columns import ENVELOPE

Form = Literal[
    "string",
    "integer",
    "number",
    "decimal",
    "boolean",
    "time",
    "date",
    "array",
    "object",
    "text",
    "json",
]
"""`text` is a string as it is, or the JSON of another value; `json` is the JSON of any value."""

_NOT_IN_NAMES: Final = re.compile(r"[ ,;{}()\n\t=.]")
_TAKEN: Final = frozenset({*ENVELOPE.names, PUBLISH_DATE})
_DEPTH_MAX: Final = 32

_SIMPLE: Final[dict[str, tuple[Form, pa.DataType]]] = {
    "string": ("string", pa.string()),
    "integer": ("integer", pa.int64()),
    "number": ("number", pa.float64()),
    "boolean": ("boolean", pa.bool_()),
}
_FORMATS: Final[dict[str, tuple[Form, pa.DataType]]] = {
    "date-time": ("time", pa.timestamp("us", tz="UTC")),
    "date": ("date", pa.date32()),
}


@dataclass(frozen=True, slots=True)
class ValueType:
    """The column type of a JSON value."""

    form: Form
    type: pa.DataType
    members: tuple[Member, ...] = ()
    """Of an object."""
    item: ValueType | None = None
    """Of an array."""


@dataclass(frozen=True, slots=True)
class Member:
    """A property, and the column or field that it becomes."""

    property: str
    column: str
    kind: ValueType


_JSON: Final = ValueType("json", pa.string())


def load_schema(source: str | os.PathLike[str] | Mapping[str, object]) -> dict[str, object]:
    """A JSON Schema from a file, or as it is."""
    if isinstance(source, Mapping):
        return dict(source)
    path = os.fspath(source)
    try:
        with open(path, encoding="utf-8") as file:
            schema = json.load(file)
    except FileNotFoundError as error:
        raise NotFoundError("there is no such schema", path=path) from error
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the schema cannot be read: {error}", path=path) from error
    if not isinstance(schema, dict):
        raise InvalidRequestError("a JSON Schema is an object", path=path)
    return schema


def columns_of(
    schema: Mapping[str, object], *, taken: frozenset[str] = _TAKEN
) -> tuple[Member, ...]:
    """The columns that a schema's properties become.

    Args:
        schema: The schema of an object.
        taken: Names that other columns have, in lower case.
    """
    reader = _SchemaReader(schema)
    whole = reader.resolve(schema, ())
    if not isinstance(whole, Mapping) or not isinstance(whole.get("properties"), Mapping):
        raise InvalidRequestError(
            "the schema has no properties at its top",
            hint='a JSON Schema of the form {"type": "object", "properties": {…}}',
        )
    members = reader.members(whole["properties"], ("#",), taken=taken)
    if not members:
        raise InvalidRequestError("the schema has no properties at its top")
    return members


def with_types(members: tuple[Member, ...], schema: pa.Schema) -> tuple[Member, ...]:
    """The same columns, with the types that a table has for them; not those that it lacks."""
    return _retyped_members(members, {item.name: item.type for item in schema})


def _retyped_members(
    members: tuple[Member, ...], known: Mapping[str, pa.DataType]
) -> tuple[Member, ...]:
    return tuple(
        Member(item.property, item.column, _retyped(item.kind, known[item.column]))
        for item in members
        if item.column in known
    )


def _retyped(kind: ValueType, wanted: pa.DataType) -> ValueType:
    if kind.type == wanted:
        return kind
    if kind.form == "object" and pa.types.is_struct(wanted):
        members = _retyped_members(kind.members, {item.name: item.type for item in wanted})
        return ValueType("object", pa.struct([(m.column, m.kind.type) for m in members]), members)
    if kind.form == "array" and kind.item is not None and pa.types.is_list(wanted):
        item = _retyped(kind.item, wanted.value_type)
        return ValueType("array", pa.list_(item.type), item=item)
    form: Form = "number" if pa.types.is_floating(wanted) else kind.form
    return ValueType(form, wanted)


class _SchemaReader:
    """Reads a schema whose references point into itself."""

    def __init__(self, root: Mapping[str, object]) -> None:
        self._root = root

    def resolve(self, schema: object, trail: tuple[str, ...]) -> object:
        """What a reference stands for; None if that cannot be found, or is under way already."""
        for _ in range(_DEPTH_MAX):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            reference = schema["$ref"]
            if not isinstance(reference, str) or reference in trail:
                return None
            schema = self._find(reference)
        return None

    def _find(self, reference: str) -> object:
        if not reference.startswith("#"):
            return None
        found: object = self._root
        for part in filter(None, reference[1:].split("/")):
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or name not in found:
                return None
            found = found[name]
        return found

    def members(
        self, properties: Mapping[str, object], trail: tuple[str, ...], *, taken: frozenset[str]
    ) -> tuple[Member, ...]:
        """The columns or fields of an object."""
        found: list[Member] = []
        names: dict[str, str] = {}
        for name, schema in properties.items():
            column = _NOT_IN_NAMES.sub("_", str(name)) or "_"
            if column.casefold() in taken:
                column = f"payload_{column}"
            other = names.setdefault(column.casefold(), str(name))
            if other != name or column.casefold() in taken:
                raise InvalidRequestError(
                    f"the properties {other!r} and {name!r} would become one column",
                    hint="column names do not differ by case, and have none of ` ,;{}()=.`",
                )
            found.append(Member(str(name), column, self.kind(schema, trail)))
        return tuple(found)

    def kind(self, schema: object, trail: tuple[str, ...]) -> ValueType:
        """What a value of a schema becomes."""
        if len(trail) > _DEPTH_MAX:
            return _JSON
        if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            reference = schema["$ref"]
            schema = self.resolve(schema, trail)
            trail = (*trail, reference)
        if not isinstance(schema, Mapping):
            return _JSON
        for word in ("anyOf", "oneOf", "allOf"):
            if word in schema:
                return self._one_of(schema[word], trail)
        return self._of_type(schema, trail)

    def _one_of(self, choices: object, trail: tuple[str, ...]) -> ValueType:
        """The one choice besides null; text if there are several."""
        if not isinstance(choices, list):
            return _JSON
        real = [item for item in choices if not _is_null(item)]
        return self.kind(real[0], (*trail, "")) if len(real) == 1 else _JSON

    def _of_type(self, schema: Mapping[str, object], trail: tuple[str, ...]) -> ValueType:
        name = _type_name(schema)
        format_name = schema.get("format")
        if name == "string" and isinstance(format_name, str) and format_name in _FORMATS:
            return ValueType(*_FORMATS[format_name])
        if name in _SIMPLE:
            return ValueType(*_SIMPLE[name])
        if name == "array" and isinstance(schema.get("items"), Mapping):
            item = self.kind(schema["items"], (*trail, ""))
            return ValueType("array", pa.list_(item.type), item=item)
        properties = schema.get("properties")
        if name == "object" and isinstance(properties, Mapping):
            members = self.members(properties, (*trail, ""), taken=frozenset())
            if members:
                fields = [(member.column, member.kind.type) for member in members]
                return ValueType("object", pa.struct(fields), members)
        return _JSON


def _is_null(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"


def _type_name(schema: Mapping[str, object]) -> str | None:
    """The one type of a schema besides null; None if it has none, or several."""
    name = schema.get("type")
    if isinstance(name, list):
        real = [item for item in name if item != "null"]
        name = real[0] if len(real) == 1 else None
    choices = schema.get("enum")
    if name is None and isinstance(choices, list):
        values = [value for value in choices if value is not None]
        return "string" if values and all(isinstance(item, str) for item in values) else None
    if name is None and isinstance(schema.get("const"), str):
        return "string"
    if name is None and "type" not in schema and isinstance(schema.get("properties"), Mapping):
        return "object"
    return name if isinstance(name, str) else None
