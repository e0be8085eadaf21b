"""What these tests share: a Spark session, and the engines that serve gRPC."""

import pytest
from pyspark.sql import SparkSession

from ister.broker.rpc.native_support import native_refusal
from tests.support.scale import nightly
from tests.support.spark_session import get_spark


@pytest.fixture(scope="session")
def spark() -> SparkSession:
    """A local session, shared by all tests of the process: do not stop it."""
    return get_spark()


@pytest.fixture(scope="module", params=["grpcio", nightly("native")])
def engine(request: pytest.FixtureRequest) -> str:
    """`broker.grpc.engine`: each in turn."""
    if request.param == "native" and (reason := native_refusal()) is not None:
        pytest.skip(reason)
    return request.param
