"""A job's lease: one holder at a time, gone when it is not renewed, whatever answers get lost."""

import pytest

from ister.bucket.fence import Fence, Holder, read_holder
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    CorruptDataError,
    FencedError,
    UnavailableError,
)
from ister.metadata.base import Put
from tests.support.stores import NOW_MS, failing, once

KEY = "/danube/pipeline/lease"
TTL = 15.0


def take(cluster, id="one", **about):
    return Fence.take(
        cluster.metadata, KEY, id=id, about=about, ttl_seconds=TTL, clock=cluster.clock
    )


def guarded(cluster, fence, key="/guarded"):
    """A change that requires the fence; whether it happened."""
    return cluster.metadata.transact([fence.compare], [Put(key, b"x")]) is not None


def test_holder_says_who_it_is(cluster):
    take(cluster, job="tier", process=7)
    assert read_holder(cluster.metadata, KEY) == Holder(
        id="one", since=NOW_MS // 1000, about={"job": "tier", "process": 7}
    )


@pytest.mark.parametrize("value", [b"", b"no json", b"[]", b'{"id": "x"}', b'{"since": {}}'])
def test_key_with_anything_else_in_it_is_damaged(cluster, value):
    cluster.metadata.put(KEY, value)
    with pytest.raises(CorruptDataError):
        read_holder(cluster.metadata, KEY)


def test_second_one_is_refused_and_leaves_the_first_alone(cluster):
    fence = take(cluster)
    with pytest.raises(ConflictError):
        take(cluster, "two")
    assert read_holder(cluster.metadata, KEY).id == "one"
    fence.check()
    assert guarded(cluster, fence)


@pytest.mark.parametrize("when", ["after", "before"])
@pytest.mark.parametrize("count", [1, 3])
def test_lost_answers_do_not_make_a_holder_doubt_itself(cluster, when, count):
    setattr(cluster.metadata, when, failing("transact", times=count, error=CommitUnknownError))
    fence = take(cluster)
    fence.check()
    assert guarded(cluster, fence)


def test_one_whose_answers_are_lost_finds_out_that_another_was_faster(cluster):
    def another():
        take(cluster, "two")
        raise CommitUnknownError("lost")

    cluster.metadata.before = once("transact", another)
    with pytest.raises(ConflictError):
        take(cluster)
    assert read_holder(cluster.metadata, KEY).id == "two"


@pytest.mark.parametrize("when", ["after", "before"])
def test_store_that_never_answers_leaves_no_key(cluster, when):
    setattr(cluster.metadata, when, failing("transact", times=5, error=CommitUnknownError))
    with pytest.raises(UnavailableError):
        take(cluster)
    assert read_holder(cluster.metadata, KEY) is None


def test_fence_holds_for_as_long_as_it_is_renewed(cluster):
    fence = take(cluster)
    for _ in range(10):
        cluster.clock.advance(TTL * 0.6)
        assert fence.is_valid
        fence.renew()
        assert guarded(cluster, fence)


@pytest.mark.parametrize("passes", ["advance", "suspend"])
def test_fence_that_was_not_renewed_has_ended(cluster, passes):
    fence = take(cluster)
    getattr(cluster.clock, passes)(TTL + 1)
    assert not fence.is_valid
    assert not guarded(cluster, fence)
    for ask in (fence.check, fence.renew):
        with pytest.raises(FencedError) as raised:
            ask()
        assert raised.value.path == KEY


def test_successor_is_not_its_predecessor(cluster):
    old = take(cluster)
    cluster.clock.advance(TTL + 1)
    new = take(cluster, "two")
    with pytest.raises(FencedError):
        old.check("/default/a")
    assert not guarded(cluster, old)
    assert guarded(cluster, new)
    old.release()
    new.check()


def test_released_key_is_free(cluster):
    fence = take(cluster)
    fence.release()
    fence.release()
    assert not guarded(cluster, fence)
    take(cluster, "two").check()
