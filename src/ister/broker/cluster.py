"""The brokers that share a metadata store, and which of them has a topic.

    <root>/cluster/brokers/<node>   {"broker_url": …, "connect_url": …, "flight_url": …}   leased

Owns: this broker's entry, and the answer to "where is this topic". Does not own: ownership itself,
which is the log's (`ister.bucket.claim`); the log's lease carries the entry.

A crash leaves an entry that ends with the lease.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from ister.errors import CorruptDataError, IsterError, UnavailableError
from ister.format.records import decode_owner
from ister.metadata.base import Delete, Put
from ister.model import TopicName
from ister.topic.stores import Tiers

_log = logging.getLogger("ister.broker.cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a broker is."""

    node: str
    broker_url: str
    connect_url: str
    flight_url: str

    @property
    def is_proxied(self) -> bool:
        """Whether clients reach it by another address than its own."""
        return self.connect_url != self.broker_url


class Cluster:
    """This broker among the others. Its calls block."""

    def __init__(self, own: Address, tiers: Tiers | None) -> None:
        self.own = own
        self._tiers = tiers

    def join(self) -> None:
        """Makes this broker known; called again now and then, in case the lease was a new one."""
        tiers = self._tiers
        if tiers is None:
            return
        key = self._prefix(tiers) + self.own.node
        value = msgspec.json.encode(self.own)
        try:
            found = tiers.metadata.get(key)
            if found is None or found.value != value:
                # Do not overwrite the entry of a process that has replaced this one.
                put = Put(key, value, tiers.membership.lease)
                tiers.metadata.transact([tiers.membership.is_here], [put])
        except IsterError as error:
            _log.warning(
                "broker entry not written; other brokers do not see this one",
                extra={"error": str(error)},
            )

    def leave(self) -> None:
        """Takes this broker's entry back."""
        tiers = self._tiers
        if tiers is not None:
            key = self._prefix(tiers) + self.own.node
            try:
                tiers.metadata.transact([tiers.membership.is_here], [Delete(key)])
            except IsterError as error:
                _log.warning(
                    "broker entry not removed; it is listed until its lease expires",
                    extra={"error": str(error)},
                )

    def brokers(self) -> list[Address]:
        """All brokers that are up, this one among them unless it was replaced."""
        found = {} if self._is_replaced else {self.own.node: self.own}
        if self._tiers is not None:
            for item in self._tiers.metadata.range(self._prefix(self._tiers)):
                address = _decode(item.value)
                if address is not None:
                    found[address.node] = address
        return list(found.values())

    def owner(self, topic: TopicName) -> Address | None:
        """The other broker that has a topic open now; None if no other has.

        Raises:
            UnavailableError: The topic is open in a process that is no broker.
        """
        if self._tiers is None:
            return None
        found = self._tiers.catalog(topic).owner()
        node = found[0].node if found is not None else self.own.node
        # A copy of the data directory that replaced this broker is the same node elsewhere.
        if node == self.own.node and not self._is_replaced:
            return None
        address = next((one for one in self.brokers() if one.node == node), None)
        if address is None:
            raise UnavailableError(
                "another process has the topic, and it is not a broker", topic=str(topic)
            )
        return address

    @property
    def _is_replaced(self) -> bool:
        return self._tiers is not None and self._tiers.membership.replaced is not None

    def count_topics(self) -> dict[str, int]:
        """How many topics each node has open."""
        if self._tiers is None:
            return {}
        tiers, counts = self._tiers, Counter[str]()
        prefix = f"{tiers.storage.metadata.root_prefix}/cluster/owners/"
        for item in tiers.metadata.range(prefix):
            with suppress(CorruptDataError):
                counts[decode_owner(item.value, key=item.key).node] += 1
        return counts

    def _prefix(self, tiers: Tiers) -> str:
        return f"{tiers.storage.metadata.root_prefix}/cluster/brokers/"


def _decode(value: bytes) -> Address | None:
    try:
        return msgspec.json.decode(value, type=Address)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
