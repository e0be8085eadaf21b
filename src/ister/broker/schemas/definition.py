"""What every kind of schema can do once its text has been read, and the bounds that all keep to.

Owns: the seam between the registry and the kinds of schemas, and reading JSON that a stranger
sent. Does not own: any kind of schema.

A definition comes from outside, and so does a payload. Whatever they are, the answer is a value or
an `InvalidRequestError`, in time and memory that grow with their size and not faster. Reasons name
places and rules, never the contents of a payload: they end up in logs.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, NoReturn, Protocol

from ister.broker.schemas.kinds import SchemaType
from ister.errors import InvalidRequestError
from ister.limits import KIB

__all__ = [
    "DEFINITION_BYTES_MAX",
    "DEPTH_MAX",
    "Definition",
    "canonical_json",
    "fingerprint",
    "read_json",
    "shorten",
]

DEFINITION_BYTES_MAX: Final = 256 * KIB
"""A schema's text. Stored as base64 with its description it stays far below a metadata value's
limit; the largest that people write by hand are some tens of KiB."""

DEPTH_MAX: Final = 128
"""How deep a definition may be nested: far beyond what anybody reads, and far from the end of the
interpreter's stack."""

_TEXT_SHOWN: Final = 200


class Definition(Protocol):
    """A schema whose text has been read and found good. Immutable, thread-safe."""

    @property
    def schema_type(self) -> SchemaType:
        """What it is written in."""
        ...

    @property
    def fingerprint(self) -> str:
        """The same for two texts that mean the same schema."""
        ...

    def check(self, payload: bytes) -> str | None:
        """Why a payload does not fit; None if it does."""
        ...

    def cannot_read(self, writer: Any) -> list[str]:  # noqa: ANN401 - a schema of the same type
        """Why readers with this schema could not read what is written with `writer`."""
        ...

    def breaks(self, older: Any) -> list[str]:  # noqa: ANN401 - a schema of the same type
        """What is wrong with following on `older`, whoever reads."""
        ...


def fingerprint(canonical: bytes) -> str:
    """The fingerprint of a schema, from the one form that all its spellings have in common."""
    return f"sha256:{hashlib.sha256(canonical).hexdigest()}"


def canonical_json(value: Any) -> bytes:  # noqa: ANN401 - JSON
    """JSON with sorted names and no space. 1.0 and 1 are the same number."""
    return json.dumps(
        _whole_numbers(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode("utf-8", "surrogatepass")


def read_json(data: bytes, what: str) -> Any:  # noqa: ANN401 - JSON
    """Reads the JSON of a definition.

    Raises:
        InvalidRequestError: It is no JSON, or nested too deep.
    """
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
    """A text for an error, cut if somebody made it long."""
    return text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _whole_numbers(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(inner) for inner in value]
    return value
