"""The simulation's own judgement: what it has to blame on an owner, and what it must not.

A world that cries over what is allowed is no better than one that is silent about a loss, so each
of its rules that took more than one look is shown from both sides.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ister.errors import OffsetOutOfRangeError, UnavailableError
from tests.sim.tier_world import Node, Plan, Process, TierWorld
from tests.sim.world import BrokenPromiseError


@pytest.fixture
def world() -> TierWorld:
    """A world with a short bucket retention, in which nothing fails by itself."""
    worlds = (TierWorld(seed, shares=False) for seed in range(100))
    world = next(world for world in worlds if world.expires and world.ack == "synced")
    world.fault_rate = 0.0
    return world


def begin(world: TierWorld, node: Node, *, take_over: bool = False) -> Process:
    """A process that opens the topic and does not end by itself."""
    process = node.process = Process(node, Plan())
    world._open_log(process)
    world.open_topic(process, take_over=take_over)
    return process


def fill(world: TierWorld, process: Process, files: int) -> None:
    """Appends until the local log has so many more files, and uploads everything."""
    wanted = len(process.topic.wal.files) + files
    while len(process.topic.wal.files) < wanted:
        world.append(process)
        process.topic.flush()
    world.upload(process)


def expire(world: TierWorld, process: Process) -> None:
    """Everything gets too old for the bucket, and all but its newest goes."""
    world.pass_time(200)
    world.renew(process)
    world.expire(process)
    world.look()


def trim_late(
    world: TierWorld, process: Process, work: Callable[[], None], *, before: int | None = None
) -> None:
    """Trims; once it is decided what goes, others do their `work` first.

    Args:
        world: Where.
        process: Who trims.
        work: What others do.
        before: Have everything below this removed, whatever was decided.
    """
    wal, tier = process.topic.wal, process.topic.bucket

    def trim(decided: int) -> int:
        tier.check_owner()
        tier.assure(wal.trimmed, decided)
        work()
        return wal.trim(decided if before is None else before)

    tier.retention._trim = trim
    world.pass_time(61)
    world.renew(process)
    world.trim(process)


def follow_and_stop_expiring(world: TierWorld, change: int) -> Process:
    """Readers at the beginning, an expiry that stops at a change, local files that are gone."""
    process = begin(world, world.nodes[0])
    fill(world, process, 3)
    process.readers = [process.topic.reader("earliest"), process.topic.reader("earliest")]
    left = change

    def stop(kind: str, key: str) -> None:
        nonlocal left
        left -= kind == "transact"
        if left == 0:
            raise UnavailableError("no answer")

    world.pass_time(200)
    world.renew(process)
    world.meta.before = stop
    with pytest.raises(UnavailableError):
        world.expire(process)
    world.meta.before = lambda kind, key: None
    world.trim(process)
    assert process.topic.wal.trimmed > 0
    assert world.seen.promises.expired == 0
    return process


@pytest.mark.sim
def test_reader_is_refused_what_may_be_gone_because_an_expiry_got_no_answer(world) -> None:
    process = follow_and_stop_expiring(world, change=2)
    world.follow(process)
    assert len(process.readers) == 1


@pytest.mark.sim
def test_reader_is_not_refused_what_is_not_on_record_as_going(world) -> None:
    process = follow_and_stop_expiring(world, change=1)
    world.follow(process)
    assert len(process.readers) == 2
    # An owner that refuses them all the same is blamed.
    process.readers = [process.topic.reader("earliest"), process.topic.reader("earliest")]
    process.topic.bucket.owned.first = process.topic.bucket.owned.last
    with pytest.raises(OffsetOutOfRangeError):
        world.follow(process)


@pytest.mark.sim
def test_fenced_owner_may_remove_files_of_what_the_bucket_had_and_expired(world) -> None:
    a = begin(world, world.nodes[0])
    fill(world, a, 3)
    expire(world, a)
    assert world.seen.promises.expired > 0
    assert a.topic.wal.trimmed == 0

    def take_over() -> None:
        world.pass_time(6)
        begin(world, world.nodes[1], take_over=True)

    trim_late(world, a, take_over)
    assert not world.is_right(a)
    assert a.topic.wal.trimmed > 0


@pytest.mark.sim
def test_fenced_owner_may_remove_files_of_what_the_bucket_had_of_a_deleted_topic(world) -> None:
    a = begin(world, world.nodes[0])
    fill(world, a, 3)

    def make_anew() -> None:
        world.pass_time(6)
        b = begin(world, world.nodes[1], take_over=True)
        world.delete(b)
        world.append(b)
        assert world.seen.promises.tiered == {}

    trim_late(world, a, make_anew)
    assert a.topic.wal.trimmed > 0


@pytest.mark.sim
def test_fenced_owner_that_removes_what_only_its_files_had_of_a_deleted_topic_is_blamed(
    world,
) -> None:
    a = begin(world, world.nodes[0])
    fill(world, a, 3)
    tiered = world.seen.end
    while a.topic.wal.files[-1].first_offset <= tiered:
        world.append(a)
        a.topic.flush()

    def make_anew() -> None:
        world.pass_time(6)
        b = begin(world, world.nodes[1], take_over=True)
        world.delete(b)
        while world.seen.end < tiered + 10:
            fill(world, b, 3)

    with pytest.raises(BrokenPromiseError, match=f"{tiered} was removed by an owner"):
        trim_late(world, a, make_anew, before=a.topic.wal.files[-1].first_offset)


@pytest.mark.sim
def test_fenced_owner_that_removes_what_only_its_files_had_is_blamed_for_it(world) -> None:
    """Also where the new owner's messages under the same offsets have expired meanwhile."""
    a = begin(world, world.nodes[0])
    fill(world, a, 2)
    tiered = world.seen.end
    while len(a.topic.wal.files) < 5:
        world.append(a)
        a.topic.flush()
    given_up = a.topic.wal.next

    def go_on_without_it() -> None:
        world.pass_time(6)
        b = begin(world, world.nodes[1], take_over=True)
        assert b.topic.wal.next == tiered
        while world.seen.end <= given_up:
            fill(world, b, 2)
        fill(world, b, 2)
        expire(world, b)
        assert world.seen.promises.expired >= given_up

    with pytest.raises(BrokenPromiseError, match=f"{tiered} was removed by an owner"):
        trim_late(world, a, go_on_without_it, before=given_up)
