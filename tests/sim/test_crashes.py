"""Seeded simulated crashes: torn, reordered and zeroed writes, lost names, crashed recoveries."""

from __future__ import annotations

import random

import pytest

from ister.config import load_config
from ister.topic.log import Log
from tests.sim.world import InlineSchedule, read_all, run_seed
from tests.support.memory_fs import MemoryFileSystem
from tests.support.scale import first_seed, scaled

CRASHES_MIN = scaled(2_000, 400_000)
LEVELS = ("synced", "written", "memory")


@pytest.mark.sim
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("ack", LEVELS)
def test_any_crash_leaves_every_promise_kept(ack: str) -> None:
    """Goal: no crash point loses, changes, repeats or reorders what was promised.

    Method: worlds from consecutive seeds, beginning with `first_seed`, which is printed, until the
    crashes of all levels together are as many as wanted.
    """
    first = first_seed()
    crashes = messages = seeds = 0
    while crashes < CRASHES_MIN // len(LEVELS):
        world = run_seed(first + seeds, ack=ack)
        crashes += world.crashes
        messages += world.sent
        seeds += 1
    print(f"{ack}: {crashes} crashes in {seeds} worlds from seed {first}, {messages} messages")
    assert messages > crashes


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(20))
def test_directories_of_a_killed_process_are_made_durable_by_the_next(seed: int) -> None:
    """A process made the directories and was killed before it synced them; the next one finds them
    there, acknowledges a message, and the power goes.
    """
    fs = MemoryFileSystem()
    fs.sync_directory = lambda path: None  # the first process never gets to it
    fs.make_directories("/data/wal/ns/a")
    del fs.sync_directory
    config = load_config({"storage": {"mode": "local_only", "wal": {"dir": "/data/wal"}}}, {})
    log = Log(config, fs=fs, scheduler=InlineSchedule())
    topic = log.topic("/ns/a")
    topic.wait(topic.append(b"promised"))
    fs.crash(random.Random(seed))
    log = Log(config, fs=fs, scheduler=InlineSchedule())
    assert read_all(log.topic("/ns/a")) == {0: b"promised"}
