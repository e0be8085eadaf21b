"""What a topic costs does not depend on how many there are, or on how many objects it has.

Operations are counted, at two sizes: on files, names listed, metadata, objects.
"""

from collections import Counter

import pytest

from ister.base.clock import SystemClock
from ister.errors import DiskError, TopicNameError
from ister.fs.local import LocalFileSystem
from ister.objectstore.staged_files import StagedFiles
from ister.topic.bucket_link import TopicBucket
from ister.topic.dedup import SequencedTopics
from ister.topic.topic import Topic
from ister.topic.uploads import TopicUploads
from tests.support.machine import ROOT, NoThreads, eventually, fill
from tests.support.memory_fs import MemoryFileSystem, SimulatedCrash
from tests.support.stores import NAME, Site

TEXT = str(NAME)
FEW, MANY = 10, 150


class Counted:
    """Counts what a site's log does between `begin` and `end`."""

    def __init__(self, site):
        self._counts = counts = Counter()
        fs = site.disk()
        list_directory = fs.list_directory

        def listing(path):
            found = list_directory(path)
            counts["names listed"] += len(found)
            return found

        fs.list_directory = listing
        for what, store in (("file", fs), ("metadata", site.metadata), ("object", site.objects)):
            store.before = lambda kind, key, what=what: counts.update([f"{what} {kind}"])

    def of(self, work):
        """What `work` does."""
        before = Counter(self._counts)
        work()
        return self._counts - before


def opened(site, **storage):
    return site.open(scheduler=NoThreads(), storage=storage)


def syncs(site):
    """How often each directory is synced from here on."""
    synced = Counter()
    site.disk().before = lambda kind, path: synced.update([path] * (kind == "sync_directory"))
    return synced


def make(log, number):
    topic = log.topic(f"/default/topic-{number:04d}", create=True)
    topic.append(b"one")
    topic.flush()
    return topic


# -- making a topic -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["wal_cloud", "local_only"])
def test_making_a_topic_costs_the_same_however_many_there_are(site, mode):
    log, counted = opened(site, mode=mode), Counted(site)
    costs = [counted.of(lambda number=number: make(log, number)) for number in range(MANY)]
    assert costs[MANY - 1] == costs[FEW] == costs[1]


def test_making_a_topic_syncs_what_it_makes_and_nothing_above(site):
    log = opened(site)
    make(log, 0)
    synced = syncs(site)
    make(log, 1)
    # Its name; then its mark and its first file.
    assert synced == {f"{ROOT}/default": 1, f"{ROOT}/default/topic-0001": 2}


def test_making_a_topic_asks_the_stores_no_more_than_this(site):
    log = opened(site)
    make(log, 0)
    cost = Counted(site).of(lambda: make(log, 1))
    asked = {what: cost[what] for what in cost if what.startswith(("metadata", "object"))}
    assert asked == {
        "metadata current_revision": 1,
        # Partitions of that name, objects, cursors.
        "metadata range": 3,
        # The first partition, the pointer to the newest object, the record in the end.
        "metadata get": 3,
        "metadata get_many": 1,
        "metadata transact": 1,
        "object list": 1,
        "object put": 1,
    }
    assert cost["file sync"] == 1, "of its first message"


def test_names_that_differ_in_case_alone_are_refused_without_listing_again(site):
    log = opened(site)
    for number in range(FEW):
        make(log, number)
    counted = Counted(site)

    def refused(name):
        with pytest.raises(TopicNameError, match="case alone"):
            log.topic(name, create=True)

    cost = counted.of(lambda: refused("/default/Topic-0003"))
    assert cost["names listed"] == 0
    log.delete("/default/topic-0003")
    assert log.topic("/default/Topic-0003", create=True).name == "/default/Topic-0003"
    refused("/default/topic-0003")
    refused("/Default/other")


def test_name_of_a_topic_that_came_from_another_node_is_known(site):
    first = site.open("a", scheduler=NoThreads())
    make(first, 0)
    first.seal("/default/topic-0000")
    second = site.open("b", scheduler=NoThreads())
    make(second, 1)
    second.topic("/default/topic-0000")
    with pytest.raises(TopicNameError, match="case alone"):
        second.topic("/default/TOPIC-0000", create=True)


# -- names that are durable ---------------------------------------------------------------------


def test_directory_whose_sync_failed_is_synced_by_the_next_opening(site):
    log = opened(site, mode="local_only")
    make(log, 0)
    fs = site.disk()

    def failing(kind, path):
        if (kind, path) == ("sync_directory", f"{ROOT}/default"):
            raise OSError(5, "injected")

    fs.before = failing
    with pytest.raises(DiskError):
        make(log, 1)
    synced = syncs(site)
    make(log, 1)
    assert f"{ROOT}/default" in synced


@pytest.mark.parametrize("mode", ["wal_cloud", "local_only"])
def test_first_opening_after_a_kill_syncs_the_names_that_were_left(site, mode):
    log = opened(site, mode=mode)
    make(log, 0)
    fs = site.disk()

    def dying(kind, path):
        if (kind, path) == ("sync_directory", f"{ROOT}/default"):
            raise SimulatedCrash

    fs.before = dying
    with pytest.raises(SimulatedCrash):
        make(log, 1)
    site.kill(log)
    again, synced = opened(site, mode=mode), syncs(site)
    again.topic("/default/topic-0000")
    assert {ROOT, f"{ROOT}/default", f"{ROOT}/default/topic-0000"} <= set(synced)


# -- opening a topic ----------------------------------------------------------------------------


def reopened(site, count, *, mode="wal_cloud"):
    log = opened(site, mode=mode)
    for number in range(count):
        make(log, number).wal.save_checkpoint()
    site.kill(log)
    return opened(site, mode=mode)


@pytest.mark.parametrize("mode", ["wal_cloud", "local_only"])
def test_opening_a_topic_costs_the_same_however_many_there_are(site, mode):
    log, counted = reopened(site, MANY, mode=mode), Counted(site)
    costs = [
        counted.of(lambda number=number: log.topic(f"/default/topic-{number:04d}"))
        for number in range(MANY)
    ]
    assert costs[MANY - 1] == costs[FEW] == costs[1]


def test_opening_a_topic_that_nobody_has_written_since_writes_one_transaction(site):
    log, counted = reopened(site, 2), Counted(site)
    log.topic("/default/topic-0000")
    cost = counted.of(lambda: log.topic("/default/topic-0001"))
    assert cost["metadata transact"] == 1
    assert cost["metadata get"] + cost["metadata range"] <= 9
    assert cost["file sync_directory"] == 1
    assert not [kind for kind in cost if kind in ("file create", "file rename", "file sync")]
    # The terms; the objects, as there are no terms; and again, as the process before was killed.
    asked = {kind: cost[kind] for kind in cost if kind.startswith("object ")}
    assert asked == {"object list": 3}


def test_checkpoint_that_says_something_else_is_written_at_opening(site):
    log = opened(site, mode="local_only")
    make(log, 0)  # its checkpoint is of before the message
    site.kill(log)
    log = opened(site, mode="local_only")
    counted = Counted(site)
    assert counted.of(lambda: log.topic("/default/topic-0000"))["file rename"] == 1


# -- afterwards ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [FEW, MANY])
def test_only_the_newest_objects_are_looked_at_when_a_topic_is_opened(site, count):
    topic = opened(site).topic(TEXT, create=True)
    for _ in range(count):
        fill(topic, 1)
        topic.upload()
    site.objects.drop(site.key(count - 1))
    counted = Counted(site)
    restored = []
    cost = counted.of(lambda: restored.extend(topic.bucket.check_recent()))
    assert restored
    assert site.objects.stat(site.key(count - 1)).size > 0
    assert cost["object stat"] <= 6
    assert cost["metadata range"] <= 16


def test_idle_topics_are_not_checked(monkeypatch):
    looked = Counter()
    is_idle = TopicUploads.is_idle.fget
    monkeypatch.setattr(
        TopicUploads, "is_idle", property(lambda one: looked.update([one]) or is_idle(one))
    )
    with Site(clock=SystemClock()) as site:
        log = site.open(background=True, storage={"uploader": {"interval_seconds": 1}})
        topics = [make(log, number) for number in range(FEW)]
        eventually(lambda: all(topic.watermarks.tiered == 1 for topic in topics))
        background = log._background
        background._sweep_at = float("inf")
        eventually(lambda: not background._listed)
        looked.clear()
        for _ in range(10):
            background._hand_out(site.clock.monotonic())
        assert not looked
        topics[3].append(b"two")
        topics[3].flush()
        eventually(lambda: topics[3].watermarks.tiered == 2)
        assert set(looked) == {topics[3].bucket.uploads}


def test_topic_that_left_the_log_is_not_looked_at_again():
    with Site(clock=SystemClock()) as site:
        log = site.open(background=True)
        topic = make(log, 0)
        eventually(lambda: topic.watermarks.tiered == 1)
        log.delete(topic.name)
        topic.bucket.uploads.on_synced()
        background = log._background
        assert topic not in background._added
        eventually(lambda: topic not in background._listed)


def test_objects_of_many_topics_are_looked_at_a_few_at_a_time(monkeypatch, site):
    checked = []
    monkeypatch.setattr(TopicBucket, "check_recent", lambda bucket: checked.append(bucket) or [])
    log = site.open(background=True, storage={"uploader": {"engine": "embedded"}})
    for number in range(60):
        make(log, number)
    eventually(lambda: len(checked) == 32)
    site.clock.advance(1.0)
    eventually(lambda: len(checked) >= 36)
    background = log._background
    background._hand_out(site.clock.monotonic())
    background._retainer.submit(int).result()
    assert len(set(checked)) == len(checked) == 36


class NeverWalked:
    """A set that may be asked and not copied or walked over."""

    def __init__(self):
        self._names = set()
        self.update = self._names.update

    def __contains__(self, name):
        return name in self._names


def test_objects_in_directories_are_named_without_walking_over_all_directories(tmp_path):
    files = StagedFiles(str(tmp_path), LocalFileSystem())
    files._durable = NeverWalked()
    files._make(f"{tmp_path}/a/b")
    files._make(f"{tmp_path}/a/c")
    assert (tmp_path / "a" / "c").is_dir()


def test_directory_within_one_that_is_durable_syncs_nothing_above():
    fs = MemoryFileSystem()
    fs.make_directories("/data/ns")
    synced = Counter()
    fs.before = lambda kind, path: synced.update([path] * (kind == "sync_directory"))
    fs.make_directories("/data/ns/topic", within="/data/ns")
    assert synced == {"/data/ns": 1}


def test_publishing_to_a_new_topic_looks_at_no_others_each_time(site, monkeypatch):
    log, sequenced = opened(site, mode="local_only"), SequencedTopics()
    topics = [log.topic(f"/default/topic-{number:04d}", create=True) for number in range(MANY)]
    looked = Counter()
    state = Topic.state.fget
    monkeypatch.setattr(
        Topic, "state", property(lambda topic: looked.update([topic]) or state(topic))
    )
    for topic in topics:
        sequenced.get(topic)
    assert looked.total() <= 2 * MANY


def test_closed_topics_do_not_pile_up_among_those_that_are_published_to(site):
    log, sequenced = opened(site, mode="local_only"), SequencedTopics()
    for number in range(3 * 64):
        topic = log.topic(f"/default/topic-{number:04d}", create=True)
        sequenced.get(topic)
        topic.close()
    assert len(sequenced._topics) <= 64
