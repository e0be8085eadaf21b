"""Acting for a topic's owner: both commit, one of them at a time, and nobody else does."""

import pytest

from ister.errors import (
    CommitUnknownError,
    ConflictError,
    FencedError,
    NotFoundError,
    UnavailableError,
)
from tests.support.stores import TTL_SECONDS, a_descriptor


@pytest.fixture
def owner(cluster):
    owned = cluster.claim("a")
    owned.commit(a_descriptor(0, 10))
    return owned


def claim_after(cluster, node):
    """The owner's lease has ended, and a node goes on."""
    cluster.metadata.delete(cluster.keys.owner)
    return cluster.claim(node, take_over=True)


def test_owner_and_job_commit_in_turns(cluster, owner):
    acting = cluster.outside()
    assert acting.epoch == owner.epoch
    acting.commit(a_descriptor(10, 20))
    assert owner.refresh()
    assert owner.tiered == 20
    assert not owner.refresh()
    owner.commit(a_descriptor(20, 30))
    assert acting.refresh()
    acting.commit(a_descriptor(30, 40))
    assert cluster.ranges() == [(0, 10), (10, 20), (20, 30), (30, 40)]


@pytest.mark.parametrize("faster", ["owner", "job"])
def test_one_of_two_commits_of_the_same_offsets_counts(cluster, owner, faster):
    acting = cluster.outside()
    first, second = (owner, acting) if faster == "owner" else (acting, owner)
    first.commit(a_descriptor(10, 25))
    with pytest.raises(ConflictError) as raised:
        second.commit(a_descriptor(10, 20))
    assert not isinstance(raised.value, FencedError)
    assert second.tiered == 25
    second.commit(a_descriptor(25, 30))
    assert cluster.ranges() == [(0, 10), (10, 25), (25, 30)]


def test_object_that_both_have_made_is_the_same_and_others_may_have_gone_on(cluster, owner):
    acting = cluster.outside()
    owner.commit(a_descriptor(10, 20))
    acting.commit(a_descriptor(10, 20))  # it is part of the topic
    owner.commit(a_descriptor(20, 30))
    owner.commit(a_descriptor(30, 40))
    with pytest.raises(ConflictError):
        acting.commit(a_descriptor(20, 30))
    assert acting.tiered == 40
    acting.commit(a_descriptor(40, 50))
    assert cluster.ranges() == [(0, 10), (10, 20), (20, 30), (30, 40), (40, 50)]


def test_job_whose_lease_has_ended_changes_nothing(cluster, owner):
    acting = cluster.outside()
    described, revision = next(cluster.catalog().descriptors())
    cluster.clock.advance(TTL_SECONDS + 1)
    before = cluster.everything()
    merged = a_descriptor(0, 10, object_id="data-0-9-c01234567.dnb1")
    for change in (
        lambda: acting.commit(a_descriptor(10, 20)),
        lambda: acting.swap([(described, revision)], merged, until=0),
        lambda: acting.replace(described, a_descriptor(0, 10, epoch=3), revision),
        lambda: acting.remove(described, revision),
        acting.check,
    ):
        with pytest.raises(FencedError) as raised:
            change()
        assert raised.value.path == "/danube/pipeline/jobs/job"
        assert cluster.everything() == before


@pytest.mark.parametrize("node", ["a", "b"])
def test_topic_that_changed_hands_is_not_changed_by_the_old_plan(cluster, owner, node):
    acting = cluster.outside()
    claim_after(cluster, node)
    before = cluster.everything()
    for _ in range(2):
        with pytest.raises(FencedError) as raised:
            acting.commit(a_descriptor(10, 20))
        assert raised.value.path is None  # not the job's own lease
    assert cluster.everything() == before
    anew = cluster.outside(cluster.fence("/danube/pipeline/jobs/another"))
    anew.commit(a_descriptor(10, 20, epoch=anew.epoch))


def test_owner_that_changes_its_record_is_in_nobodys_way(cluster, owner):
    owner.commit(a_descriptor(10, 20))
    acting = cluster.outside()
    owner.expire([a_descriptor(0, 10)])
    assert owner.record.expired_before == 10
    acting.commit(a_descriptor(20, 30))
    assert cluster.ranges() == [(10, 20), (20, 30)]
    assert cluster.catalog().record()[0].expired_before == 10


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("count", [1, 3])
def test_lost_answers_are_resolved_by_reading_back(cluster, owner, when, count):
    acting = cluster.outside()
    left = count

    def lose(kind, key):
        nonlocal left
        if kind == "transact" and left:
            left -= 1
            raise CommitUnknownError("lost")

    setattr(cluster.metadata, when, lose)
    acting.commit(a_descriptor(10, 20))
    acting.commit(a_descriptor(20, 30))
    assert cluster.ranges() == [(0, 10), (10, 20), (20, 30)]


def test_commit_that_lands_after_the_lease_has_ended_does_not_count(cluster, owner):
    acting = cluster.outside()
    cluster.metadata.delay_next_change(5)
    with pytest.raises(UnavailableError):
        acting.commit(a_descriptor(10, 20))
    cluster.clock.advance(TTL_SECONDS + 1)
    assert set(cluster.metadata.deliver_delayed()) == {None}
    assert cluster.ranges() == [(0, 10)]


# -- topics that go -----------------------------------------------------------------------------


def test_topic_that_does_not_exist_is_not_changed(cluster):
    with pytest.raises(NotFoundError):
        cluster.outside()


@pytest.mark.parametrize("is_finished", [False, True])
def test_nothing_is_put_into_a_topic_that_is_deleted(cluster, owner, is_finished):
    acting = cluster.outside()
    owner.mark_deleting()
    if is_finished:
        owner.finish_delete()
    before = cluster.everything()
    with pytest.raises(FencedError, match="deleted"):
        acting.commit(a_descriptor(10, 20))
    assert cluster.everything() == before
    with pytest.raises(NotFoundError):
        cluster.outside(cluster.fence("/danube/pipeline/jobs/another"))


# -- an owner that is none any more ---------------------------------------------------------------


def test_successors_objects_are_not_taken_for_ones_in_the_owners_name(cluster, owner):
    told = []
    owner.on_fenced = told.append
    successor = claim_after(cluster, "b")
    successor.commit(a_descriptor(10, 20, epoch=successor.epoch))
    with pytest.raises(FencedError):
        owner.refresh()
    assert owner.tiered == 10
    assert len(told) == 1


def test_conflict_with_a_successor_does_not_move_the_old_owners_end(cluster, owner):
    """The topic changes hands between the commit that fails and the look at what there is."""
    cluster.outside().commit(a_descriptor(10, 15))
    acted = []

    def take_over(kind, key):
        if kind == "get" and key == cluster.keys.current and not acted:
            acted.append(1)
            successor = claim_after(cluster, "b")
            successor.commit(a_descriptor(15, 20, epoch=successor.epoch))

    cluster.metadata.before = take_over
    with pytest.raises(FencedError):
        owner.commit(a_descriptor(10, 20))
    assert acted
    assert owner.tiered == 10
