"""Tasks that run more than once: speculation, tasks that raise, and stragglers.

Jobs run in this process, with runners that do to each bundle what Spark may do. Executors that die
are in `test_jobs_cluster.py`.
"""

import random
import threading

import pytest

from ister.errors import IsterError
from ister.spark import jobs
from tests.fault.jobs_world import WORKS, World
from tests.support.machine import Task
from tests.support.spark_here import SparkHere
from tests.support.tier_checks import memory_directory
from tests.support.writer_child import new_seed, say_replay

KINDS = ("tier", "tier by copy", "scrub")


@pytest.fixture
def tmp_path():
    with memory_directory() as directory:
        yield directory


class Attempts(SparkHere):
    """Each bundle is tried twice; `stragglers` are attempts that go on after their stage."""

    def __init__(self, how, chance):
        super().__init__()
        self.how = how
        self.chance = chance
        self.tried = 0
        self.stragglers = []

    def run(self, work, bundles, *, name):
        one = super().run
        return [
            self._try(lambda bundle=bundle: one(work, [bundle], name=name)[0]) for bundle in bundles
        ]

    def _try(self, attempt):
        self.tried += 1
        if self.how == "raises after":
            attempt()  # and then its executor raises: what it has made stays
            return attempt()
        if self.how == "at once":
            start = threading.Barrier(2)

            def together():
                start.wait()
                return attempt()

            tasks = [Task(together), Task(together)]
            return self.chance.choice([task.result() for task in tasks])
        result = attempt()
        self.stragglers.append(attempt)
        return result


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["at once", "raises after", "straggles"])
def test_tasks_that_run_twice_leave_no_trace(tmp_path, request, how, kind):
    """Goal: speculation and retries neither lose, double nor leave anything.

    Method: both attempts at the same time, one after the other, or the second one when the job has
    committed what the first one made.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(seed)
    world = World(tmp_path, chance)
    work = WORKS[kind](world)
    work.prepare()
    runner = Attempts(how, chance)
    report = getattr(jobs, work.job)(runner, work.config, **work.arguments())
    assert runner.tried > 0
    work.check_done(report.as_json())
    for straggler in runner.stragglers:
        try:
            straggler()
        except (IsterError, OSError) as error:
            print("straggler:", error)
    work.check_done(report.as_json())
    print(world.sweep())
    world.check()


class Failing(SparkHere):
    """A task raises, again and again, and Spark gives up on the stage."""

    def __init__(self):
        super().__init__()
        self.is_failing = True

    def run(self, work, bundles, *, name):
        done = super().run(work, bundles[: len(bundles) // 2], name=name)
        if self.is_failing:
            raise RuntimeError("Job aborted due to stage failure: Task 1 failed 4 times")
        return done + super().run(work, bundles[len(bundles) // 2 :], name=name)


@pytest.mark.parametrize("kind", KINDS)
def test_job_whose_tasks_raise_fails_and_can_be_run_again(tmp_path, request, kind):
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    world = World(tmp_path, random.Random(seed))
    work = WORKS[kind](world)
    work.prepare()
    runner = Failing()
    call = getattr(jobs, work.job)
    with pytest.raises(RuntimeError, match="stage failure"):
        call(runner, work.config, **work.arguments())
    work.check_killed()
    runner.is_failing = False
    work.check_done(call(runner, work.config, **work.arguments()).as_json())
    print(world.sweep())
    world.check()
