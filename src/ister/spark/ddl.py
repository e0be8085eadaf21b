"""Parses DDL such as `id BIGINT, tags ARRAY<STRING>` to a Spark type, without a JVM.

    text ─► tokens ─► fields ─► StructType

Owns: the part of Spark's grammar that payloads in JSON need. Does not own: which of these types a
payload may have (`row_shape`).

A data source runs in a Python process without a session, in which PySpark has no parser. If the
source returned invalid DDL, Spark would refuse it with an error that names neither the option nor
the source.
"""

from __future__ import annotations

import re
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from ister.errors import InvalidRequestError

_HINT: Final = "such as 'id BIGINT, note STRING, tags ARRAY<STRING>, at STRUCT<x: DOUBLE>'"
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<name>[A-Za-z0-9_]+)|`(?P<quoted>(?:[^`]|``)+)`"
    r"|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<sign>[<>(),:]))"
)
_PRECISION_MAX: Final = 38
_TYPES: Final[dict[str, DataType]] = {
    "boolean": BooleanType(),
    "tinyint": ByteType(),
    "byte": ByteType(),
    "smallint": ShortType(),
    "short": ShortType(),
    "int": IntegerType(),
    "integer": IntegerType(),
    "bigint": LongType(),
    "long": LongType(),
    "float": FloatType(),
    "real": FloatType(),
    "double": DoubleType(),
    "string": StringType(),
    "binary": BinaryType(),
    "date": DateType(),
    "timestamp": TimestampType(),
    "timestamp_ltz": TimestampType(),
    "timestamp_ntz": TimestampNTZType(),
}


def parse_struct(name: str, text: str) -> StructType:
    """Parses the fields of a struct, or a type `STRUCT<…>`.

    Args:
        name: The option that has the text, for errors.
        text: The DDL.

    Raises:
        InvalidRequestError: It is not DDL, or has a type that is not known here.
    """
    parser = _Parser(name, text)
    if re.match(r"\s*struct\s*<", text, re.IGNORECASE):
        found = parser.read_type()
    else:
        found = parser.read_fields()
    parser.finish()
    if not isinstance(found, StructType):  # pragma: no cover - for mypy: it begins with STRUCT
        raise parser.error("a struct is expected")
    return found


class _Parser:
    """Reads tokens from left to right."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._tokens: list[tuple[str, str]] = []
        at = 0
        text = text.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None or match.lastgroup is None:
                raise self.error(f"unexpected {text[at:].lstrip()[:20]!r}")
            self._tokens.append((match.lastgroup, match[match.lastgroup]))
            at = match.end()
        self._at = 0

    def error(self, reason: str) -> InvalidRequestError:
        """Returns an error about the text."""
        return InvalidRequestError(f"{self._name} is not valid DDL: {reason}", hint=_HINT)

    def finish(self) -> None:
        """Checks that nothing is left."""
        if self._at < len(self._tokens):
            raise self.error(f"unexpected {self._tokens[self._at][1]!r}")

    def read_fields(self) -> StructType:
        """Reads fields with commas between them."""
        fields = [self._read_field()]
        while self._skip("sign", ","):
            fields.append(self._read_field())
        return StructType(fields)

    def read_type(self) -> DataType:
        """Reads a type, with its parameters."""
        word = self._take("name", "a type")
        kind = word.lower()
        if kind == "struct":
            self._expect("<")
            struct = self.read_fields()
            self._expect(">")
            return struct
        if kind == "array":
            self._expect("<")
            element = self.read_type()
            self._expect(">")
            return ArrayType(element)
        if kind == "map":
            self._expect("<")
            key = self.read_type()
            self._expect(",")
            value = self.read_type()
            self._expect(">")
            return MapType(key, value)
        if kind in ("decimal", "dec", "numeric"):
            return self._read_decimal()
        if kind in ("varchar", "char", "character"):
            # As Spark reads them: a data source checks no lengths.
            self._expect("(")
            self._read_number()
            self._expect(")")
            return StringType()
        found = _TYPES.get(kind)
        if found is None:
            raise self.error(f"unknown type {word!r}")
        return found

    def _read_decimal(self) -> DecimalType:
        if not self._skip("sign", "("):
            return DecimalType(10, 0)
        precision = self._read_number()
        scale = self._read_number() if self._skip("sign", ",") else 0
        self._expect(")")
        if not 1 <= precision <= _PRECISION_MAX or scale > precision:
            raise self.error(f"DECIMAL({precision}, {scale}) does not exist")
        return DecimalType(precision, scale)

    def _read_field(self) -> StructField:
        name = self._take(("name", "quoted"), "the name of a field")
        self._skip("sign", ":")
        kind, nullable = self.read_type(), True
        if self._skip("name", "not"):
            if not self._skip("name", "null"):
                raise self.error("NOT is not followed by NULL")
            nullable = False
        if self._skip("name", "comment"):
            self._take("text", "a comment in quotes")
        return StructField(name, kind, nullable)

    def _read_number(self) -> int:
        text = self._take("name", "a number")
        if not text.isdecimal():
            raise self.error(f"{text!r} is not a number")
        return int(text)

    def _expect(self, sign: str) -> None:
        if not self._skip("sign", sign):
            raise self.error(f"{sign!r} is missing{self._before()}")

    def _skip(self, group: str, text: str) -> bool:
        if self._at < len(self._tokens):
            found = self._tokens[self._at]
            if found[0] == group and found[1].lower() == text:
                self._at += 1
                return True
        return False

    def _take(self, groups: str | tuple[str, ...], what: str) -> str:
        if self._at < len(self._tokens):
            group, text = self._tokens[self._at]
            if group in ((groups,) if isinstance(groups, str) else groups):
                self._at += 1
                return text.replace("``", "`")
        raise self.error(f"{what} is missing{self._before()}")

    def _before(self) -> str:
        if self._at < len(self._tokens):
            return f" before {self._tokens[self._at][1]!r}"
        return " at the end"
