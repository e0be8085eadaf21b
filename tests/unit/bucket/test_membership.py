"""Goal: one process at a time has a node, and a copy of its directory never owns a topic beside it.

Method: memberships of the same node on one metadata store, whose directories are the same one, or
copies of each other; a clock that moves by hand, so that waiting for a lease takes no time.
"""

import pytest

from ister.base.model import TopicName
from ister.errors import (
    CapacityError,
    CommitUnknownError,
    ConflictError,
    FencedError,
    UnavailableError,
)
from tests.support.stores import PREFIX, TTL_SECONDS, Directory, failing

NODE = "a"
PROCESS = f"{PREFIX}/cluster/nodes/{NODE}/process"


def join(cluster, directory):
    cluster.directories[NODE] = directory
    return cluster.node(NODE)


def names(count):
    return [TopicName(namespace="default", topic=f"t{number:04d}") for number in range(count)]


def claim_all(cluster, node, count):
    return [cluster.claim(node, name=name) for name in names(count)]


def owners(cluster):
    return len(cluster.metadata.range(f"{PREFIX}/cluster/owners/"))


def kinds_of(cluster):
    """What is asked of the metadata store from here on."""
    asked = []
    cluster.metadata.before = lambda kind, key: asked.append(kind)
    return asked


# -- joining ------------------------------------------------------------------------------------


def test_next_process_of_the_same_directory_joins_at_once(cluster):
    directory = Directory("here")
    first = join(cluster, directory)
    owned = cluster.claim(first)
    began = cluster.clock.boottime()
    second = join(cluster, directory)
    assert cluster.claim(second).epoch == 2
    assert cluster.clock.boottime() == began
    with pytest.raises(FencedError, match="replaced this one: process 1 on here"):
        first.renew()
    assert owned.is_fenced
    assert not first.is_valid


def test_copy_waits_for_the_lease_to_end(cluster, caplog):
    directory = Directory("here")
    node = join(cluster, directory)
    owned = cluster.claim(node)
    until = node.valid_until
    copied = join(cluster, directory.copied("there"))
    assert cluster.clock.boottime() >= until
    assert "waiting for the lease" in caplog.text
    assert not owned.is_leased, "it stopped before the copy began"
    assert cluster.claim(copied).epoch == 2
    with pytest.raises(FencedError, match="there"):
        node.renew()
    assert owned.is_fenced
    with pytest.raises(FencedError):
        cluster.claim(node)


def test_copy_of_a_directory_in_use_is_refused(cluster):
    """Also if its holder renews at the last moment, and whatever the directory's identity says."""
    directory = Directory("")
    node = join(cluster, directory)
    owned = cluster.claim(node)
    step = cluster.clock.sleep

    def sleep(seconds):
        step(seconds)
        if node.valid_until - cluster.clock.boottime() < 1:
            node.renew()

    cluster.clock.sleep = sleep
    with pytest.raises(ConflictError, match="another process uses this directory") as refused:
        join(cluster, directory.copied(""))
    assert ".node" in refused.value.hint
    node.renew()
    assert owned.is_leased


def test_copy_made_before_the_last_close_is_refused(cluster):
    directory = Directory("here")
    node = join(cluster, directory)
    copied = directory.copied("there")
    node.end()
    with pytest.raises(ConflictError, match="older copy"):
        join(cluster, copied)
    join(cluster, directory)


def test_loser_that_wakes_up_after_the_winner_has_ended_stays_fenced(cluster):
    directory = Directory("here")
    node = join(cluster, directory)
    owned = cluster.claim(node)
    other = join(cluster, directory.copied("there"))  # waits for the lease
    other.lease.revoke()
    with pytest.raises(FencedError, match="has used the node meanwhile"):
        node.renew()
    assert owned.is_fenced
    assert not node.is_valid


def test_directory_without_a_record_of_its_processes_is_taken_as_it_is(cluster):
    """Made by an earlier version, or confirmed by an operator."""
    join(cluster, Directory("here")).end()
    join(cluster, Directory("there"))


def test_full_disk_is_no_reason_not_to_join(cluster):
    directory = Directory("here")
    join(cluster, directory).end()

    def full(instance):
        raise CapacityError("no room")

    remember, directory.remember = directory.remember, full
    node = join(cluster, directory)
    node.end()
    directory.remember = remember
    join(cluster, directory)


def test_join_whose_answers_are_lost_is_done_once(cluster):
    for hook in ("before", "after"):
        lost = failing("transact", times=2, error=CommitUnknownError)
        setattr(cluster.metadata, hook, lost)
        node = join(cluster, Directory("here"))
        node.renew()
        assert node.is_valid
        node.end()
        cluster.heal()
        cluster.metadata.delete_prefix(f"{PREFIX}/cluster/")


# -- renewals -----------------------------------------------------------------------------------


def test_renewal_notices_another_process_while_the_lease_lives(cluster):
    node = join(cluster, Directory("here"))
    owned = cluster.claim(node)
    told = []
    owned.on_fenced = told.append
    other = cluster.metadata.get(PROCESS).value.replace(node.instance.encode(), b"0" * 16)
    cluster.metadata.put(PROCESS, other)
    with pytest.raises(FencedError):
        node.renew()
    assert (len(told), owned.is_leased, node.is_valid) == (1, False, False)


def test_renewal_puts_back_a_node_key_that_somebody_removed(cluster):
    node = join(cluster, Directory("here"))
    owned = cluster.claim(node)
    cluster.metadata.delete(PROCESS)
    node.renew()
    assert cluster.metadata.get(PROCESS) is not None
    assert owned.is_leased
    cluster.claim(node)


def test_owner_key_is_not_put_back_beside_another_process(cluster):
    """Goal: reclaiming compares the node's key in the same transaction.

    Method: the other process joins between the look at the key and the reclaim.
    """
    node = join(cluster, Directory("here"))
    owned = cluster.claim(node)
    cluster.clock.advance(TTL_SECONDS + 1)
    other = b'{"instance":"0","directory":"","holder":"x","since":0,"ttl_seconds":9}'
    state = {"transactions": 0}

    def replaced(kind, key):
        if kind == "transact":
            state["transactions"] += 1
            if state["transactions"] == 2:
                cluster.metadata.put(PROCESS, other)

    cluster.metadata.before = replaced
    with pytest.raises(FencedError):
        node.renew()
    assert state["transactions"] >= 2
    assert cluster.catalog().owner() is None
    assert owned.is_fenced
    assert not owned.is_leased


def test_renewal_costs_the_same_however_many_topics_there_are(cluster):
    node = join(cluster, Directory("here"))
    claim_all(cluster, node, 50)
    asked = kinds_of(cluster)
    node.renew()
    assert asked == ["get", "renew"]


# -- many topics --------------------------------------------------------------------------------


def test_topics_come_back_many_in_a_transaction(cluster):
    node = join(cluster, Directory("here"))
    topics = claim_all(cluster, node, 250)
    cluster.clock.advance(TTL_SECONDS + 1)
    asked = kinds_of(cluster)
    node.renew()
    assert asked.count("transact") == 1 + 7
    assert owners(cluster) == 250
    assert all(topic.is_leased for topic in topics)


def test_new_lease_is_renewed_while_topics_come_back(cluster):
    """Goal: thousands of topics come back although that takes longer than the lease."""
    node = join(cluster, Directory("here"))
    topics = claim_all(cluster, node, 400)
    cluster.clock.advance(TTL_SECONDS + 1)

    def slow(kind, key):
        if kind == "transact":
            cluster.clock.advance(TTL_SECONDS / 4)

    cluster.metadata.before = slow
    node.renew()
    cluster.heal()
    assert owners(cluster) == 400
    assert all(topic.is_leased for topic in topics)


def test_topic_is_usable_as_soon_as_it_is_back(cluster):
    node = join(cluster, Directory("here"))
    topics = claim_all(cluster, node, 100)
    back, seen = [], []
    for topic in topics:
        topic.on_regained = lambda topic=topic: back.append(topic)
    cluster.clock.advance(TTL_SECONDS + 1)

    def look(kind, key):
        if kind == "transact":
            seen.append(([t.is_leased for t in topics].count(True), len(back)))
            # A claim of another topic does not wait for all of these.
            if len(seen) == 3:
                cluster.claim(node, name=TopicName(namespace="default", topic="other"))

    cluster.metadata.before = look
    node.renew()
    assert seen[:3] == [(0, 0), (0, 0), (40, 40)]
    assert back == topics


@pytest.mark.parametrize("at", [0, 39, 40, 99])
def test_topic_claimed_by_another_node_does_not_affect_the_others(cluster, at):
    node = join(cluster, Directory("here"))
    topics = claim_all(cluster, node, 100)
    cluster.clock.advance(TTL_SECONDS + 1)
    taken = cluster.claim("b", name=names(100)[at], take_over=True)
    node.renew()
    assert [topic.is_fenced for topic in topics] == [n == at for n in range(100)]
    assert [topic.is_leased for topic in topics] == [n != at for n in range(100)]
    taken.check()


def test_interrupted_reclaim_continues_with_the_next_renewal(cluster):
    node = join(cluster, Directory("here"))
    topics = claim_all(cluster, node, 120)
    cluster.clock.advance(TTL_SECONDS + 1)
    cluster.metadata.before = failing("transact", at=3, times=1)
    with pytest.raises(UnavailableError):
        node.renew()
    assert [topic.is_leased for topic in topics].count(True) == 40
    asked = kinds_of(cluster)
    node.renew()
    assert asked.count("transact") == 2
    assert node.is_valid
    assert all(topic.is_leased for topic in topics)


def test_batch_whose_answer_was_lost_is_done_again_one_by_one(cluster):
    node = join(cluster, Directory("here"))
    topics = claim_all(cluster, node, 40)
    cluster.clock.advance(TTL_SECONDS + 1)
    cluster.metadata.after = failing("transact", at=2, times=1, error=CommitUnknownError)
    node.renew()
    assert all(topic.is_leased for topic in topics)
    assert owners(cluster) == 40
