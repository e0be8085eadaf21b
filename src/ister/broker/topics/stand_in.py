"""What a broker does that cannot renew its lease: it asks the others.

Owns: which other broker reaches the metadata store, and stands in for this one. Does not own: what
becomes of topics meanwhile (`topics`).

A broker that cannot renew its lease asks the others, which may still reach the metadata store. One
that does is the stand-in: once the lease has ended, clients that look a topic up are sent to its
new owner or else to the stand-in, and topics that have a new owner are given up. A broker that
reaches neither the metadata store nor another broker answers UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final

from ister.broker.cluster.cluster import Cluster
from ister.broker.cluster.peers import Peers
from ister.bucket.members import Member
from ister.errors import UnavailableError, WaitTimeoutError

# A broker that is cut off asks this many others at a time.
_ASKED_AT_ONCE: Final = 3


class StandIn:
    """The broker that clients are sent to while this one is cut off. Used on the broker's loop."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.peers: Peers | None = None
        """Calls other brokers; None while the broker starts."""
        self.member: Member | None = None
        """Another broker that reaches the metadata store while this one seems not to."""
        self.is_isolated = False
        """Whether this broker reaches neither the metadata store nor another broker."""

    def find(self) -> Member | None:
        """The broker that clients are sent to; None while this one may serve them.

        Raises:
            UnavailableError: There is none.
        """
        if self._cluster.is_leased:
            return None
        if self.is_isolated:
            raise UnavailableError(
                "this broker reaches neither the metadata store nor another broker",
                hint="connect to another broker",
            )
        return self.member

    async def find_owner(self, stand_in: Member, name: str) -> Member:
        """The broker that clients of a topic are sent to while this one is cut off."""
        assert self.peers is not None  # noqa: S101 - for mypy
        found = (await self.peers.find_owners(stand_in, [name]) or {}).get(name)
        return stand_in if found is None or found.node == self._cluster.own.node else found

    async def ask(self, names: Sequence[str]) -> dict[str, Member]:
        """Looks for a stand-in while the lease is in doubt; returns the owners of topics."""
        self.member, self.is_isolated, owners = await self._ask(names)
        return owners

    async def _ask(self, names: Sequence[str]) -> tuple[Member | None, bool, dict[str, Member]]:
        """The stand-in, whether no other broker responds, and the owners of topics."""
        peers, others = self.peers, self._cluster.members.known_others
        if peers is None or not self._cluster.is_in_doubt:
            return None, False, {}
        asked = random.sample(others, min(len(others), _ASKED_AT_ONCE))
        answers = await asyncio.gather(
            *(peers.find_owners(one, names) for one in asked), return_exceptions=True
        )
        for one, owners in zip(asked, answers, strict=True):
            if isinstance(owners, dict):
                return one, False, owners
        silent = all(isinstance(one, UnavailableError | WaitTimeoutError) for one in answers)
        return None, silent, {}
