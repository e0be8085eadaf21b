"""A broker for the tests of programs that use one, and pytest fixtures with it.

    # conftest.py
    pytest_plugins = ["ister.testing"]

    # test_shop.py
    def test_an_order_is_published(ister_client, ister_topic):
        with ister_client.producer(ister_topic) as producer:
            assert producer.send_json({"order": 1}).result() == 0

    async def test_the_same_with_asyncio(ister_broker, ister_topic):
        async with AsyncClient(ister_broker.address) as client: ...

`run_broker` is the same broker without pytest: in `unittest`, a notebook, an example.

Owns: a whole broker on free ports of this machine, in a thread with an event loop of its own; its
data is in a temporary directory. Does not own: the program under test. The broker is a real one:
messages go through its ports and its files, are acknowledged and redelivered as in production.
Nothing is uploaded to a bucket unless the settings say so.

At the end of the block the broker stops: open consumers and producers lose their connection, the
thread ends, and the directory is deleted. A process that is killed leaves the directory. A child
process that leaves the block (`os.fork`) stops nothing: the broker is its parent's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from ister.base import threads
from ister.base.extras import missing_extra
from ister.client import AsyncClient, Client
from ister.config import Config, load_config
from ister.errors import ConfigError, IsterError, UnavailableError

if TYPE_CHECKING:
    from ister.broker.server import Broker, Listening

__all__ = ["LocalBroker", "run_broker"]

_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 30.0
_CLIENT_SECONDS: Final = 30.0
_SETTINGS: Final[dict[str, object]] = {
    "broker": {"host": "127.0.0.1", "ports": {"grpc": 0, "flight": 0, "http": 0}}
}


class LocalBroker:
    """A running broker. Made by `run_broker` and by the fixture `ister_broker`. Thread-safe."""

    def __init__(self, config: Config, listening: Listening, directory: str) -> None:
        addresses = listening.to_json()
        self.config = config
        """Its settings."""
        self.directory = directory
        """Its data directory; `ister.open_bucket(directory)` reads what it has uploaded."""
        self.address: str = addresses["grpc"]
        """For `Client`, `AsyncClient` and the command line: `host:port`."""
        self.flight: str = addresses["flight"]
        """For Arrow Flight: `host:port`."""
        self.http: str = addresses["http"]
        """For a browser: the dashboard, the HTTP API, metrics."""
        self._numbers = itertools.count()

    def client(self, *, timeout: float = _CLIENT_SECONDS) -> Client:
        """A client of the broker; close it, or use it in a `with` block."""
        return Client(self.address, timeout=timeout)

    def async_client(self, *, timeout: float = _CLIENT_SECONDS) -> AsyncClient:
        """A client of the broker for asyncio; close it, or use it in an `async with` block."""
        return AsyncClient(self.address, timeout=timeout)

    def topic_name(self, prefix: str = "test") -> str:
        """The name of a topic that does not exist yet."""
        return f"/default/{prefix}-{next(self._numbers)}"

    def __repr__(self) -> str:
        return f"<LocalBroker {self.address} http={self.http}>"


@contextmanager
def run_broker(
    settings: Mapping[str, object] | None = None, *, directory: str | os.PathLike[str] | None = None
) -> Generator[LocalBroker]:
    """Runs a broker in this process, on free ports, for as long as the block lasts.

    Args:
        settings: What differs from the defaults, as the tree of an `ister.yml`:
            `{"storage": {"uploader": {"engine": "embedded"}}}` uploads to the bucket, which is a
            directory too.
        directory: Data directory, which is kept; by default a temporary one, which is deleted.

    Raises:
        ConfigError: The extra `ister[broker]` is not installed, or a setting is wrong.
        UnavailableError: The broker did not start in time.
    """
    try:
        from ister.broker.server import Broker  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise missing_extra("ister.testing", "broker", error) from error
    with _kept(directory) as place, _hushed():
        given = _merged({}, settings or {})
        tree = _merged(_settings_in(place, given), given)
        # ISTER_… variables of the developer must not affect tests.
        others = {name: os.environ[name] for name in os.environ if not name.startswith("ISTER_")}
        config = load_config(tree, others)
        running = _Running(lambda: Broker(config))
        try:
            yield LocalBroker(config, running.listening, place)
        finally:
            running.stop()


@contextmanager
def _kept(directory: str | os.PathLike[str] | None) -> Iterator[str]:
    if directory is not None:
        yield os.path.abspath(directory)
        return
    # Not a TemporaryDirectory: a child process that ends would delete it as well.
    made, owner = tempfile.mkdtemp(prefix="ister-"), os.getpid()
    try:
        yield made
    finally:
        if os.getpid() == owner:
            shutil.rmtree(made, ignore_errors=True)


def _settings_in(directory: str, settings: Mapping[str, object]) -> dict[str, object]:
    """The default settings of a broker in `directory`, by its storage mode."""
    storage = settings.get("storage")
    mode = storage.get("mode", "wal_cloud") if isinstance(storage, Mapping) else "wal_cloud"
    files = {"wal": {"dir": os.path.join(directory, "wal")}}
    # No background uploads: tests see only what they have done.
    by_mode = {"wal_cloud": {**files, "uploader": {"engine": "none"}}, "local_only": files}
    return {**_SETTINGS, "storage": by_mode.get(str(mode), {})}


def _merged(below: Mapping[str, object], above: object) -> dict[str, object]:
    """Merges `above` over `below`; changes neither."""
    if not isinstance(above, Mapping):
        raise ConfigError(f"settings must be a mapping, not {above!r}")
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) else value
    return merged


class _Running:
    """A broker in a thread with an event loop of its own."""

    def __init__(self, make: Callable[[], Broker]) -> None:
        self.listening: Listening
        self._make = make
        self._owner = os.getpid()
        self._failures: list[BaseException] = []
        self._is_up = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._thread = threads.start("ister-testing", self._run)
        if not self._is_up.wait(_START_SECONDS):
            self.stop()
            raise UnavailableError(f"the broker did not start within {_START_SECONDS:g} seconds")
        if self._failures:
            self._thread.join(_STOP_SECONDS)
            raise self._failures[0]

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised where the broker is started
            self._failures.append(error)
        self._is_up.set()

    async def _serve(self) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        broker = self._make()
        self.listening = await broker.start()
        self._is_up.set()
        try:
            await self._ending.wait()
        finally:
            await broker.stop()

    def stop(self) -> None:
        """Stops the broker and waits for it. Does nothing in a child process, which has none.

        Raises:
            UnavailableError: It did not stop in time.
        """
        if os.getpid() != self._owner:
            return
        if self._loop is not None and self._ending is not None:
            with suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            raise UnavailableError(f"the broker did not stop within {_STOP_SECONDS:g} seconds")
        if self._failures:
            raise self._failures[0]


class _PollerNoise(logging.Filter):
    """Drops gRPC's poller errors, which several event loops in one process cause."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        is_ours = "PollerCompletionQueue" in record.getMessage()
        return not (isinstance(error, BlockingIOError) and is_ours)


@contextmanager
def _hushed() -> Iterator[None]:
    """Filters gRPC's poller errors out of the log of asyncio."""
    logger, noise = logging.getLogger("asyncio"), _PollerNoise()
    logger.addFilter(noise)
    try:
        yield
    finally:
        logger.removeFilter(noise)


try:
    import pytest
except ImportError:  # `run_broker` does without it
    pass
else:

    @pytest.fixture(scope="session")
    def ister_settings() -> Mapping[str, object]:
        """Settings of the broker that differ from the defaults; override it in `conftest.py`."""
        return {}

    @pytest.fixture(scope="session")
    def ister_broker(ister_settings: Mapping[str, object]) -> Iterator[LocalBroker]:
        """A broker for all tests of the session; each xdist process has its own."""
        with run_broker(ister_settings) as broker:
            yield broker

    @pytest.fixture
    def ister_client(ister_broker: LocalBroker) -> Iterator[Client]:
        """A client of the broker, closed at the end of the test."""
        with ister_broker.client() as client:
            yield client

    @pytest.fixture
    def ister_topic(ister_broker: LocalBroker) -> Iterator[str]:
        """The name of a new topic, which is deleted at the end of the test."""
        name = ister_broker.topic_name()
        with ister_broker.client() as client:
            client.admin.create_topic(name)
            yield name
            with suppress(IsterError):  # the test has deleted it
                client.admin.delete_topic(name)
