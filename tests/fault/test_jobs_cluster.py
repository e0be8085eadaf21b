"""Every job on a Spark cluster of several processes: what its tasks need comes to them by pickle.

Executors are JVMs of other processes than the driver's, in other directories, one on each worker.
What is done is judged as in the tests of killed jobs; a worker that dies must not show.
"""

import random
import time

import pytest

from tests.fault.jobs_child import JobsChild
from tests.fault.jobs_world import WORKS, Work, World
from tests.fault.spark_child import tell
from tests.fault.spark_cluster import SparkCluster
from tests.support.tier_checks import memory_directory
from tests.support.writer_child import new_seed, say_replay

_ORDER = (
    "tier",
    "export to parquet",
    "compact",
    "gc",
    "scrub",
    "compact to parquet",
    "export to iceberg",
    "compact by key",
    "tier by copy",
    "export to delta",
    "replay",
)


@pytest.fixture
def tmp_path():
    """In memory; see there."""
    with memory_directory() as directory:
        yield directory


def new_world(directory, seed: str) -> World:
    home = directory / "log"
    home.mkdir()
    return World(home, random.Random(seed))


def carry_out(work: Work, child: JobsChild) -> None:
    """A job from its beginning to its end, and what has come of it."""
    work.prepare()
    work.check_done(child.run(work.job, work.config, work.arguments())["report"])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_each_job_on_a_cluster(tmp_path, request):
    """Goal: every job works on a cluster, also when one of its machines has died.

    Method: each job once. Then a worker is killed with its executor while tasks run, and another
    takes its place; each job is run once more, and what is left of the dead is collected.
    """
    seed, started = new_seed(), time.monotonic()
    say_replay(seed, request.node.nodeid)
    world = new_world(tmp_path, f"{seed}/all")
    chance = random.Random(f"{seed}/order")
    order = [*_ORDER[1:]]
    chance.shuffle(order)
    assert {*order, _ORDER[0]} == set(WORKS)
    with (
        SparkCluster(tmp_path) as cluster,
        JobsChild(tmp_path, **cluster.driver()) as child,
    ):
        for name in (_ORDER[0], *order):
            print(name)
            carry_out(WORKS[name](world), child)
        assert all(cluster.executors(number) for number in (0, 1)), cluster.logs()
        killed = 0
        for name in order:
            print(name, "and a worker dies")
            work = WORKS[name](world)
            work.prepare()
            child.tell("job", name=work.job, config=work.config, arguments=work.arguments())
            assert child.listen("done", "failed", seconds=chance.uniform(0.0, 1.5)) != "failed", (
                child.story()
            )
            number = cluster.add_worker()
            killed += cluster.kill_worker(number - 2)
            if child.said["done"] == len(_ORDER) + order.index(name):
                child.finished(300.0)
            work.check_done(child.last["done"]["report"])
        world.wait_for_leases()
        child.end()
    tell(request, started, seed=seed, jobs=2 * len(_ORDER), killed=killed, **world.sweep())
