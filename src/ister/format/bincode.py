"""The two bincode encodings that Danube has used, as writers and readers of primitive values.

| | `FixintWriter` (bincode 1.3) | `VarintWriter` (bincode 2, standard config) |
|---|---|---|
| u64, u32 | 8 and 4 bytes, little endian | <251: one byte; FB u16, FC u32, FD u64 |
| lengths | u64 | as integers |
| Option | one byte 0 or 1, then the value | same |
| String | length, UTF-8 | same |

Readers are strict: a length beyond the buffer, an unknown tag, bad UTF-8 or an integer in a longer
form than needed raise `BincodeError` before anything is allocated. (bincode itself accepts the
longer forms; no encoder makes them, and refusing them is what tells the two encodings apart.)
"""

from __future__ import annotations

import struct
from operator import index
from typing import Final, Protocol, Self

from ister.format.crc import Buffer

_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_U64_MAX: Final = 2**64 - 1
_TAG_U16, _TAG_U32, _TAG_U64 = 0xFB, 0xFC, 0xFD


class BincodeError(ValueError):
    """The bytes are not a value of the expected type."""


def encode_varint(value: int) -> bytes:
    """An unsigned integer as bincode 2 writes it."""
    if value < 0 or value > _U64_MAX:
        raise BincodeError(f"{value} is not an unsigned 64-bit integer")
    if value < _TAG_U16:
        return bytes((value,))
    if value < 1 << 16:
        return b"\xfb" + _U16.pack(value)
    if value < 1 << 32:
        return b"\xfc" + _U32.pack(value)
    return b"\xfd" + _U64.pack(value)


def varint_form(value: int) -> tuple[int, int, bytes, str]:
    """For a value: the range of values in its varint form, that form's tag and struct letter."""
    if value < 0xFB:
        return 0, 0xFB, b"", "B"
    if value < 1 << 16:
        return 0xFB, 1 << 16, b"\xfb", "H"
    if value < 1 << 32:
        return 1 << 16, 1 << 32, b"\xfc", "I"
    return 1 << 32, 1 << 64, b"\xfd", "Q"


class Writer(Protocol):
    """Collects the bytes of one value; every method returns the writer."""

    def u64(self, value: int) -> Self: ...
    def u32(self, value: int) -> Self: ...
    def blob(self, value: bytes) -> Self: ...
    def text(self, value: str) -> Self: ...
    def some(self, present: bool) -> Self: ...
    def finish(self) -> bytes: ...


class _WriterBase:
    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def some(self, present: bool) -> Self:
        self._parts.append(b"\x01" if present else b"\x00")
        return self

    def finish(self) -> bytes:
        return b"".join(self._parts)


class FixintWriter(_WriterBase):
    """bincode 1.3: fixed widths."""

    __slots__ = ()

    def u64(self, value: int) -> Self:
        self._parts.append(_pack(_U64, value))
        return self

    def u32(self, value: int) -> Self:
        self._parts.append(_pack(_U32, value))
        return self

    def blob(self, value: bytes) -> Self:
        self._parts += (_U64.pack(len(value)), value)
        return self

    def text(self, value: str) -> Self:
        return self.blob(_utf8(value))


class VarintWriter(_WriterBase):
    """bincode 2 with its standard configuration."""

    __slots__ = ()

    def u64(self, value: int) -> Self:
        self._parts.append(encode_varint(index(value)))
        return self

    def u32(self, value: int) -> Self:
        if index(value) >= 1 << 32:
            raise BincodeError(f"{value} is not an unsigned 32-bit integer")
        return self.u64(value)

    def blob(self, value: bytes) -> Self:
        self._parts += (encode_varint(len(value)), value)
        return self

    def text(self, value: str) -> Self:
        return self.blob(_utf8(value))


def _pack(layout: struct.Struct, value: int) -> bytes:
    try:
        return layout.pack(value)
    except struct.error as error:
        raise BincodeError(f"{value} does not fit into {layout.size} bytes") from error


def _utf8(value: str) -> bytes:
    if not isinstance(value, str):
        raise BincodeError(f"{value!r} is not text")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise BincodeError(f"{value!r} is not valid Unicode text") from error


class BodyReader(Protocol):
    """Takes one value apart, from the front. Every method raises BincodeError on bad bytes."""

    position: int

    def u64(self) -> int: ...
    def u32(self) -> int: ...
    def blob(self) -> bytes: ...
    def text(self) -> str: ...
    def skip(self) -> None: ...
    def some(self) -> bool: ...
    def at_end(self) -> bool: ...


class _ReaderBase:
    __slots__ = ("_data", "_size", "position")

    def __init__(self, data: Buffer, position: int = 0) -> None:
        self._data = data
        self._size = len(data)
        self.position = position

    def _take(self, size: int) -> int:
        """Moves over `size` bytes and returns where they begin."""
        start = self.position
        end = start + size
        if end > self._size:
            raise BincodeError(f"{size} bytes at {start} run past the end at {self._size}")
        self.position = end
        return start

    def some(self) -> bool:
        tag: int = self._data[self._take(1)]
        if tag > 1:
            raise BincodeError(f"option tag {tag} at {self.position - 1}")
        return tag == 1

    def at_end(self) -> bool:
        return self.position == self._size

    def _unpack(self, layout: struct.Struct) -> int:
        value: int = layout.unpack_from(self._data, self._take(layout.size))[0]
        return value

    def _bytes(self, size: int) -> bytes:
        start = self._take(size)
        return bytes(self._data[start : start + size])

    def _text(self, size: int) -> str:
        if size == 0:
            return ""
        try:
            return self._bytes(size).decode()
        except UnicodeDecodeError as error:
            raise BincodeError(f"bad UTF-8 before {self.position}") from error


class FixintReader(_ReaderBase):
    """bincode 1.3."""

    __slots__ = ()

    def u64(self) -> int:
        return self._unpack(_U64)

    def u32(self) -> int:
        return self._unpack(_U32)

    def blob(self) -> bytes:
        return self._bytes(self._unpack(_U64))

    def text(self) -> str:
        return self._text(self._unpack(_U64))

    def skip(self) -> None:
        """Moves over a blob or text without looking at it."""
        self._take(self._unpack(_U64))


class VarintReader(_ReaderBase):
    """bincode 2 with its standard configuration."""

    __slots__ = ()

    def u64(self) -> int:
        position = self.position
        if position >= self._size:
            raise BincodeError(f"an integer at {position} runs past the end")
        first: int = self._data[position]
        self.position = position + 1
        if first < _TAG_U16:
            return first
        if first == _TAG_U16:
            value, least = self._unpack(_U16), _TAG_U16
        elif first == _TAG_U32:
            value, least = self._unpack(_U32), 1 << 16
        elif first == _TAG_U64:
            value, least = self._unpack(_U64), 1 << 32
        else:
            raise BincodeError(f"integer tag {first:#x} at {position}")
        if value < least:
            raise BincodeError(f"{value} in a longer form than needed before {self.position}")
        return value

    def u32(self) -> int:
        value = self.u64()
        if value >= 1 << 32:
            raise BincodeError(f"{value} is not an unsigned 32-bit integer")
        return value

    def blob(self) -> bytes:
        return self._bytes(self.u64())

    def text(self) -> str:
        return self._text(self.u64())

    def skip(self) -> None:
        """Moves over a blob or text without looking at it."""
        self._take(self.u64())
