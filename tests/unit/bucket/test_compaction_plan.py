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


def test_nothing_to_plan_in_an_empty_topic():
    assert plan([]) == []


def test_small_neighbours_become_groups_up_to_the_target():
    # 450 fit twice: a third would be too much.
    assert ranges(plan(topic(450, 450, 450, 450, 90))) == [(0, 20), (20, 50)]


def test_group_says_what_it_is():
    group = MergeGroup(tuple(topic(100, 200)))
    assert (group.start, group.end, group.size_bytes) == (0, 20, 300)


def test_large_enough_object_is_left_alone_and_divides():
    assert ranges(plan(topic(100, 100, 500, 100, 100))) == [(0, 20), (30, 50)]


def test_object_just_below_half_the_target_is_merged():
    assert ranges(plan(topic(499, 499))) == [(0, 20)]
    assert plan(topic(500, 499)) == []


def test_too_few_neighbours_are_not_worth_it():
    assert plan(topic(10, 10, 10), min_objects=4) == []
    assert ranges(plan(topic(10, 10, 10, 10), min_objects=4)) == [(0, 40)]


def test_group_never_reaches_over_a_hole():
    assert ranges(plan([*topic(10, 10), *topic(10, 10, start=30)])) == [(0, 20), (30, 50)]


@each("kind", ["dnb1", "parquet"])
def test_group_never_has_two_codecs(kind):
    mixed = [*topic(10, 10), *topic(10, 10, start=20, codec=Codec.BINCODE1)]
    mixed += topic(10, 10, start=40, codec=None)
    assert ranges(plan(mixed, format=kind)) == [(0, 20), (20, 40), (40, 60)]


def test_objects_that_share_offsets_are_left_to_repair():
    first = one(0, 10, count=40)
    objects = [first, one(10, 10), one(20, 10), *topic(10, 10, start=40)]
    assert ranges(plan(objects)) == [(40, 60)]


def test_object_that_is_not_complete_is_left_alone():
    objects = [*topic(10, 10), one(20, 10, completed=False), *topic(10, 10, start=30)]
    assert ranges(plan(objects)) == [(0, 20), (30, 50)]


def test_group_fits_into_one_transaction():
    groups = plan(topic(*[1] * (2 * OBJECTS_MAX + 5)))
    assert [len(group.objects) for group in groups] == [OBJECTS_MAX, OBJECTS_MAX, 5]


def test_object_that_outweighs_its_group_is_not_rewritten_for_its_sake():
    assert ranges(plan(topic(400, 5, 5, 5, 5))) == [(10, 50)]
    assert ranges(plan(topic(5, 5, 400, 5, 5))) == [(0, 20), (30, 50)]
    assert plan(topic(400, 5, 5, 5, 5), min_objects=5) == []


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


def test_frames_have_no_holes_so_what_has_is_left_alone():
    kept = topic(10, 10, start=20, format="parquet", kept="latest-per-key")
    objects = [*topic(10, 10), *kept, *topic(10, 10, start=40)]
    assert ranges(plan(objects)) == [(0, 20), (40, 60)]
    assert ranges(plan(objects, format="parquet")) == [(0, 60)]


def test_small_parquet_objects_become_frames_where_frames_are_wanted():
    index = ((0, 4),)
    objects = [*topic(10, 10, format="parquet", offset_index=index), *topic(10, 10, start=20)]
    assert ranges(plan(objects)) == [(0, 40)]
    assert plan(topic(600, 600, format="parquet")) == []


def test_large_objects_of_frames_are_rewritten_as_parquet_one_by_one():
    assert ranges(plan(topic(600, 9000), format="parquet")) == [(0, 10), (10, 20)]
    assert plan(topic(600, 9000, format="parquet"), format="parquet") == []


def test_few_small_objects_in_between_are_rewritten_as_parquet_and_the_newest_wait():
    large = one(20, 900, format="parquet")
    objects = [*topic(10, 10), large, *topic(10, 10, start=30)]
    assert ranges(plan(objects, format="parquet", min_objects=4)) == [(0, 20)]
    # The newest wait for neighbours, unless one asks for them.
    assert ranges(plan(objects, format="parquet", min_objects=1)) == [(0, 20), (30, 50)]


def test_single_object_in_the_wanted_format_is_never_rewritten():
    for kind in ("dnb1", "parquet"):
        assert plan(topic(10, format=kind), format=kind, min_objects=1) == []


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


# -- express runs -------------------------------------------------------------------------------


def runs(*sizes, start=0):
    return topic(*sizes, start=start, format="express")


@pytest.mark.parametrize("format", ["dnb1", "parquet"])
@pytest.mark.parametrize(
    ("descriptors", "expected"),
    [
        (runs(100), [(0, 10)]),
        (runs(700), [(0, 10)]),
        (runs(100, 100), [(0, 20)]),
        (runs(2, 900, 1), [(0, 10), (10, 20), (20, 30)]),
    ],
)
def test_runs_are_always_worth_it(descriptors, expected, format):
    assert ranges(plan(descriptors, format=format, min_objects=4)) == expected


def test_runs_are_merged_with_small_objects_and_not_with_large_ones():
    small = [*topic(100), *runs(100, start=10), *topic(100, start=20)]
    assert ranges(plan(small, min_objects=4)) == [(0, 30)]
    large = [*topic(499), *runs(20, 20, start=10)]
    assert ranges(plan(large, min_objects=4)) == [(10, 30)]
