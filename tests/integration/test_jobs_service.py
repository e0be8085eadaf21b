"""The pipeline as a service on Spark: uploads change hands, and each offset is tiered once."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from ister.base.clock import SystemClock
from ister.bucket.fence import read_holder
from ister.bucket.pipeline import PipelineKeys, request_job
from ister.config import load_config
from ister.spark.jobs.pipeline_term import SlowJob, TermSettings, sample_memory
from ister.spark.jobs.service import Service, requested_job, run
from ister.spark.jobs.tasks import run_tasks
from ister.spark.location import place_of
from tests.integration.spark_topics import SparkPlace, objects_of
from tests.support.waiting import eventually

A, B = "/default/a", "/default/b"
TTL = 4
LIMIT = 180.0
CHILD = str(Path(__file__).parent / "service_child.py")


@pytest.fixture
def place(tmp_path):
    return SparkPlace(
        tmp_path,
        metadata={"lease_ttl_seconds": TTL},
        uploader={"engine": "auto", "interval_seconds": 1, "max_object_bytes": 64 * 1024},
    )


class Writer:
    """The owner of a log that goes on writing; nothing else in this process uploads for Spark."""

    def __init__(self, place):
        self.log = place.open()
        self.topics = [self.log.topic(name, create=True) for name in (A, B)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.end()
        self.log.close()

    def end(self):
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _write(self):
        number = 0
        while not self._stop.wait(0.02):
            for topic in self.topics:
                topic.append(b"%d" % number * 20)
            number += 1

    @property
    def tiered(self):
        return sum(topic.watermarks.tiered for topic in self.topics)

    @property
    def metadata(self):
        return self.log.stores.metadata

    @property
    def keys(self):
        return PipelineKeys(self.log.config.storage.metadata.root_prefix)

    @property
    def has_pipeline(self):
        return self.metadata.get(self.keys.lease) is not None

    @property
    def status(self):
        found = self.metadata.get(self.keys.status)
        return json.loads(found.value) if found is not None else {}

    def ask(self, job, topics):
        request_job(self.metadata, self.keys, job, by="user:a", topics=topics, clock=SystemClock())

    def done(self, job):
        """What has become of a request, once it is done."""
        found = (self.status.get("requests") or {}).get(job)
        return found if found is not None and found["ended_at"] is not None else None

    def advances(self, what, *, within=LIMIT):
        """Waits until what is written now is tiered."""
        goals = [(topic, topic.watermarks.synced) for topic in self.topics]
        eventually(
            lambda: all(topic.watermarks.tiered >= goal for topic, goal in goals),
            what,
            within=within,
        )

    def check(self):
        """Each offset is in one object, and reads as it was written."""
        self.end()
        for topic in self.topics:
            topic.flush()
            self.advances("everything is tiered")
            described = objects_of(topic)
            assert described[0].start == 0
            for before, after in itertools.pairwise(described):
                assert after.start == before.end
            assert described[-1].end == topic.watermarks.next
            found = [message.payload for message in topic.read()]
            assert found == [b"%d" % number * 20 for number in range(len(found))]


@contextmanager
def in_this_process(spark, place, **settings):
    stop = threading.Event()
    reports = []
    thread = threading.Thread(
        target=lambda: reports.append(run(spark, place.config, stop=stop, **settings))
    )
    thread.start()
    try:
        yield reports
    finally:
        stop.set()
        thread.join(LIMIT)
        assert not thread.is_alive()


def test_service_uploads_for_a_log_and_gives_uploads_back(spark, place):
    with Writer(place) as writer:
        with in_this_process(spark, place) as reports:
            eventually(lambda: writer.has_pipeline, "the lease")
            eventually(
                lambda: writer.status.get("tier", {}).get("tiered_messages_total"),
                "the service tiers",
            )
            writer.advances("the service has tiered")
            status = eventually(
                lambda: writer.status if writer.status["tier"]["topics"] == 2 else None, "status"
            )
            assert status["state"] == "running"
            assert status["memory"]["jvm_rss_bytes"] > 10**8
            assert set(status["jobs"]) == {"resort", "compact", "gc", "scrub"}
            # What somebody asks for does not wait for its time, which is hours away.
            for job, topics in (("scrub", [A]), ("tier", None)):
                writer.ask(job, topics)
                done = eventually(lambda: writer.done(job), f"{job} is done")  # noqa: B023
                assert done["error"] is None, done
            scrubbed = json.loads(writer.metadata.get(writer.keys.report("scrub")).value)
            assert [topic["topic"] for topic in scrubbed["topics"]] == [A]
        assert not writer.has_pipeline
        [report] = reports
        assert report.ok
        assert report.more["tier"]["tiered_messages_total"] > 0
        writer.advances("the log uploads by itself again")
        writer.check()


def start_child(place):
    return subprocess.Popen(
        [sys.executable, CHILD, "--config", place.config, "--json", "--master", "local[2]"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.nightly
def test_service_that_is_killed_is_replaced_by_the_log_and_hands_back(place):
    children = []
    try:
        with Writer(place) as writer:
            children.append(start_child(place))
            eventually(
                lambda: writer.status.get("tier", {}).get("tiered_messages_total"),
                "the first service tiers",
            )
            first = read_holder(writer.metadata, writer.keys.lease).id
            children[0].kill()
            children[0].wait()
            killed_at = time.monotonic()
            eventually(lambda: not writer.has_pipeline, "the lease ends", within=2 * TTL + 5)
            writer.advances("the log has taken over", within=2 * TTL + 15)
            assert time.monotonic() - killed_at < 2 * TTL + 20
            children.append(start_child(place))
            eventually(
                lambda: (
                    writer.has_pipeline
                    and read_holder(writer.metadata, writer.keys.lease).id != first
                ),
                "the second service has the lease",
            )
            eventually(
                lambda: (
                    writer.status.get("holder") != first
                    and writer.status.get("tier", {}).get("tiered_messages_total")
                ),
                "the second service tiers",
            )
            children[1].send_signal(signal.SIGTERM)
            output, _ = children[1].communicate(timeout=LIMIT)
            assert children[1].returncode == 0
            report = json.loads(output)
            assert report["ok"] is True
            assert report["tier"]["tiered_messages_total"] > 0
            assert not writer.has_pipeline
            writer.check()
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()


# -- for days -----------------------------------------------------------------------------------


def double(number):
    return 2 * number


def cycle_on_spark(job, *_):
    found = [done.result for done in run_tasks(job.spark, [1, 2], double)]
    assert sorted(found) == [2, 4]
    return SimpleNamespace(due=2, objects=0, messages=0, bytes=0, failed=0)


def figures(spark):
    """Threads and open files of the driver, threads of the JVM, and memory."""
    jvm = spark.sparkContext._gateway.proc.pid
    status = Path(f"/proc/{jvm}/status").read_text()
    return {
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "jvm_threads": int(status.partition("Threads:")[2].split()[0]),
        "rss": sample_memory()["driver_rss_bytes"],
    }


GROWTH_MAX = {"threads": 3, "files": 10, "jvm_threads": 20, "rss": 30 * 2**20}
CYCLES, WINDOWS = 100, 4


@pytest.mark.nightly
def test_hundreds_of_spark_jobs_leave_nothing_behind(spark, place):
    # What a job leaves behind, every hundred jobs leave a hundred of. Spark's pools grow too while
    # a machine is busy, each up to a bound: so one hundred without growth shows that there is none.
    found = place_of(load_config(place.config))
    service = Service(
        spark,
        found,
        TermSettings(
            tier=cycle_on_spark,
            jobs=(SlowJob(name="compact", every_seconds=0.5, work=cycle_on_spark),),
            make_job=requested_job,
            tick_seconds=0.0,
            status_seconds=0.2,
        ),
        clock=SystemClock(),
    )
    stop = threading.Event()
    thread = threading.Thread(target=service.run, args=(stop,))
    thread.start()
    grown = []
    try:
        eventually(lambda: service._totals.cycles >= 30, "some cycles")
        for _ in range(WINDOWS):
            before, goal = figures(spark), service._totals.cycles + CYCLES
            eventually(lambda: service._totals.cycles >= goal, "many cycles", within=2 * LIMIT)  # noqa: B023
            after = figures(spark)
            grown.append({name: after[name] - before[name] for name in GROWTH_MAX})
            if is_steady(grown[-1]):
                break
    finally:
        stop.set()
        thread.join(LIMIT)
    assert is_steady(grown[-1]), grown


def is_steady(grown):
    return all(grown[name] <= most for name, most in GROWTH_MAX.items())
