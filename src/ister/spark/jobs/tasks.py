"""Runs a job's tasks on the executors, and hands their results to the driver as they come.

    items ─► bundles of about the same weight ─► waves: a Spark job each ─► results, wave by wave

Owns: how work is divided, and the distinction of a failed item from a failed process. Does not own:
what a task does, what is committed.

If an item fails with an `IsterError`, the error is its result. Any other exception is a bug and
fails the wave, and so does a process that Spark cannot replace; earlier results stay. Spark repeats
a task whose process died, so `work` may run twice.

Waves bound what the driver waits for before it commits; two run at a time, so that the last task of
one does not leave the slots idle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from ister import failpoints
from ister.errors import InvariantError, IsterError
from ister.limits import MIB
from ister.spark.jobs.job_report import ErrorFields, error_as_fields
from ister.spark.workers import keep_buffers, spare_collector

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Item = TypeVar("Item")
Result = TypeVar("Result")

_BUNDLE_WEIGHT: Final = 64 * MIB
# A wave costs a Spark job, some tenths of a second: worth it from this much work on.
_WAVE_WEIGHT: Final = 256 * MIB
_WAVES_MAX: Final = 8
_WAVES_AT_ONCE: Final = 2


@dataclass(frozen=True, slots=True)
class Done(Generic[Item, Result]):
    """The result of an item."""

    item: Item
    result: Result | None
    error: ErrorFields | None
    """An `IsterError`, as a report has it; then there is no result."""


def run_tasks(
    spark: SparkSession,
    items: Sequence[Item],
    work: Callable[[Item], Result],
    *,
    weigh: Callable[[Item], int] = lambda item: _BUNDLE_WEIGHT,
    name: str = "ister",
) -> Iterator[Done[Item, Result]]:
    """Runs `work(item)` for every item on the executors.

    Args:
        spark: A classic session.
        items: The work; pickled.
        work: A function that can be pickled.
        weigh: Returns about how many bytes an item processes.
        name: The name in Spark's UI.

    Yields:
        Results, those of one wave after the other; within a wave in the order of its items.

    Raises:
        Exception: Spark could not run a wave; results of others may be missing.
    """
    if not items:
        return
    parallel = max(spark.sparkContext.defaultParallelism, 1)
    bundles = _bundle(items, weigh, parallel)
    weight = sum(max(weigh(item), 1) for item in items)
    count = min(max(weight // (parallel * _WAVE_WEIGHT), 1), _WAVES_MAX)
    wave_size = max(parallel, -(-len(bundles) // count))
    waves = [bundles[at : at + wave_size] for at in range(0, len(bundles), wave_size)]
    run = partial(_run_wave, spark, work, name)
    with ThreadPoolExecutor(_WAVES_AT_ONCE, thread_name_prefix="ister-wave") as pool:
        futures: list[Future[list[Done[Item, Result]]]] = [pool.submit(run, w) for w in waves]
        try:
            for future in as_completed(futures):
                yield from future.result()
        finally:
            for future in futures:
                future.cancel()


def _bundle(items: Sequence[Item], weigh: Callable[[Item], int], parallel: int) -> list[list[Item]]:
    """Groups items, in order, into enough bundles to keep all slots busy."""
    weights = [max(weigh(item), 1) for item in items]
    target = max(min(_BUNDLE_WEIGHT, sum(weights) // (2 * parallel)), 1)
    bundles: list[list[Item]] = []
    room = 0
    for item, weight in zip(items, weights, strict=True):
        if not bundles or room < weight // 2:
            bundles.append([])
            room = target
        bundles[-1].append(item)
        room -= weight
    return bundles


def _run_wave(
    spark: SparkSession,
    work: Callable[[Item], Result],
    name: str,
    bundles: list[list[Item]],
) -> list[Done[Item, Result]]:
    context = spark.sparkContext
    context.setJobDescription(name)
    return context.parallelize(bundles, len(bundles)).flatMap(partial(_run_bundle, work)).collect()


# -- in a task ------------------------------------------------------------------------------


def _run_bundle(
    work: Callable[[Item], Result], bundle: Iterable[Item]
) -> Iterator[Done[Item, Result]]:
    _arm()
    keep_buffers()
    for item in bundle:
        failpoints.reach("pipeline.before_task")
        try:
            result = work(item)
        except InvariantError:
            raise
        except IsterError as error:
            yield Done(item, None, error_as_fields(error))
            continue
        failpoints.reach("pipeline.after_task")
        yield Done(item, result, None)
    spare_collector()


def _arm() -> None:
    """Arms failpoints if a test wants exactly one process to die in a task."""
    specification, once = os.environ.get("ISTER_TASK_FAILPOINTS"), os.environ.get("ISTER_TASK_ONCE")
    if not specification or not once:
        return
    with suppress(FileExistsError):
        os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        failpoints.arm_from_environment(specification)
