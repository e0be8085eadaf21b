"""What Ister asks of an object store, and what each operation promises.

Keys are relative to the store's root, with `/` and without one at the beginning. Every error of a
store is raised as one of:

- `NotFoundError`: there is no object of that key (or no such bucket);
- `AlreadyExistsError`: a conditional create met an object;
- `PermissionDeniedError`: credentials are missing, wrong, expired, or may not do this;
- `CapacityError`: the store has no room (a full disk behind the `fs` backend);
- `UnsupportedOperationError`: this store cannot do this at all;
- `UnavailableError`: everything else, timeouts included; the same call may succeed later.

After an `UnavailableError` the outcome of a write is unknown: the object may exist, whole. What
never exists is a part of one: an object appears with `ObjectWriter.close` or `put`, whole, and is
durable when that returns. Nothing is checked end to end by a store: bytes that come back may be
other ones than went in, so whoever reads compares a checksum of their own.

Every call has a deadline. Calls that change nothing, and calls whose repetition changes nothing,
are repeated with jittered pauses before they raise `UnavailableError`; those that met a definite
answer (exists, not found, denied) never are. Listings are complete for objects that existed before
the call, and are used to find garbage, never to find data.

Errors, logs and `repr` never carry credentials.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ister.format.crc import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a store says about an object."""

    key: str
    size: int
    etag: str | None = None
    modified_at: float | None = None
    """Seconds since the Unix epoch, by the store's clock; None if it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store turned out to be able to do when it was tried."""

    conditional_create: bool
    """`put(if_absent=True)` refuses when the object exists. Some stores ignore the condition."""
    copy: bool
    """`copy` works on the server's side."""


class ObjectWriter(Protocol):
    """An object under way. Used by one thread at a time."""

    def write(self, data: Buffer) -> None:
        """Takes the next bytes; blocks while as many parts as allowed are in flight."""
        ...

    def close(self) -> None:
        """Completes the object: it exists, whole and durable, when this returns."""
        ...

    def abort(self) -> None:
        """Gives up: the object does not come to exist, unless `close` was called before.

        Parts that a store keeps until they are cleaned up may remain, invisible. May be called
        twice, and after `close`; raises nothing.
        """
        ...


class ObjectStore(Protocol):
    """Where objects live. Thread-safe."""

    location: str
    """For people: scheme, bucket and prefix, without credentials."""

    def open_writer(self, key: str, *, chunk_bytes: int, concurrent_parts: int) -> ObjectWriter:
        """Begins an object of any size; one that exists already is replaced when it completes.

        Holds at most about `chunk_bytes` × (`concurrent_parts` + 1) bytes.
        """
        ...

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Stores a small object in one piece.

        Raises:
            AlreadyExistsError: `if_absent` is set, and there is one.
            UnsupportedOperationError: `if_absent` is set, and the store is known to ignore it.
        """
        ...

    def read(self, key: str, start: int, size: int) -> bytes:
        """Bytes of an object from `start` on; fewer than `size` only at its end.

        Raises:
            NotFoundError: There is no such object.
        """
        ...

    def view(self, key: str, start: int, size: int) -> Buffer:
        """Like `read`, but may return a view of a mapped file instead of a copy.

        For bytes that are decoded once, soon after.
        """
        ...

    def stat(self, key: str) -> ObjectInfo:
        """What the store says about an object.

        Raises:
            NotFoundError: There is no such object.
        """
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key begins with `prefix`, which ends with `/` or is empty.

        Sorted by key. A prefix without objects is an empty listing.
        """
        ...

    def copy(self, source: str, target: str) -> None:
        """Has the store copy an object; one at `target` is replaced.

        Raises:
            NotFoundError: There is no `source`.
            UnsupportedOperationError: The store cannot.
        """
        ...

    def delete(self, key: str) -> None:
        """Removes an object; one that does not exist is fine."""
        ...

    def probe(self) -> Capabilities:
        """Tries what the store can do, with objects of its own that it removes again.

        Raises:
            PermissionDeniedError, NotFoundError, UnavailableError: The store cannot be used.
        """
        ...

    def remove_stale_parts(self, older_than_seconds: float) -> int:
        """Removes what writers of killed processes have left; returns the number removed.

        Only a directory has such files. In a bucket a lifecycle rule removes unfinished uploads.
        """
        ...

    def close(self) -> None:
        """Lets go of connections. May be called twice."""
        ...
