"""Avro schemas: parsing, the canonical form, and Avro's rules of schema resolution.

Does not own: payloads (`avro_datum`).

Two texts mean the same schema if they differ only in layout, in `doc`, and in where names have
their namespace. Unlike Avro's own canonical form, this one keeps defaults, aliases and logical
types, since they decide what can be read.
"""

from __future__ import annotations

from typing import Final

import fastavro
import fastavro.schema

from ister.broker.schemas.avro_datum import DatumChecker
from ister.broker.schemas.definition import (
    Json,
    canonical_json,
    fingerprint,
    read_json,
    shorten,
)
from ister.errors import InvalidRequestError
from ister.topic.schema_kinds import SchemaType

_PROMOTIONS: Final = {
    ("int", "long"),
    ("int", "float"),
    ("int", "double"),
    ("long", "float"),
    ("long", "double"),
    ("float", "double"),
    ("string", "bytes"),
    ("bytes", "string"),
}
"""(written as, read as)."""
_NAMED: Final = ("record", "error", "enum", "fixed")
_UNNAMED: Final = (
    *("null", "boolean", "int", "long", "float", "double", "bytes", "string", "array", "map"),
)


class AvroDefinition:
    """An Avro schema. Immutable, thread-safe."""

    schema_type: Final = SchemaType.AVRO

    def __init__(self, schema: Json) -> None:
        self.schema = _tidy(schema)
        """As parsed by fastavro: full names, every type defined where it is first used."""
        self.named: dict[str, Json] = {}
        _collect_named(self.schema, self.named)
        self.fingerprint = fingerprint(canonical_json(self.schema))
        self._checker = DatumChecker(self.schema, self.named)

    def check(self, payload: bytes) -> str | None:
        """Why a payload is neither a datum nor an Avro file of this schema; None if it is."""
        reason = self._checker.check(payload)
        if reason is not None and payload.startswith(b"Obj\x01"):
            # Danube's broker accepts whole Avro files, which start with the schema.
            return self._checker.check_file(payload, self._is_same)
        return reason

    def check_datum(self, payload: bytes) -> str | None:
        """Why a payload is not one datum of this schema; None if it is."""
        return self._checker.check(payload)

    def cannot_read(self, writer: AvroDefinition) -> list[str]:
        """The parts of `writer` that do not resolve to this schema."""
        resolution = _Resolution(self.named, writer.named)
        resolution.compare(self.schema, writer.schema, "")
        return resolution.problems

    def breaks(self, older: AvroDefinition) -> list[str]:
        """Finds no problems: resolution covers all rules."""
        return []

    def _is_same(self, text: bytes) -> bool:
        try:
            return read_avro(text).fingerprint == self.fingerprint
        except InvalidRequestError:
            return False


def read_avro(data: bytes) -> AvroDefinition:
    """Parses an Avro schema."""
    given = read_json(data, "Avro schema")
    try:
        _check_shape(given)
        return AvroDefinition(fastavro.parse_schema(given))
    except (
        fastavro.schema.SchemaParseException,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:
        if isinstance(error, InvalidRequestError):
            raise
        # fastavro does not only raise its own errors.
        reason = shorten(str(error)) or type(error).__name__
        raise InvalidRequestError(f"invalid Avro schema: {reason}") from error


def _check_shape(schema: Json, *, is_branch: bool = False) -> None:
    """Refuses invalid schemas that fastavro accepts."""
    if isinstance(schema, list):
        if is_branch:
            raise InvalidRequestError("invalid Avro schema: a union inside a union")
        for branch in schema:
            _check_shape(branch, is_branch=True)
        kinds = [_label(branch) for branch in schema if isinstance(branch, str | dict)]
        if len(set(kinds)) != len(kinds):
            raise InvalidRequestError("invalid Avro schema: a union has a type twice")
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if kind in ("record", "error"):
        fields = schema.get("fields")
        if not isinstance(fields, list):
            raise InvalidRequestError("invalid Avro schema: a record without fields")
        names = [field.get("name") for field in fields if isinstance(field, dict)]
        if len(set(names)) != len(names):
            raise InvalidRequestError("invalid Avro schema: a record has a field twice")
        for field in fields:
            _check_shape(field.get("type") if isinstance(field, dict) else None)
    elif kind == "fixed":
        size = schema.get("size")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise InvalidRequestError("invalid Avro schema: a fixed type without a size")
    elif isinstance(kind, dict | list):
        _check_shape(kind)
    for inner in (schema.get("items"), schema.get("values")):
        _check_shape(inner)


def _tidy(schema: Json) -> Json:
    """The schema without docs and without fastavro's own entries."""
    if isinstance(schema, list):
        return [_tidy(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    tidy = {
        name: value
        for name, value in schema.items()
        if name not in ("doc", "namespace") and not name.startswith("__")
    }
    kind = schema["type"]
    if kind in ("record", "error"):
        tidy["fields"] = [
            {
                **{name: value for name, value in field.items() if name not in ("doc", "order")},
                "type": _tidy(field["type"]),
            }
            for field in schema["fields"]
        ]
    elif kind == "array":
        tidy["items"] = _tidy(schema["items"])
    elif kind == "map":
        tidy["values"] = _tidy(schema["values"])
    elif isinstance(kind, dict | list):
        return _tidy(kind)
    is_reference = kind not in (*_NAMED, *_UNNAMED)
    return kind if is_reference or list(tidy) == ["type"] else tidy


def _collect_named(schema: Json, named: dict[str, Json]) -> None:
    if isinstance(schema, list):
        for branch in schema:
            _collect_named(branch, named)
    elif isinstance(schema, dict):
        if schema["type"] in _NAMED:
            named[schema["name"]] = schema
        for field in schema.get("fields", ()):
            _collect_named(field["type"], named)
        _collect_named(schema.get("items"), named)
        _collect_named(schema.get("values"), named)


class _Resolution:
    """Resolves a writer's schema against a reader's."""

    def __init__(self, reader_named: dict[str, Json], writer_named: dict[str, Json]) -> None:
        self.problems: list[str] = []
        self._reader_named = reader_named
        self._writer_named = writer_named
        # Pairs of named types that were compared, or are being compared further up.
        self._seen: dict[tuple[str, str], bool] = {}

    def compare(self, reader: Json, writer: Json, where: str) -> bool:
        """Whether `reader` reads what `writer` wrote; collects the problems."""
        reader = self._reader_named.get(reader, reader) if isinstance(reader, str) else reader
        writer = self._writer_named.get(writer, writer) if isinstance(writer, str) else writer
        if isinstance(writer, list):
            fits = [self.compare(reader, branch, where) for branch in writer]
            return all(fits)
        if isinstance(reader, list):
            return self._compare_union(reader, writer, where)
        reader_kind, writer_kind = _kind(reader), _kind(writer)
        if reader_kind != writer_kind:
            if (writer_kind, reader_kind) in _PROMOTIONS:
                return True
            return self._problem(where, f"{writer_kind} is not read as {reader_kind}")
        if reader_kind == "array":
            return self.compare(reader["items"], writer["items"], f"{where}[]")
        if reader_kind == "map":
            return self.compare(reader["values"], writer["values"], f"{where}{{}}")
        if reader_kind in _NAMED:
            return self._compare_named(reader, writer, reader_kind, where)
        return self._compare_decimals(reader, writer, where)

    def _compare_union(self, reader: list[Json], writer: Json, where: str) -> bool:
        # The first branch that matches reads it, or nobody does: a later one is not tried. Some
        # readers prefer the type of the same full name, but not all of them (fastavro does not).
        for branch in reader:
            named = self._reader_named.get(branch, branch) if isinstance(branch, str) else branch
            if _matches(named, writer):
                return self.compare(named, writer, where)
        return self._problem(where, f"no branch of the union reads {_label(writer)}")

    def _compare_named(self, reader: Json, writer: Json, kind: str, where: str) -> bool:
        known = self._seen.get((reader["name"], writer["name"]))
        if known is not None:
            return known
        # A pair that is being compared counts as fitting: a recursive type fits if its parts do.
        self._seen[reader["name"], writer["name"]] = True
        fits = _has_name(reader, writer) or self._problem(
            where, f"{writer['name']} is not {reader['name']}"
        )
        if kind in ("record", "error"):
            fits = self._compare_fields(reader, writer, where) and fits
        elif kind == "enum":
            fits = self._compare_symbols(reader, writer, where) and fits
        elif reader["size"] != writer["size"]:
            fits = self._problem(
                where, f"{reader['name']} has {reader['size']} bytes and had {writer['size']}"
            )
        else:
            fits = self._compare_decimals(reader, writer, where) and fits
        self._seen[reader["name"], writer["name"]] = fits
        return fits

    def _compare_fields(self, reader: Json, writer: Json, where: str) -> bool:
        written = {field["name"]: field for field in writer["fields"]}
        fits = True
        for field in reader["fields"]:
            place = f"{where}.{field['name']}"
            names = [field["name"], *field.get("aliases", ())]
            source = next((written[name] for name in names if name in written), None)
            if source is not None:
                fits = self.compare(field["type"], source["type"], place) and fits
            elif "default" not in field:
                fits = self._problem(place, "is not written and has no default")
        return fits

    def _compare_symbols(self, reader: Json, writer: Json, where: str) -> bool:
        missing = [symbol for symbol in writer["symbols"] if symbol not in reader["symbols"]]
        if not missing or "default" in reader:
            return True
        return self._problem(where, f"{reader['name']} lacks the symbol {missing[0]}")

    def _compare_decimals(self, reader: Json, writer: Json, where: str) -> bool:
        before, after = _decimal(writer), _decimal(reader)
        if before is None or after is None or before == after:
            return True
        return self._problem(where, "a decimal has another precision or scale")

    def _problem(self, where: str, what: str) -> bool:
        self.problems.append(f"{where.lstrip('.') or 'the schema'}: {what}")
        return False


def _kind(schema: Json) -> str:
    kind = schema["type"] if isinstance(schema, dict) else schema
    return "record" if kind == "error" else str(kind)


def _matches(reader: Json, writer: Json) -> bool:
    """Whether Avro may select this branch of a union; its fields are not compared."""
    if _kind(reader) != _kind(writer):
        return (_kind(writer), _kind(reader)) in _PROMOTIONS
    if _kind(reader) not in _NAMED:
        return True
    return _has_name(reader, writer) and reader.get("size") == writer.get("size")


def _has_name(reader: Json, writer: Json) -> bool:
    name, aliases = writer["name"], reader.get("aliases", ())
    return _short(name) in (_short(reader["name"]), *aliases) or name in aliases


def _label(schema: Json) -> str:
    if isinstance(schema, dict):
        return str(schema.get("name") or schema.get("type"))
    return str(schema)


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _decimal(schema: Json) -> tuple[Json, Json] | None:
    if isinstance(schema, dict) and schema.get("logicalType") == "decimal":
        return schema.get("precision"), schema.get("scale", 0)
    return None
