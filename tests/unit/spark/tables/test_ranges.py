"""Ranges of offsets against sets of them, and the record that tables keep."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ister.errors import ConflictError, CorruptDataError, UnsupportedVersionError
from ister.spark.tables.ranges import (
    Coverage,
    count,
    intersect,
    normalise,
    subtract,
)
from tests.support.cases import case

_PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def _set(ranges) -> set[int]:
    return {offset for start, end in ranges for offset in range(start, end)}


def _is_normal(ranges) -> bool:
    flat = [edge for item in ranges for edge in item]
    return flat == sorted(set(flat))


def _add(coverage, *item):
    return coverage.add_all([item])


@given(_PAIRS, _PAIRS)
def test_ranges_are_sets_of_offsets(one, other):
    a, b = normalise(one), normalise(other)
    assert _set(a) == _set(one)
    for found, expected in (
        (normalise((*a, *b)), _set(a) | _set(b)),
        (intersect(a, b), _set(a) & _set(b)),
        (subtract(a, b), _set(a) - _set(b)),
    ):
        assert _set(found) == expected
        assert _is_normal(found)
        assert count(found) == len(expected)


@given(_PAIRS, _PAIRS)
def test_an_offset_is_added_once(one, other):
    a, b = normalise(one), normalise(other)
    coverage = _add(Coverage(), "/d/t", "i", 1, a)
    if intersect(a, b):
        with pytest.raises(ConflictError):
            _add(coverage, "/d/t", "i", 1, b)
    else:
        assert _add(coverage, "/d/t", "i", 2, b).of("/d/t", "i") == normalise((*a, *b))


def test_topics_and_incarnations_are_kept_apart():
    coverage = Coverage().add_all(
        [
            ("/d/a", "i", 1, ((0, 5),)),
            ("/d/a", "j", 1, ((0, 3),)),
            ("/d/b", "i", 4, ((0, 2),)),
        ]
    )
    assert coverage.of("/d/a", "i") == ((0, 5),)
    assert coverage.of("/d/a", "j") == ((0, 3),)
    assert coverage.of("/d/c", "i") == ()
    assert coverage.other_incarnations("/d/a", "i") == ["j"]
    assert coverage.other_incarnations("/d/b", "i") == []
    assert coverage.epoch_of("/d/b", "i") == 4
    assert coverage.epoch_of("/d/b", "j") is None


def test_the_record_comes_back():
    coverage = _add(Coverage(row=("/d/a", 9)), "/d/a", "i", 3, ((0, 5), (9, 12)))
    coverage = _add(coverage, "/d/b", "j", 1, ((1, 2),))
    assert Coverage.from_json(coverage.to_json(), path="p") == coverage
    texts = {topic: coverage.topic_to_json(topic) for topic in coverage.topics}
    assert Coverage.from_topics(texts, row=coverage.row, path="p") == coverage


def test_what_a_table_had_before_it_was_rolled_back():
    before = _add(Coverage(), "/d/a", "i", 3, ((0, 9),))
    now = Coverage(_add(Coverage(), "/d/a", "i", 1, ((0, 4),)).topics, before=before)
    assert now.undone("/d/a", "i") == ((4, 9),)
    assert now.undone("/d/a", "j") == before.undone("/d/a", "i") == ()
    assert Coverage.from_json(now.to_json(), path="p").before is None


def test_a_record_that_makes_no_sense_is_told():
    for text in ["", "[]", "{}", '{"version": 1}', '{"version": 1, "topics": {"/d/a": {"i": {}}}}']:
        with case(text), pytest.raises(CorruptDataError):
            Coverage.from_json(text, path="p")


def test_a_newer_record_is_told():
    with pytest.raises(UnsupportedVersionError):
        Coverage.from_json(json.dumps({"version": 2, "topics": {}}), path="p")
