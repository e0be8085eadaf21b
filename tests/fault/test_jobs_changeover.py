"""Who uploads, a broker or a pipeline, while one of them dies under load.

A real `ister serve` and a real `ister pipeline`, each a process with whatever it starts. Whoever
uploads, whoever dies, and also if both are told to at once: every offset gets into the bucket once.
"""

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from itertools import pairwise

import pyarrow as pa
import pytest

import ister
from benchmarks.flight_publisher import publishing
from ister.base.clock import SystemClock
from ister.bucket.fence import read_holder
from ister.bucket.pipeline import PipelineKeys
from ister.client.flight import FlightClient
from ister.config import load_config
from ister.topic.stores import open_metadata
from tests.fault.spark_child import spark_environment
from tests.servers.broker import BrokerProcess
from tests.support.processes import end_with_parent, kill_session
from tests.support.scale import scaled
from tests.support.tier_checks import memory_directory
from tests.support.waiting import eventually

TOPICS = ("/default/a", "/default/b")
TTL = 8
PATIENCE = 180.0
DEATHS = scaled(1, 3)
_CREATED = re.compile(r"^\w*uploader_objects_created_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@pytest.fixture
def tmp_path():
    """In memory; see there."""
    with memory_directory() as directory:
        yield directory


def payload_of(offset: int) -> bytes:
    return b"%d." % offset * 20


class Load(threading.Thread):
    """A producer that goes on and on, by Flight."""

    def __init__(self, address: str) -> None:
        super().__init__(name="load")
        self.sent = 0
        """How many messages each topic has."""
        self._address = address
        self._is_over = threading.Event()
        self._failure: BaseException | None = None

    def run(self) -> None:
        try:
            with FlightClient(self._address) as client:
                schema = pa.schema([("payload", pa.binary())])
                streams = [publishing(client, name, schema, create=True) for name in TOPICS]
                while not self._is_over.wait(0.1):
                    payloads = [payload_of(self.sent + number) for number in range(20)]
                    for stream in streams:
                        stream.write(pa.record_batch([pa.array(payloads, pa.binary())], schema))
                        stream.flush()
                    self.sent += len(payloads)
                for stream in streams:
                    stream.close()
        except BaseException as error:
            self._failure = error

    def check(self) -> bool:
        """Whether it has sent anything; nothing has gone wrong."""
        assert self._failure is None, self._failure
        return self.sent > 0

    def end(self) -> None:
        """No more messages. May be called twice."""
        self._is_over.set()
        if self.is_alive():
            self.join()
        self.check()


class Scene:
    """A broker under load, and what can be seen from outside."""

    def __init__(self, directory, broker: BrokerProcess, load: Load) -> None:
        self.directory = directory
        self.broker = broker
        self.load = load
        self.config = str(directory / "ister.yml")
        self._client = FlightClient(broker.flight)
        metadata = load_config(self.config).storage.metadata
        self._keys = PipelineKeys(metadata.root_prefix)
        self._store = open_metadata(metadata, SystemClock(), read_only=True)

    def close(self) -> None:
        try:
            self.load.end()
        finally:
            self._client.close()
            self._store.close()

    @property
    def made_by_broker(self) -> int:
        """How many objects it has committed."""
        with urllib.request.urlopen(f"http://{self.broker.http}/metrics", timeout=60) as answer:
            found = _CREATED.search(answer.read().decode())
        return int(float(found[1])) if found else 0

    @property
    def holder(self) -> str | None:
        """Who has the pipeline's lease."""
        found = read_holder(self._store, self._keys.lease)
        return found.id if found is not None else None

    @property
    def status(self) -> dict:
        """What the service has said last."""
        found = self._store.get(self._keys.status)
        return json.loads(found.value) if found is not None else {}

    @property
    def objects(self) -> int:
        """How many there are, whoever has committed them."""
        with ister.open_bucket(self.config) as history:
            return sum(len(list(history.topic(name).catalog.descriptors())) for name in TOPICS)

    def marks(self) -> list:
        found = self._client.watermarks(TOPICS)
        return [found[name] for name in TOPICS]

    def wait_for_uploads(self) -> None:
        """Returns when all that is durable now is in the bucket, and the broker knows."""
        goals = [status.synced for status in self.marks()]

        def is_reached() -> bool:
            return all(
                status.tiered >= goal for status, goal in zip(self.marks(), goals, strict=True)
            )

        eventually(is_reached, "uploads go on", within=PATIENCE)

    def check(self) -> dict:
        """Every offset is in the bucket once, in one object, as it was sent; figures."""
        self.load.end()
        eventually(
            lambda: all(status.tiered == self.load.sent for status in self.marks()),
            "everything is in the bucket",
            within=PATIENCE,
        )
        objects = 0
        with ister.open_bucket(self.config) as history:
            for name in TOPICS:
                topic = history.topic(name)
                found = [described for described, _ in topic.catalog.descriptors()]
                assert found[0].start == 0
                assert found[-1].end == self.load.sent
                for before, after in pairwise(found):
                    assert before.end == after.start, f"{before.object_id}, {after.object_id}"
                rows = topic.read_arrow().read_all()
                assert rows["offset"].to_pylist() == list(range(self.load.sent))
                payloads = [payload_of(offset) for offset in range(self.load.sent)]
                assert rows["payload"].to_pylist() == payloads
                objects += len(found)
        return {"messages": 2 * self.load.sent, "objects": objects}


@contextmanager
def under_load(directory, engine: str, *, interval_seconds: int = 1):
    settings = {
        "storage": {
            "wal": {"rotate_max_bytes": 65536},
            "uploader": {
                "engine": engine,
                "interval_seconds": interval_seconds,
                "max_object_bytes": 65536,
            },
            "metadata": {"lease_ttl_seconds": TTL},
        }
    }
    with BrokerProcess(directory, settings=settings) as broker:
        load = Load(broker.flight)
        scene = Scene(directory, broker, load)
        load.start()
        try:
            eventually(load.check, "messages are sent", within=PATIENCE)
            yield scene
        finally:
            scene.close()


class Pipeline:
    """`ister pipeline …` in a process, and all that it starts; a context manager."""

    def __init__(self, scene: Scene, *arguments: str) -> None:
        self._errors = scene.directory / f"pipeline-{time.monotonic_ns()}.log"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ister.cli.main", "pipeline", *arguments),
                    *("--config", scene.config, "--json", "--master", "local[2]"),
                    *("--conf", "spark.driver.memory=1g"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=spark_environment(scene.directory),
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - one system call
            )

    def kill(self) -> None:
        """Ends all of it at once."""
        kill_session(self._process.pid)
        self._process.wait()

    def stop(self) -> dict:
        """Ends it in order; its report."""
        self._process.send_signal(signal.SIGTERM)
        output, _ = self._process.communicate(timeout=PATIENCE)
        assert self._process.returncode == 0, self._errors.read_text()[-4000:]
        return json.loads(output)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.stdout.close()


def wait_for_pipeline(scene: Scene) -> str:
    """Returns when one has the lease, says what it has uploaded, and the broker leaves it to it."""
    eventually(lambda: scene.holder, "a pipeline has the lease", within=PATIENCE)
    holder = scene.holder
    eventually(
        lambda: (
            scene.status.get("holder") == holder
            and scene.status.get("tier", {}).get("tiered_messages_total")
        ),
        "the pipeline uploads",
        within=PATIENCE,
    )
    # The broker looks a few times in a lease's time, and has an upload under way at most.
    time.sleep(TTL / 2)
    before = scene.made_by_broker
    for _ in range(2):
        scene.wait_for_uploads()
    assert scene.made_by_broker == before, "the broker uploads what is the pipeline's"
    return holder


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_broker_takes_over_from_a_dead_pipeline_and_hands_back(tmp_path, request):
    """Goal: the pipeline dies under load, and no upload is lost, late or done twice.

    Method: a broker with engine auto leaves its uploads to `ister pipeline run`. That is killed,
    with all it has started, and the broker has to upload within two lease times. The next one gets
    the uploads back; at its end in order the broker takes over at once.
    """
    started = time.monotonic()
    late: list[float] = []
    with under_load(tmp_path, "auto") as scene:
        eventually(lambda: scene.made_by_broker, "the broker uploads by itself", within=PATIENCE)
        holders = set()
        for _ in range(DEATHS):
            with Pipeline(scene, "run") as pipeline:
                holders.add(wait_for_pipeline(scene))
                before = scene.made_by_broker
                pipeline.kill()
                killed_at = time.monotonic()
                eventually(lambda before=before: scene.made_by_broker > before, "it takes over")
                late.append(round(time.monotonic() - killed_at, 1))
                scene.wait_for_uploads()
        with Pipeline(scene, "run") as pipeline:
            holders.add(wait_for_pipeline(scene))
            report = pipeline.stop()
        assert report["ok"] is True, report
        assert scene.holder is None
        before = scene.made_by_broker
        eventually(lambda: scene.made_by_broker > before, "the broker has it back")
        figures = scene.check()
        scene.broker.stop()
    assert len(holders) == DEATHS + 1
    figures |= {"taken_over_seconds": late, "lease_seconds": TTL}
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"test": request.node.name, **figures, "seconds": seconds}))
    assert max(late) < 2 * TTL, late


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_both_engines_at_once_upload_each_offset_once(tmp_path, request):
    """Goal: a broker that uploads by itself, and a pipeline that does, do not do it twice.

    Method: engine embedded beside `ister pipeline tier --interval`, until both have uploaded.
    """
    started = time.monotonic()
    with under_load(tmp_path, "embedded", interval_seconds=2) as scene:
        with Pipeline(scene, "tier", "--interval", "0.2") as pipeline:
            eventually(lambda: scene.holder, "the pipeline has the lease", within=PATIENCE)
            before = scene.made_by_broker
            eventually(
                lambda: (
                    scene.made_by_broker >= before + 5 and scene.objects - scene.made_by_broker >= 5
                ),
                "both upload",
                within=PATIENCE,
            )
            scene.wait_for_uploads()
            report = pipeline.stop()
        assert report["ok"] is True, report
        figures = scene.check()
        made = scene.made_by_broker
        scene.broker.stop()
    by_pipeline = sum(topic["objects"] for topic in report["topics"])
    # An object that both have made in the same second is the same: each may take it for its own.
    assert made + by_pipeline >= figures["objects"]
    assert by_pipeline > 0
    figures |= {"by_broker": made, "by_pipeline": by_pipeline}
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"test": request.node.name, **figures, "seconds": seconds}))
