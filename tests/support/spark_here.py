"""Jobs without Spark: a runner of tasks in this process, and how a job is killed.

Everything is pickled that Spark would pickle: what works here travels to an executor.
"""

import itertools
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from ister.base import failpoints
from ister.spark.jobs.tasks import TaskRunner, Work


class SparkHere(TaskRunner):
    """Passed to jobs instead of a session."""

    def __init__(self) -> None:
        super().__init__(slots=2)

    def run(self, work: Work, bundles: Sequence[bytes], *, name: str) -> list[bytes]:
        work = pickle.loads(pickle.dumps(work))
        return [work(bundle) for bundle in bundles]


class KilledError(BaseException):
    """Ends a job as a signal does; nothing is caught on the way."""


@contextmanager
def killed_at(point: str, visit: int = 1) -> Iterator[None]:
    """What runs within is killed when it comes by a failpoint for the given time."""
    visits = itertools.count(1)

    def kill() -> None:
        if next(visits) == visit:
            raise KilledError(point)

    failpoints.arm(point, kill)
    try:
        with pytest.raises(KilledError):
            yield
    finally:
        failpoints.disarm()
