"""Fail the Nth file operation, for every N, once and from then on, and see what is left."""

from __future__ import annotations

import errno
import random

import pytest

from ister.base.model import TopicState
from ister.errors import IsterError
from ister.topic.log import Log
from tests.sim.world import TOPICS, BrokenPromiseError, InlineSchedule, World, read_all
from tests.support.memory_fs import FaultPlan

STEPS = 30
SEEDS = (1, 2, 3)
SEEDS_PAIRS = 20
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EMFILE": errno.EMFILE}


def run_with_fault(seed: int, plan: FaultPlan | None) -> int:
    """Works, meets the fault, heals, works on, loses power; returns how many operations it took.

    Every error on the way has to be one of ours. After healing, each topic has to take and sync a
    message again, and what was acknowledged before the fault has to be there, both in the same
    process and after a power cut.
    """
    world = World(seed)
    counter = FaultPlan(at=1 << 60)
    world.fs.before = plan if plan is not None else counter
    log = open_log(world)
    for _ in range(STEPS):
        step(world, log)
    world.fs.before = lambda kind, path: None
    for name in TOPICS:
        prove_alive(world, log, name)
    close_quietly(log)
    world.fs.crash(random.Random(seed))
    log = open_log(world)
    for name in TOPICS:
        topic = log.topic(name)
        if topic.state is not TopicState.OPEN:
            raise BrokenPromiseError(f"{name} is {topic.state} after healing: {topic.damage}")
        world._check(topic, kill=False)
    log.close()
    return counter.seen


def open_log(world: World) -> Log:
    for _ in range(3):
        try:
            return Log(world.config, fs=world.fs, clock=world.clock, scheduler=InlineSchedule())
        except IsterError:
            world.fs.kill()  # the process gives up; the next one finds a healthy disk
    raise BrokenPromiseError("the log does not open on a healthy disk")


def step(world: World, log: Log) -> None:
    try:
        world.step(log, log._scheduler)
    except IsterError:
        # The producer was told. Whether the message is stored is unknown; the work goes on.
        world.clock.advance(0.5)


def prove_alive(world: World, log: Log, name: str) -> None:
    world.clock.advance(1.0)
    topic = log.topic(name, create=True)
    if topic.state is TopicState.QUARANTINED:
        raise BrokenPromiseError(f"an error made {name} quarantined: {topic.damage}")
    promises = world.promises[name]
    try:
        world.append(topic, promises)
        topic.flush()
    except IsterError:
        # Stalled or failed a moment ago: once more, as the error's text says.
        world.clock.advance(1.0)
        topic.wal.committer.run()
        topic = log.topic(name)
        world.append(topic, promises)
        topic.flush()
    found = read_all(topic)
    for offset, payload in promises.durable.items():
        if offset >= topic.earliest and found.get(offset) != payload:
            raise BrokenPromiseError(f"{name} {offset} was {payload!r}, is {found.get(offset)!r}")
    promises.durable = dict(found)
    promises.written = {}


def close_quietly(log: Log) -> None:
    try:
        log.close()
    except IsterError:
        raise BrokenPromiseError("a healthy disk, and close failed") from None


@pytest.mark.nightly
@pytest.mark.sim
@pytest.mark.parametrize("is_sticky", [False, True], ids=["once", "sticky"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_operation_may_fail_and_nothing_acknowledged_is_lost(
    seed: int, error: str, is_sticky: bool
) -> None:
    operations = run_with_fault(seed, None)
    assert operations > 50
    for at in range(1, operations + 1):
        plan = FaultPlan(at=at, errno=ERRORS[error], is_sticky=is_sticky)
        try:
            run_with_fault(seed, plan)
        except (BrokenPromiseError, IsterError) as failure:
            raise AssertionError(
                f"seed {seed}: operation {at} of {operations} fails with {error}, "
                f"{'sticky' if is_sticky else 'once'}: {failure!r}"
            ) from failure
        # The sweep ends where the fault no longer happens.
        if plan.fired == 0:
            assert at > 50
            break


@pytest.mark.nightly
@pytest.mark.sim
@pytest.mark.parametrize(
    "kind", ["sync", "write", "sync_directory", "rename", "create", "truncate"]
)
def test_pairs_of_faults_of_one_kind_lose_nothing(kind: str) -> None:
    """A fault, and the next operation of the same kind too: error paths fail like others."""
    for seed in range(SEEDS_PAIRS):
        for at in range(1, 8):
            plan = FaultPlan(at=at, errno=errno.EIO, kinds=frozenset({kind}))
            second = FaultPlan(at=at + 1, errno=errno.EIO, kinds=frozenset({kind}))

            def both(name: str, path: str, plan=plan, second=second) -> None:
                second_error: OSError | None = None
                try:
                    second(name, path)
                except OSError as error:
                    second_error = error
                plan(name, path)
                if second_error is not None:
                    raise second_error

            run_with_fault(seed, both)
