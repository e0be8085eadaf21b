"""Express runs become objects of their topic: bytes, times, sources, errors, crashes, readers."""

from contextlib import suppress
from dataclasses import replace
from itertools import islice

import pytest

from ister.base import failpoints
from ister.base.clock import SystemClock
from ister.base.model import TopicName
from ister.bucket.express import find_runs
from ister.bucket.names import TopicKeys, object_key, objects_prefix, parse_object_id
from ister.bucket.orphans import collect_orphans
from ister.errors import CorruptDataError, NotFoundError
from ister.format.descriptor import FORMAT_EXPRESS, FORMAT_FRAMES
from ister.rescue.rebuild import find_topics, rebuild_topic
from ister.topic.resorting import RunSorter
from tests.support.express import Shared
from tests.support.machine import Task, eventually
from tests.support.memory_fs import SimulatedCrash
from tests.support.memory_metadata import MemoryMetadata
from tests.support.stores import PREFIX, Pipeline, Site

NAME = TopicName.parse("/default/t0")
MINUTES = 60
OBJECTS = {"uploader": {"index_every_messages": 3}}


@pytest.fixture
def shared(site):
    return Shared(site, topics=1, storage=OBJECTS)


def age(site, seconds=300):
    """Lets runs become old enough, while the logs that are open keep their leases."""
    while seconds > 0:
        site.clock.advance(min(seconds, 10))
        seconds -= 10
        for _, log in site._logs:
            log.stores.membership.renew()


def payloads(count):
    return [b"message %d" % number for number in range(count)]


def descriptors(shared):
    return [d for d, _ in shared.topics[0].bucket.owned.catalog.descriptors()]


def own_objects(site):
    """The names of the topic's own objects in the bucket."""
    prefix = objects_prefix(NAME)
    return [key.removeprefix(prefix) for key in site.bucket_keys() if key.startswith(prefix)]


def bytes_of(site, object_id):
    return site.objects.read(object_key(NAME, object_id), 0, 1 << 30)


def uploaded(shared, start, end):
    """What the embedded uploader makes of a range: the descriptor, and the object's bytes."""
    tier = shared.topics[0].bucket
    source = tier.uploads.open_files()
    try:
        made = tier.uploads.uploader._make_object(source, start, end)
    finally:
        source.close()
    data = bytes_of(shared.site, made.object_id)
    shared.site.objects.delete(object_key(NAME, made.object_id))
    return made, data


# -- the object ---------------------------------------------------------------------------------


@pytest.mark.parametrize("finalize", ["direct", "copy"])
def test_object_is_what_the_uploader_makes_of_the_range(site, finalize):
    shared = Shared(
        site, topics=1, storage={"uploader": {"index_every_messages": 3, "finalize": finalize}}
    )
    shared.fill(1, 5, 2, 7)
    runs = descriptors(shared)
    wanted, data = uploaded(shared, 0, 15)
    age(site)
    made = shared.topics[0].bucket.uploads.resort()
    assert descriptors(shared) == [made]
    assert bytes_of(site, made.object_id) == data
    assert len(made.offset_index) == 5
    name = parse_object_id(made.object_id)
    assert replace(name, tag=None) == parse_object_id(wanted.object_id)
    assert replace(
        made, object_id=wanted.object_id, created_at=wanted.created_at, etag=wanted.etag
    ) == replace(wanted, arrival_time_max=runs[-1].arrival_time_max)
    assert shared.read(0) == payloads(15)
    assert own_objects(site) == [made.object_id]


def test_retention_is_not_postponed(site, shared):
    shared.fill(2, 2)
    runs = descriptors(shared)
    age(site, 3600)
    made = shared.topics[0].bucket.uploads.resort()
    assert made.arrived_ms == runs[-1].arrived_ms
    assert made.created_at == runs[-1].created_at


def test_span_of_an_object_is_bounded(site, shared):
    shared.fill(1)
    age(site, 200)
    shared.fill(1, first=1)
    age(site, 200)
    shared.fill(1, first=2)
    age(site)
    tier = shared.topics[0].bucket
    assert [(m.start, m.end) for m in (tier.uploads.resort(), tier.uploads.resort())] == [
        (0, 2),
        (2, 3),
    ]
    assert tier.uploads.resort() is None
    assert shared.read(0) == payloads(3)


def test_objects_of_other_kinds_stay_as_they_are(site, shared):
    shared.fill(2, 2)
    shared.append(0, b"message 4")
    shared.topics[0].upload()
    shared.fill(3, first=5)
    age(site)
    tier = shared.topics[0].bucket
    before = descriptors(shared)[2]
    while tier.uploads.resort() is not None:
        pass
    found = descriptors(shared)
    assert [(d.start, d.end, d.format) for d in found] == [
        (0, 4, FORMAT_FRAMES),
        (4, 5, FORMAT_FRAMES),
        (5, 8, FORMAT_FRAMES),
    ]
    assert found[1] == before
    assert shared.read(0) == payloads(8)


# -- when ---------------------------------------------------------------------------------------


def is_due(shared):
    return shared.topics[0].bucket.uploads.sorter.is_due(shared.site.clock.monotonic())


def test_due_by_age(site, shared):
    tier = shared.topics[0].bucket
    assert tier.uploads.resort() is None  # no runs
    assert not tier.uploads.sorter.has_runs()
    shared.fill(1)
    assert not is_due(shared)
    assert tier.uploads.resort() is None
    age(site, 299)
    assert not is_due(shared)
    age(site, 1)
    assert is_due(shared)
    assert tier.uploads.resort() is not None
    assert not is_due(shared)
    assert not tier.uploads.sorter.has_runs()


def test_due_by_number(site, shared):
    shared.fill(*[1] * 99)
    assert not is_due(shared)
    shared.fill(1, first=99)
    assert is_due(shared)
    assert shared.topics[0].bucket.uploads.resort().end == 100
    assert not shared.topics[0].bucket.uploads.sorter.has_runs()


def test_due_by_size(site):
    shared = Shared(site, topics=1, storage={"uploader": {"max_object_bytes": 4096}})
    shared.append(0, b"x" * 2000)
    shared.express.write_next()
    assert not is_due(shared)
    shared.append(0, b"x" * 2500)
    shared.express.write_next()
    assert is_due(shared)
    tier = shared.topics[0].bucket
    assert (tier.uploads.resort().start, tier.uploads.resort()) == (
        0,
        None,
    )  # the second run waits for others


def test_run_that_is_committed_during_a_turn_is_not_forgotten(site, shared, monkeypatch):
    tier = shared.topics[0].bucket
    shared.fill(1)
    age(site)

    walk = RunSorter._walk

    def late(self, revisions):
        yield from walk(self, revisions)
        shared.fill(1, first=1)

    monkeypatch.setattr(RunSorter, "_walk", late)
    assert tier.uploads.resort() is not None
    monkeypatch.undo()
    assert tier.uploads.sorter.has_runs()
    age(site)
    assert tier.uploads.resort().start == 1


def test_runs_of_an_earlier_process_are_found(site, shared):
    shared.fill(1, 1)
    site.kill(shared.log)
    age(site)
    again = Shared(site, topics=1)
    assert again.topics[0].bucket.uploads.sorter.has_runs()
    assert again.topics[0].bucket.uploads.resort().end == 2
    assert again.topics[0].bucket.owned.epoch == descriptors(again)[0].epoch == 2


def test_old_history_is_not_read_for_the_runs_at_its_end(site, shared):
    topic = shared.topics[0]
    for number in range(600):
        topic.append(b"message %d" % number)
        topic.flush()
        topic.upload()
    shared.fill(1, 1, first=600)
    age(site)
    reads = []
    found = topic.bucket.owned.catalog.descriptors
    topic.bucket.owned.catalog.descriptors = lambda *range: (
        reads.append(one) or one for one in found(*range)
    )
    assert topic.bucket.uploads.resort().start == 600
    assert len(reads) < 400


# -- where frames come from -----------------------------------------------------------------------


def express_reads(site):
    return [key for key, _, _ in site.objects.reads if key.endswith(".dnbx")]


def test_frames_come_from_local_files(site, shared):
    shared.fill(3, 4)
    age(site)
    site.objects.reads.clear()
    shared.topics[0].bucket.uploads.resort()
    assert express_reads(site) == []


def test_frames_come_from_the_bucket_without_local_files(site, shared):
    shared.fill(3, 4)
    site.kill(shared.log)
    age(site)
    other = Shared(site, "b", topics=1, storage=OBJECTS)
    site.objects.reads.clear()
    made = other.topics[0].bucket.uploads.resort()
    # One read for each run.
    assert len(express_reads(site)) == 2
    assert (made.start, made.end) == (0, 7)
    assert other.read(0) == payloads(7)


def test_damaged_local_files_are_passed_over(site, shared):
    shared.fill(3, 4)
    age(site)
    tier = shared.topics[0].bucket
    path = tier._wal.directory.log_path(tier._wal.files[0].seq)
    file = site.disk().open(path)
    file.write_at(40, [bytes([file.read_at(40, 1)[0] ^ 1])])
    file.close()
    made = tier.uploads.resort()
    assert len(express_reads(site)) == 2
    assert (made.start, made.end, made.messages) == (0, 7, 7)
    site.kill(shared.log)
    age(site, 60)
    other = Shared(site, "b", topics=1)
    assert other.read(0) == payloads(7)


@pytest.mark.parametrize("loss", ["drop", "corrupt"])
def test_run_that_cannot_be_read_holds_up_no_other(site, shared, loss):
    shared.fill(1, 1, 1)
    site.kill(shared.log)
    middle = shared.objects()[1]
    if loss == "drop":
        site.objects.drop(middle)
    else:
        site.objects.corrupt(middle, 20)
    age(site)
    other = Shared(site, "b", topics=1)
    tier = other.topics[0].bucket
    for _ in range(3):
        with pytest.raises((NotFoundError, CorruptDataError)) as error:
            tier.uploads.resort()
        assert middle in error.value.path
        assert tier.uploads.last_error is not None
        assert not is_due(other)  # it waits before it tries again
    age(site)
    assert is_due(other)
    assert [(one.start, one.end) for one in (tier.uploads.resort(), tier.uploads.resort())] == [
        (0, 1),
        (2, 3),
    ]
    assert tier.uploads.resort() is None
    assert tier.uploads.last_error is None
    assert not tier.uploads.sorter.has_runs()
    assert [d.format for d in descriptors(other)] == [FORMAT_FRAMES, FORMAT_EXPRESS, FORMAT_FRAMES]


def test_object_that_is_not_what_was_written_is_not_swapped(site, shared):
    shared.fill(2, 2)
    age(site)
    runs = descriptors(shared)

    def rot(kind, key):
        if kind == "close":
            site.objects.corrupt(key, 30)

    site.objects.after = rot
    with pytest.raises(CorruptDataError):
        shared.topics[0].bucket.uploads.resort()
    assert descriptors(shared) == runs
    assert own_objects(site) == []
    site.objects.after = lambda kind, key: None
    assert shared.topics[0].bucket.uploads.resort().end == 4


# -- beside others --------------------------------------------------------------------------------


def test_pipeline_that_is_faster_wins(site, shared):
    shared.fill(2, 2)
    age(site)
    tier = shared.topics[0].bucket
    acting = Pipeline(site).acting(NAME)
    old = list(acting.catalog.descriptors())
    other, data = uploaded(shared, 0, 4)
    other = replace(other, object_id="data-0-3-c01234567.dnb1")

    def swap_first(kind, key):
        if kind == "close" and key.startswith(objects_prefix(NAME)):
            site.objects.put(object_key(NAME, other.object_id), data)
            assert acting.swap(old, other, until=0)

    site.objects.before = swap_first
    assert tier.uploads.resort() is None
    assert descriptors(shared) == [other]
    assert own_objects(site) == [other.object_id]
    assert tier.uploads.resort() is None
    assert not tier.uploads.sorter.has_runs()
    assert shared.read(0) == payloads(4)


def test_replaced_runs_stay_for_their_readers(site, shared):
    """By the age of their objects, or by a record if they are old."""
    keys = shared.topics[0].bucket.owned.catalog.keys
    shared.fill(1, 1)
    age(site)
    shared.topics[0].bucket.uploads.resort()
    assert site.metadata.range(keys.retired("")) == []
    shared.fill(1, 1, first=2)
    young = shared.objects()
    age(site, 23 * 60 * MINUTES)
    made = shared.topics[0].bucket.uploads.resort()
    [retired] = site.metadata.range(keys.retired(""))
    assert retired.key.endswith(made.object_id)
    age(site, 2 * 60 * MINUTES)
    # Those of the first object are old enough, those of the second one are kept by the record.
    assert shared.express.collect().removed == young[:2]
    age(site, 24 * 60 * MINUTES)
    assert shared.express.collect().removed == young[2:]
    assert shared.read(0) == payloads(4)


def test_reader_goes_on_across_swaps_and_collections(site):
    storage = {"cloud": {"orphan_grace_minutes": 0}}
    shared = Shared(site, topics=1, storage=storage)
    shared.fill(*[2] * 20)
    site.kill(shared.log)
    age(site)
    other = Shared(site, "b", topics=1, storage=storage)
    topic = other.topics[0]
    seen = []
    for message in topic.read(start=0, end=40):
        seen.append((message.offset, message.payload))
        if len(seen) == 7:
            assert topic.bucket.uploads.resort().end == 40
            age(site, 60)
            assert len(other.express.collect().removed) == 20
    assert seen == list(enumerate(payloads(40)))
    assert other.objects() == []


def test_uncommitted_object_is_collected_as_an_orphan(site, shared):
    shared.fill(2, 2)
    age(site)
    with crash_at("express.after_resort"), suppress(SimulatedCrash):
        shared.topics[0].bucket.uploads.resort()
    assert len(own_objects(site)) == 1
    owned = shared.topics[0].bucket.owned
    stores = shared.log.stores
    arguments = {"clock": site.clock, "metrics": stores.metrics}
    assert collect_orphans(owned, site.objects, grace_seconds=3600, **arguments) == []
    age(site, 3601)
    assert len(collect_orphans(owned, site.objects, grace_seconds=3600, **arguments)) == 1
    assert shared.topics[0].bucket.uploads.resort().end == 4
    assert shared.read(0) == payloads(4)


def rebuilt(site):
    metadata = MemoryMetadata(site.clock)
    runs = find_runs(site.objects, on_damage=lambda error: None)
    return rebuild_topic(
        site.objects,
        metadata,
        TopicKeys(PREFIX, NAME),
        find_topics(site.objects)[NAME],
        runs=runs.runs_of(NAME),
        clock=site.clock,
        dry_run=True,
    )


def test_recovery_takes_the_object_and_not_its_runs(site, shared):
    shared.fill(2, 2)
    age(site)
    made = shared.topics[0].bucket.uploads.resort()
    report = rebuilt(site)
    assert [d.object_id for d in report.objects] == [made.object_id]
    assert not report.errors


def test_recovery_takes_runs_where_the_object_was_never_finished(site, shared):
    shared.fill(2, 2)
    age(site)
    with crash_at("express.after_resort"), suppress(SimulatedCrash):
        shared.topics[0].bucket.uploads.resort()
    [name] = own_objects(site)
    site.objects.put(object_key(NAME, name), bytes_of(site, name)[:-10])
    report = rebuilt(site)
    assert [(d.start, d.end, d.format) for d in report.objects] == [
        (0, 2, FORMAT_EXPRESS),
        (2, 4, FORMAT_EXPRESS),
    ]
    assert not report.errors


# -- crashes --------------------------------------------------------------------------------------


class crash_at:  # noqa: N801 - reads like a statement
    """The process dies at a failpoint."""

    def __init__(self, name):
        self._name = name

    def __enter__(self):
        def die():
            raise SimulatedCrash

        failpoints.arm(self._name, die)

    def __exit__(self, *_):
        failpoints.disarm()


# -- by the log's own threads ----------------------------------------------------------------------


def settled(site, names=(NAME,)):
    """Whether no topic has runs."""
    return all(d.format == FORMAT_FRAMES for name in names for d, _ in _all(site, name))


def _all(site, name):
    return list(site.catalog(name).descriptors())


def test_idle_topics_are_sorted_by_the_log():
    names = [TopicName.parse(f"/default/t{number}") for number in range(12)]
    with Site(clock=SystemClock()) as site:
        storage = {"uploader": {"express": {"resort_seconds": 1, "linger_ms": 10}}}
        log = site.open(background=True, storage=storage)
        topics = [log.topic(str(name), create=True, ack="tiered") for name in names]
        for topic in topics:
            topic.wait(topic.append(b"message 0"), timeout=60)
        eventually(lambda: settled(site, names))
        assert all(_all(site, name) for name in names)
        for topic in topics:
            assert [m.payload for m in topic.read(start=0, end=1)] == [b"message 0"]
        eventually(lambda: not log._background._with_runs)


@pytest.mark.parametrize("is_diskless", [False, True])
def test_stream_across_swaps_sees_each_message_once(is_diskless):
    """Goal: while runs are committed and re-sorted, a reader has them all, in order."""
    count = 120
    with Site(clock=SystemClock()) as site:
        storage = {
            "uploader": {"express": {"resort_seconds": 1, "linger_ms": 5}},
            "cloud": {"backend": "memory"} if is_diskless else {},
        }
        open_log = site.open_diskless if is_diskless else site.open
        topic = open_log(background=True, storage=storage).topic(
            str(NAME), create=True, ack="tiered"
        )
        reader = Task(lambda: list(islice(topic.read(start=0, follow=True, timeout=60), count)))
        for number in range(count):
            topic.wait(topic.append(b"message %d" % number), timeout=60)
        seen = [(message.offset, message.payload) for message in reader.result()]
        assert seen == list(enumerate(payloads(count)))
        eventually(lambda: settled(site))
        assert [m.payload for m in topic.read(start=0, end=count)] == payloads(count)


def test_pipeline_keeps_the_log_from_it_unless_it_leaves_topics_behind(monkeypatch):
    with Site(clock=SystemClock()) as site:
        storage = {
            "uploader": {"express": {"resort_seconds": 1, "linger_ms": 10}},
            "metadata": {"lease_ttl_seconds": 60},
        }
        pipeline = Pipeline(site, ttl_seconds=60)
        log = site.open(background=True, storage=storage)
        topic = log.topic(str(NAME), create=True, ack="tiered")
        topic.wait(topic.append(b"message 0"), timeout=60)
        sorter = topic.bucket.uploads.sorter
        asked = []
        patience = RunSorter.is_left_behind

        def ask(self, now):
            if self.is_due(now):
                asked.append(now)
            return patience(self, now)

        monkeypatch.setattr(RunSorter, "is_left_behind", ask)
        eventually(lambda: len(asked) > 1)
        assert not settled(site)
        # Long ago.
        sorter.since -= 300
        eventually(lambda: settled(site))
        pipeline.fence.release()
