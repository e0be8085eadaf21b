"""SQLite's own: settings that keep commits, several processes, kill -9, damage, versions."""

import ctypes
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ister.base.clock import SystemClock
from ister.errors import (
    CapacityError,
    CommitUnknownError,
    ConfigError,
    CorruptDataError,
    DiskError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedOperationError,
    UnsupportedVersionError,
)
from ister.metadata import sqlite, sqlite_change, sqlite_file
from ister.metadata.base import Put, RevisionIs
from ister.metadata.sqlite import SqliteMetadata
from tests.support.cases import each
from tests.support.clock import ManualClock
from tests.support.waiting import eventually


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "meta.db")


@pytest.fixture
def open_store(path):
    opened = []

    def open_it(**options):
        opened.append(SqliteMetadata(path, **{"clock": SystemClock(), **options}))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


def _pragma(connection, name):
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


def _raw(path, *statements):
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        return [connection.execute(statement).fetchall() for statement in statements]
    finally:
        connection.close()


# -- opening ------------------------------------------------------------------------------------


def test_every_connection_syncs_every_commit(open_store):
    store = open_store()
    assert _pragma(store._writer, "journal_mode") == "wal"
    assert _pragma(store._writer, "synchronous") == 2
    with store._reader("test") as connection:
        assert _pragma(connection, "synchronous") == 2


def test_file_and_directories_are_made_and_not_for_everyone(tmp_path):
    store = SqliteMetadata(str(tmp_path / "a" / "b" / "meta.db"), clock=SystemClock())
    store.put("/a", b"")
    for name in ("meta.db", "meta.db-wal", "meta.db-shm"):
        assert (tmp_path / "a" / "b" / name).stat().st_mode & 0o117 == 0
    store.close()
    assert os.listdir(tmp_path / "a" / "b") == ["meta.db"]


def test_path_with_characters_of_a_uri_is_taken_as_it_is(tmp_path):
    path = tmp_path / "a?mode=memory#%41 b"
    with_name = SqliteMetadata(str(path), clock=SystemClock())
    with_name.put("/a", b"1")
    with_name.close()
    assert path.stat().st_size > 0


@pytest.mark.parametrize("size", [0, 1], ids=["empty file", "no tables"])
def test_crash_while_making_the_file_is_mended(path, open_store, size):
    if size:
        _raw(path, "PRAGMA journal_mode = WAL")
    else:
        open(path, "w").close()
    with pytest.raises(NotFoundError):
        open_store(read_only=True)
    assert open_store().put("/a", b"") == 1


@each(
    ("wanted", "gets", "error"),
    [("= WAL", "", UnavailableError), ("= FULL", "= NORMAL", ConfigError)],
    ids=["a network's file system", "commits that are not synced"],
)
def test_setting_that_sqlite_does_not_take_is_refused(path, monkeypatch, wanted, gets, error):
    class Stubborn(sqlite3.Connection):
        def execute(self, statement, *values):
            return super().execute(statement.replace(wanted, gets), *values)

    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite_file.sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=Stubborn)
    )
    with pytest.raises(error):
        SqliteMetadata(path, clock=SystemClock())


@each("name", ["user_version", "application_id", "schema_version"])
def test_file_that_another_process_makes_meanwhile_is_ours(path, monkeypatch, name):
    read = sqlite_file._pragma
    made = []

    def read_then_make(connection, pragma):
        value = read(connection, pragma)
        if pragma == name and not made:
            made.append(name)
            SqliteMetadata(path, clock=ManualClock()).close()
        return value

    monkeypatch.setattr(sqlite_file, "_pragma", read_then_make)
    SqliteMetadata(path, clock=ManualClock()).close()
    assert made


def test_many_open_a_new_file_at_once(path):
    """Eight processes race for making it; all of them get to write."""
    children = [_child(path, f"print(store.put('/{number}', b''))") for number in range(8)]
    revisions = [int(child.communicate(timeout=60)[0]) for child in children]
    assert sorted(revisions) == list(range(1, 9))


# -- damage and versions ------------------------------------------------------------------------


def test_file_that_is_no_database_is_damage(path, open_store):
    with open(path, "wb") as file:
        file.write(b"certainly not SQLite\n" * 500)
    for read_only in (False, True):
        with pytest.raises(CorruptDataError) as damaged:
            open_store(read_only=read_only)
        assert "ister recover" in damaged.value.hint
        assert damaged.value.path == path


def test_damaged_page_is_found_at_open(path, open_store):
    store = open_store()
    for number in range(200):
        store.put(f"/{number}", b"x" * 300)
    store.close()
    with open(path, "r+b") as file:
        for page in range(2, os.path.getsize(path) // 4096):
            file.seek(page * 4096)
            file.write(b"\xa5" * 200)
    for read_only in (False, True):
        with pytest.raises(CorruptDataError) as damaged:
            open_store(read_only=read_only)
        assert damaged.value.hint == "restore it, or delete it and run `ister recover`"


def test_damage_met_later_stops_the_store(path, open_store):
    store = open_store()
    for number in range(200):
        store.put(f"/{number}", b"x" * 300)
    store.close()
    store = open_store()
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (os.path.getsize(path) - 4096))
    with pytest.raises(CorruptDataError):
        store.range("/")
    with pytest.raises(CorruptDataError):
        store.put("/1", b"")


def test_newer_schema_is_refused_and_left_alone(path, open_store):
    open_store().close()
    _raw(path, "PRAGMA user_version = 2", "PRAGMA wal_checkpoint(TRUNCATE)")
    for read_only in (False, True):
        with pytest.raises(UnsupportedVersionError) as newer:
            open_store(read_only=read_only)
        assert "upgrade" in newer.value.hint
    assert _raw(path, "PRAGMA user_version") == [[(2,)]]


def test_database_of_another_program_is_refused(path, open_store):
    _raw(path, "CREATE TABLE theirs (x)", "INSERT INTO theirs VALUES (1)")
    with pytest.raises(ConfigError):
        open_store()
    assert _raw(path, "SELECT * FROM theirs") == [[(1,)]]


# -- several processes --------------------------------------------------------------------------

_PREAMBLE = """
import sys
from ister.base.clock import SystemClock
from ister.metadata.base import Put, RevisionIs
from ister.metadata.sqlite import SqliteMetadata
store = SqliteMetadata(sys.argv[1], clock=SystemClock(), busy_timeout_seconds=30)
"""


def _child(path, program):
    return subprocess.Popen(
        [sys.executable, "-c", _PREAMBLE + program, path],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(sqlite.__file__) + "/..")},
    )


def test_two_processes_share_the_file(path, open_store):
    """Both add one, fifty times, by comparing revisions; nothing is lost."""
    store = open_store()
    store.put("/n", b"0")
    program = """
for _ in range(50):
    while True:
        seen = store.get("/n")
        put = Put("/n", b"%d" % (int(seen.value) + 1))
        if store.transact([RevisionIs("/n", seen.revision)], [put]): break
store.close()
"""
    child = _child(path, program)
    for _ in range(50):
        while True:
            seen = store.get("/n")
            put = Put("/n", b"%d" % (int(seen.value) + 1))
            if store.transact([RevisionIs("/n", seen.revision)], [put]):
                break
    assert child.wait(60) == 0
    child.stdout.close()
    assert store.get("/n").value == b"100"


@each("answers", [1, 30, 150])
def test_kill_in_the_middle_of_commits_loses_nothing_answered(path, open_store, answers):
    """A child prints every revision it was answered and is killed; all of them are there."""
    program = """
number = 0
while True:
    number += 1
    print(store.transact([], [Put(f"/{number:06d}", b"%d" % number), Put("/last", b"x" * 5000)]),
          flush=True)
"""
    child = _child(path, program)
    try:
        answered = [int(child.stdout.readline()) for _ in range(answers)]
    finally:
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().splitlines()
        child.stdout.close()
        child.wait()
    answered += [int(line) for line in rest if line]
    store = open_store()
    found = store.range("/0")
    assert [pair.revision for pair in found][: len(answered)] == answered
    assert len(found) - len(answered) in (0, 1)
    assert [pair.value for pair in found] == [b"%d" % (n + 1) for n in range(len(found))]
    assert store.get("/last").revision == found[-1].revision
    assert store.put("/next", b"") == found[-1].revision + 1


def test_lease_of_a_killed_process_ends(path, open_store):
    program = """
lease = store.grant_lease(1)
print(store.put("/owner", b"child", lease), lease.valid_until, flush=True)
sys.stdin.read()
"""
    child = _child(path, program)
    _, valid_until = child.stdout.readline().split()
    child.kill()
    child.wait()
    child.stdout.close()
    store = open_store()
    asked_at = SystemClock.boottime()
    while (owner := store.get("/owner")) is not None:
        assert owner.value == b"child"
        assert asked_at < float(valid_until) + 1
        time.sleep(0.01)
        asked_at = SystemClock.boottime()
    assert SystemClock.boottime() >= float(valid_until)


# -- locks and full disks -----------------------------------------------------------------------


def test_lock_held_for_too_long_is_unavailable(path, open_store):
    store = open_store(busy_timeout_seconds=0.2)
    store.put("/a", b"1")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        before = time.monotonic()
        with pytest.raises(UnavailableError) as busy:
            store.put("/a", b"2")
        assert time.monotonic() - before > 0.15
        assert not isinstance(busy.value, CommitUnknownError)
        assert store.get("/a").value == b"1"
    finally:
        holder.execute("ROLLBACK")
        holder.close()
    assert store.put("/a", b"2")


_CODES = {
    sqlite3.SQLITE_FULL: CapacityError,
    sqlite3.SQLITE_CORRUPT: CorruptDataError,
    sqlite3.SQLITE_NOTADB: CorruptDataError,
    sqlite3.SQLITE_BUSY: UnavailableError,
    sqlite3.SQLITE_IOERR: DiskError,
    sqlite3.SQLITE_CANTOPEN: UnavailableError,
}


@each("code", _CODES)
def test_errors_of_sqlite_become_ours(open_store, path, code):
    error = sqlite3.OperationalError("what it said")
    error.sqlite_errorcode = code | (3 << 8)
    mapped = sqlite_file.SqliteFile(path, busy_timeout_seconds=1.0, is_read_only=False)._map_error(
        error, "put"
    )
    assert type(mapped) is _CODES[code]
    assert mapped.path == path
    assert "put failed: what it said" in str(mapped)


# -- leases -------------------------------------------------------------------------------------


def test_lease_ends_by_the_clock_and_its_keys_at_the_next_change(open_store, path):
    clock = ManualClock()
    store = open_store(clock=clock)
    lease = store.grant_lease(10)
    assert lease.valid_until == 10
    put = store.put("/a", b"", lease)
    clock.advance(9.9)
    assert store.get("/a") is not None
    clock.suspend(0.1)
    assert store.get("/a") is None
    assert store.range("/") == []
    assert _raw(path, "SELECT key FROM entries") == [[(b"/a",)]]
    assert store.put("/b", b"") == put + 2
    assert _raw(path, "SELECT key FROM entries", "SELECT * FROM leases") == [[(b"/b",)], []]


def test_lease_of_another_boot_has_ended(open_store, monkeypatch):
    store = open_store()
    lease = store.grant_lease(1000)
    store.put("/a", b"", lease)
    monkeypatch.setattr(sqlite, "boot_id", lambda: "the next boot")
    rebooted = open_store()
    assert rebooted.get("/a") is None
    rebooted.put("/b", b"")
    with pytest.raises(NotFoundError):
        lease.renew()


def test_numbers_of_leases_are_not_used_again(open_store):
    store = open_store()
    first = store.grant_lease(10)
    first.revoke()
    store.close()
    second = open_store().grant_lease(10)
    assert second.id != first.id


def test_watch_is_told_of_keys_that_ended(open_store):
    store = open_store()
    seen = []
    watch = store.watch("/a", lambda key: seen.append(store.get(key)))
    store.put("/a", b"", store.grant_lease(0.3))
    eventually(lambda: None in seen)
    watch.close()


def test_watch_that_is_too_late_is_told_of_every_key(open_store, monkeypatch):
    monkeypatch.setattr(sqlite, "CHANGES_KEPT", 3)
    monkeypatch.setattr(sqlite_change, "CHANGES_KEPT", 3)
    store = open_store()
    for number in range(9):
        store.put(f"/{number}", b"")
    assert store.changed_since(7) == (9, [b"/7", b"/8"])
    assert store.changed_since(2) == (9, [b"/%d" % number for number in range(9)])


# -- files that cannot be used --------------------------------------------------------------


def without_privileges(work):
    """Runs `work` in a thread that obeys modes, also if the tests are run by root."""
    outcome = []

    def run():
        header, none = struct.pack("II", 0x20080522, 0), struct.pack("6I", *[0] * 6)
        assert ctypes.CDLL(None).capset(header, none) == 0
        try:
            outcome.append(work())
        except BaseException as error:  # raised again below
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def remove_and_link(path):
    path.unlink()
    path.symlink_to("/nothing/here")


@each(
    ("name", "spoil", "says"),
    [
        ("meta.db", lambda path: path.chmod(0o400), "mode 0400"),
        ("meta.db-wal", lambda path: path.chmod(0o400), "mode 0400"),
        ("meta.db-shm", lambda path: path.chmod(0o400), "mode 0400"),
        ("meta.db-shm", lambda path: path.chmod(0), "mode 0000"),
        ("meta.db-shm", remove_and_link, "a link to nothing"),
        ("meta.db-wal", lambda path: (path.unlink(), path.mkdir()), "not a file"),
        ("", lambda path: ((path / "meta.db-shm").unlink(), path.chmod(0o500)), "the directory"),
    ],
)
def test_file_that_cannot_be_used_is_named(tmp_path, name, spoil, says):
    origin, copy = tmp_path / "origin", tmp_path / "copy"
    origin.mkdir()
    store = SqliteMetadata(str(origin / "meta.db"), clock=SystemClock())
    store.put("/a", b"1")
    shutil.copytree(origin, copy)  # as a killed process leaves it
    store.close()
    spoil(copy / name)

    def use():
        opened = SqliteMetadata(str(copy / "meta.db"), clock=SystemClock())
        try:
            opened.put("/a", b"2")
        finally:
            opened.close()

    with pytest.raises(PermissionDeniedError, match=says) as refused:
        without_privileges(use)
    assert Path(refused.value.path) == copy / name
    assert "owner" in refused.value.hint or "move" in refused.value.hint
    copy.chmod(0o700)


# -- to read only -------------------------------------------------------------------------------


def test_read_only_makes_nothing(tmp_path):
    with pytest.raises(NotFoundError):
        SqliteMetadata(str(tmp_path / "x" / "meta.db"), clock=SystemClock(), read_only=True)
    assert os.listdir(tmp_path) == []


def test_read_only_reads_and_changes_nothing(path, open_store, tmp_path):
    store = open_store()
    store.put("/a", b"1")
    store.close()
    before = Path(path).read_bytes()
    tmp_path.chmod(0o555)
    try:
        reader = open_store(read_only=True)
        assert reader.get("/a").value == b"1"
        assert len(reader.range("")) == 1
        for change in (
            lambda: reader.put("/a", b"2"),
            lambda: reader.delete("/a"),
            lambda: reader.transact([], []),
            lambda: reader.grant_lease(1),
        ):
            with pytest.raises(UnsupportedOperationError):
                change()
        reader.close()
    finally:
        tmp_path.chmod(0o755)
    assert os.listdir(tmp_path) == ["meta.db"]
    assert Path(path).read_bytes() == before


def test_read_only_sees_what_a_crash_left_in_the_log(path, open_store, tmp_path):
    store = open_store()
    store.put("/a", b"1")
    (tmp_path / "copy").mkdir()
    for name in ("meta.db", "meta.db-wal"):
        shutil.copy(tmp_path / name, tmp_path / "copy" / name)
    reader = SqliteMetadata(str(tmp_path / "copy" / "meta.db"), clock=SystemClock(), read_only=True)
    assert reader.get("/a").value == b"1"
    reader.close()


def test_read_that_a_signal_handler_ends_closes_no_connection_that_others_use(open_store):
    class Interrupt(BaseException):
        pass

    class Raising(list):
        def append(self, connection):
            super().append(connection)
            raise Interrupt

    store = open_store()
    store._idle_readers = Raising()
    with pytest.raises(Interrupt):
        store.get("a")
    assert store._idle_readers
    store._idle_readers = list(store._idle_readers)
    assert store.get("a") is None
