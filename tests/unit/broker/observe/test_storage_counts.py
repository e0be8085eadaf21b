"""What a topic holds, counted: as it grows, as it shrinks, and when it is far too much."""

import pytest

from ister.base.metrics import Metrics
from ister.base.model import TopicName
from ister.broker.observe import storage_counts as module
from ister.broker.observe.storage_counts import StorageCounts, describe_objects
from ister.bucket.catalog import Catalog
from ister.bucket.names import TopicKeys, format_object_id
from ister.errors import UnavailableError
from ister.format.descriptor import ObjectDescriptor, encode_descriptor
from tests.support.clock import ManualClock
from tests.support.memory_metadata import MemoryMetadata

TOPIC = "/default/t"


class Bucket:
    """A catalog with objects of ten messages each."""

    def __init__(self):
        self.store = MemoryMetadata()
        self.keys = TopicKeys("/ister", TopicName.parse(TOPIC))
        self.clock = ManualClock()
        self.catalog = Catalog(self.store, self.keys, clock=self.clock, metrics=Metrics())
        self.storage_counts = StorageCounts(clock=self.clock)

    def put(self, start, end, size=100):
        described = ObjectDescriptor(
            object_id=format_object_id(start, end, 1),
            start=start,
            end=end,
            size_bytes=size,
            messages=end - start,
            offset_index=((start, 0),),
            publish_time_index=(0,),
        )
        self.store.put(self.keys.descriptor(start), encode_descriptor(described))

    def fill(self, objects, begin=0):
        for number in range(begin, begin + objects):
            self.put(10 * number, 10 * number + 10)

    def count(self, *, after=2.0, details=True):
        self.clock.advance(after)
        return self.storage_counts.objects(TOPIC, "i", self.catalog, with_details=details)


@pytest.fixture
def bucket():
    one = Bucket()
    yield one
    one.store.close()


def whole(counted):
    """The offsets that are told of, in order and without holes."""
    at = None
    objects = 0
    for one in describe_objects(counted):
        assert at is None or one["start_offset"] == at
        assert one["end_offset"] >= one["start_offset"]
        at = one["end_offset"] + 1
        objects += one.get("merged_objects", 1)
    assert objects == counted.objects
    return at


def test_few_objects_are_told_of_as_they_are(bucket):
    bucket.fill(3)
    counted = bucket.count()
    assert (counted.objects, counted.size_bytes, counted.start, counted.end) == (3, 300, 0, 30)
    [first, _, last] = describe_objects(counted)
    assert first["object_id"] == "data-0-9.dnb1"
    assert last["end_offset"] == 29
    assert "offset_index" not in first
    # Merged: a few are always read anew.
    bucket.store.delete(bucket.keys.descriptor(10))
    bucket.put(0, 20, size=150)
    counted = bucket.count()
    assert (counted.objects, counted.size_bytes) == (2, 250)
    assert whole(counted) == 30


def test_very_many_objects_are_counted_once_and_told_of_in_runs(bucket, monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.0)
    bucket.fill(3000)
    counted = bucket.count()
    assert (counted.objects, counted.end) == (3000, 30_000)
    shown = describe_objects(counted)
    assert len(shown) <= 100 + 512 + 300
    assert whole(counted) == 30_000
    assert sum(one["size"] for one in shown) == 300_000
    assert shown[0]["object_id"] == "data-0-9.dnb1"
    assert shown[-1]["object_id"] == "data-29990-29999.dnb1"
    assert any(one.get("merged_objects", 0) > 1 for one in shown)

    # What comes later is added, without looking at the rest.
    read = []
    range_of = bucket.store.range

    def counted_range(*arguments, **options):
        found = list(range_of(*arguments, **options))
        read.extend(found)
        return found

    bucket.store.range = counted_range
    bucket.fill(5, begin=3000)
    more = bucket.count()
    assert more.objects == 3005
    assert len(read) <= 64
    assert whole(more) == 30_050
    assert counted.objects == 3000  # whoever got it before has it as it was

    # And after a while everything is looked at: some have expired meanwhile.
    for number in range(1000):
        bucket.store.delete(bucket.keys.descriptor(10 * number))
    assert bucket.count().objects == 3005
    late = bucket.count(after=3600.0)
    assert (late.objects, late.start) == (2005, 10_000)


def test_another_topic_of_that_name_is_counted_anew(bucket):
    bucket.fill(300)
    assert bucket.count().objects == 300
    bucket.store.delete_prefix(bucket.keys.objects)
    bucket.fill(1)
    assert bucket.storage_counts.objects(TOPIC, "other", bucket.catalog).objects == 1


def test_store_that_does_not_answer_is_not_asked_for_each_topic(bucket):
    bucket.fill(1)
    asked = []

    def silent(*arguments, **more):
        asked.append(arguments)
        raise UnavailableError("no answer")

    bucket.store.range = silent
    for _ in range(20):
        with pytest.raises(UnavailableError):
            bucket.storage_counts.objects(TOPIC, "i", bucket.catalog)
    assert len(asked) == 1
    del bucket.store.range
    assert bucket.count(after=10.0).objects == 1


def test_more_objects_than_one_may_wait_for_are_counted_bit_by_bit(bucket, monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(module, "_COUNT_SECONDS_MAX", -1.0)  # a page each time
    bucket.fill(1000)
    seen = []
    while not seen or not seen[-1].is_complete:
        seen.append(bucket.count())
        shown = describe_objects(seen[-1], 10_000)
        # To scale from the first look on: what is not counted yet is one piece.
        assert shown[0]["start_offset"] == 0
        assert shown[-1]["end_offset"] == 9999
        assert (shown[-1]["size"] is None) == (seen[-1].objects < 1000)
        assert len(seen) < 10
    assert [one.objects for one in seen[:4]] == [256, 512, 768, 1000]
    assert whole(seen[-1]) == 10_000
    # Counted anew, after a while: the old count stays until the new one has come to its end.
    bucket.store.delete(bucket.keys.descriptor(0))
    bucket.clock.advance(3600)
    later = [bucket.count().objects for _ in range(5)]
    assert later[0] == later[1] == 1000
    assert later[-1] == 999
