"""Topics that share express objects: rounds, shares, errors, awkward moments, what readers see."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle

import pytest

import ister
from ister.base import threads
from ister.base.limits import KIB
from ister.base.model import TopicName
from ister.bucket.express import find_runs
from ister.bucket.names import EXPRESS_PREFIX, manifest_key
from ister.bucket.topic_manifest import load_manifest
from ister.errors import (
    CapacityError,
    ConflictError,
    CorruptDataError,
    FencedError,
    PermissionDeniedError,
    UnavailableError,
)
from ister.format.descriptor import FORMAT_EXPRESS, FORMAT_FRAMES
from ister.rescue.rebuild import find_topics, rebuild_topic
from ister.topic.express import Express
from ister.topic.stores import Stores
from tests.support.cases import each
from tests.support.express import Shared
from tests.support.machine import ROOT
from tests.support.memory_fs import SimulatedCrash
from tests.support.memory_metadata import MemoryMetadata
from tests.support.stores import PREFIX, Site


@pytest.fixture
def shared(site):
    return Shared(site)


def test_one_object_has_the_messages_of_all_topics(shared):
    shared.append(0, b"a", b"b")
    last = shared.append(1, b"c")
    assert not shared.express.write_next()
    assert len(shared.objects()) == 1
    assert (shared.read(0), shared.read(1)) == ([b"a", b"b"], [b"c"])
    assert shared.formats(0) == [(0, 2, FORMAT_EXPRESS)]
    shared.topics[1].wait(last, timeout=0)
    assert not shared.express.is_under_way(shared.objects()[0])


def test_ordinary_topics_have_objects_of_their_own(site):
    shared = Shared(site, topics=0)
    topic = shared.log.topic("/default/orders", create=True)
    assert not topic.bucket.uploads.is_express
    shared.express.add(topic.bucket.uploads)
    topic.wait(topic.append(b"a"), level="synced")
    shared.express.write_next()
    assert shared.objects() == []


def test_all_topics_share_if_configured(site):
    log = site.open(storage={"uploader": {"express": {"all_topics": True}}})
    topic = log.topic("/default/orders", create=True)
    assert topic.bucket.uploads.is_express


def test_without_an_engine_nothing_is_shared(site):
    log = site.open(storage={"uploader": {"engine": "none"}})
    assert not log.topic("/default/t", create=True, ack="tiered").bucket.uploads.is_express


def test_object_of_its_own_by_call(shared):
    shared.append(0, b"a")
    assert shared.topics[0].upload().end == 1
    shared.append(0, b"b")
    shared.express.write_next()
    assert shared.formats(0) == [(0, 1, FORMAT_FRAMES), (1, 2, FORMAT_EXPRESS)]
    assert shared.read(0) == [b"a", b"b"]


def test_object_is_full(site):
    """Goal: topics take turns, and those without room come first next time."""
    limit = {"uploader": {"express": {"max_bytes": 64 * KIB}}}
    shared = Shared(site, topics=3, storage=limit)
    for number in range(3):
        shared.append(number, *[bytes([number]) * KIB] * 100)
    rounds = 0
    while shared.express.write_next():
        rounds += 1
        assert rounds < 20
    assert all(len(shared.read(number)) == 100 for number in range(3))
    sizes = [info.size for info in site.objects.list(EXPRESS_PREFIX)]
    assert max(sizes) < 3 * 64 * KIB
    assert len(sizes) >= 3


def test_message_larger_than_an_object(site):
    limit = {"uploader": {"express": {"max_bytes": 64 * KIB}}}
    shared = Shared(site, topics=2, storage=limit)
    shared.append(0, b"x" * 1024 * KIB)
    shared.append(1, b"y")
    while shared.express.write_next():
        pass
    assert [len(shared.read(0)[0]), shared.read(1)] == [1024 * KIB, [b"y"]]


@each("error", [UnavailableError("away"), PermissionDeniedError("no")])
def test_failed_put_is_tried_again(error):
    with Site() as site:
        shared = Shared(site)
        shared.append(0, b"a")
        shared.append(1, b"b")

        def fail(kind, key):
            if kind == "put":
                raise error.again()

        site.objects.before = fail
        shared.express.write_next()
        assert isinstance(shared.topics[0].bucket.uploads.last_error, type(error))
        assert shared.read(0) == []
        site.objects.before = lambda kind, key: None
        shared.express.write_next()
        assert (shared.read(0), shared.read(1)) == ([b"a"], [b"b"])
        assert shared.topics[0].bucket.uploads.last_error is None
        # A put whose answer is lost may have written the object: no name is used twice.
        assert len(set(shared.objects())) == len(shared.objects())


def test_damaged_file_does_not_stop_the_others(site):
    shared = Shared(site)
    shared.append(0, b"a")
    shared.append(1, b"b")
    path = f"{ROOT}/default/t0/wal.log"
    flip(site.disk(), path, 20)
    shared.express.write_next()
    assert shared.read(1) == [b"b"]
    assert shared.topics[0].bucket.uploads.last_error is not None
    flip(site.disk(), path, 20)
    site.clock.advance(2)
    shared.express.write_next()
    assert shared.read(0) == [b"a"]


def flip(fs, path, position):
    file = fs.open(path)
    byte = file.read_at(position, 1)
    file.write_at(position, [bytes([byte[0] ^ 1])])
    file.close()


def test_slow_bucket_holds_producers_back(site):
    limits = {"uploader": {"max_lag_bytes": 64 * KIB}}
    shared = Shared(site, storage=limits, buffer_full="refuse")
    site.objects.before = lambda kind, key: (_ for _ in ()).throw(UnavailableError("away"))
    for _ in range(65):
        with suppress(CapacityError):
            shared.append(0, b"x" * KIB)
        shared.express.write_next()
    with pytest.raises(CapacityError, match="wait for their upload"):
        shared.append(0, b"x" * KIB)
    site.objects.before = lambda kind, key: None
    while shared.express.write_next():
        pass
    shared.append(0, b"goes on")
    shared.express.write_next()
    assert shared.read(0)[-1] == b"goes on"


def test_closed_topic_is_forgotten(shared):
    shared.append(0, b"a")
    shared.append(1, b"b")
    shared.express.remove(shared.topics[0].bucket.uploads)
    shared.express.write_next()
    assert (shared.read(0), shared.read(1)) == ([], [b"b"])
    shared.topics[0].wait(shared.topics[0].append(b"c"), level="synced")
    shared.express.write_next()
    assert shared.read(0) == []


def test_collection_by_the_log_itself(site):
    shared = Shared(site, storage={"cloud": {"orphan_grace_minutes": 60}})
    shared.append(0, b"a")
    shared.express.write_next()
    assert shared.express.collect().removed == []
    shared.log.delete("/default/t0")
    for _ in range(800):
        site.clock.advance(5)
        shared.log.stores.membership.renew()
    assert len(shared.express.collect().removed) == 1
    assert shared.objects() == []


# -- two objects on their way ---------------------------------------------------------------


def two_batches(shared):
    shared.append(0, b"a")
    shared.append(1, b"x")
    first = shared.express.gather()
    shared.append(0, b"b")
    second = shared.express.gather()
    assert [run.descriptor.start for run in second.made.runs] == [1]
    return first, second


def test_second_object_continues_the_first_before_it_is_committed(shared):
    first, second = two_batches(shared)
    # Put in any order, committed in theirs.
    put_second = shared.express.put(second)
    shared.express.commit(first, shared.express.put(first))
    shared.express.commit(second, put_second)
    assert shared.formats(0) == [(0, 1, FORMAT_EXPRESS), (1, 2, FORMAT_EXPRESS)]
    assert (shared.read(0), shared.read(1)) == ([b"a", b"b"], [b"x"])
    assert not shared.express.write_next()
    assert len(shared.objects()) == 2


def test_failed_first_object_takes_the_second_run_with_it(shared):
    first, second = two_batches(shared)
    shared.express.commit(first, UnavailableError("away"))
    assert shared.topics[0].bucket.uploads.last_error is not None
    # Planned from the bucket's end again, while the second one is still on its way.
    shared.append(0, b"c")
    third = shared.express.gather()
    assert {run.owned.topic: run.descriptor.start for run in third.made.runs} == {
        "/default/t0": 0,
        "/default/t1": 0,
    }
    shared.express.commit(second, shared.express.put(second))
    assert shared.read(0) == []
    # The second one's failure was expected: what was planned since counts.
    shared.append(0, b"d")
    fourth = shared.express.gather()
    assert [run.descriptor.start for run in fourth.made.runs] == [3]
    for batch in (third, fourth):
        shared.express.commit(batch, shared.express.put(batch))
    assert (shared.read(0), shared.read(1)) == ([b"a", b"b", b"c", b"d"], [b"x"])


def test_objects_on_their_way_are_known(shared):
    first, second = two_batches(shared)
    keys = [first.made.key, second.made.key]
    assert all(map(shared.express.is_under_way, keys))
    shared.express.commit(first, UnavailableError("away"))
    assert [shared.express.is_under_way(key) for key in keys] == [False, True]
    shared.express.commit(second, shared.express.put(second))
    assert not any(map(shared.express.is_under_way, keys))


# -- metadata from the bucket ---------------------------------------------------------------


def rebuild(site, name="/default/t0"):
    topic = TopicName.parse(name)
    metadata = MemoryMetadata(site.clock)
    keys = type(site.catalog().keys)(PREFIX, topic)
    damage = []
    runs = find_runs(site.objects, on_damage=damage.append)
    report = rebuild_topic(
        site.objects,
        metadata,
        keys,
        find_topics(site.objects).get(topic, []),
        runs=runs.runs_of(topic),
        clock=site.clock,
        dry_run=False,
    )
    return report, damage


def test_metadata_is_rebuilt_from_footers(site):
    shared = Shared(site)
    shared.append(0, b"a", b"b")
    shared.append(1, b"c")
    shared.express.write_next()
    shared.topics[0].append(b"d")
    shared.topics[0].upload()
    shared.append(0, b"e")
    shared.express.write_next()
    wanted = [d for d, _ in shared.topics[0].bucket.owned.catalog.descriptors()]
    report, damage = rebuild(site)
    assert damage == report.errors == report.gaps == report.left_out == []
    assert [(d.start, d.end, d.object_id) for d in report.objects] == [
        (d.start, d.end, d.object_id) for d in wanted
    ]
    assert report.objects[0] == wanted[0]
    assert report.status == "recovered"


def test_topic_made_again_has_its_own_messages_alone(shared):
    shared.append(0, b"old")
    shared.express.write_next()
    shared.log.delete("/default/t0")
    shared.topics[0] = shared.open("/default/t0")
    shared.append(0, b"new")
    shared.express.write_next()
    report, _ = rebuild(shared.site)
    assert [d.incarnation for d in report.objects] == [
        shared.topics[0].bucket.owned.record.incarnation
    ]
    assert len(report.left_out) == 1


def test_damaged_manifest_hides_no_messages(shared):
    shared.append(0, b"a", b"b")
    shared.express.write_next()
    key = manifest_key(TopicName.parse("/default/t0"))
    shared.site.objects.put(key, b"{}")
    report, _ = rebuild(shared.site)
    assert [(d.start, d.end) for d in report.objects] == [(0, 2)]
    assert [d.incarnation for d in report.objects] == [
        shared.topics[0].bucket.owned.record.incarnation
    ]
    assert report.left_out == []
    assert [error.path for error in report.errors] == [key]


def test_damaged_footer_is_told(shared):
    shared.append(0, b"a")
    shared.express.write_next()
    (key,) = shared.objects()
    shared.site.objects.put(key, shared.site.objects.read(key, 0, 1 << 20)[:-1] + b"?")
    report, damage = rebuild(shared.site)
    assert len(damage) == 1
    assert damage[0].path == key
    assert report.objects == []


def test_damaged_run_is_told_and_kept(shared):
    shared.append(0, b"aaaa")
    shared.express.write_next()
    (key,) = shared.objects()
    data = shared.site.objects.read(key, 0, 1 << 20)
    shared.site.objects.put(key, data.replace(b"aaaa", b"aaab"))
    report, _ = rebuild(shared.site)
    assert len(report.errors) == 1
    assert [(d.start, d.end, d.checksum) for d in report.objects] == [(0, 1, None)]


def test_topic_whose_messages_are_in_express_objects_alone_is_not_forgotten(site):
    """Goal: without metadata, a topic of the same name is refused, not begun anew."""
    shared = Shared(site)
    shared.append(0, b"a")
    shared.express.write_next()
    site.kill(shared.log)
    site.metadata.delete_prefix(PREFIX)
    other = site.open("b")
    with pytest.raises(Exception, match="ister recover"):
        other.topic("/default/t0", create=True, ack="tiered")
    site.objects.put(manifest_key(TopicName.parse("/default/t0")), b"{}")
    with pytest.raises(Exception, match="ister recover"):
        other.topic("/default/t0", create=True, ack="tiered")


def test_manifest_that_could_not_be_saved_is_saved_before_the_first_object(site):
    def fail(kind, key):
        if key.endswith("topic.json"):
            raise UnavailableError("away")

    site.objects.before = fail
    shared = Shared(site, topics=1)
    shared.append(0, b"a")
    shared.express.write_next()
    assert shared.objects() == []
    site.objects.before = lambda kind, key: None
    site.clock.advance(2)
    shared.express.write_next()
    assert shared.read(0) == [b"a"]
    assert [d.end for d in rebuild(site)[0].objects] == [1]


# -- the thread -----------------------------------------------------------------------------


def test_thread_uploads_what_is_appended(tmp_path):
    with ister.open(tmp_path) as log:
        topics = [
            log.topic(f"/default/t{number}", create=True, ack="tiered") for number in range(5)
        ]
        for number in range(20):
            offsets = [topic.append(b"%d" % number) for topic in topics]
        for topic, offset in zip(topics, offsets, strict=True):
            topic.wait(offset, timeout=60)
            assert [m.payload for m in topic.read(end=20)] == [b"%d" % n for n in range(20)]
        found = list(log.stores.objects.list(EXPRESS_PREFIX))
        assert 0 < len(found) <= 25
        assert log.metrics.snapshot()["express.objects_total"] == len(found)


# -- at an awkward moment -----------------------------------------------------------------------


def quiet(store):
    store.before = store.after = lambda kind, key: None


def test_object_that_is_committed_during_an_upload(shared):
    """Goal: the upload continues after the express object, whatever it has read meanwhile."""
    shared.append(0, b"a")

    def write(kind, key):
        if kind == "close" and key.startswith("storage/topics/"):
            quiet(shared.site.objects)
            shared.append(0, b"b")
            shared.express.write_next()

    shared.site.objects.before = write
    shared.topics[0].upload()
    assert shared.topics[0].watermarks.tiered == 2
    assert shared.formats(0) == [(0, 2, FORMAT_EXPRESS)]
    shared.append(0, b"c")
    assert shared.topics[0].upload().end == 3
    assert shared.formats(0)[1:] == [(2, 3, FORMAT_FRAMES)]
    assert shared.read(0) == [b"a", b"b", b"c"]


def test_topic_that_is_opened_again_during_an_object_that_fails(site):
    """Goal: the messages of the topic as it is open now get into the next object."""
    shared = Shared(site)
    shared.append(0, b"a")
    old = shared.topics[0]

    def reopen(kind, key):
        if kind == "put" and key.startswith(EXPRESS_PREFIX):
            quiet(site.objects)
            shared.log._retire(old)
            shared.express.remove(old.bucket.uploads)
            shared.topics[0] = shared.open("/default/t0")
            raise UnavailableError("away")

    site.objects.before = reopen
    shared.express.write_next()
    assert shared.topics[0] is not old
    shared.express.write_next()
    assert shared.topics[0].watermarks.tiered == 1
    assert shared.read(0) == [b"a"]


def test_lost_topic_that_was_opened_again_is_not_told_of_its_former_self(site):
    """Goal: a commit that comes too late, of a topic that was closed, ends nothing."""
    shared = Shared(site)
    shared.append(0, b"a")
    old, told = shared.topics[0], []
    old.bucket.on_fenced = lambda: told.append(1)

    def reopen(kind, key):
        if kind == "put" and key.startswith(EXPRESS_PREFIX):
            quiet(site.objects)
            shared.log._retire(old)
            shared.topics[0] = shared.open("/default/t0")

    site.objects.before = reopen
    shared.express.write_next()
    assert old.bucket.owned.is_fenced
    assert told == []
    shared.express.write_next()
    assert shared.read(0) == [b"a"]


def test_topic_whose_metadata_cannot_be_used_does_not_slow_the_others(site):
    """Goal: its errors are its own; the next object of the others does not wait for a retry."""
    shared = Shared(site)
    shared.append(0, b"a")
    shared.append(1, b"b")
    owned = shared.topics[0].bucket.owned

    errors = cycle([ConflictError("another pointer"), CorruptDataError("not a record")])

    def refuse(descriptor, *, is_first):
        raise next(errors).again()

    owned.prepare_commit = refuse
    for number in range(3):
        shared.append(1, b"%d" % number)
        site.clock.advance(2)
        shared.express._is_awake = False
        shared.express.write_next()
        assert shared.express._failures == 0
        assert shared.express._is_awake, "the thread has to come back for it"
        assert shared.topics[1].watermarks.tiered == number + 2
    assert isinstance(shared.topics[0].bucket.uploads.last_error, CorruptDataError)
    assert shared.topics[0].bucket.uploads.failures == 3
    del owned.prepare_commit
    site.clock.advance(2)
    shared.express.write_next()
    assert shared.read(0) == [b"a"]


def test_topic_with_an_error_that_nobody_expected_does_not_stop_the_others(site):
    shared = Shared(site)
    shared.append(0, b"a")
    shared.append(1, b"b")

    def add_run(made, bytes_max):
        raise ZeroDivisionError

    shared.topics[0].bucket.uploads.add_run = add_run
    shared.express.write_next()
    assert shared.read(1) == [b"b"]
    assert [failure.thread for failure in threads.failures()] == ["ister-express"]
    threads.forget()
    del shared.topics[0].bucket.uploads.add_run
    site.clock.advance(2)
    shared.express.write_next()
    assert shared.read(0) == [b"a"]


def test_put_with_an_error_that_nobody_expected_is_tried_again(shared):
    shared.append(0, b"a")
    shared.append(1, b"b")

    def fail(kind, key):
        raise ZeroDivisionError

    shared.site.objects.before = fail
    batch = shared.express.gather()
    with ThreadPoolExecutor(1) as puts:
        put = puts.submit(shared.express.put, batch)
        shared.express._finish(put, batch, lambda: None)
    quiet(shared.site.objects)
    assert not shared.express.is_under_way(batch.made.key)
    assert [failure.thread for failure in threads.failures()] == ["ister-express"]
    threads.forget()
    shared.express.write_next()
    assert (shared.read(0), shared.read(1)) == ([b"a"], [b"b"])


def test_run_that_is_planned_while_the_one_before_it_fails(shared, monkeypatch):
    """Goal: both are planned anew, although nothing else is appended."""
    shared.append(0, b"a")
    first = shared.express.gather()
    shared.append(0, b"b")

    def fail_first(self, owned):
        monkeypatch.undo()
        shared.express.commit(first, UnavailableError("away"))

    monkeypatch.setattr(Stores, "assure_manifest", fail_first)
    second = shared.express.gather()
    shared.express.commit(second, shared.express.put(second))
    assert shared.read(0) == []
    shared.express.write_next()
    assert shared.read(0) == [b"a", b"b"]


def test_error_of_a_topic_that_is_gone_delays_nobody(shared):
    """Goal: a message after a failure whose topics have gone is written without a pause."""
    shared.append(0, b"a")

    def fail(kind, key):
        if kind == "put":
            raise UnavailableError("away")

    shared.site.objects.before = fail
    shared.express.write_next()
    quiet(shared.site.objects)
    assert shared.express._failures == 1
    shared.express.remove(shared.topics[0].bucket.uploads)
    shared.express.write_next()
    assert shared.express._failures == 0


def test_end_of_the_lease_costs_a_few_calls_not_some_for_each_topic(site):
    """Goal: a broker with many topics that wakes up after a pause is not busy for minutes."""
    shared = Shared(site, topics=100)
    for number in range(100):
        shared.append(number, b"a")
    calls = []

    def pause(kind, key):
        if kind == "put" and key.startswith(EXPRESS_PREFIX):
            quiet(site.objects)
            site.clock.advance(60)
            shared.log.stores.membership.renew()
            site.metadata.before = lambda kind, key: calls.append(kind)

    site.objects.before = pause
    shared.express.write_next()
    assert len(calls) <= 10
    assert all(topic.watermarks.tiered == 0 for topic in shared.topics)
    quiet(site.metadata)
    shared.express.write_next()
    assert all(topic.watermarks.tiered == 1 for topic in shared.topics)


def test_process_killed_before_the_manifest_leaves_it_to_the_next(site):
    """Goal: what is tiered can be recovered from the bucket alone, whenever a process died."""

    def crash(kind, key):
        if key.endswith("topic.json"):
            raise SimulatedCrash(kind)

    first = site.open("a")
    site.objects.before = crash
    with pytest.raises(SimulatedCrash):
        first.topic("/default/t0", create=True, ack="tiered")
    quiet(site.objects)
    site.kill(first)
    site.clock.advance(60)
    second = Shared(site, topics=1)
    second.append(0, b"a")
    second.express.write_next()
    assert second.read(0) == [b"a"]
    name = TopicName.parse("/default/t0")
    assert name in find_topics(site.objects)
    manifest = load_manifest(site.objects, name)
    (run,) = find_runs(site.objects, on_damage=pytest.fail).runs_of(name)
    assert manifest.incarnation == run.incarnation


def test_manifest_is_there_before_the_last_object_of_the_topics_own_goes(site):
    """Goal: a topic without a manifest, whose express objects are what expiry leaves, is found."""
    limit = {"cloud": {"retention": {"time_minutes": 1}}}
    shared = Shared(site, topics=1, storage=limit)
    shared.append(0, b"a")
    shared.topics[0].upload()
    # The process that made the topic had been killed before it saved this.
    site.objects.drop("storage/topics/default/t0/topic.json")
    site.clock.advance(600)
    shared.log.stores.membership.renew()
    shared.append(0, b"b")
    shared.express.write_next()
    assert shared.topics[0].bucket.retention.expire() == 1
    assert shared.formats(0) == [(1, 2, FORMAT_EXPRESS)]
    name = TopicName.parse("/default/t0")
    assert name in find_topics(site.objects)
    incarnation = shared.topics[0].bucket.owned.record.incarnation
    assert load_manifest(site.objects, name).incarnation == incarnation


def test_deletion_that_was_paused_leaves_the_manifest_of_the_next_topic_of_that_name(site):
    """Goal: messages in express objects of the new topic are found without metadata."""
    first = Shared(site, topics=1)
    first.append(0, b"old")
    name = TopicName.parse("/default/t0")

    def replace(kind, key):
        if kind == "read" and key.endswith("topic.json"):
            quiet(site.objects)
            site.clock.advance(60)
            second = site.open("b")
            second.delete("/default/t0")
            second.topic("/default/t0", create=True, ack="tiered")

    site.objects.before = replace
    with pytest.raises(FencedError):
        first.log.delete("/default/t0")
    record, _ = site.catalog(name).record()
    assert load_manifest(site.objects, name).incarnation == record.incarnation


def test_manifest_that_is_gone_comes_back_with_the_next_collection(shared):
    shared.append(0, b"a")
    shared.express.write_next()
    shared.site.objects.drop("storage/topics/default/t0/topic.json")
    shared.topics[0].bucket.retention.collect_orphans()
    assert TopicName.parse("/default/t0") in find_topics(shared.site.objects)


def test_manifest_is_not_saved_into_a_deletion(site, monkeypatch):
    """Goal: a manifest that was missing does not appear when its topic has just been deleted."""

    def fail(kind, key):
        if key.endswith("topic.json"):
            raise UnavailableError("away")

    site.objects.before = fail
    shared = Shared(site, topics=1)
    shared.append(0, b"a")
    quiet(site.objects)
    real = Stores.assure_manifest

    def assure(self, owned):
        shared.log.delete("/default/t0")
        real(self, owned)

    monkeypatch.setattr(Stores, "assure_manifest", assure)
    shared.express.write_next()
    assert TopicName.parse("/default/t0") not in find_topics(site.objects)


# -- the thread -----------------------------------------------------------------------------


class Interrupt(BaseException):
    """What a signal handler raises."""


def test_wake_that_a_signal_interrupts_leaves_no_lock_behind(site):
    """Goal: a handler that raises anywhere in a wait for `tiered` does not stop later syncs."""
    shared = Shared(site, topics=1)
    tier = shared.topics[0].bucket
    count = 0

    def raise_interrupt(number, frame):
        raise Interrupt

    # Not SIGALRM, with which the test's own time limit comes. The timer goes on by itself, because
    # an exception that is raised in a finalizer or in a callback of the collector is swallowed.
    before = signal.signal(signal.SIGVTALRM, raise_interrupt)
    try:
        while count < 200:
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0001, 0.05)
                while True:
                    shared.express._is_awake = False
                    tier.uploads.on_synced()
            except Interrupt:
                count += 1
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    shared.express._is_awake = False
    other = threading.Thread(target=tier.uploads.on_synced, daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive()


def test_thread_ends_although_it_was_woken_just_before(site):
    stores = site.open().stores
    for _ in range(50):
        express = Express(stores)
        thread = threading.Thread(target=express.run, daemon=True)
        thread.start()
        express._wake()
        express.stop()
        thread.join(60)
        assert not thread.is_alive()
