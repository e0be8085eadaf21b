"""Changes of several threads in one commit of SQLite: one sync, and to each its own outcome."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ister.base.clock import SystemClock
from ister.errors import CapacityError, CommitUnknownError, NotFoundError, UnavailableError
from ister.metadata import sqlite
from ister.metadata.base import Absent, Put
from ister.metadata.sqlite import SqliteMetadata

WAIT_SECONDS = 60


class Connection:
    """A store's writing connection that counts commits, and may fail one."""

    def __init__(self, connection):
        self.connection = connection
        self.commits = 0
        self.on_commit = lambda: None

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def execute(self, statement, *values):
        if statement == "COMMIT":
            self.commits += 1
            self.on_commit()
        return self.connection.execute(statement, *values)


@pytest.fixture
def store(tmp_path):
    store = SqliteMetadata(str(tmp_path / "meta.db"), clock=SystemClock())
    store._writer = Connection(store._writer)
    yield store
    store.close()


def together(store, *changes):
    """Makes changes in as many threads, all of which wait for the same commit; their outcomes."""

    def run(change):
        try:
            return change()
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(changes)) as pool:
        with store._writer_lock:
            futures = [pool.submit(run, change) for change in changes]
            paused = threading.Event()
            while len(store._requests) < len(changes):
                paused.wait(0.001)
        return [future.result(WAIT_SECONDS) for future in futures]


def put(store, key, value=b"1", lease=None):
    return lambda: store.put(key, value, lease)


def test_changes_that_wait_share_one_commit_and_have_their_own_revisions(store):
    revisions = together(store, *(put(store, f"/{number}") for number in range(20)))
    assert store._writer.commits == 1
    assert sorted(revisions) == list(range(1, 21))
    assert {item.key: item.revision for item in store.range("/")} == {
        f"/{number}": revision for number, revision in enumerate(revisions)
    }
    assert store.put("/after", b"1") == 21


def test_one_change_sees_those_before_it(store):
    """Goal: of several that require a key to be absent, one succeeds."""
    revisions = together(
        store, *(lambda: store.transact([Absent("/a")], [Put("/a", b"1")]) for _ in range(8))
    )
    assert store._writer.commits == 1
    assert sorted(revisions, key=str) == [1] + [None] * 7


def test_change_that_is_refused_concerns_no_other(store):
    ended = store.grant_lease(60)
    ended.revoke()
    outcomes = together(
        store, put(store, "/a"), put(store, "/leased", lease=ended), put(store, "/b")
    )
    assert isinstance(outcomes[1], NotFoundError)
    assert sorted([outcomes[0], outcomes[2]]) == [1, 2]
    assert [item.key for item in store.range("/")] == ["/a", "/b"]


def test_change_that_finds_the_file_full_concerns_no_other(store):
    store.put("/a", b"1")
    pages = store._writer.execute("PRAGMA page_count").fetchone()[0]
    store._writer.execute(f"PRAGMA max_page_count = {pages + 4}")
    outcomes = together(store, put(store, "/large", b"x" * 200_000), put(store, "/small"))
    assert isinstance(outcomes[0], CapacityError)
    assert isinstance(outcomes[1], int)
    assert [item.key for item in store.range("/")] == ["/a", "/small"]


def test_outcome_of_a_failed_sync_is_unknown_to_all(store):
    def fail():
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR | (4 << 8)
        raise error

    store._writer.on_commit = fail
    outcomes = together(store, *(put(store, f"/{number}") for number in range(3)))
    assert [type(outcome) for outcome in outcomes] == [CommitUnknownError] * 3
    assert len(set(map(id, outcomes))) == 3, "each thread raises an error of its own"
    assert store._writer.commits == 1, "nothing is tried again"
    store._writer.on_commit = lambda: None
    assert store.put("/after", b"1")


@pytest.mark.parametrize("is_done", [False, True])
def test_thread_that_is_interrupted_in_a_commit_leaves_the_others_an_unknown_outcome(
    store, is_done
):
    """Goal: nothing is done twice, and no thread waits for ever."""

    class Interrupt(BaseException):
        pass

    def interrupt():
        store._writer.on_commit = lambda: None
        if is_done:
            store._writer.connection.execute("COMMIT")
        raise Interrupt

    store._writer.on_commit = interrupt
    outcomes = together(store, *(put(store, f"/{number}") for number in range(3)))
    kinds = sorted(type(outcome).__name__ for outcome in outcomes)
    assert kinds == ["CommitUnknownError", "CommitUnknownError", "Interrupt"]
    assert len(store.range("/")) == (3 if is_done else 0)
    assert store.put("/after", b"1")


def test_thread_that_is_interrupted_before_a_commit_leaves_the_others_their_changes(
    store, monkeypatch
):
    class Interrupt(BaseException):
        pass

    def interrupt(change):
        monkeypatch.undo()
        raise Interrupt

    monkeypatch.setattr(sqlite.Change, "finish", interrupt)
    outcomes = together(store, *(put(store, f"/{number}") for number in range(3)))
    assert sum(isinstance(outcome, Interrupt) for outcome in outcomes) == 1
    assert sorted(one for one in outcomes if isinstance(one, int)) == [1, 2]
    assert len(store.range("/")) == 2


def test_change_that_waited_too_long_is_never_made(tmp_path):
    store = SqliteMetadata(
        str(tmp_path / "meta.db"), clock=SystemClock(), busy_timeout_seconds=0.05
    )
    with ThreadPoolExecutor(1) as other, store._writer_lock:
        error = other.submit(store.put, "/late", b"1").exception(WAIT_SECONDS)
    assert isinstance(error, UnavailableError)
    assert not isinstance(error, CommitUnknownError)
    assert store.put("/after", b"1") == 1
    assert store.get("/late") is None
    store.close()


def test_change_that_waited_too_long_for_the_commit_of_another_thread_is_unknown(tmp_path):
    store = SqliteMetadata(
        str(tmp_path / "meta.db"), clock=SystemClock(), busy_timeout_seconds=0.05
    )
    with ThreadPoolExecutor(1) as other, store._writer_lock:

        class Taken(type(store._requests)):
            """The other thread has taken every request from here."""

            def append(self, request):
                """Keeps nothing."""

        store._requests = Taken()
        with pytest.raises(CommitUnknownError):
            other.submit(store.put, "/late", b"1").result(WAIT_SECONDS)
    store.close()
