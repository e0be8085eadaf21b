"""The jobs on gigabytes and on a thousand topics, on a cluster whose executors die.

    skewed    one topic of 2 GiB and 300 of a few messages, in directories and SQLite
    many      1,000 topics of a few messages, their metadata in a real etcd

Two workers of one core each, as in `test_jobs_cluster`. While a job runs, a worker is killed with
its executor, and another takes its place. What was sent is compared with what the jobs have made:
counts, sums and ends of each topic, because gigabytes are not kept twice.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
import yaml

import ister
from ister.base.limits import GIB, KIB, MIB
from tests.fault.jobs_child import JobsChild
from tests.fault.spark_child import tell
from tests.fault.spark_cluster import SparkCluster
from tests.servers.etcd import EtcdServer

_HUGE = "/scale/huge"
_HUGE_BYTES = 2 * GIB
_SMALL = 300
_MANY = 1000
_FEW_MESSAGES = 20
_BATCH_ROWS = 16 * KIB
_KILL_SECONDS = 8.0
_JOB_SECONDS_MAX = 1500.0


class Scale:
    """A log of many topics, by how many messages each has.

    Args:
        directory: An existing one.
        endpoint: Of an etcd; SQLite without one.
    """

    def __init__(self, directory: Path, endpoint: str | None = None) -> None:
        self.directory = directory
        metadata: dict[str, object] = {"path": str(directory / "metadata.db")}
        if endpoint is not None:
            metadata = {"backend": "etcd", "endpoints": [endpoint]}
        tree = {
            "ack": "written",
            "wal": {"dir": str(directory / "wal"), "fsync_interval_ms": 50},
            "uploader": {"engine": "none"},
            "cloud": {"root": str(directory / "objects")},
            "metadata": metadata,
        }
        path = directory / "ister.yml"
        path.write_text(yaml.safe_dump({"storage": tree}))
        self.config = str(path)
        self.sent: dict[str, int] = {}

    def fill(self, counts: Mapping[str, int], *, payload_bytes: int) -> None:
        """Appends messages whose payloads are JSON with their numbers in the topic."""
        filler = "x" * max(0, payload_bytes - len('{"n":0000000000,"x":""}'))
        with ister.open(self.config) as log:
            for name, count in counts.items():
                topic = log.topic(name, create=True)
                for first in range(0, count, _BATCH_ROWS):
                    numbers = range(first, min(first + _BATCH_ROWS, count))
                    payloads = [f'{{"n":{number:10d},"x":"{filler}"}}' for number in numbers]
                    column = pa.array(payloads).cast(pa.binary())
                    topic.append_arrow(pa.RecordBatch.from_arrays([column], ["payload"]))
                topic.flush()
                self.sent[name] = count

    def check_tiered(self) -> None:
        """Every message is in the bucket."""
        with ister.open_bucket(self.config) as history:
            ends = {name: history.topic(name).tiered for name in self.sent}
        assert ends == self.sent

    def check_exported(self, target: str) -> None:
        """The table has each offset of each topic once, with its own payload."""
        rows = duckdb.sql(
            'SELECT topic, count(*), count(DISTINCT "offset"), min("offset"), max("offset"), '
            "count(*) FILTER (CAST(json_extract(decode(payload), '$.n') AS BIGINT) <> \"offset\") "
            f"FROM read_parquet('{target}/**/*.parquet') GROUP BY topic"
        ).fetchall()
        found = {name: tuple(figures) for name, *figures in rows}
        assert found == {name: (count, count, 0, count - 1, 0) for name, count in self.sent.items()}

    def objects(self, name: str) -> list[str]:
        """The formats of a topic's objects."""
        with ister.open_bucket(self.config) as history:
            return [described.format for described in history.topic(name).descriptors(0, 2**62)]


@contextmanager
def cluster_of(directory: Path, cluster: SparkCluster) -> Iterator[JobsChild]:
    """A driver in the cluster whose executors have room for chunks of large objects."""
    settings = cluster.driver(**{"spark.task.maxFailures": "8"})
    with JobsChild(directory, **settings) as child:
        child.ready()
        yield child


def run_and_kill(
    cluster: SparkCluster, child: JobsChild, job: str, scale: Scale, **arguments: object
) -> tuple[dict[str, object], int]:
    """Runs a job while workers die, one after the other; its report, and how many have died."""
    before, killed = child.said["done"], 0
    child.tell("job", name=job, config=scale.config, arguments=arguments)
    deadline = time.monotonic() + _JOB_SECONDS_MAX
    while child.listen("done", "failed", seconds=_KILL_SECONDS) is None:
        assert time.monotonic() < deadline, child.story()
        number = cluster.add_worker()
        cluster.kill_worker(number - 2)
        killed += 1
    assert child.said["done"] > before, child.story()
    report = child.last["done"]["report"]
    assert report["ok"], report["errors"][:5]
    return report, killed


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("what", ["skewed", "many"])
def test_jobs_at_scale_survive_the_deaths_of_executors(what, tmp_path, request):
    """Goal: jobs finish gigabytes, skewed topics and a thousand topics, whichever worker dies.

    Method: tier, scrub, compact to Parquet and export into one table, in this order, each with a
    worker killed every few seconds; after each job, what it has made is compared with what was
    sent. A second export has nothing to do.
    """
    started, killed, took = time.monotonic(), {}, {}
    with EtcdServer() if what == "many" else nullcontext() as etcd:
        scale = Scale(tmp_path, etcd.endpoint if etcd is not None else None)
        if what == "skewed":
            scale.fill({_HUGE: _HUGE_BYTES // (KIB + 80)}, payload_bytes=KIB)
            small = {f"/scale/small-{n:04d}": _FEW_MESSAGES for n in range(_SMALL)}
        else:
            small = {f"/scale/topic-{n:04d}": _FEW_MESSAGES for n in range(_MANY)}
        scale.fill(small, payload_bytes=100)
        target = str(tmp_path / "table")
        export = {"to": target, "format": "parquet"}
        with SparkCluster(tmp_path) as cluster, cluster_of(tmp_path, cluster) as child:
            for job, arguments in (
                ("tier", {}),
                ("scrub", {}),
                ("compact", {"format": "parquet", "min_objects": 1}),
                ("export", export),
            ):
                began = time.monotonic()
                report, killed[job] = run_and_kill(cluster, child, job, scale, **arguments)
                took[job] = round(time.monotonic() - began, 1)
                assert len(report["topics"]) == len(scale.sent)
                scale.check_tiered()
            scale.check_exported(target)
            formats = set(scale.objects(next(iter(scale.sent))))
            assert formats == {"parquet"}
            again, _ = run_and_kill(cluster, child, "export", scale, **export)
            assert sum(topic.get("rows", 0) for topic in again["topics"]) == 0
            scale.check_exported(target)
            child.end()
        size = sum(
            os.path.getsize(os.path.join(folder, name))
            for folder, _, names in os.walk(tmp_path / "wal")
            for name in names
        )
    tell(request, started, topics=len(scale.sent), mib=size // MIB, killed=killed, took=took)
