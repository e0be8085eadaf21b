"""What is acknowledged: in any order, twice, and bounded."""

import json
import random

import pytest

from ister.errors import CapacityError, CorruptDataError, InvariantError
from ister.subscription.floor import SAVED_MORE_MAX, SAVED_RANGES_MAX, AckFloor
from tests.support.cases import each


def a_floor(start, *offsets):
    floor = AckFloor(start)
    for offset in offsets:
        floor.ack(offset)
    return floor


def test_floor_moves_with_the_lowest():
    floor = a_floor(5)
    assert floor.ack(7)
    assert floor.ack(6)
    assert (floor.floor, list(floor.ranges())) == (5, [(6, 8)])
    assert floor.ack(5)
    assert (floor.floor, list(floor.ranges()), floor.end) == (8, [], 8)


def test_what_is_acknowledged_twice_changes_nothing():
    floor = a_floor(0, 0, 2, 3)
    assert not any(floor.ack(offset) for offset in (0, 2, 3, -1))
    assert (floor.floor, list(floor.ranges()), floor.end) == (1, [(2, 4)], 4)


def test_ranges_grow_together():
    floor = a_floor(0, 2, 4, 8)
    assert len(list(floor.ranges())) == 3
    floor.ack(3)
    floor.ack(9)
    floor.ack(7)
    assert list(floor.ranges()) == [(2, 5), (7, 10)]
    assert [floor.first_acked(n) for n in (0, 4, 5, 9, 10)] == [2, 2, 7, 7, None]


def test_ranges_are_bounded_and_nothing_is_lost_by_that():
    floor = AckFloor(0)
    floor.ack(2, 2)
    floor.ack(4, 2)
    with pytest.raises(CapacityError):
        floor.ack(6, 2)
    assert not floor.is_acked(6)
    assert floor.ack(5, 2)  # makes no range of its own
    assert floor.ack(3, 2)
    assert floor.ack(7, 2)
    assert floor.ack(9, None)
    floor.validate()


def test_stored_form_is_bounded_and_keeps_the_lowest():
    kept = SAVED_RANGES_MAX + SAVED_MORE_MAX
    floor = AckFloor(0)
    for offset in range(1, 2 * kept + 21, 2):
        floor.ack(offset, None)
    stored = json.loads(json.dumps(floor.to_json()))
    assert len(stored["acked"]) == SAVED_RANGES_MAX
    assert len(json.dumps(stored)) < 300_000
    twin = AckFloor.from_json(stored)
    twin.validate()
    assert all(twin.is_acked(offset) for offset in range(1, 2 * kept, 2))
    assert not twin.is_acked(2 * kept + 1)
    assert stored["end"] == twin.end == 2 * kept
    # Of a version that does not know of the rest.
    del stored["more"]
    assert AckFloor.from_json(stored).end == 2 * SAVED_RANGES_MAX


def test_stored_form_comes_back():
    floor = a_floor(3, 5, 6, 9)
    assert floor.to_json() == {"floor": 3, "acked": [[5, 7], [9, 10]], "end": 10}
    assert AckFloor.from_json(floor.to_json()).to_json() == floor.to_json()


@each(
    ("cursor", "floor", "ranges"),
    [
        (3, 3, [(5, 7), (9, 10)]),
        (4, 4, [(5, 7), (9, 10)]),
        (5, 7, [(9, 10)]),
        (6, 7, [(9, 10)]),
        (8, 8, [(9, 10)]),
        (9, 10, []),
        (20, 20, []),
        (2, 2, []),
        (0, 0, []),
    ],
)
def test_cursor_that_moved_on_keeps_what_lies_ahead_and_one_put_back_nothing(cursor, floor, ranges):
    made = AckFloor.from_json({"floor": 3, "acked": [[5, 7], [9, 10]]}, floor=cursor)
    made.validate()
    assert (made.floor, list(made.ranges())) == (floor, ranges)


@each(
    "stored",
    [
        {},
        {"floor": 1},
        {"floor": "x", "acked": []},
        {"floor": 1, "acked": [[1, 2]]},
        {"floor": 1, "acked": [[5, 5]]},
        {"floor": 1, "acked": [[5, 7], [7, 8]]},
        {"floor": 1, "acked": [[5, 7], [3, 4]]},
        {"floor": 1, "acked": [[5]]},
        {"floor": 1, "acked": 5},
        {"floor": 1, "acked": [[5, float("inf")]]},
    ],
)
def test_stored_form_that_is_damaged_is_refused(stored):
    with pytest.raises(CorruptDataError):
        AckFloor.from_json(stored)


def test_clipped_floor_forgets_what_lies_beyond():
    floor = a_floor(0, 2, 3, 4, 8)
    floor.clip(4)
    assert list(floor.ranges()) == [(2, 4)]
    floor.clip(2)
    assert list(floor.ranges()) == []
    with pytest.raises(InvariantError):
        a_floor(5).clip(4)


def test_broken_ranges_are_noticed():
    floor = a_floor(0, 2)
    floor._starts[0] = 0
    with pytest.raises(InvariantError):
        floor.validate()
    floor._ends.append(5)
    with pytest.raises(InvariantError):
        floor.validate()


def test_random_order_ends_in_one_floor():
    offsets = list(range(10, 500))
    random.Random(3).shuffle(offsets)
    floor = a_floor(10, *offsets)
    assert (floor.floor, list(floor.ranges())) == (500, [])


def test_a_range_is_the_same_as_its_offsets():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        one_by_one, at_once = AckFloor(5), AckFloor(5)
        for _ in range(rng.randrange(1, 12)):
            start = rng.randrange(30)
            end = start + rng.randrange(8)
            for offset in range(start, end):
                one_by_one.ack(offset)
            at_once.ack_range(start, end)
            assert at_once.to_json() == one_by_one.to_json()
