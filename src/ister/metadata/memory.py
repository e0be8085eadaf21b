"""Metadata in memory, shared by the threads of one process: the backend `memory`.

Owns: entries, leases and watches, as long as the object lives. Does not own: durability; it has
none.

Invariants: `_keys` is sorted and has exactly the keys of `_entries`; a key whose lease has ended
is absent for every caller from that moment on, and is removed, with a revision of its own, by
the next change.
"""

from __future__ import annotations

import queue
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from ister.base import threads
from ister.base.clock import Clock, SystemClock
from ister.errors import ClosedError, NotFoundError
from ister.metadata.base import Compare, KeyValue, Lease, Operation, Put, Watch
from ister.metadata.checks import (
    change_prefix,
    check_lease_time,
    check_put,
    check_transaction,
    encode_key,
    encode_prefix,
    holds,
    key_bounds,
)
from ister.metadata.leases import HeldLease, number_of

_T = TypeVar("_T")

_ENDED: Final = float("-inf")


@dataclass(slots=True)
class _Entry:
    value: bytes
    revision: int
    lease_id: int | None


class MemoryMetadata:
    """Metadata in memory; see the module header. Thread-safe."""

    location = "memory"

    def __init__(self, clock: Clock | None = None) -> None:
        self.revision = 0
        """Of the last change."""
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._lock = threading.RLock()
        self._is_closed = False
        self._entries: dict[str, _Entry] = {}
        self._keys: list[str] = []
        self._lease_ends: dict[int, float] = {}
        self._leases_granted = 0
        self._watches: list[_MemoryWatch] = []

    # -- the seam ---------------------------------------------------------------------------

    def get(self, key: str) -> KeyValue | None:
        encode_key(key)
        return self._read(lambda: self._find(key))

    def get_many(self, keys: Sequence[str]) -> dict[str, KeyValue]:
        wanted = dict.fromkeys(keys)
        for key in wanted:
            encode_key(key)

        def read() -> dict[str, KeyValue]:
            return {key: found for key in wanted if (found := self._find(key)) is not None}

        return self._read(read)

    def range(
        self,
        prefix: str,
        *,
        start: str | None = None,
        end: str | None = None,
        limit: int | None = None,
    ) -> list[KeyValue]:
        bounds = key_bounds(prefix, start, end, limit)
        return self._read(lambda: self._select(bounds, limit))

    def current_revision(self, key: str) -> int:
        return self._read(lambda: self.revision)

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        check_put(key, value)
        operation = Put(key, bytes(value), lease)

        def change() -> int:
            self._apply([operation])
            return self.revision

        return self._change(change)

    def delete(self, key: str) -> bool:
        encode_key(key)
        return self._change(lambda: self._remove([key]) == 1)

    def delete_prefix(self, prefix: str) -> int:
        change_prefix(prefix)
        bounds = key_bounds(prefix, None, None, None)
        return self._change(
            lambda: self._remove([found.key for found in self._select(bounds, None)])
        )

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> int | None:
        compares, operations = tuple(compares), tuple(operations)
        check_transaction(compares, operations)

        def change() -> int | None:
            if not all(holds(compare, self._find(compare.key)) for compare in compares):
                return None
            self._apply(operations)
            return self.revision

        return self._change(change)

    def grant_lease(self, ttl_seconds: float) -> HeldLease:
        check_lease_time(ttl_seconds)
        asked_at = self._clock.boottime()
        with self._lock:
            self._check_open()
            self._leases_granted += 1
            lease_id = self._leases_granted
            self._lease_ends[lease_id] = self._clock.boottime() + ttl_seconds
        return HeldLease(self, lease_id, ttl_seconds, asked_at + ttl_seconds)

    def watch(self, prefix: str, on_change: Callable[[str], None]) -> Watch:
        with self._lock:
            self._check_open()
            encode_prefix(prefix)
            watch = _MemoryWatch(self, prefix, on_change)
            self._watches.append(watch)
            return watch

    def usage(self, key: str) -> None:
        """Always None: the store has no quota."""

    def close(self) -> None:
        """Ends the watches; nothing can be asked any more. May be called twice."""
        with self._lock:
            self._is_closed = True
            watches = list(self._watches)
        for watch in watches:
            watch.close()

    # -- inside -----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the metadata store was closed")

    def _read(self, read: Callable[[], _T]) -> _T:
        with self._lock:
            self._check_open()
            return read()

    def _change(self, change: Callable[[], _T]) -> _T:
        with self._lock:
            self._check_open()
            self._remove_ended()
            return change()

    def _is_alive(self, entry: _Entry, now: float) -> bool:
        return entry.lease_id is None or self._lease_ends.get(entry.lease_id, _ENDED) > now

    def _find(self, key: str) -> KeyValue | None:
        entry = self._entries.get(key)
        if entry is None or not self._is_alive(entry, self._clock.boottime()):
            return None
        return KeyValue(key, entry.value, entry.revision)

    def _select(
        self, bounds: tuple[bytes, bytes | None] | None, limit: int | None
    ) -> list[KeyValue]:
        if bounds is None:
            return []
        low, high = bounds
        # The upper bound may cut a character in two; as bytes it still says which keys are below.
        first = bisect_left(self._keys, low, key=str.encode)
        last = len(self._keys) if high is None else bisect_left(self._keys, high, key=str.encode)
        now = self._clock.boottime()
        found: list[KeyValue] = []
        for at in range(first, last):
            key = self._keys[at]
            entry = self._entries[key]
            if self._is_alive(entry, now):
                found.append(KeyValue(key, entry.value, entry.revision))
                if len(found) == limit:
                    break
        return found

    def _apply(self, operations: Sequence[Operation]) -> None:
        """Does all operations under one revision, or raises and does none."""
        leases = [
            self._lease_id(operation.lease) if isinstance(operation, Put) else None
            for operation in operations
        ]
        revision = self.revision + 1
        changed: list[str] = []
        for operation, lease_id in zip(operations, leases, strict=True):
            key = operation.key
            if isinstance(operation, Put):
                if key not in self._entries:
                    insort(self._keys, key)
                self._entries[key] = _Entry(bytes(operation.value), revision, lease_id)
                changed.append(key)
            elif self._drop(key):
                changed.append(key)
        if changed:
            self.revision = revision
            self._notify(changed)

    def _lease_id(self, lease: Lease | None) -> int | None:
        if lease is None:
            return None
        number = number_of(lease, self)
        if number not in self._lease_ends:
            raise NotFoundError(f"the lease {number} has ended")
        return number

    def _remove(self, keys: Sequence[str]) -> int:
        removed = [key for key in keys if self._drop(key)]
        if removed:
            self.revision += 1
            self._notify(removed)
        return len(removed)

    def _drop(self, key: str) -> bool:
        if self._entries.pop(key, None) is None:
            return False
        del self._keys[bisect_left(self._keys, key)]
        return True

    def _remove_ended(self) -> None:
        """Removes the leases that have ended, and their keys."""
        now = self._clock.boottime()
        ended = {lease_id for lease_id, end in self._lease_ends.items() if end <= now}
        if ended:
            self._end_leases(ended)

    def _end_leases(self, ended: set[int]) -> None:
        for lease_id in ended:
            self._lease_ends.pop(lease_id, None)
        self._remove([key for key, entry in self._entries.items() if entry.lease_id in ended])

    def _notify(self, keys: Sequence[str]) -> None:
        for watch in self._watches:
            watch.offer(keys)

    def renew_lease(self, lease: HeldLease) -> float:
        """Moves a lease's end; see `Lease.renew`."""
        asked_at = self._clock.boottime()
        with self._lock:
            self._check_open()
            self._remove_ended()
            if lease.id not in self._lease_ends:
                raise NotFoundError(f"the lease {lease.id} has ended")
            self._lease_ends[lease.id] = self._clock.boottime() + lease.ttl_seconds
        return asked_at + lease.ttl_seconds

    def revoke_lease(self, lease_id: int) -> None:
        """Ends a lease and removes its keys; see `Lease.revoke`."""
        with self._lock:
            if not self._is_closed:
                self._end_leases({lease_id})

    def forget_watch(self, watch: _MemoryWatch) -> None:
        """Called by a watch that ends."""
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)

    def boottime(self) -> float:
        """The store's clock."""
        return self._clock.boottime()


class _MemoryWatch:
    """Calls back on a separate thread, so that no caller's lock is held."""

    def __init__(
        self, store: MemoryMetadata, prefix: str, on_change: Callable[[str], None]
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._on_change = on_change
        self._changed: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threads.start("ister-metadata-watch", self._run)

    def offer(self, keys: Sequence[str]) -> None:
        for key in keys:
            if key.startswith(self._prefix):
                self._changed.put(key)

    def _run(self) -> None:
        while (key := self._changed.get()) is not None:
            threads.run("ister-metadata-watch", self._on_change, key)

    def close(self) -> None:
        self._store.forget_watch(self)
        self._changed.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
