"""What the tests of tables share: connections end with each test."""

from collections.abc import Iterator

import pytest

from tests.support.exports import tasks_here


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    with tasks_here():
        yield
