"""A Spark cluster of several processes, whose workers are killed, and a broker that is.

Executors are JVMs of other processes than the driver's: what they need comes to them by pickle,
through the bucket, from files or by Flight. When a worker is killed, so are its executor and that
one's Python; Spark runs the lost tasks elsewhere, and nothing of it may show in the rows.
"""

import random
import time
from pathlib import Path

import pyarrow as pa
import pytest

from tests.fault.spark_child import SparkChild, tell
from tests.fault.spark_cluster import SparkCluster
from tests.fault.spark_copy import Copy
from tests.servers.flight import FlightProcess
from tests.support.tier_checks import memory_directory
from tests.support.writer_child import new_seed, say_replay

_JOB_SECONDS_MAX = 240.0
_LIMIT = 300
_LIMIT_OF_A_DRAIN = 20_000
# Many tasks for little data.
_SPLIT = {"splitBytes": "131072"}


@pytest.fixture
def tmp_path():
    """In memory; see there."""
    with memory_directory() as directory:
        yield directory


class Trace:
    """How many batches of rows the tasks of slow reads have handed over."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "trace"

    def options(self, pause: float) -> dict[str, str]:
        """Makes a read slow: so many seconds after each batch."""
        self._path.write_bytes(b"")
        return {"pause": str(pause), "trace": str(self._path)}

    def wait(self, child: SparkChild, size: int) -> None:
        """Returns when there are so many, and the read goes on.

        Raises:
            AssertionError: It has ended, or nothing happens.
        """
        deadline = time.monotonic() + _JOB_SECONDS_MAX
        while self.size < size:
            assert child.listen("done", "failed", seconds=0.02) is None, child.story()
            assert time.monotonic() < deadline, child.story()

    def wait_until_it_stops(self, child: SparkChild) -> None:
        """Returns when no more come, though the read has not ended: somebody is missed.

        Raises:
            AssertionError: It has ended.
        """
        before = -1
        while self.size > before:
            before = self.size
            assert child.listen("done", "failed", seconds=1.0) is None, child.story()

    @property
    def size(self) -> int:
        return self._path.stat().st_size


def check_read(copy: Copy, path: Path) -> dict[str, int]:
    """What a driver has read is A: each message once, as it was."""
    with pa.OSFile(str(path)) as file:
        rows = pa.ipc.open_file(file).read_all()
    found = zip(rows["offset"].to_pylist(), rows["payload"].to_pylist(), strict=True)
    return copy.compare(sorted(found))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_job_survives_the_death_of_a_worker(tmp_path, request):
    """Goal: reads and writes work on a cluster, also when one of its machines dies in the middle.

    Method: a topic in the bucket and in local files is read, whole, by two executors. Then it is
    copied to another topic, and a worker is killed with its executor when some of the tasks have
    handed over rows. The copy has each row once; so has what is read with the worker that is left.
    """
    started = time.monotonic()
    copy, trace = Copy(tmp_path, is_one_log=True, payload_bytes=1000), Trace(tmp_path)
    copy.produce(1300, uploads=True)
    copy.produce(700)
    rows = tmp_path / "rows.arrow"
    with (
        SparkCluster(tmp_path) as cluster,
        SparkChild(tmp_path, **cluster.driver()) as child,
    ):
        child.ready()
        child.ask("read", options=copy.source(**_SPLIT), into=str(rows))
        figures = check_read(copy, rows)
        child.tell("copy", source=copy.source(**_SPLIT, **trace.options(0.2)), sink=copy.sink())
        trace.wait(child, 4)
        assert cluster.executors(0), "it takes part"
        killed = cluster.kill_worker(0)
        assert killed >= 3, "a worker, its executor and a Python worker"
        child.finished(_JOB_SECONDS_MAX)
        batches = trace.size
        child.ask("read", options=copy.source(**_SPLIT), into=str(rows))
        check_read(copy, rows)
        child.end()
    copied = copy.judge()
    tell(
        request,
        started,
        killed_processes=killed,
        batches=batches,
        read=figures,
        copied=copied,
        swept_files=copy.sweep(),
    )


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_stream_survives_the_deaths_of_workers_and_of_its_driver(tmp_path, request):
    """Goal: a stream on a cluster copies each message once, whichever machine dies.

    Method: a producer appends, uploads and trims all the while. Workers are killed one after the
    other under a running query, and others take their places; then the driver, whose executors
    have to end by themselves; the next driver copies the rest.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(f"{seed}/cluster")
    started = time.monotonic()
    copy = Copy(tmp_path)
    copy.produce(_LIMIT)
    killed = batches = 0
    with copy.producing(f"{seed}/producer"), SparkCluster(tmp_path) as cluster:
        with SparkChild(tmp_path, **cluster.driver()) as child:
            child.ready()
            child.tell("stream", **copy.stream(limit=_LIMIT))
            for number in range(4):
                for _ in range(2):
                    assert child.hear("batch", "failed", seconds=_JOB_SECONDS_MAX) == "batch", (
                        child.story()
                    )
                assert child.listen("failed", seconds=chance.uniform(0.0, 1.0)) is None, (
                    child.story()
                )
                killed += cluster.kill_worker(number)
                cluster.add_worker()
            assert child.hear("batch", "failed", seconds=_JOB_SECONDS_MAX) == "batch", child.story()
            child.kill()
            batches += child.said["batch"]
        cluster.wait_until_idle()
        with SparkChild(tmp_path, **cluster.driver()) as child:
            child.ready()
            copy.stop_producing()
            command = copy.stream(limit=_LIMIT_OF_A_DRAIN)
            batches += child.ask("stream", **command, now=True)["batches"]
            child.end()
    figures = copy.judge()
    tell(request, started, seed=seed, killed_processes=killed, batches=batches, **figures)


@pytest.fixture
def broker_copy(tmp_path):
    """A topic of large messages, of which few are in the bucket, sent in small pieces."""
    sections = {"wal": {"rotate_max_bytes": 4 << 20, "stream_chunk_size": 65536}}
    copy = Copy(tmp_path, is_one_log=True, payload_bytes=8000, **sections)
    copy.produce(160, uploads=True)
    copy.produce(3000)
    return copy


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_read_survives_the_death_of_the_broker(tmp_path, request, broker_copy):
    """Goal: who reads a tail from a broker that dies goes on with the next one, without a seam.

    Method: executors that see the bucket, but not the log's directory, read the rest of the topic
    by Flight, slowly; twice the broker is killed meanwhile, missed, and started again.
    """
    started = time.monotonic()
    copy, trace, rows = broker_copy, Trace(tmp_path), tmp_path / "rows.arrow"
    remote = copy.remote_config()
    with (
        FlightProcess(copy.config) as broker,
        SparkCluster(tmp_path) as cluster,
        SparkChild(tmp_path, **cluster.driver()) as child,
    ):
        child.ready()
        source = copy.source(config=remote, broker=broker.address)
        child.ask("read", options=source, into=str(rows))
        check_read(copy, rows)
        child.tell("read", options=source | trace.options(0.05), into=str(rows))
        for _ in range(2):
            trace.wait(child, trace.size + 60)
            broker.kill()
            trace.wait_until_it_stops(child)
            broker.start()
        child.finished(_JOB_SECONDS_MAX)
        figures = check_read(copy, rows)
        child.end()
    tell(request, started, kills=2, batches=trace.size, **figures)
