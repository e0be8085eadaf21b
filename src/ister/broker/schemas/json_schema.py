"""JSON Schemas: reading them, telling them apart, and checking JSON against them.

Owns: which schemas are taken, and the bounds of a check. Does not own: whether one schema admits
what another does (`json_rules`).

What differs from a validator that trusts its schema:

- a `$ref` leads to a place in the schema itself or in a published meta-schema. Nothing is fetched;
- patterns are RE2's, which takes time proportional to the text. They have no look-around and no
  back-references; a schema that has them is refused;
- a check has a budget of rules that it may apply: schemas whose alternatives multiply end in a
  refusal and not in minutes;
- `format` is a remark, as the standard has it by default.

The dialect is what `$schema` says, 2020-12 without it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import jsonschema_specifications
import pyarrow as pa
import pyarrow.compute as pc
import referencing
import referencing.exceptions
import referencing.jsonschema
from jsonschema import exceptions, validators

from ister.broker.schemas.definition import (
    DEPTH_MAX,
    canonical_json,
    fingerprint,
    read_json,
    shorten,
)
from ister.broker.schemas.json_rules import JsonComparison
from ister.broker.schemas.kinds import SchemaType
from ister.errors import InvalidRequestError

__all__ = ["JsonDefinition", "read_json_schema"]

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
"""Rules that a check may apply: some microseconds each."""

_Rule: TypeAlias = Callable[[Any, Any, Any, Any], Any]


class _TooCostlyError(Exception):
    """The check has used up its budget."""


class _Budget(threading.local):
    """What is left of the check that runs on this thread."""

    left = 0

    def spend(self, rules: int) -> None:
        """Takes some away.

        Raises:
            _TooCostlyError: There is none left.
        """
        self.left -= rules
        if self.left < 0:
            raise _TooCostlyError


_budget: Final = _Budget()


class JsonDefinition:
    """A JSON Schema. Immutable, thread-safe."""

    schema_type: Final = SchemaType.JSON_SCHEMA

    def __init__(self, schema: Any, dialect: str) -> None:  # noqa: ANN401 - JSON
        self.schema = schema
        self.fingerprint = fingerprint(canonical_json(schema))
        self._validator = _BOUNDED[dialect](schema, registry=jsonschema_specifications.REGISTRY)

    def check(self, payload: bytes) -> str | None:
        """Why a payload is not JSON that the schema admits; None if it is."""
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
        """What `writer` admits and this schema does not, as far as rules can tell."""
        comparison = JsonComparison(self.schema, writer.schema)
        try:
            return comparison.run()
        except RecursionError:
            return ["the schemas are nested too deep to be compared"]

    def breaks(self, older: JsonDefinition) -> list[str]:
        """Nothing: the comparison says it all."""
        return []


def read_json_schema(data: bytes) -> JsonDefinition:
    """Reads a JSON Schema.

    Raises:
        InvalidRequestError: It is none, or one that is not taken; see the module header.
    """
    schema = read_json(data, "JSON Schema")
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError("a JSON Schema is an object, true or false")
    dialect = _DEFAULT_DIALECT
    if isinstance(schema, dict) and "$schema" in schema:
        dialect = str(schema["$schema"]).removesuffix("#")
        if dialect not in _DIALECTS:
            raise InvalidRequestError(
                f"there is no JSON Schema dialect {shorten(dialect)!r}",
                hint="drafts 4, 6, 7, 2019-09 and 2020-12 are known",
            )
    try:
        _DIALECTS[dialect].check_schema(schema, format_checker=None)
        _Survey(dialect).walk(schema)
        return JsonDefinition(schema, dialect)
    except exceptions.SchemaError as error:
        raise InvalidRequestError(f"the JSON Schema is wrong: {_describe(error)}") from error
    except (RecursionError, ValueError, TypeError, LookupError, AttributeError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        # What the library stumbles over in a schema that its meta-schema lets through.
        raise InvalidRequestError(
            f"the JSON Schema is wrong: {shorten(str(error)) or type(error).__name__}"
        ) from error


# -- what a schema may say ------------------------------------------------------------------


class _Survey:
    """Looks at every place of a schema where a schema stands."""

    def __init__(self, dialect: str) -> None:
        self._specification = referencing.jsonschema.specification_with(dialect)
        self._patterns: set[str] = set()
        self._has_pattern_names = False
        self._has_unevaluated = False

    def walk(self, schema: Any) -> None:  # noqa: ANN401 - JSON
        resource = self._specification.create_resource(schema)
        base = resource.id() or ""
        registry = jsonschema_specifications.REGISTRY.with_resource(base, resource)
        self._walk(resource, registry.resolver(base), DEPTH_MAX)
        if self._has_pattern_names and self._has_unevaluated:
            raise InvalidRequestError(
                "patternProperties and unevaluatedProperties in one schema are not taken",
                hint="use additionalProperties",
            )

    def _walk(self, resource: Any, resolver: Any, depth: int) -> None:  # noqa: ANN401 - referencing's
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

    def _check_reference(self, resolver: Any, reference: Any) -> None:  # noqa: ANN401
        try:
            resolver.lookup(reference)
        except (referencing.exceptions.Unresolvable, ValueError, LookupError, TypeError) as error:
            raise InvalidRequestError(
                f"the reference {shorten(str(reference))!r} leads nowhere in the schema",
                hint="definitions are part of the schema; none are fetched",
            ) from error

    def _check_pattern(self, pattern: Any) -> None:  # noqa: ANN401 - JSON
        if pattern in self._patterns:
            return
        self._patterns.add(pattern)
        if len(self._patterns) > _PATTERNS_MAX:
            raise InvalidRequestError(f"more than {_PATTERNS_MAX} patterns in a JSON Schema")
        try:
            _matches(pattern, "")
        except (pa.ArrowException, TypeError) as error:
            raise InvalidRequestError(
                f"the pattern {shorten(str(pattern))!r} is not taken",
                hint="patterns are RE2's: without look-around and back-references",
            ) from error


_UNICODE_ESCAPE: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\u([0-9a-fA-F]{4})")


def _matches(pattern: str, text: str) -> bool:
    """Whether a pattern is found in a text, by RE2."""
    translated = _UNICODE_ESCAPE.sub(r"\1\\x{\2}", pattern)
    return bool(pc.match_substring_regex(pa.scalar(text, pa.string()), pattern=translated).as_py())


# -- the rules that are ours ----------------------------------------------------------------


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:  # noqa: ANN401
    if validator.is_type(instance, "string") and not _matches(pattern, instance):
        yield exceptions.ValidationError("the text does not match")


def _pattern_properties(
    validator: Any,  # noqa: ANN401
    patterns: Mapping[str, Any],
    instance: Any,  # noqa: ANN401
    schema: Any,  # noqa: ANN401
) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, inner in patterns.items():
        _budget.spend(len(instance))
        for name, value in instance.items():
            if _matches(pattern, name):
                yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any,  # noqa: ANN401
    additional: Any,  # noqa: ANN401
    instance: Any,  # noqa: ANN401
    schema: Any,  # noqa: ANN401
) -> Iterator[Any]:
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
        yield exceptions.ValidationError("there are properties that the schema does not name")


def _unique_items(validator: Any, is_wanted: bool, instance: Any, schema: Any) -> Iterator[Any]:  # noqa: ANN401
    if is_wanted and validator.is_type(instance, "array"):
        _budget.spend(len(instance))
        if len({canonical_json(item) for item in instance}) != len(instance):
            yield exceptions.ValidationError("an item is there twice")


_OURS: Final[dict[str, _Rule]] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
}


def _counted(rule: _Rule) -> _Rule:
    def apply(validator: Any, value: Any, instance: Any, schema: Any) -> Any:  # noqa: ANN401
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


def _refuse_constant(name: str) -> Any:  # noqa: ANN401 - never returns
    raise ValueError(name)


def _describe(error: Any) -> str:  # noqa: ANN401 - jsonschema's
    """Where something is wrong and which rule says so, without the value that is wrong."""
    place = "".join(f"/{part}" for part in error.absolute_path) or "the whole"
    rule, wanted = error.validator, error.validator_value
    if rule == "required" and isinstance(error.instance, dict):
        wanted = next((name for name in wanted if name not in error.instance), wanted)
    elif rule not in ("type", "minimum", "maximum", "minLength", "maxLength", "enum", "const"):
        wanted = None
    told = f" ({shorten(json.dumps(wanted))})" if wanted is not None else ""
    return f"{shorten(place)} is against the rule {rule!r}{told}"
