"""This process's lease, under which it is its node's only process and owns topics.

    join ─► renew, a few times within the lease's time ─► end

    <root>/cluster/nodes/<node>/process   which process has the node now; leased
    <root>/cluster/nodes/<node>/latest    the instance that had the node's directory last

Owns: the lease, both keys, and the owner keys of all topics after the lease had ended. Does not
own: claims of single topics (`claim`), local files.

A node is an identity that is kept with the local files and used under their lock. A copy of the
files (a cloned machine, a snapshot, a restored backup) has the same identity, and a lock of its
own. So one process at a time has the node's key, every claim compares it, and joining tells three
cases apart:

- nobody has the key, or a process had it that used the very same directory, on a machine that has
  not been started anew since: the lock proves that it is gone, and the key is taken at once;
- another process has it: its lease has to end first. One that keeps its lease is alive, and this
  directory is a copy: refused;
- nobody has it, but the directory does not know the instance that had it last: this is an older
  copy, whose files lack what was written since: refused.

A process that finds, after its own lease had ended, that another one has the key, or had it, has
been replaced: it is fenced, in all topics, for good.

What a crash leaves: keys that end with their lease.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, NoReturn, Protocol

from ister import forks
from ister.clock import Clock
from ister.errors import (
    CapacityError,
    ClosedError,
    CommitUnknownError,
    ConflictError,
    DiskError,
    FencedError,
    IsterError,
    NotFoundError,
    UnavailableError,
)
from ister.format.records import (
    NodeProcess,
    decode_latest,
    decode_node_process,
    encode_latest,
    encode_node_process,
)
from ister.metadata.base import (
    Absent,
    Compare,
    KeyValue,
    Lease,
    MetadataStore,
    Operation,
    Put,
    RevisionIs,
    ValueIs,
)
from ister.tier.ownership import OwnedTopic

__all__ = ["Membership", "NodeDirectory"]

_log = logging.getLogger("ister.tier.membership")

_ATTEMPTS: Final = 5
_LOOK_SECONDS: Final = 0.2
# A holder renews three times within its lease, and a store may be late to end one.
_PATIENCE: Final = 1.5
_PATIENCE_SECONDS: Final = 2.0
# Two compares each, and one of all; etcd takes 128.
_TOPICS_PER_TRANSACTION: Final = 40


class NodeDirectory(Protocol):
    """What a node's data directory knows about the processes that had it."""

    identity: str
    """What tells it from its copies until the machine starts again; empty if unknown."""
    holder: str
    """The process that has it now, for people."""

    def instances(self) -> list[str]:
        """The instances that had it, the newest last; empty if none is on record."""
        ...

    def remember(self, instance: str) -> None:
        """Makes an instance the newest one, durably.

        Raises:
            CapacityError, DiskError: It cannot be written.
        """
        ...


class Membership:
    """This process as its node's only one, and its lease. Thread-safe.

    The lease's end is asked for before anything is acknowledged: a process that was stopped for
    longer than its lease knows it by its own clock, before it has heard from anybody.
    """

    def __init__(
        self,
        store: MetadataStore,
        *,
        root_prefix: str,
        node: str,
        directory: NodeDirectory,
        ttl_seconds: float,
        clock: Clock,
    ) -> None:
        """Joins as `node`, whose directory is locked; waits for another process's lease to end.

        Raises:
            ConflictError: Another process has the node and stays, or a newer copy of the
                directory was used since.
            UnavailableError: The metadata store does not answer.
        """
        self.node = node
        self.instance = secrets.token_hex(8)
        self._store = store
        self._directory = directory
        self._ttl = ttl_seconds
        self._clock = clock
        self._key = f"{root_prefix}/cluster/nodes/{node}/process"
        self._latest_key = f"{root_prefix}/cluster/nodes/{node}/latest"
        self._value = encode_node_process(
            NodeProcess(
                instance=self.instance,
                directory=directory.identity,
                holder=directory.holder,
                since=clock.now_ns() // 1_000_000_000,
                ttl_seconds=ttl_seconds,
            )
        )
        self._lost: FencedError | None = None
        # Held for moments, so that a claim never waits for thousands of others' renewal.
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        self._owned: dict[str, OwnedTopic] = {}
        forks.register(self)
        self.lease = self._join()

    def _after_fork(self, _error: ClosedError) -> None:
        """Leaves the lease to the parent: in a forked child the store refuses every call."""
        forks.reset_locks(self._lock, self._renewing)

    @property
    def is_here(self) -> Compare:
        """Holds while this process has the node: what every claim compares."""
        return ValueIs(self._key, self._value)

    @property
    def valid_until(self) -> float:
        """The `Clock.boottime` second up to which this process surely has its node."""
        return self.lease.valid_until

    @property
    def is_valid(self) -> bool:
        """Whether it still does; for a topic of its own, ask `OwnedTopic.is_leased`."""
        return self._clock.boottime() < self.lease.valid_until

    @property
    def replaced(self) -> FencedError | None:
        """Why this process owns nothing any more, for good; None while it may own topics."""
        return self._lost

    # -- joining ----------------------------------------------------------------------------

    def _join(self) -> Lease:
        known = self._directory.instances()
        found, latest = self._wait_for_turn(known)
        remembers = self._remember(self.instance)

        def take(lease: Lease) -> bool:
            nonlocal found, latest
            compares = [_unchanged(self._key, found), _unchanged(self._latest_key, latest)]
            operations: list[Operation] = [Put(self._key, self._value, lease)]
            if remembers:
                operations.append(Put(self._latest_key, encode_latest(self.instance)))
            with suppress(CommitUnknownError):
                if self._store.transact(compares, operations) is not None:
                    return True
            found, latest = self._wait_for_turn([*known, self.instance] if known else [])
            return found is not None and found.value == self._value

        return self._with_new_lease(take)

    def _with_new_lease(self, take: Callable[[Lease], bool]) -> Lease:
        """A lease with which `take` was done, which is tried a few times."""
        lease = self._store.grant_lease(self._ttl)
        try:
            if any(take(lease) for _ in range(_ATTEMPTS)):
                return lease
        except NotFoundError as error:
            raise UnavailableError("a new lease has ended at once") from error
        except BaseException:
            lease.revoke()
            raise
        lease.revoke()
        raise UnavailableError(f"the node {self.node} keeps changing hands")

    def _wait_for_turn(self, known: list[str]) -> tuple[KeyValue | None, KeyValue | None]:
        """Returns both keys as they are when nobody keeps this process from joining."""
        give_up_at: float | None = None
        while True:
            found, latest = self._store.get(self._key), self._store.get(self._latest_key)
            if _is_older(known, latest):
                raise self._older_copy()
            if found is None or found.value == self._value:
                return found, latest
            other = decode_node_process(found.value, key=found.key)
            if other.directory and other.directory == self._directory.identity:
                return found, latest
            now = self._clock.boottime()
            if give_up_at is None:
                give_up_at = now + other.ttl_seconds * _PATIENCE + _PATIENCE_SECONDS
                _log.warning(
                    "waiting for the lease of the node's other process to end",
                    extra={"node": self.node, "holder": _describe(other)},
                )
            elif now >= give_up_at:
                raise ConflictError(
                    f"another process has the identity of this directory: {_describe(other)}",
                    hint="stop that one; or, if this directory is a copy, remove `.node` from it, "
                    "which makes it a node of its own",
                )
            self._clock.sleep(_LOOK_SECONDS)

    def _older_copy(self) -> ConflictError:
        return ConflictError(
            f"this directory is an older copy of the node {self.node}: another copy was used "
            "since, and may hold acknowledged messages that are not here",
            hint="start the newer one; if it is lost, remove `.instances` from this directory to "
            "go on without those messages",
        )

    def _remember(self, instance: str) -> bool:
        """Has the directory know an instance before anybody else does; whether it does."""
        try:
            self._directory.remember(instance)
        except (CapacityError, DiskError) as error:
            # A full disk is no reason not to open a log: copies are told apart a little later.
            _log.warning("instance not recorded", extra={"node": self.node, "error": str(error)})
            return False
        return True

    # -- topics -----------------------------------------------------------------------------

    def add(self, owned: OwnedTopic, lease: Lease) -> None:
        """Takes note of a topic that was claimed with `lease`.

        Raises:
            FencedError: That lease has ended meanwhile, and somebody else has the topic.
            UnavailableError: It has ended, and the metadata store does not answer.
        """
        while True:
            with self._lock:
                current = self.lease
                if lease is current:
                    owned.lease = lease
                    self._owned[owned.topic] = owned
                    return
            self._reassert(owned, current)
            lease = current

    def remove(self, owned: OwnedTopic) -> None:
        """Forgets a topic that was released."""
        with self._lock:
            if self._owned.get(owned.topic) is owned:
                del self._owned[owned.topic]

    def check(self) -> None:
        """Makes sure, by asking, that this process has the node.

        Raises:
            FencedError: Another one has it.
            UnavailableError: The metadata store does not answer.
        """
        found = self._look()
        if found is None:
            self.renew()

    # -- the lease --------------------------------------------------------------------------

    def renew(self) -> None:
        """Renews the lease; where it has ended, takes a new one and puts the owner keys back.

        Topics that are taken back are usable at once; after an error the next call goes on.

        Raises:
            FencedError: Another process has the node: this one owns nothing any more.
            UnavailableError: The metadata store does not answer; try again before `valid_until`.
        """
        # One at a time: two that each took a new lease would leave owner keys under the other's.
        with self._renewing:
            # Before the lease is renewed: afterwards this one would look like the owner.
            found = self._look()
            if found is None or not self._extend():
                _log.warning("the lease ended", extra={"node": self.node})
                lease = self._rejoin()
                with self._lock:
                    self.lease = lease
            self._reclaim()

    def _look(self) -> KeyValue | None:
        """The node's key, which is this process's or absent.

        Raises:
            FencedError: It is another one's.
        """
        if self._lost is not None:
            raise self._lost.again()
        found = self._store.get(self._key)
        if found is not None and found.value != self._value:
            other = decode_node_process(found.value, key=found.key)
            self._lose(
                "another process with a copy of this directory has replaced this one: "
                f"{_describe(other)}"
            )
        return found

    def _extend(self) -> bool:
        try:
            self.lease.renew()
        except NotFoundError:
            return False
        return True

    def _lose(self, reason: str) -> NoReturn:
        """Gives everything up: another process has the node, or had it since."""
        self._lost = FencedError(
            reason,
            hint="what this one acknowledged and had not uploaded stays in its local files",
        )
        _log.error("replaced", extra={"node": self.node, "reason": reason})
        with self._lock:
            owned = list(self._owned.values())
            self._owned.clear()
        for topic in owned:
            topic.give_up(self._lost)
        self.lease.revoke()
        raise self._lost.again()

    def _rejoin(self) -> Lease:
        """Takes the node's key under a new lease, unless another process has it."""

        def take(lease: Lease) -> bool:
            # Also over a key of this process: it may be that of a lease that was given up.
            found, latest = self._look(), self._store.get(self._latest_key)
            if _is_older(self._directory.instances(), latest):
                self._lose("another process with a copy of this directory was here meanwhile")
            compares = [_unchanged(self._key, found), _unchanged(self._latest_key, latest)]
            with suppress(CommitUnknownError):
                put = Put(self._key, self._value, lease)
                return self._store.transact(compares, [put]) is not None
            return False

        return self._with_new_lease(take)

    def _reclaim(self) -> None:
        """Puts the owner keys back that ended with an earlier lease, many at a time."""
        lease = self.lease
        with self._lock:
            left = [topic for topic in self._owned.values() if topic.lease is not lease]
        renew_at = self._clock.boottime() + self._ttl / 3
        for at in range(0, len(left), _TOPICS_PER_TRANSACTION):
            self._reclaim_some(left[at : at + _TOPICS_PER_TRANSACTION], lease)
            if self._clock.boottime() >= renew_at:
                # Else the new lease would end before the last topic has it.
                if not self._extend():
                    raise UnavailableError("the new lease has ended before all topics had it")
                renew_at = self._clock.boottime() + self._ttl / 3
        if left:
            _log.info("topics taken back", extra={"node": self.node, "topics": len(left)})

    def _reclaim_some(self, topics: Sequence[OwnedTopic], lease: Lease) -> None:
        compares: list[Compare] = [self.is_here]
        operations: list[Operation] = []
        for topic in topics:
            required, put = topic.reassertion(lease)
            compares += required
            operations.append(put)
        try:
            revision = self._store.transact(compares, operations)
        except CommitUnknownError:
            revision = None
        except NotFoundError as error:
            raise UnavailableError("a new lease has ended at once") from error
        if revision is not None:
            for topic in topics:
                topic.regain(lease)
            return
        # One of them has changed: each by itself, so that it concerns that one alone.
        for topic in topics:
            try:
                self._reassert(topic, lease)
            except FencedError:
                self.remove(topic)
                if self._lost is not None:
                    raise
            except UnavailableError:
                raise
            except IsterError as error:
                # One topic's record cannot be read or written: that is its own trouble.
                topic.give_up(error)
                self.remove(topic)
            else:
                topic.regain(lease)

    def _reassert(self, owned: OwnedTopic, lease: Lease) -> None:
        try:
            owned.reassert(lease, self.is_here)
        except NotFoundError as error:
            raise UnavailableError("a new lease has ended at once") from error
        except ConflictError:
            if self._look() is None:
                raise UnavailableError("a new lease has ended at once") from None
            raise

    def end(self) -> None:
        """Gives the lease back, and with it every owner key."""
        if self._lost is None and self.is_valid:
            # Files that were copied before this moment are older than the directory is now.
            closed = secrets.token_hex(8)
            with suppress(IsterError):
                if self._remember(closed):
                    self._store.transact(
                        [self.is_here], [Put(self._latest_key, encode_latest(closed))]
                    )
        self.lease.revoke()


def _is_older(known: list[str], latest: KeyValue | None) -> bool:
    """Whether a directory that knows these instances lacks the one that had the node last."""
    if latest is None or not known:
        return False
    return decode_latest(latest.value, key=latest.key) not in known


def _unchanged(key: str, found: KeyValue | None) -> Compare:
    return Absent(key) if found is None else RevisionIs(key, found.revision)


def _describe(process: NodeProcess) -> str:
    since = datetime.fromtimestamp(process.since, UTC).isoformat(timespec="seconds")
    return f"{process.holder}, since {since}"
