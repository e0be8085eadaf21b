"""Who may write a topic: claims, epochs, commits that get lost, fencing, hand-over, deletion."""

import pickle
from dataclasses import replace

import pytest

from ister.base.limits import OWNER_LINEAGE_MAX
from ister.base.model import AckLevel, Codec
from ister.bucket.ownership import resume_delete
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    FencedError,
    InvariantError,
    NotFoundError,
    StoresDifferError,
    UnavailableError,
    WaitsForDiskError,
)
from ister.format.descriptor import encode_descriptor
from ister.format.records import Lineage, UploadSession, decode_topic, encode_current, encode_topic
from tests.support.cases import each
from tests.support.stores import NOW_MS, TTL_SECONDS, Cluster, Frames, a_descriptor, failing, once

SESSION = UploadSession(object_id="data-0-9.dnb1", start=0, end=10, epoch=1, started_at=5)


def chain(owned, *ends):
    """Commits one object after the other, up to these ends."""
    start = owned.tiered
    for end in ends:
        owned.commit(a_descriptor(start, end, epoch=owned.epoch))
        start = end


# -- claims -------------------------------------------------------------------------------------


def test_first_claim_makes_the_topic(cluster):
    owned = cluster.claim("a", ack=AckLevel.TIERED, codec=Codec.BINCODE1)
    record, _ = cluster.catalog().record()
    assert record == owned.record
    assert (record.epoch, record.ack, record.codec) == (1, AckLevel.TIERED, Codec.BINCODE1)
    assert record.lineage == (Lineage(epoch=1, start=0, node="a"),)
    assert record.created_at == NOW_MS // 1000
    assert len(record.incarnation) == 16
    owner, _ = cluster.catalog().owner()
    assert (owner.node, owner.epoch) == ("a", 1)
    assert (owned.tiered, owned.start) == (0, 0)


def test_topic_that_does_not_exist_is_not_made_by_opening_it(cluster):
    with pytest.raises(NotFoundError):
        cluster.claim("a", create=False)
    assert cluster.catalog().record() is None
    assert cluster.catalog().owner() is None


def test_same_node_claims_again_at_once_under_a_higher_epoch(cluster):
    first = cluster.claim("a")
    chain(first, 10, 25)
    again = cluster.claim("a", create=False, ack=AckLevel.MEMORY)
    assert (first.epoch, again.epoch) == (1, 2)
    assert again.record.incarnation == first.record.incarnation
    assert again.record.ack is AckLevel.SYNCED
    assert again.record.lineage == first.record.lineage
    assert (again.tiered, again.first.start) == (25, 0)
    with pytest.raises(FencedError):
        first.check()


def test_other_node_is_refused_while_the_lease_lives(cluster):
    cluster.claim("a")
    for take_over in (False, True):
        with pytest.raises(ConflictError, match="open on node a") as refused:
            cluster.claim("b", take_over=take_over)
        assert not isinstance(refused.value, WaitsForDiskError)
    cluster.clock.advance(TTL_SECONDS - 0.5)
    with pytest.raises(ConflictError, match="open on node a"):
        cluster.claim("b", take_over=True)
    assert cluster.catalog().record()[0].epoch == 1


def test_other_node_is_refused_after_the_lease_until_it_takes_over(cluster):
    owned = cluster.claim("a")
    chain(owned, 10)
    cluster.clock.advance(TTL_SECONDS + 1)
    with pytest.raises(WaitsForDiskError, match="has not handed it over") as refused:
        cluster.claim("b")
    assert (refused.value.node, refused.value.offset) == ("a", 10)
    assert pickle.loads(pickle.dumps(refused.value)).node == "a"
    assert "take_over=True" in refused.value.hint
    assert "10" in refused.value.hint
    taken = cluster.claim("b", take_over=True)
    assert taken.record.lineage[-1] == Lineage(epoch=2, start=10, node="b")
    assert taken.start == 10
    with pytest.raises(FencedError):
        owned.commit(a_descriptor(10, 20))


def test_topic_with_ack_tiered_is_claimed_when_the_lease_has_ended(cluster):
    owned = cluster.claim("a", ack=AckLevel.TIERED)
    chain(owned, 10)
    with pytest.raises(ConflictError, match="open on node a"):
        cluster.claim("b")
    cluster.clock.advance(TTL_SECONDS + 1)
    other = cluster.claim("b", create=False)
    assert other.record.lineage[-1] == Lineage(epoch=2, start=10, node="b")
    assert other.start == 10
    with pytest.raises(FencedError):
        owned.commit(a_descriptor(10, 20))


def mark(cluster, **fields):
    """Changes the topic's record as its owner would."""
    record, _ = cluster.catalog().record()
    cluster.metadata.put(cluster.keys.record, encode_topic(replace(record, **fields)))


@each(
    ("acked_end", "acked_epoch", "is_claimed"),
    [(10, 1, True), (9, 1, True), (11, 1, False), (10, 0, False), (None, 1, False)],
)
def test_idle_topic_is_claimed_if_its_record_proves_that_the_bucket_has_all(
    acked_end, acked_epoch, is_claimed
):
    cluster = Cluster()
    chain(cluster.claim("a"), 10)
    mark(cluster, acked_end=acked_end, acked_epoch=acked_epoch)
    cluster.clock.advance(TTL_SECONDS + 1)
    if not is_claimed:
        with pytest.raises(WaitsForDiskError):
            cluster.claim("b")
        return
    other = cluster.claim("b")
    assert other.start == 10
    # It proves nothing about what the new owner acknowledges.
    assert other.record.acked_end is None
    cluster.clock.advance(TTL_SECONDS + 1)
    with pytest.raises(WaitsForDiskError):
        cluster.claim("c")


def test_mark_of_an_older_owner_counts_for_nothing_where_an_older_ister_kept_it(cluster):
    chain(cluster.claim("a"), 10)
    mark(cluster, acked_end=10, acked_epoch=1)
    # An older Ister claims the topic: it keeps the fields that it does not know.
    mark(cluster, epoch=2, claim="of an older version")
    cluster.clock.advance(TTL_SECONDS + 1)
    with pytest.raises(WaitsForDiskError):
        cluster.claim("b")


def test_released_topic_is_its_nodes_still(cluster):
    cluster.claim("a").release()
    assert cluster.catalog().owner() is None
    with pytest.raises(WaitsForDiskError):
        cluster.claim("b")
    assert cluster.claim("a").epoch == 2


def test_node_that_comes_back_after_another_wrote_has_old_files(cluster):
    cluster.claim("a").seal(0)
    cluster.claim("b").seal(0)
    again = cluster.claim("a")
    assert again.epoch == 3
    assert [item.node for item in again.record.lineage] == ["a", "b", "a"]


def test_record_without_a_lineage_is_anybodys(cluster):
    owned = cluster.claim("a")
    chain(owned, 10)
    record = replace(owned.record, lineage=())
    cluster.metadata.put(cluster.keys.record, encode_topic(record))
    cluster.metadata.delete(cluster.keys.owner)
    other = cluster.claim("b")
    assert other.record.lineage == (Lineage(epoch=2, start=10, node="b"),)


def test_lineage_is_kept_to_its_last_changes(cluster):
    for number in range(OWNER_LINEAGE_MAX + 10):
        cluster.claim(f"n{number % 2}").seal(0)
    lineage = cluster.catalog().record()[0].lineage
    assert len(lineage) == OWNER_LINEAGE_MAX
    assert lineage[-1].epoch == OWNER_LINEAGE_MAX + 10


def test_claim_keeps_what_others_put_into_the_record(cluster):
    owned = cluster.claim("a")
    record = replace(owned.record, more={"partitions": 4})
    cluster.metadata.put(cluster.keys.record, encode_topic(record))
    assert cluster.claim("a").record.more == {"partitions": 4}


@pytest.mark.parametrize("is_new", [True, False])
def test_claim_whose_answer_is_lost_is_found_to_have_happened(cluster, is_new):
    if not is_new:
        cluster.claim("a")
    cluster.metadata.after = failing("transact", times=1, error=CommitUnknownError)
    owned = cluster.claim("a")
    assert owned.epoch == (1 if is_new else 2)
    assert cluster.catalog().record()[0] == owned.record
    owned.begin(SESSION)


@pytest.mark.parametrize("is_new", [True, False])
def test_claim_that_lands_late_does_not_fence_the_one_that_came_first(cluster, is_new):
    if not is_new:
        cluster.claim("a")
    node = cluster.node("a")
    cluster.metadata.delay_next_change()
    owned = cluster.claim(node)
    assert cluster.metadata.deliver_delayed() == [None]
    owned.begin(SESSION)
    assert cluster.catalog().record()[0] == owned.record


def test_claim_under_a_lease_that_has_ended_takes_a_new_one(cluster):
    node = cluster.node("a")
    cluster.clock.advance(TTL_SECONDS + 1)
    owned = cluster.claim(node)
    assert owned.epoch == 1
    assert node.is_valid
    assert cluster.catalog().owner()[0].node == "a"


def test_claim_beside_another_one_goes_on_from_what_that_one_left(cluster):
    node = cluster.node("a")
    cluster.metadata.before = once("transact", lambda: cluster.claim(node))
    assert cluster.claim(node).epoch == 2


# -- commits ------------------------------------------------------------------------------------


def test_commits_follow_each_other(cluster):
    owned = cluster.claim("a")
    owned.begin(SESSION)
    chain(owned, 10, 25, 26)
    assert cluster.ranges() == [(0, 10), (10, 25), (25, 26)]
    assert (owned.tiered, owned.first.end, owned.last.start) == (26, 10, 25)
    assert owned.session() is None
    current = cluster.metadata.get(cluster.keys.current).value
    assert current == b'{"start":"%020d","next_offset":26}' % 25


@pytest.mark.parametrize(
    ("start", "end", "error"),
    [
        (11, 20, InvariantError),
        # Another thread has committed an express object.
        (9, 20, ConflictError),
        (0, 10, ConflictError),
        (0, 20, ConflictError),
    ],
)
def test_commit_that_does_not_continue_is_refused(cluster, start, end, error):
    owned = cluster.claim("a")
    chain(owned, 10)
    with pytest.raises(error):
        owned.commit(a_descriptor(start, end))
    assert cluster.ranges() == [(0, 10)]


def test_first_commit_begins_where_the_local_files_do(cluster):
    owned = cluster.claim("a")
    owned.commit(a_descriptor(70, 80))
    assert (owned.tiered, cluster.ranges()) == (80, [(70, 80)])


@pytest.mark.parametrize("lost", [1, 4])
def test_commit_whose_answer_is_lost_is_found_to_have_happened(cluster, lost):
    owned = cluster.claim("a")
    chain(owned, 10)
    cluster.metadata.after = failing("transact", times=lost, error=CommitUnknownError)
    chain(owned, 20, 30)
    assert (owned.tiered, cluster.ranges()) == (30, [(0, 10), (10, 20), (20, 30)])


@pytest.mark.parametrize("delayed", [1, 4])
def test_commit_that_has_not_happened_is_tried_again(cluster, delayed):
    owned = cluster.claim("a")
    cluster.metadata.delay_next_change(delayed)
    chain(owned, 10)
    assert cluster.metadata.deliver_delayed() == [None] * delayed
    chain(owned, 20)
    assert cluster.ranges() == [(0, 10), (10, 20)]


@each("lands", ["before the repetition", "behind it"])
def test_commit_without_any_answer_is_unknown_and_may_be_repeated(lands):
    cluster = Cluster()
    owned = cluster.claim("a")
    chain(owned, 10)
    cluster.metadata.delay_next_change(5)
    with pytest.raises(CommitUnknownError):
        owned.commit(a_descriptor(10, 20))
    assert (owned.tiered, cluster.ranges()) == (10, [(0, 10)])
    if lands == "before the repetition":
        cluster.metadata.deliver_delayed()
    owned.commit(a_descriptor(10, 20))
    assert set(cluster.metadata.deliver_delayed()) <= {None}
    chain(owned, 30)
    assert (owned.tiered, cluster.ranges()) == (30, [(0, 10), (10, 20), (20, 30)])


def test_commit_beside_one_that_lands_late_is_refused_and_goes_on_behind_it(cluster):
    owned = cluster.claim("a")
    chain(owned, 10)
    cluster.metadata.delay_next_change(5)
    with pytest.raises(CommitUnknownError):
        owned.commit(a_descriptor(10, 20))
    cluster.metadata.deliver_delayed()
    # The next cycle planned a longer object from where it believed the topic to end.
    with pytest.raises(ConflictError) as refused:
        owned.commit(a_descriptor(10, 35))
    assert not isinstance(refused.value, FencedError)
    assert owned.tiered == 20
    chain(owned, 35)
    assert cluster.ranges() == [(0, 10), (10, 20), (20, 35)]


def test_commit_that_lands_after_its_successor_changes_nothing(cluster):
    owned = cluster.claim("a")
    cluster.metadata.delay_next_change(5)
    with pytest.raises(CommitUnknownError):
        owned.commit(a_descriptor(0, 10))
    chain(owned, 15, 20)
    assert set(cluster.metadata.deliver_delayed()) == {None}
    assert cluster.ranges() == [(0, 15), (15, 20)]


def test_record_changed_by_others_under_the_same_epoch_is_read_again(cluster):
    owned = cluster.claim("a")
    for number in range(3):
        record = replace(cluster.catalog().record()[0], more={"note": number})
        cluster.metadata.put(cluster.keys.record, encode_topic(record))
        chain(owned, owned.tiered + 10)
    assert cluster.ranges() == [(0, 10), (10, 20), (20, 30)]
    owned.mark_deleting()
    kept = decode_topic(cluster.metadata.get(cluster.keys.record).value, key="")
    assert (kept.more, kept.state) == ({"note": 2}, "deleting")


def test_record_that_never_stands_still_gives_up(cluster):
    owned = cluster.claim("a")

    def change(kind, key):
        if kind == "transact":
            cluster.metadata.put(cluster.keys.record, encode_topic(owned.record))

    cluster.metadata.before = change
    with pytest.raises(UnavailableError, match="keeps changing"):
        owned.commit(a_descriptor(0, 10))
    assert cluster.ranges() == []


# -- fencing ------------------------------------------------------------------------------------

_CHANGES = {
    "begin": lambda owned: owned.begin(SESSION),
    "commit": lambda owned: owned.commit(a_descriptor(20, 30)),
    "replace": lambda owned: owned.replace(
        a_descriptor(0, 10), a_descriptor(0, 10, epoch=7), owned.catalog.store.revision
    ),
    "expire": lambda owned: owned.expire([a_descriptor(0, 10)]),
    "seal": lambda owned: owned.seal(20),
    "mark_deleting": lambda owned: owned.mark_deleting(),
    "check": lambda owned: owned.check(),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_owner_that_was_replaced_changes_nothing(cluster, change):
    owned = cluster.claim("a")
    chain(owned, 10, 20)
    told = []
    owned.on_fenced = told.append
    cluster.claim("a")
    before = cluster.everything()
    for _ in range(2):
        with pytest.raises(FencedError):
            _CHANGES[change](owned)
    assert cluster.everything() == before
    assert owned.is_fenced
    assert len(told) == 1


def test_owner_that_was_replaced_does_not_put_its_key_back(cluster):
    node = cluster.node("a")
    owned = cluster.claim(node)
    cluster.claim("a")
    owner = cluster.catalog().owner()
    with pytest.raises(FencedError):
        owned.reassert(node.lease, node.is_here)
    owned.release()
    assert cluster.catalog().owner() == owner


def test_owner_of_a_topic_whose_record_is_gone_is_fenced(cluster):
    owned = cluster.claim("a")
    cluster.metadata.delete(cluster.keys.record)
    with pytest.raises(FencedError):
        owned.commit(a_descriptor(0, 10))


def test_commit_that_lands_after_the_next_claim_changes_nothing(cluster):
    owned = cluster.claim("a")
    chain(owned, 10)
    cluster.metadata.delay_next_change(5)
    with pytest.raises(CommitUnknownError):
        owned.commit(a_descriptor(10, 20))
    successor = cluster.claim("a")
    assert set(cluster.metadata.deliver_delayed()) == {None}
    assert cluster.ranges() == [(0, 10)]
    chain(successor, 15)
    with pytest.raises(FencedError):
        owned.commit(a_descriptor(10, 20))
    assert cluster.ranges() == [(0, 10), (10, 15)]


# -- replacing and expiring ---------------------------------------------------------------------


def test_replacing_what_has_changed_meanwhile_does_nothing(cluster):
    owned = cluster.claim("a")
    chain(owned, 10)
    ((old, revision),) = cluster.catalog().descriptors()
    assert owned.replace(old, a_descriptor(0, 10, epoch=8), revision)
    assert not owned.replace(old, a_descriptor(0, 10, epoch=9), revision)
    assert cluster.catalog().find(0).epoch == 8


def test_replacement_whose_answer_is_lost_is_found_to_have_happened(cluster):
    owned = cluster.claim("a")
    chain(owned, 10)
    ((old, revision),) = cluster.catalog().descriptors()
    cluster.metadata.after = failing("transact", times=1, error=CommitUnknownError)
    assert owned.replace(old, a_descriptor(0, 10, epoch=8), revision)
    assert owned.last.epoch == 8


def test_replacement_with_other_offsets_is_refused(cluster):
    owned = cluster.claim("a")
    chain(owned, 10)
    ((old, revision),) = cluster.catalog().descriptors()
    with pytest.raises(InvariantError):
        owned.replace(old, a_descriptor(0, 11), revision)


def test_expired_objects_leave_and_the_newest_stays(cluster):
    owned = cluster.claim("a")
    chain(owned, 10, 20, 30)
    everything = cluster.descriptors()
    owned.expire(everything[:2])
    assert cluster.ranges() == [(20, 30)]
    assert (owned.first.start, owned.tiered) == (20, 30)
    assert owned.expire(everything) == []
    assert cluster.ranges() == [(20, 30)]
    assert owned.record.expired_before == 20
    chain(owned, 40)
    assert cluster.ranges() == [(20, 30), (30, 40)]


@pytest.mark.parametrize("number", [1, 2], ids=["the note in the record", "the deletion"])
def test_objects_are_offered_until_it_is_on_record_that_they_go(cluster, number):
    """Goal: a reader is refused only what may be gone."""
    owned = cluster.claim("a")
    chain(owned, 10, 20, 30)
    cluster.metadata.before = failing("transact", at=number, times=1)
    with pytest.raises(UnavailableError):
        owned.expire(cluster.descriptors()[:2])
    cluster.heal()
    is_on_record = number == 2
    assert cluster.catalog().record()[0].expired_before == (20 if is_on_record else 0)
    assert owned.first.start == (20 if is_on_record else 0)
    assert cluster.ranges() == [(0, 10), (10, 20), (20, 30)]


def test_more_objects_expire_than_one_transaction_takes(cluster):
    owned = cluster.claim("a")
    chain(owned, *range(1, 252))
    owned.expire(cluster.descriptors()[:-1])
    assert cluster.ranges() == [(250, 251)]


# -- hand-over ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [(), (1,), (10, 20)], ids=["empty", "one message", "objects"])
def test_sealed_topic_is_claimed_by_any_node_where_it_ended(cluster, ends):
    owned = cluster.claim("a")
    chain(owned, *ends)
    next_offset = ends[-1] if ends else 0
    owned.seal(next_offset)
    state, _ = cluster.catalog().sealed()
    assert (state.next_offset, state.node, state.epoch) == (next_offset, "a", 1)
    assert cluster.catalog().owner() is None
    successor = cluster.claim("b", create=False)
    assert successor.sealed_before == state
    assert successor.start == next_offset
    assert successor.record.lineage[-1] == Lineage(
        epoch=2, start=next_offset, node="b", is_proven=True
    )
    assert cluster.catalog().sealed() is None
    chain(successor, next_offset + 5)
    with pytest.raises(FencedError):
        owned.check()


def test_seal_where_the_bucket_does_not_end_is_refused(cluster):
    owned = cluster.claim("a")
    chain(owned, 10)
    for wrong in (0, 9, 11):
        with pytest.raises(StoresDifferError):
            owned.seal(wrong)
    assert cluster.catalog().sealed() is None


def test_seal_that_lands_after_the_next_claim_changes_nothing(cluster):
    owned = cluster.claim("a")
    cluster.metadata.delay_next_change(5)
    with pytest.raises(CommitUnknownError):
        owned.seal(0)
    successor = cluster.claim("a")
    assert set(cluster.metadata.deliver_delayed()) == {None}
    assert cluster.catalog().sealed() is None
    successor.check()


def test_owner_key_that_is_put_back_late_does_not_take_back_what_was_handed_over(cluster):
    node = cluster.node("a")
    owned = cluster.claim(node)
    cluster.metadata.delay_next_change()
    # Its first request is under way for a long time; the second one is answered.
    owned.reassert(node.lease, node.is_here)
    owned.seal(0)
    assert cluster.metadata.deliver_delayed() == [None]
    assert cluster.catalog().owner() is None
    cluster.claim("b", create=False)


def test_owner_key_of_a_topic_that_was_handed_over_is_not_put_back(cluster):
    node = cluster.node("a")
    owned = cluster.claim(node)
    owned.seal(0)
    with pytest.raises(ConflictError, match="handed over"):
        owned.reassert(node.lease, node.is_here)
    assert cluster.catalog().owner() is None


def test_topic_sealed_without_its_own_messages_keeps_the_next_offset(cluster):
    first = cluster.claim("a")
    chain(first, 10)
    first.seal(10)
    second = cluster.claim("b")
    second.seal(10)
    assert cluster.claim("c").start == 10


# -- membership ---------------------------------------------------------------------------------


def test_lease_does_not_outlast_a_suspended_machine(cluster):
    node = cluster.node("a")
    cluster.claim(node)
    cluster.clock.suspend(TTL_SECONDS + 1)
    assert not node.is_valid
    assert cluster.catalog().owner() is None


def test_renewal_that_is_not_answered_leaves_the_lease_as_it_is(cluster):
    node = cluster.node("a")
    until = node.valid_until

    cluster.metadata.before = failing("renew")
    with pytest.raises(UnavailableError):
        node.renew()
    assert node.valid_until == until


def test_member_that_leaves_owns_nothing_any_more(cluster):
    node = cluster.node("a")
    cluster.claim(node)
    node.end()
    assert not node.is_valid
    assert cluster.catalog().owner() is None


# -- deletion -----------------------------------------------------------------------------------


def test_deleted_topic_is_gone_and_its_epoch_goes_on(cluster):
    owned = cluster.claim("a")
    chain(owned, 10)
    cluster.metadata.put(cluster.keys.progress("s"), b"{}")
    owned.mark_deleting()
    with pytest.raises(FencedError, match="being deleted"):
        owned.begin(SESSION)
    with pytest.raises(NotFoundError, match="being deleted"):
        cluster.claim("a")
    owned.finish_delete()
    assert cluster.ranges() == []
    left = [kv.key for kv in cluster.metadata.range("/") if "/cluster/nodes/" not in kv.key]
    assert left == [cluster.keys.record]
    with pytest.raises(NotFoundError):
        cluster.claim("b", create=False)
    again = cluster.claim("b")
    assert again.epoch == 2
    assert again.record.incarnation != owned.record.incarnation
    assert (again.tiered, again.start) == (0, 0)
    assert again.record.lineage == (Lineage(epoch=2, start=0, node="b"),)


def test_deletion_that_was_interrupted_is_resumed_by_anybody(cluster):
    owned = cluster.claim("a")
    chain(owned, 10)
    owned.mark_deleting()
    resumed = resume_delete(cluster.catalog(), clock=cluster.clock, metrics=cluster.metrics)
    resumed.finish_delete()
    assert cluster.claim("b").epoch == 2


def test_topic_that_is_not_being_deleted_is_not_resumed(cluster):
    def resume():
        return resume_delete(cluster.catalog(), clock=cluster.clock, metrics=cluster.metrics)

    with pytest.raises(NotFoundError):
        resume()
    owned = cluster.claim("a")
    with pytest.raises(NotFoundError):
        resume()
    owned.mark_deleting()
    owned.finish_delete()
    with pytest.raises(NotFoundError):
        resume()


def test_deletion_resumed_twice_does_not_touch_the_topic_made_since(cluster):
    """Goal: the slower of two that finish a deletion leaves the new topic of that name alone."""
    owned = cluster.claim("a")
    chain(owned, 10)
    owned.mark_deleting()
    slow = resume_delete(cluster.catalog(), clock=cluster.clock, metrics=cluster.metrics)
    owned.finish_delete()
    successor = cluster.claim("a")
    chain(successor, 30)
    cluster.metadata.put(cluster.keys.progress("s"), b"{}")
    with pytest.raises(FencedError):
        slow.finish_delete()
    assert cluster.ranges() == [(0, 30)]
    assert cluster.metadata.get(cluster.keys.progress("s")) is not None
    chain(successor, 40)


# -- the pointer to the newest object ----------------------------------------------------------


@pytest.mark.parametrize("value", [encode_current(0), encode_current(20, 40), b"nonsense", None])
def test_a_wrong_pointer_is_set(cluster, value):
    owned = cluster.filled(Frames([b"x"] * 30), 10, 20, 30)
    if value is None:
        cluster.metadata.delete(cluster.keys.current)
    else:
        cluster.metadata.put(cluster.keys.current, value)
    assert owned.mend_current()
    assert cluster.current() == 20
    assert not owned.mend_current(), "it is right now"
    owned.commit(a_descriptor(30, 40))
    assert cluster.current() == 30


def test_without_objects_there_is_nothing_to_point_at(cluster):
    assert not cluster.claim("a").mend_current()


def test_a_fenced_owner_sets_nothing(cluster):
    owned = cluster.filled(Frames([b"x"] * 20), 10, 20)
    cluster.metadata.put(cluster.keys.current, encode_current(0))
    cluster.claim("a")
    with pytest.raises(FencedError):
        owned.mend_current()
    assert cluster.current() == 0


def test_the_pointer_goes_with_a_descriptor_that_is_removed(cluster):
    owned = cluster.filled(Frames([b"x"] * 20), 10, 20)
    covered = a_descriptor(15, 20)
    revision = cluster.metadata.put(cluster.keys.descriptor(15), encode_descriptor(covered))
    cluster.metadata.put(cluster.keys.current, encode_current(15))
    assert owned.refresh()
    assert owned.last.start == 15
    assert owned.remove(covered, revision)
    assert cluster.current() == 10
    assert (owned.last.start, owned.tiered) == (10, 20)
    owned.commit(a_descriptor(20, 25))


def test_a_descriptor_that_has_changed_is_not_removed(cluster):
    owned = cluster.filled(Frames([b"x"] * 20), 10, 20)
    covered = a_descriptor(15, 20)
    revision = cluster.metadata.put(cluster.keys.descriptor(15), encode_descriptor(covered))
    cluster.metadata.put(cluster.keys.descriptor(15), encode_descriptor(a_descriptor(15, 19)))
    assert not owned.remove(covered, revision)
    assert cluster.metadata.get(cluster.keys.descriptor(15)) is not None
