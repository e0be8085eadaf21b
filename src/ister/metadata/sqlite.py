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

Writers wait for each other, at most `busy_timeout_seconds`; readers wait for nobody. The clock
must be one that all processes share (`SystemClock`: CLOCK_BOOTTIME).

SQLite connections must not be used after a fork. A child neither uses nor closes its parent's
connections (closing one could change the WAL that the parent writes). It cannot open the same file
either: SQLite keeps its locks per process, would take the parent's for its own, and would hold no
lock that other processes see.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import quote

from ister import forks, threads
from ister.clock import Clock, SystemClock
from ister.errors import (
    CapacityError,
    ClosedError,
    CommitUnknownError,
    ConfigError,
    CorruptDataError,
    DiskError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedOperationError,
    UnsupportedVersionError,
)
from ister.fs.local import LocalFileSystem, boot_id, map_os_error
from ister.metadata.base import (
    Absent,
    Compare,
    KeyValue,
    Lease,
    Operation,
    Put,
    RevisionIs,
    Watch,
)
from ister.metadata.checks import (
    change_prefix,
    check_lease_time,
    check_put,
    check_transaction,
    encode_key,
    encode_prefix,
    key_bounds,
    prefix_end,
)
from ister.metadata.leases import HeldLease

__all__ = ["SqliteMetadata"]

_T = TypeVar("_T")

SCHEMA_VERSION: Final = 1
_APPLICATION_ID: Final = 0x49535452
"""`ISTR` in the file's header: whose database it is."""

# A lease's number is never given out twice (AUTOINCREMENT): a late renewal must not keep a
# stranger's lease.
_SCHEMA: Final = """
CREATE TABLE entries (
    key BLOB NOT NULL PRIMARY KEY,
    value BLOB NOT NULL,
    revision INTEGER NOT NULL,
    lease INTEGER
);
CREATE INDEX entries_of_leases ON entries (lease) WHERE lease IS NOT NULL;
CREATE TABLE leases (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    boot TEXT NOT NULL,
    ends REAL NOT NULL,
    ttl REAL NOT NULL
);
CREATE TABLE changes (
    revision INTEGER NOT NULL,
    key BLOB NOT NULL,
    PRIMARY KEY (revision, key)
) WITHOUT ROWID;
CREATE TABLE state (name TEXT NOT NULL PRIMARY KEY, value INTEGER NOT NULL);
INSERT INTO state VALUES ('revision', 0);
"""

_CHANGES_KEPT: Final = 1000
"""Revisions that a watch may be late by before it is told of every key instead."""

_JOURNAL_BYTES_MAX: Final = 16 * 1024 * 1024
_IDLE_READERS_MAX: Final = 4
_POLL_SECONDS: Final = 0.2
_SETTLE_SECONDS: Final = 0.02
# SQLITE_IOERR_SHMSIZE: no space to create or grow the `-shm` file.
_SHARED_MEMORY_FULL: Final = sqlite3.SQLITE_IOERR | 19 << 8
_DAMAGE_HINT: Final = "restore it, or delete it and run `ister recover`"

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
        read_only: Creates and changes nothing, for tools that look at a file. SQLite's own
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
        self._boot = boot_id()
        self._is_closed = False
        self._damage: CorruptDataError | None = None
        self._on_full: Callable[[], bool] = on_full if on_full is not None else lambda: False
        self._writer_lock = threading.Lock()
        self._writer: sqlite3.Connection | None = None
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
                        "there is no metadata file",
                        path=self._path,
                        hint="is it the right directory or config? Where the file was lost, "
                        "`ister recover` rebuilds it from the bucket",
                    )
                self._note_file()
                self._verify_read_only()
                return
            LocalFileSystem().make_directories(os.path.dirname(self._path))
            if not existed:
                self._make_file()
            self._note_file()
        try:
            self._open_writer(check=existed)
        except CapacityError:
            if not self._on_full():
                raise
            self._open_writer(check=existed)

    # -- the seam ---------------------------------------------------------------------------

    def get(self, key: str) -> KeyValue | None:
        """A key, or None if there is none."""
        encoded = encode_key(key)
        with self._reader("get") as connection:
            return self._find(connection, key, encoded, self._clock.boottime())

    def range(
        self,
        prefix: str,
        *,
        start: str | None = None,
        end: str | None = None,
        limit: int | None = None,
    ) -> list[KeyValue]:
        """The keys that begin with `prefix`, sorted; see `MetadataStore.range`."""
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
        """Sets a key, whatever it was; returns the revision."""
        check_put(key, value)
        return self._change("put", lambda change: change.apply([Put(key, value, lease)]))

    def delete(self, key: str) -> bool:
        """Removes a key; whether it existed."""
        encoded = encode_key(key)
        return self._change("delete", lambda change: change.remove("key = ?", [encoded]) == 1)

    def delete_prefix(self, prefix: str) -> int:
        """Removes every key that begins with `prefix`, which is not empty; how many there were."""
        low = change_prefix(prefix)
        high = prefix_end(low)
        return self._change(
            "delete prefix", lambda change: change.remove("key >= ? AND key < ?", [low, high])
        )

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> int | None:
        """Does all of `operations` at once if all of `compares` hold."""
        check_transaction(compares, operations)

        def work(change: _Change) -> int | None:
            for compare in compares:
                encoded = encode_key(compare.key)
                found = self._find(change.connection, compare.key, encoded, change.now)
                if not _holds(compare, found):
                    return None
            return change.apply(operations)

        return self._change("transaction", work)

    def grant_lease(self, ttl_seconds: float) -> Lease:
        """A new lease."""
        check_lease_time(ttl_seconds)
        asked_at = self._clock.boottime()

        def work(change: _Change) -> int:
            cursor = change.connection.execute(
                "INSERT INTO leases (boot, ends, ttl) VALUES (?, ?, ?)",
                (self._boot, change.now + ttl_seconds, ttl_seconds),
            )
            return int(cursor.lastrowid or 0)

        lease_id = self._change("grant of a lease", work)
        return HeldLease(self, lease_id, ttl_seconds, asked_at + ttl_seconds)

    def watch(self, prefix: str, on_change: Callable[[str], None]) -> Watch:
        """Has `on_change(key)` called some time after a key below `prefix` changed: a hint.

        The file is asked five times a second while there are watches.
        """
        low, revision = encode_prefix(prefix), self.revision()
        with self._watching:
            self._check_open()
            watch = _SqliteWatch(self, low, on_change, revision)
            self._watches.append(watch)
            if self._poller is None:
                self._poller = _Poller(self)
            return watch

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

    def _note_file(self) -> None:
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
        forks.leak(self._writer, *self._idle_readers)
        self._writer, self._idle_readers = None, []
        self._watches, self._poller = [], None
        self._fork_error, self._is_closed = error, True
        if self._file_id is not None:
            _open_in_parent.add(self._file_id)

    # -- opening ----------------------------------------------------------------------------

    def _make_file(self) -> None:
        try:
            # SQLite itself would make the file readable to everyone; its -wal and -shm follow it.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640))
        except FileExistsError:
            pass  # another process was faster
        except OSError as error:
            raise map_os_error(error, "create", self._path) from error

    def _open_writer(self, *, check: bool) -> None:
        with self._mapped("open"):
            connection = self._connect()
            try:
                self._prepare(connection, check=check)
            except BaseException:
                connection.close()
                raise
        self._writer = connection

    def _prepare(self, connection: sqlite3.Connection, *, check: bool) -> None:
        self._check_owner(connection)
        if check:
            self._check_damage(connection)
        self._set_journal(connection)
        self._set_synchronous(connection)
        connection.execute(f"PRAGMA journal_size_limit = {_JOURNAL_BYTES_MAX}")
        if _pragma(connection, "user_version") == 0:
            connection.execute("BEGIN IMMEDIATE")
            with _rolled_back_on_error(connection):
                # Another process may have made the tables while this one waited.
                if _pragma(connection, "user_version") == 0:
                    for statement in _SCHEMA.split(";"):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                connection.execute("COMMIT")
        self._check_owner(connection)
        # Until its name is durable, nothing that the file holds is; the one that made it may
        # have crashed before this line.
        LocalFileSystem().sync_directory(os.path.dirname(self._path))

    def _set_journal(self, connection: sqlite3.Connection) -> None:
        # Changing the mode of a new file needs it alone, and does not wait for others by itself.
        # How long others take is a matter of the machine's time, whatever measures the leases.
        clock = SystemClock()
        deadline = clock.monotonic() + self._busy_timeout_seconds
        while True:
            try:
                mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
                break
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or clock.monotonic() >= deadline:
                    raise
                threading.Event().wait(_SETTLE_SECONDS)
        if mode != "wal":
            raise UnavailableError(
                f"SQLite's write-ahead log cannot be used here: the journal mode stays {mode}",
                path=self._path,
                hint="put the metadata file on a local file system",
            )

    def _set_synchronous(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA synchronous = FULL")
        if (level := _pragma(connection, "synchronous")) != 2:
            raise ConfigError(
                f"SQLite does not sync every commit: synchronous is {level}", path=self._path
            )

    def _check_owner(self, connection: sqlite3.Connection) -> None:
        # In this order: another process that makes the tables meanwhile sets all three at once.
        is_empty = _pragma(connection, "schema_version") == 0
        application = _pragma(connection, "application_id")
        version = _pragma(connection, "user_version")
        if not is_empty and application != _APPLICATION_ID:
            raise ConfigError("the file is another program's database", path=self._path)
        if version > SCHEMA_VERSION:
            raise UnsupportedVersionError(
                f"the metadata file has version {version}; this Ister knows {SCHEMA_VERSION}",
                path=self._path,
                hint="upgrade Ister",
            )
        if self._is_read_only and version == 0:
            raise NotFoundError("there is nothing in the metadata file yet", path=self._path)

    def _check_damage(self, connection: sqlite3.Connection) -> None:
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise CorruptDataError(
                f"the metadata file is damaged: {found}", path=self._path, hint=_DAMAGE_HINT
            )

    def _verify_read_only(self) -> None:
        with self._reader("open") as connection:
            self._check_owner(connection)
            self._check_damage(connection)

    def _connect(self) -> sqlite3.Connection:
        name = f"file:{quote(self._path)}?mode=rw"
        if self._is_read_only:
            name = f"file:{quote(self._path)}?mode=ro"
            if not os.path.exists(f"{self._path}-wal"):
                # Nobody has it open, and opening it in WAL mode would make the missing files.
                name += "&immutable=1"
        connection = sqlite3.connect(
            name,
            uri=True,
            timeout=self._busy_timeout_seconds,
            isolation_level=None,
            check_same_thread=False,
        )
        if not self._is_read_only:
            try:
                # A setting of the connection, not of the file.
                self._set_synchronous(connection)
            except BaseException:
                connection.close()
                raise
        return connection

    # -- inside -----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._fork_error is not None:
            raise self._fork_error.again()
        if self._is_closed:
            raise ClosedError("the metadata store was closed", path=self._path)
        if self._damage is not None:
            raise self._damage.again()

    @contextmanager
    def _mapped(self, action: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._map_error(error, action) from error

    def _map_error(self, error: sqlite3.Error, action: str) -> IsterError:
        full = getattr(error, "sqlite_errorcode", 0)
        code = full & 0xFF
        text = f"{action} failed: {error}"
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            # For good: pages that are still in memory would let some changes through, on top of
            # a file that has to be restored.
            self._damage = CorruptDataError(text, path=self._path, hint=_DAMAGE_HINT)
            return self._damage.again()
        if code == sqlite3.SQLITE_FULL or full == _SHARED_MEMORY_FULL:
            return CapacityError(text, path=self._path, hint="make room on the disk")
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return UnavailableError(
                text, path=self._path, hint="another process keeps the metadata file locked"
            )
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
            return PermissionDeniedError(text, path=self._path)
        if code in (sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_TOOBIG):
            return CapacityError(text, path=self._path)
        if code == sqlite3.SQLITE_IOERR:
            return DiskError(text, errno=None, path=self._path)
        return UnavailableError(text, path=self._path)

    @contextmanager
    def _reader(self, action: str) -> Iterator[sqlite3.Connection]:
        """A connection of the calling thread alone, for the time of one read."""
        with self._readers_lock:
            self._check_open()
            connection = self._idle_readers.pop() if self._idle_readers else None
        with self._mapped(action):
            if connection is None:
                connection = self._connect()
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            self._keep_reader(connection)

    def _keep_reader(self, connection: sqlite3.Connection) -> None:
        # Read only, the way to open it depends on whether somebody else has it open: asked anew.
        if not self._is_read_only:
            with self._readers_lock:
                if not self._is_closed and len(self._idle_readers) < _IDLE_READERS_MAX:
                    # Never closed from here on: a signal handler may raise right behind it.
                    self._idle_readers.append(connection)
                    return
        connection.close()

    def _change(self, action: str, work: Callable[[_Change], _T]) -> _T:
        """Runs `work` in a transaction that is durable when this returns."""
        if self._is_read_only:
            raise UnsupportedOperationError("the metadata was opened to read", path=self._path)
        if not self._writer_lock.acquire(timeout=self._busy_timeout_seconds):
            raise UnavailableError(
                f"{action} failed: other threads' changes take too long", path=self._path
            )
        try:
            self._check_open()
            connection = self._writer
            if connection is None:
                raise ClosedError("the metadata store was closed", path=self._path)
            remedies: list[Callable[[], bool]] = [
                partial(self._reuse_journal, connection),
                self._on_full,
            ]
            while True:
                try:
                    return self._try_change(connection, action, work)
                except CapacityError as error:
                    if not _is_full(error.__cause__):
                        raise
                    while remedies:
                        if remedies.pop(0)():
                            break
                    else:
                        raise
        finally:
            self._writer_lock.release()

    def _try_change(
        self, connection: sqlite3.Connection, action: str, work: Callable[[_Change], _T]
    ) -> _T:
        with self._mapped(action):
            connection.execute("BEGIN IMMEDIATE")
            with _rolled_back_on_error(connection):
                # Read the time after taking the lock: from here on no other writer can commit.
                change = _Change(self, connection, self._boot, self._clock.boottime())
                change.end_leases("boot != ? OR ends <= ?", [self._boot, change.now])
                result = work(change)
                change.finish()
                self._commit(connection, action)
            return result

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

    # -- leases and watches -----------------------------------------------------------------

    def renew_lease(self, lease: HeldLease) -> float:
        """Moves a lease's end; see `Lease.renew`.

        No margin: holder and store read the same clock, and the holder has read it first.
        """
        asked_at = self._clock.boottime()

        def work(change: _Change) -> None:
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
        with self._reader("look for leases") as connection:
            ended = connection.execute(
                "SELECT 1 FROM leases WHERE boot != ? OR ends <= ? LIMIT 1",
                (self._boot, self._clock.boottime()),
            ).fetchone()
        if ended is not None and not self._is_read_only:
            self._change("end of leases", lambda _: None)

    def revision(self) -> int:
        """Of the last change."""
        with self._reader("read of the revision") as connection:
            return _revision(connection)

    def changed_since(self, revision: int) -> tuple[int, list[bytes]]:
        """The revision now, and the keys that changed after `revision`.

        Where the list of changes does not reach back so far, every key there is.
        """
        with self._reader("look for changes") as connection:
            latest = _revision(connection)
            if latest == revision:
                return latest, []
            statement = "SELECT DISTINCT key FROM changes WHERE revision > ? ORDER BY key"
            if latest - revision > _CHANGES_KEPT:
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

    def check_lease(self, lease: Lease) -> int:
        """The number of a lease of this store's."""
        if not isinstance(lease, HeldLease) or lease.store is not self:
            raise InvalidRequestError("the lease is of another metadata store")
        return lease.id


class _Change:
    """A transaction under way."""

    def __init__(
        self, store: SqliteMetadata, connection: sqlite3.Connection, boot: str, now: float
    ) -> None:
        self.connection = connection
        self.now = now
        self._store = store
        self._boot = boot
        self._revision = self._first_revision = _revision(connection)

    def apply(self, operations: Sequence[Operation]) -> int:
        """Does all operations under one revision, which it returns."""
        revision = self._revision + 1
        for operation in operations:
            key = encode_key(operation.key)
            if isinstance(operation, Put):
                self.connection.execute(
                    "INSERT OR REPLACE INTO entries (key, value, revision, lease) "
                    "VALUES (?, ?, ?, ?)",
                    (key, operation.value, revision, self._lease_id(operation.lease)),
                )
            else:
                cursor = self.connection.execute("DELETE FROM entries WHERE key = ?", (key,))
                if cursor.rowcount == 0:
                    continue
            self._note(revision, [key])
        return self._revision

    def remove(self, where: str, values: Sequence[object]) -> int:
        """Removes keys under one revision; how many there were."""
        # Selected, then deleted: RETURNING is younger than some SQLite that Python comes with.
        keys = self._column(f"SELECT key FROM entries WHERE {where}", values)  # noqa: S608
        self.connection.execute(f"DELETE FROM entries WHERE {where}", values)  # noqa: S608
        if keys:
            self._note(self._revision + 1, keys)
        return len(keys)

    def end_leases(self, where: str, values: Sequence[object]) -> None:
        """Ends leases and removes their keys."""
        ended = self._column(f"SELECT id FROM leases WHERE {where}", values)  # noqa: S608
        if ended:
            self.connection.execute(f"DELETE FROM leases WHERE {where}", values)  # noqa: S608
        for lease_id in ended:
            self.remove("lease = ?", [lease_id])

    def finish(self) -> None:
        """Stores the counter."""
        if self._revision == self._first_revision:
            return
        self.connection.execute(
            "UPDATE state SET value = ? WHERE name = 'revision'", (self._revision,)
        )
        self.connection.execute(
            "DELETE FROM changes WHERE revision <= ?", (self._revision - _CHANGES_KEPT,)
        )

    def _column(self, statement: str, values: Sequence[object]) -> list[Any]:
        return [row[0] for row in self.connection.execute(statement, values).fetchall()]

    def _note(self, revision: int, keys: Sequence[bytes]) -> None:
        self._revision = revision
        self.connection.executemany(
            "INSERT INTO changes (revision, key) VALUES (?, ?)", [(revision, key) for key in keys]
        )

    def _lease_id(self, lease: Lease | None) -> int | None:
        if lease is None:
            return None
        lease_id = self._store.check_lease(lease)
        # Those that have ended by now were removed when the transaction began.
        if not self.connection.execute("SELECT 1 FROM leases WHERE id = ?", (lease_id,)).fetchone():
            raise NotFoundError(f"the lease {lease_id} has ended")
        return lease_id


class _SqliteWatch:
    def __init__(
        self,
        store: SqliteMetadata,
        prefix: bytes,
        on_change: Callable[[str], None],
        revision: int,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._on_change = on_change
        self._revision = revision
        self._is_closed = False

    def look(self) -> None:
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
            for look in (
                self._store.remove_ended,
                *(watch.look for watch in self._store.current_watches()),
            ):
                with threads.guard("ister-metadata-watch"), suppress(IsterError):
                    look()

    def stop(self) -> None:
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


@contextmanager
def _rolled_back_on_error(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        # SQLite has ended the transaction by itself after some errors; a connection that cannot
        # be brought back says so at its next use.
        with suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        raise


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _revision(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT value FROM state WHERE name = 'revision'").fetchone()
    return int(row[0])


def _is_full(error: BaseException | None) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


def _is_busy(error: sqlite3.OperationalError) -> bool:
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _where(low: bytes, high: bytes | None) -> tuple[str, dict[str, object]]:
    if high is None:
        return "key >= :low", {"low": low}
    return "key >= :low AND key < :high", {"low": low, "high": high}


def _holds(compare: Compare, found: KeyValue | None) -> bool:
    if isinstance(compare, Absent):
        return found is None
    if found is None:
        return False
    if isinstance(compare, RevisionIs):
        return found.revision == compare.revision
    return found.value == compare.value
