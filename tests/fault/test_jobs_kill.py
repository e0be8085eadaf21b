"""kill -9 of jobs at every named step, of the driver and of a task, and what is there afterwards.

Each round has a log of its own. Jobs are run on it one after the other; at some step the driver
dies, with or without all that it has started, or the process of one task, which Spark replaces.
Right after a death nothing may be wrong: topics read as before, tables have no offset twice. Then
the same job is run again, and everything has to be as if nothing had happened. Before an export,
and before a dead one is run again, somebody puts some tables back to what they were once; now and
then others commit to them, and their history is cleaned. What they lack comes again, once. Beside
some jobs a batch of a query is in a topic in part, and is finished later: each row is there once.
At the end of a round what is left of the dead is collected, and then nothing is left that nobody
names.

The steps of all rounds, their order, the data and who has the log open meanwhile come from a seed.
In `make nightly` the rounds together come by every step of every job.
"""

import json
import random
import time
from collections import Counter

import pytest

from ister.base.failpoints import FAILPOINTS
from ister.bucket.names import format_object_id
from ister.spark.jobs import compact_job
from ister.spark.jobs.compact_job import compact
from tests.fault.jobs_child import Drivers, JobsChild
from tests.fault.jobs_world import KEYED, PLAIN, WORKS, Step, Work, World
from tests.support.scale import IS_NIGHTLY, scaled
from tests.support.spark_here import SparkHere
from tests.support.tier_checks import memory_directory
from tests.support.writer_child import new_seed, say_replay

ROUNDS = scaled(1, 20)
ROLLBACK_ROUNDS = scaled(1, 3)
_DRIVERS_EACH, _TASKS_EACH = 2, 1
"""How many deaths a round has where not all steps are asked for."""
_ATTEMPTS = 6

SEED = new_seed()
HIT: Counter[Step] = Counter()

# How often a job comes by a step, for certain, whatever the data is.
_JOB = {"pipeline.after_lease": 1, "pipeline.after_plan": 1, "pipeline.before_report": 1}
_COMMIT = {"pipeline.before_commit": 2, "pipeline.after_commit": 2}
_SWAP = {"tier.before_swap": 2, "tier.after_swap": 2}
_TABLE = {
    "export.after_dead_letters": 3,
    "export.before_table_commit": 6,
    "export.after_table_commit": 6,
}
_DRIVER: dict[str, dict[str, int]] = {
    "tier": _JOB | _COMMIT | {"tier.before_commit": 3, "tier.after_commit": 3},
    "tier by copy": {},
    "compact": _JOB | _COMMIT | _SWAP,
    "compact to parquet": _JOB | _COMMIT | _SWAP,
    "compact by key": _JOB | dict.fromkeys((*_COMMIT, *_SWAP), 1),
    "export to parquet": _JOB | _COMMIT | _TABLE | {"export.after_publish": 6},
    "export to iceberg": _JOB | _COMMIT | _TABLE,
    "export to delta": _JOB | _COMMIT | _TABLE,
    "gc": _JOB | _COMMIT | {"tier.after_delete_object": 4},
    "scrub": _JOB | _COMMIT | {"scrub.before_repair": 1, "scrub.after_repair": 1},
    "replay": _JOB
    | _COMMIT
    | {
        "batch.after_manifest": 2,
        "batch.after_begin": 2,
        "batch.after_rows": 2,
        "batch.before_done": 2,
        "batch.after_done": 2,
    },
}
_RUN = ("pipeline.before_task", "pipeline.after_task")
_MAKE = ("tier.after_part", "tier.before_complete", "tier.after_complete")
_MERGE = ("compact.after_part", "compact.after_object")
_TASK: dict[str, tuple[str, ...]] = {
    "tier": _RUN + _MAKE,
    "tier by copy": ("tier.after_copy", "tier.after_delete_pending"),
    "compact": _RUN + _MERGE,
    "compact to parquet": _RUN + _MERGE,
    "compact by key": _RUN + _MERGE,
    "export to parquet": _RUN,
    "export to iceberg": _RUN,
    "export to delta": _RUN,
    "gc": (),
    "scrub": _RUN + _MAKE,
    "replay": _RUN,
}
STEPS = [
    *(
        Step(work, point, visits, False)
        for work, of in _DRIVER.items()
        for point, visits in of.items()
    ),
    *(Step(work, point, 1, True) for work, of in _TASK.items() for point in of),
]
_ELSEWHERE = {
    "tier.after_set_aside": "a log is opened whose directory is another topic's",
    "tier.after_claim": "a topic is opened",
    "tier.before_session": "uploads of the owner; jobs have tasks instead",
    "tier.after_session": "uploads of the owner; jobs have tasks instead",
    "tier.before_checkpoint_rename": "uploads of the owner",
    "tier.after_checkpoint": "uploads of the owner",
    "tier.after_expire": "retention",
    "tier.after_mark_deleting": "a topic is deleted",
    "tier.after_seal": "a topic is handed over",
    "tier.after_remove_local": "a topic is handed over",
    "tier.after_replace": "`ister repair`; `scrub` commits between its own steps",
}

# Right before what makes the output count, where the lease was last looked at before that.
_SLEEPS = {
    "tier": "tier.before_commit",
    "compact": "tier.before_swap",
    "compact by key": "tier.before_swap",
    "export to parquet": "export.before_table_commit",
    "export to iceberg": "export.before_table_commit",
    "export to delta": "export.before_table_commit",
    "gc": "pipeline.before_commit",
    "scrub": "pipeline.before_commit",
    "replay": "pipeline.before_commit",
}


def deal() -> list[list[Step]]:
    """The steps of each round: all of them where there is time, else some of both kinds."""
    chance = random.Random(f"{SEED}/deal")
    drivers = [step for step in STEPS if not step.is_task]
    tasks = [step for step in STEPS if step.is_task]
    chance.shuffle(drivers)
    chance.shuffle(tasks)
    rounds = [
        [*drivers[number::ROUNDS], *tasks[number::ROUNDS]]
        if IS_NIGHTLY
        else [
            *drivers[number * _DRIVERS_EACH :][:_DRIVERS_EACH],
            *tasks[number * _TASKS_EACH :][:_TASKS_EACH],
        ]
        for number in range(ROUNDS)
    ]
    for steps in rounds:
        chance.shuffle(steps)
    return rounds


@pytest.fixture(scope="module")
def drivers():
    """One driver after the other, for all rounds."""
    with memory_directory() as directory, Drivers(directory) as drivers:
        yield drivers


@pytest.fixture
def tmp_path():
    """In memory; see there."""
    with memory_directory() as directory:
        yield directory


class Round:
    """A log, and what happens to the jobs on it.

    Args:
        world: The log.
        drivers: Who runs the jobs.
    """

    def __init__(self, world: World, drivers: Drivers) -> None:
        self.world = world
        self.drivers = drivers
        self.chance = world.chance
        self.deaths: list[str] = []

    def kill(self, step: Step) -> None:
        """A job that dies at a step, or a task of it, and is run again."""
        if step.is_task:
            self._kill_task(step)
        else:
            self._kill_driver(step)
        HIT[step] += 1

    def _prepared(self, name: str) -> Work:
        """A job that has something to do, beside a batch that is open, or not."""
        self.world.turn_batch()
        work = WORKS[name](self.world)
        work.prepare()
        return work

    def _kill_driver(self, step: Step) -> None:
        work = self._prepared(step.work)
        visit = self.chance.randint(1, step.visits)
        is_machine, is_open = self.chance.random() < 0.5, self.chance.random() < 0.4
        self.deaths.append(f"{step.work}: {step.point}@{visit}")
        print(self.deaths[-1], "machine" if is_machine else "", "open" if is_open else "")
        with self.world.owned(is_open and not work.is_alone):
            self.drivers.kill_driver(
                work.job,
                work.config,
                work.arguments(),
                f"{step.point}=kill@{visit}",
                is_machine=is_machine,
            )
            work.check_killed()
            self.world.wait_for_leases()
            work.check_done(self._run(work))

    def _kill_task(self, step: Step) -> None:
        is_open = self.chance.random() < 0.4
        self.deaths.append(f"{step.work}, a task: {step.point}")
        for _ in range(_ATTEMPTS):
            work = self._prepared(step.work)
            print(self.deaths[-1], "open" if is_open else "")
            with self.world.owned(is_open and not work.is_alone):
                report, has_died = self.drivers.kill_task(
                    work.job, work.config, work.arguments(), f"{step.point}=kill@1"
                )
                work.check_done(report)
                if has_died:
                    # Nothing is left to be done, and nothing is done twice.
                    work.check_done(self._run(work))
                    return
        # Which process gets which task is up to Spark.
        raise AssertionError(f"{step} was not reached in {_ATTEMPTS} attempts")

    def run_another(self) -> None:
        """Any job, from its beginning to its end."""
        name = self.chance.choice(sorted(WORKS))
        print(name)
        work = self._prepared(name)
        work.check_done(self._run(work))

    def _run(self, work: Work) -> dict:
        return self.drivers.run(work.job, work.config, work.arguments())

    def finish(self) -> dict:
        """What deaths have left is collected; figures."""
        world = self.world
        world.wait_for_leases()
        world.finish_batch()
        world.age_tables()
        for kind in sorted(world.exported):
            export = WORKS[f"export to {kind}"](world)
            export.prepare()
            export.check_done(self.drivers.run(export.job, world.sweeping, export.arguments()))
        strangers = world.check_files_of_tables()
        swept = world.sweep()
        world.check()
        scrubbed = self.drivers.run("scrub", world.config, {})
        assert scrubbed["ok"], scrubbed["errors"]
        assert [topic["findings"] for topic in scrubbed["topics"] if topic["findings"]] == []
        told = {"deaths": self.deaths, "unnamed_table_files": strangers, **swept}
        return told | {"tables": dict(world.rollbacks), "batches": dict(world.batches)}


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_killed_jobs_that_are_run_again_leave_no_trace(tmp_path, drivers, request, number):
    """Goal: whoever dies wherever, the job run again has done what it should, once."""
    say_replay(SEED, request.node.nodeid)
    started, before = time.monotonic(), Counter(drivers.told)
    world = World(tmp_path, random.Random(f"{SEED}/{number}"))
    a_round = Round(world, drivers)
    for step in deal()[number]:
        a_round.kill(step)
        if world.chance.random() < 0.3:
            a_round.run_another()
    figures = a_round.finish()
    seconds = round(time.monotonic() - started, 1)
    told = {"seed": SEED, "round": number, **(drivers.told - before), **figures}
    print(json.dumps({"test": "kill -9 of jobs", **told, "seconds": seconds}))


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("number", range(ROLLBACK_ROUNDS))
def test_exports_into_tables_that_are_rolled_back(tmp_path, drivers, request, number):
    """Goal: exports die while somebody rolls tables back and cleans up; each offset is there once.

    Method: all steps of exports that can be rolled back, on one log. After each rollback, and each
    run, the tables are read without Ister and compared with what was sent.
    """
    say_replay(SEED, request.node.nodeid)
    started = time.monotonic()
    world = World(tmp_path, random.Random(f"{SEED}/rollbacks/{number}"))
    a_round = Round(world, drivers)
    steps = [step for step in STEPS if step.work in ("export to iceberg", "export to delta")]
    world.chance.shuffle(steps)
    for step in steps if IS_NIGHTLY else steps[:3]:
        a_round.kill(step)
    figures = a_round.finish()
    assert not IS_NIGHTLY or figures["tables"]["delta rollbacks"]
    assert not IS_NIGHTLY or figures["tables"]["iceberg rollbacks"]
    seconds = round(time.monotonic() - started, 1)
    told = {"test": "rollbacks of tables", "seed": SEED, "round": number, **figures}
    print(json.dumps({**told, "deaths": len(a_round.deaths), "seconds": seconds}))


@pytest.mark.nightly
def test_all_rounds_together_have_come_by_every_step(request):
    """Goal: no step of any job is left out where all are asked for."""
    if not IS_NIGHTLY or sum(HIT.values()) < len(STEPS):
        pytest.skip("not all rounds were run")
    assert set(HIT) == set(STEPS)
    driver_kills = sum(count for step, count in HIT.items() if not step.is_task)
    print(json.dumps({"driver_kills": driver_kills, "task_kills": HIT.total() - driver_kills}))


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("name", "point"), _SLEEPS.items())
def test_job_that_slept_for_longer_than_its_lease_changes_nothing(
    tmp_path, drivers, request, name, point
):
    """Goal: a driver that stops right before a commit, and wakes up late, adds nothing twice.

    Method: when its lease has ended, another driver does the job; then the first one goes on.
    """
    say_replay(SEED, request.node.nodeid)
    world = World(tmp_path, random.Random(f"{SEED}/{name}"))
    with memory_directory() as directory, JobsChild(directory) as sleeper:
        work = WORKS[name](world)
        work.prepare()
        sleeper.pause(work.job, work.config, work.arguments(), point)
        world.wait_for_leases()
        work.check_killed()
        work.check_done(drivers.run(work.job, work.config, work.arguments()))
        ended = sleeper.resume()
        assert ended == "failed" or not sleeper.last["done"]["report"]["ok"], sleeper.last
    work.check_done(drivers.run(work.job, work.config, work.arguments()))
    world.wait_for_leases()
    print(json.dumps({"test": request.node.name, **world.sweep()}))


def test_every_failpoint_is_a_step_of_a_job_or_belongs_elsewhere():
    """Goal: a failpoint that somebody adds is not forgotten here."""
    groups = ("pipeline.", "tier.", "compact.", "export.", "scrub.", "batch.")
    known = {point for point in FAILPOINTS if point.startswith(groups)}
    steps = {step.point for step in STEPS}
    assert steps | set(_ELSEWHERE) == known
    assert not steps & set(_ELSEWHERE)
    assert set(_DRIVER) == set(_TASK) == set(WORKS)
    if IS_NIGHTLY:
        assert sorted(step for steps in deal() for step in steps) == sorted(STEPS)


# -- these tests can fail -------------------------------------------------------------------------


def forget(world):
    patient = world.patient(PLAIN[0])
    patient.forget(patient.descriptors()[1])


def lose(world):
    patient = world.patient(PLAIN[0])
    patient.lose(patient.descriptors()[1])


def shorten(world):
    patient = world.patient(PLAIN[0])
    patient.truncate(patient.descriptors()[1], 10)


def overlap(world):
    patient = world.patient(PLAIN[1])
    patient.put(patient.overlap(patient.descriptors()[0], 1))


def take_for_gone(world):
    world.kept[0] = False


def take_for_another(world):
    world.sent[KEYED][3] = world.sent[KEYED][3]._replace(payload=b"another")


@pytest.mark.parametrize("wrong", [forget, lose, shorten, overlap, take_for_gone, take_for_another])
def test_check_sees_what_is_wrong(tmp_path, wrong):
    world = World(tmp_path, random.Random(1))
    world.send(uploads=3)
    world.check()
    wrong(world)
    with pytest.raises((AssertionError, LookupError)):
        world.check()


def keyed_world(directory, seed):
    """With a batch in it that is open, and a compaction that has something to remove."""
    world = World(directory, random.Random(seed))
    world.send(uploads=2, topics=[KEYED])
    world.begin_batch()
    work = WORKS["compact by key"](world)
    work.prepare()
    return world, work


@pytest.mark.parametrize("seed", range(3))
def test_open_batch_is_finished_behind_a_compaction(tmp_path, seed):
    world, work = keyed_world(tmp_path, seed)
    work.check_done(compact(SparkHere(), work.config, **work.arguments()).as_json())
    world.finish_batch()
    assert world.batches["finished"] == 1
    world.send(uploads=1, topics=[KEYED])
    work = WORKS["compact by key"](world)
    work.prepare()
    work.check_done(compact(SparkHere(), work.config, **work.arguments()).as_json())
    assert not all(world.kept.values())


def test_compaction_that_removes_rows_of_an_open_batch_is_caught(tmp_path, monkeypatch):
    _, work = keyed_world(tmp_path, 1)
    monkeypatch.setattr(compact_job, "find_open_batch", lambda *_: None)
    report = compact(SparkHere(), work.config, **work.arguments()).as_json()
    with pytest.raises(AssertionError, match="the wrong messages were removed"):
        work.check_done(report)


def test_batch_that_comes_under_another_number_is_caught(tmp_path):
    world, _ = keyed_world(tmp_path, 1)
    while not world.batch.have:
        world.finish_batch()
        world.begin_batch()
    world.batch.number += 1
    with pytest.raises(AssertionError):
        world.finish_batch()


def test_sweep_sees_what_stays(tmp_path):
    world = World(tmp_path, random.Random(1))
    patient = world.patient(PLAIN[0])
    patient.copy(patient.descriptors()[0])
    assert world.sweep()["collected"] == 1
    # Of an owner to come: nobody collects that.
    left = patient.path(format_object_id(0, 5, 99))
    left.write_bytes(b"?")
    with pytest.raises(AssertionError, match="left"):
        world.sweep()
