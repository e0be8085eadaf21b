"""Checks whether bytes are a datum of an Avro schema, without building the datum.

A decoder that builds lists and dicts would need gigabytes for a message that declares ten million
empty records; walking over the encoding needs none.

Limits: a payload has at most as many items in arrays and maps as it has bytes, a bounded number of
fields, and at most `_DEPTH_MAX` nested records. A longer array of items without bytes, such as
`null`, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from ister.broker.schemas.definition import Json

_DEPTH_MAX: Final = 64
_FIELDS_PER_BYTE: Final = 4
_FIELDS_FREE: Final = 10_000
_VARINT_BYTES_MAX: Final = 10
_SYNC_BYTES: Final = 16
_WIDTHS: Final = {"null": 0, "float": 4, "double": 8}


class _MisfitError(Exception):
    """The bytes are not a datum of the schema."""


class _Cursor:
    """The position of the walk."""

    __slots__ = ("data", "depth", "fields_left", "items", "position")

    def __init__(self, data: bytes, position: int = 0) -> None:
        self.data = data
        self.position = position
        self.items = 0
        self.fields_left = _FIELDS_FREE + _FIELDS_PER_BYTE * len(data)
        self.depth = 0

    def integer(self, bits: int = 64) -> int:
        """A zigzag varint."""
        value = shift = 0
        data, position = self.data, self.position
        for _ in range(_VARINT_BYTES_MAX):
            if position >= len(data):
                raise _MisfitError("the payload ends inside a number")
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                if value >= 1 << bits:
                    break
                self.position = position
                return (value >> 1) ^ -(value & 1)
        raise _MisfitError(f"the number at byte {self.position} has more than {bits} bits")

    def skip(self, count: int) -> bytes:
        """Skips `count` bytes and returns them."""
        start = self.position
        if count < 0 or count > len(self.data) - start:
            raise _MisfitError(f"a value at byte {start} goes beyond the payload")
        self.position = start + count
        return self.data[start : self.position]

    def block(self) -> int:
        """The number of items in the next block; 0 at the end."""
        count = self.integer()
        if count < 0:
            count = -count
            self.integer()
        self.items += count
        if self.items > len(self.data):
            raise _MisfitError(f"more items at byte {self.position} than the payload has bytes")
        return count


_Walk: TypeAlias = Callable[[_Cursor], object]


class DatumChecker:
    """Checks payloads of one schema. Thread-safe."""

    def __init__(self, schema: Json, named: dict[str, Json]) -> None:
        self._named = named
        self._walks: dict[str, _Walk] = {}
        self._walk = self._compile(schema)

    def check(self, payload: bytes) -> str | None:
        """Why the payload is not exactly one datum; None if it is."""
        cursor = _Cursor(payload)
        try:
            self._walk(cursor)
        except _MisfitError as error:
            return str(error)
        except RecursionError:
            return "nested too deep"
        if cursor.position != len(payload):
            return f"{len(payload) - cursor.position} bytes follow the datum"
        return None

    def check_file(self, payload: bytes, is_same: Callable[[bytes], bool]) -> str | None:
        """Why the payload is not an uncompressed Avro file of this schema; None if it is."""
        cursor = _Cursor(payload, 4)
        try:
            header = self._read_header(cursor)
            if not is_same(header.get(b"avro.schema", b"")):
                return "the schema in the file is not the one of the message"
            if header.get(b"avro.codec", b"null") != b"null":
                return "the file is compressed"
            sync = cursor.skip(_SYNC_BYTES)
            if cursor.position == len(payload):
                return "the file has no data"
            while cursor.position < len(payload):
                self._walk_block(cursor, sync)
        except _MisfitError as error:
            return str(error)
        except RecursionError:
            return "nested too deep"
        return None

    def _walk_block(self, cursor: _Cursor, sync: bytes) -> None:
        count, size = cursor.integer(), cursor.integer()
        end = cursor.position + size
        cursor.items += max(count, 0)
        if cursor.items > len(cursor.data):
            raise _MisfitError("more data in the file than bytes")
        for _ in range(count):
            self._walk(cursor)
        if cursor.position != end or cursor.skip(_SYNC_BYTES) != sync:
            raise _MisfitError("a block of the file does not end where it says")

    @staticmethod
    def _read_header(cursor: _Cursor) -> dict[bytes, bytes]:
        header: dict[bytes, bytes] = {}
        while count := cursor.block():
            for _ in range(count):
                name = cursor.skip(cursor.integer())
                header[name] = cursor.skip(cursor.integer())
        return header

    def _compile(self, schema: Json) -> _Walk:
        if isinstance(schema, list):
            return _union([self._compile(branch) for branch in schema])
        if isinstance(schema, str) and schema in self._named:
            return self._named_walk(schema)
        kind = schema["type"] if isinstance(schema, dict) else schema
        if kind in ("record", "error", "enum", "fixed"):
            return self._named_walk(schema["name"])
        if kind == "array":
            return _array(self._compile(schema["items"]))
        if kind == "map":
            return _map(self._compile(schema["values"]))
        if kind in _WIDTHS:
            width = _WIDTHS[kind]
            return lambda cursor: cursor.skip(width)
        return _SCALARS[kind]

    def _named_walk(self, name: str) -> _Walk:
        if name not in self._walks:
            # A type may contain itself, so its walk is looked up only while walking.
            self._walks[name] = partial(self._walk_named, name)
            self._walks[name] = self._compile_named(self._named[name])
        return self._walks[name]

    def _walk_named(self, name: str, cursor: _Cursor) -> None:
        self._walks[name](cursor)

    def _compile_named(self, schema: Json) -> _Walk:
        if schema["type"] == "fixed":
            size = schema["size"]
            return lambda cursor: cursor.skip(size)
        if schema["type"] == "enum":
            count = len(schema["symbols"])
            return lambda cursor: _index(cursor, count, "symbol")
        return _record([self._compile(field["type"]) for field in schema["fields"]])


def _record(fields: list[_Walk]) -> _Walk:
    def walk(cursor: _Cursor) -> None:
        cursor.depth += 1
        cursor.fields_left -= len(fields)
        if cursor.depth > _DEPTH_MAX:
            raise _MisfitError(f"more than {_DEPTH_MAX} nested records")
        if cursor.fields_left < 0:
            raise _MisfitError("too many fields for the size of the payload")
        for field in fields:
            field(cursor)
        cursor.depth -= 1

    return walk


def _union(branches: list[_Walk]) -> _Walk:
    return lambda cursor: branches[_index(cursor, len(branches), "branch")](cursor)


def _array(item: _Walk) -> _Walk:
    def walk(cursor: _Cursor) -> None:
        while count := cursor.block():
            for _ in range(count):
                item(cursor)

    return walk


def _map(value: _Walk) -> _Walk:
    def walk(cursor: _Cursor) -> None:
        while count := cursor.block():
            for _ in range(count):
                _string(cursor)
                value(cursor)

    return walk


def _index(cursor: _Cursor, count: int, what: str) -> int:
    index = cursor.integer()
    if not 0 <= index < count:
        raise _MisfitError(f"invalid {what} {index} of {count} before byte {cursor.position}")
    return index


def _boolean(cursor: _Cursor) -> None:
    if cursor.skip(1) not in (b"\x00", b"\x01"):
        raise _MisfitError(f"byte {cursor.position - 1} is not a boolean")


def _string(cursor: _Cursor) -> None:
    text = cursor.skip(cursor.integer())
    try:
        text.decode()
    except UnicodeDecodeError:
        raise _MisfitError(f"the text before byte {cursor.position} is not UTF-8") from None


_SCALARS: Final[dict[str, _Walk]] = {
    "boolean": _boolean,
    "int": lambda cursor: cursor.integer(32),
    "long": _Cursor.integer,
    "bytes": lambda cursor: cursor.skip(cursor.integer()),
    "string": _string,
}
