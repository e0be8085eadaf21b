"""Looking up what the metadata store knows: which object, which topic, however many there are."""

import random

import pytest

from ister.base.model import AckLevel, Codec, TopicName
from ister.bucket.catalog import Subscription
from ister.bucket.directory import list_topics
from ister.bucket.names import TopicKeys
from ister.errors import CorruptDataError
from ister.format.descriptor import encode_descriptor
from ister.format.records import (
    Progress,
    SealedState,
    TopicRecord,
    encode_current,
    encode_progress,
    encode_sealed,
    encode_topic,
)
from tests.support.scale import first_seed
from tests.support.stores import NAME, PREFIX, a_descriptor


def put_objects(cluster, *ranges, name=NAME):
    """Descriptors of these ranges, and the pointer to the last one."""
    keys = TopicKeys(PREFIX, name)
    found = [a_descriptor(start, end) for start, end in ranges]
    for described in found:
        cluster.metadata.put(keys.descriptor(described.start), encode_descriptor(described))
    cluster.metadata.put(keys.current, encode_current(found[-1].start))
    return found


def test_topic_without_objects_has_none(cluster):
    catalog = cluster.catalog()
    assert (catalog.first(), catalog.last(), catalog.find(0)) == (None, None, None)
    assert list(catalog.descriptors()) == []


@pytest.mark.parametrize("count", [255, 256, 257, 600])
def test_more_objects_than_a_page_are_all_found(cluster, count):
    objects = put_objects(cluster, *((n * 10, n * 10 + 10) for n in range(count)))
    found = list(cluster.catalog().descriptors())
    assert [described for described, _ in found] == objects
    for described, revision in found[:3]:
        kept = cluster.metadata.get(cluster.keys.descriptor(described.start))
        assert kept.revision == revision


def counted_ranges(cluster):
    """Has each range note how many keys it spans, whatever its limit: etcd counts them all."""
    spans = []
    ask = cluster.metadata.range

    def counted(prefix, *, start=None, end=None, limit=None, **_):
        spans.append(len(ask(prefix, start=start, end=end)))
        return ask(prefix, start=start, end=end, limit=limit)

    cluster.metadata.range = counted
    return spans


LOOKUPS = {
    "first": lambda catalog, end: catalog.first(),
    "last": lambda catalog, end: catalog.last(),
    "find in the middle": lambda catalog, end: catalog.find(end // 2 + 3),
    "find the newest": lambda catalog, end: catalog.find(end - 1),
    "find behind all": lambda catalog, end: catalog.find(end + 5),
    "following": lambda catalog, end: catalog.following(end // 3),
}


@pytest.mark.nightly
@pytest.mark.parametrize("length", [1, 10, 1000])
@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_lookup_spans_few_keys_however_many_there_are(cluster, lookup, length):
    put_objects(cluster, *((n * length, (n + 1) * length) for n in range(5000)))
    spans = counted_ranges(cluster)
    catalog = cluster.catalog()
    lookup(catalog, 5000 * length)
    assert len(spans) <= 7
    # The width of the first range is a guess, made before any object was seen.
    assert max(spans) <= 1024
    spans.clear()
    lookup(catalog, 5000 * length)
    assert len(spans) <= 6
    assert sum(spans) <= 64


def test_first_object_of_an_expired_history_is_found_by_the_record(cluster):
    objects = put_objects(cluster, *((n * 10, n * 10 + 10) for n in range(1_000_000, 1_002_000)))
    record = TopicRecord(
        epoch=1,
        incarnation="x",
        ack=AckLevel.SYNCED,
        codec=Codec.BINCODE2,
        created_at=0,
        expired_before=10_000_000,
    )
    cluster.metadata.put(cluster.keys.record, encode_topic(record))
    spans = counted_ranges(cluster)
    catalog = cluster.catalog()
    assert catalog.first() == objects[0]
    assert sum(spans) <= 200
    spans.clear()
    assert catalog.first() == objects[0]
    assert spans == [1]


def test_walk_costs_each_key_a_few_times_however_many_there_are(cluster):
    put_objects(cluster, *((n * 10, n * 10 + 10) for n in range(5000)))
    spans = counted_ranges(cluster)
    assert sum(1 for _ in cluster.catalog().descriptors()) == 5000
    assert sum(spans) <= 2 * 5000


def test_reading_one_object_after_the_other_is_linear(cluster):
    put_objects(cluster, *((n * 10, n * 10 + 10) for n in range(5000)))
    spans = counted_ranges(cluster)
    catalog = cluster.catalog()
    at = 0
    while at < 50_000:
        at = catalog.find(at).end
    assert sum(spans) <= 2 * 5000 + 1024


def test_history_of_any_shape_is_looked_up_right(cluster):
    """Random lengths, holes and pointers, against a plain search of the whole list."""
    seed = first_seed()
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(60):
        cluster.metadata.delete_prefix(cluster.keys.objects)
        ranges, at = [], rng.choice([0, 0, rng.randrange(10**9)])
        for _ in range(rng.randrange(1, 120)):
            length = 1 + int(10 ** rng.uniform(0, rng.choice([0.5, 3, 7])))
            ranges.append((at, at + length))
            at += length + (rng.randrange(10**5) if rng.random() < 0.05 else 0)
        objects = put_objects(cluster, *ranges)
        pointers = {
            "as it should be": encode_current(objects[-1].start),
            "gone": None,
            "damaged": b"{",
            "too old": encode_current(objects[0].start),
            "too new": encode_current(at + 7),
            "impossible": b'{"start": "-5"}',
        }
        pointer = pointers[rng.choice(list(pointers))]
        cluster.metadata.delete(cluster.keys.current)
        if pointer is not None:
            cluster.metadata.put(cluster.keys.current, pointer)
        catalog = cluster.catalog()
        for _ in range(20):
            offset = rng.choice([rng.randrange(at + 10), rng.choice(objects).start])
            before = [d for d in objects if d.start <= offset]
            after = [d for d in objects if d.start >= offset]
            assert catalog.find(offset) == (before[-1] if before else None)
            assert catalog.following(offset) == (after[0] if after else None)
            end = offset + rng.randrange(1, 10**6)
            found = [d for d, _ in catalog.descriptors(offset, end)]
            assert found == [d for d in objects if d.start < end and d.end > offset]
        assert [d for d, _ in catalog.descriptors()] == objects
        assert catalog.ends()[:2] == (objects[0], objects[-1])
        assert (catalog.first(), catalog.last()) == (objects[0], objects[-1])


def test_topic_with_a_longer_name_is_another_one(cluster):
    other = TopicName(namespace=NAME.namespace, topic=f"{NAME.topic}2")
    mine = put_objects(cluster, (0, 100))
    theirs = put_objects(cluster, (0, 7), (7, 9), name=other)
    assert [d for d, _ in cluster.catalog().descriptors()] == mine
    assert [d for d, _ in cluster.catalog(other).descriptors()] == theirs
    keys = TopicKeys(PREFIX, other)
    cluster.metadata.put(keys.progress("s"), encode_progress(Progress(offset=1, timestamp=2)))
    assert cluster.catalog().subscriptions() == []


def test_damaged_descriptor_is_refused_with_its_key(cluster):
    put_objects(cluster, (0, 100), (100, 200))
    cluster.metadata.put(cluster.keys.descriptor(100), b"{}")
    with pytest.raises(CorruptDataError) as refused:
        cluster.catalog().find(150)
    assert refused.value.path == cluster.keys.descriptor(100)
    assert cluster.catalog().find(50).start == 0


def test_seal_record_and_owner_come_with_their_revisions(cluster):
    catalog = cluster.catalog()
    assert (catalog.record(), catalog.owner(), catalog.sealed()) == (None, None, None)
    state = SealedState(next_offset=5, node="n", epoch=1, sealed_at=0)
    revision = cluster.metadata.put(cluster.keys.sealed, encode_sealed(state))
    assert catalog.sealed() == (state, revision)
    cluster.metadata.put(
        cluster.keys.sealed,
        b'{"sealed": false, "last_committed_offset": 0, "broker_id": "n", "timestamp": 0}',
    )
    assert catalog.sealed() is None


def test_cursors_are_those_of_this_topic_alone(cluster):
    keys = cluster.keys
    cursor = Progress(offset=7, timestamp=9)
    for name in ("a", "b"):
        cluster.metadata.put(keys.progress(name), encode_progress(cursor))
    cluster.metadata.put(f"{keys.subscriptions}a/settings", b"something else")
    assert cluster.catalog().subscriptions() == [
        Subscription("a", cursor),
        Subscription("b", cursor),
    ]


def test_topics_are_listed_that_exist(cluster):
    def put(name, state="open"):
        record = TopicRecord(
            epoch=1,
            incarnation="x",
            ack=AckLevel.SYNCED,
            codec=Codec.BINCODE2,
            created_at=0,
            state=state,
        )
        cluster.metadata.put(f"{PREFIX}/topics/{name}", encode_topic(record))

    for name in ("b/z", "a/y", "a/x"):
        put(name)
    put("a/gone", "deleted")
    put("a/going", "deleting")
    cluster.metadata.put(f"{PREFIX}/topics/a/x/schema", b"of somebody else")
    cluster.metadata.put("/other/topics/a/q", b"of another cluster")
    assert list_topics(cluster.metadata, PREFIX) == ["/a/x", "/a/y", "/b/z"]
    # One that cannot be read exists, and does not hide the others.
    cluster.metadata.put(f"{PREFIX}/topics/a/bad", b"?")
    assert list_topics(cluster.metadata, PREFIX) == ["/a/bad", "/a/x", "/a/y", "/b/z"]


# -- objects that are merged under a walk ---------------------------------------------------------


def merge(cluster, *ranges):
    """Each range becomes one object."""
    keys = cluster.keys
    for start, end in ranges:
        for found in cluster.metadata.range(keys.objects, start=keys.descriptor(start + 1)):
            if found.key < keys.descriptor(end):
                cluster.metadata.delete(found.key)
        cluster.metadata.put(
            keys.descriptor(start), encode_descriptor(a_descriptor(start, end, epoch=2))
        )


@pytest.mark.parametrize(
    "merged",
    [
        [(-60, 140)],  # across the end of the page
        [(-160, 0)],  # up to it
        [(0, 240)],  # from it on
        [(-2000, 2400)],
        [(-1560, 10), (10, 1440), (1440, 2400)],
    ],
)
def test_walk_misses_nothing_while_objects_are_merged(cluster, merged):
    put_objects(cluster, *((at, at + 10) for at in range(0, 6000, 10)))
    pages = []
    ask = cluster.metadata.range

    def noted(*args, **kwargs):
        page = ask(*args, **kwargs)
        pages.append(page)
        return page

    cluster.metadata.range = noted
    covered = 0
    for described, _ in cluster.catalog().descriptors():
        assert described.start <= covered  # no hole, whatever comes twice
        covered = max(covered, described.end)
        is_last = pages[-1][-1].key == cluster.keys.descriptor(described.start)
        if merged and is_last and described.end > 2000:
            at = described.end
            merge(cluster, *((at + start, at + end) for start, end in merged))
            merged = []
    assert not merged
    assert covered == 6000


@pytest.mark.nightly
@pytest.mark.parametrize("after", range(12))
def test_merge_between_two_ranges_of_a_lookup_hides_nothing(cluster, after):
    """Everything up to the newest object becomes one, in the middle of each lookup."""
    lookups = {
        "find": lambda catalog: catalog.find(4999),
        "last": lambda catalog: catalog.last(),
        "walk": lambda catalog: list(catalog.descriptors(4900))[-1][0],
    }
    for name, lookup in lookups.items():
        cluster.metadata.after = lambda kind, key: None
        cluster.metadata.delete_prefix(cluster.keys.objects)
        put_objects(cluster, *((at, at + 1) for at in range(5000)))
        left = after

        def count_down(kind, key):
            nonlocal left
            left -= 1
            if left == 0:
                cluster.metadata.after = lambda kind, key: None
                merge(cluster, (0, 5000))
                cluster.metadata.put(cluster.keys.current, encode_current(0))

        cluster.metadata.after = count_down
        found = lookup(cluster.catalog())
        assert found.start <= 4999 < found.end, name


@pytest.mark.parametrize(
    ("offset", "expected"), [(0, 10), (10, 10), (99, 10), (100, 100), (150, 200), (250, None)]
)
def test_object_that_holds_an_offset_or_follows_it(cluster, offset, expected):
    put_objects(cluster, (10, 100), (100, 150), (200, 250))
    found = cluster.catalog().holding(offset)
    assert (found and found.start) == expected
