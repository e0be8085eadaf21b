"""A lease as its holder has it, the same for every backend.

Owns: until when the holder may rely on its lease. Does not own: the lease itself, which the store
keeps; when it is renewed (`ister.topic.background` calls `ister.bucket.membership`).

The holder's end of a lease is never later than the store's: it counts from before the renewal was
sent, and ends before the lease is revoked.
"""

from __future__ import annotations

from typing import Protocol

from ister.errors import InvalidRequestError
from ister.metadata.base import Lease


class LeaseStore(Protocol):
    """The methods of a store that a lease uses."""

    def boottime(self) -> float:
        """The store's clock."""
        ...

    def renew_lease(self, lease: HeldLease) -> float:
        """Renews a lease; returns the second up to which it surely holds."""
        ...

    def revoke_lease(self, lease_id: int) -> None:
        """Ends a lease and removes its keys."""
        ...


class HeldLease:
    """See `ister.metadata.base.Lease`."""

    def __init__(
        self, store: LeaseStore, lease_id: int, ttl_seconds: float, valid_until: float
    ) -> None:
        self.store = store
        self.id = lease_id
        self.ttl_seconds = ttl_seconds
        self._valid_until = valid_until

    @property
    def valid_until(self) -> float:
        return self._valid_until

    def renew(self) -> None:
        self._valid_until = max(self._valid_until, self.store.renew_lease(self))

    def revoke(self) -> None:
        # The holder treats it as expired before others can see the keys gone.
        self._valid_until = min(self._valid_until, self.store.boottime())
        try:
            self.store.revoke_lease(self.id)
        except Exception:  # noqa: BLE001 - revoking raises nothing; the lease expires
            return


def number_of(lease: Lease, store: LeaseStore) -> int:
    """The number of a lease that `store` granted.

    Raises:
        InvalidRequestError: Another store granted it.
    """
    if not isinstance(lease, HeldLease) or lease.store is not store:
        raise InvalidRequestError("the lease belongs to another metadata store")
    return lease.id
