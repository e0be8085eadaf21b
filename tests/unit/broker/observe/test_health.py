"""Health in words: each thing that can be wrong is said, with what to do, and to whom it may be."""

import asyncio
import errno
import json
import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ister.base.clock import SystemClock
from ister.base.limits import GIB, MIB
from ister.base.model import AckLevel, TopicState
from ister.broker.observe.health import STATES, Check, Subject, worst
from ister.broker.observe.probe import Disk, HealthProbe
from ister.bucket.pipeline import PipelineKeys
from ister.config import DiskConfig, load_config
from ister.errors import UnavailableError
from ister.metadata.base import Put, StoreUsage
from ister.subscription.policy import FailurePolicy, PoisonPolicy, SubscriptionKind
from tests.support.broker import a_broker, a_record, eventually
from tests.support.cases import case
from tests.support.memory_metadata import MemoryMetadata

NAME = "/default/secret"


class AClock(SystemClock):
    """A clock that is moved by hand."""

    def __init__(self):
        self.at, self.wall, self.suspended = 1000.0, 1_760_000_000.0, 0.0

    def monotonic(self):
        return self.at

    def boottime(self):
        return self.at + self.suspended

    def now_ns(self):
        return int(self.wall * 1e9)

    def pass_time(self, seconds):
        self.at += seconds
        self.wall += seconds

    def suspend(self, seconds):
        self.suspended += seconds
        self.wall += seconds


def found(health, name, *, names=True):
    health._known = None
    return next(check for check in health.checks(names=names) if check.name == name)


async def a_topic(broker, name=NAME):
    topic = await broker.topics.get_or_create(name, is_reliable=True)
    await topic.publish(a_record(topic=name))
    return topic


# -- ready ------------------------------------------------------------------------------------


async def test_it_says_how_many_topics_are_recovered(tmp_path):
    async with a_broker(tmp_path) as (broker, _, _):
        health = broker.health
        assert health.is_ready
        assert health.reasons == []
        assert found(health, "ready").state == "ok"
        health.has_started = False
        broker.topics.opening = (3, 17)
        assert not health.is_ready
        assert health.reasons == ["recovering topics: 3 of 17 open"]
        assert found(health, "ready").state == "attention"
        health.has_started = health.is_ending = True
        assert health.reasons == ["the broker is shutting down"]
        health.is_ending = False


async def test_every_topic_counts_as_recovered_whatever_became_of_it(tmp_path):
    async with a_broker(tmp_path) as (broker, _, _):
        await a_topic(broker)
        await a_topic(broker, "/default/other")
    async with a_broker(tmp_path) as (broker, _, _):
        assert broker.topics.opening == (2, 2)
        assert broker.topics.unopened == {}


# -- topics and subscriptions -----------------------------------------------------------------


@pytest.mark.parametrize("state", [TopicState.STALLED, TopicState.QUARANTINED, TopicState.FAILED])
async def test_topics_that_are_not_well_are_named_to_those_who_may_know(
    tmp_path, monkeypatch, state
):
    async with a_broker(tmp_path) as (broker, _, _):
        topic = await a_topic(broker)
        assert found(broker.health, "topics").state == "ok"
        with monkeypatch.context() as patch:
            patch.setattr(topic.topic.wal.gate, "state", state)
            patch.setattr(topic.topic.wal.committer, "_stalled_until", math.inf)  # not tried again
            check = found(broker.health, "topics")
            assert (check.state, check.words) == ("bad", f"{state.value}: {NAME}")
            assert check.hint is not None
            check = found(broker.health, "topics", names=False)
            assert check.words == f"{state.value}: 1 topic"
            if state is TopicState.STALLED:
                assert found(broker.health, "disk").state == "bad"
            broker.health._known = None
            told = json.dumps(broker.health.report(names=False))
            assert "secret" not in told
            assert broker.health.report(names=True)["topics"] == {state.value: 1}


async def test_topic_that_cannot_be_opened_is_said(tmp_path):
    async with a_broker(tmp_path) as (broker, _, _):
        broker.topics.unopened[NAME] = "its record is damaged"
        check = found(broker.health, "topics")
        assert (check.state, check.words) == ("bad", f"cannot be opened: {NAME}")
        await a_topic(broker)
        assert found(broker.health, "topics").state == "ok"


async def test_blocked_subscriptions_are_said(tmp_path):
    async with a_broker(tmp_path) as (broker, _, _):
        topic = await a_topic(broker)
        consumer = await topic.subscribe("s", SubscriptionKind.SHARED, "c", (), "earliest")
        subscription = topic.reliable_subscription("s")
        assert found(broker.health, "subscriptions").state == "ok"
        await subscription.set_policy(
            FailurePolicy(max_redelivery_count=0, poison=PoisonPolicy.BLOCK)
        )
        outbox = subscription.attach(consumer.id, ())
        await outbox.take(1)
        await subscription.next_message(outbox, 0)
        subscription.nack(0, delay_ms=0, reason="no")
        check = found(broker.health, "subscriptions")
        assert check.state == "attention"
        assert check.words.endswith(f"s of {NAME}")
        hidden = found(broker.health, "subscriptions", names=False)
        assert hidden.words.endswith("1 subscription")
        # Where pages lead to, unless names are hidden.
        assert check.subjects == (Subject(topic=NAME, subscription="s"),)
        assert hidden.subjects == ()


# -- uploads ----------------------------------------------------------------------------------


async def test_uploads_that_fail_are_bad_after_a_while(tmp_path, monkeypatch):
    async with a_broker(tmp_path) as (broker, _, _):
        topic, health = await a_topic(broker), broker.health
        assert found(health, "uploads").state == "ok"
        topic.topic.bucket.uploads.upload_error = UnavailableError("the bucket does not answer")
        await health.probe.record_lags()
        check = found(health, "uploads")
        assert check.state == "attention"
        assert check.words == f"uploads are failing: {NAME} (the bucket does not answer)"
        assert "secret" not in found(health, "uploads", names=False).words
        health.probe.failing_since -= 3600
        assert found(health, "uploads").state == "bad"
        topic.topic.bucket.uploads.upload_error = None
        await health.probe.record_lags()
        assert health.probe.failing_since is None
        assert found(health, "uploads").state == "ok"


async def test_upload_lag_is_said_by_bytes_and_by_time(tmp_path, monkeypatch):
    async with a_broker(tmp_path) as (broker, _, _):
        topic, health = await a_topic(broker), broker.health
        assert found(health, "upload_lag").state == "ok"
        storage = health._config.storage
        lag = topic.topic.bucket.uploads.lag_bytes
        assert lag > 0

        def set_limit(limit):
            uploader = replace(storage.uploader, max_lag_bytes=limit)
            settings = replace(health._config, storage=replace(storage, uploader=uploader))
            monkeypatch.setattr(health, "_config", settings)

        set_limit(lag - 1)
        check = found(health, "upload_lag")
        assert (check.state, NAME in check.words) == ("bad", True)
        set_limit(lag + 1)
        assert found(health, "upload_lag").state == "attention"
        set_limit(100 * lag)
        assert found(health, "upload_lag").state == "ok"
        monkeypatch.setattr(health.probe, "lag_seconds", lambda _: 3600.0)
        assert found(health, "upload_lag").state == "attention"


async def test_age_of_what_waits_for_its_upload_goes_by_when_it_came(tmp_path):
    async with a_broker(tmp_path) as (broker, _, _):
        topic = await a_topic(broker)
        clock = AClock()
        watch = HealthProbe(MemoryMetadata(), broker.config, clock=clock, directory=None)
        watch.topics = broker.topics
        assert watch.lag_seconds(topic) == 0
        await watch.record_lags()
        clock.pass_time(10)
        await topic.publish(a_record(topic=NAME))
        await watch.record_lags()
        clock.pass_time(5)
        assert watch.lag_seconds(topic) == pytest.approx(15)
        # The first message is in the bucket, the second one is not.
        topic.topic.wal.levels.advance_tiered(1)
        assert watch.lag_seconds(topic) == pytest.approx(5)
        for _ in range(500):
            clock.pass_time(1)
            await topic.publish(a_record(topic=NAME))
            await watch.record_lags()
        assert len(watch._lags[NAME].marks) <= 65
        assert watch.lag_seconds(topic) == pytest.approx(505)
        topic.topic.wal.levels.advance_tiered(topic.topic.wal.synced)
        assert watch.lag_seconds(topic) == 0
        await watch.record_lags()
        assert watch._lags == {}


# -- stores and machine -----------------------------------------------------------------------


class Failing(MemoryMetadata):
    is_failing = False

    def get(self, key):
        if self.is_failing:
            raise UnavailableError("no answer at 10.0.0.7")
        return super().get(key)


async def test_metadata_store_that_does_not_answer_is_bad(tmp_path):
    async with a_broker(tmp_path) as (broker, _, _):
        clock, store = AClock(), Failing()
        watch = HealthProbe(store, broker.config, clock=clock, directory=str(tmp_path))
        broker.health.probe = watch
        assert watch.metadata_answers
        watch.probe()
        assert found(broker.health, "metadata").state == "ok"
        store.is_failing = True
        watch.probe()
        check = found(broker.health, "metadata")
        assert check.state == "bad"
        assert check.words.endswith("does not answer: no answer at 10.0.0.7")
        assert "10.0.0.7" not in found(broker.health, "metadata", names=False).words
        store.is_failing = False
        watch.probe()
        assert watch.metadata_answers
        # A call that never comes back: nothing is known for too long.
        clock.pass_time(60)
        assert not watch.metadata_answers


def test_pipeline_and_jobs_are_looked_up_in_the_store():
    config = load_config({"storage": {"mode": "memory"}}, {})
    store, keys = MemoryMetadata(), PipelineKeys(config.storage.metadata.root_prefix)
    watch = HealthProbe(store, config, clock=AClock(), directory=None)
    watch.probe()
    assert (watch.pipeline_is_running, watch.status, watch.reports) == (False, None, {})
    report = {"ok": False, "started_at": 1, "seconds": 2.0}
    store.transact(
        [],
        [
            Put(keys.lease, b"{}"),
            Put(keys.status, json.dumps({"tier": {"failing_topics_total": 2}}).encode()),
            Put(keys.report("compact"), json.dumps(report).encode()),
            Put(keys.report("scrub"), b"not JSON"),
        ],
    )
    watch.probe()
    assert watch.pipeline_is_running
    assert watch.status == {"tier": {"failing_topics_total": 2}}
    assert watch.reports == {"compact": report}


async def test_pipeline_that_is_wanted_and_not_there_is_said(tmp_path):
    engine = {"storage": {"uploader": {"engine": "spark"}}}

    async with a_broker(tmp_path, engine) as (broker, _, _):
        health = broker.health
        check = found(health, "pipeline")
        assert (check.state, "ister pipeline run" in check.hint) == ("attention", True)
        health.probe.pipeline_is_running = True
        assert found(health, "pipeline").state == "ok"
        health.probe.status = {"tier": {"failing_topics_total": 2}}
        assert "2 topics" in found(health, "pipeline").words
        assert found(health, "jobs").state == "ok"
        health.probe.reports = {"scrub": {"ok": False}, "export": {"ok": True}}
        check = found(health, "jobs")
        assert (check.state, check.words) == ("attention", "the last run failed: scrub")


async def test_disk_below_its_watermark_stops_appends_and_says_so(tmp_path, monkeypatch):
    async with a_broker(tmp_path) as (broker, _, _):
        guard = broker.health._log.room.disk
        monkeypatch.setattr(guard, "_settings", DiskConfig(min_free=1 << 60, reserve=0))
        guard.measure()
        broker.health._known = None
        check = found(broker.health, "disk")
        assert check.state == "bad"
        assert check.words.startswith("appends are stopped: ")
        assert "resume at" in check.words
        assert "storage.disk.min_free" in check.hint
        assert broker.health.is_ready, "consumers are served"


async def test_slow_syncs_are_said(tmp_path):
    async with a_broker(tmp_path) as (broker, _, _):
        topic = await a_topic(broker)
        wal = topic.topic.wal
        assert found(broker.health, "syncs").state == "ok"
        wal.committer._slow_sync = (wal.committer._clock.monotonic(), 2.5)
        check = found(broker.health, "syncs")
        assert check.state == "attention"
        assert check.words == (
            f"the log's disk is slow: a sync took 2.5 s ({wal.directory.path}): {NAME}"
        )
        assert check.subjects == (Subject(topic=NAME),)
        check = found(broker.health, "syncs", names=False)
        assert check.words == "the log's disk is slow: a sync took 2.5 s: 1 topic"
        wal.committer._slow_sync = (wal.committer._clock.monotonic(), 20.0)
        assert found(broker.health, "syncs").state == "bad"


async def test_memory_of_a_broker_without_a_disk_is_told(tmp_path):
    uploader = {"engine": "none", "max_lag_bytes": 64 * MIB}
    settings = {"storage": {"bucket": {"memory_max_bytes": MIB}, "uploader": uploader}}

    async with a_broker(tmp_path, settings, mode="bucket") as (broker, _, _):
        health, log = broker.health, broker.health._log
        check = found(health, "memory")
        assert (check.state, check.hint) == ("ok", None)
        assert not [one for one in health.checks() if one.name == "disk"]
        topic = (await broker.topics.get_or_create(NAME, is_reliable=True)).topic
        while not log.room.memory.is_full:
            topic.wal.wait(topic.append(bytes(64 * 1024)), AckLevel.SYNCED)
        check = found(health, "memory")
        assert check.state == "bad"
        assert check.words.startswith("producers are held until uploads catch up: ")
        assert "storage.bucket.memory_max_bytes" in check.hint
        assert health.is_ready, "consumers are served"
        await asyncio.to_thread(topic.upload)
        await eventually(lambda: not log.room.memory.is_full)
        assert found(health, "memory").state == "ok"


def test_look_finds_disk_and_descriptors(tmp_path):
    config = load_config({"storage": {"mode": "memory"}}, {})
    watch = HealthProbe(MemoryMetadata(), config, clock=SystemClock(), directory=str(tmp_path))
    watch.probe()
    assert watch.disk is not None
    assert 0 <= watch.disk.free_bytes <= watch.disk.total_bytes
    assert watch.open_files > 3
    gone = HealthProbe(MemoryMetadata(), config, clock=SystemClock(), directory="/nowhere/at/all")
    gone.probe()
    assert gone.disk is None


async def test_health_shows_a_clock_step_until_it_is_confirmed(tmp_path):
    async with a_broker(tmp_path) as (broker, _, _):
        health, log = broker.health, broker.topics.log
        assert found(health, "clock").state == "ok"
        guard = log.stores.node_clock._guard
        before = replace(guard._anchor, wall=guard._anchor.wall - 30 * 86_400)
        guard._trust(before)
        await asyncio.to_thread(log.stores.node_clock.check)
        check = found(health, "clock")
        assert check.state == "attention"
        assert "30 days ahead" in check.words
        assert "deletion by age is suspended" in check.words
        assert "/api/clock/confirm" in check.hint
        assert (await asyncio.to_thread(log.confirm_clock)).seconds > 29 * 86_400
        assert found(health, "clock").state == "ok"


async def test_clock_that_was_set_is_said(tmp_path):
    async with a_broker(tmp_path) as (broker, _, _):
        clock, health = AClock(), broker.health
        health._clock = clock
        health.probe = watch = HealthProbe(
            MemoryMetadata(), broker.config, clock=clock, directory=None
        )
        for _ in range(3):
            watch.probe()
            clock.pass_time(10)
        assert found(health, "clock").state == "ok"
        clock.suspend(8 * 3600)  # a machine that slept: its clock was not set
        watch.probe()
        assert found(health, "clock").state == "ok"
        clock.wall -= 3600
        watch.probe()
        check = found(health, "clock")
        assert check.state == "attention"
        assert "-3600 s" in check.words
        clock.pass_time(2 * 3600)
        assert found(health, "clock").state == "ok"
        clock.wall = 1000.0
        assert found(health, "clock").state == "bad"


def disk(free, total):
    return {"disk": Disk(path="/", total_bytes=total, free_bytes=free)}


def usage(**changed):
    known = StoreUsage(
        size_bytes=100 * MIB, used_bytes=50 * MIB, quota_bytes=2 * GIB, is_compacted=True
    )
    return {"usage": replace(known, **changed)}


LEFT = [
    # What the probe has found, the check, its state, its words.
    (disk(50 * GIB, 100 * GIB), "disk", "ok", ""),
    (disk(8 * GIB, 100 * GIB), "disk", "attention", ""),
    (disk(900 * MIB, 2 * GIB), "disk", "attention", ""),
    (disk(1 * GIB, 100 * GIB), "disk", "bad", ""),
    (disk(100 * MIB, 1 * GIB), "disk", "bad", ""),
    (disk(0, 10 * GIB), "disk", "bad", ""),
    (usage(), "metadata_size", "ok", "100 MiB of etcd's quota of 2.0 GiB taken, 50 MiB in use"),
    (usage(is_compacted=False), "metadata_size", "attention", "is not compacted"),
    (usage(size_bytes=1600 * MIB), "metadata_size", "attention", "1.6 GiB of"),
    (usage(size_bytes=1900 * MIB), "metadata_size", "bad", "1.9 GiB of"),
    (usage(alarms=("alarm:NOSPACE",)), "metadata_size", "bad", "alarm:NOSPACE"),
    ({"open_files": 790, "files_max": 1000}, "files", "ok", ""),
    ({"open_files": 810, "files_max": 1000}, "files", "attention", ""),
    ({"open_files": 980, "files_max": 1000}, "files", "bad", "980 of 1000 file descriptors"),
]


async def test_what_is_left_is_said(tmp_path):
    async with a_broker(tmp_path) as (broker, _, _):
        health = broker.health
        await eventually(lambda: health.probe.answered_at is not None)
        assert not [one for one in health.checks() if one.name == "metadata_size"]
        for seen, name, state, words in LEFT:
            with case(seen, name):
                for key, value in seen.items():
                    setattr(health.probe, key, value)
                check = found(health, name)
                assert (check.state, words in check.words) == (state, True), check
                assert (check.hint is None) is (state == "ok")
                assert broker.is_ready == ((name, state) != ("files", "bad"))
        health.probe.open_files = 1
        for days, state, words in (
            (90, "ok", "90 days"),
            (10, "attention", "expires in 10 days"),
            (0.5, "bad", "expires in 12 hours"),
            (-1, "bad", "has expired"),
        ):
            expires_at = broker._clock.now_ns() / 1e9 + days * 86_400 + 60
            material = SimpleNamespace(value=SimpleNamespace(expires_at=expires_at))
            health.tls = SimpleNamespace(material=lambda material=material: material)
            check = found(health, "certificate")
            assert (check.state, words in check.words) == (state, True), check
        health.tls = None
        for busy, state in ((79, "ok"), (80, "attention"), (100, "bad")):
            health.flight = SimpleNamespace(busy_streams=busy, streams_max=100)
            assert found(health, "streams").state == state


async def test_file_descriptors_that_cannot_be_counted_have_run_out(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(errno.EMFILE, "too many open files")

    async with a_broker(tmp_path) as (broker, _, _):
        watch = broker.health.probe
        await eventually(lambda: watch.answered_at is not None)
        assert broker.is_ready
        monkeypatch.setattr(os, "listdir", refuse)
        await asyncio.to_thread(watch.probe)
        assert not broker.is_ready


# -- as a whole -------------------------------------------------------------------------------


def test_worst_state_is_the_whole_ones():
    checks = [Check(name=state, state=state, words="") for state in STATES]
    assert worst(checks) == "bad"
    assert worst(checks[:2]) == "attention"
    assert worst(checks[:1]) == worst([]) == "ok"


async def test_overview_says_what_is_not_well(tmp_path):
    async with a_broker(tmp_path) as (broker, _, _):
        health = broker.health
        await eventually(lambda: health.probe.answered_at is not None)
        health.probe.disk = Disk(path="/", total_bytes=GIB, free_bytes=GIB)
        health.probe.files_max = 0
        health._known = None
        told = health.overview()
        assert {one["state"] for one in told.pop("checks")} == {"ok"}
        assert told == {"ready": True, "state": "ok", "words": ["all checks are ok"]}
        health.probe.disk = Disk(path="/", total_bytes=100 * GIB, free_bytes=0)
        health._known = None
        told = health.overview()
        assert (told["ready"], told["state"], len(told["words"])) == (True, "bad", 1)


async def test_answers_are_remembered_for_a_second(tmp_path):
    def found_now(health, name):
        return next(check for check in health.checks() if check.name == name)

    async with a_broker(tmp_path) as (broker, _, _):
        clock, health = AClock(), broker.health
        health._clock = clock
        await a_topic(broker)
        health.checks()
        broker.topics.unopened[NAME] = "damaged"
        assert "unopened" not in str(health.checks())
        assert found_now(health, "topics").state == "ok"
        clock.pass_time(2)
        assert found_now(health, "topics").state == "bad"
        broker.topics.unopened.clear()


async def test_watch_ends_while_the_store_does_not_answer(tmp_path):
    gate = asyncio.Event()
    config = load_config({"storage": {"mode": "memory"}}, {})
    watch = HealthProbe(MemoryMetadata(), config, clock=SystemClock(), directory=None)
    watch.start()
    await asyncio.sleep(0)
    await watch.stop()
    await watch.stop()
    gate.set()
