"""The Spark session of these tests."""

import pytest
from pyspark.sql import SparkSession

from tests.support.spark_session import get_spark


@pytest.fixture(scope="session")
def spark() -> SparkSession:
    """A local session, shared by all tests of the process: do not stop it."""
    return get_spark()
