"""Runs a job's tasks on the executors, and hands their results to the driver as they come.

    items ─► bundles of about the same weight ─► waves: a Spark job each ─► results, wave by wave

Owns: how work is divided, what is sent, and the distinction of a failed item from a failed process.
Does not own: where tasks run (`runners`), what a task does, what is committed.

If an item fails with an `IsterError`, the error is its result. Any other exception is a bug and
fails the wave, and so does a process that Spark cannot replace; earlier results stay. Spark repeats
a task whose process died, so `work` may run twice.

Waves bound what the driver waits for before it commits; two run at a time, so that the last task of
one does not leave the slots idle.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

from ister.base import failpoints
from ister.base.limits import KIB, MIB
from ister.errors import InvariantError, IsterError
from ister.spark.jobs.job_report import ErrorFields, error_as_fields
from ister.spark.jobs.runners import SparkOrRunner, TaskRunner, runner_of
from ister.spark.workers import keep_buffers, spare_collector

Item = TypeVar("Item")
Result = TypeVar("Result")

_BUNDLE_WEIGHT: Final = 64 * MIB
# A wave costs a Spark job, some tenths of a second: worth it from so many bundles a slot on.
_WAVE_BUNDLES: Final = 4
_WAVES_MAX: Final = 8
_WAVES_AT_ONCE: Final = 2
# PySpark broadcasts a function of 1 MiB; below that, a task gets it with its stage.
_WAVE_BYTES: Final = 768 * KIB


@dataclass(frozen=True, slots=True)
class Done(Generic[Item, Result]):
    """The result of an item."""

    item: Item
    result: Result | None
    error: ErrorFields | None
    """An `IsterError`, as a report has it; then there is no result."""


def run_tasks(
    spark: SparkOrRunner,
    items: Sequence[Item],
    work: Callable[[Item], Result],
    *,
    weigh: Callable[[Item], int] = lambda item: _BUNDLE_WEIGHT,
    bundle_bytes: int = _BUNDLE_WEIGHT,
    name: str = "ister",
) -> Iterator[Done[Item, Result]]:
    """Runs `work(item)` for every item on the executors.

    Args:
        spark: A session, or a job's runner.
        items: The work; pickled.
        work: A function that can be pickled.
        weigh: Returns about how many bytes an item processes.
        bundle_bytes: About how many bytes one task processes.
        name: The name in Spark's UI.

    Yields:
        Results, those of one wave after the other; within a wave in the order of its items.

    Raises:
        ConfigError: Spark's workers cannot import `ister`.
        Exception: Spark could not run a wave; results of others may be missing.
    """
    if not items:
        return
    runner = runner_of(spark)
    parallel = runner.slots
    weights = [max(weigh(item), 1) for item in items]
    # Enough bundles to keep all slots busy.
    target = max(min(bundle_bytes, sum(weights) // (2 * parallel)), 1)
    bundles = _bundle(items, weights, target)
    count = min(max(sum(weights) // (parallel * _WAVE_BUNDLES * bundle_bytes), 1), _WAVES_MAX)
    waves = _divide(bundles, size=max(parallel, -(-len(bundles) // count)), parallel=parallel)
    run = partial(_run_wave, runner, work, name)
    with ThreadPoolExecutor(_WAVES_AT_ONCE, thread_name_prefix="ister-wave") as pool:
        futures: list[Future[list[Done[Item, Result]]]] = [pool.submit(run, w) for w in waves]
        try:
            for future in as_completed(futures):
                yield from future.result()
        finally:
            for future in futures:
                future.cancel()


def _bundle(items: Sequence[Item], weights: Sequence[int], target: int) -> list[list[Item]]:
    """Groups items, in order, into bundles of about the same weight."""
    bundles: list[list[Item]] = []
    room = 0
    for item, weight in zip(items, weights, strict=True):
        if not bundles or room < weight // 2:
            bundles.append([])
            room = target
        bundles[-1].append(item)
        room -= weight
    return bundles


def _divide(
    bundles: Sequence[list[Item]], *, size: int, parallel: int
) -> Iterator[list[tuple[list[Item], bytes]]]:
    """Divides bundles into waves of at most `size`, and pickles them.

    Every task of a wave is sent the bundles of all of them: a wave is smaller if its bundles are
    large, unless slots would stay idle.
    """
    wave: list[tuple[list[Item], bytes]] = []
    sent = 0
    for bundle in bundles:
        data = pickle.dumps(bundle, pickle.HIGHEST_PROTOCOL)
        is_large = sent + len(data) > _WAVE_BYTES and len(wave) >= parallel
        if wave and (len(wave) >= size or is_large):
            yield wave
            wave, sent = [], 0
        wave.append((bundle, data))
        sent += len(data)
    if wave:
        yield wave


def _run_wave(
    runner: TaskRunner,
    work: Callable[[Item], Result],
    name: str,
    wave: Sequence[tuple[list[Item], bytes]],
) -> list[Done[Item, Result]]:
    results = runner.run(partial(_run_bundle, work), [data for _, data in wave], name=name)
    return [
        Done(item, *answer)
        for (bundle, _), data in zip(wave, results, strict=True)
        for item, answer in zip(bundle, pickle.loads(data), strict=True)  # noqa: S301 - our own
    ]


# -- in a task ------------------------------------------------------------------------------


def _run_bundle(work: Callable[[Item], Result], data: bytes) -> bytes:
    """Runs a bundle; returns a list of (result, error), in the order of its items."""
    _arm()
    keep_buffers()
    answers: list[tuple[Result | None, ErrorFields | None]] = []
    for item in pickle.loads(data):  # noqa: S301 - of our own driver
        failpoints.reach("pipeline.before_task")
        try:
            result = work(item)
        except InvariantError:
            raise
        except IsterError as error:
            answers.append((None, error_as_fields(error)))
            continue
        failpoints.reach("pipeline.after_task")
        answers.append((result, None))
    spare_collector()
    return pickle.dumps(answers, pickle.HIGHEST_PROTOCOL)


def _arm() -> None:
    """Arms failpoints if a test wants exactly one process to die in a task."""
    specification, once = os.environ.get("ISTER_TASK_FAILPOINTS"), os.environ.get("ISTER_TASK_ONCE")
    if not specification or not once:
        return
    with suppress(FileExistsError):
        os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        failpoints.arm_from_environment(specification)
