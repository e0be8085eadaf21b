"""Properties of what deliveries are made of: acknowledged offsets, key filters, pauses.

A failure prints the smallest example and `@reproduce_failure`; put that above the test to replay.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from ister.subscription.floor import AckFloor
from ister.subscription.keys import KeyFilter
from ister.subscription.policy import Backoff, FailurePolicy

EXAMPLES = settings(max_examples=200, deadline=None, print_blob=True)


@EXAMPLES
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(0, 10))
def test_floor_is_the_set_of_what_was_acknowledged(offsets, start):
    floor, acked = AckFloor(start), set(range(start))
    for offset in offsets:
        assert floor.ack(offset) == (offset not in acked)
        acked.add(offset)
        floor.validate()
        assert [floor.is_acked(n) for n in range(50)] == [n in acked for n in range(50)]
        assert floor.floor == next(n for n in range(60) if n not in acked)
        assert floor.count_below(20) == len([n for n in acked if floor.floor <= n < 20])
    twin = AckFloor.from_json(floor.to_json())
    assert (twin.floor, list(twin.ranges())) == (floor.floor, list(floor.ranges()))


@EXAMPLES
@given(st.lists(st.integers(0, 40), max_size=40), st.integers(0, 45), st.integers(0, 45))
def test_floor_that_moved_on_or_was_clipped_keeps_what_holds(offsets, cursor, end):
    floor = AckFloor(0)
    for offset in offsets:
        floor.ack(offset)
    moved = AckFloor.from_json(floor.to_json(), floor=cursor)
    moved.validate()
    keeps = cursor >= floor.floor
    for n in range(50):
        assert moved.is_acked(n) == (n < cursor or (keeps and floor.is_acked(n)))
    end = max(end, floor.floor)
    floor.clip(end)
    floor.validate()
    assert not any(floor.is_acked(n) for n in range(end, 50))
    assert all(floor.is_acked(n) for n in offsets if n < end)


def matches_slowly(pattern, key):
    """Globs by their definition."""
    if not pattern:
        return not key
    if pattern[0] == "*":
        return any(matches_slowly(pattern[1:], key[n:]) for n in range(len(key) + 1))
    return bool(key) and pattern[0] in ("?", key[0]) and matches_slowly(pattern[1:], key[1:])


@EXAMPLES
@given(st.text("ab*?", max_size=7), st.text("abc?*", max_size=8))
def test_globs_match_as_defined(pattern, key):
    assert KeyFilter([pattern]).matches(key) == matches_slowly(pattern, key)


@EXAMPLES
@given(
    st.integers(1, 10**9),
    st.none() | st.integers(-5, 2**64),
    st.integers(0, 10_000),
    st.integers(0, 100_000),
    st.sampled_from(list(Backoff)),
)
def test_pauses_stay_within_the_policy(attempt, requested, base, more, backoff):
    policy = FailurePolicy(
        base_redelivery_delay_ms=base, max_redelivery_delay_ms=base + more, backoff=backoff
    )
    delay = policy.delay_ms(attempt, requested)
    assert base <= delay <= base + more
    assert requested is None or delay >= min(requested, base + more)
    assert policy.delay_ms(attempt + 1, requested) >= delay
    assert FailurePolicy.from_json(policy.to_json()) == policy
