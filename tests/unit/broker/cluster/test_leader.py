"""Election, and what the leader does: requests, sweeps, balance."""

from collections import Counter

import pytest

from ister.broker.cluster.assignments import NEW, OWNER_DOWN, Assignment
from ister.bucket.members import MemberState
from ister.config import RebalanceConfig
from ister.errors import UnavailableError
from tests.support.cluster import TTL

KEY = "/danube/cluster/leader"


def names(count):
    return [f"/ns/t{number}" for number in range(count)]


def wish(site, topic, node, reason="moved"):
    site.brokers[min(site.brokers)].cluster.assign(topic, node, reason)


def sealed(broker, *topics):
    """Topics that a broker has created and handed over."""
    for topic in topics:
        broker.create(topic)
        broker.log.seal(topic)


# -- election -------------------------------------------------------------------------------


def test_the_first_that_looks_leads_until_its_lease_ends(site):
    a, b = site.start("a"), site.start("b")
    assert a.round()
    assert not b.round()
    assert b.cluster.leadership.node == a.node
    assert [one.cluster.leadership.is_leader for one in (a, b)] == [True, False]
    site.crash("a")
    assert b.round()
    assert b.cluster.leadership.node == b.node


def test_only_an_active_broker_takes_the_key(site):
    a = site.start("a", state=MemberState.STARTING)
    assert not a.round()
    assert site.metadata.get(KEY) is None
    a.publish(MemberState.ACTIVE)
    site.lose_answer("transact", KEY)  # it is read back
    assert a.round()


def test_an_answer_that_lands_late_makes_the_same_process_leader(site):
    a, b = site.start("a"), site.start("b")
    site.metadata.delay_next_change()
    assert not a.cluster.leadership.step(may_lead=True)
    site.clock.advance(1)
    site.metadata.deliver_delayed()
    assert not b.round()
    assert a.round()


def test_two_processes_of_one_node_are_two_leaders(site):
    """A process that was killed leaves its key, which the next one does not take for its own."""
    a = site.start("a")
    a.round()
    site.kill(a.log)
    again = site.start("a")
    assert again.node == a.node
    assert not again.round()
    site.pass_time(TTL + 1)
    assert again.round()


def test_a_leader_that_resigns_is_followed(site):
    a, b = site.start("a"), site.start("b")
    a.round()
    a.cluster.leadership.resign()
    assert not a.cluster.leadership.is_leader
    assert b.round()
    # Only its own key is removed.
    a.cluster.leadership.is_leader = True
    a.cluster.leadership.resign()
    assert not a.round()


def test_a_value_that_cannot_be_read_is_somebody_else(site):
    a = site.start("a")
    site.metadata.put(KEY, b"\xff")
    assert not a.round()
    assert a.cluster.leadership.node is None
    assert a.cluster.leadership.absent_seconds() == 0


def test_how_long_there_has_been_no_leader_counts_up_to_the_last_look(site):
    a = site.start("a", state=MemberState.DRAINING)
    leadership = a.cluster.leadership
    assert leadership.absent_seconds() == 0
    leadership.step(may_lead=False)
    site.clock.advance(10)
    # Nobody has looked since: there may be a leader.
    assert leadership.absent_seconds() == 0
    leadership.step(may_lead=False)
    assert leadership.absent_seconds() == 10
    site.metadata.put(KEY, b"{}")
    leadership.step(may_lead=False)
    assert leadership.absent_seconds() == 0


def test_a_store_that_does_not_answer_is_reported(site):
    a = site.start("a")

    def refuse(kind, key):
        raise UnavailableError("gone")

    site.metadata.before = refuse
    with pytest.raises(UnavailableError):
        a.cluster.lead(has_changed=True)


# -- requests -------------------------------------------------------------------------------


def ask(broker, *topics):
    cluster = broker.cluster
    lease = broker.log.stores.membership.lease
    for topic in topics:
        cluster.assignments.request(topic, node=broker.node, lease=lease)


@pytest.mark.parametrize("count", [1, 9])
def test_requests_are_answered_evenly(site, count):
    a, b, c = (site.start(name) for name in "abc")
    a.round()
    ask(b, *names(count))
    a.round()
    counts = Counter(site.assignments().values())
    assert counts.total() == count
    assert max(counts.values()) - min(counts[one.node] for one in (a, b, c)) <= 1
    assert a.cluster.assignments.requests() == []
    assert {known.reason for known, _ in a.cluster.assignments.all().values()} == {NEW}


def test_a_request_is_kept_while_no_broker_takes_topics(site):
    a, b = site.start("a"), site.start("b", state=MemberState.DRAINING)
    a.round()
    a.publish(MemberState.DRAINING)
    ask(b, "/ns/t")
    a.round()
    assert not a.cluster.leadership.is_leader  # a broker that is drained does not lead
    assert b.cluster.assignments.requests() == ["/ns/t"]
    a.publish(MemberState.ACTIVE)
    a.round()
    assert site.assignments() == {"/ns/t": a.node}


def test_assignments_that_happen_meanwhile_are_not_overwritten(site):
    a, b = site.start("a"), site.start("b")
    a.round()
    key = "/danube/cluster/assignments/ns/t"
    site.before_next("transact", key, lambda: wish(site, "/ns/t", b.node))
    with pytest.raises(UnavailableError, match="retry"):
        a.cluster.leader.assign("/ns/t")
    assert site.assignments() == {"/ns/t": b.node}


# -- sweeps ---------------------------------------------------------------------------------


def test_the_topics_of_a_dead_broker_go_to_the_others_evenly(site):
    a, b, c, d = (site.start(name) for name in "abcd")
    for topic in names(30):
        d.create(topic)
    for number in range(6):  # what brokers have counts
        a.create(f"/ns/a{number}")
    a.round(has_changed=True)
    assert site.assignments() == {}
    site.crash("d")
    a.round(has_changed=True)
    assert Counter(site.assignments().values()) == {a.node: 6, b.node: 12, c.node: 12}
    assert {known.reason for known, _ in a.cluster.assignments.all().values()} == {OWNER_DOWN}


@pytest.mark.parametrize("key", ["ns/a b", "ns/t/more", "ns", "ns/unreadable"])
def test_a_record_that_is_no_topics_holds_up_nobody(site, key):
    a, b = site.start("a"), site.start("b")
    sealed(b, "/ns/t")
    found = site.metadata.get("/danube/topics/ns/t").value
    site.metadata.put(f"/danube/topics/{key}", b"?" if key == "ns/unreadable" else found)
    site.crash("b")
    a.round(has_changed=True)
    site.start("c")
    a.round(has_changed=True)
    assert set(site.assignments()) == {"/ns/t"}


@pytest.mark.parametrize("is_open", [True, False])
def test_a_topic_whose_last_owner_is_up_goes_back_to_it(site, is_open):
    """The broker that it was to move to is gone."""
    a, b, c = (site.start(name) for name in "abc")
    b.create("/ns/t")
    wish(site, "/ns/t", c.node)
    a.round(has_changed=True)
    assert site.assignments() == {"/ns/t": c.node}
    site.crash("c")
    if not is_open:
        b.log.topic("/ns/t").close()
        site.metadata.delete("/danube/cluster/owners/ns/t")
    a.round(has_changed=True)
    assert site.assignments() == {"/ns/t": b.node}


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_topic_of_a_move_that_failed_goes_back_to_its_last_owner(site, is_sealed):
    """Nobody else can open it before it is sealed."""
    a, b = site.start("a"), site.start("b")
    b.create("/ns/t")
    if is_sealed:
        b.log.seal("/ns/t")
    wish(site, "/ns/t", a.node)
    site.crash("b")
    back = site.start("b")
    a.round(has_changed=True)
    assert site.assignments() == {"/ns/t": a.node if is_sealed else back.node}


def test_a_broker_that_slept_keeps_its_topics(site):
    """Else every pause longer than the lease would empty a broker."""
    a, b, c = (site.start(name) for name in "abc")
    b.create("/ns/t")
    site.end_lease(b)
    a.round(has_changed=True)
    assert site.assignments()["/ns/t"] in (a.node, c.node)
    b.log.stores.membership.renew()
    b.publish()
    assert b.cluster.assignment_changes().leaves == {}
    a.round(has_changed=True)
    assert site.assignments() == {"/ns/t": b.node}


@pytest.mark.parametrize("state", [MemberState.STARTING, MemberState.DRAINING])
def test_an_assignment_stands_unless_its_broker_drains(site, state):
    a, b = site.start("a"), site.start("b")
    sealed(a, "/ns/t")
    wish(site, "/ns/t", b.node)
    b.publish(state)
    a.round(has_changed=True)
    assert site.assignments() == {"/ns/t": b.node if state is MemberState.STARTING else a.node}


def test_a_topic_that_is_being_handed_over_is_left_to_its_broker(site):
    a, b = site.start("a"), site.start("b")
    b.create("/ns/t")
    b.publish(MemberState.DRAINING)
    b.log.topic("/ns/t").close()
    site.metadata.delete("/danube/cluster/owners/ns/t")
    a.round(has_changed=True)
    assert site.assignments() == {}


def test_assignments_of_deleted_topics_are_removed_after_a_while(site):
    a, b = site.start("a"), site.start("b")
    sealed(b, "/ns/kept")
    b.create("/ns/deleted")
    for topic in ("/ns/kept", "/ns/deleted", "/ns/never"):
        wish(site, topic, b.node)
    b.log.delete("/ns/deleted")
    a.round(has_changed=True)
    assert len(site.assignments()) == 3
    site.pass_time(61)
    a.round(has_changed=True)
    assert site.assignments() == {"/ns/kept": b.node}


def test_an_assignment_that_is_used_meanwhile_is_not_removed(site):
    a, b = site.start("a"), site.start("b")
    wish(site, "/ns/t", b.node)
    site.pass_time(61)
    key = "/danube/cluster/assignments/ns/t"
    site.before_next("transact", key, lambda: wish(site, "/ns/t", b.node))
    a.cluster.lead(has_changed=True)
    assert site.assignments() == {"/ns/t": b.node}


def test_a_sweep_reads_as_often_however_many_topics_there_are(site):
    a, b = site.start("a"), site.start("b")
    a.round()
    found = []
    for count in (10, 60):
        for topic in names(count):
            b.create(topic)
            wish(site, topic, b.node)
        with site.counting() as calls:
            a.cluster.leader.sweep()
        found.append(calls)
    # The members, and the records, owners and assignments of all topics.
    assert found == [{"range": 4}, {"range": 4}]


def test_a_new_leader_looks_at_all_topics(site):
    a, b, c = (site.start(name) for name in "abc")
    a.round()
    c.create("/ns/t")
    site.crash("c")
    site.crash("a")
    assert b.round(has_changed=False)
    assert site.assignments() == {}  # it is alone, and needs none
    site.start("d")
    b.cluster.leadership.resign()
    assert b.round(has_changed=False)
    assert set(site.assignments()) == {"/ns/t"}


# -- balance --------------------------------------------------------------------------------


@pytest.fixture
def uneven(site, request):
    """Two brokers, of which one has all topics."""
    settings = {"enabled": True, "interval_seconds": 60, "cooldown_seconds": 600, "max_moves": 2}
    settings |= getattr(request, "param", {})
    a, b = site.start("a", **settings), site.start("b", **settings)
    a.round()
    for topic in names(10):
        a.create(topic)
    return a, b


def hand_over(site, a, b):
    """The moves that were asked for happen."""
    moved = a.cluster.assignment_changes().leaves
    for topic in moved:
        a.log.seal(topic)
        b.log.topic(topic)
    return moved


@pytest.mark.parametrize("uneven", [{"enabled": RebalanceConfig().enabled}], indirect=True)
def test_it_is_off_by_default(site, uneven):
    site.pass_time(3600)
    uneven[0].round(has_changed=True)
    assert site.assignments() == {}


def test_topics_move_a_few_at_a_time(site, uneven):
    a, b = uneven
    site.pass_time(59)
    a.round()
    assert site.assignments() == {}
    site.pass_time(1)
    a.round()
    assert len(site.assignments()) == 2
    assert set(site.assignments().values()) == {b.node}
    # While these move, no others do.
    site.pass_time(60)
    a.round()
    assert len(site.assignments()) == 2
    assert len(hand_over(site, a, b)) == 2
    site.pass_time(60)
    a.round()
    assert len(site.assignments()) == 4
    assert [move.target for _, move in a.cluster.leader.moves] == [b.node] * 4


def test_a_topic_that_moved_lately_stays_even_with_another_leader(site, uneven):
    a, b = uneven
    site.pass_time(60)
    a.round()
    moved = hand_over(site, a, b)
    # All others move to the first broker, and the second one leads.
    a.cluster.leadership.resign()
    assert b.round()
    for number in range(8):
        b.create(f"/ns/b{number}")
    for topic in sorted(set(names(10)) - set(moved)):
        a.log.seal(topic)
        b.log.topic(topic)

    def planned(**how):
        return {move.topic for move in b.cluster.leader.plan(100, **how)}

    assert planned(has_cooldown=True)
    assert not planned(has_cooldown=True) & set(moved)
    assert planned() & set(moved), "an operator's rebalance waits for nothing"
    site.pass_time(601)
    assert planned(has_cooldown=True) & set(moved)


def test_a_move_that_cannot_happen_does_not_stop_the_others(site, uneven):
    """An assignment to a broker that is gone is no move under way."""
    a, _ = uneven
    for topic in names(2):
        wish(site, topic, "gone", reason="new")
    before = site.metadata.revision
    assert len(a.cluster.leader.plan(2)) == 2
    assert site.metadata.revision == before


def test_a_wish_since_the_plan_wins(site, uneven):
    a, b = uneven
    plan = a.cluster.leader.plan(2)
    site.start("c")
    wish(site, plan[0].topic, "c")
    assert a.cluster.leader.move(plan) == plan[1:]
    assert site.assignments() == {plan[0].topic: "c", plan[1].topic: b.node}


def test_an_owner_that_cannot_be_read_is_passed_over(site):
    a = site.start("a")
    site.metadata.put("/danube/cluster/owners/ns/t", b"\xff")
    assert a.cluster.owners() == {}
    assert a.cluster.leader._owner("/ns/t") == {}


def test_a_stand_in_is_told_from_a_move():
    assert Assignment(node="a", reason=OWNER_DOWN, at=0).is_stand_in
    assert not Assignment(node="a", reason="moved", at=0).is_stand_in
