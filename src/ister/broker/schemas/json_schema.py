"""JSON Schemas: parsing, and checking JSON payloads in bounded time.

Does not own: compatibility (`json_rules`). Since schemas are untrusted:

- a `$ref` resolves inside the schema or to a published meta-schema; nothing is fetched;
- patterns are matched by RE2, in time proportional to the text; schemas with look-around or
  back-references are refused;
- a check has a budget of rules, so that schemas with multiplying alternatives end in a refusal;
- `format` is not checked, which is the standard's default.

The dialect is that of `$schema`, or 2020-12.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NoReturn, TypeAlias

import jsonschema_specifications
import pyarrow as pa
import pyarrow.compute as pc
import referencing
import referencing.exceptions
import referencing.jsonschema
from jsonschema import exceptions, validators

from ister.broker.schemas.definition import (
    DEPTH_MAX,
    Json,
    canonical_json,
    fingerprint,
    read_json,
    shorten,
)
from ister.broker.schemas.json_rules import JsonComparison
from ister.errors import InvalidRequestError
from ister.topic.schema_kinds import SchemaType

_DIALECTS: Final = {
    "http://json-schema.org/draft-04/schema": validators.Draft4Validator,
    "http://json-schema.org/draft-06/schema": validators.Draft6Validator,
    "http://json-schema.org/draft-07/schema": validators.Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": validators.Draft201909Validator,
    "https://json-schema.org/draft/2020-12/schema": validators.Draft202012Validator,
}
_DEFAULT_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_PATTERNS_MAX: Final = 1000
_RULES_FREE: Final = 20_000
_RULES_PER_BYTE: Final = 4
_RULES_MAX: Final = 1_000_000
"""The most rules that a check may apply, at some microseconds each."""

_Rule: TypeAlias = Callable[[Json, Json, Json, Json], Json]


class _TooCostlyError(Exception):
    """The check has used up its budget."""


class _Budget(threading.local):
    """The rules left to the check that runs on this thread."""

    left = 0

    def spend(self, rules: int) -> None:
        """Uses up rules."""
        self.left -= rules
        if self.left < 0:
            raise _TooCostlyError


_budget: Final = _Budget()


class JsonDefinition:
    """A JSON Schema. Immutable, thread-safe."""

    schema_type: Final = SchemaType.JSON_SCHEMA

    def __init__(self, schema: Json, dialect: str) -> None:
        self.schema = schema
        self.fingerprint = fingerprint(canonical_json(schema))
        self._validator = _BOUNDED[dialect](schema, registry=jsonschema_specifications.REGISTRY)

    def check(self, payload: bytes) -> str | None:
        """Why a payload is not JSON that the schema accepts; None if it is."""
        try:
            value = json.loads(payload.decode(), parse_constant=_refuse_constant)
        except UnicodeDecodeError as error:
            return f"byte {error.start} is not UTF-8"
        except json.JSONDecodeError as error:
            return f"not JSON: {error.msg} at character {error.pos}"
        except (ValueError, RecursionError):
            return "not JSON: a number out of bounds, or nested too deep"
        _budget.left = min(_RULES_FREE + _RULES_PER_BYTE * len(payload), _RULES_MAX)
        try:
            found = next(self._validator.iter_errors(value), None)
        except _TooCostlyError:
            return "the schema has too many alternatives for a payload like this"
        except (RecursionError, referencing.exceptions.Unresolvable, OverflowError):
            return "the payload, or the schema for it, is nested too deep"
        return None if found is None else _describe(found)

    def cannot_read(self, writer: JsonDefinition) -> list[str]:
        """What `writer` accepts and this schema does not, as far as the rules tell."""
        comparison = JsonComparison(self.schema, writer.schema)
        try:
            return comparison.run()
        except RecursionError:
            return ["the schemas are nested too deep to be compared"]

    def breaks(self, older: JsonDefinition) -> list[str]:
        """Finds no problems: the comparison covers all rules."""
        return []


def read_json_schema(data: bytes) -> JsonDefinition:
    """Parses a JSON Schema."""
    schema = read_json(data, "JSON Schema")
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError("a JSON Schema must be an object, true or false")
    dialect = _DEFAULT_DIALECT
    if isinstance(schema, dict) and "$schema" in schema:
        dialect = str(schema["$schema"]).removesuffix("#")
        if dialect not in _DIALECTS:
            raise InvalidRequestError(
                f"unknown JSON Schema dialect {shorten(dialect)!r}",
                hint="use draft 4, 6, 7, 2019-09 or 2020-12",
            )
    try:
        _DIALECTS[dialect].check_schema(schema, format_checker=None)
        _SchemaCheck(dialect).walk(schema)
        return JsonDefinition(schema, dialect)
    except exceptions.SchemaError as error:
        raise InvalidRequestError(f"invalid JSON Schema: {_describe(error)}") from error
    except (RecursionError, ValueError, TypeError, LookupError, AttributeError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        # The library fails on some schemas that its meta-schema accepts.
        raise InvalidRequestError(
            f"invalid JSON Schema: {shorten(str(error)) or type(error).__name__}"
        ) from error


# -- what a schema may say ------------------------------------------------------------------


class _SchemaCheck:
    """Checks the references and patterns of a schema and all schemas in it."""

    def __init__(self, dialect: str) -> None:
        self._specification = referencing.jsonschema.specification_with(dialect)
        self._patterns: set[str] = set()
        self._has_pattern_names = False
        self._has_unevaluated = False

    def walk(self, schema: Json) -> None:
        resource = self._specification.create_resource(schema)
        base = resource.id() or ""
        registry = jsonschema_specifications.REGISTRY.with_resource(base, resource)
        self._walk(resource, registry.resolver(base), DEPTH_MAX)
        if self._has_pattern_names and self._has_unevaluated:
            raise InvalidRequestError(
                "patternProperties and unevaluatedProperties cannot be used in one schema",
                hint="use additionalProperties",
            )

    def _walk(self, resource: Json, resolver: Json, depth: int) -> None:
        if depth == 0:
            raise InvalidRequestError("the JSON Schema is nested too deep")
        schema = resource.contents
        if isinstance(schema, dict):
            for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
                if keyword in schema:
                    self._check_reference(resolver, schema[keyword])
            if "pattern" in schema:
                self._check_pattern(schema["pattern"])
            for pattern in schema.get("patternProperties", ()):
                self._has_pattern_names = True
                self._check_pattern(pattern)
            self._has_unevaluated |= "unevaluatedProperties" in schema
        for inner in resource.subresources():
            self._walk(inner, resolver.in_subresource(inner), depth - 1)

    def _check_reference(self, resolver: Json, reference: Json) -> None:
        try:
            resolver.lookup(reference)
        except (referencing.exceptions.Unresolvable, ValueError, LookupError, TypeError) as error:
            raise InvalidRequestError(
                f"the reference {shorten(str(reference))!r} cannot be resolved",
                hint="put all definitions into the schema; none are fetched",
            ) from error

    def _check_pattern(self, pattern: Json) -> None:
        if pattern in self._patterns:
            return
        self._patterns.add(pattern)
        if len(self._patterns) > _PATTERNS_MAX:
            raise InvalidRequestError(f"more than {_PATTERNS_MAX} patterns in a JSON Schema")
        try:
            _matches(pattern, "")
        except (pa.ArrowException, TypeError) as error:
            raise InvalidRequestError(
                f"unsupported pattern {shorten(str(pattern))!r}",
                hint="use RE2 syntax, without look-around and back-references",
            ) from error


_UNICODE_ESCAPE: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\u([0-9a-fA-F]{4})")


def _matches(pattern: str, text: str) -> bool:
    """Whether RE2 finds a pattern in a text."""
    translated = _UNICODE_ESCAPE.sub(r"\1\\x{\2}", pattern)
    return bool(pc.match_substring_regex(pa.scalar(text, pa.string()), pattern=translated).as_py())


# -- the rules that are ours ----------------------------------------------------------------


def _pattern(validator: Json, pattern: str, instance: Json, schema: Json) -> Iterator[Json]:
    if validator.is_type(instance, "string") and not _matches(pattern, instance):
        yield exceptions.ValidationError("the text does not match")


def _pattern_properties(
    validator: Json,
    patterns: Mapping[str, Json],
    instance: Json,
    schema: Json,
) -> Iterator[Json]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, inner in patterns.items():
        _budget.spend(len(instance))
        for name, value in instance.items():
            if _matches(pattern, name):
                yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional_properties(
    validator: Json,
    additional: Json,
    instance: Json,
    schema: Json,
) -> Iterator[Json]:
    if not validator.is_type(instance, "object"):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    _budget.spend(len(instance) * len(patterns))
    others = [
        name
        for name in instance
        if name not in known and not any(_matches(pattern, name) for pattern in patterns)
    ]
    if validator.is_type(additional, "object"):
        for name in others:
            yield from validator.descend(instance[name], additional, path=name)
    elif not additional and others:
        yield exceptions.ValidationError("there are additional properties")


def _unique_items(validator: Json, is_wanted: bool, instance: Json, schema: Json) -> Iterator[Json]:
    if is_wanted and validator.is_type(instance, "array"):
        _budget.spend(len(instance))
        if len({canonical_json(item) for item in instance}) != len(instance):
            yield exceptions.ValidationError("items are not unique")


_OURS: Final[dict[str, _Rule]] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
}


def _counted(rule: _Rule) -> _Rule:
    def apply(validator: Json, value: Json, instance: Json, schema: Json) -> Json:
        _budget.spend(1)
        return rule(validator, value, instance, schema)

    return apply


_BOUNDED: Final = {
    name: validators.extend(
        dialect,
        {
            keyword: _counted(_OURS.get(keyword, rule))
            for keyword, rule in dialect.VALIDATORS.items()
        },
    )
    for name, dialect in _DIALECTS.items()
}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _describe(error: exceptions._Error) -> str:
    """The place and the rule of an error, without the value."""
    place = "".join(f"/{part}" for part in error.absolute_path) or "the whole"
    rule, wanted = error.validator, error.validator_value
    if rule == "required" and isinstance(error.instance, dict):
        wanted = next((name for name in wanted if name not in error.instance), wanted)
    elif rule not in ("type", "minimum", "maximum", "minLength", "maxLength", "enum", "const"):
        wanted = None
    told = f" ({shorten(json.dumps(wanted))})" if wanted is not None else ""
    return f"{shorten(place)} violates {rule!r}{told}"
