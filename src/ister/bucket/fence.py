"""A leased key that proves that its holder is alive: what a job's changes of topics depend on.

    take ─► compare, in every transaction ─► renew, a few times within its time ─► release

Owns: one key and its lease. Does not own: when it is renewed, what it guards.

A job that was stopped for longer than its lease, and wakes up in the middle of a commit, finds the
key gone, or taken by another job: its transaction fails as a whole. There are two kinds of keys:
those that one job can have at a time (the pipeline's lease, an export), and one that each job has.
A process that belongs to the cluster takes keys under the lease it has (`MemberFence`): a lease for
each of thousands of topics would be too many.

What a crash leaves: a key that expires with its lease.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from ister.base.clock import Clock
from ister.errors import (
    ConflictError,
    CorruptDataError,
    FencedError,
    IsterError,
    NotFoundError,
    UnavailableError,
)
from ister.metadata.base import Absent, Compare, Delete, Lease, MetadataStore, Put, RevisionIs
from ister.metadata.transact import transact, unchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The holder of a key, as it describes itself."""

    id: str
    since: int
    """Seconds since the Unix epoch."""
    about: Mapping[str, object]


def read_holder(store: MetadataStore, key: str) -> Holder | None:
    """The holder of a key."""
    found = store.get(key)
    if found is None:
        return None
    try:
        fields = json.loads(found.value)
        return Holder(id=str(fields["id"]), since=int(fields["since"]), about=fields["about"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptDataError(f"not a holder: {error!r}", path=key) from error


class Fence:
    """A leased key of a job. Thread-safe."""

    def __init__(
        self, store: MetadataStore, key: str, lease: Lease, revision: int, *, id: str, clock: Clock
    ) -> None:
        self.key = key
        self.id = id
        self._store = store
        self._lease = lease
        self._clock = clock
        self.compare = RevisionIs(key, revision)
        """What a transaction of the holder's requires."""

    @classmethod
    def take(
        cls,
        store: MetadataStore,
        key: str,
        *,
        id: str,
        about: Mapping[str, object],
        ttl_seconds: float,
        clock: Clock,
    ) -> Self:
        """Takes a key that does not exist yet.

        `id`: the holder's name, unlike any other's.
        `ttl_seconds`: how long it lasts without a renewal.

        Raises:
            ConflictError: Another holder has it.
        """
        value = _encode(id, about, clock)
        lease = store.grant_lease(ttl_seconds)
        try:
            revision = _put(store, key, value, lease)
        except BaseException:
            lease.revoke()
            raise
        if revision is None:
            lease.revoke()
            raise ConflictError(
                "another process holds the key", path=key, hint="wait until it has finished"
            )
        return cls(store, key, lease, revision, id=id, clock=clock)

    @property
    def is_valid(self) -> bool:
        """Whether this holder certainly has the key, by its own clock."""
        return self._clock.boottime() < self._lease.valid_until

    def renew(self) -> None:
        """Renews the lease."""
        try:
            self._lease.renew()
        except NotFoundError as error:
            raise self._gone() from error

    def check(self, topic: str | None = None) -> None:
        """Reads the key to make sure that this holder still has it."""
        found = self._store.get(self.key)
        if found is None or found.revision != self.compare.revision:
            raise self._gone(topic)

    def release(self) -> None:
        """Gives the key back. May be called twice; raises nothing."""
        self._lease.revoke()

    def _gone(self, topic: str | None = None) -> FencedError:
        return FencedError(
            "the lease of this job has ended",
            topic=topic,
            path=self.key,
            hint="it was stopped for too long, or the metadata store did not answer; "
            "run it again: what it has committed stays",
        )


class MemberFence(Fence):
    """A key under the lease of this process's membership; one process of the cluster has it.

    The membership renews it. When the lease has ended the key is gone, and has to be taken again.
    """

    on_gone: Callable[[FencedError], None] | None = None
    """Called when it turns out that this process does not have the key any more."""

    @classmethod
    def take_with(
        cls,
        store: MetadataStore,
        key: str,
        *,
        node: str,
        lease: Lease,
        is_here: Compare,
        clock: Clock,
    ) -> Self:
        """Takes a key that does not exist, or that an earlier process of this node left behind.

        `node`: this node; its processes follow each other.
        `is_here`: A compare that holds while this process has the node.

        Raises:
            ConflictError: Another node has it.
            UnavailableError: The metadata store does not answer, or the lease has ended.
        """
        value = _encode(node, {"token": secrets.token_hex(8)}, clock)

        def attempt() -> int | None:
            found = store.get(key)
            if found is not None and found.value == value:
                return found.revision
            holder = read_holder(store, key) if found is not None else None
            if holder is not None and holder.id != node:
                raise ConflictError(f"node {holder.id} holds the key", path=key)
            return store.transact([unchanged(key, found), is_here], [Put(key, value, lease)])

        try:
            revision = transact(attempt, UnavailableError("the key could not be taken", path=key))
        except NotFoundError as error:
            raise UnavailableError("the lease of this process has ended") from error
        return cls(store, key, lease, revision, id=node, clock=clock)

    def release(self) -> None:
        """Removes the key; the lease stays. May be called twice; raises nothing."""
        with suppress(IsterError):
            self._store.transact([self.compare], [Delete(self.key)])

    def _gone(self, topic: str | None = None) -> FencedError:
        error = FencedError(
            "this process no longer holds the key",
            topic=topic,
            path=self.key,
            hint="its lease has ended, or another node holds the key: take it again",
        )
        if self.on_gone is not None:
            self.on_gone(error)
        return error


def _encode(id: str, about: Mapping[str, object], clock: Clock) -> bytes:
    since = clock.now_ns() // 1_000_000_000
    return json.dumps({"id": id, "since": since, "about": dict(about)}).encode()


def _put(store: MetadataStore, key: str, value: bytes, lease: Lease) -> int | None:
    """Sets a key that does not exist; None if it does."""

    def attempt() -> tuple[int | None] | None:
        revision = store.transact([Absent(key)], [Put(key, value, lease)])
        if revision is not None:
            return (revision,)
        found = store.get(key)
        return None if found is None else (found.revision if found.value == value else None,)

    return transact(attempt, UnavailableError("it is not known who has the key", path=key))[0]
