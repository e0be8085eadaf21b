"""Producers of a topic: ids that follow from names, limits that count who is there."""

import pytest

from ister.broker.policies import Policies
from ister.broker.publish import producers
from ister.broker.publish.producers import Producers, producer_id
from ister.errors import CapacityError, PermissionDeniedError

FREE = Policies()


def register(known, name, *, now=0.0, is_exclusive=False, policies=FREE):
    return known.register(name, is_exclusive=is_exclusive, policies=policies, now=now)


def shared():
    """Producers, one of which is there and is not exclusive."""
    known = Producers("/default/t")
    register(known, "a")
    assert known.find(7, 0.0) is None
    return known


def test_an_id_follows_from_topic_and_name():
    assert producer_id("/default/t", "p") == producer_id("/default/t", "p")
    many = {producer_id(f"/default/t{t}", f"p{p}") for t in range(50) for p in range(50)}
    assert len(many) == 2500
    assert min(many) >= 1
    # The upper bits are for numbered producers.
    assert max(many) < 1 << 61
    # The name's border is part of it.
    assert producer_id("/a/b", "cd") != producer_id("/a/bc", "d")


def test_the_index_knows_the_topic_of_each():
    index = {}
    a, b = Producers("/default/a", index), Producers("/default/b", index)
    one, other = register(a, "p"), register(b, "p")
    assert index == {one.id: "/default/a", other.id: "/default/b"}
    a.clear()
    assert index == {other.id: "/default/b"}
    assert len(a) == 0


def test_a_limit_counts_those_that_were_heard_of():
    policies = Policies(max_producers_per_topic=2)
    known = Producers("/default/t")
    first = register(known, "a", policies=policies)
    register(known, "b", policies=policies)
    register(known, "a", policies=policies)  # comes again, and is no third one
    with pytest.raises(CapacityError, match="max_producers_per_topic"):
        register(known, "c", policies=policies)
    # Half a minute later one of them has said something, and another half minute later the other
    # one counts no more.
    assert known.find(first.id, 40.0).name == "a"
    assert register(known, "c", now=70.0, policies=policies).name == "c"
    with pytest.raises(CapacityError):
        register(known, "d", now=70.0, policies=policies)
    assert [p.name for p in known.live(70.0)] == ["a", "c"]


def test_an_exclusive_producer_has_the_topic_for_itself():
    known = Producers("/default/t")
    first = register(known, "a", is_exclusive=True)
    assert register(known, "a", is_exclusive=True).id == first.id == producer_id("/default/t", "a")
    for before, is_exclusive in ((known, True), (known, False), (shared(), True)):
        with pytest.raises(PermissionDeniedError):
            register(before, "b", is_exclusive=is_exclusive)
    # It is gone.
    assert register(known, "b", now=1000.0).name == "b"


def test_silent_ones_go_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(producers, "_PRODUCERS_MAX", 10)
    index = {}
    known = Producers("/default/t", index)
    for number in range(10):
        register(known, f"p{number}", now=float(number * 10))
    register(known, "last", now=100.0)
    assert {p.name for p in known.live(100.0)} == {"p5", "p6", "p7", "p8", "p9", "last"}
    assert len(known) == 6
    assert len(index) == 6
