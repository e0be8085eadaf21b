"""Whether an object is what its descriptor says, byte for byte.

A store may hand out other bytes than it was given and call it a success, so nothing that was only
uploaded is taken for a copy: before the last other copy goes, this is asked.
"""

from __future__ import annotations

from ister.errors import CorruptDataError
from ister.format.crc import crc32
from ister.format.descriptor import ObjectDescriptor, format_checksum
from ister.objectstore.base import ObjectStore

__all__ = ["verify_content", "verify_size"]


def verify_size(store: ObjectStore, key: str, size_bytes: int) -> str | None:
    """Makes sure that an object of this size exists; returns its etag.

    Raises:
        NotFoundError: There is none.
        CorruptDataError: It has another size.
        UnavailableError: The store does not answer.
    """
    info = store.stat(key)
    if info.size != size_bytes:
        raise CorruptDataError(
            f"the object has {info.size} bytes and should have {size_bytes}", path=key
        )
    return info.etag


def verify_content(
    store: ObjectStore, key: str, descriptor: ObjectDescriptor, *, chunk_bytes: int
) -> None:
    """Reads an object whole and compares its checksum.

    An object that another program wrote has no checksum on record; its size has to do.

    Raises:
        NotFoundError: There is none.
        CorruptDataError: It is another one.
        UnavailableError: The store does not answer.
    """
    crc, position = 0, 0
    while position < descriptor.size_bytes:
        chunk = store.read(key, position, min(chunk_bytes, descriptor.size_bytes - position))
        if not chunk:
            break
        crc = crc32(chunk, crc)
        position += len(chunk)
    verify_size(store, key, descriptor.size_bytes)
    if position != descriptor.size_bytes:
        raise CorruptDataError(f"the object ends at byte {position}", path=key, position=position)
    if descriptor.checksum not in (None, format_checksum(crc)):
        raise CorruptDataError(
            f"the object's checksum is {format_checksum(crc)}, not {descriptor.checksum}",
            path=key,
            offset=descriptor.start,
        )
