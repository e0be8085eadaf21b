"""Many items as a few tasks: each once, about as heavy as each other, failing alone."""

import random
from functools import partial

import pytest

from ister.base.limits import GIB
from ister.errors import InvariantError, NotFoundError
from ister.spark.jobs.balance import balance, run_balanced
from tests.support.cases import case
from tests.support.spark_here import SparkHere


def test_every_item_is_in_one_group():
    for seed in range(10):
        with case(seed):
            rng = random.Random(seed)
            items = [rng.randrange(1000) for _ in range(rng.randrange(60))]
            count = rng.randrange(1, 9)
            groups = balance(items, int, count)
            assert len(groups) == min(count, len(items))
            assert all(groups)
            assert sorted(item for group in groups for item in group) == sorted(items)
            if items:
                weights = [sum(max(item, 1) for item in group) for group in groups]
                assert max(weights) - min(weights) <= max(*items, 1)


def _double(bad, item):
    if item == bad:
        raise NotFoundError("gone", topic="/default/a", offset=item)
    return 2 * item


def test_an_item_that_fails_fails_alone():
    done = list(
        run_balanced(
            SparkHere(), list(range(20)), partial(_double, 7), weigh=lambda item: 1, name="test"
        )
    )
    assert {item.item: item.result for item in done if item.error is None} == {
        number: 2 * number for number in range(20) if number != 7
    }
    (failed,) = [item for item in done if item.error is not None]
    assert (failed.item, failed.error["offset"]) == (7, 7)


def test_heavy_items_come_slice_by_slice():
    done = run_balanced(
        SparkHere(), list(range(10)), partial(_double, -1), weigh=lambda item: 4 * GIB, name="test"
    )
    assert sorted(next(done).item for _ in range(4)) == [0, 1, 2, 3], "two slots of eight GiB"
    assert len(list(done)) == 6


class _CountingRunner(SparkHere):
    """Counts tasks."""

    def __init__(self):
        super().__init__()
        self.tasks = 0

    def run(self, work, bundles, *, name):
        self.tasks += len(bundles)
        return super().run(work, bundles, name=name)


@pytest.mark.parametrize(("gib", "tasks"), [(0, 2), (8, 2), (16, 4), (32, 8)])
def test_there_are_few_tasks_until_there_is_much_to_do(gib, tasks):
    runner, weight = _CountingRunner(), -(-gib * GIB // 12)
    done = run_balanced(
        runner, list(range(12)), partial(_double, -1), weigh=lambda item: weight, name="test"
    )
    assert len(list(done)) == 12
    assert runner.tasks == tasks, "one for each of two slots, or one for four gibibytes"


def _break(item):
    raise InvariantError("our fault")


def test_a_fault_of_ours_is_raised():
    with pytest.raises(InvariantError):
        list(run_balanced(SparkHere(), [1], _break, weigh=lambda item: 1, name="test"))


def test_nothing_to_do():
    assert list(run_balanced(SparkHere(), [], _break, weigh=lambda item: 1, name="test")) == []
