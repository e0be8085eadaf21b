"""The entries of the brokers that share a metadata store: addresses, state, load.

    <root>/cluster/brokers/<node>        Member, as JSON; under the broker's lease
    <root>/cluster/owners/<ns>/<topic>   the node that has a topic open

Owns: the content of an entry, and reading all entries. Brokers read them, and Spark, to find the
broker of each topic. Does not own: writing an entry (`ister.broker.cluster.members`), the lease
(`membership`).

A broker that has died is listed, and owns its topics, until its lease ends.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from ister.base.structs import known
from ister.metadata.base import MetadataStore


class MemberState(StrEnum):
    """The state of a broker; only an active one takes new topics."""

    STARTING = "starting"
    """It recovers its topics and does not listen yet."""
    ACTIVE = "active"
    DRAINING = "draining"
    """It hands its topics over and takes no new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of a broker; rates are per second."""

    topics: int = 0
    messages_in: float = 0.0
    messages_out: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    cpu: float = 0.0
    """The share of one core that the process uses."""
    upload_lag_bytes: int = 0
    is_disk_low: bool = False
    """Whether its topics accept no messages because its disk is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A broker: its addresses, state and load."""

    node: str
    broker_url: str
    connect_url: str
    flight_url: str
    http_url: str = ""
    zone: str = ""
    version: str = ""
    state: MemberState = MemberState.ACTIVE
    load: Load = field(default_factory=Load)

    @property
    def is_proxied(self) -> bool:
        """Whether clients reach it by another address than its own."""
        return self.connect_url != self.broker_url

    @property
    def is_active(self) -> bool:
        """Whether it is neither starting nor draining."""
        return self.state is MemberState.ACTIVE

    @property
    def takes_topics(self) -> bool:
        """Whether topics are placed on it: it is active, and its disk has room."""
        return self.is_active and not self.load.is_disk_low


def member_key(root_prefix: str, node: str) -> str:
    """The key of a broker's entry; with an empty node, the prefix of all entries."""
    return f"{root_prefix}/cluster/brokers/{node}"


def encode_member(member: Member) -> bytes:
    """Encodes a broker's entry."""
    return msgspec.json.encode(member)


def read_members(store: MetadataStore, root_prefix: str) -> dict[str, Member]:
    """The brokers that are up, by node. Entries that cannot be read are left out."""
    found: dict[str, Member] = {}
    for item in store.range(member_key(root_prefix, "")):
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            member = msgspec.json.decode(item.value, type=known(Member))
            found[member.node] = member
    return found
