"""What these tests share: a Spark session, and a broker with a client of Danube's."""

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager

import pytest
from pyspark.sql import SparkSession

from ister.broker.rpc.native_support import native_refusal
from tests.servers.broker import BrokerProcess
from tests.support.danube import Danube, IsterSession, connect, topic_for
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


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, engine: str) -> Iterator[BrokerProcess]:
    """One for all tests of a file, with each of the engines."""
    with BrokerProcess(tmp_path_factory.mktemp("broker"), engine=engine) as broker:
        yield broker


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """The name of a topic that no other test uses."""
    return topic_for(request)


@pytest.fixture
def session(broker: BrokerProcess) -> AbstractAsyncContextManager[Danube]:
    """A client of `broker`, which a test that is a coroutine gets connected."""
    return connect(broker)


@pytest.fixture(params=["danube", "ister"])
def either(
    request: pytest.FixtureRequest, broker: BrokerProcess
) -> AbstractAsyncContextManager[Danube]:
    """A client of Danube's and one of Ister's, each in turn; otherwise like `session`."""
    return connect(broker, {"danube": Danube, "ister": IsterSession}[request.param])
