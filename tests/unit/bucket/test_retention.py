"""Which objects have become too old or too many, and their removal."""

from dataclasses import replace

import pytest

from ister.base.limits import MIB
from ister.bucket.retention import expire, plan_expiry
from ister.errors import FencedError
from tests.support.cases import each
from tests.support.stores import NOW_MS, Frames, a_descriptor, failing

MINUTE_MS = 60_000


def objects(*ages_minutes, size_mb=1, created_minutes=None):
    """Descriptors whose last messages are so old, oldest first."""
    found = []
    for number, age in enumerate(ages_minutes):
        created = age if created_minutes is None else created_minutes
        found.append(
            a_descriptor(
                number * 10,
                number * 10 + 10,
                size_bytes=size_mb * MIB,
                publish_time_max=NOW_MS - age * MINUTE_MS,
                created_at=NOW_MS // 1000 - created * 60,
            )
        )
    return found


def planned(descriptors, *, time_minutes=None, size_mb=None):
    found = plan_expiry(descriptors, now_ms=NOW_MS, time_minutes=time_minutes, size_mb=size_mb)
    return [described.start // 10 for described in found]


@each(
    ("minutes", "expected"),
    [(None, []), (1, [0, 1]), (29, [0, 1]), (30, [0]), (31, [0]), (60, []), (1000, [])],
)
def test_objects_older_than_the_limit_go(minutes, expected):
    assert planned(objects(60, 30, 0), time_minutes=minutes) == expected


@each(("ages", "expected"), [((), []), ((10, 60, 60, 60), []), ((60, 10, 60, 60), [0])])
def test_nothing_goes_behind_one_that_stays(ages, expected):
    assert planned(objects(*ages), time_minutes=30) == expected


def test_newest_object_stays_however_old_and_large():
    assert planned(objects(10**6), time_minutes=1, size_mb=1) == []
    assert planned(objects(10**6, 10**6, size_mb=50), time_minutes=1, size_mb=1) == [0]


@each(("size_mb", "expected"), [(1, [0, 1, 2]), (2, [0, 1]), (3, [0]), (4, []), (100, [])])
def test_oldest_go_until_the_rest_fits(size_mb, expected):
    assert planned(objects(3, 2, 1, 0), size_mb=size_mb) == expected


def test_what_goes_by_time_counts_for_the_size():
    # Four megabytes; one goes by its age, and one more by the size.
    assert planned(objects(60, 2, 1, 0), time_minutes=30, size_mb=3) == [0]
    assert planned(objects(60, 2, 1, 0), time_minutes=30, size_mb=2) == [0, 1]


@each("publish_time_ms", [0, NOW_MS, 4_070_908_800_000], ids=["0", "now", "2099"])
def test_age_counts_from_arrival_whatever_producers_say(publish_time_ms):
    def made(arrived_minutes, created_minutes=60):
        first, last = (
            replace(
                found,
                publish_time_max=publish_time_ms,
                arrival_time_max=None
                if arrived_minutes is None
                else NOW_MS - arrived_minutes * MINUTE_MS,
            )
            for found in objects(60, 0, created_minutes=created_minutes)
        )
        return [first, last]

    assert planned(made(10), time_minutes=30) == []
    assert planned(made(60), time_minutes=30) == [0]
    assert planned(made(60, created_minutes=10), time_minutes=30) == [0]
    assert planned(made(None), time_minutes=30) == [0]
    assert planned(made(None, created_minutes=10), time_minutes=30) == []


def test_object_dated_in_the_future_is_as_old_as_what_follows_it():
    assert planned(objects(-60, 60, 60), time_minutes=59) == [0, 1]
    assert planned(objects(-60, 60, 60), time_minutes=61) == []
    assert planned(objects(60, 60, -60), time_minutes=30) == [0, 1]
    assert planned(objects(-60, -60, -60), time_minutes=30) == []


def test_object_dated_by_a_clock_that_was_behind_is_as_new_as_what_precedes_it():
    assert planned(objects(10, 10**6, 0), time_minutes=10) == []


def test_object_of_unknown_age_is_kept_and_everything_behind_it():
    unknown = a_descriptor(0, 10, publish_time_max=None, created_at=0)
    others = objects(60, 60, 60)[1:]
    assert planned([unknown, *others], time_minutes=30) == []
    foreign = a_descriptor(0, 10, publish_time_max=None, created_at=NOW_MS // 1000 - 3600)
    assert planned([foreign, *others], time_minutes=30) == [0, 1]


# -- removal ------------------------------------------------------------------------------------


@pytest.fixture
def owned(cluster):
    return cluster.filled(Frames([b"x"] * 40), 10, 20, 30, 40)


def old_ones(cluster, count):
    return [described for described, _ in cluster.catalog().descriptors()][:count]


def test_expired_objects_are_gone_in_both_stores(cluster, owned):
    gone = old_ones(cluster, 2)
    assert expire(owned, cluster.objects, gone, metrics=cluster.metrics) == 2
    assert cluster.data_keys() == ["data-20-29.dnb1", "data-30-39.dnb1"]
    assert [d.start for d, _ in cluster.catalog().descriptors()] == [20, 30]
    assert owned.first.start == 20
    assert cluster.metrics.snapshot()["cloud.expired_objects"] == 2


def test_descriptors_go_before_their_objects(cluster, owned):
    def look(kind, key):
        if kind == "delete":
            named = {d.object_id for d, _ in cluster.catalog().descriptors()}
            assert key.rpartition("/")[2] not in named

    cluster.objects.before = look
    assert expire(owned, cluster.objects, old_ones(cluster, 3), metrics=cluster.metrics) == 3


def test_object_that_cannot_be_removed_is_left_for_later(cluster, owned):
    cluster.objects.before = failing("delete", times=1)
    assert expire(owned, cluster.objects, old_ones(cluster, 2), metrics=cluster.metrics) == 1
    assert [start for start, _ in cluster.ranges()] == [20, 30]
    assert "data-0-9.dnb1" in cluster.data_keys()


def test_owner_that_was_replaced_removes_nothing(cluster, owned):
    gone = old_ones(cluster, 2)
    cluster.claim("a")
    with pytest.raises(FencedError):
        expire(owned, cluster.objects, gone, metrics=cluster.metrics)
    assert len(cluster.data_keys()) == 4
