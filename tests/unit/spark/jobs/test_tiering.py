"""`tier` on the driver, with tasks done in this process: order, failures, and who else is at it."""

import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import ister
from ister.base import failpoints
from ister.base.clock import SystemClock
from ister.base.model import TopicName
from ister.bucket.egress import EgressLimit
from ister.bucket.names import TopicKeys
from ister.bucket.ownership import OwnedTopic
from ister.bucket.terms import newest_terms, remove_terms, save_term
from ister.errors import ConflictError, FencedError, IsterError, StoresDifferError, UnavailableError
from ister.format.records import decode_topic, encode_current, encode_topic
from ister.fs.local import LocalFileSystem
from ister.metadata.sqlite import SqliteMetadata
from ister.spark.jobs import tier_job
from ister.spark.jobs.job import open_job
from ister.spark.jobs.job_report import JobReport, error_as_fields
from ister.spark.jobs.pipeline_term import measure_lag
from ister.spark.jobs.session import stop_on_signals
from ister.spark.jobs.tasks import Done
from ister.spark.jobs.tier_job import tier_cycle
from ister.spark.jobs.tier_topics import Cycle, TierTopics
from ister.wal.directory import WalDirectory
from tests.integration.spark_topics import SparkPlace, fill, without_spark
from tests.servers.flight import FlightTopics
from tests.support.cases import case
from tests.support.clock import ManualClock
from tests.support.spark_here import SparkHere

A, B = "/default/a", "/default/b"
SPARK = SparkHere()


@pytest.fixture(autouse=True)
def _clean():
    with without_spark():
        yield
    failpoints.disarm()


@pytest.fixture
def place(tmp_path):
    return SparkPlace(tmp_path, uploader={"max_object_bytes": 4096})


class Tasks:
    """Stands in for Spark: does items here, in any order, with whatever happens in between."""

    def __init__(self, monkeypatch):
        self.order = list
        self.before = {}
        """What to do before the wave of a number, counted from 0."""
        self.fails = {}
        """The error of an item, by its start."""
        self.is_slow = False
        """Whether tasks take a second: what they make differs from what others make by that."""
        self.waves = 0
        self.items = []
        monkeypatch.setattr(tier_job, "run_tasks", self.run)

    def run(self, spark, items, work, *, weigh, name):
        assert all(weigh(item) > 0 for item in items)
        self.items += items
        done = [self._do(item, work) for item in items]
        self.before.pop(self.waves, lambda: None)()
        self.waves += 1
        yield from self.order(done)

    def _do(self, item, work):
        error = self.fails.get((item.topic, item.start)) or self.fails.get(item.start)
        if error is not None:
            return Done(item, None, error_as_fields(error))
        try:
            made = work(item)
            if self.is_slow:
                later = replace(made.descriptor, created_at=made.descriptor.created_at + 1)
                made = replace(made, descriptor=later)
            return Done(item, made, None)
        except IsterError as error:
            return Done(item, None, error_as_fields(error))


@pytest.fixture
def tasks(monkeypatch):
    return Tasks(monkeypatch)


@contextmanager
def a_job(place, **more):
    with open_job("tier", SPARK, place.config, exclusive=lambda keys: keys.lease, **more) as job:
        yield job


def descriptors(place, name=A):
    with ister.open_bucket(place.config) as history:
        return [d for d, _ in history.topic(name).catalog.descriptors()]


def ranges(place, name=A):
    return [(d.start, d.end) for d in descriptors(place, name)]


def check_chain(place, count, name=A):
    """Every offset is in one object."""
    found = ranges(place, name)
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == count
    assert len(place.payloads(name)) == count


def object_files(place, name=A):
    folder = Path(f"{place.root}/objects/storage/topics{name}/objects")
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# -- the rate -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "tasks_at_once"), [(1, 1), (40, 2)])
def test_tasks_share_the_rate_of_uploads(tmp_path, tasks, monkeypatch, count, tasks_at_once):
    uploader = {"max_object_bytes": 4096, "max_bytes_per_second": 1 << 30}
    place = SparkPlace(tmp_path, uploader=uploader)
    rates = []

    class Limit(EgressLimit):
        def take(self, size_bytes, is_stopping=lambda: False):
            rates.append(self.bytes_per_second)
            return super().take(size_bytes, is_stopping)

    monkeypatch.setattr(tier_job, "EgressLimit", Limit)
    tier_job._egress.cache_clear()
    place.fill(A, count, size=500)
    with a_job(place) as job:
        tier_cycle(job, [A])
    check_chain(place, count)
    assert set(rates) == {(1 << 30) / tasks_at_once}
    tier_job._egress.cache_clear()


# -- owners ---------------------------------------------------------------------------------------


def test_broker_that_was_replaced_is_no_source(place, tasks, monkeypatch):
    """Goal: what it has is never committed in its successor's name."""
    pytest.importorskip("pyarrow")
    key = TopicKeys("/danube", TopicName.parse(A)).record
    with place.open() as log, FlightTopics(log) as server:
        topic = log.topic(A, create=True)
        fill(topic, 20)
        metadata = topic.bucket._stores.metadata
        mine = metadata.get(key).value
        # Another owner takes it, and this one has not noticed.
        metadata.put(key, encode_topic(replace(decode_topic(mine, key=key), epoch=2)))
        report = tier_job.tier(SPARK, place.elsewhere, broker=server.address)
        assert [error["code"] for error in report.errors] == ["ABORTED"]
        assert "epoch" in report.errors[0]["message"]
        metadata.put(key, mine)
        assert (ranges(place), object_files(place)) == ([], [])

        # It happens between the plan and the upload: the task is refused.
        def replaced(spark, items, work, **more):
            late = [replace(item, record=replace(item.record, epoch=2)) for item in items]
            return tasks.run(spark, late, work, **more)

        with monkeypatch.context() as patched:
            patched.setattr(tier_job, "run_tasks", replaced)
            report = tier_job.tier(SPARK, place.elsewhere, broker=server.address)
        assert [error["code"] for error in report.errors] == ["ABORTED"]
        assert (ranges(place), object_files(place)) == ([], [])
        assert tier_job.tier(SPARK, place.elsewhere, broker=server.address).ok
    check_chain(place, 20)


def test_broker_of_another_log_has_another_topic_of_the_name(place, tasks, tmp_path):
    place.fill(A, 50)
    with SparkPlace(tmp_path / "stranger").open() as log, FlightTopics(log) as server:
        log.topic(A, create=True)
        with place.open() as own:
            own.topic(A)
            (error,) = tier_job.tier(SPARK, place.elsewhere, broker=server.address).errors
    assert (error["topic"], error["code"]) == (A, ConflictError.code)
    assert not tasks.items


# -- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order", [list, lambda done: done[::-1], lambda done: done[1::2] + done[::2]]
)
def test_objects_are_committed_in_their_order(place, tasks, order, monkeypatch):
    place.fill(A, 300)
    tasks.order = order
    committed = []
    commit = OwnedTopic.commit

    def note(owned, described):
        committed.append(described.start)
        commit(owned, described)

    monkeypatch.setattr(OwnedTopic, "commit", note)
    with a_job(place) as job:
        cycle = tier_cycle(job, [A])
    assert len(committed) > 5
    assert committed == sorted(committed)
    assert cycle.objects == len(committed)
    assert (cycle.messages, cycle.failed) == (300, 0)
    check_chain(place, 300)


@pytest.mark.parametrize("order", [list, lambda done: done[::-1]])
def test_nothing_is_committed_behind_an_object_that_failed(place, tasks, order):
    for name in (A, B):
        place.fill(name, 300)
    with a_job(place, dry_run=True) as job:
        tier_cycle(job, [A])
        assert job.report.topics[A]["objects"] > 5
    tasks.order = order
    error = UnavailableError("silent", topic=A)
    with a_job(place) as job:
        # Two of them, and the first one counts.
        planned = tier_job._Tiering(job)._plan(
            SimpleNamespace(known=_known(job), goal=300), None, 100
        )
        third, fourth = planned.objects[2], planned.objects[3]
        tasks.fails = {(A, third.start): error, (A, fourth.start): UnavailableError("other")}
        cycle = tier_cycle(job, [A, B])
        assert ranges(place) == [(o.start, o.end) for o in planned.objects[:2]]
        assert cycle.failed == 1
        (told,) = job.report.errors
        assert (told["topic"], told["message"]) == (A, "silent")
        assert job.report.topics[A]["end"] == third.start
        check_chain(place, 300, B)
        # The next one goes on, and nothing is wrong any more.
        tasks.fails = {}
        tier_cycle(job, [A, B])
        assert job.report.ok
    check_chain(place, 300)


def _known(job):
    ((known, _),) = TierTopics(job).find_due([A], Cycle(), report=job.report, interval_seconds=None)
    return known


def test_backlog_of_many_rounds(place, tasks, monkeypatch):
    monkeypatch.setattr(tier_job, "_ROUND_OBJECTS", 3)
    monkeypatch.setattr(tier_job, "_ROUND_BYTES", 1)
    monkeypatch.setattr(tier_job, "_ROUND_BYTES_PER_SLOT", 1)
    for name in (A, B):
        place.fill(name, 300)
    with a_job(place) as job:
        tier_cycle(job, [A, B])
        assert job.report.ok
    assert tasks.waves > 5
    for name in (A, B):
        check_chain(place, 300, name)


# -- somebody else is at it -----------------------------------------------------------------------


@pytest.mark.parametrize("is_slow", [True, False])
def test_owner_that_was_faster_is_not_overtaken(place, tasks, is_slow):
    tasks.is_slow = is_slow
    with place.open() as log:
        topic = log.topic(A, create=True)
        fill(topic, 200)
        tasks.before[0] = topic.upload
        with a_job(place) as job:
            tier_cycle(job, [A])
            assert job.report.ok
            if is_slow:  # else nobody could say who has made an object that both have made
                assert "objects" not in job.report.topics.get(A, {})
        assert topic.watermarks.tiered == 200
    check_chain(place, 200)


def test_topic_that_is_opened_meanwhile_is_planned_anew(place, tasks):
    place.fill(A, 200)

    def reopen():
        with place.open() as log:
            log.topic(A)

    tasks.before[0] = reopen
    with a_job(place) as job:
        tier_cycle(job, [A])
        assert job.report.ok
    assert {d.epoch for d in descriptors(place)} == {2}
    check_chain(place, 200)


def test_topic_that_another_node_takes_is_reported(place, tasks):
    for name in (A, B):
        place.fill(name, 200)

    def take():
        with ister.open(place.elsewhere) as log:
            log.topic(A, take_over=True).append(b"x")

    tasks.before[0] = take
    with a_job(place) as job:
        tier_cycle(job, [A, B])
        (error,) = job.report.errors
        assert error["topic"] == A
        assert "new owner" in error["message"]
        # Whose files are not here, and whose node is not running.
        tier_cycle(job, [A, B])
        (error,) = job.report.errors
        assert error["topic"] == A
        assert "is not running" in error["message"]
    check_chain(place, 200, B)
    # Objects that the job had made and not committed are the new owner's.
    assert all(end <= 200 for _, end in ranges(place))


def test_topic_that_is_deleted_meanwhile_leaves_nothing(place, tasks):
    for name in (A, B):
        place.fill(name, 200)

    def delete():
        with place.open() as log:
            log.delete(A)

    tasks.before[0] = delete
    with a_job(place) as job:
        tier_cycle(job, [A, B])
        (error,) = job.report.errors
        assert error["topic"] == A
        tier_cycle(job, [A, B])
        assert job.report.ok
    assert object_files(place) == []
    check_chain(place, 200, B)


def test_job_whose_lease_has_ended_stops(place, tasks):
    for name in (A, B):
        place.fill(name, 200)
    with a_job(place) as job:
        tasks.before[0] = job.fence.release
        with pytest.raises(FencedError):
            tier_cycle(job, [A, B])
    assert ranges(place, A) == ranges(place, B) == []


def test_object_that_was_collected_as_garbage_is_not_committed(tmp_path, tasks):
    place = SparkPlace(tmp_path, cloud={"orphan_grace_minutes": 0})
    place.fill(A, 50)

    def collect():
        for path in Path(f"{place.root}/objects/storage/topics{A}/objects").iterdir():
            path.unlink()

    tasks.before[0] = collect
    with a_job(place) as job:
        tier_cycle(job, [A])
        assert [error["code"] for error in job.report.errors] == ["NOT_FOUND"]
        assert ranges(place) == []
        tier_cycle(job, [A])
        assert job.report.ok
    check_chain(place, 50)


# -- when -----------------------------------------------------------------------------------------


def test_topics_are_due_by_time_by_size_and_at_once_for_the_level_tiered(tmp_path, tasks):
    clock = ManualClock(now_ms=int(1e12) * 2)
    place = SparkPlace(tmp_path, uploader={"interval_seconds": 10, "max_batch_bytes": 100_000})
    sizes = {A: 1, B: 200, "/default/waits": 1}
    with place.open() as log:
        topics = {
            name: log.topic(name, create=True, ack="tiered" if "waits" in name else None)
            for name in sizes
        }
        for topic in topics.values():
            fill(topic, 1)
        with a_job(place) as job:
            job.clock = clock
            tier_cycle(job, list(sizes))
            for described in [descriptors(place, name)[0] for name in sizes]:
                assert described.end == 1
            clock.advance(-clock.now_ns() / 1e9 + described.created_at)
            for name, topic in topics.items():
                fill(topic, sizes[name], size=600)
                topic.wal.save_checkpoint()

            def tiered():
                tier_cycle(job, list(sizes), only_due=True)
                return {name for name in sizes if descriptors(place, name)[-1].end > 1}

            clock.advance(5)
            assert tiered() == {B, "/default/waits"}
            clock.advance(6)
            assert tiered() == set(sizes)


def test_topic_that_failed_is_left_alone_for_a_while(place, tasks):
    clock = ManualClock(now_ms=int(1e12) * 2)
    place.fill(A, 20)
    tasks.fails = {0: UnavailableError("silent")}
    with a_job(place) as job:
        job.clock = clock
        attempts = []
        for _ in range(200):
            before = len(tasks.items)
            tier_cycle(job, [A], only_due=True)
            attempts.append(len(tasks.items) - before)
            clock.advance(1)
        assert attempts[0] == 1
        # 1, 2, 4, 8, … 60 seconds apart, or half of that.
        assert 5 <= sum(attempts) <= 16
        assert len(job.report.errors) == 1
        tasks.fails = {}
        clock.advance(61)
        assert tier_cycle(job, [A], only_due=True).objects == 1
        assert job.report.ok


def test_nothing_is_uploaded_for_an_owner_that_is_older_than_the_bucket(place, tasks):
    """Goal: after a rollback of the metadata, its record is that of an earlier owner."""
    place.fill(A, 20)
    with a_job(place) as job:
        record = job.catalog(A).record()[0]
        later = replace(record, epoch=record.epoch + 1, claim="0f" * 8)
        save_term(job.history.objects, TopicName.parse(A), later)
        tier_cycle(job, [A])
        assert [error["code"] for error in job.report.errors] == [StoresDifferError.code]
        assert ranges(place) == []


@pytest.mark.parametrize("is_known", [True, False])
def test_term_of_the_owner_is_recorded_before_its_first_object(place, tasks, is_known):
    """Goal: after a rollback, the bucket tells of the owner, if its checkpoint does."""
    place.fill(A, 20)
    with a_job(place) as job:
        name = TopicName.parse(A)
        record = job.catalog(A).record()[0]
        remove_terms(job.history.objects, name, record.epoch)
        if not is_known:
            directory = WalDirectory(LocalFileSystem(), f"{place.root}/wal{A}")
            directory.save_state(replace(directory.load_state(), claim="0f" * 8))
        tier_cycle(job, [A])
        assert ranges(place) == [(0, 20)]
        found = newest_terms(job.history.objects, name)
        assert found == [(record.epoch, record.claim if is_known else "")]


def test_failure_to_look_at_a_topic_is_its_own(place, tasks):
    for name in (A, B):
        place.fill(name, 20)
    Path(f"{place.root}/wal{A}/wal.ckpt").write_bytes(b"damaged")
    with a_job(place) as job:
        tier_cycle(job, [A, B])
        (error,) = job.report.errors
        assert error["topic"] == A
    check_chain(place, 20, B)


def test_error_of_a_topic_that_is_gone_goes_with_it(place, tasks):
    for name in (A, B):
        place.fill(name, 20)
    tasks.fails = {(A, 0): UnavailableError("silent")}
    with a_job(place) as job:
        tier_cycle(job, [A, B])
        assert [error["topic"] for error in job.report.errors] == [A]
        tier_cycle(job, [B], only_due=True)
        assert job.report.ok


# -- the end --------------------------------------------------------------------------------------


def test_first_signal_ends_the_loop_and_the_second_the_process():
    for number in [signal.SIGINT, signal.SIGTERM]:
        with case(number):
            before = signal.getsignal(number)
            with stop_on_signals(None) as stop:
                assert not stop.is_set()
                signal.raise_signal(number)
                assert stop.is_set()
                assert signal.getsignal(number) is before
            assert signal.getsignal(number) is before


# -- many topics ----------------------------------------------------------------------------------


@contextmanager
def counted_calls(monkeypatch):
    """The requests to the metadata store, by kind, without those of leases."""
    calls = []
    with monkeypatch.context() as patched:
        for kind in ("get", "get_many", "range", "put", "transact"):
            real = getattr(SqliteMetadata, kind)

            def count(self, *args, real=real, kind=kind, **more):
                calls.append(kind)
                return real(self, *args, **more)

            patched.setattr(SqliteMetadata, kind, count)
        yield calls


def make_topics(place, count):
    with place.open() as log:
        for number in range(count):
            topic = log.topic(f"/default/topic-{number:03d}", create=True)
            fill(topic, 3)
            topic.upload()


@pytest.mark.parametrize("count", [2, 40])
def test_cycle_without_work_takes_a_few_requests_for_any_number_of_topics(
    place, tasks, monkeypatch, count
):
    make_topics(place, count)
    clock = ManualClock(now_ms=SystemClock().now_ns() // 1_000_000)
    with a_job(place, clock=clock) as job, counted_calls(monkeypatch) as calls:
        report = JobReport("tier")

        def cycle(**more):
            calls.clear()
            done = tier_cycle(job, job.topics(["*"]), report=report, **more)
            assert (done.due, done.failed) == (0, 0)
            return list(calls)

        # Records and owners; then, once, where each topic's uploads begin.
        assert cycle(only_due=True) == ["range", "range", "get_many"]
        assert cycle(only_due=True) == ["range", "range"]
        names = job.topics(["*"])
        tier_cycle(job, names, only_due=True, report=report)
        calls.clear()
        tier_cycle(job, names, only_due=True, report=report)
        assert calls == []
        clock.advance(60)
        assert cycle(only_due=True) == ["range", "range"]
        assert cycle() == ["range", "range", "get_many"]
        assert {fields["end"] for fields in report.topics.values()} == {3}
        assert len(report.topics) == count
        calls.clear()
        assert measure_lag(job.place, job.topics(["*"])) == 0
        assert set(calls) == {"range", "get_many"}
        assert len(calls) == 4
    assert not tasks.items


def test_pointers_without_an_end_are_looked_up(place, tasks):
    """As Danube and an older Ister write them."""
    make_topics(place, 2)
    with place.open() as log:
        fill(log.topic("/default/topic-000"), 2, first=3)
    with a_job(place) as job:
        for name in job.topics(["*"]):
            keys = job.catalog(name).keys
            job.store.put(keys.current, encode_current(0))
        assert measure_lag(job.place, job.topics(["*"])) == 2
        cycle = tier_cycle(job, job.topics(["*"]))
        assert (cycle.due, cycle.messages, cycle.failed) == (1, 2, 0)
        assert job.report.topics["/default/topic-001"]["end"] == 3
    check_chain(place, 5, "/default/topic-000")


def test_pointer_that_says_too_little_costs_a_look_and_no_upload(place, tasks):
    make_topics(place, 1)
    name = "/default/topic-000"
    with a_job(place) as job:
        job.store.put(job.catalog(name).keys.current, encode_current(0, 1))
        assert tier_cycle(job, [name]).due == 0
        assert job.report.topics[name]["end"] == 3
    assert not tasks.items


def test_record_that_cannot_be_read_is_an_error_and_others_go_on(place, tasks):
    make_topics(place, 1)
    place.fill(A, 5)
    with a_job(place) as job:
        job.store.put(job.catalog("/default/topic-000").keys.record, b"?")
        cycle = tier_cycle(job, job.topics(["*"]))
        assert (cycle.failed, cycle.messages) == (1, 5)
        assert [error["topic"] for error in job.report.errors] == ["/default/topic-000"]
    check_chain(place, 5)
