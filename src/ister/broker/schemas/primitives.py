"""Schemas without structure: bytes, strings, numbers.

A string is UTF-8. A number has four or eight bytes; a definition that names its type (`int`,
`float`, `int64`, `double`) fixes the size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ister.broker.schemas.definition import fingerprint
from ister.topic.schema_kinds import NUMBER_WIDTHS, SchemaType


@dataclass(frozen=True, slots=True)
class BytesDefinition:
    """Any bytes."""

    schema_type: SchemaType = SchemaType.BYTES
    fingerprint: str = fingerprint(b"bytes")

    def check(self, payload: bytes) -> str | None:
        """Accepts every payload."""
        return None

    def cannot_read(self, writer: Self) -> list[str]:
        """Finds no problems: one such schema reads all others."""
        return []

    def breaks(self, older: Self) -> list[str]:
        """Finds no problems."""
        return []


@dataclass(frozen=True, slots=True)
class StringDefinition(BytesDefinition):
    """Text in UTF-8."""

    schema_type: SchemaType = SchemaType.STRING
    fingerprint: str = fingerprint(b"string")

    def check(self, payload: bytes) -> str | None:
        """Accepts UTF-8."""
        try:
            payload.decode()
        except UnicodeDecodeError as error:
            return f"byte {error.start} is not UTF-8"
        return None


@dataclass(frozen=True, slots=True)
class NumberDefinition(BytesDefinition):
    """A number in four or eight bytes."""

    schema_type: SchemaType = SchemaType.NUMBER
    name: str = ""
    """One of `NUMBER_WIDTHS`, or "" for any of them."""

    def check(self, payload: bytes) -> str | None:
        """Accepts the size of the named number, or of any number."""
        if self.name:
            width = NUMBER_WIDTHS[self.name]
            if len(payload) != width:
                return f"{self.name} has {width} bytes, not {len(payload)}"
        elif len(payload) not in NUMBER_WIDTHS.values():
            return f"a number has 4 or 8 bytes, not {len(payload)}"
        return None

    def cannot_read(self, writer: Self) -> list[str]:
        """A reader of a named number reads only that number."""
        if self.name in ("", writer.name):
            return []
        return [f"{writer.name or 'a number'} is not read as {self.name}"]


def read_number(type_name: str, data: bytes) -> NumberDefinition:
    """The number that the definition or its type names; other definitions mean any number."""
    text = data.decode(errors="replace").strip().strip('"').lower()
    name = next((word for word in (text, type_name.lower()) if word in NUMBER_WIDTHS), "")
    return NumberDefinition(fingerprint=fingerprint(f"number {name}".encode()), name=name)
