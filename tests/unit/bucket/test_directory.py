"""Many topics at once: what a look says of each, and how many requests it takes."""

from dataclasses import replace

import pytest

from ister.base.model import TopicName
from ister.bucket.directory import TopicDirectory, list_topics, read_owners, read_records
from ister.bucket.names import TopicKeys
from ister.format.records import (
    OwnerRecord,
    SealedState,
    encode_current,
    encode_owner,
    encode_sealed,
    encode_topic,
)
from tests.support.stores import PREFIX, a_descriptor


class Calls:
    """Counts requests by kind."""

    def __init__(self, metadata):
        self.kinds = []
        metadata.after = lambda kind, key: self.kinds.append(kind)

    def take(self):
        kinds, self.kinds = self.kinds, []
        return kinds


@pytest.fixture
def calls(cluster):
    return Calls(cluster.metadata)


def named(number):
    return TopicName.parse(f"/ns/topic-{number:04d}")


def make(cluster, count):
    """Copies of one topic that was claimed and has objects."""
    owned = cluster.claim("a", name=named(0))
    owned.commit(a_descriptor(0, 10))
    owned.commit(a_descriptor(10, 25))
    record, current = encode_topic(owned.record), encode_current(10, 25)
    for number in range(1, count):
        keys = TopicKeys(PREFIX, named(number))
        cluster.metadata.put(keys.record, record)
        cluster.metadata.put(keys.owner, encode_owner(OwnerRecord(node="a", epoch=1)))
        cluster.metadata.put(keys.current, current)
    return owned


@pytest.mark.parametrize("count", [1, 40, 400])
def test_number_of_requests_does_not_depend_on_the_number_of_topics(cluster, calls, count):
    make(cluster, count)
    directory = TopicDirectory(cluster.metadata, PREFIX)
    calls.take()
    entries = directory.read()
    assert len(entries) == count
    assert calls.take() == ["range", "range"]
    assert {read.value.end for read in directory.pointers(entries).values()} == {25}
    assert directory.seals(entries) == {}
    assert calls.take() == ["get_many", "get_many"]


def test_entry_is_what_the_catalog_says(cluster):
    owned = make(cluster, 3)
    name = str(named(0))
    directory = TopicDirectory(cluster.metadata, PREFIX)
    entry = directory.read()[name]
    catalog = owned.catalog
    assert (entry.record, entry.revision) == catalog.record()
    assert entry.owner == catalog.owner()[0]
    pointer = directory.pointers([name])[name]
    assert pointer.revision == catalog.ends().pointer_revision
    assert (pointer.value.start, pointer.value.end) == (10, catalog.last().end)
    assert directory.records([name])[name].value == entry.record
    owned.seal(25)
    assert directory.read()[name].owner is None
    assert directory.seals([name])[name].value == catalog.sealed()[0]


def test_unchanged_topic_is_not_decoded_again(cluster):
    owned = make(cluster, 3)
    directory = TopicDirectory(cluster.metadata, PREFIX)
    before = directory.read()
    owned.set_acked_end(25)
    cluster.metadata.delete(TopicKeys(PREFIX, named(2)).owner)
    after = directory.read()
    first, second, third = (str(named(number)) for number in range(3))
    assert after[second] is before[second]
    assert after[first].record.acked_end == 25
    assert (before[third].owner is None, after[third].owner) == (False, None)
    assert (directory.reads, directory.entries) == (2, after)


def test_pointers_follow_commits_and_merges(cluster):
    owned = make(cluster, 1)
    directory, name = TopicDirectory(cluster.metadata, PREFIX), str(named(0))
    before = directory.pointers([name])[name]
    owned.commit(a_descriptor(25, 40))
    after = directory.pointers([name])[name]
    assert after.revision > before.revision
    assert after.value.names(25, 40)
    old = list(owned.catalog.descriptors(10))
    assert owned.swap(old, a_descriptor(10, 40, object_id="data-10-39-c01234567.dnb1"), until=0)
    assert directory.pointers([name])[name].value.names(10, 40)


def test_what_cannot_be_read_does_not_hide_the_others(cluster):
    make(cluster, 3)
    first, second, third = (TopicKeys(PREFIX, named(number)) for number in range(3))
    cluster.metadata.put(first.record, b"?")
    cluster.metadata.put(second.owner, b"?")
    cluster.metadata.put(second.current, b"?")
    cluster.metadata.put(third.sealed, b"?")
    cluster.metadata.put(f"{PREFIX}/topics/ns/of.another/kind", b"?")
    directory = TopicDirectory(cluster.metadata, PREFIX)
    entries = directory.read()
    assert sorted(entries) == [str(named(number)) for number in range(3)]
    assert entries[str(named(0))].record is None
    assert entries[str(named(0))].error.path == first.record
    assert entries[str(named(1))].owner is None
    assert sorted(directory.pointers(entries)) == [str(named(0)), str(named(2))]
    assert directory.seals(entries) == {}
    assert sorted(read_records(cluster.metadata, PREFIX)) == [str(named(1)), str(named(2))]
    assert sorted(read_owners(cluster.metadata, PREFIX)) == [str(named(0)), str(named(2))]
    assert list_topics(cluster.metadata, PREFIX) == sorted(entries)


@pytest.mark.parametrize("state", ["deleting", "deleted"])
def test_deleted_topic_is_left_out(cluster, state):
    owned = make(cluster, 2)
    directory = TopicDirectory(cluster.metadata, PREFIX)
    directory.read()
    record = replace(owned.record, state=state)
    cluster.metadata.put(owned.catalog.keys.record, encode_topic(record))
    assert list(directory.read()) == [str(named(1))]


def test_seal_that_says_no_is_none(cluster):
    owned = make(cluster, 1)
    sealed = encode_sealed(SealedState(next_offset=25, node="a", epoch=1, sealed_at=0))
    key = owned.catalog.keys.sealed
    directory = TopicDirectory(cluster.metadata, PREFIX)
    cluster.metadata.put(key, sealed.replace(b"true", b"false"))
    assert directory.seals([str(named(0))]) == {}
    cluster.metadata.put(key, sealed)
    assert list(directory.seals([str(named(0))])) == [str(named(0))]
