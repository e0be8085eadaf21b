"""What the tests of jobs share: tasks that run in this process."""

from collections.abc import Iterator

import pytest

from tests.support.exports import tasks_here
from tests.support.spark_here import SparkHere


@pytest.fixture
def spark() -> Iterator[SparkHere]:
    """Passed to jobs instead of a session."""
    with tasks_here() as session:
        yield session
