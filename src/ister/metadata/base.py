"""What Ister asks of a metadata store, and what each operation promises.

Keys are text with `/`, sorted by their UTF-8 bytes; values are bytes. Every change gets a
`revision` that is higher than all before it, and a key's revision is that of its last change.
Reads are linearizable: they see every change that was answered before they began.

Errors:

- `CommitUnknownError`: the answer to a change was lost. It may have happened, may happen yet, or
  never will. Never repeated by the store itself: the caller reads back, or repeats a transaction
  whose compares make a second run harmless;
- `UnavailableError`: the store does not answer; a read, which changes nothing, was repeated with
  jittered pauses until its deadline;
- `CapacityError`: the store takes no more (quota, full disk, a value over the limit);
- `PermissionDeniedError`: credentials.

A failed compare is not an error but an answer. A watch is a hint: events may be late, merged or
lost, so nothing may depend on one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

VALUE_BYTES_MAX = 1024 * 1024
"""The largest value that any backend takes: etcd refuses requests of 1.5 MiB."""


QUOTA_LOW_SHARE = 0.75
"""The share of its quota above which a store needs attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """How full a metadata store with a quota is."""

    size_bytes: int
    """The size of the store's file, free pages included."""
    used_bytes: int
    quota_bytes: int
    """The size at which the store refuses changes; its default if it does not report one."""
    is_compacted: bool
    """Whether old versions of keys are removed; True if that is not known."""
    alarms: tuple[str, ...] = ()
    """Alarms, in the store's words; while there is one, the store may refuse changes."""

    @property
    def share(self) -> float:
        """The share of the quota that the file takes."""
        return self.size_bytes / max(1, self.quota_bytes)

    @property
    def advice(self) -> str | None:
        """What an operator has to do; None if there is nothing to do."""
        if self.share < QUOTA_LOW_SHARE and self.is_compacted and not self.alarms:
            return None
        return (
            "start all members of etcd with --auto-compaction-mode=periodic "
            "--auto-compaction-retention=1h; then `etcdctl defrag`, and `etcdctl alarm disarm` if "
            "there is an alarm; see docs/howto/etcd.md"
        )


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as it was read."""

    key: str
    value: bytes
    revision: int
    """Of its last change."""


@dataclass(frozen=True, slots=True)
class ValueIs:
    """Holds if the key exists with exactly this value."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class RevisionIs:
    """Holds if the key's last change has this revision."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Absent:
    """Holds if there is no such key."""

    key: str


@dataclass(frozen=True, slots=True)
class Put:
    """Sets a key; with a lease, until that ends."""

    key: str
    value: bytes
    lease: Lease | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Removes a key; one that does not exist is fine."""

    key: str


Compare: TypeAlias = ValueIs | RevisionIs | Absent
Operation: TypeAlias = Put | Delete


class Lease(Protocol):
    """A promise to be there: keys put with it vanish when it is not renewed in time.

    Time is measured on the holder's own clock, from before a renewal was asked for, so that the
    holder knows of the end before all others do.
    """

    ttl_seconds: float

    @property
    def valid_until(self) -> float:
        """The `Clock.boottime` second up to which the lease surely holds."""
        ...

    def renew(self) -> None:
        """Asks for another `ttl_seconds` from now on.

        Raises:
            NotFoundError: The lease has ended: its keys are gone.
            UnavailableError: No answer; `valid_until` stays what it was.
        """
        ...

    def revoke(self) -> None:
        """Ends the lease and removes its keys now. May be called twice; raises nothing."""
        ...


class Watch(Protocol):
    """A watch under way."""

    def close(self) -> None:
        """Ends it. May be called twice."""
        ...


class MetadataStore(Protocol):
    """Where metadata lives. Thread-safe."""

    location: str
    """For people: backend and place, without credentials."""

    def get(self, key: str) -> KeyValue | None:
        """Returns a key, or None."""
        ...

    def get_many(self, keys: Sequence[str]) -> dict[str, KeyValue]:
        """Returns those of some keys that exist, by key.

        Reads many keys with one request, in groups. The keys of a group are read at one moment;
        different groups may be read at different moments.
        """
        ...

    def range(
        self,
        prefix: str,
        *,
        start: str | None = None,
        end: str | None = None,
        limit: int | None = None,
    ) -> list[KeyValue]:
        """The keys that begin with `prefix`, sorted.

        Args:
            prefix: Which keys.
            start: Only keys at or after this one (a whole key, not a suffix).
            end: Only keys before this one.
            limit: At most so many.
        """
        ...

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Sets a key unconditionally; returns the revision.

        Raises:
            CommitUnknownError: The answer was lost.
        """
        ...

    def delete(self, key: str) -> bool:
        """Removes a key; whether it existed.

        Raises:
            CommitUnknownError: The answer was lost.
        """
        ...

    def delete_prefix(self, prefix: str) -> int:
        """Removes every key that begins with `prefix`, which is not empty; how many there were.

        Raises:
            CommitUnknownError: The answer was lost.
        """
        ...

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> int | None:
        """Does all of `operations` at once if all of `compares` hold.

        A key is changed at most once by a transaction.

        Returns:
            The revision of the change; None if a compare failed and nothing was changed.

        Raises:
            CommitUnknownError: The answer was lost.
        """
        ...

    def current_revision(self, key: str) -> int:
        """The revision of the last change of any key; it falls only if the store is restored.

        Args:
            key: One that the caller may read; it need not exist.

        Raises:
            UnavailableError: The store does not answer.
        """
        ...

    def grant_lease(self, ttl_seconds: float) -> Lease:
        """A new lease.

        Raises:
            UnavailableError: The store does not answer.
        """
        ...

    def watch(self, prefix: str, on_change: Callable[[str], None]) -> Watch:
        """Has `on_change(key)` called some time after a key below `prefix` changed: a hint.

        Called on a thread of the store's; it must not block and must not raise.
        """
        ...

    def usage(self, key: str) -> StoreUsage | None:
        """How full the store is; None if it has no quota or does not report it.

        Args:
            key: One that the caller may read; it need not exist.

        Raises:
            UnavailableError: The store does not answer.
        """
        ...

    def close(self) -> None:
        """Lets go of the store; leases are left to end by themselves. May be called twice."""
        ...
