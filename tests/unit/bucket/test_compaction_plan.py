"""Which objects are merged: rules one by one, and what holds for any topic."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ister.base.limits import MIB
from ister.base.model import Codec
from ister.bucket.compaction_plan import (
    OBJECTS_MAX,
    MergeGroup,
    PlanSettings,
    plan_compaction,
    weigh,
)
from ister.errors import InvariantError
from ister.format.descriptor import ObjectDescriptor
from tests.support.cases import each

TARGET = 1000
ROUNDS_MAX = 6
FORMATS = ("dnb1", "parquet")


def topic(*sizes, start=0, **fields):
    """Objects of these sizes that follow each other, with ten messages each."""
    return [one(start + 10 * number, size, **fields) for number, size in enumerate(sizes)]


def one(start, size, *, count=10, format="dnb1", codec=Codec.BINCODE2, **fields):
    return ObjectDescriptor(
        object_id=f"data-{start}-{start + count - 1}.{format}",
        start=start,
        end=start + count,
        size_bytes=size,
        messages=count,
        format=format,
        codec=codec,
        **fields,
    )


def plan(descriptors, *, format="dnb1", target=TARGET, min_objects=2, objects_max=OBJECTS_MAX):
    settings = PlanSettings(
        format=format, target_bytes=target, min_objects=min_objects, objects_max=objects_max
    )
    return plan_compaction(descriptors, settings)


def ranges(groups):
    return [(group.start, group.end) for group in groups]


# -- rule by rule -------------------------------------------------------------------------------


def with_hole():
    return [*topic(10, 10), *topic(10, 10, start=30)]


def runs(*sizes, start=0):
    return topic(*sizes, start=start, format="express")


PARQUET = {"format": "parquet"}
LARGE_BETWEEN = [*topic(10, 10), one(20, 900, **PARQUET), *topic(10, 10, start=30)]
KEPT = topic(10, 10, start=20, **PARQUET, kept="latest-per-key")
TWO_CODECS = [
    *topic(10, 10),
    *topic(10, 10, start=20, codec=Codec.BINCODE1),
    *topic(10, 10, start=40, codec=None),
]
RULES = {
    # Two of 450 fit; a third would be too much.
    "small neighbours become groups up to the target": [
        (topic(450, 450, 450, 450, 90), {}, [(0, 20), (20, 50)])
    ],
    "what is large enough is left alone and divides": [
        (topic(100, 100, 500, 100, 100), {}, [(0, 20), (30, 50)]),
        (topic(499, 499), {}, [(0, 20)]),
        (topic(500, 499), {}, []),
    ],
    "too few neighbours are not worth it": [
        (topic(10, 10, 10), {"min_objects": 4}, []),
        (topic(10, 10, 10, 10), {"min_objects": 4}, [(0, 40)]),
    ],
    "a group never reaches over a hole": [(with_hole(), {}, [(0, 20), (30, 50)])],
    "a group never has two codecs": [
        (TWO_CODECS, {"format": kind}, [(0, 20), (20, 40), (40, 60)]) for kind in FORMATS
    ],
    "objects that share offsets are left to repair": [
        ([one(0, 10, count=40), one(10, 10), *topic(10, 10, start=40)], {}, [(40, 60)])
    ],
    "an object that is not complete is left alone": [
        (
            [*topic(10, 10), one(20, 10, completed=False), *topic(10, 10, start=30)],
            {},
            [(0, 20), (30, 50)],
        )
    ],
    "an object that outweighs its group is not rewritten for its sake": [
        (topic(400, 5, 5, 5, 5), {}, [(10, 50)]),
        (topic(5, 5, 400, 5, 5), {}, [(0, 20), (30, 50)]),
        (topic(400, 5, 5, 5, 5), {"min_objects": 5}, []),
    ],
    "frames have no holes, so what has is left alone": [
        ([*topic(10, 10), *KEPT, *topic(10, 10, start=40)], {}, [(0, 20), (40, 60)]),
        ([*topic(10, 10), *KEPT, *topic(10, 10, start=40)], PARQUET, [(0, 60)]),
    ],
    "small parquet objects become frames where frames are wanted": [
        (
            [*topic(10, 10, **PARQUET, offset_index=((0, 4),)), *topic(10, 10, start=20)],
            {},
            [(0, 40)],
        ),
        (topic(600, 600, **PARQUET), {}, []),
    ],
    "large objects of frames are rewritten as parquet one by one": [
        (topic(600, 9000), PARQUET, [(0, 10), (10, 20)]),
        (topic(600, 9000, **PARQUET), PARQUET, []),
    ],
    # The newest wait for neighbours, unless one asks for them.
    "few small objects in between are rewritten as parquet and the newest wait": [
        (LARGE_BETWEEN, {**PARQUET, "min_objects": 4}, [(0, 20)]),
        (LARGE_BETWEEN, {**PARQUET, "min_objects": 1}, [(0, 20), (30, 50)]),
    ],
    "a single object in the wanted format is never rewritten": [
        (topic(10, format=kind), {"format": kind, "min_objects": 1}, []) for kind in FORMATS
    ],
    "express runs are always worth it": [
        (objects, {"format": kind, "min_objects": 4}, expected)
        for kind in FORMATS
        for objects, expected in (
            (runs(100), [(0, 10)]),
            (runs(700), [(0, 10)]),
            (runs(100, 100), [(0, 20)]),
            (runs(2, 900, 1), [(0, 10), (10, 20), (20, 30)]),
        )
    ],
    "express runs are merged with small objects and not with large ones": [
        ([*topic(100), *runs(100, start=10), *topic(100, start=20)], {"min_objects": 4}, [(0, 30)]),
        ([*topic(499), *runs(20, 20, start=10)], {"min_objects": 4}, [(10, 30)]),
    ],
}


@each(
    ("rule", "objects", "settings", "expected"),
    [(rule, *row) for rule, rows in RULES.items() for row in rows],
)
def test_rule(rule, objects, settings, expected):
    assert ranges(plan(objects, **settings)) == expected


def test_group_says_what_it_is_and_fits_into_one_transaction():
    group = MergeGroup(tuple(topic(100, 200)))
    assert (group.start, group.end, group.size_bytes) == (0, 20, 300)
    groups = plan(topic(*[1] * (2 * OBJECTS_MAX + 5)))
    assert [len(group.objects) for group in groups] == [OBJECTS_MAX, OBJECTS_MAX, 5]


def test_growing_topic_rewrites_each_message_only_a_few_times():
    """Goal: a job that runs after every few uploads does not copy the whole topic each time."""
    objects, written, uploaded = [], 0, 0
    for _ in range(400):
        start = objects[-1].end if objects else 0
        objects += topic(1, 1, 1, 1, start=start)
        uploaded += 4
        for group in plan(objects, min_objects=4, target=4000):
            written += group.size_bytes
            objects = applied(objects, [group], "dnb1")
    assert written < 12 * uploaded
    assert len(objects) < 20


def test_parquet_object_weighs_what_its_messages_do():
    index = tuple((number, 4 + number) for number in range(5))
    archive = one(0, 3 * MIB, format="parquet", offset_index=index)
    assert weigh(archive, "parquet") == 4 * 8 * MIB
    assert weigh(archive, "dnb1") == 4 * 8 * MIB
    assert weigh(replace(archive, size_bytes=9 * MIB), "dnb1") == 36 * MIB
    assert weigh(replace(archive, size_bytes=20 * MIB), "dnb1") == 40 * MIB
    assert weigh(replace(archive, offset_index=index[:1]), "parquet") == 3 * MIB
    assert weigh(one(0, 3 * MIB, offset_index=index), "parquet") == 3 * MIB
    known = replace(archive, uncompressed_bytes=35 * MIB)
    assert [weigh(known, kind) for kind in ("parquet", "dnb1")] == [4 * 8 * MIB, 35 * MIB]


@each("wrong", [{"format": "csv"}, {"min_objects": 0}, {"objects_max": OBJECTS_MAX + 1}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InvariantError):
        plan(topic(10, 10), **wrong)


# -- any topic ----------------------------------------------------------------------------------


@st.composite
def topics(draw):
    """Objects with holes, codecs, formats, holes on purpose and overlaps."""
    objects, start = [], 0
    for _ in range(draw(st.integers(0, 60))):
        start += draw(st.sampled_from((0, 0, 0, 0, 0, 0, 0, 7)))
        kind = draw(st.sampled_from(("dnb1", "dnb1", "parquet")))
        kept = draw(st.sampled_from(("", "", "latest-per-key"))) if kind == "parquet" else ""
        count = draw(st.integers(1, 20))
        objects.append(
            one(
                start,
                draw(st.integers(1, 200) | st.integers(1, 1500)),
                count=count,
                format=kind,
                codec=draw(st.sampled_from((Codec.BINCODE2,) * 6 + (Codec.BINCODE1, None))),
                kept=kept,
                completed=draw(st.sampled_from((True,) * 20 + (False,))),
            )
        )
        is_shared = draw(st.sampled_from((False,) * 20 + (True,)))
        start = objects[-1].end - (1 if is_shared and count > 1 else 0)
    return objects


def applied(objects, groups, kind, *, shrink=1):
    """The topic with every group merged into one object."""
    by_start = {group.start: group for group in groups}
    gone = {id(described) for group in groups for described in group.objects}
    after = []
    for described in objects:
        if group := by_start.get(described.start):
            if described is not group.objects[0]:
                continue
            kept = "latest-per-key" if any(item.kept for item in group.objects) else ""
            after.append(
                one(
                    group.start,
                    max(group.size_bytes // shrink, 1),
                    count=group.end - group.start,
                    format=kind,
                    codec=described.codec,
                    kept=kept,
                )
            )
        elif id(described) not in gone:
            after.append(described)
    return after


def covered(objects):
    return sorted((described.start, described.end) for described in objects)


@given(
    objects=topics(),
    kind=st.sampled_from(("dnb1", "parquet")),
    min_objects=st.integers(1, 6),
    objects_max=st.integers(2, 10),
)
@example(objects=topic(*[1] * 50), kind="parquet", min_objects=1, objects_max=2)
def test_groups_are_disjoint_runs_within_their_limits(objects, kind, min_objects, objects_max):
    groups = plan(objects, format=kind, min_objects=min_objects, objects_max=objects_max)
    taken = [id(described) for group in groups for described in group.objects]
    assert len(taken) == len(set(taken))
    assert set(taken) <= set(map(id, objects))
    assert ranges(groups) == sorted(ranges(groups))
    for before, after in pairwise(groups):
        assert before.end <= after.start
    for group in groups:
        found = group.objects
        assert all(a.end == b.start for a, b in pairwise(found))
        assert len({item.codec for item in found}) == 1
        assert len(found) <= objects_max
        assert all(item.completed for item in found)
        if len(found) > 1:
            assert sum(weigh(item, kind) for item in found) <= TARGET
            assert all(weigh(item, kind) < TARGET // 2 for item in found)
        if not any(item.format != kind for item in found):
            assert len(found) >= max(2, min_objects)
        if kind == "dnb1":
            assert not any(item.kept for item in found)
    # Nobody's offsets are lost, and none is covered twice that was not before.
    offsets = [n for item in objects for n in range(item.start, item.end)]
    merged = applied(objects, groups, kind)
    assert sorted(offsets) == sorted(n for item in merged for n in range(item.start, item.end))


@given(
    objects=topics(),
    kind=st.sampled_from(("dnb1", "parquet")),
    min_objects=st.integers(1, 6),
    shrink=st.sampled_from((1, 1, 3, 20)),
)
@example(objects=topic(*[1] * 60), kind="parquet", min_objects=2, shrink=20)
def test_planning_again_comes_to_an_end(objects, kind, min_objects, shrink):
    for _ in range(ROUNDS_MAX):
        groups = plan(objects, format=kind, min_objects=min_objects)
        if not groups:
            break
        fewer = applied(objects, groups, kind, shrink=shrink)
        assert len(fewer) < len(objects) or all(len(group.objects) == 1 for group in groups)
        objects = fewer
    else:
        raise AssertionError(f"still merging: {covered(objects)}")
    assert plan(objects, format=kind, min_objects=min_objects) == []
