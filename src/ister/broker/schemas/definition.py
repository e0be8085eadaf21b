"""The interface of a parsed schema, limits for all schema types, and reading JSON.

Does not own: any schema type.

Definitions and payloads are untrusted. Reading one gives a value or an `InvalidRequestError`, in
time and memory proportional to its size. Reasons name places and rules, never the content of a
payload, since they are logged.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, NoReturn, Protocol, Self, TypeAlias

from ister.base.limits import KIB
from ister.errors import InvalidRequestError
from ister.topic.schema_kinds import SchemaType

Json: TypeAlias = Any  # any JSON value; schemas are checked while they are walked
DEFINITION_BYTES_MAX: Final = 256 * KIB
"""The largest definition. As base64 it stays far below the limit of a metadata value; schemas
written by hand have some tens of KiB."""

DEPTH_MAX: Final = 128
"""The deepest nesting of a definition; far below the interpreter's recursion limit."""

_TEXT_SHOWN: Final = 200


class Definition(Protocol):
    """A valid, parsed schema. Immutable, thread-safe."""

    @property
    def schema_type(self) -> SchemaType:
        """The schema language."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for two texts that mean the same schema."""
        ...

    def check(self, payload: bytes) -> str | None:
        """Why a payload does not match the schema; None if it does."""
        ...

    def cannot_read(self, writer: Self) -> list[str]:
        """Why readers with this schema cannot read what was written with `writer`."""
        ...

    def breaks(self, older: Self) -> list[str]:
        """Why this schema may not follow `older`, in either direction."""
        ...


def fingerprint(canonical: bytes) -> str:
    """The fingerprint of a schema, from its canonical form."""
    return f"sha256:{hashlib.sha256(canonical).hexdigest()}"


def canonical_json(value: Json) -> bytes:
    """JSON with sorted names and no spaces; 1.0 is written as 1."""
    return json.dumps(
        _whole_numbers(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode("utf-8", "surrogatepass")


def read_json(data: bytes, what: str) -> Json:
    """Parses the JSON of a definition."""
    try:
        value = json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the {what} is not JSON: {shorten(str(error))}") from error
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
    raise InvalidRequestError(f"the {what} is nested deeper than {DEPTH_MAX} levels")


def shorten(text: str) -> str:
    """A text for an error message, cut to a maximum length."""
    return text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _whole_numbers(value: Json) -> Json:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(inner) for inner in value]
    return value
