"""Metadata in one SQLite file, shared by the processes of one machine.

Owns: the file's schema, its settings, and turning SQLite's errors into ours. Does not own: what
the keys mean, or sharing between machines (the file must not be on a network file system).

Commit point: SQLite's COMMIT in WAL mode with `synchronous = FULL`, which syncs the log before it
returns. Both settings are read back at open: with less, a power cut takes answered changes away.
A crash leaves the file, its `-wal` and its `-shm`; the next open replays whole transactions and
drops a torn one. A crash between making the file and its tables leaves an empty database, which
the next open fills.

    entries (key BLOB, value BLOB, revision, lease)     sorted by the key's UTF-8 bytes
    leases  (id, boot, ends, ttl)                       `ends` in `boottime` seconds of `boot`
    changes (revision, key)                             the latest ones, for watches
    state   (name, value)                               the revision counter

Invariants: every change raises the counter in the transaction that makes it, so revisions follow
the order of commits over all processes. A key whose lease has ended is absent for every read and
compare from that moment on; the next change removes it, under a revision of its own. A lease of
another boot has ended: the machine went down, and its holder with it.

Writers wait for each other, at most `busy_timeout_seconds`; readers do not wait. Group commit:
changes of threads that wait for the writer lock are committed together. One sync makes all of them
durable; each has its own revision. The clock must be one that all processes share (`SystemClock`:
CLOCK_BOOTTIME).

SQLite connections must not be used after a fork. A child neither uses nor closes its parent's
connections (closing one could change the WAL that the parent writes). It cannot open the same file
either: SQLite keeps its locks per process, would take the parent's for its own, and would hold no
lock that other processes see.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, TypeVar

from ister.base import forks, threads
from ister.base.clock import Clock
from ister.base.guarded_lock import GuardedLock, endless_error
from ister.errors import (
    CapacityError,
    ClosedError,
    CommitUnknownError,
    IsterError,
    NotFoundError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.fs.local import LocalFileSystem, boot_id
from ister.metadata.base import Compare, KeyValue, Lease, Operation, Put, Watch
from ister.metadata.checks import (
    change_prefix,
    check_lease_time,
    check_put,
    check_transaction,
    encode_key,
    encode_prefix,
    holds,
    key_bounds,
    prefix_end,
)
from ister.metadata.leases import HeldLease
from ister.metadata.sqlite_change import CHANGES_KEPT, Change, last_revision
from ister.metadata.sqlite_file import SqliteFile, rolled_back_on_error

_T = TypeVar("_T")


_IDLE_READERS_MAX: Final = 4
_POLL_SECONDS: Final = 0.2
# The most changes in one commit; each adds a few pages to SQLite's WAL.
_CHANGES_AT_ONCE_MAX: Final = 64
# SQLite before 3.32 allows 999 parameters in a statement.
_KEYS_AT_ONCE_MAX: Final = 500

_ALIVE: Final = (
    "(lease IS NULL OR EXISTS "
    "(SELECT 1 FROM leases WHERE id = entries.lease AND boot = :boot AND ends > :now))"
)

# Two stores on one path in one process: closing any descriptor of a file drops all the locks that
# the process holds on it, so a file is made only while no other store can be opening it.
_opening = threading.Lock()
forks.call_in_child(lambda: forks.reset_locks(_opening))

# Files (device, inode) that the parent of this process had open when it forked.
_open_in_parent: set[tuple[int, int]] = set()


class SqliteMetadata:
    """Metadata in the SQLite file at `path`; see the module header. Thread-safe.

    Args:
        path: The file; it and its directory are made where missing.
        clock: Measures leases; the same for all processes that share the file.
        busy_timeout_seconds: How long a change waits for those of others.
        read_only: Creates and changes nothing, for tools that inspect a file. SQLite's own
            `-shm` may appear beside a file whose `-wal` was left by a crash.
        on_full: Called when the disk is full; returns whether it freed space for a retry.

    Raises:
        NotFoundError: `read_only`, and there is no such file, or nothing in it yet.
        CorruptDataError: The file is damaged, or not a database.
        UnsupportedVersionError: A newer Ister made it.
        ConfigError: It is another program's database.
        UnavailableError: It is locked for too long, or the file system cannot do what SQLite's
            WAL mode needs.
    """

    def __init__(
        self,
        path: str,
        *,
        clock: Clock,
        busy_timeout_seconds: float = 10.0,
        read_only: bool = False,
        on_full: Callable[[], bool] | None = None,
    ) -> None:
        self.location = f"sqlite {path}"
        self._path = os.path.abspath(path)
        self._clock = clock
        self._busy_timeout_seconds = busy_timeout_seconds
        self._is_read_only = read_only
        self._file = SqliteFile(
            self._path, busy_timeout_seconds=busy_timeout_seconds, is_read_only=read_only
        )
        self._boot = boot_id()
        self._is_closed = False
        self._on_full: Callable[[], bool] = on_full if on_full is not None else lambda: False
        self._writer_lock = GuardedLock()
        self._writer: sqlite3.Connection | None = None
        self._requests: deque[_Request] = deque()
        self._readers_lock = threading.Lock()
        self._idle_readers: list[sqlite3.Connection] = []
        self._watching = threading.Lock()
        self._watches: list[_SqliteWatch] = []
        self._poller: _Poller | None = None
        self._file_id: tuple[int, int] | None = None
        self._fork_error: ClosedError | None = None
        with _opening:
            existed = os.path.exists(self._path)
            self._check_not_inherited()
            if read_only:
                if not existed:
                    raise NotFoundError(
                        "metadata file not found",
                        path=self._path,
                        hint="is it the right directory or config? Where the file was lost, "
                        "`ister recover` rebuilds it from the bucket",
                    )
                self._register_file()
                self._verify_read_only()
                return
            LocalFileSystem().make_directories(os.path.dirname(self._path))
            if not existed:
                self._file.make()
            self._register_file()
        try:
            self._open_writer(check=existed)
        except CapacityError:
            if not self._on_full():
                raise
            self._open_writer(check=existed)

    # -- the seam ---------------------------------------------------------------------------

    def get(self, key: str) -> KeyValue | None:
        encoded = encode_key(key)
        with self._reader("get") as connection:
            return self._find(connection, key, encoded, self._clock.boottime())

    def get_many(self, keys: Sequence[str]) -> dict[str, KeyValue]:
        found: dict[str, KeyValue] = {}
        with self._reader("get many") as connection:
            for at in range(0, len(keys), _KEYS_AT_ONCE_MAX):
                some = keys[at : at + _KEYS_AT_ONCE_MAX]
                found |= self._find_many(connection, some, self._clock.boottime())
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
        where, values = _where(*bounds)
        # Everything that varies in the statement is one of our own constants.
        statement = (
            f"SELECT key, value, revision FROM entries WHERE {where} AND {_ALIVE} "  # noqa: S608
            "ORDER BY key LIMIT :limit"
        )
        with self._reader("range") as connection:
            rows = connection.execute(
                statement,
                {
                    **values,
                    "boot": self._boot,
                    "now": self._clock.boottime(),
                    "limit": -1 if limit is None else limit,
                },
            ).fetchall()
        return [KeyValue(key.decode(), value, revision) for key, value, revision in rows]

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        check_put(key, value)
        return self._change("put", lambda change: change.apply([Put(key, value, lease)]))

    def delete(self, key: str) -> bool:
        encoded = encode_key(key)
        return self._change("delete", lambda change: change.remove("key = ?", [encoded]) == 1)

    def delete_prefix(self, prefix: str) -> int:
        low = change_prefix(prefix)
        high = prefix_end(low)
        return self._change(
            "delete prefix", lambda change: change.remove("key >= ? AND key < ?", [low, high])
        )

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> int | None:
        check_transaction(compares, operations)

        def work(change: Change) -> int | None:
            keys = [compare.key for compare in compares]
            found = self._find_many(change.connection, keys, change.now) if keys else {}
            if not all(holds(compare, found.get(compare.key)) for compare in compares):
                return None
            return change.apply(operations)

        return self._change("transaction", work)

    def grant_lease(self, ttl_seconds: float) -> Lease:
        check_lease_time(ttl_seconds)
        asked_at = self._clock.boottime()

        def work(change: Change) -> int:
            cursor = change.connection.execute(
                "INSERT INTO leases (boot, ends, ttl) VALUES (?, ?, ?)",
                (self._boot, change.now + ttl_seconds, ttl_seconds),
            )
            return int(cursor.lastrowid or 0)

        lease_id = self._change("grant of a lease", work)
        return HeldLease(self, lease_id, ttl_seconds, asked_at + ttl_seconds)

    def watch(self, prefix: str, on_change: Callable[[str], None]) -> Watch:
        # The file is asked five times a second while there are watches.
        low, revision = encode_prefix(prefix), self.current_revision(prefix)
        with self._watching:
            self._check_open()
            watch = _SqliteWatch(self, low, on_change, revision)
            self._watches.append(watch)
            if self._poller is None:
                self._poller = _Poller(self)
            return watch

    def usage(self, key: str) -> None:
        """Always None: the store has no quota."""

    def close(self) -> None:
        """Lets go of the file. May be called twice."""
        with self._watching:
            self._is_closed = True
            self._watches.clear()
            poller, self._poller = self._poller, None
        if poller is not None:
            poller.stop()
        with self._writer_lock:
            writer, self._writer = self._writer, None
        with self._readers_lock:
            connections, self._idle_readers = self._idle_readers, []
        if writer is not None:
            connections.append(writer)
        for connection in connections:
            connection.close()

    # -- forks ------------------------------------------------------------------------------

    def _register_file(self) -> None:
        found = os.stat(self._path)
        self._file_id = (found.st_dev, found.st_ino)
        forks.register(self)

    def _check_not_inherited(self) -> None:
        with suppress(FileNotFoundError):
            found = os.stat(self._path)
            if (found.st_dev, found.st_ino) in _open_in_parent:
                raise ClosedError(
                    "SQLite cannot open the metadata file in this process: its parent had the file "
                    "open when it forked",
                    path=self._path,
                    hint=forks.HINT,
                )

    def _after_fork(self, error: ClosedError) -> None:
        """Abandons the parent's connections without closing them; see the module header."""
        forks.reset_locks(self._writer_lock, self._readers_lock, self._watching)
        self._requests.clear()
        forks.leak(self._writer, *self._idle_readers)
        self._writer, self._idle_readers = None, []
        self._watches, self._poller = [], None
        self._fork_error, self._is_closed = error, True
        if self._file_id is not None:
            _open_in_parent.add(self._file_id)

    # -- opening ----------------------------------------------------------------------------

    def _open_writer(self, *, check: bool) -> None:
        with self._file.mapped("open"):
            connection = self._file.connect()
            try:
                self._file.prepare(connection, check=check)
            except BaseException:
                connection.close()
                raise
        self._writer = connection

    def _verify_read_only(self) -> None:
        with self._reader("open") as connection:
            self._file.check_owner(connection)
            self._file.check_damage(connection)

    # -- inside -----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._fork_error is not None:
            raise self._fork_error.again()
        if self._is_closed:
            raise ClosedError("the metadata store was closed", path=self._path)
        if self._file.damage is not None:
            raise self._file.damage.again()

    @contextmanager
    def _reader(self, action: str) -> Iterator[sqlite3.Connection]:
        """A connection of the calling thread alone, for the time of one read."""
        with self._readers_lock:
            self._check_open()
            connection = self._idle_readers.pop() if self._idle_readers else None
        with self._file.mapped(action):
            if connection is None:
                connection = self._file.connect()
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            self._keep_reader(connection)

    def _keep_reader(self, connection: sqlite3.Connection) -> None:
        # Read only, the way to open it depends on whether another process has it open: check again.
        if not self._is_read_only:
            with self._readers_lock:
                if not self._is_closed and len(self._idle_readers) < _IDLE_READERS_MAX:
                    # Never closed from here on: a signal handler may raise right behind it.
                    self._idle_readers.append(connection)
                    return
        connection.close()

    def _change(self, action: str, work: Callable[[Change], _T]) -> _T:
        """Runs `work` in a transaction that is durable when this returns.

        The thread that gets the writer lock commits the changes of all threads that wait for it.
        """
        if self._is_read_only:
            raise UnsupportedOperationError(
                "the metadata store was opened read-only", path=self._path
            )
        if self._writer_lock.is_mine:  # a finalizer interrupted a change
            raise endless_error()
        results: list[_T] = []

        def run(change: Change) -> None:
            results[:] = [work(change)]  # the last attempt counts

        request = _Request(action, run)
        self._requests.append(request)
        has_lock = False
        try:
            has_lock = self._writer_lock.acquire(timeout=self._busy_timeout_seconds)
        finally:
            if not has_lock:  # also if a signal handler has raised
                is_running = not self._withdraw(request)
        if not has_lock:
            text = f"{action} failed: other threads' changes take too long"
            kind = CommitUnknownError if is_running else UnavailableError
            raise kind(text, path=self._path)
        try:
            if not request.is_done:
                self._run(request)
        finally:
            self._writer_lock.release()
        if request.error is not None:
            raise request.error
        return results[0]

    def _withdraw(self, request: _Request) -> bool:
        """Withdraws a change; returns False if another thread has taken it into its commit."""
        with suppress(ValueError):
            self._requests.remove(request)
            return True
        return request.is_alone

    def _run(self, own: _Request) -> None:
        """Commits `own` and the changes that wait; the caller holds the writer lock."""
        self._withdraw(own)
        if own.is_committing:
            raise CommitUnknownError(
                f"{own.action}: the thread that committed it was interrupted", path=self._path
            )
        self._check_open()
        connection = self._writer
        if connection is None:
            raise ClosedError("the metadata store was closed", path=self._path)
        requests = [own]
        while not own.is_alone and self._requests and len(requests) < _CHANGES_AT_ONCE_MAX:
            requests.append(self._requests.popleft())
        if len(requests) > 1:
            try:
                self._try_changes(connection, requests)
            except CommitUnknownError as error:
                for request in requests:
                    request.error, request.is_done = error.again(), True
                return
            except IsterError:
                # Nothing was changed. Each thread tries its own change, and gets its own error.
                for request in requests:
                    request.is_alone, request.is_committing = True, False
            else:
                return
        self._run_alone(connection, own)

    def _run_alone(self, connection: sqlite3.Connection, request: _Request) -> None:
        remedies: list[Callable[[], bool]] = [
            partial(self._reuse_journal, connection),
            self._on_full,
        ]
        while True:
            try:
                self._try_changes(connection, [request])
            except CapacityError as error:
                if not _is_full(error.__cause__):
                    raise
                while remedies:
                    if remedies.pop(0)():
                        break
                else:
                    raise
            else:
                return

    def _try_changes(self, connection: sqlite3.Connection, requests: Sequence[_Request]) -> None:
        action = requests[0].action
        with self._file.mapped(action):
            connection.execute("BEGIN IMMEDIATE")
            with rolled_back_on_error(connection):
                # Read the time after taking the lock: from here on no other writer can commit.
                change = Change(self, connection, self._boot, self._clock.boottime())
                change.end_leases("boot != ? OR ends <= ?", [self._boot, change.now])
                for request in requests:
                    request.work(change)
                change.finish()
                for request in requests:
                    request.is_committing = True
                self._commit(connection, action)
        for request in requests:
            request.is_done = True

    def _reuse_journal(self, connection: sqlite3.Connection) -> bool:
        """Checkpoints SQLite's WAL, so that the next change overwrites it instead of growing it.

        Overwriting needs no free space. Returns whether everything was checkpointed.
        """
        try:
            busy, frames, moved = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error:
            return False  # the checkpoint itself needs space
        return not busy and frames == moved

    def _commit(self, connection: sqlite3.Connection, action: str) -> None:
        try:
            connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_IOERR:
                raise
            # The log may hold the whole transaction although its sync failed; a later recovery
            # of the log would then bring it back.
            raise CommitUnknownError(
                f"{action}: the commit failed on its way to the disk: {error}", path=self._path
            ) from error

    def _find(
        self, connection: sqlite3.Connection, key: str, encoded: bytes, now: float
    ) -> KeyValue | None:
        row = connection.execute(
            f"SELECT value, revision FROM entries WHERE key = :key AND {_ALIVE}",  # noqa: S608
            {"key": encoded, "boot": self._boot, "now": now},
        ).fetchone()
        return None if row is None else KeyValue(key, row[0], row[1])

    def _find_many(
        self, connection: sqlite3.Connection, keys: Sequence[str], now: float
    ) -> dict[str, KeyValue]:
        """Reads keys in one statement, so all are read at one moment."""
        values = {f"key{number}": encode_key(key) for number, key in enumerate(keys)}
        names = ", ".join(f":{name}" for name in values)
        rows = connection.execute(
            f"SELECT key, value, revision FROM entries WHERE key IN ({names}) AND {_ALIVE}",  # noqa: S608
            {**values, "boot": self._boot, "now": now},
        )
        return {
            key.decode(): KeyValue(key.decode(), value, revision) for key, value, revision in rows
        }

    # -- leases and watches -----------------------------------------------------------------

    def renew_lease(self, lease: HeldLease) -> float:
        """Moves a lease's end; see `Lease.renew`.

        No margin: holder and store read the same clock, and the holder has read it first.
        """
        asked_at = self._clock.boottime()

        def work(change: Change) -> None:
            cursor = change.connection.execute(
                "UPDATE leases SET ends = ? WHERE id = ?",
                (change.now + lease.ttl_seconds, lease.id),
            )
            if cursor.rowcount == 0:
                raise NotFoundError(f"the lease {lease.id} has ended", path=self._path)

        self._change("renewal of a lease", work)
        return asked_at + lease.ttl_seconds

    def revoke_lease(self, lease_id: int) -> None:
        """Ends a lease and removes its keys; see `Lease.revoke`."""
        self._change("end of a lease", lambda change: change.end_leases("id = ?", [lease_id]))

    def remove_ended(self) -> None:
        """Removes the keys of leases that have ended, if there are any."""
        with self._reader("read leases") as connection:
            ended = connection.execute(
                "SELECT 1 FROM leases WHERE boot != ? OR ends <= ? LIMIT 1",
                (self._boot, self._clock.boottime()),
            ).fetchone()
        if ended is not None and not self._is_read_only:
            self._change("end of leases", lambda _: None)

    def current_revision(self, key: str) -> int:
        with self._reader(f"read of the revision of {key}") as connection:
            return last_revision(connection)

    def changed_since(self, revision: int) -> tuple[int, list[bytes]]:
        """The revision now, and the keys that changed after `revision`.

        Where the list of changes does not reach back so far, every key there is.
        """
        with self._reader("read changes") as connection:
            latest = last_revision(connection)
            if latest == revision:
                return latest, []
            statement = "SELECT DISTINCT key FROM changes WHERE revision > ? ORDER BY key"
            if latest - revision > CHANGES_KEPT:
                statement = "SELECT key FROM entries WHERE ? IS NOT NULL ORDER BY key"
            return latest, [key for (key,) in connection.execute(statement, (revision,))]

    def current_watches(self) -> list[_SqliteWatch]:
        """The watches under way."""
        with self._watching:
            return list(self._watches)

    def forget_watch(self, watch: _SqliteWatch) -> None:
        """Called by a watch that ends; with the last one the file is asked no more."""
        poller = None
        with self._watching:
            if watch in self._watches:
                self._watches.remove(watch)
                if not self._watches:
                    poller, self._poller = self._poller, None
        if poller is not None:
            poller.stop()

    def boottime(self) -> float:
        """The store's clock."""
        return self._clock.boottime()


class _Request:
    """A change that waits for a commit.

    Attributes:
        is_alone: Whether a group commit with it was rolled back; its thread commits it alone.
        is_committing: Whether a commit of it has begun, so that it may be durable.
    """

    __slots__ = ("action", "error", "is_alone", "is_committing", "is_done", "work")

    def __init__(self, action: str, work: Callable[[Change], None]) -> None:
        self.action = action
        self.work = work
        self.error: IsterError | None = None
        self.is_done = False
        self.is_alone = False
        self.is_committing = False


class _SqliteWatch:
    def __init__(
        self, store: SqliteMetadata, prefix: bytes, on_change: Callable[[str], None], revision: int
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._on_change = on_change
        self._revision = revision
        self._is_closed = False

    def poll(self) -> None:
        """Calls back for what changed since the last time."""
        self._revision, keys = self._store.changed_since(self._revision)
        for key in keys:
            if key.startswith(self._prefix) and not self._is_closed:
                self._on_change(key.decode())

    def close(self) -> None:
        self._is_closed = True
        self._store.forget_watch(self)


class _Poller:
    """The thread that looks for changes, of this process and of others."""

    def __init__(self, store: SqliteMetadata) -> None:
        self._store = store
        self._stopping = threading.Event()
        self._thread = threads.start("ister-metadata-watch", self._run)

    def _run(self) -> None:
        while not self._stopping.wait(_POLL_SECONDS):
            # A watch is a hint: whoever needs the store itself meets the error there.
            for poll in (
                self._store.remove_ended,
                *(watch.poll for watch in self._store.current_watches()),
            ):
                with threads.guard("ister-metadata-watch"), suppress(IsterError):
                    poll()

    def stop(self) -> None:
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _is_full(error: BaseException | None) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


def _where(low: bytes, high: bytes | None) -> tuple[str, dict[str, object]]:
    if high is None:
        return "key >= :low", {"low": low}
    return "key >= :low AND key < :high", {"low": low, "high": high}
