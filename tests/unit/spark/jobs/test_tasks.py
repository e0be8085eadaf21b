"""Tasks without Spark: results and errors of items, Spark jobs, and what every task is sent."""

import os
import pickle
import threading

import pytest

from ister.base.limits import GIB
from ister.errors import (
    ConfigError,
    InvalidRequestError,
    InvariantError,
    NotFoundError,
)
from ister.spark.jobs import tasks
from ister.spark.jobs.tasks import (
    SparkRunner,
    TaskRunner,
    raise_for_other_python,
    run_tasks,
    runner_of,
)
from tests.support.spark_here import SparkHere


def half(item):
    if item % 2:
        raise NotFoundError(f"{item} is odd", topic="/default/a")
    return item // 2


def break_down(item):
    raise InvariantError("a bug")


class SparkJobs(SparkHere):
    """Records what every Spark job sends."""

    def __init__(self):
        super().__init__()
        self.sent = []
        self._lock = threading.Lock()

    def run(self, work, bundles, *, name):
        with self._lock:
            self.sent.append([len(bundle) for bundle in bundles])
        return super().run(work, bundles, name=name)


@pytest.mark.parametrize("runner", [SparkHere(), TaskRunner(), TaskRunner(slots=1)])
def test_failed_item_is_its_result(runner):
    found = list(run_tasks(runner, list(range(40)), half, weigh=lambda item: 1))
    assert [done.item for done in found] == list(range(40))
    assert [done.result for done in found[::2]] == list(range(20))
    assert {done.error["code"] for done in found[1::2]} == {NotFoundError.code}
    assert all(done.result is None for done in found[1::2])


def test_bug_fails_the_job():
    with pytest.raises(InvariantError):
        list(run_tasks(SparkHere(), [1], break_down))


def test_large_items_make_small_spark_jobs_but_never_idle_slots(monkeypatch):
    """Goal: what all tasks are sent together does not grow with the square of the items."""
    runner = SparkJobs()
    items = [bytes(300_000)] * 20
    found = list(run_tasks(runner, items, len, weigh=lambda item: GIB))
    assert [done.result for done in found] == [300_000] * 20
    assert sum(len(part) for part in runner.sent) == 20
    assert all(len(part) == runner.slots for part in runner.sent)
    small = SparkJobs()
    list(run_tasks(small, list(range(20)), str, weigh=lambda item: 1))
    assert len(small.sent) == 1


def test_much_work_is_several_spark_jobs_of_many_tasks():
    runner = SparkJobs()
    list(run_tasks(runner, list(range(400)), str, weigh=lambda item: GIB))
    assert len(runner.sent) == tasks._SPARK_JOBS_MAX
    assert sum(len(part) for part in runner.sent) == 400


@pytest.mark.parametrize(("gib", "tasks"), [(0, 4), (8, 4), (16, 4), (32, 8)])
def test_there_are_few_tasks_until_there_is_much_to_do(gib, tasks):
    runner, weight = SparkJobs(), -(-gib * GIB // 16)
    found = list(
        run_tasks(runner, list(range(16)), str, weigh=lambda item: weight, task_bytes=4 * GIB)
    )
    assert [done.item for done in found] == list(range(16))
    assert sum(map(len, runner.sent)) == tasks, "two for each of two slots, or one for four GiB"


def test_tasks_of_this_process_run_side_by_side():
    both = threading.Barrier(2, timeout=30)

    def meet(data):
        both.wait()
        return data

    assert TaskRunner(slots=2).run(meet, [b"a", b"b"], name="meet") == [b"a", b"b"]


def test_only_a_dry_run_does_without_a_session():
    assert type(runner_of(None, dry_run=True)) is TaskRunner
    with pytest.raises(InvalidRequestError, match="spark is None"):
        runner_of(None)
    with pytest.raises(InvalidRequestError, match="needs Spark"):
        TaskRunner().session()


def test_session_is_opened_when_it_is_first_needed():
    opened = []

    class Session:
        pass

    def open_one():
        opened.append(Session())
        return opened[-1]

    runner = SparkRunner(open_one)
    assert list(run_tasks(runner, [], half)) == []
    assert not runner.is_stopped
    runner.cancel()
    assert opened == []
    assert runner.session() is runner.session() is opened[0]
    assert len(opened) == 1


def test_workers_of_another_python_are_explained():
    for text in (
        "ModuleNotFoundError: No module named 'ister'",
        "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12",
    ):
        with pytest.raises(ConfigError, match="another Python") as caught:
            raise_for_other_python(RuntimeError(f"Job aborted\n{text}\n"))
        assert "PYSPARK_PYTHON" in caught.value.hint
    raise_for_other_python(RuntimeError("No module named 'isterical'"))


def test_one_process_is_armed_once(tmp_path, monkeypatch):
    monkeypatch.setenv("ISTER_TASK_FAILPOINTS", "pipeline.before_task=raise")
    monkeypatch.setenv("ISTER_TASK_ONCE", str(tmp_path / "once"))
    armed = []
    monkeypatch.setattr("ister.base.failpoints.arm_from_environment", armed.append)
    for _ in range(2):
        tasks._run_task(half, pickle.dumps([2]))
    assert armed == ["pipeline.before_task=raise"]
    assert os.path.exists(tmp_path / "once")
