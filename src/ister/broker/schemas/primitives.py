"""Schemas without structure: bytes, texts, numbers.

Owns: what a payload of these looks like. A text is UTF-8. A number is four or eight bytes; one
whose definition names its kind (`int`, `float`, `int64`, `double`) has that kind's width.
"""

from __future__ import annotations

from dataclasses import dataclass

from ister.broker.schemas.definition import fingerprint
from ister.broker.schemas.kinds import NUMBER_WIDTHS, SchemaType

__all__ = ["BytesDefinition", "NumberDefinition", "StringDefinition", "read_number"]


@dataclass(frozen=True, slots=True)
class BytesDefinition:
    """Any bytes at all."""

    schema_type: SchemaType = SchemaType.BYTES
    fingerprint: str = fingerprint(b"bytes")

    def check(self, payload: bytes) -> str | None:
        """Nothing is wrong with any payload."""
        return None

    def cannot_read(self, writer: BytesDefinition) -> list[str]:
        """Nothing is in the way."""
        return []

    def breaks(self, older: BytesDefinition) -> list[str]:
        """Nothing."""
        return []


@dataclass(frozen=True, slots=True)
class StringDefinition:
    """Text in UTF-8."""

    schema_type: SchemaType = SchemaType.STRING
    fingerprint: str = fingerprint(b"string")

    def check(self, payload: bytes) -> str | None:
        """Whether it is UTF-8."""
        try:
            payload.decode()
        except UnicodeDecodeError as error:
            return f"byte {error.start} is not UTF-8"
        return None

    def cannot_read(self, writer: StringDefinition) -> list[str]:
        """Nothing is in the way."""
        return []

    def breaks(self, older: StringDefinition) -> list[str]:
        """Nothing."""
        return []


@dataclass(frozen=True, slots=True)
class NumberDefinition:
    """A number in four or eight bytes."""

    fingerprint: str
    name: str = ""
    """One of `NUMBER_WIDTHS`; "" means any of them."""
    schema_type: SchemaType = SchemaType.NUMBER

    def check(self, payload: bytes) -> str | None:
        """Whether it has the width of a number."""
        if self.name:
            width = NUMBER_WIDTHS[self.name]
            if len(payload) != width:
                return f"{self.name} takes {width} bytes, not {len(payload)}"
        elif len(payload) not in NUMBER_WIDTHS.values():
            return f"a number takes 4 or 8 bytes, not {len(payload)}"
        return None

    def cannot_read(self, writer: NumberDefinition) -> list[str]:
        """A named number is not another one, and no reader knows which one an unnamed one is."""
        if self.name in ("", writer.name):
            return []
        return [f"{writer.name or 'a number'} is not read as {self.name}"]

    def breaks(self, older: NumberDefinition) -> list[str]:
        """Nothing."""
        return []


def read_number(type_name: str, data: bytes) -> NumberDefinition:
    """A number, as the name of its type or its definition says; other definitions are a remark."""
    text = data.decode(errors="replace").strip().strip('"').lower()
    name = next((word for word in (text, type_name.lower()) if word in NUMBER_WIDTHS), "")
    return NumberDefinition(fingerprint(f"number {name}".encode()), name)
