"""Metadata in memory: changes that land late, leases by the clock."""

import pytest

from ister.errors import CommitUnknownError, NotFoundError
from ister.metadata.base import Delete, ValueIs
from tests.support.clock import ManualClock
from tests.support.memory_metadata import MemoryMetadata


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def store(clock):
    return MemoryMetadata(clock)


def test_delayed_change_compares_when_it_lands(store):
    store.put("/a", b"1")
    store.delay_next_change()
    with pytest.raises(CommitUnknownError):
        store.transact([ValueIs("/a", b"1")], [Delete("/a")])
    store.put("/a", b"2")
    assert store.deliver_delayed() == [None]
    assert store.get("/a").value == b"2"


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
