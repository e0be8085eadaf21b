"""Where a log's data is: a value that Spark sends to its workers, and their connections.

    options ─► Place (settings, brokers) ─► pickled to every task ─► connections per process

Owns: the settings as the driver read them, with absolute paths (a worker runs in another
directory), and one set of connections per process, which its tasks share. Does not own: what is
read or written with them, and which broker has a topic (`owners`).

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

from ister.base import forks
from ister.base.model import JsonObject, TopicName
from ister.base.retry import retry_unavailable
from ister.client.flight import FlightClient
from ister.config import CloudBackend, Config, MetadataBackend, load_config
from ister.errors import ConfigError, IsterError, UnavailableError
from ister.topic.history import BucketLog
from ister.topic.local_tail import LocalTail

_HISTORIES_MAX: Final = 4
_DIRECTORIES: Final = (CloudBackend.FS, CloudBackend.LOCAL)

_lock = threading.Lock()
_histories: OrderedDict[bytes, BucketLog] = OrderedDict()
_clients: dict[str, FlightClient] = {}


@dataclass(frozen=True)
class LogLocation:
    """A log's stores, and the brokers that options name."""

    config: Config
    brokers: tuple[str, ...] = ()
    """Flight addresses with a scheme. The metadata store has those of all brokers: these are for
    brokers that are not reached by their own address, and for owners that are not brokers."""

    @cached_property
    def key(self) -> bytes:
        """Identifies the log within this process."""
        return pickle.dumps(self.config)

    def history(self) -> BucketLog:
        """Returns the log's bucket and metadata; shared by this process, do not close it."""
        with _lock:
            history = _histories.get(self.key)
            if history is None:
                history = _histories[self.key] = BucketLog(_for_tasks(self.config))
            _histories.move_to_end(self.key)
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


def find_place(config: str | None, brokers: tuple[str, ...] = ()) -> LogLocation:
    """Returns the place that options name. Called on the driver."""
    if config is not None:
        return place_of(load_config(config), brokers)
    return place_of(load_config(retry_unavailable(lambda: _ask_storage(brokers))), brokers)


def place_of(config: Config, brokers: tuple[str, ...] = ()) -> LogLocation:
    """Returns the place that settings name."""
    _check_shared(config)
    return LogLocation(_absolute(config), brokers)


def _ask_storage(brokers: tuple[str, ...]) -> JsonObject:
    """Asks brokers in turn for the settings of their stores."""
    last: IsterError | None = None
    for address in brokers:
        try:
            return client_of(address).storage()
        except UnavailableError as error:
            last = error
    raise last or UnavailableError("no broker is given")


def client_of(address: str) -> FlightClient:
    """Returns the client of a broker, shared by this process."""
    with _lock:
        client = _clients.get(address)
        if client is None:
            client = _clients[address] = FlightClient(address, token=_token(), tls_ca=_tls_ca())
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
    if not storage.mode.has_bucket:
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
    if cloud.root is not None and cloud.backend in _DIRECTORIES:
        cloud = replace(cloud, root=os.path.abspath(cloud.root))
    if metadata.path is not None:
        metadata = replace(metadata, path=os.path.abspath(metadata.path))
    return replace(config, storage=replace(storage, wal=wal, cloud=cloud, metadata=metadata))


def _for_tasks(config: Config) -> Config:
    """Returns the settings without prefetching if the bucket is a directory.

    The kernel reads files ahead by itself, and other tasks use the other processors: a thread for
    it costs a task more than it saves.
    """
    storage = config.storage
    if storage.cloud.backend not in _DIRECTORIES:
        return config
    reader = replace(storage.cloud_reader, read_ahead=False)
    return replace(config, storage=replace(storage, cloud_reader=reader))


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
