"""The two bincode encodings that Danube has used, as writers and readers of primitive values.

| | `fixint` (bincode 1.3) | `varint` (bincode 2, standard config) |
|---|---|---|
| u64 | 8 bytes, little endian | <251: one byte; FB u16, FC u32, FD u64 |
| lengths | u64 | as integers |
| Option | one byte 0 or 1, then the value | same |
| String | length, UTF-8 | same |

Readers are strict: a length beyond the buffer, an unknown tag, bad UTF-8 or an integer in a longer
form than needed raise `BincodeError` before anything is allocated. (bincode itself accepts the
longer forms; no encoder makes them, and refusing them is what tells the two encodings apart.)
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import index
from typing import Final, Self

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


def encode_fixint(value: int) -> bytes:
    """An unsigned integer of 64 bits as bincode 1.3 writes it."""
    try:
        return _U64.pack(value)
    except struct.error as error:
        raise BincodeError(f"{value} is not an unsigned 64-bit integer") from error


class Writer:
    """Collects the bytes of one value; every method returns the writer."""

    __slots__ = ("_number", "_parts")

    def __init__(self, number: Callable[[int], bytes]) -> None:
        """`number` encodes integers and lengths: `encode_varint` or `encode_fixint`."""
        self._number = number
        self._parts: list[bytes] = []

    def some(self, present: bool) -> Self:
        self._parts.append(b"\x01" if present else b"\x00")
        return self

    def u64(self, value: int) -> Self:
        self._parts.append(self._number(index(value)))
        return self

    def u32(self, value: int) -> Self:
        if index(value) >= 1 << 32:
            raise BincodeError(f"{value} is not an unsigned 32-bit integer")
        return self.u64(value)

    def text(self, value: str) -> Self:
        encoded = _utf8(value)
        self._parts += (self._number(len(encoded)), encoded)
        return self

    def finish(self) -> bytes:
        return b"".join(self._parts)


def _utf8(value: str) -> bytes:
    if not isinstance(value, str):
        raise BincodeError(f"{value!r} is not text")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise BincodeError(f"{value!r} is not valid Unicode text") from error


class BodyReader(ABC):
    """Takes one value apart, from the front. Every method raises BincodeError on bad bytes."""

    __slots__ = ("_data", "_size", "position")

    def __init__(self, data: Buffer) -> None:
        self._data = data
        self._size = len(data)
        self.position = 0

    @abstractmethod
    def u64(self) -> int: ...

    def u32(self) -> int:
        value = self.u64()
        if value >= 1 << 32:
            raise BincodeError(f"{value} is not an unsigned 32-bit integer")
        return value

    def blob(self) -> bytes:
        size = self.u64()
        start = self._take(size)
        return bytes(self._data[start : start + size])

    def text(self) -> str:
        try:
            return self.blob().decode()
        except UnicodeDecodeError as error:
            raise BincodeError(f"bad UTF-8 before {self.position}") from error

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


class FixintReader(BodyReader):
    """bincode 1.3."""

    __slots__ = ()

    def u64(self) -> int:
        return self._unpack(_U64)


class VarintReader(BodyReader):
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
