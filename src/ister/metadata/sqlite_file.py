"""The SQLite file of the metadata: its schema, its settings, its checks and its errors."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Final
from urllib.parse import quote

from ister.base.clock import SystemClock
from ister.errors import (
    CapacityError,
    ConfigError,
    CorruptDataError,
    DiskError,
    IsterError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedVersionError,
)
from ister.fs.local import LocalFileSystem, map_os_error

_SCHEMA_VERSION: Final = 1
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
_JOURNAL_BYTES_MAX: Final = 16 * 1024 * 1024
_SETTLE_SECONDS: Final = 0.02
# SQLITE_IOERR_SHMSIZE: no space to create or grow the `-shm` file.
_SHARED_MEMORY_FULL: Final = sqlite3.SQLITE_IOERR | 19 << 8
_BY_EFFECTIVE_IDS: Final = os.access in os.supports_effective_ids
_DAMAGE_HINT: Final = "restore it, or delete it and run `ister recover`"


class SqliteFile:
    """Opens connections to one file, and prepares it. Thread-safe.

    Attributes:
        path: The file.
        damage: The first damage that was found; nothing may be changed after it.
    """

    def __init__(self, path: str, *, busy_timeout_seconds: float, is_read_only: bool) -> None:
        self.path = path
        self.damage: CorruptDataError | None = None
        self._busy_timeout_seconds = busy_timeout_seconds
        self._is_read_only = is_read_only

    def make(self) -> None:
        try:
            # SQLite itself would make the file readable to everyone; its -wal and -shm follow it.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640))
        except FileExistsError:
            pass  # another process was faster
        except OSError as error:
            raise map_os_error(error, "create", self.path) from error

    def connect(self) -> sqlite3.Connection:
        name = f"file:{quote(self.path)}?mode=rw"
        if self._is_read_only:
            name = f"file:{quote(self.path)}?mode=ro"
            if not os.path.exists(f"{self.path}-wal"):
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

    def prepare(self, connection: sqlite3.Connection, *, check: bool) -> None:
        self.check_owner(connection)
        if check:
            self.check_damage(connection)
        self._set_journal(connection)
        self._set_synchronous(connection)
        connection.execute(f"PRAGMA journal_size_limit = {_JOURNAL_BYTES_MAX}")
        if _pragma(connection, "user_version") == 0:
            connection.execute("BEGIN IMMEDIATE")
            with rolled_back_on_error(connection):
                # Another process may have made the tables while this one waited.
                if _pragma(connection, "user_version") == 0:
                    for statement in _SCHEMA.split(";"):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                    connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
                connection.execute("COMMIT")
        self.check_owner(connection)
        # Until its name is durable, nothing that the file holds is; the one that made it may
        # have crashed before this line.
        LocalFileSystem().sync_directory(os.path.dirname(self.path))

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
                path=self.path,
                hint="put the metadata file on a local file system",
            )

    def _set_synchronous(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA synchronous = FULL")
        if (level := _pragma(connection, "synchronous")) != 2:
            raise ConfigError(
                f"SQLite does not sync every commit: synchronous is {level}", path=self.path
            )

    def check_owner(self, connection: sqlite3.Connection) -> None:
        # In this order: another process that makes the tables meanwhile sets all three at once.
        is_empty = _pragma(connection, "schema_version") == 0
        application = _pragma(connection, "application_id")
        version = _pragma(connection, "user_version")
        if not is_empty and application != _APPLICATION_ID:
            raise ConfigError("the file is another program's database", path=self.path)
        if version > _SCHEMA_VERSION:
            raise UnsupportedVersionError(
                f"the metadata file has version {version}; this Ister knows {_SCHEMA_VERSION}",
                path=self.path,
                hint="upgrade Ister",
            )
        if self._is_read_only and version == 0:
            raise NotFoundError("the metadata file is empty", path=self.path)

    def check_damage(self, connection: sqlite3.Connection) -> None:
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise CorruptDataError(
                f"the metadata file is damaged: {found}", path=self.path, hint=_DAMAGE_HINT
            )

    @contextmanager
    def mapped(self, action: str) -> Iterator[None]:
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
            self.damage = CorruptDataError(text, path=self.path, hint=_DAMAGE_HINT)
            return self.damage.again()
        if code == sqlite3.SQLITE_FULL or full == _SHARED_MEMORY_FULL:
            return CapacityError(text, path=self.path, hint="free disk space")
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return UnavailableError(
                text, path=self.path, hint="another process keeps the metadata file locked"
            )
        is_refused = code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)
        if is_refused or code == sqlite3.SQLITE_CANTOPEN:
            # SQLite names no file, and it may be one of those beside the database.
            for path, reason, hint in self._find_unusable():
                return PermissionDeniedError(f"{text}: {reason}", path=path, hint=hint)
        if is_refused:
            return PermissionDeniedError(text, path=self.path)
        if code in (sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_TOOBIG):
            return CapacityError(text, path=self.path)
        if code == sqlite3.SQLITE_IOERR:
            return DiskError(text, errno=None, path=self.path)
        return UnavailableError(text, path=self.path)

    def _find_unusable(self) -> Iterator[tuple[str, str, str]]:
        """The files and the directory that this process cannot use: path, reason and hint.

        Without opening them: closing a file ends the locks of this process's other connections.
        """
        wanted = os.R_OK if self._is_read_only else os.R_OK | os.W_OK
        word = "read" if self._is_read_only else "written"
        for path in (self.path, f"{self.path}-wal", f"{self.path}-shm"):
            try:
                found = os.stat(path)
            except FileNotFoundError:
                if os.path.islink(path):
                    yield path, "the file is a link to nothing", "remove it"
                continue
            except OSError as error:
                yield path, str(error.strerror), _mode_hint(path)
                continue
            if not stat.S_ISREG(found.st_mode):
                yield path, "it is not a file", "move it away"
            elif not os.access(path, wanted, effective_ids=_BY_EFFECTIVE_IDS):
                mode = stat.S_IMODE(found.st_mode)
                reason = f"the file cannot be {word} (mode {mode:04o}, owner {found.st_uid})"
                yield path, reason, _mode_hint(path)
        directory = os.path.dirname(self.path) or "."
        if not os.access(directory, wanted | os.X_OK, effective_ids=_BY_EFFECTIVE_IDS):
            yield directory, f"the directory cannot be {word}", _mode_hint(directory)


def _mode_hint(path: str) -> str:
    return (
        f"run this as the owner of {os.path.basename(path)}, or change its owner or mode "
        f"(this is user {os.geteuid()})"
    )


def copy_database(source: str, target: str) -> None:
    """Copies a metadata file that may be in use, without its leases and the keys under them.

    Raises:
        NotFoundError: There is none, or nothing is in it yet.
        CorruptDataError: It is damaged, or not a database.
        UnavailableError: It is locked for too long.
    """
    if not os.path.exists(source):
        raise NotFoundError("metadata file not found", path=source)
    old = SqliteFile(source, busy_timeout_seconds=10.0, is_read_only=True)
    new = SqliteFile(target, busy_timeout_seconds=10.0, is_read_only=False)
    new.make()
    with old.mapped("copy"), closing(old.connect()) as reader, closing(new.connect()) as writer:
        old.check_owner(reader)
        reader.backup(writer)
        writer.execute("DELETE FROM entries WHERE lease IS NOT NULL")
        writer.execute("DELETE FROM leases")
        new.check_damage(writer)


@contextmanager
def rolled_back_on_error(connection: sqlite3.Connection) -> Iterator[None]:
    """Rolls a transaction back if the block raises."""
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


def _is_busy(error: sqlite3.OperationalError) -> bool:
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
