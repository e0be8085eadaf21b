"""A broker's own entry among the brokers that share a metadata store, and the list of all.

Owns: writing the entry, and how old the list may be. Does not own: what an entry says
(`ister.bucket.members`), the lease (`ister.bucket.membership`).

A crash leaves an entry that ends with the lease.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Final

from ister.base.clock import Clock
from ister.bucket.members import Load, Member, MemberState, encode_member, member_key, read_members
from ister.errors import IsterError
from ister.metadata.base import Delete, Lease, Put
from ister.topic.stores import Stores

_log = logging.getLogger("ister.broker.cluster")

_AGE_SECONDS: Final = 1.0
"""How old the list may be that look-ups use."""
# Another broker with the same address is an error after this many lease times.
_TWIN_TTLS: Final = 2
# A new load alone is written this often: each entry that changes wakes all brokers.
_LOAD_SECONDS: Final = 5.0


class Members:
    """This broker's entry, and the list of all. Thread-safe; its calls block."""

    def __init__(self, own: Member, stores: Stores | None, *, clock: Clock) -> None:
        self.own = own
        self._stores = stores
        self._clock = clock
        self._lock = threading.Lock()
        self._known: list[Member] = []
        self._known_at = float("-inf")
        self._load_at = float("-inf")
        # The lease that the entry was written with.
        self._lease: Lease | None = None
        # Another broker with this one's address, since when, and whether that was logged.
        self._twin: tuple[str, float, bool] | None = None

    def publish(self, *, state: MemberState | None = None, load: Load | None = None) -> None:
        """Writes this broker's entry if it has changed or expired; a new load now and then."""
        now = self._clock.monotonic()
        with self._lock:
            own = self.own if state is None else replace(self.own, state=state)
            if load is not None and (own != self.own or now - self._load_at >= _LOAD_SECONDS):
                own = replace(own, load=load)
                self._load_at = now
            if own.state is not self.own.state:
                self._known_at = float("-inf")
            self.own = own
        stores = self._stores
        if stores is None:
            return
        key, value = self._key(stores), encode_member(own)
        lease = stores.membership.lease
        try:
            found = stores.metadata.get(key)
            # One that was written with an earlier lease ends with that.
            if found is None or found.value != value or self._lease is not lease:
                # Do not overwrite the entry of a process that has replaced this one.
                put = Put(key, value, lease)
                stores.metadata.transact([stores.membership.is_here], [put])
                self._lease = lease
        except IsterError as error:
            _log.warning(
                "broker entry not written; other brokers do not see this one",
                extra={"error": str(error)},
            )

    def leave(self) -> None:
        """Removes this broker's entry."""
        stores = self._stores
        if stores is None:
            return
        key = self._key(stores)
        try:
            stores.metadata.transact([stores.membership.is_here], [Delete(key)])
        except IsterError as error:
            _log.warning(
                "broker entry not removed; it is listed until its lease expires",
                extra={"error": str(error)},
            )

    def read(self) -> list[Member]:
        """All brokers that are up, this one among them unless it was replaced."""
        own = self.own
        found = {} if self.is_replaced else {own.node: own}
        stores = self._stores
        if stores is not None:
            # The own entry is read from memory: the store's may be older.
            found = read_members(stores.metadata, stores.storage.metadata.root_prefix) | found
        members = sorted(found.values(), key=lambda one: one.node)
        now = self._clock.monotonic()
        with self._lock:
            self._known, self._known_at = members, now
            self._check_address(members, now)
        return members

    def _check_address(self, members: list[Member], now: float) -> None:
        """Warns of another broker with this one's address: clients find only one of the two."""
        own, stores = self.own, self._stores
        same = [one.node for one in members if one.broker_url == own.broker_url]
        twin = next((node for node in same if node != own.node), None)
        if twin is None or stores is None:
            self._twin = None
        elif self._twin is None or self._twin[0] != twin:
            self._twin = (twin, now, False)
        # This broker's own entry from before its disk was lost ends with its lease.
        elif not self._twin[2] and now - self._twin[1] > (
            _TWIN_TTLS * stores.storage.metadata.lease_ttl_seconds
        ):
            self._twin = (twin, self._twin[1], True)
            _log.warning(
                "another broker advertises this broker's address; check broker.advertised",
                extra={"node": twin, "address": own.broker_url},
            )

    def recent(self) -> list[Member]:
        """Like `read`, cached for up to a second."""
        with self._lock:
            if self._clock.monotonic() - self._known_at < _AGE_SECONDS:
                return self._known
        return self.read()

    @property
    def count(self) -> int:
        """The number of brokers when the list was last read; at least this one."""
        return 1 + len(self.known_others)

    @property
    def known_others(self) -> list[Member]:
        """The other brokers when the list was last read, however long ago."""
        with self._lock:
            return [one for one in self._known if one.node != self.own.node]

    def expire(self) -> None:
        """Makes the next call read the store: an entry has changed."""
        self._known_at = float("-inf")

    @property
    def is_replaced(self) -> bool:
        """Whether a copy of this broker's directory has replaced it."""
        return self._stores is not None and self._stores.membership.replaced is not None

    def _key(self, stores: Stores) -> str:
        return member_key(stores.storage.metadata.root_prefix, self.own.node)
