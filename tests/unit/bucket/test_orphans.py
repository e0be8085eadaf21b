"""Garbage in the bucket: what goes, what must stay, and when."""

import pytest

from ister.base.model import Layout, TopicName
from ister.bucket.names import format_object_id, format_pending_id, manifest_key, object_key
from ister.bucket.orphans import collect_orphans
from ister.errors import NotFoundError, UnavailableError
from ister.format.records import RetiredObjects, UploadSession, encode_retired
from tests.support.stores import NAME, NOW_MS, Frames, a_descriptor, failing

GRACE = 3600


@pytest.fixture
def owned(cluster):
    cluster.filled(Frames([b"x"] * 20), 10, 20)
    return cluster.claim("a")  # epoch 2


def collect(cluster, owned, grace=GRACE):
    return collect_orphans(
        owned, cluster.objects, grace_seconds=grace, clock=cluster.clock, metrics=cluster.metrics
    )


def put(cluster, object_id):
    cluster.objects.put(cluster.key(object_id), b"garbage")


@pytest.mark.parametrize(
    "object_id",
    [
        "data-20-29.dnb1",  # uploaded and never committed
        "data-10-14.dnb1",  # of a cycle that was planned differently
        "data-0-9-2.dnb1",  # a repair that was given up
        "data-5-7.dnb1",
        format_pending_id(20, 1),
        format_pending_id(20, 2),
        format_pending_id(20, 2, tag="01234567"),
        format_object_id(10, 15, 2, layout=Layout.SEGMENTS),
        "data-0-19-2-c01234567.dnb1",  # merged
        "data-0-19-2-c01234567.parquet",
    ],
)
def test_object_that_nobody_names_goes_after_its_grace_period(cluster, owned, object_id):
    put(cluster, object_id)
    cluster.clock.advance(GRACE - 1)
    assert collect(cluster, owned) == []
    cluster.clock.advance(2)
    assert collect(cluster, owned) == [object_id]
    assert cluster.data_keys() == ["data-0-9.dnb1", "data-10-19.dnb1"]
    assert cluster.metrics.snapshot()["cloud.orphans_removed"] == 1


@pytest.mark.parametrize(
    "object_id", ["data-20-29-3.dnb1", "data-0-9-7.dnb1", format_pending_id(20, 3)]
)
def test_object_of_a_later_epoch_stays(cluster, owned, object_id):
    """Goal: a successor's object may be waiting for its commit."""
    put(cluster, object_id)
    cluster.clock.advance(10 * GRACE)
    assert collect(cluster, owned) == []
    assert object_id in cluster.data_keys()


@pytest.mark.parametrize("object_id", ["notes.txt", "cur", "data-x.dnb1", "data-1-2.dnb2"])
def test_what_is_not_ours_stays(cluster, owned, object_id):
    put(cluster, object_id)
    cluster.clock.advance(10 * GRACE)
    assert collect(cluster, owned) == []
    assert object_id in cluster.data_keys()


def test_manifest_and_other_topics_stay(cluster, owned):
    longer = TopicName(namespace=NAME.namespace, topic=f"{NAME.topic}2")
    keys = [manifest_key(NAME), object_key(longer, "data-0-9.dnb1")]
    for key in keys:
        cluster.objects.put(key, b"kept")
    cluster.clock.advance(10 * GRACE)
    assert collect(cluster, owned) == []
    assert set(keys) <= set(cluster.objects.keys())


@pytest.mark.parametrize("object_id", ["data-20-29-2.dnb1", format_pending_id(20, 2)])
def test_object_under_way_stays_with_its_pending_name(cluster, owned, object_id):
    owned.begin(
        UploadSession(object_id="data-20-29-2.dnb1", start=20, end=30, epoch=2, started_at=0)
    )
    put(cluster, object_id)
    cluster.clock.advance(10 * GRACE)
    assert collect(cluster, owned) == []
    assert object_id in cluster.data_keys()


def test_object_that_an_earlier_owner_had_under_way_goes(cluster, owned):
    """Goal: also if no upload has ended its session since, because express objects were made."""
    session = UploadSession(object_id="data-20-29.dnb1", start=20, end=30, epoch=1, started_at=0)
    owned.begin(session)
    put(cluster, session.object_id)
    cluster.clock.advance(10 * GRACE)
    assert collect(cluster, owned) == [session.object_id]


def test_object_committed_between_listing_and_removal_stays(cluster, owned):
    frames = Frames([b"x"] * 30)
    put(cluster, "data-20-29-2.dnb1")
    cluster.clock.advance(10 * GRACE)
    listed = cluster.objects.list

    def commit_after(prefix):
        found = list(listed(prefix))
        cluster.uploader(owned).upload(frames, 20, 30)
        return iter(found)

    cluster.objects.list = commit_after
    assert collect(cluster, owned) == []
    assert cluster.catalog().last().object_id == "data-20-29-2.dnb1"
    assert "data-20-29-2.dnb1" in cluster.data_keys()


def test_object_whose_age_is_not_known_stays(cluster, owned):
    put(cluster, "data-20-29.dnb1")
    listed = cluster.objects.list

    def ageless(prefix):
        for info in listed(prefix):
            object.__setattr__(info, "modified_at", None)
            yield info

    cluster.objects.list = ageless
    cluster.clock.advance(10 * GRACE)
    assert collect(cluster, owned) == []


def test_silent_store_removes_nothing_more(cluster, owned):
    for object_id in ("data-20-29.dnb1", "data-30-39.dnb1"):
        put(cluster, object_id)
    cluster.clock.advance(10 * GRACE)

    cluster.objects.before = failing("delete")
    with pytest.raises(UnavailableError):
        collect(cluster, owned)
    cluster.heal()
    assert collect(cluster, owned) == ["data-20-29.dnb1", "data-30-39.dnb1"]


# -- objects that were merged -------------------------------------------------------------------


def retire(cluster, owned, until):
    """The two objects of the topic become one; those that it replaces stay until a time."""
    data = cluster.object_bytes("data-0-9.dnb1") + cluster.object_bytes("data-10-19.dnb1")
    old = list(cluster.catalog().descriptors())
    new = a_descriptor(0, 20, epoch=2, object_id="data-0-19-2-c01234567.dnb1", size_bytes=len(data))
    cluster.objects.put(cluster.key(new.object_id), data)
    assert owned.swap(old, new, until=until)
    return new


def test_replaced_objects_stay_until_the_time_that_the_merge_has_set(cluster, owned):
    now = NOW_MS // 1000
    new = retire(cluster, owned, until=now + 10 * GRACE)
    cluster.clock.advance(10 * GRACE - 1)
    assert collect(cluster, owned) == []
    assert cluster.metadata.get(cluster.keys.retired(new.object_id)) is not None
    cluster.clock.advance(1)
    assert collect(cluster, owned) == ["data-0-9.dnb1", "data-10-19.dnb1"]
    assert cluster.data_keys() == [new.object_id]
    assert cluster.metadata.get(cluster.keys.retired(new.object_id)) is None
    assert collect(cluster, owned) == []


def test_replaced_objects_stay_when_the_merged_one_is_gone(cluster, owned):
    """Goal: the bucket was rolled back to before the merge, and the metadata was not."""
    new = retire(cluster, owned, until=NOW_MS // 1000)
    cluster.objects.delete(cluster.key(new.object_id))
    cluster.clock.advance(10 * GRACE)
    assert collect(cluster, owned) == []
    assert cluster.data_keys() == ["data-0-9.dnb1", "data-10-19.dnb1"]


def test_replaced_object_of_danubes_goes_before_its_record(cluster, owned):
    """Goal: without the record its name says nothing, and it would stay for ever."""
    danubes = "segments/data-0-1790000000.dnb1"
    put(cluster, danubes)
    retired = RetiredObjects(objects=(danubes,), until=NOW_MS // 1000 + 5)
    key = cluster.keys.retired("data-0-9-2-c01234567.dnb1")
    cluster.metadata.put(key, encode_retired(retired))
    assert collect(cluster, owned) == []
    assert cluster.objects.stat(cluster.key(danubes))
    cluster.clock.advance(6)

    cluster.objects.before = failing("delete")
    with pytest.raises(UnavailableError):
        collect(cluster, owned)
    assert cluster.metadata.get(key) is not None
    cluster.heal()
    assert collect(cluster, owned) == []
    assert cluster.metadata.get(key) is None
    with pytest.raises(NotFoundError):
        cluster.objects.stat(cluster.key(danubes))


def test_crash_between_the_record_and_its_objects_leaves_ordinary_garbage(cluster, owned):
    new = retire(cluster, owned, until=NOW_MS // 1000)
    cluster.clock.advance(2 * GRACE)

    cluster.objects.before = failing("delete")
    with pytest.raises(UnavailableError):
        collect(cluster, owned)
    assert cluster.metadata.get(cluster.keys.retired(new.object_id)) is None
    cluster.heal()
    assert collect(cluster, owned) == ["data-0-9.dnb1", "data-10-19.dnb1"]
    assert cluster.data_keys() == [new.object_id]
