"""Where a log's data is: a value that Spark sends to its workers, and their connections.

    options ─► Place (settings, broker) ─► pickled to every task ─► connections per process

Owns: the settings as the driver read them, with absolute paths (a worker runs in another
directory), and one set of connections per process, which its tasks share. Does not own: what is
read or written with them.

Executors never read the config file: they get its settings, with `${NAME}` values resolved.
"""

from __future__ import annotations

import atexit
import os
import pickle
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from ister import forks
from ister.client.flight import FlightClient
from ister.config import CloudBackend, Config, MetadataBackend, StorageMode, load_config
from ister.errors import ConfigError
from ister.model import TopicName
from ister.retry import retry_unavailable
from ister.topic.history import History
from ister.topic.local_tail import LocalTail

_HISTORIES_MAX: Final = 4

_lock = threading.Lock()
_histories: OrderedDict[bytes, History] = OrderedDict()
_clients: dict[str, FlightClient] = {}


@dataclass(frozen=True)
class Place:
    """A log's stores, and the broker that serves its tail, if one is given."""

    config: Config
    broker: str | None

    @cached_property
    def _key(self) -> bytes:
        return pickle.dumps(self.config)

    def history(self) -> History:
        """Returns the log's bucket and metadata; shared by this process, do not close it."""
        with _lock:
            history = _histories.get(self._key)
            if history is None:
                history = _histories[self._key] = History(self.config)
            _histories.move_to_end(self._key)
            while len(_histories) > _HISTORIES_MAX:
                _histories.popitem(last=False)[1].close()
            return history

    def local_tail(self, topic: str, node: str, incarnation: str) -> LocalTail | None:
        """Opens a topic's local files; None if they are not on this machine.

        `node` has the topic's files: the last one that its record names.
        """
        history = self.history()
        return LocalTail.find(
            self.config.storage.wal.dir,
            TopicName.parse(topic),
            node,
            incarnation,
            clock=history.clock,
            metrics=history.metrics,
        )

    def flight(self) -> FlightClient | None:
        """Returns the broker's client, shared by this process; None if there is no broker."""
        return None if self.broker is None else _client(self.broker)


def find_place(config: str | None, broker: str | None) -> Place:
    """Returns the place that options name. Called on the driver.

    Raises:
        ConfigError: The settings are invalid, or only one process could use them.
        UnavailableError: Only a broker is given, and it does not respond.
    """
    if config is not None:
        settings = load_config(config)
    else:
        client = _client(broker or "")
        settings = load_config(retry_unavailable(client.storage))
    return place_of(settings, broker)


def place_of(config: Config, broker: str | None) -> Place:
    """Returns the place that settings name.

    Raises:
        ConfigError: Only one process could use them.
    """
    _check_shared(config)
    return Place(_absolute(config), broker)


def _client(broker: str) -> FlightClient:
    with _lock:
        client = _clients.get(broker)
        if client is None:
            client = _clients[broker] = FlightClient(broker, token=_token(), tls_ca=_tls_ca())
        return client


def _token() -> str | None:
    """Reads the environment of drivers and executors, because Spark shows options in plans."""
    return os.environ.get("ISTER_TOKEN") or None


def _tls_ca() -> bytes | None:
    path = os.environ.get("ISTER_TLS_CA")
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"ISTER_TLS_CA cannot be read: {error.strerror}", path=path) from error


def _check_shared(config: Config) -> None:
    """Refuses settings whose data only one process has."""
    storage = config.storage
    if storage.mode is not StorageMode.WAL_CLOUD:
        raise ConfigError(
            f"Spark needs a log with a bucket, not storage.mode {storage.mode}",
            hint="storage.mode: wal_cloud, which is the default",
        )
    if storage.cloud.backend is CloudBackend.MEMORY or (
        storage.metadata.backend is MetadataBackend.MEMORY
    ):
        raise ConfigError(
            "Spark's processes cannot share a store in memory",
            hint="storage.cloud.backend fs or s3, storage.metadata.backend sqlite or etcd",
        )


def _absolute(config: Config) -> Config:
    storage = config.storage
    wal, cloud, metadata = storage.wal, storage.cloud, storage.metadata
    if wal.dir is not None:
        wal = replace(wal, dir=os.path.abspath(wal.dir))
    if cloud.root is not None and cloud.backend in (CloudBackend.FS, CloudBackend.LOCAL):
        cloud = replace(cloud, root=os.path.abspath(cloud.root))
    if metadata.path is not None:
        metadata = replace(metadata, path=os.path.abspath(metadata.path))
    return replace(config, storage=replace(storage, wal=wal, cloud=cloud, metadata=metadata))


@forks.call_in_child
def _forget_all() -> None:
    """Forgets the histories and clients of the parent in a forked child."""
    forks.reset_locks(_lock)
    _histories.clear()
    _clients.clear()


@atexit.register
def _close_all() -> None:
    with _lock:
        for history in _histories.values():
            history.close()
        _histories.clear()
        for client in _clients.values():
            client.close()
        _clients.clear()
