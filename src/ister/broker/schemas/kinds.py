"""The words of the registry: types of schemas, modes of compatibility, policies of topics.

Owns: their spellings, those of Danube's clients included. Whatever case they come in, they are
stored and answered in lower case.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeVar

from ister.errors import InvalidRequestError

__all__ = [
    "NUMBER_WIDTHS",
    "CompatibilityMode",
    "SchemaType",
    "ValidationPolicy",
    "parse_mode",
    "parse_policy",
    "parse_schema_type",
]

_Word = TypeVar("_Word", bound=StrEnum)


class SchemaType(StrEnum):
    """What a definition is written in."""

    BYTES = "bytes"
    STRING = "string"
    NUMBER = "number"
    AVRO = "avro"
    JSON_SCHEMA = "json_schema"
    PROTOBUF = "protobuf"


class CompatibilityMode(StrEnum):
    """What a new version owes to the latest one."""

    NONE = "none"
    """Nothing."""
    BACKWARD = "backward"
    """Readers with the new version read what was written with the old one."""
    FORWARD = "forward"
    """Readers with the old version read what is written with the new one."""
    FULL = "full"
    """Both."""


class ValidationPolicy(StrEnum):
    """What happens to a message that does not fit its topic's schema."""

    NONE = "none"
    """Nothing: nobody looks."""
    WARN = "warn"
    """It is accepted, counted and logged."""
    ENFORCE = "enforce"
    """It is refused."""


NUMBER_WIDTHS: Final = {"int": 4, "float": 4, "int64": 8, "double": 8}
"""The numbers that a definition may name, and the bytes that each takes."""

_TYPE_NAMES: Final = {
    **{kind.value: kind for kind in SchemaType},
    **dict.fromkeys(NUMBER_WIDTHS, SchemaType.NUMBER),
    "json": SchemaType.JSON_SCHEMA,
    "jsonschema": SchemaType.JSON_SCHEMA,
    "proto": SchemaType.PROTOBUF,
}


def parse_schema_type(text: str) -> SchemaType:
    """Reads the name of a type, or another name for it.

    Raises:
        InvalidRequestError: There is no such type.
    """
    found = _TYPE_NAMES.get(text.lower())
    if found is None:
        raise InvalidRequestError(
            f"there is no schema type {text[:40]!r}",
            hint=f"the types are {', '.join(SchemaType)}",
        )
    return found


def parse_mode(text: str) -> CompatibilityMode:
    """Reads the name of a compatibility mode.

    Raises:
        InvalidRequestError: There is no such mode.
    """
    return _parse(CompatibilityMode, "compatibility mode", text)


def parse_policy(text: str) -> ValidationPolicy:
    """Reads the name of a validation policy.

    Raises:
        InvalidRequestError: There is no such policy.
    """
    return _parse(ValidationPolicy, "validation policy", text)


def _parse(words: type[_Word], what: str, text: str) -> _Word:
    try:
        return words(text.lower())
    except ValueError:
        raise InvalidRequestError(
            f"there is no {what} {text[:40]!r}", hint=f"it is one of {', '.join(words)}"
        ) from None
