"""The planner: every offset once, cuts at index entries only, and limits that hold.

Random topics are made of objects whose every frame is known, so that a test reads a slice as a task
does: from its first byte on, frame by frame. A failure prints `@reproduce_failure`; put that above
the test to replay it.
"""

import pickle
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ister.base.limits import KIB, MIB
from ister.base.model import Codec
from ister.bucket.chunks import ObjectPart
from ister.errors import DataGapError, InvariantError
from ister.format.descriptor import ObjectDescriptor
from ister.spark.planner import (
    SLOTS_ASSUMED,
    TailSlice,
    TopicRange,
    limit_bytes,
    limit_messages,
    plan,
)
from tests.support.cases import case, each
from tests.support.scale import scaled

EXAMPLES = settings(max_examples=scaled(40, 300), deadline=None, print_blob=True)

A, B = "/default/a", "/default/b"


# -- builders ---------------------------------------------------------------------------------


def an_object(start, *blocks, name=None, codec=Codec.BINCODE2):
    """An object with an index entry at each block; a block is (messages, bytes)."""
    offsets = [start, *accumulate((count for count, _ in blocks), initial=start)][1:]
    positions = list(accumulate((size for _, size in blocks), initial=0))
    return ObjectDescriptor(
        object_id=name or f"data-{start}-{offsets[-1] - 1}.dnb1",
        start=start,
        end=offsets[-1],
        size_bytes=positions[-1],
        offset_index=tuple(zip(offsets[:-1], positions[:-1], strict=True)),
        codec=codec,
    )


def a_range(*descriptors, topic=A, start=None, end=None, tiered=None, tail_bytes=0):
    first = min((found.start for found in descriptors), default=0)
    last = max((found.end for found in descriptors), default=0)
    tiered = last if tiered is None else tiered
    return TopicRange(
        topic=topic,
        incarnation="i",
        start=first if start is None else start,
        end=tiered if end is None else end,
        tiered=tiered,
        descriptors=descriptors,
        tail_bytes=tail_bytes,
    )


def offsets_of(partitions):
    """The (start, end) of every slice, by partition."""
    return [[(item.start, item.end) for item in found.slices] for found in partitions]


def sizes_of(partitions):
    return [found.bytes for found in partitions]


# -- one object -------------------------------------------------------------------------------


def test_small_object_is_one_slice():
    (partition,) = plan([a_range(an_object(10, (5, 500), (5, 300)))], split_bytes=1000)
    assert partition.number == 0
    assert partition.slices == (
        ObjectPart(
            topic=A,
            start=10,
            end=20,
            object_id="data-10-19.dnb1",
            codec=Codec.BINCODE2,
            index_offset=10,
            position=0,
            end_position=800,
            object_bytes=800,
            boundaries=(),
        ),
    )
    assert partition.bytes == partition.slices[0].bytes == 800


def test_index_that_cannot_be_true_is_not_used():
    for index in [
        ((0, 0), (20, 200), (10, 300)),
        ((0, 0), (10, 300), (20, 200)),
        ((0, 0), (10, 100), (10, 200)),
        ((0, 0), (10, 100), (20, 100)),
        ((0, 0), (40, 200)),
        ((0, 0), (10, 400)),
        ((0, 7), (10, 100)),
        ((0, 0), (0, 0), (10, 100), (5, 50)),
    ]:
        with case(index):
            found = replace(an_object(0, (40, 400)), offset_index=index)
            ((only,),) = (part.slices for part in plan([a_range(found, start=15)], split_bytes=64))
            assert (only.index_offset, only.position, only.end_position) == (0, 0, 400)


def test_boundaries_are_entries_a_mebibyte_apart():
    size = 300 * KIB
    found = an_object(0, *[(10, size)] * 20)
    ((only,),) = (part.slices for part in plan([a_range(found)], split_bytes=64 * MIB))
    assert only.boundaries == (4 * size, 8 * size, 12 * size, 16 * size)
    (_, second) = (p.slices[0] for p in plan([a_range(found)], split_bytes=10 * size))
    assert second.position == 10 * size
    assert second.boundaries == (14 * size,)


def test_boundaries_leave_no_short_rest():
    found = an_object(0, (10, 2 * MIB), (10, 2 * MIB), (10, 5))
    ((only,),) = (part.slices for part in plan([a_range(found)], split_bytes=64 * MIB))
    assert only.boundaries == (2 * MIB,)


@each(
    ("blocks", "split_bytes", "sizes"),
    [
        ([(10, 100)] * 10, 400, [300, 300, 400]),
        # An object has up to twice the bytes of a split, both by default.
        (
            [(1000, 262_144 - 50)] * 511 + [(1000, 262_144)],
            64 * MIB,
            [256 * (262_144 - 50), 255 * (262_144 - 50) + 262_144],
        ),
        # A block is never cut, and what comes behind a large one is even.
        ([(10, 100), (10, 5000), (10, 100), (10, 100)], 400, [100, 5000, 200]),
        ([(10, 5000), *[(10, 50)] * 12], 400, [5000, 300, 300]),
    ],
)
def test_large_object_is_cut_evenly_at_index_entries(blocks, split_bytes, sizes):
    assert sizes_of(plan([a_range(an_object(0, *blocks))], split_bytes=split_bytes)) == sizes


@each(
    ("end", "tail_bytes", "split_bytes", "expected"),
    [
        (30, 1000, 350, [[(0, 10)], [(10, 20)], [(20, 30)]]),
        (3, 3000, 10, [[(0, 1)], [(1, 2)], [(2, 3)]]),
        (1000, 0, 64 * MIB, [[(0, 1000)]]),
    ],
)
def test_tail_is_split_evenly_by_offsets(end, tail_bytes, split_bytes, expected):
    found = a_range(tiered=0, start=0, end=end, tail_bytes=tail_bytes)
    assert offsets_of(plan([found], split_bytes=split_bytes)) == expected


# -- several objects --------------------------------------------------------------------------


def test_small_neighbours_go_together_up_to_the_target():
    objects = [an_object(start, (10, 300)) for start in range(0, 70, 10)]
    partitions = plan([a_range(*objects)], split_bytes=1000)
    assert sizes_of(partitions) == [600, 600, 900]
    assert offsets_of(partitions)[0] == [(0, 10), (10, 20)]


def test_opening_an_object_has_a_weight():
    """20,000 objects of 3 KB are 60 MB, and 20,000 requests: more than one task can do."""
    objects = [an_object(at * 10, (10, 3000)) for at in range(20_000)]
    partitions = plan([a_range(*objects)], split_bytes=64 * MIB)
    assert 70 <= len(partitions) <= 90
    counts = [len(part.slices) for part in partitions]
    assert max(counts) <= 256
    assert max(counts) - min(counts) <= 2
    edges = [edge for part in offsets_of(partitions) for edge in part]
    assert edges == [(at * 10, at * 10 + 10) for at in range(20_000)]
    # Fewer tasks for those who want fewer, down to one.
    assert len(plan([a_range(*objects)], split_bytes=1024 * 1024 * MIB)) == 1


def test_opening_weighs_little_where_partitions_are_small():
    objects = [an_object(at * 10, (10, 200)) for at in range(1000)]
    partitions = plan([a_range(*objects)], split_bytes=64 * KIB)
    assert 4 <= len(partitions) <= 8


def test_parquet_weighs_what_it_is_decoded_to():
    """Goal: a topic has as many partitions in Parquet as in frames."""
    frames = an_object(0, *[(1000, 8 * MIB)] * 100)
    parquet = replace(
        an_object(0, *[(1000, MIB)] * 100),
        format="parquet",
        uncompressed_bytes=frames.size_bytes,
    )
    assert len(plan([a_range(frames)])) == 13
    partitions = plan([a_range(parquet)])
    assert len(partitions) == 13
    assert max(sizes_of(partitions)) == 8 * MIB
    assert max(part.weight for part in partitions) == 64 * MIB
    # One that an older Ister wrote: a row group has at least 8 MiB before compression.
    older = replace(parquet, uncompressed_bytes=None)
    assert 12 <= len(plan([a_range(older)])) <= 14
    assert len(plan([a_range(parquet)], split_bytes=1024 * MIB, min_partitions=25)) == 25


def test_parquet_that_was_not_compressed_weighs_what_it_has():
    found = replace(an_object(0, *[(10, MIB)] * 4), format="parquet", uncompressed_bytes=MIB)
    (partition,) = plan([a_range(found)])
    assert partition.weight == partition.bytes == 4 * MIB


def test_small_topics_are_spread_evenly():
    """300 small topics: a handful of partitions of about the same weight."""
    ranges = [
        a_range(an_object(0, (10, 1000 + 997 * number % 5000)), topic=f"/default/{number:03}")
        for number in range(300)
    ]
    partitions = plan(ranges, slots=SLOTS_ASSUMED)
    assert 4 <= len(partitions) <= 8
    weights = [part.weight for part in partitions]
    assert max(weights) - min(weights) <= 600 * KIB
    assert len(plan(ranges)) == 2
    names = [part.topic for found in partitions for part in found.slices]
    assert names == [item.topic for item in ranges]


def test_one_huge_topic_among_many_small_ones():
    huge = a_range(an_object(0, *[(10, MIB)] * 700), topic="/default/150-huge")
    small = [
        a_range(an_object(0, (10, 30 * KIB)), topic=f"/default/{number:03}")
        for number in range(300)
    ]
    ranges = sorted([huge, *small], key=lambda item: item.topic)
    partitions = plan(ranges)
    assert 12 <= len(partitions) <= 14
    assert max(part.weight for part in partitions) <= 72 * MIB


def test_slots_get_something_to_do_if_there_is_enough():
    for size_mib, slots, expected in [
        (8, 8, 1),
        (48, 8, 3),
        (128, 8, 8),
        (256, 8, 8),
        (1024, 8, 16),
        (256, 2, 4),
        (256, None, 4),
        (256, 1, 4),
        (1024, 32, 32),
    ]:
        with case(size_mib, slots):
            found = an_object(0, *[(10, 64 * KIB)] * (16 * size_mib))
            partitions = plan([a_range(found)], slots=slots)
            assert len(partitions) in (expected, expected + 1)
            assert max(sizes_of(partitions)) - min(sizes_of(partitions)) <= 128 * KIB


def test_range_behind_the_gap_is_read():
    """What a caller plans that may leave lost messages out: one topic in two ranges."""
    objects = [an_object(10, (10, 100)), an_object(30, (20, 100))]
    ranges = [
        a_range(*objects, start=10, end=20, tiered=50),
        a_range(*objects, start=30, end=55, tiered=50, tail_bytes=50),
    ]
    assert offsets_of(plan(ranges, split_bytes=999)) == [[(10, 20), (30, 50), (50, 55)]]
    assert limit_bytes(ranges, 999) == {A: 55}
    assert limit_bytes(ranges, 210) == {A: 51}
    assert limit_bytes(ranges, 150) == {A: 20}


def test_two_ranges_of_one_object_are_not_joined_over_what_lies_between():
    found = an_object(0, (6, 60), (6, 60))
    ranges = [a_range(found, start=0, end=5), a_range(found, start=7, end=12)]
    assert offsets_of(plan(ranges, split_bytes=999)) == [[(0, 5), (7, 12)]]


# -- nothing, and too much --------------------------------------------------------------------


def test_empty_ranges_give_nothing():
    empty = [
        a_range(),
        a_range(start=5, end=5, tiered=9),
        a_range(an_object(0, (10, 100)), start=10, end=10),
        a_range(an_object(0, (10, 100)), start=4, end=4),
    ]
    assert plan(empty, split_bytes=64) == []
    assert plan(empty, split_bytes=64, min_partitions=8) == []
    assert plan([], split_bytes=64) == []


def test_range_that_cannot_be_is_a_bug():
    for wrong in [{"start": 5, "end": 4}, {"start": -1}, {"tail_bytes": -1}]:
        with case(wrong), pytest.raises(InvariantError):
            a_range(an_object(0, (10, 100)), **wrong)


def test_min_partitions_lowers_the_target():
    found = an_object(0, *[(10, 64 * KIB)] * 16)
    assert len(plan([a_range(found)], split_bytes=64 * MIB)) == 1
    partitions = plan([a_range(found)], split_bytes=64 * MIB, min_partitions=4)
    assert sizes_of(partitions) == [256 * KIB] * 4


def test_min_partitions_does_not_raise_the_target():
    found = an_object(0, *[(10, 64 * KIB)] * 16)
    assert len(plan([a_range(found)], split_bytes=64 * KIB, min_partitions=2)) == 16


def test_min_partitions_are_met_where_the_index_allows():
    """One block has nearly all of the bytes, so a target in bytes alone does not get there."""
    for wanted in [1, 2, 3, 7, 20]:
        with case(wanted):
            found = an_object(0, (1, 2), (1, 10 * MIB), *[(1, 2)] * 18)
            partitions = plan([a_range(found)], split_bytes=64 * MIB, min_partitions=wanted)
            assert len(partitions) == wanted
            edges = [pair for part in offsets_of(partitions) for pair in part]
            assert edges[0][0] == 0
            assert edges[-1][1] == 20
            assert all(before[1] == after[0] for before, after in pairwise(edges))


def test_min_partitions_of_small_topics_are_met_by_taking_them_apart():
    ranges = [a_range(an_object(0, (10, 50)), topic=f"/default/{n}") for n in "abcde"]
    assert len(plan(ranges, split_bytes=64 * MIB)) == 1
    partitions = plan(ranges, split_bytes=64 * MIB, min_partitions=4)
    assert [[s.topic[-1] for s in part.slices] for part in partitions] == [
        ["a"],
        ["b"],
        ["c"],
        ["d", "e"],
    ]
    assert len(plan(ranges, split_bytes=64 * MIB, min_partitions=99)) == 5


def test_min_partitions_cut_tails_by_offsets():
    found = a_range(tiered=0, start=0, end=100, tail_bytes=1000)
    assert offsets_of(plan([found], split_bytes=64 * MIB, min_partitions=4)) == [
        [(0, 25)],
        [(25, 50)],
        [(50, 75)],
        [(75, 100)],
    ]
    unknown = replace(found, tail_bytes=0, end=3)
    assert len(plan([unknown], split_bytes=64 * MIB, min_partitions=9)) == 3


def test_partitions_pickle_small():
    """A partition travels to its task; the index of its object does not."""
    found = an_object(0, *[(10, 256 * KIB)] * 512)
    (partition,) = plan([a_range(found)], split_bytes=1024 * MIB)
    data = pickle.dumps(partition)
    assert pickle.loads(data) == partition
    assert len(data) < 1500


# -- any topic --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """An object with all of its frames: `positions[i]` is where the frame of `start + i` begins."""

    descriptor: ObjectDescriptor
    positions: tuple[int, ...]

    def end_position(self, offset):
        return (*self.positions, self.descriptor.size_bytes)[offset + 1 - self.descriptor.start]


@st.composite
def stored_objects(draw, start, name):
    sizes = draw(st.lists(st.integers(17, 40_000), min_size=1, max_size=12))
    positions = tuple(accumulate(sizes, initial=0))
    indexed = draw(st.sets(st.integers(0, len(sizes) - 1)))
    return Stored(
        ObjectDescriptor(
            object_id=name,
            start=start,
            end=start + len(sizes),
            size_bytes=positions[-1],
            offset_index=tuple((start + i, positions[i]) for i in sorted(indexed)),
            codec=draw(st.sampled_from([None, *Codec])),
        ),
        positions[:-1],
    )


@st.composite
def topics(draw, name):
    """A range of a topic, and the objects that the bucket has."""
    first = at = draw(st.integers(0, 1000))
    found = []
    for number in range(draw(st.integers(0, 5))):
        found.append(draw(stored_objects(at, f"o{number}")))
        at = found[-1].descriptor.end
    tiered = at
    for number in range(draw(st.integers(0, 2)) if found else 0):
        # A second object over some of the same offsets, as while one replaces others.
        extra = draw(stored_objects(draw(st.integers(first, tiered - 1)), f"x{number}"))
        if extra.descriptor.end <= tiered:
            found.append(extra)
    start = draw(st.integers(first, tiered + 5))
    end = draw(st.integers(start, max(start, tiered) + 12))
    tail = end - max(start, tiered)
    item = TopicRange(
        topic=name,
        incarnation="i",
        start=start,
        end=end,
        tiered=tiered,
        descriptors=sorted((one.descriptor for one in found), key=lambda d: d.start),
        tail_bytes=draw(st.integers(0, 200_000)) if tail > 0 else 0,
    )
    return item, {one.descriptor.object_id: one for one in found}


@st.composite
def many_topics(draw):
    names = [f"/default/{number}" for number in range(draw(st.integers(1, 4)))]
    drawn = [draw(topics(name)) for name in names]
    return [item for item, _ in drawn], {item.topic: objects for item, objects in drawn}


def read(item, stored):
    """The offsets that a task gets out of a slice, reading as it would."""
    if isinstance(item, TailSlice):
        return list(range(item.start, item.end))
    found = stored[item.topic][item.object_id]
    assert item.codec == found.descriptor.codec
    assert item.object_bytes == found.descriptor.size_bytes
    first = item.index_offset - found.descriptor.start
    assert found.positions[first] == item.position
    assert item.index_offset <= item.start < item.end
    assert all(edge in found.positions for edge in item.boundaries)
    edges = [item.position, *item.boundaries, item.end_position]
    assert all(b - a >= MIB for a, b in pairwise(edges)) or not item.boundaries
    offsets = []
    for offset in range(item.index_offset, found.descriptor.end):
        if found.end_position(offset) > item.end_position:
            break
        if item.start <= offset < item.end:
            offsets.append(offset)
    return offsets


def is_indivisible(item, stored):
    if isinstance(item, TailSlice):
        return item.end - item.start == 1
    index = stored[item.topic][item.object_id].descriptor.offset_index
    return not [1 for _, position in index if item.position < position < item.end_position]


@EXAMPLES
@given(
    many_topics(),
    st.integers(1, 300_000),
    st.none() | st.integers(1, 12),
)
def test_every_offset_is_read_once_and_in_order(given_topics, split_bytes, min_partitions):
    """Goal: all invariants of the module's header at once, on any topics."""
    ranges, stored = given_topics
    partitions = plan(ranges, split_bytes=split_bytes, min_partitions=min_partitions)
    assert plan(ranges, split_bytes=split_bytes, min_partitions=min_partitions) == partitions
    assert [part.number for part in partitions] == list(range(len(partitions)))
    slices = [item for part in partitions for item in part.slices]
    assert all(part.slices for part in partitions)
    for item in ranges:
        own = [found for found in slices if found.topic == item.topic]
        offsets = [offset for found in own for offset in read(found, stored)]
        assert offsets == list(range(item.start, item.end))
        for found in own:
            assert isinstance(found, TailSlice) == (found.start >= item.tiered)
        for before, after in pairwise(own):
            if isinstance(after, ObjectPart) and before.object_id == after.object_id:
                assert before.end_position == after.position
                assert after.start == after.index_offset
    opening = min(256 * KIB, split_bytes // 256)
    # What is weighed for the target has not been cut yet.
    pieces = {(found.topic, getattr(found, "object_id", "")) for found in slices}
    total = sum(found.bytes for found in slices) + opening * len(pieces)
    for part in partitions:
        assert part.bytes == sum(found.bytes for found in part.slices)
        assert part.weight == part.bytes + opening * (len(part.slices) - 1)
        if part.weight > split_bytes + split_bytes // 8:
            (only,) = part.slices
            assert is_indivisible(only, stored)
    enough = 3 * -(-total // split_bytes) + 1
    assert len(partitions) <= max(enough, 3 * (min_partitions or 0))
    if min_partitions is not None and len(partitions) < min_partitions:
        assert all(
            len(part.slices) == 1 and is_indivisible(part.slices[0], stored) for part in partitions
        )


@EXAMPLES
@given(many_topics(), st.randoms(use_true_random=False))
def test_order_of_descriptors_does_not_matter(given_topics, random):
    ranges, _ = given_topics
    shuffled = [
        replace(item, descriptors=random.sample(item.descriptors, len(item.descriptors)))
        for item in ranges
    ]
    assert plan(shuffled, split_bytes=50_000) == plan(ranges, split_bytes=50_000)


@EXAMPLES
@given(many_topics(), st.data())
def test_missing_object_is_a_gap_that_is_named(given_topics, data):
    ranges, _ = given_topics
    item = ranges[0]
    assume(item.descriptors)
    lost = data.draw(st.sampled_from(item.descriptors))
    kept = [found for found in item.descriptors if found is not lost]
    wanted = range(item.start, item.objects_end)
    missing = [o for o in wanted if not any(d.start <= o < d.end for d in kept)]
    broken = replace(item, descriptors=kept)
    if not missing:
        plan([broken], split_bytes=1)
        return
    with pytest.raises(DataGapError) as caught:
        plan([broken], split_bytes=1)
    # The gap ends with the next object, or with what is wanted.
    end = missing[0]
    while end in missing:
        end += 1
    assert (caught.value.start, caught.value.end, caught.value.topic) == (
        missing[0],
        end,
        item.topic,
    )


# -- limits -----------------------------------------------------------------------------------


def test_topic_whose_end_went_back_stays():
    assert limit_messages({A: 9, B: 0}, {A: 4, B: 5}, 3) == {A: 9, B: 3}


@EXAMPLES
@given(
    st.dictionaries(
        st.sampled_from("abcdefgh"),
        st.tuples(st.integers(0, 2**40), st.integers(0, 30) | st.integers(0, 2**40)),
    ),
    st.integers(1, 60) | st.integers(1, 2**41),
)
def test_message_limit_holds_for_any_topics(pending, limit):
    starts = {topic: start for topic, (start, _) in pending.items()}
    ends = {topic: start + count for topic, (start, count) in pending.items()}
    new_ends = limit_messages(starts, ends, limit)
    assert set(new_ends) == set(ends)
    assert new_ends == limit_messages(
        dict(reversed(starts.items())), dict(reversed(ends.items())), limit
    )
    taken = {topic: new_ends[topic] - starts[topic] for topic in ends}
    total = sum(count for _, count in pending.values())
    assert all(0 <= taken[topic] <= count for topic, (_, count) in pending.items())
    assert sum(taken.values()) == min(limit, total)
    waiting = [topic for topic, (_, count) in pending.items() if count]
    if limit >= len(waiting):
        assert all(taken[topic] >= 1 for topic in waiting)
    for topic in waiting:
        share = -(-limit * pending[topic][1] // total)
        assert taken[topic] <= max(share, 1)
        for other in waiting:
            if pending[topic][1] > pending[other][1]:
                assert taken[topic] >= taken[other]


def test_bytes_are_cut_at_index_entries():
    item = a_range(an_object(0, *[(10, 100)] * 3), an_object(30, *[(10, 100)] * 3))
    assert [limit_bytes([item], limit)[A] for limit in (100, 199, 200, 300, 399, 400, 599)] == [
        10,
        10,
        20,
        30,
        30,
        40,
        50,
    ]


def test_tail_is_cut_by_the_average_message():
    item = a_range(an_object(0, (10, 100)), end=30, tail_bytes=200)
    assert [limit_bytes([item], limit)[A] for limit in (100, 109, 110, 155, 299)] == [
        10,
        10,
        11,
        15,
        29,
    ]
    tail = replace(item, start=10)
    assert limit_bytes([tail], 1) == {A: 11}


@EXAMPLES
@given(many_topics(), st.integers(1, 500_000))
def test_byte_limit_is_exceeded_by_one_block_a_topic_at_most(given_topics, limit):
    """Goal: what a limited batch reads, as the planner would read it, stays near the limit.

    And a stream that takes batch after batch comes to the end of every topic.
    """
    ranges, stored = given_topics
    while any(item.start < item.end for item in ranges):
        new_ends = limit_bytes(ranges, limit)
        assert new_ends == limit_bytes(ranges, limit)
        allowed = limit
        batch, rest = [], []
        for item in ranges:
            end = new_ends[item.topic]
            assert item.start <= end <= item.end
            assert end > item.start or item.start == item.end
            tail = item.end - item.objects_end
            tail_taken = max(end - item.objects_end, 0)
            taken_bytes = item.tail_bytes * tail_taken // tail if tail else 0
            batch.append(replace(item, end=end, tail_bytes=taken_bytes))
            rest.append(replace(item, start=end, tail_bytes=item.tail_bytes - taken_bytes))
            indexed = {
                found.descriptor.start + place
                for found in stored[item.topic].values()
                for place in range(len(found.positions) + 1)
                if place in (0, len(found.positions))
                or (found.descriptor.start + place, found.positions[place])
                in found.descriptor.offset_index
            }
            assert end in indexed or end >= item.tiered or end == item.end
            whole = plan([item], split_bytes=1)
            allowed += whole[0].slices[0].bytes + 1 if whole else 0
        assert sum(part.bytes for part in plan(batch, split_bytes=2**40)) <= allowed
        ranges = rest
