"""Express objects beside uploads, closings and errors that come at an awkward moment."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import pytest

from ister.base import threads
from ister.base.model import TopicName
from ister.bucket.express import find_runs
from ister.bucket.names import EXPRESS_PREFIX
from ister.bucket.topic_manifest import load_manifest
from ister.errors import ConflictError, CorruptDataError, FencedError, UnavailableError
from ister.format.descriptor import FORMAT_EXPRESS, FORMAT_FRAMES
from ister.rescue.rebuild import find_topics
from ister.topic.express import Express
from ister.topic.stores import Stores
from tests.support.memory_fs import SimulatedCrash
from tests.support.stores import Site
from tests.unit.topic.test_express import Shared


@pytest.fixture
def site():
    with Site() as site:
        yield site


@pytest.fixture
def shared(site):
    return Shared(site)


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


def test_seal_during_an_object(site):
    """Goal: a topic is handed over while its messages are on their way with those of others."""
    shared = Shared(site)
    shared.append(0, b"a")
    shared.append(1, b"b")

    def seal(kind, key):
        if kind == "put" and key.startswith(EXPRESS_PREFIX):
            quiet(site.objects)
            assert shared.log.seal("/default/t0") == 1

    site.objects.before = seal
    shared.express.write_next()
    assert shared.read(1) == [b"b"]
    other = Shared(site, "b", topics=1)
    assert other.read(0) == [b"a"]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_deletion_during_an_object(shared, moment):
    """Goal: nothing of a deleted topic comes back, and the other one is not disturbed."""
    shared.append(0, b"a")
    shared.append(1, b"b")

    def delete(kind, key):
        if kind == "put" and key.startswith(EXPRESS_PREFIX):
            quiet(shared.site.objects)
            shared.log.delete("/default/t0")

    setattr(shared.site.objects, moment, delete)
    shared.express.write_next()
    assert shared.read(1) == [b"b"]
    keys = shared.topics[0].bucket.owned.catalog.keys
    assert shared.site.metadata.range(keys.storage) == []
    shared.topics[0] = shared.open("/default/t0")
    assert shared.topics[0].watermarks.next == 0
    shared.append(0, b"new")
    shared.express.write_next()
    assert shared.read(0) == [b"new"]


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
