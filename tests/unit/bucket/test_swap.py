"""One object in the place of several: all or nothing, beside an owner that commits and expires."""

import pytest

from ister.bucket.retention import expire
from ister.errors import CommitUnknownError, ConflictError, FencedError, InvariantError
from ister.format.records import RetiredObjects, decode_retired
from tests.support.stores import Frames, a_descriptor, failing, once

UNTIL = 2_000_000_000
TAG = "01234567"


@pytest.fixture
def owner(cluster):
    owned = cluster.claim("a")
    commit(owned, 10, 20, 30, 40)
    return owned


def commit(owned, *ends):
    for end in ends:
        owned.commit(a_descriptor(owned.tiered, end, epoch=owned.epoch))


def merged(start, end, tag=TAG):
    return a_descriptor(start, end, object_id=f"data-{start}-{end - 1}-c{tag}.dnb1")


def swap(acting, cluster, start, end, tag=TAG):
    return acting.swap(
        list(cluster.catalog().descriptors(start, end)), merged(start, end, tag), until=UNTIL
    )


# -- what a swap does ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 20, [(0, 20), (20, 30), (30, 40)]),
        (10, 30, [(0, 10), (10, 30), (30, 40)]),
        (20, 40, [(0, 10), (10, 20), (20, 40)]),
        (0, 40, [(0, 40)]),
        (10, 20, [(0, 10), (10, 20), (20, 30), (30, 40)]),
    ],
)
def test_swapped_objects_are_one(cluster, owner, start, end, expected):
    acting = cluster.outside()
    old = list(cluster.catalog().descriptors(start, end))
    assert swap(acting, cluster, start, end)
    assert cluster.ranges() == expected
    assert cluster.catalog().find(start) == merged(start, end)
    assert cluster.current() == expected[-1][0]
    found = cluster.metadata.get(cluster.keys.retired(merged(start, end).object_id))
    assert decode_retired(found.value, key=found.key) == RetiredObjects(
        objects=tuple(d.object_id for d, _ in old), until=UNTIL
    )


@pytest.mark.parametrize(("start", "end"), [(0, 20), (20, 40), (0, 40)])
def test_owner_goes_on_after_a_swap(cluster, owner, start, end):
    swap(cluster.outside(), cluster, start, end)
    has_moved = owner.refresh()
    assert has_moved is (end == 40)
    commit(owner, 50)
    assert cluster.ranges()[-1] == (40, 50)
    assert cluster.current() == 40


def test_job_that_swaps_the_newest_beside_a_commit_takes_it_as_it_is_now(cluster, owner):
    acting = cluster.outside()
    old = list(cluster.catalog().descriptors(20, 40))
    commit(owner, 50)  # what was the newest when the job looked is not any more
    assert acting.swap(old, merged(20, 40), until=UNTIL)
    assert cluster.ranges() == [(0, 10), (10, 20), (20, 40), (40, 50)]
    assert cluster.current() == 40
    commit(owner, 60)


def test_commit_between_the_look_and_the_swap_of_the_newest(cluster, owner):
    acting = cluster.outside()
    cluster.metadata.before = once("transact", lambda: commit(owner, 50))
    old = list(cluster.catalog().descriptors(20, 40))
    if not acting.swap(old, merged(20, 40), until=UNTIL):
        # Nothing was done: the pointer had moved.
        assert cluster.ranges() == [(0, 10), (10, 20), (20, 30), (30, 40), (40, 50)]
        assert acting.swap(old, merged(20, 40), until=UNTIL)
    assert cluster.ranges() == [(0, 10), (10, 20), (20, 40), (40, 50)]
    assert cluster.current() == 40


# -- all or nothing -----------------------------------------------------------------------------


def test_swap_of_what_has_changed_does_nothing(cluster, owner):
    acting, other = cluster.outside(), cluster.outside(cluster.fence("/danube/pipeline/jobs/other"))
    old = list(cluster.catalog().descriptors(0, 30))
    assert swap(other, cluster, 10, 30, tag="76543210")
    before = cluster.everything()
    assert not acting.swap(old, merged(0, 30), until=UNTIL)
    assert cluster.everything() == before


def test_swap_of_what_has_expired_does_nothing(cluster, owner):
    acting = cluster.outside()
    old = list(cluster.catalog().descriptors(0, 20))
    owner.expire([old[0][0]])
    before = cluster.everything()
    assert not acting.swap(old, merged(0, 20), until=UNTIL)
    assert cluster.everything() == before


@pytest.mark.parametrize("when", ["before", "after"])
def test_lost_answer_to_a_swap_is_resolved_by_reading_back(cluster, owner, when):
    acting = cluster.outside()
    old = list(cluster.catalog().descriptors(20, 40))
    setattr(cluster.metadata, when, failing("transact", times=2, error=CommitUnknownError))
    assert acting.swap(old, merged(20, 40), until=UNTIL)
    assert cluster.ranges() == [(0, 10), (10, 20), (20, 40)]
    acting.commit(a_descriptor(40, 50))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda found: (found[:2], merged(0, 30)),
        lambda found: (found[1:3], merged(0, 30)),
        lambda found: ([found[0], found[2]], merged(0, 30)),
    ],
)
def test_merged_object_has_exactly_the_offsets(cluster, owner, wrong):
    old, new = wrong(list(cluster.catalog().descriptors()))
    with pytest.raises(InvariantError):
        cluster.outside().swap(old, new, until=UNTIL)
    assert len(cluster.ranges()) == 4


def test_swap_after_the_topic_changed_hands_does_nothing(cluster, owner):
    acting = cluster.outside()
    old = list(cluster.catalog().descriptors(0, 20))
    cluster.claim("a")
    before = cluster.everything()
    with pytest.raises(FencedError):
        acting.swap(old, merged(0, 20), until=UNTIL)
    assert cluster.everything() == before


# -- beside retention ---------------------------------------------------------------------------


def test_merged_object_under_the_key_of_an_expired_one_stays(cluster):
    owner = cluster.filled(Frames([b"x"] * 40), 10, 20, 30, 40)
    planned = cluster.descriptors(0, 20)
    data = cluster.object_bytes("data-0-9.dnb1")
    new = merged(0, 30)
    cluster.objects.put(cluster.key(new.object_id), data)
    assert swap(cluster.outside(), cluster, 0, 30)
    assert expire(owner, cluster.objects, planned, metrics=cluster.metrics) == 0
    assert cluster.ranges() == [(0, 30), (30, 40)]
    assert owner.first == new
    # The merged one, and what it has taken the place of, until the time that the merge has set.
    assert cluster.data_keys() == [
        "data-0-29-c01234567.dnb1",
        "data-0-9.dnb1",
        "data-10-19.dnb1",
        "data-20-29.dnb1",
        "data-30-39.dnb1",
    ]


def test_plan_from_before_the_newest_object_was_merged(cluster, owner):
    """The owner has learnt of the merge since: what became part of the newest object stays."""
    planned = cluster.descriptors()[:3]
    assert swap(cluster.outside(), cluster, 10, 40)
    owner.refresh()
    assert owner.expire(planned) == planned[:1]
    assert cluster.ranges() == [(10, 40)]
    assert (owner.record.expired_before, owner.first.start) == (10, 10)
    assert owner.expire(planned[1:]) == []
    assert cluster.ranges() == [(10, 40)]


def test_swap_in_the_middle_of_an_expiry(cluster, owner):
    """Between the owner's look and its transaction."""
    planned = cluster.descriptors(0, 30)
    acting = cluster.outside()
    seen = []

    def merge(kind, key):
        if kind == "transact":
            seen.append(1)
            # The first transaction changes the record, the second takes descriptors out.
            if len(seen) == 2:
                assert swap(acting, cluster, 20, 40)

    cluster.metadata.before = merge
    assert owner.expire(planned) == planned[:2]
    assert cluster.ranges() == [(20, 40)]
    assert owner.first == merged(20, 40)


def test_expiry_that_fails_half_way_does_not_hide_what_was_merged(cluster, owner):
    """A descriptor of the plan now reaches beyond it: what lies there is still offered."""
    planned = cluster.descriptors(0, 20)
    assert swap(cluster.outside(), cluster, 10, 30)

    def lose(kind, key):
        # The deletion; the note in the record before it gets through.
        if kind == "transact" and cluster.catalog().record()[0].expired_before:
            raise CommitUnknownError("lost")

    cluster.metadata.before = lose
    with pytest.raises(CommitUnknownError):
        owner.expire(planned)
    assert owner.first == merged(10, 30)


# -- handing over -------------------------------------------------------------------------------


def test_topic_whose_newest_objects_are_merged_meanwhile_is_sealed(cluster, owner):
    assert swap(cluster.outside(), cluster, 20, 40)
    owner.seal(40)
    assert cluster.catalog().sealed()[0].next_offset == 40
    assert cluster.catalog().owner() is None


def test_topic_that_got_an_object_meanwhile_is_not_sealed_where_it_ended(cluster, owner):
    cluster.outside().commit(a_descriptor(40, 50))
    with pytest.raises(ConflictError):
        owner.seal(40)
    assert cluster.catalog().sealed() is None
