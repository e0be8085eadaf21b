"""The demo's proof finds what is planted, and nothing where nothing is."""

from demo.proof import Acknowledged, Received, check_chain
from tests.support.cases import each

CHAIN = [(number, number) for number in range(6)]
FAULTS = ("lost", "misplaced", "doubled", "gaps", "foreign")


def promised(*offsets, total):
    """What the broker has acknowledged, of so many messages."""
    acknowledged = Acknowledged("/default/orders", total)
    for number, offset in enumerate(offsets):
        acknowledged.add(number, offset)
    return acknowledged


@each(
    ("acknowledged", "chain", "found"),
    [
        (promised(*range(6), total=6), CHAIN, {}),
        (promised(*range(6), total=6), CHAIN[:5], {"lost": 1}),
        (promised(*range(6), total=6), [*CHAIN[:3], *CHAIN[4:]], {"lost": 1, "gaps": 1}),
        (promised(*range(6), total=6), [*CHAIN, (6, 3)], {"doubled": 1}),
        (promised(*range(6), total=6), [(0, 0), (1, 2), (2, 1), *CHAIN[3:]], {"misplaced": 2}),
        (promised(*range(6), total=6), [*CHAIN, (6, None)], {"foreign": 1}),
        (promised(*range(6), total=6), [*CHAIN, (6, 99)], {"foreign": 1}),
        (promised(*range(6), total=6), [(1, 0), *CHAIN[1:]], {"gaps": 2, "misplaced": 1}),
        # What was never acknowledged may be there or not.
        (promised(0, total=3), [(0, 0)], {}),
        (promised(0, total=3), [(0, 0), (1, 2)], {}),
        # An offset that nobody was told may be any.
        (promised(None, 0, total=2), [(0, 1), (1, 0)], {}),
        (promised(None, 0, total=2), [(0, 1)], {"lost": 1}),
    ],
)
def test_fault_in_a_chain_is_found(acknowledged, chain, found):
    proof = check_chain(acknowledged, chain)
    assert {name: getattr(proof, name) for name in FAULTS if getattr(proof, name)} == found
    assert (proof.ok, proof.as_json()["ok"]) == (not found, not found)
    assert all(name in proof.say() for name in found)
    assert found or proof.say() == ""


def test_examples_are_few():
    proof = check_chain(promised(*range(1000), total=1000), [])
    assert (proof.lost, len(proof.examples)) == (1000, 5)


@each(
    ("kind", "came", "count", "found"),
    [
        ("exclusive", "0 1 2 3 4", 5, {}),
        ("shared", "0 1 3", 4, {"missing": 1}),
        ("shared", "0 1 3", 9, {"missing": 6}),
        # What comes again is a duplicate and no disorder.
        ("failover", "0 1 2 3 1 2 3 4", 5, {"duplicates": 3}),
        ("exclusive", "0 2 1", 3, {"disordered": 1}),
        # Order is by key where it is promised by key; `shared` promises none.
        ("key_shared", "0a 3b 1a 2a", 4, {}),
        ("key_shared", "0a 3b 1a 2a 6a 5a 4b", 7, {"disordered": 1}),
        ("shared", "3 0 2 1", 4, {}),
    ],
)
def test_fault_of_a_subscription_is_found(kind, came, count, found):
    received = Received("/default/orders", "billing", kind)
    for one in came.split():
        received.add("one", int(one[0]), one[1:] or None)
    proof = received.prove(count)
    names = ("missing", "duplicates", "disordered")
    assert {name: getattr(proof, name) for name in names if getattr(proof, name)} == found
    assert proof.ok is (not {*found} - {"duplicates"})
    assert proof.received == proof.by_consumer["one"] == len(came.split())
