"""What these tests share: the Spark session, a log, and a connector that does not pause."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from ister.spark import location, stream
from ister.topic import batches
from tests.support.spark_session import get_spark
from tests.support.streams import Home
from tests.support.tier_checks import memory_directory


@pytest.fixture(scope="session")
def spark() -> SparkSession:
    """A local session, shared by all tests of the process: do not stop it."""
    return get_spark()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pauses between two looks, an append for each block, no connections that stay."""
    monkeypatch.setattr(stream, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(batches, "_JOINED_BYTES_MIN", 0)
    yield
    location._close_all()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory for what is not proved by waiting for a disk."""
    with memory_directory() as directory:
        yield directory


@pytest.fixture
def home(memory: Path) -> Home:
    """A log without topics."""
    return Home(memory)
