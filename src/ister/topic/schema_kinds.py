"""Schema types, compatibility modes and validation policies, in the spellings of Danube's clients.

Names are read in any case, and stored and returned in lower case.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeVar

from ister.errors import InvalidRequestError

_Word = TypeVar("_Word", bound=StrEnum)


class SchemaType(StrEnum):
    """The language of a definition."""

    BYTES = "bytes"
    STRING = "string"
    NUMBER = "number"
    AVRO = "avro"
    JSON_SCHEMA = "json_schema"
    PROTOBUF = "protobuf"


class CompatibilityMode(StrEnum):
    """How a new version must be compatible with the latest one."""

    NONE = "none"
    """Any version is accepted."""
    BACKWARD = "backward"
    """Readers with the new version can read messages of the old one."""
    FORWARD = "forward"
    """Readers with the old version can read messages of the new one."""
    FULL = "full"
    """Backward and forward."""


class ValidationPolicy(StrEnum):
    """What happens to a message that does not match its topic's schema."""

    NONE = "none"
    """Messages are not checked."""
    WARN = "warn"
    """It is accepted, counted and logged."""
    ENFORCE = "enforce"
    """It is refused."""


NUMBER_WIDTHS: Final = {"int": 4, "float": 4, "int64": 8, "double": 8}
"""The number types that a definition may name, with their sizes in bytes."""

_TYPE_NAMES: Final = {
    **{kind.value: kind for kind in SchemaType},
    **dict.fromkeys(NUMBER_WIDTHS, SchemaType.NUMBER),
    "json": SchemaType.JSON_SCHEMA,
    "jsonschema": SchemaType.JSON_SCHEMA,
    "proto": SchemaType.PROTOBUF,
}


def parse_schema_type(text: str) -> SchemaType:
    """Parses the name of a schema type, or an alias."""
    found = _TYPE_NAMES.get(text.lower())
    if found is None:
        raise InvalidRequestError(
            f"unknown schema type {text[:40]!r}", hint=f"use one of {', '.join(SchemaType)}"
        )
    return found


def parse_mode(text: str) -> CompatibilityMode:
    """Parses the name of a compatibility mode."""
    return _parse(CompatibilityMode, "compatibility mode", text)


def parse_policy(text: str) -> ValidationPolicy:
    """Parses the name of a validation policy."""
    return _parse(ValidationPolicy, "validation policy", text)


def _parse(words: type[_Word], what: str, text: str) -> _Word:
    try:
        return words(text.lower())
    except ValueError:
        raise InvalidRequestError(
            f"unknown {what} {text[:40]!r}", hint=f"use one of {', '.join(words)}"
        ) from None
