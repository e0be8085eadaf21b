"""Metadata in memory whose answers get lost, come late, or raise what a test wants.

A store survives simulated crashes of a process, because the test keeps the object and gives it to
the next one. Both hooks run outside of the store's lock, so that one may hold its thread back, or
use the store, while others go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ister.errors import CommitUnknownError, NotFoundError
from ister.metadata import memory
from ister.metadata.leases import HeldLease


def _no_fault(kind: str, key: str) -> None:
    """Lets every operation pass."""


def _first(key: Any, *_: object, **__: object) -> str:
    return str(key)


def _hooked(method: str, kind: str = "", key_of: Callable[..., str] = _first) -> Any:
    """The operation with `before` and `after` around it."""
    call, kind = getattr(memory.MemoryMetadata, method), kind or method

    def run(self: MemoryMetadata, *args: Any, **kwargs: Any) -> Any:
        key = key_of(*args, **kwargs)
        self.before(kind, key)
        result = call(self, *args, **kwargs)
        self.after(kind, key)
        return result

    return run


class MemoryMetadata(memory.MemoryMetadata):
    """The backend `memory` with faults."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.before: Callable[[str, str], None] = _no_fault
        """Called with (kind, key) before each operation; if it raises, nothing has happened."""
        self.after: Callable[[str, str], None] = _no_fault
        """Called with (kind, key) after each operation that succeeded; if it raises, the answer is
        lost and the change has happened.

        Kinds: get, get_many, range, current_revision, put, delete, delete_prefix, transact,
        grant_lease, renew, revoke. The key of a transaction is that of its first operation, or
        else of its first compare; of several keys, the first; of a lease, its number.
        """
        self.delayed: list[Callable[[], object]] = []
        """Changes whose outcome is unknown and that have not landed, oldest first; what a test
        removes never lands."""
        self._changes_to_delay = 0
        super().__init__(*args, **kwargs)

    get = _hooked("get")
    get_many = _hooked("get_many", key_of=lambda keys: keys[0] if keys else "")
    range = _hooked("range")
    current_revision = _hooked("current_revision")
    put = _hooked("put")
    delete = _hooked("delete")
    delete_prefix = _hooked("delete_prefix")
    transact = _hooked(
        "transact",
        key_of=lambda compares, operations: next((x.key for x in (*operations, *compares)), ""),
    )
    revoke_lease = _hooked("revoke_lease", "revoke")

    def grant_lease(self, ttl_seconds: float) -> HeldLease:
        asked_at = self._clock.boottime()
        self.before("grant_lease", "")
        lease = super().grant_lease(ttl_seconds)
        self.after("grant_lease", str(lease.id))
        return HeldLease(self, lease.id, ttl_seconds, asked_at + ttl_seconds)

    def renew_lease(self, lease: HeldLease) -> float:
        asked_at = self._clock.boottime()
        self.before("renew", str(lease.id))
        super().renew_lease(lease)
        self.after("renew", str(lease.id))
        return asked_at + lease.ttl_seconds

    def delay_next_change(self, count: int = 1) -> None:
        """Has the next `count` changes raise CommitUnknownError and wait in `delayed`.

        Each lands when the test calls `deliver_delayed`, with its compares evaluated then.
        """
        with self._lock:
            self._changes_to_delay += count

    def deliver_delayed(self) -> list[object]:
        """Lets every delayed change land, in order.

        Returns:
            What each call would have answered; for one that failed, its error.
        """
        with self._lock:
            landing, self.delayed = self.delayed, []
            results: list[object] = []
            for change in landing:
                try:
                    self._remove_ended()
                    results.append(change())
                except NotFoundError as error:
                    results.append(error)
            return results

    def _change(self, change: Callable[[], Any]) -> Any:
        with self._lock:
            self._check_open()
            if self._changes_to_delay:
                self._changes_to_delay -= 1
                self.delayed.append(change)
                raise CommitUnknownError("the answer was lost")
            return super()._change(change)
