"""A runner of tasks for tests: in this process, with everything pickled that Spark would pickle.

What works here travels to an executor.
"""

import pickle
from collections.abc import Sequence

from ister.spark.jobs.tasks import TaskRunner, Work


class SparkHere(TaskRunner):
    """Passed to jobs instead of a session."""

    def __init__(self) -> None:
        super().__init__(slots=2)

    def run(self, work: Work, bundles: Sequence[bytes], *, name: str) -> list[bytes]:
        work = pickle.loads(pickle.dumps(work))
        return [work(bundle) for bundle in bundles]
