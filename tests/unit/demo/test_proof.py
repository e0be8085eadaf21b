"""The proof finds what is planted, and nothing where nothing is."""

from demo.proof import Acknowledged, Received, check_chain


def _promised(count=6, **more):
    acknowledged = Acknowledged("/default/orders", count)
    for number in range(count):
        acknowledged.add(number, more.get(f"at_{number}", number))
    return acknowledged


def _chain(count=6):
    return [(number, number) for number in range(count)]


def test_a_whole_chain_is_whole():
    proof = check_chain(_promised(), _chain())
    assert proof.ok
    assert (proof.acknowledged, proof.found) == (6, 6)
    assert proof.say() == ""


def test_what_was_never_acknowledged_may_be_there_or_not():
    acknowledged = Acknowledged("/default/orders", 3)
    acknowledged.add(0, 0)
    assert check_chain(acknowledged, [(0, 0)]).ok
    assert check_chain(acknowledged, [(0, 0), (1, 2)]).ok


def test_an_offset_that_nobody_was_told_may_be_any():
    acknowledged = Acknowledged("/default/clicks", 2)
    acknowledged.add(0, None)
    acknowledged.add(1, 0)
    assert acknowledged.count == 2
    assert check_chain(acknowledged, [(0, 1), (1, 0)]).ok
    assert check_chain(acknowledged, [(0, 1)]).lost == 1


def test_a_planted_fault_is_found():
    for chain, found in [
        ([(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)], {"lost": 1}),
        ([(0, 0), (1, 1), (2, 2), (4, 4), (5, 5)], {"lost": 1, "gaps": 1}),
        ([*_chain(), (6, 3)], {"doubled": 1}),
        ([(0, 0), (1, 2), (2, 1), (3, 3), (4, 4), (5, 5)], {"misplaced": 2}),
        ([*_chain(), (6, None)], {"foreign": 1}),
        ([*_chain(), (6, 99)], {"foreign": 1}),
        ([(1, 0), *_chain()[1:]], {"gaps": 2, "misplaced": 1}),
    ]:
        proof = check_chain(_promised(), chain)
        names = ("lost", "misplaced", "doubled", "gaps", "foreign")
        assert {name: getattr(proof, name) for name in names if getattr(proof, name)} == found, (
            chain
        )
        assert not proof.ok, chain
        assert proof.as_json()["ok"] is False, chain
        assert "/default/orders" in proof.say(), chain
        for name in found:
            assert name in proof.say(), chain


def test_examples_are_few():
    proof = check_chain(_promised(1000), [])
    assert proof.lost == 1000
    assert len(proof.examples) == 5


def test_a_subscription_that_got_everything_has():
    received = Received("/default/orders", "billing", "exclusive")
    for offset in range(5):
        assert received.add("billing-1", offset, None)
    proof = received.prove(5)
    assert proof.ok
    assert (proof.received, proof.duplicates, proof.by_consumer) == (5, 0, {"billing-1": 5})


def test_a_message_that_never_came_is_missing():
    received = Received("/default/orders", "billing", "shared")
    for offset in (0, 1, 3):
        received.add("one", offset, None)
    assert received.prove(4).missing == 1
    assert received.prove(9).missing == 6
    assert "1 messages never came" in received.prove(4).say()


def test_what_comes_again_is_a_duplicate_and_no_disorder():
    received = Received("/default/orders", "billing", "failover")
    for offset in (0, 1, 2, 3):
        received.add("one", offset, None)
    for offset in (1, 2, 3, 4):
        assert received.add("two", offset, None) is (offset == 4)
    proof = received.prove(5)
    assert proof.ok
    assert (proof.duplicates, proof.disordered) == (3, 0)


def test_a_message_that_is_passed_over_and_comes_late_is_disorder():
    received = Received("/default/orders", "billing", "exclusive")
    for offset in (0, 2, 1):
        received.add("one", offset, None)
    proof = received.prove(3)
    assert (proof.missing, proof.disordered) == (0, 1)
    assert not proof.ok


def test_order_is_by_key_where_it_is_promised_by_key():
    received = Received("/default/orders", "billing", "key_shared")
    for offset, key in ((0, "a"), (3, "b"), (1, "a"), (2, "a")):
        received.add("one", offset, key)
    assert received.prove(4).ok
    received.add("one", 6, "a")
    received.add("two", 5, "a")
    received.add("two", 4, "b")
    assert received.prove(7).disordered == 1


def test_shared_promises_no_order():
    received = Received("/default/clicks", "billing", "shared")
    for offset in (3, 0, 2, 1):
        received.add("one", offset, None)
    assert received.prove(4).ok
