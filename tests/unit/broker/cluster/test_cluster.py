"""Where a topic is or should be; owner keys of topics without a log; what assignments want."""

from collections import Counter

import msgspec
import pytest

from ister.base.model import TopicName
from ister.broker.cluster.cluster import Cluster
from ister.broker.cluster.placement import rendezvous
from ister.bucket.members import MemberState
from ister.config import ClusterConfig
from ister.errors import FencedError, NotFoundError, UnavailableError
from tests.support.clock import ManualClock
from tests.support.cluster import TTL, a_member
from tests.support.waiting import eventually

NAME = TopicName.parse("/ns/t")
OWNER = "/danube/cluster/owners/ns/t"


@pytest.fixture
def pair(site):
    a, b = site.start("a"), site.start("b")
    a.round()
    return a, b


# -- owners ---------------------------------------------------------------------------------


def test_owners_of_few_topics_and_of_many(pair):
    a, b = pair
    a.create("/ns/t")
    b.create("/ns/u")
    few = ["/ns/t", "/ns/u", "/ns/none"]
    for topics in (few, few + [f"/ns/{number}" for number in range(50)]):
        found = b.cluster.find_owners(topics)
        assert {topic: one.node for topic, one in found.items()} == {
            "/ns/t": a.node,
            "/ns/u": b.node,
        }


def test_a_lease_is_in_doubt_when_it_was_not_renewed_and_there_are_others(site, pair):
    a, _ = pair
    a.cluster.brokers()
    assert a.cluster.is_leased
    assert not a.cluster.is_in_doubt
    site.clock.advance(TTL * 2 / 3)
    assert a.cluster.is_leased
    assert a.cluster.is_in_doubt
    site.clock.advance(TTL / 2)
    assert not a.cluster.is_leased
    a.log.stores.membership.renew()
    assert not a.cluster.is_in_doubt


def test_the_owner_is_the_broker_that_has_the_topic_open(pair):
    a, b = pair
    assert a.cluster.owner(NAME) is None
    a.create("/ns/t")
    b.create("/ns/t2")
    assert a.cluster.owner(NAME) is None
    assert b.cluster.owner(NAME) == a.cluster.own
    assert b.cluster.owner_node(NAME) == a.node
    # Names are compared whole.
    assert a.cluster.owner(TopicName.parse("/ns/t2")) == b.cluster.own
    assert b.cluster.owner(TopicName.parse("/ns/t3")) is None
    assert a.cluster.count_topics() == {a.node: 1, b.node: 1}


def test_a_topic_in_a_process_that_is_no_broker_cannot_be_asked_for(site):
    a = site.start("a")
    log = site.open("b")
    log.topic("/ns/t", create=True)
    with pytest.raises(UnavailableError, match="not a broker"):
        a.cluster.owner(NAME)
    with pytest.raises(UnavailableError, match="not a broker"):
        a.route("/ns/t")


def test_a_replaced_broker_sends_clients_to_the_process_that_replaced_it(site, pair):
    """The copy has the same node, so that the owner's key alone does not tell them apart."""
    _, b = pair
    b.create("/ns/t")
    site.replace_process(b)
    copy = a_member(b.node, broker_url="http://copy:1")
    key = f"/danube/cluster/brokers/{b.node}"
    site.metadata.put(key, msgspec.json.encode(copy))
    with pytest.raises(FencedError):
        b.log.stores.membership.renew()
    assert b.cluster.owner(NAME) == copy
    assert b.cluster.route(NAME, is_unlogged=lambda: False) == copy
    site.metadata.delete(key)
    b.cluster.members.expire()
    with pytest.raises(UnavailableError, match="not a broker"):
        b.cluster.owner(NAME)


# -- routes ---------------------------------------------------------------------------------


def test_a_broker_without_a_bucket_is_the_answer():
    own = a_member("local")
    cluster = Cluster(own, None, config=ClusterConfig(), clock=ManualClock())
    assert cluster.route(NAME, is_unlogged=lambda: False) == own
    assert cluster.owner(NAME) is None
    assert cluster.owner_node(NAME) is None
    assert cluster.owners() == {}
    assert cluster.own_topics() is None
    assert cluster.assignment_changes().opens == ()
    assert cluster.watch(print) is None
    assert not cluster.lead(has_changed=True)
    cluster.claim_unlogged(NAME)
    cluster.release_unlogged(NAME)
    assert cluster.renew_unlogged() == []
    cluster.assign("/ns/t", "x", "moved")
    cluster.forget("/ns/t")
    cluster.drain()
    cluster.leave()


def test_a_broker_alone_is_the_answer_and_reads_one_key(site):
    a = site.start("a")
    a.cluster.members.recent()
    with site.counting() as calls:
        assert a.route("/ns/t") == a.node
        assert a.route("/ns/t", creates=True) == a.node
    assert calls == {"get": 2}
    assert a.cluster.own_topics() is None  # all of them


def test_a_topic_is_at_its_owner_then_at_its_last_owner_then_where_it_is_assigned(site, pair):
    """The last owner's disk has the newest messages, until the topic is sealed."""
    a, b = pair

    def routed():
        a.cluster.members.recent()
        with site.counting() as calls:
            node = a.route("/ns/t")
        assert b.route("/ns/t") == node
        return node, calls["get"]

    b.create("/ns/t")
    a.cluster.assign("/ns/t", a.node, "moved")
    assert routed() == (b.node, 1)
    b.log.topic("/ns/t").close()
    site.metadata.delete(OWNER)
    # Owner, record, seal.
    assert routed() == (b.node, 3)
    b.log.seal("/ns/t")
    # And assignment.
    assert routed() == (a.node, 4)


@pytest.mark.parametrize("why", ["last owner", "assigned"])
def test_a_broker_that_starts_has_to_be_waited_for(site, pair, why):
    a, b = pair
    if why == "assigned":
        a.cluster.assign("/ns/t", b.node, "new")
    else:
        b.create("/ns/t")
        b.log.topic("/ns/t").close()
        site.metadata.delete(OWNER)
    b.publish(MemberState.STARTING)
    site.expire_lists()
    with pytest.raises(UnavailableError, match="starting"):
        a.route("/ns/t")
    # It opens the topic itself.
    assert b.route("/ns/t") == b.node


@pytest.mark.parametrize("asked", [0, 1], ids=["leader", "other"])
def test_a_topic_that_does_not_exist_is_not_assigned(site, pair, asked):
    pair[1].create("/ns/deleted")
    pair[1].log.delete("/ns/deleted")
    for topic in ("/ns/t", "/ns/deleted"):
        with pytest.raises(NotFoundError):
            pair[asked].route(topic)
    assert site.assignments() == {}


def test_the_leader_assigns_new_topics_at_once_and_spreads_them(site, pair):
    a, b = pair
    found = {f"/ns/t{number}": a.route(f"/ns/t{number}", creates=True) for number in range(10)}
    assert site.assignments() == found
    assert Counter(found.values()) == {a.node: 5, b.node: 5}
    assert {topic: b.route(topic) for topic in found} == found
    for topic in found:
        a.cluster.forget(topic)
    assert site.assignments() == {}


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_look_up_gives_up_when_no_leader_answers(site, pair, is_lost):
    a, b = pair
    before = site.clock.monotonic()
    if is_lost:
        site.lose_answer("put", "/danube/cluster/unassigned/ns/t")
    with pytest.raises(UnavailableError, match="look it up again"):
        b.route("/ns/t", creates=True)
    assert 1.5 <= site.clock.monotonic() - before < 2
    # What it asked for is answered later.
    assert b.cluster.assignments.requests() == ["/ns/t"]
    a.round()
    assert b.route("/ns/t") in (a.node, b.node)


@pytest.mark.parametrize("state", [None, MemberState.DRAINING], ids=["gone", "draining"])
def test_an_assignment_to_a_broker_that_takes_none_is_no_answer(site, pair, state):
    """Else clients would be sent to it again and again."""
    a, b = pair
    c = site.start("c")
    a.cluster.assign("/ns/t", c.node, "new")
    if state is None:
        site.crash("c")
    else:
        c.publish(state)
        site.expire_lists()
    with pytest.raises(UnavailableError, match="look it up again"):
        b.route("/ns/t", is_unlogged=True)
    a.round()
    assert b.route("/ns/t", is_unlogged=True) in (a.node, b.node)
    assert a.route("/ns/t", is_unlogged=True) == site.assignments()["/ns/t"]


def test_without_a_leader_for_long_every_broker_picks_the_same(site):
    brokers = [site.start(name, state=MemberState.STARTING) for name in "abc"]
    for broker in brokers:
        broker.cluster.leadership.step(may_lead=False)
    for broker in brokers[:2]:
        broker.publish(MemberState.ACTIVE)
    site.pass_time(2 * TTL - 1)
    for broker in brokers:
        broker.cluster.leadership.step(may_lead=False)
    with pytest.raises(UnavailableError, match="look it up again"):
        brokers[0].route("/ns/t", creates=True)
    site.pass_time(1)
    for broker in brokers:
        broker.cluster.leadership.step(may_lead=False)
    active = [broker.node for broker in brokers[:2]]
    for number in range(20):
        topic = f"/ns/t{number}"
        found = {broker.route(topic, creates=True) for broker in brokers}
        assert found == {rendezvous(topic, active)}
    assert site.assignments() == {}


def test_without_a_leader_and_active_brokers_the_one_that_is_asked_takes_it(site):
    a, b = (site.start(name, state=MemberState.DRAINING) for name in "ab")
    for broker in (a, b):
        broker.cluster.leadership.step(may_lead=False)
    site.pass_time(2 * TTL)
    for broker in (a, b):
        broker.cluster.leadership.step(may_lead=False)
        assert broker.route("/ns/t", creates=True) == broker.node


# -- assignment changes ----------------------------------------------------------------------


@pytest.mark.parametrize("topics", [None, ["/ns/t"]], ids=["all", "one"])
def test_wishes(pair, site, topics):
    a, b = pair

    def changes_of(broker):
        found = broker.cluster.assignment_changes(topics)
        return found.opens, found.leaves

    assert changes_of(a) == changes_of(b) == ((), {})
    a.cluster.assign("/ns/t", b.node, "new")
    assert changes_of(a) == ((), {})
    assert changes_of(b) == (("/ns/t",), {})
    a.create("/ns/t")
    assert changes_of(a) == ((), {"/ns/t": b.node})
    assert changes_of(b) == ((), {})
    a.cluster.assign("/ns/t", a.node, "moved")
    assert changes_of(a) == changes_of(b) == ((), {})
    # Not to a broker that takes none.
    a.cluster.assign("/ns/t", b.node, "moved")
    b.publish(MemberState.DRAINING)
    site.expire_lists()
    assert changes_of(a) == ((), {})
    a.cluster.assign("/ns/t", "gone", "moved")
    assert changes_of(a) == ((), {})


def test_a_broker_that_drains_opens_nothing_and_nobody_what_is_no_name(pair):
    a, b = pair
    a.cluster.assign("/ns/t", b.node, "new")
    b.publish(MemberState.DRAINING)
    assert b.cluster.assignment_changes().opens == ()
    b.publish(MemberState.STARTING)
    assert b.cluster.assignment_changes().opens == ("/ns/t",)
    a.cluster.assign("/not a name", b.node, "new")
    assert b.cluster.assignment_changes(["/not a name"]).opens == ()


def test_wishes_read_as_often_however_many_topics_there_are(site, pair):
    a, b = pair
    found = []
    for count in (10, 60):
        for number in range(count):
            b.cluster.assign(f"/ns/t{number}", a.node, "new")
        a.cluster.members.recent()
        with site.counting() as calls:
            assert len(a.cluster.assignment_changes().opens) == count
            a.cluster.assignment_changes([f"/ns/t{number}" for number in range(21)])
        found.append(calls)
    # The owners and the assignments of all topics; so, too, for many changes.
    assert found == [{"range": 4}, {"range": 4}]


def test_what_a_broker_opens_when_it_starts(site, pair):
    a, b = pair
    for topic in ("/ns/mine", "/ns/moved", "/ns/sealed"):
        b.create(topic)
    b.log.seal("/ns/sealed")
    a.create("/ns/theirs")
    a.cluster.assign("/ns/assigned", b.node, "new")
    site.crash("b")
    again = site.start("b", state=MemberState.STARTING)
    assert again.node == b.node
    found = again.cluster.own_topics()
    assert found == ["/ns/assigned", "/ns/mine", "/ns/moved", "/ns/sealed"]
    a.log.topic("/ns/sealed")
    assert "/ns/sealed" not in again.cluster.own_topics()


def test_a_draining_broker_chooses_among_the_others(site, pair):
    a, b = pair
    assert a.cluster.placement().choose("/ns/t") == b.node
    b.publish(MemberState.DRAINING)
    assert a.cluster.placement().choose("/ns/t") is None


def test_changes_are_reported(site, pair):
    a, b = pair
    found = []
    watch = a.cluster.watch(found.append)
    b.create("/ns/other")
    a.cluster.assign("/ns/t", b.node, "new")
    b.publish(MemberState.DRAINING)
    eventually(lambda: f"brokers/{b.node}" in found, "the changes")
    watch.close()
    # Owner keys and processes are not among them.
    assert set(found) == {"assignments/ns/t", f"brokers/{b.node}"}


# -- topics without a log -------------------------------------------------------------------


def test_an_owner_key_ends_with_the_lease_and_is_restored(site, pair):
    a, b = pair
    a.cluster.claim_unlogged(NAME)
    assert a.cluster.renew_unlogged() == []
    site.end_lease(a)
    assert b.cluster.owner_node(NAME) is None
    with pytest.raises(UnavailableError):
        a.cluster.claim_unlogged(TopicName.parse("/ns/u"))
    assert b.cluster.owner_node(TopicName.parse("/ns/u")) is None
    a.log.stores.membership.renew()
    assert a.cluster.renew_unlogged() == []
    assert b.cluster.owner_node(NAME) == a.node
    with site.counting() as calls:
        assert a.cluster.renew_unlogged() == []
    assert not calls


def test_a_lost_answer_to_a_claim_is_resolved(site, pair):
    a, b = pair
    site.lose_answer("transact", OWNER)
    a.cluster.claim_unlogged(NAME)
    assert b.cluster.owner_node(NAME) == a.node


def test_a_claim_that_may_land_late_is_not_lost_to_another(site, pair):
    a, b = pair
    site.metadata.delay_next_change()
    with pytest.raises(UnavailableError, match="lost"):
        a.cluster.claim_unlogged(NAME)
    site.metadata.deliver_delayed()
    assert b.cluster.owner_node(NAME) == a.node
    a.cluster.claim_unlogged(NAME)
    # Nor is a topic that this broker has.
    site.end_lease(a)
    a.log.stores.membership.renew()
    site.metadata.delay_next_change()
    with pytest.raises(UnavailableError, match="lost"):
        a.cluster.renew_unlogged()
    assert a.cluster.renew_unlogged() == []
    assert b.cluster.owner_node(NAME) == a.node


def test_a_replaced_process_loses_its_topics_and_leaves_the_keys_of_its_copy(site, pair):
    a, _ = pair
    a.cluster.claim_unlogged(NAME)
    other = TopicName.parse("/ns/u")
    a.cluster.claim_unlogged(other)
    site.replace_process(a)
    key = site.metadata.get(OWNER)
    with pytest.raises(FencedError):
        a.log.stores.membership.renew()
    # The copy has them, under its own lease.
    site.metadata.put(OWNER, key.value)
    a.cluster.release_unlogged(NAME)
    assert site.metadata.get(OWNER).value == key.value
    assert a.cluster.renew_unlogged() == ["/ns/u"]
