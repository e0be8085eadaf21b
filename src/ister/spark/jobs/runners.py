"""Where a job's tasks run: on Spark, classic or Connect, or in this process.

    bundles (bytes) ─► SparkRunner: a range of as many partitions, a Python UDF ─► results (bytes)
                    └► LocalRunner: threads of this process                     ┘

Owns: the calls of Spark that run tasks, the number of slots, and cancelling. Does not own: what is
in a bundle (`tasks`), how a session is configured (`session`).

Uses only public calls that a Connect session has, too. A Spark task has exactly one bundle.
Spark sends a stage's function once to each executor, with all bundles of the stage; so `tasks`
bounds the bytes of a wave.

A runner may open its session when it is first needed: a job that finds nothing to do starts no JVM.
Dry runs use a `LocalRunner`: they need neither Java nor PySpark.
"""

from __future__ import annotations

import logging
import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from ister.base import threads
from ister.base.clock import Clock, SystemClock
from ister.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

Item = TypeVar("Item")

_log = logging.getLogger("ister.spark.jobs")

Work: TypeAlias = Callable[[bytes], bytes]
"""What a task does with its bundle. Pickled."""

# With dynamic allocation, the number of slots follows the load.
_SLOTS_SECONDS: Final = 60.0
# More numbers than a cluster has slots: Spark divides a range into one partition for each slot.
_RANGE: Final = 1 << 16
_OTHER_PYTHON: Final = ("No module named 'ister'", "PYTHON_VERSION_MISMATCH")
_LOCAL_SLOTS: Final = 4
_DESCRIPTION: Final = "spark.job.description"


class TaskRunner(ABC):
    """Runs tasks. Thread-safe."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """Number of tasks that run in parallel."""

    @abstractmethod
    def session(self) -> SparkSession:
        """Returns the Spark session, for work that needs more than tasks.

        Raises:
            InvalidRequestError: There is none.
        """

    @abstractmethod
    def run(self, work: Work, bundles: Sequence[bytes], *, name: str) -> list[bytes]:
        """Runs `work(bundle)` as one task for each bundle; returns the results in order.

        Args:
            work: A function that can be pickled; it may run twice for a bundle.
            bundles: At least one.
            name: The name in Spark's UI.

        Raises:
            ConfigError: Spark's workers cannot import `ister`.
            Exception: A task failed.
        """

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
    """Returns the runner for what was passed to a job.

    Raises:
        InvalidRequestError: A session is needed, and there is none.
    """
    if isinstance(spark, TaskRunner):
        return spark
    if spark is not None:
        return SparkRunner(spark)
    if not dry_run:
        raise InvalidRequestError(
            "spark is None", hint="pass a Spark session; None is for dry runs only"
        )
    return LocalRunner()


class LocalRunner(TaskRunner):
    """Runs tasks in threads of this process."""

    def __init__(self, slots: int = _LOCAL_SLOTS) -> None:
        self._slots = slots

    @property
    def slots(self) -> int:
        """Number of threads."""
        return self._slots

    def session(self) -> SparkSession:
        """Raises InvalidRequestError: this runner has no Spark."""
        raise InvalidRequestError("this dry run needs Spark", hint="pass a Spark session")

    def run(self, work: Work, bundles: Sequence[bytes], *, name: str) -> list[bytes]:
        """See `TaskRunner.run`."""
        if len(bundles) == 1:
            return [work(bundles[0])]
        with ThreadPoolExecutor(self._slots, thread_name_prefix="ister-task") as pool:
            return list(pool.map(work, bundles))


class SparkRunner(TaskRunner):
    """Runs tasks on the executors of a session, classic or Connect."""

    def __init__(
        self,
        session: SparkSession | Callable[[], SparkSession],
        *,
        clock: Clock | None = None,
    ) -> None:
        """Takes a session, or a function that opens one when it is first needed."""
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
        from pyspark.sql import functions, types  # noqa: PLC0415 - an extra

        run = functions.udf(
            partial(_run_numbered, work, tuple(bundles)), types.BinaryType(), useArrow=False
        ).asNondeterministic()
        with self.described(name) as spark:
            frame = spark.range(0, len(bundles), 1, len(bundles))
            rows = frame.select("id", run("id").alias("result")).collect()
        return [bytes(row.result) for row in sorted(rows, key=lambda row: int(row.id))]

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
    """Raises a ConfigError if Spark failed because its workers cannot import `ister`.

    Raises:
        ConfigError: The error says so; it is the cause.
    """
    text = str(error)
    if any(mark in text for mark in _OTHER_PYTHON):
        raise ConfigError(
            "Spark's workers run another Python, without ister or of another version",
            hint="set PYSPARK_PYTHON to the Python that has ister on every executor before Spark "
            "starts; export PYSPARK_PYTHON=$(which python) on one machine",
        ) from error


def map_bundles(
    spark: SparkSession,
    work: Callable[[Item], Iterator[pa.RecordBatch]],
    bundles: Sequence[Item],
    schema: StructType | str,
) -> DataFrame:
    """Returns a DataFrame of the rows of `work(bundle)`, with one partition for each bundle.

    Args:
        spark: A session.
        work: A function that can be pickled.
        bundles: Pickled.
        schema: That of the rows, as Spark has it.
    """
    data = tuple(pickle.dumps(bundle, pickle.HIGHEST_PROTOCOL) for bundle in bundles)
    numbers = spark.range(0, len(data), 1, max(len(data), 1))
    return numbers.mapInArrow(partial(_map_numbered, work, data), schema)


# -- in a task ------------------------------------------------------------------------------


def _run_numbered(work: Work, bundles: Sequence[bytes], number: int) -> bytes:
    return work(bundles[number])


def _map_numbered(
    work: Callable[[Item], Iterator[pa.RecordBatch]],
    bundles: Sequence[bytes],
    numbers: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            yield from work(pickle.loads(bundles[number]))  # noqa: S301 - of our own driver
