"""Reads the footer of an object that topics share (`ister.format.footer`)."""

from __future__ import annotations

from typing import Final

from ister.base.limits import KIB
from ister.format.footer import TRAILER_BYTES, FooterKind, FooterPlace
from ister.objectstore.base import ObjectInfo, ObjectStore

_TAIL_BYTES: Final = 64 * KIB
"""Read from the end of an object at once: the trailer, and most footers."""


def read_end(store: ObjectStore, info: ObjectInfo, kind: FooterKind) -> tuple[bytes, FooterPlace]:
    """Returns the bytes of an object's footer, not checked yet, and its place from the trailer.

    Raises:
        CorruptDataError: It is of another kind, or it is damaged.
    """
    tail_at = max(0, info.size - _TAIL_BYTES)
    tail = store.read(info.key, tail_at, info.size - tail_at)
    place = kind.find(tail[-TRAILER_BYTES:], info.size, path=info.key)
    if place.position >= tail_at:
        return tail[place.position - tail_at : -TRAILER_BYTES], place
    return store.read(info.key, place.position, place.length), place
