"""An object store in memory that fails, forgets its answers and shows halves, as real ones may.

Built for tests of crash safety: a test keeps the store while the process it simulates dies, so
whatever had completed is still there afterwards. Every operation first asks `before` (a hook) and
calls `after` when it has happened; either may raise any error or `SimulatedCrash`. What `before`
raises leaves the store as it was; what `after` raises models a lost answer: the change stands.

Switches turn it into more primitive stores: one that ignores conditions, one without copies, one
on which an object under way can be seen. Bit rot and loss are for the test to make: `corrupt`,
`drop`.

Not modelled: deadlines, repetition (nothing is repeated here), and listings that lag behind.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ister.base.clock import Clock, SystemClock
from ister.errors import (
    AlreadyExistsError,
    ClosedError,
    NotFoundError,
    UnsupportedOperationError,
)
from ister.format.crc import Buffer
from ister.objectstore.base import Capabilities, ObjectInfo, ObjectWriter
from ister.objectstore.keys import check_key, check_prefix, check_range


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    modified_at: float
    version: int


def _nothing(kind: str, key: str) -> None:
    """Lets every operation pass."""


class MemoryObjectStore:
    """Objects in memory; see the module header. Thread-safe."""

    location = "memory://"

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        conditional_create: bool = True,
        supports_copy: bool = True,
        half_written_visible: bool = False,
    ) -> None:
        self._clock = clock if clock is not None else SystemClock()
        self._lock = threading.RLock()
        self._objects: dict[str, _Object] = {}
        self._versions = itertools.count(1)
        self._capabilities: Capabilities | None = None
        self.conditional_create = conditional_create
        """Off: `put(if_absent=True)` overwrites, as on stores that ignore the condition."""
        self.supports_copy = supports_copy
        self.half_written_visible = half_written_visible
        """On: an object under way exists with what it has so far, and stays so if abandoned."""
        self.before: Callable[[str, str], None] = _nothing
        """Called with (kind, key) before each operation. Kinds: open_writer, write, close, put,
        read, stat, list, copy, delete. Called without the lock, so that it may wait."""
        self.after: Callable[[str, str], None] = _nothing
        """Called with (kind, key) when an operation has happened and is about to return."""
        self.reads: list[tuple[str, int, int]] = []
        """Every read so far, as (key, start, bytes returned)."""
        self.calls: list[tuple[str, str]] = []
        """Every operation so far, as (kind, key), those that failed included."""

    # -- the seam ---------------------------------------------------------------------------

    def open_writer(self, key: str, *, chunk_bytes: int, concurrent_parts: int) -> ObjectWriter:
        check_key(key)
        self.enter("open_writer", key)
        writer = _MemoryWriter(self, key)
        self.leave("open_writer", key)
        return writer

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        check_key(key)
        with self._lock:
            known = self._capabilities
        if if_absent and known is not None and not known.conditional_create:
            raise UnsupportedOperationError("this store ignores conditions", path=key)
        self.enter("put", key)
        with self._lock:
            if if_absent and self.conditional_create and key in self._objects:
                raise AlreadyExistsError("put failed: the object exists", path=key)
            self.store(key, bytes(data))
        self.leave("put", key)

    def read(self, key: str, start: int, size: int) -> bytes:
        check_key(key)
        check_range(start, size)
        self.enter("read", key)
        with self._lock:
            data = self._find("read", key).data[start : start + size]
            self.reads.append((key, start, len(data)))
        self.leave("read", key)
        return data

    def view(self, key: str, start: int, size: int) -> bytes:
        return self.read(key, start, size)

    def stat(self, key: str) -> ObjectInfo:
        check_key(key)
        self.enter("stat", key)
        with self._lock:
            info = _info(key, self._find("stat", key))
        self.leave("stat", key)
        return info

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        self.enter("list", prefix)
        with self._lock:
            found = [
                _info(key, entry)
                for key, entry in sorted(self._objects.items())
                if key.startswith(prefix)
            ]
        self.leave("list", prefix)
        return iter(found)

    def copy(self, source: str, target: str) -> None:
        check_key(source)
        check_key(target)
        self.enter("copy", source)
        if not self.supports_copy:
            raise UnsupportedOperationError("copy failed: this store cannot", path=source)
        with self._lock:
            self.store(target, self._find("copy", source).data)
        self.leave("copy", target)

    def delete(self, key: str) -> None:
        check_key(key)
        self.enter("delete", key)
        with self._lock:
            self._objects.pop(key, None)
        self.leave("delete", key)

    def probe(self) -> Capabilities:
        with self._lock:
            self._capabilities = Capabilities(
                conditional_create=self.conditional_create, copy=self.supports_copy
            )
            return self._capabilities

    def remove_stale_parts(self, older_than_seconds: float) -> int:
        return 0

    def close(self) -> None:
        """Nothing to let go of: the objects outlive the process that a test simulates."""

    # -- for tests --------------------------------------------------------------------------

    def keys(self) -> tuple[str, ...]:
        """The keys of all objects, sorted."""
        with self._lock:
            return tuple(sorted(self._objects))

    def corrupt(self, key: str, position: int) -> None:
        """Flips one bit of an object, as a disk may."""
        with self._lock:
            entry = self._find("corrupt", key)
            data = bytearray(entry.data)
            data[position] ^= 1
            self._objects[key] = _Object(bytes(data), entry.modified_at, entry.version)

    def drop(self, key: str) -> None:
        """Loses an object."""
        with self._lock:
            del self._objects[key]

    def bytes_read(self, key: str) -> int:
        """How many bytes of an object were returned by reads."""
        with self._lock:
            return sum(size for name, _, size in self.reads if name == key)

    # -- inside -----------------------------------------------------------------------------

    def enter(self, kind: str, key: str) -> None:
        """An operation is about to happen."""
        with self._lock:
            self.calls.append((kind, key))
        self.before(kind, key)

    def leave(self, kind: str, key: str) -> None:
        """An operation has happened."""
        self.after(kind, key)

    def store(self, key: str, data: bytes) -> None:
        """Makes or replaces an object."""
        with self._lock:
            self._objects[key] = _Object(data, self._clock.now_ns() / 1e9, next(self._versions))

    def _find(self, kind: str, key: str) -> _Object:
        entry = self._objects.get(key)
        if entry is None:
            raise NotFoundError(f"{kind} failed: there is no such object", path=key)
        return entry


class _MemoryWriter:
    def __init__(self, store: MemoryObjectStore, key: str) -> None:
        self._store = store
        self._key = key
        self._parts: list[bytes] = []
        self._is_open = True

    def __repr__(self) -> str:
        return f"<writer of {self._store.location}{self._key}>"

    def write(self, data: Buffer) -> None:
        self._check_open()
        self._store.enter("write", self._key)
        self._parts.append(bytes(data))
        if self._store.half_written_visible:
            self._store.store(self._key, b"".join(self._parts))
        self._store.leave("write", self._key)

    def close(self) -> None:
        self._check_open()
        # Whatever happens now, the outcome is no longer this writer's to change.
        self._is_open = False
        self._store.enter("close", self._key)
        self._store.store(self._key, b"".join(self._parts))
        self._store.leave("close", self._key)

    def abort(self) -> None:
        self._is_open = False
        self._parts.clear()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the writer is closed", path=self._key)


def _info(key: str, entry: _Object) -> ObjectInfo:
    return ObjectInfo(
        key=key, size=len(entry.data), etag=f'"{entry.version}"', modified_at=entry.modified_at
    )
