"""How a broker is chosen: pure functions."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ister.base.limits import MIB
from ister.broker.cluster.placement import Placement, measure, plan_moves, rendezvous, score
from ister.bucket.members import Load, MemberState
from ister.config import Strategy
from tests.support.cases import each
from tests.support.cluster import a_member

NODES = st.lists(st.text("abcdef0123", min_size=1, max_size=6), min_size=1, max_size=8, unique=True)
TOPICS = st.lists(st.integers(0, 10_000).map("/ns/{}".format), min_size=1, max_size=80, unique=True)


@given(TOPICS, NODES, st.data())
def test_rendezvous_is_stable_when_another_node_goes(topics, nodes, data):
    gone = data.draw(st.sampled_from(nodes))
    left = [node for node in nodes if node != gone]
    for topic in topics:
        picked = rendezvous(topic, nodes)
        assert picked == rendezvous(topic, reversed(nodes))
        if left and picked != gone:
            assert rendezvous(topic, left) == picked


def test_rendezvous_spreads():
    nodes = [f"node-{number}" for number in range(4)]
    counts = Counter(rendezvous(f"/ns/t{number}", nodes) for number in range(4000))
    assert all(900 < counts[node] < 1100 for node in nodes)


@given(TOPICS, NODES, st.lists(st.integers(0, 40), min_size=8, max_size=8))
def test_fair_fills_the_emptiest_first(topics, nodes, numbers):
    counts = dict(zip(nodes, numbers, strict=False))
    placement = Placement([a_member(node) for node in nodes], counts, Strategy.FAIR)
    for topic in topics:
        chosen = placement.choose(topic)
        emptiest = [node for node in nodes if counts[node] == min(counts.values())]
        assert chosen == rendezvous(topic, emptiest)
        counts[chosen] += 1


@each("strategy", list(Strategy))
def test_no_topic_is_placed_on_a_full_disk(strategy):
    members = [a_member("full", load=Load(is_disk_low=True)), a_member("roomy")]
    placement = Placement(members, {"roomy": 100}, strategy)
    assert {placement.choose(f"/ns/t{number}") for number in range(20)} == {"roomy"}
    assert Placement(members[:1], {}, strategy).choose("/ns/t") is None


def test_balanced_prefers_the_idle_broker():
    members = [
        a_member("busy", load=Load(topics=1, bytes_in=50 * MIB)),
        a_member("idle", load=Load(topics=200)),
    ]
    counts = {"busy": 1, "idle": 200}
    assert Placement(members, counts, Strategy.BALANCED).choose("/ns/t") == "idle"
    assert Placement(members, counts, Strategy.FAIR).choose("/ns/t") == "busy"


def test_a_choice_counts_for_the_next_with_balanced():
    members = [a_member(node, load=Load(topics=10)) for node in "abc"]
    placement = Placement(members, dict.fromkeys("abc", 10), Strategy.BALANCED)
    counts = Counter(placement.choose(f"/ns/t{number}") for number in range(30))
    assert set(counts.values()) == {10}


def test_only_active_brokers_are_chosen():
    members = [
        a_member("a", state=MemberState.DRAINING),
        a_member("b", state=MemberState.STARTING),
        a_member("c"),
    ]
    placement = Placement(members, {"c": 5}, Strategy.FAIR)
    assert placement.choose("/ns/t") == "c"
    assert placement.choose("/ns/t", exclude={"c"}) is None
    assert Placement([], {}, Strategy.FAIR).choose("/ns/t") is None


def test_a_score_weighs_as_its_documentation_says():
    for load in (
        Load(cpu=1.0),
        Load(bytes_in=4 * MIB, bytes_out=6 * MIB),
        Load(messages_in=10_000),
        Load(upload_lag_bytes=640 * MIB),
        Load(topics=100),
    ):
        assert score(load) == pytest.approx(10)


def owned(**counts):
    return {
        node: [f"/ns/{node}{number}" for number in range(count)] for node, count in counts.items()
    }


def plan(topics, *, threshold=0.3, moves_max=100, keep=(), members=None):
    members = members or [a_member(node) for node in topics]
    return plan_moves(
        members, topics, Strategy.FAIR, threshold=threshold, moves_max=moves_max, keep=keep
    )


def after(topics, moves):
    counts = Counter({node: len(names) for node, names in topics.items()})
    for move in moves:
        assert move.topic in topics[move.source]
        counts[move.source] -= 1
        counts[move.target] += 1
    return counts


def test_nothing_moves_at_the_threshold_or_below():
    assert measure([], {}, Strategy.FAIR).variation == 0
    # Standard deviation 2, mean 8.
    assert plan(owned(a=10, b=6), threshold=0.25) == []
    assert plan(owned(a=10, b=6), threshold=0.24) != []


def test_a_rebalance_goes_on_below_the_threshold():
    """Hysteresis: it must not begin again at once."""
    topics = owned(a=100, b=0)
    moves = plan(topics, threshold=0.5)
    counts = after(topics, moves)
    balance = measure([a_member("a"), a_member("b")], counts, Strategy.FAIR)
    assert balance.variation <= 0.4
    assert len(moves) == 30


def test_at_most_so_many_topics_move():
    assert len(plan(owned(a=100, b=0), moves_max=5)) == 5
    assert plan(owned(a=100, b=0), moves_max=0) == []


def test_topics_that_moved_lately_stay():
    topics = owned(a=4, b=0)
    moves = plan(topics, keep=topics["a"][1:])
    assert [move.topic for move in moves] == topics["a"][:1]


def test_a_single_topic_does_not_swing():
    assert plan(owned(a=1, b=0)) == []
    assert plan(owned(a=2, b=1, c=1), threshold=0.01) == []


def test_a_broker_that_is_draining_neither_gives_nor_takes():
    members = [a_member("a"), a_member("b", state=MemberState.DRAINING)]
    assert plan(owned(a=50, b=0), members=members) == []


@given(st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 30), min_size=1))
def test_a_plan_settles(counts):
    """Each round brings the brokers closer, and after the last one nothing moves."""
    topics = owned(**counts)
    for _ in range(200):
        moves = plan(topics, threshold=0.1, moves_max=3)
        if not moves:
            break
        for move in moves:
            assert len(topics[move.source]) - len(topics[move.target]) >= 2
            topics[move.source].remove(move.topic)
            topics[move.target].append(move.topic)
    found = [len(names) for names in topics.values()]
    balance = measure(
        [a_member(n) for n in topics], {n: len(names) for n, names in topics.items()}, Strategy.FAIR
    )
    assert balance.variation <= 0.1 or max(found) - min(found) <= 1
