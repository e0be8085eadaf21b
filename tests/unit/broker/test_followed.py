"""What is followed in the metadata store: read at changes, regularly, and while it is away."""

import logging
import threading

import pytest

from ister.base import threads
from ister.broker.followed import Followed
from ister.errors import UnavailableError
from tests.support.memory_metadata import MemoryMetadata
from tests.support.waiting import eventually

LOG = logging.getLogger("ister.broker.tests")


@pytest.fixture
def follow():
    """Follows `/a/` of a store; every read is noted, after what the test does in it."""
    made = []

    def start(*, seconds=3600.0, has_watch=True, within=lambda: None):
        store, reads = MemoryMetadata(), []

        def read(is_hint):
            reads.append(is_hint)
            within()

        if not has_watch:
            watch = store.watch
            store.watch = lambda prefix, _: watch(prefix, lambda key: None)
        known = {"thread": "ister-test", "log": LOG, "warning": "cannot be read"}
        followed = Followed(store, "/a/", read, seconds=seconds, **known)
        made.append((followed, store))
        return followed, store, reads

    yield start
    for followed, store in made:
        followed.close()
        followed.close()
        store.close()


def test_a_change_is_read_at_once_and_nothing_else_is(follow):
    followed, store, reads = follow()
    store.put("/b/1", b"")
    store.put("/a/1", b"")
    eventually(lambda: reads == [True])
    followed.wake()
    eventually(lambda: reads == [True, True])


def test_without_a_watch_it_is_read_regularly(follow):
    """A watch is a hint that may get lost."""
    _, store, reads = follow(seconds=0.01, has_watch=False)
    store.put("/a/1", b"")
    eventually(lambda: len(reads) > 2)
    assert not any(reads)


def test_a_store_that_is_away_is_warned_of_once_each_time(follow, caplog):
    is_away = threading.Event()
    is_away.set()

    def within():
        if is_away.is_set():
            raise UnavailableError("away")

    _, _, reads = follow(seconds=0.01, within=within)
    for times in (1, 2):
        seen = len(reads)
        eventually(lambda seen=seen: len(reads) > seen + 3)
        assert [one.getMessage() for one in caplog.records] == ["cannot be read"] * times
        is_away.clear()
        seen = len(reads)
        eventually(lambda seen=seen: len(reads) > seen + 3)
        is_away.set()


def test_a_bug_is_on_record_and_ends_nothing(follow):
    def within():
        raise ZeroDivisionError

    _, _, reads = follow(seconds=0.01, within=within)
    eventually(lambda: len(reads) > 2)
    assert [one.thread for one in threads.failures()] == ["ister-test"]
