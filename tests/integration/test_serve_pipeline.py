"""`ister serve --pipeline`: a broker with its pipeline beside it, each a process."""

import json
import os
import signal
import subprocess
import sys

import pyarrow as pa
import pytest

from ister.bucket.fence import read_holder
from ister.bucket.pipeline import PipelineKeys
from ister.client.flight import FlightClient
from ister.clock import SystemClock
from ister.config import load_config
from ister.topic.stores import open_metadata
from support.waiting import eventually

TOPIC = "/default/orders"
LIMIT = 120.0
SERVE = (sys.executable, "-m", "ister.cli.main", "serve", "--pipeline")


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.nightly
def test_broker_starts_a_pipeline_that_uploads_and_ends_with_it(tmp_path):
    config = tmp_path / "ister.yml"
    config.write_text(
        json.dumps(
            {
                "storage": {
                    "wal": {"dir": str(tmp_path / "wal")},
                    "uploader": {"interval_seconds": 1},
                    "metadata": {"lease_ttl_seconds": 3},
                },
                "pipeline": {"conf": {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}},
            }
        )
    )
    ports = [f"--{name}=0" for name in ("port", "flight-port", "http-port")]
    with (tmp_path / "log").open("wb") as log:
        broker = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ister.cli.main",
                "serve",
                f"--config={config}",
                "--pipeline",
                "--json",
                *ports,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        ready = json.loads(broker.stdout.readline())
        settings = load_config(str(config))
        keys = PipelineKeys(settings.storage.metadata.root_prefix)
        store = open_metadata(settings.storage.metadata, SystemClock(), read_only=True)
        try:
            holder = eventually(lambda: read_holder(store, keys.lease), "the pipeline's lease")
            assert holder.about["job"] == "run"
            pipeline = int(holder.about["process"])
            assert pipeline != broker.pid
            _publish(ready["flight"])
            with FlightClient(ready["flight"]) as client:
                eventually(lambda: client.watermarks([TOPIC])[TOPIC].tiered == 100, "all is tiered")
            eventually(
                lambda: _status(store, keys).get("tier", {}).get("tiered_messages_total") == 100,
                "it was the pipeline that tiered it",
            )
            # One that dies is started again.
            os.kill(pipeline, signal.SIGKILL)
            eventually(
                lambda: (
                    (found := read_holder(store, keys.lease)) is not None
                    and found.about["process"] != pipeline
                    and found
                ),
                "another pipeline has the lease",
            )
            second = int(read_holder(store, keys.lease).about["process"])
            broker.send_signal(signal.SIGTERM)
            assert broker.wait(30) == 0
            assert not is_alive(second)
            assert read_holder(store, keys.lease) is None
        finally:
            store.close()
    finally:
        if broker.poll() is None:
            broker.kill()
            broker.wait()
        broker.stdout.close()


def _publish(flight):
    rows = pa.record_batch({"payload": pa.array([b"%d" % n for n in range(100)], pa.binary())})
    with FlightClient(flight) as client, client.publish(TOPIC, rows.schema, create=True) as stream:
        stream.write(rows)
        stream.flush()


def _status(store, keys):
    found = store.get(keys.status)
    return json.loads(found.value) if found is not None else {}


def test_broker_says_what_is_missing(tmp_path):
    done = subprocess.run(
        [*SERVE, f"--data-dir={tmp_path}"],
        env={**os.environ, "JAVA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "Java 17" in done.stderr
