"""Assignments and requests, as they are in the metadata store."""

import pytest

from ister.broker.cluster.assignments import Assignment, Assignments
from ister.metadata.base import Absent, ValueIs
from tests.support.memory_metadata import MemoryMetadata

HOLDS = Absent("/other")
FAILS = ValueIs("/other", b"x")
AT_B = Assignment(node="b", reason="new", at=7)


@pytest.fixture
def store():
    return MemoryMetadata()


@pytest.fixture
def assignments(store):
    return Assignments(store, root_prefix="/danube")


def names(count):
    return [f"/ns/t{number}" for number in range(count)]


@pytest.mark.parametrize("value", [b"", b"\xff", b"7", b"{}", b'{"node": 1}'], ids=repr)
def test_one_that_cannot_be_read_is_replaced(assignments, store, value):
    """Else nobody could assign the topic again."""
    store.put("/danube/cluster/assignments/ns/t", value)
    found, revision = assignments.get("/ns/t")
    assert found.node == ""
    done = assignments.assign_all({"/ns/t": AT_B}, known={"/ns/t": revision}, condition=HOLDS)
    assert done == ["/ns/t"]
    assert assignments.get("/ns/t")[0] == AT_B


def test_many_are_assigned_in_few_transactions(assignments, store):
    kinds = []
    store.before = lambda kind, key: kinds.append(kind)
    wanted = dict.fromkeys(names(100), AT_B)
    assert assignments.assign_all(wanted, known={}, condition=HOLDS) == names(100)
    assert kinds == ["transact"] * 3


def test_one_that_has_changed_does_not_hold_up_the_others(assignments):
    other = Assignment(node="c", reason="moved", at=9)
    assignments.assign("/ns/t5", other)
    done = assignments.assign_all(dict.fromkeys(names(60), AT_B), known={}, condition=HOLDS)
    assert sorted(done) == sorted(set(names(60)) - {"/ns/t5"})
    assert assignments.get("/ns/t5")[0] == other


def test_nothing_is_written_without_the_condition(assignments, store):
    kinds = []
    store.before = lambda kind, key: kinds.append(kind)
    assert assignments.assign_all(dict.fromkeys(names(400), AT_B), known={}, condition=FAILS) == []
    # The first batch, and each topic of it: the rest is not tried.
    assert kinds == ["transact"] * 41
    assert assignments.all() == {}


def test_an_assignment_answers_the_request(assignments, store):
    lease = store.grant_lease(10)
    assignments.request("/ns/t", node="a", lease=lease)
    assignments.request("/ns/u", node="a", lease=lease)
    assert assignments.requests() == ["/ns/t", "/ns/u"]
    assignments.assign_all({"/ns/t": AT_B}, known={}, condition=HOLDS)
    assert assignments.requests() == ["/ns/u"]
    assignments.assign("/ns/u", AT_B)
    assert assignments.requests() == []


def test_a_request_ends_with_the_broker_that_was_asked(assignments, store):
    lease = store.grant_lease(10)
    assignments.request("/ns/t", node="a", lease=lease)
    lease.revoke()
    assert assignments.requests() == []


def test_only_assignments_as_known_are_removed(assignments):
    for name in names(3):
        assignments.assign(name, AT_B)
    known = {topic: revision for topic, (_, revision) in assignments.all().items()}
    assignments.assign("/ns/t1", AT_B)
    assert assignments.remove(known, condition=FAILS) == []
    assert assignments.remove(known, condition=HOLDS) == ["/ns/t0", "/ns/t2"]
    assert list(assignments.all()) == ["/ns/t1"]
