"""Footers: the end of an object that says what is in it.

    … │ footer │ trailer

    trailer  u64 position of the footer · u64 its length · u32 its crc32 · u32 version · magic

Numbers are little endian; a magic has eight bytes. The footer's crc is checked before the version:
damage is never mistaken for a newer version.

Owns: the trailer. Does not own: what is in a footer (`express`, `staged_rows`).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from ister.errors import CorruptDataError, UnsupportedVersionError, check
from ister.format.crc import crc32

_TRAILER: Final = struct.Struct("<QQII8s")
TRAILER_BYTES: Final = _TRAILER.size


class FooterPlace(NamedTuple):
    """Where the footer is, and its checksum."""

    position: int
    length: int
    crc: int
    version: int


class FooterKind(NamedTuple):
    """A kind of objects that end with a footer."""

    magic: bytes
    version: int
    bytes_max: int
    what: str
    """Names the object in errors: "an express object"."""

    def encode(self, footer: bytes, position: int) -> bytes:
        """The end of an object, from `position` on: the footer and the trailer."""
        check(len(footer) <= self.bytes_max, f"a footer of {len(footer)} bytes")
        trailer = _TRAILER.pack(position, len(footer), crc32(footer), self.version, self.magic)
        return footer + trailer

    def find(self, data: bytes, size_bytes: int, *, path: str) -> FooterPlace:
        """Reads the last bytes of an object of `size_bytes`.

        Raises:
            CorruptDataError: It is something else, or it is damaged; names `path`.
        """
        if len(data) != TRAILER_BYTES:
            raise CorruptDataError(f"not {self.what}: it is too short", path=path)
        position, length, crc, version, magic = _TRAILER.unpack(data)
        is_whole = position + length + TRAILER_BYTES == size_bytes
        if magic != self.magic or not is_whole or length > self.bytes_max:
            raise CorruptDataError(f"not {self.what}: it has no valid trailer", path=path)
        return FooterPlace(position, length, crc, version)

    def check(self, footer: bytes, place: FooterPlace, *, path: str) -> None:
        """Checks a footer before it is used.

        Raises:
            CorruptDataError: The footer is damaged; names `path`.
            UnsupportedVersionError: A newer Ister wrote the object.
        """
        if len(footer) != place.length or crc32(footer) != place.crc:
            raise CorruptDataError(
                f"damaged {self.name}: the footer's checksum is wrong",
                path=path,
                position=place.position,
            )
        if place.version != self.version:
            raise UnsupportedVersionError(
                f"unsupported version {place.version} of {self.what}",
                path=path,
                hint="read it with the newer Ister that wrote it",
            )

    @property
    def name(self) -> str:
        """Names the object without its article."""
        return self.what.split(" ", 1)[1]
