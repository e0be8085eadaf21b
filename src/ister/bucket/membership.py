"""The lease that makes this process the only one of its node and the owner of its topics.

    join ─► renew, a few times within the lease's time ─► end

    <root>/cluster/nodes/<node>/process   which process has the node now; leased
    <root>/cluster/nodes/<node>/latest    the instance that had the node's directory last

Owns: the lease, both keys, and restoring the owner keys of all topics after the lease has expired.
Does not own: claims of single topics (`claim`), local files.

A node's identity is stored with its local files and used under their lock. A copy of the files (a
cloned machine, a snapshot, a restored backup) has the same identity but its own lock. So only one
process at a time has the node's key, and every claim compares it. Joining distinguishes three
cases:

- The key is absent, or belongs to a process that used this same directory since the last reboot:
  our file lock proves that it has ended. The key is taken immediately.
- Another process has the key: wait for its lease to expire. If that process keeps renewing it, it
  is alive and this directory is a copy: refused.
- The key is absent, but this directory has no record of the instance that had it last: this is an
  older copy, without what was written since: refused.

A process whose lease expired and that then finds that another process has or had the key has been
replaced: it is fenced, in all topics, for good.

What a crash leaves: keys that expire with their lease.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NoReturn, Protocol

from ister.base import forks
from ister.base.clock import Clock
from ister.base.positions import format_time
from ister.bucket.ownership import OwnedTopic
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
    LatestInstance,
    NodeProcess,
    decode_latest,
    decode_node_process,
    encode_latest,
    encode_node_process,
)
from ister.metadata.base import (
    Compare,
    KeyValue,
    Lease,
    MetadataStore,
    Operation,
    Put,
    RevisionIs,
    ValueIs,
)
from ister.metadata.transact import ATTEMPTS, unchanged

_log = logging.getLogger("ister.bucket.membership")

_LOOK_SECONDS: Final = 0.2
# A live holder renews three times per lease; a store may be late to expire one.
_PATIENCE: Final = 1.5
_PATIENCE_SECONDS: Final = 2.0
# Two compares for each topic and one for the node; etcd accepts 128 per transaction.
_TOPICS_PER_TRANSACTION: Final = 40


def is_node_running(store: MetadataStore, root_prefix: str, node: str) -> bool:
    """Whether a process has a node, as far as its lease tells."""
    return store.get(_process_key(root_prefix, node)) is not None


def has_ended(store: MetadataStore, root_prefix: str, node: str, instance: str) -> bool:
    """Whether a process of a node has closed all of its topics, and no later one had the node."""
    found = store.get(_latest_key(root_prefix, node))
    return found is not None and decode_latest(found.value, key=found.key).ended == instance


def _process_key(root_prefix: str, node: str) -> str:
    return f"{root_prefix}/cluster/nodes/{node}/process"


def _latest_key(root_prefix: str, node: str) -> str:
    return f"{root_prefix}/cluster/nodes/{node}/latest"


class NodeDirectory(Protocol):
    """A node's data directory and its record of the processes that opened it."""

    identity: str
    """Identifies the directory among copies of it, until the machine reboots; empty if unknown."""
    holder: str
    """This process in readable form."""
    is_lasting: bool
    """Whether the directory outlives the process, so that others may have the node later."""

    def instances(self) -> list[str]:
        """The recorded instances, the newest last."""
        ...

    def remember(self, instance: str) -> None:
        """Records an instance as the newest one, durably.

        Raises:
            CapacityError, DiskError: The record cannot be written.
        """
        ...


class Membership:
    """This process's membership of the cluster: its node key and its lease. Thread-safe.

    The lease's deadline is checked before anything is acknowledged: a process that was paused for
    longer than its lease knows from its own clock that the lease has expired.
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
        """Joins as `node`, whose directory is locked; waits for another process's lease to expire.

        Raises:
            ConflictError: Another process has the node and keeps its lease, or a newer copy of the
                directory was used.
        """
        self.node = node
        self.instance = secrets.token_hex(8)
        self._store = store
        self._directory = directory
        self._ttl = ttl_seconds
        self._clock = clock
        self._key = _process_key(root_prefix, node)
        self._latest_key = _latest_key(root_prefix, node)
        self.ended = ""
        """The process that had the node before this one, if it closed all of its topics."""
        self.is_whole = True
        """Whether the catalogs of its topics have all objects that the next owner has to find."""
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
        # Held briefly, so that a claim does not wait until thousands of owner keys are renewed.
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        self._owned: dict[str, OwnedTopic] = {}
        # The revision of the last change of a topic that was released.
        self._changed_at = 0
        self._presence: tuple[Lease, Compare] | None = None
        forks.register(self)
        self.lease = self._join()

    def _after_fork(self, _error: ClosedError) -> None:
        """Resets the locks in a forked child; the lease stays the parent's."""
        forks.reset_locks(self._lock, self._renewing)

    @property
    def is_here(self) -> Compare:
        """A compare that holds while this process has the node; part of every claim."""
        return ValueIs(self._key, self._value)

    def presence(self) -> Compare:
        """Returns a compare that holds as long as the current lease does.

        Unlike `is_here`, it does not hold again after this process has rejoined.

        Raises:
            UnavailableError: The metadata store does not answer, or the lease has ended.
        """
        lease, known = self.lease, self._presence
        if known is not None and known[0] is lease:
            return known[1]
        found = self._store.get(self._key)
        if found is None or found.value != self._value:
            raise UnavailableError("the lease of this process has ended")
        compare = RevisionIs(self._key, found.revision)
        self._presence = (lease, compare)
        return compare

    @property
    def valid_until(self) -> float:
        """The `Clock.boottime` second until which the lease is valid."""
        return self.lease.valid_until

    @property
    def is_valid(self) -> bool:
        """Whether the lease is valid; for a single topic use `OwnedTopic.is_leased`."""
        return self._clock.boottime() < self.lease.valid_until

    @property
    def replaced(self) -> FencedError | None:
        """Why this process owns nothing any more, for good; None while it may own topics."""
        return self._lost

    # -- joining ----------------------------------------------------------------------------

    def _join(self) -> Lease:
        known = self._directory.instances()
        found, latest = self._wait_for_turn(known)
        if latest is not None:
            self.ended = decode_latest(latest.value, key=latest.key).ended
        remembers = self._remember(self.instance)

        def take(lease: Lease) -> bool:
            nonlocal found, latest
            compares = [unchanged(self._key, found), unchanged(self._latest_key, latest)]
            operations: list[Operation] = [Put(self._key, self._value, lease)]
            if remembers:
                operations.append(Put(self._latest_key, self._encode_latest()))
            with suppress(CommitUnknownError):
                if self._store.transact(compares, operations) is not None:
                    return True
            found, latest = self._wait_for_turn([*known, self.instance] if known else [])
            return found is not None and found.value == self._value

        return self._with_new_lease(take)

    def _encode_latest(self) -> bytes:
        return encode_latest(LatestInstance(instance=self.instance))

    def _with_new_lease(self, take: Callable[[Lease], bool]) -> Lease:
        """Grants a lease and calls `take` with it until that succeeds, a few times at most."""
        lease = self._store.grant_lease(self._ttl)
        try:
            if any(take(lease) for _ in range(ATTEMPTS)):
                return lease
        except NotFoundError as error:
            raise UnavailableError("a new lease has ended at once") from error
        except BaseException:
            lease.revoke()
            raise
        lease.revoke()
        raise UnavailableError(
            f"the key of the node {self.node} changed during {ATTEMPTS} attempts to take it"
        )

    def _wait_for_turn(self, known: list[str]) -> tuple[KeyValue | None, KeyValue | None]:
        """Waits until this process may take the node's key; returns both keys as read."""
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
                    "waiting for the lease of another process of this node to expire",
                    extra={"node": self.node, "holder": _describe(other)},
                )
            elif now >= give_up_at:
                raise ConflictError(
                    f"another process uses this directory's identity: {_describe(other)}",
                    hint="stop that process; or, if this directory is a copy, remove its `.node` "
                    "file to make it a separate node",
                )
            self._clock.sleep(_LOOK_SECONDS)

    def _older_copy(self) -> ConflictError:
        return ConflictError(
            f"this directory is an older copy of the node {self.node}: another copy was used "
            "later, and may hold acknowledged messages that are not here",
            hint="start the newer copy; if it is lost, remove `.instances` from this directory to "
            "continue without those messages",
        )

    def _remember(self, instance: str) -> bool:
        """Records an instance in the directory; returns whether that succeeded."""
        if not self._directory.is_lasting:
            return False  # no later process has this node, so it needs no lasting key
        try:
            self._directory.remember(instance)
        except (CapacityError, DiskError) as error:
            # A full disk must not keep a log from opening; only the detection of copies suffers.
            _log.warning("cannot record instance", extra={"node": self.node, "error": str(error)})
            return False
        return True

    # -- topics -----------------------------------------------------------------------------

    def add(self, owned: OwnedTopic, lease: Lease) -> None:
        """Registers a topic that was claimed with `lease`.

        Raises:
            FencedError: That lease has expired, and another node has the topic.
            UnavailableError: It has expired, and the metadata store does not respond.
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
        if owned.is_fenced:
            self.is_whole = False  # the metadata store may have been rolled back to an older state
        with self._lock:
            self._changed_at = max(self._changed_at, owned.changed_at)
            if self._owned.get(owned.topic) is owned:
                del self._owned[owned.topic]

    def check_whole(self) -> None:
        """Compares this process's changes with the store, which may have been rolled back."""
        with self._lock:
            owned, changed_at = list(self._owned.values()), self._changed_at
        changed_at = max([changed_at, *(topic.changed_at for topic in owned)])
        found = self._store.get_many([topic.catalog.keys.current for topic in owned])
        if self._store.current_revision(self._key) < changed_at or not all(
            topic.knows_pointer(found.get(topic.catalog.keys.current)) for topic in owned
        ):
            self.is_whole = False

    def check(self) -> None:
        """Checks with the metadata store that this process has the node."""
        found = self._read_key()
        if found is None:
            self.renew()

    # -- the lease --------------------------------------------------------------------------

    def renew(self) -> None:
        """Renews the lease; if it has expired, takes a new one and restores the owner keys.

        Each topic is usable as soon as its key is restored; after an error the next call continues.

        Raises:
            FencedError: Another process has the node: this one owns no topic any more.
            UnavailableError: The metadata store does not respond; retry before `valid_until`.
        """
        # One at a time: with two new leases, some owner keys would be under the wrong one.
        with self._renewing:
            # Check before renewing: a renewed lease would make a replaced process look valid.
            found = self._read_key()
            if found is None or not self._extend():
                _log.warning("lease expired; joining again", extra={"node": self.node})
                lease = self._rejoin()
                with self._lock:
                    self.lease = lease
            self._reclaim()

    def _read_key(self) -> KeyValue | None:
        """Reads the node's key; None if it is absent.

        Raises:
            FencedError: It belongs to another process.
        """
        if self._lost is not None:
            raise self._lost.again()
        found = self._store.get(self._key)
        if found is not None and found.value != self._value:
            other = decode_node_process(found.value, key=found.key)
            self._lose(
                f"a process with a copy of this directory has replaced this one: {_describe(other)}"
            )
        return found

    def _extend(self) -> bool:
        try:
            self.lease.renew()
        except NotFoundError:
            return False
        return True

    def _lose(self, reason: str) -> NoReturn:
        """Fences all topics: another process has the node, or had it since."""
        self._lost = FencedError(
            reason,
            hint="acknowledged messages that were not uploaded stay in this node's local files",
        )
        _log.error("replaced by another process", extra={"node": self.node, "reason": reason})
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
            # Overwrites a key of this process, too: it may be under an abandoned lease.
            found, latest = self._read_key(), self._store.get(self._latest_key)
            if _is_older(self._directory.instances(), latest):
                self._lose("a process with a copy of this directory has used the node meanwhile")
            compares = [unchanged(self._key, found), unchanged(self._latest_key, latest)]
            with suppress(CommitUnknownError):
                put = Put(self._key, self._value, lease)
                return self._store.transact(compares, [put]) is not None
            return False

        return self._with_new_lease(take)

    def _reclaim(self) -> None:
        """Restores owner keys that expired with an earlier lease, many per transaction."""
        lease = self.lease
        with self._lock:
            left = [topic for topic in self._owned.values() if topic.lease is not lease]
        renew_at = self._clock.boottime() + self._ttl / 3
        for at in range(0, len(left), _TOPICS_PER_TRANSACTION):
            self._reclaim_some(left[at : at + _TOPICS_PER_TRANSACTION], lease)
            if self._clock.boottime() >= renew_at:
                # Restoring thousands of keys can take longer than the lease.
                if not self._extend():
                    raise UnavailableError(
                        "the new lease expired before all owner keys were restored"
                    )
                renew_at = self._clock.boottime() + self._ttl / 3
        if left:
            _log.info("ownership restored", extra={"node": self.node, "topics": len(left)})

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
        # At least one topic has changed: retry one by one, so that the others are not affected.
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
                # The record of this topic cannot be read or written; the others can.
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
            if self._read_key() is None:
                raise UnavailableError("a new lease has ended at once") from None
            raise

    def end(self) -> None:
        """Revokes the lease, which deletes the node's key and every owner key."""
        if self._lost is None and self.is_valid:
            # A new instance, so that copies made before this moment are recognized as older.
            closed = secrets.token_hex(8)
            with suppress(IsterError):
                if self._remember(closed):
                    ended = LatestInstance(
                        instance=closed, ended=self.instance if self.is_whole else ""
                    )
                    self._store.transact(
                        [self.is_here], [Put(self._latest_key, encode_latest(ended))]
                    )
        self.lease.revoke()


def _is_older(known: list[str], latest: KeyValue | None) -> bool:
    """Whether the latest instance of the node is missing from a directory's record."""
    if latest is None or not known:
        return False
    return decode_latest(latest.value, key=latest.key).instance not in known


def _describe(process: NodeProcess) -> str:
    return f"{process.holder}, since {format_time(process.since * 1000)}"
