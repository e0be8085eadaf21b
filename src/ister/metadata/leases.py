"""A lease as its holder has it, the same for every backend.

Owns: the holder's own idea of how long the lease surely holds. Does not own: the lease itself,
which the store keeps. The idea only ever errs on the early side: it is set from before a renewal
was asked for, and it ends before the lease is given back.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["HeldLease", "LeaseKeeper"]


class LeaseKeeper(Protocol):
    """What a lease needs of its store."""

    def boottime(self) -> float:
        """The store's clock."""
        ...

    def renew_lease(self, lease: HeldLease) -> float:
        """Asks for a lease's whole time again; the second up to which it now surely holds."""
        ...

    def revoke_lease(self, lease_id: int) -> None:
        """Ends a lease and removes its keys."""
        ...


class HeldLease:
    """See `ister.metadata.base.Lease`."""

    def __init__(
        self, store: LeaseKeeper, lease_id: int, ttl_seconds: float, valid_until: float
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
        # The holder stops believing in it before anybody else can see the keys gone.
        self._valid_until = min(self._valid_until, self.store.boottime())
        try:
            self.store.revoke_lease(self.id)
        except Exception:  # noqa: BLE001 - revoking raises nothing; the lease ends by itself
            return
