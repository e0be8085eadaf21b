"""The pipeline as a service, without Spark: whose turn it is, and what goes on beside what."""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ister.base.clock import SystemClock
from ister.bucket.fence import read_holder
from ister.bucket.pipeline import PipelineKeys, read_requests, request_job
from ister.config import Engine, load_config
from ister.errors import ConflictError, FencedError, InvalidRequestError, UnavailableError
from ister.metadata.base import Put
from ister.spark.jobs import pipeline_term, service
from ister.spark.jobs.pipeline_term import SlowJob, TermSettings
from ister.spark.jobs.service import Service, requested_job, run_once, scheduled_jobs
from ister.spark.location import _close_all, place_of
from ister.topic.log import Log
from ister.topic.stores import open_metadata
from tests.support.cases import case
from tests.support.machine import eventually
from tests.support.spark_here import SparkHere

TTL = 2
LIMIT = 60.0


@pytest.fixture
def config(tmp_path):
    tree = {
        "wal": {"dir": str(tmp_path / "wal")},
        "cloud": {"root": str(tmp_path / "objects")},
        "metadata": {"path": str(tmp_path / "metadata.db"), "lease_ttl_seconds": TTL},
    }
    return load_config({"storage": tree}, {})


@pytest.fixture
def place(config):
    yield place_of(config)
    _close_all()


@pytest.fixture
def store(config):
    found = open_metadata(config.storage.metadata, SystemClock())
    yield found
    found.close()


@pytest.fixture
def keys(config):
    return PipelineKeys(config.storage.metadata.root_prefix)


class Tier:
    """Cycles that upload nothing, and count; one that is told to takes its time."""

    def __init__(self, act=lambda job: None):
        self.cycles = 0
        self.holders = set()
        self._act = act

    def __call__(self, job, topics, report, only_due):
        self.cycles += 1
        self.holders.add(job.fence.id)
        self._act(job)
        return SimpleNamespace(due=0, objects=1, messages=10, bytes=100, failed=0)


class Running:
    """A service on a thread of its own."""

    def __init__(self, place, tier, jobs=(), **settings):
        settings = {"tick_seconds": 0.02, "status_seconds": 0.05, "make_job": Asked(), **settings}
        spark = settings.pop("spark", SparkHere())
        what = TermSettings(tier=tier, jobs=tuple(jobs), **settings)
        self.service = Service(spark, place, what, clock=SystemClock())
        self.stop = threading.Event()
        self.report = None
        self.error = None
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            self.report = self.service.run(self.stop)
        except Exception as error:
            self.error = error

    def start(self):
        self._thread.start()
        return self

    def end(self):
        self.stop.set()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()
        return self.report


@contextmanager
def running(*arguments, **settings):
    one = Running(*arguments, **settings).start()
    try:
        yield one
    finally:
        one.end()


def status_of(store, keys):
    found = store.get(keys.status)
    return json.loads(found.value) if found is not None else {}


# -- one --------------------------------------------------------------------------------------


def test_service_tiers_says_how_it_is_and_gives_the_lease_back(place, store, keys):
    tier = Tier()
    with running(place, tier) as one:
        eventually(lambda: status_of(store, keys).get("cycles", 0) >= 3)
        status = status_of(store, keys)
        holder = read_holder(store, keys.lease)
        assert status["state"] == "running"
        assert status["holder"] == holder.id
        assert holder.about["job"] == "run"
        assert status["tier"]["tiered_bytes_total"] == 100 * status["tier"]["tiered_objects_total"]
        assert status["memory"]["driver_rss_bytes"] > 10**7
        report = one.end()
    assert store.get(keys.lease) is None
    assert report.ok
    assert report.more["cycles"] == tier.cycles
    assert status_of(store, keys)["state"] == "stopped"
    assert json.loads(store.get(keys.report("tier")).value)["job"] == "tier"


def test_service_ends_after_its_time(place, store, keys):
    one = Running(place, Tier()).service
    report = one.run(threading.Event(), max_seconds=0.5)
    assert report.more["cycles"] >= 1
    assert store.get(keys.lease) is None


def test_stop_is_heeded_while_a_cycle_takes_long(place, store, keys):
    """The lease goes at once, and what is under way is cancelled."""
    cancelled = threading.Event()

    class Spark(SparkHere):
        def cancel(self):
            cancelled.set()

    def hang(job):
        assert cancelled.wait(LIMIT)
        assert store.get(keys.lease) is None
        raise RuntimeError("cancelled")

    tier = Tier(hang)
    with running(place, tier, spark=Spark()) as one:
        eventually(lambda: tier.cycles)
        report = one.end()
    assert report is not None
    assert cancelled.is_set()


# -- two --------------------------------------------------------------------------------------


def test_second_service_stands_by_and_takes_over(place, store, keys):
    first, second = Tier(), Tier()
    with running(place, first) as one:
        eventually(lambda: first.cycles)
        with running(place, second) as other:
            eventually(lambda: first.cycles > 20)
            assert second.cycles == 0
            one.end()
            stopped_at = first.cycles
            eventually(lambda: second.cycles)
            assert first.cycles == stopped_at
            other.end()
    assert not first.holders & second.holders


def test_lease_that_is_lost_is_taken_again_and_nothing_is_committed_between(place, store, keys):
    refused = []

    def commit(job):
        changed = job.store.transact([job.fence.compare], [Put("/test/commit", b"x")])
        if changed is None:
            refused.append(job.fence.id)
            job.fence.check()

    tier = Tier(commit)
    with running(place, tier) as one:
        eventually(lambda: tier.cycles > 3)
        # As if it had been stopped for longer than its lease.
        store.delete(keys.lease)
        eventually(lambda: len(tier.holders) == 2)
        one.end()
        assert one.report.more["terms"] == 2
    assert len(refused) <= 1


def test_store_that_does_not_answer_for_a_while(place, store, keys, monkeypatch):
    broken = threading.Event()
    known = service.open_job

    @contextmanager
    def opening(*arguments, **settings):
        if broken.is_set():
            raise UnavailableError("no answer")
        with known(*arguments, **settings) as job:
            yield job

    monkeypatch.setattr(service, "open_job", opening)
    broken.set()
    tier = Tier()
    with running(place, tier) as one:
        eventually(lambda: one.service._last_error)
        broken.clear()
        eventually(lambda: tier.cycles)
        assert one.end().ok


# -- failures ---------------------------------------------------------------------------------


def test_cycle_that_fails_is_followed_by_others(place, store, keys, monkeypatch):
    monkeypatch.setattr(pipeline_term, "_FAILURE_SECONDS", 0.01)
    results = iter([ConflictError("a"), RuntimeError("b"), KeyError("c")])

    def fail(job):
        if (error := next(results, None)) is not None:
            raise error

    tier = Tier(fail)
    with running(place, tier) as one:
        eventually(lambda: one.service._totals.cycles > 2)
        assert len(tier.holders) == 1


def test_spark_that_has_ended_ends_the_service(place):
    class Stopped(SparkHere):
        is_stopped = True

    def fail(job):
        raise RuntimeError("connection refused")

    one = Running(place, Tier(fail), spark=Stopped()).start()
    eventually(lambda: one.error is not None)
    assert isinstance(one.error, UnavailableError)
    one.end()


def test_slow_and_failing_jobs_hold_nobody_up(place, store, keys, monkeypatch):
    monkeypatch.setattr("ister.spark.jobs.pipeline_term._OVERDUE_SECONDS", 0.01)
    monkeypatch.setattr("ister.spark.jobs.pipeline_term._RETRY_SECONDS", 0.05)
    runs = Counter()
    release = threading.Event()

    def fail(job):
        runs["bad"] += 1
        raise ValueError("always")

    def work(job):
        runs["good"] += 1
        assert job.name == "good"
        assert job.fence.key != keys.lease

    def slow(job):
        runs["slow"] += 1
        release.wait(LIMIT)

    jobs = [
        SlowJob(name="bad", every_seconds=0.05, work=fail),
        SlowJob(name="good", every_seconds=0.05, work=work),
        SlowJob(name="slow", every_seconds=3600, work=slow),
    ]
    tier = Tier()
    with running(place, tier, jobs):
        eventually(lambda: runs["slow"])
        before = tier.cycles
        eventually(lambda: tier.cycles > before + 10)
        eventually(lambda: status_of(store, keys)["jobs"]["slow"]["is_running"])
        release.set()
        eventually(lambda: runs["good"] > 2 and runs["bad"] > 2)
        eventually(lambda: status_of(store, keys)["jobs"]["bad"]["last_ok"] is False)
        eventually(lambda: status_of(store, keys)["jobs"]["good"]["last_ok"])
        assert status_of(store, keys)["jobs"]["bad"]["last_error"] == "ValueError: always"


def test_slow_job_commits_nothing_once_the_lease_is_lost(place, store, keys, monkeypatch):
    monkeypatch.setattr("ister.spark.jobs.pipeline_term._OVERDUE_SECONDS", 0.01)
    results = []

    def slow(job):
        store.delete(keys.lease)
        eventually(lambda: store.get(job.fence.key) is None)
        try:
            job.fence.check()
        except FencedError as error:
            results.append(error)

    with running(place, Tier(), [SlowJob(name="slow", every_seconds=3600, work=slow)]):
        eventually(lambda: results)


# -- the lag ----------------------------------------------------------------------------------


def replace_engine(config):
    uploader = replace(config.storage.uploader, engine=Engine.NONE)
    return replace(config, storage=replace(config.storage, uploader=uploader))


# -- once -------------------------------------------------------------------------------------


def test_jobs_run_with_their_settings(config, tmp_path):
    with Log(replace_engine(config)) as log:
        topic = log.topic("/default/a", create=True)
        topic.append_many([b"x"] * 20)
        topic.flush()
    export = replace(config.pipeline.export, to=str(tmp_path / "table"))
    config = replace(config, pipeline=replace(config.pipeline, export=export))
    report = run_once(SparkHere(), config, jobs=["tier", "export", "scrub"])
    _close_all()
    assert report.ok, report.errors
    done = report.topics["/default/a"]
    assert (done["tier"]["messages"], done["export"]["messages"]) == (20, 20)
    assert done["scrub"]["findings"] == []
    assert list((tmp_path / "table").rglob("*.parquet"))


# -- settings ---------------------------------------------------------------------------------


def test_jobs_that_the_settings_ask_for():
    for pipeline, expected in [
        ({}, {"compact": 3600, "gc": 3600, "scrub": 86400}),
        (
            {"compact": {"every_minutes": None}, "scrub": {"every_minutes": 2}},
            {"gc": 3600, "scrub": 120},
        ),
        (
            {"export": {"to": "/lake/{topic}", "every_minutes": 5}},
            {"compact": 3600, "export": 300, "gc": 3600, "scrub": 86400},
        ),
    ]:
        with case(pipeline, expected):
            storage = {"wal": {"dir": "/x"}, "uploader": {"engine": "embedded"}}
            found = scheduled_jobs(load_config({"storage": storage, "pipeline": pipeline}, {}))
            assert {job.name: job.every_seconds for job in found} == expected


# -- requests ---------------------------------------------------------------------------------


class Asked:
    """Jobs that are made when somebody asks for them."""

    def __init__(self, act=lambda name: None):
        self.done = []
        self._act = act

    def __call__(self, name, topics):
        def work(job):
            self._act(name)
            self.done.append((name, topics))

        return SlowJob(name=name, every_seconds=float("inf"), work=work)


def ask(store, keys, job, topics=None):
    """Asks as soon as somebody is there to do it."""

    def try_it():
        try:
            return request_job(store, keys, job, by="user:a", topics=topics, clock=SystemClock())
        except ConflictError:
            return None

    return eventually(try_it)


def request_of(store, keys, job):
    return (status_of(store, keys).get("requests") or {}).get(job) or {}


def test_job_without_a_schedule_is_done_when_somebody_asks(place, store, keys):
    began, goes_on = threading.Event(), threading.Event()

    def act(name):
        began.set()
        assert goes_on.wait(LIMIT)

    asked = Asked(act)
    with running(place, Tier(), make_job=asked, request_seconds=0.02):
        ask(store, keys, "scrub", ["/default/t"])
        assert began.wait(LIMIT)
        # Its key is gone, and the status says that it runs.
        assert read_requests(store, keys) == []
        running_now = request_of(store, keys, "scrub")
        assert (running_now["state"], running_now["by"]) == ("running", "user:a")
        assert running_now["topics"] == ["/default/t"]
        # Another one waits for its turn.
        ask(store, keys, "compact")
        assert [one.job for one in read_requests(store, keys)] == ["compact"]
        goes_on.set()
        eventually(lambda: request_of(store, keys, "compact").get("state") == "done")
        done = request_of(store, keys, "scrub")
        assert (done["state"], done["error"]) == ("done", None)
        assert done["ended_at"] >= done["started_at"] >= done["requested_at"]
    assert asked.done == [("scrub", ("/default/t",)), ("compact", None)]
    assert json.loads(store.get(keys.report("scrub")).value)["job"] == "scrub"


def test_uploads_that_somebody_asks_for_do_not_wait_for_their_time(place, store, keys, config):
    with Log(config, background=False) as log:
        log.topic("/default/t", create=True)
    cycles = []

    class Now(Tier):
        def __call__(self, job, topics, report, only_due):
            if not only_due:
                cycles.append(list(topics))
            return super().__call__(job, topics, report, only_due)

    with running(place, Now()):
        ask(store, keys, "tier", ["/default/t", "/default/none"])
        eventually(lambda: request_of(store, keys, "tier").get("state") == "done")
        assert cycles == [["/default/t"]]
        ask(store, keys, "tier")
        eventually(lambda: len(cycles) == 2)
        assert cycles[1] == ["/default/t"]


def test_requests_that_cannot_be_done_say_why(place, store, keys):
    def refuse(name, topics):
        raise InvalidRequestError("it has no place to go")

    with running(place, None, make_job=refuse, request_seconds=0.02):
        for job, why in {"export": "no place", "tier": "does not upload"}.items():
            ask(store, keys, job)
            eventually(lambda: request_of(store, keys, job).get("state") == "failed")  # noqa: B023
            assert why in request_of(store, keys, job)["error"]

    def fail(name):
        raise RuntimeError("broken")

    with running(place, Tier(), make_job=Asked(fail), request_seconds=0.02):
        ask(store, keys, "compact")
        eventually(lambda: request_of(store, keys, "compact").get("state") == "failed")
        assert "broken" in request_of(store, keys, "compact")["error"]


def test_request_of_yesterday_is_forgotten(place, store, keys):
    old = {"requested_at": 1, "by": "user:a", "topics": None}
    store.put(keys.request("scrub"), json.dumps(old).encode())
    asked, tier = Asked(), Tier()
    with running(place, tier, make_job=asked, request_seconds=0.02):
        eventually(lambda: store.get(keys.request("scrub")) is None)
        eventually(lambda: tier.cycles > 5)
    assert asked.done == []


def test_scheduled_job_that_was_asked_for_has_had_its_time(place, store, keys):
    runs = []
    slow = SlowJob(name="compact", every_seconds=3600, work=lambda job: runs.append(1))
    store.put(
        keys.report("compact"),
        json.dumps({"started_at": SystemClock.now_ns() // 10**9}).encode(),
    )
    with running(place, Tier(), [slow], make_job=lambda *_: slow, request_seconds=0.02):
        ask(store, keys, "compact")
        eventually(lambda: request_of(store, keys, "compact").get("state") == "done")
        assert status_of(store, keys)["jobs"]["compact"]["runs"] == 1
    assert runs == [1]


def test_jobs_that_can_be_asked_for():
    settings = load_config({"storage": {"mode": "memory"}}, {}).pipeline
    for name in ("compact", "scrub"):
        assert requested_job(settings, name).name == name
    with pytest.raises(InvalidRequestError, match=r"export\.to"):
        requested_job(settings, "export")
    with pytest.raises(InvalidRequestError):
        requested_job(settings, "tier")
