"""Slices: parts of objects that are read like objects.

    storage/express/<node>/<process>/<sequence>.dnbx@<position>+<length>

A key that ends like this names a slice of the object before the `@`. `read` and `stat` treat it
like a whole object: positions count from its first byte, and its size is its length. A slice is
never written, and deleting one does nothing: the object is removed as a whole when no topic needs
any part of it (`ister.bucket.express_collection`).

All other keys are passed on as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from ister.errors import CorruptDataError, UnsupportedOperationError
from ister.format.crc import Buffer
from ister.objectstore.base import Capabilities, ObjectInfo, ObjectStore, ObjectWriter

_SLICE: Final = re.compile(r"(.+\.dnbx)@([0-9]+)\+([0-9]+)")


class _Slice(NamedTuple):
    key: str
    position: int
    length: int


class SlicedStore:
    """An object store whose keys may name slices. Thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.location = store.location

    def __repr__(self) -> str:
        return repr(self._store)

    def open_writer(self, key: str, *, chunk_bytes: int, concurrent_parts: int) -> ObjectWriter:
        """Begins an object; the key must not name a slice."""
        _refuse_slice(key)
        return self._store.open_writer(
            key, chunk_bytes=chunk_bytes, concurrent_parts=concurrent_parts
        )

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Stores an object; the key must not name a slice."""
        _refuse_slice(key)
        self._store.put(key, data, if_absent=if_absent)

    def read(self, key: str, start: int, size: int) -> bytes:
        """Bytes of an object or a slice from `start` on; fewer than `size` only at its end."""
        if (found := _parse(key)) is None:
            return self._store.read(key, start, size)
        size = min(size, found.length - start)
        return self._store.read(found.key, found.position + start, size) if size > 0 else b""

    def view(self, key: str, start: int, size: int) -> Buffer:
        """Like `read`, but may return a view of a mapped file instead of a copy."""
        if _parse(key) is None:
            return self._store.view(key, start, size)
        return self.read(key, start, size)

    def stat(self, key: str) -> ObjectInfo:
        """Returns size, etag and time of an object or a slice.

        Raises:
            NotFoundError: There is no such object.
            CorruptDataError: The object ends before the slice does.
        """
        if (found := _parse(key)) is None:
            return self._store.stat(key)
        info = self._store.stat(found.key)
        if info.size < found.position + found.length:
            raise CorruptDataError(
                f"the object has {info.size} bytes and should have at least "
                f"{found.position + found.length}",
                path=key,
            )
        return replace(info, key=key, size=found.length)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key begins with `prefix`; no slices."""
        return self._store.list(prefix)

    def copy(self, source: str, target: str) -> None:
        """Copies an object; the source must not name a slice."""
        _refuse_slice(source)
        self._store.copy(source, target)

    def delete(self, key: str) -> None:
        """Removes an object; does nothing with a slice."""
        if _parse(key) is None:
            self._store.delete(key)

    def probe(self) -> Capabilities:
        """Finds out what the store supports."""
        return self._store.probe()

    def remove_stale_parts(self, older_than_seconds: float) -> int:
        """Removes unfinished uploads of processes that have ended; returns their number."""
        return self._store.remove_stale_parts(older_than_seconds)

    def close(self) -> None:
        """Closes connections. May be called twice."""
        self._store.close()


def with_slices(store: ObjectStore) -> ObjectStore:
    """Returns the store, wrapped so that keys may name slices."""
    return store if isinstance(store, SlicedStore) else SlicedStore(store)


def _parse(key: str) -> _Slice | None:
    match = _SLICE.fullmatch(key)
    return None if match is None else _Slice(match[1], int(match[2]), int(match[3]))


def _refuse_slice(key: str) -> None:
    if _parse(key) is not None:
        raise UnsupportedOperationError("a slice cannot be written or copied", path=key)
