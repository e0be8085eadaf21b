"""How an export divides a topic among tasks."""

import pytest

from ister.base.limits import MIB
from ister.base.model import Codec
from ister.format.descriptor import ObjectDescriptor
from ister.spark.jobs.export_round import _divide_evenly
from ister.spark.planner import TopicRange

OBJECT_BYTES = 16 * MIB - 100
ROWS = 16_000


def _topic(objects: int, last_bytes: int = OBJECT_BYTES) -> TopicRange:
    found = [
        ObjectDescriptor(
            object_id=f"data-{number}.dnb1",
            start=number * ROWS,
            end=(number + 1) * ROWS,
            size_bytes=OBJECT_BYTES if number < objects - 1 else last_bytes,
            offset_index=((number * ROWS, 0),),
            codec=Codec.BINCODE2,
        )
        for number in range(objects)
    ]
    end = objects * ROWS
    return TopicRange(
        topic="/default/orders",
        incarnation="i",
        start=0,
        end=end,
        tiered=end,
        descriptors=found,
        tail_bytes=0,
    )


@pytest.mark.parametrize(("slots", "sizes"), [(1, 7 * [112]), (2, 8 * [96]), (4, 8 * [96])])
def test_slots_are_busy_to_the_end(slots, sizes):
    parts = _divide_evenly([_topic(49, last_bytes=MIB)], 128 * MIB, slots)
    found = [round(part.bytes / MIB) for part in parts]
    assert len(found) == len(sizes)
    assert all(abs(size - wanted) <= 16 for size, wanted in zip(found, sizes, strict=True))
    rounds = -(-len(found) // slots)
    assert rounds * max(found) * slots <= 1.2 * sum(found)


def test_a_topic_smaller_than_a_file_is_divided_among_slots():
    assert len(_divide_evenly([_topic(4)], 128 * MIB, 2)) == 2


def test_what_is_small_stays_together():
    assert len(_divide_evenly([_topic(2, last_bytes=100)], 128 * MIB, 64)) == 2
    assert len(_divide_evenly([_topic(1, last_bytes=MIB)], 128 * MIB, 64)) == 1
    assert not _divide_evenly([_topic(0)], 128 * MIB, 64)
