"""Which express runs become one object, and where the oldest one is."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ister.base.model import Codec
from ister.bucket.compaction_plan import OBJECTS_MAX
from ister.bucket.resort import find_first_run, plan_resort
from ister.format.descriptor import FORMAT_EXPRESS, FORMAT_FRAMES
from tests.support.stores import UPLOADS, Cluster, a_descriptor

BYTES_MAX = 10_000
SPAN_SECONDS = 60
SETTINGS = replace(UPLOADS, object_bytes_max=BYTES_MAX, object_span_ms_max=SPAN_SECONDS * 1000)


def a_run(start, end, **fields):
    name = f"n/0123456789abcdef/{start:020d}.dnbx"
    size = 10 * (end - start)
    fields = {"size_bytes": size} | fields
    return a_descriptor(
        start, end, object_id=f"{name}@0+{fields['size_bytes']}", format=FORMAT_EXPRESS, **fields
    )


def groups(descriptors, *, is_due=False):
    found = plan_resort(descriptors, SETTINGS, is_due=lambda run: is_due)
    return [(group.runs[0].start, group.runs[-1].end, group.is_due) for group in found]


def test_newest_group_waits_until_it_is_due():
    runs = [a_run(0, 2), a_run(2, 3)]
    assert groups(runs) == [(0, 3, False)]
    assert groups(runs, is_due=True) == [(0, 3, True)]
    assert groups([]) == []


@pytest.mark.parametrize(
    "following",
    [
        a_descriptor(3, 5),
        a_run(4, 5),
        replace(a_run(3, 5), codec=Codec.BINCODE1),
        a_run(3, 5, size_bytes=BYTES_MAX),
        a_run(3, 5, created_at=a_run(0, 1).created_at + SPAN_SECONDS + 1),
    ],
    ids=["another format", "a hole", "another codec", "too large", "too late"],
)
def test_group_that_no_run_can_join_is_due(following):
    assert groups([a_run(0, 3), following])[0] == (0, 3, True)


def test_group_that_is_full_is_due():
    assert groups([a_run(0, 3, size_bytes=BYTES_MAX)]) == [(0, 3, True)]
    many = [a_run(number, number + 1) for number in range(OBJECTS_MAX + 1)]
    assert groups(many) == [(0, OBJECTS_MAX, True), (OBJECTS_MAX, OBJECTS_MAX + 1, False)]


@given(
    st.lists(
        st.tuples(
            st.integers(1, 5),
            st.integers(1, BYTES_MAX * 2),
            st.integers(0, SPAN_SECONDS),
            st.booleans(),
            st.booleans(),
        ),
        max_size=150,
    )
)
def test_every_run_is_in_one_group(shapes):
    at, now, descriptors = 0, 0, []
    for count, size, passed, is_run, is_behind_hole in shapes:
        at, now = at + is_behind_hole, now + passed
        make = a_run if is_run else a_descriptor
        descriptors.append(make(at, at + count, size_bytes=size, created_at=now))
        at += count
    found = list(plan_resort(descriptors, SETTINGS, is_due=lambda run: False))
    taken = [run for group in found for run in group.runs]
    assert taken == [d for d in descriptors if d.format == FORMAT_EXPRESS]
    for group in found:
        assert all(before.end == after.start for before, after in pairwise(group.runs))
        assert len(group.runs) <= OBJECTS_MAX
        assert len(group.runs) == 1 or group.size_bytes <= BYTES_MAX
        assert group.runs[-1].created_at - group.runs[0].created_at <= SPAN_SECONDS
    assert all(group.is_due for group in found[:-1])


# -- the oldest run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("", None),
        ("f", None),
        ("r", 0),
        ("ffrr", 2),
        ("rrff", 0),
        ("f" * 300 + "r" * 250, 300),
        ("f" * 40 + "r" + "f" * 10 + "r" * 3, 40),
        ("r" * 5 + "f" * 200, None),  # `compact` finds them
    ],
)
def test_oldest_run_is_found_from_the_end(kinds, expected):
    cluster = Cluster()
    owned = cluster.claim("a")
    for at, kind in enumerate(kinds):
        owned.commit(a_run(at, at + 1) if kind == "r" else a_descriptor(at, at + 1))
    assert find_first_run(owned.catalog, owned.last) == expected
    if expected is not None:
        assert owned.catalog.find(expected).format == FORMAT_EXPRESS
    assert owned.last is None or owned.last.format in (FORMAT_EXPRESS, FORMAT_FRAMES)
