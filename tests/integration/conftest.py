"""What these tests share: a Spark session, and a broker with a client of Danube's."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from ister.broker.rpc.native_support import native_refusal
from ister.cli.main import main
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


@pytest.fixture
def run(
    broker: BrokerProcess,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command here, at `broker` or `to` another: its exit code, its output, its errors."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, stdin: bytes = b"", to: str | None = broker.address):
        given = tmp_path / "stdin"
        given.write_bytes(stdin)
        with given.open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            capfd.readouterr()
            code = main([*arguments, *(["--broker", to] if to is not None else [])])
        output = capfd.readouterr()
        return code, output.out, output.err

    return call


@pytest.fixture(params=["danube", "ister"])
def either(
    request: pytest.FixtureRequest, broker: BrokerProcess
) -> AbstractAsyncContextManager[Danube]:
    """A client of Danube's and one of Ister's, each in turn; otherwise like `session`."""
    return connect(broker, {"danube": Danube, "ister": IsterSession}[request.param])
