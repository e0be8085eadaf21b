"""Compatibility of JSON Schemas by rules, since a proof is out of reach.

`reader` must accept what was written for `writer`. Types, enumerations, bounds, objects and arrays
are compared recursively. Two rules go beyond accepting and refusing:

- a reader may add an optional property, although a writer that allows any properties could have
  used the name for something else: this is how schemas grow;
- the reader must know every required property of the writer. So required properties are neither
  added nor removed, in either direction.

Other rules (`not`, `if`, patterns, ...) must stay equal; a reader may drop them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from ister.broker.schemas.definition import Json, canonical_json, shorten

_TYPES: Final = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
_LOWER: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_UNJUDGED: Final = (
    "pattern",
    "patternProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
)
_Object: TypeAlias = dict[str, Json]
_Pair: TypeAlias = tuple[int, int]
_PAIRS_MAX: Final = 20_000
_PROBLEMS_MAX: Final = 50


class _Misfit(NamedTuple):
    """The first problem of a pair that does not fit."""

    where: str
    """Path relative to the pair."""
    what: str


class JsonComparison:
    """Compares two schemas."""

    def __init__(self, reader: Json, writer: Json) -> None:
        self._reader_root = reader
        self._writer_root = writer
        self._problems: list[tuple[str, str]] = []
        # Pairs that were compared, or are being compared further up and count as fitting: schemas
        # may be recursive. The comparison keeps the schemas alive, so ids are not reused.
        self._seen: dict[_Pair, _Misfit | None] = {}
        self._fitting: list[_Pair] = []
        self._pairs_left = _PAIRS_MAX
        self._kept: list[Json] = []
        definitions = [
            canonical_json([root.get("$defs"), root.get("definitions")])
            for root in (reader, writer)
            if isinstance(root, dict)
        ]
        self._has_same_definitions = len(set(definitions)) <= 1

    def run(self) -> list[str]:
        """The incompatibilities; empty if there are none."""
        self._compare(self._reader_root, self._writer_root, "")
        return [f"{shorten(where) or 'the whole'}: {what}" for where, what in self._problems]

    def _compare(self, reader: Json, writer: Json, where: str) -> bool:
        reader = _resolve(reader, self._reader_root)
        writer = _resolve(writer, self._writer_root)
        if reader is None or writer is None:
            return self._problem(where, "a reference cannot be resolved")
        pair = id(reader), id(writer)
        if pair in self._seen:
            misfit = self._seen[pair]
            # What was found then may have been dropped, because another alternative fitted.
            return misfit is None or self._problem(where + misfit.where, misfit.what)
        self._pairs_left -= 1
        if self._pairs_left < 0:
            return self._problem(where, "the schemas are too large to compare")
        if reader is True or reader == {} or writer is False:
            return True
        if reader is False:
            return self._problem(where, "nothing is accepted now")
        self._seen[pair] = None
        before, found = len(self._fitting), len(self._problems)
        self._fitting.append(pair)
        if self._compare_rules(reader, {} if writer is True else writer, where):
            return True
        # Those that fitted since may do so only if this pair does.
        for later in self._fitting[before:]:
            del self._seen[later]
        del self._fitting[before:]
        at, what = next(iter(self._problems[found:]), (where, "something is not accepted now"))
        self._seen[pair] = _Misfit(at.removeprefix(where), what)
        return False

    def _compare_rules(self, reader: _Object, writer: _Object, where: str) -> bool:
        if not _alternatives(reader) and _alternatives(writer):
            merged = self._merge_alternatives(writer)
            fits = [self._compare(reader, branch, where) for branch in merged]
            return all(fits)
        fits = [
            self._compare_types(reader, writer, where),
            self._compare_values(reader, writer, where),
            self._compare_bounds(reader, writer, where),
            self._compare_unjudged(reader, writer, where),
            self._compare_all_of(reader, writer, where),
            self._compare_alternatives(reader, writer, where),
        ]
        types = _types(writer) & _types(reader)
        if "object" in types:
            fits.append(self._compare_objects(reader, writer, where))
        if "array" in types:
            fits.append(self._compare_arrays(reader, writer, where))
        return all(fits)

    # -- values -----------------------------------------------------------------------------

    def _compare_types(self, reader: _Object, writer: _Object, where: str) -> bool:
        if "enum" in writer or "const" in writer:
            written = {_type_of(value) for value in _values(writer) or ()}
        else:
            written = set(_types(writer))
        read = _types(reader)
        missing = written - read
        if "number" in read:
            missing.discard("integer")
        if not missing:
            return True
        if "type" not in writer and "enum" not in writer and "const" not in writer:
            return self._problem(where, f"only {_names(read)} is accepted; every type was")
        return self._problem(where, f"{_names(missing)} is not accepted, only {_names(read)}")

    def _compare_values(self, reader: _Object, writer: _Object, where: str) -> bool:
        accepted = _values(reader)
        if accepted is None:
            return True
        written = _values(writer)
        if written is None:
            return self._problem(where, "only listed values are accepted")
        known = {canonical_json(value) for value in accepted}
        for value in written:
            if canonical_json(value) not in known:
                shown = shorten(canonical_json(value).decode(errors="replace"))
                return self._problem(where, f"the value {shown} is not accepted")
        return True

    def _compare_bounds(self, reader: _Object, writer: _Object, where: str) -> bool:
        fits = True
        for names, is_narrower in ((_LOWER, _is_above), (_UPPER, _is_below)):
            for name in names:
                if reader.get(name) == 0 and name.startswith("min") and name != "minimum":
                    continue
                if name in reader and is_narrower(reader[name], writer.get(name)):
                    fits = self._problem(where, f"{name} is narrower")
        if "multipleOf" in reader and not _divides(reader["multipleOf"], writer.get("multipleOf")):
            fits = self._problem(where, "multipleOf is narrower")
        if reader.get("uniqueItems") and not writer.get("uniqueItems"):
            fits = self._problem(where, "items must be unique now")
        return fits

    def _compare_unjudged(self, reader: _Object, writer: _Object, where: str) -> bool:
        fits = True
        for name in _UNJUDGED:
            if name not in reader or (name in ("then", "else") and "if" not in reader):
                continue
            if not self._is_same(reader[name], writer.get(name)):
                fits = self._problem(where, f"{name} is new or different")
        return fits

    def _is_same(self, reader: Json, writer: Json) -> bool:
        text = canonical_json(reader)
        if text != canonical_json(writer):
            return False
        return self._has_same_definitions or b'"$ref"' not in text

    def _compare_all_of(self, reader: _Object, writer: _Object, where: str) -> bool:
        fits = True
        written = writer.get("allOf", ())
        for part in reader.get("allOf", ()):
            noted = len(self._problems)
            if any(self._compare(part, other, where) for other in (*written, writer)):
                del self._problems[noted:]
            else:
                del self._problems[noted:]
                fits = self._problem(where, "a part of allOf is new or narrower")
        return fits

    def _merge_alternatives(self, schema: _Object) -> list[Json]:
        """Each alternative merged with the rules beside them."""
        common = {name: rule for name, rule in schema.items() if name not in ("anyOf", "oneOf")}
        merged = []
        for branch in _alternatives(schema):
            found = _resolve(branch, self._writer_root)
            merged.append({**common, **found} if isinstance(found, dict) else common)
        self._kept.append(merged)
        return merged

    def _compare_alternatives(self, reader: _Object, writer: _Object, where: str) -> bool:
        fits = True
        for name in ("anyOf", "oneOf"):
            if name not in reader:
                continue
            written = _alternatives(writer) or self._split_types(writer)
            for branch in written:
                if not self._accepts_somewhere(reader[name], branch, where):
                    fits = self._problem(where, f"no alternative of {name} accepts it")
        return fits

    def _split_types(self, schema: _Object) -> list[Json]:
        """One schema per type, since alternatives usually differ by type."""
        types = schema.get("type")
        if not isinstance(types, list):
            return [schema]
        split = [{**schema, "type": kind} for kind in types]
        self._kept.append(split)
        return split

    def _accepts_somewhere(self, branches: list[Json], writer: Json, where: str) -> bool:
        noted = len(self._problems)
        fits = any(self._compare(branch, writer, where) for branch in branches)
        del self._problems[noted:]
        return fits

    # -- objects and arrays -----------------------------------------------------------------

    def _compare_objects(self, reader: _Object, writer: _Object, where: str) -> bool:
        known, written = reader.get("properties", {}), writer.get("properties", {})
        others = reader.get("additionalProperties", True)
        written_others = writer.get("additionalProperties", True)
        always = set(_names_list(writer.get("required")))
        fits = True
        for name in _names_list(reader.get("required")):
            if name not in always:
                fits = self._problem(f"{where}/{name}", "is required now")
        for name, inner in known.items():
            place = f"{where}/{name}"
            if name in written:
                fits = self._compare(inner, written[name], place) and fits
            elif isinstance(written_others, dict) and written_others:
                fits = self._compare(inner, written_others, place) and fits
        for name, inner in written.items():
            place = f"{where}/{name}"
            if name in known or reader.get("patternProperties"):
                continue
            if others is False:
                fits = self._problem(place, "is not accepted now")
            elif isinstance(others, dict) and others:
                fits = self._compare(others, inner, place) and fits
            elif name in always:
                fits = self._problem(place, "is required, and only one side knows it")
        return self._compare_others(others, written_others, where) and fits

    def _compare_others(self, reader: Json, writer: Json, where: str) -> bool:
        if reader is True or reader == {} or writer is False:
            return True
        if writer is True or writer == {}:
            return self._problem(where, "additional properties are not accepted now")
        return self._compare(reader, writer, f"{where}/*")

    def _compare_arrays(self, reader: _Object, writer: _Object, where: str) -> bool:
        first, rest = _items(reader)
        written_first, written_rest = _items(writer)
        fits = True
        for index in range(max(len(first), len(written_first))):
            item = first[index] if index < len(first) else rest
            written = written_first[index] if index < len(written_first) else written_rest
            fits = self._compare(item, written, f"{where}/{index}") and fits
        return self._compare(rest, written_rest, f"{where}/[]") and fits

    def _problem(self, where: str, what: str) -> bool:
        if len(self._problems) < _PROBLEMS_MAX:
            self._problems.append((where, what))
        return False


def _alternatives(schema: _Object) -> list[Json]:
    return schema.get("anyOf") or schema.get("oneOf") or []


def _resolve(schema: Json, root: Json) -> Json:
    """Resolves a reference; None if it leaves the schema or is circular."""
    for _ in range(100):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        reference = schema["$ref"]
        if reference == "#":
            schema = root
        elif reference.startswith("#/"):
            schema = _follow(root, reference[2:])
        else:
            return None
    return None


def _follow(root: Json, pointer: str) -> Json:
    for part in pointer.split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, dict) and name in root:
            root = root[name]
        elif isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        else:
            return None
    return root


def _types(schema: _Object) -> frozenset[str]:
    given = schema.get("type")
    if given is None:
        return _TYPES
    return frozenset([given] if isinstance(given, str) else given)


def _values(schema: _Object) -> list[Json] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _type_of(value: Json) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    for kind, name in ((float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def _items(schema: _Object) -> tuple[list[Json], Json]:
    """The schemas of the first items and of the others, for every draft."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    return schema.get("prefixItems", []), items


def _names_list(required: Json) -> list[str]:
    return required if isinstance(required, list) else []


def _names(types: frozenset[str] | set[str]) -> str:
    return " or ".join(sorted(types))


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_above(bound: Json, before: Json) -> bool:
    return _compare_numbers(bound, before, lambda new, old: new > old)


def _is_below(bound: Json, before: Json) -> bool:
    return _compare_numbers(bound, before, lambda new, old: new < old)


def _compare_numbers(bound: Json, before: Json, is_narrower: Callable[[Json, Json], bool]) -> bool:
    """Whether a bound is narrower. The boolean bounds of draft 4 must stay equal."""
    if _is_number(bound) and _is_number(before):
        return is_narrower(bound, before)
    return bool(bound != before)


def _divides(wanted: Json, before: Json) -> bool:
    if not _is_number(before):
        return False
    try:
        return bool(before % wanted == 0)
    except (ZeroDivisionError, OverflowError):
        return False
