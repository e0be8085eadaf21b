"""Trim and expiry of a topic with a bucket: objects that are lost, unknown, expiring or merged."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from ister.bucket.catalog import Catalog
from ister.bucket.names import format_object_id
from ister.errors import CommitUnknownError, DataGapError, UnavailableError
from tests.support.machine import payloads
from tests.support.memory_fs import SimulatedCrash
from tests.support.stores import NAME, Pipeline

TEXT = str(NAME)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def fill(topic, payloads_):
    for payload in payloads_:
        topic.append(payload)
    topic.flush()


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
