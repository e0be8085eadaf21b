"""The list of brokers, and a broker's own entry in it."""

import msgspec
import pytest

from ister.bucket.members import Load, MemberState
from ister.errors import FencedError, UnavailableError
from tests.support.cluster import TTL, a_member


def entry_key(broker):
    return f"/danube/cluster/brokers/{broker.node}"


def test_a_proxied_broker_says_so():
    assert not a_member("a").is_proxied
    assert a_member("a", connect_url="http://proxy:1").is_proxied


def test_brokers_know_of_each_other_until_they_leave_or_their_lease_ends(site):
    a, b, c = site.start("a"), site.start("b"), site.start("c")
    assert {one.node for one in a.cluster.brokers()} == {a.node, b.node, c.node}
    c.log.stores.membership.lease.revoke()
    site.expire_lists()
    assert b.cluster.own in a.cluster.brokers()
    assert a.cluster.others() == [b.cluster.own]
    for _ in range(2):
        b.cluster.leave()
    assert a.cluster.brokers() == [a.cluster.own]


def test_an_entry_that_was_lost_is_put_back(site):
    a, b = site.start("a"), site.start("b")
    site.metadata.delete(entry_key(b))
    assert a.cluster.brokers() == [a.cluster.own]
    b.publish()
    assert len(a.cluster.brokers()) == 2


def test_publishing_again_writes_only_what_has_changed(site):
    a = site.start("a")
    before = site.metadata.get(entry_key(a)).revision
    a.publish()
    assert site.metadata.get(entry_key(a)).revision == before
    a.publish(MemberState.DRAINING)
    assert site.metadata.get(entry_key(a)).revision > before


def test_a_load_is_written_now_and_then(site):
    """Every entry that changes wakes all brokers, which publish theirs."""
    a = site.start("a")
    a.publish(load=Load(topics=1))
    first = site.metadata.get(entry_key(a)).revision
    a.publish(load=Load(topics=2))
    assert site.metadata.get(entry_key(a)).revision == first
    assert a.cluster.own.load.topics == 1
    site.clock.advance(5)
    a.publish(load=Load(topics=3))
    assert b'"topics":3' in site.metadata.get(entry_key(a)).value
    # With a new state at once.
    a.publish(MemberState.DRAINING, load=Load(topics=4))
    assert b'"topics":4' in site.metadata.get(entry_key(a)).value


def test_an_entry_that_was_written_with_an_earlier_lease_is_written_again(site):
    a, b = site.start("a"), site.start("b")
    membership = a.log.stores.membership
    earlier = membership.lease
    # The node's key is lost, so that the process joins again, with a lease of its own.
    site.metadata.delete(f"/danube/cluster/nodes/{a.node}/process")
    membership.renew()
    assert membership.lease is not earlier
    a.publish()
    earlier.revoke()
    assert a.node in {one.node for one in b.cluster.brokers()}


def test_a_replaced_broker_leaves_the_entry_of_its_copy_alone(site):
    b = site.start("b")
    site.replace_process(b)
    other = site.metadata.get(entry_key(b)).value.replace(b"http", b"https")
    site.metadata.put(entry_key(b), other)
    b.publish()
    b.cluster.leave()
    assert site.metadata.get(entry_key(b)).value == other


def test_a_replaced_broker_lists_the_process_that_replaced_it(site):
    b = site.start("b")
    site.replace_process(b)
    copy = a_member(b.node, broker_url="http://copy:1")
    site.metadata.put(entry_key(b), msgspec.json.encode(copy))
    with pytest.raises(FencedError):
        b.log.stores.membership.renew()
    assert b.cluster.members.is_replaced
    assert b.cluster.brokers() == [copy]


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b"{}", b'{"node": "x"}', b"7"], ids=repr)
def test_an_entry_that_cannot_be_read_is_passed_over(site, value):
    a = site.start("a")
    site.metadata.put("/danube/cluster/brokers/x", value)
    assert a.cluster.brokers() == [a.cluster.own]


def test_the_list_is_cached_for_a_second(site):
    a = site.start("a")
    a.cluster.members.recent()
    with site.counting() as calls:
        a.cluster.members.recent()
        assert not calls
        site.clock.advance(1.0)
        a.cluster.members.recent()
        a.cluster.members.expire()
        a.cluster.members.recent()
    assert calls == {"range": 2}


def test_a_store_that_does_not_answer_does_not_end_the_broker(site, caplog):
    a = site.start("a")

    def refuse(kind, key):
        raise UnavailableError("gone")

    site.metadata.before = refuse
    a.publish()
    a.cluster.members.leave()
    assert [record.message for record in caplog.records] == [
        "broker entry not written; other brokers do not see this one",
        "broker entry not removed; it is listed until its lease expires",
    ]


def test_two_brokers_with_one_address_are_reported_once(site, caplog):
    a, b = site.start("a"), site.start("b")
    entry = a_member(b.node, broker_url=a.cluster.own.broker_url)
    b.cluster.members.own = entry
    b.publish()

    def warnings():
        return [one for one in caplog.records if "advertises" in one.message]

    a.cluster.brokers()
    # Not yet: the entry may be that of a broker whose disk was lost, until its lease ends.
    assert not warnings()
    site.pass_time(2 * TTL + 1)
    for _ in range(3):
        a.cluster.brokers()
    assert [one.node for one in warnings()] == [b.node]
    b.cluster.members.own = a_member(b.node)
    b.publish()
    a.cluster.brokers()
    b.cluster.members.own = entry
    b.publish()
    a.cluster.brokers()
    site.pass_time(2 * TTL + 1)
    a.cluster.brokers()
    assert len(warnings()) == 2
