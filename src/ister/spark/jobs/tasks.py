"""Runs a job's tasks, on Spark or in this process, and hands their results over as they come.

    items ─► tasks of about the same weight ─► Spark jobs, two at a time ─► results, job by job

Owns: how work is divided, what is sent, the calls of Spark that run tasks, the number of slots,
cancelling, and the distinction of a failed item from a failed process. Does not own: what a task
does, what is committed, how a session is configured (`session`).

If an item fails with an `IsterError`, the error is its result. Any other exception is a bug and
fails the Spark job, and so does a process that Spark cannot replace; earlier results stay. Spark
repeats a task whose process died, so `work` may run twice.

Spark returns results when a whole Spark job has ended. So there are several, which bounds what the
driver waits for before it commits; two at a time, so that the last task of one does not leave the
slots idle. A stage's function is sent to every executor with the items of all its tasks, which
bounds the bytes of a Spark job.

Uses only public calls that a Connect session has, too. A runner may open its session when it is
first needed: a job that finds nothing to do starts no JVM. Dry runs use a plain `TaskRunner`: they
need neither Java nor PySpark.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

import pyarrow as pa

from ister.base import failpoints, threads
from ister.base.clock import Clock, SystemClock
from ister.base.limits import KIB, MIB
from ister.errors import ConfigError, InvalidRequestError, InvariantError, IsterError
from ister.spark.jobs.job_report import ErrorFields, error_as_fields
from ister.spark.workers import keep_buffers, spare_collector

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

Item = TypeVar("Item")
Result = TypeVar("Result")

_log = logging.getLogger("ister.spark.jobs")

Work: TypeAlias = Callable[[bytes], bytes]
"""What a task does with its pickled items. Pickled."""

_TASK_BYTES: Final = 64 * MIB
# A Spark job costs some tenths of a second: worth it from so many tasks a slot on.
_TASKS_PER_SLOT: Final = 4
_SPARK_JOBS_MAX: Final = 8
_SPARK_JOBS_AT_ONCE: Final = 2
# PySpark broadcasts a function of 1 MiB; below that, a task gets it with its stage.
_SENT_BYTES_MAX: Final = 768 * KIB
# With dynamic allocation, the number of slots follows the load.
_SLOTS_SECONDS: Final = 60.0
# More numbers than a cluster has slots: Spark divides a range into one partition for each slot.
_RANGE: Final = 1 << 16
_OTHER_PYTHON: Final = ("No module named 'ister'", "PYTHON_VERSION_MISMATCH")
_OWN_ERROR: Final = re.compile(r"[A-Za-z_.]*(Error|Exception): (?!Job aborted)")
_LOCAL_SLOTS: Final = 4
_RESULT: Final = "number long, result binary"
_DESCRIPTION: Final = "spark.job.description"


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
    weigh: Callable[[Item], int] = lambda item: _TASK_BYTES,
    task_bytes: int = _TASK_BYTES,
    name: str = "ister",
) -> Iterator[Done[Item, Result]]:
    """Runs `work(item)` for every item on the executors.

    Args:
        spark: A session, or a job's runner.
        items: The work; pickled.
        work: A function that can be pickled.
        weigh: Returns about how many bytes an item processes.
        task_bytes: About how many bytes one task processes.
        name: The name in Spark's UI.

    Yields:
        Results, those of one Spark job after the other; within one in the order of its items.

    Raises:
        ConfigError: Spark's workers cannot import `ister`.
        Exception: Spark could not run a task; results of others may be missing.
    """
    if not items:
        return
    runner = runner_of(spark)
    weights = [max(weigh(item), 1) for item in items]
    slots, total = runner.slots, sum(weights)
    # Enough tasks to keep all slots busy.
    tasks = _bundle(items, weights, max(min(task_bytes, total // (2 * slots)), 1))
    spark_jobs = min(max(total // (slots * _TASKS_PER_SLOT * task_bytes), 1), _SPARK_JOBS_MAX)
    parts = _divide(tasks, size=max(slots, -(-len(tasks) // spark_jobs)), slots=slots)
    run = partial(_run_tasks, runner, work, name)
    with ThreadPoolExecutor(_SPARK_JOBS_AT_ONCE, thread_name_prefix="ister-tasks") as pool:
        futures: list[Future[list[Done[Item, Result]]]] = [pool.submit(run, part) for part in parts]
        try:
            for future in as_completed(futures):
                yield from future.result()
        finally:
            for future in futures:
                future.cancel()


def _bundle(items: Sequence[Item], weights: Sequence[int], target: int) -> list[list[Item]]:
    """Divides items, in order, among tasks of about the same weight."""
    tasks: list[list[Item]] = []
    room = 0
    for item, weight in zip(items, weights, strict=True):
        if not tasks or room < weight // 2:
            tasks.append([])
            room = target
        tasks[-1].append(item)
        room -= weight
    return tasks


def _divide(
    tasks: Sequence[list[Item]], *, size: int, slots: int
) -> Iterator[list[tuple[list[Item], bytes]]]:
    """Divides tasks among Spark jobs of at most `size`, and pickles their items.

    One is smaller if its items are large, unless slots would stay idle.
    """
    part: list[tuple[list[Item], bytes]] = []
    sent = 0
    for task in tasks:
        data = pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
        is_large = sent + len(data) > _SENT_BYTES_MAX and len(part) >= slots
        if part and (len(part) >= size or is_large):
            yield part
            part, sent = [], 0
        part.append((task, data))
        sent += len(data)
    if part:
        yield part


def _run_tasks(
    runner: TaskRunner,
    work: Callable[[Item], Result],
    name: str,
    tasks: Sequence[tuple[list[Item], bytes]],
) -> list[Done[Item, Result]]:
    results = runner.run(partial(_run_task, work), [data for _, data in tasks], name=name)
    return [
        Done(item, *answer)
        for (task, _), data in zip(tasks, results, strict=True)
        for item, answer in zip(task, pickle.loads(data), strict=True)  # noqa: S301 - our own
    ]


# -- where tasks run ------------------------------------------------------------------------


class TaskRunner:
    """Runs tasks, in threads of this process. Thread-safe."""

    def __init__(self, slots: int = _LOCAL_SLOTS) -> None:
        self._local_slots = slots

    @property
    def slots(self) -> int:
        """Number of tasks that run in parallel."""
        return self._local_slots

    def session(self) -> SparkSession:
        """Returns the Spark session, for work that needs more than tasks; this runner has none."""
        raise InvalidRequestError("this dry run needs Spark", hint="pass a Spark session")

    def run(self, work: Work, bundles: Sequence[bytes], *, name: str) -> list[bytes]:
        """Runs `work(bundle)` as one task for each; returns the results in order.

        Raises:
            ConfigError: Spark's workers cannot import `ister`.
            Exception: A task failed.
        """
        if len(bundles) == 1:
            return [work(bundles[0])]
        with ThreadPoolExecutor(self.slots, thread_name_prefix="ister-task") as pool:
            return list(pool.map(work, bundles))

    @contextmanager
    def described(self, name: str) -> Iterator[SparkSession]:
        """Names what this thread runs meanwhile in Spark's UI; yields the session."""
        spark = self.session()
        context = getattr(spark, "sparkContext", None)
        if context is not None:
            before = context.getLocalProperty(_DESCRIPTION)
            context.setLocalProperty(_DESCRIPTION, name)
        else:
            tag = name.replace(",", " ")
            spark.addTag(tag)
        try:
            yield spark
        except Exception as error:
            raise_for_other_python(error)
            raise
        finally:
            with suppress(Exception):  # the JVM is gone
                if context is not None:
                    context.setLocalProperty(_DESCRIPTION, before)
                else:
                    spark.removeTag(tag)

    @property
    def is_stopped(self) -> bool:
        """Whether no task can run any more, because Spark or its JVM has stopped."""
        return False

    def cancel(self) -> None:
        """Cancels what is running, as far as that is possible; waiting threads get an error."""
        _log.debug("tasks of this process cannot be cancelled")

    def start_thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Starts a thread that may run tasks; see `ister.base.threads.start`."""
        return threads.start(name, work)


SparkOrRunner: TypeAlias = "SparkSession | TaskRunner | None"
"""What jobs take: a session, classic or Connect; a runner; None for a dry run."""


def runner_of(spark: SparkOrRunner, *, dry_run: bool = False) -> TaskRunner:
    """Returns the runner for what was passed to a job."""
    if isinstance(spark, TaskRunner):
        return spark
    if spark is not None:
        return SparkRunner(spark)
    if not dry_run:
        raise InvalidRequestError(
            "spark is None", hint="pass a Spark session; None is for dry runs only"
        )
    return TaskRunner()


class SparkRunner(TaskRunner):
    """Runs tasks on the executors of a session, classic or Connect."""

    def __init__(
        self,
        session: SparkSession | Callable[[], SparkSession],
        *,
        clock: Clock | None = None,
    ) -> None:
        """Takes a session, or a function that opens one when it is first needed."""
        super().__init__()
        self._lock = threading.Lock()
        self._open: Callable[[], SparkSession] | None = None
        self._session: SparkSession | None = None
        if callable(session):
            self._open = session
        else:
            self._session = session
        self._clock = clock if clock is not None else SystemClock()
        self._slots: int | None = None
        self._slots_until = 0.0

    def session(self) -> SparkSession:
        """Returns the session; opens it if it is not open yet."""
        with self._lock:
            if self._session is None:
                if self._open is None:
                    raise InvalidRequestError("the runner has no session")
                self._session = self._open()
            return self._session

    @property
    def slots(self) -> int:
        """Spark's default parallelism, which is the number of cores of its executors."""
        spark = self.session()
        context = getattr(spark, "sparkContext", None)
        if context is not None:
            return max(int(context.defaultParallelism), 1)
        now = self._clock.monotonic()
        if self._slots is None or now >= self._slots_until:
            self._slots, self._slots_until = _count_slots(spark), now + _SLOTS_SECONDS
        return self._slots

    def run(self, work: Work, bundles: Sequence[bytes], *, name: str) -> list[bytes]:
        """See `TaskRunner.run`."""
        with self.described(name) as spark:
            tasks = list(enumerate(bundles))
            rows = map_tasks(spark, partial(_run_numbered, work), tasks, _RESULT).collect()
        return [bytes(row.result) for row in sorted(rows, key=lambda row: int(row.number))]

    @property
    def is_stopped(self) -> bool:
        """Whether the session's Spark, or its JVM, has stopped."""
        spark = self._session
        if spark is None:
            return False
        context = getattr(spark, "sparkContext", None)
        if context is None:
            return bool(getattr(spark, "is_stopped", False))
        try:
            # Fails in a stopped context.
            return int(context.defaultParallelism) < 0
        except Exception:  # noqa: BLE001 - or the JVM is gone
            return True

    def cancel(self) -> None:
        """Cancels what the session runs."""
        if self._session is not None:
            try:
                self._session.interruptAll()
            except Exception:  # noqa: BLE001 - the JVM is gone
                _log.debug("cancel", exc_info=True)

    def start_thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Starts a thread that may run tasks; at its end, its thread in the JVM is released."""
        if getattr(self._session, "sparkContext", None) is None:
            return super().start_thread(name, work)
        from pyspark import InheritableThread  # noqa: PLC0415 - an extra

        thread: threading.Thread = InheritableThread(
            target=threads.run_to_end, args=(name, work), name=name, daemon=True
        )
        thread.start()
        return thread


def _count_slots(spark: SparkSession) -> int:
    """Counts the slots of a Connect session, which has no call for it."""
    from pyspark.sql import functions  # noqa: PLC0415 - an extra

    numbers = spark.range(_RANGE).select(functions.spark_partition_id().alias("partition"))
    return int(numbers.agg({"partition": "max"}).collect()[0][0]) + 1


def raise_for_other_python(error: Exception) -> None:
    """Raises a ConfigError if Spark failed because its workers cannot import `ister`."""
    text = str(error)
    if any(mark in text for mark in _OTHER_PYTHON):
        raise ConfigError(
            "Spark's workers run another Python, without ister or of another version",
            hint="set PYSPARK_PYTHON to the Python that has ister on every executor before Spark "
            "starts; export PYSPARK_PYTHON=$(which python) on one machine",
        ) from error


def first_line(error: Exception) -> str:
    """Returns the message of one of Spark's errors, without the JVM's stack."""
    lines = [line.strip().lstrip(": ") for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(("An error occurred", "at "))]
    # The task's own exception tells more than that the task failed.
    own = [line for line in lines if _OWN_ERROR.match(line)]
    return (own or lines or [type(error).__name__])[0][:500]


def map_tasks(
    spark: SparkSession,
    work: Callable[[Item], Iterator[pa.RecordBatch]],
    tasks: Sequence[Item],
    schema: StructType | str,
) -> DataFrame:
    """Returns a DataFrame of the rows of `work(task)`, with one partition for each task."""
    data = tuple(pickle.dumps(task, pickle.HIGHEST_PROTOCOL) for task in tasks)
    numbers = spark.range(0, len(data), 1, max(len(data), 1))
    return numbers.mapInArrow(partial(_map_numbers, work, data), schema)


# -- in a task ------------------------------------------------------------------------------


def _map_numbers(
    work: Callable[[Item], Iterator[pa.RecordBatch]],
    tasks: Sequence[bytes],
    numbers: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            yield from work(pickle.loads(tasks[number]))  # noqa: S301 - of our own driver


def _run_numbered(work: Work, task: tuple[int, bytes]) -> Iterator[pa.RecordBatch]:
    number, items = task
    yield pa.record_batch(
        {"number": pa.array([number], pa.int64()), "result": pa.array([work(items)], pa.binary())}
    )


def _run_task(work: Callable[[Item], Result], data: bytes) -> bytes:
    """Runs the items of a task; returns a list of (result, error), in the order of its items."""
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
