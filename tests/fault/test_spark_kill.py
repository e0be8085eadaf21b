"""kill -9 of Spark drivers, of their workers and of commits, while a stream copies a topic.

A death of the driver is the death of everything it has started: JVM, Python workers, the process
that commits. What is left is Spark's checkpoint, the topics, and staged files; from these the next
driver has to go on as if nothing had happened. A worker that dies is Spark's to replace, and must
not show.
"""

import json
import random
import time
from collections import Counter

import pytest

import ister
from ister.base.failpoints import FAILPOINTS
from tests.fault.spark_child import SparkChild
from tests.fault.spark_copy import B, Copy, payload_of
from tests.support.processes import kill_all
from tests.support.scale import IS_NIGHTLY, scaled
from tests.support.tier_checks import memory_directory
from tests.support.writer_child import new_seed, say_replay

POINTS = sorted(point for point in FAILPOINTS if point.startswith("batch."))
ROUNDS = scaled(1, 4)

_LIMIT = 300
_LIMIT_OF_A_DRAIN = 20_000
_BATCH_SECONDS_MAX = 600.0


@pytest.fixture
def tmp_path():
    """In memory; see there."""
    with memory_directory() as directory:
        yield directory


class Run:
    """A copy, the drivers that work on it one after the other, and what was done to them.

    Args:
        directory: An existing one.
        seed: What all choices come from.
        is_one_log: See `Copy`.
        keys: See `Copy`.
    """

    def __init__(self, directory, seed: str, *, is_one_log: bool = False, keys: int = 0) -> None:
        self.copy = Copy(directory, is_one_log=is_one_log, keys=keys)
        self.seed = seed
        self.chance = random.Random(seed)
        self.told: Counter[str] = Counter()
        self._drivers: list[SparkChild] = []
        self._directory = directory
        self._started = time.monotonic()
        self.copy.produce(2 * _LIMIT)

    def driver(self) -> SparkChild:
        """A new one."""
        self._drivers.append(SparkChild(self._directory))
        return self._drivers[-1]

    def follow(self, child: SparkChild, **sink: str) -> None:
        """Has a driver copy on and on."""
        self.produce_between()
        child.ready()
        child.tell("stream", **self.copy.stream(limit=_LIMIT, **sink))

    def produce_between(self) -> None:
        """New messages, where nobody appends all the while."""
        if self.copy.is_one_log:
            self.copy.produce(self.chance.randint(_LIMIT, 3 * _LIMIT))

    # -- deaths -------------------------------------------------------------------------------

    def kill_driver(self, child: SparkChild, *, workers: int = 0) -> None:
        """A driver that copies until it is killed with all it has started, wherever it is.

        Args:
            child: The driver.
            workers: How many processes of its tasks are killed before that.
        """
        self.follow(child)
        for _ in range(workers):
            self._hear_batch(child)
            assert self._kill_worker(child, only_tasks=True), "no worker was found"
            # Not the batch that was under way: the next one needs the worker that is gone.
            self._hear_batch(child)
        self._wait_for_a_moment(child)
        assert child.kill() >= 2, "a driver and its JVM"
        self.told["driver_kills"] += 1

    def kill_jvm(self, child: SparkChild) -> None:
        """A driver whose JVM is killed alone: the rest of it ends by itself."""
        self.follow(child)
        self._wait_for_a_moment(child)
        child.kill_jvm()
        child.end(is_well=False)
        self.told["jvm_kills"] += 1

    def _wait_for_a_moment(self, child: SparkChild) -> None:
        """Lets some batches pass, or none, and a part of the next one."""
        for _ in range(self.chance.randint(0, 3)):
            self._hear_batch(child)
        seconds = self.chance.uniform(0.0, 1.0 if child.said["batch"] else 8.0)
        assert child.listen("failed", "done", seconds=seconds) is None, child.story()

    def kill_commit(self, child: SparkChild, point: str, **sink: str) -> None:
        """A commit that dies at a failpoint, which ends the query."""
        self.follow(child, failpoints=f"{point}=kill@1", **sink)
        kind = child.hear("failed", "done", seconds=_BATCH_SECONDS_MAX)
        assert kind == "failed", f"{point} was not reached"
        assert "crashed" in child.last["failed"], child.last["failed"]
        self.told["commit_kills"] += 1

    def kill_workers(self, child: SparkChild, kills: int, *, only_tasks: bool = True) -> None:
        """Python processes that die one after the other while a query runs.

        Args:
            child: The driver.
            kills: How many.
            only_tasks: Those of tasks, which Spark tries again; else also those that plan, commit
                and ask for the topic's end, without which a query fails and is started again.
        """
        self.produce_between()
        child.ready()
        command, done = self.copy.stream(limit=_LIMIT), child.said["done"]
        child.tell("stream", **command, batches=2 * kills, again=True)
        self._hear_batch(child)
        before = self.told["worker_kills"]
        while child.listen("done", "failed", seconds=self.chance.uniform(0.3, 1.5)) is None:
            self.produce_between()
            if self.told["worker_kills"] < before + kills:
                self._kill_worker(child, only_tasks=only_tasks)
        assert child.said["done"] > done, child.story()
        self.told["query_failures"] += child.last["done"]["failures"]
        assert self.told["worker_kills"] > before, "no worker was found"

    def _kill_worker(self, child: SparkChild, *, only_tasks: bool) -> bool:
        workers = child.workers(only_tasks=only_tasks)
        self.chance.shuffle(workers)
        killed = kill_all(workers[:1])
        self.told["worker_kills"] += killed
        return killed > 0

    def stop_and_start(self, child: SparkChild, times: int) -> None:
        """A query that is stopped anywhere in a batch, and started again at once."""
        for _ in range(times):
            self.produce_between()
            child.ready()
            command = self.copy.stream(limit=_LIMIT)
            child.ask("stream", **command, seconds=self.chance.uniform(0.5, 2.5))
            self.told["stops"] += 1

    def _hear_batch(self, child: SparkChild) -> None:
        kind = child.hear("batch", "failed", "done", seconds=_BATCH_SECONDS_MAX)
        assert kind == "batch", child.story()

    # -- what happens beside it ---------------------------------------------------------------

    def tidy(self) -> None:
        """Compaction, retention and another producer, while no query runs."""
        self.told.update(self.copy.tidy(self.chance))
        self.told["tidied"] += 1

    def restore(self, child: SparkChild) -> None:
        """An older checkpoint is put back: the query fails, and goes on with the newer one."""
        self.drain(child)
        older = self.copy.save_checkpoint()
        for _ in range(2):
            self.copy.produce_more(_LIMIT)
            self.drain(child)
        self.tidy()
        newer = self.copy.save_checkpoint()
        self.copy.restore_checkpoint(older)
        child.tell("stream", **self.copy.stream(limit=_LIMIT), now=True)
        kind = child.hear("failed", "done", seconds=_BATCH_SECONDS_MAX)
        assert kind == "failed", "rows of an older checkpoint were taken for known"
        assert "is older than the newest one" in child.last["failed"], child.last["failed"]
        self.copy.restore_checkpoint(newer)
        self.told["restores"] += 1

    # -- the end ------------------------------------------------------------------------------

    def drain(self, child: SparkChild, **sink: str) -> None:
        """Copies what there is now."""
        child.ready()
        command = self.copy.stream(limit=_LIMIT_OF_A_DRAIN, **sink)
        child.ask("stream", **command, now=True)

    def finish(self, child: SparkChild) -> None:
        """The last driver copies what is left, and nothing of it stays behind."""
        self.drain(child)
        child.end()
        figures = self.copy.judge()
        swept = self.copy.sweep()
        seconds = round(time.monotonic() - self._started, 1)
        batches = sum(child.said["batch"] for child in self._drivers)
        done = {"drivers": len(self._drivers), "batches": batches, **self.told}
        told = {"seed": self.seed, **done, **figures, "swept_files": swept, "seconds": seconds}
        print(json.dumps({"test": "kill -9 of Spark", **told}))


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_killed_drivers_and_commits_copy_each_message_once(tmp_path, request):
    """Goal: no message is lost or doubled by a death of the driver, of a worker or of a commit.

    Method: a producer appends to A all the while, uploads and trims. A process that runs tasks is
    killed, and then the driver. In the next one a commit dies at a failpoint (in the nightly run at
    each of them), and the query is started again. At the end B is compared with A.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    run = Run(tmp_path, f"{seed}/bounded")
    points = POINTS if IS_NIGHTLY else [random.Random(seed).choice(POINTS)]
    with run.copy.producing(run.seed), run.driver() as first, run.driver() as last:
        run.kill_driver(first, workers=1)
        for point in points:
            run.kill_commit(last, point)
            run.drain(last)
            run.copy.judge(is_over=False)
        run.copy.stop_producing()
        run.finish(last)


@pytest.mark.parametrize(
    ("copies", "complaint"),
    [
        ([0, 1, 3], "'missing': 1"),
        ([0, 1, 1, 2, 3], "'duplicates': 1"),
        ([0, 2, 1, 3], "'out_of_order': 1"),
        ([0, 1, 2, 3, 4], "'strange': 1"),
        ([0, 1, 2], "'missing': 1"),
    ],
)
def test_judge_sees_what_is_wrong(tmp_path, copies, complaint):
    """Goal: the tests here can fail: each way in which a copy is wrong is seen."""
    copy = Copy(tmp_path, is_one_log=True)
    copy.produce(4)
    with ister.open(copy.configs[B]) as log:
        topic = log.topic(B, create=True)
        for offset in copies:
            topic.append(payload_of(offset), attributes={"source": str(offset)})
    with pytest.raises(AssertionError, match=complaint):
        copy.judge()


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_sink_that_forgets_its_batch_is_caught(tmp_path):
    """Goal: the tests here can fail: a batch that a dead commit has left, and that comes again.

    Method: a sink that commits under another number each time, and dies when its batch is in.
    """
    run = Run(tmp_path, "broken", is_one_log=True)
    with run.driver() as child:
        run.kill_commit(child, "batch.after_done", broken="true")
        run.drain(child, broken="true")
        with pytest.raises(AssertionError, match=f"'duplicates': {_LIMIT}"):
            run.copy.judge(is_over=False)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("number", range(scaled(1, 40)))
def test_deaths_beside_compaction_retention_and_restores(tmp_path, request, number):
    """Goal: what jobs do to B between a death and the next driver loses and doubles nothing.

    Method: messages have keys. A commit or a driver dies, then another producer writes newer values
    of the same keys, B is uploaded, trimmed, compacted with either `keep`, and its oldest objects
    expire; then the next driver goes on. In between an older checkpoint is put back. The judge
    knows what was in B before each compaction: no message was in it twice, none out of order.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(f"{seed}/{number}/plan")
    run = Run(tmp_path, f"{seed}/{number}", keys=chance.choice([1, 7, 300]))
    with run.copy.producing(run.seed):
        with run.driver() as child:
            run.kill_driver(child)
        run.tidy()
        with run.driver() as child:
            for point in chance.sample(POINTS, 2):
                run.kill_commit(child, point)
                run.tidy()
            run.restore(child)
            run.kill_commit(child, "batch.after_done")
            run.tidy()
            run.copy.stop_producing()
            run.finish(child)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_random_deaths_copy_each_message_once(tmp_path, request, number):
    """Goal: deaths of all kinds in any order leave each message in B once.

    Method: A and B in one log or in two, then three things that can happen, by chance: deaths of
    the driver, of its JVM alone, of a commit, of Python processes of any kind, and queries that are
    stopped and started again.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(f"{seed}/{number}/plan")
    run = Run(tmp_path, f"{seed}/{number}", is_one_log=chance.random() < 0.5)
    with run.copy.producing(run.seed):
        for _ in range(3):
            with run.driver() as child:
                match chance.choice(["driver", "driver", "jvm", "commit", "workers", "stops"]):
                    case "driver":
                        run.kill_driver(child)
                    case "jvm":
                        run.kill_jvm(child)
                    case "commit":
                        run.kill_commit(child, chance.choice(POINTS))
                    case "workers":
                        run.kill_workers(child, 4, only_tasks=False)
                    case "stops":
                        run.stop_and_start(child, 6)
        with run.driver() as child:
            run.copy.stop_producing()
            run.finish(child)
