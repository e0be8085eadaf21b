"""Metadata in an etcd cluster, through the messages and stubs of `aetcd`.

Owns: going from one endpoint to the next, which failure of a change means "unknown", and turning
gRPC's errors into ours. Does not own: what the keys mean, and which changes may be retried.

Commit point: etcd's answer. What a failure says about a change:

    the connection was not there, "no leader", a token that is too old   nothing was proposed:
                                                                         another endpoint is asked
    refused (too large, quota, rights, no such lease)                    an answer, given to the
                                                                         caller
    anything else: deadline, broken connection, "request timed out"      CommitUnknownError

A connection is waited for before a change is sent, so that a host that swallows packets counts as
"not there" and not as "unknown"; gRPC's own retries are off. One case is worse than it looks: an
etcd that fills up between its check and its write refuses with "database space exceeded" what it
has done, so a CapacityError for the quota does not prove that nothing changed.

Reads are always linearizable (`serializable` is never set): a member that was cut off from its
cluster does not answer them. Long ranges are read in pages of one revision.

A lease's time runs from before the request, and ends `max(1 s, 10 %)` (at most half) before
etcd's: clocks of two machines differ in speed, and a leader that lost its cluster answers
renewals for up to an election timeout, one second as etcd comes.

`aetcd` is asyncio: one thread runs its loop, and calls of other threads wait for it, each with a
deadline. Nothing connects before the first call. A process that forks must open its own store.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from contextlib import suppress
from typing import Final, TypeVar

from ister.base import forks, threads
from ister.base.clock import Clock
from ister.base.retry import backoff_seconds
from ister.config import EtcdTlsConfig
from ister.errors import (
    CapacityError,
    ClosedError,
    CommitUnknownError,
    ConfigError,
    InvariantError,
    NotFoundError,
    UnavailableError,
)
from ister.metadata.base import (
    Absent,
    Compare,
    KeyValue,
    Lease,
    Operation,
    Put,
    RevisionIs,
    StoreUsage,
    Watch,
)
from ister.metadata.checks import (
    TRANSACTION_PARTS_MAX,
    change_prefix,
    check_lease_time,
    check_put,
    check_transaction,
    encode_key,
    encode_prefix,
    key_bounds,
    prefix_end,
)
from ister.metadata.etcd_endpoint import Endpoint, Message, load_rpc, parse_endpoints
from ister.metadata.etcd_errors import (
    CompactedError,
    FailureOutcome,
    NotConnectedError,
    describe,
    judge,
    map_refusal,
)
from ister.metadata.etcd_usage import read_usage
from ister.metadata.leases import HeldLease, number_of

_log = logging.getLogger("ister.metadata.etcd")

_T = TypeVar("_T")

_PAGE_KEYS: Final = 1000

_TOTAL_FACTOR: Final = 3
"""Call timeouts after which a read gives up: long enough for an election and two dead endpoints."""

_RESTARTS_MAX: Final = 5
_PAUSE_SECONDS_MIN: Final = 0.02
_PAUSE_SECONDS_MAX: Final = 0.5
_WATCH_PAUSE_SECONDS: Final = 0.5

_STOP_SECONDS: Final = 5.0
_MARGIN_SECONDS: Final = 1.0
_MARGIN_SHARE: Final = 0.1


class EtcdMetadata:
    """Metadata in etcd; see the module header. Thread-safe.

    Args:
        endpoints: `host:port` of the members; `https://` before one means TLS for all.
        clock: Measures leases.
        call_timeout_seconds: How long one request to one endpoint may take.
        username: Where the cluster asks for it; needs `password`.
        password: Of that user.
        tls: Certificates; if any is set, TLS is used for endpoints without a scheme, too.

    Raises:
        ConfigError: An endpoint is invalid, a certificate cannot be read, or `aetcd` is not
            installed.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        clock: Clock,
        call_timeout_seconds: float = 5.0,
        username: str | None = None,
        password: str | None = None,
        tls: EtcdTlsConfig | None = None,
    ) -> None:
        if (username is None) != (password is None):
            raise ConfigError("etcd: a user name and a password come together")
        if not endpoints:
            raise ConfigError("etcd: no endpoint")
        targets, certificates = parse_endpoints(endpoints, tls or EtcdTlsConfig(), clock)
        self.location = f"etcd {','.join(targets)}"
        self._rpc = load_rpc()
        self._clock = clock
        self._call_timeout_seconds = call_timeout_seconds
        self._total_seconds = _TOTAL_FACTOR * call_timeout_seconds
        credentials = None if username is None or password is None else (username, password)
        self._endpoints = [
            Endpoint(self._rpc, target, credentials, certificates) for target in targets
        ]
        self._current = 0
        self._closing = threading.Lock()
        self._is_closed = False
        self._fork_error: ClosedError | None = None
        self._watches: set[_EtcdWatch] = set()
        forks.GRPC.use()
        self._loop = asyncio.new_event_loop()
        self._thread = threads.start("ister-metadata-etcd", self._run_loop)
        forks.register(self)

    # -- the seam ---------------------------------------------------------------------------

    def get(self, key: str) -> KeyValue | None:
        request = self._rpc.RangeRequest(key=encode_key(key))
        answer = self._read("get", _range_method, request)
        return _key_value(answer.kvs[0]) if answer.kvs else None

    def get_many(self, keys: Sequence[str]) -> dict[str, KeyValue]:
        encoded = [encode_key(key) for key in dict.fromkeys(keys)]
        self._check_open()
        found: dict[str, KeyValue] = {}
        at, size = 0, TRANSACTION_PARTS_MAX
        while at < len(encoded):
            group = encoded[at : at + size]
            # A transaction that only reads is a linearizable read; Raft need not agree on it.
            request = self._rpc.TxnRequest(
                success=[
                    self._rpc.RequestOp(request_range=self._rpc.RangeRequest(key=key))
                    for key in group
                ]
            )
            try:
                answer = self._read("get of many keys", _transaction_method, request)
            except CapacityError:
                # The answer is over this client's own limit: large values, so fewer of them.
                if size == 1:
                    raise
                size = max(1, size // 8)
                continue
            for part in answer.responses:
                for pair in part.response_range.kvs:
                    one = _key_value(pair)
                    found[one.key] = one
            at += len(group)
        return found

    def range(
        self,
        prefix: str,
        *,
        start: str | None = None,
        end: str | None = None,
        limit: int | None = None,
    ) -> list[KeyValue]:
        bounds = key_bounds(prefix, start, end, limit)
        if bounds is None:
            self._check_open()
            return []
        low, high = bounds
        for _ in range(_RESTARTS_MAX):
            pages = _Pages(self._rpc, low, high, limit)
            try:
                while (request := pages.next_request()) is not None:
                    pages.take(self._read_page(request, pages))
            except CompactedError:
                continue
            return [_key_value(pair) for pair in pages.found]
        raise UnavailableError(f"range {prefix}: etcd compacts faster than it can be read")

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        request = self._put_request(check_put(key, value), value, lease)
        answer = self._write(f"put {key}", lambda endpoint: endpoint.kv.Put, request)
        return int(answer.header.revision)

    def delete(self, key: str) -> bool:
        request = self._rpc.DeleteRangeRequest(key=encode_key(key))
        answer = self._write(f"delete {key}", lambda endpoint: endpoint.kv.DeleteRange, request)
        return int(answer.deleted) > 0

    def delete_prefix(self, prefix: str) -> int:
        low = change_prefix(prefix)
        request = self._rpc.DeleteRangeRequest(key=low, range_end=prefix_end(low))
        answer = self._write(
            f"delete prefix {prefix}", lambda endpoint: endpoint.kv.DeleteRange, request
        )
        return int(answer.deleted)

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> int | None:
        check_transaction(compares, operations)
        request = self._rpc.TxnRequest(
            compare=[self._compare(compare) for compare in compares],
            success=[self._operation(operation) for operation in operations],
        )
        answer = self._write("transaction", _transaction_method, request)
        return int(answer.header.revision) if answer.succeeded else None

    def current_revision(self, key: str) -> int:
        request = self._rpc.RangeRequest(key=encode_key(key), count_only=True)
        return int(self._read("read of the revision", _range_method, request).header.revision)

    def grant_lease(self, ttl_seconds: float) -> Lease:
        """A new lease, of whole seconds and at least as many as etcd's shortest."""
        check_lease_time(ttl_seconds)
        request = self._rpc.LeaseGrantRequest(TTL=math.ceil(ttl_seconds))
        asked_at = 0.0

        async def ask(endpoint: Endpoint, timeout: float) -> Message:
            nonlocal asked_at
            # Before each attempt: a lease whose answer was lost ends unused.
            asked_at = self._clock.boottime()
            return await endpoint.call(endpoint.lease.LeaseGrant, request, timeout)

        answer = self._run("grant of a lease", self._repeat("grant of a lease", ask))
        ttl = float(answer.TTL)
        return HeldLease(self, int(answer.ID), ttl, asked_at + ttl - _margin(ttl))

    def watch(self, prefix: str, on_change: Callable[[str], None]) -> Watch:
        watch = _EtcdWatch(self, encode_prefix(prefix), on_change)

        async def start() -> None:
            watch.task = asyncio.get_running_loop().create_task(self._follow(watch))
            self._watches.add(watch)
            # What changes after this call is seen; without an answer, what changes after a while.
            with suppress(TimeoutError):
                await asyncio.wait_for(watch.is_started.wait(), self._call_timeout_seconds)

        self._run("watch", start())
        return watch

    def usage(self, key: str) -> StoreUsage | None:
        return read_usage(self._rpc, self._read, key)

    def close(self) -> None:
        """Ends the watches, the connections and the thread. May be called twice."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        forks.GRPC.release()
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the loop's thread ------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()

    async def _end(self) -> None:
        """Cancels what is under way, so that every waiting thread gets an answer, and closes."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for endpoint in self._endpoints:
            with suppress(Exception):
                await asyncio.wait_for(endpoint.close(), _STOP_SECONDS)

    def _after_fork(self, error: ClosedError) -> None:
        """Abandons the parent's loop and connections: closing them would send bytes to etcd."""
        forks.reset_locks(self._closing)
        forks.leak(self._loop, self._endpoints)
        self._fork_error, self._is_closed = error, True

    def _check_open(self) -> None:
        if self._fork_error is not None:
            raise self._fork_error.again()
        if self._is_closed:
            raise ClosedError("the metadata store was closed")

    def _run(
        self, action: str, coroutine: Coroutine[None, None, _T], *, change: bool = False
    ) -> _T:
        """Runs on the loop's thread and waits for it; the coroutine keeps its own deadline."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise InvariantError("a watch's callback must not use the store: it would block")
        try:
            with self._closing:
                self._check_open()
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except BaseException:
            coroutine.close()
            raise
        try:
            # The coroutine keeps the real deadline; this one is for a loop that does not move.
            return future.result(self._total_seconds + _STOP_SECONDS)
        except FutureCancelledError as error:
            if change:
                raise CommitUnknownError(f"{action}: closed before the answer") from error
            raise ClosedError(f"{action}: the metadata store was closed") from error
        except TimeoutError as error:
            future.cancel()
            kind = CommitUnknownError if change else UnavailableError
            raise kind(f"{action}: no answer") from error
        except BaseException:
            # An interrupt of this thread; harmless where the coroutine itself has failed.
            future.cancel()
            raise

    # -- asking -----------------------------------------------------------------------------

    def _read(
        self, action: str, method: Callable[[Endpoint], Message], request: Message
    ) -> Message:
        async def ask(endpoint: Endpoint, timeout: float) -> Message:
            return await endpoint.call(method(endpoint), request, timeout)

        return self._run(action, self._repeat(action, ask))

    def _read_page(self, request: Message, pages: _Pages) -> Message:
        try:
            return self._read("range", _range_method, request)
        except CapacityError:
            # The answer is over this client's own limit: large values, so fewer of them.
            if not pages.shrink():
                raise
            return None

    def _write(
        self, action: str, method: Callable[[Endpoint], Message], request: Message
    ) -> Message:
        async def ask(endpoint: Endpoint, timeout: float) -> Message:
            return await endpoint.call(method(endpoint), request, timeout)

        return self._run(action, self._repeat(action, ask, change=True), change=True)

    async def _repeat(
        self,
        action: str,
        ask: Callable[[Endpoint, float], Coroutine[None, None, Message]],
        *,
        change: bool = False,
        total_seconds: float | None = None,
    ) -> Message:
        """Asks one endpoint after the other until one answers or the time is over.

        A change goes to the next one only if the failure proves that it was not proposed.
        """
        loop = asyncio.get_running_loop()
        total = self._total_seconds if total_seconds is None else total_seconds
        deadline = loop.time() + total
        pauses = 0
        refreshed = False
        attempts = 0
        while True:
            attempts += 1
            index = self._current
            endpoint = self._endpoints[index]
            timeout = min(self._call_timeout_seconds, max(deadline - loop.time(), 0.05))
            try:
                await endpoint.connect(timeout)
                return await ask(endpoint, timeout)
            except Exception as error:  # sorted out by what it proves
                verdict = judge(error)
                if verdict is FailureOutcome.TOKEN and not refreshed:
                    refreshed = True
                    endpoint.forget_token()
                    continue
                refusal = map_refusal(error, action, verdict)
                if refusal is not None:
                    raise refusal from error
                # Also after an unknown outcome: the caller reads back, and not here again. Another
                # call may have moved on already.
                if self._current == index:
                    self._current = (index + 1) % len(self._endpoints)
                if change and verdict is not FailureOutcome.NOT_PROPOSED:
                    raise CommitUnknownError(
                        f"{action}: {describe(error)}", hint="read back whether it happened"
                    ) from error
                pause = backoff_seconds(
                    pauses + 1, first=_PAUSE_SECONDS_MIN, most=_PAUSE_SECONDS_MAX
                )
                if loop.time() + pause >= deadline:
                    why = describe(error)
                    if isinstance(error, NotConnectedError):
                        why = await endpoint.explain() or why
                    raise UnavailableError(
                        f"{action}: no answer from {self.location} in {total:.1f} s: {why}"
                    ) from error
            # The first round goes through all endpoints without a pause.
            if attempts >= len(self._endpoints):
                await asyncio.sleep(pause)
                pauses += 1

    # -- messages ---------------------------------------------------------------------------

    def _put_request(self, key: bytes, value: bytes, lease: Lease | None) -> Message:
        lease_id = 0 if lease is None else number_of(lease, self)
        return self._rpc.PutRequest(key=key, value=bytes(value), lease=lease_id)

    def _operation(self, operation: Operation) -> Message:
        key = encode_key(operation.key)
        if isinstance(operation, Put):
            put = self._put_request(key, operation.value, operation.lease)
            return self._rpc.RequestOp(request_put=put)
        return self._rpc.RequestOp(request_delete_range=self._rpc.DeleteRangeRequest(key=key))

    def _compare(self, compare: Compare) -> Message:
        kinds = self._rpc.Compare
        key = encode_key(compare.key)
        if isinstance(compare, Absent):
            return kinds(key=key, result=kinds.EQUAL, target=kinds.CREATE, create_revision=0)
        if isinstance(compare, RevisionIs):
            # etcd gives an absent key the revision 0; ours has none at all.
            revision = compare.revision if compare.revision > 0 else -1
            return kinds(key=key, result=kinds.EQUAL, target=kinds.MOD, mod_revision=revision)
        return kinds(key=key, result=kinds.EQUAL, target=kinds.VALUE, value=compare.value)

    # -- leases -----------------------------------------------------------------------------

    def renew_lease(self, lease: HeldLease) -> float:
        """Asks for a lease's whole time again; see `Lease.renew`.

        Returns:
            The second up to which it now surely holds.
        """
        asked_at = 0.0

        async def ask(endpoint: Endpoint, timeout: float) -> Message:
            nonlocal asked_at
            asked_at = self._clock.boottime()
            return await endpoint.keep_alive(lease.id, timeout)

        # There is no use in an answer that comes after the end.
        left = max(lease.valid_until - self._clock.boottime(), self._call_timeout_seconds)
        answer = self._run(
            "renewal of a lease",
            self._repeat("renewal of a lease", ask, total_seconds=min(left, self._total_seconds)),
        )
        if answer.TTL <= 0:
            raise NotFoundError(f"the lease {lease.id:x} has ended")
        return asked_at + float(answer.TTL) - _margin(float(answer.TTL))

    def revoke_lease(self, lease_id: int) -> None:
        """Ends a lease and removes its keys, if etcd answers; see `Lease.revoke`."""
        request = self._rpc.LeaseRevokeRequest(ID=lease_id)

        async def ask(endpoint: Endpoint, timeout: float) -> Message:
            return await endpoint.call(endpoint.lease.LeaseRevoke, request, timeout)

        # Ending it twice is harmless, so this is repeated like a read, but not for long.
        self._run(
            "end of a lease",
            self._repeat("end of a lease", ask, total_seconds=self._call_timeout_seconds),
        )

    def boottime(self) -> float:
        """The store's clock."""
        return self._clock.boottime()

    # -- watches ----------------------------------------------------------------------------

    async def _follow(self, watch: _EtcdWatch) -> None:
        """Keeps a watch up over broken connections, until it is cancelled."""
        while True:
            index = self._current
            try:
                await self._follow_once(watch, self._endpoints[index])
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # The stream was cancelled, not this task: its channel was replaced by one with
                # new certificates.
            except Exception:  # noqa: BLE001 - tried again, at another endpoint
                _log.debug("watch interrupted; reconnecting", exc_info=True)
            if self._current == index:
                self._current = (index + 1) % len(self._endpoints)
            await asyncio.sleep(
                backoff_seconds(1, first=_WATCH_PAUSE_SECONDS, most=_WATCH_PAUSE_SECONDS)
            )

    async def _follow_once(self, watch: _EtcdWatch, endpoint: Endpoint) -> None:
        await endpoint.connect(self._call_timeout_seconds)
        create = self._rpc.WatchCreateRequest(
            key=watch.prefix or b"\0",
            range_end=prefix_end(watch.prefix) or b"\0",
            start_revision=watch.next_revision,
        )
        stream = endpoint.watch.Watch(metadata=endpoint.metadata)
        try:
            await stream.write(self._rpc.WatchRequest(create_request=create))
            while answer := await stream.read():
                if answer.compact_revision:
                    # The changes in between are compacted: every key may be new.
                    watch.next_revision = 0
                    await self._notify_all(watch, endpoint)
                    return
                if answer.canceled:
                    endpoint.forget_token()
                    return
                watch.next_revision = int(answer.header.revision) + 1
                watch.is_started.set()
                for key in dict.fromkeys(event.kv.key for event in answer.events):
                    threads.run("ister-metadata-watch", watch.notify, key)
        finally:
            stream.cancel()

    async def _notify_all(self, watch: _EtcdWatch, endpoint: Endpoint) -> None:
        request = self._rpc.RangeRequest(
            key=watch.prefix or b"\0", range_end=prefix_end(watch.prefix) or b"\0", keys_only=True
        )
        answer = await endpoint.call(endpoint.kv.Range, request, self._call_timeout_seconds)
        for pair in answer.kvs:
            threads.run("ister-metadata-watch", watch.notify, pair.key)

    def end_watch(self, watch: _EtcdWatch) -> None:
        """Called by a watch that ends."""

        def end() -> None:
            self._watches.discard(watch)
            if watch.task is not None:
                watch.task.cancel()

        with self._closing:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(end)


class _EtcdWatch:
    def __init__(
        self, store: EtcdMetadata, prefix: bytes, on_change: Callable[[str], None]
    ) -> None:
        self._store = store
        self._on_change = on_change
        self._is_closed = False
        self.prefix = prefix
        self.next_revision = 0
        self.is_started = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def notify(self, key: bytes) -> None:
        if not self._is_closed:
            self._on_change(key.decode())

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._store.end_watch(self)


class _Pages:
    """A range that is read page by page, all of them at the revision of the first."""

    def __init__(self, rpc: Message, low: bytes, high: bytes | None, limit: int | None) -> None:
        self.found: list[Message] = []
        self._rpc = rpc
        # Both ends in etcd's words: there is no empty key, and \0 as an end means all the rest.
        self._low = low or b"\0"
        self._high = high or b"\0"
        self._limit = limit
        self._page_keys = _PAGE_KEYS
        self._revision = 0
        self._is_done = False

    def next_request(self) -> Message:
        """Returns the request for the next page, or None."""
        if self._is_done:
            return None
        wanted = self._page_keys
        if self._limit is not None:
            wanted = min(wanted, self._limit - len(self.found))
        return self._rpc.RangeRequest(
            key=self._low, range_end=self._high, limit=wanted, revision=self._revision
        )

    def take(self, answer: Message) -> None:
        """Adds a page; None asks for it again."""
        if answer is None:
            return
        self._revision = self._revision or answer.header.revision
        self.found.extend(answer.kvs)
        self._is_done = not answer.more or len(self.found) == self._limit
        if answer.kvs:
            self._low = answer.kvs[-1].key + b"\0"

    def shrink(self) -> bool:
        """Asks for less at a time; whether that is possible."""
        if self._page_keys == 1:
            return False
        self._page_keys = max(1, self._page_keys // 8)
        return True


def _margin(ttl_seconds: float) -> float:
    return min(max(_MARGIN_SECONDS, _MARGIN_SHARE * ttl_seconds), ttl_seconds / 2)


def _range_method(endpoint: Endpoint) -> Message:
    return endpoint.kv.Range


def _transaction_method(endpoint: Endpoint) -> Message:
    return endpoint.kv.Txn


def _key_value(pair: Message) -> KeyValue:
    return KeyValue(pair.key.decode(), pair.value, pair.mod_revision)
