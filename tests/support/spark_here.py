"""As much of a Spark session as jobs need, with tasks that run in the process that asks for them.

Items, functions and results are pickled all the same: what works here travels to an executor.
"""

import pickle
from collections.abc import Callable, Iterable


class _Tasks:
    def __init__(self, items: list) -> None:
        self._items = items

    def flatMap(self, work: Callable) -> "_Tasks":  # noqa: N802 - Spark's name
        work = pickle.loads(pickle.dumps(work))
        results = [result for item in self._items for result in work(item)]
        return _Tasks(pickle.loads(pickle.dumps(results)))

    def collect(self) -> list:
        return self._items


class _Context:
    defaultParallelism = 2  # noqa: N815 - Spark's name

    def setJobDescription(self, text: str) -> None:  # noqa: N802 - Spark's name
        """Nobody looks."""

    def parallelize(self, items: Iterable, parts: int) -> _Tasks:
        return _Tasks(pickle.loads(pickle.dumps(list(items))))


class SparkHere:
    """A session."""

    sparkContext = _Context()  # noqa: N815 - Spark's name
