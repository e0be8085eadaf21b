"""Runs many items as a few tasks of about equal weight, for jobs that commit nothing in between.

    items ─► slices, one after the other ─► groups, some for each slot ─► results, slice by slice

Owns: which items go together. Does not own: how tasks run (`tasks`).

A Spark job costs tens of milliseconds, in which a core checks a hundred megabytes: if nothing waits
for a commit, few large tasks are fastest. Slices bound the time between two progress reports.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

from ister.base.limits import GIB
from ister.errors import InvariantError, IsterError
from ister.spark.jobs.job_report import error_as_fields
from ister.spark.jobs.runners import SparkOrRunner, runner_of
from ister.spark.jobs.tasks import Done, run_tasks

Item = TypeVar("Item")
Result = TypeVar("Result")

_SLICE_BYTES_PER_SLOT: Final = 8 * GIB
# More groups even out slots that are slower than others; each costs tens of milliseconds, in which
# a slot checks a hundred megabytes. So there is more than one for a slot only if they are large.
_GROUPS_PER_SLOT_MAX: Final = 3
_GROUP_BYTES: Final = 4 * GIB


def run_balanced(
    spark: SparkOrRunner,
    items: Sequence[Item],
    work: Callable[[Item], Result],
    *,
    weigh: Callable[[Item], int],
    name: str,
) -> Iterator[Done[Item, Result]]:
    """Runs `work(item)` for every item on the executors, in any order; see `run_tasks`."""
    if not items:
        return
    runner = runner_of(spark)
    slots = runner.slots
    for part in _slices(items, weigh, _SLICE_BYTES_PER_SLOT * slots):
        wanted = sum(map(weigh, part)) // _GROUP_BYTES
        groups = balance(part, weigh, min(max(wanted, slots), _GROUPS_PER_SLOT_MAX * slots))
        for done in run_tasks(runner, groups, partial(_run_group, work), name=name):
            yield from done.result or ()


def balance(
    items: Sequence[Item], weigh: Callable[[Item], int], count: int
) -> list[tuple[Item, ...]]:
    """Divides items into at most `count` groups of about equal weight, none of them empty."""
    count = min(count, len(items))
    groups: list[list[Item]] = [[] for _ in range(count)]
    lightest = [(0, number) for number in range(count)]
    for item in sorted(items, key=weigh, reverse=True):
        weight, number = heapq.heappop(lightest)
        groups[number].append(item)
        heapq.heappush(lightest, (weight + max(weigh(item), 1), number))
    return [tuple(group) for group in groups]


def _slices(
    items: Sequence[Item], weigh: Callable[[Item], int], limit: int
) -> Iterator[list[Item]]:
    part: list[Item] = []
    weight = 0
    for item in items:
        if part and weight + weigh(item) > limit:
            yield part
            part, weight = [], 0
        part.append(item)
        weight += weigh(item)
    if part:
        yield part


def _run_group(work: Callable[[Item], Result], group: Sequence[Item]) -> list[Done[Item, Result]]:
    """Runs a group in a task; a failed item does not stop the others."""
    found: list[Done[Item, Result]] = []
    for item in group:
        try:
            found.append(Done(item, work(item), None))
        except InvariantError:
            raise
        except IsterError as error:
            found.append(Done(item, None, error_as_fields(error)))
    return found
