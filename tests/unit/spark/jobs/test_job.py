"""A job's frame: which topics are meant, its lease and its report."""

from __future__ import annotations

import json

import pytest

from ister.base.clock import SystemClock
from ister.bucket.fence import Fence
from ister.bucket.pipeline import PipelineKeys
from ister.config import load_config
from ister.errors import ConflictError, FencedError, NotFoundError
from ister.spark.jobs import job as jobs
from ister.spark.jobs.job_report import JobReport
from ister.spark.jobs.leases import LeaseKeeper
from ister.topic.stores import open_metadata
from tests.integration.spark_topics import SparkPlace
from tests.support.cases import case
from tests.support.clock import ManualClock
from tests.support.memory_metadata import MemoryMetadata
from tests.support.spark_here import SparkHere

TOPICS = ["/a/orders", "/a/prices", "/b/orders"]


def test_topics_are_names_and_patterns():
    for wanted, chosen in [
        (None, TOPICS),
        ("", TOPICS),
        ("/a/*", ["/a/orders", "/a/prices"]),
        ("/b/orders, /a/orders", ["/a/orders", "/b/orders"]),
        ("*/orders,/a/orders", ["/a/orders", "/b/orders"]),
        (["/a/price?"], ["/a/prices"]),
        ("/c/*", []),
    ]:
        with case(wanted, chosen):
            assert jobs.choose_topics(jobs.parse_topics(wanted), TOPICS) == chosen


def test_name_of_no_topic_is_refused_with_those_that_there_are():
    with pytest.raises(NotFoundError, match="/a/order") as refused:
        jobs.choose_topics(["/a/order"], TOPICS)
    assert "/a/orders" in refused.value.hint


def test_only_one_has_an_exclusive_key_and_the_other_is_told_who():
    clock = ManualClock()
    store = MemoryMetadata(clock)
    leases = LeaseKeeper(store, ttl_seconds=15, clock=clock, thread="ister-test")
    first = leases.take("/danube/pipeline/lease", {"job": "tier"})
    with pytest.raises(ConflictError, match="tier on") as refused:
        leases.take("/danube/pipeline/lease", {"job": "run"})
    assert "15 seconds" in refused.value.hint
    first.release()
    second = leases.take("/danube/pipeline/lease", {"job": "run"})
    with pytest.raises(FencedError):
        first.check()
    second.check()


def test_lease_that_ended_is_noticed():
    clock = ManualClock()
    store = MemoryMetadata(clock)
    fence = Fence.take(store, "/k", id="a", about={}, ttl_seconds=10, clock=clock)
    assert fence.is_valid
    clock.advance(11)
    assert not fence.is_valid
    with pytest.raises(FencedError):
        fence.renew()


def test_saved_report_fits_into_the_metadata_store():
    for topics, findings in [(1, 100_000), (5000, 10), (300, 3000), (0, 0)]:
        with case(topics, findings):
            report = JobReport("scrub")
            for number in range(topics):
                report.of(f"/ns/{number}")["findings"] = [
                    {"kind": "gap", "offset": n} for n in range(findings)
                ]
                report.fail(NotFoundError("gone", topic=f"/ns/{number}"))
            data = jobs.shorten(report)
            assert len(data) <= 256 * 1024
            short = json.loads(data)
            assert short["topics_total"] == topics
            assert short["ok"] is (topics == 0)
            assert len(report.as_json()["topics"]) == topics, "the report itself stays whole"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (NotFoundError("no such thing", hint="look"), "NOT_FOUND", "no such thing"),
        (RuntimeError("Spark is gone"), "INTERNAL", "Spark is gone"),
        (RuntimeError("x" * 1_000_000), "INTERNAL", "xxx"),
        (KeyboardInterrupt(), "INTERNAL", "KeyboardInterrupt"),
    ],
    ids=["ours", "another", "a long one", "interrupted"],
)
def test_report_of_a_job_that_an_exception_ended_is_not_ok(tmp_path, error, code, said):
    config = SparkPlace(tmp_path).config

    def work():
        with jobs.open_job("compact", SparkHere(), config) as job:
            job.report.add("/a/orders", objects=3)
            raise error

    with pytest.raises(type(error)) as raised:
        work()
    assert raised.value is error
    metadata = load_config(config).storage.metadata
    store = open_metadata(metadata, SystemClock())
    try:
        found = store.get(PipelineKeys(metadata.root_prefix).report("compact")).value
    finally:
        store.close()
    assert len(found) < 10_000
    saved = json.loads(found)
    assert saved["ok"] is False
    (told,) = saved["errors"]
    assert told["code"] == code
    assert said in told["message"]
    assert saved["topics"][0]["objects"] == 3


def test_error_that_a_job_has_told_itself_is_told_once():
    report, error = JobReport("compact"), NotFoundError("no such thing")
    report.fail(error)
    jobs._record_end(report, error)
    assert len(report.errors) == 1
