"""`ister up`: a broker and a pipeline on a real Spark, started and ended together."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import pyarrow as pa
import pytest

from benchmarks.flight_publisher import publishing
from ister.base.clock import SystemClock
from ister.base.limits import GIB, MIB
from ister.bucket.fence import read_holder
from ister.bucket.pipeline import PipelineKeys
from ister.client.flight import FlightClient
from ister.config import load_config
from ister.topic.stores import open_metadata
from tests.support.waiting import eventually

TOPIC = "/default/orders"
SECONDS = 120.0


class Up:
    """The command in a directory, and what its metadata says of the pipeline."""

    def __init__(self, directory, child, flight, store, keys):
        self.directory = directory
        self.child = child
        self.flight = flight
        self.store = store
        self.keys = keys

    def holder(self):
        """The process that holds the pipeline's lease."""
        found = read_holder(self.store, self.keys.lease)
        return None if found is None else int(found.about["process"])

    def status(self):
        """What the pipeline says of itself."""
        found = self.store.get(self.keys.status)
        return json.loads(found.value) if found is not None else {}

    def events(self):
        """Events of the log, the pipeline's included."""
        lines = (self.directory / "log").read_text().splitlines()
        return [event.get("state") or event["event"] for event in map(json.loads, lines)]

    def publish(self, count):
        rows = pa.record_batch({"payload": pa.array([b"x"] * count, pa.binary())})
        with (
            FlightClient(self.flight) as client,
            publishing(client, TOPIC, rows.schema, create=True) as stream,
        ):
            stream.write(rows)
            stream.flush()

    def tiered(self):
        with FlightClient(self.flight) as client:
            return client.watermarks([TOPIC])[TOPIC].tiered


@contextmanager
def up(directory, **uploader):
    """Runs it, and ends it whatever happens."""
    config = directory / "ister.yml"
    storage = {
        "wal": {"dir": str(directory / "wal")},
        "uploader": {"interval_seconds": 1, **uploader},
        "metadata": {"lease_ttl_seconds": 3},
    }
    config.write_text(json.dumps({"storage": storage}))
    ports = [f"--{name}=0" for name in ("port", "flight-port", "http-port")]
    with (directory / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "ister.cli.main", "up", f"--config={config}", "--json", *ports],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    settings = load_config(str(config))
    keys = PipelineKeys(settings.storage.metadata.root_prefix)
    try:
        ready = json.loads(child.stdout.readline())
        assert ready["pipeline"] == "starting"
        store = open_metadata(settings.storage.metadata, SystemClock(), read_only=True)
        try:
            yield Up(directory, child, ready["flight"], store, keys)
        finally:
            store.close()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def processes(root):
    """A process and all below it that run: their command lines, by id."""
    parents = {}
    for entry in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            state, parent = read_stat(int(entry))[:2]
            if state != "Z":
                parents[int(entry)] = int(parent)
    found = {root} & parents.keys()
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    lines = {}
    for pid in found:
        with suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
            lines[pid] = file.read().replace("\0", " ")
    return lines


def read_stat(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def cpu_seconds(pids):
    """CPU time of processes that run, by id."""
    spent = {}
    for pid in pids:
        with suppress(OSError):
            spent[pid] = sum(map(int, read_stat(pid)[11:13])) / os.sysconf("SC_CLK_TCK")
    return spent


def are_gone(pids):
    return not any(pid in processes(pid) for pid in pids)


def test_broker_serves_at_once_and_one_interrupt_ends_both(tmp_path):
    # The engine `spark` never leaves the upload to the broker: what is tiered, the pipeline tiered.
    with up(tmp_path, engine="spark") as running:
        assert running.holder() is None
        running.publish(100)  # long before Spark is there
        assert "running" not in running.events()
        pipeline = eventually(running.holder, "the pipeline's lease", within=SECONDS)
        eventually(lambda: running.tiered() == 100, "all is tiered", within=SECONDS)
        eventually(lambda: running.status()["tier"]["tiered_messages_total"] == 100)
        assert "running" in running.events()

        tree = processes(running.child.pid)
        assert pipeline in tree
        [jvm] = [line for line in tree.values() if "SparkSubmit" in line]
        assert "-Xmx512m" in jvm
        assert "-XX:+UseSerialGC" in jvm
        memory = eventually(lambda: running.status().get("memory"))
        assert 100 * MIB < memory["jvm_rss_bytes"] < 768 * MIB
        parts = ("driver_rss_bytes", "jvm_rss_bytes", "workers_rss_bytes")
        assert sum(memory[part] for part in parts) < 1.5 * GIB

        running.child.send_signal(signal.SIGINT)
        assert running.child.wait(SECONDS) == 0
        assert running.holder() is None
        # Workers of Spark notice a moment later that the JVM is gone.
        eventually(lambda: are_gone(tree), lambda: [processes(pid) for pid in tree])
        assert running.events()[-1] == "stopped"


@pytest.mark.nightly
def test_uploads_go_on_without_the_pipeline_and_it_comes_back(tmp_path):
    with up(tmp_path) as running:
        first = eventually(running.holder, "the pipeline's lease", within=SECONDS)
        jvm = eventually(lambda: set(processes(first)) - {first})
        os.kill(first, signal.SIGKILL)
        running.publish(100)
        eventually(lambda: running.tiered() == 100, "all is tiered", within=SECONDS)
        eventually(lambda: are_gone(jvm))
        eventually(
            lambda: running.holder() not in (None, first),
            "another pipeline has the lease",
            within=SECONDS,
        )
        said = running.events()
        assert "the pipeline ended; the broker uploads until it is back" in said
        assert "no pipeline: this process uploads" in said
        eventually(lambda: running.events().count("running") == 2)

        # A broker that is killed takes the pipeline with it.
        tree = processes(running.child.pid)
        assert len(tree) > 2
        running.child.kill()
        eventually(lambda: are_gone(tree), lambda: [processes(pid) for pid in tree])


@pytest.mark.nightly
def test_idle_pipeline_needs_little_cpu_time(tmp_path):
    """A tenth of a core, over five seconds, when the first jobs are done; a loop takes one."""
    with up(tmp_path) as running:
        pipeline = eventually(running.holder, "the pipeline's lease", within=SECONDS)
        running.publish(100)
        eventually(lambda: running.tiered() == 100, "all is tiered", within=SECONDS)
        clock = SystemClock()

        def is_idle():
            began, before = clock.monotonic(), cpu_seconds(processes(pipeline))
            eventually(lambda: clock.monotonic() - began > 5)
            after = cpu_seconds(processes(pipeline))
            assert len(after) > 1
            spent = sum(seconds - before.get(pid, 0) for pid, seconds in after.items())
            return spent < 0.1 * (clock.monotonic() - began)

        eventually(is_idle, within=SECONDS)
