"""Interleavings and damage that were once answered wrongly, each as small as it gets."""

import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

import ister.topic.opening as topic_opening
from ister.base.clock import SystemClock
from ister.base.model import TopicState
from ister.bucket.catalog import Catalog
from ister.bucket.names import format_object_id
from ister.errors import (
    ClosedError,
    CommitUnknownError,
    DataGapError,
    FencedError,
    UnavailableError,
)
from ister.format.records import decode_progress, encode_topic
from ister.topic.background import Background
from tests.support.machine import ROOT, eventually, payloads
from tests.support.memory_fs import SimulatedCrash
from tests.support.stores import NAME, Pipeline, Site, save_cursor

TEXT = str(NAME)
PATH = f"{ROOT}{TEXT}"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.fixture
def site():
    with Site() as site:
        yield site


@pytest.fixture
def live_site():
    """With the machine's own clock, for threads."""
    with Site(clock=SystemClock()) as site:
        yield site


def overwrite(site, position, data, name="wal.log"):
    file = site.disk().open(f"{PATH}/{name}")
    file.write_at(position, [data])
    file.sync()
    file.close()


def local_bytes(site, name="wal.log"):
    file = site.disk().open_read(f"{PATH}/{name}")
    try:
        return file.read_at(0, file.size())
    finally:
        file.close()


def fill(topic, payloads_):
    for payload in payloads_:
        topic.append(payload)
    topic.flush()


# -- damage before acknowledged messages --------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2048], ids=["a byte", "many frames"])
def test_messages_behind_damage_that_the_bucket_does_not_have_are_not_given_up(site, size):
    """Goal: acknowledged frames above `tiered`, behind damage below it, keep their offsets."""
    sent = [b"m%d" % number for number in range(1000)]
    log = site.open()
    topic = log.topic(TEXT, create=True)
    fill(topic, sent[:500])
    topic.upload()
    fill(topic, sent[500:])
    site.kill(log)
    at = local_bytes(site).find((498).to_bytes(8, "little"))
    overwrite(site, at + (20 if size == 1 else 0), b"\xaa" * size)
    topic = site.open().topic(TEXT)
    assert (topic.state, topic.wal.next) == (TopicState.QUARANTINED, 1000)
    assert payloads(topic.read(990)) == sent[990:]


def test_bytes_that_nobody_can_read_are_not_taken_for_nothing(site):
    log = site.open()
    topic = log.topic(TEXT, create=True)
    fill(topic, [b"m%d" % number for number in range(500)])
    topic.upload()
    fill(topic, [b"m%d" % number for number in range(500, 1000)])
    site.kill(log)
    data = local_bytes(site)
    at = data.find((498).to_bytes(8, "little"))
    overwrite(site, at, b"\xaa" * (len(data) - at))
    topic = site.open().topic(TEXT)
    assert topic.state is TopicState.QUARANTINED
    assert site.disk().list_directory(f"{ROOT}/default") == ["orders"]


def test_time_is_found_in_the_bucket_where_a_local_frame_is_damaged(site):
    log = site.open(cache_capacity=10)
    topic = log.topic(TEXT, create=True)
    for number in range(2000):
        topic.append(b"x" * 300, publish_time=1000 + number)
    topic.upload()
    log.close()
    topic = site.open(cache_capacity=10).topic(TEXT)
    overwrite(site, 1200, b"\xaa" * 20)
    assert topic.reader(EPOCH + timedelta(milliseconds=1010)).next_offset == 10
    assert topic.reader(EPOCH + timedelta(milliseconds=2990)).next_offset == 1990


# -- what the catalog lacks ---------------------------------------------------------------------


def without_its_first_object(site, **settings):
    log = site.open(rotate_max_bytes=65536, retention={"time_minutes": 1}, **settings)
    topic = log.topic(TEXT, create=True)
    for _ in range(4):
        fill(topic, [b"x" * 3000] * 30)
        topic.upload()
    site.objects.delete(site.key(0))
    site.metadata.delete(topic.bucket.owned.catalog.keys.descriptor(0))
    site.clock.advance(3600)
    log.stores.membership.renew()
    return log, topic


def test_files_before_the_oldest_object_stay_until_they_are_in_the_bucket(site):
    log, topic = without_its_first_object(site)
    with pytest.raises(DataGapError):
        topic.bucket.retention.trim()
    with pytest.raises(DataGapError):
        log.seal(TEXT)
    topic = log.topic(TEXT)
    assert topic.earliest == 0
    assert log.repair(TEXT).is_whole
    assert site.ranges()[0] == (0, 30)
    topic = log.topic(TEXT)
    assert topic.bucket.retention.trim() > 0
    assert sum(1 for _ in topic.read(0)) == 120


def test_files_whose_objects_have_expired_are_not_owed(site):
    settings = {"cloud": {"retention": {"time_minutes": 5}}}
    log = site.open(rotate_max_bytes=65536, retention={"time_minutes": 1}, storage=settings)
    topic = log.topic(TEXT, create=True)
    for _ in range(4):
        fill(topic, [b"x" * 3000] * 30)
        topic.upload()
    site.clock.advance(3600)
    log.stores.membership.renew()
    assert topic.bucket.retention.expire() == 3
    assert topic.bucket.owned.record.expired_before == 90
    assert topic.bucket.retention.trim() > 0
    assert payloads(topic.read(topic.earliest)) == [b"x" * 3000] * (120 - topic.earliest)


@pytest.mark.parametrize("how", ["trim", "seal"])
@pytest.mark.parametrize("harm", ["lost", "damaged"])
def test_object_whose_expiry_was_interrupted_is_owed_while_it_is_read(site, harm, how):
    """Goal: nothing local goes for which the catalog names an object that cannot be read.

    Method: the process ends when the expiry is on record and the descriptors are still there.
    """
    settings = {
        "rotate_max_bytes": 65536,
        "retention": {"time_minutes": 1},
        "storage": {"cloud": {"retention": {"time_minutes": 5}}},
    }
    log = site.open(**settings)
    topic = log.topic(TEXT, create=True)
    for _ in range(4):
        fill(topic, [b"x" * 3000] * 30)
        topic.upload()
    site.clock.advance(3600)
    log.stores.membership.renew()
    changes = []

    def stop_before_the_second_change(kind, key):
        if kind == "transact":
            changes.append(key)
            if len(changes) == 2:
                raise SimulatedCrash

    site.metadata.before = stop_before_the_second_change
    with pytest.raises(SimulatedCrash):
        topic.bucket.retention.expire()
    site.metadata.before = lambda kind, key: None
    site.kill(log)
    if harm == "lost":
        site.objects.drop(site.key(0))
    else:
        site.objects.corrupt(site.key(0), 100)
    log = site.open(**settings)
    topic = log.topic(TEXT)
    assert topic.bucket.owned.record.expired_before == 90
    assert topic.earliest == 0
    if how == "trim":
        assert topic.bucket.retention.trim() > 0
        assert topic.wal.trimmed > 0
    else:
        log.seal(TEXT)
        topic = log.topic(TEXT)
    assert payloads(topic.read(0)) == [b"x" * 3000] * 120


def test_object_whose_commit_got_no_answer_is_not_counted_by_expiry(site):
    settings = {"cloud": {"retention": {"time_minutes": 5}}}
    log = site.open(rotate_max_bytes=65536, storage=settings)
    topic = log.topic(TEXT, create=True)
    for _ in range(2):
        fill(topic, [b"x" * 3000] * 30)
        topic.upload()
    known = topic.bucket.owned.last
    fill(topic, [b"x" * 3000] * 30)
    topic.upload()
    # The third one is in the catalog, and its owner has not learnt of it.
    topic.bucket.owned.last = known
    site.clock.advance(3600)
    log.stores.membership.renew()
    assert topic.bucket.retention.expire() == 1
    assert site.ranges() == [(30, 60), (60, 90)]


def merge_under_walk(site, monkeypatch, *groups):
    """Whenever the catalog has been read up to an object, it and its neighbours are merged."""
    acting, merges = Pipeline(site, key="/danube/pipeline/jobs/merger").acting(), iter(groups)
    real = Catalog.descriptors

    def descriptors(self, *args):
        merge = next(merges, None) if not args else None
        for described, revision in real(self, *args):
            yield described, revision
            if merge is not None and described.start == merge[0]:
                old = list(real(self, *merge))
                size = sum(d.size_bytes for d, _ in old)
                tag = f"{merge[1]:08x}"
                name = format_object_id(*merge, acting.epoch, tag=tag)
                new = replace(old[0][0], object_id=name, end=merge[1], size_bytes=size)
                assert acting.swap(old, replace(new, messages=merge[1] - merge[0]), until=0)
                # What was read before stays read, and the next page has it once more.
                yield from ((d, r) for d, r in real(self, merge[0], None))
                return

    monkeypatch.setattr(Catalog, "descriptors", descriptors)


@pytest.mark.parametrize("walks", [1, 2, 9])
def test_objects_that_are_merged_under_the_walk_do_not_count_twice(site, monkeypatch, walks):
    settings = {"cloud": {"retention": {"size_mb": 1}}}
    log = site.open(storage=settings)
    topic = log.topic(TEXT, create=True)
    for _ in range(12):
        fill(topic, [b"x" * 8500] * 10)
        topic.upload()
    before = site.ranges()
    assert len(before) == 12
    merge_under_walk(site, monkeypatch, *((20, 40 + 10 * number) for number in range(walks)))
    assert topic.bucket.retention.expire() == 0
    monkeypatch.undo()
    assert site.ranges()[0][0] == 0, "all of it is less than 1 MiB"
    assert topic.bucket.owned.record.expired_before == 0


def test_object_whose_commit_got_no_answer_leaves_no_gap_between_the_tiers(site):
    """Goal: local files stay until readers are sent to the bucket for what is in them.

    Method: a commit happens, its answer is lost, and so is the look at what became of it. Its owner
    comes by it in the catalog, and local retention comes before the log takes note of it.
    """
    log = site.open(cache_capacity=1, rotate_max_bytes=65536, retention={"time_minutes": 1})
    topic = log.topic(TEXT, create=True)
    for _ in range(2):
        fill(topic, [b"x" * 3000] * 30)
        topic.upload()
    fill(topic, [b"x" * 3000] * 30)
    commits = []

    def no_answer(kind, key):
        if commits or (kind == "transact" and len(site.ranges()) == 3):
            commits.append(kind)
            raise CommitUnknownError("no answer")

    site.metadata.after = no_answer
    with pytest.raises(UnavailableError):
        topic.upload()
    site.metadata.after = lambda kind, key: None
    fill(topic, [b"x" * 3000] * 30)
    topic.bucket.owned.refresh()
    assert topic.bucket.owned.tiered == 90
    site.clock.advance(3600)
    log.stores.membership.renew()
    assert topic.bucket.retention.trim() > 0
    assert topic.wal.trimmed <= topic.wal.tiered == 60
    assert payloads(topic.read(0)) == [b"x" * 3000] * 120
    topic.upload()
    assert topic.bucket.retention.trim() > 0
    assert topic.wal.trimmed > 60
    assert payloads(topic.read(0)) == [b"x" * 3000] * 120


def test_time_query_beside_expiry_begins_with_what_is_left(site):
    settings = {"cloud": {"retention": {"time_minutes": 5}}}
    log = site.open(rotate_max_bytes=65536, retention={"time_minutes": 1}, storage=settings)
    topic = log.topic(TEXT, create=True)
    for _ in range(4):
        fill(topic, [b"x" * 3000] * 30)
        topic.upload()
        site.clock.advance(600)
        log.stores.membership.renew()
    assert topic.bucket.retention.trim() > 0
    is_expired = []

    def before(kind, key):
        if kind == "read" and not is_expired:
            is_expired.append(True)
            topic.bucket.retention.expire()

    site.objects.before = before
    assert topic.reader(EPOCH).next_offset == 90
    assert is_expired


def test_time_query_beside_trim_skips_nothing(site):
    log = site.open(rotate_max_bytes=4096, retention={"time_minutes": 0})
    topic = log.topic(TEXT, create=True)
    for number in range(40):
        topic.append(b"x" * 500, publish_time=1000 * number)
        topic.flush()
    topic.upload()
    site.clock.advance(3600)
    log.stores.membership.renew()
    topic.wal.trim(14)
    history, is_trimmed = topic.bucket.history, []

    def trimmed_after_its_search():
        reader = history()
        find = reader.find_time

        def find_time(*args, **options):
            found = find(*args, **options)
            if not is_trimmed:
                is_trimmed.append(topic.bucket.retention.trim())
            return found

        reader.find_time = find_time
        return reader

    topic.bucket.history = trimmed_after_its_search
    assert topic.reader(EPOCH + timedelta(seconds=20)).next_offset == 20
    assert is_trimmed[0] > 0


# -- two at once --------------------------------------------------------------------------------


def test_append_during_a_repair_is_refused_or_there_afterwards(live_site):
    log = live_site.open()
    topic = log.topic(TEXT, create=True)
    fill(topic, [b"m%03d" % number * 50 for number in range(40)])
    topic.upload()
    fill(topic, [b"n%03d" % number for number in range(20)])
    overwrite(live_site, 300, b"\xaa")
    unhold, acked = topic.wal.gate.unhold, []

    def unhold_and_append(name):
        unhold(name)
        try:
            offset = topic.append(b"acked")
            topic.wait(offset)
        except ister_errors:
            return
        acked.append(offset)

    ister_errors = (UnavailableError, ClosedError)
    topic.wal.gate.unhold = unhold_and_append
    report = log.repair(TEXT)
    assert (report.local_frames, report.errors) == (20, ())
    topic = log.topic(TEXT)
    assert topic.state is TopicState.OPEN
    assert acked == []
    assert topic.append(b"next") == 60
    assert sum(1 for _ in topic.read(0)) == 61


def test_slow_deletion_deletes_a_topic_that_was_made_since_whole(live_site):
    log = live_site.open()
    log.topic(TEXT, create=True)
    real, has_it, may_go = log.topic, threading.Event(), threading.Event()

    def slow(name, **options):
        topic = real(name, **options)
        if threading.current_thread().name == "slow" and not has_it.is_set():
            has_it.set()
            may_go.wait(60)
        return topic

    log.topic = slow
    deleting = threading.Thread(target=lambda: log.delete(TEXT), name="slow")
    deleting.start()
    assert has_it.wait(60)
    log.delete(TEXT)
    log.topic(TEXT, create=True)
    may_go.set()
    deleting.join(60)
    # It was asked to delete the name, and deletes the topic that has it now, whole.
    assert log.topics() == []


def test_upload_under_way_publishes_nothing_into_a_deleted_topic(live_site):
    log = live_site.open()
    topic = log.topic(TEXT, create=True)
    fill(topic, [b"deleted"] * 10)
    is_under_way, may_go = threading.Event(), threading.Event()

    def before(kind, key):
        if kind == "close" and threading.current_thread().name == "uploading":
            is_under_way.set()
            may_go.wait(60)

    live_site.objects.before = before
    outcome = []

    def upload():
        try:
            outcome.append(topic.bucket.uploads.upload())
        except (FencedError, ClosedError) as error:
            outcome.append(error)

    uploading = threading.Thread(target=upload, name="uploading")
    uploading.start()
    assert is_under_way.wait(60)
    deleting = threading.Thread(target=lambda: log.delete(TEXT))
    deleting.start()
    may_go.set()
    uploading.join(10)
    deleting.join(10)
    live_site.objects.before = lambda kind, key: None
    again = log.topic(TEXT, create=True)
    assert (again.earliest, again.wal.next, payloads(again.read())) == (0, 0, [])
    assert outcome


def test_two_owners_of_one_epoch_are_told_apart(site):
    """Goal: an older copy of the metadata was restored, and another node claimed from it."""
    log_a = site.open("a")
    log_a.topic(TEXT, create=True)
    log_a.close()
    older = site.catalog().record()[0]
    log_a = site.open("a")
    a = log_a.topic(TEXT)
    fill(a, [b"a"] * 5)
    keys = a.bucket.owned.catalog.keys
    site.metadata.put(keys.record, encode_topic(older))
    site.metadata.delete(keys.owner)
    b = site.open("b").topic(TEXT, take_over=True)
    assert b.bucket.owned.epoch == a.bucket.owned.epoch
    fill(b, [b"b"] * 3)
    b.upload()
    with pytest.raises(FencedError):
        a.upload()
    assert site.ranges() == [(0, 3)]


def test_unreadable_record_of_one_topic_leaves_the_others_their_lease(site):
    log = site.open()
    a, b = log.topic("/default/a", create=True), log.topic("/default/b", create=True)
    site.metadata.put(a.bucket.owned.catalog.keys.record, b'{"epoch": 7, "ack": "replicated"}')
    site.clock.advance(60)
    log.stores.membership.renew()
    b.wait(b.append(b"x"))
    with pytest.raises(FencedError):
        a.wait(a.append(b"x"))


def test_replaced_owner_puts_no_cursor_back(site, monkeypatch):
    log = site.open("a")
    topic = log.topic(TEXT, create=True)
    fill(topic, [b"x"] * 10)
    topic.upload()
    key = topic.bucket.owned.catalog.keys.progress("s")
    log.close()
    recover = topic_opening.recover_tiered

    def slow(*args, **options):
        """The recovery takes longer than the lease."""
        monkeypatch.setattr(topic_opening, "recover_tiered", recover)
        recovered = recover(*args, **options)
        site.clock.advance(60)
        other = site.open("b").topic(TEXT, take_over=True)
        fill(other, [b"y"] * 10)
        save_cursor(other.bucket.owned, "s", 20)
        return recovered

    log = site.open("a")
    monkeypatch.setattr(topic_opening, "recover_tiered", slow)
    with pytest.raises(FencedError):
        log.topic(TEXT)
    assert decode_progress(site.metadata.get(key).value, key=key).offset == 20


def test_tender_does_not_spin_while_producers_are_held(live_site, monkeypatch):
    rounds, hand_out = [], Background._hand_out

    def counted(self, now):
        rounds.append(now)
        hand_out(self, now)

    monkeypatch.setattr(Background, "_hand_out", counted)
    log = live_site.open(
        background=True, storage={"uploader": {"max_lag_bytes": 1000}}, buffer_full="refuse"
    )
    topic = log.topic(TEXT, create=True)

    def down(kind, key):
        raise UnavailableError("the bucket is down")

    live_site.objects.before = down
    fill(topic, [b"x" * 100] * 20)
    eventually(lambda: "lag" in topic.wal.gate.holds)
    before = len(rounds)
    time.sleep(1)
    assert len(rounds) - before < 50


def test_log_closes_without_uploading_a_backlog(live_site):
    log = live_site.open(
        background=True, storage={"uploader": {"max_object_bytes": 4096, "interval_seconds": 1}}
    )
    topic = log.topic(TEXT, create=True)

    def slow(kind, key):
        if kind == "close":
            time.sleep(0.2)

    live_site.objects.before = slow
    fill(topic, [b"x" * 1000] * 200)
    eventually(lambda: bool(live_site.ranges()))
    log.close()
    assert topic.watermarks.tiered < 200
