"""The fake's own promises: answers that get lost, changes that land late, leases by the clock."""

import pytest

from ister.errors import CommitUnknownError, NotFoundError, UnavailableError
from ister.metadata.base import Absent, Delete, Put, ValueIs
from tests.support.cases import each
from tests.support.clock import ManualClock
from tests.support.memory_fs import SimulatedCrash
from tests.support.memory_metadata import MemoryMetadata


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def store(clock):
    return MemoryMetadata(clock)


def _fail_once(kind, error):
    fired = []

    def hook(seen_kind, key):
        if seen_kind == kind and not fired:
            fired.append(key)
            raise error

    return hook


def test_error_before_a_change_means_that_nothing_happened(store):
    store.before = _fail_once("put", UnavailableError("away"))
    with pytest.raises(UnavailableError):
        store.put("/a", b"1")
    assert store.get("/a") is None
    assert store.put("/a", b"1") == 1


@each("error", [CommitUnknownError("lost"), SimulatedCrash()])
def test_error_after_a_change_is_a_lost_answer(store, error):
    store.after = _fail_once("transact", error)
    with pytest.raises(type(error)):
        store.transact([Absent("/a")], [Put("/a", b"1")])
    assert store.get("/a").value == b"1"
    assert store.transact([Absent("/a")], [Put("/a", b"1")]) is None


def test_hooks_are_told_every_kind_and_key(store):
    seen = []
    store.before = lambda kind, key: seen.append(("before", kind, key))
    store.after = lambda kind, key: seen.append(("after", kind, key))
    store.put("/a", b"")
    store.get("/a")
    store.range("/")
    store.delete("/a")
    store.delete_prefix("/a")
    store.transact([Absent("/c")], [Put("/t", b"")])
    store.transact([Absent("/c")], [])
    lease = store.grant_lease(1)
    lease.renew()
    lease.revoke()
    assert [entry[1:] for entry in seen if entry[0] == "before"] == [
        ("put", "/a"),
        ("get", "/a"),
        ("range", "/"),
        ("delete", "/a"),
        ("delete_prefix", "/a"),
        ("transact", "/t"),
        ("transact", "/c"),
        ("grant_lease", ""),
        ("renew", "1"),
        ("revoke", "1"),
    ]
    assert [entry[0] for entry in seen] == ["before", "after"] * 10


def test_hook_may_use_the_store(store):
    """Another process's change, placed right before ours."""

    def rival(kind, key):
        store.before = lambda kind, key: None
        store.put("/a", b"rival")

    store.before = rival
    assert store.transact([Absent("/a")], [Put("/a", b"mine")]) is None
    assert store.get("/a").value == b"rival"


def test_delayed_change_lands_when_delivered(store):
    store.delay_next_change()
    with pytest.raises(CommitUnknownError):
        store.transact([Absent("/a")], [Put("/a", b"1")])
    assert store.get("/a") is None
    assert len(store.delayed) == 1
    assert store.deliver_delayed() == [1]
    assert store.get("/a").value == b"1"
    assert store.delayed == []


def test_delayed_change_compares_when_it_lands(store):
    store.put("/a", b"1")
    store.delay_next_change()
    with pytest.raises(CommitUnknownError):
        store.transact([ValueIs("/a", b"1")], [Delete("/a")])
    store.put("/a", b"2")
    assert store.deliver_delayed() == [None]
    assert store.get("/a").value == b"2"


def test_delayed_changes_land_in_order_and_dropped_ones_never(store):
    store.delay_next_change(3)
    for number in range(3):
        with pytest.raises(CommitUnknownError):
            store.put("/a", b"%d" % number)
    store.delayed.pop()
    assert store.deliver_delayed() == [1, 2]
    assert store.get("/a").value == b"1"
    assert store.deliver_delayed() == []


def test_delayed_put_with_an_ended_lease_does_not_land(store, clock):
    lease = store.grant_lease(1)
    store.delay_next_change()
    with pytest.raises(CommitUnknownError):
        store.put("/a", b"", lease)
    clock.advance(1)
    [error] = store.deliver_delayed()
    assert isinstance(error, NotFoundError)
    assert store.get("/a") is None


def test_lease_ends_by_the_clock(store, clock):
    lease = store.grant_lease(10)
    assert lease.valid_until == 10
    put = store.put("/a", b"", lease)
    clock.advance(9.9)
    assert store.get("/a") is not None
    lease.renew()
    assert lease.valid_until == pytest.approx(19.9)
    clock.advance(9.9)
    assert store.range("/") != []
    clock.suspend(0.2)
    assert store.get("/a") is None
    assert store.range("/") == []
    assert store.revision == put
    with pytest.raises(NotFoundError):
        lease.renew()
    # The removal had a revision of its own.
    assert store.put("/b", b"") == put + 2


def test_lost_answer_to_a_renewal_leaves_the_time_as_it_was(store, clock):
    lease = store.grant_lease(10)
    clock.advance(5)
    store.after = _fail_once("renew", UnavailableError("lost"))
    with pytest.raises(UnavailableError):
        lease.renew()
    assert lease.valid_until == 10


def test_lease_is_counted_from_before_the_question(store, clock):
    store.before = lambda kind, key: clock.advance(3)
    assert store.grant_lease(10).valid_until == 10


def test_revoke_swallows_errors_but_not_crashes(store):
    lease = store.grant_lease(10)
    store.before = _fail_once("revoke", UnavailableError("away"))
    lease.revoke()
    store.before = _fail_once("revoke", SimulatedCrash())
    with pytest.raises(SimulatedCrash):
        lease.revoke()


def test_lease_of_another_store_of_the_same_kind_is_refused(store):
    with pytest.raises(ValueError, match="another"):
        store.put("/a", b"", MemoryMetadata().grant_lease(1))
